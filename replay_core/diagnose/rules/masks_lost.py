"""Masks that came with the samples and that the update has lost: the loss counts what they leave out."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct, field

from replay_core.diagnose.batch import StepBatch, counting
from replay_core.diagnose.case import Case
from replay_core.diagnose.columns import Column
from replay_core.diagnose.finding import Evidence, Finding, Where, finding, share, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import Skip, rule
from replay_core.diagnose.rules.loss import is_made_of_its_tokens
from replay_core.diagnose.sheets import Sheet

#: Masks of tokens, and of samples with what they say of one that stays.
_TOKENS = ("tool_mask", "loss_mask", "response_mask")
_SAMPLES = {"sample_mask": True, "remove_sample": False}
#: What each leaves out, in words.
_WHAT = {
    "tool_mask": "tokens of tools", "loss_mask": "tokens", "response_mask": "tokens",
    "sample_mask": "tokens of samples", "remove_sample": "tokens of samples",
}  # fmt: skip

_Placed = tuple[Sheet, list[int | None]]


class _LostMask(Struct):
    """One mask over the steps: what the update counts of what it leaves out."""

    mask: Column
    own: Column
    place: Where
    whose: str
    """Who recorded it, in words."""
    is_held: bool
    """Whether the update's records hold a mask of that name, too."""
    counted: int = 0
    left: int = 0
    silent: int = 0
    """Of these, tokens to which the engine gives a log-probability of exactly 0."""
    steps: list[int | None] = field(default_factory=list)
    proved: int = 0
    """Steps whose losses are made with these tokens, and not without them."""
    refuted: int = 0
    """Steps whose losses are made without them, and not with them."""


@rule("D129", "the loss counts what a mask of the samples leaves out", link="masks", scope="case", lasts=True,
      explains=("D07", "D09", "D18", "D19", "D28", "D41", "D48", "D50", "D58", "D81", "L10"),
      source="trl#6439: a replay buffer that drops tool_mask; the tool's tokens are trained on")  # fmt: skip
def masks_lost(case: Case) -> Iterator[Finding]:
    """Masks recorded with the samples (tool_mask, loss mask, response mask, samples left out) beside those of the
    update's micro-batches: tokens that the update's own masks count and a mask of the samples leaves out. An error
    where the losses of several micro-batches are made with these tokens and not without them; nothing where they are
    made without them; else a warning. A mask that leaves out more than the samples' does is normal.
    """
    looked, found = False, dict[str, _LostMask]()
    for batch in case.batches():
        every = batch.columns.sheets
        updates = [one for one in every if all(part.held.record.key.micro is not None for part in one[0].parts)]
        samples = [one for one in every if all(part.held.record.key.micro is None for part in one[0].parts)]
        own = _first(batch, updates, "loss_mask", "response_mask")
        if own is None or not samples:
            continue
        looked = True
        counted_N = own.said_N & (own.values_N != 0)
        for name in ("tool_mask", *_SAMPLES):
            if (held := _first(batch, updates, name)) is not None:
                counted_N &= ~_left_out_N(held)
        for name in (*_TOKENS, *_SAMPLES):
            mask = _first(batch, samples, name)
            if mask is None:
                continue
            left_N = counted_N & _left_out_N(mask)
            if name not in found and not left_N.any():
                continue
            is_held = _first(batch, updates, name) is not None
            whose = "the trajectory's" if samples[0][0].name == "trajectory" else "the samples'"
            lost = found.setdefault(name, _LostMask(mask, own, batch.laid.where(name, at=left_N), whose, is_held))
            lost.counted += int(counted_N.sum())
            if left_N.any():
                _take(lost, batch, counted_N, left_N)
    if not looked:
        raise Skip("needs masks of the samples, and those of the update's micro-batches")
    yield from (_told(name, lost) for name, lost in found.items() if not lost.refuted)


def _first(batch: StepBatch, sheets: list[_Placed], *names: str) -> Column | None:
    """The first of these tensors that one of the sheets has."""
    each = (batch.columns.of_sheet(sheet, places, name) for name in names for sheet, places in sheets)
    return next((column for column in each if column is not None and column.said_N.any()), None)


def _left_out_N(mask: Column) -> Array:
    """The tokens that a mask leaves out [N]; where it says nothing of one, none."""
    stays = _SAMPLES.get(mask.name, True)
    left_N: Array = mask.said_N & ((mask.values_N != 0) != stays)
    return left_N


def _take(lost: _LostMask, batch: StepBatch, counted_N: Array, left_N: Array) -> None:
    """Add a step that shows it, with what its losses say."""
    lost.left += int(left_N.sum())
    lost.steps.append(batch.step)
    rollout = batch.columns.of("rollout_logprobs")
    if rollout is not None:
        lost.silent += int((left_N & rollout.said_N & (rollout.values_N == 0)).sum())
    with_them, without = (is_made_of_its_tokens(counting(batch, each)) for each in (counted_N, counted_N & ~left_N))
    lost.proved += with_them is True and without is False
    lost.refuted += without is True and with_them is False


def _told(name: str, lost: _LostMask) -> Finding:
    mask, own = lost.mask, lost.own
    silent: list[Evidence] = []
    if lost.silent:
        silent.append(shown("of them with an engine's log-probability of exactly 0", share(lost.silent, lost.left)))
    return finding(
        "error" if lost.proved else "warning",
        f"the loss counts {lost.left} {_WHAT[name]} that {lost.whose} {mask.ref.name} leaves out, of "
        f"{lost.counted} that it counts"
        if lost.proved
        else f"the update's {own.ref.name} counts {lost.left} {_WHAT[name]} that {lost.whose} {mask.ref.name} leaves "
        f"out, of {lost.counted}",
        lost.place,
        shown("counted tokens that it leaves out", lost.left, "0", f"{mask.source}; {own.source}"),
        shown(f"the update's records hold a {mask.ref.name}", lost.is_held),
        *silent,
        shown("steps whose losses are made with these tokens, and not without", share(lost.proved, len(lost.steps))),
        cause=f"{mask.ref.name} is lost between rollout and update (a buffer, a split into micro-batches, a list of "
        "keys that leaves it out), or is not multiplied into the loss mask: what is trained on was not sampled by the "
        "policy"
        if not lost.is_held
        else "the mask is made anew or changed between rollout and update, or is of other rows",
        next_step=f"print the sum of the loss mask where {mask.ref.name} is 0, just before the loss",
        steps=lost.steps,
    )
