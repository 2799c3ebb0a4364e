"""Letters that the server delivers: from agents and clients, and replies to asks.

Owns the recipients, their addresses, and the stored state of letters. Incoming letters belong to
`mail_room.py`, mailboxes to `mail/`.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from culm.clock import Clock, format_time
from culm.errors import AppError, LetterNotFound, NotFound
from culm.files import is_safe_stem
from culm.ids import Ids, SessionId
from culm.mail.base import NoMailbox, PostOffice, check_address, has_mailbox
from culm.mail.letters import Letter, Sender, body_of, shown_of, unanswered
from culm.run.live_run import AgentDuty
from culm.store.base import together
from culm.store.letters import add_letter, answer_letter, find_letter, list_letters
from culm.store.sessions import find_session
from culm.store.store import Store
from culm.subagents.services import BlockingCall
from culm.subagents.starter import AgentCaller
from culm.subagents.tree import AgentTree
from culm.tools.agent_tools import MailRequest
from culm.tools.base import CallResult
from culm.wire.agents import EXTERNAL_PREFIX, LETTERS_SHOWN, PERSON, LetterKind, LetterShown
from culm.wire.codec import Json
from culm.wire.config import SelectedModel
from culm.wire.runs import Limits

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MailRecipient:
    """The agent whose conversation a letter becomes part of."""

    session_id: SessionId
    address: str  # The address of its only mailbox, whichever id was used to find it.
    model: SelectedModel | None = None
    limits: Limits = field(default_factory=Limits)
    duty: AgentDuty | None = None


class OutgoingMail:
    def __init__(
        self,
        post: PostOffice,
        agents: AgentTree,
        store: Store,
        clock: Clock,
        ids: Ids,
        blocking: BlockingCall,
    ) -> None:
        self.on_delivered: Callable[[str], None] = _ignore  # Called with the address.
        self._post = post
        self._agents = agents
        self._store = store
        self._clock = clock
        self._ids = ids
        self._blocking = blocking
        # By mailbox, during deliveries.
        self._delivering: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # --- recipients and senders

    async def find_recipient(self, address: str) -> MailRecipient | None:
        """Find an agent by its id or its session's, or the agent of a session of people."""
        if not is_safe_stem(address):
            return None
        if (found := await self._agents.find_duty(address)) is not None:
            agent, duty = found
            return MailRecipient(
                agent.session_id, agent.agent_id, agent.selected, agent.budget, duty
            )
        session = await self._store.read(find_session(address))
        return None if session is None else MailRecipient(session.id, session.id)

    async def _address_of(self, to: str) -> str:
        """Resolve the address of a mailbox; raises `NoMailbox`."""
        if (recipient := await self.find_recipient(to)) is not None:
            return recipient.address
        if not await self._is_outside(to):
            raise NoMailbox(to)
        return to

    async def sender_of(self, from_: str) -> Sender:
        """Resolve the sender of a client's letter; a person if empty. Raises `NotFound`."""
        if not from_:
            return Sender(session_id=PERSON)
        check_address(from_)
        recipient = await self.find_recipient(from_)
        if recipient is not None:
            return Sender(session_id=recipient.address, agent_id=recipient.address)
        if from_.startswith(EXTERNAL_PREFIX) and await self._is_outside(from_):
            return Sender(session_id=from_, agent_id=from_)
        raise NotFound(
            f"from: no agent or session with the id {from_} in this project",
            hint="use the id of an agent, a session or a mailbox that begins with "
            f"{EXTERNAL_PREFIX}",
        )

    async def _is_outside(self, address: str) -> bool:
        """Check for a mailbox that an external program created for replies."""
        return await self._blocking(lambda: has_mailbox(self._post, address))

    # --- sending

    async def send(
        self,
        to: str,
        kind: LetterKind,
        content: str | dict[str, Json],
        sender: Sender,
        *,
        correlation_id: str | None = None,
        is_answer: bool = True,
        expires_s: float = 0,
    ) -> LetterShown:
        """Deliver a letter with a text or a body; it survives a crash once this returns.

        With `is_answer` it is stored as the answer to the correlated letter. Raises `AppError`.
        """
        to = await self._address_of(to)
        now_s = self._clock.now_s()
        letter = Letter(
            id=self._ids.letter(),
            from_=sender,
            kind=kind,
            body=body_of(kind, content) if isinstance(content, str) else content,
            created_at=format_time(now_s),
            correlation_id=correlation_id,
            expires_at=format_time(now_s + expires_s) if expires_s else None,
        )
        # One at a time per mailbox: a locked mailbox then blocks only one thread.
        async with self._delivering.setdefault(to, asyncio.Lock()):
            await self._blocking(lambda: self._post.make(to).deliver(letter))
        answers = None
        if correlation_id is not None and is_answer:
            answers = answer_letter(correlation_id, letter.id)
        noted = together(add_letter(shown_of(letter, to), run_id=letter.id), answers)
        try:
            await asyncio.shield(self._store.write(noted))
            shown = await self.get(letter.id)
        except AppError as exc:  # It is delivered anyway, and will be stored when it is read.
            log.info("letter %s is delivered but not stored: %s", letter.id, exc.message)
            shown = shown_of(letter, to)
        self.on_delivered(to)  # If this is cancelled earlier, the next scan finds the letter.
        return shown

    async def reply(
        self, letter_id: str, to: str, content: str | dict[str, Json], sender: Sender
    ) -> LetterShown:
        """Answer a letter; the reply is correlated with the letter's id."""
        return await self.send(to, "reply", content, sender, correlation_id=letter_id)

    async def decline(
        self, letter: Letter, address: str, why: str, *, is_answer: bool = True
    ) -> None:
        """Reply to an ask that will not be read; other letters get no reply."""
        if letter.kind == "ask" and letter.from_.agent_id is not None:
            sender = Sender(session_id=address, agent_id=address)
            try:
                await self.send(
                    letter.from_.agent_id,
                    "reply",
                    unanswered(f"{why}."),
                    sender,
                    correlation_id=letter.id,
                    is_answer=is_answer,
                )
            except (AppError, OSError) as exc:
                log.info("cannot reply to letter %s: %s", letter.id, exc)

    async def serve(self, caller: AgentCaller, request: MailRequest) -> CallResult:
        """Handle a mail request of an agent; raises `AppError`."""
        sender = Sender(session_id=caller.session_id, agent_id=caller.agent_id)
        match request.action:
            case "send":
                sent = await self.send(request.to, request.kind, request.text, sender)
                text = f"Letter {sent.letter_id} is in the mailbox of {sent.to}."
                if request.kind == "ask":
                    text += " The answer comes as a letter to you."
                return CallResult(text)
            case "reply":
                letter = await self.get(request.letter)
                if letter.to != caller.agent_id:
                    raise LetterNotFound(request.letter)
                sent = await self.reply(letter.letter_id, letter.from_, request.text, sender)
                return CallResult(f"Letter {letter.letter_id} is answered by {sent.letter_id}.")
            case "status":
                letter = await self.get(request.letter)
                if caller.agent_id not in (letter.from_, letter.to):
                    raise LetterNotFound(request.letter)
                answer = f", by letter {letter.answer_id}" if letter.answer_id else ""
                return CallResult(
                    f"Letter {letter.letter_id} to {letter.to}: {letter.state}{answer}."
                )

    # --- queries

    async def get(self, letter_id: str) -> LetterShown:
        shown = await self._store.read(find_letter(letter_id))
        if shown is None:
            raise LetterNotFound(letter_id)
        return shown

    async def list(self, agent_id: str = "") -> list[LetterShown]:
        return await self._store.read(list_letters(agent_id, LETTERS_SHOWN))


def _ignore(address: str) -> None:
    pass
