"""What opening each fixture of tensors answers: dialect, records per stage, canonical fields with shape and alignment.

Shapes are what the framework's own reader gives; `torch.load` and the formats' layouts are asked in
`test_tensor_fixtures.py`, so a number here is never taken from rldbg itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Expected:
    """`tensors`: canonical name -> (shape, alignment), of the first record of `stage`. `rows` of the ragged ones."""

    path: str
    dialect: str
    stages: dict[str, int]
    stage: str
    tensors: Mapping[str, tuple[Shape, Any]]
    rows: dict[str, Shape] = field(default_factory=dict)
    pads: dict[str, str] = field(default_factory=dict)


#: The 16 samples that verl, slime, SkyRL and open-instruct all recorded.
LENGTHS = (38, 38, 31, 25, 37, 31, 30, 37, 37, 29, 33, 37, 37, 26, 28, 26)
RESPONSES = (20, 20, 13, 7, 20, 14, 13, 20, 20, 12, 16, 20, 20, 9, 11, 9)
_VERL = {
    "input_ids": ((16, 44), "full"), "attention_mask": ((16, 44), "full"), "position_ids": ((16, 44), "full"),
    "response_mask": ((16, 24), "response"), "rollout_logprobs": ((16, 24), "response"), "group_id": ((16,), "sample"),
}  # fmt: skip
_VERL_TRAINED = _VERL | dict.fromkeys(
    ("old_logprobs", "ref_logprobs", "advantages", "returns", "token_rewards"), ((16, 24), "response")
)
_CRITIC = {
    "values": ((8, 47), "next"), "input_ids": ((8, 48), "full"), "attention_mask": ((8, 48), "full"),
    "response_mask": ((8, 48), "full"),
}  # fmt: skip
_NEXRL = {"trajectory": 2, "prepared_trajectories": 2, "datums": 2, "old_log_probs": 2, "forward_data": 8, "loss": 8,
          "gradient": 4, "param": 4, "training_metrics": 2}  # fmt: skip
_FORWARD = {
    "policy_logprobs": ((2, 16), "next"), "entropy": ((2, 16), "next"), "response_mask": ((2, 16), "next"),
    "input_ids": ((2, 17), "full"),
}  # fmt: skip

TABLE = [
    Expected(
        "areal/single_controller_rollout", "areal", {"trajectory": 3}, "trajectory",
        {"input_ids": ((168,), "full"), "attention_mask": ((168,), "full"), "loss_mask": ((168,), "full"),
         "rollout_logprobs": ((168,), "full"), "reward": ((12,), "sample"), "group_id": ((12,), "sample")},
        {"input_ids": (17,) * 4 + (13,) * 4 + (12,) * 4}, {"input_ids": "right"},
    ),
    Expected("verl/train_batch_step1.dp", "verl", {"batch_inputs": 1}, "batch_inputs", _VERL_TRAINED,
             pads={"prompt_ids": "left", "response_ids": "right", "input_ids": "left+right"}),
    Expected("verl/rollout_dump", "verl", {"batch_inputs": 1}, "batch_inputs", _VERL),
    Expected("faults/healthy/batch.dp", "verl", {"batch_inputs": 1}, "batch_inputs", _VERL_TRAINED),
    Expected("faults/nan_inf/batch.pt", "file", {"tensors": 1}, "tensors",
             {"input_ids": ((16, 44), "full"), "old_logprobs": ((16, 24), "response")}),
    Expected(
        "roll/rollout_mock", "roll", {"batch_inputs": 4}, "batch_inputs",
        {"input_ids": ((4, 16), "full"), "attention_mask": ((4, 16), "full"), "response_mask": ((4, 16), "full"),
         "token_rewards": ((4, 8), "response"), "reward": ((4,), "sample"), "sample_id": ((4,), "sample")},
    ),
    Expected("roll_critic/fp32_sharedhead", "roll + file", {"values": 6, "tensors": 1}, "values", _CRITIC),
    Expected("roll_critic/bf16_init0.01/padded_megatron.pt", "roll", {"values": 1}, "values", _CRITIC),
    Expected(
        "slime", "slime", {"trajectory": 2, "batch_inputs": 1}, "batch_inputs",
        {"input_ids": ((520,), "full"), "response_mask": ((244,), "response"), "old_logprobs": ((244,), "response"),
         "rollout_logprobs": ((244,), "response"), "ref_logprobs": ((244,), "response"),
         "advantages": ((244,), "response"), "sample_id": ((16,), "sample"), "reward": ((16,), "sample")},
        {"input_ids": LENGTHS, "old_logprobs": RESPONSES},
    ),
    Expected(
        "slime/rollout_data", "slime", {"trajectory": 2}, "trajectory",
        {"input_ids": ((520,), "full"), "response_mask": ((244,), "response"), "rollout_logprobs": ((244,), "response"),
         "group_id": ((16,), "sample"), "sample_id": ((16,), "sample"), "reward": ((16,), "sample")},
        {"input_ids": LENGTHS, "rollout_logprobs": RESPONSES},
    ),
    Expected(
        "skyrl", "skyrl", {"batch_inputs": 1}, "batch_inputs",
        {"input_ids": ((16, 42), "full"), "attention_mask": ((16, 42), "full"), "loss_mask": ((16, 24), "response"),
         "response_mask": ((16, 24), "response"), "old_logprobs": ((16, 24), "response"),
         "ref_logprobs": ((16, 24), "response"), "rollout_logprobs": ((16, 24), "response")},
        pads={"input_ids": "left", "rollout_logprobs": "left"},
    ),
    Expected(
        "open_instruct/packed_sequences.pt", "open_instruct", {"batch_inputs": 1}, "batch_inputs",
        {"input_ids": ((520,), "full"), "segment_ids": ((520,), "full"), "response_mask": ((520,), "full"),
         "rollout_logprobs": ((520,), "full"), "position_ids": ((520,), "full"), "sample_lengths": ((16,), None)},
        {"input_ids": (107, 123, 103, 107, 80)},
    ),
    Expected(
        "trl/base/compute_loss_step000001_micro2.pt", "trl", {"batch_inputs": 1}, "batch_inputs",
        {"input_ids": ((4, 42), "full"), "attention_mask": ((4, 42), "full"), "response_mask": ((4, 24), "response"),
         "advantages": ((4,), "sample"), "loss": ((), None)},
        pads={"prompt_ids": "left", "response_ids": "right"},
    ),
    Expected("grpo_notes/captured_1da2900_normal.pt", "grpo_notes", {"trajectory": 1}, "trajectory",
             {"sample.0.input_ids": ((8, 48), "full"), "judge.15.reward": ((8,), "sample")}),
    Expected("trl/tiny_qwen2", "weights", {"param": 1}, "param",
             {"param.embed_tokens.weight": ((345, 64), None)}),
    Expected(
        "sglang_dumper/baseline_sdpa_fp32", "sglang_dumper", {"modules": 2}, "modules",
        {"layers.0.self_attn.q_proj.inputs.0": ((1, 38, 64), "full"),
         "layers.0.self_attn.q_proj.output": ((1, 38, 64), "full"), "position_ids": ((1, 38), "full")},
    ),
    Expected("nexrl/self_hosted_fp32", "nexrl", _NEXRL, "forward_data", _FORWARD),
    Expected("nexrl/self_hosted_bf16", "nexrl", _NEXRL, "forward_data", _FORWARD),
    Expected(
        "nexrl/seedtime/pt", "nexrl",
        {"trajectory": 2, "prepared_trajectories": 2, "old_log_probs": 2, "forward_data": 4, "loss": 4}, "trajectory",
        {"input_ids": ((87,), "full"), "loss_mask": ((87,), "full"), "rollout_logprobs": ((87,), "full")},
    ),
    Expected("torch/checkpoint", "distributed checkpoint", {"param": 1}, "param",
             {"param.embed_tokens.weight": ((14, 16), None), "param.layers.0.mlp.down_proj.weight": ((16, 32), None),
              "step": ((), None)}),
    Expected("torch/fsdp1", "dtensor", {"param": 1}, "param",
             {"param.0.weight": ((5, 4), None), "param.2.bias": ((3,), None)}),
    Expected("tensordict/batch_step_7", "tensordict", {"batch_inputs": 1}, "batch_inputs",
             {"input_ids": ((3, 9), "full"), "old_logprobs": ((3, 5), "response"), "advantages": ((3, 5), "response"),
              "nested.entropy": ((3, 5), None), "group_id": ((3,), "sample"), "step": ((), None)},
             pads={"prompt_ids": "left", "response_ids": "right"}),
    Expected("transformers_debug", "transformers debugger", {"batch_inputs": 1, "modules": 1}, "modules",
             {"embed_tokens.output": ((2, 3, 16), None), "layers.0.self_attn.q_proj.output": ((2, 3, 16), None),
              "lm_head.output": ((2, 3, 14), None)}),
    Expected("torchlens/net.tlspec", "torchlens", {"modules": 1}, "modules",
             {"linear_1_1:1": ((2, 3), None), "output_1:1": ((2, 2), None)}),
]  # fmt: skip

#: Top folders, which may hold several runs or kinds: what must be among the dialects, and how many records there are.
FOLDERS = {
    "areal": ("areal", 3), "faults": ("verl", 10), "grpo_notes": ("grpo_notes", 50), "nexrl": ("nexrl", 96),
    "open_instruct": ("open_instruct", 2), "openrlhf": ("openrlhf", 22), "roll": ("roll", 4),
    "roll_critic": ("roll", 14),
    "sglang_dumper": ("sglang_dumper", 4), "skyrl": ("skyrl", 1), "slime": ("slime", 3), "verl": ("verl", 4),
}  # fmt: skip
