"""However a batch is shuffled, padded, packed or cut into micro-batches: the same samples are the same, and a
planted change is found in its sample, at its position."""

from __future__ import annotations

import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_core.compare import Comparison
from replay_core.compare.judging.verdict import Verdict
from replay_core.recorder import Recorder
from tests.builders import compare_fields, compare_paths, row_of
from tests.replay_core.compare.layouts import LAYOUTS, fields, samples, worse, write, write_micros

LENGTHS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=2, max_size=7)


@st.composite
def groupings(draw: Any, count: int) -> list[list[int]]:
    """The samples in some order, cut into micro-batches."""
    order = draw(st.permutations(range(count)))
    cuts = sorted(draw(st.sets(st.integers(1, count - 1), max_size=3))) if count > 1 else []
    return [list(order[start:end]) for start, end in zip([0, *cuts], [*cuts, count], strict=True)]


@st.composite
def ways(draw: Any, count: int) -> dict[str, Any]:
    return {
        "groups": draw(groupings(count)),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "ranks": draw(st.integers(1, 2)),
        "extra": draw(st.integers(0, 3)),
        "named": draw(st.booleans()),
    }


def agreed(compared: Comparison) -> None:
    assert compared.first is None, (compared.first.name, compared.first.reason)
    assert {row.verdict for row in compared.tensors if row.name != "layers.0.output"} <= {Verdict.SAME, Verdict.PADDING}
    assert not compared.skipped
    assert compared.samples_alone == 0


def test_ragged_samples_of_ranks_that_hold_as_many_tokens_are_no_cut_of_a_batch(tmp_path: Path):
    batch = samples([(1, 1), (1, 2), (1, 1), (1, 1), (1, 1), (1, 1), (1, 2)])
    one = write(tmp_path / "a", batch, groups=[[*range(7)]], layout="right", ranks=1, extra=0, named=False)
    groups = [[0, 1], [6, 3], [4, 5, 2]]
    other = write(tmp_path / "b", batch, groups=groups, layout="ragged", ranks=2, extra=0, named=False)
    agreed(compare_paths(one, other))


def test_what_no_rank_of_the_other_run_has_is_missing_however_the_ranks_share_the_step(tmp_path: Path):
    batch = samples([(1, 2), (1, 1), (1, 1), (1, 1), (1, 1), (1, 2), (1, 1)])
    way: dict[str, Any] = {"ranks": 2, "extra": 0, "named": False}
    one = write(tmp_path / "a", batch, groups=[[0], [5], [2, 3, 4, 1, 6]], layout="right", **way)
    other = write(tmp_path / "b", batch, groups=[[0, 1], [2, 3, 4, 5, 6]], layout="ragged", **way)
    compared = compare_paths(one, other)
    agreed(compared)
    assert {row.verdict for row in compared.tensors if row.name == "layers.0.output"} == {Verdict.MISSING}


def test_what_differs_in_a_sample_that_one_rank_has_alone_is_told_where_ranks_share_the_step_otherwise(tmp_path: Path):
    batch = samples([(1, 1), (1, 2), (1, 1), (1, 1), (1, 6), (1, 1)])
    way: dict[str, Any] = {"ranks": 2, "extra": 0, "named": False}
    one = write(tmp_path / "a", batch, groups=[[0], [5], [2, 3, 4, 1]], layout="right", **way)
    changed = [worse(batch[0], 1), *batch[1:]]
    compared = compare_paths(one, write(tmp_path / "b", changed, groups=[[0, 1], [2, 3, 4, 5]], layout="ragged", **way))
    assert [row.name for row in compared.tensors if row.verdict is Verdict.DIFF] == ["policy_logprobs"]


def test_padded_rows_of_ranks_that_are_as_long_together_as_another_sample_are_no_slices_of_it(tmp_path: Path):
    batch = samples([(1, 1), (1, 6), (1, 1), (1, 1)])
    one = write(tmp_path / "a", batch, groups=[[0], [1], [2, 3]], layout="right", ranks=1, extra=1, named=False)
    other = write(tmp_path / "b", batch, groups=[[0], [1], [2], [3]], layout="right", ranks=2, extra=2, named=False)
    agreed(compare_paths(one, other))


def test_ragged_samples_of_ranks_that_are_as_long_together_as_another_are_no_slices_of_it(tmp_path: Path):
    batch = samples([(1, 1), (1, 1), (1, 4), (4, 6), (1, 1), (1, 1), (1, 4)])
    way: dict[str, Any] = {"extra": 0, "named": False}
    one = write(tmp_path / "a", batch, groups=[[0, 1, 2, 4], [3], [5, 6]], layout="right", ranks=1, **way)
    other = write(tmp_path / "b", batch, groups=[[0], [1, 3, 4, 5], [2], [6]], layout="ragged", ranks=2, **way)
    agreed(compare_paths(one, other))


@pytest.mark.parametrize(
    ("lengths", "layout", "order", "ranks"),
    [([(1, 1)] * 4, "right", [0, 1, 2, 3], 1), ([(1, 1), (1, 2)] * 2, "packed", [1, 0, 3, 2], 2)],
    ids=["micro-batches", "ranks"],
)
def test_packs_of_as_many_tokens_as_another_are_neither_rows_nor_slices(
    lengths: list[tuple[int, int]], layout: str, order: list[int], ranks: int, tmp_path: Path
):
    batch = samples(lengths)
    one = write(tmp_path / "a", batch, groups=[order], layout=layout, ranks=1, extra=0, named=False)
    groups = [order[:2], order[2:]]
    other = write(tmp_path / "b", batch, groups=groups, layout="packed", ranks=ranks, extra=0, named=False)
    agreed(compare_paths(one, other))


def test_tokens_of_samples_that_are_elsewhere_are_no_padding(tmp_path: Path):
    lengths = [(2, 3), (2, 3), (2, 4), (2, 4)]
    way: dict[str, Any] = {"layout": "right", "ranks": 1, "extra": 0, "named": False}
    changed = samples(lengths)
    changed[0].tokens[0] += 1
    one = write(tmp_path / "a", samples(lengths), groups=[[0, 1], [2, 3]], **way)
    compared = compare_paths(one, write(tmp_path / "b", changed, groups=[[0, 2], [1, 3]], **way))
    assert [row.name for row in compared.tensors if row.verdict is Verdict.DIFF] == ["input_ids"]


@pytest.mark.parametrize("layout", ["packed", "ragged"])
@pytest.mark.parametrize("of_ranks", [one for one in LAYOUTS if one != "packed"])
def test_rows_of_ranks_that_are_as_long_as_each_other_are_no_slices(layout: str, of_ranks: str, tmp_path: Path):
    batch = samples([(1, 2), (1, 2)])
    one = write(tmp_path / "a", batch, groups=[[0, 1]], layout=layout, ranks=1, extra=0, named=False)
    other = write(tmp_path / "b", batch, groups=[[0], [1]], layout=of_ranks, ranks=2, extra=0, named=False)
    agreed(compare_paths(one, other))


def test_slices_of_a_pack_that_have_masks_of_their_own_are_no_samples(tmp_path: Path):
    values = torch.randn(1, 6, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(6)[None] + 5
    with Recorder(tmp_path / "a").step(0, rank=0) as record:
        record("forward_data", input_ids=ids, cu_seqlens=torch.tensor([0, 2, 4, 6]), log_probs=values, micro=0)
    recorder = Recorder(tmp_path / "b")
    for rank in range(2):
        own = slice(3 * rank, 3 * rank + 3)
        with recorder.step(0, rank=rank) as record:
            mask = torch.ones(1, 3, dtype=torch.int64)
            record("forward_data", input_ids=ids[:, own], attention_mask=mask, log_probs=values[:, own], micro=0)
    compared = compare_paths(tmp_path / "a", tmp_path / "b")
    assert compared.first is None
    assert {row.name for row in compared.tensors if row.verdict is Verdict.SAME} == {"input_ids", "policy_logprobs"}


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(data=st.data(), lengths=LENGTHS)
def test_a_batch_in_any_order_layout_and_grouping_is_the_same(data: st.DataObject, lengths: list[tuple[int, int]]):
    batch = samples(lengths)
    with tempfile.TemporaryDirectory() as directory:
        one, other = (write(Path(directory) / n, batch, **data.draw(ways(len(batch)))) for n in "ab")
        compared = compare_paths(one, other)
        agreed(compared)
        rows = [row for row in compared.tensors if row.name == "policy_logprobs"]
        # Every response token was looked at; where the bytes are equal as they stand, the others too.
        assert sum(row.figures.compared for row in rows if row.figures) >= sum(response for _, response in lengths)


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(data=st.data(), lengths=LENGTHS)
def test_a_planted_change_is_found_in_its_sample_at_its_position(data: st.DataObject, lengths: list[tuple[int, int]]):
    batch = samples(lengths)
    victim = data.draw(st.integers(0, len(batch) - 1))
    position = data.draw(st.integers(batch[victim].prompt, batch[victim].size - 1))
    changed = [worse(sample, position) if sample.name == victim else sample for sample in batch]
    how, facing = data.draw(ways(len(batch))), data.draw(ways(len(batch)))
    with tempfile.TemporaryDirectory() as directory:
        one = write(Path(directory) / "a", batch, **how)
        compared = compare_paths(one, write(Path(directory) / "b", changed, **facing))
        apart = [row for row in compared.tensors if row.verdict is Verdict.DIFF]
        assert [row.name for row in apart] == ["policy_logprobs"]
        row = apart[0]
        assert compared.first is row
        group = next(number for number, group in enumerate(how["groups"]) if victim in group)
        if row.ranks is not None:
            # Rows of several ranks are laid together as the one process has them, be it in several micro-batches.
            whole = (facing if row.ranks.which == "a" else how)["groups"]
            own = next(one for one in whole if victim in one)
            assert row.ranks.which == "b" or group % how["ranks"] in row.ranks.ranks
            assert row.token in {(order.index(victim), position) for order in (own, [*chain(*whole)])}
        else:
            assert (row.key.rank, row.key.micro) == (group % how["ranks"], group // how["ranks"])
            assert row.token == (how["groups"][group].index(victim), position)
        assert row.value_a == pytest.approx(float(batch[victim].logprobs[position - 1]))
        assert row.value_b == pytest.approx(row.value_a - 7)


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(data=st.data(), lengths=st.lists(st.tuples(st.integers(2, 5), st.integers(3, 6)), min_size=3, max_size=6))
def test_a_changed_token_id_is_found_where_it_stands_and_not_taken_for_another_sample(
    data: st.DataObject, lengths: list[tuple[int, int]]
):
    batch = samples(lengths)
    victim = data.draw(st.integers(0, len(batch) - 1))
    position = data.draw(st.integers(0, batch[victim].size - 1))
    changed = samples(lengths)
    changed[victim].tokens[position] += 1
    how, other = data.draw(ways(len(batch))), data.draw(ways(len(batch)))
    with tempfile.TemporaryDirectory() as directory:
        one = write(Path(directory) / "a", batch, **how)
        compared = compare_paths(one, write(Path(directory) / "b", changed, **other))
        assert compared.first is not None
        row = compared.first
        assert (row.name, row.verdict) == ("input_ids", Verdict.DIFF)
        group = next(group for group in how["groups"] if victim in group)
        assert row.token == (group.index(victim), position)
        assert (row.value_a, row.value_b) == (batch[victim].tokens[position], changed[victim].tokens[position])
        assert [row.name for row in compared.tensors if row.verdict is Verdict.DIFF] == ["input_ids"]


def test_two_ranks_rows_with_pads_are_no_slices_of_a_pack_as_wide_as_both(tmp_path: Path):
    """Two rows of nine beside a pack of 17 tokens and a pad, whose samples are only partly the same."""
    lengths = [(5, 6), (2, 4), (2, 4), (2, 3)]
    batch, changed = samples(lengths), samples(lengths)
    changed[0].tokens[0] += 1
    one = write(tmp_path / "a", batch, [[0], [3], [2], [1]], "right", ranks=2, extra=3)
    compared = compare_paths(one, write(tmp_path / "b", changed, [[1, 3], [2, 0]], "packed", extra=1))
    assert [row.name for row in compared.tensors if row.verdict is not Verdict.SAME] == ["input_ids"]


def test_two_ranks_packs_with_pads_are_no_slices_of_a_pack_as_wide_as_both(tmp_path: Path):
    batch = samples([(1, 4), (1, 1), (1, 4), (1, 1), (1, 5)])
    one = write(tmp_path / "a", batch, [[0, 1, 2, 3, 4]], "packed", extra=2)
    agreed(compare_paths(one, write(tmp_path / "b", batch, [[0, 2], [1, 3, 4]], "packed", ranks=2, extra=1)))


def one_micro(directory: Path, batch: list[Any], layout: str = "right", **how: Any) -> Path:
    return write(directory, batch, [list(range(len(batch)))], layout, **how)


FOUR = [(3, 4), (2, 6), (4, 2), (2, 3)]


def test_rewards_that_were_not_shuffled_with_their_samples_are_found(tmp_path: Path):
    """Equal bytes are no proof where the samples stand in another order."""
    batch = samples(FOUR)
    right = fields(batch, "right")
    shuffled = fields([batch[i] for i in (1, 0, 2, 3)], "right")
    compared = compare_fields(tmp_path, right, {**shuffled, "rewards": right["rewards"]}, stage="forward_data")
    row = row_of(compared, "reward")
    assert row.verdict is Verdict.DIFF
    assert row.token == (0, 0)
    assert row.sample_b == 1
    assert (row.raw_a, row.raw_b) == ((0,), (1,))


@pytest.mark.parametrize(("of_b", "moved"), [((0, 1, 3), False), ((1, 2, 3), False), ((0, 3, 1), True)])
def test_samples_that_one_run_lacks_are_no_other_order(of_b: tuple[int, ...], moved: bool, tmp_path: Path):
    batch = samples(FOUR)
    compared = compare_paths(one_micro(tmp_path / "a", batch), one_micro(tmp_path / "b", [batch[i] for i in of_b]))
    assert compared.counts["MISSING"] == compared.samples_alone == 1
    assert any("another order" in note for note in compared.notes) is moved


def test_both_sides_raw_indices_are_given(tmp_path: Path):
    batch = samples(FOUR)
    changed = [worse(sample, 5) if sample.name == 1 else sample for sample in batch]
    a = one_micro(tmp_path / "a", batch)
    b = write(tmp_path / "b", changed, [[3, 1, 0, 2]], "packed")
    row = row_of(compare_paths(a, b), "policy_logprobs")
    assert row.raw_a == (1, 4)
    assert row.raw_b == (0, batch[3].size + 4)
    assert (row.token, row.sample_b) == ((1, 5), 1) or row.sample_b is None


def test_a_sample_that_only_one_run_has_is_missing_and_named(tmp_path: Path):
    batch = samples(FOUR)
    a = one_micro(tmp_path / "a", batch)
    compared = compare_paths(a, write(tmp_path / "b", batch, [[2, 0, 3]], "right"))
    missing = [row for row in compared.tensors if row.verdict is Verdict.MISSING]
    assert [row.reason for row in missing] == ["1 of its 4 samples are in no record of the other run: sample 1"]
    assert compared.samples_alone == 1
    assert row_of(compared, "policy_logprobs").verdict is Verdict.SAME


def test_samples_are_paired_by_their_names_before_their_tokens(tmp_path: Path):
    """Sample 1 says something else in b; nothing but its name tells which it was."""
    batch = samples(FOUR)
    other = samples(FOUR, seed=1)
    changed = [other[1] if sample.name == 1 else sample for sample in batch]
    a = one_micro(tmp_path / "a", batch, named=True)
    compared = compare_paths(a, write(tmp_path / "b", changed, [[3, 2, 1, 0]], "left", named=True))
    assert row_of(compared, "input_ids").verdict is Verdict.DIFF
    assert {row.token[0] for row in compared.tensors if row.verdict is Verdict.DIFF and row.token} == {1}


def test_names_that_are_only_places_do_not_pair(tmp_path: Path):
    batch = samples(FOUR)
    fields_a, fields_b = (fields([batch[i] for i in order], "right") for order in ([0, 1, 2, 3], [2, 3, 1, 0]))
    numbers = {"sample_id": torch.arange(4)}
    compared = compare_fields(tmp_path, {**fields_a, **numbers}, {**fields_b, **numbers}, stage="forward_data")
    agreed(compared)
    assert any("name other samples in either run" in note for note in compared.notes)


def test_copies_of_one_sample_are_told_apart_by_what_was_computed_of_them(tmp_path: Path):
    """Two samples of one group may say the same; their logprobs need not."""
    first, second = samples([(3, 4), (3, 4)])
    twin = worse(first, 5)
    one, other = (write(tmp_path / n, batch, [[0, 1, 2]], "right") for n, batch in
                  (("a", [first, twin, second]), ("b", [second, twin, first])))  # fmt: skip
    agreed(compare_paths(one, other))


def test_a_longer_sample_is_a_shape_explained_and_compared_as_far_as_both_go(tmp_path: Path):
    batch = samples(FOUR)
    longer = samples([*FOUR[:3], (2, 4)])
    longer = [*batch[:3], longer[3]]
    longer[3].tokens[: batch[3].size] = batch[3].tokens
    compared = compare_paths(one_micro(tmp_path / "a", batch), one_micro(tmp_path / "b", longer, "left"))
    row = row_of(compared, "input_ids")
    assert row.verdict is Verdict.SHAPE
    assert "1 tokens stand only in b (of sample 3, in a's order)" in row.reason
    assert row.note is not None
    assert "is equal" in row.note
    assert row.figures is not None
    assert row.figures.compared == sum(sample.size for sample in batch)


def in_micros(directory: Path, groups: list[list[int]]) -> Path:
    """The four samples in micro-batches, each with a loss that is the sum of its samples' names."""
    batch = samples(FOUR)
    return write_micros(
        directory,
        [
            {"forward_data": fields([batch[i] for i in group], "right"), "loss": {"loss": float(sum(group))}}
            for group in groups
        ],
    )


def test_a_loss_of_a_whole_micro_batch_faces_none_of_other_micro_batches(tmp_path: Path):
    a, b = in_micros(tmp_path / "a", [[0, 1], [2, 3]]), in_micros(tmp_path / "b", [[0, 2], [1, 3]])
    compared = compare_paths(a, b)
    assert {row.name for row in compared.skipped} == {"loss"}
    assert compared.first is None
    assert compared.agrees is None


def test_micro_batches_that_only_changed_places_are_compared_whole(tmp_path: Path):
    a, b = in_micros(tmp_path / "a", [[0, 1], [2, 3]]), in_micros(tmp_path / "b", [[3, 2], [1, 0]])
    compared = compare_paths(a, b)
    agreed(compared)
    assert [row.verdict for row in compared.tensors if row.name == "loss"] == [Verdict.SAME] * 2


def test_steps_that_are_counted_otherwise_face_each_other_by_their_samples(tmp_path: Path):
    from replay_core.recorder import Recorder

    batch = samples(FOUR)
    for name, step in (("a", 3), ("b", 4)):
        with Recorder(tmp_path / name).step(step) as record:
            record("forward_data", fields(batch, "right"), micro=0)
    compared = compare_paths(tmp_path / "a", tmp_path / "b")
    agreed(compared)
    assert "step 3 of a is paired with step 4 of b: they hold the same samples" in compared.notes
