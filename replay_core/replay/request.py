"""A whole replay request: one setting or a matrix, the recording beside it, several models, run twice.

`answer` runs it through a Runner and gives what the document is made of: the command and the screen ask here. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from replay_core.compare.judging.limits import LOGPROB_NOISE_FP32
from replay_core.dtypes import EPS, named
from replay_core.errors import RequestError
from replay_core.jobs import OnEvent, Runner, ignore
from replay_core.records import Run
from replay_core.replay import ahead
from replay_core.replay.axes import Axes
from replay_core.replay.batch import MicroBatch
from replay_core.replay.causes import cause_of_own_forward, cause_of_recording, rounded_forward
from replay_core.replay.flags import FLAGS, settings_asked, settings_known
from replay_core.replay.forecast import unavailable
from replay_core.replay.guesses import by_rows_alone, explain, halves
from replay_core.replay.kept import Kept
from replay_core.replay.losses import Loss
from replay_core.replay.matrix import Bench, CellResult, OnCell, breaking, cells_for, failing, floors, run_axes
from replay_core.replay.plan import ITSELF, ReplayPlan
from replay_core.replay.reading import RecordedBatch, read_batch
from replay_core.replay.recorded import (
    AGAINST,
    Explained,
    RecordedTokens,
    against,
    against_params,
    against_training,
    exact_beside_others,
    half_of,
    read_recorded,
    replayed_N,
)
from replay_core.replay.references import RANDOM, resolve

#: What agreement means where the trainer's own numbers are not there.
NOTHING_RECORDED = (
    "held to nothing that the trainer computed: its record has neither log-probabilities nor logits of these tokens, "
    "so agreement says that the settings agree with each other"
)


class ReplayRequest(Struct, frozen=True):
    """What is asked beside the plan.

    matrix: axes as text (empty: the default three); None for one setting beside its reference.
    models, against: several models in place of the plan's, ranked by a recorded log-probability.
    twice: run the last cell asked for once more and say whether this machine repeats itself.
    why: ask of every cell who moves whom, also where it agrees.
    is_warm: the cells share a child, so time and memory depend on their order.
    """

    matrix: str | None = None
    models: tuple[str, ...] = ()
    against: str | None = None
    twice: bool = False
    is_warm: bool = False
    why: bool = False


#: Times as far as float32 is from float64 on the same tokens that another machine's kernels in float32 may be.
_BEYOND_FLOAT32 = 30.0
#: Tokens below which nothing is said of their worst.
_FEWEST_TOLD = 10
#: Kinds that no setting of a batch shows: what was called before, and the seed.
_OF_CALLS = ("state", "random")
#: And those that no known mistake has: where nothing else shows, none is tried.
_OF_NO_MISTAKE = (*_OF_CALLS, "batch", "future")
#: What a row shows by itself.
_OF_ONE_ROW = ("future", "own_keys")
#: Shares of tokens that are bit for bit the same where one rounding makes them, and where another does.
_ALIKE, _UNLIKE = 0.98, 0.9
#: And tokens that the other does not make, at least.
_FEWEST_UNLIKE = 5
#: Nats on average: what is so far off is not asked whether half precision explains it.
_FAR = 0.2


class Replayed(Struct):
    """Everything a request had to say; `results[baseline]` is the reference."""

    results: list[CellResult]
    baseline: int = 0
    axes: Axes | None = None
    floors: dict[str, Any] = field(default_factory=dict)
    breaking: list[dict[str, Any]] = field(default_factory=list)
    failing: list[dict[str, Any]] = field(default_factory=list)
    determinism: dict[str, Any] | None = None
    ranking: dict[str, Any] | None = None
    recording: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    is_warm: bool = False
    #: The role that was replayed, where nobody named it and its records are a critic's.
    role: str | None = None


def micro_batch(run: Run, asked: Mapping[str, Any]) -> dict[str, int]:
    """The step, rank and micro-batch that are replayed: what `asked` leaves open is the first there is."""
    keys, found = [record.key for record in run.records], dict[str, int]()
    for part in ("step", "rank", "micro"):
        known = asked.get(part)
        numbers = (number for key in keys if (number := getattr(key, part)) is not None)
        found[part] = known if known is not None else next(numbers, 0)
        keys = [key for key in keys if getattr(key, part) in (None, found[part])]
    return found


class _Recording(Struct):
    """What the trainer recorded of the micro-batch, and how far a cell is from it.

    stranger: why the replay's weights are none that computed it; None where they may be.
    """

    run: Run
    micro: RecordedBatch
    values: Sequence[RecordedTokens]
    stranger: str | None

    def hold(self, result: CellResult) -> None:
        """Hold a cell to it. Under other weights the figures stay, and no verdict: neither wrong nor near by luck."""
        if result.run is None or result.part in ("recording", "model"):
            return
        trained_in_fp32 = settings_asked(self.run.flags).get("dtype") in ("float32", "fp32", "torch.float32")
        dtype = result.cell["flags"]["dtype"]
        fp32 = trained_in_fp32 and dtype == "float32"
        result.recorded = [
            against(value, result.run, self.micro.batch, run_dtype=dtype, known_fp32=fp32) for value in self.values
        ]
        if result.cell.get("loss"):
            done = {(one["rank"], one["micro"]) for one in result.cell["loss"]["micros"]}
            result.training = against_training(self.run, result.run, self.micro.key, done)
        if result.cell.get("optimizer"):
            result.params = against_params(self.run, result.run, self.micro.key)
        if self.stranger is not None:
            result.recorded = [{**one, "verdict": None, "reason": self.stranger} for one in result.recorded]
        rows = self.micro.rows
        why = self.stranger or (f"only {len(rows)} rows of the micro-batch were replayed" if rows is not None else None)
        trained_in = _family(settings_asked(self.run.flags).get("dtype"))
        is_off = result.training is not None and result.training["agrees"] is False
        if why is None and is_off and trained_in not in (None, _family(dtype)):
            # What half precision makes of gradients is more than a cast of what float32 makes of them.
            why = f"trained in {trained_in}, replayed in {dtype} (--dtype {trained_in} is as it was trained)"
        if why is None:
            return
        if result.training is not None:
            result.training = {**result.training, "agrees": None, "sentence": f"not judged: {why}"}
        if result.params is not None:
            result.params = {**result.params, "sentence": f"not judged: {why}"}

    def distance(self, result: CellResult) -> tuple[float, float] | None:
        """How far a result is from it in nats, on average and at its worst token."""
        self.hold(result)
        got = result.recorded[0] if result.recorded else None
        return None if got is None or got["mean_abs"] is None else (got["mean_abs"], got["max_abs"])

    def row(self) -> CellResult:
        """Row 0 of a matrix: what the trainer recorded, and the settings it named. Nothing is run for it."""
        cell: dict[str, Any] = {
            "flags": settings_asked(self.run.flags), "effective": None, "outcome": "ran", "error": None, "notes": [],
            "time": None, "memory": None, "dump": str(self.run.path), "final_hidden": None,
            "key": self.micro.key.to_mapping(),
        }  # fmt: skip
        return CellResult(cell, self.run, part="recording", asked=False)

    def judge(self, row: CellResult, baseline: CellResult) -> None:
        """Its own row says how far the baseline is from it."""
        row.recorded = baseline.recorded
        if not row.recorded:
            row.cell["notes"] = ["the record holds no log-probabilities: nothing of the recording can be compared"]
            return
        verdict = row.recorded[0]["verdict"]
        row.agrees = None if verdict is None else verdict in ("SAME", "CLOSE", "PADDING")

    def weigh(self, bench: Bench) -> list[str]:
        """Hold what is further off than float32 rounds to what half precision makes of these very tokens: the baseline
        is run in it once more, beside the answer. What no dtype explains is DIFF; what is beyond the bounds of half
        precision, and no token further off than half precision is here, is CLOSE. Notes on what was and was not judged.
        """
        baseline = bench.baseline
        held = baseline.recorded[0] if baseline.recorded else None
        if held is None or held["name"] == "values" or baseline.run is None:
            return []
        named = settings_asked(self.run.flags).get("dtype")
        ran = baseline.cell["flags"]["dtype"]
        if held["verdict"] != "CLOSE":
            is_half = ran != "float32" or _family(named) not in (None, "float32")
            if held["verdict"] != "DIFF" or not is_half or held["mean_abs"] > _FAR:
                return []
        if held["max_abs"] <= LOGPROB_NOISE_FP32:
            return []
        is_trainers = held["name"] == "policy_logprobs" and ran == "float32" and _family(named) in (None, "float32")
        parts = exact_beside_others(self.values[0], baseline.run, self.micro.batch) if is_trainers else None
        if parts is not None and held["verdict"] == "CLOSE":
            exact, apart = parts
            reason = (
                f"{exact} tokens are exactly what each row alone computes in float32, and {apart} are not, by "
                f"{held['max_abs']:.3g} nats at most: no half precision, which moves them all"
            )
            baseline.recorded = [{**held, "verdict": "DIFF", "reason": reason}, *baseline.recorded[1:]]
            return []
        if ran == "float32" and _family(named) == "float32":
            return self._weigh_float32(bench, held)
        other = "float32" if ran != "float32" else _family(named) or "bfloat16"
        far = (
            f"recorded {held['field']} is up to {held['max_abs']:.3g} nats from each row alone, on average "
            f"{held['mean_abs']:.3g}: more than float32 rounds ({LOGPROB_NOISE_FP32:g})"
        )
        rounded = bench.in_dtype(baseline, other)
        if rounded.run is None:
            why = rounded.cell["error"]["message"]
            return [f"{far}. Whether {other} explains it was not judged: it did not run ({why})"]
        noise = Explained.of(self.values[0], baseline.run, rounded.run, self.micro.batch)
        halved = self._half_of(bench, rounded) if is_trainers and named is None else None
        if halved is not None:
            reason = f"{held['max_abs']:.3g} nats off at most: to the last bit it is {halved}, all else in float32"
            baseline.recorded = [{**held, "verdict": "DIFF", "reason": reason}, *baseline.recorded[1:]]
            return []
        if held["verdict"] == "DIFF":
            if noise.explains_all:
                reason = (
                    f"{held['max_abs']:.3g} nats off at most, where {ran} and {other} are up to {noise.most:.3g} apart"
                )
                baseline.recorded = [{**held, "verdict": "CLOSE", "reason": reason}, *baseline.recorded[1:]]
            return []
        limit = f"{ran} and {other} are up to {noise.most:.3g} apart on these tokens, on average {noise.mean:.3g}"
        if noise.explains:
            return [f"{far}, no more than {_coarser(ran, other)} explains: {limit}"] if named is None else []
        off = f"{held['max_abs']:.3g} nats off at most, {held['mean_abs']:.3g} on average"
        reason = f"{off}, which no dtype explains: {limit}"
        baseline.recorded = [{**held, "verdict": "DIFF", "reason": reason}, *baseline.recorded[1:]]
        return []

    def _half_of(self, bench: Bench, rounded: CellResult) -> str | None:
        """Which forward in float32 gives it bit for bit whose log-softmax, or head, is taken in bfloat16, where a
        forward in half precision (`rounded`) does not give it as well.
        """
        value = self.values[0]
        if not value.is_rounded or value.known_BS.sum() < _FEWEST_TOLD or rounded.run is None:
            return None
        batch = self.micro.batch
        slots = batch.layout().slots("next")
        known_N, values_N = (one.reshape(-1)[slots] for one in (value.known_BS, value.values_BS))
        unlike_N = (values_N != half_of(replayed_N(rounded.run, batch)))[known_N]
        if unlike_N.sum() < _FEWEST_UNLIKE or unlike_N.mean() < 1 - _UNLIKE:
            return None
        for mistake in halves(bench):
            again = bench.beside(mistake.flags, mistake.name)
            if again.run is not None and (values_N == replayed_N(again.run, batch))[known_N].mean() >= _ALIKE:
                return mistake.said
        return None

    def _weigh_float32(self, bench: Bench, held: dict[str, Any]) -> list[str]:
        """Where the dump says float32 and that no matrix product was rounded to TF32, there is no half precision to be
        just to: the recording is held to how far float32 is from float64 on these very tokens. An engine's is not.
        """
        baseline = bench.baseline
        is_fine = self.run.facts.get("tf32_matmul") is False and not self.values[0].is_rounded
        if baseline.run is None or held["name"] != "policy_logprobs" or not is_fine:
            return []
        finer = bench.in_dtype(baseline, "float64")
        if finer.run is None:
            return []
        noise = Explained.of(self.values[0], baseline.run, finer.run, self.micro.batch)
        others = [cell.recorded[0]["mean_abs"] for cell in bench.results if cell.recorded]
        nearest = min(mean for mean in (held["mean_abs"], *others) if mean is not None)
        rounds = max(noise.mean, EPS["float32"])
        if nearest <= _BEYOND_FLOAT32 * rounds:
            return []
        reason = (
            f"{held['max_abs']:.3g} nats off at most, {held['mean_abs']:.3g} on average, {nearest / rounds:,.0f} times "
            f"what float32, which the dump names, rounds on these tokens ({rounds:.2g}): an autocast that is not "
            "named, or other weights or maths"
        )
        baseline.recorded = [{**held, "verdict": "DIFF", "reason": reason}, *baseline.recorded[1:]]
        return []

    def stated(self, results: Sequence[CellResult]) -> dict[str, Any] | None:
        """What was recorded, and which cell comes nearest to it; none does where the weights are others."""
        if not self.values:
            return None
        near = [
            (result.recorded[0]["mean_abs"], number)
            for number, result in enumerate(results)
            if result.part != "recording" and result.recorded and result.recorded[0]["mean_abs"] is not None
        ]
        distance, nearest = min(near) if near and self.stranger is None else (None, None)
        return {
            "values": [
                {"name": value.name, "field": value.field, "key": value.key.to_mapping()} for value in self.values
            ],
            "judged_by": self.values[0].name,
            "nearest_cell": nearest,
            "mean_abs": distance,
        }


def answer(
    plan: ReplayPlan,
    request: ReplayRequest,
    run: Run,
    runner: Runner,
    on_event: OnEvent = ignore,
    on_cell: OnCell = lambda _result: None,
    kept: Kept | None = None,
) -> Replayed:
    """Run everything a request asks for of the recorded `run`, into the plan's `out`.

    Args:
        on_cell: hears of every cell as soon as it is judged.
        kept: what earlier requests ran beside what they asked for (`kept.KEPT` in a warm child).

    Raises:
        RldbgError: the request itself is wrong (no such record, no such model): no cell can run.
    """
    if isinstance(plan.loss, str):
        plan = replace(plan, loss=Loss.parse(plan.loss))
    # compile_s of a matrix is a first time, unless its cells share a child.
    plan = replace(plan, cold_compile=request.matrix is not None and not request.is_warm)
    micro = read_batch(run, plan)
    if plan.role is None and micro.key.role == "critic":
        # Nothing but a critic's records there: log-probabilities would be held to its values.
        plan = replace(plan, role=micro.key.role)
    if not request.models:
        resolve(plan, run)  # weights that are not there: said before any child has started
    values, notes = read_recorded(run, plan, micro)
    if not values:
        notes = [*notes, NOTHING_RECORDED]
    stranger = _stranger(run, plan)
    if values and stranger is not None:
        notes = [*notes, f"recorded {values[0].field} is not held to the replay: {stranger}"]
    recording = _Recording(run, micro, values, stranger)

    def judged(result: CellResult) -> None:
        recording.hold(result)
        on_cell(result)

    bench = Bench(plan, run, Path(plan.out), runner, on_event, judged, kept, _settings(run, plan), why=request.why)
    bench.expected = int(request.twice)
    replayed = Replayed(bench.results, notes=notes, is_warm=request.is_warm, role=plan.role)
    if request.models:
        _rank(bench, request, micro, values, replayed)
        return replayed
    if request.matrix is not None:
        # An axis that cannot be read must not cost a cell first.
        bench.expected += plan.forward is not None
        replayed.axes = Axes.parse(request.matrix)
        bench.results.append(recording.row())
        replayed.baseline = 1
        bench.plan = replace(plan, forward=None)
        run_axes(bench, replayed.axes, micro.batch.rows)
        if plan.forward is not None:
            bench.run(plan.flags, "cell", forward=plan.forward)
        bench.explain_rest()
        replayed.breaking, replayed.failing = breaking(bench.results), failing(bench.results)
        replayed.notes += recording.weigh(bench)
        recording.judge(bench.results[0], bench.baseline)
    else:
        cells = cells_for(plan.flags, bench.settings)
        bench.expected += len(cells) + (plan.forward is not None)
        if request.why and plan.forward is None and _is_large(plan, run, micro):
            (reference, _), *_, (asked, part) = cells
            if part == "cell":
                bench.look_ahead(asked, reference, len(cells) - 1)
        for flags, part in cells:
            mine = part == "cell" and plan.forward is not None
            bench.run(flags, "control" if mine else part, forward=None)
        if plan.forward is not None:
            bench.run(plan.flags, "cell")
        bench.explain_rest()
        replayed.notes += recording.weigh(bench)
    replayed.notes += _explain_forward(bench, recording, why=request.why)
    replayed.notes += _explain_recording(bench, recording, why=request.why)
    replayed.recording = recording.stated(bench.results)
    replayed.floors = floors(bench.results)
    if request.twice:
        replayed.determinism = bench.repeat(bench.results[-1])
    return replayed


def _is_large(plan: ReplayPlan, run: Run, micro: RecordedBatch) -> bool:
    return ahead.is_large(ahead.parameters_in(resolve(plan, run)[0]), micro.batch.ids_BS.size)


def _explain_recording(bench: Bench, recording: _Recording, *, why: bool) -> list[str]:
    """Say of a recording that no cell comes near why, where nothing is wrong with any of them. Notes on what was not
    asked.
    """
    baseline = bench.baseline
    held = baseline.recorded[0] if baseline.recorded else None
    if held is None or held["verdict"] != "DIFF" or held["mean_abs"] is None:
        return []
    others = [result.recorded[0]["mean_abs"] for result in bench.results if result.recorded]
    is_near = any(mean is not None and mean < held["mean_abs"] / 2 for mean in others)
    if is_near or not all(result.cause is None or result.cause["is_noise"] for result in bench.results):
        return []
    micro = recording.micro
    is_trainers = held["name"] not in ("values", AGAINST) and bench.plan.forward is None and micro.rows is None
    if is_trainers and _is_large(bench.plan, recording.run, micro) and not why:
        return ["what the trainer may have computed in its place was not tried with so large a model: --why tries it"]
    if is_trainers:
        baseline.cause = explain(
            bench, held, recording.distance, recording.run, micro.batch, was_packed=_is_pack(micro),
            is_rounded=recording.values[0].is_rounded,
        )  # fmt: skip
    elif why:
        baseline.cause = cause_of_recording(held)
    return []


def _explain_forward(bench: Bench, recording: _Recording, *, why: bool) -> list[str]:
    """Say why the trainer's own forward is not what each row alone gives, where the library's own batch is right. Notes
    on what was not asked.
    """
    own = [one for one in bench.results if one.cell.get("forward") and one.part in ("cell", "control")]
    notes = [note for one in own for note in _explain_own(bench, recording, one, why=why)]
    return [*notes, *_explain_whole(bench, recording, why=why)]


def _explain_whole(bench: Bench, recording: _Recording, *, why: bool) -> list[str]:
    """Whether each row alone, of a model that is called whole and whose modules nobody watches, is right itself: no
    token sees the future or is deaf to its own past. Notes on what was not asked.
    """
    baseline = bench.baseline
    if baseline.run is None or baseline.cell.get("forward") != ITSELF or baseline.cause is not None:
        return []
    is_large = _is_large(bench.plan, recording.run, recording.micro) and not why
    shown = None if is_large else bench.own_shown(baseline, 0.0)
    if shown is None:
        return ["whether each row alone is right itself was not asked of this model, which is called whole"
                + (": --why asks" if is_large else "")]  # fmt: skip
    wrong = [one for one in shown if one["kind"] in _OF_ONE_ROW]
    if wrong:
        baseline.cause, baseline.agrees = cause_of_own_forward(wrong), False
    return []


def _explain_own(bench: Bench, recording: _Recording, own: CellResult, *, why: bool) -> list[str]:
    micro, baseline = recording.micro, bench.baseline
    if own.run is None or own.cause is not None or own.agreement is None or baseline.run is None:
        return []
    own_N = replayed_N(own.run, micro.batch)
    is_large = _is_large(bench.plan, recording.run, micro) and not why
    if not own_N.size:
        return []

    def distance(result: CellResult) -> tuple[float, float]:
        assert result.run is not None
        off_N = np.abs(replayed_N(result.run, micro.batch) - own_N)
        return float(off_N.mean()), float(off_N.max())

    mean, most = distance(baseline)
    held = {"mean_abs": mean, "max_abs": most}
    if not np.isfinite(mean):
        return []
    is_half = baseline.cell["flags"]["dtype"] != "float32"
    if not own.agreement and is_half and not is_large and (limit := _explained(bench, own_N, micro.batch)) is not None:
        own.cause = rounded_forward(held, limit)
    if own.cause is not None or mean <= LOGPROB_NOISE_FP32:
        if not is_large:
            _explain_by_calls(bench, own, mean)
        return []
    if own.agreement:
        if is_large and is_half:
            return [
                f"its forward is {mean:.3g} nats off each row alone on average, within the bounds of half precision; "
                "how far that moves these very tokens was not asked of so large a model: --why asks"
            ]
        if is_large:
            return []
        if not is_half or not _is_past_rounding(bench, own_N, micro.batch):
            _explain_by_calls(bench, own, mean)
            return []
        own.cause = cause_of_recording(held)
    others = (one for one in bench.results if not one.cell.get("forward"))
    if micro.rows is not None or is_large or any(one.agreement is False for one in others):
        return []
    shown = bench.own_shown(own, mean)
    if shown and all(one["kind"] in _OF_NO_MISTAKE for one in shown):
        own.cause = cause_of_own_forward(shown)
        return []
    own.cause = explain(
        bench, held, distance, recording.run, micro.batch, was_packed=_is_pack(micro),
        is_rounded=bool((half_of(own_N) == own_N).all()), is_itself=own.cell["forward"] == ITSELF,
    )  # fmt: skip
    if own.cause["kind"] != "maths":
        return []
    # What other rows cut off is deaf as well.
    is_seen = any(one["kind"] != "own_keys" for one in shown or ())
    if not is_seen and not _is_pack(micro) and micro.batch.rows > 1:
        own.cause = by_rows_alone(bench, own, own.cause, micro.batch, is_unseen=shown is not None)
    if shown and own.cause["kind"] == "maths":
        own.cause = cause_of_own_forward(shown)
    return []


def _explain_by_calls(bench: Bench, own: CellResult, mean: float) -> None:
    """Of the trainer's own forward that is right in a process of its own (`mean` nats off), while what was recorded is
    not: whether it gives something else after another call, or under another seed.
    """
    held = own.recorded[0] if own.recorded else None
    if held is None or held["verdict"] != "DIFF":
        return
    shown = bench.own_shown(own, mean)
    if shown and shown[0]["kind"] in _OF_CALLS:
        own.cause = cause_of_own_forward(shown)


def _noise_of(bench: Bench, own_N: np.ndarray[Any, Any], batch: MicroBatch) -> tuple[Explained, float] | None:
    """How far half precision moves the tokens of the trainer's own forward, and how far that is off on average of the
    nearer of it and float32; None where float32 does not run.
    """
    baseline = bench.baseline
    finer = bench.in_dtype(baseline, "float32")
    if baseline.run is None or finer.run is None:
        return None
    alone_N, finer_N = (replayed_N(run, batch) for run in (baseline.run, finer.run))
    mean = min(float(np.abs(own_N - one_N).mean()) for one_N in (alone_N, finer_N))
    return Explained.of_tokens(own_N, alone_N, finer_N), mean


def _explained(bench: Bench, own_N: np.ndarray[Any, Any], batch: MicroBatch) -> Explained | None:
    """How far half precision moves these tokens, where that explains every one that is past its bounds."""
    found = _noise_of(bench, own_N, batch)
    return found[0] if found is not None and found[0].explains_all else None


def _is_past_rounding(bench: Bench, own_N: np.ndarray[Any, Any], batch: MicroBatch) -> bool:
    """Whether log-probabilities within the bounds of half precision are off by more on average than it moves the worst
    of these tokens. Of few tokens none is the worst, and a mixture sends one elsewhere, whole nats away.
    """
    found = _noise_of(bench, own_N, batch) if own_N.size >= _FEWEST_TOLD else None
    return found is not None and not found[0].explains and found[1] > found[0].most


def _is_pack(micro: RecordedBatch) -> bool:
    return micro.samples.packs is not None


def _settings(run: Run, plan: ReplayPlan) -> dict[str, Any]:
    """The settings that the dump names, but for a kernel that this machine lacks: nothing could be held to it."""
    said = settings_known(run.flags)
    return {name: value for name, value in said.items() if not unavailable(name, value, plan.flags.to_mapping())}


def _family(dtype: Any) -> str | None:
    """The flag's name of a dtype that a dump names in words of its own; None where it is none of them."""
    said = named(str(dtype).removeprefix("torch.")) if dtype is not None else ""
    return said if FLAGS["dtype"].takes(said) else None


def _coarser(*dtypes: str) -> str:
    return next((one for one in dtypes if one != "float32"), "float32")


def _stranger(run: Run, plan: ReplayPlan) -> str | None:
    if not plan.model.startswith(RANDOM) or plan.model in run.models.values():
        return None
    return f"{plan.model} has other weights than computed it, so how far they are apart says nothing"


def _rank(
    bench: Bench, request: ReplayRequest, recorded: RecordedBatch, values: Sequence[RecordedTokens], replayed: Replayed
) -> None:
    """Which weights sampled these tokens: each model's rows alone against the recorded log-probabilities."""
    known = {value.name: value for value in values}
    name = request.against or next((one for one in (AGAINST, *known) if one in known), None)
    if name is None or name not in known:
        raise RequestError(
            "the record holds no such log-probabilities to rank the models by",
            expected=", ".join(known) or "rollout_logprobs, old_logprobs or ref_logprobs in the record",
            found=name or "a record without any",
        )
    rows = []
    bench.expected = len(request.models)
    for number, model in enumerate(request.models):
        result = bench.run(
            bench.plan.flags.reference(bench.settings), "reference" if number == 0 else "model", model=model
        )
        if result.run is None:
            continue
        dtype = result.cell["flags"]["dtype"]
        result.recorded = [against(known[name], result.run, recorded.batch, run_dtype=dtype, known_fp32=False)]
        figures = result.recorded[0]
        rows.append({"cell": number, "model": model, **{part: figures[part] for part in ("mean_abs", "max_abs", "k3")}})
    rows.sort(key=lambda row: (row["mean_abs"] is None, row["mean_abs"]))
    replayed.ranking = {"against": name, "models": rows}
