"""A run that has not ended: its request, its state, and the means to stop it."""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from culm.clock import Clock, Timer
from culm.errors import LimitExceeded
from culm.ids import AgentId, MessageId, RunId, SessionId
from culm.permission.gate import ApprovalPolicy
from culm.run.budget import Account
from culm.run.limits import RunSpending
from culm.run.rules import BEHIND_INTERRUPTED, Stop
from culm.settings import Settings
from culm.store.runs import RunBody, StoredRun
from culm.wire.codec import encode
from culm.wire.config import SelectedModel
from culm.wire.messages import Binary, BinaryPart, Part, Text, TextPart
from culm.wire.runs import (
    HEAD_CHARS,
    Attachment,
    Ending,
    Kind,
    Limits,
    Prompt,
    QueuedPrompt,
    RunChanged,
    Settled,
    State,
)

ASKED_BYTES_MAX = 256 << 20  # Waiting requests are in memory, with their attachments.


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A request to the agent: a prompt, or a summary of the session."""

    kind: Kind = "prompt"
    prompt: str = ""
    attachments: Sequence[Attachment] = ()
    limits: Limits = field(default_factory=Limits)
    model: SelectedModel | None = None  # Overrides the selected model for this run.
    approval: ApprovalPolicy = field(default_factory=ApprovalPolicy)
    # The request may join a turn of any model and any permissions. The settings here apply if it
    # gets a turn of its own.
    joins: bool = False

    @property
    def size(self) -> int:
        """The approximate memory use in bytes."""
        return len(self.prompt) + sum(len(file.content) for file in self.attachments)

    def parts(self) -> list[Part]:
        """Return the parts of its user message."""
        files = [BinaryPart(Binary(a.file_path, a.mime_type, a.content)) for a in self.attachments]
        return [TextPart(Text(self.prompt)), *files]


def digest_of(body: Prompt) -> str:
    """Return the same digest for the same prompt to the same session."""
    digest = hashlib.sha256(encode((body.session_id, body.prompt, body.limits)))
    if body.approve is not None or body.interactive:
        digest.update(encode((body.approve, body.interactive)))
    if body.model is not None:
        digest.update(encode((body.model.provider, body.model.model)))
    for attachment in body.attachments:
        digest.update(encode((attachment.file_path, attachment.file_name, attachment.mime_type)))
        digest.update(hashlib.sha256(attachment.content).digest())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class AgentDuty:
    """The assignment behind an agent's run: the agent, and the run that wants the result."""

    agent_id: AgentId
    path: tuple[str, ...]  # Agents from the root down to this one.
    above: tuple[SessionId, ...] = ()  # The sessions of the agents above, where they have one.
    works_for: "LiveRun | None" = None  # The run that wants the result.
    is_detached: bool = False  # That run does not wait for the result.


@dataclass(eq=False, slots=True, weakref_slot=True)
class LiveRun:
    """A live run. Created by `Runs`, and changed by it and by the owner of its turn."""

    id: RunId
    session_id: SessionId
    asked: RunRequest
    given: bool
    digest: str
    provider: str
    model: str
    state: State
    # The commit of its acceptance: its number, or None if it was known.
    accepted: asyncio.Future[int | None]
    account: Account  # The budget of the run and of everything that works for it.
    duty: AgentDuty | None = None  # None for a run of the session's own agent.
    above: tuple[SessionId, ...] = ()  # The sessions above its own.
    seq: int = 0
    changing: asyncio.Future[None] | None = None  # The latest change of the waiting run.
    stop: Stop | None = None
    # The commit of the cancel that covers it: the ids of the runs that the cancel itself ended.
    cancelling: asyncio.Future[list[RunId]] | None = None
    task: asyncio.Task[Ending] | None = None
    began_s: float = 0.0  # The start of its turn.
    timer: Timer | None = None  # Fires when the turn exceeds its time limit.
    given_up: asyncio.Future[None] | None = None  # Done when its task is no longer waited for.
    host: "LiveRun | None" = None  # The run whose turn it shares.
    reenters: MessageId | None = None  # The open answer of an earlier server that it continues.
    spent: RunSpending = field(default_factory=RunSpending)  # Spent under an earlier server.
    # True while it waits for a person and for nothing else.
    may_park: Callable[[], bool] = field(default=lambda: False)
    # For a turn that runs elsewhere: called when other runs could join it, and decides which do.
    on_join: Callable[[], None] = field(default=lambda: None)
    hears: "Callable[[LiveRun], bool]" = field(default=lambda _: True)
    # It waits, but was already sent to the turn that it may join; it must not change.
    is_shared: bool = False
    pid: Callable[[], int] = field(default=lambda: 0)  # The process that runs its turn.
    answer: str = ""  # The text of its last answer, once it has ended.
    was_admitted: bool = False  # Its request is part of a conversation.
    # Also set if the run ends without being admitted.
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    ending: Ending | None = None  # Set once the ending is durable.
    left: list[int] = field(default_factory=list[int])  # Processes that did not stop.
    settled: Settled | None = None  # Its result in the cancel that covers it.

    @property
    def asked_of(self) -> tuple[object, ...]:
        """The model and the approval setting; a run joins a turn with the same ones."""
        return self.provider, self.model, self.asked.approval.approve

    @property
    def shown_state(self) -> State:
        """The state that clients see."""
        return "waiting" if self.state == "active" and self.may_park() else self.state

    @property
    def kind(self) -> Kind:
        return self.asked.kind

    @property
    def joins(self) -> bool:
        return self.asked.joins

    @property
    def agent_id(self) -> str:
        """The agent that runs it; empty for the session's own."""
        return "" if self.duty is None else self.duty.agent_id

    @property
    def waited_for_by(self) -> "LiveRun | None":
        """The run that waits for its result; it ends with that run."""
        if self.duty is None or self.duty.is_detached:
            return None
        return self.duty.works_for

    @property
    def is_interrupted(self) -> bool:
        """Return True if it ended as interrupted, or its end is not stored yet."""
        return self.ending is None or self.ending.outcome == "interrupted"

    @property
    def cancelled(self) -> bool:
        """Return True if a cancel covers it."""
        return self.cancelling is not None

    @property
    def is_settled(self) -> bool:
        """Return True if its request is durable, so that a turn may begin with it."""
        return self.accepted.done() and (self.changing is None or self.changing.done())

    @property
    def is_waiting(self) -> bool:
        """Return True if it is in the queue and may still be changed."""
        waits = self.state == "queued" and self.stop is None and self.task is None
        return waits and not self.is_shared

    @property
    def is_unbegun(self) -> bool:
        """Return True if no run waits for it and no worker has received it."""
        is_detached = self.duty is not None and self.duty.is_detached
        return is_detached and self.state in ("accepted", "queued")

    @property
    def is_orphan(self) -> bool:
        """Return True if the run that waited for it has stopped waiting."""
        above = self.waited_for_by
        return above is not None and (above.stop is not None or above.ended.is_set())

    def changed(self) -> RunChanged:
        """Return the event that shows its state to a new subscriber."""
        about = (self.id, self.session_id, self.shown_state, self.seq, self.given)
        reason = BEHIND_INTERRUPTED if self.state == "held" else ""
        return RunChanged(*about, reason=reason, agent_id=self.agent_id)

    def rest(self, _: None) -> None:
        """Record that it is stored as held, behind an interrupted run."""
        self.state = "held"

    def head(self) -> QueuedPrompt:
        return QueuedPrompt(self.id, self.asked.prompt[:HEAD_CHARS])

    def limit_time(self, clock: Clock, wall_s: float, on_late: Callable[[], None]) -> None:
        """Call `on_late` when its turn has lasted `wall_s` since it began; 0 removes the limit."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if wall_s:
            left_s = max(0.0, wall_s - (clock.now_s() - self.began_s))
            self.timer = clock.call_later(left_s, on_late)

    def admit(self) -> None:
        self.was_admitted = True
        self.admitted.set()

    def give_up(self) -> None:
        if self.given_up is not None and not self.given_up.done():
            self.given_up.set_result(None)


def live_again(left: StoredRun, body: RunBody, state: State, account: Account) -> LiveRun:
    """Rebuild a run that an earlier server accepted, or that was held."""
    duty = None
    if left.run.agent_id:
        agent_id, is_detached = AgentId(left.run.agent_id), left.run.is_detached
        duty = AgentDuty(agent_id, left.path, left.above, is_detached=is_detached)
    return LiveRun(
        id=left.run.id,
        session_id=left.run.session_id,
        asked=RunRequest(
            left.run.kind,
            body.prompt,
            tuple(body.attachments),
            left.limits,
            approval=ApprovalPolicy(left.headless, left.approve),
            joins=left.is_letter,
        ),
        given=left.run.run_id_given,
        digest=left.digest,
        provider=left.run.provider,
        model=left.run.model,
        state=state,
        accepted=asyncio.get_running_loop().create_future(),
        account=account,
        duty=duty,
        above=left.above,
        seq=left.run.seq,
    )


def check_room(
    live: Sequence[LiveRun],
    line: Sequence[LiveRun],
    wanted: Sequence[RunRequest],
    settings: Settings,
) -> None:
    """Raise `LimitExceeded` if there is no room beside the live runs or in the session's queue."""
    if len(line) > settings.queue_max:
        raise LimitExceeded("runs waiting in this session", settings.queue_max)
    if len(live) + len(wanted) > settings.runs_max:
        raise LimitExceeded("live runs in this workspace", settings.runs_max)
    if sum(asked.size for asked in (*(run.asked for run in live), *wanted)) > ASKED_BYTES_MAX:
        raise LimitExceeded("bytes in the prompts of live runs", ASKED_BYTES_MAX)


# --- trees


def with_below(runs: Iterable[LiveRun], live: Iterable[LiveRun]) -> list[LiveRun]:
    """Return the runs, and those whose results they wait for, directly or indirectly.

    A run that shares another run's turn, or was sent to it, ends with that run, which may belong to
    a different tree.
    """
    covered = dict.fromkeys(runs)
    for run in live:  # A run is accepted after the one that wants its result.
        is_own = run.host in covered or (run.host is None and not run.is_shared)
        if run.waited_for_by in covered and is_own:
            covered[run] = None
    return list(covered)


def below_session(session_id: SessionId, live: Iterable[LiveRun]) -> list[LiveRun]:
    """Return the runs in all sessions below a session."""
    return [run for run in live if session_id in run.above]
