"""Weights that an engine never gets, gets in part or holds wrongly, beside an engine that has them: really trained."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_core.diagnose.collected import parting
from replay_core.diagnose.finding import Finding
from replay_core.diagnose.rules import temperature
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import causes, look
from tests.replay_core.diagnose.bigram import EOS, Bigram, Rollout

PROMPTS = [[5, 6], [7], [8, 9, 10], [11, 3], [4, 12]]
#: The engine's model, by step: given the trainer's models so far, the last of them the current one.
Engine = Callable[[list[Bigram]], Bigram]


def _trained(
    directory: Path, engine: Engine, *, steps: int = 6, lr: float = 6.0, fresh: int = 0, versions: bool = False,
    paid: int = 5, **drawn: Any,
) -> Path:  # fmt: skip
    """A policy that is paid for one token. `fresh` prompts of five are sampled by the current weights all the same."""
    lm, held = Bigram(3, 16, 0.9), []
    recorder = Recorder(directory)
    for step in range(steps):
        held.append(deepcopy(lm))
        old = engine(held)
        old.draw = np.random.default_rng(step)
        parts = [old.rollout(PROMPTS[fresh:], each=4, limit=8, **drawn)]
        if fresh:
            parts.append(lm.rollout(PROMPTS[:fresh], each=4, limit=8))
        for number, part in enumerate(parts):
            noise_BT = lm.draw.normal(0, 0.002, part.response_BT.shape) * part.response_BT
            sampled_BT = (part.sampled_BT + noise_BT).astype(np.float32)
            parts[number] = Rollout(
                part.ids_BS, part.attention_BS, part.response_BT, part.group_B + 9 * number, sampled_BT
            )
        rollout = _joined(parts)
        rewards_B = ((rollout.ids_BS[:, 1:] == paid) * rollout.response_BT).sum(1) > 0
        advantages_B = (rewards_B - rewards_B.mean()).astype(np.float32)
        old_BT = rollout.logprobs(lm).astype(np.float32)
        more = {"weight_version": np.full(len(rewards_B), step)} if versions else {}
        with recorder.step(step) as record:
            record("trajectory", **rollout.tensors(
                rollout_log_probs=rollout.sampled_BT, old_log_probs=old_BT, rewards=rewards_B.astype(np.float32),
                advantages=rollout.on_tokens(advantages_B), **more))  # fmt: skip
        lm.learn(rollout, rollout.on_tokens(advantages_B), lr)
    return directory


def _joined(parts: list[Rollout]) -> Rollout:
    """Samples of several engines in one batch: prompts are padded to one width on the left."""
    widest = max(part.ids_BS.shape[1] for part in parts)

    def wide(values: Any) -> Any:
        return np.pad(values, ((0, 0), (widest - values.shape[1] - (values.dtype == np.float32), 0)))

    fields = ("ids_BS", "attention_BS", "response_BT", "group_B", "sampled_BT")
    each = {name: [getattr(part, name) for part in parts] for name in fields}
    return Rollout(**{
        name: np.concatenate(values if name == "group_B" else [wide(one) for one in values])
        for name, values in each.items()
    })  # fmt: skip


def _of_engine(path: Path) -> list[Finding]:
    return [one for one in causes(look(path)) if one.id in ("D09", "D12", "D10", "D11", "L38")]


@pytest.mark.parametrize("lr", [6.0, 9.0, 14.0])
@pytest.mark.parametrize("versions", [False, True], ids=["", "versions advance"])
def test_weights_that_never_arrive_are_the_one_cause(tmp_path: Path, lr: float, versions: bool) -> None:
    path = _trained(tmp_path / "d", lambda held: deepcopy(held[0]), lr=lr, versions=versions)
    (found,) = _of_engine(path)
    # Six steps are what an asynchronous run begins with, too, unless versions say otherwise.
    assert (found.id, found.severity) == ("D12", "error" if versions else "warning")
    assert "weights are not updated" in found.claim
    assert ("version advances" in found.claim) == versions


@pytest.mark.parametrize("fresh", [1, 2, 3])
def test_a_part_of_the_rows_may_be_of_old_weights(tmp_path: Path, fresh: int) -> None:
    (found,) = _of_engine(_trained(tmp_path / "d", lambda held: deepcopy(held[0]), fresh=fresh, lr=20.0))
    assert found.id == "D12"
    assert f"in all rows of {5 - fresh} of 5 prompts" in found.claim
    assert "prefix cache" in found.cause


def test_an_engine_that_gets_the_weights_agrees(tmp_path: Path) -> None:
    assert _of_engine(_trained(tmp_path / "d", lambda held: deepcopy(held[-1]))) == []


def test_weights_of_one_age_are_no_weights_that_never_arrive(tmp_path: Path) -> None:
    path = _trained(tmp_path / "d", lambda held: deepcopy(held[-2:][0]), steps=7, lr=3.0)
    assert [one for one in _of_engine(path) if one.id == "D12"] == []


def _moved(held: list[Bigram]) -> Bigram:
    """The end token's column of the trainer's table under another id, and all others with it."""
    lm = deepcopy(held[-1])
    lm.table_VV = np.roll(lm.table_VV, 5, axis=1)
    lm.table_VV[:, EOS] = -30.0
    return lm


def test_weights_that_were_converted_wrongly_lead_what_they_come_to(tmp_path: Path) -> None:
    path = _trained(tmp_path / "d", _moved, steps=4, paid=99, lr=0.0)
    found = look(path).findings[0]
    assert (found.id, found.severity) == ("L38", "error")
    assert "converted wrongly" in found.cause
    # A policy that is paid nothing stands still, which is a finding of its own.
    assert {one.id for one in causes(look(path))} <= {"L38", "D55"}


def test_what_is_paid_and_agrees_is_no_other_model(tmp_path: Path) -> None:
    path = _trained(tmp_path / "d", lambda held: deepcopy(held[-1]), steps=4, paid=99, lr=0.0)
    assert [one for one in causes(look(path)) if one.id == "L38"] == []


@pytest.mark.parametrize(
    ("gain", "stated", "drawn", "words"),
    [
        (0.6, 0.6, None, "samples, and reports, at the T = 0.6 that is stated, and the trainer's forward does not"),
        (0.67, 1.5, None, "the trainer divides its logits by about T = 1.49 and the engine returns raw"),
        (1.43, 0.7, None, "or the trainer divides by the temperature of 0.7 twice"),
        (1.43, None, None, "or the rollout was sampled at T = 1.43"),
        (0.67, 1.5, True, "the engine returns raw"),
        (1.43, 0.7, False, "twice, or the engine samples without it"),
        (1.43, None, False, "sampled at about T = 1.43 times the trainer's"),
    ],
)
def test_a_stated_temperature_decides_who_left_it_out(
    gain: float, stated: float | None, drawn: bool | None, words: str
) -> None:
    assert words in temperature._why(gain, stated, drawn)[1]


@pytest.mark.parametrize(("by_step", "told"), [
    ([0.0047, 0.0206, 0.0227, 0.0397, 0.0375, 0.039], True),
    ([0.0046, 0.0107, 0.0153, 0.0188, 0.0215, 0.0258, 0.0393], True),
    ([0.0046, 0.011, 0.014, 0.016, 0.019, 0.021, 0.024], False),  # a policy that gets sharper
    ([0.0046, 0.03, 0.012, 0.029, 0.011, 0.032, 0.03], False),  # in no order
    ([0.009, 0.02, 0.022, 0.03, 0.033, 0.036], False),  # four times the first
])  # fmt: skip
def test_a_rise_from_step_to_step_is_told_at_a_lower_level(by_step: list[float], told: bool) -> None:
    rows = [mean * np.linspace(0.8, 1.2, 12) for mean in by_step]
    assert (parting(rows, None) is not None) == told


def test_weights_that_never_arrive_show_before_they_come_to_much(tmp_path: Path) -> None:
    path = _trained(tmp_path / "d", lambda held: deepcopy(held[0]), lr=3.0, steps=8)
    found = next(one for one in causes(look(path, "D12")) if one.id == "D12")
    assert "not updated" in found.claim
    assert causes(look(_trained(tmp_path / "fine", lambda held: deepcopy(held[-1]), lr=3.0, steps=8), "D12")) == []
