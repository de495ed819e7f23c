"""The three ways rldbg lies on a disk: a wheel, an editable install, a bare checkout. Themes are found from each."""

from __future__ import annotations

import configparser
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from hatchling.builders.sdist import SdistBuilder

import replay_core

ROOT = Path(__file__).resolve().parents[1]
THEMES = {path.name for path in (ROOT / "themes").glob("*.toml")}

_FOUND = """
import json
import tui_debugger
from tui_debugger import paths

print(json.dumps({
    "package": tui_debugger.__file__,
    "folders": [str(folder) for folder in paths.theme_dirs()],
    "themes": sorted({file.name for folder in paths.theme_dirs() for file in folder.glob("*.toml")}),
    "styles": sorted(file.name for file in paths.styles_dir().iterdir()),
}))
"""


def found_by(python: Path | str, home: Path, *options: str, **environment: str) -> dict[str, Any]:
    """What that Python finds of rldbg, from a directory that is no checkout and a home without themes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XDG_", "VIRTUAL_ENV"))}
    answer = subprocess.run(
        [str(python), *options, "-c", _FOUND],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=home,
        env={**kept, "HOME": str(home), **environment},
    )
    assert answer.returncode == 0, answer.stderr
    return dict(json.loads(answer.stdout))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "home"
    path.mkdir()
    return path


def bare_environment(directory: Path) -> tuple[Path, Path]:
    """A virtual environment with no package but what finds directories: its python and its site-packages."""
    venv.create(directory, with_pip=False, symlinks=True)
    (site,) = directory.glob("lib/python*/site-packages")
    shutil.copytree(Path(platformdirs.__file__).parent, site / "platformdirs")
    return directory / "bin" / "python", site


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.long
def test_the_wheel_holds_code_themes_styles_and_nothing_else(wheel: Path):
    names = names_in(wheel)
    assert {name for name in names if name.startswith("tui_debugger/themes/")} == {
        f"tui_debugger/themes/{theme}" for theme in THEMES
    }
    assert {f"tui_debugger/styles/{path.name}" for path in (ROOT / "tui_debugger/styles").iterdir()} <= names
    assert "replay_core/__main__.py" in names
    assert {name.split("/")[0] for name in names} == {
        "replay_core",
        "tui_debugger",
        f"rldbg-{replay_core.__version__}.dist-info",
        "rldbg_record.pth",
    }
    assert not [name for name in names if {"__pycache__", "tests"} & set(name.split("/"))]


@pytest.mark.long
def test_the_wheel_holds_every_file_that_is_not_code(wheel: Path):
    beside_code = {
        str(path.relative_to(ROOT))
        for package in ("replay_core", "tui_debugger")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix in {".json", ".tcss", ".toml", ".txt", ".md", ".typed"}
    }
    assert beside_code
    assert beside_code <= names_in(wheel)


@pytest.mark.long
def test_the_wheel_says_its_licence_version_and_command(wheel: Path):
    names = names_in(wheel)
    (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
    (entry_points,) = [name for name in names if name.endswith(".dist-info/entry_points.txt")]
    assert any(name.endswith("/LICENSE") for name in names)
    with zipfile.ZipFile(wheel) as archive:
        head = archive.read(metadata).decode()
        entries = configparser.ConfigParser()
        entries.read_string(archive.read(entry_points).decode())
    assert f"\nVersion: {replay_core.__version__}\n" in head
    assert "\nLicense-Expression: Apache-2.0\n" in head
    base = [line for line in head.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert not [line for line in base if "torch" in line or "transformers" in line], "a laptop needs no torch"
    assert dict(entries["console_scripts"]) == {"rldbg": "tui_debugger.cli:main"}


@pytest.mark.long
def test_themes_are_found_from_an_installed_wheel(wheel: Path, tmp_path: Path, home: Path):
    python, site = bare_environment(tmp_path / "venv")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    found = found_by(python, home, "-I")
    assert found["folders"] == [str(site / "tui_debugger" / "themes")]
    assert set(found["themes"]) == THEMES
    assert "app.tcss" in found["styles"]


def test_themes_are_found_from_an_editable_install(tmp_path: Path, home: Path):
    """A folder mapped into a package does not show in an editable install: it has to be found beside it."""
    installed = importlib.metadata.distribution("rldbg")
    links = [Path(str(installed.locate_file(file))) for file in installed.files or () if file.suffix == ".pth"]
    if not any(str(ROOT) in link.read_text() for link in links):
        pytest.skip("this environment holds no editable install of this checkout; `make test` makes one")
    python, site = bare_environment(tmp_path / "venv")
    for link in links:
        shutil.copy(link, site)
    found = found_by(python, home, "-I")
    assert found["package"] == str(ROOT / "tui_debugger" / "__init__.py")
    assert set(found["themes"]) == THEMES
    assert "app.tcss" in found["styles"]


def test_themes_are_found_from_a_bare_checkout(tmp_path: Path, home: Path):
    python, _ = bare_environment(tmp_path / "venv")
    found = found_by(python, home, PYTHONPATH=str(ROOT))
    assert found["folders"] == [str(ROOT / "themes")]
    assert set(found["themes"]) == THEMES


def test_a_theme_of_the_users_own_comes_last(tmp_path: Path, home: Path):
    own = tmp_path / "config" / "rldbg" / "themes"
    own.mkdir(parents=True)
    (own / "mine.toml").write_text('name = "mine"\n')
    python, _ = bare_environment(tmp_path / "venv")
    found = found_by(python, home, PYTHONPATH=str(ROOT), XDG_CONFIG_HOME=str(tmp_path / "config"))
    assert found["folders"] == [str(ROOT / "themes"), str(own)]
    assert "mine.toml" in found["themes"]


def installed(wheel: Path, directory: Path) -> Path:
    """A virtual environment with the wheel, and this one's libraries behind it: no network may be needed. Its site."""
    venv.create(directory, with_pip=False, symlinks=True)
    (site,) = directory.glob("lib/python*/site-packages")
    libraries = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    (site / "behind.pth").write_text("\n".join(libraries) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(directory / "bin" / "python"), "install"]
    # Python compiles what a test imports; pip would compile all of it: seconds.
    how = ["--no-deps", "--no-index", "--no-compile", "--force-reinstall"]
    subprocess.run([*pip, *how, str(wheel)], check=True, capture_output=True)
    return site


@pytest.mark.long
def test_pip_installs_the_wheel_and_its_command_runs(wheel: Path, tmp_path: Path, home: Path):
    site = installed(wheel, tmp_path / "venv")
    said = subprocess.run(
        [str(tmp_path / "venv" / "bin" / "rldbg"), "info", "--json"],
        capture_output=True, text=True, check=True, cwd=home, timeout=300,
        env={"PATH": os.environ["PATH"], "HOME": str(home)},
    )  # fmt: skip
    info = json.loads(said.stdout)
    assert info["rldbg"] == replay_core.__version__
    assert info["paths"]["themes"] == str(site / "tui_debugger" / "themes")


_TRAINS = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(3, 4)).mean().backward()
    optimizer.step()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(True, id="RLDBG_RECORD is set"),
        pytest.param(False, id="it is not", marks=pytest.mark.slow),
    ],
)
def test_an_installed_rldbg_records_a_script_when_the_environment_asks(
    asked: bool, wheel: Path, tmp_path: Path, home: Path
):
    installed(wheel, tmp_path / "venv")
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "OMP_NUM_THREADS": "1"}
    said = subprocess.run(
        [str(tmp_path / "venv" / "bin" / "python"), "-c", _TRAINS],
        capture_output=True, text=True, check=True, cwd=home, timeout=300,
        env={**environment, **({"RLDBG_RECORD": str(tmp_path / "dump")} if asked else {})},
    )  # fmt: skip
    assert ("2 model calls, 2 losses, 2 steps" in said.stderr) is asked
    assert (tmp_path / "dump" / "manifest.json").exists() is asked


@pytest.mark.long
def test_the_version_stands_in_one_place_and_the_wheel_has_it_and_its_types(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (about,) = [archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")]
    assert f"\nVersion: {replay_core.__version__}\n" in about
    assert {"replay_core/py.typed", "tui_debugger/py.typed"} <= set(names)


def test_the_source_archive_holds_the_tests_but_no_file_that_is_not_ours_to_hand_on() -> None:
    names = {file.relative_path for file in SdistBuilder(str(ROOT)).recurse_included_files()}
    assert {"tests/data/README.md", "tests/test_packaging.py", "replay_core/py.typed"} <= names
    assert not [name for name in names if name.startswith("tests/data/openrlhf/")]
