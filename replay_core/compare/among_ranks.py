"""What went wrong among ranks that face each other one by one: rank 3 of one run is held against rank 3 of the other,
and that alone says which tensor parts and not why. The step in which they part is compared once more, what the ranks of
a hold being put together as one process would have it.
"""

from __future__ import annotations

from replay_core import naming
from replay_core.compare.comparison import Comparison, compare_runs
from replay_core.compare.handed import handed_otherwise, masks_otherwise
from replay_core.compare.judging import added_again
from replay_core.compare.judging.faults import UNEXPECTED, Fault, whose
from replay_core.compare.judging.tensors import TensorVerdict
from replay_core.compare.judging.tolerance import DEFAULT, Tolerances
from replay_core.compare.misdealt import misdealt
from replay_core.compare.parallel import OF_VALUES, Found, Parallel, parallel
from replay_core.errors import DumpError, NothingComparableError
from replay_core.jobs import Event, OnEvent, Progress, ignore
from replay_core.records import Record

#: Ranks of a run that are put together, and bytes of both that are read for it, at most.
MOST_RANKS, MOST_BYTES = 64, 1 << 32
#: Kinds of what an output's values alone say, which what a stage was given makes as well.
_MAY_BE_HANDED = (*OF_VALUES, added_again.KIND)


def among_ranks(
    compared: Comparison,
    records_a: list[Record],
    records_b: list[Record],
    *,
    exact: bool = False,
    tolerances: Tolerances = DEFAULT,
    on_event: OnEvent = ignore,
) -> Parallel | None:
    """None where the two do not part in a step that several ranks share, or nothing is known of these.

    records_a, records_b: those that were compared. Notes of `compared` say where a step was too large to be looked at.
    """
    first = compared.first
    if first is None or first.key.step is None:
        return None
    known = parallel(compared.tally.of_ranks, compared.together)
    compared.notes += [] if known is None else known.notes
    try:
        return _looked_for(
            compared, first, known, records_a, records_b, exact=exact, tolerances=tolerances, on_event=on_event
        )
    except UNEXPECTED as error:
        # The comparison stands without a cause.
        compared.notes.append(
            f"what went wrong among the ranks of step {first.key.step} could not be looked for: "
            f"{type(error).__name__}: {error}"
        )
        return known


def _looked_for(
    compared: Comparison, first: TensorVerdict, known: Parallel | None, records_a: list[Record],
    records_b: list[Record], *, exact: bool, tolerances: Tolerances, on_event: OnEvent,
) -> Parallel | None:  # fmt: skip
    assert first.key.step is not None
    found = known or _of_one_layout(
        compared, first, records_a, records_b, exact=exact, tolerances=tolerances, on_event=on_event
    )
    ranks = tuple(sorted({one.key.rank for one in records_b if one.key.rank is not None}))
    if len(ranks) > 1 and (found is None or not found.faults):
        fault = misdealt(records_a, records_b, first.key.step, first.key.role)
        if fault is not None:
            found = found or Parallel("b", ranks)
            found.faults.insert(0, Found(fault, "input_ids", first.key.step, 1))
    # What a layer makes of an input times a factor is off by a multiple of that input: where its norm takes the factor
    # out again, the residual alone has it.
    if len(ranks) > 1 and (found is None or all(one.fault.kind in _MAY_BE_HANDED for one in found.faults)):
        fault = masks_otherwise(records_b, first.key.step, first.key.role) or handed_otherwise(
            records_b, first.key.step, first.key.role
        )
        if fault is not None:
            found = found or Parallel("b", ranks)
            apart = [one for one in found.faults if one.fault.kind == "apart"]
            found.faults = [Found(fault, first.name, first.key.step, 1), *apart]
    return found


def _of_one_layout(
    compared: Comparison, first: TensorVerdict, records_a: list[Record], records_b: list[Record],
    *, exact: bool, tolerances: Tolerances, on_event: OnEvent,
) -> Parallel | None:  # fmt: skip
    if compared.together or first.key.rank is None:
        return None
    own, theirs = ([one for one in records if one.key.rank is not None] for records in (records_a, records_b))
    earlier = {one.key.step for one in own if one.key.step is not None and one.key.step <= (first.key.step or 0)}
    steps = sorted(earlier)[-2:]
    own, theirs = ([one for one in records if one.key.step in steps] for records in (own, theirs))
    ranks = {one.key.rank for one in own}
    if len(ranks) < 2 or ranks != {one.key.rank for one in theirs}:
        return None
    paths = {one.path for one in (*own, *theirs)}
    size = sum(path.stat().st_size for path in paths if path.is_file())
    if len(ranks) > MOST_RANKS or size > MOST_BYTES:
        compared.notes.append(
            f"what went wrong among the {len(ranks)} ranks of step {first.key.step} was not looked for: that puts "
            f"together {size / (1 << 30):.1f} GiB (at most {MOST_RANKS} ranks and {MOST_BYTES >> 30} GiB)"
        )
        return None

    def heard(event: Event) -> None:
        if isinstance(event, Progress):  # what is first was said
            on_event(event._replace(what=f"why ranks part: {event.what}"))

    try:
        again = compare_runs(
            compared.a, compared.b, own, theirs, exact=exact, tolerances=tolerances, on_event=heard,
            are_kept=False, as_one=True,
        )  # fmt: skip
    except (DumpError, NothingComparableError):
        return None
    # What agrees rank by rank, and not as it was put together, was put together wrongly (positions on several axes).
    for row in again.tally.of_ranks:
        is_first = row.name == first.name and row.key.step == first.key.step
        if is_first and row.ranks is not None and row.ranks.fault is None and row.ranks.relation == "parts":
            row.ranks.fault = _not_summed(row)
            break
    rows = [row for row in again.tally.of_ranks if row.name in compared.tally.diverging]
    return parallel(rows, again.together, again.tally.of_ranks)


def _not_summed(row: TensorVerdict) -> Fault | None:
    """Of what first parts rank by rank, and of which ranks' parts add up to what every rank of the other run has."""
    assert row.ranks is not None
    if (
        not naming.is_module_tensor(row.name)
        or row.ranks.times != 1
        or len(row.ranks.summands) < 2
        or row.verdict.diverges
    ):
        return None
    ranks = row.ranks.ranks
    each = tuple(ranks[number] for number in row.ranks.summands)
    groups = "" if len(each) == len(ranks) else (
        f", and those between have what these have: it is summed within groups of {len(ranks) // len(each)} alone"
    )  # fmt: skip
    return Fault(
        "not summed", ranks,
        f"{row.name} is not summed over {whose(ranks)}: what {whose(each)} hold are parts that add up to what every "
        f"rank of the other run has{groups}",
    )  # fmt: skip
