"""A run belongs to its workspace: clients come, go and join, and it goes on."""

import asyncio
from pathlib import Path

import pytest

from culm.client.http import RequestRefused
from culm.testing.script import Reply
from culm.wire.agent import AgentInfo
from tests.flow.conftest import FlowServer
from tests.flow.drive import connect, request_bytes, until
from tests.flow.probes import script
from tests.flow.runs import held_writer, open_heard, open_runs
from tests.support import WAIT_S, contract

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)


async def abandon(flow: FlowServer, target: str, body: bytes, seen: "asyncio.Event") -> None:
    """Send a request and go away as soon as the server is at work on it."""
    _, writer = await connect(flow.server.addresses[0])
    writer.write(request_bytes(flow, "POST", target, {}, body))
    async with asyncio.timeout(WAIT_S):
        await seen.wait()
    writer.transport.abort()


@contract("INV-30")
async def test_a_request_that_is_given_up_before_its_answer_neither_ends_nor_hides_the_run(
    tmp_path: Path, kind: str
) -> None:
    async with open_runs(tmp_path, kind) as stage:
        runs, at_work = stage.flow.workspace(stage.remote.id).runs, asyncio.Event()
        body = f'{{"session_id":"{stage.session_id}","prompt":"Hi.","run_id":"r"}}'.encode()
        with held_writer(stage):
            async with asyncio.TaskGroup() as tasks:
                target = stage.remote.path("/agent")
                tasks.create_task(abandon(stage.flow, target, body, at_work))
                await until(lambda: runs.find("r") is not None)
                at_work.set()
            await stage.flow.settle()
        complete = await stage.heard.complete("r")
        assert (complete.error, complete.cancelled, complete.text) == ("", False, "Fine.")


@contract("INV-31")
async def test_a_run_goes_on_when_its_poster_leaves_and_another_client_hears_its_end(
    tmp_path: Path, kind: str
) -> None:
    async with open_runs(tmp_path, kind, script(HELD)) as stage:
        poster = await stage.flow.client()
        joined = await poster.open_workspace(stage.flow.directory())
        async with open_heard(joined) as heard:
            run_id = await stage.prompt("Hi.")
            await heard.text("Hello")
        await poster.retire()
        stage.model.release()
        assert (await stage.heard.complete(run_id)).text == "Hello there."
        assert (await stage.rows())[-1] == ("assistant", "Hello there.", "end_turn")


@contract("INV-84")
async def test_making_the_agent_ready_survives_whoever_asked_for_it(tmp_path: Path) -> None:
    async with open_runs(tmp_path) as stage:
        gone = asyncio.Event()
        gone.set()
        await abandon(stage.flow, stage.remote.path("/agent/init"), b"{}", gone)
        assert (await stage.ask("/agent", AgentInfo)).is_ready
        assert (await stage.heard.complete(await stage.prompt("Hi."))).text == "Fine."


@contract("EXC-4")
async def test_joining_and_making_ready_again_disturb_neither_run_nor_queue(tmp_path: Path) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as stage:
        first = await stage.prompt("One.", run_id="one")
        await stage.heard.text("Hello")
        second = await stage.prompt("Two.", run_id="two")
        joined = await (await stage.flow.client()).open_workspace(stage.flow.directory())
        async with open_heard(joined) as heard:
            for rest in ("/agent/init", "/agent/update"):
                assert (await stage.request("POST", rest)).status == 200
            assert (await stage.session()).is_busy
            assert [item.run_id for item in await stage.queue()] == [second]
            # Who joins is told how things stand.
            await heard.state(first, "active")
            await heard.state(second, "queued")
            await stage.cancel()
            assert (await heard.complete(first)).cancelled
            assert (await heard.complete(second)).cancelled


@contract("EXC-15")
async def test_a_workspace_with_a_live_run_stays_although_every_client_has_left(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as stage:
        run_id = await stage.prompt("Hi.")
        await stage.heard.text("Hello")
        await stage.remote.client.retire()
        stage.clock.advance(3599)
        with pytest.raises(RequestRefused) as refused:
            await (await stage.flow.client()).shut_down()
        assert refused.value.status == 409
        stage.model.release()
        assert (await stage.heard.complete(run_id)).text == "Hello there."


@contract("EXC-15")
async def test_a_run_that_nobody_watches_for_an_hour_ends_interrupted(tmp_path: Path) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as stage:
        run_id = await stage.prompt("Hi.")
        await stage.heard.text("Hello")
        await stage.remote.client.retire()
        stage.clock.advance(3600)
        complete = await stage.heard.complete(run_id)
        assert (complete.culm_reason, complete.text) == ("interrupted", "Hello ")
