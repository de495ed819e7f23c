"""Opens any dump as a Run: sniff its dialect, index its files, name its tensors. No torch, nothing executed."""

from replay_core.dumps.opening import DIALECTS, open_run

__all__ = ["DIALECTS", "open_run"]
