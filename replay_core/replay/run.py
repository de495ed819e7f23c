"""run_cell: one replay, start to end. Only the child process imports this."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import asdict, replace

from replay_core.dumps import open_run
from replay_core.dumps.step_log import Iteration, Micro, StepStage, lines_of
from replay_core.errors import CellError, OwnForwardError, RldbgError
from replay_core.jobs import LogLine, OnEvent, Progress, ignore
from replay_core.recorder import Recorder
from replay_core.records import RecordKey, Run
from replay_core.replay import attention, called_whole, compiling, gpu, own_asked, own_code, settings, visibility, why
from replay_core.replay.answer import Computed
from replay_core.replay.batch import MicroBatch, resolve_temperature
from replay_core.replay.cell import BatchReplay
from replay_core.replay.effective import effective_settings, notes_on
from replay_core.replay.flags import Flags
from replay_core.replay.footprint import PeakMemory
from replay_core.replay.held import HOLDER, Holder
from replay_core.replay.mixed_dtypes import widened
from replay_core.replay.model import LoadedModel, prepare
from replay_core.replay.plan import ITSELF, ReplayPlan
from replay_core.replay.reading import RecordedBatch, read_batch
from replay_core.replay.references import resolve, step_of
from replay_core.replay.routing import Imposed
from replay_core.replay.routing import read as read_routing


def run_cell(plan: ReplayPlan, on_event: OnEvent = ignore, holder: Holder | None = None) -> dict[str, Any]:
    """Replay one micro-batch and write the answer as a native dump into `plan.out`.

    Args:
        holder: keeps the model between replays of this process.

    Returns:
        The cell of the replay document: flags, effective, outcome, error, notes, time, memory, dump,
        final_hidden (the name under which `modules` holds the hidden states below the head; None where the
        trainer's own code ran), threads, compile, observer, capture, inputs, left_pads, weights, determinism, loss; and
        `hashes`, for whoever compares cells, where digests were taken in place of tensors.

    Raises:
        UnavailableError: a setting cannot run here; says why.
        ModelError: no such model, no weights, or a vocabulary too small for the batch.
        SelectionError, DumpError: no such record, or it lacks what a replay needs.
        RequestError: the capture would not fit; says how large it is.
        CellError: the model failed.
    """
    flags, resolved = attention.resolve(plan.flags)
    attention.need(flags)
    compiling.need(flags)
    run = open_run(Path(plan.dump))
    recorded = read_batch(run, plan)
    temperature, temperature_note = resolve_temperature(plan.temperature, recorded.batch.temperature)
    notes = [*recorded.notes, *([temperature_note] if temperature_note else []), *resolved]
    with contextlib.ExitStack() as stack:
        stack.enter_context(gpu.taken(flags, plan.share_gpu, on_event))
        stack.enter_context(settings.applied(flags, plan.seed))
        model, load_s = _model(plan, run, recorded, holder or HOLDER, on_event)
        with _failures_named("the model could not be put into these settings"):
            prepared = prepare(model, flags)
        stack.enter_context(widened(model.reference, is_cast=model.is_cast and flags.compile == "off"))
        notes = [*model_notes(plan, run, model), *notes, *prepared]
        if plan.backward:
            from replay_core.replay.training import train  # a replay without gradients never needs it

            return train(plan, flags, run, recorded, model, temperature, notes, load_s, on_event)
        with torch.no_grad():
            if plan.forward == ITSELF:
                return _whole(plan, flags, recorded, model, temperature, notes, load_s, on_event)
            if plan.forward is not None:
                return _own_forward(plan, flags, recorded, model, temperature, notes, load_s, on_event)
            imposed = Imposed(read_routing(run, recorded)) if flags.routing == "recorded" else None
            try:
                return _forward(plan, flags, recorded, model, temperature, notes, load_s, on_event, imposed)
            except OwnForwardError as error:
                if imposed is not None:
                    raise  # which token routes where is told from the rows its backbone is given
                notes = [*notes, f"{error.message}: it is called whole, and none of its modules is watched"]
            return _whole(plan, flags, recorded, model, temperature, notes, load_s, on_event)


def _forward(
    plan: ReplayPlan,
    flags: Flags,
    recorded: RecordedBatch,
    model: LoadedModel,
    temperature: float,
    notes: list[str],
    load_s: float,
    on_event: OnEvent,
    imposed: Imposed | None = None,
) -> dict[str, Any]:
    cell = BatchReplay(plan, flags, recorded.batch, model, temperature, on_event, routing=imposed)
    answer = cell.compute()
    rule = cell.arrangement.position_rule
    effective = effective_settings(flags, model, answer.attention, temperature, rule)
    effective["routing"] = "live" if imposed is None else imposed.sentence()
    notes = [*notes, *cell.notes, *notes_on(flags, effective)]
    inputs = visibility.check(cell.arrangement, use_cache=flags.use_cache)
    itself = why.of_itself(cell) if flags.is_reference and imposed is None else None
    on_event(LogLine(f"writing {plan.out}"))
    write(plan, recorded.key, model.reference, effective, stages(cell, answer), on_event)
    phases = {"Model loaded": load_s, "Compiled": answer.compile_s, "Forward and log-probabilities": answer.steady_s}
    log_phases(plan, phases, answer.peak_mib, on_event)
    return {
        **described(plan, recorded, model, effective, notes),
        "time": {"load_s": load_s, "compile_s": answer.compile_s, "steady_s": answer.steady_s},
        "memory": {"peak_mib": answer.peak_mib, "forecast_logits_mib": answer.forecast_mib},
        "final_hidden": answer.final_hidden,
        "compile": answer.compile,
        "observer": answer.observer,
        "capture": answer.capture,
        "hashes": None if answer.hashes is None else [asdict(one) for one in answer.hashes],
        "not_finite": model.known.get("not_finite"),
        "inputs": [finding.to_mapping() for finding in inputs],
        "itself": itself,
    }


def _own_forward(
    plan: ReplayPlan,
    flags: Flags,
    recorded: RecordedBatch,
    model: LoadedModel,
    temperature: float,
    notes: list[str],
    load_s: float,
    on_event: OnEvent,
) -> dict[str, Any]:
    assert plan.forward is not None
    cell = BatchReplay(
        replace(plan, capture="none"), replace(flags, packing=False), recorded.batch, model, temperature, on_event
    )
    given = own_asked.given_to(cell)
    memory, started = PeakMemory(flags.device), time.perf_counter()
    logprobs = own_code.logprobs(
        plan.forward, plan.forward_path, model.for_trainer, {**given, "temperature": temperature}
    )
    steady_s, peak_mib = time.perf_counter() - started, memory.mib()
    effective = effective_settings(flags, model, f"as {plan.forward} chose", temperature, "as the code chose")
    answer = Computed({}, None, logprobs, None, "", steady_s, None, peak_mib, 0.0)
    write(plan, recorded.key, model.reference, effective, stages(cell, answer), on_event)
    return {
        **described(plan, recorded, model, effective, notes),
        "time": {"load_s": load_s, "compile_s": None, "steady_s": steady_s},
        "memory": {"peak_mib": peak_mib, "forecast_logits_mib": None},
        "final_hidden": None,
        "forward": plan.forward,
    }


def _whole(
    plan: ReplayPlan,
    flags: Flags,
    recorded: RecordedBatch,
    model: LoadedModel,
    temperature: float,
    notes: list[str],
    load_s: float,
    on_event: OnEvent,
) -> dict[str, Any]:
    cell = BatchReplay(replace(plan, capture="none"), flags, recorded.batch, model, temperature, on_event)
    answer = called_whole.computed(cell)
    effective = effective_settings(flags, model, answer.attention, temperature, cell.arrangement.position_rule)
    effective["routing"] = "live"
    write(plan, recorded.key, model.reference, effective, stages(cell, answer), on_event)
    return {
        **described(plan, recorded, model, effective, [*notes, *cell.notes, *notes_on(flags, effective)]),
        "time": {"load_s": load_s, "compile_s": None, "steady_s": answer.steady_s},
        "memory": {"peak_mib": answer.peak_mib, "forecast_logits_mib": answer.forecast_mib},
        "final_hidden": None,
        "forward": ITSELF,
    }


def log_phases(plan: ReplayPlan, seconds: Mapping[str, float | None], peak_mib: float, on_event: OnEvent) -> None:
    """The phases of a replay as log lines in the grammar of a trainer's step log, which rldbg reads back."""
    stages = [
        StepStage(str(number), title, {"mem": peak_mib, "time": spent})
        for number, (title, spent) in enumerate(seconds.items(), start=1)
        if spent is not None
    ]
    for line in lines_of(Iteration(plan.step, [Micro(plan.micro, stages)])):
        on_event(LogLine(line))


def described(
    plan: ReplayPlan, recorded: RecordedBatch, model: LoadedModel, effective: dict[str, Any], notes: list[str]
) -> dict[str, Any]:
    """What every cell that ran says of itself, before its own figures."""
    return {
        "flags": plan.flags.to_mapping(),
        "effective": effective,
        "outcome": "ran",
        "error": None,
        "notes": notes,
        "dump": plan.out,
        "threads": effective["threads"],
        "compile": None,
        "observer": None,
        "capture": None,
        "not_finite": None,
        "inputs": [],
        "left_pads": _left_pads(recorded.batch),
        "weights": {"model": model.reference, "step": step_of(model.reference), "batch_step": plan.step},
        "determinism": settings.in_words(plan.seed),
        "forward": None,
        "loss": None,
        "optimizer": None,
    }


def model_notes(plan: ReplayPlan, run: Run, model: LoadedModel) -> list[str]:
    """What to say about the weights, those of another step first: before any figure."""
    _, said = resolve(plan, run)
    return [*said, *(note for note in model.notes if note not in said)]


def _model(
    plan: ReplayPlan, run: Run, recorded: RecordedBatch, holder: Holder, on_event: OnEvent
) -> tuple[LoadedModel, float]:
    flags, _ = attention.resolve(plan.flags)
    for note in resolve(plan, run)[1]:
        on_event(LogLine(note))
    on_event(Progress(0, None, "loading the model"))
    started = time.perf_counter()
    with _failures_named("the model could not be loaded"):
        model, was_held = holder.model(replace(plan, flags=flags), run, recorded.batch)
    load_s = time.perf_counter() - started
    how = "already loaded" if was_held else f"loaded in {load_s:.2f} s"
    rows = f"{recorded.batch.rows} rows, {recorded.batch.tokens:,} tokens"
    on_event(LogLine(f"{plan.model} {how} for {plan.flags.label()}; {rows}"))
    return model, load_s


def _left_pads(batch: MicroBatch) -> list[int]:
    return [int(row.argmax()) if row.any() else 0 for row in batch.valid_BS]


def stages(cell: BatchReplay, answer: Computed) -> dict[str, dict[str, Any]]:
    """The records of a forward replay: stage -> fields, in order of computation."""
    arrangement = cell.arrangement
    inputs = {
        "input_ids": arrangement.input_ids,
        "attention_mask": arrangement.attention_mask,
        "cu_seqlens": arrangement.cu_seqlens,
        "response_mask": arrangement.response_mask,
        "position_ids": arrangement.position_ids,
    }
    batch_inputs: dict[str, Any] = {
        name: torch.from_numpy(value) for name, value in inputs.items() if value is not None
    }
    batch_inputs["temperature"] = cell.temperature
    forward_data = {"values" if cell.plan.is_critic else "log_probs": answer.logprobs}
    if answer.entropy is not None:
        forward_data["entropy"] = answer.entropy
    if "response_mask" in batch_inputs:
        forward_data["response_mask"] = batch_inputs["response_mask"]
    written = {"batch_inputs": batch_inputs, "modules": answer.tensors, "forward_data": forward_data}
    return {stage: fields for stage, fields in written.items() if fields}


def write(
    plan: ReplayPlan,
    key: RecordKey,
    reference: str,
    effective: dict[str, Any],
    records: dict[str, dict[str, Any]],
    on_event: OnEvent,
) -> None:
    """The answer as a native dump into `plan.out`, under the key of the recorded micro-batch."""
    recorder = Recorder(plan.out, model=reference, flags={"asked": plan.flags.to_mapping(), "effective": effective})
    step = plan.step if key.step is None else key.step
    place: dict[str, Any] = {
        "micro": plan.micro if key.micro is None else key.micro,
        "epoch": key.epoch,
        "minibatch": key.minibatch,
    }
    rank = plan.rank if key.rank is None else key.rank
    with recorder, recorder.step(step, rank=rank, role=key.role or "actor") as record:
        for done, (stage, fields) in enumerate(records.items(), start=1):
            record(stage, fields, **place)
            on_event(Progress(done, len(records), "records written"))


@contextlib.contextmanager
def _failures_named(what: str) -> Iterator[None]:
    try:
        yield
    except RldbgError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise CellError(f"{what}: {type(error).__name__}: {error}", hint="the log holds the whole traceback") from error
