"""Who speaks in a sample: turns of recorded messages, a chat template's marks, else of the mask."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replay_core.diagnose.flat import Array
    from replay_core.documents.samples import TurnOfTokens, TurnText

#: How chat templates begin a turn: ChatML (Qwen), Llama 3, Gemma, GLM and Phi.
_MARK = re.compile(
    r"<\|im_start\|>(\w{1,32})\n?|<\|start_header_id\|>(\w{1,32})<\|end_header_id\|>\s{0,2}|<start_of_turn>(\w{1,32})\n?"
    r"|<\|(system|user|assistant|tool|observation)\|>\n?"
)
#: Turns of one sample: what a mask that changes at every token would make is no conversation.
MAX_TURNS = 64


def spoken(prompt: str | None, response: str | None, most: int) -> list[TurnText]:
    """The turns of a sample's texts, at most `most` letters of each; one each where nothing says who speaks."""
    turns: list[TurnText] = []
    for name, text in (("prompt", prompt), ("response", response)):
        found = _messages(text or "") or _marked(text or "", name)
        if turns and found and found[0]["role"] == name and not turns[-1]["text"].strip():
            # A prompt ends on the mark of the answer, which is no turn of its own.
            found[0]["role"] = turns.pop()["role"]
        turns += found
    return [{"role": turn["role"], "text": turn["text"][:most]} for turn in turns[:MAX_TURNS]]


def _marked(text: str, name: str) -> list[TurnText]:
    """The turns that a chat template's marks make; `name` is whose the text before the first is."""
    marks = list(_MARK.finditer(text))
    ends = [*(mark.start() for mark in marks), len(text)]
    turns: list[TurnText] = [{"role": name, "text": text[: ends[0]]}] if ends[0] else []
    return turns + [
        {"role": _role(mark), "text": text[mark.end() : end]} for mark, end in zip(marks, ends[1:], strict=True)
    ]


def _role(mark: re.Match[str]) -> str:
    return next(name for name in mark.groups() if name)


def _messages(text: str) -> list[TurnText]:
    """Turns of messages as JSON, `[{"role": …, "content": …}]`; none where the text is no such list."""
    if not text.startswith("[{"):
        return []
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in said):
        return []
    return [
        {"role": one["role"][:32],
         "text": "\n".join([*_content(one.get("reasoning_content")), *_content(one.get("content")), *_calls(one)])}
        for one in said
    ]  # fmt: skip


def last_said(conversation: str) -> str:
    """The last turn of messages as JSON."""
    said = _messages(conversation)
    return said[-1]["text"] if said else ""


def _content(content: Any) -> list[str]:
    """Text, or the texts among parts of several kinds; what is no text is named by its kind."""
    if isinstance(content, list):
        parts = [one if isinstance(one, dict) else {"text": str(one)} for one in content]
        return [str(one.get("text", f"({one.get('type', 'part')})")) for one in parts]
    return [] if content is None else [str(content)]


def _calls(message: dict[str, Any]) -> list[str]:
    """The tools a message calls, as `name(arguments)`."""
    calls = message.get("tool_calls")
    found = []
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else {}
        if isinstance(function, dict) and "name" in function:
            found.append(f"calls {function['name']}({function.get('arguments', '')})")
    return found


def of_tokens(pieces: Sequence[str] | None, begin: int, counted_T: Array | None, length: int) -> list[TurnOfTokens]:
    """Which tokens of a sample are whose turn: by the marks in their text, else by where the mask begins and ends.

    Args:
        begin: where the response begins; counted_T: whether each token counts in the loss.
    """
    begin = min(begin, length)
    roles = {0: "prompt"} if begin else {}
    marks = [] if pieces is None else list(_MARK.finditer("".join(pieces)))
    if pieces is not None and marks:
        starts = list(accumulate((len(piece) for piece in pieces), initial=0))
        ends = {0: 0}
        for mark in marks:
            place = bisect_right(starts, mark.start()) - 1
            roles[place], ends[place] = _role(mark), mark.end()
        last = max((place for place in roles if place <= begin), default=0)
        # A prompt that ends on the mark of the answer: the answer begins there.
        if "".join(pieces)[ends[last] : starts[begin]].strip():
            roles[begin] = "response"
    else:
        roles[begin] = "response"
        if counted_T is not None:
            inside = [place for place in range(begin + 1, length) if counted_T[place] != counted_T[place - 1]]
            roles |= {place: "response" if counted_T[place] else "environment" for place in inside[: MAX_TURNS - 2]}
            if not counted_T[begin:].any():
                roles = {place: "prompt" if place < begin else "response" for place in roles}
    cuts = [*sorted(place for place in roles if place < length)[:MAX_TURNS], length]
    return [
        {"role": roles[place], "begin": place, "end": end,
         "counted": None if counted_T is None else int(counted_T[place:end].sum())}
        for place, end in pairwise(cuts) if end > place
    ]  # fmt: skip
