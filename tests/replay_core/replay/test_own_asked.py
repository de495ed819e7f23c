"""What the trainer's own forward lets move whom is seen by changing tokens and calling it again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.replay_core.replay.test_guesses import _ROTARY, Trainer, answer

_HEAD = """
import torch


def _taken(logits, ids):
    return logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def _positions(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


def _logits(model, ids, mask, **more):
    return model(ids, attention_mask=mask, position_ids=_positions(mask), use_cache=False, **more).logits


"""
_DROPS = """
def log_probs(model, batch):
    ids, mask = batch["input_ids"], batch["attention_mask"]
    return _taken(torch.nn.functional.dropout(_logits(model, ids, mask), 0.1), ids)
"""
_REMEMBERS = """
_MEMO = {}


def log_probs(model, batch):
    ids, mask = batch["input_ids"], batch["attention_mask"]
    if ids.shape not in _MEMO:
        _MEMO[ids.shape] = _logits(model, ids, mask)
    return _taken(_MEMO[ids.shape], ids)
"""
_LOOKS_AHEAD = """
def log_probs(model, batch):
    ids, mask = batch["input_ids"], batch["attention_mask"]
    known = model.get_input_embeddings()(ids)
    known = known + 0.2 * torch.cat([known[:, 1:], known[:, -1:]], 1) * mask[..., None]
    logits = model(inputs_embeds=known, attention_mask=mask, position_ids=_positions(mask), use_cache=False).logits
    return _taken(logits, ids)
"""
_TAKES_THE_MEAN = """
def log_probs(model, batch):
    ids, mask = batch["input_ids"], batch["attention_mask"]
    logits = _logits(model, ids, mask)
    return _taken(logits - 0.5 * logits.mean((0, 1)), ids)
"""
_CUTS = """
def log_probs(model, batch):
    ids, mask = batch["input_ids"], batch["attention_mask"]
    first = ids.shape[1] - int(mask[0].sum())
    part = _taken(_logits(model, ids[:, first:], mask[:, first:]), ids[:, first:])
    return torch.nn.functional.pad(part, (first, 0))
"""
_BLENDS = """
def log_probs(model, batch):
    ids, mask = batch["input_ids"], batch["attention_mask"]
    logits = _logits(model, ids, mask)
    beside = torch.where(mask[..., None].bool(), 0.0, logits).sum(1, keepdim=True)
    return _taken(logits + 0.5 * beside, ids)
"""
_CODES = (_DROPS, _REMEMBERS, _LOOKS_AHEAD, _TAKES_THE_MEAN, _CUTS, _BLENDS)


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (_DROPS, "random", "the seed alone moves"),
        (_REMEMBERS, "state", "nothing was changed but what it was called with before"),
        (_LOOKS_AHEAD, "future", "before it in row"),
        (_TAKES_THE_MEAN, "batch", "changing row 0 moves"),
        (_BLENDS, "padding", "changing what stands in the padding moves"),
        (_CUTS, "batch", "by their number or length: other tokens in them move nothing"),
    ],
    ids=["draws", "remembers", "looks ahead", "takes the mean", "blends padding in", "cuts"],
)
@pytest.mark.long
def test_what_its_forward_lets_move_whom_names_the_cause(
    code: str, kind: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"own_forward_asked_{list(_CODES).index(code)}"
    (tmp_path / f"{name}.py").write_text(_HEAD + code)
    monkeypatch.syspath_prepend(str(tmp_path))

    def recorded(trainer: Trainer) -> object:
        # A forward that remembers is right where it is called first.
        return trainer.padded() - 0.3 * (kind == "state")

    asked = {"forward": f"{name}:log_probs", "forward_path": str(tmp_path)}
    cause = answer(tmp_path / "dump", _ROTARY, recorded, **asked)["cells"][-1]["cause"]  # type: ignore[arg-type]
    assert cause["kind"] == kind, cause
    assert said in cause["sentence"]
