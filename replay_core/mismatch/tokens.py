"""What is wrong with the tokens themselves: no log-probability can agree over tokens that are not the sampled ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from msgspec import Struct

from replay_core.decoding import Decoder, find_tokenizer
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.gap import unsampled
from replay_core.errors import RequestError
from replay_core.mismatch.figures import Array
from replay_core.records import Run

#: Responses that are decoded and encoded again: the rest would say the same.
_READ = 64
#: Of a conversation so many tokens must be common before it counts as one.
_COMMON = 4


class TokenFault(Struct, frozen=True):
    """What is wrong, in how many samples, and the first of them with its first token; `texts` as each side has it."""

    what: str
    samples: int
    sample: int | None = None
    position: int | None = None
    texts: tuple[str, str] | None = None
    is_fault: bool = True


def token_faults(run: Run, batch: StepBatch, tokenizer: Sequence[str] = ()) -> tuple[list[TokenFault], list[str]]:
    """Every fault of a step's tokens, and what could not be looked at."""
    tokens_N = batch.tokens_N
    if tokens_N is None:
        return [], ["the dump holds no token ids: that both sides saw the same tokens is not known"]
    rows = [batch.spine.tokens(sample).astype(np.int64) for sample in range(len(batch))]
    decoder, notes = _decoder(run, tokenizer)
    found = [
        *_drifted(batch, decoder), *_doubled_first(batch, rows), *_unsampled(batch), *_histories(batch, rows, decoder),
        *_stops(batch),
    ]  # fmt: skip
    if decoder is not None:
        try:
            found += _encoded_again(batch, rows, decoder)
        except RequestError as error:
            notes.append(f"responses were not encoded again: {error.in_one_line}")
    return found, notes


def _decoder(run: Run, named: Sequence[str]) -> tuple[Decoder | None, list[str]]:
    from pathlib import Path

    place = Path(named[0]) if named else find_tokenizer(run.path, run.models.values())
    if place is None:
        return None, [
            "no tokenizer lies beside the dump: texts are not shown, responses not encoded again; --tokenizer"
        ]
    try:
        return Decoder(place), []
    except RequestError as error:
        if named:
            raise
        return None, [f"the tokenizer beside the dump cannot be used: {error.in_one_line}"]


def _texts(decoder: Decoder | None, a: int | None, b: int | None) -> tuple[str, str] | None:
    if decoder is None:
        return None
    pieces = decoder.pieces([-1 if one is None else one for one in (a, b)])
    return pieces[0], pieces[1]


def _drifted(batch: StepBatch, decoder: Decoder | None) -> Iterator[TokenFault]:
    """Samples that another record of the step has with other ids: they begin alike, and drift."""
    prompts_B = None if batch.response_N is None else batch.flat.first(batch.response_N)
    for other in batch.strangers:
        apart = []
        theirs = [other.tokens(sample) for sample in range(len(other))]
        for sample in range(len(batch)):
            mine = batch.spine.tokens(sample)
            least = max(_COMMON, 0 if prompts_B is None else int(prompts_B[sample]))
            shared, twin = max(((common(mine, one), at) for at, one in enumerate(theirs)), default=(0, 0))
            if shared >= least and shared < max(mine.size, theirs[twin].size):
                apart.append((sample, shared, mine, theirs[twin]))
        if apart:
            sample, at, mine, its = apart[0]
            a, b = (int(row[at]) if at < row.size else None for row in (mine, its))
            name = other.parts[0].held.record.path.name
            yield TokenFault(
                f"{len(apart)} of {len(batch)} samples have other token ids in {name}: the first that drifts is "
                f"{'no token' if a is None else a} here, {'no token' if b is None else b} there "
                f"({mine.size} against {its.size} tokens)",
                len(apart), sample, at, _texts(decoder, a, b),
            )  # fmt: skip


def common(a: Array, b: Array) -> int:
    """How many tokens two rows have in common from their beginning."""
    size = min(a.size, b.size)
    apart = np.flatnonzero(a[:size] != b[:size])
    return int(apart[0]) if apart.size else size


def _doubled_first(batch: StepBatch, rows: list[Array]) -> Iterator[TokenFault]:
    """The id that every sample begins with, twice: a template writes BOS, and the tokenizer adds one."""
    firsts = {int(row[0]) for row in rows if row.size}
    doubled = [at for at, row in enumerate(rows) if row.size > 2 and row[0] == row[1]]
    # One id that begins every sample of several prompts is BOS; a padding that counts as a token looks alike.
    prompts_B = batch.prompt_B
    several = prompts_B is not None and np.unique(prompts_B).size > 1
    if doubled and several and len(firsts) == 1 and len(doubled) == len(rows) and firsts != {batch.pad_id}:
        yield TokenFault(f"every sample begins with token {firsts.pop()} twice: a doubled BOS", len(doubled), 0, 1)


def _unsampled(batch: StepBatch) -> Iterator[TokenFault]:
    rollout, trainer = batch.columns.of("rollout_logprobs"), batch.trainer
    if rollout is None or trainer is None:
        return
    alien_N = unsampled(rollout, trainer, batch.pair(rollout, trainer))
    if alien_N.any():
        at = int(np.flatnonzero(alien_N)[0])
        yield TokenFault(
            f"{int(alien_N.sum())} tokens are in the loss that no engine sampled (rollout log-probability exactly 0, "
            "the trainer finds them improbable): tool output or a part of the prompt; they are left out of the gap",
            int((batch.flat.count(alien_N) > 0).sum()), int(batch.flat.sample_N[at]), int(batch.flat.position_N[at]),
        )  # fmt: skip


def _histories(batch: StepBatch, rows: list[Array], decoder: Decoder | None) -> Iterator[TokenFault]:
    """A later turn whose prompt holds an earlier turn with other ids: the template did not keep what was sampled."""
    if batch.response_N is None:
        return
    heads_B = batch.flat.first(batch.response_N)
    order = sorted(range(len(rows)), key=lambda at: rows[at].tolist())
    drifted = []
    for first, second in pairwise(order):
        for a, b in ((first, second), (second, first)):
            shared = common(rows[a], rows[b])
            within = heads_B[a] + _COMMON <= shared < rows[a].size and shared < heads_B[b]
            if within and heads_B[b] > heads_B[a] + _COMMON:
                drifted.append((a, b, shared))
    if drifted:
        a, b, at = drifted[0]
        yield TokenFault(
            f"{len(drifted)} prompts hold an earlier turn with other ids: sample {b} repeats sample {a} up to token "
            f"{at}, then has {rows[b][at]} in place of {rows[a][at]}: its prefix is not what was sampled",
            len(drifted), b, at, _texts(decoder, int(rows[a][at]), int(rows[b][at])),
        )  # fmt: skip


def _stops(batch: StepBatch) -> Iterator[TokenFault]:
    """Responses that end on the stop token, which does not count, while the tokens before it do."""
    eos, trained_N, response_N = batch.eos_id, batch.trained_N, batch.response_N
    if eos is None or trained_N is None or response_N is None or batch.tokens_N is None:
        return
    last_B = batch.flat.starts_B + batch.flat.lengths_B - 1
    counted_B = batch.flat.count(trained_N) > 0
    ends_B = (batch.flat.count(response_N) > 1) & counted_B & (batch.tokens_N[last_B] == eos)
    untrained_B = ends_B & ~trained_N[last_B]
    if ends_B.any() and untrained_B.sum() > 0.5 * ends_B.sum():
        sample = int(np.flatnonzero(untrained_B)[0])
        yield TokenFault(
            f"the stop token {eos} does not count in {int(untrained_B.sum())} of {int(ends_B.sum())} responses that "
            "end on it: stopping is not trained",
            int(untrained_B.sum()), sample, int(batch.flat.lengths_B[sample]) - 1, is_fault=False,
        )  # fmt: skip


def values_that_are_none(batch: StepBatch) -> Iterator[TokenFault]:
    """Counted tokens of which a side says -inf, or nothing that is a number."""
    counted_N = batch.trained_N if batch.trained_N is not None else batch.response_N
    for who, column in (("rollout", batch.columns.of("rollout_logprobs")), ("trainer", batch.trainer)):
        if column is None or counted_N is None:
            continue
        for word, bad_N in (("-inf", np.isneginf(column.values_N)), ("not a number", np.isnan(column.values_N)),
                            ("above 0", column.values_N > 1e-3)):  # fmt: skip
            bad_N = bad_N & column.said_N & counted_N
            if count := int(bad_N.sum()):
                at = int(np.flatnonzero(bad_N)[0])
                left = "; left out of the gap" if word != "above 0" else ", and no log-probability is"
                have = "token has" if count == 1 else "tokens have"
                yield TokenFault(
                    f"{count} counted {have} a {who} log-probability that is {word}{left}",
                    int((batch.flat.count(bad_N) > 0).sum()),
                    int(batch.flat.sample_N[at]),
                    int(batch.flat.position_N[at]),
                )


def _encoded_again(batch: StepBatch, rows: list[Array], decoder: Decoder) -> Iterator[TokenFault]:
    """Samples whose text, encoded again, is other ids: whoever re-encodes trains on tokens that were not sampled.

    A whole sample is decoded, so that no space at the beginning of a response is lost; from its response on.
    """
    heads_B = np.zeros(len(rows), np.int64) if batch.response_N is None else batch.flat.first(batch.response_N)
    some = [at for at, row in enumerate(rows[:_READ]) if row.size]
    again = decoder.encoded(decoder.texts([rows[at].tolist() for at in some]))
    drifted = []
    for at, ids in zip(some, again, strict=True):
        shared = common(rows[at], np.asarray(ids, np.int64))
        if shared < max(rows[at].size, len(ids)) and shared >= heads_B[at]:
            drifted.append((at, shared, ids))
    if drifted:
        sample, at, ids = drifted[0]
        row = rows[sample]
        a, b = (int(one[at]) if at < len(one) else None for one in (row, ids))
        yield TokenFault(
            f"{len(drifted)} of {len(some)} samples come out as other ids when their text is encoded again (token {at} "
            f"of sample {sample}: {a} sampled, {b} encoded): keep the engine's ids, never re-encode",
            len(drifted), sample, at, _texts(decoder, a, b), is_fault=False,
        )  # fmt: skip
