# ruff: noqa: E501 - they are the programs' own lines
"""Lines that trainers and engines print of what they train on, each as its library words it, amid steps that are well;
and their harmless relatives.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from replay_core.diagnose.finding import SEVERITIES
from replay_core.diagnose.told_texts import MEANINGS
from replay_core.dumps.told_lines import KINDS, LINES, key_of, may_tell
from tests.replay_core.diagnose.logs import diagnosed, only, trl, verl, worrying
from tests.replay_core.diagnose.more_told_lines import MORE, OTHERS

_OURS = {"L70", "L71", "L72", "L73", "L74"}
#: What healthy runs say between their steps.
_CHATTER = (
    "(WorkerDict pid=5120) INFO 03-02 10:10:55 [loader.py:447] Loading weights took 4.11 seconds\n"
    "(raylet) [2026-03-02 10:00:12,331 I 412 901] object store has 31% in use\n"
    "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`.\n"
    "Setting `pad_token_id` to `eos_token_id`:151643 for open-end generation.\n"
    "Checkpoints found in /out/checkpoints: step_100. Resuming training from it.\n"
)

#: (line, rule, severity where it stands once at the start, severity where it is printed three times at each step, words)
_LINES: tuple[tuple[str, str, str, str, str], ...] = (
    ("(WorkerDict pid=5120) WARNING 03-02 10:10:55 [qwen2.py:520] Parameter model.layers.0.self_attn.q_proj.base_layer.weight not found in params_dict, skip loading", "L70", "warning", "error", "skips weights"),
    ("(SGLangEngine pid=13265) [2026-02-03 12:10:10 TP0] Parameter model.layers.0.mlp.experts.w13_weight not found in params_dict", "L70", "warning", "error", "params_dict"),
    ("(MegatronTrainRayActor pid=733) [2026-02-03 12:10:10] actor.py:618 - No updatable SGLang engines are running; skip weight update.", "L70", "warning", "error", "old weights"),
    ("\x1b[36m(WorkerDict pid=5120)\x1b[0m WARNING 03-02 10:10:55 [block_pool.py:291] Failed to reset prefix cache because some blocks (412) are not freed yet", "L70", "info", "warning", "prefix cache"),
    ("[2026-02-03 10:00:10] sglang_config.py:93 - Model 'actor' uses model_path='/m/Qwen3-4B-old' which differs from hf_checkpoint='/m/Qwen3-4B'. Defaulting update_weights to False. Set update_weights explicitly in the config to suppress this warning.", "L70", "warning", "warning", "another model"),
    ("10:44:12 WARNING Forced balanced routing on 48 MoE layers (debug.force_balanced_routing=True). Expert assignment is round-robin; gradient flow through the router is broken.", "L70", "warning", "warning", "router"),
    ("UserWarning: Found missing adapter keys while loading the checkpoint: ['base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight'].", "L70", "warning", "warning", "adapter"),
    ("20260402-11:10:20.112 FSDPEngine WARNING: Missing keys when loading pretrained weights: ['lm_head.weight', 'model.layers.35.mlp.down_proj.weight']", "L70", "warning", "warning", "missing in the checkpoint"),
    ("There were missing keys in the checkpoint model loaded: ['lm_head.weight', 'model.layers.3.mlp.up_proj.weight'].", "L70", "warning", "warning", "begin at random"),
    ("Some weights of the model checkpoint at /m/merged were not used when initializing Qwen2ForCausalLM: ['base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight']", "L70", "warning", "warning", "not used"),
    ("10:44:12 WARNING Randomly initializing model. Skipping loading weights from HF.", "L70", "info", "info", "random"),
    ("    will not load any checkpoints and will start from random", "L70", "info", "info", "random"),
    ("UserWarning: You are using a `task_type` that is different than `SEQ_CLS` for PEFT. This will lead to silent bugs", "L70", "warning", "warning", "score head"),
    ("Some parameters are on the meta device because they were offloaded to the cpu and disk.", "L70", "warning", "warning", "CPU or the disk"),
    ("UserWarning: Model with `tie_word_embeddings=True` and the tied_target_modules=['lm_head'] are part of the adapter.", "L70", "info", "info", "embedding"),
    ("UserWarning: Merge lora module to 4-bit linear may get different generations due to rounding errors.", "L70", "info", "info", "rounded"),
    ("10:44:12 WARNING No checkpoints found in /out/checkpoints. Starting from scratch.", "L71", "info", "warning", "none was found"),
    ("(PolicyModelActor pid=9) Warning: [deepspeed] No checkpoint found at /ckpt/_actor, skipping checkpoint loading.", "L71", "info", "warning", "begins anew"),
    ("2026-03-04 12:10:10 - WARNING - grpo_fast.py:398 - Skipping loading checkpoint state from /ckpt/state because it does not exist!", "L71", "info", "warning", "begins anew"),
    ("WARNING: could not find the metadata file /ckpt/latest_checkpointed_iteration.txt", "L71", "info", "warning", "begins anew"),
    ("[2026-03-02 10:00:00,120] [WARNING] [engine.py:2785:load_checkpoint] Unable to find latest file at /ckpt/latest, if trying to load latest checkpoint please ensure this file exists", "L71", "info", "warning", "begins anew"),
    ("[2026-03-02 10:00:00,120] [WARNING] [engine.py:2900:_get_all_ckpt_names] Client provided checkpoint load path: /ckpt/global_step10/mp_rank_00_model_states.pt does not exist", "L71", "warning", "warning", "begins anew"),
    ("(MessageQueue pid=777) Queue full, dropped sample", "L72", "info", "warning", "queue"),
    ("(AsyncRolloutRequest pid=777) Inconsistent training and inference tokenization detected. This may lead to unexpected behavior during training.", "L72", "info", "warning", "tokenised anew"),
    ("(TaskRunner pid=40213) Error processing one of the samples, skipping...", "L72", "info", "warning", "left out"),
    ("[WARNING:swift] There are errors in the template.encode, and another piece of data will be randomly selected.", "L72", "info", "warning", "replaced"),
    ("10:44:12 WARNING Only 21/512 effective traces are trainable (4.1%) — consider reviewing task difficulty", "L72", "info", "warning", "0.041"),
    ("10:44:12 WARNING Cancelled 48 train episodes past max_off_policy_steps=8. Consider increasing it to avoid this.", "L72", "info", "warning", "of them in all"),
    ("10:44:12 WARNING Trace failed in group 3f (swe-env) — SandboxError: Sandbox 9a not running", "L72", "info", "warning", "fail again"),
    ("20260402-11:10:20.112 Workflow WARNING: Agent task failed (RuntimeError: tool server 500). This trajectory will be rejected.", "L72", "info", "warning", "fail again"),
    ("Error generating response for sample 3: Request timed out", "L72", "info", "warning", "fail again"),
    ("10:44:12 WARNING Step 4: empty train batch after 128 finalized episodes (consecutive empty batches: 3/10)", "L72", "info", "error", "empty"),
    ("Dropping a rollout sample of 9311 tokens that exceeds token_budget=8192. Raise token_budget to avoid dropping samples.", "L72", "info", "warning", "limit of tokens"),
    ("[WARNING|2026-03-02 10:00:00] llamafactory.data.processor.supervised:148 >> Dropped lengthy example with length 9123 > 4096.", "L72", "info", "warning", "longer"),
    ("[WARNING|2026-03-02 10:00:00] llamafactory.data.processor.supervised:148 >> Dropped invalid example: [{'role': 'assistant', 'content': 'hi'}]", "L72", "info", "warning", "invalid"),
    ("UserWarning: Could not find response key `<|assistant|>` in the following instance: <s>[INST] hi [/INST] hello</s>. This instance will be ignored in loss calculation.", "L72", "info", "warning", "trained token"),
    ("10:44:12 WARNING Skipping example 412 because no trainable tokens were found within the context window (2048). This is to prevent NaN loss.", "L72", "info", "warning", "trained token"),
    ("(TaskRunner pid=1) WARNING rllm.engine.agentflow_engine: [task_3:1] No traces found — returning episode without token data", "L72", "info", "warning", "trained token"),
    ("Mismatch between tokenized prompt and the start of tokenized prompt+chosen. This may be due to unexpected tokenizer behavior, whitespace issues, or special token handling.", "L72", "info", "warning", "off by a token"),
    ("(AgentWorker pid=9) 2026-03-11 10:10:12.120 | WARNING  | openrlhf.utils.vlm_utils:load:102 - Only 1/2 images loaded successfully. Image placeholder tokens in the prompt may not match pixel_values.", "L72", "info", "warning", "images"),
    ("(AgentWorker pid=9) 2026-03-11 10:10:12.120 | WARNING  | openrlhf.utils.agent:execute:230 - Prompt length (5011) exceeds max_prompt_length (4096). Truncating to fit within max_length (8192) with max_tokens (4096).", "L72", "info", "warning", "are cut"),
    ("(TaskRunner pid=1) Warning: Decreasing max_tokens to 12 to stay within max_model_length", "L72", "info", "warning", "almost no token"),
    ("2026-03-04 12:10:10 - WARNING - grpo_fast.py:606 - 120 samples are dropped due to batch size 8", "L72", "info", "warning", "dropped"),
    ("2026-03-04 12:10:10 - WARNING - data_loader.py:1090 - [accumulate_inference_batches] Dropping stale result for index=412 at training_step=12: age 9 > 4", "L72", "info", "warning", "too old"),
    ("(skyrl_entrypoint pid=8123) 2026-04-02 11:10:20.112 | WARNING  | skyrl_train.utils.trainer_utils:validate_generator_output:144 - All outputs are loss masked, which may lead to NaN loss, please check your generation logic!!", "L72", "warning", "error", "masked"),
    ("(AsyncVLLMInferenceEngine pid=1308262) INFO 12-18 15:51:23 [async_llm.py:431] Aborted request chatcmpl-1f2a.", "L72", "info", "info", "aborts"),
    ("2026-03-04 12:10:10 - WARNING - data_loader.py:506 - num_samples_per_prompt_rollout is 1. This reduces GRPO to REINFORCE.", "L72", "warning", "warning", "one response per prompt"),
    ("2026-03-04 12:10:10 - WARNING - dataset_processor.py:216 - Tokenizer's pad token is the same as EOS token, this might cause the model to not learn to generate EOS tokens.", "L72", "info", "info", "end token"),
    ("The attention mask is not set and cannot be inferred from input because pad token is same as eos token.", "L72", "info", "info", "end token"),
    ("The tokenizer you are loading from '/m/Mistral-Small-3.1' with an incorrect regex pattern: https://huggingface.co. This will lead to incorrect tokenization.", "L72", "warning", "warning", "wrong pattern"),
    ("The tokenizer you are loading from '/m/Qwen3-4B' with an incorrect regex pattern: https://huggingface.co/mistralai. This will lead to incorrect tokenization.", "L72", "info", "info", "is said to"),
    ("UserWarning: All reward functions returned None for the following kwargs:", "L73", "info", "warning", "returns None"),
    ("(RolloutManager pid=91) [2026-02-03 12:10:10] __init__.py:48 - remote_rm failed after 5 attempts: ClientConnectorError(...)", "L73", "info", "warning", "failed for good"),
    ("(TaskRunner pid=1) WARNING rllm.engine: Remote task failed (session=ab12, assigning reward=0): HTTP 502", "L73", "info", "warning", "failed for good"),
    ("(RolloutManager pid=91) [2026-02-03 12:10:10] env_geo3k.py:272 - Ground truth answer missing; calc_score tool will always return 0.", "L73", "info", "warning", "ground truth"),
    ("2026-03-04 12:10:10 - WARNING - ground_truth_utils.py:1275 - No reward function found for dataset my_math. Skipping reward.", "L73", "warning", "error", "earn nothing"),
    ("2026-03-04 12:10:10 - WARNING - context_window_checker.py:241 - Truncated message content to fit judge context window", "L73", "info", "warning", "judge"),
    ("(RolloutManager pid=91) [2026-02-03 12:10:10] health_monitor.py:154 - Health check failed for rollout engine 3 (ray timeout or error). Killing actor. Exception: GetTimeoutError('Get timed out: some object(s) not ready.')", "L74", "warning", "warning", "fewer engines"),
    ("10:58:12 WARNING Trainer did not broadcast v20 within 1200s — shutting down anyway", "L74", "warning", "warning", "last weights"),
    ("The fast path is not available because one of the required library is not installed. Falling back to torch implementation.", "L74", "info", "info", "slow implementation"),
    ("UserWarning: Triton is not supported on current platform, roll back to CPU.", "L74", "warning", "warning", "slow implementation"),
    ("2026-03-02 09:58:11,120\tWARNING services.py:2155 -- WARNING: The object store is using /tmp instead of /dev/shm because /dev/shm has only 67108864 bytes available.", "L74", "info", "info", "object store"),
    ("UserWarning: Input type into Linear4bit is torch.float16, but bnb_4bit_compute_dtype=torch.float32 (default). This will lead to slow inference or training speed.", "L74", "info", "info", "float32"),
    ("Caching is incompatible with gradient checkpointing in Qwen3DecoderLayer. Setting `past_key_values=None`.", "L74", "info", "info", "not cached"),
    ("Sliding Window Attention is enabled but not implemented for `sdpa`; unexpected results may be encountered.", "L74", "info", "info", "window"),
    ("`flash-attention` package not found, consider installing for better performance: No module named 'flash_attn'.", "L74", "info", "info", "flash"),
    ("Unrecognized keys in `rope_scaling` for 'rope_type'='yarn': {'original_max_position_embeddings'}", "L74", "info", "info", "rope_scaling"),
    ("The following generation flags are not valid and may be ignored: ['temperature', 'top_p', 'top_k']. Set `TRANSFORMERS_VERBOSITY=info` for more details.", "L74", "info", "info", "ignored"),
    ("(WorkerDict pid=5120) WARNING 03-02 10:10:55 [model.py:1487] Default sampling parameters have been overridden by the model's Hugging Face generation config recommended from the model creator.", "L74", "info", "info", "generation_config"),
    ("(WorkerDict pid=5120) WARNING 03-02 10:10:55 [fused_moe.py:1073] Using default MoE config. Performance might be sub-optimal!", "L74", "info", "info", "MoE"),
    ("(WorkerDict pid=5120) WARNING 03-02 10:10:55 [custom_all_reduce.py:154] Custom allreduce is disabled because your platform lacks GPU P2P capability or P2P test failed.", "L74", "info", "info", "all-reduce"),
    ("wandb: WARNING Tried to log to step 3 that is less than the current step 5. Steps must be monotonically increasing, so this data will be ignored.", "L74", "info", "info", "leaves out"),
    ("Detected kernel version 4.18.0, which is below the recommended minimum of 5.5.0; this can cause the process to hang.", "L74", "info", "info", "kernel"),
    ("Unsloth: Dropout = 0 is supported for fast patching. You are using dropout = 0.1.", "L74", "info", "info", "dropout"),
)  # fmt: skip


_ALL = (*_LINES, *MORE)


def _each(line: str, steps: int = 8) -> str:
    return "".join(verl([{}], n) + f"{line}\n" * 3 for n in range(1, steps + 1))


@pytest.mark.parametrize(("line", "id", "once", "often", "words"), _ALL)
def test_a_line_is_told_as_its_number_deserves(
    tmp_path: Path, line: str, id: str, once: str, often: str, words: str
) -> None:
    alone = only(diagnosed(tmp_path, f"{_CHATTER}{line}\n{verl([{}] * 8)}"), id)
    assert (alone.severity, alone.where.line) == (once, 6)
    assert "before the first step" in alone.claim
    again = only(diagnosed(tmp_path, _CHATTER + _each(line)), id)
    assert again.severity == often
    assert "24 lines, from line 7 on, after step 1, the last after step 8" in again.claim
    for found in (alone, again):
        assert words in f"{found.claim} {found.cause}"
        assert found.next_step


@pytest.mark.parametrize("line", [line for line, *_ in (*_ALL, *OTHERS)])
def test_neither_case_nor_what_stands_before_matters(line: str) -> None:
    key = key_of(line)
    assert key is not None
    assert may_tell(line)
    for other in (line.upper(), f"[rank3]: {line}", f"2026-03-02T10:00:00Z | {line}"):
        assert key_of(other) == key
        assert may_tell(other)


@pytest.mark.parametrize(("line", "key"), OTHERS)
def test_other_words_for_the_same(line: str, key: str) -> None:
    assert key_of(line) == key


def test_samples_that_are_printed_are_not_looked_at_twice() -> None:
    # verl prints these of each sample: what is looked for before the patterns is in none of them.
    printed = ("[ground_truth] 42", "[prompt] user: how many are left", "[response] We skip the first", "[score] 1.0")
    assert not any(may_tell(line) for line in printed)


def test_every_row_has_its_meaning_and_a_line() -> None:
    keys = {key for key, *_ in LINES}
    assert keys == MEANINGS.keys() | {"samples.number"}
    assert keys - {"samples.number"} == {key_of(line) for line, *_ in _ALL}
    assert set(KINDS) == {f"told_{key.partition('.')[0]}" for key in keys}
    assert all(one.severity in SEVERITIES for one in MEANINGS.values())


@pytest.mark.parametrize(
    "line",
    [
        # A tied head, rotary frequencies, scales of a quantised cache, a head of another task.
        "There were missing keys in the checkpoint model loaded: ['lm_head.weight'].",
        "WARNING 03-02 10:10:55 [qwen2.py:520] Parameter model.layers.0.self_attn.rotary_emb.inv_freq not found in params_dict",
        "Some weights of the model checkpoint at /m/rm were not used when initializing Qwen2ForCausalLM: ['score.weight']",
        # Nothing is missing; heads and adapters begin so, engines get their weights from the trainer.
        "Missing keys when loading: []",
        "INFO No missing keys when loading checkpoint",
        "UserWarning: Found missing adapter keys while loading the checkpoint: [].",
        "(Critic pid=2) Randomly initializing the model's score head",
        "INFO vLLM is started with load_format dummy, skipping loading weights from disk",
        "INFO Skip weight update: policy version 4 already loaded",
        "INFO not all responses are loss masked",
        "INFO queue is full, waiting; no drops",
        "Health check failed for engine 0: starting up, retrying (1/10)",
        "remote_rm failed after 1 attempt, retrying",
        # A reference or judge that is served from a model of its own.
        "sglang_config.py:93 - Model 'ref' uses model_path='/m/judge' which differs from hf_checkpoint='/m/Qwen3-4B'.",
        "Warning: Decreasing max_tokens to 3096 to stay within max_model_length",
        "WARNING tensor:[lm_head.weight] not in state_dict, skip load",
        "INFO [metrics.py:86] SpecDecoding metrics: Mean acceptance length: 2.81, Avg Draft acceptance rate: 60.2%",
        "WARNING Casting torch.float32 to torch.bfloat16.",
        "DELTA-VERIFY sweep: params=398 mismatch_elems=0 offenders=[]",
        "  Masked 0 sequences with mult_prob_error > 1.5",
        "Skipping dataloader state restore: global_steps=100 is at an epoch boundary (steps_per_epoch=50).",
        "swe.py:473 - [swe.swebench] django__django-11099: model patch failed to apply; reward=0",
        "INFO assigning reward 0 to truncated responses",
        "[EnvMonitor] Group 3: Detected 0 hung envs: []",
        "INFO weights: 3 errors in 1000 rewards",
        "10:44:12 WARNING Only 480/512 effective traces are trainable (93.8%)",
    ],
)
def test_harmless_relatives_worry_nobody(tmp_path: Path, line: str) -> None:
    found = diagnosed(tmp_path, f"{line}\n" + _each(line))
    assert not worrying(found)
    assert not _OURS & {one.id for one in found.findings} or "trainable" in line or "mult_prob" in line


@pytest.mark.parametrize(
    "line",
    [
        "dataset len: 7473",
        "filter dataset len: 7473",
        "No checkpoint is saved in the first 100 steps",
        "Training from scratch",
        "Skipping wandb",
        "INFO weight update took 3.1 s",
        "step 3: 512/512 traces are trainable",
        "Reset prefix cache successfully",
        "0 samples dropped",
        "Queue full: 0 times",
    ],
)
def test_other_lines_say_nothing(tmp_path: Path, line: str) -> None:
    found = diagnosed(tmp_path, f"{line}\n" + _each(line)).findings
    assert not _OURS & {one.id for one in found}


@pytest.mark.parametrize(
    ("lines", "severity"),
    [
        ("dataset len: 7473\nFiltering prompts: 100%\nfilter dataset len: 212\n", "warning"),
        ("[INFO:swift] Dataset filtered, origin length: 120000, filtered dataset length: 812\n", "warning"),
        ("dataset len: 7473\nfilter dataset len: 5100\n", "info"),
        ("dataset len: 7473\nfilter dataset len: 7401\n", None),
        # The training data is whole, and the held-out data is not read as its filter.
        ("dataset len: 7473\nfilter dataset len: 7473\ndataset len: 100\nfilter dataset len: 100\n", None),
    ],
)
def test_what_a_filter_leaves_of_the_data_is_told_as_a_share(tmp_path: Path, lines: str, severity: str | None) -> None:
    found = [one for one in diagnosed(tmp_path, lines + verl([{}] * 8)).findings if one.id in _OURS]
    assert [one.severity for one in found] == ([] if severity is None else [severity])


def test_an_engine_that_is_started_again_is_worth_knowing(tmp_path: Path) -> None:
    killed = "health_monitor.py:154 - Health check failed for rollout engine 3 (ray timeout or error). Killing actor.\n"
    again = "rollout.py:305 - Recovered 1 dead rollout engines (worker_type=regular)\n"
    assert only(diagnosed(tmp_path, trl([{}] * 4) + killed + trl([{}] * 4, 5)), "L74").severity == "warning"
    found = only(diagnosed(tmp_path, trl([{}] * 4) + killed + again + trl([{}] * 4, 5)), "L74")
    assert found.severity == "info"
    assert "and was started again" in found.claim


def test_a_log_that_goes_on_from_somewhere_had_a_checkpoint(tmp_path: Path) -> None:
    line = "WARNING No checkpoints found in /out/other. Starting from scratch.\n"
    assert only(diagnosed(tmp_path, verl([{}] * 4) + line + verl([{}] * 4, 5)), "L71").severity == "warning"
    assert only(diagnosed(tmp_path, line + verl([{}] * 4, 900)), "L71").severity == "info"


def test_a_first_start_that_would_go_on_worries_nobody_and_one_from_a_step_does(tmp_path: Path) -> None:
    line = "WARNING No checkpoints found in /out/checkpoints{}. Starting from scratch.\n"
    assert only(diagnosed(tmp_path, line.format("") + verl([{}] * 4)), "L71").severity == "info"
    assert only(diagnosed(tmp_path, line.format("/step_400") + verl([{}] * 4)), "L71").severity == "warning"


def test_a_model_is_random_unless_its_entropy_says_otherwise(tmp_path: Path) -> None:
    line = "10:44:12 WARNING Randomly initializing model. Skipping loading weights from HF.\n"
    assert only(diagnosed(tmp_path, line + verl([{"actor/entropy": 11.4}] * 4)), "L70").severity == "warning"
    assert only(diagnosed(tmp_path, line + verl([{"actor/entropy": 0.4}] * 4)), "L70").severity == "info"


_DROPS = "Dropping a rollout sample of 9311 tokens that exceeds token_budget=8192.\n"


@pytest.mark.parametrize(
    ("lines", "severity"),
    [
        # One in a step of hundreds; a data set's few long examples; all of one step.
        ("".join(verl([{}], n) + _DROPS for n in range(1, 41)), "info"),
        (_DROPS * 15 + verl([{}] * 40), "info"),
        ("".join(verl([{}], n) + _DROPS * 9 for n in range(1, 41)), "warning"),
        ("".join(verl([{}], n) + "WARNING Cancelled 1 train episodes past max_off_policy_steps=8.\n"
                 for n in range(1, 41)), "info"),
        ("".join(verl([{}], n) + "grpo_fast.py:606 - 3 samples are dropped due to batch size 8\n"
                 for n in range(1, 41)), "info"),
    ],
)  # fmt: skip
def test_a_small_part_of_the_samples_is_no_warning(tmp_path: Path, lines: str, severity: str) -> None:
    assert only(diagnosed(tmp_path, lines), "L72").severity == severity


def test_lines_that_are_not_all_kept_are_no_exact_number(tmp_path: Path) -> None:
    assert (
        "(360 lines,"
        in only(diagnosed(tmp_path, "".join(verl([{}], n) + _DROPS * 9 for n in range(1, 41))), "L72").claim
    )
    assert "(over 200 lines, from line 2 on" in only(diagnosed(tmp_path, verl([{}]) + _DROPS * 250), "L72").claim


def test_two_sets_that_are_read_at_once_are_not_taken_for_one_another(tmp_path: Path) -> None:
    lines = "dataset len: 17398\ndataset len: 40000\nfilter dataset len: 17300\nfilter dataset len: 39900\n"
    assert not _OURS & {one.id for one in diagnosed(tmp_path, lines + verl([{}] * 8)).findings}


def test_an_exception_stays_one_whatever_its_words(tmp_path: Path) -> None:
    died = (
        "Traceback (most recent call last):\n"
        '  File "/w/run.py", line 4, in <module>\n    run()\n'
        "rollouts.RolloutGivenUp: rollout failed permanently\n"
    )
    assert only(diagnosed(tmp_path, verl([{}] * 8) + died), "L06").severity == "error"


def test_what_runs_beside_a_run_does_not_end_it(tmp_path: Path) -> None:
    for beside in ("tensorboard", "wandb"):
        ends = f"{verl([{}] * 8)}{beside} failed with exit code 1\n"
        assert not worrying(diagnosed(tmp_path, ends))
    assert only(diagnosed(tmp_path, f"{verl([{}] * 8)}Orchestrator failed with exit code 1\n"), "L06")


def test_several_lines_of_one_link_stand_in_one_finding(tmp_path: Path) -> None:
    two = (
        "UserWarning: Found missing adapter keys while loading the checkpoint: ['lora_A'].\n"
        "UserWarning: You are using a `task_type` that is different than `SEQ_CLS` for PEFT.\n"
    )
    found = only(diagnosed(tmp_path, two + verl([{}] * 4)), "L70")
    assert any("task_type" in str(one.value) for one in found.evidence)


@pytest.mark.parametrize(
    "line",
    [
        "ERROR grpo_fast.py:1509 - [Weight Sync Thread] Weight Sync failed",
        "(TaskRunner pid=1) ERROR verl: weight sync failed: timeout",
        "(VllmGenerationWorker pid=331005) Error in NcclExtension.update_weights_from_collective: shape mismatch",
    ],
)
def test_a_weight_update_that_failed_is_told_in_any_case(tmp_path: Path, line: str) -> None:
    assert only(diagnosed(tmp_path, f"{verl([{}] * 4)}{line}\n{verl([{}] * 4, 5)}"), "L29").severity == "error"


def test_a_server_that_loads_loses_no_responses(tmp_path: Path) -> None:
    asked = 'INFO:     10.0.0.4:41022 - "GET /health_generate HTTP/1.1" 503 Service Unavailable\n'
    lost = 'INFO:     10.0.0.4:41022 - "POST /generate HTTP/1.1" 503 Service Unavailable\n'
    assert not diagnosed(tmp_path, asked * 4 + trl([{}] * 8)).findings
    assert only(diagnosed(tmp_path, lost * 4 + trl([{}] * 8)), "L29").severity == "warning"


def test_an_engine_that_is_warmed_up_without_weights_worries_nobody(tmp_path: Path) -> None:
    line = "[2026-02-03 12:10:10 TP0] Detected errors during sampling! NaN in the logits.\n"
    assert only(diagnosed(tmp_path, line * 4 + verl([{}] * 8)), "L70").severity == "info"
    assert only(diagnosed(tmp_path, verl([{}] * 8) + line * 4), "L70").severity == "error"


def test_samples_that_lines_count_are_added_up(tmp_path: Path) -> None:
    line = "  evicted {} stale prompt group(s)\n"
    few = "".join(verl([{}], n) + line.format(1) for n in range(1, 13))
    many = "".join(verl([{}], n) + line.format(31) for n in range(1, 13))
    assert only(diagnosed(tmp_path, few), "L72").severity == "info"
    found = only(diagnosed(tmp_path, many), "L72")
    assert found.severity == "warning"
    assert "372 of them in all" in found.claim


def test_what_a_line_says_of_weights_goes_before_the_gap_that_follows(tmp_path: Path) -> None:
    line = "(Trainer pid=733) actor.py:618 - No updatable SGLang engines are running; skip weight update.\n"
    text = "".join(
        verl([{"rollout_corr/k3_kl": 0.0006 * 1.25 ** max(0, n - 15), "actor/ppo_kl": 0.0003}], n)
        + (line if n >= 15 else "")
        for n in range(1, 41)
    )
    first, *rest = diagnosed(tmp_path, text).findings
    assert (first.id, first.severity) == ("L70", "error")
    assert {one.id for one in rest if one.downstream_of == "L70"} & {"D09", "D12"}


def test_rewards_that_fail_go_before_the_reward_that_falls(tmp_path: Path) -> None:
    line = "(RewardLoopWorker pid=777) Error in math_verify compute_score: signal only works in main thread\n"
    text = "".join(
        verl([{"critic/score/mean": 0.4 + 0.002 * n if n < 15 else 0.02}], n) + (line * 4 if n >= 14 else "")
        for n in range(1, 41)
    )
    found = {one.id: one for one in diagnosed(tmp_path, text).findings}
    assert found["L73"].severity == "warning"
    assert found["L08"].downstream_of == "L73"
