"""A backward replay: the loss of one micro-batch, or of a step's micro-batches in turn, and its gradients.

The padded batch goes through the head as the trainer's did, where the record says how (`trained_head`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace

from replay_core import pages
from replay_core.errors import RequestError, UnavailableError
from replay_core.jobs import OnEvent, Progress
from replay_core.objectives.likelihood import cross_entropy_sum, divided_by
from replay_core.recorder import Recorder
from replay_core.records import Run, TensorRef
from replay_core.replay import adapters, attention, carried, compiling, observing, optimizing, visibility
from replay_core.replay.cell import BatchReplay
from replay_core.replay.effective import effective_settings
from replay_core.replay.flags import Flags, settings_asked
from replay_core.replay.footprint import PeakMemory
from replay_core.replay.losses import Loss, resolve
from replay_core.replay.model import LoadedModel
from replay_core.replay.optimizing import Optimizer
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.reading import RecordedBatch, read_batch
from replay_core.replay.recorded import placed_in, records_of, said_of_tokens
from replay_core.replay.run import described, log_phases
from replay_core.replay.trained_head import TrainedHead, labels_of, of_next_tokens


class _Micro(Struct):
    """One micro-batch: its cell, and what its loss needs, [B, S-1] float32 (None where it is not recorded)."""

    rank: int
    number: int
    recorded: RecordedBatch
    cell: BatchReplay
    fields: dict[str, torch.Tensor | None]
    tokens_of_step: float | None
    #: What the trainer divided this micro-batch's loss by before its backward, where the model gave the loss itself.
    divisor: float = 1.0
    #: Columns that the trainer's loss was formed of, the last ones: how many a response-aligned field has.
    width: int | None = None
    #: The gradient that the trainer's own loss left at the logits: carried back in place of a loss formed here.
    at_logits: TensorRef | None = None

    @property
    def is_labelled(self) -> bool:
        return "labels" in self.fields

    @property
    def is_paired(self) -> bool:
        return "pairs" in self.fields

    def own(self, loss: Loss) -> Loss:
        """The step's loss with what is this micro-batch's own: the tokens it is a part of, what it was divided by."""
        if loss.reduction == "token_sum" and self.tokens_of_step:
            return replace(loss, tokens=self.tokens_of_step)
        return replace(loss, divisor=self.divisor) if self.divisor != 1.0 else loss

    def response(self) -> torch.Tensor:
        """[B, S-1]: 1 where the next token is a response token (any token, where no response mask is known)."""
        batch = self.recorded.batch
        mask_BS = batch.valid_BS if batch.response_BS is None else batch.response_BS
        first_BT = batch.valid_BS[:, :-1]
        return torch.from_numpy((mask_BS[:, 1:] & first_BT).astype(np.int64))


def train(
    plan: ReplayPlan,
    flags: Flags,
    run: Run,
    recorded: RecordedBatch,
    model: LoadedModel,
    temperature: float,
    notes: list[str],
    load_s: float,
    on_event: OnEvent,
) -> dict[str, Any]:
    """Forward and backward of the plan's micro-batches, gradients added up; the cell of the document.

    Raises:
        RequestError: the record holds no advantages, or the loss cannot be formed.
    """
    if flags.compile != "off":
        raise UnavailableError("a backward replay is not compiled: its gradients come from the uncompiled graph",
                               hint="compile=off with --backward; forward replays compile")  # fmt: skip
    if flags.routing != "live":
        raise UnavailableError("recorded routing is replayed forward only", hint="routing=live with --backward")
    places = [(rank, number) for rank in plan.ranks or (plan.rank,) for number in plan.micros or (plan.micro,)]
    micros = [_micro(replace(plan, rank=rank, micro=number), flags, run, model, temperature, on_event)
              for rank, number in places]  # fmt: skip
    loss, sentence = None, carried.SENTENCE
    if any(micro.at_logits is None for micro in micros):
        loss, sentence = resolve(_settings(plan), _said(run, "loss", plan), micros[0].tokens_of_step,
                                 is_critic=plan.is_critic, is_labelled=micros[0].is_labelled)  # fmt: skip
    optimizer = None
    if plan.optimizer is not None:
        asked = Optimizer.parse(plan.optimizer) if isinstance(plan.optimizer, str) else plan.optimizer
        optimizer = optimizing.resolve(asked, _said(run, "optimizer", plan), plan.step)
    cell = micros[0].cell
    rows = max(micro.cell.arrangement.slots for micro in micros)
    trained = TrainedHead.chosen(flags, settings_asked(run.flags).get("logits"), cell, rows, plan.logit_chunk)
    if trained.note:
        notes.append(trained.note)
    with torch.no_grad():
        head, final_hidden = cell._probe()
        ran = observing.operators_alone(cell, compiling.plain)
    effective = effective_settings(flags, model, ran, temperature, cell.arrangement.position_rule)
    effective["logits"] = "whole" if loss is None else trained.held
    said = {"asked": plan.flags.to_mapping(), "effective": effective}
    if optimizer is not None:
        said["optimizer"] = optimizer[0].to_mapping()
    recorder = Recorder(plan.out, model=model.reference, flags=said)
    role = plan.role or "actor"
    memory, started = PeakMemory(flags.device), time.perf_counter()
    seconds = {"forward_s": 0.0, "backward_s": 0.0}
    values: list[float | None] = []
    stepped = None
    with (
        recorder,
        _training(model, optimizer is not None) as order,
        contextlib.ExitStack() as steps,
    ):
        of_rank = {rank: steps.enter_context(recorder.step(plan.step, rank=rank, role=role))
                   for rank in dict.fromkeys(micro.rank for micro in micros)}  # fmt: skip
        record = of_rank[micros[0].rank]
        for done, micro in enumerate(micros, start=1):
            order.at_rank(micro.rank)
            began = time.perf_counter()
            with attention.pinned(flags), torch.enable_grad():
                if micro.at_logits is not None:
                    logprobs_BT, hidden = carried.carry_back(micro.at_logits, micro.recorded, micro.cell, temperature)
                    seconds["backward_s"] += time.perf_counter() - began
                    values.append(None)
                    _record(of_rank[micro.rank], micro, final_hidden, hidden, logprobs_BT, {})
                    on_event(Progress(done, len(micros), "micro-batches forward and backward"))
                    continue
                assert loss is not None
                mask_BT = micro.response()
                labels_BS = labels_of(torch.from_numpy(micro.recorded.batch.ids_BS), mask_BT)
                logprobs_BT, entropy_BT, hidden = trained.logprobs(
                    micro.cell, head, labels_BS, temperature, plan.logit_chunk, with_entropy=bool(loss.entropy)
                )
                micro.fields["entropy"] = entropy_BT
                mask_BT = mask_BT.to(logprobs_BT.device)
                logprobs_BT = logprobs_BT * mask_BT
                found = _loss(micro.own(loss), micro, logprobs_BT, mask_BT, trained.held, notes)
                seconds["forward_s"] += time.perf_counter() - began
                began = time.perf_counter()
                found["loss"].backward()
                seconds["backward_s"] += time.perf_counter() - began
            values.append(float(found["loss"].detach()))
            _record(of_rank[micro.rank], micro, final_hidden, hidden, logprobs_BT, found)
            on_event(Progress(done, len(micros), "micro-batches forward and backward"))
        order.average()
        gradients = {f"grad.{name}": gradient for name, gradient in order.gradients().items()}
        norm = torch.nn.utils.get_total_norm(list(order.in_model_order()))
        number = None if plan.micros else micros[0].recorded.key.micro
        record("gradient", gradients, micro=number, grad_norm=norm)
        broken = [name for name, gradient in gradients.items() if not bool(torch.isfinite(gradient).all())]
        if optimizer is not None:
            after, update = optimizing.stepped(optimizer[0], model.causal_lm)
            record("param", after, micro=number, update_norm=update)
            stepped = {"settings": optimizer[0].to_mapping(), "stated": optimizer[1], "update_norm": update,
                       "parameters": len(after)}  # fmt: skip
            notes.append(optimizer[1])
    steady_s, peak_mib = time.perf_counter() - started, memory.mib()
    phases = {"Model loaded": load_s, "Forward": seconds["forward_s"], "Backward": seconds["backward_s"]}
    log_phases(plan, phases, peak_mib, on_event)
    if broken:
        notes.append(f"the first gradient that is not finite, in backward order, is {broken[0]}")
    inputs = visibility.check(cell.arrangement, use_cache=flags.use_cache)
    return {
        **described(plan, recorded, model, effective, [*notes, *cell.notes, sentence]),
        "time": {"load_s": load_s, "compile_s": None, "steady_s": steady_s, **seconds},
        "memory": {"peak_mib": peak_mib, "forecast_logits_mib": trained.forecast_mib},
        "final_hidden": final_hidden,
        "inputs": [finding.to_mapping() for finding in inputs],
        "loss": {
            "settings": {"kind": "recorded"} if loss is None else loss.to_mapping(),
            "stated": sentence,
            "micros": [
                {"rank": micro.rank, "micro": micro.number, "loss": value}
                for micro, value in zip(micros, values, strict=True)
            ],
            "grad_norm": float(norm),
            "first_nonfinite_gradient": broken[0] if broken else None,
        },
        "optimizer": stepped,
    }


def _settings(plan: ReplayPlan) -> dict[str, Any] | None:
    return Loss.parse(plan.loss) if isinstance(plan.loss, str) else plan.loss


def _said(run: Run, what: str, plan: ReplayPlan) -> dict[str, Any] | None:
    """The settings a dump records of its loss or optimizer; a critic's under its own name."""
    flags = run.flags or {}
    return flags.get(f"critic_{what}" if plan.is_critic else what)


def _micro(
    plan: ReplayPlan, flags: Flags, run: Run, model: LoadedModel, temperature: float, on_event: OnEvent
) -> _Micro:
    recorded = read_batch(run, plan)
    at_logits = None if plan.is_critic or plan.loss is not None else carried.left_at_logits(run, recorded)
    if at_logits is not None:
        cell = _cell(plan, flags, run, recorded, model, temperature, on_event)
        return _Micro(plan.rank, plan.micro, recorded, cell, {}, None, at_logits=at_logits)
    names = (
        ("returns", "values") if plan.is_critic else ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")
    )
    fields: dict[str, torch.Tensor | None] = dict.fromkeys(names)
    single: dict[str, float] = {}
    labels, width = None, None
    for record in records_of(run, recorded.key):
        for ref in record.tensors():
            width = ref.shape[1] if ref.alignment == "response" and len(ref.shape) == 2 else width
            name = ref.canonical or ref.name
            if name in fields and fields[name] is None and ref.is_readable:
                placed = placed_in(ref, record, recorded)
                if placed is not None:
                    fields[name] = torch.from_numpy(recorded.chosen(placed[0])[:, :-1].astype(np.float32))
            labels = ref if name == "labels" and labels is None else labels
            if ref.is_readable and not ref.is_text and ref.numel == 1:
                single.setdefault(ref.name, float(pages.array(ref).reshape(-1)[0]))
    if (_settings(plan) or _said(run, "loss", plan) or {}).get("kind") == "dpo":
        fields = {"pairs": None, "ref_logprobs": _of_reference(run, recorded, temperature)}
    elif fields[names[0]] is None and labels is not None and not plan.is_critic:
        fields = {"labels": None}
    elif fields[names[0]] is None:
        raise RequestError(
            f"the record holds no {names[0]} of this micro-batch: its loss cannot be formed",
            file=str(run.path),
            tensor=names[0],
            expected=f"{names[0]} per token, [B, S-1], [B, S] or a response suffix",
            hint=f"record {names[0]} and {names[1].replace('logprobs', 'log_probs')} beside input_ids",
        )
    tokens = single.get("tokens_of_step", single.get("num_items_in_batch"))
    divisor: float | None = 1.0
    if "labels" in fields:
        marked = 0 if recorded.batch.response_BS is None else int(recorded.batch.response_BS[:, 1:].sum())
        given, began = single.get("forward.output.loss", 0.0), single.get("loss", 0.0)
        divisor = divided_by(given, began, marked, tokens)
        if divisor is None:
            raise RequestError(
                "the recorded loss is not what the labels' likelihood comes to: it was formed outside the model",
                file=str(run.path),
                tensor="loss",
                expected=f"{single['forward.output.loss']:.6g}, which the model gave, or a part of it",
                found=f"{single['loss']:.6g}",
                hint="record what the loss is made of: advantages and old_log_probs beside input_ids",
            )
    cell = _cell(plan, flags, run, recorded, model, temperature, on_event)
    return _Micro(plan.rank, plan.micro, recorded, cell, fields, tokens, divisor or 1.0, width)


def _cell(
    plan: ReplayPlan,
    flags: Flags,
    run: Run,
    recorded: RecordedBatch,
    model: LoadedModel,
    temperature: float,
    on_event: OnEvent,
) -> BatchReplay:
    forward = replace(plan, capture="none")
    cell = BatchReplay(forward, flags, recorded.batch, model, temperature, on_event)
    if settings_asked(run.flags).get("position_ids") == "library" and flags.positions == "cumsum":
        cell.arrangement = cell.arrangement.without_positions()
    return cell


def _of_reference(run: Run, recorded: RecordedBatch, temperature: float) -> torch.Tensor | None:
    """What a call of the reference model on the same tokens recorded, [B, S-1]; else the micro-batch's own field."""
    key = recorded.key
    of_next = of_next_tokens(settings_asked(run.flags).get("logits"))
    for at in (dataclasses.replace(key, role="ref"), key):
        name = "ref_logprobs" if at is key else "policy_logprobs"
        for record in records_of(run, at):
            for ref in record.tensors():
                said = said_of_tokens(ref, recorded, temperature, name, of_next)
                placed = None if said is None else placed_in(said, record, recorded)
                if placed is not None:
                    return torch.from_numpy(recorded.chosen(placed[0])[:, :-1].astype(np.float32))
    return None


def _loss(
    loss: Loss, micro: _Micro, logprobs_BT: torch.Tensor, mask_BT: torch.Tensor, held: str, notes: list[str]
) -> dict[str, Any]:
    """What `Loss.value` gives, formed of the columns that the trainer's was: a sum over more is rounded otherwise."""
    left = 0 if micro.width is None else mask_BT.shape[1] - micro.width
    left = 0 if left < 0 or bool(mask_BT[:, :left].any()) else left
    given = {name: None if value is None else value[:, left:].to(logprobs_BT.device)
             for name, value in micro.fields.items()}  # fmt: skip
    found = _formed(loss, micro, given, logprobs_BT[:, left:], mask_BT[:, left:], held, notes)
    pad = torch.nn.functional.pad
    return {name: pad(value, (left, 0)) if value.ndim == 2 else value for name, value in found.items()}


def _formed(
    loss: Loss,
    micro: _Micro,
    given: dict[str, torch.Tensor | None],
    logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    held: str,
    notes: list[str],
) -> dict[str, Any]:
    if micro.is_labelled or micro.is_paired:
        found = loss.value(logprobs_BT, None, given.get("ref_logprobs"), None, mask_BT)
        if micro.is_labelled and held == "whole" and loss.reduction != "sequence_mean":
            found["loss"] = loss.of_sum(cross_entropy_sum(logprobs_BT, mask_BT), mask_BT)
        return found
    if "returns" in given:
        old_values_BT = given["values"]
        if old_values_BT is None:
            old_values_BT = logprobs_BT.detach()
            _once(notes, "no old values are recorded: they are taken to be the model's own, so nothing is clipped")
        return loss.of_values(logprobs_BT, old_values_BT, given["returns"], mask_BT)
    old_BT = given["old_logprobs"]
    if old_BT is None:
        old_BT = logprobs_BT.detach()
        _once(notes, "no old log-probabilities are recorded: the ratio is taken to be 1 (on-policy)")
    rollout_BT, entropy_BT = given["rollout_logprobs"], given["entropy"]
    return loss.value(logprobs_BT, old_BT, given["ref_logprobs"], given["advantages"], mask_BT, rollout_BT, entropy_BT)


def _once(notes: list[str], note: str) -> None:
    if note not in notes:
        notes.append(note)


def _record(
    record: Any,
    micro: _Micro,
    final_hidden: str,
    hidden: torch.Tensor,
    logprobs_BT: torch.Tensor,
    found: dict[str, Any],
) -> None:
    arrangement, own = micro.cell.arrangement, micro.recorded.batch.layout()
    inputs = {
        "input_ids": arrangement.input_ids,
        "attention_mask": arrangement.attention_mask,
        "cu_seqlens": arrangement.cu_seqlens,
        "response_mask": arrangement.response_mask,
        "position_ids": arrangement.position_ids,
    }
    place_ = {"micro": micro.number if micro.recorded.key.micro is None else micro.recorded.key.micro}
    written = {name: torch.from_numpy(value) for name, value in inputs.items() if value is not None}
    record("batch_inputs", {**written, "temperature": micro.cell.temperature}, **place_)
    record("modules", {final_hidden: hidden}, **place_)
    whole = torch.zeros(own.sample_BS.shape)
    whole[:, :-1] = logprobs_BT.detach().cpu()
    laid = torch.zeros(arrangement.layout.sample_BS.size)
    laid[torch.from_numpy(arrangement.layout.slots("next"))] = whole.reshape(-1)[torch.from_numpy(own.slots("next"))]
    answer = "values" if micro.cell.plan.is_critic else "log_probs"
    forward_data = {answer: laid.reshape(arrangement.layout.shape)}
    if "response_mask" in written:
        forward_data["response_mask"] = written["response_mask"]
    record("forward_data", forward_data, **place_)
    tokens = {} if micro.tokens_of_step is None else {"tokens_of_step": micro.tokens_of_step}
    if found:
        record("loss", {**found, **tokens}, **place_)


class _Order:
    """The parameters of a model in the order their gradients were last completed; of several ranks, their average."""

    def __init__(self, causal_lm: Any) -> None:
        self._parameters = {name: one for name, one in causal_lm.named_parameters() if one.requires_grad}
        self._order: dict[str, None] = {}
        self._rank: int | None = None
        #: The gradients of the ranks before.
        self._of_ranks: list[dict[str, torch.Tensor]] = []
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._done(name))
            for name, parameter in self._parameters.items()
        ]

    def _done(self, name: str) -> Any:
        def hook(_parameter: torch.Tensor) -> None:
            self._order.pop(name, None)
            self._order[name] = None

        return hook

    def at_rank(self, rank: int) -> None:
        """What is computed from now on is that rank's: its gradients add up alone, as they did there."""
        if rank != self._rank and self._rank is not None:
            self._lay_aside()
        self._rank = rank

    def average(self) -> None:
        """The mean over ranks takes the place of the last one's gradients: what data-parallel training reduces to."""
        if not self._of_ranks:
            return
        self._lay_aside()
        for name, parameter in self._parameters.items():
            parts = [one[name] for one in self._of_ranks if name in one]
            if parts:
                parameter.grad = torch.stack(parts).sum(0) / len(self._of_ranks)

    def _lay_aside(self) -> None:
        known = self._parameters.items()
        self._of_ranks.append({name: one.grad for name, one in known if one.grad is not None})
        for one in self._parameters.values():
            one.grad = None

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: self._gradient(name) for name in self._order}

    def in_model_order(self) -> Iterator[torch.Tensor]:
        return (self._gradient(name) for name in self._parameters if name in self._order)

    def _gradient(self, name: str) -> torch.Tensor:
        gradient = self._parameters[name].grad
        assert gradient is not None
        return gradient

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


@contextmanager
def _training(model: LoadedModel, is_stepped: bool) -> Iterator[_Order]:
    """The model with gradients on, and without any trace of them afterwards: it is held for the next replay."""
    names = adapters.trained(model.causal_lm)
    for name, parameter in model.causal_lm.named_parameters():
        # Beside an adapter the base is frozen.
        parameter.requires_grad_(names is None or name in names)
    order = _Order(model.causal_lm)
    try:
        with optimizing.restored(model.causal_lm) if is_stepped else nullcontext():
            yield order
    finally:
        order.remove()
        model.causal_lm.zero_grad(set_to_none=True)
        model.causal_lm.requires_grad_(False)
