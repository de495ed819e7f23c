"""Why a cell disagrees with each row alone: what the interventions showed, as one kind and one sentence. numpy-free.

Nothing is inferred from which samples are off: a token was changed, and what may not see it moved (`visibility`), or
what must see it did not; only where nothing of the kind shows, the first module that parts says what it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from replay_core.dtypes import DTYPES
from replay_core.replay.kinds import KINDS

if TYPE_CHECKING:
    from replay_core.replay.gradient_noise import HeldGradient
    from replay_core.replay.recorded import Explained

Evidence = Mapping[str, Any]

#: A dump may be this many times as far from the truth as each row alone is, typically and at its worst token, and is
#: still the noise of its dtype. No worst token of a mixture is held to it: a near tie sends a token elsewhere, and how
#: many are sent varies, so that what three quarters are below may be three times as far.
TYPICAL, MOST, WORST = 2.0, 3.0, 4.0
#: A sample of a cell that is no noise is off where its worst token is this many times as far from that of each row
#: alone as the worst token of those is from the truth: twice is what two roundings are apart.
_NOTICED = 8.0
#: Relative difference and nats, in float64, up to which two settings are one (`bench.SAME`), and up to which a shift of
#: positions is harmless: rotations are float32 inside.
SAME, SAME_NATS, SHIFTED = 2e-5, 1e-4, 1e-3
#: Kernels of one setting that are further apart in float64 compute different things.
KERNELS = 1e-4
#: What float32 takes no model's typical token off by.
_NO_ROUNDING = 0.05
#: Epsilons that the same sums in another order leave of a token's norm.
_LAST_PLACES = 8
#: What moves with more of what no token may notice, whatever stands in it: on what the batch depends then.
_MORE = {"wider": "on the padded length", "company": "on the number of samples"}
#: Where a token is lost that is not in the batch as it is.
_AMONG = {"wider": "in wider padding", "company": "in a pack of one sample more"}
#: Share of the tokens of other samples that one token moves at once where something takes all there is together.
#: And that all tokens of a sample move at once there.
_SPREAD, _REACH = 0.3, 0.5
_ITSELF = "each row alone, to which it is held, does so itself: "


def broken_samples(rows: Sequence[Mapping[str, Any]], limit: float) -> list[int]:
    """Samples whose worst token is further off than `limit` (relative L2 of the final hidden state)."""
    return [row["sample"] for row in rows if row["worst_token"] and _past(row["worst_token"]["rel_l2"], limit)]


def cause_of(
    evidence: Evidence | None,
    rows: Sequence[Mapping[str, Any]],
    limit: float,
    findings: Sequence[Mapping[str, str]] = (),
    *,
    epsilon: float = 0.0,
    noise: float | None = None,
    not_finite: str | None = None,
    compiled: bool = False,
    failure: str | None = None,
) -> dict[str, Any]:
    """What is wrong with a cell that disagrees, and whether it is only rounding.

    Args:
        evidence: what `why.explain` found; None where it could not be asked, for the reason `failure`.
        rows: its samples against each row alone; limit: how far a worst token may be off.
        findings: what the inputs themselves show (`visibility.check`).
        epsilon: of the coarsest dtype involved.
        noise: how far the worst token of a padded batch that agrees is off; asked where no truth was measured.
        not_finite: the model's own word that it computes NaN or infinities.

    Returns:
        kind (of KINDS), is_noise, off and exact (samples), causes (the findings' codes), sentence, evidence.
    """
    said = "; ".join(finding["text"] for finding in findings)
    found: dict[str, Any] = {
        "is_noise": False, **_off(rows, limit), "causes": [finding["code"] for finding in findings],
        "also": [], "evidence": None if evidence is None else _told(evidence),
    }  # fmt: skip
    if not_finite:
        return {"kind": "maths", **found, "sentence": f"{_who(found)}: {not_finite}"}
    if evidence is None:
        why = said or f"why could not be asked: {failure}"
        return {"kind": "unknown", **found, "sentence": f"{_who(found)}: {why}"}
    evidence = _in_numbers(evidence)
    (kind, because), also = _kind(evidence), _also(evidence)
    if kind == "rounding":
        found["is_noise"], because = _noise(evidence, epsilon, compiled)
        is_rounding_alone = not (compiled or _is_no_rounding(evidence) or _is_another_model(evidence, epsilon))
        kind = "rounding" if found["is_noise"] or is_rounding_alone else "maths"
    elif evidence["shifted"] and evidence["apart"] <= SHIFTED and _is_clean(evidence):
        found["is_noise"], kind = True, "rounding"
        because = f"positions are shifted, which moves a token by {evidence['apart']:.2g} of its norm at most"
    truth = evidence["truth"].get("reference")
    measured = truth["worst"] if truth else noise
    if not found["is_noise"] and measured is not None:
        found |= _off(rows, min(limit, _NOTICED * max(measured, epsilon)))
    sentence = f"{_who(found)}: {KINDS[kind].said}: {because}"
    small = evidence["smallest"]
    if small and not found["is_noise"]:
        sentence += f"; smallest case {_case(small, evidence['first'])}"
    found["also"] = _as_entries([one for one in also if one[0] != kind]) if not found["is_noise"] else []
    return {"kind": kind, **found, "sentence": sentence + (f" ({said})" if said else "") + _skipped(evidence)}


def _off(rows: Sequence[Mapping[str, Any]], limit: float) -> dict[str, list[int]]:
    off = broken_samples(rows, limit)
    return {"off": off, "exact": [row["sample"] for row in rows if row["tokens"] and row["sample"] not in off]}


def _who(found: Mapping[str, Any]) -> str:
    return f"{samples(found['off'])} off" if found["off"] else "no sample's final state is off by itself"


def _in_numbers(evidence: Evidence) -> Evidence:
    """With the words in which a document says infinities and NaN as the numbers they are."""
    figures = {name: evidence[name] for name in ("apart", "logp_apart", "kernels_apart")}
    truth = {name: {key: float(one) for key, one in held.items()} for name, held in evidence["truth"].items()}
    return {**evidence, **{name: None if one is None else float(one) for name, one in figures.items()}, "truth": truth}


def _skipped(evidence: Evidence) -> str:
    skipped = evidence.get("skipped") or ()
    if not skipped:
        return ""
    said = "not asked" if any("no time left" in one for one in skipped) else "not asked, as it failed"
    return f"; {said}: {', '.join(skipped)}"


def so_far(evidence: Evidence) -> str | None:
    """What is known before everything was asked: what moves what it may not, or where two settings part."""
    for by in ("reference", "cell"):
        found = _violated(evidence, by)
        if found:
            return f"{KINDS[found[0][0]].said}: {_ITSELF if by == 'reference' else ''}{found[0][1]}"
    lost, first = evidence.get("lost"), evidence["first"]
    if lost:
        return f"{KINDS['own_keys'].said}: {_lost(lost, 'when alone', _AMONG.get(lost.get('among'), 'here'))}"
    if first:
        return f"it parts from each row alone first in {first['module']}"
    return None


def is_compilers(cause: Mapping[str, Any]) -> bool:
    """Whether a compiled cell is what each row alone is until it is compiled."""
    evidence = cause["evidence"]
    return cause["kind"] == "maths" and evidence is not None and _is_one(_in_numbers(evidence))


def _is_one(evidence: Evidence) -> bool:
    same = evidence.get("same") or SAME
    return evidence["apart"] <= same and (evidence["logp_apart"] or 0.0) <= SAME_NATS * max(1.0, same / SAME)


def cause_of_reference(evidence: Evidence | None) -> dict[str, Any] | None:
    """What is wrong with each row alone, to which everything else is held; None where nothing shows."""
    if evidence is None:
        return None
    evidence = _in_numbers(evidence)
    found = _violated(evidence, "reference") or _violated(evidence, "eager")
    if not found and evidence.get("narrowed"):
        found = [("own_keys", _narrowed(evidence["narrowed"]))]
    if not found and (kernel := _kernels(evidence)) is not None:
        found = [kernel]
    if not found:
        return None
    kind, because = found[0]
    return {
        "kind": kind, "is_noise": False, "off": [], "exact": [], "causes": [], "evidence": _told(evidence),
        "also": _as_entries(found[1:]),
        "sentence": f"each row alone is wrong itself: {KINDS[kind].said}: {because}{_skipped(evidence)}",
    }  # fmt: skip


def cause_of_recording(
    held: Mapping[str, Any],
    made: str | None = None,
    left: float = 0.0,
    why: Mapping[str, Any] | None = None,
    tried: Sequence[str] = (),
    kind: str = "maths",
) -> dict[str, Any]:
    """Why what was recorded (`held`, an entry of a cell's `recorded`) is what no cell computes; or what the trainer's
    own forward gives, which has no `name`.

    Args:
        made: what was made on purpose that gives it but for `left` nats on average; why: the cause of that, which is
            none of the model's own where it is None, and then of that kind.
        tried: what was made on purpose and does not give it.
    """
    whose, what = ("the recording", f"recorded {held['field']}") if "name" in held else ("its forward", "what it gives")
    known: dict[str, Any] = {"is_noise": False, "off": [], "exact": [], "causes": [], "evidence": None, "also": []}
    if made is not None:
        kind, also = (kind, "") if why is None else (why["kind"], f"; {why['sentence']}")
        sentence = (
            f"{whose}: {what} is {made}: {left:.2g} nats off that on average, "
            f"{held['mean_abs']:.3g} off each row alone{also}"
        )
        return {**known, "kind": kind, "sentence": sentence}
    none = f"; it is not {', nor '.join(tried)}" if tried else ""
    return {
        **known,
        "kind": "maths",
        "sentence": f"{whose}: {KINDS['maths'].said}: nothing was found wrong with what was replayed, and "
        f"{what} is {held['mean_abs']:.3g} nats off it on average: weights of another step or "
        f"checkpoint, an adapter, a temperature, or a forward that is not the model's{none}",
    }


def cause_of_factory(held: Mapping[str, Any], left: float, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Why what was recorded, or what the trainer's own forward gives, is what the library's own model of the checkpoint
    gives (`left` nats off it on average), and not what the factory's does. asked: where the two part
    (`beside_library.ask`), if that is known.
    """
    whose, what = ("the recording", f"recorded {held['field']}") if "name" in held else ("its forward", "what it gives")
    first = asked.get("first")
    is_turned = first is not None and (first["kind"] == "position" or asked["unturned_agrees"])
    kind = "positions" if is_turned else "maths"
    where = f", first in {first['module']}" if first else ""
    alike = "; where no token is rotated by its position, the two are one" if asked.get("unturned_agrees") else ""
    return {
        "kind": kind, "is_noise": False, "off": [], "exact": [], "causes": [], "evidence": None, "also": [],
        "sentence": f"{whose}: {what} is what the library's own model of the checkpoint gives ({left:.2g} nats off on "
        f"average, {held['mean_abs']:.3g} off the factory's): what the factory builds computes something else: "
        f"{KINDS[kind].said}{where}{alike}",
    }  # fmt: skip


def cause_of_own_forward(shown: Sequence[Mapping[str, str]], beside: str = "") -> dict[str, Any]:
    """Why the trainer's own forward is not what each row alone gives, as changes of the batch show it
    (`own_asked.ask`); `beside`: what is to be said besides.
    """
    found = [(one["kind"], one["because"]) for one in shown]
    (kind, because), *others = found
    return {
        "kind": kind, "is_noise": False, "off": [], "exact": [], "causes": [], "evidence": None,
        "also": _as_entries([one for one in others if one[0] != kind]),
        "sentence": f"its forward: {KINDS[kind].said}: {because}{beside}",
    }  # fmt: skip


def rounded_forward(held: Mapping[str, Any], limit: Explained) -> dict[str, Any]:
    """Why the trainer's own forward seems to disagree, which is no further off than half precision moves its tokens.

    limit: how far that is.
    """
    kind = "rounding"
    return {
        "kind": kind, "is_noise": True, "off": [], "exact": [], "causes": [], "evidence": None, "also": [],
        "sentence": f"its forward: {KINDS[kind].said}: {held['max_abs']:.3g} nats off at most, {held['mean_abs']:.3g} "
        f"on average; half precision and float32 are up to {limit.most:.3g} apart on these tokens, on average "
        f"{limit.mean:.3g}",
    }  # fmt: skip


def cause_of_gradients(found: Sequence[HeldGradient], finer: str) -> dict[str, Any]:
    """Of gradients that differ, all of them rounded otherwise or none: how far they are from those in a finer dtype, as
    each row alone's are.
    """
    is_noise = all(one.is_rounding for one in found)
    asked = [one for one in found if one.finer is not None and is_noise]
    worst = max(asked or found, key=lambda one: one.cell / (one.reference or one.cell or 1.0))
    kind = "rounding" if is_noise else "maths"
    if worst.finer is not None and is_noise:
        return {
            "kind": kind, "is_noise": True, "off": [], "exact": [], "causes": [], "evidence": None, "also": [],
            "sentence": f"no sample's final state is off by itself: {KINDS[kind].said}: {worst.name} is "
            f"{worst.cell:.2g} off the gradient in {finer} (relative L2; that of each row alone "
            f"{worst.reference:.2g}), and this cell in {finer} is not ({worst.finer:.2g})",
        }  # fmt: skip
    others = f" and {len(found) - 1} more are" if len(found) > 1 else " is"
    how = " about as far from" if is_noise else ", behind a forward that is right, further from"
    return {
        "kind": kind, "is_noise": is_noise, "off": [], "exact": [], "causes": [], "evidence": None, "also": [],
        "sentence": f"no sample's final state is off by itself: {KINDS[kind].said}: {worst.name}{others}{how} the "
        f"gradient in {finer} {'as' if is_noise else 'than'} that of each row alone is (relative L2 {worst.cell:.2g} "
        f"against {worst.reference:.2g})",
    }  # fmt: skip


def _kernels(evidence: Evidence) -> tuple[str, str] | None:
    """What the kernel of each row alone does that eager does not; None where the two compute the same."""
    apart = evidence["kernels_apart"] or 0.0
    if apart <= evidence.get("kernel_noise", KERNELS):
        return None
    kernel = evidence.get("kernel") or {}
    there = {**evidence, "visibility": kernel.get("visibility", ()), "packed": False}
    violated = _violated(there, "reference") or _violated(there, "eager")
    if violated:
        return violated[0]
    lost = kernel.get("lost")
    if lost:
        return "own_keys", _lost(lost, "in eager", "in this kernel")
    first = (evidence.get("kernel") or {}).get("first")
    where = f", first in {first['module']}" if first else ""
    return "maths", f"eager computes something else: a token is {apart:.2g} of its norm off{where}"


def _lost(lost: Mapping[str, Any], there: str, here: str) -> str:
    seen = lost.get("seen")
    if seen:
        return (
            f"token {lost['token']} of sample {seen['sample']} has {seen['share']:.2g} of the attention of token "
            f"{seen['query']} {there}, nothing {here} ({seen['pairs']:,} pairs so): {lost['module']}"
        )
    whom = "what it is given itself" if lost.get("itself") else "later ones of its sample"
    return f"token {lost['token']} moves {whom} {there}, not {here}: {lost['module']}"


def _narrowed(found: Mapping[str, Any]) -> str:
    """What the model lets no token see, in whatever setting (`narrowed.narrowed`)."""
    how_many = f"{found['pairs']:,} of {found['of']:,} pairs so"
    if found["itself"]:
        what = f"token {found['query']} gives its own key nothing ({how_many})"
    elif found["beyond"]:
        what = f"no token sees one {found['beyond']} or more before it ({how_many}), and the config has no such window"
    else:
        what = f"token {found['query']} gives token {found['key']} nothing ({how_many}), and no window of the config"
        what += " leaves it out"
    return f"{what}: {found['module']}"


def _kind(evidence: Evidence) -> tuple[str, str]:
    for by in ("reference", "cell"):
        found = _violated(evidence, by)
        if found:
            return found[0][0], (_ITSELF if by == "reference" else "") + found[0][1]
    if _is_one(evidence):
        if evidence.get("narrowed"):
            return "own_keys", _ITSELF + _narrowed(evidence["narrowed"])
        kernel = _kernels(evidence)
        return ("rounding", "") if kernel is None else (kernel[0], _ITSELF + kernel[1])
    lost, first = evidence.get("lost"), evidence["first"]
    if lost:
        return "own_keys", _lost(lost, "when alone", _AMONG.get(lost.get("among"), "here"))
    where = f", first in {first['module']}" if first else ", in the head"
    if first and first["kind"] == "position":
        return "positions", f"{first['module']} gives other positions than each row alone has"
    if evidence.get("by_position"):
        said = "what is added to the scores is other than each row alone adds, and depends on where a key stands alone"
        return "positions", f"{said}: the same whatever the tokens are{where}"
    if evidence.get("unturned_agrees"):
        return "positions", f"where no token is rotated by its position, the two are one{where}"
    shifted = next((one for one in evidence["visibility"] if one["what"] == "shifted" and one["by"] == "cell"), None)
    if shifted is not None:
        return "positions", f"they are those of the slots, not of the sample's tokens: {line(shifted)}{where}"
    more_of = next((one for one in evidence["visibility"] if one["what"] in _MORE and one["by"] == "cell"), None)
    if more_of is not None:
        return "batch", f"{_MORE[more_of['what']]}: {line(more_of)}{where}{_unasked_padding(evidence)}"
    if evidence.get("unpadded_agrees") and not evidence["single_agrees"]:
        said = "without its padding a sample is right, and no token of it or of others is seen"
        return "batch", f"on the padded length: {said}{where}{_unasked_padding(evidence)}"
    # What a single row shows does not need the others.
    is_alone_right = evidence["single_agrees"] and (evidence["smallest"] or {}).get("rows") != 1
    if is_alone_right and not evidence["packed"]:
        return "batch", f"a sample by itself is right, and no token of the others moves it{where}"
    kernels = evidence["kernels_apart"] or 0.0
    is_off = kernels > evidence.get("kernel_noise", KERNELS)
    more = f"; eager is {kernels:.2g} from the kernel of each row alone" if is_off else ""
    alone = "a sample by itself is right: " if is_alone_right else ""
    asked = evidence.get("asked") or {}
    heads = f" in {asked['heads']} heads" if asked.get("heads", 0) > 1 else ""
    how_far = f" ({asked['keys']:,} keys of {asked['queries']} tokens asked{heads})" if asked.get("keys") else ""
    sees = "nothing that could be asked shows a token that sees what it may not" if evidence.get("skipped") else (
        "every token sees what it may"
    )  # fmt: skip
    return "maths", f"{alone}{sees}{how_far}, and computes something else{where}{more}"


def _unasked_padding(evidence: Evidence) -> str:
    """What has to be said where nobody could change what stands in the padding."""
    asked = evidence["packed"] or any(
        one["what"] == "padding" and one["by"] == "cell" for one in evidence["visibility"]
    )
    return "" if asked else " (what stands in the padding could not be changed)"


def _also(evidence: Evidence) -> list[tuple[str, str]]:
    """Every kind whose proof holds, once: what the table of visibility shows, then what is lost or turned otherwise."""
    listed: dict[str, str] = {}
    for kind, because in (*_violated(evidence, "reference"), *_violated(evidence, "cell")):
        listed.setdefault(kind, because)
    if evidence.get("narrowed"):
        listed.setdefault("own_keys", _ITSELF + _narrowed(evidence["narrowed"]))
    if _is_one(evidence):
        return list(listed.items())
    if evidence.get("lost"):
        lost = evidence["lost"]
        listed.setdefault("own_keys", _lost(lost, "when alone", _AMONG.get(lost.get("among"), "here")))
    if evidence.get("by_position") or evidence.get("unturned_agrees"):
        listed.setdefault("positions", "the two are one but for what depends on positions alone")
    sees = [kind for kind in ("batch", "state") if kind in listed]
    if sees and any(one["what"] == "other" and one["moved"] for one in evidence["visibility"]):
        how = {"batch": "by what is taken of all together", "state": "by what one leaves to the next"}[sees[0]]
        listed.setdefault("other_samples", f"samples see each other {how}, not by attention")
    return list(listed.items())


def _as_entries(found: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"kind": kind, "sentence": f"{KINDS[kind].said}: {because}"} for kind, because in found]


def _violated(evidence: Evidence, by: str) -> list[tuple[str, str]]:
    """What one party's table of visibility shows, first in the order of computation first, and the line of it that
    does: what leaks in one layer comes to others by the next. At one place the first of KINDS.
    """
    found: dict[str, tuple[int, str]] = {}
    whole_batch, both_ways = _is_of_the_batch(evidence), by == "cell" and _are_rows_moved_both_ways(evidence)
    if by != "cell" and evidence.get("beside") is False:
        whole_batch = False  # it takes together what is of one row
    runs_on = by == "cell" and (_runs_from_row_to_row(evidence) or _runs_on_in_a_pack(evidence))
    # Rows beside each other see each other nowhere: what moves them there takes all there is together.
    beside = evidence.get("beside") is True and evidence.get("symmetric") is not False
    for sight in evidence["visibility"]:
        kind = _shown(sight, whole_batch=whole_batch, both_ways=both_ways, beside=beside) if sight["by"] == by else None
        if runs_on and kind in ("batch", "other_samples") and (sight["first"] or {}).get("kind") == "other":
            kind = "state"
        if kind is not None:
            order = -1 if sight["first"] is None else sight["first"]["order"]
            said = line(sight) + _mechanism(kind, sight)
            found[kind] = min(found.get(kind, (order, said)), (order, said), key=lambda one: one[0])
    if "own_keys" in found and len(found) > 1:
        del found["own_keys"]
    if {"padding", "future"} <= set(found) and _is_through_padding(evidence, by):
        del found["future"]
    emptied = evidence.get("emptied") if by == "cell" else None
    if emptied:
        explained = [kind for kind in emptied["explains"] if kind in found]
        order = min((found.pop(kind)[0] for kind in explained), default=0)
        if explained:
            found["own_keys"] = (order, _of_nothing(emptied))
    kinds = list(KINDS)
    ranked = sorted(found, key=lambda one: (found[one][0], kinds.index(one)))
    return [(kind, found[kind][1]) for kind in ranked]


def _of_nothing(emptied: Mapping[str, Any]) -> str:
    many = f" (so are {emptied['tokens']} tokens)" if emptied["tokens"] > 1 else ""
    return (
        f"token {emptied['token']} of sample {emptied['sample']} is let see no key, not even its own{many}: attention "
        "then gives every slot alike, the future and padding with them"
    )


def _mechanism(kind: str, sight: Mapping[str, Any]) -> str:
    """How samples come to each other, where it is not by attention."""
    first = sight["first"]
    if sight["what"] != "other" or first is None:
        return ""
    if kind == "batch":
        return f": {first['module']} takes all there is together (a mean, a norm, who is chosen), and so they see it"
    return f": {first['module']} goes on from one sample to the next" if kind == "state" else ""


def _is_through_padding(evidence: Evidence, by: str) -> bool:
    """Whether only samples with padding see the future: padding's own states may hold all there is."""
    moved: dict[str, set[int]] = {"padding": set(), "token": set(), "other": set()}
    for sight in evidence["visibility"]:
        if sight["by"] == by and sight["what"] in moved:
            moved[sight["what"]] |= {one["sample"] for one in sight["moved"]}
    samples_there = {sight["sample"] for sight in evidence["visibility"] if sight["what"] == "other"}
    return moved["token"] <= moved["padding"] and bool(samples_there - moved["padding"])


def _is_of_the_batch(evidence: Evidence) -> bool:
    """Whether samples move each other whatever their order, or only what comes after them in a pack: a token that is
    shifted or a mean that runs on comes to each sample from the one before it, and to none from a later one.
    """
    others = [sight for sight in evidence["visibility"] if sight["what"] == "other"]
    if not others:
        return _moves_all_earlier(evidence)
    if evidence.get("symmetric") and not _is_handed_on(evidence):
        return True
    if any(sight["what"] == "padding" and sight["sample"] is not None for sight in evidence["visibility"]):
        return not _is_handed_on(evidence)
    if not any(sight["moved"] for sight in others) or _leaves_somebody_out(evidence) or _is_handed_on(evidence):
        return False
    tokens = [one for sight in evidence["visibility"] if sight["what"] == "token" for one in sight["moved"]]
    if not evidence["packed"] or any(one["sample"] == 0 for one in tokens):
        return True  # nothing of a pack comes before its first sample
    here = [sight for sight in others if sight["by"] == "cell"]
    last = max((sight["sample"] for sight in here), default=0)
    runs_on = len(here) > 1 and all(_moves_only_what_follows(sight, last) for sight in here)
    return not runs_on and not evidence.get("forward_only")


def _moves_all_earlier(evidence: Evidence) -> bool:
    """Of one sample by itself: whether a token moves all that are before it, as what takes all there is together does;
    a convolution that looks ahead moves those that it reaches. Two tokens tell nothing.
    """
    tokens = [one for one in evidence["visibility"] if one["what"] == "token" and one["moved"] and one["token"] > 1]
    return all(moved["tokens"] == sight["token"] for sight in tokens for moved in sight["moved"])


def _runs_from_row_to_row(evidence: Evidence) -> bool:
    """Whether every row of a batch moves the next one from its first token on, and none an earlier one: what is left
    of a row is what the next begins with. Two rows could as well be one that holds the greatest of all, unless it is
    so in the other order, too.
    """
    others = [one for one in evidence["visibility"] if one["what"] == "other" and one["by"] == "cell"]
    last = max((one["sample"] for one in others), default=0)
    is_run = len(others) > 2 and all(_moves_only_what_follows(one, last) for one in others)
    is_left = bool(evidence.get("forward_only")) and not _is_handed_on(evidence)
    return (is_run or is_left) and not evidence["packed"]


def _runs_on_in_a_pack(evidence: Evidence) -> bool:
    """Whether what is no attention goes on over the samples of a pack: several tokens right behind a sample move with
    it and none before, in whichever order the samples stand, and nothing of its own is given away. A shift hands on
    what it takes away, or a single token; what attends looks back at keys.
    """
    moved = [one for one in evidence["visibility"] if one["what"] == "other" and one["by"] == "cell" and one["moved"]]
    if not evidence["packed"] or not evidence.get("forward_only") or evidence.get("attends") or not moved:
        return False
    if evidence.get("handed_round") or any(one.get("given_away") for one in moved):
        return False
    return all((one.get("onward") or 0) > 1 for one in moved)


def _is_handed_on(evidence: Evidence) -> bool:
    """Whether single tokens come to a few tokens of other samples: shared, shifted or exchanged. Of what takes all
    together one token moves everybody, or every sample moves all tokens of the others. Nor does anything but an
    exchange come from each sample to one other alone.
    """
    others = [one for one in evidence["visibility"] if one["what"] == "other" and one["by"] == "cell"]
    if evidence.get("handed_round") or any(one.get("given_away") for one in others):
        return True
    if evidence.get("symmetric"):
        return False
    told = [one for one in others if one["moved"] and one.get("spread") is not None]
    if not told or max(one["spread"] for one in told) >= _SPREAD:
        return False
    return not all(one["moved"] for one in others) or max(one["reach"] for one in told) < _REACH


def _leaves_somebody_out(evidence: Evidence) -> bool:
    """Whether samples of a batch move each other while one of them moves nobody, and nobody it: what takes all there is
    together leaves no one out.
    """
    others = [one for one in evidence["visibility"] if one["what"] == "other" and one["by"] == "cell"]
    concerned = {one["sample"] for one in others if one["moved"]}
    concerned |= {moved["sample"] for one in others for moved in one["moved"]}
    return bool(concerned) and bool({one["sample"] for one in others} - concerned)


def _moves_only_what_follows(sight: Mapping[str, Any], last: int) -> bool:
    """Whether a sample moves the one after it from its first token on, and none before it."""
    moved, sample = sight["moved"], sight["sample"]
    follows = any((one["sample"], one["first"]) == (sample + 1, 0) for one in moved)
    return (follows or sample == last) and all(one["sample"] > sample for one in moved)


def _are_rows_moved_both_ways(evidence: Evidence) -> bool:
    """Whether rows of a batch, which see each other nowhere, move those before them and those after. Where behind
    all modules each moves one other of three and more, rows are in another order: what takes all together moves all.
    """
    others = [one for one in evidence["visibility"] if one["what"] == "other" and one["by"] == "cell"]
    ways = {moved["sample"] < one["sample"] for one in others for moved in one["moved"]}
    is_left_out = _leaves_somebody_out(evidence) or _is_handed_on(evidence)
    if len(others) > 2 and all(len(one["moved"]) == 1 and one["first"] is None for one in others):
        return False
    return not evidence["packed"] and len(ways) == 2 and not is_left_out


def _shown(sight: Mapping[str, Any], *, whole_batch: bool, both_ways: bool = False, beside: bool = False) -> str | None:
    where = (sight["first"] or {}).get("kind")
    if sight["what"] == "token" and not sight["moved"]:
        return "own_keys" if sight["deaf"] else None
    if not sight["moved"]:
        return None
    if sight["what"] == "seed":
        return "random"
    if sight["what"] in ("again", "first", "fresh"):
        return "state"
    if sight["what"] in (*_MORE, "shifted"):
        return None  # told only where nothing else tells: what is counted with the padding moves with it
    if where == "router" and sight["what"] == "other" and sight["by"] == "cell" and not sight.get("given_away"):
        return "batch"  # who comes first has a place with an expert: later samples alone may move
    if where == "mixer" and beside and sight["what"] in ("token", "other"):
        return "batch"
    if where in ("other", "router") and whole_batch:
        # What works on each token by itself has nothing to see of another: it takes all there is together.
        return "batch"
    if sight["what"] == "padding":
        return "padding"
    if sight["what"] == "other":
        if where == "state" or sight["by"] == "reference":
            return "state"
        return "batch" if both_ways else "other_samples"
    return "future"


def line(sight: Mapping[str, Any]) -> str:
    """A line of the table: what was changed, and who moved."""
    of_row = "" if sight["sample"] is None else f" of sample {sight['sample']}"
    amid = "" if sight.get("amid") is None else f" (where all others are token {sight['amid']} alone)"
    changed = {
        "again": "nothing (again after other tokens)", "other": f"sample {sight['sample']}{amid}",
        "padding": f"the padding{of_row}",
        "seed": "the seed alone (dropout left on?)", "fresh": "nothing (in a model loaded anew, after other tokens)",
        "first": "nothing (in the first call of a model loaded anew)",
        "wider": "the amount of padding, not what stands in it,",
        "company": "the number of samples in the pack, not one of these,",
        "shifted": "how much stands in front, not what, nor how much behind,",
        "token": f"token {sight['token']} of every sample",
    }[sight["what"]]  # fmt: skip
    if not sight["moved"]:
        deaf = f"not even the next token of {samples(sight['deaf'])}" if sight["deaf"] else "nothing it must not"
        return f"changing {changed} moves {deaf}"
    moved = ", ".join(
        f"{one['tokens']} {one['relation'] + ' ' if one['relation'] == 'earlier' else ''}token"
        f"{'s' * (one['tokens'] > 1)} of sample {one['sample']} (from position {one['first']})"
        for one in sight["moved"][:3]
    )
    start = f" from {sight['first']['module']} on" if sight["first"] else ""
    return f"changing {changed} moves {moved}{start}"


def _noise(evidence: Evidence, epsilon: float, compiled: bool) -> tuple[bool, str]:
    """Whether a cell that is right in float64 is no further from that truth than each row alone is."""
    arithmetic, truth = evidence["arithmetic"], evidence["truth"]
    same = f"in {arithmetic} it is what each row alone is (a token {evidence['apart']:.2g} apart at most)"
    if not {"reference", "cell"} <= set(truth):
        return False, f"{same}; how far its dump is from that is not known"
    alone, cell = truth["reference"], truth["cell"]
    figures = f"its tokens are off that by {cell['worst']:.2g} at most, those of each row alone by {alone['worst']:.2g}"
    if _is_another_model(evidence, epsilon):
        why = "is it another one every time it is built (weights drawn without a seed)?"
        off = f"{alone['typical']:.2g} off typically"
        return False, f"in {arithmetic} the model is another than in its dumps, {off}: {why}"
    is_noise = is_rounding(alone, cell, epsilon, is_mixture=evidence["mixture"])
    # Where there is no finer arithmetic than the dump's, each row alone is the truth itself, and off by nothing.
    if is_noise or cell["worst"] < _last_places(evidence):
        return True, f"{same}; as recorded here {figures}"
    if _is_no_rounding(evidence):
        return False, f"in {arithmetic} as well a token is {evidence['apart']:.2g} of its norm off; {figures}"
    if compiled:
        return False, f"uncompiled, {same}; what the compiler made is not: {figures}"
    return False, f"{same}, and more than rounding in its own dtype: {figures}"


def is_rounding(alone: Mapping[str, float], cell: Mapping[str, float], epsilon: float, *, is_mixture: bool) -> bool:
    """Whether one is no further from the truth than the other is, as the noise of their dtype goes (`why.figures`)."""
    return cell["typical"] <= max(TYPICAL * alone["typical"], epsilon) and (
        cell["most"] <= max(MOST * alone["most"], epsilon)
        if is_mixture
        else cell["worst"] <= max(WORST * alone["worst"], 2 * epsilon)
    )


def _is_no_rounding(evidence: Evidence) -> bool:
    """Whether most of what a dump is off by is there in the finest arithmetic, too, little as it may be, and is more
    than that arithmetic's own last places: where there is no finer one than the dump's, it is the same all over.
    """
    cell = evidence["truth"].get("cell")
    return cell is not None and evidence["apart"] >= max(cell["worst"] / 2, _last_places(evidence))


def _is_another_model(evidence: Evidence, epsilon: float) -> bool:
    """Whether each row alone, in float32 or finer, is further off itself than that dtype takes anything."""
    alone = evidence["truth"].get("reference")
    return alone is not None and epsilon <= (DTYPES["float32"].eps or 0.0) and alone["typical"] > _NO_ROUNDING


def _last_places(evidence: Evidence) -> float:
    finest = DTYPES.get(evidence["arithmetic"])
    return 0.0 if finest is None else _LAST_PLACES * (finest.eps or 0.0)


def _is_clean(evidence: Evidence) -> bool:
    return (
        not evidence.get("lost")
        and not evidence.get("narrowed")
        and not any(_shown(sight, whole_batch=False) for sight in evidence["visibility"])
    )


def _told(evidence: Evidence) -> dict[str, Any]:
    """The document's part."""
    names = ("arithmetic", "apart", "logp_apart", "kernels_apart", "truth", "smallest", "first", "visibility")
    told = {name: evidence[name] for name in names} | {
        name: evidence.get(name) for name in ("asked", "beside", "symmetric", "looked_at", "narrowed")
    }
    told["skipped"] = list(evidence.get("skipped") or ())
    return {**told, "visibility": [{**sight, "sentence": line(sight)} for sight in evidence["visibility"]]}


def _case(small: Mapping[str, Any], first: Mapping[str, str] | None) -> str:
    tokens = small["tokens"]
    listed = " + ".join(map(str, tokens[:4])) + (" ..." if len(tokens) > 4 else "")
    where = f", {first['module']}" if first else ""
    depth = small["layers"]
    if depth is not None and depth < small["of_layers"]:
        where = f", the first {f'{depth} layers' if depth > 1 else 'layer'} of {small['of_layers']}{where}"
    return f"{small['rows']} row{'s' * (small['rows'] > 1)}, {listed} token{'s' * (sum(tokens) > 1)}{where}"


def samples(numbers: Sequence[int]) -> str:
    """`sample 1`, `samples 1..3`, `samples 0, 2`, or `no sample`."""
    if not numbers:
        return "no sample"
    if len(numbers) == 1:
        return f"sample {numbers[0]}"
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"samples {numbers[0]}..{numbers[-1]}"
    return "samples " + ", ".join(map(str, numbers))


def _past(value: float | str, limit: float) -> bool:
    return isinstance(value, str) or not value <= limit
