"""Configuration over HTTP: a change is visible to every client, and keys are never shown."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from culm.client.http import Client, RequestRefused
from culm.client.workspace import RemoteWorkspace
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, Script
from culm.wire.config import (
    RemoveConfig,
    SelectedModel,
    SetCompact,
    SetConfig,
    SetModel,
    SetProviderKey,
)
from culm.wire.runs import AgentInfo
from culm.wire.workspaces import Workspace
from tests.flow.conftest import FlowServer, open_flow
from tests.flow.drive import open_events, send
from tests.support import contract

SECRET = "sk-never-to-be-seen"


async def opened(flow: FlowServer, name: str = "project") -> RemoteWorkspace:
    return await (await flow.client()).open_workspace(flow.directory(name))


async def shown(client: Client, remote: RemoteWorkspace) -> Workspace:
    return await client.ask("GET", remote.path(), Workspace)


async def test_user_setting_is_published_to_clients_of_every_workspace(
    flow: FlowServer,
) -> None:
    here, there = await opened(flow), await opened(flow, "other")
    async with open_events(flow, here) as near, open_events(flow, there) as far:
        change = SetConfig(0, "options.tui.transparent", value=True)
        await here.client.request("POST", here.path("/config/set"), change)
        await near.until(b"config_changed")
        await far.until(b"config_changed")
    for remote in (here, there):
        config = (await shown(remote.client, remote)).config
        assert config.options.tui.transparent is True


async def test_workspace_setting_stays_in_its_workspace_and_survives_a_restart(
    tmp_path: Path, kind: str
) -> None:
    async with open_flow(tmp_path, kind) as flow:
        here, there = await opened(flow), await opened(flow, "other")
        await here.client.request("POST", here.path("/config/compact"), SetCompact(1, enabled=True))
        assert (await shown(here.client, here)).config.options.tui.compact_mode is True
        assert (await shown(there.client, there)).config.options.tui.compact_mode is False
    async with open_flow(tmp_path, kind) as flow:
        here = await opened(flow)
        assert here.info.config.options.tui.compact_mode is True
        change = RemoveConfig(1, "options.tui.compact_mode")
        await here.client.request("POST", here.path("/config/remove"), change)
        assert (await shown(here.client, here)).config.options.tui.compact_mode is False


async def test_selected_model_is_in_the_config_and_the_default_small_model(
    flow: FlowServer,
) -> None:
    here = await opened(flow)
    model = SelectedModel("demo-1", "demo", reasoning_effort="high")
    await here.client.request("POST", here.path("/config/model"), SetModel(0, "large", model))
    config = (await shown(here.client, here)).config
    assert (config.models, config.recent_models) == ({"large": model}, {"large": [model]})
    path = here.path("/agent/default-small-model?provider_id=demo")
    assert await here.client.ask("GET", path, SelectedModel) == model


@contract("EXC-21")
@pytest.mark.parametrize(
    ("kind_", "key"), [("string", SECRET), ("oauth", {"access_token": SECRET, "expires_in": 60})]
)
async def test_stored_key_is_never_returned(flow: FlowServer, kind_: str, key: object) -> None:
    here = await opened(flow)
    async with open_events(flow, here) as stream:
        change = SetProviderKey(0, "my.provider", kind_, key)
        await here.client.request("POST", here.path("/config/provider-key"), change)
        seen = await stream.until(b"config_changed")
    kept = json.loads((flow.folder / "data" / "config.json").read_text())
    assert SECRET in json.dumps(kept["providers"]["my.provider"])
    for path in ("", "/config", "/providers", "/snapshot", "/agent"):
        answer = await here.client.request("GET", here.path(path))
        assert SECRET.encode() not in answer
    assert SECRET.encode() not in seen
    answer = await send(flow, "GET", here.path("/config"))
    assert "my.provider" in cast("dict[str, Any]", answer.json())["providers"]


@contract("EXC-21")
async def test_model_set_by_a_client_gets_its_key_and_the_key_stays_hidden(
    flow: FlowServer,
) -> None:
    here = await opened(flow)
    script = Script(otherwise=Reply(text="Hello."))
    async with open_model_server(script) as model, open_events(flow, here) as stream:
        provider = {"type": "openai-compat", "base_url": model.url}
        selected = SelectedModel("demo-1", "demo")
        for path, change in (
            ("set", SetConfig(0, "providers.demo", provider)),
            ("provider-key", SetProviderKey(0, "demo", "string", SECRET)),
            ("model", SetModel(0, "large", selected)),
        ):
            await here.client.request("POST", here.path(f"/config/{path}"), change)
        info = await here.client.ask("GET", here.path("/agent"), AgentInfo)
        assert (info.is_ready, info.model_cfg) == (True, selected)
        session = await here.create_session("s")
        body = {"session_id": session.id, "prompt": "hi"}
        assert (await send(flow, "POST", here.path("/agent"), body)).status == 202
        seen = await stream.until(b'"type":"run_complete"')
        asked = model.requests[0]
    assert asked.headers["Authorization"] == f"Bearer {SECRET}"
    assert SECRET.encode() not in asked.raw + seen


@contract("EXC-24")
@pytest.mark.parametrize(
    ("route", "body", "text"),
    [
        ("set", {"scope": 0, "key": "options.tui.transparent", "value": "yes"}, "transparent"),
        ("set", {"scope": 0, "key": "options", "value": [1]}, "$.options"),
        ("set", {"scope": 0, "key": "recent_models.large", "value": [{"top_k": 1.5}]}, "top_k"),
        ("set", {"scope": 0, "key": "mcp.x.command", "value": 5}, "$.mcp"),
        ("set", {"scope": 2, "key": "a", "value": 1}, "scope"),
        ("set", {"scope": 0, "key": "", "value": 1}, "key"),
        ("remove", {"scope": -1, "key": "a"}, "scope"),
        ("model", {"scope": 0, "model_type": "huge", "model": {}}, "model_type"),
        ("model", {"scope": 0, "model_type": "large", "model": {"max_tokens": 1.0}}, "max_tokens"),
        ("provider-key", {"scope": 0, "kind": "string", "api_key": "x"}, "provider_id"),
        ("provider-key", {"provider_id": "p", "kind": "cookie"}, 'api key kind "cookie"'),
        ("provider-key", {"provider_id": "p", "kind": "string"}, "decode api key string"),
        ("provider-key", {"provider_id": "p", "kind": "oauth", "api_key": 7}, "object"),
    ],
)  # fmt: skip
async def test_invalid_config_change_is_400_and_changes_nothing(
    flow: FlowServer, route: str, body: dict[str, object], text: str
) -> None:
    here = await opened(flow)
    before = await here.client.request("GET", here.path("/config"))
    answer = await send(flow, "POST", here.path(f"/config/{route}"), body)
    assert answer.status == 400
    assert text in cast("dict[str, str]", answer.json())["message"]
    assert await here.client.request("GET", here.path("/config")) == before
    assert not (flow.folder / "data" / "config.json").exists()


async def test_broken_config_document_does_not_prevent_opening_a_workspace(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    folders = list((flow.folder / "data" / "projects").iterdir())
    await remote.release()
    (folders[0] / "config.json").write_text("{ // mine")
    again = await opened(flow)
    with pytest.raises(RequestRefused, match=r"config\.json is not usable") as refused:
        await again.client.request("POST", again.path("/config/compact"), SetCompact(1))
    assert refused.value.status == 409
    assert (folders[0] / "config.json").read_text() == "{ // mine"
