"""Ends of runs in the forms that users' consoles have them, shortened to what tells: what each is said to have died of."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.replay_core.diagnose.logs import diagnosed, told, trl, worrying


def _first(folder: Path, text: str) -> str:
    found = diagnosed(folder, text).findings
    assert found, "nothing is said"
    return f"{found[0].id} {found[0].severity}: {found[0].claim} | {found[0].cause} | {found[0].next_step}"


_FAILED = """\
Traceback (most recent call last):
  File "/w/train.py", line 66, in <module>
    main(sys.argv[1:])
  File "/usr/lib/python3/dist-packages/omegaconf/_utils.py", line 804, in _raise
    raise ex.with_traceback(sys.exc_info()[2])
omegaconf.errors.ConfigKeyError: Key 'max_tokens' not in 'NormConfig'
"""
_STOPS = "20260203-10:00:01.522 Local Scheduler INFO: Stopping local process with signal SIGTERM, pid: [788]\n"


def test_what_a_launcher_kills_was_not_killed_by_the_kernel(tmp_path: Path) -> None:
    said = _first(tmp_path, "INFO 10:00:00 begins training\n" + _FAILED + _STOPS + "Killed\n")
    assert "max_tokens" in said and "SIGKILL" not in said


def test_a_run_whose_launcher_stops_its_servers_behind_its_end_is_well(tmp_path: Path) -> None:
    text = trl([{}] * 12) + "{'train_runtime': 100.0, 'train_loss': 0.1}\n" + ">> Shutting down services...\nKilled\n"
    assert worrying(diagnosed(tmp_path, text)) == []


def test_a_kill_without_a_word_is_still_one(tmp_path: Path) -> None:
    assert told(diagnosed(tmp_path, trl([{}] * 12) + "Killed\n"))[0] == ("L06", "error")


def test_a_warning_before_a_traceback_does_not_catch_it(tmp_path: Path) -> None:
    text = "x.py:9: UserWarning: old\nwarnings.warn(\n" + _FAILED + "    full_key: actor.max_tokens\nINFO next\nINFO on\n"
    assert "L06 error" in _first(tmp_path, text)
