"""A run on a screen, from its first word to its end: shown, answered for, stopped.

Owns what stands between the client's mirror and a face: the live line, the person who answers what
is asked, and what an interrupt does.
"""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from culm.cli.render.call_lines import head_of
from culm.cli.render.incremental_view import TreeView
from culm.cli.render.json_lines import JsonRenderer
from culm.cli.render.renderers import RunRenderer, TextRenderer
from culm.cli.render.usage_summary import UsageSummary
from culm.cli.terminal.approval_prompt import ApprovalPrompt, LineInput, TerminalInput
from culm.cli.terminal.status_area import find_region, redraw_until_done
from culm.client.follow_run import catch_up, follow_run, retry_idempotent
from culm.client.follower import Follower
from culm.client.http import RequestRefused
from culm.client.mirror import Mirror
from culm.client.tree import SessionTree
from culm.client.workspace import RemoteWorkspace
from culm.ids import RunId
from culm.wire.messages import Message, full_text
from culm.wire.runs import Run

CANCEL_S = 10.0  # The server itself gives up on what does not stop after 5 s.

Output = Literal["text", "json", "markdown", "lines"]  # The last: one JSON object for each event.
OnInterrupt = Literal["cancel", "leave"]


@dataclass(frozen=True, slots=True)
class RunScreen:
    """Where a run is shown, and who sits there."""

    face: RunRenderer
    plain: TextRenderer | None = None  # What draws the live line, if anything does.
    lines: LineInput | None = None  # None if nobody can be asked here.


def make_screen(output: Output, *, interactive: bool, has_rules: bool = False) -> RunScreen:
    if output == "lines":
        return RunScreen(JsonRenderer())
    region = find_region(sys.stderr, os.environ)
    plain = TextRenderer(has_rules=has_rules, region=region, has_answer=output == "text")
    return RunScreen(plain, plain, TerminalInput(plain) if interactive else None)


class StoppedFollowing(Exception):
    """Whoever watched has left; the run goes on."""


class FollowTasks:
    """What goes on beside a run that is shown: drawing, answering, waiting for an interrupt."""

    def __init__(
        self,
        workspace: RemoteWorkspace,
        follower: Follower,
        tree: SessionTree,
        screen: RunScreen,
        interrupted: asyncio.Event,
        meter: UsageSummary | None = None,
    ) -> None:
        self._screen = screen
        self._meter = meter
        self._interrupted = interrupted
        self._shown = asyncio.Event()
        self._desk = None
        if screen.lines is not None:
            self._desk = ApprovalPrompt(workspace, follower, tree, screen.face, screen.lines)

    def has_shown(self) -> None:
        """What there was is on the screen: from here on a person can be asked."""
        self._shown.set()

    async def _serve(self, desk: ApprovalPrompt) -> None:
        await self._shown.wait()
        await desk.serve()

    def start(
        self, tasks: asyncio.TaskGroup, on_interrupt: Callable[[], Awaitable[None]]
    ) -> list[asyncio.Task[None]]:
        loop = asyncio.get_running_loop()

        async def wait() -> None:
            await self._interrupted.wait()
            await on_interrupt()

        beside = [tasks.create_task(wait(), name="interrupt")]
        if self._desk is not None:
            beside.append(tasks.create_task(self._serve(self._desk), name="desk"))
        plain, meter = self._screen.plain, self._meter
        if plain is not None and meter is not None:
            drawing = redraw_until_done(plain, lambda: meter.doing(loop.time()), self._interrupted)
            beside.append(tasks.create_task(drawing, name="draw"))
        return beside


class RunFollower:
    """One run of a tree that is followed already."""

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
        self._meter = UsageSummary(tree, run_id, asyncio.get_running_loop().time())
        self._beside = FollowTasks(workspace, follower, tree, screen, interrupted, self._meter)
        self._shown = TreeView(
            screen.face, run_id, tree, workspace.client.id, shows_prompts=shows_prompts
        )

    async def to_the_end(self) -> tuple[Run, str] | None:
        """The run and its answer; None if it was told to stop and nobody said that it did.

        Raises `Left` if an interrupt is to leave it, `RunLost`, `Refused`.
        """
        run = await self._follow()
        if run is None:
            self._screen.face.note(f"culm: asked to cancel; no end was told in {CANCEL_S:g} s")
            return None
        last = await catch_up(self._workspace, self._follower, run)
        self._shown.show_all()
        for agent in self._shown.at_work():
            stop = f"`culm stop {agent.agent_id}` stops it"
            self._screen.face.note(f"({head_of(agent.name)} goes on; {stop})")
        return run, full_text(last.parts) if last is not None else ""

    def messages(self) -> list[Message]:
        """All of the run, in their order."""
        return [m for m in self._tree.messages.values() if m.run_id == self._run_id]

    @property
    def agents(self) -> int:
        """How many have worked for it."""
        return self._shown.agents

    async def _follow(self) -> Run | None:
        try:
            async with asyncio.timeout(None) as bound, asyncio.TaskGroup() as tasks:
                beside = self._beside.start(tasks, lambda: self._interrupt(bound))
                run = await follow_run(self._workspace, self._follower, self._run_id, self._show)
                for task in beside:
                    task.cancel()
        except TimeoutError:
            return None
        except ExceptionGroup as exc:
            raise exc.exceptions[0] from exc
        return run

    def _show(self, mirror: Mirror) -> bool:
        self._meter.count()  # Before: whoever is shown to the end is dropped.
        is_over = self._shown.show(mirror)
        if mirror.cursor:
            self._beside.has_shown()
        return is_over

    async def _interrupt(self, bound: asyncio.Timeout) -> None:
        if self._on_interrupt == "leave":
            raise StoppedFollowing
        bound.reschedule(asyncio.get_running_loop().time() + CANCEL_S)
        self._screen.face.note("(cancelling; once more to leave at once)")
        with suppress(RequestRefused, OSError):  # What came of it is told by the run itself.
            await retry_idempotent(
                self._workspace, lambda: self._workspace.cancel_run(self._run_id)
            )


class SessionFollower:
    """All runs of a session, whoever began them."""

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
        self._beside = FollowTasks(workspace, follower, tree, screen, interrupted)
        self._shown = TreeView(screen.face, None, tree, workspace.client.id, shows_prompts=True)
        self._live: set[RunId] = set()  # Runs that go on, as far as was shown.

    async def run(self, *, until_idle: bool) -> None:
        """Show them; for ever, or until nothing goes on any more. Raises `Left`, `Refused`."""

        async def leave() -> None:
            raise StoppedFollowing

        try:
            async with asyncio.TaskGroup() as tasks:
                beside = self._beside.start(tasks, leave)
                while True:
                    await self._follower.until(lambda _: self._show(until_idle=until_idle))
                    await self._report_ends()
                    if until_idle and not self._live:
                        break
                for task in beside:
                    task.cancel()
        except ExceptionGroup as exc:
            raise exc.exceptions[0] from exc

    def _show(self, *, until_idle: bool) -> bool:
        """Show what is new; True if a run has ended, or nothing goes on."""
        if not self._tree.cursor:
            return False  # It is not known yet.
        self._shown.show_all()
        self._beside.has_shown()
        going = self._going()
        ended = self._live - going
        self._live |= going
        return bool(ended) or (until_idle and not going)

    async def _report_ends(self) -> None:
        for run_id in self._live - self._going():
            self._live.discard(run_id)
            run = await self._workspace.run(run_id)
            last = await catch_up(self._workspace, self._follower, run)
            self._shown.show_all()
            text = full_text(last.parts) if last is not None else ""
            self._screen.face.end(run, text, self._shown.agents)

    def _going(self) -> set[RunId]:
        runs = self._tree.runs.values()
        return {run.run_id for run in runs if run.state not in ("held", "folded")}
