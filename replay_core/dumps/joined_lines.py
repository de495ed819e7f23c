"""A flat mapping that is printed over several lines, as one line: a wide row a terminal or a paste has broken, an entry
of a pretty-printed `log_history`, what pprint makes of a step's metrics.

    {                                    {'loss': 0.0, 'grad_norm': 0.0,
      "loss": 0.28,                      'reward': 4.0, 'reward_std': 0.0}
      "step": 500
    }
    step:1 - {'generate/avg_num_tokens': '315.48',       SkyRL: pprint behind the step's number
     'trainer/global_step': 1}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from replay_core.dumps.log_lines import TrainerLine
from replay_core.dumps.metric_lines import NUMBERED
from replay_core.regexes import regex

#: Lines of one mapping: a trainer logs fewer figures of a step.
_MOST = 400
_QUOTES = ("'", '"')
#: No terminal is narrower; and how a number goes on that was broken, to its comma.
_WIDE = 40
_NUMBER_GOES_ON = regex(r"^[\d.eE+-]{1,24}(?:[,}]|$)")


def joined(lines: Iterable[TrainerLine]) -> Iterator[TrainerLine]:
    """Every line; those of one mapping of one stream as one, numbered as its first. What is left open, holds another
    mapping or list, or goes on otherwise than with names, stays as it is.
    """
    held: dict[str, list[TrainerLine]] = {}
    for line in _rejoined(lines):
        text = line.text.strip()
        if line.stream in held:
            parts = held[line.stream]
            broken = _is_broken(parts[-1].text, text)
            if (text.startswith((*_QUOTES, "}")) or broken) and not _nests(text) and len(parts) < _MOST:
                if broken:
                    parts[-1] = replace(parts[-1], text=parts[-1].text + text)
                else:
                    parts.append(line)
                if "}" in text:
                    yield replace(parts[0], text=" ".join(part.text.strip() for part in held.pop(line.stream)))
                continue
            yield from held.pop(line.stream)
        if "step:" in text and (numbered := NUMBERED.search(text)) is not None:
            text = text[numbered.end() - 1 :]
        if (
            text.startswith("{")
            and "}" not in text
            and not _nests(text[1:])
            and text[1:].lstrip()[:1] in ("", *_QUOTES)
        ):
            held[line.stream] = [line]
        else:
            yield line
    for parts in held.values():
        yield from parts


#: verl's line of a step, and what a terminal or a crawler leaves of it on the next line: names and numbers alone.
_STEP = regex(r"\bstep:\d{1,12}(?: - |$| -$)")
_GOES_ON = regex(r"^(?:- )?[^\s:]{1,200}(?::\S*)?(?: - [^\s:]{1,200}(?::\S*)?){0,400}(?: -)?$")


def _rejoined(lines: Iterable[TrainerLine]) -> Iterator[TrainerLine]:
    """Every line; a step's line of verl that was broken as one."""
    held: TrainerLine | None = None
    for line in lines:
        if held is not None:
            text = line.text.strip()
            told = ":" in text or held.text.endswith(":")
            if line.stream == held.stream and told and "step:" not in text and _GOES_ON.match(text):
                apart = " " if held.text.endswith(" -") or text.startswith("- ") else ""
                held = replace(held, text=held.text + apart + text)
                continue
            yield held
            held = None
        if "step:" in line.text and " - " in line.text and _STEP.search(line.text):
            held = line
        else:
            yield line
    if held is not None:
        yield held


def _is_broken(before: str, text: str) -> bool:
    """Whether a line goes on in the middle of a name or a number, as a terminal breaks it."""
    wide = len(before) >= _WIDE and before.rstrip()[-1:] not in (",", "{", "")
    # In the middle of a name a quote is open; behind it or a number a line may begin with what parts them.
    return wide and (before.count("'") % 2 == 1 or text[:1] in (",", ":") or _NUMBER_GOES_ON.match(text) is not None)


def _nests(text: str) -> bool:
    return "{" in text or "[" in text
