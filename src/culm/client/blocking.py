"""The client for programs without an event loop: scripts, notebooks, interactive prompts.

Owns a thread with an event loop, in which the client runs until the end of the block.
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
)
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from os import PathLike
from pathlib import Path
from typing import TypeVar, Unpack

from culm.client.connection import connect
from culm.client.follower import open_present
from culm.client.run import AskOptions, RunAnswer, ask, open_asked
from culm.client.workspace import RemoteWorkspace
from culm.errors import Failed
from culm.ids import SessionId
from culm.wire.agents import Agent
from culm.wire.asks import Ask, PermissionRequest
from culm.wire.messages import Message, Session
from culm.wire.runs import CancelAnswer, Run
from culm.wire.tools import ToolInfo

T = TypeVar("T")

CLOSE_S = 10.0  # Leaving a server is fast; do not wait longer for one that hangs.


class PortalClosed(Failed):
    code = "connection_ended"

    def __init__(self) -> None:
        super().__init__("the connection to the server has ended", hint="connect again")


class Portal:
    """An event loop in another thread. Created by `open_portal`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._has_ended = False
        self._cancels: set[Callable[[], bool]] = set()  # Of the coroutines that are not done.

    def start(self, coroutine: Coroutine[None, None, T]) -> Future[T]:
        """Start a coroutine in the loop; raises `PortalClosed` if the loop has ended."""
        if self.loop.is_closed():
            coroutine.close()
            raise PortalClosed
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        self._cancels.add(future.cancel)
        future.add_done_callback(lambda done: self._cancels.discard(done.cancel))
        if self._has_ended:  # It ended meanwhile, and will not run the coroutine.
            future.cancel()
        return future

    def result(self, future: Future[T]) -> T:
        """Wait for a started coroutine; raises `PortalClosed` if the loop ends first."""
        try:
            return future.result()
        except CancelledError:
            if self._has_ended:
                raise PortalClosed from None
            raise

    def wait(self, coroutine: Coroutine[None, None, T]) -> T:
        """Run a coroutine in the loop and wait for it. Ctrl-C cancels it."""
        future = self.start(coroutine)
        try:
            return self.result(future)
        finally:
            future.cancel()

    def end(self) -> None:
        """Mark the loop as ended and cancel everything that is not done."""
        self._has_ended = True
        for cancel in list(self._cancels):
            cancel()


@contextmanager
def open_portal(context: AbstractAsyncContextManager[T]) -> Generator[tuple[Portal, T]]:
    """Enter an async context in a loop of another thread, and exit it after the block."""
    opened: Future[tuple[Portal, T, asyncio.Event]] = Future()

    async def hold_open() -> None:
        portal = Portal(asyncio.get_running_loop())
        try:
            async with context as value:
                stop = asyncio.Event()
                opened.set_result((portal, value, stop))
                await stop.wait()
        finally:
            portal.end()

    def run() -> None:
        try:
            asyncio.run(hold_open())
        except BaseException as exc:  # boundary: raised in the thread that waits
            if not opened.done():
                opened.set_exception(exc)

    thread = threading.Thread(target=run, name="culm client", daemon=True)
    try:
        thread.start()
        portal, value, stop = opened.result()
    finally:
        opened.cancel()  # After Ctrl-C nobody waits: `set_result` fails and the thread ends.
    try:
        yield portal, value
    finally:
        if not portal.loop.is_closed():
            portal.loop.call_soon_threadsafe(stop.set)
        thread.join(CLOSE_S)


class BlockingWorkspace:
    """A workspace with blocking methods. Created by `connect_blocking`."""

    def __init__(self, portal: Portal, workspace: RemoteWorkspace) -> None:
        self.workspace = workspace  # For everything else: `wait(workspace.…())`.
        self._portal = portal

    def wait(self, coroutine: Coroutine[None, None, T]) -> T:
        """Wait for the result of any method of `workspace`."""
        return self._portal.wait(coroutine)

    def ask(
        self, prompt: str, *, session_id: SessionId | None = None, **options: Unpack[AskOptions]
    ) -> RunAnswer:
        """Send a prompt and wait for the end of the run, as `culm.client.ask` does."""
        return self.wait(ask(self.workspace, prompt, session_id=session_id, **options))

    def stream(
        self, prompt: str, *, session_id: SessionId | None = None, **options: Unpack[AskOptions]
    ) -> Iterator[str]:
        """Send a prompt and yield the answer as it arrives; leaving early does not stop the run."""
        pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        async def pump() -> None:
            opening = open_asked(self.workspace, prompt, session_id=session_id, **options)
            async with opening as asked:
                async for piece in asked.pieces():
                    pieces.put(piece)
                await asked.answer()  # Raises the error of the run.

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

    def messages(
        self, session_id: SessionId, *, limit: int | None = None, before: str = ""
    ) -> list[Message]:
        return self.wait(self.workspace.messages(session_id, limit=limit, before=before))

    def runs(self, session_id: str = "") -> list[Run]:
        return self.wait(self.workspace.runs(session_id))

    def tools(self) -> list[ToolInfo]:
        return self.wait(self.workspace.tools())

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
    """Connect as `connect` does, and open the workspace of a directory."""

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
