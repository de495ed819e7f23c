"""Why a cell is not what each row alone is: one job in a child, from the smallest batch that still shows it.

Three parties in float64: the cell's own setting, each row alone in the kernel of the reference, and each row alone in
eager, which breaks ties between kernels. Where the first two are one there, what is left is rounding, and how far
either dump is from that truth says whether it is more than this dtype's noise. Where they are not, `interventions`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from replay_core.dumps import open_run
from replay_core.errors import CellError, RldbgError, UnavailableError
from replay_core.jobs import LogLine, OnEvent, ignore
from replay_core.records import Run
from replay_core.replay import attention, settings
from replay_core.replay.batch import MicroBatch, resolve_temperature
from replay_core.replay.cell import BatchReplay
from replay_core.replay.depth import fewest_layers
from replay_core.replay.flags import Flags
from replay_core.replay.held import HOLDER, Holder
from replay_core.replay.interventions import (
    Observer,
    Sight,
    TensorPlace,
    Trace,
    finest,
    first_apart,
    in_dtype,
    lost,
    relative,
)
from replay_core.replay.logprobs import token_logprobs
from replay_core.replay.model import LoadedModel, prepare
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.reading import read_batch
from replay_core.replay.segments import tokens_of

#: Relative difference of a token's final hidden state, in float64, up to which two settings compute the same: norms,
#: softmax and rotations take float32 inside.
SAME = 2e-5
#: Nats within which log-probabilities of one hidden state do.
SAME_NATS = 1e-4
#: Multiply-adds that one question may take: a minute of two cores.
_BUDGET = 4e11
#: Slots of a batch whose every token is watched, and rows and columns that are kept of a larger one.
_WATCHED, _COMPANY = 1024, (3, 32)
#: Tokens right before the first that parts, of which each is changed by itself.
_BEFORE = 4
#: Tokens of the row by which the reference itself is checked, and the parties to that.
_ITSELF, _PARTIES = 48, ("reference", "eager")
#: Tokens whose log-probabilities are formed.
_LOGPROBS = 256


@dataclass
class ReplayBench:
    """One loaded model under several settings."""

    plan: ReplayPlan
    model: LoadedModel
    temperature: float

    def observer(self, flags: Flags, batch: MicroBatch) -> Observer:
        prepare(self.model, flags)
        return Observer(BatchReplay(self.plan, flags, batch, self.model, self.temperature, ignore))

    def hidden(self, flags: Flags, batch: MicroBatch) -> torch.Tensor:
        return self.observer(flags, batch).hidden()

    def apart(self, flags: Flags, other: Flags, batch: MicroBatch) -> float:
        """Relative difference of the worst token."""
        return _worst(relative(self.hidden(other, batch), self.hidden(flags, batch)))


def explain(
    plan: ReplayPlan,
    reference: Flags,
    dumps: Mapping[str, str],
    final_hidden: str,
    on_event: OnEvent = ignore,
    holder: Holder | None = None,
    *,
    always: bool = False,
) -> dict[str, Any]:
    """The evidence of why the plan's cell is not what `reference` is (`causes.CauseOf` reads it).

    Args:
        dumps: what either of them put out (`reference`, `cell`), to be held to the truth; may be empty.
        final_hidden: the tensor of the final hidden states in those.
        always: ask who moves whom also where the two are one.

    Raises:
        RldbgError: the model cannot be run.
    """
    flags, _ = attention.resolve(plan.flags)
    flags = replace(flags, compile="off", routing="live")
    reference, _ = attention.resolve(replace(reference, compile="off", routing="live"))
    run = open_run(Path(plan.dump))
    recorded = read_batch(run, plan)
    temperature, _ = resolve_temperature(plan.temperature, recorded.batch.temperature)
    plan = replace(plan, flags=flags, capture=None)
    with settings.applied(flags, plan.seed):
        model, _ = (holder or HOLDER).model(plan, run, recorded.batch)
        bench = ReplayBench(plan, model, temperature)
        held = {name: open_run(Path(path)) for name, path in dumps.items()}
        wanted = finest(model)
        for dtype in wanted:
            arithmetic = str(dtype).removeprefix("torch.")
            on_event(LogLine(f"why: {flags.label()} against each row alone, in {arithmetic}"))
            try:
                with in_dtype(model, dtype):
                    found = _evidence(bench, flags, reference, recorded.batch, held, final_hidden, always)
                    return {"arithmetic": arithmetic, **found}
            except CellError:
                # Some kernels know no float64.
                if dtype is wanted[-1]:
                    raise
    raise AssertionError("a model has a dtype")


def _evidence(
    bench: ReplayBench,
    flags: Flags,
    reference: Flags,
    batch: MicroBatch,
    held: Mapping[str, Run],
    final_hidden: str,
    always: bool,
) -> dict[str, Any]:
    alone = bench.hidden(reference, batch)
    distance = relative(alone, bench.hidden(flags, batch))
    found: dict[str, Any] = {
        "apart": _worst(distance),
        "logp_apart": None,
        "kernels_apart": None, "truth": {}, "smallest": None, "first": None, "single_agrees": None, "visibility": [],
        "packed": flags.packing, "mixture": is_mixture(bench.model), "shifted": False,
    }  # fmt: skip
    with contextlib.suppress(CellError):
        found["logp_apart"] = _logprobs_apart(bench, flags, reference, batch)
    eager = replace(reference, attention="eager")
    truth = alone
    if reference.attention not in ("eager", "own"):
        with contextlib.suppress(UnavailableError):
            truth = bench.hidden(eager, batch)
            found["kernels_apart"] = _worst(relative(truth, alone))
    for name, dump in held.items():
        with contextlib.suppress(RldbgError):
            found["truth"][name] = figures(relative(truth, torch.from_numpy(tokens_of(dump, final_hidden))))
    is_one = found["apart"] <= SAME
    if is_one and not always:
        return found
    # A row of one token has nobody to be moved by: interventions are made in a batch that still has company.
    small = batch if batch.ids_BS.size <= _WATCHED else smallest(bench, flags, reference, batch, *_COMPANY)
    if not is_one:
        least = smallest(bench, flags, reference, small)
        depth = fewest_layers(bench.model, lambda: bench.apart(flags, reference, least) > SAME)
        layers, of_layers = (None, None) if depth is None else depth
        found["smallest"] = {"rows": least.rows, "tokens": least.valid_BS.sum(axis=1).tolist(), "layers": layers,
                             "of_layers": of_layers}  # fmt: skip
    observer = bench.observer(flags, small)
    base = observer.trace()
    sights = observer.sights(base)
    found["visibility"] = [sight.to_mapping("cell") for sight in sights]
    own = bench.observer(reference, small)
    own_base = own.trace()
    own_sights = own.sights(own_base, 2)
    found["visibility"] += [sight.to_mapping("reference") for sight in own_sights]
    positions = [one.cell.arrangement.position_ids.reshape(-1)[one.slots.numpy()] for one in (observer, own)]
    found["shifted"] = not np.array_equal(*positions)
    parted = first_apart(observer, own_base, base, SAME)
    found["first"] = None if parted is None else parted.to_mapping()
    tokens = {sight.token for sight in own_sights if sight.token is not None} | _before_parting(
        observer, own_base, base, parted
    )
    found["lost"] = _lost(observer, base, sights, own, own_base, own_sights, parted) or _lost_within(
        bench, (flags, reference), small, sorted(tokens), parted
    )
    worst = int(observer.sample_N[int(relative(own_base.hidden, base.hidden).argmax())])
    if small.rows > 1:
        single = small.take([worst])
        found["single_agrees"] = bench.apart(flags, reference, single) <= SAME
    return found


def of_itself(cell: BatchReplay) -> dict[str, Any] | None:
    """Whether each row alone, to which everything is held, is right itself; None where that would take too long.

    The start of the longest row, in its own kernel and in eager: nobody may see the future or lose its own past, and
    both compute the same. Only where one of these shows is every module watched.
    """
    lengths = cell.batch.valid_BS.sum(axis=1)
    row = cell.batch.take([int(lengths.argmax())])
    ids = row.ids_BS[row.valid_BS][None, :_ITSELF]
    batch = MicroBatch(ids, np.ones_like(ids, dtype=bool))
    bench = ReplayBench(replace(cell.plan, capture=None), cell.model, cell.temperature)
    parameters = sum(one.numel() for one in cell.model.backbone.parameters())
    if parameters * ids.size * 8 > _BUDGET or not ids.size or cell.model.known.get("not_finite"):
        return None
    reference = replace(cell.flags, fault="none", compile="off")
    found: dict[str, Any] = {"kernels_apart": None, "visibility": [], "apart": 0.0, "logp_apart": None, "truth": {},
                             "smallest": None, "first": None}  # fmt: skip
    parties = {"reference": reference}
    if reference.attention not in ("eager", "own"):
        parties["eager"] = replace(reference, attention="eager")
    hidden = {}
    try:
        found["arithmetic"] = str(finest(cell.model)[0]).removeprefix("torch.")
        with in_dtype(cell.model, finest(cell.model)[0]):
            for name, flags in parties.items():
                with contextlib.suppress(UnavailableError):
                    hidden[name] = bench.hidden(flags, batch)
                    observer = bench.observer(flags, batch)
                    if observer.is_suspect(hidden[name]):
                        sights = observer.sights(observer.trace(), 1)
                        found["visibility"] += [sight.to_mapping(name) for sight in sights]
    except CellError:
        return None
    finally:
        prepare(cell.model, cell.flags)
    if len(hidden) == len(_PARTIES):
        found["kernels_apart"] = _worst(relative(hidden["eager"], hidden["reference"]))
    return found


def _lost(
    a: Observer, base: Trace, sights: Any, b: Observer, b_base: Trace, b_sights: Any, parted: TensorPlace | None
) -> dict[str, Any] | None:
    """Where a token first loses those that it must see: attention or a state, and no later than the two part. What
    works on each token by itself can only pass on what it is given.
    """
    like = {sight.token: sight for sight in b_sights if sight.what == "token"}
    for sight in sights:
        if sight.what == "token" and sight.token in like:
            found = lost(a, base, sight, b, b_base, like[sight.token])
            if found is None or found[0].kind not in ("mixer", "state"):
                continue
            place, is_itself = found
            follows = parted is not None and parted.kind != "position" and place.order > parted.order
            if parted is None or not follows or place.module == parted.module:
                return {**place.to_mapping(), "token": sight.token, "itself": is_itself}
    return None


def _before_parting(observer: Observer, own: Trace, cell: Trace, parted: TensorPlace | None) -> set[int]:
    """The first token of any sample that is not what it is alone, and those right before it: of these it lost one."""
    if parted is None:
        return set()
    apart_N = relative(own.laid[parted.tensor], cell.laid[parted.tensor]).numpy() > SAME
    if not apart_N.any():
        return set()
    first = int(observer.position_N[apart_N].min())
    return set(range(max(0, first - _BEFORE), first + 1))


def _lost_within(
    bench: ReplayBench,
    parties: Sequence[Flags],
    batch: MicroBatch,
    tokens: Sequence[int],
    parted: TensorPlace | None,
) -> dict[str, Any] | None:
    """The same of the one module where they part: in its last layers a model has a token's past in all later ones."""
    if parted is None or parted.kind != "mixer":
        return None
    seen: list[dict[int, Trace]] = []
    bases = []
    observers = []
    for flags in parties:
        observers.append(bench.observer(flags, batch))  # one after the other: the model has one kernel at a time
        bases.append(observers[-1].trace(heads=observers[-1].heads(parted.module)))
        seen.append({token: observers[-1].nudged(parted.module, token) for token in tokens})
    (a, b), (base, b_base) = observers, bases
    for token in tokens:
        nudged = [Sight("token", None, token, trace=traces[token]) for traces in seen]
        found = lost(a, base, nudged[0], b, b_base, nudged[1])
        if found is not None and found[0].module == parted.module:
            return {**found[0].to_mapping(), "token": token, "itself": found[1]}
    return None


def smallest(
    bench: ReplayBench, flags: Flags, reference: Flags, batch: MicroBatch, rows_least: int = 1, width_least: int = 1
) -> MicroBatch:
    """The smallest batch that still shows the difference: rows halved, then prefixes, then single rows and tokens."""

    def fails(part: MicroBatch) -> bool:
        if part.rows < rows_least or part.ids_BS.shape[1] < width_least or int(part.valid_BS.sum(axis=1).min()) < 1:
            return False
        return bench.apart(flags, reference, part) > SAME

    tries = 40
    size = batch.rows
    while size > 1 and tries > 0:
        size = (size + 1) // 2
        starts = range(0, batch.rows, size)
        for start in starts:
            rows = list(range(batch.rows))
            less = rows[start : start + size]
            tries -= 1
            if len(less) < batch.rows and fails(batch.take(less)):
                batch, size = batch.take(less), len(less)
                break
            without = [row for row in rows if row not in less]
            tries -= 1
            if without and fails(batch.take(without)):
                batch, size = batch.take(without), len(without) * 2
                break
    width = batch.ids_BS.shape[1]
    step = width // 2
    while step >= 1 and tries > 0:
        tries -= 1
        less_batch = batch.first_columns(batch.ids_BS.shape[1] - step)
        if fails(less_batch):
            batch = less_batch
            step = min(step, batch.ids_BS.shape[1] // 2)
        else:
            step //= 2
    return batch


def _logprobs_apart(bench: ReplayBench, flags: Flags, reference: Flags, batch: MicroBatch) -> float | None:
    """Nats between the two settings' heads, on the same hidden states' tokens; None of a critic."""
    if bench.plan.is_critic:
        return None
    found = []
    for one in (flags, reference):
        observer = bench.observer(one, batch)
        cell = observer.cell
        head = cell.probed_head()
        slots, targets = (torch.from_numpy(part) for part in cell.arrangement.next_tokens())
        some = torch.linspace(0, max(0, slots.numel() - 1), min(_LOGPROBS, slots.numel())).long()
        whole = torch.zeros(cell.arrangement.layout.sample_BS.size, dtype=torch.long)
        whole[observer.slots] = torch.arange(observer.slots.numel())
        parameter = next(bench.model.causal_lm.parameters())
        hidden = observer.hidden()[whole[slots[some]]].to(parameter.device, parameter.dtype)
        with torch.no_grad(), attention.pinned(one):
            found.append(token_logprobs(head, hidden, targets[some].to(parameter.device), bench.temperature)[0])
    return float((found[0] - found[1]).abs().max()) if found[0].numel() else 0.0


def figures(distance_N: torch.Tensor) -> dict[str, float]:
    """How far tokens are off: the typical one, what three quarters are below, the worst."""
    sorted_N = distance_N.sort().values
    last = sorted_N.numel() - 1
    return {"typical": float(sorted_N[last // 2]), "most": float(sorted_N[last * 3 // 4]), "worst": float(sorted_N[-1])}


def _worst(distance_N: torch.Tensor) -> float:
    return float(distance_N.max()) if distance_N.numel() else 0.0


def is_mixture(model: LoadedModel) -> bool:
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(model.config, name, None) or 0) > 1 for name in names)
