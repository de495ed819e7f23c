"""`rldbg replay`: one micro-batch under several settings, each held to every row alone."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from replay_core.documents.comparison import DivergenceEntry, SegmentEntry, VerdictCounts
from replay_core.documents.parts import Count, ErrorEntry, KeyEntry, Number, Says, Settings, VerdictWord, Versioned

CellOutcome = Literal["ran", "failed", "unavailable", "crashed"]
CellPart = Literal["recording", "reference", "control", "cell", "model"]


class CellTime(TypedDict):
    """Seconds."""

    load_s: Number | None
    compile_s: Number | None
    steady_s: Number | None
    forward_s: Number | None
    backward_s: Number | None


class CellMemory(TypedDict):
    """MiB."""

    peak_mib: Number | None
    forecast_logits_mib: Number | None


class ObserverEntry(TypedDict):
    """How the hooked forward stands to the plain one: the worst token's relative L2."""

    bitwise: bool
    worst_token: Number


class CompileEntry(TypedDict):
    """What torch.compile did, and whether its cache was cold."""

    backend: str
    dynamic: str
    cache: Literal["cached", "cold"]
    graphs: Count
    recompiles: Count
    recompile_reasons: list[str]
    graph_breaks: Count
    graph_break_reasons: list[str]
    cache_hits: Count
    hooked: ObserverEntry | None


class TensorDigest(TypedDict):
    """A tensor over its tokens, without its values."""

    l2: Number | None
    low: Number | None
    high: Number | None
    digest: str


class FirstDigest(TypedDict):
    """The first tensor whose digest differs, in call order."""

    name: str
    baseline: TensorDigest
    cell: TensorDigest


class CapturedDigests(TypedDict):
    """How the digests stand to the baseline's."""

    tensors: Count
    """Tensors with a digest."""
    equal: Count
    """Of those, bitwise equal to the baseline's."""
    differ: Count
    first: FirstDigest | None
    windows: Count
    """Passes that captured whole tensors, from the first difference on."""
    not_in_full: Count
    """Tensors that differ, or of which no digest is known, and were not compared in full."""
    baseline_dump: str | None
    """The baseline's tensors of the last window: what the comparison held the cell's dump to. Null without one."""


class CaptureEntry(TypedDict):
    """full: `mib` of tensors are in the cell's dump. hash: a digest of every tensor over its tokens, and whole tensors
    of the modules around the first that differs from the baseline's. none: the final hidden states alone."""

    level: Literal["none", "full", "hash"]
    modules: Count
    """Modules that were hooked."""
    forecast_mib: Number
    """What all their tensors would take, said before the capture."""
    room_mib: Number
    """What a capture may take: the cap, the free memory or the free disk."""
    mib: Number
    """What the tensors in the cell's dump take."""
    hashes: CapturedDigests | None
    """Null where none were taken or there is no other cell to hold them to."""


class InputFinding(TypedDict):
    """What is wrong with the inputs, read from them."""

    code: str
    text: str


class CellWeights(TypedDict):
    """Whose weights computed it; `step` is the step they are of, `batch_step` the one that is replayed."""

    model: str
    step: int | None
    batch_step: int


class DeterminismSettings(TypedDict):
    """What decides whether a run can be repeated."""

    deterministic: bool
    cudnn_benchmark: bool
    cublas_workspace: str | None
    seed: int


class MicroLoss(TypedDict):
    """The loss of one micro-batch; none where it was not formed again, its recorded gradient carried back instead."""

    rank: int
    micro: int
    loss: Number | None


class LossEntry(TypedDict):
    """The loss of a backward replay: its settings and values."""

    settings: Settings
    stated: str
    micros: list[MicroLoss]
    grad_norm: Number
    first_nonfinite_gradient: str | None


class OptimizerEntry(TypedDict):
    """The optimizer step of a backward replay: its settings, where they come from, the norm of its update."""

    settings: Settings
    stated: str
    update_norm: Number
    parameters: Count


class ModuleHash(TypedDict):
    """The digest of one captured tensor; only the child that ran the cell says it."""

    name: str
    module: str
    digest: str
    l2: Number | None
    low: Number | None
    high: Number | None
    numel: Count


class CellRun(TypedDict):
    """What a cell did; what it could not say is null."""

    flags: Settings
    effective: Settings | None
    """What really ran, read back from the model and from the operators."""
    outcome: CellOutcome
    error: ErrorEntry | None
    notes: list[str]
    """What was assumed."""
    time: CellTime | None
    memory: CellMemory | None
    dump: str | None
    final_hidden: str | None
    """The tensor whose worst token judges a segment."""
    compile: CompileEntry | None
    observer: ObserverEntry | None
    capture: CaptureEntry | None
    """What was looked at inside the model, and what of it was kept; null where nothing could be."""
    not_finite: str | None
    """The model computes NaN or infinities: from which weight, if from one."""
    inputs: list[InputFinding]
    left_pads: list[Count]
    weights: CellWeights | None
    determinism: DeterminismSettings | None
    forward: str | None
    """The trainer's own code that ran in place of the model's forward; `the model's own forward` where that was called
    whole and none of its modules was watched.
    """
    loss: LossEntry | None
    optimizer: OptimizerEntry | None
    log: str | None
    """The file with what the cell printed and logged."""
    key: KeyEntry | None
    """Of the recording: the record it comes from."""


class RecordedAt(TypedDict):
    """The token whose recorded and replayed values part most."""

    sample: int
    position: int
    recorded: Number
    replayed: Number


class RecordedEntry(TypedDict):
    """How a cell stands to a recorded value per token; figures in nats (of a critic: in its own unit), null where no
    token counts."""

    name: str
    field: str
    verdict: VerdictWord | None
    reason: str
    tokens: Count
    max_abs: Number | None
    mean_abs: Number | None
    k3: Number | None
    at: RecordedAt | None


class RecordedTraining(TypedDict):
    """How a backward replay stands to the recorded losses and gradients."""

    bitwise: bool
    agrees: bool | None
    tensors: Count
    losses: Count
    gradients: Count
    first: str | None
    sentence: str


class RecordedParams(TypedDict):
    """How the weights after the optimizer step stand to the recorded ones."""

    against: str
    bitwise: bool | None
    tensors: Count
    first: str | None
    sentence: str


class ModulePlace(TypedDict):
    """A captured tensor and the module whose work it is."""

    tensor: str
    module: str
    kind: Literal["position", "state", "mixer", "router", "other"]
    """Attention is a mixer; `other` works on each token by itself."""
    order: Count
    """Its place among the tensors, in order of computation; 0 where it is not told."""


class MovedTokens(TypedDict):
    """Tokens of one sample that moved and must not have, by position."""

    sample: Count
    relation: Literal["other", "own", "earlier"]
    tokens: Count
    first: Count
    last: Count


class _SightReach(TypedDict, total=False):
    """Of a sample that moves others in what works on each token by itself."""

    reach: Number | None
    """Share of the tokens of the samples that moved which move in the first tensor that does."""
    spread: Number | None
    """The same where a single token is changed: all there is together, or a few."""
    given_away: Count | None
    """Its own tokens that move nothing of their own there: what they were is another's now."""
    onward: Count | None
    """So many tokens right behind it move there, one after the other, and no others; 0: not so; null: not asked."""
    amid: Count | None
    """The token that all other samples were made of, while this one got its own back."""


class SightEntry(_SightReach):
    """A line of the table of visibility: what was changed in the batch, and who moved that must not see it."""

    by: Literal["cell", "reference", "eager"]
    what: Literal["again", "other", "padding", "token", "seed", "first", "fresh", "wider", "company", "shifted"]
    """Nothing (run again after other tokens), all tokens of `sample`, the padding, token `token` of every sample; the
    seed; nothing, in a model loaded anew, in its first call or after other tokens; how many columns of padding, or
    samples of a pack, are, and how many are in front of what moves where one more behind it moves nothing."""
    sample: Count | None
    token: Count | None
    moved: list[MovedTokens]
    first: ModulePlace | None
    """From which module on."""
    deaf: list[Count]
    """Samples whose next token did not move at all."""
    sentence: str


class TruthFigures(TypedDict):
    """Relative L2 of tokens' final hidden states to the truth: the typical one, three quarters, the worst."""

    typical: Number
    most: Number
    worst: Number


class _SmallestDepth(TypedDict, total=False):
    layers: Count | None
    """With how many of its first layers the model still shows it; null where they cannot be told apart."""
    of_layers: Count | None


class SmallestCase(_SmallestDepth):
    """The smallest batch that still shows it."""

    rows: Count
    tokens: list[Count]


class KeysAsked(TypedDict):
    """How far it was asked whether a token sees what it must, in the first tensor that parts: of so many tokens all
    `keys` of their past, in each of `heads` by itself. 0: no gradient came through, and single tokens were changed."""

    queries: Count
    keys: Count
    heads: Count


class PartLookedAt(TypedDict):
    """Rows of the batch, which its table numbers from 0, and how many of their first tokens."""

    rows: list[Count]
    tokens: list[Count]


class KeysLost(TypedDict):
    """Keys of its own past that each row alone does not see in a module, and that no window of the config leaves out:
    `pairs` of `of` pairs of a token and its past, the first of them that of `query` and `key`."""

    module: str
    pairs: Count
    of: Count
    query: Count
    key: Count
    itself: bool
    """Whether it is always the token's own key."""
    beyond: Count | None
    """None is seen that is so many tokens back or more; null: the keys that are lost lie otherwise."""


class _CauseAsked(TypedDict, total=False):
    narrowed: KeysLost | None
    looked_at: PartLookedAt | None
    """The part of a large batch that was asked; null: all of it, or what is left when rows and tokens are left out."""
    symmetric: bool | None
    """Whether each sample is what it was when all stand in another order, where some move others; null: not asked."""
    asked: KeysAsked | None
    beside: bool | None
    """Whether a row moves another beside it where each row alone has its tokens see their future; null: not asked."""
    skipped: list[str]
    """Interventions that raised, each with its error, or for which no time was left: they say nothing."""


class CauseEvidence(_CauseAsked):
    """What was found by changing tokens, in `arithmetic`."""

    arithmetic: str
    apart: Number
    """Relative L2 of the worst token between the cell's setting and each row alone, in that arithmetic."""
    logp_apart: Number | None
    kernels_apart: Number | None
    """The same between the reference's kernel and eager; null where eager cannot run."""
    truth: dict[str, TruthFigures]
    """How far the dumps of `reference` and `cell` are from each row alone, eager, in that arithmetic."""
    smallest: SmallestCase | None
    first: ModulePlace | None
    """Where the two first part."""
    visibility: list[SightEntry]


class KindShown(TypedDict):
    """A kind of cause, and what shows it."""

    kind: str
    sentence: str


class _CauseAlso(TypedDict, total=False):
    also: list[KindShown]
    """Other kinds whose proof holds as well: those that come earlier in the order of computation first."""


class CellCause(_CauseAlso):
    """Why a cell disagrees, or seems to, in one sentence and by sample."""

    kind: Literal["random", "state", "batch", "other_samples", "future", "padding", "own_keys", "positions", "maths",
                  "rounding", "unknown"]  # fmt: skip
    is_noise: bool
    """It agrees: what is left is rounding of its dtype."""
    off: list[Count]
    exact: list[Count]
    causes: list[str]
    """Codes of what the inputs themselves show."""
    sentence: str
    evidence: CauseEvidence | None


class AgreementEntry(TypedDict):
    """With the baseline; agrees is null where nothing was compared."""

    agrees: bool | None
    first_divergence: DivergenceEntry | None
    counts: VerdictCounts | None
    off: list[Count]
    """Samples whose worst token is past the limit."""


class CompilerTrial(TypedDict):
    """A cell that did not run, again with less of the compiler. graphs is null where it did not run either."""

    compile: str
    outcome: CellOutcome
    message: str | None
    graphs: Count | None
    graph_breaks: list[str]


class CompilerPass(TypedDict):
    """What torch's own bisector says it is; null where it was not found, and then the sentence says why."""

    sentence: str
    backend: str | None
    subsystem: str | None
    number: Count | None
    """How many times the subsystem had been applied when it went wrong."""
    applied: str | None
    """The pass, or the node of the graph, that this was."""
    tries: Count
    """Compilations that it took."""
    layers: Count | None
    """Of the model's first layers, with which it was asked."""
    of_layers: Count | None


class _Blamed(TypedDict, total=False):
    blamed: CompilerPass
    """Of inductor."""


class CompilerStages(_Blamed):
    """Which stage of torch.compile is wrong, by the trials; `as_cell` fails alike and was tried in its place."""

    sentence: str
    trials: list[CompilerTrial]
    as_cell: Count | None


class _Told(TypedDict, total=False):
    threads: int | None
    """CPU threads that ran it."""
    stages: CompilerStages
    """Of a compiled cell that failed or crashed, or that only its compiler makes disagree."""


class CellEntry(CellRun, _Told):
    """A cell, and how it stands to the baseline and to the recording."""

    part: CellPart
    asked: bool
    """False: a control that rldbg ran beside what was asked for."""
    agreement: AgreementEntry
    segments: list[SegmentEntry] | None
    cause: CellCause | None
    toggles: Settings | None
    """Axes on which the cell leaves the baseline."""
    same_as: Count | None
    """An earlier cell that ran the same kernels and settings."""
    recorded: list[RecordedEntry]
    recorded_training: RecordedTraining | None
    recorded_params: RecordedParams | None


class _PlanOptions(TypedDict, total=False):
    role: str | None
    base: str | None
    temperature: float | None
    seed: int
    capture: str | None
    logit_chunk: int
    max_rows: int | None
    rows: str | None
    whole_step: bool
    capture_level: str
    capture_cap_mib: int
    allow_pickled_weights: bool
    forward: str | None
    forward_path: str | None
    backward: bool
    micros: list[int] | None
    ranks: list[int] | None
    loss: Settings | str | None
    optimizer: Settings | str | None
    share_gpu: bool
    cold_compile: bool
    unlike: str | None


class PlanEntry(_PlanOptions):
    """What was asked for: a `replay.plan.ReplayPlan` without where it writes to."""

    dump: str
    step: int
    rank: int
    micro: int
    model: str
    flags: Settings


class MatrixEntry(TypedDict):
    """A matrix of settings."""

    axes: dict[str, list[Any]]
    """Flag names and the values each goes through, the baseline's first."""
    breaking: list[Settings]
    """The smallest sets of toggles that break agreement."""
    failing: list[Settings]
    """The smallest sets of toggles that failed or crashed."""


class RecordedValue(TypedDict):
    """A value that the trainer recorded of these tokens."""

    name: str
    field: str
    key: KeyEntry


class RecordingEntry(TypedDict):
    """What the trainer recorded of these tokens, and the cell that comes nearest to it."""

    values: list[RecordedValue]
    judged_by: str
    nearest_cell: Count | None
    mean_abs: Number | None


class FloorEntry(TypedDict):
    """How far agreeing cells of this run are from the reference: relative L2 of the worst token; nats."""

    worst_token: Number
    logp_max: Number


class RepeatEntry(TypedDict):
    """Whether the same plan run twice is bitwise equal, and where first if not."""

    cell: Count
    equal: bool | None
    first: str | None
    why: str | None
    tensors: Count


class RankedModel(TypedDict):
    """A model, by how well it explains the recorded log-probabilities (nats)."""

    cell: Count
    model: str
    mean_abs: Number | None
    max_abs: Number | None
    k3: Number | None


class RankingEntry(TypedDict):
    """Models by how well they explain recorded log-probabilities, nearest first."""

    against: str
    models: list[RankedModel]


class CapsuleEntry(TypedDict):
    """The one file that shows the difference by itself: a slice of the model, the batch, what both sides put out."""

    file: str
    bytes: Count
    sentence: str
    """The cause as it was found where the capsule was made."""
    model: str
    """Its type."""
    weights: Literal["own", "random"]
    layers: Count
    of_layers: Count
    words: Count
    rows: Count
    tokens: list[Count]
    environment: dict[str, str | None]
    """Where it was made: rldbg, python, platform, torch, transformers."""
    script: str | None
    """Where the standalone script was written."""
    standalone: bool
    """Whether the script needs no capsule beside it."""
    as_made: dict[str, Number | None]
    """How far `reference` and `cell` here are from what they were there: relative L2 of the worst token."""


class _ReplayOptions(TypedDict, total=False):
    capsule: CapsuleEntry
    """Of a replay of a capsule, alone."""


class ReplayDocument(Versioned, _ReplayOptions):
    """A replay and its cells."""

    kind: Literal["replay"]
    baseline: Count
    """The cell the others are held against."""
    plan: PlanEntry
    cells: Annotated[list[CellEntry], Says(minItems=1)]
    notes: list[str]
    matrix: MatrixEntry | None
    recording: RecordingEntry | None
    floors: dict[str, FloorEntry]
    """By dtype."""
    determinism: RepeatEntry | None
    ranking: RankingEntry | None
    is_warm: bool
    """One child ran all cells: times and memory depend on their order."""
