"""Excerpts of logs in public issues, shortened to what tells: each is read, and says what its engineer looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.replay_core.diagnose.logs import diagnosed, worrying

_TIMEOUT = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum={}, OpType={}, Timeout(ms)=600000) ran for {}"

#: Where it stands, what it says, the id of what comes first, and what its claim must hold.
ILL = [
    (
        "trl#1447",  # KTO
        "{'loss': 1.0431, 'grad_norm': 42.09, 'rewards/rejected': 0.0, 'kl': 0.0, 'logps/chosen': -37.16, "
        "'logps/rejected': -87.62, 'epoch': 0.0}\n"
        "{'loss': nan, 'grad_norm': 41.94, 'rewards/rejected': nan, 'kl': 0.0, 'logps/chosen': -32.92, "
        "'logps/rejected': nan, 'epoch': 0.0}",
        "D21",
        "logps/rejected is the first metric that is not finite, at step 1",
    ),
    (
        "direct-preference-optimization#89",
        "train stats after 160768 examples: {'rewards_train/chosen': 'nan', 'rewards_train/margins': 'nan', "
        "'logps_train/chosen': 'nan', 'loss/train': 'nan', 'examples_per_second': '5.4876', 'grad_norm': 'nan'}",
        "L03",
        "no training metric is a finite number",
    ),
    (
        "ProRL-Agent-Server#40",
        "step 1: {'train/loss': 0.1021, 'train/pg_loss': 0.1021, 'train/grad_norm': 2955012562.82, "
        "'train/lr-pg_0': 1e-07}\n"
        "step 28: {'train/loss': 0.1451, 'train/pg_loss': 0.1451, 'train/grad_norm': 2217390918.48, "
        "'train/lr-pg_0': 1e-07}",
        "L11",
        "grad_norm is 2.59e+09 from the first step on",
    ),
    (
        "a log with thousands separators",
        "Step 12 | Time: 5.3s | Loss: 1,568,987.96 | Grad. Norm: 3.4 | Throughput: 12,345 tokens/s",
        "L11",
        "the loss is 1.57e+06 in every step",
    ),
    (
        "open-r1#704",  # a notebook's table
        "Step | Training Loss | reward | reward_std | kl | entropy\n-- | -- | -- | -- | -- | --\n"
        "1 | -0.283600 | 13.437500 | 21.810942 | nan | 0\n2 | -0.149100 | 6.931818 | 14.526671 | nan | No Log",
        "D21",
        "kl is the first metric that is not finite, at step 1",
    ),
    (
        "unsloth#2291",  # the same, pasted with tabs
        "Step\tTraining Loss\treward\treward_std\tkl\trewards / match_format_exactly\n"
        "3\t0.000000\t0.000000\t0.000000\t0.000010\t0.000000\n4\t0.000000\t0.000000\t0.000000\t0.000028\t0.000000",
        "D01",
        "all rewards of every group are equal",
    ),
    (
        "unsloth#3485",
        "{'loss': 0.0, 'grad_norm': 0.0, 'learning_rate': 3.03e-08, 'completions/mean_length': 77.5, "
        "'rewards/json_format_reward_func/std': 0.0, 'reward': 4.0, 'reward_std': 0.0, 'frac_reward_zero_std': 1.0}",
        "D01",
        "every advantage is 0",
    ),
    (
        "Awesome-ML-SYS-Tutorial#106",
        "(TaskRunner pid=87031) step:83 - actor/entropy_loss:0.317 - actor/kl_loss:0.024 - actor/pg_loss:0.000 - "
        "actor/grad_norm:0.006 - critic/score/mean:0.906 - critic/score/max:1.000 - critic/score/min:0.000 - "
        "critic/advantages/max:0.000 - critic/advantages/min:0.000 - response_length/mean:330.437",
        "D03",
        "in no group: every advantage is 0",
    ),
    (
        "nccl#1111",
        "\n".join(
            f" [E ProcessGroupNCCL.cpp:481] [Rank {rank}] "
            + _TIMEOUT.format(1559, "_REDUCE_SCATTER_BASE", "1800441 milliseconds before timing out.")
            for rank in (65, 66, 64)
        ),
        "L06",
        "hung at line 1, before the first logged step: ranks 64, 65, 66 waited 1800 s in _REDUCE_SCATTER_BASE",
    ),
    (
        "pytorch#118369",  # behind a progress bar
        "Epoch 0:   6%|#  | 32040/500150 [6:28:43, 1.37it/s, loss=2.6][E ProcessGroupNCCL.cpp:458] [Rank 0] "
        + _TIMEOUT.format(96120, "ALLREDUCE", "25624887 milliseconds before timing out.")
        + "\n[E ProcessGroupNCCL.cpp:458] [Rank 7] "
        + _TIMEOUT.format(64088, "ALLREDUCE", "25625251 milliseconds before timing out."),
        "L06",
        "ranks 0, 7 waited up to 25625 s; rank 7 is behind, in ALLREDUCE (collective 64088)",
    ),
    (
        "vllm#5484",  # behind Ray's prefix
        "(RayWorkerWrapper pid=4009) [rank1]:[E ProcessGroupNCCL.cpp:563] [Rank 1] "
        + _TIMEOUT.format(158046, "GATHER", "600027 milliseconds before timing out."),
        "L06",
        "rank 1 waited 600 s in GATHER (collective 158046) for the others",
    ),
    (
        "AnySplat#61",  # an old torch: the number behind the operation, and ms
        "[E ProcessGroupNCCL.cpp:523] Watchdog caught collective operation timeout: "
        "WorkNCCL(OpType=ALLREDUCE, SeqNum=458) ran for 1800600 ms before timing out.",
        "L06",
        "waited 1801 s in ALLREDUCE (collective 458)",
    ),
]  # fmt: skip

#: Runs whose engineers asked about something that is well.
WELL = {
    "verl#7412": "(TaskRunner pid=222265) step:34 - actor/entropy:0.2226 - actor/pg_clipfrac:0.0007 - "
    "actor/ppo_kl:-8.1e-06 - actor/pg_loss:0.0423 - actor/kl_loss:0.0013 - actor/kl_coef:0.001 - actor/loss:0.0423 - "
    "actor/grad_norm:0.1296 - actor/lr:2e-06 - critic/score/mean:-0.018 - critic/score/max:1.0 - "
    "critic/score/min:-1.0 - critic/advantages/max:1.78 - critic/advantages/min:-1.78 - response_length/mean:1267.0",
    "hongbomiao#37684": "{'objective/kl': 10.948, 'objective/entropy': 91.70, 'objective/scores': 1.92, "
    "'policy/clipfrac_avg': 0.0074, 'loss/policy_avg': -0.0051, 'loss/value_avg': 0.171, 'policy/entropy_avg': 0.888, "
    "'val/ratio': 0.971, 'lr': 7.7e-06, 'episode': 240}",
    "trl#1236": "{'loss': 0.3271, 'learning_rate': 2.85e-06, 'rewards/chosen': 9.765, 'rewards/rejected': 5.694, "
    "'rewards/accuracies': 1.0, 'rewards/margins': 4.07, 'logps/rejected': -222.7, 'logps/chosen': -379.7}",
    "a sequence's KL (KTO)": "\n".join(
        f"{{'loss': 0.4, 'grad_norm': 30.1, 'kl': {kl}, 'logps/chosen': -31.1, 'logps/rejected': -74.8}}"
        for kl in (0.0, 0.15, 0.43, 1.23, 3.1, 8.2, 12.0, 15.5, 19.0, 22.0)
    ),
    "trl#3452": "{'loss': 0.0, 'grad_norm': 0.0865, 'learning_rate': 6.9e-06, 'completion_length': 232.8, "
    "'rewards/format_reward2': 1.0, 'reward': 1.717, 'reward_std': 0.5700, 'kl': 0.0005, 'epoch': 0.31}",
}


@pytest.mark.parametrize(("text", "id", "claim"), [row[1:] for row in ILL], ids=[row[0] for row in ILL])
def test_a_log_of_a_public_issue_says_what_its_engineer_looked_for(
    text: str, id: str, claim: str, tmp_path: Path
) -> None:
    first = diagnosed(tmp_path, text + "\n").findings[0]
    assert (first.id, first.severity in ("error", "warning")) == (id, True)
    assert claim in first.claim


@pytest.mark.parametrize("text", WELL.values(), ids=WELL.keys())
def test_a_log_of_a_run_that_is_well_has_no_warning(text: str, tmp_path: Path) -> None:
    assert worrying(diagnosed(tmp_path, text + "\n")) == []


def test_ranks_in_different_collectives_at_one_place_are_told_apart(tmp_path: Path) -> None:
    lines = [
        f"[rank{rank}]:[E419 10:42:28.8 ProcessGroupNCCL.cpp:616] [Rank {rank}] "
        + _TIMEOUT.format(44, op, "600013 milliseconds before timing out.")
        for rank, op in ((7, "ALLTOALL"), (3, "ALLTOALL"), (5, "ALLREDUCE"))
    ]
    first = diagnosed(tmp_path, "\n".join(lines) + "\n").findings[0]
    assert "ranks 3, 7 called ALLTOALL; rank 5 called ALLREDUCE" in first.claim
    assert first.where.line == 1
