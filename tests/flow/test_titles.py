"""Titles: a session is named by what was said in it first, and no run depends on that."""

from pathlib import Path

import pytest

from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, Rule, Script
from tests.flow.drive import until
from tests.flow.probes import TITLE, Gate, Probe, calling, script
from tests.flow.runs import Stage, open_runs, open_stage
from tests.support import model_config


async def titled(stage: Stage) -> str:
    """The title that the session gets."""
    await stage.heard.until(
        lambda told: told.type == "session" and b'"unnamed"' not in bytes(told.payload)
    )
    return (await stage.session()).title


@pytest.mark.parametrize(
    ("reply", "prompt", "title"),
    [
        (Reply(text="Green files"), "Hi.", "Green files"),
        (Reply(text='"Green\nfiles"\n'), "Hi.", "Green files"),
        (Reply(text="<think>Hm. Green?</think>\nGreen files"), "Hi.", "Green files"),
        (Reply(text=" "), "Count   the\nfiles", "Count the files"),
        (Reply(text=""), "x" * 60, "x" * 49 + "…"),
        (Reply(status=401), "Hi.", "Untitled Session"),
        (Reply(text="Half", cut_after=1), "Hi.", "Untitled Session"),
    ],
)
async def test_a_session_is_named_by_its_first_prompt_and_the_run_does_not_depend_on_it(
    tmp_path: Path, reply: Reply, prompt: str, title: str
) -> None:
    play = Script([], [Rule(when="Write a title", reply=reply)], Reply(text="Fine."))
    async with open_runs(tmp_path, play=play) as stage:
        complete = await stage.heard.complete(await stage.prompt(prompt))
        assert (complete.text, complete.error) == ("Fine.", "")
        assert await titled(stage) == title
        assert stage.heard.errors() == []


async def test_the_large_model_names_a_session_that_the_small_one_could_not(tmp_path: Path) -> None:
    fails = Rule(when="Write a title", reply=Reply(status=401), times=1)
    async with open_model_server(Script([], [fails, TITLE], Reply(text="Fine."))) as model:
        config = model_config(model.url)
        config["models"] = {
            "large": {"provider": "demo", "model": "demo-1"},
            "small": {"provider": "demo", "model": "demo-0"},
        }
        async with open_stage(tmp_path, "unix", model, config=config) as stage:
            await stage.talk("Hi.")
            assert await titled(stage) == "A title"
            asked = [seen.body["model"] for seen in model.requests if seen not in stage.seen()]
            assert asked == ["demo-0", "demo-1"]


async def test_only_the_first_prompt_names_a_session(tmp_path: Path) -> None:
    async with open_runs(tmp_path, play=Script([], [TITLE], Reply(text="Fine."))) as stage:
        await stage.talk("One.")
        await titled(stage)
        await stage.remote.rename_session(stage.session_id, "Mine")
        await stage.talk("Two.", "Three.")
        assert len(stage.model.requests) == 4
        assert (await stage.session()).title == "Mine"
        asked = [seen for seen in stage.model.requests if seen not in stage.seen()]
        assert b'"max_tokens":40' in asked[0].raw


async def test_a_prompt_that_was_cancelled_in_its_turn_still_names_its_session(
    tmp_path: Path,
) -> None:
    gate = Gate()
    async with open_runs(
        tmp_path, play=script(calling("held")), tools=[Probe("held", gate.pass_through)]
    ) as stage:
        run_id = await stage.prompt("Hi.")
        await until(lambda: gate.inside == 1)
        await stage.cancel()
        await stage.heard.complete(run_id)
        assert await titled(stage) == "A title"


async def test_a_title_that_is_awaited_holds_up_neither_the_run_nor_the_end_of_the_server(
    tmp_path: Path,
) -> None:
    rules = [Rule(when="Write a title", reply=Reply(text="Late", hold_after=0))]
    play = Script([], rules, Reply(text="Fine."))
    async with open_model_server(play) as model:
        async with open_stage(tmp_path, "unix", model) as stage:
            await stage.talk("Hi.")
            await until(lambda: len(model.requests) == 2)
        async with open_stage(tmp_path, "unix", model, session_id=stage.session_id) as stage:
            assert (await stage.session()).title == "unnamed"
            assert [run.outcome for run in await stage.runs()] == ["end_turn"]
