"""Pairs two runs, judges every tensor pair, finds the first divergence. No torch."""

from replay_core.compare.comparison import Comparison, compare_runs
from replay_core.compare.judging import TensorVerdict

__all__ = ["Comparison", "TensorVerdict", "compare_runs"]
