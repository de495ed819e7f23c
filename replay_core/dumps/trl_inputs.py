"""Inputs captured around TRL's GRPOTrainer, which dumps no tensors of its own.

compute_loss_step%06d_micro%d.pt holds {global_step, micro, inputs, loss}; generate_and_score_step%06d_gen%d.pt the
dict that _generate_and_score_completions returns. Prompts are left-padded, completions right-padded; without
old_per_token_logps the old log-probabilities are the policy's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay_core.dumps.dialect import Dialect, Index, any_of
from replay_core.dumps.fields import flatten
from replay_core.dumps.listing import Folder, is_file, listing
from replay_core.dumps.peeking import content_of, first_that, has, tree_of
from replay_core.dumps.words import named, words
from replay_core.errors import DumpError
from replay_core.records import Parts, RecordKey, TensorRef
from replay_core.regexes import regex

_STEP = regex(r".*?step(?P<step>\d{1,18})_(?P<kind>micro|gen)(?P<number>\d{1,18})\.pt")
_BATCH = ("prompt_ids", "completion_ids", "completion_mask")

TRL = words(
    prompt="prompt_ids prompt_mask",
    response=(
        "completion_ids=response_ids completion_mask=response_mask tool_mask old_per_token_logps=old_logprobs "
        "sampling_per_token_logps=rollout_logprobs ref_per_token_logps=ref_logprobs per_token_logps=policy_logprobs "
        "importance_sampling_ratio=is_weights"
    ),
    sample="advantages",
    none="num_items_in_batch=metrics.num_items_in_batch",
)
TRL_PAD = {"prompt": "left", "response": "right"}


def _is_trl(tree: Any) -> bool:
    return has(tree, _BATCH) or (isinstance(tree, dict) and has(tree.get("inputs"), _BATCH))


def _files(path: Path) -> Iterator[tuple[Folder, str]]:
    if is_file(path):
        if _is_trl(tree_of(path)):
            yield listing(path).folders[0], path.name
        return
    for folder in listing(path).folders:
        if any(shape.endswith(("step_micro.pt", "step_gen.pt")) for shape in folder.shapes):
            entries = [entry for entry in folder.names if _STEP.fullmatch(entry)]
            if first_that((folder.file(entry) for entry in entries), _is_trl):
                yield from ((folder, entry) for entry in entries)


def index(path: Path) -> Index:
    found = Index([])
    for folder, entry in _files(path):
        match = _STEP.fullmatch(entry)
        if match is None:
            found.files.append((RecordKey(None, None, None, "actor", "batch_inputs"), folder.file(entry)))
        elif match["kind"] == "gen":
            # One generation feeds several micro-batches, so its number is no micro-batch's.
            found.files.append(
                (RecordKey(int(match["step"]), None, None, "rollout", "batch_inputs"), folder.file(entry))
            )
        else:
            key = RecordKey(int(match["step"]), int(match["number"]), None, "actor", "batch_inputs")
            found.files.append((key, folder.file(entry)))
    if found.files:
        found.notes.append(
            "input_ids and attention_mask are prompt and completion side by side, as the trainer joins them"
        )
        found.notes.append("micro is the trainer's own running number of micro-batches, across steps")
    return found


def read(key: RecordKey, path: Path) -> list[TensorRef]:
    tree = content_of(path).tree
    if not _is_trl(tree):
        raise DumpError("not the inputs of TRL's trainer", file=str(path), expected=", ".join(_BATCH))
    fields = named(flatten(tree), TRL, TRL_PAD, prefix="inputs.")
    by_name = {ref.canonical: ref for ref in fields}
    joined = [
        _joined("input_ids", by_name.get("prompt_ids"), by_name.get("response_ids")),
        _joined("attention_mask", by_name.get("prompt_mask"), by_name.get("response_mask")),
    ]
    return fields + [ref.with_(order=len(fields) + n) for n, ref in enumerate(ref for ref in joined if ref)]


def _joined(field: str, prompt: TensorRef | None, completion: TensorRef | None) -> TensorRef | None:
    """Prompt and completion side by side, as the trainer concatenates them before its forward."""
    if prompt is None or completion is None or prompt.dtype != completion.dtype:
        return None
    if len(prompt.shape) != 2 or len(completion.shape) != 2 or prompt.shape[0] != completion.shape[0]:
        return None
    if not (prompt.is_readable and completion.is_readable):
        return None
    shape = (prompt.shape[0], prompt.shape[1] + completion.shape[1])
    source = Parts((prompt, completion), axis=1)
    return TensorRef(field, prompt.dtype, shape, source, canonical=field, alignment="full", pad="left+right")


DIALECT = Dialect("trl", "content", any_of(_files), index, read)
