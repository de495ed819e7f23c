"""`rldbg compare A B`: every pair of tensors, and where the two runs first part. A is the baseline: d = b - a."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

from replay_core.documents.parts import (
    Count,
    KeyEntry,
    Number,
    Pair,
    ProblemEntry,
    Settings,
    Shape,
    Value,
    VerdictWord,
    Versioned,
)
from replay_core.documents.ruling import RulingDocument


class WorstToken(TypedDict):
    """The token whose values part most, relative to a's."""

    sample: int
    position: int
    rel_l2: Number


class MetricsEntry(TypedDict):
    """d = b - a over what counts. rel_l2 = |d|/|a|, max_rel, one_minus_cosine and gain are ratios, max_abs and
    mean_signed in the tensor's unit."""

    compared: Count
    mismatched: Count
    nan_a: Count
    nan_b: Count
    nonfinite_mismatched: Count
    max_abs: Number
    max_rel: Number
    rel_l2: Number
    one_minus_cosine: Number
    mean_signed: Number
    gain: Number
    worst_token: WorstToken | None


class IndexEntry(TypedDict):
    """sample and position where the layout tells; raw_a and raw_b index either tensor."""

    sample: int | None
    position: int | None
    raw_a: Shape | None
    raw_b: Shape | None
    sample_b: int | None
    """What b calls the sample, where its samples stand in another order."""


class ElementEntry(TypedDict):
    """The element shown of a pair: where it is, and both values."""

    index: IndexEntry
    a: Value
    b: Value


class RecordPair(TypedDict):
    """The records that the two tensors of a pair come from."""

    a_key: KeyEntry | None
    b_key: KeyEntry | None


class AroundEntry(TypedDict):
    """The values beside the element: of the tokens before and after it in its sample, else along the last axis."""

    by_token: bool
    positions: list[int]
    a: list[Value]
    b: list[Value]
    token_ids: list[int | None] | None
    texts: list[str | None] | None
    """The tokens as text, where a tokenizer lies beside the dump."""


class _Originated(TypedDict, total=False):
    origin_why: str
    """Why `origin` is the origin, or why none can be named; absent where the tensor is no module's."""


class DivergenceEntry(ElementEntry, RecordPair, _Originated):
    """Where two runs first part."""

    name: str
    verdict: VerdictWord
    metrics: MetricsEntry | None
    origin: str | None
    """The smallest module around the tensor whose inputs agree and whose output does not."""
    why: str
    around: AroundEntry | None
    note: str | None


class FirstSaid(TypedDict):
    """The first divergence as it is said before the rest is compared."""

    name: str
    verdict: VerdictWord
    why: str


class RuleEntry(TypedDict):
    """A rule of docs/tolerances.md that was asked of a pair."""

    id: str
    value: Number
    limit: Number | None
    """null: a person switched it off."""


class _Ruled(TypedDict, total=False):
    rule: RuleEntry | None
    """The rule that decided; null where nothing had to be weighed."""
    rules: list[RuleEntry]
    """Every rule that was asked, where --explain named the tensor."""


class RankFault(TypedDict):
    """What went wrong between ranks, as the values tell."""

    kind: str
    """missing, zeros, not summed, summed in groups, not averaged, twice, too much, too little, order, held twice,
    boundary, another's, apart, clipped apart, scaled, masks alike, masks differ, own positions, own vocabulary, own
    maximum, same samples, other samples, contribution, other tokens, tokens lost, summed with another, keys order,
    own keys, own mask, gathered, vocabulary slice, boundary label, own token mean, beside the tokens, rounded,
    wrong group, summed again."""
    ranks: list[int]
    factor: Number | None
    """Where what is held is a multiple of what it should be."""
    sentence: str


class RanksEntry(TypedDict):
    """What the ranks of one run hold of a tensor, of which the other run's one process holds all."""

    of: Literal["a", "b"]
    relation: Literal["all", "slices", "parts", "mean", "one"]
    """Each has all of it, or a slice along `axis`; their sum is it, or their mean; one rank alone has it."""
    ranks: list[int]
    axis: int | None
    parted: list[int]
    """Ranks whose values are not the other run's."""
    fault: RankFault | None


class _Ranked(TypedDict, total=False):
    ranks: RanksEntry
    """Where several ranks faced one process."""


class _Furthest(TypedDict, total=False):
    greatest: ElementEntry
    """Where |d| is greatest, where `index` is another place: the first that is not finite, the first of what must be
    equal, or the first token past its limit."""


class PairEntry(ElementEntry, RecordPair, _Ruled, _Ranked, _Furthest):
    """A pair of tensors, judged."""

    name: str
    """Canonical."""
    names: Pair[str | None]
    """As either side calls it."""
    verdict: VerdictWord | Literal["skipped"]
    suspect: bool
    """CLOSE, and above the noise expected."""
    dtype: Pair[str | None]
    shape: Pair[Shape | None]
    metrics: MetricsEntry | None
    """Over the tokens that count."""
    unmasked: MetricsEntry | None
    """Over every element, where some were masked apart."""
    reason: str
    note: str | None


class VerdictCounts(TypedDict):
    """total is the sum of all others."""

    total: Count
    SAME: Count
    CLOSE: Count
    DIFF: Count
    NAN: Count
    SHAPE: Count
    MISSING: Count
    PADDING: Count
    skipped: Count


class RunSide(TypedDict):
    """A run that was compared."""

    path: str
    dialect: str
    flags: Settings | None


class ToleranceEntry(TypedDict):
    """What a person had a comparison judged by; null where not given."""

    atol: Number | None
    rtol: Number | None
    file: str | None
    exact: bool


class _Absent(TypedDict, total=False):
    numbers_absent: Count
    """Where it was told how many ranks or micro-batches there are to be: those that neither run has."""


class CoverageEntry(_Absent):
    """What was compared, and what was not."""

    records_paired: Count
    records_only_in_a: Count
    records_only_in_b: Count
    tensors_compared: Count
    tensors_by_digest: Count
    """Equal or not is known of their bytes, and nothing else: a side kept no values. Not among tensors_compared."""
    tensors_skipped: Count
    records_unreadable: Count
    elements_compared: Count
    bookkeeping_fields_not_compared: Count
    samples_on_one_side: Count


class Moments(TypedDict):
    """Of the finite values; std of a sample (n - 1)."""

    mean: Number | None
    std: Number | None
    min: Number | None
    max: Number | None


class SamplePairing(TypedDict):
    """Samples on both sides, and on one."""

    paired: int | None
    only_in_a: int | None
    only_in_b: int | None


class TrajectoryEntry(SamplePairing):
    """A field of the trajectories of a step."""

    step: int | None
    stage: str
    name: str
    verdict: VerdictWord
    max_abs: Number | None


class DatumsEntry(SamplePairing):
    """The datums of a step."""

    step: int | None
    verdict: VerdictWord
    tokens_a: int | None
    tokens_b: int | None


class SummaryEntry(TypedDict):
    """A field of one rank and micro-batch."""

    step: int | None
    rank: int | None
    micro: int | None
    verdict: VerdictWord
    max_abs: Number | None
    mean_abs: Number | None
    a: Moments | None
    b: Moments | None
    pearson: Number | None
    is_close: bool | None
    """By the script's own rule: atol 1e-5, rtol 1e-4."""


class SummaryField(TypedDict):
    """A field over every rank and micro-batch: largest, smallest and mean of their largest differences."""

    section: str
    name: str
    count: Count
    max: Number | None
    min: Number | None
    mean: Number | None
    entries: list[SummaryEntry]


class SummaryBlock(TypedDict):
    """What NexRL's own script reports, over every rank and micro-batch."""

    trajectories: list[TrajectoryEntry]
    fields: list[SummaryField]
    datums: list[DatumsEntry]


class LogprobGap(TypedDict):
    """|difference| of the log-probabilities, in nats; null where a sample has no such token."""

    logp_max: Number | None
    logp_mean: Number | None


class WorstHidden(TypedDict):
    """The token whose final hidden state is furthest off, relative L2."""

    position: Count
    rel_l2: Number


class SegmentEntry(TypedDict):
    """A sample of one cell of a replay against the same sample of the baseline."""

    sample: Count
    tokens: Count
    worst_token: WorstHidden | None
    valid: LogprobGap
    response: LogprobGap


class _Tolerance(TypedDict, total=False):
    tolerance: ToleranceEntry | None
    """What a person had it judged by; null: the table alone. Not in documents written before it was kept."""


class StepEntry(TypedDict):
    """A step of two runs that are compared step by step."""

    step: int | None
    verdict: str | None
    """What its comparison comes to: NAN, SHAPE, DIFF, CLOSE, SAME, PARTLY (agrees as far as it was looked at), NONE
    (nothing could be compared); null: it was not compared."""
    counts: VerdictCounts | None
    first: str | None
    """The tensor that diverges first."""
    why: str | None
    """Why it was not compared, where there is a reason."""


class _Steps(TypedDict, total=False):
    steps: list[StepEntry]
    """Where the screen compared step by step: every step of the two runs, also those that were not compared. The rest
    of the document is about the step that `selection` names."""


class RankParted(TypedDict):
    """Where a rank parts first, in order of computation."""

    rank: int
    name: str
    step: int | None
    origin: bool
    """No rank parts in an earlier tensor; those that do later had what these sent."""


class ParallelFault(RankFault):
    """A fault of the first step that shows any: in how many tensors, and in which first."""

    name: str | None
    step: int | None
    tensors: Count


class ParallelBlock(TypedDict):
    """What is said of the ranks of a run that faced one process of the other."""

    of: Literal["a", "b"]
    ranks: list[int]
    parted: list[RankParted]
    sentence: str | None
    """Which ranks part first, and which later; null where none does."""
    faults: list[ParallelFault]


class _Parallel(TypedDict, total=False):
    parallel: ParallelBlock
    """Where a step of one run is spread over ranks and the other computed it in one process."""


class ComparisonDocument(Versioned, _Tolerance, _Steps, _Parallel):
    """Two runs, tensor by tensor."""

    kind: Literal["comparison"]
    a: RunSide
    b: RunSide
    counts: VerdictCounts
    first_divergence: DivergenceEntry | None
    first_difference: DivergenceEntry | None
    """The first pair that is not bitwise the same, noise included."""
    tensors: Sequence[PairEntry]
    """In order of computation; skipped ones last."""
    problems: list[ProblemEntry]
    notes: list[str]
    coverage: CoverageEntry
    segments: list[SegmentEntry] | None
    """Sample by sample against a, where the two are cells of a replay."""
    ruling: RulingDocument | None
    """Noise or bug, where --referee asked; null: not ruled."""
    hints: list[str]
    """What usually explains such a finding."""
    selection: dict[str, str]
    """What was asked for where it was not everything: step, rank, micro, stage, name."""
    summary: SummaryBlock | None
    """What NexRL's own script reports, over every rank and micro-batch."""
    others: list[ComparisonDocument]
    """Of three runs: the comparisons beside this one."""
