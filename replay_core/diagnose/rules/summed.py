"""Sums where a mean is meant: the whole loss, its KL term, or what is not divided by what the run states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import median

import numpy as np
from msgspec import Struct

from replay_core.diagnose.algorithm import RESPONSE_LIMITS, aggregation, kl_weight, largest_norm, of_loss, stated_number
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.columns import Scalar
from replay_core.diagnose.finding import Finding, Where, finding, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import Skip, given, rule
from replay_core.diagnose.rules.ratio import ratios
from replay_core.diagnose.surrogates import Logged, logged_of
from replay_core.objectives import kl, policy_loss

#: Relative agreement of what is recomputed, losses below which it is not told, tokens that are a sum, steps that tell.
CLOSE, FLOOR, TOKENS, STEPS = 1e-3, 1e-5, 8, 2
#: How many times the norm that is clipped at a gradient has, when all that is left of it is its direction.
FAR_OVER = 5.0


@rule("D99", "the loss is a sum over tokens", link="reduction", scope="case", lasts=True,
      explains=("L02", "D28", "D49"),
      source="NeMo-RL#84: a loss not divided by its tokens; Megatron divides gradients afterwards")  # fmt: skip
def summed(case: Case) -> Finding | None:
    """`loss` over `pg_loss` of every micro-batch, where no other term is recorded: one factor within each of 2 steps
    and more that is the number of tokens of its update (or of the micro-batch), and another as that changes. A warning
    where the run states a mean, or gradients are five times over the norm they are clipped at in half of the steps: all
    of them are cut, by as much as a batch has tokens. Else it is worth knowing: the gradient may be divided afterwards.
    """
    factors: list[tuple[int, float, str]] = []
    over: list[float] = []
    where: Where | None = None
    means = False
    for batch in case.batches():
        if batch.trained_N is None or batch.step is None:
            continue
        stated = aggregation(batch.laid.algorithm)
        means = means or stated.endswith("mean")
        found = _factor(batch)
        if found is not None:
            factors.append((batch.step, *found))
            where = where or batch.laid.where_record(batch.columns.scalars("loss")[0].record, "loss")
        over += _over(batch)
    counts = {round(factor) for _, factor, _ in factors}
    if len(factors) < STEPS or len(counts) < STEPS:
        raise Skip(f"needs loss and pg_loss of {STEPS} steps, and no other term beside them")
    if len({what for _, _, what in factors}) > 1:
        return None
    clipped = median(over) if over else None
    cut = clipped is not None and clipped > FAR_OVER
    return finding(
        "warning" if means or cut else "info",
        f"the loss is a sum over tokens: it is pg_loss times the tokens of {factors[0][2]}, {min(counts)} to "
        f"{max(counts)} times",
        where,
        shown("loss / pg_loss", factors[0][1], "1"),
        shown("steps where that is the number of tokens", len(factors)),
        *([] if clipped is None else [shown("gradient norm over the norm it is clipped at, median", clipped,
        f"< {FAR_OVER:g}")]),
        cause="the division by the number of tokens (a mean, an average) is missing in what is trained on, while the "
        "mean is logged: the gradient is as many times too large, its size goes with the lengths of the answers, and "
        "clipping leaves its direction alone"
        if means or cut
        else "right where the gradient is divided by the tokens of all ranks afterwards, as Megatron's schedule does",
        steps=[step for step, _, _ in factors],
    )  # fmt: skip


def _factor(batch: StepBatch) -> tuple[float, str] | None:
    """loss / pg_loss of the step's micro-batches and what it is the number of tokens of; None where it is none."""
    if any(batch.columns.scalars(name) for name in ("kl_loss",)) and _weighs(batch):
        return None
    parts = {one.place: one.value for one in batch.columns.scalars("pg_loss")}
    rows, counts_B = batch.laid.rows_by_micro(), batch.flat.count(batch.trained_N)  # type: ignore[arg-type]
    pairs = [
        (one.value / parts[key], int(counts_B[rows[key]].sum()))
        for one in batch.columns.scalars("loss")
        if (key := one.place) in parts and key in rows
        and np.isfinite(one.value) and abs(parts[key]) > FLOOR and abs(one.value) > FLOOR
    ]  # fmt: skip
    if not pairs:
        return None
    ratios = np.array([ratio for ratio, _ in pairs])
    own = np.array([count for _, count in pairs], dtype=np.float64)
    total = float(counts_B.sum())
    if total > TOKENS and np.abs(ratios - total).max() <= CLOSE * total:
        return float(ratios.mean()), "the update"
    if len(pairs) > 1 and own.min() > TOKENS and (np.abs(ratios - own) <= CLOSE * own).all():
        return float(ratios.mean()), "the micro-batch"
    return None


def _weighs(batch: StepBatch) -> bool:
    """Whether a KL term is in the loss, as far as the run states it."""
    weight = kl_weight(batch.laid.algorithm)
    return weight is None or weight != 0


def _over(batch: StepBatch) -> list[float]:
    """Gradient norms of the step over the norm that they are clipped at, as it is recorded or stated."""
    limits = [one.value for one in batch.columns.scalars("max_grad_norm")]
    stated = largest_norm(batch.laid.algorithm)
    limit = limits[0] if limits else stated
    if not limit or not limit > 0:
        return []
    return [one.value / limit for one in batch.columns.scalars("grad_norm") if np.isfinite(one.value)]


#: Terms that are told from rounding, and micro-batches that are no chance.
LEAST, FEWEST = 1e-6, 4


def logged_kl(batch: StepBatch, fewest: int = 2) -> tuple[Logged, Array, Array, Array] | None:
    """A batch's KL losses by micro-batch, and what they are made of: log-probabilities of policy and reference [N], 0
    where either has none, and where both have one. None for fewer than so many micro-batches, or without one of them.
    """
    logged = logged_of(batch, "kl_loss", "kl", "kl_penalty", fewest=fewest)
    policy, ref = batch.columns.of("policy_logprobs"), batch.columns.of("ref_logprobs")
    if logged is None or policy is None or ref is None:
        return None
    both_N = batch.pair(policy, ref)
    p_N, r_N = (np.where(both_N, one.values_N, 0.0) for one in (policy, ref))
    return logged, p_N, r_N, both_N


def summed_kl(case: Case) -> Finding | None:
    """The logged KL loss of 4 micro-batches and more, each made by one estimator as the mean over samples of their sums
    over tokens (or as one sum), and as no mean over tokens, where the run states a mean for its loss.
    """
    sums: dict[str, list[tuple[StepBatch, float, float, str]]] = {}
    parts: Counter[tuple[str, int, int]] = Counter()
    told = 0
    stated, is_of_term = "", False
    for batch in case.batches():
        own = str(of_loss(batch.laid.flags, "reduction"))
        is_of_term = is_of_term or own in ("token_mean", "sequence_mean")
        stated = aggregation(batch.laid.algorithm) or own
        if not stated.endswith(("-mean", "_mean")):
            return None
        for value, terms_N, samples in _terms(batch):
            told += 1
            for name, made_N in terms_N.items():
                sums_B, counts_B = _of_samples(batch, made_N, samples)
                means = (float(sums_B.sum() / max(counts_B.sum(), 1)), float((sums_B / np.maximum(counts_B, 1)).mean()))
                for which, mean in enumerate(means):
                    parts[name, which, _part(value, mean)] += 1
                for how, total in (("each response's tokens", float(sums_B.mean())), ("all tokens", sums_B.sum())):
                    if abs(value - total) <= CLOSE * abs(total):
                        sums.setdefault(how + "|" + name, []).append((batch, value, means[1], name))
    # A mean that is shared among micro-batches, by any whole number, is one.
    if any(part and count == told for (_, _, part), count in parts.items()):
        return None
    whole = [each for each in sums.values() if len(each) == told]
    if told < FEWEST or not whole:
        return None
    how = next(key for key, each in sums.items() if each is whole[0]).split("|")[0]
    batch, value, mean, name = whole[0][0]
    return finding(
        "error" if is_of_term else "warning",
        f"the KL loss is a sum over {how}, and the run states a loss of {stated.replace('_', ' ')}: the KL is weighted "
        "by length",
        batch.laid.where_record(batch.columns.scalars("kl_loss")[0].record, "kl_loss"),
        shown("kl_loss", value, f"{mean:.6g}, the mean over tokens"), shown("estimator that makes it", name),
        shown("micro-batches that agree", told),
        link="ref",
        cause="the KL term is not reduced as the policy's loss is: its division by the tokens is missing, and it "
        f"weighs {value / mean:.3g} times what its coefficient says, more the longer the responses are",
        steps=sorted({each.step for each, *_ in whole[0] if each.step is not None}),
    )  # fmt: skip


def _terms(batch: StepBatch) -> Iterator[tuple[float, dict[str, Array], list[int]]]:
    """The logged KL loss of each micro-batch, its tokens' KL by every estimator [N], and its samples."""
    policy, ref = batch.columns.of("policy_logprobs"), batch.columns.of("ref_logprobs")
    if policy is None or ref is None or batch.trained_N is None:
        return
    both_N = batch.pair(policy, ref)
    p_N, r_N = (np.where(both_N, one.values_N, 0.0) for one in (policy, ref))
    made = {name: np.where(both_N & batch.trained_N, each(p_N, r_N), 0.0) for name, each in kl.ESTIMATORS.items()}
    rows = batch.laid.rows_by_micro()
    for scalar in batch.columns.scalars("kl_loss"):
        samples = rows.get(scalar.place)
        if samples and scalar.record.key.micro is not None and abs(scalar.value) > LEAST:
            yield scalar.value, made, samples


def _of_samples(batch: StepBatch, values_N: Array, samples: list[int]) -> tuple[Array, Array]:
    return batch.flat.sum(values_N)[samples], batch.flat.count(given(batch.trained_N))[samples]


def _part(value: float, mean: float) -> int:
    """The whole number that a mean is divided by; 0 for none."""
    parts = mean / value
    return round(parts) if abs(parts - round(parts)) <= CLOSE * abs(parts) else 0


#: How far micro-batches, and steps, lie apart by their tokens for each sample before a width is told from them; and how
#: near a whole number every width is: of a thousand slots, a thousandth would let any number be one.
APART, WHOLE = 2e-2, 0.1
_WIDE = ("response_mask", "loss_mask", "input_ids", "log_probs", "old_log_probs", "advantages")


class _Slots(Struct, frozen=True):
    """One micro-batch's term: what its sum is divided by for each sample, and what it may be divided by."""

    batch: StepBatch
    scalar: Scalar
    width: float
    mean: float
    samples: int
    tokens: float
    of_step: float

    @property
    def is_shared(self) -> bool:
        """Whether it is the sum over the update's tokens, by a whole number of ranks, micro-batches or updates."""
        times = self.of_step / (self.width * self.samples)
        return any(abs(one - round(one)) <= 2 * CLOSE * one for one in (times, 1 / times))


def _told_apart(values: list[float]) -> bool:
    return max(values) - min(values) > APART * max(values)


def over_slots(case: Case) -> Finding | None:
    """The logged KL loss (or entropy loss) of 4 micro-batches and more, in 2 steps and more whose tokens differ, as the
    sum over tokens that count, divided by every slot of the padded responses: one whole number of slots for each
    sample, from the longest response to the recorded row (or the stated limit), where the run states a mean for its
    loss and no mean over tokens makes it, of the micro-batch's or of the update's.
    """
    for name, what in (("kl_loss", "KL"), ("entropy_loss", "entropy")):
        each: list[_Slots] = []
        means = told = longest = widest = 0
        for batch in case.batches():
            stated = aggregation(batch.laid.algorithm) or str(of_loss(batch.laid.flags, "reduction"))
            if not stated.endswith(("-mean", "_mean")):
                return None
            for scalar, sums, by_mean, samples in _means(batch, name):
                told += 1
                if any(_part(scalar.value, mean) for mean in by_mean):
                    means += 1
                    continue
                counts_B = batch.flat.count(given(batch.trained_N))
                longest, widest = max(longest, int(counts_B.max(initial=0))), max(widest, _widest(batch))
                tokens, whole = sums / by_mean[0] / samples, float(counts_B.sum())
                each.append(_Slots(batch, scalar, sums / scalar.value / samples, by_mean[0], samples, tokens, whole))
        steps = {one.batch.step: one.of_step for one in each}
        if told < FEWEST or 2 * means > told or len(each) < FEWEST or len(steps) < STEPS:
            continue
        width = round(median(one.width for one in each))
        near = min(CLOSE * width, WHOLE)
        if not longest <= width <= widest or any(abs(one.width - width) > near for one in each):
            continue
        # Of lengths that are alike a coefficient, and of steps that are, the update's own mean, comes to a width.
        if not _told_apart([one.tokens for one in each]) or not _told_apart(list(steps.values())):
            continue
        if all(one.is_shared for one in each):
            continue
        one = each[0]
        return warning(
            f"the {what} loss is averaged over padding: the sum over tokens that count is divided by every slot of the "
            f"padded responses ({one.samples} x {width})",
            one.batch.laid.where_record(one.scalar.record, one.scalar.name),
            shown(one.scalar.name, one.scalar.value, f"{one.mean:.6g}, the mean over tokens that count"),
            shown("micro-batches that agree", len(each)),
            link="ref" if what == "KL" else "loss",
            cause=f"the {what} is masked and then averaged with a plain mean, padding's zeros and all: the shorter the "
            f"responses are, the less it weighs; its coefficient is worth {one.scalar.value / one.mean:.3g} of what is "
            "stated",
            steps=sorted(step for step in steps if step is not None),
        )
    return None


def _widest(batch: StepBatch) -> int:
    """Slots of a response at most: of the recorded rows, or the stated limit; 0 where neither is known."""
    rows = [
        ref.shape[1] for sheet, _ in batch.columns.sheets for name in _WIDE for ref in sheet.refs(name) or ()
        if len(ref.shape) == 2
    ]  # fmt: skip
    limit = stated_number(batch.laid.stated, *RESPONSE_LIMITS)
    return max(*rows, int(limit or 0), 0)


def _means(batch: StepBatch, name: str) -> Iterator[tuple[Scalar, float, tuple[float, ...], int]]:
    """Each micro-batch's logged term, the sum of its tokens, its means (over tokens; response by response), and its
    samples; of a KL by the estimator that makes the tokens' own KL where that is recorded, by every one else.
    """
    if batch.trained_N is None:
        return
    trained_N = batch.trained_N
    column = batch.columns.of("entropy" if name == "entropy_loss" else "kl")
    policy, ref = batch.columns.of("policy_logprobs"), batch.columns.of("ref_logprobs")
    if column is not None:
        tokens_N = {"recorded": np.where(column.said_N & trained_N, np.nan_to_num(column.values_N), 0.0)}
    elif name == "kl_loss" and policy is not None and ref is not None:
        both_N = batch.pair(policy, ref)
        p_N, r_N = (np.where(both_N, one.values_N, 0.0) for one in (policy, ref))
        stated = kl.ESTIMATORS.get(batch.laid.algorithm.loss_kl_estimator) or kl.ESTIMATORS.get(
            str(of_loss(batch.laid.flags, "kl_estimator"))
        )
        if stated is None:
            return
        tokens_N = {"stated": np.where(both_N & trained_N, stated(p_N, r_N), 0.0)}
    else:
        return
    (values_N,) = tokens_N.values()
    rows = batch.laid.rows_by_micro()
    sums_B, counts_B = batch.flat.sum(values_N), batch.flat.count(trained_N)
    for scalar in batch.columns.scalars(name):
        samples = rows.get(scalar.place)
        if not samples or scalar.record.key.micro is None or abs(scalar.value) <= LEAST:
            continue
        sums, counts = sums_B[samples], counts_B[samples]
        if abs(float(sums.sum())) <= LEAST or not counts.sum():
            continue
        by_mean = (float(sums.sum() / counts.sum()), float((sums / np.maximum(counts, 1)).mean()))
        yield scalar, float(sums.sum()), by_mean, len(samples)


#: Means that are told from rounding.
LEAST_MEAN = 1e-4


def undivided(case: Case) -> Finding | None:
    """Each recorded loss is the stated mean of its micro-batch's tokens (clipped, with the stated KL), and is not
    divided by what the run states that it divides by: in 4 micro-batches and more, and all of them.
    """
    flags = case.run.flags or {}
    divisor, mean = of_loss(flags, "divisor"), str(of_loss(flags, "reduction"))
    if not isinstance(divisor, (int, float)) or not divisor > 1 or mean not in ("token_mean", "sequence_mean"):
        return None
    first: tuple[StepBatch, Scalar] | None = None
    told = 0
    steps: dict[int, None] = {}
    for batch in case.batches():
        for scalar, made in _made(batch, mean):
            if abs(made) < LEAST_MEAN:
                continue
            if abs(scalar.value - made) > CLOSE * abs(made):
                return None
            told, first = told + 1, first or (batch, scalar)
            steps |= {} if batch.step is None else {batch.step: None}
    if first is None or told < FEWEST:
        return None
    batch, scalar = first
    return warning(
        f"micro-batches are accumulated and not divided by their number: each loss is {divisor:g} times what the run "
        f"states, a {mean.replace('_', ' ')} over {divisor:g}",
        batch.laid.where_record(scalar.record, scalar.name),
        shown(scalar.name, scalar.value, f"{scalar.value / divisor:.6g}", scalar.record.path.name),
        shown("micro-batches that agree", told),
        shown("divisor that is stated", divisor),
        cause=f"the division by the accumulated micro-batches is missing: the gradient is {divisor:g} times too large "
        "(clipping and Adam hide it). Where the loss is recorded before it is divided, the gradient is right",
        steps=list(steps),
    )


def _made(batch: StepBatch, mean: str) -> Iterator[tuple[Scalar, float]]:
    """The recorded loss of each micro-batch, and the stated mean of its tokens; nothing where it cannot be made."""
    advantages, trained_N = batch.columns.of("advantages"), batch.trained_N
    if advantages is None or trained_N is None:
        return
    token_N = _loss_as_stated(batch, np.where(advantages.said_N, np.nan_to_num(advantages.values_N), 0.0))
    if token_N is None:
        return
    sums_B, counts_B = batch.flat.sum(np.where(trained_N, token_N, 0.0)), batch.flat.count(trained_N)
    rows = batch.laid.rows_by_micro()
    for scalar in batch.columns.scalars("loss"):
        samples = rows.get(scalar.place)
        if not samples or scalar.record.key.micro is None or not np.isfinite(scalar.value):
            continue
        sums, counts = sums_B[samples], counts_B[samples]
        by_token = float(sums.sum() / max(counts.sum(), 1))
        yield scalar, by_token if mean == "token_mean" else float((sums / np.maximum(counts, 1)).mean())


def _loss_as_stated(batch: StepBatch, a_N: Array) -> Array | None:
    """The clipped loss of every token with the stated weight of the KL; None where its terms are not recorded."""
    algorithm = batch.laid.algorithm
    if algorithm.is_by_sequence or algorithm.is_of_weights or batch.has("is_weights"):
        return None
    try:
        ratio_N, known_N, _ = ratios(batch)
    except Skip:
        # Where nothing is kept of an older policy a batch has one update: its ratio is 1 (TRL records none then).
        if batch.has("old_logprobs") or batch.has("is_ratio"):
            return None
        ratio_N, known_N = np.ones(len(a_N)), np.ones(len(a_N), dtype=bool)
    low, high = algorithm.clip_range or (0.2, 0.2)
    made_N = policy_loss.clipped(np.where(known_N, ratio_N, 1.0), a_N, clip_low=low, clip_high=high)
    if weight := of_loss(batch.laid.flags, "kl"):
        policy, ref = batch.columns.of("policy_logprobs"), batch.columns.of("ref_logprobs")
        estimator = kl.ESTIMATORS.get(str(of_loss(batch.laid.flags, "kl_estimator")))
        if policy is None or ref is None or estimator is None:
            return None
        both_N = batch.pair(policy, ref)
        made_N = made_N + np.where(both_N, float(weight) * estimator(policy.values_N, ref.values_N), 0.0)
    if of_loss(batch.laid.flags, "entropy") or algorithm.number("entropy_coef", "entropy_coeff"):
        return None
    found_N: Array = made_N
    return found_N
