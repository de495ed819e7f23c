from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_core.demo.train import train_demo
from replay_core.errors import RequestError, SelectionError
from replay_core.recorder import Recorder
from replay_core.rollouts import MockRolloutWorker, RolloutReplay
from tests.fixtures import FIXTURES


def record_steps(directory: Path, steps: list[int], *, ranks: int | None = None) -> Path:
    for rank in range(ranks) if ranks else [None]:
        recorder = Recorder(directory)
        for step in steps:
            with recorder.step(step, rank=rank) as record:
                record(
                    "trajectory",
                    input_ids=torch.tensor([[step, 1], [2, rank or 0]]),
                    rewards=torch.tensor([0.25, 1.0], dtype=torch.bfloat16),
                    advantages=torch.ones(2),
                    prompt_text=["a", "b"],
                )
                record("old_log_probs", old_log_probs=torch.full((2, 1), -0.5))
    return directory


def digests(dump: Path) -> dict[tuple[str, str], Any]:
    lines = [json.loads(line) for line in (dump / "index_rank0.jsonl").read_text().splitlines()]
    return {(line["file"], field["name"]): field for line in lines for field in line["fields"]}


@pytest.mark.long
def test_training_driven_by_the_record_is_the_recorded_training_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four GRPO steps recorded; again from step 0 with no rollout: losses, gradients and final weights agree."""
    steps = 4
    train_demo(tmp_path / "first", steps=steps)

    def no_sampling(*_: Any) -> None:
        raise AssertionError("a driven run samples nothing")

    monkeypatch.setattr("replay_core.demo.train.sample", no_sampling)
    train_demo(tmp_path / "again", steps=steps, rollouts=RolloutReplay(tmp_path / "first"))
    first, again = digests(tmp_path / "first"), digests(tmp_path / "again")
    assert again == first
    stages = {file.partition("/")[0] for file, _ in again}
    assert stages >= {"trajectory", "forward_data", "loss", "gradient"}
    assert sum(name.startswith("grad.") for _, name in again) == steps * 27
    # The weights that the last step computes with follow from every update before it.
    last = f"checkpoints/step_{steps - 1:06d}/model.safetensors"
    assert (tmp_path / "again" / last).read_bytes() == (tmp_path / "first" / last).read_bytes()


@pytest.mark.parametrize("restored", [True, False])
def test_with_dropout_the_random_numbers_belong_to_what_is_driven(restored: bool, tmp_path: Path) -> None:
    def train(dump: Path, replay: RolloutReplay | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        recorder = Recorder(dump)
        for step in range(4):
            with recorder.step(step) as record:
                if replay is None:
                    ids = torch.multinomial(torch.ones(4, 8), 6, replacement=True)
                    record("trajectory", input_ids=ids, rng_after=torch.get_rng_state())
                else:
                    batch = replay.batch(step)
                    assert batch is not None
                    ids = batch["input_ids"]
                    if restored:
                        torch.set_rng_state(batch["rng_after"])
                model(ids).logsumexp(-1).mean().backward()
                record.gradients(model)
                optimizer.step()
                optimizer.zero_grad()
        return [weight.detach() for weight in model.parameters()]

    first = train(tmp_path / "first", None)
    again = train(tmp_path / "again", RolloutReplay(tmp_path / "first"))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)) is restored


def test_values_come_back_as_they_were_recorded(tmp_path: Path) -> None:
    batch = RolloutReplay(record_steps(tmp_path / "dump", [0])).batch(0)
    assert batch is not None
    assert torch.equal(batch["input_ids"], torch.tensor([[0, 1], [2, 0]]))
    assert torch.equal(batch["rewards"], torch.tensor([0.25, 1.0], dtype=torch.bfloat16))
    assert torch.equal(batch["reward"], batch["rewards"]), "found by its canonical name too"
    assert batch["prompt_text"] == ["a", "b"]
    batch["input_ids"].add_(1)
    with pytest.raises(SelectionError, match="no field 'nonsense'"):
        batch["nonsense"]


def test_scope_rollout_leaves_out_what_the_trainer_computes_and_full_takes_it(tmp_path: Path) -> None:
    dump = record_steps(tmp_path / "dump", [0])
    rollout, full = RolloutReplay(dump).batch(0), RolloutReplay(dump, scope="full").batch(0)
    assert rollout is not None
    assert full is not None
    assert "advantages" not in rollout
    with pytest.raises(SelectionError, match='scope="full"'):
        rollout["advantages"]
    assert torch.equal(full["old_logprobs"], torch.full((2, 1), -0.5))
    assert torch.equal(full["advantages"], torch.ones(2))


def test_a_record_without_what_full_needs_is_told_at_once(tmp_path: Path) -> None:
    with Recorder(tmp_path / "dump").step(0, rank=None) as record:
        record("trajectory", input_ids=torch.ones(1, 2, dtype=torch.int64))
    with pytest.raises(SelectionError, match="without what the trainer computed"):
        RolloutReplay(tmp_path / "dump", scope="full").batch(0)


def test_past_the_end_is_an_error_an_end_or_a_new_start(tmp_path: Path) -> None:
    dump = record_steps(tmp_path / "dump", [0, 1, 2])
    with pytest.raises(SelectionError, match="step 3 is past") as refusal:
        RolloutReplay(dump).batch(3)
    assert refusal.value.expected == "0..2"
    assert RolloutReplay(dump, end="stop").batch(3) is None
    around = RolloutReplay(dump, end="wrap")
    with pytest.warns(RuntimeWarning, match="starts again from step 0") as said:
        found = [around.batch(step) for step in (3, 4, 5, 6)]
    assert [batch.step for batch in found if batch] == [0, 1, 2, 0]
    assert len(said) == 1


@pytest.mark.parametrize("end", ["error", "stop", "wrap"])
def test_a_gap_is_an_error_whatever_the_end(end: str, tmp_path: Path) -> None:
    replay = RolloutReplay(record_steps(tmp_path / "dump", [0, 2, 4, 5]), end=end)
    with pytest.raises(SelectionError, match="step 3 is not among") as refusal:
        replay.batch(3)
    assert refusal.value.expected == "0, 2, 4..5"


def test_iterating_gives_each_recorded_step_once_and_for_ever_when_it_wraps(tmp_path: Path) -> None:
    dump = record_steps(tmp_path / "dump", [0, 2])
    assert [batch.step for batch in RolloutReplay(dump)] == [0, 2]
    endless = iter(RolloutReplay(dump, end="wrap"))
    assert [next(endless).step for _ in range(5)] == [0, 2, 0, 2, 0]


def test_ranks_get_their_own_part_and_another_size_is_refused(tmp_path: Path) -> None:
    dump = record_steps(tmp_path / "dump", [0], ranks=2)
    batch = RolloutReplay(dump, rank=1, world_size=2).batch(0)
    assert batch is not None
    assert batch["input_ids"][1, 1] == 1
    with pytest.raises(RequestError, match="another data-parallel size"):
        RolloutReplay(dump, rank=0, world_size=4)
    with pytest.raises(RequestError, match="rank 2 recorded no rollouts"):
        RolloutReplay(dump, rank=2)


def test_a_rank_that_is_given_everything_because_no_rank_was_recorded_is_told(tmp_path: Path) -> None:
    dump = record_steps(tmp_path / "dump", [0])
    for replay in (RolloutReplay(dump, rank=1, world_size=2), RolloutReplay(dump).of_rank(0, 2)):
        with pytest.warns(RuntimeWarning, match=f"rank {replay.rank} is given every sample"):
            replay.batch(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RolloutReplay(dump, rank=0, world_size=1).batch(0)


def test_a_step_recorded_by_several_ranks_and_in_several_micro_batches_comes_as_one_batch(tmp_path: Path) -> None:
    for rank in range(2):
        with Recorder(tmp_path / "dump") as recorder, recorder.step(0, rank=rank) as record:
            for micro, width in enumerate([3, 4]):
                ids_BS = torch.arange(width).repeat(2, 1) + 10 * rank + 100 * micro
                record(
                    "trajectory",
                    input_ids=ids_BS,
                    rewards=torch.ones(2) * rank,
                    temperature=1.0,
                    seen=rank,
                    micro=micro,
                )
    whole = RolloutReplay(tmp_path / "dump").batch(0)
    assert whole is not None
    assert [row.tolist() for row in whole["input_ids"][::2]] == [
        [0, 1, 2], [100, 101, 102, 103], [10, 11, 12], [110, 111, 112, 113],
    ]  # fmt: skip
    assert whole["rewards"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (whole["temperature"], whole["seen"]) == (1.0, [0, 0, 1, 1])
    assert len(whole.samples()) == 8
    assert whole.samples()[7]["reward"] == 1
    mine = RolloutReplay(tmp_path / "dump").of_rank(1, 2).batch(0, micro=0)
    assert mine is not None
    assert mine["input_ids"].tolist() == [[10, 11, 12]] * 2


def test_further_passes_over_the_same_samples_are_left_out_and_said(tmp_path: Path) -> None:
    """Old logprobs of all micro-batches, then the same samples trained on, grouped and padded otherwise."""
    with Recorder(tmp_path / "dump") as recorder, recorder.step(0) as record:
        rows = [torch.tensor([[first, 1, 2, 0]]) for first in (7, 8, 9, 10)]
        masks = [(row > 0).long() for row in rows]
        for micro, chosen in enumerate([(0, 1), (2, 3), (3, 0), (1, 2)]):
            cut = slice(0, 3 if micro > 1 else 4)
            record(
                "batch_inputs",
                input_ids=torch.cat([rows[at] for at in chosen])[:, cut],
                attention_mask=torch.cat([masks[at] for at in chosen])[:, cut],
                micro=micro,
            )
    with pytest.warns(RuntimeWarning, match="2 hold the same samples again"):
        (batch,) = RolloutReplay(tmp_path / "dump")
    assert batch["input_ids"].tolist() == [[first, 1, 2, 0] for first in (7, 8, 9, 10)]


def test_samples_that_happen_to_be_the_same_are_all_given(tmp_path: Path) -> None:
    with Recorder(tmp_path / "dump") as recorder, recorder.step(0) as record:
        for micro, token in enumerate([5, 5, 5, 6, 6, 5]):
            record("batch_inputs", input_ids=torch.tensor([[token, 1]]), micro=micro)
    (batch,) = RolloutReplay(tmp_path / "dump")
    assert batch["input_ids"][:, 0].tolist() == [5, 5, 5, 6, 6, 5]


def test_of_several_epochs_the_first_is_the_batch(tmp_path: Path) -> None:
    with Recorder(tmp_path / "dump") as recorder, recorder.step(0) as record:
        for epoch in range(2):
            for micro in range(2):
                record("forward_data", input_ids=torch.tensor([[micro, 9]]), micro=2 * epoch + micro, epoch=epoch)
    with pytest.warns(RuntimeWarning, match="same samples again"):
        (batch,) = RolloutReplay(tmp_path / "dump")
    assert batch["input_ids"].tolist() == [[0, 9], [1, 9]]


def test_a_field_that_some_parts_lack_is_no_field_of_the_batch(tmp_path: Path) -> None:
    with Recorder(tmp_path / "dump") as recorder, recorder.step(0) as record:
        record("trajectory", input_ids=torch.ones(1, 2, dtype=torch.int64), extra=torch.ones(1), micro=0)
        record("trajectory", input_ids=torch.ones(1, 2, dtype=torch.int64), micro=1)
    (batch,) = RolloutReplay(tmp_path / "dump")
    assert "extra" not in batch
    with pytest.raises(SelectionError, match="no field 'extra'") as refusal:
        batch["extra"]
    assert "only step_000000_rank0_micro0.pt" in str(refusal.value.hint)


def test_a_dump_without_rollouts_and_wrong_words_are_refused(tmp_path: Path) -> None:
    with Recorder(tmp_path / "dump").step(0) as record:
        record("loss", loss=1.0)
    with pytest.raises(RequestError, match="holds no rollouts"):
        RolloutReplay(tmp_path / "dump")
    with pytest.raises(RequestError, match="wrong end"):
        RolloutReplay(tmp_path / "dump", end="loop")


def test_nexrls_own_dump_drives_another_loop() -> None:
    replay = RolloutReplay(FIXTURES / "nexrl" / "seedtime" / "pt")
    assert replay.steps == [0, 2]
    batch = replay.batch(2)
    assert batch is not None
    samples = batch.samples()
    assert len(samples) == batch["num_trajectories"] == len(batch["input_ids"])
    assert all(len(sample["tokens"]) == len(sample["loss_mask"]) for sample in samples)
    worker = MockRolloutWorker(FIXTURES / "nexrl" / "seedtime" / "pt", step=2)
    for sample in reversed(samples):
        task = {"task_id": sample["task_id"], "run_id": sample["run_id"]}
        assert torch.equal(worker.rollout(task)["tokens"], sample["tokens"])


#: Rollouts as each framework wrote them -> step and number of samples of the batches they make.
ROLLOUTS = {
    "areal/single_controller_rollout": {0: 12, 1: 12, 2: 12},
    "nemo_rl": {1: 16},
    "nexrl/self_hosted_fp32": {0: 8, 1: 8},
    "nexrl/seedtime/jsonl": {0: 8, 2: 8},
    "open_instruct/toy_run_rollouts_000000.jsonl": {1: 16},
    "openrlhf": {0: 34},
    "prime_rl/rollouts": {0: 16},
    "prime_rl/token_exports": {0: 16},
    "roll": {0: 4, 1: 4, 2: 4},
    "skyrl": {1: 16},
    "slime": {0: 16},
    "trl/base": {0: 8, 1: 8, 2: 8},
    "verl/rollout_dump": {1: 16},
}


@pytest.mark.filterwarnings("ignore:rldbg")
@pytest.mark.parametrize(("recording", "samples"), ROLLOUTS.items(), ids=list(ROLLOUTS))
def test_every_frameworks_rollouts_drive_another_loop(recording: str, samples: dict[int, int]) -> None:
    """What another loop needs of a rollout: each sample's tokens, and all of them."""
    path = FIXTURES / recording
    batches = {batch.step: batch.samples() for batch in RolloutReplay(path)}
    assert {step: len(rows) for step, rows in batches.items()} == samples
    for row in (row for rows in batches.values() for row in rows):
        ids = row.get("input_ids", row.get("response_ids"))
        assert ids is not None
        assert ids.dtype in (torch.int64, torch.int32)
        assert len(ids) > 1
    assert MockRolloutWorker(path).recorded == sum(samples.values())


@pytest.mark.parametrize(
    ("recording", "names"), [("verl", {"advantages", "old_logprobs"}), ("slime", {"advantages", "ref_logprobs"})]
)
def test_scope_full_takes_the_batch_that_holds_what_the_trainer_computed(recording: str, names: set[str]) -> None:
    (batch,) = RolloutReplay(FIXTURES / recording, scope="full")
    assert all(len(batch[name]) == 16 for name in names)


def test_a_path_with_several_runs_is_refused_by_name() -> None:
    with pytest.raises(SelectionError, match="several recordings of step 0 trajectory") as refusal:
        RolloutReplay(FIXTURES / "nexrl").batch(0)
    assert "seedtime/jsonl" in str(refusal.value.found)
    with pytest.raises(SelectionError, match="several recordings"):
        MockRolloutWorker(FIXTURES / "nexrl")


def test_steps_of_texts_alone_are_left_out_and_said_or_refused_if_nothing_else_is_there() -> None:
    with pytest.warns(RuntimeWarning, match="step 3 was recorded as texts alone"):
        assert [batch.step for batch in RolloutReplay(FIXTURES / "trl" / "base")] == [0, 1, 2]
    with pytest.raises(RequestError, match="recorded without tokens"):
        list(RolloutReplay(FIXTURES / "verl" / "rollout_data_dir"))
    assert "step 3" in MockRolloutWorker(FIXTURES / "trl" / "base").report()
