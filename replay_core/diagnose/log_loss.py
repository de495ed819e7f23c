"""Loss 0, and why: by construction (D02), without a gradient (D23), or untold (L01).

The chain of a zero: rewards (none differ in a group: `log_groups`) -> masks (no token counts: `log_masks`) -> gradient
(0 although they do). A loss of 0 alone is none of them: with an on-policy ratio of 1 and centred advantages it is 0 by
construction, while its gradient is not.
"""

from __future__ import annotations

from collections.abc import Iterable

from replay_core.diagnose.finding import Finding
from replay_core.diagnose.log_steps import (
    is_cut,
    numbers,
    severity_of,
    step_numbers,
    steps_told,
)
from replay_core.diagnose.rule import Skip
from replay_core.diagnose.signals import Part, signal_rule

#: D02: below this a displayed loss is 0 (four decimals).
ZERO_LOSS = 1e-4


@signal_rule(
    "D02",
    "loss 0 while training goes on",
    link="loss",
    needs=("loss|pg_loss", "grad_norm"),
    source="trl#3452, open-r1#239",
)
def zero_loss_is_expected(part: Part) -> Iterable[Finding]:
    """D02. |loss| < 1e-4 with a gradient norm above 0 is no error.

    With one update per batch the ratio is 1 and the loss is -mean(A) (+ beta * KL, 0 at first): centred advantages
    make it 0 whatever is learned. The gradient is not 0. Said as info, not as a warning.
    """
    some = [
        step for step in steps_told(part)
        if step.loss is not None and abs(step.loss) < ZERO_LOSS and (step.grad or 0) > 0 and not step.is_dead
    ]  # fmt: skip
    if some:
        yield Finding(
            "D02",
            "info",
            "the loss is 0 by construction, the gradient is not: training goes on",
            numbers(loss=some[0].loss, grad_norm=some[0].grad, reward_std=some[0].group_std, steps=len(some)),
            "with one update per batch the ratio is 1, and the mean of centred advantages is 0",
            "watch reward, grad_norm and KL instead of the loss",
            "loss",
            "trl#3452",
            some[0].point.where("loss"),
            tuple(step_numbers(some)),
        )


@signal_rule(
    "D23",
    "gradient 0 although advantages are not",
    link="gradient",
    needs=("grad_norm", "frac_zero_std|reward_std|advantage_max"),
    source="ms-swift#5890",
)
def zero_gradient(part: Part) -> Iterable[Finding]:
    """D23. grad_norm = 0 while some group's rewards differ: the advantages do not reach the weights.

    Exactly 0 in half of the steps is an error, in a quarter a warning. A run whose completions are all cut and
    masked (D07) has no trained token, and is not this. A log cannot tell a detached loss from frozen weights, a
    loss scale from a mask: the gradients can.
    """
    known = [step for step in steps_told(part) if step.grad is not None and step.is_dead is not None]
    if not known:
        raise Skip("no step has both a grad_norm and the spread of its rewards")
    broken = [step for step in known if step.grad == 0 and not step.is_dead and not is_cut(step)]
    if broken:
        first = broken[0]
        yield Finding(
            "D23",
            severity_of(len(broken), len(known)),
            "the gradient is exactly 0 although rewards differ within groups",
            numbers(
                grad_norm=0.0,
                loss=first.loss,
                frac_zero_std=first.frac_zero,
                reward_std=first.group_std,
                advantage_max=first.advantage,
                steps=len(broken),
            ),
            "the loss does not reach the weights: detached log-probabilities, frozen or wrongly sharded parameters, "
            "a loss scale of 0, an empty mask",
            "the log does not say where it is lost; the gradients do: rldbg record --gradients . -- YOUR COMMAND, "
            "then rldbg diagnose rldbg-dump",
            "gradient",
            "ms-swift#5890",
            first.point.where("grad_norm"),
            tuple(step_numbers(broken)),
        )


@signal_rule(
    "L01",
    "loss 0, and the log does not say why",
    link="loss",
    needs=("loss|pg_loss",),
    source="seed 002, facts of seed 002's real cause",
)
def zero_loss_untold(part: Part) -> Iterable[Finding]:
    """L01. A loss of exactly 0 that the log does not explain: says what would tell the six causes apart.

    The causes: no reward differs (D01, D03), no token counts (D07), the ratio is 1 (D02, no error), the gradient is
    lost (D23), the displayed loss is one micro-batch's. Looked at only where neither a gradient norm, the spread of
    rewards nor micro-batches are logged for the step.
    """
    told_in_micros = {point.step for point in part.micros("pg_loss")}
    zero = [step for step in steps_told(part) if step.loss == 0 and step.step not in told_in_micros]
    open_ = [step for step in zero if step.is_dead is None and not step.grad]
    normal = [step for step in zero if step.is_dead is False and step.grad is None]
    if open_:
        first = open_[0]
        both = first.grad == 0
        yield Finding(
            "L01",
            "warning",
            "loss and gradient are 0, and the log does not say why"
            if both
            else "the loss is 0, and the log does not say why",
            numbers(loss=0.0, grad_norm=first.grad, steps=len(open_)),
            "one of: equal rewards (needs reward_std or frac_reward_zero_std, per group), no token in the mask "
            "(needs the masked count), "
            + (
                "a gradient that does not reach the weights"
                if both
                else "an on-policy ratio of 1, which is no error, or a gradient that is lost (both need grad_norm)"
            )
            + ", or the last micro-batch's loss shown for the whole step (needs the loss per micro-batch)",
            "rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump",
            "loss",
            "seed 002",
            first.point.where("loss"),
            tuple(step_numbers(open_)),
        )
    if normal:
        first = normal[0]
        yield Finding(
            "L01",
            "info",
            "the loss is 0 while rewards differ: normal if the gradient is not 0, which is not logged",
            numbers(loss=0.0, reward_std=first.group_std, frac_zero_std=first.frac_zero, steps=len(normal)),
            "with one update per batch the ratio is 1 and the mean of centred advantages is 0",
            "log grad_norm; rldbg record --gradients . -- YOUR COMMAND",
            "loss",
            "trl#3452",
            first.point.where("loss"),
            tuple(step_numbers(normal)),
        )
