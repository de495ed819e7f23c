"""Where a batch's samples lie: in which record, micro-batch, pack and row, and the commands that go there."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np

from replay_core.diagnose.algorithm import Algorithm, stated_by
from replay_core.diagnose.columns import Columns
from replay_core.diagnose.finding import Where
from replay_core.diagnose.flat import Array, Flat
from replay_core.diagnose.sheets import Sheet
from replay_core.diagnose.two_sides import place_of
from replay_core.records import Record, RecordKey, Run, TensorRef, weights_noted
from replay_core.samples.batch import Batch
from replay_core.samples.layout import Ints


class Laid:
    """A batch's samples of one step (None where the dump does not say), and the run they are of."""

    def __init__(self, step: int | None, flat: Flat, columns: Columns, run: Run | None) -> None:
        self._flat, self._columns, self.run = flat, columns, run
        self.path: Path = flat.spine.parts[0].held.record.path if run is None else run.path
        self.flags: dict[str, Any] = (run.flags if run is not None else None) or {}
        #: All that the dump states of the run: its flags, and what the trainer noted.
        self.stated: dict[str, Any] = stated_by(run)
        self.algorithm = Algorithm(self.stated)
        self._step, self._models = step, run.models if run is not None else {}
        self._has_weights = step in self._models or None in self._models

    @property
    def left_pads_B(self) -> Array | None:
        """Empty columns before each sample's first token [B], None where samples are not padded rows."""
        found = []
        for part, row in self._flat.spine.index:
            pads = _left_pads(self._flat.spine.parts[part])
            if pads is None:
                return None
            found.append(int(pads[row]))
        return np.array(found)

    @property
    def pack_B(self) -> Array | None:
        """The pack each sample lay in, None where the dump names no packs."""
        found: list[int] = []
        for part, row in self._flat.spine.index:
            packs = self._flat.spine.parts[part].packs
            if packs is None:
                return None
            found.append(packs[row] + part * len(self._flat.spine))
        return np.array(found)

    @property
    def orders(self) -> list[Array]:
        """Orders the samples were computed in: as stored, and as every other sheet's micro-batches hold them."""
        found = [np.arange(len(self._flat))]
        for _, places in self._columns.sheets[1:]:
            if all(place is not None for place in places):
                order = np.argsort(np.array(places), kind="stable")
                if not any(np.array_equal(order, known) for known in found):
                    found.append(order)
        return found

    def replay_command(self, where: Where, options: str) -> str:
        """The `rldbg replay` that runs the micro-batch of a place under other settings."""
        key = [(name, getattr(where, name)) for name in ("step", "rank", "micro")]
        chosen = "".join(f" --{name} {value}" for name, value in key if value is not None)
        model = "" if self._has_weights or "--model" in options else " --model HF_DIR"
        for word, noted in self._noted().items():
            options = options.replace(f"--model {word}", f"--model {shlex.quote(noted)}")
        return f"rldbg replay {shlex.quote(str(self.path))}{chosen}{model} {options}"

    def mismatch_command(self) -> str:
        """The `rldbg mismatch` of the step: which setting closes the gap between engine and trainer."""
        step = "" if self._step is None else f" --step {self._step}"
        return f"rldbg mismatch {shlex.quote(str(self.path))}{step}"

    def _noted(self) -> dict[str, str]:
        """The weights that the dump notes for POLICY (of this step) and INITIAL (of its first), where they are two."""
        policy, initial = weights_noted(self._models, self._step), weights_noted(self._models, -1)
        if policy is None or initial is None or policy == initial:
            return {}
        return {"POLICY": policy[1], "INITIAL": initial[1]}

    def where(self, name: str | None = None, at: int | Array | None = None, sample: int | Array | None = None) -> Where:
        """The place of a token of the flat arrays, or of a sample, in the record that holds the tensor: the first one
        of several that are marked [N] or [B].
        """
        at, sample = _first(at), _first(sample)
        position = None
        if at is not None:
            sample, position = int(self._flat.sample_N[at]), int(self._flat.position_N[at])
        sheet, places = next(
            ((sheet, places) for sheet, places in self._columns.sheets if name is None or sheet.refs(name)),
            self._columns.sheets[0],
        )
        record, row = sheet.parts[0].held.record, None
        place = places[sample] if sample is not None else None
        if place is not None:
            part, row = sheet.index[place]
            record = _holder(sheet.parts[part], name)
        ref = self._columns.ref(name) if name else None
        if ref is not None:
            name, row = place_of(ref, row)
        return Where.of(record, name, row, position)

    def where_record(self, record: Record, name: str) -> Where:
        """A record's own number: a loss, a norm."""
        return Where.of(record, next((ref.name for ref in record.tensors() if name in (ref.canonical, ref.name)), name))

    def keys_of(self, name: str) -> list[RecordKey | None]:
        """The key of the record that holds each sample's part of a tensor; None where it holds none."""
        for sheet, places in self._columns.sheets:
            if sheet.refs(name):
                return [
                    None if place is None else sheet.parts[sheet.index[place][0]].held.record.key for place in places
                ]
        return [None] * len(self._flat)

    def first_update_B(self, name: str) -> Array:
        """Which samples of a tensor are surely of the first optimizer step of their batch: nothing has moved there."""
        keys = self.keys_of(name)
        known = any(key is not None and (key.minibatch is not None or key.epoch is not None) for key in keys)
        first = []
        lowest: dict[int | None, int] = {}
        for key in keys:
            if key is not None and key.micro is not None:
                lowest[key.rank] = min(lowest.get(key.rank, key.micro), key.micro)
        for key in keys:
            if key is None:
                first.append(False)
            elif known:
                first.append((key.minibatch or 0) == 0 and (key.epoch or 0) == 0)
            else:
                first.append(key.micro is None or key.micro == lowest.get(key.rank))
        return np.array(first, dtype=bool)

    def rows_by_micro(self) -> dict[tuple[int | None, int | None], list[int]]:
        """The samples of every (rank, micro): of the sheet that names most of them. (TRL numbers its generations, too,
        and one of them is several micro-batches of the forward.)
        """
        best: dict[tuple[int | None, int | None], list[int]] = {}
        numbered = [
            (sheet, places)
            for sheet, places in self._columns.sheets
            if any(part.held.record.key.micro is not None for part in sheet.parts)
        ]
        # A rollout's packs have numbers of their own: where a forward names a micro-batch of every sample, it is that.
        forwards = [one for one in numbered if _stage(one[0]) == "forward_data" and None not in one[1]]
        for sheet, places in forwards or numbered:
            found: dict[tuple[int | None, int | None], list[int]] = {}
            for sample, place in enumerate(places):
                if place is not None:
                    key = sheet.parts[sheet.index[place][0]].held.record.key
                    found.setdefault((key.rank, key.micro), []).append(sample)
            best = found if len(found) > len(best) else best
        every = list(range(len(self._flat)))
        return best or {(part.held.record.key.rank, None): every for part in self._flat.spine.parts}

    @property
    def widths(self) -> dict[str, int]:
        """Columns of the padded rows by what they hold: the response, prompt and response, and those of its labels."""
        found: dict[str, int] = {}
        whole = next((ref.shape[1] for name in _WHOLE if (ref := self._grid(name)) is not None), None)
        for name in ("response_mask", "loss_mask", "token_loss", "response_ids", "advantages"):
            ref = self._grid(name)
            if ref is not None and (whole is None or ref.shape[1] < whole - 1):
                found["the response"] = ref.shape[1]
                break
        if whole is not None:
            found |= {"prompt and response": whole, "prompt and response but the first": whole - 1}
        return found

    def _grid(self, name: str) -> TensorRef | None:
        ref = self._columns.ref(name)
        return ref if ref is not None and ref.rows is None and len(ref.shape) == 2 else None


#: Tensors whose rows hold prompt and response.
_WHOLE = ("input_ids", "attention_mask")


def _stage(sheet: Sheet) -> str | None:
    return sheet.parts[0].held.record.key.stage


def _first(marked: int | Array | None) -> int | None:
    return int(np.flatnonzero(marked)[0]) if isinstance(marked, np.ndarray) else marked


def _holder(part: Batch, name: str | None) -> Record:
    """The record that holds a tensor of these samples: theirs, or one of their micro-batch's losses."""
    held = part.held
    every = [held.record, *held.siblings]
    return next((one for one in every if name is not None and one.get(name) is not None), held.record)


def _left_pads(part: Batch) -> Ints | None:
    """Empty slots before each sample's first token [B]; None where samples are no rows, or padding is not known."""
    if part.layout is None or part.width is None or not part.padding_known:
        return None
    first: Ints = (part.layout.sample_BS >= 0).argmax(axis=1)
    return first
