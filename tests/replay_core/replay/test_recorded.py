"""What the trainer recorded, held against the replay without being asked."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from replay_core import pages, workbench
from replay_core.demo.train import train_demo
from replay_core.dumps import open_run
from replay_core.errors import RequestError
from replay_core.export.outcome import exit_code
from replay_core.recorder import Recorder
from replay_core.records import Inline, RecordKey, TensorRef
from replay_core.replay import recorded as held
from replay_core.replay.batch import MicroBatch
from replay_core.replay.flags import Flags
from replay_core.replay.reading import RecordedBatch
from replay_core.replay.recorded import Explained, RecordedTokens, against, exact_beside_others, placed_in
from tests.builders import Here, record_with, samples_with, write_dump

BATCH = {
    "input_ids": [[0, 5, 6, 7], [8, 9, 4, 0]],
    "attention_mask": [[0, 1, 1, 1], [1, 1, 1, 0]],
    "response_mask": [[0, 0, 1, 1], [0, 1, 1, 0]],
}


def replayed(**fields):
    samples = samples_with(**fields)
    return RecordedBatch(MicroBatch.of(samples), samples.held.record.key, samples)


def place(values, held=None, **how):
    array = np.asarray(values, dtype=np.float64)
    ref = TensorRef("log_probs", "float64", array.shape, Inline(array.tolist()), "policy_logprobs", **how)
    return placed_in(ref, record_with(ref, *(held or [])), replayed(**BATCH))


@pytest.mark.parametrize(
    "recorded",
    [
        {"values": [[9, -1, -2, 9], [-3, -4, 9, 9]], "alignment": "next"},
        {"values": [[9, -1, -2], [-3, -4, 9]]},
        {"values": [[9, 9, -1, -2], [9, -3, -4, 9]], "alignment": "response"},
        {"values": [-1, -2, -3, -4], "rows": (2, 2), "alignment": "response"},
    ],
    ids=["[B, S] next", "[B, S-1]", "[B, S] own token", "ragged responses"],
)
def test_every_form_lands_on_the_same_tokens(recorded):
    values_BS, known_BS = place(**recorded)
    assert known_BS.astype(int).tolist() == [[0, 1, 1, 0], [1, 1, 0, 0]]
    assert values_BS[known_BS].tolist() == [-1, -2, -3, -4]


def test_a_response_suffix_ends_with_the_last_token():
    values_BS, known_BS = place([[-1, -2], [-4, 9]], alignment="response")
    assert values_BS[known_BS].tolist() == [-1, -2, -4]


def test_a_shape_of_no_token_axis_is_not_placed():
    assert place([[1.0] * 7] * 2) is None


ROWS = [[11, 12, 13], [14, 15], [16, 17, 18, 19]]
OLD = [[0.0, -1.0, -2.0], [0.0, -3.0], [0.0, 0.0, -4.0, -5.0]]


def test_values_of_shuffled_rows_are_found_by_their_tokens(tmp_path):
    order = [2, 0, 1]
    fields = {"input_ids": [ROWS[n] for n in order], "old_log_probs": [[*OLD[n][1:], 9.0] for n in order]}
    record = open_run(write_dump(tmp_path / "dump", {"trajectory": fields})).records[0]
    batch = {"input_ids": [[11, 12, 13], [14, 15, 0]], "attention_mask": [[1, 1, 1], [1, 1, 0]],
             "response_mask": [[0, 1, 1], [0, 1, 0]]}  # fmt: skip
    values_BS, known_BS = placed_in(record.get("old_logprobs"), record, replayed(**batch))
    assert values_BS.tolist() == [[-1, -2, 0], [-3, 0, 0]]
    assert known_BS.sum() == 3
    assert placed_in(record.get("old_logprobs"), record, replayed(input_ids=[[1, 2]], attention_mask=[[1, 1]])) is None


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "dump"
    train_demo(path, steps=2)
    return path


def ask(dump, out, flags="", plan=None, **request):
    base = {"dump": str(dump), "step": 0, "rank": 0, "micro": 0, "model": "checkpoint", "capture": "none"}
    chosen = Flags.parse(flags).to_mapping()
    return workbench.replay({**base, "flags": chosen, **(plan or {})}, out, Here(), **request)


@pytest.mark.long
def test_the_recording_is_row_0_and_agrees_with_the_weights_that_made_it(demo, tmp_path):
    doc = ask(demo, tmp_path / "out", matrix="packing=off,on block_mask=on,off")
    row = doc["cells"][0]
    assert (row["part"], row["agreement"]["agrees"]) == ("recording", True)
    assert row["recorded"][0]["name"] == "policy_logprobs"
    assert row["recorded"][0]["max_abs"] < 1e-5
    assert doc["recording"]["nearest_cell"] in (1, 2, 3, 4)
    leak = doc["cells"][-1]
    assert leak["toggles"] == {"packing": True, "block_mask": False}
    assert leak["recorded"][0]["verdict"] == "DIFF"


@pytest.mark.long
def test_a_recording_of_a_wrong_forward_is_named_though_all_cells_agree(demo, tmp_path):
    doc = ask(
        demo, tmp_path / "out", plan={"model": str(demo / "checkpoints" / "step_000001")}, matrix="packing=off,on"
    )
    assert [cell["agreement"]["agrees"] for cell in doc["cells"]] == [False, None, True, True]
    assert any("weights of step 1, batch of step 0" in note for note in doc["notes"])
    assert exit_code(doc) == 1


def test_a_recording_that_parts_exits_1_without_a_matrix_too(demo, tmp_path):
    doc = ask(demo, tmp_path / "out", plan={"model": str(demo / "checkpoints" / "step_000001")})
    assert [cell["agreement"]["agrees"] for cell in doc["cells"]] == [None, True]
    assert doc["cells"][0]["recorded"][0]["verdict"] == "DIFF"
    assert exit_code(doc) == 1


@pytest.mark.long
def test_a_recording_that_no_cell_comes_near_has_a_cause_where_nothing_replayed_has_one(demo, tmp_path):
    of_another_step = {"model": str(demo / "checkpoints" / "step_000001")}
    doc = ask(demo, tmp_path / "other", plan=of_another_step, why=True)
    assert doc["cells"][0]["cause"]["kind"] == "maths"
    assert "recorded log_probs is" in doc["cells"][0]["cause"]["sentence"]
    same = ask(demo, tmp_path / "same", plan={"model": str(demo / "checkpoints" / "step_000000")}, why=True)
    assert same["cells"][0]["cause"] is None


@pytest.mark.parametrize("matrix", [None, "packing=off,on"])
def test_random_weights_are_never_said_to_agree_with_the_recording_or_not(demo, tmp_path, matrix):
    doc = ask(demo, tmp_path / "out", plan={"model": "random:qwen2-tiny"}, matrix=matrix)
    held = [one for cell in doc["cells"] for one in cell["recorded"]]
    assert held
    assert {one["verdict"] for one in held} == {None}
    assert all(one["max_abs"] > 0.01 for one in held)
    assert doc["cells"][0]["agreement"]["agrees"] is None
    assert doc["recording"]["nearest_cell"] is None
    assert any("random:qwen2-tiny has other weights" in note for note in doc["notes"])
    assert exit_code(doc) == 0


@pytest.mark.long
def test_a_backward_says_what_it_computed_in_so_fp32_is_held_to_fp32(demo, tmp_path):
    """Without it, log-probabilities of two fp32 runs might be up to 3 nats apart."""
    other = str(demo / "checkpoints" / "step_000001")
    doc = ask(demo, tmp_path / "out", plan={"model": other, "backward": True})
    for cell in doc["cells"]:
        assert open_run(Path(cell["dump"])).flags["effective"]["dtype"] == "float32"
        assert cell["recorded_training"]["agrees"] is False
        assert "up to 3 allowed" not in cell["recorded_training"]["sentence"]


def test_gradients_of_half_precision_are_not_judged_by_a_replay_in_float32(demo, tmp_path):
    """Which differ by more than a cast where nothing is wrong; the other checkpoint makes them differ here."""
    run = Path(shutil.copytree(demo, tmp_path / "run"))
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["flags"]["dtype"] = "bfloat16"
    (run / "manifest.json").write_text(json.dumps(manifest))
    doc = ask(run, tmp_path / "out", plan={"model": str(run / "checkpoints" / "step_000001"), "backward": True})
    trained = doc["cells"][doc["baseline"]]["recorded_training"]
    assert trained["agrees"] is None
    assert trained["sentence"] == (
        "not judged: trained in bfloat16, replayed in float32 (--dtype bfloat16 is as it was trained)"
    )


def test_a_backward_with_random_weights_is_not_judged_by_the_recorded_losses(demo, tmp_path):
    doc = ask(demo, tmp_path / "out", plan={"model": "random:qwen2-tiny", "backward": True})
    trained = [cell["recorded_training"] for cell in doc["cells"] if cell["recorded_training"]]
    assert trained
    assert {one["agrees"] for one in trained} == {None}
    assert exit_code(doc) == 0


def test_a_backward_of_some_rows_is_not_judged_by_the_gradients_of_all(demo, tmp_path):
    doc = ask(demo, tmp_path / "out", plan={"backward": True, "rows": "0,1"})
    trained = [cell["recorded_training"] for cell in doc["cells"] if cell["recorded_training"]]
    assert trained
    assert {one["agrees"] for one in trained} == {None}
    assert trained[0]["sentence"] == "not judged: only 2 rows of the micro-batch were replayed"
    assert exit_code(doc) == 0


NEEDED = ("input_ids", "attention_mask", "response_mask", "log_probs")


@pytest.mark.parametrize(
    ("dtype", "off", "verdict", "told"),
    [
        (None, 0.0, "CLOSE", False), (None, 0.004, "CLOSE", True), ("bfloat16", 0.004, "CLOSE", False),
        (None, 0.05, "DIFF", False), ("bfloat16", 0.05, "DIFF", False),
    ],
)  # fmt: skip
def test_a_recording_is_held_to_what_half_precision_makes_of_its_tokens(demo, tmp_path, dtype, off, verdict, told):
    run = open_run(demo)
    records = [one for one in run.records if (one.key.step, one.key.micro) == (0, 0)]
    held = {ref.name: torch.tensor(pages.array(ref)) for one in records for ref in one.tensors() if ref.name in NEEDED}
    width = held["log_probs"].shape[1]
    held["log_probs"] += off * torch.tensor([1.0, -1.0]).repeat(width)[:width]
    flags = {"temperature": 1.0} | ({"dtype": dtype} if dtype else {})
    with Recorder(tmp_path / "dump", flags=flags).step(0) as record:
        record("forward_data", micro=0, **held)
    doc = ask(tmp_path / "dump", tmp_path / "out", plan={"model": str(demo / "checkpoints" / "step_000000")})
    recorded = doc["cells"][doc["baseline"]]["recorded"][0]
    assert (recorded["name"], recorded["verdict"]) == ("policy_logprobs", verdict)
    assert ("which no dtype explains" in recorded["reason"]) is (verdict == "DIFF")
    assert any("no more than bfloat16 explains" in note for note in doc["notes"]) is told
    assert exit_code(doc) == (verdict == "DIFF")


@pytest.mark.parametrize(
    ("said", "off", "verdict"),
    [
        ({"dtype": "float32"}, 0.0, "CLOSE"), ({"dtype": "float32"}, 0.001, "DIFF"), ({}, 0.001, "CLOSE"),
        ({"dtype": "float32", "tf32": True}, 0.001, "CLOSE"),
    ],
)  # fmt: skip
def test_a_recording_that_says_float32_is_held_to_what_float32_rounds(demo, tmp_path, said, off, verdict):
    run = open_run(demo)
    records = [one for one in run.records if (one.key.step, one.key.micro) == (0, 0)]
    held = {ref.name: torch.tensor(pages.array(ref)) for one in records for ref in one.tensors() if ref.name in NEEDED}
    width = held["log_probs"].shape[1]
    held["log_probs"] += off * torch.tensor([1.0, -1.0]).repeat(width)[:width]
    flags = {"temperature": 1.0} | ({"dtype": said["dtype"]} if "dtype" in said else {})
    with Recorder(tmp_path / "dump", flags=flags).step(0) as record:
        record("forward_data", micro=0, **held)
    manifest = json.loads((tmp_path / "dump" / "manifest.json").read_text())
    manifest["determinism"]["tf32_matmul"] = said.get("tf32", False)
    (tmp_path / "dump" / "manifest.json").write_text(json.dumps(manifest))
    doc = ask(tmp_path / "dump", tmp_path / "out", plan={"model": str(demo / "checkpoints" / "step_000000")})
    recorded = doc["cells"][doc["baseline"]]["recorded"][0]
    assert recorded["verdict"] == verdict, recorded["reason"]
    assert ("an autocast that is not named, or other weights or maths" in recorded["reason"]) is (verdict == "DIFF")
    assert exit_code(doc) == (verdict == "DIFF")


def explained(recorded, one, other, name="old_logprobs"):
    values = np.asarray(recorded, dtype=np.float64)[None]
    told = RecordedTokens(name, name, RecordKey(0, 0, "actor"), values, np.ones_like(values, dtype=bool), "float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("replay_core.replay.recorded.replayed", lambda run, _batch: run)
        return Explained.of(told, np.asarray(one)[None], np.asarray(other)[None], None)


def test_a_recording_is_explained_by_the_nearer_of_two_dtypes_or_by_how_it_was_stored():
    generator = np.random.default_rng(0)
    fine = -5.0 - generator.random(400)
    coarse = fine + 0.01 * generator.standard_normal(400)
    assert explained(fine, fine, coarse).explains
    assert explained(coarse, fine, coarse).explains
    assert explained(fine + 0.02 * generator.standard_normal(400), fine, coarse).explains, "another kernel's noise"
    assert not explained(fine * 0.98, fine, coarse).explains, "another temperature"
    assert explained(fine * 0.992, fine, coarse, name="rollout_logprobs").explains, "an engine rounds otherwise"
    stored = (fine.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert explained(stored, fine, fine).explains, "log-probabilities cut to bfloat16"
    one_row = fine + np.where(np.arange(400) < 12, 0.5, 0.0)
    assert not explained(one_row, fine, coarse).explains, "few tokens that are far off"
    assert not explained(fine + 0.1, fine, fine).explains


@pytest.mark.parametrize(("dtype", "verdict"), [("float32", "DIFF"), ("bfloat16", "CLOSE")])
def test_only_a_replay_in_float32_shows_that_the_trainer_was(dtype, verdict):
    # Most tokens are off by next to nothing, as in float32; in half precision that is luck, and one is off by more.
    values = np.full((2, 16), -2.0)
    batch = MicroBatch.of(samples_with(**{**BATCH, "input_ids": [[5] * 16] * 2, "attention_mask": [[1] * 16] * 2,
                                          "response_mask": [[0] + [1] * 15] * 2}))  # fmt: skip
    known = np.ones((2, 16), dtype=bool)
    known[:, -1] = False
    told = RecordedTokens("policy_logprobs", "log_probs", RecordKey(0, 0, "actor"), values, known, "float32")
    off = np.where(np.arange(16) == 3, 0.02, 1e-5)[None].repeat(2, axis=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("replay_core.replay.recorded.replayed", lambda run, _batch: run)
        held = against(told, values + off, batch, run_dtype=dtype, known_fp32=False)
    assert held["verdict"] == verdict, held["reason"]


def test_the_temperature_a_recorder_was_told_once_divides_the_logits(tmp_path):
    with Recorder(tmp_path / "dump", flags={"temperature": 0.5}).step(0) as record:
        record("forward_data", micro=0, input_ids=torch.tensor([[3, 4, 5]]), attention_mask=torch.ones(1, 3).long())
    doc = ask(tmp_path / "dump", tmp_path / "out", plan={"model": "random:qwen2-tiny"})
    assert doc["cells"][0]["effective"]["temperature"] == 0.5
    assert not any("1.0 is assumed" in note for note in doc["notes"])


@pytest.mark.long
def test_models_are_ranked_by_who_sampled_the_tokens(demo, tmp_path):
    first, second = (str(demo / "checkpoints" / f"step_00000{step}") for step in (0, 1))
    for step, right in ((0, first), (1, second)):
        doc = ask(
            demo, tmp_path / f"out{step}", plan={"step": step}, models=(first, second), against="rollout_logprobs"
        )
        ranked = [row["model"] for row in doc["ranking"]["models"]]
        assert ranked[0] == right
        assert doc["ranking"]["models"][0]["max_abs"] < 1e-4 < doc["ranking"]["models"][1]["mean_abs"]


def test_ranking_by_what_is_not_recorded_is_refused(demo, tmp_path):
    with pytest.raises(RequestError, match="no such log-probabilities"):
        ask(demo, tmp_path / "out", models=("checkpoint",), against="values")


OWN = """
import torch

def right(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"],
                   position_ids=batch["position_ids"]).logits.float() / batch["temperature"]
    return logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]

def blind(model, batch):
    return right(model, {**batch, "attention_mask": None, "position_ids": None})

def broken(model, batch):
    raise KeyError("input_idz")

def shapeless(model, batch):
    return torch.zeros(3)

def factory():
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                                        num_attention_heads=4))
"""


@pytest.fixture
def own(tmp_path):
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "trainers_own.py").write_text(OWN)
    return str(folder)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "outcome", "agrees"),
    [("right", "ran", True), ("blind", "ran", False), ("broken", "failed", None), ("shapeless", "failed", None)],
)
def test_the_trainers_own_forward_is_a_cell_among_the_others(demo, own, tmp_path, name, outcome, agrees):
    plan = {"forward": f"trainers_own:{name}", "forward_path": own}
    doc = ask(demo, tmp_path / "out", plan=plan)
    assert [cell["part"] for cell in doc["cells"]] == ["reference", "control", "cell"]
    cell = doc["cells"][-1]
    assert (cell["outcome"], cell["agreement"]["agrees"]) == (outcome, agrees)
    assert doc["cells"][1]["agreement"]["agrees"] is True


@pytest.mark.long
def test_a_model_may_come_from_the_users_factory(demo, own, tmp_path):
    plan = {"model": "factory:trainers_own:factory", "forward_path": own}
    doc = ask(demo, tmp_path / "out", plan=plan)
    assert [cell["outcome"] for cell in doc["cells"]] == ["ran", "ran"]


def test_a_factory_named_by_a_dump_is_never_called(demo, own, tmp_path):
    import json
    import shutil

    from replay_core.errors import ModelError

    shutil.copytree(demo, tmp_path / "dump")
    manifest = Path(tmp_path / "dump" / "manifest.json")
    content = json.loads(manifest.read_text())
    content["models"] = {"0": "factory:trainers_own:factory"}
    manifest.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="code is only ever run when you name it"):
        ask(tmp_path / "dump", tmp_path / "out", plan={"forward_path": own})


@pytest.mark.parametrize(("alignment", "said"), [("next", "one token earlier"), ("full", "one token later")])
def test_a_recording_that_is_the_neighbours_is_said_to_be_one_token_off(demo, tmp_path, alignment, said):
    """What stands at its own index is said to stand before it, and the other way round."""
    held = next(
        one for one in open_run(demo).records if (one.key.step, one.key.micro, one.key.stage) == (0, 0, "forward_data")
    )
    ids, mask, generated = (
        torch.from_numpy(np.array(pages.array(held.get(name))))
        for name in ("input_ids", "attention_mask", "response_mask")
    )
    doc = ask(demo, tmp_path / "first")
    replay = open_run(doc["cells"][1]["dump"])
    values = torch.from_numpy(np.array(pages.array(replay.select(stage="forward_data")[0].get("log_probs"))))
    assert values.shape == ids.shape
    values = (
        values if alignment == "full" else values.roll(1, dims=1).masked_fill(torch.arange(ids.shape[1]) == 0, -9.0)
    )
    with Recorder(tmp_path / "dump") as recorder, recorder.step(0) as record:
        record(
            "forward_data", micro=0, input_ids=ids, attention_mask=mask, response_mask=generated, log_probs=values,
            alignment={"log_probs": alignment},
        )  # fmt: skip
    model = str(demo / "checkpoints" / "step_000000")
    row = ask(tmp_path / "dump", tmp_path / "out", plan={"model": model})["cells"][0]["recorded"][0]
    assert row["verdict"] == "DIFF"
    assert said in row["reason"]


@pytest.mark.parametrize(("of_sample_0", "expected"), [(0.0, (6, 54)), (3e-3, None)])
def test_a_sample_that_is_exact_in_float32_shows_that_the_others_are_not_rounded(monkeypatch, of_sample_0, expected):
    random = np.random.default_rng(0)
    again_BS = -random.uniform(1, 6, (4, 18))
    off_BS = random.normal(0, 1e-2, (4, 18))
    known_BS = np.ones((4, 18), dtype=bool)
    known_BS[0, 6:] = False
    off_BS[0] = of_sample_0 * random.normal(0, 1, 18)
    off_BS[1:] = np.sign(off_BS[1:]) * np.maximum(abs(off_BS[1:]), 1e-3)
    key = RecordKey(0, 0, 0, "forward_data")
    values = RecordedTokens("policy_logprobs", "log_probs", key, again_BS + off_BS, known_BS, "float32")
    monkeypatch.setattr(held, "replayed", lambda _run, _batch: again_BS)
    assert exact_beside_others(values, None, None) == expected
