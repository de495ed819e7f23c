"""Advantages that are the rewards themselves: right for REINFORCE, wrong where the run states a baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_core.diagnose.algorithm import Algorithm

if TYPE_CHECKING:
    from replay_core.documents.diagnosis import Severity


def severity_of_raw(algorithm: Algorithm) -> Severity:
    """An error contradicts what is stated: plain REINFORCE needs no baseline, ReMax's is 0 where every greedy answer
    fails, REINFORCE++'s may be taken later (a warning), and what is not stated, or under a name that is not known here,
    may be meant (RAFT).
    """
    if algorithm.estimator in ("", "reinforce", "remax"):
        return "info"
    return "warning" if algorithm.estimator.startswith("reinforce++") else "error"


def why_raw(algorithm: Algorithm) -> str:
    """The cause that goes with that severity."""
    if algorithm.estimator == "reinforce":
        return "reinforce is stated, which needs no baseline: right, and of a high variance"
    if algorithm.estimator == "remax":
        return "ReMax subtracts the greedy answer's reward: right where every greedy answer earns 0, else it is lost"
    if algorithm.estimator.startswith("reinforce++"):
        return f"{algorithm.estimator} is stated, and neither a mean is subtracted nor a std divided by"
    if not algorithm.estimator:
        return (
            "no baseline is computed: right for REINFORCE and RAFT, and wrong where a baseline is meant (GRPO, RLOO); "
            "the run states no estimator that is known here"
        )
    return "no baseline is computed"
