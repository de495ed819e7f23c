"""Advantages that are the rewards themselves: right for REINFORCE, wrong where the run states a baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay_core.diagnose.algorithm import Algorithm

if TYPE_CHECKING:
    from replay_core.documents.diagnosis import Severity


def severity_of_raw(algorithm: Algorithm) -> Severity:
    """An error contradicts what is stated: plain REINFORCE needs no baseline, and what is not stated may be meant."""
    if algorithm.estimator.startswith("reinforce"):
        return "info"
    return "error" if algorithm.estimator else "warning"


def why_raw(algorithm: Algorithm) -> str:
    """The cause that goes with that severity."""
    if algorithm.estimator.startswith("reinforce"):
        return f"{algorithm.estimator} is stated, which needs no baseline: right, and of a high variance"
    return "no baseline is computed"
