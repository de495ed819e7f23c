"""The penalty on overlong answers that a run states, beside the one that its scores hold: what it counts, and how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from msgspec import Struct

from replay_core.diagnose.algorithm import Algorithm, inside
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, finding, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import Skip, rule, skip_if
from replay_core.diagnose.rules.shaping import BUFFER_WORDS, LIMIT_WORDS
from replay_core.regexes import regex

#: How a recorded penalty is called, and what an answer is worth without it, the surest first.
_PENALTY = regex(r"(?i)over_?long|too_?long|over_?length|soft_?(?:overlong_)?punish|length_?penalty")
BASES = (
    "acc", "accuracy", "accuracies", "correct", "is_correct", "correctness", "verifier_score", "verifier_reward",
    "accuracy_reward", "accuracy_rewards", "correctness_reward", "outcome_reward", "outcome", "base_reward",
    "task_reward", "rule_reward", "raw_reward", "raw_rewards", "raw_score", "unshaped_reward", "score_before_penalty",
    "reward_before_penalty",
)  # fmt: skip
_FACTOR = ("overlong_penalty_factor", "overlong_factor", "penalty_factor")
_PER_TOKEN = (
    "length_penalty_coef", "length_penalty_coeff", "length_penalty_weight", "length_coef", "length_penalty_per_token",
    "len_penalty_coef", "token_penalty",
)  # fmt: skip
#: Samples and penalties that tell; the share that a way to make them has to make, and that of the stated one above
#: which it is right; how close is equal.
SAMPLES, PENALISED, MADE, RIGHT, CLOSE = 24, 6, 0.98, 0.9, 1e-3
#: Classes of answers that one worth each may have.
CLASSES = 4

_CAUSES = {
    "prompt and response together": "the length that is handed to the penalty is that of the whole row: answers far "
    "below the limit are punished, the more the longer their prompt is",
    "the padded row": "the width of the padded rows is counted and not the tokens in them: every answer of a batch has "
    "the penalty of its longest",
    "characters": "len() is taken of a text and not of its ids, beside a limit in tokens: nearly all are punished",
    "the tokens that count": "the loss mask is counted, and leaves out what the policy did not write; the stated "
    "penalty is on the whole response",
    "all tokens of the response": "tool output is counted with the policy's own tokens: calling a tool is punished by "
    "what it returns",
}


_MORE, _FEWER = "one token more than the response has", "one token fewer than the response has"


class _Shaped(Struct, frozen=True):
    """A way to make a penalty of sizes: in words, and what it makes [B]."""

    how: str
    penalty_B: Array


@rule("D175", "the penalty on long answers is not the stated one", link="rewards", scope="case", lasts=True,
      explains=("L08", "L09", "D104", "D105", "D132", "D01", "D03", "D74", "D123", "D95"),
      source="DAPO section 3.3, verl's overlong_buffer, TRL's get_soft_overlong_punishment; OpenRLHF#1243")  # fmt: skip
def otherwise_than_stated(case: Case) -> Finding | None:
    """A stated penalty on long answers (limit, buffer and factor as DAPO and verl have them, or so much for each token)
    held against that of the samples: recorded, or the reward less what the answer is worth by a recorded accuracy or
    verifier's reward. An error where the stated penalty makes fewer than nine tenths of 24 samples and more, and
    another way to make it nearly all: of prompt and response together, of padded rows, of characters, of the policy's
    tokens alone or of all of them; one token more; of a buffer that begins at the limit; with the wrong sign; without
    its factor. One token fewer is worth knowing: what counts the tokens of a text leaves out the end.
    """
    algorithm = case.algorithm
    skip_if(not list(_shapes(algorithm)), "no penalty on long answers is stated (limit and buffer, or a weight)")
    taken: list[tuple[StepBatch, str, Array, dict[str, Array], list[tuple[str, Array]]]] = []
    for batch in case.batches():
        told = _penalty(batch)
        sizes = _sizes(batch)
        if told is not None and sizes:
            taken.append((batch, told[0], told[1], sizes, told[2]))
    if not taken:
        raise Skip("needs a recorded penalty on overlong answers, or a reward and an accuracy beside it")
    named = taken[0][1]
    taken = [one for one in taken if one[1] == named]
    first = taken[0][0]
    sizes = {what: np.concatenate([one[3][what] for one in taken])
             for what in taken[0][3] if all(what in one[3] for one in taken)}  # fmt: skip
    whats = [what for what, _ in taken[0][4]]
    recorded = {what: np.concatenate([dict(one[4])[what] for one in taken]) for what in whats}
    skip_if(len(next(iter(sizes.values()))) < SAMPLES, f"needs the penalties of {SAMPLES} answers")
    stated = list(_shapes(algorithm))
    best: tuple[float, str, str, Array, Array] | None = None
    for penalty_B in recorded.values():
        for kind in ("all tokens of the response", "the tokens that count"):
            # Where a tool wrote, either count may be meant.
            if kind not in sizes:
                continue
            for shape in stated:
                if _share(shape.of(sizes[kind]), penalty_B) >= RIGHT:
                    return None
    for what, penalty_B in recorded.items():
        if int((np.abs(penalty_B) > CLOSE).sum()) < PENALISED:
            continue
        for one in _alternatives(stated, sizes, algorithm):
            share = _share(one.penalty_B, penalty_B)
            if share >= MADE and np.unique(np.round(one.penalty_B, 6)).size > 1 and (best is None or share > best[0]):
                best = share, one.how, what, one.penalty_B, penalty_B
    if best is None:
        return None
    share, how, what, _, penalty_B = best
    meant_B = stated[0].of(sizes["all tokens of the response"])
    off_B = np.abs(meant_B - penalty_B) > CLOSE
    row = int(np.flatnonzero(off_B)[0])
    short = sizes["all tokens of the response"]
    return finding(
        # What counts a text has no end token: a 1 / buffer of the penalty is no other penalty.
        "info" if how == _FEWER else "error",
        f"the penalty on long answers is not the stated one in {int(off_B.sum())} of {len(off_B)} answers: it is made "
        f"of {how}",
        first.laid.where(named, sample=int(np.flatnonzero(off_B[: len(first)])[0]) if off_B[: len(first)].any() else 0),
        shown(f"answers whose penalty is made of {how}", f"{share:.0%}", None, what),
        shown("of them, those that have the stated one", f"{1 - float(off_B.mean()):.0%}", "100%"),
        shown("first that differs: penalty", float(penalty_B[row]), f"{meant_B[row]:.4g}"),
        shown("its tokens", int(short[row]), stated[0].how),
        cause=next((text for key, text in _CAUSES.items() if key in how), "the arithmetic of the penalty is not that "
                   "of the settings: what is paid for length is another thing than is stated"),
        next_step="hand the count of the response's own tokens to the penalty" if any(key in how for key in _CAUSES)
        else "look at the line that makes the penalty, beside its limit, buffer and factor",
        steps=sorted({one[0].step for one in taken if one[0].step is not None}),
    )  # fmt: skip


class _Shape(Struct, frozen=True):
    """A stated penalty: 0 up to `begins`, falling by `slope` a token from there, no less than `floor`."""

    how: str
    begins: float
    slope: float
    floor: float

    def of(self, size_B: Array) -> Array:
        made: Array = np.clip(-self.slope * np.maximum(size_B - self.begins, 0.0), self.floor, 0.0)
        return made


def _shapes(algorithm: Algorithm) -> Iterator[_Shape]:
    """What the run states of it."""
    limit = algorithm.number(*LIMIT_WORDS, "max_completion_len", "max_resp_len", "rollout_max_response_len")
    buffer = algorithm.number(*BUFFER_WORDS)
    if buffer is None:
        told = inside(algorithm, "overlong_buffer", "len")
        buffer = float(told) if isinstance(told, (int, float)) and not isinstance(told, bool) else None
    is_off = inside(algorithm, "overlong_buffer", "enable") is False
    factor = algorithm.number(*_FACTOR)
    if limit is not None and buffer is not None and 0 < buffer <= limit and not is_off and factor != 0:
        by = 1.0 if factor is None else abs(factor)
        how = f"begins at {limit - buffer:g}, {by:g} at {limit:g}"
        yield _Shape(how, limit - buffer, by / buffer, -by)
        # verl's has no end: a response is no longer than its limit.
        yield _Shape(how, limit - buffer, by / buffer, -np.inf)
    each = algorithm.number(*_PER_TOKEN)
    if each:
        yield _Shape(f"{abs(each):g} a token", 0.0, abs(each), -np.inf)
        if limit:
            yield _Shape(f"{abs(each):g} a response of {limit:g} tokens", 0.0, abs(each) / limit, -np.inf)


def _alternatives(stated: list[_Shape], sizes: Mapping[str, Array], algorithm: Algorithm) -> Iterator[_Shaped]:
    """The penalties that a mistake makes, the likeliest first."""
    for shape in stated:
        for what, size_B in sizes.items():
            yield _Shaped(what, shape.of(size_B))
    whole = sizes["all tokens of the response"]
    prompts = algorithm.number("max_prompt_length", "prompt_max_len", "max_prompt_len")
    for shape in stated:
        for by in (1, -1):
            yield _Shaped(_MORE if by > 0 else _FEWER, shape.of(whole + by))
        width = -shape.floor / shape.slope if np.isfinite(shape.floor) else 0.0
        if width:
            late = _Shape(shape.how, shape.begins + width, shape.slope, shape.floor)
            early = _Shape(shape.how, shape.begins - width, shape.slope, shape.floor)
            for other, how in ((late, "a buffer behind the limit"), (early, "two buffers before the limit")):
                yield _Shaped(f"{how}, not the one before it", other.of(whole))
            yield _Shaped("all tokens over the limit less the buffer at once, without a slope",
                        np.where(whole > shape.begins, shape.floor, 0.0))  # fmt: skip
            yield _Shaped("the whole penalty at the limit, without a slope",
                        np.where(whole >= shape.begins + width, shape.floor, 0.0))  # fmt: skip
            yield _Shaped("the tokens over the buffer's beginning, not divided by its length",
                        -np.maximum(whole - shape.begins, 0.0) * -shape.floor)  # fmt: skip
            unclipped = -shape.slope * (whole - shape.begins)
            yield _Shaped("the line on both of its sides: what is shorter is paid for", unclipped)
            turned = np.clip(shape.slope * (whole - shape.begins - width), shape.floor, 0.0)
            yield _Shaped("the distance to the limit with the wrong sign: short answers are punished", turned)
            if shape.floor != -1:
                yield _Shaped("the length, without its factor", shape.of(whole) / -shape.floor)
            if prompts:
                long = _Shape(shape.how, shape.begins + prompts, shape.slope, shape.floor)
                yield _Shaped("the response beside a limit for prompt and response together", long.of(whole))
                if "prompt and response together" in sizes:
                    yield _Shaped("prompt and response together, beside a limit for both",
                                long.of(sizes["prompt and response together"]))  # fmt: skip
        yield _Shaped("the length with the wrong sign: long answers are paid for", -shape.of(whole))
        yield _Shaped("twice the stated penalty", 2 * shape.of(whole))


def _share(made_B: Array, penalty_B: Array) -> float:
    return float((np.abs(made_B - penalty_B) <= CLOSE).mean())


def _sizes(batch: StepBatch) -> dict[str, Array]:
    """How long each answer is, by what may be counted."""
    if batch.response_N is None:
        return {}
    sizes = {"all tokens of the response": batch.flat.count(batch.response_N).astype(np.float64)}
    if batch.trained_N is not None:
        sizes["the tokens that count"] = batch.flat.count(batch.trained_N & batch.response_N).astype(np.float64)
    sizes["prompt and response together"] = batch.flat.lengths_B.astype(np.float64)
    for name in ("response_ids", "response_mask", "input_ids"):
        ref = batch.columns.ref(name)
        if ref is not None and ref.rows is None and len(ref.shape) == 2:
            sizes.setdefault("the padded row", np.full(len(batch), float(ref.shape[1])))
    if (texts := batch.columns.texts("response_text")) is not None:
        sizes["characters"] = np.array([float(len(text)) for text in texts])
    return sizes


def _penalty(batch: StepBatch) -> tuple[str, Array, list[tuple[str, Array]]] | None:
    """The name of what holds the penalty, the likeliest penalties of the samples, and every one that may be meant, each
    under what it was taken from.
    """
    for name in sorted({name for sheet, _ in batch.columns.sheets for name in sheet.names() if _PENALTY.search(name)}):
        told_B = batch.columns.per_sample(name)
        if told_B is not None and np.isfinite(told_B).all():
            # Some record what is subtracted, and some what is added.
            told_B = -told_B if told_B.min() >= 0 else told_B
            return name, told_B, [(name, told_B)]
    score_B = batch.summed("token_scores")
    named = "token_scores"
    if score_B is None:
        score_B, named = batch.reward_B, batch.columns.reward_name
    if score_B is None or not np.isfinite(score_B).all():
        return None
    for name in BASES:
        worth_B = batch.columns.per_sample(name)
        if worth_B is None or not np.isfinite(worth_B).all() or np.array_equal(worth_B, score_B):
            continue
        found = [(f"{named} less {name}", score_B - worth_B)]
        if set(np.unique(worth_B).tolist()) <= {0.0, 1.0}:
            found.append((f"{named} less what {name} is paid with (1, -1)", score_B - (2 * worth_B - 1)))
        if np.unique(worth_B).size <= CLASSES:
            top_B = np.empty(len(score_B))
            for each in np.unique(worth_B):
                top_B[worth_B == each] = score_B[worth_B == each].max()
            found.append((f"{named} less the best of equal {name}", score_B - top_B))
        return named, found[0][1], found
    return None
