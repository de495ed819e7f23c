"""What inference engines make of a checkpoint's parameters: fused projections, stacked experts, a tied head. Data.

Sources: vLLM's `stacked_params_mapping` and `make_expert_params_mapping` (w1 gate, w3 up, w2 down), sglang's model
files (the same names), transformers 5 (`experts.gate_up_proj`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct

from replay_core.regexes import regex

#: A projection of an engine -> those of the checkpoint, in the order their rows lie in it, by each family of names.
#: `make integrations` holds it to the loaders' own tables.
FUSED = {
    "qkv_proj": (("q_proj", "k_proj", "v_proj"), ("query", "key", "value")),
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3"), ("w2", "w1"), ("c_fc_0", "c_fc_1")),
    "fused_qkv_a_proj": (("q_a_proj", "kv_a_proj_with_mqa"),),
    "fused_qkv_a_proj_with_mqa": (("q_a_proj", "kv_a_proj_with_mqa"),),
    "fused_qkv_a_g_proj": (("q_a_proj", "kv_a_proj_with_mqa", "g_proj"),),
    "fused_qkv_a_g_proj_with_mqa": (("q_a_proj", "kv_a_proj_with_mqa", "g_proj"),),
    "in_proj_ba": (("in_proj_b", "in_proj_a"),),
    "in_proj_qkvg": (("q_proj", "k_proj", "v_proj", "g_proj"),),
    "fused_qkvg_proj": (("q_proj", "k_proj", "v_proj", "g_proj"),),
    "fused_wqa_wkv": (("wq_a", "wkv"),),
    "fused_wkv_wgate": (("wkv", "wgate"),),
    "wk_weights_proj": (("wk", "weights_proj"),),
    "merged_qkv": (("wq", "wk", "wv"),),
}
#: A stack of experts [experts, rows, columns] -> what each expert's rows are made of, by either family of names.
STACKED = {
    "w13_weight": (("gate_proj", "up_proj"), ("w1", "w3")),
    "w2_weight": (("down_proj",), ("w2",)),
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
#: A stack of one engine under another's name.
_STACK_ALIASES = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
_STACK = regex(r"(.*\bexperts)\.(w13_weight|w2_weight|gate_up_proj|down_proj)")

#: What an engine makes itself and no trainer sends.
ENGINE_OWN = regex(
    r"(?:.*\.)?(?:rotary_emb\..*|cos_sin_cache|inv_freq|attn\.(?:mqa_)?(?:_?[qkv]|prob)_scale.*|.*_scale(?:_inv)?|.*zero_point)"
)
#: Rows of these are padded to a multiple of 64 before they are cut (vLLM's VocabParallelEmbedding).
VOCABULARY = regex(r"(?:.*\.)?(?:embed_tokens|wte|word_embeddings|lm_head|embed_out)\.(?:weight|bias)")
_HEAD = regex(r"(.*\.)?(?:lm_head|embed_out)\.weight")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_LEADING = regex(r"^(?:(?:model|language_model|transformer|gpt_neox|actor|module)\.)+")


class Piece(Struct, frozen=True):
    """A parameter of the checkpoint that an engine's is made of. `label` is "" where it is all of it; `expert` is its
    place in a stack, and `of_stack` says that the checkpoint's is a stack, too.
    """

    label: str
    source: str
    expert: int | None = None
    of_stack: bool = False


def short(name: str) -> str:
    """A parameter's name without what models are wrapped in: what both sides call alike."""
    return _LEADING.sub("", name.removeprefix("param."))


def pieces(name: str, has: Callable[[str], bool], experts: int | None = None) -> tuple[Piece, ...]:
    """What an engine's parameter is made of, all under short names; () where the checkpoint has nothing for it.

    Args:
        has: whether the checkpoint has a parameter of that short name.
        experts: length of a stack, where the parameter may be one.
    """
    if has(name):
        return (Piece("", name),)
    for found in (_fused(name, has), _stack(name, has, experts), _tied(name, has)):
        if found:
            return found
    return ()


def _fused(name: str, has: Callable[[str], bool]) -> tuple[Piece, ...]:
    parts = name.split(".")
    for at, part in enumerate(parts):
        families = [
            [(one, ".".join([*parts[:at], one, *parts[at + 1 :]])) for one in made_of]
            for made_of in FUSED.get(part, ())
        ]
        # The family that the checkpoint has whole; else the first of which it has some, so that the rest is missed.
        for enough in (all, any):
            for sources in families:
                if enough(has(source) for _, source in sources):
                    return tuple(Piece(one, source) for one, source in sources)
    return ()


def _stack(name: str, has: Callable[[str], bool], experts: int | None) -> tuple[Piece, ...]:
    found = _STACK.fullmatch(name)
    if found is None or experts is None:
        return ()
    prefix, kind = found.groups()
    alias = f"{prefix}.{_STACK_ALIASES.get(kind, kind)}"
    if has(alias):
        return tuple(Piece(f"expert {e}", alias, e, of_stack=True) for e in range(experts))
    for family in STACKED[kind]:
        made = tuple(
            Piece(f"expert {e} {one}", f"{prefix}.{e}.{one}.weight", e)
            for e in _numbered(prefix, family[0], has)
            for one in family
        )
        if made:
            return made
    return ()


def _numbered(prefix: str, one: str, has: Callable[[str], bool]) -> Iterator[int]:
    number = 0
    while has(f"{prefix}.{number}.{one}.weight"):
        yield number
        number += 1


def _tied(name: str, has: Callable[[str], bool]) -> tuple[Piece, ...]:
    if _HEAD.fullmatch(name) is None:
        return ()
    return tuple(Piece("tied to the embedding", one) for one in _EMBEDDINGS if has(one))[:1]
