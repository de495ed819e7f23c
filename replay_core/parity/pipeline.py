"""A whole parity request: two configurations run in children on the same batches, or two dumps read. No torch here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from replay_core.dumps import open_run
from replay_core.errors import ModelError, RequestError
from replay_core.jobs import Job, OnEvent, Progress, Runner, ignore, in_part
from replay_core.parity.batches import DEFAULT, SEED, ParityBatch, make_batch
from replay_core.parity.config import CriticConfig, read_config
from replay_core.parity.correlation import NEARLY_IDENTICAL
from replay_core.parity.judging import Parity, judge
from replay_core.parity.pairing import open_two, paired
from replay_core.parity.sides import CriticAnswer, CriticSide, TrainedStep, read_head
from replay_core.parity.values import read_values
from replay_core.replay.architectures import settings

#: Training steps of a run that names no number: the guide's own pipeline takes at most five.
STEPS = 5


class ParityRequest(Struct, frozen=True):
    """What is asked beside the two configurations. `data`: random, padded, stale, text:FILE or dumps."""

    data: tuple[str, ...] = DEFAULT
    tokenizer: str | None = None
    steps: int = STEPS
    seed: int = SEED
    threshold: float = NEARLY_IDENTICAL
    capture: bool = True
    step: int = 0
    rank: int = 0
    micro: int = 0


def run_parity(
    config_a: Path, config_b: Path, request: ParityRequest, out: Path, runner: Runner, on_event: OnEvent = ignore
) -> Parity:
    """Run both critics, each in a child of its own, on the same batches and targets, and judge their dumps.

    Both train towards the returns of A's values, so that a drift is the critics' and not the data's.

    Raises:
        RequestError, ModelError: a configuration, the data, or the two critics' shapes do not fit.
        UnavailableError, CellError: a critic cannot run here, or failed.
    """
    configs = [read_config(path) for path in (config_a, config_b)]
    _need_one_process(configs)
    shape = _need_one_shape(configs)
    if request.steps < 0:
        raise RequestError("the number of training steps cannot be negative", found=str(request.steps))
    _need_threshold(request.threshold)
    batches = _batches(request, shape, configs)
    out.mkdir(parents=True, exist_ok=True)
    stored = _store(batches, out / "batches.safetensors")
    sides = []
    for number, (name, config) in enumerate(zip("ab", configs, strict=True)):
        of_side = in_part(on_event, number, 2)
        of_side(Progress(0, None, f"critic {name.upper()}: {config.backend}"))
        params = {
            "config": config.to_mapping(),
            "batches": str(stored),
            "names": [batch.name for batch in batches],
            "out": str(out / name),
            "steps": request.steps,
            "targets": str(out / "targets.safetensors"),
            "capture": request.capture,
            "suffix": f"_{name}" if configs[0].backend == configs[1].backend else "",
        }
        sides.append(_side(runner.run(Job("critic", params), of_side), config))
    run_a, run_b = open_run(out / "a"), open_run(out / "b")
    for side, run in zip(sides, (run_a, run_b), strict=True):
        side.head = read_head(run)
    values_a, values_b = read_values(run_a), read_values(run_b)
    pairs, notes = paired(values_a, values_b, f"{run_a.path} and {run_b.path}")
    found = judge(
        run_a, run_b, sides[0], sides[1], pairs,
        threshold=request.threshold,
        kinds={batch.name: batch.kind for batch in batches},
        tokenizers={batch.name: batch.tokenizer for batch in batches},
        on_event=on_event,
    )  # fmt: skip
    found.notes[:0] = [*notes, *(note for batch in batches for note in batch.notes), *_side_notes(sides)]
    return found


def read_parity(
    path_a: Path, path_b: Path, *, threshold: float = NEARLY_IDENTICAL, on_event: OnEvent = ignore
) -> Parity:
    """Judge the values that two dumps hold; nothing is run.

    Raises:
        DumpError, RequestError: a dump cannot be read, holds no values, or does not say whose they are.
    """
    _need_threshold(threshold)
    two = open_two(path_a, path_b)
    pairs, notes = paired(two.a, two.b, f"{path_a} and {path_b}")
    a, b = CriticSide.recorded(two.run_a, two.a[0].backend), CriticSide.recorded(two.run_b, two.b[0].backend)
    for side, path in ((a, path_a), (b, path_b)):
        side.steps = _recorded_steps(path)
    from replay_core.decoding import find_tokenizer

    tokenizer = find_tokenizer(path_a)
    found = judge(
        two.run_a, two.run_b, a, b, pairs, threshold=threshold,
        tokenizers={pair.batch: tokenizer for pair in pairs}, on_event=on_event,
    )  # fmt: skip
    found.notes[:0] = [*notes, *two.run_a.notes, *(note for note in two.run_b.notes if note not in two.run_a.notes)]
    return found


def _recorded_steps(path: Path) -> list[TrainedStep]:
    """What each training step did, as a critic's child left it beside its dump; empty where it did not."""
    try:
        read = json.loads(path.with_name(f"{path.name}.steps.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    fits = isinstance(read, list) and all(
        isinstance(one, dict) and {"step", "rows", "loss"} <= set(one) for one in read
    )
    return read if fits else []


def _side(answer: CriticAnswer, config: CriticConfig) -> CriticSide:
    said: dict[str, Any] = {**answer, "path": config.path, "notes": [*config.notes, *answer["notes"]]}
    return CriticSide(**said)


def _side_notes(sides: Sequence[CriticSide]) -> list[str]:
    return [f"{name} ({side.backend}): {note}" for name, side in zip("AB", sides, strict=True) for note in side.notes]


def _batches(request: ParityRequest, shape: dict[str, Any], configs: Sequence[CriticConfig]) -> list[ParityBatch]:
    tokenizer = None if request.tokenizer is None else Path(request.tokenizer)
    if tokenizer is None:
        beside = Path(configs[0].pretrain) / "tokenizer.json"
        tokenizer = beside if beside.is_file() else None
    chosen = {"step": request.step, "rank": request.rank, "micro": request.micro}
    avoid = pad if isinstance(pad := shape.get("pad_token_id"), int) else None
    made = [
        make_batch(spec, int(shape["vocab_size"]), tokenizer, request.seed, avoid=avoid, **chosen)
        for spec in request.data or DEFAULT
    ]
    names = [batch.name for batch in made]
    for number, batch in enumerate(made):
        if names.count(batch.name) > 1:
            batch.name = f"{batch.name}#{number}"
    return made


def _store(batches: Sequence[ParityBatch], path: Path) -> Path:
    from safetensors.numpy import save_file

    held: dict[str, Any] = {}
    for number, batch in enumerate(batches):
        held[f"{number}.input_ids"] = np.ascontiguousarray(batch.ids_BS, np.int64)
        held[f"{number}.attention_mask"] = np.ascontiguousarray(batch.attention_BS, np.int64)
        held[f"{number}.response_mask"] = np.ascontiguousarray(batch.response_BS, np.int64)
        held[f"{number}.rewards"] = np.ascontiguousarray(batch.rewards_BT, np.float32)
    if path.exists():
        raise RequestError(
            "the directory holds a parity run already", file=str(path.parent), hint="name another: --out DIR"
        )
    save_file(held, str(path))
    return path


def _need_threshold(threshold: float) -> None:
    if not threshold > 0 or threshold == float("inf"):
        raise RequestError("the threshold must be above 0", expected=f"like {NEARLY_IDENTICAL}", found=str(threshold))


def _need_one_process(configs: Sequence[CriticConfig]) -> None:
    for config in configs:
        if config.world_size > 1:
            raise RequestError(
                "the critic asks for more processes than a parity run has",
                file=config.path, expected="tensor, pipeline and context parallel size 1",
                found=f"a world of {config.world_size}",
                hint="the values do not depend on how the weights are cut: set the sizes to 1",
            )  # fmt: skip


_SHAPE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
)  # fmt: skip


def _need_one_shape(configs: Sequence[CriticConfig]) -> dict[str, Any]:
    """The sizes both critics have.

    Raises:
        ModelError: their shapes differ, or there is no such model.
    """
    shapes = [_shape(config) for config in configs]
    for name in _SHAPE:
        found = [shape.get(name) for shape in shapes]
        if found[0] != found[1]:
            raise ModelError(
                f"the two critics differ in {name}",
                file=f"{configs[0].path} and {configs[1].path}", expected=f"{found[0]} (A)", found=f"{found[1]} (B)",
                hint="parity is between two implementations of one model",
            )  # fmt: skip
    return shapes[0]


def _shape(config: CriticConfig) -> dict[str, Any]:
    if config.pretrain.startswith("random:"):
        return {**settings(config.pretrain.removeprefix("random:"), 0, 0)[1], "vocab_size": config.vocab_size}
    path = Path(config.pretrain).expanduser() / "config.json"
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"the critic's model cannot be read: {error.strerror}", file=str(path),
            expected="a Hugging Face directory, or random:qwen2-tiny", found=config.pretrain,
            hint="nothing is downloaded: fetch the model first",
        ) from None  # fmt: skip
    except ValueError:
        raise ModelError("the model's config is no JSON", file=str(path)) from None
    found = read.get("text_config", read) if isinstance(read, dict) else None
    if not isinstance(found, dict) or not isinstance(found.get("vocab_size"), int):
        raise ModelError("the model's config names no vocab_size", file=str(path))
    return found
