"""What is planted, and which words of a finding name it. Healthy variants beside them.

Faults are of two halves, fixed from the beginning: `open` ones may be looked at while rules are changed, `held` ones
are only counted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.diagnose.trainer import Recipe

#: What each form of a run holds: a fault can be named where it shows.
HOLDS = {
    "native": {"stated", "tokens", "rollout", "reward", "groups", "advantages", "ratio", "loss", "grad", "kl", "values",
               "ref", "twice", "trend", "old"},
    "verl": {"tokens", "rollout", "reward", "groups", "advantages", "values", "ref", "old"},
    "TRL": {"tokens", "rollout", "advantages", "ratio", "old"},
    "slime": {"tokens", "rollout", "reward", "groups", "advantages", "values", "ref", "twice", "old"},
    "jsonl": {"trend", "logged terms"},
    "verl log": {"trend", "logged mismatch", "logged advantages", "logged clip"},
    "TRL log": {"trend", "logged mismatch", "logged spread", "logged clip"},
    "slime log": {"trend", "logged mismatch", "logged spread", "logged clip"},
}  # fmt: skip


@dataclass(frozen=True)
class Plant:
    """A fault, what a form must hold to show it, and words that name it (or come near) in claim and cause."""

    recipe: Recipe
    needs: str
    says: str
    near: str = r"(?!)"
    in_log: str = ""
    """What names it in a log, where that is less: a log tells a mismatch, not whose."""
    log_needs: str = ""
    half: str = "open"

    def shows(self, form: str, is_log: bool) -> bool:
        needs = self.log_needs if is_log else self.needs
        return bool(needs) and all(need in HOLDS[form] for need in needs.split())

    def names(self, text: str, is_log: bool) -> bool:
        return re.search(self.in_log if is_log and self.in_log else self.says, text, re.IGNORECASE) is not None

    def is_near(self, text: str) -> bool:
        return re.search(self.near, text, re.IGNORECASE) is not None


_MISMATCH = r"disagree|differ by|engine and trainer"


def _plant(name: str, needs: str, says: str, near: str = r"(?!)", *, log: tuple[str, str] = ("", ""),
           held: bool = False, **changes: Any) -> Plant:  # fmt: skip
    recipe = Recipe(name, fault=changes.pop("fault", name), **changes)
    return Plant(recipe, needs, says, near, log[1], log[0], "held" if held else "open")


_SEEN = ("logged mismatch", _MISMATCH)

PLANTS: tuple[Plant, ...] = (
    # engine against trainer
    _plant("temperature", "rollout", r"temperature", _MISMATCH, log=_SEEN),
    _plant("temperature-raw-engine", "rollout", r"temperature", _MISMATCH, log=_SEEN, held=True, temperature=1.5),
    _plant("logprobs-shifted", "rollout", r"shifted", _MISMATCH, log=_SEEN),
    _plant(
        "stale-engine",
        "rollout ref",
        r"old weights|initial weights|no longer updated|not synchronised",
        _MISMATCH,
        lr=4e-3,
    ),
    _plant(
        "sync-stops",
        "rollout trend",
        r"old weights|no longer updated|not synchronised|samples with",
        _MISMATCH,
        lr=4e-3,
        kept=8,
        held=True,
    ),
    _plant(
        "adapter-lost",
        "rollout ref",
        r"adapter|initial weights|not synchronised",
        _MISMATCH,
        lora=True,
        lr=3e-2,
        held=True,
    ),
    _plant("top-p", "rollout", r"top-p|truncated", _MISMATCH, log=_SEEN),
    _plant("top-k", "rollout", r"top-k|truncated", _MISMATCH, log=_SEEN, held=True),
    _plant("packing-leak", "rollout", r"pack", _MISMATCH, log=_SEEN),
    _plant("engine-doubles-bos", "rollout", r"BOS|prompts differ|another prompt", _MISMATCH, log=_SEEN),
    _plant("doubled-bos", "tokens", r"BOS|begins? twice|token .* twice", _MISMATCH, log=_SEEN),
    _plant("other-template", "rollout", r"template|prompts differ|another prompt", _MISMATCH, log=_SEEN, held=True),
    _plant("dropout", "rollout", r"dropout", _MISMATCH, log=_SEEN),
    _plant("dropout-update", "ratio old", r"dropout", r"ratio"),
    _plant("tools-counted", "rollout", r"never sampled|tool", _MISMATCH, log=_SEEN),
    _plant("positions-count-padding", "rollout", r"left padding|position", _MISMATCH, log=_SEEN),
    _plant("padding-attended", "rollout", r"left padding|padding is attended", _MISMATCH, log=_SEEN, held=True),
    _plant("coarse-engine", "rollout", r"precision|quantis", _MISMATCH, log=_SEEN),
    _plant("retokenised", "tokens twice rollout", r"token ids|re-?token|encoded again|join", _MISMATCH, log=_SEEN),
    # masks
    _plant("pads-counted", "tokens", r"padding tokens are in the loss", r"padding"),
    _plant("end-untrained", "tokens", r"end token"),
    _plant("mask-shifted", "tokens", r"mask.*(shift|begin|first)|first token of", r"end token|mask", held=True),
    _plant("mask-cut", "tokens", r"mask ends after", r"mask"),
    _plant("mask-empty", "tokens", r"keeps no token", r"mask|no token", held=True),
    # rewards, groups, advantages
    _plant(
        "constant-judge",
        "reward groups",
        r"same reward|equal|constant",
        r"advantage.* 0",
        log=("logged spread", r"equal|constant"),
    ),
    _plant(
        "judge-of-prompts",
        "reward groups",
        r"between the responses|never within|prompt alone|in no group",
        r"equal|advantage.* 0",
        log=("logged spread", r"equal|in no group|prompt alone"),
    ),
    _plant(
        "judge-nan",
        "reward",
        r"reward.*(not finite|nan)|scores.*not finite",
        r"nan|not finite",
        log=("trend", r"reward.*not finite|score.*not finite"),
    ),
    _plant("mixed-groups", "tokens groups reward", r"mix prompts|different prompts", r"wrong groups|group"),
    _plant("lone-groups", "groups reward", r"group of its own|single response|no baseline", held=True),
    _plant(
        "zero-advantages",
        "reward groups advantages",
        r"all advantages are 0|advantages are cleared|zeroed",
        r"advantage",
    ),
    _plant("turned-advantages", "reward groups advantages", r"wrong sign"),
    _plant("raw-advantages", "reward groups advantages", r"raw rewards", held=True),
    _plant("rolled-advantages", "reward groups advantages", r"other samples", r"advantage"),
    _plant("groups-by-place", "reward groups advantages", r"wrong groups", r"advantage"),
    _plant("whole-batch-group", "stated reward groups advantages", r"whole batch|batch mean", r"advantage", held=True),
    _plant("normalised-twice", "reward groups advantages", r"no variant", r"advantage", held=True),
    _plant("nan-groups", "reward groups advantages", r"NaN|not finite|without a spread", r"not finite", judge="exact"),
    _plant("same-prompts", "tokens trend", r"same prompts|every step has the same"),
    _plant("all-cut", "tokens", r"cut off|cut at", r"cut", log=("trend", r"cut")),
    _plant("half-cut", "tokens", r"cut off|cut at", r"cut|equal", log=("trend", r"cut"), held=True),
    _plant(
        "never-stops", "tokens", r"cut off|never ends|none ever ends|stops", r"end", log=("trend", r"cut"), held=True
    ),
    # old policy, ratio
    _plant("old-of-next", "ratio old", r"ratio", r"rollout|disagree"),
    _plant(
        "engine-as-old", "ratio old", r"ratio|old.*rollout", _MISMATCH, fault="coarse-engine", old="engine", held=True
    ),
    _plant(
        "too-many-updates",
        "ratio old trend",
        r"clip|far from|ratio",
        log=("logged clip", r"clip|far from"),
        fault="rate-too-high",
        lr=6e-3,
        minibatches=4,
        epochs=4,
    ),
    # reference
    _plant("kl-turned", "kl ref", r"swapped", r"KL", kl=0.02, lr=2e-3),
    _plant("kl-k1-turned", "kl ref", r"swapped|k1", r"KL", kl=0.02, lr=2e-3, held=True),
    _plant("other-reference", "ref trend", r"reference|another model", log=("trend", r"reference|KL"), kl=0.01),
    _plant("reference-follows", "ref trend", r"reference|KL.*0", log=("trend", r"KL.*(exactly )?0|reference"), kl=0.01),
    # loss
    _plant("divides-by-slots", "loss", r"slot|padding", r"reduction"),
    _plant("summed-over-samples", "loss", r"sum over samples|times", r"reduction", reduction="sequence"),
    _plant("times-world-size", "loss", r"8 times|x 8|times", r"reduction"),
    _plant("accumulation-twice", "loss", r"accumul|times|half|1/2", r"reduction"),
    _plant("accumulation-forgotten", "loss", r"accumul|times|2 x", r"reduction", held=True),
    _plant("loss-turned", "loss advantages", r"wrong sign|sign", r"reduction|reward", log=("trend", r"reward|sign")),
    _plant("ratio-inverted", "loss ratio", r"upside down|inverted", r"ratio|reduction", lr=4e-3, minibatches=2),
    _plant("smaller-loss", "loss ratio", r"smaller of|min stands for max", r"ratio|reduction", lr=6e-3, epochs=3),
    _plant("not-clipped", "loss ratio", r"not clipped", r"ratio|reduction|clip", lr=6e-3, epochs=3),
    _plant(
        "kl-subtracted",
        "loss trend",
        r"KL term is subtracted",
        r"KL",
        log=("logged terms", r"KL term"),
        kl=0.2,
        lr=2e-3,
    ),
    _plant("kl-rewarded", "values", r"KL penalty in the rewards", r"KL|return", algorithm="ppo", kl=0.05, lr=2e-3),
    _plant("gae-turned", "values", r"sign", r"advantage", algorithm="ppo"),
    _plant("values-kept", "values", r"values are not subtracted", r"advantage|return", algorithm="ppo"),
    _plant("gae-late", "values", r"token before|token after", r"advantage|return", algorithm="ppo"),
    # gradient and optimizer
    _plant(
        "rate-zero", "trend", r"learning rate is 0|learning.rate.*0", r"never|KL", log=("trend", r"learning.rate.*0")
    ),
    _plant("warmup-too-long", "trend", r"warm-?up", r"learning rate", log=("trend", r"warm-?up"), steps=24),
    _plant(
        "wrong-parameters",
        "trend ref",
        r"never change|do not move|other parameters|wrong parameters|optimizer",
        r"KL",
        log=("trend", r"never change|not move|parameters|KL.*0"),
        kl=0.01,
    ),
    _plant("detached", "grad", r"gradient", log=("trend", r"gradient")),
    _plant("gradient-nan", "trend", r"grad", r"not finite", log=("trend", r"grad")),
    _plant(
        "never-unscaled",
        "trend",
        r"grad.*(scale|large|huge)|loss scale",
        r"grad",
        log=("trend", r"grad.*(scale|large)|scale"),
    ),
    _plant(
        "norm-after-clipping",
        "trend",
        r"grad.*(constant|same|after clip|does not move)",
        r"grad",
        log=("trend", r"grad.*(constant|same|after clip)"),
        held=True,
    ),
    # critic
    _plant("targets-are-advantages", "values", r"return|target", r"advantage", algorithm="ppo"),
    _plant("targets-shifted", "values", r"return|target", r"advantage", algorithm="ppo", held=True),
    _plant("targets-are-rewards", "values", r"return|target", r"advantage", algorithm="ppo", held=True),
    _plant("gae-without-next", "values reward", r"GAE|next value|advantage", r"return", algorithm="ppo"),
    _plant("critic-frozen", "values trend", r"critic|value", log=("trend", r"critic|value"), algorithm="ppo", kept=8),
    # what only steps tell
    _plant(
        "kl-explodes",
        "trend",
        r"KL",
        r"entropy|grad|ratio|clip|reward",
        log=("trend", r"KL"),
        fault="rate-too-high",
        lr=2e-2,
        kl=1e-4,
    ),
    _plant(
        "entropy-collapses",
        "trend",
        r"entropy",
        r"KL|equal|reward",
        log=("trend", r"entropy"),
        fault="judge-of-form",
        lr=6e-3,
        steps=30,
    ),
    _plant("entropy-bonus", "trend", r"entropy", r"KL|reward|length|cut", log=("trend", r"entropy"), lr=4e-3, steps=30),
    _plant(
        "lengths-explode",
        "trend",
        r"length|longer",
        r"cut|reward",
        log=("trend", r"length|longer"),
        fault="judge-of-length",
        lr=4e-3,
        steps=30,
        limit=30,
    ),
    _plant(
        "lengths-collapse",
        "trend",
        r"length|shorter",
        r"equal|entropy",
        log=("trend", r"length|shorter"),
        fault="judge-of-brevity",
        lr=4e-3,
        steps=30,
        held=True,
    ),
    _plant(
        "format-without-answers",
        "trend",
        r"format",
        r"entropy|accuracy|equal|same reward|every advantage is 0",
        log=("trend", r"format"),
        fault="judge-of-form",
        lr=4e-3,
        steps=30,
    ),
    _plant(
        "reward-collapses",
        "trend",
        r"reward",
        r"equal|KL",
        log=("trend", r"reward|score"),
        fault="judge-breaks",
        steps=24,
    ),
    _plant(
        "weights-break",
        "trend",
        r"reward|KL|entropy",
        r"grad|mismatch|ratio",
        log=("trend", r"reward|KL|entropy|score"),
        steps=24,
        kl=1e-3,
        held=True,
    ),
)


def _variants() -> list[Recipe]:
    base = Recipe("grpo")
    return [
        base,
        replace(base, name="grpo-seed2", seed=2),
        replace(base, name="grpo-binary", judge="exact", group=6, prompts=4),
        replace(base, name="grpo-two-minibatches", minibatches=2),
        replace(base, name="grpo-epochs", epochs=2, minibatches=2),
        replace(base, name="grpo-kl", kl=0.02),
        replace(base, name="grpo-sequence-mean", reduction="sequence"),
        replace(base, name="grpo-micro-token-mean", reduction="micro-token"),
        replace(base, name="grpo-temperature", temperature=1.3),
        replace(base, name="grpo-cool", temperature=0.7),
        replace(base, name="grpo-fp32-engine"),
        replace(base, name="grpo-fast", lr=2e-3),
        replace(base, name="grpo-summed-rewards", judge="sum"),
        replace(base, name="grpo-tools", tools=True),
        replace(base, name="grpo-warmup", warmup=8),
        replace(base, name="grpo-large-groups", prompts=3, group=8),
        replace(base, name="rloo", algorithm="rloo"),
        replace(base, name="rloo-epochs", algorithm="rloo", epochs=2),
        replace(base, name="drgrpo", algorithm="drgrpo"),
        replace(base, name="drgrpo-minibatches", algorithm="drgrpo", minibatches=2),
        replace(base, name="reinforce++", algorithm="rpp"),
        replace(base, name="reinforce++-baseline", algorithm="rpp-baseline", kl=0.01),
        replace(base, name="dapo", clip_high=0.28, judge="exact", group=6),
        replace(base, name="gspo", algorithm="gspo", clip_low=3e-3, clip_high=4e-3, minibatches=2),
        replace(base, name="cispo", algorithm="cispo", clip_low=1.0, clip_high=0.28, minibatches=2),
        replace(base, name="ppo", algorithm="ppo"),
        replace(base, name="ppo-kl-epochs", algorithm="ppo", kl=0.02, epochs=2),
        replace(base, name="async-tis", lag=2, lr=1e-3),
        replace(base, name="async-tis-far", lag=3, lr=2e-3, kept=8),
        replace(base, name="lora", lora=True, lr=4e-3),
        replace(base, name="moe", experts=4),
        replace(base, name="solved", warm=900),
        replace(base, name="short-answers", limit=8),
    ]  # fmt: skip


HEALTHY: tuple[Recipe, ...] = tuple(_variants())
