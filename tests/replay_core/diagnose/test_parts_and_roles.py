"""Parts of a reward, the one role of a run, a critic that moves too far, and since when a figure is what it is: each
fault beside its healthy relative.
"""

from __future__ import annotations

import random
from pathlib import Path

from replay_core.diagnose.finding import Diagnosis
from tests.replay_core.diagnose.logs import diagnosed, told, verl, worrying


def _ids(found: Diagnosis) -> list[str]:
    return [one.id for one in worrying(found)]


# ---- a critic


def _critic(far: float, clipped: float = 0.57) -> str:
    draw = random.Random(5)
    lines = []
    for n in range(40):
        mean = 0.5 + far * (-1) ** n * (n % 4 == 3) + draw.gauss(0, 0.05)
        lines.append({
            "critic/vf_clipfrac": clipped + draw.gauss(0, 0.01), "critic/values/mean": mean,
            "critic/values/max": mean + 0.3 + 1.2 * far, "critic/values/min": mean - 0.3 - 1.2 * far,
            "critic/returns/mean": 0.5 + draw.gauss(0, 0.02), "critic/returns/max": 1.0, "critic/returns/min": 0.0,
            "critic/vf_explained_var": -20.0 - n % 3 if far else -0.2 + 0.01 * n, "critic/vf_loss": 2.0 + draw.random(),
        })  # fmt: skip
    return verl(lines)


def test_a_critic_whose_values_leave_the_returns_is_not_held_still(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, _critic(3.0))
    assert ("D63", "error") in told(found)
    assert "D71" not in [one.id for one in found.findings]


def test_a_critic_that_is_clipped_within_its_returns_is_held_still(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, _critic(0.0))
    assert "D71" in _ids(found)
    assert "D63" not in _ids(found)
