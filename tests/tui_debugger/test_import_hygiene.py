"""The process that draws imports neither torch nor numpy: its start is what a person waits for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

_CODE = """
import sys, json
import tui_debugger.app, tui_debugger.screens.help, tui_debugger.screens.ask
print(json.dumps(sorted(sys.modules)))
"""
HEAVY = ("torch", "numpy", "scipy", "transformers", "ml_dtypes", "safetensors", "pynvml", "tokenizers")


@pytest.mark.long
def test_the_screen_imports_neither_torch_nor_numpy() -> None:
    answer = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=True)
    loaded = set(json.loads(answer.stdout))
    assert [name for name in HEAVY if name in loaded] == []


@pytest.mark.long
def test_nothing_that_reads_or_writes_dumps_is_imported_before_the_first_paint() -> None:
    imports = "import json, sys, tui_debugger.cli, tui_debugger.opening, tui_debugger.app"
    code = f"{imports}; print(json.dumps([*sys.modules]))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rooms = ("replay_core.recorder", "replay_core.dumps", "replay_core.workbench", "replay_core.compare")
    # Nor is the library of the command line: 7 ms of the 230 that an empty screen takes.
    assert [name for name in json.loads(answer.stdout) if name.startswith((*rooms, "click"))] == []


def test_the_core_does_not_know_the_screen() -> None:
    code = "import sys, replay_core.workbench; sys.exit('textual' in sys.modules or 'tui_debugger' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
