"""A mirror that keeps itself up to date, through restarts, sleep and lost networks."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing, asynccontextmanager
from functools import partial

from msgspec.structs import replace

from culm.client.background_task import open_background_task
from culm.client.http import RequestRefused
from culm.client.mirror import DeltaGap, Mirror
from culm.client.stream import Backoff, EventStream
from culm.client.workspace import RemoteWorkspace
from culm.wire.messages import Message
from culm.wire.state import Snapshot


class Follower:
    """A mirror that keeps itself up to date. Made by `open_mirror`, or by `open_tree`."""

    def __init__(
        self, mirror: Mirror, stream: EventStream, load: Callable[[], Awaitable[None]]
    ) -> None:
        self.mirror = mirror
        self.stream = stream
        self._load = load  # Begins the mirror again, from what is stored.
        self._changed = asyncio.Event()
        self._connected = asyncio.Event()
        stream.on_connected = self._connected.set

    async def until(self, condition: Callable[[Mirror], bool]) -> None:
        """Wait for a state; the caller bounds the wait."""
        while not condition(self.mirror):
            self._changed.clear()
            await self._changed.wait()

    async def connected(self) -> None:
        await self._connected.wait()

    async def run(self) -> None:
        while True:
            await self._retry(self._begin)
            await self._follow()

    async def _follow(self) -> None:
        """Apply events until a resync: what else is on that connection may be older than a load."""
        async with aclosing(self.stream.events()) as events:
            async for told in events:
                if told.type == "resync":
                    return
                if (gap := self.mirror.apply(told)) is not None:
                    await self._retry(partial(self._fill, gap))
                self._changed.set()

    async def _retry(self, read: Callable[[], Awaitable[None]]) -> None:
        """Read in spite of a server that is just now restarting."""
        backoff = Backoff()
        while True:
            try:
                return await read()
            except OSError:
                await self.stream.workspace.client.revive()
            except RequestRefused as exc:
                if exc.status == 404:
                    await self.stream.rejoin()
                elif not exc.may_pass:
                    raise
            await backoff.pause()

    async def _begin(self) -> None:
        await self._load()
        self.stream.cursor = self.mirror.cursor
        self._changed.set()

    async def _fill(self, gap: DeltaGap) -> None:
        message = await self.stream.workspace.find_message(gap.session_id, gap.message_id)
        if message is not None:
            self.mirror.put_message(message)


def only_of(snapshot: Snapshot[Message], sessions: Collection[str]) -> Snapshot[Message]:
    """Without runs and agents of other sessions: a stream of these tells nothing of those."""
    return replace(
        snapshot,
        runs=[run for run in snapshot.runs if run.session_id in sessions],
        agents=[agent for agent in snapshot.agents if agent.session_id in sessions],
    )


@asynccontextmanager
async def open_mirror(
    workspace: RemoteWorkspace, *sessions: str, interactive: bool = False
) -> AsyncGenerator[Follower]:
    """Follow a workspace while in the block: the sessions named, or all of them.

    `interactive` says that a person is here who can be asked for permission. Raises
    `Refused` for what coming back cannot mend, as a wrong token.
    """
    mirror = Mirror()
    stream = EventStream(workspace, sessions=frozenset(sessions), interactive=interactive)

    async def load() -> None:
        snapshot = await workspace.snapshot(*(sessions or "*"))
        mirror.load(only_of(snapshot, sessions) if sessions else snapshot)

    async with open_follower(Follower(mirror, stream, load)) as follower:
        yield follower


@asynccontextmanager
async def open_follower(follower: Follower) -> AsyncGenerator[Follower]:
    """Keep its mirror up to date while in the block."""
    async with open_background_task(follower.run(), "mirror"):
        yield follower


@asynccontextmanager
async def open_present(
    workspace: RemoteWorkspace, *, interactive: bool = False
) -> AsyncGenerator[None]:
    """Stay in a workspace while in the block, so that it stays open although nothing goes on.

    `interactive` says that a person is here who can be asked for permission.
    """
    stream = EventStream(workspace, types=frozenset({"presence_changed"}), interactive=interactive)

    async def stay() -> None:
        async with aclosing(stream.events()) as events:
            async for _ in events:
                pass

    async with open_background_task(stay(), "present"):
        yield
