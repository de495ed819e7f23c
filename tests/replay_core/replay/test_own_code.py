"""The user's own code: found where it lies, its answer laid on the batch's tokens, its failures named."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from replay_core.errors import CellError, RequestError
from replay_core.replay import own_code

IDS = torch.arange(10).reshape(2, 5)


@pytest.fixture
def code(tmp_path):
    """`code(text)` writes a module of its own into a folder and gives (its name, the folder)."""
    names = []

    def write(text: str) -> tuple[str, str]:
        names.append(f"users_code_{tmp_path.name.replace('-', '_')}_{len(names)}")
        (tmp_path / f"{names[-1]}.py").write_text(text)
        return names[-1], str(tmp_path)

    yield write
    for name in names:
        sys.modules.pop(name, None)


def said(code, expression: str) -> torch.Tensor:
    module, folder = code(f"import torch\ndef f(model, batch):\n    return {expression}\n")
    return own_code.logprobs(f"{module}:f", folder, None, {"input_ids": IDS})


@pytest.mark.parametrize(
    ("expression", "first_row"),
    [
        ("batch['input_ids'].double()", [0, 1, 2, 3, 4]),
        # [B, S-1] is about tokens 1..4, so it begins at index 0, and nothing follows the last token.
        ("batch['input_ids'][:, 1:].float()", [1, 2, 3, 4, 0]),
        # The last two tokens' logprobs stand at the indices before them.
        ("batch['input_ids'][:, -2:].float()", [0, 0, 3, 4, 0]),
    ],
)
def test_every_form_of_answer_lands_on_the_token_before_the_one_it_is_about(code, expression, first_row):
    answer = said(code, expression)
    assert (answer.dtype, tuple(answer.shape)) == (torch.float32, (2, 5))
    assert answer[0].tolist() == first_row


@pytest.mark.parametrize(
    "expression", ["None", "torch.zeros(5)", "torch.zeros(3, 5)", "torch.zeros(2, 6)", "torch.zeros(2, 5, 7)"]
)
def test_what_is_no_log_probability_of_this_batch_is_refused(code, expression):
    with pytest.raises(CellError, match="returned no log-probabilities of this batch") as refused:
        said(code, expression)
    assert refused.value.expected.startswith("[2, 5], [2, 4]")


@pytest.mark.long
def test_an_exception_is_named_in_one_line_and_an_exit_ends_nothing(code):
    module, folder = code("def f(): raise ValueError('first\\nsecond')\ndef g(): raise SystemExit(0)\n")
    with pytest.raises(CellError, match="raised ValueError: first") as failed:
        own_code.model(f"{module}:f", folder)
    assert "second" not in str(failed.value)
    with pytest.raises(CellError, match="raised SystemExit: 0"):
        own_code.model(f"{module}:g", folder)


@pytest.mark.long
def test_code_that_is_not_there_is_a_wrong_request(code):
    module, folder = code("x = 3\n")
    for reference in (f"{module}:absent", f"{module}:x", "nosuchmodule:f", module):
        with pytest.raises(RequestError):
            own_code.function(reference, folder)


def test_a_module_that_cannot_be_imported_fails_and_the_path_is_as_before(code):
    module, folder = code("raise OSError('no cluster')\n")
    before = list(sys.path)
    with pytest.raises(CellError, match="OSError: no cluster"):
        own_code.function(f"{module}:f", folder)
    assert sys.path == before


@pytest.mark.long
def test_a_process_that_the_code_forks_and_lets_come_back_answers_nothing(code, tmp_path):
    module, folder = code(
        "import os, time\n"
        "def f():\n"
        "    forked = os.fork()\n"
        "    if forked:\n"
        "        os.waitpid(forked, 0)\n"
        "    return str(os.getpid())\n"
    )
    answers = tmp_path / "answers"
    answer = own_code._called("f", own_code.function(f"{module}:f", folder))
    with answers.open("a") as file:
        file.write(f"{answer}\n")
    assert answers.read_text() == f"{os.getpid()}\n", "one process came back"


class _Tuned(torch.nn.Module):
    """As PEFT lays itself around a model: what it wraps is asked for by name."""

    def __init__(self, model, *, in_front=False):
        super().__init__()
        self.base_model, self.peft_config = model, {}
        self.active_peft_config = SimpleNamespace(is_prompt_learning=in_front, peft_type="PROMPT_TUNING")

    def get_base_model(self):
        return self.base_model


def test_the_model_within_what_trainers_lay_around_it_is_replayed():
    model = torch.nn.Linear(2, 2)
    assert own_code.unwrapped(model) is model
    assert own_code.unwrapped(_Tuned(model)) is model
    assert own_code.unwrapped(torch.compile(_Tuned(model), backend="eager")) is model
    with pytest.raises(CellError, match="tokens of its own in front of every row"):
        own_code.unwrapped(_Tuned(model, in_front=True))
