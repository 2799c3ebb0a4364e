"""Whose environment counts: of those who have a workspace open, the first; else whoever comes."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from culm.client.workspace import RemoteWorkspace
from culm.testing.model_server import ModelServer, open_model_server
from tests.flow.conftest import FlowServer, open_flow
from tests.flow.drive import closed, held_database, until
from tests.flow.probes import Gate, Probe, calling, script
from tests.flow.runs import open_heard
from tests.flow.written import config_of, provider
from tests.support import contract

NAME = "MY_KEY"


@asynccontextmanager
async def open_keyed(folder: Path, model: ModelServer, *tools: Probe) -> AsyncGenerator[FlowServer]:
    """A server whose provider's key is what a client has in its environment."""
    config = config_of({"demo": provider(model.url, f"${{{NAME}:-nobody's}}")})
    given = {tool.name: tool for tool in tools}
    async with open_flow(folder, "unix", config=config, tools=given) as flow:
        yield flow


async def open_with(flow: FlowServer, key: str = "") -> RemoteWorkspace:
    """Another client opens the workspace, from a shell that has this key."""
    env = {NAME: key} if key else {}
    return await (await flow.client()).open_workspace(flow.directory(), env=env)


async def key_used(remote: RemoteWorkspace, model: ModelServer) -> str:
    """The key with which a prompt is asked."""
    session = await remote.create_session("unnamed")
    async with open_heard(remote) as heard:
        await remote.prompt(session.id, "Hi.", run_id=session.id)
        await heard.complete(session.id)
    return model.requests[-1].headers["Authorization"].removeprefix("Bearer ")


@contract("INV-7")
async def test_an_environment_that_comes_while_the_workspace_opens_counts(tmp_path: Path) -> None:
    async with open_model_server(script()) as model, open_keyed(tmp_path, model) as flow:
        before = await open_with(flow)
        await before.release()
        await closed(flow, before)
        async with asyncio.TaskGroup() as tasks:
            with held_database(tmp_path / "data", flow.directory()):
                opening = tasks.create_task(open_with(flow), name="without")
                await flow.settle()
                joining = tasks.create_task(open_with(flow, "mine"), name="with")
                await flow.settle()
                assert (opening.done(), joining.done()) == (False, False)
        assert await key_used(joining.result(), model) == "mine"


@contract("INV-7")
async def test_while_somebody_looks_the_first_environment_counts_whoever_joins(
    tmp_path: Path,
) -> None:
    async with open_model_server(script()) as model, open_keyed(tmp_path, model) as flow:
        first = await open_with(flow, "first")
        async with open_heard(first):
            assert await key_used(await open_with(flow, "second"), model) == "first"


@contract("INV-7")
async def test_while_something_runs_the_first_environment_counts_whoever_joins(
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


async def test_where_nobody_looks_and_nothing_runs_the_next_environment_counts(
    tmp_path: Path,
) -> None:
    async with open_model_server(script()) as model, open_keyed(tmp_path, model) as flow:
        await open_with(flow, "first")
        assert await key_used(await open_with(flow, "second"), model) == "second"


async def test_who_brings_no_environment_has_the_one_that_was_brought_before(
    tmp_path: Path,
) -> None:
    async with open_model_server(script()) as model, open_keyed(tmp_path, model) as flow:
        await open_with(flow, "first")
        assert await key_used(await open_with(flow), model) == "first"
