"""Letters of one workspace: out of mailboxes into conversations, and the answers to them.

Owns the letters it has claimed, each until the round that contains it is committed. A letter is
brought by a run that has its id, so to bring it twice is to bring it once: whatever crashes in
between, it is admitted once or lies in its mailbox. What is sent is `outbox.py`'s.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence

from culm.clock import Clock, Timer, pause
from culm.errors import AppError, Unavailable
from culm.fleet.names import is_safe_stem
from culm.ids import Ids, LetterId, RunId
from culm.mail.base import ClaimedLetter, Mailbox, NoMailbox, PostOffice
from culm.mail.letters import (
    Letter,
    Sender,
    expires_s_of,
    is_expired,
    shown_of,
    text_of,
    unanswered,
)
from culm.mail.order import LETTERS_MAX
from culm.permission.gate import ApprovalPolicy
from culm.run.live_run import LiveRun, RunRequest
from culm.run.runs import Runs
from culm.store.base import Tx, together
from culm.store.late import expire_run
from culm.store.letters import (
    UnansweredAsk,
    add_letter,
    answer_letter,
    close_letter,
    find_letter,
    unanswered_asks,
)
from culm.store.runs import find_run
from culm.store.store import Store
from culm.subagents.means import BlockingCall
from culm.subagents.outgoing_mail import MailRecipient, OutgoingMail
from culm.wire.agents import OUTSIDE, LetterShown
from culm.wire.codec import Json, printable
from culm.wire.runs import Run

log = logging.getLogger(__name__)

SCAN_S = 4.0  # As often as mailboxes are looked at, if nobody rings.
FIRST_LOOK_S = 5.0  # A workspace that is opened for its mail has runs by then.
LAST_ANSWERS_S = 2.0  # For replies to what was answered when the workspace closes.
CLAIMS_MAX = 64  # Letters of one mailbox that are brought and not admitted.
STILL_ASKED_S = 86_400.0  # Whoever asked longer ago waits no more.
ASKS_AT_ONCE = 64  # Of those that an earlier server left, read from the store together.
LATE = "its time was over"
SENDER_CHARS_MAX = 200  # Whoever writes a letter by hand may call itself anything.


class MailRoom:
    def __init__(
        self,
        post: PostOffice,
        outbox: OutgoingMail,
        runs: Runs,
        store: Store,
        clock: Clock,
        ids: Ids,
        tasks: asyncio.TaskGroup,
        blocking: BlockingCall,
    ) -> None:
        self.on_busy: Callable[[], None] = _ignore  # `busy` has changed.
        self._post = post
        self._outbox = outbox
        outbox.on_delivered = self.check
        self._runs = runs
        self._store = store
        self._clock = clock
        self._ids = ids
        self._tasks = tasks
        self._blocking = blocking
        # Brought, and not settled; with the run that brings it.
        self._held: dict[LetterId, tuple[asyncio.Task[None], LiveRun]] = {}
        self._looking: dict[str, asyncio.Task[None]] = {}  # By mailbox.
        self._again: set[str] = set()  # Of those, where somebody rang meanwhile.
        self._scanning: asyncio.Task[None] | None = None
        self._is_stopped = False

    # --- life

    async def start(self) -> None:
        """Bring what lies there, also what an earlier server had claimed; look from now on."""
        await self.check_all()
        await self._looked()
        # Not before: the reply of an earlier server may lie there, and not be noted.
        await self._answer_left()
        await self._looked()
        self._scanning = self._tasks.create_task(self._scan(), name="mail")

    async def drop_late(self) -> None:
        """Before the runs go on that an earlier server accepted: for late letters none does."""
        try:
            for address in await self._blocking(lambda: self._post.addresses(claimed=True)):
                if not address.startswith(OUTSIDE):
                    await self._drop_late(address)
        except (AppError, OSError) as exc:  # Whoever looks for letters next says more.
            log.info("nobody knows which letters are late: %s", exc)

    async def _drop_late(self, address: str) -> None:
        claims = await self._blocking(lambda: self._post.open(address).recover())
        for claim in claims:
            if is_expired(claim.letter, self._clock.now_s()):
                await self._store.write(expire_run(RunId(claim.letter.id), self._ids.cancel()))

    async def _looked(self) -> None:
        if self._looking:
            await asyncio.wait(set(self._looking.values()), timeout=FIRST_LOOK_S)

    @property
    def busy(self) -> int:
        """How many mailboxes are being looked at, and letters not settled."""
        return len(self._looking) + len(self._held)

    def close(self) -> None:
        """Bring nothing more. What is not admitted stays claimed, for the next server."""
        self._is_stopped = True
        for task in (self._scanning, *self._looking.values()):
            if task is not None:
                task.cancel()

    async def stop(self) -> None:
        """The runs have ended, or are left behind: see through what ended. Bounded."""
        for task, run in self._held.values():
            if run.ending is None:
                task.cancel()
        if self._held:
            left = {task for task, _ in self._held.values()}
            _, late = await asyncio.wait(left, timeout=LAST_ANSWERS_S)
            for task in late:
                task.cancel()

    async def _scan(self) -> None:
        while True:
            await pause(self._clock, SCAN_S)
            try:
                await self.check_all()
            except Exception:  # boundary: the next look may be better
                log.exception("mailboxes cannot be looked at")

    async def check_all(self) -> None:
        """Bring what lies in any mailbox."""
        try:
            for address in await self._blocking(lambda: self._post.addresses(claimed=True)):
                self.check(address)
        except (AppError, OSError) as exc:  # A disk that does not answer in time is one.
            log.warning("mailboxes cannot be looked at: %s", exc)

    def check(self, address: str) -> None:
        """Bring what lies in a mailbox; somebody rang, or it is time."""
        if address.startswith(OUTSIDE) or self._is_stopped:
            return
        if address in self._looking:
            self._again.add(address)  # What came after it was claimed from would be missed.
            return
        task = self._tasks.create_task(self._check(address), name=f"mail of {address}")
        self._looking[address] = task
        task.add_done_callback(lambda looked: self._on_looked(address, looked))
        self.on_busy()

    def _on_looked(self, address: str, looked: asyncio.Task[None]) -> None:
        del self._looking[address]
        was_rung = address in self._again
        self._again.discard(address)
        if was_rung and not looked.cancelled():
            self.check(address)
        self.on_busy()

    async def _check(self, address: str) -> None:
        try:
            mailbox = await self._blocking(lambda: self._post.open(address))
            claims = await self._blocking(mailbox.recover)
            if not await self._bring(address, claims):
                return
            # What rests for a person to start or drop takes nobody's room.
            room = CLAIMS_MAX - sum(claim.letter.id in self._held for claim in claims)
            if room > 0:
                await self._bring(address, await self._blocking(lambda: mailbox.claim(room)))
        except NoMailbox:
            pass  # It never was, or was removed meanwhile.
        except (AppError, OSError) as exc:
            log.warning("the mailbox of %s cannot be read: %s", address, exc)
        except Exception:  # boundary: one mailbox must not keep the others from being read
            log.exception("the mailbox of %s cannot be read", address)

    # --- bringing a letter

    async def _bring(self, address: str, claims: Sequence[ClaimedLetter]) -> bool:
        """Each in its order; False if there is no room. Raises `AppError`, OSError."""
        recipient = await self._outbox.find_recipient(address) if claims else None
        for place, claim in enumerate(claims):
            if claim.letter.id in self._held or await self._is_taken(address, claim, recipient):
                continue
            # Those behind it would overtake it.
            await self._put_back(address, claims[place:])
            return False
        return True

    async def _put_back(self, address: str, claims: Sequence[ClaimedLetter]) -> None:
        left = [one for one in claims if one.letter.id not in self._held]
        await self._on(address, lambda box: [box.put_back(one) for one in left])

    async def _is_taken(
        self, address: str, claim: ClaimedLetter, recipient: MailRecipient | None
    ) -> bool:
        """Take one; False if there is no room for it now."""
        try:
            return await self._take(address, claim, recipient)
        except (Unavailable, TimeoutError):
            raise  # Of the store, or the disk: it is tried again, with those behind it.
        except (AppError, OSError) as exc:
            log.warning("letter %s to %s: %s", claim.letter.id, address, exc)
        except Exception:  # boundary: one letter must not keep the others from being read
            log.exception("letter %s to %s cannot be brought", claim.letter.id, address)
            await self._give_up(address, claim, "the server failed at it")
        return True

    async def _give_up(self, address: str, claim: ClaimedLetter, why: str) -> None:
        """Nobody will read it."""
        await self._store.write(close_letter(claim.letter.id, expired=False))
        await self._decline(address, claim, why)

    async def _take(
        self, address: str, claim: ClaimedLetter, recipient: MailRecipient | None
    ) -> bool:
        """Bring it, or put it away; False if there is no room for it now."""
        letter = claim.letter
        stored = await self._store.read(find_run(letter.id))
        if _is_at_rest(stored, recipient):
            return True  # For a person to start or drop.
        if not await self._is_its_own(letter, address, recipient, stored):
            log.warning("letter %s to %s has the id of something else", letter.id, address)
            await self._decline(address, claim, "its id is another's", is_answer=False)
            return True
        is_late = is_expired(letter, self._clock.now_s())
        if stored is None and (recipient is None or is_late):
            await self._store.write(close_letter(letter.id, expired=recipient is not None))
            why = "there is no such agent" if recipient is None else LATE
            await self._decline(address, claim, why)
            return True
        if stored is not None and stored.state == "ended":  # Under an earlier server, it seems.
            await self._put_away(address, claim)
            return True
        run = self._runs.find(letter.id)
        if run is None and stored is None and recipient is not None:
            run = await self._accept(letter, recipient)
            if run is None:
                return False
        if run is not None:
            self._hold(address, claim, run)
        return True

    def _hold(self, address: str, claim: ClaimedLetter, run: LiveRun) -> None:
        def settled(_: object) -> None:
            del self._held[claim.letter.id]
            self.on_busy()

        task = self._tasks.create_task(
            self._see_through(address, claim, run), name=f"letter {claim.letter.id}"
        )
        self._held[claim.letter.id] = task, run
        task.add_done_callback(settled)

    async def _is_its_own(
        self, letter: Letter, address: str, recipient: MailRecipient | None, stored: Run | None
    ) -> bool:
        """Whether what is known by its id, a letter or a run, is this letter's. Notes it then."""
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
        """The run that brings it; None if there is no room for it now."""
        words = letter_text(letter)
        # What a person allowed for her own prompt is not for whoever writes letters.
        asked = RunRequest(
            prompt=words,
            limits=recipient.limits,
            model=recipient.model,
            approval=ApprovalPolicy(headless=True),
            joins=True,
        )
        digest = hashlib.sha256(words.encode()).hexdigest()
        try:
            run = self._runs.accept(
                recipient.session_id,
                asked,
                run_id=RunId(letter.id),
                given=False,
                digest=digest,
                duty=recipient.duty,
            )
            await asyncio.shield(run.accepted)
        except AppError as exc:
            log.info("letter %s waits: %s", letter.id, exc.message)
            return None
        return run

    async def _see_through(self, address: str, claim: ClaimedLetter, run: LiveRun) -> None:
        """Acknowledge it when it is read; answer it when that is done and nobody has."""
        letter = claim.letter
        late = self._expire_in_time(letter, run)
        try:
            await run.admitted.wait()
            await self._put_away(address, claim)
            self.check(address)  # There is room for another.
            if letter.kind == "ask" and run.was_admitted:
                await run.ended.wait()
                await self._answer(letter, address, run)
        except NoMailbox:
            log.info("nobody waits for the answer to letter %s", letter.id)
        except (AppError, OSError) as exc:
            log.warning("letter %s: %s", letter.id, exc)
        except Exception:  # boundary: one letter must not end the workspace
            log.exception("letter %s cannot be seen through", letter.id)
        finally:
            if late is not None:
                late.cancel()

    def _expire_in_time(self, letter: Letter, run: LiveRun) -> Timer | None:
        if (at_s := expires_s_of(letter)) is None:
            return None
        left_s = max(0.0, at_s - self._clock.now_s())
        return self._clock.call_later(left_s, lambda: self._expire(letter, run))

    def _expire(self, letter: Letter, run: LiveRun) -> None:
        """Nobody wants it read any more; unless it is being read, or told to whoever does."""
        if run.is_waiting:
            # First: a letter whose run was cancelled is dead.
            self._store.write(close_letter(letter.id, expired=True))
            self._runs.cancel_run(run)

    async def _put_away(self, address: str, claim: ClaimedLetter) -> None:
        """Its run has begun, or has ended without: then somebody cancelled it, unread."""
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
        """Bury it. Whoever asks is told first: what is buried comes to nobody's mind again."""
        await self._outbox.decline(claim.letter, address, why, is_answer=is_answer)
        await self._on(address, lambda box: box.bury(claim))

    async def _answer(self, letter: Letter, address: str, run: LiveRun) -> None:
        """An ask of whoever has a mailbox gets a reply: what was said, or why nothing was."""
        if letter.from_.agent_id is None:
            return  # A person's: it is read in the conversation.
        shown = await self._store.read(find_letter(letter.id))
        if run.ending is None or (shown is not None and shown.state == "answered"):
            return
        answer = (run.host or run).answer.strip()
        said: str | dict[str, Json] = answer
        if run.ending.outcome not in ("end_turn", "max_tokens") or not answer:
            said = unanswered(f"the run ended {run.ending.outcome}. {answer}".strip())
        sender = Sender(session_id=run.session_id, agent_id=address)
        await self._outbox.reply(letter.id, letter.from_.agent_id, said, sender)

    async def _answer_left(self) -> None:
        """What was asked under an earlier server, which could not answer, gets a reply now."""
        since = int(self._clock.now_s() - STILL_ASKED_S)
        left: list[UnansweredAsk] = []
        unheard: set[str] = set()  # A mailbox that is locked is waited for once.
        try:
            while left := await self._store.read(
                unanswered_asks(since, left[-1].no if left else 0, ASKS_AT_ONCE)
            ):
                for ask in left:
                    if ask.letter.letter_id in self._held or ask.letter.from_ in unheard:
                        continue
                    if not await self._answer_late(ask):
                        unheard.add(ask.letter.from_)
        except (AppError, OSError) as exc:
            log.warning("what was asked of an earlier server cannot be answered: %s", exc)

    async def _answer_late(self, ask: UnansweredAsk) -> bool:
        letter = ask.letter
        sender = Sender(session_id=letter.to, agent_id=letter.to)
        words = unanswered(
            f"the server ended meanwhile; the run ended {ask.outcome}, and what it said is in the"
            f" conversation of {letter.to}."
        )
        try:
            await self._outbox.reply(letter.letter_id, letter.from_, words, sender)
        except (AppError, OSError) as exc:
            log.info("nobody hears the answer to letter %s: %s", letter.letter_id, exc)
            return False
        return True

    async def _on(self, address: str, do: Callable[[Mailbox], object]) -> None:
        await self._blocking(lambda: do(self._post.open(address)))

    async def forget(self, address: str) -> None:
        """Its agent is deleted: nobody reads what lies there, and who asks is told."""
        if not is_safe_stem(address):
            return
        try:
            left = await self._blocking(lambda: self._empty(address))
            for letter in left:
                await self._outbox.decline(letter, address, "its agent was deleted")
        except (AppError, OSError) as exc:
            log.warning("the mailbox of %s cannot be removed: %s", address, exc)

    def _empty(self, address: str) -> list[Letter]:
        """What was in a mailbox that is no more."""
        try:
            mailbox = self._post.open(address)
            claims = [*mailbox.recover(), *mailbox.claim(LETTERS_MAX)]
        except NoMailbox:
            return []
        self._post.remove(address)
        return [claim.letter for claim in claims]


def _is_at_rest(stored: Run | None, recipient: MailRecipient | None) -> bool:
    """Whether the run that brings a letter is held."""
    if stored is None or recipient is None or stored.state != "held":
        return False
    return stored.session_id == recipient.session_id


def _note(shown: LetterShown) -> Callable[[Tx], None]:
    """What lies in a mailbox; whoever was asked may have answered without the server."""
    answers = None
    if shown.kind == "reply" and shown.correlation_id:
        answers = answer_letter(shown.correlation_id, LetterId(shown.letter_id), by=shown.from_)
    return together(add_letter(shown, run_id=shown.letter_id), answers)


def _ignore() -> None:
    pass


def letter_text(letter: Letter) -> str:
    """What its recipient reads."""
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
