"""Damaged JSON lines, msgpack and parquet: an error or a problem for that file, never a traceback, hang or flood."""

from __future__ import annotations

import json
import random
import resource
import time
from pathlib import Path

import msgspec
import pytest

from replay_core import pages
from replay_core.dumps import open_run
from replay_core.dumps.containers import read_container
from replay_core.errors import DumpError, RldbgError
from replay_core.records import TensorRef

MAGICS = (b"", bytes(4), b"PK\x03\x04", b"\x80\x02", b"PAR1", b"{", b"[", b"\x93", b"\xff\xd8")
CONTAINERS = ("json", "msgpack", "parquet")
MUTANTS = 300
SLOW_MUTANTS = 2000
MOST_SECONDS = 2.0
MOST_MIB = 512

ROWS = [
    {"step": 1, "sample_idx": i, "token_ids": list(range(i, i + 9)), "logprobs": [-0.5, None, float(i)],
     "text": f"answer {i}", "meta": {"group": i // 2}}
    for i in range(12)
]  # fmt: skip


NEMO = {"token_ids": [[1, 2]], "token_loss_mask": [[0, 1]], "generation_logprobs": [[0.0, -1.0]], "rewards": [0.5]}
BATCH = [[1, 2], [True, True], [0.0, 1.0], [0.0, -1.0], [0, 1], [2], [1.0, 1.0]]
#: Where a framework's file lies, and what it holds where the module's own rows will not do.
DUMPS = {
    "json": ("train_data_step{}.jsonl", json.dumps(NEMO).encode() + b"\n"),
    "msgpack": ("rollouts/step_{}/rank_0.bin", msgspec.msgpack.encode([BATCH, BATCH])),
    "parquet": ("completions/completions_{}.parquet", b""),
}


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    files = {
        "json": b"".join(json.dumps(row).encode() + b"\n" for row in ROWS),
        "msgpack": msgspec.msgpack.encode([list(row.values()) for row in ROWS]),
    }
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return files
    path = tmp_path_factory.mktemp("parquet") / "x.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    return files | {"parquet": path.read_bytes()}


def bytes_of(genuine: dict[str, bytes], container: str) -> bytes:
    if container not in genuine:
        pytest.skip("needs pyarrow")
    return genuine[container]


def look(path: Path) -> RldbgError | None:
    """Read a file to the last value, as a person would; the error it answered with, if any."""
    try:
        run = open_run(path)
        for record in run.records:
            for ref in record.tensors():
                if ref.is_readable:
                    pages.array(ref)
    except RldbgError as error:
        return error
    return None


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_file_cut_anywhere_is_an_error_or_names_what_was_lost(
    genuine: dict[str, bytes], container: str, tmp_path: Path
) -> None:
    data = bytes_of(genuine, container)
    path = tmp_path / "cut.bin"
    for part in range(64):
        cut = data[: len(data) * part // 64]
        path.write_bytes(cut)
        error: DumpError | None = None
        problems: tuple[str, ...] = ()
        try:
            problems = read_container(path).problems
        except DumpError as raised:
            error = raised
        whole_lines = container == "json" and cut.endswith((b"\n", b"}"))
        assert whole_lines or problems or error, part
        assert error is None or str(path) in str(error), part


@pytest.mark.parametrize("container", CONTAINERS)
def test_the_rest_of_a_run_opens_beside_a_damaged_file(
    genuine: dict[str, bytes], container: str, tmp_path: Path
) -> None:
    data = bytes_of(genuine, container)
    place, good = DUMPS[container]
    good = good or data
    for number, content in enumerate((good, good[: len(good) // 3]), 1):
        file = tmp_path / place.format(number)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    run = open_run(tmp_path)
    assert {record.path for record in run.records} == {tmp_path / place.format(number) for number in (1, 2)}
    assert look(tmp_path / place.format(1)) is None
    assert place.format(2).rpartition("/")[2] in str(look(tmp_path / place.format(2)))
    (good_record, *_) = (record for record in run.records if record.path == tmp_path / place.format(1))
    assert good_record.tensors()


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("magic", MAGICS)
def test_another_magic_is_an_error(genuine: dict[str, bytes], container: str, magic: bytes, tmp_path: Path) -> None:
    data = bytes_of(genuine, container)
    path = tmp_path / "liar"
    path.write_bytes(magic + data[max(1, len(magic)) :])
    look(path)
    path.write_bytes(magic)
    assert look(path) is not None


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Some bytes flipped, cut out, doubled, or overwritten with what formats trip over."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        at = chance.randrange(len(changed))
        kind = chance.randrange(5)
        if kind == 0:
            changed[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            changed[at : at + 4] = chance.choice((b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x7f\xff\xff\xff"))
        elif kind == 2:
            del changed[at : at + chance.randrange(1, 64)]
        elif kind == 3:
            changed[at:at] = changed[at : at + chance.randrange(1, 64)]
        else:
            changed[at] = chance.randrange(256)
        if not changed:
            return b""
    return bytes(changed)


def fuzz(data: bytes, folder: Path, count: int, seed: int) -> None:
    chance = random.Random(seed)
    path = folder / "mutant"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        path.write_bytes(mutated(data, chance))
        began = time.process_time()
        look(path)
        assert time.process_time() - began < MOST_SECONDS, number
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024 < MOST_MIB


@pytest.mark.parametrize("container", CONTAINERS)
def test_mutated_files_never_crash_hang_or_flood(genuine: dict[str, bytes], container: str, tmp_path: Path) -> None:
    fuzz(bytes_of(genuine, container), tmp_path, MUTANTS, seed=20251007)


@pytest.mark.slow
@pytest.mark.parametrize("container", CONTAINERS)
def test_many_mutated_files_never_crash_hang_or_flood(
    genuine: dict[str, bytes], container: str, tmp_path: Path
) -> None:
    fuzz(bytes_of(genuine, container), tmp_path, SLOW_MUTANTS, seed=7)


def test_values_of_undamaged_rows_are_what_was_written(genuine: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(genuine["json"])
    tree = read_container(path).tree
    ids: TensorRef = tree["token_ids"]
    assert pages.array(ids).tolist() == [row["token_ids"] for row in ROWS]
