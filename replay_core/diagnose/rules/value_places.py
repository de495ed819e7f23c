"""Where values lie: at the token they are of, or beside it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding
from replay_core.diagnose.rule import Skip, rule
from replay_core.diagnose.rules.value_loss import value_rows
from replay_core.diagnose.stating import finding, shown

#: Neighbouring tokens that tell; how far values have to be from the critic's own, and how near beside.
FEWEST, APART, NEAR = 12, 1e-3, 0.05


@rule("D101", "values lie beside their tokens", link="advantages", scope="case", lasts=True,
      explains=("D44", "D45", "D52", "D96", "L08"),
      source="V(s_t) is read before token t is: the same places in the rollout and in the critic's update")  # fmt: skip
def beside(case: Case) -> Iterator[Finding]:
    """The recorded values beside what the critic gives in the first optimizer step over them, which has the same
    weights: an error where they are those of the token before or after (to a twentieth of their distance to those of
    their own token, and 1e-3 of it and more), over 12 tokens and more.
    """
    own, after, before = [], [], []
    where, steps = None, set()
    for batch in case.batches():
        for part in value_rows(batch):
            if part.epoch or part.minibatch:
                continue
            same = part.sample[1:] == part.sample[:-1]
            inner = np.flatnonzero(same[1:] & same[:-1]) + 1
            if not len(inner):
                continue
            own.append(np.abs(part.old - part.new)[inner])
            after.append(np.abs(part.old[inner] - part.new[inner + 1]))
            before.append(np.abs(part.old[inner] - part.new[inner - 1]))
            where = where or batch.laid.where("values", sample=0)
            if batch.step is not None:
                steps.add(batch.step)
    if not own or sum(map(len, own)) < FEWEST or where is None:
        raise Skip(f"needs values, and a critic's new ones in its first update, of {FEWEST} tokens")
    apart, late, early = (float(np.concatenate(each).mean()) for each in (own, after, before))
    size = float(np.concatenate(own).size)
    if apart < APART or min(late, early) > NEAR * apart:
        return
    words = "after" if late < early else "before"
    yield finding(
        "error",
        f"values are shifted by one token: each is what the critic gives at the token {words} it, before any update",
        where,
        evidence=[shown("mean distance to the critic's value of the same token", apart, "0"),
                  shown(f"to that of the token {words}", min(late, early)), shown("tokens", size)],
        cause="a slice is one off where values are read before the updates, or where the critic is updated: a value is "
        "of the state before its token; GAE and returns are then of other places than the critic's predictions",
        steps=sorted(steps),
    )  # fmt: skip
