"""Padding that is attended to: an attention mask that counts what fills the rows up on the left."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.compared import distance
from replay_core.diagnose.finding import Finding, finding, listed, share, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.gap import DISAGREE
from replay_core.diagnose.rule import Skip, given, rule

#: Rows before their beginnings are compared.
FEWEST = 4


@rule("D34", "padding is attended to", link="tokens", scope="batch", needs=("tokens", "response", "attention_mask"),
      lasts=True,
      explains=("D09", "D10", "D11", "D12", "D14", "D15", "D16", "D19", "D20", "D24", "D26", "D42", "D82", "D94",
                "L10"),
      source="transformers: no attention_mask, or ids.ne(pad) of another pad id, attends to left padding")  # fmt: skip
def attended(batch: StepBatch) -> Iterator[Finding]:
    """Rows of one width (4 and more) that the attention mask counts from the first column to the last, all of whose
    responses begin in one column, and which begin with runs of one token, of several lengths (2 and more in some),
    that stands nowhere else but in runs that end a row and are not in the loss: it fills the rows up on the left. An
    error where it ends rows, too, or is the pad token that the run states, and where engine and trainer disagree by
    over .03, or have nothing to compare; else a warning. Right padding alone may be attended to: nothing that counts
    sees it.
    """
    tokens_N, response_N = given(batch.tokens_N), given(batch.response_N)
    lengths_B, heads_B = batch.flat.lengths_B, batch.flat.first(response_N)
    if len(batch) < FEWEST or np.unique(lengths_B).size > 1 or np.unique(heads_B).size > 1 or not heads_B[0] > 1:
        raise Skip("needs rows of one width, all counted by the attention mask, whose responses begin in one column")
    rows_BS = tokens_N.reshape(len(batch), -1)
    begins, counts = np.unique(rows_BS[rows_BS[:, 0] == rows_BS[:, 1], 0], return_counts=True)
    if not begins.size:
        return
    pad = int(begins[counts.argmax()])
    left_B, right_B = _run_B(rows_BS == pad), _run_B((rows_BS == pad)[:, ::-1])
    if np.unique(left_B).size < 2 or left_B.max() >= heads_B[0]:
        return
    places_S = np.arange(rows_BS.shape[1])
    ends_BS = places_S >= rows_BS.shape[1] - right_B[:, None]
    fills_BS = (places_S < left_B[:, None]) | ends_BS
    counted_N = batch.trained_N
    if ((rows_BS == pad) & ~fills_BS).any() or (counted_N is not None and (counted_N & ends_BS.reshape(-1)).any()):
        return
    stated = batch.laid.algorithm.number("pad_token_id", "pad_id")
    is_sure = bool((right_B > 0).any()) or stated == pad
    between = distance(batch)
    yield finding(
        "error" if is_sure and not (between is not None and between <= DISAGREE) else "warning",
        f"padding is attended to: the attention mask is 1 over the token {pad}, which fills "
        f"{share(int((left_B > 0).sum()), len(batch))} rows up on the left",
        batch.laid.where("attention_mask", sample=int(left_B.argmax())),
        evidence=[
            shown("its runs at the left, by length", listed(np.unique(left_B)), "masked out"),
            shown("rows that end in it", share(int((right_B > 0).sum()), len(batch))),
            *([] if between is None else [shown("mean |trainer - rollout|", between, f"< {DISAGREE} nats")]),
            *([] if stated is None else [shown("pad token that the run states", int(stated))]),
        ],
        cause="the attention mask is made of ones, or by another pad id than the rows are padded with: a prompt's "
        "tokens see its padding, and positions count it; the more padding, the further from the engine's",
    )


def _run_B(is_BS: Array) -> Array:
    """How many columns from the first on hold, row by row."""
    run_B: Array = np.where(is_BS.all(axis=1), is_BS.shape[1], (~is_BS).argmax(axis=1))
    return run_B
