import numpy as np
import pytest

from replay_core.errors import RequestError
from replay_core.replay.losses import Loss, resolve

ONES = np.ones((2, 3))


def test_a_text_names_only_what_it_sets():
    assert Loss.parse("grpo,kl=0.001,clip_high=0.28") == {"kind": "grpo", "kl": 0.001, "clip_high": 0.28}
    assert Loss.parse("reduction=sequence_mean") == {"reduction": "sequence_mean"}
    assert Loss.parse("reduction=seq-mean-token-sum") == {"reduction": "sequence_sum"}, "as verl calls it"


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


def torch_case():
    """Log-probabilities with a gradient, old ones, the engine's, advantages, a mask with a hole; two responses."""
    import torch

    generator = torch.Generator().manual_seed(0)
    logits_BTV = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64).requires_grad_()
    every_BTV = logits_BTV.log_softmax(-1)
    old_BT = every_BTV[..., 0].detach() + 0.4 * torch.randn(2, 5, generator=generator, dtype=torch.float64)
    rollout_BT = old_BT + 0.9 * torch.randn(2, 5, generator=generator, dtype=torch.float64)
    advantages_BT = torch.tensor([[1.5] * 5, [-0.7] * 5], dtype=torch.float64)
    mask_BT = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 0, 1, 0]])
    return logits_BTV, every_BTV, old_BT, rollout_BT, advantages_BT, mask_BT


#: A loss, and the same written out response by response, token by token, for autograd to differentiate.
WRITTEN_OUT = {
    "gspo,clip_low=0.3,clip_high=0.4,reduction=sequence_mean": lambda p, o, r, a, h: (
        sum(torch_max(-a[0] * ((p - o).mean().exp()), -a[0] * (p - o).mean().exp().clip(0.7, 1.4)) for _ in p) / len(p)
    ),
    "cispo,clip_low=1,clip_high=0.28,reduction=sequence_sum": lambda p, o, r, a, h: sum(
        -min(float((p[t] - o[t]).detach().exp()), 1.28) * a[t] * p[t] for t in range(len(p))
    ),
    "grpo,clip_high=0.28,tis=1.5,reduction=sequence_mean": lambda p, o, r, a, h: sum(
        torch_max(-a[t] * (p[t] - o[t]).exp(), -a[t] * (p[t] - o[t]).exp().clip(0.8, 1.28))
        * min(float((o[t] - r[t]).exp()), 1.5) for t in range(len(p))
    ) / len(p),
    "grpo,mis=2,rollout_level=sequence,reduction=sequence_mean": lambda p, o, r, a, h: sum(
        torch_max(-a[t] * (p[t] - o[t]).exp(), -a[t] * (p[t] - o[t]).exp().clip(0.8, 1.2)) for t in range(len(p))
    ) / len(p) * (float((o - r).sum().exp()) if float((o - r).sum().exp()) <= 2 else 0.0),
    "grpo,entropy=0.3,reduction=sequence_mean": lambda p, o, r, a, h: sum(
        torch_max(-a[t] * (p[t] - o[t]).exp(), -a[t] * (p[t] - o[t]).exp().clip(0.8, 1.2)) - 0.3 * h[t]
        for t in range(len(p))
    ) / len(p),
}  # fmt: skip


def torch_max(a, b):
    return a if float(a.detach()) >= float(b.detach()) else b


@pytest.mark.parametrize("text", WRITTEN_OUT)
def test_a_loss_and_its_gradient_are_those_of_its_formula_written_out(text):
    import torch

    logits_BTV, every_BTV, old_BT, rollout_BT, advantages_BT, mask_BT = torch_case()
    entropy_BT = -(every_BTV.exp() * every_BTV).sum(-1)
    loss = Loss.from_mapping(Loss.parse(text))
    found = loss.value(every_BTV[..., 0], old_BT, None, advantages_BT, mask_BT, rollout_BT, entropy_BT)["loss"]
    (gradient,) = torch.autograd.grad(found, logits_BTV, retain_graph=True)
    kept = [mask_BT[row] != 0 for row in range(2)]
    written = sum(
        WRITTEN_OUT[text](every_BTV[row, :, 0][at], old_BT[row][at], rollout_BT[row][at], advantages_BT[row][at],
                          entropy_BT[row][at])
        for row, at in enumerate(kept)
    ) / 2  # fmt: skip
    (expected,) = torch.autograd.grad(written, logits_BTV)
    assert float(found.detach()) == pytest.approx(float(written.detach()), rel=1e-12)
    assert torch.allclose(gradient, expected, rtol=1e-10, atol=1e-12)
    assert float(gradient.abs().max()) > 0 or text.startswith("grpo,mis")


@pytest.mark.parametrize("text", ["grpo,tis=2", "grpo,entropy=0.1"])
def test_a_term_without_what_it_is_made_of_is_refused(text):
    with pytest.raises(RequestError, match=r"no (rollout_logprobs|logits)"):
        Loss.from_mapping(Loss.parse(text)).value(-ONES, -ONES, None, ONES, ONES)
