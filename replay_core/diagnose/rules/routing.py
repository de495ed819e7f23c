"""Which experts saw a token: the trainer has to route as the engine did."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np

from replay_core import pages
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.compared import distance, gap_of, worst_of
from replay_core.diagnose.finding import Finding, error, finding, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.gap import BADLY, DISAGREE, UNSURE
from replay_core.diagnose.rule import rule, skip_if
from replay_core.diagnose.sheets import Sheet
from replay_core.records import Record, TensorRef

#: Names of recorded routing: [tokens, layers, k] or [B, T, layers, k].
ROUTING = (
    "routed_experts",
    "rollout_routed_experts",
    "rollout_expert_indices",
    "routing_matrices",
    "train_routed_experts",
)
#: Share of tokens that may differ (Megatron-LM#4168: 10 % of routers, 94 % of tokens is the bug).
DIFFER = 0.05
#: Share of routers (token and layer) that noise does not move.
MOST = 0.5
#: What an order of the experts has to explain, and of how many tokens.
NEARLY, FEWEST = 0.9, 32


def routing_of(batch: StepBatch) -> list[tuple[Record, TensorRef]]:
    """Records of routing, and the tensor of each."""
    return [
        (record, ref)
        for record in batch.columns.records
        for ref in record.tensors()
        if ref.name.rpartition(".")[2] in ROUTING and len(ref.shape) >= 3 and ref.is_readable and not ref.is_text
    ]


@rule("D30", "experts are routed differently", link="rollout_logprobs", scope="batch",
      explains=("D09", "D12", "D14"),
      source="Megatron-LM#4168 (10 % of routers, 94 % of tokens); slime validate_*")  # fmt: skip
def routing(batch: StepBatch) -> Finding | None:
    """Recorded routing: a layer whose experts are all 0 for every token is an error (layers of another pipeline stage
    were not gathered), and so are two records that route a token to another number of experts; between two records of
    the same samples, more than 5 % of tokens with another set of experts
    is a warning. An error where one order of the experts explains nine of ten tokens of the first layer, or more than
    half of all routers chose otherwise and engine and trainer are .1 nats and more apart. Where nine of ten tokens have
    the experts of the token before or after in the other record, the recorded routing is replayed one token off, and
    it says so. Skipped without recorded routing.
    """
    recorded = routing_of(batch)
    skip_if(not recorded, "no routing is recorded (routed_experts): only mixtures of experts have one")
    for record, ref in recorded:
        experts = np.asarray(pages.array(ref))
        tokens = experts.reshape(-1, *experts.shape[-2:])
        empty = [layer for layer in range(tokens.shape[1]) if tokens.shape[0] and not tokens[:, layer].any()]
        if empty and len(tokens) >= 4 and (tokens.shape[2] > 1 or len(empty) < tokens.shape[1]):
            return error(
                f"layer {empty[0]} has no routing: every token went to expert 0, {len(empty)} layers in all",
                batch.laid.where_record(record, ref.name),
                shown("layers that are all 0", len(empty), "0", record.path.name),
                shown("layers", tokens.shape[1]),
                cause="routing of another pipeline stage or rank was not gathered before it was recorded",
            )
    return _compared(batch)


def _compared(batch: StepBatch) -> Finding | None:
    known = [
        (sheet, name, told)
        for sheet, places in batch.columns.sheets
        for name in sorted(sheet.names())
        if name.rpartition(".")[2] in ROUTING and (told := _by_token(batch, sheet, places, name)) is not None
    ]
    for (sheet, name, mine_NLk), (other, theirs, theirs_NLk) in combinations(known, 2):
        if mine_NLk.shape[1] == theirs_NLk.shape[1] and mine_NLk.shape[2] != theirs_NLk.shape[2]:
            counts = {f"{name} of {sheet.name}": mine_NLk.shape[2], f"{theirs} of {other.name}": theirs_NLk.shape[2]}
            return error(
                "a token is routed to "
                + ", and to ".join(f"{count} expert{'s' * (count > 1)} in {where}" for where, count in counts.items()),
                batch.laid.where(theirs),
                *(shown(f"experts of a token in {where}", count) for where, count in counts.items()),
                cause="the mixture's top-k (num_experts_per_tok) is another on one side: what engine and trainer say "
                "of "
                "a token is the sum of other experts, and no rounding",
                next_step="compare num_experts_per_tok of the engine's configuration with the trainer's "
                "(moe_router_topk)",
            )
        if mine_NLk.shape != theirs_NLk.shape:
            continue
        both_N = (mine_NLk >= 0).all(axis=(1, 2)) & (theirs_NLk >= 0).all(axis=(1, 2))
        if batch.response_N is not None and (both_N & batch.response_N).any():
            both_N &= batch.response_N
        if not both_N.any():
            continue
        mine_KLk, theirs_KLk = np.sort(mine_NLk[both_N], axis=-1), np.sort(theirs_NLk[both_N], axis=-1)
        other_KL = (mine_KLk != theirs_KLk).any(axis=-1)
        different = float(other_KL.any(axis=1).mean())
        if different <= DIFFER:
            continue
        moved = _renumbered(mine_KLk[:, 0], theirs_KLk[:, 0])
        beside = None if moved is not None else _beside(batch, mine_NLk, theirs_NLk, np.asarray(both_N))
        apart = distance(batch)
        wrong = moved is not None or (float(other_KL.mean()) > MOST and apart is not None and apart > BADLY)
        return finding(
            "error" if wrong else "warning",
            f"{different:.0%} of tokens are routed to other experts in {theirs} of {other.name} than in {name} of "
            f"{sheet.name}"
            + ("" if moved is None else f": experts stand in another order ({moved})")
            + ("" if beside is None else f": they are those of {beside[0]}"),
            batch.laid.where(theirs),
            shown("share of tokens routed differently", different, "<= 0.05"),
            shown("share of routers that route differently", float(other_KL.mean())),
            shown("tokens compared", int(both_N.sum())),
            *([] if beside is None else [shown(f"share with the experts of {beside[0]}", beside[1])]),
            *([] if apart is None else [shown("mean |trainer - rollout|", apart)]),
            cause=f"routing replay lays the recorded experts beside other tokens: each is given those of {beside[0]} "
            "(an offset of one, a roll, a BOS that is counted)"
            if beside is not None
            else "the router's rows, or the experts, are loaded in another order on one side: a token goes to other "
            "experts' weights"
            if moved is not None
            else "the trainer routes live where the engine routed otherwise: replay the recorded routing (R3)",
            next_step=batch.laid.mismatch_command()
            if batch.has("rollout_logprobs") and batch.trainer is not None
            else None,
        )
    return None


#: The share of tokens that have the experts of the one beside them, before routing is replayed one token off.
BESIDE = 0.9


def _beside(batch: StepBatch, mine_NLk: Array, theirs_NLk: Array, both_N: Array) -> tuple[str, float] | None:
    """Of which token beside it each token has the experts, in the second record, by the first; and how many have."""
    sample_N = batch.flat.sample_N
    for by, words in ((-1, "the token before"), (1, "the token after")):
        at = np.flatnonzero(both_N)
        at = at[(at + by >= 0) & (at + by < len(sample_N))]
        at = at[(sample_N[at] == sample_N[at + by]) & (mine_NLk[at + by] >= 0).all(axis=(1, 2))]
        same = (np.sort(mine_NLk[at + by], axis=-1) == np.sort(theirs_NLk[at], axis=-1)).all(axis=(1, 2))
        if len(at) and same.mean() >= BESIDE:
            return words, float(same.mean())
    return None


def _by_token(batch: StepBatch, sheet: Sheet, places: list[int | None], name: str) -> Array | None:
    """The experts [N, layers, k] of the batch's tokens, -1 where the sheet names none; None where it is not laid out by
    tokens.
    """
    refs = sheet.refs(name) or []
    if not refs or any(len(ref.shape) < 3 or ref.rows is not None or ref.is_text for ref in refs):
        return None
    each = [(part.place(ref, by_shape=True), np.asarray(pages.array(ref)))
            for part, ref in zip(sheet.parts, refs, strict=True)]  # fmt: skip
    if any(placed is None or not placed.by_token or placed.heads != 1 for placed, _ in each):
        return None
    parts = []
    for part, (placed, experts) in zip(sheet.parts, each, strict=True):
        assert placed is not None
        own_NLk = np.full((int(part.lengths.sum()), *experts.shape[-2:]), -1, dtype=np.int64)
        own_NLk[part.flat(placed.tokens)] = experts.reshape(-1, *experts.shape[-2:])[placed.rows]
        parts.append(own_NLk)
    found_NLk = np.full((int(batch.flat.lengths_B.sum()), *parts[0].shape[1:]), -1, dtype=np.int64)
    if any(part.shape[1:] != found_NLk.shape[1:] for part in parts):
        return None
    for sample, place in enumerate(places):
        if place is not None:
            number, row = sheet.index[place]
            part = sheet.parts[number]
            size = min(int(part.lengths[row]), int(batch.flat.lengths_B[sample]))
            own, here = int(part.starts[row]), batch.flat.starts_B[sample]
            found_NLk[here : here + size] = parts[number][own : own + size]
    return found_NLk


def _renumbered(mine_Kk: Array, theirs_Kk: Array) -> str | None:
    """How one side numbers the first layer's experts, where it is an order of its own that explains nearly all; None
    where it is not so. (Of later layers what goes in differs already.)
    """
    if len(mine_Kk) < FEWEST:
        return None
    count = int(max(mine_Kk.max(), theirs_Kk.max())) + 1
    together = np.zeros((count, count), dtype=np.int64)
    for one_K in mine_Kk.T:
        for two_K in theirs_Kk.T:
            np.add.at(together, (one_K, two_K), 1)
    seen = np.flatnonzero(together.sum(axis=1))
    to = together.argmax(axis=1)
    if len(set(to[seen].tolist())) < seen.size or (to[seen] == seen).all():
        return None
    same = float((np.sort(to[mine_Kk], axis=-1) == theirs_Kk).all(axis=-1).mean())
    return ", ".join(f"{one} for {to[one]}" for one in seen[to[seen] != seen][:4].tolist()) if same > NEARLY else None


#: Tokens on either side before their ranks tell; certainty (a normal quantile) with which those apart are those whose
#: experts another place exchanges, how much surer than the next reading, and how many times as far apart they are.
ON_EITHER_SIDE, CERTAIN, SURER, FARTHER = 24, 4.5, 1.5, 1.5
#: Where the experts of a token may have been taken from instead: places before it, or rows.
_FROM = {
    "the token before": (1, 0),
    "the token after": (-1, 0),
    "two tokens before": (2, 0),
    "the row before": (0, 1),
    "the row after": (0, -1),
}


class _Contrast:
    """|trainer - rollout| of tokens whose experts another place would exchange, and of those it would not, by ranks
    within each step.
    """

    def __init__(self) -> None:
        self.excess, self.variance = 0.0, 0.0
        self.moved: list[Array] = []
        self.kept: list[Array] = []

    def take(self, size_K: Array, moved_K: Array) -> None:
        ones, others = int(moved_K.sum()), int((~moved_K).sum())
        if min(ones, others) < ON_EITHER_SIDE // 4:
            return
        ranks_K = np.empty(len(size_K))
        ranks_K[size_K.argsort(kind="stable")] = np.arange(1, len(size_K) + 1)
        self.excess += float(ranks_K[moved_K].sum()) - ones * (len(size_K) + 1) / 2
        self.variance += ones * others * (len(size_K) + 1) / 12
        self.moved.append(size_K[moved_K])
        self.kept.append(size_K[~moved_K])

    @property
    def z(self) -> float:
        enough = min(sum(map(len, self.moved)), sum(map(len, self.kept))) >= ON_EITHER_SIDE
        return self.excess / math.sqrt(self.variance) if enough and self.variance > 0 else 0.0

    @property
    def means(self) -> tuple[float, float]:
        return float(np.concatenate(self.moved).mean()), float(np.concatenate(self.kept).mean())


def _experts_N(batch: StepBatch) -> Array | None:
    """The experts [N, layers * k] of the batch's tokens, in order of their numbers; -1 where none are recorded."""
    for sheet, places in batch.columns.sheets:
        for name in sorted(sheet.names()):
            if name.rpartition(".")[2] in ROUTING:
                found = _by_token(batch, sheet, places, name)
                if found is not None:
                    return np.sort(found, axis=-1).reshape(len(found), -1)
    return None


def _taken_from(batch: StepBatch, experts_NE: Array, places: int, rows: int) -> Array:
    """The experts [N, E] that a token has if they are taken from so many places or rows before; -1 beyond an end."""
    other_NE = np.full_like(experts_NE, -1)
    spans = batch.flat.spans
    for row, span in enumerate(spans):
        source = spans[(row - rows) % len(spans)]
        mine = experts_NE[source]
        size = span.stop - span.start
        # Rows of one batch are padded to one length, and their responses begin at one place of it: ends of prompts
        # stand side by side where the prompts are padded on the left.
        shift = 0
        if rows and batch.response_N is not None:
            heads_B = batch.flat.first(batch.response_N)
            shift = int(heads_B[row] - heads_B[(row - rows) % len(spans)])
        at = np.arange(size) - places - shift
        inside = (at >= 0) & (at < len(mine))
        other_NE[span.start : span.stop][inside] = mine[at[inside]]
    return other_NE


@rule("D112", "recorded routing is replayed on other tokens", link="logprobs", scope="case", lasts=True,
      explains=("D09", "D12", "D13", "D14", "D15", "D24", "L10"),
      source="miles#2722, #3277; Megatron-LM#4168: replayed routing has to be the tokens' own")  # fmt: skip
def replayed_elsewhere(case: Case) -> Finding | None:
    """Engine and trainer part (.03 nats) where the experts of another place differ from a token's own, and less where
    they are the same: by ranks over a run's tokens, each step for itself, with a certainty of 4.5 (a normal quantile),
    1.5 more than any other reading (the token before or after, two before, the row before or after), and by 1.5 times
    in the mean. The token that is predicted has its experts from the place before it.

    Skipped without recorded routing, and where nothing parts.
    """
    contrasts = {words: _Contrast() for words in _FROM}
    steps: list[int | None] = []
    place, worst, routed = None, 0.0, False
    for batch in case.batches():
        if (between := gap_of(batch)) is None or (experts_NE := _experts_N(batch)) is None:
            continue
        routed = True
        if between.mean <= DISAGREE or between.is_shifted:
            continue
        at_K = np.flatnonzero(between.both_N)
        size_K = np.abs(between.d)
        # What predicts a token stands before it; of what both are sure of nothing is seen.
        sure_K = np.maximum(between.trainer.values_N[at_K], between.rollout.values_N[at_K]) > UNSURE
        keep_K = (batch.flat.position_N[at_K] > 0) & ~sure_K
        at_K, size_K = at_K[keep_K] - 1, size_K[keep_K]
        known_K = (experts_NE[at_K] >= 0).all(axis=1)
        for words, (places, rows) in _FROM.items():
            other_NE = _taken_from(batch, experts_NE, places, rows)
            told_K = known_K & (other_NE[at_K] >= 0).all(axis=1)
            moved_K = (experts_NE[at_K] != other_NE[at_K]).any(axis=1)
            contrasts[words].take(size_K[told_K], moved_K[told_K])
        steps.append(batch.step)
        if between.mean > worst:
            worst, place = between.mean, batch.laid.where(between.trainer.name, at=worst_of(between))
            command = batch.laid.mismatch_command()
    skip_if(not routed, "needs recorded routing, and the log-probabilities of engine and trainer")
    if place is None:
        return None
    ordered = sorted(_FROM, key=lambda words: -contrasts[words].z)
    best, second = (contrasts[words] for words in ordered[:2])
    if best.z < CERTAIN or best.z < second.z + SURER:
        return None
    moved, kept = best.means
    if moved < FARTHER * kept:
        return None
    return finding(
        "error" if worst > BADLY else "warning",
        f"recorded routing is replayed on other tokens: engine and trainer part by {worst:.3g} nats per token, and do "
        f"so where a token's experts are not those of {ordered[0]}",
        place,
        shown(f"mean |trainer - rollout| where the experts of {ordered[0]} are others", moved, "as where they are not"),
        shown("mean |trainer - rollout| where they are the same", kept),
        shown("certainty by ranks (z)", best.z, f"< {CERTAIN:g}"),
        shown(f"the same of the next reading, {ordered[1]}", second.z),
        shown("tokens compared", sum(map(len, best.moved)) + sum(map(len, best.kept))),
        cause=f"routing replay lays the engine's experts beside their tokens: the trainer gives a token those of "
        f"{ordered[0]} (an offset of one, a prompt or BOS that is counted, rows in another order). Weights are not at "
        "fault: where both readings name the same experts, engine and trainer come nearer",
        next_step=command,
        steps=steps,
    )
