"""Which algorithm a run is, as far as it states it: in its flags, in what the trainer noted, in the head of its log.

One place reads the settings, in every framework's words; rules ask here before they call a value wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from replay_core.records import Run

if TYPE_CHECKING:
    from replay_core.documents.diagnosis import Severity

#: Spellings of one estimator of advantages, by what it is called here; the longest that is in the name counts.
_ESTIMATORS = {
    "reinforce_plus_plus_baseline": "reinforce++_baseline", "reinforce++-baseline": "reinforce++_baseline",
    "reinforce_baseline": "reinforce++_baseline", "reinforce_plus_plus": "reinforce++", "reinforce++": "reinforce++",
    "reinforce_pp": "reinforce++", "reinforce": "reinforce", "vpg": "reinforce", "rloo": "rloo", "remax": "remax",
    "dr_grpo": "dr_grpo", "dr.grpo": "dr_grpo", "drgrpo": "dr_grpo", "grpo": "grpo", "dapo": "grpo", "gspo": "grpo",
    "cispo": "grpo", "gae": "gae", "ppo": "gae", "opo": "opo", "gpg": "gpg",
}  # fmt: skip
#: Estimators whose baseline is made of a sample's own group.
OF_GROUPS = frozenset({"grpo", "dr_grpo", "rloo"})
#: Those whose baseline is a critic's, the batch's, a greedy response's, or none.
_OF_NO_GROUP = frozenset({"gae", "reinforce", "reinforce++", "remax"})
#: Words for how many responses are drawn to a prompt.
GROUP_SIZE = ("rollout_n", "num_generations", "n_samples_per_prompt", "group_size")
#: Further words for the two sides of a clip range.
_LOW, _HIGH = ("clip_range_low", "cliprange_low"), ("clip_range_high", "cliprange_high")
#: Words for the weight of a KL to the reference; the first is that of one in the loss alone.
KL_WEIGHTS = ("kl_loss_coef", "kl_coef", "init_kl_coef", "kl_beta", "beta")
#: Words for how many updates samples may be behind, or are.
_LAGS = ("async_lag", "max_staleness", "staleness", "max_head_offpolicyness", "max_async_level", "off_policy_steps")
#: Losses that are clipped at a range; and the least `epsilon` that is one, where it is no response's.
_CLIPPED, LEAST_EPSILON = frozenset({
    "ppo", "grpo", "vanilla", "dapo", "gspo", "bnpo", "dr_grpo", "drgrpo", "ppo_clip", "clip", "clipped",
}), 1e-2  # fmt: skip
#: Words for how many tokens a response may have.
RESPONSE_LIMITS = ("max_response_length", "max_completion_length", "max_new_tokens", "generate_max_len",
                   "rollout_max_response_len", "response_length")  # fmt: skip
#: Words for how a loss is put together of its tokens.
_AGGREGATIONS = (
    "loss_agg_mode", "loss_reduction", "loss_aggregation", "loss_agg", "loss_aggregation_mode", "loss_agg_type",
    "agg_mode", "policy_loss_agg_mode", "loss_averaging",
)  # fmt: skip
#: Switches of a KL that is subtracted from the rewards.
KL_IN_REWARDS = ("use_kl_in_reward", "kl_in_reward", "apply_kl_in_reward")
#: Switches of importance weights of the engine: verl's, TRL's, OpenRLHF's, NeMo-RL's, AReaL's.
_WEIGHED = (
    "use_tis", "rollout_is", "vllm_importance_sampling_correction", "enable_vllm_is_correction",
    "is_correction_enable", "use_importance_sampling_correction", "use_decoupled_loss",
)  # fmt: skip
_KL = {
    "k1": "k1", "kl": "k1", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3", "low_var": "k3", "abs": "|log r|",
    "k3+": "k3",
}  # fmt: skip


def stated_by(run: Run | None) -> dict[str, Any]:
    """All that a run states of itself: its flags, and what the trainer noted or its log begins with."""
    return {} if run is None else {**run.facts, "flags": run.flags or {}}


def of_loss(flags: Mapping[str, Any], name: str) -> Any:
    """A setting of the loss in the recorder's own words, `loss={"reduction": "token_sum"}`; else None."""
    settings = flags.get("loss")
    return settings.get(name) if isinstance(settings, Mapping) else None


class Algorithm:
    """What a run states of its algorithm; an empty string or None where it states nothing.

    facts: flags and notes as they were recorded, or name -> value of a log's head.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts = facts

    @cached_property
    def _settings(self) -> dict[str, list[Any]]:
        """Every setting that is no table, by the last part of its name: rules ask for hundreds."""
        return settings_of(self._facts)

    def value(self, *names: str) -> Any:
        """The first of these settings that is stated, whatever it is; a table of its own where nothing else is."""
        found = first_of(self._settings, *names)
        tables = (each for name in names for each in _tables(self._facts, name, _DEEPEST))
        return found if found is not None else next(tables, None)

    def number(self, *names: str) -> float | None:
        """The first of these settings that is stated as one number."""
        return as_number(first_of(self._settings, *names))

    def is_on(self, name: str) -> bool | None:
        """Whether a switch is on; None where it is not stated."""
        value = first_of(self._settings, name)
        if isinstance(value, str):
            return {"true": True, "false": False}.get(value.lower())
        return value if isinstance(value, bool) else None

    def word(self, *names: str) -> str:
        """The first of these settings that is stated as a word, in lower case."""
        value = first_of(self._settings, *names)
        return value.lower() if isinstance(value, str) else ""

    @property
    def _names(self) -> list[str]:
        return [
            *((str(self._loss_kind).lower(),) if self._loss_kind else ()),
            *self._estimator_words,
            *(word for name in ("algorithm", "algo", "loss_type", "loss_mode") if (word := self.word(name))),
        ]

    @property
    def _estimator_words(self) -> list[str]:
        """How advantages are made, where that is a setting of its own: the loss's name says nothing of it then."""
        return [word for name in ("adv_estimator", "advantage_estimator", "adv_type") if (word := self.word(name))]

    @property
    def names_an_estimator(self) -> bool:
        """Whether the run has a word for how advantages are made, known here or not."""
        return bool(self._estimator_words)

    @property
    def _loss_kind(self) -> Any:
        flags = self._facts.get("flags", self._facts)
        loss = flags.get("loss") if isinstance(flags, Mapping) else None
        return loss.get("kind") if isinstance(loss, Mapping) else loss if isinstance(loss, str) else None

    @property
    def kind(self) -> str:
        """The algorithm by its own first name, in lower case."""
        return next(iter(self._names), "")

    @property
    def estimator(self) -> str:
        """How advantages are made: grpo, dr_grpo, rloo, remax, reinforce, reinforce++, gae, opo, gpg."""
        for name in (*self._estimator_words, *self._names):
            found = [known for known in _ESTIMATORS if known in name]
            if found:
                return "reinforce++" if name == "reinforce" and self._is_openrlhf else _ESTIMATORS[max(found, key=len)]
        return ""

    @property
    def _is_openrlhf(self) -> bool:
        """Whether the settings are OpenRLHF's, whose estimator `reinforce` is REINFORCE++: it whitens its advantages
        over the batch, as it does GAE's, unless `no_advantage_std_norm` is set.
        """
        return bool(self.word("advantage_estimator")) and self.number("lambd", "init_kl_coef") is not None

    @property
    def _is_trl(self) -> bool:
        """Whether it is TRL's GRPO that states itself: two words that no other trainer has."""
        return self.value("scale_rewards") is not None and self.value("num_generations") is not None

    @property
    def is_scaled(self) -> bool | None:
        """Whether advantages are divided by a std."""
        value = first_of(
            self._settings, "norm_adv_by_std", "norm_adv_by_std_in_grpo", "scale_rewards", "grpo_std_normalization"
        )
        if isinstance(value, str):
            return value.lower() not in ("false", "none", "0")
        return value if isinstance(value, bool) else None

    @property
    def leaves_out_std(self) -> bool:
        """Whether the run states that advantages are not divided by a std. TRL's `loss_type="dr_grpo"` names a
        reduction and leaves `scale_rewards` as it is.
        """
        scaled = self.is_scaled
        return scaled is False or (scaled is None and "dr_grpo" in map(_ESTIMATORS.get, self._estimator_words))

    @property
    def std_of(self) -> str:
        """Whose std advantages are divided by, as the run states it: `group`, `batch`, or nothing that is stated."""
        table = self.value("reward_norm")  # AReaL's
        level = table.get("std_level") if isinstance(table, Mapping) else None
        words = (self.word("scale_rewards"), self.word("std_norm"), str(level))  # TRL's, prime-rl's
        known = {"group": "group", "batch": "batch", "local": "group", "global": "batch"}
        named = next((known[word] for word in words if word in known), "")  # a word says more than a switch
        switched = self.is_on("norm_adv_by_std_in_grpo") is True or self.is_on("grpo_std_normalization") is True
        return named or ("group" if switched else "")

    @property
    def averaged(self) -> str:
        """What a loss is divided by: `constant` (Dr. GRPO), `tokens`, or nothing that is stated."""
        how = self.word(*_AGGREGATIONS, "loss_normalization", "agg_mode")
        names = " ".join([*self._names, how])
        if "dr_grpo" in names or "dr.grpo" in names or "drgrpo" in names or "norm" in how or "const" in how:
            return "constant"
        return "tokens" if how or self._loss_kind else ""

    @property
    def is_by_sequence(self) -> bool:
        """Whether one ratio stands for a response (GSPO): its clip range is of another size than a token's."""
        level = self.word("importance_sampling_level", "ratio_level", "ratio_type")
        loss = self.word("policy_loss", "policy_loss_type", "loss_fn")
        return "gspo" in " ".join([*self._names, loss]) or level.startswith(("seq", "geo"))

    @property
    def averages_sequences(self) -> bool:
        """Whether its loss is a mean over sequences, whatever aggregation is configured: GSPO, GMPO (verl)."""
        names = " ".join([*self._names, self.word("loss_mode", "policy_loss")])
        return self.is_by_sequence or "gmpo" in names or "geo_mean" in names

    @property
    def is_of_weights(self) -> bool:
        """Whether the clipped ratio weighs log-probabilities (CISPO): its lower bound is often none."""
        loss = self.word("policy_loss", "policy_loss_type", "loss_mode", "loss_type", "loss_fn")
        return "cispo" in " ".join([*self._names, loss])

    @property
    def is_distilled(self) -> bool:
        """Whether a teacher's log-probabilities make the advantages."""
        told = first_of(self._settings, "distill", "on_policy_distillation", "use_teacher", "opd")
        return told is True or "distill" in " ".join(self._names)

    @property
    def takes_engine_as_old(self) -> bool | None:
        """Whether the engine's log-probabilities stand for the old ones (verl's bypass mode, slime); None: not said."""
        told = [self.is_on("bypass_mode"), self.is_on("use_rollout_logprobs")]
        return True if True in told else False if False in told else None

    @property
    def is_off_policy(self) -> bool:
        """Whether samples are of older weights on purpose: an asynchronous run, or importance weights of the engine."""
        lag = self.number(*_LAGS)
        return bool(lag) or self.is_weighed is True or (self.is_weighed is None and self.weight_bounds[1] is not None)

    @property
    def is_weighed(self) -> bool | None:
        """Whether the run states that importance weights of the engine enter the loss; None where it does not say. A
        cap beside its switch (`rollout_is_threshold`, `tis_clip`, TRL's) has a default, and is no switch.
        """
        switches = [self.is_on(name) for name in _WEIGHED]
        words = [self.word(name) for name in ("is_correction", "rollout_is")]
        if True in switches or any(word not in ("", "false", "none", "null", "off") for word in words):
            return True
        if False in switches or any(words):
            return False
        alone = self.number("tis_cap", "tis_imp_ratio_cap", "is_cap", "truncated_importance_sampling_ratio")
        return None if alone is None else alone > 0

    @property
    def weight_bounds(self) -> tuple[float | None, float | None]:
        """What importance weights of the engine are raised to, or rejected below, and what they are cut off at
        (truncated, TIS); OpenRLHF has both in one setting.
        """
        both = first_of(self._settings, "vllm_is_truncated_threshold", "is_correction_threshold")
        low, high = _two_numbers(both) or (None, as_number(both))
        floor = self.number("tis_clip_low", "truncated_importance_sampling_ratio_min")
        cap = self.number(
            "tis_cap", "tis_imp_ratio_cap", "rollout_is_threshold", "vllm_importance_sampling_cap", "tis_clip", "tis",
            "is_cap", "importance_sampling_cap", "importance_sampling_clip", "truncated_importance_sampling_ratio",
            "behav_imp_weight_cap", "behave_imp_weight_cap",
        )  # fmt: skip
        return low if floor is None else floor, high if cap is None else cap

    @property
    def loss_kl_estimator(self) -> str:
        """The estimator of a KL in the loss: k1, k2, k3, |log r|. (verl's actor has one whether it is used or not.)"""
        own = ("kl_loss_type", "kl_estimator", "kl_type", "kl_approx")
        if not self.word(*own) and self._is_trl:
            return "k3"  # TRL has no other, and no switch
        # Where a KL is in the rewards, its penalty's word is no loss's.
        return _KL.get(self.word(*own, *(() if self._penalises else ("kl_penalty",))), "")

    @property
    def _penalises(self) -> bool:
        return any(self.is_on(name) for name in KL_IN_REWARDS)

    @property
    def clip_range(self) -> tuple[float, float] | None:
        """(low, high), each the distance to 1."""
        either = self.number("clip_ratio", "cliprange", "clip_range", "clip_eps", "eps_clip", "clip_epsilon")
        low = self.number("clip_ratio_low", "clip_low", "eps_low", "epsilon_low", "eps_clip_low", *_LOW)
        high = self.number("clip_ratio_high", "clip_high", "eps_high", "epsilon_high", "eps_clip_high", *_HIGH)
        both = _two_numbers(first_of(self._settings, "eps_clip_low_high", "clip_range", "clip_ratio", "eps_clip"))
        if both is not None and low is None and high is None:  # OpenRLHF's, which has one number beside it
            return both
        if either is None and low is None:
            # TRL's word for it, and an optimizer's for what it adds to a root.
            epsilon = self.number("epsilon")
            either = epsilon if epsilon is not None and (epsilon >= LEAST_EPSILON or self.is_by_sequence) else None
        low, high = either if low is None else low, either if high is None else high
        return (low, high if high is not None else low) if low is not None else None

    @property
    def advantage_clip(self) -> float | None:
        """What advantages are cut off at, on both sides."""
        return self.number(
            "advantage_clip", "adv_clip", "clip_adv", "clip_advantage", "clip_advantages", "advantage_clip_value",
            "adv_clip_max", "max_advantage",
        )  # fmt: skip

    def states_clip(self, low: float, high: float) -> bool:
        """Whether that is the stated range, as far as it is stated: one number may be the lower side's alone."""
        stated = self.clip_range
        return stated is not None and stated[0] == low and (stated[1] == high or stated[0] == stated[1])

    @property
    def updates(self) -> float:
        """Optimizer steps of a batch: epochs times mini-batches (verl and SkyRL state their size in prompts, NeMo-RL
        and OpenRLHF in responses), 1 where neither is stated.
        """
        epochs = self.number(
            "ppo_epochs", "num_iterations", "num_ppo_epochs", "n_epochs", "epochs_per_batch", "update_epochs_per_batch",
            "max_epochs", "mu",
        )  # fmt: skip
        minis = self.number("mini_batches", "num_mini_batches", "n_minibatch", "ppo_n_minibatches", "num_minibatches",
                            "ppo_mini_batches", "num_ppo_mini_batches", "num_steps_per_rollout")  # fmt: skip
        whole = self.number("train_batch_size")
        part = self.number("ppo_mini_batch_size", "policy_mini_batch_size")
        if part is None and (prompts := self.number("num_prompts_per_step", "rollout_batch_size")) is not None:
            whole = prompts * (self.number("num_generations_per_prompt", "n_samples_per_prompt") or 1.0)
            part = self.number("train_global_batch_size", "train_batch_size")
        if minis is None and whole and part and whole % part == 0:
            minis = whole / part
        return (epochs or 1.0) * (minis or 1.0)

    @property
    def is_updated_once(self) -> bool:
        """Whether a batch has one optimizer step, by the stated epochs and batch sizes, and is not off-policy."""
        if self.is_off_policy:
            return False
        epochs = self.number("ppo_epochs", "num_iterations", "num_ppo_epochs")
        whole, part = self.number("train_batch_size"), self.number("ppo_mini_batch_size")
        if epochs is not None or part is not None:
            return epochs == 1 and whole is not None and whole == part
        # OpenRLHF counts prompts in its rollouts, and responses in an update.
        prompts, each = self.number("rollout_batch_size"), self.number("n_samples_per_prompt")
        if prompts is None or each is None:
            return False
        return self.number("max_epochs") == 1 and prompts * each == whole


def is_by_token(algorithm: Algorithm) -> bool:
    """Whether the run states that each token has its own ratio (TRL's level; verl's plain loss), and no GSPO."""
    level = algorithm.word("importance_sampling_level", "ratio_level", "ratio_type")
    return not algorithm.is_by_sequence and (level == "token" or algorithm.word("loss_mode") == "vanilla")


def is_synchronous(algorithm: Algorithm) -> bool:
    """Whether the run states that its samples are of the weights that train on them, and nothing that weighs."""
    return algorithm.number(*_LAGS) == 0 and not algorithm.is_off_policy


def divides_by_length(algorithm: Algorithm) -> bool:
    """Whether the run states a loss that is a mean over a response's tokens, and no length in its advantages."""
    how = aggregation(algorithm)
    meant = algorithm.value("advantage_length_norm", "length_normalized_advantage", "adv_length_norm")
    return how.endswith("token-mean") and meant is not True


def measures_groups(algorithm: Algorithm) -> bool:
    """Whether advantages are, or may be, measured against the other responses to a prompt. A name as PPO stands for
    the loss as well: it says so where no more than one response is stated, or as the estimator's own.
    """
    size = algorithm.number(*GROUP_SIZE)
    return algorithm.estimator not in _OF_NO_GROUP or not (
        algorithm.names_an_estimator or (size is not None and size <= 1)
    )


def is_truncated(algorithm: Algorithm) -> bool | None:
    """Whether the engine samples from a part of the distribution (top-p, top-k, min-p); None: nothing is stated."""
    p, k, least = (algorithm.number(name, f"rollout_{name}") for name in ("top_p", "top_k", "min_p"))
    if p is None and k is None and least is None:
        return None
    return (p is not None and 0 < p < 1) or (k is not None and k > 0) or bool(least)


def kl_in_rewards(algorithm: Algorithm) -> float | None:
    """The coefficient of a KL that is subtracted from the rewards; None where the run does not state that."""
    switches = [algorithm.is_on(name) for name in KL_IN_REWARDS]
    if not any(switches):
        # OpenRLHF's one coefficient is the rewards' where its switch says that it is not the loss's.
        alone = algorithm.is_on("use_kl_loss") is False and False not in switches
        return algorithm.number("init_kl_coef") if alone else None
    return algorithm.number("kl_in_reward_coef", "kl_coef", "init_kl_coef", "kl_beta", "kl_penalty_coef")


def kl_in_rewards_estimator(algorithm: Algorithm) -> str:
    """The estimator of a KL that is subtracted from the rewards: k1, k2, k3, |log r|."""
    return _KL.get(algorithm.word("kl_penalty", "kl_in_reward_type", "kl_estimator", "kl_type", "kl_approx"), "")


def is_clipped(algorithm: Algorithm) -> bool:
    """Whether the loss is one that is clipped, as far as it is stated: the range has a default, and is in the settings
    of a loss that has none (REINFORCE, importance sampling), too.
    """
    words = [algorithm.word(name) for name in ("policy_loss", "policy_loss_type", "loss_mode", "loss_type", "loss_fn")]
    words.append(str(algorithm._loss_kind or "").lower())
    return all(not word or word in _CLIPPED for word in words)


def adapts_kl_in_rewards(algorithm: Algorithm) -> bool:
    """Whether the weight of a KL in the rewards follows the KL: by the controller's stated type, and only without one
    by its target, which verl's table has beside a fixed one, too.
    """
    words = {algorithm.word(name) for name in ("kl_ctrl", "kl_controller", "kl_ctrl_type", "kl_controller_type")}
    tables = (algorithm.value(name) for name in ("kl_ctrl", "kl_controller"))
    words |= {str(table.get("type", "")).lower() for table in tables if isinstance(table, Mapping)}
    words |= {str(each).lower() for each in algorithm._settings.get("type", ())}
    if "adaptive" in words:
        return True
    return "fixed" not in words and algorithm.number("kl_target", "target_kl", "horizon") is not None


def inside(algorithm: Algorithm, table: str, name: str) -> Any:
    """A setting of a table of settings, nested or with both in its name (`filter_groups.metric`); else None."""
    return next(_inside(algorithm._facts, table, name, (), _DEEPEST), None)


def _is_enabled(algorithm: Algorithm, table: str) -> bool:
    """Whether a table of settings has a switch of its own that is on."""
    return any(inside(algorithm, table, name) in (True, "true", "True") for name in ("enable", "enabled"))


def filters_groups(algorithm: Algorithm) -> bool:
    """Whether groups whose rewards are all equal are left out (DAPO's dynamic sampling)."""
    names = ("filter_groups", "dynamic_sampling", "filter_zero_std_groups")
    return any(algorithm.is_on(name) is True or _is_enabled(algorithm, name) for name in names)


def filter_metric(algorithm: Algorithm) -> str | None:
    """The figure that such a filter is stated to look at (verl's `filter_groups.metric`), where it is on."""
    found = inside(algorithm, "filter_groups", "metric")
    return found.lower() if isinstance(found, str) and found and filters_groups(algorithm) else None


def filters_overlong(algorithm: Algorithm) -> bool:
    """Whether responses that are cut off are left out of the loss."""
    return any(algorithm.is_on(name) is True for name in ("overlong_filtering", "mask_truncated_completions"))


def whitens(algorithm: Algorithm) -> bool:
    """Whether recorded advantages of tokens are stated to be whitened over the batch, by a switch of nothing else."""
    return algorithm.is_on("whiten_advantages") is True


#: Switches of what is recorded (slime, AReaL), and of what the loss does to a mini-batch (CleanRL, Stable-Baselines).
_WHITENED, _WHITENED_LATER = (
    ("whiten_advantages", "normalize_advantages", "adv_norm"),
    ("norm_adv", "normalize_advantage"),
)


def whitening(algorithm: Algorithm) -> str:
    """What a run states of whitening its advantages over the batch: `recorded` where those that are recorded are,
    `later` where the loss does it, `off`, or nothing. (OpenRLHF's `no_advantage_std_norm` leaves out the std.)
    """
    if algorithm.is_on("no_advantage_std_norm") is True:
        return "off"
    told = {name: algorithm.is_on(name) for name in (*_WHITENED, *_WHITENED_LATER)}
    tables = [name for name in _WHITENED if isinstance(algorithm.value(name), Mapping)]
    if tables or any(told[name] for name in _WHITENED):
        return "recorded"
    if any(told[name] for name in _WHITENED_LATER):
        return "later"
    return "off" if False in told.values() else ""


def demands_whitening(algorithm: Algorithm) -> bool:
    """Whether recorded advantages are to be whitened over the batch: as is stated, or by the algorithm where nothing
    is.
    """
    told = whitening(algorithm)
    return told == "recorded" or (not told and algorithm.estimator.startswith("reinforce++"))


def entropy_bonus(algorithm: Algorithm) -> float | None:
    """The coefficient of the entropy in the loss."""
    return algorithm.number("entropy_coeff", "entropy_coef", "ent_coef", "entropy_loss_coef")


#: A configuration is a few levels deep.
_DEEPEST = 8


def stated(facts: Mapping[str, Any], *names: str) -> Any:
    """The value of the first of these names, wherever in the settings it stands; None where none stands there, or where
    it stands twice with two values.
    """
    return first_of(settings_of(facts), *names)


def first_of(settings: Mapping[str, list[Any]], *names: str) -> Any:
    """`stated`, of what `settings_of` found."""
    for name in names:
        found = settings.get(name)
        if found and all(each == found[0] for each in found):
            return found[0]
    return None


def settings_of(facts: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Every value that is no table, in order, by the last part of its name in lower case."""
    found: dict[str, list[Any]] = {}
    for name, value in _leaves(facts, _DEEPEST):
        found.setdefault(name, []).append(value)
    return found


#: Tables of settings of evaluations, which have the names of the training's own (verl, ROLL).
_OF_EVALUATIONS = frozenset({"val_kwargs", "validation_kwargs", "eval_kwargs", "val_sampling_params"})


def _leaves(facts: Mapping[str, Any], deep: int, table: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in facts.items():
        parts = [_last(part) for part in [table, *re.split(r"[./]", str(key))] if part]
        if not _OF_EVALUATIONS.isdisjoint(parts):
            continue
        if isinstance(value, Mapping):
            if deep:
                yield from _leaves(value, deep - 1, parts[-1] if parts else "")
            continue
        yield _last(key), value
        if parts[-2:] == ["rollout", "n"]:
            yield "rollout_n", value  # verl's


def _beside(facts: Mapping[str, Any], part: str, deep: int) -> dict[str, Any]:
    return {
        key: _beside(value, part, deep - 1) if deep and isinstance(value, Mapping) else value
        for key, value in facts.items()
        if part not in re.split(r"[./]", str(key).lower())
    }


def _inside(facts: Mapping[str, Any], table: str, name: str, before: tuple[str, ...], deep: int) -> Iterator[Any]:
    for key, value in facts.items():
        path = (*before, *str(key).lower().split("."))
        if isinstance(value, Mapping):
            if deep:
                yield from _inside(value, table, name, path[-1:], deep - 1)
        elif path[-2:] == (table, name):
            yield value


def _last(key: Any) -> str:
    """`clip_ratio` of `actor.clip_ratio`, `actor/clip_ratio` and `--actor.clip-ratio`."""
    return str(key).lower().replace("/", ".").rpartition(".")[2].lstrip("-").replace("-", "_")


def stated_number(facts: Mapping[str, Any], *names: str) -> float | None:
    """`stated`, where that is a number."""
    return as_number(stated(facts, *names))


def stated_pad(facts: Mapping[str, Any]) -> int | None:
    """The token id that a run states to be padding, of its tokenizer or by name."""
    found = stated_number(facts, "pad_token_id", "pad_id")
    if found is None:
        found = as_number(next(_inside(facts, "tokenizer", "pad", (), _DEEPEST), None))
    return None if found is None or found < 0 or found != int(found) else int(found)


def _two_numbers(value: Any) -> tuple[float, float] | None:
    """A setting that holds a low and a high number."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return None
    low, high = map(as_number, value)
    return None if low is None or high is None else (low, high)


def as_number(value: Any) -> float | None:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _tables(facts: Mapping[str, Any], name: str, deep: int) -> Iterator[Any]:
    for key, value in facts.items():
        if isinstance(value, Mapping):
            if _last(key) == name:
                yield value
            elif deep:
                yield from _tables(value, name, deep - 1)


def severity_of_raw(algorithm: Algorithm) -> Severity:
    """An error contradicts what is stated: plain REINFORCE needs no baseline, ReMax's is 0 where every greedy answer
    fails, REINFORCE++'s may be taken later (a warning, unless that is stated), and what is not stated, or
    under a name that is not known here, may be meant (RAFT).
    """
    if algorithm.estimator in ("", "reinforce", "remax"):
        return "info"
    if algorithm.estimator.startswith("reinforce++"):
        return "warning" if demands_whitening(algorithm) else "info"
    return "error"


def why_raw(algorithm: Algorithm) -> str:
    """The cause that goes with that severity."""
    if algorithm.estimator == "reinforce":
        return "reinforce is stated, which needs no baseline: right, and of a high variance"
    if algorithm.estimator == "remax":
        return "ReMax subtracts the greedy answer's reward: right where every greedy answer earns 0, else it is lost"
    if algorithm.estimator.startswith("reinforce++"):
        return f"{algorithm.estimator} is stated, and neither a mean is subtracted nor a std divided by"
    if not algorithm.estimator:
        return (
            "no baseline is computed: right for REINFORCE and RAFT, and wrong where a baseline is meant (GRPO, RLOO), "
            "which groups of one response (rollout n = 1) have none of; the run states no estimator that is known here"
        )
    if (size := algorithm.number(*GROUP_SIZE)) is not None and size > 1:
        return (
            f"no baseline is computed, although groups of {size:g} responses are stated: each response is a group of "
            "its own (an id that is given to every sample, behind the repeat, instead of to every prompt), so that "
            "nothing is left to subtract; or the advantage is made without a baseline"
        )
    return (
        "no baseline is computed: groups of one response (rollout.n, num_generations or n_samples_per_prompt of 1) "
        "have "
        "none, so that GRPO and RLOO leave them their raw rewards; or the advantage is made without one"
    )


def kl_weight(algorithm: Algorithm) -> float | None:
    """The coefficient of a KL to the reference, wherever it is applied."""
    return algorithm.number(*KL_WEIGHTS)


def has_no_kl_loss(algorithm: Algorithm) -> bool:
    """Whether the run states that no KL to the reference is in its loss, whatever the coefficient would be, and none in
    its rewards.
    """
    return algorithm.is_on("use_kl_loss") is False and not any(map(algorithm.is_on, KL_IN_REWARDS))


def aggregation(algorithm: Algorithm) -> str:
    """How the loss is put together of its tokens, in the run's own word."""
    return algorithm.word(*_AGGREGATIONS)


def divides_by_update(algorithm: Algorithm) -> bool:
    """Whether the run states that a loss is divided by the tokens of a whole mini-batch, of all its micro-batches."""
    by = algorithm.word("loss_normalizer", "loss_normaliser", "loss_denominator", "token_normalizer")
    return "token" in by and "micro" not in by and any(word in by for word in ("batch", "update", "global"))


def is_dapo(algorithm: Algorithm) -> bool:
    """Whether the run says that it is DAPO, whose loss is one mean over all tokens of a batch (Yu et al. 2025)."""
    return any("dapo" in name for name in algorithm._names)


def divides_by_micro_batch(algorithm: Algorithm) -> bool:
    """Whether the run states that a loss is divided by what its own micro-batch, or its own rank, holds."""
    by = algorithm.word("loss_normalizer", "loss_normaliser", "loss_denominator", "token_normalizer")
    return any(word in by for word in ("micro", "local", "rank"))


def of_policy(algorithm: Algorithm) -> Algorithm:
    """What is stated of the policy: nothing that stands under the critic."""
    return Algorithm(_beside(algorithm._facts, "critic", _DEEPEST))


def rates(algorithm: Algorithm) -> list[float]:
    """Every learning rate that is stated, of whatever part of a model: a critic's, a vision tower's, a head's."""
    every = (
        as_number(value)
        for name, values in algorithm._settings.items()
        if name.endswith(("lr", "learning_rate")) and not name.startswith("min_")
        for value in values
    )
    return [rate for rate in every if rate]


def learning_rate(algorithm: Algorithm) -> float | None:
    """The policy's learning rate, not one that is stated under the critic. A 0 that stands beside another is a figure
    of the log, which was rounded or warms up.
    """
    own = of_policy(algorithm)
    told = [own.number(name) for name in ("lr", "learning_rate", "actor_lr", "actor_learning_rate")]
    return next((rate for rate in told if rate), next((rate for rate in told if rate is not None), None))


def largest_norm(algorithm: Algorithm) -> float | None:
    """What the gradient's norm is clipped at."""
    return algorithm.number(
        "max_grad_norm", "grad_clip", "clip_grad_norm", "gradient_clip_val", "clip_grad", "max_norm",
        "gradient_clipping", "max_gradient_norm", "grad_clip_norm", "grad_norm_clip",
    )  # fmt: skip
