"""Send a prompt to the user's server, and follow a run on a screen to its end.

Connects the client's mirror to a renderer. Owns the status area, the prompt for approvals, and the
effect of an interrupt. The answer goes to stdout and everything else to stderr. A run belongs to
the server: it goes on if this process is killed.
"""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Literal

import click
import msgspec
from msgspec import Struct, field

from culm.cli.names import find_session
from culm.cli.options import ServerTarget
from culm.cli.prompt_options import choose_model
from culm.cli.render.incremental_view import TreeView
from culm.cli.render.json_lines import DetachedLine, JsonRenderer, end_line, write_line
from culm.cli.render.renderers import RunRenderer, TextRenderer
from culm.cli.render.text import head_of
from culm.cli.render.transcript import markdown_of_run
from culm.cli.server import describe_error
from culm.cli.terminal.approval_prompt import ApprovalPrompt, LineInput, TerminalInput
from culm.cli.terminal.process import (
    EXIT_CANCELED,
    CannotWrite,
    cancelling,
    close_output,
    run_status,
    write,
)
from culm.cli.terminal.status_area import UsageSummary, find_status_area, redraw_until_done
from culm.client.connection import open_connected
from culm.client.follower import Follower
from culm.client.http import RequestRefused
from culm.client.launch import ServerStarter
from culm.client.mirror import Mirror
from culm.client.run import (
    follow_run,
    retry_idempotent,
    start_session,
    title_of,
    wait_for_last_message,
)
from culm.client.tree import SessionTree, open_tree
from culm.client.workspace import RemoteWorkspace
from culm.errors import InvalidRequest, NoServer, NotFound
from culm.ids import Ids, RunId, SessionId
from culm.wire.agents import StartAgent
from culm.wire.asks import Approve
from culm.wire.messages import Message, full_text
from culm.wire.runs import Attachment, Limits, Run
from culm.wire.tools import ToolInfo

CANCEL_S = 10.0  # The server itself gives up on a run that does not stop within 5 s.
CONNECT_S = 10.0  # For the event stream of a server that has just answered.

Output = Literal["text", "json", "markdown", "lines"]  # `lines`: one JSON object per event.
OnInterrupt = Literal["cancel", "leave"]


class RunScreen(Struct, frozen=True):
    """The output for a run, and the input of the person in front of it."""

    face: RunRenderer
    plain: TextRenderer | None = None  # The renderer that draws the status area, if one is drawn.
    lines: LineInput | None = None  # None if nobody can be asked.
    # The tools of the workspace, which the renderer looks up; empty until the run is followed.
    tools: dict[str, ToolInfo] = field(default_factory=dict[str, ToolInfo])

    async def learn_tools(self, workspace: RemoteWorkspace) -> None:
        if self.plain is not None:
            found = await retry_idempotent(workspace, workspace.tools)
            self.tools.update({tool.name: tool for tool in found})


def make_screen(output: Output, *, interactive: bool, has_rules: bool = False) -> RunScreen:
    if output == "lines":
        return RunScreen(JsonRenderer())
    area = find_status_area(sys.stderr, os.environ)
    tools: dict[str, ToolInfo] = {}
    plain = TextRenderer(tools, has_rules=has_rules, status_area=area, has_answer=output == "text")
    return RunScreen(plain, plain, TerminalInput(plain) if interactive else None, tools)


class StoppedFollowing(Exception):
    """The person stopped following; the run goes on."""


class FollowTasks:
    """Tasks beside a run that is shown: drawing, answering asks, waiting for an interrupt."""

    def __init__(
        self,
        workspace: RemoteWorkspace,
        follower: Follower,
        tree: SessionTree,
        screen: RunScreen,
        interrupted: asyncio.Event,
        usage: UsageSummary | None = None,
    ) -> None:
        self._screen = screen
        self._usage = usage
        self._interrupted = interrupted
        self._shown = asyncio.Event()
        self._approvals = None
        if screen.lines is not None:
            self._approvals = ApprovalPrompt(workspace, follower, tree, screen.face, screen.lines)

    def has_shown(self) -> None:
        """Note that the current state is on the screen: from now on a person can be asked."""
        self._shown.set()

    async def _serve(self, approvals: ApprovalPrompt) -> None:
        await self._shown.wait()
        await approvals.serve()

    def start(
        self, tasks: asyncio.TaskGroup, on_interrupt: Callable[[], Awaitable[None]]
    ) -> list[asyncio.Task[None]]:
        loop = asyncio.get_running_loop()

        async def wait() -> None:
            await self._interrupted.wait()
            await on_interrupt()

        background = [tasks.create_task(wait(), name="interrupt")]
        if self._approvals is not None:
            background.append(tasks.create_task(self._serve(self._approvals), name="approvals"))
        plain, usage = self._screen.plain, self._usage
        if plain is not None and usage is not None:
            drawing = redraw_until_done(plain, lambda: usage.status(loop.time()), self._interrupted)
            background.append(tasks.create_task(drawing, name="draw"))
        return background


class RunFollower:
    """One run of a tree that is already followed."""

    def __init__(
        self,
        workspace: RemoteWorkspace,
        follower: Follower,
        tree: SessionTree,
        run_id: RunId,
        screen: RunScreen,
        *,
        interrupted: asyncio.Event,
        on_interrupt: OnInterrupt = "cancel",
        shows_prompts: bool = False,
    ) -> None:
        self._workspace = workspace
        self._follower = follower
        self._tree = tree
        self._run_id = run_id
        self._screen = screen
        self._on_interrupt = on_interrupt
        started_s = asyncio.get_running_loop().time()
        self._usage = UsageSummary(tree, run_id, started_s, screen.tools)
        self._background = FollowTasks(workspace, follower, tree, screen, interrupted, self._usage)
        self._shown = TreeView(
            screen.face, run_id, tree, workspace.client.id, shows_prompts=shows_prompts
        )

    async def to_the_end(self) -> tuple[Run, str] | None:
        """The run and its answer; None if it was canceled and its end was not received in time.

        Raises `StoppedFollowing` if an interrupt stops following, `RunLost`, `RequestRefused`.
        """
        run = await self._follow()
        if run is None:
            self._screen.face.note(f"culm: the run did not end within {CANCEL_S:g} s of the cancel")
            return None
        last = await wait_for_last_message(self._workspace, self._follower, run)
        self._shown.show_all()
        for agent in self._shown.running_agents():
            stop = f"`culm stop {agent.agent_id}` stops it"
            self._screen.face.note(f"({head_of(agent.name)} is still active; {stop})")
        return run, full_text(last.parts) if last is not None else ""

    def messages(self) -> list[Message]:
        """All messages of the run, in order."""
        return [m for m in self._tree.messages.values() if m.run_id == self._run_id]

    @property
    def agents(self) -> int:
        """The number of agents that have worked for it."""
        return self._shown.agents

    async def _follow(self) -> Run | None:
        await self._screen.learn_tools(self._workspace)
        try:
            async with asyncio.timeout(None) as bound, asyncio.TaskGroup() as tasks:
                background = self._background.start(tasks, lambda: self._interrupt(bound))
                run = await follow_run(self._workspace, self._follower, self._run_id, self._show)
                for task in background:
                    task.cancel()
        except TimeoutError:
            return None
        except ExceptionGroup as exc:
            raise exc.exceptions[0] from exc
        return run

    def _show(self, mirror: Mirror) -> bool:
        self._usage.count()  # First: showing drops an agent that has ended.
        is_over = self._shown.show(mirror)
        if mirror.cursor:
            self._background.has_shown()
        return is_over

    async def _interrupt(self, bound: asyncio.Timeout) -> None:
        if self._on_interrupt == "leave":
            raise StoppedFollowing
        bound.reschedule(asyncio.get_running_loop().time() + CANCEL_S)
        self._screen.face.note("(canceling; interrupt again to exit at once)")
        with suppress(RequestRefused, OSError):  # The outcome arrives with the events of the run.
            await retry_idempotent(
                self._workspace, lambda: self._workspace.cancel_run(self._run_id)
            )


class SessionFollower:
    """All runs of a session, whichever client started them."""

    def __init__(
        self,
        workspace: RemoteWorkspace,
        follower: Follower,
        tree: SessionTree,
        screen: RunScreen,
        *,
        interrupted: asyncio.Event,
    ) -> None:
        self._workspace = workspace
        self._follower = follower
        self._tree = tree
        self._screen = screen
        self._background = FollowTasks(workspace, follower, tree, screen, interrupted)
        self._shown = TreeView(screen.face, None, tree, workspace.client.id, shows_prompts=True)
        self._live: set[RunId] = set()  # Active runs, as of the last display.

    async def run(self, *, until_idle: bool) -> None:
        """Show them until nothing is active, or forever.

        Raises `StoppedFollowing`, `RequestRefused`.
        """

        async def leave() -> None:
            raise StoppedFollowing

        await self._screen.learn_tools(self._workspace)
        try:
            async with asyncio.TaskGroup() as tasks:
                background = self._background.start(tasks, leave)
                while True:
                    await self._follower.until(lambda _: self._show(until_idle=until_idle))
                    await self._report_ends()
                    # Others may have begun or ended while those were reported.
                    if until_idle and not (self._going() or self._unreported()):
                        break
                for task in background:
                    task.cancel()
        except ExceptionGroup as exc:
            raise exc.exceptions[0] from exc

    def _show(self, *, until_idle: bool) -> bool:
        """Show new content; True if a run has ended or nothing is active."""
        if not self._tree.cursor:
            return False  # The first state has not arrived.
        self._shown.show_all()
        self._background.has_shown()
        self._live |= self._going()
        return bool(self._unreported()) or (until_idle and not self._going())

    async def _report_ends(self) -> None:
        for run_id in self._unreported():
            self._live.discard(run_id)
            self._tree.ended.pop(run_id, None)
            run = await self._workspace.run(run_id)
            if run.host_run_id:
                continue  # Its host's end is shown.
            last = await wait_for_last_message(self._workspace, self._follower, run)
            self._shown.show_all()
            text = full_text(last.parts) if last is not None else ""
            self._screen.face.end(run, text, self._shown.agents)

    def _unreported(self) -> list[RunId]:
        """Runs that are over, in the order of their ends where it is known.

        A run may begin and end between two displays, and a run that ended while the connection was
        lost is only missing.
        """
        over = dict.fromkeys([*map(RunId, self._tree.ended), *self._live])
        going = self._going()
        return [run_id for run_id in over if run_id not in going]

    def _going(self) -> set[RunId]:
        runs = self._tree.runs.values()
        return {run.run_id for run in runs if run.state not in ("held", "folded")}


# --- a prompt


class RunOptions(Struct, frozen=True):
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
            return await start_session(workspace, options.prompt)
        sessions = await workspace.sessions()
        if not sessions:
            raise NotFound("there is no session to continue", hint="leave out --continue")
        return sessions[0].id


def _nothing_started(exc: RequestRefused) -> Exception:
    """The error for a refused prompt; a request that was wrong in itself is wrong usage."""
    if exc.status in (400, 404, 413):
        return InvalidRequest(exc.message, hint=exc.hint)
    return exc
