"""Follow a run on a screen to its end: show it, answer its asks, stop it.

Connects the client's mirror to a renderer. Owns the status area, the prompt for approvals, and the
effect of an interrupt.
"""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from culm.cli.render.incremental_view import TreeView
from culm.cli.render.json_lines import JsonRenderer
from culm.cli.render.renderers import RunRenderer, TextRenderer
from culm.cli.render.text import head_of
from culm.cli.render.usage_summary import UsageSummary
from culm.cli.terminal.approval_prompt import ApprovalPrompt, LineInput, TerminalInput
from culm.cli.terminal.status_area import find_status_area, redraw_until_done
from culm.client.follow_run import follow_run, retry_idempotent, wait_for_last_message
from culm.client.follower import Follower
from culm.client.http import RequestRefused
from culm.client.mirror import Mirror
from culm.client.tree import SessionTree
from culm.client.workspace import RemoteWorkspace
from culm.ids import RunId
from culm.wire.messages import Message, full_text
from culm.wire.runs import Run

CANCEL_S = 10.0  # The server itself gives up on a run that does not stop within 5 s.

Output = Literal["text", "json", "markdown", "lines"]  # `lines`: one JSON object per event.
OnInterrupt = Literal["cancel", "leave"]


@dataclass(frozen=True, slots=True)
class RunScreen:
    """The output for a run, and the input of the person in front of it."""

    face: RunRenderer
    plain: TextRenderer | None = None  # The renderer that draws the status area, if one is drawn.
    lines: LineInput | None = None  # None if nobody can be asked.


def make_screen(output: Output, *, interactive: bool, has_rules: bool = False) -> RunScreen:
    if output == "lines":
        return RunScreen(JsonRenderer())
    area = find_status_area(sys.stderr, os.environ)
    plain = TextRenderer(has_rules=has_rules, status_area=area, has_answer=output == "text")
    return RunScreen(plain, plain, TerminalInput(plain) if interactive else None)


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
        self._usage = UsageSummary(tree, run_id, asyncio.get_running_loop().time())
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

        try:
            async with asyncio.TaskGroup() as tasks:
                background = self._background.start(tasks, leave)
                while True:
                    await self._follower.until(lambda _: self._show(until_idle=until_idle))
                    await self._report_ends()
                    if until_idle and not self._live:
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
        going = self._going()
        ended = self._live - going
        self._live |= going
        return bool(ended) or (until_idle and not going)

    async def _report_ends(self) -> None:
        for run_id in self._live - self._going():
            self._live.discard(run_id)
            run = await self._workspace.run(run_id)
            last = await wait_for_last_message(self._workspace, self._follower, run)
            self._shown.show_all()
            text = full_text(last.parts) if last is not None else ""
            self._screen.face.end(run, text, self._shown.agents)

    def _going(self) -> set[RunId]:
        runs = self._tree.runs.values()
        return {run.run_id for run in runs if run.state not in ("held", "folded")}
