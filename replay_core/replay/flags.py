"""Flags: the settings one replay runs under. Standard library only.

A flag is one entry here: its default, its values and its `Flag`. The command's options, the flags pane and its keys,
the axes of a matrix, what a document holds and docs/flags.md follow from it; only what it does to a replay stands
elsewhere.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from replay_core.dtypes import aliases, named
from replay_core.errors import RequestError
from replay_core.replay.kinds import section

#: `flash` is the best flash attention that is really here: fa4, fa3, fa2, else torch's own flash kernel.
ATTENTIONS = (
    "eager", "sdpa", "sdpa-math", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "flex", "fa2", "fa3", "fa4", "flash",
    "own",
)  # fmt: skip

#: The axes of a matrix where none are named: kernel, compiler and layout, each baseline first.
MATRIX = "attention=eager,flash compile=off,inductor packing=off,on"

_SWITCH = {
    "on": True, "true": True, "yes": True, "1": True,
    "off": False, "false": False, "no": False, "0": False,
}  # fmt: skip
_OFF_ON = (False, True)
#: What a flag is in the reference, where that is no value of its own: as asked for, or as it was recorded.
AS_ASKED, AS_RECORDED = object(), object()


class Flag(NamedTuple):
    """What is known of one flag beside its name and default.

    values: what it can be; empty is a number from 1, or None in the word `unset`.
    help: one sentence for the command's help and docs/flags.md.
    reference: its value in the reference, or AS_ASKED or AS_RECORDED.
    effective: the effective setting that says what it really was; None where nothing says so.
    reloads, recompiles: another value needs the model loaded, or its graph compiled, anew.
    key, label, told, row: of the flags pane: its key, its name there, what the key does, its line. No key: not there.
    turns: the values that its key goes through, where those are not `values`.
    inner: what it can be besides in cells that nobody asks for: runs beside the answer.
    option, bare: its option where that is not the name with dashes; what the option means without a value.
    phrase: how a setting is told to a person, of `{value}`; empty tells it elsewhere, None by its name.
    idle: why it changes nothing beside the other flags, or None.
    is_telling: named in a report whatever it is; None: never.
    """

    help: str
    reference: Any
    effective: str | None
    values: tuple[Any, ...] = ()
    unset: str = "all"
    reloads: bool = False
    recompiles: bool = False
    key: str = ""
    label: str = ""
    told: str = ""
    row: int = 0
    turns: tuple[Any, ...] = ()
    inner: tuple[Any, ...] = ()
    option: str = ""
    bare: Any = None
    phrase: str | None = None
    idle: Callable[[Flags], str | None] = lambda _flags: None
    is_telling: bool | None = False

    @property
    def is_switch(self) -> bool:
        return len(self.values) == 2 and isinstance(self.values[0], bool)

    @property
    def expected(self) -> str:
        """What it can be, for a message."""
        return "on | off" if self.is_switch else " | ".join(self.values) or f"a number from 1, or {self.unset}"

    def takes(self, value: Any) -> bool:
        """Whether it can have this value."""
        if self.values:
            return value in self.values and isinstance(value, bool) == self.is_switch
        return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)

    @property
    def spellings(self) -> tuple[str, ...]:
        """The words a value can be written as, where it is one of several: its values, and what dtypes are called."""
        return (*self.values, *aliases(*self.values))


#: What is told of each field of `Flags`, as they stand there.
_IN_ORDER: list[Flag] = []


def _flag(default: Any, help: str, **facts: Any) -> Any:
    _IN_ORDER.append(Flag(help, **facts))
    return default


class Flags(Struct, frozen=True):
    """The value of every flag.

    `rows_per_forward` 1 is **the reference**: each row alone, no padding, positions 0..L-1, no mask, no cache.
    `block_mask` False packs without the mask between samples, and `fault` is a deliberate mistake (`faults.py`): what a
    leak looks like, for learning and for tests.
    """

    attention: str = _flag(
        "sdpa", "Attention kernel; `sdpa-...` pins one backend of torch's own, `own` leaves the model's",
        values=ATTENTIONS, reference=AS_RECORDED, effective="attention", recompiles=True, is_telling=True, phrase="",
        key="a", label="attention", told="next attention implementation", row=1,
    )  # fmt: skip
    packing: bool = _flag(
        False, "Lay the samples end to end in one row, without padding", values=_OFF_ON, reference=False,
        effective="packing", is_telling=True, phrase="", key="p", label="packing", told="packing on or off", row=4,
    )  # fmt: skip
    dtype: str = _flag(
        "float32", "Of the weights; the logits are always taken to float32", values=("float32", "bfloat16", "float16"),
        inner=("float64",),
        reference=AS_ASKED, effective="dtype", reloads=True, is_telling=True, phrase="",
        key="t", label="dtype", told="next dtype", row=6,
    )  # fmt: skip
    rows_per_forward: int | None = _flag(
        None, "Rows per call of the model; 1 is each row alone", reference=1, effective="rows_per_forward",
        is_telling=True, phrase="", key="w", label="rows at once", told="all rows in one forward, or one by one", row=7,
        turns=(None, 1),
    )  # fmt: skip
    block_mask: bool = _flag(
        True, "Pack without the mask between samples: what a leak looks like; for learning, never for use",
        values=(True, False), reference=True, effective="block_mask", option="--debug-no-block-mask", phrase="",
        key="b", label="block mask", told="block mask on, or off: packed rows then leak", row=5,
        idle=lambda flags: None if flags.packing else "only when packing",
    )  # fmt: skip
    positions: str = _flag(
        "cumsum", "Position ids of each row: its tokens counted, its slots with the padding (arange), or as recorded",
        values=("cumsum", "arange", "recorded"), reference="cumsum", effective="position_ids",
        phrase="positions {value}",
        idle=lambda flags: (
            "each row alone counts from 0" if flags.is_reference
            else "a pack has no padding to count" if flags.packing and flags.positions == "arange" else None
        ),
    )  # fmt: skip
    padding: str = _flag(
        "recorded", "Where each row has its padding: as recorded, or all of it on one side",
        values=("recorded", "left", "right"), reference="recorded", effective="padding", phrase="padding {value}",
        idle=lambda flags: "only when padded" if flags.packing or flags.is_reference else None,
    )  # fmt: skip
    compile: str = _flag(
        "off", "Backend of torch.compile; dynamo only traces, aot_eager generates no code: they tell which stage it is",
        values=("off", "dynamo", "aot_eager", "inductor"), reference="off", effective="compile", recompiles=True,
        bare="inductor", phrase="", key="x", label="compile", told="next backend of torch.compile, or off", row=2,
    )  # fmt: skip
    dynamic: str = _flag(
        "auto", "Shapes that compiled code takes", values=("auto", "on", "off"), reference="auto", effective=None,
        recompiles=True, phrase="", key="X", label="dynamic", told="shapes of compiled code: auto, on, off", row=3,
        idle=lambda flags: "only when compiling" if flags.compile == "off" else None,
    )  # fmt: skip
    use_cache: bool = _flag(
        False, "As a trainer that leaves it on", values=_OFF_ON, reference=False, effective="use_cache",
        recompiles=True, key="U", label="use_cache", told="use_cache on or off", row=10,
    )  # fmt: skip
    gradient_checkpointing: bool = _flag(
        False, "As the trainer does; the library applies it in training only", values=_OFF_ON, reference=False,
        effective="gradient_checkpointing", recompiles=True, key="K", label="grad ckpt",
        told="gradient checkpointing on or off", row=9,
        idle=lambda flags: None if flags.mode == "train" else "only in train mode",
    )  # fmt: skip
    deterministic: bool = _flag(
        False, "torch.use_deterministic_algorithms and what belongs to it", values=_OFF_ON, reference=AS_ASKED,
        effective=None, key="D", label="deterministic", told="deterministic algorithms on or off", row=8,
    )  # fmt: skip
    routing: str = _flag(
        "live", "Of a mixture's tokens: live, or to the experts that the dump holds for them",
        values=("live", "recorded"), reference=AS_ASKED, effective="routing", phrase="{value} routing",
    )  # fmt: skip
    logits: str = _flag(
        "chunked", "A few rows of logits at once, or whole as many trainers hold them", values=("chunked", "whole"),
        reference="chunked", effective="logits", phrase="logits {value}",
        key="L", label="logits", told="logits in chunks, or whole as many trainers hold them", row=12,
    )  # fmt: skip
    mode: str = _flag(
        "eval", "train applies the model's dropout, seeded", values=("eval", "train"), reference=AS_ASKED,
        effective="mode", recompiles=True, phrase="{value}",
        key="T", label="mode", told="eval, or train: the model's dropout applies", row=11,
    )  # fmt: skip
    fault: str = _flag(
        "none", "A deliberate mistake, for learning", reference="none", effective=None, option="--debug-fault",
        values=(
            "none", "boundary", "early", "foreign_key", "no_positions", "run_on", "padded_mask", "padded_zeros",
            "from_one", "other_side", "response_anew", "response_wide", "state_unmasked", "half_softmax", "half_head",
            "raise", "abort", "hang",
        ),
        phrase="fault {value}",
    )  # fmt: skip
    device: str = _flag(
        "cpu", "Where it runs", values=("cpu", "cuda"), reference=AS_ASKED, effective="device", reloads=True,
        phrase="{value}", key="V", label="device", told="cpu or cuda", row=13,
    )  # fmt: skip
    threads: int | None = _flag(
        None, "CPU threads torch may use; else the process's own number", reference=AS_ASKED, effective="threads",
        unset="auto", phrase="", is_telling=None,
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name, flag in FLAGS.items():
            value = getattr(self, name)
            if not flag.takes(value) and value not in flag.inner:
                choices = () if flag.is_switch else flag.values
                raise _wrong_value(name, value, flag.expected, choices)

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
        return {name: getattr(self, name) for name in FLAGS}

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

    def reference(self, recorded: Mapping[str, Any] | None = None) -> Flags:
        """Each row alone: what padded and packed are judged against. `recorded`: the settings that the dump names.

        Never compiled, cached or faulty, so that nothing it is asked about is part of the answer; and in the kernel
        that was recorded (else the default one), so that another kernel shows what it does.
        """
        chosen: dict[str, Any] = {}
        for name, flag in FLAGS.items():
            if flag.reference is AS_RECORDED:
                # A kernel of the model's own may be the only one it has.
                known = (recorded or {}).get(name, DEFAULTS[name])
                chosen[name] = "own" if getattr(self, name) == "own" else known
            elif flag.reference is not AS_ASKED:
                chosen[name] = flag.reference
        return replace(self, **chosen)

    def changed(self) -> dict[str, Any]:
        """The flags that differ from their defaults."""
        return {name: value for name, value in self.to_mapping().items() if value != DEFAULTS[name]}

    def idle(self, name: str) -> str | None:
        """Why a flag changes nothing beside the others, or None."""
        return FLAGS[name].idle(self)

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
        for name, value in self.changed().items():
            flag = FLAGS[name]
            if flag.phrase is None:
                parts.append(name.replace("_", " ") if flag.is_switch else f"{name} {value}")
            elif flag.phrase:
                parts.append(flag.phrase.format(value=value))
        return ", ".join(parts)


#: Every flag by its name.
FLAGS: dict[str, Flag] = dict(zip(Flags.__struct_fields__, _IN_ORDER, strict=True))
#: Those of the flags pane, line by line.
IN_PANE = tuple(sorted((name for name, flag in FLAGS.items() if flag.key), key=lambda name: FLAGS[name].row))
DEFAULTS: dict[str, Any] = dict(zip(Flags.__struct_fields__, Flags.__struct_defaults__, strict=True))


def settings_asked(flags: Mapping[str, Any] | None) -> dict[str, Any]:
    """The settings that a dump or a side of a comparison says it was asked for; empty where it says nothing."""
    return dict((flags or {}).get("asked", flags or {}))


def settings_known(flags: Mapping[str, Any] | None) -> dict[str, Any]:
    """Those of the settings a dump names that a flag can have: a trainer may have written others, in its own words."""
    asked = settings_asked(flags)
    return {name: asked[name] for name, flag in FLAGS.items() if name in asked and flag.takes(asked[name])}


def telling(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that say something to a reader: those always looked for, and those that are not at their default."""
    return {
        name: value
        for name, value in flags.items()
        if (always := FLAGS[name].is_telling if name in FLAGS else False)
        or (always is not None and value != DEFAULTS.get(name))
    }


def _value(name: str, text: str) -> Any:
    flag = FLAGS[name]
    if flag.is_switch:
        if text.lower() not in _SWITCH:
            raise _wrong_value(name, text, flag.expected)
        return _SWITCH[text.lower()]
    if flag.values:
        word = named(text)
        if word in flag.inner:
            raise _wrong_value(name, text, flag.expected, flag.values)
        return word
    if text.lower() in ("all", "none", "auto"):
        return None
    if not text.isdecimal():
        raise _wrong_value(name, text, flag.expected)
    return int(text)


def _known(name: str) -> None:
    if name not in FLAGS:
        raise RequestError(
            f"there is no flag {name!r}", expected=", ".join(FLAGS), found=name, hint=_nearest(name, FLAGS)
        )


def _wrong_value(name: str, value: Any, expected: str, choices: Iterable[str] = ()) -> RequestError:
    return RequestError(
        f"{name} cannot be {value!r}", expected=expected, found=str(value), hint=_nearest(str(value), choices)
    )


def _nearest(word: str, choices: Iterable[str]) -> str | None:
    near = difflib.get_close_matches(word, list(choices), n=1)
    return f"did you mean {near[0]}?" if near else None


def page() -> str:
    """docs/flags.md."""
    rows = ["| flag | values | option | key | in the reference | what it is |", "|---|---|---|---|---|---|"]
    words = {AS_ASKED: "as asked", AS_RECORDED: "as recorded"}
    for name, flag in FLAGS.items():
        values = ["on" if value is True else "off" if value is False else str(value) for value in flag.values]
        fixed = flag.reference
        alone = words.get(fixed) or ("on" if fixed is True else "off" if fixed is False else str(fixed))
        option = flag.option or "--" + name.replace("_", "-")
        listed = ", ".join(values) or f"a number, or {flag.unset}"
        rows.append(f"| `{name}` | {listed} | `{option}` | {flag.key} | {alone} | {flag.help} |")
    return f"""# Flags of a replay

This page is generated from the flags (`make docs`). Each is an option of `rldbg replay`, an axis of its `--matrix`
(`name=value,value`), and a line of the screen's flags pane where it has a key. The reference is every row alone: the
last column but one says what each flag is there. What a cell that disagrees is called: [causes](#causes).

{chr(10).join(rows)}

{section()}"""
