"""What two settings have in common to be compared, tensor by tensor."""

import numpy as np
import torch
import transformers as hf

from replay_core.replay.batch import MicroBatch
from replay_core.replay.bench import ReplayBench
from replay_core.replay.flags import Flags
from replay_core.replay.interventions import first_apart
from replay_core.replay.model import LoadedModel
from replay_core.replay.plan import ReplayPlan

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.2,
}  # fmt: skip


def test_scores_of_keys_are_no_vectors_of_tokens():
    """A sparse attention chooses its keys by scores, a number per token of the forward, that a module puts out."""
    torch.manual_seed(3)
    model = LoadedModel(hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)).double().eval(), "made here")
    attention = model.backbone.layers[0].self_attn
    attention.scorer = torch.nn.Identity()

    def scored(module, args, kwargs):
        hidden_BSD = kwargs["hidden_states"]
        module.scorer(hidden_BSD @ hidden_BSD.transpose(-1, -2))

    attention.register_forward_pre_hook(scored, with_kwargs=True)
    ids = np.random.default_rng(2).integers(4, 60, (2, 9))
    batch = MicroBatch(ids, np.arange(9) < np.array([[6], [9]]))
    flags = Flags.parse("dtype=float32 attention=eager")
    plan = ReplayPlan(dump="", out="", step=0, rank=0, micro=0, model="made here", flags=flags)
    bench = ReplayBench(plan, model, 1.0)
    together = bench.observer(flags, batch)
    cell = together.trace()
    own = bench.observer(Flags.parse("dtype=float32 attention=eager rows_per_forward=1"), batch).trace()
    assert first_apart(together, own, cell, 1e-6) is None
    assert not any("scorer" in name for name in cell.laid), "what a token may not see is among them"
    assert "layers.0.self_attn.output.0" in cell.laid
