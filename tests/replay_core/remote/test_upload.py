"""A dump brought to a bucket: whole or said to be under way, sent once, and never laid over another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from replay_core import workbench
from replay_core.errors import DumpError, RequestError
from replay_core.recorder import Recorder
from replay_core.remote.mirror import UPLOADING, mirror
from replay_core.remote.upload import upload
from tests.replay_core.remote.objects import BUCKET, Objects, served
from tui_debugger.cli import run

pytest.importorskip("obstore", reason="obstore is not installed")
CAP = 1 << 30
URL = f"s3://{BUCKET}/runs/a"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    with served() as objects:
        monkeypatch.setenv("AWS_ENDPOINT_URL", objects.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("RLDBG_MIRRORS", "")
        from replay_core.remote import store as stores

        stores.bucket_of.cache_clear()
        objects.modified = "2030-01-02T03:04:05.000Z"  # after whatever these tests write
        yield objects


def record(folder: Path, rank: int = 0, steps: int = 2, scale: float = 1.0) -> Path:
    with Recorder(folder) as recorder:
        for number in range(steps):
            with recorder.step(number, rank=rank) as step:
                output = scale * torch.arange(64.0)
                step("modules", micro=0, **{"input_ids": torch.arange(4)[None], "layers.0.output": output})
    return folder


def test_a_dump_in_a_bucket_says_what_it_says_here_and_is_sent_once(store: Objects, tmp_path: Path) -> None:
    dump = record(tmp_path / "a")
    files = sorted(path.relative_to(dump).as_posix() for path in dump.rglob("*") if path.is_file())
    found = upload(dump, URL)
    assert (found.sent, found.there, found.left) == (len(files), 0, [])
    assert sorted(store.held) == [f"runs/a/{name}" for name in files], "and no word that an upload is under way"
    assert {name.rpartition("/")[2] for name in store.puts[-2:]} == {"index_rank0.jsonl", "manifest.json"}
    path, left = mirror(URL, tmp_path / "cache", CAP)
    assert not left
    assert workbench.compare_dumps(dump, path)["counts"]["SAME"] == 4
    store.puts.clear()
    again = upload(dump, URL)
    assert (again.sent, again.there, store.puts) == (0, len(files), [])


def test_an_upload_that_broke_off_is_said_to_be_one_and_goes_on_where_it_was(store: Objects, tmp_path: Path) -> None:
    dump = record(tmp_path / "a", steps=6)
    store.takes = 4
    with pytest.raises(DumpError, match="the same command goes on from here"):
        upload(dump, URL)
    assert not any("index" in key for key in store.held), "what names the records comes last"
    _, left = mirror(URL, tmp_path / "cache", CAP)
    assert any("an upload has not ended" in what for what in left)
    before = set(store.puts) - {f"runs/a/{UPLOADING}"}
    store.takes = 1 << 30
    store.puts.clear()
    found = upload(dump, URL)
    assert found.there == len(before) > 0
    assert not before & set(store.puts)
    path, left = mirror(URL, tmp_path / "cache", CAP)
    assert not left
    assert workbench.compare_dumps(dump, path)["counts"]["SAME"] == 12


def test_what_a_trainer_has_written_since_is_sent_and_every_node_brings_its_own(store: Objects, tmp_path: Path) -> None:
    early, later = record(tmp_path / "early", steps=1), record(tmp_path / "node0", steps=2)
    upload(early, URL)
    for file in later.rglob("step_000000*"):
        file.write_bytes((early / file.relative_to(later)).read_bytes())
    upload(later, URL)
    assert {key.rpartition("/")[2] for key in store.puts[-3:]} >= {"step_000001_rank0_micro0.pt", "index_rank0.jsonl"}
    assert store.puts.count("runs/a/modules/step_000000_rank0_micro0.pt") == 1
    found = upload(record(tmp_path / "node1", rank=1), URL)
    assert found.left == ["manifest.json: the one that is there stays, for rank 0 is not of this folder"]
    path, _ = mirror(URL, tmp_path / "cache", CAP)
    assert {entry["key"]["rank"] for entry in workbench.open_dump(path)["records"]} == {0, 1}  # type: ignore[typeddict-item]


def test_the_manifest_of_rank_0_is_kept_whichever_node_comes_first(store: Objects, tmp_path: Path) -> None:
    upload(record(tmp_path / "node1", rank=1), URL)
    first = record(tmp_path / "node0")
    told = (tmp_path / "node1" / "manifest.json").read_text()
    (first / "manifest.json").write_text(told.replace("0", "1", 1))  # as large, and another
    upload(first, URL)
    assert store.held["runs/a/manifest.json"] == (first / "manifest.json").read_bytes()
    upload(tmp_path / "node1", URL)
    assert store.held["runs/a/manifest.json"] == (first / "manifest.json").read_bytes()


def test_another_dump_is_not_laid_over_one(store: Objects, tmp_path: Path) -> None:
    upload(record(tmp_path / "a"), URL)
    held = dict(store.held)
    with pytest.raises(RequestError, match="another dump lies there"):
        upload(record(tmp_path / "b", scale=2.0), URL)
    loose = tmp_path / "loose"
    loose.mkdir()
    torch.save(torch.ones(2), loose / "x.pt")
    with pytest.raises(RequestError, match="something else lies there"):
        upload(loose, URL)
    assert store.held == held


def test_links_and_unfinished_files_are_left_out_and_said(
    store: Objects, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dump = record(tmp_path / "a", steps=1)
    (tmp_path / "secret").write_text("secret")
    os.symlink(tmp_path / "secret", dump / "link.pt")
    (dump / "half.pt.tmp").write_text("half")
    assert run(["upload", str(dump), URL]) == 0
    said = capfd.readouterr()
    assert "left out: link.pt: no plain file" in said.err
    assert "left out: half.pt.tmp: still being written, by its name" in said.err
    assert not any(name.endswith(("link.pt", ".tmp")) for name in store.held)


@pytest.mark.parametrize(("url", "word"), [
    ("hf://datasets/o/n", "nothing is uploaded to hf://"), ("ftp://x/y", "ftp:// is not read"),
    ("s3://", "names no host"),
])  # fmt: skip
def test_where_nothing_can_be_put_is_said(
    url: str, word: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["upload", str(record(tmp_path / "a", steps=1)), url]) == 2
    assert word in capfd.readouterr().err


def test_a_store_that_refuses_is_said(store: Objects, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store.refuses = True
    assert run(["upload", str(record(tmp_path / "a", steps=1)), URL]) == 2
    assert "one may not look there" in capfd.readouterr().err
