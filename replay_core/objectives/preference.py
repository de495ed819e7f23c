"""Losses of pairs: an answer that was chosen against one that was rejected."""

from __future__ import annotations

from replay_core.objectives.arrays import Array, library


def dpo(logps_B: Array, ref_logps_B: Array, *, beta: float) -> Array:
    """-log sigmoid(beta * (log-ratio of the chosen - log-ratio of the rejected)), one per pair [B / 2].

    Args:
        logps_B, ref_logps_B: of whole answers, the chosen ones first, then the rejected ones in the same order.

    Source: Direct Preference Optimization (arXiv 2305.18290) equation 7.
    """
    half = len(logps_B) // 2
    chosen_P, rejected_P = logps_B[:half] - ref_logps_B[:half], logps_B[half:] - ref_logps_B[half:]
    margin_P = beta * (chosen_P - rejected_P)
    arrays = library(margin_P)
    return -arrays.nn.functional.logsigmoid(margin_P) if hasattr(arrays, "nn") else arrays.logaddexp(0, -margin_P)
