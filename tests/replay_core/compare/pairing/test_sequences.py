"""Which sequence of one run is which of the other: the cases of sglang's own token aligner's tests, and what is meant
otherwise here.

Of its other cases: a sequence that an engine computed over several forwards (a prefill and its decode steps) is not
laid together here, each forward is a step; so test_multi_step_prefill_decode, test_multi_step_accumulation,
test_sequence_exit_and_join and test_thd_vs_thd_different_step_splits do not apply. concat_steps, which cuts what is
longer, does not either: what one side alone has is said, never cut. test_execute's axes of tokens elsewhere than in
front are those of `test_axes`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from replay_core.compare import compare_runs
from replay_core.compare.pairing.matching import Pool, match
from replay_core.dumps import open_run
from replay_core.recorder import Recorder
from replay_core.samples.batch import Batch, batch_of
from tests.builders import there

Sequences = tuple[tuple[int, ...], ...]
A, B, C = (10, 20), (40, 50), (50, 60)


def pack(folder: Path, sequences: Sequences) -> Path:
    """A pack of sequences, and of each token a value that its sequence and place alone decide."""
    flat = torch.tensor([token for one in sequences for token in one])
    bounds = torch.tensor([0, *(len(one) for one in sequences)]).cumsum(0)
    places = torch.cat([torch.arange(len(one)) for one in sequences])
    hidden = (flat * 100.0 + places)[:, None] * torch.arange(1.0, 5.0)
    with Recorder(folder) as recorder, recorder.step(0) as step:
        step("batch_inputs", micro=0, input_ids=flat[None], cu_seqlens=bounds)
        step("modules", {"layers.0.output": hidden[None]}, micro=0)
    return folder


def batch(folder: Path, sequences: Sequences) -> Batch:
    (record,) = open_run(pack(folder, sequences)).select(stage="batch_inputs")
    return there(batch_of(record, record.tensors())[0])


#: sglang's case -> the sequences of x and y, and which face each other.
MATCHED: dict[str, tuple[Sequences, Sequences, set[tuple[int, int]]]] = {
    "exact_match_simple": (((10, 20, 30), B), ((10, 20, 30), B), {(0, 0), (1, 1)}),
    "exact_match_different_order": ((A, B), (B, A), {(0, 1), (1, 0)}),
    "x_has_more_sequences": ((A, (30, 40), C), ((30, 40),), {(1, 0)}),
    "y_has_more_sequences": ((A,), (A, (30, 40), C), {(0, 0)}),
    "one_x_not_reused": ((A,), (A, A), {(0, 0)}),
    "ambiguous_all_matched": ((A, A, A), (A, A, A), {(0, 0), (1, 1), (2, 2)}),
    "prefix_x_shorter": ((A,), ((10, 20, 30),), {(0, 0)}),
    "prefix_y_shorter": (((10, 20, 30),), (A,), {(0, 0)}),
    "prefix_picks_longest": (((10,), (10, 20, 30)), ((10, 20, 30, 40),), {(1, 0)}),
    "exact_preferred_over_prefix": ((A, (10, 20, 30)), (A,), {(0, 0)}),
    "prefix_fallback_after_exact": (((10, 20, 30), B), ((10, 20, 30), (40, 50, 60)), {(0, 0), (1, 1)}),
    "single_token_sequences": (((42,),), ((42,),), {(0, 0)}),
    # Here the only two that are left face each other, and their ids are said to differ; sglang leaves them alone.
    "no_match": ((A,), ((99, 88),), {(0, 0)}),
    "no_partial_overlap_without_prefix": (((10, 20, 30),), ((20, 30, 40),), {(0, 0)}),
}


@pytest.mark.parametrize("case", MATCHED)
def test_sequences_face_each_other_as_sglangs_tests_have_it(case: str, tmp_path: Path) -> None:
    x, y, expected = MATCHED[case]
    found = match(Pool([batch(tmp_path / "x", x)]), Pool([batch(tmp_path / "y", y)]))
    assert set(found.pairs) == expected


@pytest.mark.parametrize("case", ["no_match", "no_partial_overlap_without_prefix"])
def test_sequences_that_are_not_the_same_never_agree(case: str, tmp_path: Path) -> None:
    x, y, _ = MATCHED[case]
    found = compare_runs(open_run(pack(tmp_path / "a", x)), open_run(pack(tmp_path / "b", y)))
    assert found.agrees is False


def test_a_pack_faces_a_padded_batch_token_by_token(tmp_path: Path) -> None:
    """test_cross_layout_sglang_thd_vs_megatron_bshd: five tokens end to end, and two rows padded to four."""
    sequences = ((10, 20, 30), (40, 50))
    pack(tmp_path / "a", sequences)
    ids, mask, hidden = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4, 4)
    for row, one in enumerate(sequences):
        ids[row, : len(one)], mask[row, : len(one)] = torch.tensor(one), 1
        values = torch.tensor(one) * 100.0 + torch.arange(len(one))
        hidden[row, : len(one)] = values[:, None] * torch.arange(1.0, 5.0)
    for folder, off in (("b", 0.0), ("c", 1000.0)):
        hidden[1, 1] += off
        with Recorder(tmp_path / folder) as recorder, recorder.step(0) as step:
            step("batch_inputs", micro=0, input_ids=ids, attention_mask=mask)
            step("modules", {"layers.0.output": hidden}, micro=0)
    right, wrong = (compare_runs(open_run(tmp_path / "a"), open_run(tmp_path / one)) for one in "bc")
    assert right.first is None
    output = next(one for one in right.tensors if one.name == "layers.0.output")
    assert there(output.figures).compared == 5 * 4
    assert there(wrong.first).token == (1, 1)
