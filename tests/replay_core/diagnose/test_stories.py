"""Real debugging stories: the lines as their engineers pasted them, and what is said of them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from replay_core.diagnose.finding import Finding
from tests.replay_core.diagnose.logs import diagnosed
from tui_debugger.commands.group import cli

TRL_3857 = (
    "{'loss': 0.0, 'grad_norm': 0.0, 'learning_rate': 1.7050844078611056e-06, 'num_tokens': 1751675.0, "
    "'completions/mean_length': 701.8125, 'completions/min_length': 307.0, 'completions/max_length': 1013.0, "
    "'completions/clipped_ratio': 0.0, 'rewards/if_rewrite_reward/mean': -3.0, "
    "'rewards/if_rewrite_reward/std': 5.080004692077637, 'rewards/json_format_reward/std': 0.0, 'reward': 3.0, "
    "'reward_std': 0.0, 'frac_reward_zero_std': 1.0, 'clip_ratio/region_mean': 0.0, 'epoch': 0.33}"
)
TRL_3452 = (
    "{'loss': 0.0, 'grad_norm': 0.35281938314437866, 'learning_rate': 9.958333333333333e-07, "
    "'num_tokens': 20412.0, 'completion_length': 201.5, 'rewards/correctness/mean': 0.375, "
    "'rewards/correctness/std': 0.31, 'reward': 0.375, 'reward_std': 0.2546, 'kl': 0.0, 'epoch': 0.0}"
)
SWIFT_5890 = (
    '{"loss": -0.0, "grad_norm": 0.0, "learning_rate": 3.2e-07, "reward": 0.64306641, "reward_std": 0.15570375, '
    '"frac_reward_zero_std": 0.390625, "rewards/PointwiseRMAccuracyORM/mean": 0.64306641, '
    '"rewards/PointwiseRMAccuracyORM/std": 0.40931937, "completions/clipped_ratio": 0.4375, "kl": 0.0, '
    '"global_step/max_steps": "9/547", "percentage": "1.65%", "elapsed_time": "45m 20s"}'
)
#: Pasted without its opening brace.
SWIFT_5571 = (
    "'loss': -0.0, 'grad_norm': 0.0, 'learning_rate': 2.6e-07, 'reward': 0.34375, 'reward_std': 0.4397946, "
    "'frac_reward_zero_std': 0.0, 'rewards/StructureInfoFormatReward/std': 0.43979461, 'kl': 0.0, "
    "'completions/clipped_ratio': 0.0, 'global_step/max_steps': '5/3766', 'memory(GiB)': 56.74}"
)
VERL_2626 = (
    "(TaskRunner pid=71, ip=10.0.0.2) step:120 - actor/pg_loss:-0.01 - actor/entropy:0.3 - actor/grad_norm:0.21 - "
    "critic/score/mean:0.51\n"
    "(TaskRunner pid=71, ip=10.0.0.2) step:121 - actor/pg_loss:0.02 - actor/entropy:0.31 - actor/grad_norm:nan - "
    "critic/score/mean:0.5\n"
    "(TaskRunner pid=71, ip=10.0.0.2) step:122 - actor/pg_loss:nan - actor/entropy:nan - actor/grad_norm:nan - "
    "critic/score/mean:0.0"
)
VERL_2505 = "\n".join(
    f"step:{n} - actor/pg_loss:0.00{n} - actor/grad_norm:nan - critic/score/mean:0.4" for n in range(4)
)
SLIME_OOM = (
    '  File "/root/Megatron-LM/megatron/core/transformer/module.py", line 373, in float_conversion\n'
    "    val = val.float()\n"
    "          ^^^^^^^^^^^\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 61.34 GiB. GPU 3 has a total capacity of 79.11 GiB "
    "of which 27.07 GiB is free. Process 52073 has 3.17 GiB memory in use. Process 530150 has 48.84 GiB memory in use. "
    "Of the allocated memory 44.61 GiB is allocated by PyTorch, and 410.55 MiB is reserved by PyTorch but unallocated."
)
TRL_5312 = "\n".join(
    f"{{'loss': 0.01, 'grad_norm': 0.2, 'sampling/sampling_logp_difference/mean': {value}, 'step': {step}}}"
    for step, value in enumerate((0.015, 0.02, 0.028, 0.041, 0.06, 0.082, 0.111, 0.15, 0.18, 0.201), 1)
)
RLINF_1534 = "step:1 - actor/lr:0.0 - actor/pg_clipfrac:0.046 - actor/ppo_kl:0.0012"
GRPO_NOTES = (
    "iter 0: loss 0.1235 (main 0.1235, critic 0.0000), time 21747.97ms\n"
    "iter 1: loss 0.0000 (main 0.0000, critic 0.0000), time 103634.20ms"
)
TITAN_3898 = (
    "step 1: {'train/loss': 0.1}\n"
    + "[rank0]:V0101 guards.py [__recompiles] Recompiling function forward in /w/model.py:40\n" * 3
    + "W0101 torch._dynamo hit config.recompile_limit (8)"
)

STORIES = [
    ("trl#3857", TRL_3857, "D03", "rldbg record -- "),
    ("trl#3452", TRL_3452, "D02", "reward"),
    ("ms-swift#5890", SWIFT_5890, "D23", "rldbg record --gradients . -- "),
    ("ms-swift#5571", SWIFT_5571, "D23", "rldbg record --gradients . -- "),
    ("verl#2626", VERL_2626, "D21", "rldbg record --gradients . -- "),
    ("verl#2505", VERL_2505, "D22", "rldbg record --gradients . -- "),
    ("slime#2253", SLIME_OOM, "D36", "rldbg replay DUMP --logits "),
    ("trl#5312", TRL_5312, "D12", "--against rollout_logprobs"),
    ("RLinf#1534", RLINF_1534, "D14", "rldbg replay rldbg-dump --rows-per-forward 1"),
    ("grpo notes", GRPO_NOTES, "L01", "rldbg record -- "),
    ("torchtitan#3898", TITAN_3898, "D32", "--dynamic on"),
]


@pytest.mark.parametrize(("text", "id", "step"), [row[1:] for row in STORIES], ids=[row[0] for row in STORIES])
def test_a_story_is_answered_from_what_its_engineer_had(tmp_path: Path, text: str, id: str, step: str) -> None:
    diagnosis = diagnosed(tmp_path, text + "\n")
    first = diagnosis.findings[0]
    assert first.id == id
    assert step in first.next_step
    assert first.where.line is not None


def test_a_growing_mismatch_is_stale_weights_and_its_size_downstream_of_them(tmp_path: Path) -> None:
    findings = {finding.id: finding for finding in diagnosed(tmp_path, TRL_5312).findings}
    assert findings["D12"].severity == "warning"
    assert (findings["D12"].where.step, findings["D12"].steps) == (7, (7, 8, 9, 10))
    # The size of the mismatch is what stale weights look like, no second cause.
    assert findings["D09"].downstream_of == "D12"


@pytest.mark.parametrize("text", [row[1] for row in STORIES], ids=[row[0] for row in STORIES])
def test_every_next_step_is_a_command_that_exists(tmp_path: Path, text: str) -> None:
    for finding in diagnosed(tmp_path, text).findings:
        for command in commands_of(finding):
            assert_exists(command)


def test_the_commands_that_rules_name_exist() -> None:
    folder = Path(__file__).resolve().parents[3] / "replay_core" / "diagnose" / "rules"
    seen = 0
    for file in sorted(folder.glob("*.py")):
        # Adjacent literals are one text.
        source = re.sub(r'"\s*\n\s*f?"', "", file.read_text())
        for match in re.finditer(r"rldbg [a-z]+[^\"`;,\n]*", source):
            assert_exists(match.group())
            seen += 1
    assert seen > 40


def commands_of(finding: Finding) -> list[str]:
    return re.findall(r"rldbg [a-z]+[^;,`\n]*", finding.next_step)


def assert_exists(text: str) -> None:
    """The command is one of rldbg's, and has every option that is named before its `--`."""
    words = shlex.split(text, comments=True)
    context = click.Context(cli)  # type: ignore[arg-type]
    command = cli.get_command(context, words[1])  # type: ignore[attr-defined]
    assert command is not None, f"there is no command {words[1]}: {text}"
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    for word in words[2:]:
        if word == "--":
            break
        assert not word.startswith("--") or word in known, f"{words[1]} has no {word}: {text}"
