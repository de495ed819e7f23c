"""The labelled experiment: bugs planted into models that run, and harmless changes, recorded as dumps and judged.

    python -m benchmarks.referee --quick            three CPU minutes
    python -m benchmarks.referee                    every bug on every architecture and dtype
    python -m benchmarks.referee --case 'llama bfloat16 random | attention is scaled 2 % too much | alone'

Bugs (`planted.py`) and harmless changes (`harmless.py`) are changes of a model of `zoo.py` that runs; what judges them
sees two dumps and the weights that they note. Half of the bugs are held out: of these only sums are printed, so that a
rule is not made for them. Everything is seeded by the name of the case.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import fresh, zoo
from benchmarks.harmless import HARMLESS, Harmless
from benchmarks.peers import msprobe_rule, sglang_rule, torch_assert_close
from benchmarks.planted import BUGS, Bug, Where
from replay_core import naming
from replay_core.compare import compare_runs
from replay_core.compare.pairing.align import Rowwise, ShapesDifferError, pair_micro_batches, pair_tensors
from replay_core.compare.pairing.regrouping import by_samples
from replay_core.dumps import open_run
from replay_core.export.rulings import ruling_document
from replay_core.records import Run
from replay_core.referee import ruling
from replay_core.referee.recorded import ruled_first

#: Kernel changes under which a bug is planted as well.
UNDER = ("sdpa instead of eager", "packed, with sdpa", "two ranks' sums in the storage dtype",
         "an engine: packed, blocks of keys, two ranks, fused norms and MLP",
         "another engine: left padding, fp32 attention, fused qkv, exact sums, fp32 head")  # fmt: skip
ALONE = "alone"


HALVES = ("open", "held out", "fresh", "harmless")
_BUGS = {one.name: one for one in (*BUGS, *fresh.BUGS)}
_HARMLESS = {one.name: one for one in (*HARMLESS, *fresh.HARMLESS)}


@cache
def held_out() -> frozenset[str]:
    """The bugs of which nobody who writes a rule is told more than sums."""
    names = sorted(bug.name for bug in BUGS)
    random.Random(18).shuffle(names)
    return frozenset(names[: len(names) // 2])


@dataclass(frozen=True)
class Case:
    """One pair of dumps. bug: None of a harmless pair. change: what else is different, of `HARMLESS` by name."""

    architecture: str
    dtype: str
    kind: str
    bug: str | None
    change: str

    @property
    def seed(self) -> int:
        return zlib.crc32(str(self).encode())

    @property
    def half(self) -> str:
        if self.bug is None or any(one.name == self.bug for one in fresh.BUGS):
            return "harmless" if self.bug is None else "fresh"
        return "held out" if self.bug in held_out() else "open"

    @property
    def side(self) -> str:
        """The side that has the bug."""
        return "ba"[self.seed % 3 == 0]

    @property
    def model(self) -> str:
        return f"{self.architecture} {self.dtype} {self.kind}"

    def __str__(self) -> str:
        return f"{self.model} | {self.bug or 'harmless'} | {self.change}"


def cases(quick: bool) -> list[Case]:
    """Every bug on every architecture in every dtype, alone and under a change, the weights' kind by chance; every
    harmless change on all of them. `quick`: two dozen, no bug or change twice."""
    found = []
    names = [(None, one.name) for one in HARMLESS]
    names += [(one.name, change) for one in BUGS for change in (ALONE, "")]  # type: ignore[misc]
    for bug, change in names:
        for architecture in zoo.ARCHITECTURES:
            for dtype in zoo.DTYPES:
                turn = zlib.crc32(f"{bug} {change} {architecture} {dtype}".encode())
                under = change or UNDER[turn // 3 % len(UNDER)]
                found.append(Case(architecture, dtype, zoo.KINDS[turn % 3], bug, under))
    if not quick:
        return found
    chance, groups = random.Random(4), defaultdict(list)
    for case in found:
        groups[case.bug or case.change].append(case)
    each = [chance.choice(group) for group in groups.values()]
    harmless = [case for case in each if case.bug is None]
    return chance.sample(harmless, 8) + chance.sample([case for case in each if case.bug is not None], 16)


def fresh_cases(seed: int) -> list[Case]:
    """The bugs and changes of `fresh.py` on its architectures and others, and the usual ones on its: 100 of the first,
    150 of the second and 120 that are harmless, drawn by the seed; half of the bugs alone."""
    chance, found = random.Random(seed), []

    def case(architectures: tuple[str, ...], bug: str | None, change: str) -> Case:
        kind = chance.choice(zoo.KINDS)
        return Case(chance.choice(architectures), chance.choice(tuple(zoo.DTYPES)), kind, bug, change)

    for _ in range(100):
        under = chance.choice((ALONE, chance.choice((*UNDER, *(one.name for one in fresh.HARMLESS)))))
        found.append(case((*zoo.FRESH, *zoo.FRESH, *zoo.ARCHITECTURES), chance.choice(fresh.BUGS).name, under))
    found += [
        case(zoo.FRESH, chance.choice(BUGS).name, chance.choice((ALONE, chance.choice(UNDER)))) for _ in range(150)
    ]
    for _ in range(120):
        some = chance.choice((HARMLESS, fresh.HARMLESS))
        found.append(case((*zoo.FRESH, *zoo.FRESH, *zoo.ARCHITECTURES), None, chance.choice(some).name))
    return list(dict.fromkeys(found))


@dataclass
class Answer:
    """What one judge says of a pair: whether something is wrong, which tensor or module is first, which side, why."""

    found: bool
    name: str | None = None
    side: str | None = None
    why: str = ""
    origin: str | None = None
    rule: str | None = None
    took_s: float = 0.0
    #: What was ruled of the side that was changed: (tensor, kind, dtype, size, the largest share of a limit, ruling).
    claims: list[tuple[str, str, str, float, float, str]] = field(default_factory=list)


@dataclass
class Pair:
    """A case that was run: two dumps, and where the bug is (None: harmless)."""

    case: Case
    a: Path
    b: Path
    where: Where | None
    exact: Path
    called: tuple[str, ...] = ()


class Lab:
    """Runs cases. Clean runs, and those in fp64, are made once for every model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.zoo = zoo.Zoo(folder / "weights")
        self._clean: dict[tuple[str, str, str], Path] = {}
        self._exact: dict[tuple[str, str, str], Path] = {}

    def pair(self, case: Case) -> Pair | None:
        """The dumps of a case; None where the architecture has no such thing."""
        bug, change = _BUGS.get(case.bug or ""), _HARMLESS.get(case.change)
        other = self._other(case, change, bug)
        if other is None:
            return None
        folder, where = other
        clean = self._of_clean(case)
        a, b = (folder, clean) if bug is not None and case.side == "a" else (clean, folder)
        return Pair(case, a, b, where, self._of_exact(case), bug.called if bug is not None else ())

    def _other(self, case: Case, change: Harmless | None, bug: Bug | None) -> tuple[Path, Where | None] | None:
        key = (case.architecture, case.kind, case.dtype)
        running = self.zoo.running(*key, case.seed)
        dtype = case.dtype
        if change is not None:
            if change.other is not None:
                if change.other == dtype:
                    return None
                dtype = change.other
                zoo.cast(running.model, zoo.DTYPES[dtype])
            if not change.apply(running):
                return None
        where = None
        if bug is not None:
            where = bug.plant(running)
            if where is None:
                return None
        folder = self.folder / "other"
        shutil.rmtree(folder, ignore_errors=True)
        zoo.record(folder, running, dtype, self.zoo.weights(*key))
        return folder, where

    def _of_clean(self, case: Case) -> Path:
        key = (case.architecture, case.kind, case.dtype)
        if key not in self._clean:
            self._clean[key] = self.folder / "clean" / "-".join(key)
            zoo.record(self._clean[key], self.zoo.running(*key, 0), case.dtype, self.zoo.weights(*key))
        return self._clean[key]

    def _of_exact(self, case: Case) -> Path:
        key = (case.architecture, case.kind, case.dtype)
        if key not in self._exact:
            running = self.zoo.running(*key, 0)
            zoo.cast(running.model, torch.float64)
            self._exact[key] = self.folder / "exact" / "-".join(key)
            zoo.record(self._exact[key], running, "float64")
        return self._exact[key]


# Judges.


def table(pair: Pair) -> Answer:
    """`rldbg compare`: the first divergence and its origin."""
    compared = compare_runs(open_run(pair.a), open_run(pair.b))
    first = compared.first
    if first is None:
        others = [row.name for row in compared.tensors if row.verdict.diverges]
        return Answer(compared.agrees is False, next(iter(others), None), why="nothing computed diverges")
    origin = None if compared.origin is None else compared.origin.module
    return Answer(True, first.name, None, first.reason, origin, None if first.rule is None else first.rule.id)


_RULED: dict[Path, Any] = {}


def referee(pair: Pair) -> Answer:
    """`rldbg referee`, with the weights that the dumps note; a clean run is ruled once for all its pairs."""
    sides = []
    for path in (pair.a, pair.b):
        run = open_run(path)
        is_clean = "clean" in path.parts
        if not is_clean or path not in _RULED:
            side = ruling.rule_side(run, *ruled_first(run.records, sides[0].place if sides else None), None)
            if is_clean:
                _RULED.clear()
                _RULED[path] = side
            sides.append(side)
        else:
            sides.append(_RULED[path])
    said = ruling_document(ruling.together(*sides))
    why = " ".join(str(said[key]) for key in ("hypothesis", "what") if said[key])
    changed = said["a"] if pair.case.side == "a" and pair.case.bug is not None else said["b"]
    claims = [(one["tensor"], one["kind"], one["dtype"], float(one["size"]), float(one["excess"]), str(one["ruling"]))
              for one in changed["tensors"]] if changed is not None else []  # fmt: skip
    return Answer(said["ruling"] == "BUG", said["module"], said["side"], why, claims=claims)


def lined_up(a: Run, b: Run) -> Iterator[tuple[str, np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """What both runs computed, token by token, in the order recorded: peers are spared the aligning."""
    micro_pairs, _ = pair_micro_batches(a.records, b.records)
    for micro_pair in micro_pairs:
        for side in (micro_pair.a, micro_pair.b):
            side.load()
    found = []
    for micro_pair in by_samples(micro_pairs)[0]:
        for tensors in pair_tensors(micro_pair):
            if tensors.a is None or tensors.b is None or tensors.a[1].is_text or tensors.b[1].is_text:
                continue
            if naming.meaning(tensors.name).kind not in ("activation", "logprob"):
                continue
            if not all(side[1].dtype.startswith(("float", "bfloat")) for side in (tensors.a, tensors.b)):
                continue
            try:
                chunks = list(Rowwise(tensors.a[1], tensors.b[1], micro_pair).counted())
            except ShapesDifferError:
                continue
            if chunks:
                sides = [np.concatenate([chunk[at].astype(np.float64) for chunk in chunks]) for at in (0, 1)]
                order = (int(naming.meaning(tensors.name).phase), tensors.a[1].order or 0)
                found.append((order, tensors.name, sides[0], sides[1]))
    for _, name, x, y in sorted(found, key=lambda entry: entry[0]):
        yield name, x, y


def peers(pair: Pair) -> dict[str, Answer]:
    """What the rules of others say, tensor by tensor in order of computation; the first that fails is the answer.

    assert_close: torch.testing's defaults by dtype. sglang and msprobe: as `peers.py` has them from their source.
    same(): torch/_dynamo/utils.py, with the tolerances that torch/benchmarks/dynamo uses for inference (1e-3 in half
    precision, 1e-4 else); its fp64 reference is the clean model in fp64.
    """
    dtype = zoo.DTYPES[pair.case.dtype]
    a, b, exact = (open_run(path) for path in (pair.a, pair.b, pair.exact))
    reference = {name: x for name, x, _ in lined_up(exact, a)}
    answers = {name: Answer(False) for name in ("assert_close", "sglang's rule", "msprobe's rule", "torch same()")}
    for name, x, y in lined_up(a, b):
        one, other = (torch.from_numpy(side).to(dtype) for side in (x, y))
        truth = reference.get(name)
        for tool, answer in answers.items():
            if not answer.found and not _passes(tool, one, other, truth):
                answers[tool] = Answer(True, name)
        if all(answer.found for answer in answers.values()):
            break
    return answers


def _passes(tool: str, one: torch.Tensor, other: torch.Tensor, truth: np.ndarray[Any, Any] | None) -> bool:
    """Whether a tool finds nothing wrong with one pair of tensors."""
    if tool != "torch same()":
        rule = {"assert_close": torch_assert_close, "sglang's rule": sglang_rule, "msprobe's rule": msprobe_rule}[tool]
        return rule({"x": one}, {"x": other})
    from torch._dynamo.utils import same

    if truth is None or truth.shape != tuple(one.shape):
        return True
    tol = 1e-4 if one.dtype == torch.float32 else 1e-3
    return same(one, other, torch.from_numpy(truth), equal_nan=True, tol=tol, log_error=lambda *_: None)


# Scores.


def place(pair: Pair, answer: Answer) -> str:
    """right, missed, early, late or elsewhere: where an answer is to be found of where the bug is."""
    where = pair.where
    assert where is not None
    if not answer.found:
        return "missed"
    name = answer.name or ""
    module = naming.module_of(name)
    if name.startswith(where.first()) or (module in where.modules and not naming.is_module_tensor(name)):
        return "right"
    order = [ref.canonical or ref.name for record in open_run(pair.a if pair.case.side == "a" else pair.b).records
             for ref in record.tensors()
             if record.key.stage == "modules"]  # fmt: skip
    spots = [at for at, one in enumerate(order) if one.startswith(where.first())]
    said = next((at for at, one in enumerate(order) if one == name or naming.module_of(one) == name), None)
    if said is None:
        return "late" if naming.meaning(name).phase > naming.Phase.MODULES else "early"
    if not spots:
        # A fused kernel calls no such module: the one around it answers for it.
        return "right" if any(one.startswith(f"{name}.") for one in where.modules) else "early"
    return "early" if said < spots[0] else "late"


@dataclass
class Score:
    """What a judge got right."""

    bugs: Counter[str] = field(default_factory=Counter)
    harmless: Counter[str] = field(default_factory=Counter)
    sides: Counter[bool] = field(default_factory=Counter)
    causes: Counter[bool] = field(default_factory=Counter)
    origins: Counter[bool] = field(default_factory=Counter)

    def add(self, pair: Pair, answer: Answer) -> str:
        if pair.where is None:
            said = "false" if answer.found else "right"
            self.harmless[said] += 1
            return said
        said = place(pair, answer)
        self.bugs[said] += 1
        if answer.found and answer.side is not None:
            self.sides[answer.side == pair.case.side] += 1
        if answer.found and answer.why and pair.called:
            self.causes[any(word in answer.why.lower() for word in pair.called)] += 1
        if answer.found and answer.origin is not None:
            self.origins[answer.origin in pair.where.modules] += 1
        return said

    def line(self, judge: str) -> str:
        bugs, harmless = sum(self.bugs.values()), sum(self.harmless.values())
        cells = [f"{judge:<16}"]
        if bugs:
            found = bugs - self.bugs["missed"]
            cells.append(f"found {100 * found / bugs:5.1f} %  at its module {100 * self.bugs['right'] / bugs:5.1f} %  "
                         f"early {self.bugs['early']:>4}  late {self.bugs['late']:>4}")  # fmt: skip
        for what, counted in (("side", self.sides), ("origin", self.origins), ("cause", self.causes)):
            if total := sum(counted.values()):
                cells.append(f"{what} {counted[True]} of {total}")
        if harmless:
            cells.append(f"harmless called wrong {self.harmless['false']} of {harmless}")
        return "  ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.referee", description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few cases of each bug and change")
    parser.add_argument("--judges", default="table,referee,peers", help="of table, referee, peers (%(default)s)")
    parser.add_argument("--case", help="one case by its name; keeps its dumps and says where")
    parser.add_argument("--match", default="", help="only cases whose name holds this")
    parser.add_argument("--fresh", type=int, metavar="SEED", help="the bugs, changes and architectures of `fresh.py`")
    parser.add_argument("--half", choices=HALVES, help="only the open bugs, those held out, or what is harmless")
    parser.add_argument("--some", type=int, help="only so many cases, by chance")
    parser.add_argument("--models", type=int, help="only the cases of so many models, by chance")
    parser.add_argument("--seed", type=int, default=9, help="of the chance (%(default)s)")
    parser.add_argument("--held-out", action="store_true", help="say which held-out bugs were missed, too")
    parser.add_argument("--out", type=Path, help="a JSON line of every case")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    every = cases(asked.quick) if asked.fresh is None else fresh_cases(asked.fresh)
    chosen = [case for case in every if asked.match in str(case)]
    chosen = [case for case in chosen if asked.half in (None, case.half)]
    chance = random.Random(asked.seed)
    if asked.models is not None:
        models = sorted({case.model for case in chosen})
        some = set(chance.sample(models, min(asked.models, len(models))))
        chosen = [case for case in chosen if case.model in some]
    if asked.some is not None:
        chosen = chance.sample(chosen, min(asked.some, len(chosen)))
    if asked.case:
        architecture, dtype, kind = asked.case.split(" | ")[0].split()
        bug, change = asked.case.split(" | ")[1:]
        chosen = [Case(architecture, dtype, kind, None if bug == "harmless" else bug, change)]
    chosen.sort(key=lambda case: (case.architecture, case.kind, case.dtype))
    folder = Path(tempfile.mkdtemp(prefix="rldbg-referee-"))
    try:
        run(chosen, folder, asked)
    finally:
        if asked.case:
            _say(f"the dumps are in {folder}: clean, and other ({chosen[0].side} has the bug)")
        else:
            shutil.rmtree(folder)


def run(chosen: list[Case], folder: Path, asked: argparse.Namespace) -> None:
    lab, judges = Lab(folder), asked.judges.split(",")
    scores: dict[str, dict[str, Score]] = {half: defaultdict(Score) for half in HALVES}
    wrong: dict[str, list[str]] = defaultdict(list)
    ran, start = 0, time.process_time()
    out = None if asked.out is None else asked.out.open("w")
    for case in chosen:
        pair = lab.pair(case)
        if pair is None:
            continue
        ran += 1
        half = case.half
        for judge, answer in answers_of(pair, judges):
            said = scores[half][judge].add(pair, answer)
            told = half != "held out" or asked.held_out
            if said != "right" and told and judge in ("table", "referee"):
                wrong[judge].append(f"{said:<7} {case}: {answer.name} {answer.why[:160]}")
            if out is not None:
                line = {**asdict(case), "half": half, "judge": judge, "said": said, **asdict(answer),
                        "where": list(pair.where.first()) if pair.where else None, "bug_side": case.side}  # fmt: skip
                out.write(json.dumps(line) + "\n")
                out.flush()
    for judge, lines in wrong.items():
        _say(f"\n{judge}:")
        _say("\n".join(f"  {line}" for line in lines))
    _say(f"\n{ran} pairs, {time.process_time() - start:.0f} CPU seconds")
    for half, by_judge in scores.items():
        _say(half)
        for judge, score in by_judge.items():
            _say("  " + score.line(judge))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def answers_of(pair: Pair, judges: list[str]) -> Iterator[tuple[str, Answer]]:
    for name, judge in (("table", table), ("referee", referee)):
        if name in judges:
            begin = time.process_time()
            try:
                answer = judge(pair)
            except Exception as error:  # a crash is an answer too, and a wrong one
                answer = Answer(pair.where is None, None, None, f"crashed: {type(error).__name__}: {error}")
            answer.took_s = time.process_time() - begin
            yield name, answer
    if "peers" in judges:
        yield from peers(pair).items()


if __name__ == "__main__":
    sys.exit(main())
