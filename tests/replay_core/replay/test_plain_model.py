"""A factory's model that is none of transformers' is replayed as one is: any module that makes logits of tokens."""

from pathlib import Path

import pytest
import torch
from torch import nn

from replay_core import pages
from replay_core.dumps import open_run
from replay_core.errors import CellError
from replay_core.export.outcome import exit_code
from replay_core.replay.plain_model import PlainModel, as_causal_lm
from tests.replay_core.replay.conftest import VOCABULARY, small_batch

ROOT = Path(__file__).parents[3]
WIDTH, HEADS, MOST = 32, 4, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x_BSD, allowed_BSS):
        batch, width, _ = x_BSD.shape
        q, k, v = self.qkv(self.norm(x_BSD)).view(batch, width, 3 * HEADS, -1).transpose(1, 2).chunk(3, dim=1)
        scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~allowed_BSS[:, None], -1e4)
        seen = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, width, WIDTH)
        x_BSD = x_BSD + self.out(seen)
        return x_BSD + self.mlp(x_BSD)


class Policy(nn.Module):
    """Written by hand; what it takes and puts out has names of its own."""

    def __init__(self, *, sees_padding=False):
        super().__init__()
        self.sees_padding = sees_padding
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(MOST, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens, pad_mask):
        valid = pad_mask.bool()
        width = tokens.shape[1]
        allowed = torch.ones(width, width, dtype=torch.bool).tril()[None]
        if not self.sees_padding:
            allowed = allowed & valid[:, None] | torch.eye(width, dtype=torch.bool)[None]
        x_BSD = self.words(tokens) + self.places((valid.cumsum(-1) - 1).clamp(min=0))
        for block in self.blocks:
            x_BSD = block(x_BSD, allowed.expand(len(tokens), -1, -1))
        return {"logits": self.head(x_BSD)}


class Told(Policy):
    """Takes positions, and puts out a tuple."""

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return super().forward(input_ids, mask)["logits"], position_ids


class Swallowing(Policy):
    """Has a word of its own for the tokens, and takes whatever else it is given."""

    def forward(self, token_ids, **given):
        mask = given.get("attention_mask")
        return super().forward(token_ids, torch.ones_like(token_ids) if mask is None else mask)


class OfLast(Policy):
    """Without targets it says what comes next, as nanoGPT's, and of padding it knows nothing."""

    def forward(self, idx, targets=None):
        logits = super().forward(idx, torch.ones_like(idx))["logits"]
        if targets is None:
            return logits[:, [-1]], None
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Wrapper(nn.Module):
    """What it holds has the names that a replay asks for."""

    def __init__(self):
        super().__init__()
        self.base_model, self.config = _seeded(Policy), {"width": WIDTH}

    def get_output_embeddings(self):
        return self.base_model.head

    def forward(self, input_ids, attention_mask=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        logits = self.base_model(input_ids, mask)["logits"]
        assert self.config["width"] == self.get_output_embeddings().in_features
        return logits


def wrapped():
    return Wrapper()


def of_last():
    return _seeded(OfLast)


def swallowing():
    return _seeded(Swallowing)


def _seeded(kind, **settings):
    torch.manual_seed(0)
    model = kind(**settings)
    for one in model.parameters():
        if one.ndim > 1:
            nn.init.normal_(one, std=0.15)
    return model


def right():
    return _seeded(Policy)


def told():
    return _seeded(Told)


def seeing_padding():
    return _seeded(Policy, sees_padding=True)


def of_one_call():
    """Another in its very first call."""
    model = right()
    model.calls = 0

    def louder(_module, _args, put):
        model.calls += 1
        return put if model.calls > 1 else 2 * put

    model.blocks[1].register_forward_hook(louder)
    return model


def unfinished():
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.LazyLinear(VOCABULARY))


def inferring():
    with torch.inference_mode():
        return right()


def trainers_own(model, batch):
    """Its trainer reads what it puts out by the name that it gave it."""
    assert type(model).__name__ == "Policy"
    put = model(batch["input_ids"], pad_mask=batch["attention_mask"])
    assert type(put) is dict
    ids_BS = batch["input_ids"]
    logits_BSV = put["logits"][:, :-1] / batch["temperature"]
    return logits_BSV.log_softmax(-1).gather(-1, ids_BS[:, 1:, None])[..., 0]


def plan(model):
    return {"model": f"factory:{__name__}:{model}", "forward_path": str(ROOT)}


@pytest.mark.parametrize("model", ["right", "told", "swallowing", "wrapped"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.long
def test_a_module_of_nobodys_library_agrees_with_each_row_alone(ask, model, dtype):
    answer = ask(f"packing=off dtype={dtype}", plan=plan(model), why=True)
    assert exit_code(answer) == 0, [cell["cause"] for cell in answer["cells"]]
    assert any("is no model of transformers'" in note for note in answer["notes"])


def test_one_that_says_the_last_word_alone_is_asked_for_all():
    model, ids_BS = as_causal_lm(of_last(), of_last).eval(), torch.tensor([[3, 4, 5], [6, 7, 8]])
    with torch.no_grad():
        assert torch.equal(model(ids_BS).logits[:, -1:], of_last().eval()(ids_BS)[0])
        assert model(ids_BS).logits.shape == (2, 3, VOCABULARY)


def test_its_log_probabilities_are_those_of_its_logits(ask):
    answer = ask("packing=off", plan={**plan("right"), "temperature": 1.0})
    batch, model = small_batch(), right()
    row = 1
    ids_1T = torch.from_numpy(batch.ids_BS[row : row + 1])[:, batch.valid_BS[row]]
    with torch.no_grad():
        logits_TV = model(ids_1T, torch.ones_like(ids_1T))["logits"][0]
    wanted_T = logits_TV.log_softmax(-1)[:-1].gather(-1, ids_1T[0, 1:, None])[:, 0]
    assert exit_code(answer) == 0
    (found_BS,) = (
        pages.array(ref) for record in open_run(Path(answer["cells"][1]["dump"])).records
        if (ref := record.get("policy_logprobs")) is not None
    )  # fmt: skip
    found_T = torch.from_numpy(found_BS[row][found_BS[row] != 0])
    torch.testing.assert_close(found_T.double(), wanted_T.double(), rtol=1e-4, atol=1e-5)


def test_what_it_sees_is_named_with_its_own_modules(ask):
    answer = ask("packing=off", plan=plan("seeing_padding"))
    cause = answer["cells"][-1]["cause"]
    assert cause["kind"] == "padding", cause
    assert "blocks.0" in cause["sentence"]
    assert exit_code(answer) == 1


def test_its_trainers_forward_is_given_what_was_made(ask):
    answer = ask("packing=off", plan={**plan("right"), "forward": f"{__name__}:trainers_own"})
    assert exit_code(answer) == 0, [cell["cause"] for cell in answer["cells"]]


@pytest.mark.parametrize(("model", "said"), [("unfinished", "no size of 1.weight"), ("inferring", "inference_mode")])
def test_weights_that_nobody_can_write_are_refused_by_name(ask, model, said):
    answer = ask("packing=off", plan=plan(model))
    assert exit_code(answer) != 0
    assert said in str([cell.get("error") for cell in answer["cells"]])


def test_its_first_call_is_left_to_the_replay(ask):
    answer = ask("packing=off", plan=plan("of_one_call"), why=True)
    assert answer["cells"][answer["baseline"]]["cause"]["kind"] == "state"


def test_its_modules_and_weights_keep_their_names():
    names = list(right().state_dict())
    model = as_causal_lm(right(), right)
    assert isinstance(model, PlainModel)
    assert isinstance(model, Policy)
    assert list(model.state_dict()) == names
    assert model.config.vocab_size == VOCABULARY
    assert model.get_input_embeddings() is model.words


class LossMask(Policy):
    def forward(self, tokens, loss_mask=None, attention_mask=None, start_pos=0, positions=None):
        mask = torch.ones_like(tokens) if attention_mask is None else attention_mask
        assert loss_mask is None
        assert start_pos == 0
        return super().forward(tokens, mask)


class KeyPadding(Policy):
    def forward(self, tokens, key_padding_mask=None):
        return super().forward(tokens, ~key_padding_mask)


def test_an_argument_is_given_what_its_whole_name_says():
    model = as_causal_lm(LossMask(), LossMask)
    assert model._arguments == {"tokens": "tokens", "mask": "attention_mask", "positions": "positions"}
    with pytest.raises(CellError, match="mask whose sense is not known"):
        as_causal_lm(KeyPadding(), KeyPadding)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (3, "returned no model"),
        (nn.Linear(3, 3), "fails on two tokens"),
        (nn.Embedding(9, 4), None),
        (torch.jit.script(nn.Embedding(9, 4)), "cannot be asked"),
        (nn.Sequential(nn.Embedding(9, 4), nn.Flatten()), "makes no logits of the tokens"),
    ],
)
def test_what_makes_no_logits_is_refused_by_what_it_does(made, said):
    if said is None:
        assert as_causal_lm(made, lambda: nn.Embedding(9, 4)).config.vocab_size == len("four")
        return
    with pytest.raises(CellError, match=said):
        as_causal_lm(made, lambda: made)
