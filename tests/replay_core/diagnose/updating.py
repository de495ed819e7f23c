"""A trainer of its own: a small net of the last two tokens, trained by torch's autograd in micro-batches and recorded
as the recorder's page says, its settings stated; one line of it wrong where a test says so.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from replay_core.diagnose.case import Case
from replay_core.diagnose.engine import diagnose
from replay_core.diagnose.finding import Finding
from replay_core.diagnose.signals import Signals
from replay_core.dumps import open_run
from replay_core.recorder import Recorder

PAD, END, DIGITS, VOCABULARY, WIDTH = 0, 1, 4, 12, 16
PROMPT = 4


@dataclass(frozen=True)
class Recipe:
    """A run. `fault` names the line that is wrong; empty is healthy. `mean`: the reduction that is stated and made."""

    fault: str = ""
    steps: int = 7
    micros: int = 2
    epochs: int = 1
    groups: int = 4
    size: int = 6
    kl: float = 0.0
    mean: str = "sequence_mean"
    lr: float = 2e-3
    adam: bool = True
    max_norm: float = 0.0
    keeps_clipped: bool = False
    """Gradients are recorded after they are clipped, as the recorder's page has it."""
    minis: int = 1
    lora: bool = False
    overlong: bool = False
    filtered: bool = False
    checkpoints: bool = False
    pg: bool = True
    limit: int = 8
    seed: int = 0
    ranks: int = 1
    off_policy: bool = False
    one_batch: bool = False
    schooled: bool = False
    """Begins with a net that counts up and ends after one of `ends`."""
    ends: tuple[int, ...] = (VOCABULARY - 1,)
    shuffled: bool = False
    """The prompts are those of the first two steps, in another order in each."""
    memory: bool = False
    """Its net sees all tokens before, as their mean."""
    versions: bool = False
    parts: bool = False
    """Rewards are the sum of two parts, which are recorded, too."""
    resets: tuple[int, ...] = ()
    """Steps that begin with a reference that is made of the policy."""
    warm_up: int = 0
    """Steps in which the rate grows from 0."""
    worded: str = ""
    """The loss's aggregation, stated in verl's word instead of the recorder's settings."""
    stated: str = "dapo"
    """And the algorithm beside it."""
    rloo: bool = False
    """Advantages are the reward less the mean of the others', and their bounds are logged."""
    weights: bool = False
    """And the run states that each of them weighs 1."""
    weighed: str = ""
    """Importance weights of the engine (two updates old), as verl names them: token, token_mask."""


class Net(nn.Module):
    """Next-token logits [B, S, V] of the token and the one before it."""

    def __init__(self, seed: int, lora: bool, dead: bool, memory: bool = False) -> None:
        super().__init__()
        self.memory = memory
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokens = nn.Embedding(VOCABULARY, WIDTH)
            self.mix, self.head = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)
            if lora:
                self.requires_grad_(False)
                self.lora_A = nn.Parameter(torch.zeros(3, WIDTH) if dead else torch.randn(3, WIDTH) / 4)
                self.lora_B = nn.Parameter(torch.zeros(VOCABULARY, 3))
        self.lora = lora

    def forward(self, ids: Tensor, packed: bool = False) -> Tensor:
        """packed: all rows are one, whose attention is not cut."""
        before = torch.cat([ids[:, :1], ids[:, :-1]], 1)
        h = torch.tanh(self.mix(torch.cat([self.tokens(ids), self.tokens(before)], -1)))
        if self.memory:
            seen = self.tokens(ids)
            seen = seen.reshape(1, -1, WIDTH) if packed else seen
            places = torch.arange(1, seen.shape[1] + 1)[:, None]
            h = h + (seen.cumsum(1) / places).reshape(h.shape)
        out: Tensor = self.head(h)
        if self.lora:
            out = out + 4 * h @ self.lora_A.T @ self.lora_B.T
        out = out.clone()
        out[..., PAD] = -30
        return out

    def save_pretrained(self, folder: Path, safe_serialization: bool) -> None:
        folder.mkdir(parents=True)
        save_file({name: value.clone() for name, value in self.state_dict().items()}, folder / "model.safetensors")


def scores(net: Net, ids: Tensor, packed: bool = False) -> Tensor:
    every = net(ids, packed)[:, :-1].log_softmax(-1)
    return every.gather(-1, ids[:, 1:, None])[..., 0]


@lru_cache(maxsize=16)
def _schooled(seed: int, lora: bool, memory: bool, ends: tuple[int, ...]) -> Net:
    """Taught to count up from its prompt's last token, with a few other tokens, and to end after some of them."""
    net = Net(seed, lora, False, memory)
    draw = torch.Generator().manual_seed(seed)
    teacher = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(150):
        ids = torch.randint(DIGITS, VOCABULARY, (64, 12), generator=draw)
        for place in range(1, 12):
            last = ids[:, place - 1]
            is_over = torch.isin(last, torch.tensor([*ends, END]))
            goes_on = torch.where(is_over, END, last + 1)
            keeps = (torch.rand(64, generator=draw) < 0.8) | is_over
            ids[:, place] = torch.where(keeps, goes_on, ids[:, place])
        teacher.zero_grad()
        (-scores(net, ids).mean()).backward()
        teacher.step()
    net.zero_grad()
    return net


#: Updates that the engine is behind, while the version says one.
_BEHIND = {"one-late": 1, "three-late": 3}


def _engine(recipe: Recipe, net: Net, past: list[Net]) -> tuple[Net, Net]:
    """The weights that the engine writes the first tokens with, and the rest."""
    engine = copy.deepcopy(net)
    if recipe.fault == "engine-ahead":
        with torch.no_grad():
            for mine, first in zip(engine.parameters(), past[0].parameters(), strict=True):
                mine.copy_(2 * mine - first)
    if recipe.fault == "two-late" or recipe.weighed == "token":
        engine = copy.deepcopy(past[max(len(past) - 3, 0)])
    if recipe.fault == "stays":
        engine = copy.deepcopy(past[min(1, len(past) - 1)])
    if recipe.fault in _BEHIND:
        engine = copy.deepcopy(past[max(len(past) - 1 - _BEHIND[recipe.fault], 0)])
    begins = copy.deepcopy(past[max(len(past) - 2, 0)]) if recipe.fault == "swapped" else engine
    return begins.to(torch.bfloat16), engine.to(torch.bfloat16)


def sampled(
    net: Net, prompts: Tensor, limit: int, draw: torch.Generator, *, begins: Net | None = None, penalty: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids [B, P + R], which are there [B, P + R], and the engine's log-probabilities [B, R]: in bfloat16.

    begins: weights of the first three tokens; penalty: on tokens that stood before.
    """
    ends = copy.deepcopy(net).to(torch.bfloat16)
    starts = ends if begins is None else begins
    ids, held = prompts, torch.ones_like(prompts)
    said = []
    writing = torch.ones(len(ids), dtype=torch.bool)
    with torch.no_grad():
        for place in range(limit):
            logits = (starts if place < 3 else ends)(ids)[:, -1].float()
            if penalty != 1:
                again = torch.zeros_like(logits).scatter(1, ids, 1.0) > 0
                logits = torch.where(again, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
            every = logits.log_softmax(-1)
            token = torch.multinomial(every.exp(), 1, generator=draw)
            said.append(torch.where(writing, every.gather(-1, token)[:, 0], torch.zeros(len(ids))))
            ids = torch.cat([ids, torch.where(writing, token[:, 0], PAD)[:, None]], 1)
            held = torch.cat([held, writing.long()[:, None]], 1)
            writing = writing & (token[:, 0] != END)
    return ids, held, torch.stack(said, 1)


def rewarded(ids: Tensor, held: Tensor, filtered: bool) -> Tensor:
    """The share of tokens that go on counting, or whether there is one such token."""
    inside = held[:, PROMPT:]
    goes_on = ((ids[:, PROMPT:] == ids[:, PROMPT - 1 : -1] + 1) & (inside == 1)).sum(1)
    return (goes_on > 1).float() if filtered else goes_on / inside.sum(1)


def _reduced(each: Tensor, mask: Tensor, mean: str, tokens: float) -> Tensor:
    if mean == "token_sum":
        return (each * mask).sum() / tokens
    if mean == "token_mean":
        return (each * mask).sum() / mask.sum().clip(1)
    return ((each * mask).sum(1) / mask.sum(1).clip(1)).mean()


#: What importance weights are cut off at, or kept within.
CAP = 1.5


def _weight(fault: str, kind: str, far: Tensor) -> Tensor:
    """Importance weights, trainer over rollout."""
    inside = (far <= CAP) & (far >= 1 / CAP)
    if kind == "token_mask":
        return ~inside * far if fault == "mask-turned" else inside * far
    if fault == "weight-turned":
        return (1 / far).clip(max=CAP)
    if fault == "unweighed":
        return torch.ones_like(far)
    kept = far.clip(max=CAP)
    return kept**2 if fault == "weight-twice" else kept


def _batches(recipe: Recipe, net: Net) -> Iterator[dict[str, Tensor]]:
    """The rollouts of every step, as the policy then is."""
    draw = torch.Generator().manual_seed(recipe.seed)
    kept: dict[str, Tensor] = {}
    past: list[Net] = []
    seen: list[Tensor] = []
    groups = recipe.groups * (8 if recipe.filtered else 1)
    for step in range(recipe.steps):
        if (recipe.fault == "reused" and step > 1) or (recipe.one_batch and step):
            yield kept
            continue
        heads = torch.randint(DIGITS, VOCABULARY, (groups, PROMPT), generator=draw)
        heads[:, :2] = torch.tensor([2, 3])  # a template
        if recipe.fault == "loader-restarts" and 2 < step < 6:
            heads = seen[step - 3]
        if recipe.fault == "loader-stands" and step > 2:
            heads = seen[2]
        if recipe.fault == "" and recipe.shuffled:
            heads = torch.cat(seen[:2])[torch.randperm(2 * groups, generator=draw)[:groups]] if step > 1 else heads
        seen.append(heads)
        prompts = heads.repeat_interleave(recipe.size, 0)
        past.append(copy.deepcopy(net))
        begins, ends = _engine(recipe, net, past)
        penalty = 1.5 if recipe.fault == "penalty" else 1.0
        ids, held, said = sampled(ends, prompts, recipe.limit, draw, begins=begins, penalty=penalty)
        rewards = rewarded(ids, held, recipe.filtered)
        keep = torch.arange(groups)
        if recipe.filtered:
            apart = rewards.view(groups, -1).std(1) > 1e-6
            wanted = ~apart if recipe.fault == "filter-turned" else apart
            keep = torch.cat([wanted.nonzero()[:, 0], (~wanted).nonzero()[:, 0]])[: recipe.groups]
        rows = (keep[:, None] * recipe.size + torch.arange(recipe.size)).reshape(-1)
        kept = {"ids": ids[rows], "held": held[rows], "said": said[rows], "rewards": rewards[rows]}
        yield kept


def run(folder: Path, recipe: Recipe) -> Path:
    """Train and record."""
    fault, P = recipe.fault, PROMPT
    net = Net(recipe.seed, recipe.lora, fault == "lora-dead", recipe.memory)
    if recipe.schooled:
        net = copy.deepcopy(_schooled(recipe.seed, recipe.lora, recipe.memory, recipe.ends))
    ref = before = copy.deepcopy(net)
    trained = [each for each in net.parameters() if each.requires_grad]
    held_by = [copy.deepcopy(each) for each in trained] if fault == "other-parameters" else trained
    optimizer: Any = (torch.optim.Adam if recipe.adam else torch.optim.SGD)(held_by, lr=recipe.lr)
    divisor = 1.0 if recipe.mean == "token_sum" else float(recipe.micros)
    loss_settings = {
        "kind": "grpo", "clip_low": 0.2, "clip_high": 0.2, "kl": recipe.kl, "kl_estimator": "k3",
        "reduction": recipe.mean, "divisor": divisor,
    }  # fmt: skip
    flags: dict[str, Any] = {"dtype": "float32", "temperature": 1.0, "loss": loss_settings}
    if recipe.off_policy or recipe.weighed:
        flags["max_staleness"] = 4
    if recipe.weighed:
        flags |= {"rollout_is": recipe.weighed, "rollout_is_threshold": CAP}
    if recipe.worded:
        flags = {**{name: value for name, value in flags.items() if name != "loss"}, "loss_agg_mode": recipe.worded}
        flags["algorithm"] = recipe.stated
    if fault == "own-means-stated":
        flags["loss_denominator"] = "micro-batch tokens"
    if recipe.filtered:
        flags["dynamic_sampling"] = True
    if recipe.max_norm:
        flags["max_grad_norm"] = recipe.max_norm
    if recipe.fault == "loader-restarts":
        flags["data"] = {"shuffle": True}
    if recipe.weights:
        flags["reward_weights"] = {"goes_on": 1.0, "ends": 3.0 if recipe.fault == "sum-unweighed" else 1.0}
    recorder = Recorder(folder, flags=flags)
    for step, batch in enumerate(_batches(recipe, net)):
        if recipe.checkpoints:
            recorder.checkpoint(step, net)
        if fault == "refreshed" and step:
            ref = before
        if step in recipe.resets:
            ref = copy.deepcopy(net)
        before = copy.deepcopy(net)
        ids, held, rewards = batch["ids"], batch["held"], batch["rewards"]
        B = len(ids)
        said = torch.cat([torch.zeros(B, P - 1), batch["said"]], 1)
        cut = (ids[:, P:] != END).all(1)
        mask = held.clone()
        mask[:, :P] = 0
        if fault == "mask-strided":
            mask[::3] = 0
        if recipe.overlong:
            left_out = ~cut if fault == "overlong-turned" else cut
            mask = mask * (~left_out).long()[:, None]
        if fault == "mask-at-mark":
            inside = ids * mask
            mask = mask * ((inside == 8).long().cumsum(1) - (inside == 8).long() < 1).long()
        if fault == "end-is-pad":
            ids = torch.where(ids == PAD, END, ids)
            held = held * (ids != END).long()
            mask = mask * held
        group = torch.arange(B) // recipe.size
        more: dict[str, Tensor] = {}
        if recipe.parts:
            more = {"reward_goes_on": rewards, "reward_ends": 0.25 * (~cut).float()}
            rewards = rewards + more["reward_ends"]
        if fault == "cast" and step:
            rewards = rewards.trunc()
        if fault == "one-far" and step:
            rewards[step] = -60.0
        if fault == "part-lost" and step:
            rewards = more["reward_ends"]
        if fault == "as-they-finish" and step:
            rewards = rewards[held.sum(1).argsort(stable=True)]
        if fault == "rolled" and step > 1:
            rewards = rewards.roll(1)
        if fault == "cut-paid" and step:
            rewards = torch.where(cut, torch.ones_like(rewards), rewards)
        if recipe.versions:
            more["weight_version"] = torch.full((B,), max(step - (fault in _BEHIND or fault == "stays"), 0))
        each = rewards.view(-1, recipe.size)
        per = ((each - each.mean(1, keepdim=True)) / (each.std(1, keepdim=True) + 1e-4)).reshape(-1)
        if fault == "neighbours-mean":
            per = ((each - each.mean(1, keepdim=True).roll(1, 0)) / (each.std(1, keepdim=True) + 1e-4)).reshape(-1)
        if recipe.rloo:
            per = ((each - each.mean(1, keepdim=True)) * recipe.size / (recipe.size - 1)).reshape(-1)
        m = mask[:, 1:].float()
        advantages = per[:, None] * m
        with torch.no_grad():
            old, behind = scores(net, ids), scores(ref, ids)
        rate = recipe.lr * (40 if fault == "rate-leaps" and step >= 2 else 1)
        if recipe.warm_up:
            rate *= min(1.0, step / recipe.warm_up)
        if fault == "warm-up-restarts":
            rate = recipe.lr * (step % 3 + 1 + (step > 5) * 3) / (1 if step < 3 else 8)
        for one in optimizer.param_groups:
            one["lr"] = rate
        with recorder.step(step, rank=0) as record:
            record(
                "trajectory", input_ids=ids, attention_mask=held, response_mask=mask, rewards=rewards, group_id=group,
                rollout_log_probs=said, advantages=advantages, truncated=cut, **more,
            )  # fmt: skip
            record("old_log_probs", old_log_probs=old)
            micro = 0
            for epoch, mini in product(range(recipe.epochs), range(recipe.minis)):
                if fault != "never-zeroed":
                    net.zero_grad()
                parts = list(torch.arange(B).chunk(recipe.minis)[mini].chunk(recipe.micros))
                if fault == "micro-dropped":
                    parts = parts[:-1]
                for number, rows in enumerate(parts):
                    now = scores(net, ids[rows], fault == "packed")
                    ratio = (now - old[rows]).exp()
                    a = advantages[rows]
                    own = m[rows]
                    if fault == "next-mask":
                        own = m[parts[(number + 1) % len(parts)]]
                    if fault == "first-advantages":
                        a = per[parts[0][: len(rows)], None] * own
                    far = (old[rows] - said[rows]).exp()
                    if fault == "corrected-twice":
                        ratio = (now - said[rows]).exp()
                    token_loss = torch.maximum(-a * ratio, -a * ratio.clip(0.8, 1.2))
                    if recipe.weighed:
                        token_loss = token_loss * _weight(fault, recipe.weighed, far)
                    apart = behind[rows] - now
                    kl = apart.exp() - apart - 1
                    made = "token_mean" if fault == "own-tokens" else recipe.mean
                    pg = _reduced(token_loss, own, made, float(m.sum()))
                    if fault in ("own-means", "own-means-stated"):
                        pg = _reduced(token_loss, own, "token_mean", 1.0) / recipe.micros
                    kl_loss = _reduced(kl, own, made, float(m.sum()))
                    weight = 1.0 if fault in ("kl-unweighted", "kl-recorded-weighted") else recipe.kl
                    if fault == "kl-missing":
                        weight = 0.0
                    if fault == "kl-recorded-weighted":
                        kl_loss = recipe.kl * kl_loss
                    loss = (pg + weight * kl_loss) / (1.0 if fault == "undivided" else divisor)
                    loss.backward()
                    key: dict[str, Any] = {"micro": micro, "epoch": epoch, "minibatch": mini}
                    with torch.no_grad():
                        record(
                            "forward_data", input_ids=ids[rows], attention_mask=held[rows],
                            response_mask=torch.cat([mask[rows, :1], own.long()], 1),
                            log_probs=now.detach(), old_log_probs=old[rows], ref_log_probs=behind[rows], advantages=a,
                            rollout_log_probs=said[rows], **key,
                        )  # fmt: skip
                        terms = {"pg_loss": pg.detach(), "kl_loss": kl_loss.detach()} if recipe.pg else {}
                        if recipe.weighed:
                            terms |= {"prob_ratio": ratio * own, "elementwise_loss": token_loss * own}
                        record("loss", loss=loss.detach(), **terms, **key)
                    micro += 1
                grads = [one.grad for one in trained if one.grad is not None]
                norm = float(torch.stack([one.norm() for one in grads]).norm())
                if recipe.keeps_clipped:
                    nn.utils.clip_grad_norm_(trained, recipe.max_norm)
                named = {
                    f"grad.{name}": one.grad.clone() for name, one in net.named_parameters() if one.grad is not None
                }
                record("gradient", **named, grad_norm=norm, micro=micro - 1, epoch=epoch, minibatch=mini)
                if recipe.max_norm and not recipe.keeps_clipped:
                    nn.utils.clip_grad_norm_(trained, 1e-3 if fault == "other-bound" else recipe.max_norm)
                if held_by is not trained:
                    for one, real in zip(held_by, trained, strict=True):
                        one.grad = None if real.grad is None else real.grad.clone()
                optimizer.step()
            kept = [one.grad.norm() for one in trained if one.grad is not None]
            metrics = {"clipped_grad_norm": float(torch.stack(kept).norm())} if recipe.max_norm else {}
            if recipe.rloo:
                metrics |= {"adv_max": float(per.max()), "adv_min": float(per.min())}
            metrics |= {"reward": float(rewards.mean()), "lr": rate, "grad_norm": norm, "loss": float(loss.detach())}
            record("training_metrics", metrics)
    recorder.close()
    return folder


def told(folder: Path, recipe: Recipe, *rules: str) -> list[Finding]:
    """What is found loud, first things first."""
    kept = open_run(run(folder / "d", recipe))
    found = diagnose(Case(kept, Signals.of(kept)), rules).findings
    return [one for one in found if one.severity != "info"]
