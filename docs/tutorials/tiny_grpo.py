"""Three steps of GRPO on a model of two layers, recorded: sampled, or on what an earlier run sampled.

python tiny_grpo.py DUMP             samples, trains, records
python tiny_grpo.py DUMP FROM        trains on the rollouts recorded in FROM; nothing is sampled
"""

from __future__ import annotations

import os
import sys

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from replay_core.recorder import Recorder
from replay_core.rollouts import RolloutReplay

PROMPT, LENGTH = 4, 12


def sampled(model: Qwen2ForCausalLM) -> dict[str, torch.Tensor]:
    """Two groups of four answers; the reward is the share of tokens below 16."""
    ids_BT = torch.randint(8, 64, (2, PROMPT)).repeat_interleave(4, dim=0)
    with torch.no_grad():
        while ids_BT.shape[1] < LENGTH:
            next_BV = model(ids_BT).logits[:, -1].softmax(-1)
            ids_BT = torch.cat([ids_BT, torch.multinomial(next_BV, 1)], dim=1)
    response_BT = torch.zeros_like(ids_BT)
    response_BT[:, PROMPT:] = 1
    rewards_B = (ids_BT[:, PROMPT:] < 16).float().mean(1)
    return {"input_ids": ids_BT, "response_mask": response_BT, "rewards": rewards_B}


def main(directory: str, recorded: str | None) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=64, num_key_value_heads=2, max_position_embeddings=64, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    replay = RolloutReplay(recorded) if recorded else None
    # SCALE stands for a change to the loss that one wants to see the effect of.
    scale = float(os.environ.get("SCALE", "1"))
    with Recorder(directory) as recorder:
        for step in range(3):
            batch = sampled(model) if replay is None else replay.batch(step)
            ids_BT, mask_BT, rewards_B = batch["input_ids"], batch["response_mask"][:, 1:], batch["rewards"]
            groups_GN = rewards_B.view(2, 4)
            spread_G1 = groups_GN.std(1, keepdim=True) + 1e-6
            advantages_B = ((groups_GN - groups_GN.mean(1, keepdim=True)) / spread_G1).view(-1)
            logprobs_BT = model(ids_BT).logits[:, :-1].log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[..., 0]
            loss = -scale * (logprobs_BT * advantages_BT(advantages_B, mask_BT)).sum() / mask_BT.sum()
            with recorder.step(step) as record:
                record("trajectory", input_ids=ids_BT, response_mask=batch["response_mask"], rewards=rewards_B)
                record("forward_data", log_probs=logprobs_BT.detach(), advantages=advantages_BT(advantages_B, mask_BT))
                record("loss", loss=loss.detach())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def advantages_BT(advantages_B: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Each answer's advantage at each of its tokens."""
    return advantages_B[:, None] * mask_BT


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
