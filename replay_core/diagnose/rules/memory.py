"""Memory: what logits over a large vocabulary take, what an out-of-memory line says, and a use that only grows."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from replay_core.diagnose import trends
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.finding import Evidence, Finding, error, finding, info, shown
from replay_core.diagnose.log_steps import steps_of
from replay_core.diagnose.raised import raised
from replay_core.diagnose.rule import Skip, rule
from replay_core.diagnose.signals import RunLog, Series, Told
from replay_core.regexes import regex

#: Logits that take this much of memory are worth knowing of.
LARGE_GIB = 4.0
_FP32 = 4


@rule("D36", "logits need much memory", link="memory", scope="batch", needs=("tokens",),
      source="slime#2253 (11.6k x 248k x 4 B = 10.8 GB), maxtext#4409")  # fmt: skip
def logits(batch: StepBatch) -> Finding | None:
    """T x V x 4 bytes of the largest micro-batch, T its padded token slots and V at least the largest id seen: one
    fp32 copy of the logits; a forward with softmax and backward holds two to three. 4 GiB and more is worth saying
    (info).
    """
    vocabulary = _vocabulary(batch)
    if vocabulary is None:
        return None
    slots = 0
    for sheet, _ in batch.columns.sheets:
        for part in sheet.parts:
            slots = max(slots, len(part) * part.width if part.width else int(np.sum(part.lengths)))
    gib = slots * vocabulary * _FP32 / 2**30
    if gib < LARGE_GIB:
        return None
    place = batch.laid.where("input_ids", sample=int(batch.flat.lengths_B.argmax()))
    return info(
        f"whole fp32 logits of the largest record take {gib:.1f} GiB, once",
        place,
        shown("token slots", slots),
        shown("vocabulary, at least", vocabulary, None, "largest token id"),
        shown("longest sample", int(batch.flat.lengths_B.max())),
        cause="logits are materialised over the whole vocabulary; two to three copies live at the loss",
        next_step=batch.laid.replay_command(place, "--logits chunked"),
    )


_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
          "KB": 2**10, "MB": 2**20, "GB": 2**30}  # fmt: skip
_SIZE = r"([\d.]+) ?(bytes|[KMGT]iB|[KMG]B|B)\b"
_TRIED = regex(rf"[Tt]ried to allocate {_SIZE}")
_FREE = regex(rf"of which {_SIZE} is free|; {_SIZE} free;")
_TOTAL = regex(rf"total capacity of {_SIZE}|{_SIZE} total capacity")
_UNALLOCATED = regex(rf"{_SIZE} is reserved by PyTorch but unallocated")
_OTHERS = regex(rf"Process \d+ has {_SIZE} memory in use")
_ALLOCATED = regex(rf"Of the allocated memory {_SIZE} is allocated by PyTorch")
_THIS_ONE = regex(r"this process has [\d.]+ [KMGT]iB memory in use")
_OWN = regex(rf"this process has {_SIZE} memory in use")
#: GiB that neither is free nor this process's before it is said; the share of the capacity that a process's tensors
#: fill where what it trains is too large for it; the share of what torch holds that lies idle before it is what fails.
#: The share of the GPU that others hold before they are why; GiB of one piece that are much by themselves.
HIDDEN, FULL, IDLE, OTHERS, LARGE = 2.0, 0.85, 0.05, 0.3, 1.0
#: The share of what the processes of Ray's table hold that one of them has, before it is the one.
HOLDS = 0.34
#: A layer that is computed again in the backward.
_RECOMPUTED = regex(r"utils/checkpoint\.py|activation_checkpointing|checkpoint_wrapper")
_IN_BACKWARD = regex(
    r"_engine_run_backward|autograd/function\.py|run_backward|torch/_tensor\.py\", line \d+, in backward"
    r"|autograd/__init__\.py\", line \d+, in backward"
)
#: GiB that a process holds beside what torch has reserved: its CUDA context, NCCL's buffers. What a saver of memory
#: keeps for itself may be a fifth of it.
_CONTEXT, _BESIDE = 3.0, 0.2
_LOGITS = regex(r"logit|log_softmax|logsumexp|logprob|log_prob|cross_entropy|entropy_from|lm_head|(?<!loss)\.float\(\)")
_OPTIMIZER = regex(r"optimi[sz]er|exp_avg|adam|_foreach", re.IGNORECASE)
_ATTENTION = regex(r"attention|sdpa|flash_attn", re.IGNORECASE)
_SOFTMAX = regex(r"\bsoftmax\b")
_ENGINE = regex(r"vllm|sglang|kv_cache|cache_engine|init_cache", re.IGNORECASE)
#: What torch says of pools in every process that has one.
_POOLS = "(e.g., CUDA Graphs)"
#: What an engine does as it starts.
_WARMS_UP = regex(
    r"(?i)warming up|capture cuda graph|cuda graph|dummy requests|profile_run|cuda_graph_runner|_dummy_run"
)
_STARTS = (
    "the start of the inference engine",
    "lower max_num_seqs (--max-running-requests), gpu_memory_utilization (--mem-fraction-static) or the graphs' sizes",
)
#: vLLM's allocator of an engine that sleeps and wakes.
_WAKES = regex(r"cumem_allocator|cumem\.py|\bwake_up\b|create_and_map|python_create_and_map")
_ASKS = regex(r'(?m)^File "([^"]+)", line (\d+), in (\w+)$')
#: Innermost frames: a head's product lies five below the model's forward.
_NEAR = 7
#: How Ray tells of an allocator's error in another process: without its line.
_CALLED = regex(r"ray::((?:\w+\.)?\w+\(\))")
_WRAPPED = regex(r"RayTaskError\(OutOfMemoryError\)")
_LOADS = "loading the model"
#: Phases by the functions of trainers' frames and of Ray's methods, the innermost first; and what makes each smaller.
_PHASES: tuple[tuple[re.Pattern[str], str, str], ...] = (
    (regex(r"(?i)update_weight|sync_(?:model|weight)|weight_sync|_to_(?:vllm|sglang|rollout)\b|wake_up|load_weights"),
     "the weight synchronisation to the engine",
     "send weights in smaller buckets; offload the trainer's optimizer before; lower gpu_memory_utilization"),
    (regex(r"(?i)save_(?:checkpoint|model)|state_dict"), "saving a checkpoint",
     "save sharded, or gather to the CPU; free the engine's cache before"),
    (regex(r"(?i)(?:ref\w*|old\w*|compute\w*|get\w*|forward)_?log_?probs?\b|reference_policy_logprobs|log_?probs?\("),
     "the forward for log-probabilities",
     "lower log_prob_micro_batch_size_per_gpu (logprob_batch_size, micro_rollout_batch_size), or the limit of tokens "
     "per micro-batch (log_prob_max_token_len_per_gpu, --max-tokens-per-gpu)"),
    (regex(r"(?i)critic|compute_values|value_model"), "the critic",
     "lower the critic's micro-batch (critic.ppo_micro_batch_size_per_gpu) or its limit of tokens; gradient "
     "checkpointing; offload what is not in use"),
    (regex(r"(?i)generat\w*|\brollout\(\)|chat_completion"), "the generation of rollouts",
     "a smaller batch of prompts at once (rollout.micro_batch_size, per_device batch), shorter responses, and for an "
     "engine beside the trainer a lower gpu_memory_utilization or more tensor parallelism"),
    (regex(r"(?i)update_(?:actor|policy)|ppo_train|train_actor|policy_loss|\b(?:Actor|Policy)\w*\.(?:fit"
    r"|train)\w*\("), "the actor's update",
     "lower the update's micro-batch (ppo_micro_batch_size_per_gpu, per_device_train_batch_size) or its limit of "
     "tokens (ppo_max_token_len_per_gpu, --max-tokens-per-gpu); gradient checkpointing; offload the optimizer"),
    (regex(r"(?i)training_step|optimizer_step|backward|forward_backward|\b(?:train|fit)(?:_step)?\(\)|compute_loss"),
     "a step of training",
     "lower the update's micro-batch (ppo_micro_batch_size_per_gpu, per_device_train_batch_size) or its limit of "
     "tokens (ppo_max_token_len_per_gpu, --max-tokens-per-gpu); gradient checkpointing; offload the optimizer"),
    (regex(r"(?i)init_(?:model|worker|process)|__init__|from_pretrained|build_model"), _LOADS,
     "more GPUs or a sharded, offloaded load; see what else is on the GPU"),
)  # fmt: skip
#: A backward is one of any training: who called it says which. Loading is told last, by a class's first method.
_PARTICULAR = tuple(one for one in _PHASES if one[1] not in ("a step of training", _LOADS))
#: Vocabulary sizes of families that are trained by RL; only to put a size into words.
_VOCABULARIES = {"Llama 3": 128256, "Qwen 2.5 and 3": 151936, "Qwen 3.5": 248320}
#: D36: growth of the memory level over the run that no allocator warm-up explains.
GROWTH = 1.2
#: And of the growth from its first third to its middle one, what there has to be from there to its last.
SLOWS = 0.5


def gib(text: str, pattern: re.Pattern[str]) -> float | None:
    """The first size the pattern finds, in GiB."""
    found = pattern.search(text)
    if not found:
        return None
    number, unit = next(
        (found.group(i), found.group(i + 1)) for i in range(1, len(found.groups()), 2) if found.group(i)
    )
    return float(number) * _UNITS[unit] / 2**30


@rule("D36", "out of memory", link="memory", scope="signals", needs=("event:oom|event:oom_host",),
      source="slime#2253; torch's and Ray's own message")  # fmt: skip
def out_of_memory(log: RunLog) -> Finding | None:
    """Reads the allocator's line: what was asked for, free, reserved but unallocated, and the frames above it.

    Asked for more than is free while more than that, and a twentieth of all that torch holds, lies reserved but
    unallocated is fragmentation. Tensors of the process that fill .85 of the GPU are said to; what is neither free nor
    its own is another process's. Frames that
    handle logits or log-probabilities, with a large piece asked for, are the whole-vocabulary logits: T * V * 4 B in
    fp32, and two to three times that with its gradient. Otherwise the frames name attention, optimizer or engine.
    Where memory only grew up to there (L04), and responses did not, it is a leak that has used it up, whatever asked
    for the last of it; where the log holds no lengths, it only grew. Of the host's memory, a process that holds a third
    of what Ray's table has is named.
    """
    told = log.events("oom", "oom_host")
    # Ray tells of it in the caller first: the allocator's own line says more, and of its envelopes the last is nearest.
    one = next((each for each in told if not _WRAPPED.search(each.text)), told[-1])
    tried, line = gib(one.text, _TRIED), f"line {one.point.line}"
    size = f" asking for {tried:.3g} GiB" if tried is not None else ""
    on_host = one.kind == "oom_host"
    if on_host:
        evidence = [shown("line", one.text.splitlines()[0][:200], None, line)]
        cause = "the machine's memory, not the GPU's: offloaded states, dataloader workers, rollouts kept for too long"
        next_step = "fewer workers or less offloading; watch the resident memory per step"
        if (user := _most(log.events("memory_user"))) is not None:
            evidence.append(shown("holds most of it, by Ray's table (GB)", user[1], None, user[2]))
            size = f": {user[0]} holds {user[1]:.4g} GB"
    else:
        evidence, cause, next_step = _on_device(one, tried, line)
        if (found := _phase(one, [*told, *log.events("traceback")])) is not None:
            size += f" in {found[0]}"
            next_step = "; ".join(dict.fromkeys(f"{found[1]}; {next_step}".split("; ")))
            if found[0] == _LOADS and cause == _UNSHOWN:
                cause, next_step = _of_weights(tried, gib(one.text, _ALLOCATED)), found[1]
    if _WAKES.search(one.text) or any(_WAKES.search(each.text) for each in log.events("traceback")):
        size += " as the engine wakes up"
        cause = (
            "vLLM's sleeping engine takes its weights and KV cache back, and the trainer beside it has not given up "
            "enough: parameters, gradients, optimizer state or cached pieces stay on the GPU"
        )
        next_step = (
            "offload the trainer before the rollout (param_offload, optimizer_offload, --adam_offload, "
            "torch.cuda.empty_cache()); lower gpu_memory_utilization; leave the engine's sleep mode off if both fit"
        )
    grown = _grown(log, of_host=on_host)
    if grown is not None and not _is_longer(log, grown[2] / grown[1]):
        series, begun, now = grown
        leak = ", a leak" if log.has("response_length") else ""
        size += f": it grew step by step from {begun:.4g} to {now:.4g} before ({series.name}){leak}"
        cause, next_step = (_KEPT_ON_HOST, _WHO_GROWS) if on_host else (_KEPT, _SNAPSHOT)
    ends = (one.point.line or 0) > log.last_lines().get(one.point.path, 0)
    if ends and one.point.step is not None and not log.is_counted:
        size += f", after step {one.point.step}"
    return error(
        f"out of {'host' if on_host else 'GPU'} memory{size}",
        one.point.where(),
        *evidence,
        # Behind the last metric it is how the run ended, which comes before what else is wrong with it.
        link="dump" if ends else "",
        cause=cause,
        next_step=next_step,
        steps=steps_of(each.point for each in told),
    )


_USER = regex(r"^(\d+)\s+([\d.]+)\s+(.+)$")


def _most(told: Sequence[Told]) -> tuple[str, float, str] | None:
    """Which process of Ray's table holds most of the host's memory, how many GB, and where that stands; None where none
    holds a third of what all of them do.
    """
    rows = [(found[3].strip(), float(found[2]), one) for one in told if (found := _USER.match(one.text))]
    if not rows:
        return None
    name, size, one = max(rows, key=lambda row: row[1])
    if size < HOLDS * sum(row[1] for row in rows):
        return None
    return name.removeprefix("ray::"), size, f"line {one.point.line}"


def _of_weights(tried: float | None, held: float | None) -> str:
    """What fills the GPU while a model is made, in words: no batch has come yet."""
    twice = tried is not None and held is not None and tried >= LARGE and 0.8 * held <= tried <= 1.25 * held
    return (
        "weights, and what is made beside them before any batch: "
        + (
            f"one piece of {tried:.4g} GiB is asked for while {held:.4g} GiB are held already, as much again (a "
            "buffer of "
            "gradients or a second copy of the weights), and one GPU cannot hold both"
            if twice
            else "buffers of gradients, master weights in fp32, a reference beside the policy do not fit on one GPU"
        )
        + "; micro-batches and lengths have no part in it"
    )


def _phase(one: Told, told: Sequence[Told]) -> tuple[str, str] | None:
    """Phase and what makes it smaller, by the innermost of its frames that tells, or the method that Ray names."""
    if _WARMS_UP.search(one.text.replace(_POOLS, "")):
        return _STARTS
    called = [found[1] for each in told for found in _CALLED.finditer(each.text)]
    frames = [text.rpartition(", in ")[2] + "()" for text in one.text.splitlines()[1:] if text.startswith("File ")]
    # The frames before an envelope are the caller's.
    texts = [*([] if _WRAPPED.search(one.text) else reversed(frames)), *reversed(called)]
    for known in (_PARTICULAR, _PHASES):
        for text in texts:
            if (found := next(((phase, step) for names, phase, step in known if names.search(text)), None)) is not None:
                return found
    return None


def _on_device(one: Told, tried: float | None, line: str) -> tuple[list[Evidence], str, str]:
    """Evidence, cause and next step of the allocator's line and the frames under it."""
    text = one.text
    free, total, spare = (gib(text, pattern) for pattern in (_FREE, _TOTAL, _UNALLOCATED))
    others = sum(_of_others(text, spare))
    held, own = gib(text, _ALLOCATED), gib(text, _OWN)
    if not others and own is not None and total is not None and free is not None:
        # In a container torch may not find its own process, which then has 0 bytes: it has what its tensors hold.
        known = own if held is None or own >= held else held + (spare or 0.0) + _CONTEXT
        if total - free - known > HIDDEN:
            others = total - free - known  # in another container torch does not see whose it is
    numbers = {"asked for": tried, "free": free, "capacity": total, "allocated by tensors": held,
               "reserved, unallocated": spare}  # fmt: skip
    cause, next_step = _blamed(text, tried, spare)
    if cause == _UNSHOWN and held is not None and total and held >= FULL * total:
        cause = (
            f"{held:.4g} of {total:.4g} GiB are held by tensors of this process, {held / total:.0%}: weights, their "
            "gradients and optimizer states (of a parameter trained by Adam in mixed precision 16 bytes and more) and "
            "activations fill it; nothing is lost to fragmentation"
        )
        next_step = (
            "shard it over more GPUs (ZeRO-3, FSDP, tensor parallelism) or offload the optimizer, an adapter (LoRA, "
            "QLoRA) or a smaller model; gradient checkpointing and fewer tokens per micro-batch help where activations "
            "are what fills it"
        )
    # Without the others it would have fitted: they are why, whatever asked for the last of it.
    if others and total and others > OTHERS * total and (tried is None or others >= tried):
        numbers["other processes on the GPU"] = others
        asks = f"; besides, {cause}" if tried is not None and tried >= LARGE and cause != _UNSHOWN else ""
        cause = (
            f"other processes hold {others:.4g} of the GPU's {total:.4g} GiB: an inference engine or trainer beside "
            "this one that has not given its memory back, somebody else's job, a second copy of this one, or an "
            f"orphan of the last run{asks}"
        )
        next_step = "nvidia-smi names the processes: end an orphan, use a GPU of one's own, or lower " + (
            f"gpu_memory_utilization; {next_step}" if asks else "gpu_memory_utilization"
        )
    evidence = [
        shown(f"{name} (GiB)", round(value, 3), None, line) for name, value in numbers.items() if value is not None
    ]
    frame = next((text for text in reversed(text.splitlines()[1:]) if text.startswith("File ")), None)
    if frame:
        evidence.append(shown("last frame", frame[:160], None, line))
    caller = raised(one).own
    if caller is not None and caller is not raised(one).last:
        evidence.append(shown("called by", f"{caller.place}: {caller.code}"[:160], None, line))
        if cause == _UNSHOWN:
            cause = f"{_GROW}: it was asked for below {caller.place}"
    return evidence, cause, next_step


def _of_others(text: str, spare: float | None) -> list[float]:
    """GiB of each other process on the GPU. In a container torch does not know its own number there, and lists itself:
    the process that holds what torch has allocated and reserved, and little more, is this one: of several the nearest.
    """
    found = [float(number) * _UNITS[unit] / 2**30 for number, unit in _OTHERS.findall(text)]
    allocated = gib(text, _ALLOCATED)
    if _THIS_ONE.search(text) or allocated is None:
        return found
    own = allocated + (spare or 0.0)
    most = own + max(_CONTEXT, _BESIDE * own)
    itself = min((size for size in found if own - 0.1 <= size <= most), default=None)
    if itself is not None:
        found.remove(itself)
    return found


_GROW = "activations and logits grow with the longest micro-batch"
_UNSHOWN = f"{_GROW}; the log does not show where it happened"


def _blamed(text: str, tried: float | None, spare: float | None) -> tuple[str, str]:
    """Cause and next step, from what was spare and the frames that lead to it."""
    frames = "\n".join(text.splitlines()[1:])
    if _WARMS_UP.search(text.replace(_POOLS, "")):
        return (
            "the inference engine has too little memory left as it starts: CUDA graphs, the sampler's dummy requests "
            "or the KV cache do not fit beside the weights",
            "lower max_num_seqs (--max-running-requests), gpu_memory_utilization (--mem-fraction-static) or the "
            "graphs' batch sizes; enforce_eager=True",
        )
    held = gib(text, _ALLOCATED)
    idle = spare is not None and (held is None or spare >= IDLE * (held + spare))
    if tried is not None and spare is not None and spare > tried and idle:
        return (
            "fragmentation: more than was asked for lies reserved, in pieces that are too small",
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )
    # What asked for it is among the innermost frames; those far out name what was going on.
    near = "\n".join(re.split(r"\n(?=File )", frames)[-_NEAR:])
    if _LOGITS.search(near):
        words = ""
        if tried is not None and tried >= 0.5:
            tokens = [f"{tried * 2**30 / 4 / size:,.0f} tokens ({name})" for name, size in _VOCABULARIES.items()]
            words = f"; {tried:.3g} GiB of fp32 logits are " + ", ".join(tokens)
        return (
            "logits of the whole vocabulary in fp32: tokens x vocabulary x 4 B, again for their gradient" + words,
            "compute log-probabilities in chunks, or over fewer tokens per micro-batch; "
            "rldbg replay DUMP --logits whole forecasts the same, rldbg replay DUMP --logits chunked does without",
        )
    inside = _IN_BACKWARD.search("\n".join(frames.splitlines()[-3:])) is not None
    if inside and _RECOMPUTED.search(frames):
        return (
            "a layer that is computed again in the backward (gradient checkpointing): what one layer needs of the "
            "longest rows of the micro-batch, its attention's scores or its MLP, does not fit beside what is held",
            "fewer tokens per micro-batch or shorter responses (prompts with images count as many tokens); a flash "
            "attention kernel",
        )
    if inside:
        return (
            "the backward pass: activations that the forward kept, and gradients beside them, of the longest rows of "
            "the micro-batch",
            "gradient checkpointing; fewer tokens per micro-batch",
        )
    for pattern, cause, step in (
        (_OPTIMIZER, "the optimizer's state, which its first step allocates", "shard or offload the optimizer state"),
        (_SOFTMAX, "a softmax's copy of its input: the logits of a batch, whole rows where it generates without an "
         "engine, or the scores of an attention without a flash kernel", "fewer rows or tokens at once"),
        (_ENGINE, "the inference engine's cache", "lower the engine's share of GPU memory (gpu_memory_utilization)"),
        (_ATTENTION, "attention, whose scores grow with the square of the length where no flash kernel runs",
         "rldbg replay DUMP --matrix shows which attention runs and what it needs"),
    ):  # fmt: skip
        if pattern.search(near if pattern is not _ENGINE else frames):
            return cause, step
    if _WRAPPED.search(text):
        return (
            "the process that Ray names asked for more GPU memory than was free; how much, the allocator's own line in "
            "its log tells",
            "the worker's log (/tmp/ray/session_latest/logs) holds that line",
        )
    if (asked := _ASKS.findall(near)) and asked[-1][2] in ("forward", "apply", "__call__", "_call_impl"):
        file, at, function = asked[-1]
        return (
            f"the model's forward ({function}, {file.rpartition('/')[2]}:{at}): what it needs grows with the longest "
            "rows of the micro-batch",
            "fewer tokens per micro-batch, or shorter samples (leave the longest ones out); gradient checkpointing",
        )
    return (
        _UNSHOWN,
        "fewer tokens per micro-batch; rldbg record -- YOUR COMMAND, then "
        "rldbg replay rldbg-dump forecasts T x V x 4 B",
    )


@rule("L04", "memory only grows", link="memory", scope="signals", needs=("memory_gb|phase_memory_mb",),
      source="rldbg; SkyRL memory snapshots")  # fmt: skip
def memory_grows(log: RunLog) -> Finding | None:
    """A step's peak memory rises over the run (16 steps, p < 0.005), by 20 % from its first third to its last.

    A peak that is kept since the start (max_memory_allocated without a reset) rises in steps and then stays: the rise
    must go on in the last half, by half of what the first half had and more: what fills a cache slows down. Worth
    knowing alone where responses get longer all along, by half of that growth and more; so is the host's memory, which
    is the whole node's, in a run that did not run out of it.
    """
    if not _long(log):
        raise Skip(f"needs the memory of {2 * trends.MIN_STEPS} steps or more")
    if (grown := _grown(log)) is not None:
        series, begun, now = grown
        longer, known = _is_longer(log, now / begun), log.has("response_length")
        if _OF_HOST.search(series.name):
            return _host_grows(log, series, begun, now)
        return finding(
            "info" if longer else "warning",
            f"memory grows from {begun:.4g} to {now:.4g} and goes on: {series.name}"
            + (
                ", as responses get longer"
                if longer
                else ", and responses do not grow with it: a leak"
                if known
                else ""
            ),
            series.last.where(series.name),
            shown(series.name, now, f"< {GROWTH:g} x {begun:.4g}", series.source),
            cause=f"longer responses; or {_KEPT}"
            if longer
            else _KEPT
            if known
            else f"{_KEPT}; or longer responses, whose lengths the log does not hold",
            next_step=_SNAPSHOT,
            steps=steps_of(series.points[-3:]),
        )
    return None


_OF_HOST = regex(r"(?i)(?:^|[/_.])(?:cpu|host|rss|ram)(?:[/_.]|$)")


def _host_grows(log: RunLog, series: Series, begun: float, now: float) -> Finding:
    """The host's memory, which is the whole node's: files that are cached, other processes, a store that fills up. That
    it grows is worth knowing, and a warning where the run ran out of it.
    """
    return finding(
        "warning" if log.events("oom_host") else "info",
        f"the host's memory grows from {begun:.4g} to {now:.4g} and goes on: {series.name}",
        series.last.where(series.name),
        shown(series.name, now, f"< {GROWTH:g} x {begun:.4g}", series.source),
        cause="offloaded weights and states, data workers, Ray's object store, cached files or other processes of the "
        "node; or something that is kept from step to step (metrics, samples, trajectories)",
        next_step="compare it with the node's memory (free -g), and how long the run still takes; py-spy or memray on "
        "the process that grows; ray memory names objects that are held",
        steps=steps_of(series.points[-3:]),
    )


_KEPT = "something is kept from step to step: tensors with their graph in a list of metrics, a cache"
_KEPT_ON_HOST = (
    "something is kept from step to step on the host: samples, trajectories or metrics in a list of the process that "
    "grows, objects of Ray's store that are still referred to, copies of offloaded weights"
)
_WHO_GROWS = (
    "look which process grows (ps -eo pid,rss,cmd --sort=-rss at two steps), then memray or tracemalloc in it; ray "
    "memory names objects that are held"
)
_SNAPSHOT = "look what is kept: torch.cuda.memory._dump_snapshot() of two steps, side by side"


def _long(log: RunLog) -> list[Series]:
    every = [*log.all("memory_gb"), *log.all("phase_memory_mb")]
    return [one for one in every if len(one.finite) >= 2 * trends.MIN_STEPS]


def _grown(log: RunLog, *, of_host: bool | None = None) -> tuple[Series, float, float] | None:
    """Of the GPU's memory and the host's, or of the one that is asked for, the one that grows most, and from what to
    what; None where none only grows.
    """
    every = [one for one in _long(log) if of_host is None or (_OF_HOST.search(one.name) is not None) == of_host]
    series = max(every, key=_growth, default=None)
    if series is None:
        return None
    values = series.finite
    third = len(values) // 3
    begun, now = trends.level(values[:third], third), trends.level(values, third)
    half = len(values) // 2
    rises = trends.rises(values[half:]) and trends.rises(values)
    # What fills up to a size (a page cache, pinned buffers, an allocator's pool) grows less and less.
    middle = trends.level(values[: half + third // 2], third)
    goes_on = now - middle >= SLOWS * (middle - begun)
    return (series, begun, now) if begun > 0 and now > GROWTH * begun and rises and goes_on else None


def _is_longer(log: RunLog, times: float) -> bool:
    """Whether responses get longer all along, by half of what memory's growth, so many times, is: it does so of itself
    then. (By half: what a step takes goes with the longest ones, and the log may hold the mean.)
    """
    length = log.get("response_length")
    return length is not None and trends.rises(length.finite) and _growth(length) - 1 >= 0.5 * (times - 1)


def _growth(series: Series) -> float:
    """How many times its first third a series' last third is."""
    values = series.finite
    third = len(values) // 3
    begun = trends.level(values[:third], third)
    return trends.level(values, third) / begun if begun > 0 else 0.0


def _vocabulary(batch: StepBatch) -> int | None:
    """No fewer tokens than this are in the vocabulary: the largest id seen, and one."""
    return None if batch.tokens_N is None or not batch.tokens_N.size else int(batch.tokens_N.max()) + 1
