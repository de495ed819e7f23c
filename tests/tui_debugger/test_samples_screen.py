"""`I`: samples as a person reads them, at both sizes: orders, colours, groups, worst tokens, search."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from replay_core import desk, workbench
from replay_core.jobs import Answer, Job, OnEvent, ignore
from tests.fixtures import FIXTURES
from tests.tui_debugger.driving import A, opened, press, rest, screen, until
from tests.tui_debugger.scripted import ScriptedEngine

SLIME = str(FIXTURES / "slime")
TOKENIZER = str(FIXTURES / "trl/tiny_qwen2")


def _of(path: str, **more: str) -> ScriptedEngine:
    """An engine that reads samples of a genuine dump, whatever is open."""

    def samples(job: Job) -> Answer:
        return desk.perform(Job("samples", {**job.params, "path": path, "step": None, **more}))

    return ScriptedEngine(samples=samples)


@pytest.mark.long
@pytest.mark.parametrize("size", [(80, 24), (160, 48)])
async def test_a_sample_is_read_with_its_turns_and_coloured_by_what_is_chosen(size: tuple[int, int]) -> None:
    async with opened(A, engine=_of(SLIME, tokenizer=TOKENIZER), size=size) as (app, pilot):
        await press(app, pilot, "I")
        await rest(app, pilot)
        seen = screen(app)
        assert "Samples · step 0 · 16" in seen
        assert "── user" in seen
        assert "── assistant tokens 13 to 37, 20 count" in seen
        assert "coloured by delta_logprob" in seen
        assert "token 18 id" in seen
        await press(app, pilot, "v")
        assert "coloured by entropy" in screen(app)
        await press(app, pilot, "right")
        assert "token 19 id" in screen(app)
        await press(app, pilot, "j")
        assert "sample 1 · group 0" in screen(app)
        await press(app, pilot, "w")
        assert "the tokens of the step furthest off by delta_logprob" in screen(app)
        await press(app, pilot, "j", "j", "enter")
        assert "sample 15 · group 3" in screen(app), "the third worst token of the step lies there"
        assert "coloured by delta_logprob" in screen(app)
        await press(app, pilot, "x")
        assert "group 3: 4 answers to one prompt" in screen(app)
        assert screen(app).count("reward 1 · adv 0") == (2 if size[0] == 80 else 3)
        await press(app, pilot, "escape", "escape")
        assert "Samples ·" not in screen(app)


async def test_keys_that_come_faster_than_answers_lead_where_the_last_of_them_does() -> None:
    engine, held = _of(SLIME), asyncio.Event()
    held.set()
    answered = engine.run

    async def slow(job: Job, on_event: OnEvent = ignore) -> Answer:
        await held.wait()
        return await answered(job, on_event)

    engine.run = slow  # type: ignore[method-assign]
    async with opened(A, engine=engine, size=(80, 24)) as (app, pilot):
        await press(app, pilot, "I")
        for keys, wanted in (("jj", "sample 2 · group 0"), ("bbb", "by mismatch"), ("jjj", "sample 15 · group 3")):
            held.clear()
            for key in keys:
                await pilot.press(key)
            held.set()
            await rest(app, pilot)
            assert wanted in screen(app)
            assert "reading …" not in screen(app)


@pytest.mark.long
@pytest.mark.parametrize("size", [(60, 20), (80, 24)], ids=str)
async def test_the_largest_number_of_a_legend_is_whole_beside_its_bars(size: tuple[int, int]) -> None:
    async with opened(A, engine=_of(SLIME), size=size) as (app, pilot):
        await press(app, pilot, "I")
        await rest(app, pilot)
        document = workbench.samples(Path(SLIME))
        (tokens,) = [one for one in document["tokens"] if one["sample"] == document["samples"][0]["sample"]]
        most = max(abs(float(value)) for value in tokens["columns"][0]["values"] if value is not None)
        legend = next(line for line in screen(app).splitlines() if "coloured by delta_logprob" in line)
        assert f"up to {most:.4g} " in legend
        assert "· ▂ ▄ ▆ █" in legend


@pytest.mark.long
async def test_samples_are_ordered_searched_and_written_from_the_screen(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tui_debugger.paths.here", lambda: tmp_path)
    engine = _of(SLIME, tokenizer=TOKENIZER)
    async with opened(A, engine=engine, size=(120, 30)) as (app, pilot):
        await press(app, pilot, "I", "b")
        assert "by reward" in screen(app)
        assert "sample 8 · group 2 · reward 0.35" in screen(app)
        await press(app, pilot, "b", "b")
        assert "by mismatch" in screen(app), "what nothing is recorded for is passed over"
        await press(app, pilot, "slash", *"ANSWER answer", "enter")
        assert "hold 'ANSWER answer': 1" in screen(app)
        assert "sample 3 · group 0" in screen(app)
        for form in ("html", "markdown", "json"):
            await press(app, pilot, "e", *["backspace"] * 4, *form, "enter")
        await until(pilot, lambda: len(list(tmp_path.iterdir())) == 3)
        assert {file.suffix for file in tmp_path.iterdir()} == {".html", ".md", ".json"}
        (page,) = tmp_path.glob("*.html")
        assert "Sample 3, token by token" in page.read_text(encoding="utf-8")
        assert workbench.reopen(page)["kind"] == "samples"


async def test_messages_with_tools_are_turns() -> None:
    async with opened(A, engine=_of(str(FIXTURES / "miles/trajectory")), size=(80, 24)) as (app, pilot):
        await press(app, pilot, "I")
        for said in ("── system", "── tool", '{"result": 42}', 'calls lookup({"query": "answer"})'):
            assert said in screen(app)
        await press(app, pilot, "w")
        assert "no log-probability, ratio or entropy says which tokens are worst" in screen(app)


@pytest.mark.long
async def test_a_dump_without_samples_says_so() -> None:
    async with opened(A, engine=_of(str(FIXTURES / "torch")), size=(80, 24)) as (app, pilot):
        await press(app, pilot, "I")
        assert "no record holds samples" in screen(app)
