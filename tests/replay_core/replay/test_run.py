"""run_cell end to end, through genuinely built models: right packs agree, a leak is caught, and everything is said."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from replay_core.dumps import open_run
from replay_core.errors import RequestError, SelectionError, UnavailableError
from replay_core.jobs import LogLine, Progress
from replay_core.pages import array
from replay_core.replay.segments import layout_of, segments
from tests.replay_core.replay.conftest import ROWS, small_batch


def run_of(cell):
    return open_run(Path(cell["dump"]))


def judged(reference, cell):
    return segments(run_of(reference), run_of(cell), cell["final_hidden"])


def tensor(cell, stage, name):
    (record,) = run_of(cell).select(stage=stage)
    return array(record.get(name))


#: Noise (docs/evidence.md) for weights of standard deviation .2: (worst token, log-probability).
NOISE = {"float32": (1e-5, 3e-5), "bfloat16": (0.1, 0.4)}


@pytest.mark.long
@pytest.mark.parametrize("attention", ["eager", "sdpa", "sdpa-math", "sdpa-flash"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padded_and_packed_agree_with_each_row_alone_and_a_leak_does_not(replay, attention, dtype):
    common = f"attention={attention} dtype={dtype}"
    reference = replay(f"{common} rows_per_forward=1")
    worst_allowed, logp_allowed = NOISE[dtype]
    for setting in ("packing=off", "packing=on", "rows_per_forward=2", "packing=on rows_per_forward=2"):
        found = judged(reference, replay(f"{common} {setting}"))
        assert [segment["tokens"] for segment in found] == [tokens for _, tokens, _ in ROWS]
        for segment in found:
            assert segment["worst_token"]["rel_l2"] < worst_allowed, (setting, segment)
            assert segment["valid"]["logp_max"] < logp_allowed, (setting, segment)
    leak = judged(reference, replay(f"{common} packing=on block_mask=off"))
    assert leak[0]["worst_token"]["rel_l2"] < worst_allowed
    for segment in leak[1:]:
        assert segment["worst_token"]["rel_l2"] > 0.5
        assert segment["valid"]["logp_max"] > 0.1


def test_the_first_tensor_a_leak_reaches_is_the_input_of_the_first_output_projection(replay):
    right, leak = replay("attention=eager packing=on"), replay("attention=eager packing=on block_mask=off")
    (a,), (b,) = (run_of(cell).select(stage="modules") for cell in (right, leak))
    differing = [ref.name for ref in a.tensors() if not np.array_equal(array(ref), array(b.get(ref.name)))]
    assert differing[0] == "layers.0.self_attn.o_proj.inputs.0"


def test_logprobs_and_entropy_are_those_of_the_actor(replay, recorded):
    cell = replay()
    batch = small_batch()
    model = AutoModelForCausalLM.from_pretrained(recorded / "checkpoints" / "step_000000").eval()
    mask = torch.from_numpy(batch.valid_BS.astype(np.int64))
    positions = (mask.cumsum(-1) - 1).masked_fill_(mask == 0, 1)
    ids = torch.from_numpy(batch.ids_BS)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits.float() / 0.7
    distribution = torch.distributions.Categorical(logits=logits[:, :-1])
    both = (mask[:, :-1] * mask[:, 1:]).bool()
    expected = torch.zeros(ids.shape)
    expected[:, :-1] = torch.where(both, distribution.log_prob(ids[:, 1:]), 0)
    found = tensor(cell, "forward_data", "log_probs")
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-5)
    assert (found[~batch.valid_BS] == 0).all()
    expected_entropy = torch.where(both, distribution.entropy(), 0)
    np.testing.assert_allclose(tensor(cell, "forward_data", "entropy")[:, :-1], expected_entropy, atol=2e-4)


def test_the_answer_is_a_dump_with_inputs_modules_and_logprobs(replay):
    padded, packed = replay(), replay("packing=on")
    names = {record.key.stage: record.names for record in run_of(padded).records}
    assert set(names) == {"batch_inputs", "modules", "forward_data"}
    (inputs,) = run_of(padded).select(stage="batch_inputs")
    assert {ref.name for ref in inputs.tensors()} >= {
        "input_ids", "attention_mask", "position_ids", "response_mask", "temperature",
    }  # fmt: skip
    total = sum(tokens for _, tokens, _ in ROWS)
    assert tensor(packed, "forward_data", "log_probs").shape == (1, total)
    assert tensor(packed, "batch_inputs", "cu_seqlens").dtype == np.int64
    assert layout_of(run_of(packed)).lengths.tolist() == [tokens for _, tokens, _ in ROWS]
    assert tensor(replay("rows_per_forward=1"), "modules", "layers.1.mlp.output").shape == (1, total, 32)


def test_modules_are_stored_in_call_order_under_their_common_names(replay):
    (record,) = run_of(replay()).select(stage="modules")
    names = [ref.name for ref in record.tensors()]
    milestones = [
        "embed_tokens.output",
        "layers.0.inputs.0",
        "layers.0.self_attn.inputs.hidden_states",
        "layers.0.self_attn.q_proj.output",
        "layers.0.self_attn.o_proj.inputs.0",
        "layers.0.self_attn.output.0",
        "layers.0.mlp.output",
        "layers.1.inputs.0",
        "norm.output",
    ]
    places = [names.index(name) for name in milestones]
    assert places == sorted(places)
    assert not any(name.startswith("model.") for name in names)


def test_a_tensor_under_several_names_is_stored_once(replay):
    cell = replay()
    (record,) = run_of(cell).select(stage="modules")
    apart = sum(ref.nbytes for ref in record.tensors())
    assert record.path.stat().st_size < 0.7 * apart


def test_effective_settings_are_read_back(replay):
    for asked, ran in {
        "attention=eager": "eager (bmm + softmax)",
        "attention=sdpa": "_scaled_dot_product_flash_attention_for_cpu",
        "attention=sdpa-math": "math (bmm + _safe_softmax)",
        "attention=sdpa-flash": "_scaled_dot_product_flash_attention_for_cpu",
    }.items():
        cell = replay(asked)
        assert cell["effective"]["attention"] == ran
    assert any("one kernel" in note for note in cell["notes"])
    effective = replay("dtype=bf16 packing=on")["effective"]
    assert effective["dtype"] == "bfloat16"
    assert (effective["use_cache"], effective["temperature"], effective["threads"]) == (False, 0.7, 1)


def test_the_manifest_says_what_was_asked_and_what_ran(replay):
    flags = run_of(replay("packing=on")).flags
    assert flags["asked"]["packing"] is True
    assert flags["effective"]["attn_implementation"] == "sdpa"


def test_a_capture_pattern_keeps_the_final_hidden_states(replay):
    cell = replay(capture=r"layers\.0\.self_attn$")
    (record,) = run_of(cell).select(stage="modules")
    modules = {ref.name.split(".inputs")[0].split(".output")[0] for ref in record.tensors()}
    assert modules == {"layers.0.self_attn", "norm"}
    assert cell["final_hidden"] == "norm.output"


def test_a_capture_that_would_not_fit_is_refused_before_it_is_made(replay, monkeypatch):
    from replay_core.replay import cell as run

    monkeypatch.setattr(run, "forecast_bytes", lambda *_: 9000 << 20)
    with pytest.raises(RequestError, match="more room than there is") as refused:
        replay(capture_level="full")
    assert "9,000 MiB" in refused.value.found
    events = []
    cell = replay(on_event=events.append)
    assert (cell["capture"]["level"], cell["capture"]["forecast_mib"]) == ("hash", 9000.0)
    assert [ref.name for ref in run_of(cell).select(stage="modules")[0].tensors()] == ["norm.output"]
    assert any("about 9,000 MiB of tensors, and there is room for" in getattr(event, "text", "") for event in events)


def test_progress_and_log_reach_the_listener(replay):
    events = []
    replay("rows_per_forward=1", on_event=events.append)
    assert any(isinstance(event, LogLine) and "loaded" in event.text for event in events)
    stages = {event.what for event in events if isinstance(event, Progress)}
    assert stages == {
        "loading the model",
        "forwards",
        "tokens through the head",
        "captured forwards",
        "records written",
    }
    assert events.index(Progress(1, 3, "forwards")) < events.index(Progress(3, 3, "forwards"))


def test_the_cell_is_plain_data(replay):
    import json

    cell = replay()
    assert json.loads(json.dumps(cell)) == cell
    assert (cell["outcome"], cell["error"]) == ("ran", None)
    assert cell["memory"]["peak_mib"] > 0
    assert cell["time"]["steady_s"] > 0


def test_a_replay_can_be_replayed(replay):
    packed = replay("packing=on")
    again = replay("packing=off", dump=packed["dump"])
    assert [segment["worst_token"]["rel_l2"] < 1e-5 for segment in judged(packed, again)] == [True] * 3


def test_what_cannot_run_is_unavailable(replay):
    with pytest.raises(UnavailableError):
        replay("attention=fa2")


def test_a_micro_batch_that_is_not_there_is_named(replay):
    with pytest.raises(SelectionError, match="micro 5"):
        replay(micro=5)


def test_another_steps_weights_are_announced(replay, recorded, tmp_path):
    import json
    import shutil

    dump = tmp_path / "dump"
    shutil.copytree(recorded, dump)
    manifest = json.loads((dump / "manifest.json").read_text())
    manifest["models"] = {"4": manifest["models"]["0"]}
    (dump / "manifest.json").write_text(json.dumps(manifest))
    cell = replay(dump=str(dump))
    assert any("no weights of step 0: those of step 4" in note for note in cell["notes"])


def test_the_phases_are_log_lines_in_a_trainers_grammar(replay):
    from replay_core.dumps.step_log import parse
    from replay_core.jobs import LogLine

    lines = []
    replay(on_event=lambda event: lines.append(event.text) if isinstance(event, LogLine) else None, capture="none")
    (iteration,) = parse(line for line in lines if "[Micro" in line)
    assert [stage.title for stage in iteration.micros[0].stages] == ["Model loaded", "Forward and log-probabilities"]
    assert all(stage.values["mem"] > 0 for stage in iteration.micros[0].stages)
