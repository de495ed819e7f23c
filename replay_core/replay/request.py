"""A whole replay request: one setting or a matrix, the recording beside it, several models, run twice.

`answer` runs it through a Runner and gives what the document is made of. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from replay_core.dumps import open_run
from replay_core.errors import RequestError
from replay_core.jobs import OnEvent, Runner, ignore
from replay_core.records import Run
from replay_core.replay.axes import Axes
from replay_core.replay.losses import Loss
from replay_core.replay.matrix import Bench, CellResult, breaking, cells_for, failing, floors, run_axes
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.reading import RecordedBatch, read_batch
from replay_core.replay.recorded import AGAINST, Recorded, against, against_params, against_training, read_recorded
from replay_core.replay.references import RANDOM


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked beside the plan.

    matrix: axes as text (empty: the default three); None for one setting beside its reference.
    models, against: several models in place of the plan's, ranked by a recorded log-probability.
    twice: run the last cell asked for once more and say whether this machine repeats itself.
    is_warm: the cells share a child, so time and memory depend on their order.
    """

    matrix: str | None = None
    models: tuple[str, ...] = ()
    against: str | None = None
    twice: bool = False
    is_warm: bool = False


@dataclass(slots=True)
class Replayed:
    """Everything a request had to say; `results[baseline]` is the reference."""

    results: list[CellResult]
    baseline: int = 0
    axes: Axes | None = None
    floors: dict[str, Any] = field(default_factory=dict)
    breaking: list[dict[str, Any]] = field(default_factory=list)
    failing: list[dict[str, Any]] = field(default_factory=list)
    determinism: dict[str, Any] | None = None
    ranking: dict[str, Any] | None = None
    recording: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    is_warm: bool = False
    #: The role that was replayed, where nobody named it and its records are a critic's.
    role: str | None = None


def answer(plan: ReplayPlan, request: Request, out: Path, runner: Runner, on_event: OnEvent = ignore) -> Replayed:
    """Run everything a request asks for.

    Raises:
        RldbgError: the request itself is wrong (no such record, no such model): no cell can run.
    """
    if isinstance(plan.loss, str):
        plan = replace(plan, loss=Loss.parse(plan.loss))
    run = open_run(Path(plan.dump))
    recorded = read_batch(run, plan)
    if plan.role is None and recorded.key.role == "critic":
        # Nothing but a critic's records there: log-probabilities would be held to its values.
        plan = replace(plan, role=recorded.key.role)
    values, notes = read_recorded(run, plan, recorded)
    stranger = _stranger(run, plan)
    if values and stranger is not None:
        notes = [*notes, f"recorded {values[0].field} is not held to the replay: {stranger}"]
    bench = Bench(plan, out, runner, on_event)
    replayed = Replayed(bench.results, notes=notes, is_warm=request.is_warm, role=plan.role)
    if request.models:
        _rank(bench, request, recorded, values, replayed)
        return replayed
    if request.matrix is not None:
        # An axis that cannot be read must not cost a cell first.
        replayed.axes = Axes.parse(request.matrix)
        bench.results.append(_recording_row(run, recorded))
        replayed.baseline = 1
        bench.plan = replace(plan, forward=None)
        run_axes(bench, replayed.axes, recorded.batch.rows)
        if plan.forward is not None:
            bench.run(plan.flags, "cell", forward=plan.forward)
        replayed.breaking, replayed.failing = breaking(bench.results), failing(bench.results)
    else:
        for flags, part in cells_for(plan.flags):
            mine = part == "cell" and plan.forward is not None
            bench.run(flags, "control" if mine else part, forward=None)
        if plan.forward is not None:
            bench.run(plan.flags, "cell")
    _hold_to_recording(bench.results, recorded, values, run)
    if stranger is not None:
        _not_judged(bench.results, stranger)
    replayed.recording = _recording(values, bench.results, is_judged=stranger is None)
    if request.matrix is not None:
        _judge_recording(bench.results[0], bench.baseline)
    replayed.floors = floors(bench.results)
    if request.twice:
        replayed.determinism = bench.repeat(bench.results[-1])
    return replayed


def _recording_row(run: Run, recorded: RecordedBatch) -> CellResult:
    """Row 0 of a matrix: what the trainer recorded, and the settings it named. Nothing is run for it."""
    cell: dict[str, Any] = {
        "flags": _known_flags(run), "effective": None, "outcome": "ran", "error": None, "notes": [], "time": None,
        "memory": None, "dump": str(run.path), "final_hidden": None, "key": recorded.key.to_mapping(),
    }  # fmt: skip
    return CellResult(cell, run, part="recording", asked=False)


def _known_flags(run: Run) -> dict[str, Any]:
    """The settings a dump says its trainer used, as far as replay has them."""
    said = run.flags or {}
    return dict(said.get("asked", said))


def _hold_to_recording(
    results: Sequence[CellResult], recorded: RecordedBatch, values: Sequence[Recorded], run: Run
) -> None:
    trained_in_fp32 = _known_flags(run).get("dtype") in ("float32", "fp32", "torch.float32")
    for result in results:
        if result.run is None or result.part == "recording":
            continue
        if result.cell.get("loss"):
            micros = tuple(one["micro"] for one in result.cell["loss"]["micros"])
            result.training = against_training(run, result.run, recorded.key, micros)
        if result.cell.get("optimizer"):
            result.params = against_params(run, result.run, recorded.key)
        fp32 = trained_in_fp32 and result.cell["flags"]["dtype"] == "float32"
        result.recorded = [against(value, result.run, recorded.batch, known_fp32=fp32) for value in values]


def _stranger(run: Run, plan: ReplayPlan) -> str | None:
    """Why the replay's weights are none that computed the recording; None where they may be."""
    if not plan.model.startswith(RANDOM) or plan.model in run.models.values():
        return None
    return f"{plan.model} has other weights than computed it, so how far they are apart says nothing"


def _not_judged(results: Sequence[CellResult], why: str) -> None:
    """The figures stay; no verdict of them, be it that the recording is wrong or that it happens to be near."""
    for result in results:
        result.recorded = [{**one, "verdict": None, "reason": why} for one in result.recorded]
        if result.training is not None:
            result.training = {**result.training, "agrees": None, "sentence": f"not judged: {why}"}
        if result.params is not None:
            result.params = {**result.params, "sentence": f"not judged: {why}"}


def _judge_recording(row: CellResult, baseline: CellResult) -> None:
    row.recorded = baseline.recorded
    if not row.recorded:
        row.cell["notes"] = ["the record holds no log-probabilities: nothing of the recording can be compared"]
        return
    verdict = row.recorded[0]["verdict"]
    row.agrees = None if verdict is None else verdict in ("SAME", "CLOSE", "PADDING")


def _recording(
    values: Sequence[Recorded], results: Sequence[CellResult], *, is_judged: bool = True
) -> dict[str, Any] | None:
    """What was recorded, and which cell comes nearest to it; none does where the weights are others."""
    if not values:
        return None
    near = [
        (result.recorded[0]["mean_abs"], number)
        for number, result in enumerate(results)
        if result.part != "recording" and result.recorded and result.recorded[0]["mean_abs"] is not None
    ]
    distance, nearest = min(near) if near and is_judged else (None, None)
    return {
        "values": [{"name": value.name, "field": value.field, "key": value.key.to_mapping()} for value in values],
        "judged_by": values[0].name,
        "nearest_cell": nearest,
        "mean_abs": distance,
    }


def _rank(
    bench: Bench, request: Request, recorded: RecordedBatch, values: Sequence[Recorded], replayed: Replayed
) -> None:
    """Which weights sampled these tokens: each model's rows alone against the recorded log-probabilities."""
    known = {value.name: value for value in values}
    name = request.against or next((one for one in (AGAINST, *known) if one in known), None)
    if name is None or name not in known:
        raise RequestError(
            "the record holds no such log-probabilities to rank the models by",
            expected=", ".join(known) or "rollout_logprobs, old_logprobs or ref_logprobs in the record",
            found=name or "none at all",
        )
    rows = []
    for number, model in enumerate(request.models):
        result = bench.run(bench.plan.flags.reference(), "reference" if number == 0 else "model", model=model)
        if result.run is None:
            continue
        result.recorded = [against(known[name], result.run, recorded.batch, known_fp32=False)]
        figures = result.recorded[0]
        rows.append({"cell": number, "model": model, **{part: figures[part] for part in ("mean_abs", "max_abs", "k3")}})
    rows.sort(key=lambda row: (row["mean_abs"] is None, row["mean_abs"]))
    replayed.ranking = {"against": name, "models": rows}
