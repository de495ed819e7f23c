"""What the dump lacks: every figure of a part is a figure of a part."""

from __future__ import annotations

from collections import defaultdict

from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, finding, shown, warning
from replay_core.diagnose.rule import rule

#: What a reader of a dump says when records are gone.
_LOST = (
    "missing",
    "nothing of rank",
    "holes in",
    "overwrit",
    "cannot be read",
    "truncated",
    "cut short",
    "still being written",
)


@rule("D39", "records are missing or overwritten", link="dump", scope="case",
      source="slime#1519, slime#1922; NexRL: micro-batch names restart with every mini-batch")  # fmt: skip
def incomplete(case: Case) -> Finding | None:
    """Ranks and micro-batches that other steps or ranks have and this one lacks, records that cannot be read, and
    records that carry a later mini-batch or epoch under a name that every mini-batch writes to. Any is a warning;
    info where steps and micro-batches were inferred by the reader.
    """
    lost = [problem for problem in case.run.problems if any(word in problem.what for word in _LOST)]
    said = tuple(f"{problem.where.rpartition('/')[2]}:" for problem in lost)
    unreadable = [what for what in case.unreadable if not what.startswith(said)]
    count = len(lost) + len(unreadable)
    if count:
        first = lost[0].what if lost else unreadable[0]
        # A grid that was inferred from time stamps may have other holes than the run had.
        inferred = not unreadable and any("inferred" in note and "micro" in note for note in case.run.notes)
        return finding(
            "info" if inferred else "warning",
            f"the dump is not whole: {first}" + (f" (and {count - 1} more)" if count > 1 else ""),
            Where(path=lost[0].where if lost else str(case.run.path)),
            shown("holes and unreadable records", count, "0", str(case.run.path)),
            cause="a rank died, a disk was full, the dump is still being written, or ranks share a file name",
            next_step=f"rldbg ls {case.run.path}",
        )
    return _overwritten(case)


def _overwritten(case: Case) -> Finding | None:
    """Micro-batch 0 of a later mini-batch, with none of the first: the first one was written over."""
    later: dict[tuple[int | None, int | None], list[int]] = defaultdict(list)
    for record in case.records():
        if record.key.stage != "loss":
            continue
        number = record.key.minibatch
        if number is None and (record.names is None or "extra_info.batch_idx" in record.names):
            ref = record.get("extra_info.batch_idx")
            value = getattr(ref.source, "value", None) if ref is not None else None
            number = value if isinstance(value, int) else None
        if number is not None:
            later[record.key.step, record.key.rank].append(number)
    lost = {key: numbers for key, numbers in later.items() if min(numbers) > 0}
    if not lost:
        return None
    (step, rank), numbers = next(iter(lost.items()))
    return warning(
        f"mini-batches before {min(numbers)} are missing: they were written over",
        Where(step=step, rank=rank, path=str(case.run.path)),
        shown("first mini-batch that is left", min(numbers), "0", str(case.run.path)),
        shown("steps and ranks of which this holds", len(lost)),
        cause="micro-batches are numbered within their mini-batch, and the file name says no mini-batch",
        next_step=f"rldbg ls {case.run.path}",
    )
