"""Worktrees that nobody works in any more: looked at, and removed if nothing was changed in them.

Owns which are being looked at now; who is about to work in one waits for that. Looked at is a
worktree whenever a run of its agent, or of one below that works in it, has ended in whatever way,
and at every start. What counts as a change is `worktrees.py`'s.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from culm.run.live_run import LiveRun
from culm.store.agents import (
    StoredAgent,
    agents_in_worktrees,
    find_to_sweep,
    set_worktree,
    worktrees_around,
)
from culm.store.store import Store
from culm.subagents.agent_worktrees import AgentWorktrees
from culm.subagents.start_policy import AgentTerms
from culm.wire.codec import decode
from culm.worktrees.worktree import WorktreeOutcome

log = logging.getLogger(__name__)

SWEEPS_MAX = 2  # At once: each is a few commands of git.


class WorktreeSweeper:
    """Of one workspace. Sweeps from `start` until `close`."""

    def __init__(
        self,
        worktrees: AgentWorktrees,
        store: Store,
        tasks: asyncio.TaskGroup,
        live: Callable[[], Iterable[LiveRun]],
    ) -> None:
        self._worktrees = worktrees
        self._store = store
        self._tasks = tasks
        self._live = live
        self._looked_at: dict[str, asyncio.Event] = {}  # Now, by agent.
        self._seen: set[str] = set()  # There is work in it, and nobody was there since.
        self._known: list[str] = []  # Agents that had one when the server started.
        self._left: set[str] = set()  # There is one, and it is nobody's.
        self._sweeping: set[asyncio.Task[None]] = set()
        self._sweeps = asyncio.Semaphore(SWEEPS_MAX)
        self._is_open = False

    # --- when

    async def find_left(self) -> None:
        """What the last server left. Before anybody goes on, who could begin worktrees himself."""
        noted = await self._worktrees.noted()
        self._known = await self._store.read(agents_in_worktrees)
        self._left = set(noted).difference(self._known)

    def start(self) -> None:
        """Who goes on is live by now. Nothing here is waited for."""
        self._is_open = True
        agent_ids = iter([*self._left, *self._known])
        for _ in range(SWEEPS_MAX):
            self._begin(self._sweep_each(agent_ids))

    def on_run_ended(self, agent_id: str) -> None:
        """Nobody may be left where it worked: in its own worktree, or in one of those above."""
        if self._is_open:
            self._begin(self._sweep_around(agent_id))

    def sweep(self, agent_ids: Iterable[str]) -> None:
        if self._is_open:
            self._begin(self._sweep_each(iter(tuple(agent_ids))))

    def close(self) -> None:
        """The workspace closes; what is not removed yet is at its next opening."""
        self._is_open = False
        for task in self._sweeping:
            task.cancel()

    def _begin(self, sweep: Coroutine[Any, Any, None]) -> None:
        task = self._tasks.create_task(sweep, name="worktrees")
        self._sweeping.add(task)
        task.add_done_callback(self._sweeping.discard)

    # --- what

    async def _sweep_around(self, agent_id: str) -> None:
        try:
            owners = await self._store.read(worktrees_around(agent_id))
        except Exception:  # boundary: the next start finds them
            log.exception("worktrees that agent %s worked in are not looked at", agent_id)
            return
        await self._sweep_each(iter(owners))

    async def _sweep_each(self, agent_ids: Iterator[str]) -> None:
        for agent_id in agent_ids:
            try:
                async with self._sweeps:
                    await self._sweep(agent_id)
            except Exception:  # boundary: it stays, and the others are looked at
                log.exception("the worktree of agent %s cannot be removed", agent_id)

    async def _sweep(self, agent_id: str) -> None:
        stored = await self._store.read(find_to_sweep(agent_id))
        # From here to the first wait nobody can begin to work there; who comes later waits for us.
        in_use = self._is_used(agent_id) or agent_id in self._looked_at
        if in_use or agent_id in self._seen:
            return
        if stored is not None:
            await self.finish(stored)
        elif agent_id in self._left:
            self._left.discard(agent_id)
            with self._looking_at(agent_id):
                await self._worktrees.clear(agent_id)

    async def finish(self, stored: StoredAgent) -> WorktreeOutcome | None:
        """What was changed in the agent's own worktree, which goes if nothing was."""
        agent_id, terms = stored.agent.agent_id, decode(stored.terms, AgentTerms)
        with self._looking_at(agent_id):
            settled = await self._worktrees.finish(terms)
            if settled is None:
                return None
            if not settled.kept:
                gone = set_worktree(agent_id, worktree="", branch="", terms=stored.terms)
                await asyncio.shield(self._store.write(gone))
            elif not settled.error:
                self._seen.add(agent_id)
        return settled

    # --- who works where

    async def make_way(self, path: Iterable[str]) -> None:
        """Somebody who is live begins to work in what the last of these agents works in."""
        for agent_id in path:
            if (looked_at := self._looked_at.get(agent_id)) is not None:
                await looked_at.wait()
            self._seen.discard(agent_id)
            self._left.discard(agent_id)

    def has_below(self, agent_id: str) -> bool:
        """Whether others work for it still."""
        return any(agent_id in path[:-1] for path in self._paths())

    def _is_used(self, agent_id: str) -> bool:
        return any(agent_id in path for path in self._paths())

    def _paths(self) -> Iterable[tuple[str, ...]]:
        return (run.duty.path for run in self._live() if run.duty is not None)

    @contextmanager
    def _looking_at(self, agent_id: str) -> Generator[None]:
        looked_at = self._looked_at[agent_id] = asyncio.Event()
        try:
            yield
        finally:
            del self._looked_at[agent_id]
            looked_at.set()
