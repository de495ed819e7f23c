"""run_cell: one replay, start to end. Only the child process imports this.

Three passes: a short probe (warms up, finds the final hidden states, forecasts the capture, checks the
head), the plain pass (timed and weighed; the cell's own answer), and the captured pass (hooks, and the
operators that really ran). Captured and plain hidden states must agree, or the cell says they do not.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from replay_core.dumps import open_run
from replay_core.errors import CellError, RldbgError
from replay_core.jobs import LogLine, OnEvent, Progress, ignore
from replay_core.recorder import Recorder
from replay_core.records import RecordKey
from replay_core.replay import attention
from replay_core.replay.batch import Batch, read_batch, resolve_temperature
from replay_core.replay.capture import Capture, Tensors, forecast_bytes, join, modules_matching, need_all, need_room
from replay_core.replay.effective import Operators, effective_settings, notes_on
from replay_core.replay.flags import Flags
from replay_core.replay.footprint import PeakMemory
from replay_core.replay.logprobs import Head, token_logprobs
from replay_core.replay.model import LoadedModel, load_model
from replay_core.replay.packing import Arrangement, Forward, arrange
from replay_core.replay.plan import ReplayPlan

#: Tokens of the first row that the probe runs.
_PROBE_TOKENS = 16
#: Name of the final hidden states where no module of the backbone puts them out.
_UNOWNED_HIDDEN = "final_hidden.output"


def run_cell(plan: ReplayPlan, on_event: OnEvent = ignore) -> dict[str, Any]:
    """Replay one micro-batch and write the answer as a native dump into `plan.out`.

    Returns:
        The cell of the replay document: flags, effective, outcome, error, notes, time, memory, dump,
        final_hidden (the name under which `modules` holds the hidden states below the head), threads.

    Raises:
        UnavailableError: a setting cannot run here; says why.
        ModelError: no such model, no weights, or a vocabulary too small for the batch.
        SelectionError, DumpError: no such record, or it lacks what a replay needs.
        RequestError: the capture would not fit; says how large it is.
        CellError: the model failed.
    """
    attention.need(plan.flags)
    run = open_run(Path(plan.dump))
    recorded = read_batch(run, plan)
    temperature, temperature_note = resolve_temperature(plan.temperature, recorded.batch.temperature)
    with _threads(plan.flags.threads), torch.no_grad():
        on_event(LogLine(f"loading {plan.model} for {plan.flags.label()}"))
        started = time.perf_counter()
        with _failures_named("the model could not be loaded"):
            model = load_model(plan, run, recorded.batch)
        load_s = time.perf_counter() - started
        on_event(LogLine(f"loaded in {load_s:.2f} s; {recorded.batch.rows} rows, {recorded.batch.tokens:,} tokens"))
        cell = _Cell(plan, recorded.batch, model, temperature, on_event)
        answer = cell.compute()
        effective = effective_settings(
            plan.flags, model.causal_lm, answer.operators, temperature, cell.arrangement.position_rule
        )
        notes = [
            *recorded.notes,
            *([temperature_note] if temperature_note else []),
            *model.notes,
            *cell.notes,
            *notes_on(plan.flags, effective),
        ]
        on_event(LogLine(f"writing {plan.out}"))
        _write(plan, recorded.key, model.reference, effective, cell, answer)
    return {
        "flags": plan.flags.to_mapping(),
        "effective": effective,
        "outcome": "ran",
        "error": None,
        "notes": notes,
        "time": {"load_s": load_s, "compile_s": None, "steady_s": answer.steady_s},
        "memory": {"peak_mib": answer.peak_mib},
        "dump": plan.out,
        "final_hidden": answer.final_hidden,
        "threads": effective["threads"],
    }


@dataclass
class _Answer:
    """What one cell computed."""

    tensors: Tensors
    final_hidden: str
    logprobs: torch.Tensor
    entropy: torch.Tensor
    operators: Operators | None
    steady_s: float
    peak_mib: float


@dataclass
class _Cell:
    """One batch going through one loaded model."""

    plan: ReplayPlan
    batch: Batch
    model: LoadedModel
    temperature: float
    on_event: OnEvent
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arrangement: Arrangement = arrange(self.batch, self.flags)
        self.modules = modules_matching(self.model.backbone, self.plan.capture)
        longest = int(self.batch.valid_BS.sum(axis=1).max())
        reach = getattr(self.model.config, "max_position_embeddings", None)
        if reach and longest > reach:
            self.notes.append(f"rows of {longest} tokens pass the {reach} positions the model was made for")

    @property
    def flags(self) -> Flags:
        return self.plan.flags

    def compute(self) -> _Answer:
        heads = getattr(self.model.config, "num_attention_heads", 1)
        attention.need_memory(self.flags, self.arrangement.forwards, heads)
        head, final_hidden = self._probe()
        memory = PeakMemory(self.flags.device)
        started = time.perf_counter()
        hidden = self._plain_pass()
        logprobs, entropy = self._logprobs(head, hidden)
        steady_s, peak_mib = time.perf_counter() - started, memory.mib()
        tensors, operators = self._captured_pass(final_hidden)
        if not torch.equal(tensors[final_hidden], hidden.cpu()):
            self.notes.append("the hooked forward differs bitwise from the plain one, whose logprobs these are")
        return _Answer(tensors, final_hidden, logprobs, entropy, operators, steady_s, peak_mib)

    def _forward(self, forward: Forward) -> torch.Tensor:
        with attention.pinned(self.flags):
            hidden: torch.Tensor = self.model.backbone(**self._inputs(forward)).last_hidden_state
            return hidden

    def _inputs(self, forward: Forward) -> dict[str, Any]:
        device = self.flags.device
        positions = torch.from_numpy(forward.position_ids).to(device)
        mask = None if forward.attention_mask is None else torch.from_numpy(forward.attention_mask).to(device)
        # An older transformers does not cut a pack at its positions: there the mask is spelled out.
        if forward.segments > 1 and mask is None and not attention.masks_by_positions():
            mask = attention.additive_block_mask(positions, getattr(torch, self.flags.dtype))
        return {
            "input_ids": torch.from_numpy(forward.input_ids).to(device),
            "attention_mask": mask,
            "position_ids": positions,
            "use_cache": False,
        }

    def _probe(self) -> tuple[Head, str]:
        """The head, and the name of the final hidden states, from the first few tokens of the first row."""
        ids_T = self.batch.ids_BS[self.batch.valid_BS][:_PROBE_TOKENS]
        ids_T = ids_T[: int(self.batch.valid_BS.sum(axis=1).max())]
        width = ids_T.size
        forward = Forward(ids_T[None], torch.arange(width)[None].numpy(), None)
        with attention.pinned(self.flags):
            logits = self.model.causal_lm(**self._inputs(forward)).logits
            with Capture(self.model.backbone, modules_matching(self.model.backbone, None), width) as capture:
                hidden = self.model.backbone(**self._inputs(forward)).last_hidden_state
        head = Head(self.model.causal_lm, hidden, logits)
        if head.note:
            self.notes.append(head.note)
        final_hidden = capture.name_of(hidden) or _UNOWNED_HIDDEN
        prefixes = tuple(f"{name}." for name in self.modules)
        asked = {
            name: tensor
            for name, tensor in capture.tensors.items()
            if name == final_hidden or name.startswith(prefixes)
        }
        slots = sum(int(part.input_ids.size) for part in self.arrangement.forwards)
        need_room(forecast_bytes(asked, width, slots), Path(self.plan.out), self.plan.capture_cap_mib)
        return head, final_hidden

    def _plain_pass(self) -> torch.Tensor:
        forwards = self.arrangement.forwards
        parts = []
        for done, forward in enumerate(forwards, start=1):
            parts.append(self._forward(forward))
            self.on_event(Progress(done, len(forwards), "forwards"))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.arrangement.axis)

    def _logprobs(self, head: Head, hidden_BSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(log_probs, entropy) on the arrangement's token axes: index t is about token t + 1, 0 where there is none."""
        slots, targets = (torch.from_numpy(part) for part in self.arrangement.next_tokens())
        hidden_ND = hidden_BSD.flatten(0, 1)[slots.to(hidden_BSD.device)]
        with attention.pinned(self.flags):
            values = token_logprobs(
                head,
                hidden_ND,
                targets.to(hidden_BSD.device),
                self.temperature,
                self.plan.logit_chunk,
                self.on_event,
            )
        spread = []
        for value_N in values:
            whole = torch.zeros(self.arrangement.layout.sample_BS.size)
            whole[slots] = value_N
            spread.append(whole.reshape(self.arrangement.layout.shape))
        return spread[0], spread[1]

    def _captured_pass(self, final_hidden: str) -> tuple[Tensors, Operators | None]:
        # flex attention is a higher-order operator, which a dispatch mode would run uncompiled.
        operators = None if self.flags.attention == "flex" else Operators()
        owner = final_hidden.partition(".output")[0]
        hooked = [*self.modules, *([owner] if final_hidden != _UNOWNED_HIDDEN and owner not in self.modules else [])]
        parts: list[Tensors] = []
        ran: set[str] = set()
        forwards = self.arrangement.forwards
        for done, forward in enumerate(forwards, start=1):
            width = int(forward.input_ids.shape[1])
            with operators or contextlib.nullcontext(), Capture(self.model.backbone, hooked, width) as capture:
                hidden = self._forward(forward)
            if final_hidden == _UNOWNED_HIDDEN:
                capture.tensors[final_hidden] = hidden.cpu()
            parts.append(capture.tensors)
            ran |= capture.ran
            self.on_event(Progress(done, len(forwards), "captured forwards"))
        self.notes += need_all(self.modules, ran, self.plan.capture)
        if capture.skipped:
            self.notes.append("attention weights are not stored: only eager forms them, and they grow with T squared")
        tensors, notes = join(parts, self.arrangement)
        self.notes += notes
        return tensors, operators


def _write(
    plan: ReplayPlan, key: RecordKey, reference: str, effective: dict[str, Any], cell: _Cell, answer: _Answer
) -> None:
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
    forward_data = {"log_probs": answer.logprobs, "entropy": answer.entropy}
    if "response_mask" in batch_inputs:
        forward_data["response_mask"] = batch_inputs["response_mask"]
    recorder = Recorder(plan.out, model=reference, flags={"asked": plan.flags.to_mapping(), "effective": effective})
    step = plan.step if key.step is None else key.step
    place: dict[str, Any] = {
        "micro": plan.micro if key.micro is None else key.micro,
        "epoch": key.epoch,
        "minibatch": key.minibatch,
    }
    with recorder.step(step, rank=plan.rank if key.rank is None else key.rank, role=key.role or "actor") as record:
        stages = {"batch_inputs": batch_inputs, "modules": answer.tensors, "forward_data": forward_data}
        for done, (stage, fields) in enumerate(stages.items(), start=1):
            record(stage, fields, **place)
            cell.on_event(Progress(done, len(stages), "records written"))


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _failures_named(what: str) -> Iterator[None]:
    try:
        yield
    except RldbgError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise CellError(f"{what}: {type(error).__name__}: {error}", hint="the log holds the whole traceback") from error
