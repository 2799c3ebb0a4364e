"""Letters that the server delivers: of agents, of clients, and the replies to what was asked.

Owns who can be written to and under which address, and what is known of a letter. What lies in
a mailbox is brought by `mail.py`; mailboxes are `fleet/mailbox/`'s.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from culm.clock import Clock
from culm.errors import AppError, LetterNotFound, NotFound
from culm.fleet.names import is_safe_stem
from culm.fleet.times import format_time
from culm.ids import Ids, SessionId
from culm.mail.base import NoMailbox, PostOffice, check_address, has_mailbox
from culm.mail.letters import Letter, Sender, body_of, shown_of, unanswered
from culm.run.live_run import AgentDuty
from culm.store.base import together
from culm.store.letters import add_letter, answer_letter, find_letter, list_letters
from culm.store.sessions import find_session
from culm.store.store import Store
from culm.subagents.means import BlockingCall
from culm.subagents.starter import AgentCaller
from culm.subagents.tree import AgentTree
from culm.tools.agent_requests import MailRequest
from culm.tools.base import CallResult
from culm.wire.agents import LETTERS_SHOWN, OUTSIDE, PERSON, LetterKind, LetterShown
from culm.wire.codec import Json
from culm.wire.config import SelectedModel
from culm.wire.runs import Limits

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MailRecipient:
    """Whose conversation a letter becomes part of."""

    session_id: SessionId
    address: str  # The one mailbox it has, whatever it was called.
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
        self.on_delivered: Callable[[str], None] = _ignore  # Told the address.
        self._post = post
        self._agents = agents
        self._store = store
        self._clock = clock
        self._ids = ids
        self._blocking = blocking
        # By mailbox, while somebody delivers.
        self._delivering: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # --- who can be written to

    async def find_recipient(self, address: str) -> MailRecipient | None:
        """An agent by its id or its session's, or the agent of a session that people began."""
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
        """Whose mailbox it is; raises `NoMailbox`."""
        if (recipient := await self.find_recipient(to)) is not None:
            return recipient.address
        if not await self._is_outside(to):
            raise NoMailbox(to)
        return to

    async def sender_of(self, from_: str) -> Sender:
        """Whom a client writes as: nobody named is a person. Raises `NotFound`."""
        if not from_:
            return Sender(session_id=PERSON)
        check_address(from_)
        recipient = await self.find_recipient(from_)
        if recipient is not None:
            return Sender(session_id=recipient.address, agent_id=recipient.address)
        if from_.startswith(OUTSIDE) and await self._is_outside(from_):
            return Sender(session_id=from_, agent_id=from_)
        raise NotFound(
            f"from: nobody of this project has the id {from_}",
            hint=f"name an agent, a session or a mailbox that begins with {OUTSIDE}, or nobody",
        )

    async def _is_outside(self, address: str) -> bool:
        """A program there may have made a mailbox, to be answered in."""
        return await self._blocking(lambda: has_mailbox(self._post, address))

    # --- sending

    async def send(
        self,
        to: str,
        kind: LetterKind,
        said: str | dict[str, Json],
        sender: Sender,
        *,
        correlation_id: str | None = None,
        is_answer: bool = True,
        expires_s: float = 0,
    ) -> LetterShown:
        """Deliver a letter that says something; when this returns it survives a crash.

        It counts as the answer to what it is correlated with, unless that is another's letter.
        Raises `AppError`.
        """
        to = await self._address_of(to)
        now_s = self._clock.now_s()
        letter = Letter(
            id=self._ids.letter(),
            from_=sender,
            kind=kind,
            body=body_of(kind, said) if isinstance(said, str) else said,
            created_at=format_time(now_s),
            correlation_id=correlation_id,
            expires_at=format_time(now_s + expires_s) if expires_s else None,
        )
        # One at a time: a mailbox that somebody has locked holds up one thread, and nobody else.
        async with self._delivering.setdefault(to, asyncio.Lock()):
            await self._blocking(lambda: self._post.make(to).deliver(letter))
        answers = None
        if correlation_id is not None and is_answer:
            answers = answer_letter(correlation_id, letter.id)
        noted = together(add_letter(shown_of(letter, to), run_id=letter.id), answers)
        try:
            await asyncio.shield(self._store.write(noted))
            shown = await self.get(letter.id)
        except AppError as exc:  # It is safe all the same, and will be noted when it is read.
            log.info("letter %s is delivered, and not noted: %s", letter.id, exc.message)
            shown = shown_of(letter, to)
        self.on_delivered(to)  # Of a sender that has left the next scan finds it.
        return shown

    async def reply(
        self, letter_id: str, to: str, said: str | dict[str, Json], sender: Sender
    ) -> LetterShown:
        """Answer a letter; whoever wrote it finds the reply by its id."""
        return await self.send(to, "reply", said, sender, correlation_id=letter_id)

    async def decline(
        self, letter: Letter, address: str, why: str, *, is_answer: bool = True
    ) -> None:
        """Who asks is told that nobody will read it."""
        if letter.kind == "ask" and letter.from_.agent_id is not None:
            sender = Sender(session_id=address, agent_id=address)
            words = unanswered(f"{why}.")
            try:
                await self.send(
                    letter.from_.agent_id,
                    "reply",
                    words,
                    sender,
                    correlation_id=letter.id,
                    is_answer=is_answer,
                )
            except (AppError, OSError) as exc:
                log.info("nobody hears of letter %s: %s", letter.id, exc)

    async def serve(self, caller: AgentCaller, request: MailRequest) -> CallResult:
        """What an agent wants of the mail; raises `AppError`."""
        sender = Sender(session_id=caller.session_id, agent_id=caller.agent_id)
        match request.action:
            case "send":
                sent = await self.send(request.to, request.kind, request.text, sender)
                words = f"Letter {sent.letter_id} is in the mailbox of {sent.to}."
                if request.kind == "ask":
                    words += " The answer comes as a letter to you."
                return CallResult(words)
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

    # --- looking

    async def get(self, letter_id: str) -> LetterShown:
        shown = await self._store.read(find_letter(letter_id))
        if shown is None:
            raise LetterNotFound(letter_id)
        return shown

    async def list(self, agent_id: str = "") -> list[LetterShown]:
        return await self._store.read(list_letters(agent_id, LETTERS_SHOWN))


def _ignore(address: str) -> None:
    pass
