"""Mirrors that stay up to date through restarts, sleep and network failures."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine
from contextlib import aclosing, asynccontextmanager
from functools import partial

from msgspec.structs import replace

from culm.client.http import RequestRefused
from culm.client.mirror import DeltaGap, Mirror
from culm.client.stream import Backoff, EventStream
from culm.client.workspace import RemoteWorkspace
from culm.wire.messages import Message
from culm.wire.workspaces import Snapshot


class Follower:
    """A mirror that stays up to date. Created by `open_mirror` or `open_tree`."""

    def __init__(
        self, mirror: Mirror, stream: EventStream, load: Callable[[], Awaitable[None]]
    ) -> None:
        self.mirror = mirror
        self.stream = stream
        self._load = load  # Reloads the mirror from the stored state.
        self._changed = asyncio.Event()
        self._connected = asyncio.Event()
        stream.on_connected = self._connected.set

    async def until(self, condition: Callable[[Mirror], bool]) -> None:
        """Wait until the condition holds; the caller bounds the wait."""
        while not condition(self.mirror):
            self._changed.clear()
            await self._changed.wait()

    async def connected(self) -> None:
        await self._connected.wait()

    async def run(self) -> None:
        while True:
            await self._retry(self._reload)
            await self._follow()

    async def _follow(self) -> None:
        """Apply events until a resync: later ones of that connection may be older than a reload."""
        async with aclosing(self.stream.events()) as events:
            async for event in events:
                if event.type == "resync":
                    return
                if (gap := self.mirror.apply(event)) is not None:
                    await self._retry(partial(self._reload_message, gap))
                self._changed.set()

    async def _retry(self, read: Callable[[], Awaitable[None]]) -> None:
        """Repeat a read while the server restarts."""
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

    async def _reload(self) -> None:
        await self._load()
        self.stream.cursor = self.mirror.cursor
        self._changed.set()

    async def _reload_message(self, gap: DeltaGap) -> None:
        message = await self.stream.workspace.find_message(gap.session_id, gap.message_id)
        if message is not None:
            self.mirror.put_message(message)


def restrict_to_sessions(
    snapshot: Snapshot[Message], sessions: Collection[str]
) -> Snapshot[Message]:
    """Remove the runs and agents of other sessions, which the stream would not update."""
    return replace(
        snapshot,
        runs=[run for run in snapshot.runs if run.session_id in sessions],
        agents=[agent for agent in snapshot.agents if agent.session_id in sessions],
    )


@asynccontextmanager
async def open_mirror(
    workspace: RemoteWorkspace, *sessions: str, interactive: bool = False
) -> AsyncGenerator[Follower]:
    """Follow the given sessions of a workspace, or all of them, while in the block.

    `interactive` means that a person is present who can answer asks. Raises `RequestRefused` for
    errors that reconnecting cannot fix, such as a wrong token.
    """
    mirror = Mirror()
    stream = EventStream(workspace, sessions=frozenset(sessions), interactive=interactive)

    async def load() -> None:
        snapshot = await workspace.snapshot(*(sessions or "*"))
        mirror.load(restrict_to_sessions(snapshot, sessions) if sessions else snapshot)

    async with open_follower(Follower(mirror, stream, load)) as follower:
        yield follower


@asynccontextmanager
async def open_follower(follower: Follower) -> AsyncGenerator[Follower]:
    """Keep the mirror of a follower up to date while in the block."""
    async with open_background_task(follower.run(), "mirror"):
        yield follower


@asynccontextmanager
async def open_present(
    workspace: RemoteWorkspace, *, interactive: bool = False
) -> AsyncGenerator[None]:
    """Stay connected to a workspace while in the block, so that it stays open while idle.

    `interactive` means that a person is present who can answer asks.
    """
    stream = EventStream(workspace, types=frozenset({"presence_changed"}), interactive=interactive)

    async def stay() -> None:
        async with aclosing(stream.events()) as events:
            async for _ in events:
                pass

    async with open_background_task(stay(), "present"):
        yield


@asynccontextmanager
async def open_background_task(
    coroutine: Coroutine[None, None, None], name: str
) -> AsyncGenerator[None]:
    """Run a coroutine in the background while in the block.

    If it fails, the block ends and the exception is raised as it is, not as an exception group; so
    is an exception of the block itself. A caller can catch `RequestRefused` directly.
    """
    failed: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(coroutine, name=name)
            try:
                yield
            finally:
                task.cancel()
    except BaseExceptionGroup as exc:
        failed = exc.exceptions[-1]  # The exception of the block comes last and has priority.
    if failed is not None:  # Raised here, so that the group is not its context.
        raise failed
