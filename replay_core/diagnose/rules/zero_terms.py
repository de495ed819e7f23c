"""A term of the loss that is stated and never counts."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from replay_core import pages
from replay_core.diagnose.algorithm import OF_GROUPS, as_number, settings_of, stated_by
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, shown, warning
from replay_core.diagnose.rule import rule, skip_if
from replay_core.errors import RldbgError
from replay_core.records import Record

#: Numbers of a term, and steps of them, before a 0 in all of them is no chance.
NUMBERS, STEPS = 6, 3
#: Words of a setting that weighs a term; and of losses that are no terms, or whose 0 is told elsewhere.
_WEIGHS = frozenset({"weight", "weights", "coef", "coeff", "coefficient", "alpha", "beta", "lambda", "factor", "scale"})
_OTHERS = frozenset({"loss", "pg", "policy", "kl", "val", "eval", "test", "total", "actor", "train", "token", "critic"})
_OF_CRITICS = frozenset({"value", "values", "vf", "v"})
#: Words that say nothing of which term it is.
_PLAIN = frozenset({"loss", "losses", "mean", "avg", "train", "actor", "critic", "policy", "metrics", "fn", "step"})


def words_of(name: str) -> frozenset[str]:
    return frozenset(word for word in re.split(r"[^a-z0-9]+", name.lower()) if word)


def weight_of(term: frozenset[str], settings: dict[str, list[Any]]) -> tuple[str, float] | None:
    """The setting that weighs a term: it has all of the term's words and one for a weight, and is a number above 0."""
    for name, values in settings.items():
        words = words_of(name)
        numbers = [as_number(value) for value in values]
        if term <= words and words & _WEIGHS and all(number is not None and number > 0 for number in numbers):
            return name, float(numbers[0] or 0.0)
    return None


def is_off(term: frozenset[str], settings: dict[str, list[Any]]) -> bool:
    """Whether a switch of the term is off, or it is put off to a later step."""
    own = [(words_of(name), values) for name, values in settings.items() if term <= words_of(name)]
    return any(False in values or words & {"start", "warmup", "after", "begin", "delay"} for words, values in own)


def _terms(record: Record) -> list[tuple[str, float]]:
    """The losses that a record holds as single numbers."""
    try:
        found = [
            ref for ref in record.tensors()
            if "loss" in ref.name.lower() and ref.numel == 1 and not ref.is_text and ref.is_readable
        ]  # fmt: skip
        return [(ref.name, float(np.asarray(pages.array(ref)).reshape(-1)[0])) for ref in found]
    except RldbgError:
        return []


@rule("D152", "a stated term of the loss is 0 throughout", link="loss", scope="case", lasts=True,
      source="NeMo-RL#3792, atropos#456: the coefficient is set, the term's inputs are not handed over")  # fmt: skip
def never_counts(case: Case) -> Finding | None:
    """A logged loss of a term (auxiliary, NLL, distillation, entropy and the like: any `..._loss` but the policy's and
    the KL's) that is exactly 0 in all of 6 numbers and 3 steps and more, while the run states a weight above 0 whose
    name has all of the term's words, and no switch of it is off: a warning.
    """
    values: dict[str, list[float]] = {}
    steps: dict[str, set[int]] = {}
    holder: dict[str, Where] = {}
    settings = settings_of(stated_by(case.run))
    for record in case.records():
        if record.key.role == "eval":
            continue
        for name, value in _terms(record):
            values.setdefault(name, []).append(value)
            holder.setdefault(name, Where.of(record, name))
            if record.key.step is not None:
                steps.setdefault(name, set()).add(record.key.step)
    skip_if(not values, "no loss is logged")
    for name, each in values.items():
        term = words_of(name) - _PLAIN
        if not term or term & _OTHERS or len(each) < NUMBERS or len(steps.get(name, ())) < STEPS:
            continue
        if any(value != 0 or math.isnan(value) for value in each) or is_off(term, settings):
            continue
        # Estimators of groups have no critic, and configurations a weight of its loss all the same.
        if term & _OF_CRITICS and case.algorithm.estimator in OF_GROUPS:
            continue
        weight = weight_of(term, settings)
        if weight is None:
            continue
        return warning(
            f"{name} is exactly 0 in all {len(each)} numbers of {len(steps[name])} steps, and {weight[0]} is "
            f"{weight[1]:g}: the term has no part in the loss",
            holder[name],
            shown(name, 0.0, "another number"),
            shown(weight[0], weight[1]),
            cause="the term's inputs do not reach it (a field that is not handed over, an empty mask of what it "
            "counts), "
            "its result is overwritten by a default, or a condition that switches it on never holds",
            next_step="print what the term is computed of in one micro-batch",
            steps=sorted(steps[name]),
        )
    return None
