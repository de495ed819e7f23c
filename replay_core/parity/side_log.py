"""The log a critic leaves beside its dump, in the form of ROLL's parity test: `critic_output_<backend>.log`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

_RULE = "-" * 40


class SideLog:
    """A text header, then one JSON object per computation of values, each followed by forty dashes."""

    def __init__(self, directory: Path, backend: str, engine: str) -> None:
        self.path = directory / f"critic_output_{backend}.log"
        self._backend = backend
        directory.mkdir(parents=True, exist_ok=True)
        header = f"Critic output log\nBackend: {backend}\nEngine: {engine}\nCreated: {_now()}\n{'=' * 40}\n"
        self.path.write_text(header, encoding="utf-8")

    def write(self, step: int, batch: str, values_BT: Any, device: str) -> None:
        """One entry about values [B, T] (a tensor). Values are in their own unit."""
        entry = {
            "timestamp": _now(),
            "global_step": step,
            "backend": self._backend,
            "batch": batch,
            "values_shape": list(values_BT.shape),
            "values_dtype": str(values_BT.dtype),
            "values_device": device,
            "values_stats": {
                "mean": float(values_BT.mean()),
                "std": float(values_BT.std()),
                "min": float(values_BT.min()),
                "max": float(values_BT.max()),
            },
            "sample_values_first_10_tokens": [[float(v) for v in row[:10]] for row in values_BT[:2]],
        }
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry, indent=2) + "\n" + _RULE + "\n")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
