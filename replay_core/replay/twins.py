"""Which settings are one and the same: two flags with one kernel are one cell. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from replay_core.replay.flags import DEFAULTS, FLAGS, Flags

#: The one fused kernel of torch's attention on a CPU: what sdpa picks there and what sdpa-flash pins.
CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_FUSED_ON_CPU = ("sdpa", "sdpa-flash", "flash")
#: Effective settings in which two cells may differ and still have run the same.
_NOT_SETTINGS = ("attention_flag", "attn_implementation")
#: Mistakes that can only be made in a pack, and those that only a padded batch can have.
_IN_PACKS = ("boundary", "early", "foreign_key", "no_positions", "run_on")
_IN_PADDING = (
    "padded_mask",
    "padded_zeros",
    "from_one",
    "other_side",
    "response_anew",
    "response_wide",
    "state_unmasked",
)


def normal(flags: Flags, rows: int) -> Flags:
    """The settings without those that have no effect on a batch of `rows` samples beside the others."""
    if flags.rows_per_forward is not None and flags.rows_per_forward > 1 and flags.rows_per_forward >= rows:
        flags = replace(flags, rows_per_forward=None)
    alone = flags.is_reference or rows < 2
    if flags.is_reference:
        flags = replace(flags, packing=False)
    if alone:
        flags = replace(flags, block_mask=True)
    idle = _IN_PADDING if flags.packing else _IN_PACKS
    if flags.fault in (*idle, *(_IN_PACKS if alone else ()), *(_IN_PADDING if flags.is_reference else ())):
        flags = replace(flags, fault="none")
    return replace(flags, **{name: DEFAULTS[name] for name in FLAGS if flags.idle(name)})


def twin(flags: Flags, rows: int, ran: Sequence[tuple[int, Mapping[str, Any]]]) -> int | None:
    """The number of a cell that already did what `flags` would do; None if none did.

    Args:
        rows: samples of the batch.
        ran: number and cell mapping of every cell so far.
    """
    wanted = normal(flags, rows)
    for number, cell in ran:
        known = normal(Flags.from_mapping(cell["flags"]), rows)
        if known == wanted:
            return number
        fused = wanted.device == "cpu" and {known.attention, wanted.attention} <= set(_FUSED_ON_CPU)
        # Only a cell whose operators were seen tells that the kernel is that one.
        saw = (cell["effective"] or {}).get("attention") == CPU_FLASH
        if fused and saw and replace(known, attention=wanted.attention) == wanted:
            return number
    return None


def ran_alike(effective: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """What two cells that ran must have in common to be one: kernels, settings, and the flags no setting tells of."""
    settings = {name: value for name, value in effective.items() if name not in _NOT_SETTINGS}
    asked = Flags.from_mapping(flags)
    untold = {name: flags[name] for name, flag in FLAGS.items() if flag.effective is None and not asked.idle(name)}
    return {**settings, **untold}
