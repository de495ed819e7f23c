"""The responses of a batch as what can be told apart: token ids, else texts; and groups that hold one over and over."""

from __future__ import annotations

from collections import defaultdict

from replay_core.diagnose.batch import StepBatch

#: Responses of a group before their being one says something; and groups of such, and the share of them that are.
SEVERAL, GROUPS, MOST = 3, 4, 0.8


def answers_of(batch: StepBatch) -> list[bytes] | None:
    """Each sample's response; None where neither tokens nor texts of it are recorded."""
    tokens_N, response_N = batch.tokens_N, batch.response_N
    if tokens_N is not None and response_N is not None:
        return [tokens_N[span][response_N[span]].tobytes() for span in batch.flat.spans]
    return _texts(batch, "response_text")


def asked_of(batch: StepBatch) -> list[bytes] | None:
    """Each sample's prompt; None where neither tokens nor texts of it are recorded."""
    tokens_N, response_N = batch.tokens_N, batch.response_N
    if tokens_N is None or response_N is None:
        return _texts(batch, "prompt_text")
    heads_B = batch.flat.first(response_N)
    pairs = zip(batch.flat.starts_B, heads_B, strict=True)
    return [tokens_N[start : start + head].tobytes() for start, head in pairs] if heads_B.all() else None


def _texts(batch: StepBatch, name: str) -> list[bytes] | None:
    texts = batch.columns.texts(name)
    return None if texts is None else [text.encode("utf-8", "surrogatepass") for text in texts]


def members_of(batch: StepBatch) -> list[list[int]]:
    """The samples of every group; those of one prompt where none is named."""
    groups: dict[object, list[int]] = defaultdict(list)
    named = asked_of(batch) if batch.group_B is None else batch.group_B.tolist()
    for sample, group in enumerate(named or ()):
        groups[group].append(sample)
    return list(groups.values())


def groups_of_one_answer(batch: StepBatch) -> tuple[int, int]:
    """How many groups hold one response over and over, and how many groups of three and more there are."""
    answers = answers_of(batch)
    if answers is None:
        return 0, 0
    several = [{answers[sample] for sample in group} for group in members_of(batch) if len(group) >= SEVERAL]
    return sum(1 for each in several if len(each) == 1), len(several)


def are_one(same: int, known: int) -> bool:
    """Whether so many of the groups make it how the engine samples."""
    return known >= GROUPS and same >= MOST * known
