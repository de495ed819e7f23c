"""The pattern of an error that is no noise: tokens, channels, a factor, an offset, an order, a low rank.

Each pattern is a part of the error that few numbers describe. It is the error's where noise is left without it; of
several, the one with the fewest numbers is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from msgspec import Struct

from replay_core.referee.arithmetic import ulp
from replay_core.referee.figures import Yardstick

#: Of a statistic's bound: rows and columns beyond are taken for those that are wrong.
_WRONG = 0.85
#: At most this part of rows or columns is "some of them".
_SOME = 0.25
#: A token has what another should have where it is so much nearer to that, in squares.
_NEARER = 0.05
#: Singular values of the whitened error that stand this far above those of noise count for its rank.
_ABOVE = 1.3
#: Tokens, as a caller knows them: row of the claim -> (sample, position).
Places = Sequence[tuple[int, int]]


class Pattern(Struct, frozen=True):
    """words: what the error is; numbers: how many describe it; error [rows, C]: that part of the error."""

    words: str
    numbers: int
    error: torch.Tensor


def pattern(yard: Yardstick, places: Places, ids: Sequence[int] | None = None) -> Pattern | None:
    """The simplest pattern that leaves noise; None where none does. ids: of the tokens, where rows are looked up."""
    most, before = yard.error.numel() / 3, yard.figures()
    found = [one for one in _patterns(yard, places, ids) if one.numbers <= most]
    for one in sorted(found, key=lambda one: one.numbers):
        if before.is_explained_by(yard.figures(one.error)):
            return one
    return None


def _patterns(yard: Yardstick, places: Places, ids: Sequence[int] | None) -> Iterator[Pattern]:
    e, truth, sigma = yard.error, yard.truth.nan_to_num(0.0, 0.0, 0.0), yard.sigma
    if not e.numel():
        return
    rows, channels = e.shape
    z, reach = e / sigma, truth / sigma
    along, power = z * reach, reach.square() + 1e-300
    gain = float(along.sum() / power.sum())
    yield Pattern(f"all of it times {1 + gain:.4g}, a scale", 1, gain * truth)
    yield Pattern("digits cut off instead of rounded", 0, _cut(truth, yard) - truth)
    yield from _moved_tokens(yard, places)
    yield from _some_tokens(yard, places, ids, z, along.sum(1) / power.sum(1))
    if channels > 1:
        yield from _some_channels(yard, z, along, power)
        if rows >= 8:
            yield from _moved_channels(yard)
            offset = (z / sigma).sum(0, keepdim=True) / (1 / sigma.square()).sum(0, keepdim=True)
            yield Pattern("every channel by an offset of its own, as of a bias", channels, offset.expand_as(e))
            factors = along.sum(0, keepdim=True) / power.sum(0, keepdim=True)
            yield Pattern("every channel by a factor of its own", channels, factors * truth)
        factors = along.sum(1, keepdim=True) / power.sum(1, keepdim=True)
        yield Pattern("every token by a factor of its own", rows, factors * truth)
    if min(rows, channels) >= 8:
        yield from _low_rank(yard)


def _cut(truth: torch.Tensor, yard: Yardstick) -> torch.Tensor:
    dtype = yard.claim.dtype
    near = truth.to(dtype).double()
    over = near.abs() > truth.abs()
    return torch.where(over, near - truth.sign() * ulp(truth, dtype), near)


def _some_tokens(
    yard: Yardstick, places: Places, ids: Sequence[int] | None, z: torch.Tensor, factors: torch.Tensor
) -> Iterator[Pattern]:
    of_rows = z.square().mean(1).sqrt()
    wrong = of_rows > _WRONG * yard.bound("token")
    count = int(wrong.sum())
    if 0 < count <= max(1.0, _SOME * len(z)):
        rows = [row for row in yard.rows[wrong].tolist() if row < len(places)]
        said = _tokens([places[row] for row in rows])
        if ids is not None and len({ids[row] for row in rows}) <= 3:
            said = f"the rows of tokens {', '.join(map(str, sorted({ids[row] for row in rows})))} in the embedding"
        yield Pattern(said, count * z.shape[1], torch.where(wrong[:, None], yard.error, 0.0))
        scaled = torch.where(wrong, factors, 0.0)[:, None] * yard.truth.nan_to_num(0.0, 0.0, 0.0)
        yield Pattern(f"{said}: {_times(factors[wrong])}", count, scaled)


def _times(factors: torch.Tensor) -> str:
    """What rows or columns are multiplied by, one number where it is the same for all."""
    each = [f"{round(1 + one, 4):.4g}" for one in factors[:8].tolist()]
    return f"times {each[0]}" if len(set(each)) == 1 else f"times {', '.join(each)}"


def _tokens(names: Sequence[tuple[int, int]]) -> str:
    if len(names) == 1:
        return f"token {names[0][1]} of sample {names[0][0]}"
    samples = sorted({sample for sample, _ in names})
    of = f"sample {samples[0]}" if len(samples) == 1 else f"{len(samples)} samples"
    positions = [position for sample, position in names if sample == samples[0]]
    return f"{len(names)} tokens of {of}, first token {min(positions)} of sample {samples[0]}"


def _moved_tokens(yard: Yardstick, places: Places) -> Iterator[Pattern]:
    """Tokens that have what others before or behind them in their sample should have."""
    row_of: Mapping[tuple[int, int], int] = {place: row for row, place in enumerate(places)}
    z2 = yard.error.square() / yard.sigma.square()
    for by in (1, -1, 2, -2):
        source = [row_of.get((places[row][0], places[row][1] + by), -1) if row < len(places) else -1
                  for row in yard.rows.tolist()]  # fmt: skip
        there = torch.tensor(source)
        other = yard.claim.truth[there.clamp(min=0)].nan_to_num(0.0, 0.0, 0.0)
        left = ((yard.recorded - other) / yard.sigma).square().mean(1)
        taken = (there >= 0) & (left < _NEARER * z2.mean(1))
        if int(taken.sum()) < 3:
            continue
        # Who has no such neighbour tells nothing.
        unknown = (there < 0) & (z2.mean(1) > 4)
        error = torch.where(taken[:, None], other - yard.truth.nan_to_num(0.0, 0.0, 0.0), 0.0)
        error = torch.where(unknown[:, None], yard.error, error)
        first = min((places[int(yard.rows[row])][1] for row in taken.nonzero()[:, 0].tolist()), default=0)
        words = (
            f"{int(taken.sum())} tokens shifted: each has what the token {by:+d} from it should have, from {first} on"
        )
        yield Pattern(words, int(unknown.sum()) * z2.shape[1], error)


def _some_channels(yard: Yardstick, z: torch.Tensor, along: torch.Tensor, power: torch.Tensor) -> Iterator[Pattern]:
    of_columns = z.square().mean(0).sqrt()
    wrong = of_columns > _WRONG * yard.bound("channel")
    count = int(wrong.sum())
    if not 0 < count <= max(1.0, _SOME * z.shape[1]):
        return
    numbers = wrong.nonzero()[:, 0].tolist()
    said = f"channel{'s' if count > 1 else ''} {', '.join(map(str, numbers[:8]))}{' and more' if count > 8 else ''}"
    yield Pattern(said, count * len(z), torch.where(wrong, yard.error, 0.0))
    factors = torch.where(wrong, along.sum(0) / power.sum(0), 0.0)
    truth = yard.truth.nan_to_num(0.0, 0.0, 0.0)
    yield Pattern(f"{said}: {_times(factors[wrong])}", count, factors * truth)


def _moved_channels(yard: Yardstick) -> Iterator[Pattern]:
    """Channels that have what others should have: heads, gates, rows of a vocabulary in another order."""
    truth = yard.truth.nan_to_num(0.0, 0.0, 0.0)
    # Scaled by row alone: a channel is compared with all others.
    by_row = yard.sigma.square().mean(1, keepdim=True).sqrt()
    x, y = truth / by_row, yard.recorded.nan_to_num(0.0, 0.0, 0.0) / by_row
    away = (y.square().sum(0)[:, None] - 2 * y.T @ x + x.square().sum(0)[None, :]).clamp(min=0)
    order = away.argmin(1)
    itself = torch.arange(len(order))
    order = torch.where(away.diagonal() <= 1.5 * away[itself, order], itself, order)
    moved = int((order != itself).sum())
    if moved < 2 or order.unique().numel() != order.numel():
        return
    yield Pattern(f"channels permuted: {_order(order.tolist())}", moved // 2, truth[:, order] - truth)


def _order(order: list[int]) -> str:
    """An order of channels by the largest blocks that move as one."""
    for size in (one for one in range(len(order) // 2, 1, -1) if len(order) % one == 0):
        blocks = [order[at : at + size] for at in range(0, len(order), size)]
        if all(block[0] % size == 0 and block == list(range(block[0], block[0] + size)) for block in blocks):
            said = ", ".join(str(block[0] // size) for block in blocks[:16])
            return f"heads or blocks of {size} in the order {said}"
    moved = [at for at, to in enumerate(order) if at != to]
    return f"{len(moved)} of them out of order, {moved[0]} to {moved[-1]}"


def _low_rank(yard: Yardstick) -> Iterator[Pattern]:
    # Scaled by row and by column: a rank stays, the noise becomes even.
    sigma = yard.sigma.maximum(ulp(yard.recorded.nan_to_num(0.0, 0.0, 0.0), yard.claim.dtype) / 12**0.5)
    by_row = sigma.square().mean(1, keepdim=True).sqrt()
    by_column = (sigma / by_row).square().mean(0, keepdim=True).sqrt()
    scaled = yard.error / by_row / by_column
    u, s, v = torch.linalg.svd(scaled, full_matrices=False)
    rows, channels = scaled.shape
    rank = int((s > _ABOVE * (rows**0.5 + channels**0.5)).sum())
    if not 0 < rank <= min(rows, channels) // 3:
        return
    error = (u[:, :rank] * s[:rank]) @ v[:rank] * by_row * by_column
    words = f"a difference of low rank, {rank}, as an adapter (LoRA) leaves that is missing or counted twice"
    yield Pattern(words, rank * (rows + channels), error)
