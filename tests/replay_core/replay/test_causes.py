"""From what interventions showed to one kind and one sentence."""

import pytest

from replay_core.replay.causes import cause_of, cause_of_reference, is_rounding, line


def rows(*distances, tokens=5):
    return [
        {"sample": n, "tokens": tokens, "worst_token": {"position": 0, "rel_l2": value}}
        for n, value in enumerate(distances)
    ]


def sight(what, kind="mixer", by="cell", relation="own", order=5, moved=True, **more):
    where = {"tensor": "layers.0.x.output", "module": "layers.0.x", "kind": kind, "order": order}
    tokens = [{"sample": 1, "relation": relation, "tokens": 3, "first": 0, "last": 2}]
    return {"by": by, "what": what, "sample": 0 if what == "other" else None, "token": 2,
            "moved": tokens if moved else [], "deaf": [], "first": where if moved else None, **more}  # fmt: skip


def evidence(*visibility, **more):
    return {
        "arithmetic": "float64", "apart": 0.5, "logp_apart": 0.0, "kernels_apart": 0.0, "truth": {}, "smallest": None,
        "first": None, "lost": None, "single_agrees": None, "visibility": list(visibility), "mixture": False,
        "packed": True, "shifted": False, **more,
    }  # fmt: skip


def kind(*visibility, **more):
    return cause_of(evidence(*visibility, **more), rows(0.0, 1.0), 1e-3)["kind"]


@pytest.mark.parametrize(
    ("seen", "named"),
    [
        (sight("other"), "other_samples"),
        (sight("other", "state"), "state"),
        (sight("again", "other"), "state"),
        (sight("other", "other"), "batch"),
        (sight("other", "router"), "batch"),
        (sight("padding"), "padding"),
        (sight("token", relation="earlier"), "future"),
        (sight("token", moved=False, deaf=[0]), "own_keys"),
    ],
)
def test_what_moved_and_in_what_kind_of_module_names_the_cause(seen, named):
    assert kind(seen) == named


def test_what_leaks_first_is_the_cause_of_what_follows():
    late_future = sight("token", relation="earlier", order=30)
    assert kind(late_future, sight("padding", order=4)) == "padding"
    assert kind(sight("padding"), sight("token", relation="earlier")) == "future", "a dropped mask shows both at once"


def test_the_future_that_only_padded_samples_see_comes_through_the_padding():
    both = (sight("padding"), sight("token", relation="earlier"))
    assert kind(*both, sight("other", moved=False)) == "padding", "sample 0 has no padding and sees nothing"
    assert kind(*both) == "future"


def moves(changed, *moved, where="other"):
    listed = [{"sample": one, "relation": "other", "tokens": 3, "first": 0, "last": 2} for one in moved]
    return {**sight("other", where, moved=bool(moved)), "sample": changed, "moved": listed}


def test_rows_that_attention_mixes_both_ways_depend_on_the_batch():
    both_ways = [moves(0, 1, 2, where="mixer"), moves(1, 0, 2, where="mixer")]
    assert kind(*both_ways, packed=False) == "batch", "rows see each other nowhere"
    assert kind(*both_ways) == "other_samples", "a pack without its masks"
    turned = [{**moves(n, (n + 1) % 3), "first": None} for n in range(3)]
    assert kind(*turned, packed=False) == "other_samples", "each row is another's"
    assert kind(moves(0, 1, where="mixer"), moves(1, 2, where="mixer"), packed=False) == "other_samples"


def test_rows_that_are_handed_on_to_one_other_each_are_no_statistic_of_the_batch():
    turned = [moves(0, 1, where="mixer"), moves(1, 2, where="mixer"), moves(2, 0, where="mixer")]
    assert kind(*turned, packed=False) == "batch", "by the last layer"
    assert kind(*turned, packed=False, handed_round=True) == "other_samples"
    told = [{**one, "spread": 0.5, "reach": 1.0} for one in (moves(0, 1), moves(1, 2), moves(2, 0))]
    assert kind(*told, packed=False) == "batch"
    assert kind(*told, packed=False, handed_round=True) == "other_samples", "what works on each token by itself, too"


def test_a_token_that_a_larger_batch_loses_is_told_before_the_size_of_the_batch():
    lost = {"module": "layers.0.self_attn", "token": 15, "itself": False, "among": "company"}
    told = cause_of(evidence(sight("company"), lost=lost), rows(0.0, 1.0), 1e-3)
    assert told["kind"] == "own_keys"
    assert "token 15 moves later ones of its sample when alone, not in a pack of one sample more" in told["sentence"]
    wider = cause_of(evidence(sight("wider"), lost={**lost, "among": "wider"}, packed=False), rows(1.0), 1e-3)
    assert "not in wider padding" in wider["sentence"]


def test_what_every_row_hands_to_the_next_is_state_and_what_takes_all_is_not():
    scan = [moves(0, 1, 2), moves(1, 2), moves(2)]
    assert kind(*scan, packed=False) == "state", "each row begins with what the row before it left"
    assert kind(moves(0, 1, 2), moves(1), moves(2), packed=False) == "batch", "the greatest of all is in sample 0"
    assert kind(moves(0, 1), moves(1), packed=False) == "batch", "with two rows that cannot be told apart"
    arriving = [moves(0, 1, 2, where="router"), moves(1, 2, where="router"), moves(2, where="router")]
    assert kind(*arriving, packed=False) == "batch", "experts that are full by the time a row comes"


def test_what_moves_with_the_seed_alone_is_random_and_no_state():
    told = cause_of(evidence(sight("seed", "other")), rows(1.0), 1e-3)
    assert told["kind"] == "random"
    assert "is random: changing the seed alone (dropout left on?) moves 3 tokens of sample 1" in told["sentence"]


def test_what_differs_in_a_model_loaded_anew_is_state():
    told = cause_of(evidence(sight("fresh", "other", by="reference")), rows(1.0), 1e-3)
    assert told["kind"] == "state"
    assert "each row alone, to which it is held, does so itself" in told["sentence"]


def test_how_much_padding_or_company_there_is_tells_only_where_nothing_else_does():
    turned = {"tensor": "rotary_emb.output.0", "module": "rotary_emb", "kind": "position", "order": 0}
    wider, company = sight("wider"), sight("company")
    assert kind(wider, packed=False) == "batch", "the length of the padding, not what stands in it"
    assert kind(wider, sight("padding"), packed=False) == "padding", "and what stands in it"
    assert kind(company) == "batch"
    assert kind(wider, first=turned, packed=False) == "positions", "positions that count the padding"
    assert kind(wider, sight("other", by="cell", order=9), packed=False) == "other_samples"


def test_a_sample_that_is_right_without_its_padding_depends_on_the_padded_length():
    still = sight("padding", moved=False)

    def told(*seen, **more):
        return cause_of(evidence(*seen, packed=False, **more), rows(1.0), 1e-3)

    alone = told(still, unpadded_agrees=True, single_agrees=False)
    assert alone["kind"] == "batch"
    assert "depends on the batch: on the padded length: without its padding a sample is right" in alone["sentence"]
    assert "could not be changed" not in alone["sentence"]
    assert told(still, unpadded_agrees=False, single_agrees=False)["kind"] == "maths"
    # Where its padding stays and the other rows go, it is those that it depends on.
    assert "padded length" not in told(still, unpadded_agrees=True, single_agrees=True)["sentence"]
    assert "what stands in the padding could not be changed" in told(sight("wider"))["sentence"]


def test_what_is_one_where_nothing_is_rotated_is_positions():
    attention = {"tensor": "layers.1.self_attn.output.0", "module": "layers.1.self_attn", "kind": "mixer", "order": 9}
    assert kind(first=attention, unturned_agrees=True) == "positions"
    assert kind(first=attention, unturned_agrees=False) == "maths"


def test_what_a_single_row_shows_does_not_depend_on_the_others():
    small = {"rows": 1, "tokens": [3], "layers": None, "of_layers": None}
    told = cause_of(evidence(single_agrees=True, packed=False, smallest=small), rows(1.0), 1e-3)
    assert told["kind"] == "maths"
    assert "a sample by itself is right" not in told["sentence"]


def test_a_kernel_that_all_share_is_held_to_eager():
    lost = {"first": None, "lost": {"module": "layers.0.self_attn", "token": 4, "itself": False}}
    told = cause_of(evidence(apart=0.0, kernels_apart=0.6, kernel=lost), rows(0.0), 1e-3)
    assert (told["kind"], told["is_noise"]) == ("own_keys", False)
    assert "token 4 moves later ones of its sample in eager, not in this kernel" in told["sentence"]
    assert cause_of_reference(evidence(kernels_apart=0.6, kernel=lost))["kind"] == "own_keys"
    assert cause_of_reference(evidence(kernels_apart=0.01, kernel_noise=0.03)) is None, "it rounds to bfloat16 inside"


def test_what_runs_from_sample_to_sample_is_no_work_on_the_whole_batch():
    assert kind(moves(0, 1), moves(1, 2), moves(2)) == "other_samples"
    assert kind(moves(0, 1), moves(1, 2), moves(2, 0)) == "batch", "a later sample moves an earlier one"
    assert kind(moves(0, 1, 2), moves(1), moves(2)) == "batch", "the greatest of all is in sample 0"
    last_token = sight("token", "other", relation="earlier", order=9)
    assert kind(moves(0, 1), moves(1, 2), moves(2), last_token) == "other_samples", "sample 1 comes after sample 0"


def test_what_leaves_a_sample_out_is_no_work_on_the_whole_batch():
    swapped = [moves(0, 1), moves(1, 0), moves(2)]
    assert kind(*swapped) == "other_samples", "two tokens of samples 0 and 1 changed places"
    assert kind(*swapped, packed=False) == "other_samples"
    assert kind(moves(0, 1), moves(1, 0), moves(2, 0)) == "batch"
    assert kind(moves(0, 1), moves(1, 0)) == "batch", "there is nobody else"


def test_what_mixes_tokens_of_a_sample_sees_the_future_or_padding_not_the_batch():
    assert kind(sight("token", "other", relation="earlier"), moves(0), moves(1)) == "future"
    assert kind(sight("padding", "other"), moves(0), moves(1), packed=False) == "padding"
    assert kind(sight("padding", "other"), moves(0, 1), moves(1, 0), packed=False) == "batch"


def test_what_the_padding_of_one_row_moves_of_others_is_of_the_batch():
    of_one_row = {**sight("padding", "other"), "sample": 0}
    assert kind(sight("padding", "other"), of_one_row, moves(0), moves(1), packed=False) == "batch"
    assert "the padding of sample 0" in line(of_one_row)


def test_a_few_tokens_that_come_to_a_few_of_others_are_seen_and_no_work_on_the_whole_batch():
    few, all_of_them = {"spread": 0.03, "reach": 1.0}, {"spread": 1.0, "reach": 1.0}
    assert kind({**moves(0, 1, 2), **few}, moves(1), moves(2), packed=False) == "other_samples", "row 0 in every row"
    assert kind({**moves(0, 1, 2), **all_of_them}, moves(1), moves(2), packed=False) == "batch", (
        "row 0 has the greatest"
    )
    mean = [{**moves(0, 1), **few}, {**moves(1, 0), **few}]
    assert kind(*mean, packed=False) == "batch", "every row moves all tokens of the others, column by column"
    exchanged = [{**one, "spread": 0.03, "reach": 0.03} for one in mean]
    assert kind(*exchanged, packed=False) == "other_samples", "one token of each"


def test_who_comes_later_to_an_expert_that_is_full_depends_on_the_batch():
    assert kind(*(moves(*one, where="router") for one in ((0, 1), (1, 2), (2,)))) == "batch"


def test_rows_whose_experts_work_is_all_anothers_are_exchanged():
    sees = [moves(0, 1, where="router"), moves(1, 0, where="router")]
    assert kind(*sees, symmetric=True, packed=False) == "batch"
    given = [{**one, "given_away": 3} for one in sees]
    assert kind(*given, symmetric=True, packed=False) == "other_samples"


def test_what_moves_only_later_rows_in_either_order_is_handed_on():
    one_way = {**moves(0, 1), "spread": 1.0, "reach": 1.0}
    assert kind(one_way, moves(1), packed=False, forward_only=True) == "state"
    assert kind(one_way, moves(1), packed=False, forward_only=False) == "batch"
    assert kind({**one_way, "spread": 0.03}, moves(1), packed=False, forward_only=True) == "other_samples"


def test_how_many_keys_were_asked_is_said():
    told = cause_of(evidence(asked={"queries": 8, "keys": 106, "heads": 4}), rows(0.0, 1.0), 1e-3)
    assert told["kind"] == "maths"
    assert "(106 keys of 8 tokens asked in 4 heads)" in told["sentence"]


def test_a_kernel_that_differs_from_eager_from_call_to_call_is_state():
    kernel = {"first": None, "lost": None, "visibility": [sight("again", by="reference")]}
    assert cause_of_reference(evidence(kernels_apart=0.6, kernel=kernel))["kind"] == "state"


def test_where_every_token_sees_what_it_may_the_first_module_that_parts_tells():
    turned = {"tensor": "rotary_emb.output.0", "module": "rotary_emb", "kind": "position", "order": 0}
    assert kind(first=turned) == "positions"
    assert kind(lost={"module": "layers.0.self_attn", "token": 0}, first=turned) == "own_keys"
    assert kind(single_agrees=True, packed=False) == "batch"
    assert kind(single_agrees=False) == "maths"


def noise(cell, alone, *, epsilon=2**-7, apart=1e-7, **more):
    figures = [{"typical": one, "most": one, "worst": one} for one in (alone, cell)]
    truth = dict(zip(("reference", "cell"), figures, strict=True))
    return cause_of(evidence(apart=apart, truth=truth, **more), rows(0.0, 0.3), 0.25, epsilon=epsilon)


def test_what_is_one_in_float64_is_noise_as_far_as_each_row_alone_has_it():
    assert noise(0.03, 0.02)["is_noise"] is True
    told = noise(0.5, 0.02)
    assert (told["kind"], told["is_noise"]) == ("rounding", False)
    assert "more than rounding in its own dtype" in told["sentence"]


def test_a_dump_that_is_off_by_what_float64_is_off_by_is_no_rounding():
    told = noise(8e-6, 9e-7, epsilon=2**-23, apart=8e-6)
    assert (told["kind"], told["is_noise"]) == ("maths", False)
    assert "in float64 as well a token is 8e-06 of its norm off" in told["sentence"]


def test_last_places_of_an_arithmetic_that_is_the_dumps_own_are_rounding():
    told = noise(2.4e-7, 0.0, epsilon=2**-23, apart=2.4e-7, arithmetic="float32")
    assert (told["kind"], told["is_noise"]) == ("rounding", True)
    assert noise(8e-6, 9e-7, epsilon=2**-23, apart=8e-6, arithmetic="float32")["kind"] == "maths"


def test_a_float32_model_that_is_no_dumps_is_not_taken_for_rounding():
    told = noise(1.6, 1.6, epsilon=2**-23, apart=6e-16)
    assert (told["kind"], told["is_noise"]) == ("maths", False)
    assert "another one every time it is built" in told["sentence"]


def test_a_head_that_differs_is_no_rounding():
    assert noise(0.02, 0.02, logp_apart=0.5)["kind"] == "maths"


def test_a_shift_of_positions_that_changes_nothing_is_harmless():
    turned = {"tensor": "rotary_emb.output.0", "module": "rotary_emb", "kind": "position", "order": 0}
    told = cause_of(evidence(apart=2e-4, shifted=True, first=turned), rows(0.0, 2e-3), 1e-3)
    assert (told["kind"], told["is_noise"]) == ("rounding", True)


def test_rotations_that_part_where_no_position_is_another_are_no_shift():
    turned = {"tensor": "rotary_emb.output.0", "module": "rotary_emb", "kind": "position", "order": 0}
    told = cause_of(evidence(apart=9e-4, shifted=False, first=turned), rows(0.0, 2e-3), 1e-3)
    assert (told["kind"], told["is_noise"]) == ("positions", False)


def test_what_could_not_be_asked_is_not_known_and_never_noise():
    told = cause_of(None, rows(1.0), 1e-3, failure="the model failed")
    assert (told["kind"], told["is_noise"]) == ("unknown", False)
    assert "the model failed" in told["sentence"]


def test_the_reference_is_asked_itself():
    assert cause_of_reference(evidence(sight("token", by="reference", moved=False))) is None
    wrong = cause_of_reference(evidence(sight("token", by="reference", relation="earlier")))
    assert wrong["kind"] == "future"
    assert wrong["sentence"].startswith("each row alone is wrong itself: sees the future")
    assert cause_of_reference(evidence(kernels_apart=0.7))["kind"] == "maths"


def test_one_row_that_looks_ahead_a_little_sees_the_future_and_one_that_takes_all_depends_on_all():
    def earlier(token, tokens):
        moved = [{"sample": 0, "relation": "earlier", "tokens": tokens, "first": 0, "last": tokens - 1}]
        return {**sight("token", "other", by="reference"), "token": token, "moved": moved}

    assert cause_of_reference(evidence(earlier(1, 1), earlier(10, 1), earlier(19, 1)))["kind"] == "future"
    assert cause_of_reference(evidence(earlier(1, 1), earlier(10, 10), earlier(19, 19)))["kind"] == "batch"


def test_how_many_tokens_of_a_mixture_are_routed_elsewhere_varies_more_than_their_typical_noise():
    alone = {"typical": 0.0087, "most": 0.0101, "worst": 0.19}
    cell = {"typical": 0.0098, "most": 0.0206, "worst": 0.34}
    assert is_rounding(alone, cell, 2**-7, is_mixture=True)
    assert not is_rounding(alone, {**cell, "most": 0.04}, 2**-7, is_mixture=True)
    assert not is_rounding(alone, {**cell, "typical": 0.0206}, 2**-7, is_mixture=True)


def test_what_takes_the_tokens_of_one_row_together_sees_the_future_where_a_row_beside_it_stays():
    moved = [{"sample": 0, "relation": "earlier", "tokens": 10, "first": 0, "last": 9}]
    mean = {**sight("token", "other", by="reference"), "token": 10, "moved": moved}
    assert cause_of_reference(evidence(mean, beside=False))["kind"] == "future"
    assert cause_of_reference(evidence(mean, beside=True))["kind"] == "batch"


def test_what_could_not_be_asked_is_named_and_the_rest_still_answers():
    failed = ["the padding (RuntimeError: no such mask)"]
    told = cause_of(evidence(sight("other"), skipped=failed), rows(0.0, 1.0), 1e-3)
    assert told["kind"] == "other_samples"
    assert told["sentence"].endswith("; not asked, as it failed: the padding (RuntimeError: no such mask)")
    nothing = cause_of(evidence(skipped=failed), rows(0.0, 1.0), 1e-3)["sentence"]
    assert "every token sees what it may" not in nothing


def test_infinities_that_a_document_says_in_words_are_read_as_numbers():
    told = cause_of(evidence(apart="inf", logp_apart="nan"), rows("inf"), 1e-3)
    assert (told["kind"], told["is_noise"]) == ("maths", False)


def test_a_sample_that_moves_others_made_of_one_token_says_so():
    assert "changing sample 0 (where all others are token 7 alone) moves" in line({**moves(0, 1), "amid": 7})


def test_what_is_the_same_in_another_order_takes_all_together_however_few_it_moves():
    few = [{**moves(0, 1), "spread": 0.1, "reach": 0.2}, {**moves(1), "spread": None, "reach": None}]
    assert kind(*few, packed=False) == "other_samples"
    assert kind(*few, packed=False, symmetric=True) == "batch", "who is chosen of all"
    exchanged = [{**one, "given_away": 3} for one in (moves(0, 1), moves(1, 0))]
    assert kind(*exchanged, packed=False, symmetric=True) == "other_samples", "two rows that are exchanged"


def test_other_kinds_that_hold_are_listed_in_their_order():
    seen = (sight("padding", order=4), sight("token", relation="earlier", order=30))
    found = cause_of(evidence(*seen, lost={"token": 1, "module": "layers.0.x"}), rows(0.0, 1.0), 1e-3)
    assert found["kind"] == "padding"
    assert [one["kind"] for one in found["also"]] == ["future", "own_keys"]
    of_the_batch = cause_of(evidence(sight("other", "other"), symmetric=True), rows(0.0, 1.0), 1e-3)
    assert of_the_batch["kind"] == "batch"
    assert [one["kind"] for one in of_the_batch["also"]] == ["other_samples"]
    assert "takes all there is together" in of_the_batch["sentence"]


def test_what_only_tokens_with_an_empty_mask_see_is_a_loss_of_their_keys():
    nothing = {"sample": 0, "token": 0, "tokens": 2, "explains": ["future"]}
    ahead = sight("token", relation="earlier")
    assert kind(ahead, emptied=nothing) == "own_keys"
    assert kind(ahead, sight("padding"), emptied=nothing) == "padding", "others see padding all the same"
    assert kind(ahead, emptied={**nothing, "explains": []}) == "future"


def test_a_statistic_within_attention_is_of_the_batch_where_rows_move_each_other_beside():
    ahead = sight("token", relation="earlier", by="reference")
    assert kind(ahead, beside=True) == "batch"
    assert kind(ahead, beside=False) == "future"


def test_scores_that_differ_by_where_keys_stand_are_positions():
    assert kind(by_position=True) == "positions"
    assert kind(by_position=False) == "maths"


def test_what_goes_on_over_a_pack_and_does_not_attend_is_state_and_what_it_shifts_is_not():
    def runs(**more):
        moved = [{"sample": 1, "relation": "other", "tokens": 6, "first": 0, "last": 5}]
        told = {"reach": 1.0, "spread": 1.0, "given_away": 0, "onward": 6, **more}
        return [{**sight("other", "other"), "moved": moved, **told}, {**sight("other", moved=False), "sample": 1}]

    told = {"forward_only": True, "symmetric": False, "attends": False}
    assert kind(*runs(), **told) == "state"
    assert kind(*runs(), **{**told, "attends": True}) == "other_samples", "attention under another name"
    assert kind(*runs(onward=1), **told) == "other_samples", "a shift by one"
    assert kind(*runs(given_away=3, onward=3), **told) == "other_samples", "a shift by three"
    assert kind(*runs(onward=0), **told) == "other_samples", "not what follows right behind"
    also = [one["kind"] for one in cause_of(evidence(*runs(), **told), rows(0.0, 1.0), 1e-3)["also"]]
    assert also == ["other_samples"]


def test_a_model_that_loses_keys_in_every_setting_is_told_where_nothing_disagrees():
    lost = {"module": "layers.0.x", "pairs": 9, "of": 40, "query": 5, "key": 0, "itself": False, "beyond": 5}
    told = cause_of(evidence(narrowed=lost, apart=0.0), rows(0.0), 1e-3)
    assert (told["kind"], told["is_noise"]) == ("own_keys", False)
    assert "no token sees one 5 or more before it (9 of 40 pairs so), and the config has no such" in told["sentence"]
    itself = cause_of_reference(evidence(narrowed={**lost, "itself": True}))
    assert "token 5 gives its own key nothing" in itself["sentence"]
    differs = cause_of(evidence(sight("other"), narrowed=lost), rows(0.0, 1.0), 1e-3)
    assert (differs["kind"], [one["kind"] for one in differs["also"]]) == ("other_samples", ["own_keys"])


def test_who_is_off_is_told_by_the_noise_of_this_run_where_it_was_measured():
    leak = sight("other", moved=True)
    truth = {"reference": {"typical": 0.004, "most": 0.004, "worst": 0.005}, "cell": {}}
    some, limit = rows(0.0, 0.13, 0.26, 0.009), 0.25
    assert cause_of(evidence(leak), some, limit)["off"] == [2], "past what the dtype allows anywhere"
    told = cause_of({**evidence(leak), "truth": truth}, some, limit)
    assert (told["off"], told["exact"]) == ([1, 2], [0, 3])
    assert told["sentence"].startswith("samples 1..2 off: sees other samples")
    part = cause_of(evidence(leak), some, limit, noise=0.005)
    assert part["off"] == [1, 2], "of a large batch only a part was asked: the padded batch beside it tells"
