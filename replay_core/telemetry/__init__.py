"""What a running job costs: memory and time of this process, once a second. Never imports torch."""

from replay_core.telemetry.sampler import Sampler

__all__ = ["Sampler"]
