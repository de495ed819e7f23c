"""Steps that a trainer prints as a head and bullets below it."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay_core.dumps import open_run
from replay_core.dumps.bulleted_steps import BulletedSteps
from tests.replay_core.diagnose.logs import diagnosed_path

#: As NeMo-RL's GRPO loop prints it.
STEP = """\

========================= Step {n}/40 =========================
▶ Preparing batch...
▶ Generating responses for batch of size 48...

📊 Training Results:
  • Loss: -0.0021
  • Generation KL Error: {kl}
  • Avg Reward: 0.4{n}00
  • Mean Generation Length: 1,325.3184

⏱️  Timing:
  • Total step time: 31.20s
  • policy_training: 11.05s (35.4%)

📊 Validation Results:
    • Accuracy: 0.1133
"""


def test_a_head_and_its_bullets_are_a_step(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text("loading\n" + "".join(STEP.format(n=n, kl=0.0007) for n in (1, 2)))
    run = open_run(path)
    assert run.steps() == [1, 2]
    assert {ref.name: ref.source.value for ref in run.records[0].tensors()} == {  # type: ignore[union-attr]
        "Loss": -0.0021, "Generation KL Error": 0.0007, "Avg Reward": 0.41, "Mean Generation Length": 1325.3184,
        "Total step time": 31.2, "timing/policy_training": 11.05, "validation/Accuracy": 0.1133,
    }  # fmt: skip


def test_what_its_bullets_say_is_judged(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text("".join(STEP.format(n=n, kl=0.31) for n in range(1, 9)))
    told = [one for one in diagnosed_path(path).findings if one.id == "D09"]
    assert [(one.severity, one.claim) for one in told] == [
        (
            "error",
            "engine and trainer disagree: Generation KL Error is 0.31, and as much from the first step on, which old "
            "weights do not make",
        )
    ]


@pytest.mark.parametrize("line", ["  • Loss: 0.5", "- 3: 4", "* loss: none of it", "=== Step 3 ==="])
def test_bullets_below_no_head_are_prose(line: str) -> None:
    assert BulletedSteps().take(line) == (None, {})
