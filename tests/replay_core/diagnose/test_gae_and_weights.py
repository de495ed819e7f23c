"""GAE made of the wrong tokens' values, and importance weights that are not trainer over rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core.diagnose.case import Case
from replay_core.diagnose.engine import diagnose
from replay_core.diagnose.signals import Signals
from replay_core.dumps import open_run
from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import healthy, look, masks, noise, of, seen, set_advantages, set_rewards

Fields = dict[str, Any]


def with_gae(*, late: int = 0, gap: bool = False, over_all: bool = False) -> Fields:
    """The healthy batch with a critic's values; GAE of gamma 1 and lambda .9, made here, of values `late` tokens on.

    `gap`: tool output of two tokens stands in each response; `over_all`: GAE steps over it as over the policy's tokens.
    """
    fields = healthy()
    set_rewards(fields, np.random.default_rng(4).random(16))
    set_advantages(fields, np.zeros(16))
    whole_BT = masks(fields)
    mask_BT = whole_BT.copy()
    if gap:
        mask_BT[:, 2:4] = False
        fields["response_mask"] = mask_BT.astype(fields["response_mask"].dtype)
    values_BT = np.random.default_rng(5).random(mask_BT.shape) * whole_BT
    used_BT, made_BT = whole_BT if over_all else mask_BT, np.zeros(mask_BT.shape)
    for row, inside in enumerate(used_BT):
        at_T = np.flatnonzero(inside)
        read_T = np.append(values_BT[row, at_T], np.zeros(late + 1))[late:]
        run = following = 0.0
        for place in range(at_T.size - 1, -1, -1):
            run = fields["token_level_rewards"][row, at_T[place]] + following - read_T[place] + 0.9 * run
            made_BT[row, at_T[place]], following = run, read_T[place]
    fields["values"] = values_BT.astype(np.float32)
    fields["returns"] = ((made_BT + values_BT) * used_BT).astype(np.float32)
    return fields


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"late": 1}, "values that are off by one token: each has the one of the token after"),
        ({"gap": True, "over_all": True}, "over tokens that the policy did not sample"),
    ],
)
def test_gae_over_the_wrong_tokens_is_named(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    found = of(seen(tmp_path, with_gae(**settings), "D44"), "D44")
    assert found is not None
    assert found.severity == "error"
    assert words in found.claim


@pytest.mark.parametrize("settings", [{}, {"gap": True}])
def test_gae_over_the_sampled_tokens_is_well(settings: dict[str, Any], tmp_path: Path) -> None:
    found = of(seen(tmp_path, with_gae(**settings), "D44"), "D44")
    assert found is not None
    assert found.severity == "info"


def by_recursion(how: str) -> Fields:
    """The healthy batch with a critic's values and returns by GAE of gamma .99 and lambda .9, made here token by token,
    with one line of its recursion wrong.
    """
    fields = with_gae()
    mask_BT = masks(fields)
    values_BT, rewards_BT = fields["values"].astype(np.float64), fields["token_level_rewards"]
    made_BT = np.zeros(mask_BT.shape)
    for row, inside in enumerate(mask_BT):
        at_T = np.flatnonzero(inside)
        v, r = values_BT[row, at_T], rewards_BT[row, at_T]
        other = values_BT[(row - 1) % len(mask_BT), at_T]

        def there(some: Any, place: int) -> float:
            return float(some[place]) if 0 <= place < len(some) else 0.0

        run = 0.0
        order = range(at_T.size)
        for place in order if how.startswith("forwards") else reversed(order):
            following = there(other if how == "row" else v, place + {"forwards, all": -1, "two": 2}.get(how, 1))
            reward = there(r, place + (how == "early"))
            run = reward + 0.99 * following * (place + 1 < at_T.size or "all" in how) - v[place] + 0.99 * 0.9 * run
            made_BT[row, at_T[place]] = run
    fields["returns"] = ((made_BT + values_BT) * mask_BT).astype(np.float32)
    return fields


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("forwards", "runs forwards in time: a token's advantage is made of the one before it"),
        ("forwards, all", "runs forwards in time: advantage and value of the token before"),
        ("two", "the one two tokens on"),
        ("early", "paid one token early"),
        ("row", "another row's: the one of the row before"),
    ],
)
def test_a_recursion_that_goes_another_way_is_named(how: str, words: str, tmp_path: Path) -> None:
    found = of(seen(tmp_path, by_recursion(how), "D44"), "D44")
    assert found is not None
    assert found.severity == "error"
    assert words in found.claim


def test_the_recursion_that_goes_backwards_is_well(tmp_path: Path) -> None:
    found = of(seen(tmp_path, by_recursion(""), "D44"), "D44")
    assert found is not None
    assert (found.severity, found.claim) == ("info", "returns are GAE's, gamma 0.99, lambda 0.9")


def power(times: float) -> Fields:
    """The healthy batch, engine and trainer apart, with importance weights of that power of trainer over rollout."""
    fields = healthy()
    fields["rollout_log_probs"] = fields["old_log_probs"] + noise(fields, 0.2, 1)
    apart_BT = fields["old_log_probs"] - fields["rollout_log_probs"]
    fields["rollout_is_weights"] = np.exp(times * apart_BT).clip(max=2).astype(np.float32)
    return fields


@pytest.mark.parametrize(
    ("times", "words"), [(2, "applied twice"), (0, "1 on every token"), (-1, "upside down"), (1, "")],
    ids=["squared", "never made", "turned", "right"],
)  # fmt: skip
def test_importance_weights_are_held_against_trainer_over_rollout(times: float, words: str, tmp_path: Path) -> None:
    found = of(seen(tmp_path, power(times), "D59"), "D59")
    assert (found is not None) == bool(words)
    assert found is None or words in found.claim


@pytest.mark.parametrize(
    ("bounds", "words"), [({"min": 1.1}, "cut off from below"), ({}, "not cut off"), ({"max": 1.1}, "")],
    ids=["a floor", "no cap", "a cap"],
)  # fmt: skip
def test_weights_are_held_against_the_stated_cap(bounds: dict[str, float], words: str, tmp_path: Path) -> None:
    fields = power(1)
    apart_BT = fields["old_log_probs"] - fields["rollout_log_probs"]
    weights_BT = np.exp(apart_BT).clip(bounds.get("min"), bounds.get("max"))
    tensors = {name: torch.from_numpy(one) for name, one in fields.items() if isinstance(one, np.ndarray)}
    tensors["rollout_is_weights"] = torch.from_numpy(weights_BT.astype(np.float32))
    with Recorder(tmp_path / "run", flags={"tis_cap": 1.1}) as recorder, recorder.step(0) as record:
        record("forward_data", micro=0, **tensors)
    found = of(look(tmp_path / "run", "D59"), "D59")
    assert (found is not None) == bool(words)
    assert found is None or words in found.claim


@pytest.mark.parametrize(
    ("scale", "raw", "clipped", "words"),
    [(1024, 600.0, 1.0, "before they are unscaled"), (1024, 2000.0, 1.0, "leaves 1 of"), (None, 600.0, 1.0, "leaves"),
     (1024, 0.6, 0.6, ""), (1024, 8.0, 1.0, "")],
    ids=["still scaled", "large all the same", "no scale", "small", "clipped"],
)  # fmt: skip
def test_a_scaled_norm_that_is_clipped_is_told_from_a_small_limit(
    scale: int | None, raw: float, clipped: float, words: str, tmp_path: Path
) -> None:
    flags = {"max_grad_norm": 1.0} | ({} if scale is None else {"loss_scale": scale})
    with Recorder(tmp_path / "run", flags=flags) as recorder:
        for step in range(4):
            with recorder.step(step) as record:
                record("training_metrics", metrics={"grad_norm": raw * (1 + 0.1 * step)})
                # A norm below the limit is left as it is.
                record("optimizer", micro=0, clipped_grad_norm=clipped if clipped < raw else raw * (1 + 0.1 * step))
    run = open_run(tmp_path / "run")
    found = of(diagnose(Case(run, Signals.of(run)), ["L15"]), "L15")
    assert (found is not None) == bool(words)
    assert found is None or words in found.claim


def test_padding_that_nothing_names_is_no_degenerate_output(tmp_path: Path) -> None:
    fields = healthy()
    mask_BT = masks(fields)
    told = {"input_ids": np.where(fields["attention_mask"] != 0, fields["input_ids"], 0), "completion_mask": mask_BT}
    assert of(seen(tmp_path, told, "D26"), "D26") is None
    told["input_ids"][:, -mask_BT.shape[1] :][mask_BT] = 0
    assert of(seen(tmp_path, told, "D26"), "D26") is not None
