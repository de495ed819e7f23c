"""Where turns of a response meet: what stands between the policy's last token and what the template or a tool adds."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
from msgspec import Struct, field

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, share, shown, warning
from replay_core.diagnose.rule import given, rule, skip_if

#: Joints before they tell, steps of them, and the share that has to be one way.
JOINTS, STEPS, SHARE = 8, 2, 0.95


class _Joints(Struct):
    """What follows the end of a turn in prompts and inside of responses, over the steps."""

    ends: Counter[int] = field(default_factory=Counter)
    """The last token that counts before a gap of the mask."""
    gaps: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    """That token and the two that follow it."""
    in_prompts: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    steps: list[int | None] = field(default_factory=list)
    where: Where | None = None
    rows: int = 0

    def take(self, batch: StepBatch) -> None:
        tokens_N, trained_N = given(batch.tokens_N), given(batch.trained_N)
        met = False
        for sample, span in enumerate(batch.flat.spans):
            ids, counts = tokens_N[span], trained_N[span]
            inside = np.flatnonzero(counts)
            if inside.size < 2:
                continue
            self.rows += 1
            begin = int(inside[0])
            prompt = ids[:begin]
            for at in range(len(prompt) - 2):
                self.in_prompts[int(prompt[at]), int(prompt[at + 1]), int(prompt[at + 2])] += 1
            for before, after in pairwise(inside.tolist()):
                if after - before < 3:
                    continue
                met = True
                end, one, two = (int(ids[before + by]) for by in range(3))
                self.ends[end] += 1
                self.gaps[end, one, two] += 1
                if self.where is None:
                    start = int(batch.flat.starts_B[sample])
                    self.where = batch.laid.where("input_ids", at=start + int(before))
        if met:
            self.steps.append(batch.step)


@rule("D155", "turns are joined otherwise than the template joins them", link="tokens", scope="case", lasts=True,
      explains=("D47", "D27"),
      source="verl#6921, #6501, #3948, codescout#60: tool turns are rendered on their own and appended")  # fmt: skip
def joined(case: Case) -> Finding | None:
    """Tokens where the mask has a gap inside of a response (3 and more of other hands), beside the prompts' own turns,
    over 8 gaps and more of 2 steps and more.

    A separator that is dropped: one token ends the policy's turns before the gaps, in prompts it is followed by one
    and the same X (95 %, 8 and more) and X by S, and in the gaps it is followed by S at once, and never by X: a
    warning.
    """
    joints = _Joints()
    looked = 0
    for batch in case.batches():
        if batch.tokens_N is None or batch.trained_N is None:
            continue
        looked += 1
        joints.take(batch)
    skip_if(not looked, "needs tokens and a mask")
    count = joints.gaps.total()
    skip_if(count < JOINTS or len(set(joints.steps)) < STEPS, f"needs {JOINTS} gaps of the mask in {STEPS} steps")
    return _dropped(joints, count)


def _dropped(joints: _Joints, count: int) -> Finding | None:
    end, ends = joints.ends.most_common(1)[0]
    after = Counter({key: many for key, many in joints.in_prompts.items() if key[0] == end})
    if ends < SHARE * count or after.total() < JOINTS:
        return None
    separators: Counter[int] = Counter()
    for (_, one, _), many in after.items():
        separators[one] += many
    separator, often = separators.most_common(1)[0]
    starts: Counter[int] = Counter()
    for (_, one, two), many in after.items():
        if one == separator:
            starts[two] += many
    start, started = starts.most_common(1)[0]
    at_once = sum(many for (first, one, _), many in joints.gaps.items() if first == end and one == start)
    kept = sum(many for (first, one, _), many in joints.gaps.items() if first == end and one == separator)
    if often < SHARE * after.total() or started < SHARE * often or start in (separator, end):
        return None
    if at_once < SHARE * count or kept:
        return None
    return warning(
        f"turns are joined without the token that the template puts between them: token {separator} follows the end "
        f"token {end} in prompts ({share(often, after.total())} times), and never inside of responses "
        f"({share(kept, count)})",
        given(joints.where),
        shown(f"gaps of the mask in which {start} follows {end} at once", share(at_once, count), "none"),
        shown(f"turns in prompts in which {separator} stands between them", share(often, after.total())),
        cause="the engine stops at the end token, and the tool's turn is rendered on its own and appended: what the "
        "template writes after an assistant's turn (a newline) is in no part of it; the model reads, and is trained "
        "on, turns that no template makes",
        next_step="append the template's separator with the tool's turn (mask 0), or render both turns and take the "
        "difference",
        steps=joints.steps,
    )
