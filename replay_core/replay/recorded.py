"""What the trainer itself recorded of the micro-batch, laid beside a replay token by token. numpy only.

The recording is row 0 of a matrix: all replayed cells can agree with each other while the trainer's own
forward was wrong. Recorded log-probabilities come as [B, S], [B, S-1], a response suffix [B, A], a pack or
ragged rows; all are brought to one form, [B, S] with index t about token t + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from replay_core import naming, pages
from replay_core.compare import compare_runs
from replay_core.compare.judging.judgement import judge
from replay_core.compare.judging.limits import LOGPROB_NOISE_FP32
from replay_core.compare.judging.sample import shows_fp32
from replay_core.compare.judging.verdict import Context, Verdict
from replay_core.dtypes import coarsest
from replay_core.dumps import open_run
from replay_core.errors import NothingComparableError, RldbgError
from replay_core.measure.figures import PairFigures
from replay_core.measure.pair import figures
from replay_core.records import Inline, Record, RecordKey, Run, TensorRef
from replay_core.replay.batch import MicroBatch
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.reading import RecordedBatch
from replay_core.replay.segments import layout_of
from replay_core.samples.batch import Batch, places_of

Floats = NDArray[np.float64]
#: Log-probabilities [B, T] of logits [B, T, V] and of the ids [B, T] that follow.
OfNext = Callable[[Any, Any], Any]

#: Recorded names that a forward of that role computes again, nearest first.
COMPARABLE = {
    "actor": ("policy_logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs"),
    "ref": ("ref_logprobs", "old_logprobs", "policy_logprobs"),
    "critic": ("values",),
}
#: Stages of a micro-batch that a backward replay computes again.
_TRAINED = ("forward_data", "loss")
#: Times the mean, and the greatest, distance between two dtypes up to which a recording is off by rounding alone; a
#: rollout engine has kernels of its own. Below the second pair nobody is accused (nats), nor by fewer tokens than that.
_MEAN, _MOST, _ENGINE = 3.0, 6.0, 3.0
#: What is further off than any half precision may be is rounding if no token is further off than so many times the
#: furthest that two dtypes are apart here: a mixture sends a token that is near a tie elsewhere, whole nats away.
_SENT = 3.0
_LEAST_MEAN, _LEAST_MOST = 5e-3, 0.05
_FEWEST, _FEW = 3, 0.02
#: What is left of the distance where each value is held to that of its neighbour: below it, it is the neighbour's.
_ONE_OFF = 0.05
#: A token is exact within so many nats of a float32 replay, if its probability is not next to 1 (nats); and of how many
#: tokens, and which share of them, a recording in half precision is no explanation.
_EXACT, _UNSURE, _FEWEST_EXACT, _SHARE = 2e-5, 0.1, 5, 0.1
#: What is no accusation.
_AGREES = (Verdict.SAME, Verdict.CLOSE, Verdict.PADDING)
#: The share of a number that bfloat16 may round away.
_HALF = 2.0**-8
#: What ranks weights by default: the tokens' own sampler.
AGAINST = "rollout_logprobs"


class RecordedTokens(Struct, frozen=True):
    """A recorded value per token: [B, S], index t about token t + 1; `known_BS` says where there is one."""

    name: str
    field: str
    key: RecordKey
    values_BS: Floats
    known_BS: NDArray[np.bool_]
    dtype: str

    @property
    def is_rounded(self) -> bool:
        """Whether the values themselves were kept in half precision, or formed in it."""
        return self.dtype not in ("float32", "float64") or _is_half(self.values_BS[self.known_BS])


def read_recorded(run: Run, plan: ReplayPlan, replayed: RecordedBatch) -> tuple[list[RecordedTokens], list[str]]:
    """The recorded log-probabilities of a micro-batch, and what could not be placed."""
    batch, key = replayed.recorded, replayed.key
    names = COMPARABLE.get(plan.role or key.role or "actor", COMPARABLE["actor"])
    found: list[RecordedTokens] = []
    notes: list[str] = []
    if key.minibatch and "policy_logprobs" in names and run.models:
        names = tuple(name for name in names if name != "policy_logprobs")
        notes.append(
            f"{key.minibatch} optimizer steps of this step came before: the weights kept of it are older, so its own "
            "log-probabilities are not held to the replay"
        )
    temperature = plan.temperature or replayed.batch.temperature or 1.0
    for record in [*records_of(run, key), *_of_the_step(run, key)]:
        for ref in _tensors(record, notes):
            name = "policy_logprobs" if (name := _name(ref)) == "logits" else name
            said = said_of_tokens(ref, replayed, temperature, name) if name in names else None
            if said is None or any(known.name == name for known in found):
                continue
            placed = placed_in(said, record, replayed)
            if placed is not None:
                found.append(RecordedTokens(name, ref.name, record.key, *placed, ref.dtype))
            elif record.key.micro == key.micro:
                rows = f"rows of {list(ref.rows[:4])} ..." if ref.rows else str(list(ref.shape))
                notes.append(f"the recorded {ref.name} ({rows}) fits no token axis of the batch {batch.ids_BS.shape}")
    found.sort(key=lambda one: names.index(one.name))
    if replayed.rows is not None:
        chosen = replayed.chosen
        found = [replace(one, values_BS=chosen(one.values_BS), known_BS=chosen(one.known_BS)) for one in found]
    return found, notes


def _name(ref: TensorRef) -> str:
    """The canonical name; of what a recorded model call returned, that of the value itself."""
    inner = ref.name.removeprefix("forward.output.")
    return naming.canonical(inner) if inner != ref.name else ref.canonical or naming.canonical(ref.name)


def said_of_tokens(
    ref: TensorRef, replayed: RecordedBatch, temperature: float, name: str, of_next: OfNext | None = None
) -> TensorRef | None:
    """A tensor that is, or of which are made, the values of that canonical name; None where it is another.

    Args:
        of_next: how log-probabilities are made of logits; numpy's way where nobody cares for last bits.
    """
    known = _name(ref)
    if not ref.is_readable or ref.is_text or known not in (name, "logits"):
        return None
    if known == name:
        return ref
    return (_of_next_tokens(ref, replayed, temperature, of_next) or ref) if name == "policy_logprobs" else None


def _of_next_tokens(
    ref: TensorRef, replayed: RecordedBatch, temperature: float, of_next: OfNext | None
) -> TensorRef | None:
    """Recorded logits [B, S, V] as the log-probabilities [B, S-1] of the tokens that follow; None where they are of
    another batch.
    """
    ids_BS = replayed.recorded.ids_BS
    if ref.shape[:2] != ids_BS.shape or len(ref.shape) != 3 or not ref.is_readable or replayed.samples.width is None:
        return None
    if ids_BS.max(initial=0) >= ref.shape[2]:
        return None
    logits_BTV = np.asarray(pages.array(ref)[:, :-1], np.float32) / np.float32(temperature)
    values_BT = (of_next or _by_numpy)(logits_BTV, ids_BS[:, 1:])
    source = Inline(values_BT.reshape(-1).tolist())
    return TensorRef(ref.name, "float32", values_BT.shape, source, canonical="policy_logprobs", alignment="next")


def _by_numpy(logits_BTV: Any, next_BT: Any) -> Any:
    greatest_BT = logits_BTV.max(-1, keepdims=True)
    logsumexp_BT = np.log(np.exp(logits_BTV - greatest_BT).sum(-1)) + greatest_BT[..., 0]
    return np.take_along_axis(logits_BTV, next_BT[..., None], axis=-1)[..., 0] - logsumexp_BT


def _of_the_step(run: Run, key: RecordKey) -> list[Record]:
    """Records of the step's whole batch, whose rows are found again by their tokens."""
    if key.micro is None:
        return []
    parts = ((record, record.key) for record in run.records)
    return [one for one, at in parts if (at.step, at.micro) == (key.step, None) and at.rank in (None, key.rank)]


def records_of(run: Run, key: RecordKey) -> list[Record]:
    """Every record of that micro-batch, whatever its stage."""
    return [
        record
        for record in run.records
        if (record.key.step, record.key.micro, record.key.rank, record.key.role)
        == (key.step, key.micro, key.rank, key.role)
    ]


def _tensors(record: Record, notes: list[str]) -> tuple[TensorRef, ...]:
    try:
        return record.tensors()
    except RldbgError as error:
        notes.append(f"{record.path.name} cannot be read: {error.message}")
        return ()


def placed_in(ref: TensorRef, record: Record, replayed: RecordedBatch) -> tuple[Floats, NDArray[np.bool_]] | None:
    """(values, which are known), both [B, S] with index t about token t + 1; None where it fits no token axis.

    A record that holds samples of its own has its rows found by their tokens: they may stand in another order, or be
    more. A step's records without tokens of their own do not say which sample is which, so they are not placed.
    """
    samples, own = replayed.samples, Batch(record, record.tensors())
    if own.has_tokens and own.padding_known:
        rows = places_of(samples.digests or (), own.digests or ())
    elif record.key.micro is None and replayed.key.micro is not None:
        return None
    else:
        own, rows = samples, list(range(samples.count))
    said = own.values(ref)
    if said is None:
        return None
    values_N, known_N = np.zeros(samples.position_N.size), np.zeros(samples.position_N.size, dtype=bool)
    for start, length, row in zip(samples.starts, samples.lengths, rows, strict=True):
        if row is None and length:
            return None
        if row is not None:
            here, there = slice(start, start + length), slice(own.starts[row], own.starts[row] + length)
            known_N[here] = said.said_N[there]
            values_N[here] = np.where(known_N[here], said.values_N[there], 0.0)
    if ref.sentinel:
        # What stands for "there is none" may be read as NaN: in JSON it is null.
        known_N &= ~np.isnan(values_N)
    if samples.generated_N is not None:
        known_N &= samples.generated_N
    batch = replayed.recorded
    values_BS, known_BS = np.zeros(batch.ids_BS.shape), np.zeros(batch.ids_BS.shape, dtype=bool)
    slots, is_predicted_N = batch.layout().slots("next"), samples.position_N > 0
    values_BS.reshape(-1)[slots], known_BS.reshape(-1)[slots] = values_N[is_predicted_N], known_N[is_predicted_N]
    return values_BS, known_BS


def replayed(run: Run, batch: MicroBatch) -> Floats:
    """A replay's log_probs, or a critic's values, as [B, S] of the batch: index t about token t + 1, else 0."""
    layout, own = layout_of(run), batch.layout()
    record = run.select(stage="forward_data")[0]
    ref = record.get("log_probs") or record.get("values")
    assert ref is not None
    values = np.zeros(batch.ids_BS.size)
    values[own.slots("next")] = np.asarray(pages.array(ref)).reshape(-1)[layout.slots("next")].astype(np.float64)
    return values.reshape(batch.ids_BS.shape)


def replayed_N(run: Run, batch: MicroBatch) -> Floats:
    """The same, of the tokens that have a next one."""
    found: Floats = replayed(run, batch).reshape(-1)[batch.layout().slots("next")]
    return found


class Explained(Struct, frozen=True):
    """How far a replay in two dtypes is apart on the tokens that were recorded, in nats; and whether that, or the
    rounding of what was stored, explains how far the recording is from the nearer of the two, but for a few tokens or
    of every one.
    """

    mean: float
    most: float
    explains: bool
    explains_all: bool

    @classmethod
    def of(cls, recorded: RecordedTokens, one: Run, other: Run, batch: MicroBatch) -> Explained:
        chosen = recorded.known_BS
        values_N, one_N, other_N = (
            part[chosen] for part in (recorded.values_BS, replayed(one, batch), replayed(other, batch))
        )
        return cls.of_tokens(values_N, one_N, other_N, times=_ENGINE if recorded.name == AGAINST else 1.0)

    @classmethod
    def of_tokens(cls, values_N: Floats, one_N: Floats, other_N: Floats, *, times: float = 1.0) -> Explained:
        """Of log-probabilities of the tokens that count: `values_N`, and those of a replay in two dtypes.

        times: how much further than the two are apart they may be off.
        """
        noise_N = np.abs(one_N - other_N)
        off_N = min((np.abs(values_N - one_N), np.abs(values_N - other_N)), key=lambda distance_N: distance_N.mean())
        mean, most = float(noise_N.mean()), float(noise_N.max())
        # Log-probabilities that were themselves formed in half precision are rounded once more.
        stored_N = _HALF * np.abs(values_N) if _is_half(values_N) else np.zeros_like(values_N)
        is_typical = off_N.mean() <= times * max(_MEAN * mean, _LEAST_MEAN) + stored_N.mean()
        beyond_N = off_N > times * max(_MOST * most, _LEAST_MOST) + stored_N
        are_few = beyond_N.sum() < max(_FEWEST, _FEW * beyond_N.size)
        return cls(mean, most, bool(is_typical and are_few), bool(is_typical and off_N.max() <= _SENT * most))


def _is_half(values_N: Floats) -> bool:
    bits_N = np.asarray(values_N, np.float32).view(np.uint32)
    return bool(((bits_N & 0xFFFF) == 0).all())


def half_of(values: Floats) -> Floats:
    """Rounded to bfloat16, to the nearest and of two alike to the even one."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    found: Floats = rounded.astype(np.uint32).view(np.float32).astype(np.float64)
    return found


def exact_beside_others(recorded: RecordedTokens, run: Run, batch: MicroBatch) -> tuple[int, int] | None:
    """How many tokens a float32 replay gives exactly, and how many it does not, where a recording can only be one in
    float32 of which a part was computed otherwise; None where it may be in half precision.

    Half precision moves every token that is not sure, by amounts that are spread: of a hundred not one comes within a
    hundredth of their mean, and of no sample do all.
    """
    chosen = recorded.known_BS
    values_N, again_N = recorded.values_BS[chosen], replayed(run, batch)[chosen]
    unsure_N = np.minimum(values_N, again_N) < -_UNSURE
    off_N = np.abs(values_N - again_N)[unsure_N]
    if not off_N.size or not np.isfinite(off_N).all():
        return None
    is_exact_N = off_N <= min(_EXACT, off_N.mean() / 100)
    exact, apart = int(is_exact_N.sum()), int((off_N > LOGPROB_NOISE_FP32).sum())
    sample_N = np.nonzero(chosen)[0][unsure_N]
    tokens_B, exact_B = (np.bincount(one, minlength=len(chosen)) for one in (sample_N, sample_N[is_exact_N]))
    is_share = exact >= max(_FEWEST_EXACT, _SHARE * off_N.size)
    is_sample = bool(((exact_B == tokens_B) & (tokens_B >= _FEWEST_EXACT)).any())
    return (exact, apart) if (is_share or is_sample) and apart >= _FEWEST else None


def against(
    recorded: RecordedTokens, run: Run, batch: MicroBatch, *, run_dtype: str, known_fp32: bool
) -> dict[str, Any]:
    """How a replay stands to a recorded value: verdict, reason, and figures in nats over the tokens that count.

    run_dtype: of the replay's weights. known_fp32: whether the trainer's are known to be float32, as the replay's are.
    """
    values_BS = replayed(run, batch)
    chosen = recorded.known_BS
    a, b = recorded.values_BS[chosen][:, None], values_BS[chosen][:, None]
    if not a.size:
        nothing = dict.fromkeys(("verdict", "max_abs", "mean_abs", "k3", "at"))
        return {"name": recorded.name, "field": recorded.field, **nothing, "reason": "no token counts", "tokens": 0}
    pair: PairFigures = figures([(a, b)], exact=False, logprobs=recorded.name != "values")
    pair.rows.sample = np.nonzero(chosen)[0]
    # A replay in half precision that comes near by luck, of a few sure tokens, is none in float32.
    is_fp32 = known_fp32 or (run_dtype == "float32" and shows_fp32(pair))
    context = Context(naming.meaning(recorded.name), coarsest("float32", recorded.dtype), exact=False,
                      known_fp32=is_fp32)  # fmt: skip
    found = judge(pair, None, context)
    distance = np.abs(b - a)
    worst = int(np.argmax(np.where(np.isnan(distance), np.inf, distance)))
    slot = int(np.flatnonzero(chosen.reshape(-1))[worst])
    sample, position = batch.layout().at(slot)
    return {
        "name": recorded.name,
        "field": recorded.field,
        "verdict": found.verdict.value,
        "reason": found.reason
        if found.verdict in _AGREES
        else _one_token_off(recorded, values_BS, batch) or found.reason,
        "tokens": int(a.size),
        "max_abs": float(distance[worst, 0]),
        "mean_abs": float(distance.mean()),
        "k3": pair.total.k3,
        "at": {
            "sample": sample,
            "position": position + 1,
            "recorded": float(a[worst, 0]),
            "replayed": float(b[worst, 0]),
        },
    }


def _one_token_off(recorded: RecordedTokens, values_BS: Floats, batch: MicroBatch) -> str:
    """What to say where the recording is the replay of the token before, or after: its index means another token than
    was taken, or the trainer reads one token off. Empty where it is neither.
    """
    has_one_BS = np.zeros(values_BS.shape, dtype=bool)
    has_one_BS.reshape(-1)[batch.layout().slots("next")] = True
    apart = np.abs(recorded.values_BS - values_BS)[recorded.known_BS].mean()
    for by, stands in ((1, "index t is about token t, not t + 1"), (-1, "index t is about token t + 1, not t")):
        others_BS, both_BS = np.roll(values_BS, by, axis=1), recorded.known_BS & np.roll(has_one_BS, by, axis=1)
        edge = 0 if by > 0 else -1
        both_BS[:, edge] = False
        if both_BS.sum() < _FEWEST:
            continue
        near = np.abs(recorded.values_BS - others_BS)[both_BS].mean()
        if near < _ONE_OFF * apart:
            return (
                f"read one token {'earlier' if by > 0 else 'later'} it is (mean |d| {near:.2g} nats, {apart:.2g} where "
                f"it stands): {stands}. Record it with alignment, or the trainer is one token off"
            )
    return ""


def against_training(run: Run, replay: Run, key: RecordKey, done: set[tuple[int, int]]) -> dict[str, Any] | None:
    """How a backward replay stands to what the trainer recorded: log-probabilities, losses, gradients. None if nothing.

    A step's gradient is compared only when every one of its micro-batches was replayed, of every rank.

    Args:
        done: (rank, micro-batch) of everything that was replayed.
    """
    mine = [one for one in run.records if (one.key.step, one.key.role) == (key.step, key.role)]
    ranks = {one.key.rank for one in mine} - {None}
    ran = {(None if key.rank is None else rank, micro) for rank, micro in done}
    ours = {rank for rank, _ in ran}
    mine = [one for one in mine if one.key.rank in ours and one.key.minibatch in (None, key.minibatch)]
    trained = [one for one in mine if one.key.stage in _TRAINED and one.key.micro is not None]
    whole = ranks <= ours and all((one.key.rank, one.key.micro) in ran for one in trained)
    chosen = [one for one in trained if (one.key.rank, one.key.micro) in ran]
    if whole:
        gradients_ = [one for one in mine if one.key.stage == "gradient" and one.key.micro is None]
        chosen += [one for one in gradients_ if one.key.rank == key.rank]
    theirs = [one for one in replay.records if one.key.stage in ("batch_inputs", *_TRAINED, "gradient")]
    if not whole:
        theirs = [one for one in theirs if one.key.stage != "gradient"]
    try:
        compared = compare_runs(run, replay, chosen, theirs)
    except NothingComparableError:
        return None
    rows = [row for row in compared.tensors if row.a is not None and row.b is not None]
    rows = [row for row in rows if naming.meaning(row.name).kind not in ("ids", "mask", "layout", "note")]
    parted = [row for row in rows if row.figures is None or row.figures.mismatched]
    gradients = [row for row in rows if row.name.startswith("grad.")]
    losses = [row for row in rows if naming.meaning(row.name).kind == "loss"]
    first = compared.first
    what = f"{len(rows)} tensors ({len(losses)} losses, {len(gradients)} gradients)"
    sentence = f"bitwise equal in all {what}" if not parted else f"{len(parted)} of {what} differ"
    if first is not None:
        sentence += f", first divergence {first.name}: {first.reason}"
    elif parted:
        sentence += f", all within tolerance; first {parted[0].name}: {parted[0].reason}"
    if ranks - ours:
        which = f"{len(ranks)} ranks together, this replay of {len(ours)}"
        sentence += f"; the recorded gradient is of {which}: it is not compared"
    elif not whole:
        sentence += "; the recorded gradient is of the whole step: --micro all replays it"
    return {
        "bitwise": bool(rows) and not parted,
        "agrees": first is None,
        "tensors": len(rows),
        "losses": len(losses),
        "gradients": len(gradients),
        "first": None if first is None else first.name,
        "sentence": sentence,
    }


def against_params(run: Run, replay: Run, key: RecordKey) -> dict[str, Any] | None:
    """How the weights after a replayed optimizer step stand to what was recorded: the step's own `param` records,
    else the checkpoint of the step after it. None where there is neither.
    """
    mine = [one for one in run.records if one.key.stage == "param" and one.key.step == key.step]
    where = str(run.path)
    if not mine:
        following = run.models.get((key.step or 0) + 1)
        folder = None if following is None else (run.path if run.path.is_dir() else run.path.parent) / following
        if folder is None or not folder.is_dir():
            return None
        where = str(folder)
        try:
            mine = [one for one in open_run(folder).records if one.key.stage == "param"]
        except RldbgError as error:
            return {"against": where, "bitwise": None, "tensors": 0, "first": None, "sentence": error.message}
    a, b = _params(mine), _params([one for one in replay.records if one.key.stage == "param"])
    # A tied head is one weight, which some files hold under one name and some under two.
    names = [name for name in b if name in a]
    if not names:
        return None
    first, parted, worst = None, 0, 0.0
    for name in names:
        recorded, stepped = pages.array(a[name]), pages.array(b[name])
        if recorded.shape == stepped.shape and np.array_equal(recorded, stepped):
            continue
        parted, first = parted + 1, first or name
        if recorded.shape == stepped.shape:
            worst = max(worst, float(np.abs(recorded.astype(np.float64) - stepped.astype(np.float64)).max()))
    said = f"bitwise equal in all {len(names)} weights"
    if parted:
        said = f"{parted} of {len(names)} weights differ, first {first}, by at most {worst:.3g}"
    missing = len(a) - len(names)
    return {
        "against": where, "bitwise": not parted, "tensors": len(names), "first": first,
        "sentence": said + (f"; {missing} recorded weights have no counterpart" if missing else ""),
    }  # fmt: skip


def _params(records: Sequence[Record]) -> dict[str, TensorRef]:
    """Canonical name -> weight."""
    refs = [ref for record in records for ref in record.tensors() if ref.is_readable and not ref.is_text]
    named = {ref.canonical or naming.canonical(ref.name): ref for ref in refs}
    return {name: ref for name, ref in named.items() if name.startswith("param.")}
