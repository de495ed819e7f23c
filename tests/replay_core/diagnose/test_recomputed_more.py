"""What a step's own numbers single out: a divisor, padding, weights of another time, a random forward, few samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.replay_core.diagnose.batches import causes
from tests.replay_core.diagnose.copying import run
from tests.replay_core.diagnose.logs import diagnosed_path, told

MEAN: dict[str, Any] = {"loss_agg_mode": "token-mean", "max_response_length": 5}
DR: dict[str, Any] = {"adv_estimator": "dr_grpo", "loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 5}


@pytest.mark.parametrize(
    ("settings", "rule", "words"),
    [
        ({"fault": "slots-of-the-limit", "stated": MEAN}, "D28", "every slot of responses padded to their limit"),
        ({"fault": "constant", "stated": MEAN}, "D28", "its samples x 12, and the run states token-mean"),
        ({"fault": "constant", "stated": DR, "baseline": "centred", "kind": "dr_grpo"}, "D28",
         "divides each response's sum by 12, and the run states 5: loss and gradient are 1/2.4"),
        ({"fault": "gae-over-padding", "critic": True}, "D44", "GAE leaks from padding"),
        ({"fault": "whitened-over-padding", "baseline": "to-come", "stated": {"adv_estimator": "reinforce_plus_plus"}},
         "D52", "whitened over padding"),
        ({"fault": "old-late", "lr": 6.0}, "D14", "hold the update already"),
        ({"fault": "dropout"}, "D14", "dropout is on"),
        ({"fault": "fewer-experts"}, "D30", "a token is routed to"),
        ({"fault": "ranks-alike"}, "D75", "ranks 0, 1 hold the same"),
        ({"fault": "data-ends"}, "D106", "the batch shrinks from 24 to 8 samples (1 of 3 prompts) at step 3"),
    ],
    ids=lambda each: each["fault"] if isinstance(each, dict) else "",
)  # fmt: skip
def test_the_line_that_is_wrong_is_named_first(settings: dict[str, Any], rule: str, words: str, tmp_path: Path) -> None:
    said = causes(diagnosed_path(run(tmp_path / "run", **{"size": 8, **settings})))
    assert said, "nothing is said"
    assert (said[0].id, words in said[0].claim) == (rule, True), [one.claim for one in said]


@pytest.mark.parametrize(
    "settings",
    [
        {"stated": MEAN},
        {"fault": "constant-right", "stated": DR, "baseline": "centred", "kind": "dr_grpo"},
        {"critic": True},
        {"baseline": "to-come", "stated": {"adv_estimator": "reinforce_plus_plus"}},
    ],
)
def test_the_same_without_it_is_well(settings: dict[str, Any], tmp_path: Path) -> None:
    found = diagnosed_path(run(tmp_path / "run", **settings))
    assert not [one for one in told(found) if one[0] in ("D28", "D44", "D52", "D14", "D106") and one[1] != "info"]
