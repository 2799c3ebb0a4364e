"""`culm attach`: any number of clients follow one run or session, and all end in the same state."""

import asyncio
import json
import signal
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema_rs  # Comes with schemathesis.

from culm.client.follower import open_mirror
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, ScriptedCall
from culm.wire.messages import ToolResultPart, full_text
from tests.live.harness import (
    RESUME_S,
    ROOT,
    Ended,
    ProcessServer,
    caught_up,
    make_directory,
    open_process,
)
from tests.live.run_harness import HELD, open_agent, script, until_asked
from tests.support import contract

ENV = {"CULM_NO_DISCOVERY": "1"}
LOOK = Reply(text="I look.", calls=[ScriptedCall(name="ls", input={})])
COLORED = Reply(text="It has \x1b[31mred\x1b[0m letters.")


def places(folder: Path) -> list[str]:
    return ["--dir", str(make_directory(folder)), "--host", f"unix://{folder}/s"]


@asynccontextmanager
async def open_culm(folder: Path, *args: str) -> AsyncGenerator[ProcessServer]:
    async with open_process(folder, "-m", "culm", *args, *places(folder), env=ENV) as process:
        assert process.process.stdin is not None, "asked for a pipe"
        process.process.stdin.close()
        yield process


async def culm(folder: Path, *args: str) -> Ended:
    async with open_culm(folder, *args) as process:
        return await process.wait(RESUME_S)


async def until_printed(process: ProcessServer, text: str) -> None:
    await process.until(lambda: text in process.output(), RESUME_S)


class Folded:
    """The state that a program has after all lines of `--json`."""

    def __init__(self, lines: Iterable[Mapping[str, Any]]) -> None:
        self.texts: dict[str, str] = {}
        self.results: list[str] = []
        self.ends: list[str] = []
        for line in lines:
            match line["type"]:
                case "text" | "said":
                    before = self.texts.get(line["message_id"], "")
                    self.texts[line["message_id"]] = before + line["text"]
                case "again":
                    self.texts[line["message_id"]] = ""
                case "result":
                    self.results.append(line["content"])
                case "end":
                    self.ends.append(line["outcome"])
                case _:
                    pass


def lines_of(ended: Ended) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ended.stdout.splitlines()]


@contract("CLI-5", "CLI-6")
async def test_all_followers_of_a_session_end_in_the_stored_state(folder: Path) -> None:
    async with (
        open_model_server(script(LOOK, HELD, COLORED)) as model,
        open_agent(folder, model) as (_, client),
    ):
        remote = await client.open_workspace(make_directory(folder))
        session = await remote.create_session("followed")
        first = await remote.prompt(session.id, "look around")
        async with (
            open_mirror(remote, session.id) as follower,  # The raw stream of events.
            open_culm(folder, "attach", session.id, "--until-idle", "--json") as one,
            open_culm(folder, "attach", first, "--json") as other,
        ):
            await until_asked(model, 2)
            await until_printed(one, "I look.")
            await until_printed(other, "I look.")
            second = await remote.prompt(session.id, "and then?")
            model.release()
            ended = await other.wait(RESUME_S)
            both = await one.wait(RESUME_S)
            assert (ended.status, both.status) == (0, 0)
            await caught_up(follower, await remote.snapshot(session.id))
            mirrored = follower.mirror.messages.values()
            texts = {m.id: full_text(m.parts) for m in mirrored if m.role != "tool"}
            results = [
                part.data.content
                for message in mirrored
                for part in message.parts
                if isinstance(part, ToolResultPart)
            ]
        late = await culm(folder, "attach", session.id, "--until-idle", "--json")
        shown = await culm(folder, "sessions", "show", session.id, "--json")
        state = json.loads(shown.stdout)
        assert {m["id"] for m in state["messages"] if m["role"] != "tool"} == set(texts)
        for lines in (lines_of(both), lines_of(late)):
            folded = Folded(lines)
            assert (folded.texts, folded.results) == (texts, results)
        assert Folded(lines_of(both)).ends == ["end_turn", "end_turn"]
        of_first = {m["id"] for m in state["messages"] if m["run_id"] == first}
        alone = Folded(lines_of(ended))
        assert alone.texts == {name: text for name, text in texts.items() if name in of_first}
        assert alone.results == results
        assert [run["id"] for run in state["runs"]] == [second, first]
        schema = json.loads((ROOT / "docs" / "run-lines.schema.json").read_text())
        for line in (*lines_of(both), *lines_of(ended), *lines_of(late)):
            jsonschema_rs.validate(schema, line)


async def test_follower_reports_a_run_that_begins_and_ends_while_it_is_not_scheduled(
    folder: Path,
) -> None:
    async with (
        open_model_server(script(HELD, COLORED)) as model,
        open_agent(folder, model) as (_, client),
    ):
        remote = await client.open_workspace(make_directory(folder))
        session = await remote.create_session("followed")
        await remote.prompt(session.id, "look around")
        async with (
            open_mirror(remote, session.id) as follower,
            open_culm(folder, "attach", session.id, "--until-idle", "--json") as watching,
        ):
            await until_printed(watching, "look around")
            watching.process.send_signal(signal.SIGSTOP)
            await remote.prompt(session.id, "and then?")
            model.release()
            async with asyncio.timeout(RESUME_S):
                await follower.until(lambda mirror: len(mirror.ended) == 2)
            watching.process.send_signal(signal.SIGCONT)
            ended = await watching.wait(RESUME_S)
    assert Folded(lines_of(ended)).ends == ["end_turn", "end_turn"]


@contract("CLI-6")
async def test_detach_stops_no_run_and_attach_resumes_from_the_printed_cursor(
    folder: Path,
) -> None:
    async with (
        open_model_server(script(LOOK, HELD)) as model,
        open_agent(folder, model) as (_, client),
    ):
        remote = await client.open_workspace(make_directory(folder))
        session = await remote.create_session("left")
        run_id = await remote.prompt(session.id, "look around")
        async with open_culm(folder, "attach", run_id[:8]) as watching:
            await until_asked(model, 2)
            await until_printed(watching, "I look.")
            watching.process.send_signal(signal.SIGINT)
            left = await watching.wait(RESUME_S)
        assert (left.status, (await remote.run(run_id)).state) == (130, "active")
        cursor = left.stderr.partition("--cursor ")[2].split("`")[0]
        async with open_culm(folder, "attach", run_id, "--cursor", cursor, "--json") as again:
            await asyncio.sleep(0)
            model.release()
            ended = await again.wait(RESUME_S)
        lines = lines_of(ended)
        assert ended.status == 0
        assert "said" not in {line["type"] for line in lines}
        assert (lines[-1]["type"], lines[-1]["outcome"]) == ("end", "end_turn")


async def test_attach_suggests_the_nearest_session_and_refuses_a_bad_cursor(folder: Path) -> None:
    async with (
        open_model_server(script()) as model,
        open_agent(folder, model) as (_, client),
    ):
        remote = await client.open_workspace(make_directory(folder))
        await remote.create_session("Blue plums")
        await remote.create_session("Blue pears")
        unknown = await culm(folder, "attach", "blue plum")
        assert (unknown.status, unknown.stdout) == (2, "")
        assert "did you mean session" in unknown.stderr
        assert "Blue plums" in unknown.stderr
        bad = await culm(folder, "attach", "Blue plums", "--cursor", "yesterday")
        assert (bad.status, "is not a cursor" in bad.stderr) == (2, True)
