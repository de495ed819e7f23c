"""Every rule of the table at its limit: the statistic is the one that its case was built with, and decides past it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from replay_core import naming
from replay_core.compare.judging import limits
from replay_core.compare.judging.judgement import asked, judge
from replay_core.compare.judging.rules import BY_ID, RULES
from replay_core.compare.judging.tolerance import DEFAULT, Exemption, Tolerances
from replay_core.compare.judging.verdict import Context, Rounded, Verdict
from replay_core.measure.figures import ColumnGains, PairFigures
from replay_core.measure.pair import figures

MLP = Context(naming.meaning("layers.0.mlp.output"), "bfloat16", exact=False, name="layers.0.mlp.output")
GRAD = replace(MLP, meaning=naming.meaning("grad.layers.0.mlp.up_proj.weight"))
PARAM = replace(MLP, meaning=naming.meaning("param.layers.0.mlp.up_proj.weight"))
LOGP = replace(MLP, meaning=naming.meaning("policy_logprobs"))
LOSS = replace(MLP, meaning=naming.meaning("loss"), scalar=True)
POSITIONS = replace(MLP, meaning=naming.meaning("position_ids"))

Case = tuple[PairFigures, Context]


def a_RC() -> np.ndarray:
    """Rows and columns of equal norms, without a mean."""
    return np.random.default_rng(0).choice([-1.0, 1.0], (64, 96)) * np.linspace(0.999, 1.001, 96)


def of(a: np.ndarray, d: np.ndarray, context: Context, **options: Any) -> Case:
    return figures([(a, a + d)], **options), context


def touched(place: object, values: object) -> np.ndarray:
    d = np.zeros((64, 96))
    d[place] = values  # type: ignore[call-overload]
    return d


def turned() -> np.ndarray:
    """As large as a, in every row and column, and in no direction of it."""
    return np.abs(a_RC()) * np.random.default_rng(1).choice([-1.0, 1.0], (64, 96))


def column_gain(x: float) -> Case:
    pair, context = of(a_RC(), 0.01 * turned(), MLP)
    gain = np.full(96, 0.01)
    gain[5] *= x
    pair.columns.gains = ColumnGains(gain, np.ones(96), np.full(96, 64.0))
    return pair, context


def samples(one: Callable[[np.ndarray], None]) -> Case:
    """Six samples of forty tokens, off by .03 of 1 - p each."""
    a = np.linspace(-4, -0.5, 240)[:, None]
    d = 0.03 * -np.expm1(a)
    one(d)
    pair, context = of(a, d, LOGP, logprobs=True)
    pair.rows.sample = np.repeat(np.arange(6), 40)
    return pair, context


def sample(x: float) -> Case:
    def scale(d: np.ndarray) -> None:
        d[80:120] *= x

    return samples(scale)


def token(x: float) -> Case:
    def scale(d: np.ndarray) -> None:
        d[100] *= x

    return samples(scale)


def logs(d: float) -> Case:
    return of(np.full((8, 8), -1.0), np.full((8, 8), d), LOGP, logprobs=True)


def k3(x: float) -> Case:
    d = np.sqrt(2 * x)
    for _ in range(40):
        d -= (np.exp(d) - 1 - d - x) / (np.exp(d) - 1)
    return logs(float(d))


def nan(x: float) -> Case:
    b = a_RC() * (1 + 1e-9)
    b[0, : round(x)] = np.nan
    return figures([(a_RC(), b)]), MLP


def elementwise(x: float) -> Case:
    pair, context = of(a_RC(), touched((0, slice(round(x) + 1)), [0.01] + [0.5] * round(x)), MLP)
    pair.limits, pair.beyond = (0.1, 0.0), round(x)
    return pair, context


RMS = float(np.sqrt((a_RC() ** 2).mean()))
#: Rule -> a pair whose statistic is x.
CASES: dict[str, Callable[[float], Case]] = {
    "nan": nan,
    "exact": lambda x: of(a_RC(), touched((0, slice(round(x))), 1.0), replace(MLP, exact=True)),
    "positions": lambda x: of(a_RC(), touched((0, slice(round(x) or 3)), 1.0), replace(POSITIONS, shift=None if x else
                              "shifted by a constant")),
    "elementwise": elementwise,
    "vanishing": lambda x: of(a_RC(), touched((0, 0), x) + 0 * a_RC(), MLP) if x > 1 else of(0 * a_RC(),
                              touched((0, 0), x), MLP),
    "vanishing_gradient": lambda x: of(0 * a_RC(), touched((0, 0), x), replace(GRAD, dtype="float32")),
    "rel_l2": lambda x: of(a_RC(), x * turned(), MLP),
    "worst_row": lambda x: of(a_RC(), touched(7, x * turned()[7]), MLP),
    "outlier": lambda x: of(np.where(np.arange(96) == 3, 1e-9, a_RC()), touched((2, 3), x * RMS), MLP),
    "max_abs": lambda x: logs(x),
    "mean_exp_abs": lambda x: logs(float(np.log(x))),
    "k3": k3,
    "sample_mean_exp_abs": lambda x: (logs(0.01)[0], replace(LOGP, worst_sample=(1, x))),
    "gain": lambda x: of(a_RC(), x * a_RC(), MLP),
    "gradient_gain": lambda x: of(a_RC(), x * a_RC() + 0.65 * x * turned(), GRAD),
    "bias": lambda x: of(a_RC(), np.full((64, 96), x * RMS), MLP),
    "row_gain": lambda x: of(a_RC(), touched(7, x * a_RC()[7]), MLP),
    "row_bias": lambda x: of(a_RC(), touched(7, x * RMS), MLP),
    "standing_row": lambda x: of(a_RC(), 0.01 * turned() * np.where(np.arange(64) == 7, x, 1)[:, None], MLP),
    "standing_column": lambda x: of(a_RC(), 0.01 * turned() * np.where(np.arange(96) == 7, x, 1), MLP),
    "column_gain": column_gain,
    "updated": lambda x: of(a_RC(), x * 2.0**-7 * turned(), PARAM),
    "sample": sample,
    "token": token,
    "scalar_floor": lambda x: of(np.full((1, 1), 1e-9), np.full((1, 1), x), LOSS),
    "scalar": lambda x: of(np.ones((1, 1)), np.full((1, 1), x), LOSS),
    "cast": lambda x: (figures([(a_RC(), 2 * a_RC())]), replace(MLP, rounded=Rounded("bfloat16", round(x)))),
}  # fmt: skip


def test_every_rule_has_a_case():
    assert set(CASES) == set(BY_ID)
    assert len(BY_ID) == len(RULES)


@pytest.mark.parametrize("id", CASES)
def test_a_rule_sees_what_is_there_and_decides_past_its_limit(id: str):
    """Just below the limit and just above, or none and one where nothing is allowed; every other rule is off."""
    rule = BY_ID[id]
    others = tuple(one for one in BY_ID if one not in (id, "rel_l2" if id == "cast" else id))
    only = Exemption("*", "", off=others)
    if id == "elementwise":
        only = Exemption("*", "", off=others, numbers={"atol": 0.1})
    tolerances = Tolerances((only,))
    limit = rule.limit(CASES[id](1.0)[1])
    for x in (0.98 * limit, 1.02 * limit) if limit else (0.0, 1.0):
        pair, context = CASES[id](x)
        seen = rule.seen(pair, tolerances.of(context))
        assert seen is not None
        assert seen.value == pytest.approx(x, rel=1e-2)
        found = judge(pair, None, context, tolerances)
        if rule.clears:
            assert (found.rule is not None and found.rule.id == id) is (x <= limit)
            assert found.verdict is Verdict.CLOSE or x > limit
        elif x > limit:
            assert (found.verdict, found.rule and found.rule.id) == (rule.verdict, id)
        else:
            assert found.verdict is (Verdict.SAME if id == "exact" else Verdict.CLOSE)


@pytest.mark.parametrize("id", ["rel_l2", "max_abs", "mean_exp_abs", "k3", "scalar"])
def test_close_is_suspect_past_a_lower_limit(id: str):
    held = DEFAULT.of(CASES[id](1.01)[1])
    suspect = held.suspect(BY_ID[id])
    others = tuple(one for one in BY_ID if one != id)
    for times, says in ((0.99, False), (1.01, True)):
        x = 1 + (suspect - 1) * times if id == "mean_exp_abs" else suspect * times
        pair, context = CASES[id](x)
        found = judge(pair, None, context, Tolerances((Exemption("*", "", off=others),)))
        assert (found.verdict, found.suspect) == (Verdict.CLOSE, says)


def test_noise_before_a_tensor_widens_its_limits_in_half_precision_and_only_to_their_cap():
    rule = BY_ID["rel_l2"]
    for noise, limit in ((0.0, 0.1), (0.04, 0.1), (0.07, 0.14), (0.5, 0.2)):
        assert rule.limit(replace(MLP, noise=noise)) == pytest.approx(limit)
    assert rule.limit(replace(MLP, dtype="float32", noise=0.5)) == limits.REL_L2["end-to-end"]["float32"]
    assert rule.limit(replace(MLP, local=True, noise=0.5)) == limits.REL_L2["local"]["bfloat16"]


def test_one_product_of_equal_inputs_is_one_rounding_off_and_no_more():
    projection = replace(MLP, local=True, name="layers.0.mlp.up_proj.output")
    assert BY_ID["rel_l2"].limit(projection) == limits.PROJECTION["bfloat16"][0]
    assert BY_ID["rel_l2"].limit(replace(projection, dtype="float32")) == limits.REL_L2["local"]["float32"]


def test_a_verdict_names_the_rule_its_value_and_its_limit():
    found = judge(*CASES["gain"](0.02)[:1], None, MLP)
    assert found.rule is not None
    assert (found.rule.id, found.rule.limit) == ("gain", limits.GAIN_FLOOR["bfloat16"])
    assert found.rule.value == pytest.approx(0.02)


def test_all_that_was_asked_is_listed_with_value_and_limit():
    pair, context = CASES["gain"](0.02)
    listed = {one["id"]: one for one in asked(pair, context)}
    assert set(listed) >= {"rel_l2", "worst_row", "outlier", "gain"}
    assert listed["rel_l2"]["value"] < listed["rel_l2"]["limit"]
    assert listed["gain"]["value"] > listed["gain"]["limit"]
    off = {one["id"]: one["limit"] for one in asked(pair, context, Tolerances((Exemption("*", "", off=("gain",)),)))}
    assert off["gain"] is None


def test_what_rows_said_is_the_same_after_they_are_let_go():
    for id, rule in BY_ID.items():
        if rule.by_row:
            pair, context = CASES[id](1.02 * rule.limit(CASES[id](1.0)[1]))
            before = rule.seen(pair, DEFAULT.of(context))
            pair.forget_rows()
            assert rule.seen(pair, DEFAULT.of(context)) is before


@pytest.mark.parametrize(
    ("b", "said"),
    [(1.5, ": b is 2 times a"), (0.75 / 4, ": b is 1/4 times a"), (-0.75, ": b is -1 times a"), (1.0, "0.25"),
     (0.0, "0.75"), (-0.1875, ": b is -1/4 times a")],
)  # fmt: skip
def test_a_loss_that_is_a_whole_multiple_of_the_other_is_said_to_be(b: float, said: str) -> None:
    pair, context = of(np.array([[0.75]]), np.array([[b - 0.75]]), LOSS)
    found = judge(pair, None, context)
    assert found.verdict is Verdict.DIFF
    assert found.reason.endswith(said)
    of_nothing = judge(*of(np.array([[0.0]]), np.array([[b or 1.0]]), LOSS)[:1], None, context)
    assert "times" not in of_nothing.reason


@pytest.mark.parametrize(
    ("a", "d", "error", "verdict"),
    [
        (0.1, 0.002, 0.0016, Verdict.CLOSE),
        (0.1, 0.002, 0.0, Verdict.DIFF),
        (0.1, 0.02, 0.01, Verdict.DIFF),
        (0.001, 0.0015, 0.0016, Verdict.CLOSE),
        (0.001, 0.0015, 0.0003, Verdict.DIFF),
        (0.001, 0.02, 0.0016, Verdict.DIFF),
    ],
)
def test_a_loss_is_held_against_what_the_noise_of_its_terms_leaves_of_a_mean(
    a: float, d: float, error: float, verdict: Verdict
) -> None:
    pair, context = of(np.array([[a]]), np.array([[d]]), replace(LOSS, mean_error=error))
    assert judge(pair, None, context).verdict is verdict
