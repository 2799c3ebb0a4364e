"""A run that has not ended: the accepted request, and the state that `Runs` changes."""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from msgspec import Struct, field

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


class RunRequest(Struct, frozen=True):
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


class AgentDuty(Struct, frozen=True):
    """The assignment behind an agent's run: the agent, and the run that wants the result."""

    agent_id: AgentId
    path: tuple[str, ...]  # Agents from the root down to this one.
    above: tuple[SessionId, ...] = ()  # The sessions of the agents above, where they have one.
    works_for: "LiveRun | None" = None  # The run that wants the result.
    is_detached: bool = False  # That run does not wait for the result.


class WorkerLink(Protocol):
    """The connection of a run to the worker that runs its turn."""

    @property
    def pid(self) -> int:
        """The worker's process; 0 if it is not ours, or the turn is over."""
        ...

    def has_read(self, run: "LiveRun") -> bool:
        """Return True if the worker has read the prompt of a run that may join the turn."""
        ...

    def on_join(self) -> None:
        """Another run may join the turn."""
        ...


class RunningTurn(Struct, eq=False):
    """The turn of a run: its task, and the limit of its time."""

    task: asyncio.Task[Ending]
    began_s: float  # Monotonic.
    may_park: Callable[[], bool]  # True while it waits for a person and for nothing else.
    # Done when the task is no longer waited for.
    given_up: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    timer: Timer | None = None  # Fires when the turn exceeds its time limit.

    def limit_time(self, clock: Clock, wall_s: float, on_late: Callable[[], None]) -> None:
        """Call `on_late` when it has lasted `wall_s` since it began; 0 removes the limit."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if wall_s:
            left_s = max(0.0, wall_s - (clock.monotonic_s() - self.began_s))
            self.timer = clock.call_later(left_s, on_late)

    def give_up_in(self, clock: Clock, delay_s: float) -> None:
        """Wait no longer than that. The timer refers to the future only, not to the turn."""
        clock.call_later(delay_s, partial(_complete, self.given_up))


def _complete(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class LiveRunControl(Struct, eq=False):
    """The changing part of a live run. Only `Runs` writes it."""

    asked: RunRequest  # The prompt can be edited while the run waits.
    state: State
    # The commit of its acceptance: its number, or None if it was known.
    accepted: asyncio.Future[int | None]
    seq: int = 0
    changing: asyncio.Future[None] | None = None  # The latest change of the waiting run.
    stop: Stop | None = None
    # The commit of the cancel that covers it: the ids of the runs that the cancel itself ended.
    cancelling: asyncio.Future[list[RunId]] | None = None
    settled: Settled | None = None  # Its result in the cancel that covers it.
    turn: RunningTurn | None = None
    worker: WorkerLink | None = None  # For a turn that runs in a worker.
    host: "LiveRun | None" = None  # The run whose turn it shares.
    # It waits, but was already sent to the worker whose turn it may join; it must not change.
    is_shared: bool = False
    was_admitted: bool = False  # Its request is part of a conversation.
    # Also set if the run ends without being admitted.
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    ending: Ending | None = None  # Set once the ending is durable.
    answer: str = ""  # The text of its last answer, once it has ended.


class LiveRun(Struct, frozen=True, eq=False, weakref=True):
    """A run that has not ended, as it was accepted. Created by `Runs`."""

    id: RunId
    session_id: SessionId
    given: bool  # The caller chose the id.
    digest: str
    provider: str
    model: str
    account: Account  # The budget of the run and of everything that works for it.
    control: LiveRunControl
    duty: AgentDuty | None = None  # None for a run of the session's own agent.
    above: tuple[SessionId, ...] = ()  # The sessions above its own.
    reenters: MessageId | None = None  # The open answer of an earlier server that it continues.
    # Spent under an earlier server.
    spent: RunSpending = field(default_factory=RunSpending)

    @property
    def asked(self) -> RunRequest:
        return self.control.asked

    @property
    def state(self) -> State:
        return self.control.state

    @property
    def stop(self) -> Stop | None:
        return self.control.stop

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
        ending = self.control.ending
        return ending is None or ending.outcome == "interrupted"

    @property
    def cancelled(self) -> bool:
        """Return True if a cancel covers it."""
        return self.control.cancelling is not None

    @property
    def is_settled(self) -> bool:
        """Return True if its request is durable, so that a turn may begin with it."""
        changing = self.control.changing
        return self.control.accepted.done() and (changing is None or changing.done())

    @property
    def is_waiting(self) -> bool:
        """Return True if it is in the queue and may still be changed."""
        waits = self.state == "queued" and self.stop is None and self.control.turn is None
        return waits and not self.control.is_shared

    @property
    def is_unbegun(self) -> bool:
        """Return True if no run waits for it and no worker has received it."""
        is_detached = self.duty is not None and self.duty.is_detached
        return is_detached and self.state in ("accepted", "queued")

    @property
    def is_orphan(self) -> bool:
        """Return True if the run that waited for it has stopped waiting."""
        above = self.waited_for_by
        return above is not None and (above.stop is not None or above.control.ended.is_set())

    @property
    def pid(self) -> int:
        """The process of the worker that runs its turn; 0 if there is none."""
        return 0 if self.control.worker is None else self.control.worker.pid

    def may_park(self) -> bool:
        """Return True while it waits for a person and for nothing else."""
        return self.control.turn is not None and self.control.turn.may_park()

    def changed(self) -> RunChanged:
        """Return the event that shows its state to a new subscriber."""
        about = (self.id, self.session_id, self.shown_state, self.control.seq, self.given)
        reason = BEHIND_INTERRUPTED if self.state == "held" else ""
        return RunChanged(*about, reason=reason, agent_id=self.agent_id)

    def head(self) -> QueuedPrompt:
        return QueuedPrompt(self.id, self.asked.prompt[:HEAD_CHARS])


def live_again(
    left: StoredRun,
    body: RunBody,
    state: State,
    account: Account,
    reenters: MessageId | None = None,
) -> LiveRun:
    """Rebuild a run that an earlier server accepted, or that was held."""
    stored, duty = left.run, None
    if stored.agent_id:
        agent_id, is_detached = AgentId(stored.agent_id), stored.is_detached
        duty = AgentDuty(agent_id, left.path, left.above, is_detached=is_detached)
    asked = RunRequest(
        stored.kind,
        body.prompt,
        tuple(body.attachments),
        left.limits,
        approval=ApprovalPolicy(left.headless, left.approve),
        joins=left.is_letter,
    )
    accepted = asyncio.get_running_loop().create_future()
    return LiveRun(
        id=stored.id,
        session_id=stored.session_id,
        given=stored.run_id_given,
        digest=left.digest,
        provider=stored.provider,
        model=stored.model,
        account=account,
        control=LiveRunControl(asked, state, accepted, stored.seq),
        duty=duty,
        above=left.above,
        reenters=reenters,
        spent=RunSpending(
            stored.steps, stored.prompt_tokens + stored.completion_tokens, stored.cost
        ),
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
        control = run.control
        is_own = control.host in covered or (control.host is None and not control.is_shared)
        if run.waited_for_by in covered and is_own:
            covered[run] = None
    return list(covered)


def below_session(session_id: SessionId, live: Iterable[LiveRun]) -> list[LiveRun]:
    """Return the runs in all sessions below a session."""
    return [run for run in live if session_id in run.above]
