"""What a dump keeps of the command that made it: program, script and options, and nothing that opens a door.

People send dumps to whoever helps. A text is replaced where its name says that it is secret, or its form does: tokens
of Hugging Face, OpenAI, GitHub, AWS, Google, Slack and W&B, JSON web tokens, private keys, passwords in a URL, and
words that only chance writes. A name that is only about tokens of a text (`--eos_token`, `--max-tokens`) is none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from replay_core.regexes import regex

#: Stands where something was.
REDACTED = "[redacted]"

#: Words of a name that make its value a secret.
_SECRET = frozenset(
    {
        "apikey", "auth", "authorization", "bearer", "cookie", "credential", "credentials", "creds", "dsn", "jwt",
        "key", "pass", "passphrase", "passwd", "password", "pat", "pin", "psk", "pwd", "sas", "secret", "secrets",
        "session", "sig", "signature", "token", "webhook",
    }
)  # fmt: skip
_RUN_TOGETHER = regex(r"(api|access|secret|private|auth|hub|hf|wandb)_?(key|token)|passw|secret", re.IGNORECASE)
#: What stands before `key` or `token` where it means a column of a table, or a token of a text.
_HARMLESS = frozenset(
    {
        "answer", "begin", "bos", "cls", "column", "data", "dataset", "end", "eos", "extra", "group", "image", "images",
        "input", "label", "mask", "max", "message", "messages", "metric", "min", "modality", "new", "num", "output",
        "pad", "padding", "per", "prompt", "question", "response", "reward", "sep", "sort", "special", "start", "stop",
        "target", "task", "text", "think", "unk", "video", "videos",
    }
)  # fmt: skip

_NAMED = regex(
    r"""(?P<name>["']?[A-Za-z_][\w.\-]*["']?)(?P<sign>\s*(?:=|:(?!//))\s*)(?P<value>"[^"]*"|'[^']*'|[^\s,;&}\])"']+)"""
)
_AUTHORIZATION = regex(r"\b(bearer|basic)\s+[^\s\"',;]{6,}", re.IGNORECASE)
_IN_URL = regex(r"(?P<begin>\b[a-zA-Z][a-zA-Z0-9+.\-]*://)(?P<who>[^/\s@\"']+)@")
_FORMS = regex(
    r"""
      \b(?:hf|api_org)_[A-Za-z0-9]{16,}
    | \b(?:sk|pk|rk|tgp|gsk|xai|nvapi|dop_v1|r8|pplx|lsv2|key)[-_][A-Za-z0-9_\-]{16,}
    | \bgh[pousr]_[A-Za-z0-9]{20,} | \bgithub_pat_\w{20,} | \bglpat-[\w\-]{16,}
    | \bxox[abeoprs]-[\w\-]{10,} | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b | \bAIza[\w\-]{30,} | \bya29\.[\w\-]{20,}
    | \beyJ[\w\-]{8,}\.[\w\-]{4,}(?:\.[\w\-]*)?
    | \bpypi-[\w\-]{20,} | \bnpm_[A-Za-z0-9]{20,} | \bSG\.[\w\-]{16,}\.[\w\-]{16,}
    | hooks\.slack\.com/services/[\w/]+
    | -----BEGIN[^-]*PRIVATE\ KEY-----[\s\S]*
    """,
    re.VERBOSE,
)
#: Hexadecimal digits (W&B's keys are 40), or letters of both cases among digits: no word and no name of a file.
_CHANCE = regex(r"\b(?:[0-9a-f]{32,}|[0-9A-F]{32,}|(?=\w*[a-z])(?=\w*[A-Z])(?=\w*\d)[A-Za-z0-9]{20,}={0,2})(?!\w)")


def as_kept(arguments: Sequence[str]) -> list[str]:
    """A command line without its secrets. The first word, the script, stays."""
    kept = [without_forms(str(word)) for word in arguments[:1]]
    name = None
    for word in map(str, arguments[1:]):
        option = re.fullmatch(r"-{1,2}([A-Za-z][\w.\-]*)", word)
        if option is None and name is not None and _is_secret(name, word):
            kept.append(REDACTED)
        else:
            kept.append(_without_secrets(word))
        name = option[1] if option else None
    return kept


def redacted(content: Any) -> Any:
    """JSON-able content without what has the form of a secret: an error's text may hold an address with a password."""
    if isinstance(content, str):
        return without_forms(content)
    if isinstance(content, dict):
        return {name: redacted(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [redacted(value) for value in content]
    return content


def without_forms(text: str) -> str:
    """A text with what is a secret by its form replaced; digests and paths stay."""
    text = _IN_URL.sub(lambda found: f"{found['begin']}{_user(found['who'])}@", text)
    return _FORMS.sub(REDACTED, _AUTHORIZATION.sub(lambda found: f"{found[1]} {REDACTED}", text))


def _without_secrets(word: str) -> str:
    def named(found: re.Match[str]) -> str:
        name, value = found["name"], found["value"].strip("\"'")
        if value != REDACTED and _is_secret(name, value):
            return f"{name}{found['sign']}{found['value'].replace(value, REDACTED) if value else found['value']}"
        return found[0]

    return _CHANCE.sub(REDACTED, _NAMED.sub(named, without_forms(word)))


def _user(who: str) -> str:
    user, colon, _ = who.partition(":")
    # A name alone may be the token itself (https://TOKEN@github.com).
    return f"{user}:{REDACTED}" if colon else who if len(who) < 16 else REDACTED


def _is_secret(name: str, value: str) -> bool:
    name = name.strip("\"'")
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]
    if re.fullmatch(r"-?\d{1,6}(\.\d*)?(e-?\d+)?|true|false|none|null|yes|no", value, re.IGNORECASE):
        # A number, or a switch; a number after a word for a password is one.
        return bool({"password", "passwd", "pwd", "passphrase", "pin"} & set(words)) and value[:1].isdigit()
    for at, word in enumerate(words):
        if word in _SECRET and not (word in ("key", "token", "session", "pat") and _is_harmless(words, at)):
            return True
    return _RUN_TOGETHER.search(name) is not None


def _is_harmless(words: list[str], at: int) -> bool:
    before, after = words[at - 1] if at else "", words[at + 1] if at + 1 < len(words) else ""
    return before in _HARMLESS or after in (
        "id",
        "ids",
        "level",
        "idx",
        "length",
        "budget",
        "type",
        "bits",
        "name",
        "mean",
    )
