"""Weights that lie in shards: a rank's file each (FSDP, verl), or torch.distributed.checkpoint. No process group.

Ranks' files are read by the dumps' own reader, which runs nothing they carry. DCP's index is a pickle that only torch
can read, so it needs the user's word.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from replay_core import pages
from replay_core.dumps import open_run
from replay_core.errors import ModelError, RldbgError
from replay_core.records import TensorRef
from replay_core.regexes import regex

#: DCP's index.
_DCP = ".metadata"
_RANKS = regex(r".*rank[_=-]?\d+\.(?:pt|pth|bin)")
#: Where trainers put the config of a sharded checkpoint.
_CONFIGS = ("", "huggingface", "hf", "..", "../huggingface")
#: What wrappers put into a weight's name.
_WRAPPERS = regex(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module|_forward_module)\.")


def is_sharded(directory: Path) -> bool:
    """Whether the directory holds weights in shards (and not, beside them, a whole model)."""
    if any(directory.glob("*.safetensors")):
        return False
    return (directory / _DCP).is_file() or any(_RANKS.fullmatch(entry.name) for entry in directory.iterdir())


def config_folder(directory: Path) -> Path:
    """The folder with the config.json of a sharded checkpoint.

    Raises:
        ModelError: there is none.
    """
    for place in _CONFIGS:
        if (directory / place / "config.json").is_file():
            return (directory / place).resolve()
    raise ModelError(
        "the shards say nothing of the model's architecture",
        file=str(directory),
        expected="config.json in it, beside it, or in huggingface/",
        found=", ".join(sorted(entry.name for entry in directory.iterdir())[:6]),
        hint="copy the config.json of the model they belong to into the directory",
    )


def state(directory: Path, *, allow_pickles: bool) -> tuple[dict[str, torch.Tensor], str]:
    """(name -> whole tensor, what to say of where they come from).

    Raises:
        ModelError: the shards cannot be read, or only by running what they carry.
    """
    if (directory / _DCP).is_file():
        return _dcp(directory, allow_pickles), "weights put together from torch.distributed.checkpoint shards"
    try:
        run = open_run(directory)
        refs = [ref for record in run.records for ref in record.tensors() if not ref.is_text]
    except RldbgError as error:
        raise ModelError(f"the shards cannot be read: {error.message}", file=error.file or str(directory),
                         tensor=error.tensor, expected=error.expected, found=error.found) from error  # fmt: skip
    broken = next((ref for ref in refs if not ref.is_readable), None)
    if broken is not None:
        problem = run.problems[0].what if run.problems else "a rank's file is missing or cut short"
        raise ModelError("a weight is not whole in its shards", file=str(directory), tensor=broken.name, found=problem)
    ranks = sum(1 for entry in directory.iterdir() if _RANKS.fullmatch(entry.name))
    return {ref.name: _tensor(ref) for ref in refs}, f"weights put together from the files of {ranks} ranks"


def _tensor(ref: TensorRef) -> torch.Tensor:
    values = pages.array(ref)
    if ref.dtype.startswith(("bfloat", "float8")):
        # numpy's name for these is ml_dtypes', which torch does not know: the bits go over as they are.
        bits = values.view("uint8" if values.dtype.itemsize == 1 else "int16").copy()
        return torch.from_numpy(bits).view(getattr(torch, ref.dtype))
    return torch.from_numpy(values.copy())


def _dcp(directory: Path, allow_pickles: bool) -> dict[str, torch.Tensor]:
    if not allow_pickles:
        raise ModelError(
            "the shards' index is a pickle, which can run code when it is loaded",
            file=str(directory / _DCP),
            expected="safetensors, or ranks' files",
            hint="--allow-pickled-weights if you trust where it came from",
        )
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    tree: dict[str, Any] = {}
    try:
        planner = _EmptyStateDictLoadPlanner()
        _load_state_dict(tree, storage_reader=FileSystemReader(directory), planner=planner, no_dist=True)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise ModelError(
            f"the shards cannot be loaded: {type(error).__name__}: {first}", file=str(directory),
            hint="is every .distcp file there, and whole?",
        ) from error  # fmt: skip
    return dict(_leaves(tree, ""))


def _leaves(tree: Any, path: str) -> Any:
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))


def fill(model: Any, weights: dict[str, torch.Tensor], directory: Path) -> list[str]:
    """Put the weights into the model, by name, whatever wrapped it; what to say of those it does not use.

    Raises:
        ModelError: a weight of the model is missing or has another shape.
    """
    plain = {_WRAPPERS.sub("", name): value for name, value in weights.items()}
    own = model.state_dict()
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    chosen: dict[str, torch.Tensor] = {}
    used: set[str] = set()
    missing = []
    for name, value in own.items():
        # A checkpoint nests the model's own names under a word or two: model., app.model.
        near = [known for known in plain if known == name or (known.endswith(f".{name}") and "optim" not in known)]
        if not near:
            if name not in tied:
                missing.append(name)
            continue
        key = min(near, key=len)
        if plain[key].shape != value.shape:
            raise ModelError(
                "a weight has another shape than the config says", file=str(directory), tensor=key,
                expected=str(list(value.shape)), found=str(list(plain[key].shape)),
            )  # fmt: skip
        chosen[name] = plain[key].to(value.dtype)
        used.add(key)
    if missing:
        raise ModelError(
            f"the shards lack {len(missing)} of the model's weights",
            file=str(directory),
            expected=", ".join(missing[:3]) + (" …" if len(missing) > 3 else ""),
            found=", ".join(list(plain)[:3]) + " …",
            hint="is it the directory of the model's shards, and not of its optimizer's?",
        )
    model.load_state_dict(chosen, strict=False)
    model.tie_weights()
    idle = [name for name in plain if name not in used and "optim" not in name]
    return [f"weights the model does not use: {', '.join(idle[:3])}"] if idle else []
