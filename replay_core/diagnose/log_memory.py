"""Memory, from a log: what an out-of-memory line says of its cause, and a use that only grows (D36)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from replay_core.diagnose import trends
from replay_core.diagnose.finding import Evidence, Finding
from replay_core.diagnose.rule import Skip
from replay_core.diagnose.signals import Part, Told, signal_rule

_UNITS = {
    "bytes": 1,
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 2**10,
    "MB": 2**20,
    "GB": 2**30,
}
_SIZE = r"([\d.]+) ?(bytes|[KMGT]iB|[KMG]B|B)\b"
_TRIED = re.compile(rf"[Tt]ried to allocate {_SIZE}")
_FREE = re.compile(rf"of which {_SIZE} is free|; {_SIZE} free;")
_TOTAL = re.compile(rf"total capacity of {_SIZE}|{_SIZE} total capacity")
_UNALLOCATED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_OTHERS = re.compile(rf"Process \d+ has {_SIZE} memory in use")

_LOGITS = re.compile(r"logit|log_softmax|logsumexp|logprob|log_prob|cross_entropy|entropy_from|lm_head|\.float\(\)")
_OPTIMIZER = re.compile(r"optimi[sz]er|exp_avg|adam|_foreach", re.IGNORECASE)
_ATTENTION = re.compile(r"attention|softmax\(|sdpa|flash_attn", re.IGNORECASE)
_ENGINE = re.compile(r"vllm|sglang|kv_cache|cache_engine|init_cache", re.IGNORECASE)

#: Vocabulary sizes of families that are trained by RL; only to put a size into words.
_VOCABULARIES = {"Llama 3": 128256, "Qwen 2.5 and 3": 151936, "Qwen 3.5": 248320}

#: D36: growth of the memory level over the run that no allocator warm-up explains.
GROWTH = 1.2


def gib(text: str, pattern: re.Pattern[str]) -> float | None:
    """The first size the pattern finds, in GiB."""
    found = pattern.search(text)
    if not found:
        return None
    number, unit = next(
        (found.group(i), found.group(i + 1)) for i in range(1, len(found.groups()), 2) if found.group(i)
    )
    return float(number) * _UNITS[unit] / 2**30


@signal_rule(
    "D36", "out of memory", link="memory", needs=("event:oom,oom_host",), source="slime#2253; torch's own message"
)
def out_of_memory(part: Part) -> Iterable[Finding]:
    """D36. Reads the allocator's line: what was asked for, free, reserved but unallocated, and the frames above it.

    Asked for more than is free while more than that lies reserved but unallocated is fragmentation. Frames that
    handle logits or log-probabilities, with a large piece asked for, are the whole-vocabulary logits: T * V * 4 B in
    fp32, and two to three times that with its gradient. Otherwise the frames name attention, optimizer or engine.
    """
    told = part.events("oom", "oom_host")
    one = told[0]
    yield _host(one, told) if one.kind == "oom_host" else _device(one, told)


def _device(one: Told, told: list[Told]) -> Finding:
    tried, free = gib(one.text, _TRIED), gib(one.text, _FREE)
    total, spare = gib(one.text, _TOTAL), gib(one.text, _UNALLOCATED)
    others = sum(float(n) * _UNITS[u] for n, u in _OTHERS.findall(one.text)) / 2**30
    line = f"line {one.point.line}"
    numbers = (("asked for", tried), ("free", free), ("capacity", total), ("reserved, unallocated", spare))
    evidence = tuple(
        Evidence(f"{name} (GiB)", round(value, 3), source=line) for name, value in numbers if value is not None
    )
    cause, next_step = _blamed(one.text, tried, spare)
    if others and total and others > 0.3 * total:
        evidence += (Evidence("other processes on the GPU (GiB)", round(others, 3), source=line),)
        cause += "; other processes hold much of the GPU (an inference engine beside the trainer)"
    frame = next((text for text in reversed(one.text.splitlines()[1:]) if text.startswith("File ")), None)
    if frame:
        evidence += (Evidence("last frame", frame[:160], source=line),)
    size = f" asking for {tried:.3g} GiB" if tried is not None else ""
    return Finding(
        "D36",
        "error",
        f"out of GPU memory{size}",
        evidence,
        cause,
        next_step,
        "memory",
        "slime#2253",
        one.point.where(),
        tuple(sorted({t.point.step for t in told if t.point.step is not None})),
    )


def _blamed(text: str, tried: float | None, spare: float | None) -> tuple[str, str]:
    frames = "\n".join(text.splitlines()[1:])
    if tried is not None and spare is not None and spare > tried:
        return (
            "fragmentation: more than was asked for lies reserved, in pieces that are too small",
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )
    if _LOGITS.search(frames):
        words = ""
        if tried is not None and tried >= 0.5:
            tokens = [f"{tried * 2**30 / 4 / size:,.0f} tokens ({name})" for name, size in _VOCABULARIES.items()]
            words = f"; {tried:.3g} GiB of fp32 logits are " + ", ".join(tokens)
        return (
            "logits of the whole vocabulary in fp32: tokens x vocabulary x 4 B, again for their gradient" + words,
            "compute log-probabilities in chunks, or over fewer tokens per micro-batch; "
            "rldbg replay DUMP --logits whole forecasts the same, rldbg replay DUMP --logits chunked does without",
        )
    for pattern, cause, step in (
        (_OPTIMIZER, "the optimizer's state, which its first step allocates", "shard or offload the optimizer state"),
        (_ENGINE, "the inference engine's cache", "lower the engine's share of GPU memory (gpu_memory_utilization)"),
        (_ATTENTION, "attention, whose scores grow with the square of the length where no flash kernel runs",
         "rldbg replay DUMP --matrix shows which attention runs and what it needs"),
    ):  # fmt: skip
        if pattern.search(frames):
            return cause, step
    return (
        "activations and logits grow with the longest micro-batch; the log does not show where it happened",
        "fewer tokens per micro-batch; rldbg record -- YOUR COMMAND, then "
        "rldbg replay rldbg-dump forecasts T x V x 4 B",
    )


def _host(one: Told, told: list[Told]) -> Finding:
    tried = gib(one.text, _TRIED)
    return Finding(
        "D36",
        "error",
        "out of host memory" + (f" asking for {tried:.3g} GiB" if tried is not None else ""),
        (Evidence("line", one.text.splitlines()[0][:200], source=f"line {one.point.line}"),),
        "the machine's memory, not the GPU's: offloaded states, dataloader workers, rollouts kept for too long",
        "fewer workers or less offloading; watch the resident memory per step",
        "memory",
        "torch's and Ray's own message",
        one.point.where(),
        tuple(sorted({t.point.step for t in told if t.point.step is not None})),
    )


@signal_rule(
    "L04",
    "memory only grows",
    link="memory",
    needs=("memory_gb|phase_memory_mb",),
    source="rldbg; SkyRL memory snapshots",
)
def memory_grows(part: Part) -> Iterable[Finding]:
    """L04. A step's peak memory rises over the run (16 steps, p < 0.005), by 20 % from its first third to its last.

    A peak that is kept since the start (max_memory_allocated without a reset) rises in steps and then stays: the rise
    must go on in the last half.
    """
    series = part.get("memory_gb") or part.get("phase_memory_mb")
    values = [] if series is None else series.finite
    if series is None or len(values) < 2 * trends.MIN_STEPS:
        raise Skip(f"needs the memory of {2 * trends.MIN_STEPS} steps or more")
    third = len(values) // 3
    begun, now = trends.level(values[:third], third), trends.level(values, third)
    goes_on = trends.drift(values[len(values) // 2 :]) > trends.DRIFT_Z
    if begun > 0 and now > GROWTH * begun and goes_on and trends.drift(values) > trends.DRIFT_Z:
        yield Finding(
            "L04",
            "warning",
            f"memory grows from {begun:.4g} to {now:.4g} and goes on",
            (Evidence(series.name, now, f"< {GROWTH:g} x {begun:.4g}", series.source),),
            "something is kept from step to step: tensors with their graph in a list of metrics, a cache, "
            "longer responses",
            "look whether the response length grows, too; torch.cuda.memory._dump_snapshot() of two steps",
            "memory",
            "rldbg",
            series.last.where(series.name),
            tuple(p.step for p in series.points[-3:] if p.step is not None),
        )
