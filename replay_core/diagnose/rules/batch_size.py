"""How many samples a step has: a batch that was whole and is not any more."""

from __future__ import annotations

from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, shown, warning
from replay_core.diagnose.rule import rule, skip_if

#: Samples of a whole step, steps that have as many, steps that have fewer to the end, and what share of them.
WHOLE, BEFORE, AFTER, LEFT = 8, 2, 2, 0.5


@rule("D106", "the batch shrinks", link="tokens", scope="case",
      source="a data set that ends, a sampler that is not started again; a filter that lets less through")  # fmt: skip
def shrinks(case: Case) -> Finding | None:
    """Steps of one number of samples (8 and more, in 2 steps and more), and from some step on, to the end and in 2
    steps and more, half of it and less: a warning. A last step alone is what is left of a data set. A batch whose size
    changes from step to step (dynamic sampling, agents with several turns) says nothing.
    """
    sizes: dict[int, int] = {}
    prompts: dict[int, int] = {}
    where: dict[int, Where] = {}
    for batch in case.batches():
        if batch.step is None or batch.tokens_N is None:
            continue
        sizes[batch.step] = sizes.get(batch.step, 0) + len(batch.once)
        where.setdefault(batch.step, batch.laid.where("input_ids", sample=0))
        if batch.prompt_B is not None:
            prompts[batch.step] = prompts.get(batch.step, 0) + int(batch.prompt_B.max(initial=-1)) + 1
    steps = sorted(sizes)
    skip_if(len(steps) < BEFORE + AFTER, f"needs the samples of {BEFORE + AFTER} steps")
    whole = sizes[steps[0]]
    since = next((step for step in steps if sizes[step] != whole), None)
    if since is None or whole < WHOLE:
        return None
    before, after = [step for step in steps if step < since], [step for step in steps if step >= since]
    if len(before) < BEFORE or len(after) < AFTER or max(sizes[step] for step in after) > LEFT * whole:
        return None
    asked = (
        f" ({prompts[since]} of {prompts[before[-1]]} prompts)" if since in prompts and before[-1] in prompts else ""
    )
    return warning(
        f"the batch shrinks from {whole} to {sizes[since]} samples{asked} at step {since}, and stays small",
        where[since],
        shown("samples of a step before", whole),
        shown("samples of a step since", sizes[since], str(whole)),
        shown("steps since", len(after)),
        cause="the data set has come to its end and is not begun anew (a sampler that is exhausted, a data loader that "
        "keeps its last, partial batch), a filter or a queue lets less through, or ranks or workers are gone: fewer "
        "samples make each update noisier, at the same learning rate",
        steps=after,
    )
