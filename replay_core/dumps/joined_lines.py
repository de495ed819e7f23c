"""A flat mapping that is printed over several lines, as one line: a wide row a terminal or a paste has broken, an entry
of a pretty-printed `log_history`, what pprint makes of a step's metrics.

    {                                    {'loss': 0.0, 'grad_norm': 0.0,
      "loss": 0.28,                      'reward': 4.0, 'reward_std': 0.0}
      "step": 500
    }
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from replay_core.dumps.log_lines import TrainerLine

#: Lines of one mapping: a trainer logs fewer figures of a step.
_MOST = 400
_QUOTES = ("'", '"')


def joined(lines: Iterable[TrainerLine]) -> Iterator[TrainerLine]:
    """Every line; those of one mapping of one stream as one, numbered as its first. What is left open, holds another
    mapping or list, or goes on otherwise than with names, stays as it is.
    """
    held: dict[str, list[TrainerLine]] = {}
    for line in lines:
        text = line.text.strip()
        if line.stream in held:
            parts = held[line.stream]
            if text.startswith((*_QUOTES, "}")) and not _nests(text) and len(parts) < _MOST:
                parts.append(line)
                if "}" in text:
                    yield replace(parts[0], text=" ".join(part.text.strip() for part in held.pop(line.stream)))
                continue
            yield from held.pop(line.stream)
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


def _nests(text: str) -> bool:
    return "{" in text or "[" in text
