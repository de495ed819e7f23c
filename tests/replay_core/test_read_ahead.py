"""What is read ahead is what a comparison would have read, and nothing that it must not believe."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from replay_core import kernel, pages, read_ahead
from replay_core.file_spans import Stream
from replay_core.records import FileBytes, TensorRef

SIZE = 3 << 20

pytestmark = pytest.mark.skipif(kernel.loaded() is None, reason="no kernel was built")


@pytest.fixture
def dumps(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders with the same large file in a folder of theirs."""
    content = os.urandom(SIZE)
    for name in "ab":
        (tmp_path / name / "modules").mkdir(parents=True)
        _file(tmp_path / name).write_bytes(content)
    return tmp_path / "a", tmp_path / "b"


def _file(dump: Path) -> Path:
    return dump / "modules" / "x.bin"


def _spoil(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def _finished() -> None:
    """Wait until there is nothing more to read."""
    for thread in threading.enumerate():
        if thread.name == "rldbg-read-ahead":
            thread.join()


def test_the_same_files_are_known_to_be_the_same(dumps: tuple[Path, Path]):
    a, b = dumps
    with read_ahead.reading(a, b):
        _finished()
        assert read_ahead.knows_same(_file(a), _file(b), 0, SIZE)
        assert not read_ahead.knows_same(_file(a), _file(b), 1, SIZE), "the file ends before"
        assert not read_ahead.knows_same(_file(b), _file(a), 0, 8), "nobody asked for b against a"
    assert not read_ahead.knows_same(_file(a), _file(b), 0, SIZE), "what was known is forgotten behind the with"


def test_a_file_is_known_up_to_where_it_differs(dumps: tuple[Path, Path]):
    a, b = dumps
    _spoil(_file(b), 2 << 20)
    with read_ahead.reading(a, b):
        _finished()
        assert read_ahead.knows_same(_file(a), _file(b), 0, 1 << 20)
        assert not read_ahead.knows_same(_file(a), _file(b), 1 << 20, (1 << 20) + 1)


def test_two_files_may_be_given_instead_of_folders(dumps: tuple[Path, Path]):
    a, b = map(_file, dumps)
    with read_ahead.reading(a, b):
        _finished()
        assert read_ahead.knows_same(a, b, 0, SIZE)


def test_another_size_another_place_and_a_small_file_are_left_alone(dumps: tuple[Path, Path]):
    a, b = dumps
    with _file(b).open("ab") as file:
        file.write(b"more")
    for dump in dumps:
        (dump / "small.bin").write_bytes(b"small")
    (b / "there").mkdir()
    with read_ahead.reading(a, b):
        _finished()
        assert not read_ahead.knows_same(_file(a), _file(b), 0, 8)
        assert not read_ahead.knows_same(a / "small.bin", b / "small.bin", 0, 5)


def test_a_mirror_of_a_remote_dump_is_not_believed_as_its_holes_are_zeros(
    dumps: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mirror = tmp_path / "rldbg-remote"
    mirror.mkdir()
    for dump in dumps:
        dump.rename(mirror / dump.name)
    with read_ahead.reading(mirror / "a", mirror / "b"):
        _finished()
        assert not read_ahead.knows_same(_file(mirror / "a"), _file(mirror / "b"), 0, 8)
    monkeypatch.chdir(mirror)
    with read_ahead.reading(Path("a"), Path("b")):
        _finished()
        assert not read_ahead.knows_same(Path("a/modules/x.bin"), Path("b/modules/x.bin"), 0, 8)


def test_a_mirror_within_a_folder_is_not_believed_either(dumps: tuple[Path, Path]):
    for dump in dumps:
        (dump / "rldbg-remote").mkdir()
        _file(dump).rename(dump / "rldbg-remote" / "x.bin")
    a, b = (dump / "rldbg-remote" / "x.bin" for dump in dumps)
    with read_ahead.reading(*dumps):
        _finished()
        assert not read_ahead.knows_same(a, b, 0, 8)


@pytest.mark.parametrize("what", ["gone", "a pipe"])
def test_what_cannot_be_read_is_left_to_who_compares_it(dumps: tuple[Path, Path], what: str):
    a, b = dumps
    _file(b).unlink()
    if what == "a pipe":
        os.mkfifo(_file(b))
    with read_ahead.reading(a, b):
        _finished()
        assert not read_ahead.knows_same(_file(a), _file(b), 0, SIZE)


def test_a_folder_that_contains_itself_ends_and_files_before_it_are_read(dumps: tuple[Path, Path]):
    a, b = dumps
    for dump in dumps:
        (dump / "round").symlink_to(dump)
    with read_ahead.reading(a, b):
        _finished()
        assert read_ahead.knows_same(_file(a), _file(b), 0, SIZE)


def test_who_asks_for_more_than_was_read_stops_the_reading(dumps: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    a, b = dumps
    began, may_go_on = threading.Event(), threading.Event()
    real = kernel.same_bytes

    def slowly(*args: object) -> object:
        began.set()
        may_go_on.wait(60)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(kernel, "same_bytes", slowly)
    with read_ahead.reading(a, b):
        assert began.wait(60)
        assert not read_ahead.knows_same(_file(a), _file(b), 0, SIZE)
        may_go_on.set()
        _finished()
        assert not read_ahead.knows_same(_file(a), _file(b), 0, SIZE), "it was stopped at its first block"


def test_tensors_of_files_that_were_read_are_not_read_again(dumps: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    a, b = dumps
    one, other = (TensorRef("x", "uint8", (1000,), FileBytes(_file(dump), 64, 1000)) for dump in dumps)
    elsewhere = TensorRef("x", "uint8", (1000,), FileBytes(_file(b), 65, 1000))
    with read_ahead.reading(a, b):
        _finished()
        assert pages.same_bytes(one, elsewhere) is False
        monkeypatch.setattr(Stream, "__enter__", lambda _self: pytest.fail("it was read again"))
        assert pages.same_bytes(one, other) is True
