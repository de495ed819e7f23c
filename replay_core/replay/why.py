"""Why a cell is not what each row alone is: one job in a child, from the smallest batch that still shows it.

Three parties in float64: the cell's own setting, each row alone in the kernel of the reference, and each row alone in
eager, which breaks ties between kernels. Where the first two are one there, what is left is rounding, and how far
either dump is from that truth says whether it is more than this dtype's noise. Where they are not, `interventions`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from msgspec.structs import replace

from replay_core.dtypes import DTYPES
from replay_core.dumps import open_run
from replay_core.errors import CellError, RldbgError, UnavailableError
from replay_core.jobs import LogLine, OnEvent, Progress, ignore
from replay_core.records import Run
from replay_core.replay import ahead, attended, attention, causes, narrowed, settings
from replay_core.replay.asking import Asking
from replay_core.replay.batch import MicroBatch, resolve_temperature
from replay_core.replay.bench import ReplayBench, worst
from replay_core.replay.cell import BatchReplay
from replay_core.replay.depth import fewest_layers, first_layers, layers_of
from replay_core.replay.flags import Flags
from replay_core.replay.held import HOLDER, Holder
from replay_core.replay.influence import Proposed, hanging, proposed, queries_of
from replay_core.replay.interventions import (
    STILL,
    Observer,
    Sight,
    TensorPlace,
    Trace,
    evaluating,
    finest,
    first_apart,
    in_dtype,
    is_half,
    joined,
    lost,
    relative,
)
from replay_core.replay.logprobs import has_own_code, token_logprobs
from replay_core.replay.mixed_dtypes import as_built
from replay_core.replay.model import LoadedModel, prepare
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.reading import read_batch
from replay_core.replay.segments import tokens_of
from replay_core.replay.shrinking import COLUMNS, Excerpt, company_of, first_parts, likely, part_of, smallest
from replay_core.replay.stated import stated
from replay_core.replay.whole_model import WholeModel, taken

#: Nats within which log-probabilities of one hidden state do.
SAME_NATS = 1e-4
#: Two settings that round alike are this many times what rounding leaves of one of them apart, at most.
_TWO_ROUNDINGS = 4.0
#: Tokens of a mixture that may be near a tie, and how often last places are drawn to see which are.
_FEWEST, _FEW, _DRAWS = 3, 0.01, 6
#: Multiply-adds that one question may take: a minute of two cores.
_BUDGET = 4e11
#: Slots of a batch whose every token is watched, and rows and columns that are kept of a larger one.
_WATCHED, _COMPANY = 1024, (3, 32)
#: Passes that are asked for of a cell that differs, and of one that does not, at most but for rare questions.
_PASSES, _PASSES_OF_ONE = 130, 30
#: Seconds after which no further question about a cell begins.
_MOST_S = 600.0
#: Tokens right before the first that parts, of which each is changed by itself.
_BEFORE = 4
#: Tokens of its past, from the first to itself, of which each is changed if none of those before it was lost.
_FAR = 12
#: Tokens that part whose whole past is asked by gradients, and how many of what those propose is tried.
_QUERIES, _TRIED = 8, 6
#: Samples that are changed where the last comes first.
_TURNED = 4
#: Samples that must each move one other alone: of two that move each other all would be together as well.
_ROUND = 3
#: Rows that have one other order.
_PAIR = 2
#: Columns of padding by which a batch is made wider.
_WIDER = 8
#: A kernel of the user's own may round to the dtype of the cell inside, by so many epsilons.
_OWN_KERNEL = 4
#: Share of the free memory that a second model may take, and its most bytes: what is larger takes minutes to load.
_SECOND, _SECOND_MOST = 0.4, 4 << 30
#: Tokens of the row by which the reference itself is checked, and the parties to that.
_ITSELF, _PARTIES = 48, ("reference", "eager")
#: Logits of a token that are looked at.
_LOGITS = 64
#: Tokens whose log-probabilities are formed.
_LOGPROBS = 256


def explain(
    plan: ReplayPlan,
    reference: Flags,
    dumps: Mapping[str, str],
    final_hidden: str,
    on_event: OnEvent = ignore,
    holder: Holder | None = None,
    *,
    always: bool = False,
    is_ahead: bool = False,
    is_agreeing: bool = False,
) -> dict[str, Any]:
    """The evidence of why the plan's cell is not what `reference` is (`causes.cause_of` reads it).

    Args:
        dumps: what either of them put out (`reference`, `cell`), to be held to the truth; may be empty.
        final_hidden: the tensor of the final hidden states in those.
        always: ask who moves whom also where the two are one.
        is_ahead: neither has run yet: ask of a few rows and tokens alone, and nothing ({}) where these are one.
        is_agreeing: the two are one as far as their dtype shows: no few rows of them will differ, so all are asked.

    Raises:
        RldbgError: the model cannot be run.
    """
    flags, _ = attention.resolve(plan.flags)
    flags = replace(flags, compile="off", routing="live")
    reference, _ = attention.resolve(replace(reference, compile="off", routing="live"))
    run = open_run(Path(plan.dump))
    recorded = read_batch(run, plan)
    temperature, _ = resolve_temperature(plan.temperature, recorded.batch.temperature)
    plan = replace(plan, flags=flags, capture=None)
    with settings.applied(flags, plan.seed):
        model, _ = (holder or HOLDER).model(plan, run, recorded.batch)
        held = {name: open_run(Path(path)) for name, path in dumps.items()}
        wanted = finest(model)
        for dtype in wanted:
            arithmetic = str(dtype).removeprefix("torch.")
            on_event(LogLine(f"why: {flags.label()} against each row alone, in {arithmetic}"))
            bench = ReplayBench(plan, model, temperature, run, recorded.batch, Asking(on_event=on_event))
            try:
                with in_dtype(model, dtype):
                    is_last = dtype is wanted[-1]
                    part = None
                    _begin(bench, flags, reference, recorded.batch)
                    if is_ahead:
                        part = _differing(bench, flags, reference, first_parts(recorded.batch))
                        if part is None:
                            return {}
                    found = _evidence(
                        bench, flags, reference, recorded.batch, held, final_hidden, always, is_last, part,
                        is_agreeing=is_agreeing,
                    )  # fmt: skip
                    return {"arithmetic": arithmetic, **found, "skipped": bench.asking.skipped}
            except CellError:
                # Some kernels know no float64.
                if dtype is wanted[-1]:
                    raise
    raise AssertionError("a model has a dtype")


def _begin(bench: ReplayBench, flags: Flags, reference: Flags, batch: MicroBatch) -> None:
    """Of a few tokens: that a kernel runs in this arithmetic at all, and what rounding is there where that is a half.

    Raises:
        CellError: it does not.
    """
    rows = company_of(batch, 0)
    few = part_of(batch, rows, COLUMNS).batch
    if flags.attention in attention.HALVES_ALONE:
        bench.hidden(flags, few)
    if is_half(bench.model):
        fine_ND = _finer(bench, (reference, replace(reference, attention="eager")), few)
        if fine_ND is not None:
            bench.same = max(bench.same, _TWO_ROUNDINGS * worst(relative(fine_ND, bench.hidden(reference, few))))


def _check_finite(hidden_ND: torch.Tensor) -> None:
    """A model that fills its masks with the least of float64 and forms its softmax in float32 has infinities there that
    it has in no dtype of its own.
    """
    if not torch.isfinite(hidden_ND).all():
        raise CellError("the model computes no numbers in this arithmetic")


def _evidence(
    bench: ReplayBench,
    flags: Flags,
    reference: Flags,
    batch: MicroBatch,
    held: Mapping[str, Run],
    final_hidden: str,
    always: bool,
    is_last: bool,
    part: Excerpt | None = None,
    *,
    is_agreeing: bool = False,
) -> dict[str, Any]:
    """Raises CellError where the model cannot be asked in this arithmetic; `is_last`: there is no other; `part`: of the
    batch, where one that differs is known already.
    """
    parameters = sum(one.numel() for one in bench.model.backbone.parameters())
    is_large = part is not None or ahead.is_large(parameters, batch.ids_BS.size)
    bench.asking.most_s = _MOST_S
    if is_large and part is None and not is_agreeing:
        part = bench.asking(
            "a part that differs", lambda: _differing_part(bench, flags, reference, batch, held, final_hidden), None
        )
    found, is_one, distance_N = _compared(
        bench, flags, reference, batch if part is None else part.batch, {} if part is not None else held, final_hidden,
        is_last=is_last, is_large=is_large,
    )  # fmt: skip
    if is_one and not always:
        return found
    if part is None and is_large and not is_one:
        # The dumps, rounded as they are, did not say where it shows.
        part = bench.asking(
            "a part that differs",
            lambda: _differing(bench, flags, reference, likely(batch, distance_N.numpy())), None
        )  # fmt: skip
    # A row of one token has nobody to be moved by: interventions are made in a batch that still has company.
    if part is None and is_large and is_one:
        part = part_of(batch, company_of(batch, int(batch.valid_BS.sum(axis=1).argmin())), COLUMNS)
    small = batch if part is None else part.batch
    if part is None and (batch.ids_BS.size > _WATCHED or is_large) and not is_one:
        small = bench.asking(
            "a smaller batch", lambda: smallest(bench, flags, reference, batch, *_COMPANY), batch
        )  # fmt: skip
    if part is not None:
        found["looked_at"] = {"rows": part.rows, "tokens": part.batch.valid_BS.sum(axis=1).tolist()}
    with contextlib.ExitStack() as cut:
        depth = None
        if is_large and not is_one:
            # In the layers that show it every question is asked sooner, and those behind them only pass it on.
            depth = bench.asking("the first layers that differ", lambda: _depth(bench, flags, reference, small), None)
            layers = layers_of(bench.model)
            if depth is not None and layers is not None:
                cut.enter_context(first_layers(layers, depth[0]))
        found |= _interventions(bench, flags, reference, small, is_one=is_one, depth=depth, found=found)
    found["narrowed"] = bench.asking("what each row alone sees", lambda: _narrowed(bench, reference, batch), None)
    return found


def _depth(bench: ReplayBench, flags: Flags, reference: Flags, batch: MicroBatch) -> tuple[int, int] | None:
    return fewest_layers(bench.model, lambda: bench.differs(flags, reference, batch))


def _differing_part(
    bench: ReplayBench, flags: Flags, reference: Flags, batch: MicroBatch, held: Mapping[str, Run], final_hidden: str
) -> Excerpt | None:
    """A few rows and tokens of a batch that show the difference in this arithmetic, as the dumps have it; None where
    none of them does.
    """
    if not {"reference", "cell"} <= set(held):
        return None
    hidden = [torch.from_numpy(tokens_of(held[name], final_hidden)) for name in ("reference", "cell")]
    return _differing(bench, flags, reference, likely(batch, relative(*hidden).numpy()))


def _differing(bench: ReplayBench, flags: Flags, reference: Flags, parts: Iterable[Excerpt]) -> Excerpt | None:
    return next((one for one in parts if bench.differs(flags, reference, one.batch)), None)


def _compared(
    bench: ReplayBench, flags: Flags, reference: Flags, batch: MicroBatch, held: Mapping[str, Run], final_hidden: str,
    *, is_last: bool, is_large: bool,
) -> tuple[dict[str, Any], bool, torch.Tensor]:  # fmt: skip
    """The three parties, without looking inside: the evidence begun, whether the first two are one, and how far each
    token is off. `is_large`: eager is asked of the longest row alone, where a kernel has most to get wrong.
    """
    tell = bench.asking.on_event
    tell(Progress(0, None, f"each row alone, {batch.tokens:,} tokens, in {_arithmetic(bench)}"))
    alone = bench.hidden(reference, batch)
    tell(Progress(1, None, f"the cell's own setting, in {_arithmetic(bench)}"))
    together = bench.hidden(flags, batch)
    if not is_last:
        _check_finite(alone)
        _check_finite(together)
    distance = relative(alone, together)
    found: dict[str, Any] = {
        "apart": worst(distance),
        "logp_apart": None,
        "kernels_apart": None, "truth": {}, "smallest": None, "first": None, "single_agrees": None, "visibility": [],
        "packed": flags.packing, "mixture": is_mixture(bench.model), "shifted": False,
        "kernel_noise": _kernel_noise(reference), "kernel": None, "unturned_agrees": None,
        "by_position": False,
    }  # fmt: skip
    with contextlib.suppress(CellError):
        found["logp_apart"] = _logprobs_apart(bench, {flags: together, reference: alone}, batch)
    eager = replace(reference, attention="eager")
    truth: torch.Tensor | None = alone
    if is_half(bench.model):
        # Kernels are told apart by less than a half rounds; the truth is what a finer dtype makes of each row alone.
        truth = _finer(bench, (reference, eager), batch)
        if truth is not None:
            bench.same = max(bench.same, _TWO_ROUNDINGS * worst(relative(truth, alone)))
    elif _is_other_kernel(bench.model, reference):
        tell(Progress(2, None, f"each row alone in eager, in {_arithmetic(bench)}"))
        with contextlib.suppress(UnavailableError):
            longest = int(batch.valid_BS.sum(axis=1).argmax())
            if is_large:
                same_ND = alone[torch.from_numpy(bench.observer(reference, batch).sample_N == longest)]
                eager_ND = bench.hidden(eager, batch.take([longest]))
                found["kernels_apart"] = worst(relative(eager_ND, same_ND))
            else:
                truth = bench.hidden(eager, batch)
                found["kernels_apart"] = worst(relative(truth, alone))
    if not is_last and truth is not None:
        _check_finite(truth)
    for name, dump in held.items() if truth is not None else ():
        with contextlib.suppress(RldbgError):
            found["truth"][name] = figures(relative(truth, torch.from_numpy(tokens_of(dump, final_hidden))))
    if not is_half(bench.model) and found["apart"] > bench.same:
        distance = _beyond_last_places(bench, reference, batch, alone, distance)
        found["apart"] = worst(distance)
    found["same"] = bench.same
    is_one = found["apart"] <= bench.same
    if is_one and (found["kernels_apart"] or 0.0) > found["kernel_noise"]:
        found["kernel"] = bench.asking("the kernel", lambda: _kernel(bench, reference, eager, batch), None)
    return found, is_one, distance


def _beyond_last_places(
    bench: ReplayBench, reference: Flags, batch: MicroBatch, alone_ND: torch.Tensor, distance_N: torch.Tensor
) -> torch.Tensor:
    """How far each token is off, where more than last places of float32 take it there. A model that keeps its state, or
    a softmax, in float32 is as far from itself where its sums are taken in another order (`bench.same` is widened to
    that), and a few tokens of a mixture, near a tie, may be sent elsewhere by it: those count for nothing.
    """
    sent_N = distance_N > causes.SHIFTED
    is_sent = bool(sent_N.any())
    if is_sent and (not is_mixture(bench.model) or int(sent_N.sum()) > max(_FEWEST, _FEW * sent_N.numel())):
        return distance_N
    tied_N, furthest = torch.zeros_like(sent_N), 0.0
    for seed in range(_DRAWS if is_sent else 1):
        moved_N = _moved_by_last_places(bench, reference, batch, alone_ND, seed)
        if moved_N is None:
            return distance_N
        tied_N |= moved_N > causes.SHIFTED
        furthest = max(furthest, worst(moved_N[moved_N <= causes.SHIFTED]))
    if bool((sent_N & ~tied_N).any()) or _TWO_ROUNDINGS * furthest > causes.SHIFTED:
        return distance_N
    bench.same = max(bench.same, _TWO_ROUNDINGS * furthest)
    return torch.where(sent_N, torch.zeros_like(distance_N), distance_N)


def _moved_by_last_places(
    bench: ReplayBench, reference: Flags, batch: MicroBatch, alone_ND: torch.Tensor, seed: int
) -> torch.Tensor | None:
    """How far each token moves (relative) with the last places of float32 in the embeddings; None of a model whose
    embeddings cannot be got at.
    """
    random = torch.Generator().manual_seed(seed)

    def moved(_module: torch.nn.Module, _args: Any, embedded_BSD: torch.Tensor) -> torch.Tensor:
        noise_BSD = torch.randn(embedded_BSD.shape, generator=random, dtype=torch.float64)
        return embedded_BSD * (1 + 2.0**-24 * noise_BSD).to(embedded_BSD)

    try:
        hook = bench.model.causal_lm.get_input_embeddings().register_forward_hook(moved)
    except (AttributeError, NotImplementedError):
        return None
    try:
        return relative(alone_ND, bench.hidden(reference, batch))
    finally:
        hook.remove()


def _finer(bench: ReplayBench, settings: Iterable[Flags], batch: MicroBatch) -> torch.Tensor | None:
    """The final hidden states in the finest dtype that one of the settings can be asked in; None where none can."""
    for dtype in finest(bench.model)[:-1]:
        for one in dict.fromkeys(settings):
            with contextlib.suppress(RldbgError), in_dtype(bench.model, dtype):
                hidden_ND = bench.hidden(one, batch)
                if torch.isfinite(hidden_ND).all():
                    return hidden_ND
    return None


def _arithmetic(bench: ReplayBench) -> str:
    return str(next(bench.model.causal_lm.parameters()).dtype).removeprefix("torch.")


def _interventions(
    bench: ReplayBench, flags: Flags, reference: Flags, small: MicroBatch, *, is_one: bool,
    depth: tuple[int, int] | None, found: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Who moves whom, and where a cell that differs parts from each row alone: what names the cause first."""
    found, asking = dict(found), bench.asking
    asking.expect(_PASSES_OF_ONE if is_one else _PASSES)
    observer = bench.observer(flags, small)
    base = observer.trace()
    sights = observer.sights(base, thorough=not is_one, on_sight=lambda sight: _tell_sight(asking, sight))
    found["visibility"] = [sight.to_mapping("cell") for sight in sights]
    own = bench.observer(reference, small)
    own_base = own.trace()
    parted = first_apart(observer, own_base, base, bench.same)
    found["first"] = None if parted is None else parted.to_mapping()
    _tell_so_far(asking, found)
    own_sights = own.sights(own_base, 2)
    found["visibility"] += [sight.to_mapping("reference") for sight in own_sights]
    found["beside"] = _moves_beside(bench, reference, small, own_sights)
    if not any(sight.moved for sight in (*sights, *own_sights) if sight.what in ("again", "seed")):
        parties = {"reference": (own, own_base)} | ({} if is_one else {"cell": (observer, base)})
        asked = {"first": Observer.trace} if is_one else {"first": Observer.trace, "fresh": Observer.after_others}
        layers = None if depth is None else depth[0]
        anew = asking("a model loaded anew", lambda: _once_more(bench, parties, small, layers, asked), [])
        if not anew and depth is None and has_own_code(bench.model.causal_lm):
            anew = asking("the logits of a model loaded anew", lambda: _logits_once_more(bench, reference, small), [])
        found["visibility"] += anew
    positions = [one.cell.arrangement.position_ids.reshape(-1)[one.slots.numpy()] for one in (observer, own)]
    found["shifted"] = not np.array_equal(*positions)
    found["forward_only"] = asking(
        "the samples turned round", lambda: _moves_forward_only(bench, flags, small, sights), False
    )
    if found["forward_only"]:
        found["attends"] = asking(
            "whether it attends", lambda: _attends(bench.observer(flags, small), sights), True
        )  # fmt: skip
    found["handed_round"] = _is_handed_round(sights)
    found["symmetric"] = asking(
        "the samples in another order", lambda: _is_symmetric(bench, flags, small, base, sights), None
    )
    told = Proposed()
    if not is_one:
        told = asking("gradients", lambda: _proposed(bench, (flags, reference), small, (base, own_base), parted), told)
    found["asked"] = told.to_mapping()
    found["visibility"] += asking(
        "what gradients propose", lambda: _as_proposed(bench, flags, small, base, told, sights), []
    )
    found["lost"] = _lost(observer, base, sights, own, own_base, own_sights, parted) or asking(
        "keys within the module",
        lambda: _lost_within(
            bench,
            (flags, reference),
            small,
            _asked_of(observer, own_sights, own_base, base, parted, told, same=bench.same),
            parted,
        ),
        None,
    )
    if not is_one:
        gives = asking("what attention gives each key", lambda: _attended(bench, (flags, reference), small, parted), {})
        found |= {**gives, "lost": found["lost"] or gives.get("lost")}
    if not is_one and found["lost"] is None:
        found["unturned_agrees"] = asking("no rotation", lambda: _agree_unturned(bench, flags, reference, small), None)
        more, lost_there = asking(
            "more padding or company", lambda: _with_more(bench, flags, reference, small, observer, base), ([], None)
        )
        found["visibility"] += more
        found["lost"] = lost_there
    furthest = int(observer.sample_N[int(relative(own_base.hidden, base.hidden).argmax())])
    if small.rows > 1:
        single = small.take([furthest])
        found["single_agrees"] = asking(
            "a sample by itself", lambda: bench.apart(flags, reference, single) <= bench.same, None
        )
    if not is_one and not flags.packing and not small.valid_BS[furthest].all():
        bare = small.take([furthest]).without_padding()
        found["unpadded_agrees"] = asking(
            "a sample without its padding", lambda: bench.apart(flags, reference, bare) <= bench.same, None
        )
    if not is_one:
        _tell_so_far(asking, found)
        found["smallest"] = asking(
            "the smallest case", lambda: _smallest_case(bench, flags, reference, small, depth), None
        )
    return found


def _tell_sight(asking: Asking, sight: Sight) -> None:
    """What moved what it may not: that is so whatever else is found, and is told before it is known what it means."""
    if sight.moved and asking.said is None:
        asking.so_far(causes.line(sight.to_mapping("cell")))


def _tell_so_far(asking: Asking, found: Mapping[str, Any]) -> None:
    said = causes.so_far(found)
    if said is not None:
        asking.so_far(said)


def _smallest_case(
    bench: ReplayBench, flags: Flags, reference: Flags, batch: MicroBatch, depth: tuple[int, int] | None
) -> dict[str, Any]:
    """`depth`: with how few layers it shows, where that is known and the model has no others now."""
    least = smallest(bench, flags, reference, batch)
    depth = _depth(bench, flags, reference, least) if depth is None else depth
    layers, of_layers = (None, None) if depth is None else depth
    return {
        "rows": least.rows, "tokens": least.valid_BS.sum(axis=1).tolist(), "layers": layers, "of_layers": of_layers
    }  # fmt: skip


def _moves_beside(bench: ReplayBench, reference: Flags, batch: MicroBatch, sights: Sequence[Sight]) -> bool | None:
    """Whether each row alone, where it sees its future, takes all there is together: then a row moves another beside
    it. A mean over a row's own tokens, or a mask, moves that row alone. None where it does not matter.
    """
    if not any(one.what == "token" and one.moved and one.first and one.first.kind in ("other", "router", "mixer")
               for one in sights):  # fmt: skip
        return None
    longest = int(batch.valid_BS.sum(axis=1).argmax())
    own = batch.ids_BS[longest][batch.valid_BS[longest]][None, :_ITSELF]
    # The other row has other tokens: the greatest of two that are one is still there when either is changed.
    words = np.unique(own)
    ids = np.concatenate([own, words[(np.searchsorted(words, own) + 1) % words.size]])
    together = replace(reference, packing=False, rows_per_forward=None)

    def ask() -> bool:
        observer = bench.observer(together, MicroBatch(ids, np.ones_like(ids, dtype=bool)))
        base = observer.trace()
        return any(observer.of_sample(base, sample).moved for sample in (0, 1))

    return bench.asking("two rows beside each other", ask, None)


def _narrowed(bench: ReplayBench, reference: Flags, batch: MicroBatch) -> dict[str, Any] | None:
    """The keys of its own past that the longest row does not see when it is alone (`narrowed`): read in eager, whose
    shares are there to be read, and which was held to the kernel of each row alone.
    """
    longest = int(batch.valid_BS.sum(axis=1).argmax())
    ids = batch.ids_BS[longest][batch.valid_BS[longest]][None, : narrowed.MOST]
    eager = reference if reference.attention == "own" else replace(reference, attention="eager")
    return narrowed.narrowed(bench.observer(eager, MicroBatch(ids, np.ones_like(ids, dtype=bool))))


def of_itself(cell: BatchReplay) -> dict[str, Any] | None:
    """Whether each row alone, to which everything is held, is right itself; None where that would take too long.

    The start of the longest row, in its own kernel and in eager: nobody may see the future or lose its own past, and
    both compute the same. Only where one of these shows is every module watched.
    """
    lengths = cell.batch.valid_BS.sum(axis=1)
    row = cell.batch.take([int(lengths.argmax())])
    ids = row.ids_BS[row.valid_BS][None, :_ITSELF]
    batch = MicroBatch(ids, np.ones_like(ids, dtype=bool))
    bench = ReplayBench(replace(cell.plan, capture=None), cell.model, cell.temperature)
    parameters = sum(one.numel() for one in cell.model.backbone.parameters())
    if parameters * ids.size * 8 > _BUDGET or not ids.size or cell.model.known.get("not_finite"):
        return None
    reference = replace(cell.flags, fault="none", compile="off")
    found: dict[str, Any] = {"kernels_apart": None, "visibility": [], "apart": 0.0, "logp_apart": None, "truth": {},
                             "smallest": None, "first": None, "packed": False,
                             "kernel_noise": _kernel_noise(reference), "kernel": None}  # fmt: skip
    parties = {"reference": reference}
    if _is_other_kernel(cell.model, reference):
        parties["eager"] = replace(reference, attention="eager")
    hidden = {}
    try:
        found["arithmetic"] = str(finest(cell.model)[0]).removeprefix("torch.")
        with in_dtype(cell.model, finest(cell.model)[0]):
            for name, flags in parties.items():
                with contextlib.suppress(UnavailableError):
                    hidden[name] = bench.hidden(flags, batch)
                    observer = bench.observer(flags, batch)
                    if observer.is_suspect(hidden[name]):
                        sights = observer.sights(observer.trace(), 1)
                        found["visibility"] += [sight.to_mapping(name) for sight in sights]
                        if found.get("beside") is None:
                            found["beside"] = _moves_beside(bench, flags, batch, sights)
            if len(hidden) == len(_PARTIES):
                found["kernels_apart"] = worst(relative(hidden["eager"], hidden["reference"]))
                if found["kernels_apart"] > found["kernel_noise"]:
                    found["kernel"] = _kernel(bench, reference, parties["eager"], batch)
                    found["visibility"] = found["visibility"] or found["kernel"]["visibility"]
    except CellError:
        return None
    finally:
        prepare(cell.model, cell.flags)
    return {**found, "skipped": bench.asking.skipped}


def _is_other_kernel(model: LoadedModel, reference: Flags) -> bool:
    """Whether each row alone runs in another kernel than eager, to be held to it."""
    return reference.attention != "eager" and not (reference.attention == "own" and model.own_attention == "eager")


def _kernel_noise(reference: Flags) -> float:
    if reference.attention != "own":
        return causes.KERNELS
    return max(causes.KERNELS, _OWN_KERNEL * (DTYPES[reference.dtype].eps or 0.0))


def _kernel(bench: ReplayBench, reference: Flags, eager: Flags, batch: MicroBatch) -> dict[str, Any]:
    """Where the kernel of each row alone parts from eager, and which token it loses there."""
    batch = batch if batch.ids_BS.size <= _WATCHED else smallest(bench, reference, eager, batch)
    own = bench.observer(reference, batch)
    base = own.trace()
    sights = own.sights(base, 1)
    other = bench.observer(eager, batch)
    other_base = other.trace()
    other_sights = other.sights(other_base, 1)
    parted = first_apart(own, other_base, base, bench.same)
    lost_there = _lost(own, base, sights, other, other_base, other_sights, parted) or _lost_within(
        bench,
        (reference, eager),
        batch,
        _asked_of(own, other_sights, other_base, base, parted, same=bench.same),
        parted,
    )
    seen = {"reference": sights, "eager": other_sights}
    return {
        "first": None if parted is None else parted.to_mapping(), "lost": lost_there,
        "visibility": [sight.to_mapping(by) for by, listed in seen.items() for sight in listed],
    }  # fmt: skip


def _once_more(
    bench: ReplayBench,
    parties: Mapping[str, tuple[Observer, Trace]],
    batch: MicroBatch,
    depth: int | None,
    asked: Mapping[str, Callable[[Observer], Trace]],
) -> list[dict[str, Any]]:
    """What is not what it was in a model loaded anew, whose first call is of these tokens ("first") or of others
    ("fresh"): what a model keeps from its first call, or drops after it, moves nothing within one model, whose every
    later call is served alike, and neither does what its calls made of its weights. Empty where a second model is too
    large or is another one every time it is built.

    depth: how many of its layers the first has left; asked: the kinds of sights, and how each is looked at.
    """
    causal_lm = bench.model.causal_lm
    size = sum(one.numel() * one.itemsize for one in causal_lm.parameters())
    free = torch.cuda.mem_get_info()[0] if bench.plan.flags.device == "cuda" else psutil.virtual_memory().available
    if bench.run is None or bench.recorded is None or size > min(_SECOND_MOST, _SECOND * free):
        return []
    found: list[dict[str, Any]] = []
    for name, (observer, base) in parties.items():
        flags = observer.cell.flags
        for what, look in asked.items():
            if any((one["by"], one["what"]) == (name, "first") for one in found):
                continue  # one that drops something after its first call is another after others as well
            seen = _in_a_model_anew(bench, flags, batch, depth, look)
            if seen is None:
                continue
            sight = observer.differing(what, base, seen, bench.same)
            again = None if sight is None else _in_a_model_anew(bench, flags, batch, depth, look)
            # Numbers that are drawn when a model is built make another one of it every time.
            if sight is not None and again is not None and worst(relative(seen.hidden, again.hidden)) <= bench.same:
                found.append(sight.to_mapping(name))
    return found


def _logits_once_more(bench: ReplayBench, reference: Flags, batch: MicroBatch) -> list[dict[str, Any]]:
    own = bench.observer(reference, batch)  # the model has one kernel at a time
    return _once_more(bench, {"reference": (own, _own_logits(own))}, batch, None, {"first": _own_logits})


def _in_a_model_anew(
    bench: ReplayBench, flags: Flags, batch: MicroBatch, depth: int | None, look: Callable[[Observer], Trace]
) -> Trace | None:
    """What a model loaded anew shows; None where it cannot be had."""
    assert bench.run is not None
    assert bench.recorded is not None
    causal_lm, holder = bench.model.causal_lm, Holder()
    try:
        with contextlib.suppress(RldbgError):
            with as_built():
                model, _ = holder.model(bench.plan, bench.run, bench.recorded)
            layers = layers_of(model)
            with (
                contextlib.nullcontext() if depth is None or layers is None else first_layers(layers, depth),
                in_dtype(model, next(causal_lm.parameters()).dtype),
            ):
                # Nothing is asked of it before, or that would be its first call.
                whole = {"whole": WholeModel(model.causal_lm)} if bench.model.known.get("whole") else {}
                model.known.update({**bench.model.known, **whole})
                return look(replace(bench, model=model).observer(flags, batch))
        return None
    finally:
        holder.drop()


def _own_logits(observer: Observer) -> Trace:
    """What a model with code of its own makes of its final states, when the whole of it is called: some logits of every
    token, and what all of them add up to.
    """
    causal_lm, parts = observer.cell.model.causal_lm, []
    with torch.no_grad(), evaluating(causal_lm), attention.pinned(observer.cell.flags):
        for forward in observer.forwards():
            logits = causal_lm(**taken(causal_lm, {**observer.cell.inputs(forward), "use_cache": False})).logits
            some = logits[..., :: max(1, logits.shape[-1] // _LOGITS)]
            parts.append(torch.cat((some, logits.logsumexp(-1, keepdim=True)), dim=-1))
    return Trace({}, joined(parts, observer.cell.arrangement.axis, observer.slots))


def _moves_forward_only(bench: ReplayBench, flags: Flags, batch: MicroBatch, sights: Sequence[Sight]) -> bool:
    """Whether samples move only later ones, where work on each token lets them, whichever come first: what is left of
    one is what the next begins with. Of what holds the greatest of all one sample moves the others wherever it stands.
    """
    others = [one for one in sights if one.what == "other" and one.moved]
    if not others or any(one.first is None or one.first.kind != "other" for one in others):
        return False

    def is_forward(seen: Sequence[Sight]) -> bool:
        return all(moved[0] > (one.sample or 0) for one in seen for moved in one.moved)

    if not is_forward(others):
        return False
    observer = bench.observer(flags, batch.take(list(range(batch.rows))[::-1]))
    base = observer.trace()
    turned = [observer.of_sample(base, sample) for sample in range(min(batch.rows, _TURNED))]
    return any(one.moved for one in turned) and is_forward(turned)


def _attends(observer: Observer, sights: Sequence[Sight]) -> bool:
    """Whether any of the modules by which samples come to each other forms shares over keys: itself, where what the
    modules within it put out by token has not moved before.
    """
    modules = {one.first.module for one in sights if one.what == "other" and one.moved and one.first is not None}
    laid = observer.trace().laid if modules else {}
    return any(module == "the model" or attended.attends(observer, module, laid) for module in modules)


def _is_symmetric(
    bench: ReplayBench, flags: Flags, batch: MicroBatch, base: Trace, sights: Sequence[Sight]
) -> bool | None:
    """Whether each sample is what it was when all stand in another order: so does whatever takes all together (a mean,
    a norm, who is chosen of all), and no row that is handed on to the next. None where no sample moves another.
    """
    if not any(one.what == "other" and one.moved for one in sights):
        return None
    rows = list(range(batch.rows))
    hidden_of = bench.observer(flags, batch)
    for order in [rows[::-1], [*rows[1:], 0]][: 1 if batch.rows == _PAIR else None]:
        observer = bench.observer(flags, batch.take(order))
        hidden_ND = observer.hidden()
        for place, row in enumerate(order):
            was_ND, is_ND = base.hidden[hidden_of.sample_N == row], hidden_ND[observer.sample_N == place]
            if was_ND.shape != is_ND.shape or not worst(relative(was_ND, is_ND)) <= bench.same:
                return False
    return True


def _is_handed_round(sights: Sequence[Sight]) -> bool:
    """Whether of three samples or more that move others each moves one alone, and none the same: rows handed on. Or, in
    what mixes tokens, some alone: what takes all there is together moves all.
    """
    moving = [one for one in sights if one.what == "other" and one.moved]
    targets = [one.there[0] for one in moving if len(one.there) == 1]
    if len(moving) < _ROUND or len(targets) == len(moving) == len(set(targets)):
        return len(moving) >= _ROUND
    others = sum(one.what == "other" for one in sights) - 1
    is_mixed = all(one.first is not None and one.first.kind == "mixer" for one in moving)
    return is_mixed and all(0 < len(set(one.there) - {one.sample}) < others for one in moving)


def _agree_unturned(bench: ReplayBench, flags: Flags, reference: Flags, batch: MicroBatch) -> bool:
    """Whether the two are one as soon as nothing is rotated by its position, in either."""
    hidden = []
    for one in (reference, flags):
        observer = bench.observer(one, batch)
        with observer.at_one_position():
            hidden.append(observer.hidden())
    return worst(relative(*hidden)) <= bench.same


def _attended(
    bench: ReplayBench, parties: Sequence[Flags], batch: MicroBatch, parted: TensorPlace | None
) -> dict[str, Any]:
    """The key that one of two settings gives nothing where they part (lost), the token that is let see none (emptied),
    and whether their scores differ by what depends on positions alone (by_position); both in eager, which forms its
    shares where they can be read.
    """
    if parted is None or parted.kind != "mixer":
        return {}
    shares: list[attended.Attended] = []
    for flags in parties:
        eager = flags if flags.attention == "own" else replace(flags, attention="eager")
        observer = bench.observer(eager, batch)  # one after the other: the model has one kernel at a time
        for ids in (None, observer.all_changed()):
            one = attended.attended(observer, parted.module, ids)
            if one is None:
                return {}
            shares.append(one)
    cell, cell_other, own, own_other = shares
    gone, emptied = attended.lost_keys(observer, cell, own, parted), attended.emptied(observer, cell, own)
    by_position = gone is None and emptied is None and attended.is_by_position(cell, own, cell_other, own_other)
    return {"lost": gone, "emptied": emptied, "by_position": by_position}


def _with_more(
    bench: ReplayBench, flags: Flags, reference: Flags, batch: MicroBatch, observer: Observer, base: Trace
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """What moves when there is more of what no token may notice: columns of padding, in a pack one more sample. And
    the token that is lost then: of a last one, which nothing follows, nobody can be deaf to it but itself, and it hears
    itself in its query.
    """
    tried: list[tuple[str, MicroBatch, int]] = []
    if flags.packing:
        first = int(batch.valid_BS[0].sum())
        behind, before = batch.take([*range(batch.rows), 0]), batch.take([0, *range(batch.rows)])
        tried = [("company", behind, 0), ("company", before, first)]
    elif not batch.valid_BS.all():
        # What is counted in tiles may be the same for a few columns more.
        tried = [("wider", batch.wider(columns), 0) for columns in (_WIDER, batch.ids_BS.shape[1])]
    for what, more, begins in tried:
        with contextlib.suppress(CellError):
            sight = observer.differing(what, base, bench.observer(flags, more).trace(), bench.same, begins)
            if sight is not None:
                if _only_shifts(bench, flags, batch, observer, base, sight, begins):
                    sight.what = "shifted"
                batches = [one for _, one, _ in tried]
                return [sight.to_mapping("cell")], _lost_in(bench, flags, reference, batches, what)
    return [], None


def _only_shifts(
    bench: ReplayBench, flags: Flags, batch: MicroBatch, observer: Observer, base: Trace, sight: Sight, begins: int
) -> bool:
    """Whether what moves with more in front of it moves with nothing behind it: its slots decide, not their number."""
    kind = None if sight.first is None else sight.first.kind
    if kind in (None, "router"):
        return False  # who comes first takes a place with an expert
    if flags.packing:
        return begins > 0  # one more behind was tried first, and moved nothing
    if kind == "mixer" or not batch.has_left_padding():
        return False  # attention may see padding, whatever stands in it
    behind = bench.observer(flags, batch.wider(_WIDER, behind=True)).trace()
    return observer.differing("wider", base, behind, bench.same) is None


def _lost_in(
    bench: ReplayBench, flags: Flags, reference: Flags, batches: Sequence[MicroBatch], among: str
) -> dict[str, Any] | None:
    """The first token that is lost in one of these batches."""
    for batch in batches:
        with contextlib.suppress(CellError):
            observer = bench.observer(flags, batch)
            base = observer.trace()
            own = bench.observer(reference, batch)
            own_base = own.trace()
            parted = first_apart(observer, own_base, base, bench.same)
            asked = _asked_of(observer, [], own_base, base, parted, same=bench.same)
            found = _lost_within(bench, (flags, reference), batch, asked, parted)
            if found is not None:
                return {**found, "among": among}
    return None


def _proposed(
    bench: ReplayBench, parties: Sequence[Flags], batch: MicroBatch, traces: Sequence[Trace],
    parted: TensorPlace | None,
) -> Proposed:  # fmt: skip
    """What gradients say is lost or seen at the first tensor in which two settings part."""
    if parted is None or parted.kind == "position":
        return Proposed()
    apart_N = relative(traces[1].laid[parted.tensor], traces[0].laid[parted.tensor])
    observers, hang = [], []
    for flags in parties:
        observers.append(bench.observer(flags, batch))  # one after the other: the model has one kernel at a time
        queries = queries_of(observers[0], apart_N, bench.same, _QUERIES)
        within = observers[-1].heads(parted.module) if parted.kind == "mixer" and ".inputs" in parted.tensor else None
        one = hanging(observers[-1], parted, queries, 1 if within is None else within[1]) if queries else None
        if one is None:
            return Proposed()
        hang.append(one)
    return proposed(observers[0], observers[1], hang[0], hang[1], queries)


def _as_proposed(
    bench: ReplayBench, flags: Flags, batch: MicroBatch, base: Trace, told: Proposed, sights: Sequence[Sight]
) -> list[dict[str, Any]]:
    """What moves with the tokens and samples that gradients propose, where nothing that was changed before did."""
    if any(sight.moved for sight in sights) or not (told.later or told.samples):
        return []
    observer = bench.observer(flags, batch)
    tried = [observer.of_token(base, token) for token in told.later[:_TRIED]]
    known = {sight.sample for sight in sights if sight.what == "other"}
    tried += [observer.of_sample(base, sample) for sample in told.samples[:_TRIED] if sample not in known]
    return [sight.to_mapping("cell") for sight in tried if sight.moved]


def _lost(
    a: Observer, base: Trace, sights: Any, b: Observer, b_base: Trace, b_sights: Any, parted: TensorPlace | None
) -> dict[str, Any] | None:
    """Where a token first loses those that it must see: attention or a state, and no later than the two part. What
    works on each token by itself can only pass on what it is given.
    """
    like = {sight.token: sight for sight in b_sights if sight.what == "token"}
    for sight in sights:
        if sight.what == "token" and sight.token in like:
            found = lost(a, base, sight, b, b_base, like[sight.token])
            if found is None or found[0].kind not in ("mixer", "state"):
                continue
            place, is_itself = found
            if not _works(a, base, [one.trace for one in sights if one.trace is not None], place):
                continue
            follows = parted is not None and parted.kind != "position" and place.order > parted.order
            if parted is None or not follows or place.module == parted.module:
                return {**place.to_mapping(), "token": sight.token, "itself": is_itself}
    return None


def _asked_of(
    observer: Observer, sights: Sequence[Sight], own: Trace, cell: Trace, parted: TensorPlace | None,
    told: Proposed | None = None, *, same: float,
) -> list[int]:  # fmt: skip
    """Tokens of which one that is not what it is alone may have lost one: those that gradients propose, then those
    right before the first such token, those that were changed, and some of all of its past.
    """
    if parted is None:
        return []
    apart_N = relative(own.laid[parted.tensor], cell.laid[parted.tensor]).numpy() > same
    near: list[int] = []
    far: list[int] = []
    if apart_N.any():
        first = int(observer.position_N[apart_N].min())
        near = list(range(max(0, first - _BEFORE), first + 1))
        far = [int(one) for one in np.linspace(0, first, min(_FAR, first + 1))]
    changed = sorted({sight.token for sight in sights if sight.token is not None} | set(near))
    first_of_all = [] if told is None else told.lost[:_TRIED]
    return list(dict.fromkeys([*first_of_all, *changed, *far]))


def _works(observer: Observer, base: Trace, changed: Sequence[Trace], place: TensorPlace) -> bool:
    """Whether any token that was changed moves anything in a tensor: a module that is left out loses no key."""
    return any(
        place.tensor in one.laid and bool(observer.moved(base, one, place.tensor, STILL).any()) for one in changed
    )


def _moves_all_later(observer: Observer, base: Trace, other: Trace, name: str, token: int) -> bool:
    """Whether a changed token moves every later one of its samples in a tensor, of which there are some."""
    later = observer.position_N > token
    if name not in base.laid or name not in other.laid or not later.any():
        return False
    return bool(observer.moved(base, other, name, STILL)[later].all())


def _lost_within(
    bench: ReplayBench,
    parties: Sequence[Flags],
    batch: MicroBatch,
    tokens: Sequence[int],
    parted: TensorPlace | None,
) -> dict[str, Any] | None:
    """The same of the one module where they part: in its last layers a model has a token's past in all later ones."""
    if parted is None or parted.kind not in ("mixer", "state", "other") or parted.module == "the model":
        return None
    seen: list[dict[int, Trace]] = []
    bases = []
    observers = []
    for flags in parties:
        observers.append(bench.observer(flags, batch))  # one after the other: the model has one kernel at a time
        bases.append(observers[-1].trace(heads=observers[-1].heads(parted.module)))
        seen.append({token: observers[-1].nudged(parted.module, token) for token in tokens})
    (a, b), (base, b_base) = observers, bases
    for token in tokens:
        nudged = [Sight("token", None, token, trace=traces[token]) for traces in seen]
        found = lost(a, base, nudged[0], b, b_base, nudged[1])
        # What works on each token by itself can lose nobody but that one; a layer that is left out loses all there is.
        # And where tokens only take each other's places, one moves those that come too late, and few others.
        is_mixing = parted.kind != "other" or (
            found is not None
            and not found[1]
            and any(a.moves_later(base, seen[0][one], parted.tensor, one) for one in tokens)
            and _moves_all_later(b, b_base, seen[1][token], parted.tensor, token)
        )
        if found is None or not is_mixing or found[0].module != parted.module:
            continue
        if _works(a, base, list(seen[0].values()), found[0]):
            return {**found[0].to_mapping(), "token": token, "itself": found[1]}
    return None


def _logprobs_apart(bench: ReplayBench, hidden: Mapping[Flags, torch.Tensor], batch: MicroBatch) -> float | None:
    """Nats between the heads of two settings, of their final hidden states; None of a critic."""
    if bench.plan.is_critic:
        return None
    found = []
    for one, hidden_ND in hidden.items():
        observer = bench.observer(one, batch)
        cell = observer.cell
        head = cell.probed_head()
        slots, targets = (torch.from_numpy(part) for part in cell.arrangement.next_tokens())
        some = torch.linspace(0, max(0, slots.numel() - 1), min(_LOGPROBS, slots.numel())).long()
        whole = torch.zeros(cell.arrangement.layout.sample_BS.size, dtype=torch.long)
        whole[observer.slots] = torch.arange(observer.slots.numel())
        parameter = next(bench.model.causal_lm.parameters())
        given = hidden_ND[whole[slots[some]]].to(parameter.device, parameter.dtype)
        with torch.no_grad(), attention.pinned(one):
            found.append(token_logprobs(head, given, targets[some].to(parameter.device), bench.temperature)[0])
    if len(found) == 1:
        return 0.0  # the cell's setting is the reference's
    return float((found[0] - found[1]).abs().max()) if found[0].numel() else 0.0


def figures(distance_N: torch.Tensor) -> dict[str, float]:
    """How far tokens are off: the typical one, what three quarters are below, the worst."""
    sorted_N = distance_N.sort().values
    last = sorted_N.numel() - 1
    return {"typical": float(sorted_N[last // 2]), "most": float(sorted_N[last * 3 // 4]), "worst": float(sorted_N[-1])}


def is_mixture(model: LoadedModel) -> bool:
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    parts = (one for one in vars(model.config).values() if hasattr(one, "to_dict"))
    return any((stated(one, name) or 0) > 1 for one in (model.config, *parts) for name in names)
