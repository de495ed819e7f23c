"""Advantages that are the rewards themselves: right for REINFORCE, wrong where the run states a baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_core.diagnose.algorithm import Algorithm

if TYPE_CHECKING:
    from replay_core.documents.diagnosis import Severity


def severity_of_raw(algorithm: Algorithm) -> Severity:
    """An error contradicts what is stated: plain REINFORCE needs no baseline, ReMax's is 0 where every greedy answer
    fails, REINFORCE++'s may be taken later, and what is not stated may be meant.
    """
    if algorithm.estimator in ("reinforce", "remax"):
        return "info"
    return "error" if algorithm.estimator and not algorithm.estimator.startswith("reinforce++") else "warning"


def why_raw(algorithm: Algorithm) -> str:
    """The cause that goes with that severity."""
    if algorithm.estimator == "reinforce":
        return "reinforce is stated, which needs no baseline: right, and of a high variance"
    if algorithm.estimator == "remax":
        return "ReMax subtracts the greedy answer's reward: right where every greedy answer earns 0, else it is lost"
    if algorithm.estimator.startswith("reinforce++"):
        return f"{algorithm.estimator} is stated, and neither a mean is subtracted nor a std divided by"
    return "no baseline is computed"
