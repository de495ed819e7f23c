"""The model of one side, with its weights as stored, as a replay loads it; and what two sides' models differ in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import Struct, field
from msgspec.structs import replace
from safetensors import safe_open

from replay_core import engine_names
from replay_core.records import Run
from replay_core.referee.recorded import Recorded
from replay_core.replay import fit, references
from replay_core.replay.batch import MicroBatch
from replay_core.replay.flags import Flags
from replay_core.replay.model import load
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.versions import loaded_in

_DTYPES = ("bfloat16", "float16", "float32")
#: Other checkpoints that are tried.
_OTHERS = 3
#: Settings of a config that say nothing of what is computed.
_IDLE = (
    "_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache",
    "_attn_implementation", "attn_implementation", "_experts_implementation", "initializer_range",
)  # fmt: skip


class SideModel(Struct):
    """causal_lm in the dtype its side computed in; reference: where its weights came from.

    autocast: what torch.autocast makes of products, whose weights are rounded to it.
    """

    causal_lm: Any
    reference: str
    dtype: str
    notes: list[str]
    autocast: torch.dtype | None = None
    #: What was given to the whole model, its log-probabilities, and how each run of noise moves them (`ruling`).
    floors: list[tuple[tuple[Any, ...], Any, list[torch.Tensor]]] = field(default_factory=list)


def side_model(recorded: Recorded, weights: str | None, like: SideModel | None = None) -> SideModel:
    """The model of a side; `like`, the other side's, where it is the same model: it stands in memory once.

    Raises:
        ModelError, UnavailableError: there are no weights, or they do not fit (as a replay's).
    """
    run, place = recorded.run, recorded.place
    dtype = "float32" if recorded.autocast else recorded.dtype or _said_dtype(run) or "float32"
    plan = ReplayPlan(
        dump=str(run.path), step=place.step or 0, rank=place.rank or 0, micro=place.micro or 0,
        model=weights or references.CHECKPOINT, out="", role=place.role, flags=Flags(attention="eager", dtype=dtype),
    )  # fmt: skip
    reference, notes = references.resolve(plan, run)
    ids, valid = recorded.ids_BL, recorded.valid_BL
    batch = MicroBatch(np.zeros(valid.shape, np.int64) if ids is None else ids, valid)
    autocast: torch.dtype | None = None if recorded.autocast is None else getattr(torch, recorded.autocast)
    if like is not None and (like.reference, like.dtype, like.autocast) == (reference, dtype, autocast):
        fit.need_vocabulary(like.causal_lm.config.get_text_config().vocab_size, batch, reference)
        return replace(like, notes=list(dict.fromkeys([*notes, *like.notes])))
    loaded = load(plan, reference, notes, batch)
    causal_lm = loaded.causal_lm
    if hasattr(causal_lm, "set_experts_implementation"):
        # Fused experts are kernels of their own dtypes.
        causal_lm.set_experts_implementation("eager")
    if autocast is None:
        return SideModel(causal_lm, loaded.reference, dtype, loaded.notes)
    for module in causal_lm.modules():
        if isinstance(module, torch.nn.Linear):
            module.to(autocast)
    notes = [f"products run in {recorded.autocast} over {dtype} weights, as torch.autocast does", *loaded.notes]
    return SideModel(causal_lm, loaded.reference, dtype, notes, autocast)


def _said_dtype(run: Run) -> str | None:
    flags = run.flags or {}
    effective = flags.get("effective") if isinstance(flags.get("effective"), dict) else flags
    said = str((effective or {}).get("dtype") or "")
    return said if said in _DTYPES else None


class Checkpoint(Struct, frozen=True):
    """Other weights that a side may have run with, read one by one: short name -> the file and the name in it."""

    name: str
    place: Path
    held: dict[str, tuple[Path, str]]
    #: The weights under the model's own names, where those of the files are others; filled when first needed.
    _converted: dict[str, torch.Tensor] = field(default_factory=dict)

    def convert(self, causal_lm: Any) -> None:
        """Load the weights as the model's own class does, if its names are not those of the files (Mixtral's)."""
        missing = (name for name, own in causal_lm.named_parameters() if self.like(name, own) is None)
        if next(missing, None) is not None and (self.place / "config.json").is_file():
            state = (
                type(causal_lm)
                .from_pretrained(self.place, **loaded_in(next(causal_lm.parameters()).dtype))
                .state_dict()
            )
            self._converted.update({engine_names.short(name): value for name, value in state.items()})

    def like(self, path: str, own: torch.Tensor) -> torch.Tensor | None:
        """What `own`, the parameter `path`, is here: under any wrapping of its name, experts stacked as it has them."""
        converted = self._converted.get(engine_names.short(path))
        if converted is not None:
            return converted.to(own.dtype) if converted.shape == own.shape else None
        stack = len(own) if own.ndim == 3 else None
        made_of = engine_names.pieces(engine_names.short(path), self.held.__contains__, stack)
        if not made_of or any(piece.of_stack for piece in made_of):
            return None
        parts: dict[int | None, list[torch.Tensor]] = {}
        for piece in made_of:
            file, name = self.held[piece.source]
            with safe_open(file, framework="pt") as opened:
                parts.setdefault(piece.expert, []).append(opened.get_tensor(name))
        whole = [torch.cat(each) for each in parts.values()]
        value = torch.stack(whole) if stack is not None and None not in parts else whole[0]
        return value.to(own.dtype) if value.shape == own.shape else None


def other_weights(run: Run, own: str) -> list[Checkpoint]:
    """The checkpoints that the dump notes beside a side's own (safetensors), called `weights of step N`.

    The nearest first by their step, at most `_OTHERS`: which of them it was is asked, not whether a thousand fit.
    """
    folder = run.path if run.path.is_dir() else run.path.parent
    places = {step: folder / reference for step, reference in run.models.items() if step is not None}
    mine = next((step for step, place in places.items() if place.resolve() == Path(own).resolve()), 0)
    found: list[Checkpoint] = []
    for step in sorted(places, key=lambda step: abs(step - mine)):
        if places[step].resolve() == Path(own).resolve() or len(found) == _OTHERS:
            continue
        held: dict[str, tuple[Path, str]] = {}
        for file in sorted(places[step].glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                held |= {engine_names.short(name): (file, name) for name in opened.keys()}  # noqa: SIM118
        if held:
            found.append(Checkpoint(f"weights of step {step}", places[step], held))
    return found


def all_of(causal_lm: Any, other: Checkpoint) -> list[tuple[Any, dict[str, torch.Tensor]]]:
    """(module, its parameters as the other checkpoint has them), of the modules where they differ."""
    found = []
    other.convert(causal_lm)
    for name, module in causal_lm.named_modules():
        values = {}
        for part, own in module.named_parameters(recurse=False):
            theirs = other.like(f"{name}.{part}", own)
            if theirs is not None and not torch.equal(theirs, own):
                values[part] = theirs
        if values:
            found.append((module, values))
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
