"""Where values lie: at the token they are of, or beside it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, error, shown
from replay_core.diagnose.places import places_of
from replay_core.diagnose.rule import Skip, rule
from replay_core.diagnose.rules.value_loss import value_rows
from replay_core.diagnose.rules.value_targets import is_of_gae

#: Tokens of a response that are followed for places that samples share.
FOLLOWED = 64


@dataclass(slots=True)
class _Shared:
    """Over the steps of a run: how far values lie apart at places that samples share, and go apart from (`parted`), and
    where they share the place's token, too (`shared`).
    """

    parted: list[float] = field(default_factory=list)
    shared: list[float] = field(default_factory=list)
    where: Where | None = None
    steps: set[int] = field(default_factory=set)

    def take(self, batch: StepBatch) -> None:
        values = batch.columns.of("values")
        if values is None or not is_of_gae(batch):
            return
        places = defaultdict[int, dict[int, list[float]]](lambda: defaultdict(list))
        for before, here, at in places_of(batch, FOLLOWED):
            if values.said_N[at] and np.isfinite(values.values_N[at]):
                places[before][here].append(float(values.values_N[at]))
        apart = [float(np.ptp([each[0] for each in tokens.values()])) for tokens in places.values() if len(tokens) > 1]
        self.parted += apart
        self.shared += [float(np.ptp(each)) for tokens in places.values() for each in tokens.values() if len(each) > 1]
        if apart:
            self.where = self.where or batch.laid.where("values", sample=0)
            self.steps |= set() if batch.step is None else {batch.step}

    def told(self) -> Finding | None:
        if len(self.parted) < FEWEST or len(self.shared) < FEWEST:
            return None
        apart, same = float(np.mean(self.parted)), float(np.mean(self.shared))
        if apart < APART or same > NEAR * apart:
            return None
        return error(
            "values are read one token late: each depends on the very token whose value it is to be before",
            self.where,
            evidence=[
                shown("mean range of values where samples differ in that token alone", apart, "0"),
                shown("where they share it, too", same),
                shown("places", len(self.parted)),
            ],
            cause="a slice is one off where the critic is read: the value of a state holds what was done in it, and "
            "advantages no longer tell of the token; the reward's token has the value of what comes after the end",
            steps=sorted(self.steps),
        )


#: Neighbouring tokens that tell; how far values have to be from the critic's own, and how near beside.
FEWEST, APART, NEAR = 12, 1e-3, 0.05


@rule("D101", "values lie beside their tokens", link="advantages", scope="case", lasts=True,
      explains=("D44", "D45", "D52", "D96", "L08"),
      source="V(s_t) is read before token t is: the same places in the rollout and in the critic's update")  # fmt: skip
def beside(case: Case) -> Iterator[Finding]:
    """The recorded values beside what the critic gives in the first optimizer step over them, which has the same
    weights: an error where they are those of the token before or after (to a twentieth of their distance to those of
    their own token, and 1e-3 of it and more), over 12 tokens and more.

    And values of samples that share a prompt and all tokens before a place, and there go apart: a value that is read
    before its token is one number at such a place. An error where it is one where the token is shared, too, and
    another where only the token differs (12 such places and more), while GAE makes the returns of it as it is.
    """
    known = _Shared()
    for batch in case.batches():
        known.take(batch)
    if (told := known.told()) is not None:
        yield told
        return
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
    yield error(
        f"values are shifted by one token: each is what the critic gives at the token {words} it, before any update",
        where,
        evidence=[shown("mean distance to the critic's value of the same token", apart, "0"),
                  shown(f"to that of the token {words}", min(late, early)), shown("tokens", size)],
        cause="a slice is one off where values are read before the updates, or where the critic is updated: a value is "
        "of the state before its token; GAE and returns are then of other places than the critic's predictions",
        steps=sorted(steps),
    )  # fmt: skip
