"""Pairs whose better and worse answer are one and the same text: they teach nothing, and no model tells them apart."""

from __future__ import annotations

import math

from replay_core.diagnose.finding import Finding, share, shown, warning
from replay_core.diagnose.rule import Skip, rule
from replay_core.diagnose.rules.by_chance import RIGHT
from replay_core.diagnose.signals import RunLog

#: What a pair of equal answers loses, how near to its share of that a line's loss is, and lines of it.
COIN, NEAR, LINES = math.log(2), 0.01, 3
#: A share of pairs that are not told apart, and a mean margin of the rest that leaves no doubt about any of them.
SHARE, SURE = 0.2, 4.0


@rule("L49", "pairs are of two equal answers", link="rewards", scope="signals", needs=("loss", "reward_function"),
      explains=("L40", "L44", "L47", "L08"),
      source="Bradley-Terry and DPO: -log sigmoid(0) = ln 2 for every equal pair")  # fmt: skip
def equal_pairs(log: RunLog) -> Finding | None:
    """The loss is ln 2 times the share of pairs that are not told apart (to .01), in 3 lines and more in which that
    share is over .2 and the mean margin over 4: a warning. Pairs that differ are told apart surely and lose nothing;
    what remains has a margin of exactly 0.
    """
    right = next((one for one in log.all("reward_function") if RIGHT.search(one.name)), None)
    margin = next((one for one in log.all("pair_reward") if "margin" in one.name), None)
    loss = log.get("loss")
    if right is None or margin is None or loss is None:
        raise Skip("needs the loss, the share of right pairs and their margin")
    rights = {point.step: point.value for point in right.points}
    margins = {point.step: point.value for point in margin.points}
    sure = [
        (point, 1 - rights[point.step]) for point in loss.points
        if point.step in rights and margins.get(point.step, 0.0) > SURE and 1 - rights[point.step] > SHARE
    ]  # fmt: skip
    equal = [(point, wrong) for point, wrong in sure if abs(point.value - wrong * COIN) < NEAR]
    if len(equal) < LINES or len(equal) < 0.6 * len(sure):
        return None
    point, wrong = equal[-1]
    norms = log.get("grad_norm")
    return warning(
        f"{share(len(equal), len(sure))} lines lose exactly ln 2 for each pair that is not told apart ({wrong:.0%} "
        "of them "
        "in the last): those pairs hold the same answer twice, and nothing is left to learn",
        point.where(loss.name),
        loss.shown_at(point, f"about 0 at a margin of {margins[point.step]:.3g}"),
        shown(f"ln 2 x (1 - {right.name})", wrong * COIN),
        right.shown(rights[point.step], "> 0.9 at such a margin"),
        *([] if norms is None else [norms.shown(norms.last.value)]),
        cause="chosen and rejected of many rows are one text: data that was made so (an answer that was sampled "
        "twice, a "
        "judge's tie), both cut to what they share (max_length, a template that drops the last message), or a "
        "column that "
        "is read twice. Pairs that do differ are told apart at once, so that the gradient vanishes",
        next_step="count rows with chosen == rejected, as texts and as tokens behind the prompt; leave them out",
        steps=[each.step for each, _ in equal],
    )
