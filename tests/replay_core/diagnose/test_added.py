"""A loss, its policy part and its KL part, as micro-batches record them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look, of, why_skipped


def recorded(
    path: Path, beta: float, stated: float | None = None, count: int = 6, flags: dict[str, Any] | None = None
) -> Path:
    recorder = Recorder(path, flags=flags or ({} if stated is None else {"kl_loss_coef": stated}))
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


@pytest.mark.parametrize(
    ("more", "is_told"),
    [({}, True), ({"use_kl_in_reward": True}, False), ({"use_kl_loss": False}, False),
     ({"use_kl_in_reward": True, "use_kl_loss": True}, True)],
)  # fmt: skip
def test_a_coefficient_of_the_rewards_is_none_of_the_loss(more: dict[str, Any], is_told: bool, tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", 0.0, flags={"kl_coef": 0.02, **more})
    assert (of(look(path, "D49"), "D49") is not None) == is_told


def test_too_few_micro_batches_are_not_judged(tmp_path: Path) -> None:
    told = look(recorded(tmp_path / "run", -0.2, count=3), "D49")
    assert of(told, "D49") is None
    assert "4 micro-batches" in why_skipped(told, "D49")


def trained_terms(path: Path, *, bonus: float = 0.0, times: float = 1.0, stated: float = 0.01, steps: int = 4) -> Path:
    """A policy of one linear layer that is trained by two micro-batches a step, and what each of them adds up."""
    recorder = Recorder(path, flags={"entropy_coeff": stated})
    torch.manual_seed(3)
    layer = torch.nn.Linear(6, 9)
    optimizer = torch.optim.SGD(layer.parameters(), 0.5)
    for step in range(steps):
        inputs_BTD, ids_BT = torch.randn(6, 8, 6), torch.randint(0, 9, (6, 8))
        mask_BT = (torch.arange(8) < torch.tensor([8, 5, 6, 4, 3, 7])[:, None]).long()
        mask_BT[:, :2] = 0
        advantages_B = torch.randn(6)
        with recorder.step(step) as write:
            for micro, rows in enumerate((slice(0, 2), slice(2, 6))):
                logs_BTV = layer(inputs_BTD[rows, :-1]).log_softmax(-1)
                logp_BT = logs_BTV.gather(-1, ids_BT[rows, 1:, None]).squeeze(-1)
                entropy_BT = -(logs_BTV.exp() * logs_BTV).sum(-1)
                keep_BT = mask_BT[rows, 1:].float()
                total = mask_BT.sum()
                pg = -(advantages_B[rows, None] * (logp_BT - logp_BT.detach()).exp() * keep_BT).sum() / total
                loss = times * (pg - bonus * (entropy_BT * keep_BT).sum() / total)
                loss.backward()
                attended_BT = (torch.arange(8) < torch.tensor([8, 5, 6, 4, 3, 7])[rows, None]).long()
                write(
                    "forward_data", input_ids=ids_BT[rows], attention_mask=attended_BT,
                    response_mask=mask_BT[rows], log_probs=logp_BT.detach(), entropy=entropy_BT.detach(),
                    advantages=advantages_B[rows, None] * keep_BT, micro=micro,
                )  # fmt: skip
                write("loss", loss=loss.detach(), pg_loss=pg.detach(), micro=micro)
        optimizer.step()
        optimizer.zero_grad()
    recorder.close()
    return path


@pytest.mark.parametrize(
    ("made", "severity", "words"),
    [
        ({"bonus": -0.3}, "error", "added to the loss, it presses the entropy down (coefficient 0.3)"),
        ({"bonus": 0.3}, "error", "weighs 0.3 in the loss, and the run states a coefficient of 0.01"),
        ({"bonus": 0.01}, "", ""),
        ({"times": 8.0}, "warning", "the loss is 8 times its terms"),
        ({"times": 7.5}, "error", "the loss is 7.5 times its terms"),
        ({"times": 2.0}, "warning", "the loss is 2 times its terms"),
        ({"times": 0.5}, "error", "divided by the 2 micro-batches of an update twice"),
    ],
    ids=[
        "entropy minimised",
        "thirty times",
        "as stated",
        "world size",
        "no count",
        "accumulation",
        "divided by accumulation",
    ],
)
def test_what_a_trained_step_adds_up_is_held_against_what_is_stated(
    made: dict[str, Any], severity: str, words: str, tmp_path: Path
) -> None:
    found = of(look(trained_terms(tmp_path / "run", **made), "D49"), "D49")
    assert (found.severity if found else "") == severity
    assert found is None or words in found.claim


def test_a_weight_of_the_kl_that_is_not_the_stated_one_is_an_error(tmp_path: Path) -> None:
    found = of(look(recorded(tmp_path / "run", 2.0, 0.02), "D49"), "D49")
    assert found is not None
    assert found.severity == "error"
    assert "weighs 2 in the loss, and the run states a coefficient of 0.02" in found.claim


def divided(path: Path, weight: float, term: str, *, policy: float = 1.0, **stated: Any) -> Path:
    """Two micro-batches a step, each loss half of what it adds up; `policy`: how large the policy's part is."""
    draw = torch.Generator().manual_seed(7)
    with Recorder(path, flags={"loss": {"kind": "grpo", "divisor": 2.0, **stated}}) as recorder:
        for step in range(5):
            with recorder.step(step) as write:
                for micro in range(2):
                    pg, more = (float(torch.randn((), generator=draw)) for _ in range(2))
                    pg, more = policy * pg, 1 + abs(more)
                    write("loss", {"loss": (pg + weight * more) / 2, "pg_loss": pg, term: more}, micro=micro)
    return path


@pytest.mark.parametrize("policy", [1.0, 1e-8], ids=["", "nothing of the policy"])
@pytest.mark.parametrize(
    ("weight", "term", "stated", "words"),
    [
        (0.1, "kl_loss", {"kl": 0.1}, ""),
        (0.01, "kl_loss", {"kl": 0.1}, "weighs 0.01 in the loss, and the run states a coefficient of 0.1"),
        (0.0, "kl_loss", {"kl": 0.1}, "is not in the loss"),
        (-0.1, "kl_loss", {"kl": 0.1}, "wrong sign"),
        (-0.05, "entropy_loss", {"entropy_coef": 0.05}, ""),
        (0.05, "entropy_loss", {"entropy_coef": 0.05}, "wrong sign"),
        (-0.5, "entropy_loss", {"entropy_coef": 0.05}, "weighs 0.5 in the loss"),
    ],
)
def test_the_terms_of_losses_that_are_divided_by_the_micro_batches_are_solved_for(
    weight: float, term: str, stated: dict[str, float], words: str, policy: float, tmp_path: Path
) -> None:
    found = of(look(divided(tmp_path / "run", weight, term, policy=policy, **stated), "D49"), "D49")
    if policy < 1 and weight in (0.01, -0.5):
        words = words and "in the loss, and the run states"  # by which divisor nothing tells
    assert (found is not None) == bool(words), found
    assert found is None or (found.severity == "error" and words in found.claim)


def test_what_rounding_leaves_is_no_entropy_bonus_of_the_wrong_sign(tmp_path: Path) -> None:
    found = of(look(divided(tmp_path / "run", 1.5e-7, "entropy_loss", policy=1.0), "D49"), "D49")
    assert found is None, found


def with_values(path: Path, weight: float, divisor: int = 1, **stated: Any) -> Path:
    """One trunk with a value head: pg_loss, the head's loss, and their sum."""
    draw = torch.Generator().manual_seed(11)
    with Recorder(path, flags=stated) as recorder:
        for step in range(6):
            pg, value = (float(torch.randn((), generator=draw)) for _ in range(2))
            with recorder.step(step) as write:
                write("loss", loss=(pg + weight * abs(value)) / divisor, pg_loss=pg, vf_loss=abs(value), micro=0)
    return path


@pytest.mark.parametrize(
    ("weight", "divisor", "stated", "words"),
    [
        (10.0, 1, {"vf_coef": 0.5}, "weighs 10 in the loss, and the run states a coefficient of 0.5: 20 times as much"),
        (10.0, 4, {"vf_coef": 0.5, "gradient_accumulation_steps": 4}, "weighs 10 in the loss"),
        (0.01, 1, {"value_loss_coef": 0.5}, "weighs 0.01 in the loss, and the run states a coefficient of 0.5"),
        (-0.5, 1, {}, "is subtracted: it has the wrong sign in the loss (coefficient -0.5)"),
        (0.5, 1, {"vf_coef": 0.5}, ""),
        # Half a square on one of the two sides; a loss that holds its coefficient; a critic of its own.
        (0.25, 1, {"vf_coef": 0.5}, ""),
        (1.0, 1, {"vf_coef": 0.1}, ""),
        (0.0, 1, {"vf_coef": 0.5}, ""),
        (10.0, 1, {}, ""),
    ],
)
def test_the_weight_of_a_value_head_s_loss_is_solved_for(
    weight: float, divisor: int, stated: dict[str, Any], words: str, tmp_path: Path
) -> None:
    found = of(look(with_values(tmp_path / "run", weight, divisor, **stated), "D49"), "D49")
    assert (found is not None) == bool(words)
    assert found is None or (found.severity == "error" and words in found.claim)


def test_whole_groups_at_a_ratio_of_1_say_nothing_of_the_policy_s_weight(tmp_path: Path) -> None:
    """Their advantages sum up to rounding: the KL alone is in the loss, by whatever share of itself."""
    draw, stated = np.random.default_rng(0), {"kl_loss_coef": 0.04, "kl_loss_type": "low_var_kl"}
    with Recorder(tmp_path / "run", flags={**stated, "loss_agg_mode": "seq-mean-token-mean"}) as recorder:
        for step in range(6):
            with recorder.step(step) as record:
                for micro in range(4):
                    ids_BS, lengths_B = draw.integers(3, 90, (8, 13)), draw.integers(3, 11, 8)
                    mask_BT = (np.arange(10) < lengths_B[:, None]).astype(np.int64)
                    now_BT = (-draw.random((8, 10)) * mask_BT).astype(np.float32)
                    ref_BT = ((now_BT + 0.3 * draw.normal(0, 1, (8, 10))) * mask_BT).astype(np.float32)
                    paid_GK = draw.integers(0, 2, (2, 4)).astype(float)
                    left_GK = paid_GK - paid_GK.mean(1, keepdims=True)
                    a_B = (left_GK / (paid_GK.std(1, ddof=1, keepdims=True) + 1e-4)).reshape(-1).astype(np.float32)
                    d_BT, a_BT = ref_BT - now_BT, (a_B[:, None] * mask_BT).astype(np.float32)
                    loss_BT = (-a_BT + 0.04 * (np.exp(d_BT) - d_BT - 1)).astype(np.float32)
                    record("forward_data", micro=micro, input_ids=ids_BS, response_mask=mask_BT, log_probs=now_BT,
                           attention_mask=np.concatenate([np.ones((8, 3), np.int64), mask_BT], 1), advantages=a_BT,
                           old_log_probs=now_BT, ref_log_prob=ref_BT)  # fmt: skip
                    means_B = torch.from_numpy(loss_BT * mask_BT.astype(np.float32)).sum(1) / torch.from_numpy(
                        lengths_B
                    )
                    record("loss", {"loss": float(means_B.mean())}, micro=micro)
    assert of(look(tmp_path / "run", "D49"), "D49") is None
