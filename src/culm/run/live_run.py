"""A run that has not ended: what was asked, how it stands, and how it is stopped."""

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
from culm.store.stored_runs import RunBody, StoredRun
from culm.wire.agent import Attachment, Prompt
from culm.wire.codec import encode
from culm.wire.config import SelectedModel
from culm.wire.endings import Ending
from culm.wire.messages import Binary, BinaryPart, Part, Text, TextPart
from culm.wire.runs import HEAD_CHARS, Kind, Limits, QueuedPrompt, RunChanged, Settled, State

ASKED_BYTES_MAX = 256 << 20  # What waits is in memory, with its attachments.


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What somebody wants; a prompt, or a summary of the session."""

    kind: Kind = "prompt"
    prompt: str = ""
    attachments: Sequence[Attachment] = ()
    limits: Limits = field(default_factory=Limits)
    model: SelectedModel | None = None  # Instead of the one that is selected, for this run.
    approval: ApprovalPolicy = field(default_factory=ApprovalPolicy)
    # It is for whoever runs: it may share a turn of any model and with any permissions. For a turn
    # of its own it has what is said here.
    joins: bool = False

    @property
    def size(self) -> int:
        """About how much memory it takes, in bytes."""
        return len(self.prompt) + sum(len(file.content) for file in self.attachments)

    def parts(self) -> list[Part]:
        """As the user message it becomes."""
        files = [BinaryPart(Binary(a.file_path, a.mime_type, a.content)) for a in self.attachments]
        return [TextPart(Text(self.prompt)), *files]


def digest_of(body: Prompt) -> str:
    """The same for the same prompt to the same session."""
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
    """That a run is an agent's, and whom it is for."""

    agent_id: AgentId
    path: tuple[str, ...]  # Of agents, from the top down to this one.
    above: tuple[SessionId, ...] = ()  # The sessions of those before it, where they have one.
    works_for: "LiveRun | None" = None  # Who wants its result ...
    is_detached: bool = False  # ... and does not wait for it.


@dataclass(eq=False, slots=True, weakref_slot=True)
class LiveRun:
    """Made by `Runs`, which changes it together with who holds its turn."""

    id: RunId
    session_id: SessionId
    asked: RunRequest
    given: bool
    digest: str
    provider: str
    model: str
    state: State
    accepted: asyncio.Future[int | None]  # Its commit: its number, or None if it was known.
    account: Account  # What it may use up, with all that works for it.
    duty: AgentDuty | None = None  # None if it is the session's own.
    above: tuple[SessionId, ...] = ()  # The sessions above its own.
    seq: int = 0
    changing: asyncio.Future[None] | None = None  # Its latest change while it waited.
    stop: Stop | None = None
    # The commit of the cancel that covers it; which runs that ended by itself.
    cancelling: asyncio.Future[list[RunId]] | None = None
    task: asyncio.Task[Ending] | None = None
    began_s: float = 0.0  # Its turn, and ...
    timer: Timer | None = None  # ... when that has taken too long.
    given_up: asyncio.Future[None] | None = None  # Nobody waits for its task any longer.
    host: "LiveRun | None" = None  # Whose turn it shares.
    reenters: MessageId | None = None  # The open answer of an earlier server it goes on with.
    spent: RunSpending = field(default_factory=RunSpending)  # Before, under an earlier server.
    may_park: Callable[[], bool] = field(default=lambda: False)  # It only waits for a person.
    # Of a turn that is held elsewhere: told that others wait who may share it, and who of them do.
    on_join: Callable[[], None] = field(default=lambda: None)
    hears: "Callable[[LiveRun], bool]" = field(default=lambda _: True)
    is_shared: bool = False  # It waits, and was said to who may share the turn: it stays as it is.
    pid: Callable[[], int] = field(default=lambda: 0)  # Of the process that holds its turn.
    answer: str = ""  # What it said last, once it has ended.
    was_admitted: bool = False  # What it asks for is part of a conversation.
    admitted: asyncio.Event = field(default_factory=asyncio.Event)  # Or it has ended without.
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    ending: Ending | None = None  # Once that is durable ...
    left: list[int] = field(default_factory=list[int])  # Processes that did not stop.
    settled: Settled | None = None  # ... and what the cancel that covers it was told.

    @property
    def asked_of(self) -> tuple[object, ...]:
        """The provider and the model it was accepted for, and what its caller lets it do."""
        return self.provider, self.model, self.asked.approval.approve

    @property
    def shown_state(self) -> State:
        """As clients see it."""
        return "waiting" if self.state == "active" and self.may_park() else self.state

    @property
    def kind(self) -> Kind:
        return self.asked.kind

    @property
    def joins(self) -> bool:
        return self.asked.joins

    @property
    def agent_id(self) -> str:
        """The agent that does it; empty if that is the session's own."""
        return "" if self.duty is None else self.duty.agent_id

    @property
    def waited_for_by(self) -> "LiveRun | None":
        """The run that ends it with itself."""
        if self.duty is None or self.duty.is_detached:
            return None
        return self.duty.works_for

    @property
    def is_interrupted(self) -> bool:
        """By what its end says, or because that is not written yet."""
        return self.ending is None or self.ending.outcome == "interrupted"

    @property
    def cancelled(self) -> bool:
        """A cancel covers it."""
        return self.cancelling is not None

    @property
    def is_settled(self) -> bool:
        """What it asks for is durable, so that a turn may begin with it."""
        return self.accepted.done() and (self.changing is None or self.changing.done())

    @property
    def is_waiting(self) -> bool:
        """It is in the queue, and may still be changed there."""
        waits = self.state == "queued" and self.stop is None and self.task is None
        return waits and not self.is_shared

    @property
    def is_unbegun(self) -> bool:
        """It is nobody's to wait for, and no worker has been told of it."""
        is_detached = self.duty is not None and self.duty.is_detached
        return is_detached and self.state in ("accepted", "queued")

    @property
    def is_orphan(self) -> bool:
        """Whoever waits for it does not any more."""
        above = self.waited_for_by
        return above is not None and (above.stop is not None or above.ended.is_set())

    def changed(self) -> RunChanged:
        """How it stands, for whoever begins to listen."""
        about = (self.id, self.session_id, self.shown_state, self.seq, self.given)
        reason = BEHIND_INTERRUPTED if self.state == "held" else ""
        return RunChanged(*about, reason=reason, agent_id=self.agent_id)

    def rest(self, _: None) -> None:
        """It is stored as held, behind one that was interrupted: here it waits no longer."""
        self.state = "held"

    def head(self) -> QueuedPrompt:
        return QueuedPrompt(self.id, self.asked.prompt[:HEAD_CHARS])

    def limit_time(self, clock: Clock, wall_s: float, on_late: Callable[[], None]) -> None:
        """Have this called when its turn has taken so long since it began; 0 is never."""
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
    """What the last server had accepted, or what was at rest."""
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
    """Whether there is room for more beside what is live, and in the line it joins."""
    if len(line) > settings.queue_max:
        raise LimitExceeded("runs waiting in this session", settings.queue_max)
    if len(live) + len(wanted) > settings.runs_max:
        raise LimitExceeded("live runs in this workspace", settings.runs_max)
    if sum(asked.size for asked in (*(run.asked for run in live), *wanted)) > ASKED_BYTES_MAX:
        raise LimitExceeded("bytes in the prompts of live runs", ASKED_BYTES_MAX)


# --- trees


def with_below(runs: Iterable[LiveRun], live: Iterable[LiveRun]) -> list[LiveRun]:
    """And those whose results they wait for, directly or not.

    What shares the turn of another run, or is said to it, ends with that one, which may be
    somebody else's.
    """
    covered = dict.fromkeys(runs)
    for run in live:  # Whoever wants a result was accepted before.
        is_own = run.host in covered or (run.host is None and not run.is_shared)
        if run.waited_for_by in covered and is_own:
            covered[run] = None
    return list(covered)


def below_session(session_id: SessionId, live: Iterable[LiveRun]) -> list[LiveRun]:
    """The runs in all sessions below it."""
    return [run for run in live if session_id in run.above]
