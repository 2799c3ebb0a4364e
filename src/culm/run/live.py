"""A run that has not ended: what was asked, how it stands, and how it is stopped."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from culm.ids import MessageId, RunId, SessionId
from culm.permission.clearance import Consent
from culm.run.limits import Spent
from culm.run.rules import Stop
from culm.wire.agent import Attachment, Prompt
from culm.wire.codec import encode
from culm.wire.config import SelectedModel
from culm.wire.endings import Ending
from culm.wire.messages import Binary, BinaryPart, Part, Text, TextPart
from culm.wire.runs import HEAD_CHARS, Kind, Limits, QueuedPrompt, Settled, State


@dataclass(frozen=True, slots=True)
class Asked:
    """What somebody wants; a prompt, or a summary of the session."""

    kind: Kind = "prompt"
    prompt: str = ""
    attachments: Sequence[Attachment] = ()
    limits: Limits = field(default_factory=Limits)
    model: SelectedModel | None = None  # Instead of the one that is selected, for this run.
    consent: Consent = field(default_factory=Consent)

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


@dataclass(eq=False, slots=True)
class LiveRun:
    """Made by `Runs`, which alone changes it, together with the journal of its turn."""

    id: RunId
    session_id: SessionId
    asked: Asked
    given: bool
    digest: str
    provider: str
    model: str
    state: State
    accepted: asyncio.Future[int | None]  # Its commit: its number, or None if it was known.
    seq: int = 0
    changing: asyncio.Future[None] | None = None  # Its latest change while it waited.
    stop: Stop | None = None
    # The commit of the cancel that covers it; which runs that ended by itself.
    cancelling: asyncio.Future[list[RunId]] | None = None
    task: asyncio.Task[Ending] | None = None
    given_up: asyncio.Future[None] | None = None  # Nobody waits for its task any longer.
    host: "LiveRun | None" = None  # Whose turn it shares.
    reenters: MessageId | None = None  # The open answer of an earlier server it goes on with.
    spent: Spent = field(default_factory=Spent)  # Before, under an earlier server.
    may_park: Callable[[], bool] = field(default=lambda: False)  # It only waits for a person.
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    ending: Ending | None = None  # Once that is durable ...
    left: list[int] = field(default_factory=list[int])  # Processes that did not stop.
    settled: Settled | None = None  # ... and what the cancel that covers it was told.

    @property
    def asked_of(self) -> tuple[object, ...]:
        """The provider and the model it was accepted for, and what its caller lets it do."""
        return self.provider, self.model, self.asked.consent.approve

    @property
    def shown_state(self) -> State:
        """As clients see it."""
        return "waiting" if self.state == "active" and self.may_park() else self.state

    @property
    def kind(self) -> Kind:
        return self.asked.kind

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
        return self.state == "queued" and self.stop is None and self.task is None

    def head(self) -> QueuedPrompt:
        return QueuedPrompt(self.id, self.asked.prompt[:HEAD_CHARS])

    def give_up(self) -> None:
        if self.given_up is not None and not self.given_up.done():
            self.given_up.set_result(None)
