"""Why two critics' values differ: one word, a sentence with its numbers, and what else is true beside it.

A cause is read off what the run shows: the built models' own state, digests of their weights, the first module that
turns equal inputs into different outputs, and what the values themselves say. A setting alone never makes a cause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, field

from replay_core.compare import Comparison, TensorVerdict
from replay_core.compare.divergence import may_be_first, origin_of, standing
from replay_core.compare.judging.limits import GAIN_FLOOR, NOISE, REL_L2
from replay_core.dtypes import EPS
from replay_core.parity.elimination import from_values
from replay_core.parity.evidence import ValueEvidence
from replay_core.parity.sides import CriticSide

if TYPE_CHECKING:
    from replay_core.documents.parity import CauseEntry, ParityCause

#: Every cause, what explains most first. The last three are no disagreement.
CAUSES = (
    "order", "positions", "weights", "norm", "attention", "scale", "offset", "dropout", "padding", "noise", "equal",
)  # fmt: skip
HARMLESS = ("padding", "noise", "equal")

#: How alike two heads' ratios must be to be one factor, in units of rounding.
_ONE_FACTOR = 64


class Cause(Struct, frozen=True):
    """kind: one of CAUSES, or None where values are not even numbers. `numbers` is the evidence, JSON-able."""

    kind: ParityCause | None
    why: str
    numbers: dict[str, Any] = field(default_factory=dict)

    def to_mapping(self) -> CauseEntry:
        return {"kind": self.kind, "why": self.why, "numbers": self.numbers}


def causes_of(ev: ValueEvidence, a: CriticSide, b: CriticSide, rows: list[TensorVerdict]) -> list[Cause]:
    """Every cause a batch shows before training, what explains most first. `rows`: its module tensors, compared."""
    if ev.masked.nonfinite:
        return [Cause(None, f"{ev.masked.nonfinite} values that count are NaN or infinite", {})]
    if not ev.masked.n:
        return [Cause(None, "no token counts: every row is masked", {})]
    found: list[Cause] = [*_order(ev), *_positions(ev, a, b)]
    aligned = not ev.shift
    if ev.differs and aligned:
        named = [*_weights(a, b), *_head(ev, a, b), *_norm(a, b, rows), *_attention(ev, rows, found)]
        found += named or ([] if found else [Cause(*one) for one in from_values(ev)])
    else:
        found += _norm(a, b, rows, bitwise=True)
    found += _dropout(ev, a, b)
    if ev.padding_differs and aligned:
        found.append(_padding(ev))
    found.sort(key=lambda one: CAUSES.index(one.kind or "equal"))
    return found or [_agreement(ev, a, b)]


def _order(ev: ValueEvidence) -> list[Cause]:
    if ev.order is None:
        return []
    moved = sum(place != row for row, place in enumerate(ev.order))
    return [
        Cause(
            "order",
            f"B holds the same rows in another order: {moved} of {len(ev.order)} stand elsewhere (row 0 of A is row "
            f"{ev.order[0]} of B); figures are of rows brought together again",
            {"order": list(ev.order)},
        )
    ]


def _positions(ev: ValueEvidence, a: CriticSide, b: CriticSide) -> list[Cause]:
    if ev.shift:
        way = "later" if ev.shift > 0 else "earlier"
        return [Cause("positions", f"B's values are A's, one token {way}", {"shift_tokens": ev.shift})]
    if ev.positions is None or ev.position_range is None:
        return []
    low, high = ev.position_range
    slots = "slots of the row" in (a.said("positions"), b.said("positions"))
    if ev.positions == "shifted" and slots and low != high:
        # A backend that counts slots begins where the row's padding ends; rotary positions only see distances.
        return []
    size = f"by {low:+d}" if low == high else f"by {low:+d} to {high:+d}"
    effect = (
        "rotary attention sees only distances, so the values hardly move"
        if ev.positions == "shifted" and not ev.differs
        else f"values part by up to {ev.masked.max_abs:.3g}"
    )
    why = f"position ids of the same tokens differ {size} (B against A); {effect}"
    return [Cause("positions", why, {"smallest": low, "largest": high})]


def _weights(a: CriticSide, b: CriticSide) -> list[Cause]:
    """Backbone weights that differ after conversion. Digests of two dtypes are never equal and say nothing."""
    if not a.weights or not b.weights or a.said("dtype") != b.said("dtype"):
        return []
    names = sorted(set(a.weights) | set(b.weights))
    apart = [name for name in names if not name.startswith("v_head.") and a.weights.get(name) != b.weights.get(name)]
    if not apart:
        return []
    why = f"{len(apart)} of {len(names)} weights differ after conversion, first {apart[0]}"
    return [Cause("weights", why, {"differing": apart[:8], "of": len(names)})]


def _head(ev: ValueEvidence, a: CriticSide, b: CriticSide) -> list[Cause]:
    """What the two value heads are to each other: a factor, a constant, or different heads."""
    if not a.head or not b.head or "weight" not in a.head or "weight" not in b.head:
        return []
    left, right = a.head["weight"], b.head["weight"]
    if left.shape != right.shape:
        return [Cause("weights", f"the value heads have {left.size} and {right.size} weights", {})]
    found = []
    unit = EPS[ev.dtype] / 2
    ratio = float(left @ right / (left @ left)) if left.any() else float("nan")
    apart = float(np.linalg.norm(right - left) / max(np.linalg.norm(left), 1e-300))
    if apart > 4 * unit:
        rest = float(np.linalg.norm(right - ratio * left) / max(np.linalg.norm(right), 1e-300))
        if rest <= _ONE_FACTOR * unit:
            found.append(_scaled(ev, ratio))
        else:
            cosine = float(left @ right / max(np.linalg.norm(left) * np.linalg.norm(right), 1e-300))
            what = {"relative_distance": apart, "cosine": cosine}
            why = f"the value heads are different draws: relative distance {apart:.3g}, cosine {cosine:.3g}"
            if _is_one(left) != _is_one(right):
                which = "A" if _is_one(left) else "B"
                why += f"; {which}'s is one number everywhere (VALUE_HEAD_INIT), the other's is not"
            found.append(Cause("weights", why, what))
    bias_a, bias_b = (float(head["bias"][0]) if "bias" in head else 0.0 for head in (a.head, b.head))
    if abs(bias_b - bias_a) > max(ev.floor, 4 * unit * max(abs(bias_a), abs(bias_b))):
        found.append(_biased(ev, a, b, bias_b - bias_a))
    return found


def head_line(a: CriticSide, b: CriticSide) -> tuple[float, float] | None:
    """(scale, offset) that B's values are of A's if their heads are all that differs; None where no line says so."""
    if not a.head or not b.head or "weight" not in a.head or "weight" not in b.head:
        return None
    left, right = a.head["weight"], b.head["weight"]
    if left.shape != right.shape or not left.any():
        return None
    scale = float(left @ right / (left @ left))
    if np.linalg.norm(right - scale * left) > 1e-2 * np.linalg.norm(right):
        return None
    bias_a, bias_b = (float(head["bias"][0]) if "bias" in head else 0.0 for head in (a.head, b.head))
    return scale, bias_b - scale * bias_a


def _is_one(weights: Any) -> bool:
    return bool(weights.size > 1 and (weights == weights[0]).all())


def _scaled(ev: ValueEvidence, ratio: float) -> Cause:
    seen = ev.fit.scale if ev.fit is not None and ev.fit.why in ("scale", "both") else ev.masked.slope
    why = f"B's head is {ratio:.6g} times A's, and its values are {_number(seen)} times A's"
    return Cause("scale", why, {"head_ratio": ratio, "slope": seen})


def _biased(ev: ValueEvidence, a: CriticSide, b: CriticSide, bias: float) -> Cause:
    has = [side for side, head in (("A", a.head), ("B", b.head)) if head and "bias" in head]
    whose = f"only {has[0]}'s head has a bias" if len(has) == 1 else "the heads' biases differ"
    seen = ev.fit.offset if ev.fit is not None and ev.fit.why == "offset" else ev.masked.mean_signed
    why = f"{whose}: {bias:+.6g} (B against A), and the values part by {_number(seen)} on average"
    return Cause("offset", why + "; no correlation can see it", {"bias_difference": bias, "mean_signed": seen})


def _norm(a: CriticSide, b: CriticSide, rows: list[TensorVerdict], *, bitwise: bool = False) -> list[Cause]:
    """A norm that turns equal inputs into different outputs with equal weights: its epsilon, or how it is computed."""
    name = _first_norm(rows, bitwise=bitwise)
    if name is None:
        return []
    eps_a, eps_b = a.said("norm_eps"), b.said("norm_eps")
    if bitwise and (eps_a is None or eps_a == eps_b):
        return []
    weight = f"{name}.weight"
    if a.weights and b.weights and a.weights.get(weight) != b.weights.get(weight):
        return []
    epsilon = f"its epsilon is {_listed(eps_a)} in A and {_listed(eps_b)} in B"
    same = "the epsilons read back are equal: it is computed otherwise"
    why = f"{name} is the first module whose inputs agree and whose output does not, its weight is the same; "
    return [
        Cause("norm", why + (epsilon if eps_a != eps_b else same), {"module": name, "eps_a": eps_a, "eps_b": eps_b})
    ]


def _first_norm(rows: list[TensorVerdict], *, bitwise: bool) -> str | None:
    if bitwise:
        first = next((row for row in rows if row.figures is not None and row.figures.mismatched), None)
        name = first.name.partition(".output")[0] if first is not None and ".output" in first.name else None
    else:
        origin = origin_of(map(standing, rows))
        name = None if origin is None else origin.module
    return name if name is not None and "norm" in name.rpartition(".")[2] else None


def _attention(ev: ValueEvidence, rows: list[TensorVerdict], found: list[Cause]) -> list[Cause]:
    if any(one.kind == "positions" for one in found):
        return []
    if ev.alone_differs is False:
        why = (
            f"each row alone agrees, in the batch the tokens that count part by up to {ev.masked.max_abs:.3g}: "
            "one side attends to padding or to other rows"
        )
        return [Cause("attention", why, {"max_abs_in_batch": ev.masked.max_abs})]
    first = next((row for row in rows if may_be_first(row)), None)
    if first is not None and first.name.endswith("self_attn.o_proj.inputs.0"):
        layer = first.name.partition(".self_attn")[0]
        why = f"{layer}: queries, keys and values agree, what attention makes of them does not ({first.reason})"
        return [Cause("attention", why, {"module": f"{layer}.self_attn"})]
    return []


def _dropout(ev: ValueEvidence, a: CriticSide, b: CriticSide) -> list[Cause]:
    """Train mode parts although eval mode is explained, and a critic's values change from call to call."""
    if not ev.train_differs or not ev.wobble:
        return []
    moving = [side for side in ("a", "b") if ev.wobble.get(side, 0.0) > ev.floor]
    if not moving:
        return []
    drops = {"a": a.said("head_dropout"), "b": b.said("head_dropout")}
    which = f"{moving[0].upper()}'s change" if len(moving) == 1 else "both critics' change"
    size = max(ev.wobble[side] for side in moving)
    why = f"in train mode {which} from call to call (rms {size:.3g}); heads drop {drops['a']} (A) and {drops['b']} (B)"
    if len(moving) == 2:
        why += ": each draws its own mask"
    return [Cause("dropout", why, {"wobble_a": ev.wobble.get("a"), "wobble_b": ev.wobble.get("b"), **_pair(drops)})]


def _padding(ev: ValueEvidence) -> Cause:
    r = ev.unmasked.pearson
    whole = f"over all positions Pearson is {r:.3f}" if r is not None else "over all positions there is no correlation"
    counted = ev.masked.pearson
    kept = f", over {ev.counted} tokens {counted:.3f}" if counted is not None else ""
    apart = ev.padding_tokens if ev.padding is None else ev.padding.apart
    of = "" if apart == ev.padding_tokens else f" of {ev.padding_tokens}"
    why = f"{apart}{of} positions of padding part: {whole}{kept}; nobody reads them"
    return Cause("padding", why, {"padding_positions": apart, "pearson_unmasked": r, "pearson_masked": counted})


def _agreement(ev: ValueEvidence, a: CriticSide, b: CriticSide) -> Cause:
    largest, bitwise = ev.masked.max_abs, ev.masked.max_abs == 0.0
    dtypes = {one for one in (a.said("dtype"), b.said("dtype")) if one}
    ratio = ev.floor * NOISE[ev.dtype] / REL_L2["end-to-end"][ev.dtype]
    spread = float(np.hypot(ev.masked.mean_signed or 0.0, ev.masked.residual_rms or 0.0))
    if bitwise or (ev.dtype in ("float32", "float64") and spread <= max(ratio, GAIN_FLOOR["float64"])):
        how = "bitwise equal" if bitwise else f"equal but for {ev.dtype} rounding: at most {largest:.3g} apart"
        return Cause("equal", f"{ev.masked.n} {ev.counted} tokens are {how}", {"max_abs": largest})
    computed = " and ".join(sorted(dtypes)) or ev.dtype
    why = (
        f"{ev.masked.n} {ev.counted} tokens part by at most {largest:.3g}, without slope or offset: what {computed} "
        f"leaves (rms up to {ev.floor:.3g})"
    )
    return Cause("noise", why, {"max_abs": largest, "floor": ev.floor})


def of_training(a: CriticSide, b: CriticSide, parted: tuple[int, ValueEvidence] | None, before: Cause) -> list[Cause]:
    """What training adds: rows in another order, or critics that agreed and then part.

    `parted` is the first training step after which they do, and its evidence: later ones mix cause with effect.
    """
    for mine, theirs in zip(a.steps, b.steps, strict=False):
        if mine["rows"] != theirs["rows"]:
            same = sorted(mine["rows"]) == sorted(theirs["rows"])
            what = "the same rows in another order" if same else "other rows"
            why = (
                f"from training step {mine['step']} on the critics see {what}: A {_some(mine['rows'])}, "
                f"B {_some(theirs['rows'])}; shuffling is {_switch(a)} in A and {_switch(b)} in B"
            )
            return [Cause("order", why, {"step": mine["step"], "rows_a": mine["rows"], "rows_b": theirs["rows"]})]
    if parted is None or before.kind not in HARMLESS:
        return []
    step, last = parted
    biases = [one.said("head_bias") for one in (a, b)]
    if last.fit is not None and last.fit.why == "offset" and biases != [None, None]:
        whose = "only one head has a bias, and it trains" if None in biases else "the heads' biases train apart"
        why = f"equal before training, {last.fit.offset:+.3g} apart after step {step}: {whose}"
        return [Cause("offset", why, {"offset": last.fit.offset, "step": step})]
    names = ("learning_rate", "weight_decay", "max_grad_norm", "value_clip", "reduction", "dtype", "float32_copies")
    other = [name for name in names if a.readback and b.readback and a.said(name) != b.said(name)]
    told = ", ".join(f"{name.replace('_', ' ')} {a.said(name)} in A and {b.said(name)} in B" for name in other)
    settings = f"; they train with {told}" if other else _frozen(a, b)
    why = f"equal before training, up to {last.masked.max_abs:.3g} apart after step {step}{settings}"
    return [Cause("weights", why, {"max_abs": last.masked.max_abs, "step": step})]


def _frozen(a: CriticSide, b: CriticSide) -> str:
    """Hugging Face's embeddings leave the padding token's gradient out, Megatron's do not: it shows among tokens."""
    ids = [one.said("padding_idx") for one in (a, b)]
    if not a.readback or not b.readback or ids[0] == ids[1]:
        return ""
    which, token = ("A", ids[0]) if ids[0] is not None else ("B", ids[1])
    return (
        f"; {which}'s embedding of token {token} (padding_idx) does not train, the other's does: is it among the rows?"
    )


def rows_of(comparison: Comparison | None, micro: int) -> list[TensorVerdict]:
    """One batch's part of a comparison, in order of computation."""
    return [] if comparison is None else [row for row in comparison.tensors if row.key.micro == micro]


def _number(value: float | None) -> str:
    return "no number" if value is None else f"{value:.6g}"


def _listed(eps: Any) -> str:
    return ", ".join(f"{one:g}" for one in eps) if eps else "not known"


def _some(rows: list[int]) -> str:
    return ", ".join(map(str, rows[:6])) + (" …" if len(rows) > 6 else "")


def _switch(side: CriticSide) -> str:
    value = side.said("shuffle")
    return "not known" if value is None else "on" if value else "off"


def _pair(drops: dict[str, Any]) -> dict[str, Any]:
    return {f"dropout_{side}": value for side, value in drops.items()}
