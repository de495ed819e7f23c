from replay_core.replay.asking import Asking


def test_what_raises_is_named_once_and_the_others_still_answer():
    asking = Asking()

    def fail():
        raise KeyError("position_ids\nand more")

    assert [asking("the padding", fail, []), asking("the padding", fail, []), asking("a token", lambda: [1], [])] == [
        [], [], [1],
    ]  # fmt: skip
    assert asking.skipped == ["the padding (KeyError: 'position_ids\\nand more')"]
