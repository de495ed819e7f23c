"""Where the genuine files of other frameworks lie; tests/data/README.md says what made each of them."""

from __future__ import annotations

import os
from pathlib import Path

FIXTURES = Path(os.environ.get("RLDBG_FIXTURES") or Path(__file__).with_name("data"))
"""RLDBG_FIXTURES names another folder of the same layout, as with files of newer framework versions."""
