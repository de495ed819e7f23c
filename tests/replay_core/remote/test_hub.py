"""`hf://`: a repository of the hub at one commit, its files by ranges, and the token only for the hub itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from replay_core.dumps import open_run
from replay_core.errors import DumpError, RequestError, UnavailableError
from replay_core.remote import mirror as mirrors
from replay_core.remote.addresses import address
from replay_core.remote.hub import Hub
from replay_core.remote.mirror import mirror
from tests.replay_core.remote.hub import REPO, HubHandler
from tests.replay_core.remote.objects import Objects, served
from tests.replay_core.remote.test_mirror import CAP, a_dump, tensor

pytest.importorskip("obstore", reason="obstore is not installed")
URL = f"hf://datasets/{REPO}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Objects]:
    with served(HubHandler) as objects:
        monkeypatch.setenv("HF_ENDPOINT", objects.url)
        monkeypatch.setenv("RLDBG_MIRRORS", "")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr("replay_core.remote.objects._FIRST_PAUSE_S", 0.001)
        mirrors._about.cache_clear()
        yield objects


def test_a_url_names_a_repository_a_revision_and_a_folder() -> None:
    one = Hub.of(address("hf://datasets/lab/runs@refs%2Fpr%2F1/step 3/a"))
    assert (one.repo, one.kind, one.revision, one.folder) == ("lab/runs", "dataset", "refs/pr/1", "step 3/a")
    assert Hub.of(address("hf://Lab/Model")).repo == "Lab/Model"
    with pytest.raises(RequestError, match="names no repository"):
        Hub.of(address("hf://datasets/lab"))


def test_a_dump_of_the_hub_reads_as_the_files_themselves_and_is_listed_without_opening_one(
    hub: Objects, tmp_path: Path
) -> None:
    hub.put(a_dump(tmp_path / "a"), "exp/a")
    hub.held["README.md"] = b"beside it"
    path, left = mirror(f"{URL}/exp/a", tmp_path / "cache", CAP)
    assert (left, hub.ranges) == ([], [])
    assert np.array_equal(tensor(path, "weight"), tensor(tmp_path / "a", "weight"))
    assert all(key.startswith("exp/a/") for key, _, _ in hub.ranges)


def test_one_file_of_the_hub_keeps_its_name(hub: Objects, tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", np.arange(9.0))
    hub.held["x/w.npy"] = (tmp_path / "w.npy").read_bytes()
    path, _ = mirror(f"{URL}@main/x/w.npy", tmp_path / "cache", CAP)
    assert path.name == "w.npy"
    assert open_run(path).records


def test_more_than_a_page_of_files_is_listed(hub: Objects, tmp_path: Path) -> None:
    for number in range(2100):
        hub.held[f"many/{number:05}.pt"] = b"x"
    path, _ = mirror(f"{URL}/many", tmp_path, CAP)
    assert (len(list(path.iterdir())), hub.lists) == (2100, 3)


def test_what_another_commit_left_alone_is_not_fetched_again(hub: Objects, tmp_path: Path) -> None:
    hub.put(a_dump(tmp_path / "a"), "a")
    path, _ = mirror(f"{URL}/a", tmp_path / "cache", CAP)
    whole, before = tensor(path, "weight"), len(hub.ranges)
    hub.held["a/another.txt"] = b"new"
    again, _ = mirror(f"{URL}/a", tmp_path / "cache", CAP)
    assert again != path
    assert np.array_equal(tensor(again, "weight"), whole)
    assert {key for key, _, _ in hub.ranges[before:]} <= {"a/another.txt"}


def test_a_commit_that_is_no_longer_there_is_said(hub: Objects, tmp_path: Path) -> None:
    hub.put(a_dump(tmp_path / "a"), "a")
    path, _ = mirror(f"{URL}/a", tmp_path / "cache", CAP)
    hub.put(a_dump(tmp_path / "b", 2.0), "a")  # a server that forgets: its old commit cannot be resolved
    with pytest.raises(DumpError):
        tensor(path, "weight")


def test_a_private_repository_is_read_with_the_token_and_no_other_host_is_given_it(
    hub: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.put(a_dump(tmp_path / "a"), "a")
    hub.refuses = True
    with pytest.raises(RequestError, match="one may not look there") as caught:
        mirror(f"{URL}/a", tmp_path / "cache", CAP)
    assert "HF_TOKEN" in str(caught.value.hint)
    monkeypatch.setenv("HF_TOKEN", HubHandler.token)
    path, _ = mirror(f"{URL}/a", tmp_path / "cache", CAP)
    assert tensor(path, "logprobs").shape == (8,)
    assert hub.headers
    assert not any("uthorization" in name for headers in hub.headers for name in headers)


def test_a_dropped_connection_is_asked_again_and_one_that_always_drops_is_said(hub: Objects, tmp_path: Path) -> None:
    hub.put(a_dump(tmp_path / "a"), "a")
    path, _ = mirror(f"{URL}/a", tmp_path / "cache", CAP)
    hub.drops = 2
    assert np.array_equal(tensor(path, "weight"), tensor(tmp_path / "a", "weight"))
    hub.held["a/more.pt"] = b""
    path, _ = mirror(f"{URL}/a", tmp_path / "fresh", CAP)
    hub.drops = 10**6
    with pytest.raises(DumpError) as caught:
        tensor(path, "weight")
    assert f"{URL}/a/" in str(caught.value.file)
    assert "of-the-cdn" not in str(caught.value)


@pytest.mark.parametrize("url", [f"{URL}/none", "hf://datasets/nobody/nothing", f"{URL}@none/a"])
def test_what_is_not_there_is_said(hub: Objects, tmp_path: Path, url: str) -> None:
    hub.put(a_dump(tmp_path / "a"), "a")
    with pytest.raises(RequestError, match=r"nothing is there|no such repository"):
        mirror(url, tmp_path / "cache", CAP)


def test_a_hub_that_does_not_answer_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UnavailableError, match="does not answer"):
        mirror(f"{URL}/a", tmp_path, CAP)
