"""Planted mismatches: a trained tiny policy, a sampler that shares no code with rldbg, one fault at a time.

    python -m benchmarks.mismatch                 the half that was looked at while the candidates were written
    python -m benchmarks.mismatch --aside         the half that was kept aside
    python -m benchmarks.mismatch --only NAME ... --arch qwen2|moe

The engine writes token by token with a cache, left-padded, in eager attention; the trainer scores the finished samples
in one right-padded batch through sdpa. Each plant must be named (family and side) with 90 % explained; the healthy ones
must name nothing, at most 2 x the floor; another dtype is no cause, but must be told.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCABULARY, END, PAD, SAMPLES, LIMIT = 96, 2, 0, 32, 40


@dataclass(frozen=True)
class Plant:
    """A fault: what differs on either side, the family and side that must be named, words that the cause must hold,
    and the half it is in."""

    name: str
    family: tuple[str, ...]
    engine: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    side: str = "engine"
    archs: tuple[str, ...] = ("qwen2", "moe")
    aside: bool = False
    says: tuple[str, ...] = ()


def plants() -> list[Plant]:
    """Every cause at two strengths, two at once, and none; one strength of each is kept aside."""
    found = [
        Plant("healthy bf16", (), {"dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        Plant("healthy fp32", (), {}, {}, aside=True),
        Plant("healthy fp16", (), {"dtype": "float16"}, {"dtype": "float16"}, aside=True),
        Plant("healthy bf16 at temperature .7 on both sides", (), {"dtype": "bfloat16", "temperature": 0.7},
              {"dtype": "bfloat16", "temperature": 0.7}),
        Plant("bf16 engine", ("precision",), {"dtype": "bfloat16"}),
        Plant("fp16 engine", ("precision",), {"dtype": "float16"}, aside=True),
        Plant("shift +1", ("shift",), {"shift": 1}),
        Plant("shift -1", ("shift",), {"shift": -1}, aside=True),
        Plant("routed otherwise 10 %", ("routing",), {"reroute": 0.5}, archs=("moe",)),
        Plant("routed otherwise more", ("routing",), {"reroute": 2.0}, archs=("moe",), aside=True),
        Plant("older by 1 and temperature 0.8", ("several",), {"step": 2, "temperature": 0.8}),
        Plant("int8 and temperature 1.2", ("several",), {"grid": "int8 tensor", "temperature": 1.2}, aside=True),
        Plant("older by 2, bf16 both", ("weights",), {"step": 1, "dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        Plant("temperature 0.9, bf16 both", ("temperature",), {"temperature": 0.9, "dtype": "bfloat16"},
              {"dtype": "bfloat16"}, aside=True),
    ]  # fmt: skip
    for one, (a, b) in {
        "temperature": (0.7, 1.15), "top_p": (0.8, 0.95), "top_k": (5, 20), "min_p": (0.1, 0.02),
    }.items():  # fmt: skip
        family = "temperature" if one == "temperature" else "truncation"
        found += [Plant(f"{one} {a:g}", (family,), {one: a}), Plant(f"{one} {b:g}", (family,), {one: b}, aside=True)]
    found += [
        Plant("older by 1", ("weights",), {"step": 2}),
        Plant("older by 3", ("weights",), {"step": 0}, aside=True),
        Plant("newer by 1", ("weights",), {"step": 4}, aside=True),
        Plant("trainer older by 1", ("weights",), {}, {"step": 2}, side="trainer"),
        Plant("stale prefix", ("versions",), {"prefix": 1}),
        Plant("stale prefix, one step", ("versions",), {"prefix": 2}, aside=True),
        Plant("adapter off", ("adapter",), {"adapter": 0.0}),
        Plant("adapter twice", ("adapter",), {"adapter": 2.0}, aside=True),
        Plant("int8 rows", ("quantised",), {"grid": "int8 row"}),
        Plant("fp8 tensor", ("quantised",), {"grid": "fp8 tensor"}, aside=True),
        Plant("fp8 rows", ("quantised",), {"grid": "fp8 row"}),
        Plant("padding seen by the engine", ("positions",), {"sees_padding": True}),
        Plant("padding seen by the trainer", ("positions",), {}, {"sees_padding": True}, side="trainer", aside=True),
        Plant("positions anew", ("positions",), {}, {"anew": True}, side="trainer"),
        Plant("first token twice", ("positions",), {"twice": True}),
        Plant("prompt unseen", ("positions",), {}, {"cut": True}, side="trainer", aside=True),
        Plant("head in float32", ("precision",), {"dtype": "bfloat16", "head": True}, {"dtype": "bfloat16"}),
        Plant("trainer divides by 0.6", ("temperature",), {}, {"temperature": 0.6}, side="trainer", aside=True),
    ]  # fmt: skip
    return found + several()


def several() -> list[Plant]:
    """Two and three causes at once: each of them must be said, and nothing beside."""
    warm, old = ("temperature 0.9 (", {"temperature": 0.9}), ("weights of step 2", {"step": 2})
    cold, cut_p = ("temperature 1.2 (", {"temperature": 1.2}), ("top-p 0.9,", {"top_p": 0.9})
    cut_k, int8 = ("top-k 20,", {"top_k": 20}), ("int8 per row", {"grid": "int8 row"})
    fp8, late = ("fp8 per tensor", {"grid": "fp8 tensor"}), ("1 token late", {"shift": 1})
    padded, plain = ("left padding is attended", {"sees_padding": True}), ("without the adapter", {"adapter": 0.0})
    half, oldest = ("", {"dtype": "bfloat16"}), ("weights of step 0", {"step": 0})
    found = []
    for number, one in enumerate([
        (old, warm), (old, cut_p), (int8, cold), (int8, old), (fp8, cut_k), (plain, warm), (padded, cold),
        (padded, old),
        (late, cold), (warm, cut_p), (cold, cut_k), (warm, half), (oldest, half), (int8, warm, half),
        (old, warm, cut_p), (int8, cold, cut_k), (old, int8, cold),
    ]):  # fmt: skip
        words = tuple(word for word, _ in one if word)
        given = {name: value for _, each in one for name, value in each.items()}
        family = (
            "adapter"
            if plain in one
            else ("several" if len(words) > 1 else "weights" if oldest in one else "temperature")
        )
        found.append(Plant("joint: " + " + ".join(word.strip(" (,") or "bfloat16" for word, _ in one),
                           (family, "several", "truncation"), given, says=words, aside=number % 2 == 1))  # fmt: skip
    trainer = {"trainer older": ({"step": 2}, "weights of step 2"), "trainer anew": ({"anew": True}, "begin")}
    for name, (given, word) in trainer.items():
        found.append(Plant(f"joint: {name} + engine 0.8", ("several",), {"temperature": 0.8}, given, "both",
                           aside=name == "trainer anew", says=(word, "temperature 0.8 (")))  # fmt: skip
    return found


# ---- the policy


def policy(arch: str, seed: int = 0) -> Any:
    """A tiny policy that has learnt a Markov chain: some tokens sure, some not."""
    import transformers

    common = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 256, "pad_token_id": PAD,
        "eos_token_id": END, "bos_token_id": 1,
    }  # fmt: skip
    torch.manual_seed(seed)
    if arch == "moe":
        config = transformers.Qwen3MoeConfig(**common, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48,
                                             head_dim=16, norm_topk_prob=True)  # fmt: skip
    else:
        config = transformers.Qwen2Config(**common)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def chain(seed: int = 1) -> Tensor:
    """Transition probabilities [V, V]: a few likely successors each."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(VOCABULARY, VOCABULARY, generator=draw) * 2.5
    logits[:, [PAD, 1]] = -30
    logits[:, END] -= 2
    return logits.softmax(-1)


def trained(arch: str, folder: Path) -> Path:
    """Five checkpoints, steps 0 to 4: a policy after 150 updates, and after each of four more."""
    if (folder / "step_4" / "config.json").is_file():
        return folder
    model, odds, draw = policy(arch), chain(), torch.Generator().manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for update in range(154):
        ids = torch.randint(3, VOCABULARY, (16, 1), generator=draw)
        for _ in range(47):
            ids = torch.cat([ids, torch.multinomial(odds[ids[:, -1]], 1, generator=draw)], 1)
        if update >= 150:
            for group in optimizer.param_groups:
                group["lr"] = 3e-4
            model.save_pretrained(folder / f"step_{update - 150}")
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "step_4")
    return folder


def adapted(arch: str, folder: Path) -> Path:
    """A LoRA adapter in PEFT's files beside step 3, of the size a short training leaves."""
    import json

    from safetensors.torch import save_file

    place = folder / "adapter"
    if not (place / "adapter_config.json").is_file():
        place.mkdir(exist_ok=True)
        draw, weights = torch.Generator().manual_seed(5), {}
        for layer in range(3):
            for name, rows in (("q_proj", 64), ("v_proj", 32)):
                prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_"
                weights[f"{prefix}A.weight"] = torch.randn(4, 64, generator=draw) * 0.1
                weights[f"{prefix}B.weight"] = torch.randn(rows, 4, generator=draw) * 0.1
        save_file(weights, place / "adapter_model.safetensors")
        (place / "adapter_config.json").write_text(json.dumps({
            "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none",
            "base_model_name_or_path": str(folder / "step_3"),
        }))  # fmt: skip
    return place


def loaded(folder: Path, given: dict[str, Any], attention: str, scale: float | None) -> Any:
    """The model of a side: its checkpoint, an adapter merged into it, its grid, its dtype."""
    import transformers
    from safetensors.torch import load_file

    place = folder / f"step_{given.get('step', 3)}"
    model = transformers.AutoModelForCausalLM.from_pretrained(place, attn_implementation=attention, dtype=torch.float32)
    if scale:
        weights = load_file(folder / "adapter" / "adapter_model.safetensors")
        for name, module in model.named_modules():
            a = weights.get(f"base_model.model.{name}.lora_A.weight")
            if a is not None:
                b = weights[f"base_model.model.{name}.lora_B.weight"]
                module.weight.data += scale * 2.0 * (b @ a)
    if given.get("grid"):
        kind, each = given["grid"].split()
        head = model.get_output_embeddings().weight
        for name, weight in model.named_parameters():
            if weight.ndim < 2 or weight is head or "embed" in name or name.endswith(".gate.weight"):
                continue
            top = weight.data.abs().amax(-1, keepdim=True) if each == "row" else (
                weight.data.abs().amax((-2, -1), keepdim=True))  # fmt: skip
            if kind == "int8":
                weight.data = torch.round(weight.data * 127 / top) * top / 127
            else:
                weight.data = (weight.data / (top / 448)).to(torch.float8_e4m3fn).float() * (top / 448)
    model = model.to(getattr(torch, given.get("dtype", "float32"))).eval()
    if given.get("head"):
        model.lm_head.float().register_forward_pre_hook(lambda _module, args: (args[0].float(),))
    return model


# ---- the engine


def cut(logprobs: Tensor, given: dict[str, Any]) -> Tensor:
    """Log-probabilities of what top-k, top-p, min-p leave, normalised again."""
    p = logprobs.exp()
    keep = torch.ones_like(p, dtype=torch.bool)
    if given.get("top_k"):
        keep &= p >= p.topk(given["top_k"]).values[:, -1:]
    if given.get("top_p"):
        order = p.sort(descending=True)
        gone = order.values.cumsum(-1) - order.values >= given["top_p"]
        keep &= ~torch.zeros_like(keep).scatter(-1, order.indices, gone)
    if given.get("min_p"):
        keep &= p >= given["min_p"] * p.amax(-1, keepdim=True)
    return logprobs.masked_fill(~keep, -torch.inf).log_softmax(-1)


@torch.no_grad()
def written(
    model: Any, given: dict[str, Any], old: Any = None
) -> tuple[list[Tensor], list[int], list[list[float]], Any]:
    """(samples, prompt lengths, log-probabilities of the response tokens, experts or None): left-padded, with a cache.

    old: the model that writes each response's first tokens (`prefix`), before the weights change under it.
    """
    draw = torch.Generator().manual_seed(7)
    sizes = torch.randint(3, 14, (SAMPLES,), generator=draw).tolist()
    prompts = [torch.randint(3, VOCABULARY, (size,), generator=draw) for size in sizes]
    more = int(given.get("twice", False))
    sizes = [size + more for size in sizes]
    prompts = [torch.cat([prompt[:more], prompt]) for prompt in prompts]
    width = max(sizes)
    ids = torch.full((SAMPLES, width), PAD)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
    held = torch.stack([torch.arange(width) >= width - size for size in sizes]).long()
    switch = torch.randint(8, 24, (SAMPLES,), generator=draw) if old is not None else torch.zeros(SAMPLES)
    experts: list[list[Tensor]] = []
    handles = _rerouted(model, given.get("reroute", 0.0), experts) if given.get("reroute") else []
    caches: list[Any] = [None, None]
    alive, said = torch.ones(SAMPLES, dtype=torch.bool), []
    fed, mask = ids, held
    for step in range(LIMIT):
        if given.get("sees_padding"):
            seen, places = torch.ones_like(mask), torch.arange(mask.shape[1]).expand_as(mask)
        else:
            seen, places = mask, (mask.cumsum(-1) - 1).clamp(min=0)
        each = []
        for which, one in enumerate((model, old)):
            if one is not None:
                # transformers 5.24 calls it by another name.
                name = "cache" if "cache" in inspect.signature(one.forward).parameters else "past_key_values"
                out = one(input_ids=fed, attention_mask=seen, position_ids=places[:, -fed.shape[1] :],
                          use_cache=True, **{name: caches[which]})  # fmt: skip
                caches[which] = out[name]
                each.append(out.logits[:, -1].float())
        logits = each[0] if old is None else torch.where((step < switch)[:, None], each[1], each[0])
        logprobs = cut((logits / given.get("temperature", 1.0)).log_softmax(-1), given)
        token = torch.multinomial(logprobs.exp(), 1, generator=draw)
        token = torch.where(alive[:, None], token, PAD)
        said.append(torch.where(alive, logprobs.gather(-1, token)[:, 0], torch.nan))
        ids, mask = torch.cat([ids, token], 1), torch.cat([mask, alive[:, None].long()], 1)
        alive = alive & (token[:, 0] != END)
        fed = token
    for handle in handles:
        handle.remove()
    said_BR = torch.stack(said, 1)
    samples, values = [], []
    for row, size in enumerate(sizes):
        count = int(said_BR[row].isfinite().sum())
        samples.append(ids[row, width - size + more : width + count])
        values.append(said_BR[row, :count].tolist())
    chosen = None
    if experts:
        layers = len(handles)
        by_layer = [
            torch.cat([one.view(SAMPLES, -1, one.shape[-1]) for one in experts[layer]], 1) for layer in range(layers)
        ]
        whole = torch.stack(by_layer, 2)  # [B, S - 1, L, K]: the last token was never fed
        chosen = [
            whole[row, width - size : width + len(said) - 1]
            for row, (size, said) in enumerate(zip(sizes, values, strict=True))
        ]
    return samples, [size - more for size in sizes], values, chosen


def _rerouted(model: Any, noise: float, experts: list[list[Tensor]]) -> list[Any]:
    """Routers with noise on their logits, and what they choose."""
    draw = torch.Generator().manual_seed(11)

    def hook(layer: int) -> Any:
        def after(module: Any, _args: Any, output: Any) -> Any:
            logits, weights, _chosen = output
            moved = logits.float() + noise * torch.randn(logits.shape, generator=draw) * 0.3
            top = moved.topk(weights.shape[-1]).indices
            share = logits.float().softmax(-1).gather(-1, top)
            experts[layer].append(top)
            return logits, (share / share.sum(-1, keepdim=True)).to(weights.dtype), top

        return after

    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    experts.extend([] for _ in routers)
    return [module.register_forward_hook(hook(layer)) for layer, module in enumerate(routers)]


# ---- the trainer


@torch.no_grad()
def scored(model: Any, given: dict[str, Any], samples: list[Tensor], sizes: list[int]) -> list[list[float]]:
    """The trainer's log-probabilities of the response tokens: one padded batch, whole logits."""
    width, left = max(map(len, samples)), max(sizes)
    is_left = bool(given.get("sees_padding"))
    pads = [left - size if is_left else 0 for size in sizes]
    width += max(pads)
    ids, mask = torch.full((len(samples), width), PAD), torch.zeros(len(samples), width, dtype=torch.long)
    places = torch.zeros_like(ids)
    for row, (sample, pad, size) in enumerate(zip(samples, pads, sizes, strict=True)):
        ids[row, pad : pad + len(sample)], mask[row, : pad + len(sample)] = sample, 1
        counted = torch.arange(len(sample))
        if given.get("anew"):
            counted = torch.where(counted < size, counted, counted - size)
        places[row, pad : pad + len(sample)] = counted + (pad if is_left else 0)
        places[row, :pad] = torch.arange(pad)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False).logits.float()
    for row, (sample, size) in enumerate(zip(samples, sizes, strict=True) if given.get("cut") else ()):
        for part in (slice(0, size), slice(size, len(sample))):
            logits[row, part] = model(input_ids=sample[None, part], use_cache=False).logits[0].float()
    logprobs = (logits / given.get("temperature", 1.0)).log_softmax(-1)
    found = []
    for row, (sample, pad, size) in enumerate(zip(samples, pads, sizes, strict=True)):
        at = torch.arange(pad + size, pad + len(sample))
        found.append(logprobs[row, at - 1].gather(-1, ids[row, at, None])[:, 0].tolist())
    return found


def recorded(folder: Path, arch: str, plant: Plant, out: Path) -> Path:
    """The dump of a plant: samples padded on the right, both sides' log-probabilities, the checkpoints noted."""
    from replay_core.recorder import Recorder

    has_adapter = "adapter" in plant.family
    share = plant.engine.get("adapter", 1.0) if has_adapter else None
    engine = loaded(folder, plant.engine, "eager", share)
    old = (
        loaded(folder, {**plant.engine, "step": plant.engine["prefix"]}, "eager", share)
        if "prefix" in plant.engine
        else None
    )
    samples, sizes, rollout, experts = written(engine, plant.engine, old)
    trainer = scored(loaded(folder, plant.trainer, "sdpa", 1.0 if has_adapter else None), plant.trainer, samples, sizes)
    width = max(map(len, samples))
    fields = {name: torch.zeros(len(samples), width) for name in ("rollout_logprobs", "old_logprobs")}
    ids, mask, response = (torch.zeros(len(samples), width, dtype=torch.long) for _ in range(3))
    shift = plant.engine.get("shift", 0)
    for row, (sample, size) in enumerate(zip(samples, sizes, strict=True)):
        end = len(sample)
        ids[row, :end], mask[row, :end], response[row, size:end] = sample, 1, 1
        said = torch.tensor(rollout[row]).roll(shift)
        # As a forward says it: one slot before the token.
        fields["rollout_logprobs"][row, size - 1 : end - 1] = said
        fields["old_logprobs"][row, size - 1 : end - 1] = torch.tensor(trainer[row])
    more: dict[str, Any] = {}
    if experts is not None:
        whole = torch.full((len(samples), width, *experts[0].shape[1:]), -1)
        for row, one in enumerate(experts):
            whole[row, : len(one)] = one
        more["rollout_routed_experts"] = whole
    recorder = Recorder(out)
    with recorder.step(3) as record:
        record("forward_data", {"input_ids": ids, "attention_mask": mask, "response_mask": response, **fields, **more})
    for step in range(5):
        if not has_adapter or step != 3:
            recorder.note_model(step, str(folder / f"step_{step}"))
    if has_adapter:
        recorder.note_model(3, str(adapted(arch, folder)))
    return out


@dataclass
class Outcome:
    """What was said of a plant."""

    plant: Plant
    arch: str
    named: list[Any]
    dtypes: str
    observed: float
    ratio: float
    seconds: float
    headline: str

    @property
    def is_right(self) -> bool:
        if not self.plant.family or self.plant.family == ("precision",):
            dtypes = [one.get("dtype", "float32") for one in (self.plant.engine, self.plant.trainer)]
            is_told = not self.plant.family or self.dtypes == "engine {}, trainer {}".format(*dtypes)
            return not self.named and self.ratio <= 2 and is_told
        if self.plant.says:
            said = "; ".join(one["name"] for one in self.named)
            # Nothing beside: as many commas outside of brackets as changes.
            parts = [one for one in said.replace(", normalised", "").split(", ") if one]
            if not all(word in said for word in self.plant.says) or len(parts) != len(self.plant.says):
                return False
        return any(one["family"] in self.plant.family and one["side"] == self.plant.side and one["share"] >= 0.9
                   for one in self.named)  # fmt: skip


def run(arch: str, plant: Plant, folder: Path) -> Outcome:
    """One plant, from sampling to the answer."""
    from replay_core import workbench

    with tempfile.TemporaryDirectory() as out:
        if "adapter" in plant.family:
            adapted(arch, folder)
        path = recorded(folder, arch, plant, Path(out) / "dump")
        began = time.process_time()
        doc = workbench.mismatch(path, step=3)
    floor = doc["floor"]
    named = [one for one in doc["causes"] if one["named"]]
    observed = float(doc["gap"]["mean"]) if doc["gap"] else float("nan")
    ratio = float(floor["ratio"]) if floor else float("nan")
    dtypes = floor["dtype"] if floor else ""
    return Outcome(plant, arch, named, dtypes, observed, ratio, time.process_time() - began, doc["headline"])


def outcomes(asked: argparse.Namespace) -> Iterator[Outcome]:
    archs = (asked.arch,) if asked.arch else ("qwen2", "moe")
    for arch in archs:
        folder = trained(arch, Path(asked.models) / arch)
        for plant in plants():
            wanted = plant.name in asked.only if asked.only else plant.aside == asked.aside
            if wanted and arch in plant.archs:
                yield run(arch, plant, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--aside", action="store_true")
    parser.add_argument("--arch", choices=("qwen2", "moe"))
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--models", default=str(Path(tempfile.gettempdir()) / "rldbg-mismatch-models"))
    asked = parser.parse_args()
    right = total = 0
    for one in outcomes(asked):
        total, right = total + 1, right + one.is_right
        said = (
            "; ".join(f"{cause['side']}: {cause['name']} {cause['share']:.0%}" for cause in one.named) or one.headline
        )
        word = "ok " if one.is_right else "BAD"
        figures = f"{one.observed:8.2g} nats {one.ratio:7.3g} x {one.seconds:5.1f} s"
        sys.stdout.write(f"{word} {one.arch:<6}{one.plant.name:<34} {figures}  {said[:150]}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{right} of {total}\n")
    return 0 if right == total else 1


if __name__ == "__main__":
    sys.exit(main())
