"""A learning rate beside the schedule that a run states: its warm-up, its least rate, and that it stays."""

from __future__ import annotations

from itertools import pairwise

from replay_core.diagnose.algorithm import Algorithm, learning_rate, of_policy, rates
from replay_core.diagnose.finding import Finding, shown, warning
from replay_core.diagnose.rule import given, rule, skip_if
from replay_core.diagnose.rules.learning import TOTAL
from replay_core.diagnose.signals import RunLog, Series

#: Lines that tell; a stated warm-up that is long enough to be missed; how near its largest a rate is there.
LINES, LONG, NEARLY, SEVERAL, WHOLE = 20, 20, 0.98, 8, 0.9
#: Times as many steps as stated before a warm-up is another one; how straight it rises.
TIMES, STRAIGHT = 2.0, 0.02
#: How near to the stated one the warm-up of another part's rate is.
NEARLY_AS_STATED = 0.1
#: What is left of a rate that is to stay, and of the least rate, before they are others.
STAYS, BELOW = 0.9, 0.5
_WARM_UP = ("warmup_steps", "lr_warmup_steps", "num_warmup_steps", "warmup_iters", "lr_warmup_iters")
_WARM_UP_SHARES = ("warmup_ratio", "lr_warmup_steps_ratio", "lr_warmup_ratio", "warmup_fraction", "lr_warmup_fraction")
_SCHEDULES = ("lr_scheduler_type", "lr_scheduler", "lr_decay_style", "lr_schedule", "scheduler_type", "warmup_style")
_RATES, _SHARES = ("min_lr", "lr_min", "min_learning_rate"), ("min_lr_ratio", "min_lr_rate")
_NEXT = "rldbg diagnose --explain D144   # then print the scheduler's settings, and how often it is stepped"


@rule("D144", "the learning rate does not follow its schedule", link="optimizer", scope="signals",
      needs=("learning_rate",), explains=("L08",),
      source="NeMo-RL#685, verl#1400: schedules that are stepped otherwise, or lose a setting")  # fmt: skip
def otherwise(log: RunLog) -> Finding | None:
    """The logged learning rate of each of the first 20 steps and more, beside what the run states of its schedule. A
    warning where a warm-up of 20 steps and more is stated, and the rate is at its largest (.98) from the first of all
    steps that are stated on; where it rises along a line through 0 in the first 8 steps and more that comes to the
    stated rate after twice as many steps as stated and more (fewer are those of a scheduler that is stepped with every
    mini-batch); where a rate that is stated to be constant has fallen by a tenth and more behind its warm-up, in nine
    of ten steps; and where it falls below half of the least rate that is stated, behind its largest.
    """
    series = given(log.get("learning_rate"))
    # Most runs with a critic state a schedule of its own, too.
    values, algorithm = series.finite, of_policy(log.algorithm)
    steps = [point.step for point in series.points]
    skip_if(len(values) < LINES or len(values) != len(steps), f"needs the learning rate of {LINES} steps")
    # Lines of every tenth step, or of a run that was resumed, are no beginning of a schedule.
    from_start = steps[0] in (0, 1) and all(b is not None and a is not None and b == a + 1 for a, b in pairwise(steps))
    top = max(values)
    skip_if(not top > 0, "the learning rate is 0")
    warm_up = algorithm.number(*_WARM_UP)
    # verl's -1 leaves it to a share of the run, which others state beside a number that it overrides.
    own = warm_up is not None and warm_up > 1 and not algorithm.number(*_WARM_UP_SHARES)
    if (
        from_start
        and warm_up is not None
        and own
        and (told := _warmed_otherwise(algorithm, series, warm_up)) is not None
    ):
        return told
    behind = values[values.index(top) :]
    kind = algorithm.word(*_SCHEDULES)
    if kind in ("constant", "constant_with_warmup") and len(behind) >= LINES and behind[-1] < STAYS * top:
        falls = sum(b < a for a, b in pairwise(behind))
        if falls >= STAYS * (len(behind) - 1):
            return warning(
                f"a {kind.replace('_', ' ')} learning rate is stated, and it falls to {behind[-1] / top:.0%} of its "
                f"largest in {len(behind)} steps",
                series.ended,
                series.shown(behind[-1], f"{top:.4g}"),
                cause="another schedule is made than is configured: a default of the trainer or of the backend's own "
                "settings (DeepSpeed, Megatron) stands in its place",
                next_step=_NEXT,
            )
    share, least = algorithm.number(*_SHARES), algorithm.number(*_RATES)
    floor = share * top if share is not None and 0 < share < 1 else least if least and least < top else None
    # A scheduler may have its last step of 0 behind the run.
    under = [value for value in behind if floor is not None and value < BELOW * floor]
    if floor is not None and len(under) >= 2:
        return warning(
            f"the learning rate falls to {min(under):.3g}, and the run states that it is not to fall below {floor:.3g}",
            series.ended,
            series.shown(min(under), f">= {floor:.3g}"),
            shown("largest learning rate", top),
            cause="the least rate does not reach the scheduler: it decays to 0 as its default is",
            next_step=_NEXT,
        )
    return None


def _warmed_otherwise(algorithm: Algorithm, series: Series, warm_up: float) -> Finding | None:
    values = series.finite
    top = max(values)
    total = algorithm.number(*TOTAL)
    # Lines without their steps may be of every tenth: as many as steps are stated tell that they are of each.
    if warm_up >= LONG and min(values[:3]) >= NEARLY * top and total and len(values) >= WHOLE * total:
        return warning(
            f"a warm-up of {warm_up:g} steps is stated, and the learning rate is at its largest from the first step on",
            series.of(series.points[:1]),
            series.shown(values[0], f"{top / warm_up:.3g}"),
            shown("largest learning rate", top),
            cause="the warm-up does not reach the scheduler, or the scheduler is not the one that is stepped: the "
            "first updates, whose moments are of few batches, are as large as any",
            next_step=_NEXT,
        )
    stated = learning_rate(algorithm)
    if not stated or top > stated * (1 + STRAIGHT):
        return None
    rising = values[: next((at for at, value in enumerate(values) if value >= NEARLY * stated), len(values))]
    # Lines of micro-batches are several of one update, and its rate stands in each of them.
    if len(rising) < SEVERAL or any(a == b for a, b in pairwise(rising)):
        return None
    # Where the first logged rate is 0 the schedule is logged before its step, else behind it.
    begin = 0 if rising[0] == 0 else 1
    slope = rising[-1] / (len(rising) - 1 + begin)
    if not slope > 0 or any(
        abs(value - slope * (at + begin)) > STRAIGHT * rising[-1] for at, value in enumerate(rising)
    ):
        return None
    takes = stated / slope
    # The rate that is logged may be the one of another part of the model, which rises as is stated.
    if takes < TIMES * warm_up or any(
        abs(each / slope - warm_up) <= NEARLY_AS_STATED * warm_up for each in rates(algorithm)
    ):
        return None
    return warning(
        f"a warm-up of {warm_up:g} steps is stated, and the learning rate rises as if it took {takes:.0f}: "
        f"{takes / warm_up:.3g} times as many",
        series.of(series.points[: len(rising)]),
        series.shown(rising[-1], f"{min(stated, stated * len(rising) / warm_up):.3g}"),
        shown("learning rate that is stated", stated),
        cause="the scheduler counts in other steps than the warm-up is given in: samples of which it is told one at a "
        "time (Megatron: step(increment=global batch size)), or a total that is multiplied by the micro-batches",
        next_step=_NEXT,
    )
