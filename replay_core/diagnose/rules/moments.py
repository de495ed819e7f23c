"""The optimizer's recorded moments, and with which numbers they are made of gradients."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import numpy as np
from msgspec import Struct

from replay_core import pages
from replay_core.budget import stored_bytes
from replay_core.diagnose.algorithm import Algorithm, as_number
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import rule, skip_if
from replay_core.records import Record
from replay_core.regexes import regex

#: Bytes of all that is read, numbers of a weight that tell, weights and updates that show it.
MOST, NUMBERS, SEVERAL = 1 << 29, 16, 3
#: How nearly moments are made, how near 1 the part of the one before is, and how far of it a beta may be off.
MADE, OFF = 1e-2, 0.1
#: How many times as far off the stated one a beta lies as the middle half of what is solved for is wide.
SURELY = 4.0
_OF_STATE = regex(r"^(?:state\.)?(?P<name>.+)\.(?P<part>exp_avg_sq|exp_avg|step)$")
_PREFIX = regex(r"^(?:grad\.|_orig_mod\.|module\.)+")


class _Moments(Struct):
    """What the optimizer holds of one weight."""

    first: Array | None = None
    second: Array | None = None
    count: float = 0.0


def _plain(name: str) -> str:
    return _PREFIX.sub("", name.replace("/", "."))


def _states(case: Case) -> Iterator[tuple[Record, dict[str, _Moments]]]:
    """The optimizer's records of the policy on one rank, in their order."""
    every = [one for one in case.records() if one.key.stage == "optimizer" and one.key.step is not None]
    every = [one for one in every if not one.key.rank and one.key.role != "critic"]
    skip_if(len(every) < 2, "needs the optimizer's state after two updates")
    skip_if(sum(map(stored_bytes, {one.path for one in every})) > MOST, "the optimizer's state is too large to be read")
    for record in sorted(every, key=lambda one: (one.key.step or 0, one.key.micro or 0)):
        held: dict[str, _Moments] = {}
        for ref in record.tensors():
            found = _OF_STATE.match(ref.name)
            if found is None or ref.is_text or not ref.is_readable:
                continue
            values = np.asarray(pages.array(ref), dtype=np.float64).reshape(-1)
            one = held.setdefault(_plain(found["name"]), _Moments())
            if found["part"] == "step":
                one.count = float(values[0]) if values.size else 0.0
            elif found["part"] == "exp_avg":
                one.first = values
            else:
                one.second = values
        if held:
            yield record, held


def _gradients(case: Case) -> dict[tuple[int | None, int | None], dict[str, Array]]:
    """Gradients of the policy on one rank by step and mini-batch; those that are recorded once."""
    found: dict[tuple[int | None, int | None], dict[str, Array]] = {}
    twice = set()
    for record in case.records():
        key = record.key
        if key.stage != "gradient" or key.rank or key.role == "critic" or stored_bytes(record.path) > MOST:
            continue
        place = key.step, key.minibatch
        if place in found:
            twice.add(place)
        found[place] = {
            _plain(ref.name): np.asarray(pages.array(ref), dtype=np.float64).reshape(-1)
            for ref in record.tensors() if ref.is_readable and ref.numel > 1 and not ref.is_text
        }  # fmt: skip
    return {place: each for place, each in found.items() if place not in twice}


def _share(now: Array, before: Array, added: Array) -> float | None:
    """b of now = b x before + c x added; None where nothing makes it, or the two are one."""
    told = np.isfinite(now) & np.isfinite(before) & np.isfinite(added)
    now, before, added = now[told], before[told], added[told]
    if now.size < NUMBERS or not before.any() or not added.any():
        return None
    table = np.stack([before / np.linalg.norm(before), added / np.linalg.norm(added)], 1)
    if abs(float(table[:, 0] @ table[:, 1])) > 0.98:
        return None
    parts, *_ = np.linalg.lstsq(table, now, rcond=None)
    if np.linalg.norm(table @ parts - now) > MADE * np.linalg.norm(now) or parts[1] <= 0:
        return None
    return float(parts[0] / np.linalg.norm(before))


def _stated(algorithm: Algorithm) -> tuple[float | None, float | None]:
    """beta1 and beta2, as the run states them."""
    both = algorithm.value("adam_betas", "betas", "optimizer_betas", "optim_betas")
    if isinstance(both, (list, tuple)) and len(both) == 2:
        first, second = map(as_number, both)
        return first, second
    return algorithm.number("adam_beta1", "beta1", "beta_1"), algorithm.number("adam_beta2", "beta2", "beta_2")


def _is_other(found: float, stated: float) -> bool:
    """Whether a beta is another one: by a tenth of what it takes of a gradient (1 - beta) and more."""
    return abs(found - stated) > max(OFF * (1 - stated), 2e-4)


@rule("D141", "the optimizer's betas are not the stated ones", link="optimizer", scope="case", lasts=True,
      source="SkyRL#1649, axolotl#2133: betas that are configured and not handed to the optimizer")  # fmt: skip
def betas(case: Case) -> Finding | None:
    """Adam's recorded moments (`….exp_avg`, `….exp_avg_sq`) of two updates that follow each other, as their step
    counters say, beside the gradient between: the moment after is b times the one before and a part of the gradient (of
    its square), whatever clipping scales that by. Both betas are solved for in each weight (to a hundredth; the median
    over 3 weights and updates and more): a warning where one is off the stated one by a tenth of 1 - beta and more, or
    where none is stated and the first is larger than the second (they are swapped).
    """
    gradients = _gradients(case)
    skip_if(not gradients, "needs gradients beside the optimizer's state")
    solved: tuple[list[float], list[float]] = [], []
    first: Record | None = None
    steps: set[int] = set()
    last: dict[str, _Moments] = {}
    for record, held in _states(case):
        between = gradients.get((record.key.step, record.key.minibatch), {})
        for name, now in held.items():
            before, gradient = last.get(name), between.get(name)
            if before is None or gradient is None or now.count != before.count + 1:
                continue
            for which, (one, other, added) in enumerate(
                ((now.first, before.first, gradient), (now.second, before.second, gradient**2))
            ):
                if one is None or other is None or not one.size == other.size == added.size:
                    continue
                if (share := _share(one, other, added)) is not None:
                    solved[which].append(share)
                    first = first or record
                    steps.add(record.key.step or 0)
        last = held
    skip_if(min(map(len, solved)) < SEVERAL or first is None, "no two moments and the gradient between them tell betas")
    assert first is not None
    found = median(solved[0]), median(solved[1])
    spread = [float(np.ptp(np.quantile(each, (0.25, 0.75)))) for each in solved]
    stated = _stated(case.algorithm)
    off = [
        at for at in range(2)
        # Gradients that are stored in 16 bits leave the parts of a few numbers uncertain.
        if (meant := stated[at]) is not None and _is_other(found[at], meant)
        and SURELY * spread[at] < abs(found[at] - meant)
    ]  # fmt: skip
    swapped = stated == (None, None) and found[0] > found[1] + 1e-2
    if not off and not swapped:
        return None
    if swapped:
        claim = f"Adam's betas are swapped: beta1 is {found[0]:.3g}, beta2 {found[1]:.3g}"
    else:
        claim = "Adam runs with " + " and ".join(f"a beta{at + 1} of {found[at]:.3g}" for at in off)
        claim += ", and the run states " + " and ".join(f"{stated[at]:g}" for at in off)
    return warning(
        claim,
        Where.of(first, next((ref.name for ref in first.tensors() if ref.name.endswith("exp_avg")), "exp_avg")),
        shown("beta1, beta2 that make the moments", f"{found[0]:.5g}, {found[1]:.5g}"),
        shown("stated", ", ".join("-" if each is None else f"{each:g}" for each in stated)),
        shown("weights and updates that tell", min(map(len, solved))),
        cause="the betas that are configured are not handed to the optimizer, and its defaults stand (.9 and .999), or "
        "they are handed over in the wrong order: steps follow gradients of longer ago, or of fewer batches, than is "
        "meant",
        next_step="rldbg diagnose --explain D141   # then print optimizer.param_groups[0]",
        steps=sorted(steps),
    )
