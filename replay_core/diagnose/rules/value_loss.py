"""The critic's loss, recomputed: its denominator, its clip range, its sign and its size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from msgspec import Struct

from replay_core import pages
from replay_core.diagnose.algorithm import stated_number
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, error, share, shown
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.diagnose.signals import RunLog
from replay_core.records import Record, TensorRef


@rule("D62", "the critic's loss is averaged over padding", link="reduction", scope="case",
      explains=("D45",), lasts=True,
      source="the critic's loss of verl, OpenRLHF, AReaL and ROLL is a mean over the tokens of the mask")  # fmt: skip
def value_loss_made(case: Case) -> Finding | None:
    """The logged loss of a critic's micro-batch beside means of (V - R)^2 of its values and returns: over the tokens of
    the mask, response by response, halved or not. Clipping only makes a loss larger. An error where every loss of 4
    micro-batches and more is below all of these (by 2 %) and none is below the sum divided by every slot of the rows.
    Not where one factor makes a mean of a third of them, as a coefficient does, or micro-batches that share it: each by
    as much, by its part of the rows (a budget of tokens makes them differ), or by its part of the tokens.

    An error, too, where the losses of 3 micro-batches and more are, to 1e-3, the sum over every slot of the recorded
    rows, padding and all, over one whole number of slots for each row, and no mean over the tokens of the mask.
    """
    if (counted := _padding_counted(case)) is not None:
        return counted
    every = [one for record in case.records() if (one := _valued(record)) is not None]
    every = every or [one for batch in case.batches() for one in _of_batch(batch)]
    skip_if(len(every) < 4, "needs values, returns, mask and loss of a critic's micro-batches")
    below = [one for one in every if one.logged < 0.98 * one.least]
    if len(below) < 0.9 * len(every) or sum(one.logged >= 0.999 * one.floor for one in below) < len(below):
        return None
    if any(_is_shared(every, which) for which in range(len(every[0].means))) or _is_of_all_tokens(every):
        return None
    looked = len(every)
    worst = min(below, key=lambda one: one.logged / one.least)
    logged, least, floor, record = worst.logged, worst.least, worst.floor, worst.record
    return error(
        "the critic's loss is averaged over padding too: it is smaller than the mean over the tokens that count",
        Where(step=record.key.step, micro=record.key.micro, role=record.key.role, stage=record.key.stage,
              tensor="loss", path=str(record.path)),
        shown("logged", logged, f">= {least:.6g}", record.path.name),
        shown("half the mean over tokens that count", least),
        shown("half the sum over every slot", floor),
        shown("micro-batches below it", share(len(below), looked)),
        cause="the mean is taken over every column of the padded rows (no mask): padding, whose error is small, "
        "dilutes the loss",
        steps=sorted({one.record.key.step for one in below if one.record.key.step is not None}),
    )  # fmt: skip


#: Relative agreement of a recomputed loss; micro-batches that tell.
NEAR, SEVERAL = 1e-3, 3


class _StoredLoss(Struct, frozen=True):
    """A critic's micro-batch as it is stored: the loss, and of the squared errors without and with clipping the sums
    over every slot, those over the slots that count, and the means over tokens and response by response.
    """

    loss: float
    sums: tuple[float, ...]
    inside: tuple[float, ...]
    means: tuple[float, ...]
    rows: int
    width: int
    longest: int
    tokens: int
    where: Where
    step: int | None

    @property
    def is_mean(self) -> bool:
        """Whether a mean over the tokens that count makes the loss."""
        return any(abs(half * mean - self.loss) <= NEAR * abs(self.loss) for mean in self.means for half in (0.5, 1.0))

    @property
    def is_padded(self) -> bool:
        return self.tokens < 0.95 * self.rows * self.width


def _rows_made(loss: float, squares: Sequence[Array], kept_BW: Array, where: Where, step: int | None) -> _StoredLoss:
    """Of squared errors [B, W] and the slots that count: sums alone are kept, as a run has many micro-batches."""
    tokens_B = kept_BW.sum(1)
    inside = [(each * kept_BW).sum(1) for each in squares]
    means = [
        mean for one_B in inside
        for mean in (float(one_B.sum()) / max(float(tokens_B.sum()), 1.0),
                     float((one_B / np.maximum(tokens_B, 1)).mean()))
    ]  # fmt: skip
    rows, width = kept_BW.shape
    sums = tuple(float(each.sum()) for each in squares), tuple(float(one_B.sum()) for one_B in inside)
    return _StoredLoss(
        loss, *sums, tuple(means), rows, width, int(tokens_B.max()), int(tokens_B.sum()), where, step
    )  # fmt: skip


def _padding_counted(case: Case) -> Finding | None:
    """Losses of a critic that hold the errors of padding."""
    found = [one for batch in case.batches() for one in _stored(batch) if abs(one.loss) > 1e-6]
    padded = [one for one in found if one.is_padded]
    if len(padded) < SEVERAL or 3 * sum(one.is_mean for one in padded) > len(padded):
        return None
    longest, widest = max(one.longest for one in padded), max(one.width for one in padded)
    for half in (0.5, 1.0):
        for which in range(min(len(one.sums) for one in padded)):
            each = [half * one.sums[which] / one.loss / one.rows for one in padded]
            width = round(float(np.median(each)))
            fits = [one for one, slots in zip(padded, each, strict=True) if abs(slots - width) <= NEAR * max(width, 1)]
            if not longest <= width <= widest or 3 * len(fits) < 2 * len(each) or len(fits) < SEVERAL:
                continue
            worst = max(fits, key=lambda one: one.sums[which] - one.inside[which])
            whole, inside = worst.sums[which], worst.inside[which]
            if inside >= (1 - NEAR) * whole:
                continue  # padding holds no error: how the sum is divided is all that may be wrong
            return error(
                "the critic's loss counts padding: it is the mean over all slots of the padded responses "
                f"({worst.rows} x {width}), and not over the {worst.tokens} tokens of the mask",
                worst.where,
                shown("logged", worst.loss, f"{half * inside / max(worst.tokens, 1):.6g}, over the tokens that count"),
                shown("sum of squared errors in padding", whole - inside, "0"),
                shown("sum over the tokens that count", inside),
                shown("micro-batches it makes", share(len(fits), len(padded))),
                cause="the mask is not multiplied into the critic's loss, and the mean is taken over every column: the "
                "critic is taught to say 0 in padding, as if it were a return",
                steps=[one.step for one in fits],
            )
    return None


def _stored(batch: StepBatch) -> Iterator[_StoredLoss]:
    """A critic's micro-batches as stored rows; nothing where they or the batch's returns and mask are no rows."""
    stored = {name: _rows_of(batch, name) for name in ("returns", "values", "response_mask")}
    due_B, old_B, mask_B = stored["returns"], stored["values"], stored["response_mask"] or _rows_of(batch, "loss_mask")
    if due_B is None or mask_B is None:
        return
    rows = batch.laid.rows_by_micro()
    for record in batch.columns.every_record:
        if record.key.role != "critic" or record.key.stage != "loss" or record.key.micro is None:
            continue
        samples, found = rows.get((record.key.rank, record.key.micro)), _of_micro(record)
        if samples is None or found is None or not math.isfinite(found[0]):
            continue
        loss, values, _ = found
        if len(values.shape) != 2 or values.shape[0] != len(samples):
            continue
        new_BW = pages.array(values).astype(np.float64)
        width = new_BW.shape[1]
        every = [_stacked(each, samples, width) for each in (due_B, mask_B, old_B)]
        due_BW, mask_BW, old_BW = every
        if due_BW is None or mask_BW is None or not np.isfinite(new_BW).all() or not np.isfinite(due_BW).all():
            continue
        squares = [(new_BW - due_BW) ** 2]
        clip = stated_number(batch.laid.stated, *_VALUE_CLIPS)
        if old_BW is not None:
            for c in [clip] if clip else [0.2, 0.5]:
                cut_BW = old_BW + np.clip(new_BW - old_BW, -c, c)
                squares.append(np.maximum(squares[0], (cut_BW - due_BW) ** 2))
        yield _rows_made(loss, squares, mask_BW != 0, Where.of(record, values.name), record.key.step)


def _rows_of(batch: StepBatch, name: str) -> list[Array] | None:
    """The stored row of each sample of the batch, padding and all; None where no file has one for each."""
    for sheet, places in batch.columns.sheets:
        refs = sheet.refs(name)
        if not refs or None in places or any(ref.rows is not None or len(ref.shape) != 2 for ref in refs):
            continue
        arrays = [pages.array(ref).astype(np.float64) for ref in refs]
        at = [sheet.index[place] for place in places if place is not None]
        if all(row < len(arrays[part]) for part, row in at):
            return [arrays[part][row] for part, row in at]
    return None


def _stacked(rows_B: list[Array] | None, samples: list[int], width: int) -> Array | None:
    """These samples' rows, as wide as is asked: beside what is said of the next token, the first one is left out."""
    if rows_B is None:
        return None
    each = [rows_B[sample] for sample in samples]
    if all(len(row) == width + 1 for row in each):
        each = [row[1:] for row in each]
    return np.stack(each) if all(len(row) == width for row in each) else None


#: Ranges that values are clipped at, beside the stated one: none, what recipes have, and 0.
_VALUE_RANGES = (math.inf, 0.2, 0.5, 0.0)
_VALUE_CLIPS = ("cliprange_value", "vf_clip", "value_clip", "value_clip_range", "vf_clip_param", "clip_range_vf",
                "eps_clip_value", "cliprange_vf", "vclip")  # fmt: skip


@rule("D91", "the critic's loss is clipped at another range than stated", link="loss", scope="case", lasts=True,
      explains=("D45", "D71"),
      source="verl cliprange_value: values move by that much in a batch's updates, at most")  # fmt: skip
def clipped_elsewhere(case: Case) -> Finding | None:
    """The logged loss of a critic's micro-batches, made of its new values, the values recorded before the updates and
    the returns: max((V - R)^2, (clip(V, old +- c) - R)^2), halved, a mean over the tokens of the mask. An error where
    the run states a range, no loss that tells is made with it, and all are made with another: none, .2, .5, or 0; or
    with values held between -c and c, or with the smaller of the two errors.
    """
    stated = stated_number(case.run.facts, *_VALUE_CLIPS) or stated_number(case.run.flags or {}, *_VALUE_CLIPS)
    if stated is None or not stated > 0:
        raise Skip("the run states no range that values are clipped at")
    ranges = (stated, *(each for each in _VALUE_RANGES if each != stated))
    made = dict.fromkeys(ranges, 0)
    told, where = 0, None
    every = [(batch, one) for batch in case.batches() for one in value_rows(batch)]
    if (otherwise := _clipped_otherwise(every, stated)) is not None:
        return otherwise
    for batch, one in every:
        cut = {c: one.old + np.clip(one.new - one.old, -c, c) for c in ranges}
        each = {c: float(np.maximum((one.new - one.due) ** 2, (cut[c] - one.due) ** 2).mean()) for c in ranges}
        for half in (0.5, 1.0):
            near = 1e-3 * abs(one.loss) + 1e-6
            fits = [c for c, value in each.items() if abs(half * value - one.loss) <= near]
            if fits and len(fits) < len({round(value, 9) for value in each.values()}) + len(fits) - 1:
                told += 1
                for c in fits:
                    made[c] += 1
                where = where or batch.laid.where("values", sample=0)
                break
    skip_if(told < 3, "needs losses of 3 micro-batches of a critic that tell one range from another, and their values")
    found = max((c for c in ranges if c != stated), key=lambda c: made[c])
    if made[stated] or made[found] < told:
        return None
    how = "not clipped" if math.isinf(found) else f"clipped at {found:g}"
    return error(
        f"the critic's loss is {how}, and the run states a value clip range of {stated:g}"
        + (": values are held where they are" if found == 0 else ""),
        where,
        shown("micro-batches whose loss it makes", made[found]),
        shown("of these, those that the stated range makes", made[stated], str(told)),
        cause="the range that is configured does not reach the loss: another setting or a default stands in its place",
    )


def _clipped_otherwise(every: list[tuple[StepBatch, ValueRows]], c: float) -> Finding | None:
    """Losses of the stated range, clipped the wrong way, in all micro-batches that tell."""

    def errors(one: ValueRows) -> tuple[Array, Array, Array]:
        around, between = one.old + np.clip(one.new - one.old, -c, c), np.clip(one.new, -c, c)
        squares: tuple[Array, Array, Array] = (
            (one.new - one.due) ** 2, (around - one.due) ** 2, (between - one.due) ** 2
        )  # fmt: skip
        return squares

    told = {"least": 0, "between": 0}
    looked, where = 0, None
    for batch, one in every:
        plain, around, between = errors(one)
        losses = {
            "right": float(np.maximum(plain, around).mean()), "plain": float(plain.mean()),
            "least": float(np.minimum(plain, around).mean()), "between": float(np.maximum(plain, between).mean()),
        }  # fmt: skip
        for half in (0.5, 1.0):
            near = 1e-4 * abs(one.loss) + 1e-7
            fits = {what for what, value in losses.items() if abs(half * value - one.loss) <= near}
            if fits & {"right", "plain"}:
                looked += len(fits) == 1
                break
            if fits:
                looked, where = looked + 1, where or batch.laid.where("values", sample=0)
                for what in fits:
                    told[what] += 1
                break
    what = max(told, key=lambda each: told[each])
    if told[what] < 3 or told[what] < looked:
        return None
    how, cause = {
        "least": ("takes the smaller of the clipped and the unclipped error, and not the larger",
                  "min stands for max: a value that has moved out of its range has the clipped error alone where that "
                  "is smaller, and is taught nothing where it should come back"),
        "between": (f"holds values between {-c:g} and {c:g}, and not within {c:g} of the old ones",
                    "the values themselves are clamped, where their change is meant"),
    }[what]  # fmt: skip
    return error(
        f"the critic's loss {how}",
        where,
        shown("micro-batches whose loss it makes", told[what], None, f"of {looked} that tell"),
        shown("value clip range that is stated", c),
        cause=cause,
    )


class ValueRows(Struct, frozen=True):
    """A critic's micro-batch, over its tokens that count [K]: the loss it logged, the values it gave, those recorded
    before the updates, the returns, and the sample of each.
    """

    loss: float
    new: Array
    old: Array
    due: Array
    sample: Array
    epoch: int | None
    minibatch: int | None
    slots: int
    """Of its rows as they are stored, padding and prompts included; 0 where they are packed."""
    record: Record
    may_be_later: bool = False
    """Whether nothing says that no update of the batch lies before it: it has no number of an epoch or a mini-batch,
    and is not the first."""


def value_rows(batch: StepBatch) -> Iterator[ValueRows]:
    """A critic's micro-batches whose samples the batch holds."""
    if batch.tokens_N is None or batch.trained_N is None:
        return
    old, returns = batch.columns.of("values"), batch.columns.of("returns")
    if old is None or returns is None:
        return
    learnt = {
        (record.key.rank, record.key.micro): record for record in batch.columns.every_record
        if record.key.role == "critic" and record.key.stage == "loss" and record.key.micro is not None
    }  # fmt: skip
    shared = {one.place: one.value for one in batch.columns.scalars("value_loss", "vf_loss", "critic_loss")}
    for sheet, places in batch.columns.sheets:
        sample_of = {sheet.index[place]: sample for sample, place in enumerate(places) if place is not None}
        micros = [micro for part in sheet.parts if (micro := part.held.record.key.micro) is not None]
        for number, part in enumerate(sheet.parts):
            key = part.held.record.key
            record = learnt.pop((key.rank, key.micro), None) if key.micro is not None else None
            found = None if record is None else _of_micro(record)
            if record is None and key.micro is not None and key.role != "critic":
                record, found = part.held.record, _beside_policy(part.held.fields(), shared.get((key.rank, key.micro)))
            if found is None or record is None:
                continue
            loss, values, targets = found
            new, due = part.values(values), None if targets is None else part.values(targets)
            samples = [sample_of.get((number, row)) for row in range(len(part))]
            if new is None or (due is None and targets is not None) or None in samples:
                continue
            slots = values.numel if len(values.shape) == 2 else 0
            each: list[Array] = []
            for row, sample in enumerate(samples):
                here = slice(int(part.starts[row]), int(part.starts[row] + part.lengths[row]))
                there = slice(int(batch.flat.starts_B[sample]), int(batch.flat.starts_B[sample] + part.lengths[row]))
                kept = batch.trained_N[there]
                # Returns that an update is not given are those of the batch.
                due_T = returns.values_N[there] if due is None else due.values_N[here]
                here_K = [new.values_N[here][kept], old.values_N[there][kept], due_T[kept]]
                each.append(np.stack([*here_K, np.full(int(kept.sum()), float(row))]))
            rows = np.concatenate(each, axis=1)
            if rows.shape[1] and np.isfinite(rows).all():
                key = record.key
                numbered = key.epoch is not None or key.minibatch is not None or key.role == "critic"
                may_be_later = not numbered and key.micro is not None and key.micro > min(micros, default=0)
                yield ValueRows(
                    loss, rows[0], rows[1], rows[2], rows[3], key.epoch, key.minibatch, slots, record, may_be_later
                )


def _of_micro(record: Record) -> tuple[float, TensorRef, TensorRef | None] | None:
    """The loss, values and (None where it has none of its own) returns that a critic's micro-batch recorded."""
    found = {ref.canonical or ref.name: ref for ref in record.tensors() if not ref.is_text and ref.is_readable}
    loss = next((found[name] for name in ("loss", "value_loss", "vf_loss", "critic_loss") if name in found), None)
    # What the critic gave in this update stands beside what it gave before, where both are recorded.
    values = next((found[name] for name in ("vpreds", "new_values", "value_preds", "values") if name in found), None)
    if values is not None and values.canonical != "values":
        values = replace(values, canonical="values")  # about the same tokens
    returns = found.get("returns")
    if loss is None or values is None or loss.numel != 1:
        return None
    return float(pages.array(loss).reshape(-1)[0]), values, returns


def _beside_policy(fields: list[TensorRef], loss: float | None) -> tuple[float, TensorRef, TensorRef | None] | None:
    """The critic's loss, new values and returns of a micro-batch that policy and critic share: each is told by a name
    that the policy has none of.
    """
    found = {ref.canonical or ref.name: ref for ref in fields if not ref.is_text}
    values = next((found[name] for name in ("vpreds", "vpred", "new_values", "value_preds") if name in found), None)
    if loss is None or values is None:
        return None
    return loss, replace(values, canonical="values"), found.get("returns")


class _Averaged(Struct, frozen=True):
    """A critic's logged loss, the smallest mean of its squared errors over tokens that count, halved, and their sum
    over every slot of its rows, halved. `means`: over tokens, and response by response; each halved, and whole.
    """

    logged: float
    means: tuple[float, ...]
    floor: float
    rows: int
    tokens: float
    record: Record

    @property
    def least(self) -> float:
        return min(self.means)


def _averaged(logged: float, errors_B: Array, tokens_B: Array, slots: int, record: Record) -> _Averaged:
    """Of the summed squared errors and the tokens of each row."""
    total = float(errors_B.sum())
    each = total / max(float(tokens_B.sum()), 1.0), float(np.mean(errors_B / np.maximum(tokens_B, 1e-9)))
    means = 0.5 * each[0], 0.5 * each[1], *each
    return _Averaged(logged, means, 0.5 * total / slots, len(errors_B), float(tokens_B.sum()), record)


def _is_shared(every: list[_Averaged], which: int) -> bool:
    """Whether one factor makes a mean of them, as a coefficient does, and micro-batches that share it, by number or by
    rows: in a third of them, and what is clipped is larger in the others.
    """
    own = np.array([one.means[which] / one.logged for one in every if one.logged > 0])
    by_rows = np.array([one.means[which] / one.logged * one.rows for one in every if one.logged > 0])
    return any(
        bool(parts.size) and 3 * int((parts >= (1 - 1e-3) * parts.max()).sum()) >= parts.size
        for parts in (own, by_rows)
    )


def _is_of_all_tokens(every: list[_Averaged]) -> bool:
    """Whether what the summed errors of a third of them were divided by is the number of tokens that count in all
    micro-batches of the update, the epoch or the step, or of one rank's.
    """
    wholes: list[dict[tuple[int | None, ...], float]] = [{}, {}, {}, {}]

    def keys(one: _Averaged) -> list[tuple[int | None, ...]]:
        key = one.record.key
        update = key.step, key.epoch, key.minibatch
        return [update, (*update, key.rank), update[:2], (*update[:2], key.rank)]

    for one in every:
        for whole, at in zip(wholes, keys(one), strict=True):
            whole[at] = whole.get(at, 0.0) + one.tokens
    for whole, place in zip(wholes, range(len(wholes)), strict=True):
        for halved in (0, 2):
            fits = sum(
                abs(one.means[halved] * one.tokens - one.logged * whole[keys(one)[place]])
                <= 1e-3 * one.means[halved] * one.tokens
                for one in every
            )
            if 3 * fits >= len(every):
                return True
    return False


def _of_batch(batch: StepBatch) -> Iterator[_Averaged]:
    """A critic's micro-batches whose mask (and returns) stand beside their samples."""
    for one in value_rows(batch):
        rows = one.sample.astype(np.int64)
        errors_B, tokens_B = np.bincount(rows, weights=(one.new - one.due) ** 2), np.bincount(rows).astype(np.float64)
        if one.slots > tokens_B.sum():
            yield _averaged(one.loss, errors_B, tokens_B, one.slots, one.record)


def _valued(record: Record) -> _Averaged | None:
    """The losses of a critic's micro-batch that holds its mask itself."""
    if record.key.stage in ("training_metrics", "param", "gradient") or record.key.role != "critic":
        return None
    found = {ref.canonical or ref.name: ref for ref in record.tensors() if not ref.is_text and ref.is_readable}
    mask = found.get("response_mask") or found.get("loss_mask")
    loss = next((found[name] for name in ("loss", "value_loss", "vf_loss", "critic_loss") if name in found), None)
    values, returns = found.get("values"), found.get("returns")
    if mask is None or loss is None or values is None or returns is None or loss.numel != 1:
        return None
    if len({tuple(one.shape) for one in (mask, values, returns)}) != 1 or len(mask.shape) != 2:
        return None
    v, r, m = (pages.array(one).astype(np.float64) for one in (values, returns, mask))
    errors_B = np.where(m != 0, (v - r) ** 2, 0.0).sum(1)
    return _averaged(float(pages.array(loss).reshape(-1)[0]), errors_B, (m != 0).sum(1).astype(float), m.size, record)


@rule("D84", "the critic's loss is negative", link="loss", scope="case",
      source="arXiv 1707.06347 equation 9: a mean of squares")  # fmt: skip
def negative_in_dump(case: Case) -> Finding | None:
    """Losses of the critic's micro-batches (4 and more) below -1e-4 in half of them and more: an error."""
    found = [
        (value, record) for record in case.records()
        if record.key.stage not in ("training_metrics", "param", "gradient")
        for value in [_value_loss(record)] if value is not None
    ]  # fmt: skip
    skip_if(len(found) < 4, "needs the critic's loss of 4 micro-batches")
    below = [(value, record) for value, record in found if value < -1e-4]
    if 2 * len(below) < len(found):
        return None
    value, record = min(below, key=lambda one: one[0])
    return error(
        f"the value loss has the wrong sign: it comes to {value:.3g}, and a mean of squares is never negative",
        Where(step=record.key.step, micro=record.key.micro, role=record.key.role, stage=record.key.stage,
              path=str(record.path)),
        shown("the critic's loss", value, ">= 0", record.path.name),
        shown("micro-batches below 0", share(len(below), len(found))),
        cause="the critic's loss is negated: an optimizer drives its values away from their returns",
        next_step="look at the line that makes the value loss",
        steps=sorted({record.key.step for _, record in below if record.key.step is not None}),
    )  # fmt: skip


def _value_loss(record: Record) -> float | None:
    """The critic's loss that a record holds; None of others."""
    names = ("value_loss", "vf_loss", "critic_loss", *(("loss",) if record.key.role == "critic" else ()))
    for ref in record.tensors():
        if (ref.canonical or ref.name) in names and ref.numel == 1 and not ref.is_text and ref.is_readable:
            return float(pages.array(ref).reshape(-1)[0])
    return None


@rule("D84", "the critic's loss is negative", link="loss", scope="signals", needs=("value_loss",), lasts=True,
      explains=("D45", "D63", "L02", "L08", "L09", "L10", "L16", "D24", "D25", "D20"),
      source="arXiv 1707.06347 equation 9: a mean of squares")  # fmt: skip
def negative(log: RunLog) -> Finding | None:
    """The value loss below -1e-4 in 3 steps and more and half of all: an error. A mean of squares cannot be."""
    series = given(log.get("value_loss"))
    below = [point for point in series.points if point.value < -1e-4]
    if len(below) < 3 or 2 * len(below) < len(series.points):
        return None
    worst = min(below, key=lambda point: point.value)
    return error(
        f"the value loss has the wrong sign: {series.name} is {below[0].value:.3g} at first and comes to "
        f"{worst.value:.3g}, and a mean of squares is never negative",
        worst.where(series.name),
        series.shown_at(worst, ">= 0"),
        shown("steps below 0", share(len(below), len(series.points))),
        cause="the critic's loss is negated: an optimizer drives its values away from their returns",
        next_step="look at the line that makes the value loss",
        steps=[point.step for point in below],
    )


#: How many times the square of all that values and returns span a mean of squares may come to.
BEYOND = 4.0


@rule("D90", "the critic's loss is larger than values and returns allow", link="loss", scope="signals",
      needs=("value_loss", "value_mean|value_max", "return_mean|return_max"), lasts=True,
      explains=("D45", "D63", "L02", "L08", "L09", "L10", "D20", "D24", "D25"),
      source="(V - R)^2 lies below (|V| + |R|)^2")  # fmt: skip
def beyond_its_values(log: RunLog) -> Finding | None:
    """The value loss over 4 times (largest |value| + largest |return|)^2 of the step (over 100 times that of their
    means, where no largest is logged) in the first 3 steps that tell: an error. Later ones may be an update further.
    """
    loss = given(log.get("value_loss"))
    bounds: dict[int | None, float] = {}
    exact = log.has("value_max") and log.has("return_max")
    for names in (
        (("value_max", "value_min"), ("return_max", "return_min")) if exact else (("value_mean",), ("return_mean",))
    ):
        largest: dict[int | None, float] = {}
        for series in (one for name in names for one in log.all(name)[:1]):
            for point in series.points:
                largest[point.step] = max(largest.get(point.step, 0.0), abs(point.value))
        bounds = {
            step: bounds.get(step, 0.0) + value for step, value in largest.items() if not bounds or step in bounds
        }
    limit = BEYOND if exact else 25 * BEYOND
    told = [
        (point, limit * bounds[point.step] ** 2) for point in loss.points
        if math.isfinite(point.value) and math.isfinite(bounds.get(point.step, math.nan)) and bounds[point.step] > 1e-3
    ][:3]  # fmt: skip
    skip_if(len(told) < 3, "needs the value loss beside values and returns of 3 steps")
    if any(point.value <= most for point, most in told):
        return None
    first, most = told[0]
    return error(
        f"the critic is taught other targets than its returns: {loss.name} is {first.value:.4g} at first, and no "
        f"difference of the logged values and returns is that large",
        first.where(loss.name),
        loss.shown_at(first, f"<= {most:.3g}"),
        shown("largest |value| + |return|" if exact else "|mean value| + |mean return|", math.sqrt(most / limit)),
        cause="targets in another scale or unit than the returns (multiplied, not normalised back), another tensor in "
        "their place, or a sum over tokens for a mean",
        next_step="rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D44",
        steps=[point.step for point, _ in told],
    )
