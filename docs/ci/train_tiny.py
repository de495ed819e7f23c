"""Two steps of policy gradient on a model of two layers, recorded: what a pipeline can afford on every change.

    python train_tiny.py DUMP

Put your own model, loss and attention in its place; the seed and one thread make two runs bitwise the same.
"""

from __future__ import annotations

import os
import sys

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from replay_core.recorder import Recorder


def main(directory: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(
        vocab_size=64, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, **sizes
    )
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # TEMPERATURE stands for whatever a change may do to the numbers.
    temperature = float(os.environ.get("TEMPERATURE", "1.0"))

    recorder = Recorder(
        directory, flags={"attention": "sdpa", "packing": False, "dtype": "float32", "temperature": 1.0}
    )
    for step in range(2):
        recorder.checkpoint(step, model)
        ids_BT = torch.randint(2, 64, (4, 12))
        ids_BT[:, -1] = config.eos_token_id
        mask_BT = torch.ones_like(ids_BT)
        response_BT = torch.zeros_like(ids_BT)
        response_BT[:, 6:] = 1
        rewards_B = torch.randn(4)
        logits_BTV = model(ids_BT, attention_mask=mask_BT).logits / temperature
        logprobs_BT = logits_BTV[:, :-1].log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[..., 0]
        logprobs_BT = torch.nn.functional.pad(logprobs_BT, (0, 1))  # of the token that comes next
        advantages_BT = ((rewards_B - rewards_B.mean()) / rewards_B.std())[:, None] * response_BT
        loss = -(logprobs_BT.roll(1, dims=1) * advantages_BT).sum() / response_BT.sum()
        with recorder.step(step, rank=0) as record:
            record(
                "forward_data", micro=0, input_ids=ids_BT, attention_mask=mask_BT, response_mask=response_BT,
                log_probs=logprobs_BT.detach(), advantages=advantages_BT,
            )  # fmt: skip
            record("loss", micro=0, loss=loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    recorder.close()


if __name__ == "__main__":
    main(sys.argv[1])
