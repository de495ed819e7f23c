"""What a comparison does not say: results of what is off called its cause, or a weight of another rank."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from replay_core.compare import Comparison, compare_runs
from replay_core.compare.parallel import parallel, sentence
from replay_core.dumps import open_run
from replay_core.recorder import Recorder
from tests.replay_core.compare.ranks.recorded import Step, compared, random

IDS = torch.arange(16).reshape(2, 8)
GIVEN = {"forward_data": {"input_ids": IDS}}
GRADIENT = 0.01 * random(16, 8, seed=4)
WEIGHT = random(16, 8, seed=3)


def kinds(result: Comparison) -> list[str]:
    found = parallel(result.tally.of_ranks, result.together)
    return [] if found is None else [one.fault.kind for one in found.faults]


def test_a_weight_recorded_after_its_step_did_not_make_what_is_off(tmp_path: Path) -> None:
    hidden, head, gradient = random(2, 8, 32, seed=1), 0.2 * random(40, 32, seed=2), random(40, 32, seed=7)
    right = hidden @ head.T
    wrong = 1.3 * right + 0.2 * random(2, 8, 40, seed=5)
    frozen = {f"param.layers.{at}.w.weight": random(8, 8, seed=20 + at) for at in range(6)}

    def step(out: Tensor, by: float) -> Step:
        return {
            **GIVEN, "modules": {"layers.0.output": hidden, "lm_head.output": out},
            "gradient": {"grad.lm_head.weight": by * gradient},
            "param": {**frozen, "param.lm_head.weight": head - 0.05 * by * gradient},
        }  # fmt: skip

    assert "weight alone" not in kinds(compared(tmp_path, step(right, 1), step(wrong, 1.6), step(wrong, 1.6)))


def test_another_ranks_weight_made_no_output_of_this_one(tmp_path: Path) -> None:
    hidden, weight, name = random(2, 8, 32, seed=1), 0.2 * random(32, 32, seed=2), "layers.0.mlp.down_proj"
    right = hidden @ weight.T
    wrong = right + 0.3 * random(2, 8, 32, seed=5)

    def step(out: Tensor, own: Tensor) -> Step:
        return {**GIVEN, "modules": {f"{name}.output": out}, "param": {f"param.{name}.weight": own}}

    result = compared(tmp_path, step(right, weight), step(wrong, weight), step(right, 1.1 * weight))
    found = parallel(result.tally.of_ranks, result.together)
    assert found is not None
    assert "had another weight" not in (sentence(found) or "")


def test_logits_that_are_off_themselves_are_under_no_temperature(tmp_path: Path) -> None:
    logits, labels = 2 * random(2, 8, 40, seed=3), torch.roll(IDS, -1, 1)

    def step(values: Tensor) -> Step:
        own = torch.log_softmax(values.double(), -1).gather(-1, labels[..., None])[..., 0].float()
        return {**GIVEN, "modules": {"lm_head.output": values}, "forward_output": {"logprobs": own}}

    for number, ranks in enumerate(([0.5, 0.5], [1.0, 0.5])):
        result = compared(tmp_path / str(number), step(logits), *(step(by * logits) for by in ranks))
        assert "logits temperature" not in kinds(result)


def moved(directory: Path, ranks: int, made: Tensor, *, has_gradient: bool) -> Path:
    for rank in range(ranks):
        with Recorder(directory) as recorder:
            for step in (0, 1):
                with recorder.step(step, rank=rank) as record:
                    record("forward_data", {"input_ids": IDS}, micro=0)
                    if has_gradient:
                        record("gradient", {"grad.w": GRADIENT}, micro=None)
                    record("param", {"param.w": made if step else WEIGHT}, micro=None)
    return directory


def said(directory: Path, made: Tensor, *, has_gradient: bool = True) -> str:
    a = moved(directory / "a", 1, WEIGHT - GRADIENT, has_gradient=has_gradient)
    b = moved(directory / "b", 2, made, has_gradient=has_gradient)
    result = compare_runs(open_run(a), open_run(b))
    found = parallel(result.tally.of_ranks, result.together)
    assert found is not None
    return " ".join(one.fault.sentence for one in found.faults)


def test_steps_of_weights_claim_no_more_than_is_recorded(tmp_path: Path) -> None:
    assert "or its gradient is" in said(tmp_path / "1", WEIGHT - 2 * GRADIENT, has_gradient=False)
    assert "or its gradient is" not in said(tmp_path / "2", WEIGHT - 2 * GRADIENT)
    assert "moved the other way" in said(tmp_path / "3", WEIGHT + GRADIENT)
    stale = WEIGHT - GRADIENT
    stale[12:] = WEIGHT[12:]
    sentence_of_stale = said(tmp_path / "4", stale)
    assert "elements 96 to 127 of w" in sentence_of_stale
    assert "optimizer keeps" not in sentence_of_stale
