"""The demo's policy: a two-layer Qwen2 of 76,000 weights, how it samples and how it scores.

Batches look as OpenRLHF's: prompts padded on the left, responses on the right, positions counted over
the attention mask. Token log-probabilities are [B, S-1]: index t is about token t + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from msgspec import Struct
from transformers import Qwen2Config, Qwen2ForCausalLM

from replay_core.demo.task import END, LONGEST_RESPONSE, PAD, VOCABULARY

#: Qwen2's own 0.02 leaves the attention of so small a model almost flat: it would learn ten times slower.
INITIALIZER_RANGE = 0.15


def build_policy(seed: int) -> Any:
    """A policy that has learnt nothing. Leaves torch's own random state as it was."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=INITIALIZER_RANGE,
        attention_dropout=0.0,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        eos_token_id=END,
        bos_token_id=None,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).eval()


class Rollout(Struct, frozen=True):
    """A sampled batch. Masks are int64 [B, S]; `logprobs_BT` [B, S-1] are the sampler's own, 0 outside responses."""

    input_ids_BS: torch.Tensor
    attention_mask_BS: torch.Tensor
    response_mask_BS: torch.Tensor
    logprobs_BT: torch.Tensor

    def response(self, row: int) -> list[int]:
        """The tokens the policy wrote in a row."""
        tokens: list[int] = self.input_ids_BS[row][self.response_mask_BS[row] == 1].tolist()
        return tokens


def sample(
    policy: Any, prompts: Sequence[Sequence[int]], generator: torch.Generator, *, temperature: float = 1.0
) -> Rollout:
    """One response per prompt. Every batch is as wide as the longest response allowed."""
    width = max(map(len, prompts))
    ids_BS = torch.full((len(prompts), width + LONGEST_RESPONSE), PAD)
    mask_BS = torch.zeros_like(ids_BS)
    logprobs_BS = torch.zeros(ids_BS.shape)
    for row, prompt in enumerate(prompts):
        ids_BS[row, width - len(prompt) : width] = torch.tensor(prompt)
        mask_BS[row, width - len(prompt) : width] = 1
    writing_B = torch.ones(len(prompts), dtype=torch.bool)
    for place in range(width, width + LONGEST_RESPONSE):
        with torch.no_grad():
            logits_BV = _logits(policy, ids_BS[:, :place], mask_BS[:, :place])[:, -1]
        logprobs_BV = (logits_BV / temperature).log_softmax(-1)
        next_B = torch.multinomial(logprobs_BV.exp(), 1, generator=generator)[:, 0]
        ids_BS[:, place] = torch.where(writing_B, next_B, PAD)
        mask_BS[:, place] = writing_B.long()
        logprobs_BS[:, place] = torch.where(writing_B, logprobs_BV.gather(1, next_B[:, None])[:, 0], 0.0)
        writing_B &= next_B != END
    response_BS = mask_BS.clone()
    response_BS[:, :width] = 0
    return Rollout(ids_BS, mask_BS, response_BS, logprobs_BS[:, 1:])


def score(
    policy: Any, input_ids_BS: torch.Tensor, attention_mask_BS: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of every next token and entropy of its distribution, both [B, S-1]. Differentiable."""
    logprobs_BTV = _logits(policy, input_ids_BS, attention_mask_BS)[:, :-1].log_softmax(-1)
    logprobs_BT = logprobs_BTV.gather(-1, input_ids_BS[:, 1:, None])[..., 0]
    return logprobs_BT, -(logprobs_BTV.exp() * logprobs_BTV).sum(-1)


def score_packed(
    policy: Any, input_ids_BS: torch.Tensor, attention_mask_BS: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `score`, with `rows` samples end to end in one row, and nothing that keeps attention inside a sample.

    What a trainer does that packs without flash attention and forgets the block mask: later samples see earlier ones.
    """
    logprobs_BT = torch.zeros(input_ids_BS.shape[0], input_ids_BS.shape[1] - 1)
    entropy_BT = torch.zeros_like(logprobs_BT)
    for first in range(0, len(input_ids_BS), rows):
        held_PS = attention_mask_BS[first : first + rows] == 1
        packed_1T = input_ids_BS[first : first + rows][held_PS][None]
        ones_1T = torch.ones_like(packed_1T)
        lengths = held_PS.sum(1).tolist()
        positions_1T = torch.cat([torch.arange(length) for length in lengths])[None]
        logits_1TV = policy(
            input_ids=packed_1T, attention_mask=ones_1T, position_ids=positions_1T, use_cache=False
        ).logits.float()
        logprobs_TV = logits_1TV[0].log_softmax(-1)
        start = 0
        for row, length in enumerate(lengths, first):
            own_TV = logprobs_TV[start : start + length - 1]
            slots = attention_mask_BS[row].nonzero()[1:, 0] - 1
            targets_T = packed_1T[0, start + 1 : start + length]
            # In place into a zeroed tensor: the values keep their graph.
            logprobs_BT[row, slots] = own_TV.gather(-1, targets_T[:, None])[:, 0]
            entropy_BT[row, slots] = -(own_TV.exp() * own_TV).sum(-1)
            start += length
    return logprobs_BT, entropy_BT


def _logits(policy: Any, input_ids_BS: torch.Tensor, attention_mask_BS: torch.Tensor) -> torch.Tensor:
    # As OpenRLHF's Actor: padding gets position 1.
    position_ids_BS = (attention_mask_BS.cumsum(-1) - 1).masked_fill(attention_mask_BS == 0, 1)
    logits_BSV: torch.Tensor = policy(
        input_ids=input_ids_BS, attention_mask=attention_mask_BS, position_ids=position_ids_BS, use_cache=False
    ).logits
    return logits_BSV.float()
