"""TRL's own GRPOTrainer on a model built here: recorded, then driven by the record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core import workbench
from replay_core.compare import compare_runs
from replay_core.dumps import open_run
from replay_core.errors import RequestError
from replay_core.pages import array
from replay_core.recorder import Recorder
from replay_core.recorder.trl import _TrainerSteps, recording
from replay_core.records import MEAN_OVER_RANKS
from replay_core.rollouts import RolloutReplay
from tests.builders import Here

trl = pytest.importorskip("trl", reason="TRL is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *"0123456789+="])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def model() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=14, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip


def reward(completions: list[str], **_: Any) -> list[float]:
    return [sum(character.isdigit() for character in text) / 4 for text in completions]


def never(completions: list[str], **_: Any) -> list[float]:
    raise AssertionError("a driven run gives no rewards")


def train(directory: Path, dump: Path, rollouts: RolloutReplay | None = None, *, seed: int = 3, steps: int = 3) -> Any:
    from datasets import Dataset

    arguments = trl.GRPOConfig(
        output_dir=str(directory), max_steps=steps, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        num_generations=4, max_completion_length=4, learning_rate=1e-2, logging_steps=1, save_strategy="no",
        report_to=[], use_cpu=True, seed=seed, beta=0.0, bf16=False, disable_tqdm=True, num_iterations=1,
    )  # fmt: skip
    prompts = Dataset.from_list([{"prompt": f"{a}+{a}="} for a in range(8)])
    trainer = recording(trl.GRPOTrainer, Recorder(dump, asynchronous=True), rollouts, checkpoints=rollouts is None)(
        model=model(), reward_funcs=never if rollouts else reward, args=arguments, train_dataset=prompts,
        processing_class=tokenizer(),
    )  # fmt: skip
    if rollouts is not None:
        trainer._generate = None  # whatever samples would fail
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    root = tmp_path_factory.mktemp("trl")
    trainer = train(root / "out", root / "dump")
    return root / "dump", {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}


def digests(dump: Path, stages: set[str]) -> dict[tuple[str, str], Any]:
    import json

    lines = [json.loads(line) for line in (dump / "index_rank0.jsonl").read_text().splitlines()]
    chosen = [line for line in lines if line["key"]["stage"] in stages]
    return {(line["file"], field["name"]): field["digest"] for line in chosen for field in line["fields"]}


@pytest.mark.long
def test_every_stage_of_a_trl_run_is_recorded(recorded: tuple[Path, Any]) -> None:
    run = open_run(recorded[0])
    assert not run.problems
    stages = {(r.key.stage, r.key.step, r.key.micro) for r in run.records}
    for step in range(3):
        assert {("trajectory", step, 0), ("gradient", step, None), ("training_metrics", step, None)} <= stages
        assert {(stage, step, micro) for stage in ("forward_data", "loss") for micro in range(2)} <= stages
    (trajectory,) = [r for r in run.records if (r.key.stage, r.key.step) == ("trajectory", 0)]
    assert {"prompt_ids", "completion_ids", "advantages", "prompt_text"} <= {ref.name for ref in trajectory.tensors()}
    forward = next(r for r in run.records if r.key.stage == "forward_data")
    assert forward.get("policy_logprobs") is not None
    said = {ref.name: ref.alignment for ref in forward.tensors()}
    assert said["prompt_ids"] == "prompt"
    assert said["per_token_logps"] == said["completion_mask"] == "response"
    assert said["advantages"] == "sample"


@pytest.mark.long
def test_a_recorded_step_is_replayed_to_what_the_trainer_recorded_loss_and_gradients(
    recorded: tuple[Path, Any], tmp_path: Path
) -> None:
    plan = {"dump": str(recorded[0]), "step": 2, "model": "checkpoint", "backward": True, "micros": [0, 1], "flags": {}}
    cell: Any = workbench.replay(plan, tmp_path / "out", Here())["cells"][-1]
    assert cell["recorded"][0]["field"] == "per_token_logps"
    assert cell["recorded"][0]["max_abs"] == 0
    assert "as recorded" in cell["loss"]["stated"]
    held = cell["recorded_training"]
    assert held["bitwise"], held["sentence"]
    assert (held["losses"], held["gradients"]) == (2, 15)
    gradient, optimizer = (open_run(recorded[0]).select(stage=stage)[2] for stage in ("gradient", "optimizer"))
    before, after = gradient.get("grad_norm"), optimizer.get("clipped_grad_norm")
    logged = open_run(recorded[0]).select(stage="training_metrics")[2].get("metrics.grad_norm")
    assert before is not None
    assert after is not None
    assert logged is not None
    assert float(array(before)) == pytest.approx(float(array(logged)), rel=1e-6)
    assert float(array(after)) == pytest.approx(min(1.0, float(array(before))), rel=1e-5)


def test_rewards_and_groups_are_recorded_so_that_advantages_are_checked(recorded: tuple[Path, Any]) -> None:
    found = workbench.diagnose(recorded[0], rules=["D04", "D05"])
    assert [(one["id"], one["severity"]) for one in found["findings"]] == [("D04", "info")]
    assert "group mean" in found["findings"][0]["claim"]
    assert not [one for one in found["skipped"] if one["id"] in ("D04", "D05")], found["skipped"]


@pytest.mark.long
def test_two_equal_runs_are_equal_whatever_the_clock_says(recorded: tuple[Path, Any], tmp_path: Path) -> None:
    train(tmp_path / "out", tmp_path / "again")
    found = compare_runs(open_run(recorded[0]), open_run(tmp_path / "again"))
    assert found.first is None, found.first
    assert found.agrees
    assert found.notes_not_compared > 0


def test_a_trl_run_driven_by_the_record_is_the_same_run_bit_for_bit(recorded: tuple[Path, Any], tmp_path: Path) -> None:
    dump, weights = recorded
    driven = train(tmp_path / "out", tmp_path / "again", RolloutReplay(dump, scope="full"), seed=4)
    stages = {"forward_data", "loss", "gradient"}
    assert digests(tmp_path / "again", stages) == digests(dump, stages)
    assert len(digests(dump, stages)) > 50
    for name, weight in driven.model.named_parameters():
        assert torch.equal(weight, weights[name]), name
    untrained = dict(model().named_parameters())
    assert sum(not torch.equal(weight, untrained[name]) for name, weight in weights.items()) > 10, "it did learn"


def test_a_replay_without_what_trl_computed_is_refused(recorded: tuple[Path, Any], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="advantages and logprobs"):
        recording(trl.GRPOTrainer, Recorder(tmp_path / "dump"), RolloutReplay(recorded[0]))


def test_the_gradient_of_a_model_that_is_called_through_ddp_is_noted_as_the_ranks_mean(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'met'}", rank=0, world_size=1)
    try:
        bare = torch.nn.Linear(2, 2)
        for name, called in (("bare", bare), ("wrapped", DistributedDataParallel(bare))):
            with Recorder(tmp_path / name) as recorder:
                _TrainerSteps(recorder, None, checkpoints=False).trained_by(called)
                with recorder.step(0) as record:
                    record("loss", loss=0.5)
    finally:
        dist.destroy_process_group()
    said = [(open_run(tmp_path / name).flags or {}).get("gradients") for name in ("bare", "wrapped")]
    assert said == [None, MEAN_OVER_RANKS]
