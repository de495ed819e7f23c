"""`python -m benchmarks.diagnose [--half open|held|all] [NAME ...]`: train, write in every form, diagnose, count."""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from benchmarks.diagnose import forms, policy, trainer
from benchmarks.diagnose.plants import HEALTHY, PLANTS, Plant
from benchmarks.diagnose.trainer import Recipe, train
from replay_core.diagnose.case import Case
from replay_core.diagnose.engine import diagnose
from replay_core.diagnose.finding import Finding
from replay_core.diagnose.signals import Signals
from replay_core.dumps import open_run


def written(recipe: Recipe, number: int, cache: Path) -> dict[str, Path]:
    """The run in every form, trained once for each version of the trainer. Each recipe has one of the four logs."""
    code = b"".join(Path(each.__file__).read_bytes() for each in (trainer, policy, forms))
    home = cache / f"{recipe.name}-{hashlib.sha256(code + repr(recipe).encode()).hexdigest()[:12]}"
    log = list(forms.LOGS)[number % len(forms.LOGS)]
    if not home.exists():
        for old in cache.glob(f"{recipe.name}-????????????"):
            shutil.rmtree(old)
        half = home.with_suffix(".part")
        shutil.rmtree(half, ignore_errors=True)
        run = train(recipe)
        for name, write in forms.DUMPS.items():
            write(run, half / name)
        forms.LOGS[log](run, half / "log")
        half.rename(home)
    return {name: home / name for name in forms.DUMPS} | {log: next((home / "log").iterdir())}


def findings(path: Path) -> list[Finding]:
    """What the diagnosis says of it, first things first; what is worth knowing is left out."""
    run = open_run(path)
    found = diagnose(Case(run, Signals.of(run))).findings
    return [one for one in found if one.severity != "info"]


def judged(plant: Plant, found: list[Finding], is_log: bool) -> str:
    """named, related (told, but not first, or near it), silent, wrong."""
    # What a cause rules out, and what it has in brackets beside, names nothing.
    texts = [f"{one.claim} {re.sub(r'Not an? [^.]*|[(][^)]*[)]', '', one.cause)}" for one in found]
    if not texts:
        return "silent"
    if plant.names(texts[0], is_log):
        return "named"
    if any(plant.names(text, is_log) for text in texts) or plant.is_near(texts[0]):
        return "related"
    return "wrong"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diagnose", description=__doc__)
    parser.add_argument("names", nargs="*", help="of faults and healthy variants; all by default")
    parser.add_argument("--half", choices=["open", "held", "all"], default="all")
    parser.add_argument("--cache", type=Path, help="where trained runs are kept; a temporary folder by default")
    parser.add_argument("--forms", default="", help="of native,verl,TRL,slime,log; all by default")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rldbg-diagnose-") as made:
        _run(asked, asked.cache or Path(made))


def _run(asked: argparse.Namespace, cache: Path) -> None:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    alarms: Counter[str] = Counter()
    quiet = asked.half == "held"
    wanted = {form for form in asked.forms.split(",") if form}

    def chosen(forms_of: dict[str, Path]) -> list[tuple[str, bool, Path]]:
        every = [(form, form in forms.LOGS, path) for form, path in forms_of.items()]
        return [one for one in every if not wanted or one[0] in wanted or (one[1] and "log" in wanted)]

    for number, plant in enumerate(PLANTS):
        if (asked.names and plant.recipe.name not in asked.names) or asked.half not in ("all", plant.half):
            continue
        for form, is_log, path in chosen(written(plant.recipe, number, cache)):
            found = findings(path)
            verdict = judged(plant, found, is_log)
            if not plant.shows(form, is_log):
                verdict = {"silent": "-", "named": "named"}.get(verdict, verdict)
                if verdict == "related":
                    verdict = "-"
            counts[form][verdict] += 1
            if not quiet:
                _say(f"{verdict:8}{plant.recipe.name:24}{form:10}" + _top(found))
    for number, recipe in enumerate(HEALTHY):
        if asked.names and recipe.name not in asked.names:
            continue
        for form, _, path in chosen(written(recipe, number, cache)):
            found = findings(path)
            alarms["runs"] += 1
            alarms["errors"] += any(one.severity == "error" for one in found)
            alarms["warnings"] += any(one.severity == "warning" for one in found)
            if found:
                _say(f"{'ALARM':8}{recipe.name:24}{form:10}" + _top(found))
    _table(counts, alarms)


def _top(found: list[Finding]) -> str:
    return " | ".join(f"{one.id} {one.severity[0]} {one.claim[:90]}" for one in found[:2])


def _table(counts: dict[str, Counter[str]], alarms: Counter[str]) -> None:
    total: Counter[str] = sum(counts.values(), Counter())
    rows: list[tuple[str, Any]] = [*counts.items(), ("all", total)]
    verdicts = ("named", "related", "silent", "wrong", "-")
    _say("\n" + f"{'form':12}" + "".join(f"{verdict:>9}" for verdict in verdicts) + "   named of what shows")
    for form, each in rows:
        shown = sum(each[verdict] for verdict in verdicts[:4])
        rate = f"{each['named'] / shown:.0%}, wrong {each['wrong'] / shown:.0%}" if shown else ""
        _say(f"{form:12}" + "".join(f"{each[verdict]:9}" for verdict in verdicts) + f"   {rate}")
    if alarms["runs"]:
        _say(f"\nhealthy: {alarms['runs']} runs, {alarms['errors']} with errors, {alarms['warnings']} with warnings")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


main()
