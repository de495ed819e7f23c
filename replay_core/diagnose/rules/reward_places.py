"""Where rewards lie in a response: on tokens that count, at its end."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from replay_core import pages
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.columns import Column
from replay_core.diagnose.finding import Finding, error, finding, share, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import Skip, given, rule
from replay_core.diagnose.rules.value_targets import FEWEST


@rule("D53", "rewards lie on tokens that do not count", link="rewards", scope="batch",
      needs=("mask", "token_rewards|token_scores", "advantages|returns"),
      explains=("D44", "D45", "D52", "L08"), lasts=True,
      source="verl: the score is put at the response's last valid token, found by the attention mask")  # fmt: skip
def off_the_tokens(batch: StepBatch) -> Finding | None:
    """Samples whose token rewards, over the whole row, hold more than over the tokens that count, while advantages are
    made token by token: a quarter of them and more is an error; so is a reward on the first token of every
    response, and, where a critic's values are recorded, one reward before the last token of every response. Where one
    advantage stands for a response it is made of the row's sum: a warning there, of rewards that lie in the padding.
    Without a critic, rewards of a penalty on tokens inside of responses that do not count (tool output) are an error
    where the sum of what is to come over all tokens makes the returns (else the advantages, but for a scale and a
    constant) of all tokens that count, and the sum over those that count does not.
    There, rewards on sampled tokens that do not count (2 responses and more, not over .6 of them) are worth knowing; a
    warning where a rejection of tokens is stated.
    """
    name = "token_rewards" if batch.columns.ref("token_rewards") is not None else "token_scores"
    column, whole_B = batch.columns.of(name), batch.summed(name)
    paid = _paid(batch)
    spread = None if paid is None else _on_every_token(batch, paid) or _on_the_first_token(batch, paid)
    if spread is None and paid is not None and batch.columns.ref("values") is not None:
        spread = _before_the_last_token(batch, paid)
    if spread is not None:
        return spread
    if whole_B is None:
        raise Skip("token rewards are no rows")
    trained_N = given(batch.trained_N)
    # One advantage for all of a response is made of the row's sum: what lies on a token is in it, masked or not.
    summed = batch.advantage_B is not None and batch.columns.ref("values") is None
    told_N = np.zeros(trained_N.size, dtype=bool) if column is None else column.said_N & (trained_N | summed)
    inside_B = batch.flat.sum(np.where(told_N, given(column).values_N if column is not None else 0.0, 0.0))
    heard_B = (np.abs(whole_B) > 1e-6) & (batch.flat.count(trained_N) > 0)
    lost_B = heard_B & (np.abs(whole_B - inside_B) > 0.5 * np.abs(whole_B))
    if summed and (paid_all_the_same := _on_rejected_tokens(batch, column, name)) is not None:
        return paid_all_the_same
    if not summed and (paid_off := _summed_over_all(batch, name)) is not None:
        return paid_off
    if lost_B.sum() < 2 or lost_B.sum() < 0.25 * heard_B.sum():
        return None
    if not summed and (penalty := _unmasked_penalty(batch, name, lost_B, whole_B - inside_B)) is not None:
        return penalty
    if summed and not _in_one_column(batch, name, lost_B):
        raise Skip("one advantage for all of a response: it is made of the row's sum")
    sample = int(np.flatnonzero(lost_B)[0])
    return finding(
        "warning" if summed else "error",
        f"the reward of {share(int(lost_B.sum()), int(heard_B.sum()))} samples lies "
        + ("in the padding behind its response, on no token of it" if summed else
           "on a token that does not count: padding, or outside of the mask"),
        batch.laid.where(name, sample=sample),
        shown("reward on counted tokens of the first such sample", float(inside_B[sample]),
        f"{whole_B[sample]:.4g}", f"{name} of {batch.name}"),
        shown("samples", int(lost_B.sum()), "0"),
        cause="the score is put at the last position of the row instead of the response's last token: "
        + ("one advantage for a response is made of the row's sum and has it, anything made token by token has not"
           if summed else "returns and advantages never see it"),
    )  # fmt: skip


#: The share of rewarded responses whose rewarded token may be taken out of the loss: all of them is how masks end.
TAKEN_OUT = 0.6


def _on_rejected_tokens(batch: StepBatch, column: Column | None, name: str) -> Finding | None:
    """Rewards on sampled tokens that do not count, of responses that are trained on for them: rejection took the token
    out and left its reward in. Worth knowing; a warning where the run states a rejection of tokens.
    """
    rollout, trained_N, response_N = batch.columns.of("rollout_logprobs"), given(batch.trained_N), batch.response_N
    advantage_B = batch.advantage_B
    if column is None or rollout is None or response_N is None or advantage_B is None:
        return None
    paid_N = column.said_N & (np.abs(np.nan_to_num(column.values_N)) > 1e-6) & response_N
    out_N = paid_N & ~trained_N & rollout.said_N & (rollout.values_N != 0)
    pushed_B = (batch.flat.count(trained_N) > 0) & (np.abs(np.nan_to_num(advantage_B)) > 0)
    off_B = (batch.flat.count(out_N) > 0) & (batch.flat.count(paid_N & trained_N) == 0) & pushed_B
    heard_B = (batch.flat.count(paid_N) > 0) & (batch.flat.count(trained_N) > 0)
    if off_B.sum() < 2 or off_B.sum() > TAKEN_OUT * heard_B.sum():
        return None
    states = batch.laid.algorithm.word("rollout_rs", "rejection_sampling", "rollout_rejection")
    rejects = states.startswith("token") or batch.laid.algorithm.is_on("token_level_rejection") is True
    sample = int(off_B.argmax())
    return finding(
        "warning" if rejects else "info",
        f"the reward of {share(int(off_B.sum()), int(heard_B.sum()))} samples lies on a sampled token that was taken "
        "out of the loss, and is paid to their other tokens all the same",
        batch.laid.where(name, sample=sample, at=out_N),
        shown("samples with no reward on a token that counts, and an advantage", int(off_B.sum()), "0",
              f"{name} of {batch.name}"),
        shown("advantage of the first of them", float(advantage_B[sample])),
        *([shown("rejection that is stated", states or "token_level_rejection")] if rejects else []),
        cause="rejection sampling (or a mask of tokens) changes the mask after rewards were placed, and the "
        "estimator sums the whole row: what a rejected token earned still moves its response and its group's baseline",
        next_step="reject whole responses, or sum rewards over the mask (then the outcome of these is lost); right "
        "where an outcome is meant to stand whatever is masked",
    )  # fmt: skip


def _unmasked_penalty(batch: StepBatch, name: str, lost_B: Array, off_B: Array) -> Finding | None:
    """Rewards off the tokens that are no scores: what a KL penalty took off there, whose padding was not masked."""
    scores, scored_B = batch.columns.of("token_scores"), batch.summed("token_scores")
    if name != "token_rewards" or scores is None or scored_B is None:
        return None
    counted_N = scores.said_N & given(batch.trained_N)
    on_tokens_B = batch.flat.sum(np.where(counted_N, np.nan_to_num(scores.values_N), 0.0))
    if (np.abs(scored_B - on_tokens_B) > 1e-5 * np.maximum(np.abs(scored_B), 1))[lost_B].any():
        return None
    sample = int(np.flatnonzero(lost_B)[0])
    return error(
        f"the KL penalty is not masked: in {share(int(lost_B.sum()), len(lost_B))} samples the token rewards hold a "
        "penalty on tokens that do not count (padding), where no score is",
        batch.laid.where(name, sample=sample),
        shown("rewards off the tokens that count, of the first such sample", float(off_B[sample]), "0",
              f"{name} of {batch.name}"),
        shown("scores there", float(scored_B[sample] - on_tokens_B[sample]), "0"),
        shown("samples", int(lost_B.sum()), "0"),
        cause="rewards are scores less coefficient x KL, token by token, and the KL of padding is left in: returns "
        "that run over the row from its end carry it into all tokens before",
    )  # fmt: skip


#: Rows with rewards on tokens that do not count, inside of the response; what a sum leaves of the returns' spread where
#: it makes them, and where it does not.
INSIDE, MADE, UNMADE = 4, 2e-3, 2e-2
#: The share of the tokens that do not count inside of responses which a penalty lies on.
DENSE = 0.8


def _summed_over_all(batch: StepBatch, name: str) -> Finding | None:
    """Returns that hold the penalty of tokens which do not count."""
    rewards, response_N = batch.columns.of(name), batch.response_N
    returns = batch.columns.of("returns") or batch.columns.of("advantages")
    if rewards is None or returns is None or response_N is None or batch.columns.ref("values") is not None:
        return None
    trained_N = given(batch.trained_N)
    values_N = np.where(rewards.said_N & response_N, np.nan_to_num(rewards.values_N), 0.0)
    every_N, own_N = np.zeros_like(values_N), np.zeros_like(values_N)
    inside_B = np.zeros(len(batch), dtype=bool)
    for sample, span in enumerate(batch.flat.spans):
        counted = np.flatnonzero(trained_N[span])
        if not counted.size:
            continue
        row = values_N[span].copy()
        row[counted[-1] + 1 :] = 0.0
        kept = np.where(trained_N[span], row, 0.0)
        inside_B[sample] = bool((np.abs(row - kept) > 1e-6).any())
        every_N[span], own_N[span] = row[::-1].cumsum()[::-1], kept[::-1].cumsum()[::-1]
    both_N = trained_N & returns.said_N & np.isfinite(returns.values_N)
    if inside_B.sum() < INSIDE or both_N.sum() < INSIDE:
        return None
    made_N = returns.values_N[both_N]
    left = [_left(made_N, each_N[both_N]) for each_N in (every_N, own_N)]
    if left[0] > MADE or left[1] < UNMADE:
        return None
    off_N = np.where(trained_N, 0.0, values_N)
    # An environment may pay where its output ends: a penalty lies on nearly all of the output, and no score does.
    scores = batch.columns.of("token_scores") if name == "token_rewards" else None
    if scores is not None and (np.abs(np.nan_to_num(scores.values_N))[scores.said_N & (off_N != 0)] > 1e-6).any():
        return None
    ends_N = np.zeros(trained_N.size, dtype=bool)
    for span in batch.flat.spans:
        counted = np.flatnonzero(trained_N[span])
        if counted.size:
            ends_N[span.start + counted[0] : span.start + counted[-1]] = True
    if (off_N != 0).sum() < DENSE * (ends_N & ~trained_N).sum():
        return None
    return error(
        f"returns hold rewards of tokens that do not count: {name} of {int((np.abs(off_N) > 1e-6).sum())} tokens "
        f"inside of {int(inside_B.sum())} responses (tool output) are added up into all tokens before them",
        batch.laid.where(name, sample=inside_B),
        shown(f"what the sum over all tokens leaves of the {returns.name}, of their spread", left[0], "> 0.02"),
        shown("what the sum over the tokens that count leaves", left[1], "0"),
        shown("largest reward on a token that does not count", float(np.abs(off_N).max()), "0"),
        cause="a KL penalty is taken off token by token and not multiplied by the loss mask: what policy and reference "
        "differ by on tool output, which neither wrote, is charged to the tokens before it",
        next_step="rldbg diagnose --explain D53   # then multiply the penalty by the mask before it is added up",
    )


def _left(made_N: Array, sum_N: Array) -> float:
    """The largest part of what is made that a line of the sum leaves, in shares of its spread."""
    spread = float(made_N.std())
    if not spread > 0 or not sum_N.std() > 0:
        return float("inf")
    slope, level = np.polyfit(sum_N, made_N, 1)
    return float(np.abs(made_N - slope * sum_N - level).max()) / spread if slope > 0 else float("inf")


def _in_one_column(batch: StepBatch, name: str, lost_B: Array) -> bool:
    """Whether rewards off the tokens all lie in one column of the rows, as where the last one is taken for the end."""
    refs = next((refs for sheet, _ in batch.columns.sheets if (refs := sheet.refs(name))), [])
    grids = [pages.array(ref) for ref in refs if ref.rows is None and len(ref.shape) == 2]
    if len(grids) != 1 or len(grids[0]) != len(lost_B):
        return False
    return np.unique(np.nonzero(grids[0][lost_B])[1]).size == 1


class _Paid(Struct, frozen=True):
    """Rewards by token: their tokens that count, and those of them that have a reward."""

    column: Column
    counted_N: Array
    paid_N: Array

    @property
    def name(self) -> str:
        return self.column.name


def _paid(batch: StepBatch) -> _Paid | None:
    name = next((each for each in ("token_scores", "token_rewards") if batch.columns.ref(each) is not None), "")
    column = batch.columns.of(name) if name else None
    if column is None:
        return None
    counted_N = given(batch.trained_N) & column.said_N
    return _Paid(column, counted_N, counted_N & (np.abs(np.nan_to_num(column.values_N)) > 1e-6))


def _on_every_token(batch: StepBatch, paid: _Paid) -> Finding | None:
    """The same reward on every token of a response, in all responses that have one: nothing gives a token a score."""
    counted_N = paid.counted_N & np.isfinite(paid.column.values_N)
    low_B, high_B = batch.flat.extremes(paid.column.values_N, counted_N)
    heard_B = (batch.flat.count(counted_N) > 1) & (np.nan_to_num(np.abs(high_B)) > 1e-6)
    if heard_B.sum() < FEWEST or not (high_B == low_B)[heard_B].all() or np.unique(high_B[heard_B]).size < 2:
        return None
    sample = int(np.flatnonzero(heard_B)[0])
    tokens = int(batch.flat.count(counted_N)[sample])
    return error(
        f"the reward stands on every token of a response, in all {int(heard_B.sum())} that have one: long answers "
        "collect more",
        batch.laid.where(paid.name, sample=sample),
        shown(
            "reward of a token of the first such sample", float(high_B[sample]), None, f"{paid.name} of {batch.name}"
        ),
        shown("its tokens", tokens, "1 with a reward"),
        shown("what its response collects", float(high_B[sample]) * tokens, f"{high_B[sample]:.4g}"),
        cause="an outcome reward is put on all tokens instead of on the last one: returns add it up token by token",
    )


def _before_the_last_token(batch: StepBatch, paid: _Paid) -> Finding | None:
    """One reward for each response, before the last token that counts, in all of three tokens and more."""
    counted_N, paid_N = paid.counted_N, paid.paid_N
    counts_B, ones_B = batch.flat.count(counted_N), batch.flat.count(paid_N)
    heard_B = (counts_B > 2) & (ones_B > 0)
    if heard_B.sum() < FEWEST or (ones_B[heard_B] != 1).any():
        return None
    places_N = np.cumsum(counted_N) - np.repeat(
        np.cumsum(counts_B) - counts_B, batch.flat.lengths_B
    )  # of the tokens that count, which one
    place_B = batch.flat.sum(np.where(paid_N, places_N, 0))
    if (place_B[heard_B] >= counts_B[heard_B]).any():
        return None
    sample = int(np.flatnonzero(heard_B)[0])
    return error(
        f"the reward stands before the last token of its response, in all {int(heard_B.sum())} that have one",
        batch.laid.where(paid.name, sample=sample),
        shown("token of the first such sample that has it", int(place_B[sample]), f"{int(counts_B[sample])}"),
        shown("responses", int(heard_B.sum()), "0"),
        cause="an outcome's reward is put at another place than the end (a length that counts the prompt, or words, or "
        "half of the row): tokens behind it are taught nothing",
    )


def _on_the_first_token(batch: StepBatch, paid: _Paid) -> Finding | None:
    """One reward for each response, on its first token, in all of several tokens."""
    counted_N, paid_N = paid.counted_N, paid.paid_N
    heard_B = (batch.flat.count(counted_N) > 1) & (batch.flat.count(paid_N) > 0)
    first_B = batch.flat.first(paid_N) == batch.flat.first(counted_N)
    if heard_B.sum() < FEWEST or not (first_B & (batch.flat.count(paid_N) == 1))[heard_B].all():
        return None
    return error(
        f"the reward stands on the first token of a response, in all {int(heard_B.sum())} that have one: the tokens "
        "that earned it come after it",
        batch.laid.where(paid.name, sample=heard_B),
        shown("responses with their reward on the first token", share(int(heard_B.sum()),
        int(heard_B.sum())), "none", f"{paid.name} of {batch.name}"),
        cause="an index from the wrong end (0 for -1): returns of all later tokens are 0, and nothing but the first "
        "token is taught",
    )  # fmt: skip
