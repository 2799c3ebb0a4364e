"""The client for programs that do not wait by themselves: scripts, notebooks, prompts.

Owns a thread with an event loop, in which the client lives for as long as the block.
"""

import asyncio
import queue
import threading
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from os import PathLike
from pathlib import Path
from typing import TypeVar

from culm.client.asked_run import RunAnswer, ask, open_asked
from culm.client.connection import connect
from culm.client.follower import open_present
from culm.client.workspace import RemoteWorkspace
from culm.errors import Failed
from culm.ids import SessionId
from culm.wire.agent import Attachment
from culm.wire.agents import Agent
from culm.wire.asks import Ask, PermissionRequest
from culm.wire.messages import Message
from culm.wire.rules import Approve
from culm.wire.runs import CancelAnswer, Limits, Run
from culm.wire.sessions import Session

T = TypeVar("T")

CLOSE_S = 10.0  # To let go of a server takes a moment; nobody waits longer for one that hangs.


class PortalClosed(Failed):
    code = "connection_ended"

    def __init__(self) -> None:
        super().__init__("the connection to the server has ended", hint="connect again")


class Portal:
    """An event loop in another thread. Made by `open_portal`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._is_over = False
        self._cancels: set[Callable[[], bool]] = set()  # Of what was started and is not done.

    def start(self, doing: Coroutine[None, None, T]) -> Future[T]:
        """Do it there; raises `Failed` if that has come to its end."""
        if self.loop.is_closed():
            doing.close()
            raise PortalClosed
        future = asyncio.run_coroutine_threadsafe(doing, self.loop)
        self._cancels.add(future.cancel)
        future.add_done_callback(lambda done: self._cancels.discard(done.cancel))
        if self._is_over:  # Meanwhile: a loop that has stopped begins nothing.
            future.cancel()
        return future

    def result(self, future: Future[T]) -> T:
        """Wait for what was started; raises `Failed` if its loop ends before."""
        try:
            return future.result()
        except CancelledError:
            if self._is_over:
                raise PortalClosed from None
            raise

    def wait(self, doing: Coroutine[None, None, T]) -> T:
        """Do it there, and wait for it here. Ctrl-C cancels it."""
        future = self.start(doing)
        try:
            return self.result(future)
        finally:
            future.cancel()

    def end(self) -> None:
        """Nothing is done there any more; whoever still waits is told."""
        self._is_over = True
        for cancel in list(self._cancels):
            cancel()


@contextmanager
def open_portal(opening: AbstractAsyncContextManager[T]) -> Generator[tuple[Portal, T]]:
    """Enter a context in a loop of another thread, and leave it there at the end of the block."""
    opened: Future[tuple[Portal, T, asyncio.Event]] = Future()

    async def live() -> None:
        portal = Portal(asyncio.get_running_loop())
        try:
            async with opening as inside:
                stop = asyncio.Event()
                opened.set_result((portal, inside, stop))
                await stop.wait()
        finally:
            portal.end()

    def run() -> None:
        try:
            asyncio.run(live())
        except BaseException as exc:  # boundary: whoever waits in the other thread is told
            if not opened.done():
                opened.set_exception(exc)

    thread = threading.Thread(target=run, name="culm client", daemon=True)
    try:
        thread.start()
        portal, inside, stop = opened.result()
    finally:
        opened.cancel()  # Nobody waits any more, after a Ctrl-C: it leaves as soon as it is there.
    try:
        yield portal, inside
    finally:
        if not portal.loop.is_closed():
            portal.loop.call_soon_threadsafe(stop.set)
        thread.join(CLOSE_S)


class BlockingWorkspace:
    """A workspace whose methods return when they are done. Made by `connect_blocking`."""

    def __init__(self, portal: Portal, workspace: RemoteWorkspace) -> None:
        self.workspace = workspace  # All else it can do is `wait(workspace.…())`.
        self._portal = portal

    def wait(self, doing: Coroutine[None, None, T]) -> T:
        """The result of any method of `workspace`."""
        return self._portal.wait(doing)

    def ask(
        self,
        prompt: str,
        *,
        session_id: SessionId | None = None,
        attachments: Sequence[Attachment] = (),
        limits: Limits | None = None,
        approve: Approve | None = None,
    ) -> RunAnswer:
        """Ask the agent and wait for the end of the run, as `culm.client.asked_run` does."""
        return self.wait(
            ask(
                self.workspace,
                prompt,
                session_id=session_id,
                attachments=attachments,
                limits=limits,
                approve=approve,
            )
        )

    def stream(
        self,
        prompt: str,
        *,
        session_id: SessionId | None = None,
        approve: Approve | None = None,
    ) -> Iterator[str]:
        """Ask the agent; the answer as it comes. Who stops reading stops nothing."""
        pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        async def pump() -> None:
            opening = open_asked(self.workspace, prompt, session_id=session_id, approve=approve)
            async with opening as asked:
                async for piece in asked.pieces():
                    pieces.put(piece)
                await asked.answer()  # Raises what went wrong.

        pumping = self._portal.start(pump())
        pumping.add_done_callback(lambda _: pieces.put(None))
        try:
            while (piece := pieces.get()) is not None:
                yield piece
            self._portal.result(pumping)
        finally:
            pumping.cancel()

    def sessions(self) -> list[Session]:
        return self.wait(self.workspace.sessions())

    def messages(self, session_id: SessionId) -> list[Message]:
        return self.wait(self.workspace.messages(session_id))

    def runs(self, session_id: str = "") -> list[Run]:
        return self.wait(self.workspace.runs(session_id))

    def agents(self) -> list[Agent]:
        return self.wait(self.workspace.agents())

    def asks(self) -> list[Ask[PermissionRequest]]:
        return self.wait(self.workspace.asks())

    def answer(self, ask: Ask[PermissionRequest], action: str) -> bool:
        return self.wait(self.workspace.answer(ask, action))

    def cancel(self, run_id: str) -> CancelAnswer:
        return self.wait(self.workspace.cancel_run(run_id))


@contextmanager
def connect_blocking(
    directory: str | PathLike[str] = ".",
    host: str = "",
    *,
    token_file: Path | None = None,
    data_dir: Path | None = None,
    config_file: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Generator[BlockingWorkspace]:
    """As `connect`, in the workspace of a directory, for a program without an event loop."""

    @asynccontextmanager
    async def opening() -> AsyncGenerator[RemoteWorkspace]:
        connecting = connect(
            host, token_file=token_file, data_dir=data_dir, config_file=config_file, env=env
        )
        async with connecting as client:
            workspace = await client.open_workspace(directory)
            async with open_present(workspace):
                yield workspace
            await client.leave()

    with open_portal(opening()) as (portal, workspace):
        yield BlockingWorkspace(portal, workspace)
