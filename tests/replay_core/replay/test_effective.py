"""What ran is read off the operators, in words, and what a flag did not do is said."""

from collections import Counter

import pytest
import torch

from replay_core.replay.effective import (
    NO_ATTENTION,
    Operators,
    Profiled,
    attention_in,
    effective_settings,
    notes_on,
)
from replay_core.replay.flags import Flags
from replay_core.replay.model import LoadedModel


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"bmm": 4, "_softmax": 2, "mm": 9}, "eager (bmm + softmax)"),
        ({"bmm": 4, "_safe_softmax": 2}, "math (bmm + _safe_softmax)"),
        ({"bmm": 4}, "eager (bmm, softmax fused by the compiler)"),
        ({"mm": 9}, "no attention operator seen"),
        ({"_scaled_dot_product_flash_attention_for_cpu": 2, "mm": 1}, "_scaled_dot_product_flash_attention_for_cpu"),
        ({"_scaled_dot_product_efficient_attention": 1, "_efficient_attention_forward": 1, "bmm": 1},
         "_efficient_attention_forward, _scaled_dot_product_efficient_attention"),
        ({"flash_attn": 1, "flash_attn_varlen": 1}, "flash_attn_varlen"),
    ],
)  # fmt: skip
def test_the_kernel_is_named_by_its_operators(counts, words):
    assert attention_in(Counter(counts)) == words


def test_a_kernel_that_a_user_registered_is_named_as_theirs_whatever_it_computes_with():
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import eager_attention_forward

    AttentionInterface.register("mine", eager_attention_forward)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    said = {}
    for name in ("mine", "eager"):
        config = LlamaConfig(**sizes, num_attention_heads=2, attn_implementation=name)
        model = LoadedModel(LlamaForCausalLM(config), "factory:tests")
        settings = effective_settings(Flags.parse("attention=own"), model, "eager (bmm + softmax)", 1.0, "arange")
        said[name] = settings["attention"]
    assert said == {
        "mine": "mine: a kernel of one's own (eager (bmm + softmax))", "eager": "eager (bmm + softmax)"
    }  # fmt: skip


def test_a_product_without_a_softmax_is_no_attention_where_nothing_was_fused():
    assert attention_in(Counter({"bmm": 4, "mm": 9}), compiled=False) == "no attention operator seen"


def test_a_model_of_states_alone_is_not_said_to_attend():
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "conv_kernel": 4}
    model = MambaForCausalLM(MambaConfig(**sizes, pad_token_id=0, bos_token_id=0, eos_token_id=0)).eval()
    with torch.no_grad(), Operators() as operators:
        model(input_ids=torch.arange(8)[None], use_cache=False)
    assert operators.counts["bmm"] + operators.counts["matmul"] + operators.counts["baddbmm"], "it multiplies states"
    assert operators.attention() == NO_ATTENTION
    said = notes_on(
        Flags.parse("attention=eager"), {"attention": operators.attention(), "attn_implementation": "eager"}
    )
    assert "no attention ran: attention=eager changes nothing of this model" in said


def test_both_ways_of_counting_see_the_kernel_that_ran():
    q = torch.randn(1, 2, 8, 16)
    for counting in (Operators(), Profiled()):
        with torch.no_grad(), counting:
            torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert "flash_attention_for_cpu" in counting.attention()


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("packing=off block_mask=off", "block_mask=off has no effect"),
        ("packing=on block_mask=off", "packed WITHOUT a block mask"),
        ("packing=on rows_per_forward=1", "packing has no effect with one row per forward"),
        ("attention=flex", "includes compiling the flex kernel"),
    ],
)
def test_a_flag_without_effect_is_said(flags, note):
    assert any(note in one for one in notes_on(Flags.parse(flags), {"attention": "eager (bmm + softmax)"}))


def test_settings_that_all_took_effect_need_no_note():
    assert notes_on(Flags.parse("packing=on"), {"attention": "eager (bmm + softmax)"}) == []


def test_a_kernel_of_a_package_is_seen_eagerly_and_among_what_a_compiled_graph_calls():
    library = torch.library.Library("flash_attn_of_tests", "DEF")
    library.define("fwd(Tensor q) -> Tensor")
    library.impl("fwd", lambda q: q.clone(), "CompositeExplicitAutograd")
    for counting in (Operators(), Profiled()):
        with counting:
            torch.ops.flash_attn_of_tests.fwd(torch.ones(2))
        assert counting.attention() == "flash_attn_of_tests.fwd"
    del library


def test_kernels_that_are_no_operators_of_torch_are_not_said_to_change_nothing():
    told = notes_on(
        Flags.parse("attention=fa4 dtype=bfloat16"),
        {"attention": NO_ATTENTION, "attn_implementation": "flash_attention_4"},
    )
    assert told == ["torch sees no operator of attention=fa4: its kernels may be none of torch's"]


def test_a_pinned_kernel_that_did_not_run_is_told():
    ran = {"attention": "_scaled_dot_product_cudnn_attention", "attn_implementation": "sdpa"}
    (note,) = notes_on(Flags.parse("attention=sdpa-efficient compile=inductor"), ran)
    assert note == "attention=sdpa-efficient was asked for, and another kernel ran: _scaled_dot_product_cudnn_attention"
    assert notes_on(Flags.parse("attention=sdpa-cudnn compile=inductor"), ran) == []
