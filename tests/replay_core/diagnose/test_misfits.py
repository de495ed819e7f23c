"""A name, an argument or a module that is not there: whose it is, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.replay_core.diagnose.logs import diagnosed

_SITE = "/opt/env/lib/python3.12/site-packages"


def _said(folder: Path, error: str, *files: str) -> str:
    frames = "".join(f'  File "{file}", line 7, in go\n    go()\n' for file in files)
    finding = diagnosed(folder, f"Traceback (most recent call last):\n{frames}{error}\n").findings[0]
    assert finding.id == "L06"
    return finding.claim


@pytest.mark.parametrize(
    ("error", "files", "words"),
    [
        ("AttributeError: module 'wandb' has no attribute 'login'", ("/home/u/train.py",), "another wandb is imported"),
        ("ModuleNotFoundError: No module named 'math_verify'", ("/home/u/train.py",), "math_verify is not installed"),
        ("ModuleNotFoundError: No module named 'trl.extras.vllm'", ("/home/u/train.py",),
         "versions do not fit: the installed trl has no trl.extras.vllm"),
        ("TypeError: Client.save_state() missing 1 required positional argument: 'name'",
         ("/home/u/train.py", f"{_SITE}/tinker/lib/telemetry.py"), "the script's call is wrong"),
        ("TypeError: LLM.__init__() got an unexpected keyword argument 'dtypes'",
         ("/home/u/verl/workers/rollout.py", f"{_SITE}/vllm/utils.py"), "versions do not fit: LLM.__init__() does "
          "not take"),
        ("AttributeError: 'Buffer' object has no attribute 'cache'", ("/home/u/train.py",),
         "a Buffer has no cache"),
        ("AttributeError: 'Qwen3Config' object has no attribute 'rope_theta'", (f"{_SITE}/vllm/config.py",),
         "versions do not fit"),
        (f"ImportError: cannot import name 'FSDPModule' from 'torch.distributed.fsdp' ({_SITE}/torch/fsdp/__init__.py)",
         (f"{_SITE}/trl/models/utils.py",), "versions do not fit: torch.distributed.fsdp has no FSDPModule"),
        ("ImportError: cannot import name 'load_dataset' from 'datasets' (/home/u/datasets/__init__.py)",
         ("/home/u/train.py",), "another datasets is imported"),
    ],
)  # fmt: skip
def test_who_asked_for_what_is_not_there_says_what_to_do(
    error: str, files: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    assert words in _said(tmp_path, error, *files)
