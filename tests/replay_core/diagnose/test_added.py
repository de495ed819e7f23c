"""A loss, its policy part and its KL part, as micro-batches record them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of, why_skipped


def recorded(path: Path, beta: float, stated: float | None = None, count: int = 6) -> Path:
    recorder = Recorder(path, flags={} if stated is None else {"kl_loss_coef": stated})
    draw = torch.Generator().manual_seed(5)
    for step in range(count):
        pg, kl = (float(torch.randn((), generator=draw)) for _ in range(2))
        with recorder.step(step) as write:
            write("loss", loss=pg + beta * abs(kl), pg_loss=pg, kl_loss=abs(kl), micro=0)
    recorder.close()
    return path


@pytest.mark.parametrize(
    ("beta", "stated", "words"),
    [(-0.2, None, "wrong sign (coefficient -0.2)"), (0.0, 0.2, "is not in the loss"), (0.2, 0.2, ""), (0.0, None, ""),
     (1.0, 0.2, "")],
    ids=["subtracted", "left out", "as stated", "logged alone", "recorded with its coefficient"],
)  # fmt: skip
def test_the_kl_term_of_recorded_losses_is_solved_for(
    beta: float, stated: float | None, words: str, tmp_path: Path
) -> None:
    found = of(look(recorded(tmp_path / "run", beta, stated), "D49"), "D49")
    assert (found is not None) == bool(words)
    assert found is None or (found.severity == "error" and words in found.claim)


def test_too_few_micro_batches_are_not_judged(tmp_path: Path) -> None:
    told = look(recorded(tmp_path / "run", -0.2, count=3), "D49")
    assert of(told, "D49") is None
    assert "4 micro-batches" in why_skipped(told, "D49")
