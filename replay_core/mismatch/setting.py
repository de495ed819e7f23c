"""Setting: what one side may have run under, as one value: what differs between two of them is a cause. No torch."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from replay_core.errors import RequestError

#: How the tokens lie before the model. `alone` is right; every other is a way to get them wrong.
Layout = Literal[
    "alone", "left padding attended", "left padding counted", "padding after the prompt", "positions anew",
    "positions from 1", "prompt unseen", "first token twice", "first token unseen", "packs that leak",
]  # fmt: skip
#: Of a matrix: integers or floats on a grid, and whether each row has a scale of its own.
Grid = Literal["int8 per row", "int8 per tensor", "fp8 per row", "fp8 per tensor", "int4 per row"]
_LAID = {
    "alone": "each sample alone, no padding",
    "left padding attended": "left padding is attended to: no attention mask",
    "left padding counted": "left padding is counted in the position ids",
    "padding after the prompt": "padding between prompt and response is attended to",
    "positions anew": "position ids begin anew at the response",
    "positions from 1": "position ids begin at 1",
    "prompt unseen": "the response does not see its prompt: position ids that begin anew cut it off",
    "first token twice": "the first token is seen twice: a doubled BOS",
    "first token unseen": "the first token is not seen: no BOS",
    "packs that leak": "packs leak: no block-diagonal mask",
}

TEMPERATURES = tuple(float(one) for one in np.geomspace(0.3, 3.0, 21))
#: Around the best of them, closer and closer: a step of the former to either side in nine.
WIDTHS = tuple((TEMPERATURES[1] / TEMPERATURES[0]) ** 0.25**power for power in range(4))
#: Changes by a number, of which the best is looked for: every value is a readout of one forward.
NUMBERS: dict[str, tuple[Any, ...]] = {
    "temperature": (*TEMPERATURES, 0.9, 0.98, 1.0, 1.02, 1.1),
    "top_k": (2, 3, 5, 8, 10, 15, 20, 30, 40, 50, 64, 80, 100, 128, 200),
    "top_p": (*(round(0.05 * step, 2) for step in range(6, 20)), 0.97, 0.98, 0.99),
    "min_p": (0.01, 0.02, 0.05, 0.1, 0.2),
    "shift": (1, -1),
}


class Setting(Struct, frozen=True):
    """Everything that a candidate may change.

    weights: a model in place of the given one; its name is `called`. adapter: what the adapter's share is multiplied
    by: 0 is none, 2 is twice (or summed over two ranks). grid: quantised matrices. head: the dtype of the head alone,
    None as the model's. routing: `live`, or to the recorded experts with the router's own weights, or with recorded
    ones. temperature: logits are divided by it. top_k 0, top_p 1 and min_p 0 keep every token; else the probabilities
    of those kept are normalised again. shift: values stand so many tokens late.
    """

    weights: str | None = None
    called: str = ""
    adapter: float = 1.0
    grid: Grid | None = None
    dtype: str = "float32"
    attention: str = "sdpa"
    layout: Layout = "alone"
    routing: Literal["live", "experts", "experts and weights"] = "live"
    head: str | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    shift: int = 0

    @property
    def loaded(self) -> tuple[Any, ...]:
        """What another value of needs the model loaded anew."""
        return self.weights, self.dtype

    @property
    def forward(self) -> tuple[Any, ...]:
        """What hidden states depend on."""
        return *self.loaded, self.adapter, self.grid, self.attention, self.layout, self.routing

    def changed(self, base: Setting) -> dict[str, Any]:
        """The fields that are others than in the base."""
        names = (name for name in self.__struct_fields__ if name != "called")
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(base, name)}

    def joined(self, other: Setting, base: Setting) -> Setting | None:
        """Both changes of a base at once; None where both change the same, or either nothing."""
        mine, theirs = self.changed(base), other.changed(base)
        if set(mine) & set(theirs) or not theirs:
            return None
        called = other.called if "weights" in theirs else self.called
        return replace(self, **theirs, called=called)

    def words(self, base: Setting) -> str:
        """What it changes, for a person: `temperature 0.7 (against 1)`."""
        said = []
        for name, value in self.changed(base).items():
            before = getattr(base, name)
            if name == "weights":
                said.append(self.called or f"weights {value}")
            elif name == "adapter":
                said.append("without the adapter" if value == 0 else f"the adapter times {value:g}")
            elif name == "grid":
                said.append(f"weights quantised: {value}")
            elif name == "dtype":
                said.append(f"{value} (against {before})")
            elif name == "attention":
                said.append(f"attention {value} (against {before})")
            elif name == "layout":
                said.append(_LAID[value])
            elif name == "routing":
                said.append(f"tokens routed as recorded ({value})" if value != "live" else "routed live")
            elif name == "head":
                said.append(f"head in {value}" if value else "head in the model's dtype")
            elif name == "temperature":
                said.append(f"temperature {value:.3g} (against {before:.3g})")
            elif name == "shift":
                said.append(f"values {abs(value)} token {'late' if value > 0 else 'early'}")
            elif name in ("top_k", "top_p", "min_p"):
                word = name.replace("_", "-")
                said.append(f"{word} {value:g}, normalised again" if value not in (0, 1.0) else f"no {word}")
        return ", ".join(said) or "the same settings"

    def family(self, base: Setting) -> str:
        """Which kind of cause its change is: that of its first field; `several` where they are of different kinds."""
        kinds = list(dict.fromkeys(_FAMILY[name] for name in self.changed(base)))
        return "none" if not kinds else kinds[0] if len(kinds) == 1 else "several"


def around(one: Setting, width: float) -> list[Setting]:
    """Temperatures around a setting's, up to a factor of `width` to either side, and the round numbers there: people
    set those."""
    heats = [one.temperature * float(heat) for heat in np.geomspace(1 / width, width, 9)]
    plain = {round(heat, digits) for heat in heats for digits in (1, 2)}
    heats += [heat for heat in plain if heat > 0 and 1 / width <= heat / one.temperature <= width]
    return [replace(one, temperature=heat) for heat in heats]


_FAMILY = {
    "weights": "weights", "adapter": "adapter", "grid": "quantised", "dtype": "precision", "attention": "attention",
    "layout": "positions", "routing": "routing", "head": "precision", "temperature": "temperature",
    "top_k": "truncation", "top_p": "truncation", "min_p": "truncation", "shift": "shift",
}  # fmt: skip


class Asked(Struct, frozen=True):
    """What a person names beside the run.

    model: of the trainer, as a replay's `model`. older: other weights that either side may have had. tokenizer: its
    folder or file. dtype: of the replays; None: as the dump says, else float32. most: sequences to replay at most.
    """

    model: str | None = None
    older: tuple[str, ...] = ()
    tokenizer: str | None = None
    base_model: str | None = None
    attention: str = "sdpa"
    device: str = "cpu"
    most: int = 64

    def __post_init__(self) -> None:
        if self.most < 1:
            raise RequestError("at least one sequence is replayed", expected="1 or more", found=str(self.most))
