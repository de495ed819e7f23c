"""What tests of the whole project share: the wheel of this checkout, and a small dump."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.skips"]

# A shell lets what it starts with `&` ignore Ctrl-C, and every child of it, those that a test is to interrupt too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Thousands of tests and all of torch and transformers are made while tests are collected, and stay.
gc.disable()


def pytest_collection_finish() -> None:
    """What the collected modules imported stays: the collector need not look at it again (twice the speed of some)."""
    gc.freeze()
    gc.enable()


#: Modules that are imported meanwhile before what they made is left out of collections, too.
_MANY = 50
_known = len(sys.modules)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """What tests import in passing (torch's compiler, models, Megatron) stays as well: .3 s each time a model goes."""
    global _known
    if len(sys.modules) > _known + _MANY:
        gc.collect()
        gc.freeze()
        _known = len(sys.modules)


ROOT = Path(__file__).resolve().parents[1]

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("rldbg", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rldbg")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that the build back end makes of this checkout, offline."""
    out = tmp_path_factory.mktemp("wheel")
    call = f"from hatchling import build; print(build.build_wheel({str(out)!r}))"
    built = subprocess.run(
        [sys.executable, "-c", call], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert built.returncode == 0, built.stderr
    return out / built.stdout.split()[-1]


@pytest.fixture(scope="session")
def small_dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A native dump of two steps with one micro-batch each."""
    import torch

    from replay_core.recorder import Recorder

    directory = tmp_path_factory.mktemp("small") / "dump"
    recorder = Recorder(directory)
    for step in range(2):
        ids_BS = torch.arange(12).reshape(2, 6) + step
        with recorder.step(step) as record:
            record("batch_inputs", micro=0, input_ids=ids_BS, attention_mask=torch.ones_like(ids_BS))
            record("forward_data", micro=0, log_probs=-ids_BS.float() / 7)
    return directory


@pytest.fixture
def replays_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `rldbg replay` would ask of a child is done in this process, which has imported torch already."""
    from tests.builders import Here

    monkeypatch.setattr("tui_debugger.commands.replay.ChildRunner", lambda **_: Here())
