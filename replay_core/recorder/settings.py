"""What to record and how: one set of settings, from code, a NexRL YAML, the environment or an AReaL config.

A wrong setting is an error when it is read, never at the first write, and names its key and its value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from replay_core.errors import RequestError
from replay_core.recorder import named
from replay_core.recorder.formats import FORMATS

LEVELS = ("hash", "stats", "full")
SCOPES = ("rollout", "full")

#: Dump points of a trainer that holds its own weights, and of one that trains through a remote service.
SELF_HOSTED = (
    "trajectory", "old_log_probs", "forward_data", "loss", "is_loss_debug", "batch_inputs", "param", "gradient",
)  # fmt: skip
REMOTE = ("prepared_trajectories", "datums", "training_metrics")
#: Every stage a setting may name.
KNOWN = (*SELF_HOSTED, *REMOTE, "ref_log_probs", "values", "modules", "optimizer", "tensors")

_ROLLOUT_STAGES = ("trajectory",)
_FULL_STAGES = ("trajectory", "old_log_probs", "ref_log_probs", "values", "prepared_trajectories")


@dataclass(frozen=True)
class Settings:
    """How a Recorder records.

    Args:
        enabled: False makes every call of the recorder cost nothing and write nothing.
        format: pt | jsonl | safetensors.
        level: full stores every value; stats and hash keep a line per field in the index and no file.
        whole: beside level stats or hash, the file of a comparison: the tensors that differ in it are stored whole.
        ranks: the only ranks whose records are kept; a record without a rank is. Every rank may call the recorder.
        dump_every_n_steps: steps that are no multiple of it are not recorded.
        dump_steps: the only steps to record; None is all of them.
        stages: the only stages to record; None is all of them.
        target_param_pattern: a regular expression on parameter names, for params and gradients; "" is all.
        asynchronous: write in a thread, so that the trainer waits for the copy to the host alone.
        queue_bytes: host memory that waiting records may hold; when it is full, the trainer waits.
        on_error: "raise", or "warn": say what went wrong and go on without the record.
        max_keep: keep the newest so many steps, remove older ones and the checkpoints only they needed; None keeps all.
        pin_steps: steps that `max_keep` neither removes nor counts.
        share: let others read the dump, as the umask says; else its files are their owner's alone.
        patience_s: seconds that one call of the disk may take before what was asked of it is given up (`on_error`).
    """

    enabled: bool = True
    format: str = "pt"
    level: str = "full"
    dump_every_n_steps: int = 1
    dump_steps: frozenset[int] | None = None
    ranks: frozenset[int] | None = None
    whole: Any = None
    stages: frozenset[str] | None = None
    target_param_pattern: str = ""
    asynchronous: bool = False
    queue_bytes: int = 1 << 30
    on_error: str = "raise"
    max_keep: int | None = None
    pin_steps: frozenset[int] = frozenset()
    share: bool = False
    patience_s: float = 30.0

    def __post_init__(self) -> None:
        _one_of("format", self.format, FORMATS)
        _one_of("level", self.level, LEVELS)
        _one_of("on_error", self.on_error, ("raise", "warn"))
        _at_least("dump_every_n_steps", self.dump_every_n_steps, 1)
        _at_least("queue_bytes", self.queue_bytes, 1)
        if not isinstance(self.share, bool):
            refuse("share", self.share, "true or false")
        if (
            isinstance(self.patience_s, bool)
            or not isinstance(self.patience_s, (int, float))
            or not self.patience_s > 0
        ):
            refuse("patience_s", self.patience_s, "seconds, more than 0")
        if self.max_keep is not None:
            _at_least("max_keep", self.max_keep, 1)
        object.__setattr__(self, "pin_steps", _steps("pin_steps", self.pin_steps) or frozenset())
        object.__setattr__(self, "dump_steps", _steps("dump_steps", self.dump_steps))
        object.__setattr__(self, "ranks", _steps("ranks", self.ranks, "a list of ranks"))
        if self.whole is not None and self.level == "full":
            refuse("whole", self.whole, "level stats or hash beside it: at level full every tensor is whole")
        object.__setattr__(self, "whole", named.read(self.whole))
        if self.stages is not None:
            if isinstance(self.stages, str):
                refuse("stages", self.stages, "a list of stages")
            for stage in self.stages:
                _one_of("stages", stage, KNOWN)
            object.__setattr__(self, "stages", frozenset(self.stages))
        need_pattern("target_param_pattern", self.target_param_pattern)

    def with_(self, **changes: Any) -> Settings:
        """These settings with some changed.

        Raises:
            RequestError: there is no such setting, or its value is wrong.
        """
        known = [field.name for field in fields(self)]
        for name, value in changes.items():
            if name not in known:
                refuse(name, value, f"a setting: {', '.join(known)}", what="there is no such setting")
        return replace(self, **changes)

    def wants_step(self, step: int) -> bool:
        """Whether a step is recorded at all."""
        if not self.enabled or step % self.dump_every_n_steps:
            return False
        return self.dump_steps is None or step in self.dump_steps

    def wants_rank(self, rank: int | None) -> bool:
        """Whether a rank's records are kept."""
        return self.ranks is None or rank is None or rank in self.ranks

    def chosen(self, key: Mapping[str, Any], tree: Mapping[str, Any]) -> Mapping[str, Any]:
        """The fields of a record that are stored whole."""
        if self.level == "full":
            return tree
        return {} if self.whole is None else self.whole.chosen(key, tree)

    def wants_stage(self, stage: str) -> bool:
        return self.stages is None or stage in self.stages

    def wants_param(self, name: str) -> bool:
        """Whether `target_param_pattern` is found in a parameter's name."""
        return re.search(self.target_param_pattern, name) is not None


@dataclass(frozen=True)
class Configured:
    """What a trainer's configuration asks for: a directory, how to record into it, or what to replay from it.

    `directory` is None where the configuration leaves it to the trainer.
    """

    directory: Path | None
    settings: Settings
    replay: bool = False
    scope: str = "rollout"


#: Keys of NexRL's debug section; the settings of the recorder may stand beside them.
_NEXRL_KEYS = ("enable_data_dump", "dump_dir", "dump_format", "dump_options", "remote_api_dump_options")


def from_nexrl(debug: Mapping[str, Any]) -> Configured:
    """Settings from the `debug:` section of a NexRL configuration, as a mapping.

    `dump_options` and `remote_api_dump_options` choose stages: one that is absent is not recorded, as there.
    `weaver-trainer`'s stages is_loss_debug and batch_inputs are known too; so are this recorder's own settings.

    Raises:
        RequestError: a key is unknown, or a value is wrong.
    """
    given = dict(debug)
    stages: set[str] = set()
    for section, known in (("dump_options", (*KNOWN,)), ("remote_api_dump_options", REMOTE)):
        options = given.pop(section, None) or {}
        if not isinstance(options, Mapping):
            refuse(f"debug.{section}", options, "a mapping of stages to true or false")
        for stage, wanted in options.items():
            if stage not in known:
                refuse(f"debug.{section}.{stage}", wanted, f"a stage: {', '.join(known)}", what="no such stage")
            if _truth(f"debug.{section}.{stage}", wanted):
                stages.add(str(stage))
    enabled = _truth("debug.enable_data_dump", given.pop("enable_data_dump", False))
    directory = given.pop("dump_dir", "debug_dump")
    if not isinstance(directory, (str, os.PathLike)) or not str(directory):
        refuse("debug.dump_dir", directory, "a directory")
    options = {"format": given.pop("dump_format", "pt"), "enabled": enabled and bool(stages)}
    with _keys_of("debug", {"format": "dump_format"}):
        known_settings = {field.name for field in fields(Settings)} - {"enabled", "format", "stages"}
        for name, value in given.items():
            if name not in known_settings:
                refuse(name, value, ", ".join([*_NEXRL_KEYS, *sorted(known_settings)]), what="unknown key")
        return Configured(Path(directory), Settings(stages=frozenset(stages), **options, **given))


def from_environment(environment: Mapping[str, str] | None = None) -> Configured:
    """Settings from weaver-trainer's variables WEAVER_DEBUG_DUMP_{ENABLED,DIR,EVERY_N,OPTIONS} (and _FORMAT, _PATTERN).

    Raises:
        RequestError: a value is wrong; names the variable.
    """
    values = os.environ if environment is None else environment
    prefix = "WEAVER_DEBUG_DUMP_"
    known = {"ENABLED", "DIR", "EVERY_N", "OPTIONS", "FORMAT", "PATTERN"}
    for name, value in values.items():
        if name.startswith(prefix) and name.removeprefix(prefix) not in known:
            refuse(name, value, ", ".join(prefix + end for end in sorted(known)), what="unknown variable")
    every = values.get(f"{prefix}EVERY_N", "1")
    if not every.isdecimal():
        refuse(f"{prefix}EVERY_N", every, "a whole number from 1")
    stages = [stage.strip() for stage in values.get(f"{prefix}OPTIONS", "").split(",") if stage.strip()]
    enabled = _truth(f"{prefix}ENABLED", values.get(f"{prefix}ENABLED", "0"))
    names = {"dump_every_n_steps": "EVERY_N", "stages": "OPTIONS", "format": "FORMAT"}
    with _keys_of(
        "", {**{key: prefix + end for key, end in names.items()}, "target_param_pattern": f"{prefix}PATTERN"}
    ):
        settings = Settings(
            enabled=enabled,
            dump_every_n_steps=int(every),
            stages=frozenset(stages) if stages else None,
            format=values.get(f"{prefix}FORMAT", "pt"),
            target_param_pattern=values.get(f"{prefix}PATTERN", ""),
        )
    return Configured(Path(values.get(f"{prefix}DIR") or "./weaver_debug_dump"), settings)


#: Keys of AReaL's trajectory-debug section.
_AREAL_KEYS = (
    "dump_rollout_data", "replay_rollout_data", "path", "dump_steps", "max_keep", "pin_steps", "dump_scope",
)  # fmt: skip


def from_areal(debug: Mapping[str, Any]) -> Configured:
    """Settings from AReaL's trajectory-debug section.

    dump_rollout_data, replay_rollout_data (mutually exclusive), path, dump_steps, max_keep, pin_steps,
    dump_scope rollout | full.

    Raises:
        RequestError: both flags are set, a key is unknown, or a value is wrong.
    """
    given = dict(debug)
    dump = _truth("dump_rollout_data", given.pop("dump_rollout_data", False))
    replaying = _truth("replay_rollout_data", given.pop("replay_rollout_data", False))
    if dump and replaying:
        raise RequestError(
            "dump_rollout_data and replay_rollout_data are mutually exclusive",
            expected="one of the two",
            found="dump_rollout_data: true, replay_rollout_data: true",
            hint="record a run first, then replay it in another",
        )
    path = given.pop("path", None)
    if path is not None and (not isinstance(path, (str, os.PathLike)) or not str(path)):
        refuse("path", path, "a directory or null")
    scope = given.pop("dump_scope", "rollout")
    _one_of("dump_scope", scope, SCOPES)
    for name, value in given.items():
        if name not in ("dump_steps", "max_keep", "pin_steps"):
            refuse(name, value, ", ".join(_AREAL_KEYS), what="unknown key")
    if replaying and path is not None and not Path(path).is_dir():
        refuse("path", path, "a directory that a run was recorded into", what="nothing to replay")
    settings = Settings(
        enabled=dump,
        stages=frozenset(_FULL_STAGES if scope == "full" else _ROLLOUT_STAGES),
        **{name: value for name, value in given.items() if value is not None},
    )
    return Configured(Path(path) if path is not None else None, settings, replay=replaying, scope=scope)


def from_yaml(path: str | os.PathLike[str], key: str = "debug") -> Configured:
    """Settings from the `debug:` section of a YAML file, `${oc.env:…}` and the like resolved by omegaconf.

    A section that names dump_rollout_data or replay_rollout_data is read as AReaL's, else as NexRL's.

    Raises:
        RequestError: omegaconf is not installed; the file has no such section, or a value cannot be resolved.
    """
    try:
        from omegaconf import OmegaConf
        from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
    except ImportError:
        raise RequestError(
            "reading a YAML configuration needs omegaconf",
            file=str(path),
            hint="pip install 'rldbg[yaml]', or give the settings in code",
        ) from None
    import yaml  # omegaconf's own

    try:
        whole = OmegaConf.load(Path(path))
        section = OmegaConf.select(whole, key) if isinstance(whole, Mapping) else None
        mapping = None if section is None else OmegaConf.to_container(section, resolve=True)
    except (OSError, yaml.YAMLError, OmegaConfBaseException) as error:
        where = getattr(error, "full_key", None)
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise RequestError(
            f"the configuration cannot be read: {str(error).splitlines()[0]}{line}",
            file=str(path),
            expected=f"a YAML file with a `{key}:` section",
            found=f"{where}" if where else None,
            hint="set the variable the value names, or give it a default: ${oc.env:NAME,default}"
            if isinstance(error, InterpolationResolutionError)
            else None,
        ) from None
    if not isinstance(mapping, dict):
        inherits = isinstance(whole, Mapping) and "defaults" in whole
        raise RequestError(
            f"the configuration has no `{key}:` section",
            file=str(path),
            hint="its `defaults:` are not composed here: give the composed file" if inherits else None,
        )
    named = {str(name): value for name, value in mapping.items()}
    try:
        return from_areal(named) if {"dump_rollout_data", "replay_rollout_data"} & set(named) else from_nexrl(named)
    except RequestError as error:
        error.file = str(path)
        raise


def need_pattern(key: str, value: Any) -> None:
    """Refuse what is no regular expression, before anything runs that would be matched with it."""
    try:
        re.compile(value)
    except (re.error, TypeError) as error:
        refuse(key, value, f"a regular expression ({error})")


def refuse(key: str, value: Any, expected: str, *, what: str = "wrong value") -> NoReturn:
    """Raise the error of a setting: its key, its value, what it may be."""
    raise RequestError(f"{what} in the recording settings: {key}", expected=expected, found=f"{key}: {value!r}")


class _keys_of:  # noqa: N801 - reads as the words of a `with`
    """Within it, a refused setting is named by the key the user wrote."""

    def __init__(self, section: str, names: Mapping[str, str]) -> None:
        self._section, self._names = section, names

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, RequestError) and error.found:
            name, _, value = error.found.partition(": ")
            key = self._names.get(name, name)
            key = f"{self._section}.{key}" if self._section else key
            error.message = f"{error.message.rpartition(': ')[0]}: {key}"
            error.found = f"{key}: {value}"


def _one_of(key: str, value: Any, allowed: Iterable[str]) -> None:
    if value not in allowed:
        refuse(key, value, " | ".join(allowed))


def _at_least(key: str, value: Any, smallest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        refuse(key, value, f"a whole number from {smallest}")


def _steps(key: str, value: Any, what: str = "a list of steps") -> frozenset[int] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        refuse(key, value, what)
    steps = frozenset(value)
    if any(isinstance(step, bool) or not isinstance(step, int) or step < 0 for step in steps):
        refuse(key, value, "non-negative whole numbers")
    return steps


def _truth(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    spelled = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    known = spelled.get(str(value).strip().lower()) if isinstance(value, (str, int)) else None
    if known is None:
        refuse(key, value, "true or false")
    return known
