"""Whether a batch fits a model, before a forward finds out: its vocabulary, its positions, its attention's mask."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from replay_core.dumps.containers.json_lines import read_object
from replay_core.errors import CellError, DumpError, ModelError
from replay_core.regexes import regex
from replay_core.replay.batch import MicroBatch
from replay_core.replay.packing import Arrangement

#: A table of learned positions may hold this many rows more than the config says (OPT begins at 2).
_OFFSET = 16
#: Factors between two sets of positions that tell whether a model heeds them; a constant shift would not (RoPE).
_STRETCH = 3
#: Of a config: its bytes, the layers it may ask for, the experts (Doge's are 16,384 rows of a table), and of both the
#: product: Doge's is the largest of the configurations that transformers knows.
_MOST_CONFIG, _MOST_LAYERS, _MOST_EXPERTS, _MOST_PARTS = 1 << 24, 1 << 12, 1 << 14, 1 << 19
_PARTS = regex(r"(?:num|n)_\w*(?:layer|expert|block)\w*|\w*_layers|layers|depth")
#: Numbers a model may have beside those stored (tables of positions, ties), and for a stored byte (four bits and less).
_FREE, _PER_BYTE = 1 << 26, 8
#: From so many stored bytes on a config is taken at its word: building a large model twice takes seconds.
_SURELY = 1 << 31


def need_vocabulary(vocabulary: int, batch: MicroBatch, model: str) -> None:
    """Refuse tokens that the model has no embedding for. Padding is the padded cell's own matter (`need_padding`).

    Raises:
        ModelError: the ids there are, and those there may be.
    """
    ids_N = batch.ids_BS[batch.valid_BS]
    if not ids_N.size:
        return
    low, high = int(ids_N.min()), int(ids_N.max())
    if low >= 0 and high < vocabulary:
        return
    raise ModelError(
        "the batch holds negative token ids" if low < 0 else "the model's vocabulary is too small for the batch",
        file=model,
        tensor="input_ids",
        expected=f"token ids 0..{vocabulary - 1}",
        found=f"token ids {low}..{high}",
        hint="is it the model the batch was recorded with? random:llama-tiny sizes itself to the batch",
    )


def need_layers(directory: Path) -> None:
    """Refuse a config of more layers or experts than any model has: building them alone takes all memory there is.

    Raises:
        ModelError: the name of the number, and how large it is; or the config is no JSON object of a sane depth.
    """
    if not (directory / "config.json").is_file():
        return  # transformers says that it is missing
    try:
        level: list[Any] = [read_object(directory / "config.json", "the model's config", _MOST_CONFIG)]
    except DumpError as error:
        raise ModelError(error.message, file=error.file, expected=error.expected, found=error.found) from None
    layers, experts = ("layers", 1), ("experts", 1)
    while level:
        one = level.pop()
        pairs = one.items() if isinstance(one, dict) else enumerate(one)
        for name, value in pairs:
            if isinstance(value, (dict, list)):
                level.append(value)
            elif isinstance(value, int) and _PARTS.fullmatch(str(name)):
                if "expert" in str(name):
                    experts = max(experts, (str(name), value), key=lambda told: told[1])
                else:
                    layers = max(layers, (str(name), value), key=lambda told: told[1])
    for told, value, most in (
        (*layers, _MOST_LAYERS), (*experts, _MOST_EXPERTS),
        (f"{layers[0]} times {experts[0]}", layers[1] * experts[1], _MOST_PARTS),
    ):  # fmt: skip
        if value > most:
            raise ModelError(
                "the model's config asks for more parts than any model has",
                file=str(directory / "config.json"), expected=f"{told} of at most {most:,}", found=f"{value:,}"[:40],
            )  # fmt: skip


def need_stored(kind: Any, config: Any, directory: Path) -> None:
    """Refuse a config of a model far larger than the weights beside it: what is missing would be made up, in memory.

    Raises:
        ModelError: how large the config's model is, and what is stored.
    """
    stored = sum(file.stat().st_size for end in ("*.safetensors", "*.bin") for file in directory.glob(end))
    if stored > _SURELY:
        return
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = kind.from_config(config)
    asked = sum(one.numel() for part in (model.parameters(), model.buffers()) for one in part)
    if asked > _FREE + _PER_BYTE * stored:
        raise ModelError(
            "the model's config asks for a far larger model than its weights are", file=str(directory / "config.json"),
            expected=f"at most {_FREE + _PER_BYTE * stored:,} numbers, as {stored:,} bytes are stored",
            found=f"{asked:,}", hint="do config.json and the weights belong to one model?",
        )  # fmt: skip


def need_padding(vocabulary: int, arrangement: Arrangement) -> None:
    """Refuse padding ids that the model has no embedding for: the padded forward embeds those as well.

    Raises:
        CellError: the ids in padding.
    """
    ids = arrangement.input_ids
    if int(ids.min(initial=0)) >= 0 and int(ids.max(initial=0)) < vocabulary:
        return
    outside = np.unique(ids[(ids < 0) | (ids >= vocabulary)])
    raise CellError(
        "the padding holds ids that the model has no embedding for: the padded batch cannot go through it",
        tensor="input_ids",
        expected=f"token ids 0..{vocabulary - 1} in padding too",
        found=", ".join(str(int(one)) for one in outside[:4]),
        hint="rows alone and packed cells have no padding, so they run; trainers put another id in place of -100",
    )


def need_positions(backbone: Any, config: Any, longest: int) -> str | None:
    """What to say of rows longer than the model was made for.

    Raises:
        CellError: the model looks its positions up in a table that is too short.
    """
    reach = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if not reach or longest <= reach:
        return None
    words = backbone.get_input_embeddings()
    tables = [
        module.num_embeddings
        for module in backbone.modules()
        if isinstance(module, torch.nn.Embedding) and module is not words
    ]
    if any(reach <= rows <= reach + _OFFSET for rows in tables):
        raise CellError(
            f"a row of {longest} tokens is longer than the model's table of positions",
            tensor="position_ids",
            expected=f"at most {reach} tokens",
            found=f"{longest} tokens",
            hint="another model, or rows that fit it: --rows",
        )
    return f"rows of {longest} tokens pass the {reach} positions the model was made for"


def heeds_positions(backbone: Any, ids_1T: torch.Tensor) -> bool:
    """Whether position_ids change what the model computes: one that takes any keyword may drop them in silence."""
    positions_1T = torch.arange(ids_1T.shape[1], device=ids_1T.device)[None]
    given = {"input_ids": ids_1T, "attention_mask": None, "use_cache": False}
    try:
        near = backbone(**given, position_ids=positions_1T).last_hidden_state
    except TypeError:
        return False
    try:
        # A table of positions may end: stretch within the tokens there are.
        far = backbone(**given, position_ids=(positions_1T * _STRETCH) % ids_1T.shape[1]).last_hidden_state
        # What has no positions of its own may still begin anew where they do.
        anew = backbone(**given, position_ids=positions_1T % (ids_1T.shape[1] // 2)).last_hidden_state
    except Exception:  # whatever a model's own code makes of positions that no batch has: it reads them
        return True
    return not torch.equal(near, far) or not torch.equal(near, anew)


def mask_note(implementation: str) -> str | None:
    """What to say of an attention function that was registered without its mask (transformers#45811)."""
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    except ImportError:
        return None
    if implementation in ALL_MASK_ATTENTION_FUNCTIONS:
        return None
    return (
        f"the attention {implementation!r} is registered without its mask function: the library gives it no mask, so "
        "tokens see padding and other samples (AttentionMaskInterface.register, transformers#45811)"
    )


def not_finite(causal_lm: Any) -> str | None:
    """The first weight that is not finite, in the model's order."""
    for name, parameter in causal_lm.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            return str(name)
    return None
