"""What torch.compile says in a log: recompiles (D32) and graph breaks (D33). Lines of TORCH_LOGS and warnings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from replay_core.diagnose.finding import Evidence, Finding
from replay_core.diagnose.signals import Part, Told, signal_rule

#: D32: static, then with dynamic lengths, is normal: one recompile per function.
NORMAL_RECOMPILES = 1

_FUNCTION = re.compile(r"Recompiling function (\S+) in (\S+)")
_LIMIT = re.compile(r"hit config\.(\w+)(?: \((\d+)\))?")
_ITEM = re.compile(r"\.item\(\)|aten\._local_scalar_dense|data.dependent", re.IGNORECASE)
_UNPAD = re.compile(r"unpad|flash|varlen|max_seqlen|cu_seq", re.IGNORECASE)


@signal_rule(
    "D32",
    "compiled code is compiled again and again",
    link="time",
    needs=("event:recompile,recompile_limit",),
    source="torchtitan#2823, #3898; torch 2.x: recompile_limit 8",
)
def recompiles(part: Part) -> Iterable[Finding]:
    """D32. More than one recompile of a function is a warning; the recompile limit (8) is an error.

    The first call compiles for its lengths, the second with a new length once more for any length, and that is
    normal: the second iteration may be slower than the first. dynamic=False compiles for every length; at the limit
    Dynamo falls back to eager without a further word.
    """
    hit = part.events("recompile_limit")
    if hit:
        limit = _LIMIT.search(hit[0].text)
        yield Finding(
            "D32",
            "error",
            "the recompile limit is reached: the function runs without compilation from here on",
            (
                Evidence(
                    "limit", limit.group(2) or limit.group(1) if limit else "8", source=f"line {hit[0].point.line}"
                ),
                Evidence("recompiles logged", len(part.events("recompile")), source="log"),
            ),
            "a new graph for every length or every value of a Python number",
            "torch.compile(dynamic=True) or mark_dynamic on the token axis, or pad to few lengths; "
            "TORCH_LOGS=recompiles names the guard; rldbg replay DUMP --compile inductor --dynamic on times it",
            "time",
            "torch._dynamo.config.recompile_limit",
            hit[0].point.where(),
            _steps(hit),
        )
        return
    counts: Counter[str] = Counter()
    first: dict[str, Told] = {}
    for told in part.events("recompile"):
        found = _FUNCTION.search(told.text)
        # One process each compiles its own: what counts is a function of one rank.
        name = f"{found.group(1)} ({found.group(2)})" if found else "a function"
        key = f"{name}#{told.point.rank}"
        counts[key] += 1
        first.setdefault(key, told)
    key, most = counts.most_common(1)[0]
    if most > NORMAL_RECOMPILES:
        told = first[key]
        yield Finding(
            "D32",
            "warning",
            f"{key.rpartition('#')[0]} is compiled {most + 1} times",
            (Evidence("recompiles", most, f"<= {NORMAL_RECOMPILES}", f"from line {told.point.line}"),),
            "its inputs differ in a length or a Python number that Dynamo guards on",
            "torch.compile(dynamic=True) or mark_dynamic on the token axis; "
            "rldbg replay DUMP --compile inductor --dynamic on",
            "time",
            "torchtitan#3898",
            told.point.where(),
            _steps(part.events("recompile")),
        )


@signal_rule(
    "D33",
    "the graph breaks",
    link="time",
    needs=("event:graph_break",),
    source="transformers#35588, #33932, #41827; pytorch#148845",
)
def graph_breaks(part: Part) -> Iterable[Finding]:
    """D33. A break at .item() (an unpadding attention reads its longest length) is a warning, other breaks are info.

    Passing cu_seq_lens and max_length as arguments, or capture_scalar_outputs, keeps the graph whole.
    """
    breaks = part.events("graph_break")
    items = [told for told in breaks if _ITEM.search(told.text)]
    told = (items or breaks)[0]
    unpad = _UNPAD.search(told.text) is not None
    yield Finding(
        "D33",
        "warning" if items else "info",
        "the compiled graph breaks at .item()" + (" while attention is unpadded" if unpad else "")
        if items
        else "the compiled graph breaks",
        (
            Evidence("graph breaks", len(breaks), "0", f"line {told.point.line}"),
            Evidence("the first", told.text.splitlines()[0][:160], source=f"line {told.point.line}"),
        ),
        "a tensor's value is needed in Python: in flash attention's unpadding it is the longest length"
        if items
        else "code that Dynamo does not trace; each break ends a graph and starts another",
        "pass cu_seq_lens_q/k and max_length_q/k as arguments, or torch._dynamo.config.capture_scalar_outputs = True; "
        "rldbg replay DUMP --matrix shows what each setting costs"
        if items
        else "TORCH_LOGS=graph_breaks names the lines; rldbg replay DUMP --compile inductor",
        "time",
        "transformers#35588",
        told.point.where(),
        _steps(breaks),
    )


def _steps(told: list[Told]) -> tuple[int, ...]:
    return tuple(sorted({one.point.step for one in told if one.point.step is not None}))
