"""Pairs two runs, judges every tensor pair, finds the first divergence. No torch."""

from replay_core.compare.comparison import Comparison, compare_runs, measure_part
from replay_core.compare.judging.rejudging import rejudge, rejudged
from replay_core.compare.judging.tensors import TensorVerdict
from replay_core.compare.judging.tolerance import Tolerances, load_tolerances

__all__ = ["Comparison", "TensorVerdict", "Tolerances", "compare_runs", "load_tolerances", "measure_part", "rejudge",
           "rejudged"]  # fmt: skip
