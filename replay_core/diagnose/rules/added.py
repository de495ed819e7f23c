"""What a recorded loss adds up: the policy's part and the KL's, micro-batch by micro-batch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from replay_core import pages
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where
from replay_core.diagnose.rule import Skip, rule
from replay_core.diagnose.stated import stated_number
from replay_core.diagnose.stating import finding, shown
from replay_core.records import Record, TensorRef

#: Micro-batches that tell; a KL loss below this is nothing to weigh; and what one coefficient may leave.
FEWEST, LEAST, LEFT = 4, 1e-6, 0.02
_BETAS = ("kl_loss_coef", "kl_coef", "init_kl_coef", "kl_beta", "beta")


@rule("D49", "a term of the loss has the wrong sign or weight", link="loss", scope="case",
      explains=("L10", "L08", "D15"), lasts=True,
      source="loss = pg_loss + beta KL: the KL holds the policy near its reference")  # fmt: skip
def kl_in_recorded_losses(case: Case) -> Iterator[Finding]:
    """Solves loss - pg_loss = beta KL over micro-batches that record all three (4 and more, KL over 1e-6), and must
    leave less than a fiftieth of it: a negative beta is an error; so is none at all where the run states one. The
    KL loss may be recorded with its coefficient or without.
    """
    rows: list[tuple[float, float, Record]] = []
    for record in case.records():
        if record.key.stage in ("training_metrics", "param", "gradient"):
            continue
        loss, pg, kl = _numbers(record, "loss", "pg_loss", "kl_loss")
        if loss is not None and pg is not None and kl is not None and abs(kl) > LEAST:
            rows.append((loss - pg, kl, record))
    if len(rows) < FEWEST:
        raise Skip(f"needs loss, pg_loss and kl_loss of {FEWEST} micro-batches")
    rest, weighed = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    beta = float(rest @ weighed / (weighed @ weighed))
    stated = stated_number(case.run.flags or {}, *_BETAS) or stated_number(case.run.facts, *_BETAS)
    scale = float(np.abs(weighed).max())
    record = rows[int(np.abs(weighed).argmax())][2]
    evidence = [
        shown("beta that solves it", beta, "> 0", record.path.name),
        shown("micro-batches", len(rows)),
        *([] if stated is None else [shown("beta that is stated", stated)]),
    ]
    if np.abs(rest - beta * weighed).max() > LEFT * max(abs(beta), 1e-6) * scale + 1e-7:
        if np.abs(rest).max() > 1e-7:
            raise Skip("the KL loss does not make the difference of loss and pg_loss: other terms are in it")
        beta = 0.0
    key = record.key
    where = Where(key.step, key.micro, key.rank, key.role, key.stage, "kl_loss", path=str(record.path))
    if beta < -1e-9:
        yield finding(
            "error",
            f"the KL term is subtracted from the loss: it has the wrong sign (coefficient {beta:.3g})",
            where,
            evidence=evidence,
            cause="the sign of the term is turned where the loss is summed up: distance from the reference is rewarded",
            next_step="rldbg diagnose --explain D49   # then look at the line that adds up the loss",
        )
    elif np.abs(rest).max() <= 1e-3 * (stated or math.nan) * scale:
        yield finding(
            "error",
            f"the KL term is not in the loss: loss is pg_loss alone, and the run states a coefficient of {stated:g}",
            where,
            evidence=evidence,
            cause="the KL loss is computed, logged, and left out where the loss is summed up",
            next_step="rldbg diagnose --explain D49   # then look at the line that adds up the loss",
        )


def _numbers(record: Record, *names: str) -> list[float | None]:
    """What the record says of each name, where that is one finite number; None of all where one name is missing."""
    found: dict[str, TensorRef] = {}
    for ref in record.tensors():
        found.setdefault(ref.canonical or ref.name, ref)
    if not found.keys() >= set(names):
        return [None] * len(names)
    return [_number(found[name]) for name in names]


def _number(ref: TensorRef) -> float | None:
    if ref.is_text or ref.numel != 1 or not ref.is_readable:
        return None
    value = float(np.asarray(pages.array(ref)).reshape(-1)[0])
    return value if math.isfinite(value) else None
