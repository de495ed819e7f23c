"""One batch of samples, written down in every way a trainer lays tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from replay_core.recorder import Recorder

HIDDEN = 3
LAYOUTS = ("right", "left", "prompt left", "packed", "ragged")
PAD = 0


@dataclass(frozen=True)
class Sample:
    """A sample and all that was computed of it: logprobs[t] is about token t + 1."""

    name: int
    tokens: np.ndarray[Any, Any]
    prompt: int
    logprobs: np.ndarray[Any, Any]
    hidden: np.ndarray[Any, Any]
    reward: float

    @property
    def size(self) -> int:
        return len(self.tokens)


def samples(lengths: Sequence[tuple[int, int]], seed: int = 0) -> list[Sample]:
    """Samples of (prompt, response) lengths."""
    draw = np.random.default_rng(seed)
    made = []
    for name, (prompt, response) in enumerate(lengths):
        size = prompt + response
        made.append(
            Sample(
                name,
                draw.integers(5, 1000, size),
                prompt,
                -draw.random(size - 1).astype(np.float32) - 0.1,
                draw.normal(size=(size, HIDDEN)).astype(np.float32),
                float(np.float32(draw.random())),
            )
        )
    return made


def worse(sample: Sample, position: int) -> Sample:
    """The sample with a logprob of the token at `position` that is off by far."""
    logprobs = sample.logprobs.copy()
    logprobs[position - 1] -= 7
    return replace(sample, logprobs=logprobs)


def fields(batch: Sequence[Sample], layout: str, *, extra: int = 0, named: bool = False) -> dict[str, Any]:
    """A micro-batch as one record's fields. `extra`: columns of padding beyond what it needs."""
    made = {"packed": _packed, "ragged": _ragged}.get(layout)
    found = made(batch, extra) if made else _padded(batch, layout, extra)
    found["rewards"] = torch.tensor([sample.reward for sample in batch])
    if named:
        found["sample_id"] = torch.tensor([sample.name for sample in batch])
    return found


def _padded(batch: Sequence[Sample], layout: str, extra: int) -> dict[str, Any]:
    longest = max(sample.size for sample in batch)
    prompt = max(sample.prompt for sample in batch)
    width = longest + extra
    if layout == "prompt left":  # verl: prompts end in one column, responses begin in the next
        width = prompt + max(sample.size - sample.prompt for sample in batch) + extra
    ids = np.full((len(batch), width), PAD)
    mask = np.zeros((len(batch), width), int)
    response = np.zeros((len(batch), width), int)
    logprobs = np.full((len(batch), width), 9.0, np.float32)  # what stands in padding is nobody's
    hidden = np.full((len(batch), width, HIDDEN), -5.0, np.float32)
    for row, sample in enumerate(batch):
        start = {"right": 0, "left": width - sample.size}.get(layout, prompt - sample.prompt)
        here = slice(start, start + sample.size)
        ids[row, here], mask[row, here], hidden[row, here] = sample.tokens, 1, sample.hidden
        response[row, start + sample.prompt : start + sample.size] = 1
        logprobs[row, start : start + sample.size - 1] = sample.logprobs
    found = {"input_ids": ids, "attention_mask": mask, "response_mask": response, "log_probs": logprobs,
             "layers.0.output": hidden}  # fmt: skip
    return {name: torch.from_numpy(values) for name, values in found.items()}


def _packed(batch: Sequence[Sample], extra: int) -> dict[str, Any]:
    def end_to_end(rows: list[Any], fill: float) -> torch.Tensor:
        joined = np.concatenate(rows)
        tail = np.full((extra, *joined.shape[1:]), fill, joined.dtype)
        return torch.from_numpy(np.concatenate([joined, tail])[None])

    bounds = np.concatenate(([0], np.cumsum([sample.size for sample in batch])))
    response = [np.arange(sample.size) >= sample.prompt for sample in batch]
    return {
        "input_ids": end_to_end([sample.tokens for sample in batch], PAD),
        "cu_seqlens": torch.from_numpy(bounds),
        "response_mask": end_to_end([mask.astype(np.int64) for mask in response], 0),
        "log_probs": end_to_end([np.append(s.logprobs, np.float32(9)) for s in batch], 9),
        "layers.0.output": end_to_end([sample.hidden for sample in batch], -5),
    }


def _ragged(batch: Sequence[Sample], _extra: int) -> dict[str, Any]:
    return {
        "input_ids": [sample.tokens.tolist() for sample in batch],
        "response_mask": [[int(t >= s.prompt) for t in range(s.size)] for s in batch],
        "log_probs": [[*sample.logprobs.tolist(), 9.0] for sample in batch],
    }


def write(
    directory: Path, batch: Sequence[Sample], groups: Sequence[Sequence[int]], layout: str, ranks: int = 1, **how: Any
) -> Path:
    """A dump of the batch: group g is micro-batch g // ranks of rank g % ranks."""
    recorder = Recorder(directory)
    for rank in range(ranks):
        with recorder.step(0, rank=rank) as record:
            for micro, group in enumerate(groups[rank::ranks]):
                record("forward_data", fields([batch[index] for index in group], layout, **how), micro=micro)
    return directory


def write_micros(directory: Path, micros: Sequence[dict[str, dict[str, Any]]]) -> Path:
    """A dump of one step: the records of each micro-batch, by stage."""
    with Recorder(directory).step(0) as record:
        for micro, stages in enumerate(micros):
            for stage, found in stages.items():
                record(stage, found, micro=micro)
    return directory
