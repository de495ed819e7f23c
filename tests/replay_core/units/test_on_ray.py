"""The actors of a Ray cluster do units as any other worker: the same documents, and a death is one outcome."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replay_core import __version__, workbench
from replay_core.compare.judging import kept_figures
from replay_core.errors import ExitCode, RequestError, UnavailableError
from replay_core.executors.in_process import InProcess
from replay_core.units import on_ray as on_ray_module
from tests.replay_core.units.test_working import Counting, compared, write_run

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
ROOT = Path(__file__).resolve().parents[3]


def on_ray(runs: tuple[Path, Path], out: Path, before: str = "", **asked: Any) -> subprocess.CompletedProcess[str]:
    """A driver of its own: Ray holds on to the process that it is started in."""
    code = (
        "import sys; from pathlib import Path; from replay_core import workbench\n"
        f"{before}\n"
        f"asked, out = { {'a': str(runs[0]), 'b': str(runs[1]), **asked}!r}, Path({str(out)!r})\n"
        "doc = workbench.work_units('compare', asked, out, None, None, ray='')\n"
        "import json; print(json.dumps(doc['counts']))"
    )
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "RAY_DEDUP_LOGS": "0"},
    )  # fmt: skip


def documents(out: Path) -> dict[str, Any]:
    return {file.name: {**json.loads(file.read_text()), "created": ""} for file in (out / "documents").iterdir()}


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_it_is_said_which_extra_brings_it(tmp_path: Path) -> None:
    runs = write_run(tmp_path / "a", {}, 2), write_run(tmp_path / "b", {}, 2)
    with pytest.raises(UnavailableError, match="needs ray") as raised:
        workbench.work_units("compare", {"a": str(runs[0]), "b": str(runs[1])}, tmp_path / "out", None,
                             InProcess(lambda *_: None), ray="")  # fmt: skip
    assert raised.value.hint == "pip install 'rldbg[ray]'"
    assert raised.value.exit_code == ExitCode.CELL_FAILED


@needs_ray
@pytest.mark.long
def test_actors_leave_the_documents_that_other_workers_leave(tmp_path: Path) -> None:
    runs = write_run(tmp_path / "a", {}), write_run(tmp_path / "b", {2: 0.5})
    ran = on_ray(runs, tmp_path / "ray")
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert json.loads(ran.stdout.splitlines()[-1])["done"] == 6
    compared(runs, tmp_path / "plain", Counting())
    assert documents(tmp_path / "ray") == documents(tmp_path / "plain")


@needs_ray
@pytest.mark.long
def test_actors_measure_by_name_and_judge_what_they_left(tmp_path: Path) -> None:
    runs = write_run(tmp_path / "a", {}, 2), write_run(tmp_path / "b", {1: 0.5}, 2)
    ran = on_ray(runs, tmp_path / "ray", parts=3)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert json.loads(ran.stdout.splitlines()[-1])["done"] == 8
    compared(runs, tmp_path / "plain", Counting(), parts=3)
    assert documents(tmp_path / "ray") == documents(tmp_path / "plain")


@needs_ray
@pytest.mark.long
def test_an_actor_that_dies_is_tried_twice_more_and_is_one_outcome(tmp_path: Path) -> None:
    runs = write_run(tmp_path / "a", {}, 3), write_run(tmp_path / "b", {}, 3)
    deadly = (
        "from replay_core.units import on_ray\n"
        "class Mortal(on_ray._Worker):\n"
        "    def perform(self, kind, params):\n"
        "        import os\n"
        f"        open({str(tmp_path / 'tried')!r}, 'a').write(params['step'])\n"
        "        if params['step'] == '1':\n"
        "            os.kill(os.getpid(), 9)\n"
        "        return super().perform(kind, params)\n"
        "on_ray._Worker = Mortal\n"
    )
    ran = on_ray(runs, tmp_path / "out", deadly)
    assert ran.returncode == 0, ran.stderr[-2000:]
    counts = json.loads(ran.stdout.splitlines()[-1])
    assert (counts["done"], counts["crashed"], counts["running"]) == (2, 1, 0)
    assert (tmp_path / "tried").read_text().count("1") == 3
    again = Counting()
    compared(runs, tmp_path / "out", again)
    assert again.done == ["1"], "what the cluster did is done"


@needs_ray
@pytest.mark.long
def test_a_wrong_address_is_said(tmp_path: Path) -> None:
    runs = write_run(tmp_path / "a", {}, 2), write_run(tmp_path / "b", {}, 2)
    ran = subprocess.run(
        [sys.executable, "-m", "tui_debugger", "compare", *map(str, runs), "--out", str(tmp_path / "out"),
         "--ray", "127.0.0.1:1"],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert ran.returncode == ExitCode.BAD_REQUEST, ran.stderr[-2000:]
    assert "no Ray cluster" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_machines_with_another_rldbg_are_refused() -> None:
    crew = on_ray_module._Crew(_Inline(version="0.0.9"))
    crew.hire(1)
    with pytest.raises(RequestError, match="another rldbg") as raised:
        crew.welcome(next(iter(crew.coming)))
    assert "0.0.9" in str(raised.value.found)
    assert raised.value.exit_code == ExitCode.BAD_REQUEST


def test_an_address_where_nobody_listens_is_known_at_once() -> None:
    with pytest.raises(OSError, match="refused"):
        on_ray_module._knock("127.0.0.1:1")


SETTINGS = b"\x00\x00\x12\x04\x00\x00\x00\x00\x00"


@pytest.mark.parametrize(
    ("answer", "is_ray"),
    [(SETTINGS, True), (b"HTTP/1.1 400 Bad\r\n", False), (b"", False)],
    ids=["a server's settings", "a web server", "hangs up"],
)
def test_what_listens_and_is_no_ray_is_known_before_ray_tries_it_for_minutes(answer: bytes, is_ray: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answers() -> None:
            door, _ = server.accept()
            with door:
                assert door.recv(99).startswith(b"PRI * HTTP/2.0")
                door.sendall(answer)

        with ThreadPoolExecutor(1) as pool:
            answering = pool.submit(answers)
            knocked = f"127.0.0.1:{server.getsockname()[1]}"
            with nullcontext() if is_ray else pytest.raises(ConnectionError, match="no Ray"):
                on_ray_module._knock(knocked)
            answering.result()


def test_both_versions_of_a_mismatch_are_told() -> None:
    said = RuntimeError(
        "Version mismatch: The cluster was started with:\n    Ray: 2.50.1\nThis process:\n    Ray: 2.60.0"
    )
    assert on_ray_module._in_one_line(said).endswith("with: Ray: 2.50.1 This process: Ray: 2.60.0")
    assert on_ray_module._in_one_line(TimeoutError()) == "TimeoutError()"


class _Answer:
    def __init__(self, told: Any) -> None:
        self.told = told


class _Inline:
    """As much of Ray as units need, in this process: what is asked of an actor is done when it is asked."""

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def __init__(self, *deadly: int, version: str | None = __version__, room: float = 2.0) -> None:
        self._deadly, self._version, self.room = set(deadly), version, room

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.room}

    def remote(self, **_wants: Any) -> Any:
        return lambda worker: SimpleNamespace(remote=lambda: self._actor(worker()))

    def _actor(self, worker: Any) -> Any:
        def perform(kind: str, params: dict[str, Any]) -> Any:
            dies = kind == "measure" and params["part"][0] in self._deadly
            return _Answer(None if dies else worker.perform(kind, params))

        return SimpleNamespace(
            perform=SimpleNamespace(remote=perform),
            version=SimpleNamespace(remote=lambda: _Answer(self._version)),
        )

    def get(self, asked: Any) -> Any:
        if isinstance(asked, list):
            return [self.get(one) for one in asked]
        if asked.told is None:
            raise RuntimeError("the actor died")
        return asked.told

    def wait(self, asked: list[Any], **_more: Any) -> tuple[list[Any], list[Any]]:
        return asked[-1:], asked[:-1]

    def kill(self, _actor: Any) -> None: ...

    def shutdown(self) -> None: ...


def test_what_judges_waits_on_actors_too_and_is_left_where_figures_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = write_run(tmp_path / "a", {}, 2), write_run(tmp_path / "b", {1: 0.5}, 2)
    asked = {"a": str(runs[0]), "b": str(runs[1]), "parts": 3}
    monkeypatch.setattr(kept_figures, "WORTH_KEEPING", 1)
    ray = _Inline(1)
    monkeypatch.setattr(on_ray_module, "_connected", lambda _address: ray)
    doc = workbench.work_units("compare", asked, tmp_path / "ray", None, Counting(), ray="")
    assert [unit["state"] for unit in doc["units"]] == ["done", "crashed", "done", "left"] * 2
    assert [unit["tries"] for unit in doc["units"] if unit["state"] == "crashed"] == [1, 1]
    ray._deadly = set()
    doc = workbench.work_units("compare", asked, tmp_path / "ray", None, Counting(), ray="")
    assert [unit["exit_code"] for unit in doc["units"]] == [None, None, None, 0, None, None, None, 1]
    workbench.work_units("compare", asked, tmp_path / "plain", None, Counting())
    assert documents(tmp_path / "ray") == documents(tmp_path / "plain")


def test_actors_that_never_start_are_an_error_and_are_not_asked_for_again_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = write_run(tmp_path / "a", {}, 2), write_run(tmp_path / "b", {}, 2)
    monkeypatch.setattr(on_ray_module, "_connected", lambda _address: _Inline(version=None))
    with pytest.raises(UnavailableError, match="no actor of the Ray cluster starts") as raised:
        workbench.work_units(
            "compare", {"a": str(runs[0]), "b": str(runs[1])}, tmp_path / "out", None, Counting(), ray=""
        )
    assert raised.value.found == "the actor died"


class _Silent(_Inline):
    """A cluster that places no actor, and has other room once it was asked for one."""

    def __init__(self, later: float) -> None:
        super().__init__()
        self._later = later

    def wait(self, asked: list[Any], **_more: Any) -> tuple[list[Any], list[Any]]:
        self.room = self._later
        return [], asked


def test_a_cluster_whose_last_gpu_is_gone_is_given_no_work_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray_module, "_PATIENCE_S", 0.0)
    crew = on_ray_module._Crew(_Inline(), kind="GPU")
    with pytest.raises(UnavailableError, match="no machine of the Ray cluster is left") as raised:
        crew.look_round(is_at_work=False, left=3)
    assert raised.value.expected == "one with a GPU"


@pytest.mark.parametrize("room", [0.0, 2.0])
def test_a_cluster_without_a_machine_is_told_from_one_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: float
) -> None:
    runs = write_run(tmp_path / "a", {}, 2), write_run(tmp_path / "b", {}, 2)
    cluster, said = _Silent(room), list[str]()
    monkeypatch.setattr(on_ray_module, "_connected", lambda _address: cluster)
    monkeypatch.setattr(on_ray_module, "_PATIENCE_S", 0.0)

    def heard(event: Any) -> None:
        said.append(event.what)
        if said[-1].startswith("waiting"):
            raise KeyboardInterrupt  # whoever asked has seen enough

    asked = {"a": str(runs[0]), "b": str(runs[1])}
    with pytest.raises(UnavailableError if room == 0 else KeyboardInterrupt) as raised:
        workbench.work_units("compare", asked, tmp_path / "out", None, Counting(), heard, ray="")
    if room == 0:
        assert isinstance(raised.value, UnavailableError)
        assert "no machine of the Ray cluster is left" in str(raised.value)
        assert "2 units that are left" in str(raised.value.hint)
    else:
        assert said[-1] == "waiting for room on the cluster"


def test_a_cluster_whose_head_is_gone_is_left_before_ray_ends_this_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    crew = on_ray_module._Crew(_Inline(), address, idle=["an actor"])
    crew.look_round(is_at_work=True, left=3)  # it was asked for just now
    crew.asked_at -= on_ray_module._HEAD_EVERY_S + 1
    crew.look_round(is_at_work=True, left=3)  # and is away for no long time
    crew.heard_at -= on_ray_module._HEAD_AWAY_S + 1
    crew.asked_at -= on_ray_module._HEAD_EVERY_S + 1
    crew.look_round(is_at_work=True, left=3)  # nor is it after this process stood still
    crew.asked_at -= on_ray_module._HEAD_EVERY_S + 1
    with pytest.raises(UnavailableError, match="head of the Ray cluster") as raised:
        crew.look_round(is_at_work=True, left=3)
    assert raised.value.hint == "the same command does the 3 units that are left: what is done is kept"
