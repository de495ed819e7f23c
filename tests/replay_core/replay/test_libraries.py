"""A flash-attention package that is installed and broken takes its own cells with it, and nothing else."""

import os
from pathlib import Path

import pytest

from replay_core.executors.child import ChildRunner


@pytest.mark.long
def test_a_broken_flash_attn_is_named_and_the_replay_goes_on(ask, tmp_path, monkeypatch):
    package = tmp_path / "site" / "flash_attn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('raise ImportError("undefined symbol: _ZN3c10")')
    root = str(Path(__file__).parents[3])
    monkeypatch.setattr("sys.path", [str(package.parent), *__import__("sys").path])
    with ChildRunner(warm=True, environment={"PYTHONPATH": os.pathsep.join([str(package.parent), root])}) as runner:
        doc = ask(matrix="attention=sdpa,flash,fa2", plan={"capture": "none"}, runner=runner)
    outcomes = {
        cell["flags"]["attention"]: cell["outcome"] for cell in doc["cells"] if cell["part"] in ("cell", "reference")
    }
    assert outcomes == {"sdpa": "ran", "flash": "ran", "fa2": "unavailable"}
    assert "installed but broken: ImportError: undefined symbol" in doc["cells"][-1]["error"]["message"]
