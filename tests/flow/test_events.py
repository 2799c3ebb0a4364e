"""What a stream says and how: both views, deltas, filters, heartbeats, the bytes themselves."""

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
    """An open assistant message in a session of its own, durable already."""
    session = await remote.create_session("s")
    messages = flow.workspace(remote.id).messages
    draft, durable = messages.open(session.id, model="m", provider="p")
    await durable
    return messages, draft


def texts(events: RawStream) -> list[str]:
    """The whole texts that came with `message/updated`."""
    found: list[str] = []
    for told in events.events():
        if (told.type, told.op) == ("message", "updated"):
            parts = told.read(Message).parts
            found.append("".join(p.data.text for p in parts if isinstance(p, TextPart)))
    return found


def deltas(events: RawStream) -> list[MessageDelta]:
    return [told.read(MessageDelta) for told in events.events() if told.type == "message_delta"]


@contract("INV-60")
async def test_deltas_inside_one_window_give_the_crush_view_one_whole_message_at_its_end(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    messages, draft = await drafted(flow, remote)
    async with open_events(flow, remote, view="crush") as events:
        for word in ("one ", "two ", "three"):
            messages.append(draft, 0, "text", word)
            flow.clock.advance(0.010)
            await flow.settle()
        flow.clock.advance(WINDOW_S - 0.030 - 0.0001)
        session = await remote.create_session("a mark between")
        await events.until(session.id.encode())
        assert texts(events) == [""]  # What it was told as it attached.
        flow.clock.advance(0.0002)
        await events.until(b"one two three")
        flow.clock.advance(10 * WINDOW_S)
        await remote.rename_session(session.id, "a mark after")
        await events.until(b"a mark after")
        assert texts(events) == ["", "one two three"]


@contract("INV-60")
async def test_deltas_in_two_windows_give_the_crush_view_two_messages(flow: FlowServer) -> None:
    remote = await opened(flow)
    messages, draft = await drafted(flow, remote)
    async with open_events(flow, remote, view="crush") as events:
        for word in ("one ", "two"):
            messages.append(draft, 0, "text", word)
            flow.clock.advance(WINDOW_S)
            await events.until(word.encode())
        await messages.finish(draft, Finish("end_turn", 1))
        await events.until(b"end_turn")
        flow.clock.advance(10 * WINDOW_S)
        await flow.settle()
        assert texts(events) == ["", "one ", "one two", "one two"]


@contract("INV-61")
async def test_structural_changes_are_durable_and_told_without_waiting_for_a_window(
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
async def test_a_message_that_grew_and_one_put_whole_end_in_the_same_stored_state(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    messages, grown = await drafted(flow, remote)
    whole, _ = messages.open(grown.message.session_id, model="m", provider="p")
    words = ["grüße ", "🌱" * 5000, " and ", "x" * 9000]
    for word in words:
        messages.append(grown, 0, "text", word)
        flow.clock.advance(0.02)
        await asyncio.sleep(0)
    messages.append(grown, 1, "input", '{"a":')
    messages.append(grown, 1, "input", "1}")
    messages.put(grown, 1, ToolCallPart(ToolCall("c", "bash", '{"a":1}', finished=True)))
    messages.put(whole, 0, TextPart(Text("".join(words))))
    messages.put(whole, 1, ToolCallPart(ToolCall("c", "bash", '{"a":1}', finished=True)))
    messages.finish(grown, Finish("tool_use", 9))
    await messages.finish(whole, Finish("tool_use", 9))
    one, two = await remote.messages(grown.message.session_id)
    assert one.parts == two.parts
    assert len(one.parts) == 3


@contract("INV-63")
async def test_a_flush_waits_for_the_writes_in_flight_and_leaves_nothing_pending(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    messages, draft = await drafted(flow, remote)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        with held_database(flow.folder / "data", flow.directory()):
            messages.append(draft, 0, "text", "kept")
            flushing = tasks.create_task(messages.flush())
            await flow.settle()
            assert not flushing.done()
    stored = await flow.workspace(remote.id).store.read(chunk_texts)
    assert stored == ["kept"]


def chunk_texts(connection: sqlite3.Connection) -> list[str]:
    return [row[0] for row in connection.execute("SELECT text FROM chunks")]


@contract("INV-64")
async def test_a_deleted_message_is_not_resurrected_by_what_was_on_its_way(
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
async def test_a_deleted_session_is_not_resurrected_by_an_open_message(flow: FlowServer) -> None:
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
        assert "message_snapshot" not in events.told()


@contract("INV-65")
async def test_telling_never_waits_for_a_client_that_does_not_read(flow: FlowServer) -> None:
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
async def test_every_stream_of_a_view_receives_every_event_in_the_same_bytes(
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
            told = [await events.until(f"end of {view}".encode()) for events in streams]
            tails = {data.partition(mark.id.encode())[2] for data in told}
            assert len(tails) == 1
            assert tails.pop().count(b"data: ") >= 9


@contract("INV-66")
async def test_events_without_any_stream_are_no_error(flow: FlowServer) -> None:
    remote = await opened(flow)
    messages, draft = await drafted(flow, remote)
    messages.append(draft, 0, "text", "unheard")
    flow.clock.advance(1)
    await messages.finish(draft, Finish("end_turn", 1))
    assert len(await remote.messages(draft.message.session_id)) == 1


@contract("INV-66")
@pytest.mark.parametrize("cursor", ["", "another.7"])
@pytest.mark.parametrize("view", ["crush", "delta"])
async def test_nothing_told_after_the_head_of_a_stream_misses_it_however_slow_the_disk(
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
async def test_a_type_that_crush_does_not_know_is_dropped_from_its_view_and_never_mapped(
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
        assert crush.told() == ["run_complete"]
        assert delta.told() == ["run_changed", "run_complete"]


@contract("EXC-13")
async def test_the_crush_view_has_the_cursor_as_a_key_and_no_id_lines(flow: FlowServer) -> None:
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
async def test_a_growing_message_costs_traffic_linear_in_its_length(flow: FlowServer) -> None:
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
async def test_deltas_of_one_turn_of_the_loop_arrive_as_one(flow: FlowServer) -> None:
    remote = await opened(flow)
    messages, draft = await drafted(flow, remote)
    async with open_events(flow, remote) as events:
        for word in ("one ", "🌱 ", "three"):
            messages.append(draft, 0, "text", word)
        messages.append(draft, 1, "input", "{}")
        messages.append(draft, 0, "text", "!")
        await events.until(b'"input"')
        merged = [(d.part, d.offset, d.text) for d in deltas(events)]
        assert merged == [(0, 0, "one 🌱 three!"), (1, 0, "{}")]


@contract("EXC-14")
async def test_a_delta_is_not_told_before_the_durable_events_of_its_message(
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


def text_in(told: ServerEvent) -> str:
    first = told.read(Message).parts[0]
    assert isinstance(first, TextPart)
    return first.data.text


@contract("EXC-14")
async def test_a_stream_can_be_narrowed_to_sessions_and_to_types(flow: FlowServer) -> None:
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
        assert session_one.told().count("message_delta") == 1
        assert {t.type for t in two_types.events()} == {"session", "message_delta"}
        assert one.id.encode() not in narrow.seen
        assert set(narrow.told()) == {"session"}


@contract("EXC-14")
@pytest.mark.parametrize("query", ["types=session,nonsense", "view=other", "cursor=x"])
async def test_a_wish_that_cannot_be_met_is_400_and_registers_nothing(
    flow: FlowServer, query: str
) -> None:
    remote = await opened(flow)
    target = remote.path(f"/events?client_id={Ids().client()}&{query}")
    answer = await send(flow, "GET", target)
    assert (answer.status, answer.headers["content-type"]) == (400, "application/json")
    await remote.release()
    assert flow.server.registry.list() == []


@contract("EXC-14")
async def test_heartbeats_keep_both_views_alive_every_15_seconds(flow: FlowServer) -> None:
    remote = await opened(flow)
    async with (
        open_events(flow, remote, view="crush") as crush,
        open_events(flow, remote, types="session") as delta,
    ):
        flow.clock.advance(HEARTBEAT_S - 0.1)
        await flow.settle()
        for _ in range(2):
            flow.clock.advance(HEARTBEAT_S)
        session = await remote.create_session("s")
        told_crush = await crush.until(session.id.encode())
        told_delta = await delta.until(session.id.encode())
        assert told_crush.startswith(b"\n\ndata: ")
        assert told_delta.startswith(b":\n\n:\n\nid: ")
        assert delta.told() == ["session"]


@contract("EXC-14")
async def test_a_head_request_on_events_registers_nothing(flow: FlowServer) -> None:
    remote = await opened(flow)
    async with open_events(flow, remote) as events:
        stranger = Ids().client()
        answer = await send(flow, "HEAD", remote.path(f"/events?client_id={stranger}"))
        assert (answer.status, answer.body) == (200, b"")
        assert answer.headers["content-type"].startswith("text/event-stream")
        session = await remote.create_session("s")
        await events.until(session.id.encode())
        assert stranger.encode() not in events.seen
        assert list(flow.workspace(remote.id).claims.by_client) == [remote.client.id]


@contract("EXC-14")
@pytest.mark.parametrize("view", ["crush", "delta"])
async def test_a_stream_is_delimited_by_its_close_and_by_nothing_else(
    flow: FlowServer, view: str
) -> None:
    remote = await opened(flow)
    async with open_events(flow, remote, view=view) as events:
        assert events.status == 200
        assert events.headers["content-type"].startswith("text/event-stream")
        assert events.headers["cache-control"] == "no-cache"
        assert not {"transfer-encoding", "content-length", "content-encoding"} & set(events.headers)
        assert events.headers["connection"] == "close"
        session = await remote.create_session("last")
        await remote.client.retire()
        told = await events.end()
        assert told.endswith(b"\n\n")
        assert session.id.encode() in told


@contract("EXC-14")
async def test_the_head_of_a_stream_arrives_before_any_event(flow: FlowServer) -> None:
    remote = await opened(flow)
    async with open_events(flow, remote, view="crush") as events:
        assert (events.status, events.seen) == (200, b"")
