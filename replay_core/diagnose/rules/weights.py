"""The weights over the steps, recorded or their norm in a log: which of them an optimizer moves."""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from replay_core import pages
from replay_core.budget import stored_bytes
from replay_core.diagnose.algorithm import learning_rate, stated_by
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, Where, error, finding, listed, look_at, share, shown, warning
from replay_core.diagnose.gap import DISAGREE
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.diagnose.rules.states import moves
from replay_core.diagnose.signals import RunLog
from replay_core.diagnose.states_of_files import bare
from replay_core.dumps import open_run
from replay_core.records import Record, TensorRef
from replay_core.regexes import regex

#: Weights that are trained alone on purpose.
ADAPTER = regex(
    r"lora|adapter|ia3|prompt_encoder|prefix|soft_prompt|bitfit|dora|_proj\.[AB](?:\.weight)?$", re.IGNORECASE
)
#: Bytes of one step's weights that are read; larger ones are for `rldbg compare`.
MOST = 1 << 28
#: A warm-up of the critic is over by then.
_WARM_UP = 20


@rule("D57", "weights that no update moves", link="optimizer", scope="case",
      explains=("D46", "D55", "L14"),
      source="an optimizer made of other parameters than the model that is run")  # fmt: skip
def unmoved(case: Case) -> Finding | None:
    """Recorded weights (`Recorder.params`) of the first step beside those of the last: a warning where none changes, or
    where those that change are less than half of all numbers and are no adapters (LoRA and the like). A smaller part,
    of a twentieth and more, is worth knowing. So is none in the first 20 steps of a run that records a critic: the
    policy may wait for it. A warning of any part of a twentieth and more, all of whose weights are float32 and have
    recorded gradients that are not 0 in every step but the last, while others change. Where no weights are recorded, a
    warning where the checkpoints that the dump keeps of 3 steps and more are one, to the last bit, in runs whose
    gradients are not 0.
    """
    if (stands := _same_checkpoints(case)) is not None:
        return stands
    records = [record for record in case.records() if record.key.stage == "param" and record.key.step is not None]
    steps = sorted({record.key.step for record in records if record.key.step is not None})
    skip_if(len(steps) < 2, "needs the weights of two steps: rldbg record --params .")
    first, last = ([one for one in records if one.key.step == step] for step in (steps[0], steps[-1]))
    if sum(map(stored_bytes, {one.path for one in (*first, *last)})) > 2 * MOST:
        raise Skip("the weights are large: rldbg compare --stage param tells which of them change")
    before, after = _digests(first), _digests(last)
    shared = before.keys() & after.keys()
    still = sorted(name for name in shared if before[name][0] == after[name][0])
    total = sum(before[name][1] for name in shared)
    standing = sum(before[name][1] for name in still)
    moving = sorted(shared - set(still))
    if 20 * standing < total or not still or (moving and all(ADAPTER.search(name) for name in moving)):
        return None
    many = 2 * standing > total
    pushed = _pushed(case, set(still), steps[:-1]) if moving else set()
    warms = not moving and steps[-1] < _WARM_UP and any(record.key.role == "critic" for record in case.records())
    holder = next(one for one in last if one.get(still[0]) is not None)
    place = Where(step=steps[-1], stage="param", tensor=still[0], path=str(holder.path))
    if len(pushed) == len(still):
        return warning(
            f"{share(len(still), len(shared))} weights ({standing / total:.0%} of all numbers) have gradients and "
            f"never change over {len(steps)} steps, and the others do: the optimizer does not hold them",
            place,
            shown("weights that do not change", listed(still, 4), "none", f"steps {steps[0]} and {steps[-1]}"),
            shown("of them, with a gradient that is not 0", share(len(pushed), len(still)), "0"),
            shown("weights that change", listed(moving, 4)),
            cause="the optimizer was made of a part of the parameters (a filter by name, a group that is left out, "
            "layers that were wrapped or moved afterwards): these are trained for nothing, and count in the gradient's "
            "norm",
            next_step=look_at(place) + "   # and print the sizes of optimizer.param_groups",
            steps=steps,
        )
    return finding(
        "warning" if many and not warms else "info",
        f"{share(len(still), len(shared))} weights ({standing / total:.0%} of all numbers) never change over "
        f"{len(steps)} steps" + (": the optimizer holds a subset of the parameters" if moving and many else ""),
        place,
        shown("weights that change", listed(moving, 4) or "none"),
        shown("weights that do not", listed(still, 4), "none", f"steps {steps[0]} and {steps[-1]}"),
        cause=("the critic learns alone, in a warm-up that the policy waits for; or " if warms else "")
        + "the optimizer holds other parameters than the model's, or a part of them; they are frozen, or cut off "
        "from the loss; or updates are too small for their precision",
        next_step=look_at(place) + "   # and print the sizes of optimizer.param_groups",
        steps=steps,
    )


def _pushed(case: Case, names: set[str], steps: list[int]) -> set[str]:
    """Of these weights, those in float32 whose recorded gradients are not 0 in any of these steps. In fewer bits an
    update may be too small to be seen.
    """
    held = {
        bare(ref.name): ref.name for record in case.records()
        if record.key.stage == "param" and record.key.step == steps[0]
        for ref in record.tensors() if ref.name in names and ref.dtype == "float32"
    }  # fmt: skip
    found: dict[str, list[bool]] = {}
    for record in case.records():
        if record.key.stage != "gradient" or record.key.step not in steps or record.key.role == "critic":
            continue
        for ref in record.tensors():
            name = held.get(bare(ref.name), "")
            if name and ref.is_readable and len(ref.shape):
                found.setdefault(name, []).append(bool(np.asarray(pages.array(ref)).any()))
    return {name for name, each in found.items() if len(each) >= len(steps) and all(each)}


#: Checkpoints of so many steps are one before it is no warm-up.
STEPS = 3


def checkpoints_of(case: Case) -> dict[int, Path]:
    """The checkpoints that lie beside the records, by step."""
    root = (case.run.path if case.run.path.is_dir() else case.run.path.parent).resolve()
    return {step: Path(place) for step, place in sorted(case.run.models.items(), key=lambda one: one[0] or 0)
            if step is not None and Path(place).is_absolute() and Path(place).is_relative_to(root)}  # fmt: skip


def refs_by_step(case: Case) -> dict[int, list[TensorRef]]:
    """The weights of every checkpoint, by step; nothing where they are large."""
    places = {step: _weight_files(place) for step, place in checkpoints_of(case).items()}
    if sum(file.stat().st_size for files in places.values() for file in files) > MOST:
        return {}
    return {
        step: [ref for file in files for record in open_run(file).records for ref in record.tensors()]
        for step, files in places.items()
    }


def weights_by_step(case: Case) -> dict[int, NDArray[np.float32]]:
    """All weights of every checkpoint as one row of numbers, by step; nothing where they are large or do not match."""
    found = {}
    for step, refs in refs_by_step(case).items():
        found[step] = np.concatenate([
            np.asarray(pages.array(ref), dtype=np.float32).reshape(-1) for ref in sorted(refs, key=lambda ref: ref.name)
        ] or [np.zeros(0, np.float32)])  # fmt: skip
    return found if len({row.size for row in found.values()}) == 1 else {}


def moved_weights(case: Case) -> tuple[float, int, int] | None:
    """The largest change of a weight between the first and the last checkpoint beside the records, and their steps;
    None where there are not two, or they are large.
    """
    places = checkpoints_of(case)
    ends = [step for step, place in places.items() if _weight_files(place)]
    if len(ends) < 2:
        return None
    first, last = ends[0], ends[-1]
    files = [file for step in (first, last) for file in _weight_files(places[step])]
    if sum(file.stat().st_size for file in files) > MOST:
        return None
    rows = weights_by_step(case)
    if first not in rows or last not in rows or not rows[first].size:
        return None
    return float(np.abs(rows[last] - rows[first]).max()), first, last


def _same_checkpoints(case: Case) -> Finding | None:
    """Checkpoints beside the records (`Recorder.checkpoint`), first step beside last, that hold the same bytes."""
    places = checkpoints_of(case)
    steps = [
        step for step, place in places.items() if sum(file.stat().st_size for file in _weight_files(place)) <= MOST
    ]
    norms = [
        float(np.abs(pages.array(ref)).max(initial=0.0))
        for record in case.records()
        if record.key.stage in _NOTED and record.key.role != "critic" and record.key.step in steps[:-1]
        for ref in record.tensors()
        if ref.is_readable and not ref.is_text and ref.numel == 1 and ref.name.endswith("grad_norm")
    ]  # fmt: skip
    if len(steps) < STEPS or len(steps) < len(places) or not norms or not min(norms) > 0:
        return None
    first, last = ([blake2b(file.read_bytes()).digest() for file in _weight_files(places[step])]
                   for step in (steps[0], steps[-1]))  # fmt: skip
    if not first or first != last:
        return None
    waits = steps[-1] < _WARM_UP and any(record.key.role == "critic" for record in case.records())
    return finding(
        "info" if waits else "warning",
        f"the weights never change: checkpoints of {len(steps)} steps are one, to the last bit, although gradients are "
        "not 0",
        Where(step=steps[-1], path=str(places[steps[-1]])),
        shown("bytes that differ", 0, "> 0", f"checkpoints of steps {steps[0]} and {steps[-1]}"),
        shown("smallest gradient norm", min(norms)),
        cause=("the critic learns alone, in a warm-up that the policy waits for; or " if waits else "")
        + "the optimizer holds other parameters than the model's (a copy, the weights before they were wrapped or "
        "moved), is never stepped, or its learning rate is 0; or the same weights are saved again and again",
        next_step="compare id(p) of optimizer.param_groups with those of model.parameters()",
        steps=steps,
    )


def _weight_files(place: Path) -> list[Path]:
    return [file for file in sorted(place.glob("*.safetensors")) if file.is_file()]


def _digests(records: list[Record]) -> dict[str, tuple[bytes, int]]:
    """Digest and size of every weight."""
    return {
        ref.name: (blake2b(pages.array(ref).tobytes(), digest_size=16).digest(), ref.numel)
        for record in records for ref in record.tensors() if not ref.is_text and ref.is_readable and len(ref.shape)
    }  # fmt: skip


#: How far apart weights of two ranks may be in the first recorded step, as a share of their size, that were one before
#: it: shards have nothing in common. And how many times as far in the last one.
WERE_ONE, PARTED = 0.3, 1.5


def _share_norms(case: Case) -> bool:
    """Whether ranks noted one gradient norm in some update, as of gradients that are averaged."""
    noted = _norms_by_rank(case, "gradient") or _norms_by_rank(case, "optimizer")
    return any(not _differ(one) for each in noted.values() for one in each)


def _parting(by_step: dict[int, dict[int, list[Record]]], steps: list[int]) -> tuple[float, float] | None:
    """How far two ranks' weights are apart in the first and the last step, as a share of their size, where they begin
    next to each other and move apart from step to step; else None.
    """
    far = []
    for step in steps:
        first, *others = (
            {ref.name: np.asarray(pages.array(ref), np.float64).reshape(-1) for record in some
             for ref in record.tensors() if not ref.is_text and ref.is_readable and len(ref.shape)}
            for some in by_step[step].values()
        )  # fmt: skip
        pairs = [(first[name], other[name]) for other in others for name in first
                 if name in other and other[name].size == first[name].size > 1]  # fmt: skip
        size = sum(float((a * a).sum()) for a, _ in pairs)
        if not size > 0:
            return None
        far.append(float(np.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in pairs) / size)))
    rises = sum(b > a for a, b in pairwise(far)) >= 0.8 * (len(far) - 1)
    return (far[0], far[-1]) if far[0] < WERE_ONE and far[-1] > PARTED * far[0] and rises else None


@rule("D66", "the weights of the ranks drift apart", link="optimizer", scope="case",
      explains=("D09", "D12", "D14", "D15", "D24", "D35", "L10"), lasts=True,
      source="gradients that are not reduced over data-parallel ranks: no_sync left on, no wrapper")  # fmt: skip
def ranks_apart(case: Case) -> Finding | None:
    """Recorded weights of several ranks that are the same in their first step and differ in a later one: an error. So
    are those that differ there by less than .3 of their size and from step to step by more, to 1.5 times that over 4
    steps and more (not where ranks note one gradient norm): they are recorded after an update. Others
    that differ from the first step on are shards.

    Where no weights are recorded: an error where, of 4 steps and more, engine and trainer agree in the first (.03 nats)
    on every rank, and in the later half on some ranks alone, while the others are ten times as far off as these, and
    the ranks' gradient norms of one update, noted or logged, differ in every step (1e-3, and 1 % in most). Of an
    engine's replica that is left behind the rows part as well, and the norms of reduced gradients are one.

    And a warning where the norms that the optimizer clips by (`Recorder.optimizer`) differ so in every update of 4 and
    more, of ranks that have other samples: averaged gradients are one to the last digit. Worth knowing where sharding
    or model parallelism is stated, under which a rank may note the norm of its own part.
    """
    by_step: dict[int, dict[int, list[Record]]] = {}
    for record in case.records():
        key = record.key
        if key.stage == "param" and key.step is not None and key.rank is not None:
            by_step.setdefault(key.step, {}).setdefault(key.rank, []).append(record)
    steps = sorted(step for step, ranks in by_step.items() if len(ranks) > 1)
    if len(steps) < 2:
        return _without_weights(case)
    looked = (steps[0], steps[-1])
    paths = {one.path for step in looked for some in by_step[step].values() for one in some}
    if sum(map(stored_bytes, paths)) > 4 * MOST:
        raise Skip("the weights are large: rldbg compare --stage param holds two ranks against each other")

    def apart(step: int) -> tuple[int, list[str]]:
        """How many weights two ranks both have, and those that differ."""
        first, *others = (_digests(some) for some in by_step[step].values())
        shared = [name for name in first if all(name in other for other in others)]
        return len(shared), [name for name in shared if any(other[name][0] != first[name][0] for other in others)]

    (whole, before), (total, after) = map(apart, looked)
    # Of weights that are recorded after an update, the first step is the first to differ: shards are of nothing alike.
    grown = _parting(by_step, steps) if before and len(steps) >= RUN and not _share_norms(case) else None
    if not whole or not total or (before and grown is None):
        if (untold := _without_weights(case)) is not None:
            return untold
        raise Skip("the ranks' weights differ from the first step on: they are shards, or were never one")
    if not after:
        return None
    holder = next(one for some in by_step[looked[1]].values() for one in some if one.get(after[0]) is not None)
    return error(
        f"the weights of the ranks drift apart: {share(len(after), total)} differ at step {looked[1]}, "
        + (
            f"none did at step {looked[0]}"
            if grown is None
            else f"by {grown[1]:.2g} of their size after {grown[0]:.2g} at step {looked[0]}"
        ),
        Where(step=looked[1], rank=holder.key.rank, stage="param", tensor=after[0], path=str(holder.path)),
        shown("weights that differ", listed(after, 4), "none", f"step {looked[1]}"),
        shown("ranks", listed(sorted(by_step[looked[1]]))),
        cause="gradients are not reduced (all-reduce) between the data-parallel ranks: each trains a model of its own",
        steps=steps,
    )


#: How many times as far from the engine as the others the ranks are that left it; by how much gradient norms differ
#: that were reduced separately; and steps that tell.
TIMES, NORMS, RUN = 10.0, 0.01, 4


def _norms_by_rank(case: Case, stage: str) -> dict[int | None, list[dict[int, float]]]:
    """The gradient norm that each rank noted last in an update, where two ranks and more did, by step."""
    norms: dict[tuple[int | None, int | None, int | None], dict[int, list[float]]] = {}
    for record in case.records():
        key = record.key
        if key.stage != stage or key.rank is None or key.role == "critic":
            continue
        found = [float(pages.array(ref).reshape(-1)[0]) for ref in record.tensors()
                 if ref.is_readable and ref.numel == 1 and ref.name.endswith("grad_norm") and "clip" not in ref.name
                 ]  # fmt: skip
        norms.setdefault((key.step, key.epoch, key.minibatch), {}).setdefault(key.rank, []).extend(found)
    by_step: dict[int | None, list[dict[int, float]]] = {}
    for (step, *_), each in norms.items():
        if len(each) > 1 and all(each.values()):
            by_step.setdefault(step, []).append({rank: one[-1] for rank, one in each.items()})
    return by_step


#: What rounding leaves of one norm, and the share of updates that are further off than chance may bring two norms.
ROUNDED, MOST_OWN = 1e-3, 0.75


def _differ(norms: dict[int, float], by: float = NORMS) -> bool:
    return bool(np.ptp([*norms.values()]) > by * max(norms.values()))


#: Where a rank may note the norm of its gradient, the surest first: what it logs is its own or one for all.
_NOTED = ("gradient", "optimizer", "training_metrics")


def has_norms_of_ranks(case: Case) -> bool:
    """Whether several ranks noted the norm of their gradients: of averaged ones it is one."""
    return any(_norms_by_rank(case, one) for one in _NOTED)


#: What splits a model over ranks, in the names and values of settings.
_SHARDED = regex(r"fsdp|zero|megatron|tensor_(?:model_)?parallel|pipeline_(?:model_)?parallel|\b[tp]p_size\b|\btp\b",
                 re.IGNORECASE)  # fmt: skip


def _without_weights(case: Case) -> Finding | None:
    """What the ranks' gradients and their rows tell."""
    try:
        return _by_scores(case) or _by_norms(case)
    except Skip:
        if (told := _by_norms(case)) is None:
            raise
        return told


def _by_norms(case: Case) -> Finding | None:
    """Ranks that clip by norms of their own: what is averaged over ranks has one."""
    by_step = _norms_by_rank(case, "optimizer")
    every = [one for each in by_step.values() for one in each]
    if len(every) < RUN or not all(np.isfinite([*one.values()]).all() and _differ(one) for one in every):
        return None
    # Ranks that share their samples hold parts of one model.
    samples: dict[int | None, set[bytes]] = {}
    for batch in case.batches():
        for (rank, _), rows in batch.laid.rows_by_micro().items():
            if batch.tokens_N is not None and rank is not None:
                told = np.concatenate([batch.tokens_N[batch.flat.sample_N == row] for row in rows])
                samples.setdefault(rank, set()).add(told.tobytes())
    if len(samples) < 2 or set.intersection(*samples.values()):
        return None
    sharded = _SHARDED.search(str(stated_by(case.run))) is not None
    first, (step, norms) = every[0], next((step, each[0]) for step, each in by_step.items())
    part = "the norm is of a rank's shard (FSDP, ZeRO, tensor parallel) and is not summed over the ranks, so that each "
    part += "clips by another factor"
    lost = "gradients are not averaged (all-reduce) over the data-parallel ranks: each trains a model of its own"
    return finding(
        "info" if sharded else "warning",
        f"each rank has a gradient norm of its own, in all {len(every)} updates: gradients that are averaged over "
        "ranks have one",
        Where(step=step, rank=max(norms), stage="optimizer", tensor="grad_norm"),
        *(shown(f"gradient norm of rank {rank}", value, None, f"first update, step {step}")
          for rank, value in sorted(first.items())),
        cause=f"{part}; or {lost}" if sharded else f"{lost} (no_sync left on, no wrapper, a model called past it); or "
        f"{part}",
        next_step="compare a weight's sum over the ranks after a few updates: rldbg record --params .",
        steps=sorted(step for step in by_step if step is not None),
    )  # fmt: skip


def _by_scores(case: Case) -> Finding | None:
    """Ranks whose rows part from the engine that the others still agree with, and whose gradients are their own."""
    stage = next((one for one in _NOTED if _norms_by_rank(case, one)), _NOTED[0])
    noted = _norms_by_rank(case, stage)
    shared = [one for each in noted.values() for one in each]
    # Norms of averaged gradients are one but for rounding; those of two models come near each other by chance.
    own = [each for each in shared if _differ(each)]
    if len(shared) < RUN or not all(_differ(each, ROUNDED) for each in shared) or len(own) < MOST_OWN * len(shared):
        raise Skip("needs the weights of two ranks in two steps: rldbg record --params .")
    by_step: list[tuple[StepBatch, dict[int, float]]] = []
    for batch in case.batches():
        rollout, trainer = batch.columns.of("rollout_logprobs"), batch.trainer
        if rollout is None or trainer is None or batch.step is None:
            continue
        both_N = batch.pair(rollout, trainer)
        far_B = batch.flat.mean(np.where(both_N, np.abs(trainer.values_N - rollout.values_N), 0.0), both_N)
        rows: dict[int, list[int]] = {}
        for (rank, _), samples in batch.laid.rows_by_micro().items():
            rows.setdefault(-1 if rank is None else rank, []).extend(samples)
        if len(rows) > 1:
            by_step.append((batch, {rank: float(np.nanmean(far_B[samples])) for rank, samples in rows.items()}))
    if len(by_step) < RUN or max(by_step[0][1].values()) > DISAGREE:
        raise Skip("needs engine and trainer of two ranks in 4 steps, and ranks that agree in the first")
    later = by_step[len(by_step) // 2 :]
    apart = [
        rank for rank in later[-1][1] if all(each.get(rank, 0.0) > TIMES * min(each.values()) for _, each in later)
    ]
    if not apart or any(min(each.values()) > DISAGREE or max(each.values()) < DISAGREE for _, each in later):
        return None
    batch, last = later[-1]
    return error(
        f"the ranks train models of their own: the rows of rank{'s' * (len(apart) > 1)} {listed(apart)} part from the "
        "engine more and more, the others' agree with it, and each rank has another gradient norm",
        Where(step=batch.step, rank=apart[0], stage=stage, path=str(batch.laid.path)),
        *(shown(f"mean |trainer - rollout| of rank {rank} in the last step", value, f"< {DISAGREE:g}")
        for rank, value in sorted(last.items())),
        shown("updates whose gradient norm is another on each rank", share(len(own), len(shared)), "none"),
        cause="gradients are not reduced (all-reduce) between the data-parallel ranks: each trains a model of its own, "
        "and the engine gets that of one of them",
        steps=[each.step for each, _ in by_step],
    )  # fmt: skip


@rule("D67", "updates are lost in half-precision weights", link="optimizer", scope="case",
      explains=("D46", "D55", "D57", "L14"), lasts=True,
      source="bf16 has 8 bits: a step of the learning rate is lost beside a weight over 256 times it")  # fmt: skip
def rounded_away(case: Case) -> Finding | None:
    """Matrices, recorded or of the checkpoints beside the records, whose numbers are all bfloat16's (or float16's), in
    whatever precision they are stored, first step beside last. Of numbers whose half spacing is over 4 times the
    learning rate, which one step of Adam does not cross: with a float32 master copy as many change as they have moved,
    in shares of their spacing (3 tenths of the learning rate for each step between). Where 10 and more should have
    changed, and a tenth of those did, each step is rounded away: a warning. Left aside are embeddings, most of whose
    rows have no gradient, and matrices of which no number changes and no gradient is recorded (frozen ones).
    """
    rate = _rate(case)
    matrices = _recorded_matrices(case) or _kept_matrices(case)
    if rate is None or not rate or matrices is None:
        raise Skip("needs the weights of 3 steps, recorded or as checkpoints beside the dump, and the learning rate")
    steps, first, last, place = matrices
    names = [name for name in first if name in last and first[name].dtype in ("bfloat16", "float16", "float32")]
    if not names or sum(first[name].numel for name in names) * 4 > MOST:
        raise Skip("no matrices are recorded, or they are large")
    driven = _with_gradients(case)
    expected, moved, large, changed, total, grids = 0.0, 0, 0, 0, 0, set()
    for name in names:
        a, b = (pages.array(each[name]).astype(np.float32) for each in (first, last))
        bits = next((bits for bits in _BITS if _is_of(a, bits) and _is_of(b, bits)), None)
        if bits is None or not ((a != b).any() or name.removeprefix("param.") in driven):
            continue
        grids.add(bits)
        spacing = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(a), np.float32(1e-30)))) - bits)
        far = spacing > 8 * rate
        large += int(far.sum())
        expected += float(np.minimum(1.0, 0.3 * rate * (len(steps) - 1) / spacing[far]).sum())
        moved += int((a != b)[far].sum())
        changed, total = changed + int((a != b).sum()), total + a.size
    skip_if(not grids, "no weights that are trained are kept in half precision")
    if expected < EXPECTED or moved > 0.1 * expected:
        return None
    words = " and ".join(sorted(_BITS[bits] for bits in grids))
    return warning(
        f"updates are lost in {words} weights: {1 - changed / total:.1%} of the recorded numbers are the same to the "
        f"last bit after {len(steps) - 1} steps at a learning rate of {rate:.2g}",
        Where(step=steps[-1], stage="param", tensor=names[0], path=place),
        shown("numbers changed that a step cannot cross", moved, f"about {expected:.0f} with a float32 copy"),
        shown("numbers of that size", share(large, total)),
        shown("numbers that changed at all", share(changed, total)),
        cause=f"the weights are kept in {words} without a float32 master copy: a step that is smaller than half of "
        "their spacing is rounded away, however often it is taken",
        next_step="keep float32 weights in the optimizer (or stochastic rounding): a larger learning rate moves the "
        "small ones alone",
        steps=steps,
    )


_Matrices = tuple[list[int], dict[str, TensorRef], dict[str, TensorRef], str]


def _recorded_matrices(case: Case) -> _Matrices | None:
    """Recorded matrices of the first step and of the last, but for tables, with all steps of them; None of too few."""
    records = [one for one in case.records() if one.key.stage == "param" and one.key.step is not None]
    steps = sorted({one.key.step for one in records if one.key.step is not None})
    if len(steps) < 3:
        return None
    first, last = (
        _matrices(one for one in records if one.key.step == step and not one.key.rank) for step in (steps[0], steps[-1])
    )
    return steps, first, last, str(records[-1].path)


def _kept_matrices(case: Case) -> _Matrices | None:
    """The same of the checkpoints that lie beside the records."""
    places = {step: _weight_files(place) for step, place in checkpoints_of(case).items()}
    steps = [step for step, files in places.items() if files]
    if len(steps) < 3 or sum(file.stat().st_size for file in (*places[steps[0]], *places[steps[-1]])) > MOST:
        return None
    first, last = (
        _matrices(record for file in places[step] for record in open_run(file).records)
        for step in (steps[0], steps[-1])
    )
    return steps, first, last, str(places[steps[-1]][0])


def _matrices(records: Iterable[Record]) -> dict[str, TensorRef]:
    return {
        ref.name: ref for one in records for ref in one.tensors()
        if ref.is_readable and len(ref.shape) == 2 and not _TABLE.search(ref.name)
    }  # fmt: skip


#: Numbers that should have changed before none of them is no chance.
EXPECTED = 10
#: Bits behind the first of the half precisions, and their names.
_BITS = {7: "bfloat16", 10: "float16"}
#: Weights most rows of which have no gradient in a step.
_TABLE = regex(r"embed|wte|wpe|lm_head", re.IGNORECASE)


def _with_gradients(case: Case) -> set[str]:
    """Names of the weights of which a gradient is recorded that is not 0."""
    found: set[str] = set()
    for record in case.records():
        if record.key.stage != "gradient":
            continue
        for ref in record.tensors():
            name = ref.name.partition(".")[2]
            if ref.is_readable and ref.shape and name not in found and pages.array(ref).any():
                found.add(name)
    return found


def _rate(case: Case) -> float | None:
    """The largest learning rate that is logged, else the one that the run states."""
    rates = case.log.get("learning_rate")
    if rates is not None and rates.finite:
        return float(max(rates.finite))
    return learning_rate(case.algorithm)


def _is_of(values: NDArray[np.float32], bits: int) -> bool:
    """Whether every number has no more than so many bits behind its first, as half precisions leave them."""
    if not np.isfinite(values).all() or not values.any():
        return False
    kept = np.ascontiguousarray(values).view(np.uint32)
    return not bool((kept & np.uint32((1 << (23 - bits)) - 1)).any())


#: Steps before it is no chance; and without a learning rate to hold it against.
FEWEST, UNTOLD = 3, 8
#: How many times its last digit an update has to be before a norm that stands is no rounding.
SHOWS = 10.0


@rule("D57", "the norm of the weights stands still", link="optimizer", scope="signals", needs=("weight_norm",),
      explains=("D46", "D55", "L08", "L14"), lasts=True,
      source="Adam moves each weight by about the learning rate, and the norm of N weights by as much")  # fmt: skip
def norm_stands(log: RunLog) -> Finding | None:
    """The logged norm of the weights is one number in all of 3 steps and more, while gradients (or the loss) and the
    learning rate are not 0: a warning where the learning rate is 10 times the last digit of the norm (of float32, or
    as it is printed) and more. A norm of 700 in float32 does not show a rate of 1e-6: there it says nothing. Without a
    logged learning rate, 8 steps are worth knowing.
    """
    series = given(log.get("weight_norm"))
    values = series.finite
    if len(values) < FEWEST or len(values) < len(series.values):
        raise Skip(f"needs the norm of the weights in {FEWEST} steps")
    if len(set(values)) > 1 or not values[0] or not moves(log):
        return None
    rates = log.get("learning_rate")
    rate, digit = None if rates is None else median(rates.finite or [0.0]), _last_digit(values[0])
    skip_if(rate is None and len(values) < UNTOLD, f"needs the learning rate, or {UNTOLD} steps")
    if rate is not None and rate < SHOWS * digit:
        raise Skip(f"an update of {rate:.2g} does not show in a norm whose last digit is {digit:.2g}")
    return finding(
        "info" if rate is None else "warning",
        f"no weight changes: {series.name} is {values[0]:.8g} in all {len(values)} steps, although "
        + ("gradients are not 0" if log.has("grad_norm") else "the loss changes"),
        series,
        series.shown(values[0], "another number in every step"),
        *([] if rate is None else [shown("learning rate", rate, None, given(rates).source)]),
        shown("last digit of the norm", digit),
        cause="no update reaches the weights: the optimizer holds other parameters than the model that is run (copies, "
        "or those from before it was wrapped, moved or given its adapter), steps are skipped (a loss scale, a gradient "
        "that is not finite), or updates are lost in bf16",
        next_step="rldbg record --params . -- YOUR COMMAND, then compare the weights of two of its steps",
    )


def _last_digit(value: float) -> float:
    """What the norm can tell apart: float32's spacing, or the last decimal that it is printed with."""
    decimals = len(repr(value).partition("e")[0].partition(".")[2])
    return max(float(np.spacing(np.float32(abs(value)))), 10.0**-decimals)
