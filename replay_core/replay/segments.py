"""How far a cell is from the reference, sample by sample, from their two dumps. numpy only.

A packing leak is judged on attention-valid tokens, prompt included, by the worst token of the final
hidden states: on response log-probabilities an off-by-one boundary hides in bf16 noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from replay_core import pages
from replay_core.errors import NothingComparableError
from replay_core.records import Record, Run
from replay_core.samples.batch import Batch
from replay_core.samples.layout import TokenLayout

if TYPE_CHECKING:
    from replay_core.documents.comparison import LogprobGap, SegmentEntry, WorstHidden

Floats = NDArray[np.float64]


def segments(reference_dump: Run, cell_dump: Run, final_hidden: str | None) -> list[SegmentEntry]:
    """One entry per sample: its tokens, its worst token, and its log-probability differences.

    `final_hidden` None: the cell has no hidden states (it ran the trainer's own code); worst_token is then None.

    `worst_token` is the largest ||cell - reference|| / ||reference|| of the final hidden states over
    attention-valid tokens; `valid` and `response` hold the largest and mean |difference| of log_probs
    (None where a sample has no such token, or no response mask is known).

    Raises:
        NothingComparableError: a dump lacks the tensors, or the two hold different samples.
    """
    layout_a, layout_b = layout_of(reference_dump), layout_of(cell_dump)
    if not np.array_equal(layout_a.lengths, layout_b.lengths):
        raise NothingComparableError(
            "the two replays hold different samples",
            file=str(cell_dump.path),
            expected=f"lengths {layout_a.lengths.tolist()}",
            found=f"lengths {layout_b.lengths.tolist()}",
        )
    worst: list[WorstHidden | None] = [None] * layout_a.samples
    if final_hidden is not None:
        worst = _worst_tokens(reference_dump, cell_dump, final_hidden, layout_a, layout_b)
    valid = _logprob_differences(reference_dump, cell_dump, layout_a, layout_b, "valid")
    response = _logprob_differences(reference_dump, cell_dump, layout_a, layout_b, "response")
    return [
        {
            "sample": n,
            "tokens": int(layout_a.lengths[n]),
            "worst_token": worst[n],
            "valid": valid[n],
            "response": response[n],
        }
        for n in range(layout_a.samples)
    ]


def _worst_tokens(
    run_a: Run, run_b: Run, final_hidden: str, layout_a: TokenLayout, layout_b: TokenLayout
) -> list[WorstHidden | None]:
    hidden_a = _rows(run_a, "modules", final_hidden, layout_a)
    hidden_b = _rows(run_b, "modules", final_hidden, layout_b)
    if hidden_a.shape[1:] != hidden_b.shape[1:]:
        return [None] * layout_a.samples  # another model's, of another width: no state of it faces one of these
    slots_a, slots_b = layout_a.slots(), layout_b.slots()
    sample = layout_a.sample_BS.reshape(-1)[slots_a]
    position = layout_a.position_BS.reshape(-1)[slots_a]
    # Sample by sample: hidden states in float64 of a whole batch would be several times its size.
    return [_worst_token(hidden_a, hidden_b, slots_a, slots_b, sample == n, position) for n in range(layout_a.samples)]


def tokens_of(replay: Run, name: str) -> Floats:
    """[N, D]: a module's tensor of a replay's dump, by sample and position."""
    layout = layout_of(replay)
    values: Floats = _rows(replay, "modules", name, layout)[layout.slots()].astype(np.float64)
    return values


def layout_of(replay: Run) -> TokenLayout:
    """The token layout of a replay's dump, from its `batch_inputs`."""
    record = _record(replay, "batch_inputs")
    samples = Batch(record, record.tensors())
    if samples.layout is not None and samples.padding_known:
        return samples.layout.with_response(samples.generated_N)
    raise NothingComparableError(
        "the replay says nothing about its samples",
        file=str(record.path),
        expected="attention_mask or cu_seqlens",
        found=", ".join(ref.name for ref in record.tensors()),
    )


def _record(replay: Run, stage: str) -> Record:
    return replay.select(stage=stage)[0]


def _rows(replay: Run, stage: str, name: str, layout: TokenLayout) -> NDArray[Any]:
    """The tensor with its token axes flattened to one: [B*S, ...]."""
    record = _record(replay, stage)
    ref = record.get(name)
    if ref is None or ref.shape[:2] != layout.shape:
        raise NothingComparableError(
            f"the replay holds no {name} of its tokens",
            file=str(record.path),
            tensor=name,
            expected=f"{list(layout.shape)} and further axes",
            found="nothing" if ref is None else str(list(ref.shape)),
        )
    return np.asarray(pages.array(ref)).reshape(layout.shape[0] * layout.shape[1], *ref.shape[2:])


def _worst_token(
    hidden_a: NDArray[Any],
    hidden_b: NDArray[Any],
    slots_a: NDArray[np.int64],
    slots_b: NDArray[np.int64],
    chosen: NDArray[np.bool_],
    position: NDArray[np.int64],
) -> WorstHidden | None:
    if not chosen.any():
        return None
    a = hidden_a[slots_a[chosen]].astype(np.float64)
    d = hidden_b[slots_b[chosen]].astype(np.float64) - a
    norm_a, norm_d = np.linalg.norm(a, axis=-1), np.linalg.norm(d, axis=-1)
    # A zero reference with any difference is infinitely far; NaN is the worst there is.
    relative = np.where(norm_d == 0, 0.0, np.divide(norm_d, norm_a, out=np.full_like(norm_d, np.inf), where=norm_a > 0))
    index = int(np.argmax(np.where(np.isnan(relative), np.inf, relative)))
    return {"position": int(position[chosen][index]), "rel_l2": float(relative[index])}


def _logprob_differences(
    run_a: Run, run_b: Run, layout_a: TokenLayout, layout_b: TokenLayout, region: str
) -> list[LogprobGap]:
    if region == "response" and layout_a.response_BS is None:
        return [{"logp_max": None, "logp_mean": None} for _ in range(layout_a.samples)]
    if _record(run_a, "forward_data").get("log_probs") is None:
        # A critic says values; the comparison judges those.
        return [{"logp_max": None, "logp_mean": None} for _ in range(layout_a.samples)]
    logp_a = _rows(run_a, "forward_data", "log_probs", layout_a)
    logp_b = _rows(run_b, "forward_data", "log_probs", layout_b)
    slots_a, slots_b = layout_a.slots("next"), layout_b.slots("next")
    if region == "response":
        # The reference says which tokens are response: the other dump may know no response mask.
        chosen = np.isin(slots_a, layout_a.slots("next", "response"))
        slots_a, slots_b = slots_a[chosen], slots_b[chosen]
    difference: Floats = np.abs(logp_b[slots_b].astype(np.float64) - logp_a[slots_a].astype(np.float64))
    sample = layout_a.sample_BS.reshape(-1)[slots_a]
    answers: list[LogprobGap] = []
    for n in range(layout_a.samples):
        of_sample = difference[sample == n]
        if of_sample.size:
            answers.append({"logp_max": float(of_sample.max()), "logp_mean": float(of_sample.mean())})
        else:
            answers.append({"logp_max": None, "logp_mean": None})
    return answers
