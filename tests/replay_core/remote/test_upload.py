"""A dump brought to a bucket: whole or said to be under way, sent once, and never laid over another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
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


def large(folder: Path) -> tuple[Path, bytes]:
    """A dump with a file above 64 MiB."""
    dump, data = record(folder, steps=1), os.urandom(1 << 20) * 66
    (dump / "model.safetensors").write_bytes(data)
    return dump, data


def test_an_object_above_64_mib_goes_in_parts_and_is_whole(store: Objects, tmp_path: Path) -> None:
    dump, data = large(tmp_path / "a")
    found = upload(dump, URL)
    assert store.held["runs/a/model.safetensors"] == data
    assert store.largest <= 8 << 20, "no request holds all of it"
    assert store.puts.count("runs/a/model.safetensors") > 8
    assert not store.parts
    store.puts.clear()
    assert (upload(dump, URL).there, store.puts) == (found.sent, [])


def test_parts_that_are_refused_midway_leave_no_object_and_the_same_command_sends_it(
    store: Objects, tmp_path: Path
) -> None:
    dump, data = large(tmp_path / "a")
    store.takes = 5
    with pytest.raises(DumpError, match="the same command goes on from here"):
        upload(dump, URL)
    assert "runs/a/model.safetensors" not in store.held
    _, left = mirror(URL, tmp_path / "cache", CAP)
    assert any("an upload has not ended" in what for what in left)
    store.takes = 1 << 30
    upload(dump, URL)
    assert store.held["runs/a/model.safetensors"] == data
    assert not mirror(URL, tmp_path / "cache", CAP)[1]


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_upload_ends_soon_says_how_it_goes_on_and_goes_on(
    sign: signal.Signals, store: Objects, tmp_path: Path
) -> None:
    dump = record(tmp_path / "a", steps=40)
    store.waits_at = 6
    words = [sys.executable, "-m", "tui_debugger", "upload", str(dump), URL]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ran:
        until = time.monotonic() + 60
        while len(store.puts) < 6 and time.monotonic() < until:
            time.sleep(0.02)
        began = time.monotonic()
        # The bucket answers nothing any more: an interrupt does not wait for it.
        ran.send_signal(sign)
        _, said = ran.communicate(timeout=60)
        store.goes_on.set()
    assert time.monotonic() - began < 20
    assert ran.returncode in (128 + sign, -sign)
    assert "Traceback" not in said
    if sign == signal.SIGINT:
        assert "the same command goes on from here" in said
    assert not any("index" in key for key in store.held)
    assert f"runs/a/{UPLOADING}" in store.held
    before = len(store.held) - 1
    store.waits_at = 1 << 30
    assert upload(dump, URL).there >= before > 0
    assert f"runs/a/{UPLOADING}" not in store.held
