"""Exceptions that tell their cause by themselves, whatever library raised them: numbers that contradict each other,
types, devices, parts that are not installed, new names, advice; and which of several processes' words is the first.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from replay_core.diagnose.by_itself import advice, not_divisible
from replay_core.diagnose.finding import Finding
from tests.replay_core.diagnose.logs import diagnosed

_TOP = ("/home/u/job/train.py", "main", "trainer.fit()")
_PACKAGES = "/opt/venv/lib/python3.11/site-packages"


def raised(error: str, *places: tuple[str, str, str]) -> str:
    frames = "".join(f'  File "{file}", line 12, in {name}\n    {code}\n' for file, name, code in (_TOP, *places))
    return f"Traceback (most recent call last):\n{frames}{error}\n"


def died(tmp_path: Path, text: str) -> Finding:
    found = diagnosed(tmp_path, text).findings[0]
    assert found.id == "L06", found
    return found


@pytest.mark.parametrize(
    ("error", "place", "words"),
    [
        ("RuntimeError: \"LayerNormKernelImpl\" not implemented for 'Half'", None, "a model in fp16 runs on the CPU"),
        ("RuntimeError: \"addmm_impl_cpu_\" not implemented for 'BFloat16'", None, "a model in bf16 runs on the CPU"),
        (
            "RuntimeError: Expected tensor for argument #1 'indices' to have one of the following scalar types: "
            "Long, Int; "
            "but got torch.cuda.FloatTensor instead (while checking arguments for embedding)",
            None, "token ids are FloatTensor where integers (Long, Int) are needed",
        ),
        ("RuntimeError: gather(): Expected dtype int64 for index", None, "index are no integers"),
        ("RuntimeError: CUDA is required but not available for quantisation.",
         None, "no GPU that this process can use"),
        ("RuntimeError: Workspace can't be allocated, no enough memory", None, "out of memory"),
        (
            "RuntimeError: FusedLinear was called with fused_accumulation set to True but the custom CUDA extension "
            "fused_weight_cuda module is not found. To use fused_accumulation you must install it with --cuda_ext.",
            None, "fused_weight_cuda is not installed, which fused_accumulation asks for",
        ),
        (
            "ImportError: FlashAttention3 has been toggled on, but it cannot be used due to the following error: "
            "the package "
            "flash_attn_3 doesn't seem to be installed.", None, "flash_attn_3 is not installed",
        ),
        ("ValueError: Received inconsistently sized batches of images (1) and text (2).",
         None, "images 1 against text 2"),
        (
            "ValueError: Target size (torch.Size([4])) must be the same as input size (torch.Size([4, 1]))", None,
            "target has the size [4] and input [4, 1]",
        ),
        ("AssertionError: len(advantages)=96 len(rewards)=128", None, "len(advantages) = 96, len(rewards) = 128"),
        ("ValueError: All arrays must be of the same length",
         None, "lists that belong together are of different lengths"),
        ("RuntimeError: index 151669 is out of bounds for dimension 2 with size 151643", None,
         "token id 151669 is beyond the vocabulary of 151,643"),
        ("TypeError: '<=' not supported between instances of 'float' and 'str'", None,
         "a text stands where a number is needed"),
        ("TypeError: can't multiply sequence by non-int of type 'float'", None,
         "a text stands where a number is needed"),
        ("TypeError: TrainingArguments.__init__() got an unexpected keyword argument 'evaluation_strategy'", None,
         "now it is eval_strategy"),
        (
            "ValueError: User-specified max_model_len (40960) is greater than the derived max_model_len "
            "(max_position_embeddings=32768 in the model's config.json).", None,
            "max_model_len is set to 40,960, more than the 32,768",
        ),
        (
            "RuntimeError: shape '[4, 512, 32, 128]' is invalid for input of size 4194304", None,
            "[4, 512, 32, 128] holds 8,388,608 numbers, and there are 4,194,304, 2 times fewer",
        ),
        ("RuntimeError: shape '[0, 8]' is invalid for input of size 4", None, "holds 0 numbers, and there are 4"),
        ("RuntimeError: shape '[-1, 0]' is invalid for input of size 4", None, "holds 0 numbers, and there are 4"),
        ("RuntimeError: shape '[-1, 8]' is invalid for input of size 12", None, "12 is no multiple of 8"),
        ("RuntimeError: shape '[2, 4]' is invalid for input of size 12", None, "there are 12, 1.5 times as many"),
        (
            "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://huggingface.co/api/repos/create",
            None, "the hub refuses to be written to",
        ),
        (
            "RuntimeError: The expanded size of the tensor (16) must match the existing size (2) at non-singleton "
            "dimension 0.  Target sizes: [16].  Tensor sizes: [2]",
            (f"{_PACKAGES}/trl/trainer/grpo_trainer.py", "_prepare_inputs",
             "rewards_per_func[:, i] = torch.tensor(out)"),
            "a reward function returned 2 numbers for 16 completions",
        ),
        (
            "RuntimeError: torch.cat(): expected a non-empty list of Tensors",
            (f"{_PACKAGES}/deepspeed/runtime/zero/partition_parameters.py", "wait", "torch.cat(partitions)"),
            "ZeRO-3 gathers a parameter of which it holds no part",
        ),
        ("_pickle.UnpicklingError: Weights only load failed. Do those steps only if you trust the source.", None,
         "torch.load refuses to run code of a pickle"),
        ("AssertionError: (32, 1024)", ("/home/u/job/data.py", "cut",
         "assert len(rows) % size == 0, (len(rows), size)"),
         "32 is no multiple of 1024"),
    ],
)  # fmt: skip
def test_an_exception_tells_its_cause_by_itself(
    error: str, place: tuple[str, str, str] | None, words: str, tmp_path: Path
) -> None:
    found = died(tmp_path, raised(error, *([place] if place else [])))
    assert words in f"{found.claim} {found.cause}", found


@pytest.mark.parametrize(
    ("error", "place"),
    [
        ("RuntimeError: torch.cat(): expected a non-empty list of Tensors", None),
        ("requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://huggingface.co/m/resolve/main/x",
         None),
        ("AttributeError: 'GRPOTrainer' object has no attribute 'model_wrapped'",
         (f"{_PACKAGES}/trl/trainer/grpo_trainer.py", "step", "self.model_wrapped.eval()")),
        ("ValueError: the reward (0.5) and the length (12) are logged", None),
    ],
)  # fmt: skip
def test_what_only_looks_like_it_has_another_cause(
    error: str, place: tuple[str, str, str] | None, tmp_path: Path
) -> None:
    found = died(tmp_path, raised(error, *([place] if place else [])))
    for words in ("ZeRO-3 gathers", "to be written to", "asks itself", "against"):
        assert words not in found.claim, found


def test_an_attribute_that_a_class_asks_of_itself_is_no_matter_of_versions(tmp_path: Path) -> None:
    place = ("/home/u/fork/src/open_r1/trainer/grpo_trainer.py", "_generate", "text = self.vlm_module.prepare(x)")
    found = died(tmp_path, raised("AttributeError: 'VLGRPOTrainer' object has no attribute 'vlm_module'", place))
    assert "asks itself for self.vlm_module" in found.claim
    assert "git diff" in found.next_step
    assert "pip show" not in found.next_step


def test_numbers_that_do_not_divide_are_told_with_the_settings_that_have_them(tmp_path: Path) -> None:
    head = (
        "Error executing job with overrides: ['data.train_batch_size=64', 'actor_rollout_ref.rollout.n=5', "
        "'trainer.n_gpus_per_node=6']\n"
    )
    error = "AssertionError: only support equal chunk. Got size of DataProto 320 and chunk 6."
    found = died(tmp_path, head + raised(error))
    assert "320 is no multiple of 6 (trainer.n_gpus_per_node=6, data.train_batch_size=64 x" in found.claim
    assert not_divisible("AssertionError: not equal to micro * steps * ranks 256 != 2 * 18 * 7", "") == (
        "256 is not 2 * 18 * 7 = 252"
    )
    assert not_divisible("ValueError: the batch (1 x 1) must be divisible by 6 answers", "") == (
        "1 x 1 = 1 is no multiple of 6"
    )
    assert not_divisible("AssertionError: 12 is not divisible", "") == ""


def test_counts_that_contradict_each_other_name_the_settings_of_each(tmp_path: Path) -> None:
    head = "Error executing job with overrides: ['a.size=816', 'a.batch_size=8', 'a.rows=16']\n"
    found = died(tmp_path, head + raised("ValueError: inconsistently sized batches of images (8) and text (16)."))
    assert "(a.batch_size=8, a.rows=16)" in found.cause


def test_the_advice_of_an_exceptions_own_words_comes_first(tmp_path: Path) -> None:
    error = (
        "FooError: the pool is exhausted. Please raise pool_size in the configuration. Please report this as an issue."
    )
    found = died(tmp_path, raised(error, (f"{_PACKAGES}/foo/pool.py", "get", "raise FooError(text)")))
    assert found.next_step.startswith("as it says: Please raise pool_size in the configuration;")
    assert advice("RuntimeError: it failed. See the issue https://a.b/c") == ""


_DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"
_CAUGHT = raised("AttributeError: 'NoneType' object has no attribute 'new_page'",
                 ("/home/u/job/envs/web.py", "reset", "page = self.ctx.new_page()"))  # fmt: skip


def test_who_raises_in_an_except_clause_in_so_many_words_only_names_the_first(tmp_path: Path) -> None:
    again = raised(
        "web.ResetError: no reset after 5 tries", ("/home/u/job/envs/web.py", "reset", "raise ResetError(text)")
    )
    found = died(tmp_path, _CAUGHT + _DURING + again)
    assert "self.ctx is None" in found.claim
    # Where handling it fails by itself, that is what it died of.
    broke = raised("KeyError: 'tries'", ("/home/u/job/envs/web.py", "reset", "log(state['tries'])"))
    assert "KeyError: 'tries'" in died(tmp_path, _CAUGHT + _DURING + broke).claim


def test_an_engine_that_an_actor_has_started_is_heard_behind_the_actors_name(tmp_path: Path) -> None:
    error = (
        "ValueError: To serve at least one request with the model's max seq len (131072), 16 GiB KV cache is needed, "
    )
    error += "which is larger than the available KV cache memory (7.91 GiB)."
    before = "(Engine pid=41) (EngineCore_DP0 pid=45) ERROR 11-20 10:00:01 [core.py:7] "
    text = "".join(f"{before}{line}\n" for line in raised(error).splitlines())
    text += "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    assert "KV cache cannot hold one request" in died(tmp_path, text).claim


def test_what_one_process_has_logged_is_why_the_others_ended(tmp_path: Path) -> None:
    worker = "(WorkerDict pid=7) "
    error = "AssertionError: Expandable segments are not compatible with memory pool."
    text = f"{worker}ERROR rollout: _loop_forever error: it failed\n"
    text += "".join(f"{worker}{line}\n" for line in raised(error).splitlines())
    text += "".join(f"{worker}10:00:0{at} loading shard {at}\n" for at in range(6))
    text += "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    assert "expandable_segments forbids" in died(tmp_path, text).claim


def test_of_processes_that_say_the_same_the_one_with_its_frames_speaks(tmp_path: Path) -> None:
    error = "RuntimeError: torch.cat(): expected a non-empty list of Tensors"
    place = (f"{_PACKAGES}/deepspeed/runtime/zero/partition_parameters.py", "wait", "torch.cat(parts)")
    torn = f"Traceback (most recent call last):\n{error}\n"
    assert "ZeRO-3 gathers" in died(tmp_path, torn + raised(error, place)).claim
