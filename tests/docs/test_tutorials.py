"""Tutorials: their commands run as they stand and say what the page shows; pages made of the code; the site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import browser
from tests.docs.made import made_pages

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs/tutorials").glob("*.md"))


def _steps(page: Path) -> list[tuple[str, int, list[str]]]:
    """Each command, the exit code it stands with (`# exit 1`), and the lines that are shown of it."""
    steps: list[tuple[str, int, list[str]]] = []
    for kind, block in re.findall(r"```(console|text)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        if kind == "text":
            steps[-1] = (*steps[-1][:2], block.splitlines())
            continue
        for line in block.splitlines():
            command, _, code = line.partition("  # exit ")
            steps.append((command, int(code or 0), []))
    return steps


def test_there_is_a_tutorial_for_each_story():
    assert len(PAGES) == 5
    assert all(any(shown for _, _, shown in _steps(page)) for page in PAGES)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_does_what_it_says(page: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, words in (("python", ""), ("rldbg", " -m tui_debugger")):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable}{words} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    for name in ("tests", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    environment |= {"OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(tmp_path / "state")}
    for command, code, shown in _steps(page):
        ran = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, text=True,
            capture_output=True, check=False,
        )  # fmt: skip
        assert ran.returncode == code, (command, ran.stdout[-2000:], ran.stderr[-2000:])
        for line in shown:
            assert line.strip() in ran.stdout, (command, line, ran.stdout[:2000])


@pytest.mark.long
def test_the_pages_made_of_the_code_hold_every_command_type_key_and_member():
    from replay_core.rollouts import RolloutReplay
    from tui_debugger.actions import ACTIONS
    from tui_debugger.command_table import COMMANDS, HIDDEN

    pages = made_pages().made()
    for name in set(COMMANDS) - set(HIDDEN):
        assert f"## rldbg {name}\n" in pages["reference/commands.md"]
    assert "## SamplesDocument" in pages["reference/schema.md"] or "## samples" in pages["reference/schema.md"]
    assert all(f"`{action.name}`" in pages["reference/configuration.md"] for action in ACTIONS)
    for member in ("batch", "of_rank"):
        assert hasattr(RolloutReplay, member)
        assert f"### RolloutReplay.{member}" in pages["reference/python.md"]


def _site(where: Path) -> Path:
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(where / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return where / "site"


@pytest.mark.slow
def test_the_site_is_built_and_no_link_of_it_is_broken(tmp_path: Path) -> None:
    site = _site(tmp_path)
    for name in ("index", "tutorials/zero-loss", "reference/commands", "reference/schema", "reference/python"):
        assert (site / f"{name}.html").stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.skipif(browser.FOUND is None, reason="no headless browser is installed")
def test_the_site_is_dark_at_night_and_cuts_no_command_asks_nobody_and_is_as_wide_as_the_window(tmp_path: Path) -> None:
    site = _site(tmp_path)
    cut = "[...document.querySelectorAll('pre code')].filter(e => e.scrollWidth > e.clientWidth).length"
    with browser.Browser(tmp_path / "profile") as tab:
        tab.tell("Emulation.setScriptExecutionDisabled", value=False)
        for name in ("which-command", "tutorials/crash-under-flags", "reference/commands", "reference/schema"):
            for width, dark in ((360, False), (1600, False), (1600, True)):
                tab.open(site / f"{name}.html", width, dark=dark)
                scheme = tab.evaluate("document.body.dataset.mdColorScheme")
                assert scheme == ("slate" if dark else "default"), name
                assert tab.evaluate("document.documentElement.scrollWidth") <= width, name
                assert (
                    tab.evaluate("document.querySelectorAll('pre code').length") > 0
                    or "schema" in name
                    or "which" in name
                )
                assert tab.evaluate(cut) == 0, (name, width)
                assert all(one.startswith(("file:", "data:", "blob:")) for one in tab.asked_for), name
