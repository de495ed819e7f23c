"""A dump behind a URL: the same answers as beside it, by ranges; what goes wrong is said and nothing of it is kept."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from replay_core import mirrored, pages, workbench
from replay_core.decoding import texts_near
from replay_core.dumps import open_run
from replay_core.errors import DumpError, RequestError, RldbgError
from replay_core.file_spans import open_regular
from replay_core.jobs import Job
from replay_core.remote import mirror as mirrors
from replay_core.remote.mirror import mirror
from tests.builders import write_dump
from tests.replay_core.remote.objects import BUCKET, Objects, served

pytest.importorskip("obstore", reason="obstore is not installed")
CAP = 1 << 30
SECRET = "a-secret-of-this-test"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    with served() as objects:
        monkeypatch.setenv("AWS_ENDPOINT_URL", objects.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("RLDBG_MIRRORS", "")  # what a mirror says of its place ends with the test
        mirrors._about.cache_clear()
        from replay_core.remote import store as stores

        stores.bucket_of.cache_clear()
        yield objects


def a_dump(folder: Path, scale: float = 1.0, rows: int = 400) -> Path:
    weight = np.arange(rows * 1000, dtype=np.float32).reshape(rows, 1000) * np.float32(scale)
    small = np.linspace(-1, 0, 8, dtype=np.float32)
    return write_dump(folder, {"modules": {"layer.weight": weight, "logprobs": small}})


def tensor(run_path: Path, name: str) -> np.ndarray:
    (record,) = open_run(run_path).records
    return pages.array(next(ref for ref in record.tensors() if ref.name.endswith(name)))


def test_listing_opens_no_object(store: Objects, tmp_path: Path) -> None:
    for number in range(1200):
        store.held[f"many/{number:05}.pt"] = b"x"
    path, left = mirror(f"s3://{BUCKET}/many", tmp_path, CAP)
    assert (len(list(path.iterdir())), left, store.ranges, store.lists) == (1200, [], [], 2)


def test_a_comparison_says_what_it_says_of_the_files_themselves(store: Objects, tmp_path: Path) -> None:
    a, b = a_dump(tmp_path / "a"), a_dump(tmp_path / "b", 1.5)
    here = workbench.compare_dumps(a, b)
    there = workbench.compare_dumps(
        *(mirror(store.put(path, path.name), tmp_path / "cache", CAP)[0] for path in (a, b))
    )
    rows = [[{**row, "a": 0, "b": 0} for row in doc["tensors"]] for doc in (here, there)]
    assert json.dumps(rows[0], default=str) == json.dumps(rows[1], default=str)
    assert rows[0]


def test_one_row_of_a_tensor_costs_no_whole_file(store: Objects, tmp_path: Path) -> None:
    dump = a_dump(tmp_path / "a", rows=4000)
    url = store.put(dump, "a")
    path, _ = mirror(url, tmp_path / "cache", CAP)
    (record,) = open_run(path).records
    ref = next(one for one in record.tensors() if one.name.endswith("weight"))
    row = pages.part(ref, [(3000, 3001)])
    assert row[0, :3].tolist() == [3_000_000.0, 3_000_001.0, 3_000_002.0]
    assert store.bytes_sent < 0.05 * sum(map(len, store.held.values()))
    before = len(store.ranges)
    assert pages.part(ref, [(3000, 3001)])[0, 0] == 3_000_000.0
    assert len(store.ranges) == before


def test_a_connection_that_ends_midway_is_asked_again(store: Objects, tmp_path: Path) -> None:
    path, _ = mirror(store.put(a_dump(tmp_path / "a"), "a"), tmp_path / "cache", CAP)
    open_run(path)
    store.drops = 2
    assert np.array_equal(tensor(path, "weight"), tensor(tmp_path / "a", "weight"))
    assert store.drops == 0


def test_a_connection_that_always_ends_is_said_and_nothing_of_it_is_kept(
    store: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replay_core.remote.objects._FIRST_PAUSE_S", 0.001)
    path, _ = mirror(store.put(a_dump(tmp_path / "a"), "a"), tmp_path / "cache", CAP)
    tensor(path, "logprobs")
    store.drops = 10**6
    with pytest.raises(DumpError) as caught:
        tensor(path, "weight")
    assert "s3://bucket/a/" in str(caught.value.file)
    assert caught.value.hint
    store.drops = 0
    assert np.array_equal(tensor(path, "weight"), tensor(tmp_path / "a", "weight"))


def test_an_object_that_changes_between_two_reads_is_no_mixture(store: Objects, tmp_path: Path) -> None:
    dump = a_dump(tmp_path / "a")
    url = store.put(dump, "a")
    path, _ = mirror(url, tmp_path / "cache", CAP)
    tensor(path, "logprobs")
    store.put(a_dump(tmp_path / "b", 2.0), "a")
    with pytest.raises(DumpError, match="written anew"):
        tensor(path, "weight")
    again, _ = mirror(url, tmp_path / "cache", CAP)
    assert again != path
    assert np.array_equal(tensor(again, "weight"), tensor(tmp_path / "b", "weight"))


def test_what_has_not_changed_is_not_fetched_again(store: Objects, tmp_path: Path) -> None:
    url = store.put(a_dump(tmp_path / "a"), "a")
    whole = tensor(mirror(url, tmp_path / "cache", CAP)[0], "weight")
    before = len(store.ranges)
    store.held["a/another.txt"] = b"new"
    again, _ = mirror(url, tmp_path / "cache", CAP)
    assert np.array_equal(tensor(again, "weight"), whole)
    assert {key for key, _, _ in store.ranges[before:]} <= {"a/another.txt"}


def test_a_half_uploaded_object_is_truncated(store: Objects, tmp_path: Path) -> None:
    url = store.put(a_dump(tmp_path / "a"), "a")
    largest = max(store.held, key=lambda key: len(store.held[key]))
    store.held[largest] = store.held[largest][: len(store.held[largest]) // 2]
    path, _ = mirror(url, tmp_path / "cache", CAP)
    assert open_run(path).records
    with pytest.raises(DumpError):
        tensor(path, "weight")


def test_a_full_cache_reads_and_keeps_nothing_more(store: Objects, tmp_path: Path) -> None:
    path, _ = mirror(store.put(a_dump(tmp_path / "a"), "a"), tmp_path / "cache", 300_000)
    assert np.array_equal(tensor(path, "weight"), tensor(tmp_path / "a", "weight"))
    assert sum(file.stat().st_blocks * 512 for file in (tmp_path / "cache").rglob("*")) < 600_000


@pytest.mark.parametrize("name", ["../../out.pt", "/etc/passwd", "a\x01b.pt", "x/./y.pt"])
def test_no_object_names_a_file_elsewhere(store: Objects, tmp_path: Path, name: str) -> None:
    store.held |= {"d/fine.pt": b"1", f"d/{name}": b"2"}
    with pytest.raises(RequestError, match="a name that no file can have"):
        mirror(f"s3://{BUCKET}/d", tmp_path, CAP)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["w\\in.pt", "n" * 300, "\u202etp.x", "fine.pt/below"])
def test_an_object_whose_name_is_no_files_is_left_out_and_said(store: Objects, tmp_path: Path, name: str) -> None:
    store.held |= {"d/fine.pt": b"1", "d/other.pt": b"1", f"d/{name}": b"2"}
    path, left = mirror(f"s3://{BUCKET}/d", tmp_path, CAP)
    assert "other.pt" in {file.name for file in path.rglob("*")}
    assert len(left) == 1
    assert "left out" in left[0]


def test_a_file_behind_http_is_read_by_ranges(store: Objects, tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", np.arange(9.0))
    store.held["x/w.npy"] = (tmp_path / "w.npy").read_bytes()
    path, _ = mirror(f"{store.url}/{BUCKET}/x/w.npy", tmp_path / "cache", CAP)
    assert path.name == "w.npy"
    (record,) = open_run(path).records
    assert pages.array(next(iter(record.tensors()))).tolist() == list(range(9))


def test_the_tokenizer_of_a_remote_dump_decodes(store: Objects, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    store.held["d/tokenizer.json"] = Tokenizer(models.WordLevel({"yes": 0, "no": 1}, unk_token="no")).to_str().encode()
    path, _ = mirror(f"s3://{BUCKET}/d", tmp_path, CAP)
    assert texts_near([1, 0], path) == ["no", "yes"]


def test_nothing_there_and_not_allowed_are_two_errors(store: Objects, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="nothing is there"):
        mirror(f"s3://{BUCKET}/none", tmp_path, CAP)
    with pytest.raises(RequestError, match="nothing is there") as caught:
        mirror("s3://another/none", tmp_path, CAP)
    assert "AWS_ACCESS_KEY_ID" not in str(caught.value.hint), "credentials are not what is wrong"
    store.refuses = True
    with pytest.raises(RequestError, match="may not look") as caught:
        mirror(f"s3://{BUCKET}/none", tmp_path, CAP)
    assert "AWS_ACCESS_KEY_ID" in str(caught.value.hint)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url", [f"http://me:{SECRET}@h/x", f"https://h/x?X-Amz-Signature={SECRET}", f"http://a:b@{SECRET}@h/x"]
)
def test_a_secret_in_a_url_is_refused_and_not_repeated(url: str, tmp_path: Path) -> None:
    with pytest.raises(RldbgError) as caught:
        mirror(url, tmp_path, CAP)
    assert SECRET not in str(caught.value)


def test_a_dump_that_brings_the_layout_of_a_mirror_is_refused_and_nobody_is_asked(
    store: Objects, tmp_path: Path
) -> None:
    """Its address would be asked for bytes by whoever opens the folder; and read by plain means its holes are zeros."""
    path, _ = mirror(store.put(a_dump(tmp_path / "a"), "a"), tmp_path / "theirs", CAP)
    (tmp_path / "brought").symlink_to(tmp_path / "theirs")
    mirror(store.put(a_dump(tmp_path / "b"), "b"), tmp_path / "own", CAP)
    asked = len(store.ranges), store.lists
    for folder in (path, tmp_path / "brought" / path.relative_to(tmp_path / "theirs")):
        with pytest.raises(DumpError, match="a part of a cache of remote objects"):
            tensor(folder, "layer.weight")
    assert (len(store.ranges), store.lists) == asked
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for _ in range(8):
        with pytest.raises(DumpError):
            open_regular(next(file for file in path.rglob("*") if file.is_file()))
    assert not before or len(os.listdir("/proc/self/fd")) == before, "a file that is refused is closed"


def test_a_folder_that_is_called_as_mirrors_are_is_read_as_any_other(tmp_path: Path) -> None:
    dump = a_dump(tmp_path / mirrored.FOLDER / "mine")
    assert tensor(dump, "logprobs").shape == (8,)


def test_what_runs_a_model_refuses_a_remote_dump(tmp_path: Path) -> None:
    from replay_core.desk import perform

    with pytest.raises(RequestError, match="read, not run"):
        perform(Job("replay", {"path": f"{tmp_path}/{mirrored.FOLDER}/x/tree"}))


def test_the_command_line_takes_a_url(store: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tui_debugger.commands.ls import command

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = store.put(a_dump(tmp_path / "a"), "a")
    ran = CliRunner().invoke(command, [url, "--json"], standalone_mode=False)
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["records"]


def test_people_are_told_the_address_and_documents_keep_the_path_that_opens_again(
    store: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tui_debugger.commands.group import cli
    from tui_debugger.failing import fail

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(mirrored, "_ADDRESSES", {})
    a, url = a_dump(tmp_path / "a"), store.put(a_dump(tmp_path / "b", 1.5), "b")
    asked = ["compare", str(a), url, "--output", str(tmp_path / "doc.json")]
    said = CliRunner().invoke(cli, asked, standalone_mode=False)
    kept = json.loads((tmp_path / "doc.json").read_text())
    assert (said.return_value, f"b  {url}" in said.output, "rldbg-remote" in said.output) == (1, True, False)
    assert Path(kept["b"]["path"]).is_dir()
    fail(str(CliRunner().invoke(cli, ["ls", url, "--step", "7"], standalone_mode=False).exception))
    assert f"file:     {url}\n" in capsys.readouterr().err
