"""Out of GPU memory: whose it is, by the allocator's line and the innermost frames, and not by words far out."""

from __future__ import annotations

from pathlib import Path

from tests.replay_core.diagnose.logs import diagnosed, only

_LINE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of 79.19 GiB of "
    "which {free} is free. {others}Of the allocated memory {own} is allocated by PyTorch, and 100.00 MiB is reserved "
    "by PyTorch but unallocated."
)


def _out(folder: Path, frames: list[tuple[str, str, str]], **sizes: str) -> str:
    told = "".join(f'  File "{file}", line 7, in {function}\n    {code}\n' for file, function, code in frames)
    text = f"INFO 10:00:00 training begins\nTraceback (most recent call last):\n{told}{_LINE.format(**sizes)}\n"
    found = only(diagnosed(folder, text), "D36")
    return f"{found.claim} | {found.cause}"


def test_what_others_hold_leads_where_it_would_have_fitted_without_them(tmp_path: Path) -> None:
    said = _out(
        tmp_path, [("/w/t.py", "dpo_loss", "logps = log_softmax(logits)")], tried="4.44 GiB", free="1.77 GiB",
        others="Process 11 has 10.67 GiB memory in use. Process 12 has 30.03 GiB memory in use. Process 13 has 36.70 "
        "GiB memory in use. ", own="36.00 GiB",
    )  # fmt: skip
    assert "| other processes hold 40.7 of the GPU's 79.19 GiB" in said
    assert "besides, logits" in said


def test_an_engine_that_captures_graphs_is_not_said_to_compute_logits(tmp_path: Path) -> None:
    frames = [
        ("/v/sglang/srt/model_executor/model_runner.py", "__init__", "self.init_device_graphs()"),
        ("/v/sglang/srt/model_executor/cuda_graph_runner.py", "capture", "self.logits_processor.run()"),
        *[("/v/torch/nn/modules/module.py", "_call_impl", "return forward_call(*args)")] * 8,
        ("/v/sglang/srt/layers/linear.py", "forward", "return F.linear(x, w)"),
    ]
    said = _out(tmp_path, frames, tried="32.00 MiB", free="59.06 MiB",
                others="Process 11 has 72.43 GiB memory in use. ", own="5.81 GiB")  # fmt: skip
    assert "the start of the inference engine" in said
    assert "logits" not in said
    assert "other processes hold" in said


def test_a_forward_that_asks_is_no_optimizer_that_was_named_far_out(tmp_path: Path) -> None:
    frames = [
        ("/w/train.py", "train_step", "self.optimizer_wrapper.run(batch)"),
        *[("/v/torch/nn/modules/module.py", "_call_impl", "return forward_call(*args)")] * 8,
        ("/w/model/op.py", "forward", "s = torch.empty(B, T, H)"),
    ]
    said = _out(tmp_path, frames, tried="7.71 GiB", free="4.48 GiB", others="", own="11.45 GiB")
    assert "the model's forward (forward, op.py:7)" in said
    assert "actor" not in said
    assert "optimizer" not in said


def test_the_update_that_called_a_backward_is_named(tmp_path: Path) -> None:
    frames = [
        ("/w/verl/workers/actor/dp_actor.py", "update_policy", "loss.backward()"),
        ("/v/torch/_tensor.py", "backward", "torch.autograd.backward(self)"),
        ("/v/torch/autograd/graph.py", "_engine_run_backward", "return run(*args)"),
    ]
    said = _out(tmp_path, frames, tried="2.70 GiB", free="2.25 GiB", others="", own="20.67 GiB")
    assert "in the actor's update" in said
