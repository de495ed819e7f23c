"""How ranks may share a sequence, of what was put together before it was recorded."""

from __future__ import annotations

from collections.abc import Iterator

from replay_core.compare.pairing.dims import Stretch

Dealt = tuple[tuple[Stretch, ...], ...]


def ways(ranks: int, tokens: int) -> Iterator[Dealt]:
    """Of every rank its stretches, end to end or in zigzag: among few of them, over and over, first."""
    for among in range(2, ranks + 1):
        if ranks % among:
            continue
        for turns in (1, 2):
            each, left = divmod(tokens, among * turns)
            if not left and each:
                own = (
                    ((at * each, each),) if turns == 1 else ((at * each, each), ((2 * among - 1 - at) * each, each))
                    for at in range(among)
                )  # fmt: skip
                yield tuple(own) * (ranks // among)
