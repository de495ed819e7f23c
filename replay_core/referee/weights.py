"""The model of one side, with its weights as stored, as a replay loads it; and what two sides' models differ in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from replay_core.records import Run
from replay_core.referee.recorded import Recorded
from replay_core.replay import references
from replay_core.replay.batch import MicroBatch
from replay_core.replay.flags import Flags
from replay_core.replay.model import load
from replay_core.replay.plan import ReplayPlan

_DTYPES = ("bfloat16", "float16", "float32")
#: Other checkpoints that are tried.
_OTHERS = 4
#: Settings of a config that say nothing of what is computed.
_IDLE = (
    "_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache",
    "_attn_implementation", "attn_implementation", "_experts_implementation", "initializer_range",
)  # fmt: skip


@dataclass(slots=True)
class SideModel:
    """causal_lm in the dtype its side computed in; reference: where its weights came from."""

    causal_lm: Any
    reference: str
    dtype: str
    notes: list[str]


def side_model(recorded: Recorded, weights: str | None) -> SideModel:
    """The model of a side.

    Raises:
        ModelError, UnavailableError: there are no weights, or they do not fit (as a replay's).
    """
    run, place = recorded.run, recorded.place
    dtype = recorded.dtype or _said_dtype(run) or "float32"
    plan = ReplayPlan(
        dump=str(run.path), step=place.step or 0, rank=place.rank or 0, micro=place.micro or 0,
        model=weights or references.CHECKPOINT, out="", role=place.role, flags=Flags(attention="eager", dtype=dtype),
    )  # fmt: skip
    reference, notes = references.resolve(plan, run)
    ids, valid = recorded.ids_BL, recorded.valid_BL
    batch = MicroBatch(np.zeros(valid.shape, np.int64) if ids is None else ids, valid)
    loaded = load(plan, reference, notes, batch)
    causal_lm = loaded.causal_lm
    if hasattr(causal_lm, "set_experts_implementation"):
        # Fused experts are kernels of their own dtypes.
        causal_lm.set_experts_implementation("eager")
    return SideModel(causal_lm, loaded.reference, dtype, loaded.notes)


def _said_dtype(run: Run) -> str | None:
    flags = run.flags or {}
    effective = flags.get("effective") if isinstance(flags.get("effective"), dict) else flags
    said = str((effective or {}).get("dtype") or "")
    return said if said in _DTYPES else None


def other_weights(run: Run, own: str) -> dict[str, dict[str, torch.Tensor]]:
    """`weights of step N` -> their tensors, of the checkpoints that the dump notes beside a side's own (safetensors).

    The nearest first by their step, at most `_OTHERS`: which of them it was is asked, not whether a thousand fit.
    """
    mine = next((step for step, reference in run.models.items() if Path(reference).resolve() == Path(own).resolve()), 0)
    steps = sorted((step for step in run.models if step is not None), key=lambda step: abs(step - (mine or 0)))
    found: dict[str, dict[str, torch.Tensor]] = {}
    for step in steps:
        files = sorted(Path(run.models[step]).glob("*.safetensors"))
        if not files or Path(run.models[step]).resolve() == Path(own).resolve() or len(found) == _OTHERS:
            continue
        state: dict[str, torch.Tensor] = {}
        for file in files:
            state |= load_file(file)
        found[f"weights of step {step}"] = state
    return found


def differences(a: SideModel, b: SideModel) -> list[str]:
    """What the models of the two sides differ in: settings of their configs, weights."""
    settings_a, settings_b = (side.causal_lm.config.to_dict() for side in (a, b))
    said = [
        f"config {name}: a {settings_a.get(name)}, b {settings_b.get(name)}"
        for name in sorted({*settings_a, *settings_b} - set(_IDLE))
        if settings_a.get(name) != settings_b.get(name)
    ]
    if a.reference != b.reference:
        said += _of_weights(a.causal_lm.state_dict(), b.causal_lm.state_dict())
    return said


def _of_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    only = [f"weights only in {side}: {', '.join(sorted(names)[:3])}" for side, names in
            (("a", set(a) - set(b)), ("b", set(b) - set(a))) if names]  # fmt: skip
    apart = []
    for name in a:
        if name not in b:
            continue
        if a[name].shape != b[name].shape:
            apart.append((name, float("inf")))
            continue
        # Of the coarser dtype alone: one of two engines rounds the same weights further.
        coarser = min((a[name].dtype, b[name].dtype), key=lambda dtype: torch.finfo(dtype).bits)
        x, y = a[name].to(coarser).double(), b[name].to(coarser).double()
        if not torch.equal(x, y):
            apart.append((name, float((x - y).norm() / x.norm())))
    if apart:
        name, relative = max(apart, key=lambda one: one[1])
        only.append(f"{len(apart)} of {len(a)} weights differ, most {name} by {relative:.1e} of its norm")
    return only
