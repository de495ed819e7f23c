"""Runs the races and prints what came of each. A missed bar is printed, not hidden; the exit code stays 0."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from benchmarks import (
    arithmetic,
    differing,
    growth,
    identical,
    listing,
    matrix,
    recording,
    replaying,
    screens,
    starting,
    training,
)
from benchmarks.inputs import Inputs

ROWS = {
    "identical": identical.rows,
    "differing": differing.rows,
    "arithmetic": arithmetic.rows,
    "matrix": matrix.rows,
    "listing": listing.rows,
    "starting": starting.rows,
    "recording": recording.rows,
    "training": training.rows,
    "replaying": replaying.rows,
    "screens": screens.rows,
    "growth": growth.rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; all by default")
    scale = float(os.environ.get("RLDBG_BENCH_SCALE", "1"))
    parser.add_argument("--scale", type=float, default=scale, help="1 is the size the budgets name (%(default)s)")
    parser.add_argument("--dir", type=Path, help="where the dumps are made; needs 3 GB at scale 1")
    asked = parser.parse_args()
    unknown = set(asked.rows) - set(ROWS)
    if unknown:
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    _say(f"python {sys.version.split()[0]}, torch {torch.__version__}, {torch.get_num_threads()} threads, ")
    _say(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, scale {asked.scale:g}; best of n, alternating\n\n")
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="rldbg-bench-", dir=asked.dir) as folder:
        # Every side starts from compiled modules, as pip leaves them. Where a shell forbids bytecode, only what is
        # installed has any, and the working tree would be compiled at every start.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = os.path.join(folder, "bytecode")
        inputs = Inputs(Path(folder), asked.scale)
        for name in asked.rows or ROWS:
            for result in ROWS[name](inputs):
                verdicts[result.verdict] += 1
                _say(result.text() + "\n\n")
    _say(", ".join(f"{number} {verdict}" for verdict, number in verdicts.items()) + "\n")


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


main()
