from replay_core.jobs import Partial
from replay_core.replay.asking import Asking


def test_what_raises_is_named_once_and_the_others_still_answer():
    asking = Asking()

    def fail():
        raise KeyError("position_ids\nand more")

    assert [asking("the padding", fail, []), asking("the padding", fail, []), asking("a token", lambda: [1], [])] == [
        [], [], [1],
    ]  # fmt: skip
    assert asking.skipped == ["the padding (KeyError: 'position_ids\\nand more')"]


def test_what_would_begin_too_late_is_left_out_by_name():
    asking = Asking(most_s=-1.0)
    assert asking("token 5", lambda: "asked", "not") == "not"
    assert asking.skipped == ["token 5 (no time left after -1 s)"]
    assert Asking(most_s=60.0)("token 5", lambda: "asked", "not") == "asked"


def test_the_time_that_is_left_is_that_of_the_passes_to_come(monkeypatch):
    told, now = [], iter(range(0, 100, 3))
    monkeypatch.setattr("replay_core.replay.asking.time.monotonic", lambda: next(now))
    asking = Asking(on_event=told.append)
    asking.expect(9)
    with asking.one_pass():  # three seconds by this clock, and eight are to come
        pass
    asking("token 5", lambda: None, None)
    assert told[-1].what == "questions (up to 24 s left), who moves whom: token 5"
    asking.expect(0)
    asking("token 6", lambda: None, None)
    assert told[-1].what == "questions, who moves whom: token 6"


def test_what_is_known_so_far_is_sent_at_once():
    told = []
    Asking(on_event=told.append).so_far("sees padding")
    assert told == [Partial({"so_far": "sees padding"})]
