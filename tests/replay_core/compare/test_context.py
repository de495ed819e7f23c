"""What is said of a tensor that one run alone has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from replay_core import workbench
from replay_core.compare import compare_runs
from replay_core.dumps import open_run
from replay_core.export.outcome import exit_code
from tests.replay_core.compare.ranks.recorded import Step, random, write

IDS = torch.arange(32).reshape(2, 16) + 2
OUTPUT, WEIGHTS = random(2, 16, 8), random(2, 4, 16, 16, seed=1).softmax(-1)


def step(**modules: torch.Tensor) -> Step:
    return {
        "batch_inputs": {"input_ids": IDS},
        "modules": {f"layers.0.{name.replace('__', '.')}": value for name, value in modules.items()},
    }


def test_attentions_weights_that_one_implementation_returns_are_noted_and_nothing_that_lacks(tmp_path: Path) -> None:
    eager = step(self_attn__output__0=OUTPUT, self_attn__output__1=WEIGHTS)
    a, b = write(tmp_path / "a", eager), write(tmp_path / "b", step(self_attn__output__0=OUTPUT))
    doc = workbench.compare_dumps(a, b)
    assert (doc["counts"]["MISSING"], exit_code(doc)) == (0, 0)
    assert [note for note in doc["notes"] if note.startswith("1 tensors of attention weights, which a alone returned")]


@pytest.mark.parametrize(
    "other",
    [{"self_attn__output__1": random(2, 16, 8)}, {"mlp__output__1": WEIGHTS}, {"self_attn__output__2": WEIGHTS}],
)
def test_anything_else_that_one_run_lacks_is_missing(other: dict[str, torch.Tensor], tmp_path: Path) -> None:
    a = write(tmp_path / "a", step(self_attn__output__0=OUTPUT, mlp__output__0=OUTPUT, **other))
    b = write(tmp_path / "b", step(self_attn__output__0=OUTPUT, mlp__output__0=OUTPUT))
    found = compare_runs(open_run(a), open_run(b))
    assert found.counts["MISSING"] == 1
