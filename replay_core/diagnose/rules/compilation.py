"""What torch.compile says in a log: recompiles and graph breaks. Lines of TORCH_LOGS and warnings."""

from __future__ import annotations

import re
from collections.abc import Iterator

from replay_core.diagnose.finding import Finding, error, finding, shown, warning
from replay_core.diagnose.log_steps import steps_of
from replay_core.diagnose.rule import rule
from replay_core.diagnose.signals import RunLog, Told
from replay_core.regexes import regex

#: D32: static, then with dynamic lengths, is normal: one recompile per function.
NORMAL_RECOMPILES = 1
_FUNCTION = regex(r"Recompiling function (\S+) in (\S+)")
_LIMIT = regex(r"hit config\.(\w+)(?: \((\d+)\))?")
_ITEM = regex(r"\.item\(\)|aten\._local_scalar_dense|data.dependent", re.IGNORECASE)
_UNPAD = regex(r"unpad|flash|varlen|max_seqlen|cu_seq", re.IGNORECASE)


@rule("D32", "compiled code is compiled again and again", link="time", scope="signals",
      needs=("event:recompile|event:recompile_limit",),
      source="torchtitan#2823, #3898; torch 2.x: recompile_limit 8")  # fmt: skip
def recompiles(log: RunLog) -> Iterator[Finding]:
    """More than one recompile of a function is a warning; the recompile limit (8) is an error.

    The first call compiles for its lengths, the second with a new length once more for any length, and that is
    normal: the second iteration may be slower than the first. dynamic=False compiles for every length; at the limit
    Dynamo falls back to eager without a further word.
    """
    hit, again = log.events("recompile_limit"), log.events("recompile")
    if hit:
        limit = _LIMIT.search(hit[0].text)
        number = limit.group(2) or limit.group(1) if limit else "8"
        yield error(
            "the recompile limit is reached: the function runs without compilation from here on",
            hit[0].point.where(),
            evidence=[
                shown("limit", number, None, f"line {hit[0].point.line}"),
                shown("recompiles logged", len(again), None, "log"),
            ],
            cause="a new graph for every length or every value of a Python number",
            next_step="torch.compile(dynamic=True) or mark_dynamic on the token axis, or pad to few lengths; "
            "TORCH_LOGS=recompiles names the guard; rldbg replay DUMP --compile inductor --dynamic on times it",
            steps=steps_of(told.point for told in hit),
        )
        return
    # One process each compiles its own: what counts is a function of one rank.
    by_function: dict[tuple[str, int | None], list[Told]] = {}
    for told in again:
        found = _FUNCTION.search(told.text)
        name = f"{found.group(1)} ({found.group(2)})" if found else "a function"
        by_function.setdefault((name, told.point.rank), []).append(told)
    (name, _), most = max(by_function.items(), key=lambda item: len(item[1]))
    if len(most) > NORMAL_RECOMPILES:
        yield warning(
            f"{name} is compiled {len(most) + 1} times",
            most[0].point.where(),
            evidence=[shown("recompiles", len(most), f"<= {NORMAL_RECOMPILES}", f"from line {most[0].point.line}")],
            cause="its inputs differ in a length or a Python number that Dynamo guards on",
            next_step="torch.compile(dynamic=True) or mark_dynamic on the token axis; "
            "rldbg replay DUMP --compile inductor --dynamic on",
            steps=steps_of(told.point for told in again),
        )


@rule("D33", "the graph breaks", link="time", scope="signals", needs=("event:graph_break",),
      source="transformers#35588, #33932, #41827; pytorch#148845")  # fmt: skip
def graph_breaks(log: RunLog) -> Finding | None:
    """A break at .item() (an unpadding attention reads its longest length) is a warning, other breaks are info.

    Passing cu_seq_lens and max_length as arguments, or capture_scalar_outputs, keeps the graph whole.
    """
    breaks = log.events("graph_break")
    items = [told for told in breaks if _ITEM.search(told.text)]
    told = (items or breaks)[0]
    unpads = " while attention is unpadded" if _UNPAD.search(told.text) else ""
    return finding(
        "warning" if items else "info",
        "the compiled graph breaks" + (f" at .item(){unpads}" if items else ""),
        told.point.where(),
        evidence=[
            shown("graph breaks", len(breaks), "0", f"line {told.point.line}"),
            shown("the first", told.text.splitlines()[0][:160], None, f"line {told.point.line}"),
        ],
        cause="a tensor's value is needed in Python: in flash attention's unpadding it is the longest length"
        if items
        else "code that Dynamo does not trace; each break ends a graph and starts another",
        next_step="pass cu_seq_lens_q/k and max_length_q/k as arguments, or "
        "torch._dynamo.config.capture_scalar_outputs = True; rldbg replay DUMP --matrix shows what each setting costs"
        if items
        else "TORCH_LOGS=graph_breaks names the lines; rldbg replay DUMP --compile inductor",
        steps=steps_of(told.point for told in breaks),
    )
