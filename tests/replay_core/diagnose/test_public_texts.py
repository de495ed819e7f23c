# ruff: noqa: E501 - they are the programs' own lines
"""Classes of failures as public issues show them, several of each, and what looks like one of them and is none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.replay_core.diagnose.logs import diagnosed, trl, verl, worrying

_RAY = (
    "(pid=2396579, ip=10.242.3.193, actor_id=92649a01ced83e16252d948101000000, repr=<base.WorkerDict object at 0x7f8e>)"
)
_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 13.91 GiB. GPU 0 has a total capacity of 79.11 GiB "
    "of which 8.85 GiB is free. Of the allocated memory 60.49 GiB is allocated by PyTorch, and 6.77 GiB is reserved by "
    "PyTorch but unallocated.\n"
)
_GONE = (
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n"
    "\tclass_name: create_colocated_worker_cls.<locals>.WorkerDict\n\tactor_id: 17f730ef04a3a7406b421ea101000000\n"
)
_DPO = "{{'loss': {}, 'learning_rate': 5e-05, 'rewards/chosen': {}, 'rewards/rejected': {}, 'rewards/accuracies': {}, 'rewards/margins': {}, 'logps/rejected': {}, 'logps/chosen': {}, 'epoch': 0.1}}\n"

#: What it is -> its log, and an expression that is found in the first finding's claim and cause.
SAID: dict[str, tuple[str, str]] = {
    # Out of GPU memory: of which phase.
    "Ray: actor": (f"ray.exceptions.RayTaskError(OutOfMemoryError): ray::Runner.run() {_RAY}\n  File \"/verl/trainer/main.py\", line 94, in run\n    trainer.fit()\nray.exceptions.RayTaskError(OutOfMemoryError): ray::WorkerDict.actor_rollout_update_actor() {_RAY}\n", r"out of GPU memory in the actor's update"),
    "Ray: critic": (f"ray.exceptions.RayTaskError(OutOfMemoryError): ray::WorkerDict.critic_update_critic() {_RAY}\n", r"out of GPU memory in the critic"),
    "Ray: values": (f"ray.exceptions.RayTaskError(OutOfMemoryError): ray::WorkerDict.critic_compute_values() {_RAY}\n", r"out of GPU memory in the critic"),
    "Ray: reference": (f"ray.exceptions.RayTaskError(OutOfMemoryError): ray::WorkerDict.ref_compute_ref_log_prob() {_RAY}\n", r"out of GPU memory in the forward for log-prob"),
    "Ray: NeMo-RL": (f"ray.exceptions.RayTaskError(OutOfMemoryError): ray::DTensorPolicyWorker.get_reference_policy_logprobs() {_RAY}\n", r"out of GPU memory in the forward for log-prob"),
    "Ray: OpenRLHF": (f"ray.exceptions.RayTaskError(OutOfMemoryError): ray::ActorModelRayActor.fit() {_RAY}\n", r"out of GPU memory in the actor's update"),
    "Ray: rollout": (f"ray.exceptions.RayTaskError(OutOfMemoryError): ray::WorkerDict.actor_rollout_generate_sequences() {_RAY}\n", r"out of GPU memory in the generation of rollouts"),
    "Ray: loading": (f"ray.exceptions.RayTaskError(OutOfMemoryError): ray::WorkerDict.actor_rollout_init_model() {_RAY}\n", r"out of GPU memory in loading the model"),
    "frames tell": ('  File "/verl/workers/fsdp_workers.py", line 782, in compute_log_prob\n    output, entropys = self.actor.compute_log_prob(data=data, calculate_entropy=True)\n  File "/verl/utils/torch_functional.py", line 148, in entropy_from_logits\n    entropy = torch.logsumexp(logits, dim=-1) - torch.sum(pd * logits, dim=-1)\n' + _OOM, r"asking for 13.9 GiB in the forward for log-prob.*logits of the whole vocabulary"),
    "the host, in Ray's envelope": (f"ray.exceptions.RayTaskError(OutOfMemoryError): ray::TaskRunner.run() {_RAY}\nray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n", r"out of host memory"),
    "a softmax is no attention": ('  File "/torch/nn/functional.py", line 1888, in softmax\n    ret = input.softmax(dim)\n' + _OOM, r"a softmax's copy of its input"),
    # A prompt that is longer than the data set's limit; no token left for the answer.
    "sequence_length": ("NotImplementedError: sequence_length=2310 is larger than max_length=2048\n", r"longer than data\.max_prompt_length"),
    "Prompt length": ("RuntimeError: Prompt length 1530 is longer than 1024.\n", r"longer than data\.max_prompt_length"),
    "the engine's limit": ("ValueError: Prompt length of 4178 is longer than the maximum model length of 4096.\n", r"max_model_len"),
    "max_tokens": ('  File "/vllm/sampling_params.py", line 416, in _verify_args\n    raise ValueError(\nValueError: max_tokens must be at least 1, got 0.\n', r"no token is left for the response"),
    # Servers.
    "not reachable": ("ConnectionError: The vLLM server can't be reached at 10.0.0.2:8000 after 240.0 seconds. Make sure the server is running by running `trl vllm-serve`.\n", r"no inference server answers"),
    "not up": ("".join(f"2025-03-26 05:53:{s:02} - INFO - trl.extras.vllm_client - Server is not up yet. Retrying in 2.0 seconds...\n" for s in range(1, 40, 2)), r"no inference server answers"),
    "dropped": ("requests.exceptions.ConnectionError: ('Connection aborted.', RemoteDisconnected('Remote end closed connection without response'))\n", r"closed the connection in the middle"),
    "dropped, aiohttp": ("aiohttp.client_exceptions.ServerDisconnectedError: Server disconnected\n", r"closed the connection in the middle"),
    # verl's data source.
    "data source": ('  File "/verl/utils/reward_score/__init__.py", line 106, in default_compute_score\n    raise NotImplementedError(f"...")\nNotImplementedError: Reward function is not implemented for data_source=\'my/set\'\n', r"data source of the sample"),
    # Numbers that do not go together.
    "GPUs": ("ValueError: Total available GPUs 4.0 is less than total desired GPUs 8\n", r"asks for more GPUs"),
    "NPUs": ("ValueError: Total available NPUs 8.0 is less than total desired NPUs 16\n", r"asks for more GPUs"),
    "normalised to 0": ("AssertionError: ppo_mini_batch_size 0 should be larger than 0 after normalization\n", r"do not divide"),
    "chunks": ("AssertionError: len(batch_lst) (7) != chunks (8)\n", r"do not divide"),
    "a bare assertion": ('  File "/verl/trainer/ppo/ray_trainer.py", line 311, in _validate_config\n    assert config.data.train_batch_size >= config.actor_rollout_ref.actor.ppo_mini_batch_size\nAssertionError\n', r"do not divide"),
    "another bare assertion": ('  File "/x/loss.py", line 3, in loss\n    assert mask.any()\nAssertionError\n', r"`assert mask\.any\(\)`"),
    # ZeRO-3.
    "empty in the checkpoint": ("RuntimeError: Error(s) in loading state_dict for PeftModelForCausalLM:\n        size mismatch for base_model.lora_B.default.weight: copying a param with shape torch.Size([0]) from checkpoint, the shape in current model is torch.Size([11008, 8]).\n", r"size 0"),
    "empty in the model": ("        size mismatch for summary.weight: copying a param with shape torch.Size([1, 4096]) from checkpoint, the shape in current model is torch.Size([0]).\n", r"size 0"),
    "an empty operand": ("RuntimeError: The size of tensor a (4096) must match the size of tensor b (0) at non-singleton dimension 1\n", r"size 0"),
    "sizes that differ": ("        size mismatch for lm_head.weight: copying a param with shape torch.Size([32000, 8]) from checkpoint, the shape in current model is torch.Size([32001, 8]).\n", r"not the model's"),
    # Resuming.
    "world size": ("deepspeed.runtime.zero.utils.ZeRORuntimeException: The checkpoint being loaded used a DP world size of 4 but the current world size is 2. Automatic adjustment of ZeRO's optimizer state partitioning with a new world size is not currently supported.\n", r"another number of data-parallel ranks"),
    "optimizer keys": ("RuntimeError: Missing key in checkpoint state_dict: optimizer.param_groups.lr.\n", r"optimizer's state .*lacks keys"),
    "the model's keys": ('RuntimeError: Error(s) in loading state_dict for LlamaForCausalLM:\n\tMissing key(s) in state_dict: "model.embed_tokens.weight".\n', r"checkpoint's weights are not the model's"),
    # The engine's adapters, devices, dtypes, classes.
    "LoRA rank": ("ValueError: LoRA rank 64 is greater than max_lora_rank 32.\n", r"adapter's rank is larger"),
    "two GPUs": ("RuntimeError: expected self and mask to be on the same device, but got mask on cuda:0 and self on cuda:1\n", r"two devices meet"),
    "two GPUs, as torch says it": ("RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cuda:3!\n", r"two devices meet"),
    "a raw quantised weight": ("RuntimeError: self and mat2 must have the same dtype, but got Half and Byte\n", r"quantised weight"),
    "a raw quantised weight, mat1": ("RuntimeError: mat1 and mat2 must have the same dtype, but got BFloat16 and Byte\n", r"quantised weight"),
    "two dtypes": ("RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16\n", r"two dtypes meet"),
    "FSDP's class": ("Exception: Could not find the transformer layer class to wrap in the model.\n", r"layer class that the model does not have"),
    # Workers that are gone.
    "raylet": ("(raylet) A worker died or was killed while executing a task by an unexpected system error. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop --force is called. (3) The worker is crashed unexpectedly due to SIGSEGV or other unexpected errors.\n", r"ended without a word.*does not know why"),
    "newer Ray": (_GONE + "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was killed by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed unexpectedly.\n", r"ended without a word \(WorkerDict\)"),
    "and the cause": (_GONE + "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2.\n(WorkerDict pid=7) RuntimeError: CUDA error: an illegal memory access was encountered\n", r"a kernel failed"),
    # Shapes, by the code that meets them.
    "operands": ('  File "/trl/trainer/grpo_trainer.py", line 980, in _compute_loss\n    coef_1 = torch.exp(per_token_logps - old_per_token_logps)\nRuntimeError: The size of tensor a (512) must match the size of tensor b (511) at non-singleton dimension 1\n', r"in `coef_1 = torch\.exp\(per_token_logps - old_per_token_logps\)` \(512 against 511\)"),
    "gathered": ("RuntimeError: The size of tensor a (16) must match the size of tensor b (128) at non-singleton dimension 0\n", r"128 is 8 times 16"),
    # None, mappings.
    "no logits": ('  File "/trl/models/modeling_value_head.py", line 178, in forward\n    if lm_logits.dtype != torch.float32:\nAttributeError: \'NoneType\' object has no attribute \'dtype\'\n', r"lm_logits is None.*no logits"),
    "on one line": ("File \"/x/model.py\", line 17, in forward if logits.shape[0] > 1: ^^^^ AttributeError: 'NoneType' object has no attribute 'shape'\n", r"logits is None"),
    "a dict": ("TypeError: unsupported operand type(s) for +: 'int' and 'dict'\n", r"where a number is needed"),
    "indented": ("    TypeError: type dict doesn't define __round__ method\n", r"where a number is needed"),
    # Kernels, the register center, agents, pickling.
    "an assertion of a kernel alone": ("../aten/src/ATen/native/cuda/Indexing.cu:1290: indexSelectLargeIndex: block: [56,0,0], thread: [0,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n", r"index out of range"),
    "another": ("  2%|2 | 4/300 [00:11<26:20, 5.4s/it]/pytorch/aten/src/ATen/native/cuda/ScatterGatherKernel.cu:144: operator(): block: [0,0,0], thread: [1,0,0] Assertion `idx_dim >= 0 && idx_dim < index_size && \"index out of bounds\"` failed.\n", r"index out of range"),
    "register center": ("Waiting for register center actor abc_register_center to be ready. Elapsed time: 180 seconds out of 300 seconds.\n", r"register center actor .*never came up"),
    "requeued": ("(P-1 agentlightning.server) Task rollout-85 timed out after 600.0s, requeued (attempt 1)\n" * 2, r"given out again"),
    "pickling": ("[Error] Task failed: Can't pickle <function f>: it's not the same object as custom_module.f, completion:\n", r"cannot be pickled"),
    "an exception that is cut off": ('Traceback (most recent call last):\n  File "/x/train.py", line 3, in main\n    trainer.train()\n  File "/x/trainer.py", line 30, in train\n    batch = next(data)\n', r"exception is not in the log, in `batch = next\(data\)`"),
    # Numbers.
    "KL of none": ("".join(f"{{'loss': {0.01 * n}, 'grad_norm': 0.4, 'reward': 0.4, 'reward_std': 0.2, 'kl': nan, 'epoch': 0.1}}\n" for n in (1, 2, 3)), r"kl is the first .*in every step, while loss and gradient are: the figure is broken"),
    "a mask with nothing in it": ("{'loss': 0.02, 'grad_norm': 0.4, 'reward': 0.4, 'reward_std': 0.2, 'kl': 0.1, 'clip_ratio/region_mean': nan, 'epoch': 0.1}\n", r"figure is broken.*no token"),
    "a KL that is NaN for good": ("{'loss': nan, 'grad_norm': nan, 'reward': 0.4, 'reward_std': 0.2, 'kl': nan, 'epoch': 0.1}\n", r"kl is the first metric that is not finite, at step 0 .*log-prob"),
    "weights that are NaN": ("(main_task pid=7) step:36 - critic/kl:nan - critic/vf_loss:nan - actor/entropy_loss:nan - actor/pg_loss:nan - actor/grad_norm:nan - critic/score/mean:0.000 - critic/score/max:0.000 - critic/score/min:0.000 - critic/rewards/mean:nan - critic/rewards/max:nan - critic/advantages/mean:nan - response_length/mean:1024.000 - response_length/max:1024.000 - response_length/clip_ratio:1.000\n", r"its weights are not finite"),
    "DPO's weights": (_DPO.format(0.6931, 0.0, 0.0, 0.0, 0.0, -172.1, -103.9) + _DPO.format(0.0, "nan", "nan", 0.0, "nan", "nan", "nan"), r"both responses of a pair.*update"),
    "DPO that has won": ("".join(_DPO.format(loss, 4.0, -15.0, 1.0, m, -700 - m, -600 - m) for loss, m in ((0.6, 1.0), (0.0001, 14.0), (0.0, 19.0), (0.0, 22.0))), r"over-optimised"),
    "every reward 0": ("(TaskRunner pid=1) step:4 - batch/solve_none:128.000 - batch/solve_all:0.000 - actor/pg_loss:0.000 - actor/grad_norm:0.005 - critic/score/mean:0.000 - critic/score/max:0.000 - critic/score/min:0.000 - critic/advantages/max:0.000 - critic/advantages/min:0.000\n", r"every reward is 0"),
    "KL far below 0": ("UserWarning: KL divergence is starting to become negative: -12.40 - this might be a precursor for failed training.\n", r"negative, down to -12.4"),
    "most advantages 0": ("00:27:06    INFO Detected 97/128 rollouts (gibberish=2, zero_advantage=95), enforced 95\n", r"advantage of 0"),
    # Metrics of one step over several lines.
    "broken over lines": ("{'loss': 0.0, 'grad_norm': 0.0, 'learning_rate': 3.0e-08,\n'rewards/f/mean': 3.0, 'rewards/f/std': 0.0,\n'reward': 4.0, 'reward_std': 0.0, 'frac_reward_zero_std': 1.0, 'kl': 0.0}\n", r"every advantage is 0"),
    "pretty-printed": ('"log_history": [\n' + "".join(f'    {{\n      "loss": 0.0,\n      "grad_norm": 0.0,\n      "reward": 1.0,\n      "reward_std": 0.0,\n      "frac_reward_zero_std": 1.0,\n      "step": {n}\n    }},\n' for n in (10, 20)), r"every advantage is 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_the_first_finding_names_the_cause(name: str, tmp_path: Path) -> None:
    text, words = SAID[name]
    first = diagnosed(tmp_path, text).findings[0]
    assert re.search(words, f"{first.claim} {first.cause}", re.DOTALL), first


#: What is well, or went on.
WELL: dict[str, str] = {
    "a server that comes up": "2025-03-26 05:53:13 - INFO - trl.extras.vllm_client - Server is not up yet. Retrying in 2.0 seconds...\n" * 9 + trl([{}] * 3),
    "a server that is waited for": "[INFO|trainer.py:746] 2025-03-26 05:53:13,046 >> Using auto half precision backend\n2025-03-26 05:53:15 - INFO - trl.extras.vllm_client - Server is not up yet. Retrying in 2.0 seconds...\n",
    "a register center that is waited for": "Waiting for register center actor a_register_center to be ready. Elapsed time: 30 seconds out of 300 seconds.\n",
    "and that comes up": "Waiting for register center actor a_register_center to be ready. Elapsed time: 270 seconds out of 300 seconds.\n" + verl([{}] * 3),
    "a KL that is slightly negative": "UserWarning: KL divergence is starting to become negative: -0.07 - this might be a precursor for failed training.\n",
    "a sum of entropies": "{'eps': 1, 'objective/kl': 11.07, 'objective/entropy': 101.16, 'objective/scores': 2.15, 'policy/clipfrac_avg': 0.009, 'loss/policy_avg': -0.003, 'policy/entropy_avg': 0.96, 'val/ratio': 0.97, 'lr': 7.6e-06, 'episode': 256}\n",
    "prompts that are counted": verl([{"batch/solve_none": 40.0, "batch/solve_all": 12.0}] * 8),
    "one group that is all wrong": trl([{}, {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0, "loss": 0.0, "grad_norm": 0.0, "rewards/accuracy/std": 0.0}]),
    "a margin that grows": "".join(_DPO.format(loss, 1.0, -3.0, 0.87, m, -106.0, -29.0) for loss, m in ((0.42, 3.1), (0.28, 5.6), (0.22, 7.3))),
    "the stack of a graph break": trl([{}] * 3) + 'Graph break in user code at /x/m.py:30\nUser code traceback:\n  File "/x/train.py", line 3, in main\n    trainer.train()\n  File "/x/m.py", line 30, in forward\n    print(x)\n',
    "a traceback that was caught": 'Traceback (most recent call last):\n  File "/x/judge.py", line 3, in f\n    g()\n' + trl([{}] * 3),
    "prompts that still teach": "00:27:06    INFO Detected 20/128 rollouts (gibberish=2, zero_advantage=18), enforced 18\n",
    "a configuration over lines": "{'trainer': 'ppo',\n 'kl_coef': 0.001,\n 'algorithm': {'gamma': 1.0}}\n" + verl([{}] * 3),
}  # fmt: skip


@pytest.mark.parametrize("name", WELL)
def test_what_is_well_is_not_warned_of(name: str, tmp_path: Path) -> None:
    assert worrying(diagnosed(tmp_path, WELL[name])) == []


def test_an_oom_of_a_phase_says_what_makes_it_smaller(tmp_path: Path) -> None:
    for method, words in (("ref_compute_ref_log_prob", "log_prob_micro_batch_size_per_gpu"),
                          ("actor_update_actor", "ppo_micro_batch_size_per_gpu")):  # fmt: skip
        text = f"ray.exceptions.RayTaskError(OutOfMemoryError): ray::WorkerDict.{method}() {_RAY}\n"
        assert words in diagnosed(tmp_path, text).findings[0].next_step
