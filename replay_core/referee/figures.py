"""An error against the noise of the same module on the same inputs: its size, and the structure that noise lacks.

e = recorded - truth, rows are tokens, columns channels. sigma is what rounding does to each element: from the noise
runs (`arithmetic.Noise`), with the half unit of the last place as prior, sigma_i^2 = (sum_s E_si^2 + v p_i)/(S + v),
p_i = ulp_i^2/12 scaled to the row's own noise. z = e/sigma. Every statistic is also taken of each noise run against the
others: what it is of noise is measured on this module and these inputs, not guessed. Values that repeat from token to
token are rounded alike, which no random error is: so the statistics are also taken of the model's code as it is
written, every operation rounded to the nearest, and of the truth rounded once.
"""

from __future__ import annotations

import torch
from msgspec import Struct

from replay_core.referee import limits
from replay_core.referee.arithmetic import ulp
from replay_core.referee.shadow import Claim

#: Noise runs whose own statistics are taken.
_LEFT_OUT = 3
#: How many noise runs the prior counts for.
_PRIOR = 4.0
#: Elements looked at of one tensor; rows beyond that are sampled.
ELEMENTS = 1 << 21


class ErrorFigures(Struct, frozen=True):
    """statistics: name -> (value, most that noise had of it, its ratio to what noise may have).

    size: rms of e over the rms that rounding gives; relative: |e|/|truth|. hard: share of elements past half a unit of
    the last place, of a tensor that is rounded once. largest: |e|
    in units of the last place of its row's largest value. gain: e is about `gain` times the truth. worst_*: where.
    """

    statistics: dict[str, tuple[float, float, float]]
    size: float
    relative: float
    hard: float | None
    gain: float
    worst_row: int
    worst_channel: int
    rows: int
    channels: int
    not_finite: int
    largest: float
    unequal_once: float
    unequal_written: float
    left: float
    energy: float

    @property
    def unequal(self) -> float:
        """Share of elements that neither the truth rounded once nor the code as it is written gives."""
        return min(self.unequal_once, self.unequal_written)

    @property
    def excess(self) -> float:
        """The largest ratio of a statistic to its limit: above 1 is no noise."""
        return max((ratio for _, _, ratio in self.statistics.values()), default=0.0)

    def is_explained_by(self, after: ErrorFigures, *, is_fitted: bool = False) -> bool:
        """Whether what is left `after` something is taken away is noise, or as little as a kernel that rounds at other
        places (the sum of a doubled part, weights that were scaled and rounded again) leaves of a larger error.

        is_fitted: of something whose size was fitted: a wrong part leaves little then, too.
        """
        size = after.statistics.get("size", (0.0, 0.0, 0.0))[0]
        left = after.left / self.left if self.left else 1.0
        # In sigma alone a few elements of hardly any noise can be all there is, and any one number fits those.
        is_nearer = after.energy <= limits.MOST_LEFT * self.energy
        is_sure = left <= limits.SURELY and not is_fitted
        is_little = is_sure or (size <= limits.LITTLE and left <= limits.MOST_LEFT)
        return after.excess < 1 or (is_nearer and is_little and not after.not_finite)

    @property
    def telling(self) -> str | None:
        """The statistic that is furthest past its limit."""
        return max(self.statistics, key=lambda name: self.statistics[name][2], default=None)


def sampled_rows(claim: Claim) -> torch.Tensor:
    """Rows that are looked at: all, or half at random, a quarter the worst, a quarter the first of the grid."""
    rows, channels = claim.truth.shape
    chosen = _distinct(claim)
    if chosen.numel() < rows:
        # Equal tokens after equal tokens are computed alike: their errors are one error, seen several times.
        return chosen[: max(16, ELEMENTS // max(1, channels))]
    most = max(16, ELEMENTS // max(1, channels))
    if rows <= most:
        return torch.arange(rows)
    generator = torch.Generator().manual_seed(0)
    worst = (claim.recorded - claim.truth).nan_to_num().square().mean(1).argsort(descending=True)[: most // 4]
    drawn = torch.randperm(rows, generator=generator)[: most // 2]
    return torch.cat([drawn, worst, torch.arange(most // 4)]).unique()


def _distinct(claim: Claim) -> torch.Tensor:
    """The first of every set of rows whose truth and recorded values are the same."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(claim.truth.shape[1], dtype=torch.float64, generator=generator)
    keys = torch.stack([(claim.truth @ weights).nan_to_num(), (claim.recorded @ weights).nan_to_num()], 1)
    seen: dict[tuple[float, float], int] = {}
    for row, (truth, recorded) in enumerate(keys.tolist()):
        seen.setdefault((truth, recorded), row)
    return torch.tensor(list(seen.values()), dtype=torch.long)


class Yardstick:
    """The noise of one claim on the rows that are looked at, and what its error comes to in it.

    Args:
        noises: what each noise run adds to the truth.
        written: what the model's code, every operation rounded to the nearest, adds to it.
    """

    def __init__(self, claim: Claim, noises: list[torch.Tensor], written: torch.Tensor | None = None) -> None:
        self.claim = claim
        self.rows = chosen = sampled_rows(claim)
        self.truth, self.recorded = claim.truth[chosen], claim.recorded[chosen]
        once = _rounded(self.truth, claim.dtype) - self.truth
        as_written = once
        if written is not None:
            as_written = _rounded(self.truth + written[chosen].double(), claim.dtype) - self.truth
        self._once, self._written = once, as_written
        runs = torch.stack([noise[chosen].double() for noise in noises]) if noises else once[None][:0]
        self._runs = runs.nan_to_num(0.0, 0.0, 0.0)
        place, _, unit2, sigma = self._noise(self.truth)
        self.sigma, self.error = sigma, self._error(self.truth)
        nulls = []
        for s in range(min(len(runs), _LEFT_OUT)):
            rest = _sigma(torch.cat([self._runs[:s], self._runs[s + 1 :]]), unit2)
            nulls.append(_statistics(self._runs[s] / rest, place / rest, claim.heads))
        nulls += [
            _statistics(one.nan_to_num(0.0, 0.0, 0.0) / sigma, place / sigma, claim.heads) for one in (once, as_written)
        ]
        #: The most that noise had of every statistic.
        self.most = {name: max(null.get(name, 0.0) for null in nulls) for null in nulls for name in null}

    def _noise(self, truth: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(truth with nothing infinite, unit of the last place, its variance, sigma)."""
        place = truth.nan_to_num(0.0, 0.0, 0.0)
        row_rms = place.square().mean(1 if place.shape[1] > 1 else (0, 1), keepdim=True).sqrt()
        unit = ulp(place.abs().maximum(row_rms * 2.0**-10), self.claim.dtype)
        unit2 = unit.square() / 12
        return place, unit, unit2, _sigma(self._runs, unit2)

    def _error(self, truth: torch.Tensor) -> torch.Tensor:
        finite = (self.recorded.isfinite() | ~truth.isfinite()) & truth.isfinite()
        return torch.where(finite, self.recorded - truth, 0.0)

    def unequal(self, moved: torch.Tensor) -> float:
        """Share of elements that a recipe, `moved` [rows, C] away from the truth, does not give bit for bit."""
        return _unequal(_rounded(self.truth + moved, self.claim.dtype), self.recorded)

    def bound(self, statistic: str) -> float:
        """The most that an error may have of a statistic and be noise."""
        noise = self.most.get(statistic, 0.0)
        return limits.most(statistic, self.claim.kind, self.claim.dtype, noise, self.truth.shape)

    def figures(self, moved: torch.Tensor | None = None) -> ErrorFigures:
        """The error; `moved` [rows, C]: of another truth, so far away (a hypothesis)."""
        claim, recorded = self.claim, self.recorded
        truth = self.truth if moved is None else self.truth + moved
        place, unit, unit2, sigma = self._noise(truth)
        e = self._error(truth)
        table = {}
        for name, value in _statistics(e / sigma, place / sigma, claim.heads).items():
            table[name] = (value, self.most.get(name, 0.0), value / self.bound(name))
        hard = None
        if claim.rounds_once and claim.dtype != torch.float32:
            past = e.abs() > 0.51 * unit + 6 * (sigma.square() - unit2).clamp(min=0).sqrt()
            hard = float(past.double().mean())
            table["hard"] = (hard, 0.0, hard * e.numel() / limits.hard(e.numel()))
        z2 = (e / sigma).square()
        reach = place / sigma
        power = float(reach.square().sum())
        bad = int((~recorded.isfinite() & truth.isfinite()).sum())
        if bad:
            table["not_finite"] = (float(bad), 0.0, float("inf"))
        gain = float((e / sigma * reach).sum()) / power if power else 0.0
        if claim.dtype == torch.float32 and abs(gain) < limits.LEAST_GAIN and "gain" in table:
            table["gain"] = (*table["gain"][:2], 0.0)
        norm = float(place.norm())
        return ErrorFigures(
            statistics=table,
            size=float((e.square().mean() / unit2.mean()).sqrt()) if e.numel() else 0.0,
            relative=float(e.norm()) / norm if norm else 0.0,
            hard=hard,
            gain=gain,
            worst_row=int(self.rows[int(z2.mean(1).argmax())]) if e.numel() else 0,
            worst_channel=int(z2.mean(0).argmax()) if e.numel() else 0,
            rows=e.shape[0],
            channels=e.shape[1],
            not_finite=bad,
            largest=float((e.abs() / ulp(place.abs().amax(1, keepdim=True), claim.dtype)).max()) if e.numel() else 0.0,
            unequal_once=_unequal(_rounded(truth, claim.dtype), recorded),
            unequal_written=_unequal(truth + self._written, recorded),
            left=float(z2.sum()),
            energy=float(e.square().sum()),
        )


def _unequal(made: torch.Tensor, recorded: torch.Tensor) -> float:
    return float((made != recorded).double().mean()) if made.numel() else 0.0


def _rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype).double()


def _sigma(runs: torch.Tensor, unit2: torch.Tensor) -> torch.Tensor:
    count = len(runs)
    if not count:
        return unit2.sqrt()
    seen = runs.square().sum(0)
    scale = (seen.mean(1, keepdim=True) / count / unit2.mean(1, keepdim=True)).clamp(min=1.0)
    return ((seen + _PRIOR * unit2 * scale) / (count + _PRIOR)).maximum(unit2).sqrt()


def _statistics(z: torch.Tensor, reach: torch.Tensor, heads: int = 1) -> dict[str, float]:
    """What is asked of z [N, C]; `reach` is the truth in units of its own noise.

    size     rms of z.                       token, channel  the largest rms of one row, of one column.
    gain     |sum z r| / |r|, r = reach: normal in noise, large where e is a part of the truth itself.
    tokens_gain, channels_gain  the rms of the same over rows, over columns; heads_gain over the heads of every row,
             as a softmax's sum that is rounded leaves it.
    bias     the rms over columns of sum z / sqrt(N).
    rank     the largest singular value over sqrt(N) + sqrt(C), in units of rms(z): 1 for noise (Marchenko-Pastur).
    """
    if not z.numel():
        return {}
    rows, channels = z.shape
    z2 = z.square()
    size = float(z2.mean().sqrt())
    along, r2 = z * reach, reach.square()
    eps = 1e-300
    found = {
        "size": size,
        "token": float(z2.mean(1).max().sqrt()),
        "channel": float(z2.mean(0).max().sqrt()),
        "gain": abs(float(along.sum() / (r2.sum() + eps).sqrt())),
        "tokens_gain": float((along.sum(1).square() / (r2.sum(1) + eps)).mean().sqrt()),
        "channels_gain": float((along.sum(0).square() / (r2.sum(0) + eps)).mean().sqrt()),
        "bias": float((z.sum(0).square() / rows).mean().sqrt()),
    }
    if heads > 1:
        each, power = (one.unflatten(1, (heads, -1)).sum(2) for one in (along, r2))
        found["heads_gain"] = float((each.square() / (power + eps)).mean().sqrt())
    if min(rows, channels) >= 8 and size > 0:
        gram = z @ z.T if rows <= channels else z.T @ z
        top = float(torch.linalg.eigvalsh(gram)[-1].clamp(min=0).sqrt())
        found["rank"] = top / (rows**0.5 + channels**0.5)
    return found
