"""Resumed streams: a reconnected client ends in the state of one that stayed connected."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from culm.client.follower import open_mirror
from culm.client.mirror import Mirror
from culm.client.stream import SseParser
from culm.client.workspace import RemoteWorkspace
from culm.ids import Ids, SessionId
from culm.run.draft import Draft
from culm.run.messages import Messages
from culm.settings import Settings
from culm.store.store import trim
from culm.wire.events import MessageDelta, Resync
from culm.wire.messages import Finish, Message, Session, Text, TextPart, ToolCall, ToolCallPart
from tests.flow.conftest import FlowServer, open_flow
from tests.flow.drive import RawStream, ReconnectingMirror, open_events, send
from tests.support import WAIT_S, contract


async def opened(flow: FlowServer) -> RemoteWorkspace:
    return await (await flow.client()).open_workspace(flow.directory())


async def three_sessions(flow: FlowServer) -> tuple[RemoteWorkspace, str]:
    """A workspace with three numbered events, and the epoch of its log."""
    remote = await opened(flow)
    for title in ("first", "second", "third"):
        await remote.create_session(title)
    return remote, (await remote.snapshot()).cursor.partition(".")[0]


async def read_on(
    flow: FlowServer,
    remote: RemoteWorkspace,
    *,
    view: str = "delta",
    last_event_id: str | None = None,
    first: bytes = b"",
    cursor: str = "",
) -> RawStream:
    """Read a stream from its start, through `first`, to a new event."""
    headers = {"Last-Event-ID": last_event_id}
    async with open_events(flow, remote, view=view, headers=headers, cursor=cursor) as events:
        if first:
            await events.until(first)
        mark = await remote.create_session("now")
        await events.until(mark.id.encode())
        return events


def titles(events: RawStream) -> list[str]:
    return [event.read(Session).title for event in events.events() if event.type == "session"]


@contract("EXC-13")
@pytest.mark.parametrize("view", ["delta", "crush"])
async def test_stream_resumes_after_the_cursor_of_its_query(flow: FlowServer, view: str) -> None:
    remote, epoch = await three_sessions(flow)
    events = await read_on(flow, remote, view=view, cursor=f"{epoch}.1")
    assert titles(events) == ["second", "third", "now"]
    numbered = [event.cursor for event in events.events() if event.type == "session"]
    assert numbered == [f"{epoch}.2", f"{epoch}.3", f"{epoch}.4"]


@contract("EXC-13")
async def test_stream_resumes_after_last_event_id_and_the_query_overrides_it(
    flow: FlowServer,
) -> None:
    remote, epoch = await three_sessions(flow)
    events = await read_on(flow, remote, last_event_id=f"{epoch}.2")
    assert titles(events) == ["third", "now"]
    events = await read_on(flow, remote, last_event_id=f"{epoch}.0", cursor=f"{epoch}.3")
    assert titles(events) == ["now", "now"]


@contract("EXC-13")
async def test_stream_without_a_cursor_starts_now_and_cursor_zero_replays_all(
    flow: FlowServer,
) -> None:
    remote, epoch = await three_sessions(flow)
    assert titles(await read_on(flow, remote)) == ["now"]
    events = await read_on(flow, remote, cursor=f"{epoch}.0")
    assert titles(events) == ["first", "second", "third", "now", "now"]


@contract("EXC-13")
@pytest.mark.parametrize(("cursor", "reason"), [("other.1", "another_epoch"), ("{}.99", "future")])
async def test_cursor_of_another_log_gets_a_resync_and_no_replay(
    flow: FlowServer, cursor: str, reason: str
) -> None:
    remote, epoch = await three_sessions(flow)
    events = await read_on(flow, remote, cursor=cursor.format(epoch), first=b'"resync"')
    resync = events.events()[0]
    assert resync.type == "resync"
    assert resync.read(Resync) == Resync(f"{epoch}.3", reason)
    assert resync.cursor == ""
    assert titles(events) == ["now"]
    crush = await read_on(flow, remote, view="crush", cursor=cursor.format(epoch))
    assert crush.types() == ["session"]


@contract("EXC-13")
async def test_trimmed_cursor_gets_a_resync(tmp_path: Path, kind: str) -> None:
    async with open_flow(tmp_path, kind, settings=Settings(retention_events=2)) as flow:
        remote, epoch = await three_sessions(flow)
        async with open_events(flow, remote):
            flow.clock.advance(600)
            await flow.workspace(remote.id).store.write(lambda _: None)
            trimmed = await read_on(flow, remote, cursor=f"{epoch}.0", first=b'"resync"')
            assert trimmed.events()[0].read(Resync) == Resync(f"{epoch}.3", "trimmed")
            assert titles(trimmed) == ["now"]
            kept = await read_on(flow, remote, cursor=f"{epoch}.1")
            assert titles(kept) == ["second", "third", "now", "now"]


@contract("EXC-13")
@pytest.mark.parametrize("cursor", ["x", "1", ".1", "a.", "a.-1", "a.1.5", "a.٣", "a." + "9" * 30])
async def test_malformed_cursor_is_400(flow: FlowServer, cursor: str) -> None:
    remote = await opened(flow)
    path = remote.path(f"/events?client_id={remote.client.id}")
    answer = await send(
        flow, "GET", path, headers={"Last-Event-ID": cursor.encode().decode("latin-1")}
    )
    assert answer.status == 400
    assert b"cursor" in answer.body


@contract("EXC-13")
async def test_resumed_stream_keeps_its_filters(flow: FlowServer) -> None:
    remote, epoch = await three_sessions(flow)
    chosen = (await remote.sessions())[1]
    messages = flow.workspace(remote.id).messages
    _, durable = messages.add(chosen.id, "user", [TextPart(Text("hello"))])
    await durable
    async with open_events(flow, remote, cursor=f"{epoch}.0", sessions=chosen.id) as events:
        await remote.rename_session(chosen.id, "the end")
        await events.until(b"the end")
    assert set(titles(events)) <= {chosen.title, "the end"}
    async with open_events(flow, remote, cursor=f"{epoch}.0", types="message") as events:
        await events.until(b"hello")
        assert events.types() == ["message"]


@contract("EXC-13")
async def test_resumed_stream_receives_each_open_message_once_and_complete(
    flow: FlowServer,
) -> None:
    remote, _ = await three_sessions(flow)
    session = (await remote.sessions())[0]
    messages = flow.workspace(remote.id).messages
    draft, durable = messages.open(session.id)
    await durable
    cursor = (await remote.snapshot()).cursor
    messages.append(draft, 0, "text", "so far, ")
    for view, type_ in (("delta", "message_snapshot"), ("crush", "message")):
        for known in (cursor, ""):
            async with open_events(flow, remote, view=view, cursor=known) as events:
                await events.until(b"so far, ")
                whole = [event for event in events.events() if event.type == type_]
                assert [event.read(Message).parts for event in whole] == [draft.fold().parts]
                assert whole[0].cursor == ""


# --- the same state after any change

Change = Callable[[RemoteWorkspace, Messages, Draft], Awaitable[object]]


async def grow(remote: RemoteWorkspace, messages: Messages, draft: Draft) -> None:
    messages.append(draft, 0, "text", "missed by one 🌱")


async def grow_much(remote: RemoteWorkspace, messages: Messages, draft: Draft) -> None:
    for _ in range(5):
        messages.append(draft, 0, "text", "much " * 2000)
        await asyncio.sleep(0)


async def retry(remote: RemoteWorkspace, messages: Messages, draft: Draft) -> None:
    messages.append(draft, 0, "text", "taken back")
    await messages.clear(draft)
    messages.append(draft, 0, "text", "a second try")


async def retry_shorter(remote: RemoteWorkspace, messages: Messages, draft: Draft) -> None:
    await messages.clear(draft)
    messages.append(draft, 0, "text", "x")


async def call_a_tool(remote: RemoteWorkspace, messages: Messages, draft: Draft) -> None:
    messages.append(draft, 1, "input", '{"a"')
    messages.append(draft, 1, "input", ":1}")
    await messages.put(draft, 1, ToolCallPart(ToolCall("c", "bash", '{"a":1}', finished=True)))


async def finish(remote: RemoteWorkspace, messages: Messages, draft: Draft) -> None:
    messages.append(draft, 0, "text", "the end")
    await messages.finish(draft, Finish("end_turn", 1))


async def delete_the_message(remote: RemoteWorkspace, messages: Messages, draft: Draft) -> None:
    messages.append(draft, 0, "text", "gone")
    await messages.delete(draft.message.id)


async def delete_the_session(remote: RemoteWorkspace, messages: Messages, draft: Draft) -> None:
    messages.append(draft, 0, "text", "gone")
    await remote.delete_session(draft.message.session_id)


async def delete_and_go_on(remote: RemoteWorkspace, messages: Messages, draft: Draft) -> None:
    await remote.delete_session(draft.message.session_id)
    session = await remote.create_session("another")
    other, _ = messages.open(session.id)
    messages.append(other, 0, "text", "another text")


CHANGES: list[Change] = [
    grow,
    grow_much,
    retry,
    retry_shorter,
    call_a_tool,
    finish,
    delete_the_message,
    delete_the_session,
    delete_and_go_on,
]


def ended(mirror: Mirror) -> bool:
    return any(session.title == "all told" for session in mirror.sessions.values())


async def assert_same(remote: RemoteWorkspace, *mirrors: Mirror) -> None:
    stored = Mirror()
    stored.load(await remote.snapshot("*"))
    for mirror in mirrors:
        assert mirror.sessions == stored.sessions
        assert mirror.messages == stored.messages
        assert mirror.runs == stored.runs
        assert mirror.queue == stored.queue
        assert mirror.agents == stored.agents


@contract("EXC-13")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
async def test_reconnected_client_has_the_state_of_a_connected_one(
    flow: FlowServer, change: Change
) -> None:
    remote = await opened(flow)
    session = await remote.create_session("s")
    messages = flow.workspace(remote.id).messages
    draft, _ = messages.open(session.id)
    messages.append(draft, 0, "text", "before ")
    reconnecting = ReconnectingMirror(await opened(flow))
    async with open_mirror(remote) as follower, asyncio.timeout(WAIT_S):
        await follower.connected()
        await reconnecting.load()
        await reconnecting.watch(lambda mirror: bool(mirror.messages))
        await change(remote, messages, draft)
        flow.clock.advance(0.2)
        messages.append(draft, 0, "text", "after")
        await reconnect(remote, reconnecting)
        await follower.until(ended)
        await assert_same(remote, reconnecting.mirror, follower.mirror)


async def reconnect(remote: RemoteWorkspace, reconnecting: ReconnectingMirror) -> None:
    """Resume, and read until an event that was published after catching up."""
    reconnecting.mirror.presence.clear()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(reconnecting.watch(ended))
        await reconnecting.attached()
        await remote.create_session("all told")


@contract("EXC-13")
async def test_client_reconnected_past_the_retention_has_the_same_state(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    session = await remote.create_session("s")
    workspace = flow.workspace(remote.id)
    draft, _ = workspace.messages.open(session.id)
    reconnecting = ReconnectingMirror(await opened(flow))
    async with open_mirror(remote) as follower, asyncio.timeout(WAIT_S):
        await follower.connected()
        await reconnecting.load()
        await retry(remote, workspace.messages, draft)
        await finish(remote, workspace.messages, draft)
        await workspace.store.write(trim(0, 0))
        await reconnect(remote, reconnecting)
        await follower.until(ended)
        await assert_same(remote, reconnecting.mirror, follower.mirror)


# --- a client that stops reading


def flood(messages: Messages, session_id: SessionId) -> Draft:
    """Publish far more than sockets and server buffers hold, durable and open."""
    draft, _ = messages.open(session_id)
    for number in range(160):
        messages.append(draft, 0, "text", f"{number:06} " * 1000)
        messages.add(session_id, "user", [TextPart(Text(f"{number:06} " * 8000))])
    return draft


@contract("EXC-13", "INV-65")
@pytest.mark.parametrize("view", ["delta", "crush"])
async def test_client_that_stops_reading_receives_all_durable_events(
    flow: FlowServer, view: str
) -> None:
    remote = await opened(flow)
    session = await remote.create_session("s")
    messages = flow.workspace(remote.id).messages
    async with open_events(flow, remote, view=view, client_id=Ids().client()) as events:
        draft = flood(messages, session.id)
        async with asyncio.timeout(WAIT_S):
            await messages.flush()
        messages.append(draft, 0, "text", "and its end")
        await messages.finish(draft, Finish("end_turn", 1))
        mark = await remote.create_session("all told")
        await events.until(mark.id.encode())
        mirror = Mirror()
        for event in events.events():
            mirror.apply(event)
        stored = await remote.messages(session.id)
        assert len(stored) == 161
        assert list(mirror.messages.values()) == stored
        numbers = [int(t.cursor.partition(".")[2]) for t in events.events() if t.cursor]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


@contract("EXC-13")
async def test_client_that_stops_reading_past_the_retention_gets_a_resync(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    session = await remote.create_session("s")
    workspace = flow.workspace(remote.id)
    async with open_events(flow, remote) as events:
        flood(workspace.messages, session.id)
        await workspace.messages.flush()
        await remote.create_session("not trimmed")
        await workspace.store.write(trim(0, 0))
        await events.until(b'"resync"')
        (resync,) = [event for event in events.events() if event.type == "resync"]
        assert resync.read(Resync) == Resync((await remote.snapshot()).cursor, "trimmed")
        live = await remote.create_session("live again")
        await events.until(live.id.encode())


@contract("EXC-14")
async def test_live_feed_of_a_slow_client_is_bounded(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    session = await remote.create_session("s")
    messages = flow.workspace(remote.id).messages
    sent = 0
    async with open_events(flow, remote) as slow:
        for number in range(1, 5):
            draft, durable = messages.open(session.id)
            await durable
            for part in range(50):
                messages.append(draft, part, "text", "x" * (1 << 16))
                sent += 1 << 16
                await asyncio.sleep(0)
            await messages.finish(draft, Finish("end_turn", number))
        await slow.until(b'"end_turn","time":4')
    published = SseParser().feed(slow.seen)
    received = sum(len(t.read(MessageDelta).text) for t in published if t.type == "message_delta")
    assert received < sent
    assert [t.read(Message) for t in published if t.type == "message"][-1] == (
        await remote.messages(session.id)
    )[-1]
