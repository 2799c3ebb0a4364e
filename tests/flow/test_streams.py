"""Event streams with two clients, and growing messages."""

import asyncio

import pytest

from culm.client.follower import open_mirror
from culm.wire.messages import Finish, Text, TextPart
from tests.flow.conftest import FlowServer
from tests.support import WAIT_S, contract

pytestmark = pytest.mark.sockets


@contract("INV-2")
async def test_published_event_arrives_at_both_clients(flow: FlowServer) -> None:
    a, b = await flow.client(), await flow.client()
    here, there = await a.open_workspace(flow.directory()), await b.open_workspace(flow.directory())
    assert here.id == there.id
    async with open_mirror(here) as one, open_mirror(there) as two, asyncio.timeout(WAIT_S):
        await one.connected()
        await two.connected()
        session = await here.create_session("shared")
        for follower in (one, two):
            await follower.until(lambda mirror: session.id in mirror.sessions)
        assert one.mirror.sessions == two.mirror.sessions


@contract("EXC-14")
async def test_message_grows_by_deltas_at_every_client(flow: FlowServer) -> None:
    client = await flow.client()
    remote = await client.open_workspace(flow.directory())
    session = await remote.create_session("growing")
    messages = flow.workspace(remote.id).messages
    async with open_mirror(remote) as follower, asyncio.timeout(WAIT_S):
        await follower.connected()
        draft, _ = messages.open(session.id, model="m", provider="p")
        for text in ("grüße ", "🌱 ", "world"):
            messages.append(draft, 0, "text", text)
            await asyncio.sleep(0)
        expected = TextPart(Text("grüße 🌱 world"))
        await follower.until(lambda m: any(x.parts == [expected] for x in m.messages.values()))
        flow.clock.advance(1)
        await messages.finish(draft, Finish("end_turn", 1))
        await follower.until(lambda m: any(len(x.parts) == 2 for x in m.messages.values()))
        stored = await remote.messages(session.id)
        assert list(follower.mirror.messages.values()) == stored
