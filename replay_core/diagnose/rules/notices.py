"""Warnings of the stack that a run goes on after, and what each means for it: one table."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from replay_core.diagnose import trends
from replay_core.diagnose.failed_scores import LOSES, FailedScores, Outage, count_of, failed_scores, outage
from replay_core.diagnose.failure_texts import Failure, failure_of, in_short
from replay_core.diagnose.finding import SEVERITIES, Finding, finding, shown, warning
from replay_core.diagnose.log_steps import first_broken, scale_falls, steps_of, steps_told
from replay_core.diagnose.rule import given, rule
from replay_core.diagnose.signals import RunLog, Told
from replay_core.dumps.log_events import DEATHS, THROWN_AWAY, UNTOLD, UPDATE_FAILED, VERDICT
from replay_core.regexes import regex

if TYPE_CHECKING:
    from replay_core.documents.diagnosis import Severity


class _Notice(Struct, frozen=True):
    """What a warning means. `fewest`: lines of it before it is more than worth knowing."""

    pattern: re.Pattern[str]
    severity: Severity
    link: str
    claim: str
    cause: str
    next_step: str
    fewest: int = 1
    share: re.Pattern[str] | None = None
    """A number and of how many: a line counts from half of them on."""

    def is_told_by(self, text: str) -> bool:
        if self.share is None or not self.pattern.search(text):
            return self.pattern.search(text) is not None
        found = self.share.search(text)
        return found is not None and 0 < int(found["all"]) <= 2 * int(found["part"])


_TABLE: tuple[_Notice, ...] = (
    _Notice(
        regex(UPDATE_FAILED + "|partially updated"),
        "error", "rollout_logprobs",
        "a weight update of the engine failed: from here on it samples with old or partly updated weights",
        "a tensor that is sent does not fit what the engine holds (a shape or slice out of range, a name, the part of "
        "an expert or of a tensor-parallel rank), or the transfer broke; the request may be answered with 200 all "
        "the same",
        "compare the engine's tensor and expert parallelism with what the trainer sends; stop the run where an update "
        "is not confirmed; rldbg record -- YOUR COMMAND shows the mismatch that follows",
    ),
    _Notice(
        regex(r"is preempted by PreemptionMode|Preempting request|Retract requests|pool is full\. Retract"),
        "warning", "time", "the engine preempts requests: its KV cache is too small for what it runs at once",
        "more or longer sequences than the KV cache holds: what was computed of a preempted one is thrown away and "
        "computed again, and generation is slow",
        "raise gpu_memory_utilization (--mem-fraction-static) or tensor parallelism; lower max_num_seqs "
        "(--max-running-requests) or the response length",
    ),
    _Notice(
        regex(r"HTTP/[12]\.\d\"? 5\d\d\b"), "warning", "time",
        "requests are answered by an error of the server (HTTP 5xx): those responses are lost or asked for again",
        "the rollout engine (or judge) fails on a request: a prompt beyond its context, a worker that died, a full KV "
        "cache, a bug in its handler; its own log at that time holds the traceback",
        "the server's log at that time; send it one of those requests by hand; count how many samples are left out",
        fewest=3,
    ),
    _Notice(
        regex(r"!{40}"), "error", "logprobs",
        "responses are a run of one character, '!': token 0, which is what sampling from NaN logits gives",
        "the policy's weights (or the engine's copy) are not finite since an update with a NaN gradient or a broken "
        "synchronisation, or its forward overflows (fp16, a fused kernel)",
        "the first step whose grad_norm, KL or loss is not finite; skip such updates; rldbg weights compares the "
        "engine's weights with the checkpoint's", fewest=2,
    ),
    _Notice(
        regex(r"KV cache usage: (?:9[7-9]|100)\.\d%|token usage: (?:0\.9[7-9]|1\.0)"), "warning", "time",
        "the engine's KV cache is full: requests wait for room in it",
        "more or longer sequences than the KV cache holds at once",
        "raise gpu_memory_utilization or tensor parallelism; lower the response length", fewest=5,
    ),
    _Notice(
        regex("(?i)" + VERDICT), "warning", "trend",
        "the script's own verdict of its run is that it does not learn",
        "the script compared its rewards or losses of the beginning and the end; with few points that may be noise, "
        "and the same looks as a learning rate too high or too low, groups whose rewards are equal, and a task that "
        "the model hardly ever solves",
        "look at the reward's line from step to step, at what parts of it fall (calls, format, answers), and at KL and "
        "gradient norm beside it; rldbg record -- YOUR COMMAND",
    ),
    _Notice(
        regex(r"right-padding was detected"), "warning", "tokens",
        "responses are generated behind padding on the right: a decoder goes on from pad tokens",
        "the tokenizer pads on the right, and the first token of each shorter prompt's response follows padding",
        "padding_side='left' for generation",
    ),
    _Notice(
        regex(r"None of the inputs have requires_grad"), "warning", "gradient",
        "gradients do not reach the checkpointed layers: none of their inputs needs one",
        "reentrant gradient checkpointing over frozen embeddings (LoRA): nothing below is trained",
        "model.enable_input_require_grads(), or gradient_checkpointing_kwargs={'use_reentrant': False}",
    ),
    _Notice(
        regex(r"trainable params: 0 "), "error", "optimizer", "no parameter is trained: trainable params: 0",
        "every weight is frozen: the adapter's target modules match nothing, or it was loaded for inference",
        "is_trainable=True; print the names whose requires_grad is set",
    ),
    _Notice(
        # PEFT says it of what merge_and_unload has left, too, where nothing is wrong.
        regex(r"Already found a `peft_config`"), "info", "optimizer",
        "the model has an adapter already, or had one, and gets another",
        "merge_and_unload() leaves the attribute behind, and nothing is wrong then; or a model with an adapter is "
        "handed to a trainer that adds its own: which one is trained and which is the reference is not what it seems",
        "print model.peft_config and the trainable parameters; merge_and_unload() the first, or pass no peft_config",
    ),
    _Notice(
        regex(r"(?i)(?:could not|couldn't|unable to|failed to|cannot|can't) (?:load|find|restore)(?: \w+){0,2} "
              r"optimi[sz]er|optimi[sz]er(?:[ _]states?)? (?:\w+ )?(?:not (?:loaded|found|restored)|missing|starts? "
              r"from scratch)"), "warning", "optimizer",
        "the run goes on with a fresh optimizer: its state was not loaded",
        "the checkpoint does not hold the optimizer (saved without it, an interrupted save, other names or another "
        "number of ranks): Adam's moments begin at 0, so that the first updates are as large as the learning rate "
        "allows, and a schedule that lies in it begins anew",
        "look for optimizer files in the checkpoint; save it with the optimizer, or warm the learning rate up again",
    ),
    _Notice(
        regex(r"newly initialized"), "warning", "logprobs",
        "weights of the model are not in the checkpoint and were newly initialized",
        "names or the architecture do not fit, so that layers begin at random; of a value head or a classifier's score "
        "alone it is meant, if that is what is trained, and wrong for a reward model that is to judge",
        "compare the names it lists with the checkpoint's: rldbg show CHECKPOINT",
    ),
    _Notice(
        regex(r"to instantiate a model of type"), "warning", "logprobs",
        "a checkpoint of one architecture is loaded into another's model",
        "the class does not fit the checkpoint's model_type", "AutoModelForCausalLM, or the class of its config.json",
    ),
    _Notice(
        regex(r"[Tt]okenization mismatch: \d"), "warning", "masks",
        "samples are masked whole: the tokens of a conversation are not as many as its template counts (tokenization "
        "mismatch), so that no label of them is left",
        "the conversation template is another model's than the tokenizer (a version or template name, a begin token "
        "that is added or not, legacy tokenization): where it is so of every sample, loss and gradient are 0",
        "take the template of this model; print one sample's tokens beside its labels", fewest=3,
    ),
    _Notice(
        regex(r"^\w*loss is -?0(?:\.0+)?(?: |$)"), "info", "groups",
        "the loss is exactly 0 in line after line: those batches or groups teach nothing",
        "no reward differs within the group (all answers wrong, or all right), so that every advantage is 0; with one "
        "update per batch and no KL the loss of a group that does teach is 0 but for rounding, too",
        "log the spread of rewards per group; easier or harder prompts, more responses per prompt",
    ),
    _Notice(
        regex(r"Bad grad_norm detected"), "warning", "gradient",
        "an iteration's gradient norm is NaN or infinite, and its update is left out",
        "an overflow or 0/0 in forward or backward of that batch; its loss is not printed then, and the weights stay",
        "the batch of that iteration; rldbg record --gradients . -- YOUR COMMAND",
    ),
    _Notice(
        regex(r"Cache not flushed because"), "info", "rollout_logprobs",
        "the engine's cache is not flushed for new weights: requests still run while they are updated",
        "some trainers ask again until none runs, and nothing is wrong then; else what is generated on is of two "
        "policies, and of keys and values of old weights", "pause generation, or abort the requests, before the update",
    ),
    _Notice(
        regex(r"waitForInput: .{0,200}timed out after \d"), "warning", "time",
        "a process waited for the others at a socket until its time was over",
        "of two sides of a process group (trainer and engine) one never came", "look which side did not join",
    ),
    _Notice(
        regex(r"Input prompt \(\d+ tokens\) is too long"), "warning", "tokens",
        "prompts are longer than the engine's limit (max_model_len), and are answered by nothing",
        "the engine was started with less context than prompts have: it hands out no token for them, and code that "
        "takes a completion for granted fails, or a reward is given for an empty one",
        "raise max_model_len, or filter or truncate prompts (max_prompt_length)", fewest=3,
    ),
    _Notice(
        regex(r"_IncompatibleKeys\(missing_keys=\['"), "info", "logprobs",
        "a checkpoint is loaded that does not hold all weights of the model (strict=False)",
        "of an adapter's checkpoint it is meant, if every adapter weight is in it; else names do not fit (a wrapper's "
        "prefix) and those weights stay as they were",
        "look whether a weight that was trained is among the missing or unexpected keys",
    ),
    _Notice(
        regex(r"`do_sample` is set to `False`"), "warning", "rollout_logprobs",
        "generation is greedy: do_sample is False, and temperature or top_p count for nothing",
        "all responses of a group are one and the same: no advantage differs from 0", "do_sample=True",
    ),
    _Notice(
        regex(r"sequence length is longer than the specified maximum"), "warning", "tokens",
        "a prompt is longer than the tokenizer's maximum", "it was not truncated: the model sees positions beyond what "
        "it was trained for, or raises", "filter or truncate prompts; compare model_max_length with the model's "
        "config", fewest=20,
    ),
    _Notice(
        regex(r"NaN or Inf found in input tensor"), "warning", "loss",
        "a metric that is logged is NaN or Inf", "a loss, a gradient norm or a spread of rewards is not finite",
        "rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump names the first tensor",
    ),
    _Notice(
        regex(r"(?i)\bloss (?:is|became|==?) ?(?:nan|inf)"), "error", "loss", "the loss is not finite: NaN or Inf",
        "an overflow, a 0/0 or a mask without a token in the forward; weights that are not finite since an earlier "
        "step",
        "rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump names the first tensor",
    ),
    _Notice(
        regex(r"(?i)grad_norm is not finite|Gradient overflow|found (?:nan|inf) in"), "warning", "gradient",
        "gradients are not finite, and the steps are skipped",
        "an overflow or 0/0 in the backward; a guard or a loss scale leaves such steps out: nothing is learnt in them",
        "look for the first NaN: rldbg record --gradients . -- YOUR COMMAND", fewest=3,
    ),
    _Notice(
        regex(r"`lr_scheduler\.step\(\)` before"), "info", "optimizer",
        "the scheduler is stepped before the optimizer: the first rate of the schedule is skipped",
        "the calls are in the wrong order, or the optimizer's first step was skipped (a loss scale)",
        "optimizer.step(), then lr_scheduler.step()",
    ),
    _Notice(
        regex(r"NCCL WARN NET/"), "warning", "time", "NCCL warns of its network", "a link or interface that fails or "
            "is not usable", "NCCL_DEBUG=INFO; ibstat; NCCL_SOCKET_IFNAME=IFACE",
    ),
    _Notice(
        regex(r"OVERFLOW! (?:Rank|Skipping)"), "warning", "gradient",
        "fp16 gradients overflow again and again, and the steps are skipped",
        "the loss scale does not settle: gradients are not finite, or beyond what fp16 holds; a few at the beginning "
        "are how the scale is found", "train in bf16; look for the first NaN", fewest=8,
    ),
    _Notice(
        regex(r"average ratio of batch"), "warning", "ratio",
        "batches are skipped: the mean ratio of policy to old policy is beyond the threshold",
        "the policy leaves its old one within a batch: a learning rate too high, too many epochs, or old "
        "log-probabilities that are another model's or temperature's",
        "look at the ratio of the first mini-batch, which is 1; lower the learning rate",
    ),
    _Notice(
        regex(r"allocator cache flushes"), "warning", "memory",
        "the allocator flushes its cache: GPU memory is nearly full, and such steps take longer",
        "high memory pressure: pieces are given back to the driver and asked for again",
        "a smaller micro-batch; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", fewest=3,
    ),
    _Notice(
        regex(r"\bSpilled \d+ [MG]iB"), "warning", "time", "Ray spills objects to disk: its object store is full",
        "more batches are kept by reference than the store holds: they are written to disk and read back",
        "ray memory names who holds what; raise object_store_memory", fewest=3,
    ),
    _Notice(
        regex(r"over 95% full"), "warning", "time", "the disk is nearly full: Ray will not spill, and checkpoints "
         "will fail",
        "/tmp/ray or the output folder is on a full disk", "df -h; move Ray's _temp_dir; keep fewer checkpoints",
    ),
    _Notice(
        regex(r"process just got forked, after parallelism"), "info", "time",
        "a process was forked after the tokenizer had used its threads: harmless, unless a worker hangs",
        "the tokenizers library switches its threads off in the fork; data workers (datasets.map, a DataLoader) that "
        "stand at 0 % behind this line wait for a lock that no thread of theirs will open",
        "TOKENIZERS_PARALLELISM=false before the first import; num_proc=1 tells whether it is the fork",
    ),
    _Notice(
        # Said of master weights in float32, too, whose forward is under autocast: the start of a sound run.
        regex(r"but the current dt?ype"), "info", "logprobs",
        "flash attention is asked for on a model in float32",
        "the model is loaded without torch_dtype, or as float32 master weights whose forward is under autocast, which "
        "is fine",
        "torch_dtype=torch.bfloat16, where no autocast is in use",
    ),
    _Notice(
        regex(r"zero_advantage=\d"), "info", "groups",
        "half of the rollouts or more have an advantage of 0: they teach nothing",
        "prompts too easy or too hard for this policy: all completions of a group are right, or all are wrong",
        "filter prompts by solve rate, or take harder ones where the reward is near its best",
        share=regex(r"/(?P<all>\d+) rollouts.*zero_advantage=(?P<part>\d+)"),
    ),
    _Notice(
        regex(THROWN_AWAY), "warning", "groups",
        "groups are thrown away and drawn again, as no reward differs in them",
        "all answers to a prompt are wrong, or all are right: prompts too hard or too easy for this policy, groups "
        "too small, "
        "or a reward that does not tell answers apart; what they cost is not in the steps that are counted",
        "compare attempts with useful steps over the run; larger groups, prompts filtered by how often they are solved",
        fewest=20,
    ),
    _Notice(
        regex(r"Can't pickle "), "error", "rewards",
        "a function cannot be pickled for another process: what it was to compute fails, and the run goes on",
        "a reward function loaded from a file of its own (its module is another one in the worker), a lambda or a "
        "local function; a reward that fails so is scored 0 or left out",
        "define it in a module that the workers can import, under the name that it is loaded by",
    ),
    _Notice(
        # A scheduler requeues jobs: what is given out again is named.
        regex(r"^(?=.*(?:[Rr]ollout|[Tt]ask|[Rr]equest|[Ss]ample|[Pp]rompt|[Tt]rajector|[Ee]pisode))(?!.*\b[Jj]ob\b)"
              r".*\b[Rr]equeu(?:ed|ing)\b"), "warning", "time",
        "rollouts are not answered in time and are given out again",
        "an agent, tool or engine is too slow or hangs; what comes late belongs to a batch that is gone",
        "look at the agent's own log; raise its time limit, or limit its turns and tokens", fewest=2,
    ),
    _Notice(
        regex(r"(?i)(?:reward|compute_score|sandbox|verif(?:y|ier)|judge|code execution)\b"
              r"|Timeout during (?:comparison|parsing)"), "warning", "rewards",
        "the reward function fails or times out on responses",
        "a verifier, judge or sandbox that raises, is not reached or is too slow; where that is scored 0, right "
        "answers are punished",
        "count how often, and leave such samples out of the loss; call it by hand on one of them", fewest=2,
    ),
)  # fmt: skip
#: An engine's account of itself with one request running and none waiting, and no prompt that comes in.
_ALONE = regex(r"Avg prompt throughput: 0\.0 tokens/s.*Running: 1 reqs?, (?:Swapped: 0 reqs, )?(?:Pending|Waiting): 0 "
               r"reqs|#running-req: 1,(?!.*#queue-req: [1-9])")  # fmt: skip
_ENGINE = regex(r"Engine (\d+)|\b(?:pid=|DP|TP)(\d+)")
_CLOCK = regex(r"\b(\d{1,2}):(\d{2}):(\d{2})\b")
#: Seconds that one request generates alone before the batch is told to wait for it; and lines of it.
LONG, LINES = 300, 3


def _alone(log: RunLog) -> tuple[list[Told], int]:
    """The longest stretch of an engine's lines with one request running, and its seconds by their clock."""
    runs: dict[str, list[Told]] = {}
    best: tuple[list[Told], int] = ([], 0)
    for told in log.events("engine"):
        name = _ENGINE.search(told.text)
        key = name[0] if name else ""
        if not _ALONE.search(told.text):
            runs[key] = []
            continue
        run = runs.setdefault(key, [])
        run.append(told)
        clocks = [_CLOCK.search(one.text) for one in (run[0], told)]
        first, last = (int(m[1]) * 3600 + int(m[2]) * 60 + int(m[3]) if m else 0 for m in clocks)
        if len(run) >= LINES and (last - first) % 86400 > best[1]:
            best = [*run], (last - first) % 86400
    return best


def _long_tail(log: RunLog) -> Iterator[Finding]:
    lines, waited = _alone(log)
    if waited < LONG:
        return
    yield warning(
        f"one request generates alone for {waited / 60:.3g} minutes: the batch waits for its longest response",
        lines[0].point.where(),
        shown("line", lines[-1].text.splitlines()[0][:200], None, f"line {lines[-1].point.line}"),
        shown("seconds with one request running", waited, f"< {LONG}"),
        link="time",
        cause="the long tail of synchronous generation: all other responses have ended, and the GPUs idle until the "
        "longest has (it may never end by itself, and run to the limit of tokens)",
        next_step="look whether it ends or loops; a smaller limit of tokens, partial or asynchronous rollouts",
        steps=steps_of(told.point for told in lines),
    )


#: A head that is to be trained begins at random.
_BY_DESIGN = regex(r"newly initialized.*(?:score|v_head|value_head|classifier|summary)\.")
#: What a script says of a run.
_VERDICT = regex("(?i)" + VERDICT)


def _goes(log: RunLog, text: str) -> str:
    """Behind a script's own verdict, how its reward goes, in words; nothing behind other warnings."""
    reward = log.get("reward") if _VERDICT.search(text) else None
    values = [] if reward is None else reward.finite
    if reward is None or len(values) < 2 or values[0] == values[-1]:
        return ""
    said = ", ".join(f"{value:.3g}" for value in values) if len(values) <= 6 else f"{values[0]:.3g} to {values[-1]:.3g}"
    return f": {reward.name} {'falls' if values[-1] < values[0] else 'goes'}, {said} over {len(values)} lines"


#: A head alone: small models share it with the embedding, and their checkpoints do not hold it twice.
_TIED = regex(r"newly initialized: \['(?:\w+\.)*lm_head\.weight'\]")
#: A checkpoint of a run of one's own, by its name.
_TRAINED = regex(r"checkpoint at \S*(?:global_step|checkpoint[-_/]|ckpt|step[-_]?\d|iter[-_]?\d|epoch)")


def _goes_on(log: RunLog) -> bool:
    """Whether the log begins in the middle of a run."""
    told = [[point.step for point in series.points[:2] if point.step is not None] for series in log.signals()]
    steps = [each[0] for each in told if each]
    # What is logged every eighth step begins at the eighth.
    strides = [each[1] - each[0] for each in told if len(each) > 1]
    return bool(steps) and min(steps) > max(2, min(strides, default=0)) and not log.is_counted


#: Libraries below the trainer, by what their own lines say: they fall back by themselves.
_TRANSPORT = regex(
    r"\bUCX\b|\bknem|\bcma_|libfabric|\bOFI\b|openib|\bbtl[_:]|\bOMPI\b|mca_|\bPMIX\b|hwloc|libibverbs|NVSHMEM|nvshmem"
    r"|Unable to register cu(?:DNN|FFT|BLAS) factory|cuda_(?:dnn|fft|blas)\.cc|computation_placer|TF-TRT"
    r"|absl::InitializeLog"
    r"|ALSA lib|libEGL|MESA"
)
_OF_LOGGER = regex(r"^(?:[\w.]+:\d+ )?\[?(?:ERROR|CRITICAL)\]?:?\s?(?:[\w.]+:\s?)?")
#: Characters of it that are shown.
LONGEST = 200
_NUMBERS = regex(r"0x[0-9a-f]+|[\d.:,-]+|'[^']{0,80}'")
#: Lines of one error before it is worth knowing; and before it is a habit, over several steps and within one.
AGAIN, HABIT, MANY = 3, 5, 20


def _logged_errors(log: RunLog) -> Iterator[Finding]:
    """The error that loggers tell of most often."""
    alike: dict[str, list[Told]] = {}
    for told in log.events("error"):
        if "dependency resolver" in told.text:
            continue  # pip's word of packages that it leaves as they are
        alike.setdefault(_NUMBERS.sub("#", told.text.splitlines()[0][:160]), []).append(told)
    lines = max(alike.values(), key=len, default=[])
    if len(lines) < AGAIN:
        return
    whole = lines[0].text.splitlines()[0]
    known = failure_of(whole)
    in_vain = not any(log.last_lines().values()) and known is not None and not log.events(*DEATHS, "finished")
    known = None if known is not None and (known.general or known.follows) else known
    # What fails stands behind the logger's name, and often at the end.
    whole = _OF_LOGGER.sub("", whole)
    words = whole if len(whole) <= LONGEST else f"{whole[: LONGEST // 2]} ... {whole[-LONGEST // 2 :]}"
    # A transport that fails to set up its fastest way takes the next one: nothing stands in a sample's place.
    transport = _TRANSPORT.search(lines[0].text) is not None and not in_vain
    yield finding(
        # Eight workers that say one thing at the start are no habit.
        "warning"
        if in_vain
        or (not transport and len(lines) >= (HABIT if len({told.point.step for told in lines}) > 1 else MANY))
        else "info",
        f"one error is logged {len(lines)} times, and {'no step is taken' if in_vain else 'the run goes on'}: "
        + (f"{in_short(known.cause)}: " if known is not None else "")
        + words,
        lines[0].point.where(),
        shown("line", words, None, f"line {lines[0].point.line}"),
        shown("lines that say the same", len(lines), "0", "log"),
        link="dump",
        cause=known.cause
        if known is not None
        else "a library of communication or compilation cannot use one of its ways (shared memory between processes, a "
        "device, a plugin) and takes another: as a rule slower, and nothing of the training is wrong"
        if transport
        else "what the line names fails again and again, and something stands in its place: a default, a fallback, a "
        "sample that is left out; what is trained on is then not what is meant",
        next_step=known.next_step
        if known is not None
        else "look at the time of a step; the library's own setting turns that way off (UCX_TLS, NCCL_P2P_DISABLE)"
        if transport
        else "let it raise instead of being logged, and read its traceback; count what stands in its place",
        steps=steps_of(told.point for told in lines),
    )


#: Of a run that pays for no answer, generation that is greedy is an evaluation's, as it should be.
_GREEDY, _PAID = regex(r"`do_sample`"), ("reward", "reward_std", "frac_zero_std", "advantage_max")
_TRAINS = ("loss", "pg_loss", "grad_norm", "learning_rate")


def _of_evaluation(lines: list[Told], log: RunLog) -> bool:
    """Whether generation that is greedy is none of the training's: its groups have a spread in most steps, or every
    line stands behind the last of metrics of a run that has told how long it took.
    """
    known = [step.is_dead for step in steps_told(log) if step.is_dead is not None]
    if len(known) >= trends.MIN_STEPS and 2 * sum(known) < len(known):
        return True
    ends = log.last_lines()
    return log.has("run_seconds") and all((one.point.line or 0) > ends.get(one.point.path, 0) > 0 for one in lines)


#: Trains on at its pace: worth knowing, until steps take longer.
_FLUSHED = regex(r"allocator cache flushes")
_THROWN = regex(THROWN_AWAY)
#: Of the steps of a run, the share beside which what is thrown away is a habit.
_MUCH = 0.2


def _pays(log: RunLog, lines: list[Told]) -> bool:
    """Whether what is thrown away is little beside the steps that are taken, or the reward rises all the same."""
    series = log.get("reward") or log.get("loss")
    steps = 0 if series is None else len(series.finite)
    reward = log.get("reward")
    return len(lines) < _MUCH * steps or (reward is not None and trends.rises(reward.finite))


_UNHEARD = regex(r"None of the inputs have requires_grad")


def _slows(log: RunLog) -> bool:
    """Whether steps take longer and longer, or fewer and fewer tokens come through."""
    seconds, tokens = log.get("step_seconds") or log.get("iter_ms"), log.get("tokens_per_second")
    return (seconds is not None and trends.rises(seconds.finite)) or (
        tokens is not None and trends.drift(tokens.finite) < -trends.DRIFT_Z
    )


#: What a run may meet now and then, and be well: requests that are preempted, a disk that was nearly full for a while.
_PASSES = regex(
    r"is preempted by PreemptionMode|Preempting request|Retract requests|pool is full\. Retract|over 95% full"
)
_CROWDED = regex(r"is preempted by PreemptionMode|Preempting request|Retract requests|pool is full\. Retract")
#: A request that failed and is sent again, and how often it may be.
_RETRIED = regex(r"(?i)\b(?:retry(?:ing)?|retries|attempt|try)\W{0,3}(\d{1,4})\s?(?:/|of)\s?(\d{1,4})\b")


def _is_retried(one: Told) -> bool:
    """Whether it says that it is asked again, and not for the last time."""
    found = _RETRIED.search(one.text)
    return found is not None and int(found[1]) < int(found[2])


#: What engines say of how often they have preempted: they do not print each.
_SO_OFTEN = regex(r"total_num_cumulative_preemption=(\d{1,9})")
#: Of a run's steps, the share beside which it is no habit, and steps behind the last line that show that it was over.
_NOW_AND_THEN, _AFTERWARDS = 0.1, 20


def _holds_up(lines: list[Told], log: RunLog) -> bool:
    """Whether requests are preempted as often as steps are taken, and steps get slower."""
    steps = max((len(one.points) for name in ("reward", "loss", "pg_loss") for one in log.all(name)), default=0)
    return _often(lines) >= steps and _slows(log)


def _often(lines: list[Told]) -> int:
    return max([len(lines), *(int(found[1]) for one in lines if (found := _SO_OFTEN.search(one.text)))])


def _passes(lines: list[Told], log: RunLog) -> bool:
    """Whether it comes in few steps of a run that goes on for long behind it."""
    known = [one.points for name in ("reward", "loss", "pg_loss") for one in log.all(name)]
    steps = max(known, key=len, default=())
    last = max(one.point.line or 0 for one in lines)
    behind = sum((point.line or 0) > last for point in steps)
    return behind >= _AFTERWARDS and _often(lines) <= _NOW_AND_THEN * len(steps)


#: Steps behind the last sample that a judge failed on, before it is known that it did not end there.
_WELL_AGAIN = 8


def _hardly_any(lines: list[Told], log: RunLog) -> bool:
    """Whether a judge failed on no more samples than one in ten steps has, in no more steps than that, and was well for
    long behind the last: a step has many samples, so that it is a share of them that moves nothing.
    """
    known = [one.points for name in ("reward", "loss", "pg_loss") for one in log.all(name)]
    steps = max(known, key=len, default=())
    at = [sum((point.line or 0) < (one.point.line or 0) for point in steps) for one in lines]
    samples = sum(map(count_of, lines))
    few = _NOW_AND_THEN * len(steps)
    return samples <= few and len(set(at)) <= few and len(steps) - max(at) >= _WELL_AGAIN


def _norms(log: RunLog) -> list[float]:
    series = log.get("grad_norm")
    return [] if series is None else series.finite


def _so_few(total: int, samples: float) -> str:
    return f" ({total / samples:.1%} of the samples, evenly through the run)"


def _outage(
    known: _Notice, counted: FailedScores, broke: Outage, lines: list[Told], why: Failure | None, log: RunLog
) -> Finding:
    """A judge that fails far more often from one step on, and what that does to the reward."""
    samples = counted.samples

    def of(count: float) -> str:
        return f"{count:.3g}" if samples is None else f"{min(count / samples, 1.0):.0%}"

    falls = broke.reward_after < broke.reward_before - LOSES * abs(broke.reward_before)
    name = given(log.get("reward")).name
    line = next((one for one in lines if (one.point.line or 0) >= _line_before(counted, broke)), lines[0])
    return finding(
        "error" if falls and samples is not None and broke.after >= 0.5 * samples else "warning",
        f"{known.claim}: {of(broke.after)} {'of the samples' if samples is not None else 'times'} in each step "
        "from step "
        f"{broke.since.step} on ({of(broke.before)} before)"
        + (
            f", and {name} falls from {broke.reward_before:.3g} to {broke.reward_after:.3g} there: what fails is "
            "scored "
            "0, and it is no fall of the policy"
            if falls
            else ""
        )
        + ("" if why is None else f": {in_short(why.cause)}"),
        replace(line.point.where(), step=broke.since.step),
        shown("line", line.text.splitlines()[0][:200], None, f"line {line.point.line}"),
        shown("samples that it failed on, in a step since then", round(broke.after, 1), f"about {broke.before:.2g}"),
        *([] if samples is None else [shown("samples of a step", samples)]),
        shown(f"{name}, before and since", f"{broke.reward_before:.3g} and {broke.reward_after:.3g}"),
        link=known.link,
        cause=known.cause if why is None else why.cause,
        next_step="look at the judge's or sandbox's own load and log from that time on; leave out of the loss "
        "what could "
        "not be scored; go back to the checkpoint before that step: what came since was taught to fail",
        steps=broke.steps,
    )


def _line_before(counted: FailedScores, broke: Outage) -> int:
    """The line behind which what is told is of the step that it began in."""
    at = counted.points.index(broke.since)
    return (counted.points[at - 1].line or 0) if at else 0


_OVERFLOWS = regex(r"OVERFLOW! (?:Rank|Skipping)")
#: The share of a run's steps that a loss scale may skip as it tries a larger one, and what part of the run is its end.
_TRIES, _END = 0.05, 0.5


def _are_of_a_broken_gradient(log: RunLog) -> bool:
    """Whether the gradient is the first that is not finite, to the end, and as many lines tell of a loss scale."""
    broken = first_broken(log)
    if broken is None or broken.series.signal != "grad_norm" or math.isfinite(broken.series.last.value):
        return False
    return bool(scale_falls(log, broken.steps))


def _settles(lines: list[Told], log: RunLog) -> bool:
    """Whether overflows of fp16 get rare: hardly any behind the first half of the log's lines of metrics, as a scale
    has that is doubled now and then.
    """
    series = log.get("loss") or log.get("reward")
    if series is None or len(series.points) < trends.MIN_STEPS or series.last.line is None:
        return False
    first = series.points[0].line or 0
    middle = first + _END * (series.last.line - first)
    behind = sum((one.point.line or 0) > middle for one in lines)
    return behind <= _TRIES * len(series.points) / 2 and len(lines) <= 2 * _TRIES * len(series.points)


@rule("L29", "a warning that explains what follows", link="dump", scope="signals", needs=("event:notice"
    "|event:engine|event:not_finite|event:error",), explains=("D37",),
      source="the texts of transformers, PEFT, TRL, DeepSpeed, Ray, vLLM and SGLang")  # fmt: skip
def noticed(log: RunLog) -> Iterator[Finding]:
    """Warnings that the libraries print themselves and a run goes on after: preempted requests, padding on the right,
    inputs without a gradient, greedy generation, weights newly initialized, skipped batches, spilled objects, reward
    functions that fail. Each as bad as the table says (an allocator that flushes its cache only where steps get slower,
    else it is worth knowing; requests that are preempted only where they are as many as steps, and steps get slower; a
    disk nearly full worth knowing where it comes in a tenth of the steps at the most and 20 follow; a request to a
    judge that is sent again, attempt k of n, worth knowing until its last attempt, and a judge that fails on no more
    samples than one in every tenth step, 8 steps and more before the end, or, over 12 steps and more, on 3 % of all
    and no more than an eighth of a step's), at its own link, with how many lines say so. A judge that fails from one
    step on 4 times as often as before, and on a tenth of a step's samples, is told with that step and what becomes of
    the reward: an error where it fails on half of them and the reward loses a quarter. Ray's `[repeated Nx]` counts as
    N. No greedy generation of an evaluation: behind the last step, or beside groups that have a spread. An engine with
    one request running and none waiting for 5 minutes and more of its clock, in 3 lines and more, is a long
    tail. One error that a logger tells 3 times and more is worth knowing, 5 times over several steps (20 within one) a
    warning; one of a library of communication or compilation, which takes another way by itself, is never more than
    worth knowing.
    """
    yield from _long_tail(log)
    yield from _logged_errors(log)
    # A traceback that the log does not hold to its end may be of what was warned of.
    fails = any(UNTOLD in one.text for one in log.events("traceback"))
    found: dict[int, list[Told]] = {}
    for told in log.events("notice", "engine", "not_finite"):
        at = next((at for at, each in enumerate(_TABLE) if each.is_told_by(told.text)), None)
        if at is not None:
            found.setdefault(at, []).append(told)
    for at in sorted(found, key=lambda at: SEVERITIES.index(_TABLE[at].severity)):
        lines, known = found[at], _TABLE[at]
        text = lines[0].text
        lost = _BY_DESIGN.search(text) and (_TRAINED.search(text) or _goes_on(log))
        # A few samples that are masked whole are lost; a loss of 0 says that all are.
        loss = log.get("loss") if known.link == "masks" else None
        spared = loss is not None and any(loss.finite) and len(lines) < MANY
        # Of a judge that fails its own words may say why.
        why = failure_of(text) if known.link == "rewards" else None
        why = None if why is None or why.general or why.follows or why.cause.startswith("the reward failed") else why
        if known.link == "gradient" and _UNHEARD.search(text) and any(value > 0 for value in _norms(log)):
            continue  # printed of a forward that wants no gradient, as the reference's: those that do have one
        if _GREEDY.search(text) and _of_evaluation(lines, log):
            continue
        if _OVERFLOWS.search(text) and _are_of_a_broken_gradient(log):
            continue  # D21 tells of these lines
        greedy = _GREEDY.search(text) is not None and (
            not any(map(log.has, _PAID)) or not any(map(log.has, _TRAINS)) or log.has("pair_reward")
        )
        passes = _PASSES.search(text) is not None and _passes(lines, log)
        given_up = [one for one in lines if not _is_retried(one)] if known.link == "rewards" else lines
        retried = len(given_up) < min(known.fewest, len(lines))
        few = known.link == "rewards" and known.severity == "warning" and _hardly_any(given_up or lines, log)
        counted = failed_scores(given_up, log) if known.link == "rewards" and known.severity == "warning" else None
        broke = None if counted is None else outage(counted, log)
        if broke is not None and counted is not None:
            yield _outage(known, counted, broke, given_up, why, log)
            continue
        evenly = counted is not None and counted.are_few
        mild = (
            greedy
            or evenly
            or retried
            or few
            or (_CROWDED.search(text) is not None and not _holds_up(lines, log))
            or len(lines) < known.fewest
            or spared
            or _TIED.search(text) is not None
            or (_OVERFLOWS.search(text) is not None and _settles(lines, log))
            or (_THROWN.search(text) is not None and _pays(log, lines))
            or (_FLUSHED.search(text) is not None and not _slows(log))
            or passes
            or (_BY_DESIGN.search(text) and not (lost or fails))
        )
        yield finding(
            "info" if mild else known.severity,
            "a head that was trained begins at random again: the checkpoint does not hold it, and it was newly "
            "initialized"
            if lost
            else known.claim
            + (" (in few lines, and the run goes on long after them)" if passes or (few and not retried) else "")
            + (
                _so_few(counted.total, counted.samples * len(counted.counts))
                if counted and counted.samples and evenly and not few
                else ""
            )
            + (", and each is asked again" if retried and not given_up else "")
            + ("" if why is None else f": {in_short(why.cause)}")
            + _goes(log, text),
            lines[0].point.where(),
            shown("line", lines[0].text.splitlines()[0][:200], None, f"line {lines[0].point.line}"),
            shown("lines that say so", len(lines), "0", "log"),
            *([] if counted is None else [shown("samples that it failed on", counted.total, "0", "log")]),
            link=known.link,
            cause=known.cause if why is None else why.cause,
            next_step=known.next_step if why is None else why.next_step,
            steps=steps_of(told.point for told in lines) if counted is None else counted.steps,
        )
