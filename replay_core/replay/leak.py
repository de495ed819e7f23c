"""Why a cell disagrees with each row alone: samples that see each other, padding that is seen, or neither. numpy-free.

A leak is proved by packing the samples once more, last first: a sample that was exact and no longer is (or
the other way round) depends on its neighbours. Nothing else moves with the order. That sample 0 be exact
is not required: a wrong form of mask breaks it as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PerSample = Sequence[Mapping[str, Any]]

_CAUSES = {
    "mask_set": "attention_mask set",
    "use_cache": "use_cache on",
    "positions_dropped": "position_ids not given or not restarting",
    "boundary": "position_ids or cu_seqlens restart at the wrong token",
    "foreign_keys": "a mask that allows keys of another sample",
    "padded_mask": "a mask that does not fit the padding",
    "mask_missing": "no attention_mask",
}


def broken_samples(rows: PerSample, limit: float) -> list[int]:
    """Samples whose worst token is further off than `limit` (relative L2 of the final hidden state)."""
    return [row["sample"] for row in rows if row["worst_token"] and _past(row["worst_token"]["rel_l2"], limit)]


def proof(
    cell: PerSample,
    turned: PerSample | None,
    limit: float,
    findings: Sequence[Mapping[str, str]],
    *,
    is_packed: bool,
    left_pads: Sequence[int] = (),
    not_finite: str | None = None,
) -> dict[str, Any] | None:
    """What is wrong with a cell whose samples are off; None where none is.

    Args:
        cell: its samples against each row alone.
        turned: the samples of the same pack run last sample first, where it was run.
        limit: how far a worst token may be off.
        findings: what the inputs themselves show (`visibility.check`), as mappings.
        left_pads: padding slots before each row's first token (padded batches).
        not_finite: the model's own word that it computes NaN or infinities: then nothing else can be told.

    Returns:
        kind (leak | padding | inputs | elsewhere), off and exact (samples), off_reversed, moved (samples whose
        exactness changed with the order), causes (the findings' codes), sentence.
    """
    off = broken_samples(cell, limit)
    if not off:
        return None
    filled = [row["sample"] for row in cell if row["tokens"]]
    exact = [sample for sample in filled if sample not in off]
    off_turned = None if turned is None else broken_samples(turned, limit)
    moved = [] if off_turned is None else sorted(set(off) ^ set(off_turned))
    codes = [finding["code"] for finding in findings]
    answer = {"off": off, "exact": exact, "off_reversed": off_turned, "moved": moved, "causes": codes}
    said = "; ".join(finding["text"] for finding in findings)
    if not_finite:
        return {"kind": "elsewhere", **answer, "sentence": f"{samples(off)} off: {not_finite}"}
    if is_packed and moved:
        return {"kind": "leak", **answer, "sentence": _leak(off, exact, off_turned or [], codes, said)}
    if is_packed:
        return {"kind": "inputs" if codes else "elsewhere", **answer, "sentence": _still(off, filled, codes, said)}
    return {"kind": "padding" if _is_padding(off, left_pads, codes) else "elsewhere", **answer,
            "sentence": _padding(off, left_pads, codes, said)}  # fmt: skip


def _leak(off: list[int], exact: list[int], turned: list[int], codes: list[str], said: str) -> str:
    moves = f"; packed last first, {samples(turned)} {_are(turned)} off instead" if exact else ""
    mixed = (
        "the inputs are right, so the attention itself mixes samples (a kernel without its mask function, or a model "
        "that builds its mask without the position_ids)"
    )
    why = said or mixed
    causes = f" ({', '.join(_CAUSES.get(code, code) for code in codes)})" if codes else ""
    return f"{samples(off)} off: sequences see each other{moves}: {why}{causes}"


def _still(off: list[int], filled: list[int], codes: list[str], said: str) -> str:
    whole = "every sample" if off == filled else samples(off)
    turning = "whatever the order of the pack, so samples do not see each other"
    return f"{whole} off, {turning}" + (f": {said}" if codes else ": the setting itself computes something else")


def _is_padding(off: list[int], left_pads: Sequence[int], codes: list[str]) -> bool:
    if "padded_mask" in codes or "mask_missing" in codes:
        return True
    padded = [sample for sample, pads in enumerate(left_pads) if pads]
    # Right pads cannot reach a causal model's tokens; left pads can. Rows without any are the control.
    return bool(padded) and len(padded) < len(left_pads) and set(off) == set(padded)


def _padding(off: list[int], left_pads: Sequence[int], codes: list[str], said: str) -> str:
    if not _is_padding(off, left_pads, codes):
        return f"padded: {samples(off)} off against each row alone, and not along the padding" + (
            f": {said}" if said else ""
        )
    why = said or "the rows with padding on the left are off and the others are exact"
    return f"padded: {samples(off)} off: tokens see padding: {why}"


def samples(numbers: Sequence[int]) -> str:
    """`sample 1`, `samples 1..3`, `samples 0, 2`, or `no sample`."""
    if not numbers:
        return "no sample"
    if len(numbers) == 1:
        return f"sample {numbers[0]}"
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"samples {numbers[0]}..{numbers[-1]}"
    return "samples " + ", ".join(map(str, numbers))


def _are(samples: Sequence[int]) -> str:
    return "is" if len(samples) < 2 else "are"


def _past(value: float | str, limit: float) -> bool:
    return isinstance(value, str) or not value <= limit
