"""Weights that get smaller by one factor in every step: a decay that outweighs what is learnt."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from replay_core import pages
from replay_core.budget import stored_bytes
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, error, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.rules.weights import weights_by_step
from replay_core.records import Record

#: Steps, the factor of each that no recipe comes to (its decay is a millionth of a step), how far the factors of two
#: steps are apart at most, and how much of the change has to point to 0.
STEPS, FACTOR, ALIKE, TO_NOTHING = 4, 0.99, 0.01, 0.7
#: Weights that are read, at the most, bytes.
MOST = 64 << 20


@rule("D110", "the weights shrink", link="optimizer", scope="case", lasts=True,
      explains=("D01", "D03", "D09", "D12", "D15", "D20", "D24", "D25", "D26", "L08", "L09", "L10", "L17", "L36",
               "L40"),
      source="AdamW multiplies each weight by 1 - lr x weight_decay in every step")  # fmt: skip
def shrinking(case: Case) -> Finding | None:
    """Recorded weights, or checkpoints, of 4 steps and more whose norm falls in each by one factor (to .01), .99 and
    less, and whose change points to 0 (cosine .7): an error. What gradients do to weights has another direction in
    every step, and leaves their norm where it is.
    """
    told, place = _recorded(case)
    if len(told) < STEPS and (checkpoints := weights_by_step(case)):
        told, place = {step: checkpoints[step] for step in sorted(checkpoints)}, Where(step=max(checkpoints))
    skip_if(len(told) < STEPS, f"needs the weights of {STEPS} steps: rldbg record --params ., or checkpoints")
    norms: list[float] = []
    aims: list[float] = []
    for old, new in pairwise(told.values()):
        if old.size != new.size:
            continue
        change = new.astype(np.float64) - old
        far = float(np.linalg.norm(old) * np.linalg.norm(change))
        aims.append(-float(old @ change) / far if far > 0 else 0.0)
        norms.append(float(np.linalg.norm(new) / max(float(np.linalg.norm(old)), 1e-30)))
    skip_if(len(norms) < STEPS - 1, "the weights of two steps have other names or sizes")
    if max(norms) > FACTOR or max(norms) - min(norms) > ALIKE or float(np.median(aims)) < TO_NOTHING:
        return None
    factor = float(np.median(norms))
    return error(
        f"the weights shrink by {1 - factor:.2g} of themselves in every step: their norm is {np.prod(norms):.3g} times "
        f"what it was {len(norms)} steps before",
        place,
        shown("factor of the norm from step to step", factor, "about 1"),
        shown("least and largest factor", f"{min(norms):.4g}, {max(norms):.4g}"),
        shown("cosine of the change and the way to 0", float(np.median(aims)), "about 0"),
        cause=f"weight decay outweighs the gradients: lr x weight_decay is {1 - factor:.2g} (recipes have 1e-8 to "
        "1e-6), so that the policy dissolves: its entropy rises and its reward is lost",
        next_step="look at weight_decay and the learning rate of the optimizer's groups; 0 to 0.1 is usual",
        steps=list(told),
    )


def _recorded(case: Case) -> tuple[dict[int, Array], Where]:
    """The recorded weights of each step as one row of numbers, of steps that have the last one's names; and where."""
    by_step: dict[int, list[Record]] = {}
    for record in case.records():
        key = record.key
        if key.stage == "param" and key.step is not None and key.rank in (0, None) and key.role != "critic":
            by_step.setdefault(key.step, []).append(record)
    steps = sorted(by_step)
    if len(steps) < STEPS:
        return {}, Where()
    size = sum(stored_bytes(path) for path in {one.path for some in by_step.values() for one in some})
    skip_if(size > MOST, "the weights are large: rldbg compare --stage param holds two steps against each other")
    every = {
        step: {
            ref.name: np.asarray(pages.array(ref), np.float64).reshape(-1)
            for record in by_step[step] for ref in record.tensors()
            if not ref.is_text and ref.is_readable and ref.numel > 1
        } for step in steps
    }  # fmt: skip
    last = every[steps[-1]]
    kept = {step: one for step, one in every.items() if one.keys() == last.keys()}
    place = Where(step=steps[-1], stage="param", tensor=next(iter(last), None), path=str(by_step[steps[-1]][0].path))
    rows = {step: np.concatenate([one[name] for name in sorted(one)] or [np.zeros(0)]) for step, one in kept.items()}
    return rows, place
