"""What is said not to run here, from the file system alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from replay_core.replay import forecast
from replay_core.replay.flags import Flags

BASE = Flags().to_mapping()


def test_defaults_are_never_unavailable() -> None:
    assert [name for name, value in BASE.items() if forecast.unavailable(name, value, BASE)] == []


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "_is_installed", lambda _package: False)
    assert forecast.unavailable("attention", "fa2", BASE) == "flash_attn is not installed"


def test_flash_attention_says_what_it_needs_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "_is_installed", lambda _package: True)
    assert forecast.unavailable("attention", "fa3", BASE) == "runs on CUDA only"
    on_cuda = {**BASE, "device": "cuda"}
    assert forecast.unavailable("attention", "fa3", on_cuda) == "float16 and bfloat16 only"
    assert forecast.unavailable("attention", "fa3", {**on_cuda, "dtype": "bfloat16"}) is None


def test_no_device_and_no_compiler_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "has_gpu", lambda: False)
    monkeypatch.setattr(forecast, "_has_compiler", lambda: False)
    assert forecast.unavailable("device", "cuda", BASE) == "no NVIDIA device here"
    assert forecast.unavailable("compile", "inductor", BASE) == "no C++ compiler here"
    assert forecast.unavailable("compile", "aot_eager", BASE) is None


def test_looking_imports_no_torch() -> None:
    code = (
        "import sys; from replay_core.replay import forecast as f\n"
        "for a in ('fa2', 'fa3', 'fa4', 'sdpa-cudnn'): f.unavailable('attention', a, {'device': 'cuda'})\n"
        "sys.exit('torch' in sys.modules or 'flash_attn' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
