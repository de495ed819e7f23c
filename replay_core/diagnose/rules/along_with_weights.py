"""What a run keeps beside its weights and its optimizer: the scale of an fp16 loss, and the state of random numbers."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import Struct

from replay_core import pages
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, shown, warning
from replay_core.diagnose.rule import rule, skip_if
from replay_core.errors import RldbgError
from replay_core.records import Record
from replay_core.regexes import regex

_SCALE = regex(r"(?i)(?:^|[./_])(?:loss|grad|gradient|amp|scaler)[._/]?_?scale$")
_RANDOM = regex(r"(?i)(?:^|[./_])(?:rng|random|generator|cuda_rng|torch_rng|numpy_rng|python_rng)_?(?:states?)?$")
#: A dynamic scale doubles at most from one update to the next; by how much more it has risen when it was made anew.
LEAP = 8.0
#: Bytes of a random state, at least: what is shorter is a seed.
STATE = 16


class _Recorded(Struct, frozen=True):
    step: int
    value: Any
    record: Record
    name: str


@rule("D169", "what goes along with the weights begins anew", link="optimizer", scope="case", lasts=True,
      explains=("L84", "L02", "D43", "D64"),
      source="a resume that loads weights and optimizer, and neither the scaler nor the random state")  # fmt: skip
def begins_anew(case: Case) -> Finding | None:
    """The scale of the loss (`loss_scale`, `grad_scale`), recorded step by step: a dynamic one doubles at most from one
    update to the next, so that a step in which it rises 8 times and more, to the number that the run began with, is one
    that made it anew: a warning. So is a recorded random state (`rng_state`) that is that of an earlier step, to the
    last byte, with others in between: what is drawn from then on was drawn before. A state that is one throughout is
    set in every step, and says nothing.
    """
    scales, states = _recorded(case)
    skip_if(not scales and not states, "needs the scale of the loss or the random state, recorded step by step")
    for series in states.values():
        if (told := _drawn_again(series)) is not None:
            return told
    for series in scales.values():
        if (told := _scaled_anew(series)) is not None:
            return told
    return None


def _recorded(case: Case) -> tuple[dict[Any, list[_Recorded]], dict[Any, list[_Recorded]]]:
    scales: dict[Any, list[_Recorded]] = {}
    states: dict[Any, list[_Recorded]] = {}
    logs_scale = case.log.has("loss_scale")
    for record in case.records():
        key = record.key
        # A line of a log holds no random state: it is read again for a scale alone.
        if key.step is None or key.stage in ("param", "gradient", "modules") or (record.is_flat and not logs_scale):
            continue
        try:
            refs = [ref for ref in record.tensors() if ref.is_readable and not ref.is_text]
        except RldbgError:
            continue
        for ref in refs:
            # Stages of one step have a state each, and the next one's first may be this one's last.
            place = key.rank, key.role, key.stage, ref.name.removeprefix("metrics.")
            if ref.numel == 1 and _SCALE.search(ref.name):
                value = float(np.asarray(pages.array(ref)).reshape(-1)[0])
                scales.setdefault(place, []).append(_Recorded(key.step, value, record, ref.name))
            elif ref.nbytes >= STATE and ref.numel > 1 and _RANDOM.search(ref.name) and not key.micro:
                digest = hashlib.blake2b(pages.array(ref).tobytes(), digest_size=16).digest()
                states.setdefault(place, []).append(_Recorded(key.step, digest, record, ref.name))
    return scales, states


def _drawn_again(series: list[_Recorded]) -> Finding | None:
    known: dict[Any, _Recorded] = {}
    last: Any = None
    for one in sorted(series, key=lambda each: each.step):
        if (before := known.get(one.value)) is not None and last != one.value and before.step < one.step:
            return warning(
                f"the random state of step {one.step} is that of step {before.step}: what is drawn from there on was "
                "drawn before",
                Where.of(one.record, one.name),
                shown(f"{one.name} of step {one.step} and of step {before.step}", "equal to the last byte", "another"),
                shown("other states in between", len(known) - 1),
                cause="the run was resumed with a random state of its beginning (the seed is set anew, the state of "
                "the checkpoint is not loaded): data are shuffled, samples drawn and dropout made as they were before",
                next_step="save and load the states of torch, numpy and python with the weights",
                steps=[one.step],
            )
        known.setdefault(one.value, one)
        last = one.value
    return None


def _scaled_anew(series: list[_Recorded]) -> Finding | None:
    ordered = sorted(series, key=lambda each: each.step)
    if len(ordered) < 3 or not ordered[0].value > 1:
        return None
    for before, one in pairwise(ordered):
        if one.step - before.step != 1 or not before.value > 0 or one.value != ordered[0].value:
            continue
        if one.value >= LEAP * before.value:
            return warning(
                f"the scale of the loss begins anew at step {one.step}: it goes from {before.value:g} back to "
                f"{one.value:g}, where the run began",
                Where.of(one.record, one.name),
                shown(one.name, one.value, f"<= {2 * before.value:g}: it doubles at most"),
                shown("in the step before", before.value),
                cause="the state of the gradient scaler was not loaded with the checkpoint: steps are skipped until it "
                "has come down again",
                next_step="save and load scaler.state_dict() with the weights",
                steps=[one.step],
            )
    return None
