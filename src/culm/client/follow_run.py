"""Follow a run to its end, through everything but the permanent loss of the server.

The event stream shows the progress of a run. Its end is confirmed by a request, because a server
that died publishes nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from culm.client.follower import Follower
from culm.client.http import RequestRefused
from culm.client.mirror import Mirror
from culm.client.workspace import RemoteWorkspace
from culm.errors import Failed, RunNotFound, WorkspaceNotFound
from culm.ids import MessageId, RunId
from culm.wire.messages import Message, is_finished
from culm.wire.runs import Run

T = TypeVar("T")

RETRY_S = 0.05
POLL_S = 2.0  # A server that died publishes nothing, so the run is polled.
SERVER_GONE_S = 8.0  # A restart takes less, even on a busy machine.
LAST_EVENTS_S = 2.0  # Stored events are already published, but may still be in transit.


class RunLost(Failed):
    """The state of a run cannot be read any more. The run was not canceled."""

    code = "run_lost"


async def retry_idempotent(workspace: RemoteWorkspace, request: Callable[[], Awaitable[T]]) -> T:
    """Retry an idempotent request while the server restarts.

    Raises the errors of `request`, but `OSError` only if the server does not come back.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + SERVER_GONE_S
    while True:
        try:
            return await request()
        except OSError:
            if loop.time() > end_s:
                raise
            await workspace.client.revive()
        except RequestRefused as exc:
            if exc.code != WorkspaceNotFound.code or loop.time() > end_s:
                raise
            with suppress(RequestRefused, OSError):
                await workspace.rejoin()
        await asyncio.sleep(RETRY_S)


async def follow_run(
    workspace: RemoteWorkspace,
    follower: Follower,
    run_id: RunId,
    show: Callable[[Mirror], bool],
) -> Run:
    """Show each new state until the run has ended or is held; raises `RunLost`, `RequestRefused`.

    `show` returns True when the run seems to be over, which a request then confirms.
    """
    loop = asyncio.get_running_loop()
    last_seen_s = loop.time()
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await follower.until(show)
        run = await _find_run(workspace, run_id)
        if run is not None and run.state in ("ended", "held"):
            return run
        if run is not None:
            last_seen_s = loop.time()
        elif loop.time() - last_seen_s > SERVER_GONE_S:
            raise RunLost(
                f"lost the server during run {run_id}; the run was not canceled",
                hint=f"run `culm attach {run_id}` to restart the server and see the result",
            )
        await asyncio.sleep(RETRY_S)


async def _find_run(workspace: RemoteWorkspace, run_id: RunId) -> Run | None:
    """The run; None if the server cannot be reached. Raises `RequestRefused` if it was removed."""
    try:
        async with asyncio.timeout(SERVER_GONE_S):
            return await workspace.run(run_id)
    except OSError:
        return None
    except RequestRefused as exc:
        if exc.code == RunNotFound.code:  # Removed with its session.
            raise
    # The server restarted. The stream rejoins the workspace, but maybe after a long backoff.
    with suppress(RequestRefused, OSError):
        await workspace.rejoin()
    return None


async def wait_for_last_message(
    workspace: RemoteWorkspace, follower: Follower, run: Run
) -> Message | None:
    """Wait until the mirror has all of a run that is over, and return its last answer."""
    message_id = MessageId(run.message_id)

    def is_complete(mirror: Mirror) -> bool:
        if run.id in mirror.runs and run.state != "held":
            return False  # Its end comes after the end of its sub-agents.
        found = mirror.messages.get(message_id)
        return not message_id or (found is not None and is_finished(found.parts))

    try:
        async with asyncio.timeout(LAST_EVENTS_S):
            await follower.until(is_complete)
    except TimeoutError:
        if not message_id:
            return None
        if (stored := await workspace.find_message(run.session_id, message_id)) is not None:
            follower.mirror.put_message(stored)
    return follower.mirror.messages.get(message_id)
