"""Follow a run to its end, through everything but a server that is gone for good.

The event stream shows how a run goes on; that it is over is asked, as a server that died tells
nobody.
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

AGAIN_S = 0.05
LOOK_S = 2.0  # A server that died says nothing, so it is asked as often as this.
GONE_S = 8.0  # Somebody who restarts it has done so by then, on a busy machine too.
CATCH_UP_S = 2.0  # What is stored has been told; it may still be on its way.


class RunLost(Failed):
    """Nobody says any more how a run stands. It was not cancelled."""

    code = "run_lost"


async def retry_idempotent(workspace: RemoteWorkspace, do: Callable[[], Awaitable[T]]) -> T:
    """Do what may be told twice, in spite of a server that dies of it or just now restarts.

    Raises as `do` does, `OSError` only if the server stays away.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + GONE_S
    while True:
        try:
            return await do()
        except OSError:
            if loop.time() > end_s:
                raise
            await workspace.client.revive()
        except RequestRefused as exc:
            if exc.code != WorkspaceNotFound.code or loop.time() > end_s:
                raise
            with suppress(RequestRefused, OSError):
                await workspace.rejoin()
        await asyncio.sleep(AGAIN_S)


async def follow_run(
    workspace: RemoteWorkspace,
    follower: Follower,
    run_id: RunId,
    show: Callable[[Mirror], bool],
) -> Run:
    """Show each new state until the run has ended or is held; raises `RunLost`, `Refused`.

    `show` returns True when it takes the run for over, which is then asked.
    """
    loop = asyncio.get_running_loop()
    heard_s = loop.time()
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await follower.until(show)
        run = await _find_run(workspace, run_id)
        if run is not None and run.state in ("ended", "held"):
            return run
        if run is not None:
            heard_s = loop.time()
        elif loop.time() - heard_s > GONE_S:
            raise RunLost(
                f"the server has gone in the middle of run {run_id}, which was not cancelled",
                hint=f"`culm attach {run_id}` starts it again and shows what became of the run",
            )
        await asyncio.sleep(AGAIN_S)


async def _find_run(workspace: RemoteWorkspace, run_id: RunId) -> Run | None:
    """How the run stands; None while nobody says. Raises `Refused` if it was removed."""
    try:
        async with asyncio.timeout(GONE_S):
            return await workspace.run(run_id)
    except OSError:
        return None
    except RequestRefused as exc:
        if exc.code == RunNotFound.code:  # With its session.
            raise
    # The server restarted. The stream joins the workspace again, but may sleep for long.
    with suppress(RequestRefused, OSError):
        await workspace.rejoin()
    return None


async def catch_up(workspace: RemoteWorkspace, follower: Follower, run: Run) -> Message | None:
    """The last answer of a run that is over, once the mirror has all of it and of the run."""
    message_id = MessageId(run.message_id)

    def is_whole(mirror: Mirror) -> bool:
        if run.id in mirror.runs and run.state != "held":
            return False  # Those who worked for it have ended before it.
        found = mirror.messages.get(message_id)
        return not message_id or (found is not None and is_finished(found.parts))

    try:
        async with asyncio.timeout(CATCH_UP_S):
            await follower.until(is_whole)
    except TimeoutError:
        if not message_id:
            return None
        if (stored := await workspace.find_message(run.session_id, message_id)) is not None:
            follower.mirror.put_message(stored)
    return follower.mirror.messages.get(message_id)
