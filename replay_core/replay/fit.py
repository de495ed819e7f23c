"""Whether a batch fits a model, before a forward finds out: its vocabulary, its positions, its attention's mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from replay_core.errors import CellError, ModelError
from replay_core.replay.batch import MicroBatch
from replay_core.replay.packing import Arrangement

#: A table of learned positions may hold this many rows more than the config says (OPT begins at 2).
_OFFSET = 16
#: Factors between two sets of positions that tell whether a model heeds them; a constant shift would not (RoPE).
_STRETCH = 3


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
        # A table of positions may end: stretch within the tokens there are.
        far = backbone(**given, position_ids=(positions_1T * _STRETCH) % ids_1T.shape[1]).last_hidden_state
    except TypeError:
        return False
    return not torch.equal(near, far)


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
