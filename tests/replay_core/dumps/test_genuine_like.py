"""File sets as the frameworks' own code writes them, other than the fixtures: names, places and what must be said."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from replay_core import pages
from replay_core.dumps import open_run
from replay_core.records import Inline, RecordKey, Run, TensorRef
from tests.builders import save_file
from tests.replay_core.dumps.test_dialects import fake_class


def opened(root: Path) -> Run:
    """The run of files that nobody is writing any more."""
    for path in root.rglob("*"):
        os.utime(path, (1, 1))
    return open_run(root)


def said(run: Run) -> str:
    return "\n".join(problem.what for problem in run.problems)


def field(run: Run, name: str, position: int = 0) -> TensorRef:
    ref = run.records[position].get(name)
    assert ref is not None, [ref.canonical for ref in run.records[position].tensors()]
    return ref


def lines(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sample(index: int, **more: Any) -> dict[str, Any]:
    said = {"index": index, "group_index": 0, "tokens": [1] * (3 + index), "response_length": 1 + index,
            "reward": 0.5, "rollout_log_probs": [-0.1] * (1 + index), "prompt": "p", "response": "r"}  # fmt: skip
    return said | more


def test_a_template_of_the_users_own_is_known_by_what_the_files_hold(tmp_path: Path) -> None:
    for step in (3, 11):
        save_file(tmp_path / f"dbg/rollout_{step}.pt", {"rollout_id": step, "samples": [sample(0), sample(1)]})
        data = {"tokens": [torch.arange(4)], "response_lengths": [2], "total_lengths": [4],
                "log_probs": [torch.rand(2)], "sample_indices": [0]}  # fmt: skip
        for rank in (0, 1):
            content = {"rollout_id": step, "rank": rank, "rollout_data": data}
            save_file(tmp_path / f"dbg/train-{step}-{rank}.pt", content)
    run = opened(tmp_path)
    assert run.dialect == "slime"
    assert {(r.key.step, r.key.rank, r.key.stage) for r in run.records} == {
        (step, rank, stage)
        for step in (3, 11)
        for rank, stage in ((None, "trajectory"), (0, "batch_inputs"), (1, "batch_inputs"))
    }
    assert any("names are not the framework's" in note for note in run.notes)
    assert run.problems == []


def test_a_sample_without_a_weight_version_does_not_spell_the_column_out(tmp_path: Path) -> None:
    versions = [["1"], [], ["1", "2"]]
    samples = [sample(number, weight_versions=said) for number, said in enumerate(versions)]
    save_file(tmp_path / "rollout_data/0.pt", {"rollout_id": 0, "samples": samples})
    assert field(opened(tmp_path), "weight_version").source == Inline(['["1"]', "[]", '["1", "2"]'])


def test_verls_first_cache_has_no_suffix(tmp_path: Path) -> None:
    proto = fake_class("verl.protocol", "DataProto")
    ids = np.arange(6, dtype=np.int64).reshape(2, 3)
    batch = ((2,), None, {"input_ids": ("int64", (2, 3), ids.tobytes())})
    proto.__getstate__ = lambda self: (batch, {}, {"global_steps": 4})
    (tmp_path / "exp_project_GBS8__N4").write_bytes(pickle.dumps(proto()))
    run = opened(tmp_path)
    assert (run.dialect, run.records[0].key.step) == ("verl", 4)
    np.testing.assert_array_equal(pages.array(field(run, "input_ids")), ids)


def test_captured_inputs_of_trl_under_any_name(tmp_path: Path) -> None:
    batch = {"prompt_ids": torch.ones(2, 3, dtype=torch.int64), "prompt_mask": torch.ones(2, 3, dtype=torch.int64),
             "completion_ids": torch.ones(2, 4, dtype=torch.int64),
             "completion_mask": torch.ones(2, 4, dtype=torch.int64), "old_per_token_logps": None}  # fmt: skip
    save_file(tmp_path / "my_batch.pt", batch)
    run = opened(tmp_path)
    assert run.dialect == "trl"
    assert field(run, "input_ids").shape == (2, 7)


def test_files_beside_a_log_of_many_steps_are_not_lost(tmp_path: Path) -> None:
    for step in range(6):
        lines(tmp_path / f"{step}.jsonl", {"input": "a", "output": "b", "score": 1.0, "step": step, "gts": None})
    for name in ("a", "b"):
        save_file(tmp_path / f"{name}.pt", {"x": torch.ones(2)})
    run = opened(tmp_path)
    assert {record.path.name for record in run.records} >= {"a.pt", "b.pt", "5.jsonl"}


def test_a_mask_that_is_none_means_every_token(tmp_path: Path) -> None:
    samples = [sample(0, loss_mask=None), sample(1, loss_mask=[0, 1]), sample(2, loss_mask=None, remove_sample=True)]
    save_file(tmp_path / "rollout_data/0.pt", {"rollout_id": 0, "samples": samples})
    run = opened(tmp_path)
    mask = field(run, "response_mask")
    assert (mask.rows, mask.alignment) == ((1, 2, 3), "response")
    assert pages.array(mask).tolist() == [1, 0, 1, 0, 0, 0]
    assert "null" in str(mask.sentinel)


def test_the_rewards_of_a_whole_batch_are_no_shards(tmp_path: Path) -> None:
    data = {"tokens": [torch.arange(4)], "response_lengths": [2], "total_lengths": [4], "rewards": [0.1],
            "raw_reward": [1.0, 0.0, 1.0]}  # fmt: skip
    save_file(tmp_path / "train_data/0_0.pt", {"rollout_id": 0, "rank": 0, "rollout_data": data})
    run = opened(tmp_path)
    assert run.records[0].get("reward") is None
    assert field(run, "raw_reward").alignment is None


def miles_details(root: Path) -> None:
    tokens = ("train_log_probs", "old_log_probs", "advantages", "local_loss_mask")
    samples = [
        {"index": index, "total_length": 3 + index, "response_length": length}
        | {name: torch.rand(length) for name in tokens}
        for index, length in enumerate((2, 1))
    ]
    content = {"rank": 0, "call": 7, "samples": samples, "ppo_kl": torch.rand(3), "pg_loss": torch.rand(3)}
    save_file(root / "policy_loss_debug/rank_0_call_7.pt", content)
    row = {"sample_index": 0, "group_index": 0, "status": "completed", "reward": 1.0, "prompt": "p", "messages": []}
    lines(root / "trajectory/2.jsonl", row)


def test_miles_sidecars_are_records_where_the_rollout_is_not_there(tmp_path: Path) -> None:
    miles_details(tmp_path)
    run = opened(tmp_path)
    assert {record.key.stage for record in run.records} == {"loss", "trajectory"}
    loss = next(record for record in run.records if record.key.stage == "loss")
    found = {ref.canonical: ref for ref in loss.tensors()}
    assert found["token_loss"].rows == found["policy_logprobs"].rows == (2, 1)
    assert "sample_id" not in found, "its index is the place in the micro-batch"


def test_miles_texts_are_not_listed_twice_beside_the_rollout(tmp_path: Path) -> None:
    miles_details(tmp_path)
    save_file(tmp_path / "rollout_data/2.pt", {"rollout_id": 2, "metadata": {}, "samples": [sample(0)]})
    run = opened(tmp_path)
    assert sorted(record.path.name for record in run.records) == ["2.pt", "rank_0_call_7.pt"]
    assert run.problems == []


def test_a_slice_of_the_policy_loss_has_no_alignment(tmp_path: Path) -> None:
    one = {"index": 0, "total_length": 9, "response_length": 6, "train_log_probs": torch.rand(3),
           "old_log_probs": torch.rand(3), "advantages": torch.rand(3), "local_loss_mask": torch.ones(3)}  # fmt: skip
    save_file(tmp_path / "policy_loss_debug/rank_1_call_0.pt", {"rank": 1, "call": 0, "samples": [one]})
    assert field(opened(tmp_path), "policy_logprobs").alignment is None


def test_rows_that_fill_the_world_are_said_of_a_dataproto(tmp_path: Path) -> None:
    proto = fake_class("verl.protocol", "DataProto")
    tokens = np.array([4, 5, 6, 4], dtype=np.int64)
    batch = ((4,), None, {"input_ids": ("int64", (4, 1), tokens.tobytes())})
    ids = np.array(["a", "b", "c", "a"], dtype=object)
    proto.__getstate__ = lambda self: (batch, {"request_id": ids}, {"global_steps": 1})
    (tmp_path / "x.dp").write_bytes(pickle.dumps(proto()))
    run = opened(tmp_path)
    run.records[0].tensors()
    assert "the last 1 rows are copies" in run.records[0].problems[0].what


def loss_of(rank: int, micro: int, epoch: int, batch: int) -> dict[str, Any]:
    return {"loss": 0.1, "extra_info": {"epoch": epoch, "batch_idx": batch}, "rank": rank, "micro_idx": micro}


def test_nexrls_forwards_say_it_where_losses_were_not_dumped(tmp_path: Path) -> None:
    content = {"log_probs": torch.rand(1, 3), "extra_info": {"epoch": 0, "batch_idx": 3}}
    save_file(tmp_path / "forward_data/step_000001_rank0_micro0.pt", content)
    assert "3 of 4 mini-batches were overwritten" in said(opened(tmp_path))


def test_a_shorter_mini_batch_leaves_the_end_of_the_one_before(tmp_path: Path) -> None:
    for micro, batch in ((0, 1), (1, 0)):
        save_file(tmp_path / f"loss/step_000000_rank0_micro{micro}.pt", loss_of(0, micro, 0, batch))
    assert "files are of 2 mini-batches" in said(opened(tmp_path))


def test_a_forward_without_its_loss_is_named(tmp_path: Path) -> None:
    for micro in (0, 1):
        save_file(tmp_path / f"forward_data/step_000000_rank0_micro{micro}.pt", {"log_probs": torch.rand(1, 3)})
    save_file(tmp_path / "loss/step_000000_rank0_micro0.pt", loss_of(0, 0, 0, 0))
    assert "micro 1 has no loss" in said(opened(tmp_path))


def test_a_rank_that_never_wrote_is_a_hole_and_every_second_rank_is_none(tmp_path: Path) -> None:
    for rank in (0, 1, 3):
        save_file(tmp_path / f"a/gradient/step_000000_rank{rank}.pt", {"gradient": torch.ones(1), "param_name": "w"})
    for rank in (1, 3, 5):
        save_file(tmp_path / f"b/gradient/step_000000_rank{rank}.pt", {"gradient": torch.ones(1), "param_name": "w"})
    assert "rank 2 wrote nothing" in said(opened(tmp_path / "a"))
    assert opened(tmp_path / "b").problems == []


def test_a_rotation_backup_of_areals_is_no_record(tmp_path: Path) -> None:
    group = {"input_ids": torch.ones(2, 3, dtype=torch.int32), "loss_mask": torch.ones(2, 3), "rewards": torch.ones(2)}
    save_file(tmp_path / "step_000000.pt", [group])
    (tmp_path / "step_backup.pt").write_bytes(b"x")
    run = opened(tmp_path)
    assert (run.dialect, len(run.records)) == ("areal", 1)
    assert "ignored" in said(run)


@pytest.mark.parametrize("same", [True, False])
def test_only_equal_inputs_are_the_references(tmp_path: Path, same: bool) -> None:
    for number, training in enumerate((False, False, True)):
        ids = torch.full((1, 40), 0 if same else number)
        content = {"sequences": ids, "action_mask": torch.ones(1, 3, dtype=torch.bool),
                   "attention_mask": torch.ones_like(ids), "return_output": training}  # fmt: skip
        path = tmp_path / f"actor_inputs_rank0_20250619_052658_{100000 + number}.pkl"
        path.write_bytes(pickle.dumps(content, 4))
    roles = [record.key.role for record in opened(tmp_path).records]
    assert roles == ["actor", "ref" if same else "actor", "actor"]


def msprobe_call(folder: Path, stage: str, rank: int) -> None:
    target = folder / stage / "step1" / f"rank{rank}"
    (target / "dump_tensor_data").mkdir(parents=True)
    call = "Module.module.model.layers.0.mlp.MLP"
    torch.save(torch.ones(2, 3), target / "dump_tensor_data/g.pt")
    tensor = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 3]}
    data = {
        f"{call}.forward.0": {
            "input_args": [{**tensor, "Max": 1.0, "Mean": "nan"}], "output": [],
            "input_kwargs": {"mask": {"type": "NoneType", "value": None},
                             "group": {"type": "torch.ProcessGroup", "group_ranks": [0, 1]}},
        },
        f"{call}.backward.0": {"input": [{**tensor, "data_name": "g.pt"}], "output": [None]},
    }  # fmt: skip
    document = {"task": "tensor", "dump_data_dir": "x", "data": data}
    (target / "dump.json").write_text(json.dumps(document))


def test_msprobes_stages_of_one_role_are_two_forwards(tmp_path: Path) -> None:
    for stage in ("actor_compute_log_prob", "actor_update", "ref_compute_log_prob"):
        msprobe_call(tmp_path, stage, 0)
    run = opened(tmp_path)
    assert {record.key for record in run.records} == {
        RecordKey(1, 0, 0, "actor", "modules"), RecordKey(1, 1, 0, "actor", "modules"),
        RecordKey(1, None, 0, "ref", "modules"),
    }  # fmt: skip
    found = {ref.canonical: ref for ref in run.records[0].tensors()}
    assert found["grad_output.layers.0.mlp"].is_readable
    assert "statistics" in str(found["layers.0.mlp.inputs.0"].source)
    assert found["layers.0.mlp.inputs.group"].is_text
    assert "layers.0.mlp.inputs.mask" not in found
    assert np.isnan(pages.array(found["metrics.layers.0.mlp.inputs.0.mean"]))
    assert run.problems == []


def dumped(root: Path, folder: str, step: int, rank: int, index: int, name: str) -> None:
    file = f"step={step}___rank={rank}___dump_index={index}___name={name}___tp_rank={rank}.pt"
    save_file(root / folder / file, {"value": torch.randn(2, 3), "meta": {"name": name}})


def test_miles_dumper_folders_say_rollout_and_phase(tmp_path: Path) -> None:
    for rank in (0, 1):
        dumped(tmp_path, "engines/engine_0", 0, rank, 0, "input_ids")
        dumped(tmp_path, "engines/engine_1", 0, rank, 0, "input_ids")
        for phase in ("fwd_only", "fwd_bwd"):
            for index, name in enumerate(("non_intrusive__model.layers.0.mlp.output", "grad__w", "input_ids")):
                dumped(tmp_path, f"{phase}/rollout_3", 0, rank, index, name)
    run = opened(tmp_path)
    keys = {record.key for record in run.records}
    assert {RecordKey(0, None, rank, "rollout", "modules") for rank in range(4)} <= keys
    assert {RecordKey(3, micro, rank, "actor", "modules") for micro in (0, 1) for rank in (0, 1)} <= keys
    assert "second record" not in said(run)
    assert not any("holes" in note for note in run.notes)
    assert field(run, "input_ids").name == "input_ids", "the record's rank says which tensor-parallel rank it is"


def test_nemos_validation_of_texts_opens(tmp_path: Path) -> None:
    lines(tmp_path / "val_data_step12.jsonl", {"content": ["x"], "rewards": [0.5], "idx": 0})
    run = opened(tmp_path)
    assert (run.dialect, run.records[0].key.role, run.records[0].key.step) == ("nemo_rl", "eval", 12)


def test_ms_swifts_steps_are_texts(tmp_path: Path) -> None:
    for step in ("1", "2"):
        row = {"step": [step, step], "prompt": ["a", "b"], "completion": ["c", "d"]}
        with open(tmp_path / "completions.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
    lines(tmp_path / "logging.jsonl", {"loss": 0.1, "global_step/max_steps": "2/10"})
    assert [record.key.step for record in opened(tmp_path).records] == [1, 2, 2]


def test_a_token_export_that_was_copied_elsewhere(tmp_path: Path) -> None:
    row = {"step": 2, "rank": 0, "micro_step": 0, "token_ids": [1, 2], "trainer_logprobs": [-5.0, None],
           "inference_logprobs": [0.0, -0.1]}  # fmt: skip
    lines(tmp_path / "rank_0.jsonl", row)
    run = opened(tmp_path)
    assert (run.dialect, run.records[0].key) == ("prime_rl", RecordKey(2, 0, 0, "actor", "forward_data"))


def test_a_number_some_samples_lack_is_one_column(tmp_path: Path) -> None:
    samples = [sample(0), sample(1, reward=None)]
    save_file(tmp_path / "rollout_data/0.pt", {"rollout_id": 0, "samples": samples})
    reward = field(opened(tmp_path), "reward")
    assert (reward.shape, reward.alignment) == ((2,), "sample")
    assert np.isnan(pages.array(reward)[1])


def test_skyrls_batch_opens_under_the_name_its_module_had_as_a_package_of_its_own(tmp_path: Path) -> None:
    ids_BT = np.arange(8, dtype=np.int64).reshape(2, 4)
    field = {"format": "numpy", "data": ids_BT.tobytes(), "shape": (2, 4), "dtype": "int64"}
    state = pickle.dumps({"batch_dict": {"sequences": field, "values": None}, "batch_size": 2, "metadata": {}}, 2)
    module = b"cskyrl_train.training_batch\n"
    stream = (
        b"\x80\x02" + module + b"_rebuild_tensor_batch\n(" + module + b"TrainingInputBatch\n" + state[2:-1] + b"tR."
    )
    folder = tmp_path / "dumped_data"
    folder.mkdir()
    (folder / "global_step_7_training_input.pkl").write_bytes(stream)
    run = open_run(tmp_path)
    assert (run.dialect, run.steps(), run.problems) == ("skyrl", [7], [])
    found = run.records[0].get("input_ids")
    assert found is not None
    assert np.array_equal(pages.array(found), ids_BT)


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ([], []),
        ([[0, 1, 2]], ["position_ids"]),
        ([[0, 1, 2], 0.7], ["position_ids", "place_6"]),
        ([[0, 1, 2], [0.7] * 3, [1, 2]], ["position_ids", "place_6", "place_7"]),
        ([[0, 1, 2], [1, 2], [0.7] * 3], ["position_ids", "sample_lengths", "temperature"]),
    ],
)
def test_micro_batches_of_other_versions_are_not_given_wrong_names(
    tmp_path: Path, more: list[Any], names: list[str]
) -> None:
    batch = [[5, 6, 7], [False, True, True], [0.5] * 3, [-0.1] * 3, *more]
    file = tmp_path / "rollouts/step_3/rank_0.bin"
    file.parent.mkdir(parents=True)
    file.write_bytes(msgspec.msgpack.encode([batch]))
    (record,) = opened(tmp_path).records
    found = [ref.canonical for ref in record.tensors()]
    assert found == ["input_ids", "loss_mask", "advantages", "rollout_logprobs", *names]
    assert bool(record.problems) == any("place_" in name for name in names)


def test_rewards_of_a_token_export_are_said_of_tokens(tmp_path: Path) -> None:
    row = {"schema_version": 1, "step": 3, "export_step": 3, "rank": 0, "micro_step": 0, "token_ids": [1, 2, 3],
           "trainer_logprobs": [-1.0, None, -3.0], "rewards": [None, None, 0.5], "is_masked": [None] * 3,
           "losses": [{}, {}, {"rl": {"advantage": 0.5, "mask": True}}], "run_id": None}  # fmt: skip
    lines(tmp_path / "token_exports/step_3/rank_0.jsonl", row, row)
    run = opened(tmp_path)
    assert field(run, "token_rewards").alignment == "full"
    assert "not computed" in str(field(run, "is_masked").sentinel)
