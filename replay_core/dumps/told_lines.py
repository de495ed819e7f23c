"""Lines of a log that say that a run trains on something else than its user thinks, or otherwise: one table by key.

    key_of("Parameter model.layers.0.mlp.w13 not found in params_dict")   # "weights.skipped"

What comes before the first dot is of what the line tells: weights, samples, rewards, running. What each means is for
the reader of the run to say (`diagnose/told_texts.py`). Texts were read in the sources of verl, TRL, prime-rl,
OpenRLHF, slime, AReaL, open-instruct, NeMo-RL, SkyRL, rllm, vLLM, SGLang, transformers, PEFT, accelerate, DeepSpeed,
Megatron-LM, bitsandbytes, Ray, wandb, ms-swift and LLaMA-Factory.
"""

from __future__ import annotations

from functools import lru_cache

from replay_core.regexes import regex

#: (key, pattern, words that a line must hold one of): upper or lower case. The first that is found speaks.
LINES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    # Weights: what the trainer begins with, and what reaches the engine.
    ("weights.skipped", r"\bparam(?:eter)? \S{1,300} not found in params_dict", ("params_dict",)),
    ("weights.not_sent", r"skip(?:s|ped|ping)? (?:the |this )?weights? (?:update|sync\w*)",
     ("weight update", "weights update", "weight sync", "weights sync")),
    ("weights.old_cache", r"failed to (?:reset|flush) (?:the )?(?:prefix|kv|radix)[ _-]?cache",
     ("failed to reset", "failed to flush")),
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
    ("weights.task_type", r"`?task_type`? that is different than `?seq_cls", ("seq_cls",)),
    ("weights.offloaded", r"parameters are on the meta device because they were offloaded", ("on the meta device",)),
    ("weights.tied", r"tie_word_embeddings=true\b.{0,80}\bpart of the adapter", ("tie_word_embeddings",)),
    ("weights.rounded", r"merge lora module to \d-bit linear", ("merge lora module",)),
    # A resume that finds nothing.
    ("resume.anew", r"no (?:valid )?checkpoints? (?:was |were )?found (?:at|in|under) .{1,300}(?:scratch|skipping)"
     r"|skipping loading checkpoint|skipping checkpoint loading|unable to find latest file at"
     r"|could not find the metadata file \S*latest_checkpointed"
     r"|provided checkpoint load path: \S{1,300} does not exist",
     ("no checkpoint", "no valid checkpoint", "skipping loading checkpoint", "skipping checkpoint", "latest file at",
      "metadata file", "checkpoint load path")),
    # Samples: what is left out, cut, or is not what was sampled.
    ("samples.number", r"^\W*(?:\w+ ){0,2}dataset len(?:gth)?: ?\d+\s*$|dataset filtered, origin length: \d+",
     ("dataset len", "dataset filtered")),
    ("samples.queue", r"queue (?:is )?full,? .{0,20}drop"
     r"|drop(?:ped|ping) (?:a |the )?sample\b.{0,40}queue (?:is )?full",
     ("queue full", "queue is full")),
    ("samples.retokenized", r"inconsistent training and inference tokeni[sz]ation", ("inference tokeni",)),
    ("samples.data_error", r"error processing one of the samples|errors? in the template\.encode",
     ("one of the samples", "template.encode")),
    ("samples.few_trainable", r"only \d+/\d+ (?:\w+ ){0,2}(?:traces|samples|rollouts|groups|episodes) are trainable",
     ("are trainable",)),
    ("samples.cancelled", r"cancell?ed \d+ (?:\w+ )?(?:episodes?|rollouts?|traces?|requests?) (?:past|beyond|older "
     r"than)",
     ("cancelled ", "canceled ")),
    ("samples.failed", r"trace failed in group|trajectory will be rejected|error generating response for sample"
     r"|rollout failed permanently",
     ("trace failed", "will be rejected", "error generating response", "failed permanently")),
    ("samples.empty_batch", r"\bempty train(?:ing)? batch\b.{0,60}\bafter \d+", ("empty train",)),
    ("samples.too_long", r"dropp(?:ed|ing) a rollout sample of \d+ tokens|dropped lengthy example",
     ("dropping a rollout", "dropped a rollout", "dropped lengthy")),
    ("samples.invalid", r"dropped invalid example", ("dropped invalid",)),
    ("samples.untrained", r"because no trainable tokens were found|could not find (?:response|instruction) key\b"
     r"|no traces found .{0,40}without token data",
     ("no trainable tokens", "find response key", "find instruction key", "no traces found")),
    ("samples.off_by_one", r"mismatch between tokeni[sz]ed prompt and the start of", ("mismatch between token",)),
    ("samples.images", r"only \d+/\d+ (?:images?|videos?|audios?) (?:were )?loaded",
     (" loaded success", "images loaded")),
    ("samples.cut_prompt", r"prompt length \(\d+\) exceeds max_prompt_length.{0,40}truncat", ("exceeds max_prompt",)),
    ("samples.no_room", r"decreasing max_(?:new_)?tokens to \d+", ("decreasing max_",)),
    ("samples.leftover", r"\b\d+ samples are dropped due to batch size", ("dropped due to batch",)),
    ("samples.stale", r"dropping stale (?:result|sample|rollout)", ("dropping stale",)),
    ("samples.masked", r"(?<!not )\ball (?:outputs|responses|samples) are loss[ -]masked",
     ("are loss masked", "are loss-masked")),
    ("samples.aborted", r"\baborted request \S", ("aborted request",)),
    ("samples.group_of_one", r"reduces grpo to reinforce", ("reduces grpo",)),
    ("samples.pad_is_end", r"pad(?:ding)? token is (?:the )?same as (?:the )?eos token",
     ("same as eos", "same as the eos")),
    ("samples.regex", r"from .{0,200}(?:mistral|ministral|devstral|magistral|pixtral|voxtral).{0,100}with an incorrect "
     r"regex pattern", ("incorrect regex",)),
    ("samples.regex_said", r"with an incorrect regex pattern", ("incorrect regex",)),
    # Rewards that are none.
    ("rewards.none", r"all reward functions returned none", ("returned none",)),
    ("rewards.service", r"\bremote_rm failed after \d+ attempts?|remote task failed .{0,80}assigning reward ?= ?0",
     ("remote_rm failed", "assigning reward")),
    ("rewards.no_truth", r"ground[ _]truth (?:answer )?(?:is )?missing",
     ("answer missing", "answer is missing", "truth missing", "truth is missing")),
    ("rewards.no_function", r"no reward function found for (?:dataset|data_source)", ("no reward function",)),
    ("rewards.cut", r"truncated message content to fit judge", ("to fit judge",)),
    # How it is run: engines that are gone, and what is slower or otherwise than it could be.
    ("running.engine", r"health check failed for (?:\w+ ){0,2}engine ?#?\d{1,4}\b", ("health check failed",)),
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
_COMPILED = tuple((key, regex(pattern)) for key, pattern, _ in LINES)
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
    return next((key for key, pattern in _COMPILED if pattern.search(lower)), None)


def kind_of(text: str) -> str | None:
    """The kind of event that it is."""
    key = key_of(text)
    return None if key is None else f"told_{key.partition('.')[0]}"
