import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from replay_core.replay.architectures import ARCHITECTURES, settings
from replay_core.replay.logprobs import Head, token_logprobs


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def random_model(arch):
    kind, arguments = settings(arch, 900, 64)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **arguments), attn_implementation="eager").eval()


def probe(model, width=16):
    ids = torch.arange(width)[None]
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return hidden, model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("arch", [name for name in ARCHITECTURES if name.endswith("tiny")])
def test_the_head_is_the_models_own_code_on_given_hidden_states(arch):
    model = random_model(arch)
    hidden, logits = probe(model)
    head = Head(model, hidden, logits)
    assert head.note is None
    assert torch.equal(head(hidden[0]), logits[0])
    assert torch.equal(probe(model)[1], logits), "the backbone is back in its place"


@pytest.mark.parametrize("kind", ["bert", "roberta", "megatron-bert", "roformer"])
def test_a_decoder_of_berts_asks_its_backbone_for_cross_attentions_and_is_told_that_there_are_none(kind):
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    config = AutoConfig.for_model(kind, **sizes, num_attention_heads=2, is_decoder=True, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config).eval()
    hidden, logits = probe(model)
    head = Head(model, hidden, logits)
    assert not head.is_one_product
    assert torch.equal(head(hidden[0]), logits[0])


def test_a_softcap_after_the_head_is_honoured():
    model = random_model("gemma2-tiny")
    model.config.final_logit_softcapping = 0.05
    hidden, logits = probe(model)
    assert logits.abs().max() <= 0.05
    assert torch.equal(Head(model, hidden, logits)(hidden[0]), logits[0])


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_in_chunks_equal_those_of_whole_logits_bitwise(dtype, temperature):
    torch.manual_seed(0)
    head = torch.nn.Linear(64, 5000, bias=False).to(dtype)
    hidden, targets = torch.randn(513, 64).to(dtype), torch.randint(0, 5000, (513,))
    logits = head(hidden).float()
    scaled = logits if temperature == 1.0 else logits / temperature
    whole = scaled.gather(-1, targets[:, None])[:, 0] - scaled.logsumexp(-1)
    for chunk in (64, 100, 512, 1000):
        logprobs, entropy = token_logprobs(head, hidden, targets, temperature, chunk)
        assert torch.equal(logprobs, whole)
        expected = torch.distributions.Categorical(logits=scaled).entropy()
        torch.testing.assert_close(entropy, expected, rtol=1e-5, atol=1e-5)


def test_no_chunk_holds_more_rows_than_asked_and_none_is_left_with_one():
    seen = []

    def head(hidden):
        seen.append(hidden.shape[0])
        return hidden

    token_logprobs(head, torch.randn(1025, 8), torch.zeros(1025, dtype=torch.long), chunk=512)
    assert max(seen) <= 512
    assert min(seen) > 300


def test_no_token_to_predict_is_no_error():
    logprobs, entropy = token_logprobs(torch.nn.Identity(), torch.empty(0, 8), torch.empty(0, dtype=torch.long))
    assert logprobs.numel() == entropy.numel() == 0


def test_a_head_is_its_embedding_where_state_is_carried_and_no_other_code_runs_on_hidden_states():
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "ffn_dim": 16, "num_attention_heads": 2}
    config = AutoConfig.for_model("opt", **sizes, max_position_embeddings=16, word_embed_proj_dim=16)
    model = AutoModelForCausalLM.from_config(config).eval()
    hidden_1ND = torch.randn(1, 3, 16)
    # Another forward's logits, as a model's that carries state over: nothing to hold its head to.
    head = Head(model, hidden_1ND, torch.zeros(1, 3, 32), is_repeatable=False)
    assert torch.equal(head(hidden_1ND[0]), model.lm_head(hidden_1ND)[0])
    assert "carries state over" in str(head.note)


def test_a_head_that_puts_out_float32_of_weights_in_a_half_is_one_product():
    model = random_model("qwen2-tiny").to(torch.bfloat16)
    own = model.forward

    def forward(*args, **named):
        put = own(*args, **named)
        put.logits = put.logits.float()
        return put

    model.forward = forward
    hidden, logits = probe(model)
    head = Head(model, hidden, logits)
    assert logits.dtype == torch.float32
    assert head.is_one_product
    assert torch.equal(head(hidden[0]), logits[0])
