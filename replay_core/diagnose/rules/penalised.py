"""What a penalty on long answers counts: the policy's tokens, tool output beside them, or characters."""

from __future__ import annotations

import numpy as np

from replay_core.diagnose.algorithm import Algorithm, inside
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, share, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import Skip, rule, skip_if
from replay_core.diagnose.rules.shaping import BUFFER_WORDS, LIMIT_WORDS
from replay_core.regexes import regex

#: How such a penalty is called.
_PENALTY = regex(r"(?i)over_?long|too_?long|over_?length|soft_?(?:overlong_)?punish|length_?penalty")
#: Samples, those between nothing and the whole penalty, and different sizes of these, that tell a line.
SAMPLES, BETWEEN, SIZES = 24, 8, 3
#: What a line may leave of the penalty's range, in the share of the samples that have to lie on it; and the least share
#: that has to lie off the line of another size.
LEFT, ON, OFF = 1e-3, 0.98, 0.1
#: The share of answers with nearly all of the penalty before it says that it tells none apart.
FULL = 0.5


@rule("D132", "a penalty on length counts more than the policy's tokens", link="rewards", scope="case", lasts=True,
      explains=("L08", "L09", "D105"),
      source="DAPO section 3.3; OpenRLHF#1243 (tool tokens), open-r1#567 (characters)")  # fmt: skip
def counted_otherwise(case: Case) -> Finding | None:
    """A recorded penalty on overlong answers (none above 0) as 0 up to a size, a falling line behind it, and one number
    from its end on, over 24 samples and more, 8 of them of 3 sizes and more on the line: fitted for the tokens that
    count, all tokens of the response, and the characters of its text. A warning where the line of all tokens (tool
    output is among them), or of characters, leaves less than a thousandth in .98 of the samples, and that of the
    tokens that count is off in a tenth and more. Where hardly a sample is on the line, the stated limit and buffer are
    it.
    """
    sizes: dict[str, list[Array]] = {"counted": [], "all": [], "characters": []}
    penalties: list[Array] = []
    named, first = "", None
    steps: list[int | None] = []
    for batch in case.batches():
        names = sorted({name for sheet, _ in batch.columns.sheets for name in sheet.names() if _PENALTY.search(name)})
        each = next(((name, told) for name in names if (told := batch.columns.per_sample(name)) is not None), None)
        if each is None or batch.response_N is None or batch.trained_N is None or not np.isfinite(each[1]).all():
            continue
        texts = batch.columns.texts("response_text")
        named, first = each[0], first or batch
        penalties.append(each[1])
        sizes["counted"].append(batch.flat.count(batch.trained_N & batch.response_N).astype(np.float64))
        sizes["all"].append(batch.flat.count(batch.response_N).astype(np.float64))
        if texts is not None:
            sizes["characters"].append(np.array([float(len(text)) for text in texts]))
        steps.append(batch.step)
    if first is None:
        raise Skip("needs a recorded penalty on overlong answers, and their tokens")
    penalty_B = np.concatenate(penalties)
    known = {what: np.concatenate(each) for what, each in sizes.items() if each}
    skip_if(len(penalty_B) < SAMPLES or penalty_B.max() > 1e-6 or not penalty_B.min() < 0,
            f"needs such a penalty, 0 and below, of {SAMPLES} answers")  # fmt: skip
    stated = _stated(case.algorithm)
    on = {
        what: _on_a_line(size_B, penalty_B, stated)
        for what, size_B in known.items() if len(size_B) == len(penalty_B)
    }  # fmt: skip
    # What goes with the tokens that count is right, whatever else goes with it.
    if on["counted"][0] > 1 - OFF or max(share_on for share_on, *_ in on.values()) < ON:
        return None
    what = "all" if on["all"][0] >= ON else "characters"
    if on[what][0] < ON:
        return None
    _, begins, ends = on[what]
    worst = penalty_B <= penalty_B.min() + LEFT * abs(float(penalty_B.min()))
    unit = "tokens" if what == "all" else "characters"
    other = float(known["all"].mean() - known["counted"].mean())
    full = float(worst.mean())
    return warning(
        (
            f"the penalty on length counts tool output: {named} follows all tokens of the response, not those of the "
            "policy"
            if what == "all"
            else f"the penalty on length counts characters, not tokens: {named} follows the length of the text"
        )
        + (f", and {full:.0%} of the answers have all of it" if full >= FULL else ""),
        _place(first, named),
        shown(f"answers whose penalty follows {'all tokens of the response' if what == 'all' else 'the characters'}",
              f"{on[what][0]:.0%}", None, named),
        shown("of them, those that follow the tokens that count", f"{on['counted'][0]:.0%}", "100%"),
        shown(f"{unit} at which it begins and is whole", f"{begins:.4g}, {ends:.4g}"),
        shown("tokens of a response that the policy did not write, mean", other)
        if what == "all"
        else shown("characters of an answer for each token, mean",
                   float((known[what] / np.maximum(known["all"], 1)).mean())),
        shown("answers with all of the penalty", share(int(worst.sum()), len(worst))),
        cause="the length of the whole response is handed to the penalty, observations included: calling a tool is "
        "punished by what it returns, and policies learn not to call"
        if what == "all"
        else "len() is taken of a text and not of its ids, beside a limit and a buffer in tokens: an answer counts "
        "several times its tokens, and nearly all are punished",
        next_step="count the loss mask of the response" if what == "all" else "count the ids of the completion",
        steps=steps,
    )  # fmt: skip


def _place(batch: StepBatch, name: str) -> Where:
    penalty_B = batch.columns.per_sample(name)
    return batch.laid.where(name, sample=0 if penalty_B is None else int(np.argmin(penalty_B)))


def _stated(algorithm: Algorithm) -> tuple[float, float] | None:
    """The sizes at which the penalty is stated to begin and to be whole; None where they are not."""
    limit, buffer = algorithm.number(*LIMIT_WORDS, "max_completion_len"), algorithm.number(*BUFFER_WORDS)
    buffer = inside(algorithm, "overlong_buffer", "len") if buffer is None else buffer
    known = isinstance(buffer, (int, float)) and limit is not None and 0 < buffer < limit
    return (limit - buffer, limit) if known and limit is not None else None


def _on_a_line(size_B: Array, penalty_B: Array, stated: tuple[float, float] | None) -> tuple[float, float, float]:
    """The share of samples that lie on 0, a falling line, and its end; and the sizes at which that begins and ends: as
    the samples between the two have it, else as it is stated.
    """
    low = float(penalty_B.min())
    between_B = (penalty_B < -LEFT * abs(low)) & (penalty_B > low * (1 - LEFT))
    x, y = size_B[between_B], penalty_B[between_B]
    if len(x) >= BETWEEN and np.unique(y).size >= SIZES - 1 and np.ptp(x) > 0:
        slope, at = _line(x, y)
        if not slope < 0:
            return 0.0, 0.0, 0.0
        begins, ends = -at / slope, (low - at) / slope
    elif stated is not None:
        begins, ends = stated
        slope, at = low / (ends - begins), -begins * low / (ends - begins)
    else:
        return 0.0, 0.0, 0.0
    made_B = np.clip(at + slope * size_B, low, 0.0)
    return float((np.abs(made_B - penalty_B) <= LEFT * abs(low)).mean()), begins, ends


def _line(x: Array, y: Array) -> tuple[float, float]:
    """Slope and offset of the line through the medians of the largest and the smallest values."""
    high, low = y >= y.max() - 1e-9, y <= y.min() + 1e-9
    x_high, x_low = float(np.median(x[high])), float(np.median(x[low]))
    slope = 0.0 if x_low == x_high else float(y.min() - y.max()) / (x_low - x_high)
    return slope, float(y.max()) - slope * x_high
