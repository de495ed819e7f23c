"""Runs the cells of a replay through a Runner and holds each against the reference: every row alone.

No torch here: cells run in children, their dumps are compared like any two dumps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field
from msgspec.structs import replace

from replay_core import naming
from replay_core.compare import Comparison, TensorVerdict, compare_runs
from replay_core.compare.judging.limits import WORST_ROW
from replay_core.compare.judging.verdict import Verdict
from replay_core.dtypes import DTYPES, coarsest
from replay_core.dumps import open_run
from replay_core.errors import (
    ChildDiedError,
    ChildHungError,
    DumpError,
    JobCancelledError,
    RequestError,
    RldbgError,
    UnavailableError,
)
from replay_core.jobs import Event, Job, LogLine, OnEvent, Partial, Progress, Runner, ignore, in_part
from replay_core.records import Run
from replay_core.replay import ahead, frontier, stages
from replay_core.replay.axes import Axes, smallest
from replay_core.replay.causes import (
    broken_samples,
    cause_of,
    cause_of_gradients,
    cause_of_own_forward,
    cause_of_reference,
    is_compilers,
)
from replay_core.replay.cell_log import LOGS, CellLog
from replay_core.replay.flags import Flags
from replay_core.replay.frontier import Hashed
from replay_core.replay.gradient_noise import HeldGradient, of_gradients, of_the_cell
from replay_core.replay.kept import Kept, identity_of
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.segments import segments
from replay_core.replay.twins import ran_alike, twin

if TYPE_CHECKING:
    from replay_core.documents.comparison import SegmentEntry


class CellResult(Struct):
    """One cell: what it did, and how it stands to the baseline (None for the baseline itself, or if it did not run).

    part: reference | cell | control (the padded batch beside a packed cell: ours, not asked for) | model |
        recording (row 0 of a matrix: what the trainer wrote down, nothing was run).
    """

    cell: dict[str, Any]
    run: Run | None = None
    comparison: Comparison | None = None
    segments: list[SegmentEntry] | None = None
    asked: bool = True
    part: str = "cell"
    #: Why it disagrees, or seems to (`causes.cause_of`).
    cause: dict[str, Any] | None = None
    #: Axes on which it leaves the baseline.
    toggles: dict[str, Any] | None = None
    #: Number of an earlier cell that ran the very same kernels and settings.
    same_as: int | None = None
    #: How it stands to what the trainer recorded, a mapping per recorded name.
    recorded: list[dict[str, Any]] = field(default_factory=list)
    #: How a backward replay stands to the recorded losses and gradients.
    training: dict[str, Any] | None = None
    #: How the weights after its optimizer step stand to the recorded ones.
    params: dict[str, Any] | None = None
    #: Digests of its module tensors, where those were taken in place of the tensors.
    hashes: list[Hashed] | None = None
    #: A verdict that comes from elsewhere than a comparison (the recording's own row).
    agrees: bool | None = None
    #: The dump that it was held to.
    held_to: Run | None = None

    @property
    def agreement(self) -> bool | None:
        """Whether it agrees with the baseline: no first divergence and no sample off, or these are noise of its dtype;
        None if nothing was compared.
        """
        if self.comparison is None:
            return self.agrees
        if self.is_noise:
            return True
        if self.comparison.agrees is False or self.off:
            return False
        if self.cell.get("forward"):
            # The trainer's own code has no modules to capture: what it did say was compared, and asked about.
            return self.cause is None
        return self.comparison.agrees

    @property
    def is_noise(self) -> bool:
        """Whether it seemed to disagree and is only rounded otherwise."""
        return self.cause is not None and bool(self.cause["is_noise"])

    @property
    def off(self) -> list[int]:
        """Samples whose worst token is past the limit of the coarsest dtype involved; of a cell that disagrees and was
        asked why, past what rounding leaves of each row alone.
        """
        past = broken_samples(self.segments or [], limit_of(self.cell))
        is_apart = bool(past) or (self.comparison is not None and self.comparison.agrees is False)
        if is_apart and self.cause is not None and not self.is_noise:
            return list(self.cause["off"])
        return past


OnCell = Callable[[CellResult], None]

#: Kernels that take float64 on every device.
_OF_ANY_DTYPE = ("eager", "sdpa", "sdpa-math")
#: The dtype that tells how far gradients of another are rounded.
_FINER = {"bfloat16": "float32", "float16": "float32", "float32": "float64"}


def _is_one_fault(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two cells that do not run fail alike, so that one of them tells the stage of both."""
    return bool(a["flags"]["compile"] == b["flags"]["compile"] and a["error"]["message"] == b["error"]["message"])


def _level(result: CellResult) -> str | None:
    """How much of its modules a cell kept: none, full or hash; None where it has no modules or did not run."""
    return (result.cell.get("capture") or {}).get("level")


def limit_of(cell: dict[str, Any]) -> float:
    """How far a worst token of a cell may be off: relative L2 of the final hidden state."""
    return WORST_ROW["end-to-end"][coarsest(cell["flags"]["dtype"])]


def cells_for(flags: Flags, recorded: Mapping[str, Any] | None = None) -> list[tuple[Flags, str]]:
    """The settings to run for a request, baseline first, each with its part in the answer.

    The reference is every row alone, in the kernel that was recorded. The padded batch is always beside it, so that a
    wrong padded batch is named as readily as a wrong pack.
    """
    reference = flags.reference(recorded)
    control = replace(reference, rows_per_forward=None if flags.is_reference else flags.rows_per_forward)
    wanted = [(reference, "reference"), (control, "control"), (flags, "cell")]
    seen: list[tuple[Flags, str]] = []
    for setting, part in wanted:
        known = next((number for number, (other, _) in enumerate(seen) if other == setting), None)
        if known is None:
            seen.append((setting, part))
        elif part == "cell":
            seen[known] = (setting, "reference" if known == 0 else "cell")
    return seen


class Bench:
    """Runs cells one after the other and keeps their dumps and logs apart under one directory.

    Args:
        run: the recorded dump; settings: those it names, for the reference.
        on_cell: hears of every cell as soon as it is judged.
        why: ask every cell why, also where it agrees.
        kept: the references and controls of earlier requests; None keeps those of this one.
    """

    def __init__(
        self,
        plan: ReplayPlan,
        run: Run,
        out: Path,
        runner: Runner,
        on_event: OnEvent = ignore,
        on_cell: OnCell = lambda _result: None,
        kept: Kept | None = None,
        settings: Mapping[str, Any] | None = None,
        *,
        why: bool = False,
    ) -> None:
        self.plan, self.out, self.runner, self.on_event, self.on_cell = plan, out, runner, on_event, on_cell
        self.recorded, self.settings, self.why = run, settings, why
        self.results: list[CellResult] = []
        #: Cells that are to run, as far as that is known ahead.
        self.expected = 0
        self._begun = 0
        self._kept = Kept() if kept is None else kept
        self._windows = count(1)
        #: Evidence that was there before any cell had run, of these flags.
        self._ahead: tuple[Flags, dict[str, Any]] | None = None
        #: Cells that agree, and are asked why all the same when everything has run.
        self._later: list[tuple[CellResult, ReplayPlan]] = []

    @property
    def baseline(self) -> CellResult:
        return next(result for result in self.results if result.part == "reference")

    def run(self, flags: Flags, part: str, **changes: Any) -> CellResult:
        """Run one cell, compare it with the baseline, and add it to the results.

        Raises:
            RldbgError: the request itself is wrong (no such record, no such model): no cell can run.
        """
        number = len(self.results)
        self._begun += 1
        self._tell(Progress(0, None, flags.label()))
        plan = replace(self.plan.with_flags(flags, str(self.out / f"cell{number}")), **changes)
        if part in ("control", "cell") and plan.forward is None and self.baseline.run is None:
            return self._held_to_nothing(plan, part)
        # What was asked for is run, whatever was asked before; what stands beside it only where it never was.
        result = self._once(plan) if part in ("reference", "control") else self._run(plan)
        result.part, result.asked = part, part != "control"
        if result.cell["outcome"] in ("failed", "crashed"):
            self._stages(result, plan)
        self.results.append(result)
        if part == "reference" and _level(result) == "hash":
            # A narrower dtype might fit, and would then have nothing to be held to.
            self.plan = replace(self.plan, capture_level="hash")
        if part == "reference":
            result.cause = cause_of_reference(result.cell.get("itself"))
            result.agrees = False if result.cause else None
        elif part != "model":
            self._judge(result, plan)
        self.on_cell(result)
        return result

    def _held_to_nothing(self, plan: ReplayPlan, part: str) -> CellResult:
        """A cell whose reference did not run: what stopped that (a crash, a hang) is not paid again."""
        error = self.baseline.cell["error"]
        refused = UnavailableError(
            f"not run: each row alone, to which it would be held, did not run: {error['message']}", hint=error["hint"]
        )
        result = CellResult(_unfinished(plan, "unavailable", refused, Path(self.baseline.cell["log"])))
        result.part, result.asked = part, part != "control"
        self.results.append(result)
        self.on_cell(result)
        return result

    def _stages(self, result: CellResult, plan: ReplayPlan) -> None:
        """Which stage of the compiler a cell that does not run fails in; nothing where it was not compiled, or hung."""
        flags, error = Flags.from_mapping(result.cell["flags"]), result.cell["error"]
        same = next(
            (one for one in self.results if one.cell.get("stages") and _is_one_fault(one.cell, result.cell)), None
        )
        if same is not None:
            result.cell["stages"] = {**same.cell["stages"], "as_cell": self.results.index(same)}
            return
        tried: list[dict[str, Any]] = []
        for backend in () if error["type"] == ChildHungError.__name__ else stages.below(flags.compile):
            self._tell(Progress(0, None, f"{flags.compile} failed: with {backend}"))
            less = plan.with_flags(replace(flags, compile=backend), f"{plan.out}_{backend}")
            tried.append(stages.trial(backend, self._run(replace(less, capture="none")).cell))
            if tried[-1]["outcome"] == "ran":
                break
        if tried or flags.compile == "dynamo":
            said = stages.sentence(flags.compile, tried)
            result.cell["stages"] = {"sentence": said, "trials": tried, "as_cell": None}
        if result.cell["outcome"] == "failed" and flags.compile == "inductor" and stages.is_cleared("aot_eager", tried):
            self._blame(result, plan)

    def _wrongly_compiled(self, result: CellResult, plan: ReplayPlan) -> None:
        """Of a cell that is each row alone until it is compiled: which pass of inductor makes it another."""
        known = (number for number, one in enumerate(self.results) if "blamed" in (one.cell.get("stages") or {}))
        number = next(known, None)
        if number is not None:
            said = f"its compiler was not asked which pass it is: that of cell {number} was"
            result.cell["stages"] = {"sentence": said, "trials": [], "as_cell": number}
            return
        result.cell["stages"] = {"sentence": "uncompiled it is right", "trials": [], "as_cell": None}
        self._blame(result, plan)

    def _blame(self, result: CellResult, plan: ReplayPlan) -> None:
        params = {"plan": replace(plan, backward=False, micros=None, optimizer=None).to_mapping()}
        try:
            result.cell["stages"]["blamed"] = self._job("blame", plan, params)
        except JobCancelledError:
            raise
        except RldbgError as error:
            result.cell["notes"].append(f"which pass of inductor it is could not be asked: {error.message}")

    def take_over(self, flags: Flags, number: int) -> CellResult:
        """The answer of cell `number` for other flags that run the very same: nothing is run for them."""
        known = self.results[number]
        note = f"not run: {flags.label()} is what cell {number} ran ({known.cell['flags']['attention']})"
        cell = {**known.cell, "flags": flags.to_mapping(), "time": None, "memory": None, "notes": [note]}
        if flags.attention == "flash":
            cell["notes"].append("flash is torch's own flash kernel here: the flash-attention packages need CUDA")
        result = replace(known, cell=cell, same_as=number)
        self.results.append(result)
        self._begun += 1
        self.on_cell(result)
        return result

    def _tell(self, event: Event) -> None:
        """What a cell says of itself is said of its part of the whole."""
        in_part(self.on_event, self._begun - 1, max(self.expected, self._begun))(event)

    def _judge(self, result: CellResult, plan: ReplayPlan) -> None:
        baseline = self.baseline
        if baseline.run is None or result.run is None or result.held_to is baseline.run:
            return
        result.held_to = baseline.run
        result.comparison = compare_runs(baseline.run, result.run)
        result.segments = segments(baseline.run, result.run, result.cell["final_hidden"])
        if _level(result) == "hash":
            self._look_closer(result, plan)
        if result.cell.get("forward"):
            return
        if result.agreement is False:
            self._explain(result, plan)
        elif self.why:
            self._later.append((result, plan))

    def look_ahead(self, flags: Flags, reference: Flags, number: int) -> None:
        """Ask of a few rows of a large model's batch whether and why these flags differ, before any cell has run;
        `number`: the cell that will have them.
        """
        plan = self._asking_plan(self.plan.with_flags(flags, str(self.out / f"cell{number}_ahead")))
        params = {
            "plan": plan.to_mapping(), "reference": reference.to_mapping(), "dumps": {}, "final_hidden": "",
            "always": True, "is_ahead": True,
        }  # fmt: skip
        self._begun += 1
        try:
            found = self._job("why", plan, params, number)
        except JobCancelledError:
            raise
        except RldbgError:
            return  # the cell itself says what cannot run
        finally:
            self._begun -= 1
        self._ahead = (flags, found) if found else None

    def explain_rest(self) -> None:
        """Ask why of the cells that agree, when those that do not have their answer."""
        for result, plan in self._later:
            self._explain(result, plan)
        self._later.clear()
        for result in self.results:
            if result.same_as is not None and result.cause is None:
                result.cause = self.results[result.same_as].cause

    def _explain(self, result: CellResult, plan: ReplayPlan) -> None:
        result.cause = self._cause_of_training(result, plan) if plan.backward else self._cause(result, plan)
        if result.cause is not None and is_compilers(result.cause) and plan.flags.compile == "inductor":
            self._wrongly_compiled(result, plan)

    @staticmethod
    def _asking_plan(plan: ReplayPlan) -> ReplayPlan:
        return replace(plan, backward=False, micros=None, optimizer=None)

    def _known_ahead(self, result: CellResult) -> dict[str, Any] | None:
        """The evidence of before any cell had run, where it is about what is most off now."""
        flags, evidence = self._ahead or (None, {})
        baseline, looked = self.baseline.run, evidence.get("looked_at")
        if baseline is None or result.run is None or not looked or flags != Flags.from_mapping(result.cell["flags"]):
            return None
        name = result.cell["final_hidden"]
        return evidence if ahead.is_shown(baseline, result.run, name, looked["rows"], looked["tokens"]) else None

    def _look_closer(self, result: CellResult, plan: ReplayPlan) -> None:
        """After digests of everything: the tensors themselves from the first differing one on, a window at a time.

        One window where the final hidden states agree; further ones only until the divergence is found.
        """
        parting = frontier.part(self._baseline_hashes(), result.hashes)
        told = parting.to_mapping()
        said = result.cell["capture"] = {**result.cell["capture"], "hashes": told}
        if not parting.order or not self._baseline_hashes():
            result.cell["notes"].append("no module tensor could be hashed: only the final hidden states were compared")
        if parting.start is None:
            return
        looked: list[str] = []
        room = int(said["room_mib"] * frontier.WINDOW * 2**20)
        for number, modules in enumerate(frontier.windows(parting.order, parting.start, room), start=1):
            pattern = frontier.exactly(modules)
            near = replace(plan, capture=pattern, capture_level="full", out=f"{plan.out}_window{number}")
            baseline = self._baseline_window(pattern)
            closer = self._run(near)
            if baseline.run is None or closer.run is None:
                error = (closer if closer.run is None else baseline).cell["error"]
                result.cell["notes"].append(
                    f"the modules around {parting.start} could not be captured: {error['message']}"
                )
                break
            result.run, result.comparison = closer.run, compare_runs(baseline.run, closer.run)
            looked += modules
            result.cell["dump"] = closer.cell["dump"]
            said["mib"] = closer.cell["capture"]["mib"]
            told |= {"windows": number, "baseline_dump": baseline.cell["dump"]}
            first = result.comparison.first
            if not result.off or (first is not None and frontier.module_of(first.name) in looked):
                break
        told |= parting.seen_in_full(looked)
        if told["not_in_full"]:
            result.cell["notes"].append(
                f"{told['not_in_full']} module tensors that are not bitwise the baseline's were not compared in full"
            )

    def _baseline_hashes(self) -> list[Hashed]:
        baseline = self.baseline
        if baseline.hashes is None:
            plan = self._baseline_plan(capture=self.plan.capture, capture_level="hash", name="hashed")
            baseline.hashes = self._once(plan).hashes or []
        return baseline.hashes

    def _baseline_window(self, pattern: str) -> CellResult:
        name = f"window{next(self._windows)}"
        return self._once(self._baseline_plan(capture=pattern, capture_level="full", name=name))

    def _baseline_plan(self, *, capture: str | None, capture_level: str, name: str) -> ReplayPlan:
        number = self.results.index(self.baseline)
        flags = Flags.from_mapping(self.baseline.cell["flags"])
        plan = self.plan.with_flags(flags, str(self.out / f"cell{number}_{name}"))
        return replace(plan, capture=capture, capture_level=capture_level, forward=None)

    def _cause_of_training(self, result: CellResult, plan: ReplayPlan) -> dict[str, Any] | None:
        """Why a backward replay disagrees: it is rounding where its forward is, and where every loss and gradient that
        differs is no further from that of each row alone in a finer dtype than each row alone is.
        """
        rows = [row for row in result.comparison.tensors if row.verdict.diverges] if result.comparison else []
        behind = [row for row in rows if naming.meaning(row.name).kind in ("gradient", "loss")]
        found = self._rounded(behind, result) if behind else []
        is_rounding = found is not None and all(one.is_rounding for one in found)
        if found and is_rounding and len(behind) == len(rows) and not result.off:
            return cause_of_gradients(found, str(self._finer))
        cause = self._cause(result, plan)
        if cause is None:
            return None
        if found and not is_rounding and cause["kind"] == "rounding":
            told = cause_of_gradients([one for one in found if not one.is_rounding], str(self._finer))
            return {**cause, "kind": told["kind"], "is_noise": False, "sentence": told["sentence"]}
        # Of gradients that could not be asked, and of weights after a step, the forward says nothing.
        is_updated = any(naming.meaning(row.name).kind == "param" for row in rows)
        return cause if is_rounding and not is_updated else {**cause, "is_noise": False}

    @property
    def _finer(self) -> str | None:
        return _FINER.get(self.baseline.cell["flags"]["dtype"])

    def _rounded(self, rows: Sequence[TensorVerdict], result: CellResult) -> list[HeldGradient] | None:
        """How far these losses and gradients are from those in a finer dtype; None where that cannot be had."""
        if self._finer is None or any(row.verdict is not Verdict.DIFF for row in rows):
            return None
        truth = self.in_dtype(self.baseline, self._finer, backward=True)
        if truth.run is None or self.baseline.run is None or result.run is None:
            return None
        try:
            names = [row.name for row in rows]
            found = of_gradients(truth.run, self.baseline.run, result.run, names, half=self._finer == "float32")
            may_be = [one for one in found if one.may_be_rounding]
            if may_be and all(one.is_rounding or one.may_be_rounding for one in found):
                finer = self.in_dtype(result, self._finer, backward=True)
                if finer.run is not None:
                    of_the_cell(truth.run, finer.run, may_be, half=self._finer == "float32")
        except DumpError:
            return None  # what cannot be read is said where it is read
        return found

    def _cause(self, result: CellResult, plan: ReplayPlan) -> dict[str, Any] | None:
        """Why it disagrees: asked of the model itself, in a job of its own."""
        baseline, evidence, failure = self.baseline, None, None
        assert baseline.run is not None
        params = {
            "plan": self._asking_plan(plan).to_mapping(),
            "reference": baseline.cell["flags"],
            "dumps": {"reference": baseline.cell["dump"], "cell": result.cell["dump"]},
            "final_hidden": result.cell["final_hidden"],
            "always": self.why,
            "is_agreeing": result.agreement is True,
        }
        try:
            number = self._number_of(result)
            evidence = self._known_ahead(result) or self._job("why", plan, params, number)
        except JobCancelledError:
            raise
        except RldbgError as error:
            failure = error.message
        if self.why and baseline.cause is None:
            # All of a batch shows more than the one row by which the reference was asked when it ran.
            baseline.cause = cause_of_reference(evidence)
            baseline.agrees = False if baseline.cause else None
        flags = result.cell["flags"]
        return cause_of(
            evidence,
            result.segments or [],
            limit_of(result.cell),
            result.cell.get("inputs") or [],
            epsilon=DTYPES[flags["dtype"]].eps or 0.0,
            noise=self._noise(flags["dtype"]),
            not_finite=result.cell.get("not_finite"),
            compiled=flags["compile"] != "off",
            failure=failure,
        )

    def _noise(self, dtype: str) -> float | None:
        """How far the worst token of the padded batch is off that stands beside a cell of that dtype and agrees."""
        for one in self.results:
            if one.part == "control" and one.agreement and one.cell["flags"]["dtype"] == dtype:
                worst = [float(row["worst_token"]["rel_l2"]) for row in one.segments or [] if row["worst_token"]]
                return max(worst, default=None)
        return None

    def _job(self, kind: str, plan: ReplayPlan, params: Mapping[str, Any], number: int | None = None) -> Any:
        """A question about a cell, with a log of its own; `number`: which cell what is known so far is said of."""
        with CellLog(self.out / LOGS / f"{Path(plan.out).name}_{kind}.log") as log:

            def on_event(event: Event) -> None:
                if isinstance(event, LogLine):
                    log.line(event.text)
                if isinstance(event, Partial) and number is not None and "so_far" in event.document:
                    event = Partial({**event.document, "number": number})
                self._tell(event)

            return self.runner.run(Job(f"replay_{kind}", params), on_event)

    def repeat(self, result: CellResult) -> dict[str, Any] | None:
        """Run a cell once more: is this machine run-to-run equal, and if not, where first? None if it cannot run."""
        if result.run is None:
            return None
        number = self.results.index(result)
        flags = Flags.from_mapping(result.cell["flags"])
        self._begun += 1
        again = self._run(self.plan.with_flags(flags, str(self.out / f"cell{number}_again")))
        if again.run is None:
            return {"cell": number, "equal": None, "first": None, "why": again.cell["error"]["message"], "tensors": 0}
        compared = compare_runs(result.run, again.run, exact=True)
        first = compared.tally.first_difference
        name, why = (None, None) if first is None else (first.name, first.reason)
        tensors = sum(row.verdict.value != "MISSING" for row in compared.tensors)
        if result.hashes is not None:
            parting = frontier.part(result.hashes, again.hashes)
            tensors += len(parting.order)
            # Modules come before what is computed of them.
            if parting.first is not None:
                name, why = parting.start, "the digests differ"
        return {"cell": number, "equal": name is None, "first": name, "why": why, "tensors": tensors}

    def in_dtype(self, result: CellResult, dtype: str, *, backward: bool = False) -> CellResult:
        """A cell, or the baseline, in another dtype: a run beside the answer, which says how far rounding takes it."""
        number = self._number_of(result)
        flags = replace(Flags.from_mapping(result.cell["flags"]), dtype=dtype)
        if dtype == "float64" and flags.attention not in _OF_ANY_DTYPE:
            flags = replace(flags, attention="sdpa")
        name = f"cell{number}_{dtype}_gradients" if backward else f"cell{number}_{dtype}"
        plan = self.plan.with_flags(flags, str(self.out / name))
        what = "each row alone" if result is self.baseline else f"cell {number}"
        self._tell(Progress(0, None, f"{what} in {dtype}: how far rounding goes"))
        plan = plan if backward else replace(plan, backward=False, micros=None)
        return self._once(replace(plan, capture="none", forward=None, optimizer=None))

    def beside(self, flags: Flags, name: str, **changes: Any) -> CellResult:
        """A setting that nobody asked for, run beside the answer and held to each row alone; why it differs is not
        asked (`why_beside`). `changes`: of the plan.
        """
        plan = self._plan_beside(flags, name, **changes)
        self._begun += 1
        self._tell(Progress(0, None, f"no cell is what was recorded: is it {flags.label()}?"))
        result = self._once(plan)
        if result.run is not None and self.baseline.run is not None:
            result.comparison = compare_runs(self.baseline.run, result.run)
            result.segments = segments(self.baseline.run, result.run, result.cell["final_hidden"])
        return result

    def own_row(self, own: CellResult, row: int) -> CellResult:
        """The trainer's own forward, as a cell has it, of one row by itself; compared with nothing, and never kept: its
        code may be another the next time.
        """
        flags = Flags.from_mapping(own.cell["flags"])
        plan = self._asking_plan(self.plan.with_flags(flags, str(self.out / f"own_row{row}")))
        self._tell(Progress(0, None, f"its forward of row {row} alone"))
        return self._run(replace(plan, capture="none", forward=own.cell["forward"], rows=str(row)))

    def own_shown(self, own: CellResult, off: float) -> list[dict[str, str]] | None:
        """What changes of the batch show of the trainer's own forward, as a cell has it (`own_asked.ask`); None where
        it could not be asked. `off`: how far it is off each row alone, in nats on average.
        """
        flags = Flags.from_mapping(own.cell["flags"])
        plan = replace(
            self._asking_plan(self.plan.with_flags(flags, str(self.out / "own_asked"))), forward=own.cell["forward"]
        )
        self._begun += 1
        self._tell(Progress(0, None, "its forward, with other tokens"))
        try:
            found = self._job("own", plan, {"plan": plan.to_mapping(), "said": own.cell["dump"], "off": off})
        except JobCancelledError:
            raise
        except RldbgError:
            return None
        shown: list[dict[str, str]] = found["shown"]
        return shown

    def beside_library(self, library: str, row: int) -> dict[str, Any] | None:
        """Where the plan's model, a factory's, parts from the library's own of the directory (`beside_library.ask`);
        None where they could not be asked.
        """
        flags = Flags.from_mapping(self.baseline.cell["flags"])
        plan = replace(self._plan_beside(flags, "library_asked"), rows=None)
        self._begun += 1
        self._tell(Progress(0, None, "its model beside the library's own"))
        try:
            found: dict[str, Any] = self._job(
                "library", plan, {"plan": plan.to_mapping(), "library": library, "row": row}
            )
        except JobCancelledError:
            raise
        except RldbgError:
            return None
        return found

    def why_beside(self, result: CellResult, flags: Flags, name: str) -> dict[str, Any] | None:
        """Why that setting is not what each row alone computes."""
        if not result.cell.get("forward"):
            return self._cause(result, self._plan_beside(flags, name))
        shown = self.own_shown(result, 0.0)
        return cause_of_own_forward(shown) if shown else None

    def _plan_beside(self, flags: Flags, name: str, **changes: Any) -> ReplayPlan:
        plan = self._asking_plan(self.plan.with_flags(flags, str(self.out / f"tried_{name}")))
        return replace(plan, capture="none", forward=None, **changes)

    def _number_of(self, result: CellResult) -> int:
        """The cell's number, also of the one that is being explained before it is among the results."""
        return next(number for number, one in enumerate([*self.results, result]) if one is result)

    def _once(self, plan: ReplayPlan) -> CellResult:
        """A cell that need not run again while nothing it depends on has changed."""
        identity = identity_of(plan, self.recorded)
        known = self._kept.find(identity)
        if known is not None:
            return replace(known)
        result = self._run(plan)
        self._kept.keep(identity, result)
        return result

    def _run(self, plan: ReplayPlan) -> CellResult:
        path = self.out / LOGS / f"{Path(plan.out).name}.log"
        with CellLog(path) as log:

            def on_event(event: Event) -> None:
                if isinstance(event, LogLine):
                    log.line(event.text)
                self._tell(event)

            try:
                cell = self.runner.run(Job("replay_cell", {"plan": plan.to_mapping()}), on_event)
                hashes = frontier.from_mappings(cell.get("hashes"))
                if hashes is not None:
                    frontier.write(path.with_suffix(".hashes.jsonl"), hashes)
                told = {name: value for name, value in cell.items() if name != "hashes"}
                return CellResult({**told, "log": str(path)}, open_run(Path(cell["dump"])), hashes=hashes)
            except UnavailableError as error:
                return CellResult(_unfinished(plan, "unavailable", error, path))
            except ChildDiedError as error:
                return CellResult(_unfinished(plan, "crashed", error, path))
            except JobCancelledError:
                raise
            except (RequestError, DumpError) as error:
                if plan.forward is not None or not any(result.run is not None for result in self.results):
                    raise
                # What one cell alone cannot do (its capture would not fit) is that cell's outcome.
                return CellResult(_unfinished(plan, "failed", error, path))
            except RldbgError as error:
                return CellResult(_unfinished(plan, "failed", error, path))


def _unfinished(plan: ReplayPlan, outcome: str, error: RldbgError, log: Path) -> dict[str, Any]:
    return {
        "flags": plan.flags.to_mapping(),
        "effective": None,
        "outcome": outcome,
        "error": error.to_mapping(),
        "notes": [],
        "time": None,
        "memory": None,
        "dump": None,
        "final_hidden": None,
        "log": str(log),
    }


def mark_twins(results: Sequence[CellResult]) -> None:
    """Cells that ran the same kernels under the same settings are one cell: the later names the earlier."""
    seen: list[tuple[dict[str, Any], int]] = []
    for number, result in enumerate(results):
        effective = result.cell["effective"]
        if effective is None or result.part == "reference" or result.same_as is not None:
            continue
        ran = ran_alike(effective, result.cell["flags"])
        result.same_as = next((earlier for known, earlier in seen if known == ran), None)
        if result.same_as is None:
            seen.append((ran, number))


def floors(results: Sequence[CellResult]) -> dict[str, Any]:
    """The noise of this very run: how far agreeing cells are from the reference, by dtype."""
    found: dict[str, Any] = {}
    for result in results:
        if not result.agreement or not result.segments:
            continue
        floor = found.setdefault(result.cell["flags"]["dtype"], {"worst_token": 0.0, "logp_max": 0.0})
        for row in result.segments:
            worst = row["worst_token"]
            floor["worst_token"] = max(floor["worst_token"], worst["rel_l2"] if worst else 0.0)
            floor["logp_max"] = max(floor["logp_max"], row["valid"]["logp_max"] or 0.0)
    return found


def breaking(results: Sequence[CellResult]) -> list[dict[str, Any]]:
    """The smallest sets of toggles that break agreement."""
    return smallest([result.toggles for result in results if result.agreement is False and result.toggles is not None])


def failing(results: Sequence[CellResult]) -> list[dict[str, Any]]:
    """The smallest sets of toggles that do not run at all: failed or crashed."""
    down = ("failed", "crashed")
    return smallest([one.toggles for one in results if one.cell["outcome"] in down and one.toggles is not None])


def run_axes(bench: Bench, axes: Axes, rows: int) -> None:
    """Run the baseline and every cell the axes span; not what a cell before it already did. `rows`: of the batch."""
    base = bench.plan.flags
    bench.expected += 1 + axes.size
    bench.run(axes.baseline(base, bench.settings), "reference")
    for flags in axes.cells(base):
        cells = [(number, one.cell) for number, one in enumerate(bench.results) if one.part == "cell"]
        same = twin(flags, rows, cells)
        result = bench.run(flags, "cell") if same is None else bench.take_over(flags, same)
        result.toggles = axes.toggled(flags.to_mapping())
    mark_twins(bench.results)
