"""rldbg's core: read dumps, compare them, replay a recorded micro-batch. Imports nothing by itself.

A trainer that only records pays for nothing else (`from replay_core.recorder import Recorder`), and
opening or comparing never imports torch.
"""

__version__ = "0.1.0"
