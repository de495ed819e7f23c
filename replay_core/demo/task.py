"""The demo's task: add one to three digits. A prompt is `3+4=`, the whole reward a rule. No torch.

A policy that has learnt nothing earns about 0.15, one that always answers a plausible number about 0.75,
one that adds correctly 1.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

SYMBOLS = "0123456789+="
PAD = len(SYMBOLS)
END = PAD + 1
VOCABULARY = END + 1

#: The most tokens a response may have, its end included.
LONGEST_RESPONSE = 5

#: How far off an answer may be and still earn something.
TOLERANCE = 10


@dataclass(frozen=True, slots=True)
class Sum:
    """One problem."""

    digits: tuple[int, ...]

    @property
    def text(self) -> str:
        return "+".join(map(str, self.digits)) + "="

    @property
    def answer(self) -> int:
        return sum(self.digits)

    @property
    def tokens(self) -> list[int]:
        return [SYMBOLS.index(symbol) for symbol in self.text]


def draw(count: int, chance: random.Random) -> list[Sum]:
    """Problems of one, two and three digits, so that prompts have different lengths."""
    return [Sum(tuple(chance.randint(0, 9) for _ in range(chance.randint(1, 3)))) for _ in range(count)]


def text(tokens: Sequence[int]) -> str:
    """Tokens as a reader sees them; the end is `.`, padding nothing."""
    return "".join("." if token == END else SYMBOLS[token] if token < PAD else "" for token in tokens)


def reward(problem: Sum, response: Sequence[int]) -> float:
    """0.2 for digits, 0.3 for nothing but digits and an end, 0.5 for the right sum (partly for a near one).

    `response` is what the policy wrote, up to and with its first end, without padding.
    """
    ended = bool(response) and response[-1] == END
    body = list(response[:-1] if ended else response)
    digits = next((place for place, token in enumerate(body) if token > 9), len(body))
    earned = 0.2 * digits / max(1, len(body))
    if ended and body and digits == len(body):
        distance = abs(int(text(body)) - problem.answer)
        earned += 0.3 + 0.5 * max(0.0, 1 - distance / TOLERANCE)
    return earned
