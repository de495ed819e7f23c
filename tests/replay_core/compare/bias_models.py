"""A small attention whose keys' bias no rotation follows, and steps of AdamW of it that are recorded or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from replay_core.recorder import Recorder

WIDTH, WORDS, LENGTH, RATE = 32, 64, 12, 2e-3


class Transposed(nn.Module):
    """A projection whose weight is [in, out], and whose bias begins at 0: GPT-2's."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD @ self.weight + self.bias


class Attention(nn.Module):
    """Without rotation, as GPT-2's: softmax does not see what is added to every key."""

    def __init__(self, *, is_fused: bool = False, is_transposed: bool = False) -> None:
        super().__init__()
        if is_fused:
            self.c_attn = Transposed(WIDTH, 3 * WIDTH) if is_transposed else nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BTD: Tensor) -> Tensor:
        every = (
            self.c_attn(x_BTD).chunk(3, -1) if hasattr(self, "c_attn")
            else [made(x_BTD) for made in (self.q_proj, self.k_proj, self.v_proj)]
        )  # fmt: skip
        q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in every)
        scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -1e9)
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, *, is_fused: bool = False, is_transposed: bool = False) -> None:
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.self_attn, self.lm_head = (
            Attention(is_fused=is_fused, is_transposed=is_transposed),
            nn.Linear(WIDTH, WORDS, bias=False),
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        return self.lm_head(x + self.self_attn(self.norm(x)))


def trained(
    folder: Path, *, steps: int, is_recorded: Callable[[int], bool], halves: bool,
    after_step: Callable[[int, dict[str, nn.Parameter]], None] = lambda _step, _own: None,
    frozen: str = "", is_fused: bool = False, are_before: bool = False, is_transposed: bool = False,
) -> Path:  # fmt: skip
    """Steps of AdamW; halves: each gradient is the mean of those of two halves of the batch. after_step: what else
    happens to the parameters, before the first step (-1) and after each; frozen: the one that no step moves. is_fused:
    queries, keys and values in one, their weight [in, out] where is_transposed. are_before: the parameters are recorded
    as their step begins.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model(is_fused=is_fused, is_transposed=is_transposed)
        batches = torch.randint(1, WORDS, (steps, 4, LENGTH))
    own = dict(model.named_parameters())
    made = torch.optim.AdamW([one for name, one in own.items() if name != frozen], lr=RATE, weight_decay=0.0)
    after_step(-1, own)
    with Recorder(folder) as recorder:
        for number, ids in enumerate(batches):
            model.zero_grad()
            for rows in ids.split(2) if halves else [ids]:
                loss = nn.functional.cross_entropy(model(rows)[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
                (loss * 100 * len(rows) / 4).backward()
            if is_recorded(number):
                with recorder.step(number) as step:
                    with step.modules(model), torch.no_grad():
                        model(ids)
                    step.gradients(model)
                    if are_before:
                        step.params(model)
                    made.step()
                    after_step(number, own)
                    if not are_before:
                        step.params(model)
            else:
                made.step()
                after_step(number, own)
    return folder
