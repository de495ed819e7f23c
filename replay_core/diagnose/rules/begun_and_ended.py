"""How responses begin and end in what is trained: sampled tokens before a mark, and end tokens that are nowhere."""

from __future__ import annotations

from collections import Counter

import numpy as np

from replay_core.diagnose.batch import StepBatch, mask_name
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, listed, share, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import rule, skip_if

#: Rows that begin late, and different numbers of tokens left out, before a mark is no chance; how often the mark itself
#: may stand before the first token that counts.
ROWS, NUMBERS = 6, 2
#: Responses shorter than the limit, different tokens that they end in, and responses that do not end in the commonest.
SHORT, ENDS, OTHERS = 32, 2, 2


@rule("D121", "what is sampled before a mark never counts", link="masks", scope="case", lasts=True,
      explains=("D28", "D41", "L09"),
      source="a mask that is searched from a tag on; the policy's thinking is left out")  # fmt: skip
def begins_at_a_mark(case: Case) -> Finding | None:
    """Rows (6 and more, in half of the steps and more) whose mask begins behind tokens that the engine sampled, as its
    log-probabilities of them (not 0) tell: a warning where all of these masks begin at one and the same token, which
    stands nowhere before, where numbers of tokens left out differ from row to row, and where no row counts a token
    before it. A forced beginning has one length in every row; turns of an agent have holes after their first token.
    """
    seen, found = 0, []
    for batch in case.batches():
        rollout, trained_N, tokens_N = batch.columns.of("rollout_logprobs"), batch.trained_N, batch.tokens_N
        if rollout is None or trained_N is None or tokens_N is None:
            continue
        seen += 1
        sampled_N = rollout.said_N & (np.nan_to_num(rollout.values_N) != 0)
        if (one := _marked(batch, sampled_N, trained_N, tokens_N)) is not None:
            found.append((batch, *one))
    skip_if(not seen, "needs tokens, a mask and the engine's log-probabilities")
    marks = {mark for _, mark, _, _ in found}
    if not found or 2 * len(found) < seen or len(marks) > 1:
        return None
    batch, mark, lost, late_B = found[0]
    return warning(
        f"what responses begin with is not in the loss: the mask begins at the token {mark} wherever that stands, and "
        f"{lost} tokens that the policy sampled before it never count, in {share(int(late_B.sum()), len(batch))} rows",
        batch.laid.where(mask_name(batch), sample=late_B),
        shown("rows whose mask begins behind sampled tokens", int(late_B.sum()), "0"),
        shown("first of them", listed(np.flatnonzero(late_B)[:6])),
        shown("sampled tokens before the mark", lost, "0"),
        shown("steps that show it", share(len(found), seen)),
        cause="the mask is searched from a tag on (the answer's): the thinking before it is the policy's own and is "
        "neither rewarded nor punished; right only where it is meant",
        steps=[each.step for each, *_ in found if each.step is not None],
    )


def _marked(batch: StepBatch, sampled_N: Array, trained_N: Array, tokens_N: Array) -> tuple[int, int, Array] | None:
    """(token, sampled tokens before it, rows [B]) where masks begin late at one token; else None."""
    first: set[int] = set()
    before: set[int] = set()
    lost: Counter[int] = Counter()
    late_B = np.zeros(len(batch), dtype=bool)
    for sample, span in enumerate(batch.flat.spans):
        counted, sampled = np.flatnonzero(trained_N[span]), np.flatnonzero(sampled_N[span])
        if not counted.size or not sampled.size:
            continue
        if sampled[0] >= counted[0]:
            first.add(int(tokens_N[span][counted[0]]))
            continue
        left = int((sampled < counted[0]).sum())
        if left != counted[0] - sampled[0]:
            return None
        late_B[sample] = True
        lost[left] += 1
        first.add(int(tokens_N[span][counted[0]]))
        before |= set(map(int, tokens_N[span][sampled[0] : counted[0]]))
    return None if not _is_a_mark(first, before, lost) else (next(iter(first)), _total(lost), late_B)


def _is_a_mark(first: set[int], before: set[int], lost: Counter[int]) -> bool:
    return len(first) == 1 and not first & before and len(lost) >= NUMBERS and sum(lost.values()) >= ROWS


def _total(lost: Counter[int]) -> int:
    return sum(number * many for number, many in lost.items())


_STOPS = (
    "stop",
    "stop_strings",
    "stop_words",
    "stop_token_ids",
    "stop_sequences",
    "rollout_stop",
    "rollout_stop_token_ids",
)


def _states_stops(case: Case) -> bool:
    """Whether the run states that the engine stops at something else than the end token."""
    return any(case.algorithm.value(name) not in (None, "", [], False) for name in _STOPS)


@rule("D19", "no response ends in an end token", link="masks", scope="case", lasts=True, explains=("D20", "L09"),
      source="skip_special_tokens, a stop token that is not included: the policy is never taught to stop")  # fmt: skip
def never_ends(case: Case) -> Finding | None:
    """Responses shorter than the limit (32 and more in the run, none of them with tokens of another in between) that
    end in several tokens, each of which stands inside of responses too: no token ends them. A warning, where the run
    states no stop words, and 2 responses and more do not end in the commonest of these tokens.
    """
    limit = case.algorithm.number(*_LIMITS)
    skip_if(limit is None, "needs a stated limit of a response's tokens")
    skip_if(_states_stops(case), "the run states what the engine stops at")
    ends: Counter[int] = Counter()
    inside: Counter[int] = Counter()
    steps: list[int] = []
    where: Where | None = None
    for batch in case.batches():
        tokens_N, response_N, trained_N = batch.tokens_N, batch.response_N, batch.trained_N
        if tokens_N is None or response_N is None or trained_N is None or batch.spine.parts[0].packs is not None:
            continue
        for sample, span in enumerate(batch.flat.spans):
            own, counts = tokens_N[span][response_N[span]], trained_N[span][response_N[span]]
            if not own.size or not counts.all():
                # Tool output, or a mask that ends before the response does: what ends it is another rule's.
                if own.size and counts.any():
                    return None
                continue
            inside.update(own[:-1].tolist())
            if limit is not None and own.size < limit:
                ends[int(own[-1])] += 1
                where = where or batch.laid.where("input_ids", sample=sample)
        if batch.step is not None and batch.step not in steps:
            steps.append(batch.step)
    total = sum(ends.values())
    skip_if(total < SHORT, f"needs {SHORT} responses that are shorter than the limit")
    if len(ends) < ENDS or total - max(ends.values()) < OTHERS or any(not inside[token] for token in ends):
        return None
    common, many = ends.most_common(1)[0]
    return warning(
        f"no response ends in an end token (EOS): {total} are shorter than the limit of {limit:g} tokens and end in "
        f"{len(ends)} tokens, each of which stands inside of responses too",
        where,
        shown("responses shorter than the limit", total),
        shown("of them end in the commonest token", f"{many}, in {common}"),
        shown("how often that stands inside of a response", inside[common], "0"),
        cause="the end token is stripped before training (skip_special_tokens, a stop token that is not included, text "
        "that is encoded again): the policy is never taught to stop, and responses get longer until they are cut",
        next_step="append the end token, with its log-probability, to what the engine returns",
        steps=steps,
    )


_LIMITS = ("max_response_length", "max_completion_length", "max_new_tokens", "generate_max_len",
           "rollout_max_response_len", "response_length")  # fmt: skip
