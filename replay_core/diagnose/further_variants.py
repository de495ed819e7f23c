"""Advantages of recipes that only some runs name, or that need more than rewards and groups: MaxRL, a group's own
normalisation that is whitened once more over the batch, and functions that are normalised one by one (GDPO).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay_core.diagnose.algorithm import OF_GROUPS, Algorithm, whitening
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.flat import Array
from replay_core.diagnose.function_weights import stated_weights
from replay_core.objectives import advantages

#: How names of these end or begin, for who judges them.
MAXRL, GDPO, OF_ONE_EACH = "(MaxRL)", "(GDPO)", "weights of 1 each"
_ESTIMATORS = ("adv_estimator", "advantage_estimator", "adv_type", "algorithm", "loss_type")


def further(batch: StepBatch, reward_B: Array, group_B: Array) -> Iterator[tuple[str, Array]]:
    """These variants, by what they are called."""
    algorithm = batch.laid.algorithm
    tokens_B = None if batch.trained_N is None else batch.flat.count(batch.trained_N).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        if "maxrl" in "".join(algorithm.word(name) for name in _ESTIMATORS).replace("_", ""):
            centred_B = advantages.group_centred(reward_B, group_B)
            mean_B = reward_B - centred_B
            for epsilon in (1e-6, 1e-4, 1e-8):
                yield f"(r - group mean) / (group mean + {epsilon:g}) {MAXRL}", centred_B / (mean_B + epsilon)
        if tokens_B is not None and tokens_B.sum() > 1 and _is_whitened_again(algorithm):
            for unbiased, epsilon in ((True, 1e-6), (False, 1e-6), (True, 1e-4)):
                own_B = advantages.group_normalised(reward_B, group_B, unbiased=unbiased, epsilon=epsilon)
                name = f"(r - group mean) / (group std + {epsilon:g}), std over {'n - 1' if unbiased else 'n'}"
                for less in (True, False):
                    yield (
                        f"{name}, whitened once more over the tokens of the batch",
                        advantages.whitened(own_B, tokens_B, unbiased=less),
                    )
        yield from _function_by_function(batch, group_B, tokens_B)


def _is_whitened_again(algorithm: Algorithm) -> bool:
    """Whether that may be meant: it is stated, or neither that nor an estimator of groups is."""
    told = whitening(algorithm)
    return told == "recorded" or (not told and algorithm.estimator not in OF_GROUPS)


def _function_by_function(
    batch: StepBatch, group_B: Array, tokens_B: Array | None
) -> Iterator[tuple[str, Array]]:  # fmt: skip
    """Each reward function normalised within the group, then summed: as it is, or normalised over the batch."""
    functions_FB = batch.columns.reward_functions_FB
    if functions_FB is None or len(functions_FB) < 2 or functions_FB.shape[1] != len(group_B):
        return
    if not np.isfinite(functions_FB).all():
        return
    written = [name for part in batch.spine.parts[:1] for name in (ref.name for ref in part.held.fields())]
    names = batch.columns.reward_functions
    order = [name for name in written if name in names]
    in_order = sorted(order) == names and all(name.startswith("rewards_per_func.") for name in names)
    stated_F = stated_weights(
        batch.laid.algorithm,
        [name.partition(".")[2] or name for name in (order if in_order else names)],
        in_order=in_order,
    )
    if in_order and stated_F is not None:
        stated_F = np.array([stated_F[order.index(name)] for name in names])
    weights = {} if stated_F is None else {"the stated weights": stated_F}
    if stated_F is None or np.ptp(stated_F) > 0:
        weights[OF_ONE_EACH] = np.ones(len(functions_FB))
    for unbiased in (True, False):
        for epsilon in (1e-4, 1e-6, 1e-8):
            each_FB = np.array([
                np.nan_to_num(advantages.group_normalised(values_B, group_B, unbiased=unbiased, epsilon=epsilon))
                for values_B in functions_FB
            ])  # fmt: skip
            for how, weights_F in weights.items():
                summed_B = weights_F @ each_FB
                name = f"each reward function normalised within its group, then summed with {how} {GDPO}"
                yield name, summed_B
                yield f"{name}, over the batch", advantages.normalised(summed_B, unbiased=unbiased, epsilon=epsilon)
                if tokens_B is not None and tokens_B.sum() > 1:
                    whitened_B = advantages.whitened(summed_B, tokens_B, unbiased=unbiased)
                    yield f"{name}, whitened over the tokens", whitened_B
