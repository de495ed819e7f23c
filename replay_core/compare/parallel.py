"""What a comparison says of the ranks: which part first, which only receive what others sent, what went wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, field

from replay_core import naming
from replay_core.compare import called_again, clipping, off_alone, stages_back
from replay_core.compare.judging import at_boundaries, same_at_every_token
from replay_core.compare.judging.faults import UNEXPECTED, Fault, whose
from replay_core.compare.judging.token_rows import LOST_MICRO_BATCH
from replay_core.compare.pairing.ranks import Together, Which

if TYPE_CHECKING:
    from replay_core.compare.judging.tensors import TensorVerdict

#: A weight is far off where it is by so many times what any other is, of so many at least; and how near factors of
#: several ranks are that are one.
_FAR, _FEWEST_WEIGHTS, _ONE_FACTOR = 8.0, 4, 0.02
#: Less than this times the other run's, in the direction of it, is no copy that moved away.
_UNLIKE = 0.2
#: A weight that is off by this part of its norm is another one; and what part of all weights are nearly all.
_OTHER, _NEARLY_ALL = 0.3, 0.6
#: Kinds of what an output's values alone say, which another weight makes as well.
OF_VALUES = ("apart", at_boundaries.STATE, same_at_every_token.CONSTANT, same_at_every_token.CHANNELS)


class Found(Struct):
    """A fault, in how many tensors it was seen, and in which first."""

    fault: Fault
    name: str | None
    step: int | None
    tensors: int = 0
    #: Of a weight: whether ranks have slices of it, and whether its gradient of the same step is off too.
    is_cut: bool = False
    is_result: bool = False


class Parallel(Struct):
    """The ranks of one run that faced one process of the other. first: by rank, the tensor in which it parts first."""

    which: Which
    ranks: tuple[int, ...]
    first: dict[int, TensorVerdict] = field(default_factory=dict)
    faults: list[Found] = field(default_factory=list)
    #: What was not looked for to its end, and why.
    notes: list[str] = field(default_factory=list)

    @property
    def origins(self) -> tuple[int, ...]:
        """The ranks that part first, all in one tensor."""
        if not self.first:
            return ()
        earliest = next(iter(self.first.values()))
        return tuple(sorted(rank for rank, row in self.first.items() if row is earliest))


def parallel(
    rows: Sequence[TensorVerdict], seen: Iterable[Together], every: Sequence[TensorVerdict] | None = None
) -> Parallel | None:
    """None where no step of one run is spread over ranks that faced one process.

    rows: in order of computation. Faults are those of the first step that shows any: later ones use its weights. every:
    rows that are known to agree besides, where these are not all.
    """
    together = list(seen)
    if not together:
        return None
    found = Parallel(together[0].which, max((one.ranks for one in together), key=len))
    again = [row for row in rows if called_again.is_again(row)]
    rows = [row for row in rows if not called_again.is_again(row)] if again else rows
    tied = stages_back.tied_copies(rows)
    for row in sorted(rows, key=lambda row: (row.key.step or 0, id(row) in tied)) if tied else rows:
        if row.ranks is not None and row.verdict.diverges:
            for rank in row.ranks.parted:
                found.first.setdefault(rank, row)
    try:
        found.faults = _faults(rows, together, found)
        _look_at_the_order(found, rows if every is None else every, again, together)
    except UNEXPECTED as error:
        found.notes.append(f"what the ranks have in common could not be looked for: {type(error).__name__}: {error}")
    return found


def _look_at_the_order(
    found: Parallel, rows: Sequence[TensorVerdict], again: Sequence[TensorVerdict], together: Sequence[Together]
) -> None:
    """Add what the order tells in which rows agree and part, where no tensor by itself says what went wrong."""
    for one in found.faults:
        one.fault = off_alone.of_experts(one.fault, one.name, rows)
        one.fault = off_alone.drawn_by_itself(one.fault, one.name, rows)
    kinds = {one.fault.kind for one in found.faults}
    # What an embedding tells of its stage is of all gradients of it.
    if (
        LOST_MICRO_BATCH in kinds
        and kinds <= {"apart", LOST_MICRO_BATCH}
        and (back := stages_back.went_back_otherwise(rows)) is not None
    ):
        fault, first, count = back
        found.faults = [Found(fault, first.name, first.key.step, count)]
        return
    if all(one.fault.kind == "apart" for one in found.faults):
        if (twice := stages_back.layers_of_several_stages(rows)) is not None:
            first = next(row for row in rows if row.verdict.diverges)
            found.faults.insert(0, Found(twice, first.name, first.key.step, 1))
        for told in (
            stages_back.went_back_otherwise, stages_back.went_back_in_parts, stages_back.left_out_of_the_loss,
            stages_back.lost_at_a_router, stages_back.lost_beside_its_siblings, off_alone.tied_weight,
        ):  # fmt: skip
            if not found.faults and (back := told(rows)) is not None:
                fault, first, count = back
                found.faults = [Found(fault, first.name, first.key.step, count)]
        if not found.faults and (apart := _losses_apart(rows, together)) is not None:
            found.faults = [apart]
        if again and (once_more := called_again.called_again(rows, again)) is not None:
            fault, first, count = once_more
            found.faults = [Found(fault, first.name, first.key.step, count)]


def _losses_apart(rows: Sequence[TensorVerdict], together: Sequence[Together]) -> Found | None:
    """Where gradients part and nothing says why: a loss of which ranks with the same tokens have another each, whose
    mean is the other run's.
    """
    first = next((row for row in rows if row.verdict.diverges), None)
    if first is None or not first.name.startswith("grad."):
        return None
    step = first.key.step
    if any(one.shares != "all" for one in together if one.step == step and one.ids is not None):
        return None  # ranks with samples or tokens of their own have losses of their own
    if not any(one.ids is not None for one in together if one.step == step):
        return None
    for row in rows:
        found = row.ranks
        if (
            row.key.step == step and found is not None and found.relation == "mean" and len(found.summands) > 1
            and naming.meaning(row.name).kind == "loss"
        ):  # fmt: skip
            fault = Fault(
                "held otherwise", found.ranks,
                f"{row.name} is another on each of {whose(found.ranks)}, which have the same tokens and are to "
                "hold the same, and the mean of these is the other run's: a term of it is taken over each rank's own "
                "part (of the vocabulary, of channels, heads or experts) and is not reduced over the ranks",
            )  # fmt: skip
            return Found(fault, row.name, step, 1)
    return None


def _faults(rows: Sequence[TensorVerdict], together: Sequence[Together], found: Parallel) -> list[Found]:
    began = min((row.key.step or 0 for row in found.first.values()), default=0)
    diverged = min((row.key.step for row in rows if row.verdict.diverges and row.key.step is not None), default=None)
    by_kind: dict[tuple[str, tuple[int, ...]], Found] = {}
    for one in together:
        if one.astray is not None:
            fault = Fault(one.astray.kind, one.astray.ranks, one.astray.sentence)
            by_kind.setdefault((fault.kind, fault.ranks), Found(fault, one.astray.name, one.step, 0))
    alone: list[tuple[TensorVerdict, Fault]] = []
    off_weights = {row.name for row in rows if row.name.startswith("param.") and row.verdict.diverges}
    for row in rows:
        if row.ranks is None or row.ranks.fault is None:
            continue
        fault = row.ranks.fault
        if fault.kind == "own constant" and f"param.{naming.module_of(row.name)}.bias" in off_weights:
            continue  # what is off is recorded itself
        if row.ranks.relation == "one" and fault.factor is not None:
            alone.append((row, fault))
            continue
        known = by_kind.setdefault((fault.kind, fault.ranks), Found(
            fault, row.name, row.key.step, is_cut=row.ranks.relation == "slices",
            is_result=row.name.startswith("param.") and row.name[6:] in _gradients_off(rows, row.key.step),
        ))  # fmt: skip
        if known.step == row.key.step:
            known.tensors += 1
    by_kind |= _of_single_ranks(alone)
    for scaled in clipping.scaled(rows, found.ranks):
        step = scaled.first.key.step
        if scaled.is_of_ranks or not any(one.step is None or one.step <= (step or 0) for one in by_kind.values()):
            fault = scaled.fault
            by_kind[fault.kind, fault.ranks] = Found(fault, scaled.first.name, step, scaled.tensors)
            break
    steps = [one.step if one.step is not None else -1 for one in by_kind.values()]
    kept = [
        one for one, step in zip(by_kind.values(), steps, strict=True)
        # Ranks that are apart after a step which diverges and nothing explains have their weights of it.
        if step == min(steps) and (one.fault.kind != "apart" or step <= began)
        # Nor is what a later step computes a cause: of that step are only the inputs, which no weights make.
        and (diverged is None or step <= diverged or one.name is None or _is_input(one.name))
    ]  # fmt: skip
    if (
        all(one.fault.kind in OF_VALUES for one in kept)
        and (of_one := _of_one_weight(rows) or _far_off(rows) or _all_others(rows)) is not None
    ):
        # A weight that is another says more than what its output looks like.
        kept = [of_one, *(one for one in kept if one.fault.kind == "apart")]
    if any(one.fault.kind != "apart" and not one.is_result for one in kept):
        # Weights that are apart after the step are made so by their gradients, of which one says why.
        kept = [one for one in kept if one.fault.kind != "apart" or not one.is_result]
    kept = [one for one in kept if not _is_right_in_its_module(one, rows)]
    if (not_handed := _each_its_own_weights(kept, found.ranks)) is not None:
        kept = [not_handed]
    return sorted(
        kept,
        key=lambda one: -_is_no_step(one, rows) or (one.fault.kind == "apart") * (2 - _makes_the_first(one, found)),
    )


def _is_right_in_its_module(one: Found, rows: Sequence[TensorVerdict]) -> bool:
    """Whether this is a weight that ranks have another of, in a module whose output agrees in that step, where the
    forward of a later one is off: it was right then, and is what the step's gradients made of it.
    """
    if one.fault.kind not in ("apart", "share apart") or not (one.name or "").startswith("param."):
        return False
    own = [row for row in rows if row.key.step == one.step and naming.is_module_tensor(row.name)]
    within = [row for row in own if str(one.name)[6:].startswith(f"{row.name.removesuffix('.output')}.")]
    return bool(within) and any(row.verdict.diverges for row in own) and not any(
        row.verdict.diverges or row.skipped is not None for row in within
    )  # fmt: skip


def _each_its_own_weights(kept: Sequence[Found], ranks: tuple[int, ...]) -> Found | None:
    """Where of the weights of a step each rank has some right and no other has these: an optimizer whose ranks update a
    share of them each (ZeRO), and nobody hands on what it updated.
    """
    are_weights = all((one.name or "").startswith("param.") and not one.is_cut for one in kept)
    if len(kept) < 2 or not are_weights or any(one.fault.kind not in ("apart", "stale weight") for one in kept):
        return None
    # A weight in which one rank's share ends and another's begins is right on none.
    on_one: dict[int, Found] = {}
    for one in kept:
        right = set(ranks) - set(one.fault.ranks)
        if len(right) == 1:
            on_one.setdefault(min(right), one)
    if set(on_one) != set(ranks):
        return None
    said = "; ".join(f"{str(on_one[rank].name).removeprefix('param.')} on rank {rank}" for rank in sorted(on_one)[:4])
    fault = Fault(
        "not gathered", ranks,
        f"each weight is updated on one rank alone, and all others have it as it was or otherwise ({said}): what each "
        "of the ranks updates of them, a share each (ZeRO, a distributed optimizer), is not broadcast to, or gathered "
        "on, the other ranks after the step",
    )  # fmt: skip
    return Found(fault, kept[0].name, kept[0].step, sum(one.tensors for one in kept))


def _is_no_step(one: Found, rows: Sequence[TensorVerdict]) -> bool:
    """Whether this is a rank's share of a weight that is off by far more than any other weight of its step: another
    before the step, whatever gradients of that step say.
    """
    if one.fault.kind != "share apart":
        return False
    off = {
        row.name: row.figures.total.rms_d for row in rows
        if row.key.step == one.step and row.name.startswith("param.") and row.figures is not None
    }  # fmt: skip
    own = off.pop(str(one.name), 0.0)
    return len(off) + 1 >= _FEWEST_WEIGHTS and own >= _FAR * max(off.values())


def _makes_the_first(one: Found, found: Parallel) -> bool:
    """Whether this is a weight, and its module's output is what parts first."""
    if one.name is None or not one.name.startswith("param.") or not found.first:
        return False
    earliest = next(iter(found.first.values()))
    module = one.name.removeprefix("param.").removesuffix(".weight").removesuffix(".bias")
    if earliest.name != f"{module}.output" or earliest.key.step != one.step:
        return False
    # Ranks that have the weight whole make their own output with their own; a slice of it is in what others have too.
    own, origins = set(one.fault.ranks), set(found.origins)
    return own <= origins and (one.is_cut or own == origins) and not one.is_result


def _of_one_weight(rows: Sequence[TensorVerdict]) -> Found | None:
    """A weight that alone is off on all ranks, where every other of the step is the other run's and its module's output
    is what parts first.
    """
    first = next((row for row in rows if row.verdict.diverges), None)
    if first is None or first.ranks is None or not first.name.endswith(".output"):
        return None
    weights = [row for row in rows if row.key.step == first.key.step and row.name.startswith("param.")]
    off = [row for row in weights if row.verdict.diverges]
    module = first.name.removesuffix(".output")
    those = {row.name for row in off} - {f"param.{module}.weight", f"param.{module}.bias"}
    if not off or those or len(weights) < 4 * len(off):
        return None
    # Recorded after its step, a weight is a result of what its gradient is off by; and before the first step recorded
    # no step is known that it was left out of.
    has_earlier = any(row.key.step is not None and row.key.step < (first.key.step or 0) for row in rows)
    if not has_earlier or _gradients_off(rows, first.key.step) & {row.name.removeprefix("param.") for row in off}:
        return None
    ranks = off[0].ranks.parted if off[0].ranks is not None and off[0].ranks.parted else first.ranks.ranks
    name = off[0].name.removeprefix("param.")
    fault = Fault(
        "weight alone", ranks,
        f"{name} alone is another on {whose(ranks)} in step {first.key.step}, and {first.name} is made with it; all "
        "other weights are the other run's: it was left out of the steps before (a stale weight, of no rank's share of "
        "the optimizer), or loaded from elsewhere",
    )  # fmt: skip
    return Found(fault, off[0].name, first.key.step, len(off))


def _far_off(rows: Sequence[TensorVerdict]) -> Found | None:
    """What one rank has of a weight, or all of it, that is off by far more after a step in which all are off than what
    the step makes any other off by, and more than its gradient would make it: it was another before the step.
    """
    first = next((row for row in rows if row.verdict.diverges), None)
    if first is None or first.name.startswith(("grad.", "param.")) or not naming.is_module_tensor(first.name):
        return None
    own = [row for row in rows if row.key.step == first.key.step]
    off: dict[tuple[str, int | None], float] = {}
    for row in own:
        if row.name.startswith("param.") and row.figures is not None and row.ranks is not None and row.skipped is None:
            whole = {None: (row.figures.total.d2 / max(row.figures.total.count, 1)) ** 0.5}
            of_row = {at: rms for at, (rms, _) in row.ranks.off.items()} or whole
            off |= {(row.name, at): rms for at, rms in of_row.items()}
    if len({name for name, _ in off}) < _FEWEST_WEIGHTS or not any(off.values()):
        return None
    name, _ = max(off, key=lambda at: off[at])
    most = max(rms for (other, _), rms in off.items() if other == name)
    ranks = tuple(
        sorted(at for (other, at), rms in off.items() if other == name and at is not None and _FAR * rms >= most)
    )  # fmt: skip
    rest = max(rms for (other, rank), rms in off.items() if other != name or rank not in ranks)
    if not ranks or not most >= _FAR * rest:
        return None
    # An optimizer that moves a weight by its gradient moves one with a large gradient far.
    moved = {
        row.name[6:]: row.figures.total.d2**0.5 for row in own
        if row.figures is not None and row.name.startswith("param.") and row.verdict.diverges
    }  # fmt: skip
    pulled = {
        row.name[5:]: row.figures.total.d2**0.5 for row in own
        if row.figures is not None and row.name.startswith("grad.") and row.figures.total.d2 > 0
    }  # fmt: skip
    ratios = {one: moved[one] / pulled[one] for one in moved if one in pulled}
    called = name.removeprefix("param.")
    are_before = not rest and len(pulled) >= _FEWEST_WEIGHTS  # recorded before the step, which moves all of these
    if not are_before and (
        len(ratios) < _FEWEST_WEIGHTS or called not in ratios
        or not ratios[called] >= _FAR * max(ratio for one, ratio in ratios.items() if one != called)
    ):  # fmt: skip
        return None
    row = next(row for row in own if row.name == name and row.ranks is not None and row.ranks.off)
    assert row.ranks is not None
    factors = [row.ranks.off[rank][1] for rank in ranks]
    near = "" if max(factors) - min(factors) > _ONE_FACTOR else f", about {factors[0]:.2g} times the other run's"
    if max(map(abs, factors)) < _UNLIKE:
        near = " and is nothing like it (as drawn with another seed)"
    others = f"the step leaves all others off by {rest:.2g} at most" if rest else "all others are the other run's"
    fault = Fault(
        "weight alone", ranks,
        f"{called} on {whose(ranks)} is another than the other run's{near}, off by {most:.2g} an element where "
        f"{others} in step {first.key.step}: it was another before the step (a stale or wrong shard, or loaded from "
        "elsewhere), and what parts was made with it",
    )  # fmt: skip
    return Found(fault, name, first.key.step, 1)


def _all_others(rows: Sequence[TensorVerdict]) -> Found | None:
    """Ranks whose weights are nearly all others in the first step, and nothing like the other run's."""
    first = next((row for row in rows if row.verdict.diverges), None)
    if (
        first is None
        or first.ranks is None
        or not naming.is_module_tensor(first.name)
        or first.name.startswith("grad.")
    ):
        return None
    weights = [row for row in rows if row.key.step == first.key.step and row.name.startswith("param.")]
    # What begins as ones or zeros is alike whatever the seed.
    off = [
        row for row in weights
        if row.figures is not None and row.figures.total.rel_l2 > _OTHER and row.ranks is not None and row.ranks.off
        # A weight that was nothing before its first step is made by it alone.
        and "lora_" not in row.name and all(abs(row.ranks.off[rank][1]) < _UNLIKE for rank in row.ranks.parted)
    ]  # fmt: skip
    ranks = {row.ranks.parted for row in off if row.ranks is not None}
    if len(off) < max(_FEWEST_WEIGHTS, _NEARLY_ALL * len(weights)) or len(ranks) != 1:
        return None
    (those,) = ranks
    if not 0 < len(those) < len(first.ranks.ranks):
        return None
    one = off[0].name.removeprefix("param.")
    fault = Fault(
        "other weights", those,
        f"{len(off)} of {len(weights)} weights on {whose(those)} are others than the other run's in step "
        f"{first.key.step}, and nothing like them ({one} and so on): they were not brought from one rank at the "
        "beginning (no broadcast, another seed), or loaded from elsewhere",
    )  # fmt: skip
    return Found(fault, off[0].name, first.key.step, len(off))


def _gradients_off(rows: Sequence[TensorVerdict], step: int | None) -> set[str]:
    """Weights whose gradients of a step are off: recorded after it, they are too, by that."""
    return {
        row.name.removeprefix("grad.")
        for row in rows
        if row.key.step == step and row.verdict.diverges and row.name.startswith("grad.")
    }


def _is_input(name: str) -> bool:
    return naming.meaning(name).kind in ("ids", "positions", "mask")


def _of_single_ranks(rows: Sequence[tuple[TensorVerdict, Fault]]) -> dict[tuple[str, tuple[int, ...]], Found]:
    """One factor of what single ranks have, experts or stages of a pipeline each: one fault of all these ranks."""
    by_kind: dict[str, list[tuple[TensorVerdict, Fault]]] = {}
    for row, fault in rows:
        by_kind.setdefault(fault.kind, []).append((row, fault))
    found: dict[tuple[str, tuple[int, ...]], Found] = {}
    for kind, of_kind in by_kind.items():
        (first, fault), step = of_kind[0], of_kind[0][0].key.step
        own = [one for row, one in of_kind if row.key.step == step]
        ranks = tuple(sorted({rank for one in own for rank in one.ranks}))
        more = "" if ranks == fault.ranks else f"; so it is with what {whose(ranks)} each have alone"
        merged = Fault(kind, ranks, fault.sentence + more, fault.factor)
        found[kind, ranks] = Found(merged, first.name, step, len(own))
    return found


def sentence(found: Parallel) -> str | None:
    """Which ranks part first and which later: `rank 1 of b parts first, in layers.1.output; rank 0 later, in loss`."""
    if not found.first:
        return None
    made_by = next((one for one in found.faults if _makes_the_first(one, found)), None)
    if made_by is not None and made_by.fault.ranks != found.origins:
        earliest = next(iter(found.first.values()))
        return (
            f"{whose(made_by.fault.ranks)} of {found.which} had another weight before, and {earliest.name} is made "
            "with it: what else parts received that"
        )
    origins = found.origins
    earliest = found.first[origins[0]]
    verb = "parts" if len(origins) == 1 else "part"
    if len(origins) == len(found.ranks):
        return f"{whose(origins)} of {found.which} {verb} at once, in {earliest.name}"
    later = {rank: row.name for rank, row in found.first.items() if rank not in origins}
    # Ranks that went wrong as these did received nothing: what they have of it comes later in the step.
    alike = {
        rank for rank in later for one in found.faults
        if one.fault.kind != "apart" and {rank, *origins} <= set(one.fault.ranks) and one.step == earliest.key.step
        and found.first[rank].key.step == one.step
    }  # fmt: skip
    named_later = "; ".join(
        f"rank {rank} in {name}, {'as they do' if rank in alike else 'by what it received'}"
        for rank, name in sorted(later.items())[:4]
    )
    rest = f"; later {named_later}" if later else "; no other does"
    return f"{whose(origins)} of {found.which} {verb} first, in {earliest.name}{rest}"
