"""No test sees the developer's own configuration, theme or terminal, nor leaves files in the home folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual._compositor import Compositor
from textual.app import App


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path_factory.mktemp("home")
    for name in ("CONFIG", "STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(home / name.lower()))
    for name in ("TMUX", "NO_COLOR", "RLDBG_THEME", "TEXTUAL_THEME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A headless app paints for nobody, which is most of its work: painted is what a test reads, and how it ends."""

    def nothing(compositor: Compositor, **_how: object) -> None:
        compositor._dirty_regions.clear()

    monkeypatch.setattr(Compositor, "render_update", nothing)


@pytest.fixture(autouse=True)
def _lasting_toasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was said is still there when the test looks: on a busy machine that is more than a toast's five seconds."""
    monkeypatch.setattr(App, "NOTIFICATION_TIMEOUT", 600.0)


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A test that exports does so into its own folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
