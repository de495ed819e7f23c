"""A model whose own forward does more than call its backbone: there the whole of it runs, and its backbone is heard.

A factory's model may wrap or replace `forward`: make its mask from the ids, count positions, scale the embeddings. A
replay that called the backbone beneath it would leave that out, and agree with a computation nobody trains with.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay_core.errors import OwnForwardError
from replay_core.replay.libraries import transformers


def has_own_forward(causal_lm: Any) -> bool:
    """Whether `forward` is not the one that transformers gives this class, or has hooks."""
    if causal_lm._forward_pre_hooks or causal_lm._forward_hooks:
        return True
    return not _is_the_librarys(causal_lm.forward)


def _is_the_librarys(forward: Any) -> bool:
    # Not unwrapped: a wrapper that names what it wraps is a wrapper still, and transformers' own lie in its folder.
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    folder = Path(transformers.__file__).parent
    return code is not None and folder in Path(code.co_filename).parents


@contextlib.contextmanager
def rows_in_order(backbone: Any, given_BS: Any) -> Iterator[None]:
    """While a backbone with a forward of its own is called with these tokens. None of its tensors can be followed where
    it deals its rows out otherwise.

    Raises:
        OwnForwardError: its embedding is given the rows in another order.
    """
    try:
        words = None if _is_the_librarys(backbone.forward) else backbone.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        words = None
    if words is None:
        yield
        return
    looked_up: list[Any] = []
    handle = words.register_forward_pre_hook(lambda _module, args: looked_up.extend(args[:1]))
    try:
        yield
    finally:
        handle.remove()
    if any(_is_another_order(ids_BS, given_BS) for ids_BS in looked_up):
        raise _another_order()


def taken(causal_lm: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Those of the inputs that its forward has a name for, or all where it takes whatever it is given."""
    parameters = inspect.signature(causal_lm.forward).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return inputs
    return {name: one for name, one in inputs.items() if name in parameters}


class WholeModel:
    """Called as its backbone is, and answers what the backbone put out while the whole model ran."""

    def __init__(self, causal_lm: Any) -> None:
        self._causal_lm = causal_lm
        taken = inspect.signature(causal_lm.forward).parameters
        # The logits of every token are none of what is asked for here.
        self._fewest = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}

    def __call__(self, **inputs: Any) -> Any:
        """The backbone's output, `last_hidden_state` [b, s, D] of the tokens that `input_ids` [b, s] gives.

        Raises:
            OwnForwardError: the model did not call its backbone with these tokens, one for one, or not in this order.
        """
        heard: list[Any] = []
        given: list[Any] = []

        def hear(_module: Any, args: tuple[Any, ...], named: dict[str, Any], put: Any) -> None:
            heard.append(put)
            given.append(named.get("input_ids", args[0] if args else None))

        handle = self._causal_lm.base_model.register_forward_hook(hear, with_kwargs=True)
        try:
            self._causal_lm(**taken(self._causal_lm, inputs), **self._fewest)
        finally:
            handle.remove()
        shapes = [tuple(one.last_hidden_state.shape[:2]) for one in heard if hasattr(one, "last_hidden_state")]
        if shapes != [tuple(inputs["input_ids"].shape)]:
            raise OwnForwardError(
                "the model's own forward does not call its backbone once with the tokens it is given",
                expected=str(tuple(inputs["input_ids"].shape)),
                found=", ".join(map(str, shapes)) or "no call of the backbone",
                hint="--forward MODULE:FUNCTION runs your own code and reads its log-probabilities",
            )
        if _is_another_order(given[0], inputs["input_ids"]):
            raise _another_order()
        return heard[0]


def _another_order() -> OwnForwardError:
    return OwnForwardError(
        "the model's own forward gives its backbone the rows in another order",
        expected="the rows as they are given",
        hint="--forward MODULE:FUNCTION runs your own code and reads its log-probabilities",
    )


def _is_another_order(ids_BS: Any, given_BS: Any) -> bool:
    """Whether these are the given rows, and not row by row."""
    if ids_BS is None or ids_BS.shape != given_BS.shape or bool((ids_BS == given_BS).all()):
        return False
    return sorted(ids_BS.tolist()) == sorted(given_BS.tolist())
