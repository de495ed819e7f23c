import pytest
import torch

from replay_core.dumps import open_run
from replay_core.errors import NothingComparableError
from replay_core.recorder import Recorder
from replay_core.replay.segments import segments


@pytest.fixture
def dump(tmp_path):
    """`dump("a", cu_seqlens, hidden, log_probs)` writes a replay's dump and opens it."""

    def write(name, bounds, hidden, logprobs, response=None):
        inputs = {"input_ids": torch.ones(1, bounds[-1], dtype=torch.long), "cu_seqlens": torch.tensor(bounds)}
        if response is not None:
            inputs["response_mask"] = torch.tensor([response])
        with Recorder(tmp_path / name).step(0) as record:
            record("batch_inputs", inputs, micro=0)
            record("modules", {"norm.output": torch.tensor([hidden])}, micro=0)
            record("forward_data", {"log_probs": torch.tensor([logprobs])}, micro=0)
        return open_run(tmp_path / name)

    return write


def test_each_sample_has_its_worst_token_and_its_logprob_differences(dump):
    a = dump("a", [0, 2, 5], [[3.0, 4.0]] * 5, [-1.0, 0.0, -1.0, -1.0, 0.0], [False, True, False, False, True])
    hidden = [[3.0, 4.0]] * 3 + [[3.0, 5.0]] + [[3.0, 4.0]]
    b = dump("b", [0, 2, 5], hidden, [-1.0, 9.0, -1.5, -1.25, 9.0])
    first, second = segments(a, b, "norm.output")
    assert first["worst_token"] == {"position": 0, "rel_l2": 0.0}
    assert second["worst_token"] == {"position": 1, "rel_l2": pytest.approx(0.2)}
    assert first["valid"] == {"logp_max": 0.0, "logp_mean": 0.0}
    assert second["valid"] == {"logp_max": 0.5, "logp_mean": 0.375}, "the last token of a sample predicts nothing"


def test_only_response_tokens_count_as_response(dump):
    response = [False, False, True]
    a = dump("a", [0, 3], [[1.0]] * 3, [-1.0, -1.0, 0.0], response)
    b = dump("b", [0, 3], [[1.0]] * 3, [-2.0, -1.25, 0.0], response)
    (only,) = segments(a, b, "norm.output")
    assert (only["valid"]["logp_max"], only["response"]["logp_max"]) == (1.0, 0.25)


def test_without_a_response_mask_nothing_is_said_about_the_response(dump):
    a = dump("a", [0, 2], [[1.0]] * 2, [-1.0, 0.0])
    assert segments(a, a, "norm.output")[0]["response"] == {"logp_max": None, "logp_mean": None}


def test_an_empty_sample_and_a_single_token_are_no_error(dump):
    a = dump("a", [0, 0, 1, 3], [[1.0]] * 3, [0.0, -1.0, 0.0])
    empty, single, _ = segments(a, a, "norm.output")
    assert (empty["tokens"], empty["worst_token"]) == (0, None)
    assert (single["tokens"], single["valid"]["logp_max"]) == (1, None)


def test_nan_is_the_worst_token(dump):
    a = dump("a", [0, 2], [[1.0]] * 2, [-1.0, 0.0])
    b = dump("b", [0, 2], [[50.0], [float("nan")]], [-1.0, 0.0])
    assert segments(a, b, "norm.output")[0]["worst_token"]["position"] == 1


def test_other_samples_or_a_missing_tensor_are_not_compared(dump):
    a = dump("a", [0, 2, 5], [[1.0]] * 5, [0.0] * 5)
    with pytest.raises(NothingComparableError, match="different samples"):
        segments(a, dump("b", [0, 3, 5], [[1.0]] * 5, [0.0] * 5), "norm.output")
    with pytest.raises(NothingComparableError, match=r"no ln_f\.output"):
        segments(a, a, "ln_f.output")


def test_segments_need_no_torch():
    import subprocess
    import sys

    code = "import sys; import replay_core.replay.segments; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"
