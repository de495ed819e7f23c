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
from tests.replay_core.replay.test_run import tensor

DUMPS = FIXTURES / "openrlhf" / "input_dumps"


def actor_forward(model, sequences, action_mask, attention_mask, temperature=1.0):
    position_ids = attention_mask.long().cumsum(-1) - 1
    position_ids.masked_fill_(attention_mask == 0, 1)
    hidden = model.model(sequences, attention_mask=attention_mask, position_ids=position_ids).last_hidden_state
    rolled = torch.roll(sequences, shifts=-1, dims=1)
    # The actions alone, a few at a time: logits over 128256 tokens are 2 GB for the whole of two rows.
    wanted = range(sequences.shape[1] - 1 - action_mask.shape[1], sequences.shape[1] - 1)
    log_probs = []
    for start in wanted[::128]:
        part = slice(start, min(start + 128, wanted.stop))
        logits = model.lm_head(hidden[:, part]).to(torch.float32)
        chosen = torch.log_softmax(logits / temperature, dim=-1).gather(-1, rolled[:, part, None])
        log_probs.append(chosen[..., 0])
    return torch.cat(log_probs, dim=1) * action_mask


@pytest.mark.parametrize(
    ("micro", "flags"),
    [
        (3, "packing=on"),
        pytest.param(1, "packing=on", marks=pytest.mark.slow),
        pytest.param(1, "", marks=pytest.mark.slow),
        pytest.param(1, "rows_per_forward=1", marks=pytest.mark.slow),
        pytest.param(2, "packing=on", marks=pytest.mark.slow),
    ],
)
def test_replayed_logprobs_are_the_actors_on_genuine_dumps(replay, micro, flags):
    recorded = sorted(DUMPS.glob("actor_inputs_rank0_2*.pkl"))[micro]
    with open(recorded, "rb") as file:
        inputs = pickle.load(file)  # our own fixture; torch.load refuses a plain pickle
    rows = 2
    sequences, mask, action = (inputs[name][:rows] for name in ("sequences", "attention_mask", "action_mask"))
    assert (mask[:, 0] == 0).any(), "some row is padded on the left"
    assert (mask[:, -1] == 0).any(), "some row is padded on the right"
    cell = replay(flags, dump=str(DUMPS), micro=micro, model="random:llama-tiny", max_rows=rows, capture="none")
    kind, sizes = architectures.settings("llama-tiny", int(sequences.max()), sequences.shape[1])
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = actor_forward(model, sequences, action, mask)
    found = tensor(cell, "forward_data", "log_probs")
    width = sequences.shape[1]
    padded = np.zeros((rows, width), dtype=np.float32)
    if found.shape != padded.shape:
        # A flat row holds the same tokens end to end.
        padded[mask.bool().numpy()] = found[0]
    else:
        padded = found
    count = action.shape[1]
    actions = padded[:, width - 1 - count : width - 1] * action.numpy()
    np.testing.assert_allclose(actions, expected.numpy(), atol=1e-5, rtol=0)
