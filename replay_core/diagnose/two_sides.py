"""Records of pairs that hold their two answers side by side, each under a name of its own (`chosen_input_ids`,
`rejected_input_ids`), as one batch: the rows of the better answers, and behind them those of the worse.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from replay_core import naming, pages
from replay_core.records import Inline, TensorRef
from replay_core.regexes import regex
from replay_core.samples.batch import IGNORED, Array

#: Which side a tensor is of; what is left of its name without that word says what it is.
_SIDE = regex(r"(?i)(?:^|(?<=[._/ ]))(chosen|rejected|accepted|win|lose)_|_(chosen|rejected|accepted|win|lose)$")
_BETTER = frozenset({"chosen", "accepted", "win"})
#: What is said of tokens, by its canonical name. Numbers of whole answers (implicit rewards, sums) are no samples' own.
_OF_TOKENS = frozenset({
    "input_ids", "attention_mask", "position_ids", "loss_mask", "response_mask", "labels", "policy_logprobs",
    "ref_logprobs", "entropy",
})  # fmt: skip
_POLICYS = frozenset({"rollout_logprobs", "old_logprobs"})


class _Sides(Struct):
    better: TensorRef | None = None
    worse: TensorRef | None = None


def sides_of(name: str) -> tuple[str, bool] | None:
    """What a tensor is called without the word for its side, and whether that is the better one; None of neither."""
    found = _SIDE.search(name)
    if found is None:
        return None
    word = (found[1] or found[2]).lower()
    return name[: found.start()] + name[found.end() :], word in _BETTER


def one_batch(fields: Sequence[TensorRef]) -> Sequence[TensorRef]:
    """The fields with both sides' tokens as one batch, where they hold them apart; as they are where they do not."""
    sides: dict[str, _Sides] = {}
    for ref in fields:
        if ref.is_text or not ref.is_readable or (len(ref.shape) != 2 and ref.rows is None):
            continue
        if (told := sides_of(ref.name)) is not None:
            rest, better = told
            canonical = naming.canonical(rest)
            of = sides.setdefault("policy_logprobs" if canonical in _POLICYS else canonical, _Sides())
            if better:
                of.better = of.better or ref
            else:
                of.worse = of.worse or ref
    both = {name: (one.better, one.worse) for name, one in sides.items() if one.better and one.worse}
    if "input_ids" not in both or any((ref.canonical or ref.name) == "input_ids" for ref in fields):
        return fields
    prompts = _prompts(fields, both)
    names = sorted(_OF_TOKENS & set(both), key=lambda name: name != "input_ids")
    made = [joined for name in names if (joined := _joined(name, both[name])) is not None]
    if prompts is not None:
        # Answers without their prompts, which stand beside them once.
        parts = {"input_ids": "response_ids", "attention_mask": "response_mask"}
        made = [ref.with_(canonical=parts.get(str(ref.canonical), ref.canonical)) for ref in made]
        made = [ref for ref in made if ref.canonical in ("response_ids", "response_mask")] + prompts
    elif "labels" in both and not {"loss_mask", "response_mask"} & set(both):
        labels = next(ref for ref in made if ref.canonical == "labels")
        counts = (pages.array(labels) != IGNORED).astype(np.int64)
        made.append(_made(labels, "loss_mask", counts).with_(dtype="int64"))
    own = {ref.canonical for ref in made}
    return [*made, *(ref for ref in fields if sides_of(ref.name) is None and (ref.canonical or ref.name) not in own)]


def _prompts(fields: Sequence[TensorRef], both: dict[str, tuple[TensorRef, TensorRef]]) -> list[TensorRef] | None:
    """Prompts that both sides share, twice; None where rows hold them (or none are recorded)."""
    found = {ref.name.rpartition(".")[2]: ref for ref in fields if not ref.is_text and ref.is_readable}
    ids, mask = found.get("prompt_input_ids"), found.get("prompt_attention_mask")
    answers = both["input_ids"][0]
    if ids is None or (ids.rows is None) != (answers.rows is None) or _count(ids) != _count(answers):
        return None
    made = [_joined("prompt_ids", (ids, ids))]
    if mask is not None:
        made.append(_joined("prompt_mask", (mask, mask)))
    return [ref for ref in made if ref is not None]


def _count(ref: TensorRef) -> int:
    return len(ref.rows) if ref.rows is not None else ref.shape[0]


def _joined(name: str, sides: tuple[TensorRef, TensorRef]) -> TensorRef | None:
    """Both sides' rows under one another, filled up on the right to one width (with what fills the places of no
    token).
    """
    better, worse = sides
    if (better.rows is None) != (worse.rows is None) or _count(better) != _count(worse):
        return None
    arrays = [pages.array(ref) for ref in sides]
    if better.rows is not None and worse.rows is not None:
        values: Array = np.concatenate([array.reshape(-1) for array in arrays])
        return _made(better, name, values).with_(rows=(*better.rows, *worse.rows))
    width = max(array.shape[1] for array in arrays)
    fill = IGNORED if name == "labels" else 0
    wide = [np.pad(array, ((0, 0), (0, width - array.shape[1])), constant_values=fill) for array in arrays]
    return _made(better, name, np.concatenate(wide))


def _made(ref: TensorRef, name: str, values: Array) -> TensorRef:
    return ref.with_(
        canonical=name,
        shape=values.shape,
        source=Inline(values),
        alignment=naming.meaning(name).alignment if name != "prompt_ids" else None,
        digest=None,
    )


def place_of(ref: TensorRef, row: int | None) -> tuple[str, int | None]:
    """Under which name and in which row a record itself holds the row of a batch of both sides."""
    told = sides_of(ref.name)
    if told is None or row is None or not isinstance(ref.source, Inline) or ref.canonical == ref.name:
        return ref.name, row
    half = _count(ref) // 2
    if row < half:
        return ref.name, row
    words = {"chosen": "rejected", "accepted": "rejected", "win": "lose"}
    found = _SIDE.search(ref.name)
    assert found is not None
    word = found[1] or found[2]
    other = ref.name[: found.start()] + found[0].replace(word, words.get(word.lower(), word)) + ref.name[found.end() :]
    return other, row - half
