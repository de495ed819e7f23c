"""An engine that writes with other weights than the trainer's: what it writes is worth nothing, from the start."""

from __future__ import annotations

import numpy as np

from replay_core.diagnose import trends
from replay_core.diagnose.case import Case
from replay_core.diagnose.compared import gap_of
from replay_core.diagnose.finding import Evidence, Finding, Where, error, shown
from replay_core.diagnose.gap import DISAGREE, Gap
from replay_core.diagnose.log_steps import steps_of
from replay_core.diagnose.rule import Skip, rule, skip_if
from replay_core.diagnose.rules.tokens import truncated
from replay_core.diagnose.signals import RunLog, Series

#: Nats per token that no precision, temperature or update makes: two models of one text are as far apart.
TWO_MODELS = 1.0
#: Steps of it, and the share of responses cut off that says they say nothing.
FEWEST, CUT = 3, 0.9
#: In a dump, the correlation under which two sides do not speak of one distribution.
UNLIKE = 0.5


@rule("L38", "the engine writes with other weights", link="trend", scope="signals",
      needs=("logprob_diff|rollout_k3|rollout_k1",), lasts=True,
      explains=("D01", "D02", "D03", "D09", "D12", "D18", "D20", "D25", "D26", "D94", "L08", "L09",
               "L17"),
      source="slime#1673, verl#7495: an engine that was never given the checkpoint")  # fmt: skip
def foreign(log: RunLog) -> Finding | None:
    """A mismatch of engine and trainer over 1 nat per token in each of the first 3 steps and as its level, while the
    reward is one number in every step, or nine of ten responses are cut off from the first step on: an error, and the
    cause of both. The first step's samples are older than any update. Without either, log-probabilities of other tokens
    (shifted, re-tokenised) look the same, and D09 tells of them.
    """
    series = next((found for name in ("logprob_diff", "rollout_k3", "rollout_k1") if (found := log.get(name))), None)
    values = [] if series is None else [abs(value) for value in series.finite]
    if series is None or len(values) < FEWEST:
        raise Skip(f"needs the mismatch of {FEWEST} steps")
    if min(values[:FEWEST]) < TWO_MODELS or trends.level(values) < TWO_MODELS:
        return None
    symptoms = _symptoms(log)
    if not symptoms:
        return None
    return error(
        f"the engine writes with other weights than the trainer has: {series.name} is {values[0]:.3g} nats per token "
        "from the first step on, and what it writes earns nothing",
        series.place,
        series.shown(values[0], f"< {TWO_MODELS:g} even of an odd setting"),
        *symptoms,
        cause="the engine holds another model than the trainer: weights that were never loaded or sent (a dummy load "
        "format, a sync that fails silently), another checkpoint, or another tokenizer or chat template for its "
        "prompts. Constant rewards and responses that do not end follow from it",
        next_step="compare what both sides say of one fixed text before the first step; rldbg record -- YOUR COMMAND, "
        "then rldbg diagnose rldbg-dump",
        steps=steps_of(point for point in series.points if abs(point.value) > TWO_MODELS),
    )


def _symptoms(log: RunLog) -> list[Evidence]:
    """What a model that writes nonsense comes to, from the first step on."""
    found = []
    for name in ("reward", "accuracy"):
        series: Series | None = log.get(name) if log.has(name) else None
        values = [] if series is None else series.finite
        if series is not None and len(values) >= FEWEST and min(values) == max(values):
            found.append(shown(f"{series.name}, in every step", values[0], "another number in every step"))
            break
    cut = log.get("truncated")
    if cut is not None and len(cut.finite) >= FEWEST and min(cut.finite[:FEWEST]) >= CUT:
        found.append(shown(f"{cut.name} in the first step", cut.finite[0], "< 0.25"))
    return found


@rule("L38", "the engine writes with other weights", link="trend", scope="case", lasts=True,
      source="slime#1673: a checkpoint that was converted wrongly for the engine")  # fmt: skip
def foreign_samples(case: Case) -> Finding | None:
    """Recorded samples: mean |d| over 1 nat per token from the first step on, in every step, and over .03 in all but a
    tenth of the rows; the trainer gives the tokens 1 nat less than the engine, and the two do not rise and fall
    together (correlation under .5, at no shift either); and nothing that is written earns another reward than the
    rest, or nine of ten responses are cut off. An error, and the cause of the others. A policy that learns on what
    its own engine wrote earns something; log-probabilities that are mixed up afterwards leave the responses as they
    are.
    """
    seen: list[tuple[Gap, Where, int | None]] = []
    rewards: set[float] = set()
    cut: list[bool] = []
    for batch in case.batches():
        if (between := gap_of(batch)) is None:
            continue
        tokens = np.flatnonzero(between.both_N)
        seen.append((between, batch.laid.where("rollout_logprobs", at=int(tokens[0])), batch.step))
        rewards |= set() if batch.reward_B is None else set(batch.reward_B[np.isfinite(batch.reward_B)].tolist())
        cut_B = truncated(batch)
        cut += [] if cut_B is None else cut_B.tolist()
    skip_if(not seen, "needs rollout and trainer log-probabilities")
    if not all(_are_two_models(between) for between, _, _ in seen):
        return None
    symptoms = []
    if len(rewards) == 1:
        symptoms.append(shown("reward of every response", rewards.pop(), "others among them"))
    if cut and float(np.mean(cut)) >= CUT:
        symptoms.append(shown("share of responses cut off", float(np.mean(cut)), "< 0.25"))
    if not symptoms:
        return None
    first, place, _ = seen[0]
    return error(
        "the engine writes with other weights than the trainer has: they disagree by "
        f"{first.mean:.3g} nats per token from the first step on, in all rows, and what it writes earns nothing",
        place,
        shown("mean |trainer - rollout| in the first step", first.mean, f"< {DISAGREE} nats"),
        shown("mean trainer - rollout", float(first.d.mean()), "0"),
        shown("correlation", first.correlation, "> 0.9"),
        shown("least mean |trainer - rollout| of a step", min(between.mean for between, _, _ in seen)),
        *symptoms,
        cause="the engine holds another model than the trainer: weights that were converted wrongly for it (rows of a "
        "head or an embedding moved, a tensor under another name), never loaded (a dummy format), or another "
        "checkpoint, tokenizer or prompt. Responses that do not end and constant rewards follow from it",
        next_step=first.batch.laid.mismatch_command(),
        steps=[step for _, _, step in seen],
    )


def _are_two_models(between: Gap) -> bool:
    rows = between.by_sample_B[np.isfinite(between.by_sample_B)]
    return (
        between.mean > TWO_MODELS
        and -float(between.d.mean()) > TWO_MODELS
        and not between.is_shifted
        and not between.correlation > UNLIKE
        and float((rows > DISAGREE).mean()) >= CUT
    )
