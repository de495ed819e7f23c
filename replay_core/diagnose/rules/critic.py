"""The critic: are its targets what rewards and values give, and does it explain anything of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from replay_core.diagnose import trends
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.columns import Column
from replay_core.diagnose.finding import Finding
from replay_core.diagnose.flat import Array
from replay_core.diagnose.rule import Skip, given, rule
from replay_core.diagnose.signals import RunLog
from replay_core.diagnose.stating import finding, shown
from replay_core.objectives.gae import gae

#: Settings of GAE that frameworks' recipes use.
GAMMAS, LAMBDAS = (1.0, 0.99, 0.995, 0.9), (0.95, 1.0, 0.99, 0.98, 0.97, 0.9, 0.8, 0.5, 0.0)
CLOSE = 1e-3
#: Steps before a critic that explains nothing is more than new.
LEARNT = 6


def _dense(batch: StepBatch, column: Column) -> Array:
    """The column's counted tokens as rows [B, T], zeros after each."""
    trained_N = given(batch.trained_N)
    counts_B = batch.flat.count(trained_N)
    values_BT = np.zeros((len(batch), max(int(counts_B.max(initial=0)), 1)))
    values_BT[np.arange(values_BT.shape[1]) < counts_B[:, None]] = np.nan_to_num(column.values_N[trained_N])
    return values_BT


@rule("D44", "value targets are not what rewards and values give", link="advantages", scope="batch",
      needs=("values", "returns", "mask", "token_rewards|token_scores|reward"),
      explains=("D45",), lasts=True,
      source="arXiv 1506.02438 equation 16; verl compute_gae_advantage_return")  # fmt: skip
def targets(batch: StepBatch) -> Iterator[Finding]:
    """Recomputes GAE's returns from rewards and values over the tokens that count, for gamma in {1, .995, .99, .9} and
    lambda in {0, .5, .8, .9, .95, .97, .98, .99, 1}: one must agree to 1e-3, and is named (info). Where none does, it
    is an error that a known mistake agrees: returns that are advantages, rewards, off by one token, or made without the
    next value. Skipped where that does not agree either (other settings, rewards shaped after they were recorded).
    """
    values_BT, returns_BT = (_dense(batch, given(batch.columns.of(name))) for name in ("values", "returns"))
    counts_B = batch.flat.count(given(batch.trained_N))
    mask_BT = (np.arange(values_BT.shape[1]) < counts_B[:, None]).astype(np.float64)
    told = batch.columns.of("token_rewards")
    rewards_BT = _dense(batch, told) if told is not None else _at_the_end(batch, mask_BT)
    if not np.abs(returns_BT).max() > 0 or not np.abs(values_BT).max() > 0:
        raise Skip("returns or values are all 0")
    close = CLOSE * max(1.0, float(np.abs(returns_BT).max()))

    def agrees(other_BT: Array) -> bool:
        return bool((np.abs(returns_BT - other_BT) * mask_BT <= close).all())

    place = batch.laid.where("returns", sample=0)
    mistakes: list[tuple[str, str]] = []
    for gamma in GAMMAS:
        for lam in LAMBDAS:
            advantages_BT, expected_BT = gae(rewards_BT, values_BT, mask_BT, gamma=gamma, lam=lam)
            if agrees(expected_BT):
                yield finding(
                    "info",
                    f"returns are GAE's, gamma {gamma:g}, lambda {lam:g}",
                    place,
                    evidence=[shown("agree to", close)],
                    cause="the variant that was recomputed and agrees; nothing is wrong",
                    next_step="rldbg diagnose --explain D44",
                )
                return
            late_BT = np.concatenate([np.zeros((len(batch), 1)), expected_BT[:, :-1]], 1)
            early_BT = np.concatenate([expected_BT[:, 1:], np.zeros((len(batch), 1))], 1)
            inner_BT = mask_BT * (np.arange(mask_BT.shape[1]) > 0)
            alone_BT, _ = gae(rewards_BT - values_BT, values_BT * 0, mask_BT, gamma=gamma, lam=lam)
            setting = f"gamma {gamma:g}, lambda {lam:g}"
            if agrees(advantages_BT):
                mistakes.append(("returns are the advantages: values are not added", setting))
            elif agrees(alone_BT + values_BT):
                mistakes.append(("GAE is made without the next value: V(t+1) is missing from every delta", setting))
            elif bool((np.abs(returns_BT - late_BT) * inner_BT <= close).all()) or agrees(early_BT):
                mistakes.append(("returns are off by one token", setting))
    if agrees(rewards_BT):
        mistakes.append(("returns are the rewards: nothing is added up over the response", "the token's own reward"))
    if not mistakes:
        raise Skip(
            "no GAE agrees, and no known mistake: another gamma or lambda, or rewards shaped after they were kept"
        )
    _, expected_BT = gae(rewards_BT, values_BT, mask_BT)
    claim, setting = mistakes[0]
    worst = float((np.abs(returns_BT - expected_BT) * mask_BT).max())
    yield finding(
        "error",
        f"value targets are wrong: {claim}",
        place,
        evidence=[
            shown("largest |returns - recomputed| at gamma 1, lambda 0.95", worst, f"<= {close:g}"),
            shown("setting that agrees with the mistake", setting),
        ],
        cause="the critic is taught another target than the return",
    )


def _at_the_end(batch: StepBatch, mask_BT: Array) -> Array:
    """Each sample's reward on its last counted token."""
    reward_B = given(batch.reward_B)
    rewards_BT = np.zeros(mask_BT.shape)
    counts_B = mask_BT.sum(1).astype(np.int64)
    heard = np.flatnonzero(counts_B)
    rewards_BT[heard, counts_B[heard] - 1] = reward_B[heard]
    return rewards_BT


_NOTHING = (
    "the critic is not updated (its optimizer, its learning rate, its parameters), or it is taught wrong targets; in "
    "the first steps of a new critic this is normal"
)


@rule("D45", "the critic explains nothing", link="advantages", scope="case",
      source="PPO's explained variance: 1 - Var(returns - values) / Var(returns)")  # fmt: skip
def explains_nothing(case: Case) -> Iterator[Finding]:
    """Explained variance of the returns by the values, over tokens that count: not above 0 in the later half of 6 steps
    and more is a warning. A critic that knows nothing but the mean is at 0.
    """
    found: list[tuple[int, float]] = []
    where = None
    for batch in case.batches():
        values, returns = batch.columns.of("values"), batch.columns.of("returns")
        if values is None or returns is None:
            raise Skip("no values and returns are recorded")
        if batch.step is None or batch.trained_N is None:
            continue
        both_N = batch.trained_N & values.said_N & returns.said_N
        spread = float(returns.values_N[both_N].var()) if both_N.sum() > 8 else 0.0
        if spread > 1e-9:
            apart = float((returns.values_N - values.values_N)[both_N].var())
            found.append((batch.step, 1 - apart / spread))
            where = batch.laid.where("values", sample=0)
    if len(found) < LEARNT:
        raise Skip(f"needs values and returns of {LEARNT} steps")
    later = found[len(found) // 2 :]
    now = float(np.median([value for _, value in later]))
    if now <= 0:
        yield finding(
            "warning",
            f"the critic explains nothing of its returns after {len(found)} steps (explained variance {now:.2g})",
            where,
            evidence=[
                shown("explained variance, later half", now, "> 0"),
                shown("explained variance, first step", found[0][1]),
            ],
            cause=_NOTHING,
            steps=[step for step, value in later if value <= 0],
        )


@rule("D45", "the critic explains nothing", link="trend", scope="signals", needs=("explained_variance",),
      source="PPO's explained variance")  # fmt: skip
def never_learns(log: RunLog) -> Iterator[Finding]:
    """Explained variance (its last 10 steps' median) not above 0 after 12 steps and more: a warning."""
    series = given(log.get("explained_variance"))
    if len(series.finite) < 12:
        raise Skip("needs the explained variance of 12 steps")
    now = trends.level(series.finite)
    if now <= 0:
        yield finding(
            "warning",
            f"the critic explains nothing of its returns: {series.name} is {now:.2g}",
            series.last.where(series.name),
            evidence=[series.shown(now, "> 0")],
            cause=_NOTHING,
            next_step="rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump --rule D44",
            steps=series.steps(under=0.0),
        )
