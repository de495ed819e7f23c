"""Two dumps of many ranks: the digests that both recorded first, and only then the values of what differs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from replay_core import kernel, workbench
from replay_core.errors import ExitCode
from replay_core.export.outcome import exit_code
from replay_core.recorder import Recorder

TENSORS, RANKS, WRONG = 200, 512, 341


def record(directory: Path, rank: int, wrong: int | None = None, tensors: int = TENSORS) -> None:
    """What one rank records: ids, and the outputs of its modules; one of them off in one element."""
    torch.manual_seed(0)
    fields = {f"layers.{layer}.mlp.output": torch.randn(2, 64) for layer in range(tensors)}
    if wrong is not None:
        fields[f"layers.{wrong}.mlp.output"][1, 5] += 3
    with Recorder(directory).step(0, rank=rank) as step:
        step("modules", micro=0, input_ids=torch.arange(4).reshape(2, 2), **fields)


def as_rank(directory: Path, rank: int) -> None:
    """The files of rank 0 again, as those of another: 512 recorders would take minutes."""
    index = (directory / "index_rank0.jsonl").read_text()
    renamed = index.replace('"rank": 0', f'"rank": {rank}').replace("_rank0_", f"_rank{rank}_")
    (directory / f"index_rank{rank}.jsonl").write_text(renamed)
    file = Path(json.loads(index.splitlines()[0])["file"])
    shutil.copy(directory / file, directory / file.with_name(file.name.replace("_rank0_", f"_rank{rank}_")))


def two_dumps(directory: Path, ranks: int, wrong_rank: int, tensors: int = TENSORS) -> tuple[Path, Path]:
    for side in "ab":
        record(directory / side, 0, tensors=tensors)
        for rank in range(1, ranks):
            if (side, rank) == ("b", wrong_rank):
                record(directory / side, rank, tensors // 2, tensors)
            else:
                as_rank(directory / side, rank)
    return directory / "a", directory / "b"


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of tensors that were read, by Python alone: what the kernel reads nobody counts."""
    monkeypatch.setattr(kernel, "loaded", lambda: None)
    real, counted = os.preadv, [0]

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = real(descriptor, buffers, offset)
        counted[0] += count
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    return counted


def test_only_what_has_another_digest_is_read_and_the_answer_is_the_same(tmp_path: Path, bytes_read: list[int]) -> None:
    a, b = two_dumps(tmp_path, 6, 4, 20)
    whole = workbench.compare_dumps(a, b)
    all_bytes, bytes_read[0] = bytes_read[0], 0
    doc = workbench.compare_dumps(a, b, digests=True)
    assert doc["counts"] == whole["counts"]
    assert doc["first_divergence"] == whole["first_divergence"]
    first = doc["first_divergence"]
    assert first is not None
    assert (first["name"], first["a_key"]["rank"] if first["a_key"] else None) == ("layers.10.mlp.output", 4)
    assert doc["coverage"]["tensors_by_digest"] == 6 * 20 - 1, "what was not read is counted"
    assert all(row["reason"] == "equal digests; values were not read" for row in doc["tensors"]
               if row["verdict"] == "SAME" and "mlp" in row["name"])  # fmt: skip
    assert bytes_read[0] < 0.05 * all_bytes


def test_what_is_damaged_and_recorded_alike_is_called_equal_by_digest_alone_and_read_without_the_option(
    tmp_path: Path,
) -> None:
    a, b = two_dumps(tmp_path, 2, 1, 4)
    file = next(b.rglob("step_*rank0*"))
    file.write_bytes(file.read_bytes()[:-2000])
    assert exit_code(workbench.compare_dumps(a, b)) == ExitCode.BAD_BYTES
    doc = workbench.compare_dumps(a, b, digests=True)
    assert doc["coverage"]["records_unreadable"] == 1, "its tokens are read, to pair samples by"


def test_digests_that_an_index_lacks_are_taken_of_the_files(tmp_path: Path) -> None:
    a, b = two_dumps(tmp_path, 2, 1, 4)
    for number, index in enumerate(sorted(b.glob("index_*"))):
        index.write_text(index.read_text().replace('"xxh3:', '"md5:') if number else "{not json}\n")
    doc = workbench.compare_dumps(a, b, digests=True)
    assert doc["coverage"]["tensors_by_digest"] == 2 * 4 - 1
    assert [row["name"] for row in doc["tensors"] if row["verdict"] == "DIFF"] == ["layers.2.mlp.output"]
    assert any("digests of 8 tensors of b were taken now" in note for note in doc["notes"])


def foreign(directory: Path, ranks: int, wrong_rank: int) -> tuple[Path, Path]:
    """Two dumps as sglang's dumper writes them: a file for each tensor, no digest anywhere."""
    for side in "ab":
        for rank in range(ranks):
            torch.manual_seed(rank)
            folder = directory / side
            folder.mkdir(parents=True, exist_ok=True)
            for layer in range(6):
                value = torch.randn(3, 64)
                if (side, rank, layer) == ("b", wrong_rank, 2):
                    value[1, 5] += 3
                name = f"name=model.layers.{layer}.mlp.output___rank={rank}___step=0___dump_index={layer}.pt"
                torch.save(
                    {"value": value, "meta": {"name": f"model.layers.{layer}.mlp.output", "rank": rank}}, folder / name
                )
    return directory / "a", directory / "b"


def test_of_foreign_dumps_digests_are_taken_once_and_kept_while_the_files_stay(
    tmp_path: Path, bytes_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replay_core.compare.taken._is_settled", lambda _newest: True)
    a, b = foreign(tmp_path / "dumps", 4, 3)
    keep = tmp_path / "cache"
    told = {"digests": True, "digests_under": keep}
    docs, read = [], []
    for options in ({"name": ("*",)}, told, told):  # of names nobody asks why ranks part, which reads a step twice
        bytes_read[0] = 0
        docs.append(workbench.compare_dumps(a, b, **options))  # type: ignore[arg-type]
        read.append(bytes_read[0])
    assert docs[0]["counts"] == docs[1]["counts"] == docs[2]["counts"]
    first = docs[2]["first_divergence"]
    assert first is not None
    assert docs[0]["first_divergence"] == first
    assert (first["name"], first["b_key"] and first["b_key"]["rank"]) == ("layers.2.mlp.output", 3)
    assert [doc["coverage"]["tensors_by_digest"] for doc in docs] == [0, 23, 23]
    assert read[1] >= read[0], "the first comparison reads all, to take digests"
    assert read[2] < 0.1 * read[0], "the second only the pair that parts"
    # A value changes, and nothing else: the size is the same.
    file = next(one for one in b.iterdir() if "layers.4" in one.name and "rank=0" in one.name)
    held = torch.load(file)
    held["value"][0, 0] += 1
    torch.save(held, file)
    doc = workbench.compare_dumps(a, b, **told)  # type: ignore[arg-type]
    parted = [
        (row["name"], row["b_key"]["rank"]) for row in doc["tensors"] if row["verdict"] == "DIFF" and row["b_key"]
    ]
    assert sorted(parted) == [("layers.2.mlp.output", 3), ("layers.4.mlp.output", 0)]


def test_digests_of_what_was_written_a_moment_ago_are_not_kept_and_a_torn_line_is_as_none(tmp_path: Path) -> None:
    a, b = foreign(tmp_path / "dumps", 1, 0)
    keep = tmp_path / "cache"
    doc = workbench.compare_dumps(a, b, digests=True, digests_under=keep)
    assert not keep.exists()
    assert sum("they are not kept: the files were written a moment ago" in note for note in doc["notes"]) == 2
    keep.mkdir()
    for name in ("x.jsonl", "y.jsonl"):
        (keep / name).write_text('{"of": "' + "0" * 64 + '", "digests": {"a": 1}}\n{"of')
    assert workbench.compare_dumps(a, b, digests=True, digests_under=keep)["counts"] == doc["counts"]


def test_digests_say_nothing_of_samples_in_another_order(tmp_path: Path) -> None:
    """The ids are exchanged and the outputs are not: equal bytes, of other samples."""
    ids, output = torch.arange(8).reshape(2, 4), torch.randn(2, 4, 16)
    for side, given in (("a", ids), ("b", ids.flip(0))):
        with Recorder(tmp_path / side).step(0, rank=0) as step:
            step(
                "modules", micro=0, **{"input_ids": given, "layers.0.mlp.output": output, "layers.1.mlp.output": output}
            )
    assert workbench.compare_dumps(tmp_path / "a", tmp_path / "b")["counts"]["DIFF"] == 2
    doc = workbench.compare_dumps(tmp_path / "a", tmp_path / "b", digests=True)
    assert doc["counts"]["skipped"] == 2
    assert exit_code(doc) != ExitCode.AGREES


@pytest.mark.slow
@pytest.mark.parametrize("digests", [True, False])
def test_one_wrong_tensor_of_a_hundred_thousand_is_found_in_300_mb_and_under_two_percent_of_the_bytes(
    tmp_path: Path, digests: bool
) -> None:
    a, b = two_dumps(tmp_path, RANKS, WRONG)
    code = f"""
import json, os
from pathlib import Path
from replay_core import kernel, workbench
kernel.loaded = lambda: None
real, read = os.preadv, [0]
def preadv(descriptor, buffers, offset):
    count = real(descriptor, buffers, offset)
    read[0] += count
    return count
os.preadv = preadv
doc = workbench.compare_dumps(Path({str(a)!r}), Path({str(b)!r}), digests={digests})
first = doc["first_divergence"]
# Not ru_maxrss: that holds what the process weighed that this one was made of.
peak_kb = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([doc["counts"]["total"], first["name"], first["a_key"]["rank"], read[0], peak_kb / 1024]))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    total, name, rank, read, peak_mb = json.loads(ran.stdout)
    assert (total, name, rank) == (RANKS * (TENSORS + 1), f"layers.{TENSORS // 2}.mlp.output", WRONG)
    assert (read < 0.02 * 2 * RANKS * TENSORS * 2 * 64 * 4) is digests, read
    assert peak_mb <= 300, peak_mb
