"""D04 and D93: advantages made of the right rewards by a mistake; each is made here and has to be named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.builders import save_file
from tests.replay_core.diagnose.batches import GROUPS, Fields, grpo, healthy, look, masks, of, save, set_advantages
from tests.replay_core.diagnose.batches import set_rewards as give

STEPS = 3


def _drawn(step: int) -> Any:
    return np.round(np.random.default_rng(step).uniform(0.1, 1, 16), 3)


def _by_group(made: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    def all_of(r: Any) -> Any:
        out = np.zeros(len(r))
        for group in np.unique(GROUPS):
            inside = np.equal(GROUPS, group)
            out[inside] = made(r[inside], r)
        return out

    return all_of


def _centred(r: Any) -> Any:
    return r - r.mean()


MISTAKES: dict[str, Callable[[Any], Any]] = {
    "nothing is subtracted": _by_group(lambda r, _: r / (r.std(ddof=1) + 1e-6)),
    "the baseline is the mean of the whole batch": _by_group(lambda r, every: (r - every.mean()) / (r.std(ddof=1))),
    "the group's median": _by_group(lambda r, _: (r - np.median(r)) / r.std(ddof=1)),
    "the group's best": _by_group(lambda r, _: r - r.max()),
    "the group's last response": _by_group(lambda r, _: (r - r[-1]) / r.std(ddof=1)),
    "the group's sum": _by_group(lambda r, _: r - r.sum()),
    "without its first response": _by_group(lambda r, _: r - r[1:].mean()),
    "the group's variance": _by_group(lambda r, _: _centred(r) / r.var(ddof=1)),
    "multiplied by the group's std": _by_group(lambda r, _: _centred(r) * r.std(ddof=1)),
    "range of the group's rewards": _by_group(lambda r, _: _centred(r) / np.ptp(r)),
    r"std + 0.5)": _by_group(lambda r, _: _centred(r) / (r.std(ddof=1) + 0.5)),
    "8 times what they should be": _by_group(lambda r, _: 8 * _centred(r) / r.std(ddof=1)),
    "wrong sign": _by_group(lambda r, _: -_centred(r) / (r.std(ddof=1) + 1e-6)),
    "only the sign": _by_group(lambda r, _: np.sign(_centred(r))),
    "without their sign": lambda r: np.abs(grpo(r, GROUPS)),
    "one number": lambda r: np.ones(len(r)),
    "a constant is added": lambda r: grpo(r, GROUPS) + 0.7,
    "belong to other samples": lambda r: np.roll(grpo(r, GROUPS), 1),
    "multiplied by the length": lambda r: grpo(r, GROUPS) * masks(healthy()).sum(1),
    "divided by the length": lambda r: grpo(r, GROUPS) / masks(healthy()).sum(1),
    "wrong groups": lambda r: grpo(r, np.arange(16) % 4),
}


def _run(folder: Path, made: Callable[[Any], Any]) -> Path:
    for step in range(1, STEPS + 1):
        fields = healthy()
        give(fields, _drawn(step))
        set_advantages(fields, made(_drawn(step)))
        save(folder, fields, f"train_batch_step{step}.pt")
    return folder


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_named_over_all_steps(words: str, tmp_path: Path) -> None:
    found = of(look(_run(tmp_path, MISTAKES[words]), "D04"), "D04")
    assert found is not None
    # A loss that sums over tokens divides by the length in its advantages, and none is stated.
    assert (found.severity == "info") == (words == "divided by the length")
    assert words in found.claim, found.claim


@pytest.mark.parametrize("epsilon", [1e-4, 1e-6])
@pytest.mark.parametrize("ddof", [0, 1])
def test_grpo_in_bfloat16_and_float32_is_right(epsilon: float, ddof: int, tmp_path: Path) -> None:
    for rounded in (False, True):

        def made(r: Any, rounded: bool = rounded) -> Any:
            a = grpo(r, GROUPS, epsilon=epsilon, ddof=ddof)
            return torch.from_numpy(a).bfloat16().float().numpy() if rounded else a

        found = of(look(_run(tmp_path / str(rounded), made), "D04"), "D04")
        assert found is not None
        assert found.severity == "info", found.claim


# ---- without rewards


def _without_rewards(folder: Path, made: Callable[[Any], Any], *, rewards: bool = False) -> Path:
    """What TRL's trainer is given: no rewards, one advantage for each response, prompts that repeat."""
    for step in range(STEPS):
        fields: Fields = healthy()
        content = {
            "prompt_ids": fields["prompts"], "prompt_mask": fields["attention_mask"][:, : fields["prompts"].shape[1]],
            "completion_ids": fields["responses"], "completion_mask": fields["response_mask"],
            "advantages": made(_drawn(step)).astype(np.float32), "old_per_token_logps": fields["old_log_probs"],
            **({"rewards": _drawn(step).astype(np.float32)} if rewards else {}),
        }  # fmt: skip
        tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in content.items()}
        save_file(folder / f"generate_and_score_step{step:06d}_gen{step}.pt", tensors)
    return folder


def _rolled_under_masks(r: Any, by: int = 1) -> Any:
    """Rows of masked advantages moved on, and each then averaged over its own tokens: the shorter of two cuts them."""
    mask_BT = np.ones((16, 6))
    mask_BT[9, -1] = 0
    rows_BT = np.roll(grpo(r, GROUPS)[:, None] * mask_BT, by, 0) * mask_BT
    return rows_BT.sum(1) / mask_BT.sum(1)


@pytest.mark.parametrize("by", [1, 4, -1])
def test_rows_that_were_rolled_and_cut_are_named(by: int, tmp_path: Path) -> None:
    found = of(look(_run(tmp_path, lambda r: _rolled_under_masks(r, by)), "D04"), "D04")
    assert found is not None
    assert found.severity == "error"
    assert "with the rows moved" in found.claim, found.claim
    alone = of(look(_without_rewards(tmp_path / "alone", lambda r: _rolled_under_masks(r, by)), "D93"), "D93")
    if by != 4:  # a group that is moved as a whole adds up to 0 where it comes to, but for the row that is cut
        assert alone is not None
        assert "belong to other samples" in alone.claim


def test_advantages_of_which_a_few_are_off_are_not_of_other_rows(tmp_path: Path) -> None:
    def made(r: Any) -> Any:
        a = grpo(r, GROUPS)
        a[[2, 9]] *= 0.8
        return a

    found = of(look(_run(tmp_path, made), "D04"), "D04")
    assert found is None or "other samples" not in found.claim


ALONE: dict[str, Callable[[Any], Any]] = {
    "none is negative": MISTAKES["nothing is subtracted"],
    "what is subtracted is not the group's mean": MISTAKES["the baseline is the mean of the whole batch"],
    "the best response's reward is the baseline": MISTAKES["the group's best"],
    "the group's last response is the baseline": MISTAKES["the group's last response"],
    "8 times what they should be": MISTAKES["8 times what they should be"],
    "one number": MISTAKES["one number"],
    "a constant is added": MISTAKES["a constant is added"],
    "belong to other samples": MISTAKES["belong to other samples"],
    "multiplied by the length": MISTAKES["multiplied by the length"],
    "divided by the length": MISTAKES["divided by the length"],
    "over the whole batch": lambda r: (r - r.mean()) / r.std(),
}


@pytest.mark.parametrize("words", ALONE)
def test_groups_tell_without_rewards(words: str, tmp_path: Path) -> None:
    found = of(look(_without_rewards(tmp_path, ALONE[words]), "D93"), "D93")
    assert found is not None
    assert words in found.claim, found.claim


@pytest.mark.parametrize("made", [
    lambda r: grpo(r, GROUPS), _by_group(lambda r, _: _centred(r)),
    _by_group(lambda r, _: r - (r.sum() - r) / (len(r) - 1)), _by_group(lambda r, every: _centred(r) / every.std()),
])  # fmt: skip
def test_groups_that_add_up_to_0_are_right(made: Callable[[Any], Any], tmp_path: Path) -> None:
    diagnosis = look(_without_rewards(tmp_path, made), "D93")
    assert of(diagnosis, "D93") is None
    assert "D93" in diagnosis.checked


def test_whitened_over_tokens_is_another_estimator(tmp_path: Path) -> None:
    """REINFORCE++ centres what is weighted by tokens."""
    tokens_B = masks(healthy()).sum(1)

    def made(r: Any) -> Any:
        a = _by_group(lambda q, _: _centred(q))(r)
        a = a - (a * tokens_B).sum() / tokens_B.sum()
        return a / np.sqrt((a * a * tokens_B).sum() / tokens_B.sum())

    assert of(look(_without_rewards(tmp_path, made), "D93"), "D93") is None


def test_absolute_values_beside_rewards_whose_groups_have_no_name(tmp_path: Path) -> None:
    (tmp_path / "right").mkdir()
    lost = of(look(_without_rewards(tmp_path, lambda r: np.abs(grpo(r, GROUPS)), rewards=True)), "D04")
    assert lost is not None
    assert (lost.severity, "without their sign" in lost.claim) == ("error", True)
    right = of(look(_without_rewards(tmp_path / "right", lambda r: grpo(r, GROUPS), rewards=True)), "D04")
    assert right is None or right.severity == "info"
