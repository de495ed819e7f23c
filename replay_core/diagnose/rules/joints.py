"""Where turns of a response meet: what stands between the policy's last token and what the template or a tool adds."""

from __future__ import annotations

from collections import Counter

import numpy as np
from msgspec import Struct, field

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, share, shown, warning
from replay_core.diagnose.rule import given, rule, skip_if

#: Joints before they tell, steps of them, and the share that has to be one way.
JOINTS, STEPS, SHARE = 8, 2, 0.95


class _Joints(Struct):
    """What follows the end of a turn inside of responses, over the steps."""

    ends: Counter[int] = field(default_factory=Counter)
    """The last token that counts before a gap of the mask."""
    gaps: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    """That token and the two that follow it."""
    steps: list[int | None] = field(default_factory=list)
    where: Where | None = None

    def take(self, batch: StepBatch) -> None:
        tokens_N, trained_N = given(batch.tokens_N), given(batch.trained_N)
        met = False
        for sample, span in enumerate(batch.flat.spans):
            ids, counts = tokens_N[span], trained_N[span]
            inside = np.flatnonzero(counts)
            for before in inside[:-1][np.diff(inside) >= 3].tolist():
                met = True
                end, one, two = (int(ids[before + by]) for by in range(3))
                self.ends[end] += 1
                self.gaps[end, one, two] += 1
                if self.where is None:
                    start = int(batch.flat.starts_B[sample])
                    self.where = batch.laid.where("input_ids", at=start + before)
        if met:
            self.steps.append(batch.step)


def _in_prompts(batches: list[StepBatch], end: int) -> Counter[tuple[int, int]]:
    """The two tokens that follow the end of a turn in the prompts of rows with two counted tokens and more."""
    found: Counter[tuple[int, int]] = Counter()
    for batch in batches:
        tokens_N, trained_N = given(batch.tokens_N), given(batch.trained_N)
        for span in batch.flat.spans:
            inside = np.flatnonzero(trained_N[span])
            if inside.size < 2:
                continue
            prompt = tokens_N[span][: inside[0]]
            at = np.flatnonzero(prompt[:-2] == end)
            found.update(zip(prompt[at + 1].tolist(), prompt[at + 2].tolist(), strict=True))
    return found


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
    batches = [batch for batch in case.batches() if batch.tokens_N is not None and batch.trained_N is not None]
    for batch in batches:
        joints.take(batch)
    skip_if(not batches, "needs tokens and a mask")
    count = joints.gaps.total()
    skip_if(count < JOINTS or len(set(joints.steps)) < STEPS, f"needs {JOINTS} gaps of the mask in {STEPS} steps")
    return _dropped(joints, batches, count)


def _dropped(joints: _Joints, batches: list[StepBatch], count: int) -> Finding | None:
    end, ends = joints.ends.most_common(1)[0]
    after = _in_prompts(batches, end) if ends >= SHARE * count else Counter()
    if after.total() < JOINTS:
        return None
    separators: Counter[int] = Counter()
    for (one, _), many in after.items():
        separators[one] += many
    separator, often = separators.most_common(1)[0]
    starts: Counter[int] = Counter()
    for (one, two), many in after.items():
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
