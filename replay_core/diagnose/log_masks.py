"""No token counts in the loss, as logs show it (D07)."""

from __future__ import annotations

from collections.abc import Iterable

from replay_core.diagnose.finding import Evidence, Finding
from replay_core.diagnose.log_steps import (
    is_cut,
    numbers,
    severity_of,
    step_numbers,
    steps_of,
    steps_told,
)
from replay_core.diagnose.signals import Part, signal_rule


@signal_rule(
    "D07",
    "no token counts",
    link="masks",
    needs=("num_masked|masks_in_input|event:warning|grad_norm",),
    source="seed 002: nano_gpt 1da2900, fixed in 547c4bf; trl#3248",
)
def no_token_counts(part: Part) -> Iterable[Finding]:
    """D07. No token of a micro-batch counts in the loss: it is an empty sum.

    num_masked = 0 while the input holds masks (its own count; else other micro-batches of the run that do train)
    is a lost mask: logits and mask had different lengths and both were cut to the shorter. Without any mask in
    the input it is the data. A gradient of 0 in a step whose completions are all cut is mask_truncated_completions.
    Rewards that differ rule out D01.
    """
    yield from _no_masked_position(part)
    yield from _all_cut(part)


def _all_cut(part: Part) -> Iterable[Finding]:
    known = [step for step in steps_told(part) if step.grad is not None and step.is_dead is not None]
    cut = [step for step in known if step.grad == 0 and not step.is_dead and is_cut(step)]
    if cut:
        yield Finding(
            "D07",
            severity_of(len(cut), len(known)),
            "every completion is cut, and no gradient is left",
            numbers(truncated=cut[0].truncated, grad_norm=0.0, loss=cut[0].loss, reward_std=cut[0].group_std),
            "truncated completions are masked out (mask_truncated_completions): no token is trained",
            "raise the limit of tokens, or train on truncated completions",
            "masks",
            "trl#3248",
            cut[0].point.where("grad_norm"),
            tuple(step_numbers(cut)),
        )


def _no_masked_position(part: Part) -> Iterable[Finding]:
    lost = [point for point in part.micros("num_masked") if point.value == 0]
    none = [told for told in part.warnings() if "No masks in batch" in told.text or "No masked positions" in told.text]
    inputs = {(p.step, p.micro, p.rank): p for p in part.micros("masks_in_input")}
    losses = {(p.step, p.micro, p.rank): p for p in part.micros("pg_loss")}
    stds = {(p.step, p.micro, p.rank): p for p in part.micros("reward_std")}
    empty = [p for p in inputs.values() if p.value == 0]
    places = {(p.step, p.micro, p.rank) for p in lost}
    elsewhere = [p for key, p in losses.items() if p.value != 0 and key not in places]
    if lost:
        first = lost[0]
        key = first.step, first.micro, first.rank
        count = inputs.get(key)
        exist = count.value > 0 if count is not None else bool(elsewhere)
        of = max(len(losses), len(lost))
        evidence = [Evidence("num_masked", 0.0, "> 0", f"line {first.line}")]
        if count is not None:
            evidence.append(Evidence("masks_in_X", count.value, source=f"line {count.line}"))
        elif elsewhere:
            evidence.append(
                Evidence("micro-batches whose masks count", len(elsewhere), source=f"line {elsewhere[0].line}")
            )
        if key in stds:
            evidence.append(Evidence("reward std", stds[key].value, "not the cause", f"line {stds[key].line}"))
        if key in losses:
            evidence.append(Evidence("pg_loss", losses[key].value, source=f"line {losses[key].line}"))
        evidence.append(Evidence("micro-batches", f"{len(lost)} of {of}", source="log"))
        claim = (
            "logits/mask lengths disagree: masked-position count 0 while masks exist"
            if exist
            else "masked-position count 0: no token counts in the loss"
        )
        cause = (
            "the forward pass returns logits of the last position only (no targets given), and a fallback cuts "
            "completions and mask to that length: the loss is 0 unless position 0 is masked"
            if exist
            else "the input holds no masked position, or the mask is cut to the length of the logits; the log does not "
            "say how many masks the input holds"
        )
        yield Finding(
            "D07",
            "error",
            claim,
            tuple(evidence),
            cause,
            "print logits.shape beside mask.shape before the loss: they must agree in length; "
            "rldbg record -- YOUR COMMAND shows both",
            "masks",
            "seed 002",
            first.where("num_masked"),
            steps_of(lost),
        )
    if none or (empty and not lost):
        point = none[0].point if none else empty[0]
        yield Finding(
            "D07",
            "error",
            "the batch holds no masked position: nothing is trained on",
            (Evidence("warning", none[0].text[:120], source=f"line {none[0].point.line}"),)
            if none
            else (Evidence("masks_in_X", 0.0, "> 0", f"line {point.line}"),),
            "the data mask nothing: mask token, mask probability or dataset are not what the trainer expects",
            "look at one batch of the data; rldbg record -- YOUR COMMAND",
            "masks",
            "seed 002",
            point.where("masks_in_X"),
            steps_of([t.point for t in none] if none else empty),
        )
