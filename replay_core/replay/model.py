"""Loads the model a plan names, onto the device, in the dtype and attention implementation asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct, field
from msgspec.structs import replace

from replay_core import progress_bars
from replay_core.budget import lift_limit
from replay_core.errors import ModelError, RldbgError, UnavailableError
from replay_core.replay import adapters, architectures, attention, fit, misread, own_code, sharded
from replay_core.replay.batch import MicroBatch
from replay_core.replay.compiling import Compiled
from replay_core.replay.double import ready_for_float64
from replay_core.replay.flags import DEFAULTS, Flags
from replay_core.replay.libraries import transformers
from replay_core.replay.plain_model import PlainModel
from replay_core.replay.plan import FACTORY, ReplayPlan
from replay_core.replay.references import RANDOM, cached
from replay_core.replay.versions import loaded_in, set_attention

#: The kernel of a replay where none is asked for.
SDPA = str(DEFAULTS["attention"])
#: What frameworks call a critic's head (OpenRLHF, TRL, verl) -> what transformers calls it.
_VALUE_HEADS = {r"^(?:v_head\.summary|v_head|value_head|classifier)\.": "score."}


class LoadedModel(Struct):
    """A causal language model, the reference it came from, and what to say about it.

    `known` keeps what probing the model told (its head, its last module), `compiled` its compiled callables:
    both are good as long as the weights stay where they are.
    """

    causal_lm: Any
    reference: str
    notes: list[str] = field(default_factory=list)
    compiled: Compiled = field(default_factory=Compiled)
    known: dict[Any, Any] = field(default_factory=dict)
    is_checkpointing: bool = False
    own_attention: str | None = None
    has_sdpa: bool = True
    #: A factory's that was put into another dtype than it was built in.
    is_cast: bool = False
    #: What a factory gave: the model, or what is laid around it (PEFT, torch.compile).
    as_built: Any = None

    def __post_init__(self) -> None:
        self.own_attention = self.causal_lm.config._attn_implementation

    @property
    def for_trainer(self) -> Any:
        """What the trainer's own forward is called with: it may switch an adapter off."""
        return self.causal_lm if self.as_built is None else self.as_built

    @property
    def backbone(self) -> Any:
        """The model below its head."""
        return self.causal_lm.base_model

    @property
    def computes(self) -> Any:
        """What is called for hidden states: the backbone, or the whole model where its forward is its own."""
        return self.known.get("whole") or self.backbone

    @property
    def config(self) -> Any:
        config = self.causal_lm.config
        return config.get_text_config() if hasattr(config, "get_text_config") else config


def load(plan: ReplayPlan, reference: str, notes: list[str], batch: MicroBatch) -> LoadedModel:
    """The model of a resolved reference, on the plan's device, in its dtype, with its attention.

    Raises:
        ModelError: no weights in it, weights missing, or a vocabulary too small for the batch.
        UnavailableError: the architecture does not offer the attention asked for.
        CellError: the user's own factory failed.
    """
    # The weights are the user's own, and may be larger than a reader's share of the machine.
    lift_limit()
    try:
        return _loaded(plan, reference, notes, batch)
    except UnavailableError:
        if plan.flags.attention != SDPA:
            raise
        # The default, which nobody may have asked for.
        eager = replace(plan, flags=replace(plan.flags, attention="eager"))
        loaded = _loaded(eager, reference, notes, batch)
        loaded.has_sdpa = False
        return loaded


def _loaded(plan: ReplayPlan, reference: str, notes: list[str], batch: MicroBatch) -> LoadedModel:
    said, is_cast, as_built = list[str](), False, None
    if reference.startswith(RANDOM):
        model = _random(reference.removeprefix(RANDOM), plan, batch)
    elif reference.startswith(FACTORY):
        as_built = own_code.model(reference.removeprefix(FACTORY), plan.forward_path).eval()
        model = own_code.unwrapped(as_built)
        built = {one.dtype for one in model.parameters()}
        model = _in_dtype(model, plan.flags.dtype)
        is_cast = built != {one.dtype for one in model.parameters()}
        said = _kept(model, plan.flags.dtype)
        if isinstance(model, PlainModel):
            said.append(
                f"{type(model).__name__} is no model of transformers': its logits stand for its final hidden states, "
                "its attention is its own, and no cache is used"
            )
    else:
        model, said = _from_directory(Path(reference), plan, batch)
    _name_backbone(model.eval().requires_grad_(False))
    if plan.flags.dtype == "float64":
        ready_for_float64(model)
    fit.need_vocabulary(model.config.get_text_config().vocab_size, batch, reference)
    model = model.to(plan.flags.device)
    return LoadedModel(model, reference, [*notes, *said], is_cast=is_cast, as_built=as_built)


def _in_dtype(model: Any, name: str) -> Any:
    """A factory's model in a dtype. One whose parameters are mostly of it stays as it was built, with a head or a
    router that is kept in float32. Else all is cast but the frequencies of rotations, as transformers loads a model.
    """
    dtype, sizes = getattr(torch, name), dict[torch.dtype, int]()
    for parameter in model.parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    if sizes and max(sizes, key=sizes.__getitem__) == dtype:
        return model
    frequencies = [
        (module, key, buffer)
        for module in model.modules()
        for key, buffer in module.named_buffers(recurse=False)
        if key.endswith("inv_freq")
    ]
    model.to(dtype)
    for module, key, buffer in frequencies if dtype.itemsize < torch.float32.itemsize else ():
        setattr(module, key, buffer)
    return model


def _name_backbone(model: Any) -> None:
    """Llama 4's and Mllama's text models name a part as their backbone that only their multimodal siblings have."""
    if model.base_model is model and hasattr(model, "model"):
        model.base_model_prefix = "model"


def _kept(model: Any, name: str) -> list[str]:
    """What to say of parameters that are in another dtype."""
    others = [key for key, one in model.named_parameters() if one.dtype != getattr(torch, name)]
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return [f"not in {name}, as the factory built them: {', '.join(others[:3])}{more}"] if others else []


def prepare(model: LoadedModel, flags: Flags) -> list[str]:
    """Put a loaded model into the flags' attention, mode and checkpointing; what to say about it.

    Raises:
        UnavailableError: the attention cannot be set; the model keeps the one it had.
    """
    notes: list[str] = []
    causal_lm = model.causal_lm
    wanted = attention.implementation(flags) or model.own_attention
    if not model.has_sdpa and flags.attention == SDPA:
        wanted = "eager"
        notes.append(f"{causal_lm.config.model_type} has no sdpa attention: eager is run in its place")
    before = causal_lm.config._attn_implementation
    if before != wanted:
        try:
            with _naming_attention(flags, causal_lm.config.model_type):
                set_attention(causal_lm, wanted)
        except BaseException as error:
            # A failed set may leave either in place.
            causal_lm.config._attn_implementation = before
            if isinstance(error, UnavailableError) and flags.attention == SDPA and model.has_sdpa:
                model.has_sdpa = False
                return prepare(model, flags)
            raise
    causal_lm.train(flags.mode == "train")
    if flags.gradient_checkpointing:
        _checkpointing(causal_lm, "enable")({"use_reentrant": False})
        if flags.mode != "train":
            notes.append("gradient_checkpointing has no effect in eval mode: the library applies it in training only")
    elif model.is_checkpointing:
        _checkpointing(causal_lm, "disable")()
    model.is_checkpointing = flags.gradient_checkpointing
    return notes


def _checkpointing(causal_lm: Any, what: str) -> Any:
    # transformers 5 renamed it and warns of the old word.
    return getattr(causal_lm, f"activation_checkpointing_{what}", None) or getattr(
        causal_lm, f"gradient_checkpointing_{what}"
    )


def _random(arch: str, plan: ReplayPlan, batch: MicroBatch) -> Any:
    kind, arguments = architectures.settings(arch, batch.largest_id, int(batch.ids_BS.shape[1]))
    try:
        config = transformers.AutoConfig.for_model(kind, **arguments)
    except ValueError:
        raise UnavailableError(f"transformers {transformers.__version__} knows no architecture {kind}") from None
    # Drawn in float32 whatever the dtype, so that every cell has the same weights, rounded.
    with torch.random.fork_rng(devices=[]), _naming_attention(plan.flags, kind):
        torch.manual_seed(plan.seed)
        kind_of_model = _class(plan)
        if plan.is_critic:
            config.num_labels = 1
        model = kind_of_model.from_config(
            config, **loaded_in(torch.float32), attn_implementation=attention.implementation(plan.flags)
        )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, plan.flags.dtype))
    return model


def _from_directory(directory: Path, plan: ReplayPlan, batch: MicroBatch) -> tuple[Any, list[str]]:
    if adapters.is_adapter(directory):
        return _with_adapter(directory, plan, batch)
    if sharded.is_sharded(directory):
        return _from_shards(directory, plan, batch)
    return _from_whole(directory, plan, batch)


def _with_adapter(directory: Path, plan: ReplayPlan, batch: MicroBatch) -> tuple[Any, list[str]]:
    config = adapters.settings(directory)
    named = plan.base or str(config.get("base_model_name_or_path") or "")
    base = Path(named).expanduser()
    said: list[str] = []
    if named.startswith(RANDOM):
        model = _random(named.removeprefix(RANDOM), plan, batch)
    else:
        found = base if base.is_dir() else (directory / base if (directory / base).is_dir() else cached(named))
        if not named or found is None or not found.is_dir():
            raise ModelError(
                "the adapter's base model is not on this machine", file=str(directory / adapters.CONFIG),
                expected="a directory, or a hub id that was fetched before", found=named or "no base named",
                hint="--base-model DIRECTORY",
            )  # fmt: skip
        if adapters.is_adapter(found):
            raise ModelError("the adapter's base is an adapter itself", file=str(found), hint="--base-model DIRECTORY")
        model, said = _from_directory(found, plan, batch)
    try:
        attached = adapters.attach(model, directory, config)
    except RldbgError:
        raise
    except Exception as error:  # settings of the wrong type, wherever they are used
        raise ModelError(
            f"the adapter's config cannot be used: {_first_line(error)}", file=str(directory / adapters.CONFIG)
        ) from error
    return model, [*said, f"{attached}; base {named}"]


def _from_shards(directory: Path, plan: ReplayPlan, batch: MicroBatch) -> tuple[Any, list[str]]:
    config = _config(sharded.config_folder(directory))
    fit.need_vocabulary(config.get_text_config().vocab_size, batch, str(directory))
    if plan.is_critic:
        config.num_labels = 1
    weights, said = sharded.state(directory, allow_pickles=plan.allow_pickled_weights)
    with _naming_attention(plan.flags, config.model_type):
        model = _class(plan).from_config(
            config,
            **loaded_in(getattr(torch, plan.flags.dtype)),
            attn_implementation=attention.implementation(plan.flags),
        )
    return model, [said, *sharded.fill(model, weights, directory)]


def _from_whole(directory: Path, plan: ReplayPlan, batch: MicroBatch) -> tuple[Any, list[str]]:
    if not (directory / "config.json").is_file():
        raise ModelError(
            "the directory holds no model",
            file=str(directory),
            expected="config.json and *.safetensors",
            found=_listing(directory),
            hint="point --model at the directory that holds config.json",
        )
    pickled = _need_weights(directory, plan)
    config = _config(directory)
    if plan.unlike is not None:
        misread.misread(config, plan.unlike)
    # Before the weights are read: a wrong model is known by its config.
    fit.need_vocabulary(config.get_text_config().vocab_size, batch, str(directory))
    with (
        _naming_attention(plan.flags, config.model_type),
        _naming_weights(directory),
        progress_bars.hidden(transformers),
    ):
        if plan.is_critic:
            config.num_labels = 1
        fit.need_stored(_class(plan), config, directory)
        model, info = _class(plan).from_pretrained(
            directory,
            config=config,
            local_files_only=True,
            trust_remote_code=False,
            **loaded_in(getattr(torch, plan.flags.dtype)),
            attn_implementation=attention.implementation(plan.flags),
            use_safetensors=not pickled,
            output_loading_info=True,
            key_mapping=_VALUE_HEADS if plan.is_critic else None,
            # Said below, by name; transformers' own refusal points at a report in the log.
            ignore_mismatched_sizes=True,
        )
    mismatched = sorted(info["mismatched_keys"])
    if mismatched:
        name, stored, wanted = mismatched[0]
        raise ModelError(
            f"{len(mismatched)} of the weights have another shape than the config says",
            file=str(directory),
            tensor=name,
            expected=str(list(wanted)),
            found=str(list(stored)),
            hint="do config.json and the weights belong to one model?",
        )
    missing = sorted(info["missing_keys"])
    said = []
    if plan.is_critic and missing == ["score.bias"]:
        model.score.bias.data.zero_()
        missing, said = [], ["the value head is stored without a bias: 0 is taken"]
    if missing:
        # transformers fills these with random numbers and only warns.
        raise ModelError(
            f"the directory lacks {len(missing)} of the model's weights",
            file=str(directory),
            expected=", ".join(missing[:3]) + (" …" if len(missing) > 3 else ""),
            found=f"{len(list(model.state_dict())) - len(missing)} weights of {config.model_type}",
            hint="is it a critic, a reward model, an adapter, or an unfinished save?",
        )
    unexpected = sorted(info["unexpected_keys"])
    return model, said + ([f"weights the model does not use: {', '.join(unexpected[:3])}"] if unexpected else [])


def _class(plan: ReplayPlan) -> Any:
    """A critic is a model with one number per token for its head."""
    return transformers.AutoModelForTokenClassification if plan.is_critic else transformers.AutoModelForCausalLM


def _need_weights(directory: Path, plan: ReplayPlan) -> bool:
    """Whether the weights are to be read from pickles."""
    if any(directory.glob("*.safetensors")):
        return False
    pickles = sorted(file.name for file in directory.glob("pytorch_model*.bin"))
    if not pickles:
        raise ModelError(
            "the model directory holds no weights",
            file=str(directory),
            expected="*.safetensors",
            found=_listing(directory),
            hint="was the save interrupted, or only the config copied?",
        )
    if not plan.allow_pickled_weights:
        raise ModelError(
            "the weights are pickles, which can run code when they are loaded",
            file=str(directory / pickles[0]),
            expected="*.safetensors",
            found=", ".join(pickles[:3]),
            hint="convert them to safetensors, or --allow-pickled-weights if you trust where they came from",
        )
    return True


def _config(directory: Path) -> Any:
    fit.need_layers(directory)
    try:
        return transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever transformers' own checks of a foreign file raise
        raise ModelError(
            f"transformers {transformers.__version__} cannot read the model's config: {_first_line(error)}",
            file=str(directory / "config.json"),
            hint="models that bring their own code are not run",
        ) from error


@contextlib.contextmanager
def _naming_attention(flags: Flags, kind: str) -> Iterator[None]:
    """Turns the library's refusal of an attention implementation into `unavailable: why`."""
    try:
        yield
    except (ValueError, ImportError) as error:
        if _is_about_attention(error):
            raise UnavailableError(
                f"{kind} does not run with attention={flags.attention}: {_first_line(error)}",
                hint="attention=eager runs everywhere",
            ) from error
        raise


def _is_about_attention(error: BaseException) -> bool:
    return any(words in str(error) for words in ("attention implementation", "FlashAttention", "attn_implementation"))


@contextlib.contextmanager
def _naming_weights(directory: Path) -> Iterator[None]:
    try:
        yield
    except RldbgError:
        raise
    except Exception as error:
        if _is_about_attention(error):
            raise
        if "Unrecognized configuration class" in str(error):
            raise ModelError(
                "the model's config is none of a language model alone",
                file=str(directory / "config.json"),
                expected="a ...ForCausalLM of transformers",
                found=", ".join(_architectures(directory)) or "no name",
                hint="its text part: --model factory:MODULE:FUNCTION, a function that returns it as a ...ForCausalLM",
            ) from error
        raise ModelError(
            f"the weights cannot be loaded: {_first_line(error)}",
            file=str(directory),
            found=_listing(directory),
            hint="is every shard there, and whole?",
        ) from error


def _architectures(directory: Path) -> list[str]:
    return [str(one) for one in getattr(_config(directory), "architectures", None) or ()]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _listing(directory: Path) -> str:
    names = sorted(entry.name for entry in directory.iterdir())
    return (", ".join(names[:6]) + (" …" if len(names) > 6 else "")) or "an empty directory"
