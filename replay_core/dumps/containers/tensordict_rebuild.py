"""tensordict's two spellings in a pickle: one storage cut into leaves, or a dictionary of tensors.

Both come out as `{"__class__": "tensordict.TensorDict", "state": {name: tensor}}`; a nested one's state is
the same again.
"""

from __future__ import annotations

from typing import Any

from replay_core.budget import spend_values
from replay_core.dtypes import ITEMSIZE
from replay_core.dumps.containers.loading import Loading, Span, Storage
from replay_core.dumps.containers.torch_rebuild import NESTED, unreadable, view
from replay_core.records import FileBytes, TensorRef

CLASS = "tensordict.TensorDict"
#: What is stacked is kept apart, each under its place in the stack.
STACK = "tensordict._lazy.LazyStackedTensorDict"
#: A jagged tensor's leaves, each under its name with one of these before it.
_JAGGED = {"<NJT_VALUES>": "values", "<NJT_LENGTHS>": "lengths", "<NJT_OFFSETS>": "offsets"}
_RESERVED = frozenset({"cls", "non_tensors", "leaves", "cls_metadata"})


def make_td(loading: Loading, args: tuple[Any, ...]) -> dict[str, Any]:
    """`_make_td(class, state)`; a lazy stack's state holds the tensordicts it is of."""
    cls, state = args
    if "_tensordict" in state:
        return {"__class__": CLASS, "state": state["_tensordict"]}
    return {"__class__": repr(cls), "state": state}


def rebuild_consolidated(loading: Loading, args: tuple[Any, ...]) -> dict[str, Any]:
    """`_rebuild_tensordict_files_consolidated(metadata, storage)`."""
    metadata, storage = args
    if not isinstance(storage, TensorRef) or storage.dtype != "uint8" or not isinstance(storage.source, FileBytes):
        raise loading.malformed("a consolidated tensordict without its storage")
    if storage.source.strides is not None:
        raise loading.malformed("a consolidated tensordict whose storage is not contiguous")
    return _consolidated(loading, metadata, storage.source, 0)


def _consolidated(loading: Loading, metadata: dict[str, Any], storage: FileBytes, depth: int) -> dict[str, Any]:
    if depth > 8:
        raise loading.malformed("a tensordict nested more than 8 deep")
    spend_values(len(metadata) + len(metadata["leaves"]) + len(metadata["non_tensors"]), "leaves of a tensordict")
    state: dict[str, Any] = {name: _wrapped(value) for name, value in metadata["non_tensors"].items()}
    for name, leaf in metadata["leaves"].items():
        part, label = _of_jagged(name)
        if part is None:
            state[name] = _leaf(loading, leaf, storage)
            continue
        inner = state.setdefault(label, {"__class__": NESTED, "state": {}})["state"]
        inner[part] = _leaf(loading, leaf, storage)
        if part == "offsets" and len(leaf) > 5 and type(leaf[5]) is int:
            inner["_ragged_idx"] = leaf[5]
    for name, nested in metadata.items():
        if name not in _RESERVED and type(nested) is dict and "leaves" in nested:
            state[name] = _consolidated(loading, nested, storage, depth + 1)
    facts = metadata.get("cls_metadata")
    if type(facts) is dict and "stack_dim" in facts:
        members = [name for name in state if type(name) is str and name.isdecimal()]
        return {"__class__": STACK, "state": {"tensordicts": [state[name] for name in sorted(members, key=int)]}}
    return {"__class__": CLASS, "state": state}


def _wrapped(value: Any) -> Any:
    """`(data, batch size, device)` of what is no tensor; its first releases leave the device out."""
    return value[0] if type(value) is tuple and len(value) in (2, 3) and type(value[1]) is list else value


def _of_jagged(name: Any) -> tuple[str | None, str]:
    """Which part of a jagged tensor a leaf is, and that tensor's name."""
    for prefix, part in _JAGGED.items():
        if type(name) is str and name.startswith(prefix):
            return part, name[len(prefix) :]
    return None, ""


def _leaf(loading: Loading, leaf: Any, storage: FileBytes) -> TensorRef:
    """`(dtype, shape, start, stop, padding)`, in bytes of the storage."""
    name, shape, start, stop = leaf[:4]
    dtype = name.removeprefix("torch.")
    if dtype not in ITEMSIZE:
        return unreadable(dtype, shape, f"numpy has no dtype like {dtype}")
    if not 0 <= start <= stop <= storage.nbytes:
        raise loading.malformed("a tensordict's leaf reaches past its storage")
    span = Span(loading.region, storage.offset + start, stop - start)
    return view(loading, Storage(span, dtype, ITEMSIZE[dtype]), 0, tuple(shape), None)
