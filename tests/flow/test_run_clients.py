"""Runs belong to their workspace and continue when clients leave or join."""

import asyncio
from pathlib import Path

import pytest

from culm.client.http import RequestRefused
from culm.testing.script import Reply
from culm.wire.runs import AgentInfo
from tests.flow.conftest import FlowServer
from tests.flow.drive import connect, request_bytes, until
from tests.flow.probes import script
from tests.flow.runs import held_writer, open_received, open_runs
from tests.support import WAIT_S, contract

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)


async def send_and_disconnect(
    flow: FlowServer, target: str, body: bytes, seen: "asyncio.Event"
) -> None:
    """Send a request and disconnect as soon as the server processes it."""
    _, writer = await connect(flow.server.addresses[0])
    writer.write(request_bytes(flow, "POST", target, {}, body))
    async with asyncio.timeout(WAIT_S):
        await seen.wait()
    writer.transport.abort()


@contract("INV-30")
async def test_aborted_request_does_not_end_its_run(tmp_path: Path, kind: str) -> None:
    async with open_runs(tmp_path, kind) as harness:
        runs, at_work = harness.flow.workspace(harness.remote.id).runs, asyncio.Event()
        body = f'{{"session_id":"{harness.session_id}","prompt":"Hi.","run_id":"r"}}'.encode()
        with held_writer(harness):
            async with asyncio.TaskGroup() as tasks:
                target = harness.remote.path("/agent")
                tasks.create_task(send_and_disconnect(harness.flow, target, body, at_work))
                await until(lambda: runs.find("r") is not None)
                at_work.set()
            await harness.flow.run_ready()
        complete = await harness.received.complete("r")
        assert (complete.error, complete.cancelled, complete.text) == ("", False, "Fine.")


@contract("INV-31")
async def test_run_continues_when_its_client_leaves(tmp_path: Path, kind: str) -> None:
    async with open_runs(tmp_path, kind, script(HELD)) as harness:
        poster = await harness.flow.client()
        joined = await poster.open_workspace(harness.flow.directory())
        async with open_received(joined) as received:
            run_id = await harness.prompt("Hi.")
            await received.text("Hello")
        await poster.retire()
        harness.model.release()
        assert (await harness.received.complete(run_id)).text == "Hello there."
        assert (await harness.rows())[-1] == ("assistant", "Hello there.", "end_turn")


@contract("INV-84")
async def test_agent_init_survives_the_disconnect_of_its_client(tmp_path: Path) -> None:
    async with open_runs(tmp_path) as harness:
        gone = asyncio.Event()
        gone.set()
        await send_and_disconnect(harness.flow, harness.remote.path("/agent/init"), b"{}", gone)
        assert (await harness.ask("/agent", AgentInfo)).is_ready
        assert (await harness.received.complete(await harness.prompt("Hi."))).text == "Fine."


@contract("EXC-4")
async def test_joining_and_init_do_not_affect_runs_or_queue(tmp_path: Path) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as harness:
        first = await harness.prompt("One.", run_id="one")
        await harness.received.text("Hello")
        second = await harness.prompt("Two.", run_id="two")
        joined = await (await harness.flow.client()).open_workspace(harness.flow.directory())
        async with open_received(joined) as received:
            for rest in ("/agent/init", "/agent/update"):
                assert (await harness.request("POST", rest)).status == 200
            assert (await harness.session()).is_busy
            assert [item.run_id for item in await harness.queue()] == [second]
            # A new stream receives the current states.
            await received.state(first, "active")
            await received.state(second, "queued")
            await harness.cancel()
            assert (await received.complete(first)).cancelled
            assert (await received.complete(second)).cancelled


@contract("EXC-15")
async def test_workspace_with_a_live_run_stays_open_without_clients(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as harness:
        run_id = await harness.prompt("Hi.")
        await harness.received.text("Hello")
        await harness.remote.client.retire()
        harness.clock.advance(3599)
        with pytest.raises(RequestRefused) as refused:
            await (await harness.flow.client()).shut_down()
        assert refused.value.status == 409
        harness.model.release()
        assert (await harness.received.complete(run_id)).text == "Hello there."


@contract("EXC-15")
async def test_run_without_clients_for_an_hour_is_interrupted(tmp_path: Path) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as harness:
        run_id = await harness.prompt("Hi.")
        await harness.received.text("Hello")
        await harness.remote.client.retire()
        harness.clock.advance(3600)
        complete = await harness.received.complete(run_id)
        assert (complete.culm_reason, complete.text) == ("interrupted", "Hello ")
