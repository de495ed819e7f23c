"""What stands in logs of runs that are well and was taken for a fault, each beside what is one."""

from __future__ import annotations

from pathlib import Path

from tests.replay_core.diagnose.logs import diagnosed, only, part_of, told, trl, verl, worrying


def _skyrl(steps: int, scoring: float) -> str:
    """SkyRL's lines: what an update logs without a number, and then pprint's mapping of the step."""
    prefix = "(skyrl_entrypoint pid=88102) "
    return "".join(
        f"{prefix}05:45:48.881 | INFO | trainer:train:497 - {{'final_loss': -0.0024, 'grad_norm': 0.15}}\n"
        f"{prefix}step:{n} - {{'loss/avg_final_rewards': '{0.2 + 0.01 * n}',\n"
        f"{prefix} 'policy/grad_norm': '0.152547',\n"
        f"{prefix} 'timing/fwd_logprobs_values_reward': '{scoring}',\n"
        f"{prefix} 'timing/step': '52.9',\n"
        f"{prefix} 'trainer/global_step': {n}}}\n"
        for n in range(1, steps + 1)
    )


def test_a_mapping_over_several_lines_is_one_step(tmp_path: Path) -> None:
    log = part_of(tmp_path, _skyrl(12, 8.4))
    reward, loss = log.get("reward"), log.get("loss")
    assert reward is not None
    assert loss is not None
    assert [point.step for point in reward.points] == list(range(1, 13))
    assert [point.step for point in loss.points] == list(range(1, 13))
    assert not log.is_counted
    assert not worrying(diagnosed(tmp_path, _skyrl(12, 8.4)))
    assert told(diagnosed(tmp_path, _skyrl(12, 42.0)))[0] == ("D37", "warning")


def test_a_judge_that_is_asked_again_has_not_failed(tmp_path: Path) -> None:
    line = "WARNING: reward http request failed: 503 Service Unavailable, retry {n}/5 in 0.7s\n"
    once = trl([{}] * 4) + line.format(n=1) * 3 + trl([{}] * 4, 5)
    assert only(diagnosed(tmp_path, once), "L29").severity == "info"
    in_vain = trl([{}] * 4) + "".join(line.format(n=n) for n in (1, 2, 3, 4, 5, 5)) + trl([{}] * 4, 5)
    assert only(diagnosed(tmp_path, in_vain), "L29").severity == "warning"


def test_requests_that_are_preempted_matter_where_steps_get_slower(tmp_path: Path) -> None:
    line = "KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_token_ratio: 0.70 -> 0.84\n"

    def severity(slower: float) -> str:
        steps = [trl([{"step_time": 21.0 + slower * n}], n + 1) + line for n in range(20)]
        return only(diagnosed(tmp_path, "".join(steps)), "L29").severity

    assert (severity(0.0), severity(1.0)) == ("info", "warning")


def _named(name: str, values: list[float]) -> str:
    return trl([{"sampling/sampling_logp_difference/mean": None, name: value} for value in values])


def test_a_difference_of_log_probabilities_is_below_0(tmp_path: Path) -> None:
    values = [-0.002] * 30
    assert not worrying(diagnosed(tmp_path, _named("ppo_actor/update/approx_kl/avg", values)))
    assert [one.id for one in worrying(diagnosed(tmp_path, _named("train/ppo_kl", values)))] == ["D29"]


def test_an_engine_that_is_started_again_is_no_death_of_the_run(tmp_path: Path) -> None:
    gone = "(raylet) A worker died or was killed while executing a task. Worker exit type: SYSTEM_ERROR\n"
    back = "WARNING engine 2 is dead, restarting it (attempt 1/3)\nINFO engine 2 is back, 48 requests sent again\n"
    steps = [{"reward": 0.3 + 0.02 * n} for n in range(12)]
    bar = "Train epoch [1/1]: 100%|##########| 2/2 [00:21<00:00,  10.67s/it, act_loss=-0.00106, kl=0.141]\n"
    found = only(diagnosed(tmp_path, trl(steps[:6]) + bar + gone + back + trl(steps[6:], 7)), "L06")
    assert found.severity == "info"
    assert found.steps == (6,)
    assert only(diagnosed(tmp_path, trl(steps[:6]) + gone + trl(steps[6:], 7)), "L06").severity == "error"
    assert only(diagnosed(tmp_path, trl(steps[:6]) + gone + back + trl(steps[3:], 4)), "L06").severity == "error"


def _mismatch(kl: list[float], lag: list[int]) -> str:
    return trl([
        {"sampling/sampling_logp_difference/mean": None, "Mismatch KL": each, "Max Off-Policy": float(old)}
        for each, old in zip(kl, lag, strict=True)
    ])  # fmt: skip


def test_a_mismatch_that_comes_with_the_lag_and_rests_is_of_old_weights(tmp_path: Path) -> None:
    rests = [0.0021, 0.0189, *(0.012, 0.009, 0.011, 0.008, 0.010, 0.012, 0.009) * 3]
    lag = [0, 1, *[2] * 21]
    assert only(diagnosed(tmp_path, _mismatch(rests, lag)), "D09").severity == "info"
    found = only(diagnosed(tmp_path, _mismatch(rests, [0] * 23)), "D09")
    assert found.severity == "warning"
    assert "from the first step on" not in found.claim
    always = only(diagnosed(tmp_path, _mismatch([0.011, *rests[1:]], lag)), "D09")
    assert always.severity == "warning"
    assert "from the first step on" in always.claim


def test_an_evaluation_of_which_one_figure_moves_is_not_still(tmp_path: Path) -> None:
    def evaluated(other: float) -> str:
        return verl([
            {"critic/score/mean": 0.3 + 0.01 * n, "critic/kl": None,
             "val-core/math/acc/mean@1": 0.31 if n % 5 == 0 else None,
             "val-core/gsm8k/acc/mean@1": 0.5 + other * n if n % 5 == 0 else None} for n in range(40)
        ])  # fmt: skip

    ids = {one.id for one in worrying(diagnosed(tmp_path, evaluated(0.0)))}
    assert {"L25", "D116"} & ids
    assert "L25" not in {one.id for one in worrying(diagnosed(tmp_path, evaluated(0.01)))}


def test_a_judge_that_fails_on_hardly_any_sample_is_worth_knowing(tmp_path: Path) -> None:
    line = "WARNING: math_verify timed out after 5.0s for {n} sample, score set to 0.0\n"

    def severity(at: dict[int, int], each: str = line, steps: int = 80) -> str:
        said = [trl([{}], n + 1) + each.format(n=1) * at.get(n, 0) for n in range(steps)]
        return only(diagnosed(tmp_path, "".join(said)), "L29").severity

    assert severity({10: 1, 31: 1, 62: 1}) == "info"
    assert severity(dict.fromkeys(range(0, 80, 4), 1)) == "warning"
    assert severity({10: 16}) == "warning"
    assert severity({77: 1, 78: 1, 79: 1}) == "warning"
    assert severity({1: 1, 3: 1}, steps=12) == "warning"
    assert severity({10: 1, 31: 1}, line.format(n="40").replace("sample", "samples")) == "warning"


def test_a_running_sum_of_the_time_is_no_phase(tmp_path: Path) -> None:
    takes = [60.0 + n % 3 for n in range(40)]
    sums = [{"timing_s/step": takes[n], "timing_s/total": sum(takes[: n + 1])} for n in range(40)]
    assert not worrying(diagnosed(tmp_path, verl(sums)))
    bare = [{**one, "timing_s/step": None} for one in sums]
    assert not worrying(diagnosed(tmp_path, verl(bare)))
    grows = [{"timing_s/step": 40 + 3.0 * n, "timing_s/gen": 20 + 3.0 * n} for n in range(40)]
    assert told(diagnosed(tmp_path, verl(grows)))[0] == ("D37", "warning")


def test_a_kl_that_is_summed_over_responses_is_taken_by_their_length(tmp_path: Path) -> None:
    def said(whole: bool, most: float) -> str:
        lines = []
        for n in range(60):
            tokens, reward, kl = 70.0 + (37 * n) % 60, 0.2 + 0.008 * n, most * n / 60
            taken = 0.01 * kl * (1 if whole else tokens)
            lines.append(
                f"Step {n + 1} | scores:{reward} num_stop_tokens:128 rlhf_reward:{reward - taken} kl:{kl} "
                f"kl_reward:{-taken} lr:3e-06 loss:0.01 policy_loss:-0.0004 value_loss:0.1 response_lengths:{tokens}\n"
            )
        return "".join(lines)

    assert not worrying(diagnosed(tmp_path, said(whole=True, most=8.0)))
    of_tokens = only(diagnosed(tmp_path, said(whole=False, most=2.0)), "L10")
    assert of_tokens.severity == "warning"
    torn = only(diagnosed(tmp_path, said(whole=True, most=900.0)), "L10")
    assert torn.severity == "error"
    assert "kl / response_lengths" in torn.claim


def test_a_limit_below_the_stated_one_is_named(tmp_path: Path) -> None:
    def said(longest: float, cut: float, stated: str) -> str:
        step = {"completions/max_length": longest, "completions/clipped_ratio": cut, "completions/mean_length": 200.0}
        return f"GRPOConfig({stated}, temperature=1.0)\n" + trl([step] * 30)

    found = only(diagnosed(tmp_path, said(256.0, 0.2, "max_completion_length=1024")), "D20")
    assert found.severity == "warning"
    assert "cut at 256 tokens, though max_completion_length is 1024" in found.claim
    whole = "max_seq_length=768, max_prompt_length=512, max_completion_length=1024"
    assert (
        "max_seq_length = 768 less max_prompt_length" in only(diagnosed(tmp_path, said(256.0, 0.2, whole)), "D20").cause
    )
    assert not worrying(diagnosed(tmp_path, said(256.0, 0.2, "max_completion_length=256")))
    assert not worrying(diagnosed(tmp_path, said(256.0, 0.0, "max_completion_length=1024")))
    varied = [{"completions/max_length": 256.0 + 40 * (n % 7), "completions/clipped_ratio": 0.2} for n in range(30)]
    assert not worrying(diagnosed(tmp_path, "GRPOConfig(max_completion_length=1024)\n" + trl(varied)))


def test_the_age_of_samples_is_held_against_the_bound_that_is_stated(tmp_path: Path) -> None:
    def said(ages: list[float], bound: str = "max_head_offpolicyness=4") -> str:
        name = "ppo_actor/update/version_stats/sample_staleness_theta_max"
        return f"rollout config: max_concurrent_rollouts=128 {bound} queue_size=None\n" + trl([{name: n} for n in ages])

    grows = only(diagnosed(tmp_path, said([0.3 * n for n in range(80)])), "D31")
    assert (grows.severity, "though max_head_offpolicyness is 4" in grows.claim) == ("error", True)
    rests = only(diagnosed(tmp_path, said([0.0, 2.0, *[6.0 + n % 3 for n in range(40)]])), "D31")
    assert rests.severity == "warning"
    assert "up to 8 updates old, though max_head_offpolicyness is 4" in rests.claim
    assert not worrying(diagnosed(tmp_path, said([0.0, *[1.0 + n % 4 for n in range(40)]])))
    assert not worrying(diagnosed(tmp_path, said([0.0, *[3.0 + (n % 20 == 9) * 2 for n in range(40)]])))
    wide = [0.0, *[9.0 + n % 4 for n in range(40)]]
    assert not worrying(diagnosed(tmp_path, said(wide, "max_head_offpolicyness=12")))
    assert only(diagnosed(tmp_path, said(wide, "")), "D31").severity == "error"
    assert only(diagnosed(tmp_path, said(wide, "max_off_policy_steps=999")), "D31").severity == "error"


_EMPTY = "⏳ Buffer empty or not enough groups to form a full step, waiting...\n"
_SHORT = "🔍 Debug: Buffer has 11 trajectories but sampling requires exactly 16.\n"
_ENDED = "slurmstepd: error: *** STEP 55120.0 ON h100-018 CANCELLED AT 2026-06-30T20:04:18 ***\n"
_IDLES = (
    "INFO 06-30 16:16:48 [loggers.py:123] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: "
    "0.0 tokens/s, Running: 0 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.0%\n"
)


def test_a_hang_is_told_before_the_end_from_outside_that_it_came_to(tmp_path: Path) -> None:
    steps = trl([{}] * 20)
    hung = only(diagnosed(tmp_path, steps + _IDLES + (_SHORT + _EMPTY * 99) * 10 + _ENDED), "L06")
    assert hung.severity == "error"
    assert hung.claim.startswith("the run hung after step 20: it only waited for 3.8 hours (lines 23 to ")
    assert "Buffer has 11 trajectories" in str(hung.evidence)
    no_clock = only(diagnosed(tmp_path, steps + _EMPTY * 300 + "Terminated\n"), "L06")
    assert no_clock.claim.startswith("the run hung after step 20")
    # Waiting that every step has is none, and the end from outside is all there is to tell.
    usual = "".join(trl([{}], n + 1) + _EMPTY * 8 for n in range(10))
    assert only(diagnosed(tmp_path, usual + _EMPTY * 12 + "Terminated\n"), "L06").claim.startswith("the run died")
    assert not worrying(diagnosed(tmp_path, usual + _EMPTY * 12))
    soon = _IDLES + _EMPTY * 6 + _ENDED.replace("T20:04:18", "T16:18:20")
    assert only(diagnosed(tmp_path, steps + soon), "L06").claim.startswith("the run died")
