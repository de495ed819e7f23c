"""Where an exception was raised: what its frames tell of a text that no table knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.replay_core.diagnose.logs import diagnosed

_LIB = "/home/u/miniconda3/envs/tools/lib/python3.11/site-packages"


def _text(error: str, *places: tuple[str, str, str]) -> str:
    top = ("/home/u/job/train.py", "<module>", "main()")
    frames = "".join(f'  File "{file}", line 12, in {name}\n    {code}\n' for file, name, code in (top, *places))
    return f"Traceback (most recent call last):\n{frames}{error}\n"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (("/home/u/job/run.py", "save_checkpoint", "write(state)"), "while a checkpoint is saved"),
        ((f"{_LIB}/datasets/builder.py", "_prepare_split", "read()"), "while data is loaded"),
        ((f"{_LIB}/transformers/modeling_utils.py", "from_pretrained", "load()"), "while the model is loaded"),
        ((f"{_LIB}/vllm/engine/core.py", "step", "run()"), "in the inference engine"),
        ((f"{_LIB}/transformers/processing_utils.py", "__call__", "merge()"), "while a prompt is made into tokens"),
        ((f"{_LIB}/torch/autograd/graph.py", "_engine_run_backward", "run()"), "in the backward pass"),
        (("/home/u/job/rewards.py", "format_reward", "match(text)"), "in the reward function"),
        (("/home/u/job/envs/shop.py", "step", "click()"), "in an environment or tool of the agent"),
        ((f"{_LIB}/torch/optim/adamw.py", "step", "update()"), "in the optimizer's step"),
    ],
)
def test_an_unknown_text_is_placed_by_its_frames(place: tuple[str, str, str], words: str, tmp_path: Path) -> None:
    found = diagnosed(tmp_path, _text("RuntimeError: the frobnicator is out of flux", place)).findings[0]
    assert words in found.claim
    assert "the frobnicator is out of flux" in found.claim
    assert found.next_step


def test_frames_that_tell_of_nothing_name_the_runs_own_code(tmp_path: Path) -> None:
    text = _text(
        "RuntimeError: out of flux", ("/home/u/job/mix.py", "blend", "stir(x)"), (f"{_LIB}/pot/a.py", "stir", "boil()")
    )
    found = diagnosed(tmp_path, text).findings[0]
    assert "blend (mix.py:12)" in found.claim
    assert "/home/u/job/mix.py:12" in found.next_step


@pytest.mark.parametrize(
    ("error", "place", "words"),
    [
        ("IndexError: index 1 is out of bounds for dimension 0 with size 1",
         (f"{_LIB}/transformers/models/vl/processing_vl.py", "__call__", "n = video_grid_thw[index].prod()"),
         "more placeholders of images or videos"),
        ("TypeError: 'int' object is not subscriptable",
         ("/home/u/job/trainer.py", "compute_loss", "order = torch.randperm(frames[0].size[0])"), ".shape` is meant"),
        ("TypeError: 'tuple' object is not callable",
         ("/home/u/job/trainer.py", "compute_loss", "mask = shape(2)"), "a value of type tuple is called in"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/ckpt/global_step15'",
         ("/home/u/job/save.py", "save_ckpt", "shutil.rmtree(oldest)"), "to be deleted is gone already"),
        ("OSError: [Errno 8] Exec format error: '/usr/local/bin/engine'",
         ("/usr/lib/python3.10/subprocess.py", "_execute_child", "raise child_exception_type(errno_num)"),
         "cannot be run on this machine"),
        ("bdb.BdbQuit", (f"{_LIB}/../bdb.py", "dispatch_line", "raise BdbQuit"), "breakpoint"),
    ],
)  # fmt: skip
def test_the_line_that_raised_and_its_words_tell_together(
    error: str, place: tuple[str, str, str], words: str, tmp_path: Path
) -> None:
    assert words in diagnosed(tmp_path, _text(error, place)).findings[0].claim


def test_an_answer_that_a_parser_refuses_is_the_reward_functions_to_catch(tmp_path: Path) -> None:
    text = _text(
        "SyntaxError: invalid syntax",
        ("/home/u/job/train.py", "accuracy_reward", "answer = ast.literal_eval(text)"),
        ("/usr/lib/python3.11/ast.py", "literal_eval", "node = parse(text, mode='eval')"),
    )
    assert "the reward function raises on a response" in diagnosed(tmp_path, text).findings[0].claim
