from __future__ import annotations

import pytest

from replay_core import naming
from replay_core.naming import ALIASES, MEANINGS, NOTES, Phase


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("sequences", "input_ids"),
        ("action_log_probs", "old_logprobs"),
        ("trajectories.tokens", "trajectories.input_ids"),
        ("input_ids", "input_ids"),
        ("whatever", "whatever"),
        ("model.layers.0.mlp.output", "layers.0.mlp.output"),
        ("_orig_mod.module.model.layers.3.self_attn.inputs.0", "layers.3.self_attn.inputs.0"),
        ("grad.module.model.layers.0.mlp.up_proj.weight", "grad.layers.0.mlp.up_proj.weight"),
        ("param._fsdp_wrapped_module.lm_head.weight", "param.lm_head.weight"),
        ("base_model.model.model.layers.1.output.0", "layers.1.output.0"),
        ("param.model.model.layers.1.mlp.up_proj.weight", "param.layers.1.mlp.up_proj.weight"),
        ("param.state_dict.model.norm.weight", "param.norm.weight"),
        ("grad.model.layers.0._fsdp_wrapped_module.mlp._orig_mod.up_proj.weight", "grad.layers.0.mlp.up_proj.weight"),
        ("model.layers.0._checkpoint_wrapped_module.mlp.output", "layers.0.mlp.output"),
        ("model.inputs.input_ids", "model.inputs.input_ids"),
        ("module.model.output.last_hidden_state", "model.output.last_hidden_state"),
        ("grad.module.output.weight", "grad.output.weight"),
        ("module.output.output", "output.output"),
        ("module.output.inputs.0", "output.inputs.0"),
    ],
)
def test_a_framework_name_means(name: str, canonical: str):
    assert naming.canonical(name) == canonical


def test_a_dialects_own_word_goes_before_the_general_one():
    assert naming.canonical("logprobs") == "rollout_logprobs"
    assert naming.canonical("logprobs", {"logprobs": "ref_logprobs"}) == "ref_logprobs"
    assert naming.canonical("samples.logprobs", {"logprobs": "ref_logprobs"}) == "samples.ref_logprobs"


def test_every_alias_leads_to_a_meaning():
    assert set(ALIASES.values()) <= set(MEANINGS) | NOTES
    assert not set(ALIASES) & set(MEANINGS)


@pytest.mark.parametrize("name", [*ALIASES, *MEANINGS, "layers.0.mlp.output", "grad.w", "param.w", "x"])
def test_a_canonical_name_is_its_own_canonical_name(name: str):
    canonical = naming.canonical(name)
    assert naming.canonical(canonical) == canonical


@pytest.mark.parametrize(
    ("name", "module", "given"),
    [
        ("layers.0.mlp.inputs.0", "layers.0.mlp", True),
        ("layers.0.mlp.output", "layers.0.mlp", False),
        ("layers.0.self_attn.output.1", "layers.0.self_attn", False),
        ("layers.0.self_attn.inputs.attention_mask", "layers.0.self_attn", True),
    ],
)
def test_module_tensors_know_their_module(name: str, module: str, given: bool):
    assert naming.is_module_tensor(name)
    assert (naming.module_of(name), naming.is_input(name)) == (module, given)


def test_a_name_with_output_inside_a_word_is_no_module_tensor():
    assert not naming.is_module_tensor("return_output")
    assert not naming.is_module_tensor("layers.0.mlp.outputs")


def test_phases_follow_the_computation():
    order = ["input_ids", "attention_mask", "reward", "values", "rollout_logprobs", "old_logprobs", "ref_logprobs",
             "advantages", "layers.0.mlp.output", "policy_logprobs", "entropy", "is_ratio", "loss", "grad.w",
             "grad_norm", "param.w", "metrics.kl", "whatever"]  # fmt: skip
    phases = [naming.meaning(name).phase for name in order]
    assert phases == sorted(phases)
    assert len(set(phases)) == len(phases)


def test_gradients_and_modules_have_their_kinds():
    assert naming.meaning("grad.layers.0.w").kind == "gradient"
    assert naming.meaning("layers.0.self_attn.inputs.attention_mask").kind == "mask"
    assert naming.meaning("layers.0.self_attn.inputs.position_ids").kind == "positions"
    assert naming.meaning("timestamp").kind == naming.meaning("batch_info.batch_size").kind == "note"
    assert naming.meaning("trajectories.advantages").phase is Phase.ADVANTAGES


@pytest.mark.parametrize(
    "name", ["metrics.step_time", "metrics.timing_s/gen", "perf/throughput", "metrics.train_samples_per_second",
             "metrics.perf/max_memory_allocated_gb", "metrics.perf/mfu", "elapsed time per iteration (ms)",
             "throughput per GPU (TFLOP/s/GPU)", "perf/time_per_step", "metrics.tokens/s", "tok/s", "it/s", "iter_ms",
             "metrics.dt", "dt", "ms_per_step", "sec_per_step", "backward-time", "time_per_iteration", "uptime"],
)  # fmt: skip
def test_clocks_and_meters_are_notes(name: str) -> None:
    assert naming.meaning(name).kind == "note"


@pytest.mark.parametrize(
    "name",
    [
        "metrics.reward",
        "metrics.num_tokens",
        "metrics.kl",
        "time_steps_BT",
        "layers.0.memory.output",
        "metrics.time_limit",
        "dt_rank",
        "layers.0.mixer.dt_bias",
        "layers.0.mixer.dt",
        "sometime",
        "metrics.timeout",
        "rewards/time_penalty",
        "kl_per_step",
        "timesteps",
        "time_mix_k",
        "bits/s",
    ],
)
def test_what_is_computed_is_no_note(name: str) -> None:
    assert naming.meaning(name).kind != "note"


def test_a_head_called_output_is_the_models_own() -> None:
    heads = [
        "lm_head.weight",
        "grad.output.weight",
        "param.embed_out.weight",
        "grad.language_model.output_layer.weight",
    ]
    assert all(map(naming.is_head, heads))
    assert [naming.around_head(name) for name in heads] == ["", "grad.", "param.", "grad.language_model."]
    assert not naming.is_head("layers.0.attention.output.weight")
    assert all(map(naming.makes_logits, ["forward.output.logits", "output.output", "embed_out.output"]))
    assert not naming.makes_logits("layers.0.output.output")


@pytest.mark.parametrize(("name", "meaning"), [
    ("logp_old", "old_logprobs"), ("old_policy_logprobs", "old_logprobs"), ("lp_ref", "ref_logprobs"),
    ("ref_policy_token_logps", "ref_logprobs"), ("gen_lp", "rollout_logprobs"), ("logprobs_new", "policy_logprobs"),
    ("tok_logp", "policy_logprobs"), ("forward.old_logp", "forward.old_logprobs"), ("lp", "lp"),
    ("mean_logp", "mean_logp"), ("policy_chosen_logps", "policy_chosen_logps"),
    ("sampling_logp_difference", "sampling_logp_difference"), ("rollout_ref_logps", "rollout_ref_logps"),
])  # fmt: skip
def test_the_words_of_a_log_probabilitys_name_say_whose_it_is(name: str, meaning: str) -> None:
    assert naming.canonical(name) == meaning


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("model.embed_tokens.weight", True), ("layers.0.attn.wq", True), ("norm.bias", True), ("grad_norm", False),
        ("grad.norm.weight", False), ("layers.0.mlp.output", False), ("loss", False), ("norm", False),
    ],
)  # fmt: skip
def test_a_parameters_own_name_is_dotted_and_says_nothing_else(name: str, is_one: bool) -> None:
    assert naming.is_parameter(name) is is_one
