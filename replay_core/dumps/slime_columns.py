"""What stands in slime's and miles' columns beside their plain meaning: slices of a context-parallel group, masks that
are None because every token counts, the per-token sidecar of miles' policy loss.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from replay_core.dumps.columns import columns
from replay_core.dumps.containers import read_container
from replay_core.dumps.context_parallel import MAX_RANKS, Lengths, fits, is_sliced, put_together
from replay_core.dumps.fields import flatten
from replay_core.dumps.words import Words, named, words
from replay_core.errors import RldbgError
from replay_core.file_spans import regular
from replay_core.records import FileBytes, Inline, Problem, TensorRef

#: What a rank of a context-parallel group holds its slice of; everything else is whole on every rank.
SLICED = frozenset(
    {"log_probs", "rollout_log_probs", "ref_log_probs", "teacher_log_probs", "values", "advantages", "returns", "kl",
     "entropy", "ref_entropy", "opd_reverse_kl"}
)  # fmt: skip

_MAX_FILES = 256

#: miles' sidecar names both sides of the ratio. Its `index` is the place in the micro-batch, no sample's id.
LOSS_WORDS = words(
    sample="index=position_in_micro token_hash=sample_id total_length=total_length response_length=response_length",
    full="tokens=input_ids",
)
_LOSS_TOKENS = words(
    response=(
        "train_log_probs=policy_logprobs old_log_probs=old_logprobs rollout_log_probs=rollout_logprobs advantages "
        "local_loss_mask=response_mask train_rollout_abs_diff=metrics.train_rollout_abs_diff ppo_kl=metrics.ppo_kl "
        "pg_loss=token_loss"
    ),
)
ALL_ONES = "null means that every response token counts; remove_sample that none does"


def with_masks(fields: list[TensorRef], samples: Sequence[dict[Any, Any]]) -> list[TensorRef]:
    """loss_mask with the rows that are None filled in as the trainer fills them: ones, zeros for a removed sample."""
    masks = [sample.get("loss_mask") for sample in samples]
    lengths = [sample.get("response_length") for sample in samples]
    removed = [sample.get("remove_sample") is True for sample in samples]
    if not any(mask is None or gone for mask, gone in zip(masks, removed, strict=True)):
        return fields
    counts = [length for length in lengths if type(length) is int and 0 <= length < 1 << 24]
    if len(counts) < len(lengths) or sum(counts) > 1 << 26:
        return fields
    if not all(mask is None or isinstance(mask, list) for mask in masks):
        return fields
    filled = [
        [0] * length if gone else [1] * length if mask is None else mask
        for mask, length, gone in zip(masks, counts, removed, strict=True)
    ]
    (mask,) = columns({"loss_mask": filled})[:1]
    mask = mask.with_(sentinel=ALL_ONES, alignment=None)
    there = [ref.name for ref in fields]
    return [mask if ref.name == "loss_mask" else ref for ref in fields] + ([] if "loss_mask" in there else [mask])


def train_columns(tree: dict[str, Any], path: Path) -> tuple[list[TensorRef], list[Problem]]:
    """v1: {column: a value per sample}; what is no list is said of the whole file."""
    data = tree["rollout_data"]
    samples = _lengths(tree)
    sliced = [field for field in data if field in SLICED and samples and is_sliced(_rows(data[field]), samples)]
    group = _group(tree, path, sliced, samples) if sliced else {}
    fields: list[TensorRef] = []
    problems: list[Problem] = []
    for field, value in data.items():
        found = columns({str(field): value}) if isinstance(value, list) else flatten({str(field): value})
        if field in sliced:
            parts = {rank: other.get(field) for rank, other in group.items()}
            # A stage of the pipeline that does not compute a field lacks it.
            there = {rank: column for rank, column in parts.items() if isinstance(column, list)}
            whole = put_together(str(field), there, samples) if there and len(there) == len(parts) else None
            found = [whole] if whole else [as_slice(ref) for ref in found]
            if whole is None:
                what = f"{field}: this rank's slice of a context-parallel group, {_why_alone(tree)}"
                problems.append(Problem(str(path), what))
        if isinstance(value, list) and samples and len(value) != len(samples):
            found = [ref.with_(alignment=None) for ref in found]  # said of the whole batch, not of this rank's rows
        fields += found
    return fields, problems


def _why_alone(tree: dict[str, Any]) -> str:
    form = tree.get("qkv_format", "thd")
    if form in ("thd", "bshd"):
        return "whose other slices are not beside it"
    return f"cut in the form {form!s:.20}, which is not known"


SLICE = "slice."
TOGETHER = "context-parallel slices are put together in the order of their tokens, from the files of their ranks"


def is_context_parallel(tree: Any) -> bool:
    """Whether a v1 file holds slices: it says so, or its rows are shorter than the responses."""
    data = tree.get("rollout_data") if isinstance(tree, dict) else None
    if not isinstance(data, dict):
        return False
    samples = _lengths(tree)
    return bool(samples) and any(is_sliced(_rows(data[field]), samples) for field in SLICED & data.keys())


def as_slice(ref: TensorRef) -> TensorRef:
    """A slice is not said of the response: it has no alignment, and a name of its own."""
    return ref.with_(name=SLICE + ref.name)


def _lengths(tree: dict[str, Any]) -> list[Lengths]:
    """Of a v1 file. Rows that were padded before they were cut say to what: max_seq_lens."""
    data = tree["rollout_data"]
    total, response = data.get("total_lengths"), data.get("response_lengths")
    padded = data.get("max_seq_lens") if tree.get("qkv_format", "bshd") == "bshd" else None
    if not isinstance(total, list) or not isinstance(response, list) or len(total) != len(response):
        return []
    if not all(type(number) is int and 0 <= number < 1 << 30 for number in (*total, *response)):
        return []
    if not isinstance(padded, list) or len(padded) != len(total):
        return [Lengths(*pair) for pair in zip(total, response, strict=True)]
    if not all(type(number) is int and 0 <= number < 1 << 30 for number in padded):
        return []
    return [Lengths(*sizes) for sizes in zip(total, response, padded, strict=True)]


def _rows(column: Any) -> list[int]:
    if not isinstance(column, list):
        return []
    return [row.numel if isinstance(row, TensorRef) else len(row) if isinstance(row, list) else -1 for row in column]


def _group(
    tree: dict[str, Any], path: Path, sliced: Sequence[str], samples: Sequence[Lengths]
) -> dict[int, dict[Any, Any]]:
    """Rank of the context-parallel group -> its columns, from the files of one rollout with the same samples."""
    form = tree.get("qkv_format", "thd")
    if form != "thd" and (form != "bshd" or any(one.padded is None for one in samples)):
        return {}
    data = tree["rollout_data"]
    size, own = tree.get("cp_size"), tree.get("cp_rank")
    found: dict[int, dict[Any, Any]] = {}
    is_said = isinstance(size, int) and isinstance(own, int) and 1 < size <= MAX_RANKS
    if is_said and isinstance(own, int):
        found[own] = data
    unsaid: list[tuple[int, dict[Any, Any]]] = [] if is_said else [(_rank(tree), data)]
    for other in _others(path):
        theirs = other.get("rollout_data")
        if not isinstance(theirs, dict) or other.get("rollout_id") != tree.get("rollout_id"):
            continue
        if theirs.get("sample_indices") != data.get("sample_indices") or _lengths(other) != list(samples):
            continue
        if is_said and other.get("cp_size") == size and type(other.get("cp_rank")) is int:
            found.setdefault(other["cp_rank"], theirs)
            if len(found) == size:
                break
        elif not is_said:
            unsaid.append((_rank(other), theirs))
    if is_said:
        return found if len(found) == size else {}
    # Before cp_rank was written the layout is the one whose slices have the right lengths; copies are equal.
    ordered = [columns_of.get(sliced[0]) for _, columns_of in sorted(unsaid, key=lambda pair: pair[0])]
    for members in _layouts(len(ordered)):
        prints = [{_print(ordered[member]) for member in group} for group in members]
        firsts = [_rows(ordered[group[0]]) for group in members]
        if all(len(same) == 1 for same in prints) and all(
            fits(rows, samples, rank, len(members)) for rank, rows in enumerate(firsts)
        ):
            by_rank = [columns_of for _, columns_of in sorted(unsaid, key=lambda pair: pair[0])]
            return {rank: by_rank[group[0]] for rank, group in enumerate(members)}
    return {}


def _layouts(count: int) -> Iterator[list[list[int]]]:
    """Ways to be a context-parallel group with copies: the files of each of its ranks, copies side by side or apart."""
    for copies in range(1, count // 2 + 1):
        ranks = count // copies
        if count % copies or ranks > MAX_RANKS:
            continue
        yield [list(range(rank * copies, (rank + 1) * copies)) for rank in range(ranks)]
        if copies > 1:
            yield [list(range(rank, count, ranks)) for rank in range(ranks)]


def _rank(tree: dict[str, Any]) -> int:
    rank = tree.get("rank")
    return rank if type(rank) is int else -1


def _others(path: Path) -> Iterator[dict[str, Any]]:
    """The files beside `path` whose names differ from it in the rank alone, the nearest ranks first."""
    stem, _, suffix = path.name.rpartition(".")
    head, _, own = stem.rpartition("_")
    if not head or not own.isdecimal():
        return
    beside = []
    for entry in path.parent.glob(f"{_escaped(head)}_*.{suffix}"):
        number = entry.stem[len(head) + 1 :]
        if number.isdecimal() and len(number) < 10 and entry != path:
            beside.append((abs(int(number) - int(own)), entry))
    for _, entry in sorted(beside)[:_MAX_FILES]:
        try:
            other = read_container(entry).tree
        except RldbgError:
            continue  # said where that rank's own record is read
        if isinstance(other, dict):
            yield other


def _escaped(text: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", text)


def _print(column: Any) -> int:
    """A checksum of a column's numbers, which tells copies of one slice from its neighbours."""
    crc = 0
    for row in column if isinstance(column, list) else []:
        if isinstance(row, TensorRef) and isinstance(row.source, FileBytes):
            with regular(row.source.path) as file:
                file.seek(row.source.offset)
                crc = zlib.crc32(file.read(min(row.source.nbytes, 1 << 24)), crc)
        else:
            value = row.source.value if isinstance(row, TensorRef) and isinstance(row.source, Inline) else row
            crc = zlib.crc32(repr(value).encode(), crc)
        crc = zlib.crc32(b"|", crc)
    return crc


def loss_columns(fields: list[TensorRef]) -> list[TensorRef]:
    """miles' policy_loss_debug. What is per token is of the response, unless the rank held only a slice of it."""
    responses = _numbers(next((ref for ref in fields if ref.name == "response_length"), None))
    first = next((ref for ref in fields if ref.name == "train_log_probs"), None)
    rows = (
        None if first is None else first.rows or (first.shape[1:] * first.shape[0] if len(first.shape) == 2 else None)
    )
    words: Words = {**LOSS_WORDS, **_LOSS_TOKENS}
    if rows is None or list(rows) != responses:
        words = {**LOSS_WORDS, **{field: (name, None) for field, (name, _) in _LOSS_TOKENS.items()}}
    answer = []
    for ref in fields:
        if ref.name in ("ppo_kl", "pg_loss") and rows and len(rows) > 1 and ref.shape == (sum(rows),):
            ref = ref.with_(rows=rows)  # the samples' tokens end to end
        answer.append(ref)
    return named(answer, words)


def _numbers(ref: TensorRef | None) -> list[int]:
    value = ref.source.value if ref is not None and isinstance(ref.source, Inline) else None
    return list(value) if isinstance(value, list) else []
