"""The ruling: each side alone, then the two."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from replay_core.errors import JobCancelledError, RldbgError
from replay_core.jobs import OnEvent, Progress, ignore
from replay_core.records import Record, Run
from replay_core.referee import limits
from replay_core.referee.alternatives import EPSILONS, alternatives
from replay_core.referee.arithmetic import Noise, exactly, nearest
from replay_core.referee.attending import coarse_softmax
from replay_core.referee.changes import attribute, parameters
from replay_core.referee.figures import Yardstick
from replay_core.referee.gradients import gradient_claims
from replay_core.referee.grafting import grafted
from replay_core.referee.hypotheses import Tried, harmless, is_bitwise, is_quietly, tried
from replay_core.referee.patterns import pattern
from replay_core.referee.recorded import Place, Recorded
from replay_core.referee.ruled import Floor, RuledClaim, RuledSide, Ruling
from replay_core.referee.scalars import ruled_scalars
from replay_core.referee.shadow import Claim, Shadow
from replay_core.referee.weights import Checkpoint, SideModel, all_of, differences, other_weights, side_model


def rule(
    a: tuple[Run, Place, Sequence[Record], str | None],
    b: tuple[Run, Place, Sequence[Record], str | None] | None,
    on_event: OnEvent = ignore,
    *,
    graft: bool = False,
) -> Ruling:
    """Rule one or two sides: (run, computation, its records, where the weights lie: None for what the dump notes).

    Raises:
        UnavailableError: `graft`, and the sides are such that nothing can be (`grafting`).
    """
    first = rule_side(*a, on_event=on_event)
    ruling = together(first, None if b is None else rule_side(*b, like=first.model, on_event=on_event))
    if graft and b is not None and ruling.b is not None:
        ruling.grafting = grafted(ruling.a, a[2], ruling.b, b[2], on_event)
    return ruling


def together(a: RuledSide, b: RuledSide | None) -> Ruling:
    """Two sides that were ruled alone, and what they were given differently."""
    ruling = Ruling(a, b)
    if ruling.b is not None and ruling.a.model is not None and ruling.b.model is not None:
        ruling.differences = [*differences(ruling.a.model, ruling.b.model), *_roundings(ruling.a, ruling.b)]
    return ruling


def _roundings(a: RuledSide, b: RuledSide) -> list[str]:
    """Where the two sides first round in other places, each of them right."""
    of_b = {one.claim.name: one for one in b.claims}
    for one in a.claims:
        other = of_b.get(one.claim.name)
        if other is None:
            continue
        if one.recipe != other.recipe:
            said = [each.recipe or "as the model's code is written" for each in (one, other)]
        elif one.rounding is not None and other.rounding is not None and one.rounding != other.rounding:
            said = [one.rounding, other.rounding]
        else:
            continue
        return [f"first rounding in other places: {one.claim.name}: a {said[0]}, b {said[1]}"]
    return []


def rule_side(
    run: Run,
    place: Place,
    records: Sequence[Record],
    weights: str | None,
    *,
    like: SideModel | None = None,
    on_event: OnEvent = ignore,
) -> RuledSide:
    """One side, each of its recorded tensors against fp64 of what led to it; `like` is the model of the other."""
    recorded = Recorded(run, place, records)
    side = RuledSide(run, place, notes=list(recorded.problems))
    if len(recorded.ranks) > 1:
        ranks = sorted(rank.place.rank or 0 for rank in recorded.ranks)
        said = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        side.notes.append(f"ranks {said} were given the same tokens: what each holds of a tensor is put together")
    if not recorded.tokens:
        side.why_not = "no token layout: neither token ids nor module tensors are recorded"
        return side
    if not recorded.modules and recorded.logprobs() is None:
        side.why_not = "no module tensors and no log-probabilities are recorded"
        return side
    try:
        side.model = side_model(recorded, weights, like)
    except JobCancelledError:
        raise
    except RldbgError as error:
        side.why_not = f"no weights: {error.in_one_line}"
        return side
    side.notes += side.model.notes
    side.temperature = _temperature(recorded)
    shadow = Shadow(side.model, recorded, side.temperature)
    noises = _claims(shadow, on_event, str(run.path))
    written = shadow.perturb(nearest)
    others = other_weights(run, side.model.reference)
    quiet = _quiet(shadow, others, on_event, str(run.path))
    for name, claim in shadow.claims.items():
        yard = Yardstick(claim, [run[name] for run in noises if name in run], written.get(name))
        one = _ruled(claim, yard, recorded)
        side.claims.append(one)
        if one.ruling != "BUG":
            one.quietly = next(
                (what for what, moved in quiet.items() if name in moved and is_quietly(yard, moved[name])), None
            )
        if one.quietly is None and _may_be_coarse(claim, one):
            one.is_bitwise = is_bitwise(shadow, yard, one.figures, coarse_softmax(claim.dtype))
            short = str(claim.dtype).removeprefix("torch.")
            one.quietly = f"the softmax computed in {short} within, in half precision" if one.is_bitwise else None
        one.ruling = "BUG" if one.quietly else one.ruling
        if one.ruling != "NOISE":
            is_first = side.first is one
            asked = (each for each in alternatives(shadow, claim, others) if is_first or each.harmless)
            _explain(side, one, tried(shadow, claim, yard, one.figures, asked))
            if side.first is one:
                places = _places(recorded, claim)
                looked_up = recorded.ids_BL if claim.kind == "embedding" else None
                seen = pattern(yard, places, None if looked_up is None else [int(looked_up[at]) for at in places])
                one.pattern = None if seen is None else seen.words
    _rule_gradients(side, shadow, recorded)
    if side.first is not None and side.first.claim.kind in ("attention", "logprobs") and not side.is_explained:
        _explain_by_row(side, side.first, records, shadow.temperature)
    if shadow.summed:
        more = f" and {len(shadow.summed) - 1} more" if len(shadow.summed) > 1 else ""
        side.notes.append(f"{shadow.summed[0]}{more}: ranks hold a summand each, and their sum is ruled")
    side.coverage = _coverage(shadow, side)
    if recorded.modules and recorded.logprobs() is not None:
        shadow, noises = _whole(side, recorded, shadow, on_event, str(run.path))
    _floor(side, shadow, noises)
    return side


def _may_be_coarse(claim: Claim, one: RuledClaim) -> bool:
    """Whether an attention's rounding is neither of those that kernels have."""
    found = one.figures
    is_half = claim.dtype in (torch.bfloat16, torch.float16)
    return claim.heads > 1 and is_half and found.unequal > limits.UNEQUAL and found.size < limits.COARSE


def _explain(side: RuledSide, one: RuledClaim, found: list[Tried]) -> None:
    """Clear a claim that a harmless recipe explains; keep the best hypotheses of the first that none does."""
    if one.quietly is not None:
        excess = one.figures.excess
        side.hypotheses = side.hypotheses or [(one.quietly, True, excess, excess)]
        return
    recipe = next((each for each in found if each.hypothesis.harmless and each.explains), None)
    if recipe is not None and one.figures.relative < harmless(one.claim):
        one.ruling, one.recipe = "NOISE", recipe.hypothesis.name
        if one.claim.kind == "rope":
            side.kept.setdefault(one.claim.owner, recipe.hypothesis.change)
    elif not side.hypotheses or (one.ruling == "BUG" and side.first is one):
        side.hypotheses = [(each.name, each.explains, each.before.excess, each.after.excess) for each in found[:3]]


def _rule_gradients(side: RuledSide, shadow: Shadow, recorded: Recorded) -> None:
    """Gradients of weights behind the forward's claims. All of them times one factor were clipped: that is no bug."""
    found, factors = [], set()
    for claim, yard in gradient_claims(shadow, recorded):
        one = _ruled(claim, yard, recorded)
        found.append(one)
        gain = one.figures.gain
        if one.ruling == "BUG" and one.figures.is_explained_by(yard.figures(gain * yard.truth)):
            one.pattern = f"all of it times {1 + gain:.4g}"
        factors.add(round(1 + gain, 3) if one.pattern else None)
    side.claims += found
    if len(found) > 1 and len(factors) == 1 and None not in factors:
        for one in found:
            one.ruling, one.recipe = (
                "NOISE",
                f"every gradient times {1 + one.figures.gain:.3g}, as clipping leaves them",
            )


def _explain_by_row(side: RuledSide, first: RuledClaim, records: Sequence[Record], temperature: float) -> None:
    """Whether the samples of a row see each other, or padding: the row computed as if it were one sample."""
    assert side.place is not None
    assert side.model is not None
    recorded = Recorded(side.run, side.place, records, as_laid=True)
    shadow = Shadow(side.model, recorded, temperature)
    noises = _claims(shadow, ignore, "")
    claim = shadow.claims.get(first.claim.name)
    if claim is None:
        return
    left = Yardstick(claim, [run[claim.name] for run in noises if claim.name in run]).figures().excess
    before = first.figures.excess
    what = "samples of a row see each other" if Recorded(side.run, side.place, records).is_packed else "padding is seen"
    side.hypotheses.insert(0, (what, left < 1 and left < 0.5 * before, before, left))
    side.hypotheses.sort(key=lambda one: one[3])


def _claims(shadow: Shadow, on_event: OnEvent, what: str, runs: int = limits.RUNS) -> list[dict[str, Any]]:
    total = runs + 1
    on_event(Progress(0, total, f"{what}: the truth"))
    shadow.judge()
    noises = []
    for number in range(runs):
        on_event(Progress(number + 1, total, f"{what}: its rounding"))
        noises.append(shadow.perturb(Noise(number, limits.ACCUMULATION)))
    return noises


def _quiet(
    shadow: Shadow, others: Sequence[Checkpoint], on_event: OnEvent, what: str
) -> dict[str, dict[str, torch.Tensor]]:
    """How far every truth moves under what may be smaller than noise: other weights, another epsilon."""
    model, found = shadow.causal_lm, {}
    for number, other in enumerate(others):
        on_event(Progress(number, len(others) + 1, f"{what}: {other.name}"))
        with ExitStack() as stack:
            for module, values in all_of(model, other):
                stack.enter_context(parameters(values)(module))
            found[other.name] = shadow.perturb(exactly)
    settings = [(module, name) for module in model.modules() for name in EPSILONS
                if isinstance(getattr(module, name, None), float)]  # fmt: skip
    with ExitStack() as stack:
        for module, name in settings:
            stack.enter_context(attribute(name, 10 * getattr(module, name))(module))
        found["an epsilon ten times as large (eps)"] = shadow.perturb(exactly)
    return found


def _ruled(claim: Claim, yard: Yardstick, recorded: Recorded) -> RuledClaim:
    found = yard.figures()
    word = "BUG" if found.excess > 1 else "SUSPECT" if found.excess > limits.SUSPECT else "NOISE"
    places, row = [] if claim.kind == "gradient" else _places(recorded, claim), found.worst_row
    return RuledClaim(claim, found, word, places[row] if row < len(places) else None)


def _places(recorded: Recorded, claim: Claim) -> list[tuple[int, int]]:
    """(sample, position) of every row of a claim."""
    valid = recorded.valid_BL
    said = recorded.logprobs() if claim.kind == "logprobs" else None
    if said is not None:
        valid = said[2] & valid
        valid[:, :1] = False
    samples, positions = valid.nonzero()
    if claim.rows is not None:
        samples, positions = samples[claim.rows.numpy()], positions[claim.rows.numpy()]
    return list(zip(samples.tolist(), positions.tolist(), strict=True))


def _whole(
    side: RuledSide, recorded: Recorded, shadow: Shadow, on_event: OnEvent, what: str
) -> tuple[Shadow, list[dict[str, torch.Tensor]]]:
    """The model run from the tokens on, and its noise: once for two sides of one model that were given the same."""
    assert side.model is not None
    whole = Shadow(side.model, recorded, shadow.temperature, is_forced=False, is_narrow=True)
    given = (
        recorded.ids_BL, recorded.positions_BL, recorded.valid_BL, whole.logprob_mask.numpy(),
        np.array(shadow.temperature),
    )  # fmt: skip
    name = (recorded.logprobs() or ("",))[0]
    if not side.kept:
        for before, claim, noises in side.model.floors:
            if all(np.array_equal(a, b) for a, b in zip(before, given, strict=True)):
                whole.claim_as(name, claim)
                return whole, [{name: noise} for noise in noises]
    with ExitStack() as kept:
        for owner, change in side.kept.items():
            kept.enter_context(change(shadow.module(owner)))
        found = _claims(whole, on_event, f"{what}, the whole model", limits.FLOOR_RUNS)
    if not side.kept and name in whole.claims:
        side.model.floors.append((given, whole.claims[name], [run[name] for run in found]))
    return whole, found


def _floor(side: RuledSide, shadow: Shadow, noises: list[dict[str, torch.Tensor]]) -> None:
    """The log-probabilities, and what is made of them, against the model's own noise."""
    claim = next((claim for claim in shadow.claims.values() if claim.kind == "logprobs"), None)
    if claim is None or not claim.truth.numel():
        return
    noise = torch.stack([run[claim.name].double().square() for run in noises]).mean(0)
    floor, gap = noise.sqrt(), (claim.recorded - claim.truth).abs()
    past = float((gap > 6 * floor.clamp(min=float(floor.mean()) / 4)).double().mean())
    side.floor = Floor(float(gap.mean()), float(floor.mean()), int(gap.numel()), past)

    def placed(values: torch.Tensor) -> torch.Tensor:
        grid = torch.zeros(shadow.logprob_mask.shape, dtype=torch.float64)
        grid[shadow.logprob_mask] = values[:, 0]
        return grid

    if claim.rows is not None:
        side.notes.append(
            f"log-probabilities: {len(claim.rows):,} of {shadow.logprobs_recorded:,} tokens drawn; losses are not ruled"
        )
        return
    side.scalars = ruled_scalars(shadow.recorded, placed(claim.truth), placed(floor), placed(claim.recorded))


def _temperature(recorded: Recorded) -> float:
    from replay_core import pages

    ref = recorded.find("temperature")
    if ref is not None and ref.numel == 1:
        return float(pages.array(ref).reshape(-1)[0])
    said = (recorded.run.flags or {}).get("temperature")
    return float(said) if isinstance(said, (int, float)) and not isinstance(said, bool) and said > 0 else 1.0


def _coverage(shadow: Shadow, side: RuledSide) -> dict[str, Any]:
    names = [names for _, names in shadow.modules]
    known = {name.rpartition(".inputs")[0] or name.rpartition(".output")[0] for name in shadow.recorded.modules}
    held = {
        part for name in shadow.recorded.modules for part in [name.split(".inputs.")[0].split(".output")[0]]
    } | known
    return {
        "recorded": len(side.claims) + len(shadow.unrooted) + len(shadow.misfits) + len(shadow.unreached),
        "ruled": len(side.claims),
        "modules_ruled": len({one.claim.owner for one in side.claims} & {name for known in names for name in known}),
        "modules_of_model": len(names),
        "not_recorded": [known[0] for known in names if not any(name in held for name in known)],
        "unrooted": shadow.unrooted,
        "misfit": shadow.misfits,
        "unreached": shadow.unreached,
        "routed_otherwise": [f"{name}: {share:.1%} of choices" for name, share in shadow.flips.items() if share],
    }
