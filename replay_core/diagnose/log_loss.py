"""Loss 0, and why: the causes that a log can tell apart (D01, D02, D03, D07, D23), or what it lacks (L01).

The chain of a zero: masks (no token counts) -> rewards (none differ in a group) -> gradient (0 although they do).
A loss of 0 alone is none of them: with an on-policy ratio of 1 and centred advantages it is 0 by construction, while
its gradient is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from replay_core.diagnose.finding import Evidence, Finding, Severity
from replay_core.diagnose.rule import Skip
from replay_core.diagnose.signals import Part, Point, signal_rule

#: D02: below this a displayed loss is 0 (four decimals).
ZERO_LOSS = 1e-4
#: D01: from this share of groups without a difference on, most of a batch teaches nothing.
DEAD_GROUPS = 0.5
#: A standard deviation of rewards below this is rounding, not a difference.
_NO_STD = 1e-7


@dataclass(frozen=True, slots=True)
class _Step:
    """What the log says of one step; None where it says nothing."""

    step: int | None
    loss: float | None
    grad: float | None
    frac_zero: float | None
    group_std: float | None
    batch_std: float | None
    """The largest standard deviation of any reward over the whole batch, whatever its group."""
    advantage: float | None
    truncated: float | None
    point: Point

    @property
    def is_dead(self) -> bool | None:
        """Whether no advantage differs from 0. None: the log does not tell."""
        if self.frac_zero is not None:
            return self.frac_zero >= 1
        if self.advantage is not None:
            return self.advantage == 0
        if self.group_std is not None:
            return self.group_std <= _NO_STD
        return None


def _steps(part: Part) -> list[_Step]:
    anchor = next(
        (s for name in ("loss", "pg_loss", "grad_norm", "frac_zero_std", "reward_std", "advantage_max")
         if (s := part.get(name)) is not None),
        None,
    )  # fmt: skip
    if anchor is None:
        return []
    names = (
        "loss", "pg_loss", "grad_norm", "frac_zero_std", "reward_max", "reward_min", "advantage_max", "advantage_min",
        "truncated",
    )  # fmt: skip
    at = {name: {p.step: p.value for p in s.points} if (s := part.get(name)) else {} for name in names}
    stds = [s for s in part.all("reward_std") if s.formula == "within-group"]
    groups = {p.step: p.value for s in stds[:1] for p in s.points}
    functions: dict[int | None, float] = {}
    for series in part.all("reward_function_std"):
        for p in series.points:
            if math.isfinite(p.value):
                functions[p.step] = max(functions.get(p.step, 0.0), p.value)
    found = []
    for point in anchor.points:
        step = point.step
        high, low = at["reward_max"].get(step), at["reward_min"].get(step)
        whole = functions.get(step, None if high is None or low is None else high - low)
        top, bottom = at["advantage_max"].get(step), at["advantage_min"].get(step)
        advantage = None if top is None or bottom is None else max(abs(top), abs(bottom))
        loss = at["loss"].get(step, at["pg_loss"].get(step))
        if at["loss"].get(step) == 0 and at["pg_loss"].get(step):
            loss = at["pg_loss"][step]  # the displayed loss may be one micro-batch's
        found.append(
            _Step(
                step, loss, at["grad_norm"].get(step), at["frac_zero_std"].get(step), groups.get(step), whole,
                advantage, at["truncated"].get(step), point,
            )
        )  # fmt: skip
    return found


def _severity(bad: int, steps: int) -> Severity:
    """Half of the steps (or the only one) is an error, a quarter a warning; fewer are told."""
    return "error" if 2 * bad >= steps else "warning" if 4 * bad >= steps else "info"


def _numbers(**values: float | None) -> tuple[Evidence, ...]:
    return tuple(Evidence(name, value, source="log") for name, value in values.items() if value is not None)


def _micro_steps(points: Iterable[Point]) -> tuple[int, ...]:
    return tuple(sorted({point.step for point in points if point.step is not None}))


@signal_rule(
    "D01L", "no reward differs within a group", link="groups",
    needs=("frac_zero_std|reward_std|advantage_max|event:warning",),
    source="seed 002; trl#3857; miles advisory (0.5)",
)  # fmt: skip
def no_difference_within_groups(part: Part) -> Iterable[Finding]:
    """D01, D03. GRPO's advantage is the reward less its group's mean: without a difference within the group it is 0.

    Fraction of groups whose rewards have std 0 (or, where not logged: the within-group std, the extreme advantages,
    the trainer's warning). 1 in half of the steps is an error, in a quarter a warning; a median of 0.5 and more a
    warning. Rewards that differ over the batch but in no group are D03: the same total for every completion of a
    prompt. A small reward std is fine: advantages are normalised.
    """
    steps = _steps(part)
    known = [step for step in steps if step.is_dead is not None]
    yield from _warned(part)
    dead = [step for step in known if step.is_dead]
    for across in (True, False):
        some = [step for step in dead if ((step.batch_std or 0) > _NO_STD) is across]
        if some:
            yield _dead(some, len(known), across)
    partly = sorted(step.frac_zero for step in known if step.frac_zero is not None)
    if partly and not dead and partly[len(partly) // 2 if len(partly) % 2 else len(partly) // 2 - 1] >= DEAD_GROUPS:
        worst = max(known, key=lambda step: step.frac_zero or 0)
        yield Finding(
            "D01", "warning", "half of the groups or more have no difference in reward: they teach nothing",
            _numbers(frac_zero_std=worst.frac_zero, reward_std=worst.group_std),
            "prompts too easy or too hard for this policy: all completions of a group are right, or all are wrong",
            "filter prompts by solve rate, raise the temperature, or sample more completions per prompt",
            "groups", "miles advisory (0.5)", worst.point.where("frac_zero_std"), tuple(_ints(known)),
        )  # fmt: skip


def _dead(some: list[_Step], steps: int, across: bool) -> Finding:
    first = some[0]
    severity = _severity(len(some), steps)
    numbers = _numbers(
        frac_zero_std=first.frac_zero, reward_std_within_groups=first.group_std, advantage_max=first.advantage,
        reward_std_over_the_batch=first.batch_std, loss=first.loss, grad_norm=first.grad, steps=len(some),
    )  # fmt: skip
    if across:
        return Finding(
            "D03", severity, "rewards differ over the batch, but in no group: every advantage is 0", numbers,
            "every completion of a prompt gets the same total reward (the reward depends on the prompt alone, the "
            "completions of a group are alike, or the reward functions cancel in their sum); the std logged per "
            "reward function is over the batch, not over a group",
            "look at the completions of one group (log_completions=True); rldbg record -- YOUR COMMAND, then "
            "rldbg diagnose rldbg-dump --rule D03",
            "groups", "trl#3857", first.point.where("reward_std"), tuple(_ints(some)),
        )  # fmt: skip
    return Finding(
        "D01", severity, "all rewards of every group are equal: every advantage is 0", numbers,
        "the judge is constant, or every prompt is too easy or too hard; a loss that is not 0 is then KL alone",
        "look at the rewards of one group (log_completions=True) and at the reward function; "
        "rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D01",
        "groups", "seed 002; miles advisory", first.point.where("reward_std"), tuple(_ints(some)),
    )  # fmt: skip


def _ints(steps: list[_Step]) -> list[int]:
    return [step.step for step in steps if step.step is not None]


def _warned(part: Part) -> Iterable[Finding]:
    """What the trainer of seed 002 itself says of a micro-batch."""
    alike = [told for told in part.warnings() if "All advantages are near zero" in told.text]
    same = [told for told in part.warnings() if "completions are identical" in told.text]
    for told, why in ((alike, "the judge gave every completion the same score"),
                      (same, "all completions of the prompt are the same text: the sampler is greedy, or has collapsed")):  # fmt: skip
        if told:
            micros = max(1, len({(p.step, p.micro, p.rank) for p in part.micros("micro_loss")} | {
                (one.point.step, one.point.micro, one.point.rank) for one in told}))  # fmt: skip
            yield Finding(
                "D01", _severity(len(told), micros), "all rewards of a group are equal: every advantage is 0",
                (Evidence("warning", told[0].text[:200], source=f"line {told[0].point.line}"),
                 Evidence("micro-batches", f"{len(told)} of {micros}", source="log")),
                why + "; a loss that is not 0 is then KL alone",
                "look at one group's completions and scores; rldbg record -- YOUR COMMAND",
                "groups", "seed 002", told[0].point.where("rewards"), _micro_steps(one.point for one in told),
            )  # fmt: skip


@signal_rule(
    "D02L", "loss 0 while training goes on", link="loss", needs=("loss|pg_loss", "grad_norm"),
    source="trl#3452, open-r1#239",
)  # fmt: skip
def zero_loss_is_expected(part: Part) -> Iterable[Finding]:
    """D02. |loss| < 1e-4 with a gradient norm above 0 is no error.

    With one update per batch the ratio is 1 and the loss is -mean(A) (+ beta * KL, 0 at first): centred advantages
    make it 0 whatever is learned. The gradient is not 0. Said as info, not as a warning.
    """
    some = [
        step for step in _steps(part)
        if step.loss is not None and abs(step.loss) < ZERO_LOSS and (step.grad or 0) > 0 and not step.is_dead
    ]  # fmt: skip
    if some:
        yield Finding(
            "D02", "info", "the loss is 0 by construction, the gradient is not: training goes on",
            _numbers(loss=some[0].loss, grad_norm=some[0].grad, reward_std=some[0].group_std, steps=len(some)),
            "with one update per batch the ratio is 1, and the mean of centred advantages is 0",
            "watch reward, grad_norm and KL instead of the loss",
            "loss", "trl#3452", some[0].point.where("loss"), tuple(_ints(some)),
        )  # fmt: skip


@signal_rule(
    "D23L", "gradient 0 although advantages are not", link="gradient",
    needs=("grad_norm", "frac_zero_std|reward_std|advantage_max"), source="ms-swift#5890",
)  # fmt: skip
def zero_gradient(part: Part) -> Iterable[Finding]:
    """D23. grad_norm = 0 while some group's rewards differ: the advantages do not reach the weights.

    Exactly 0 in half of the steps is an error, in a quarter a warning. A run whose completions are all cut and
    masked (D07) has no trained token, and is not this. A log cannot tell a detached loss from frozen weights, a
    loss scale from a mask: the gradients can.
    """
    known = [step for step in _steps(part) if step.grad is not None and step.is_dead is not None]
    if not known:
        raise Skip("no step has both a grad_norm and the spread of its rewards")
    zero = [step for step in known if step.grad == 0 and not step.is_dead]
    cut = [step for step in zero if step.truncated is not None and step.truncated >= 1]
    broken = [step for step in zero if step not in cut]
    if cut:
        yield Finding(
            "D07", _severity(len(cut), len(known)), "every completion is cut, and no gradient is left",
            _numbers(truncated=cut[0].truncated, grad_norm=0.0, loss=cut[0].loss, reward_std=cut[0].group_std),
            "truncated completions are masked out (mask_truncated_completions): no token is trained",
            "raise the limit of tokens, or train on truncated completions",
            "masks", "trl#3248", cut[0].point.where("grad_norm"), tuple(_ints(cut)),
        )  # fmt: skip
    if broken:
        first = broken[0]
        yield Finding(
            "D23", _severity(len(broken), len(known)), "the gradient is exactly 0 although rewards differ within groups",
            _numbers(grad_norm=0.0, loss=first.loss, frac_zero_std=first.frac_zero, reward_std=first.group_std,
                     advantage_max=first.advantage, steps=len(broken)),
            "the loss does not reach the weights: detached log-probabilities, frozen or wrongly sharded parameters, "
            "a loss scale of 0, an empty mask",
            "the log does not say where it is lost; the gradients do: rldbg record --gradients . -- YOUR COMMAND, "
            "then rldbg diagnose rldbg-dump",
            "gradient", "ms-swift#5890", first.point.where("grad_norm"), tuple(_ints(broken)),
        )  # fmt: skip


@signal_rule(
    "D07L", "no token counts", link="masks", needs=("num_masked|masks_in_input|event:warning",),
    source="seed 002: nano_gpt 1da2900, fixed in 547c4bf",
)  # fmt: skip
def no_masked_position(part: Part) -> Iterable[Finding]:
    """D07. The trainer counts 0 masked positions: the loss of the micro-batch is an empty sum.

    num_masked = 0 while the input holds masks (its own count; else other micro-batches of the run that do train)
    is a lost mask: logits and mask had different lengths and both were cut to the shorter. Without any mask in
    the input it is the data. Rewards that differ rule out D01.
    """
    lost = [point for point in part.micros("num_masked") if point.value == 0]
    none = [told for told in part.warnings() if "No masks in batch" in told.text or "No masked positions" in told.text]
    inputs = {(p.step, p.micro, p.rank): p for p in part.micros("masks_in_input")}
    losses = {(p.step, p.micro, p.rank): p for p in part.micros("pg_loss")}
    stds = {(p.step, p.micro, p.rank): p for p in part.micros("reward_std")}
    empty = [p for p in inputs.values() if p.value == 0]
    places = {(p.step, p.micro, p.rank) for p in lost}
    elsewhere = [p for key, p in losses.items() if p.value != 0 and key not in places]
    if lost:
        first = lost[0]
        key = first.step, first.micro, first.rank
        count = inputs.get(key)
        exist = count.value > 0 if count is not None else bool(elsewhere)
        of = max(len(losses), len(lost))
        evidence = [Evidence("num_masked", 0.0, "> 0", f"line {first.line}")]
        if count is not None:
            evidence.append(Evidence("masks_in_X", count.value, source=f"line {count.line}"))
        elif elsewhere:
            evidence.append(
                Evidence("micro-batches whose masks count", len(elsewhere), source=f"line {elsewhere[0].line}")
            )
        if key in stds:
            evidence.append(Evidence("reward std", stds[key].value, "not the cause", f"line {stds[key].line}"))
        if key in losses:
            evidence.append(Evidence("pg_loss", losses[key].value, source=f"line {losses[key].line}"))
        evidence.append(Evidence("micro-batches", f"{len(lost)} of {of}", source="log"))
        claim = (
            "logits/mask lengths disagree: masked-position count 0 while masks exist"
            if exist
            else "masked-position count 0: no token counts in the loss"
        )
        cause = (
            "the forward pass returns logits of the last position only (no targets given), and a fallback cuts "
            "completions and mask to that length: the loss is 0 unless position 0 is masked"
            if exist
            else "the input holds no masked position, or the mask is cut to the length of the logits; the log does not "
            "say how many masks the input holds"
        )
        yield Finding(
            "D07", "error", claim, tuple(evidence), cause,
            "print logits.shape beside mask.shape before the loss: they must agree in length; "
            "rldbg record -- YOUR COMMAND shows both",
            "masks", "seed 002", first.where("num_masked"), _micro_steps(lost),
        )  # fmt: skip
    if none or (empty and not lost):
        point = none[0].point if none else empty[0]
        yield Finding(
            "D07", "error", "the batch holds no masked position: nothing is trained on",
            (Evidence("warning", none[0].text[:120], source=f"line {none[0].point.line}"),) if none
            else (Evidence("masks_in_X", 0.0, "> 0", f"line {point.line}"),),
            "the data mask nothing: mask token, mask probability or dataset are not what the trainer expects",
            "look at one batch of the data; rldbg record -- YOUR COMMAND",
            "masks", "seed 002", point.where("masks_in_X"),
            _micro_steps([t.point for t in none] if none else empty),
        )  # fmt: skip


@signal_rule(
    "L01", "loss 0, and the log does not say why", link="loss", needs=("loss|pg_loss",),
    source="seed 002, facts of seed 002's real cause",
)  # fmt: skip
def zero_loss_untold(part: Part) -> Iterable[Finding]:
    """L01. A loss of exactly 0 that the log does not explain: says what would tell the six causes apart.

    The causes: no reward differs (D01, D03), no token counts (D07), the ratio is 1 (D02, no error), the gradient is
    lost (D23), the displayed loss is one micro-batch's. Looked at only where neither a gradient norm, the spread of
    rewards nor micro-batches are logged for the step.
    """
    told_in_micros = {point.step for point in part.micros("pg_loss")}
    zero = [step for step in _steps(part) if step.loss == 0 and step.step not in told_in_micros]
    open_ = [step for step in zero if step.is_dead is None and not step.grad]
    normal = [step for step in zero if step.is_dead is False and step.grad is None]
    if open_:
        first = open_[0]
        both = first.grad == 0
        yield Finding(
            "L01", "warning",
            "loss and gradient are 0, and the log does not say why" if both else "the loss is 0, and the log does not say why",
            _numbers(loss=0.0, grad_norm=first.grad, steps=len(open_)),
            "one of: equal rewards (needs reward_std or frac_reward_zero_std, per group), no token in the mask (needs the "
            "masked count), " + ("a gradient that does not reach the weights" if both else
            "an on-policy ratio of 1, which is no error (needs grad_norm), a gradient that is lost (needs grad_norm)")
            + ", or the last micro-batch's loss shown for the whole step (needs the loss per micro-batch)",
            "rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump",
            "loss", "seed 002", first.point.where("loss"), tuple(_ints(open_)),
        )  # fmt: skip
    if normal:
        first = normal[0]
        yield Finding(
            "L01", "info", "the loss is 0 while rewards differ: normal if the gradient is not 0, which is not logged",
            _numbers(loss=0.0, reward_std=first.group_std, frac_zero_std=first.frac_zero, steps=len(normal)),
            "with one update per batch the ratio is 1 and the mean of centred advantages is 0",
            "log grad_norm; rldbg record --gradients . -- YOUR COMMAND",
            "loss", "trl#3452", first.point.where("loss"), tuple(_ints(normal)),
        )  # fmt: skip
