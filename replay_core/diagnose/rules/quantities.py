"""Log-probabilities that are another quantity than their name says, or shifted: recomputed from their kin."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.compared import BOTH, figures_of, old_is_odd
from replay_core.diagnose.finding import Finding, Where, error, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.gap import gap
from replay_core.diagnose.kinship import odd_one
from replay_core.diagnose.rule import Skip, rule

_WORDS = {
    "rollout_logprobs": ("rollout", "rollout_logprobs"), "old_logprobs": ("old", "logprobs"),
    "policy_logprobs": ("policy", "logprobs"), "ref_logprobs": ("reference", "ref"),
}  # fmt: skip


@rule("D92", "log-probabilities are another quantity", link="logprobs", scope="batch", lasts=True,
      needs=("rollout_logprobs|old_logprobs|policy_logprobs|ref_logprobs", "mask|response"),
      explains=("D08", "D09", "D10", "D11", "D12", "D13", "D14", "D15", "D16", "D21", "D24", "D28", "D29", "D31", "D35",
                "D46", "D50", "D55", "D59", "D60", "D69", "D89", "L08", "L10", "L16"),
      source="rollout, old, policy and reference say nearly the same of the same tokens")  # fmt: skip
def another_quantity(batch: StepBatch) -> Finding | None:
    """Rollout, old, policy (of the first update) and reference log-probabilities, each that is over .03 nats from
    another held against what known mistakes make of that: zeros, one number, probabilities, the sign turned, another
    base, sums along the response, means and sums of it, a shift by up to three tokens, another row's, cut
    off below, the entropy. An error where one makes 90 % of the tokens that tell it from the plain values (12 and more,
    to .03 nats and 3 %). The odd one of three is the one that the others do not agree with; of two that are
    shifted, the one whose numbers are not of the tokens at their places (3 places and more where samples part: another
    token after one beginning has another number, and what follows it changes none). Another base is told from
    a temperature by tokens of a probability near 1/2, which a temperature leaves alone.
    """
    odd = odd_one(batch)
    if odd is None:
        if sum(batch.has(name) for name in _WORDS) < 2:
            raise Skip("needs two of rollout, old, policy and reference log-probabilities")
        return None
    word, link = _WORDS[odd.suspect.name]
    rollout, zero = odd.suspect.name == "rollout_logprobs", odd.what.startswith("exactly 0")
    beside = abs(odd.by) == 1 and odd.suspect.name in ("rollout_logprobs", "old_logprobs")
    if (
        (beside and batch.has("rollout_logprobs"))
        or (rollout and odd.what.startswith("in the wrong rows"))
        or (zero and odd.suspect.name in ("old_logprobs", "policy_logprobs"))
    ):
        raise Skip("a shift by one token is D08's, the rollout's rows are D79's, zeros of the trainer D80's")
    return error(
        f"{word} log-probabilities are {odd.what}",
        batch.laid.where(odd.suspect.name, at=odd.at),
        shown("share of the tokens that tell which it makes", odd.share, "0", odd.suspect.source),
        shown("tokens that tell", odd.tokens),
        shown("made of", odd.model.source),
        link=link,
        cause=odd.cause,
    )


@rule("D08", "log-probabilities are shifted by one token", link="rollout_logprobs", scope="batch", needs=BOTH,
      explains=("L10", "D09", "D12", "D14", "D15", "D24", "D29", "D35"), lasts=True,
      source="verl#3562, OpenRLHF#973; measured: lag 0 r 0.03, lag 1 r 1.000")  # fmt: skip
def shifted(batch: StepBatch) -> Finding | None:
    """Correlation of trainer and rollout at lags -1, 0, 1. An error where the best is not lag 0, is above 0.9 and above
    every other by 0.3: then one of the two is about the token before or after. It is the old ones where the policy's
    own agree with the rollout's, and the rollout where nothing tells them apart.
    """
    between = gap(batch)
    if not between.is_shifted:
        return None
    lag = between.lag
    place = batch.laid.where("rollout_logprobs", sample=0)
    lags = [
        shown(f"correlation at lag {at:+d}", value, "the largest" if at == 0 else None)
        for at, value in lag.correlations.items()
    ]
    odd = odd_one(batch)
    # The policy's own, where they are recorded beside the two, tell which of them is moved.
    told = odd is not None and odd.is_told and odd.suspect.name == "old_logprobs" and abs(odd.by) == 1
    old = told or old_is_odd(batch) is not None
    if old:
        place = batch.laid.where("old_logprobs", sample=0)
    beside = "the rollout's and the policy's" if batch.has("policy_logprobs") else "the rollout's"
    return error(
        f"old log-probabilities are shifted by {-lag.lag:+d} token against {beside}"
        if old
        else f"rollout log-probabilities are shifted by {lag.lag:+d} token against the trainer's",
        place,
        *lags,
        *figures_of(between),
        cause="one side is about the token at its index, the other about the next: a roll or a slice is off by one",
    )


#: Rows that tell before they are all of them, and the share of them that has to be another step's.
ROWS, SHARE = 4, 0.9


@rule("D92", "log-probabilities are those of an earlier step", link="logprobs", scope="case", lasts=True,
      explains=("D08", "D09", "D10", "D11", "D12", "D14", "D15", "D24", "D59", "D60", "D79", "L08", "L10"),
      source="a buffer that is not written again: the batch of the step before is handed on")  # fmt: skip
def of_the_step_before(case: Case) -> Iterator[Finding]:
    """Old and rollout log-probabilities, row by row beside those of the step before: equal to the last bit over all
    places that both responses have (2 and more), none of them 0, although other tokens stand there; an error where 9 of
    10 of the rows with other tokens are so, 4 and more. Samples that come again have the same tokens.
    """
    found: dict[str, list[tuple[int, Where, int]]] = {}
    before: dict[str, list[_Rows]] = {}
    at = None
    now: dict[str, list[_Rows]] = {}
    seen = 0
    for batch in case.batches():
        inside_N, tokens_N = batch.response_N, batch.tokens_N
        if batch.step is None or inside_N is None or tokens_N is None:
            continue
        if batch.step != at:
            before, now, at = now, {}, batch.step
        for name in ("old_logprobs", "rollout_logprobs"):
            column = batch.columns.of(name)
            if column is None:
                continue
            seen += 1
            here_N = inside_N & column.said_N
            rows = [(tokens_N[span][here_N[span]], column.values_N[span][here_N[span]]) for span in batch.flat.spans]
            for earlier in before.get(name, []):
                told = [same for mine, theirs in zip(rows, earlier, strict=False)
                        if (same := _is_handed_on(mine, theirs)) is not None]  # fmt: skip
                if sum(told) >= max(ROWS, SHARE * len(told)):
                    found.setdefault(name, []).append((batch.step, batch.laid.where(name, sample=0), sum(told)))
                    break
            now.setdefault(name, []).append(rows)
    if not seen:
        raise Skip("needs tokens and old or rollout log-probabilities of two steps")
    for name, steps in found.items():
        word, link = _WORDS[name]
        step, where, rows_told = steps[0]
        yield error(
            f"{word} log-probabilities are those of the step before, from step {step} on: beside other tokens",
            where,
            shown("rows that are equal to the last bit, over other tokens", rows_told, "0"),
            shown("steps that show it", len(steps)),
            link=link,
            cause="they are not computed anew: a buffer of the step before, a cache by row, or a batch that was handed "
            "on is read instead; the ratio and its clipping are then of other samples",
            steps=[step for step, _, _ in steps],
        )


#: Tokens and log-probabilities of the response of every sample.
_Rows = list[tuple[Array, Array]]


def _is_handed_on(mine: tuple[Array, Array], theirs: tuple[Array, Array]) -> bool | None:
    """Whether a row has the numbers of another row, of other tokens; None where it cannot be told."""
    size = min(len(mine[0]), len(theirs[0]))
    if size < 2 or np.array_equal(mine[0][:size], theirs[0][:size]):
        return None
    return bool(mine[1][:size].all() and np.array_equal(mine[1][:size], theirs[1][:size]))
