"""The worktrees of agents: made before an agent starts, inspected when its assignment has ended.

Unchanged worktrees are removed. Owns the set of worktrees being inspected now; an agent that is
about to work in one waits for that. A worktree is inspected at every start, and whenever a run of
its agent, or of a sub-agent that works in it, has ended in any way. `worktrees.py` defines what
counts as a change.
"""

import asyncio
import logging
from collections.abc import Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from msgspec.structs import replace as with_

from culm.ids import AgentId
from culm.run.runs import Runs
from culm.run.turn import TurnContext
from culm.store.agents import (
    NewAgent,
    StoredAgent,
    agents_in_worktrees,
    find_to_sweep,
    set_worktree,
    worktrees_around,
)
from culm.subagents.start_policy import AgentTerms, KeptWorktree, StartRefused
from culm.wire.codec import decode, encode
from culm.worktrees import Worktree, WorktreeFailed, WorktreeOutcome, Worktrees, noted_in

log = logging.getLogger(__name__)

SWEEPS_MAX = 2  # At once; each runs a few git commands.


class AgentWorktrees:
    """The worktrees of one workspace's agents; sweeps them from `start` until `close`."""

    def __init__(
        self, context: TurnContext, runs: Runs, worktrees: Worktrees, folder: Path
    ) -> None:
        self._workspace = Path(context.path)
        self._store = context.store
        self._tasks = context.tasks
        self._runs = runs
        self._worktrees = worktrees
        self._folder = folder  # The parent directory of all worktrees.
        self._inspecting: dict[str, asyncio.Event] = {}  # By agent; set when done.
        self._changed: set[str] = set()  # Known to have work in it, and not used since.
        self._known: list[str] = []  # Agents that had a worktree when the server started.
        self._orphaned: set[str] = set()  # Worktrees without an agent, by its id.
        self._sweeping: set[asyncio.Task[None]] = set()
        self._sweeps = asyncio.Semaphore(SWEEPS_MAX)
        self._is_open = False

    # --- starting agents

    async def make(self, agent_ids: Sequence[AgentId]) -> dict[AgentId, Worktree]:
        """Make one worktree per agent, or raise `StartRefused` and leave none."""
        made: dict[AgentId, Worktree] = {}
        is_done = False
        try:
            for agent_id in agent_ids:
                folder = self._folder / agent_id
                made[agent_id] = await self._worktrees.make(self._workspace, folder, agent_id)
            is_done = True
        except WorktreeFailed as exc:
            raise StartRefused(str(exc)) from exc
        finally:
            if not is_done:
                await self.undo(made.values())
        return made

    async def undo(self, made: Iterable[Worktree]) -> None:
        for worktree in made:
            await self._worktrees.remove(worktree)

    async def restore(self, stored: StoredAgent) -> bool:
        """Make a new worktree if the agent's unchanged one was removed; raises `StartRefused`."""
        agent, terms = stored.agent, decode(stored.terms, AgentTerms)
        if terms.worktree is None or agent.worktree:
            return False
        # A killed server may have left one behind.
        await self._worktrees.clear(self._folder / agent.agent_id)
        made = await self.make([agent.agent_id])
        kept = _stored_worktree(made[agent.agent_id])
        unit = set_worktree(
            agent.agent_id,
            worktree=kept.workspace,
            branch=kept.branch,
            terms=encode(with_(terms, worktree=kept)).decode(),
        )
        await asyncio.shield(self._store.write(unit))
        return True

    # --- triggers

    async def find_orphans(self) -> None:
        """Find the worktrees that the last server left. Call it before any run continues, because
        a run could make worktrees itself."""
        noted = await asyncio.to_thread(noted_in, self._folder)
        self._known = await self._store.read(agents_in_worktrees)
        self._orphaned = set(noted).difference(self._known)

    def start(self) -> None:
        """Start sweeping in the background. Continued runs must be live by now."""
        self._is_open = True
        agent_ids = iter([*self._orphaned, *self._known])
        for _ in range(SWEEPS_MAX):
            self._begin(self._sweep_each(agent_ids))

    def on_run_ended(self, agent_id: str) -> None:
        """Sweep the worktrees that the agent, if any, may have been the last to use: its own and
        those of its ancestors."""
        if agent_id and self._is_open:
            self._begin(self._sweep_around(agent_id))

    def close(self) -> None:
        """Stop sweeping; the next start of the workspace removes the rest."""
        self._is_open = False
        for task in self._sweeping:
            task.cancel()

    def _begin(self, sweep: Coroutine[Any, Any, None]) -> None:
        task = self._tasks.create_task(sweep, name="worktrees")
        self._sweeping.add(task)
        task.add_done_callback(self._sweeping.discard)

    # --- sweeping

    async def _sweep_around(self, agent_id: str) -> None:
        try:
            owners = await self._store.read(worktrees_around(agent_id))
        except Exception:  # boundary: the next start finds them
            log.exception("cannot list the worktrees that agent %s worked in", agent_id)
            return
        await self._sweep_each(iter(owners))

    async def _sweep_each(self, agent_ids: Iterator[str]) -> None:
        for agent_id in agent_ids:
            try:
                async with self._sweeps:
                    await self._sweep(agent_id)
            except Exception:  # boundary: it stays, and the others are inspected
                log.exception("cannot remove the worktree of agent %s", agent_id)

    async def _sweep(self, agent_id: str) -> None:
        stored = await self._store.read(find_to_sweep(agent_id))
        # From here to the first await no agent can begin to work there; later ones wait for us.
        in_use = self._is_used(agent_id) or agent_id in self._inspecting
        if in_use or agent_id in self._changed:
            return
        if stored is not None:
            await self.finish(stored)
        elif agent_id in self._orphaned:
            self._orphaned.discard(agent_id)
            with self._inspect(agent_id):
                await self._worktrees.clear(self._folder / agent_id)

    async def finish(self, stored: StoredAgent) -> WorktreeOutcome | None:
        """Determine the changes in the agent's own worktree; remove it if it is unchanged."""
        agent_id, kept = stored.agent.agent_id, decode(stored.terms, AgentTerms).worktree
        if kept is None:
            return None
        with self._inspect(agent_id):
            outcome = await self._worktrees.finish(_worktree_of(kept))
            if not outcome.kept:
                gone = set_worktree(agent_id, worktree="", branch="", terms=stored.terms)
                await asyncio.shield(self._store.write(gone))
            elif not outcome.error:
                self._changed.add(agent_id)
        return outcome

    async def forget(self, stored: StoredAgent) -> None:
        """Remove the worktree of a deleted agent, unless work is in it."""
        if (kept := decode(stored.terms, AgentTerms).worktree) is not None:
            await self._worktrees.finish(_worktree_of(kept))
        if self._is_open:
            self._begin(self._sweep_each(iter(stored.path[:-1])))

    # --- agents at work

    async def begin_work(self, path: Iterable[str]) -> None:
        """Wait for inspections before a live run begins to work as the last agent of the path."""
        for agent_id in path:
            if (inspected := self._inspecting.get(agent_id)) is not None:
                await inspected.wait()
            self._changed.discard(agent_id)
            self._orphaned.discard(agent_id)

    def has_below(self, agent_id: str) -> bool:
        """Return True while the agent has sub-agents at work."""
        return any(agent_id in path[:-1] for path in self._paths())

    def _is_used(self, agent_id: str) -> bool:
        return any(agent_id in path for path in self._paths())

    def _paths(self) -> Iterable[tuple[str, ...]]:
        return (run.duty.path for run in self._runs.live() if run.duty is not None)

    @contextmanager
    def _inspect(self, agent_id: str) -> Generator[None]:
        inspected = self._inspecting[agent_id] = asyncio.Event()
        try:
            yield
        finally:
            del self._inspecting[agent_id]
            inspected.set()


def with_worktree(new: NewAgent, made: Worktree | None) -> NewAgent:
    """Return the new agent with its worktree, if it has one."""
    if made is None:
        return new
    terms, kept = decode(new.terms, AgentTerms), _stored_worktree(made)
    terms = encode(with_(terms, worktree=kept)).decode()
    return replace(new, terms=terms, worktree=kept.workspace, branch=kept.branch)


def _stored_worktree(made: Worktree) -> KeptWorktree:
    return KeptWorktree(
        str(made.path), str(made.workspace), made.branch, made.base, str(made.entry)
    )


def _worktree_of(kept: KeptWorktree) -> Worktree:
    return Worktree(Path(kept.path), Path(kept.workspace), kept.branch, kept.base, Path(kept.entry))
