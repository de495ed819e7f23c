"""A model whose own forward does more than call its backbone is replayed whole."""

import functools
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from replay_core.errors import CellError, UnavailableError
from replay_core.replay.whole_model import WholeModel, has_own_forward
from tests.replay_core.replay.conftest import VOCABULARY, small_batch
from tests.replay_core.replay.test_run import tensor

ROOT = Path(__file__).parents[3]
#: Stands inside the rows, though a trainer takes it for padding.
PAD = int(small_batch().ids_BS[1, 5])


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def masking_by_ids() -> LlamaForCausalLM:
    """Its mask is made from the ids, whatever mask it is given."""
    model = llama()
    within = model.forward

    @functools.wraps(within)
    def forward(input_ids, attention_mask=None, **given):
        return within(input_ids=input_ids, attention_mask=(input_ids != PAD).long(), **given)

    model.forward = forward
    return model


def _with_head(change):
    model = llama()
    head = model.get_output_embeddings()
    within = head.forward
    head.forward = lambda hidden: change(within(hidden))
    return model


def rolling() -> LlamaForCausalLM:
    """Rows go through its head in another order and are not put back."""
    return _with_head(lambda logits: logits.roll(1, 0))


def clipping() -> LlamaForCausalLM:
    """Logits are clipped at a part of the greatest of the call."""
    return _with_head(lambda logits: logits.clamp(max=0.4 * float(logits.max())))


def capping() -> LlamaForCausalLM:
    """Every logit is capped by itself."""
    return _with_head(lambda logits: 2 * torch.tanh(logits / 2))


def sorting() -> LlamaForCausalLM:
    """Rows are sorted by their length, and put back."""
    model = llama()
    within = model.forward

    def forward(input_ids, attention_mask=None, **given):
        if attention_mask is None or attention_mask.ndim != 2:
            return within(input_ids=input_ids, attention_mask=attention_mask, **given)
        order = attention_mask.sum(1).argsort(descending=True, stable=True)
        moved = {name: one[order] if hasattr(one, "shape") and one.shape[:1] == order.shape else one
                 for name, one in given.items()}  # fmt: skip
        put = within(input_ids=input_ids[order], attention_mask=attention_mask[order], **moved)
        put.logits = put.logits[order.argsort()]
        return put

    model.forward = forward
    return model


class Halving(LlamaForCausalLM):
    """Calls its backbone twice, each time with half of the tokens."""

    def forward(self, input_ids, **given):
        for half in input_ids.chunk(2, dim=1):
            self.model(half)
        return super().forward(input_ids, **given)


def halving() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return Halving(llama().config).eval()


def plan(model: str) -> dict[str, str]:
    return {"model": f"factory:{__name__}:{model}", "forward_path": str(ROOT)}


def own_logprobs(model: LlamaForCausalLM) -> torch.Tensor:
    ids_1T = torch.from_numpy(small_batch().ids_BS[1:2])
    with torch.no_grad():
        logits_TV = model(ids_1T).logits[0] / 0.7
    return logits_TV.log_softmax(-1)[:-1].gather(-1, ids_1T[0, 1:, None])[:, 0]


def test_what_a_wrapped_forward_makes_of_the_mask_is_in_the_log_probabilities(replay):
    expected, without = own_logprobs(masking_by_ids()), own_logprobs(llama())
    assert (expected - without).abs().max() > 1e-2, "what the wrapper does must show"
    cell = replay("packing=off", **plan("masking_by_ids"))
    found = torch.tensor(tensor(cell, "forward_data", "log_probs"))[1, : len(expected)]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert "carries state over" not in " ".join(cell["notes"])


def test_a_forward_that_lays_its_tokens_otherwise_is_left_out_and_that_is_said(replay):
    cell = replay("packing=off", **plan("halving"))
    assert "what it does besides is not replayed" in " ".join(cell["notes"])


def test_a_backbone_is_compiled_alone_and_a_model_with_a_forward_of_its_own_is_not_compiled(replay):
    with pytest.raises(UnavailableError, match="is not transformers' own"):
        replay("packing=off compile=aot_eager", **plan("masking_by_ids"))


def test_the_forward_of_transformers_is_nobodys_own():
    assert not has_own_forward(llama())
    assert has_own_forward(masking_by_ids())
    hooked = llama()
    hooked.register_forward_pre_hook(lambda _module, _args: None)
    assert has_own_forward(hooked)


def test_a_model_that_is_run_whole_answers_what_its_backbone_answers():
    model = llama()
    ids_1T = torch.from_numpy(small_batch().ids_BS[1:2])
    with torch.no_grad():
        whole = WholeModel(model)(input_ids=ids_1T).last_hidden_state
        assert torch.equal(whole, model.model(input_ids=ids_1T).last_hidden_state)
    assert not model.model._forward_hooks


@pytest.mark.parametrize("model", ["rolling", "clipping"])
def test_a_head_that_looks_at_other_rows_is_refused_by_name(replay, model):
    with pytest.raises(CellError, match="depends on the batch: it gives a row other logits beside another row"):
        replay("packing=off", **plan(model))


def test_rows_in_another_order_are_refused_by_name(replay):
    with pytest.raises(CellError, match="gives its backbone the rows in another order"):
        replay("packing=off", **plan("sorting"))


def test_a_head_of_its_own_that_looks_at_each_token_is_run(replay):
    assert replay("packing=off", **plan("capping"))
