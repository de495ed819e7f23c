"""The smallest model and batch that still show why a cell is not what each row alone is: a slice of the trainer's own.

Rows halved, then prefixes (`shrinking.smallest`), then layers from the last one on, then the words of the vocabulary
that no token is. Token ids are numbered anew, so that no text leaves with them. Only a child that has torch imports
this.
"""

from __future__ import annotations

import contextlib
import copy
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from msgspec import Struct
from msgspec.structs import replace

import replay_core
from replay_core.dumps import open_run
from replay_core.errors import RequestError, RldbgError
from replay_core.jobs import LogLine, OnEvent, ignore
from replay_core.recorder import Recorder
from replay_core.replay import adapters, architectures, attention, settings
from replay_core.replay.batch import MicroBatch, resolve_temperature
from replay_core.replay.bench import SAME, ReplayBench
from replay_core.replay.depth import fewest_layers
from replay_core.replay.flags import Flags
from replay_core.replay.held import HOLDER
from replay_core.replay.interventions import finest, in_dtype
from replay_core.replay.model import LoadedModel, load, prepare
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.reading import read_batch
from replay_core.replay.references import RANDOM
from replay_core.replay.script import repro
from replay_core.replay.shrinking import smallest
from replay_core.replay.versions import loaded_in

#: Bytes of weights that a capsule has room for, beside what it says.
ROOM = 22 << 20
#: Words of the smallest vocabulary: a token that is changed needs others.
_WORDS = 64


class Slice(Struct, frozen=True):
    """A model and a batch that show the difference. layers: of how many; weights: own or random."""

    model: Any
    batch: MicroBatch
    layers: tuple[int, int]
    weights: str


def cut(plan: ReplayPlan, reference: Flags, out: Path, said: str, on_event: OnEvent = ignore) -> dict[str, Any]:
    """Write `out`/model, `out`/run (the batch) and `out`/repro.py.

    Args:
        plan: of the cell; reference: the flags of each row alone; said: the sentence of its cause.

    Returns:
        rows, tokens, layers and of_layers, words, model (its type), weights (own or random), standalone (whether the
        script needs no weights), and environment.

    Raises:
        RequestError: the model is an adapter's, or nothing small enough shows the difference.
        RldbgError: the model cannot be run.
    """
    flags = replace(attention.resolve(plan.flags)[0], routing="live")
    reference = replace(attention.resolve(reference)[0], routing="live")
    run = open_run(Path(plan.dump))
    recorded = read_batch(run, plan)
    temperature, _ = resolve_temperature(plan.temperature, recorded.batch.temperature)
    plan = replace(plan, flags=flags, capture=None)
    with settings.applied(flags, plan.seed):
        model, _ = HOLDER.model(plan, run, recorded.batch)
        if adapters.trained(model.causal_lm) is not None or plan.is_critic:
            raise RequestError(
                "a capsule holds no adapter and no critic", expected="an actor's model by itself",
                found=model.reference, hint="merge an adapter into its base, and replay that",
            )  # fmt: skip
        bench = ReplayBench(plan, model, temperature)
        on_event(LogLine(f"capsule: the smallest case of {flags.label()}"))
        found = _sliced(bench, flags, reference, recorded.batch)
        found.model.save_pretrained(out / "model", safe_serialization=True)
        # What this machine calls it is nobody's.
        found.model.config._name_or_path = ""
        found.model.config.save_pretrained(out / "model")
        _record(found.batch, temperature, out / "run", reference)
        shown = LoadedModel(found.model, "capsule")
        alone, together = (_observed(plan, one, found.batch, shown, temperature) for one in (reference, flags))
        text, is_standalone = repro(alone, together, said)
        (out / "repro.py").write_text(text, encoding="utf-8")
        HOLDER.drop()
        return {
            "rows": found.batch.rows, "tokens": found.batch.valid_BS.sum(axis=1).tolist(), "layers": found.layers[0],
            "of_layers": found.layers[1], "words": int(found.model.config.get_text_config().vocab_size),
            "model": found.model.config.model_type, "weights": found.weights, "standalone": is_standalone,
            "environment": {
                "rldbg": replay_core.__version__, "python": platform.python_version(),
                "platform": f"{platform.system()} {platform.machine()}", "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }  # fmt: skip


def _observed(plan: ReplayPlan, flags: Flags, batch: MicroBatch, model: LoadedModel, temperature: float) -> Any:
    prepare(model, flags)
    return ReplayBench(plan, model, temperature).observer(flags, batch).cell


def _sliced(bench: ReplayBench, flags: Flags, reference: Flags, batch: MicroBatch) -> Slice:
    model, causal_lm = bench.model, bench.model.causal_lm
    plain = replace(flags, compile="off"), replace(reference, compile="off")
    least, whole = batch, int(getattr(model.config, "num_hidden_layers", 0))
    layers = whole
    with in_dtype(model, finest(model)[0]):
        # What only this dtype or the compiler shows, nothing but the replay of the capsule can tell.
        is_told = bench.apart(*plain, batch) > SAME
        if is_told:
            least = smallest(bench, *plain, batch)
            depth = fewest_layers(model, lambda: bench.apart(*plain, least) > SAME)
            layers = whole if depth is None else depth[0]
    if type(causal_lm).__module__.startswith("transformers."):
        for count, is_cut in dict.fromkeys(((layers, True), (whole, True), (whole, False))):
            made = _made(model, least, count, whole, is_cut=is_cut)
            if made is not None and _bytes(made[0]) <= ROOM and (not is_told or _shows(bench, plain, *made)):
                return Slice(*made, (count, whole), "own")
        named = (name for name, (kind, _) in architectures.ARCHITECTURES.items() if kind == causal_lm.config.model_type)
        for name in named:
            small, _ = _renumbered(least)
            tiny = replace(bench.plan, model=RANDOM + name, role=None)
            loaded = load(tiny, tiny.model, [], small)
            if is_told and _shows(bench, plain, loaded.causal_lm, small):
                depth_of_it = int(loaded.config.num_hidden_layers)
                return Slice(loaded.causal_lm, small, (depth_of_it, depth_of_it), "random")
            break
    raise RequestError(
        "no slice of the model shows the difference in a capsule",
        expected=f"at most {ROOM >> 20} MiB of weights of an architecture that transformers holds",
        found=f"{type(causal_lm).__name__}, {_bytes(causal_lm) / 2**20:,.0f} MiB, {whole} layers; what a factory or a "
        "hook changes is code, and no capsule holds code",
    )


def _made(
    model: LoadedModel, batch: MicroBatch, layers: int, whole: int, *, is_cut: bool
) -> tuple[Any, MicroBatch] | None:
    """(a model of the first layers and the words of the batch, the batch in its words); None where it has no such."""
    causal_lm = model.causal_lm
    weights = {name: one.detach() for name, one in causal_lm.state_dict().items()}
    config = copy.deepcopy(causal_lm.config)
    inner = config.get_text_config()
    inner.num_hidden_layers = layers
    for name, value in list(vars(inner).items()):
        if isinstance(value, list) and len(value) == whole > 1:
            setattr(inner, name, value[:layers])
    if is_cut:
        batch, kept = _renumbered(batch, inner.vocab_size)
        heads = (causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings())
        of_words = {one.data_ptr() for head in heads if head is not None for one in head.parameters()}
        weights = {name: one[kept] if one.data_ptr() in of_words else one for name, one in weights.items()}
        inner.vocab_size = len(kept)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(inner, name, None)
            setattr(config, name, None)
    with contextlib.suppress(Exception):
        # A config may bind its parts to each other in ways that nobody can list: then the next larger slice is tried.
        dtype = next(causal_lm.parameters()).dtype
        made = type(causal_lm)._from_config(config, **loaded_in(dtype), attn_implementation="eager")
        made.load_state_dict({name: weights[name] for name in made.state_dict()})
        return made.eval().requires_grad_(False), batch
    return None


def _renumbered(batch: MicroBatch, words: int = 1 << 30) -> tuple[MicroBatch, list[int]]:
    """(the batch with its ids counted from 0, the ids that were, filled up with others that exist)."""
    used = np.unique(batch.ids_BS).tolist()
    others = (one for one in range(words) if one not in set(used))
    kept = used + [next(others) for _ in range(min(_WORDS, words) - len(used))]
    ids_BS = np.searchsorted(used, batch.ids_BS)
    return replace(batch, ids_BS=ids_BS), kept


def _shows(bench: ReplayBench, flags: tuple[Flags, Flags], causal_lm: Any, batch: MicroBatch) -> bool:
    """Whether a slice shows the difference, in the finest arithmetic."""
    model = LoadedModel(causal_lm, "capsule")
    with contextlib.suppress(RldbgError), in_dtype(model, finest(model)[0]):
        return replace(bench, model=model).apart(*flags, batch) > SAME
    return False


def _bytes(causal_lm: Any) -> int:
    return sum(one.numel() * one.element_size() for one in causal_lm.parameters())


def _record(batch: MicroBatch, temperature: float, out: Path, reference: Flags) -> None:
    mask_BS = batch.valid_BS if batch.response_BS is None else batch.response_BS
    flags = {"asked": {"attention": reference.attention}}
    recorded = {} if batch.positions_BS is None else {"position_ids": torch.from_numpy(batch.positions_BS)}
    with Recorder(out, model="../model", flags=flags, format="safetensors") as recorder, recorder.step(0) as record:
        record(
            "forward_data", micro=0, input_ids=torch.from_numpy(batch.ids_BS),
            attention_mask=torch.from_numpy(batch.valid_BS.astype(np.int64)),
            response_mask=torch.from_numpy(mask_BS), temperature=temperature, **recorded,
        )  # fmt: skip
