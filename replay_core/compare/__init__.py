"""Pairs two runs, judges every tensor pair, finds the first divergence. No torch."""

from replay_core.compare.comparison import Comparison, TensorVerdict, compare_runs

__all__ = ["Comparison", "TensorVerdict", "compare_runs"]
