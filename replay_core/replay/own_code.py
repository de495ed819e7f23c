"""The user's own code: a model factory, or the trainer's forward. Only ever named on the command line.

    --model factory:module:function      function() -> a causal language model, or any module that makes logits
    --forward module:function            function(model, batch) -> log-probabilities of the next tokens

`batch` is a mapping of tensors: input_ids, attention_mask, position_ids [B, S] and, where it is known,
response_mask [B, S]; `temperature` a number. The answer is [B, S] or [B, S-1] (index t is about token t + 1),
or [B, A] for the last A tokens; zeros or anything else in padding.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from replay_core.errors import CellError, RequestError
from replay_core.replay.plain_model import as_causal_lm, as_written, is_causal_lm


def function(reference: str, folder: str | None) -> Callable[..., Any]:
    """The function `module:function` names, imported with `folder` in front of the path.

    Raises:
        RequestError: there is no such module or function.
        CellError: importing it raised.
    """
    module_name, _, name = reference.partition(":")
    if not name:
        raise RequestError("code is named module:function", expected="trainer.models:actor", found=reference)
    edition(folder)
    with _importing_from(folder):
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise RequestError(
                f"there is no module {error.name!r}",
                expected=f"a module on the path or in {folder or 'the current directory'}",
                found=reference,
            ) from None
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            raise CellError(f"importing {module_name} failed: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise RequestError(f"{module_name} has no function {name!r}", found=reference)
    return found  # type: ignore[no-any-return]


#: Of each folder: which edition of its code runs, and the files it was imported from as they were then.
_editions: dict[Path, tuple[int, dict[str, tuple[int, int]]]] = {}
#: rldbg itself is nobody's trainer, and neither is what is installed, though the folder may hold both.
_NOT_THEIRS = ("replay_core", "tui_debugger")
#: Wrappers that hand on what they are given -> where what they wrap is.
_HANDS_ON = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module", "DataParallel": "module"}
_INSTALLED = tuple(
    os.path.join(os.path.normpath(sysconfig.get_path(name)), "")
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


def edition(folder: str | None) -> int:
    """How often the code in `folder` (else the current directory) was seen to have changed since it was first imported.

    A warm child outlives an edit. Code that changed on disk is forgotten here, and imported anew when it is next named.
    """
    root = Path(folder or Path.cwd()).resolve()
    number, known = _editions.get(root, (0, {}))
    now = _imported(root)
    if any(now.get(name, seen) != seen for name, seen in known.items()):
        for name in now:
            del sys.modules[name]
        importlib.invalidate_caches()
        number, now = number + 1, {}
    _editions[root] = number, {name: known.get(name, seen) for name, seen in now.items()}
    return number


def _imported(root: Path) -> dict[str, tuple[int, int]]:
    """Modules that came from sources below `root`: time and size of the file, as they are now."""
    # Asked a dozen times of a replay, of thousands of modules: as text, a path object of each would take its seconds.
    below = os.path.join(root, "")
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if not file.endswith(".py") or name == "__main__" or name.partition(".")[0] in _NOT_THEIRS:
            continue
        path = os.path.normpath(file)
        if path.startswith(below) and not path.startswith(_INSTALLED):
            with contextlib.suppress(OSError):
                stat = os.stat(path)
                found[name] = (stat.st_mtime_ns, stat.st_size)
    return found


def forget(reference: str) -> None:
    """Let what is named be imported anew: what it has kept since is gone."""
    sys.modules.pop(reference.partition(":")[0], None)


def model(reference: str, folder: str | None) -> Any:
    """The model a factory makes, in what it laid around it (`unwrapped`).

    Raises:
        RequestError, CellError: as `function`; or the factory raised, or returned nothing that makes logits of tokens.
    """
    made = _called(reference, function(reference, folder))
    edition(folder)  # what it imported while it ran counts too
    within = unwrapped(made)
    if isinstance(within, torch.nn.Module):
        _refuse_unfinished(within)
    if not is_causal_lm(within):
        as_causal_lm(within, lambda: unwrapped(_called(reference, function(reference, folder))))
    return made


def _refuse_unfinished(model: torch.nn.Module) -> None:
    """Raises CellError where its weights have no size yet, or cannot be worked with outside of where they were made."""
    for name, one in model.named_parameters():
        if torch.nn.parameter.is_lazy(one):
            raise CellError(
                f"the factory's model has no size of {name} before its first call (a lazy module)",
                expected="a model whose weights are there", found=type(model).__name__,
                hint="call it once with two tokens within the factory",
            )  # fmt: skip
        if one.is_inference():
            raise CellError(
                f"the factory's {name} was made under torch.inference_mode(), and can be written by nobody outside it",
                expected="weights made as usual", found=type(model).__name__,
                hint="torch.no_grad() in its place: a replay takes no gradients that are not asked for",
            )  # fmt: skip


def unwrapped(made: Any) -> Any:
    """The causal language model within what trainers lay around it and what hands its inputs on as they are:
    torch.compile, data parallelism, and PEFT, whose layers lie in the model itself.

    Raises:
        CellError: PEFT puts tokens of its own in front (prompt tuning): what it wraps is another computation.
    """
    while True:
        if hasattr(made, "peft_config") and hasattr(made, "get_base_model"):
            if getattr(getattr(made, "active_peft_config", None), "is_prompt_learning", False):
                raise CellError(
                    "the factory's model has tokens of its own in front of every row (PEFT's prompt learning), which a "
                    "replay cannot lay out",
                    found=str(getattr(made.active_peft_config, "peft_type", "")),
                    hint="--forward MODULE:FUNCTION runs your own code and reads its log-probabilities",
                )
            made = made.get_base_model()
        elif type(made).__name__ in _HANDS_ON:
            made = getattr(made, _HANDS_ON[type(made).__name__])
        else:
            return made


def logprobs(reference: str, folder: str | None, causal_lm: Any, batch: dict[str, Any]) -> torch.Tensor:
    """What the trainer's own forward says: float32 on the CPU, [B, S], index t about token t + 1.

    Raises:
        CellError: it raised, or returned something that is no log-probabilities of this batch.
    """
    with as_written(unwrapped(causal_lm)):
        answer = _called(reference, function(reference, folder), causal_lm, batch)
    rows, width = batch["input_ids"].shape
    if not isinstance(answer, torch.Tensor) or answer.ndim != 2 or answer.shape[0] != rows or answer.shape[1] > width:
        found = list(answer.shape) if isinstance(answer, torch.Tensor) else type(answer).__name__
        raise CellError(
            f"{reference} returned no log-probabilities of this batch",
            expected=f"[{rows}, {width}], [{rows}, {width - 1}] or [{rows}, the last A tokens]",
            found=str(found),
        )
    whole = torch.zeros(rows, width)
    said = answer.detach().float().cpu()
    if said.shape[1] == width:
        return said
    # [B, S-1] starts with token 1; a suffix ends with the last token.
    whole[:, width - 1 - said.shape[1] : width - 1] = said
    return whole


def _called(reference: str, call: Callable[..., Any], *arguments: Any) -> Any:
    mine = os.getpid()
    try:
        return call(*arguments)
    except KeyboardInterrupt:
        raise
    # SystemExit as well: the user's code must not end the child in the guise of an answer.
    except BaseException as error:
        traceback.print_exc()
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        what = f"{reference} raised {type(error).__name__}: {first}"
        raise CellError(what, hint="the log holds the whole traceback") from error
    finally:
        if os.getpid() != mine:
            # A process that the code forked and let come back here would run the job a second time, and answer it.
            os._exit(0)


@contextlib.contextmanager
def _importing_from(folder: str | None) -> Iterator[None]:
    if folder is not None:
        sys.path.insert(0, folder)
    # Bytecode is told from its source by whole seconds and size: an edit within one would go unseen.
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes
        edition(folder)
        if folder is not None:
            with contextlib.suppress(ValueError):
                sys.path.remove(folder)
