"""The state at once: what a client of events begins from."""

from collections.abc import Iterable

from culm.errors import TooLarge
from culm.events.cursor import Cursor
from culm.run.messages import Messages
from culm.store.agents import agents_at_work
from culm.store.base import Connection
from culm.store.messages import all_messages, messages_of_session
from culm.store.runs import open_runs
from culm.store.sessions import all_sessions
from culm.store.store import Store
from culm.wire.agents import Agent
from culm.wire.messages import RawMessage
from culm.wire.runs import Run
from culm.wire.sessions import Session
from culm.wire.state import Present, Snapshot

SNAPSHOT_MESSAGES_MAX = 50_000


async def take_snapshot(
    store: Store, messages: Messages, presence: Iterable[Present], wanted: frozenset[str] | None
) -> Snapshot[RawMessage]:
    """The stored state at one cursor; messages of the `wanted` sessions, or of all if None."""
    sessions: list[Session] = []
    runs: list[Run] = []
    agents: list[Agent] = []

    def query(connection: Connection) -> list[RawMessage]:
        sessions[:] = all_sessions(connection)
        runs[:] = open_runs(connection)
        agents[:] = agents_at_work(connection)
        if wanted is None:
            return all_messages(SNAPSHOT_MESSAGES_MAX + 1)(connection)
        return [m for s in sorted(wanted) for m in messages_of_session(s)(connection)]

    found, seq = await messages.read(query)
    if len(found) > SNAPSHOT_MESSAGES_MAX:
        raise TooLarge(
            f"more than {SNAPSHOT_MESSAGES_MAX} messages", hint="name the sessions you show"
        )
    return Snapshot(
        cursor=str(Cursor(store.epoch, seq)),
        sessions=sessions,
        messages=found,
        runs=runs,
        agents=agents,
        presence=list(presence),
        store=store.health,
    )
