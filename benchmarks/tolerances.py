"""Writes docs/tolerances.md: the rules of judgement, their limits, and how near harmless changes and faults come.

`make tolerances` measures the labelled pairs of `benchmarks/faults.py` and small models of other sizes, inits and
architectures: two attention kernels, more padding (harmless), and planted faults. Two minutes on two cores; seeded, but
kernels differ between machines, so the last digits of what was measured do, too.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults import HARMLESS, REAL, an_update, batch, through_int8
from replay_core import naming
from replay_core.compare import compare_runs
from replay_core.compare.judging.judgement import asked
from replay_core.compare.judging.rules import BY_ID, RULES, Bound
from replay_core.compare.judging.verdict import Context, Verdict
from replay_core.dtypes import FAMILIES
from replay_core.dumps import open_run
from replay_core.recorder import Recorder

Tensor = torch.Tensor
Stages = dict[str, dict[str, Any]]

#: A name of each column of the tables.
_NAMES = {
    "local": "layers.0.mlp.output",
    "end-to-end": "layers.0.mlp.output",
    "gradient": "grad.layers.0.mlp.up_proj.weight",
    "param": "param.layers.0.mlp.up_proj.weight",
}

INTRO = """# Tolerances

<!-- Made by `python -m benchmarks.tolerances > docs/tolerances.md` (`make tolerances`). Do not edit. -->

Rules are asked in this order; the first whose value is past its limit decides, and the document names it
(`rule: {id, value, limit}`). `rldbg compare A B --explain NAME` lists all that were asked. `--tolerance FILE` sets or
switches off any of them by id:

```toml
[[tolerance]]
name = "layers.*.mlp.*"      # a glob over canonical names; dtype and column may narrow it
reason = "experts in fp8"    # printed where this table decided
rel_l2 = 0.2                 # a limit, by rule
off = ["worst_row"]          # rules that are not asked
```

Columns: `local`, where the recorded inputs of a module are bitwise equal; `end-to-end`; `gradient`; `param`.
d = b - a; relative figures divide by a. In half precision `rel_l2`, `worst_row` and `outlier` widen after noise that
came before a tensor, up to 1.6 to 5 times; one matrix product of equal inputs is held to less.

"""


def limits_section() -> str:
    """The rules and their limits, as the table has them."""
    lines = ["| rule | value | of | " + " | ".join(FAMILIES) + " |", "|---" * (3 + len(FAMILIES)) + "|"]
    for rule in RULES:
        said: dict[tuple[str, ...], list[str]] = {}
        for where, contexts in _contexts(rule):
            said.setdefault(tuple(f"{rule.limit(context):.5g}" for context in contexts), []).append(where)
        for number, (row, wheres) in enumerate(said.items()):
            of = "all" if len(said) == 1 else ", ".join(wheres)
            lines.append(f"| `{rule.id}` | {rule.what.replace('|', '&#124;') if not number else ''} | {of} | "
                         f"{' | '.join(row)} |")  # fmt: skip
    return "\n".join(["## Rules and limits", "", *lines, ""])


def _contexts(rule: Bound) -> Iterator[tuple[str, list[Context]]]:
    """Where a rule may have limits of its own, in words, and its contexts by dtype."""
    for form in rule.forms:
        if form == "number":
            for column, name in _NAMES.items():
                yield (
                    column,
                    [
                        Context(naming.meaning(name), dtype, exact=False, local=column == "local", name=name)
                        for dtype in FAMILIES
                    ],
                )
        else:
            meaning = naming.meaning(
                {"logprob": "policy_logprobs", "scalar": "loss", "positions": "position_ids"}[form]
            )
            for known in (False, True) if form == "logprob" else (False,):
                where = "log probabilities of fp32" if known else f"{form}s".replace("logprob", "log probabilitie")
                yield where.replace("positionss", "positions"), [
                    Context(meaning, dtype, exact=False, known_fp32=known, scalar=form == "scalar")
                    for dtype in FAMILIES
                ]  # fmt: skip


@dataclass(frozen=True)
class RuleValue:
    """What a rule said of one tensor of one case."""

    value: float
    limit: float
    case: str
    tensor: str

    @property
    def share(self) -> float:
        return self.value / self.limit if self.limit else self.value


@dataclass
class Margins:
    """By rule, column and dtype: the largest harmless value and the weakest fault it decided, by share of the limit."""

    harmless: dict[tuple[str, str], RuleValue]
    faults: dict[tuple[str, str], RuleValue]
    cases: list[tuple[bool, str, bool]]

    def look(
        self, case: str, is_fault: bool, a: Stages, b: Stages, label: tuple[str, Verdict] | None = None, **flags: Any
    ) -> None:
        """Compare two recordings as any two dumps are, and note what every rule said. `label`: the verdict that one
        tensor must have; without it, nothing diverges, or something does."""
        with tempfile.TemporaryDirectory(prefix="rldbg-tolerances-") as folder:
            for side, stages in (("a", a), ("b", b)):
                with Recorder(Path(folder) / side, **flags).step(0) as record:
                    for stage, fields in stages.items():
                        record(stage, fields, micro=0)
            compared = compare_runs(open_run(Path(folder) / "a"), open_run(Path(folder) / "b"))
        is_right = (compared.first is not None) is is_fault
        if label is not None:
            is_right = all(row.verdict is label[1] for row in compared.tensors if row.name == label[0])
        self.cases.append((is_fault, case, is_right))
        for row in compared.tensors:
            if row.context is None or row.figures is None:
                continue
            where = f"{row.context.column}, {row.context.row}"
            if row.context.form != "number":
                where = "fp32" if row.context.known_fp32 else "all"
            if is_fault and row.rule is not None and row.verdict.diverges:
                known = self.faults.get((row.rule.id, where))
                value = RuleValue(row.rule.value, row.rule.limit, case, row.name)
                if known is None or value.share < known.share:
                    self.faults[row.rule.id, where] = value
            decided = None if row.rule is None or not BY_ID[row.rule.id].clears else row.rule.id
            for one in () if is_fault or row.verdict is Verdict.PADDING else asked(row.figures, row.context):
                key, value = (one["id"], where), RuleValue(one["value"], one["limit"], case, row.name)
                known = self.harmless.get(key)
                # What a rule cleared was asked of no other.
                is_asked = decided == one["id"] if decided or BY_ID[one["id"]].clears else value.value > 0
                if is_asked and (known is None or value.share > known.share):
                    self.harmless[key] = value

    def section(self) -> str:
        """Both beside the limit, and every labelled case that was called wrongly."""
        wrong = [name for _, name, is_right in self.cases if not is_right]
        faults = sum(is_fault for is_fault, _, _ in self.cases)
        lines = [
            f"{len(self.cases)} labelled pairs, {faults} of them faults; called wrongly: {', '.join(wrong) or 'none'}. "
            "Of harmless pairs the value nearest to the limit, of faults the weakest that the rule decided.",
            "",
            "| rule | of | limit | largest harmless | in | weakest fault | in |",
            "|---|---|---|---|---|---|---|",
        ]
        order = {rule.id: number for number, rule in enumerate(RULES)}
        for id, where in sorted({*self.harmless, *self.faults}, key=lambda key: (order[key[0]], key[1])):
            near, weak = self.harmless.get((id, where)), self.faults.get((id, where))
            cells = [text for one in (near, weak) for text in (
                (f"{one.value:.5g}" + (f" of {one.limit:.5g}" if one.limit != (near or one).limit else ""), one.case)
                if one else ("", ""))]  # fmt: skip
            limit = (near or weak).limit if near or weak else 0.0
            lines.append(f"| `{id}` | {where} | {limit:.5g} | {' | '.join(cells)} |")
        return "\n".join(["## Measured", "", *lines, ""])


def configurations() -> Iterator[tuple[str, Any]]:
    from transformers import LlamaConfig, Qwen2Config  # three seconds, which the test of the page does without

    for name, kind, layers, width, std in (
        ("llama, 2 layers of 64, std .02", LlamaConfig, 2, 64, 0.02),
        ("llama, 6 layers of 128, std .06", LlamaConfig, 6, 128, 0.06),
        ("qwen2, 4 layers of 96, std .1", Qwen2Config, 4, 96, 0.1),
    ):
        yield name, kind(
            vocab_size=512, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, initializer_range=std, max_position_embeddings=128,
            tie_word_embeddings=False,
        )  # fmt: skip


def tokens(extra: int = 0) -> tuple[Tensor, Tensor]:
    """Six samples of 24 to 48 tokens, padded on the right, by `extra` columns more than they need."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([48, 44, 40, 36, 30, 24])
    ids_BS = torch.randint(1, 512, (6, 48), generator=generator)
    ids_BS = torch.nn.functional.pad(ids_BS, (0, extra))
    mask_BS = (torch.arange(48 + extra) < lengths[:, None]).long()
    return ids_BS * mask_BS, mask_BS


def forward(model: Any, extra: int = 0, *, scale: float = 1.0, shift: int = 0) -> Stages:
    """What a trainer would record of one micro-batch. scale: of the logits. shift: of the positions of sample 2."""
    ids_BS, mask_BS = tokens(extra)
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: Any, inputs: tuple[Any, ...], output: Any) -> None:
            if inputs and isinstance(inputs[0], Tensor) and inputs[0].is_floating_point():
                seen[f"{name}.inputs.0"] = inputs[0].detach().clone()
            value = output[0] if isinstance(output, tuple) else output
            seen[f"{name}.output"] = value.detach().clone()

        return hook

    handles = [
        module.register_forward_hook(keep(name.removeprefix("model.")))
        for name, module in model.named_modules()
        if name.startswith("model.layers.") or name == "model.norm"
    ]
    positions_BS = torch.arange(ids_BS.shape[1]).expand_as(ids_BS).clone()
    positions_BS[2, 20:] += shift
    logits = model(input_ids=ids_BS, attention_mask=mask_BS, position_ids=positions_BS, use_cache=False).logits
    for handle in handles:
        handle.remove()
    logp_BS = torch.log_softmax(logits[:, :-1].float() * scale, -1).gather(-1, ids_BS[:, 1:, None])[..., 0]
    logp_BS = torch.nn.functional.pad(logp_BS, (1, 0)) * mask_BS
    loss = -(logp_BS * mask_BS).sum() / mask_BS.sum()
    model.zero_grad()
    loss.backward()
    return {
        "batch_inputs": {"input_ids": ids_BS, "attention_mask": mask_BS},
        "modules": seen,
        "forward_data": {"log_probs": logp_BS.detach()},
        "loss": {"loss": loss.detach()},
        "gradient": {
            f"grad.{name}": weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None
        },
    }


def made(config: Any, dtype: torch.dtype, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention)
    return model.to(dtype).eval()


def edited(model: Any, edit: Callable[[Any], None]) -> Any:
    other = copy.deepcopy(model)
    with torch.no_grad():
        edit(other)
    return other


def weights(model: Any) -> Stages:
    return {"param": {f"param.{name}": weight.detach().clone() for name, weight in model.named_parameters()}}


def scaled_row(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight[5] *= 1.1


def scaled_norm(model: Any) -> None:
    model.model.layers[0].post_attention_layernorm.weight *= 1.02


def each(change: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    def edit(model: Any) -> None:
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.copy_(change(weight.float()).to(weight.dtype))

    return edit


def of_models(measured: Margins) -> None:
    for title, config in configurations():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            case, flags = f"{title}, {str(dtype)[6:]}", {"flags": {"dtype": str(dtype)[6:]}}
            eager, sdpa = (made(config, dtype, attention) for attention in ("eager", "sdpa"))
            clean = forward(eager)
            measured.look(f"eager and sdpa, {case}", False, clean, forward(sdpa), **flags)
            measured.look(f"8 columns more padding, {case}", False, clean, forward(eager, 8), **flags)
            for fault, b in (
                ("a channel of one layer times 1.1", forward(edited(sdpa, scaled_row))),
                ("a norm times 1.02", forward(edited(sdpa, scaled_norm))),
                ("logits times 1.05", forward(sdpa, scale=1.05)),
                ("positions of a sample off by 16 from token 20 on", forward(sdpa, shift=16)),
            ):
                measured.look(f"{fault}, {case}", True, clean, b, **flags)
            for fault, edit in (
                ("through int8", each(through_int8)),
                ("stale by an update of 1e-4", each(lambda weight: an_update(weight, 1e-4))),
            ):
                measured.look(f"weights {fault}, {case}", True, weights(eager), weights(edited(eager, edit)), **flags)


def of_labels(measured: Margins) -> None:
    for is_fault, faults in ((False, HARMLESS), (True, REAL)):
        for fault in faults:
            a, b = fault.make()
            around = {"batch_inputs": batch()} if fault.batch else {}
            measured.look(
                fault.name, is_fault, {**around, "modules": a}, {**around, "modules": b}, (fault.tensor, fault.says)
            )


def main() -> None:
    measured = Margins({}, {}, [])
    of_labels(measured)
    of_models(measured)
    sys.stdout.write(INTRO + limits_section() + "\n" + measured.section())


if __name__ == "__main__":
    main()
