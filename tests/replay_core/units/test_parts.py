"""A step's tensors measured in parts by name and judged in one: the answer of one worker, to the letter."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import astuple

from replay_core import workbench
from replay_core.compare import among_ranks, measure_part
from replay_core.compare.judging import kept_figures, measuring
from replay_core.compare.judging.kept_figures import KeptFigures, line_of
from replay_core.desk import perform
from replay_core.dumps import open_run
from replay_core.errors import ChildDiedError, RequestError
from replay_core.executors.in_process import InProcess
from replay_core.export.outcome import exit_code
from replay_core.jobs import Answer, Job, OnEvent, ignore
from replay_core.recorder import Recorder
from replay_core.records import Selection
from replay_core.units.folder import UnitFolder
from replay_core.units.shard import Shard
from tui_debugger.reports.gathering import gathering_report

PARTS = 3
FIRST_FOUR = [2, 2, 3, 3]


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_figures, "WORTH_KEEPING", 1)


def write(directory: Path, fault: str = "", seed: int = 0, ranks: int = 2, steps: int = 1) -> Path:
    """Two ranks' outputs, gradients and log-probabilities of padded samples, with one fault on the way."""
    recorder = Recorder(directory)
    for step in range(steps):
        for rank in range(ranks):
            generator = torch.Generator().manual_seed(100 * seed + 10 * step + rank)
            ids_BS = torch.randint(1, 90, (3, 8), generator=generator)
            mask_BS = torch.ones_like(ids_BS)
            mask_BS[1, 5:] = 0
            modules = {
                f"layers.{layer}.mlp.output": torch.randn(3, 8, 16, generator=generator).to(torch.bfloat16)
                for layer in range(4)
            }
            logprobs_BS = -torch.rand(3, 8, generator=generator)
            gradients = {f"layers.{layer}.mlp.weight": torch.randn(16, 16, generator=generator) for layer in range(3)}
            spoil(fault, rank, modules, gradients, logprobs_BS)
            order = [2, 0, 1] if fault == "order" else [0, 1, 2]
            with recorder.step(step, rank=rank) as record:
                record("batch_inputs", micro=0, input_ids=ids_BS[order], attention_mask=mask_BS[order])
                record("modules", {name: one[order] for name, one in modules.items()}, micro=0)
                record("forward_data", micro=0, log_probs=logprobs_BS[order])
                record("gradient", {f"grad.{name}": one for name, one in gradients.items()})
    return directory


def spoil(fault: str, rank: int, modules: dict[str, Any], gradients: dict[str, Any], logprobs_BS: torch.Tensor) -> None:
    if fault == "noise":
        for one in modules.values():
            one *= 1 + 2**-8
    elif fault == "row" and rank == 1:
        modules["layers.2.mlp.output"][1, 2] *= 1.5
    elif fault == "nan":
        modules["layers.3.mlp.output"][0, 0, 0] = float("nan")
    elif fault == "padding":
        modules["layers.0.mlp.output"][1, 6] = 9.0
    elif fault == "gain":
        gradients["layers.1.mlp.weight"] *= 2
    elif fault == "logprobs":
        logprobs_BS[2, 3] += 0.7
    elif fault == "shape":
        gradients["layers.1.mlp.weight"] = gradients["layers.1.mlp.weight"][:8].clone()
    elif fault == "missing":
        del modules["layers.1.mlp.output"]
    elif fault == "fp32":
        modules["layers.1.mlp.output"] = modules["layers.1.mlp.output"].float() * (1 + 1e-4)


FAULTS = ("", "noise", "row", "nan", "padding", "gain", "logprobs", "shape", "missing", "fp32", "order")


class Runner:
    """The real workbench, in this process; dies of the jobs it is told to."""

    def __init__(self, *deadly: int) -> None:
        self.jobs: list[Job] = []
        self.deadly = set(deadly)
        self._inner = InProcess(perform)

    def run(self, job: Job, on_event: OnEvent = ignore) -> Answer:
        self.jobs.append(job)
        if job.params.get("part") and job.params["part"][0] in self.deadly:
            raise ChildDiedError("the child process ended", found="signal 9")
        return self._inner.run(job, on_event)


def compared(
    a: Path, b: Path, out: Path, runner: Runner | None = None, shard: Shard | None = None, **asked: Any
) -> Any:
    params = {"a": str(a), "b": str(b), "parts": PARTS, **asked}
    return workbench.work_units("compare", params, out, shard, runner or Runner())


def judged(out: Path, doc: Any) -> list[Any]:
    """The documents of the units that judge, without when they were made."""
    files = [unit["file"] for unit in doc["units"] if unit["file"] is not None]
    found = [json.loads(Path(file).read_text()) for file in files]
    for one in found:
        del one["created"]
    return found


def alone(a: Path, b: Path, **asked: Any) -> Any:
    doc = json.loads(json.dumps(workbench.compare_dumps(a, b, **asked)))
    del doc["created"]
    return doc


@pytest.mark.parametrize("fault", FAULTS)
def test_the_judged_document_is_that_of_one_worker_whatever_is_wrong(fault: str, tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", fault)
    doc = compared(a, b, tmp_path / "units")
    (found,) = judged(tmp_path / "units", doc)
    whole = alone(a, b, **{"step": Selection.parse("0")})
    assert found == whole
    assert doc["counts"]["done"] == PARTS + 1


@given(seed=st.integers(0, 50), fault=st.sampled_from(FAULTS), exact=st.booleans(), ranks=st.integers(1, 2))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_run_in_any_number_of_shards_is_judged_as_alone(
    seed: int, fault: str, exact: bool, ranks: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tmp_path = tmp_path_factory.mktemp("runs")
    a, b = write(tmp_path / "a", "", seed, ranks), write(tmp_path / "b", fault, seed, ranks)
    shards = [Shard(number, 3) for number in range(1, 4)]
    # Backwards: the judge's own worker comes first, and the one that leaves the last figures judges.
    docs = [compared(a, b, tmp_path / "units", shard=shard, exact=exact) for shard in reversed(shards)]
    assert docs[0]["counts"]["left"] == 1
    assert (docs[0]["agrees"], int(exit_code(docs[0]))) == (None, 4)
    # A part that only measures has found nothing, and says neither that the two agree nor that they do not.
    assert (docs[1]["agrees"], docs[1]["counts"]["agree"], int(exit_code(docs[1]))) == (None, 0, 0)
    assert gathering_report(docs[1]).startswith("MEASURED")
    (found,) = judged(tmp_path / "units", workbench.gather(tmp_path / "units"))
    assert found == alone(a, b, exact=exact, step=Selection.parse("0"))


def test_the_judge_reads_no_tensor_that_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", "row")
    looked: list[str] = []
    real = measuring.measure

    def heard(pair: Any, *rest: Any, **more: Any) -> Any:
        looked.append(pair.name)
        return real(pair, *rest, **more)

    runner = Runner()
    monkeypatch.setattr(measuring, "measure", heard)
    # Why ranks part is asked of the step that parts, read once more: not here.
    monkeypatch.setattr(among_ranks, "MOST_BYTES", 0)
    compared(a, b, tmp_path / "units", runner)
    of_all = looked.copy()
    assert sum(name.endswith("mlp.output") for name in of_all) == 8  # of four layers of two ranks, each once
    assert sorted(name for name in of_all if name.startswith("grad.")) == sorted(
        f"grad.layers.{layer}.mlp.weight" for layer in range(3) for _ in range(2)
    )


def read_so_far() -> int:
    """Bytes that this process has read, from the disk or its cache."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(not os.access("/proc/self/io", os.R_OK), reason="this system does not count what is read")
def test_the_judge_reads_figures_in_place_of_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_figures, "WORTH_KEEPING", 1 << 16)
    for side in "ab":
        generator = torch.Generator().manual_seed(0)
        modules = {f"layers.{layer}.output": torch.randn(128, 1024, generator=generator) for layer in range(16)}
        modules["layers.9.output"][5] *= 1.0 if side == "a" else 1.5
        modules["layers.12.output"] *= 1.0 if side == "a" else 1 + 1e-6
        with Recorder(tmp_path / side).step(0) as record:
            record("modules", modules, micro=0)
    a, b = tmp_path / "a", tmp_path / "b"
    doc = compared(a, b, tmp_path / "units")
    files = [UnitFolder(tmp_path / "units").figures(unit["id"]) for unit in doc["units"][:-1]]
    before = read_so_far()
    found = json.loads(json.dumps(workbench.compare_dumps(a, b, measured=files)))
    read = read_so_far() - before
    tensors = 2 * 16 * 128 * 1024 * 4
    assert read < 0.05 * tensors, f"{read:,} bytes of {tensors:,}"
    before = read_so_far()
    del found["created"]
    assert found == alone(a, b)
    assert read_so_far() - before > 0.9 * tensors  # or this test sees nothing
    assert [row["name"] for row in found["tensors"] if row["verdict"] != "SAME"]


def test_a_part_that_died_is_named_and_nothing_is_judged_until_it_is_done(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", "row")
    doc = compared(a, b, tmp_path / "units", Runner(1))
    states = {unit["label"]: unit["state"] for unit in doc["units"]}
    assert states == {"step 0, names 1/3": "done", "step 0, names 2/3": "crashed", "step 0, names 3/3": "done",
                      "step 0": "left"}  # fmt: skip
    assert doc["units"][-1]["said"] == "waits for step 0, names 2/3"
    assert doc["agrees"] is None
    assert doc["counts"]["agree"] == doc["counts"]["diverge"] == 0
    runner = Runner()
    again = compared(a, b, tmp_path / "units", runner)
    assert [job.params.get("part") for job in runner.jobs] == [[1, PARTS], None]
    assert again["agrees"] is False
    assert again["counts"]["done"] == PARTS + 1
    assert judged(tmp_path / "units", again) == [alone(a, b, step=Selection.parse("0"))]


def test_figures_that_are_gone_are_measured_anew_before_anything_is_judged(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b")
    doc = compared(a, b, tmp_path / "units")
    folder = UnitFolder(tmp_path / "units")
    folder.figures(doc["units"][0]["id"]).unlink()
    folder.document(doc["units"][-1]["id"]).unlink()
    told = workbench.gather(tmp_path / "units")
    assert told["units"][0]["said"] == "its figures are gone: it runs again"
    assert [unit["state"] for unit in told["units"]] == ["left", "done", "done", "left"]
    assert compared(a, b, tmp_path / "units")["agrees"] is True


def test_a_killed_worker_leaves_no_figures_and_what_it_had_written_goes(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b")
    doc = compared(a, b, tmp_path / "units", Runner(0, 1, 2))
    assert doc["counts"]["crashed"] == PARTS
    folder = UnitFolder(tmp_path / "units")
    figures = folder.figures(doc["units"][0]["id"])
    half = figures.with_name(f".{figures.name}.{2**22 + 1}-0.tmp")  # no process has that number
    figures.parent.mkdir(exist_ok=True)
    half.write_bytes(b'{"of":"')
    os.utime(half, (1, 1))
    again = compared(a, b, tmp_path / "units")
    assert again["agrees"] is True
    assert not half.exists()
    assert sorted(one.name for one in figures.parent.iterdir()) == sorted(
        f"{unit['id']}.jsonl" for unit in again["units"][:-1]
    )


DAMAGES = [(b'"kind"', b'"king"'), (b'"shift":null', b'"shift":{"number":"<f8","bytes":""}')]


@pytest.mark.parametrize(("part", "damaged"), DAMAGES)
def test_damaged_figures_are_measured_by_the_judge(part: bytes, damaged: bytes, tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", "row")
    doc = compared(a, b, tmp_path / "units")
    changed = 0
    folder = UnitFolder(tmp_path / "units")
    for unit in doc["units"][:-1]:
        written = folder.figures(unit["id"]).read_bytes()
        folder.figures(unit["id"]).write_bytes(told := written.replace(part, damaged))
        changed += told != written
    assert changed
    folder.document(doc["units"][-1]["id"]).unlink()
    again = compared(a, b, tmp_path / "units")
    assert judged(tmp_path / "units", again) == [alone(a, b, step=Selection.parse("0"))]


def test_another_number_of_parts_is_another_question(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b")
    compared(a, b, tmp_path / "units")
    with pytest.raises(RequestError, match="another request"):
        compared(a, b, tmp_path / "units", parts=4)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, Struct):
        return same(astuple(one), astuple(other))
    return repr(one) == repr(other)


@pytest.mark.parametrize("fault", FAULTS)
def test_figures_come_back_bit_by_bit(fault: str, tmp_path: Path) -> None:
    a, b = open_run(write(tmp_path / "a")), open_run(write(tmp_path / "b", fault))
    roots, met = (a.path, b.path), 0
    with open(tmp_path / "lines", "wb") as file:
        kept = []
        for pair, micro_pair, found in measure_part(a, b, a.records, b.records, (0, 1)):
            file.write(line_of(pair, micro_pair, found, roots))
            kept.append((copy.copy(pair), micro_pair, found))
            file.flush()
            back = KeptFigures([tmp_path / "lines"], roots).get(pair, micro_pair)
            assert back is not None
            assert (back.rows is None) is (found.rows is None)
            back.rows = found.rows = None
            assert same(found, back)
            met += 1
    assert met >= 10


def test_names_fall_into_the_same_parts_in_every_process_and_into_all_of_them() -> None:
    # blake2b of the name, its first eight bytes as a number, modulo 4: worked out by `b2sum -l 64`.
    found = [kept_figures.part_of(f"layers.{layer}.mlp.output", 4) for layer in range(60)]
    assert found[:4] == FIRST_FOUR
    assert set(found) == {0, 1, 2, 3}
