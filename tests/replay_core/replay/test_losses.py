import numpy as np
import pytest

from replay_core.errors import RequestError
from replay_core.replay.losses import Loss, resolve

ONES = np.ones((2, 3))


def test_a_text_names_only_what_it_sets():
    assert Loss.parse("grpo,kl=0.001,clip_high=0.28") == {"kind": "grpo", "kl": 0.001, "clip_high": 0.28}
    assert Loss.parse("reduction=sequence_mean") == {"reduction": "sequence_mean"}


@pytest.mark.parametrize("text", ["dpo", "grpo,kl=much", "grpo,beta=1", "reduction=median"])
def test_a_loss_that_does_not_exist_is_refused(text):
    with pytest.raises(RequestError):
        Loss.parse(text)


def test_on_policy_the_loss_is_minus_the_mean_advantage():
    mask = np.array([[1, 1, 0], [1, 0, 0]])
    found = Loss().value(-ONES, -ONES, None, np.array([[2.0] * 3, [-1.0] * 3]), mask)
    assert found["loss"] == pytest.approx(-(2 + 2 - 1) / 3)
    assert found["prob_ratio"].tolist() == mask.tolist()


def test_the_penalty_is_added_with_its_coefficient():
    found = Loss(kl=0.5, kl_estimator="k1").value(-ONES, -ONES, -2 * ONES, 0 * ONES, ONES)
    assert (found["pg_loss"], found["kl_loss"], found["loss"]) == (0, 1, 0.5)


def test_a_penalty_without_a_reference_is_refused():
    with pytest.raises(RequestError, match="no reference log-probabilities"):
        Loss(kl=0.1).value(-ONES, -ONES, None, ONES, ONES)


def test_where_the_loss_comes_from_is_said():
    assert resolve({"kl": 0.1}, {"kl": 0.2}, None)[1].endswith("(as asked)")
    assert resolve(None, {"kl": 0.2}, None)[1].endswith("(as recorded)")
    assert "assumed" in resolve(None, None, None)[1]


def test_the_recorded_tokens_of_a_step_divide_a_sum():
    loss, sentence = resolve(None, None, 661)
    assert (loss.reduction, loss.tokens) == ("token_sum", 661)
    assert "token sum / 661 tokens" in sentence
    assert resolve({"reduction": "token_mean"}, None, 661)[0].reduction == "token_mean"


def test_dpos_loss_is_of_pairs_chosen_first():
    logps = np.log(np.array([[0.5, 0.5], [0.25, 0.25]]))
    ref = np.log(np.array([[0.25, 0.5], [0.25, 0.5]]))
    mask = np.ones((2, 2))
    found = Loss(kind="dpo", beta=0.5, divisor=2.0).value(logps, None, ref, None, mask)
    # Log-ratios log 2 of the chosen and -log 2 of the rejected: sigmoid(0.5 * 2 log 2) = 2/3.
    assert found["loss"] == pytest.approx(-np.log(2 / 3) / 2)
    with pytest.raises(RequestError, match="pairs"):
        Loss(kind="dpo", beta=0.1).value(logps, None, None, None, mask)
