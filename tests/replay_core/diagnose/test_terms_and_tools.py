"""Losses that count tool output, terms that are means of their own micro-batch, and terms that are 0 throughout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.recorder import Recorder
from tests.replay_core.diagnose.batches import look
from tests.replay_core.diagnose.runs import GRPO, RESPONSE, Fields, batch, told

TOKEN_MEAN = {**GRPO, "actor.loss_agg_mode": "token-mean"}
Losses = Callable[[Fields, Fields], dict[str, Any]]


def _trained(
    path: Path, losses: Losses, prepare: Callable[[int, Fields], None], flags: dict[str, Any] | None = None
) -> Path:
    """Five steps of three micro-batches; `losses` are made of the whole step and of one's own part."""

    def aligned(fields: Fields) -> dict[str, str]:
        return {
            name: "response" for name, value in fields.items()
            if isinstance(value, torch.Tensor) and value.shape[-1:] == (RESPONSE,)
        }  # fmt: skip

    with Recorder(path, flags=TOKEN_MEAN if flags is None else flags) as recorder:
        for step in range(5):
            fields = batch(step)
            prepare(step, fields)
            with recorder.step(step) as record:
                record("batch_inputs", fields, alignment=aligned(fields))
                for micro in range(3):
                    part = {name: value[10 * micro : 10 * micro + 10] for name, value in fields.items()}
                    part["log_probs"] = part["old_log_probs"].clone()
                    part |= losses(fields, part)
                    record("forward_data", part, micro=micro, alignment=aligned(part))
    return path


def _with_tools(step: int, fields: Fields) -> None:
    """Two tokens of longer responses are a tool's; advantages are those of rows, on every token."""
    draw = torch.Generator().manual_seed(step)
    mask = fields["response_mask"]
    whole = mask.clone()
    for row in range(len(mask)):
        if mask[row].sum() >= 6 and torch.rand(1, generator=draw) < 0.7:
            mask[row, 2:4] = 0
    counts = (fields["advantages"] != 0).sum(1).clamp(min=1)
    fields["advantages"] = (fields["advantages"].sum(1) / counts)[:, None] * whole
    fields["rollout_log_probs"] = fields["rollout_log_probs"] * mask
    fields["tools_too"] = whole


def _policy(summed: str, over: str, per: str = "step") -> Losses:
    def made(step: Fields, part: Fields) -> dict[str, Any]:
        total = -(part["advantages"] * part[summed]).sum()
        whole = step if per == "step" else part
        return {"pg_loss": total / whole[over].sum() * (3 if per == "step" else 1)}

    return made


@pytest.mark.parametrize("per", ["step", "micro"])
def test_a_loss_that_counts_tool_output(per: str, tmp_path: Path) -> None:
    (finding,) = told(_trained(tmp_path, _policy("tools_too", "tools_too", per), _with_tools), "D28")
    assert "counts tokens of responses that the mask leaves out" in finding.claim
    assert finding.severity == "error"


@pytest.mark.parametrize("per", ["step", "micro"])
def test_a_denominator_that_counts_tool_output(per: str, tmp_path: Path) -> None:
    (finding,) = told(_trained(tmp_path, _policy("response_mask", "tools_too", per), _with_tools), "D28")
    assert "divides by all tokens of responses" in finding.claim


@pytest.mark.parametrize("per", ["step", "micro"])
def test_a_loss_over_what_the_policy_wrote(per: str, tmp_path: Path) -> None:
    assert not told(_trained(tmp_path, _policy("response_mask", "response_mask", per), _with_tools), "D28")


def _short(step: int, fields: Fields) -> None:
    """The first micro-batch has two tokens a row; a teacher near the policy."""
    draw = torch.Generator().manual_seed(step)
    noise = 0.3 * torch.randn(fields["old_log_probs"].shape, generator=draw)
    fields["response_mask"][:10, 2:] = 0
    fields["teacher_log_probs"] = fields["ref_log_prob"] = fields["old_log_probs"] + noise
    for name in ("teacher_log_probs", "advantages"):
        fields[name] = fields[name] * fields["response_mask"]


def _term(name: str, other: str, *, own: bool, alike: bool = False) -> Losses:
    def made(step: Fields, part: Fields) -> dict[str, Any]:
        mask = part["response_mask"]
        apart = ((part["old_log_probs"] - part[other]) * mask).sum()
        share = apart / mask.sum() if own else 3 * apart / step["response_mask"].sum()
        loss = -(part["advantages"] * mask).sum() / (mask.sum() if alike else step["response_mask"].sum() / 3)
        return {name: share, "pg_loss": loss}

    return made


@pytest.mark.parametrize(
    ("name", "other", "words"),
    [("distillation_loss", "teacher_log_probs", "distillation"), ("kl_loss", "ref_log_prob", "KL")],
)
def test_a_term_that_is_the_mean_of_its_micro_batch(name: str, other: str, words: str, tmp_path: Path) -> None:
    (finding,) = told(_trained(tmp_path, _term(name, other, own=True), _short), "D28")
    assert f"the {words} loss is a mean over each micro-batch's own tokens" in finding.claim


def test_a_term_that_is_divided_as_the_loss_is(tmp_path: Path) -> None:
    assert not told(_trained(tmp_path, _term("kl_loss", "ref_log_prob", own=False), _short), "D28")


def test_micro_batches_that_are_alike(tmp_path: Path) -> None:
    def prepare(step: int, fields: Fields) -> None:
        _short(step, fields)
        fields["response_mask"][:, 2:] = 0
        fields["advantages"] = fields["advantages"] * fields["response_mask"]

    assert not told(_trained(tmp_path, _term("kl_loss", "ref_log_prob", own=True), prepare), "D28")


def test_a_local_mean_that_is_stated(tmp_path: Path) -> None:
    losses = _term("kl_loss", "ref_log_prob", own=True, alike=True)
    flags = {**TOKEN_MEAN, "loss_normalizer": "micro-batch tokens"}
    assert not any("KL loss" in one.claim for one in told(_trained(tmp_path, losses, _short, flags), "D28"))


def _nothing(value: float, name: str = "positive_nll_loss") -> Losses:
    return lambda step, part: {name: torch.tensor(value)}


def test_a_stated_term_that_is_0_throughout(tmp_path: Path) -> None:
    flags = {**GRPO, "loss_fn.positive_example_nll_weight": 0.1}
    (finding,) = told(_trained(tmp_path, _nothing(0.0), lambda *_: None, flags), "D152")
    assert "positive_nll_loss is exactly 0 in all 15 numbers" in finding.claim


@pytest.mark.parametrize(
    ("value", "flags"),
    [
        (0.0, {}),
        (0.0, {"loss_fn.positive_example_nll_weight": 0.0}),
        (0.0, {"loss_fn.positive_example_nll_weight": 0.1, "loss_fn.positive_nll_enabled": False}),
        (0.0, {"loss_fn.positive_example_nll_weight": 0.1, "loss_fn.positive_nll_start_step": 100}),
        (0.02, {"loss_fn.positive_example_nll_weight": 0.1}),
    ],
)
def test_terms_that_are_as_stated(value: float, flags: dict[str, Any], tmp_path: Path) -> None:
    path = _trained(tmp_path, _nothing(value), lambda *_: None, {**GRPO, **flags})
    assert not look(path, "D152").findings


@pytest.mark.parametrize(("estimator", "says"), [("grpo", False), ("gae", True)])
def test_a_critic_that_an_estimator_of_groups_has_none_of(estimator: str, says: bool, tmp_path: Path) -> None:
    flags = {**GRPO, "algorithm.adv_estimator": estimator, "value_loss_coef": 0.5}
    path = _trained(tmp_path, _nothing(0.0, "value_loss"), lambda *_: None, flags)
    assert bool(look(path, "D152").findings) == says


def test_a_kl_of_0_is_another_question(tmp_path: Path) -> None:
    path = _trained(tmp_path, _nothing(0.0, "kl_loss"), lambda *_: None, {**GRPO, "kl_loss_coef": 0.1})
    assert not look(path, "D152").findings


@pytest.mark.parametrize("flags", [{"actor.use_kl_loss": False}, {"actor.use_kl_loss": True, "kl_loss_coef": 0.0}])
def test_a_term_that_is_a_metric_alone(flags: dict[str, Any], tmp_path: Path) -> None:
    path = _trained(tmp_path, _term("kl_loss", "ref_log_prob", own=True), _short, {**TOKEN_MEAN, **flags})
    assert not told(path, "D28")
