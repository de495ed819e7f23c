"""The tokens themselves: responses cut off, degenerate, or not the ones that were sampled."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay_core import pages
from replay_core.diagnose import trends
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Evidence, Finding
from replay_core.diagnose.flat import Array
from replay_core.diagnose.log_steps import steps_of
from replay_core.diagnose.rule import Skip, given, rule
from replay_core.diagnose.sheets import Sheet
from replay_core.diagnose.signals import RunLog
from replay_core.diagnose.stating import finding, share, shown

#: Share of cut-off responses worth saying (miles advisory).
MANY = 0.25
#: Fewer responses than this all being cut off is chance.
FEWEST = 4
#: One token being more than this of everything written is no language.
DEGENERATE = 0.5
#: Mean length below which a share of one token says nothing: `yes <end>` is half end.
LONG_ENOUGH = 8


def truncated(batch: StepBatch) -> Array | None:
    """Which responses were cut off at the length limit: as the dump says, else no end token at the largest length."""
    stated_B = batch.truncated_flag_B
    if stated_B is not None:
        return stated_B
    if batch.response_N is None or batch.tokens_N is None or not len(batch):
        return None
    counts_B = batch.flat.count(batch.response_N)
    longest_B: Array = (counts_B == counts_B.max()) & (counts_B > 1)
    last_B = batch.tokens_N[np.maximum(batch.flat.starts_B + batch.flat.lengths_B - 1, 0)]
    if batch.eos_id is not None:
        cut_B: Array = longest_B & (last_B != batch.eos_id)
        return cut_B
    if batch.pad_id is not None and (last_B == batch.pad_id).any():
        return None
    # Nothing shorter ended on one id: of equally long responses, different last tokens are no end token.
    if not longest_B.all() or np.unique(last_B).size < max(2, len(last_B) // 4):
        return None if longest_B.all() else longest_B
    return longest_B


@rule("D20", "responses are cut off", link="tokens", scope="case",
      explains=("D01", "D02", "D03", "D07", "D23", "L01"),
      source="autocontext#1067, ms-swift#4950; a quarter: miles advisory")  # fmt: skip
def cut_off(case: Case) -> Iterator[Finding]:
    """Share of responses without an end token at the length limit, over all steps looked at.

    All of them (and at least 4) is a warning, an error where the rewards have no spread either: then it is why. From
    0.25 on it is worth saying (info): the share alone is normal for a policy that has not learnt to stop.
    """
    cut, total, spread, first, steps = 0, 0, 0.0, None, []
    for batch in case.batches():
        cut_B = truncated(batch)
        if cut_B is None or not len(cut_B):
            continue
        cut, total = cut + int(cut_B.sum()), total + len(cut_B)
        rewards_B = batch.reward_B
        if rewards_B is None:
            spread = np.inf
        elif np.isfinite(rewards_B).any():
            spread = max(spread, float(np.nanmax(rewards_B) - np.nanmin(rewards_B)))
        if cut_B.any():
            steps += [] if batch.step is None else [batch.step]
            first = first or batch.laid.where("response_ids" if batch.columns.ref("response_ids") else "input_ids",
                                         sample=int(np.flatnonzero(cut_B)[0]))  # fmt: skip
    if not total:
        raise Skip("needs responses and either their end token or what stopped them")
    if cut / total < MANY or first is None:
        return
    every = cut == total and total >= FEWEST
    yield finding(
        "info" if not every else "error" if spread == 0 else "warning",
        f"{'all' if every else share(cut, total)} responses are cut off at the length limit"
        + (": none ever ends" if every else ""),
        first,
        evidence=[
            shown("share of responses cut off", cut / total, "< 0.25", "end tokens and lengths of the responses"),
            shown("responses", total),
        ],
        cause="the limit on new tokens is too small, or the end token is not among those the engine stops at"
        if every
        else "the limit on new tokens is reached often; where the reward needs an end, those responses earn nothing",
        steps=tuple(sorted(set(steps))),
    )


@rule("D20", "responses are cut", link="tokens", scope="signals", needs=("truncated",),
      source="miles advisory (0.25); autocontext#1067")  # fmt: skip
def cut_off_in_log(log: RunLog) -> Iterator[Finding]:
    """Level of the fraction of responses that end at the token limit: 0.25 and more a warning, 1 an error.

    Where the same steps show that rewards still differ within groups, the cut responses teach something, and it is
    info. With a reward of 0 for all of them it is the cause of D01.
    """
    series, now = next(log.level("truncated"), (None, 0.0))
    if series is None:
        raise Skip("the fraction of truncated responses is not finite in any step")
    if now < MANY:
        return
    spread = next((s for s in log.all("reward_std") if s.formula == "within-group"), None)
    zero = next((level for _, level in log.level("frac_zero_std")), 1.0)
    teaches = zero < 0.5 if spread is None else bool(spread.finite) and trends.level(spread.finite) > 0
    nothing = [Evidence("reward", 0.0, None, reward.source) for reward, level in log.level("reward") if level == 0]
    yield finding(
        "info" if teaches else "error" if now >= 1 or nothing else "warning",
        f"{now:.0%} of the responses are cut at the token limit",
        next(p for p in series.points if p.value >= MANY).where(series.name),
        evidence=[series.shown(now, f"< {MANY}"), *nothing],
        cause="the limit is too small for this task, or the model does not end its answers (no EOS is trained)"
        + ("; a judge that finds no answer gives 0 to all" if nothing else ""),
        next_step="raise the token limit, and see whether the responses would end; rldbg record -- YOUR COMMAND, then "
        "rldbg diagnose rldbg-dump --rule D19",
        steps=steps_of(p for p in series.points if p.value >= MANY),
    )


@rule("D26", "degenerate output", link="tokens", scope="batch", needs=("tokens", "response"),
      explains=("D18", "D19", "D20"),
      source="verl#2626 (`!!!!` from NaN weights); slime repetition_frac")  # fmt: skip
def degenerate(batch: StepBatch) -> Iterator[Finding]:
    """Share of the most frequent token among all response tokens. Above 0.5 is a warning, an error where it is id 0:
    what sampling from NaN logits gives. Skipped where responses are short on average (below 8 tokens).
    """
    tokens_N, response_N = given(batch.tokens_N), given(batch.response_N)
    written = tokens_N[response_N]
    if written.size < LONG_ENOUGH * max(1, len(batch)):
        raise Skip("responses are shorter than 8 tokens on average")
    ids, counts = np.unique(written, return_counts=True)
    most, top = int(ids[counts.argmax()]), float(counts.max() / written.size)
    if top <= DEGENERATE or most == batch.pad_id:
        return
    at = int(np.flatnonzero(response_N & (tokens_N == most))[0])
    place = batch.laid.where("input_ids", at=at)
    yield finding(
        "error" if most == 0 else "warning",
        f"token {most} is {top:.0%} of everything that was written",
        place,
        evidence=[
            shown("share of the most frequent token", top, "<= 0.5", f"responses of {batch.name}"),
            shown("token id", most),
            shown("different tokens", ids.size),
        ],
        cause="sampling from NaN logits returns id 0: look for the first non-finite weight of the step before"
        if most == 0
        else "the policy repeats itself: collapsed entropy, or broken weights in the engine",
    )


@rule("D27", "trained tokens are not the sampled ones", link="tokens", scope="batch", needs=("tokens", "sample_id"),
      source="trl#5224, rllm#272, ms-swift#10012, verl#6719")  # fmt: skip
def retokenised(batch: StepBatch) -> Iterator[Finding]:
    """The same sample id with other token ids in the rollout's records than in the trainer's: text went out, was
    decoded, and came back in as other tokens. Any mismatch is an error. Compared are records of one step.
    """
    own = _ids_by_sample(batch.spine)
    looked = False
    for sheet in batch.strangers:
        theirs = _ids_by_sample(sheet)
        shared = sorted(set(own) & set(theirs))
        looked = looked or bool(shared)
        different = [
            name for name in shared if not np.array_equal(batch.spine.tokens(own[name]), sheet.tokens(theirs[name]))
        ]
        if not different:
            continue
        name = different[0]
        a, b = batch.spine.tokens(own[name]), sheet.tokens(theirs[name])
        size = min(a.size, b.size)
        apart = np.flatnonzero(a[:size] != b[:size])
        position = int(apart[0]) if apart.size else size
        place = batch.laid.where("input_ids", sample=own[name])
        yield finding(
            "error",
            f"{share(len(different), len(shared))} samples have other token ids in {sheet.name} than "
            f"in {batch.spine.name}",
            place,
            evidence=[
                shown("sample id", name),
                shown("first token that differs", position),
                shown("tokens", a.size, str(b.size), batch.spine.parts[0].held.record.path.name),
            ],
            cause="responses are decoded to text and encoded again between engine and trainer",
        )
        return
    if not looked and len(batch.columns.sheets) < 2:
        raise Skip("the step holds no second record of the same samples")


def _ids_by_sample(sheet: Sheet) -> dict[str, int]:
    """A sheet's samples by the id the trainer gave them; empty where they have none, or share one."""
    found: dict[str, int] = {}
    for sample, (part, row) in enumerate(sheet.index):
        ref = next((ref for ref in sheet.parts[part].held.fields() if ref.canonical == "sample_id"), None)
        if ref is None or ref.shape != (len(sheet.parts[part]),):
            return {}
        name = str(np.asarray(pages.array(ref)).reshape(-1)[row])
        if name in found:
            return {}
        found[name] = sample
    return found
