"""Lines of a log that say that a run trains on something else than its user thinks, or otherwise: one table by key.

    key_of("Parameter model.layers.0.mlp.w13 not found in params_dict")   # "weights.skipped"

What comes before the first dot is of what the line tells: weights, samples, rewards, running. What each means is for
the reader of the run to say (`diagnose/told_texts.py`). Texts were read in the sources of verl, TRL, prime-rl,
OpenRLHF, slime, miles, AReaL, open-instruct, NeMo-RL, SkyRL, ROLL, rllm, verifiers, vLLM, SGLang, transformers, PEFT,
accelerate, DeepSpeed, unsloth,
Megatron-LM, bitsandbytes, Ray, wandb, ms-swift and LLaMA-Factory.
"""

from __future__ import annotations

from functools import lru_cache

from replay_core.regexes import regex

#: What a reward's own time limits and refusals say is told elsewhere (`log_events`).
_NOT_IN_TIME = (
    r"^(?!.*(?:reward|compute_score|sandbox|verif(?:y|ier)|judge|code execution)\b.{0,80}(?:timed[ -]?out"
    r"|time-?outs? (?:on|after|for|in|error)|failed|unreachable|refused))"
)
#: (key, pattern, words that a line must hold one of): upper or lower case. The first that is found speaks.
LINES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    # Weights: what the trainer begins with, and what reaches the engine.
    ("weights.skipped", r"\bparam(?:eter)? \S{1,300} not found in (?:params_dict|shared model replica)"
     r"|tensor:\[.{1,300}\] not in state_dict, skip", ("params_dict", "shared model replica", "not in state_dict")),
    ("weights.not_sent", r"skip(?:s|ped|ping)? (?:the |this )?(?:actor-to-\w+ )?weights? (?:update|sync\w*)"
     r"|no tensors were collected for (?:\w+ )?(?:weight )?update",
     ("weight update", "weights update", "weight sync", "weights sync", "no tensors were collected")),
    ("weights.old_cache", r"failed to (?:reset|flush) (?:the )?(?:prefix|kv|radix)[ _-]?cache"
     r"|kv cache invalidation not supported|failed to invalidate .{0,40}\bcaches?\b"
     r"|failed to flush cache after maximum attempts",
     ("failed to reset", "failed to flush", "cache invalidation", "failed to invalidate")),
    ("weights.version", r"failed to set version on", ("failed to set version",)),
    ("weights.verified", r"delta[-_]verify\b.{0,200}\bmismatch(?:_elems|es)=[1-9]", ("delta-verify", "delta_verify")),
    ("weights.nan", r"detected errors during sampling! nan in the logits", ("nan in the logits",)),
    ("weights.frozen", r"skipping .{0,40}\boptimizer\b.{0,40}\binitiali[sz]ation because", ("initialization because",)),
    ("weights.draft", r"\bdrafter is not being weight-synced|received draft weights but .{0,60}unavailable",
     ("weight-synced", "received draft weights")),
    ("weights.adapter_part", r"only supports adding lora to language model.{0,300}\bignored"
     r"|does not support lora on .{1,80}\bskipped", ("adding lora to", "not support lora")),
    ("weights.adapter_lost", r"lora alpha metadata is missing or equals 0|no lora weights were matched"
     r"|merge incomplete: the expert-merge", ("lora alpha metadata", "no lora weights were", "merge incomplete")),
    ("weights.new_tokens", r"added new tokens .{0,80}not in peft's `?modules_to_save", ("modules_to_save",)),
    ("weights.attention", r"\(dsa\) detected\b.{0,200}\btrain attention is dense", ("attention is dense",)),
    ("weights.bf16", r"silent loss plateau", ("loss plateau",)),
    ("weights.reference", r"falling back to using base reference", ("base reference",)),
    ("weights.value_head", r"will reinitiali[sz]e critic \S+ after checkpoint load", ("reinitialize critic",)),
    ("weights.other_model", r"\buses model_path=.{1,300}\bdiffers from hf_checkpoint", ("differs from",)),
    ("weights.routing", r"forced? balanced[ _]routing", ("balanced routing", "balanced_routing")),
    ("weights.adapter", r"(?:found )?missing adapter keys while loading", ("missing adapter keys",)),
    ("weights.missing", r"missing keys when loading|there were missing keys in the checkpoint", ("missing keys",)),
    ("weights.unused", r"weights of the model checkpoint at \S{1,300} were not used when initiali[sz]ing",
     ("were not used when",)),
    ("weights.random", r"\brandomly initiali[sz](?:ing|ed)? (?:the )?(?:model|weights)|skipping loading weights from"
     r"|will start from random|(?:starts?|starting|training) (?:the model )?from random(?:ly)?(?: \w+)? "
     r"?(?:weights|initiali[sz])",
     ("randomly initiali", "skipping loading weights", "from random")),
    ("weights.task_type", r"`?task_type`? that is different than `?(?:seq|token)_cls",
     ("seq_cls", "token_cls")),
    ("weights.offloaded", r"parameters are on the meta device because they were offloaded", ("on the meta device",)),
    ("weights.tied", r"tie_word_embeddings=true\b.{0,80}\bpart of the adapter", ("tie_word_embeddings",)),
    ("weights.rounded", r"merge lora module to \d-bit linear", ("merge lora module",)),
    # A resume that finds nothing.
    ("resume.anew", r"no (?:valid )?checkpoints? (?:was |were )?found (?:at|in|under) .{1,300}(?:scratch|skipping)"
     r"|skipping loading checkpoint|skipping checkpoint loading|unable to find latest file at"
     r"|could not find the metadata file \S*latest_checkpointed"
     r"|provided checkpoint load path: \S{1,300} does not exist|(?:resume|recover) info not found at"
     r"|output directory exists but no checkpoint found|empty model state dict loaded from"
     r"|--load \S{1,300} is empty; starting from|no model weights found in \S{1,300} skipping",
     ("no checkpoint", "no valid checkpoint", "skipping loading checkpoint", "skipping checkpoint", "latest file at",
      "metadata file", "checkpoint load path", "info not found at", "is empty; starting", "empty model state",
      "no model weights found")),
    # Samples: what is left out, cut, or is not what was sampled.
    ("samples.number", r"^\W*(?:\w+ ){0,2}dataset len(?:gth)?: ?\d+\s*$|dataset filtered, origin length: \d+",
     ("dataset len", "dataset filtered")),
    ("samples.data_anew", r"no dataloader state found at|failed to (?:load|restore) dataloader state"
     r"|dataset swap detected\b|dataloader state file not found|loading dataset state failed"
     r"|checkpoint has no generator_state",
     ("dataloader state", "dataset swap", "dataset state failed", "no generator_state")),
    ("samples.buffer", r"no replay buffer checkpoint found|skipping the buffer restore",
     ("replay buffer checkpoint", "buffer restore")),
    ("samples.queue", r"queue (?:is )?full,? .{0,20}drop"
     r"|drop(?:ped|ping) (?:a |the )?sample\b.{0,40}queue (?:is )?full",
     ("queue full", "queue is full")),
    ("samples.retokenized", r"inconsistent training and inference tokeni[sz]ation|\btito fell back to mito"
     r"|may violate token-in-token-out|prefix mismatch \(occurrence \d+|history fork detected: matched",
     ("inference tokeni", "fell back to mito", "token-in-token-out", "prefix mismatch (", "history fork")),
    ("samples.data_error", r"error processing one of the samples|errors? in the template\.encode",
     ("one of the samples", "template.encode")),
    ("samples.few_trainable", r"only \d+/\d+ (?:\w+ ){0,2}(?:traces|samples|rollouts|groups|episodes) are trainable",
     ("are trainable",)),
    ("samples.cancelled", r"cancell?ed \d+ (?:\w+ )?(?:episodes?|rollouts?|traces?|requests?) (?:past|beyond|older "
     r"than)",
     ("cancelled ", "canceled ")),
    ("samples.failed", r"trace failed in group|trajectory will be rejected|error generating response for sample"
     r"|rollout failed permanently|trajectory \S{1,200} failed \(stop_reason|hit hard verifier failure"
     r"|dropping prompt idx=\S{1,40} after \d+ .{0,30}failure|skipping prompt idx=\S{1,40} after \d+ .{0,30}failure"
     r"|fully-async task crashed|\b(?:harness )?rollout failed(?: permanently)?[:;] ?\S|aborted rollout due to"
     r"|retries exhausted for \S{1,80} after|asynchronous task execution error"
     r"|sandbox (?:oom|timeout) during background job|environment step failed\b|agent function failed:"
     r"|agent server call (?:failed|timed out)|task circuit breaker|error in _run_prompt for"
     r"|refilling all-placeholder group",
     ("trace failed", "will be rejected", "error generating response", "failed permanently", "failed (stop_reason",
      "verifier failure", "prompt idx=", "task crashed", "rollout failed", "aborted rollout", "retries exhausted",
      "task execution error", "during background job", "environment step failed", "agent function failed",
      "agent server call", "circuit breaker", "in _run_prompt", "all-placeholder group")),
    ("samples.group_lost", r"dropping entire group|abandoning group \S+ \d|dropping group \(\d+/\d+ rollouts have none",
     ("dropping entire group", "abandoning group", "dropping group (")),
    ("samples.tool_call", r"failed to (?:decode|parse) (?:[\w-]+ ){0,2}tool[- ]calls?\b|tool call parsing error"
     r"|invalid tool call arguments|tool-call arguments are not valid",
     ("tool call", "tool-call")),
    ("samples.turns", r"exceeded max_turns\w*=\d+|prompt exceeds max_context_tokens|context_window_exceeded\b",
     ("exceeded max_turns", "max_context_tokens", "context_window_exceeded")),
    ("samples.empty_batch", r"\bempty train(?:ing)? batch\b.{0,60}\bafter \d+|no trainable responses after"
     r"|all prompts were filtered during|skipping empty rollout batch",
     ("empty train", "no trainable responses", "all prompts were filtered", 
      "empty rollout batch")),
    ("samples.low_spread", r"most training samples receive low variance|consecutive degenerate steps: \d",
     ("low variance rewards", "degenerate steps")),
    ("samples.no_gradient", r"applying step with zero gradients", ("zero gradients",)),
    ("samples.empty_output", r"\bempty output for prompt\b", ("empty output for",)),
    ("samples.no_logprobs", r"no logprobs returned .{0,20}filling with zeros"
     r"|clamped \d+/\d+ missing or non-finite sampled logprobs|valid tokens have -inf in \S*logprobs"
     r"|output_token_logprobs length \(\d+\) != ",
     ("filling with zeros", "non-finite sampled", "tokens have -inf", "output_token_logprobs length")),
    ("samples.gap_masked", r"\bmasked \d+ sequences with mult_prob_error", ("mult_prob_error >",)),
    ("samples.no_version", r"trajectory missing 'versions' field", ("missing 'versions'",)),
    ("samples.too_stale", r"staleness control violated", ("staleness control",)),
    ("samples.routes", r"router replay fallback", ("router replay fallback",)),
    ("samples.not_own", r"on-policy mode triggered but .{1,60}falling back to dataset responses",
     ("back to dataset responses",)),
    ("samples.too_long", r"dropp(?:ed|ing) a rollout sample of \d+ tokens|dropped lengthy example",
     ("dropping a rollout", "dropped a rollout", "dropped lengthy")),
    ("samples.invalid", r"dropped invalid example", ("dropped invalid",)),
    ("samples.untrained", r"because no trainable tokens were found|supervised tokens fall entirely beyond"
     r"|empty loss window, no loss tokens|could not find (?:response|instruction) key\b"
     r"|no traces found .{0,40}without token data",
     ("no trainable tokens", "supervised tokens fall", "empty loss window", "find response key",
      "find instruction key", "no traces found")),
    ("samples.off_by_one", r"mismatch between tokeni[sz]ed prompt and the start of", ("mismatch between token",)),
    ("samples.images", r"multimodal token mismatch before training"
     r"|only \d+/\d+ (?:images?|videos?|audios?) (?:were )?loaded",
     (" loaded success", "images loaded", "multimodal token mismatch")),
    ("samples.cut_prompt", r"prompt length \(\d+\) exceeds max_prompt_length.{0,40}truncat"
     r"|prompt of \d+ tokens exceeds .{1,60}left-truncating|initial observation length \(\d+\) exceeds"
     r"|longer than the kv cache pool size or the max context length\. truncated|we shall truncate it ourselves",
     ("exceeds max_prompt", "left-truncating", "initial observation length", "cache pool size or",
      "truncate it ourselves")),
    ("samples.no_room", r"decreasing max_(?:new_)?tokens to \d+", ("decreasing max_",)),
    ("samples.leftover", r"\b\d+ samples are dropped due to batch size"
     r"|evenly divisible by dp_world_size .{0,80}\(dropping \d+\)", ("dropped due to batch", "divisible by dp_world")),
    ("samples.stale", r"dropping stale (?:result|sample|rollout)|\b(?:evicted|evicting|removing) \d+ stale\b",
     ("dropping stale", "evicted ", "evicting ", "removing ")),
    ("samples.masked", r"(?<!not )\ball (?:outputs|responses|samples) are loss[ -]masked|response mask is all false"
     r"|response_mask is all false|attention_mask is all zero|only \d+ valid response token\(s\) remain",
     ("are loss masked", "are loss-masked", "mask is all false", "mask is all zero", "valid response token(s)")),
    ("samples.all_cut", r"all completions are truncated in this batch", ("all completions are truncated",)),
    ("samples.all_aborted", r"all samples are aborted, returning", ("samples are aborted",)),
    ("samples.aborted", r"\baborted request \S", ("aborted request",)),
    ("samples.group_of_one", r"reduces grpo to reinforce|singleton group centering erases"
     r"|cannot compute loo advantage using 1 sample|rloo requires multiple samples for baseline",
     ("reduces grpo", "singleton group", "loo advantage using", "multiple samples for baseline")),
    ("samples.alone", r"only one response for prompt index .{1,80}advantage to 0", ("one response for prompt",)),
    ("samples.pad_is_end", r"pad(?:ding)? token is (?:the )?same as (?:the )?eos token"
     r"|pad token id in the tokenizer collides with another", ("same as eos", "same as the eos", "tokenizer collides")),
    ("samples.end_masked", r"does not include the assistant turn's end-of-turn token in the loss mask",
     ("end-of-turn token",)),
    ("samples.packed", r"packing, but the attention implementation is not set to a supported"
     r"|padding-free training is enabled, but the attention implementation is not",
     ("but the attention implementation",)),
    ("samples.tools", r"no stop sequences .{1,4}tool calls will never be detected", ("never be detected",)),
    ("samples.regex", r"from .{0,200}(?:mistral|ministral|devstral|magistral|pixtral|voxtral).{0,100}with an incorrect "
     r"regex pattern", ("incorrect regex",)),
    ("samples.regex_said", r"with an incorrect regex pattern", ("incorrect regex",)),
    # Rewards that are none.
    ("rewards.none", r"all reward functions returned none|all interactions will have none reward"
     r"|reward function returned nan", ("returned none", "have none reward", "function returned nan")),
    ("rewards.service", r"\bremote_rm failed after \d+ attempts?|remote task failed .{0,80}assigning reward ?= ?0",
     ("remote_rm failed", "assigning reward")),
    ("rewards.no_truth", r"ground[ _]truth (?:answer )?(?:is )?missing",
     ("answer missing", "answer is missing", "truth missing", "truth is missing")),
    ("rewards.no_function", r"no reward function found for (?:dataset|data_source)", ("no reward function",)),
    ("rewards.no_column", r"no ground[_ ]truth (?:field|column) in dataset", ("no ground_truth", "no ground truth")),
    ("rewards.zeroed", _NOT_IN_TIME + r".*(?:\b(?:assigning|setting|set) (?:the )?(?:final )?(?:reward|score)s? "
     r"(?:to|as|=)? ?0(?:\.0+)?\b|\bsetting all as 0\b|; ?reward ?= ?0\b|\bdefaulting to 0(?:\.0+)?\b"
     r"|treating as incorrect\b|marking sample as invalid|\bterminating with reward 0\b"
     r"|\b(?:reward|score)s? (?:is |are |was |were )?(?:set|defaulted|fell back|falls back) to "
     r"(?:0(?:\.0+)?|zero)(?![.\d]*\d)"
     r"|\b(?:return(?:ing|ed)?|us(?:ing|es?)|assign(?:ing|ed)|fall(?:ing)? back to"
     r"|scor(?:ing|ed) (?:it |them )?(?:as )?)"
     r"\s?(?:a )?(?:(?:reward|score)s? (?:of |= ?)?(?:0(?:\.0+)?|zero)(?![.\d]*\d)"
     r"|(?:0(?:\.0+)?|zero) (?:reward|score)\b))",
     ("reward to 0", "reward as 0", "reward 0", "score to 0", "score as 0", "setting all as 0", "reward=0",
      "defaulting to 0", "treating as incorrect", "sample as invalid", "set to 0", "set to zero", "defaulted to 0",
      "back to 0", "reward of 0", "score of 0", "0 reward", "0.0 reward", "zero reward", "0 score", "0.0 score",
      "zero score", "reward = 0", "reward 0", "score 0")),
    ("rewards.raised", _NOT_IN_TIME + r".*(?:\berror (?:in|during|calling|computing|when calling|verifying|scoring"
     r"|in calling|processing) (?:\w+ )?(?:\w*reward\w*|\w*compute_score|scoring|rubric|code sample|llm judge|judge\w*"
     r"|model response)\b|\bexception in \w*(?:reward|score|verif|judge)\w*\b|\bllm judge error:"
     r"|exceeded when calling judge|\bfailed to get reward from|could not (?:parse|extract) score from"
     r"|timeout or error during \w*verify)",
     ("error in ", "error during ", "error calling ", "error computing ", "error when calling", "error verifying",
      "error scoring", "error processing model", "exception in ", "judge error:", "when calling judge",
      "failed to get reward", "score from", "error during hf_verify")),
    ("rewards.clipped", r"rewards are outside the configured source range", ("configured source range",)),
    ("rewards.cut", r"truncated message content to fit judge|cannot fit request within context window",
     ("to fit judge", "cannot fit request")),
    # How it is run: engines that are gone, and what is slower or otherwise than it could be.
    ("running.engine", r"health check failed for (?:\w+ ){0,2}engine ?#?\d{1,4}\b", ("health check failed",)),
    ("running.detokenizer", r"server couldn't get a response from detokenizer", ("response from detokenizer",)),
    ("running.no_workers", r"no available workers \(all circuits open", ("no available workers",)),
    ("running.stall", r"\brollout stall -- |\bdetected [1-9]\d* hung envs", ("rollout stall", " hung envs")),
    ("running.mount", r"\bnfs: server \S{1,200} not responding\b|\bthis client was evicted by\b",
     ("nfs: server", "client was evicted")),
    ("running.stacks", r"\btimeout \(\d+:\d\d:\d\d\)!|\btask \S{1,80} blocked for more than \d+ seconds",
     ("timeout (", "blocked for more than")),
    ("running.shorter_engine", r"max_total_sequence_length \(\d+\) is greater than the generation engine's",
     ("than the generation engine",)),
    ("running.not_corrected", r"rejection_sampling is configured but .{1,60}will be ignored"
     r"|skipping train-infer correction:", ("rejection_sampling is configured", "train-infer correction")),
    ("running.other_loss", r"loss failed .{1,6}falling back to", ("loss failed",)),
    ("running.rerun", r"\bunexpected result \S{1,40} on rank \d+ at iteration", ("unexpected result",)),
    ("running.draft_low", r"specdecoding metrics: mean acceptance length: 1\.(?:0\d|1[0-4])\b",
     ("specdecoding metrics",)),
    ("running.entropy", r"entropy is non-differentiable and will not contribute", ("entropy is non-diff",)),
    ("running.half", r"\bcasting torch\.bfloat16 to torch\.float16\b", ("casting torch.bfloat16",)),
    ("running.kv_small", r"kv_cache_max_concurrency \(\d+\) is lower than", ("kv_cache_max_concurrency (",)),
    ("running.random_state", r"didn't find an rng file|rng state not found for",
     ("an rng file", "rng state not found")),
    ("running.arguments", r"arguments do not match the ones in the `?trainer_state", ("`trainer_state",)),
    ("running.no_broadcast", r"trainer did not broadcast v\d", ("did not broadcast",)),
    ("running.on_cpu", r"triton is not supported on current platform", ("triton is not supported",)),
    ("running.slow_path", r"the fast path is not available because", ("fast path is not",)),
    ("running.object_store", r"object store is using /\S+ instead of /dev/shm", ("object store is using",)),
    ("running.4bit", r"bnb_4bit_compute_dtype=torch\.float32", ("bnb_4bit_compute",)),
    ("running.no_cache", r"caching is incompatible with gradient checkpointing", ("caching is incompatible",)),
    ("running.sliding", r"sliding window attention is enabled but not implemented", ("sliding window attention",)),
    ("running.window", r"flash-attention` (?:package not found|does not support `window_size)", ("flash-attention`",)),
    ("running.rope", r"unrecogni[sz]ed keys in `rope_scaling", ("`rope_scaling",)),
    ("running.flags", r"generation flags are not valid and may be ignored", ("generation flags",)),
    ("running.defaults", r"default sampling parameters have been overridden", ("default sampling parameters",)),
    ("running.moe", r"using default moe config", ("default moe config",)),
    ("running.all_reduce", r"custom all-?reduce is disabled", ("custom allreduce is", "custom all-reduce is")),
    ("running.tracker", r"tried to log to step \d+ that is less than the current step", ("tried to log to step",)),
    ("running.kernel", r"detected kernel version \S+ which is below the recommended minimum", ("detected kernel",)),
    ("running.dropout", r"dropout = 0 is supported for fast patching", ("dropout = 0",)),
)  # fmt: skip
#: What a line tells of, as kinds of events.
KINDS = tuple(dict.fromkeys(f"told_{key.partition('.')[0]}" for key, *_ in LINES))
_WORDS = tuple(dict.fromkeys(word for *_, words in LINES for word in words))
_COMPILED = tuple((key, regex(pattern), words) for key, pattern, words in LINES)
#: Characters of a line that are looked at.
_FIRST = 1200


def may_tell(text: str) -> bool:
    """A cheap look: most lines of a log hold none of these words."""
    lower = text[:_FIRST].lower()
    return any(word in lower for word in _WORDS)


@lru_cache(maxsize=1024)
def key_of(text: str) -> str | None:
    """What a line tells, by the key of the table; None of most."""
    lower = text[:_FIRST].lower()
    return next(
        (key for key, pattern, words in _COMPILED if any(word in lower for word in words) and pattern.search(lower)),
        None,
    )


def kind_of(text: str) -> str | None:
    """The kind of event that it is."""
    key = key_of(text)
    return None if key is None else f"told_{key.partition('.')[0]}"
