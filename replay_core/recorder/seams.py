"""The places of torch where calls, backwards, optimizers and the program's end can be seen from outside.

Each wraps one function of torch and tells a listener; what the function does and returns stays its own. A listener
that fails is said once and never an error of the trainer's. Nothing is told from within a compiled region: tracing sees
the function alone.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

#: Given to a listener of calls: module, positional arguments, keyword arguments, output.
Called = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]


class Guard:
    """Calls listeners; the first failure is said, the others are counted."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.failures = 0

    def __call__(self, listener: Callable[..., None], *args: Any) -> None:
        try:
            listener(*args)
        except Exception as error:
            self.failures += 1
            if self.failures == 1:
                self._say(f"not everything is recorded, training goes on: {error}")


def outermost_calls(
    torch: Any, begins: Callable[[Any], None], called: Called, ended: Callable[[], None], guard: Guard
) -> None:
    """Tell every call of a module from outside any module's, per thread; not the calls a backward repeats.

    Args:
        begins, ended: before the call, and after it whether it raised or not.

    The class's `__call__` and not torch's global hooks: those go into every compiled graph, are not told of the
    module when its forward raises, and keep `module.compile()` from being seen at all.
    """
    original = torch.nn.Module.__call__
    inside = threading.local()
    compiling = _compiling(torch)

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        if compiling() or getattr(inside, "now", False) or _in_backward(torch):
            return original(module, *args, **kwargs)
        inside.now = True
        guard(begins, module)
        try:
            output = original(module, *args, **kwargs)
        finally:
            inside.now = False
            guard(ended)
        guard(called, module, args, kwargs, output)
        return output

    torch.nn.Module.__call__ = call


def backwards(torch: Any, began: Callable[[Any], None], guard: Guard) -> None:
    """Tell every scalar that a backward starts from, before it runs."""
    original = torch.autograd.backward
    compiling = _compiling(torch)

    def backward(*args: Any, **kwargs: Any) -> Any:
        if not compiling() and not _in_backward(torch):
            given = args[0] if args else kwargs.get("tensors", ())
            for tensor in (given,) if isinstance(given, torch.Tensor) else tuple(given):
                if tensor.numel() == 1:
                    guard(began, tensor)
        return original(*args, **kwargs)

    torch.autograd.backward = backward


def optimized_weights(torch: Any, optimized: Callable[[list[Any]], None], guard: Guard) -> None:
    """Tell the parameters that an optimizer is given."""
    original = torch.optim.Optimizer.add_param_group

    def add_param_group(optimizer: Any, param_group: Any) -> None:
        original(optimizer, param_group)
        guard(lambda: optimized(optimizer.param_groups[-1]["params"]))

    torch.optim.Optimizer.add_param_group = add_param_group


def scaled_losses(torch: Any, scaled: Callable[[Any, Any, Any], None], guard: Guard) -> None:
    """Tell what a gradient scaler makes of a loss: the loss, the scaled loss, and its scale."""
    scaler_class = getattr(getattr(torch, "amp", None), "GradScaler", None)
    if scaler_class is None:
        return
    original = scaler_class.scale

    def scale(scaler: Any, outputs: Any) -> Any:
        result = original(scaler, outputs)
        if isinstance(outputs, torch.Tensor) and result is not outputs:
            guard(scaled, outputs, result, scaler._scale)
        return result

    scaler_class.scale = scale


def clipping(torch: Any, before: Callable[[list[Any]], None], guard: Guard) -> None:
    """Tell the parameters whose gradients are about to be clipped."""
    original = torch.nn.utils.clip_grad_norm_

    @functools.wraps(original)
    def clip_grad_norm_(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        weights = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        guard(before, weights)
        return original(weights, *args, **kwargs)

    torch.nn.utils.clip_grad_norm_ = clip_grad_norm_


def autocasts(torch: Any, entered: Callable[[str], None], guard: Guard) -> None:
    """Tell the dtype of every autocast that is switched on."""
    original = torch.autocast.__enter__

    def enter(context: Any) -> Any:
        if getattr(context, "_enabled", False):
            guard(entered, str(getattr(context, "fast_dtype", "")).removeprefix("torch."))
        return original(context)

    torch.autocast.__enter__ = enter


def hard_exit(before: Callable[[], None], guard: Guard) -> None:
    """Tell of `os._exit`, which runs no exit handler."""
    original = os._exit

    def _exit(status: int) -> None:
        guard(before)
        original(status)

    os._exit = _exit  # type: ignore[assignment]


def trained_by(loss: Any, roots: Mapping[Any, str], roles: list[str]) -> str | None:
    """The role of the model whose weights a loss has gradients for, the first of `roles` (those called with gradients)
    where they are several's; None where none was called.

    With one role there is nothing to look for. With more, the loss's graph is walked to the weights it ends in.
    """
    if len(roles) < 2:
        return roles[0] if roles else None
    owner = {id(weight): role for root, role in roots.items() for weight in root.parameters()}
    waiting, seen, found = [loss.grad_fn], set(), set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found.add(owner.get(id(getattr(node, "variable", None))))
        waiting += [inner for inner, _ in node.next_functions]
    return next((role for role in roles if role in found), roles[-1])


#: Nodes of a loss's graph that are looked at, before its call is unknown.
_MOST_NODES = 10_000


def sequence_numbers(tensors: Iterable[Any]) -> frozenset[int]:
    """The numbers of the autograd nodes that made these tensors: later nodes of a thread have larger ones. A number
    keeps no graph alive, as a node does.
    """
    nodes = (getattr(tensor, "grad_fn", None) for tensor in tensors)
    return frozenset(int(node._sequence_nr()) for node in nodes if node is not None and hasattr(node, "_sequence_nr"))


def made_from(loss: Any, calls: Mapping[int, frozenset[int]]) -> int | None:
    """Which one of several calls a loss was made from, by the numbers of what each put out; None where that is none of
    them, or several.
    """
    # Threads count each for itself, and what a call hands through is the one's before it as well.
    several = Counter(number for numbers in calls.values() for number in numbers)
    made = {number: call for call, numbers in calls.items() for number in numbers if several[number] == 1}
    if not made:
        return None
    waiting, seen, found = [loss.grad_fn], set[Any](), set[int]()
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen or not hasattr(node, "_sequence_nr"):
            continue
        seen.add(node)
        if (call := made.get(int(node._sequence_nr()))) is not None:
            found.add(call)
        elif int(node._sequence_nr()) > min(made):
            waiting += [inner for inner, _ in node.next_functions]
    return found.pop() if len(found) == 1 else None


def _compiling(torch: Any) -> Callable[[], bool]:
    return getattr(getattr(torch, "compiler", None), "is_compiling", bool)


def _in_backward(torch: Any) -> bool:
    """Whether this thread runs a backward: activation checkpointing computes modules again there."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


def rank_now() -> int:
    """This process's rank: of the process group, else of the environment, else 0."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return int(os.environ.get("RANK", "0"))
