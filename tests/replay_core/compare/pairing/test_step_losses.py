"""Losses of micro-batches that two runs cut otherwise: one of the step, where each run's own log-probabilities tell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from replay_core.compare import Comparison, compare_runs
from replay_core.dumps import open_run
from replay_core.recorder import Recorder

#: Four samples of 12 tokens, of which so many count.
COUNTS = (12, 3, 9, 6)


def _write(
    directory: Path, cut: Sequence[Sequence[Sequence[int]]], form: str, *, off: float = 0.0, is_told: bool = True,
    ranks: int = 1,
) -> Path:  # fmt: skip
    """A step whose ranks have these micro-batches of samples. form: what each loss is of; off: by how much the last
    is wrong; is_told: whether log-probabilities are recorded; ranks: the number that a loss is multiplied by.
    """
    ids_BT = torch.randint(1, 99, (4, 12), generator=torch.Generator().manual_seed(1))
    logprobs_BT = -torch.rand(4, 12, generator=torch.Generator().manual_seed(2)) - 0.1
    mask_BT = torch.arange(12)[None] < torch.tensor(COUNTS)[:, None]
    for rank, micros in enumerate(cut):
        with Recorder(directory) as recorder, recorder.step(0, rank=rank) as record:
            for micro, rows in enumerate(map(list, micros)):
                total = -(logprobs_BT * mask_BT)[rows].sum()
                by = {"mean": mask_BT[rows].sum(), "part": mask_BT.sum(), "strange": torch.tensor(7.0)}[form]
                loss = total / by * ranks
                if rank == len(cut) - 1 and micro == len(micros) - 1:
                    loss = loss + off
                fields = {"input_ids": ids_BT[rows], "response_mask": mask_BT[rows].long()}
                if is_told:
                    fields["log_probs"] = logprobs_BT[rows]
                record("forward_data", fields, micro=micro)
                record("loss", {"loss": loss}, micro=micro)
            record("gradient", {"grad.norm.weight": torch.ones(8)}, micro=None)
    return directory


WHOLE = [[[0, 1, 2, 3]]]
CUTS = {
    "four": [[[0], [1], [2], [3]]],
    "two and two": [[[0, 1], [2, 3]]],
    "unlike": [[[0, 1, 2], [3]]],
    "two ranks": [[[0], [1]], [[2], [3]]],
}


def _compared(tmp_path: Path, a: Path, b: Path) -> Comparison:
    return compare_runs(open_run(a), open_run(b))


@pytest.mark.parametrize("form", ["mean", "part"])
@pytest.mark.parametrize("case", CUTS)
def test_losses_that_tell_what_they_are_of_are_one_of_the_step(case: str, form: str, tmp_path: Path):
    ranks = len(CUTS[case]) if form == "part" else 1
    a = _write(tmp_path / "a", WHOLE, "mean")
    compared = _compared(tmp_path, a, _write(tmp_path / "b", CUTS[case], form, ranks=ranks))
    losses = [row for row in [*compared.tensors, *compared.skipped] if row.name == "loss"]
    assert [(row.verdict.value, row.key.micro) for row in losses if row.skipped is None] in (
        [("SAME", None)], [("CLOSE", None)],
    )  # fmt: skip
    assert compared.agrees, [(row.name, row.skipped) for row in compared.skipped]
    assert any("each run's own log-probabilities tell" in note for note in compared.notes)


def test_both_runs_may_cut_it(tmp_path: Path):
    a, b = (_write(tmp_path / name, CUTS[case], form) for name, case, form in
            (("a", "four", "mean"), ("b", "two and two", "part")))  # fmt: skip
    compared = _compared(tmp_path, a, b)
    assert compared.agrees, [(row.name, row.skipped) for row in compared.skipped]


@pytest.mark.parametrize(
    ("form", "told", "off"),
    [("strange", True, 0.0), ("part", True, 0.5)],
    ids=["of nothing known", "one that is off"],
)
def test_what_does_not_tell_is_not_compared_and_never_agrees(form: str, told: bool, off: float, tmp_path: Path):
    a = _write(tmp_path / "a", WHOLE, "mean", is_told=told)
    compared = _compared(tmp_path, a, _write(tmp_path / "b", CUTS["four"], form, is_told=told, off=off))
    assert not compared.agrees
    assert [row.name for row in compared.skipped] == ["loss"]
    assert not any("log-probabilities tell" in note for note in compared.notes)


def test_a_step_whose_losses_tell_and_differ_is_off(tmp_path: Path):
    """Log-probabilities that are off move the loss with them: it is judged, not made to agree."""
    a, b = _write(tmp_path / "a", WHOLE, "mean"), tmp_path / "b"
    ids_BT = torch.randint(1, 99, (4, 12), generator=torch.Generator().manual_seed(1))
    mask_BT = torch.arange(12)[None] < torch.tensor(COUNTS)[:, None]
    logprobs_BT = 2 * (-torch.rand(4, 12, generator=torch.Generator().manual_seed(2)) - 0.1)
    with Recorder(b) as recorder, recorder.step(0, rank=0) as record:
        for micro in range(4):
            rows = [micro]
            fields = {"input_ids": ids_BT[rows], "response_mask": mask_BT[rows].long(), "log_probs": logprobs_BT[rows]}
            record("forward_data", fields, micro=micro)
            loss = -(logprobs_BT * mask_BT)[rows].sum() / mask_BT.sum()
            record("loss", {"loss": loss}, micro=micro)
        record("gradient", {"grad.norm.weight": torch.ones(8)}, micro=None)
    compared = _compared(tmp_path, a, b)
    row = next(row for row in compared.tensors if row.name == "loss")
    assert row.verdict.value == "DIFF"


def test_a_cut_that_is_one_in_both_runs_keeps_its_losses(tmp_path: Path):
    a, b = (_write(tmp_path / name, CUTS["four"], "part") for name in "ab")
    compared = _compared(tmp_path, a, b)
    assert [row.key.micro for row in compared.tensors if row.name == "loss"] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("loss", "off", "tells"),
    [("cross entropy", 0.0, True), ("cross entropy", 0.05, False), ("probability", 0.0, False)],
)
def test_logits_and_what_the_loss_left_at_them_tell_as_log_probabilities_do(
    loss: str, off: float, tells: bool, tmp_path: Path
) -> None:
    """A stage of a pipeline records its logits; each micro-batch's loss is its part of the mean over all tokens."""
    ids_BT = torch.randint(1, 99, (4, 12), generator=torch.Generator().manual_seed(1))
    every_BTV = torch.randn(4, 12, 99, generator=torch.Generator().manual_seed(2))

    def written(directory: Path, micros: list[list[int]], off: float) -> Path:
        with Recorder(directory) as recorder, recorder.step(0, rank=0) as record:
            for micro, rows in enumerate(micros):
                logits = every_BTV[rows].clone().requires_grad_()
                logprobs = logits.log_softmax(-1).gather(-1, ids_BT[rows].roll(-1, 1)[..., None])[:, :-1]
                value = -(logprobs if loss == "cross entropy" else logprobs.exp()).sum() / (4 * 11)
                value.backward()
                record("batch_inputs", {"input_ids": ids_BT[rows]}, micro=micro)
                record("modules", {"forward.output.logits": logits.detach()}, micro=micro)
                record("loss_gradient", {"grad.forward.output.logits": logits.grad}, micro=micro)
                record("loss", {"loss": value.detach() + (off if micro else 0.0)}, micro=micro)
        return directory

    a, b = written(tmp_path / "a", [[0, 1, 2, 3]], 0.0), written(tmp_path / "b", [[0, 1], [2, 3]], off)
    compared = _compared(tmp_path, a, b)
    assert bool(compared.agrees) == tells
    assert [row.verdict.value for row in compared.tensors if row.name == "loss"] in (
        [["CLOSE"], ["SAME"]] if tells else [[]]
    )
    assert [row.name for row in compared.skipped] == ([] if tells else ["loss"])
