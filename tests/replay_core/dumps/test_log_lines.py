"""Lines of a log behind what other programs put before them, and what a log tells beside numbers."""

from __future__ import annotations

from pathlib import Path

from replay_core.dumps import open_run
from replay_core.dumps.log_lines import line_of, lines_of
from replay_core.records import Inline, Run


def log(folder: Path, text: str, name: str = "train.log") -> Run:
    (folder / name).write_text(text)
    return open_run(folder / name)


def named(run: Run, name: str) -> list[tuple[int | None, int | None, object, int | None]]:
    """(step, rank, value, line) of every field of that name."""
    return [
        (record.key.step, record.key.rank, ref.source.value, ref.line)
        for record in run.records
        for ref in record.tensors()
        if ref.name == name and isinstance(ref.source, Inline)
    ]


def test_a_prefix_names_the_process_and_goes() -> None:
    line = line_of(3, "\x1b[36m(TaskRunner pid=812, ip=10.0.0.7)\x1b[0m step:1 - a:1")
    assert (line.number, line.text, line.stream, line.rank) == (3, "step:1 - a:1", "812", None)
    line = line_of(1, "[rank3]: Traceback")
    assert (line.text, line.rank) == ("Traceback", 3)
    assert line_of(1, "(see below) x").text == "(see below) x"


def test_lines_are_numbered_as_an_editor_does(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"one\r\ntwo 1%\rtwo 2%\rtwo\n\nfour")
    assert [(line.number, line.text) for line in lines_of(tmp_path / "a.log")] == [
        (1, "one"), (2, "two 1%"), (2, "two 2%"), (2, "two"), (4, "four"),
    ]  # fmt: skip


def test_a_value_says_its_line(tmp_path: Path) -> None:
    run = log(tmp_path, " 10%|# | 1/9\r{'loss': 0.5, 'step': 1}\nnoise\n{'loss': 0.25, 'step': 2}\n")
    assert named(run, "loss") == [(1, None, 0.5, 1), (2, None, 0.25, 3)]


def test_ranks_that_print_the_same_are_counted_apart(tmp_path: Path) -> None:
    lines = [f"[rank{rank}]: {{'loss': {step}.{rank}}}" for step in (0, 1) for rank in (0, 1)]
    run = log(tmp_path, "\n".join(lines) + "\n")
    assert named(run, "loss") == [(0, 0, 0.0, 1), (0, 1, 0.1, 2), (1, 0, 1.0, 3), (1, 1, 1.1, 4)]


def test_interleaved_micro_batches_stay_with_their_rank(tmp_path: Path) -> None:
    one = "[rank{r}]:   [Micro {m}] 4. Loss computed: mem=0MB, time=0.1s, pg_loss={v}, kl=0.0, total=0.0"
    text = "\n".join(one.format(r=r, m=m, v=m + r / 10) for m in (0, 1) for r in (0, 1))
    assert named(log(tmp_path, text), "pg_loss") == [(0, 0, 0.0, 1), (0, 1, 0.1, 2), (0, 0, 1.0, 3), (0, 1, 1.1, 4)]


def test_several_formats_in_one_file_are_all_read(tmp_path: Path) -> None:
    text = (
        "iter 0: loss 0.5, time 12.0ms\n{'loss': 0.25, 'step': 1}\nstep:2 - actor/pg_loss:0.125\n"
        "WARNING: a library's own\nstep 3: {'train/loss': 0.0625}\n"
    )
    run = log(tmp_path, text)
    assert run.steps() == [0, 1, 2, 3]
    assert named(run, "warnings")[0][2:] == (["a library's own"], 4)


def test_an_evaluation_belongs_to_the_step_before_it(tmp_path: Path) -> None:
    text = "{'loss': 0.5}\n{'eval_loss': 0.7, 'eval_reward': 0.1}\n{'loss': 0.25}\n"
    run = log(tmp_path, text)
    assert run.steps() == [0, 1]
    assert named(run, "eval_loss") == [(0, None, 0.7, 2)]


def test_one_pasted_line_in_a_file_of_any_name_is_a_log(tmp_path: Path) -> None:
    run = log(tmp_path, "{'loss': 0.0, 'reward_std': 0.0, 'epoch': 0.33}", "pasted")
    assert (run.dialect, run.steps()) == ("log", [0])


def test_an_out_of_memory_alone_is_a_log_with_its_frames(tmp_path: Path) -> None:
    text = (
        '  File "loss.py", line 3, in get_log_probs\n    logits = logits.float()\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 10.80 GiB.\n"
    )
    ((step, rank, told, line),) = named(log(tmp_path, text), "event.oom.0")
    assert (step, rank, line) == (None, None, 3)
    assert "Tried to allocate 10.80 GiB" in str(told)
    assert "logits = logits.float()" in str(told)


def test_what_is_told_too_often_is_counted(tmp_path: Path) -> None:
    text = "step:1 - a:1\n" + "[__recompiles] Recompiling function forward in m.py:3\n" * 203
    run = log(tmp_path, text)
    assert named(run, "event.recompile.more")[0][2] == 3
    assert len(named(run, "event.recompile.199")) == 1


def test_half_a_log_is_read_to_its_end(tmp_path: Path) -> None:
    run = log(tmp_path, "step:1 - actor/pg_loss:0.5\nstep:2 - actor/pg_lo")
    assert run.steps() == [1]


def test_a_line_that_is_said_thousands_of_times_does_not_use_up_what_a_log_may_cost(tmp_path: Path) -> None:
    said = (
        "Mismatch between tokenized prompt and the start of tokenized prompt+chosen. This may be due to unexpected "
        "tokenizer behavior, whitespace issues, or special token handling. Verify that the tokenizer is consistent.\n"
    )
    (tmp_path / "train.log").write_text(said * 9000 + "{'loss': 0.69, 'grad_norm': 0.4}\n")
    assert open_run(tmp_path / "train.log").steps()


def _stamped(lines: list[str]) -> str:
    """The lines as `docker logs --timestamps` writes them."""
    return "".join(f"2026-02-03T10:{n // 60:02}:{n % 60:02}.{n:09}Z {line}\n" for n, line in enumerate(lines))


def test_a_containers_clock_before_every_line_is_none_of_the_line(tmp_path: Path) -> None:
    lines = ["CUDA Version 12.9"] * 8 + ["{'loss': 0.5, 'step': 1}", "  10%|# | 1/9\r  20%|# | 2/9"]
    path = tmp_path / "a.log"
    path.write_text(_stamped(lines))
    found = list(lines_of(path))
    assert [line.text for line in found][-3:] == ["{'loss': 0.5, 'step': 1}", "  10%|# | 1/9", "  20%|# | 2/9"]
    assert found[8].stamp == "2026-02-03T10:00:08.000000008Z"
    assert found[8].number == 9


def test_tables_side_by_side_behind_a_containers_clock_are_read(tmp_path: Path) -> None:
    lines = ["starting"] * 8
    for step in (1, 2):
        lines += [
            f"20260203-10:00:0{step}.392 StatsLogger INFO: Epoch 1/1 Step {step}/9 Train step {step}/9 done.",
            "╒══════════════════════╤═════════════╤═════════════════════╤═══",
            f"│ grpo/actor_loss/avg  │ {step}.0000e+00 │ grpo/entropy/avg    │ 2.5e-01 │ grpo/cut",
            "├──────────────────────┼─────────────┼─────────────────────┼───",
            "│ rollout/reward       │ 0.0000e+00  │ grpo/grad_norm      │ 5.0e-01 │",
            "╘══════════════════════╧═════════════╧═════════════════════╧═══",
        ]
    run = log(tmp_path, _stamped(lines))
    assert [(step, value) for step, _, value, _ in named(run, "grpo/actor_loss/avg")] == [(1, 1.0), (2, 2.0)]
    assert [value for _, _, value, _ in named(run, "grpo/grad_norm")] == [0.5, 0.5]


def test_an_environments_steps_are_none_of_a_trainer_that_numbers_none(tmp_path: Path) -> None:
    turn = "{'step': 0, 'agent': 'maker', 'direction': 0.03, 'reward': 1.5}"
    run = log(tmp_path, "".join(f"{{'loss': 0.{n}, 'reward': 0.5, 'epoch': 0.1}}\n{turn}\n" for n in range(1, 7)))
    assert [(step, value) for step, _, value, _ in named(run, "loss")] == [(n - 1, n / 10) for n in range(1, 7)]
