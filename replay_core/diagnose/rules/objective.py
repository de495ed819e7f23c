"""What the objective is made of, recomputed: the loss of a token, its ratio and weights, the old log-probabilities."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np

from replay_core.diagnose.algorithm import is_by_token, is_clipped
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.columns import Column
from replay_core.diagnose.finding import Finding, error, finding, info, share, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.passes import STOOD, before_any_update_N
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.diagnose.rules.prefixes import policy_stands
from replay_core.diagnose.rules.ratio import ratios
from replay_core.diagnose.rules.summed import logged_kl
from replay_core.diagnose.sheets import TELL_TWINS, marked
from replay_core.diagnose.signals import RunLog
from replay_core.diagnose.surrogates import CLOSE, SUMMED, Logged, Surrogate, logged_of, surrogates
from replay_core.diagnose.without_effect import without_effect
from replay_core.objectives import kl

#: Tokens that must say something, and |log ratio| from which two directions are told apart.
FEWEST, MOVED = 8, 1e-3
#: What two names of one tensor differ by.
SAME = 1e-6
#: How far a factor of log ratios has to be from 1, or -1, which have rules of their own.
FACTOR = 0.05


@rule("D50", "the policy loss is made wrongly", link="loss", scope="case",
      explains=("D28", "L08", "L10", "D24", "D25", "D09", "D20", "L09", "L16"), lasts=True,
      source="arXiv 1707.06347 equation 7; 2503.14476 (two ranges), 1912.09729 (dual clip), 2507.18071, "
      "2506.13585")  # fmt: skip
def policy_loss_made(case: Case) -> Finding | None:
    """Makes the logged policy loss of every micro-batch from advantages, ratios and importance weights, as every known
    algorithm does and as mistakes do: the ratio upside down, squared, its logarithm, summed over a sequence, to the
    rollout; the smaller of clipped and unclipped loss, the clipped one alone, one bound alone, bounds swapped or around
    0; the sign turned; no advantage, its size, one side or square of it, another row's, another token's, rewards,
    returns or values in its place; a dual clip at another
    constant than stated. A way fits if one factor makes it all logged losses of a batch (2e-4; the factor 1
    where fewer than 3 micro-batches are logged). An error where no right way fits and one mistake
    fits, in half of such batches and more; worth knowing where some algorithm makes it so, and no estimator or range
    that is stated forbids it (positive advantages alone, a ratio of a whole response, or of one bound, or to the engine
    where that, older samples or nothing is stated; a warning where other old log-probabilities are recorded and an
    estimator is stated).
    """
    looked, fine = 0, 0
    wrong: Counter[str] = Counter()
    causes: dict[str, Surrogate] = {}
    steps: dict[str, list[int]] = {}
    first: StepBatch | None = None
    unlike: list[tuple[StepBatch, Surrogate]] = []
    for batch in case.batches():
        logged = logged_of(batch, "pg_loss", "loss", fewest=2)
        if logged is None:
            continue
        looked += 1
        found = {one.mistake: one for one in _fitting(batch, logged)}
        if not found or "" in found:
            fine += "" in found
            if found and _is_unlike(batch, logged, found[""]):
                unlike.append((batch, found[""]))
            continue
        first = first or batch
        for mistake, one in found.items():
            wrong[mistake] += 1
            causes[mistake] = one
            steps.setdefault(mistake, []).extend([] if batch.step is None else [batch.step])
    skip_if(not looked, "needs logged losses of 3 micro-batches, their advantages and ratios")
    # A step of few clipped tokens fits another range by chance: what makes the losses of more steps goes first.
    if unlike and 2 * len(unlike) >= fine and len(unlike) >= max(wrong.values(), default=0):
        batch, one = unlike[0]
        return _another_range(batch, one, unlike)
    if not wrong:
        skip_if(not fine, "no known way makes the logged losses: other terms are in them")
        return None
    mistake, count = wrong.most_common(1)[0]
    if count < min(2, looked) or 3 * count < 2 * (looked - fine):
        return None  # some steps of several: chance, of so many ways, beside one that is not known
    # A step whose ratios are all 1 agrees with every way to make it.
    assert first is not None
    severity = causes[mistake].severity(first.laid.algorithm)
    words = mistake
    if mistake == SUMMED and is_by_token(first.laid.algorithm):
        words = (
            "each token has the ratio of its whole response, e to the sum of its log ratios, and the run states one of "
            "its own for each token"
        )
    return finding(
        severity,
        f"the policy loss is made {'wrongly' if severity == 'error' else 'otherwise'}: {words}",
        first.laid.where("advantages", sample=0),
        shown("steps whose losses it makes", share(count, looked)),
        shown("steps whose losses a right way makes", fine),
        shown("agree to", CLOSE),
        link=causes[mistake].link,
        cause=causes[mistake].cause,
        steps=steps[mistake],
    )


#: Micro-batches that tell one clip range from another.
MICROS = 3
#: A range that is stated below is no clip range: an epsilon of the optimizer goes by the same word.
LEAST_RANGE = 1e-4


def _is_unlike(batch: StepBatch, logged: Logged, found: Surrogate) -> bool:
    """Whether the loss is made with another clip range than the stated one, or with none, and not with that one too."""
    stated = batch.laid.algorithm.clip_range
    if stated is None or min(stated) < LEAST_RANGE or not (found.is_ratio or found.how):
        return False
    if found.clip is not None and batch.laid.algorithm.states_clip(*found.clip):
        return False
    if batch.laid.algorithm.estimator.startswith("reinforce") or batch.laid.algorithm.is_of_weights:
        return False
    if len(logged.values_M) < MICROS:
        return False  # of so many ranges one makes two losses by chance
    # Two ways that hardly differ are not told apart by their losses.
    every = [one for one in surrogates(batch) if one.clip == stated and not one.mistake]
    return not any(logged.fits(one.values_N, loose=10.0) for one in every)


def _another_range(batch: StepBatch, one: Surrogate, every: list[tuple[StepBatch, Surrogate]]) -> Finding | None:
    stated = given(batch.laid.algorithm.clip_range)
    how = (
        one.how or "not clipped"
        if one.clip is None
        else f"made with a clip range of {one.clip[0]:g} and {one.clip[1]:g}"
    )
    meant = one.clip is None and not is_clipped(batch.laid.algorithm)
    return finding(
        "info" if meant else "error",
        f"the policy loss is {how}, and the run states {stated[0]:g}"
        + (f" and {stated[1]:g}" if stated[1] != stated[0] else ""),
        batch.laid.where("advantages", sample=0),
        shown("steps whose losses it makes, and the stated range does not", len(every)),
        shown("agree to", CLOSE),
        link="ratio",
        cause="right where the loss that is stated is not clipped: the range is a default it leaves alone"
        if meant
        else "the log-probability stands where its ratio to the old one belongs: the same gradient on the policy's own "
        "samples alone, and nothing bounds an update"
        if one.how
        else "the clip range that is configured does not reach the loss, or the unclipped surrogate is what is "
        "averaged",
        steps=[each.step for each, _ in every],
    )


def _fitting(batch: StepBatch, logged: Logged) -> Iterator[Surrogate]:
    """The first right way that fits; else each mistake that does."""
    try:
        for one in surrogates(batch):
            if logged.is_made_by(one.values_N):
                yield one
                if not one.mistake:
                    return
    except Skip:
        return


@rule("D61", "the recorded ratio is not new over old", link="loss", scope="batch",
      needs=("is_ratio", "policy_logprobs", "old_logprobs"),
      explains=("D01", "D03", "D14", "D20", "D24", "D25", "D28", "L08", "L09", "L10", "L17", "D09", "L16", "D18",
                "D21", "L02", "L18"),
      lasts=True,
      source="arXiv 1707.06347: the new policy stands above the old one")  # fmt: skip
def ratio_made_wrongly(batch: StepBatch) -> Finding | None:
    """The recorded ratio beside exp(policy - old): an error where it is its inverse on 99 % of the tokens that moved
    (|log ratio| > 1e-3, 8 and more), or where GSPO is stated and it is e to the sum of a response's log ratios. An
    error, too, where it is exactly 1 on all tokens that a later update of the batch has moved (by .02 nats and more),
    and where another figure makes it on 99 % of all tokens, and exp(policy - old) does not on 8 and more: the policy's
    probability itself, the policy over its reference, a power of 2, e to any one factor of the difference. Worth
    knowing where it is one for each response (GSPO), and nothing says so.
    """
    recorded = given(batch.columns.of("is_ratio"))
    ratio_N, known_N, source = ratios(batch)
    known_N = known_N & recorded.said_N & np.isfinite(recorded.values_N) & (recorded.values_N > 0)
    logs_N = np.log(np.where(known_N, ratio_N, 1.0))
    if (other := _another_ratio(batch, recorded, logs_N, known_N)) is not None:
        return other
    moved_N = known_N & (np.abs(logs_N) > MOVED)
    skip_if(moved_N.sum() < FEWEST, "the ratio has not moved from 1")
    later_N = known_N & (np.abs(logs_N) > STOOD) & ~before_any_update_N(batch)
    if later_N.sum() >= FEWEST and (np.abs(recorded.values_N[later_N] - 1) <= SAME).all():
        return error(
            "the ratio is always 1: what is recorded of it is exactly 1 on every token, and the policy has moved from "
            "the old log-probabilities",
            batch.laid.where("is_ratio", at=later_N),
            shown("tokens whose ratio is 1 and whose policy has moved", int(later_N.sum()), "0", recorded.source),
            shown("largest exp(policy - old)", float(ratio_N[later_N].max()), None, source),
            shown("least exp(policy - old)", float(ratio_N[later_N].min())),
            cause="the ratio is made of the current policy and itself (log_probs - log_probs.detach()), and old "
            "log-probabilities do not reach it: nothing is ever clipped, and updates after the first are off-policy "
            "without a correction",
        )
    told_N = np.log(np.where(known_N, recorded.values_N, 1.0))

    def agree(expected_N: Array) -> float:
        close = np.abs(told_N - expected_N) <= 1e-3 * np.abs(expected_N) + 1e-4
        return float(close[moved_N].mean())

    right, inverse = agree(logs_N), agree(-logs_N)
    summed = agree(np.repeat(batch.flat.sum(np.where(known_N, logs_N, 0.0)), batch.flat.lengths_B))
    mean_N = np.repeat(np.nan_to_num(batch.flat.mean(np.where(known_N, logs_N, 0.0), known_N)), batch.flat.lengths_B)
    if max(right, agree(mean_N)) >= 0.5 or max(inverse, summed) < 0.99:
        return None
    evidence = [
        shown("tokens that agree with the mistake", max(inverse, summed), None, recorded.source),
        shown("with exp(policy - old)", right, "1", source),
    ]
    if inverse >= summed:
        return error(
            "the policy loss is made wrongly: the recorded ratio is upside down, old over new",
            batch.laid.where("is_ratio", sample=0),
            *evidence,
            cause="exp(old - new) stands for exp(new - old): an update that raises a token's probability lowers it",
        )
    else:
        algorithm = batch.laid.algorithm
        meant = not algorithm.is_by_sequence and not is_by_token(algorithm)
        return finding(
            "info" if meant else "error",
            f"the policy loss is made {'otherwise' if meant else 'wrongly'}: a sequence's ratio is e to the sum of its "
            "log ratios, not to their mean: it is not normalised by length",
            batch.laid.where("is_ratio", sample=0),
            *evidence,
            cause="GSPO takes the length-normalised ratio, the geometric mean of a response's token ratios; RLOO takes "
            "the whole response's",
        )


def _another_ratio(batch: StepBatch, recorded: Column, logs_N: Array, known_N: Array) -> Finding | None:
    """A recorded ratio that is another figure than new over old, on next to all tokens."""
    told_N = np.log(np.where(known_N, recorded.values_N, 1.0))
    odd_N = known_N & (np.abs(told_N - logs_N) > MOVED)
    if odd_N.sum() < FEWEST:
        return None
    policy, ref = given(batch.columns.of("policy_logprobs")), batch.columns.of("ref_logprobs")
    each: list[tuple[str, str, Array]] = [
        ("the policy's probability itself: nothing stands below it",
         "the old log-probabilities are not subtracted (0, or another mask, in their place)", policy.values_N),
        ("2 to the difference of log-probabilities, not e to it",
         "exp2 stands for exp, or logarithms are of base 2 on one side", logs_N * math.log(2)),
        ("half the power: the root of new over old", "log-probabilities are halved, or averaged with the old ones",
         logs_N / 2),
    ]  # fmt: skip
    if ref is not None:
        over_N = np.where(ref.said_N, policy.values_N - ref.values_N, np.nan)
        each.append(
            ("the policy over its reference", "the reference's log-probabilities stand for the old ones", over_N)
        )
    for what, cause, expected_N in each:
        close_N = np.abs(told_N - expected_N) <= 1e-3 * np.abs(expected_N) + 1e-4
        if close_N[odd_N].mean() >= 0.99 and close_N[known_N].mean() >= 0.99:
            return error(
                f"the recorded ratio is {what}",
                batch.laid.where("is_ratio", at=odd_N),
                shown("tokens that agree with it", float(close_N[known_N].mean()), None, recorded.source),
                shown("tokens that exp(policy - old) does not make", int(odd_N.sum()), "0"),
                link="ratio",
                cause=cause,
            )
    # Solved on the half that moved least, where neither overflows: one factor for all of them is no chance.
    size = np.abs(logs_N[odd_N])
    base_N = odd_N & (np.abs(logs_N) <= np.median(size)) & np.isfinite(told_N)
    times = float(told_N[base_N] @ logs_N[base_N]) / max(float(logs_N[base_N] @ logs_N[base_N]), 1e-30)
    if (
        abs(times) > FACTOR
        and abs(abs(times) - 1) > FACTOR
        and (np.abs(told_N - times * logs_N) <= 1e-3 * np.abs(times * logs_N) + 1e-3)[odd_N].mean() >= 0.99
    ):
        return error(
            f"the recorded ratio is e to {times:.4g} times the difference of log-probabilities",
            batch.laid.where("is_ratio", at=odd_N),
            shown("tokens that agree with it", int(odd_N.sum()), None, recorded.source),
            shown("largest |log ratio|", float(np.abs(told_N[odd_N]).max()), f"{float(size.max()):.4g}"),
            link="ratio",
            cause="the difference is scaled before it is exponentiated (a unit, a temperature, a length): the ratio "
            "leaves the clip range, or overflows, after the smallest update",
        )
    mean_B = np.nan_to_num(batch.flat.mean(np.where(known_N, logs_N, 0.0), known_N))
    mean_N = np.repeat(mean_B, batch.flat.lengths_B)
    if batch.laid.algorithm.is_by_sequence or not (np.abs(told_N - mean_N)[odd_N] <= 1e-4).all():
        return None
    return info(
        "the ratio is one number for each response, e to the mean of its log ratios (GSPO), and no such is stated",
        batch.laid.where("is_ratio", at=odd_N),
        shown("tokens whose ratio is the response's and not their own", int(odd_N.sum()), "0", recorded.source),
        link="ratio",
        cause="right where sequences are meant to be weighed; else a mean over the response is taken before the "
        "exponential",
    )


#: How far a largest weight lies below the stated cap, and what it holds above it, before it is another cap.
NEAR_CAP = 1e-2


@rule("D59", "importance weights are not trainer over rollout", link="ratio", scope="batch",
      needs=("is_weights", "rollout_logprobs", "trainer_logprobs"), explains=("D09", "D12", "D24", "L08", "L10"),
      lasts=True, source="verl rollout correction, TIS: trainer over rollout, cut off above")  # fmt: skip
def weights_upside_down(batch: StepBatch) -> Finding | None:
    """The recorded importance weights beside exp(trainer - rollout), each cut off at the largest weight, by token and
    by sequence: an error where they are exp(rollout - trainer) on 95 % of tokens that differ by 1e-3 and more
    (8 and more), and trainer over rollout on less than half of them; or where they are its square, its logarithm, the
    weight of the token before or after, trainer over reference, or 1 on all of them (a warning where no weighing is
    stated: a mask is 1, too). An error where they come to more than the stated cap, or are trainer over rollout cut off
    at a smaller one (8 tokens and more that are held there).
    """
    weights, rollout = given(batch.columns.of("is_weights")), given(batch.columns.of("rollout_logprobs"))
    if "ratio" in weights.ref.name and _is_policy_ratio(batch, weights):
        raise Skip(f"{weights.ref.name} is the policy over its old self, and no weight of the engine's samples")
    best_right, best_wrong, squared, ones, count = 0.0, 0.0, 0.0, 0.0, 0
    held_by: list[int] = []
    for name in ("old_logprobs", "policy_logprobs"):
        trainer = batch.columns.of(name)
        if trainer is None:
            continue
        both_N = batch.pair(trainer, rollout) & weights.said_N & np.isfinite(weights.values_N) & (weights.values_N > 0)
        d_N = np.where(both_N, np.clip(trainer.values_N - rollout.values_N, -30, 30), 0.0)
        told_N = both_N & (np.abs(d_N) > MOVED)
        if told_N.sum() < FEWEST:
            continue
        cap, floor = float(weights.values_N[both_N].max()), float(weights.values_N[both_N].min())
        count = max(count, int(told_N.sum()))

        def agree(log_N: Array) -> float:
            expected_N = np.clip(np.exp(np.clip(log_N, -30, 30)), floor, cap)  # noqa: B023 - called at once
            close_N = np.abs(weights.values_N - expected_N) <= 1e-3 * expected_N + 1e-4
            return float(close_N[told_N].mean())  # noqa: B023

        sums_N = np.repeat(batch.flat.sum(d_N), batch.flat.lengths_B)
        means_N = np.repeat(np.nan_to_num(batch.flat.mean(d_N, both_N)), batch.flat.lengths_B)
        best_right = max(best_right, *map(agree, (d_N, sums_N, means_N)))
        told = [log_N for log_N in (d_N, sums_N, means_N) if agree(log_N) >= 0.95]
        at_cap_N = both_N & (weights.values_N >= cap * (1 - 1e-6))
        # Weights that are all one number are cut off at any.
        if told and cap - floor > NEAR_CAP * cap:
            held_by += [
                int((at_cap_N & (np.exp(np.clip(log_N, -30, 30)) > (1 + NEAR_CAP) * cap)).sum()) for log_N in told
            ]
        best_wrong = max(best_wrong, *map(agree, (-d_N, -sums_N, -means_N)))
        squared = max(squared, *map(agree, (2 * d_N, 2 * sums_N, 2 * means_N)))
        ones = max(ones, float((weights.values_N[told_N] == 1).mean()))
    skip_if(not count, "rollout and trainer hardly differ: every weight is 1")
    if (level := _of_another_level(batch, weights, rollout)) is not None:
        return level
    if best_right < 0.5 and (unlike := _other_weights(batch, weights, rollout)) is not None:
        what, cause, share_ = unlike
        return error(
            f"importance weights are not trainer over rollout: {what}",
            batch.laid.where("is_weights", sample=0),
            shown("tokens that agree with the mistake", share_, "0", weights.source),
            shown("with exp(trainer - rollout)", best_right, "1"), shown("tokens compared", count),
            cause=cause,
        )  # fmt: skip
    stated = batch.laid.algorithm.weight_bounds[1]
    if stated is not None and cap > stated * (1 + 1e-3) and floor >= stated * (1 - 1e-3):
        return error(
            f"importance weights are cut off from below: none is below {floor:.4g}, their stated cap",
            batch.laid.where("is_weights", sample=0),
            shown("least weight", floor, f"<= {stated:g}", weights.source),
            shown("largest weight", cap),
            cause="the cap is applied as a floor: max, or clamp(min=), where min, or clamp(max=), is meant",
        )
    if stated is not None and (over_N := weights.said_N & (weights.values_N > stated * (1 + 1e-3))).any():
        heard_N = weights.said_N & np.isfinite(weights.values_N)
        return error(
            f"importance weights are not cut off: they come to {float(weights.values_N[heard_N].max()):.4g}, and the "
            f"run states a cap of {stated:g}",
            batch.laid.where("is_weights", at=over_N),
            shown("largest weight", float(weights.values_N[heard_N].max()), f"<= {stated:g}", weights.source),
            shown("weights over the cap", int(over_N.sum()), "0"),
            cause="the truncation (clamp, max) is missing, or another threshold reaches it",
        )
    held = min(held_by, default=0)
    if stated is not None and cap < stated * (1 - NEAR_CAP) and held >= FEWEST:
        return error(
            f"importance weights are cut off at {cap:.4g}, and the run states a cap of {stated:g}",
            batch.laid.where("is_weights", sample=0),
            shown("largest weight", cap, f"{stated:g}", weights.source),
            shown("tokens held at it whose trainer over rollout is larger", held, "0"),
            shown("tokens that agree with trainer over rollout, cut off there", best_right, "1"),
            cause="another threshold reaches the truncation than is configured"
            + (": below 1 it weighs down what engine and trainer agree on, and with it the whole update"
               if cap < 1 else ""),
        )  # fmt: skip
    if best_wrong >= 0.95 and best_right < 0.5:
        return error(
            "importance weights are upside down: they are rollout over trainer, not trainer over rollout",
            batch.laid.where("is_weights", sample=0),
            shown("tokens that agree with exp(rollout - trainer)", best_wrong, "0", weights.source),
            shown("with exp(trainer - rollout)", best_right, "1"),
            shown("tokens compared", count),
            cause="the difference of log-probabilities is taken the wrong way round: tokens that the engine found too "
            "probable are weighted up, not down",
        )
    elif best_right < 0.5 and squared >= 0.95:
        return error(
            "importance weights are applied twice: they are the square of trainer over rollout",
            batch.laid.where("is_weights", sample=0),
            shown("tokens that agree with the square", squared, "0", weights.source),
            shown("with exp(trainer - rollout)", best_right, "1"), shown("tokens compared", count),
            cause="the correction is multiplied in at two places, or the log ratio is doubled",
        )  # fmt: skip
    elif ones == 1 and count >= FEWEST:
        # Weights that are a mask alone (MIS, IcePop) are 1 wherever nothing is far off.
        return finding(
            "error" if batch.laid.algorithm.is_weighed is True else "warning",
            "importance weights are 1 on every token although rollout and trainer differ: they correct nothing",
            batch.laid.where("is_weights", sample=0),
            shown("tokens whose weight is exactly 1", ones, "0", weights.source),
            shown("tokens compared that differ", count),
            cause="the weights are made of the trainer's own log-probabilities, or never computed",
        )
    return None


def _of_another_level(batch: StepBatch, weights: Column, rollout: Column) -> Finding | None:
    """Weights of whole responses where the run states one for each token, or the other way round."""
    algorithm = batch.laid.algorithm
    stated = algorithm.word("rollout_is", "is_level", "tis_level", "vllm_importance_sampling_mode")
    wanted = "token" if stated.startswith("token") else "sequence" if stated.startswith("seq") else ""
    trainer = batch.columns.of("old_logprobs") or batch.columns.of("policy_logprobs")
    if not wanted or trainer is None:
        return None
    both_N = batch.pair(trainer, rollout) & weights.said_N & np.isfinite(weights.values_N) & (weights.values_N > 0)
    d_N = np.where(both_N, np.clip(trainer.values_N - rollout.values_N, -30, 30), 0.0)
    sums_N = np.repeat(batch.flat.sum(d_N), batch.flat.lengths_B)
    means_N = np.repeat(np.nan_to_num(batch.flat.mean(d_N, both_N)), batch.flat.lengths_B)
    if not both_N.any():
        return None
    cap, floor = float(weights.values_N[both_N].max()), float(weights.values_N[both_N].min())
    of_token, of_sum, of_mean = (
        np.clip(np.exp(np.clip(each_N, -30, 30)), floor, cap) for each_N in (d_N, sums_N, means_N)
    )

    def agree(made_N: Array, where_N: Array) -> float:
        return float((np.abs(weights.values_N - made_N) <= 1e-3 * made_N + 1e-4)[where_N].mean())

    for made_N, how in ((of_sum, "the product over its tokens"), (of_mean, "the mean over its tokens")):
        told_N = both_N & (np.abs(made_N - of_token) > NEAR_CAP)
        if told_N.sum() < FEWEST:
            continue
        by_response, by_token = agree(made_N, told_N), agree(of_token, told_N)
        is_wrong = by_token < 0.5 and by_response >= 0.95 if wanted == "token" else False
        is_token = (
            wanted == "sequence" and by_token >= 0.95 and max(agree(of_sum, told_N), agree(of_mean, told_N)) < 0.5
        )
        if not is_wrong and not is_token:
            continue
        return error(
            f"importance weights are one for each response ({how}), and the run states one for each token"
            if is_wrong
            else "importance weights are each token's own, and the run states one for each response",
            batch.laid.where("is_weights", at=told_N),
            shown("tokens that agree with a response's weight", by_response, "0" if is_wrong else "1", weights.source),
            shown("with a token's own", by_token, "1" if is_wrong else "0"),
            shown("tokens that tell the two apart", int(told_N.sum())),
            shown("level that is stated", stated),
            cause="the level that is configured does not reach the weights: a response's product of ratios is far from "
            "1 after a few tokens, and the cap holds it there, or it pushes the response to nothing"
            if is_wrong
            else "the level that is configured does not reach the weights",
        )
    return None


def _is_policy_ratio(batch: StepBatch, weights: Column) -> bool:
    """Whether weights are pi / pi_old on every token: a `ratio` may be named for either."""
    policy, old = batch.columns.of("policy_logprobs"), batch.columns.of("old_logprobs")
    if policy is None or old is None:
        return False
    both_N = batch.pair(policy, old) & weights.said_N & np.isfinite(weights.values_N)
    logs = np.clip(policy.values_N - old.values_N, -30, 30)[both_N]
    return bool(both_N.any()) and bool(np.abs(weights.values_N[both_N] - np.exp(logs)).max() < 1e-3)


def _other_weights(batch: StepBatch, weights: Column, rollout: Column) -> tuple[str, str, float] | None:
    """(what, cause, share of tokens that agree) of weights that a mistake makes, of the tokens it tells apart."""
    for name in ("old_logprobs", "policy_logprobs"):
        trainer = batch.columns.of(name)
        if trainer is None:
            continue
        both_N = batch.pair(trainer, rollout) & weights.said_N & np.isfinite(weights.values_N)
        at = np.flatnonzero(both_N)
        if len(at) < 2 * FEWEST:
            continue
        w, d = weights.values_N[at], np.clip((trainer.values_N - rollout.values_N)[at], -30, 30)
        right, rows = np.exp(d), batch.flat.sample_N[at]
        cap = float(w.max())
        made: list[tuple[str, str, Array]] = [
            ("the exponential is missing: they are its logarithm", "log pi - log mu is used as it is", d),
        ]
        # One weight of a response that takes in what an environment wrote, where the engine says 0.
        written_N = rollout.said_N & np.isfinite(trainer.values_N) & np.isfinite(rollout.values_N)
        if batch.response_N is not None and (written_N & batch.response_N & ~both_N).any():
            written_N &= batch.response_N
            apart_N = np.where(written_N, trainer.values_N - rollout.values_N, 0.0)
            for each_B, word in ((batch.flat.sum(apart_N), "sum"), (batch.flat.mean(apart_N, written_N), "mean")):
                whole = np.exp(np.clip(np.nan_to_num(each_B)[rows], -30, 30))
                made.append((f"they are a {word} over all tokens of the response, those too that no engine sampled",
                             "the mask of what the policy wrote is left out of the sequence's weight: tool "
                             "output, of which the engine says 0, decides it", np.minimum(whole, cap)))  # fmt: skip
        for by, word in ((1, "before"), (-1, "after")):
            moved = np.where(np.roll(rows, by) == rows, np.roll(right, by), np.nan)
            made.append((f"each token has the weight of the token {word}", "a roll or a slice is off by one",
                         np.minimum(moved, cap)))  # fmt: skip
        ref = batch.columns.of("ref_logprobs")
        if ref is not None:
            other = np.exp(np.clip((trainer.values_N - ref.values_N)[at], -30, 30))
            made.append(("they are trainer over reference", "the reference stands in the rollout's place",
                         np.minimum(other, cap)))  # fmt: skip
        for what, cause, value in made:
            known = np.isfinite(value) & ((np.abs(value - np.minimum(right, cap)) > MOVED) | (np.abs(d) > MOVED))
            if known.sum() < FEWEST:
                continue
            agree = float((np.abs(w - value) <= 1e-3 * np.abs(value) + 1e-4)[known].mean())
            if agree >= 0.95:
                return what, cause, agree
    return None


def _of_the_reference(batch: StepBatch, policy: Column) -> Finding | None:
    """Old log-probabilities that are the reference's to the last digit, where the policy has left both before any
    update.
    """
    old, ref = batch.columns.of("old_logprobs"), batch.columns.of("ref_logprobs")
    # Before the first update the reference is the policy, and one forward may fill both.
    if old is None or ref is None or (batch.step is not None and batch.step <= 1):
        return None
    both_N = batch.pair(old, ref) & batch.pair(policy, old)
    first_N = both_N & before_any_update_N(batch)
    moved_N = first_N & (np.abs(policy.values_N - old.values_N) > STOOD)
    apart = np.abs(old.values_N - ref.values_N)[both_N]
    if both_N.sum() < FEWEST or moved_N.sum() < FEWEST or 2 * moved_N.sum() < first_N.sum() or apart.max() > SAME:
        return None
    return error(
        "old log-probabilities are the reference's: the ratio is taken to the reference, not to the policy that "
        "sampled",
        batch.laid.where("old_logprobs", at=moved_N),
        shown("largest |old - ref|", float(apart.max()), "> 0 once the policy has moved", old.source),
        shown("mean |policy - old| before any update",
        float(np.abs(policy.values_N - old.values_N)[first_N].mean()), "0"),
        cause="the reference's forward fills both tensors (an adapter that is switched off, one name for two tensors): "
        "what is clipped is the distance to the reference",
    )  # fmt: skip


@rule("D60", "old log-probabilities are not those of the batch", link="logprobs", scope="batch",
      needs=("old_logprobs", "policy_logprobs"), lasts=True,
      explains=("D09", "D14", "D24", "D35", "L10", "L16", "L08"),
      source="old log-probabilities are taken once per batch, before its first update (PPO)")  # fmt: skip
def not_of_the_batch(batch: StepBatch) -> Finding | None:
    """Old log-probabilities that a micro-batch was given, beside those recorded for the whole batch before its updates.
    An error where they are the current policy's own (to 1e-6) on tokens whose recorded ones differ by 1e-3 and more:
    the ratio is then always 1. An error where they are the reference's on every token, and the policy's before any
    update are further off than bf16 (.02 on half of the tokens), after the run's first steps. An error where they are
    another sample's of the batch, for most samples that differ. An error where they are the policy's own in every
    mini-batch, and those of each later one are four times as far from the engine's as those of the first (and .02).
    """
    given_each = list(batch.columns.every("old_logprobs"))
    policy = given(batch.columns.of("policy_logprobs"))
    if (
        again := _taken_again(batch, policy) or _taken_late(batch, policy) or _of_the_reference(batch, policy)
    ) is not None:
        return again
    skip_if(len(given_each) < 2, "old log-probabilities are recorded once")
    here = next((one for one in given_each if one.source.split(" of ")[-1] == policy.source.split(" of ")[-1]), None)
    whole = next((one for one in given_each if one is not here), None)
    if here is None or whole is None:
        raise Skip("old log-probabilities are not recorded beside the policy's")
    both_N = batch.pair(here, whole) & policy.said_N & np.isfinite(policy.values_N)
    apart_N = both_N & (np.abs(here.values_N - whole.values_N) > MOVED)
    if apart_N.sum() < FEWEST:
        return None
    place = batch.laid.where("old_logprobs", at=apart_N)
    refreshed = float((np.abs(here.values_N - policy.values_N)[apart_N] <= 1e-6).mean())
    if refreshed > 0.95:
        return error(
            "old log-probabilities are refreshed in every mini-batch: they are the current policy's own, so the ratio "
            "is always 1 and clipping never acts",
            place,
            shown("tokens whose old log-probability is the policy's", refreshed, "0", here.source),
            shown("tokens that differ from the batch's own", int(apart_N.sum()), "0", whole.source),
            cause="they are recomputed (or taken as log_probs.detach()) inside the loop over epochs and mini-batches; "
            "they must be taken once, before the first update",
        )
    other = _other_rows(batch, here.values_N, whole.values_N, both_N, apart_N)
    if other is not None:
        return error(
            f"old log-probabilities belong to other samples in {share(*other)} rows that differ: rows are shuffled "
            "against each other",
            place,
            shown("rows with another sample's", share(*other), "none", f"{here.source} and {whole.source}"),
            cause="an epoch's tokens are shuffled (permuted) and what belongs to them is not: old log-probabilities, "
            "and what lies beside them, are misaligned with their rows",
        )
    return None


def _taken_again(batch: StepBatch, policy: Column) -> Finding | None:
    """Samples that several epochs train on, with other old log-probabilities in each: the policy's own every time."""
    old = given(batch.columns.of("old_logprobs"))
    names = [name for name in TELL_TWINS if batch.spine.refs(name)]
    twins: dict[object, list[int]] = {}
    for sample, key in enumerate(marked(batch.spine, names) if names and batch.spine.has_tokens else ()):
        twins.setdefault(key, []).append(sample)
    # Equal answers to one prompt are no passes: those have numbers, or each sample stands in as many.
    epochs = [None if key is None else key.epoch for key in batch.laid.keys_of(policy.name)]
    if len(set(epochs)) < 2 and math.gcd(*map(len, twins.values())) < 2:
        return None
    both_N = batch.pair(policy, old)
    own = other = 0
    at = None
    for samples in (each for each in twins.values() if len(each) > 1):
        if len(set(epochs)) > 1 and epochs[samples[0]] == epochs[samples[-1]]:
            continue
        first, last = batch.flat.spans[samples[0]], batch.flat.spans[samples[-1]]
        if first.stop - first.start != last.stop - last.start:
            continue
        heard_T = both_N[first] & both_N[last]
        apart_T = heard_T & (np.abs(old.values_N[first] - old.values_N[last]) > MOVED)
        if apart_T.any():
            other += int(apart_T.sum())
            own += int((np.abs(policy.values_N[last] - old.values_N[last])[apart_T] <= 1e-6).sum())
            at = first.start + int(np.flatnonzero(apart_T)[0]) if at is None else at
    if other < FEWEST or own < 0.95 * other:
        return None
    return error(
        "old log-probabilities are refreshed in every epoch: they are the current policy's own, so the ratio is always "
        "1 and clipping never acts",
        batch.laid.where("old_logprobs", at=at),
        shown("tokens whose old log-probability is another in a later epoch", other, "0", old.source),
        shown("of these, the policy's own", own, "0"),
        cause="they are recomputed (or taken as log_probs.detach()) inside the loop over epochs and mini-batches; they "
        "must be taken once, before the first update",
    )


#: How many times as far from the engine the old log-probabilities of a later mini-batch are, and how far, nats.
PARTED, APART = 4.0, 0.02


def _taken_late(batch: StepBatch, policy: Column) -> Finding | None:
    """Old log-probabilities that are the policy's own in later mini-batches, which by then has left what sampled."""
    old, rollout = given(batch.columns.of("old_logprobs")), batch.columns.of("rollout_logprobs")
    keys = batch.laid.keys_of("policy_logprobs")
    if rollout is None or any(key is None or key.minibatch is None for key in keys):
        return None
    algorithm = batch.laid.algorithm
    if batch.has("is_weights") or algorithm.takes_engine_as_old or algorithm.clip_range is None:
        return (
            None  # weights to the engine stand for the ratio, or nothing is clipped: old ones are no more than a form
        )
    mini_N = np.repeat([-1 if key is None else key.minibatch or 0 for key in keys], batch.flat.lengths_B)
    both_N = batch.pair(policy, old) & rollout.said_N & np.isfinite(rollout.values_N)
    minis = np.unique(mini_N[both_N])
    if len(minis) < 2 or np.abs(policy.values_N - old.values_N)[both_N].max() > SAME:
        return None
    far = [float(np.abs(old.values_N - rollout.values_N)[both_N & (mini_N == mini)].mean()) for mini in minis]
    if min(far[1:]) < max(APART, PARTED * far[0]):
        return None
    return error(
        "old log-probabilities are refreshed before every mini-batch: they are the current policy's own, so the ratio "
        "is always 1 and clipping never acts",
        batch.laid.where("old_logprobs", at=both_N & (mini_N == minis[1])),
        shown("mean |old - rollout| in the first mini-batch", far[0], None, f"{old.source} and {rollout.source}"),
        shown("least of it in a later one", min(far[1:]), f"< {max(APART, PARTED * far[0]):.3g}"),
        shown("mini-batches", len(minis)),
        cause="they are recomputed (or taken as log_probs.detach()) inside the loop over mini-batches, after updates "
        "of the same batch; they must be taken once, before the first",
    )


def _other_rows(
    batch: StepBatch, here_N: Array,
    whole_N: Array, both_N: Array,
    apart_N: Array,
) -> tuple[int, int] | None:  # fmt: skip
    """(samples whose values begin as another sample's do, samples that differ); None where they are no majority."""
    starts: dict[bytes, set[int]] = {}
    heads: list[tuple[int, bytes]] = []
    differing = set(np.unique(batch.flat.sample_N[apart_N]).tolist())
    response_N = given(batch.trained_N) if batch.trained_N is not None else both_N
    for sample, span in enumerate(batch.flat.spans):
        at = np.arange(span.start, span.stop)
        at = at[response_N[at]][:2]
        if len(at) < 2:
            continue
        starts.setdefault(np.round(whole_N[at], 5).tobytes(), set()).add(sample)
        if sample in differing:
            heads.append((sample, np.round(here_N[at], 5).tobytes()))
    moved = sum(1 for _, head in heads if head in starts)
    return (moved, len(heads)) if len(heads) >= 4 and 2 * moved > len(heads) else None


@rule("D60", "the ratio is always 1 in spite of several updates", link="ratio", scope="signals",
      needs=("policy_kl|clip_fraction|ratio_max",), explains=("D15", "L60", "L40"),
      source="old log-probabilities taken anew in each mini-batch; an optimizer made before wrapping")  # fmt: skip
def always_one(log: RunLog) -> Finding | None:
    """The KL of the policy to the one that sampled below 1e-7 and the clip fraction 0 in every one of 3 steps and more,
    while the run states several updates of a batch (epochs, mini-batches) and gradients are not 0: an error. Not
    in the first 20 steps of a run with a critic whose KL to the reference is 0, too: the policy waits for the critic.
    Not where recorded samples show that the policy itself never changes (D55). Where, over 24 steps and more, one of
    clip fraction, that KL and the ratio's largest is logged, all that are rest (0, 0 and 1), and neither reward nor
    entropy drifts or differs from third to third by more than chance has it, while gradients and learning rates are not
    next to nothing, no update has an effect: an error where several updates of a batch are stated, a warning where they
    are not and the learning rates sum to .01.
    """
    if (idle := without_effect(log)) is not None:
        return idle
    skip_if(not (log.has("policy_kl") and log.has("clip_fraction")), "needs the policy's KL and the clip fraction")
    moved, cut, grads = given(log.get("policy_kl")), given(log.get("clip_fraction")), log.get("grad_norm")
    if log.algorithm.updates < 2 or len(moved.finite) < 3:
        raise Skip("needs a run that states several updates of a batch, and the policy's KL of 3 steps")
    rates = log.get("learning_rate")
    still = (grads is not None and not any(grads.finite)) or (rates is not None and not any(rates.finite))
    if still or any(abs(value) > 1e-7 for value in moved.finite) or any(cut.finite):
        return None
    apart = log.get("kl")
    if log.get("value_loss") is not None and apart is not None and len(moved.finite) < 20 and not any(apart.finite):
        raise Skip("the policy stays at its reference while a critic learns: a warm-up, as far as these steps tell")
    skip_if(policy_stands(log.samples()), "the policy itself never changes, as its samples tell (D55)")
    return error(
        f"the ratio is always 1 in spite of {log.algorithm.updates:g} updates of a batch: {moved.name} is 0 in all "
        f"{len(moved.finite)} steps",
        moved,
        moved.shown(0.0, "> 0 after the first update"),
        cut.shown(0.0),
        cause="old log-probabilities are recomputed with the current policy in every mini-batch or epoch, so that "
        "clipping never acts; or no update reaches the policy (an optimizer that holds other parameters)",
        next_step="take old log-probabilities once, before the first update; rldbg record -- YOUR COMMAND shows them",
    )


def fits_of(logged: Logged, values_N: Array) -> bool:
    """Whether values make the logged losses: by any factor where 2 micro-batches tell it, of one by none."""
    return logged.factor(values_N, plain=len(logged.values_M) < 2) is not None


def _are_coarse(batch: StepBatch) -> bool:
    columns = (batch.columns.of(name) for name in ("policy_logprobs", "ref_logprobs", "old_logprobs"))
    return any(column is not None and column.dtype in ("bfloat16", "float16") for column in columns)


@rule("D29", "the KL term is another estimator than stated", link="ref", scope="case", lasts=True,
      explains=("L10", "L08", "D49"),
      source="Schulman 2020; k1's gradient is 0 on average: it is no loss (arXiv 2510.01555)")  # fmt: skip
def kl_term(case: Case) -> Finding | None:
    """The logged KL loss of micro-batches (of a single one in each of 3 steps and more as it is), made of policy and
    reference by k1, k2, k3 and |log r|, each also with the two swapped: an error where only an estimator fits that is
    not the stated one, or the swapped order; a warning where k1 fits and none is stated, since its gradient is 0 on
    average and it cannot hold the policy near its reference.
    """
    fits: Counter[str] = Counter()
    looked = alone = 0
    first: StepBatch | None = None
    stated, steps = "", []
    for batch in case.batches():
        parts = logged_kl(batch, fewest=1)
        if parts is None:
            continue
        logged, p_N, r_N, both_N = parts
        if np.abs(p_N - r_N).max(initial=0.0) < MOVED:
            continue
        alone += len(logged.values_M) == 1
        stated, first, looked = stated or batch.laid.algorithm.loss_kl_estimator, first or batch, looked + 1
        steps += [] if batch.step is None else [batch.step]
        # Samples are of the old policy: an unbiased estimator is weighed with the ratio.
        old = batch.columns.of("old_logprobs")
        ratio_N = 1.0 if old is None else np.exp(np.clip(np.where(both_N & old.said_N, p_N - old.values_N, 0), -20, 20))
        for name, estimate in kl.ESTIMATORS.items():
            if fits_of(logged, estimate(p_N, r_N)) or fits_of(logged, ratio_N * estimate(p_N, r_N)):
                fits[name] += 1
            elif fits_of(logged, estimate(r_N, p_N)):
                fits[f"{name} with policy and reference swapped"] += 1
    if not looked or first is None:
        raise Skip("needs the KL losses of micro-batches, and a policy that has moved from its reference")
    skip_if(looked < 3 and alone == looked, "needs the KL loss of 2 micro-batches of a step, or of 3 steps")
    skip_if(not fits, "no estimator makes the logged KL losses: other tokens, or a cut-off")
    name, count = fits.most_common(1)[0]
    if 2 * count < looked or name == stated or (not stated and name in ("k2", "k3")):
        return None
    if stated and 2 * fits[stated] >= looked:
        return None
    # What is called `kl` and not the loss's may be a metric of its own, by another estimator on purpose.
    if "swapped" not in name and not first.columns.scalars("kl_loss"):
        return None
    # Both are half the square of a small difference, which 16 bits round.
    skip_if(
        {name, stated} <= {"k2", "k3"} and _are_coarse(first), "log-probabilities of 16 bits do not tell k2 from k3"
    )
    return finding(
        "error" if stated or "swapped" in name else "info" if name == "|log r|" else "warning",
        f"the KL loss is {name}"
        + (
            f", and the run states {stated}"
            if stated
            else ""
            if "swapped" in name or name == "|log r|"
            else ": it can be negative"
        ),
        first.laid.where("ref_logprobs", sample=0),
        shown("steps whose KL losses it makes", share(count, looked)),
        shown("estimator stated", stated or None),
        cause="the arguments of the estimator are in the wrong order: its weighting, and with it its gradient, is "
        "turned around, and it explodes where the policy has left tokens of its reference behind"
        if "swapped" in name
        else "the estimator that is configured does not reach the loss"
        + (
            "; k1, the plain difference, is negative for half of the tokens, and its gradient is not the KL's"
            if name == "k1"
            else ""
        ),
        steps=steps,
    )
