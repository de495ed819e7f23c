"""The old place of what rules state findings with."""

from replay_core.diagnose.finding import finding, listed, look_at, share, shown

__all__ = ["finding", "listed", "look_at", "share", "shown"]
