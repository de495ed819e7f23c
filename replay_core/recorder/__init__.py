"""Writes what a trainer computed. Imports the standard library and the trainer's own torch, nothing else."""

from replay_core.recorder.blackbox import BlackBox, GradNormSpike, non_finite, zero_advantage
from replay_core.recorder.calls import Calls
from replay_core.recorder.engine import record_forwards
from replay_core.recorder.examination import rng_state
from replay_core.recorder.forecast import Forecast
from replay_core.recorder.recorder import Recorder, StepRecorder
from replay_core.recorder.settings import Configured, Settings, from_areal, from_environment, from_nexrl, from_yaml
from replay_core.recorder.weights import record_weights

__all__ = [
    "BlackBox",
    "Calls",
    "Configured",
    "Forecast",
    "GradNormSpike",
    "Recorder",
    "Settings",
    "StepRecorder",
    "from_areal",
    "from_environment",
    "from_nexrl",
    "from_yaml",
    "non_finite",
    "record_forwards",
    "record_weights",
    "rng_state",
    "zero_advantage",
]
