"""The causes that a replay can name, each defined by the change of the batch that shows it. Plain data."""

from __future__ import annotations

from msgspec import Struct


class Kind(Struct, frozen=True):
    """said: how a sentence begins to say it. means: what was changed, and what moved with it; for docs/flags.md."""

    said: str
    means: str


#: What is wrong, what explains most first: of two that hold at one place the earlier is the cause, the other is listed.
KINDS = {
    "random": Kind(
        "is random",
        "Another seed moves the answer, the same seed does not: dropout or another draw is left on. Nothing else can "
        "be asked of such a model.",
    ),
    "state": Kind(
        "state is carried over",
        "What a call, a row or a sample leaves behind is there when the next begins: the same tokens again, after "
        "others, are something else; or a convolution, a recurrent state or a scan goes on from one sample to the "
        "next, and whatever else moves several tokens right behind a sample, in either order, and does not attend.",
    ),
    "batch": Kind(
        "depends on the batch",
        "A statistic, a capacity or a shape moves a sample, and no single token is seen: a mean, a norm, the greatest "
        "value over all slots, who is chosen of all tokens, the number of rows or samples, the padded length. Other "
        "tokens in a sample or in the padding may move everybody, as they are part of the statistic; where only how "
        "much padding there is moves a sample, and no other id in it does, the sentence says `on the padded length`.",
    ),
    "other_samples": Kind(
        "sees other samples",
        "Other tokens in one sample move tokens of another: by attention over a boundary, a shift or an exchange.",
    ),
    "future": Kind("sees the future", "Another token moves earlier tokens of its own sample."),
    "padding": Kind(
        "sees padding",
        "The content of padding moves a sample: other token ids in the same slots of padding, none more and none less, "
        "give other outputs. Where the length of the padding moves it and the content does not, it "
        "`depends on the batch`.",
    ),
    "own_keys": Kind(
        "loses own keys",
        "Another token moves itself or later tokens of its sample when that row is alone, and does not here. Or each "
        "row alone loses it too: no head of a module gives a key of the past anything, whatever the tokens are, and no "
        "window of the config ends before it.",
    ),
    "positions": Kind(
        "positions",
        "The first module that parts gives the positions (`rotary_emb`, `wpe`; also where its frequencies follow the "
        "length, as dynamic NTK and longrope do), or the two are one as soon as nothing is rotated, or the scores "
        "differ by what depends on places alone.",
    ),
    "maths": Kind(
        "other weights or maths",
        "Every token sees what it may and nothing else, and something else is computed: a scale, a kernel, a weight, a "
        "compiler. The first module that parts is named. Of each row alone: nothing is wrong with what was replayed, "
        "and none of it comes near what was recorded.",
    ),
    "rounding": Kind(
        "rounding",
        "In float64 the two are one, and in its own dtype the cell is no further from that than each row alone is: "
        "no fault, exit 0. Of gradients alone: they are about as far (1.5 times at most) from those in a "
        "finer dtype as each row alone's.",
    ),
    "unknown": Kind("not known", "The model could not be asked; the sentence says why."),
}  # fmt: skip


def section() -> str:
    """The part of docs/flags.md that defines them."""
    rows = [f"| {kind.said} | `{name}` | {kind.means} |" for name, kind in KINDS.items()]
    return f"""## Causes

What a replay calls a cell that is not what each row alone is: in its headline, in `cause.kind` of the document, under
`--why`. Each is shown by a change of the batch, in float64 where memory allows, and never concluded from which samples
are off. The first that holds is the cause, in the order of computation and then in this one; `also` lists the others.

| the headline says | `kind` | which means |
|---|---|---|
{chr(10).join(rows)}
"""
