"""A loss of demonstrations that is that of a uniform guess over the vocabulary."""

from __future__ import annotations

import math

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Finding, shown, warning
from replay_core.diagnose.rule import given, rule, skip_if
from replay_core.diagnose.rules.held_out import PAID
from replay_core.diagnose.signals import RunLog

#: ln of the least and largest vocabulary, of what models of language have; how little it falls; steps.
LOW, HIGH, FALLS, STEPS = math.log(30_000), math.log(300_000), 0.97, 8


@rule("L88", "the loss is that of a uniform guess", link="loss", scope="signals", needs=("loss",),
      explains=("L14", "L48", "L59"), source="a uniform guess has a cross-entropy of ln of the vocabulary")  # fmt: skip
def uniform(log: RunLog) -> Finding | None:
    """A loss of demonstrations (nothing is paid, no pairs) between ln 30,000 and ln 300,000 in all of 8 steps and more,
    that does not fall by 3 %, while a rate other than 0 is logged: a warning. A model that is trained from random
    weights on begins there and falls at once.
    """
    series = given(log.get("loss"))
    values = series.finite
    skip_if(any(map(log.has, ("held_out", *PAID))), "it is no run of demonstrations alone")
    skip_if(len(values) < STEPS, f"needs {STEPS} steps")
    begun, now = trends.level(values[:3]), trends.level(values, max(3, len(values) // 4))
    if not (min(values) >= LOW and max(values) <= HIGH) or now < FALLS * begun:
        return None
    rate = log.get("learning_rate")
    if rate is not None and not any(rate.finite):
        return None
    return warning(
        f"the loss is that of a uniform guess: {series.name} is {begun:.4g} at first and {now:.4g} at the end, about "
        f"ln of a vocabulary of {math.exp(now):,.0f}",
        series,
        series.shown(now, "1 to 3 nats, of a model that was trained"),
        shown("tokens of a vocabulary of which a uniform guess has that loss", round(math.exp(now))),
        cause="the model knows nothing: its weights (or its head alone) were not loaded and are random or 0, another "
        "tokenizer's ids are fed to it, or labels are shifted or another text's",
        next_step="look for weights that were newly initialized, or keys that are missing, where the model is loaded; "
        "let it write a line; decode the labels of one sample",
    )
