"""Configuration over the wire: what a client sets, every client sees, and nobody sees a key."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from culm.client.http import Client, RequestRefused
from culm.client.workspace import RemoteWorkspace
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, Script
from culm.wire.agent import AgentInfo
from culm.wire.config import (
    RemoveConfig,
    SelectedModel,
    SetCompact,
    SetConfig,
    SetModel,
    SetProviderKey,
)
from culm.wire.workspaces import Workspace
from tests.flow.conftest import FlowServer, open_flow
from tests.flow.drive import open_events, send
from tests.support import contract

SECRET = "sk-never-to-be-seen"


async def opened(flow: FlowServer, name: str = "project") -> RemoteWorkspace:
    return await (await flow.client()).open_workspace(flow.directory(name))


async def shown(client: Client, remote: RemoteWorkspace) -> Workspace:
    return await client.ask("GET", remote.path(), Workspace)


async def test_what_one_client_sets_every_client_of_every_workspace_is_told_and_sees(
    flow: FlowServer,
) -> None:
    here, there = await opened(flow), await opened(flow, "other")
    async with open_events(flow, here) as near, open_events(flow, there) as far:
        wish = SetConfig(0, "options.tui.transparent", value=True)
        await here.client.request("POST", here.path("/config/set"), wish)
        await near.until(b"config_changed")
        await far.until(b"config_changed")
    for remote in (here, there):
        config = (await shown(remote.client, remote)).config
        assert config.options.tui.transparent is True


async def test_what_is_set_for_one_workspace_stays_there_and_survives_the_server(
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
        wish = RemoveConfig(1, "options.tui.compact_mode")
        await here.client.request("POST", here.path("/config/remove"), wish)
        assert (await shown(here.client, here)).config.options.tui.compact_mode is False


async def test_a_chosen_model_is_in_the_config_and_proposed_as_the_small_one(
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
async def test_a_key_that_is_kept_is_never_shown_again(
    flow: FlowServer, kind_: str, key: object
) -> None:
    here = await opened(flow)
    async with open_events(flow, here) as stream:
        wish = SetProviderKey(0, "my.provider", kind_, key)
        await here.client.request("POST", here.path("/config/provider-key"), wish)
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
async def test_a_model_that_a_client_names_is_asked_with_the_key_it_gave_and_no_other_sees_it(
    flow: FlowServer,
) -> None:
    here = await opened(flow)
    script = Script(otherwise=Reply(text="Hello."))
    async with open_model_server(script) as model, open_events(flow, here) as stream:
        provider = {"type": "openai-compat", "base_url": model.url}
        selected = SelectedModel("demo-1", "demo")
        for path, wish in (
            ("set", SetConfig(0, "providers.demo", provider)),
            ("provider-key", SetProviderKey(0, "demo", "string", SECRET)),
            ("model", SetModel(0, "large", selected)),
        ):
            await here.client.request("POST", here.path(f"/config/{path}"), wish)
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
    ("route", "body", "words"),
    [
        ("set", {"scope": 0, "key": "options.tui.transparent", "value": "yes"}, "transparent"),
        ("set", {"scope": 0, "key": "options", "value": [1]}, "$.options"),
        ("set", {"scope": 0, "key": "recent_models.large", "value": [{"top_k": 1.5}]}, "top_k"),
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
async def test_a_change_that_does_not_fit_is_refused_and_nothing_changed(
    flow: FlowServer, route: str, body: dict[str, object], words: str
) -> None:
    here = await opened(flow)
    before = await here.client.request("GET", here.path("/config"))
    answer = await send(flow, "POST", here.path(f"/config/{route}"), body)
    assert answer.status == 400
    assert words in cast("dict[str, str]", answer.json())["message"]
    assert await here.client.request("GET", here.path("/config")) == before
    assert not (flow.folder / "data" / "config.json").exists()


async def test_a_document_that_somebody_broke_does_not_keep_a_workspace_from_opening(
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
