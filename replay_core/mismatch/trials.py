"""Candidates run for real: one warm model, the replay's own forward, many readouts of one pass.

The log-probabilities of the compared tokens under a Setting. Settings that share a forward share its hidden states;
those that share weights share the loaded model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from replay_core.errors import CellError, JobCancelledError, RldbgError, UnavailableError
from replay_core.jobs import LogLine, OnEvent, Progress
from replay_core.mismatch.figures import Array
from replay_core.mismatch.layouts import arranged
from replay_core.mismatch.setting import Asked, Grid, Setting
from replay_core.mismatch.sides import Sides
from replay_core.referee.alternatives import float8_grid, integer_grid
from replay_core.replay import attention
from replay_core.replay.batch import MicroBatch
from replay_core.replay.cell import BatchReplay
from replay_core.replay.flags import Flags
from replay_core.replay.held import HOLDER
from replay_core.replay.model import LoadedModel, prepare
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.references import CHECKPOINT
from replay_core.replay.routing import Imposed, Routing, by_token, routers, routing_fields

#: Rows of logits that are held at once: sorted, they are four times as many bytes.
_ROWS = 128
#: Slots of padding before the shortest prompt, where all prompts are as long: it must be there to be seen.
_LEAST_PAD = 4


class Trials:
    """The model of a run, and what it says of some of a step's samples under any setting."""

    def __init__(self, sides: Sides, asked: Asked, on_event: OnEvent) -> None:
        self.sides, self.asked, self.on_event = sides, asked, on_event
        self.rows: list[int] = []
        self._hidden: tuple[Any, Any] | None = None
        self._values: dict[Setting, Array] = {}
        #: Share of choices that the live router makes otherwise than was recorded, once it was tried; and their number.
        self.rerouted: tuple[float, int] | None = None
        self.notes: list[str] = []
        #: The experts that the live routers chose, layer by layer, of the forwards that ran.
        self._choices: dict[tuple[Any, ...], list[torch.Tensor]] = {}

    def choose(self, rows: Sequence[int]) -> None:
        """Take these samples; what was said of others is forgotten."""
        self.rows = list(rows)
        self._hidden, self._values, self._choices = None, {}, {}

    @property
    def chosen_M(self) -> Array:
        """Which compared tokens are of the chosen samples."""
        chosen_M: Array = np.isin(self.sides.sample_M, self.rows)
        return chosen_M

    def values(self, settings: Sequence[Setting]) -> dict[Setting, Array | RldbgError]:
        """The log-probability of every compared token of the chosen samples under each setting, or why not."""
        found: dict[Setting, Array | RldbgError] = {}
        wanted = [one for one in settings if one not in self._values]
        by_forward: dict[tuple[Any, ...], list[Setting]] = {}
        for one in sorted(wanted, key=lambda each: str(each.loaded)):
            by_forward.setdefault(one.forward, []).append(one)
        for done, group in enumerate(by_forward.values()):
            base = replace(group[0], temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, shift=0, head=None)
            self.on_event(
                Progress(done, len(by_forward), group[0].words(Setting(dtype=base.dtype, attention=base.attention)))
            )
            try:
                head, hidden_ND, targets_N = self._forward(group[0])
                for which in dict.fromkeys(one.head for one in group):
                    same = [one for one in group if one.head == which]
                    read = _read(_headed(head, which), hidden_ND, targets_N, same)
                    for one, values_N in zip(same, read, strict=True):
                        self._values[one] = self._compared(values_N, one.shift)
            except JobCancelledError:
                raise
            except RldbgError as error:
                found |= dict.fromkeys(group, error)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                found |= dict.fromkeys(group, CellError(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"))
        return found | {one: self._values[one] for one in settings if one in self._values}

    # ---- tokens

    @property
    def _tokens(self) -> list[Array]:
        return [self.sides.batch.spine.tokens(row).astype(np.int64) for row in self.rows]

    def _compared(self, values_N: Array, shift: int) -> Array:
        """What stands at the compared tokens, of values of every token but each sample's first."""
        rows = self._tokens
        found, start = [], 0
        chosen_M = self.chosen_M
        position_M = self.sides.batch.flat.position_N[self.sides.at_M]
        by_row: dict[int, Array] = {}
        for number, row in zip(self.rows, rows, strict=True):
            of_row = np.concatenate(([np.nan], values_N[start : start + max(0, row.size - 1)]))
            start += max(0, row.size - 1)
            by_row[number] = of_row
        for sample, position in zip(self.sides.sample_M[chosen_M], position_M[chosen_M], strict=True):
            own, at = by_row[int(sample)], int(position) - shift
            found.append(own[at] if 0 <= at < own.size else np.nan)
        return np.asarray(found, np.float64)

    def batch(self) -> MicroBatch:
        """The chosen samples as a replay takes them, padded on the right."""
        rows = self._tokens
        lengths = np.array([row.size for row in rows])
        valid_BS = np.arange(int(lengths.max(initial=0))) < lengths[:, None]
        ids_BS = np.zeros(valid_BS.shape, np.int64)
        ids_BS[valid_BS] = np.concatenate(rows)
        return MicroBatch(ids_BS, valid_BS)

    def compared_BS(self) -> Array:
        """Which slots of `batch` hold compared tokens."""
        batch, chosen_M = self.batch(), self.chosen_M
        row_of = {row: at for at, row in enumerate(self.rows)}
        compared_BS = np.zeros(batch.ids_BS.shape, bool)
        rows = [row_of[int(one)] for one in self.sides.sample_M[chosen_M]]
        compared_BS[rows, self.sides.batch.flat.position_N[self.sides.at_M][chosen_M]] = True
        return compared_BS

    def _pads(self) -> tuple[list[int], list[int]]:
        """(prompt lengths, padding) of the chosen samples: as recorded, else up to the longest prompt of the step."""
        heads_B = self.sides.prompts_B
        recorded_B = self.sides.batch.laid.left_pads_B
        pads_B = heads_B.max(initial=0) - heads_B
        if recorded_B is not None and recorded_B.any():
            pads_B = recorded_B
        elif not pads_B.any():
            pads_B = pads_B + _LEAST_PAD
        return [int(heads_B[row]) for row in self.rows], [int(pads_B[row]) for row in self.rows]

    # ---- the model

    def plan(self, setting: Setting) -> ReplayPlan:
        """The replay of a setting: each sample alone, nothing captured."""
        flags = Flags(attention=setting.attention, dtype=setting.dtype, device=self.asked.device, rows_per_forward=1)
        return ReplayPlan(
            dump=str(self.sides.run.path), step=self.sides.step or 0, rank=0, micro=0, out="", flags=flags,
            model=setting.weights or self.asked.model or CHECKPOINT, capture="none", base=self.asked.base_model,
        )  # fmt: skip

    def load(self, setting: Setting) -> LoadedModel:
        """The model of a setting, kept warm.

        Raises:
            ModelError, UnavailableError: as a replay's.
        """
        plan = self.plan(setting)
        flags, _ = attention.resolve(plan.flags)
        attention.need(flags)
        model, was_held = HOLDER.model(replace(plan, flags=flags), self.sides.run, self.batch())
        if not was_held:
            self.on_event(LogLine(f"{model.reference} loaded in {setting.dtype}"))
            self.notes += [note for note in model.notes if note not in self.notes and setting.weights is None]
        prepare(model, flags)
        return model

    def _forward(self, setting: Setting) -> tuple[Any, torch.Tensor, torch.Tensor]:
        if self._hidden is not None and self._hidden[0] == setting.forward:
            return self._hidden[1]  # type: ignore[no-any-return]
        model = self.load(setting)
        plan = self.plan(setting)
        flags, _ = attention.resolve(plan.flags)
        batch = self.batch()
        imposed = (
            None if setting.routing == "live" else Imposed(self._routing(with_weights=setting.routing != "experts"))
        )
        with torch.no_grad(), _changed(model.causal_lm, setting), _choosing(model.backbone) as chosen:
            cell = BatchReplay(plan, flags, batch, model, 1.0, self.on_event, routing=imposed)
            if setting.layout != "alone":
                heads, pads = self._pads()
                pad = self.sides.batch.pad_id
                pad = model.config.pad_token_id if pad is None else pad
                cell.arrangement = arranged(self._tokens, heads, pads, int(pad or 0), setting.layout, self.packs)
            made = cell.hidden()
        if chosen and setting.routing == "live":
            # A probe may have come before the pass itself.
            tokens = cell.arrangement.slots
            self._choices[setting.forward] = [torch.cat(layer)[-tokens:].sort(-1).values for layer in chosen]
        if imposed is not None:
            share = imposed.changed / imposed.tokens if imposed.tokens else 0.0
            self.rerouted = (share, imposed.tokens)
        self._hidden = (setting.forward, made)
        return made

    @property
    def packs(self) -> list[list[int]]:
        """The chosen samples (by their number among those) of each pack that the numbers say leaks."""
        leak = self.sides.between.leak
        if leak is None:
            return []
        # A pack begins with a sample that agrees.
        pack_B = np.cumsum(leak[0]) - 1
        numbers: dict[int, list[int]] = {}
        for at, row in enumerate(self.rows):
            numbers.setdefault(int(pack_B[row]), []).append(at)
        return list(numbers.values())

    # ---- routing

    def turned(self, a: Setting, b: Setting) -> float | None:
        """The share of choices (token and layer) that the routers make otherwise under b than under a; None without a
        router."""
        self.values([a, b])
        one, other = self._choices.get(a.forward), self._choices.get(b.forward)
        if not one or not other:
            return None
        return float(torch.cat([(x != y).any(-1).float() for x, y in zip(one, other, strict=True)]).mean())

    @property
    def has_routing(self) -> bool:
        """Whether the experts of the rollout's tokens are recorded."""
        return any(routing_fields(part.held.fields())[0] is not None
                   for sheet, _ in self.sides.batch.columns.sheets for part in sheet.parts)  # fmt: skip

    @property
    def has_routing_weights(self) -> bool:
        return any(routing_fields(part.held.fields())[1] is not None
                   for sheet, _ in self.sides.batch.columns.sheets for part in sheet.parts)  # fmt: skip

    def _routing(self, *, with_weights: bool) -> Routing:
        """The recorded experts of the chosen samples."""
        for sheet, places in self.sides.batch.columns.sheets:
            refs = [routing_fields(part.held.fields()) for part in sheet.parts]
            if any(experts is None for experts, _ in refs) or any(places[row] is None for row in self.rows):
                continue
            experts: list[Array] = []
            weights: list[Array] = []
            for row in self.rows:
                part, inside = sheet.index[places[row]]  # type: ignore[index]
                for found, ref, absent in ((experts, refs[part][0], -1), (weights, refs[part][1], 0)):
                    if ref is not None:
                        found.append(by_token(ref, sheet.parts[part], absent, (inside,)))
            whole = (
                np.concatenate(weights).astype(np.float32) if with_weights and len(weights) == len(experts) else None
            )
            name = refs[0][0].name if refs[0][0] is not None else ""
            return Routing(np.concatenate(experts).astype(np.int64), whole, name)
        raise UnavailableError("the record holds no routing of every chosen sample")


def _headed(head: Any, dtype: str | None) -> Any:
    """The head, in a dtype of its own.

    Raises:
        UnavailableError: it is more than one product, so that its dtype cannot be changed alone.
    """
    if dtype is None:
        return head

    def product(hidden_ND: torch.Tensor) -> torch.Tensor:
        wanted = getattr(torch, dtype)
        embedding = head.output_embedding
        bias = getattr(embedding, "bias", None)
        return torch.nn.functional.linear(
            hidden_ND.to(wanted), embedding.weight.to(wanted), None if bias is None else bias.to(wanted)
        )

    if not head.is_one_product:
        raise UnavailableError("the head does more than one product: its dtype is not changed alone")
    return product


def _read(head: Any, hidden_ND: torch.Tensor, targets_N: torch.Tensor, settings: Sequence[Setting]) -> list[Array]:
    """Every setting's log-probabilities of the targets [N], of one pass through the head."""
    found = [np.empty(targets_N.numel()) for _ in settings]
    for start in range(0, targets_N.numel(), _ROWS):
        some = slice(start, start + _ROWS)
        logits_NV, aim_N1 = head(hidden_ND[some]).float(), targets_N[some, None]
        sorted_by: dict[float, tuple[torch.Tensor, torch.Tensor]] = {}
        scored: dict[float, tuple[torch.Tensor, torch.Tensor]] = {}
        for values_N, one in zip(found, settings, strict=True):
            heat = one.temperature
            if heat not in scored:
                scaled = logits_NV / heat
                scored[heat] = scaled, scaled.gather(-1, aim_N1)[:, 0] - torch.logsumexp(scaled, dim=-1)
            scaled, logprob_N = scored[heat]
            if (one.top_k, one.top_p, one.min_p) != (0, 1.0, 0.0):
                if heat not in sorted_by:
                    sorted_by[heat] = _sorted(scaled)
                logprob_N = _truncated(logprob_N, *sorted_by[heat], one)
            values_N[some] = logprob_N.double().cpu().numpy()
    return found


def _sorted(scaled_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(probabilities from the largest on, their running sum) [N, V]."""
    sorted_NV = torch.softmax(scaled_NV, dim=-1).sort(dim=-1, descending=True).values
    return sorted_NV, sorted_NV.double().cumsum(-1).float()


def _truncated(logprob_N: torch.Tensor, sorted_NV: torch.Tensor, summed_NV: torch.Tensor, one: Setting) -> torch.Tensor:
    """Log-probabilities over the tokens that top-k, then top-p, then min-p keep (vLLM, sglang and transformers keep the
    token that crosses p); a token that is not kept keeps its own: no engine samples it."""
    size = sorted_NV.shape[-1]
    kept_N = torch.full(logprob_N.shape, size, device=logprob_N.device)
    if one.top_k:
        kept_N = kept_N.clamp(max=one.top_k)
    if one.top_p < 1.0:
        whole_N1 = summed_NV.gather(-1, (kept_N - 1)[:, None])
        kept_N = torch.minimum(kept_N, (summed_NV / whole_N1 < one.top_p).sum(-1) + 1)
    if one.min_p > 0:
        kept_N = torch.minimum(kept_N, (sorted_NV >= one.min_p * sorted_NV[:, :1]).sum(-1))
    last = (kept_N - 1).clamp(min=0, max=size - 1)[:, None]
    mass_N, least_N = summed_NV.gather(-1, last)[:, 0], sorted_NV.gather(-1, last)[:, 0]
    is_kept = logprob_N >= torch.log(least_N) - 1e-4
    return torch.where(is_kept, logprob_N - torch.log(mass_N), logprob_N)


@contextmanager
def _choosing(backbone: Any) -> Iterator[list[list[torch.Tensor]]]:
    """The experts that every router chooses while the block runs, layer by layer, call by call."""
    chosen: list[list[torch.Tensor]] = []
    handles = []
    for router in routers(backbone):
        calls: list[torch.Tensor] = []
        chosen.append(calls)
        handles.append(router.register_forward_hook(lambda _m, _a, output, calls=calls: calls.append(output[2].cpu())))
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _changed(causal_lm: Any, setting: Setting) -> Iterator[None]:
    """The model with its adapter scaled or its matrices on a grid; as it was afterwards."""
    kept: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def put(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
        kept.append((parameter, parameter.data))
        parameter.data = value.to(parameter.dtype)

    try:
        if setting.adapter != 1.0:
            adapted = [module for module in causal_lm.modules() if hasattr(module, "lora_B")]
            if not adapted:
                raise UnavailableError("the model has no adapter")
            for module in adapted:
                put(module.lora_B.weight, module.lora_B.weight.data * setting.adapter)
        if setting.grid is not None:
            for parameter in _matrices(causal_lm):
                put(parameter, on_grid(parameter.data, setting.grid))
        yield
    finally:
        for parameter, value in kept:
            parameter.data = value


def on_grid(weight: torch.Tensor, grid: Grid) -> torch.Tensor:
    """A matrix, or a stack of them, as an engine that quantises holds it."""
    kind, scaling = grid.split(" ", 1)
    if weight.ndim > 2:
        return torch.stack([on_grid(one, grid) for one in weight])
    if kind == "fp8":
        return float8_grid(weight, scaling == "per row")
    return integer_grid(weight, {"int8": 127, "int4": 7}[kind], per_row=scaling == "per row")


def _matrices(causal_lm: Any) -> list[torch.nn.Parameter]:
    """The matrices that engines quantise: not the embedding, the head or a router."""
    left = {
        id(one.weight)
        for one in (causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings())
        if one is not None
    }
    return [
        parameter
        for name, parameter in causal_lm.named_parameters()
        if parameter.ndim >= 2 and id(parameter) not in left and not name.endswith(".gate.weight")
    ]
