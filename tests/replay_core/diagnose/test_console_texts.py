# ruff: noqa: E501 - they are the programs' own lines
"""Texts that people paste into issues: the first cause leads, and a notice alone is enough to be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from replay_core.diagnose.rules import notices
from tests.replay_core.diagnose.logs import diagnosed, trl, verl, worrying

_ABORT = (
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    "W0205 18:19:08.785000 4021 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 4086 closing signal SIGTERM\n"
    "E0205 18:19:11.534000 4021 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -6) local_rank: 1 (pid: 4087) of binary: /usr/bin/python3\n"
)
_RAY = "(WorkerDict pid=771) *** SIGABRT received at time=1751000000 on cpu 12 ***\n(WorkerDict pid=771) Fatal Python error: Aborted\n"

#: (text, words of the first claim), after public issues of pytorch, Megatron-LM, LLaMA-Factory, open-r1, TRL, verl, vLLM.
FIRST: dict[str, tuple[str, str]] = {
    "watchdog, then abort": (
        "[rank2]:[E516 06:09:16.295666043 ProcessGroupNCCL.cpp:629] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=49296, OpType=_ALLGATHER_BASE, NumelIn=192, NumelOut=576, Timeout(ms)=1800000) ran for 1800076 milliseconds before timing out.\n"
        + _ABORT,
        r"hung.*rank 2 waited",
    ),
    "abort, then watchdog": (
        _ABORT
        + "[rank1]:[E516 06:09:16.296189442 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=49296, OpType=_ALLGATHER_BASE, NumelIn=192, NumelOut=576, Timeout(ms)=1800000) ran for 1800030 milliseconds before timing out.\n",
        r"hung.*rank 1 waited",
    ),
    "the abort's own what()": (
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        "  what():  [PG 1 Rank 7] Process group watchdog thread terminated with exception: [Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=199, OpType=_REDUCE_SCATTER_BASE, NumelIn=7098994688, NumelOut=443687168, Timeout(ms)=600000) ran for 882725 milliseconds before timing out.\n"
        "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x99 (0x7ff9a0afb969 in libc10.so)\n",
        r"hung.*_REDUCE_SCATTER_BASE",
    ),
    "heartbeat, then abort": (
        "[rank144]:[E ProcessGroupNCCL.cpp:1316] [PG 0 Rank 144] Heartbeat monitor timed out! Process will be terminated after dumping debug info. workMetaList_.size()=1\n"
        + _ABORT,
        r"collective|Heartbeat",
    ),
    "watchdog stuck behind ray's abort": (
        _RAY
        + "(WorkerDict pid=771) [rank0]:[F ProcessGroupNCCL.cpp:1169] [PG 0 Rank 0] [PG 0 Rank 0] ProcessGroupNCCL's watchdog got stuck for 600 seconds without making progress in monitoring enqueued collectives.\n",
        r"collective|watchdog",
    ),
    "a CUDA error, then abort": (
        "terminate called after throwing an instance of 'c10::Error'\n"
        "  what():  CUDA error: an illegal memory access was encountered\n"
        "Aborted (core dumped)\n",
        r"kernel failed|illegal memory access",
    ),
    "an assertion of Python, then abort": (
        'Traceback (most recent call last):\n  File "/srv/train.py", line 88, in fit\n    assert batch % n == 0\n'
        "ValueError: batch size 100 is not divisible by 8\n" + _ABORT,
        r"divide",
    ),
    "an abort alone": ("terminate called after throwing an instance of 'std::runtime_error'\n", r"terminate called"),
    "a column the judge needs (TRL)": (
        '[rank2]:   File "/opt/trl/trainer/grpo_trainer.py", line 799, in _generate_and_score_completions\n'
        "[rank2]:     output_reward_func = reward_func(prompts=prompts, completions=completions, **reward_kwargs)\n"
        "[rank2]: TypeError: accuracy_reward() missing 1 required positional argument: 'solution'\n",
        r"reward function needs",
    ),
    "a column a length reward needs": (
        "[rank2]: TypeError: len_reward() missing 1 required positional argument: 'solutions'\n",
        r"reward function needs",
    ),
    "a judge of another signature": (
        "[rank1]: TypeError: format_reward_func() takes 1 positional argument but 2 were given\n",
        r"reward function is called with arguments",
    ),
    "a keyword the judge does not take": (
        "TypeError: my_reward() got an unexpected keyword argument 'completion_ids'\n",
        r"reward function is called with arguments",
    ),
    "a key of extra_info": (
        'Traceback (most recent call last):\n  File "/srv/verl/utils/reward_score/gsm8k.py", line 51, in compute_score\n'
        '    gold = extra_info["answer"]\nKeyError: \'answer\'\n',
        r"reward function needs what the sample does not have",
    ),
    "an answer the judge cannot split": (
        'Traceback (most recent call last):\n  File "/srv/rl/my_reward.py", line 12, in extract\n'
        "    return text.split('####')[1]\nIndexError: list index out of range\n",
        r"reward function raises",
    ),
    "a response that is None": (
        'Traceback (most recent call last):\n  File "/srv/rl/math_verifier.py", line 40, in grade\n'
        "    return answer.strip() == gold\nAttributeError: 'NoneType' object has no attribute 'strip'\n",
        r"reward function raises",
    ),
    "tokenizers behind a fork": (
        "huggingface/tokenizers: The current process just got forked, after parallelism has already been used. Disabling parallelism to avoid deadlocks...\n"
        "To disable this warning, you can either:\n\t- Avoid using `tokenizers` before the fork if possible\n\t- Explicitly set the environment variable TOKENIZERS_PARALLELISM=(true | false)\n"
        "Running tokenizer on dataset (num_proc=16):   0%|          | 0/250000 [1:12:40<?, ? examples/s]\n",
        r"data workers hang.*fork",
    ),
    "a map that never begins": (
        "Map (num_proc=64):   0%|          | 0/17398 [00:00<?, ? examples/s]\n"
        "Map (num_proc=64):   0%|          | 0/17398 [52:11<?, ? examples/s]\n",
        r"data workers hang",
    ),
    "one request alone (vLLM)": (
        "".join(
            f"INFO 10-03 12:{m}:11 [loggers.py:127] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 41.2 tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.9%, Prefix cache hit rate: 61.1%\n"
            for m in (40, 45, 50)
        ),
        r"one request generates alone for 10 minutes",
    ),
    "one request alone (SGLang)": (
        "".join(
            f"[2025-06-11 08:{m}:05 TP0] Decode batch. #running-req: 1, #token: 30411, token usage: 0.02, gen throughput (token/s): 92.11, #queue-req: 0\n"
            for m in (31, 34, 38)
        ),
        r"one request generates alone for 7 minutes",
    ),
    "a rate of 0 in three lines": (
        verl([{"actor/lr": 0.0, "actor/grad_norm": 0.4, "actor/pg_clipfrac": 0.0, "actor/ppo_kl": 0.0}] * 3, first=41),
        r"learning rate is 0 in all 3",
    ),
    "no answer ends in two lines": (
        trl([{"completions/mean_length": 1022.0, "completions/max_length": 1024.0, "completions/clipped_ratio": 0.99}] * 2),
        r"cut at the token limit",
    ),
    "a dump signal of another rank": (
        "[rank6]:[E327 10:12:11.1 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0 Rank 6] Received a dump signal due to a collective timeout from rank 3 and we will try our best to dump the debug info. Last enqueued NCCL work: 412, last completed NCCL work: 411.\n"
        + _ABORT,
        r"collective was never joined",
    ),
    "rewards that are None": (
        '  File "/trl/trainer/grpo_trainer.py", line 1190, in _calculate_rewards\n    rewards_per_func[:, i] = torch.tensor(output_reward_func, dtype=torch.float32, device=device)\n'
        "TypeError: must be real number, not NoneType\n",
        r"reward function does not return one number",
    ),
    "rewards of another number": (
        '  File "/trl/trainer/grpo_trainer.py", line 1190, in _calculate_rewards\n'
        "RuntimeError: The expanded size of the tensor (8) must match the existing size (4) at non-singleton dimension 0.  Target sizes: [8].  Tensor sizes: [4]\n",
        r"reward function does not return one number",
    ),
    "a split that is never generated": ("Generating train split: 0 examples [35:12, ? examples/s]\n", r"data workers hang"),
    "HCCL": (
        "RuntimeError: The Inner error is reported as above. HCCL function error: HcclAllReduce, error code is 4\n",
        r"HCCL failed",
    ),
    "a server that fails": ("Exception: Request failed: 500, Internal Server Error\n", r"server .*answered with an error"),
    "out of memory, then a wait in vain": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. GPU 3 has a total capacity of 79.11 GiB of which 1.1 GiB is free.\n"
        "[rank0]:[E1003 04:11:52 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=88124, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600022 milliseconds before timing out.\n"
        + _ABORT,
        r"memory",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FIRST)
def test_the_first_cause_leads(name: str, tmp_path: Path) -> None:
    text, words = FIRST[name]
    found = worrying(diagnosed(tmp_path, text))
    assert found
    assert re.search(words, found[0].claim, re.IGNORECASE | re.DOTALL), found


#: What is no failure, and looks like one of the above.
WELL: dict[str, str] = {
    "a warm-up from 0": trl([{"learning_rate": at * 1e-7, "clip_ratio/region_mean": 0.0} for at in range(4)]),
    "a bar that begins": "Map (num_proc=64):   0%|          | 0/17398 [00:02<?, ? examples/s]\n" + trl([{}] * 3),
    "a bar of long steps": "  0%|          | 0/400 [22:10<?, ?it/s]\n" + trl([{}] * 3),
    "one request for a minute": "".join(
        f"INFO 10-03 12:40:{s} [loggers.py:127] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 41.2 tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.9%, Prefix cache hit rate: 61.1%\n"
        for s in (11, 21, 31, 41)
    ) + trl([{}] * 3),
    "one request, and then others": "".join(
        f"INFO 10-03 12:{m}:11 [loggers.py:127] Engine 000: Avg prompt throughput: {p} tokens/s, Avg generation throughput: 41.2 tokens/s, Running: {n} reqs, Waiting: 0 reqs, GPU KV cache usage: 0.9%\n"
        for m, n, p in ((30, 1, 0.0), (34, 64, 812.0), (38, 1, 0.0), (42, 64, 900.1), (46, 1, 0.0))
    ) + trl([{}] * 3),
    "a fork alone": "huggingface/tokenizers: The current process just got forked, after parallelism has already been used. Disabling parallelism to avoid deadlocks...\n",
}  # fmt: skip


@pytest.mark.parametrize("name", WELL)
def test_what_looks_like_it_and_is_none_is_silent(name: str, tmp_path: Path) -> None:
    assert worrying(diagnosed(tmp_path, WELL[name])) == []


def test_steps_that_a_loss_scale_skips_are_no_rate_of_0(tmp_path: Path) -> None:
    steps = [{"learning_rate": 0.0, "grad_norm": float("inf")}] * 2 + [{"learning_rate": 0.0, "grad_norm": 0.4}]
    assert "L07" not in [finding.id for finding in diagnosed(tmp_path, trl(steps)).findings]


#: One line of each entry of the table, as its program prints it.
LINES = (
    "(SGLangEngine pid=1812) [2026-03-02 09:14:55 TP1] Failed to update parameter online: start out of range (expected to be in range of [-512, 512], but got 1024). The full weights of the ModelRunner are partially updated. Please discard the whole weights.\n",
    "WARNING 08-20 10:18:39 scheduler.py:1141] Sequence group 147 is preempted by PreemptionMode.RECOMPUTE mode because there is not enough KV cache space.\n",
    "INFO 10-03 12:40:11 [loggers.py:127] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 41.2 tokens/s, Running: 61 reqs, Waiting: 812 reqs, GPU KV cache usage: 99.9%, Prefix cache hit rate: 61.1%\n",
    '(SGLangEngine pid=720) [2026-01-29 06:53:43] INFO:     10.0.0.7:45400 - "POST /generate HTTP/1.1" 500 Internal Server Error\n',
    "step 201 sample: " + "!" * 60 + "\n",
    "A decoder-only architecture is being used, but right-padding was detected! For correct generation results, please set `padding_side='left'` when initializing the tokenizer.\n",
    "UserWarning: None of the inputs have requires_grad=True. Gradients will be None\n",
    "trainable params: 0 || all params: 1,543,714,304 || trainable%: 0.0000\n",
    "UserWarning: Already found a `peft_config` attribute in the model. This will lead to having multiple adapters in the model.\n",
    "Some weights of Qwen2ForCausalLM were not initialized from the model checkpoint at /ckpt and are newly initialized: ['lm_head.weight']\n",
    "You are using a model of type qwen2 to instantiate a model of type llama. This is not supported for all configurations of models and can yield errors.\n",
    "UserWarning: `do_sample` is set to `False`. However, `temperature` is set to `0.7` -- this flag is only used in sample-based generation modes.\n",
    "Token indices sequence length is longer than the specified maximum sequence length for this model (5231 > 4096). Running this sequence through the model will result in indexing errors\n",
    "WARNING:root:NaN or Inf found in input tensor.\n",
    "loss is nan, skipping\n",
    "WARN: grad_norm is not finite: nan\n",
    "grpo_loss is -0.0 and kl is -0.07\n",
    "***WARNING*** Bad grad_norm detected (grad_norm=nan)\n",
    "WARNING: tokenization mismatch: 100 vs. 101. (ignored)\n",
    "(GenerationServer pid=3496364) [2025-07-01 22:53:05] Cache not flushed because there are pending requests. #queue-req: 0, #running-req: 2\n",
    "[rank0]:[W710 16:53:50.544805244 socket.cpp:489] [c10d] waitForInput: socket SocketImpl(fd=111, addr=[localhost]:42404, remote=[::ffff:0.0.0.0]:51216) timed out after 300000ms\n",
    "WARNING 03-30 00:24:16 [_logger.py:72] Input prompt (8128 tokens) is too long and exceeds limit of 6000\n",
    "Loaded checkpoint lora.pt (missing/unexpected: _IncompatibleKeys(missing_keys=['model.embed_tokens.weight'], unexpected_keys=[]))\n",
    "UserWarning: Detected call of `lr_scheduler.step()` before `optimizer.step()`.\n",
    "node7:812:911 [1] NCCL WARN NET/IB : Got completion from peer with status=12\n",
    "[2025-01-02 10:00:00,123] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768\n",
    "The average ratio of batch (13.21) exceeds threshold 10.00. Skipping batch.\n",
    "[WARNING] [stage3.py:2069:step] 2 pytorch allocator cache flushes since last step. this happens when there is high memory pressure\n",
    "(raylet) Spilled 4122 MiB, 12 objects, write throughput 812 MiB/s.\n",
    "(raylet) file_system_monitor.cc:111: /tmp/ray/session_1 is over 95% full, available space: 21 GB; capacity: 500 GB. Object creation will fail if spilling is required.\n",
    "huggingface/tokenizers: The current process just got forked, after parallelism has already been used. Disabling parallelism to avoid deadlocks...\n",
    "You are attempting to use Flash Attention 2.0 with a model not loaded on a GPU; Flash Attention 2 only supports torch.float16 and torch.bfloat16 dtypes, but the current dype in Qwen2ForCausalLM is torch.float32.\n",
    "reward function timed out after 30 s\n",
    "❌ VERDICT: NOT LEARNING\n",
    "WARNING: could not load optimizer state from checkpoint /ckpt/iter_0000040. Only model weights are loaded.\n",
    "[rank0]: Optimizer state not found in /ckpt/global_step_40, resuming with a new optimizer\n",
    "00:27:06    INFO Detected 97/128 rollouts (gibberish=2, zero_advantage=95), enforced 95\n",
    "[Error] Task failed: Can't pickle <function f>: it's not the same object as custom_module.f, completion:\n",
    "[attempt 14] SKIP (all wrong, rewards=[0.0, 0.0, 0.0, 0.0]), drawing again\n",
    "(P-1 agentlightning.server) Task rollout-85c3 timed out after 600.0s, requeued (attempt 1)\n",
)  # fmt: skip


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_a_notice_alone_is_read_and_told(line: str, tmp_path: Path) -> None:
    assert [finding.id for finding in diagnosed(tmp_path, line).findings] == ["L29"]


def test_every_notice_of_the_table_has_its_line() -> None:
    first = [next((at for at, each in enumerate(notices._TABLE) if each.pattern.search(line)), None) for line in LINES]
    assert sorted(set(first), key=str) == sorted(range(len(notices._TABLE)), key=str)


_PREEMPTED = next(line for line in LINES if "is preempted by" in line)


def test_what_a_run_meets_once_and_goes_on_after_is_worth_knowing(tmp_path: Path) -> None:
    line = next(one for one in LINES if "over 95% full" in one)

    def severity(text: str) -> str:
        return next(one.severity for one in diagnosed(tmp_path, text).findings if one.id == "L29")

    steps = [{"reward": 0.3 + 0.02 * n % 0.4} for n in range(30)]
    assert severity(trl(steps[:5]) + line + trl(steps[5:], first=6)) == "info"
    assert severity(trl(steps) + line) == "warning"
    assert severity(trl(steps[:5]) + line * 9 + trl(steps[5:], first=6)) == "warning"


def test_an_engine_says_how_often_it_has_preempted(tmp_path: Path) -> None:
    line = _PREEMPTED.rstrip() + " total_num_cumulative_preemption=51\n"

    def severity(slower: float) -> str:
        steps = [{"step_time": 21.0 + slower * n} for n in range(30)]
        found = diagnosed(tmp_path, trl(steps[:5]) + line + trl(steps[5:], first=6)).findings
        return next(one.severity for one in found if one.id == "L29")

    assert severity(1.0) == "warning"
    assert severity(0.0) == "info"
