"""Replayed log-probabilities against OpenRLHF's Actor, written here from its description, on genuine dumps.

docs/evidence.md#actor-inputs: position_ids are cumsum(attention_mask) - 1 with 1 in padding; logits in float32 over
the temperature; the target is the sequence rolled by one; the last A columns times the action mask.
"""

import pickle

import numpy as np
import pytest
import torch
import transformers

from replay_core.replay import architectures
from tests.fixtures import FIXTURES
from tests.replay_core.replay.test_run import judged, tensor

DUMPS = FIXTURES / "openrlhf" / "input_dumps"


def actor_forward(model, sequences, action_mask, attention_mask, temperature=1.0):
    position_ids = attention_mask.long().cumsum(-1) - 1
    position_ids.masked_fill_(attention_mask == 0, 1)
    hidden = model.model(sequences, attention_mask=attention_mask, position_ids=position_ids).last_hidden_state
    rolled = torch.roll(sequences, shifts=-1, dims=1)
    # What counts alone, a few at a time: logits over 128256 tokens are 2 GB for the whole of two rows.
    first = sequences.shape[1] - 1 - action_mask.shape[1]
    log_probs = torch.zeros(action_mask.shape)
    for row, column in zip(*(part.split(128) for part in action_mask.nonzero(as_tuple=True)), strict=True):
        logits = model.lm_head(hidden[row, first + column]).to(torch.float32)
        targets = rolled[row, first + column, None]
        log_probs[row, column] = torch.log_softmax(logits / temperature, dim=-1).gather(-1, targets)[:, 0]
    return log_probs


def actor_inputs(rank, micro, rows):
    """(sequences, attention mask, action mask) of some rows, as they were recorded."""
    file = sorted(DUMPS.glob(f"actor_inputs_rank{rank}_2*"))[micro]
    inputs = pickle.loads(file.read_bytes())  # our own fixture; torch.load refuses a plain pickle
    sequences, mask, action = (inputs[name][rows] for name in ("sequences", "attention_mask", "action_mask"))
    assert (mask[:, 0] == 0).any(), "some row is padded on the left"
    assert (mask[:, -1] == 0).any(), "some row is padded on the right"
    return sequences, mask, action


def need_the_actors_logprobs(cell, sequences, mask, action):
    kind, sizes = architectures.settings("llama-tiny", int(sequences.max()), sequences.shape[1])
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = actor_forward(model, sequences, action, mask)
    found = tensor(cell, "forward_data", "log_probs")
    padded = np.zeros(sequences.shape, dtype=np.float32)
    if found.shape != padded.shape:
        # A flat row holds the same tokens end to end.
        padded[mask.bool().numpy()] = found[0]
    else:
        padded = found
    width, count = padded.shape[1], action.shape[1]
    actions = padded[:, width - 1 - count : width - 1] * action.numpy()
    np.testing.assert_allclose(actions, expected.numpy(), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_genuine_batch_over_128256_tokens(ask, replay):
    genuine = {
        "dump": str(DUMPS),
        "rank": 1,
        "micro": 1,
        "rows": "1,2",
        "model": "random:llama-tiny",
        "capture": "^norm$",
    }
    doc = ask("packing=on", plan=genuine)
    reference, padded, packed = doc["cells"]
    assert [cell["agreement"]["agrees"] for cell in doc["cells"]] == [None, True, True]
    assert [row["tokens"] for row in packed["segments"]] == [435, 500]
    assert any("no temperature: 1.0 is assumed" in note for note in doc["notes"])
    for cell in (padded, packed):
        for segment in judged(reference, cell):
            assert segment["worst_token"]["rel_l2"] < 1e-6
            assert segment["valid"]["logp_max"] < 4e-6
    need_the_actors_logprobs(packed, *actor_inputs(1, 1, [1, 2]))
    leak = judged(reference, replay("packing=on block_mask=off", **genuine))
    assert leak[0]["worst_token"]["rel_l2"] < 1e-6
    assert leak[1]["worst_token"]["rel_l2"] > 0.5
    assert leak[1]["worst_token"]["position"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("micro", "flags"), [(3, "packing=on"), (1, "packing=on"), (1, ""), (1, "rows_per_forward=1"), (2, "packing=on")]
)
def test_replayed_logprobs_are_the_actors_on_genuine_dumps(replay, micro, flags):
    plan = {"dump": str(DUMPS), "micro": micro, "model": "random:llama-tiny", "max_rows": 2, "capture": "none"}
    need_the_actors_logprobs(replay(flags, **plan), *actor_inputs(0, micro, [0, 1]))
