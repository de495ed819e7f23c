"""What rldbg keeps of its own: a cache with a cap, and the newest reports of crashes."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from replay_core.errors import DumpError, ExitCode
from replay_core.executors.in_process import CRASHES_KEPT, unexpected
from replay_core.jobs import Job
from tui_debugger import crash, paths
from tui_debugger.cli import run

#: A number that no process has.
GONE = 2**22 + 1


def replay(number: int, nbytes: int, made_by: int = GONE, age_s: float = 0.0) -> Path:
    folder = paths.cache_dir() / "replays" / f"20260101-0000{number:02}-replay-{made_by}-0"
    folder.mkdir(parents=True)
    (folder / "record.pt").write_bytes(b"x" * nbytes)
    os.utime(folder, (1e9 - age_s, 1e9 - age_s))
    return folder


def test_the_cache_is_capped_by_bytes_oldest_first_and_never_what_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "CACHE_BYTES", 2500)
    monkeypatch.setattr("time.time", lambda: 1e9)
    newest, second, old, used = (
        replay(1, 1000),
        replay(2, 1000, age_s=10),
        replay(3, 1000, age_s=20),
        replay(4, 1000, made_by=os.getpid(), age_s=30),
    )
    paths.new_replay_dir("replay")
    assert [one.exists() for one in (newest, second, old, used)] == [True, True, False, True]


def test_one_replay_larger_than_the_cache_stays_until_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "CACHE_BYTES", 500)
    large = replay(1, 1000)
    paths.new_replay_dir("replay")
    assert large.exists()


def test_a_link_in_the_cache_is_taken_away_and_not_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("kept")
    replay(1, 10)
    (paths.cache_dir() / "replays" / "link").symlink_to(tmp_path / "mine")
    (paths.cache_dir() / "replays" / "a file of somebody").write_text("x")
    assert run(["cache", "--clear"]) == ExitCode.AGREES
    assert (tmp_path / "mine" / "file").read_text() == "kept"
    assert list((paths.cache_dir() / "replays").iterdir()) == []


def test_the_cache_is_said_and_cleared(capsys: pytest.CaptureFixture[str]) -> None:
    folder = replay(1, 3 << 20)
    assert run(["cache"]) == ExitCode.AGREES
    assert f"3.0 MiB  {folder}" in capsys.readouterr().out
    assert run(["info"]) == ExitCode.AGREES
    assert "3 of 512 MiB, 1 replay\n" in capsys.readouterr().out
    assert run(["cache", "--clear"]) == ExitCode.AGREES
    assert "3 MiB freed" in capsys.readouterr().out
    assert not folder.exists()
    assert run(["cache", "--clear"]) == ExitCode.AGREES


def test_a_cache_that_is_no_folder_stops_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    paths.cache_dir().mkdir(parents=True)
    (paths.cache_dir() / "replays").write_text("")
    assert run(["cache"]) == ExitCode.AGREES
    assert run(["info"]) == ExitCode.AGREES


def test_reports_of_crashes_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    told = [unexpected(Job("listing", {}), ValueError(str(number))).file for number in range(CRASHES_KEPT + 5)]
    assert len(list(tmp_path.iterdir())) == CRASHES_KEPT
    assert Path(str(told[-1])).is_file()
    for second in range(CRASHES_KEPT + 3):
        monkeypatch.setattr("time.strftime", lambda _, second=second: f"20260101-0000{second:02}")
        last = crash.write_crash(ValueError("x"))
    assert len(list(paths.state_dir().glob("crash-*.txt"))) == crash.KEPT
    assert last is not None
    assert last.is_file()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE])
def test_a_disk_that_is_full_is_no_internal_error(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number), "/data/cell.log")

    told = unexpected(Job("replay_cell", {}), OSError(number, os.strerror(number), "/data/cell.log"))
    assert isinstance(told, DumpError)
    assert (told.file, told.message) == ("/data/cell.log", f"a replay could not go on: {os.strerror(number)}")
    monkeypatch.setattr("tui_debugger.commands.info._info", full)
    assert run(["info"]) == ExitCode.BAD_BYTES
    assert "/data/cell.log" in capsys.readouterr().err


def test_kept_digests_are_told_and_cleared(capsys: pytest.CaptureFixture[str]):
    paths.private_dir(paths.digests_dir())
    (paths.digests_dir() / "run.jsonl").write_bytes(b"x" * 3_000_000)
    assert run(["cache"]) == ExitCode.AGREES
    assert "2.9 MiB  of digests that compare --digests took" in capsys.readouterr().out
    assert run(["cache", "--clear"]) == ExitCode.AGREES
    assert "3 MiB freed" in capsys.readouterr().out
    assert not paths.digests_dir().exists()
