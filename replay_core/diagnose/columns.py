"""Tensors of a batch by canonical name, over its flat tokens or by sample, read when first asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import Struct

from replay_core import pages
from replay_core.diagnose.flat import Array, Flat
from replay_core.diagnose.sheets import Sheet, texts_of
from replay_core.records import Record, TensorRef
from replay_core.samples.batch import Batch

#: How names of a single reward function's numbers begin.
_FUNCTIONS = ("reward_function.", "rewards_per_func.", "reward_funcs.")
#: What holds them as the columns of one matrix [B, F]: TRL's own tensor.
_MATRICES = frozenset({"rewards_per_func"})
#: A value that stands for "there is none" among log-probabilities (open-instruct's INVALID_LOGPROB).
NO_LOGPROB = 1.0


#: What recorders and trainers of one's own call texts. Ids have some of these names, too, and are no texts.
OTHER_NAMES = {
    "prompt_text": ("prompts", "prompt_ids", "prompt"),
    "response_text": ("completion_text", "completions", "completion", "response_ids", "response"),
    "ground_truth": ("ground_truths", "reward_model.ground_truth", "label", "labels", "answer", "answers", "solution"),
}


class Column(Struct, frozen=True):
    """A tensor over the batch's tokens [N]: float64, NaN where it says nothing, and whether it says something."""

    name: str
    values_N: Array
    said_N: Array
    source: str
    dtype: str
    ref: TensorRef


def _column(part: Batch, ref: TensorRef, number: int) -> Array | None:
    """One column of a matrix [B, F], or None where the tensor is none."""
    if len(ref.shape) != 2 or ref.rows is not None or ref.shape[0] != len(part) or number >= ref.shape[1]:
        return None
    return np.asarray(pages.array(ref)[:, number])


class Scalar(Struct, frozen=True):
    """A number a record holds: a loss, a norm, a setting."""

    record: Record
    name: str
    value: float

    @property
    def place(self) -> tuple[int | None, int | None]:
        """The rank and the micro-batch it is of, as `Laid.rows_by_micro` knows them."""
        return self.record.key.rank, self.record.key.micro

    @property
    def update(self) -> tuple[int | None, int | None]:
        """The optimizer step of its batch that it is of."""
        return self.record.key.epoch, self.record.key.minibatch


class Columns:
    """The sheets of a batch: its own samples, and what other records of the step say of them."""

    def __init__(self, flat: Flat, others: list[tuple[Sheet, list[int | None]]], records: list[Record]) -> None:
        self.records = records
        #: Those of the critic among them.
        self.every_record = records
        self._flat = flat
        spine = flat.spine
        own: list[int | None] = list(range(len(spine)))
        self.sheets: list[tuple[Sheet, list[int | None]]] = [(spine, own), *others]
        #: The tensor of a name, and the number of the sheet that it is of.
        self._columns: dict[str, tuple[int, Column] | None] = {}
        #: What was worked out of these values once, for all rules that ask.
        self.worked_out: dict[str, Any] = {}

    def forget(self) -> None:
        """Drop every value that was read."""
        self._columns.clear()
        self.worked_out.clear()

    def ref(self, name: str) -> TensorRef | None:
        """The tensor of a canonical name, of the first sheet that has it in every part."""
        for sheet, _ in self.sheets:
            refs = sheet.refs(name)
            if refs:
                return refs[0]
        return None

    def of(self, name: str) -> Column | None:
        """A tensor over the batch's tokens, of the first sheet that has it; per-sample values are spread."""
        if name not in self._columns:
            self._columns[name] = next(self._read(name), None)
        found = self._columns[name]
        return None if found is None else found[1]

    def every(self, name: str) -> Iterator[Column]:
        """The tensor of that name of every sheet that has it."""
        if name not in self._columns:
            yield from (column for _, column in self._read(name))
        elif (first := self._columns[name]) is not None:
            yield first[1]
            yield from (column for _, column in self._read(name, first[0] + 1))

    def _read(self, name: str, begin: int = 0) -> Iterator[tuple[int, Column]]:
        """The tensor of every sheet from that one on that has it, and the number of the sheet."""
        trained_here = any(sheet.name == "forward_data" for sheet, _ in self.sheets)
        for number, (sheet, places) in enumerate(self.sheets[begin:], begin):
            if sheet.name == "datums" and trained_here and name.endswith("logprobs"):
                continue  # what a remote trainer was sent, beside the forward of another trainer
            found = self.of_sheet(sheet, places, name)
            if found is not None and found.said_N.any():
                yield number, found

    def of_sheet(self, sheet: Sheet, places: list[int | None], name: str) -> Column | None:
        """The tensor as one of `sheets` has it, which is at these places; None where it has none."""
        refs = sheet.refs(name)
        if not refs or any(ref.is_text for ref in refs):
            return None
        total = int(self._flat.lengths_B.sum())
        values_N, said_N = np.full(total, np.nan), np.zeros(total, dtype=bool)
        found = [part.values(ref) for part, ref in zip(sheet.parts, refs, strict=True)]
        if any(one is None for one in found):
            return None
        if sheet.is_by_id and any(part.per_sample(ref) is None for part, ref in zip(sheet.parts, refs, strict=True)):
            return None  # of which tokens its columns are is not known
        starts = self._flat.starts_B
        for sample, place in enumerate(places):
            if place is None:
                continue
            part, row = sheet.index[place]
            size = min(int(sheet.parts[part].lengths[row]), int(self._flat.lengths_B[sample]))
            own, here = int(sheet.parts[part].starts[row]), starts[sample]
            if sheet.is_by_id:
                whole = slice(here, here + int(self._flat.lengths_B[sample]))
                values_N[whole], said_N[whole] = found[part].values_N[own], found[part].said_N[own]  # type: ignore[union-attr]
                continue
            if sheet.answers is not None:
                size = min(size, sheet.answers[place])
                here += int(self._flat.lengths_B[sample]) - size
            values_N[here : here + size] = found[part].values_N[own : own + size]  # type: ignore[union-attr]
            said_N[here : here + size] = found[part].said_N[own : own + size]  # type: ignore[union-attr]
        if refs[0].sentinel and str(NO_LOGPROB) in refs[0].sentinel:
            said_N &= values_N != NO_LOGPROB
        values_N[~said_N] = np.nan
        source = f"{refs[0].name} of {sheet.parts[0].held.record.path.name}"
        if len(sheet.parts) > 1:
            source += f" and {len(sheet.parts) - 1} more"
        return Column(name, values_N, said_N, source, refs[0].dtype, refs[0])

    def per_sample(self, *names: str) -> Array | None:
        """One number per sample [B] of the first of these names that has one for each. `rewards_per_func.1` is a column
        of `rewards_per_func` [B, F], where that is recorded.
        """
        for name in names:
            matrix, _, number = name.rpartition(".")
            for sheet, places in self.sheets:
                refs, column = sheet.refs(name), None
                if not refs and matrix in _MATRICES and number.isdecimal():
                    refs, column = sheet.refs(matrix), int(number)
                if not refs or any(ref.is_text for ref in refs) or any(place is None for place in places):
                    continue
                each = [
                    part.per_sample(ref) if column is None else _column(part, ref, column)
                    for part, ref in zip(sheet.parts, refs, strict=True)
                ]
                known = [values for values in each if values is not None]
                if len(known) == len(each):
                    at = [sheet.index[place] for place in places if place is not None]
                    return np.array([known[part][row] for part, row in at], dtype=np.float64)
        return None

    @property
    def reward_functions_FB(self) -> Array | None:
        """What each of several reward functions gave each sample, where they stand apart: with which weights they are
        summed is not recorded. NaN where one gave nothing.
        """
        each = [self.per_sample(name) for name in self.reward_functions]
        known = [values_B for values_B in each if values_B is not None]
        return np.array(known) if known and len(known) == len(each) else None

    @property
    def reward_functions(self) -> list[str]:
        """Under which names several reward functions stand apart; the columns of one matrix are numbered."""
        for sheet, _ in self.sheets:
            written = sheet.names()
            if names := sorted(name for name in written if name.startswith(_FUNCTIONS)):
                return names
            for matrix in _MATRICES & written:
                widths = {
                    ref.shape[1] for ref in sheet.refs(matrix) or ()
                    if len(ref.shape) == 2 and ref.rows is None and not ref.is_text
                }  # fmt: skip
                # One function is the reward itself.
                if len(widths) == 1 and (width := widths.pop()) > 1:
                    return [f"{matrix}.{number}" for number in range(width)]
        return []

    @property
    def are_sums_alone(self) -> bool:
        """Whether a sample's reward is no more than the sum of several functions', whose weights are not recorded."""
        alone = ("reward", "token_scores", "token_rewards")
        functions_FB = None if any(map(self.ref, alone)) else self.reward_functions_FB
        return functions_FB is not None and len(functions_FB) > 1

    @property
    def reward_name(self) -> str:
        """Under which name a sample's reward stands, or a part of it."""
        known = ("reward", "token_scores", "token_rewards", *self.reward_functions)
        return next((name for name in known if self.ref(name) is not None), "reward")

    def texts(self, name: str) -> list[str] | None:
        """One text per sample, or None."""
        for sheet, places in self.sheets:
            for one in (name, *OTHER_NAMES.get(name, ())):
                refs = sheet.refs(one) or ()
                each = [texts_of(part, ref) for part, ref in zip(sheet.parts, refs, strict=False)]
                known = [texts for texts in each if texts is not None]
                if refs and len(known) == len(each) and None not in places:
                    at = [sheet.index[place] for place in places if place is not None]
                    return [known[part][row] for part, row in at]
        return None

    def scalars(self, *names: str) -> list[Scalar]:
        """Every record's number of one of these canonical names, in recorded order."""
        found = []
        for record in self.records:
            for ref in record.tensors():
                name = ref.canonical or ref.name
                if name in names and ref.numel == 1 and not ref.is_text and ref.is_readable and len(ref.shape) <= 1:
                    found.append(Scalar(record, name, float(pages.array(ref).reshape(-1)[0])))
                    break
        return found
