"""Every threshold of the rules over logs, from both sides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.replay_core.diagnose.logs import Metrics, diagnosed, told, trl, verl, worrying

NAN, INF = float("nan"), float("inf")


def test_healthy_runs_of_both_kinds_have_nothing_to_say(tmp_path: Path) -> None:
    for text in (trl([{}] * 30), verl([{}] * 30)):
        diagnosis = diagnosed(tmp_path, text)
        assert told(diagnosis) == []
        assert {"D01", "D03", "D09", "D20", "D21", "D24", "D25", "D29", "D37"} <= set(diagnosis.checked)


Print = Callable[..., str]


def bars(steps: list[Any]) -> str:
    """As a progress bar prints metrics behind its rate."""
    told = [", ".join(f"{name}={value:.4g}" for name, value in step.items()) for step in steps]
    return "".join(f"GRPO:  9%|▉   | {n}/90 [00:4{n % 10}<1:02:00, 22.3s/it, reward={0.4 + n % 5 / 50}, {each}]\n"
                   for n, each in enumerate(told, 1))  # fmt: skip


ROWS: list[tuple[str, Print, list[Any], tuple[str, str] | None]] = [
    # id and severity that must be told first; None: nothing of warning or worse
    ("every group equal", trl, [{"frac_reward_zero_std": 1.0, "reward_std": 0.0, "rewards/accuracy/std": 0.0}] * 3,
     ("D01", "error")),
    ("rewards differ, in no group", trl, [{"frac_reward_zero_std": 1.0, "reward_std": 0.0}] * 3, ("D03", "error")),
    ("one step in three is dead", trl, [{}, {}, {"frac_reward_zero_std": 1.0, "reward_std": 0.0}], ("D03", "warning")),
    ("one step in five is dead", trl, [{}] * 4 + [{"frac_reward_zero_std": 1.0, "reward_std": 0.0}], None),
    ("most of the groups", trl, [{"frac_reward_zero_std": 0.9}] * 3, ("D01", "warning")),
    ("just under most", trl, [{"frac_reward_zero_std": 0.89}] * 3, None),
    ("a spread that is rounding", trl, [{"frac_reward_zero_std": None, "reward_std": 0.9e-7}] * 3, ("D03", "error")),
    ("a spread that is none", trl, [{"frac_reward_zero_std": None, "reward_std": 1.2e-7}] * 3, None),
    ("nan gradient without a loss", trl, [{"loss": None, "grad_norm": NAN}] * 3, ("D21", "error")),
    ("tiny spread is fine", trl, [{"reward_std": 0.0004, "frac_reward_zero_std": 0.0}] * 3, None),
    ("verl: scores differ, advantages do not", verl,
     [{"critic/advantages/max": 0.0, "critic/advantages/min": 0.0}] * 3, ("D03", "error")),
    ("verl: constant score", verl, [{"critic/advantages/max": 0.0, "critic/advantages/min": 0.0,
                                     "critic/score/max": 0.5, "critic/score/min": 0.5}] * 3, ("D01", "error")),
    ("gradient lost", trl, [{"loss": 0.0, "grad_norm": 0.0}] * 3, ("D23", "error")),
    ("gradient lost, loss not 0", verl, [{"actor/grad_norm": 0.0}] * 3, ("D23", "error")),
    ("gradient lost in a quarter", trl, [{}, {}, {}, {"grad_norm": 0.0}], ("D23", "warning")),
    ("gradient lost, while few groups have no spread", trl,
     [{"frac_reward_zero_std": 0.125, "grad_norm": 0.0 if n % 2 else 0.4} for n in range(40)], ("D23", "error")),
    ("an update of one group that has no spread", trl,
     [{"frac_reward_zero_std": 0.6, "grad_norm": 0.0 if n % 2 else 0.4} for n in range(40)], None),
    ("gradient lost in every step, whatever the groups", trl,
     [{"frac_reward_zero_std": 0.6, "grad_norm": 0.0} for n in range(40)], ("D23", "error")),
    ("gradient lost where every group has a spread", trl,
     [{"frac_reward_zero_std": 0.0 if n % 2 else 0.9, "grad_norm": 0.0 if n % 2 else 0.4} for n in range(40)],
     ("D23", "error")),
    ("steps of one group, half of them without a spread", trl,
     [{"frac_reward_zero_std": float(n % 2), "reward_std": 0.0 if n % 2 else 0.3, "rewards/accuracy/std": 0.0}
      for n in range(40)], None),
    ("steps of one group, next to all of them without a spread", trl,
     [{"frac_reward_zero_std": float(n % 19 > 0), "reward_std": 0.0 if n % 19 else 0.3, "rewards/accuracy/std": 0.0}
      for n in range(40)], ("D01", "error")),
    ("steps of several groups, half of them without any spread", trl,
     [{"frac_reward_zero_std": 1.0 if n % 2 else 0.25, "reward_std": 0.0 if n % 2 else 0.3, "rewards/accuracy/std": 0.0}
      for n in range(40)], ("D01", "warning")),
    ("steps of one group, half of them without a spread, and a reward that rises", trl,
     [{"frac_reward_zero_std": float(n % 2), "reward_std": 0.0 if n % 2 else 0.3, "rewards/accuracy/std": 0.0,
       "reward": 0.2 + n / 80, "grad_norm": 0.4 + n / 1e3} for n in range(40)], None),
    ("no group has a spread any more", trl,
     [{"frac_reward_zero_std": float(n > 15), "reward_std": 0.0 if n > 15 else 0.3, "rewards/accuracy/std": 0.0}
      for n in range(40)], ("D01", "error")),
    ("gradient small", trl, [{"grad_norm": 1e-9}] * 3, None),
    ("all cut and masked", trl, [{"loss": 0.0, "grad_norm": 0.0, "completions/clipped_ratio": 1.0}] * 3,
     ("D07", "error")),
    ("nan loss", trl, [{}, {"loss": NAN, "grad_norm": NAN}, {"loss": NAN, "grad_norm": NAN}], ("D21", "error")),
    ("inf in entropy before the loss", verl, [{}, {"actor/entropy": INF, "actor/pg_loss": NAN}], ("D21", "error")),
    ("nan spread of rewards", trl, [{"reward_std": NAN}] * 3, ("D06", "error")),
    ("a reward function of one sample", trl, [{"rewards/accuracy/std": NAN}] * 3, None),
    ("gradient never finite", verl, [{"actor/grad_norm": NAN}] * 3, ("D22", "error")),
    ("gradient nan once", verl, [{}] * 5 + [{"actor/grad_norm": NAN}] + [{}] * 5, ("D21", "warning")),
    ("gradient nan at last", verl, [{}] * 5 + [{"actor/grad_norm": NAN}], ("D21", "error")),
    ("clipped", verl, [{"actor/pg_clipfrac": 0.21}] * 5, ("D24", "warning")),
    ("much clipped", verl, [{"actor/pg_clipfrac": 0.51}] * 5, ("D24", "warning")),
    ("clipped little", verl, [{"actor/pg_clipfrac": 0.19}] * 5, None),
    ("clipped once", verl, [{}] * 4 + [{"actor/pg_clipfrac": 0.6}] + [{}] * 4, None),
    ("ratio", verl, [{"probs_ratio_max": 10.5}] * 5, ("D24", "warning")),
    ("ratio fine", verl, [{"probs_ratio_max": 9.5}] * 5, None),
    ("ess", verl, [{"rollout_corr/rollout_is_eff_sample_size": 0.49}] * 5, ("D24", "warning")),
    ("ess fine", verl, [{"rollout_corr/rollout_is_eff_sample_size": 0.51}] * 5, None),
    ("entropy gone", verl, [{"actor/entropy": 0.049}] * 5, ("D25", "warning")),
    ("entropy low where answers are right", verl,
     [{"actor/entropy": 0.04 - n / 1e4, "critic/score/mean": 0.94 - n % 3 / 50, "actor/grad_norm": 0.2 + n / 1e3}
      for n in range(20)], None),
    ("entropy lost where answers are right", verl,
     [{"actor/entropy": 1.3 if n < 6 else 0.04 - n / 1e4, "critic/score/mean": 0.94 - n % 3 / 50,
       "actor/grad_norm": 0.2 + n / 1e3} for n in range(30)], ("D25", "warning")),
    ("entropy low where answers are wrong", verl,
     [{"actor/entropy": 0.14 - n / 160, "critic/score/mean": 0.3 - n % 3 / 50, "actor/grad_norm": 0.2 + n / 1e3}
      for n in range(20)], ("D25", "warning")),
    ("entropy gone where answers are right", verl,
     [{"actor/entropy": 0.004 - n / 1e5, "critic/score/mean": 0.94 - n % 3 / 50, "actor/grad_norm": 0.2 + n / 1e3}
      for n in range(20)],
     ("D25", "warning")),
    ("entropy low where the reward falls", verl,
     [{"actor/entropy": 0.04 - n / 1e4, "critic/score/mean": 0.99 - n / 100, "actor/grad_norm": 0.2 + n / 1e3}
      for n in range(20)], ("D25", "warning")),
    ("entropy low", verl, [{"actor/entropy": 0.051}] * 5, None),
    ("entropy not computed", verl, [{"actor/entropy": 0.0}] * 5, None),
    ("entropy explodes", verl, [{"actor/entropy": 0.4 * 1.09**n} for n in range(12)], ("D25", "warning")),
    ("entropy rises less than twice", verl, [{"actor/entropy": 0.4 * 1.04**n} for n in range(12)], None),
    ("kl at the first step", trl, [{"kl": 0.51}] * 3, ("D15", "warning")),
    ("kl of another model", trl, [{"kl": 1.2}] * 3, ("D15", "error")),
    ("kl of later mini-batches and epochs", trl, [{"kl": 0.3}] * 3, None),
    ("kl of rounding, on policy", verl,
     [{"actor/kl_loss": 9e-5, "actor/ppo_kl": 0.0, "actor/pg_clipfrac": 0.0}] * 3, None),
    ("policy kl though nothing moves", verl, [{"actor/lr": 0.0, "actor/pg_clipfrac": 0.0, "actor/ppo_kl": 1.2e-3}] * 3,
     ("D14", "warning")),
    ("mult prob error, far", verl, [{"token_mult_prob_error": 1.25}] * 5, ("D09", "error")),
    ("mult prob error, not far", verl, [{"token_mult_prob_error": 1.19}] * 5, ("D09", "warning")),
    ("k3 of the rollout, far", verl, [{"rollout_corr/k3_kl": 0.11}] * 5, ("D09", "error")),
    ("k3 of the rollout, fine", verl, [{"rollout_corr/k3_kl": 9e-4}] * 5, None),
    ("probabilities, far", verl, [{"training/rollout_probs_diff_mean": 0.11}] * 5, ("D09", "error")),
    ("probabilities, fine", verl, [{"training/rollout_probs_diff_mean": 0.019}] * 5, None),
    ("pearson, far", verl, [{"training/rollout_actor_probs_pearson_corr": 0.89}] * 5, ("D09", "error")),
    ("pearson, fine", verl, [{"training/rollout_actor_probs_pearson_corr": 0.981}] * 5, None),
    ("one bad step of mismatch", trl,
     [{}] * 6 + [{"sampling/sampling_logp_difference/mean": 0.5}] + [{}] * 6, None),
    ("kl though on policy", verl,
     [{"actor/kl_loss": 1.2e-4, "actor/ppo_kl": 0.0, "actor/pg_clipfrac": 0.0}] * 3, ("D15", "warning")),
    ("k3 below 0", trl, [{"kl": -1.2e-6}] * 3, ("D29", "error")),
    ("a KL of both signs, of RLOO as of GRPO", trl, [{"kl": one} for one in (-0.005, 0.003, 0.02)], None),
    ("a KL of both signs, and not little", trl, [{"kl": one} for one in (-0.5, 0.3, 2.0)], ("D29", "error")),
    ("k3 rounded below 0", trl, [{"kl": -9e-7}] * 3, None),
    ("k1 below 0 for long", verl, [{"actor/ppo_kl": -0.0012}] * 20, ("D29", "warning")),
    ("k1 below 0 for a while", verl, [{"actor/ppo_kl": -0.002}] * 19, None),
    ("k1 about 0", verl, [{"actor/ppo_kl": -0.0009}] * 30, None),
    ("clipped though nothing moves", verl, [{"actor/lr": 0.0, "actor/pg_clipfrac": 0.046}] * 3, ("D14", "warning")),
    ("clipped little though nothing moves", verl, [{"actor/lr": 0.0, "actor/pg_clipfrac": 9e-4,
                                                    "actor/ppo_kl": 9e-4}] * 2, None),
    ("mismatch", trl, [{"sampling/sampling_logp_difference/mean": 0.071}] * 5, ("D09", "warning")),
    ("mismatch of a healthy mixture of experts", trl, [{"sampling/sampling_logp_difference/mean": 0.069}] * 5, None),
    ("mismatch that rises", trl, [{"sampling/sampling_logp_difference/mean": 0.02 + 0.002 * n} for n in range(12)],
     ("D09", "warning")),
    ("mismatch, far", trl, [{"sampling/sampling_logp_difference/mean": 0.11}] * 5, ("D09", "error")),
    ("mismatch, near", trl, [{"sampling/sampling_logp_difference/mean": 0.029}] * 5, None),
    ("mult prob error", verl, [{"token_mult_prob_error": 1.09}] * 5, ("D09", "warning")),
    ("mult prob error, fine", verl, [{"token_mult_prob_error": 1.04}] * 5, None),
    ("mult prob error of a mixture of experts", verl, [{"token_mult_prob_error": 1.07}] * 5, None),
    ("k3 of the rollout", verl, [{"rollout_corr/k3_kl": 4.1e-3}] * 5, ("D09", "warning")),
    ("k3 of a mixture of experts", verl, [{"rollout_corr/k3_kl": 3.9e-3}] * 5, None),
    ("probabilities", verl, [{"training/rollout_probs_diff_mean": 0.021}] * 5, ("D09", "warning")),
    ("pearson", verl, [{"training/rollout_actor_probs_pearson_corr": 0.97}] * 5, ("D09", "warning")),
    ("drift fivefold", trl, [{"sampling/sampling_logp_difference/mean": 0.004 * 1.2**n} for n in range(12)],
     ("D12", "warning")),
    ("drift fourfold", trl, [{"sampling/sampling_logp_difference/mean": 0.004 * 1.13**n} for n in range(12)], None),
    ("drift without updates", trl,
     [{"learning_rate": 0.0, "clip_ratio/region_mean": 0.0, "sampling/sampling_logp_difference/mean": 0.01 + n / 1e4}
      for n in range(12)], ("D13", "warning")),
    ("no rate", verl, [{"actor/lr": 0.0, "actor/pg_clipfrac": 0.0, "actor/ppo_kl": 0.0}] * 5, ("L07", "warning")),
    ("no rate for three steps", verl, [{"actor/lr": 0.0, "actor/pg_clipfrac": 0.0, "actor/ppo_kl": 0.0}] * 3,
     ("L07", "warning")),
    ("no rate for two steps", verl, [{"actor/lr": 0.0, "actor/pg_clipfrac": 0.0, "actor/ppo_kl": 0.0}] * 2, None),
    ("a warm-up without end", verl, [{"actor/lr": 4e-9 * (n + 1)} for n in range(16)], ("L07", "warning")),
    ("a warm-up", verl, [{"actor/lr": 1e-8 * (n + 1)} for n in range(16)], None),
    ("a warm-up of forty steps", verl, [{"actor/lr": 1e-8 * (n + 1)} for n in range(40)], None),
    ("a warm-up that a run of ten steps is in", verl, [{"actor/lr": 1e-8 * (n + 1), "actor/kl_loss": 1e-6}
                                                       for n in range(10)], ("L07", "warning")),
    ("an evaluation of every tenth step", verl,
     [{"timing_s/testing": 40.0 if n % 10 == 0 else None} for n in range(120)], None),
    ("an evaluation of every step", verl, [{"timing_s/testing": 40.0} for _ in range(120)], ("D37", "warning")),
    ("a rate that is none", verl, [{"actor/lr": 1e-10}] * 5, ("L07", "warning")),
    ("a small rate", verl, [{"actor/lr": 1e-8}] * 5, None),
    ("advantages off their centre", verl, [{"critic/advantages/mean": 0.5 + n / 100} for n in range(10)],
     ("D73", "warning")),
    ("advantages about their centre", verl, [{"critic/advantages/mean": 0.5 - n / 15} for n in range(10)], None),
    ("advantages beyond any spread", verl, [{"critic/advantages/max": 31.0}] * 5, ("D73", "error")),
    ("advantages beyond any spread, of a critic", verl,
     [{"critic/advantages/max": 31.0, "critic/vf_loss": 0.02 + n / 1e3} for n in range(5)], None),
    ("large rewards", verl, [{"critic/advantages/max": 31.0, "critic/score/max": 100.0}] * 5, None),
    ("samples that get older", verl, [{"staleness": 0.5 * n} for n in range(16)], ("D31", "warning")),
    ("a pipeline that fills", verl, [{"staleness": min(4, n)} for n in range(16)], None),
    ("a policy that falls apart into the token limit", trl,
     [{"completions/clipped_ratio": 0.03 if n < 4 else 1.0, "reward": (0.9 if n < 4 else 0.0) + n % 2 / 50,
       "grad_norm": 0.4 + n / 1e3} for n in range(24)], ("L08", "error")),
    ("a token limit that is too small from the first step on", trl,
     [{"completions/clipped_ratio": 1.0, "frac_reward_zero_std": 0.8, "reward": n % 2 / 50, "grad_norm": 0.4 + n / 1e3}
      for n in range(24)], ("D20", "warning")),
    ("answers that outgrow the token limit, and still earn", trl,
     [{"completions/clipped_ratio": 0.03 if n < 4 else 1.0, "reward": (0.9 if n < 4 else 0.4) + n % 2 / 50,
       "frac_reward_zero_std": 0.8, "grad_norm": 0.4 + n / 1e3} for n in range(24)], ("D20", "warning")),
    ("nearly all cut", trl, [{"completions/clipped_ratio": 0.86}] * 16, ("D20", "warning")),
    ("a KL far below 0", bars, [{"kl": -0.8 * n - 2} for n in range(24)], ("D29", "warning")),
    ("a reference that follows", verl, [{"actor/kl_loss": 0.0}] * 10, ("D46", "warning")),
    ("a reference that follows, perhaps", verl, [{"actor/kl_loss": 0.0}] * 9, None),
    ("reward falls", trl, [{"reward": 0.6 - 0.03 * n, "grad_norm": 0.4 + n / 1e3} for n in range(14)],
     ("L08", "warning")),
    ("reward rises", trl, [{"reward": 0.2 + 0.03 * n, "grad_norm": 0.4 + n / 1e3} for n in range(14)], None),
    ("lengths explode", trl, [{"completions/mean_length": 100 * 1.12**n} for n in range(14)], ("L09", "warning")),
    ("lengths grow", trl, [{"completions/mean_length": 100 * 1.08**n} for n in range(14)], None),
    ("lengths collapse", trl, [{"completions/mean_length": 300 * 0.89**n} for n in range(14)], ("L09", "warning")),
    ("KL explodes", verl, [{"actor/kl_loss": 1e-3 * 1.7**n} for n in range(16)], ("L10", "warning")),
    ("KL has exploded", verl, [{"actor/kl_loss": 1e-3 * 1.8**n} for n in range(16)], ("L10", "error")),
    ("KL rises", verl, [{"actor/kl_loss": 1e-3 * 1.5**n} for n in range(16)], None),
    ("one gradient norm", trl, [{"grad_norm": 1.4142, "loss": 0.01 * n} for n in range(5)], ("L11", "warning")),
    ("a loss scale", trl, [{"grad_norm": 2.0e4 + n} for n in range(5)], ("L11", "warning")),
    ("a large gradient norm", trl, [{"grad_norm": 9.0e3 + n} for n in range(5)], None),
    ("form over answers", trl, [{"rewards/format/mean": 0.1 + 0.05 * n, "rewards/accuracy/mean": 0.5 - 0.03 * n}
                                for n in range(14)], ("L12", "error")),
    ("form and answers", trl, [{"rewards/format/mean": 0.1 + 0.05 * n, "rewards/accuracy/mean": 0.3 + 0.03 * n}
                               for n in range(14)], None),
    ("entropy to a quarter", verl, [{"actor/entropy": 0.8 * 0.89**n} for n in range(16)], ("D25", "warning")),
    ("entropy to a half", verl, [{"actor/entropy": 0.8 * 0.95**n} for n in range(16)], None),
    ("a critic that explains nothing", verl, [{"critic/vf_explained_var": -0.01, "critic/vf_loss": 0.2}] * 12,
     ("D45", "warning")),
    ("a critic that knows no more than the mean", verl,
     [{"critic/vf_explained_var": -0.01, "critic/vf_loss": 0.2 - 0.01 * n} for n in range(12)], None),
    ("a critic that moves, and explains nothing yet", verl,
     [{"critic/vf_explained_var": -0.01, "critic/vf_loss": 0.1, "critic/values/mean": 0.05 * n} for n in range(12)],
     None),
    ("a critic that moves, and never explains anything", verl,
     [{"critic/vf_explained_var": -0.01, "critic/vf_loss": 0.1, "critic/values/mean": 0.05 * n} for n in range(24)],
     ("D45", "warning")),
    ("a critic that hardly moves", verl,
     [{"critic/vf_explained_var": -0.01, "critic/vf_loss": 0.1, "critic/values/mean": 0.005 * n} for n in range(12)],
     ("D45", "warning")),
    ("a critic worse than none", verl, [{"critic/vf_explained_var": -0.6}] * 12, ("D45", "warning")),
    ("a critic that stands", verl,
     [{"critic/values/mean": 0.25, "critic/vf_loss": 0.1, "critic/score/mean": 0.5 + n / 99,
       "actor/grad_norm": 1 + n / 9}
      for n in range(5)], ("D45", "warning")),
    ("a critic that moves", verl,
     [{"critic/values/mean": 0.25 + n / 999, "critic/vf_loss": 0.1, "critic/score/mean": 0.5 + n / 99,
       "actor/grad_norm": 1 + n / 9}
      for n in range(5)], None),
    ("a warm-up that moves nothing", verl,
     [{"actor/lr": 1e-8 * (n + 1), "actor/kl_loss": 2e-5} for n in range(12)], ("L07", "warning")),
    ("one reward", trl, [{"reward": 0.0, "grad_norm": 0.3 + n / 9, "reward_std": None, "frac_reward_zero_std": None,
                          "rewards/accuracy/std": None} for n in range(5)], ("L17", "error")),
    ("a value loss that explodes", verl, [{"critic/vf_loss": 0.1 * 1.5**n} for n in range(9)], ("D45", "warning")),
    ("a value loss that grows", verl, [{"critic/vf_loss": 0.1 * 1.2**n} for n in range(9)], None),
    ("a judge that breaks", verl, [{"critic/score/mean": 0.4 + n / 99, "actor/grad_norm": 1 + n / 9} for n in range(10)]
     + [{"critic/score/mean": 0.05, "actor/grad_norm": 2 + n / 9} for n in range(3)], ("L08", "warning")),
    ("clipped away", verl, [{"grad_norm_clipped": 1e-3}] * 3, ("L15", "warning")),
    ("clipped", verl, [{"grad_norm_clipped": 0.1}] * 3, None),
    ("hardly moves", verl, [{"actor/lr": 1e-3, "actor/kl_loss": 1e-8 * n} for n in range(8)], ("L14", "warning")),
    ("moves", verl, [{"actor/lr": 1e-3, "actor/kl_loss": 1e-4 * n} for n in range(8)], None),
    ("a sum over ranks", verl, [{"critic/score/mean": 4.0}] * 3, ("L13", "warning")),
    ("a mean at its limit", verl, [{"critic/score/mean": 1.0}] * 3, None),
    ("a spread of rounding", trl, [{"reward_std": 1.6e-8, "frac_reward_zero_std": 0.5}] * 4, ("D03", "error")),
    ("weights over 10", verl, [{"rollout_corr/rollout_is_max": 12.0}] * 3, ("L31", "warning")),
    ("one weight for all", verl, [{"critic/advantages/max": 1.0, "critic/advantages/min": 1.0, "advantages/std": 0.0,
                                   "critic/advantages/mean": 1.0}] * 6, None),
    ("no spread of advantages", verl, [{"critic/advantages/max": None, "critic/advantages/min": None,
                                        "advantages/std": 0.0}] * 6, ("L31", "error")),
    ("raw rewards", verl, [{"critic/advantages/max": 1.0 - n / 9, "critic/score/max": 1.0 - n / 9,
                            "critic/advantages/min": 0.0} for n in range(3)], None),
    ("a loss turned around", verl, [{"actor/pg_loss": 0.1 * n + 0.02, "critic/advantages/mean": 0.1 * n + 0.02}
                                    for n in range(3)], ("D28", "error")),
    ("a loss on policy", verl, [{"actor/pg_loss": 0.1 * n + 0.02, "critic/advantages/mean": -0.1 * n - 0.02}
                                for n in range(3)], None),
    ("a loss times ranks", verl, [{"actor/pg_loss": 0.8 * n + 0.8, "critic/advantages/mean": -0.1 * n - 0.1}
                                  for n in range(5)], ("D28", "warning")),
    ("torn away", verl, [{"actor/ppo_kl": 1.1}] + [{}] * 4, ("L16", "error")),
    ("near", verl, [{"actor/ppo_kl": 0.9}] + [{}] * 4, None),
    ("KL grows with the reward", verl, [{"actor/kl_loss": 1e-3 * 1.7**n, "critic/score/mean": 0.1 + 0.05 * n,
                                         "actor/grad_norm": 1 + n / 99} for n in range(16)], None),
    ("a leap away", verl, [{"actor/kl_loss": kl} for kl in (0.0, 0.1, 1.2, 1.1)], ("L10", "error")),
    ("a leap and back", verl, [{"actor/kl_loss": kl} for kl in (0.0, 0.1, 1.2, 0.1)], None),
    ("KL subtracted", trl, [{"loss": 0.01 * (-1) ** n - 2 * 0.02 * n, "kl": 0.02 * n, "grad_norm": 0.3 + n / 99}
                            for n in range(12)], ("D49", "error")),
    ("KL added", trl, [{"loss": 0.01 * (-1) ** n + 2 * 0.02 * n, "kl": 0.02 * n, "grad_norm": 0.3 + n / 99}
                       for n in range(12)], None),
    ("a critic that explains a little", verl, [{"critic/vf_explained_var": 0.1}] * 12, None),
    ("cut, from the start and at no cost", verl, [{"response_length/clip_ratio": 0.25}] * 5, None),
    ("cut, half and more", verl, [{"response_length/clip_ratio": 0.5}] * 5, ("D20", "warning")),
    ("cut, ever more", verl, [{"response_length/clip_ratio": 0.2 + 0.01 * n} for n in range(20)], ("D20", "warning")),
    ("cut, as the reward falls", verl, [{"response_length/clip_ratio": 0.3, "critic/score/mean": 0.5 - 0.01 * n}
                                        for n in range(12)], ("D20", "warning")),
    ("cut little", verl, [{"response_length/clip_ratio": 0.24}] * 5, None),
    ("cut whole", verl, [{"response_length/clip_ratio": 1.0}] * 5, ("D20", "error")),
    ("cut, reward 0", verl, [{"response_length/clip_ratio": 0.6, "critic/score/mean": 0.0}] * 5, ("D20", "error")),
    ("cut, but rewards differ", trl, [{"completions/clipped_ratio": 0.6}] * 5, None),
    ("cut, most groups differ", verl,
     [{"response_length/clip_ratio": 0.6, "zero_std_group_frac": 0.4}] * 3, None),
    ("cut, few groups differ", verl,
     [{"response_length/clip_ratio": 0.6, "zero_std_group_frac": 0.6}] * 3, ("D20", "warning")),
    ("two measures of a mismatch, the worse counts", verl,
     [{"rollout_corr/k3_kl": 2e-3, "training/rollout_probs_diff_mean": 0.11}] * 5, ("D09", "error")),
    ("gradient norm grows", verl, [{"actor/grad_norm": 0.2 * 1.125**n} for n in range(24)], ("L02", "warning")),
    ("gradient norm grows a little", verl, [{"actor/grad_norm": 0.2 * 1.105**n} for n in range(24)], None),
    ("a phase stalls", verl, [{}] * 12 + [{"timing_s/gen": 211.0, "timing_s/step": 236.0}] + [{}] * 3,
     ("D37", "warning")),
    ("a phase is slow", verl, [{}] * 12 + [{"timing_s/gen": 209.0, "timing_s/step": 234.0}] + [{}] * 3, None),
    ("a small phase stalls and lengthens the step by a quarter", verl,
     [{"timing_s/reward": 2.9}] * 12 + [{"timing_s/reward": 18.1}], ("D37", "warning")),
    ("a small phase stalls and lengthens the step by less", verl,
     [{"timing_s/reward": 2.4}] * 12 + [{"timing_s/reward": 17.3}], None),
    ("a short phase stalls", verl, [{"timing_s/reward": 0.1}] * 12 + [{"timing_s/reward": 9.0}], None),
    ("steps get slower", trl, [{"step_time": 20.0 + n} for n in range(40)], ("D37", "warning")),
    ("memory grows", verl, [{"perf/max_memory_allocated_gb": 40.0 + n} for n in range(24)], ("L04", "warning")),
    ("memory fills up, then stays", verl, [{"perf/max_memory_allocated_gb": min(40.0 + 2 * n, 55)} for n in range(24)],
     None),
]  # fmt: skip


@pytest.mark.parametrize(("printed", "steps", "first"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_a_log_gets_the_finding_that_it_deserves(
    tmp_path: Path, printed: Print, steps: list[Metrics], first: tuple[str, str] | None
) -> None:
    diagnosis = diagnosed(tmp_path, printed(steps))
    bad = [(finding.id, finding.severity) for finding in worrying(diagnosis)]
    if first is None:
        assert bad == []
    else:
        assert bad[:1] == [first]
