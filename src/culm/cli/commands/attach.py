"""`culm attach`: follow a run or a session, from its start or from a cursor.

It only watches, and lets a person answer asks; leaving it stops nothing.
"""

import asyncio
import re
import sys

import click
from msgspec import Struct

from culm.cli.follow_run import (
    RunFollower,
    RunScreen,
    SessionFollower,
    StoppedFollowing,
    make_screen,
)
from culm.cli.names import all_named, find_named
from culm.cli.options import ServerTarget, at_own_server, complete_session
from culm.cli.server import describe_error
from culm.cli.terminal.process import (
    EXIT_INTERRUPTED,
    cancelling,
    is_terminal,
    require_output,
    run_status,
)
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


class AttachOptions(Struct, frozen=True):
    name: str
    where: ServerTarget
    cursor: str = ""
    until_idle: bool = False
    as_json: bool = False
    interactive: bool = False


@click.command("attach")
@click.argument("name", metavar="RUN|SESSION|AGENT", shell_complete=complete_session)
@click.option(
    "--cursor",
    default="",
    metavar="CURSOR",
    help="Show only changes after this cursor. Default: from the start.",
)
@click.option(
    "--until-idle", is_flag=True, help="End when the followed session has no active runs."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per event.")
@at_own_server
def attach(name: str, cursor: str, until_idle: bool, as_json: bool, where: ServerTarget) -> None:
    """Follow a run or a session live, from its start.

    The output is that of `culm run`, with the prompts. Any number of clients can follow at once. On
    a terminal, permission requests and questions can be answered here. When a run is followed, the
    command ends with the run and has its exit status. Ctrl-C stops following, not the run, and
    prints the cursor to continue from. Agents that had ended before are shown by their answers.

    The lines of --json are those of `culm run --json`, with "said" for the prompts.

    \b
    Exit status:
      as for `culm run`; 130 if you left before the end of the run

    \b
    Example:
      culm attach 2f978a27
      culm attach 2f978a27 --cursor 9a1d817e48b1.17
      culm attach "List the files" --until-idle --json
    """
    require_output()
    starter = where.starter()
    starter.begin()
    options = AttachOptions(
        name, where, cursor, until_idle, as_json, interactive=not as_json and is_terminal()
    )
    sys.exit(follow(options, starter))


def follow(options: AttachOptions, starter: ServerStarter) -> int:
    """Show it and return the exit status; raises `AppError`. The server may be starting."""
    if options.cursor and not _CURSOR.fullmatch(options.cursor):
        hint = "use the cursor that `culm attach` prints when you leave it"
        raise InvalidRequest(f"{options.cursor!r} is not a cursor", hint=hint)
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
        self.is_there = False  # Once it is True, an interrupt stops following.
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
                    "continues from here)"
                )
                # A session has no end of its own, so leaving it is a normal end.
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
        assert ended is not None, "an interrupt does not cancel here"
        self._screen.face.end(*ended, watching.agents)
        return run_status(ended[0])

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
    """The session and, unless a session is named, the run; for an agent its current run."""
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
    # A folded run is shown by its host run.
    return found.session_id, RunId(found.host_run_id or found.id)


async def _find_run(workspace: RemoteWorkspace, run_id: str) -> Run | None:
    try:
        return await workspace.run(run_id) if run_id else None
    except RequestRefused as exc:
        if exc.code != RunNotFound.code:
            raise
    return None
