"""Ranks that were given other samples than the other run's step has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from replay_core import workbench
from replay_core.compare.misdealt import misdealt
from replay_core.dumps import open_run
from replay_core.recorder import Recorder
from tests.builders import there

#: Of each of two steps: samples of two ranks.
STEPS = torch.randint(2, 99, (2, 4, 12), generator=torch.Generator().manual_seed(1))
LOST = torch.randint(2, 99, (1, 12), generator=torch.Generator().manual_seed(2))


def run(folder: Path, ranks: list[list[Tensor]]) -> Path:
    """By rank, the samples of each step."""
    for rank, steps in enumerate(ranks):
        with Recorder(folder) as recorder:
            for number, ids in enumerate(steps):
                with recorder.step(number, rank=rank) as record:
                    record("batch_inputs", {"input_ids": ids.contiguous()}, micro=0)
                    record("loss", {"loss": ids.float().mean()}, micro=0)
    return folder


RIGHT = [[STEPS[0, :2], STEPS[1, :2]], [STEPS[0, 2:], STEPS[1, 2:]]]
WHOLE = [[STEPS[0], STEPS[1]]]
WRONG: dict[str, tuple[list[Tensor], int, str, str]] = {
    "the step before's": (
        [STEPS[0, 2:], STEPS[0, 2:]], 1, "other samples", "was given 2 of 2 samples of step 0 in step 1",
    ),
    "others": (
        [torch.cat([STEPS[0, 2:3], LOST]), STEPS[1, 2:]], 0, "other samples",
        "was given 1 of 2 samples that a has on no rank",
    ),
    "one twice, another lost": (
        [torch.cat([STEPS[0, 2:3]] * 2), STEPS[1, 2:]], 0, "same samples",
        "sample 2 of the other run is on ranks 1 of b more than once, and sample 3 on none of its ranks",
    ),
}  # fmt: skip


@pytest.mark.parametrize("against", ["the same ranks", "one process"])
@pytest.mark.parametrize("case", WRONG)
def test_the_rank_and_where_its_samples_are_from_are_said(case: str, against: str, tmp_path: Path) -> None:
    steps, step, kind, said = WRONG[case]
    a = run(tmp_path / "a", RIGHT if against == "the same ranks" else WHOLE)
    doc = workbench.compare_dumps(a, run(tmp_path / "b", [RIGHT[0], steps]))
    fault = there(doc.get("parallel"))["faults"][0]
    assert (fault["kind"], fault["ranks"], fault["step"]) == (kind, [1], step)
    assert said in fault["sentence"]


def test_a_rank_that_has_one_micro_batch_again_is_told_which(tmp_path: Path) -> None:
    def micros(folder: Path, given: list[list[Tensor]]) -> Path:
        for rank, own in enumerate(given):
            with Recorder(folder) as recorder, recorder.step(0, rank=rank) as record:
                for micro, ids in enumerate(own):
                    record("batch_inputs", {"input_ids": ids.contiguous()}, micro=micro)
        return folder

    first, second = STEPS[0].split(2), STEPS[1].split(2)
    a = micros(tmp_path / "a", [list(first), list(second)])
    doc = workbench.compare_dumps(a, micros(tmp_path / "b", [list(first), [second[0], second[0]]]))
    fault = there(doc.get("parallel"))["faults"][0]
    assert (fault["kind"], fault["ranks"]) == ("other samples", [1])
    assert (
        "was given 4 of 4 samples more often than a has them in step 0 (a has them in micro-batch 0)"
        in (fault["sentence"])
    )


def test_the_same_samples_on_other_ranks_are_none(tmp_path: Path) -> None:
    doc = workbench.compare_dumps(run(tmp_path / "a", RIGHT), run(tmp_path / "b", RIGHT[::-1]))
    found = doc.get("parallel")
    assert found is None or not any(one["kind"] == "other samples" for one in found["faults"])


def recorded(folder: Path, ranks: list[dict[str, dict[str, Tensor]]]) -> Path:
    """One step of as many ranks: stage -> fields."""
    for rank, stages in enumerate(ranks):
        with Recorder(folder) as recorder, recorder.step(0, rank=rank) as record:
            for stage, fields in stages.items():
                record(stage, fields, micro=0)
    return folder


def given(ids: Tensor, loss: float = 1.0, **more: Tensor) -> dict[str, dict[str, Tensor]]:
    return {"batch_inputs": {"input_ids": ids.contiguous(), **more}, "loss": {"loss": torch.tensor(loss)}}


PADDED = torch.cat([STEPS[0, :2], torch.cat([STEPS[0, 2:, :7], torch.zeros(2, 5, dtype=torch.int64)], 1)])
SAMPLED = {"rollout": {"input_ids": PADDED[:2].contiguous()}}
SAME: dict[str, tuple[list[dict[str, dict[str, Tensor]]], list[dict[str, dict[str, Tensor]]]]] = {
    "a rank of a was not recorded": (
        [{"loss": {"loss": torch.tensor(1.0)}}, given(PADDED[2:])], [given(PADDED[:2]), given(PADDED[2:], 2.0)],
    ),
    "padded as far as the rank's longest": ([given(PADDED)], [given(PADDED[:2]), given(PADDED[2:, :7], 2.0)]),
    "padding that one of them marks": (
        [given(PADDED, attention_mask=(PADDED != 0).long())], [given(PADDED[:2]), given(PADDED[2:], 2.0)],
    ),
    "recorded when sampled and when trained": ([given(PADDED)], [SAMPLED | given(PADDED[:2]), given(PADDED[2:], 2.0)]),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_the_same_samples_otherwise_recorded_are_no_others(case: str, tmp_path: Path) -> None:
    a, b = (recorded(tmp_path / which, ranks) for which, ranks in zip("ab", SAME[case], strict=True))
    found = workbench.compare_dumps(a, b).get("parallel")
    assert found is None or not any(one["kind"] == "other samples" for one in found["faults"])


@pytest.mark.parametrize("micros", [1, 2])
def test_a_rank_that_lost_samples_is_told_by_what_the_others_have(micros: int, tmp_path: Path) -> None:
    def shared(folder: Path, ranks: list[list[Tensor]]) -> Path:
        for rank, own in enumerate(ranks):
            with Recorder(folder) as recorder, recorder.step(0, rank=rank) as record:
                for micro, ids in enumerate(own):
                    record("batch_inputs", {"input_ids": ids.contiguous()}, micro=micro)
                    record("loss", {"loss": ids.float().mean()}, micro=micro)
                total = sum(float(ids.float().mean()) for ids in own)
                record("gradient", {"grad.norm.weight": torch.full((32,), total)}, micro=None)
        return folder

    samples = STEPS.reshape(-1, 12)
    a = shared(tmp_path / "a", [list(half.split(2)) for half in samples.split(4)])
    pairs = list(samples.split(2))
    ranks = [list(pair.split(2 // micros)) for pair in pairs]
    ranks[2] = [pairs[2][:1]]
    doc = workbench.compare_dumps(a, shared(tmp_path / "b", ranks))
    fault = there(doc.get("parallel"))["faults"][0]
    assert (fault["kind"], fault["ranks"]) == ("lost samples", [2])
    assert "was given 1 sample in step 0" in fault["sentence"]
    assert ("micro-batch 1 is missing" in fault["sentence"]) == (micros == 2)


@pytest.mark.parametrize("is_whole", [False, True])
def test_ranks_that_have_others_samples_in_place_of_their_own_are_told(is_whole: bool, tmp_path: Path) -> None:
    halves = [[STEPS[0, :2]], [STEPS[0, 2:]]]
    a = run(tmp_path / "a", [[torch.cat([STEPS[0], STEPS[1]])]])
    later = [[STEPS[1, :2]], [STEPS[1, 2:]]] if is_whole else halves
    b = run(tmp_path / "b", [*halves, *later])
    fault = misdealt(open_run(a).records, open_run(b).records, 0, "actor")
    if is_whole:
        assert fault is None
        return
    assert (there(fault).kind, there(fault).ranks) == ("samples twice", (2, 3))
    assert "the samples of ranks 0 and 1 once more" in there(fault).sentence
    assert "4 of a's 8 samples of the step are on no rank" in there(fault).sentence


def test_ranks_that_share_the_work_of_a_sample_have_none_twice(tmp_path: Path) -> None:
    a = run(tmp_path / "a", [[STEPS[0]]])
    b = run(tmp_path / "b", [[STEPS[0, :2]], [STEPS[0, 2:]], [STEPS[0, :2]], [STEPS[0, 2:]]])
    assert misdealt(open_run(a).records, open_run(b).records, 0, "actor") is None
