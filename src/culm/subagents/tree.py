"""The agents of one workspace: their rows, their slots and their wait states.

Owns the state that exists only while a server runs. The runs belong to `run/`, their turns to
`agent_turns.py`, the rows to the store, and requests between agents to `delegation.py`.
"""

import asyncio
import weakref
from collections import Counter, deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Generic, TypeVar

from msgspec import Struct

from culm.errors import AgentNotFound
from culm.ids import SessionId
from culm.run.live_run import AgentDuty, LiveRun
from culm.run.runs import Runs
from culm.run.turn import TurnContext
from culm.store.agents import (
    StoredAgent,
    children_of,
    find_agent,
    set_agent_activity,
    set_budget,
    shown_below,
)
from culm.store.messages import messages_since_summary
from culm.store.sessions import sessions_above
from culm.wire.agents import Agent, AgentDetails, RawAgent, Waiting
from culm.wire.codec import decode, encode
from culm.wire.messages import Message, full_text
from culm.wire.runs import Limits

DONE_MAX = 10_000  # Ended runs for which the changed files are remembered.

T = TypeVar("T")


class BoundedDict(Generic[T]):
    """A dict that evicts its oldest entry when it is full."""

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._entries: dict[str, T] = {}

    def find(self, name: str) -> T | None:
        return self._entries.get(name)

    def put(self, name: str, value: T) -> None:
        self._entries[name] = value
        if len(self._entries) > self._entries_max:
            del self._entries[next(iter(self._entries))]


class FinishedRun(Struct, frozen=True):
    """Facts about an ended run that are not stored."""

    files: tuple[str, ...] = ()
    note: str = ""


class AgentSlots:
    """Limits how many agents of one tree work at once. First come, first served.

    An agent that waits for its children gives up its slot, so no tree can deadlock. When it resumes
    it takes a slot without waiting, so the limit can be exceeded for a moment.
    """

    def __init__(self, slots_max: int) -> None:
        self._max = slots_max
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def is_full(self) -> bool:
        return self._taken >= self._max

    async def acquire(self) -> None:
        """Wait for a slot. If this is cancelled, no slot is taken."""
        if self._taken < self._max and not self._waiting:
            self._taken += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()  # It was assigned to us at the same moment.
            raise

    def reacquire(self) -> None:
        """Take a slot without waiting, for an agent that resumes."""
        self._taken += 1

    def release(self) -> None:
        self._taken -= 1
        while self._waiting and self._taken < self._max:
            turn = self._waiting.popleft()
            if not turn.done():
                self._taken += 1
                turn.set_result(None)


class AgentTree:
    """The agents of one workspace, created with it."""

    def __init__(self, context: TurnContext, runs: Runs) -> None:
        self._context = context
        self._runs = runs
        # By the top of a tree, while any of its agents works.
        self._slots: weakref.WeakValueDictionary[str, AgentSlots] = weakref.WeakValueDictionary()
        self._waits: dict[str, list[Waiting]] = {}  # The waits of each agent, the latest last.
        self._calls_waiting: Counter[LiveRun] = Counter()  # Calls of a run that wait for agents.
        self.finished = BoundedDict[FinishedRun](DONE_MAX)  # By run.
        self.roots: set[str] = set()  # Sessions of agents that a client started.

    # --- slots

    @asynccontextmanager
    async def slot(self, run: LiveRun) -> AsyncGenerator[None]:
        """Hold one of the slots of its tree while an agent works."""
        slots = self._slots_of(run)
        async with self.waiting(run, "slot") if slots.is_full else nullcontext():
            await slots.acquire()
        try:
            yield
        finally:
            slots.release()

    def _slots_of(self, run: LiveRun) -> AgentSlots:
        """Return the slots that all agents below the same top share."""
        top = duty_of(run).path[0]
        return self._slots.setdefault(top, AgentSlots(self._context.settings.agents_at_once))

    @asynccontextmanager
    async def waiting_for_agents(self, run: LiveRun) -> AsyncGenerator[None]:
        """Mark a run as waiting for agents; an agent's run gives up its slot meanwhile."""
        if run.duty is None:
            yield
            return
        slots = self._slots_of(run)
        async with self.waiting(run, "agents"):
            self._calls_waiting[run] += 1
            if self._calls_waiting[run] == 1:  # Parallel calls of a run share its one slot.
                slots.release()
            try:
                yield
            finally:
                self._calls_waiting[run] -= 1
                if not self._calls_waiting[run]:
                    del self._calls_waiting[run]
                    slots.reacquire()

    # --- wait states

    @asynccontextmanager
    async def waiting(self, run: LiveRun, reason: Waiting) -> AsyncGenerator[None]:
        """Show that an agent waits, and for which reason."""
        waits = self._waits.setdefault(run.agent_id, [])
        waits.append(reason)
        self.note(run)
        try:
            yield
        finally:
            waits.remove(reason)
            if not waits:
                self._waits.pop(run.agent_id, None)
            self.note(run)

    def note(self, run: LiveRun) -> None:
        """Store and publish the agent's wait state and process id."""
        waits = self._waits.get(run.agent_id)
        waiting_for: Waiting = waits[-1] if waits else ""
        if run.stop is None:
            unit = set_agent_activity(run.agent_id, waiting_for=waiting_for, pid=run.pid)
            self._context.store.write(unit)

    # --- queries and budgets

    async def get(self, agent_id: str) -> StoredAgent:
        stored = await self._context.store.read(find_agent(agent_id))
        if stored is None:
            raise AgentNotFound(agent_id)
        return stored

    async def list(self, agent_id: str = "") -> list[RawAgent]:
        """List all agents, or those below one, in the order they were started, as JSON."""
        return await self._context.store.read(shown_below(agent_id))

    async def details(self, agent_id: str) -> AgentDetails:
        stored = await self.get(agent_id)
        agent = stored.agent
        children = await self._context.store.read(children_of(agent.agent_id))
        rows, _ = await self._context.messages.read(messages_since_summary(agent.session_id))
        messages = [decode(encode(row), Message) for row in rows]
        users = [message for message in messages if message.role == "user"]
        answers = [message for message in messages if message.role == "assistant"]
        return AgentDetails(
            agent=agent,
            path=list(stored.path),
            children=children,
            assignment=full_text(users[0].parts) if users else "",
            result=full_text(answers[-1].parts) if answers else "",
        )

    async def children(self, agent_id: str) -> Sequence[Agent]:
        return await self._context.store.read(children_of(agent_id))

    async def sessions_above(self, session_id: SessionId) -> tuple[SessionId, ...]:
        """List the ancestors of a session, from the top."""
        return tuple(reversed(await self._context.store.read(sessions_above(session_id))))

    def has_session(self, session_id: str) -> bool:
        """Return True if the session belongs to an agent, not to people."""
        return "$$" in session_id or session_id in self.roots

    async def find_duty(self, agent_id: str) -> tuple[Agent, AgentDuty] | None:
        """Find an agent by its id or its session's, with the duty of a run from outside."""
        stored = await self._context.store.read(find_agent(agent_id))
        if stored is None:
            return None
        above = await self.sessions_above(stored.agent.session_id)
        return stored.agent, AgentDuty(stored.agent.agent_id, stored.path, above, is_detached=True)

    async def set_budget(self, agent_id: str, budget: Limits) -> Agent:
        """Set the budget of its current and later assignments; raises `AgentNotFound`."""
        agent = (await self.get(agent_id)).agent
        for run in self._runs.line(agent.session_id):
            if run.agent_id == agent.agent_id:
                self._runs.set_limits(run, budget)
        return await asyncio.shield(self._context.store.write(set_budget(agent.agent_id, budget)))


def duty_of(run: LiveRun) -> AgentDuty:
    assert run.duty is not None, "only runs of agents get here"
    return run.duty
