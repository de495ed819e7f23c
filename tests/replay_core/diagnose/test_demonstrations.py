"""Supervised runs: what the loss is divided by, what a resume forgets, and a distance to a teacher that is turned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.diagnose.finding import Finding
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of

WIDTH = 14


def _demonstrations(folder: Path, how: str, *, items: bool = True, even: bool = False) -> Finding | None:
    """how: what a micro-batch's sum is divided by: update, own, attended, slots."""
    with Recorder(folder, flags={"gradient_accumulation_steps": 2}) as recorder:
        for step in range(3):
            draw = torch.Generator().manual_seed(step)
            micros = []
            for micro in range(2):
                rows = 3 if even or micro else 8
                length = torch.randint(6, WIDTH, (rows, 1), generator=draw)
                place = torch.arange(WIDTH)
                counts = (place >= 3) & (place < length)
                ids = torch.randint(5, 90, (rows, WIDTH), generator=draw)
                logps = -4 * torch.rand(rows, WIDTH - 1, generator=draw)
                micros.append((ids, (place < length).long(), counts, logps))
            every = sum(int(counts.sum()) for _, _, counts, _ in micros)
            with recorder.step(step) as record:
                for micro, (ids, attention, counts, logps) in enumerate(micros):
                    by = {"update": every, "own": 2 * int(counts.sum()), "attended": 2 * int(attention.sum()),
                          "slots": 2 * ids.numel()}[how]  # fmt: skip
                    total = -(logps.double() * counts[:, 1:]).sum()
                    record("forward_data", micro=micro, input_ids=ids, attention_mask=attention,
                           labels=torch.where(counts, ids, -100), log_probs=logps)  # fmt: skip
                    more: dict[str, Any] = {"num_items_in_batch": every} if items else {}
                    record("loss", micro=micro, loss=float(total / by), **more)
    return of(look(folder, "D168"), "D168")


@pytest.mark.parametrize(
    ("how", "severity", "words"),
    [("own", "warning", "mean over its own tokens"), ("attended", "error", "attended"), ("slots", "error", "slot")],
)
def test_a_loss_that_is_divided_by_other_tokens_is_told(how: str, severity: str, words: str, tmp_path: Path) -> None:
    found = _demonstrations(tmp_path / "run", how)
    assert found is not None
    assert found.severity == severity
    assert words in found.claim


@pytest.mark.parametrize("said", [{"how": "update"}, {"how": "own", "items": False}, {"how": "update", "even": True}])
def test_a_mean_over_the_tokens_that_count_is_quiet(said: dict[str, Any], tmp_path: Path) -> None:
    assert _demonstrations(tmp_path / "run", **said) is None


def _resumed(folder: Path, scales: list[float], states: list[int]) -> Finding | None:
    with Recorder(folder) as recorder:
        for step, (scale, state) in enumerate(zip(scales, states, strict=True)):
            held = torch.full((32,), state, dtype=torch.uint8)
            with recorder.step(step) as record:
                record("optimizer", grad_norm=1.0, loss_scale=scale, rng_state=held)
    return of(look(folder, "D169"), "D169")


FALLEN = [65536.0, 32768.0, 16384.0, 8192.0, 8192.0, 16384.0]


def test_a_scale_that_is_back_at_its_beginning_was_made_anew(tmp_path: Path) -> None:
    found = _resumed(tmp_path / "run", [*FALLEN[:4], 65536.0, 32768.0], list(range(6)))
    assert found is not None
    assert found.steps == (4,)
    assert "8192 back to 65536" in found.claim


def test_a_random_state_that_comes_again_is_told(tmp_path: Path) -> None:
    found = _resumed(tmp_path / "run", FALLEN, [0, 1, 2, 0, 1, 2])
    assert found is not None
    assert "of step 3 is that of step 0" in found.claim


@pytest.mark.parametrize("states", [list(range(6)), [7] * 6])
def test_scales_that_move_by_two_and_states_that_are_set_are_quiet(states: list[int], tmp_path: Path) -> None:
    assert _resumed(tmp_path / "run", FALLEN, states) is None


def test_moments_that_are_lost_are_told_where_their_counter_goes_on(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    squares = torch.zeros(64)
    with Recorder(tmp_path / "run") as recorder:
        for step in range(8):
            squares = (0.0 if step == 5 else 0.95) * squares + 0.05 * torch.rand(64, generator=draw) ** 2
            with recorder.step(step) as record:
                record("optimizer", **{"state.w.exp_avg_sq": squares, "state.w.step": torch.tensor(step + 1.0)})
    found = of(look(tmp_path / "run", "D161"), "D161")
    assert found is not None
    assert found.steps == (5,)


def _distilled(folder: Path, sign: float) -> Finding | None:
    with Recorder(folder, flags={"loss_type": "reverse_kl"}) as recorder:
        for step in range(4):
            draw = torch.Generator().manual_seed(step)
            student, teacher = torch.randn(2, 4, 8, 30, generator=draw).log_softmax(-1)
            ids = torch.randint(0, 30, (4, 9), generator=draw)
            own, theirs = (each.gather(-1, ids[:, 1:, None])[..., 0] for each in (student, teacher))
            each = sign * (student.exp() * (student - teacher)).sum(-1)
            with recorder.step(step) as record:
                record("forward_data", micro=0, input_ids=ids, attention_mask=torch.ones_like(ids),
                       response_mask=torch.ones(4, 8, dtype=torch.int64), log_probs=own, teacher_log_probs=theirs,
                       token_loss=each)  # fmt: skip
                record("loss", micro=0, loss=float(each.mean()))
    return of(look(folder, "D170"), "D170")


def test_a_divergence_below_0_drives_the_policy_away_from_its_teacher(tmp_path: Path) -> None:
    found = _distilled(tmp_path / "turned", -1.0)
    assert found is not None
    assert found.severity == "error"
    assert _distilled(tmp_path / "right", 1.0) is None


def test_a_first_token_that_is_labelled_is_an_item_to_trainers_that_count_labels(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    with Recorder(tmp_path / "run") as recorder:
        for step in range(4):
            ids = torch.randint(5, 90, (4, 12), generator=draw)
            logps = -3 * torch.rand(4, 11, generator=draw)
            with recorder.step(step) as record:
                record("forward_data", micro=0, input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids.clone(),
                       log_probs=logps)  # fmt: skip
                record("loss", micro=0, loss=float(-logps.double().sum() / ids.numel()))
    assert of(look(tmp_path / "run", "D168"), "D168") is None


def test_a_random_state_goes_on_from_stage_to_stage_and_from_step_to_step(tmp_path: Path) -> None:
    with Recorder(tmp_path / "run") as recorder:
        for step in range(5):
            with recorder.step(step) as record:
                for at, stage in enumerate(("rollout", "loss", "optimizer")):
                    record(stage, rng_state=torch.full((32,), 2 * step + at, dtype=torch.uint8))
    assert of(look(tmp_path / "run", "D169"), "D169") is None
