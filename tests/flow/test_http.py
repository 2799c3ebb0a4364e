"""HTTP basics: statuses, empty forms, wrong paths, and failing handlers."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from culm.client.workspace import RemoteWorkspace
from culm.ids import Ids, SessionId
from culm.server.api import Api, Route
from culm.server.auth import RequestAuth
from culm.server.connection import open_http
from culm.server.listen import Address, listen, parse_address
from culm.server.routes import ROUTES
from culm.wire.codec import decode
from culm.wire.messages import Text, TextPart
from culm.wire.workspaces import Problem
from tests.flow.conftest import FlowServer, open_flow
from tests.flow.drive import UNKNOWN, Answer, closed, send
from tests.support import NO_MODEL, contract

pytestmark = pytest.mark.sockets

W = f"/v1/workspaces/{UNKNOWN}"


async def opened(flow: FlowServer) -> RemoteWorkspace:
    return await (await flow.client()).open_workspace(flow.directory())


# --- failing handlers


async def fail() -> None:
    raise ValueError("a bug with a secret in it")


async def fail_late(request: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse(headers={"X-Begun": "yes"})
    await response.prepare(request)
    await response.write(b"begun")
    raise ValueError("a bug after the head")


@asynccontextmanager
async def open_failing(flow: FlowServer) -> AsyncGenerator[Address]:
    """The real application over the same registry, with two routes that fail."""
    routes = [Route("GET", "/boom", fail), Route("GET", "/late", fail_late), *ROUTES]
    api = Api(flow.server.registry, RequestAuth(None, frozenset({"buggy"})), routes)
    listener = listen(parse_address("tcp://127.0.0.1:0"))
    try:
        async with open_http(api.handle, [listener], None):
            yield listener.address
    finally:
        listener.close()


@contract("INV-69")
async def test_failing_handler_is_500_in_json_and_the_server_continues(flow: FlowServer) -> None:
    headers = {"Host": "buggy", "Authorization": None}
    async with open_failing(flow) as address:
        answer = await send(flow, "GET", "/boom", headers=headers, address=address)
        assert answer.status == 500
        assert answer.headers["content-type"] == "application/json"
        assert answer.json() == {"message": "internal server error", "code": "internal", "hint": ""}
        health = await send(flow, "GET", "/v1/health", headers=headers, address=address)
        assert (health.status, health.body) == (200, b"")


@contract("INV-69")
async def test_handler_that_fails_after_its_head_closes_the_connection(
    flow: FlowServer,
) -> None:
    headers = {"Host": "buggy", "Authorization": None, "Connection": "keep-alive"}
    async with open_failing(flow) as address:
        try:
            answer = await send(flow, "GET", "/late", headers=headers, address=address)
        except ConnectionResetError:
            answer = Answer(200, {"x-begun": "yes"}, b"")  # Closed before it was read.
        assert (answer.status, answer.headers["x-begun"]) == (200, "yes")
        assert b"HTTP/1.1" not in answer.body
        headers["Connection"] = "close"
        health = await send(flow, "GET", "/v1/health", headers=headers, address=address)
        assert health.status == 200


@contract("INV-69")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"title"',
        b'{"title": 1}',
        b'{"title": "\xff"}',
        b'{"title": NaN}',
        b'{"title": "\\ud800"}',
        b'{"x": ' + b"[" * 300 + b"]" * 300 + b"}",
        b'{"x": ' + b"[" * 600 + b"]" * 600 + b"}",
        b'{"x": ' + b"[" * 100_000,
        b'{"x": ' + b"9" * 10_000 + b"}",
    ],
    ids=lambda body: repr(body[:20]) + str(len(body)),
)
async def test_no_body_causes_an_internal_error(flow: FlowServer, body: bytes) -> None:
    remote = await opened(flow)
    answer = await send(flow, "POST", remote.path("/sessions"), body)
    assert answer.status in (200, 400, 413)
    if answer.status == 400:
        assert b"failed to decode request" in answer.body
        assert await remote.sessions() == []


@contract("INV-69")
async def test_body_beyond_the_limit_is_413_with_and_without_content_length(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    large = json.dumps({"title": "x" * (1 << 20)}).encode()
    answer = await send(flow, "POST", remote.path("/sessions"), large)
    assert answer.status == 413
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(large), large)
    headers = {"Transfer-Encoding": "chunked", "Content-Length": None}
    answer = await send(flow, "POST", remote.path("/sessions"), chunked, headers)
    assert answer.status == 413
    assert await remote.sessions() == []


@contract("INV-69")
async def test_client_that_disconnects_during_a_request_changes_nothing(flow: FlowServer) -> None:
    remote = await opened(flow)
    with pytest.raises((asyncio.IncompleteReadError, TimeoutError)):
        async with asyncio.timeout(0.05):
            await send(flow, "POST", remote.path("/sessions"), b"{", {"Content-Length": "100"})
    await flow.run_ready()
    assert await remote.sessions() == []


# --- paths and methods


@contract("INV-69")
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/"), ("GET", "/v1/nothing"), ("POST", "/v2/workspaces"), ("GET", "/v1/workspaces/"),
     ("GET", "/v1/health/"), ("GET", f"{W}/sessions/"), ("GET", f"{W}//sessions")],
)  # fmt: skip
async def test_unknown_path_is_404_in_plain_text(flow: FlowServer, method: str, path: str) -> None:
    answer = await send(flow, method, path)
    assert (answer.status, answer.body) == (404, b"404 page not found\n")
    assert answer.headers["content-type"].startswith("text/plain")


@contract("INV-69")
@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/v1/health", "GET, HEAD"),
        ("GET", "/v1/control", "POST"),
        ("PUT", "/v1/workspaces", "GET, HEAD, POST"),
        ("PATCH", f"{W}/sessions/s", "DELETE, GET, HEAD, PUT"),
    ],
)
async def test_wrong_method_is_405_with_the_allowed_methods(
    flow: FlowServer, method: str, path: str, allow: str
) -> None:
    answer = await send(flow, method, path)
    assert (answer.status, answer.headers["allow"]) == (405, allow)
    assert answer.headers["content-type"].startswith("text/plain")


@contract("INV-69")
@pytest.mark.parametrize("path", ["/v1/health", "/v1/version", "/v1/workspaces", "/v1/config"])
async def test_get_route_answers_head_with_equal_headers_and_no_body(
    flow: FlowServer, path: str
) -> None:
    got, head = await send(flow, "GET", path), await send(flow, "HEAD", path)
    assert (head.status, head.body) == (got.status, b"")
    assert head.headers.get("content-type") == got.headers.get("content-type")
    assert head.headers.get("content-length", "0") == str(len(got.body))


@contract("INV-69")
async def test_absolute_request_target_is_accepted(flow: FlowServer) -> None:
    answer = await send(flow, "GET", "http://api.crush.localhost/v1/version")
    assert answer.status == 200


# --- control


@contract("INV-26")
@pytest.mark.parametrize("command", ["shutdown", "shutdown_if_idle"])
async def test_shutdown_that_does_not_name_culm_is_409_even_when_idle(
    flow: FlowServer, command: str
) -> None:
    for server in ({}, {"server": "crush"}, {"server": ""}, {"server": None}):
        answer = await send(flow, "POST", "/v1/control", {"command": command, **server})
        assert answer.status == 409
    assert not flow.left.is_set()
    await opened(flow)


@contract("INV-26")
async def test_unknown_control_command_is_400(flow: FlowServer) -> None:
    for body in ({"command": "explode", "server": "culm"}, {"server": "culm"}):
        answer = await send(flow, "POST", "/v1/control", body)
        assert (answer.status, b"unknown command" in answer.body) == (400, True)
    assert not flow.left.is_set()


@contract("INV-26")
@pytest.mark.parametrize("command", ["shutdown", "shutdown_if_idle"])
async def test_shutdown_is_409_while_hosting_and_200_when_idle_then_creates_503(
    flow: FlowServer, command: str
) -> None:
    body = {"command": command, "server": "culm"}
    remote = await opened(flow)
    assert (await send(flow, "POST", "/v1/control", body)).status == 409
    await remote.release()
    await closed(flow, remote)
    answer = await send(flow, "POST", "/v1/control", body, {"Content-Type": "text/plain"})
    assert (answer.status, answer.body) == (200, b"")
    create = {"path": str(flow.directory()), "client_id": Ids().client()}
    refused = await send(flow, "POST", "/v1/workspaces", create)
    assert (refused.status, b"server is shutting down" in refused.body) == (503, True)
    assert (await send(flow, "GET", "/v1/health")).status == 200


# --- the minimum route set of an interactive Crush client

ZERO_MODEL: dict[str, object] = {
    "id": "", "name": "", "cost_per_1m_in": 0.0, "cost_per_1m_out": 0.0,
    "cost_per_1m_in_cached": 0.0, "cost_per_1m_out_cached": 0.0, "context_window": 0,
    "default_max_tokens": 0, "can_reason": False, "supports_attachments": False,
}  # fmt: skip
NOT_READY = {
    "is_busy": False,
    "is_ready": False,
    "model": ZERO_MODEL,
    "model_cfg": {"model": "", "provider": ""},
}
EMPTY = "an empty body"
EMPTY_FORMS: list[tuple[str, str, dict[str, object] | None, object]] = [
    ("GET", "/sessions", None, []),
    ("GET", "/sessions/x/history", None, []),
    ("GET", "/sessions/x/messages", None, []),
    ("GET", "/sessions/m$$c/messages", None, []),
    ("GET", "/sessions/x/messages/user", None, []),
    ("GET", "/messages/user", None, []),
    ("GET", "/sessions/x/filetracker/files", None, []),
    ("GET", "/lsps", None, {}),
    ("POST", "/lsps/start", {"path": "/x.go"}, EMPTY),
    ("POST", "/lsps/stop", None, EMPTY),
    ("GET", "/permissions/skip", None, {"skip": False}),
    ("POST", "/permissions/skip", {"skip": True}, EMPTY),
    ("POST", "/permissions/grant", {"action": "allow"}, {"resolved": False}),
    ("GET", "/agent", None, NOT_READY),
    ("POST", "/agent/init", {"interactive": True}, EMPTY),
    ("POST", "/agent/init", None, EMPTY),
    ("POST", "/agent/update", None, EMPTY),
    ("POST", "/agent/sessions/x/cancel", None, EMPTY),
    ("GET", "/agent/sessions/x/prompts/list", None, []),
    ("POST", "/agent/sessions/x/prompts/clear", None, EMPTY),
    ("GET", "/project/needs-init", None, {"needs_init": False}),
    ("GET", "/skills", None, []),
    ("GET", "/mcp/prompts", None, []),
    ("GET", "/mcp/states", None, {}),
    ("GET", "/mcp/pending-auth", None, []),
]  # fmt: skip


@contract("INV-59")
async def test_routes_of_an_interactive_client_answer_their_empty_form(
    tmp_path: Path, kind: str
) -> None:
    async with open_flow(tmp_path, kind, config=NO_MODEL) as flow:
        remote = await opened(flow)
        for method, path, body, form in EMPTY_FORMS:
            answer = await send(flow, method, remote.path(path), body or b"")
            assert answer.status == 200, path
            if form == EMPTY:
                assert answer.body == b"", path
            else:
                assert answer.json() == form, path
                assert answer.headers["content-type"] == "application/json"
                assert answer.body.endswith(b"\n")


async def test_every_workspace_route_is_404_in_json_without_a_workspace(
    flow: FlowServer,
) -> None:
    bodies: dict[str, dict[str, object]] = {
        "/permissions/grant": {"action": "allow"},
        "/agent": {"prompt": "x"},
    }
    routes = [(method, path, body) for method, path, body, _ in EMPTY_FORMS]
    routes += [("GET", "", None), ("GET", "/config", None), ("POST", "/agent", bodies["/agent"])]
    routes += [("GET", f"/events?client_id={UNKNOWN}", None), ("GET", "/snapshot", None)]
    for method, path, body in routes:
        answer = await send(flow, method, W + path, body or {})
        assert answer.status == 404, path
        assert answer.json() == {
            "message": "workspace not found", "code": "workspace_not_found",
            "hint": "open it again with POST /v1/workspaces",
        }  # fmt: skip


async def test_prompt_without_an_agent_is_400(tmp_path: Path, kind: str) -> None:
    async with open_flow(tmp_path, kind, config=NO_MODEL) as flow:
        remote = await opened(flow)
        session = await remote.create_session("s")
        body = {"session_id": session.id, "prompt": "hello"}
        answer = await send(flow, "POST", remote.path("/agent"), body)
        assert answer.status == 400
        assert b'"message":"agent coordinator not initialized"' in answer.body
        assert await remote.messages(session.id) == []


@contract("EXC-24")
async def test_wrong_permission_action_is_400(flow: FlowServer) -> None:
    remote = await opened(flow)
    for action in ("", "Allow", "yes"):
        answer = await send(flow, "POST", remote.path("/permissions/grant"), {"action": action})
        assert (answer.status, b"invalid permission action" in answer.body) == (400, True)


@contract("EXC-24")
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_unknown_session_is_404(flow: FlowServer, method: str) -> None:
    remote = await opened(flow)
    answer = await send(flow, method, remote.path("/sessions/x%2Fy"), {"title": "t"})
    assert (answer.status, b"session not found: x/y" in answer.body) == (404, True)


PAGE_ERRORS = {
    "limit=0": (400, "query: Expected `int` >= 1 - at `$.limit`"),
    "limit=-1": (400, "query: Expected `int` >= 1 - at `$.limit`"),
    "limit=1001": (400, "query: Expected `int` <= 1000 - at `$.limit`"),
    "limit=ten": (400, "query: Expected `int | null`, got `str` - at `$.limit`"),
    "before=x": (404, "message not found: x"),
    "limit=1&before=x": (404, "message not found: x"),
}


@contract("EXC-24")
async def test_invalid_page_is_400_and_an_unknown_message_404_with_a_hint(flow: FlowServer) -> None:
    remote = await opened(flow)
    session, other = [await remote.create_session(title) for title in "ab"]
    path = remote.path(f"/sessions/{session.id}/messages")
    for query, (status, message) in PAGE_ERRORS.items():
        answer = await send(flow, "GET", f"{path}?{query}")
        problem = decode(answer.body, Problem)
        assert (answer.status, problem.message) == (status, message), query
        assert status == 400 or "without before" in problem.hint
    messages = flow.workspace(remote.id).messages
    elsewhere, written = messages.add(other.id, "user", [TextPart(Text("Hi."))])
    await written
    answer = await send(flow, "GET", f"{path}?before={elsewhere.id}")
    assert (answer.status, decode(answer.body, Problem).code) == (404, "message_not_found")
    assert (await send(flow, "GET", remote.path("/sessions/x/messages?limit=5"))).json() == []


@contract("WIRE-11")
async def test_pages_of_messages_contain_each_message_once_while_others_arrive(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    sessions = [(await remote.create_session(title)).id for title in "abc"]
    messages = flow.workspace(remote.id).messages

    async def add(session_id: SessionId, text: str) -> str:
        message, written = messages.add(session_id, "user", [TextPart(Text(text))])
        await written
        return message.id

    ids = [[await add(session_id, str(n)) for session_id in sessions][1] for n in range(7)]
    found: list[str] = []
    before = ""
    while page := await remote.messages(sessions[1], limit=3, before=before):
        found = [message.id for message in page] + found
        before = page[0].id
        await add(sessions[1], "later")
    assert found == ids
    assert [m.id for m in await remote.messages(sessions[1], before=ids[2])] == ids[:2]


@contract("EXC-24")
@pytest.mark.parametrize("query", ["", "?client_id=", "?client_id=me"])
async def test_missing_or_invalid_client_id_is_400(flow: FlowServer, query: str) -> None:
    for method, path in [("DELETE", W), ("GET", f"{W}/events"), ("POST", f"{W}/current-session")]:
        answer = await send(flow, method, path + query, {})
        assert (answer.status, b"client_id is" in answer.body) == (400, True)
    assert (await send(flow, "DELETE", "/v1/clients/me")).status == 400


async def test_version_and_config_have_the_fields_a_crush_client_dereferences(
    flow: FlowServer,
) -> None:
    version = await (await flow.client()).ask("GET", "/v1/version", dict[str, str])
    assert set(version) == {"version", "commit", "build_id", "go_version", "platform"}
    remote = await opened(flow)
    config = await remote.client.ask("GET", remote.path("/config"), dict[str, object])
    options = config["options"]
    assert isinstance(options, dict)
    assert isinstance(options["tui"], dict)
    assert isinstance(config["providers"], dict)
    assert options["disable_metrics"] is True


@contract("EXC-18")
async def test_rename_changes_only_the_title(flow: FlowServer) -> None:
    remote = await opened(flow)
    session = await remote.create_session("before")
    flow.clock.advance(5)
    body = {"id": "other", "title": "after", "prompt_tokens": 77, "message_count": 9}
    answer = await send(flow, "PUT", remote.path(f"/sessions/{session.id}"), body)
    assert answer.status == 200
    renamed = await remote.session(session.id)
    session.title, session.updated_at = "after", session.updated_at + 5
    assert renamed == session
