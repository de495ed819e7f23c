"""A cell's log: all of it while it is small, both ends of it when it is not."""

import pytest

from replay_core.errors import RequestError
from replay_core.replay.cell_log import HEAD, TAIL, CellLog


def test_a_small_log_is_kept_whole(tmp_path):
    path = tmp_path / "logs" / "cell0.log"
    with CellLog(path) as log:
        log.line("first")
        log.line("last")
    assert path.read_text() == "first\nlast\n"


def test_of_100_mb_both_ends_are_kept_and_the_gap_is_counted(tmp_path):
    path = tmp_path / "cell0.log"
    with CellLog(path) as log:
        log.line("first")
        for number in range(200):
            log.line(f"{number} " + "x" * (1 << 19))
        log.line("the error")
    text = path.read_text()
    assert len(text) < HEAD + 2 * TAIL + 1024
    assert text.startswith("first\n0 xxx")
    assert text.endswith("the error\n")
    assert "MiB of what was printed are left out here" in text


def test_one_endless_line_keeps_its_end(tmp_path):
    path = tmp_path / "cell0.log"
    with CellLog(path) as log:
        log.line("y" * (3 * TAIL) + "end")
    text = path.read_text()
    assert text.endswith("yend\n")
    assert len(text) < 2 * TAIL
    assert text.startswith("[2.0 MiB of this line are left out] y")


def test_where_no_folder_can_be_is_said_with_the_option_that_changes_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="cannot be written there") as refused:
        CellLog(tmp_path / "file" / "logs" / "cell0.log")
    assert "--out" in refused.value.hint
