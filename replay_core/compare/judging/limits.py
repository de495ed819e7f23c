"""How far two tensors may part before it is a bug: one table, the reason beside each number.

Every limit scales with the tensor (relative L2, per-row relative L2, outliers in units of its rms), so
a gradient of 1e-8 is judged like a hidden state of 1e2. Two columns: *local* where a module's recorded
inputs are bitwise equal, *end-to-end* where error may have accumulated before (compare.md section 5,
replay.md rules 2 and 3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from replay_core.dtypes import DTYPES


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Limits of one dtype and column. rel_l2 <= noise is CLOSE; up to bug CLOSE, suspect past `suspect`; then DIFF.

    worst_row: largest ||d_row|| / ||a_row|| of one token (one row).
    outlier: largest |d| in units of the tensor's rms.
    """

    noise: float
    suspect: float
    bug: float
    worst_row: float
    outlier: float


# Harmless bf16 noise reaches .29 rms, the weakest leak starts at 1.7 (replay.md rule 3).
_OUTLIER = 1.0

LOCAL: dict[str, Tolerance] = {
    # compare.md section 5; fp64 needs no worst row of its own: 1e3 x its bug column.
    "float64": Tolerance(1e-14, 1e-12, 1e-10, 1e-7, _OUTLIER),
    "float32": Tolerance(1e-6, 1e-5, 1e-4, 1e-4, _OUTLIER),
    "float16": Tolerance(1e-3, 4e-3, 1.5e-2, 1.5e-2, _OUTLIER),
    "bfloat16": Tolerance(5e-3, 8e-3, 1.5e-2, 0.1, _OUTLIER),
    # fp8: a quarter of the mantissa step of e4m3 (eps .125) and e5m2 (.25) is already rounding.
    "float8": Tolerance(5e-2, 0.1, 0.25, 0.5, 2.0),
}

#: One matrix product of equal inputs, in half precision: both sides round the same sum once. With every last bit
#: flipped that is 5.5e-3 in bf16; weights that went through int8 make it 6.4e-3 to 1e-2.
PROJECTION = {"float16": 7.5e-4, "bfloat16": 6e-3}
PROJECTIONS = ("_proj", "lm_head")

END_TO_END: dict[str, Tolerance] = {
    "float64": Tolerance(1e-12, 1e-10, 1e-8, 1e-6, _OUTLIER),
    # worst token of a right pack or pad: up to 9.2e-5; weakest leak .75 (replay.md, numbers)
    "float32": Tolerance(1e-5, 5e-5, 1e-4, 1e-3, _OUTLIER),
    # fp16 carries 3 bits more than bf16: an eighth of bf16's limits.
    "float16": Tolerance(2.5e-3, 6e-3, 1.5e-2, 3e-2, _OUTLIER),
    # harmless eager <-> sdpa is 7.5e-3 at the first attention and 2.3e-2 at the second layer
    "bfloat16": Tolerance(2e-2, 5e-2, 0.1, 0.25, _OUTLIER),
    "float8": Tolerance(0.1, 0.25, 0.5, 1.0, 2.0),
}

#: Gradients: noise of a right pack is 1.6e-6 fp32 and 1.3e-2 bf16 on the worst parameter, of eager <-> sdpa 1.7e-2
#: fp16 and up to 4.7e-2 bf16 (2 layers at init std .2, or a key bias, whose gradient is what cancellation leaves); the
#: weakest leak is .12. Eight layers at std .2 reach .1 in bf16, as a leak does: they are told apart by no limit.
GRADIENT: dict[str, Tolerance] = {
    "float64": Tolerance(1e-12, 1e-10, 1e-8, 1e-6, 2.0),
    "float32": Tolerance(1e-5, 5e-5, 2e-4, 2e-3, 2.0),
    "float16": Tolerance(2.5e-3, 6e-3, 3e-2, 0.1, 2.0),
    "bfloat16": Tolerance(2e-2, 2.5e-2, 6e-2, 0.5, 2.0),
    "float8": Tolerance(0.1, 0.25, 0.5, 1.0, 4.0),
}


#: Half precision: what noise there was on the way widens what follows from it, up to the caps. Noise is the largest
#: relative L2 of the micro-batch's activations that were CLOSE by this table, and the rms of its log probabilities'
#: differences; of suspect ones only what NOISE_GROWTH allows.
#: Eager <-> sdpa in bf16, 14 models of 2 to 8 layers, 64 to 256 wide: it stays below .022 at init std .02 and .06
#: (nothing is widened) and reaches .14 at .2, where attention is off by up to 1.5 times what came before it, one token
#: by 9, one element by 10, and gradients by 1 to 2.6 times the noise, a row of them by 13, an element by 25.
NOISE = {"end-to-end": Tolerance(0, 0, 2.0, 10.0, 12.0), "gradient": Tolerance(0, 0, 3.0, 15.0, 30.0)}
#: The caps: how many times a limit may be what it is without noise. A leak's worst token is off by .75 and more.
MOST_WIDENED = {"end-to-end": Tolerance(0, 0, 2.0, 2.4, 1.6), "gradient": Tolerance(0, 0, 5.0, 3.0, 1.6)}


#: What is suspect is noise, too, if it is no more than this many times what was noise before it. Harmless, it is up to
#: 1.4 times (the same models); a fault of 5 % and more after the noise of std .02 and .06 is 2.3 times and more.
NOISE_GROWTH = 2.0


def widened(table: Tolerance, column: str, noise: float) -> Tolerance:
    """The limits of a column after `noise`."""
    if column not in NOISE:
        return table
    times, most = NOISE[column], MOST_WIDENED[column]
    return replace(
        table,
        bug=max(table.bug, min(times.bug * noise, most.bug * table.bug)),
        worst_row=max(table.worst_row, min(times.worst_row * noise, most.worst_row * table.worst_row)),
        outlier=max(table.outlier, min(times.outlier * noise, most.outlier * table.outlier)),
    )


#: Parameters are stored, not computed by a forward: no error builds up in them. A last bit flipped everywhere is 5.5e-3
#: in bf16; weights that went through int8 are 6.5e-3 off, through fp8 3.3e-2, and an update of 1e-3 is 4.9e-2.
PARAM: dict[str, Tolerance] = {
    **END_TO_END,
    "float16": LOCAL["float16"],
    "bfloat16": Tolerance(2e-3, 6e-3, 1.5e-2, 0.1, _OUTLIER),
}


#: A stored number that is as it was, or was cast, is off by no more than two of its own roundings. An update (Adam
#: moves every element about as far) or a quantisation moves elements by more, and most of them alike: the greatest
#: |d| is 1 to 12 times the rms of d. What another kernel's gradients leave of an update is the full step at a few
#: elements: 15 to 135 times (weights stale by 1 to 20 steps at 1e-6 to 1e-3, through int8; two steps, eager and sdpa).
MOST_ROUNDINGS, MOST_CREST = 2.0, 12.5
#: One element of n has a crest of sqrt(n); and fp32 last bits, all of them, are a relative L2 of 1e-7.
FEWEST_UPDATED, LEAST_UPDATE = 1024, 2e-6


@dataclass(frozen=True, slots=True)
class LogprobTolerance:
    """Limits in nats (and mean exp|d|, unitless) for log probabilities: noise, suspect, bug."""

    max_abs: tuple[float, float, float]
    mean_exp_abs: tuple[float, float, float]
    k3: tuple[float, float, float]


#: NeMo-RL investigates past mean exp|d| 1.05; seed frameworks warn past .1 nats (compare.md section 5).
LOGPROB = LogprobTolerance((0.1, 0.5, 3.0), (1.01, 1.05, 1.2), (1e-3, 5e-3, 5e-2))

#: Both sides known to be computed in fp32: noise is at most 2.1e-4 nats, the weakest leak .10 on valid
#: tokens and 2.5e-3 on response tokens (replay.md, numbers).
LOGPROB_FP32 = LogprobTolerance((2.5e-4, 1e-3, 2.5e-3), (1.00025, 1.001, 1.0025), (1e-7, 1e-6, 1e-5))

#: A sample of log probabilities that stands out from the others: its rms difference, each token's in units of 1 - p
#: (what is nearly certain hardly moves), is this many times the typical other sample's. Measured on eager <-> sdpa, 64
#: models: up to 2.0; one token +.1, or one sample off by .03 to .1 nats among noise of .005 to .02: from 4.2.
SAMPLE_STANDING_OUT = 4.0
#: Or one of its tokens is off this many times the greatest difference of all other samples (replay.md, numbers).
TOKEN_STANDING_OUT = 8.0
#: Samples among which one can stand out, and the least nats by which it does: among noise (bf16 at init .06 reaches
#: .022), and among samples that are equal (one that alone was padded or packed otherwise has noise alone).
FEWEST_SAMPLES, LEAST_AMONG_NOISE, LEAST_AMONG_EQUAL = 4, 0.025, 0.1
#: 1 - p of tokens that are certain.
LEAST_DOUBT = 1e-3

#: Scalars the trainer reduced itself (losses, metrics): relative, the dtype they were computed in unknown.
SCALAR = Tolerance(1e-5, 1e-3, 1e-2, 1e-2, float("inf"))

#: A loss is a sum that cancels: below this absolute difference two of them agree (seed 003's own 1e-5, tightened).
SCALAR_FLOOR = 1e-6
#: ... or below this many standard errors of a mean over the tokens whose log probabilities it was made of, and this
#: much of itself (eager <-> sdpa in bf16: up to 2.9 errors, 1.1 % of a loss of .1 that advantages of both signs leave).
SCALAR_ERRORS, SCALAR_RELATIVE = 4.0, 0.1

#: Gain b = (1 + beta) a: a bug when it explains most of the difference and is larger than rounding can make it.
GAIN_SHARE = 0.5
GAIN_FLOOR = {"float64": 1e-9, "float32": 5e-5, "float16": 1e-3, "bfloat16": 4e-3, "float8": 3e-2}

#: A gradient that lives off few tokens is off by one factor, too (1.5 % and 85 % of the difference, a trained model,
#: bf16): the factor explains this much, or is larger than so many roundings and so many times the noise before it.
GRADIENT_GAIN_SHARE, GRADIENT_GAIN_ROUNDINGS, GRADIENT_GAIN_NOISE = 0.95, 4.0, 1.5

#: One row's own factor: rounding inside a norm scales a row by up to u, over the layers by a few u. A gradient's row
#: that lives off one token takes over that token's rounding as a factor, up to twice the error of a typical row; so
#: either rows are off by more than this many times the typical one, or too many are scaled for chance.
ROW_GAIN_SHARE = 0.8
#: Where a factor explains this much, half as many elements as a pattern takes leave chance one in ten million.
WHOLE_SHARE = 0.99
ROW_GAIN_OVER_TYPICAL = 3.0
ROW_GAIN_FLOOR = {name: 4 * floor for name, floor in GAIN_FLOOR.items()}

#: A factor or a constant is read off no fewer elements than these.
PATTERN_ELEMENTS = 16

#: A row or column standing out from the others: its relative L2 is this many times the typical one's, and so is its
#: difference against a typical row's norm (a row that is small itself proves nothing by its ratio). Measured on
#: harmless eager <-> sdpa and padded <-> alone, bf16, 6 and 16 layers: up to 2.2 (4.8 where noise passes 13 %). A row
#: off by 5 % among bf16 noise is 10 to 30.
STANDING_OUT = 6.0
#: A gradient's row may live off one token, and has that token's error: 13 times the typical row's (54 bf16 models).
STANDING_OUT_GRADIENT = 16.0
#: ... and no less than this many roundings of the dtype (its GAIN_FLOOR is one).
STANDING_OUT_FLOOR = 4.0
#: Rows or columns below which there is nothing typical, and the part of them that may stand out.
FEWEST_TYPICAL, MOST_STANDING_OUT = 16, 0.25

#: A column's own factor among noise: this many times the typical column's, in itself and by the norm it moves. Columns
#: off by MAYBE_SCALED times the typical one, and by the factor that counts, are looked at again, in these many rows.
COLUMN_GAIN = 8.0
MAYBE_SCALED, FEWEST_ROWS, MOST_ROWS = 1.2, 64, 256

#: fp32 gradients whose squares an optimizer cannot hold: beside zeros they are zeros.
VANISHING_GRADIENT = 1e-19

#: Rows of fewer numbers have no norm to speak of.
NARROW_ROW = 8

#: Smallest normal numbers: what is smaller, a kernel may flush to zero. fp16 is not flushed: gradients live there.
VANISHING = {name: DTYPES[name].smallest_normal or 0.0 for name in ("float64", "float32", "bfloat16")}

#: A sum of squares this small has lost digits to underflow: doubles of less than 1e-145.
UNSUMMABLE = 1e-290

#: A sample of fewer tokens says too little of its own for a mean.
SAMPLE_TOKENS = 8
