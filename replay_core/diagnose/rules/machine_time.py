"""Where time goes, by counts beside the training: ranks that wait, requests made twice, drafts that fail."""

from __future__ import annotations

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Finding, finding, info, shown
from replay_core.diagnose.rule import given, rule, skip_if
from replay_core.diagnose.signals import RunLog

#: Tokens of the busiest rank as a multiple of the least busy one's; the part of their time that ranks then wait.
APART, WAIT = 2.0, 0.5


@rule("L85", "ranks have unequal work", link="time", scope="signals", needs=("least_tokens", "most_tokens"),
      lasts=True, source="verl: global_seqlen/balanced_min, balanced_max")  # fmt: skip
def unequal(log: RunLog) -> Finding | None:
    """Tokens of the rank with most and of that with least, after they were balanced, over 8 steps and more: twice and
    more apart (the level of the last quarter) worth knowing; a warning where the mean of all is below half of the most,
    so that more than half of all ranks' time is spent waiting.
    """
    least, most, mean = given(log.get("least_tokens")), given(log.get("most_tokens")), log.get("mean_tokens")
    skip_if(min(len(least.finite), len(most.finite)) < trends.MIN_STEPS, f"needs {trends.MIN_STEPS} steps")
    last = max(3, len(most.finite) // 4)
    low, high = trends.level(least.finite, last), trends.level(most.finite, last)
    if not low >= 0 or not high >= APART * low or high <= 0:
        return None
    middle = (low + high) / 2 if mean is None or not mean.finite else trends.level(mean.finite, last)
    waits = 1 - middle / high
    return finding(
        "warning" if waits > WAIT else "info",
        f"one rank has {high:.4g} tokens where another has {low:.4g}: ranks wait for {waits:.0%} of an update on "
        "average",
        most.ended,
        most.shown(high, f"< {APART * low:.4g}"),
        least.shown(low),
        shown("tokens of the mean rank", middle),
        cause="samples are shared out by their number, or a few long ones are more than a rank's part of the batch: "
        "all ranks wait for the busiest at each collective",
        next_step="share samples out by tokens (balance_batch, dynamic batch sizes), with more samples to a batch",
    )


#: Preemptions of a request, on average: worth knowing, and a warning.
PREEMPTED, TWICE = 0.1, 1.0


@rule("L86", "requests are preempted", link="time", scope="signals", needs=("preempted",), explains=("D37",),
      lasts=True, source="verl: agent_loop/num_preempted/mean")  # fmt: skip
def preempted(log: RunLog) -> Finding | None:
    """How often a request is preempted by the engine, on average: 1 and more in the last quarter of 5 steps and more a
    warning (each is computed twice), .1 worth knowing. Where an engine does not tell, verl logs -1.
    """
    series = given(log.get("preempted"))
    values = series.finite
    skip_if(len(values) < 5, "needs 5 steps")
    now = trends.level(values, max(3, len(values) // 4))
    if now < PREEMPTED:
        return None
    return finding(
        "warning" if now >= TWICE else "info",
        f"the engine preempts requests, each {now:.2g} times on average: {series.name}",
        series.between(over=0),
        series.shown(now, "0"),
        cause="the KV cache is too small for the sequences that run at once: what was computed of a preempted one is "
        "thrown away and computed again",
        next_step="raise gpu_memory_utilization or tensor parallelism; lower max_num_seqs or the response length",
    )


#: How many times its first level the loss of drafts comes to.
GROWS = 2.0


@rule("L87", "the loss of drafts grows", link="trend", scope="signals", needs=("draft_loss",),
      source="slime: train/mtp_loss; multi-token prediction beside the policy")  # fmt: skip
def drafts(log: RunLog) -> Finding | None:
    """The loss of layers that predict several tokens (MTP, drafts) at twice its first level and more, in the last
    quarter of 8 steps and more, by more than chance: worth knowing. The policy is none the worse; sampling is slower.
    """
    for series in log.all("draft_loss"):
        values = series.finite
        last = max(3, len(values) // 4)
        if len(values) < trends.MIN_STEPS:
            continue
        begun, now = trends.level(values[:last]), trends.level(values, last)
        if begun > 0 and now >= GROWS * begun and trends.rises(values):
            return info(
                f"drafts fail ever more: {series.name} grows from {begun:.3g} to {now:.3g}",
                series.ended,
                series.shown(now, f"about {begun:.3g}"),
                cause="the policy moves and its layers that draft tokens do not follow (they are not trained, their "
                "gradient is cut off, or their loss has the wrong inputs): drafts are rejected, and sampling gets "
                "slower",
                next_step="look at the accepted length of drafts in the engine's log; train the layers along "
                "(enable-mtp-training), or sample without",
            )
    return None
