"""A ruling and its parts, and what a side lacks to be ruled at all. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from replay_core import naming
from replay_core.records import Record, Run
from replay_core.referee.recorded import LOGPROBS, Place

if TYPE_CHECKING:
    from replay_core.referee.figures import ErrorFigures
    from replay_core.referee.shadow import Claim
    from replay_core.referee.weights import SideModel

#: What stands out of an error, by the statistic that is furthest past its limit.
_WORDS = {
    "token": "token {row}", "tokens_gain": "tokens, each by a factor of its own", "channel": "channel {channel}",
    "heads_gain": "the heads of every token, each by a factor of its own",
    "channels_gain": "channels, each by a factor of its own", "bias": "channels, each by an offset of its own",
    "gain": "all by {gain:+.1e} of themselves", "rank": "a difference of low rank", "size": "all of it",
    "hard": "elements past half a unit of the last place", "not_finite": "values that are not finite",
}  # fmt: skip
#: Of a weight's gradient rows are outputs and columns inputs.
_OF_WEIGHTS = {
    "token": "output {row}",
    "channel": "input {channel}",
    "tokens_gain": "outputs, each by a factor of its own",
}


class RuledClaim(Struct):
    """A claim with its figures; `ruling` OK is NOISE. row is (sample, position) of its worst token."""

    claim: Claim
    figures: ErrorFigures
    ruling: str
    row: tuple[int, int] | None
    recipe: str | None = None
    pattern: str | None = None
    #: The hypothesis that is in an error no larger than noise; whether it was told by the bits alone.
    quietly: str | None = None
    is_bitwise: bool = False

    @property
    def rounding(self) -> str | None:
        """Where its kernel rounds, by which of the two ways gives what was recorded bit for bit; None where neither
        does, both do, or the tensor is float32: its sums differ with every kernel."""
        once, written = self.figures.unequal_once, self.figures.unequal_written
        least, most = sorted((once, written))
        if str(self.claim.dtype) == "torch.float32" or least > 0.03 or most < max(0.05, 5 * least):
            return None
        return "rounds once, at its end" if once < written else "rounds as the model's code is written"

    @property
    def what(self) -> str:
        """What in it stands out: the pattern that describes it, else by which statistic it does."""
        if self.is_bitwise:
            return "within its rounding, but bit for bit what another rounding inside gives"
        if self.quietly is not None:
            return "smaller than its rounding, but all in one direction"
        if self.pattern is not None:
            return self.pattern
        telling = self.figures.telling or "size"
        if self.claim.kind == "gradient":
            ratios = {name: self.figures.statistics[name][2] for name in _OF_WEIGHTS if name in self.figures.statistics}
            most = max(ratios, key=ratios.__getitem__, default=telling)
            words = _OF_WEIGHTS[most] if ratios.get(most, 0.0) > 1 else _WORDS[telling]
            found = self.figures
            return words.format(row=found.worst_row, channel=found.worst_channel, gain=found.gain)
        where = "?" if self.row is None else f"{self.row[1]} of sample {self.row[0]}"
        return _WORDS[telling].format(row=where, channel=self.figures.worst_channel, gain=self.figures.gain)


class Floor(Struct):
    """Log-probabilities against the noise of this model on this batch, in nats; past: share beyond 6 floors."""

    observed: float
    floor: float
    tokens: int
    past: float

    @property
    def ratio(self) -> float:
        return self.observed / self.floor if self.floor else (float("inf") if self.observed else 0.0)


class RuledScalar(Struct):
    """A loss or KL as recorded, of the log-probabilities' truth, and what their noise leaves of it."""

    name: str
    recorded: float
    truth: float
    floor: float
    ruling: str


class Graft(Struct):
    """A recorded tensor of one side in the other's forward: which part of the end difference comes with B's in A's, and
    which goes with A's in B's (None where B's model does not make the difference of itself)."""

    tensor: str
    comes: float
    goes: float | None


class Grafting(Struct):
    """What transplants show, the module at which the difference arises, and all of them in order of computation."""

    sentence: str
    module: str | None
    grafts: list[Graft]


class RuledSide(Struct):
    """One side, ruled alone; why_not where it could not be."""

    run: Run
    place: Place | None
    model: SideModel | None = None
    claims: list[RuledClaim] = field(default_factory=list)
    floor: Floor | None = None
    scalars: list[RuledScalar] = field(default_factory=list)
    hypotheses: list[tuple[str, bool, float, float]] = field(default_factory=list)
    #: Harmless changes of modules that what was recorded was made with: owner -> change.
    kept: dict[str, Any] = field(default_factory=dict)
    coverage: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    why_not: str | None = None
    temperature: float = 1.0

    @property
    def ruling(self) -> str | None:
        if self.why_not is not None:
            return None
        found = {one.ruling for one in self.claims}
        return next((word for word in ("BUG", "SUSPECT") if word in found), "NOISE")

    @property
    def is_explained(self) -> bool:
        return any(explains for _, explains, _, _ in self.hypotheses)

    @property
    def first(self) -> RuledClaim | None:
        """The first BUG in order of computation, else the first SUSPECT."""
        for word in ("BUG", "SUSPECT"):
            for one in self.claims:
                if one.ruling == word:
                    return one
        return None


class Ruling(Struct):
    """Both sides, and what they were given differently."""

    a: RuledSide
    b: RuledSide | None
    differences: list[str] = field(default_factory=list)
    grafting: Grafting | None = None


def lacking(run: Run, records: Sequence[Record], weights: str | None) -> str | None:
    """Why a side cannot be ruled, as far as that is known before anything is computed; else None."""
    names = {ref.canonical or ref.name for record in records for ref in record.tensors()}
    if not any(naming.is_module_tensor(name) for name in names) and not names.intersection(LOGPROBS):
        return "no module tensors and no log-probabilities are recorded; step.modules(model, inputs=True) records them"
    if weights is None and not run.models:
        return "no weights: the dump notes none; --weights DIRECTORY names them"
    return None


def not_ruled(sides: Sequence[tuple[Run, Place, str | None]]) -> Ruling:
    """The ruling of sides of which at least one lacks something."""
    made = [RuledSide(run, place, why_not=missing or "the other side cannot be ruled") for run, place, missing in sides]
    return Ruling(made[0], made[1] if len(made) > 1 else None)
