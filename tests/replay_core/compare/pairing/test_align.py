"""What faces what. Where two things cannot face each other it is said, never passed over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.compare.judging.verdict import Verdict
from replay_core.compare.pairing.align import Side, pair_micro_batches
from replay_core.recorder import Recorder
from replay_core.records import Inline, Record, RecordKey, TensorRef
from tests.builders import compare_fields, compare_paths, row_of, save_file, write_dump, write_pair
from tests.replay_core.compare.layouts import fields, samples

IDS = torch.arange(48).reshape(4, 12)
FULL = torch.ones(4, 12, dtype=torch.long)


def records(*keys: RecordKey) -> list[Record]:
    return [Record(key, Path(f"/dump/{number}"), lambda: []) for number, key in enumerate(keys)]


def facing_keys(a: list[Record], b: list[Record]) -> list[tuple[str, str]]:
    micro_pairs, _ = pair_micro_batches(a, b)
    return [tuple(str(side.records[0].key) if side.records else "-" for side in (f.a, f.b)) for f in micro_pairs]  # type: ignore[misc]


def test_a_part_that_is_none_faces_the_only_one_it_can():
    a, b = records(RecordKey(0, None, 0)), records(RecordKey(0, 3, 0), RecordKey(1, 3, 0))
    assert facing_keys(a, b) == [
        ("step 0 rank 0 tensors", "step 0 rank 0 micro 3 tensors"),
        ("-", "step 1 rank 0 micro 3 tensors"),
    ]


def test_where_it_could_face_two_it_faces_none_and_that_is_a_problem():
    a, b = records(RecordKey(0, None, 0)), records(RecordKey(0, 3, 0), RecordKey(0, 4, 0))
    micro_pairs, problems = pair_micro_batches(a, b)
    assert all(not (micro_pair.a.records and micro_pair.b.records) for micro_pair in micro_pairs)
    assert len(micro_pairs) == 3
    assert "any of 2 records" in problems[0].what


def test_an_exact_key_is_never_given_away_to_a_vague_one():
    a = records(RecordKey(0, None, 0), RecordKey(0, 1, 0))
    b = records(RecordKey(0, 1, 0), RecordKey(0, 2, 0))
    assert facing_keys(a, b) == [
        ("step 0 rank 0 tensors", "step 0 rank 0 micro 2 tensors"),
        ("step 0 rank 0 micro 1 tensors", "step 0 rank 0 micro 1 tensors"),
    ]


@pytest.mark.parametrize("order", [("sequences", "input_ids"), ("input_ids", "sequences")])
def test_two_names_of_one_meaning_are_both_compared_whatever_their_order(order: tuple[str, str], tmp_path: Path):
    a = {name: torch.arange(4) for name in order}
    b = {"sequences": torch.arange(4), "input_ids": torch.arange(4) + 1}
    compared = compare_fields(tmp_path, a, b)
    assert row_of(compared, "input_ids").verdict is Verdict.DIFF
    assert row_of(compared, "sequences").verdict is Verdict.SAME


def test_a_second_file_of_the_same_key_is_compared_too():
    ref = TensorRef("loss", "float64", (), Inline(1.0))
    side = Side([Record(RecordKey(0), Path(f"/dump/{name}"), lambda: [ref]) for name in ("a.pt", "a.jsonl")])
    side.load()
    assert [name for name, _ in side.tensors] == ["loss", "loss of a.jsonl"]


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        ([[1, 2], [3, 4, 5, 6]], [[1, 2, 3, 4], [5, 6]], "row 0 has 2 elements in a and 4 in b"),
        ([[1, 2], [3]], [[1, 2], [3], []], "a has 2 rows, b has 3"),
        ([[1, 2], [3, 4]], [[1, 2, 3, 4]], "shape [2, 2] against [1, 4]"),
    ],
)
def test_the_same_numbers_in_other_rows_are_another_shape(a: Any, b: Any, says: str, tmp_path: Path):
    row = row_of(compare_fields(tmp_path, {"tokens_of": a}, {"tokens_of": b}), "tokens_of")
    assert row.verdict is Verdict.SHAPE
    assert says in row.reason


def test_an_element_of_ragged_rows_is_named_by_its_row_and_place(tmp_path: Path):
    rows = [[1, 2, 3], [4], [5, 6, 7, 8]]
    row = row_of(compare_fields(tmp_path, {"x": rows}, {"x": [[1, 2, 3], [4], [5, 6, 9, 8]]}), "x")
    assert row.verdict is Verdict.DIFF
    assert (row.token, row.value_a, row.value_b) == ((2, 2), 7, 9)


@pytest.mark.parametrize("column", range(5))
def test_every_column_of_a_response_slice_counts(column: int, tmp_path: Path):
    """[B, A] beside [B, S]: column j is about response token j; the first and the last are looked at."""
    fields = {"input_ids": IDS, "attention_mask": FULL, "action_mask": torch.ones(4, 5, dtype=torch.bool)}
    logp = -torch.rand(4, 5)
    wrong = logp.clone()
    wrong[2, column] -= 5
    compared = compare_fields(tmp_path, {**fields, "action_log_probs": logp}, {**fields, "action_log_probs": wrong})
    row = row_of(compared, "old_logprobs")
    assert row.verdict is Verdict.DIFF
    assert row.token == (2, 7 + column)


def test_a_response_slice_faces_the_whole_row_token_by_token(tmp_path: Path):
    """A holds [B, S] in next-token order, B the action suffix: the same tokens are compared, shifted by one."""
    mask = torch.zeros(4, 12, dtype=torch.bool)
    mask[:, -5:] = True
    logp = -torch.rand(4, 12)
    a = {"input_ids": IDS, "attention_mask": FULL, "response_mask": mask, "old_log_probs": logp}
    suffix = logp[:, 6:11]  # said at 6..10, about tokens 7..11
    b = {"input_ids": IDS, "attention_mask": FULL, "action_mask": mask[:, -5:], "action_log_probs": suffix}
    row = row_of(compare_fields(tmp_path, a, b), "old_logprobs")
    assert row.verdict is Verdict.SAME
    assert row.figures is not None
    assert row.figures.compared == 20


def test_where_only_one_side_knows_the_response_mask_it_narrows_both(tmp_path: Path):
    mask = torch.zeros(4, 12, dtype=torch.bool)
    mask[:, 6:] = True
    logp = -torch.rand(4, 12)
    a = {"input_ids": IDS, "attention_mask": FULL, "response_mask": mask, "log_probs": logp}
    pack = {"input_ids": IDS.reshape(1, -1), "cu_seqlens": torch.arange(0, 49, 12), "log_probs": logp.reshape(1, -1)}
    row = row_of(compare_fields(tmp_path, a, pack), "policy_logprobs")
    assert row.verdict is Verdict.SAME
    assert row.figures is not None
    assert row.figures.compared == 24


def test_where_the_response_masks_part_both_sides_tokens_are_looked_at(tmp_path: Path):
    masks = [torch.zeros(4, 12, dtype=torch.bool) for _ in range(2)]
    masks[0][:, 4:8] = True
    masks[1][:, 5:9] = True
    logp = -torch.rand(4, 12)
    wrong = logp.clone()
    wrong[0, 7] -= 5  # about token 8, which only b's mask counts
    fields = [
        {"input_ids": IDS, "attention_mask": FULL, "response_mask": mask, "log_probs": values}
        for mask, values in zip(masks, (logp, wrong), strict=True)
    ]
    compared = compare_fields(tmp_path, *fields)
    assert row_of(compared, "response_mask").verdict is Verdict.DIFF
    assert row_of(compared, "policy_logprobs").verdict is Verdict.DIFF


def padded(mask: torch.Tensor, fill: int) -> dict[str, torch.Tensor]:
    values = torch.randn(int(mask.sum()), 8, generator=torch.Generator().manual_seed(0))
    hidden = torch.full((*mask.shape, 8), float(fill))
    hidden[mask.bool()] = values
    ids = torch.full(mask.shape, fill)
    ids[mask.bool()] = torch.arange(int(mask.sum()))
    return {"input_ids": ids, "attention_mask": mask, "layers.0.output": hidden}


@pytest.mark.parametrize("wider", [0, 8])
def test_left_against_right_padding_is_no_difference(wider: int, tmp_path: Path):
    left, right = FULL.clone(), torch.nn.functional.pad(FULL, (0, wider))
    left[0, :3] = 0
    right[0, 9:12] = 0
    compared = compare_fields(tmp_path, padded(left, 0), padded(right, 7))
    assert compared.counts["SAME"] == 2
    assert row_of(compared, "attention_mask").verdict is Verdict.PADDING
    assert compared.first is None


def test_a_mask_with_another_number_of_tokens_lays_nothing_out_alike(tmp_path: Path):
    shorter = FULL.clone()
    shorter[0, 11] = 0
    compared = compare_fields(tmp_path, padded(FULL, 0), padded(FULL, 0) | {"attention_mask": shorter})
    assert row_of(compared, "attention_mask").verdict is Verdict.DIFF


def test_a_mask_beside_bounds_is_layout_and_not_missing(tmp_path: Path):
    pack = {"input_ids": IDS.reshape(1, -1), "cu_seqlens": torch.arange(0, 49, 12)}
    compared = compare_fields(tmp_path, {"input_ids": IDS, "attention_mask": FULL}, pack)
    assert compared.counts["MISSING"] == 0
    assert "lay the same samples out differently" in compared.notes[0]
    other = {**pack, "cu_seqlens": torch.tensor([0, 13, 24, 36, 48])}
    compared = compare_fields(tmp_path / "other", {"input_ids": IDS, "attention_mask": FULL}, other)
    assert compared.counts["MISSING"] == 2


def test_a_pack_with_a_tail_of_padding_faces_one_without(tmp_path: Path):
    bounds = torch.tensor([0, 5, 9])
    hidden = torch.randn(1, 9, 4)
    tail = torch.nn.functional.pad(hidden, (0, 0, 0, 3), value=9.0)
    ids = torch.arange(12)[None]
    a = {"input_ids": ids[:, :9], "cu_seqlens": bounds, "layers.0.output": hidden}
    b = {"input_ids": ids, "cu_seqlens": bounds, "layers.0.output": tail}
    compared = compare_fields(tmp_path, a, b)
    assert row_of(compared, "layers.0.output").verdict is Verdict.SAME


def test_samples_of_padding_alone_and_samples_without_tokens_face_each_other(tmp_path: Path):
    mask = FULL.clone()
    mask[1] = 0
    mask[3] = 0
    hidden = torch.randn(4, 12, 2)
    pack = {"input_ids": IDS[mask.bool()][None], "cu_seqlens": torch.tensor([0, 12, 12, 24, 24]),
            "layers.0.output": hidden[mask.bool()][None]}  # fmt: skip
    compared = compare_fields(tmp_path, {"input_ids": IDS, "attention_mask": mask, "layers.0.output": hidden}, pack)
    assert {row.name: row.verdict for row in compared.tensors if row.name != "cu_seqlens"} == {
        "input_ids": Verdict.SAME, "layers.0.output": Verdict.SAME
    }  # fmt: skip


def test_a_batch_of_padding_alone_is_still_looked_at(tmp_path: Path):
    nothing = torch.zeros(4, 12, dtype=torch.long)
    fields = {"input_ids": IDS, "attention_mask": nothing, "log_probs": torch.zeros(4, 12)}
    compared = compare_fields(tmp_path, fields, {**fields, "log_probs": torch.ones(4, 12)})
    assert row_of(compared, "policy_logprobs").verdict is Verdict.DIFF


@pytest.mark.parametrize("mask", [torch.ones(4), torch.ones(4, 12, 3), torch.ones(4, 13), torch.ones(3, 12)])
def test_a_response_mask_that_fits_nothing_hides_nothing(mask: torch.Tensor, tmp_path: Path):
    fields = {"input_ids": IDS, "attention_mask": FULL, "response_mask": mask}
    wrong = torch.zeros(4, 12)
    wrong[0, 0] = 4
    compared = compare_fields(tmp_path, {**fields, "log_probs": torch.zeros(4, 12)}, {**fields, "log_probs": wrong})
    assert row_of(compared, "policy_logprobs").verdict is Verdict.DIFF


def test_one_row_with_a_mask_is_a_batch_of_one(tmp_path: Path):
    mask = FULL[:1].clone()
    mask[0, 8:] = 0
    noise = padded(mask, 0)
    garbage = {**noise, "layers.0.output": noise["layers.0.output"] + (1 - mask)[..., None]}
    assert row_of(compare_fields(tmp_path, noise, garbage), "layers.0.output").verdict is Verdict.PADDING


def test_stages_of_the_same_tensor_pair_across_their_names(tmp_path: Path):
    a = {"loss": {"loss": 1.0}}
    b = {"is_loss_debug": {"loss": 1.0}}
    assert compare_paths(*write_pair(tmp_path, a, b)).counts["SAME"] == 1


@pytest.mark.parametrize("held_by", ["a", "b"])
def test_what_one_side_says_again_in_a_second_stage_is_compared_once_and_that_is_said(held_by: str, tmp_path: Path):
    twice = {"loss": {"loss": 1.0}, "is_loss_debug": {"loss": 1.0}}
    both = (twice, {"loss": {"loss": 1.0}})
    compared = compare_paths(*write_pair(tmp_path, *(both if held_by == "a" else both[::-1])))
    assert compared.counts == {**dict.fromkeys(compared.counts, 0), "total": 1, "SAME": 1}
    assert any("second stage" in note for note in compared.notes)


@pytest.mark.parametrize(
    ("twice", "once"),
    [
        # Of another shape: nobody has looked whether it says the same.
        ({"loss": {"x": torch.ones(4)}, "is_loss_debug": {"x": torch.ones(5)}}, {"loss": {"x": torch.ones(4)}}),
        ({"loss": {"x": torch.ones(4)}, "is_loss_debug": {"x": torch.zeros(4)}}, {"loss": {"x": torch.ones(4)}}),
    ],
)
def test_what_one_side_says_otherwise_in_a_second_stage_is_missing(
    twice: dict[str, Any], once: dict[str, Any], tmp_path: Path
):
    compared = compare_paths(*write_pair(tmp_path, twice, once))
    assert (compared.counts["SAME"], compared.counts["MISSING"]) == (1, 1)
    (missing,) = (row for row in compared.tensors if row.verdict is Verdict.MISSING)
    assert missing.reason == "only a has it in is_loss_debug; it is not known to be what a says in loss"


def test_two_copies_of_what_the_other_side_lacks_are_both_missing(tmp_path: Path):
    a = {"loss": {"x": torch.ones(4), "loss": 1.0}, "is_loss_debug": {"x": torch.ones(4)}}
    compared = compare_paths(*write_pair(tmp_path, a, {"loss": {"loss": 1.0}}))
    assert [row.verdict for row in compared.tensors if row.name == "x"] == [Verdict.MISSING] * 2


@pytest.mark.parametrize(("change", "missing"), [(0, 0), (1, 1)])
def test_a_second_stage_in_another_layout_is_held_against_the_first_token_by_token(
    change: int, missing: int, tmp_path: Path
):
    whole, tokens = samples([(3, 4), (5, 2), (2, 6)]), samples([(3, 4), (5, 2), (2, 6)])
    tokens[1] = replace(tokens[1], tokens=tokens[1].tokens + change)
    padded, packed = fields(whole, "right"), fields(tokens, "packed")
    ids = {name: packed[name] for name in ("input_ids", "cu_seqlens")}
    a = {"batch_inputs": padded, "datums": ids}
    compared = compare_paths(*write_pair(tmp_path, a, {"batch_inputs": padded}))
    assert compared.counts["MISSING"] == missing
    assert compared.counts["SAME"] == len(padded)


def test_tensors_that_only_lay_samples_out_are_noted_once_per_place_and_role(tmp_path: Path):
    batch = samples([(3, 4), (5, 2)])
    for name, layout in (("a", "right"), ("b", "packed")):
        for role in ("actor", "critic"):
            with Recorder(tmp_path / name).step(0, role=role) as record:
                record("forward_data", fields(batch, layout), micro=0)
    notes = compare_paths(tmp_path / "a", tmp_path / "b").notes
    said = [note for note in notes if "only lay the same samples out" in note]
    assert [note.partition(":")[0] for note in said] == ["step 0 rank 0 micro 0", "step 0 rank 0 micro 0 critic"]


def test_two_files_face_each_other_though_neither_names_a_step(tmp_path: Path):
    a = save_file(tmp_path / "a.pt", {"w": torch.ones(3)})
    assert compare_paths(a, save_file(tmp_path / "b.pt", {"w": torch.ones(3)})).counts["SAME"] == 1


def test_a_file_faces_the_only_micro_batch_of_a_dump(tmp_path: Path):
    a = save_file(tmp_path / "a.pt", {"w": torch.ones(3)})
    b = write_dump(tmp_path / "b", {"tensors": {"w": torch.ones(3)}})
    assert compare_paths(a, b).counts["SAME"] == 1


@pytest.mark.parametrize("side", [0, 1])
def test_files_that_only_their_order_numbers_face_each_other_by_name(side: int, tmp_path: Path):
    """A folder of tensors of no known dialect: one file more must not make every later one face its neighbour."""
    runs = (tmp_path / "a", tmp_path / "b")
    for run in runs:
        for step in (1, 2):
            for number, name in enumerate(("alpha", "beta", "gamma")):
                save_file(run / f"step_{step}/{name}.pt", {"logits": torch.full((2, 3), 10.0 * step + number)})
    (runs[side] / "step_2/alpha.pt").unlink()
    compared = compare_paths(*runs)
    verdicts = [row.verdict for row in compared.tensors]
    assert verdicts.count(Verdict.SAME) == 5
    assert verdicts.count(Verdict.MISSING) == 1
    assert len(verdicts) == 6
