"""What a module is said by its name and class; one that has a number in a list is what the list is called."""

import pytest
from torch import nn

from replay_core.replay.module_kinds import kind_of


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("name", "module", "kind"),
    [
        ("layers.0.rotary_emb", nn.Identity(), "position"),
        ("layers.0.self_attn", Block(), "mixer"),
        ("layers.0.mamba", Block(), "state"),
        ("layers.0.conv", nn.Conv1d(2, 2, 3), "state"),
        ("layers.0.mlp", Block(), "other"),
        ("layers.0", Block(), "other"),
        ("", Block(), "other"),
        ("experts.0", Block(), "router"),
        ("attentions.11", Block(), "mixer"),
        ("attentions.11.0", nn.Linear(2, 2), "other"),
    ],
)
def test_a_kind_is_that_of_the_name(name, module, kind):
    assert kind_of(name, module) == kind
