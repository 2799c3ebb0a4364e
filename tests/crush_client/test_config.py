"""Configuration between clients: every change reaches the others without a panic."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from tests.crush_client.client import Tui, open_tui
from tests.crush_client.golang import Record, record, records
from tests.crush_client.run import READY_TRIES, RunOptions, RunResult, crush_run
from tests.crush_client.servers import Pauses, project, startup_for
from tests.crush_client.types import is_configured
from tests.flow.conftest import FlowServer
from tests.support import WAIT_S

MODEL = {"model": "demo-1", "provider": "demo"}
KEY = {"scope": 0, "provider_id": "demo", "kind": "string", "api_key": "sk-xyz"}
TOKEN = {"access_token": "a", "refresh_token": "r", "expires_in": 1800, "expires_at": 1787340000}


@asynccontextmanager
async def pair(flow: FlowServer) -> AsyncGenerator[tuple[Tui, Tui]]:
    """Open two TUIs of one workspace, both with a stream."""
    startup = startup_for(flow.url, flow.folder)
    async with (
        asyncio.timeout(WAIT_S),
        open_tui(project(flow), startup) as one,
        open_tui(project(flow), startup) as other,
    ):
        for tui in (one, other):
            await tui.events.until(lambda tui=tui: tui.events.connections == 1)
        yield one, other


async def changed(tui: Tui, before: Record | None) -> Record:
    """Wait for a change; returns the configuration that this client fetched."""
    await tui.until(lambda: tui.calls.workspace is not before)
    return tui.calls.config


@pytest.mark.parametrize(
    ("number", "body"),
    [
        (47, {"scope": 0, "key": "options.tui.transparent", "value": True}),
        (47, {"scope": 0, "key": "options.notifications", "value": "bell"}),
        (47, {"scope": 0, "key": "recent_models.large", "value": [MODEL]}),
        (48, {"scope": 0, "key": "providers.hyper.api_key"}),
        (49, {"scope": 0, "model_type": "large", "model": MODEL}),
        (49, {"scope": 1, "model_type": "small", "model": MODEL}),
        (50, {"scope": 0, "enabled": True}),
        (51, KEY),
        (51, {**KEY, "kind": "oauth", "api_key": TOKEN}),
        (55, None),
    ],
)
async def test_change_by_one_client_is_fetched_by_the_other(
    flow: FlowServer, number: int, body: dict[str, object] | None
) -> None:
    async with pair(flow) as (one, other):
        before = other.calls.workspace
        assert await one.api.call(number, body) is None
        await changed(other, before)
        assert one.calls.log == other.calls.log == []


async def test_value_set_by_one_client_is_read_by_the_other(flow: FlowServer) -> None:
    async with pair(flow) as (one, other):
        before = other.calls.workspace
        body = {"scope": 0, "key": "options.tui.transparent", "value": True}
        await one.api.call(47, body)
        tui = (await changed(other, before)).record("options").record("tui")
        assert tui.values["transparent"] is True
        before = other.calls.workspace
        await one.api.call(49, {"scope": 0, "model_type": "large", "model": MODEL})
        config = await changed(other, before)
        large = record(config.mapping("models")["large"])
        assert (large.text("model"), large.text("provider")) == ("demo-1", "demo")
        assert [m.text("model") for m in records(config.mapping("recent_models")["large"])] == [
            "demo-1"
        ]


async def test_key_makes_a_client_configured_and_is_never_returned(bare: FlowServer) -> None:
    async with pair(bare) as (one, other):
        assert not is_configured(other.calls.config)
        before = other.calls.workspace
        await one.api.call(51, KEY)
        config = await changed(other, before)
        assert is_configured(config)
        demo = record(config.mapping("providers")["demo"])
        assert (demo.text("api_key"), demo.find_record("oauth")) == ("", None)


async def test_configured_tui_initializes_the_agent_and_checks_the_project(
    bare: FlowServer,
) -> None:
    startup = startup_for(bare.url, bare.folder)
    async with asyncio.timeout(WAIT_S), open_tui(project(bare), startup) as first:
        await first.api.call(51, KEY)
        async with open_tui(project(bare), startup) as tui:
            assert tui.sent[:5] == [
                "POST /v1/workspaces",
                "POST W/agent/init",
                "GET W/permissions/skip",
                "GET W/agent",
                "GET W/project/needs-init",
            ]
            assert (tui.calls.log, tui.needs_init) == ([], False)


async def test_configured_tui_initializes_a_recreated_workspace(
    bare: FlowServer,
) -> None:
    startup, pauses = startup_for(bare.url, bare.folder), Pauses()
    async with asyncio.timeout(WAIT_S), open_tui(project(bare), startup, sleep=pauses) as tui:
        await tui.events.until(lambda: tui.events.connections == 1)
        before = tui.calls.workspace
        await tui.api.call(51, KEY)
        await changed(tui, before)
        pauses.hold()
        await tui.api.call(8, query={"client_id": tui.api.client_id})
        await (
            tui.api.transport.aclose()
        )  # Released and without a stream, the workspace closes immediately.
        await pauses.until(1)
        while bare.server.registry.list():
            await asyncio.sleep(0.001)
        start = len(tui.sent)
        pauses.release()
        await tui.events.until(lambda: tui.events.connections == 2)
        assert tui.sent[start : start + 4] == [
            "GET W/events?client_id=C",
            "POST /v1/workspaces",
            "POST W/agent/init",
            "GET W/events?client_id=C",
        ]
        assert tui.calls.log == []


async def test_run_with_a_key_but_no_model_times_out_and_retires(
    bare: FlowServer,
) -> None:
    startup, pauses = startup_for(bare.url, bare.folder), Pauses()
    async with asyncio.timeout(WAIT_S):
        async with open_tui(project(bare), startup) as tui:
            await tui.api.call(51, KEY)
            ended = await crush_run("hi", project(bare), startup, sleep=pauses)
        assert ended == RunResult(error="timed out waiting for the agent")
        assert pauses.requested == [0.2] * READY_TRIES
        assert bare.server.registry.list() == []


async def test_run_with_an_unusable_model_fails_immediately_with_a_reason(
    bare: FlowServer,
) -> None:
    startup, pauses = startup_for(bare.url, bare.folder), Pauses()
    options = RunOptions(model=("demo", "demo-1"))
    async with asyncio.timeout(WAIT_S):
        async with open_tui(project(bare), startup) as tui:
            await tui.api.call(51, KEY)
            ended = await crush_run("hi", project(bare), startup, options=options, sleep=pauses)
        reason = "Model not available: provider 'demo' has no base_url"
        hint = "hint: culm models lists the usable models"
        assert ended == RunResult(error=f"agent error: {reason}\n{hint}")
        assert pauses.requested == []
        assert bare.server.registry.list() == []
