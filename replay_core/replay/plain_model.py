"""A factory's model that is none of transformers': any torch module that makes logits of tokens.

It is given what a replay asks of a causal language model, in place: its class gets a parent more, so its modules and
weights keep their names. Its logits stand for its final hidden states, and its head leaves them as they are.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from replay_core.errors import CellError
from replay_core.replay.libraries import transformers

#: What its forward may call the tokens' mask (1 = a token) and their positions, the likeliest first.
_MASK = ("attention_mask", "attn_mask", "pad_mask", "padding_mask", "mask")
_POSITIONS = ("position_ids", "positions", "pos_ids", "pos", "position")
#: What makes one say all its logits that, asked for none, says the last alone, as nanoGPT's.
_TARGETS = ("targets", "labels", "target")
_HINT = "--forward MODULE:FUNCTION runs your own code and reads its log-probabilities"


class PlainModel:
    """What a module is besides, once `as_causal_lm` was here."""

    base_model_prefix = ""
    #: Its forward as it was written, and which of its arguments takes the mask, and the positions.
    _own_forward: Callable[..., Any]
    _own_class: type
    _arguments: Mapping[str, str]
    #: No mask at all, as of a pack or of rows without padding, is nothing that its forward has a word for.
    _needs_mask: bool
    _said_config: Any
    #: Its own code runs, for which its parts are what they were called.
    _is_inside = False

    @property
    def base_model(self) -> Any:
        theirs = self._modules.get("base_model")  # type: ignore[attr-defined]
        return theirs if self._is_inside and theirs is not None else self

    @property
    def config(self) -> Any:
        theirs = vars(self).get("config")
        return theirs if self._is_inside and theirs is not None else self._said_config

    def get_output_embeddings(self) -> torch.nn.Module:
        """Logits of what stands for final hidden states: the same."""
        theirs = getattr(super(), "get_output_embeddings", None)
        return theirs() if self._is_inside and theirs is not None else torch.nn.Identity()

    def get_input_embeddings(self) -> torch.nn.Module:
        """Raises AttributeError where none has a row for each word."""
        theirs = getattr(super(), "get_input_embeddings", None)
        if theirs is not None:
            return theirs()
        words = self._said_config.vocab_size
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, torch.nn.Embedding) and module.num_embeddings == words:
                return module
        raise AttributeError("no embedding has a row for each word")

    def get_submodule(self, target: str) -> torch.nn.Module:
        """By name, also where a part has a name that a replay asks for. Raises AttributeError where there is none."""
        first, _, rest = target.partition(".")
        part: Any = self._modules.get(first) if first else self  # type: ignore[attr-defined]
        if part is None:
            raise AttributeError(f"{type(self).__name__} has no module {target!r}")
        found: torch.nn.Module = part.get_submodule(rest) if rest else part
        return found

    def set_attn_implementation(self, name: str | None) -> None:
        """Of the models of transformers' within it. Raises what they raise."""
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, transformers.PreTrainedModel) and hasattr(module, "set_attn_implementation"):
                module.set_attn_implementation(name)
        self._said_config._attn_implementation = name


def is_causal_lm(model: Any) -> bool:
    """Whether a model has what a replay asks of one."""
    has_all = all(hasattr(model, name) for name in ("base_model", "config", "get_output_embeddings"))
    return has_all and hasattr(model.config, "_attn_implementation")


def as_causal_lm(model: Any, build: Callable[[], Any]) -> Any:
    """The module itself, which can be asked what a causal language model is asked.

    Args:
        build: makes another one: the first call of this one is left to the replay.

    Raises:
        CellError: it is no module, or makes no logits [B, S, V] of tokens [B, S].
    """
    arguments = _arguments(model)
    words, arguments = _words(build(), arguments)
    theirs = getattr(model, "config", None)

    class Config(transformers.PretrainedConfig):  # type: ignore[misc]
        """The module's own, and what a replay asks of one."""

        def __getattr__(self, name: str) -> Any:
            if theirs is None or name.startswith("__"):
                raise AttributeError(name)
            return getattr(theirs, name)

    config = Config()
    config.vocab_size = words
    within = [one.config for one in model.modules() if isinstance(one, transformers.PreTrainedModel)]
    config._attn_implementation = within[0]._attn_implementation if within else "eager"
    for one in within:
        one.use_cache = False  # with a cache, transformers takes a pack for one sequence
    own = type(model)
    model.__class__ = type(own.__name__, (_HeedingPositions if "positions" in arguments else _Counting, own), {
        "_own_forward": own.forward, "_own_class": own, "_arguments": arguments,
        "_needs_mask": _needs_mask(own.forward, arguments), "_said_config": config, "__module__": own.__module__,
    })  # fmt: skip
    return model


@contextlib.contextmanager
def as_written(model: Any) -> Iterator[None]:
    """A model is what its factory made of it while its trainer's own code holds it, which knows its own logits."""
    if not isinstance(model, PlainModel):
        yield
        return
    ours, model.__class__ = type(model), model._own_class
    try:
        yield
    finally:
        model.__class__ = ours


def _arguments(model: Any) -> dict[str, str]:
    """What its forward calls the tokens, their mask and their positions, where it takes those.

    Raises:
        CellError: it is no module, or cannot be called with tokens.
    """
    if not isinstance(model, torch.nn.Module):
        raise CellError(
            "the factory returned no model", expected="a torch module, or a transformers ...ForCausalLM",
            found=type(model).__name__,
        )  # fmt: skip
    if isinstance(model, torch.jit.ScriptModule):
        raise CellError("the factory's model cannot be asked", found="a scripted module", hint=_HINT)
    try:
        taken = inspect.signature(model.forward).parameters
    except (TypeError, ValueError) as error:
        raise CellError("the factory's model does not say what it takes", found=str(error), hint=_HINT) from error
    takes_any = any(one.kind is one.VAR_KEYWORD for one in taken.values())
    names = [name for name, one in taken.items() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    if not names and not takes_any:
        raise CellError("the factory's model cannot be called with tokens", found=type(model).__name__, hint=_HINT)
    found = {"tokens": "input_ids" if "input_ids" in names or not names else names[0]}
    if any(name.endswith("key_padding_mask") for name in names) and not set(_MASK) & set(names):
        # In torch's own modules such a mask is true where nothing is.
        raise CellError("the factory's model takes a mask whose sense is not known", found=", ".join(names), hint=_HINT)
    for what, words in (("mask", _MASK), ("positions", _POSITIONS)):
        # Where to begin is a number, whatever it is called.
        fitting = [word for word in words if word in names and not isinstance(taken[word].default, (int, float))]
        if fitting or takes_any:
            found[what] = (fitting or words)[0]
    return found


def _needs_mask(forward: Callable[..., Any], arguments: Mapping[str, str]) -> bool:
    named = inspect.signature(forward).parameters.get(arguments.get("mask", ""))
    return named is not None and named.default is named.empty


def _words(model: Any, arguments: dict[str, str]) -> tuple[int, dict[str, str]]:
    """How many words it has a logit of, and what it has to be given for one of every token."""
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    ids_1T = torch.tensor([[0, 1]], device=device)
    given = {arguments["tokens"]: ids_1T}
    if "mask" in arguments:
        given[arguments["mask"]] = torch.ones_like(ids_1T)
    if "positions" in arguments:
        given[arguments["positions"]] = torch.arange(2, device=device)[None]
    model.eval()
    logits = _tried(model, given)
    if logits.shape[:2] == (1, 1):
        taken = inspect.signature(model.forward).parameters
        if (name := next((one for one in _TARGETS if one in taken), None)) is not None:
            arguments = {**arguments, "targets": name}
            logits = _tried(model, {**given, name: ids_1T})
    if logits.ndim != len((1, 2, 0)) or logits.shape[:2] != ids_1T.shape:
        raise CellError(
            "the factory's model makes no logits of the tokens it is given", expected="[1, 2, V] of two tokens",
            found=str(list(logits.shape)), hint=_HINT,
        )  # fmt: skip
    return int(logits.shape[-1]), arguments


def _tried(model: Any, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Raises CellError where it fails, or puts out no tensor."""
    try:
        with torch.no_grad():
            return _logits(model(**given))
    except CellError:
        raise
    except Exception as error:
        raise CellError(
            f"the factory's model fails on two tokens: {type(error).__name__}: {error}",
            expected=f"logits [1, 2, V] of {', '.join(given)}", found=type(model).__name__, hint=_HINT,
        ) from error  # fmt: skip


def _logits(put: Any) -> torch.Tensor:
    found = put["logits"] if isinstance(put, Mapping) and "logits" in put else getattr(put, "logits", put)
    found = found[0] if isinstance(found, (tuple, list)) and found else found
    if not isinstance(found, torch.Tensor):
        raise CellError("the factory's model makes no logits", found=type(put).__name__, hint=_HINT)
    return found


def _put_out(
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
) -> Any:
    names = model._arguments
    given = {names["tokens"]: input_ids}
    if attention_mask is None and model._needs_mask:
        attention_mask = torch.ones_like(input_ids)
    if "mask" in names and attention_mask is not None:
        given[names["mask"]] = attention_mask
    if "positions" in names and position_ids is not None:
        given[names["positions"]] = position_ids
    if "targets" in names:
        given[names["targets"]] = input_ids  # it makes a loss of them, which nobody asks for
    before, model._is_inside = model._is_inside, True
    try:
        logits = _logits(type(model)._own_forward(model, **given))
    finally:
        model._is_inside = before
    return transformers.modeling_outputs.ModelOutput(logits=logits, last_hidden_state=logits)


class _Counting(PlainModel):
    """Counts its tokens by itself."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        return _put_out(self, input_ids, attention_mask, None)


class _HeedingPositions(PlainModel):
    """Is told where its tokens stand."""

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> Any:
        return _put_out(self, input_ids, attention_mask, position_ids)
