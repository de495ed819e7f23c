"""The numbers of the table of rules (`rules.py`). What was measured against each stands in docs/tolerances.md.

Limits scale with the tensor (relative L2, relative L2 of a row, the tensor's rms), so that a gradient of 1e-8 is judged
like a hidden state of 1e2. Columns: *local* where a module's recorded inputs are bitwise equal, *end-to-end* where
error may have accumulated before, *gradient*, and *param*: stored, not computed by a forward.
"""

from __future__ import annotations

from replay_core.dtypes import DTYPES, FAMILIES

#: Column -> dtype family -> limit.
Table = dict[str, dict[str, float]]


def _by_column(**columns: tuple[float, ...]) -> Table:
    return {name.replace("_", "-"): dict(zip(FAMILIES, numbers, strict=True)) for name, numbers in columns.items()}


#                      float64 float32 float16 bfloat16 float8
REL_L2 = _by_column(
    local=            (1e-10,  1e-4,   1.5e-2, 1.5e-2,  0.25),
    end_to_end=       (1e-8,   1e-4,   1.5e-2, 0.1,     0.5),
    gradient=         (1e-8,   2e-4,   3e-2,   6e-2,    0.5),
    param=            (1e-8,   1e-4,   1.5e-2, 1.5e-2,  0.5),
)  # fmt: skip
#: Relative L2 from which on CLOSE is suspect.
SUSPECT = _by_column(
    local=            (1e-12,  1e-5,   4e-3,   8e-3,    0.1),
    end_to_end=       (1e-10,  5e-5,   6e-3,   5e-2,    0.25),
    gradient=         (1e-10,  5e-5,   6e-3,   2.5e-2,  0.25),
    param=            (1e-10,  5e-5,   4e-3,   6e-3,    0.25),
)  # fmt: skip
WORST_ROW = _by_column(
    local=            (1e-7,   1e-4,   1.5e-2, 0.1,     0.5),
    end_to_end=       (1e-6,   1e-3,   3e-2,   0.25,    1.0),
    gradient=         (1e-6,   2e-3,   0.1,    0.5,     1.0),
    param=            (1e-6,   1e-3,   1.5e-2, 0.1,     1.0),
)  # fmt: skip
OUTLIER = _by_column(
    local=            (1.0,    1.0,    1.0,    1.0,     2.0),
    end_to_end=       (1.0,    1.0,    1.0,    1.0,     2.0),
    gradient=         (2.0,    2.0,    2.0,    2.0,     4.0),
    param=            (1.0,    1.0,    1.0,    1.0,     2.0),
)  # fmt: skip
#: Relative L2 that harmless changes reach end to end.
NOISE = dict(zip(FAMILIES, (1e-12, 1e-5, 2.5e-3, 2e-2, 0.1), strict=True))

#: One matrix product of equal inputs, in half precision: (limit, suspect) of relative L2. Both sides round the same sum
#: once: every last bit flipped is 5.5e-3 in bf16; weights that went through int8 make it 6.4e-3 to 1e-2.
PROJECTION = {"float16": (7.5e-4, 7.5e-4), "bfloat16": (6e-3, 5e-3)}
PROJECTIONS = ("_proj", "lm_head")

#: Half precision: what noise there was before a tensor widens its limits: (times the noise, at most times the limit).
#: Noise is the largest relative L2 of the micro-batch's activations that were CLOSE, and the rms of its log
#: probabilities' differences; of suspect ones only what NOISE_GROWTH allows.
WIDENED = {
    "rel_l2": {"end-to-end": (2.0, 2.0), "gradient": (3.0, 5.0)},
    "worst_row": {"end-to-end": (10.0, 2.4), "gradient": (15.0, 3.0)},
    "outlier": {"end-to-end": (12.0, 1.6), "gradient": (30.0, 1.6)},
}
#: What is suspect is noise, too, if it is no more than this many times what was noise before it. Harmless: 1.4 times; a
#: fault of 5 % after noise: 2.3 times and more.
NOISE_GROWTH = 2.0

#: A stored number that was cast is off by no more than two of its own roundings. An update (Adam moves every element
#: about as far) or a quantisation moves most of them alike: the greatest |d| is 1 to 12 times the rms of d. What
#: another kernel's gradients leave of an update is the full step at a few elements: 15 to 135 times.
MOST_ROUNDINGS, MOST_CREST = 2.0, 12.5
#: One element of n has a crest of sqrt(n); and fp32 last bits, all of them, are a relative L2 of 1e-7.
FEWEST_UPDATED, LEAST_UPDATE = 1024, 2e-6

#: Log probabilities, by the dtype they were computed in: (limit, suspect), in nats but for mean exp|d|. Where nobody
#: says which it was and the figures do not show fp32, it is taken to be bf16: by custom it is stored in fp32 anyway.
_FINE, _COARSE = (2.5e-3, 1e-3), (1.0, 0.25)
MAX_ABS = dict(zip(FAMILIES, (_FINE, _FINE, (0.5, 0.1), _COARSE, (2.0, 0.5)), strict=True))
MEAN_EXP_ABS = dict(zip(FAMILIES, (*((1.0025, 1.001),) * 2, *((1.2, 1.05),) * 3), strict=True))
K3 = dict(zip(FAMILIES, (*((1e-5, 1e-6),) * 2, *((5e-2, 5e-3),) * 3), strict=True))
#: Nats by which noise moves log probabilities of fp32. Where the typical token of every sample that differs is off by
#: less (in units of 1 - p), both sides show fp32, or that they were computed alike: noise of bf16 spares no token.
LOGPROB_NOISE_FP32 = 2.5e-4
#: Nats by which one last place of a bfloat16 logit, below 16, moves a log probability whose token has many rivals: all
#: others differ by next to nothing, but they differ. Harmless, a GPU's packed batch: .0157, 83 % of them differ.
LOGPROB_STEP_OF_HALF = 0.07

#: A sample of log probabilities stands out: its rms difference, each token's in units of 1 - p (what is nearly certain
#: hardly moves), is this many times the typical other sample's; or one of its tokens is off this many times the
#: greatest difference of all other samples.
SAMPLE_STANDING_OUT, TOKEN_STANDING_OUT = 4.0, 8.0
#: Samples among which one can stand out, and the least nats by which it does: among noise, and among samples that are
#: equal (one that alone was padded or packed otherwise has noise alone).
FEWEST_SAMPLES, LEAST_AMONG_NOISE, LEAST_AMONG_EQUAL = 4, 0.025, 0.1
#: 1 - p of tokens that are certain.
LEAST_DOUBT = 1e-3
#: A sample of fewer tokens says too little of its own for a mean.
SAMPLE_TOKENS = 8

#: Scalars the trainer reduced itself (losses, metrics): (limit, suspect), relative; the dtype they were computed in is
#: unknown.
SCALAR = (1e-2, 1e-3)
#: A number is said to be so many times another: accumulation steps and ranks are few.
MOST_TIMES = 64
#: A loss is a sum that cancels: below this absolute difference two of them agree.
SCALAR_FLOOR = 1e-6
#: ... or below this many standard errors of a mean over the tokens whose log probabilities it was made of, and this
#: much of itself, unless it is itself no more than so many of them: terms that cancel leave nothing else.
SCALAR_ERRORS, SCALAR_RELATIVE, SCALAR_NOTHING = 4.0, 0.1, 2.0

#: Gain b = (1 + beta) a, bias b = a + c: a bug where it explains this part of the difference and is larger than
#: rounding can make it (c in rms of a).
GAIN_SHARE = 0.5
#: A constant is named instead of a factor that explains less by this: of values that are nearly one number both do.
GAIN_BESIDE_BIAS = 0.05
GAIN_FLOOR = dict(zip(FAMILIES, (1e-9, 5e-5, 1e-3, 4e-3, 3e-2), strict=True))

#: A gradient that lives off few tokens is off by one factor, too: the factor explains this much, or is larger than so
#: many roundings and so many times the noise before it.
GRADIENT_GAIN_SHARE, GRADIENT_GAIN_ROUNDINGS, GRADIENT_GAIN_NOISE = 0.95, 6.0, 1.5

#: One row's own factor: rounding inside a norm scales a row by up to u, over the layers by a few u. A gradient's row
#: that lives off one token takes over that token's rounding as a factor, and a row of experts that of its router's
#: weight; so either a row is moved by its factor more than this many times as far as three quarters of the rows are by
#: theirs, or too many are scaled for chance.
ROW_GAIN_SHARE = 0.8
#: Where a factor explains this much, half as many elements as a pattern takes leave chance one in ten million.
WHOLE_SHARE = 0.99
ROW_GAIN_OVER_OTHERS = 8.0
ROW_GAIN_FLOOR = {name: 4 * floor for name, floor in GAIN_FLOOR.items()}

#: A factor or a constant is read off no fewer elements than these.
PATTERN_ELEMENTS = 16

#: A row or column standing out from the others: its relative L2 is this many times the typical one's, and so is its
#: difference against a typical row's norm (a row that is small itself proves nothing by its ratio). A gradient's row
#: may live off one token, and has that token's error.
STANDING_OUT, STANDING_OUT_GRADIENT = 6.0, 16.0
#: ... and no less than this many roundings of the dtype (its GAIN_FLOOR is one).
STANDING_OUT_FLOOR = 4.0
#: Rows or columns below which there is nothing typical, and the part of them that may stand out.
FEWEST_TYPICAL, MOST_STANDING_OUT = 16, 0.25

#: A column's own factor among noise: this many times the typical column's, in itself and by the norm it moves. Columns
#: off by MAYBE_SCALED times the typical one, and by the factor that counts, are looked at again, in these many rows.
COLUMN_GAIN = 8.0
MAYBE_SCALED, FEWEST_ROWS, MOST_ROWS = 1.2, 64, 256

#: Smallest normal numbers: what is smaller, a kernel may flush to zero. fp16 is not flushed: gradients live there.
VANISHING = {name: DTYPES[name].smallest_normal or 0.0 for name in ("float64", "float32", "bfloat16")}
#: fp32 gradients whose squares an optimizer cannot hold: beside zeros they are zeros.
VANISHING_GRADIENT = 1e-19

#: Rows of fewer numbers have no norm to speak of.
NARROW_ROW = 8
#: A row of a gradient with less than this of the typical norm is asked for its ratio where it is off this many times
#: what the typical row is, and those that carry weight. Harmless on a GPU, each row alone against another kernel, rows
#: of queries and keys: 4.7 times.
SLIGHT_ROW, SLIGHT_ROW_OFF = 0.1, 6.0
#: ... and one of less than the typical norm where it is off this many times what those are that carry weight: a row of
#: a third of it was off by two thirds of itself and 1.4 times that, of an embedding in bfloat16 by another kernel.
LIGHT_ROW_OFF = 2.0

#: A sum of squares this small has lost digits to underflow: doubles of less than 1e-145.
UNSUMMABLE = 1e-290
