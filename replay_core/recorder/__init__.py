"""Writes what a trainer computed. Imports the standard library and the trainer's own torch, nothing else."""

from replay_core.recorder.recorder import Recorder, StepRecorder

__all__ = ["Recorder", "StepRecorder"]
