"""`culm attach`: what a run or a session does, from its start or from a cursor on.

It only watches, and answers what is asked if a person sits there: whoever leaves stops nothing.
"""

import asyncio
import re
from dataclasses import dataclass

from culm.cli.exits import EXIT_INTERRUPTED
from culm.cli.follow_run import (
    RunFollower,
    RunScreen,
    SessionFollower,
    StoppedFollowing,
    make_screen,
)
from culm.cli.names import all_named, find_named
from culm.cli.run_ends import status_of
from culm.cli.server import describe_error
from culm.cli.server_target import ServerTarget
from culm.cli.terminal.signals import cancelling
from culm.client.connection import open_connected
from culm.client.follower import Follower
from culm.client.http import RequestRefused
from culm.client.launch import ServerStarter
from culm.client.tree import SessionTree, open_tree
from culm.client.workspace import RemoteWorkspace
from culm.errors import InvalidRequest, RunNotFound
from culm.ids import RunId, SessionId
from culm.wire.runs import Run

_CURSOR = re.compile(r"[0-9a-f]{1,64}\.[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class AttachOptions:
    name: str
    where: ServerTarget
    cursor: str = ""
    until_idle: bool = False
    as_json: bool = False
    interactive: bool = False


def attach(options: AttachOptions, starter: ServerStarter) -> int:
    """Show it and return the exit status; raises `AppError`. The start may have begun."""
    if options.cursor and not _CURSOR.fullmatch(options.cursor):
        hint = "it is what `culm attach` says when you leave it"
        raise InvalidRequest(f"{options.cursor!r} is no cursor", hint=hint)
    output = "lines" if options.as_json else "text"
    screen = make_screen(output, interactive=options.interactive)
    try:
        with asyncio.Runner() as runner:
            return runner.run(_run(options, screen, starter))
    except asyncio.CancelledError:
        return EXIT_INTERRUPTED
    except (RequestRefused, OSError, ExceptionGroup) as exc:
        raise describe_error(exc, options.where.server.url) from exc


async def _run(options: AttachOptions, screen: RunScreen, starter: ServerStarter) -> int:
    task = asyncio.current_task()
    assert task is not None, "this runs in a task"
    attaching = _Attaching(options, screen)

    def leave() -> None:
        attaching.interrupted.set()
        if not attaching.is_there:
            task.cancel()

    with cancelling(asyncio.get_running_loop(), leave):
        async with open_connected(starter, options.where.token_file) as client:
            status = await attaching.show(await client.open_workspace(options.where.directory))
            await client.leave()
            return status


class _Attaching:
    def __init__(self, options: AttachOptions, screen: RunScreen) -> None:
        self.interrupted = asyncio.Event()
        self.is_there = False  # From here on an interrupt leaves what is shown.
        self._options = options
        self._screen = screen

    async def show(self, workspace: RemoteWorkspace) -> int:
        session_id, run_id = await find_run_or_session(workspace, self._options.name)
        opening = open_tree(
            workspace,
            session_id,
            run_id,
            interactive=self._options.interactive,
            cursor=self._options.cursor,
        )
        async with opening as (follower, tree):
            self.is_there = True
            try:
                if run_id is None:
                    return await self._show_session(workspace, follower, tree)
                return await self._show_run(workspace, follower, tree, run_id)
            except StoppedFollowing:
                self._screen.face.note(
                    f"(left; `culm attach {self._options.name} --cursor {tree.cursor}` "
                    "goes on from here)"
                )
                # A session has no end of its own: to leave it is how it ends.
                return 0 if run_id is None else EXIT_INTERRUPTED

    async def _show_run(
        self, workspace: RemoteWorkspace, follower: Follower, tree: SessionTree, run_id: RunId
    ) -> int:
        watching = RunFollower(
            workspace,
            follower,
            tree,
            run_id,
            self._screen,
            interrupted=self.interrupted,
            on_interrupt="leave",
            shows_prompts=True,
        )
        ended = await watching.to_the_end()
        assert ended is not None, "nobody was asked to cancel"
        self._screen.face.end(*ended, watching.agents)
        return status_of(ended[0])

    async def _show_session(
        self, workspace: RemoteWorkspace, follower: Follower, tree: SessionTree
    ) -> int:
        watching = SessionFollower(
            workspace, follower, tree, self._screen, interrupted=self.interrupted
        )
        await watching.run(until_idle=self._options.until_idle)
        if self._screen.plain is not None:
            self._screen.plain.end_line()
        return 0


async def find_run_or_session(
    workspace: RemoteWorkspace, name: str
) -> tuple[SessionId, RunId | None]:
    """What is meant by a name: a run, or a session; an agent is what it does now."""
    found = await _find_run(workspace, name)
    if found is None:
        named = find_named(await all_named(workspace, "session", "run", "agent"), name)
        if named.kind == "session":
            return SessionId(named.id), None
        run_id = named.id
        if named.kind == "agent":
            agent = (await workspace.agent(named.id)).agent
            run_id = agent.run_id
        found = await workspace.run(run_id)
    # One that was folded into another is shown by that one.
    return found.session_id, RunId(found.host_run_id or found.id)


async def _find_run(workspace: RemoteWorkspace, run_id: str) -> Run | None:
    try:
        return await workspace.run(run_id) if run_id else None
    except RequestRefused as exc:
        if exc.code != RunNotFound.code:
            raise
    return None
