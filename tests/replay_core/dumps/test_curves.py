"""Event files of TensorBoard and offline runs of wandb, written here as their libraries write them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_core.dumps import open_run
from replay_core.dumps.containers.wire import WireError, fields, varint
from replay_core.records import Inline, Run


def number(value: int) -> bytes:
    found = b""
    while value > 0x7F:
        found += bytes([value & 0x7F | 0x80])
        value >>= 7
    return found + bytes([value])


def block(field: int, data: bytes) -> bytes:
    return number(field << 3 | 2) + number(len(data)) + data


def tf_record(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + b"\0\0\0\0" + data + b"\0\0\0\0"


def event(step: int, **scalars: float) -> bytes:
    """A tensorflow.Event with the scalars as simple values."""
    values = b"".join(
        block(1, block(1, tag.encode()) + b"\x15" + struct.pack("<f", value)) for tag, value in scalars.items()
    )
    # Like every writer of protocol buffers: a step of 0 is left out.
    return tf_record(b"\x09" + struct.pack("<d", 1.0) + (b"\x10" + number(step) if step else b"") + block(5, values))


VERSION = tf_record(b"\x09" + struct.pack("<d", 1.0) + block(3, b"brain.Event:2"))


def wandb_file(rows: list[dict[str, str]], filler: int = 0) -> bytes:
    """A LevelDB log of history records; values are JSON texts. A filler record makes one cross a block."""
    records = [b"\xa2\x01" + number(filler) + b"x" * filler] if filler else []
    for step, row in enumerate(rows):
        items = b"".join(block(1, block(2, key.encode()) + block(16, text.encode())) for key, text in row.items())
        records.append(block(2, items + block(2, b"\x08" + number(step) if step else b"")))
    out = b":W&B\xe1\xbe\0"
    for record in records:
        kind_first = True
        while True:
            left = (1 << 15) - len(out) % (1 << 15)
            if left < 7:
                out += b"\0" * left
                continue
            part, record = record[: left - 7], record[left - 7 :]
            kind = (1 if kind_first else 4) if not record else (2 if kind_first else 3)
            out += b"\0\0\0\0" + struct.pack("<HB", len(part), kind) + part
            kind_first = False
            if not record:
                break
    return out


def values(run: Run) -> list[tuple[int | None, dict[str, object]]]:
    return [
        (record.key.step, {ref.name: ref.source.value for ref in record.tensors() if isinstance(ref.source, Inline)})
        for record in run.records
    ]


def test_an_event_file_is_a_run_of_scalars(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.1.host").write_bytes(
        VERSION + event(0, **{"train/loss": 0.5}) + event(7, **{"train/loss": 0.25, "train/grad_norm": 1.5})
    )
    run = open_run(tmp_path)
    assert run.dialect == "curves"
    assert values(run) == [(0, {"train/loss": 0.5}), (7, {"train/loss": 0.25, "train/grad_norm": 1.5})]
    assert run.problems == []


def test_a_scalar_written_as_a_tensor_is_read(tmp_path: Path) -> None:
    tensor = b"\x08\x01" + block(4, struct.pack("<f", 0.125))
    summary = block(1, block(1, b"reward") + block(8, tensor))
    picture = block(1, block(1, b"image") + block(4, b"png"))
    (tmp_path / "events.out.tfevents.1").write_bytes(VERSION + tf_record(b"\x10\x03" + block(5, summary + picture)))
    assert values(open_run(tmp_path)) == [(3, {"reward": 0.125})]


def test_an_event_file_that_is_still_written_is_read_to_its_end(tmp_path: Path) -> None:
    whole = VERSION + event(0, loss=0.5) + event(1, loss=0.25)
    (tmp_path / "events.out.tfevents.1").write_bytes(whole[:-9])
    run = open_run(tmp_path)
    assert run.steps() == [0]
    assert "still writes" in run.problems[0].what


@pytest.mark.parametrize("filler", [0, 32700, 32745, 100_000])
def test_an_offline_run_of_wandb_is_a_run_of_scalars(tmp_path: Path, filler: int) -> None:
    rows = [
        {"_step": "0", "train/loss": "0.5", "_runtime": "3"},
        {"_step": "1", "train/loss": "NaN", "text": '"hello"', "flag": "true"},
    ]
    (tmp_path / "run-abc.wandb").write_bytes(wandb_file(rows, filler))
    run = open_run(tmp_path)
    assert [step for step, _ in values(run)] == [0, 1]
    assert values(run)[0][1] == {"train/loss": 0.5}
    (loss,) = values(run)[1][1].values()
    assert loss != loss


def test_an_offline_run_cut_short_says_so(tmp_path: Path) -> None:
    (tmp_path / "run-abc.wandb").write_bytes(wandb_file([{"loss": "0.5"}, {"loss": "0.25"}])[:-3])
    run = open_run(tmp_path)
    assert run.steps() == [0]
    assert "still writes" in run.problems[0].what


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    try:
        for _, _, value in fields(data):
            assert isinstance(value, (int, bytes))
    except WireError:
        pass


def test_a_number_without_an_end_is_refused() -> None:
    for data in (b"\x80" * 3, b"\xff" * 11):
        with pytest.raises(WireError):
            varint(data, 0)


def test_a_record_of_impossible_length_is_no_memory(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.1").write_bytes(VERSION + struct.pack("<Q", 1 << 60) + b"\0" * 40)
    run = open_run(tmp_path)
    assert "impossible" in run.problems[0].what
