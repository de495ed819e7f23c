"""Pairs two runs, judges every tensor pair, finds the first divergence. No torch."""

from replay_core.compare.comparison import Comparison, compare_runs
from replay_core.compare.judging.rejudging import rejudge, rejudged
from replay_core.compare.judging.tensors import TensorVerdict
from replay_core.compare.judging.tolerance import Tolerances, load_tolerances

__all__ = ["Comparison", "TensorVerdict", "Tolerances", "compare_runs", "load_tolerances", "rejudge", "rejudged"]
