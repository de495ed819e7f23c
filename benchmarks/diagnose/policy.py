"""A tiny causal policy, its critic, and how it writes and scores. Shares nothing with the demo or the diagnosis."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

PAD, BOS, END, TOOL = 0, 1, 2, 3
DIGITS = range(4, 14)
VOCABULARY = 24
WIDTH, HEADS, LONGEST = 32, 2, 48


class Block(nn.Module):
    """Attention, then a feed-forward: dense, or the better two of four experts."""

    def __init__(self, experts: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, experts) if experts else None
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(experts or 1))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(experts or 1))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BSD: Tensor, bias_BSS: Tensor) -> Tensor:
        rows, size, _ = x_BSD.shape
        q, k, v = self.qkv(self.norm1(x_BSD)).view(rows, size, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias_BSS[:, None])
        x_BSD = x_BSD + self.dropout(self.out(seen.transpose(1, 2).reshape(rows, size, WIDTH)))
        h = self.norm2(x_BSD)
        each = torch.stack([down(functional.gelu(up(h))) for up, down in zip(self.up, self.down, strict=True)], -1)
        if self.router is None:
            return x_BSD + self.dropout(each[..., 0])
        gates = self.router(h).softmax(-1)
        kept = torch.zeros_like(gates).scatter(-1, gates.topk(2, -1).indices, 1.0) * gates
        return x_BSD + self.dropout((each * (kept / kept.sum(-1, keepdim=True))[..., None, :]).sum(-1))


class TinyPolicy(nn.Module):
    """Two blocks over learned positions. `head` makes logits; a critic's is one number."""

    def __init__(self, seed: int, *, experts: int = 0, dropout: float = 0.0, out: int = VOCABULARY) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
            self.blocks = nn.ModuleList(Block(experts, dropout) for _ in range(2))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, out)

    def forward(
        self, ids_BS: Tensor, held_BS: Tensor, *, positions_BS: Tensor | None = None, packs_BS: Tensor | None = None
    ) -> Tensor:
        if positions_BS is None:
            positions_BS = (held_BS.cumsum(-1) - 1).clip(0)
        size = ids_BS.shape[1]
        open_BSS = torch.ones(size, size).tril().bool()[None] & (held_BS[:, None, :] != 0)
        if packs_BS is not None:
            open_BSS = open_BSS & (packs_BS[:, :, None] == packs_BS[:, None, :])
        open_BSS = open_BSS | torch.eye(size).bool()
        bias = torch.zeros(open_BSS.shape).masked_fill(~open_BSS, -1e9).to(self.head.weight.dtype)
        x = self.tokens(ids_BS) + self.places(positions_BS.clip(max=LONGEST - 1))
        for block in self.blocks:
            x = block(x, bias)
        out: Tensor = self.head(self.norm(x))
        return out


@dataclass
class Written:
    """A sampled batch [B, S] of S = prompt columns + response columns, and the sampler's log-probabilities [B, R]."""

    ids_BS: Tensor
    held_BS: Tensor
    prompt_width: int
    logprobs_BR: Tensor
    ended_B: Tensor

    @property
    def response_BR(self) -> Tensor:
        return self.held_BS[:, self.prompt_width :]


def rounded(policy: TinyPolicy, dtype: torch.dtype) -> TinyPolicy:
    """The engine's copy: the same weights, rounded to its precision. It computes in float32, which is faster here."""
    return copy.deepcopy(policy).to(dtype).float().eval()


@torch.no_grad()
def write(
    engine: TinyPolicy, prompts: list[list[int]], limit: int, draw: torch.Generator, *, temperature: float = 1.0,
    top_p: float = 1.0, top_k: int = 0, raw: bool = False, ends: bool = True, tool_at: int | None = None,
) -> Written:  # fmt: skip
    """One response per prompt; `raw` returns log-probabilities before temperature, top-p and top-k. From `tool_at` on
    two tokens are a tool's, given and not sampled: their log-probability is 0.
    """
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width + limit), PAD)
    held, logprobs = torch.zeros_like(ids), torch.zeros(len(prompts), limit)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) : width] = torch.tensor(prompt)
        held[row, width - len(prompt) : width] = 1
    writing = torch.ones(len(prompts), dtype=torch.bool)
    for at in range(width, width + limit):
        logits = engine(ids[:, :at], held[:, :at])[:, -1].float()
        plain = logits.log_softmax(-1)
        used = (logits / temperature).log_softmax(-1)
        if top_k:
            used = used.masked_fill(used < used.topk(top_k).values[:, -1:], -torch.inf).log_softmax(-1)
        if top_p < 1:
            order = used.sort(-1, descending=True)
            gone = (order.values.exp().cumsum(-1) - order.values.exp()) > top_p
            used = used.masked_fill(gone.gather(-1, order.indices.argsort(-1)), -torch.inf).log_softmax(-1)
        token = torch.multinomial(used.exp(), 1, generator=draw)[:, 0]
        said = (plain if raw else used).gather(-1, token[:, None])[:, 0]
        if tool_at is not None and tool_at <= at - width < tool_at + 2:
            token, said = torch.full_like(token, TOOL), torch.zeros_like(said)
        ids[:, at] = torch.where(writing, token, PAD)
        held[:, at] = writing.long()
        logprobs[:, at - width] = torch.where(writing, said, 0.0)
        if ends:
            writing = writing & (token != END)
        if not writing.any():
            break
    return Written(ids, held, width, logprobs, ~writing)


def token_logprobs(logits_BSV: Tensor, ids_BS: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of every next token and entropy, both [B, S-1]."""
    every = (logits_BSV[:, :-1].float() / temperature).log_softmax(-1)
    return every.gather(-1, ids_BS[:, 1:, None])[..., 0], -(every.exp() * every).sum(-1)
