"""Rules over logs and metrics: what each says of lines as trainers print them, and of genuine runs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from replay_core.diagnose.rule import Skip
from tests.fixtures import FIXTURES
from tests.replay_core.diagnose.logs import Metrics, diagnosed, diagnosed_path, only, told, trl, verl, worrying

NAN, INF = float("nan"), float("inf")


def test_loss_zero_with_a_gradient_is_said_to_be_normal(tmp_path: Path) -> None:
    diagnosis = diagnosed(
        tmp_path, trl([{"loss": loss, "clip_ratio/region_mean": 0.0} for loss in (9e-5, 0.0, 1.1e-4)])
    )
    assert told(diagnosis) == [("D02", "info")]
    assert only(diagnosis, "D02").steps == (1, 2)


def test_any_sign_of_pg_loss_is_normal(tmp_path: Path) -> None:
    assert told(diagnosed(tmp_path, verl([{"actor/pg_loss": value} for value in (0.103, -0.262, 3.0)]))) == []


def test_a_loss_of_zero_alone_names_what_it_would_need(tmp_path: Path) -> None:
    diagnosis = diagnosed(tmp_path, "iter 7: loss 0.0000 (main 0.0000, critic 0.0000), time 21747.97ms\n")
    finding = only(diagnosis, "L01")
    assert (finding.severity, finding.where.line, finding.where.step) == ("warning", 1, 7)
    for need in ("reward_std", "masked count", "grad_norm", "micro-batch"):
        assert need in finding.cause
    assert "D23" in [skipped.id for skipped in diagnosis.skipped]


def test_an_iteration_whose_loss_is_not_zero_needs_no_word(tmp_path: Path) -> None:
    assert told(diagnosed(tmp_path, "iter 7: loss 0.0144 (main 0.0144, critic 0.0000), time 21747.97ms\n")) == []


def test_a_loss_of_zero_while_rewards_differ_is_no_warning_without_a_gradient(tmp_path: Path) -> None:
    line = "{'loss': 0.0, 'reward': 0.3, 'reward_std': 0.2, 'rewards/f/std': 0.3}\n"
    assert told(diagnosed(tmp_path, line)) == [("L01", "info")]


def test_the_displayed_loss_may_be_one_micro_batchs(tmp_path: Path) -> None:
    assert told(diagnosed(tmp_path, "{'loss': 0.0, 'pg_loss': -0.0096, 'reward': 0.5, 'step': 3}\n")) == []


MICRO = """\
  [Micro 0] 1. Iteration start: mem=0MB, time=0.000s, masks_in_X={masks}/48 (41.7%)
  [Micro 0] 3. Samples scored: mem=0MB, time=0.196s, rewards=0.5164±{std}
{warning}  [Micro 0] 4. Loss computed: mem=0MB, time=0.436s, pg_loss={pg}, kl={kl}, total={total}
  5. Optimizer step finished: mem=0MB, time=3.204s total
iter 0: loss {total} (main {total}, critic 0.0000), time 3203.87ms, mfu -100.00%
"""
LOST = "  WARNING: All sequence_log_probs are near zero! num_masked=0.0\n"
EQUAL = "  WARNING: All advantages are near zero! rewards_grouped=[[0.5, 0.5]]\n"


def micro(masks: int = 20, std: str = "0.0005", warning: str = "", pg: str = "-0.000000", kl: str = "0.000000",
          total: str = "0.0000") -> str:  # fmt: skip
    return MICRO.format(masks=masks, std=std, warning=warning, pg=pg, kl=kl, total=total)


def test_a_lost_mask_is_told_from_an_empty_one_and_from_equal_rewards(tmp_path: Path) -> None:
    lost = diagnosed(tmp_path, micro(warning=LOST)).findings[0]
    assert (lost.id, lost.severity, lost.where.line) == ("D07", "error", 3)
    assert "masked-position count 0 while masks exist" in lost.claim
    assert ("reward std", 0.0005) in [(one.name, one.value) for one in lost.evidence]
    empty = diagnosed(tmp_path, micro(masks=0, warning=LOST)).findings[0]
    assert empty.id == "D07"
    assert "while masks exist" not in empty.claim
    equal = diagnosed(tmp_path, micro(std="0.0000", warning=EQUAL))
    assert told(equal)[0] == ("D01", "error")
    assert "D07" not in [finding.id for finding in equal.findings]


def test_a_constant_judge_is_found_although_kl_makes_a_loss(tmp_path: Path) -> None:
    text = micro(std="0.0000", warning=EQUAL, kl="-0.008000", total="0.0144")
    finding = diagnosed(tmp_path, text).findings[0]
    assert finding.id == "D01"
    assert "KL alone" in finding.cause
    assert diagnosed(tmp_path, text.replace(EQUAL, "")).findings[0].id == "D01"


def test_a_small_spread_and_a_negative_kl_are_healthy(tmp_path: Path) -> None:
    assert worrying(diagnosed(tmp_path, micro(std="0.0004", pg="0.103000", kl="-0.008000", total="0.0237"))) == []


def test_a_batch_without_masks_is_its_own_cause(tmp_path: Path) -> None:
    text = micro(masks=0, warning="  WARNING: No masked positions found!\n")
    finding = diagnosed(tmp_path, text).findings[0]
    assert (finding.id, finding.claim) == ("D07", "the batch holds no masked position: nothing is trained on")


def test_the_first_iterations_that_compile_are_no_regression(tmp_path: Path) -> None:
    times = [21.7, 103.6, 9.0, 9.1, 8.9, 9.0, 9.2, 9.0, 8.8, 9.0, 9.1, 9.0]
    lines = [f"iter {n}: loss 0.1 (main 0.1, critic 0.0000), time {t * 1000:.2f}ms\n" for n, t in enumerate(times)]
    diagnosis = diagnosed(tmp_path, "".join(lines))
    assert told(diagnosis) == [("D37", "info")]
    assert "second compilation" in only(diagnosis, "D37").claim
    lines[9] = "iter 9: loss 0.1 (main 0.1, critic 0.0000), time 90000.00ms\n"
    late = only(diagnosed(tmp_path, "".join(lines)), "D37")
    assert (late.severity, late.where.step, late.where.line) == ("warning", 9, 10)


@pytest.mark.parametrize(
    ("times", "found"),
    [
        ((10.0, 16.0), True), ((10.0, 14.0), False), ((0.9, 9.0), False), ((1.1, 9.0), True),
        ((3.1, 1.0, 1.0, 1.0, 1.0), True), ((2.9, 1.0, 1.0, 1.0, 1.0), False), ((1.0, 3.1, 1.0, 1.0, 1.0), True),
    ],
)  # fmt: skip
def test_warm_up_is_a_slower_second_iteration_or_two_slow_ones(
    tmp_path: Path, times: tuple[float, ...], found: bool
) -> None:
    text = trl([{"step_time": time} for time in times])
    assert told(diagnosed(tmp_path, text)) == ([("D37", "info")] if found else [])


def test_a_stall_is_blamed_on_its_phase_and_times_are_in_seconds(tmp_path: Path) -> None:
    steps: list[Metrics] = [{}] * 12 + [{"timing_s/gen": 250.0, "timing_s/step": 600.0}]
    finding = only(diagnosed(tmp_path, verl(steps)), "D37")
    assert finding.claim == "timing_s/gen takes 7.1 times its own median at step 13"
    text = "".join(f"iter {n}: loss 0.1, time {time}ms\n" for n, time in enumerate((21747.97, 103634.2)))
    shown = {one.name: one.value for one in only(diagnosed(tmp_path, text), "D37").evidence}
    assert shown == {"step 0 (s)": 21.748, "step 1 (s)": 103.634}


def test_the_notes_iterations_are_held_against_its_expectations(tmp_path: Path) -> None:
    lines = [f"iter {n}: loss 0.1 (main 0.1, critic 0.0000), time {t}ms\n" for n, t in enumerate([70000, 70500, 70300])]
    finding = only(diagnosed(tmp_path, "".join(lines)), "D37")
    assert (finding.severity, finding.evidence[0].expected) == ("info", "32000 to 64000 ms")
    fast = [line.replace("time 70", "time 40") for line in lines]
    # 40 s lies within both of the seed's ranges, with and without compile.
    assert told(diagnosed(tmp_path, "".join(fast))) == []


RECOMPILE = "V1120 10:00:00 torch/_dynamo/guards.py:2 [0/{n}] [__recompiles] Recompiling function forward in m.py:12\n"


def test_one_recompile_is_normal_and_two_are_not(tmp_path: Path) -> None:
    one = trl([{}]) + RECOMPILE.format(n=1)
    assert told(diagnosed(tmp_path, one)) == []
    assert told(diagnosed(tmp_path, one + RECOMPILE.format(n=2))) == [("D32", "warning")]
    ranks = "".join(f"[rank{rank}]: {RECOMPILE.format(n=1)}" for rank in range(4))
    assert told(diagnosed(tmp_path, trl([{}]) + ranks)) == []
    limit = one + "W1120 torch._dynamo hit config.recompile_limit (8)\n"
    assert told(diagnosed(tmp_path, limit)) == [("D32", "warning")]
    again = limit + trl([{}], 2) + "W1120 torch._dynamo hit config.recompile_limit (8)\n"
    assert told(diagnosed(tmp_path, again)) == [("D32", "error")]


def test_a_graph_break_at_item_is_worse_than_another(tmp_path: Path) -> None:
    item = "Graph break from `Tensor.item()`, consider setting: torch._dynamo.config.capture_scalar_outputs = True\n"
    assert told(diagnosed(tmp_path, item)) == [("D33", "warning")]
    assert told(diagnosed(tmp_path, "Graph break in user code at /a/model.py:12\n")) == [("D33", "info")]


OOM = (
    "{frames}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of "
    "79.11 GiB of which {free} is free. Of the allocated memory 60.00 GiB is allocated by PyTorch, and {spare} is "
    "reserved by PyTorch but unallocated.\n"
)


@pytest.mark.parametrize(
    ("frames", "tried", "spare", "cause"),
    [
        ("", "2.00 GiB", "12.00 GiB", "fragmentation"),
        ("", "2.00 GiB", "1.99 GiB", "longest micro-batch"),
        ('  File "a.py", line 3, in f\n    logprobs = logits.log_softmax(-1)\n', "10.80 GiB", "410.55 MiB", "logits"),
        ('  File "optim.py", line 3, in step\n    exp_avg = zeros_like(p)\n', "2.00 GiB", "4.00 MiB", "optimizer"),
        ('  File "vllm/cache_engine.py", line 3, in f\n    x = y\n', "2.00 GiB", "4.00 MiB", "engine"),
        ('  File "sdpa_attention.py", line 3, in f\n    x = y\n', "2.00 GiB", "4.00 MiB", "attention"),
    ],
)
def test_out_of_memory_is_blamed_by_its_own_words(
    tmp_path: Path, frames: str, tried: str, spare: str, cause: str
) -> None:
    text = OOM.format(frames=frames, tried=tried, free="1.00 GiB", spare=spare)
    finding = diagnosed(tmp_path, text).findings[0]
    assert (finding.id, finding.severity) == ("D36", "error")
    assert cause in finding.cause
    assert {one.name: one.value for one in finding.evidence}["capacity (GiB)"] == 79.11


def test_ten_point_eight_gib_of_logits_are_the_tokens_of_the_report(tmp_path: Path) -> None:
    frames = '  File "loss.py", line 3, in get_log_probs\n    logits = logits.float()\n'
    text = OOM.format(frames=frames, tried="10.73 GiB", free="1.00 GiB", spare="0 bytes")
    # slime#2253: 11.6 k tokens, a vocabulary of 248,320, 4 bytes.
    assert "11,599 tokens (Qwen 3.5)" in diagnosed(tmp_path, text).findings[0].cause


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512 bytes", 2**-21), ("2 KiB", 2**-19), ("512.00 MiB", 0.5), ("1.50 GiB", 1.5), ("2 TiB", 2048.0),
        ("2 KB", 2**-19), ("512 MB", 0.5), ("3 GB", 3.0), ("2 PiB", None),
    ],
)  # fmt: skip
def test_a_size_is_read_in_any_unit(text: str, size: float | None) -> None:
    from replay_core.diagnose.rules.memory import _TRIED, gib

    assert gib(f"CUDA out of memory. Tried to allocate {text}. GPU 0", _TRIED) == size


def test_other_processes_are_blamed_only_where_they_hold_much(tmp_path: Path) -> None:
    text = OOM.format(frames="", tried="2.00 GiB", free="1.00 GiB", spare="4.00 MiB")
    for held, blamed in (("30.00", True), ("3.00", False)):
        more = text.replace("Of the allocated", f"Process 7 has {held} GiB memory in use. Of the allocated")
        assert ("other processes" in diagnosed(tmp_path, more).findings[0].cause) is blamed


def test_the_steps_that_are_cut_are_named(tmp_path: Path) -> None:
    steps: list[Metrics] = [{"response_length/clip_ratio": ratio} for ratio in (0.1, 0.25, 0.3, 0.24, 0.4)]
    finding = only(diagnosed(tmp_path, verl(steps)), "D20")
    assert (finding.steps, finding.where.step) == ((2, 3, 5), 2)


def test_a_policy_of_one_token_is_not_cut(tmp_path: Path) -> None:
    for longest, said in ((1.0, []), (2.0, [("D20", "error")])):
        lengths = {"response_length/max": longest, "response_length/mean": longest}
        steps: list[Metrics] = [{"response_length/clip_ratio": 1.0, **lengths}] * 3
        found = [one for one in told(diagnosed(tmp_path, verl(steps))) if one[0] == "D20"]
        assert found == said, longest


def test_a_mismatch_says_which_side_is_expected(tmp_path: Path) -> None:
    for key, value, expected in (
        ("training/rollout_actor_probs_pearson_corr", 0.97, "> 0.98"), ("rollout_corr/k3_kl", 0.002, "< 0.001"),
    ):  # fmt: skip
        assert only(diagnosed(tmp_path, verl([{key: value}] * 3)), "D09").evidence[0].expected == expected


def test_host_memory_is_not_the_gpus(tmp_path: Path) -> None:
    text = "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 34359738368 bytes.\n"
    assert diagnosed(tmp_path, text).findings[0].claim == "out of host memory asking for 32 GiB"


def test_a_long_tail_is_told_and_is_no_warning(tmp_path: Path) -> None:
    assert told(diagnosed(tmp_path, verl([{"response_length/max": 2401.0}] * 3))) == [("L05", "info")]
    assert told(diagnosed(tmp_path, verl([{"response_length/max": 2399.0}] * 3))) == []


def test_a_spike_of_the_gradient_is_told_and_is_no_warning(tmp_path: Path) -> None:
    norms = [0.2, 0.21, 0.19, 0.2, 0.22, 0.2, 0.21, 1.2, 0.2, 0.19, 0.21]
    diagnosis = diagnosed(tmp_path, verl([{"actor/grad_norm": norm} for norm in norms]))
    assert told(diagnosis) == [("L02", "info")]
    assert only(diagnosis, "L02").steps == (8,)
    norms[7] = 0.9
    assert told(diagnosed(tmp_path, verl([{"actor/grad_norm": norm} for norm in norms]))) == []


def test_a_gradient_that_grows_is_pointed_at_where_it_leaves_its_level(tmp_path: Path) -> None:
    norms = [0.2 + n % 2 / 100 for n in range(16)] + [2.0 + n for n in range(12)]
    finding = only(diagnosed(tmp_path, verl([{"actor/grad_norm": norm} for norm in norms])), "L02")
    assert (finding.severity, finding.where.step) == ("warning", 17)


def test_a_log_of_nothing_but_nan_invents_no_cause(tmp_path: Path) -> None:
    lines = "".join(f"{{'loss': nan, 'grad_norm': nan, 'reward': nan, 'step': {n}}}\n" for n in range(3))
    diagnosis = diagnosed(tmp_path, lines)
    assert {"L03", "D21"} == {finding.id for finding in worrying(diagnosis)}
    assert only(diagnosis, "L03").where.line == 1


def test_the_first_broken_signal_is_named_by_step_then_by_computation(tmp_path: Path) -> None:
    steps: list[Metrics] = [{}, {"actor/grad_norm": NAN, "actor/entropy": NAN, "actor/pg_loss": NAN}]
    finding = only(diagnosed(tmp_path, verl(steps)), "D21")
    assert finding.claim == "actor/entropy is the first metric that is not finite, at step 2"
    assert (finding.where.step, finding.where.line) == (2, 2)
    beside = {one.name: one.value for one in finding.evidence}["not finite in the same step"]
    assert beside == "actor/grad_norm, actor/pg_loss"


def test_a_small_kl_at_the_first_step_is_told_with_its_harmless_cause(tmp_path: Path) -> None:
    finding = only(diagnosed(tmp_path, trl([{"kl": 0.005}] * 3)), "D15")
    assert (finding.severity, finding.steps) == ("info", (1,))
    assert "mini-batches after the first" in finding.cause
    assert "another checkpoint" in only(diagnosed(tmp_path, trl([{"kl": 0.8}] * 3)), "D15").cause


def test_kl_is_not_judged_where_the_first_line_need_not_be_the_first_step(tmp_path: Path) -> None:
    text = trl([{"kl": 0.5}]).replace(", 'step': 1", "")
    diagnosis = diagnosed(tmp_path, text)
    assert worrying(diagnosis) == []
    assert "does not number its steps" in next(s.why for s in diagnosis.skipped if s.id == "D15")
    assert worrying(diagnosed(tmp_path, trl([{"kl": 0.5}], first=40))) == []


@pytest.mark.parametrize(
    "path",
    [
        "grpo_notes/train_547c4bf_normal.log", "grpo_notes/metrics_547c4bf_normal.json", "trl/base", "verl", "slime",
        "grpo_notes/metrics_1da2900_normal.json", "nexrl/self_hosted_fp32", "nexrl/self_hosted_bf16", "openrlhf",
        "skyrl", "prime_rl", "nemo_rl", "open_instruct", "roll", "roll_critic", "areal", "sglang_dumper",
    ],
)  # fmt: skip
def test_what_genuine_runs_logged_raises_no_false_alarm(path: str) -> None:
    from replay_core.diagnose.engine import rules
    from replay_core.diagnose.signals import Signals
    from replay_core.dumps import open_run

    signals = Signals.of(open_run(FIXTURES / path))
    if signals is None:
        return
    for rule in (rule for rule in rules() if rule.scope == "signals"):
        for log in signals.logs:
            if all(any(log.has(name) for name in need.split("|")) for need in rule.needs):
                with suppress(Skip):
                    assert [one for one in rule.findings(log) if one.severity != "info"] == []


def test_the_zero_loss_of_the_grpo_notes_is_named_and_its_fix_is_clean_of_it() -> None:
    first = diagnosed_path(FIXTURES / "grpo_notes" / "train_1da2900_normal.log").findings[0]
    assert first.id == "D07"
    assert first.claim == "logits/mask lengths disagree: masked-position count 0 while masks exist"
    assert first.where.line == 4
    fixed = diagnosed_path(FIXTURES / "grpo_notes" / "train_547c4bf_normal.log")
    assert "D07" not in [finding.id for finding in fixed.findings]
    assert "D07" in fixed.checked


def test_two_runs_in_one_folder_stay_two() -> None:
    from replay_core.diagnose.rule import RULES
    from replay_core.diagnose.signals import Signals
    from replay_core.dumps import open_run

    signals = Signals.of(open_run(FIXTURES / "grpo_notes"))
    assert signals is not None
    assert sorted(sorted(Path(path).name for path in log.paths) for log in signals.logs) == [
        ["metrics_1da2900_normal.json", "train_1da2900_normal.log"],
        ["metrics_547c4bf_normal.json", "train_547c4bf_normal.log"],
    ]
    found = {Path(log.paths[0]).name[-18:]: RULES["D07", "signals"].findings(log) for log in signals.logs}
    assert [len(findings) for findings in found.values()].count(0) == 1
