"""prime-rl: token exports (token_exports/step_N/rank_R.jsonl) and transport batches (rollouts/step_N/rank_R.bin).

A file holds several micro-batches; each is a record. An export is complete when its folder holds `STABLE`,
written after a barrier. A batch is msgpack without names: the fields are known by their place, and trailing
ones may be left out (prime-rl @559b44772, transport/types.py).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from replay_core.budget import OPTION, factor
from replay_core.dumps.containers import read_container
from replay_core.dumps.containers.columns import Table
from replay_core.dumps.dialect import Dialect, Index
from replay_core.dumps.json_rows import JsonRows, decoded, first_row, is_broken, names_with, rows_by_place
from replay_core.dumps.listing import Folder, listing
from replay_core.dumps.row_dialect import table_of
from replay_core.dumps.words import named, words
from replay_core.errors import BudgetError, DumpError, RldbgError
from replay_core.file_spans import kept_while_unchanged, regular
from replay_core.records import Fields, Inline, Problem, RecordKey, TensorRef
from replay_core.regexes import regex

#: Micro-batches of one rank in one step, which cost a record each: so many, and one more for so many bytes. A run over
#: thousands of sequences packs them into hundreds, of a few hundred tokens at least.
FLOOR_BATCHES, BATCH_BYTES = 1 << 9, 1 << 11
#: Bytes of the least batch that holds a token: seven columns of at least one value.
LEAST_BATCH = 14
_EXPORT = regex(r"(?:/token_exports)?(?:/step_(\d+))?/rank_(\d+)\.jsonl$")
_BATCH = regex(r"/rollouts/step_(\d+)/rank_(\d+)\.bin$")
_EXPORT_NEEDS = frozenset({"micro_step", "token_ids", "trainer_logprobs"})
_MICRO = ("micro_step",)

#: The places of a MicroBatch's fields.
PLACES = (
    "input_ids", "loss_mask", "advantages", "inference_logprobs", "position_ids", "sequence_lengths", "temperatures",
    "env_names", "seq_lens", "ref_logprobs", "routed_experts", "mm_kwargs", "mm_token_type_ids", "rl_weights",
    "ce_weights", "ref_kl_weights",
)  # fmt: skip
#: Fields that a batch cannot lack, and those whose places no version has changed.
_REQUIRED, _SETTLED = 4, 5
_PLACE = "place_"
_OTHER_VERSION = "a MicroBatch of another version: its fields from the sixth place on are in no order that is known"

WORDS = words(
    full=(
        "token_ids=input_ids input_ids=input_ids position_ids=position_ids loss_mask=loss_mask advantages=advantages "
        "inference_logprobs=rollout_logprobs trainer_logprobs=policy_logprobs ref_logprobs=ref_logprobs "
        "entropy=entropy mismatch_kl=kl importance_ratio=is_ratio log_importance_ratio=log_is_ratio "
        "prob_delta=prob_delta is_masked=is_masked is_masked_high=is_masked_high is_masked_low=is_masked_low "
        "rewards=token_rewards temperatures=temperature"
    ),
    sample="sequence_lengths=sample_lengths export_sequence_idx=sample_id env_name=env_name",
)

SENTINELS = {
    "inference_logprobs": "0.0 on the prompt",
    "trainer_logprobs": "log(1/vocabulary) at the first token",
}
_NULLABLE = "null is a number that was not finite, or not computed"


def detect(path: Path) -> bool:
    return any(_kind(f"{folder.path}/{file}") for folder in listing(path).folders for file in _names(folder))


def _names(folder: Folder) -> list[str]:
    return names_with(folder, ".jsonl", ".bin")


def _kind(text: str) -> re.Match[str] | None:
    export = _EXPORT.search(text)
    if export:
        row = first_row(Path(text))
        # Elsewhere than where prime-rl writes them, only what a file holds says that it is one.
        is_home = "/token_exports/" in export.group() and export.group(1) is not None
        if row is None or is_broken(row):
            return export if is_home else None
        return export if row.keys() >= _EXPORT_NEEDS else None
    return _BATCH.search(text)


def index(path: Path) -> Index:
    found = Index([])
    for folder in listing(path).folders:
        for file in _names(folder):
            match = _kind(f"{folder.path}/{file}")
            if match is None:
                continue
            rank, is_export = int(match.group(2)), match.re.pattern == _EXPORT.pattern
            step = int(match.group(1)) if match.group(1) else _step_inside(folder.file(file))
            if is_export and "/token_exports/" in match.group() and "STABLE" not in folder.names:
                found.problems.append(Problem(folder.path, "no STABLE marker: the export is not complete"))
            place = folder.file(file)
            micros = _micros(place, is_export, found.problems)
            stage = "forward_data" if is_export else "batch_inputs"
            found.files += [(RecordKey(step, micro, rank, "actor", stage), place) for micro in micros]
    found.problems = list(dict.fromkeys(found.problems))
    return found


def _step_inside(file: Path) -> int | None:
    step = (first_row(file) or {}).get("step")
    return step if type(step) is int else None


def _micros(file: Path, is_export: bool, problems: list[Problem]) -> list[int | None]:
    try:
        if not is_export:
            return list(range(_batch_count(file)))
        rows = _rows(file)
    except RldbgError as error:
        problems.append(Problem(str(file), error.message))
        return [None]
    problems += rows.problems
    return sorted({row.places[0] for row in rows.rows}, key=lambda micro: (micro is not None, micro or 0))


def _rows(file: Path) -> JsonRows:
    """The lines of an export.

    Raises:
        BudgetError: more micro-batches than its bytes may cost.
    """
    rows = rows_by_place(file, _MICRO)
    last = rows.rows[-1]
    _check_cost(file, len({row.places[0] for row in rows.rows}), last.offset + last.nbytes)
    return rows


def _batch_count(file: Path) -> int:
    """How many micro-batches the msgpack list declares: its first bytes say."""
    with regular(file) as opened:
        head = opened.read(5)
        size = opened.seek(0, 2)
    first = head[0] if head else 0
    if 0x90 <= first <= 0x9F:
        count = first & 0x0F
    elif first in (0xDC, 0xDD) and len(head) >= (3 if first == 0xDC else 5):
        count = int.from_bytes(head[1 : 3 if first == 0xDC else 5], "big")
    else:
        raise DumpError("the file is no list of micro-batches", file=str(file), found=f"the first bytes {head!r}")
    if not 0 < count * LEAST_BATCH <= size:
        raise DumpError("the file declares more micro-batches than it has bytes for", file=str(file), found=str(count))
    _check_cost(file, count, size)
    return count


def _check_cost(file: Path, count: int, size: int) -> None:
    if count > (most := int((FLOOR_BATCHES + size // BATCH_BYTES) * factor())):
        raise BudgetError(
            "the file declares more micro-batches than its bytes may cost",
            file=str(file),
            expected=f"at most {most:,}, as {size:,} bytes are stored",
            found=f"{count:,}",
            hint=f"if you trust the file, {OPTION}=8 before the command raises every limit eightfold",
        )


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    """The micro-batch's sequences as rows.

    Raises:
        DumpError: the file is damaged, or is no export and no batch.
    """
    if _BATCH.search(str(path)):
        fields = _named(_batch(key, path))
        numbered = any(ref.name.startswith(_PLACE) for ref in fields)
        return Fields(fields, [Problem(str(path), _OTHER_VERSION)] if numbered else [])
    # Where opening told no numbers, why.
    rows = _rows(path) if key.micro is None else rows_by_place(path, _MICRO)
    problems = list(rows.problems)
    chosen = rows.of(key.micro)
    fields = table_of(decoded(path, chosen, problems))
    if not fields:
        raise DumpError("no row of the micro-batch can be read", file=str(path))
    return Fields(_named(fields), problems)


def _named(fields: list[TensorRef]) -> list[TensorRef]:
    answer = []
    for ref in named(fields, WORDS):
        notes = [SENTINELS.get(ref.name), _NULLABLE if ref.sentinel else None]
        answer.append(ref.with_(sentinel="; ".join(note for note in notes if note) or None))
    return answer


@kept_while_unchanged(1)
def _batches(path: Path) -> Any:
    """All of a file's micro-batches: it is one value, and each record is one of them."""
    return read_container(path).tree


def _batch(key: RecordKey, path: Path) -> list[TensorRef]:
    if key.micro is None:
        _batch_count(path)  # why opening it told no numbers
    tree = _batches(path)
    batch = tree[key.micro] if isinstance(tree, list) and key.micro is not None and key.micro < len(tree) else None
    if not isinstance(batch, list) or not _REQUIRED <= len(batch) <= len(PLACES):
        raise DumpError(
            "the file is no list of micro-batches",
            file=str(path),
            expected=f"lists of {_REQUIRED} to {len(PLACES)} fields",
            found=type(batch).__name__ if not isinstance(batch, list) else f"{len(batch)} fields",
        )
    by_name = dict(zip(_places(batch), batch, strict=False))
    lengths = _lengths(by_name)
    fields = []
    for order, (field, value) in enumerate(by_name.items()):
        fields += [ref.with_(order=order) for ref in _column(field, value, lengths)]
    return fields


def _places(batch: list[Any]) -> tuple[str, ...]:
    """The names of a batch's fields. Earlier versions had other fields from the sixth place on: those stay numbers."""
    tokens, lengths, temperatures = batch[0], *[*batch[_SETTLED : _SETTLED + 2], None, None][:2]
    count = len(tokens) if isinstance(tokens, list) else -1
    is_known = isinstance(lengths, list) and all(type(n) is int for n in lengths) and sum(lengths) == count
    if is_known and (temperatures is None or (isinstance(temperatures, list) and len(temperatures) == count)):
        return PLACES
    return (*PLACES[:_SETTLED], *(f"{_PLACE}{number}" for number in range(_SETTLED + 1, len(PLACES) + 1)))


def _lengths(batch: dict[str, Any]) -> tuple[int, ...] | None:
    """Tokens of each packed sequence, where they add up to the pack."""
    for field in ("sequence_lengths", "seq_lens"):
        lengths = batch.get(field)
        tokens = batch.get("input_ids")
        if (
            isinstance(lengths, list)
            and isinstance(tokens, list)
            and all(isinstance(length, int) and length >= 0 for length in lengths)
            and sum(lengths) == len(tokens)
        ):
            return tuple(lengths)
    return None


def _column(field: str, value: Any, lengths: tuple[int, ...] | None) -> list[TensorRef]:
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        # One name per token; a pack has few of them.
        rows = lengths if lengths and sum(lengths) == len(value) else None
        return [TensorRef(field, "text", (len(value),), Inline(value), rows=rows)]
    table = Table()
    table.add({field: value})
    refs = []
    for ref in table.fields().values():
        if ref.dtype == "text" or len(ref.shape) < 2:
            refs.append(ref)
            continue
        flat = ref.with_(shape=ref.shape[1:])  # the one row is the pack
        refs.append(flat.with_(rows=lengths) if lengths and flat.shape[0] == sum(lengths) else flat)
    return refs


DIALECT = Dialect("prime_rl", "names", detect, index, read, grows=r"\.jsonl$")
