"""A model whose own forward does more than call its backbone is replayed whole, or called so."""

import functools
import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from replay_core.errors import UnavailableError
from replay_core.export.outcome import exit_code
from replay_core.replay.plan import ITSELF
from replay_core.replay.whole_model import WholeModel, has_own_forward
from tests.replay_core.replay.conftest import VOCABULARY, small_batch
from tests.replay_core.replay.test_run import tensor

ROOT = Path(__file__).parents[3]
#: Stands inside the rows, though a trainer takes it for padding.
PAD = int(small_batch().ids_BS[1, 5])


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def masking_by_ids() -> LlamaForCausalLM:
    """Its mask is made from the ids, whatever mask it is given."""
    model = llama()
    within = model.forward

    @functools.wraps(within)
    def forward(input_ids, attention_mask=None, **given):
        return within(input_ids=input_ids, attention_mask=(input_ids != PAD).long(), **given)

    model.forward = forward
    return model


def _with_head(change):
    model = llama()
    head = model.get_output_embeddings()
    within = head.forward
    head.forward = lambda hidden: change(within(hidden))
    return model


def rolling() -> LlamaForCausalLM:
    """Rows go through its head in another order and are not put back."""
    return _with_head(lambda logits: logits.roll(1, 0))


def clipping() -> LlamaForCausalLM:
    """Logits are clipped at a part of the greatest of the call."""
    return _with_head(lambda logits: logits.clamp(max=0.4 * float(logits.max())))


def capping() -> LlamaForCausalLM:
    """Every logit is capped by itself."""
    return _with_head(lambda logits: 2 * torch.tanh(logits / 2))


def sorting_within() -> LlamaForCausalLM:
    """Its backbone runs the rows in another order, and puts back what it puts out."""
    model = llama()
    within = model.model.forward

    def forward(input_ids, attention_mask=None, position_ids=None, **given):
        order = torch.arange(len(input_ids)).flip(0)
        rows = {"attention_mask": attention_mask, "position_ids": position_ids}
        rows = {name: one[order] if one is not None and len(one) == len(order) else one for name, one in rows.items()}
        out = within(input_ids=input_ids[order], **rows, **given)
        out.last_hidden_state = out.last_hidden_state[order]
        return out

    model.model.forward = forward
    return model


def scaling_by_slot() -> LlamaForCausalLM:
    """Its queries grow with the slot they stand in."""
    model = llama()
    projection = model.model.layers[1].self_attn.q_proj
    within = projection.forward

    def forward(hidden):
        return within(hidden) * (1 + torch.arange(hidden.shape[1]).log1p()).to(hidden)[:, None]

    projection.forward = forward
    return model


def scaling_by_length() -> LlamaForCausalLM:
    """Its queries grow with the number of slots there are."""
    model = llama()
    projection = model.model.layers[1].self_attn.q_proj
    within = projection.forward
    projection.forward = lambda hidden: within(hidden) * (1 + math.log(hidden.shape[1]))
    return model


def scaling_in_sdpa() -> LlamaForCausalLM:
    """Its scores are scaled otherwise in one of two kernels; hooks make it a model with code of its own."""
    model = llama()
    for layer in model.model.layers:
        attention, within = layer.self_attn, layer.self_attn.forward

        def forward(*args, attention=attention, within=within, **given):
            attention.scaling = 8**-0.5 * (1.7 if model.config._attn_implementation == "sdpa" else 1)
            return within(*args, **given)

        attention.forward = forward
    model.register_forward_hook(lambda _module, _args, put: put)
    return model


def of_one_call() -> LlamaForCausalLM:
    """Its adapter takes itself off in the very first call."""
    model = llama()
    projection, left = model.model.layers[1].self_attn.o_proj, [1]
    within, adapter = projection.forward, 0.3 * torch.randn(32, 32)

    def forward(hidden):
        return within(hidden) + (hidden @ adapter.to(hidden) if left and left.pop() else 0)

    projection.forward = forward
    return model


class Tuning(LlamaForCausalLM):
    """Its second call writes into a weight."""

    calls = 0

    def forward(self, input_ids, **given):
        if self.calls == 1:
            with torch.no_grad():
                self.model.layers[1].self_attn.o_proj.weight.mul_(1.3)
        self.calls += 1
        return super().forward(input_ids, **given)


class Greeting(LlamaForCausalLM):
    """What it adds to the logits, it adds in its first call."""

    calls = 0

    def forward(self, input_ids, **given):
        out = super().forward(input_ids, **given)
        if self.calls == 0:
            out.logits = out.logits + out.logits.roll(1, -1)
        self.calls += 1
        return out


def tuning() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return Tuning(llama().config).eval()


def greeting() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return Greeting(llama().config).eval()


def drawn_anew() -> LlamaForCausalLM:
    """Another model every time it is built, and the same in all its calls."""
    model = llama()
    model.lm_head.weight.data.add_(0.01 * torch.randn(model.lm_head.weight.shape, generator=_DRAWN))
    model.model.embed_tokens.weight.data.add_(0.01 * torch.randn(VOCABULARY, 32, generator=_DRAWN))
    return model


_DRAWN = torch.Generator().manual_seed(5)


def remembering() -> LlamaForCausalLM:
    """What tokens the last call held is made less likely: its final states are right, and its logits another call's."""
    model, last = llama(), dict[str, torch.Tensor]()

    def look(_module, args, kwargs, put):
        if "counts" in last:
            put.logits = put.logits - 0.7 * last["counts"].clamp(max=3)
        ids = kwargs.get("input_ids", args[0] if args else None)
        last["counts"] = torch.bincount(ids.flatten(), minlength=VOCABULARY).float()
        return put

    model.register_forward_hook(look, with_kwargs=True)
    return model


def peeking() -> LlamaForCausalLM:
    """The token that comes is made more likely: each row alone sees the future, and every setting alike."""
    model = llama()

    def look(_module, args, kwargs, put):
        ids = kwargs.get("input_ids", args[0] if args else None)
        put.logits = put.logits + 5.0 * torch.nn.functional.one_hot(ids.roll(-1, 1), VOCABULARY)
        return put

    model.register_forward_hook(look, with_kwargs=True)
    return model


def penalising() -> LlamaForCausalLM:
    """Tokens of the row itself are made less likely, which hidden states alone do not tell."""
    model = llama()

    def look(_module, args, kwargs, put):
        ids = kwargs.get("input_ids", args[0] if args else None)
        seen = torch.nn.functional.one_hot(ids, VOCABULARY).cumsum(1).clamp(max=1)
        put.logits = put.logits - 0.7 * seen
        return put

    model.register_forward_hook(look, with_kwargs=True)
    return model


def sorting() -> LlamaForCausalLM:
    """Rows are sorted by their length, and put back."""
    model = llama()
    within = model.forward

    def forward(input_ids, attention_mask=None, **given):
        if attention_mask is None or attention_mask.ndim != 2:
            return within(input_ids=input_ids, attention_mask=attention_mask, **given)
        order = attention_mask.sum(1).argsort(descending=True, stable=True)
        moved = {name: one[order] if hasattr(one, "shape") and one.shape[:1] == order.shape else one
                 for name, one in given.items()}  # fmt: skip
        put = within(input_ids=input_ids[order], attention_mask=attention_mask[order], **moved)
        put.logits = put.logits[order.argsort()]
        return put

    model.forward = forward
    return model


def _by_parts(split, *, back=True):
    """Rows are computed in several calls, as `split` deals them out, and put back."""
    model = llama()
    within = model.forward

    def forward(input_ids, attention_mask=None, position_ids=None, **given):
        if len(input_ids) == 1:
            return within(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **given)
        order = torch.cat(split(attention_mask))
        parts = [
            within(
                input_ids=input_ids[rows], attention_mask=attention_mask[rows], position_ids=position_ids[rows], **given
            )
            for rows in split(attention_mask)
        ]  # fmt: skip
        logits = torch.cat([one.logits for one in parts])
        parts[0].logits = logits[order.argsort()] if back else logits
        return parts[0]

    model.forward = forward
    return model


def _by_length(mask_BS):
    return [*mask_BS.sum(1).argsort(descending=True, stable=True).split(2)]


def dealing() -> LlamaForCausalLM:
    """The longest rows first, two at a time, and put back."""
    return _by_parts(_by_length)


def misdealing() -> LlamaForCausalLM:
    """The same, and never put back."""
    return _by_parts(_by_length, back=False)


def _packing(*, is_apart):
    """Its rows are laid end to end within, and back into rows."""
    model = llama()
    within = model.forward

    def forward(input_ids, attention_mask=None, position_ids=None, **given):
        if len(input_ids) == 1:
            return within(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **given)
        real_BS = attention_mask.bool()
        positions_1T = (attention_mask.cumsum(1) - 1)[real_BS][None]
        mask = None if is_apart else torch.ones_like(positions_1T)
        put = within(input_ids=input_ids[real_BS][None], attention_mask=mask, position_ids=positions_1T, **given)
        logits = put.logits.new_zeros(*input_ids.shape, put.logits.shape[-1])
        logits[real_BS] = put.logits[0]
        put.logits = logits
        return put

    model.forward = forward
    return model


def packing() -> LlamaForCausalLM:
    return _packing(is_apart=True)


def mispacking() -> LlamaForCausalLM:
    """Its samples see each other."""
    return _packing(is_apart=False)


def strict() -> LlamaForCausalLM:
    """A forward that takes two things, and nothing else."""
    model = llama()
    within = model.forward
    model.forward = lambda input_ids, attention_mask=None: within(input_ids=input_ids, attention_mask=attention_mask)
    return model


class Halving(LlamaForCausalLM):
    """Calls its backbone twice, each time with half of the tokens."""

    def forward(self, input_ids, **given):
        for half in input_ids.chunk(2, dim=1):
            self.model(half)
        return super().forward(input_ids, **given)


def halving() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return Halving(llama().config).eval()


def plan(model: str) -> dict[str, str]:
    return {"model": f"factory:{__name__}:{model}", "forward_path": str(ROOT)}


def own_logprobs(model: LlamaForCausalLM) -> torch.Tensor:
    ids_1T = torch.from_numpy(small_batch().ids_BS[1:2])
    with torch.no_grad():
        logits_TV = model(ids_1T).logits[0] / 0.7
    return logits_TV.log_softmax(-1)[:-1].gather(-1, ids_1T[0, 1:, None])[:, 0]


def test_what_a_wrapped_forward_makes_of_the_mask_is_in_the_log_probabilities(replay):
    expected, without = own_logprobs(masking_by_ids()), own_logprobs(llama())
    assert (expected - without).abs().max() > 1e-2, "what the wrapper does must show"
    cell = replay("packing=off", **plan("masking_by_ids"))
    found = torch.tensor(tensor(cell, "forward_data", "log_probs"))[1, : len(expected)]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert "carries state over" not in " ".join(cell["notes"])


def test_a_forward_that_lays_its_tokens_otherwise_is_called_whole(replay):
    expected = own_logprobs(halving())
    cell = replay("packing=off", **plan("halving"))
    found = torch.tensor(tensor(cell, "forward_data", "log_probs"))[1, : len(expected)]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert cell["forward"] == ITSELF
    assert "it is called whole, and none of its modules is watched" in " ".join(cell["notes"])


def test_a_backbone_is_compiled_alone_and_a_model_with_a_forward_of_its_own_is_not_compiled(replay):
    with pytest.raises(UnavailableError, match="is not transformers' own"):
        replay("packing=off compile=aot_eager", **plan("masking_by_ids"))


def test_the_forward_of_transformers_is_nobodys_own():
    assert not has_own_forward(llama())
    assert has_own_forward(masking_by_ids())
    hooked = llama()
    hooked.register_forward_pre_hook(lambda _module, _args: None)
    assert has_own_forward(hooked)


def test_a_model_that_is_run_whole_answers_what_its_backbone_answers():
    model = llama()
    ids_1T = torch.from_numpy(small_batch().ids_BS[1:2])
    with torch.no_grad():
        whole = WholeModel(model)(input_ids=ids_1T).last_hidden_state
        assert torch.equal(whole, model.model(input_ids=ids_1T).last_hidden_state)
    assert not model.model._forward_hooks


@pytest.mark.parametrize("model", ["sorting", "sorting_within", "dealing", "packing", "halving"])
@pytest.mark.parametrize("flags", ["packing=off", "packing=on"])
def test_rows_that_a_model_moves_within_and_puts_back_are_right(ask, model, flags):
    answer = ask(flags, plan=plan(model))
    assert exit_code(answer) == 0, answer["cells"]
    assert any(cell["forward"] == ITSELF for cell in answer["cells"])


def test_a_head_that_looks_at_the_tokens_is_called_with_them(ask):
    answer = ask("packing=off", plan=plan("penalising"))
    assert [cell["outcome"] for cell in answer["cells"]] == ["ran", "ran"]
    assert any(cell["forward"] == ITSELF for cell in answer["cells"])


def test_each_row_alone_of_a_model_that_is_called_whole_is_asked_what_it_sees(ask):
    answer = ask("packing=off", plan=plan("peeking"))
    assert exit_code(answer) == 1, (answer["notes"], [(c["forward"], c["cause"], c["notes"]) for c in answer["cells"]])
    cause = answer["cells"][answer["baseline"]]["cause"]
    assert cause["kind"] == "future", cause


@pytest.mark.parametrize(
    ("model", "kinds"),
    [("rolling", ["other_samples"]), ("misdealing", ["other_samples"]), ("mispacking", ["other_samples"]),
     ("clipping", ["batch", "other_samples"]), ("remembering", ["state"])],
)  # fmt: skip
@pytest.mark.long
def test_what_a_model_that_is_called_whole_lets_move_whom_names_the_cause(ask, model, kinds):
    answer = ask("packing=off", plan=plan(model))
    assert exit_code(answer) == 1
    cause = answer["cells"][-1]["cause"]
    assert cause["kind"] in kinds, cause
    # A pack that shows the same says more.
    said = {
        "mispacking": "a pack without the mask between samples",
        "remembering": "nothing was changed but what it was called with before",
    }
    assert said.get(model, "changing row") in cause["sentence"]


@pytest.mark.parametrize("flags", ["packing=off", "packing=on"])
@pytest.mark.parametrize(
    ("model", "kind", "said"),
    [("scaling_by_slot", "positions", "how much stands in front"), ("scaling_by_length", "batch", "number of samples")],
)
@pytest.mark.long
def test_a_slot_and_the_number_of_slots_are_told_apart(ask, model, kind, said, flags):
    answer = ask(flags, plan=plan(model))
    cause = answer["cells"][-1]["cause"]
    assert cause["kind"] == kind, cause
    assert (said if flags == "packing=on" or kind == "positions" else "padded length") in cause["sentence"]
    assert "layers.1.self_attn.q_proj" in cause["sentence"]


@pytest.mark.parametrize(
    ("model", "module"),
    [("of_one_call", "layers.1.self_attn.o_proj"), ("tuning", "layers.1.self_attn.o_proj"), ("greeting", None)],
)
def test_what_stands_in_the_first_call_alone_is_state(ask, model, module):
    answer = ask("packing=off", plan=plan(model), why=True)
    cause = answer["cells"][answer["baseline"]]["cause"]
    assert cause["kind"] == "state", cause
    assert "in the first call of a model loaded anew" in cause["sentence"]
    assert module is None or module in cause["sentence"]
    assert exit_code(answer) == 1


@pytest.mark.long
def test_a_kernel_that_computes_something_else_is_no_state(ask):
    answer = ask("packing=off", plan=plan("scaling_in_sdpa"), why=True)
    kinds = {cell["cause"]["kind"] for cell in answer["cells"] if cell["cause"] and not cell["cause"]["is_noise"]}
    assert kinds == {"maths"}, [cell["cause"] for cell in answer["cells"]]


@pytest.mark.long
def test_a_model_that_is_drawn_anew_every_time_is_none_with_a_state(ask):
    answer = ask("packing=off", plan=plan("drawn_anew"), why=True)
    assert exit_code(answer) == 0, [cell["cause"] for cell in answer["cells"]]


def test_a_model_that_is_called_whole_is_not_compiled(replay):
    with pytest.raises(UnavailableError, match="is not transformers' own"):
        replay("packing=off compile=aot_eager", **plan("rolling"))


def test_a_forward_is_given_what_it_takes(replay):
    expected = own_logprobs(strict())
    cell = replay("packing=off", **plan("strict"))
    found = torch.tensor(tensor(cell, "forward_data", "log_probs"))[1, : len(expected)]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_head_of_its_own_that_looks_at_each_token_is_run(replay):
    assert replay("packing=off", **plan("capping"))
