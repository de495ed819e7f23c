"""What the length of responses tells: that none ends by itself, and that it alone is what is rewarded."""

from __future__ import annotations

import numpy as np

from replay_core.diagnose.algorithm import stated_number
from replay_core.diagnose.batch import StepBatch
from replay_core.diagnose.case import Case
from replay_core.diagnose.finding import Finding, error, share, shown, warning
from replay_core.diagnose.flat import Array
from replay_core.diagnose.passes import are_passes
from replay_core.diagnose.rule import Skip, given, rule, skip_if
from replay_core.diagnose.rules.scores import for_right_answers
from replay_core.diagnose.rules.tokens import truncated

#: Responses of a batch, and tokens of each, before one length is no chance; the share that may end on one token.
FEWEST, TOKENS, ONE_END = 16, 4, 0.6
#: Responses that go on behind their end before it is no chance.
BEYOND = 4
#: Different lengths, and responses, that a function of the length has to hold for.
LENGTHS, SAMPLES = 5, 24


def _lengths_B(batch: StepBatch) -> Array:
    return batch.flat.count(given(batch.response_N))


@rule("D94", "no response ends by itself", link="tokens", scope="batch", needs=("tokens", "response"), varies=True,
      explains=("D20", "D26", "L08", "L09"),
      source="ignore_eos, an end token that the engine does not know, min_tokens as large as the limit")  # fmt: skip
def never_ends(batch: StepBatch) -> Finding | None:
    """All responses of a batch (16 and more) have one length, of 4 tokens and more, and no token ends more than .6 of
    them: a warning, where half of the steps are so. Answers of one length that end by themselves end on one token, the
    end token. Silent where D20 knows of each that it was cut off. An error where the stated end token stands inside of
    half the responses that hold it (4 and more), and the tokens behind it were sampled and count; where none is stated,
    what most responses end on that the dump says are not cut off, and all are of one length.
    """
    if are_passes(batch):
        batch = batch.once
    if (beyond := _beyond_the_end(batch)) is not None:
        return beyond
    lengths_B, cut_B, tokens_N = _lengths_B(batch), truncated(batch), given(batch.tokens_N)
    skip_if(len(batch) < FEWEST, f"needs {FEWEST} responses of {TOKENS} tokens")
    # Responses that end after few tokens do end: such a step is one of those that are well. Of rows whose padding
    # nothing tells, a response ends where its mask does.
    if lengths_B.min() != lengths_B.max() or (not batch.spine.padding_known and _end_by_their_masks(batch)):
        return None
    skip_if(lengths_B.min() < TOKENS, f"needs {FEWEST} responses of {TOKENS} tokens")
    skip_if(cut_B is not None and cut_B.all(), "all of them are known to be cut off (D20)")
    last_B = tokens_N[batch.flat.starts_B + batch.flat.lengths_B - 1]
    ends, counts = np.unique(last_B, return_counts=True)
    if counts.max() > ONE_END * len(batch):
        return None
    return warning(
        f"no response ends by itself: all {len(batch)} are cut off at {int(lengths_B[0])} tokens, and they end on "
        f"{len(ends)} different ones",
        batch.laid.where("input_ids", sample=0),
        shown("length of every response", int(lengths_B[0]), "several lengths"),
        shown("share that ends on the commonest token", float(counts.max() / len(batch)), f"> {ONE_END:g}",
        f"token ids of {batch.name}"),
        cause="the limit of tokens is too small for the answers; or the end token (EOS) does not stop the engine: "
        "ignore_eos is on, another end token is configured than the model writes, min_tokens is as large as the limit",
    )  # fmt: skip


def _end_by_their_masks(batch: StepBatch) -> bool:
    """Whether masks end at different tokens of their responses."""
    last_B = batch.flat.last(batch.trained_N) if batch.trained_N is not None else np.full(len(batch), -1)
    asked_B = batch.flat.first(given(batch.response_N))
    return np.unique((last_B - asked_B)[last_B >= 0]).size > 1


def _beyond_the_end(batch: StepBatch) -> Finding | None:
    """Responses that go on behind their end token, and count there."""
    stated = stated_number(batch.laid.stated, "eos_token_id")
    trained_N, tokens_N = batch.trained_N, given(batch.tokens_N)
    lengths_B = _lengths_B(batch)
    if stated is None and len(batch) >= FEWEST and lengths_B.min() == lengths_B.max() >= TOKENS:
        # What ends turns stands inside of responses, too: a token that is only taken for the end has to end none.
        stated = batch.eos_id
    if stated is None or trained_N is None or not len(tokens_N):
        return None
    sample_N = batch.flat.sample_N
    ends_N = trained_N & given(batch.response_N) & (tokens_N == stated)
    next_N = np.append(trained_N[1:] & (sample_N[1:] == sample_N[:-1]), False)
    rollout = batch.columns.of("rollout_logprobs")
    if rollout is not None:
        # What an environment wrote behind an end is no word of the policy.
        next_N &= np.append(((rollout.values_N != 0) & rollout.said_N)[1:], False)
    # One token behind an end is a template's (a new line); two go on.
    next_N &= np.append(next_N[1:], False)
    holders, beyond = (int((batch.flat.count(each) > 0).sum()) for each in (ends_N, ends_N & next_N))
    if beyond < BEYOND or 2 * beyond < holders:
        return None
    return error(
        f"generation goes on after the end token (EOS, {stated:g}) in {share(beyond, holders)} responses that hold "
        "one, and what follows is trained on",
        batch.laid.where("input_ids", at=ends_N & next_N),
        shown("responses that go on behind their end", beyond, "0", f"token ids of {batch.name}"),
        shown("responses with an end token", holders),
        cause="the end token does not stop the engine (ignore_eos, another stop token is configured), and the mask "
        "does not end there: tokens after the end count",
    )


@rule("D95", "rewards are a function of the length alone", link="rewards", scope="case", lasts=True,
      explains=("L08", "L09", "D20", "D25"),
      source="length hacking: a score that counts tokens, or a penalty that outweighs the answer")  # fmt: skip
def of_length(case: Case) -> Finding | None:
    """Over all steps: responses of one length have one reward (to 1e-6 of the rewards' range), and it rises, or falls,
    from every length to the next. With 5 different lengths and 24 responses and more, and one length on several: a
    warning. So is a reward whose rest beside what is recorded for right answers (acc, accuracy) rises with the length:
    5 different rests and more, that go with it (correlation over .97) and come to a quarter of what is paid for right
    answers. (One that falls is a penalty for long answers, as recipes have it.)
    And rewards that go with the padding of their rows (correlation over .97, 24 rows and more of 5 different paddings),
    and neither with the response's length alone nor with the prompt's (under .9).
    """
    if (bonus := _beside_the_answer(case) or _of_padding(case)) is not None:
        return bonus
    by_length: dict[int, list[float]] = {}
    steps: list[int] = []
    place = None
    for batch in case.batches():
        if batch.reward_B is None or batch.response_N is None or not np.isfinite(batch.reward_B).all():
            continue
        whole = batch.once
        for length, reward in zip(_lengths_B(whole), given(whole.reward_B), strict=True):
            by_length.setdefault(int(length), []).append(float(reward))
        place = place or batch.laid.where(batch.columns.reward_name, sample=0)
        steps += [] if batch.step is None else [batch.step]
    count = sum(map(len, by_length.values()))
    if len(by_length) < LENGTHS or count < SAMPLES or count < 2 * len(by_length):
        raise Skip(f"needs rewards of {SAMPLES} responses of {LENGTHS} different lengths")
    each = [by_length[length] for length in sorted(by_length)]
    size = max(map(max, each)) - min(map(min, each))
    if not size > 0 or any(max(rewards) - min(rewards) > 1e-6 * size for rewards in each):
        return None
    rises = np.diff([rewards[0] for rewards in each])
    if not ((rises > 0).all() or (rises < 0).all()):
        return None
    lengths = sorted(by_length)
    return warning(
        f"rewards are a function of the response's length alone: {'long' if rises[0] > 0 else 'short'} answers are "
        "paid, whatever they say",
        place,
        shown("responses whose reward their length gives", share(count, count), None, "rewards of all steps"),
        shown("different lengths", len(lengths)),
        shown(f"reward of {lengths[0]} tokens", each[0][0]),
        shown(f"reward of {lengths[-1]} tokens", each[-1][0]),
        cause="the score counts tokens (a length bonus or penalty) and nothing of the answer is in it: the policy "
        "learns the length",
        steps=steps,
    )


#: How well rewards go with the padding, and with one side of it alone at the most.
OF_PADDING, OF_ONE_SIDE = 0.97, 0.9


def _of_padding(case: Case) -> Finding | None:
    """Rewards that are a function of the empty columns of a row, both sides of the tokens together."""
    pads: list[Array] = []
    answers: list[Array] = []
    rewards: list[Array] = []
    first: StepBatch | None = None
    steps: list[int] = []
    for batch in case.batches():
        width = batch.laid.widths.get("prompt and response")
        if width is None or batch.reward_B is None or batch.response_N is None or batch.laid.left_pads_B is None:
            continue
        if not np.isfinite(batch.reward_B).all() or len(batch) < 2:
            continue
        first = first or batch
        pads.append(width - batch.flat.lengths_B.astype(np.float64))
        answers.append(_lengths_B(batch).astype(np.float64))
        rewards.append(batch.reward_B)
        steps += [] if batch.step is None else [batch.step]
    if first is None or sum(map(len, pads)) < SAMPLES:
        return None
    pad_B, answer_B, reward_B = (np.concatenate(each) for each in (pads, answers, rewards))
    # Padding of both sides, and what is left of it without the response's: the prompt's.
    of_pads, of_answers, of_prompts = (_goes_with(reward_B, each) for each in (pad_B, answer_B, pad_B + answer_B))
    if np.unique(pad_B).size < LENGTHS or of_pads <= OF_PADDING or max(of_answers, of_prompts) >= OF_ONE_SIDE:
        return None
    return warning(
        "rewards go with the padding of their rows, not with the answers: with the empty columns beside prompt and "
        "response together",
        first.laid.where(first.columns.reward_name, sample=0),
        shown("correlation of the reward with the row's empty columns", of_pads, f"< {OF_PADDING:g}"),
        shown("with the response's length, and the prompt's", f"{of_answers:.3g}, {of_prompts:.3g}"),
        shown("different paddings", int(np.unique(pad_B).size)), shown("samples", len(pad_B)),
        cause="the reward model's score is read at a padding token: its last token is looked for on the wrong side, or "
        "by a pad token that is the end token; what it says there is a function of where padding begins",
        next_step="score one answer alone, without padding, and compare",
        steps=steps,
    )  # fmt: skip


def _goes_with(reward_B: Array, size_B: Array) -> float:
    """How well rewards go with a size, up or down: 0 where either is one number."""
    if not (np.ptp(reward_B) > 0 and np.ptp(size_B) > 0):
        return 0.0
    return abs(float(np.corrcoef(reward_B, size_B)[0, 1]))


#: How well what is paid beside the right answer goes with the length, and how much of it matters.
ALONG, MATTERS = 0.97, 0.25


def _beside_the_answer(case: Case) -> Finding | None:
    """A bonus for length on top of what is paid for right answers."""
    rests: list[Array] = []
    lengths: list[Array] = []
    rights: list[Array] = []
    steps: list[int] = []
    place = None
    for batch in case.batches():
        parts, texts = for_right_answers(batch), batch.columns.texts("response_text")
        if batch.reward_B is None or len(parts) != 1 or not np.isfinite(batch.reward_B).all():
            continue
        if batch.response_N is not None:
            length_B = _lengths_B(batch).astype(np.float64)
        elif texts is not None:
            length_B = np.array([float(len(text)) for text in texts])
        else:
            continue
        (right_B,) = parts.values()
        if not np.isfinite(right_B).all():
            continue
        rests.append(batch.reward_B - right_B)
        lengths.append(length_B)
        rights.append(right_B)
        place = place or batch.laid.where(batch.columns.reward_name, sample=0)
        steps += [] if batch.step is None else [batch.step]
    rest, length, right = (np.concatenate(each) if each else np.zeros(0) for each in (rests, lengths, rights))
    if len(rest) < SAMPLES or len(np.unique(length)) < LENGTHS or len(np.unique(np.round(rest, 3))) < LENGTHS:
        return None
    along = float(np.corrcoef(length, rest)[0, 1])
    if not along > ALONG or not np.ptp(rest) > MATTERS * np.ptp(right) > 0:
        return None
    slope = float(np.polyfit(length, rest, 1)[0])
    return warning(
        f"the reward pays for length: beside what is paid for right answers it rises by {slope:.3g} with each token or "
        "character",
        place,
        shown("correlation of the rest of the reward with the length", along, f"< {ALONG:g}", "rewards of all steps"),
        shown("rest of the reward, shortest and longest", f"{rest.min():.3g}, {rest.max():.3g}"),
        shown("responses", len(rest)),
        cause="a bonus for long answers is added to the score: once the policy finds it, answers grow, right or not",
        next_step="plot the reward, and what is paid for right answers, over the length",
        steps=steps,
    )
