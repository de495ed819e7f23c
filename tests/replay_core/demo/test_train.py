from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from replay_core.demo.policy import score
from replay_core.demo.train import Recipe, train_demo
from replay_core.jobs import Answer, Event, LogLine, Partial, Progress
from replay_core.objectives.advantages import group_normalised
from replay_core.rollouts import MockRolloutWorker, RolloutReplay


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answer, list[Event]]:
    dump, events = tmp_path_factory.mktemp("demo") / "dump", list[Event]()
    return dump, train_demo(dump, events.append, steps=2), events


@pytest.fixture(scope="module")
def dump(trained: tuple[Path, Answer, list[Event]]) -> Path:
    return trained[0]


def load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path)
    return content


@pytest.mark.long
def test_the_answer_says_what_to_replay_and_every_step_is_told(trained: tuple[Path, Answer, list[Event]]) -> None:
    dump, document, events = trained
    assert (document["dump"], document["steps"], document["step"]) == (str(dump), 2, 1)
    assert (dump / "forward_data" / f"step_000001_rank0_micro{document['micro']}.pt").is_file()
    assert len(document["rewards"]) == 2
    assert document["reward_last"] == document["rewards"][-1]
    assert [event.done for event in events if isinstance(event, Progress)] == [0, 1, 2]
    assert len([event for event in events if isinstance(event, LogLine)]) == 2
    assert [event for event in events if isinstance(event, Partial)][-1].document["rewards"] == document["rewards"]
    json.dumps(document, allow_nan=False)


def test_every_stage_of_every_step_is_on_disk(dump: Path) -> None:
    micros = Recipe().prompts * Recipe().group // Recipe().rows_per_micro
    for step in ("step_000000", "step_000001"):
        for stage in ("trajectory", "old_log_probs", "ref_log_probs"):
            assert (dump / stage / f"{step}.pt").is_file()
        for stage in ("gradient", "training_metrics"):
            assert (dump / stage / f"{step}_rank0.pt").is_file()
        for stage in ("forward_data", "loss"):
            assert len(list((dump / stage).glob(f"{step}_rank0_micro*.pt"))) == micros
        assert (dump / "checkpoints" / step / "model.safetensors").is_file()
    assert set(json.loads((dump / "manifest.json").read_text())["models"]) == {"0", "1"}


def test_the_checkpoint_of_a_step_computes_what_the_step_recorded(dump: Path) -> None:
    for step in ("step_000000", "step_000001"):
        policy = AutoModelForCausalLM.from_pretrained(dump / "checkpoints" / step).eval()
        forward = load(dump / "forward_data" / f"{step}_rank0_micro3.pt")
        with torch.no_grad():
            logprobs_BT, entropy_BT = score(policy, forward["input_ids"], forward["attention_mask"])
        mask_BT = forward["response_mask"][:, 1:]
        torch.testing.assert_close(logprobs_BT * mask_BT, forward["log_probs"], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(entropy_BT * mask_BT, forward["entropy"], atol=1e-6, rtol=1e-6)


def test_the_rows_of_a_micro_batch_have_different_lengths_on_both_sides(dump: Path) -> None:
    forward = load(dump / "forward_data" / "step_000000_rank0_micro0.pt")
    prompt_B = (forward["attention_mask"] - forward["response_mask"]).sum(1)
    assert len(prompt_B) == Recipe().rows_per_micro
    assert len(set(prompt_B.tolist())) > 1
    assert len(set(forward["response_mask"].sum(1).tolist())) > 1
    assert len(set(forward["attention_mask"].sum(1).tolist())) > 2


def test_recorded_parts_fit_together(dump: Path) -> None:
    trajectory = load(dump / "trajectory" / "step_000000.pt")
    advantages_B = group_normalised(trajectory["rewards"], trajectory["group_ids"])
    mask_BT = trajectory["response_mask"][:, 1:]
    assert torch.equal(trajectory["advantages"], advantages_B[:, None] * mask_BT)
    losses = [load(path) for path in sorted((dump / "loss").glob("step_000000_rank0_micro*.pt"))]
    metrics = load(dump / "training_metrics" / "step_000000_rank0.pt")["metrics"]
    assert sum(float(loss["loss"]) for loss in losses) == pytest.approx(metrics["loss"])
    # On-policy: the ratio is 1, so the policy-gradient loss is minus the token mean of the advantages.
    tokens = int(mask_BT.sum())
    assert metrics["pg_loss"] == pytest.approx(-float(trajectory["advantages"].sum()) / tokens, abs=1e-6)
    assert metrics["reward_mean"] == pytest.approx(float(trajectory["rewards"].mean()))
    gradients = load(dump / "gradient" / "step_000000_rank0.pt")
    squares = sum(float((value.double() ** 2).sum()) for name, value in gradients.items() if name.startswith("grad."))
    assert squares**0.5 == pytest.approx(float(gradients["grad_norm"]), rel=1e-5)


def test_the_recording_opens_with_nexrls_own_paths_and_keys(dump: Path) -> None:
    """As NexRL's mock worker and its compare script open a dump: fixed names, torch.load, its own keys."""
    batch = load(dump / "trajectory" / "step_000001.pt")
    assert (batch["step"], batch["num_trajectories"]) == (1, len(batch["trajectories"]))
    for trajectory in batch["trajectories"]:
        assert len(trajectory["tokens"]) == len(trajectory["loss_mask"])
        assert {"group_id", "run_id", "task_id"} == set(trajectory["extra_fields"])
        assert isinstance(trajectory["reward"], float)
    forward = load(dump / "forward_data" / "step_000001_rank0_micro0.pt")
    assert (forward["step"], forward["rank"], forward["micro_idx"]) == (1, 0, 0)
    assert forward["log_probs"].shape == forward["entropy"].shape
    assert {"response_mask", "input_ids"} <= set(forward)
    loss = load(dump / "loss" / "step_000001_rank0_micro0.pt")
    assert abs(loss["loss"] - loss["pg_loss"]) < 1
    assert load(dump / "old_log_probs" / "step_000001.pt")["old_log_probs"].ndim == 2
    full = RolloutReplay(dump, scope="full").batch(1)
    assert full is not None
    assert "old_logprobs" in full
    worker = MockRolloutWorker(dump, step=1)
    assert worker.recorded == batch["num_trajectories"]


@pytest.mark.long
def test_one_seed_gives_the_same_bytes_and_another_seed_does_not(dump: Path, tmp_path: Path) -> None:
    def digests(of: Path) -> list[Any]:
        lines = [json.loads(line) for line in (of / "index_rank0.jsonl").read_text().splitlines()]
        return [(line["file"], field["name"], field["digest"]) for line in lines for field in line["fields"]]

    train_demo(tmp_path / "again", steps=2)
    assert digests(tmp_path / "again") == digests(dump)
    train_demo(tmp_path / "other", steps=2, seed=1)
    assert digests(tmp_path / "other") != digests(dump)


@pytest.mark.long
def test_the_whole_demo_learns_and_its_policy_looks_back_across_an_unmasked_pack(tmp_path: Path) -> None:
    document = train_demo(tmp_path / "dump")
    assert document["reward_last"] > 2 * document["reward_first"]
    step = f"step_{document['step']:06d}"
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "dump" / "checkpoints" / step).eval()
    forward = load(tmp_path / "dump" / "forward_data" / f"{step}_rank0_micro{document['micro']}.pt")
    rows = [ids_S[mask_S == 1] for ids_S, mask_S in zip(forward["input_ids"], forward["attention_mask"], strict=True)]
    packed_T, position_T = torch.cat(rows), torch.cat([torch.arange(len(row)) for row in rows])
    causal_TT = torch.full((len(packed_T), len(packed_T)), -torch.inf).triu(1)
    with torch.no_grad():
        leaked_TV = policy(packed_T[None], attention_mask=causal_TT[None, None], position_ids=position_T[None]).logits[
            0
        ]
        alone = [policy(row[None]).logits[0] for row in rows]
    worst = []
    for row, leaked_LV, alone_LV in zip(rows, leaked_TV.split([len(row) for row in rows]), alone, strict=True):
        change_LV = (leaked_LV.log_softmax(-1) - alone_LV.log_softmax(-1))[:-1]
        worst.append(float(change_LV.gather(1, row[1:, None]).abs().max()))
    assert worst[0] < 1e-4, "nothing stands before the first sequence"
    assert min(worst[1:]) > 1e-2, f"nats, next to fp32 noise of 2e-6: {worst}"
    assert sorted(worst)[len(worst) // 2] > 1
