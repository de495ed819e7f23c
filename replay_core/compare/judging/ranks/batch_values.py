"""What is said of samples and tokens: their ids, positions and log-probabilities, and numbers of each of them."""

from __future__ import annotations

from replay_core import naming
from replay_core.compare.judging import (
    algebra,
    at_boundaries,
    attention_again,
    contributions,
    normalised_apart,
    own_rows,
    own_tokens,
    vocabulary,
)
from replay_core.compare.judging.faults import Fault, is_open
from replay_core.compare.judging.ranks.row import RowOfRanks
from replay_core.records import TensorRef
from replay_core.regexes import regex

#: Names of sums over the tokens to come, which no model makes.
_TO_COME = regex(r"return|advantage|reward|gae")
#: Names of the number of a sample's group.
_GROUPS = ("group_ids", "group_id", "uid", "uids", "prompt_ids", "prompt_id", "group_index")
#: Kinds of what is said of samples and tokens that is no number of theirs to be scaled or moved.
_NO_NUMBERS = ("ids", "positions", "mask", "loss", "note", "metric")


def of_positions(of: RowOfRanks, fault: Fault | None) -> Fault | None:
    """How ranks count the positions of their own tokens."""
    if of.kind == "positions":
        own = algebra.own_positions(of.name, of.held) or attention_again.counted_positions(of.name, of.held)
        fault = own or fault
    return fault


def of_ends(of: RowOfRanks, fault: Fault | None) -> Fault | None:
    """Whether log-probabilities are lost where a rank's tokens end."""
    if of.kind == "logprob" and (lost := contributions.at_the_ends(of.name, of.whole, of.held)) is not None:
        fault = lost
    return fault


def of_padded_words(of: RowOfRanks, fault: Fault | None) -> Fault | None:
    """Whether words that only pad the vocabulary count."""
    if naming.makes_logits(of.name) and not of.is_gradient:
        fault = vocabulary.counted_padding(of.name, of.whole, of.held) or fault
    return fault


def of_ids(of: RowOfRanks, fault: Fault | None) -> Fault | None:
    """Whose ids a rank has, and where labels end."""
    if of.kind == "ids" and of.name != "input_ids":
        fault = contributions.labels_at_the_ends(of.name, of.whole, of.held) or fault
        fault = fault or own_rows.of_ids(of.name, of.whole, of.held, of.found.parted)
        if fault is None and of.row.verdict.diverges:
            fault = own_rows.in_another_turn(of.name, of.whole, of.held, of.together.ranks)
    return fault


def of_own_tokens(of: RowOfRanks, fault: Fault | None) -> Fault | None:
    """Whether numbers of samples are made of a rank's own tokens alone."""
    is_of_samples = not naming.is_module_tensor(of.name) and not of.is_gradient and not of.is_weight
    if is_of_samples and of.kind not in _NO_NUMBERS and is_open(fault):
        together = of.together
        made = own_tokens.explain(of.name, of.whole, of.held, of.other, together.ranks, together.cuts)
        fault = made or fault
    return fault


def of_samples(of: RowOfRanks, fault: Fault | None) -> Fault | None:
    """Whether ranks normalise among their own samples, or have other samples' numbers."""
    is_of_samples = not naming.is_module_tensor(of.name) and not of.is_gradient and not of.is_weight
    if is_of_samples and of.kind not in _NO_NUMBERS and is_open(fault):
        parted = of.found.parted
        fault = normalised_apart.explain(of.name, of.whole, of.held, parted) or fault
        if is_open(fault):
            fault = normalised_apart.of_groups(of.name, of.whole, of.held, _groups_of_samples(of)) or fault
        fault = own_rows.of_samples(of.name, of.whole, of.held, parted) or fault
        # What no model makes is off on one rank for no weight of its own, and by nothing that was off before.
        if is_open(fault) and len(of.whole.shape) == 2 and _TO_COME.search(of.name) is not None:
            fault = at_boundaries.explain(of.name, of.whole, of.held, 1, has_weights=False) or fault
    return fault


def of_astray(of: RowOfRanks, fault: Fault | None) -> Fault | None:
    """Which ranks were given samples that are not theirs, as was seen when they were put together."""
    astray = of.together.astray
    if astray is not None and of.name == "input_ids":
        return Fault(astray.kind, astray.ranks, astray.sentence)
    return fault


def _groups_of_samples(of: RowOfRanks) -> TensorRef | None:
    """The number of each sample's group (its prompt), as it was recorded."""
    return next((ref for ref in map(of.other.find, _GROUPS) if ref is not None), None)
