"""The first tokens of every response, or prompt, by what stands before them: samples that share it share a place."""

from __future__ import annotations

from collections.abc import Iterator

from replay_core.diagnose.batch import StepBatch


def places_of(batch: StepBatch, followed: int) -> Iterator[tuple[int, int, int]]:
    """(key of all tokens before, key of these and the token, its index in the flat arrays), sample by sample, of the
    first `followed` tokens of each response; nothing where no tokens or no responses are known.
    """
    tokens_N, response_N = batch.tokens_N, batch.response_N
    if tokens_N is None or response_N is None:
        return
    heads_B = batch.flat.first(response_N)
    for start, head, length in zip(batch.flat.starts_B, heads_B, batch.flat.lengths_B, strict=True):
        before = hash(tokens_N[start : start + head].tobytes())
        for at in range(int(start + head), int(start + min(length, head + followed))):
            here = hash((before, int(tokens_N[at])))
            yield before, here, at
            before = here


def prompt_places_of(batch: StepBatch, followed: int) -> Iterator[tuple[int, int]]:
    """(key of a token and all before it, its index in the flat arrays), sample by sample, of the first `followed`
    tokens of each prompt after its very first; nothing where no tokens or no responses are known.
    """
    tokens_N, response_N = batch.tokens_N, batch.response_N
    if tokens_N is None or response_N is None:
        return
    for start, head in zip(batch.flat.starts_B, batch.flat.first(response_N), strict=True):
        here = 0
        for at in range(int(start), int(start + min(head, followed))):
            here = hash((here, int(tokens_N[at])))
            if at > start:
                yield here, at
