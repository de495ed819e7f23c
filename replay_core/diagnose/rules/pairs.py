"""Preference pairs (DPO and its kin): which of the two the policy comes to prefer, and at what price."""

from __future__ import annotations

from statistics import median

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Finding, error, shown, warning
from replay_core.diagnose.rule import Skip, given, rule
from replay_core.diagnose.signals import RunLog, Series

#: Steps of a trend; of two figures that are one.
FEWEST, ALIKE = 12, 5
#: What the chosen responses may lose of their log ratio for each nat of margin, and how much before it is worth saying.
PRICE, LOST = 1.25, 2.0
#: The last steps, their margin (of beta times log ratios) and their loss, where a pair is won beyond doubt.
TAIL, WON, LEFT = 3, 8.0, 5e-3
_LOOK = "decode one pair as the model gets it: prompt, chosen, rejected, and the mask of both"


def _of(log: RunLog, signal: str, word: str) -> Series | None:
    return next((one for one in log.all(signal) if word in one.name), None)


def _saturated(log: RunLog, likely: Series | None) -> Finding | None:
    """A margin so large that nothing of the loss, -log sigmoid(margin), is left."""
    margin, loss = _of(log, "pair_reward", "margins"), log.get("loss")
    if margin is None or loss is None or min(len(margin.finite), len(loss.finite)) < TAIL:
        return None
    now, left = median(margin.finite[-TAIL:]), median(loss.finite[-TAIL:])
    if now < WON or left > LEFT:
        return None
    fell = [] if likely is None else [likely.shown(min(likely.finite), f"was {likely.finite[0]:.4g}")]
    return warning(
        f"DPO is over-optimised: the margin of {now:.3g} leaves a loss of {left:.2g}, and the policy has gone far from "
        "its reference for it",
        margin.ended,
        margin.shown(now, f"< {WON:g}"),
        loss.shown(left),
        *fell,
        *(rate.shown(max(rate.finite)) for rate in log.all("learning_rate")[:1] if rate.finite),
        cause="a learning rate that is too high for DPO, a beta that is too low, too many epochs, or pairs that are "
        "told apart by something trivial (a length, a template): what is learnt beyond this point is forgetting",
        next_step="lower the learning rate or raise beta, stop earlier; look at generations and at the margin on "
        "held-out pairs",
        steps=[p.step for p in loss.points if p.value <= LEFT],
    )  # fmt: skip


@rule("D72", "preference pairs teach the wrong thing", link="rewards", scope="signals",
      needs=("pair_reward|pair_logps",), explains=("D46", "L01", "L08"),
      source="arXiv 2305.18290; likelihood displacement: arXiv 2410.08847; trl#1236")  # fmt: skip
def pairs(log: RunLog) -> Finding | None:
    """Chosen and rejected responses with one log-probability in every one of 5 steps and more: an error, they are the
    same text. A margin that falls by more than chance explains and is below 0 at the end (12 steps and more): an error,
    the rejected ones are learnt. Chosen responses whose reward falls below -2 while each nat of margin costs them 1.25
    and more: a warning, both become unlikely. A loss below .005 at a margin of 8 and more, in the median of the last 3
    steps: a warning, there is nothing left to learn, and the policy has gone far for it.
    """
    likely, unlikely = _of(log, "pair_logps", "chosen"), _of(log, "pair_logps", "rejected")
    if likely is not None and unlikely is not None and len(likely.finite) >= ALIKE and likely.values == unlikely.values:
        return error(
            f"chosen and rejected responses are the same text: {likely.name} and {unlikely.name} are equal in all "
            f"{len(likely.values)} steps",
            likely,
            likely.shown(likely.last.value),
            unlikely.shown(unlikely.last.value, "another number"),
            cause="both columns are read from one field, or both are cut to the prompt they share (a limit that is "
            "too small)",
            next_step=_LOOK,
        )
    if (saturated := _saturated(log, likely)) is not None:
        return saturated
    chosen, rejected = _of(log, "pair_reward", "chosen"), _of(log, "pair_reward", "rejected")
    if chosen is None or rejected is None or len(chosen.finite) < FEWEST or len(rejected.finite) < FEWEST:
        raise Skip(f"needs the rewards of chosen and rejected responses of {FEWEST} steps")
    told = {p.step: p.value for p in rejected.points}
    margins = [p.value - told[p.step] for p in chosen.points if p.step in told]
    now = median(margins[-4:])
    if now < 0 and trends.drift(margins) < -trends.DRIFT_Z:
        return error(
            f"the wrong way round: the rejected responses are preferred, by a margin of {-now:.3g} that grows",
            rejected.ended,
            chosen.shown(chosen.last.value),
            rejected.shown(rejected.last.value, "below the chosen ones'"),
            cause="chosen and rejected are swapped in the data or where the loss is made, or its sign is turned",
            next_step=_LOOK,
        )
    fallen = given(chosen).finite[-4:]
    if median(fallen) < -LOST and trends.drift(chosen.finite) < -trends.DRIFT_Z and -median(fallen) > PRICE * now > 0:
        return warning(
            f"both fall: chosen responses get less likely too, {median(fallen):.3g} for a margin of {now:.3g}",
            chosen.ended,
            chosen.shown(median(fallen), f"> {-LOST:g}"), shown("margin", now),
            rejected.shown(rejected.last.value),
            cause="the loss sees the difference alone: the likelihood goes to responses that stand in no pair "
            "(learning rate too high, beta too low, pairs that are nearly alike)",
            next_step="lower the learning rate or raise beta; add an SFT term on the chosen responses (rpo_alpha)",
        )  # fmt: skip
    return None
