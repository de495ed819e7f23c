"""Faults planted in real models, and what a replay calls them; healthy models beside them. The zoo is a benchmark."""

import pytest
import torch

from benchmarks import replay_zoo as zoo
from replay_core.replay.interventions import Sight, TensorPlace
from replay_core.replay.why import _is_handed_round

BY_NAME = {one.name: one for one in zoo.FAULTS}
#: (fault, architecture, dtype): a fault of every kind.
CHOSEN = (
    ("boundary_early", "llama", "bfloat16"),
    ("padding_visible", "qwen3", "float32"),
    ("first_key_masked", "llama", "float32"),
    ("positions_count_on", "gpt2", "float32"),
    ("state_runs_through_the_pack", "lfm2", "float32"),
    ("token_shift_over_boundaries", "qwen3", "float32"),
    ("two_tokens_change_places", "llama", "float32"),
    ("dropout_on_when_padded", "llama", "float32"),
    ("experts_choose_of_all_tokens", "llama", "float32"),
)
#: Further faults of these kinds.
MORE = (
    ("past_lost_in_the_second_layer", "llama", "bfloat16"),
    ("attention_put_out_as_nothing_when_padded", "gpt_neox", "float32"),
    ("first_tokens_of_rows_alone_kept_for_ever", "llama", "float32"),
    ("queries_scaled_by_the_padded_width", "llama", "float32"),
    ("own_kernel_skips_a_tile", "llama", "float32"),
    ("last_column_of_keys_lost", "qwen3", "float32"),
    ("two_rows_change_places", "llama", "float32"),
    ("mlp_scaled_by_the_padded_length", "gpt2", "float32"),
    ("padding_adds_to_the_first_values", "llama", "float32"),
    ("frequencies_follow_the_padded_length", "llama", "float32"),
    ("two_rows_change_places", "mixtral", "float32"),
    ("a_head_sees_only_itself", "llama", "bfloat16"),
    ("a_head_loses_three_keys", "qwen3", "float32"),
    ("values_scaled_by_tiles_of_16", "llama", "float32"),
    ("last_layer_turns_by_twice_the_positions", "llama", "float32"),
    ("distances_counted_by_fours_in_the_batch", "llama", "float32"),
    ("noise_in_the_pack", "gpt2", "bfloat16"),
    ("places_taken_in_order_of_arrival", "qwen3_moe", "float32"),
    ("running_sum_over_all_rows", "gpt_neox", "bfloat16"),
    ("mlp_scaled_by_the_number_of_samples", "mistral", "float32"),
    ("values_rounded_to_eighths_when_padded", "llama", "float32"),
    ("last_layer_turns_the_other_way", "qwen3", "float32"),
    ("own_kernel_forgets_what_is_far", "gpt2", "bfloat16"),
    ("own_kernel_doubles_the_scores", "llama", "float32"),
    ("mlp_looks_one_ahead_everywhere", "mistral", "float32"),
    ("every_other_call_goes_without_the_last_mlp", "llama", "float32"),
    ("every_third_call_is_louder", "llama", "float32"),
    ("own_key_masked", "gpt_neox", "float32"),
    ("token_shift_reads_padding", "llama", "float32"),
    ("norm_over_the_batch", "gemma2", "bfloat16"),
    ("last_token_visible", "llama", "float32"),
    ("state_kept_between_calls", "gemma2", "bfloat16"),
    ("attention_scaled_in_the_pack", "gpt_neox", "float32"),
    ("experts_permuted_in_the_pack", "mixtral", "bfloat16"),
    ("values_quantised_by_the_greatest_of_the_batch", "llama", "float32"),
    ("first_tokens_are_let_see_nothing", "mistral", "float32"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("zoo")


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "architecture", "dtype"), [*CHOSEN, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)]
)
def test_a_fault_is_named_by_what_it_lets_tokens_see(folder, name, architecture, dtype):
    one = BY_NAME[name]
    flags = f"{one.flags} dtype={dtype} attention={one.attention or 'sdpa'}"
    doc = zoo.replayed(folder, one.layout, flags, architecture, 0.1, False, one.plant)
    wrong = [cell for cell in doc["cells"] if cell["agreement"]["agrees"] is False]
    assert {cell["cause"]["kind"] for cell in wrong} <= set(one.called)
    assert wrong
    assert all(cell["cause"]["evidence"]["visibility"] for cell in wrong)


@pytest.mark.long
@pytest.mark.parametrize(("architecture", "layout", "flags"), [
    ("gemma2", "left", "packing=off attention=eager"),
    ("nanochat", "both", "packing=on"),  # calls one norm several times
    pytest.param("mixtral", "left", "packing=off attention=eager", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_healthy_model_with_wide_weights_agrees_in_bfloat16(folder, architecture, layout, flags):
    doc = zoo.replayed(folder, layout, f"{flags} dtype=bfloat16", architecture, 0.2, False, None)
    assert [cell["agreement"]["agrees"] for cell in doc["cells"]] == [None, True, True][: len(doc["cells"])]


def last_keys_dropped(patient):
    """The keys of the pack that fill no whole block of 4: of 77 the last, which no token but itself would see."""
    patient.seeing(lambda call, seen: seen & (torch.arange(seen.shape[-1]) < seen.shape[-1] // 4 * 4)
                   if call.is_packed else seen)  # fmt: skip


def attention_of_the_row_before(patient):
    for one in patient.attentions:
        zoo.changed_output(one, lambda _given, put: put + put.roll(1, 0) if len(put) > 1 else put)


def a_table_of_places_that_counts_on_over_the_pack(patient):
    """An embedding that nothing but its use says is one of positions."""
    model = patient.model.base_model
    tokens = model.get_input_embeddings()
    model.slots = torch.nn.Embedding(512, tokens.embedding_dim, dtype=tokens.weight.dtype)
    changed = lambda ids, put: put + model.slots(torch.arange(ids.shape[1]).expand(ids.shape)).to(put.dtype)  # noqa: E731
    zoo.changed_output(tokens, changed)


def padding_takes_places(patient):
    """In each row a group of tokens has room for three in the first MLP: who comes later passes it by."""
    groups = 4

    def crowded(given, put):
        mine = torch.nn.functional.one_hot(given[..., :groups].float().argmax(-1), groups)
        fits = (mine.cumsum(1) * mine).sum(-1) <= 3
        return torch.where(fits[..., None], put, torch.zeros_like(put))

    zoo.changed_output(patient.mlps[0], crowded)


@pytest.mark.long
@pytest.mark.parametrize(
    ("plant", "flags", "called"),
    [
        # Tokens take each other's places: none of them is a key.
        (padding_takes_places, "packing=off", "padding"),
        (last_keys_dropped, "packing=on", "own_keys"),
        pytest.param(attention_of_the_row_before, "packing=off", "other_samples", marks=pytest.mark.slow),
        (a_table_of_places_that_counts_on_over_the_pack, "packing=on", "positions"),
    ],
)
def test_what_a_larger_pack_or_the_first_layer_shows_names_the_fault(folder, plant, flags, called):
    doc = zoo.replayed(folder, "left", f"{flags} dtype=float32 attention=sdpa", "llama", 0.1, False, plant)
    wrong = [cell["cause"] for cell in doc["cells"] if cell["agreement"]["agrees"] is False]
    assert {cause["kind"] for cause in wrong} == {called}, [cause["sentence"] for cause in wrong]


def running_mean_over_the_pack(patient):
    """The MLP adds the mean of all that came before in the pack, whatever sample it was of."""

    def carried(_given, put):
        count = torch.arange(1, put.shape[1] + 1, dtype=put.dtype)[None, :, None]
        return put + put.cumsum(1) / count if patient.call.is_packed else put

    for one in patient.mlps:
        zoo.changed_output(one, carried)


def running_greatest_behind_a_block(patient):
    """A block adds the greatest of all that came before in the pack: its attention, within, sees its own sample."""
    block = patient.model.base_model.layers[0]
    zoo.changed_output(block, lambda _given, put: put + 0.6 * put.cummax(1)[0] if patient.call.is_packed else put)


def a_window_that_the_model_does_not_have(patient):
    def near(_call, seen):
        at = torch.arange(seen.shape[-1])
        return seen & (at[:, None] - at < 6)

    patient.seeing(near)


@pytest.mark.long
def test_a_window_that_no_cell_sees_beyond_is_told_where_nothing_disagrees(folder):
    plant, flags = a_window_that_the_model_does_not_have, "packing=off dtype=bfloat16"
    doc = zoo.replayed(folder, "right", flags, "qwen3", 0.1, False, plant, why=True)
    reference, *others = doc["cells"]
    assert (reference["agreement"]["agrees"], reference["cause"]["kind"]) == (False, "own_keys")
    assert "no token sees one 6 or more before it" in reference["cause"]["sentence"]
    assert {cell["cause"]["kind"] for cell in others} == {"own_keys"}


@pytest.mark.long
@pytest.mark.parametrize(("plant", "architecture"), [
    (running_mean_over_the_pack, "llama"),
    (running_greatest_behind_a_block, "llama"),
    pytest.param(running_mean_over_the_pack, "gpt_neox", marks=pytest.mark.slow),
])  # fmt: skip
def test_what_runs_on_over_a_pack_is_state(folder, plant, architecture):
    doc = zoo.replayed(folder, "both", "packing=on dtype=float32", architecture, 0.1, False, plant)
    (cause,) = [cell["cause"] for cell in doc["cells"] if cell["agreement"]["agrees"] is False]
    assert (cause["kind"], [one["kind"] for one in cause["also"]]) == ("state", ["other_samples"]), cause["sentence"]


@pytest.mark.long
@pytest.mark.parametrize("name", [
    "mlp_scaled_by_the_padded_length", pytest.param("values_scaled_by_tiles_of_16", marks=pytest.mark.slow)
])  # fmt: skip
def test_what_only_the_length_of_the_padding_moves_says_so(folder, name):
    one = BY_NAME[name]
    doc = zoo.replayed(folder, one.layout, f"{one.flags} dtype=float32", "llama", 0.1, False, one.plant)
    (cause,) = [cell["cause"] for cell in doc["cells"] if cell["agreement"]["agrees"] is False]
    assert "depends on the batch: on the padded length" in cause["sentence"]
    padding = [
        sight for sight in cause["evidence"]["visibility"] if (sight["what"], sight["by"]) == ("padding", "cell")
    ]
    assert [sight["moved"] for sight in padding] == [[]], "what stands in it moves nothing"


@pytest.mark.slow
def test_the_reference_itself_is_asked_whether_it_sees_the_future(folder):
    doc = zoo.replayed(folder, "both", "packing=on", "llama", 0.1, False, BY_NAME["causal_mask_dropped"].plant)
    reference = doc["cells"][doc["baseline"]]
    assert (reference["agreement"]["agrees"], reference["cause"]["kind"]) == (False, "future")


def _moving(sample, there, module_kind="mixer"):
    first = TensorPlace("layers.1.self_attn.o_proj.inputs.0", "layers.1.self_attn", module_kind)
    return Sight("other", sample, None, [(one, "own", 3, 0, 2) for one in there], first, there=there)


@pytest.mark.parametrize(
    ("there", "kind", "is_read"),
    [
        ([[1], [2], [0]], "other", True),  # rows handed on
        ([[2], [0, 2], [1, 3], [1]], "mixer", True),  # keys repeated along the batch: some rows, nobody all of them
        ([[2], [0, 2], [1, 3], [1]], "other", False),  # the tokens of some experts
        ([[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]], "mixer", False),  # a mean over the batch
    ],
)
def test_what_moves_some_rows_alone_reads_them(there, kind, is_read):
    sights = [_moving(sample, moved, kind) for sample, moved in enumerate(there)]
    assert _is_handed_round(sights) is is_read
