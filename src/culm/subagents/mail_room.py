"""Letters of one workspace: from mailboxes into conversations, and from agents and clients out.

Owns the claimed letters, each until the round that contains it is committed. Each letter gets a run
with the letter's id, which makes processing idempotent: whatever crashes, the letter is admitted
once or remains in its mailbox. The mailboxes themselves belong to `mail/`.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

from msgspec import Struct, field

from culm.clock import Timer, format_time, pause
from culm.errors import AppError, LetterNotFound, NotFound, Unavailable
from culm.files import is_safe_stem
from culm.ids import LetterId, RunId, SessionId
from culm.mail.base import (
    ClaimedLetter,
    Mailbox,
    NoMailbox,
    PostOffice,
    UnsafeAddress,
    check_address,
    has_mailbox,
)
from culm.mail.letters import (
    LETTERS_MAX,
    Letter,
    Sender,
    body_of,
    expires_s_of,
    is_expired,
    shown_of,
    text_of,
    unanswered,
)
from culm.permission.gate import ApprovalPolicy
from culm.run.live_run import AgentDuty, LiveRun, RunRequest
from culm.run.runs import Runs
from culm.run.turn import TurnContext
from culm.services import BlockingCall
from culm.store.base import Tx, together
from culm.store.letters import (
    UnansweredAsk,
    add_letter,
    answer_letter,
    close_letter,
    deleted_mailboxes,
    find_letter,
    forget_deleted_mailbox,
    list_letters,
    unanswered_asks,
)
from culm.store.runs import expire_run, find_run
from culm.store.sessions import find_session
from culm.subagents.starter import AgentCaller
from culm.subagents.tree import AgentTree
from culm.tools.agent_tools import MailRequest
from culm.tools.base import CallResult
from culm.wire.agents import EXTERNAL_PREFIX, LETTERS_SHOWN, PERSON, LetterKind, LetterShown
from culm.wire.codec import Json, printable
from culm.wire.config import SelectedModel
from culm.wire.runs import Limits, Run

log = logging.getLogger(__name__)

SCAN_S = 4.0  # The interval between checks of mailboxes without a notification.
FIRST_CHECK_S = 5.0  # A workspace that is opened for its mail has runs by then.
LAST_ANSWERS_S = 2.0  # Time for replies to answered asks when the workspace closes.
CLAIMS_MAX = 64  # Letters of one mailbox that are claimed and not admitted.
STILL_ASKED_S = 86_400.0  # The sender of an older ask no longer waits for an answer.
ASKS_AT_ONCE = 64  # Unanswered asks of an earlier server, per read from the store.
LATE = "its time was over"
SENDER_CHARS_MAX = 200  # The sender of a handwritten letter may have any name.


class MailRecipient(Struct, frozen=True):
    """The agent whose conversation a letter becomes part of."""

    session_id: SessionId
    address: str  # The address of its only mailbox, whichever id was used to find it.
    model: SelectedModel | None = None
    limits: Limits = field(default_factory=Limits)
    duty: AgentDuty | None = None


class OutgoingMail:
    """Letters that the server delivers: from agents and clients, and replies to asks."""

    def __init__(
        self,
        context: TurnContext,
        agents: AgentTree,
        post: PostOffice,
        blocking: BlockingCall,
        on_delivered: Callable[[str], None],
    ) -> None:
        self._store = context.store
        self._clock = context.clock
        self._ids = context.ids
        self._agents = agents
        self._post = post
        self._blocking = blocking
        self._on_delivered = on_delivered  # Called with the address.
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
        self._on_delivered(to)  # If this is cancelled earlier, the next scan finds the letter.
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


class MailRoom:
    """Incoming letters: from mailboxes into conversations, and the answers to them."""

    def __init__(
        self,
        context: TurnContext,
        runs: Runs,
        agents: AgentTree,
        post: PostOffice,
        blocking: BlockingCall,
        on_busy: Callable[[], None],
    ) -> None:
        self.outbox = OutgoingMail(context, agents, post, blocking, self.check)
        self._store = context.store
        self._clock = context.clock
        self._ids = context.ids
        self._tasks = context.tasks
        self._runs = runs
        self._post = post
        self._blocking = blocking
        self._on_busy = on_busy  # Called when `busy` has changed.
        # Letters in progress, each with the task that follows it and its run.
        self._open: dict[LetterId, tuple[asyncio.Task[None], LiveRun]] = {}
        self._checking: dict[str, asyncio.Task[None]] = {}  # By mailbox.
        self._recheck: set[str] = set()  # Mailboxes with a notification during their check.
        self._deleted: set[str] = set()  # Mailboxes of deleted agents that are still there.
        self._scanning: asyncio.Task[None] | None = None
        self._is_stopped = False

    # --- lifecycle

    async def start(self) -> None:
        """Process all waiting letters, also those claimed by an earlier server; then scan."""
        if left := await self._store.read(deleted_mailboxes):
            # Beside the start, because another process may have locked them.
            self._tasks.create_task(self.forget(left), name="remove mailboxes of deleted agents")
        await self.check_all()
        await self._checked()
        # Not earlier: a reply of the earlier server may be in a mailbox without being stored.
        await self._answer_leftovers()
        await self._checked()
        self._scanning = self._tasks.create_task(self._scan(), name="mail")

    async def drop_late(self) -> None:
        """Expire the runs of late letters, before the runs of an earlier server continue."""
        try:
            for address in await self._blocking(lambda: self._post.addresses(claimed=True)):
                if not address.startswith(EXTERNAL_PREFIX):
                    await self._drop_late(address)
        except (AppError, OSError) as exc:  # The next check logs a warning.
            log.info("cannot find late letters: %s", exc)

    async def _drop_late(self, address: str) -> None:
        claims = await self._blocking(lambda: self._post.open(address).recover())
        for claim in claims:
            if is_expired(claim.letter, self._clock.now_s()):
                await self._store.write(expire_run(RunId(claim.letter.id), self._ids.cancel()))

    async def _checked(self) -> None:
        if self._checking:
            await asyncio.wait(set(self._checking.values()), timeout=FIRST_CHECK_S)

    @property
    def busy(self) -> int:
        """The number of mailboxes being checked plus the number of letters in progress."""
        return len(self._checking) + len(self._open)

    def close(self) -> None:
        """Claim no more letters. Those not admitted stay claimed, for the next server."""
        self._is_stopped = True
        for task in (self._scanning, *self._checking.values()):
            if task is not None:
                task.cancel()

    async def stop(self) -> None:
        """Finish the letters whose runs have ended, and abandon the others. Bounded."""
        for task, run in self._open.values():
            if run.control.ending is None:
                task.cancel()
        if self._open:
            left = {task for task, _ in self._open.values()}
            _, late = await asyncio.wait(left, timeout=LAST_ANSWERS_S)
            for task in late:
                task.cancel()

    async def _scan(self) -> None:
        while True:
            await pause(self._clock, SCAN_S)
            try:
                await self.forget(list(self._deleted))
                await self.check_all()
            except Exception:  # boundary: the next check may succeed
                log.exception("cannot check the mailboxes")

    async def check_all(self) -> None:
        """Start a check of every mailbox that is not empty."""
        try:
            for address in await self._blocking(lambda: self._post.addresses(claimed=True)):
                self.check(address)
        except (AppError, OSError) as exc:  # Includes the timeout of a slow disk.
            log.warning("cannot check the mailboxes: %s", exc)

    def check(self, address: str) -> None:
        """Start a check of one mailbox, after a notification or by the scan."""
        is_ours = not address.startswith(EXTERNAL_PREFIX) and address not in self._deleted
        if not is_ours or self._is_stopped:
            return
        if address in self._checking:
            self._recheck.add(address)  # A letter that arrived after the claim would be missed.
            return
        task = self._tasks.create_task(self._check(address), name=f"mail of {address}")
        self._checking[address] = task
        task.add_done_callback(lambda checked: self._on_checked(address, checked))
        self._on_busy()

    def _on_checked(self, address: str, checked: asyncio.Task[None]) -> None:
        del self._checking[address]
        was_notified = address in self._recheck
        self._recheck.discard(address)
        if was_notified and not checked.cancelled():
            self.check(address)
        self._on_busy()

    async def _check(self, address: str) -> None:
        try:
            mailbox = await self._blocking(lambda: self._post.open(address))
            claims = await self._blocking(mailbox.recover)
            if not await self._process_all(address, claims):
                return
            # Letters with a held run, for a person to start or drop, do not count.
            room = CLAIMS_MAX - sum(claim.letter.id in self._open for claim in claims)
            if room > 0:
                claims = await self._blocking(lambda: mailbox.claim(room))
                await self._process_all(address, claims)
        except NoMailbox:
            pass  # It never existed, or was removed meanwhile.
        except (AppError, OSError) as exc:
            log.warning("cannot read the mailbox of %s: %s", address, exc)
        except Exception:  # boundary: one mailbox must not block the others
            log.exception("cannot read the mailbox of %s", address)

    # --- processing a letter

    async def _process_all(self, address: str, claims: Sequence[ClaimedLetter]) -> bool:
        """Process letters in order; False if there is no room. Raises `AppError`, OSError."""
        recipient = await self.outbox.find_recipient(address) if claims else None
        for index, claim in enumerate(claims):
            if claim.letter.id in self._open or await self._try_process(address, claim, recipient):
                continue
            # The later letters go back, too, so that they do not overtake this one.
            await self._put_back(address, claims[index:])
            return False
        return True

    async def _put_back(self, address: str, claims: Sequence[ClaimedLetter]) -> None:
        left = [one for one in claims if one.letter.id not in self._open]
        await self._on(address, lambda box: [box.put_back(one) for one in left])

    async def _try_process(
        self, address: str, claim: ClaimedLetter, recipient: MailRecipient | None
    ) -> bool:
        """Process one letter and contain its errors; False if there is no room for it now."""
        try:
            return await self._process(address, claim, recipient)
        except (Unavailable, TimeoutError):
            raise  # The store or the disk failed: this letter and the later ones are retried.
        except (AppError, OSError) as exc:
            log.warning("letter %s to %s: %s", claim.letter.id, address, exc)
        except Exception:  # boundary: one letter must not block the others
            log.exception("cannot process letter %s to %s", claim.letter.id, address)
            await self._give_up(address, claim, "the server failed to process it")
        return True

    async def _give_up(self, address: str, claim: ClaimedLetter, why: str) -> None:
        """Close a letter that will not be read."""
        await self._store.write(close_letter(claim.letter.id, expired=False))
        await self._decline(address, claim, why)

    async def _process(
        self, address: str, claim: ClaimedLetter, recipient: MailRecipient | None
    ) -> bool:
        """Start a letter's run, or finish the letter; False if there is no room for it now."""
        letter = claim.letter
        stored = await self._store.read(find_run(letter.id))
        if _is_held(stored, recipient):
            return True  # For a person to start or drop.
        if not await self._owns_id(letter, address, recipient, stored):
            log.warning("letter %s to %s has an id that is already in use", letter.id, address)
            await self._decline(address, claim, "its id is already in use", is_answer=False)
            return True
        shown = await self._store.read(find_letter(letter.id))
        # Once closed it stays closed, even if the time of day was set back since.
        is_closed = shown is not None and shown.state in ("expired", "dead")
        is_late = is_closed or is_expired(letter, self._clock.now_s())
        if stored is None and (recipient is None or is_late):
            await self._store.write(close_letter(letter.id, expired=recipient is not None))
            why = "there is no such agent" if recipient is None else LATE
            await self._decline(address, claim, why)
            return True
        if stored is not None and stored.state == "ended":  # Probably under an earlier server.
            await self._finish(address, claim)
            return True
        run = self._runs.find(letter.id)
        if run is None and stored is None and recipient is not None:
            run = await self._accept(letter, recipient)
            if run is None:
                return False
        if run is not None:
            self._track(address, claim, run)
        return True

    def _track(self, address: str, claim: ClaimedLetter, run: LiveRun) -> None:
        def on_done(_: object) -> None:
            del self._open[claim.letter.id]
            self._on_busy()

        task = self._tasks.create_task(
            self._follow(address, claim, run), name=f"letter {claim.letter.id}"
        )
        self._open[claim.letter.id] = task, run
        task.add_done_callback(on_done)

    async def _owns_id(
        self, letter: Letter, address: str, recipient: MailRecipient | None, stored: Run | None
    ) -> bool:
        """Check that any run or stored letter with this id is this letter's; store the letter."""
        session_id = "" if recipient is None else recipient.session_id
        live = self._runs.find(letter.id)
        known_runs = [run.session_id for run in (stored, live) if run is not None]
        if any(known != session_id for known in known_runs):
            return False
        to = address if recipient is None else recipient.address
        await self._store.write(_note(shown_of(letter, to)))
        shown = await self._store.read(find_letter(letter.id))
        return shown is not None and shown.to == to

    async def _accept(self, letter: Letter, recipient: MailRecipient) -> LiveRun | None:
        """Start the letter's run; None if there is no room for it now."""
        text = letter_text(letter)
        # A person's approvals for a prompt of their own do not apply to letters.
        request = RunRequest(
            prompt=text,
            limits=recipient.limits,
            model=recipient.model,
            approval=ApprovalPolicy(headless=True),
            joins=True,
        )
        digest = hashlib.sha256(text.encode()).hexdigest()
        try:
            run = self._runs.accept(
                recipient.session_id,
                request,
                run_id=RunId(letter.id),
                given=False,
                digest=digest,
                duty=recipient.duty,
            )
            await asyncio.shield(run.control.accepted)
        except AppError as exc:
            log.info("letter %s waits: %s", letter.id, exc.message)
            return None
        return run

    async def _follow(self, address: str, claim: ClaimedLetter, run: LiveRun) -> None:
        """Acknowledge a letter when it is admitted; answer an unanswered ask when its run ends."""
        letter = claim.letter
        late = self._expire_in_time(letter, run)
        try:
            await run.control.admitted.wait()
            await self._finish(address, claim)
            self.check(address)  # There is room for another letter.
            if letter.kind == "ask" and run.control.was_admitted:
                await run.control.ended.wait()
                await self._answer(letter, address, run)
        except NoMailbox:
            log.info("no mailbox for the answer to letter %s", letter.id)
        except (AppError, OSError) as exc:
            log.warning("letter %s: %s", letter.id, exc)
        except Exception:  # boundary: one letter must not end the workspace
            log.exception("cannot finish letter %s", letter.id)
        finally:
            if late is not None:
                late.cancel()

    def _expire_in_time(self, letter: Letter, run: LiveRun) -> Timer | None:
        if (at_s := expires_s_of(letter)) is None:
            return None
        left_s = max(0.0, at_s - self._clock.now_s())
        return self._clock.call_later(left_s, lambda: self._expire(letter, run))

    def _expire(self, letter: Letter, run: LiveRun) -> None:
        """Cancel an expired letter's run, unless it is being read or was sent to a worker."""
        if run.is_waiting:
            # First: a letter would become dead if its run were cancelled.
            self._runs.cancel_run(run, first=close_letter(letter.id, expired=True))

    async def _finish(self, address: str, claim: ClaimedLetter) -> None:
        """Acknowledge an admitted letter; decline one whose run was cancelled before it began."""
        await self._store.write(close_letter(claim.letter.id, expired=False))
        shown = await self._store.read(find_letter(claim.letter.id))
        if shown is not None and shown.state in ("admitted", "answered"):
            await self._on(address, lambda box: box.ack(claim))
            return
        is_late = shown is not None and shown.state == "expired"
        why = LATE if is_late else "it was cancelled before it was read"
        await self._decline(address, claim, why)

    async def _decline(
        self, address: str, claim: ClaimedLetter, why: str, *, is_answer: bool = True
    ) -> None:
        """Bury a letter. Its ask is answered first, because a buried letter is not seen again."""
        await self.outbox.decline(claim.letter, address, why, is_answer=is_answer)
        await self._on(address, lambda box: box.bury(claim))

    async def _answer(self, letter: Letter, address: str, run: LiveRun) -> None:
        """Reply to an ask, if its sender has a mailbox, with the answer or the reason for none."""
        if letter.from_.agent_id is None:
            return  # A person reads the answer in the conversation.
        shown = await self._store.read(find_letter(letter.id))
        if run.control.ending is None or (shown is not None and shown.state == "answered"):
            return
        answer = (run.control.host or run).control.answer.strip()
        content: str | dict[str, Json] = answer
        if run.control.ending.outcome not in ("end_turn", "max_tokens") or not answer:
            content = unanswered(f"the run ended {run.control.ending.outcome}. {answer}".strip())
        sender = Sender(session_id=run.session_id, agent_id=address)
        await self.outbox.reply(letter.id, letter.from_.agent_id, content, sender)

    async def _answer_leftovers(self) -> None:
        """Reply to the asks that an earlier server could not answer."""
        since = int(self._clock.now_s() - STILL_ASKED_S)
        left: list[UnansweredAsk] = []
        unreachable: set[str] = set()  # Wait only once for a locked mailbox.
        try:
            while left := await self._store.read(
                unanswered_asks(since, left[-1].no if left else 0, ASKS_AT_ONCE)
            ):
                for ask in left:
                    if ask.letter.letter_id in self._open or ask.letter.from_ in unreachable:
                        continue
                    if not await self._answer_late(ask):
                        unreachable.add(ask.letter.from_)
        except (AppError, OSError) as exc:
            log.warning("cannot answer the asks of an earlier server: %s", exc)

    async def _answer_late(self, ask: UnansweredAsk) -> bool:
        letter = ask.letter
        sender = Sender(session_id=letter.to, agent_id=letter.to)
        body = unanswered(
            f"the server ended meanwhile; the run ended {ask.outcome}, and its answer is in the"
            f" conversation of {letter.to}."
        )
        try:
            await self.outbox.reply(letter.letter_id, letter.from_, body, sender)
        except (AppError, OSError) as exc:
            log.info("cannot reply to letter %s: %s", letter.letter_id, exc)
            return False
        return True

    async def _on(self, address: str, do: Callable[[Mailbox], object]) -> None:
        await self._blocking(lambda: do(self._post.open(address)))

    async def forget(self, addresses: Sequence[str]) -> None:
        """Remove the mailboxes of deleted agents; decline the asks in them.

        The scan tries again what fails, and the next start what a crash interrupts.
        """
        for address in addresses:
            try:
                left = await self._blocking(lambda address=address: self._empty(address))
                for letter in left:
                    await self.outbox.decline(letter, address, "its agent was deleted")
                await asyncio.shield(self._store.write(forget_deleted_mailbox(address)))
                self._deleted.discard(address)
            except (AppError, OSError) as exc:
                if address not in self._deleted:
                    log.warning("cannot remove the mailbox of %s yet: %s", address, exc)
                self._deleted.add(address)

    def _empty(self, address: str) -> list[Letter]:
        """Remove a mailbox and return the letters that were in it."""
        try:
            mailbox = self._post.open(address)
            claims = [*mailbox.recover(), *mailbox.claim(LETTERS_MAX)]
        except (NoMailbox, UnsafeAddress):  # No mailbox has an unsafe address.
            return []
        self._post.remove(address)
        return [claim.letter for claim in claims]


def _is_held(stored: Run | None, recipient: MailRecipient | None) -> bool:
    """Return True if the run of a letter is held."""
    if stored is None or recipient is None or stored.state != "held":
        return False
    return stored.session_id == recipient.session_id


def _note(shown: LetterShown) -> Callable[[Tx], None]:
    """Store a letter found in a mailbox; a reply may have been sent without the server."""
    answers = None
    if shown.kind == "reply" and shown.correlation_id:
        answers = answer_letter(shown.correlation_id, LetterId(shown.letter_id), by=shown.from_)
    return together(add_letter(shown, run_id=shown.letter_id), answers)


def letter_text(letter: Letter) -> str:
    """Format a letter as the prompt for its recipient."""
    sender = printable(letter.from_.agent_id or letter.from_.session_id)[:SENDER_CHARS_MAX]
    role = f", {printable(letter.from_.role)[:SENDER_CHARS_MAX]}" if letter.from_.role else ""
    match letter.kind:
        case "ask":
            head = f"[Letter {letter.id} from {sender}{role} asks you; answer it]"
        case "reply":
            head = f"[Letter {letter.id} from {sender}{role} answers your {letter.correlation_id}]"
        case "task" | "handoff":
            head = f"[Letter {letter.id} from {sender}{role}: a {letter.kind}]"
    return f"{head}\n{text_of(letter)}"
