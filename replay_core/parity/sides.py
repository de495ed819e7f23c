"""CriticSide: one critic of a parity run, and what is known of it beside its values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from msgspec import Struct, field

from replay_core import pages
from replay_core.errors import RldbgError
from replay_core.parity.values import Floats
from replay_core.records import Run

if TYPE_CHECKING:
    from replay_core.documents.parts import Settings

_HEAD = "param.v_head.summary."
#: What a critic's head is called in the file of weights that ROLL's critics leave beside their values.
_BESIDE = {"deepspeed": ("v_head.summary.",), "megatron": ("mcore_value_head.",)}


class TrainedStep(TypedDict):
    """What a training step of a critic did; `rows` in the order they were trained."""

    step: int
    loss: float
    grad_norm: float | None
    clipped: float | None
    rows: list[int]


class CriticAnswer(TypedDict):
    """What the child of one critic answers. weights: name -> digest."""

    backend: str
    engine: str
    dump: str
    log: str
    readback: Settings
    weights: dict[str, str]
    steps: list[TrainedStep]
    notes: list[str]
    seconds: float


class CriticSide(Struct):
    """A critic. `backend` is its own name for itself; `readback`, `weights`, `head` are None where nobody wrote them.

    weights: name -> digest, under Hugging Face's names. head: "weight" [D] and "bias" [1], as far as recorded.
    """

    backend: str
    engine: str
    path: str
    dump: str
    readback: Settings | None = None
    weights: dict[str, str] | None = None
    steps: list[TrainedStep] = field(default_factory=list)
    head: dict[str, Floats] | None = None
    log: str | None = None
    notes: list[str] = field(default_factory=list)
    seconds: float | None = None

    @classmethod
    def recorded(cls, run: Run, backend: str) -> CriticSide:
        """What a dump says of the critic that wrote it."""
        flags = run.flags or {}
        readback, weights = flags.get("readback"), flags.get("weights")
        return cls(
            backend=backend,
            engine=str(flags.get("engine") or "recorded"),
            path=str(run.path),
            dump=str(run.path),
            readback=readback if isinstance(readback, dict) else None,
            weights=weights if isinstance(weights, dict) else None,
            head=read_head(run, backend),
        )

    def said(self, name: str) -> Any:
        """A control as read back, or None."""
        return None if self.readback is None else self.readback.get(name)


def read_head(run: Run, backend: str = "") -> dict[str, Floats] | None:
    """The value head before any training: of a native dump, or of a file of weights beside a critic's values."""
    prefixes = (_HEAD, *_BESIDE.get(backend, ()))
    found: dict[str, Floats] = {}
    for record in run.records:
        if record.key.stage not in ("param", "tensors"):
            continue
        try:
            refs = record.tensors()
        except RldbgError:
            continue
        for ref in refs:
            name = ref.canonical or ref.name
            prefix = next((one for one in prefixes if name.startswith(one)), None)
            if prefix is not None and not ref.is_text and ref.is_readable:
                found.setdefault(name.removeprefix(prefix), np.asarray(pages.array(ref)).astype(np.float64).reshape(-1))
    return found or None
