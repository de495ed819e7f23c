"""One step's samples in one aligned form, whatever wrote them, read only when a rule asks.

Everything per token is flat, over all tokens of all samples laid end to end (`_N`): a tensor of any layout becomes
values about the same tokens. Samples come from all ranks and micros of the step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any, TypeVar

import numpy as np

from replay_core import pages
from replay_core.diagnose.algorithm import stated_by, stated_pad
from replay_core.diagnose.columns import Column, Columns
from replay_core.diagnose.flat import Array, Flat
from replay_core.diagnose.laid import Laid
from replay_core.diagnose.sheets import TELL_TWINS, Sheet, joined, marked, sheets_of
from replay_core.diagnose.signals import STAGES
from replay_core.errors import RldbgError
from replay_core.naming import meaning
from replay_core.records import Record, Run
from replay_core.samples.batch import Batch

T = TypeVar("T")

#: What says which prompt a sample answers, the surest first.
GROUP_NAMES = ("group_id", "group_ids", "uid", "prompt_idx", "group_index", "prompt_id", "task_id", "group")


def worked_out_once(make: Callable[[StepBatch], T]) -> Callable[[StepBatch], T]:
    """What several rules ask of a batch is worked out for the first of them; what it raises, the others are told."""
    name = f"{make.__module__}.{make.__qualname__}"

    @wraps(make)
    def kept(batch: StepBatch) -> T:
        known = batch.columns.worked_out
        if name not in known:
            try:
                known[name] = make(batch), None
            except Exception as error:
                known[name] = None, error
        found, failed = known[name]
        if failed is not None:
            raise failed.with_traceback(None)
        made: T = found
        return made

    return kept


class StepBatch:
    """The samples of one step (`step`, None where the dump does not say) that share tokens.

    spine: the sheet whose samples they are; flat: sums over their tokens; columns: what every record says of them;
    laid: where they lie.
    """

    def __init__(
        self,
        step: int | None,
        spine: Sheet,
        others: list[tuple[Sheet, list[int | None]]],
        records: list[Record],
        run: Run | None = None,
    ) -> None:
        self.step = step
        self.spine = spine
        self._run = run
        self.flat = Flat(spine)
        self.columns = Columns(self.flat, others, records)
        self.laid = Laid(step, self.flat, self.columns, run)
        #: Files that hold samples of another file, said in words.
        self.repeated: list[str] = []
        #: Sheets of the step with tokens that share none with these samples.
        self.strangers: list[Sheet] = []

    def __len__(self) -> int:
        return len(self.spine)

    @property
    def name(self) -> str:
        step = "the dump" if self.step is None else f"step {self.step}"
        return f"{step} ({self.spine.parts[0].held.record.path.name})"

    def release(self) -> None:
        """Forget every value read, and every record's fields."""
        self.columns.forget()
        self.flat.forget()
        for cached in (
            "tokens_N",
            "trained_N",
            "response_N",
            "group_B",
            "_asked_B",
            "reward_B",
            "functions_FB",
            "eos_id",
            "once",
        ):
            self.__dict__.pop(cached, None)

    @cached_property
    def once(self) -> StepBatch:
        """The batch with each sample once, where all stand in it equally often: every epoch of a trainer is recorded.
        Itself where they do not. Two answers that are equal stay two.
        """
        if not self.spine.has_tokens:
            return self
        keys = marked(self.spine, [name for name in TELL_TWINS if self.spine.refs(name)]) if len(self) else []
        times = Counter(keys)
        epochs = math.gcd(*times.values())
        if epochs < 2:
            return self
        left = {key: count // epochs for key, count in times.items()}
        kept = []
        for sample, key in enumerate(keys):
            if left[key]:
                left[key] -= 1
                kept.append(sample)
        others = [(sheet, [places[sample] for sample in kept]) for sheet, places in self.columns.sheets[1:]]
        return StepBatch(self.step, self.spine.of(kept), others, self.columns.records, self._run)

    # ---- what there is

    def has(self, name: str) -> bool:
        """Whether a canonical name, or one of the batch's own words, has something behind it."""
        if name in WORDS:
            return WORDS[name](self)
        about_tokens = meaning(name).alignment in ("next", "full")
        return (self.columns.of(name) if about_tokens else self.columns.ref(name)) is not None

    # ---- tokens

    @cached_property
    def tokens_N(self) -> Array | None:
        """The token ids."""
        if not self.spine.has_tokens:
            return None
        rows = [self.spine.tokens(sample) for sample in range(len(self))]
        tokens_N: Array = np.concatenate(rows).astype(np.int64) if rows else np.zeros(0, dtype=np.int64)
        return tokens_N

    @cached_property
    def response_N(self) -> Array | None:
        """Whether a token is at or after the beginning of its response."""
        for sheet, places in self.columns.sheets:
            starts = self._starts(sheet, places)
            if starts is not None:
                return self.flat.position_N >= np.repeat(starts, self.flat.lengths_B)
        for name in ("response_mask", "loss_mask"):
            mask = self.columns.of(name)
            if mask is not None:
                marked_N = mask.said_N & (mask.values_N != 0)
                # What an engine sampled is no prompt, whether or not it is trained on (the last turn alone); where
                # the mask leaves a response out whole, it alone tells where that begins.
                sampled = self.columns.of("rollout_logprobs")
                if sampled is not None:
                    bare_B = self.flat.count(marked_N) == 0
                    asked_N = np.repeat(bare_B, self.flat.lengths_B) | (name == "loss_mask")
                    every_N = marked_N | (asked_N & sampled.said_N & (sampled.values_N != 0))
                    marked_N = every_N if self.flat.first(every_N).all() else marked_N
                first_B = self.flat.first(marked_N)
                if sampled is not None and (begun_B := self._begun_by_engine_B(first_B, sampled)) is not None:
                    first_B = begun_B
                return self.flat.position_N >= np.repeat(first_B, self.flat.lengths_B)
        return None

    def _begun_by_engine_B(self, first_B: Array, sampled: Column) -> Array | None:
        """Where a mask leaves no prompt before its first tokens (`first_B`): the first token of each sample that the
        engine gives a number, and none before it. None where it gives numbers from there on, or not to all samples.
        """
        given_N = sampled.said_N & (sampled.values_N != 0)
        heard_B = (self.flat.count(given_N) > 0) & (self.flat.lengths_B > first_B)
        begun_B = self.flat.first(given_N)
        late_B = (begun_B - first_B)[heard_B]
        # One token late in all of them is a shift, and no prompt.
        if (first_B[heard_B] > 1).any() or len(late_B) < 2 or (late_B <= 0).any() or (late_B == 1).all():
            return None
        found_B: Array = np.where(heard_B, begun_B, first_B)
        return found_B

    def _starts(self, sheet: Sheet, places: list[int | None]) -> Array | None:
        starts: list[int] = []
        for place in places:
            if place is None or sheet.answers is not None or sheet.is_by_id:
                return None
            part, row = sheet.index[place]
            known = sheet.parts[part].response_starts
            if known is None:
                return None
            starts.append(int(known[row]))
        return np.array(starts, dtype=np.int64)

    @cached_property
    def trained_N(self) -> Array | None:
        """Whether a token counts in the loss: the loss mask, else the response mask, and no sample left out."""
        mask = self.columns.of("loss_mask") or self.columns.of("response_mask")
        if mask is None:
            return self._emptied()
        trained_N: Array = mask.said_N & (mask.values_N != 0)
        tools = self.columns.of("tool_mask")
        if tools is not None:
            # TRL multiplies the two: 0 is what a tool wrote.
            trained_N = trained_N & ~(tools.said_N & (tools.values_N == 0))
        for name, wanted in (("sample_mask", True), ("remove_sample", False)):
            kept_B = self.columns.per_sample(name)
            if kept_B is not None:
                trained_N = trained_N & np.repeat((kept_B != 0) == wanted, self.flat.lengths_B)
        return trained_N

    def _emptied(self) -> Array | None:
        """No token at all, where a mask is recorded that is zero to the last entry: what it masks out, no sample
        holds.
        """
        for name in ("loss_mask", "response_mask"):
            refs = next((refs for sheet, _ in self.columns.sheets if (refs := sheet.refs(name))), None)
            if refs and self.spine.has_tokens and not any(pages.array(ref).any() for ref in refs):
                return np.zeros(int(self.flat.lengths_B.sum()), dtype=bool)
        return None

    @property
    def pad_id(self) -> int | None:
        """The id that fills the places no sample holds."""
        for sheet, _ in self.columns.sheets:
            for part in sheet.parts:
                if (pad := _pad_id(part)) is not None:
                    return pad
        return None

    @cached_property
    def eos_id(self) -> int | None:
        """The id that ends a response: of those that stopped, else what most responses shorter than the longest end
        on.
        """
        if self.tokens_N is None or self.response_N is None or not len(self):
            return None
        counts_B = self.flat.count(self.response_N)
        usable_B = counts_B > 0
        truncated_B = self.truncated_flag_B
        ended_B = usable_B & (counts_B < counts_B.max(initial=0)) if truncated_B is None else usable_B & ~truncated_B
        last_B = self.tokens_N[(self.flat.starts_B + self.flat.lengths_B - 1)[ended_B]]
        if last_B.size == 0:
            return None
        ids, counts = np.unique(last_B, return_counts=True)
        # One that ended is no majority; several that agree are.
        if counts.max() * 2 <= last_B.size or (last_B.size < 2 and truncated_B is None):
            return None
        return int(ids[counts.argmax()])

    @property
    def truncated_flag_B(self) -> Array | None:
        """Whether each response was cut off, as the dump itself says it."""
        for name in ("truncated", "is_truncated"):
            flag_B = self.columns.per_sample(name)
            if flag_B is not None:
                cut_B: Array = flag_B != 0
                return cut_B
        for name in ("finish_reason", "status"):
            words = self.columns.texts(name)
            if words is not None:
                cut = {"length", "truncated", "max_tokens"}
                known = {*cut, "stop", "completed", "eos", "stop_sequence"}
                if any(word in known for word in words):
                    return np.array([word in cut for word in words])
        return None

    # ---- rewards and groups

    @cached_property
    def group_B(self) -> Array | None:
        """The number of each sample's group, or None where the dump names no groups."""
        for name in GROUP_NAMES:
            found: Any = self.columns.texts(name)
            if found is None:
                found = self.columns.per_sample(name)
            if found is not None and len(found):
                return self._told_apart(np.unique(np.asarray(found), return_inverse=True)[1].reshape(-1))
        return self.prompt_B

    def _told_apart(self, named_B: Array) -> Array:
        """The groups of ids that every rank counts from its own beginning, as their prompts tell: one id is then
        another group on another rank.
        """
        spine, prompt_B = self.spine, self.prompt_B
        rank_P = [part.held.record.key.rank for part in spine.parts]
        if prompt_B is None or len(set(rank_P)) < 2:
            return named_B
        rank_B = np.array([-1 if (rank := rank_P[part]) is None else rank for part, _ in spine.index])
        apart_B = np.unique(np.stack([named_B, rank_B]), axis=1, return_inverse=True)[1].reshape(-1)

        def mixes(group_B: Array) -> bool:
            pairs = np.unique(np.stack([group_B, prompt_B]), axis=1)
            return bool((np.bincount(pairs[0]) > 1).any())

        return apart_B if mixes(named_B) and not mixes(apart_B) else named_B

    @property
    def group_is_named(self) -> bool:
        """Whether the dump says which group every sample is of; else equal prompts are one group. A table of texts says
        it by its order.
        """
        said = (
            self.columns.texts(name) is not None or self.columns.per_sample(name) is not None for name in GROUP_NAMES
        )
        return any(said) or self._asked_B is not None

    @property
    def prompt_B(self) -> Array | None:
        """The number of each sample's prompt: equal prompt tokens have one number."""
        if self.tokens_N is None and self._asked_B is not None:
            return self._asked_B
        if self.tokens_N is None or self.response_N is None:
            return None
        numbers: dict[bytes, int] = {}
        heads_B = self.flat.first(self.response_N)
        if not heads_B.all():
            return None
        found = []
        for start, head in zip(self.flat.starts_B, heads_B, strict=True):
            prompt = self.tokens_N[start : start + head].tobytes()
            found.append(numbers.setdefault(prompt, len(numbers)))
        return np.array(found)

    @cached_property
    def _asked_B(self) -> Array | None:
        """The groups of a table of texts with advantages: its rows stand prompt by prompt, each of them asked equally
        often. None of other batches, and where they do not.
        """
        texts = None if self.tokens_N is not None else self.columns.texts("prompt_text")
        if not texts or self.columns.per_sample("advantages") is None:
            return None
        begins = [at for at in range(len(texts)) if not at or texts[at] != texts[at - 1]]
        size = math.gcd(*np.diff([*begins, len(texts)]).tolist())
        return np.arange(len(texts)) // size if size > 1 else None

    @cached_property
    def reward_B(self) -> Array | None:
        """One reward per sample: the scalar, else the sum of its tokens' scores or rewards."""
        if (each := self.columns.per_sample("reward")) is not None:
            return each
        for name in ("token_scores", "token_rewards"):
            if (scores_B := self.summed(name)) is not None:
                return scores_B
        functions_FB = self.columns.reward_functions_FB
        return None if functions_FB is None else np.nansum(functions_FB, axis=0)

    def summed(self, name: str) -> Array | None:
        """Each sample's sum of a per-token tensor [B]: the whole row, as trainers sum it. A reward that lies where the
        mask ends no longer is a reward all the same.
        """
        for sheet, places in self.columns.sheets:
            refs = sheet.refs(name)
            if refs and all(ref.rows is None and len(ref.shape) == 2 for ref in refs) and None not in places:
                rows = [pages.array(ref).astype(np.float64).sum(1) for ref in refs]
                if all(row.size == len(part) for row, part in zip(rows, sheet.parts, strict=True)):
                    return np.array([rows[part][row] for part, row in (sheet.index[at] for at in places)])  # type: ignore[index]
        column = self.columns.of(name)
        if column is None or not self.flat.lengths_B.sum():
            return None
        return self.flat.sum(np.where(column.said_N, column.values_N, 0.0))

    @property
    def advantage_B(self) -> Array | None:
        """One advantage per sample, or None where it changes from token to token."""
        column = self.columns.of("advantages")
        if column is None:
            return self.columns.per_sample("advantages")
        counted_N = column.said_N if self.trained_N is None else column.said_N & self.trained_N
        if not self.flat.lengths_B.sum():
            return self.columns.per_sample("advantages")
        low_B, high_B = self.flat.extremes(column.values_N, counted_N)
        spread_B = high_B - low_B
        # A sample with no token in the mask has no advantage of its own.
        constant = bool((np.isnan(spread_B) | (spread_B <= 1e-6 * np.maximum(1, np.abs(high_B)))).all())
        return high_B if constant else None

    # ---- logprobs

    @property
    def trainer(self) -> Column | None:
        """The trainer's log-probabilities of the policy that sampled: old, else the first forward's."""
        return self.columns.of("old_logprobs") or self.columns.of("policy_logprobs")

    def pair(self, a: Column, b: Column) -> Array:
        """Which tokens both say something finite of, and that count [N]."""
        both_N = a.said_N & b.said_N & np.isfinite(a.values_N) & np.isfinite(b.values_N)
        counted_N = self.trained_N if self.trained_N is not None else self.response_N
        return both_N if counted_N is None else both_N & counted_N


def counting(batch: StepBatch, trained_N: Array) -> StepBatch:
    """The same samples, with other tokens counted in the loss."""
    other = StepBatch(batch.step, batch.spine, batch.columns.sheets[1:], batch.columns.records, batch.laid.run)
    other.trained_N = trained_N
    return other


#: The batch's own words for what a rule may need, and whether it is there.
WORDS: dict[str, Callable[[StepBatch], bool]] = {
    "tokens": lambda batch: batch.spine.has_tokens,
    "mask": lambda batch: batch.trained_N is not None,
    "group": lambda batch: batch.group_B is not None,
    "rewards": lambda batch: batch.reward_B is not None,
    "advantage": lambda batch: batch.columns.of("advantages") is not None,
    "trainer_logprobs": lambda batch: batch.trainer is not None,
    "response": lambda batch: batch.response_N is not None,
}


def passes(batch: StepBatch) -> int:
    """How often each sample stands in a batch of all epochs; 1 where they do not stand equally often."""
    return len(batch) // len(batch.once) if len(batch) else 1


def mask_name(batch: StepBatch) -> str:
    """Which mask says what counts in the loss."""
    return "loss_mask" if batch.columns.of("loss_mask") else "response_mask"


def largest_advantage(batch: StepBatch) -> float:
    """The largest |advantage| of a token that counts; 0 where none is known."""
    column, trained_N = batch.columns.of("advantages"), batch.trained_N
    if column is None or trained_N is None:
        return 0.0
    heard = np.abs(column.values_N[trained_N & column.said_N])
    return float(heard[np.isfinite(heard)].max(initial=0.0))


def batches_of(step: int | None, records: list[Record], lost: list[str], run: Run | None = None) -> list[StepBatch]:
    """The batches of a step: samples that share tokens are one. What was rolled out for evaluation is left aside.

    lost: takes the records that cannot be read; a step of nothing else has no batch to say so.
    """
    trained = [record for record in records if record.key.role not in ("eval", "critic")]
    # What a critic says of the samples is about them; its own losses and batches are not the policy's.
    said = [each for each in records if each.key.role == "critic" and each.key.stage not in STAGES and _says(each)]
    sheets, unreadable, repeated = sheets_of([*trained, *said], stated_pad(stated_by(run)))
    lost += [what for what in unreadable if what not in lost]
    batches = []
    for spine, others in joined(sheets):
        own = step if any(part.held.record.key.step is not None for part in spine.parts) else None
        batches.append(StepBatch(step if others else own, spine, others, trained, run))
        batches[-1].columns.every_record = records
        repeated += [_repeats(spine, sheet) for sheet, places in others if _is_repeat(spine, sheet, places)]
    for batch in batches:
        batch.repeated = repeated
        # Records of no step may be of any: that they share no tokens with these says nothing.
        batch.strangers = [
            each.spine for each in batches if each is not batch and each.spine.has_tokens and each.step == batch.step
        ]
    return batches


def _says(record: Record) -> bool:
    """Whether a record speaks of samples that another one holds."""
    try:
        return not record.is_flat and all(ref.canonical != "input_ids" for ref in record.tensors())
    except RldbgError:
        return False


def _is_repeat(spine: Sheet, other: Sheet, places: list[int | None]) -> bool:
    """Whether a sheet that names no step is the batch over again: all its samples, and nothing the batch has not."""
    unnamed = {part.held.record.key.step for sheet in (spine, other) for part in sheet.parts}
    return None in unnamed and len(unnamed) == 2 and None not in places and len(spine) == len(other)


def _repeats(spine: Sheet, other: Sheet) -> str:
    named, again = spine.parts[0].held.record.path.name, other.parts[0].held.record.path.name
    return f"{again} holds the same {len(spine)} samples as {named}: counted once"


def _pad_id(part: Batch) -> int | None:
    """The id that fills most slots that hold no token; None where none is empty."""
    if part.ids_BS is None or part.layout is None:
        return None
    ids, counts = np.unique(part.ids_BS[part.layout.sample_BS < 0], return_counts=True)
    return int(ids[counts.argmax()]) if ids.size else None
