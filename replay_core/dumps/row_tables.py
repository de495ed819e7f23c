"""Rollout logs whose rows are samples: file name, fields and their meaning, one entry per framework.

Order matters where two could claim a file.
"""

from __future__ import annotations

from replay_core.dumps.row_dialect import RowFiles, RowSpec
from replay_core.dumps.words import Words, words

_TEXT_ONLY = "this log holds texts and scores, no token ids: it cannot be replayed"

NEMO_RL = words(
    full=(
        "token_ids=input_ids input_ids=input_ids token_loss_mask=loss_mask token_mask=loss_mask "
        "generation_logprobs=rollout_logprobs prev_logprobs=old_logprobs reference_policy_logprobs=ref_logprobs "
        "advantages=advantages"
    ),
    sample=(
        "sample_loss_mask=sample_mask input_lengths=sample_lengths rewards=reward filtered_rewards=filtered_reward "
        "content=text idx=sample_id"
    ),
)

OPEN_INSTRUCT = words(
    prompt="prompt_tokens=prompt_ids",
    response="response_tokens=response_ids logprobs=rollout_logprobs",
    sample="advantage=advantages reward=reward sample_idx=sample_id prompt_idx=group_id",
)

_PAIR = words(
    sample=(
        "prompt=prompt_text prompts=prompt_text input=prompt_text completion=response_text responses=response_text "
        "output=response_text gts=ground_truth score=reward scores=reward reward=reward advantage=advantages "
        "advantages=advantages uid=group_id request_id=sample_id"
    ),
)

AREAL: Words = {
    **_PAIR,
    "sample_idx": ("sample_id", "sample"),
    "task_id": ("group_id", "sample"),
    "seqlen": ("sample_lengths", "sample"),
    "prompt_len": ("prompt_lengths", "sample"),
}

MILES = words(
    sample=(
        "sample_index=sample_id group_index=group_id reward=reward prompt=prompt_text response_length=response_length "
        "total_length=total_length"
    ),
    full="tokens=input_ids",
    response="loss_mask=response_mask rollout_log_probs=rollout_logprobs",
)

TORCHTITAN = words(sample="rollout_id=rollout_index group_id=group_id reward=reward advantage=advantages")

SPECS = (
    RowSpec(  # its reinforcement learning experiment: the extremes of each group, turn by turn
        "torchtitan", r"/rollout_samples\.jsonl$", "is_validation group_id rollout_id reward turns", TORCHTITAN,
        distinctive=False,
        notes=("rows name no step: they stand as they were written", "the turns of a row are one text"),
    ),
    RowSpec(
        "nemo_rl", r"/(?:train|(?P<eval>val))_data_step(?P<step>\d+)\.jsonl$",
        "token_ids token_loss_mask generation_logprobs", NEMO_RL,
        stage="batch_inputs", role="actor", unwrap=True, pad="right",
        sentinels={
            "generation_logprobs": "0.0 on the prompt and on padding",
            "prev_logprobs": "0.0 at the first token",
            "token_ids": "the pad id from input_lengths on",
        },
    ),
    RowSpec(
        "nemo_rl", r"/(?:train|(?P<eval>val))_data_step(?P<step>\d+)\.jsonl$", "content rewards", NEMO_RL,
        unwrap=True, distinctive=False, notes=(_TEXT_ONLY,),
    ),
    RowSpec(
        "open_instruct", r"_rollouts_\d{6}\.jsonl$", "step sample_idx prompt_tokens response_tokens", OPEN_INSTRUCT,
        step_field="step", sentinels={"logprobs": "1.0 (INVALID_LOGPROB)"},
        notes=("sample_idx and prompt_idx count within a step",),
    ),
    RowSpec(
        "areal", r"/(?:(?P<eval>eval-)?rollout/)?(?P<step>\d+)/[^/]+\.jsonl$",
        "task_id sample_idx seqlen prompt_len head_version completion", AREAL, one_per_task=True, distinctive=False,
        notes=(_TEXT_ONLY, "the step is the folder's: the newest weight version that sampled the task"),
    ),
    RowSpec(
        "roll", r"/rollout_dump_data\.step_(?P<step>\d+)\.jsonl$|/rollout_data\.jsonl$", "responses scores", _PAIR,
        step_field="global_step", columnar=True, notes=(_TEXT_ONLY,),
    ),
    RowSpec(
        "ms_swift", r"/completions\.jsonl$", "step prompt completion", _PAIR, step_field="step", columnar=True,
        others="reward_function", notes=(_TEXT_ONLY,),
    ),
    RowSpec(  # Megatron's trainer
        "ms_swift", r"/completions\.jsonl$", "gen_step prompt completion", _PAIR, step_field="gen_step", columnar=True,
        others="reward_function", notes=(_TEXT_ONLY,),
    ),
    RowSpec(  # the driver under Ray
        "ms_swift", r"/completions\.jsonl$", "gen_step prompt completion", _PAIR, step_field="gen_step",
        distinctive=False, notes=(_TEXT_ONLY,),
    ),
    RowSpec(
        "ms_swift", r"/completions\.jsonl$", "prompt completion", _PAIR, step_field="step", distinctive=False,
        others="reward_function", notes=(_TEXT_ONLY,),
    ),
    RowSpec(
        "verl", r"/(?P<eval>val\w*/|\w*validation\w*/)?(?P<step>\d+)\.jsonl$", "input output score step", _PAIR,
        distinctive=False, notes=(_TEXT_ONLY,),
    ),
    RowSpec(
        "miles", r"/trajectory/(?P<eval>eval_)?(?P<step>\d+)\.jsonl$",
        "sample_index group_index status prompt messages", MILES, distinctive=False, notes=(_TEXT_ONLY,),
    ),
    RowSpec("miles", r"/dashboard_columns/rollout_(?P<eval>eval_)?(?P<step>\d+)\.parquet$", "", MILES),
    RowSpec("trl", r"/(?P<eval>eval\w*/)?completions_(?P<step>\d+)\.parquet$", "", _PAIR, others="reward_function",
            notes=(_TEXT_ONLY,)),
)  # fmt: skip

#: In the order they are asked; ms-swift's two forms are one dialect to the reader.
DIALECTS = tuple(RowFiles(spec).dialect for spec in SPECS)
