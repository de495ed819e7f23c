"""Figures that stand where they cannot: a loss that leaps and stays there, a mean ratio away from 1, and a share of
solved prompts that falls while the mean reward does not.
"""

from __future__ import annotations

import math
from statistics import median

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Finding, finding, shown, warning
from replay_core.diagnose.leaps import leap_in
from replay_core.diagnose.rule import given, rule, skip_if
from replay_core.diagnose.signals import RunLog

#: What is logged of a policy that is trained on rewards.
_OF_RL = ("reward", "pg_loss", "kl", "entropy", "advantage_mean", "policy_kl", "clip_fraction")
#: A leap of the loss: how many times what it was, and nats more, for an error and to be worth knowing.
_ERROR, _KNOWN = (2.0, 1.0), (1.5, 0.5)


@rule("L66", "the loss leaps up and stays there", link="loss", scope="signals", needs=("loss",), lasts=True,
      source="what fine-tuning on broken weights, labels or data looks like from one step on")  # fmt: skip
def loss_leaps(log: RunLog) -> Finding | None:
    """The loss of supervised training (nothing of a policy is logged) that goes, within one step, to a level that it
    keeps to the end, twice what it was and a nat more: an error. Half as much again and half a nat more is worth
    knowing: another stage's data may be as hard. A spike that comes back is none.
    """
    series = given(log.get("loss"))
    skip_if(any(map(log.has, _OF_RL)), "needs the loss of supervised training")
    leap = leap_in(series)
    if leap is None or leap.before <= 0:
        return None
    times, more = leap.after / leap.before, leap.after - leap.before
    if times < _KNOWN[0] or more < _KNOWN[1]:
        return None
    broken = times >= _ERROR[0] and more >= _ERROR[1]
    return finding(
        "error" if broken else "info",
        f"{series.name} leaps from {leap.before:.3g} to {leap.after:.3g} at step {leap.at.step}, within one step, and "
        "stays there",
        leap.at.where(series.name),
        series.shown_at(leap.at, f"about {leap.before:.3g}"),
        shown("level from there on", leap.after, f"< {_ERROR[0] * leap.before:.3g}", series.source),
        cause="weights that are broken from that update on (a gradient that was not clipped, a NaN that was replaced, "
        "a shard that was lost or loaded anew, a learning rate that leaped), or data that is another from there on (a "
        "new file, labels that are shifted, another template)",
        next_step="look at the gradient norm and the learning rate of that step; evaluate the checkpoint before it on "
        "a batch behind it: if that one is well, the weights are broken, else the data is; rldbg show CHECKPOINT",
        steps=[p.step for p in series.points if p.step is not None and p.step >= (leap.at.step or 0)],
    )


#: How far a mean ratio lies from 1, the share of the steps in which it does, and the level over the last of them.
_OVER, _UNDER, _MOST = 1.15, 0.8, 0.75


@rule("L67", "the mean ratio of policy to old policy is not 1", link="ratio", scope="signals", needs=("ratio_mean",),
      lasts=True, explains=("L08",), source="E[p/q] under q is 1, whatever p and q are")  # fmt: skip
def ratio_off(log: RunLog) -> Finding | None:
    """The mean ratio over 1.15, or under .8, in three quarters of 8 steps and more: a warning. Over tokens that the old
    policy sampled its mean is 1, however far the policy has moved: where it is not, the old log-probabilities are of
    another distribution than sampled them.
    """
    series = next(
        (one for one in log.all("ratio_mean") if len(one.finite) >= trends.MIN_STEPS and min(one.finite) > 0), None
    )
    if series is None:
        return None
    values, now = series.finite, trends.level(series.finite)
    off = sum(value > _OVER for value in values) if now > 1 else sum(value < _UNDER for value in values)
    if off < _MOST * len(values) or _UNDER <= now <= _OVER or not math.isfinite(now):
        return None
    return warning(
        f"the mean ratio of the policy to the old one is {now:.3g} ({series.name}), in {off} of {len(values)} steps: "
        "of samples of the old policy it is 1",
        series.last.where(series.name),
        series.shown(now, "1"),
        cause="the old log-probabilities are not of what sampled: another temperature (or top-k, top-p) in the engine "
        "than in the trainer, weights of another version, a shift by a token, dropout, or padding that is counted",
        next_step="compare log-probabilities of one batch before any update with the engine's: rldbg record -- YOUR "
        "COMMAND, then rldbg diagnose rldbg-dump",
    )


#: Steps that show it, and what is left of the share of prompts that any answer solves.
_STEPS, _LEFT = 12, 0.75


@rule("L68", "fewer prompts are solved by any answer", link="trend", scope="signals", needs=("pass_at_k",), lasts=True,
      source="SkyRL: reward/avg_pass_at_k; pass@k falls as the entropy is used up")  # fmt: skip
def pass_at_k_falls(log: RunLog) -> Finding | None:
    """pass@k of the training's own prompts that falls to three quarters of what it was and less (last fifth against
    first, by no chance, 12 steps and more) while the mean reward does not: a warning.
    """
    for series in log.all("pass_at_k"):
        values, reward = series.finite, log.get("reward")
        few = max(3, len(values) // 5)
        if len(values) < _STEPS or trends.drift(values) > -trends.DRIFT_Z:
            continue
        begun, now = median(values[:few]), median(values[-few:])
        if now > _LEFT * begun or reward is None or trends.drift(reward.finite) < -trends.DRIFT_Z:
            continue
        return warning(
            f"fewer and fewer prompts are solved by any of their answers: {series.name} falls from {begun:.3g} to "
            f"{now:.3g} while {reward.name} does not",
            series.ended,
            series.shown(now, f">= {_LEFT * begun:.3g}"),
            shown("Mann-Kendall z", trends.drift(values)),
            cause="answers to a prompt become one and the same: what is solved often is learnt, and what was solved "
            "now and then is lost (entropy that is used up, no KL, easy prompts that are trained on most)",
            next_step="read the answers of one group early and late; a KL term or a higher clip bound "
            "(clip_ratio_high), harder prompts; evaluate pass@k of a checkpoint from before",
        )
    return None
