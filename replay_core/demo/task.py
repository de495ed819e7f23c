"""The demo's task: sort one to four digits. A prompt is `381=`, the reward a rule with partial credit. No torch.

Every digit of an answer depends on the whole prompt, so a policy that learns this must look back: what
it can see when it should not (another sequence of a pack) changes its answers.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

SYMBOLS = "0123456789="
PAD = len(SYMBOLS)
END = PAD + 1
VOCABULARY = END + 1

#: The most tokens a response may have, its end included.
LONGEST_RESPONSE = 6


class Exercise(Struct, frozen=True):
    """Digits to sort."""

    digits: tuple[int, ...]

    @property
    def text(self) -> str:
        return "".join(map(str, self.digits)) + "="

    @property
    def tokens(self) -> list[int]:
        return [SYMBOLS.index(symbol) for symbol in self.text]

    @property
    def answer(self) -> list[int]:
        return sorted(self.digits)


def draw(count: int, chance: random.Random) -> list[Exercise]:
    """Problems of one to four digits, so that prompts have different lengths."""
    return [Exercise(tuple(chance.randint(0, 9) for _ in range(chance.randint(1, 4)))) for _ in range(count)]


def text(tokens: Sequence[int]) -> str:
    """Tokens as a reader sees them; the end is `.`, padding nothing."""
    return "".join("." if token == END else SYMBOLS[token] if token < PAD else "" for token in tokens)


def reward(problem: Exercise, response: Sequence[int]) -> float:
    """From 0 to 1: 0.4 x share of what was written that is in the prompt, 0.3 x the digits found (each as
    often as it stands there, longer answers for less), 0.1 for ending, 0.2 for exactly the sorted digits.

    `response` is what the policy wrote, up to and with its first end, without padding. One that wrote
    nothing before its end earns nothing.
    """
    ended = bool(response) and response[-1] == END
    written = list(response[:-1] if ended else response)
    if not written:
        return 0.0
    from_prompt = sum(token in problem.digits for token in written) / len(written)
    found = (Counter(written) & Counter(problem.digits)).total() / max(len(written), len(problem.digits))
    return 0.4 * from_prompt + 0.3 * found + 0.1 * ended + 0.2 * is_right(problem, response)


def is_right(problem: Exercise, response: Sequence[int]) -> bool:
    """Whether the response is the sorted digits and its end, nothing else."""
    return list(response) == [*problem.answer, END]
