"""Logs that only end, exceptions that a run goes on after, and what is learnt by heart or not at all."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from replay_core.diagnose.case import Case
from replay_core.diagnose.engine import diagnose
from replay_core.diagnose.finding import Diagnosis, Finding
from replay_core.diagnose.signals import Signals
from replay_core.dumps import open_run
from tests.replay_core.diagnose.logs import diagnosed, trl, written

BAR = "{share:3d}%|{drawn:10s}| {at}/{of} [{took}<1:16:19,  2.29s/it]"


def of_file(path: Path) -> Diagnosis:
    run = open_run(path)
    return diagnose(Case(run, Signals.of(run)))


def bars(upto: int, of: int) -> str:
    """A bar as tqdm draws it into a file, one line of many pieces."""
    return "".join(
        "\r"
        + BAR.format(share=100 * n // of, drawn="#" * (10 * n // of), at=n, of=of, took=f"{n // 60:02d}:{n % 60:02d}")
        for n in range(1, upto + 1)
    )


def found(folder: Path, text: str, id: str) -> Finding | None:
    return next((one for one in diagnosed(folder, text).findings if one.id == id), None)


def test_a_bar_that_stops_is_worth_knowing_and_names_its_step(tmp_path: Path) -> None:
    one = found(tmp_path, trl([{}] * 3) + bars(202, 5100), "L42")
    assert one is not None
    assert one.severity == "info"
    assert "step 202 of 5,100 (4%)" in one.claim


def test_a_bar_that_comes_to_its_end_or_next_to_it_is_none(tmp_path: Path) -> None:
    assert found(tmp_path, trl([{}] * 3) + bars(100, 100), "L42") is None
    assert found(tmp_path, trl([{}] * 3) + bars(99, 100), "L42") is None
    ended = "\n{'train_runtime': 100.0, 'train_loss': 0.1}\n"
    assert found(tmp_path, trl([{}] * 3) + bars(40, 100) + ended, "L42") is None


@pytest.mark.parametrize(
    "line",
    [
        "wandb: Run summary:",
        "wandb: You can sync this run to the cloud by running:",
        "(base) user@node12:~/work$ tail train.log",
        "real\t12m3.512s",
        "exit code 1",
    ],
)
def test_a_process_that_has_ended_before_its_last_step_is_a_warning(tmp_path: Path, line: str) -> None:
    one = found(tmp_path, trl([{}] * 3) + bars(40, 100) + f"\n{line}\n", "L42")
    assert one is not None
    assert one.severity == "warning"
    assert "step 40 of 100" in one.claim


def test_bars_of_weights_data_and_validation_are_no_steps(tmp_path: Path) -> None:
    text = trl([{}] * 3) + "\rLoading checkpoint shards:  50%|#####     | 1/2 [00:05<00:05,  5.00s/it]\n"
    assert found(tmp_path, text, "L42") is None


def test_training_that_is_begun_again_and_again_without_a_step(tmp_path: Path) -> None:
    start = "2025-11-02 05:41:26,396 | INFO | train_grpo | Starting training | total_steps=10 | output_dir=runs/x\n"
    one = found(tmp_path, start * 3, "L42")
    assert one is not None
    assert one.severity == "warning"
    assert "begun 3 times" in one.claim
    once = found(tmp_path, start, "L42")
    assert once is not None
    assert once.severity == "info"


def test_rows_that_tell_of_how_many_steps_they_are(tmp_path: Path) -> None:
    rows = "".join(
        json.dumps({"current_steps": n, "total_steps": 5100, "loss": 0.6 - n / 1e4, "lr": 1e-6}) + "\n"
        for n in range(1, 60)
    )
    path = written(tmp_path, rows, "trainer_log.jsonl")
    one = next(each for each in of_file(path).findings if each.id == "L42")
    assert (one.severity, "step 59 of 5,100 (1%)" in one.claim) == ("info", True)


LOGGED = """(Worker pid=141546) ERROR:2025-12-25 23:46:30,691:Traceback (most recent call last):
(Worker pid=141546)   File "/w/env_and_state.py", line 270, in update_state
(Worker pid=141546)     action, x, y = extractor(output_text)
(Worker pid=141546) TypeError: cannot unpack non-iterable NoneType object
"""


def test_an_exception_that_a_worker_logs_and_goes_on_after_ends_nothing(tmp_path: Path) -> None:
    one = found(tmp_path, LOGGED + "(Worker pid=141546) using customized reward function 'score'\n", "L06")
    assert one is not None
    assert one.severity == "info"
    assert "the run went on" in one.claim


def test_one_that_nothing_of_its_process_follows_is_an_end(tmp_path: Path) -> None:
    for after in (
        "",
        "(Worker pid=7) using customized reward function 'score'\n",
        "(Worker pid=141546) shutting down\n",
    ):
        one = found(tmp_path, LOGGED + after, "L06")
        assert one is not None
        assert one.severity == "error"


def test_an_exception_that_steps_of_the_bar_follow_is_none(tmp_path: Path) -> None:
    raised = 'Traceback (most recent call last):\n  File "/w/a.py", line 3, in main\n    f()\nValueError: no\n'
    text = trl([{}] * 3) + bars(20, 100) + "\n" + raised
    assert (one := found(tmp_path, text, "L06")) is not None
    assert one.severity == "error"
    more = "".join(line + "\n" for line in bars(30, 100).split("\r")[21:])
    assert (one := found(tmp_path, text + more, "L06")) is not None
    assert one.severity == "info"


def test_a_tools_exit_code_that_is_logged_for_debugging_kills_nothing(tmp_path: Path) -> None:
    line = "2025-06-24 13:30:48,637 DEBUG bash tool finished with exit code -1\n"
    assert found(tmp_path, line * 2 + trl([{}] * 3), "L06") is None


def sft(losses: list[float], every: int = 100, held: dict[int, float] | None = None, epochs: float = 0) -> str:
    lines = []
    for n, loss in enumerate(losses, 1):
        row = {
            "loss": loss,
            "grad_norm": 1.1,
            "learning_rate": 1e-5,
            "epoch": epochs * n / len(losses),
            "step": n * every,
        }
        lines.append(f"{row}\n")
        if held and n in held:
            lines.append(f"{ {'eval_loss': held[n], 'eval_runtime': 3.1, 'step': n * every} }\n")
    return "".join(lines)


FALLS = [1.4, 0.9, 0.5, 0.3, 0.2, 0.12, 0.08, 0.05, 0.03, 0.02, 0.012, 0.009]


@pytest.mark.parametrize(
    ("held", "told"),
    [
        ({3: 0.462, 6: 0.534, 12: 0.536}, True),
        ({3: 3.27, 6: 3.66, 9: 3.83, 12: 3.93}, True),
        ({3: 0.462, 6: 0.534, 12: 0.47}, False),
        ({3: 0.462, 6: 0.47, 12: 0.48}, False),
        ({6: 0.462, 12: 0.62}, False),
    ],
)
def test_a_held_out_loss_that_rises_over_few_evaluations(tmp_path: Path, held: dict[int, float], told: bool) -> None:
    one = found(tmp_path, sft(FALLS, held=held), "L20")
    assert (one is not None and one.severity == "warning") == told


def test_demonstrations_learnt_by_heart(tmp_path: Path) -> None:
    losses = [3.4, 2.7, 2.3, 1.5, 0.9, 0.5, 0.3, 0.15, 0.09, 0.08, 0.075, 0.07]
    one = found(tmp_path, sft(losses, epochs=32), "L43")
    assert one is not None
    assert "32 epochs" in one.claim
    assert found(tmp_path, sft(losses, epochs=2), "L43") is None
    assert found(tmp_path, sft([3.4, 2.7, 2.3, 1.5, 1.2, 1.1, 1.0, 0.9, 0.9], epochs=32), "L43") is None


def test_a_loss_of_0_where_nothing_is_paid_is_not_of_advantages(tmp_path: Path) -> None:
    assert found(tmp_path, sft([*FALLS, 0.00004, 0.00003]), "D02") is None


def test_a_loss_that_leaps_in_single_steps(tmp_path: Path) -> None:
    wavers = random.Random(3)
    steps = [{"loss": wavers.uniform(-0.05, 0.05)} for _ in range(30)]
    assert found(tmp_path, trl(steps), "L44") is None
    steps[7], steps[19] = {"loss": 24.0, "kl": 23.0}, {"loss": 212.0, "kl": 210.0}
    one = found(tmp_path, trl(steps), "L44")
    assert one is not None
    assert one.severity == "warning"
    assert "212 at step 20" in one.claim
    assert "kl leaps with it" in one.claim


def test_a_reward_that_falls_in_few_lines(tmp_path: Path) -> None:
    def of(values: list[float]) -> Finding | None:
        text = trl([{"reward": each, "rewards/accuracy/mean": each} for each in values])
        return next((one for one in diagnosed(tmp_path, text).findings if "the reward falls" in one.claim), None)

    one = of([0.62, 0.6, 0.55, 0.5, 0.41, 0.36, 0.3, 0.28])
    assert one is not None
    assert one.severity == "warning"
    assert of([0.62, 0.5, 0.6, 0.55, 0.58, 0.61, 0.5, 0.6]) is None


def test_a_reward_of_fifty_steps_many_of_which_teach_nothing(tmp_path: Path) -> None:
    wavers = random.Random(1)
    lines = []
    for n in range(1, 51):
        right = 0 if n % 4 == 0 else wavers.choice([1, 2, 2, 3])
        loss = 0.0 if right == 0 else wavers.uniform(-3, 3)
        lines.append(f"[run]  {n}/50 | loss={loss:.4f} | reward={right / 8:.3f} | acc={100 * right / 8:.1f}%\n")
    one = found(tmp_path, "".join(lines), "L40")
    assert one is not None
    assert one.severity == "warning"
    assert "does not rise in 50 steps" in one.claim


def first(folder: Path, text: str) -> Finding:
    return next(one for one in diagnosed(folder, text).findings if one.severity != "info")


def raising(last: str, *frames: str, before: str = "") -> str:
    lines = "".join(f"  {frame}\n" for frame in frames)
    return f"{before}Traceback (most recent call last):\n{lines}{last}\n"


def test_a_kind_that_is_not_made_is_the_one_the_overrides_choose(tmp_path: Path) -> None:
    before = "Error executing job with overrides: ['algorithm.adv_estimator=rloo', 'data.train_batch_size=128']\n"
    frame = 'File "/w/verl/trainer/ppo/ray_trainer.py", line 546, in init_workers\n    raise NotImplementedError'
    one = first(tmp_path, raising("NotImplementedError", frame, before=before))
    assert "algorithm.adv_estimator=rloo is not made" in one.claim


@pytest.mark.parametrize(
    ("last", "says"),
    [
        ("ValueError: rollout requires info['task_id']", "no field task_id"),
        ("ValueError: Unknown format code 'f' for object of type 'str'", "a str stands where a number is printed"),
        ("ValueError: sequence length 5284 > 4096", "5,284 tokens is longer than the limit of 4,096"),
        ("RuntimeError: packed sequence of 9001 tokens exceeds the maximum 8192", "9,001 tokens is longer"),
        ("huggingface_hub.errors.LocalEntryNotFoundError: Cannot find the requested files in the disk cache and "
         "outgoing traffic has been disabled.", "not in this node's cache"),
        ("ImportError: AutoVideoProcessor requires the Torchvision library but it was not found in your environment.",
         "a package is not installed"),
    ],
)  # fmt: skip
def test_what_few_words_and_the_text_say_together(tmp_path: Path, last: str, says: str) -> None:
    one = first(tmp_path, raising(last, 'File "/w/train.py", line 19, in main\n    run()'))
    assert one.id == "L06"
    assert says in one.claim


def test_a_module_that_python_does_not_find_ends_a_log(tmp_path: Path) -> None:
    one = first(tmp_path, "+ python3 -m verl.trainer.main_ppo\n/usr/bin/python3: No module named verl\n")
    assert one.id == "L06"


@pytest.mark.parametrize(
    "line",
    [
        "Ray debugger is listening on 10.0.0.4:42751",
        "RemotePdb session open at localhost:4444, use 'ray debug' to connect...",
        "Waiting for debugger to attach...",
    ],
)
def test_a_run_that_waits_in_a_debugger(tmp_path: Path, line: str) -> None:
    one = first(tmp_path, f"starting\n(TaskRunner pid=9) {line}\n")
    assert one.id == "L26"
    assert "waits in a debugger" in one.claim
    assert all(each.id != "L26" for each in diagnosed(tmp_path, f"{line}\n" + trl([{}] * 3)).findings)


def test_a_wait_that_has_only_begun_is_none(tmp_path: Path) -> None:
    line = "(pid=5) Waiting for register center actor abc to be ready. Elapsed time: {} seconds out of 300 seconds.\n"
    assert found(tmp_path, line.format(0), "L26") is None
    assert found(tmp_path, "".join(line.format(n) for n in range(0, 280, 30)), "L26") is not None


def test_greedy_generation_of_a_run_that_pays_for_nothing_is_an_evaluations(tmp_path: Path) -> None:
    line = "UserWarning: `do_sample` is set to `False`. However, `temperature` is set to `0.9`\n"
    assert (one := found(tmp_path, sft(FALLS) + line, "L29")) is not None
    assert one.severity == "info"
    assert (one := found(tmp_path, trl([{}] * 3) + line, "L29")) is not None
    assert one.severity == "warning"


def test_an_error_of_a_run_that_takes_no_step_is_why(tmp_path: Path) -> None:
    line = (
        "2025-06-24 13:30:48,637 - models.qwen - ERROR - Failed to load model: \n"
        "AutoVideoProcessor requires the Torchvision library but it was not found in your environment.\n"
    )
    one = first(tmp_path, line * 3)
    assert one.id == "L29"
    assert "no step is taken" in one.claim
    assert "Torchvision" in one.claim


def memory(tried: str, free: str, held: str, spare: str, frames: str = "", own: str = "") -> str:
    return (
        f"{frames}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of "
        f"79.19 GiB of which {free} is free. {own}Of the allocated memory {held} is allocated by PyTorch, and {spare} "
        "is reserved by PyTorch but unallocated.\n"
    )


def of_memory(folder: Path, text: str) -> Finding:
    return next(one for one in diagnosed(folder, text).findings if one.id == "D36")


def test_a_gpu_full_of_tensors_is_not_fragmented(tmp_path: Path) -> None:
    full = of_memory(tmp_path, memory("270.00 MiB", "250.00 MiB", "78.14 GiB", "376.00 MiB"))
    assert "78.14 of 79.19 GiB are held by tensors" in full.cause
    idle = of_memory(tmp_path, memory("2.00 GiB", "250.00 MiB", "60.00 GiB", "15.00 GiB"))
    assert "fragmentation" in idle.cause


def test_what_is_neither_free_nor_this_processs_own_is_anothers(tmp_path: Path) -> None:
    own = "Including non-PyTorch memory, this process has 20.10 GiB memory in use. "
    one = of_memory(tmp_path, memory("2.00 GiB", "1.00 GiB", "19.00 GiB", "100.00 MiB", own=own))
    assert "other processes hold 58.09 of the GPU's 79.19 GiB" in one.cause


def test_a_bar_of_weights_that_are_loaded_is_none_of_steps(tmp_path: Path) -> None:
    bar = "{}  0%|          | 0/4 [00:00<?, ?it/s]\n"
    starts = "".join(f"2026-01-01 10:00:0{second} INFO train.py:{second} setup\n" for second in range(4))
    starts += "wandb: Tracking run with wandb version 0.13.1\n"
    assert found(tmp_path, starts + bar.format("Loading checkpoint shards: "), "L26") is None
    assert found(tmp_path, starts + bar.format(""), "L26") is not None


def test_a_process_that_torch_does_not_find_in_its_container_has_what_its_tensors_hold(tmp_path: Path) -> None:
    unseen = "Including non-PyTorch memory, this process has 0 bytes memory in use. "
    alone = of_memory(tmp_path, memory("41.73 GiB", "33.40 GiB", "45.23 GiB", "19.90 MiB", own=unseen))
    assert "other processes" not in alone.cause
    beside = of_memory(tmp_path, memory("2.00 GiB", "1.00 GiB", "19.00 GiB", "100.00 MiB", own=unseen))
    assert "other processes hold 56.09 of the GPU's 79.19 GiB" in beside.cause


def test_a_layer_that_is_computed_again_in_the_backward(tmp_path: Path) -> None:
    torch = "/p/site-packages/torch"
    frames = (
        f'Traceback (most recent call last):\n  File "{torch}/utils/checkpoint.py", line 321, in backward\n'
        "    torch.autograd.backward(outputs)\n"
        f'  File "{torch}/autograd/graph.py", line 823, in _engine_run_backward\n    return run_backward(\n'
    )
    one = of_memory(tmp_path, memory("5.72 GiB", "5.21 GiB", "36.00 GiB", "2.44 GiB", frames))
    assert "gradient checkpointing" in one.cause


def of_summary(folder: Path, name: str) -> Diagnosis:
    summary = {
        "train/frac_reward_zero_std": 0.959, "train/reward": 0.49, "train/reward_std": 0.059, "train/grad_norm": 0.017,
        "train/loss": 0.0037, "_runtime": 20264, "_timestamp": 1.77e9, "_step": 8100, "_wandb": {"runtime": 20264},
        "train/global_step": 1000,
    }  # fmt: skip
    return of_file(written(folder, json.dumps(summary), name))


def test_a_trackers_summary_is_read_as_metrics(tmp_path: Path) -> None:
    assert [one.id for one in of_summary(tmp_path, "wandb-summary.json").findings if one.severity != "info"] == ["D01"]


def test_clocks_parts_of_a_script_and_shares_are_no_steps(tmp_path: Path) -> None:
    dated = "".join(f"[04/18 03:20:{n:02d}] INFO loading part {n}\n" for n in range(9))
    parts = "".join(f"Step {n}/5: prepare\n" for n in range(1, 4))
    summed = "".join(f"Step {n}/50 | loss 0.1 | reward 0.2\n" for n in range(1, 51)) + "Zero-reward steps: 9/50 (18%)\n"
    for text in (dated, parts, summed):
        assert found(tmp_path, trl([{}] * 3) + text, "L42") is None


def test_a_run_that_is_stopped_early_on_purpose_is_no_warning(tmp_path: Path) -> None:
    text = trl([{}] * 3) + bars(40, 100) + "\nEarly stopping triggered at step 40\nwandb: Run summary:\n"
    one = found(tmp_path, text, "L42")
    assert one is None or one.severity == "info"


def test_a_line_of_each_step_that_tells_its_runtime_is_no_end(tmp_path: Path) -> None:
    line = "{{'loss': 0.0107, 'grad_norm': 0.29, 'learning_rate': 3e-05, 'epoch': 2.3, 'train_runtime': {}}}\n"
    text = "".join(line.format(37129 + n) for n in range(5)) + bars(400, 1000)
    one = found(tmp_path, text, "L42")
    assert one is not None
    assert "step 400 of 1,000" in one.claim


def test_a_program_that_says_nothing_of_steps_is_told_where_it_ends(tmp_path: Path) -> None:
    lines = "".join(f"2025-11-02 05:41:2{n} INFO loading the tokenizer, part {n}\n" for n in range(5))
    one = found(tmp_path, lines, "L42")
    assert one is not None
    assert one.severity == "info"
    assert "no step of training" in one.claim


def test_a_function_that_never_pays_beside_a_reward_that_rests(tmp_path: Path) -> None:
    def of(rewards: list[float]) -> Finding:
        text = trl([{"reward": each, "rewards/accuracy/mean": each, "rewards/format/mean": 0.0} for each in rewards])
        return next(one for one in diagnosed(tmp_path, text).findings if "never given" in one.claim)

    assert of([1.2, 1.25, 1.18, 1.22, 1.26, 1.19, 1.2, 1.21, 1.24]).severity == "warning"
    assert of([0.2, 0.25, 0.3, 0.36, 0.4, 0.46, 0.5, 0.56, 0.6]).severity == "info"


def test_a_long_path_does_not_hide_what_is_wrong_with_it(tmp_path: Path) -> None:
    path = "/mnt/cluster/users/somebody/projects/grpo-dynamics/configs/accelerate_multi_gpu.yaml"
    last = f"ValueError: The config file at {path} had unknown keys (['main_training_tp_size']), please try upgrading"
    one = first(tmp_path, raising(last, 'File "/w/.venv/bin/accelerate", line 10, in <module>\n    sys.exit(main())'))
    assert "a configuration file holds keys" in one.claim
    assert "main_training_tp_size" in one.claim


def test_tasks_that_are_cancelled_as_a_program_closes_are_no_death(tmp_path: Path) -> None:
    closes = raising("asyncio.exceptions.CancelledError", 'File "/w/move.py", line 214, in close\n    loop.run(task)')
    assert (one := found(tmp_path, closes + "wandb: Find logs at: wandb/run-1/logs\n", "L06")) is not None
    assert one.severity == "info"
    why = raising("ValueError: no such answer", 'File "/w/train.py", line 3, in main\n    f()')
    assert first(tmp_path, why + closes).claim.endswith("ValueError: no such answer")


def test_what_python_ignores_ends_nothing_though_ray_leaves_its_head_out(tmp_path: Path) -> None:
    ignored = (
        "(W pid=2) Exception ignored in: <function CompiledFxGraph.__del__ at 0x7d> [repeated 26x across cluster]\n"
        '(W pid=2)   File "/p/site-packages/torch/_inductor/output_code.py", line 9, in __del__\n'
        "(W pid=2)     if self.compiled_fn_runner is not None: [repeated 26x across cluster]\n"
        "(W pid=2) AttributeError: 'CompiledFxGraph' object has no attribute 'compiled_fn_runner'\n"
    )
    assert found(tmp_path, trl([{}] * 3) + ignored, "L06") is None


def test_an_exception_before_the_word_that_the_job_succeeded_ended_nothing(tmp_path: Path) -> None:
    raised = raising("ValueError: no", 'File "/w/a.py", line 3, in worker\n    f()')
    over = "2026-02-27 04:52:30,696\tSUCC cli.py:66 -- \x1b[32mJob 'raysubmit_sqPU8' succeeded\x1b[39m\n"
    assert first(tmp_path, trl([{}] * 3) + raised).id == "L06"
    assert (one := found(tmp_path, trl([{}] * 3) + raised + over, "L06")) is not None
    assert one.severity == "info"


def test_an_evaluations_temperature_of_0_is_as_it_should_be(tmp_path: Path) -> None:
    text = "".join(f"step {n} | temperature 0.0 | accuracy 0.41\n" for n in range(1, 20))
    assert found(tmp_path, text, "L31") is None


@pytest.mark.parametrize(("minutes", "stands"), [(5, True), (1, False)])
def test_a_bar_that_stands_while_other_lines_go_on(tmp_path: Path, minutes: int, stands: bool) -> None:
    beats = "".join(
        f"(Engine pid=9) INFO 12-25 {10 + n * minutes // 60:02d}:{n * minutes % 60:02d}:01 [loggers.py:100] alive\n"
        for n in range(14)
    )
    one = found(tmp_path, trl([{}] * 3) + bars(40, 100) + "\n" + beats, "L42")
    assert one is not None
    assert (one.severity == "warning") == stands
    assert ("stands at step 40 of 100" in one.claim) == stands


def test_a_counter_that_is_told_of_every_fifty_steps_has_come_to_its_end(tmp_path: Path) -> None:
    text = "".join(f"[{n}/240] acc so far 0.7\n" for n in range(50, 201, 50))
    assert (one := found(tmp_path, trl([{}] * 3) + text, "L42")) is None or "200 of 240" not in one.claim


def test_a_disk_that_is_asked_for_its_size_is_no_death(tmp_path: Path) -> None:
    assert found(tmp_path, trl([{}] * 3) + "df: /root/.triton/autotune: No such file or directory\n", "L06") is None


def test_a_traceback_behind_a_loggers_stderr_and_a_rank(tmp_path: Path) -> None:
    lines = (
        "Traceback (most recent call last):",
        '  File "/w/run.py", line 12, in main',
        "    worker.load()",
        "AttributeError: '_OpNamespace' '_C' object has no attribute 'silu_and_mul'",
    )
    text = "".join(f"2025-05-03 12:32:54 | ERROR | stderr | [rank0]: {line}\n" for line in lines)
    one = first(tmp_path, text)
    assert one.id == "L06"
    assert "silu_and_mul" in one.claim


def test_a_bar_that_has_moved_does_not_stand_at_0(tmp_path: Path) -> None:
    text = "loading the tokenizer\n  0%|          | 0/15625 [00:00<?, ?it/s]" + bars(105, 15625) + "\n"
    findings = diagnosed(tmp_path, text).findings
    assert [one.id for one in findings] == ["L42"]
    assert "step 105 of 15,625" in findings[0].claim
