"""Small files that ask for much: an answer or an error of ours, in seconds and in bounds."""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core import budget, pages
from replay_core.budget import reading, spend_bytes, spend_values
from replay_core.collecting import settled
from replay_core.dumps import open_run
from replay_core.errors import BudgetError, DumpError, RldbgError
from replay_core.recorder import Recorder
from replay_core.records import Record
from replay_core.workbench import open_dump
from tests.builders import save_file
from tests.hostile import MAKERS

#: The bounds of a file under a megabyte, of which opening and listing are a part.
MOST_S, MOST_MIB = 2.0, 512
#: Those that take half a second or more to be made and read.
_LONG = {
    "a_parquet_of_one_long_text", "an_npz_that_inflates", "a_parquet_of_one_value", "a_zip_of_very_many_records",
    "text_arrays_of_the_same_bytes", "a_megabyte_of_lists", "a_log_of_errors", "a_msgpack_of_lists",
    "a_log_of_iterations", "metric_rows_of_one_document", "a_megabyte_of_empty_bytes", "metric_lines_without_end",
    "a_msgpack_of_very_many_batches", "a_megabyte_of_empty_sets", "meta_tensors_of_one_long_size",
    "a_distributed_checkpoint_of_one_piece_again_and_again", "an_index_of_weights_of_very_many_files",
    "a_log_of_nothing_but_nan", "a_line_of_very_many_metrics", "a_step_that_spaces_follow", "a_column_of_one_long_text",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in _LONG else name for name in MAKERS]
)
def test_a_small_file_that_asks_for_much_is_listed_or_refused_in_its_budget(tmp_path: Path, name: str) -> None:
    if "parquet" in name:
        pytest.importorskip("pyarrow")
    path = MAKERS[name](tmp_path)
    # What other tests have left in this process is none of the file's.
    with settled():
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
        with suppress(RldbgError):
            for record in open_run(path).records[:200]:
                for ref in record.tensors()[:200]:
                    if ref.is_readable and ref.nbytes < 1 << 22:
                        pages.array(ref)
        assert time.thread_time() - began < MOST_S
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < MOST_MIB


@pytest.mark.parametrize("form", ["pt", "safetensors", "jsonl"])
def test_a_small_record_of_every_form_is_read_under_the_limits_of_a_command(tmp_path: Path, form: Any) -> None:
    recorder = Recorder(tmp_path / "run", format=form)
    for step in range(3):
        with recorder.step(step, rank=0) as record:
            record("trajectory", rewards=torch.ones(3), texts=["one", "two", "three"])
    for written in (tmp_path / "run").rglob("*.*"):
        os.utime(written, (1e9, 1e9))  # what was written just now is looked at twice
    read = (
        "import sys; from pathlib import Path; from replay_core.budget import limit_process; "
        "from replay_core.dumps import open_run; limit_process(); "
        "print([sum(ref.is_readable for ref in record.tensors()) for record in open_run(Path(sys.argv[1])).records])"
    )
    done = subprocess.run([sys.executable, "-c", read, tmp_path / "run"], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[2, 2, 2]", done.stdout + done.stderr[-500:]


def test_what_is_wrong_with_very_many_lines_of_an_index_is_said_once(tmp_path: Path) -> None:
    problems = open_run(MAKERS["an_index_of_broken_lines"](tmp_path)).problems
    assert len(problems) < 10
    assert any("more lines: unreadable index line" in problem.what for problem in problems)


@pytest.mark.parametrize("name", ["a_manifest_nested_without_end", "a_msgpack_that_claims_lists_of_lists"])
def test_a_document_of_what_claims_more_than_it_holds_is_made(tmp_path: Path, name: str) -> None:
    """Or refused: what walks it does not end in its own stack."""
    with suppress(RldbgError):
        assert len(open_dump(MAKERS[name](tmp_path), headers=True)["records"]) <= 4096


def test_tensors_that_overlap_themselves_share_one_bound_and_a_few_are_read(tmp_path: Path) -> None:
    many = open_run(MAKERS["many_tensors_that_overlap_themselves"](tmp_path)).records[0].tensors()
    assert not any(ref.is_readable for ref in many)
    few = torch.arange(4096.0)
    path = save_file(tmp_path / "few.pt", {f"h{i}": few.as_strided((1000, 1000), (1, 1), i) for i in range(20)})
    fields = open_run(path).records[0].tensors()
    assert all(ref.is_readable for ref in fields)
    assert pages.array(fields[3])[2, 5] == 2 + 5 + 3


def test_a_budget_says_what_was_claimed_what_is_stored_and_what_raises_it(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(5000))
    with reading(path):
        spend_values(1 << 20, "cells of a table")
        with pytest.raises(BudgetError) as caught:
            spend_values(8 * 5000 + 1, "cells of a table")
    assert "at most 1,088,576 values, as 5,000 bytes are stored" in str(caught.value)
    assert "1,088,577, at cells of a table" in str(caught.value)
    assert "RLDBG_BUDGET=8" in str(caught.value)


def test_holes_of_a_file_are_not_stored(tmp_path: Path) -> None:
    sparse, whole = tmp_path / "sparse.npy", tmp_path / "whole.npy"
    for path, shape in ((sparse, (1 << 20, 5000)), (whole, (5, 5000))):
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
        path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(100_000))
    os.truncate(sparse, 128 + (1 << 20) * 20_000)
    (refused,), (read,) = (open_run(path).records[0].tensors() for path in (sparse, whole))
    assert "is stored" in str(refused.source)
    assert pages.array(read).shape == (5, 5000)
    assert budget.stored_bytes(whole) == 128 + 100_000


def test_the_option_raises_every_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(budget.OPTION, "8")
    with reading(tmp_path):
        spend_bytes(7 * budget.FLOOR_BYTES, "texts")
        spend_values(7 * budget.FLOOR_VALUES, "cells")


def test_the_readings_of_one_file_share_their_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "FLOOR_SECONDS", 0.02)
    budget.forget()

    def read_often() -> None:
        for _ in range(100):
            with reading(tmp_path / "x"):
                sum(range(200_000))

    with pytest.raises(BudgetError, match="more than what is stored"):
        read_often()
    budget.forget()
    with reading(tmp_path / "x"):
        pass


def test_what_is_refused_in_a_record_leaves_the_rest_of_it(tmp_path: Path) -> None:
    path = save_file(tmp_path / "x.pt", {"h": torch.zeros(1).expand(10**6, 10**6), "w": torch.ones(3)})
    whole, refused = sorted(open_run(path).records[0].tensors(), key=lambda ref: ref.name == "h")
    assert pages.array(whole).tolist() == [1, 1, 1]
    assert not refused.is_readable
    assert "1,000,000,000,000 elements" in str(refused.source)


def test_an_array_that_was_read_outlives_its_file(tmp_path: Path) -> None:
    path = save_file(tmp_path / "x.pt", {"w": torch.arange(100_000.0), "t": torch.arange(20_000.0).reshape(100, 200).T})
    read = [pages.array(ref) for ref in open_run(path).records[0].tensors()]
    os.truncate(path, 0)
    assert read[0][-1] == 99_999
    assert read[1][1, 0] == 1


def test_reading_beside_somebody_who_cuts_and_grows_the_file_is_an_error_and_no_signal(tmp_path: Path) -> None:
    path = save_file(tmp_path / "x.pt", {"w": torch.arange(200_000.0), "v": torch.arange(40_000.0).reshape(200, 200).T})
    data, ended = path.read_bytes(), threading.Event()

    def cut() -> None:
        while not ended.is_set():
            os.truncate(path, 4096)
            os.truncate(path, len(data))

    refs = open_run(path).records[0].tensors()
    cutter = threading.Thread(target=cut)
    cutter.start()
    outcomes = set()
    try:
        for _ in range(300):
            for ref in refs:
                try:
                    pages.array(ref).sum()
                    outcomes.add("read")
                except RldbgError:
                    outcomes.add("error")
    finally:
        ended.set()
        cutter.join()
    assert outcomes


@pytest.mark.long
def test_a_long_log_costs_a_reading_a_step_and_opens_whole(tmp_path: Path) -> None:
    """12,000 steps in 300 KB: each is asked for by itself, and none is refused for what the others took."""
    log = tmp_path / "log.jsonl"
    log.write_text("".join(f'{{"step": {step}, "loss": {step % 7}}}\n' for step in range(12_000)))
    doc = open_dump(log, headers=True)
    assert len(doc["records"]) == 12_000
    assert doc["problems"] == []


def test_what_many_records_of_a_file_share_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a listing grows with the square of its steps."""
    log = tmp_path / "log.jsonl"
    log.write_text("".join(f'{{"step": {step}, "loss": {step % 7}}}\n' for step in range(50)))

    def refused(self: Record) -> None:
        raise DumpError("the file ends inside a tensor", file=str(self.path))

    monkeypatch.setattr(Record, "tensors", refused)
    doc = open_dump(log, headers=True)
    assert doc["unreadable"] == 50
    assert len(doc["problems"]) == 1


@pytest.mark.parametrize(("text", "times"), [("8", 8.0), ("inf", 1e6), ("nan", 1.0), ("-3", 1.0), ("much", 1.0)])
def test_what_raises_the_limits_is_a_number_whatever_was_typed(
    text: str, times: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(budget.OPTION, text)
    assert budget.factor() == times


def test_of_records_that_are_read_together_each_is_as_free_as_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "FREE_SECONDS", 0.001)
    budget.forget()

    def looked(records: int) -> None:
        with reading(tmp_path / f"of_{records}", records):
            sum(range(400_000))

    looked(1)
    looked(100)
    assert budget._took[str(tmp_path / "of_100")] == 0 < budget._took[str(tmp_path / "of_1")]
    budget.forget()


def test_a_record_has_no_more_fields_than_its_file_can_name(tmp_path: Path) -> None:
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps({"a": [[[[]]]] * 40_000}))
    (record,) = open_run(path).records
    with pytest.raises(BudgetError) as error:
        record.tensors()
    stored = budget.stored_bytes(path)
    most = budget.FLOOR_FIELDS + stored // budget.BYTES_PER_FIELD
    assert f"at most {most:,} fields of a record, as {stored:,} bytes are stored" in str(error.value)
    assert "RLDBG_BUDGET=8" in str(error.value)


def test_a_record_of_ten_thousand_named_numbers_opens(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, **{f"loss/{i}": i + 0.5 for i in range(10_000)}}))
    (record,) = open_run(path).records
    assert len(record.tensors()) == 10_001
