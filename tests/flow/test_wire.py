"""The checklist of the Crush wire: everything that its client relies on."""

import asyncio
import json
import stat
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from culm.client.workspace import RemoteWorkspace
from culm.ids import SessionId
from culm.server.connection import KEEPALIVE_S
from culm.server.listen import UnixAddress
from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Reply, ReplyRule, Script
from culm.wire import messages as m
from culm.wire.events import CRUSH_PAYLOADS
from culm.wire.messages import Message
from culm.wire.runs import RUN_HEADER
from tests.crush_client.golang import unmarshal
from tests.crush_client.types import event_type
from tests.flow.conftest import FlowServer, open_flow
from tests.flow.drive import UNKNOWN, RawStream, connect, open_events, request_bytes, send
from tests.support import NO_MODEL, WAIT_S, contract, model_config

pytestmark = pytest.mark.sockets

IDLE_S = 90.0  # The time a Crush client keeps an idle connection for a POST.
PARTS: list[m.Part] = [
    m.TextPart(m.Text("hi")),
    m.ReasoningPart(m.Reasoning("hm", "", 1, 2)),
    m.ImageUrlPart(m.ImageUrl("data:image/png;base64,aGk=")),
    m.BinaryPart(m.Binary("shot.png", "image/png", b"\x89PNG")),
    m.ToolCallPart(m.ToolCall("call_1", "ls", "{}", finished=True)),
    m.ToolResultPart(m.ToolResult("call_1", "ls", "main.go")),
    m.ShellCommandPart(m.ShellCommand("ls", "main.go", 0)),
]


async def opened(flow: FlowServer) -> tuple[RemoteWorkspace, SessionId]:
    remote = await (await flow.client()).open_workspace(flow.directory())
    return remote, (await remote.create_session("one")).id


def crush_events(stream: RawStream) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every line as a Crush client parses it: `data:`, one JSON text, two nested envelopes."""
    for line in stream.seen.decode().split("\n"):
        if line.strip():
            assert line.startswith("data: "), line
            outer = json.loads(line.removeprefix("data: "))
            assert outer["type"] in CRUSH_PAYLOADS
            inner = outer["payload"]
            assert inner["type"] in ("created", "updated", "deleted")
            unmarshal(json.dumps(inner).encode(), event_type(outer["type"])).must()
            yield outer["type"], inner


@contract("WIRE-1")
async def test_server_keepalive_is_longer_than_that_of_the_client(flow: FlowServer) -> None:
    assert KEEPALIVE_S > IDLE_S
    async with asyncio.timeout(WAIT_S):
        reader, writer = await connect(flow.server.addresses[0])
        for _ in range(3):
            writer.write(request_bytes(flow, "POST", "/v1/control", {}, b'{"command":"x"}'))
            assert b" 400 " in await reader.readline()
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"close" not in head.lower()
            await reader.readuntil(b"}\n")
        writer.close()


@contract("WIRE-1")
@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-thing", "nonsense"])
async def test_any_content_type_and_an_absolute_target_are_accepted(
    flow: FlowServer, content_type: str | None
) -> None:
    remote, _ = await opened(flow)
    headers = {"Content-Type": content_type}
    _, _, where = flow.url.partition("://")
    host = "api.crush.localhost" if flow.url.startswith("unix") else where
    target = f"http://{host}{remote.path('/sessions')}"
    answer = await send(flow, "POST", target, {"title": "t"}, headers)
    assert answer.status == 200


@contract("WIRE-1")
async def test_empty_connection_logs_no_error(
    flow: FlowServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(WAIT_S):
        for _ in range(20):
            _, writer = await connect(flow.server.addresses[0])
            writer.close()
            await writer.wait_closed()
    await (await flow.client()).health()
    logged = [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")]
    assert [r for r in logged if r.name != "asyncio"] == []  # It warns about a slow machine.


@contract("WIRE-2")
async def test_health_is_empty_version_is_json_and_control_is_409(flow: FlowServer) -> None:
    health = await send(flow, "GET", "/v1/health")
    assert (health.status, health.body) == (200, b"")
    version = cast("dict[str, object]", (await send(flow, "GET", "/v1/version")).json())
    assert version.keys() == {"version", "commit", "build_id", "go_version", "platform"}
    assert all(isinstance(value, str) for value in version.values())
    for command in ("shutdown", "shutdown_if_idle"):
        headers = {"Content-Type": "text/plain"}
        answer = await send(flow, "POST", "/v1/control", {"command": command}, headers)
        assert (answer.status, flow.leave_calls) == (409, 0)


@contract("WIRE-3")
async def test_unix_socket_is_private_and_removed_at_exit(
    tmp_path: Path,
) -> None:
    async with open_flow(tmp_path, "unix") as flow:
        address = flow.server.addresses[0]
        assert isinstance(address, UnixAddress)
        mode = address.path.stat().st_mode
        assert (stat.S_ISSOCK(mode), stat.S_IMODE(mode)) == (True, 0o600)
        assert stat.S_IMODE(address.path.parent.stat().st_mode) == 0o700
    assert not address.path.exists()


@contract("WIRE-4")
async def test_every_workspace_has_the_objects_a_client_dereferences(flow: FlowServer) -> None:
    remote, _ = await opened(flow)
    create = {"path": str(flow.directory()), "client_id": remote.client.id}
    answers = [
        (await send(flow, "POST", "/v1/workspaces", create)).json(),
        (await send(flow, "GET", remote.path())).json(),
        *cast("list[object]", (await send(flow, "GET", "/v1/workspaces")).json()),
        {"config": (await send(flow, "GET", remote.path("/config"))).json()},
    ]
    for answer in answers:
        config = cast("dict[str, Any]", answer)["config"]
        assert isinstance(config["options"]["tui"], dict)
        assert isinstance(config["providers"], dict)


@contract("WIRE-5")
async def test_success_is_200_and_an_error_has_a_json_message(flow: FlowServer) -> None:
    remote, sid = await opened(flow)
    for method, path, body in (
        ("PUT", f"/sessions/{sid}", {"title": "t"}), ("POST", "/permissions/skip", {"skip": False}),
        ("POST", f"/agent/sessions/{sid}/cancel", {}), ("DELETE", f"/sessions/{sid}", {}),
    ):  # fmt: skip
        assert (await send(flow, method, remote.path(path), body)).status == 200
    for path, status in ((f"/sessions/{UNKNOWN}", 404), ("/mcp/auth-url", 400)):
        answer = await send(flow, "GET", remote.path(path))
        assert answer.status == status
        assert cast("dict[str, str]", answer.json())["message"]


@contract("WIRE-5")
async def test_events_and_agent_are_404_only_for_an_unknown_workspace(flow: FlowServer) -> None:
    remote, _ = await opened(flow)
    query = f"client_id={UNKNOWN}&sessions={UNKNOWN}"
    async with open_events(flow, remote, sessions=UNKNOWN) as stream:
        assert stream.status == 200
    prompt = {"session_id": UNKNOWN, "prompt": "hi"}
    assert (await send(flow, "POST", remote.path("/agent"), prompt)).status == 404
    for path in (f"/events?{query}", "/agent"):
        answer = await send(flow, "GET", f"/v1/workspaces/{UNKNOWN}{path}")
        message = cast("dict[str, str]", answer.json())["message"]
        assert (answer.status, message) == (404, "workspace not found")


@contract("WIRE-6")
async def test_response_head_of_a_stream_arrives_before_any_event(flow: FlowServer) -> None:
    remote, _ = await opened(flow)
    async with open_events(flow, remote, view="crush") as stream:
        assert stream.status == 200
        assert stream.headers["content-type"] == "text/event-stream"
        assert "transfer-encoding" not in stream.headers
        assert "content-length" not in stream.headers
        assert stream.seen == b""


@contract("WIRE-6")
async def test_every_message_part_has_a_known_type_and_decodes_in_go(flow: FlowServer) -> None:
    remote, sid = await opened(flow)
    messages = flow.workspace(remote.id).messages
    async with open_events(flow, remote, view="crush") as stream:
        message, durable = messages.add(sid, "user", PARTS)
        await durable
        await stream.until(message.id.encode())
        parts = [
            part["type"]
            for type_, inner in crush_events(stream)
            if type_ == "message"
            for part in inner["payload"]["parts"]
        ]
    assert parts == [
        "text", "reasoning", "image_url", "binary", "tool_call", "tool_result", "shell_command",
        "finish",
    ]  # fmt: skip


@contract("WIRE-7")
async def test_answer_is_created_updated_and_finished_and_results_are_new_messages(
    flow: FlowServer,
) -> None:
    remote, sid = await opened(flow)
    messages = flow.workspace(remote.id).messages
    async with open_events(flow, remote, view="crush") as stream, asyncio.timeout(WAIT_S):
        draft, durable = messages.open(sid, model="demo-1", provider="demo")
        await durable
        await messages.put(draft, 0, m.ToolCallPart(m.ToolCall("call_1", "ls", "")))
        await messages.finish(draft, m.Finish("tool_use", 4))
        result, durable = messages.add(
            sid, "tool", [m.ToolResultPart(m.ToolResult("call_1", "ls", "main.go"))]
        )
        await durable
        await stream.until(result.id.encode())
        published = [
            (inner["type"], inner["payload"]["role"], inner["payload"]["id"])
            for type_, inner in crush_events(stream)
            if type_ == "message"
        ]
    answer = draft.message.id
    assert published[0] == ("created", "assistant", answer)
    assert published[-1] == ("created", "tool", result.id)
    assert published[1:-1] == [("updated", "assistant", answer)] * (len(published) - 2)
    assert m.is_finished((await remote.messages(sid))[0].parts)


@contract("WIRE-8")
async def test_workspace_without_a_model_is_neither_ready_nor_busy(
    tmp_path: Path, kind: str
) -> None:
    async with open_flow(tmp_path, kind, config=NO_MODEL) as flow:
        remote, sid = await opened(flow)
        info = cast("dict[str, Any]", (await send(flow, "GET", remote.path("/agent"))).json())
        assert (info["is_busy"], info["is_ready"]) == (False, False)
        assert await busy_flags(flow, remote, sid) == [False] * 4


@asynccontextmanager
async def open_with_model(
    folder: Path, kind: str, *replies: Reply
) -> AsyncGenerator[tuple[FlowServer, ModelServer]]:
    script = Script([*replies], [ReplyRule("Write a title", Reply(text="A title"))])
    async with (
        open_model_server(script) as model,
        open_flow(folder, kind, config=model_config(model.url)) as flow,
        asyncio.timeout(WAIT_S),
    ):
        yield flow, model


async def busy_flags(flow: FlowServer, remote: RemoteWorkspace, sid: SessionId) -> list[bool]:
    """`is_busy` of the agent, and of the session in every response."""
    listed = [session.is_busy for session in await remote.sessions()]
    for path in ("/agent", f"/agent/sessions/{sid}", f"/sessions/{sid}"):
        shown = cast("dict[str, Any]", (await send(flow, "GET", remote.path(path))).json())
        listed.append(shown["is_busy"])
    return listed


@contract("WIRE-8")
async def test_session_is_busy_from_acceptance_until_its_end_is_published(
    tmp_path: Path, kind: str
) -> None:
    async with open_with_model(tmp_path, kind, Reply(text="Hello", hold_after=0)) as (flow, model):
        remote, sid = await opened(flow)
        async with open_events(flow, remote, view="crush") as stream:
            body = {"session_id": sid, "prompt": "hi"}
            assert (await send(flow, "POST", remote.path("/agent"), body)).status == 202
            assert await busy_flags(flow, remote, sid) == [True] * 4
            await model.until_requests(1)
            model.release()
            await stream.until(b"agent_finished")
            assert await busy_flags(flow, remote, sid) == [False] * 4
            # In events it is always false, because it would be stale when read.
            published = [
                inner["payload"] for type_, inner in crush_events(stream) if type_ == "session"
            ]
            assert {session["is_busy"] for session in published} == {False}


@contract("WIRE-8")
async def test_run_keeps_its_session_busy_when_its_model_is_removed(
    tmp_path: Path, kind: str
) -> None:
    async with open_with_model(tmp_path, kind, Reply(text="Hello", hold_after=0)) as (flow, model):
        remote, sid = await opened(flow)
        body = {"session_id": sid, "prompt": "hi"}
        await send(flow, "POST", remote.path("/agent"), body)
        await model.until_requests(1)
        gone: dict[str, object] = {"scope": 1, "key": "providers.demo.disable", "value": True}
        assert (await send(flow, "POST", remote.path("/config/set"), gone)).status == 200
        info = cast("dict[str, Any]", (await send(flow, "GET", remote.path("/agent"))).json())
        # A new prompt is accepted, and ends with an error that names the reason.
        assert (info["is_busy"], info["is_ready"]) == (True, True)
        assert (await send(flow, "POST", remote.path("/agent"), body)).status == 202
        assert await busy_flags(flow, remote, sid) == [True] * 4


@contract("WIRE-8")
async def test_session_is_not_busy_after_a_cancel(tmp_path: Path, kind: str) -> None:
    async with open_with_model(tmp_path, kind, Reply(text="Hello", hold_after=0)) as (flow, model):
        remote, sid = await opened(flow)
        async with open_events(flow, remote, view="crush") as stream:
            body = {"session_id": sid, "prompt": "hi"}
            await send(flow, "POST", remote.path("/agent"), body)
            await model.until_requests(1)
            path = remote.path(f"/agent/sessions/{sid}/cancel")
            assert (await send(flow, "POST", path)).status == 200
            await stream.until(b"run_complete")
            assert await busy_flags(flow, remote, sid) == [False] * 4


@contract("WIRE-9")
async def test_every_run_complete_event_has_run_message_and_text(tmp_path: Path, kind: str) -> None:
    replies = Reply(text="One."), Reply(text="Two.")
    async with open_with_model(tmp_path, kind, *replies) as (flow, _):
        remote, sid = await opened(flow)
        async with open_events(flow, remote, view="crush") as stream:
            runs: list[str] = []
            for given, text in (({"run_id": "mine"}, b"One."), ({}, b"Two.")):
                body = {"session_id": sid, "prompt": "hi", **given}
                answer = await send(flow, "POST", remote.path("/agent"), body)
                assert (answer.status, answer.body) == (202, b"")
                runs.append(answer.headers[RUN_HEADER.lower()])
                await stream.until(b'"text":"%b","error"' % text)
            ends = [inner for type_, inner in crush_events(stream) if type_ == "run_complete"]
        answers = [m for m in await remote.messages(sid) if m.role == "assistant"]
    assert [end["type"] for end in ends] == ["updated", "updated"]
    assert [end["payload"] for end in ends] == [
        {
            "session_id": sid, "run_id": run_id, "message_id": message.id,
            "text": text, "error": "", "cancelled": False, "culm_reason": "",
        }
        for run_id, message, text in zip(runs, answers, ("One.", "Two."), strict=True)
    ]  # fmt: skip
    assert runs[0] == "mine"


@contract("WIRE-10")
async def test_answer_to_an_unknown_ask_is_200_repeatedly(
    flow: FlowServer,
) -> None:
    remote, _ = await opened(flow)
    body = {"permission": {"id": UNKNOWN}, "action": "allow"}
    for _ in range(2):
        answer = await send(flow, "POST", remote.path("/permissions/grant"), body)
        assert (answer.status, answer.json()) == (200, {"resolved": False})


@contract("WIRE-11")
async def test_message_list_has_everything_that_was_streamed(flow: FlowServer) -> None:
    remote, sid = await opened(flow)
    messages = flow.workspace(remote.id).messages
    draft, durable = messages.open(sid)
    await durable
    async with open_events(flow, remote) as stream:
        messages.append(draft, 0, "text", "not yet committed, but told")
        await stream.until(b"but told")
        listed: list[Message] = await remote.messages(sid)
    assert listed[0].parts == [m.TextPart(m.Text("not yet committed, but told"))]


@contract("WIRE-12")
async def test_stream_ends_at_shutdown_and_the_workspace_is_found_again(
    tmp_path: Path, kind: str
) -> None:
    async with open_flow(tmp_path, kind) as flow:
        remote, sid = await opened(flow)
        async with open_events(flow, remote) as stream, asyncio.TaskGroup() as tasks:
            ending = tasks.create_task(stream.end())
            tasks.create_task(flow.server.registry.close())
            await ending
    async with open_flow(tmp_path, kind) as flow:
        again = await (await flow.client()).open_workspace(flow.directory())
        assert again.id == remote.id
        assert [session.id for session in await again.sessions()] == [sid]
