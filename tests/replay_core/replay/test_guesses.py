"""A recording that no cell computes is what a known mistake gives, where making it on purpose gives the recording."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers as hf

from replay_core import workbench
from replay_core.export.outcome import exit_code
from replay_core.recorder import Recorder
from replay_core.records import Run
from replay_core.replay import guesses, request
from replay_core.replay.flags import Flags
from replay_core.replay.matrix import Bench
from replay_core.replay.recorded import Explained
from tests.builders import Here, padded_batch
from tests.replay_core.replay.conftest import small_batch
from tui_debugger.reports.replay import replay_report

_LENGTHS = (9, 5, 12, 7)
_ROTARY = hf.Qwen2Config(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2,
)  # fmt: skip
_WINDOWED = hf.MistralConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2, sliding_window=4,
)  # fmt: skip
_SCALED = hf.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2,
    rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
)  # fmt: skip
_HYBRID = hf.Lfm2Config(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2, layer_types=["conv", "full_attention"],
)  # fmt: skip
_LEARNED = hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2)


class Trainer:
    """Rows of unequal length, padded on the left, and the mistakes that a trainer makes with them."""

    def __init__(self, config: hf.PreTrainedConfig) -> None:
        torch.manual_seed(3)
        self.model = hf.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        width = max(_LENGTHS)
        self.mask_BS = (torch.arange(width)[None] >= width - torch.tensor(_LENGTHS)[:, None]).long()
        self.ids_BS = torch.randint(4, 60, self.mask_BS.shape) * self.mask_BS
        self.lengths = torch.tensor(_LENGTHS)

    def padded(self, mask_BS: torch.Tensor | None = None, positions_BS: torch.Tensor | None = None) -> torch.Tensor:
        mask_BS = self.mask_BS if mask_BS is None else mask_BS
        if positions_BS is None:
            positions_BS = (self.mask_BS.cumsum(1) - 1).clamp(min=0)
        return self._score(self.ids_BS, mask_BS, positions_BS)

    def packed(self, sample_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Samples as `sample_T` has them, laid back into rows."""
        ids_1T = self.ids_BS[self.mask_BS.bool()][None]
        order_T = torch.arange(ids_1T.shape[1])
        sees_TT = (sample_T[:, None] == sample_T) & (order_T[:, None] >= order_T)
        bias_11TT = torch.zeros(sees_TT.shape).masked_fill(~sees_TT, torch.finfo(torch.float32).min)[None, None]
        scores_T = torch.cat([torch.zeros(1), self._score(ids_1T, bias_11TT, positions_T[None])[0]])
        rows_BS = torch.zeros(self.mask_BS.shape)
        rows_BS[self.mask_BS.bool()] = scores_T
        return rows_BS[:, 1:]

    def pack(self, late: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each token of a pack: its sample, and its position, with boundaries so many tokens late."""
        starts = self.lengths.cumsum(0) - self.lengths
        starts = starts + late * (starts > 0)
        order_T = torch.arange(int(self.lengths.sum()))
        sample_T = (order_T[:, None] >= starts).sum(1) - 1
        return sample_T, order_T - starts[sample_T]

    def logits(self) -> torch.Tensor:
        positions_BS = (self.mask_BS.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            return self.model(
                input_ids=self.ids_BS, attention_mask=self.mask_BS, position_ids=positions_BS, use_cache=False
            ).logits  # type: ignore[no-any-return]

    def _score(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def _no_mask(trainer: Trainer) -> torch.Tensor:
    sample_T, positions_T = trainer.pack()
    return trainer.packed(torch.zeros_like(sample_T), positions_T)


def _counted_through(trainer: Trainer) -> torch.Tensor:
    sample_T, positions_T = trainer.pack()
    return trainer.packed(sample_T, torch.arange(positions_T.numel()))


def _slots(trainer: Trainer) -> torch.Tensor:
    return trainer.padded(positions_BS=torch.arange(trainer.mask_BS.shape[1]).expand(trainer.mask_BS.shape))


def _from_one(trainer: Trainer) -> torch.Tensor:
    return trainer.padded(positions_BS=trainer.mask_BS.cumsum(1))


def _anew(trainer: Trainer) -> torch.Tensor:
    """Positions that begin again at the second token: the rest is the response."""
    positions_BS = (trainer.mask_BS.cumsum(1) - 1).clamp(min=0)
    return trainer.padded(positions_BS=(positions_BS - 1).clamp(min=0))


def _state_over_padding(trainer: Trainer) -> torch.Tensor:
    """The convolution is not handed the mask, which attention is."""
    layer = trainer.model.base_model.layers[0]
    given = layer.conv.forward
    layer.conv.forward = lambda *args, **kwargs: given(*args, **{**kwargs, "attention_mask": None})
    found = trainer.padded()
    layer.conv.forward = given
    return found


def _half_softmax(trainer: Trainer) -> torch.Tensor:
    logits = trainer.logits()[:, :-1].bfloat16()
    return logits.log_softmax(-1).gather(-1, trainer.ids_BS[:, 1:, None])[..., 0].float()


def _half_head(trainer: Trainer) -> torch.Tensor:
    head = trainer.model.get_output_embeddings()
    within = head.bfloat16().forward
    head.forward = lambda hidden: within(hidden.bfloat16())
    found = _half_softmax(trainer)
    del head.forward
    head.float()
    return found


def _moved(trainer: Trainer, *, by_mask: bool) -> torch.Tensor:
    """Rows with their tokens on the left, under the mask of rows with them on the right."""
    lead_B = trainer.mask_BS.shape[1] - trainer.lengths
    ids_BS = torch.stack([row.roll(-int(by)) for row, by in zip(trainer.ids_BS, lead_B, strict=True)])
    slots_BS = torch.arange(ids_BS.shape[1]).expand(ids_BS.shape)
    positions_BS = torch.where(trainer.mask_BS == 1, trainer.mask_BS.cumsum(1) - 1, 1) if by_mask else slots_BS
    found_BT = trainer._score(ids_BS, trainer.mask_BS, positions_BS)
    return torch.stack([row.roll(int(by)) for row, by in zip(found_BT, lead_B, strict=True)])


def _misread(**stated: Any) -> Callable[[Trainer], torch.Tensor]:
    """The trainer's own config has other values, and its weights are the same."""

    def recorded(trainer: Trainer) -> torch.Tensor:
        config = copy.deepcopy(trainer.model.config)
        for name, value in stated.items():
            setattr(config, name, value)
        other = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        other.load_state_dict(trainer.model.state_dict())
        trainer.model = other
        return trainer.padded()

    return recorded


def _temperature(trainer: Trainer) -> torch.Tensor:
    return 0.7 * trainer.padded()


def answer(
    path: Path,
    config: hf.PreTrainedConfig,
    recorded: Callable[[Trainer], torch.Tensor],
    dtype: str = "float32",
    matrix: str | None = None,
    **asked: Any,
) -> Any:
    trainer = Trainer(config)
    response_BS = trainer.mask_BS.clone()
    response_BS[:, :1] = 0
    for row, length in enumerate(_LENGTHS):
        response_BS[row, : trainer.mask_BS.shape[1] - length + 1] = 0
    with Recorder(path) as recorder:
        recorder.checkpoint(0, trainer.model)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
        recorder.checkpoint(1, trainer.model)
        with recorder.step(1) as record:
            record(
                "forward_data", micro=0, input_ids=trainer.ids_BS, attention_mask=trainer.mask_BS,
                response_mask=response_BS, log_probs=recorded(trainer), temperature=1.0,
            )  # fmt: skip
    plan = {"dump": str(path), "step": 1, "rank": 0, "micro": 0, "model": "checkpoint", **asked,
            "flags": Flags.parse(f"threads=1 attention=eager dtype={dtype}").to_mapping()}  # fmt: skip
    return workbench.replay(plan, path / "out", Here(), matrix=matrix)


@pytest.mark.parametrize(
    ("config", "recorded", "kind", "said"),
    [
        (_ROTARY, _no_mask, "other_samples", "is a pack without the mask between samples"),
        (_ROTARY, lambda one: one.packed(*one.pack(-1)), "other_samples", "whose boundaries are one token early"),
        pytest.param(
            _ROTARY, lambda one: one.packed(*one.pack(1)), "other_samples", "whose boundaries are one token late",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            _LEARNED, _counted_through, "positions", "whose positions count through it", marks=pytest.mark.slow
        ),
        (_LEARNED, _slots, "positions", "is a padded batch whose positions count the padding"),
        (_ROTARY, lambda one: one.padded(torch.ones_like(one.mask_BS)), "padding", "whose mask calls padding tokens"),
        (_LEARNED, _from_one, "positions", "is a padded batch whose positions count from one"),
        (_ROTARY, _anew, "positions", "whose positions begin again at the response"),
        (_HYBRID, _state_over_padding, "padding", "of which the modules that carry a state are handed no mask"),
        (_ROTARY, _half_softmax, "maths", "is each row alone with its log-softmax taken in bfloat16"),
        (_ROTARY, _half_head, "maths", "is each row alone with its head and log-softmax taken in bfloat16"),
        (_ROTARY, lambda one: _moved(one, by_mask=False), "own_keys", "its positions counting slots"),
        pytest.param(
            _LEARNED, lambda one: _moved(one, by_mask=True), "own_keys",
            "is a batch padded on the right under the mask of one padded on the left, in eager", marks=pytest.mark.slow,
        ),
        (_WINDOWED, _misread(sliding_window=None), "maths", "is each row without the config's window of 4 tokens"),
        (_WINDOWED, _misread(sliding_window=5), "maths", "is each row with a window one token longer than"),
        (_WINDOWED, _misread(sliding_window=3), "own_keys", "is each row with a window one token shorter than"),
        (
            _SCALED, _misread(rope_parameters={"rope_type": "default", "rope_theta": 5e5}), "positions",
            "is each row without the config's scaling of its rotations",
        ),
        (
            _SCALED, _misread(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}), "positions",
            "is each row rotated with the base 10000",
        ),
    ],
    ids=[
        "no mask", "early", "late", "counted through", "slots", "padding seen", "from one", "anew", "state",
        "half softmax", "half head", "moved, by slots", "moved",
        "window lost", "window longer", "window shorter", "unscaled", "other base",
    ],
)  # fmt: skip
@pytest.mark.long
def test_the_mistake_that_gives_the_recording_is_named_with_what_it_does(
    tmp_path: Path, config: hf.PreTrainedConfig, recorded: Callable[[Trainer], torch.Tensor], kind: str, said: str
) -> None:
    doc = answer(tmp_path / "dump", config, recorded)
    cause = doc["cells"][doc["baseline"]]["cause"]
    assert cause["kind"] == kind, cause
    assert said in cause["sentence"]
    assert exit_code(doc) == 1
    assert replay_report(doc).startswith("RECORDING  log_probs is not what each row alone computes")
    assert f"  {kind}: the recording: recorded log_probs {said.removeprefix('whose')}"[:40] in replay_report(doc)


_FORWARD = """
import torch


def log_probs(model, batch):
    ids, mask = batch["input_ids"], batch["attention_mask"]
    slots = torch.arange(ids.shape[1])[None].expand_as(ids)
    logits = model(ids, attention_mask=mask, position_ids=slots, use_cache=False).logits
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
"""


@pytest.mark.long
def test_a_trainers_own_forward_is_told_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_forward_of_a_test.py").write_text(_FORWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = {"forward": "own_forward_of_a_test:log_probs", "forward_path": str(tmp_path)}
    doc = answer(tmp_path / "dump", _LEARNED, Trainer.padded, **asked)
    cause = doc["cells"][-1]["cause"]
    assert cause["kind"] == "positions", cause
    assert "its forward: what it gives is a padded batch whose positions count the padding" in cause["sentence"]
    assert exit_code(doc) == 1


_SORTED = """
def log_probs(model, batch):
    ids, mask = batch["input_ids"], batch["attention_mask"]
    order = mask.sum(1).argsort(descending=True, stable=True)
    ids, mask = ids[order], mask[order]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
"""
_SMOOTHED = """
def log_probs(model, batch):
    ids, mask = batch["input_ids"], batch["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits.float()
    logprobs = logits.log_softmax(-1)
    return .9 * logprobs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0] + .1 * logprobs.mean(-1)[:, :-1]
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "dtype", "kind", "said"),
    [
        (_SORTED, "float32", "other_samples", "which rows stand beside it decides"),
        # Within the bounds of bfloat16, and further off than bfloat16 moves these tokens.
        (_SMOOTHED, "bfloat16", "maths", "no other row has a part in it"),
    ],
)
def test_a_trainers_own_forward_is_asked_of_rows_by_themselves(
    code: str, dtype: str, kind: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"own_forward_by_rows_{kind}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = {"forward": f"{name}:log_probs", "forward_path": str(tmp_path)}
    doc = answer(tmp_path / "dump", _ROTARY, Trainer.padded, dtype=dtype, **asked)
    cell = doc["cells"][-1]
    assert cell["agreement"]["agrees"] is False
    assert cell["cause"]["kind"] == kind, cell["cause"]
    assert said in cell["cause"]["sentence"]
    assert exit_code(doc) == 1


_TWO_ROWS = """
import torch
def log_probs(model, batch):
    ids, mask = batch["input_ids"], batch["attention_mask"]
    positions, found = (mask.cumsum(1) - 1).clamp(min=0), []
    for at in range(0, len(ids), 2):
        few = slice(at, at + 2)
        logits = model(ids[few], attention_mask=mask[few], position_ids=positions[few], use_cache=False).logits.float()
        found.append(logits[:, :-1].log_softmax(-1).gather(-1, ids[few, 1:, None])[..., 0])
    return torch.cat(found)
"""


def test_a_right_forward_that_is_rounded_otherwise_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}._LENGTHS", (30, 25, 33, 28))
    (tmp_path / "own_forward_two_rows.py").write_text(_TWO_ROWS)
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = {"forward": "own_forward_two_rows:log_probs", "forward_path": str(tmp_path)}
    cell = answer(tmp_path / "dump", _LEARNED, Trainer.padded, dtype="bfloat16", **asked)["cells"][-1]
    assert cell["agreement"]["agrees"] is True
    assert cell["cause"] is None or cell["cause"]["is_noise"]


@pytest.mark.parametrize(("most", "is_explained"), [(0.03, True), (5.0, False)])
def test_half_precision_explains_a_forward_only_where_it_explains_every_token(
    most: float, is_explained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    finer_N = -random.uniform(1, 8, 2000) / 3
    alone_N = finer_N + random.normal(0, 0.005, 2000)
    own_N = alone_N.copy()
    own_N[7] += most
    noise = Explained.of_tokens(own_N, alone_N, finer_N)
    assert noise.explains, "of a recording a few tokens may be sent elsewhere"
    monkeypatch.setattr(request, "_noise_of", lambda *_asked: (noise, 0.0))
    assert (request._explained(cast("Bench", None), own_N, small_batch()) is not None) == is_explained


@pytest.mark.long
def test_rows_are_asked_of_its_forward_in_a_matrix_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_forward_in_a_matrix.py").write_text(_SMOOTHED)
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = {"forward": "own_forward_in_a_matrix:log_probs", "forward_path": str(tmp_path)}
    doc = answer(tmp_path / "dump", _ROTARY, Trainer.padded, matrix="packing=off,on", **asked)
    cell = doc["cells"][-1]
    assert cell["forward"]
    assert cell["cause"]["kind"] == "maths"
    assert "no other row has a part in it" in cell["cause"]["sentence"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainers_own_forward_that_is_right_agrees(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_forward_right.py").write_text(_SMOOTHED.replace(".9 *", "").split(" + .1")[0] + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = {"forward": "own_forward_right:log_probs", "forward_path": str(tmp_path)}
    cell = answer(tmp_path / "dump", _ROTARY, Trainer.padded, dtype=dtype, **asked)["cells"][-1]
    assert cell["agreement"]["agrees"] is True
    assert cell["cause"] is None


@pytest.mark.long
def test_weights_of_the_step_before_are_named(tmp_path: Path) -> None:
    def before(trainer: Trainer) -> torch.Tensor:
        old = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "dump" / "checkpoints" / "step_000000").eval()
        trainer.model = old
        return trainer.padded()

    cause = answer(tmp_path / "dump", _ROTARY, before)["cells"][0]["cause"]
    assert cause["kind"] == "maths"
    assert "is each row under the weights of step 0" in cause["sentence"]


def test_what_no_known_mistake_gives_is_other_maths_and_says_what_was_tried(tmp_path: Path) -> None:
    cause = answer(tmp_path / "dump", _ROTARY, _temperature)["cells"][0]["cause"]
    assert cause["kind"] == "maths"
    assert "it is not a padded batch whose positions count the padding, nor " in cause["sentence"]
    assert "nor each row under the weights of step 0" in cause["sentence"]


def test_a_small_part_that_is_off_where_the_rest_is_exact_is_no_half_precision(tmp_path: Path) -> None:
    """A leak that moves later samples by thousandths of a nat: within what a recording in bfloat16 may be off."""

    def leaks_a_little(trainer: Trainer) -> torch.Tensor:
        right_BT, leaking_BT = trainer.padded(), _no_mask(trainer)
        return right_BT + 0.01 * (leaking_BT - right_BT)

    doc = answer(tmp_path / "dump", _ROTARY, leaks_a_little)
    assert exit_code(doc) == 1
    assert "are exactly what each row alone computes in float32" in replay_report(doc).splitlines()[0]


def test_a_log_softmax_in_half_of_a_forward_in_half_is_no_fault(tmp_path: Path) -> None:
    def in_half(trainer: Trainer) -> torch.Tensor:
        trainer.model.bfloat16()
        return _half_softmax(trainer)

    assert exit_code(answer(tmp_path / "dump", _ROTARY, in_half)) == 0


def test_a_recording_in_bfloat16_has_no_exact_tokens(tmp_path: Path) -> None:
    def in_half(trainer: Trainer) -> torch.Tensor:
        trainer.model.bfloat16()
        return trainer.padded().float()

    assert exit_code(answer(tmp_path / "dump", _ROTARY, in_half)) == 0


def test_a_recording_that_is_right_is_asked_nothing(tmp_path: Path) -> None:
    doc = answer(tmp_path / "dump", _ROTARY, Trainer.padded)
    assert doc["cells"][0]["cause"] is None
    assert exit_code(doc) == 0


@pytest.mark.parametrize("is_noise", [False, True])
def test_what_is_each_row_alone_but_for_rounding_is_no_mistake(is_noise: bool) -> None:
    """A mistake that gives the recording, and that is itself what each row alone gives, up to rounding."""
    flags = Flags()

    def why_beside(result: Any, _flags: Flags, _name: str) -> dict[str, Any]:
        return {"kind": "rounding" if is_noise else "padding", "sentence": "how it was asked", "is_noise": is_noise}

    bench = SimpleNamespace(
        baseline=SimpleNamespace(cell={"flags": flags.to_mapping()}, run=None),
        plan=SimpleNamespace(model="init", step=None),
        expected=0, beside=lambda _flags, name: SimpleNamespace(run=True, name=name), why_beside=why_beside,
    )  # fmt: skip
    ids, mask = torch.ones(2, 4, dtype=torch.long), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    held = {"name": "log_probs", "field": "log_probs", "mean_abs": 1.0, "max_abs": 2.0}
    cause = guesses.explain(
        cast(Bench, bench), held, lambda result: (0.0, 0.0) if result.name == "full_mask" else (0.9, 1.8),  # type: ignore[attr-defined]
        Run(Path("dump"), "native", []), padded_batch(ids, mask), was_packed=False,
    )  # fmt: skip
    made = "a padded batch whose mask calls padding tokens"
    assert (f"is {made}:" in cause["sentence"]) is not is_noise
    assert (f"nor {made}, nor" in cause["sentence"]) is is_noise
