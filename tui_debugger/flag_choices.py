"""The flags a replay can be given on the screen: their labels, and what each key goes through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from replay_core.replay.flags import ATTENTIONS, COMPILES, DEVICES, DTYPES, DYNAMICS, LOGITS, MODES, Flags


@dataclass(frozen=True, slots=True)
class Choice:
    """A flag and the settings its key goes through."""

    name: str
    label: str
    settings: tuple[Any, ...]


_OFF_ON = (False, True)

FLAGS = (
    Choice("attention", "attention", ATTENTIONS),
    Choice("compile", "compile", COMPILES),
    Choice("dynamic", "dynamic", DYNAMICS),
    Choice("packing", "packing", _OFF_ON),
    Choice("block_mask", "block mask", (True, False)),
    Choice("dtype", "dtype", DTYPES),
    Choice("rows_per_forward", "rows at once", (None, 1)),
    Choice("deterministic", "deterministic", _OFF_ON),
    Choice("gradient_checkpointing", "grad ckpt", _OFF_ON),
    Choice("use_cache", "use_cache", _OFF_ON),
    Choice("mode", "mode", MODES),
    Choice("logits", "logits", LOGITS),
    Choice("device", "device", DEVICES),
)


def default_flags() -> dict[str, Any]:
    defaults = Flags()
    return {choice.name: getattr(defaults, choice.name) for choice in FLAGS}


def asked_flags(document: Mapping[str, Any] | None) -> dict[str, Any]:
    """The flags a run or a side of a comparison was computed with, as they were asked for; empty when unknown."""
    flags = (document or {}).get("flags") or {}
    return dict(flags.get("asked", flags))


def no_effect(name: str, flags: Mapping[str, Any]) -> str | None:
    """Why a flag changes nothing beside the others, or None."""
    if name == "dynamic" and flags.get("compile") == "off":
        return "only when compiling"
    if name == "block_mask" and not flags.get("packing"):
        return "only when packing"
    if name == "gradient_checkpointing" and flags.get("mode") != "train":
        return "only in train mode"
    return None
