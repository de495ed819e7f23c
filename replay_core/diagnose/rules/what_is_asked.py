"""Which prompts a run asks, as its log tells: the same in every step, or those of its validation in training, too."""

from __future__ import annotations

import math
from typing import Any

from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, finding, shown, warning
from replay_core.diagnose.rule import given, rule, skip_if
from replay_core.diagnose.signals import RunLog
from replay_core.regexes import regex

#: Steps whose prompts have one mean length, before it is no chance; fewer tell where longest and shortest do, too.
STEPS, STEPS_OF_ALL = 12, 8
#: Steps that what the answers are may not stand still in with them: a log that repeats one line tells nothing.
DIFFERENT = 3


@rule("L61", "every step asks the same prompts", link="tokens", scope="signals", needs=("prompt_length",), lasts=True,
      explains=("L60", "D43"),
      source="a loader that is made anew in every step, or never advances")  # fmt: skip
def same_prompts(log: RunLog) -> Finding | None:
    """Mean, longest and shortest prompt each one number in all of 8 steps and more, the longest longer than the
    shortest; or a mean that is no whole number, to the last digit, in all of 12: a warning, while rewards or lengths of
    the responses change.
    """
    mean = given(log.get("prompt_length"))
    longest, least = log.get("prompt_length_max"), log.get("prompt_length_min")
    lengths = [one for one in (mean, longest, least) if one is not None]
    skip_if(len(mean.finite) < STEPS_OF_ALL, f"needs the prompts' lengths of {STEPS_OF_ALL} steps")
    others = [one for name in ("reward", "response_length") for one in log.all(name)[:1]]
    if not any(len(set(one.finite)) > DIFFERENT for one in others):
        return None
    if any(len(set(one.finite)) != 1 for one in lengths):
        return None
    differ = longest is not None and least is not None and longest.finite[0] > least.finite[0]
    if not differ and (len(mean.finite) < STEPS or mean.finite[0] == int(mean.finite[0])):
        return None  # all padded, or cut, to one width
    return warning(
        f"every step has the same prompts: {mean.name} is {mean.finite[0]:.6g} in all {len(mean.finite)} steps"
        + (f", the longest {longest.finite[0]:g}, the shortest {least.finite[0]:g}" if longest and least else ""),
        mean,
        *(one.shown(one.finite[0], "another from batch to batch") for one in lengths),
        cause="the data loader hands out one batch again and again (it is made anew in every step, its iterator is not "
        "kept, its sampler is seeded with the same number), or the data set is no larger than a batch: the policy "
        "learns these prompts by heart",
        next_step="print the ids of the prompts of three steps; look whether the loader's iterator goes on",
    )


#: Steps of the run's beginning that come again, one by one, and different lengths among them; steps before them.
AGAIN, DIFFERENT_LENGTHS, BEFORE = 8, 4, 8


@rule("L76", "the first prompts come again", link="tokens", scope="signals", needs=("prompt_length",), lasts=True,
      explains=("L60",), source="a run that is resumed without the state of its data loader")  # fmt: skip
def first_prompts_again(log: RunLog) -> Finding | None:
    """From a step on the mean, longest and shortest prompt are those of the run's first steps, one after the other, to
    the last digit, over all that follows (8 steps and more): the data is read from its beginning. A warning where the
    run says that it is in the same pass over the data as in its first step; worth knowing where it says nothing of
    passes. Where a later pass begins there, data that is not shuffled is read again, as it is meant.
    """
    every = [one for name in ("prompt_length", "prompt_length_max", "prompt_length_min") for one in log.all(name)[:1]]
    steps = [p.step for p in every[0].points]
    rows = list(zip(*(one.values for one in every), strict=False))
    skip_if(len(rows) < AGAIN + BEFORE or any(len(one.values) != len(steps) for one in every),
            f"needs the prompts' lengths of {AGAIN + BEFORE} steps")  # fmt: skip
    at = next(
        (at for at in range(BEFORE, len(rows) - AGAIN + 1)
         if rows[at : at + AGAIN] == rows[:AGAIN] and rows[at:] == rows[: len(rows) - at]), None
    )  # fmt: skip
    # A batch that comes again and again is L61's, and lengths of a few kinds come again by chance.
    if at is None or len(set(rows[:AGAIN])) < DIFFERENT_LENGTHS:
        return None
    here, first = (log.epochs.get(steps[each], math.nan) for each in (at, 0))
    is_same_pass = math.isfinite(here) and math.isfinite(first)
    if is_same_pass and int(here) > int(first):
        return None
    return finding(
        "warning" if is_same_pass else "info",
        f"the data is read from its beginning again from step {steps[at]} on: the prompts of the {len(rows) - at} "
        f"steps since are as long as those of the first {len(rows) - at}, step by step"
        + (", though the run says that it is in the same pass" if is_same_pass else ""),
        every[0].of(every[0].points[at:]),
        *(one.shown_at(one.points[at], f"any; {one.values[0]:.6g} in the first step") for one in every),
        cause="the run was resumed (or its workers started again) without the state of the data loader or its sampler: "
        "what was trained on is trained on once more, and the end of the data is never reached"
        + ("" if is_same_pass else "; or a later pass over data that is not shuffled begins there, which is normal"),
        next_step="compare the ids of the prompts of both steps; save and load the data loader's state with the "
        "checkpoint",
    )


#: How runs name the files that they train on, and those that they validate on.
_TRAINED = ("train_files", "train_file", "train_data", "train_data_path", "train_path", "train_dataset_path")
_HELD_OUT = ("val_files", "val_file", "val_data", "val_data_path", "val_path", "validation_files", "validation_file",
             "eval_files", "eval_file", "eval_data", "eval_data_path", "eval_path", "test_files", "test_file",
             "eval_dataset_path", "validation_dataset_path")  # fmt: skip
#: A data set by its name has parts, which are named elsewhere: a file has none.
_A_FILE = regex(r"(?i)\.(?:parquet|jsonl?|csv|tsv|arrow|pkl|pt|txt)(?:\.gz|\.zst)?$")


@rule("D126", "validation is on what is trained on", link="trend", scope="case", lasts=True, explains=("L60", "D116"),
      source="data.val_files set to data.train_files to get a configuration to run")  # fmt: skip
def same_files(case: Case) -> Finding | None:
    """A file that the run states it validates on is one that it states it trains on: a warning, as the validation's
    result is no measure then.
    """
    trained, held_out = (_files(case.algorithm.value(*names)) for names in (_TRAINED, _HELD_OUT))
    skip_if(not trained or not held_out, "the run states no files for training and for validation")
    both = [one for one in held_out if one in trained]
    if not both:
        return None
    held = case.log.get("held_out") if case.signals is not None else None
    return warning(
        f"the validation file is the training file: {', '.join(both[:2])}"
        + ("" if held is None or not held.finite else f", so that {held.name} ({held.finite[-1]:.3g}) measures nothing "
           "but what was trained on"),
        Where() if held is None else held.place,
        shown("files to validate on", ", ".join(held_out[:4]), "none of those to train on"),
        shown("files to train on", ", ".join(trained[:4])),
        cause="one path stands in both settings: the result rises as the prompts are learnt by heart, and says nothing "
        "of others",
        next_step="validate on a file of prompts that are in no training file",
    )  # fmt: skip


def _files(stated: Any) -> list[str]:
    """The files of a setting: one path, or a list of them, as Python or YAML writes it."""
    if isinstance(stated, str):
        stated = [part.strip(" '\"") for part in stated.strip("[]()").split(",")]
    if not isinstance(stated, (list, tuple)):
        return []
    return [one for one in map(str, stated) if _A_FILE.search(one)]
