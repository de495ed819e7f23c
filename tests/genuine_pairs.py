"""Every pair of genuine dumps of the repository that one would hold against each other: paths in `tests/data`."""

from __future__ import annotations

QUICK = (
    ("nexrl/self_hosted_fp32", "nexrl/self_hosted_bf16"),
    ("faults/healthy/batch.pt", "faults/nan_inf/batch.pt"),
    ("faults/healthy/batch.pt", "faults/healthy/batch.dp"),
)
#: Seconds of CPU each.
LONG = (
    ("nexrl/self_hosted_fp32", "nexrl/self_hosted_fp32"),
    ("nexrl/seedtime/pt", "nexrl/seedtime/jsonl"),
    ("sglang_dumper/baseline_sdpa_fp32", "sglang_dumper/target_eager_bf16"),
    ("native/ddp", "native/fsdp2"),
    ("msprobe/a", "msprobe/b"),
    ("faults/healthy/batch.pt", "faults/temperature_mismatch/batch.pt"),
    ("faults/healthy/batch.pt", "faults/packing_contaminated/batch.pt"),
    ("faults/healthy/batch.pt", "faults/zero_std_all_groups/batch.pt"),
    ("grpo_notes/captured_1da2900_normal.pt", "grpo_notes/captured_547c4bf_normal.pt"),
    ("grpo_notes/train_1da2900_normal.log", "grpo_notes/train_547c4bf_normal.log"),
    ("roll_critic/fp32_sharedhead", "roll_critic/bf16_init0.01"),
    ("slime", "skyrl"),
    ("verl/train_batch_step1.dp", "slime"),
    ("verl", "verl"),
    ("roll", "roll"),
    ("nemo_rl", "nemo_rl"),
    ("open_instruct", "open_instruct"),
    ("prime_rl/rollouts", "prime_rl/token_exports"),
    ("trl/base", "trl/base"),
    ("openrlhf/input_dumps", "openrlhf/input_dumps"),
    ("areal/single_controller_rollout", "areal/single_controller_rollout"),
)
