"""What a running job says of what is left of it: what was measured, and nothing before that."""

from __future__ import annotations

from replay_core.jobs import IMPORTING, Progress
from tui_debugger.busy import Busy


def at(seconds: float, *told: tuple[float, Progress], usual_s: float | None = None) -> str:
    busy = Busy("job", began=100.0, now=100.0, usual_s=usual_s)
    for when, far in told:
        busy.take(far, 100.0 + when)
    busy.now = 100.0 + seconds
    return busy.how_long.removesuffix(" · ctrl+c cancels")


def test_nothing_is_said_of_what_is_left_before_anything_was_measured() -> None:
    assert at(30.0) == "30.0 s"
    assert at(30.0, (1, Progress(0, None, "loading the model"))) == "30.0 s"
    assert at(30.0, (1, Progress(0, 12, "forwards"))) == "30.0 s"
    assert at(2.0, (1.5, Progress(0, 12, "forwards")), (1.9, Progress(6, 12, "forwards"))) == "2.0 s"


def test_a_count_tells_what_is_left_at_its_pace() -> None:
    counted = (10, Progress(0, 12, "forwards")), (30, Progress(3, 12, "forwards"))
    assert at(30.0, *counted) == "30.0 s, about 60 s left"
    assert at(40.0, *counted) == "40.0 s, about 50 s left", "it counts down between two counts"
    assert at(95.0, *counted) == "95.0 s", "what takes longer than its pace tells nothing of what is left"
    late = (10, Progress(9, 12, "forwards")), (70, Progress(10, 12, "forwards"))
    assert at(70.0, *late) == "70.0 s, about 2 min left", "what was done before it was heard of took other time"


def test_a_phase_of_a_part_does_not_stand_for_the_whole() -> None:
    first = (0, Progress(0, 4, "forwards", 0, 3)), (20, Progress(2, 4, "forwards", 0, 3))
    assert at(20.0, *first) == "20.0 s"
    second = *first, (40, Progress(0, 4, "forwards", 1, 3)), (50, Progress(3, 4, "forwards", 1, 3))
    assert at(50.0, *second) == "50.0 s, about 70 s left"
    assert at(79.0, *second) == "79.0 s, about 41 s left"
    assert at(81.0, *second) == "81.0 s", "it has taken longer than the parts before: nothing is known of what is left"


def test_what_the_first_part_waited_for_torch_is_not_what_the_others_cost() -> None:
    first, second = Progress(0, 4, "forwards", 0, 2), Progress(0, 4, "forwards", 1, 2)
    told = (0, IMPORTING._replace(parts=2)), (18, first)
    assert at(20.0, *told, (20, second)) == "20.0 s, about 2 s left"
    assert at(20.0, *told, (20, IMPORTING._replace(part=1, parts=2))) == "20.0 s, about 20 s left", "each has a child"


def test_what_the_last_one_took_is_said_until_this_one_has_counted_or_taken_longer() -> None:
    assert at(3.0, usual_s=41.2) == "3.0 s, the last took 41 s"
    assert at(50.0, usual_s=41.2) == "50.0 s"
    counted = (0, Progress(0, 4, "forwards")), (20, Progress(2, 4, "forwards"))
    assert at(20.0, *counted, usual_s=41.2) == "20.0 s, about 20 s left"
