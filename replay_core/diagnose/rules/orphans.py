"""Thinking that stands outside of its block."""

from __future__ import annotations

from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.finding import Finding, share, shown, warning
from replay_core.diagnose.rule import rule, skip_if
from replay_core.regexes import regex

#: Blocks of thinking by their opening and closing words.
_EMPTY = {
    "think": regex(r"<think>\s*</think>"),
    "thinking": regex(r"<thinking>\s*</thinking>"),
    "reasoning": regex(r"<reasoning>\s*</reasoning>"),
}
#: Samples, and the share of those with a block, before it is how they are rendered.
SAMPLES, SHARE = 8, 0.9


@rule("D158", "thinking stands outside of its block", link="tokens", scope="batch", lasts=True,
      explains=("D27", "D09"),
      source="trl#6361, slime#330, LlamaFactory#8634: a message with its thinking is rendered again")  # fmt: skip
def outside(batch: StepBatch) -> Finding | None:
    """Texts of prompt and response, joined, that hold an empty block of thinking (`<think></think>`) and behind it one
    closing word more than opening ones, with text before it: a warning where nine of ten of the samples that hold a
    closing word do, 8 and more.
    """
    responses = batch.columns.texts("response_text")
    prompts = batch.columns.texts("prompt_text") or [""] * len(batch)
    skip_if(responses is None, "no texts are recorded")
    assert responses is not None
    for word, empty in _EMPTY.items():
        opening, closing = f"<{word}>", f"</{word}>"
        held = found = 0
        first = None
        for sample, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            text = prompt + response
            if closing not in response:
                continue
            held += 1
            blocks = list(empty.finditer(text))
            rest = text[blocks[-1].end() :] if blocks else ""
            inside = rest.partition(closing)[0]
            if closing in rest and opening not in inside and inside.strip():
                found += 1
                first = sample if first is None else first
        if found < SAMPLES or found < SHARE * held:
            continue
        return warning(
            f"thinking stands outside of its block in {share(found, held)} samples: {opening}{closing} is empty, and "
            "one "
            f"{closing} more follows the thinking behind it",
            batch.laid.where("response_text", sample=first),
            shown("samples with an empty block and one closing word more", found, "0"),
            shown("samples with a closing word", held),
            cause="the template closes an empty block (thinking is switched off, or the message has none of its own "
            "field), and the answer, with its thinking and closing word, is written behind it: neither the engine's "
            "tokens nor what the model was trained on",
            next_step="print one prompt and answer as tokens; give the thinking in its own field, or switch it on",
        )
    return None
