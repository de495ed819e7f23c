"""`rldbg parity`: two critics on the same tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from replay_core.documents.comparison import DivergenceEntry, VerdictCounts
from replay_core.documents.parts import Count, NamedTensor, Number, Pair, Says, Settings, Shape, Untyped, Versioned

ParityCause = Literal[
    "equal", "noise", "offset", "scale", "dropout", "padding", "weights", "positions", "attention", "order", "norm"
]

BatchKind = Literal["random", "padded", "stale", "text", "recorded"]
Counted = Literal["response", "valid", "all"]


class MeasuresEntry(TypedDict):
    """Two critics' values over a set of tokens; null where they are too few, or all alike."""

    n: Count
    """Values that are finite on both sides."""
    nonfinite: Count
    """Values left out because one side is not finite."""
    pearson: Number | None
    spearman: Number | None
    undefined: str | None
    """Why there is no correlation, null where there is one."""
    nearly_identical: Number | None
    """Percentage of values nearer than the document's threshold."""
    max_abs: Number | None
    mean_abs: Number | None
    max_rel: Number | None
    mean_rel: Number | None
    mean_signed: Number | None
    """Mean of b - a."""
    slope: Number | None
    """Of the least squares line b = slope a + offset."""
    offset: Number | None
    residual_rms: Number | None
    """What the line leaves."""
    range_a: Pair[Number] | None
    range_b: Pair[Number] | None
    mean_a: Number | None
    mean_b: Number | None
    std_a: Number | None
    std_b: Number | None
    std_ratio: Number | None
    """Standard deviation of b over that of a."""


class RegionMeasures(TypedDict):
    """The same measures over three sets of tokens."""

    masked: MeasuresEntry
    """Over the tokens that count (`counted`)."""
    valid: MeasuresEntry | None
    """Over the states of tokens that are no padding."""
    unmasked: MeasuresEntry
    """Over every position, padding included."""


class ParityStep(RegionMeasures):
    """After a training step."""

    step: Count
    apart: bool
    """Whether what counts parts beyond rounding after this step."""
    drift_a: Number | None
    """How far A has moved from its untrained values, rms."""
    drift_b: Number | None
    loss_a: Number | None
    loss_b: Number | None
    rows: list[Count] | None
    """Rows trained, in order, null where not recorded."""


class CauseEntry(TypedDict):
    """A cause that a batch shows."""

    kind: ParityCause | None
    """Null where values are not even finite."""
    why: str
    """A sentence with the figures it rests on."""
    numbers: Untyped
    """The evidence."""


class ScatterEntry(TypedDict):
    """Values of a against b, `shown` of `total`."""

    points: list[Annotated[list[Any], Says(minItems=3, maxItems=3)]]
    """[a, b, response | valid | padding]"""
    shown: Count
    total: Count
    sampled: bool


class ValueHistogram(TypedDict):
    """Of b - a, in equal bins."""

    edges: list[Number]
    counted: list[Count]
    """Tokens that count."""
    others: list[Count]
    """The rest."""


class WorstValue(TypedDict):
    """A token whose values part most."""

    row: Count
    row_b: Count
    """The row of b that holds the same tokens."""
    column: Count
    """Index on the values' own axis."""
    position: Count
    """Of the token that the value comes before, in the row."""
    a: Number
    b: Number
    d: Number
    token: int | None
    text: str | None
    before: str | None
    """Text of the tokens before it."""


class BandEntry(TypedDict):
    """A band that a published guide calls expected, and what is measured."""

    data: str
    measure: str
    low: Number
    high: Number
    masked: Number | None
    unmasked: Number | None
    note: str
    source: str


class ValueSources(TypedDict):
    """The tensors the values were read from."""

    a: NamedTensor | None
    b: NamedTensor | None


class BatchEntry(TypedDict):
    """A batch that both critics valued."""

    name: str
    kind: BatchKind
    shape: Shape
    counted: Counted
    """Which tokens count: response where a mask is known, else valid, else all."""
    dtype: str
    """The coarser dtype the two computed in."""
    floor: Number
    """The rms difference that rounding explains."""
    causes: Annotated[list[CauseEntry], Says(minItems=1)]
    """What explains most first."""
    eval: RegionMeasures
    train: RegionMeasures | None
    """Untrained critics in train mode, null where not recorded."""
    steps: list[ParityStep]
    first_divergence: DivergenceEntry | None
    """The first diverging module tensor."""
    scatter: ScatterEntry
    histogram: ValueHistogram | None
    worst: list[WorstValue]
    expectations: list[BandEntry]
    sources: ValueSources


class CriticEntry(TypedDict):
    """One of the critics."""

    backend: str
    """The name the critic gives itself."""
    engine: str
    """What ran it; `recorded` where nothing did."""
    path: str
    """The configuration, or the dump."""
    dump: str
    readback: Settings | None
    """Controls as found in the built critic."""
    weights: dict[str, str] | None
    """Digest of every weight under Hugging Face's names."""
    log: str | None
    seconds: Number | None


class ModuleComparison(TypedDict):
    """Of the two dumps before training."""

    counts: VerdictCounts
    module_tensors: Count
    elements_compared: Count
    notes: list[str]


class RandomSource(TypedDict):
    """A source of randomness: how it is controlled, and what each critic really used."""

    component: str
    environment_variable: str | None
    config: str | None
    a: Any
    b: Any
    from_a: str | None
    from_b: str | None
    equal: bool | None
    """Null where one was not read back."""


class ParityDocument(Versioned):
    """Two critics on the same tokens."""

    kind: Literal["parity"]
    a: CriticEntry
    """The baseline."""
    b: CriticEntry
    backends: Pair[str]
    """Names of a and b."""
    about: str
    """The batch that eval, train, steps, cause and why are about."""
    agrees: bool
    """Whether the cause is equal, noise or padding."""
    cause: ParityCause | None
    why: str
    also: list[CauseEntry]
    threshold: Number
    """Nearly identical: nearer than this."""
    eval: RegionMeasures
    train: RegionMeasures | None
    steps: list[ParityStep]
    batches: Annotated[list[BatchEntry], Says(minItems=1)]
    first_divergence: DivergenceEntry | None
    comparison: ModuleComparison | None
    randomness: list[RandomSource]
    notes: list[str]
