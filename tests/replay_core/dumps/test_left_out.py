"""What lies in a dump's directory and is not read is said, never dropped."""

from __future__ import annotations

import gzip
import os
import shutil
from pathlib import Path

import pytest
import torch

from replay_core.dumps import listing, open_run
from replay_core.errors import DumpError, NotADumpError


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    for step in range(2):
        torch.save([{"input_ids": torch.ones(2, 3), "loss_mask": torch.ones(2, 3)}], tmp_path / f"step_{step:06d}.pt")
    return tmp_path


def test_a_link_to_nothing_is_a_problem(dump: Path) -> None:
    (dump / "step_000002.pt").symlink_to(dump / "gone.pt")
    run = open_run(dump)
    assert len(run.records) == 2
    (problem,) = run.problems
    assert problem.where.endswith("step_000002.pt")
    assert "not there" in problem.what


def test_a_linked_folder_is_not_followed_and_named(dump: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.copy(dump / "step_000000.pt", elsewhere / "step_000009.pt")
    (dump / "older").symlink_to(elsewhere)
    run = open_run(dump)
    assert run.steps() == [0, 1]
    assert any("linked folders are not followed: older" in note for note in run.notes)


def test_a_dump_that_is_itself_behind_a_link_opens(dump: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    link = tmp_path_factory.mktemp("links") / "latest"
    link.symlink_to(dump)
    assert open_run(link).steps() == [0, 1]


def test_compressed_files_beside_are_named(dump: Path) -> None:
    with gzip.open(dump / "step_000002.pt.gz", "wb") as file:
        file.write((dump / "step_000000.pt").read_bytes())
    assert any("not read: step_000002.pt.gz" in note for note in open_run(dump).notes)


def test_a_compressed_file_alone_says_to_unpack_it(tmp_path: Path) -> None:
    (tmp_path / "rows.zip").write_bytes(b"PK\x05\x06" + bytes(18))
    with pytest.raises(NotADumpError, match="unpack"):
        open_run(tmp_path)
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": [1]}\n'))
    for given in (path, tmp_path):
        with pytest.raises(NotADumpError) as caught:
            open_run(given)
        assert "unpack" in str(caught.value)


def test_folders_too_deep_to_look_into_are_a_problem(dump: Path) -> None:
    deep = dump.joinpath(*"abcdefghi")
    deep.mkdir(parents=True)
    shutil.copy(dump / "step_000000.pt", deep / "step_000009.pt")
    assert any("deep" in problem.what for problem in open_run(dump).problems)


def test_more_names_than_any_dump_has_are_a_problem(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MAX_NAMES", 3)
    more = dump / "more"
    more.mkdir()
    for number in range(5):
        (more / f"{number}.txt").write_text("")
    assert any("nothing from here on" in problem.what for problem in open_run(dump).problems)


def test_a_folder_that_cannot_be_read_is_a_problem(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = dump / "closed"
    closed.mkdir()
    scandir = os.scandir

    def refusing(path: str) -> object:
        if str(path) == str(closed):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    # Run as root, no folder is closed.
    monkeypatch.setattr(os, "scandir", refusing)
    run = open_run(dump)
    assert run.steps() == [0, 1]
    assert any(problem.where == str(closed) and "Permission denied" in problem.what for problem in run.problems)


def test_a_link_that_leads_to_itself_costs_only_itself(dump: Path) -> None:
    (dump / "again").symlink_to("again")
    run = open_run(dump)
    assert run.steps() == [0, 1]
    assert [problem.where.rpartition("/")[2] for problem in run.problems] == ["again"]


def test_pipes_sockets_and_devices_are_named_and_not_opened(dump: Path) -> None:
    os.mkfifo(dump / "step_000002.pt")
    (dump / "step_000003.pt").symlink_to("/dev/zero")
    run = open_run(dump)
    assert run.steps() == [0, 1]
    (note,) = [note for note in run.notes if "not opened" in note]
    assert "step_000002.pt" in note
    assert "step_000003.pt" in note


def test_a_path_in_a_folder_one_may_not_enter_says_so(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dump / "step_000000.pt"
    stat = Path.stat

    def refusing(self: Path, **how: bool) -> os.stat_result:
        if self == path:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(self, **how)

    # Run as root, no folder is closed.
    monkeypatch.setattr(Path, "stat", refusing)
    with pytest.raises(DumpError) as caught:
        open_run(path)
    assert "Permission denied" in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["loop", "x" * 300])
def test_a_path_that_leads_nowhere_or_is_too_long_is_an_error_of_ours(dump: Path, name: str) -> None:
    (dump / "loop").symlink_to("loop")
    with pytest.raises(DumpError, match="cannot look at the path"):
        open_run(dump / name)


def test_a_distributed_checkpoint_whose_metadata_is_damaged_names_that_file(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"")
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    (record,) = open_run(tmp_path).records
    with pytest.raises(DumpError) as caught:
        record.tensors()
    assert str(tmp_path / ".metadata") in str(caught.value)
