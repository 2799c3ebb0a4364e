"""The environment of a workspace: that of its first client, until the workspace is idle."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from culm.client.workspace import RemoteWorkspace
from culm.testing.model_server import ModelServer, open_model_server
from tests.flow.config_files import config_of, provider
from tests.flow.conftest import FlowServer, open_flow
from tests.flow.drive import closed, held_database, until, until_creating
from tests.flow.probes import Gate, Probe, calling, script
from tests.flow.runs import open_received
from tests.support import contract

NAME = "MY_KEY"


@asynccontextmanager
async def open_keyed(folder: Path, model: ModelServer, *tools: Probe) -> AsyncGenerator[FlowServer]:
    """A server whose provider key comes from the environment of a client."""
    config = config_of({"demo": provider(model.url, f"${{{NAME}:-nobody's}}")})
    given = {tool.name: tool for tool in tools}
    async with open_flow(folder, "unix", config=config, tools=given) as flow:
        yield flow


async def open_with(flow: FlowServer, key: str = "") -> RemoteWorkspace:
    """Open the workspace with another client whose environment has this key."""
    env = {NAME: key} if key else {}
    return await (await flow.client()).open_workspace(flow.directory(), env=env)


async def key_used(remote: RemoteWorkspace, model: ModelServer) -> str:
    """The key that the model receives for a prompt."""
    session = await remote.create_session("unnamed")
    async with open_received(remote) as received:
        await remote.prompt(session.id, "Hi.", run_id=session.id)
        await received.complete(session.id)
    return model.requests[-1].headers["Authorization"].removeprefix("Bearer ")


@contract("INV-7")
async def test_environment_sent_while_the_workspace_opens_is_used(tmp_path: Path) -> None:
    async with open_model_server(script()) as model, open_keyed(tmp_path, model) as flow:
        before = await open_with(flow)
        await before.release()
        await closed(flow, before)
        async with asyncio.TaskGroup() as tasks:
            with held_database(tmp_path / "data", flow.directory()):
                opening = tasks.create_task(open_with(flow), name="without")
                await until_creating(flow, flow.directory(), 1)
                joining = tasks.create_task(open_with(flow, "mine"), name="with")
                await until_creating(flow, flow.directory(), 2)
                assert (opening.done(), joining.done()) == (False, False)
        assert await key_used(joining.result(), model) == "mine"


@contract("INV-7")
async def test_first_environment_is_kept_while_a_client_is_attached(
    tmp_path: Path,
) -> None:
    async with open_model_server(script()) as model, open_keyed(tmp_path, model) as flow:
        first = await open_with(flow, "first")
        async with open_received(first):
            assert await key_used(await open_with(flow, "second"), model) == "first"


@contract("INV-7")
async def test_first_environment_is_kept_while_a_run_is_active(
    tmp_path: Path,
) -> None:
    gate = Gate()
    held = Probe("held", gate.pass_through)
    async with (
        open_model_server(script(calling("held"))) as model,
        open_keyed(tmp_path, model, held) as flow,
    ):
        first = await open_with(flow, "first")
        session = await first.create_session("unnamed")
        await first.prompt(session.id, "Hi.", run_id="held")
        await until(lambda: gate.inside == 1)
        assert await key_used(await open_with(flow, "second"), model) == "first"
        gate.release()


async def test_next_environment_is_used_when_the_workspace_is_idle(
    tmp_path: Path,
) -> None:
    async with open_model_server(script()) as model, open_keyed(tmp_path, model) as flow:
        await open_with(flow, "first")
        assert await key_used(await open_with(flow, "second"), model) == "second"


async def test_client_without_an_environment_keeps_the_previous_one(
    tmp_path: Path,
) -> None:
    async with open_model_server(script()) as model, open_keyed(tmp_path, model) as flow:
        await open_with(flow, "first")
        assert await key_used(await open_with(flow), model) == "first"
