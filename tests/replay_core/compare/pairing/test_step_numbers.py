"""Numbers of micro-batches that two runs cut otherwise: compared as what they come to, or said not to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from replay_core import workbench
from replay_core.compare import Comparison, compare_runs
from replay_core.dumps import open_run
from replay_core.export.outcome import exit_code
from replay_core.recorder import Recorder
from tests.builders import there

#: Eight samples of 12 tokens, of which so many count.
COUNTS = torch.tensor([12, 3, 9, 6, 11, 4, 8, 7])
IDS = torch.randint(1, 99, (8, 12), generator=torch.Generator().manual_seed(1))
MASK = (torch.arange(12)[None] < COUNTS[:, None]).long()
#: A policy's loss of each token, which no log-probability alone tells.
EACH = torch.randn(8, 12, generator=torch.Generator().manual_seed(2)) * MASK
GRADIENT = torch.randn(16, generator=torch.Generator().manual_seed(3))
WHOLE = [[list(range(8))]]
CUTS: dict[str, list[list[list[int]]]] = {
    "four": [[[0, 1], [2, 3], [4, 5], [6, 7]]],
    "two": [[[0, 1, 2, 3], [4, 5, 6, 7]]],
    "two ranks": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
    "two ranks, unlike": [[[0, 1, 2], [3]], [[4], [5, 6, 7]]],
    "four ranks": [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]],
}  # fmt: skip
FORMS: dict[str, Callable[[list[int], int], Tensor]] = {
    "part": lambda rows, ranks: EACH[rows].sum() / MASK.sum(),
    "part for a mean over ranks": lambda rows, ranks: EACH[rows].sum() / MASK.sum() * ranks,
    "mean of its tokens": lambda rows, ranks: EACH[rows].sum() / MASK[rows].sum(),
    "mean of its samples": lambda rows, ranks: (EACH[rows].sum(1) / COUNTS[rows]).mean(),
}
#: Of whom all ways make one number.
WHOLES = {"part for a mean over ranks": "part"}


def write(
    folder: Path, cut: Sequence[Sequence[Sequence[int]]], form: Callable[[list[int], int], Tensor],
    *, gradient: Tensor | None = GRADIENT, copies: int = 1,
) -> Path:  # fmt: skip
    """copies: ranks of one tensor-parallel group, which say the same."""
    for number in range(len(cut) * copies):
        with Recorder(folder) as recorder, recorder.step(0, rank=number) as record:
            for micro, rows in enumerate(map(list, cut[number // copies])):
                record("forward_data", {"input_ids": IDS[rows], "response_mask": MASK[rows]}, micro=micro)
                record("loss", {"loss": form(rows, len(cut))}, micro=micro)
            if gradient is not None:
                record("gradient", {"grad.layers.0.mlp.up_proj.weight": gradient.reshape(4, 4)}, micro=None)
    return folder


def compared(a: Path, b: Path) -> Comparison:
    return compare_runs(open_run(a), open_run(b))


def losses(result: Comparison) -> list[str]:
    return [row.verdict.value for row in result.tensors if row.name == "loss"]


def test_a_setting_is_no_part_of_a_sum(tmp_path: Path) -> None:
    a = write(tmp_path / "a", WHOLE, lambda rows, ranks: torch.tensor(2.0))
    result = compared(a, write(tmp_path / "b", CUTS["two"], lambda rows, ranks: torch.tensor(1.0)))
    assert not any("compared as one of the step" in note for note in result.notes)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CUTS)
def test_one_process_and_another_cut_come_to_one_loss(case: str, form: str, tmp_path: Path) -> None:
    a = write(tmp_path / "a", WHOLE, FORMS[WHOLES.get(form, form)])
    b = write(tmp_path / "b", CUTS[case], FORMS[form])
    result = compared(a, b)
    assert result.agrees, [(row.name, row.skipped or row.reason) for row in [*result.tensors, *result.skipped]]
    assert losses(result) in (["SAME"], ["CLOSE"]), result.notes
    assert exit_code(workbench.compare_dumps(a, b)) == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("one", "other"), [("four", "two"), ("two ranks", "two"), ("four", "two ranks")])
def test_both_may_be_cut(one: str, other: str, form: str, tmp_path: Path) -> None:
    a, b = (write(tmp_path / name, CUTS[cut], FORMS[form]) for name, cut in (("a", one), ("b", other)))
    result = compared(a, b)
    assert result.agrees, result.skipped
    assert losses(result) in (["SAME"], ["CLOSE"]), result.notes


def test_ranks_with_the_same_samples_say_one_number(tmp_path: Path) -> None:
    a = write(tmp_path / "a", CUTS["four"], FORMS["part"], copies=2)
    result = compared(a, write(tmp_path / "b", CUTS["two"], FORMS["part"], copies=2))
    assert result.agrees, result.skipped
    assert losses(result) in (["SAME"], ["CLOSE"]) or set(losses(result)) == {"SAME"}, result.notes


def strange(rows: list[int], ranks: int) -> Tensor:
    """What no way makes one of."""
    return EACH[rows].sum().square() + float(len(rows))


def test_what_no_way_makes_one_is_noted_where_gradients_agree(tmp_path: Path) -> None:
    a = write(tmp_path / "a", WHOLE, strange)
    b = write(tmp_path / "b", CUTS["two ranks"], strange)
    result = compared(a, b)
    assert result.agrees
    assert not losses(result)
    assert any("loss is not compared" in note and "gradients of these steps" in note for note in result.notes)
    assert exit_code(workbench.compare_dumps(a, b)) == 0


def test_and_is_no_agreement_where_nothing_that_follows_from_it_is_compared(tmp_path: Path) -> None:
    a = write(tmp_path / "a", WHOLE, strange, gradient=None)
    b = write(tmp_path / "b", CUTS["two ranks"], strange, gradient=None)
    assert compared(a, b).agrees is None
    assert exit_code(workbench.compare_dumps(a, b)) == 1


@pytest.mark.parametrize("form", FORMS)
def test_no_way_is_tried_without_gradients_that_hold_it_to_its_factor(form: str, tmp_path: Path) -> None:
    """A factor of the ranks may be what a mean over them takes off again, or one that was not divided."""
    a = write(tmp_path / "a", WHOLE, FORMS[WHOLES.get(form, form)], gradient=None)
    b = write(tmp_path / "b", CUTS["two ranks, unlike"], FORMS[form], gradient=None)
    assert not compared(a, b).agrees


def test_gradients_that_part_are_a_divergence_whatever_the_loss_says(tmp_path: Path) -> None:
    a = write(tmp_path / "a", WHOLE, strange)
    result = compared(a, write(tmp_path / "b", CUTS["two ranks"], strange, gradient=1.5 * GRADIENT))
    assert result.agrees is False


@pytest.mark.parametrize(("times", "ranks"), [({1: 2.0}, [1]), ({0: 0.5}, [0]), ({0: 3.0, 2: 3.0}, [0, 2])])
def test_a_rank_whose_loss_is_times_a_factor_is_named(
    times: dict[int, float], ranks: list[int], tmp_path: Path
) -> None:
    cut = [[[0], [1]], [[2], [3]], [[4], [5]], [[6], [7]]]
    a = write(tmp_path / "a", [[[one] for one in range(8)]], FORMS["part"])
    scaled = write(
        tmp_path / "b", cut, lambda rows, _: FORMS["part"](rows, 1) * times.get(rows[0] // 2, 1.0),
        gradient=1.5 * GRADIENT,
    )  # fmt: skip
    fault = there(workbench.compare_dumps(a, scaled).get("parallel"))["faults"][0]
    assert (fault["kind"], fault["ranks"]) == ("loss scaled", ranks)


def test_other_numbers_are_put_together_too(tmp_path: Path) -> None:
    def written(folder: Path, cut: list[list[list[int]]]) -> Path:
        for rank, micros in enumerate(cut):
            with Recorder(folder) as recorder, recorder.step(0, rank=rank) as record:
                for micro, rows in enumerate(micros):
                    record("forward_data", {"input_ids": IDS[rows]}, micro=micro)
                    fields = {"aux_loss": FORMS["mean of its samples"](rows, 1), "valid_tokens": MASK[rows].sum()}
                    record("loss", {**fields, "temperature": torch.tensor(0.7)}, micro=micro)
                record("gradient", {"grad.layers.0.mlp.up_proj.weight": GRADIENT.reshape(4, 4)}, micro=None)
        return folder

    a, b = written(tmp_path / "a", WHOLE), written(tmp_path / "b", CUTS["two ranks, unlike"])
    result = compared(a, b)
    assert result.agrees, result.skipped
    assert {"aux_loss", "valid_tokens", "temperature"} <= {row.name for row in result.tensors}
    assert any("aux_loss is compared as one of the step" in note and "weighted" in note for note in result.notes)


AT_LOGITS = torch.randn(8, 12, 5, generator=torch.Generator().manual_seed(4)) * MASK[..., None]


@pytest.mark.parametrize(("times", "verdict"), [(2.0, "CLOSE"), (4.0, "DIFF")])
def test_what_a_loss_leaves_at_the_logits_is_larger_for_the_ranks_as_the_loss_is(
    times: float, verdict: str, tmp_path: Path
) -> None:
    def with_logits(folder: Path, cut: Sequence[Sequence[Sequence[int]]], of_loss: float, at_logits: float) -> Path:
        for rank, micros in enumerate(cut):
            with Recorder(folder) as recorder, recorder.step(0, rank=rank) as record:
                for micro, rows in enumerate(map(list, micros)):
                    record("forward_data", {"input_ids": IDS[rows], "response_mask": MASK[rows]}, micro=micro)
                    record("loss", {"loss": EACH[rows].sum() / MASK.sum() * of_loss}, micro=micro)
                    record("loss_gradient", {"grad.logits": AT_LOGITS[rows] * at_logits}, micro=micro)
                record("gradient", {"grad.layers.0.mlp.up_proj.weight": GRADIENT.reshape(4, 4)}, micro=None)
        return folder

    a = with_logits(tmp_path / "a", CUTS["four"], 1.0, 1.0)
    result = compared(a, with_logits(tmp_path / "b", CUTS["two ranks"], 2.0, times))
    rows = [row for row in result.tensors if row.name == "grad.logits"]
    assert {row.verdict.value for row in rows} == {verdict}
    if verdict == "CLOSE":
        assert "b's times 0.5 for the ranks, as the loss that it is of" in rows[0].reason
        assert result.agrees
