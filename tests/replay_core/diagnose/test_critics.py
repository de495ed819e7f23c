"""Critics that are really trained on returns: one that stands, one in another unit, and one that is fine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core.diagnose.rules.critic import _no_nearer
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import causes, look, of
from tests.replay_core.diagnose.bigram import EOS, Bigram

PROMPTS = [[5, 6], [7, 3], [8, 9, 10], [11, 3]]
RULES = ("D44", "D45", "D96")


def _trained(
    directory: Path, *, rate: float = 0.5, times: float = 1.0, offset: float = 0.0, steps: int = 8, paid: float = 1.0,
    apart: bool = False, begun: float = -1.0,
) -> Path:  # fmt: skip
    """A critic of the last token (and a new head's noise), by Monte Carlo returns; recorded is `times` it."""
    lm, recorder = Bigram(8), Recorder(directory)
    head_V = lm.draw.normal(begun, 0.4, 14) * paid
    for step in range(steps):
        rollout = lm.rollout(PROMPTS, each=6)
        scores_B = paid * np.where((rollout.ids_BS == EOS).any(1), 1.0, 0.0)
        mask_BT = rollout.response_BT
        values_BT = head_V[rollout.ids_BS[:, :-1]] * mask_BT
        returns_BT = scores_B[:, None] * mask_BT
        recorded_BT = (times * values_BT + offset) * mask_BT
        rewards_BT = np.zeros_like(mask_BT)
        last_B = mask_BT.shape[1] - 1 - mask_BT[:, ::-1].argmax(1)
        rewards_BT[np.arange(len(scores_B)), last_B] = scores_B
        with recorder.step(step) as record:
            record("trajectory", **rollout.tensors(
                token_level_rewards=rewards_BT.astype(np.float32), values=recorded_BT.astype(np.float32),
                returns=returns_BT.astype(np.float32), advantages=(returns_BT - recorded_BT).astype(np.float32),
            ))  # fmt: skip
            if apart:
                record("values", role="critic", micro=0, values=recorded_BT[:8].astype(np.float32),
                       response_mask=mask_BT[:8].astype(np.int64))  # fmt: skip
        error_BT = (returns_BT - values_BT) * mask_BT
        for token in range(14):
            here = (rollout.ids_BS[:, :-1] == token) & (mask_BT > 0)
            if here.any():
                head_V[token] += rate * float(error_BT[here].mean())
    return directory


@pytest.mark.parametrize(("rate", "severity"), [(2.7, "error"), (1.6, None)], ids=["diverges", "swings and settles"])
def test_values_that_explode_past_what_is_earned_are_told(rate: float, severity: str | None, tmp_path: Path) -> None:
    found = of(look(_trained(tmp_path / "d", rate=rate, steps=6), "D63"), "D63")
    assert (None if found is None else found.severity) == severity


def test_a_short_run_whose_critic_comes_nearer_in_the_end_is_no_alarm() -> None:
    explained = [-3.6, -2.0, -1.4, -2.2, -3.2, -3.6]
    assert not _no_nearer(explained, [1.17, 1.16, 1.04, 1.20, 0.97, 0.85])
    assert _no_nearer(explained, [1.17, 1.16, 1.18, 1.20, 1.13, 1.15])


@pytest.mark.parametrize("how", ["frozen", "learns", "rounded to bf16"])
def test_a_critic_gives_other_values_after_its_updates(how: str, tmp_path: Path) -> None:
    lm, head_V = Bigram(8), np.linspace(-1, 1, 14)
    with Recorder(tmp_path / "d") as recorder:
        for step in range(3):
            rollout = lm.rollout(PROMPTS, each=6)
            mask_BT = rollout.response_BT
            due_BT = np.where((rollout.ids_BS == EOS).any(1), 1.0, 0.0)[:, None] * mask_BT

            def said(head_V: Any, ids_BT: Any = rollout.ids_BS[:, :-1], mask_BT: Any = mask_BT) -> torch.Tensor:
                values = torch.tensor(head_V[ids_BT] * mask_BT).float()
                return values.bfloat16().float() if how == "rounded to bf16" else values

            with recorder.step(step) as record:
                record("trajectory", **rollout.tensors())
                record("values", role="critic", values=said(head_V), returns=torch.tensor(due_BT).float())
                for epoch in range(2):
                    key: dict[str, Any] = {"micro": epoch, "epoch": epoch, "minibatch": 0}
                    record("forward_data", rollout.tensors(), **key)
                    record("loss", role="critic", values=said(head_V), loss=torch.tensor(0.1), **key)
                    head_V = head_V + 0.1 * (how == "learns") * (1 - head_V)
    found = of(look(tmp_path / "d", "D45"), "D45")
    assert (found is not None and "never updated" in found.claim) == (how == "frozen")


def test_a_critic_that_learns_is_fine(tmp_path: Path) -> None:
    assert causes(look(_trained(tmp_path / "d"), *RULES)) == []


@pytest.mark.parametrize("apart", [False, True], ids=["beside the samples", "and in records of its own"])
def test_a_critic_that_is_never_updated_is_told(tmp_path: Path, apart: bool) -> None:
    found = of(look(_trained(tmp_path / "d", rate=0.0, apart=apart), *RULES), "D45")
    assert found is not None
    assert found.severity == "warning"


@pytest.mark.parametrize("more", [{"times": 12.0}, {"offset": 9.0}, {"times": -20.0}], ids=str)
def test_values_of_another_size_are_told(tmp_path: Path, more: dict[str, Any]) -> None:
    found = of(look(_trained(tmp_path / "d", steps=4, begun=0.6, **more), *RULES), "D96")
    assert found is not None


def test_small_returns_are_no_scale_of_a_new_critic(tmp_path: Path) -> None:
    assert of(look(_trained(tmp_path / "d", steps=4, paid=0.02, offset=0.4), *RULES), "D96") is None


@pytest.mark.parametrize(("times", "found"), [(0.2, True), (3.5, True), (1.0, False)])
def test_values_that_follow_returns_in_another_unit(tmp_path: Path, times: float, found: bool) -> None:
    recorder, draw = Recorder(tmp_path / "d"), np.random.default_rng(0)
    for step in range(3):
        rollout = Bigram(step).rollout(PROMPTS, each=6)
        returns_BT = draw.normal(0, 1, 24)[:, None] * rollout.response_BT
        values_BT = times * (returns_BT + 0.2 * draw.normal(0, 1, returns_BT.shape)) * rollout.response_BT
        with recorder.step(step) as record:
            record("trajectory", **rollout.tensors(
                returns=returns_BT.astype(np.float32), values=values_BT.astype(np.float32)))  # fmt: skip
    told = of(look(tmp_path / "d", "D96"), "D96")
    assert (told is not None) == found
    if told is not None:
        assert f"{times / 1.04:.1f}"[:3] in told.claim or "times their returns" in told.claim


@pytest.mark.parametrize(
    ("how", "told"), [("every slot", True), ("the mask", False), ("shared", False), ("a coefficient", False)]
)
def test_a_critics_loss_over_padding_is_told_by_the_mask_beside_its_samples(
    how: str, told: bool, tmp_path: Path
) -> None:
    recorder, draw = Recorder(tmp_path / "d"), np.random.default_rng(1)
    for step in range(3):
        ids_BS = draw.integers(10, 30, (8, 12))
        held_BS = (np.arange(12) < draw.integers(6, 13, (8, 1))).astype(np.int64)
        mask_BS = held_BS * (np.arange(12) >= 3)
        old_BT, due_BT = draw.normal(0, 1, (8, 11)), draw.normal(0.5, 1, (8, 11))
        with recorder.step(step) as record:
            common = {"input_ids": ids_BS, "attention_mask": held_BS, "response_mask": mask_BS}
            record("trajectory", {name: torch.tensor(each) for name, each in common.items()})
            record("values", role="critic", values=torch.tensor(old_BT).float(), returns=torch.tensor(due_BT).float())
            for micro in range(2):
                rows = slice(4 * micro, 4 * micro + 4)
                new_BT, m_BT = old_BT[rows] + 0.05 * draw.normal(0, 1, (4, 11)), mask_BS[rows, 1:]
                squares_BT = (new_BT - due_BT[rows]) ** 2
                inside = float((squares_BT * m_BT).sum() / m_BT.sum())
                loss = {"every slot": float((squares_BT * m_BT).mean()), "the mask": inside, "shared": inside / 2,
                        "a coefficient": 0.3 * inside}[how] / 2  # fmt: skip
                key: dict[str, Any] = {"micro": micro, "epoch": 0, "minibatch": 0}
                record("forward_data", {name: torch.tensor(each[rows]) for name, each in common.items()}, **key)
                record("loss", role="critic", values=torch.tensor(new_BT).float(), loss=torch.tensor(loss), **key)
    recorder.close()
    assert (of(look(tmp_path / "d", "D62"), "D62") is not None) == told


def _before_and_in_its_update(folder: Path, how: str) -> Any:
    """Values that are read before the updates, of a critic of the last two tokens, and those of its first update."""
    draw = np.random.default_rng(2)
    table_VV = draw.normal(0, 1, (30, 30))
    with Recorder(folder) as recorder:
        for step in range(3):
            ids_BS = draw.integers(3, 30, (12, 12))
            mask_BS = (np.arange(12) >= 3) * np.ones((12, 1), dtype=np.int64)
            mask_BS[::2, 10:] = 0
            new_BT = table_VV[ids_BS[:, :-1], np.roll(ids_BS, 1, 1)[:, :-1]]
            others_VV = draw.normal(0, 1, (30, 30))
            old_BT = {
                "another row's": new_BT[np.arange(12) ^ 1],
                "some of other rows": new_BT[np.arange(12) % 6],
                "scaled": new_BT / 0.7,
                "dropout": new_BT + 0.2 * draw.normal(0, 1, (12, 11)),
                "other weights": others_VV[ids_BS[:, :-1], np.roll(ids_BS, 1, 1)[:, :-1]],
                "half of the run": new_BT if step else new_BT[::-1],
                "normalised": 2 * new_BT + 0.5,
            }.get(how, new_BT)
            if how == "bf16":
                old_BT = torch.tensor(old_BT).bfloat16().double().numpy()
            common = {"input_ids": ids_BS, "attention_mask": np.ones_like(ids_BS), "response_mask": mask_BS}
            with recorder.step(step) as record:
                record("trajectory", {name: torch.tensor(each) for name, each in common.items()})
                due = torch.tensor(draw.normal(0, 1, (12, 11))).float()
                record("values", role="critic", values=torch.tensor(old_BT.copy()).float(), returns=due)
                for micro in range(2):
                    rows = slice(6 * micro, 6 * micro + 6)
                    key: dict[str, Any] = {"micro": micro, "epoch": 0, "minibatch": 0}
                    record("forward_data", {name: torch.tensor(each[rows]) for name, each in common.items()}, **key)
                    record("loss", role="critic", values=torch.tensor(new_BT[rows]).float(), loss=torch.tensor(1.0),
                           **key)  # fmt: skip
    return of(look(folder, "D101"), "D101")


@pytest.mark.parametrize(
    ("how", "severity", "words"),
    [
        ("another row's", "error", "those of other samples: in 36 of 36 rows"),
        ("some of other rows", "error", "those of other samples"),
        ("scaled", "warning", "1.429 times"),
        ("other weights", "warning", "not what the critic gives"),
    ],
)
def test_values_that_are_not_the_critics_own_are_told(how: str, severity: str, words: str, tmp_path: Path) -> None:
    found = _before_and_in_its_update(tmp_path / "d", how)
    assert found is not None
    assert found.severity == severity
    assert words in found.claim


@pytest.mark.parametrize("how", ["its own", "bf16", "dropout", "half of the run", "normalised"])
def test_values_that_are_the_critics_own_or_of_another_unit_are_nothing(how: str, tmp_path: Path) -> None:
    assert _before_and_in_its_update(tmp_path / "d", how) is None
