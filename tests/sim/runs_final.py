"""The final state of a world of runs: the stored rows and the log."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from culm.ids import RunId
from culm.store.messages import all_messages
from culm.store.runs import run_of
from culm.store.sessions import all_sessions
from culm.wire.codec import decode, encode
from culm.wire.messages import Finish, FinishPart, Message, Session, full_text
from culm.wire.runs import AgentEvent, CancelChanged, QueueChanged, Run, RunChanged, RunComplete
from tests.sim.runs_outside import World
from tests.sim.runs_world import RunServer


@dataclass(frozen=True)
class Logged:
    seq: int
    type: str
    run_id: str
    session_id: str
    changed: RunChanged | None
    complete: RunComplete | None
    queue: list[RunId] | None
    cancel: CancelChanged | None
    event: AgentEvent | None


class Final:
    """The final state of a world."""

    def __init__(self, server: RunServer) -> None:
        connection = server.file.connection
        rows = server.file.rows("SELECT * FROM runs ORDER BY seq")
        self.server = server
        self.world: World = server.world
        self.runs: dict[str, Run] = {row["id"]: run_of(row) for row in rows}
        self.prompts: dict[str, str] = {row["id"]: row["prompt"] for row in rows}
        self.sessions: list[Session] = all_sessions(connection)
        self.messages: dict[str, list[Message]] = defaultdict(list)
        for raw in all_messages(1 << 30)(connection):
            self.messages[raw.session_id].append(decode(encode(raw), Message))
        refused = "SELECT run_id FROM asks WHERE state IN ('denied', 'expired')"
        self.refused: set[str] = {row[0] for row in server.file.rows(refused)}
        self.log = list(self._read_log())
        self.history: dict[str, list[RunChanged]] = defaultdict(list)
        for event in self.log:
            if event.changed is not None:
                self.history[event.run_id].append(event.changed)

    def _read_log(self) -> Iterator[Logged]:
        for row in self.server.file.rows("SELECT * FROM events ORDER BY seq"):
            about = (row["seq"], row["type"], row["entity_id"], row["session_id"])
            fields: str = row["fields"]
            yield Logged(
                *about,
                changed=decode(fields, RunChanged) if row["type"] == "run_changed" else None,
                complete=decode(fields, RunComplete) if row["type"] == "run_complete" else None,
                queue=_queue_in(fields) if row["type"] == "queue_changed" else None,
                cancel=decode(fields, CancelChanged) if row["type"] == "cancel_changed" else None,
                event=decode(fields, AgentEvent) if row["type"] == "agent_event" else None,
            )

    def was(self, run_id: str, state: str) -> bool:
        return any(changed.state == state for changed in self.history[run_id])

    def last_before_end(self, run_id: str) -> str:
        return [changed.state for changed in self.history[run_id] if changed.state != "ended"][-1]

    def prompt_positions(self, run_id: str) -> list[int]:
        """Positions of the prompt of a run in its conversation."""
        token = self.prompts[run_id].split()[0]
        messages = self.messages[self.runs[run_id].session_id]
        return [
            n
            for n, m in enumerate(messages)
            if m.role == "user" and full_text(m.parts).startswith(f"{token} ")
        ]


def _queue_in(fields: str) -> list[RunId]:
    return [item.run_id for item in decode(fields, QueueChanged).items]


def finish_in(message: Message) -> Finish | None:
    return next((p.data for p in message.parts if isinstance(p, FinishPart)), None)
