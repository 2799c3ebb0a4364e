"""Send one prompt to the user's server and follow its run to the end.

Shared by `culm run` and the conversation of `culm`. The answer goes to stdout and everything else
to stderr. The run belongs to the server: it goes on if this process is killed.
"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import click
import msgspec

from culm.cli.exits import EXIT_CANCELED, run_status
from culm.cli.follow_run import Output, RunFollower, RunScreen, make_screen
from culm.cli.names import find_session
from culm.cli.prompt_options import choose_model
from culm.cli.render.json_lines import end_line, write_line
from culm.cli.render.run_lines import DetachedLine
from culm.cli.render.transcript import markdown_of_run
from culm.cli.server import describe_error
from culm.cli.server_target import ServerTarget
from culm.cli.terminal.signals import cancelling
from culm.cli.terminal.streams import CannotWrite, close_output, write
from culm.client.asked_run import title_of
from culm.client.connection import open_connected
from culm.client.follow_run import retry_idempotent
from culm.client.http import RequestRefused
from culm.client.launch import ServerStarter
from culm.client.tree import open_tree
from culm.client.workspace import RemoteWorkspace
from culm.errors import InvalidRequest, NoServer, NotFound
from culm.ids import Ids, RunId, SessionId
from culm.wire.agents import StartAgent
from culm.wire.asks import Approve
from culm.wire.runs import Attachment, Limits, Run

CONNECT_S = 10.0  # For the event stream of a server that has just answered.


@dataclass(frozen=True, slots=True)
class RunOptions:
    prompt: str
    where: ServerTarget
    session: str = ""  # Its id or title; empty for a new session ...
    latest: bool = False  # ... or, if this is set, for the one used last.
    model: str = ""
    role: str = ""
    attachments: Sequence[Attachment] = ()
    limits: Limits = field(default_factory=Limits)
    approve: Approve | None = None
    output: Output = "text"
    detach: bool = False
    interactive: bool = False  # A person at this terminal can be asked.


def run_prompt(options: RunOptions, starter: ServerStarter) -> int:
    """Run to the end and return the exit status; raises `AppError`. The server may be starting."""
    screen = make_screen(
        options.output, interactive=options.interactive, has_rules=options.approve is not None
    )
    try:
        with asyncio.Runner() as runner:
            return runner.run(_run(options, screen, starter))
    except asyncio.CancelledError:
        click.echo("culm: canceled before the prompt was sent", err=True)
        return EXIT_CANCELED
    except (CannotWrite, RequestRefused, OSError, ExceptionGroup) as exc:
        error = describe_error(exc, options.where.server.url)
        if isinstance(error, CannotWrite):
            return close_output(error, "the run continues")
        raise error from exc


async def _run(options: RunOptions, screen: RunScreen, starter: ServerStarter) -> int:
    task = asyncio.current_task()
    assert task is not None, "this runs in a task"
    asking = PromptRun(options, screen)

    def cancel() -> None:
        asking.interrupted.set()
        if not asking.is_asked:
            task.cancel()

    with cancelling(asyncio.get_running_loop(), cancel):
        async with open_connected(starter, options.where.token_file) as client:
            workspace = await client.open_workspace(options.where.directory)
            for notice in workspace.info.notices:
                screen.face.note(f"notice: {notice}")
            status, lets_go = await asking.ask(workspace)
            if lets_go:
                await client.leave()
            return status


class PromptRun:
    """One prompt, from sending it to the end of its run."""

    def __init__(self, options: RunOptions, screen: RunScreen) -> None:
        self.is_asked = False  # Once it is True, an interrupt cancels the run.
        self.interrupted = asyncio.Event()
        self.session_id = SessionId("")  # The session of the prompt.
        self._options = options
        self._screen = screen

    async def ask(self, workspace: RemoteWorkspace) -> tuple[int, bool]:
        """Return the exit status, and whether the workspace can be released at once."""
        if self._options.role:
            return await self._ask_agent(workspace)
        options = self._options
        providers = workspace.info.config.providers
        model = choose_model(options.model, providers) if options.model else None
        session_id = self.session_id = await self._session(workspace)
        run_id = Ids().run()

        async def send() -> None:
            # The run id makes the request idempotent.
            sending = retry_idempotent(
                workspace,
                lambda: workspace.prompt(
                    session_id,
                    options.prompt,
                    run_id=run_id,
                    attachments=options.attachments,
                    limits=options.limits,
                    model=model,
                    interactive=options.interactive,
                    approve=options.approve,
                ),
            )
            try:
                await sending
            except OSError as exc:
                text = f"lost the server, which may not have accepted the prompt: {exc}"
                hint = f"use `culm attach {run_id}` to see whether it did"
                raise NoServer(text, hint=hint) from exc
            except RequestRefused as exc:
                raise _nothing_started(exc) from exc

        if options.detach:
            self.is_asked = True
            await send()
            return self._detached(run_id, session_id), True
        interactive = options.interactive
        async with open_tree(workspace, session_id, run_id, interactive=interactive) as following:
            follower, tree = following
            async with asyncio.timeout(CONNECT_S):
                await follower.connected()
            watching = RunFollower(
                workspace, follower, tree, run_id, self._screen, interrupted=self.interrupted
            )
            self.is_asked = True
            await send()
            ended = await watching.to_the_end()
            if ended is None:
                return EXIT_CANCELED, True
            run, text = ended
            self._end(run, text, watching)
            # Releasing the last workspace closes it, and a model may still be naming the session.
            known = tree.sessions.get(session_id)
            is_named = known is None or known.title != title_of(options.prompt)
        return run_status(run), is_named or run.outcome != "end_turn"

    async def _ask_agent(self, workspace: RemoteWorkspace) -> tuple[int, bool]:
        """Start an agent with a role, in a session of its own."""
        options = self._options
        request = StartAgent(
            prompt=options.prompt,
            role=options.role,
            model=options.model,
            limits=options.limits,
            headless=not options.interactive,
            approve=None if options.approve is None else msgspec.to_builtins(options.approve),
        )
        self.is_asked = True
        try:
            agent = await workspace.start_agent(request)
        except RequestRefused as exc:
            raise _nothing_started(exc) from exc
        if options.detach:
            return self._detached(agent.run_id, agent.session_id), True
        following = open_tree(
            workspace, agent.session_id, RunId(agent.run_id), interactive=options.interactive
        )
        async with following as (follower, tree):
            watching = RunFollower(
                workspace,
                follower,
                tree,
                RunId(agent.run_id),
                self._screen,
                interrupted=self.interrupted,
            )
            ended = await watching.to_the_end()
            if ended is None:
                return EXIT_CANCELED, True
            self._end(*ended, watching)
        return run_status(ended[0]), True

    def _detached(self, run_id: str, session_id: str) -> int:
        if self._options.output in ("lines", "json"):
            write_line(DetachedLine(run_id, session_id))
        else:
            write(sys.stdout, f"{run_id}\n")
            self._screen.face.note(
                f"hint: `culm attach {run_id}` shows it, `culm stop {run_id[:8]}` ends it"
            )
        return 0

    def _end(self, run: Run, text: str, watching: RunFollower) -> None:
        match self._options.output:
            case "json":
                write_line(end_line(run, text, watching.agents))
            case "markdown":
                for piece in markdown_of_run(self._options.prompt, watching.messages()):
                    write(sys.stdout, piece)
            case _:
                pass
        self._screen.face.end(run, text, watching.agents)

    async def _session(self, workspace: RemoteWorkspace) -> SessionId:
        options = self._options
        if options.session:
            return await find_session(workspace, options.session)
        if not options.latest:
            title = title_of(options.prompt)
            # An unused session does no harm, so creating one may be retried.
            return (await retry_idempotent(workspace, lambda: workspace.create_session(title))).id
        sessions = await workspace.sessions()
        if not sessions:
            raise NotFound("there is no session to continue", hint="leave out --continue")
        return sessions[0].id


def _nothing_started(exc: RequestRefused) -> Exception:
    """The error for a refused prompt; a request that was wrong in itself is wrong usage."""
    if exc.status in (400, 404, 413):
        return InvalidRequest(exc.message, hint=exc.hint)
    return exc
