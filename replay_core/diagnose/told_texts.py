"""What lines mean that say that a run trains on something else than its user thinks: one table by key.

The keys, and how such lines are known, are `dumps/told_lines.py`'s. A row says how grave a line is, from how many lines
on, and which of them are harmless.
"""

from __future__ import annotations

import re

from msgspec import Struct

from replay_core.documents.diagnosis import Severity
from replay_core.regexes import regex


class MeaningOfLines(Struct, frozen=True):
    """What a line means. `fewest`: lines of it before it is more than worth knowing."""

    link: str
    severity: Severity
    claim: str
    cause: str
    next_step: str
    fewest: int = 1
    each: float = 0.0
    """Lines a step before they are more than a small part of its samples."""
    throughout: Severity | None = None
    """How grave it is where it comes in half of the steps and more."""
    mild: re.Pattern[str] | None = None
    """Lines of it that healthy runs print, too."""
    over: re.Pattern[str] | None = None
    """What a later line says that it is over with."""


_RESUMED = (
    "the path is another than the last run saved to (a folder of one level more or less, a name of the experiment that "
    "changed, a disk that is not mounted on this node), the checkpoint was not written to its end, or this is the "
    "run's first start, and nothing is wrong"
)
_SHARE = "count how many of a step's samples they are, and which: what is left is not what the prompts are"

MEANINGS: dict[str, MeaningOfLines] = {
    "weights.skipped": MeaningOfLines(
        "rollout_logprobs", "warning",
        "the engine skips weights that are sent to it, as it knows no parameter of their names (params_dict): it keeps "
        "what it had in their place",
        "a wrapper's or adapter's prefix in the names (base_layer, base_model.model, _fsdp_wrapped_module), fused "
        "against split projections or experts, a layer of another pipeline rank, or another model than the engine "
        "loaded",
        "compare the names of both sides: rldbg weights; merge the adapter before the weights are sent; look whether "
        "the engine's log-probabilities leave the trainer's from the second step on",
        throughout="error",
        mild=regex(r"(?i)lm_head\b.*not in state_dict|rotary_emb|inv_freq|[qkv]_scale\b|kv_scale|input_scale"
                   r"|masked_bias|attn\.bias\b|_extra_state"),
    ),
    "weights.not_sent": MeaningOfLines(
        "rollout_logprobs", "warning", "a weight update of the engine is skipped: it samples with old weights",
        "no engine was there to take it (all are down, restarted or asleep), or it is switched off for this engine",
        "look at the engines' own logs at that time; stop the run where an update is not confirmed; rldbg weights "
        "compares the engine's weights with the checkpoint's", throughout="error",
        # Nothing is left out where the engine has them, or they do not change.
        mild=regex(r"(?i)already|up[- ]to[- ]date|unchanged|no (?:new|change)|frozen|\bstep[ =:]{1,2}0\b|\beval"),
    ),
    "weights.old_cache": MeaningOfLines(
        "rollout_logprobs", "warning",
        "the engine's prefix cache is not reset for new weights, as requests still use its blocks: keys and values of "
        "old weights are read on",
        "weights are updated while requests run: what follows a cached prefix is of two policies",
        "pause generation or abort the requests before the update (partial rollouts: reset_prefix_cache after they "
        "have ended); enable_prefix_caching=False tells whether it is this", fewest=3,
    ),
    "weights.other_model": MeaningOfLines(
        "rollout_logprobs", "warning",
        "the engine that samples is started from another model than the trainer, and no weights are sent to it "
        "(update_weights is False): the policy never reaches it",
        "model_path of the engine's configuration differs from hf_checkpoint, and its update is then off by default",
        "the same path on both sides, or update_weights: true for that model",
        mild=regex(r"(?i)^(?!.*\bmodel ['\"]?(?:actor|policy|default|main|rollout)\b)"),
    ),
    "weights.routing": MeaningOfLines(
        "gradient", "warning", "experts are chosen in turn and not by the router (forced balanced routing): a setting "
        "of tests and benchmarks is on, and the router is not trained",
        "debug.force_balanced_routing is on: the model is another one than is sampled from", "switch it off",
    ),
    "weights.adapter": MeaningOfLines(
        "optimizer", "warning", "the checkpoint lacks weights of the adapter: those layers of LoRA begin anew",
        "names do not fit (another name of the adapter, another version of PEFT, other target modules), so that what "
        "was trained is not loaded",
        "compare the names: rldbg show CHECKPOINT; print the adapter's weights behind the load (lora_B of 0 is a fresh "
        "one)", mild=regex(r"\[\s*\]"),
    ),
    "weights.missing": MeaningOfLines(
        "logprobs", "warning", "weights of the model are missing in the checkpoint: those layers begin at random",
        "names or the architecture do not fit, or the checkpoint was not written whole; of a head that is shared with "
        "the embedding (tied) nothing is wrong",
        "compare the names it lists with the checkpoint's: rldbg show CHECKPOINT",
        mild=regex(r"(?i)\[['\"](?:\w+\.)*lm_head\.weight['\"]\]|\b(?:no|0|without) missing keys"
                   r"|missing keys[^\[]{0,80}\[\s*\]"),
    ),
    "weights.unused": MeaningOfLines(
        "logprobs", "warning",
        "weights of an adapter or wrapper in the checkpoint are not used: the model is loaded without them",
        "the checkpoint holds LoRA's weights (or names with a wrapper's prefix) that this class does not know: what "
        "was trained is left out, and the base model stands in its place",
        "load it by PeftModel.from_pretrained, or merge_and_unload() and save again; rldbg show CHECKPOINT lists the "
        "names", mild=regex(r"(?i)^(?!.*(?:lora_|base_model\.|base_layer|modules_to_save|_fsdp_wrapped|_orig_mod"
                   r"|\['\"](?:module|actor|policy)\.))"),
    ),
    "weights.version": MeaningOfLines(
        "rollout_logprobs", "warning", "engines could not be told of new weights: their samples count as of old ones",
        "an engine hangs, died or is busy while weights are updated",
        "the engines' own logs at that time; stop the run where a weight update is not confirmed", throughout="error",
    ),
    "weights.verified": MeaningOfLines(
        "rollout_logprobs", "warning", "a check of the weight update finds elements that differ: the engine's weights "
        "are not the trainer's",
        "changes that were not sent (a delta that misses some), or that were rounded otherwise on the way",
        "send all weights once (a full update instead of a delta) and check again; rldbg weights compares both sides",
        throughout="error",
    ),
    "weights.nan": MeaningOfLines(
        "logprobs", "error", "the engine's logits are NaN, and it samples on: what is drawn is no answer of the policy",
        "the policy's weights (or the engine's copy) are not finite since an update with a NaN gradient or a broken "
        "weight update, or its forward overflows (fp16, a quantised or fused kernel)",
        "the first step whose grad_norm, KL or loss is not finite; rldbg weights compares the engine's weights with "
        "the checkpoint's; stop sampling on it", fewest=2,
    ),
    "weights.frozen": MeaningOfLines(
        "optimizer", "warning", "the optimizer is not made, as a setting of tests says so: no weight is trained",
        "a switch that was meant for measuring the rollouts alone (debug-disable-optimizer) is on", "switch it off",
    ),
    "weights.draft": MeaningOfLines(
        "time", "warning", "the draft model of speculative decoding is not updated with the policy: ever fewer of its "
        "tokens are accepted",
        "the engine's version keeps its drafter elsewhere, or has none where weights for it are sent: answers stay "
        "right, and generation becomes slower than without it",
        "the engine's version that the trainer pins; speculative decoding off, if the accepted length falls to 1",
    ),
    "weights.adapter_part": MeaningOfLines(
        "rollout_logprobs", "warning", "the engine leaves out a part of the adapter: it samples from another policy "
        "than is trained",
        "its LoRA knows no such layers (a vision tower, fused experts), so that only the rest of what is trained "
        "reaches it",
        "leave those layers out of target_modules (exclude_modules), or merge the adapter before weights are sent",
    ),
    "weights.adapter_lost": MeaningOfLines(
        "optimizer", "warning", "what the adapter was trained for does not come into the merged weights",
        "its scale (lora_alpha) was not saved and is taken as 0, or none of its names is one of the model's",
        "put lora_alpha into the adapter's configuration; rldbg show CHECKPOINT lists the names of both",
    ),
    "weights.new_tokens": MeaningOfLines(
        "optimizer", "warning", "tokens were added to the vocabulary, and the head that has to write them is not "
        "trained: the adapter leaves lm_head out",
        "a chat template that was cloned brings its own tokens (the end of a turn among them): their rows are random",
        "modules_to_save=['embed_tokens', 'lm_head'], or a template of tokens that the model has",
    ),
    "weights.attention": MeaningOfLines(
        "logprobs", "warning", "the trainer's attention is dense, and the engine's is sparse: two models of one set of "
        "weights",
        "this backend's implementation lacks the indexer that chooses what is attended to: log-probabilities differ "
        "ever more with the length",
        "the backend that implements it (Megatron's, most often); compare both sides' log-probabilities on long texts",
    ),
    "weights.bf16": MeaningOfLines(
        "optimizer", "warning", "AdamW keeps its state in bf16: small updates are rounded away, and the loss comes to "
        "rest too high",
        "optimizer_dtype is bfloat16 with an optimizer that does not compensate for rounding",
        "fp32 states (or an optimizer with Kahan summation, adam_bf16)",
    ),
    "weights.reference": MeaningOfLines(
        "ref", "warning", "the reference policy's checkpoint could not be loaded: the base model stands in its "
        "place, and KL is measured against another policy than before",
        "a run that goes on from a later reference finds its folder missing or broken on this node",
        "ls the path that the line names on every node; start from a checkpoint that has it",
    ),
    "weights.value_head": MeaningOfLines(
        "optimizer", "info", "the critic's head begins at random behind the load of a checkpoint",
        "meant, where the checkpoint is a language model's; of a critic that goes on it loses what it had learnt",
        "look whether the critic's own checkpoint was to be loaded; warm the critic up first",
    ),
    "weights.random": MeaningOfLines(
        "logprobs", "warning", "the model begins at random: no weights are loaded",
        "a setting of tests is on (random initialisation), or no checkpoint was found to begin from",
        "the path of the weights to begin with; the loss of the first step is the logarithm of the vocabulary where "
        "weights are random",
        # Parts that begin so on purpose, and an engine that gets its weights from the trainer.
        mild=regex(r"(?i)\bhead|lora|adapter|\bvalue|critic|dummy|load_format|vllm|sglang"),
    ),
    "weights.task_type": MeaningOfLines(
        "optimizer", "warning", "the adapter's task_type is not SEQ_CLS (TOKEN_CLS): the score head of the reward "
        "model is neither trained nor saved with it",
        "PEFT keeps the head beside the adapter for task_type SEQ_CLS alone: without it the head stays random",
        "lora_task_type=SEQ_CLS (LoraConfig(task_type='SEQ_CLS')), or modules_to_save=['score']",
    ),
    "weights.offloaded": MeaningOfLines(
        "time", "warning", "parameters of the model were put on the CPU or the disk, as it does not fit into the GPU "
        "memory that is free",
        "device_map='auto' puts there what has no room: generation is many times slower, and such layers may not be "
        "trained",
        "nvidia-smi: what else is on the GPU; fewer bits, a smaller model, or more GPUs; device_map={'': 0} fails at "
        "once instead",
    ),
    "weights.tied": MeaningOfLines(
        "optimizer", "info", "an adapter is put on a head that shares its weights with the embedding",
        "after a merge both are changed, or the head's change is lost in a format that stores shared weights once",
        "leave lm_head out of target_modules, or untie (tie_word_embeddings=False) before saving",
    ),
    "weights.rounded": MeaningOfLines(
        "rollout_logprobs", "info", "an adapter is merged into quantised weights: the result is rounded to 4 or 8 bits",
        "what the engine samples with differs from what is trained by that rounding",
        "merge into the weights in bf16, or let the engine load the adapter beside the base model",
    ),
    "resume.anew": MeaningOfLines(
        "optimizer", "warning",
        "a checkpoint was to be loaded and none was found: the run begins anew, from its first weights and step 0",
        _RESUMED, "ls the path that the line names, on this node; compare it with where the last run says it saved",
    ),
    "samples.data_anew": MeaningOfLines(
        "tokens", "warning", "a run goes on from a checkpoint, and its data begins from the start again: the first "
        "prompts are asked a second time",
        "the loader's state is not in the checkpoint (another version, another data set, a save that was interrupted)",
        "ls data.pt (dataloader state) in the checkpoint; skip as many samples by hand, or count an epoch less",
        mild=regex(r"(?i)epoch boundary"),
    ),
    "samples.buffer": MeaningOfLines(
        "tokens", "info", "the buffer of samples begins empty behind the load of a checkpoint",
        "what was sampled and not yet trained on is lost; the first steps wait for new samples", "nothing has to be "
        "done",
    ),
    "samples.queue": MeaningOfLines(
        "groups", "warning", "finished samples are thrown away: the queue between rollouts and trainer is full",
        "the trainer is slower than the rollouts: what is thrown away was computed in vain, and long answers, which "
        "come last, are thrown away more often",
        "a larger queue (max_queue_size), fewer rollouts at once or a smaller staleness_threshold; more GPUs for the "
        "trainer", fewest=10, each=2.0, mild=regex(r"(?i)\b(?:no|without|0) (?:samples? )?drop"),
    ),
    "samples.retokenized": MeaningOfLines(
        "tokens", "warning",
        "tokens that are trained on are not those that were sampled: messages are tokenised anew, and it comes out "
        "otherwise",
        "a chat template that drops or moves something over turns (thoughts, blanks, tool calls), or text that "
        "decodes and encodes to other tokens: their log-probabilities are of tokens that nobody sampled",
        "keep the engine's token ids and add each turn's tokens to them; print one sample of both where they part",
        fewest=3,
    ),
    "samples.data_error": MeaningOfLines(
        "tokens", "warning", "samples of the data set fail as they are made into prompts, and are left out or replaced "
        "by another one",
        "a template that refuses some messages, an image that cannot be read, a field that is missing: what is left is "
        "another data set", "raise instead (strict), and print one of them; " + _SHARE, fewest=20, each=2.0,
    ),
    "samples.few_trainable": MeaningOfLines(
        "groups", "warning", "few of a step's samples are trainable",
        "all answers to most prompts earn the same: prompts too hard or too easy for this policy, or a reward that "
        "does not tell answers apart; or most end in an error or are cut",
        "look at the rewards of one group by hand; filter prompts by solve rate; more responses per prompt", fewest=3,
    ),
    "samples.cancelled": MeaningOfLines(
        "groups", "warning", "rollouts are cancelled again and again, as they are too many updates old",
        "rollouts take longer than the trainer needs for the updates that it allows (max_off_policy_steps): the long "
        "and hard ones are lost, and short answers are what is trained on",
        "raise the limit, or lower how many run at once; a smaller limit of tokens or turns; look at the length of "
        "what is cancelled", fewest=5,
    ),
    "samples.failed": MeaningOfLines(
        "groups", "warning", "rollouts fail again and again and are left out",
        "a sandbox, tool or server of the environment that is not up, an engine that does not answer in time, a "
        "mistake in the agent's code: long and hard ones fail more often, so that what is left is another selection",
        "the first of these errors in the environment's own log; " + _SHARE, fewest=10, each=2.0,
    ),
    "samples.group_lost": MeaningOfLines(
        "groups", "warning", "whole groups are dropped, as some of their answers failed or have no reward",
        "one sandbox, tool or judge that fails takes the other answers of its prompt along: hard and long prompts are "
        "lost more often",
        "the first of these errors in the environment's own log; keep groups that have two rewards and more; " + _SHARE,
        fewest=10, each=1.0,
    ),
    "samples.tool_call": MeaningOfLines(
        "tokens", "warning", "ever more calls of tools cannot be read",
        "the policy loses their format (a broken JSON, a tag that is not closed), or writes another than the parser "
        "expects",
        "read one of them; compare the parser (tool_format) with the chat template; a reward for a call that can be "
        "read", fewest=20,
    ),
    "samples.turns": MeaningOfLines(
        "tokens", "warning", "episodes run into their limit of turns or context, and are ended",
        "the policy goes in circles (the same call again and again), or the limit is too small for this task",
        "read one of them to its end; a penalty for repeated calls; a larger limit; " + _SHARE, fewest=10, each=2.0,
    ),
    "samples.empty_batch": MeaningOfLines(
        "groups", "warning", "batches are empty: every sample of a step failed or was filtered away",
        "every episode ends in an error, or no group has a spread of rewards: nothing is trained in that step, and "
        "the run ends itself after some of them in a row",
        "look at the rewards and errors of one batch by hand; easier prompts, a working sandbox, a looser filter",
        fewest=2, throughout="error",
    ),
    "samples.low_spread": MeaningOfLines(
        "groups", "warning", "most groups of a batch have no spread of rewards: they teach nothing",
        "prompts too hard or too easy for this policy, or a reward that does not tell answers apart",
        "look at the rewards of one group by hand; filter prompts by solve rate; more responses per prompt", fewest=3,
    ),
    "samples.no_gradient": MeaningOfLines(
        "gradient", "warning", "the optimizer steps without any gradient: no sample of that step was trained on",
        "no forward and backward came before the step (all samples were filtered or failed, or calls of two clients "
        "are mixed up)", "count forward_backward calls between two steps; print the batch of one such step", fewest=3,
    ),
    "samples.empty_output": MeaningOfLines(
        "tokens", "warning", "answers come back empty",
        "the engine ended the request at once (a stop word at the start, no room for a token, an abort)",
        "the stop reason of one of them; max_tokens and the prompt's length; " + _SHARE, fewest=10, each=2.0,
    ),
    "samples.no_logprobs": MeaningOfLines(
        "rollout_logprobs", "warning", "sampled tokens come without a log-probability: zeros, a bound or nothing "
        "stands in its place",
        "the engine was not asked for them, its answer does not fit the tokens, or sampling with top-k or top-p gives "
        "a token probability 0: ratios of such tokens are wrong",
        "ask for logprobs of the sampled token in every request; top_p=1 and top_k=-1 on both sides; print one "
        "sample's tokens beside its log-probabilities", fewest=3,
    ),
    "samples.gap_masked": MeaningOfLines(
        "rollout_logprobs", "warning", "many samples are masked, as engine and trainer disagree on their tokens",
        "the engine computes another model than the trainer (weights, precision, kernels), or its answers are old",
        "rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump names where they part; lower the number of "
        "updates between weight updates", fewest=3,
    ),
    "samples.no_version": MeaningOfLines(
        "ratio", "warning", "samples do not say by which weights they were sampled: they are taken for new ones",
        "a workflow of one's own leaves the field out: old samples pass as fresh, and their staleness is not bounded",
        "let the workflow return the version of each token", fewest=3,
    ),
    "samples.too_stale": MeaningOfLines(
        "ratio", "warning", "samples that are older than allowed are trained on",
        "rollouts take longer than the trainer needs for the updates that it allows (max_staleness_steps)",
        "raise the limit knowingly, or run fewer rollouts at once", fewest=3,
    ),
    "samples.routes": MeaningOfLines(
        "rollout_logprobs", "warning", "experts that the engine chose are missing for tokens: the trainer's own router "
        "chooses there",
        "the engine returns fewer routes than tokens (a prefix cache, chunks): log-probabilities of such tokens differ",
        "prefix caching off tells whether it is this; the engine's version that the trainer pins", fewest=5,
    ),
    "samples.not_own": MeaningOfLines(
        "tokens", "warning", "answers of the data set are trained on where the policy's own were asked for",
        "no engine is there to generate them", "use_vllm=true, or lambda 0 where it is meant",
    ),
    "samples.too_long": MeaningOfLines(
        "tokens", "warning", "samples are left out as they are longer than the limit of tokens",
        "long answers (or examples) are never trained on: the policy learns from short ones alone",
        "raise the limit that the line names (token_budget, cutoff_len), or generate and select within it; " + _SHARE,
        fewest=10, each=2.0,
    ),
    "samples.invalid": MeaningOfLines(
        "tokens", "warning", "examples of the data set are dropped as invalid",
        "roles that do not alternate, a conversation without a prompt or an answer, another format than is declared",
        "print one of them; compare its format with the data set's description (dataset_info.json); " + _SHARE,
        fewest=10, each=2.0,
    ),
    "samples.untrained": MeaningOfLines(
        "masks", "warning", "samples without one trained token: they are skipped, or count for nothing in the loss",
        "the marker of the answer is not in the text as it is tokenised (another template), the prompt fills the "
        "window, or no tokens were recorded for an episode",
        "print one sample's tokens beside its labels; the template of this model; a longer window", fewest=5,
    ),
    "samples.off_by_one": MeaningOfLines(
        "masks", "warning", "prompt and answer together are not tokenised as the prompt and then the answer: the mask "
        "between them is off by a token",
        "a blank or special token at the border, merged with its neighbour: as a rule one token of each such sample",
        "let the template end the prompt (add_generation_prompt) and begin the answer without a blank; print both for "
        "one sample", fewest=10,
    ),
    "samples.images": MeaningOfLines(
        "tokens", "warning", "not all images of samples could be loaded: their placeholders do not fit what the model "
        "sees",
        "files that are missing or broken, a path that this node does not have, a server that refuses",
        "open one of them on that node; leave such samples out; " + _SHARE, fewest=5,
    ),
    "samples.cut_prompt": MeaningOfLines(
        "tokens", "warning", "prompts are longer than max_prompt_length and are cut: the question, or what tells the "
        "model how to answer, is missing",
        "max_prompt_length is smaller than the data's prompts", "raise it, or filter such prompts; " + _SHARE, fewest=5,
    ),
    "samples.no_room": MeaningOfLines(
        "tokens", "warning", "almost no token is left for the answer: prompt and turns fill the context",
        "max_tokens is lowered so that prompt and answer fit into max_model_length: such answers are cut at their "
        "first words",
        "raise max_model_length, shorten what tools return, or end the episode before", fewest=5,
        mild=regex(r"(?i)tokens to [1-9]\d{2,}"),
    ),
    "samples.leftover": MeaningOfLines(
        "groups", "warning", "samples of each step are dropped, as they do not fill a whole batch",
        "the number of samples is no multiple of the batch size (times ranks): what is left over was generated in vain",
        "sizes that divide; fewer prompts per step, or a smaller batch", fewest=3,
    ),
    "samples.stale": MeaningOfLines(
        "groups", "warning", "finished samples are dropped as too old",
        "they were sampled by weights of more updates ago than is allowed: long answers, which take longest, are lost "
        "more often",
        "allow more, or fewer rollouts at once; a smaller limit of tokens", fewest=10, each=2.0,
    ),
    "samples.masked": MeaningOfLines(
        "masks", "warning", "every response of a batch is masked: no token of it is trained on",
        "all were cut off, failed or were filtered (their loss masks are 0): the loss of that step is 0 or 0/0",
        "print the masks and stop reasons of one batch; a larger limit of tokens; leave such batches out",
        throughout="error",
    ),
    "samples.aborted": MeaningOfLines(
        "time", "info", "the engine aborts requests",
        "partial rollouts abort what runs at a weight update, which is as it should be; else the client gave up (a "
        "time limit, a connection that broke), and those samples are lost",
        "compare their number with the requests of a step; raise the client's time limit",
    ),
    "samples.all_cut": MeaningOfLines(
        "masks", "warning", "every answer of a batch is cut at the limit of tokens and left out of the loss: nothing "
        "is learnt in that step",
        "the limit is too small for this task, or the policy does not end its answers any more",
        "a larger limit (max_completion_length); read the end of one answer; without the mask of cut answers, where "
        "they are to be punished", fewest=2, throughout="error",
    ),
    "samples.all_aborted": MeaningOfLines(
        "tokens", "warning", "every sample of a batch was aborted: there is nothing to train on",
        "the engines were stopped, paused or restarted under all of its requests, or the client gave all up",
        "the engines' own logs at that time; the client's time limit", throughout="error",
    ),
    "samples.group_of_one": MeaningOfLines(
        "groups", "warning", "one response per prompt: a group of one has no baseline, and the method is REINFORCE",
        "the number of samples per prompt is 1: an advantage against the group's own mean is 0, and one without a "
        "baseline is noisy", "4 and more samples per prompt (8 in most recipes)",
    ),
    "samples.alone": MeaningOfLines(
        "groups", "warning", "prompts are left with one response, whose advantage is 0: such groups teach nothing",
        "the other answers of the group failed or were filtered, or ids of prompts are not the same within a group",
        "print the ids of one batch; drop such prompts before they are trained on", fewest=10, each=2.0,
    ),
    "samples.end_masked": MeaningOfLines(
        "masks", "warning", "the token that ends a turn is not trained: the model may not learn to stop",
        "the chat template puts it outside of what it marks as the assistant's",
        "a template whose generation block holds the end of the turn; print one sample's tokens beside its labels",
    ),
    "samples.packed": MeaningOfLines(
        "masks", "warning", "samples are packed into one row, and attention does not part them: each sees those before "
        "it",
        "packing (padding-free) needs an implementation that knows where a sample ends (flash attention)",
        "attn_implementation='flash_attention_2' (or 3), or packing off",
    ),
    "samples.tools": MeaningOfLines(
        "tokens", "warning", "calls of tools are never noticed: no stop word is set for their format",
        "the parser was made without the words that end a call",
        "stop strings of the format that the model writes; print one answer with a call",
    ),
    "samples.pad_is_end": MeaningOfLines(
        "masks", "info", "the pad token is the end token",
        "where labels are masked by the pad's id, and not by length, the end token is never trained, and answers do "
        "not end", "look whether the last label of one sample is the end token; a pad token of its own",
    ),
    "samples.regex": MeaningOfLines(
        "tokens", "warning", "the tokenizer splits text by a wrong pattern: its tokens are not those that the model "
        "was trained with",
        "the saved tokenizer of this model has an error that transformers knows of",
        "fix_mistral_regex=True where it is loaded, in trainer and engine alike",
    ),
    "samples.regex_said": MeaningOfLines(
        "tokens", "info", "the tokenizer is said to split text by a wrong pattern",
        "some versions of transformers say so of every local model; of one that comes from Mistral's it is true",
        "compare its tokens of one text with the model's own tokenizer; fix_mistral_regex=True",
    ),
    "rewards.none": MeaningOfLines(
        "rewards", "warning", "samples for which every reward function returns None: they have no reward (NaN)",
        "a function that knows only some tasks, or that needs a column that these samples do not have (solution None)",
        "print one of the samples that it names; return 0.0 where an answer is wrong, and leave out samples without a "
        "truth", fewest=2,
    ),
    "rewards.service": MeaningOfLines(
        "rewards", "warning", "the service that gives rewards (or runs the task) failed for good on samples: they get "
        "0, or none",
        "it is down, too slow, or its address is another: right answers are punished as wrong ones are",
        "its own log at that time, and curl it from that node; leave such samples out of the loss instead of a 0",
        fewest=2, mild=regex(r"(?i)\bretrying|will (?:be )?retr(?:y|ied)"),
    ),
    "rewards.no_truth": MeaningOfLines(
        "rewards", "warning", "samples have no ground truth: their reward is always 0",
        "a column that is missing or named otherwise, or rows without an answer",
        "print one sample's keys; leave such rows out", fewest=3,
    ),
    "rewards.no_function": MeaningOfLines(
        "rewards", "warning", "no reward function is known for the data set of some samples: they earn nothing",
        "the name of their data source is none that the built-in rewards know",
        "a known name in that column, or a function of your own for it", throughout="error",
    ),
    "rewards.no_column": MeaningOfLines(
        "rewards", "warning", "the data set has no ground truth: every reward is 0",
        "a column that is missing or named otherwise", "print one sample's keys; name the column of the answers",
    ),
    "rewards.zeroed": MeaningOfLines(
        "rewards", "warning", "a 0 stands for rewards that could not be worked out: right answers are punished as "
        "wrong ones are",
        "the verifier, sandbox or judge fails on them, or its answer cannot be read (no number where one is looked "
        "for)",
        "print one such answer and what the judge said of it; leave such samples out of the loss instead of a 0; "
        + _SHARE, fewest=10, each=2.0,
        # A patch of the policy's own that does not fit is a wrong answer; what is cut may be meant to earn nothing.
        mild=regex(r"(?i)patch failed to apply|truncat|over-?long|too long"),
    ),
    "rewards.raised": MeaningOfLines(
        "rewards", "warning", "rewards fail again and again: the reward function, verifier or judge raises, and "
        "something stands in the score's place (0, most often)",
        "an answer it cannot parse, a service that does not answer, a limit of requests, a time limit by signals in a "
        "thread: right answers are punished as wrong ones are",
        "call it by hand on one of these answers; count such samples and leave them out of the loss", fewest=10,
        each=2.0,
    ),
    "rewards.clipped": MeaningOfLines(
        "rewards", "warning", "rewards lie outside of the range that they are scaled from, and are cut to it",
        "the range of the configuration is not the reward's own: best (or worst) answers all earn the same",
        "print the largest and smallest reward; set the range to them", fewest=3,
    ),
    "rewards.cut": MeaningOfLines(
        "rewards", "warning", "the judge is shown messages that were cut to its context (or none, where they "
        "do not fit)",
        "answers are longer than the judge's context: what it scores may lack the end, where the result stands",
        "a judge with a longer context; hand it the final answer alone", fewest=20,
    ),
    "running.engine": MeaningOfLines(
        "time", "warning", "an inference engine did not answer its health check and was ended: fewer engines go on",
        "the engine hangs or died (out of memory, a kernel, a long request), or the check's time is too short",
        "the engine's own log at that time; look whether it is started again; raise the check's time limit only where "
        "it still worked", mild=regex(r"(?i)^(?!.*\bkill).*(?:retry|starting up|attempt \d)"),
        over=regex(r"(?i)recover|restart|started again|is back"),
    ),
    "running.detokenizer": MeaningOfLines(
        "time", "warning", "the inference server answers no health check: nothing comes back from its detokenizer",
        "its scheduler hangs (a collective, a kernel) or is gone, or one step takes longer than the check waits",
        "py-spy dump of its scheduler; the server's own log for its first error", fewest=3,
    ),
    "running.no_workers": MeaningOfLines(
        "time", "warning", "the router has no engine that takes requests: all are unhealthy or cut off",
        "the engines died, are paused for a weight update, or failed so many requests that the router gave them up",
        "the engines' own logs; curl their health from the router's node; look whether any is taken back", fewest=3,
    ),
    "running.stall": MeaningOfLines(
        "time", "warning", "rollouts stand still: environments or engines do not answer",
        "a sandbox or tool that hangs, an engine that is gone, a request that was lost: the step waits for them",
        "the environment's own log; a time limit for each call and each episode", fewest=3,
    ),
    "running.mount": MeaningOfLines(
        "time", "warning", "a network mount does not answer, and everything that reads or writes there waits for it",
        "its server or the network to it is down, or the file system has put this client out",
        "ls the mount from that node; dmesg; mount it again, and write checkpoints elsewhere",
    ),
    "running.stacks": MeaningOfLines(
        "time", "warning", "a watchdog writes down where a process stands, as it has not gone on for its time",
        "a collective that not every rank joins, a mount, a lock or a server that does not answer: the frames below "
        "the line say in what it waits", "the innermost frames below that line; py-spy dump --pid PID of the others",
    ),
    "running.shorter_engine": MeaningOfLines(
        "tokens", "warning", "the engine's limit of tokens is smaller than the policy's: answers are cut at "
        "the engine's",
        "max_model_len of the engine is set apart from max_total_sequence_length", "the same limit on both sides",
    ),
    "running.not_corrected": MeaningOfLines(
        "rollout_logprobs", "warning", "the correction between engine and trainer is switched on and not applied",
        "what it needs is missing in the batch, or another setting that it goes with is off",
        "let the engine return its log-probabilities; use_decoupled_loss where rejection is to work",
    ),
    "running.other_loss": MeaningOfLines(
        "loss", "warning", "the loss that was asked for fails, and another one is trained on",
        "what it needs does not fit the batch (shapes, cached logits of another data order)",
        "raise instead of falling back, and look at its first error", throughout="error",
    ),
    "running.rerun": MeaningOfLines(
        "loss", "warning", "the trainer's own check finds a result that should not be (a loss that is NaN or "
        "leaps), and computes the step again",
        "a batch that overflows gives the same again; a GPU that computes wrongly does not (its own lines behind it "
        "say which)",
        "read what it says of the second run: not reproducible is a GPU to take out; else look at the batch of that "
        "iteration",
    ),
    "running.draft_low": MeaningOfLines(
        "time", "warning", "speculative decoding hardly helps: the engine accepts next to none of the drafted tokens",
        "the draft model is not updated with the policy, or is another model's: every draft is computed in vain",
        "look at the accepted length of the first steps; update the drafter with the weights, or switch it off",
        fewest=10,
    ),
    "running.entropy": MeaningOfLines(
        "loss", "info", "the entropy is logged and gives no gradient", "a setting that saves memory detaches it",
        "the differentiable way, where an entropy bonus is to work",
    ),
    "running.half": MeaningOfLines(
        "rollout_logprobs", "info", "the engine computes in float16, and the checkpoint is in bfloat16",
        "meant, where the trainer computes in float16, too; else both round otherwise",
        "the same dtype on both sides",
    ),
    "running.kv_small": MeaningOfLines(
        "time", "info", "the engine's KV cache holds fewer requests than a step sends it",
        "requests wait for one another", "a larger gpu_memory_utilization, more engines or shorter answers",
    ),
    "running.random_state": MeaningOfLines(
        "tokens", "info", "the state of random numbers is not in the checkpoint for this rank",
        "the run goes on with other random numbers than it would have had: on another number of processes, most often",
        "nothing has to be done, but that steps are not the same again",
    ),
    "running.arguments": MeaningOfLines(
        "optimizer", "info", "settings differ from those that the checkpoint was saved with",
        "batch sizes or intervals were changed: the number of steps and where the data goes on follow the new ones",
        "look whether the change is meant; the schedule's length goes by it",
    ),
    "running.no_broadcast": MeaningOfLines(
        "rollout_logprobs", "warning", "the trainer did not send its last weights in time, and the run ends without "
        "them",
        "the trainer hangs, died or was still at work: the last version was not sampled from or evaluated",
        "the trainer's own log at that time; look whether its last checkpoint is whole",
    ),
    "running.on_cpu": MeaningOfLines(
        "time", "warning", "a slow implementation runs in place of kernels: Triton does not work here, and what needs "
        "it is computed on the CPU",
        "Triton is not installed for this torch and Python, or does not know this device",
        "pip install triton (the version that torch pins); python -c 'import triton'",
    ),
    "running.slow_path": MeaningOfLines(
        "time", "info", "a slow implementation runs in place of a kernel that is not installed: the fast path is off",
        "linear attention falls back to plain torch: many times slower on long texts, and rounded otherwise than the "
        "engine's kernels",
        "install what the line names (flash-linear-attention, causal-conv1d) for this torch and Python",
    ),
    "running.object_store": MeaningOfLines(
        "time", "info", "Ray's object store lies on a disk, as /dev/shm is too small",
        "a container has 64 MB of shared memory unless it is told otherwise: batches that are handed over are written "
        "to a file, and it is slower",
        "docker run --shm-size=64g (an emptyDir of medium Memory at /dev/shm in Kubernetes)",
    ),
    "running.4bit": MeaningOfLines(
        "time", "info", "4-bit layers compute in float32", "bnb_4bit_compute_dtype is not set: slower than in bf16",
        "bnb_4bit_compute_dtype=torch.bfloat16",
    ),
    "running.no_cache": MeaningOfLines(
        "time", "info", "keys and values are not cached under gradient checkpointing",
        "where the model that is trained also generates, every token computes the whole text again",
        "gradient_checkpointing_disable() around generation, or an engine of its own",
    ),
    "running.sliding": MeaningOfLines(
        "logprobs", "info", "sliding-window attention is not applied by this implementation",
        "texts longer than the window are attended to whole, which an engine that applies the window does not",
        "attn_implementation='flash_attention_2', where the model's config uses its window at all",
    ),
    "running.window": MeaningOfLines(
        "time", "info", "flash attention is not installed, or is too old for windows",
        "another implementation of attention is taken", "pip install flash-attn for this torch",
    ),
    "running.rope": MeaningOfLines(
        "logprobs", "info", "keys of rope_scaling are not known to this version of transformers",
        "as a rule keys for another library, and the scaling itself is applied; else positions beyond the first length "
        "differ from the engine's", "compare rope_scaling with the model's page",
    ),
    "running.flags": MeaningOfLines(
        "rollout_logprobs", "info", "generation flags (temperature, top_p, top_k) are ignored",
        "generation is greedy there, or the flags are of a generation_config that is not used for it",
        "do_sample=True where answers of a group are to differ",
    ),
    "running.defaults": MeaningOfLines(
        "rollout_logprobs", "info", "the engine takes temperature, top_p and top_k from the model's generation_config "
        "where a request does not name them",
        "sampling is then sharper than the trainer's log-probabilities say",
        "name all of them in the request (temperature=1, top_p=1, top_k=-1), or --generation-config vllm",
    ),
    "running.moe": MeaningOfLines(
        "time", "info", "the MoE kernel has no tuned configuration for this GPU", "it is slower than it could be",
        "benchmark_moe.py of vLLM (or SGLang) tunes one",
    ),
    "running.all_reduce": MeaningOfLines(
        "time", "info", "custom all-reduce is off: the GPUs do not reach each other's memory",
        "tensor parallelism is slower over PCIe", "nvidia-smi topo -m; fewer GPUs per engine",
    ),
    "running.tracker": MeaningOfLines(
        "time", "info", "Weights & Biases leaves out metrics whose step is smaller than the last one",
        "two processes or places log with counters of their own: what is seen there is not whole",
        "wandb.define_metric with a step of its own; one place that counts",
    ),
    "running.kernel": MeaningOfLines(
        "time", "info", "the node's kernel is older than 5.5, with which a process may hang",
        "known of multi-GPU jobs at their start", "another node; a newer kernel, if it hangs",
    ),
    "running.dropout": MeaningOfLines(
        "time", "info", "an adapter with dropout takes a slower way", "fast patches are made for dropout 0",
        "lora_dropout=0",
    ),
}  # fmt: skip
