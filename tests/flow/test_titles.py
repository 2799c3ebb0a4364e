"""Titles: a session is titled by its first prompt, and no run depends on it."""

from pathlib import Path

import pytest

from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, ReplyRule, Script
from tests.flow.drive import until
from tests.flow.probes import TITLE, Gate, Probe, calling, script
from tests.flow.runs import Harness, open_harness, open_runs
from tests.support import model_config


async def until_titled(harness: Harness) -> str:
    """Wait for the title of the session."""
    await harness.received.until(
        lambda event: event.type == "session" and b'"unnamed"' not in bytes(event.payload)
    )
    return (await harness.session()).title


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
async def test_session_is_titled_by_its_first_prompt_and_the_run_ignores_failure(
    tmp_path: Path, reply: Reply, prompt: str, title: str
) -> None:
    play = Script([], [ReplyRule(when="Write a title", reply=reply)], Reply(text="Fine."))
    async with open_runs(tmp_path, play=play) as harness:
        complete = await harness.received.complete(await harness.prompt(prompt))
        assert (complete.text, complete.error) == ("Fine.", "")
        assert await until_titled(harness) == title
        assert harness.received.errors() == []


async def test_large_model_titles_a_session_when_the_small_one_fails(tmp_path: Path) -> None:
    fails = ReplyRule(when="Write a title", reply=Reply(status=401), times=1)
    async with open_model_server(Script([], [fails, TITLE], Reply(text="Fine."))) as model:
        config = model_config(model.url)
        config["models"] = {
            "large": {"provider": "demo", "model": "demo-1"},
            "small": {"provider": "demo", "model": "demo-0"},
        }
        async with open_harness(tmp_path, "unix", model, config=config) as harness:
            await harness.talk("Hi.")
            assert await until_titled(harness) == "A title"
            asked = [seen.body["model"] for seen in model.requests if seen not in harness.seen()]
            assert asked == ["demo-0", "demo-1"]


async def test_only_the_first_prompt_titles_a_session(tmp_path: Path) -> None:
    async with open_runs(tmp_path, play=Script([], [TITLE], Reply(text="Fine."))) as harness:
        await harness.talk("One.")
        await until_titled(harness)
        await harness.remote.rename_session(harness.session_id, "Mine")
        await harness.talk("Two.", "Three.")
        assert len(harness.model.requests) == 4
        assert (await harness.session()).title == "Mine"
        asked = [seen for seen in harness.model.requests if seen not in harness.seen()]
        assert b'"max_tokens":40' in asked[0].raw


async def test_prompt_cancelled_during_its_turn_still_titles_its_session(
    tmp_path: Path,
) -> None:
    gate = Gate()
    async with open_runs(
        tmp_path, play=script(calling("held")), tools=[Probe("held", gate.pass_through)]
    ) as harness:
        run_id = await harness.prompt("Hi.")
        await until(lambda: gate.inside == 1)
        await harness.cancel()
        await harness.received.complete(run_id)
        assert await until_titled(harness) == "A title"


async def test_pending_title_delays_neither_the_run_nor_the_server_exit(
    tmp_path: Path,
) -> None:
    rules = [ReplyRule(when="Write a title", reply=Reply(text="Late", hold_after=0))]
    play = Script([], rules, Reply(text="Fine."))
    async with open_model_server(play) as model:
        async with open_harness(tmp_path, "unix", model) as harness:
            await harness.talk("Hi.")
            await until(lambda: len(model.requests) == 2)
        async with open_harness(tmp_path, "unix", model, session_id=harness.session_id) as harness:
            assert (await harness.session()).title == "unnamed"
            assert [run.outcome for run in await harness.runs()] == ["end_turn"]
