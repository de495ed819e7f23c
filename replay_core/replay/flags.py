"""Flags: the settings one replay runs under. Standard library only."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from replay_core.dtypes import named
from replay_core.errors import RequestError

#: `flash` is the best flash attention that is really here: fa4, fa3, fa2, else torch's own flash kernel.
ATTENTIONS = (
    "eager", "sdpa", "sdpa-math", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "flex", "fa2", "fa3", "fa4", "flash",
    "own",
)  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")
COMPILES = ("off", "aot_eager", "inductor")
DYNAMICS = ("auto", "on", "off")
LOGITS = ("chunked", "whole")
MODES = ("eval", "train")
ROUTINGS = ("live", "recorded")
#: Deliberate mistakes, one per way a batch goes wrong: what they look like, and that they are told apart.
FAULTS = ("none", "boundary", "foreign_key", "no_positions", "padded_mask", "raise", "abort", "hang")

#: The axes of a matrix where none are named: the three toggles of seed 000, each baseline first.
MATRIX = "attention=eager,flash compile=off,inductor packing=off,on"

_CHOICES = {
    "attention": ATTENTIONS, "dtype": DTYPES, "device": DEVICES, "compile": COMPILES, "dynamic": DYNAMICS,
    "logits": LOGITS, "mode": MODES, "routing": ROUTINGS, "fault": FAULTS,
}  # fmt: skip
_SWITCHES = ("packing", "block_mask", "use_cache", "gradient_checkpointing", "deterministic")
_NUMBERS = ("rows_per_forward", "threads")
_SWITCH = {
    "on": True, "true": True, "yes": True, "1": True,
    "off": False, "false": False, "no": False, "0": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Flags:
    """What is asked of one replay. What really ran is read back (`effective.py`), never assumed from here.

    attention: which attention kernel; the `sdpa-…` forms pin one backend of torch's own attention; `own` leaves the
        one the model comes with (a factory's registered function, say).
    packing: lay the samples end to end in one row, without padding.
    dtype: of the weights; the logits are always taken to float32.
    rows_per_forward: samples per call of the model; None is the whole micro-batch. 1 is **the reference**:
        each row alone, no padding, positions 0..L-1, no mask, no cache.
    block_mask: False packs without the mask between samples: the classic leak, for learning what it looks like.
    threads: CPU threads torch may use; None leaves the process's own number.
    compile: the backend of torch.compile; aot_eager traces and does not generate code, so it splits Dynamo
        from inductor.
    dynamic: whether compiled code takes any shape (torch.compile's own None is `auto`).
    logits: chunked holds a few rows of logits at once; whole holds all of them, as many trainers do.
    mode: train applies the model's dropout, seeded.
    routing: recorded sends each token to the experts that the dump holds for it.
    use_cache, gradient_checkpointing: as the trainer passes them; both change what a pack sees or costs.
    deterministic: torch.use_deterministic_algorithms and what belongs to it.
    fault: a deliberate mistake (`faults.py`), for learning what it looks like and for tests.
    """

    attention: str = "sdpa"
    packing: bool = False
    dtype: str = "float32"
    rows_per_forward: int | None = None
    block_mask: bool = True
    device: str = "cpu"
    threads: int | None = None
    compile: str = "off"
    dynamic: str = "auto"
    logits: str = "chunked"
    mode: str = "eval"
    routing: str = "live"
    use_cache: bool = False
    gradient_checkpointing: bool = False
    deterministic: bool = False
    fault: str = "none"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise _wrong_value(name, getattr(self, name), " | ".join(choices), choices)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise _wrong_value(name, getattr(self, name), "on | off")
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise _wrong_value(name, value, "a number from 1, or all")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Flags:
        """Flags from JSON-able data; what is not named keeps its default.

        Raises:
            RequestError: an unknown flag or value, naming what exists.
        """
        for name in mapping:
            _known(name)
        return cls(**dict(mapping))

    def to_mapping(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def parse(cls, settings: str | Iterable[str], base: Flags | None = None) -> Flags:
        """Flags from texts like `attention=eager`, `packing=on`, `dtype=bf16`, applied to `base`.

        Raises:
            RequestError: no `=`, or an unknown flag or value, naming what exists.
        """
        flags = base or cls()
        for setting in settings.split() if isinstance(settings, str) else settings:
            name, equals, text = setting.partition("=")
            if not equals:
                raise RequestError("a flag is written name=value", expected="attention=eager", found=setting)
            name = name.strip().replace("-", "_")
            _known(name)
            flags = replace(flags, **{name: _value(name, text.strip())})
        return flags

    @property
    def is_reference(self) -> bool:
        """Whether each sample goes through the model alone."""
        return self.rows_per_forward == 1

    def reference(self) -> Flags:
        """The same settings with each row alone: what padded and packed are judged against.

        Never compiled, cached or faulty, so that nothing it is asked about is part of the answer.
        """
        return replace(
            self, rows_per_forward=1, packing=False, block_mask=True, fault="none", compile="off", dynamic="auto",
            use_cache=False, gradient_checkpointing=False, logits="chunked",
        )  # fmt: skip

    def changed(self) -> dict[str, Any]:
        """The flags that differ from their defaults."""
        return {name: value for name, value in self.to_mapping().items() if value != _DEFAULTS[name]}

    def label(self) -> str:
        """The settings for a person: `packed, sdpa, float32`."""
        if self.is_reference:
            parts = ["rows alone"]
        else:
            parts = ["packed" if self.packing else "padded"]
            if self.packing and not self.block_mask:
                parts.append("no block mask")
            if self.rows_per_forward is not None:
                parts.append(f"{self.rows_per_forward} rows per forward")
        parts += [self.attention, self.dtype]
        if self.compile != "off":
            parts.append(self.compile if self.dynamic == "auto" else f"{self.compile} dynamic={self.dynamic}")
        parts += [name.replace("_", " ") for name in _SWITCHES[2:] if getattr(self, name)]
        parts += ["recorded routing"] * (self.routing != "live")
        parts += [f"logits {self.logits}"] * (self.logits != "chunked") + [self.mode] * (self.mode != "eval")
        if self.fault != "none":
            parts.append(f"fault {self.fault}")
        if self.device != "cpu":
            parts.append(self.device)
        return ", ".join(parts)


NAMES = tuple(field.name for field in fields(Flags))
_DEFAULTS = Flags().to_mapping()


def _value(name: str, text: str) -> Any:
    if name in _SWITCHES:
        if text.lower() not in _SWITCH:
            raise _wrong_value(name, text, "on | off")
        return _SWITCH[text.lower()]
    if name in _NUMBERS:
        if text.lower() in ("all", "none", "auto"):
            return None
        if not text.isdigit():
            raise _wrong_value(name, text, "a number from 1, or all")
        return int(text)
    return named(text) if name == "dtype" else text


def _known(name: str) -> None:
    if name not in NAMES:
        raise RequestError(
            f"there is no flag {name!r}", expected=", ".join(NAMES), found=name, hint=_nearest(name, NAMES)
        )


def _wrong_value(name: str, value: Any, expected: str, choices: Iterable[str] = ()) -> RequestError:
    return RequestError(
        f"{name} cannot be {value!r}", expected=expected, found=str(value), hint=_nearest(str(value), choices)
    )


def _nearest(word: str, choices: Iterable[str]) -> str | None:
    near = difflib.get_close_matches(word, list(choices), n=1)
    return f"did you mean {near[0]}?" if near else None
