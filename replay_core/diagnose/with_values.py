"""Exceptions whose own words are few, with what stands elsewhere in the same text: a choice of the configuration, the
field a sample lacks, the two numbers that do not fit.

    told = with_values(one, where, overrides)
    told.short, told.cause, told.next_step
"""

from __future__ import annotations

import re

from replay_core.diagnose.failure_texts import failure_of
from replay_core.diagnose.misfits import Misfit
from replay_core.diagnose.raised import Raised
from replay_core.diagnose.signals import Told
from replay_core.regexes import regex

_NOT_MADE = regex(r"^(?:\w+\.)*(?:NotImplementedError|RayTaskError\(NotImplementedError\))\b")
#: Settings that choose one of several kinds, by the last part of their name.
_CHOICE = regex(
    r"(?<![\w.])\+{0,2}(?P<key>(?:[a-z_]\w*\.)*(?:adv_estimator|advantage_estimator|loss_mode|loss_type|loss_agg_mode"
    r"|kl_penalty|kl_loss_type|strategy|backend|rollout_backend|engine|algorithm|algo|mode|reward_manager"
    r"|lr_scheduler_type|optimizer|scheduler|estimator|stage|finetuning_type|rlhf_type|train_type"
    r"|rollout\.name|data_type|dtype|quantization|lora_type|attn_implementation))\s?[=:]\s?['\"]?"
    r"(?P<value>[A-Za-z][\w./+-]{0,40})"
)
#: Of which of them a function asks, by its name or file.
_ASKS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (
    (regex(r"ray_trainer\.py|main_ppo\.py|advantage|compute_adv"), ("adv_estimator", "advantage_estimator")),
    (regex(r"kl_penalty|kl_loss|core_algos\.py"), ("kl_penalty", "kl_loss_type", "loss_mode", "adv_estimator")),
    (regex(r"rollout"), ("rollout.name", "mode", "backend", "rollout_backend")),
    (regex(r"worker|strategy|fsdp|megatron"), ("strategy", "backend")),
    (regex(r"loss"), ("loss_type", "loss_mode", "loss_agg_mode")),
    (regex(r"optim|schedul"), ("optimizer", "lr_scheduler_type", "scheduler")),
    (regex(r"reward"), ("reward_manager",)),
)
#: A field that a sample is asked for and does not have: rollout requires info['task_id'].
_LACKS = regex(
    r"(?i)\b(?:requires?|required|needs?|needed|miss(?:ing|es)|expects?|expected|lacks?|without|no|must (?:have|contain"
    r"|include|provide)|not (?:found )?in|provide)\b[^\n]{0,60}?"
    r"\b(?P<of>info|extra_info|non_tensor_batch|reward_model|sample|row|example|batch|item|record|state|task|data|kwargs"
    r"|reward_kwargs|metadata)(?:\[['\"](?P<key>\w+)['\"]\]|\.get\(['\"](?P<get>\w+)['\"])"
)
#: Two numbers of which the first is too large: 5284 > 4096, 5284 is longer than the limit 4096.
_OVER = regex(
    r"(?i)\b(?P<what>[\w ]{0,40}?)(?:\s|=|\()(?P<a>\d{2,9})\)?\s?(?:tokens? )?"
    r"(?:>=?|(?:is |are )?(?:longer|larger|greater|more) than"
    r"|exceeds?(?: the)?|is over|over the)\s?[^\d\n]{0,60}?(?P<b>\d{2,9})\b"
)
_OF_TOKENS = regex(r"(?i)seq|token|length|prompt|context|packed|position|cutoff|max_len")
_FORMAT = regex(r"Unknown format code '(?P<code>\w)' for object of type '(?P<kind>\w+)'"
                r"|unsupported format string passed to (?P<class>\w+)\.__format__")  # fmt: skip


def with_values(one: Told, where: Raised, overrides: str) -> Misfit | None:
    """What it means, where its few words and a value of the same text tell together; None of most.

    overrides: the settings that the text states, as `name=value`.
    """
    first = one.text.splitlines()[0]
    if _NOT_MADE.match(first):
        return _not_made(first, where, overrides)
    if (formats := _FORMAT.search(first)) is not None:
        return _formats(formats, where)
    known = failure_of(first)
    if known is not None and not known.general:
        return None  # a particular text says more of it
    if (lacks := _LACKS.search(first)) is not None:
        return _lacks(lacks, where)
    if (over := _OVER.search(first)) is not None and int(over["a"]) > int(over["b"]) and _OF_TOKENS.search(first):
        return _over(int(over["a"]), int(over["b"]), where)
    return None


def _not_made(first: str, where: Raised, overrides: str) -> Misfit | None:
    """A branch of the code that has nothing for the chosen kind: which choice it is, the place tells."""
    said = first.partition(":")[2].strip()
    choices = {found["key"]: found["value"] for found in _CHOICE.finditer(overrides)}
    if said and not any(value in said for value in choices.values()):
        return None  # its own words tell
    place = " ".join(f"{frame.file} {frame.function}" for frame in where.frames[-2:])
    asked = [name for names, keys in _ASKS if names.search(place) for name in keys]
    named = next((key for name in asked for key in choices if key == name or key.endswith(f".{name}")), None)
    if said:
        named = next((key for key, value in choices.items() if value in said), named)
    at = (
        ""
        if where.last is None
        else f" ({where.last.function}, {where.last.file.rpartition('/')[2]}:{where.last.line})"
    )
    if named is not None:
        return Misfit(
            f"{named}={choices[named]} is not made in this version of the trainer{at}",
            f"the code has a branch for each kind that it knows and raises for others: {named}={choices[named]} is "
            "none of them here (a fork or an older version than the recipe was written for, or a mistyped name)",
            f"read which values are compared above {where.last.file}:{where.last.line}"
            if where.last is not None
            else f"look which values of {named} the version takes",
        )
    if not choices:
        return None
    some = ", ".join(f"{key}={value}" for key, value in list(choices.items())[:5])
    return Misfit(
        f"a kind that was chosen is not made here{at}",
        f"the code has a branch for each kind that it knows and raises for others; the choices of this run: {some}",
        f"read which of them is compared above {where.last.file}:{where.last.line}" if where.last is not None else
        "look which of them the version takes",
    )  # fmt: skip


def _formats(found: re.Match[str], where: Raised) -> Misfit:
    kind = found["kind"] or found["class"]
    code = f" in `{where.last.code[:90]}`" if where.last is not None and where.last.code else ""
    how = f" (':{found['code']}')" if found["code"] else ""
    return Misfit(
        f"a {kind} stands where a number is printed{how}{code}",
        f"a metric, score or setting that is to be formatted as a number is a {kind}: a text that was never made a "
        "number (a value of JSON, of the command line or of a model's answer), a default such as 'N/A', or None where "
        "nothing was computed. The training itself may be sound",
        "make it a number where it is read (float(...)), or print it without a format; look which value has the type",
    )


def _lacks(found: re.Match[str], where: Raised) -> Misfit:
    key, of = found["key"] or found["get"], found["of"]
    return Misfit(
        f"the samples have no field {key}, which the environment or reward asks {of} for",
        f"{of} is made of a row of the data set, and its rows have no {key}: the data set was made for another "
        "environment or version of it, the column has another name, or a loader or filter drops it on the way",
        f"print one row of the data set; add or rename the column {key}, or load the data set that the environment "
        "brings along",
    )


def _over(a: int, b: int, where: Raised) -> Misfit:
    doing = f" {where.doing}" if where.doing else ""
    return Misfit(
        f"a sequence of {a:,} tokens is longer than the limit of {b:,}{doing}",
        f"a sample of {a:,} tokens comes to code that takes {b:,}: nothing before it cuts or leaves out what is longer "
        "(prompt and response together, the template's own tokens, images that become tokens)",
        f"filter or truncate samples to {b:,} tokens (max_length, cutoff_len, max_prompt_length, truncation), or raise "
        "the limit if model and memory allow",
    )
