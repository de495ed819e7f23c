"""The prompts: of one group they are one, of two steps they are two, and none begins twice."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding
from replay_core.diagnose.rule import Skip, given, rule
from replay_core.diagnose.stating import finding, listed, share, shown

#: Steps with the same prompts before it is no chance, and no data set of one batch.
SAME = 3
#: And before it is more than a test on one batch.
LONG = 5


@rule("D42", "a group mixes prompts", link="groups", scope="batch", needs=("group", "tokens", "response"),
      explains=("D01", "D03", "D04", "D05"), lasts=True,
      source="Search-R1#88: an id made by place, or per worker; the baseline is then another prompt's")  # fmt: skip
def mixed_groups(batch: StepBatch) -> Iterator[Finding]:
    """Groups, as the dump names them, that hold different prompts, while one prompt's samples lie in several groups. In
    half of the groups and more it is an error. Prompts that differ within their group and nowhere repeat are normal
    (turns of a conversation, a clock in the system prompt).
    """
    if not batch.group_is_named:
        raise Skip("groups are not named in the dump")
    group_B, prompt_B = given(batch.group_B), batch.prompt_B
    if prompt_B is None:
        raise Skip("a sample has no prompt")
    pairs = np.unique(np.stack([group_B, prompt_B]), axis=1)
    prompts_G, groups_P = np.bincount(pairs[0]), np.bincount(pairs[1])
    mixed = int((prompts_G > 1).sum())
    if mixed < 2 or 2 * mixed < prompts_G.size or not (groups_P > 1).any():
        return
    first = int(np.flatnonzero(prompts_G > 1)[0])
    members = np.flatnonzero(group_B == first)
    yield finding(
        "error",
        f"{share(mixed, prompts_G.size)} groups mix prompts: responses are measured against answers to other questions",
        batch.laid.where("group_id" if batch.columns.ref("group_id") else None, sample=int(members[0])),
        evidence=[
            shown("different prompts in the first such group", int(prompts_G[first]), "1", f"groups of {batch.name}"),
            shown("its samples", listed(members)),
            shown("prompts whose samples lie in several groups", int((groups_P > 1).sum()), "0"),
        ],
        cause="the group id is made by place, or before the batch was shuffled, or repeats over workers",
    )


@rule("D43", "every step has the same prompts", link="tokens", scope="case",
      source="a sampler that is never advanced, or seeded anew in every step")  # fmt: skip
def same_prompts(case: Case) -> Iterator[Finding]:
    """The same set of prompts in every step, over 3 steps and more: worth knowing, since a run on one batch is a way to
    test a trainer, and nothing in a dump tells it from a loader that stands still; over 5 and more a warning. Looking
    ends where two differ.
    """
    first: frozenset[bytes] | None = None
    steps: list[int] = []
    where = None
    for batch in case.batches():
        if batch.step is None or batch.tokens_N is None or batch.prompt_B is None or batch.step in steps:
            continue
        heads_B = batch.flat.first(given(batch.response_N))
        pairs = zip(batch.flat.starts_B, heads_B, strict=True)
        prompts = frozenset(batch.tokens_N[start : start + head].tobytes() for start, head in pairs)
        if first is not None and prompts != first:
            return
        first, where = first or prompts, where or batch.laid.where("input_ids", sample=0)
        steps.append(batch.step)
    if first is None or len(steps) < SAME:
        raise Skip(f"needs the prompts of {SAME} steps")
    yield finding(
        "warning" if len(steps) >= LONG else "info",
        f"every step has the same prompts ({len(first)} of them, {len(steps)} steps)",
        where,
        evidence=[shown("steps with these prompts", share(len(steps), len(steps))), shown("prompts", len(first))],
        cause="the data loader is made or seeded anew in every step, or never advanced; or the data are one batch",
        steps=steps,
    )


@rule("D47", "prompts begin twice", link="tokens", scope="batch", needs=("tokens",),
      explains=("D09", "D12", "D27"), lasts=True,
      source="transformers chat templates that write BOS, tokenised with add_special_tokens=True")  # fmt: skip
def doubled_beginning(batch: StepBatch) -> Iterator[Finding]:
    """Every sample begins with one token twice, which stands nowhere else: a doubled BOS. An error."""
    tokens_N, starts_B, lengths_B = given(batch.tokens_N), batch.flat.starts_B, batch.flat.lengths_B
    if len(batch) < 2 or (lengths_B < 3).any():
        raise Skip("needs two samples of three tokens and more")
    begins_B = tokens_N[starts_B]
    if (begins_B != begins_B[0]).any() or (tokens_N[starts_B + 1] != begins_B).any() or begins_B[0] == batch.pad_id:
        return
    elsewhere = int((tokens_N == begins_B[0]).sum()) - 2 * len(batch)
    if elsewhere > 0.1 * len(batch):
        return
    yield finding(
        "error",
        f"every prompt begins with token {int(begins_B[0])} twice: a doubled BOS",
        batch.laid.where("input_ids", at=int(starts_B[0]) + 1),
        evidence=[
            shown("samples that begin so", share(len(batch), len(batch)), "none", f"token ids of {batch.name}"),
            shown("the token elsewhere", elsewhere),
        ],
        cause="the chat template writes the token, and the tokenizer adds its own (add_special_tokens=True)",
    )
