"""A limit of tokens that holds in place of the one that is stated: where the longest response of every step ends."""

from __future__ import annotations

import math
from collections import Counter

from msgspec import Struct

from replay_core.diagnose import trends
from replay_core.diagnose.algorithm import RESPONSE_LIMITS, Algorithm
from replay_core.diagnose.signals import Point, RunLog, Series

#: What else trainers call the limit of a response.
_STATED = (*RESPONSE_LIMITS, "max_generate_length", "max_generated_tokens", "max_completion_tokens")
#: What an engine's own limits are called; of those of a whole sequence the prompt takes its part.
_OF_RESPONSES = ("max_tokens", "max_gen_toks", "max_output_tokens")
_OF_SEQUENCES = ("max_model_len", "max_seq_length", "max_seq_len", "max_total_sequence_length", "context_length",
                 "max_length", "max_tokens_per_sample")  # fmt: skip
_PROMPTS = ("max_prompt_length", "max_prompt_len", "prompt_max_len", "rollout_max_prompt_len", "max_input_length")
#: The share of the steps whose longest response has the one length, the share of the stated limit that it may come to,
#: and tokens of it before it is no form of an answer.
_NEARLY_ALL, _BELOW, _LONG = 0.9, 0.98, 32


class ShortLimit(Struct, frozen=True):
    """Where responses end, which limit is stated, and where both stand."""

    tokens: float
    longest: Series
    steps: list[Point]
    """Those whose longest response has that length."""
    name: str
    stated: float
    why: str
    """Which other setting is that number, in words; empty where none is."""


def short_limit(log: RunLog) -> ShortLimit | None:
    """Of 8 steps and more nine tenths whose longest response has one and the same length, none a longer one, and a
    limit that is stated and larger.
    """
    longest = log.get("response_length_max")
    name = next((each for each in _STATED if log.algorithm.number(each) is not None), None)
    if longest is None or name is None:
        return None
    points = [point for point in longest.points if math.isfinite(point.value)]
    if len(points) < trends.MIN_STEPS:
        return None
    tokens, count = Counter(point.value for point in points).most_common(1)[0]
    stated = log.algorithm.number(name) or 0.0
    if count < _NEARLY_ALL * len(points) or max(point.value for point in points) > tokens:
        return None
    if not _LONG <= tokens < _BELOW * stated:
        return None
    at = [point for point in points if point.value == tokens]
    return ShortLimit(tokens, longest, at, name, stated, _which(log.algorithm, tokens))


def _which(stated: Algorithm, tokens: float) -> str:
    for name in (*_OF_RESPONSES, *_STATED, *_OF_SEQUENCES):
        if stated.number(name) == tokens:
            return f"{name} = {tokens:g} is stated, too, and holds"
    for name in _OF_SEQUENCES:
        for prompt in _PROMPTS:
            whole, part = stated.number(name), stated.number(prompt)
            if whole is not None and part is not None and whole - part == tokens:
                return f"{name} = {whole:g} less {prompt} = {part:g} leaves as much"
    return ""
