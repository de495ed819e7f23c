"""Every framework's names for the signals it logs: what each means, and by which formula.

d = logp_trainer - logp_rollout over trained tokens, r = e^d; ratio = e^(logp - logp_old). Where one name has different
formulas in different configurations, the formula is empty and rules that need it do not guess. Names were read in
the frameworks' sources (docs of TRL 1.16, verl 0.9, slime, OpenRLHF 0.8, NeMo-RL, prime-rl, SkyRL, AReaL, ROLL,
open-instruct, tinker-cookbook, ms-swift 3.8, NexRL 1.4).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache, lru_cache

from msgspec import Struct

from replay_core.diagnose.counted_names import COUNTS, counted
from replay_core.regexes import regex


class Name(Struct, frozen=True):
    """A framework's name of a signal. `rank` tells which of several names of one signal is preferred: the lowest."""

    signal: str
    framework: str | None = None
    formula: str = ""
    rank: int = 0


#: signal -> its names as "name framework [formula]", preferred first. `*` as framework: several use it.
_TABLE: dict[str, tuple[str, ...]] = {
    "loss": (
        "loss *", "train/loss slime", "actor/loss verl", "loss/train *",
        "final_loss SkyRL", "policy/final_loss SkyRL", "lm loss Megatron", "lm_loss Megatron", "Loss prime-rl",
        "loss/mean prime-rl", "loss/total_avg open-instruct",
    ),
    "pg_loss": (
        "pg_loss *", "actor/pg_loss verl", "train/pg_loss slime", "policy_loss OpenRLHF", "policy/policy_loss SkyRL",
        "ppo_actor/update/actor_loss AReaL", "pg OpenRLHF", "actor/policy_loss NexRL with-entropy-bonus",
        "loss/policy_avg open-instruct", "reduced_pg_loss tunix",
    ),
    "kl": (
        "kl *", "kl_loss *", "actor/kl_loss verl", "train/kl_loss slime", "policy/policy_kl SkyRL",
        "mean_kl grpo_notes k1", "kl_penalty grpo_notes k1", "objective/kl2_avg open-instruct k2",
        "objective/kl3_avg open-instruct k3", "objective/kl_avg open-instruct k1", "objective/kl1_avg open-instruct k1",
        "kl_penalty NeMo-RL", "objective/kl TRL", "actor/reward_kl_penalty verl", "critic/kl verl",
    ),
    "policy_kl": (
        "actor/ppo_kl verl k1", "train/ppo_kl slime k1", "ppo_kl OpenRLHF k1",
        "ppo_actor/update/approx_kl AReaL", "policy_kl_error NeMo-RL k3", "approx_policy_kl torchtune",
        "policy/approxkl_avg TRL",
    ),
    # Of the proximal policy and the one that sampled: no update lies between them where no sample is old.
    "behave_kl": ("ppo_actor/update/behave_approx_kl AReaL k1", "update/behave_approx_kl AReaL k1"),
    "sample_age": ("ppo_actor/update/version_stats/sample_staleness AReaL",
                   "update/version_stats/sample_staleness AReaL", "version_stats/sample_staleness AReaL"),
    "rollout_k3": (
        "rollout_corr/k3_kl verl k3", "mismatch/mismatch_k3_kl verl k3", "gen_kl_error NeMo-RL k3",
        "mismatch_kl/all/mean prime-rl k3",
        "mismatch_kl/mean prime-rl k3",
        "Mismatch KL prime-rl k3", "Generation KL Error NeMo-RL k3",
    ),
    "rollout_k1": ("rollout_corr/kl verl k1", "mismatch/mismatch_kl verl k1", "vllm_kl OpenRLHF k1",
    "optim/kl_sample_train_v1 tinker k1", "kl_sample_train_v1 tinker k1"),
    "rollout_k2": ("optim/kl_sample_train_v2 tinker k2", "kl_sample_train_v2 tinker k2"),
    "logprob_diff": (
        "sampling/sampling_logp_difference/mean TRL mean|d|", "train/train_rollout_logprob_abs_diff slime mean|d|",
        "policy/rollout_train_logprobs_abs_diff_mean SkyRL mean|d|", "mean_abs_lp_diff miles mean|d|",
        "debug/vllm_vs_local_logprob_diff_mean open-instruct mean|d|", "actor/train_infer_diff_token_mean ROLL mean|d|",
        "sampler_trainer/logp_diff_mean tunix mean|d|",
    ),
    "mult_prob_error": ("token_mult_prob_error NeMo-RL mean(e^|d|)",),
    "prob_diff": (
        "training/rollout_probs_diff_mean verl mean|e^logp-e^logp_rollout|",
        "sampler_trainer/prob_diff_mean tunix mean|e^logp-e^logp_rollout|",
    ),
    "prob_pearson": (
        "training/rollout_actor_probs_pearson_corr verl pearson", "sampler_trainer/probs_pearson_corr tunix pearson",
    ),
    "ratio_mean": ("actor/avg_ratio NexRL", "val/ratio open-instruct", "probs_ratio NeMo-RL",
                   "ppo_actor/update/importance_weight AReaL", "ratios torchtune", "is_ratio/mean tunix",
                   "actor/ratio_mean ROLL"),
    "ratio_max": ("probs_ratio_max NeMo-RL", "actor/ratio_max ROLL", "is_ratio/max tunix"),
    "clip_fraction": (
        "actor/pg_clipfrac verl", "train/pg_clipfrac slime", "clip_ratio/region_mean TRL", "policy/clip_ratio SkyRL",
        "actor/pg_clipfrac_higher *",
        "ppo_clip_ratio OpenRLHF", "policy/clipfrac_avg open-instruct", "ppo_actor/update/clip_ratio AReaL",
        "clip_ratio TRL", "pg_clipfrac *", "clip_ratio/high_mean TRL", "actor/ppo_ratio_clipfrac ROLL",
        "actor/clipfrac ROLL", "clipfrac torchtune",
    ),
    "is_weight_mean": (
        "rollout_corr/rollout_is_mean verl", "sampling/importance_sampling_ratio/mean TRL", "train/tis slime",
        "val/tis_ratio open-instruct", "ppo_actor/update/behave_imp_weight AReaL", "importance_ratio/mean prime-rl",
        "sampling_importance_ratio NeMo-RL",
    ),
    "is_weight_max": ("rollout_corr/rollout_is_max verl", "sampling/importance_sampling_ratio/max TRL"),
    "is_weight_clipped": (
        "train/tis_clipfrac slime", "val/tis_clipfrac open-instruct", "is_oob_ratio NeMo-RL",
        "rollout_corr/rollout_is_veto_fraction verl", "rollout_corr/rollout_rs_masked_fraction verl",
        "rollout_corr/rollout_is_ratio_fraction_high verl", "is_masked/mean prime-rl", "is_masked/all/mean prime-rl",
    ),
    "solve_none": ("solve_none prime-rl", "env/all/by_group/frac_all_bad tinker", "batch/solve_none prime-rl",
                   "solve_none/all/mean prime-rl",
                   "baseline_reward/pct_0 NeMo-RL"),
    "solve_all": ("solve_all prime-rl", "env/all/by_group/frac_all_good tinker", "batch/solve_all prime-rl",
                  "solve_all/all/mean prime-rl",
                  "baseline_reward/pct_1 NeMo-RL"),
    "repetition": ("rollout/repetition_frac slime",),
    "preemptions": ("vllm:num_preemptions_total *", "vllm/num_preemptions *"),
    "generated_batches": ("train/num_gen_batches verl", "num_gen_batches NeMo-RL"),
    "ess": ("rollout_corr/rollout_is_eff_sample_size verl",),
    "entropy": (
        "entropy *", "actor/entropy verl", "actor/entropy_loss verl", "train/entropy_loss slime",
        "rollout/entropy slime", "policy/policy_entropy SkyRL", "approx_entropy NeMo-RL", "entropy/all/mean prime-rl",
        "Entropy prime-rl", "H *", "ppo_actor/update/entropy AReaL", "optim/entropy tinker", 
        "policy/entropy_avg open-instruct", "mean_entropy miles", "entropy_loss *", "loss/entropy tunix",
        "critic/entropy/mean ROLL",
    ),
    "policy_logprob": ("rollout/log_probs slime",),
    "reward": (
        "reward *", "critic/score/mean verl", "critic/full-score/mean *", "critic/rewards/mean verl",
        "rollout/raw_reward slime",
        "loss/avg_final_rewards SkyRL", "reward_mean *", "rewards_mean grpo_notes", "mean_reward grpo_notes",
        "objective/scores open-instruct", "ppo/mean_scores TRL", "env/all/reward/total tinker",
        "rollout/reward OpenRLHF", "rm OpenRLHF",
        "reward/avg_raw_reward SkyRL", "objective/verifiable_reward open-instruct", "ppo_actor/task_reward AReaL",
        "rewards/reward/mean tunix", "rewards/score/mean tunix", "Reward prime-rl", "reward/all/mean prime-rl",
        "reward/mean prime-rl", "total_reward NeMo-RL", "Avg Reward NeMo-RL", "Avg Total Reward NeMo-RL", "R *",
    ),
    "reward_std": (
        "reward_std TRL within-group", "group_reward_std OpenRLHF within-group", "rewards_std grpo_notes whole-batch",
        "std_reward grpo_notes whole-batch",
    ),
    "reward_max": (
        "critic/score/max verl", "critic/full-score/max *", "critic/rewards/max verl", "rewards/reward/max tunix",
    ),
    "reward_min": (
        "critic/score/min verl", "critic/full-score/min *", "critic/rewards/min verl", "rewards/reward/min tunix",
    ),
    "frac_zero_std": ("frac_reward_zero_std TRL", "zero_std_group_frac miles", "rollout/zero_std_group_frac slime"),
    "advantage_max": (
        "critic/advantages/max verl", "ppo_actor/advantages/max AReaL", "val/advantages_max open-instruct",
        "rewards/advantage/max tunix",
    ),
    "advantage_min": (
        "critic/advantages/min verl", "ppo_actor/advantages/min AReaL", "val/advantages_min open-instruct",
        "rewards/advantage/min tunix",
    ),
    "advantage_mean": (
        "critic/advantages/mean verl", "ppo_actor/advantages AReaL", "val/advantages_mean open-instruct",
        "rewards/advantage/mean tunix", "loss/avg_raw_advantages SkyRL",
    ),
    "value_mean": ("critic/values/mean verl", "ppo/val/mean TRL", "vals OpenRLHF", "critic/values_mean SkyRL",
                   "advantages/old_values/mean tunix"),
    "value_max": ("critic/values/max verl",),
    "value_min": ("critic/values/min verl",),
    "return_mean": ("critic/returns/mean verl", "advantages/returns/mean tunix"),
    "return_max": ("critic/returns/max verl",),
    "return_min": ("critic/returns/min verl",),
    "grad_norm_clipped": ("grad_norm_clipped *",),
    "grad_norm": (
        "grad_norm *", "actor/grad_norm verl", "train/grad_norm slime", "actor_grad_norm OpenRLHF",
        "policy/grad_norm SkyRL", "optim/grad_norm open-instruct", "ppo_actor/update/grad_norm AReaL",
        "policy/raw_grad_norm SkyRL", "grad norm Megatron", "Grad. Norm prime-rl", "train/grad_norm/mean prime-rl",
        "actor_train/grad_norm ROLL", "|g| *", "||g|| *", "grad *",
    ),
    "response_length": (
        "completions/mean_length TRL", "response_length/mean verl", "rollout/response_len/mean slime",
        "response_length OpenRLHF", "glen OpenRLHF", "completion_length TRL", "response_length_mean *",
        "generate/avg_num_tokens SkyRL", "val/sequence_lengths open-instruct", "Seq. Length prime-rl",
        "mean_gen_tokens_per_sample NeMo-RL", "Mean Generation Length NeMo-RL",
        "response_lengths torchtune", "tokens/response_length/mean ROLL",
        "ppo_actor/seq_len AReaL", "env/all/ac_tokens_per_turn tinker",
        "generation/completions/mean_length tunix", "seq_len/all/mean prime-rl", "decode_len/mean prime-rl",
        "seq_len/mean prime-rl",
    ),
    "response_length_max": (
        "generate/max_num_tokens SkyRL", "val/sequence_lengths_max open-instruct", "tokens/response_length/max ROLL",
        "generation/completions/max_length tunix",
        "completions/max_length TRL", "response_length/max verl", "rollout/response_len/max slime",
    ),
    # Of these a padded width is told apart from a length: no response that is shorter than all has a mean of theirs.
    "response_length_min": (
        "generate/min_num_tokens SkyRL", "val/sequence_lengths_min open-instruct", "tokens/response_length/min ROLL",
        "generation/completions/min_length tunix", "completions/min_length TRL", "response_length/min verl",
        "rollout/response_len/min slime",
    ),
    "truncated": (
        "completions/clipped_ratio TRL", "response_length/clip_ratio verl", "rollout/truncated_ratio slime",
        "truncated OpenRLHF", "truncated_frac miles", "truncated_ratio *", "ppo_actor/no_eos_ratios AReaL",
        "generation/completions/clip_ratio tunix", "Truncated prime-rl", "Truncation prime-rl",
        "is_truncated/all/mean prime-rl", "is_truncated/mean prime-rl",
    ),
    "prompts_at_limit": ("prompt_length/clip_ratio verl",),
    "kl_coefficient": ("actor/kl_coef verl", "objective/kl_coef TRL", "actor/reward_kl_penalty_coeff verl",
                       "kl_ctl_value *", "critic/kl_coeff verl", "beta *"),
    "learning_rate": (
        "learning_rate TRL", "actor/lr verl", "train/lr-pg_0 slime", "actor_lr OpenRLHF", "act_lr OpenRLHF",
        "policy/policy_lr SkyRL",
        "lr *", "LR prime-rl", "optim/lr tinker", "learning rate Megatron",
    ),
    "weight_lag": (
        "ppo_actor/update/version_stats/sample_staleness_theta_max AReaL",
        "ppo_actor/version_stats/sample_staleness_theta_max AReaL", "version_stats/sample_staleness_theta_max AReaL",
        "Max. Off-Policy Level prime-rl", "Max Off-Policy Level prime-rl", "Max Off-Policy prime-rl",
        "off_policy_level/all/max prime-rl",
        "Off-Policy Level prime-rl", "off_policy_level/max prime-rl", "async/staleness_max SkyRL",
        "async/staleness_mean SkyRL", "avg_trajectory_age NeMo-RL", "version_diff AReaL",
        "ppo_actor/version_stats/sample_staleness_theta_avg AReaL",
        "ppo_actor/update/version_stats/sample_staleness_theta_avg AReaL",
        "version_stats/sample_staleness_theta_avg AReaL",
        "off_policy_level/mean prime-rl", "off_policy_level/all/mean prime-rl",
    ),
    "pair_kl": ("pair_kl TRL",),
    "nan_iterations": ("number of nan iterations Megatron",),
    "eos_tokens": ("val/num_eos_tokens TRL",),
    "num_masked": ("num_masked grpo_notes",),
    "masks_in_input": ("masks_in_X grpo_notes",),
    "micro_loss": ("total grpo_notes",),
    "step_seconds": (
        "step_time TRL", "timing_s/step verl", "perf/step_time slime", "timing/step SkyRL", "Time prime-rl",
        "time/step_total ROLL", "perf/global_step_time tunix", "timing/all *", "total_step_time NeMo-RL",
        "Total step time NeMo-RL",
        "time/iteration_s *",
        "time/total open-instruct",
        "timing/train/total_step_time NeMo-RL", "time/step prime-rl",
    ),
    "iter_ms": ("time_ms grpo_notes", "elapsed time per iteration (ms) Megatron"),
    "memory_gb": (
        "perf/max_memory_allocated_gb verl", "perf/max_memory_reserved_gb verl", "memory(GiB) ms-swift",
        "perf/peak_memory prime-rl", "Peak Mem. prime-rl", "memory torchtitan", "peak_memory_active torchtune",
    ),
    "tokens_per_second": (
        "perf/throughput verl", "perf/tok_per_s slime", "tokens_per_second *", "Throughput prime-rl", "tps torchtitan",
        "perf/throughput prime-rl", "perf/tokens_per_gpu_per_sec slime", "tokens_per_sec_per_gpu NeMo-RL",
        "performance/tokens_per_sec_per_gpu NeMo-RL", "learner_tokens_per_second_step open-instruct",
    ),
    "run_seconds": ("train_runtime *",),
    "mfu": ("mfu *", "perf/mfu verl", "MFU prime-rl", "perf/mfu/actor verl"),
    "explained_variance": ("critic/vf_explained_var verl", "explained_variance *", "ppo/val/var_explained TRL"),
    "value_clip_fraction": ("critic/vf_clipfrac verl", "val/clipfrac_avg TRL", "ppo/val/clipfrac TRL",
                            "values/clipfrac *", "critic/values_clipfrac SkyRL"),
    "critic_grad_norm": ("critic/grad_norm verl", "critic_grad_norm OpenRLHF"),
    "critic_learning_rate": ("critic/lr verl", "critic_lr OpenRLHF", "cri_lr OpenRLHF"),
    "value_loss": (
        "critic/vf_loss verl", "critic_loss OpenRLHF", "cri OpenRLHF", "critic/critic_loss SkyRL", "critic grpo_notes",
        "loss/value_avg TRL", "critic/loss ROLL",
    ),
}  # fmt: skip

#: Signals of which a run logs many: one series each, known by what stands in the middle.
_FAMILIES: tuple[tuple[re.Pattern[str], str, str], ...] = (
    # What a phase takes on one rank, node or worker of several.
    (regex(r"^[\w /-]+/(?:least|most) of ranks$"), "rank_range", "Megatron"),
    (
        regex(
            r"(?i)^(?=(?:.*[/_. -])?(?:times?|timings?|tim(?:e|ing)_\w+|\w+_(?:ms|s|sec|secs|seconds|time)|seconds|"
            r"latency|"
            r"duration|forward|backward|forward-backward|optimizer|all-grads-sync|[\w-]+-(?:sync|collection|backward|"
            r"forward|compute|recv|send))(?:[/_. -]|$))(?:.*[/_. -])?(?:rank|node|worker|host|gpu|actor|device)"
            r"[_ -]?\d{1,5}(?:[/_. -].*)?$|^[A-Za-z][\w /-]*/rank \d{1,5}$"
        ),
        "rank_seconds",
        "",
    ),
    (regex(r"^logits(?:_train)?/(?:chosen|rejected)(?:_sum)?$"), "pair_logits", "TRL"),
    (regex(r"^logps(?:_train)?[/_](?:chosen|rejected)(?:_sum)?$"), "pair_logps", "TRL"),
    (regex(r"^log_probs/(?:chosen|rejected)$"), "pair_logps", "torchtune"),
    (regex(r"^rewards(?:_train)?[/_](?:chosen|rejected|margins)(?:_sum)?$"), "pair_reward", "TRL"),
    (regex(r"^(?:train/)?(?:chosen|rejected|reject)_rewards?(?:_mean)?$"), "pair_reward", "OpenRLHF"),
    (
        regex(
            r"(?i)^(?:train[_/])?(?:mean[_ ])?(?:chosen|rejected|positive|negative|pos|neg|accepted|better|worse)"
            r"[_ /](?:mean[_ ])?scores?(?:[_/ ]mean)?$"
        ),
        "pair_score",
        "",
    ),
    (regex(r"^(?:reward|rollout|train|generate)/(?:avg_)?pass(?:_at_|@)(?:[2-9]|\d{2,})$"), "pass_at_k", "SkyRL"),
    (regex(r"^rewards/[^/]+/std$"), "reward_function_std", "TRL"),
    (regex(r"^(?:train/)?rewards/(?:(?!std$|mean$)[\w.-]+|[^/]+/mean)$"), "reward_function", "TRL"),
    # Of a mixture of experts' router: the loss that balances it, and the load of its busiest expert over the mean.
    (
        regex(
            r"(?i)^(?:[\w. ]+/)*(?:moe[_/ ])?(?:router[_/ ])?(?:(?:seq|global|router|moe|micro_batch)[_ ])*"
            r"(?:(?:load[_ ]balanc(?:e|ing)|aux(?:iliary)?|balanc(?:e|ing))[_ ]loss(?:[_ ]avg|[_ ]mean)?)(?:/mean)?$"
        ),
        "balance_loss",
        "",
    ),
    (
        regex(
            r"(?i)^(?:[\w. ]+/)*(?:moe[_/ ])?(?:router[_/ ])?(?:max[_ ]experts?[_ ]load(?:[_ ](?:ratio|imbalance))?"
            r"|max[_ ]load[_ ](?:ratio|imbalance)|max[_ ]?vio(?:lation)?|max[_ ]tokens[_ ]per[_ ]expert"
            r"|(?:experts?|load)[_ ](?:load[_ ])?imbalance)(?:[_/]mean)?$"
        ),
        "expert_load",
        "",
    ),
    (
        regex(
            r"(?i)^(?:[\w.]+/)*(?:(?:num|frac|fraction)_)?(?:aborted|empty)(?:_(?:response|responses|completion|completions"
            r"|samples|rollouts))?_?(?:ratio|rate|frac|fraction|share)(?:/mean)?$"
        ),
        "aborted",
        "",
    ),
    # What one environment or data set of several pays: prime-rl, tinker-cookbook.
    (regex(r"^(?!eval|val|test)[\w.@-]+/Reward$|^reward/(?!all/)[\w.@-]+/mean$"), "source_reward", "prime-rl"),
    (regex(r"^(?!eval|val|test)[\w.@-]+/(?:Ratio|share|batch_share|num_samples)$"), "source_share", ""),
    (regex(r"^env/(?!all/)[\w.@-]+/reward/total$"), "source_reward", "tinker"),
    (
        regex(r"^objective/(?!(?:verifiable|rlhf|non_score|mean|total)_)[\w.-]+_(?:correct_rate|reward)$"),
        "source_reward",
        "open-instruct",
    ),
    # Behind a room, and by what it is of: critic/score/gsm8k, rollout/raw_reward/math.
    (
        regex(
            r"^(?:critic|rollout|actor|train)/(?:raw_)?(?:rewards?|scores?)/(?!(?:\w*_)?(?:all|total|sum|mean|avg|average|"
            r"std|var|max|min|median|raw|final|count|num|zero|frac|p\d+)(?:_|/|$))[\w.@-]+$"
        ),
        "source_reward",
        "verl",
    ),
    (regex(r"^\S+/response_length_clip_ratio$"), "truncated", "slime"),
    # By role, of groups without a spread: all right, all wrong.
    (regex(r"^batch/[\w.@-]+/fractions/too_easy$"), "solve_all", "rllm"),
    (regex(r"^batch/[\w.@-]+/fractions/too_hard$"), "solve_none", "rllm"),
    (
        regex(
            r"(?i)^(?!.*(?:reward|score|acc|correct|loss))(?:[\w.]+/)*(?:curriculum\w*|curriculum/[\w/]+|(?:mean_|avg_)?difficulty\w*|task_level)$"
        ),
        "difficulty",
        "",
    ),
    (
        regex(
            r"^prompt_length/mean$|^(?:train/)?(?:mean_prompt_length|prompt_length|prompt_len)$"
            r"|^(?:\w+_actor/|rollout/|train/)?prompt_len(?:gth)?s?/(?:avg|mean)$|^\w+_actor/prompt_len(?:gth)?s?$"
        ),
        "prompt_length",
        "",
    ),
    (regex(r"^(?:\w+_actor/|rollout/|train/)?prompt_len(?:gth)?s?/max$"), "prompt_length_max", "verl"),
    (regex(r"^(?:\w+_actor/|rollout/|train/)?prompt_len(?:gth)?s?/min$"), "prompt_length_min", "verl"),
    (regex(r"^timing_s/agent_loop/num_preempted/mean$"), "preempted", "verl"),
    (regex(r"^timing_s/agent_loop/tool_calls/mean$"), "tool_seconds", "verl"),
    (regex(r"^timing_s[/_](?!step$)(?!.*_length$)(?!agent_loop/.*num_preempted).+"), "phase_seconds", "verl"),
    (regex(r"^perf/\w+_time$"), "phase_seconds", "slime"),
    (regex(r"^timing/(?!step$).+"), "phase_seconds", "SkyRL"),
    (regex(r"^time\.\w+$"), "phase_seconds", "grpo_notes"),
    (
        regex(
            r"^(?:gen|generat\w+|train\w*|rollout|sync|ref|reward|make_experience|actor|critic|logprobs?|weight_sync|"
            r"update_weights|wait|update)_(?:time|seconds|secs?)$"
            r"|^(?:t|time)_(?:gen|generat\w+|train\w*|rollout|sync|ref|reward|actor|critic|logprobs?|update)$"
        ),
        "phase_seconds",
        "OpenRLHF",
    ),
    (regex(r"^timeperf/"), "phase_seconds", "AReaL"),
    (regex(r"^time/(?!step_total$|total$|step$|total_timesteps$|iterations$|fps$).+"), "phase_seconds", "ROLL"),
    (regex(r"^(?:successes|val/format_scores|objective/verifiable_correct_rate)$"), "reward_function", ""),
    (
        regex(r"(?i)^(?:train/|optim/|fp16/|scaler/|amp/|actor/)?(?:loss|grad|gradient|scaler|amp)[_ ]?scale$"),
        "loss_scale",
        "",
    ),
    (
        # No valid_ratio: it is a share of groups that are of use, which falls as the policy gets better.
        regex(
            r"(?i)^(?:env/all/|env/|rollout/|metrics/)?(?:(?:pars(?:e|ed|ing|able)|well_formed|json|xml)"
            r"_(?:success|ok|rate|share|frac|fraction|ratio|compliance)|tags?_(?:success|ok|compliance))"
            r"(?:_rate|_frac)?(?:/mean|_mean)?$"
        ),
        "well_formed",
        "",
    ),
    (regex(r"^mem\.\w+$"), "phase_memory_mb", "grpo_notes"),
    (
        # A share of groups or a count of answers is no function that pays: all_correct, num_correct, frac_all_correct.
        regex(
            r"^(?:rewards?[/.]|critic/|rollout/|rl/|env/all/)?(?!(?:\w+_)?(?:all|none|num|n|count|frac|fraction|in)_?"
            r"(?:format|accurac|correct))\w*(?:format|accurac|correct)\w*(?:/mean)?$"
        ),
        "reward_function",
        "",
    ),
    # What a harness scores an answer by: its form to the letter, or whatever number it ends in.
    (regex(r"(?i)^(?:[\w./@ -]+[/_. -])?(?:strict|flex(?:ible)?)(?:[-_ ](?:match|extract))?$"), "held_out", ""),
)

#: What home-grown trainers call the same signals: words in any case, joined by `_`, `/`, `.`, `-` or blanks, without
#: the words of `_ROOMS` before them and of `_STATS` around them. signal -> names; a statistic but the mean has its
#: own signal.
_PLAIN: dict[str, str] = {
    "loss": "loss total_loss train_loss loss_total",
    "pg_loss": "pg_loss surr policy_loss loss_policy loss_pg loss_actor policy_gradient_loss actor_loss surrogate_loss "
    "surr_loss clip_loss ppo_loss grpo_loss act_loss",
    "kl": "kl kl_loss kl_ref ref_kl kl_to_ref kl_div kl_divergence kl_penalty kl_from_ref kl_with_ref reference_kl "
    "kl_to_reference kl_anchor anchor_kl kl_k3 k3_kl kl_per_token",
    "policy_kl": "approx_kl kl_approx ppo_kl approxkl kl_old old_kl kl_to_old approx_policy_kl",
    "value_clip_fraction": "vf_clipfrac value_clipfrac value_clip_frac vf_clip_frac value_clip_fraction "
    "critic_clipfrac",
    "clip_fraction": "clipfrac clip_frac clip_fraction pg_clipfrac clip_ratio frac_clipped clipped_fraction "
    "clipped_frac pg_clip_frac ratio_clipfrac clip_rate",
    "ratio": "ratio importance_ratio is_ratio prob_ratio",
    "entropy": "entropy ent policy_entropy token_entropy entropy_per_token",
    "reward": "reward rewards rew score scores raw_reward raw_rewards episode_reward total_reward reward_total "
    "env_reward average_reward_score reward_score total_rewards grouped_rewards",
    "frac_zero_std": "frac_zero_std zero_std_frac zero_std_group_frac zero_std_groups_frac frac_zero_std_groups "
    "zero_variance_frac frac_reward_zero_std zero_std_ratio zero_variance_groups_frac frac_groups_zero_std "
    "dead_group_frac dead_groups zero_std_fraction frac_zero_variance degenerate_group_frac",
    "advantage": "advantage advantages adv advs",
    "is_weight_mean": "tis_weight tis_ratio tis is_weight is_weights importance_weight importance_weights "
    "behave_imp_weight rollout_is rollout_is_weight",
    "is_weight_clipped": "tis_clipfrac tis_clip_frac tis_clip_fraction is_clipfrac is_clip_frac is_clip_fraction",
    "kl_coefficient": "kl_coef kl_coeff kl_coefficient kl_beta beta_kl adaptive_beta adaptive_kl_coef kl_weight",
    "preemptions": "preemptions num_preemptions preempted num_preempted preemption_count retracted_reqs",
    "kv_usage": "kv_cache_usage kv_usage gpu_cache_usage_perc kv_cache_usage_perc kv_util",
    "padding_share": "pad_frac padding_ratio pad_ratio padding_frac padding_share pad_fraction padding_fraction",
    "repetition": "repetition repetition_frac repetition_rate repetition_ratio ngram_repeat repeat_frac",
    "update_norm": "update_norm delta_norm param_delta weights_delta param_delta_norm weight_delta update_rms "
    "param_change",
    "weight_norm": "param_norm weight_norm params_norm weights_norm parameter_norm",
    "weight_version": "weight_version policy_version weights_version model_version rollout_version engine_version",
    "rollout_temperature": "temperature sampling_temperature rollout_temperature gen_temperature",
    "critic_grad_norm": "critic_grad_norm grad_norm_critic value_grad_norm vf_grad_norm grad_norm_value",
    "critic_learning_rate": "critic_lr lr_critic value_lr vf_lr",
    "grad_norm": "grad_norm gradient_norm gnorm gn grad_norm_pre_clip grad_norm_before_clip grad_norm_preclip "
    "grad_norm_unclipped global_grad_norm grad_global_norm total_grad_norm",
    "grad_norm_clipped": "grad_norm_clipped clipped_grad_norm grad_norm_after_clip grad_norm_post_clip "
    "grad_norm_postclip grad_norm_after_clipping",
    "response_length": "response_length response_len response_lengths completion_length completion_len gen_len "
    "gen_length output_length output_len resp_tokens resp_len generation_length completion_tokens response_tokens "
    "completions_length len_response resp_length generated_length len length mean_len seq_length",
    "truncated": "truncated clipped_ratio truncated_ratio truncated_frac truncation_rate frac_truncated trunc_rate "
    "trunc_frac "
    "truncation_frac truncation_ratio truncated_rate response_length_clip_ratio frac_cut response_clip_ratio "
    "truncation_fraction truncated_fraction trunc hit_limit hit_max_length reached_limit hit_cap "
    "hit_max_tokens_ratio hit_max_tokens",
    "learning_rate": "lr learning_rate lr_actor actor_lr step_size",
    "explained_variance": "explained_variance explained_var vf_explained vf_explained_var value_explained_variance "
    "value_explained_var expl_var ev",
    "value_loss": "value_loss value_mse vf_loss critic_loss v_loss value_function_loss loss_value loss_vf "
    "loss_critic loss_v cri_loss",
    "value": "value values vf_pred critic_value critic_values vpred v",
    "return": "returns return ret vf_target value_target",
    "logprob_diff": "logprob_diff logp_diff rollout_logprob_diff logprob_abs_diff rollout_logprob_abs_diff "
    "logprobs_diff train_infer_logprob_diff rollout_train_logprob_diff abs_logprob_diff train_rollout_logprob_abs_diff",
    "prob_diff": "rollout_probs_diff rollout_prob_diff probs_diff",
    "step_seconds": "dt step_time time_per_step t_step step_seconds step_time_s sec_per_step time_step "
    "seconds_per_step sec secs seconds step_sec",
    "tokens_per_second": "throughput toks_per_second tok_s tokens_per_second tokens_per_sec tok_per_sec tok_per_s "
    "toks_per_s",
    "memory_gb": "peak_memory_gb max_memory_gb memory_gb mem_gb peak_mem_gb gpu_mem_gb vram_gb",
}
_BARE = {name: signal for signal, names in _PLAIN.items() for name in names.split()}
#: (what it is of, statistic) -> signal. Those that are not here have a mean alone.
_BY_STATISTIC = {
    (base, said): f"{base}_{said}" for base in ("reward", "advantage", "value", "return") for said in ("max", "min")
} | {
    ("reward", "std"): "reward_std", ("response_length", "max"): "response_length_max",
    ("response_length", "min"): "response_length_min",
    ("ratio", "max"): "ratio_max", ("ratio", ""): "ratio_mean",
    ("advantage", "std"): "advantage_std", ("is_weight_mean", "max"): "is_weight_max",
    ("advantage", ""): "advantage_mean", ("value", ""): "value_mean", ("return", ""): "return_mean",
}  # fmt: skip


def _words(every: str) -> frozenset[str]:
    return frozenset(every.split())


_ROOMS = _words(
    "train training metrics metric actor policy rollout rollouts stats global step optim optimizer env agent "
    "ppo grpo rl rlhf opt charts info losses loss trainer update batch sampling sampler gen data model perf tokens "
    "pi game task objective generation generate learner worker algo ep episode"
)
_OF_CRITICS = _words(
    "value_loss value_clip_fraction explained_variance value return critic_grad_norm critic_learning_rate"
)
#: What a critic's update logs by the names of the policy's: ppo_critic/update/grad_norm.
_A_CRITICS_OWN = {"loss": "value_loss", "grad_norm": "critic_grad_norm", "learning_rate": "critic_learning_rate"}
_STATS = {"mean": "", "avg": "", "average": "", "max": "max", "min": "min", "std": "std", "hi": "max", "lo": "min"}
_BETWEEN = regex(r"[\s/._\-()|:%]+")


def _home_grown(raw: str) -> str | None:
    """The signal that a name of words means, whoever made it up."""
    words = [word for word in _BETWEEN.split(raw.lower()) if word]
    said = ""
    # Of `frac_zero_std` the last word is a part of the name.
    for begin in range(len(words)):
        if (whole := _BARE.get("_".join(words[begin:]))) is not None:
            return _BY_STATISTIC.get((whole, ""), whole)
        if words[begin] not in _ROOMS:
            break
    for at in (-1, 0):
        if len(words) > 1 and words[at] in _STATS:
            said = _STATS[words.pop(at)]
            break
    while words:
        signal = _BARE.get("_".join(words))
        if signal is not None:
            return _BY_STATISTIC.get((signal, said), None if said else signal)
        if words[0] == "critic":
            own = list(words[1:])
            while len(own) > 1 and own[0] in _ROOMS and "_".join(own) not in _BARE:
                own = own[1:]
            signal = _BARE.get("_".join(own))
            if len(own) < len(words) - 1 and not said:
                signal = _A_CRITICS_OWN.get(signal or "", signal)
            return _BY_STATISTIC.get((signal, said), None if said else signal) if signal in _OF_CRITICS else None
        if words[0] not in _ROOMS:
            break
        words = words[1:]
    return _by_its_words(frozenset(_BETWEEN.split(raw.lower())))


#: What two log-probabilities of one token are called whose difference is logged.
_ENGINE = _words(
    "engine rollout rollouts vllm sglang sampler sampling infer inference gen generation generator behavior"
)
_APART = _words("diff difference gap mismatch delta distance error vs abs")
_LOGPROBS = _words("logp logps logprob logprobs lp logpp log")
_SAMPLERS = _words("sample sampler sampling infer inference engine vllm sglang")
_TRAINERS = _words("train trainer training learner")
#: What makes another figure of it: a setting, a bound, a part of a loss, another network's.
_OTHERWISE = _words("coef coeff coefficient beta target loss penalty max min std sign limit scale factor decay warmup")
_OF_CRITIC = _words("critic value vf reward")
_RIGHT = _words("acc accuracy correct correctness solved success successes fmt format")
_GRADS = _words("grad grads gradient gradients")
_GROUPS = _words("group groups prompts")
_NONE = _words("zero no without dead degenerate flat uniform")
_SPREADS = _words("std spread variance var signal adv advs advantage advantages reward")
_PARTS_OF = _words("frac fraction share ratio rate pct percent percentage prop proportion")
_SAMPLED = _words("response responses resp completion completions output gen generated answer")
_OLDER = _words("lag staleness stale")
_OPTIMIZERS = _words("adam adamw sgd muon group group0 pg0 pg1 0")


def _by_its_words(words: frozenset[str]) -> str | None:
    """The signal of a name whose words leave no doubt, in whatever order they stand."""
    # `zero_std_groups` is a number of groups, `zero_std_groups_frac` a share.
    counts = words & {"num", "count", "n"} or ({"groups", "zero"} <= words and not words & _PARTS_OF)
    # Groups all of whose rewards are 0 are not all that have no spread: those that are all right have none either.
    all_wrong = {"all", "zero"} <= words and words & _SPREADS <= {"reward"}
    if words & _GROUPS and words & _NONE and words & _SPREADS and not (counts or all_wrong):
        return "frac_zero_std"
    if words & {"memory", "mem"} and words & {"gb", "gib"}:
        return "memory_gb"
    if words & _OTHERWISE:
        return None
    if "kl" in words:
        if words & _SAMPLERS and words & _TRAINERS:
            return next((f"rollout_k{n}" for n in "23" if words & {f"k{n}", f"v{n}"}), "rollout_k1")
        to_old = words & {"old", "behavior", "behaviour", "update"}
        return "policy_kl" if to_old else "kl" if words & {"ref", "reference", "base", "init", "initial"} else None
    if words & _ENGINE and words & _APART and (words & _LOGPROBS or words & {"prob", "probs"}):
        return "logprob_diff" if words & _LOGPROBS else "prob_diff"
    own = words - _ROOMS - {"", "mean", "avg", "average"}
    # Between an engine and its trainer nothing else is measured in steps than log-probabilities.
    if words & _ENGINE and words & _APART and words <= _ENGINE | _APART | {"trainer", "train", "", "mean", "avg"}:
        return "logprob_diff"
    if own & _RIGHT and own <= _RIGHT | {"rate", "ok", "answer", "answers", "reward", "rewards"}:
        return "reward_function"
    if words & _OF_CRITIC:
        return None
    if "lr" in own or {"learning", "rate"} <= own:
        return "learning_rate" if own <= {"lr", "learning", "rate"} | _OPTIMIZERS else None
    if (
        own & _GRADS
        and own & {"norm", "l2"}
        and own <= _GRADS | {"norm", "l2", "total", "global", "raw", "pre", "clip"}
    ):
        return "grad_norm" if "clip" not in own or "pre" in own else None
    if "tokens" in words and words & _SAMPLED and words & {"mean", "avg", "average"} and len(own) <= 2:
        return "response_length"
    return (
        "weight_lag" if own & _OLDER and own <= _OLDER | {"weight", "weights", "version", "steps", "engine"} else None
    )


#: Words that make of a reward or score another one than what the policy is paid: others', parts, measures, statistics.
_NOT_PAID = _words(
    "baseline random heuristic ref reference chosen rejected better worse accepted positive negative pos neg margin "
    "margins accuracy accuracies bonus clip clipped threshold best top count num n frac fraction zero time seconds "
    "model loss kl entropy format fmt length len test eval val valid validation dev held expert oracle teacher human "
    "value predicted prediction norm normalized normalised whitened advantage adv ema smoothed moving running median "
    "percentile cumulative sum delta diff improvement change gap per turn old prev previous initial f1 bleu rouge bert "
    "meteor similarity perplexity cost fn func function lr rate signal rm hacking spread pass group groups shaping "
    "p10 p25 p50 p75 p90 p95 q1 q3 lowest highest goal temperature weighted confidence ood distractor placebo "
    "timing timings latency duration elapsed ms sec secs"
)
_LOSSES = _words(
    "grpo dpo ppo rm bt pairwise preference pref simpo orpo kto ipo ranking reinforce rlhf rloo gspo cispo dapo rl "
    "training train model reward loss losses step batch running smoothed"
)


def _by_a_word(raw: str) -> str | None:
    """The signal of a name that only ends in its word: told where a run logs none under a name of its own."""
    words = [word for word in _BETWEEN.split(raw.lower()) if word not in ("", "mean", "avg", "average")]
    every = frozenset(words)
    if not words or every & _OTHERWISE - {"loss"} or _ASIDE.match(raw):
        return None
    if every & {"reward", "rewards", "score", "scores"} and not every & (_NOT_PAID | {"loss"}):
        return "reward"
    return "loss" if words[-1] in ("loss", "losses") and len(words) > 1 and every <= _LOSSES else None


#: Statistics that say nothing of what they are of: beside nothing else, and over steps, they are of the reward.
UNNAMED = {"mean": "reward", "avg": "reward", "average": "reward", "max": "reward_max", "min": "reward_min"}
#: What counts or times a row, and is no figure.
NO_FIGURE = regex(
    r"(?i)^(?:metrics\.)?(?:_\w+|step|steps|\w*_?step|epochs?|iter\w*|episodes?|batch\w*|round|update|index|idx|id|seed|rank"
    r"|time\w*|timestamp|elapsed\w*|runtime|date|relative time \(process\)|wall time)$"
)
#: The signal of a figure that is none of the known ones: shown, and not judged.
OTHER = "other"

#: The share of what is not: what ends instead of what is cut, what differs instead of what does not.
COMPLEMENT = "1 - what is logged"
_COMPLEMENTS = {
    **dict.fromkeys(
        ("val/stop_rate", "natural_termination_rate", "eos_rate", "frac_eos", "stop_rate", "finished_rate",
        "finish_rate",
         "frac_finished", "ended_rate", "eos_frac", "completion_rate"),
        "truncated",
    ),
    **dict.fromkeys(("baseline_reward/pct_mixed", "env/all/by_group/frac_mixed", "frac_mixed", "mixed_frac",
                    "frac_nonzero_std"), "frac_zero_std"),
}  # fmt: skip

#: rllm's share of groups whose rewards differ, by role.
_INFORMATIVE = regex(r"^batch/[\w.@-]+/fractions/effective$")
#: What a run pays the one role that it has: rllm logs no other reward.
OF_A_ROLE = regex(r"^reward/([\w.@-]+)/mean$")

#: AReaL and others keep the mean of a figure beside its extremes: ppo_actor/update/entropy/avg.
_AVERAGED = regex(r"/(?:avg|mean)$")
#: Its actors by algorithm, of which each logs the same names.
_ACTORS = regex(r"^(?:grpo|dapo|gspo|rloo)_actor/")
_ASIDE = regex(r"^(?:eval|val|test|validation)(?:[/_.-]|$)")
#: `Val loss`, as a console has it.
_OF_EVALUATION = regex(r"^(?i:val|valid|validation|eval|evaluation|test|held[-_ ]?out|dev)\s+(?=\S)")
#: What else an evaluation's room is called, in any case.
_EVALUATES = regex(
    r"^(?i:(?:evaluations?|evals|held[_-]?out|eval)(?=[/_.-])|dev(?=[/_-](?:acc|score|reward|pass))|(?:env|envs)/test(?=/))"
)
#: Of k answers to a prompt: eval/aime24/avg@8.
_OF_K = regex(
    r"^(?:eval|val|test|validation)(?:[/_.-].*)?[/_.-](?:(?:avg|mean|maj|majority|best|cons|pass)@|pass_?)\d{1,5}"
    r"(?:/mean)?$"
)
#: Metrics of an evaluation that tell how right the answers are.
_HELD_OUT = regex(
    r"^(?:eval|val|test|validation)(?:[/_-].*)?[/_-](?:acc|accuracy|rewards?|scores?|pass|success|correct|exact_match"
    r"|em|recall|precision|ndcg|mrr|hits?|hit_rate|auc|(?:win|solve|solved|correct)_rate)(?:[/_@-](?!std|max|min|len|loss).*)?$"
)
#: Of these, what is worse the more it is, by its last part (a data set may have such a name): that it falls is no loss.
#: Nor is a count of groups: open-instruct's val/all_zero_reward_groups.
_LESS_IS_BETTER = regex(
    r"(?i)(?:penalt|hack|repeti|toxic|refus|rejected|incorrect|wrong|unsafe|harmful|invalid|fail|error|violation"
    r"|(?:/|_|-)(?:no|gap)(?=[_-]|$)|groups?$)[^/]*(?<!acc)(?<!accuracy)$"
)
#: slime names an evaluation by its data set alone, which is told by what it logs beside it: eval/aime, and
#: eval/aime-truncated_ratio, eval/aime/response_len/mean.
OF_A_SET = regex(r"^eval/[^/\s]+$")
BESIDE_A_SET = ("-truncated_ratio", "/response_len/mean", "/response_len/median", "-pass@1")

_HELD_LOSS = regex(r"^(?:eval|val|test|validation)[/_-](?:lm_|nll_)?loss$")

#: How long its answers are in the mean, and what share of them is cut.
_HELD_LENGTH = regex(
    r"(?i)^(?:eval|val|test|validation)[/_-](?:.*[/_])?(?:(?:mean|avg|average)[_ ])?(?:(?:response|completion"
    r"|generation|output|answer|gen|sequence)s?[_/ ]?)?(?:mean_)?(?:len|length|lengths|num_tokens)"
    r"(?:[/_](?:mean|avg))?$"
)
_HELD_CUT = regex(
    r"(?i)^(?:eval|val|test|validation)[/_-](?:.*[/_-])?(?:truncat(?:ed|ion)(?:[_/](?:ratio|rate|frac|fraction|mean))?"
    r"|completions/clipped_ratio|response_length/clip_ratio|frac_truncated)$"
)

#: The order in which a step computes what it logs: the first of several broken signals is the cause.
ORDER: tuple[str, ...] = (
    "reward_function", "reward_function_std", "reward", "reward_max", "reward_min", "reward_std", "frac_zero_std",
    "response_length", "response_length_max", "response_length_min", "truncated", "value_mean", "value_max",
    "value_min", "return_mean",
    "return_max", "return_min", "advantage_mean", "advantage_max", "advantage_min", "masks_in_input",
    "num_masked", "logprob_diff", "prob_diff", "prob_pearson", "mult_prob_error", "rollout_k1", "rollout_k3", "ess",
    "entropy", "pair_logits", "pair_logps", "pair_reward", "pair_score",
    "kl", "policy_kl", "ratio_mean", "ratio_max", "clip_fraction", "pg_loss", "value_loss", "micro_loss",
    "loss", "grad_norm", "learning_rate",
)  # fmt: skip

#: Signals that measure the machine, not the training.
MACHINE = frozenset(
    {
        "step_seconds", "iter_ms", "phase_seconds", "rank_seconds", "rank_range", "phase_memory_mb", "memory_gb",
        "tokens_per_second", "mfu",
        "preemptions", "kv_usage", "padding_share", "weight_version", "rollout_temperature", "generated_batches",
        *COUNTS,
    }
)  # fmt: skip
SIGNALS: tuple[str, ...] = tuple(dict.fromkeys(
    (*_TABLE, *(signal for _, signal, _ in _FAMILIES), OTHER, "held_out", "held_out_loss", "held_out_length",
     "held_out_truncated", "kv_usage", "padding_share",
     "update_norm", "weight_norm", "weight_version", "rollout_temperature", "advantage_std", *sorted(COUNTS))
))  # fmt: skip


@cache
def _names() -> dict[str, Name]:
    known: dict[str, Name] = {}
    for signal, entries in _TABLE.items():
        for rank, entry in enumerate(entries):
            raw, framework, formula = _entry(entry)
            known.setdefault(raw, Name(signal, None if framework == "*" else framework, formula, rank))
    return known


@cache
def _flattened() -> dict[str, Name]:
    """What frameworks call their signals, with `_` for the slashes."""
    known: dict[str, Name] = {}
    for raw, name in _names().items():
        if "/" in raw:
            known.setdefault(raw.replace("/", "_"), name)
    return known


#: After every framework's own name of the signal.
_HOME_GROWN = 99
#: After all of them.
BY_A_WORD = 199
_FRAMEWORKS = (
    "*", "TRL", "tunix", "torchtune",
    "verl", "slime", "miles", "OpenRLHF", "SkyRL", "NeMo-RL", "prime-rl", "AReaL", "ROLL",
    "NexRL", "open-instruct", "tinker", "ms-swift", "grpo_notes", "Megatron", "torchtitan",
)  # fmt: skip


def _entry(text: str) -> tuple[str, str, str]:
    """`name framework formula`, where a name may hold blanks."""
    words = text.split(" ")
    at = next(i for i in range(1, len(words)) if words[i] in _FRAMEWORKS)
    return " ".join(words[:at]), words[at], " ".join(words[at + 1 :])


#: What only TRL, and those that patch it (ms-swift, Unsloth), log beside `kl`: then it is k3.
_TRL = regex(r"^(?:metrics\.)?(?:train/)?(?:completions/|rewards/|frac_reward_zero_std$|clip_ratio/)")


def is_trl(names: Iterable[str]) -> bool:
    """Whether the names that are logged together are TRL's."""
    return any(_TRL.match(name) for name in names)


#: What tells that rights and wrongs beside it are counted over prompts that are held out.
_COUNTED_HELD_OUT = regex(r"(?i)^(?:metrics\.)?(?:n|num)_eval(?:_|$)")


def is_held_out(names: Iterable[str]) -> bool:
    """Whether a bare accuracy among these names is one of held-out prompts."""
    return any(map(_COUNTED_HELD_OUT.search, names))


def is_of_pairs(names: Iterable[str]) -> bool:
    """Whether the names that are logged together are of preference pairs (DPO, KTO): their `kl` is a sequence's."""
    return any("logps/chosen" in name.lower() or "logps/rejected" in name.lower() for name in names)


@lru_cache(maxsize=4096)  # a log says the same names at every step
def named(raw: str, trl: bool = False) -> Name | None:
    """What a framework's name means; None for names of nothing known, and for metrics of an evaluation.

    `trl`: it stands among TRL's names (`is_trl`). Several frameworks log a bare `kl`, by different estimators.
    """
    raw = _EVALUATES.sub("eval", _OF_EVALUATION.sub("val/", raw))
    if _OF_K.match(raw):
        return Name("held_out")
    if raw.startswith("validation/"):
        raw = raw[:11] + raw[11:].lower()  # NeMo-RL's console heads what it prints of one: Accuracy
    if raw.startswith(("Rewards/", "Logps/", "Logits/")):
        raw = raw[0].lower() + raw[1:]  # a notebook's table capitalises its columns
    raw = raw.removeprefix("metrics.").split("@")[0]  # ROLL says how ranks are put together: actor/pg_loss@sum
    raw = _ACTORS.sub("ppo_actor/", raw)
    if trl:
        raw = raw.removeprefix("train/")  # as transformers' own TensorBoard and wandb callbacks write it
        if raw == "kl":
            return Name("kl", "TRL", "k3")
    if (found := _names().get(raw)) is not None:
        return found
    if _INFORMATIVE.match(raw):
        return Name("frac_zero_std", "rllm", COMPLEMENT)
    if (other := _COMPLEMENTS.get(raw.removeprefix("train/").removeprefix("rollout/"))) is not None:
        return Name(other, None, COMPLEMENT, _HOME_GROWN)
    bare = _AVERAGED.sub("", raw)
    if bare != raw and (found := _names().get(bare)) is not None:
        return found
    if _ASIDE.match(raw):
        if _HELD_OUT.match(raw.replace(" ", "_")):
            return None if _LESS_IS_BETTER.search(raw) else Name("held_out")
        if _HELD_LENGTH.match(raw):
            return Name("held_out_length")
        if _HELD_CUT.match(raw):
            return Name("held_out_truncated")
        return Name("held_out_loss") if _HELD_LOSS.match(raw) else None
    for pattern, signal, framework in _FAMILIES:
        if pattern.match(raw):
            return Name(signal, framework)
    for prefix in ("train/", "metrics/"):
        if raw.startswith(prefix):
            return named(raw.removeprefix(prefix), trl)
    if (count := counted(raw)) is not None:
        return Name(count)
    plain = _home_grown(raw)
    # A column's name may have lost its slashes: critic_score_mean.
    if plain is not None:
        return Name(plain, None, "", _HOME_GROWN)
    if (flat := _flattened().get(raw)) is not None:
        return flat
    word = _by_a_word(raw)
    return None if word is None else Name(word, None, "", BY_A_WORD)
