"""Canonical names, what a name means, and the order of computation. Standard library only.

A canonical name says what a tensor *is*, whatever its framework called it. From the canonical name
follow its kind (which tolerances judge it), its mask (which tokens count) and its phase: "first" in
*first diverging tensor* means first by phase, never by file order or alphabet.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache

from msgspec import Struct

from replay_core.regexes import regex


class Phase(IntEnum):
    """Where in a training step a tensor is computed. Compared as numbers: smaller is earlier."""

    ROLLOUT_TOKENS = 0
    MASKS = 1
    REWARDS = 2
    VALUES = 3
    ROLLOUT_LOGPROBS = 4
    OLD_LOGPROBS = 5
    REF_LOGPROBS = 6
    ADVANTAGES = 7
    INPUTS = 8
    MODULES = 9
    LOGPROBS = 10
    ENTROPY = 11
    RATIO = 12
    LOSSES = 13
    GRADIENTS = 14
    GRAD_NORM = 15
    PARAMS = 16
    METRICS = 17
    UNKNOWN = 18


class Meaning(Struct, frozen=True):
    """What a canonical name implies.

    kind: ids | mask | positions | layout | logprob | activation | gradient | param | loss | value | metric | note
    region: which tokens count: valid (attention_mask) | response (response mask) | all
    alignment: full (index t is token t) | next (index t is about token t+1) | sample (one per row) | none
    """

    phase: Phase
    kind: str
    region: str = "all"
    alignment: str = "none"


MEANINGS: dict[str, Meaning] = {
    "input_ids": Meaning(Phase.ROLLOUT_TOKENS, "ids", "valid", "full"),
    "prompt_ids": Meaning(Phase.ROLLOUT_TOKENS, "ids"),
    "response_ids": Meaning(Phase.ROLLOUT_TOKENS, "ids"),
    "target_ids": Meaning(Phase.ROLLOUT_TOKENS, "ids"),
    "labels": Meaning(Phase.ROLLOUT_TOKENS, "ids", "all", "full"),
    "attention_mask": Meaning(Phase.MASKS, "mask", "all", "full"),
    "response_mask": Meaning(Phase.MASKS, "mask", "valid", "full"),
    "loss_mask": Meaning(Phase.MASKS, "mask", "valid", "full"),
    "tool_mask": Meaning(Phase.MASKS, "mask", "valid", "full"),
    "prompt_mask": Meaning(Phase.MASKS, "mask", "all", "full"),
    "sample_mask": Meaning(Phase.MASKS, "mask", "all", "sample"),
    "segment_ids": Meaning(Phase.MASKS, "layout", "all", "full"),
    "cu_seqlens": Meaning(Phase.MASKS, "layout"),
    "sample_lengths": Meaning(Phase.MASKS, "layout"),
    "position_ids": Meaning(Phase.MASKS, "positions", "valid", "full"),
    "reward": Meaning(Phase.REWARDS, "value", "all", "sample"),
    "reward_baselines": Meaning(Phase.REWARDS, "value", "all", "sample"),
    "token_rewards": Meaning(Phase.REWARDS, "value", "response", "next"),
    "token_scores": Meaning(Phase.REWARDS, "value", "response", "next"),
    "values": Meaning(Phase.VALUES, "value", "response", "next"),
    "values_train": Meaning(Phase.VALUES, "value", "response", "next"),
    "values_train_again": Meaning(Phase.VALUES, "value", "response", "next"),
    "values_alone": Meaning(Phase.VALUES, "value", "response", "next"),
    "old_values": Meaning(Phase.VALUES, "value", "response", "next"),
    "new_values": Meaning(Phase.VALUES, "value", "response", "next"),
    "rollout_logprobs": Meaning(Phase.ROLLOUT_LOGPROBS, "logprob", "response", "next"),
    "old_logprobs": Meaning(Phase.OLD_LOGPROBS, "logprob", "response", "next"),
    "ref_logprobs": Meaning(Phase.REF_LOGPROBS, "logprob", "response", "next"),
    "teacher_logprobs": Meaning(Phase.REF_LOGPROBS, "logprob", "response", "next"),
    "kl": Meaning(Phase.REF_LOGPROBS, "value", "response", "next"),
    "advantages": Meaning(Phase.ADVANTAGES, "value", "response", "next"),
    "returns": Meaning(Phase.ADVANTAGES, "value", "response", "next"),
    "policy_logprobs": Meaning(Phase.LOGPROBS, "logprob", "response", "next"),
    "entropy": Meaning(Phase.ENTROPY, "value", "response", "next"),
    "is_weights": Meaning(Phase.RATIO, "value", "response", "next"),
    "is_ratio": Meaning(Phase.RATIO, "value", "response", "next"),
    "token_loss": Meaning(Phase.LOSSES, "loss", "response", "next"),
    "pg_loss": Meaning(Phase.LOSSES, "loss"),
    "entropy_loss": Meaning(Phase.LOSSES, "loss"),
    "kl_loss": Meaning(Phase.LOSSES, "loss"),
    "loss": Meaning(Phase.LOSSES, "loss"),
    "grad": Meaning(Phase.GRADIENTS, "gradient"),
    "grad_norm": Meaning(Phase.GRAD_NORM, "gradient"),
    "param": Meaning(Phase.PARAMS, "param"),
}

#: Names one meaning has in every framework that uses them; names that frameworks disagree about
#: (`logprobs`, `log_probs`) stand in the dialects' own tables.
ALIASES: dict[str, str] = {
    "pg_losses": "token_loss",
    "sequences": "input_ids",
    "query_responses": "input_ids",
    "token_ids": "input_ids",
    "tokens": "input_ids",
    "idx": "input_ids",  # nanoGPT's
    "action_mask": "response_mask",
    "completion_mask": "response_mask",
    "response_masks": "response_mask",
    "action_masks": "response_mask",
    "completion_masks": "response_mask",
    "loss_masks": "loss_mask",
    "tool_masks": "tool_mask",
    "attention_masks": "attention_mask",
    "completion_ids": "response_ids",
    "responses": "response_ids",
    "prompts": "prompt_ids",
    "target_tokens": "target_ids",
    "action_log_probs": "old_logprobs",
    "per_token_logps": "policy_logprobs",
    "log_probs": "policy_logprobs",
    "logprobs": "rollout_logprobs",
    "prob_ratio": "is_ratio",
    "elementwise_loss": "token_loss",
    "effective_valid": "response_mask",
    "entropys": "entropy",
    "entropies": "entropy",
    "token_entropy": "entropy",
    "token_entropies": "entropy",
    "per_token_entropy": "entropy",
    "per_token_entropies": "entropy",
    "rewards": "reward",
    "score": "reward",
    "scores": "reward",
    "gradient": "grad",
    "token_level_rewards": "token_rewards",
    "token_level_scores": "token_scores",
    "token_mask": "loss_mask",
    "token_loss_mask": "loss_mask",
    "episode_reward": "reward",
    "weight_versions": "weight_version",
    "response_lengths": "response_length",
    "total_lengths": "total_length",
    "input_lengths": "sample_lengths",  # NeMo-RL's
    "sequence_lengths": "sample_lengths",
    "group_index": "group_id",
    "prompt_index": "group_id",
    "prompt_idx": "group_id",
    "rollout_is_weights": "is_weights",
    "sample_index": "sample_id",
    "sample_ids": "sample_id",
    "sample_indices": "sample_id",
    "output_token_logprobs": "rollout_logprobs",  # SGLang's
    "output_logprobs": "rollout_logprobs",
    "output_log_probs": "rollout_logprobs",
    "sampled_logprobs": "rollout_logprobs",
    "sampled_token_logprobs": "rollout_logprobs",
    "generated_logprobs": "rollout_logprobs",
    "tis_weights": "is_weights",
    "is_weight": "is_weights",
    "importance_weights": "is_weights",
    "importance_sampling_weights": "is_weights",
    "importance_sampling_ratio": "is_weights",
    "vllm_importance_sampling_ratio": "is_weights",
    "sampling_importance_weights": "is_weights",
    "sampling_importance_ratio": "is_weights",
    "rollout_importance_weights": "is_weights",
    "actor_importance_weights": "is_weights",
    "behave_imp_weight": "is_weights",
    "rollout_correction_weights": "is_weights",
    "ratio": "is_ratio",
    "importance_ratio": "is_ratio",
    "policy_ratio": "is_ratio",
    "coef_1": "is_ratio",  # TRL's, before it is clipped
    "ratios": "is_ratio",
    "prob_ratios": "is_ratio",
    "advantage": "advantages",
    "adv": "advantages",
    "advs": "advantages",
    "value_targets": "returns",
    "old_value_preds": "old_values",
    "values_old": "old_values",
    "per_token_loss": "token_loss",
    "token_losses": "token_loss",
    "per_token_logprobs": "policy_logprobs",
    "reward_baseline": "reward_baselines",
    "greedy_reward": "reward_baselines",
    "greedy_rewards": "reward_baselines",
    "greedy_baseline": "reward_baselines",
    "greedy_baselines": "reward_baselines",
    "remax_baseline": "reward_baselines",
    "remax_baselines": "reward_baselines",
    "reward_score": "reward",
    "reward_scores": "reward",
    "sample_rewards": "reward",
    "sequence_rewards": "reward",
    "gen_mask": "response_mask",
    "generation_mask": "response_mask",
    "assistant_mask": "loss_mask",
    "assistant_masks": "loss_mask",
    "train_mask": "loss_mask",
    "value_target": "returns",
    "target_values": "returns",
    "per_token_rewards": "token_rewards",
    "token_reward": "token_rewards",
    "group_idx": "group_id",
    "group_indices": "group_id",
    "prompt_uid": "group_id",
    "policy_loss": "pg_loss",
    "actor_loss": "pg_loss",
    "policy_gradient_loss": "pg_loss",
    "output_token_log_probs": "rollout_logprobs",
    "critic_values": "values",
    "state_values": "values",
    "value_preds": "values",
    "imp_weights": "is_weights",
    "importance_weight": "is_weights",
    "tis_ratio": "is_weights",
    "rollout_is_weight": "is_weights",
    "vllm_is_weights": "is_weights",
    "group_uid": "group_id",
    "group_uids": "group_id",
    "gid": "group_id",
    "uids": "group_id",
    "prompt_group_id": "group_id",
    "question_id": "group_id",
    "problem_id": "group_id",
    "problem_ids": "group_id",
    "query_id": "group_id",
    "qid": "group_id",
    "prompt_id": "group_id",
    "group": "group_id",
    "groups": "group_id",
    "ent": "entropy",
    "is_w": "is_weights",
    "tis_weight": "is_weights",
    "total_reward": "reward",
    "final_reward": "reward",
    "token_advantages": "advantages",
    "gae_advantages": "advantages",
    "target_returns": "returns",
    "prompt_token_ids": "prompt_ids",
    "response_token_ids": "response_ids",
    "completion_token_ids": "response_ids",
}

#: Bookkeeping a trainer stores beside its tensors: listed and shown, never first, never judged.
NOTES = frozenset(
    {
        "backend", "step", "rank", "micro", "micro_idx", "micro_batch", "timestamp", "batch_size", "seq_len",
        "log_probs_shape", "entropy_shape", "num_trajectories", "num_datums", "return_output", "allgather_logits",
        "return_logprobs", "return_entropy", "packed_seq_lens", "shape", "dtype", "group_id", "sample_id",
        "rollout_id", "response_length", "total_length", "truncated", "weight_version", "status", "meta",
    }
)  # fmt: skip

#: What a clock, a meter or a directory says: two runs that compute the same differ in it.
_CLOCK = regex(
    r"(?i)(?:^|[./_ -])(?:timing|timings|seconds|secs|runtime|duration|elapsed|latency|throughput|timestamp|"
    r"wall[_ -]?(?:clock|time)|walltime|uptime|"
    r"tokens?_per_sec(?:ond)?|tok_per_s|tokens_per_gpu_per_sec\w*|samples_per_sec(?:ond)?|steps_per_sec(?:ond)?|tflops|"
    r"tgs|mfu|eta|memory|mem|max_memory_\w+|\w*memory_(?:used|allocated|reserved)\w*|output_dir|save_path|run_name|"
    r"hostname|(?:ms|s|secs?|seconds|time)[_ -]per[_ -](?:step|iter|iteration|token|sample|batch|it|epoch|update)|"
    # A rate: tokens/s, tok/s, it/s, samples/sec, tokens/sec/gpu; what is in milliseconds: iter_ms.
    r"(?:tokens?|toks?|it|iters?|iterations?|samples?|steps?|sequences|seqs|batches|examples|TFLOPs?)[_ ]?/ ?"
    r"(?:s|sec|secs|second|gpu|device)(?:/(?:s|sec|gpu|device))?|[a-z]+[_-](?:ms|msec|millis))"
    r"(?:_s|_ms|_gb|_mb|_mib)?(?: ?\((?:m?s|secs?|seconds|TFLOP/s/GPU|[GM]i?B)\))?(?:[./]|$)"
    # `time` at the end of a word's parts is a clock (step_time, backward-time), before them a limit or a shift is none.
    r"|(?:^|[./_ -])time(?:_s|_ms|_sec|_secs|_seconds)?(?: ?\(m?s\))?(?:[./]|$)"
    r"|(?:^|[/ ])time[_ -]per[_ -]\w+|\belapsed time\b|\bthroughput per \w+|(?:^|^metrics\.|/)dt$"
)

_MODULE = regex(r"\.(inputs|output)(\.|$)")
_EXPERTS = regex(r"(?:^|\.)experts\.")
#: What a trainer puts around a model (a state dict may hold `model.model.layers`), and around modules inside it.
#: The model itself is a module too: what goes into it keeps a name before `.inputs`. A module may be called `output`, a
#: head as a rule: it has a weight, or inputs and an output of its own.
_WRAPPERS = regex(
    r"^(?:(?:model_)?state_dict\.|module\.|base_model\.model\.|model\.)+"
    r"(?!(?:inputs|output)(?:\.|$)(?!(?:.*\.)?(?:weight|bias|inputs|output)(?:\.|$)))"
)
_INSIDE = regex(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_UNKNOWN = Meaning(Phase.UNKNOWN, "value")
#: What thousands of names mean, each held once.
_MODULE_MASK = Meaning(Phase.MODULES, "mask")
_MODULE_IDS = Meaning(Phase.MODULES, "ids", "valid", "full")
_MODULE_POSITIONS = Meaning(Phase.MODULES, "positions", "valid", "full")
_ACTIVATION = Meaning(Phase.MODULES, "activation", "valid", "full")
_GRADIENT, _TOKEN_GRADIENT = Meaning(Phase.GRADIENTS, "gradient"), Meaning(Phase.GRADIENTS, "gradient", "valid", "full")
_PARAM = Meaning(Phase.PARAMS, "param")
_NOTE, _METRIC = Meaning(Phase.UNKNOWN, "note"), Meaning(Phase.METRICS, "metric")


def canonical(name: str, table: dict[str, str] | None = None) -> str:
    """The canonical name of a tensor a framework calls `name`; `name` itself where nothing is known.

    `table` holds a dialect's own words and goes before the general ones. A dotted path is looked up
    whole, then by its last part (`trajectories.tokens` is `trajectories.input_ids`).
    """
    if table is None:
        known = _known.get(name)
        return _canonical(name) if known is None else known
    if name in table:
        return table[name]
    if "." in name and name not in MEANINGS and name not in ALIASES and not _is_structural(name):
        head, _, last = name.rpartition(".")
        return f"{head}.{table[last]}" if head and last in table else canonical(name)
    return canonical(name)


def _is_structural(name: str) -> bool:
    return is_module_tensor(name) or name.startswith(("grad.", "param."))


#: A dump's files repeat their names: each is held once, and looked up once.
_held: dict[str, str] = {}
_known: dict[str, str] = {}
_MOST_HELD = 1 << 14


def held_once(name: str) -> str:
    """The same text: the one string that everybody holds who asked. `sys.intern` would mix it with the code's words."""
    if len(_held) >= _MOST_HELD:
        _held.clear()
    return _held.setdefault(name, name)


def _canonical(name: str) -> str:
    """By the general table alone."""
    if len(_known) >= _MOST_HELD:
        _known.clear()
    found = _known[name] = _looked_up(name)
    return found


def _looked_up(name: str) -> str:
    if name in MEANINGS:
        return name
    if _is_structural(name):
        return _without_wrappers(name)
    head, _, last = name.rpartition(".")
    known = ALIASES.get(name) or ALIASES.get(last) or _whose_logprobs(last)
    return name if not known else f"{head}.{known}" if head and name not in ALIASES else known


#: A log-probability by any of its short names, and what may stand around it: whose it is, and words that say nothing
#: more (`logp_old`, `old_policy_token_logps`, `gen_lp`).
_LOGPROB = regex(r"(?:^|_)(?:log_?probs?|log_?ps?|lps?)(?=_|$)")
_FILLERS = frozenset(("token", "tokens", "tok", "per", "action", "response", "completion", "selected", "model"))
_WHOSE = {
    **dict.fromkeys(("old", "prev", "previous", "prox", "proximal"), "old_logprobs"),
    **dict.fromkeys(("ref", "reference", "base", "sft"), "ref_logprobs"),
    **dict.fromkeys(("new", "cur", "curr", "current", "learner", "train", "trainer", "actor"), "policy_logprobs"),
    **dict.fromkeys(
        ("gen", "generation", "generator", "rollout", "engine", "sampler", "sampling", "inference", "infer", "behavior",
         "behaviour", "behav", "behave", "vllm", "sglang"),
        "rollout_logprobs",
    ),
    "teacher": "teacher_logprobs",
}  # fmt: skip


def _whose_logprobs(name: str) -> str | None:
    """Whose log-probabilities a name says, if each of its words is known; None for what is no such name."""
    if _LOGPROB.search(name) is None:
        return None
    words = [word for word in _LOGPROB.sub("", name).split("_") if word and word not in _FILLERS]
    if len(words) > 1:  # the policy that is old, or the reference, is not the policy of now
        words = [word for word in words if word != "policy"]
    if not words:
        return "policy_logprobs" if name in _BARE else None
    said = {"policy_logprobs" if word == "policy" else _WHOSE.get(word) for word in words}
    return said.pop() if len(said) == 1 else None


#: Of the names that say nobody's, those that no framework has for its engine's.
_BARE = frozenset(("logp", "logps", "token_logp", "token_logps", "tok_logp", "tok_logps"))


def _without_wrappers(name: str) -> str:
    for prefix in ("grad.", "param."):
        if name.startswith(prefix):
            return prefix + _bare(name[len(prefix) :])
    return _bare(name)


def _bare(name: str) -> str:
    return _WRAPPERS.sub("", _INSIDE.sub("", name))


def is_module_tensor(name: str) -> bool:
    """Whether the name is a module's recorded input or output: `layers.0.mlp.inputs.0`, `layers.0.mlp.output`; the
    gradient of one (`grad.layers.0.mlp.output`) is none.
    """
    return _MODULE.search(name) is not None and not name.startswith("grad.")


def is_parameter(name: str) -> bool:
    """Whether a canonical name is a parameter's own, without a prefix: dotted, and nothing else is known of it."""
    return "." in name and not _is_structural(name) and meaning(name) in (_PARAM, _UNKNOWN)


def module_of(name: str) -> str:
    """The module a tensor belongs to: `layers.0.mlp` of `layers.0.mlp.output.1`."""
    found = _MODULE.search(name)
    return name[: found.start()] if found else name


def is_input(name: str) -> bool:
    """Whether the name is a module's recorded input (not its output)."""
    found = _MODULE.search(name)
    return bool(found and found.group(1) == "inputs")


#: What a weight that looks words up is called at its end, and one that makes logits.
EMBEDDINGS = (
    "embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight", "embed_in.weight",
)  # fmt: skip
HEADS = ("lm_head.weight", "output_layer.weight", "embed_out.weight")
#: A head that is called so is one of the model itself: a block may have an `output`, too.
_PLAIN_HEAD = regex(r"^(?:grad\.|param\.)?output\.weight$")


def is_head(name: str) -> bool:
    """Whether the name is that of the weight which makes logits, or of its gradient."""
    return name.endswith(HEADS) or _PLAIN_HEAD.match(name) is not None


def makes_logits(name: str) -> bool:
    """Whether the name is that of logits, as a model returns them or its head puts them out."""
    return name.endswith(("logits", *(f"{head.removesuffix('.weight')}.output" for head in HEADS))) or (
        name == "output.output"
    )


def around_head(name: str) -> str:
    """What stands before a head in its name (`is_head`): `grad.` of `grad.lm_head.weight`."""
    ends = (*HEADS, "output.weight")
    return next(name.removesuffix(end) for end in ends if name.endswith(end))


def is_routed(name: str) -> bool:
    """Whether the name is a tensor inside a layer of experts: its rows are the tokens that a router sent there."""
    return is_module_tensor(name) and _EXPERTS.search(module_of(name)) is not None


def is_of_experts(name: str) -> bool:
    """Whether the name is a tensor inside a layer of experts, or one of all its experts in one."""
    return is_module_tensor(name) and _EXPERTS.search(f"{module_of(name)}.") is not None


#: Parts of a model in the order in which a forward calls them: siblings are held against each other, words of one line
#: are words for one thing. A part that is not here comes where the blank line is.
_CALLED = """
inputs
vision_tower visual vision_model audio_tower
multi_modal_projector connector
encoder
decoder language_model
embed_tokens embedding embeddings wte word_embeddings tok_embeddings embed_in
embed_positions wpe position_embeddings token_type_embeddings
rotary_emb rotary_pos_emb
layers layer h blocks block
input_layernorm ln_1 attention_norm norm1
self_attn attn attention self_attention linear_attn mamba mixer
post_attention_layernorm ln_2 ffn_norm norm2 pre_mlp_layernorm
pre_feedforward_layernorm
mlp feed_forward ffn block_sparse_moe
post_feedforward_layernorm
q_a_proj
q_a_layernorm
q_b_proj
q_proj wq query qkv_proj c_attn query_key_value linear_qkv in_proj in_proj_qkvz
q_norm q_layernorm
kv_a_proj_with_mqa
kv_a_layernorm
kv_b_proj
k_proj wk key in_proj_ba
k_norm k_layernorm
v_proj wv value
conv1d
gate router
experts
gate_proj w1 c_fc fc1 linear_fc1 gate_up_proj dense_h_to_4h
up_proj w3
base_layer
lora_A
lora_B
weight
bias

act_fn
down_proj w2 fc2 linear_fc2 dense_4h_to_h
shared_expert shared_experts
norm ln_f final_layernorm final_layer_norm
o_proj out_proj wo c_proj dense linear_proj
lm_head output_layer embed_out score v_head value_head
output
"""
_BEFORE, _AFTER = (text.strip().splitlines() for text in _CALLED.split("\n\n"))
_RANKS = {word: rank for rank, line in enumerate(_BEFORE) for word in line.split()}
_RANKS |= {word: rank for rank, line in enumerate(_AFTER, len(_BEFORE) + 1) for word in line.split()}
_PIECES = regex(r"(\D*)(\d{0,18})")

#: Where in a model something is: of every part of its name the rank, and the part itself with its numbers as numbers.
Place = tuple[tuple[int, tuple[tuple[str, int], ...]], ...]


def called(name: str) -> Place:
    """Sort key by which names of a model's tensors stand as a forward comes to them: layer 2 before layer 10,
    attention before the MLP, a module's inputs before its parts and these before its output.
    """
    return tuple(map(_part, name.split(".")))


def is_placed(name: str) -> bool:
    """Whether every part of a name is a word that this table knows, or a number: `called` then tells its place."""
    return all(word in _RANKS or word.isdigit() for word in name.split("."))


@lru_cache(maxsize=1 << 12)
def _part(word: str) -> tuple[int, tuple[tuple[str, int], ...]]:
    pieces = tuple((text, int(digits or -1)) for text, digits in _PIECES.findall(word) if text or digits)
    return _RANKS.get(word, len(_BEFORE)), pieces


@lru_cache(maxsize=1 << 11)
def meaning(name: str) -> Meaning:
    """What a canonical name implies; an unknown name has no phase and is judged as a plain value."""
    known = MEANINGS.get(name)
    if known:
        return known
    if is_module_tensor(name):
        tail = name[len(module_of(name)) + 1 :]
        if tail.endswith("attention_mask"):
            return _MODULE_MASK
        if tail.endswith("input_ids"):
            return _MODULE_IDS
        if tail.endswith("position_ids"):
            return _MODULE_POSITIONS
        return _ACTIVATION
    if name.startswith("grad."):
        return _TOKEN_GRADIENT if _MODULE.search(name) else _GRADIENT
    if name.startswith("param.") or name.endswith((".weight", ".bias")):
        return _PARAM
    last = name.rpartition(".")[2]
    if last in NOTES or _CLOCK.search(name):
        return _NOTE
    if name.startswith("metrics."):
        return _METRIC
    if last in MEANINGS:
        inner = MEANINGS[last]
        return Meaning(inner.phase, inner.kind, "all", "none")
    return _UNKNOWN
