"""Logs that tests write as a trainer would, and what is diagnosed from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from replay_core.diagnose.case import Case
from replay_core.diagnose.engine import diagnose
from replay_core.diagnose.finding import Diagnosis, Finding
from replay_core.diagnose.signals import RunLog, Signals
from replay_core.dumps import open_run

#: None leaves a metric out.
Metrics = Mapping[str, float | None]

#: What TRL logs of a step that is well.
HEALTHY_TRL: Metrics = {
    "loss": -0.0132, "grad_norm": 0.42, "learning_rate": 1e-6, "reward": 0.51, "reward_std": 0.31,
    "frac_reward_zero_std": 0.125, "rewards/accuracy/mean": 0.51, "rewards/accuracy/std": 0.44, "kl": 0.00005,
    "completions/mean_length": 311.5, "completions/max_length": 702.0, "completions/clipped_ratio": 0.03,
    "entropy": 0.61, "clip_ratio/region_mean": 0.004, "step_time": 21.0,
    "sampling/sampling_logp_difference/mean": 0.008,
}  # fmt: skip

#: What verl logs of one.
HEALTHY_VERL: Metrics = {
    "actor/pg_loss": 0.004, "actor/entropy": 0.4, "actor/grad_norm": 0.21, "actor/lr": 1e-6, "actor/ppo_kl": 0.0002,
    "actor/kl_loss": 0.00004, "actor/pg_clipfrac": 0.002, "critic/score/mean": 0.5, "critic/score/max": 1.0,
    "critic/score/min": 0.0, "critic/advantages/max": 1.5, "critic/advantages/min": -1.4,
    "response_length/mean": 800.0, "response_length/max": 1900.0, "response_length/clip_ratio": 0.02,
    "timing_s/step": 60.0, "timing_s/gen": 35.0, "timing_s/update_actor": 20.0, "perf/max_memory_allocated_gb": 51.0,
    "training/rollout_probs_diff_mean": 0.003, "training/rollout_actor_probs_pearson_corr": 0.999,
    "rollout_corr/k3_kl": 0.0002,
}  # fmt: skip


def trl(steps: Sequence[Metrics], first: int = 1) -> str:
    """The steps as TRL prints them: `HEALTHY_TRL` where nothing else is said."""
    return "".join(f"{_told({**HEALTHY_TRL, **step, 'step': n})}\n" for n, step in enumerate(steps, first))


def verl(steps: Sequence[Metrics], first: int = 1) -> str:
    """The steps as verl prints them, behind Ray's prefix."""
    lines = []
    for n, step in enumerate(steps, first):
        pairs = " - ".join(f"{key}:{value}" for key, value in _told({**HEALTHY_VERL, **step}).items())
        lines.append(f"(TaskRunner pid=812, ip=10.0.0.7) step:{n} - {pairs}\n")
    return "".join(lines)


def _told(metrics: Metrics) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if value is not None}


def written(folder: Path, text: str, name: str = "train.log") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def diagnosed(folder: Path, text: str) -> Diagnosis:
    return diagnosed_path(written(folder, text))


def diagnosed_path(path: Path) -> Diagnosis:
    run = open_run(path)
    return diagnose(Case(run, Signals.of(run)))


def part_of(folder: Path, text: str) -> RunLog:
    signals = Signals.of(open_run(written(folder, text)))
    assert signals is not None
    (part,) = signals.logs
    return part


def told(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """(id, severity) of every finding, in order."""
    return [(finding.id, finding.severity) for finding in diagnosis.findings]


def worrying(diagnosis: Diagnosis) -> list[Finding]:
    """What makes the command exit with 1."""
    return [finding for finding in diagnosis.findings if finding.severity != "info"]


def only(diagnosis: Diagnosis, id: str) -> Finding:
    (found,) = [finding for finding in diagnosis.findings if finding.id == id]
    return found
