"""A trainer of its own whose engine and trainer, or judge, part from some step on: really sampled, really trained,
recorded by the recorder; one line of it wrong where a test says so, from the first step on or from a later one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.diagnose.policy import BOS, DIGITS, END, PAD, TOOL, VOCABULARY, TinyPolicy, write
from benchmarks.diagnose.trainer import warm_start
from replay_core.recorder import Recorder

NEMO_RL = {"response_mask": "token_mask", "log_probs": "curr_logprobs", "old_log_probs": "prev_logprobs",
           "rollout_log_probs": "generation_logprobs"}  # fmt: skip


def routes(model: TinyPolicy, ids: Tensor, held: Tensor) -> Tensor:
    """The two experts of every token and layer [B, S, layers, 2]."""
    seen: list[Tensor] = []
    hooks = [block.router.register_forward_hook(lambda _m, _i, out: seen.append(out.topk(2, -1).indices))  # type: ignore[union-attr]
             for block in model.blocks]  # fmt: skip
    model(ids, held)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 2)


@contextmanager
def replayed(model: TinyPolicy, experts: Tensor) -> Iterator[None]:
    """Has every token go to these experts [B, S, layers, 2], with the router's own weights of them."""

    def only(layer: int) -> Any:
        def keep(_module: Any, _inputs: Any, out: Tensor) -> Tensor:
            told = torch.zeros_like(out, dtype=torch.bool).scatter(-1, experts[:, :, layer], True)
            return out.masked_fill(~told, -1e9)

        return keep

    hooks = [
        block.router.register_forward_hook(only(layer))  # type: ignore[union-attr]
        for layer, block in enumerate(model.blocks)
    ]
    yield
    for hook in hooks:
        hook.remove()


def windowed(model: TinyPolicy, size: int) -> TinyPolicy:
    """Its attention looks back over so many tokens and no further."""

    def narrow(_module: Any, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, bias = inputs
        near = torch.ones(bias.shape[-2:]).tril().triu(1 - size).bool()
        return x, bias.masked_fill(~near, -1e9)

    for block in model.blocks:
        block.register_forward_pre_hook(narrow)
    return model


def run(
    folder: Path, fault: str = "", *, since: int = 0, steps: int = 6, seed: int = 0, temperature: float = 1.0,
    lr: float = 1e-3, experts: int = 0, nemo: bool = False, names: bool = False, stated: bool = True,
    lag: int = 0, prompts: int = 6, size: int = 4, digits: int = 4, replay: bool = False,
) -> Path:  # fmt: skip
    """Train and record. `names`: reward functions stand apart; `lag`: updates that the engine is behind; `replay`: the
    trainer routes tokens as the engine did.
    """
    start = warm_start(seed, experts, 200)
    policy = copy.deepcopy(start)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr)
    draw = torch.Generator().manual_seed(seed + 50)
    flags: dict[str, Any] = {"dtype": "float32", "packing": False}
    if stated:
        flags |= {"temperature": temperature, "loss": {"kind": "grpo"}}
    recorder = Recorder(folder, flags=flags)
    past: list[TinyPolicy] = []
    for step in range(steps):

        def is_on(name: str, step: int = step) -> bool:
            return fault == name and step >= since

        past.append(copy.deepcopy(policy))
        engine = copy.deepcopy(past[max(0, len(past) - 1 - lag)]).to(torch.bfloat16).float()
        if is_on("engine-quantised"):
            for weight in engine.parameters():
                scale = weight.data.abs().max() / 11
                weight.data = (weight.data / scale).round() * scale
        if is_on("engine-stops"):
            engine = copy.deepcopy(past[max(0, since - 1)])
        if is_on("experts-reordered"):
            for block in engine.blocks:
                block.router.weight.data = block.router.weight.data.roll(1, 0)  # type: ignore[union-attr,operator]
                block.router.bias.data = block.router.bias.data.roll(1, 0)  # type: ignore[union-attr,operator]
        if is_on("window"):
            engine = windowed(engine, 6)
        asked = []
        for _ in range(prompts):
            many = int(torch.randint(2, digits + 1, (1,), generator=draw))
            asked += [[BOS, *(torch.randint(DIGITS.start, DIGITS.stop, (many,), generator=draw).tolist())]] * size
        tool = 2 if fault in ("tools-counted", "rows-rolled", "tools") else None
        with torch.no_grad():
            said = write(engine, asked, 10, draw, temperature=temperature, raw=is_on("raw-logprobs"), tool_at=tool)
        ids, held, width = said.ids_BS.clone(), said.held_BS.clone(), said.prompt_width
        mask, rollout = said.response_BR.clone(), said.logprobs_BR.clone()
        if fault == "tools-counted":  # what the environment wrote counts
            mask = held[:, width:].clone()
        elif tool is not None:
            mask = mask * (ids[:, width:] != TOOL)
        if fault == "rows-rolled":
            rollout = rollout.roll(1, 0) * held[:, width:]
        rows = len(ids)
        exact, form = torch.zeros(rows), torch.zeros(rows)
        for row in range(rows):
            answer = ids[row, width:][held[row, width:] == 1].tolist()
            exact[row] = sum(a == b for a, b in zip(answer, asked[row][1:], strict=False)) / len(asked[row][1:])
            form[row] = 0.25 * (answer[-1:] == [END])
        rewards = exact + form * (2 if is_on("form-twice") else 1)
        if is_on("judge-dies"):
            rewards = torch.zeros(rows)
        if is_on("rewards-permuted"):
            rewards = rewards[torch.randperm(rows, generator=torch.Generator().manual_seed(step))]
        finish = ["stop" if ended else "length" for ended in said.ended_B.tolist()]
        if is_on("end-stripped"):
            ends = ids[:, width:] == END
            ids[:, width:][ends], held[:, width:][ends], mask[ends], rollout[ends] = PAD, 0, 0, 0.0
        if is_on("retokenised"):
            for row in range(0, rows, 2):
                for at in range(width, min(width + 3, ids.shape[1])):
                    if int(ids[row, at]) in DIGITS:
                        ids[row, at] = (int(ids[row, at]) - DIGITS.start + 5) % len(DIGITS) + DIGITS.start
        if is_on("bos-doubled"):
            first = held.argmax(1)
            ids, held = torch.nn.functional.pad(ids, (1, 0)), torch.nn.functional.pad(held, (1, 0))
            ids[torch.arange(rows), first], held[torch.arange(rows), first] = BOS, 1
            width += 1
        # ---- the trainer's own forward, about the response's tokens
        divide = temperature * (temperature if is_on("divided-twice") else 1.0)
        policy.train()
        if replay:
            experts_there = routes(engine, ids, held)
            taken = {"token": experts_there.roll(1, 1), "row": experts_there.roll(1, 0)}
            with replayed(policy, taken.get(fault.removeprefix("replayed-by-"), experts_there)):
                logits = policy(ids, held) / divide
        else:
            logits = policy(ids, held) / divide
        at = logits[:, 1:] if is_on("gathered-late") else logits[:, :-1]
        table = at.log_softmax(-1)
        new = table.gather(-1, ids[:, 1:, None])[..., 0][:, width - 1 :]
        entropy = -(table.exp() * table).sum(-1)[:, width - 1 :].detach()
        each = rewards.view(prompts, size)
        advantage = ((each - each.mean(1, keepdim=True)) / (each.std(1, keepdim=True) + 1e-4)).reshape(-1)
        m = mask.float()
        ratio = (new - new.detach()).exp()
        loss = -(ratio * advantage[:, None] * m).sum() / m.sum()
        fields: dict[str, Any] = {
            "input_ids": ids, "attention_mask": held, "response_mask": mask, "rewards": rewards,
            "group_id": torch.arange(rows) // size, "finish_reason": finish, "rollout_log_probs": rollout,
        }  # fmt: skip
        if names:
            fields["rewards_per_func"] = {"exact_reward": exact, "form_reward": form}
        if experts:
            fields["routed_experts"] = routes(engine, ids, held)
        micro: dict[str, Any] = {
            "input_ids": ids, "attention_mask": held, "response_mask": mask, "log_probs": new.detach(),
            "old_log_probs": new.detach(), "entropy": entropy, "advantages": advantage[:, None] * m,
        }  # fmt: skip
        if experts and not replay:
            micro["routed_experts"] = routes(policy, ids, held)
        with recorder.step(step, rank=0) as record:
            for stage, held_there, where in (("trajectory", fields, {}), ("forward_data", micro, {"micro": 0})):
                call = {NEMO_RL.get(name, name) if nemo else name: value for name, value in held_there.items()}
                shape = mask.shape
                sides = {name: "response" for name, value in call.items() if getattr(value, "shape", None) == shape}
                record(stage, call, alignment=sides, **where)  # type: ignore[arg-type]
            record("loss", pg_loss=loss.detach(), micro=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    recorder.close()
    assert ids.max() < VOCABULARY
    return folder
