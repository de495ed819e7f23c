"""ReplayPlan: which micro-batch to re-execute, through which model, under which flags. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import force_setattr, replace

from replay_core.errors import RequestError
from replay_core.replay.flags import Flags

#: In place of `module:function`: the forward of the model itself, called whole.
ITSELF = "the model's own forward"
#: Before the code that builds a model, as a reference to it.
FACTORY = "factory:"
CAPTURE_LEVELS = ("auto", "full", "hash")


class ReplayPlan(Struct, frozen=True):
    """One cell of work, decided before anything heavy is imported; crosses to the child as a mapping.

    dump, step, rank, micro, role: the record to re-execute; role None takes the actor's, else the only one.
    model: a local Hugging Face directory, `checkpoint` (the one the dump notes for the step), or
        `random:<arch>` (structure bugs show with random weights).
    base: the base model of an adapter, where its config does not name one that is here.
    out: directory the answer's dump goes to; the caller picks it, never inside the recorded dump.
    temperature: None takes the record's, else 1.0, and says so.
    seed: of a random model's weights.
    capture: regular expression on module names (`layers\\.0\\.`); None captures every module, `none` only the
        final hidden states.
    logit_chunk: rows of logits held at once where `flags.logits` is chunked.
    rows: which rows of the micro-batch to replay, as a selection (`0,2`, `0:4`); None is all.
    max_rows: replay only the first of them.
    whole_step: replay the step's whole batch where it was recorded as one, not one of its micro-batches.
    capture_level: `full` keeps every captured tensor; `hash` its digest and statistics, and then the tensors around the
        first one that differs; `auto` is full where the forecast fits into capture_cap_mib (memory and disk as well),
        else hash.
    capture_cap_mib: what a capture may take at once.
    allow_pickled_weights: load `.bin` weights, which are pickles; only ever set by the user.
    forward: `module:function` of the trainer's own code, (model, batch) -> log-probabilities; with
        `forward_path`, the directory it is imported from. Only ever set by the user.
    backward: also the loss and its gradients; `micros` then accumulates the gradients of several micro-batches, and
        `ranks` averages those of several ranks, as data-parallel training does.
    optimizer: with backward, also one optimizer step: its settings, or its text ("" takes the recorded ones, else
        AdamW's own, and says so); None takes none.
    loss: settings of the loss (`losses.Loss`), or its text; None takes the recorded ones, else GRPO's, and says so.
    share_gpu: run on a GPU that another process uses.
    cold_compile: compile into an empty inductor cache, so that compile_s is a first time.
    unlike: the model's config with a known mistake in it (`misread.misread`).
    """

    dump: str
    step: int
    rank: int
    micro: int
    model: str
    out: str
    flags: Flags = field(default_factory=Flags)
    role: str | None = None
    base: str | None = None
    temperature: float | None = None
    seed: int = 0
    capture: str | None = None
    logit_chunk: int = 512
    max_rows: int | None = None
    rows: str | None = None
    whole_step: bool = False
    capture_level: str = "auto"
    capture_cap_mib: int = 4096
    allow_pickled_weights: bool = False
    forward: str | None = None
    forward_path: str | None = None
    backward: bool = False
    micros: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None
    loss: dict[str, Any] | str | None = None
    optimizer: dict[str, Any] | str | None = None
    share_gpu: bool = False
    cold_compile: bool = False
    unlike: str | None = None

    def __post_init__(self) -> None:
        for name, what in (("micros", "micro-batches"), ("ranks", "ranks")):
            if getattr(self, name) is not None:
                force_setattr(self, name, tuple(getattr(self, name)))
                if not self.backward:
                    raise RequestError(f"several {what} are one piece of work only with --backward")
        if self.backward and self.flags.padding != "recorded":
            raise RequestError(
                "a loss is formed on the rows as they were recorded", expected="padding=recorded with --backward",
                found=f"padding={self.flags.padding}", hint="without --backward padding goes to either side",
            )  # fmt: skip
        if self.optimizer is not None and not self.backward:
            raise RequestError("an optimizer step needs gradients", expected="--backward --optimizer-step")
        if self.forward not in (None, ITSELF) and not re.fullmatch(r"[\w.]+:[\w.]+", str(self.forward)):
            raise RequestError(
                "the trainer's own forward is named module:function", expected="trainer.replay:logprobs",
                found=self.forward,
            )  # fmt: skip
        if self.capture_level not in CAPTURE_LEVELS:
            raise RequestError(
                "no such capture level", expected=", ".join(CAPTURE_LEVELS), found=str(self.capture_level)
            )
        if self.capture is not None:
            try:
                re.compile(self.capture)
            except re.error as error:
                raise RequestError(
                    f"the capture pattern is no regular expression: {error}",
                    expected=r"a pattern on module names, like layers\.0\.",
                    found=self.capture,
                ) from None
        if self.temperature is not None and not 0 < self.temperature < float("inf"):
            raise RequestError("the temperature must be above 0", expected="like 1.0", found=str(self.temperature))
        for name in ("logit_chunk", "max_rows", "capture_cap_mib"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(f"{name} must be at least 1", expected="1 or more", found=str(value))

    def to_mapping(self) -> dict[str, Any]:
        mapping = {name: getattr(self, name) for name in self.__struct_fields__}
        several = {name: one if (one := mapping[name]) is None else list(one) for name in ("micros", "ranks")}
        return {**mapping, "flags": self.flags.to_mapping(), **several}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> ReplayPlan:
        """The plan that `to_mapping` described.

        Raises:
            RequestError: an unknown or missing part, or an unknown flag.
        """
        known = set(cls.__struct_fields__)
        unknown = sorted(set(mapping) - known)
        if unknown:
            raise RequestError(f"a plan has no {', '.join(unknown)}", expected=", ".join(sorted(known)))
        missing = [name for name in ("dump", "step", "rank", "micro", "model", "out") if name not in mapping]
        if missing:
            raise RequestError(f"the plan lacks {', '.join(missing)}")
        return cls(**{**mapping, "flags": Flags.from_mapping(mapping.get("flags", {}))})

    def with_flags(self, flags: Flags, out: str) -> ReplayPlan:
        """The same micro-batch under other settings, answering into another directory."""
        return replace(self, flags=flags, out=out)

    @property
    def is_critic(self) -> bool:
        """Whether the model's answer is a value per token and not log-probabilities."""
        return self.role == "critic"


def beyond_capsule(plan: Mapping[str, Any]) -> str | None:
    """What of a plan no capsule holds (code of its own, a loss), as a user asked for it; None: nothing."""
    model = str(plan["model"])
    if model.startswith(FACTORY):
        return model
    if plan.get("forward") is not None:
        return "--forward"
    return "--backward" if plan.get("backward") else None
