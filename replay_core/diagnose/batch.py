"""One step's samples in one aligned form, whatever wrote them, read only when a rule asks.

Everything per token is flat, over all tokens of all samples laid end to end (`_N`): a tensor of any layout becomes
values about the same tokens. Samples come from all ranks and micros of the step.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay_core import pages
from replay_core.diagnose.finding import Where
from replay_core.diagnose.placing import Rows
from replay_core.diagnose.sheets import Sheet, joined, sheets_of
from replay_core.naming import meaning
from replay_core.records import Inline, Record, RecordKey, Run, TensorRef

Array = NDArray[Any]

#: What says which prompt a sample answers, the surest first.
GROUP_NAMES = ("group_id", "group_ids", "uid", "prompt_idx", "group_index", "prompt_id", "task_id")
#: A value that stands for "there is none" among log-probabilities (open-instruct's INVALID_LOGPROB).
NO_LOGPROB = 1.0


@dataclass(frozen=True, slots=True)
class Column:
    """A tensor over the batch's tokens [N]: float64, NaN where it says nothing, and whether it says something."""

    name: str
    values_N: Array
    said_N: Array
    source: str
    dtype: str
    ref: TensorRef


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number a record holds: a loss, a norm, a setting."""

    record: Record
    name: str
    value: float


class Batch:
    """The samples of one step (`step`, None where the dump does not say) that share tokens."""

    def __init__(
        self,
        step: int | None,
        spine: Sheet,
        others: list[tuple[Sheet, list[int | None]]],
        records: list[Record],
        unreadable: list[str],
        flags: dict[str, Any] | None = None,
        path: Path | None = None,
        has_weights: bool = False,
    ) -> None:
        self.step = step
        self.has_weights = has_weights
        self.path = path or spine.parts[0].record.path
        self.spine = spine
        self.records = records
        self.unreadable = unreadable
        self.flags = flags or {}
        own: list[int | None] = list(range(len(spine)))
        self.sheets: list[tuple[Sheet, list[int | None]]] = [(spine, own), *others]
        #: Sheets of the step with tokens that share none with these samples.
        self.strangers: list[Sheet] = []
        self._columns: dict[str, Column | None] = {}

    def __len__(self) -> int:
        return len(self.spine)

    @property
    def name(self) -> str:
        step = "the dump" if self.step is None else f"step {self.step}"
        return f"{step} ({self.spine.parts[0].record.path.name})"

    def release(self) -> None:
        """Forget every value read, and every record's fields."""
        self._columns.clear()
        for cached in ("tokens_N", "trained_N", "response_N", "group_B", "reward_B", "eos_id"):
            self.__dict__.pop(cached, None)

    # ---- what there is

    def has(self, name: str) -> bool:
        """Whether a canonical name, or one of the batch's own words, has something behind it."""
        own = {
            "tokens": lambda: self.spine.has_tokens,
            "mask": lambda: self.trained_N is not None,
            "group": lambda: self.group_B is not None,
            "rewards": lambda: self.reward_B is not None,
            "advantage": lambda: self.column("advantages") is not None,
            "trainer_logprobs": lambda: self.trainer is not None,
            "response": lambda: self.response_N is not None,
            "eos": lambda: self.eos_id is not None,
            "pad": lambda: self.pad_id is not None,
        }
        if name in own:
            return own[name]()
        about_tokens = meaning(name).alignment in ("next", "full")
        return (self.column(name) if about_tokens else self.ref(name)) is not None

    def ref(self, name: str) -> TensorRef | None:
        """The tensor of a canonical name, of the first sheet that has it in every part."""
        for sheet, _ in self.sheets:
            refs = sheet.refs(name)
            if refs:
                return refs[0]
        return None

    # ---- tokens

    @cached_property
    def lengths_B(self) -> Array:
        """Tokens of each sample."""
        return np.array([self.spine.parts[part].lengths[row] for part, row in self.spine.index], dtype=np.int64)

    @property
    def starts_B(self) -> Array:
        """Where each sample's tokens begin in the flat arrays."""
        return np.cumsum(self.lengths_B) - self.lengths_B

    @property
    def sample_N(self) -> Array:
        """The sample of every token."""
        return np.repeat(np.arange(len(self)), self.lengths_B)

    @property
    def position_N(self) -> Array:
        """The place of every token in its sample."""
        return np.arange(int(self.lengths_B.sum())) - np.repeat(self.starts_B, self.lengths_B)

    @cached_property
    def tokens_N(self) -> Array | None:
        """The token ids."""
        if not self.spine.has_tokens:
            return None
        rows = [self.spine.tokens(sample) for sample in range(len(self))]
        return np.concatenate(rows).astype(np.int64) if rows else np.zeros(0, dtype=np.int64)

    @cached_property
    def response_N(self) -> Array | None:
        """Whether a token is at or after the beginning of its response."""
        for sheet, places in self.sheets:
            starts = self._starts(sheet, places)
            if starts is not None:
                return self.position_N >= np.repeat(starts, self.lengths_B)
        for name in ("response_mask", "loss_mask"):
            mask = self.column(name)
            if mask is not None:
                marked_N = mask.said_N & (mask.values_N != 0)
                first_B = self.first(marked_N)
                return self.position_N >= np.repeat(first_B, self.lengths_B)
        return None

    def _starts(self, sheet: Sheet, places: list[int | None]) -> Array | None:
        starts: list[int] = []
        for place in places:
            if place is None:
                return None
            part, row = sheet.index[place]
            known = sheet.parts[part].response_start
            if known is None:
                return None
            starts.append(known[row])
        return np.array(starts, dtype=np.int64)

    @cached_property
    def trained_N(self) -> Array | None:
        """Whether a token counts in the loss: the loss mask, else the response mask, and no sample left out."""
        mask = self.column("loss_mask") or self.column("response_mask")
        if mask is None:
            return None
        trained_N = mask.said_N & (mask.values_N != 0)
        for name, wanted in (("sample_mask", True), ("remove_sample", False)):
            kept_B = self.per_sample(name)
            if kept_B is not None:
                trained_N = trained_N & np.repeat((kept_B != 0) == wanted, self.lengths_B)
        return trained_N

    @property
    def pad_id(self) -> int | None:
        """The id that fills the places no sample holds."""
        for sheet, _ in self.sheets:
            for part in sheet.parts:
                if part.pad_id is not None:
                    return part.pad_id
        return None

    @property
    def after_B(self) -> list[int | None]:
        """The id in the column after each sample's last token, None where there is none."""
        spine = self.spine
        found: list[int | None] = []
        for part, row in spine.index:
            after = spine.parts[part].after
            found.append(None if after is None else after[row])
        return found

    @cached_property
    def eos_id(self) -> int | None:
        """The id that ends a response: of those that stopped, else what most responses shorter than the longest end on."""
        if self.tokens_N is None or self.response_N is None or not len(self):
            return None
        counts_B = self.count(self.response_N)
        usable_B = counts_B > 0
        truncated_B = self.truncated_flag_B
        ended_B = usable_B & (counts_B < counts_B.max(initial=0)) if truncated_B is None else usable_B & ~truncated_B
        last_B = self.tokens_N[(self.starts_B + self.lengths_B - 1)[ended_B]]
        if last_B.size == 0:
            return None
        ids, counts = np.unique(last_B, return_counts=True)
        # One that ended is no majority; several that agree are.
        if counts.max() * 2 <= last_B.size or (last_B.size < 2 and truncated_B is None):
            return None
        return int(ids[counts.argmax()])

    @property
    def padding_held_N(self) -> Array | None:
        """Tokens that are padding by the look of them: one id that ends samples, twice and more, and stands nowhere
        else in responses, mostly after one and the same other id. None where nothing looks so.
        """
        tokens_N, response_N = self.tokens_N, self.response_N
        if tokens_N is None or response_N is None or len(self) < 2:
            return None
        held_N = np.zeros(tokens_N.size, dtype=bool)
        tails, heads = [], []
        for start, length in zip(self.starts_B, self.lengths_B, strict=True):
            row = tokens_N[start : start + length]
            other = np.flatnonzero(row != row[-1]) if length else np.zeros(0, dtype=np.int64)
            run = length - 1 - int(other[-1]) if other.size else 0
            if run < 2:
                continue
            tail, head = int(row[-1]), int(row[other[-1]])
            ends_itself = tail == self.eos_id
            tails.append(tail)
            heads.append(tail if ends_itself else head)
            held_N[start + length - run + ends_itself : start + length] = True
        if len(tails) < 2 or len(set(tails)) > 1 or (response_N & ~held_N & (tokens_N == tails[0])).any():
            is_end = bool(tails) and len(set(tails)) == 1 and tails[0] == self.eos_id
            if not is_end:
                return None
        most = max(heads.count(head) for head in set(heads))
        return held_N if most >= 2 and most >= 0.4 * len(heads) else None

    @property
    def truncated_flag_B(self) -> Array | None:
        """Whether each response was cut off, as the dump itself says it."""
        for name in ("truncated", "is_truncated"):
            flag_B = self.per_sample(name)
            if flag_B is not None:
                return flag_B != 0
        for name in ("finish_reason", "status"):
            words = self.texts(name)
            if words is not None:
                cut = {"length", "truncated", "max_tokens"}
                known = {*cut, "stop", "completed", "eos", "stop_sequence"}
                if any(word in known for word in words):
                    return np.array([word in cut for word in words])
        return None

    @staticmethod
    def ids_by_sample(sheet: Sheet) -> dict[str, int]:
        """A sheet's samples by the id the trainer gave them; empty where they have none, or share one."""
        found: dict[str, int] = {}
        for sample, (part, row) in enumerate(sheet.index):
            ref = next((ref for ref in sheet.parts[part].fields() if ref.canonical == "sample_id"), None)
            if ref is None or ref.shape != (len(sheet.parts[part]),):
                return {}
            name = str(np.asarray(pages.array(ref)).reshape(-1)[row])
            if name in found:
                return {}
            found[name] = sample
        return found

    # ---- columns

    def column(self, name: str) -> Column | None:
        """A tensor over the batch's tokens, of the first sheet that has it; per-sample values are spread."""
        if name not in self._columns:
            self._columns[name] = next(self.columns(name), None)
        return self._columns[name]

    def columns(self, name: str) -> Iterator[Column]:
        """The tensor of that name of every sheet that has it."""
        trained_here = any(sheet.name == "forward_data" for sheet, _ in self.sheets)
        for sheet, places in self.sheets:
            if sheet.name == "datums" and trained_here and name.endswith("logprobs"):
                continue  # what a remote trainer was sent, beside the forward of another trainer
            found = self._gather(sheet, places, name)
            if found is not None and found.said_N.any():
                yield found

    def _gather(self, sheet: Sheet, places: list[int | None], name: str) -> Column | None:
        refs = sheet.refs(name)
        if not refs or any(ref.is_text for ref in refs):
            return None
        total = int(self.lengths_B.sum())
        values_N, said_N = np.full(total, np.nan), np.zeros(total, dtype=bool)
        rows = [self._rows(part, ref) for part, ref in zip(sheet.parts, refs, strict=True)]
        if any(row is None for row in rows):
            return None
        starts = self.starts_B
        for sample, place in enumerate(places):
            if place is None:
                continue
            part, row = sheet.index[place]
            values, said = rows[part][row]  # type: ignore[index]
            size = min(values.size, int(self.lengths_B[sample]))
            values_N[starts[sample] : starts[sample] + size] = values[:size]
            said_N[starts[sample] : starts[sample] + size] = said[:size]
        if refs[0].sentinel and str(NO_LOGPROB) in refs[0].sentinel:
            said_N &= values_N != NO_LOGPROB
        values_N[~said_N] = np.nan
        source = f"{refs[0].name} of {sheet.parts[0].record.path.name}"
        if len(sheet.parts) > 1:
            source += f" and {len(sheet.parts) - 1} more"
        return Column(name, values_N, said_N, source, refs[0].dtype, refs[0])

    @staticmethod
    def _rows(part: Rows, ref: TensorRef) -> list[tuple[Array, Array]] | None:
        each = part.per_sample(ref)
        if each is not None:
            return [
                (np.full(length, float(value)), np.ones(length, dtype=bool))
                for value, length in zip(each, part.lengths, strict=True)
            ]
        placed = part.place(ref)
        return None if placed is None else list(zip(placed.values, placed.said, strict=True))

    def per_sample(self, *names: str) -> Array | None:
        """One number per sample [B] of the first of these names that has one for each."""
        for name in names:
            for sheet, places in self.sheets:
                refs = sheet.refs(name)
                if not refs or any(ref.is_text for ref in refs) or any(place is None for place in places):
                    continue
                each = [part.per_sample(ref) for part, ref in zip(sheet.parts, refs, strict=True)]
                if all(values is not None for values in each):
                    found = [each[sheet.index[place][0]][sheet.index[place][1]] for place in places if place is not None]  # type: ignore[index]
                    return np.array(found, dtype=np.float64)
        return None

    def texts(self, name: str) -> list[str] | None:
        """One text per sample, or None."""
        for sheet, places in self.sheets:
            refs = sheet.refs(name)
            if not refs or not all(ref.is_text and isinstance(ref.source, Inline) for ref in refs):
                continue
            each = [list(ref.source.value) for ref in refs]  # type: ignore[union-attr]
            if any(place is None for place in places) or any(
                len(texts) != len(part) for texts, part in zip(each, sheet.parts, strict=True)
            ):
                continue
            return [str(each[sheet.index[place][0]][sheet.index[place][1]]) for place in places if place is not None]
        return None

    # ---- rewards and groups

    @cached_property
    def group_B(self) -> Array | None:
        """The number of each sample's group, or None where the dump names no groups."""
        for name in GROUP_NAMES:
            found: Any = self.texts(name)
            if found is None:
                found = self.per_sample(name)
            if found is not None and len(found):
                return np.unique(np.asarray(found), return_inverse=True)[1].reshape(-1)
        return self.prompt_B

    @property
    def group_is_named(self) -> bool:
        """Whether the dump says which group a sample is of; else equal prompts are one group."""
        return any(self.ref(name) is not None for name in GROUP_NAMES)

    @property
    def prompt_B(self) -> Array | None:
        """The number of each sample's prompt: equal prompt tokens have one number."""
        if self.tokens_N is None or self.response_N is None:
            return None
        starts_B, numbers = self.starts_B, {}
        heads_B = self.first(self.response_N)
        if not heads_B.all():
            return None
        found = []
        for start, head in zip(starts_B, heads_B, strict=True):
            prompt = self.tokens_N[start : start + head].tobytes()
            found.append(numbers.setdefault(prompt, len(numbers)))
        return np.array(found)

    @cached_property
    def reward_B(self) -> Array | None:
        """One reward per sample: the scalar, else the sum of its tokens' scores or rewards."""
        each = self.per_sample("reward")
        if each is not None:
            return each
        for name in ("token_scores", "token_rewards"):
            column = self.column(name)
            if column is not None and self.lengths_B.sum():
                return self.sum(np.where(column.said_N, column.values_N, 0.0))
        return None

    @property
    def advantage_B(self) -> Array | None:
        """One advantage per sample, or None where it changes from token to token."""
        column = self.column("advantages")
        if column is None:
            return self.per_sample("advantages")
        counted_N = column.said_N if self.trained_N is None else column.said_N & self.trained_N
        if not self.lengths_B.sum():
            return self.per_sample("advantages")
        low_B, high_B = self.extremes(column.values_N, counted_N)
        spread_B = high_B - low_B
        # A sample with no token in the mask has no advantage of its own.
        constant = bool((np.isnan(spread_B) | (spread_B <= 1e-6 * np.maximum(1, np.abs(high_B)))).all())
        return high_B if constant else None

    # ---- logprobs

    @property
    def trainer(self) -> Column | None:
        """The trainer's log-probabilities of the policy that sampled: old, else the first forward's."""
        return self.column("old_logprobs") or self.column("policy_logprobs")

    def pair(self, a: Column, b: Column) -> Array:
        """Which tokens both say something finite of, and that count [N]."""
        both_N = a.said_N & b.said_N & np.isfinite(a.values_N) & np.isfinite(b.values_N)
        counted_N = self.trained_N if self.trained_N is not None else self.response_N
        return both_N if counted_N is None else both_N & counted_N

    # ---- how samples were laid out

    @property
    def left_pads_B(self) -> Array | None:
        """Empty columns before each sample's first token [B], None where samples are not padded rows."""
        found = []
        for part, row in self.spine.index:
            slots = self.spine.parts[part].slots
            if slots is None or not self.spine.parts[part].padding_known:
                return None
            found.append(int(slots[row][0]) if slots[row].size else 0)
        return np.array(found)

    @property
    def pack_B(self) -> Array | None:
        """The pack each sample lay in, None where the dump names no packs."""
        found: list[int] = []
        for part, row in self.spine.index:
            packs = self.spine.parts[part].pack
            if packs is None:
                return None
            found.append(packs[row] + part * len(self.spine))
        return np.array(found)

    @property
    def orders(self) -> list[Array]:
        """Orders the samples were computed in: as stored, and as every other sheet's micro-batches hold them."""
        found = [np.arange(len(self))]
        for _, places in self.sheets[1:]:
            if all(place is not None for place in places):
                order = np.argsort(np.array(places), kind="stable")
                if not any(np.array_equal(order, known) for known in found):
                    found.append(order)
        return found

    def replay_command(self, where: Where, options: str) -> str:
        """The `rldbg replay` that runs the micro-batch of a place under other settings."""
        key = [(name, getattr(where, name)) for name in ("step", "rank", "micro")]
        chosen = "".join(f" --{name} {value}" for name, value in key if value is not None)
        model = "" if self.has_weights or "--model" in options else " --model HF_DIR"
        return f"rldbg replay {shlex.quote(str(self.path))}{chosen}{model} {options}"

    # ---- sums by sample

    def sum(self, values_N: Array) -> Array:
        """Each sample's sum [B]."""
        return np.bincount(self.sample_N, weights=values_N, minlength=len(self))

    def count(self, chosen_N: Array) -> Array:
        """How many tokens of each sample are chosen [B]."""
        return np.bincount(self.sample_N[chosen_N], minlength=len(self))

    def mean(self, values_N: Array, chosen_N: Array) -> Array:
        """Each sample's mean over the chosen tokens [B], NaN where there is none."""
        total_B = np.bincount(self.sample_N[chosen_N], weights=values_N[chosen_N], minlength=len(self))
        count_B = self.count(chosen_N)
        return np.where(count_B > 0, total_B / np.maximum(count_B, 1), np.nan)

    def extremes(self, values_N: Array, chosen_N: Array) -> tuple[Array, Array]:
        """Each sample's smallest and largest chosen value [B], NaN where there is none."""
        low_B, high_B = np.full(len(self), np.inf), np.full(len(self), -np.inf)
        with np.errstate(invalid="ignore"):  # a NaN among them is its sample's answer
            np.minimum.at(low_B, self.sample_N[chosen_N], values_N[chosen_N])
            np.maximum.at(high_B, self.sample_N[chosen_N], values_N[chosen_N])
        none_B = self.count(chosen_N) == 0
        return np.where(none_B, np.nan, low_B), np.where(none_B, np.nan, high_B)

    def first(self, chosen_N: Array) -> Array:
        """The position of each sample's first chosen token [B]; its length where there is none."""
        first_B = self.lengths_B.copy()
        np.minimum.at(first_B, self.sample_N[chosen_N], self.position_N[chosen_N])
        return first_B

    # ---- scalars, places

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

    @property
    def temperature(self) -> float | None:
        """The sampling temperature the dump states, where it is one for all."""
        stated = {scalar.value for scalar in self.scalars("temperature", "meta_info.generation_config.temperature")}
        each = self.per_sample("temperature")
        stated |= set() if each is None else set(each.tolist())
        if not stated and isinstance(self.flags.get("temperature"), (int, float)):
            stated = {float(self.flags["temperature"])}
        return stated.pop() if len(stated) == 1 else None

    @property
    def vocabulary(self) -> int | None:
        """No fewer tokens than this are in the vocabulary: the largest id seen, and one."""
        return None if self.tokens_N is None or not self.tokens_N.size else int(self.tokens_N.max()) + 1

    def where(self, name: str | None = None, at: int | None = None, sample: int | None = None) -> Where:
        """The place of a token of the flat arrays, or of a sample, in the record that holds the tensor."""
        position = None
        if at is not None:
            sample, position = int(self.sample_N[at]), int(self.position_N[at])
        sheet, places = next(
            ((sheet, places) for sheet, places in self.sheets if name is None or sheet.refs(name)), self.sheets[0]
        )
        record, row = sheet.parts[0].record, None
        place = places[sample] if sample is not None else None
        if place is not None:
            part, row = sheet.index[place]
            record = sheet.parts[part].record
        key = record.key
        ref = self.ref(name) if name else None
        return Where(
            step=key.step, micro=key.micro, rank=key.rank, role=key.role, stage=key.stage,
            tensor=ref.name if ref else name, sample=row, position=position, path=str(record.path),
        )  # fmt: skip


    def where_record(self, record: Record, name: str) -> Where:
        """A record's own number: a loss, a norm."""
        key = record.key
        ref = next((ref for ref in record.tensors() if name in (ref.canonical, ref.name)), None)
        return Where(
            step=key.step, micro=key.micro, rank=key.rank, role=key.role, stage=key.stage,
            tensor=ref.name if ref else name, path=str(record.path),
        )  # fmt: skip

    def keys_of(self, name: str) -> list[RecordKey | None]:
        """The key of the record that holds each sample's part of a tensor; None where it holds none."""
        for sheet, places in self.sheets:
            if sheet.refs(name):
                return [
                    None if place is None else sheet.parts[sheet.index[place][0]].record.key for place in places
                ]
        return [None] * len(self)

    def rows_by_micro(self) -> dict[tuple[int | None, int | None], list[int]]:
        """The samples of every (rank, micro) that a sheet names."""
        found: dict[tuple[int | None, int | None], list[int]] = {}
        for sheet, places in self.sheets:
            if all(part.record.key.micro is None for part in sheet.parts):
                continue
            for sample, place in enumerate(places):
                if place is not None:
                    key = sheet.parts[sheet.index[place][0]].record.key
                    found.setdefault((key.rank, key.micro), []).append(sample)
            return found
        return {(part.record.key.rank, None): list(range(len(self))) for part in self.spine.parts}

    @property
    def response_width(self) -> int | None:
        """Columns of the padded response tensors, None where there are none."""
        for name in ("response_mask", "loss_mask", "token_loss", "response_ids"):
            ref = self.ref(name)
            if ref is not None and ref.rows is None and len(ref.shape) == 2:
                return ref.shape[1]
        return None


def batches_of(step: int | None, records: list[Record], run: Run | None = None) -> list[Batch]:
    """The batches of a step: samples that share tokens are one. What was rolled out for evaluation is left aside."""
    trained = [record for record in records if record.key.role not in ("eval", "critic")]
    sheets, unreadable = sheets_of(trained)
    flags, path = (None, None) if run is None else (run.flags, run.path)
    weights = run is not None and (step in run.models or None in run.models)
    batches = [
        Batch(step, spine, others, trained, unreadable, flags, path, weights) for spine, others in joined(sheets)
    ]
    for batch in batches:
        batch.strangers = [each.spine for each in batches if each is not batch and each.spine.has_tokens]
    return batches
