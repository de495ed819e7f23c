"""Names of counts and shares of samples: what became of them (lost, left out, kept), of turns, and of calls of tools.

Told by their words, since every framework joins them otherwise: `generate/num_error_trajectories`, `has_error/mean`,
`Cancelled`, `count/dropped_stale_samples`. A word of a fault alone is none: an error may be of a KL, a failure a wrong
answer.
"""

from __future__ import annotations

import re

from replay_core.regexes import regex

#: Signals of this file: they count what became of samples, and measure no update.
COUNTS = frozenset(
    {
        "lost_share", "lost_count", "left_share", "left_count", "kept_share", "filtered_share", "filtered_count",
        "batch_count", "group_count", "tool_failures", "tool_calls", "turns", "turns_max", "turns_min",
        "turns_at_limit", "preempted", "skipped_steps", "least_tokens", "mean_tokens", "most_tokens", "draft_loss",
        "tool_seconds",
    }
)  # fmt: skip


def _words(every: str) -> frozenset[str]:
    return frozenset(every.split())


_BETWEEN = regex(r"[\s/._\-()|:%]+")
#: What is broken whenever it happens; what may be a wrong answer as well, unless it is a machine's.
_BROKEN = _words("error errors errored exception exceptions crash crashed crashes malformed unavailable")
_FAILED = _words("fail fails failed failure failures")
_MACHINES = _words(
    "verifier verifiers verification sandbox sandboxes judge grader env envs environment infra request requests "
    "generation data engine server api rpc reward runtime evaluation hard loading"
)
#: What is left out by a limit, a queue or a choice.
_LEFT = _words(
    "dropped drop drops cancelled canceled discarded evicted skipped masked overlong timeout timeouts timedout "
    "exceeded exceed aborted lost"
)
_SAMPLES = _words(
    "trajectory trajectories traj trajs sample samples rollout rollouts episode episodes response responses "
    "completion completions request requests trace traces instance instances seq seqs sequence sequences "
    "conversation conversations example examples"
)
_GROUPS = _words("group groups prompt prompts")
_COUNTS = _words("num n count counts number nb")
_SHARES = _words("rate ratio frac fraction share proportion percent pct percentage frequency has is")
#: What may stand beside: rooms, reasons, how it was put together.
_BESIDE = _words(
    "train training metrics rollout rollouts generate generation gen async agg all stats batch step env dispatcher "
    "orchestrator mean avg average of by per in the as too old stale long length context window limit max tokens off "
    "policy level staleness timed out circuit breaker fully count counts runtime"
)
#: What makes another figure of it: of an evaluation, a time, a tool, a measure of log-probabilities.
_OTHERWISE = _words(
    "tool tools call calls kl prob probs logprob logprobs logp squared mse abs rel relative mult tokens token step_s "
    "time seconds sec s ms reward_fn std min dropout value vf critic grad"
)
_BATCH = regex(
    r"(?i)^(?:[\w]+/){0,2}(?:batch_num_seq|(?:num|n|total|effective)_(?:samples|trajectories|trajs|seqs|sequences"
    r"|rollouts|episodes|responses|completions)|global[_ ]batch[_ ]size)$"
)
_GROUP = regex(r"(?i)^(?:[\w]+/){0,2}(?:(?:num|n|total)_(?:groups|prompts))$")
_KEPT = regex(
    r"(?i)^(?:[\w]+/){0,5}(?:is_trainable(?:/mean)?|trainable|(?:group_)?keep_rate|dynamic_filtering_pass_rate"
    r"|(?:frac|fraction)_(?:trainable|kept)(?:_(?:samples|groups|rollouts|traces))?"
    r"|(?:trainable|kept)_(?:sample|group|rollout|trace)s?_(?:rate|ratio|frac|fraction))$"
)
#: prime-rl's console and its tables of several agents.
_FLAGS = regex(r"^(?:(?:\w+/){0,4}(?:(has_error)|(cancelled))(?:/all)?(?:/mean)?|(Error)|(Cancelled))$")
_FILTERED = regex(
    r"(?i)^(?:[\w]+/){0,2}(?:dynamic_filter/drop_[\w.]+|zero_std/count_[\w.]+|num_zero_variance_filtered"
    r"|(?:num_)?(?:filtered_groups|groups_filtered|zero_(?:std|variance)_groups_dropped))$"
)
_OF_TOOLS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        regex(
            r"(?i)^(?:[\w]+/){0,3}(?:tools?/(?:aggregate/)?failure_(?:frequency|rate)"
            r"|(?:invalid|failed)_tool_calls?_(?:rate|ratio|frac)"
            r"|tool_(?:call_)?(?:failure|error)s?_(?:rate|ratio|frac|frequency))(?:/mean)?$"
        ),
        "tool_failures",
    ),
    (
        regex(
            r"(?i)^(?:[\w]+/){0,3}(?:tools?/(?:call_frequency|aggregate/avg_calls_per_rollout)|tool_call_counts/mean"
            r"|(?:num|n|avg|mean)_tool_calls(?:_per_\w+)?(?:/mean)?)$"
        ),
        "tool_calls",
    ),
    (
        regex(
            r"(?i)^(?:[\w]+/){0,3}(?:num_turns(?:/mean|_mean)?|(?:avg|mean)_(?:num_)?turns(?:_per_\w+)?"
            r"|turns_per_(?:sample|episode)(?:/mean)?|turns)$"
        ),
        "turns",
    ),
    (regex(r"(?i)^(?:[\w]+/){0,3}(?:num_turns|turns_per_(?:sample|episode))/max$"), "turns_max"),
    (regex(r"(?i)^(?:[\w]+/){0,3}(?:num_turns|turns_per_(?:sample|episode))/min$"), "turns_min"),
    (regex(r"(?i)^(?:[\w]+/){0,3}max_turns_reached_(?:rate|ratio|frac)$"), "turns_at_limit"),
    (regex(r"^(?:[\w]+/){0,3}num_preempted/mean$"), "preempted"),
    (regex(r"^agent_loop/tool_calls/mean$|^tools/(?:aggregate/)?avg_runtime$"), "tool_seconds"),
    (regex(r"(?i)^number of skipped iterations$"), "skipped_steps"),
    (regex(r"^global_seqlen/balanced_min$"), "least_tokens"),
    (regex(r"^global_seqlen/mean$"), "mean_tokens"),
    (regex(r"^global_seqlen/balanced_max$"), "most_tokens"),
    (regex(r"(?i)^(?:[\w]+/){0,2}(?:mtp|draft|eagle)(?:_\d+)?[_ ]loss$"), "draft_loss"),
)
_EXTREME = regex(r"(?:^|/)(?:max|std|p\d+|total)$|_(?:max|std|total)$|^timing|^time/|/timing|(?:^|[/_])eval|^val")


def counted(raw: str) -> str | None:
    """The signal of a count or share of samples, turns or calls of tools; None for any other name."""
    if (found := _tabled(raw)) is not None:
        return found
    if (flag := _FLAGS.match(raw)) is not None:
        return "lost_share" if flag[1] or flag[3] else "left_share"
    return None if _EXTREME.search(raw) else _by_words(frozenset(word for word in _BETWEEN.split(raw.lower()) if word))


def _tabled(raw: str) -> str | None:
    for pattern, signal in (
        (_KEPT, "kept_share"), (_FILTERED, "filtered_count"), (_BATCH, "batch_count"), (_GROUP, "group_count"),
        *_OF_TOOLS,
    ):  # fmt: skip
        if pattern.match(raw):
            return signal
    return None


def _by_words(words: frozenset[str]) -> str | None:
    if words & _OTHERWISE - {"tokens"}:
        return None
    # A failure of an environment is an episode that was not solved.
    failed = words & _FAILED and words & (_MACHINES - {"env", "envs", "environment", "evaluation"})
    if not (words & (_BROKEN | _LEFT) or failed):
        return None
    every = _BROKEN | _FAILED | _LEFT | _MACHINES | _SAMPLES | _GROUPS | _COUNTS | _SHARES | _BESIDE
    is_share = bool(words & _SHARES)
    # An error's rate may be that of characters; what is masked may be tokens.
    if words - every or not words & (_SAMPLES | _GROUPS | _MACHINES | {"overlong"}):
        return None
    if not (is_share or words & (_SAMPLES | _GROUPS | _COUNTS) - {"rollout"}):
        return None
    broken = bool(words & _BROKEN or failed)
    return f"{'lost' if broken else 'left'}_{'share' if is_share else 'count'}"


def of_groups(raw: str) -> bool:
    """Whether it counts groups or prompts instead of samples."""
    return bool(_GROUPS & frozenset(_BETWEEN.split(raw.lower())))
