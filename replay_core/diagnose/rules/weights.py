"""The recorded weights over the steps: which of them an optimizer moves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import blake2b

from replay_core import pages
from replay_core.budget import stored_bytes
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where
from replay_core.diagnose.rule import Skip, rule
from replay_core.diagnose.stating import finding, listed, look_at, share, shown
from replay_core.records import Record
from replay_core.regexes import regex

#: Weights that are trained alone on purpose.
_ADAPTER = regex(r"lora|adapter|ia3|prompt_encoder|prefix|soft_prompt|bitfit|dora", re.IGNORECASE)
#: Bytes of one step's weights that are read; larger ones are for `rldbg compare`.
MOST = 1 << 28


@rule("D57", "weights that no update moves", link="optimizer", scope="case",
      explains=("D46", "D55", "L14"),
      source="an optimizer made of other parameters than the model that is run")  # fmt: skip
def unmoved(case: Case) -> Iterator[Finding]:
    """Recorded weights (`Recorder.params`) of the first step beside those of the last: a warning where none changes, or
    where those that change are less than half of all numbers and are no adapters (LoRA and the like). A smaller part,
    of a twentieth and more, is worth knowing.
    """
    records = [record for record in case.records() if record.key.stage == "param" and record.key.step is not None]
    steps = sorted({record.key.step for record in records if record.key.step is not None})
    if len(steps) < 2:
        raise Skip("needs the weights of two steps: rldbg record --params .")
    first, last = ([one for one in records if one.key.step == step] for step in (steps[0], steps[-1]))
    if sum(map(stored_bytes, {one.path for one in (*first, *last)})) > 2 * MOST:
        raise Skip("the weights are large: rldbg compare --stage param tells which of them change")
    before, after = _digests(first), _digests(last)
    shared = before.keys() & after.keys()
    still = sorted(name for name in shared if before[name][0] == after[name][0])
    total = sum(before[name][1] for name in shared)
    standing = sum(before[name][1] for name in still)
    moving = sorted(shared - set(still))
    if 20 * standing < total or not still or (moving and all(_ADAPTER.search(name) for name in moving)):
        return
    many = 2 * standing > total
    holder = next(one for one in last if one.get(still[0]) is not None)
    place = Where(step=steps[-1], stage="param", tensor=still[0], path=str(holder.path))
    yield finding(
        "warning" if many else "info",
        f"{share(len(still), len(shared))} weights ({standing / total:.0%} of all numbers) never change over "
        f"{len(steps)} steps" + (": the optimizer holds a subset of the parameters" if moving and many else ""),
        place,
        evidence=[
            shown("weights that change", listed(moving, 4) or "none"),
            shown("weights that do not", listed(still, 4), "none", f"steps {steps[0]} and {steps[-1]}"),
        ],
        cause="the optimizer holds other parameters than the model's, or a part of them; they are frozen, or cut off "
        "from the loss; or updates are too small for their precision",
        next_step=look_at(place) + "   # and print the sizes of optimizer.param_groups",
        steps=steps,
    )


def _digests(records: list[Record]) -> dict[str, tuple[bytes, int]]:
    """Digest and size of every weight."""
    return {
        ref.name: (blake2b(pages.array(ref).tobytes(), digest_size=16).digest(), ref.numel)
        for record in records for ref in record.tensors() if not ref.is_text and ref.is_readable and len(ref.shape)
    }  # fmt: skip
