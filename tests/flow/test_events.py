"""Event streams: both views, deltas, filters, heartbeats, the raw bytes."""

import asyncio
import sqlite3
import threading
from contextlib import AsyncExitStack

import pytest

from culm.client.stream import ServerEvent
from culm.client.workspace import RemoteWorkspace
from culm.ids import Ids
from culm.run.draft import Draft
from culm.run.messages import Messages
from culm.store.writer import READERS
from culm.wire.events import MessageDelta
from culm.wire.messages import (
    Finish,
    Message,
    Reasoning,
    ReasoningPart,
    Text,
    TextPart,
    ToolCall,
    ToolCallPart,
)
from tests.flow.conftest import FlowServer
from tests.flow.drive import RawStream, held_database, open_events, send
from tests.support import WAIT_S, contract

WINDOW_S = 0.033
HEARTBEAT_S = 15


async def opened(flow: FlowServer) -> RemoteWorkspace:
    return await (await flow.client()).open_workspace(flow.directory())


async def drafted(flow: FlowServer, remote: RemoteWorkspace) -> tuple[Messages, Draft]:
    """An open, durable assistant message in its own session."""
    session = await remote.create_session("s")
    messages = flow.workspace(remote.id).messages
    draft, durable = messages.open(session.id, model="m", provider="p")
    await durable
    return messages, draft


def texts(events: RawStream) -> list[str]:
    """The complete texts of the `message/updated` events."""
    found: list[str] = []
    for event in events.events():
        if (event.type, event.op) == ("message", "updated"):
            parts = event.read(Message).parts
            found.append("".join(p.data.text for p in parts if isinstance(p, TextPart)))
    return found


def deltas(events: RawStream) -> list[MessageDelta]:
    return [event.read(MessageDelta) for event in events.events() if event.type == "message_delta"]


@contract("INV-60")
async def test_deltas_in_one_window_are_one_message_in_the_crush_view(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    messages, draft = await drafted(flow, remote)
    async with open_events(flow, remote, view="crush") as events:
        for text in ("one ", "two ", "three"):
            messages.append(draft, 0, "text", text)
            flow.clock.advance(0.010)
            await flow.run_ready()
        flow.clock.advance(WINDOW_S - 0.030 - 0.0001)
        session = await remote.create_session("a mark between")
        await events.until(session.id.encode())
        assert texts(events) == [""]  # The initial event of the stream.
        flow.clock.advance(0.0002)
        await events.until(b"one two three")
        flow.clock.advance(10 * WINDOW_S)
        await remote.rename_session(session.id, "a mark after")
        await events.until(b"a mark after")
        assert texts(events) == ["", "one two three"]


@contract("INV-60")
async def test_deltas_in_two_windows_are_two_messages_in_the_crush_view(flow: FlowServer) -> None:
    remote = await opened(flow)
    messages, draft = await drafted(flow, remote)
    async with open_events(flow, remote, view="crush") as events:
        for text in ("one ", "two"):
            messages.append(draft, 0, "text", text)
            flow.clock.advance(WINDOW_S)
            await events.until(text.encode())
        await messages.finish(draft, Finish("end_turn", 1))
        await events.until(b"end_turn")
        flow.clock.advance(10 * WINDOW_S)
        await flow.run_ready()
        assert texts(events) == ["", "one ", "one two", "one two"]


@contract("INV-61")
async def test_structural_changes_are_durable_and_published_at_once(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    messages, draft = await drafted(flow, remote)
    call = ToolCall("call-1", "bash", "", finished=False)
    done = ToolCall("call-1", "bash", '{"a":1}', finished=True)
    async with open_events(flow, remote, view="crush") as events, asyncio.timeout(WAIT_S):
        messages.append(draft, 0, "reasoning", "hmm")
        await messages.put(draft, 0, ReasoningPart(Reasoning("hmm", "", 1, finished_at=77)))
        assert [p.data.finished_at for p in await reasonings(remote, draft)] == [77]
        await events.until(b'"finished_at":77')
        await messages.put(draft, 1, ToolCallPart(call))
        await events.until(b'"call-1"')
        await messages.put(draft, 1, ToolCallPart(done))
        await events.until(b'"finished":true')
        await messages.finish(draft, Finish("tool_use", 5))
        await events.until(b'"tool_use"')
        (stored,) = await remote.messages(draft.message.session_id)
        assert events.events()[-1].read(Message) == stored


async def reasonings(remote: RemoteWorkspace, draft: Draft) -> list[ReasoningPart]:
    (stored,) = await remote.messages(draft.message.session_id)
    return [part for part in stored.parts if isinstance(part, ReasoningPart)]


@contract("INV-62")
async def test_streamed_and_complete_messages_are_stored_identically(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    messages, grown = await drafted(flow, remote)
    whole, _ = messages.open(grown.message.session_id, model="m", provider="p")
    pieces = ["grüße ", "🌱" * 5000, " and ", "x" * 9000]
    for piece in pieces:
        messages.append(grown, 0, "text", piece)
        flow.clock.advance(0.02)
        await asyncio.sleep(0)
    messages.append(grown, 1, "input", '{"a":')
    messages.append(grown, 1, "input", "1}")
    messages.put(grown, 1, ToolCallPart(ToolCall("c", "bash", '{"a":1}', finished=True)))
    messages.put(whole, 0, TextPart(Text("".join(pieces))))
    messages.put(whole, 1, ToolCallPart(ToolCall("c", "bash", '{"a":1}', finished=True)))
    messages.finish(grown, Finish("tool_use", 9))
    await messages.finish(whole, Finish("tool_use", 9))
    one, two = await remote.messages(grown.message.session_id)
    assert one.parts == two.parts
    assert len(one.parts) == 3


@contract("INV-63")
async def test_flush_waits_for_pending_writes(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    messages, draft = await drafted(flow, remote)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        with held_database(flow.folder / "data", flow.directory()):
            messages.append(draft, 0, "text", "kept")
            flushing = tasks.create_task(messages.flush())
            await flow.run_ready()
            assert not flushing.done()
    stored = await flow.workspace(remote.id).store.read(chunk_texts)
    assert stored == ["kept"]


def chunk_texts(connection: sqlite3.Connection) -> list[str]:
    return [row[0] for row in connection.execute("SELECT text FROM chunks")]


@contract("INV-64")
async def test_deleted_message_is_not_recreated_by_pending_deltas(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    messages, draft = await drafted(flow, remote)
    session_id = draft.message.session_id
    async with (
        open_events(flow, remote, view="crush") as crush,
        open_events(flow, remote) as delta,
        asyncio.timeout(WAIT_S),
    ):
        messages.append(draft, 0, "text", "on its way")
        gone = messages.delete(draft.message.id)
        messages.append(draft, 0, "text", "too late")
        await gone
        flow.clock.advance(10)
        await messages.flush()
        await remote.rename_session(session_id, "the end")
        for events in (crush, delta):
            await events.until(b"the end")
            about = [t for t in events.events() if draft.message.id.encode() in bytes(t.payload)]
            assert (about[-1].type, about[-1].op) == ("message", "deleted")
            assert b"too late" not in events.seen
    assert await remote.messages(session_id) == []
    assert (await remote.session(session_id)).message_count == 0


@contract("INV-64")
async def test_deleted_session_is_not_recreated_by_an_open_message(flow: FlowServer) -> None:
    remote = await opened(flow)
    messages, draft = await drafted(flow, remote)
    messages.append(draft, 0, "text", "lost")
    await remote.delete_session(draft.message.session_id)
    messages.append(draft, 0, "text", "too late")
    flow.clock.advance(10)
    await messages.flush()
    assert await remote.sessions() == []
    assert (await remote.snapshot("*")).messages == []
    async with open_events(flow, remote) as events:
        mark = await remote.create_session("mark")
        await events.until(mark.id.encode())
        assert "message_snapshot" not in events.types()


@contract("INV-65")
async def test_publishing_does_not_wait_for_a_client_that_does_not_read(flow: FlowServer) -> None:
    remote = await opened(flow)
    messages, draft = await drafted(flow, remote)
    async with open_events(flow, remote, client_id=Ids().client()), open_events(flow, remote) as ok:
        for number in range(64):
            messages.append(draft, number, "text", "x" * (1 << 16))
            await ok.until(f'"part":{number},'.encode())
        async with asyncio.timeout(WAIT_S):
            await messages.finish(draft, Finish("end_turn", 1))
        await ok.until(b"end_turn")


@contract("INV-66")
async def test_every_stream_of_a_view_receives_identical_bytes(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    messages, draft = await drafted(flow, remote)
    for view in ("delta", "crush"):
        async with AsyncExitStack() as stack:
            streams = [
                await stack.enter_async_context(
                    open_events(flow, remote, view=view, client_id=Ids().client())
                )
                for _ in range(5)
            ]
            mark = await remote.create_session(f"begin {view}")
            for events in streams:
                await events.until(mark.id.encode())
            for number in range(20):
                messages.append(draft, 0, "text", f"{number} ")
                await asyncio.sleep(0)
                if number % 5 == 0:
                    await remote.rename_session(mark.id, f"at {number}")
                    flow.clock.advance(WINDOW_S)
            flow.clock.advance(HEARTBEAT_S)
            await remote.rename_session(mark.id, f"end of {view}")
            received = [await events.until(f"end of {view}".encode()) for events in streams]
            tails = {data.partition(mark.id.encode())[2] for data in received}
            assert len(tails) == 1
            assert tails.pop().count(b"data: ") >= 9


@contract("INV-66")
async def test_events_without_a_stream_are_not_an_error(flow: FlowServer) -> None:
    remote = await opened(flow)
    messages, draft = await drafted(flow, remote)
    messages.append(draft, 0, "text", "unheard")
    flow.clock.advance(1)
    await messages.finish(draft, Finish("end_turn", 1))
    assert len(await remote.messages(draft.message.session_id)) == 1


@contract("INV-66")
@pytest.mark.parametrize("cursor", ["", "another.7"])
@pytest.mark.parametrize("view", ["crush", "delta"])
async def test_events_after_the_response_head_are_received_despite_a_slow_disk(
    flow: FlowServer, view: str, cursor: str
) -> None:
    remote = await opened(flow)
    store = flow.workspace(remote.id).store
    slow = threading.Event()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(READERS):
            tasks.create_task(store.read(lambda _: slow.wait(WAIT_S)))
        await asyncio.sleep(0)
        async with open_events(flow, remote, view=view, cursor=cursor) as events:
            session = await remote.create_session("told after the head")
            slow.set()
            await events.until(session.id.encode())


@contract("INV-67")
async def test_event_type_unknown_to_crush_is_omitted_from_its_view(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    store = flow.workspace(remote.id).store
    async with (
        open_events(flow, remote, view="crush") as crush,
        open_events(flow, remote) as delta,
    ):
        await store.append("run_changed", "updated", payload=b'{"run_id":"r1"}')
        await store.append("run_complete", "updated", payload=b'{"run_id":"r2"}')
        for events in (crush, delta):
            await events.until(b'"r2"')
        assert crush.types() == ["run_complete"]
        assert delta.types() == ["run_changed", "run_complete"]


@contract("EXC-13")
async def test_crush_view_has_the_cursor_as_a_key_and_no_id_lines(flow: FlowServer) -> None:
    remote = await opened(flow)
    async with (
        open_events(flow, remote, view="crush") as crush,
        open_events(flow, remote) as delta,
    ):
        session = await remote.create_session("s")
        for events in (crush, delta):
            await events.until(session.id.encode())
        (here,), (there,) = crush.events(), [t for t in delta.events() if t.type == "session"]
        assert here == there
        assert here.cursor.endswith(".1")
        assert b"id:" not in crush.seen
        assert f"id: {there.cursor}\n".encode() in delta.seen
        assert b'"cursor"' not in delta.seen
        lines = crush.seen.split(b"\n")
        assert [line for line in lines if line and not line.startswith(b'data: {"type":')] == []


@contract("EXC-14")
async def test_streaming_traffic_is_linear_in_the_message_length(flow: FlowServer) -> None:
    remote = await opened(flow)
    messages, draft = await drafted(flow, remote)
    async with open_events(flow, remote) as events:
        await events.until(b"message_snapshot")
        before = len(events.seen)
        for number in range(200):
            messages.append(draft, 0, "text", f"{number:03} " * 5)
            await asyncio.sleep(0)
        await events.until(b"199 199")
        assert "".join(d.text for d in deltas(events)) == "".join(
            f"{number:03} " * 5 for number in range(200)
        )
        assert len(events.seen) - before < 200 * 500


@contract("EXC-14")
async def test_deltas_of_one_loop_iteration_are_merged(flow: FlowServer) -> None:
    remote = await opened(flow)
    messages, draft = await drafted(flow, remote)
    async with open_events(flow, remote) as events:
        for text in ("one ", "🌱 ", "three"):
            messages.append(draft, 0, "text", text)
        messages.append(draft, 1, "input", "{}")
        messages.append(draft, 0, "text", "!")
        await events.until(b'"input"')
        merged = [(d.part, d.offset, d.text) for d in deltas(events)]
        assert merged == [(0, 0, "one 🌱 three!"), (1, 0, "{}")]


@contract("EXC-14")
async def test_delta_is_published_after_the_durable_events_of_its_message(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    session = await remote.create_session("s")
    messages = flow.workspace(remote.id).messages
    async with open_events(flow, remote) as events:
        draft, _ = messages.open(session.id)
        messages.append(draft, 0, "text", "first words")
        messages.put(draft, 1, ToolCallPart(ToolCall("c", "bash", "", finished=False)))
        messages.append(draft, 1, "input", "{}")
        await events.until(b'"input","offset"')
        about = [t for t in events.events() if t.type in ("message", "message_delta")]
        assert [(t.type, t.op) for t in about] == [
            ("message", "created"),
            ("message", "updated"),
            ("message_delta", "updated"),
        ]
        assert text_in(about[1]) == "first words"


def text_in(event: ServerEvent) -> str:
    first = event.read(Message).parts[0]
    assert isinstance(first, TextPart)
    return first.data.text


@contract("EXC-14")
async def test_stream_can_be_filtered_by_sessions_and_types(flow: FlowServer) -> None:
    remote = await opened(flow)
    one, two = await remote.create_session("one"), await remote.create_session("two")
    messages = flow.workspace(remote.id).messages
    async with (
        open_events(flow, remote, sessions=one.id) as session_one,
        open_events(flow, remote, types="session,message_delta") as two_types,
        open_events(flow, remote, sessions=f"{two.id},x", types="session", view="crush") as narrow,
    ):
        drafts = [messages.open(session.id)[0] for session in (one, two)]
        for draft in drafts:
            messages.append(draft, 0, "text", "hello")
        await messages.flush()
        for session in (one, two):
            await remote.rename_session(session.id, "the end")
        await session_one.until(b"the end")
        await narrow.until(b"the end")
        await two_types.until(b"the end")
        assert two.id.encode() not in session_one.seen
        assert session_one.types().count("message_delta") == 1
        assert {t.type for t in two_types.events()} == {"session", "message_delta"}
        assert one.id.encode() not in narrow.seen
        assert set(narrow.types()) == {"session"}


@contract("EXC-14")
@pytest.mark.parametrize("query", ["types=session,nonsense", "view=other", "cursor=x"])
async def test_invalid_stream_parameter_is_400_and_registers_nothing(
    flow: FlowServer, query: str
) -> None:
    remote = await opened(flow)
    target = remote.path(f"/events?client_id={Ids().client()}&{query}")
    answer = await send(flow, "GET", target)
    assert (answer.status, answer.headers["content-type"]) == (400, "application/json")
    await remote.release()
    assert flow.server.registry.list() == []


@contract("EXC-14")
async def test_both_views_receive_a_heartbeat_every_15_seconds(flow: FlowServer) -> None:
    remote = await opened(flow)
    async with (
        open_events(flow, remote, view="crush") as crush,
        open_events(flow, remote, types="session") as delta,
    ):
        flow.clock.advance(HEARTBEAT_S - 0.1)
        await flow.run_ready()
        for _ in range(2):
            flow.clock.advance(HEARTBEAT_S)
        session = await remote.create_session("s")
        crush_bytes = await crush.until(session.id.encode())
        delta_bytes = await delta.until(session.id.encode())
        assert crush_bytes.startswith(b"\n\ndata: ")
        assert delta_bytes.startswith(b":\n\n:\n\nid: ")
        assert delta.types() == ["session"]


@contract("EXC-14")
async def test_head_request_on_events_registers_nothing(flow: FlowServer) -> None:
    remote = await opened(flow)
    async with open_events(flow, remote) as events:
        stranger = Ids().client()
        answer = await send(flow, "HEAD", remote.path(f"/events?client_id={stranger}"))
        assert (answer.status, answer.body) == (200, b"")
        assert answer.headers["content-type"].startswith("text/event-stream")
        session = await remote.create_session("s")
        await events.until(session.id.encode())
        assert stranger.encode() not in events.seen
        assert list(flow.workspace(remote.id).lifetime.claims.by_client) == [remote.client.id]


@contract("EXC-14")
@pytest.mark.parametrize("view", ["crush", "delta"])
async def test_stream_is_delimited_by_connection_close(flow: FlowServer, view: str) -> None:
    remote = await opened(flow)
    async with open_events(flow, remote, view=view) as events:
        assert events.status == 200
        assert events.headers["content-type"].startswith("text/event-stream")
        assert events.headers["cache-control"] == "no-cache"
        assert not {"transfer-encoding", "content-length", "content-encoding"} & set(events.headers)
        assert events.headers["connection"] == "close"
        session = await remote.create_session("last")
        await remote.client.retire()
        received = await events.end()
        assert received.endswith(b"\n\n")
        assert session.id.encode() in received


@contract("EXC-14")
async def test_response_head_of_a_stream_arrives_before_any_event(flow: FlowServer) -> None:
    remote = await opened(flow)
    async with open_events(flow, remote, view="crush") as events:
        assert (events.status, events.seen) == (200, b"")
