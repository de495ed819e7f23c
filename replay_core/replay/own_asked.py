"""Whom the trainer's own forward lets move whom: tokens are changed and it is called again, as the model is asked
(`interventions`). Its modules are not watched, since it calls them as it likes; what goes into the head is, where that
is a vector per slot: of a log-probability its own token is a part, so it cannot tell whether the token was seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from replay_core.dumps import open_run
from replay_core.errors import CellError
from replay_core.jobs import LogLine, OnEvent, Progress, ignore
from replay_core.replay import attention, called_whole, own_code, settings
from replay_core.replay.batch import MicroBatch, resolve_temperature
from replay_core.replay.cell import BatchReplay
from replay_core.replay.held import HOLDER, Holder
from replay_core.replay.interventions import in_dtype, is_half
from replay_core.replay.model import LoadedModel, prepare
from replay_core.replay.plan import ITSELF, ReplayPlan
from replay_core.replay.reading import read_batch
from replay_core.replay.recorded import replayed
from replay_core.samples.layout import Bools, Ints

#: Nats, and share of a vector's norm, from which on something has moved; of a half.
_MOVED, _MOVED_OF_HALF = 1e-4, 0.02
#: Part of what it is off by that a change must move.
_PART = 0.02
#: Seeds: one that is always the same and another that is not is a draw; whatever knows of no seed is none.
_SEEDS = (1, 1, 2, 1)
#: Nats up to which the log-probabilities of one vector are one.
_ONE = 0.01
#: Rows that are changed one after the other.
_MOST_ROWS = 4
#: Rows of which each that moves one other alone is handed on.
_ROUND = 3

Floats = NDArray[np.float64]


class Shown(Struct, frozen=True):
    """A kind of cause (`kinds.KINDS`) that a change of the batch showed, what moved with it, and in which rows."""

    kind: str
    because: str
    rows: tuple[int, ...] = ()

    def to_mapping(self) -> dict[str, str]:
        return {"kind": self.kind, "because": self.because}


class OwnAnswer(Struct, frozen=True):
    """What one call gave: log-probabilities [B, S], index t about token t + 1, and what went into the head [B, S, D]
    (None where that was no vector per slot, or the head was called several times).
    """

    values_BS: Floats
    head_BSD: torch.Tensor | None = None


class OwnForward(Struct):
    """The trainer's own forward of one batch, whose tokens may be changed."""

    plan: ReplayPlan
    cell: BatchReplay
    calls: int = 0
    within: float = _MOVED
    #: Whether what goes into the head stands in the slots of the batch; nothing is heard of it where it does not.
    is_heard: bool = True

    @property
    def name(self) -> str:
        assert self.plan.forward is not None
        return self.plan.forward

    @property
    def batch(self) -> MicroBatch:
        return self.cell.batch

    def __call__(self, ids_BS: Ints | None = None) -> OwnAnswer:
        """Raises CellError where it raises."""
        self.calls += 1
        self.cell.on_event(Progress(self.calls, None, "its forward, with other tokens"))
        causal_lm, shape = self.cell.model.causal_lm, tuple(self.batch.ids_BS.shape)
        with _head_of(causal_lm) as heard, torch.no_grad():
            if self.name == ITSELF:
                values_BS = called_whole.logprobs_BS(self.cell, ids_BS)
            else:
                given = {**given_to(self.cell, ids_BS), "temperature": self.cell.temperature}
                values_BS = own_code.logprobs(self.name, self.plan.forward_path, self.cell.model.for_trainer, given)
        is_one = self.is_heard and len(heard) == 1 and tuple(heard[0].shape[:2]) == shape
        head = heard[0] if is_one else None
        return OwnAnswer(values_BS.double().numpy(), None if head is None else head.detach().double().cpu())

    def other(self, chosen_BS: Bools) -> Ints:
        """The tokens with others in the chosen slots, of those that the batch holds."""
        ids_BS: Ints = self.batch.ids_BS.copy()
        words = np.unique(ids_BS[self.batch.valid_BS])
        words = words if words.size > 1 else np.array([0, 1])
        ids_BS[chosen_BS] = words[(np.searchsorted(words, ids_BS[chosen_BS]) + 1) % words.size]
        return ids_BS

    def moved(self, a: OwnAnswer, b: OwnAnswer) -> Bools:
        """[B, S]: which log-probabilities that count are not what they were."""
        found: Bools = self.next_BS & ~(np.abs(a.values_BS - b.values_BS) <= self.within)
        return found

    def moved_below(self, a: OwnAnswer, b: OwnAnswer, least: float) -> Bools | None:
        """[B, S]: which tokens come to the head otherwise; None where that is not known."""
        if a.head_BSD is None or b.head_BSD is None:
            return None
        norm_BS = torch.maximum(a.head_BSD.norm(dim=-1), b.head_BSD.norm(dim=-1)).clamp(min=1e-30)
        off_BS = (a.head_BSD - b.head_BSD).norm(dim=-1) / norm_BS
        found: Bools = self.batch.valid_BS & ~(off_BS <= least).numpy()
        return found

    @property
    def next_BS(self) -> Bools:
        """Slots with a next token."""
        has_BS = np.zeros(self.batch.ids_BS.size, dtype=bool)
        has_BS[self.batch.layout().slots("next")] = True
        return has_BS.reshape(self.batch.ids_BS.shape)


def given_to(cell: BatchReplay, ids_BS: Ints | None = None) -> dict[str, torch.Tensor]:
    """What the trainer's own forward is given, but for the temperature; `ids_BS`: other tokens."""
    arrangement = cell.arrangement
    batch = {
        "input_ids": arrangement.input_ids if ids_BS is None else ids_BS,
        "attention_mask": arrangement.attention_mask,
        "position_ids": arrangement.position_ids,
        "response_mask": arrangement.response_mask,
    }
    return {name: torch.from_numpy(one).to(cell.flags.device) for name, one in batch.items() if one is not None}


def ask(
    plan: ReplayPlan, said: str, off: float, on_event: OnEvent = ignore, holder: Holder | None = None
) -> list[dict[str, str]]:
    """What changes of the batch show of the plan's `forward`, what explains most first.

    Args:
        said: the dump of what it gave in a process of its own.
        off: how far that is off each row alone, in nats on average: a small part of it is nobody's cause.

    Raises:
        RldbgError: it cannot be called.
    """
    flags, _ = attention.resolve(plan.flags)
    run = open_run(Path(plan.dump))
    recorded = read_batch(run, plan)
    temperature, _ = resolve_temperature(plan.temperature, recorded.batch.temperature)
    as_it_is = flags.padding == "recorded" or plan.forward == ITSELF
    batch = recorded.batch if as_it_is else recorded.batch.padded_on(flags.padding)
    if plan.forward != ITSELF:
        flags = replace(flags, packing=False, rows_per_forward=None, padding="recorded")
    on_event(LogLine("its forward: whom it lets move whom"))
    with settings.applied(flags, plan.seed), torch.no_grad():
        model, _ = (holder or HOLDER).model(replace(plan, flags=flags), run, recorded.batch)
        prepare(model, flags)
        cell = BatchReplay(replace(plan, capture="none"), flags, batch, model, temperature, on_event)
        before = OwnAnswer(replayed(open_run(Path(said)), batch))
        own = OwnForward(plan, cell, within=max(_MOVED_OF_HALF if is_half(model) else _MOVED, _PART * off))
        own_code.forget(own.name)
        try:
            shown = _kept(own, before)
            return [one.to_mapping() for one in ([shown] if shown is not None else _in_finer(own, model, off))]
        finally:
            own_code.forget(own.name)  # what it keeps now is of other tokens


def _kept(own: OwnForward, before: OwnAnswer) -> Shown | None:
    """What it gives after other tokens and did not before, or under another seed."""
    own(own.other(own.batch.valid_BS))
    after = own()
    moved_BS = own.moved(before, after)
    if not moved_BS.any():
        return None
    drawn = []
    for seed in _SEEDS:
        with settings.seeded(seed):
            drawn.append(own())
    first, again, other, last = drawn
    is_drawn = not own.moved(first, again).any() and not own.moved(first, last).any()
    if is_drawn and own.moved(first, other).any():
        return Shown("random", f"the seed alone moves {_many(own.moved(first, other))} (dropout left on?)")
    return Shown("state", f"nothing was changed but what it was called with before, and {_many(moved_BS)} moved")


def _in_finer(own: OwnForward, model: LoadedModel, off: float) -> list[Shown]:
    """What tokens move, in float32 where the model is in a half and its code takes that."""
    if is_half(model):
        with contextlib.suppress(CellError), in_dtype(model, torch.float32):
            return _sights(replace(own, within=max(_MOVED, _PART * off)))
    return _sights(own)


def _sights(own: OwnForward) -> list[Shown]:
    base = own()
    if own.moved(base, own()).any():
        raise CellError("it gives something else each time")
    own.is_heard = _is_by_slot(own, base)
    base = base if own.is_heard else replace(base, head_BSD=None)
    shown = [_of_samples(own, base), _of_tokens(own, base), _of_padding(own, base)]
    found = [one for one in shown if one is not None]
    by_kind = {one.kind: one for one in found}
    if {"future", "padding"} <= by_kind.keys() and _is_through_padding(own, by_kind["future"].rows):
        found.remove(by_kind["future"])
    lost = _deaf(own, base) if not found else None
    return found if lost is None else [lost]


def _is_through_padding(own: OwnForward, rows: Sequence[int]) -> bool:
    """Whether only rows with padding see their future, and others are there: padding may hold all there is."""
    has_padding_B = np.asarray((~own.batch.valid_BS).any(axis=1))
    return bool(has_padding_B[list(rows)].all() and not has_padding_B.all())


def _is_by_slot(own: OwnForward, base: OwnAnswer) -> bool:
    """Whether what goes into the head gives, slot by slot, the log-probabilities that came out: rows may have been
    moved or sorted in between.
    """
    head = own.cell.model.causal_lm.get_output_embeddings()
    if base.head_BSD is None or head is None:
        return False
    next_BS = own.next_BS
    ids_BS = torch.from_numpy(own.batch.ids_BS)
    at_BS = torch.from_numpy(next_BS)
    parameter = next(head.parameters())
    logits_NV = head(base.head_BSD[at_BS].to(parameter)).float().cpu() / own.cell.temperature
    found_N = logits_NV.log_softmax(-1).gather(-1, ids_BS.roll(-1, 1)[at_BS][:, None])[:, 0].numpy()
    return bool((np.abs(found_N - base.values_BS[next_BS]) <= _ONE).all())


def _of_samples(own: OwnForward, base: OwnAnswer) -> Shown | None:
    """Rows that move others. Both those before them and those after: it takes all of the batch together, unless rows
    are handed on.
    """
    valid_BS, position_BS = own.batch.valid_BS, own.batch.layout().position_BS
    moves, given_away = dict[int, list[int]](), list[int]()
    rows = [row for row in range(own.batch.rows) if valid_BS[row].any()]
    chosen = [*rows[: _MOST_ROWS - 1], *rows[_MOST_ROWS - 1 :][-1:]]
    example = ""
    for row in chosen if len(rows) > 1 else []:
        mine_BS = valid_BS & (np.arange(own.batch.rows)[:, None] == row)
        other = own(own.other(mine_BS))
        moved_BS = own.moved(base, other) & ~mine_BS
        moves[row] = np.flatnonzero(moved_BS.any(1)).tolist()
        # Its first token is no label: where it moves nothing of its own row, that row is another's now.
        if moves[row] and not (own.moved(base, own(own.other(mine_BS & (position_BS == 0)))) & mine_BS).any():
            given_away.append(row)
        if moves[row] and not example:
            example = f"changing row {row} moves {_many(moved_BS)} of row{'s' * (len(moves[row]) > 1)} "
            example += ", ".join(map(str, moves[row][:4])) + ": which rows stand beside it decides"
    movers = {row: there for row, there in moves.items() if there}
    if not movers:
        return None
    ways = {one < row for row, there in movers.items() for one in there}
    is_handed = bool(given_away) or (len(rows) >= _ROUND and all(len(there) == 1 for there in movers.values()))
    takes_all = len(ways) > 1 and len(movers) == len(moves) and not is_handed
    if not is_handed and len(movers) < len(moves):
        takes_all = _is_another_in_its_place(own, list(movers), [row for row in moves if row not in movers])
    return Shown("batch" if takes_all else "other_samples", example)


def _is_another_in_its_place(own: OwnForward, movers: list[int], rest: list[int]) -> bool:
    """Whether a row that moved no other does as soon as those that did have other tokens: of what takes the greatest of
    all one row is that, and then the next. What is read of one row is of that row still.
    """
    number_B1 = np.arange(own.batch.rows)[:, None]
    base = own(own.other(own.batch.valid_BS & np.isin(number_B1, movers)))
    for row in rest:
        others = own(own.other(own.batch.valid_BS & np.isin(number_B1, [*movers, row])))
        if (own.moved(base, others) & (number_B1 != row)).any():
            return True
    return False


def _of_tokens(own: OwnForward, base: OwnAnswer) -> Shown | None:
    """A token that moves what comes before it. The log-probability of the token itself stands right before it."""
    position_BS = own.batch.layout().position_BS
    for token in _places(own):
        chosen_BS = position_BS == token
        moved_BS = _earlier(own, base, chosen_BS, token)
        rows = []
        for row in np.flatnonzero(moved_BS.any(1))[:_MOST_ROWS].tolist():
            mine_BS = chosen_BS & (np.arange(own.batch.rows)[:, None] == row)
            # With the tokens of other rows as they are: it may be those that move it.
            if own.batch.rows == 1 or _earlier(own, base, mine_BS, token)[row].any():
                rows.append(row)
        if rows:
            many = _many(moved_BS[rows[:1]])
            return Shown("future", f"changing token {token} moves {many} before it in row {rows[0]}", tuple(rows))
    if own.name == ITSELF and called_whole.moved_by_label(own.cell):
        return Shown("future", "changing the last token of row 0 moves the logits before it, whose label it is", (0,))
    return None


def _earlier(own: OwnForward, base: OwnAnswer, chosen_BS: Bools, token: int) -> Bools:
    """[B, S]: what moves before that token of its row, when it is another in the chosen slots."""
    position_BS, other = own.batch.layout().position_BS, own(own.other(chosen_BS))
    moved_BS, below_BS = own.moved(base, other) & (position_BS < token - 1), own.moved_below(base, other, own.within)
    return moved_BS if below_BS is None else moved_BS | (below_BS & (position_BS < token))


def _of_padding(own: OwnForward, base: OwnAnswer) -> Shown | None:
    padding_BS = ~own.batch.valid_BS
    if not padding_BS.any():
        return None
    words = np.unique(own.batch.ids_BS[own.batch.valid_BS])
    for word in dict.fromkeys(words[[0, -1, words.size // 2]].tolist()):
        moved_BS = own.moved(base, own(np.where(padding_BS, word, own.batch.ids_BS)))
        if moved_BS.any():
            return Shown("padding", f"changing what stands in the padding moves {_many(moved_BS)}")
    return None


def _deaf(own: OwnForward, base: OwnAnswer) -> Shown | None:
    """A token that moves nothing after it in its row, though something stands there."""
    position_BS = own.batch.layout().position_BS
    for token in _places(own):
        chosen_BS = position_BS == token
        other = own(own.other(chosen_BS))
        below_BS = own.moved_below(base, other, 0.0)
        moved_BS = (np.abs(base.values_BS - other.values_BS) > 0) & own.next_BS
        if below_BS is not None:
            moved_BS |= below_BS
        after_BS = (position_BS > token) & (own.next_BS if below_BS is None else own.batch.valid_BS)
        lost = np.flatnonzero(after_BS.any(1) & ~(moved_BS & after_BS).any(1))
        if lost.size:
            return Shown("own_keys", f"changing token {token} moves nothing after it in row {lost[0]}")
    return None


def _places(own: OwnForward) -> Sequence[int]:
    """Positions of which each row's token is changed."""
    lengths = own.batch.valid_BS.sum(axis=1)
    longest, shortest = int(lengths.max()), int(lengths[lengths > 0].min())
    wanted = (0, 1, shortest // 2, shortest - 1, longest // 2, longest - 1)
    return sorted({one for one in wanted if 0 <= one < longest})


def _many(moved_BS: Bools) -> str:
    count = int(moved_BS.sum())
    return f"{count} token{'s' * (count > 1)}"


@contextlib.contextmanager
def _head_of(causal_lm: Any) -> Iterator[list[torch.Tensor]]:
    """What goes into the output embedding, call by call."""
    heard: list[torch.Tensor] = []
    head = causal_lm.get_output_embeddings()
    keep: Callable[[Any, Any], None] = lambda _head, given: heard.append(given[0])  # noqa: E731
    handle = None if head is None else head.register_forward_pre_hook(keep)
    try:
        yield heard
    finally:
        if handle is not None:
            handle.remove()
