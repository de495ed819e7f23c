"""What a module is said by its name and class; of experts in a list each is one."""

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
        ("layers.1.mlp.experts.3", Block(), "router"),
        ("attention_blocks.11", Block(), "other"),
        ("mamba_blocks.0", Block(), "other"),
    ],
)
def test_a_kind_is_that_of_the_name(name, module, kind):
    assert kind_of(name, module) == kind
