"""What sets samples apart: which one thing that is known of all of them is so of these, and of no others.

A finding that says what some samples show is asked next why these. Lengths, first and last tokens, what stands in a
response, padding, places, ranks and versions are tried: what parts nearly all of them, one way and the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from msgspec import Struct, field

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.finding import Evidence, share, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rules.tokens import truncated
from replay_core.regexes import regex

#: Samples of the smaller side, and of both, before a line between them is no chance; how many may lie beyond it.
SIDE, ALL, PURE = 5, 20, 0.97
#: Different values of a mark (a first token), and how many of the most common tokens are tried.
VALUES, TRIED = 12, 200
_WORD = regex(r"<[^<>]{1,20}>|[^\W\d_]+|\d+|\S")


class Trait(Struct, frozen=True):
    """What sets samples apart, in words that follow "those": `whose response is longer than 6 tokens`."""

    words: str
    inside: int
    of_inside: int
    outside: int
    of_outside: int

    @property
    def evidence(self) -> Evidence:
        return shown(
            f"those {self.words}",
            f"{share(self.inside, self.of_inside)}; of all others {share(self.outside, self.of_outside)}",
        )


class Apart(Struct):
    """The traits of samples of one batch or of several, and which of them are affected."""

    off: list[Array] = field(default_factory=list)
    numbers: dict[str, list[Array]] = field(default_factory=lambda: defaultdict(list))
    marks: dict[str, list[list[str]]] = field(default_factory=lambda: defaultdict(list))
    holds: list[list[frozenset[str]]] = field(default_factory=list)

    def take(self, batch: StepBatch, off_B: Array, among_B: Array | None = None) -> None:
        """Samples of a batch, of which some are off; those of `among_B` where that is given."""
        kept = np.arange(len(batch)) if among_B is None else np.flatnonzero(among_B)
        self.off.append(np.asarray(off_B, dtype=bool)[kept])
        for name, values_B in _numbers(batch):
            self.numbers[name].append(values_B[kept])
        for name, marks_B in _marks(batch):
            self.marks[name].append([marks_B[at] for at in kept])
        held = _held(batch)
        if held is not None:
            self.holds.append([held[at] for at in kept])

    def told(self) -> Trait | None:
        """The first trait that parts them."""
        if not self.off:
            return None
        off = np.concatenate(self.off)
        if off.size < ALL or min(off.sum(), (~off).sum()) < SIDE:
            return None
        for name, values in self.marks.items():
            if len(values) == len(self.off) and (found := _by_mark(name, [x for each in values for x in each], off)):
                return found
        if len(self.holds) == len(self.off) and (held := _by_token([x for each in self.holds for x in each], off)):
            return held
        for name, numbers in self.numbers.items():
            if len(numbers) == len(self.off) and (line := _by_number(name, np.concatenate(numbers), off)):
                return line
        return None


def response_sizes(batch: StepBatch) -> tuple[str, Array] | None:
    """How long each response is [B], behind the unit: tokens, or characters where texts alone are known."""
    if batch.tokens_N is not None and batch.response_N is not None:
        return "tokens", batch.flat.count(batch.response_N).astype(np.float64)
    texts = batch.columns.texts("response_text")
    return None if texts is None else ("characters", np.array([float(len(text)) for text in texts]))


def _numbers(batch: StepBatch) -> Iterator[tuple[str, Array]]:
    response_N = batch.response_N
    if (sizes := response_sizes(batch)) is not None:
        yield f"whose response is {{}} {{:g}} {sizes[0]}", sizes[1]
    if batch.tokens_N is not None and response_N is not None:
        yield "whose prompt is {} {:g} tokens", batch.flat.first(response_N).astype(np.float64)
    if (pads_B := batch.laid.left_pads_B) is not None:
        yield "whose left padding is {} {:g} tokens", pads_B.astype(np.float64)
    if (version_B := batch.columns.per_sample("weight_version")) is not None:
        yield "whose weights are {} version {:g}", version_B
    yield "whose row is {} {:g}", np.arange(len(batch), dtype=np.float64)
    if batch.step is not None:
        yield "of steps {} {:g}", np.full(len(batch), float(batch.step))


def _marks(batch: StepBatch) -> Iterator[tuple[str, list[str]]]:
    cut_B = truncated(batch) if batch.eos_id is not None else batch.truncated_flag_B
    if cut_B is not None:
        yield "that {}", ["are cut off" if cut else "are not cut off" for cut in cut_B]
    if (texts := batch.columns.texts("response_text")) is not None:
        words = [_WORD.findall(text) for text in texts]
        yield "whose first word is {}", [repr(each[0]) if each else "none" for each in words]
    elif batch.tokens_N is not None and batch.response_N is not None:
        first, last = [], []
        for span in batch.flat.spans:
            inside = batch.tokens_N[span][batch.response_N[span]]
            first.append(str(inside[0]) if inside.size else "none")
            last.append(str(inside[-1]) if inside.size else "none")
        yield "whose first token is {}", first
        yield "whose last token is {}", last
    keys = batch.laid.keys_of("input_ids")
    if keys and all(key is not None and key.rank is not None for key in keys):
        yield "of rank {}", [str(key.rank) for key in keys if key is not None]
    for name in ("data_source", "source", "task"):
        if (sources := batch.columns.texts(name)) is not None:
            yield f"whose {name} is {{}}", [repr(one) for one in sources]


def _held(batch: StepBatch) -> list[frozenset[str]] | None:
    if (texts := batch.columns.texts("response_text")) is not None:
        return [frozenset(map(repr, _WORD.findall(text))) for text in texts]
    if batch.tokens_N is None or batch.response_N is None:
        return None
    return [
        frozenset(f"token {one}" for one in np.unique(batch.tokens_N[span][batch.response_N[span]]).tolist())
        for span in batch.flat.spans
    ]


def _parted(words: str, inside: Array, off: Array) -> Trait | None:
    """The trait, where nearly all of those that have it are off, and nearly none of the others."""
    count, others = int(inside.sum()), int((~inside).sum())
    if min(count, others) < SIDE:
        return None
    hit, missed = int(off[inside].sum()), int(off[~inside].sum())
    return Trait(words, hit, count, missed, others) if hit >= PURE * count and missed <= (1 - PURE) * others else None


def _by_mark(name: str, marks: list[str], off: Array) -> Trait | None:
    names = sorted(set(marks))
    if not 2 <= len(names) <= VALUES:
        return None
    each = np.array(marks)
    of = {one: off[each == one] for one in names}
    bad = [one for one in names if of[one].mean() > 0.5]
    return _parted(name.format(" or ".join(bad[:4])), np.isin(each, bad), off) if 0 < len(bad) < len(names) else None


def _by_token(held: list[frozenset[str]], off: Array) -> Trait | None:
    counts: dict[str, int] = defaultdict(int)
    for each in held:
        for one in each:
            counts[one] += 1
    usual = sorted((one for one, many in counts.items() if SIDE <= many <= len(held) - SIDE),
                   key=lambda one: -counts[one])[:TRIED]  # fmt: skip
    found = []
    for one in usual:
        inside = np.array([one in each for each in held])
        found += [trait for trait in (_parted(f"whose response holds {one}", inside, off),
                                      _parted(f"whose response holds no {one}", ~inside, off)) if trait]  # fmt: skip
    return found[0] if len(found) == 1 else None


def _by_number(name: str, values: Array, off: Array) -> Trait | None:
    if not np.isfinite(values).all():
        return None
    for line in np.unique(values)[:-1]:
        above = values > line
        for words, inside in ((name.format("over", line), above), (name.format("at most", line), ~above)):
            if (found := _parted(words, inside, off)) is not None:
                return found
    return None
