import json

import pytest

from replay_core.errors import RequestError
from replay_core.replay.flags import Flags
from replay_core.replay.plan import ReplayPlan


def plan(**parts):
    return ReplayPlan(**{"dump": "d", "step": 0, "rank": 0, "micro": 1, "model": "m", "out": "o", **parts})


def test_a_plan_survives_a_round_trip_through_json():
    first = plan(flags=Flags("eager", packing=True), capture=r"layers\.0", temperature=0.7, max_rows=2)
    assert ReplayPlan.from_mapping(json.loads(json.dumps(first.to_mapping()))) == first


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"capture": "layers.(0"}, "no regular expression"),
        ({"temperature": 0.0}, "above 0"),
        ({"logit_chunk": 0}, "at least 1"),
        ({"max_rows": 0}, "at least 1"),
        ({"backward": True, "flags": Flags(padding="left")}, "rows as they were recorded"),
    ],
)
def test_a_wrong_part_is_refused_before_anything_runs(parts, says):
    with pytest.raises(RequestError, match=says):
        plan(**parts)


def test_unknown_and_missing_parts_are_named():
    with pytest.raises(RequestError, match="a plan has no sstep"):
        ReplayPlan.from_mapping({**plan().to_mapping(), "sstep": 1})
    with pytest.raises(RequestError, match="lacks micro, model"):
        ReplayPlan.from_mapping({"dump": "d", "step": 0, "rank": 0, "out": "o"})
