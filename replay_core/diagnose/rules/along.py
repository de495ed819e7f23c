"""How advantages run along a response where no critic makes them: one number for all of its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from replay_core.diagnose.algorithm import OF_GROUPS
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.finding import Finding, finding, share, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import Skip, given, rule
from replay_core.diagnose.rules.masks import padding_trained
from replay_core.diagnose.trajectories import trajectory_B

if TYPE_CHECKING:
    from replay_core.documents.diagnosis import Severity

#: Responses that tell, and how close (relative) two numbers are one.
FEWEST, CLOSE = 4, 1e-3
#: A factor from token to token that is more than rounding, and less than a cut.
FADES = (0.05, 0.995)


@rule("D78", "advantages change along the response", link="advantages", scope="batch",
      needs=("advantages", "mask"), explains=("D04", "D28", "L08"), lasts=True,
      source="GRPO, RLOO and REINFORCE++ give every token of a response its one advantage")  # fmt: skip
def along_the_response(batch: StepBatch) -> Finding | None:
    """Where no values are recorded, the advantages of each response from its first counted token on, over responses
    that have one there and three counted tokens and more (4 of them and more): an error where all but the first token's
    are 0, or all but the last's; a warning where they are 0 behind the first turn (a gap in the mask) and one number
    before it, or fall from token to token by one factor that is the same in every response; or rise so, where an
    estimator of groups is stated and no such discount; and where four of five that have an advantage have
    one number up to some token and 0 from there to the end.
    An error, too, where each place has one number in all responses, and rewards differ: another axis. A warning where
    the first token, or the last one, of every response that has an advantage has 0, and all others one number: shifted.

    An error where in 4 rows and more the one advantage stands on tokens of the response that do not count, and counted
    tokens have 0: another row's mask (that of the trajectory's last turn, where ids tell it).

    Before these, two records of a step's advantages, matched by their tokens: an error where a quarter of the samples,
    4 and more, have another number in one than in the other, and it is another sample's (19 of 20, of 3 and more).
    """
    if batch.columns.of("values") is not None or batch.laid.algorithm.estimator == "gae":
        raise Skip("a critic's advantages differ from token to token (D44)")
    column, counted_N = given(batch.columns.of("advantages")), given(batch.trained_N)
    if (moved := _of_other_rows(batch, counted_N)) is not None:
        return moved
    counted_N = counted_N & column.said_N
    if batch.advantage_B is not None or not np.isfinite(column.values_N[counted_N]).all():
        return None
    if (elsewhere := _at_other_places(batch, column.values_N, column.said_N, given(batch.trained_N))) is not None:
        return elsewhere
    rows, turns = [], []
    for span in batch.flat.spans:
        at = span.start + np.flatnonzero(counted_N[span])
        if at.size >= 3:
            rows.append(column.values_N[at])
            turns.append(np.cumsum(np.diff(at, prepend=at[0]) > 1))
    told = (
        _told(rows, turns)
        or _ends_elsewhere(batch, column.values_N, counted_N)
        or _by_place(batch, column.values_N, counted_N)
        or _grows(batch, rows)
        # Where padding counts (D18) it has no advantage, as it should.
        or (None if padding_trained(batch) else _stops_early(rows))
    )
    if told is None:
        raise Skip("advantages change along responses in no way that is known: rewards by turn or by token")
    severity, claim, cause, many = told
    return finding(
        severity,
        claim,
        batch.laid.where("advantages", sample=0),
        shown("responses that are made so", share(many, many), None, column.source),
        shown("advantages of one of them", " ".join(f"{value:.4g}" for value in _largest(rows)[:8])),
        cause=cause,
    )


def _at_other_places(batch: StepBatch, a_N: Array, said_N: Array, counted_N: Array) -> Finding | None:
    """Rows whose one advantage stands on tokens that do not count, while counted tokens of theirs have 0: it was
    written through another row's mask; of its trajectory's last row, where that is known and fits.
    """
    # A mask that is a part of the response hides nothing of it: what lies in the prompt or the padding is no token.
    has_N = said_N & (np.nan_to_num(a_N) != 0)
    inside_N = batch.response_N if batch.response_N is not None else np.ones(a_N.size, dtype=bool)
    misses_B = batch.flat.count(counted_N & ~has_N)
    beyond_B = batch.flat.count(has_N & ~counted_N & inside_N)
    low_B, high_B = batch.flat.extremes(np.nan_to_num(a_N), has_N)
    one_B = np.nan_to_num(high_B - low_B, nan=np.inf) <= CLOSE * np.maximum(np.abs(np.nan_to_num(high_B)), 1e-12)
    off_B = one_B & (misses_B > 0) & (beyond_B > 0)
    heard_B = (batch.flat.count(has_N) > 0) & (batch.flat.count(counted_N) > 0)
    if off_B.sum() < FEWEST or not one_B[heard_B].all():
        return None
    first = int(off_B.argmax())
    lost = int((counted_N & ~has_N & np.repeat(off_B, batch.flat.lengths_B)).sum())
    counted = int((counted_N & np.repeat(off_B, batch.flat.lengths_B)).sum())
    whose = _mask_of_the_last_row(batch, has_N, counted_N, off_B)
    return finding(
        "error",
        f"advantages stand at {'the places of the last turn' if whose else 'other places than the mask'}: in "
        f"{share(int(off_B.sum()), int(heard_B.sum()))} rows they lie on tokens that do not count, and "
        f"{lost / counted:.0%} of the tokens that do have 0",
        batch.laid.where("advantages", sample=first),
        shown("counted tokens of such rows without an advantage", share(lost, counted), "none"),
        shown("tokens of theirs that have one and do not count", int(beyond_B[off_B].sum()), "0"),
        *([shown("rows whose advantage stands where the last row of their trajectory counts", whose)] if whose else []),
        cause="the last turn's advantages, masked already, are copied to the rows of the turns before it, whose masks "
        "are others: copy the one number, and multiply it by each row's own mask"
        if whose
        else "the one number of a response is spread through another row's mask (the last turn's, another order of "
        "rows), or the mask was made anew after it",
    )


def _mask_of_the_last_row(batch: StepBatch, has_N: Array, counted_N: Array, off_B: Array) -> str:
    """How many of these rows have their advantage where the last row of their trajectory counts; empty where few do."""
    each_B, inside_N = trajectory_B(batch), batch.response_N
    if each_B is None or inside_N is None:
        return ""
    heads_B = batch.flat.first(inside_N)

    def places(row: int, marked_N: Array) -> set[int]:
        span = batch.flat.spans[row]
        at: set[int] = set((np.flatnonzero(marked_N[span]) - heads_B[row]).tolist())
        return at

    rows = np.flatnonzero(off_B).tolist()
    fits = 0
    for row in rows:
        last = int(np.flatnonzero(each_B == each_B[row])[-1])
        size = int(batch.flat.lengths_B[row] - heads_B[row])
        fits += places(row, has_N) == {at for at in places(last, counted_N) if at < size}
    return share(fits, len(rows)) if fits >= OTHERS * len(rows) else ""


#: Of the samples, those whose advantages in the loss are another's; the share that is; and the numbers that tell.
MOVED, OTHERS, NUMBERS = 0.25, 0.95, 3


def _of_other_rows(batch: StepBatch, counted_N: Array) -> Finding | None:
    """Advantages of the micro-batches that are those of other samples in the step's own record."""
    columns = list(batch.columns.every("advantages"))
    used = next((one for one in columns if one.source.partition(" of ")[2].count("micro")), None)
    made = next((one for one in columns if one is not used), None)
    if used is None or made is None or batch.tokens_N is None:
        return None
    known_N = counted_N & used.said_N & made.said_N
    ours_B, theirs_B = (_largest_of(batch, one.values_N, known_N) for one in (used, made))
    # Equal answers are matched to each other in whatever order they come.
    by_tokens: dict[bytes, set[float]] = {}
    keys = [batch.tokens_N[span].tobytes() for span in batch.flat.spans]
    for key, value in zip(keys, theirs_B, strict=True):
        by_tokens.setdefault(key, set()).add(round(float(value), 5))
    sure_B = np.array([len(by_tokens[key]) == 1 for key in keys]) & (batch.flat.count(known_N) > 0)
    size = float(np.abs(theirs_B).max(initial=0.0))
    moved_B = sure_B & (np.abs(ours_B - theirs_B) > CLOSE * size) & (ours_B != 0)
    if moved_B.sum() < max(FEWEST, MOVED * sure_B.sum()) or np.allclose(ours_B[moved_B], -theirs_B[moved_B]):
        return None
    values = np.unique(theirs_B)
    near = np.abs(ours_B[moved_B][:, None] - values).min(axis=1) <= 1e-5 * max(size, 1.0)
    if near.mean() < OTHERS or np.unique(np.round(ours_B[moved_B], 4)).size < NUMBERS:
        return None
    first = int(moved_B.argmax())
    return finding(
        "error",
        f"advantages in the loss are other samples': {int(moved_B.sum())} of {int(sure_B.sum())} rows have not those "
        "that the step made for the same tokens, but another row's",
        batch.laid.where("advantages", sample=first),
        shown("rows with another's advantage", int(moved_B.sum()), "0", used.source),
        shown(f"advantage of sample {first} in the loss", float(ours_B[first]), f"{theirs_B[first]:.4g}", made.source),
        cause="tokens were put in another order (shuffled into mini-batches, sorted by length) and the advantages were "
        "not, or by another permutation: each response is trained by what another one earned",
    )


def _largest_of(batch: StepBatch, values_N: Array, known_N: Array) -> Array:
    """Of each sample [B] its largest advantage by size, 0 where it has none."""
    low_B, high_B = (np.nan_to_num(each) for each in batch.flat.extremes(values_N, known_N))
    found: Array = np.where(np.abs(low_B) > np.abs(high_B), low_B, high_B)
    return found


def _by_place(batch: StepBatch, a_N: Array, counted_N: Array) -> tuple[Severity, str, str, int] | None:
    """One vector along the tokens in all responses, whatever their rewards."""
    inside_N = batch.response_N if batch.response_N is not None else counted_N
    place_N = batch.flat.position_N - np.repeat(batch.flat.first(inside_N), batch.flat.lengths_B)
    reward_B = batch.reward_B
    if reward_B is not None and not np.ptp(reward_B) > 0:
        return None
    place, values = place_N[counted_N], a_N[counted_N]
    low, high = np.full(int(place.max()) + 1, np.inf), np.full(int(place.max()) + 1, -np.inf)
    np.minimum.at(low, place, values)
    np.maximum.at(high, place, values)
    shared = np.bincount(place, minlength=len(low)) >= FEWEST
    size = float(np.abs(values).max())
    if shared.sum() < 3 or not size > 0 or ((high - low)[shared] > 1e-5 * size).any():
        return None
    if np.unique(np.round(low[shared] / size, 4)).size < 3:
        return None
    return (
        "error",
        "advantages are broadcast along the wrong axis: every response has the same vector of them, one number for "
        "each place",
        "a vector of one number per sample is spread along the tokens (transposed, unsqueeze(0) for unsqueeze(1)): "
        "each token has another sample's advantage, and none its own",
        int((batch.flat.count(counted_N) > 0).sum()),
    )


def _ends_elsewhere(batch: StepBatch, a_N: Array, counted_N: Array) -> tuple[Severity, str, str, int] | None:
    """Responses whose advantage is one number and then 0 up to the end: where those of a row some rows away end."""
    counts_B = batch.flat.count(counted_N)
    ends_B, early = counts_B.copy(), 0
    for sample, span in enumerate(batch.flat.spans):
        row = a_N[span][counted_N[span]]
        inside = np.flatnonzero(row)
        if not len(inside):
            ends_B[sample] = -1
            continue
        head = row[: inside[-1] + 1]
        if np.ptp(head) > CLOSE * max(float(np.abs(head).max()), 1e-12):
            return None
        ends_B[sample] = len(head)
        early += len(head) < len(row)
    heard_B = ends_B >= 0
    if early < FEWEST:
        return None
    group = 1 if batch.group_B is None else max(len(batch) // (int(batch.group_B.max()) + 1), 1)
    for order in batch.laid.orders:
        counts, ends, heard = counts_B[order], ends_B[order], heard_B[order]
        for by in (1, -1, group, -group):
            if (ends == np.minimum(counts, np.roll(counts, by)))[heard].all():
                away = f"{abs(by)} row{'s' * (abs(by) > 1)} {'before' if by > 0 else 'after'}"
                return (
                    "error",
                    f"advantages belong to other samples: each ends where the response {away} it ends, and is 0 from "
                    "there on",
                    "rows of the advantages were moved (rolled, shuffled, sorted) against those of the tokens",
                    early,
                )
    return None


def _grows(batch: StepBatch, rows: list[Array]) -> tuple[Severity, str, str, int] | None:
    """A reward that is discounted back from the last token."""
    factors = [row[1:] / row[:-1] for row in rows if row.all()]
    if len(factors) < FEWEST:
        return None
    every = np.concatenate(factors)
    factor = float(np.median(every))
    if not factor > 0 or not FADES[0] < 1 / factor < FADES[1] or np.abs(every - factor).max() > CLOSE * factor:
        return None
    algorithm = batch.laid.algorithm
    stated = algorithm.number("gamma", "discount", "discount_factor")
    if algorithm.estimator not in OF_GROUPS or (stated is not None and abs(stated * factor - 1) <= CLOSE):
        return None
    return (
        "warning",
        f"advantages grow along the response: each is {factor:.4g} times that of the token before it, a discount of "
        f"{1 / factor:.4g} from the end",
        "the reward is discounted back from the last token: of a long response the first tokens hardly learn; an "
        "estimator of groups gives one advantage to all of them (a discount of 1)",
        len(factors),
    )


#: Of the responses with an advantage, the share that ends early before it is how they are made.
STOPS = 0.8


def _stops_early(rows: list[Array]) -> tuple[Severity, str, str, int] | None:
    """Responses whose advantage is one number, and 0 from some token on that counts as well."""
    heard = [row for row in rows if row[0] != 0]
    heads = [row[: int(np.flatnonzero(row)[-1]) + 1] for row in heard]
    if any(np.ptp(head) > CLOSE * abs(head[0]) for head in heads):
        return None
    early = [len(head) / len(row) for head, row in zip(heads, heard, strict=True) if len(head) < len(row)]
    if len(early) < FEWEST or len(early) < STOPS * len(heard):
        return None
    return (
        "warning",
        f"advantages end before the response does: they are one number on its first tokens ({np.median(early):.0%} of "
        "it, median) and 0 on the rest, which counts in the mask",
        "they are spread over another mask or another length than the one that is recorded (cut at a limit, divided by "
        "ranks or slices): the ends of responses learn nothing",
        len(early),
    )


def _told(rows: list[Array], turns: list[Array]) -> tuple[Severity, str, str, int] | None:
    """Severity, claim, cause, and the responses that it holds for: all of those that have an advantage."""
    led = [row for row in rows if row[0] != 0]
    if len(led) >= FEWEST and all(not row[1:].any() for row in led):
        return (
            "error",
            "only the first token of each response has an advantage: those after it are 0",
            "one number per response is written to its first slot, and not spread over the response's tokens",
            len(led),
        )
    ended = [row for row in rows if row.any()]
    if len(ended) >= FEWEST and all(row[-1] != 0 and not row[:-1].any() for row in ended):
        return (
            "error",
            "only the last token of each response has an advantage: those before it are 0",
            "the reward's place at the end is taken for the advantage, and nothing is carried back to the tokens "
            "before it",
            len(ended),
        )
    for late, at, rest in (("late", 0, slice(1, None)), ("early", -1, slice(None, -1))):
        if len(ended) >= FEWEST and all(
            row[at] == 0 and row[rest].all() and np.ptp(row[rest]) <= CLOSE * abs(row[rest][0]) for row in ended
        ):
            return (
                "warning",
                f"advantages stand one token {late} against the mask: the {'first' if late == 'late' else 'last'} "
                "token of each response has none, all others have one number",
                "the loss takes mask[:, :-1] where log-probabilities are of the next tokens (mask[:, 1:]), or the "
                "other way round; or advantages were spread over another mask than the one that is recorded",
                len(ended),
            )
    several = [(row, turn) for row, turn in zip(rows, turns, strict=True) if row[0] != 0 and turn[-1] > 0]
    if len(several) >= FEWEST and all(
        not row[turn > 0].any() and np.ptp(row[turn == 0]) <= CLOSE * abs(row[0]) for row, turn in several
    ):
        return (
            "warning",
            "advantages are 0 behind the first turn: what is sampled after the first tool output learns nothing",
            "the number is spread up to the first gap in the mask (an observation), and not over the response",
            len(several),
        )
    factors = [row[1:] / row[:-1] for row in led if (row[:-1] != 0).all()]
    if len(factors) >= FEWEST:
        every = np.concatenate(factors)
        factor = float(np.median(every))
        if FADES[0] < factor < FADES[1] and np.abs(every - factor).max() <= CLOSE:
            return (
                "warning",
                f"advantages fade along the response: each is {factor:.4g} times that of the token before it",
                "a discount counts from the first token on: it belongs before the reward, whose last tokens would "
                "weigh most, and recipes for language models have none",
                len(factors),
            )
    return None


def _largest(rows: list[Array]) -> Array:
    return max(rows, key=lambda row: float(np.abs(row).max()))
