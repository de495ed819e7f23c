"""The table of a ruling's constants: what harmless changes come to, beside what planted bugs do.

python -m benchmarks.referee --judges referee --out ruled.jsonl
python -m benchmarks.calibration ruled.jsonl
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

PAGE = Path(__file__).parent.parent / "docs/referee.md"
BEGIN, END = "<!-- calibration -->\n", "<!-- end of calibration -->\n"


def table(lines: list[dict[str, Any]]) -> str:
    """By what a module is and its dtype, of harmless pairs: tensors ruled, their size in roundings and their share of
    the limit; of bugs, that share at the tensor that was named."""
    harmless: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    bugs: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in lines:
        claims = [claim for claim in line["claims"] if claim[4] > 0]
        if line["bug"] is None:
            for _, kind, dtype, size, excess, ruling in claims:
                if ruling == "NOISE":
                    harmless[kind, dtype].append((size, min(excess, 1.0)))
        elif line["said"] == "right":
            first = next((claim for claim in claims if claim[5] == "BUG"), None)
            if first is not None:
                bugs[first[1], first[2]].append(first[4])
    rows = ["| of | dtype | tensors | size: median | most | of limit: median | 99 % | most | bugs | least | median |",
            "|---|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for key in sorted({*harmless, *bugs}):
        seen = np.array(harmless.get(key, [])).reshape(-1, 2)
        found = np.array(bugs.get(key, []))
        cells = [*key, str(len(seen))]
        sizes, shares = seen.T
        cells += [f"{np.median(sizes):.2f}", f"{sizes.max():.2f}"] if len(seen) else ["", ""]
        cells += [f"{np.quantile(shares, q):.2f}" for q in (0.5, 0.99, 1.0)] if len(seen) else ["", "", ""]
        least = [f"{value:.3g}" for value in (found.min(), np.median(found))] if len(found) else ["", ""]
        cells += [str(len(found)), *least]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main(paths: list[str]) -> None:
    lines = [json.loads(line) for path in paths for line in Path(path).read_text().splitlines()]
    ruled = [line for line in lines if line["judge"] == "referee" and line["claims"]]
    pairs = sum(line["bug"] is None for line in ruled)
    counted = f"{pairs} harmless pairs, {len(ruled) - pairs} of planted bugs.\n\n"
    page = PAGE.read_text()
    head, tail = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(head + BEGIN + counted + table(ruled) + END + tail)


if __name__ == "__main__":
    main(sys.argv[1:])
