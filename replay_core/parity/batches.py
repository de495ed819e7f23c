"""The batches of a parity run: random tokens, text through a tokenizer, a recorded micro-batch. numpy only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from replay_core.decoding import FILE, find_tokenizer
from replay_core.dumps import open_run
from replay_core.errors import RequestError
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.reading import read_batch

Ints = NDArray[np.int64]

#: Rows, slots and prompt tokens of a made-up batch: those of ROLL's parity test, smaller.
ROWS, WIDTH, PROMPT = 8, 48, 12
SEED = 42
#: A row of text is cut here: parity of values needs no long context.
TEXT_TOKENS = 256

MADE_UP = ("random", "padded", "stale")
DEFAULT = MADE_UP


class ParityBatch(Struct):
    """One batch. rewards_BT [B, S - 1] are about token t + 1, as the values are."""

    name: str
    kind: str
    ids_BS: Ints
    attention_BS: Ints
    response_BS: Ints
    rewards_BT: NDArray[np.float32]
    tokenizer: Path | None = None
    notes: list[str] = field(default_factory=list)


def make_batch(
    spec: str, vocabulary: int, tokenizer: Path | None = None, seed: int = SEED, *, avoid: int | None = None,
    **selection: int,
) -> ParityBatch:  # fmt: skip
    """The batch a word or path asks for: random | padded | stale | text:FILE | a dump.

    random: no padding. padded: rows of different lengths, zeros after them. stale: the same, with old tokens in the
    padding, as ROLL's rollouts leave them. Made-up rows do without the token `avoid`: an embedding may not train it.

    Raises:
        RequestError: no such file, tokens past the vocabulary, or nothing to compare in it.
        DumpError, SelectionError: the dump cannot be read.
    """
    if spec in MADE_UP:
        batch = _random(spec, vocabulary, seed, avoid)
    elif spec.startswith("text:") or spec == "text":
        batch = _text(Path(spec.partition(":")[2]) if ":" in spec else None, tokenizer, vocabulary)
    else:
        batch = _recorded(Path(spec), tokenizer, selection)
    _need_tokens(batch, vocabulary, spec)
    if not batch.rewards_BT.size:
        batch.rewards_BT = _rewards(batch, seed)
    return batch


def _random(name: str, vocabulary: int, seed: int, avoid: int | None) -> ParityBatch:
    draw = np.random.default_rng(seed)
    ids_BS = draw.integers(1, vocabulary, (ROWS, WIDTH))
    if avoid is not None and vocabulary > 2:
        ids_BS[ids_BS == avoid] = 1 if avoid != 1 else 2
    attention_BS = np.ones((ROWS, WIDTH), np.int64)
    response_BS = np.ones((ROWS, WIDTH), np.int64)
    response_BS[:, :PROMPT] = 0
    if name != "random":
        lengths = draw.integers(PROMPT + 4, WIDTH - 8, ROWS)
        attention_BS = (np.arange(WIDTH)[None] < lengths[:, None]).astype(np.int64)
        response_BS *= attention_BS
    if name == "padded":
        ids_BS = ids_BS * attention_BS
    return ParityBatch(name, name, ids_BS, attention_BS, response_BS, np.zeros((0, 0), np.float32))


def _text(path: Path | None, tokenizer: Path | None, vocabulary: int) -> ParityBatch:
    """Each line a row; its second half counts as the response."""
    source = Path(__file__).with_name("configs") / "prompts.txt" if path is None else path
    try:
        lines = [line for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise RequestError(f"the text cannot be read: {said}", file=str(source)) from None
    notes = []
    if tokenizer is None:
        notes.append("no tokenizer is named: a token is a byte of the text")
        rows = [list(line.encode()) for line in lines]
    else:
        rows = [_encoder(tokenizer).encode(line).ids for line in lines]
    long = sum(len(row) > TEXT_TOKENS for row in rows)
    if long:
        notes.append(f"{long} of {len(rows)} lines are cut at {TEXT_TOKENS} tokens")
    rows = [row[:TEXT_TOKENS] for row in rows if len(row) > 1]
    if not rows:
        raise RequestError("the text has no line of two tokens", file=str(source), found=f"{len(lines)} lines")
    width = max(map(len, rows))
    ids_BS = np.zeros((len(rows), width), np.int64)
    attention_BS, response_BS = np.zeros_like(ids_BS), np.zeros_like(ids_BS)
    for number, row in enumerate(rows):
        ids_BS[number, : len(row)] = row
        attention_BS[number, : len(row)] = 1
        response_BS[number, len(row) // 2 : len(row)] = 1
    name = source.stem if path is None else source.name
    return ParityBatch(name, "text", ids_BS, attention_BS, response_BS, np.zeros((0, 0), np.float32), tokenizer, notes)


def _encoder(path: Path) -> Any:
    from tokenizers import Tokenizer  # 20 ms

    file = path / FILE if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:
        raise RequestError(f"the file is no tokenizer: {error}", file=str(file), expected=FILE) from None


def _recorded(path: Path, tokenizer: Path | None, selection: dict[str, int]) -> ParityBatch:
    run = open_run(path)
    chosen = {name: selection.get(name, 0) for name in ("step", "rank", "micro")}
    recorded = read_batch(run, ReplayPlan.from_mapping({"dump": str(path), "model": "", "out": "", **chosen}))
    batch = recorded.batch
    notes = [f"{path}: {recorded.key}", *recorded.notes]
    attention_BS = batch.valid_BS.astype(np.int64)
    if batch.response_BS is None:
        notes.append("the record has no response mask: every token counts as generated")
        response_BS = attention_BS.copy()
    else:
        response_BS = batch.layout().response_BS.astype(np.int64)  # type: ignore[union-attr]
    empty = int((attention_BS.sum(1) == 0).sum())
    if empty:
        notes.append(f"{empty} of {len(attention_BS)} rows hold no token: they say nothing")
    found = tokenizer or find_tokenizer(path, [one for one in run.models.values() if Path(one).is_dir()])
    return ParityBatch(
        path.name, "recorded", batch.ids_BS.astype(np.int64), attention_BS, response_BS, np.zeros((0, 0), np.float32),
        found, notes,
    )  # fmt: skip


def _rewards(batch: ParityBatch, seed: int) -> NDArray[np.float32]:
    """A standard normal reward at each response's last token: the same for both critics, whatever it is."""
    rewards_BT = np.zeros((batch.ids_BS.shape[0], batch.ids_BS.shape[1] - 1), np.float32)
    drawn = np.random.default_rng(seed).standard_normal(len(rewards_BT)).astype(np.float32)
    for row, mask_S in enumerate(batch.response_BS * batch.attention_BS):
        about = np.flatnonzero(mask_S[1:])
        if about.size:
            rewards_BT[row, about[-1]] = drawn[row]
    return rewards_BT


def _need_tokens(batch: ParityBatch, vocabulary: int, spec: str) -> None:
    if batch.ids_BS.ndim != 2 or batch.ids_BS.shape[1] < 2 or not batch.ids_BS.size:
        raise RequestError("the batch has no rows of two tokens", file=spec, found=f"shape {batch.ids_BS.shape}")
    if not (batch.response_BS * batch.attention_BS)[:, 1:].any():
        raise RequestError(
            "no token of the batch counts: every row is masked", file=spec,
            expected="a response token in at least one row", found=f"{len(batch.ids_BS)} rows, all masked",
        )  # fmt: skip
    low, high = int(batch.ids_BS.min()), int(batch.ids_BS.max())
    if low < 0 or high >= vocabulary:
        raise RequestError(
            "the batch's tokens do not fit the critics' vocabulary",
            file=spec, tensor="input_ids", expected=f"0..{vocabulary - 1}", found=f"{low}..{high}",
            hint="for a random: model set critic.model_args.vocab_size",
        )  # fmt: skip
