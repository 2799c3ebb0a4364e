"""Open requests to a person: permissions and questions. The first answer wins.

Owns the open asks of one workspace. `policy.py` decides whether a call needs one; clients decide
how to display it. Every ask is stored before it is shown to anybody, and every answer is stored
before it takes effect. Between the two, the event loop serves as the lock.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Generic, NamedTuple, cast

from msgspec import Struct, field

from culm.clock import Clock, Timer
from culm.errors import AppError, LimitExceeded, WorkspaceClosing
from culm.events.hub import TransientEvent
from culm.ids import AskId
from culm.store.asks import AnyAsk, changed_ask, close_ask, open_ask
from culm.store.store import Store
from culm.wire.asks import (
    Ask,
    AskState,
    Grant,
    PermissionNotification,
    QuestionResponse,
    R,
)
from culm.wire.codec import encode

ASKS_MAX = 64  # An agent that opens more is looping: refuse the next one instead of queueing it.
EXPIRE_AGAIN_S = 1.0  # The retry interval while the store cannot record an expiry.

REFUSED: tuple[AskState, ...] = ("denied", "expired", "canceled")


class ClosedAsk(NamedTuple):
    """The outcome of an ask."""

    state: AskState
    by: str = ""
    grant: Grant | None = None  # The grant that the answer created, if any.
    responses: Sequence[QuestionResponse] = ()  # The answers, if the ask was a batch of questions.


class _Waiting(Struct, Generic[R], eq=False):
    ask: Ask[R]
    closed: asyncio.Future[ClosedAsk]
    closing: asyncio.Future[bool] | None = None  # An answer that is being stored.
    timer: Timer | None = None
    is_unwanted: bool = False  # The caller stopped waiting; the end of its run closes the row.

    @property
    def id(self) -> AskId:
        return AskId(self.ask.request.id)

    @property
    def call(self) -> tuple[str, str]:
        return self.ask.message_id, self.ask.request.tool_call_id

    @property
    def is_refused(self) -> bool:
        """A refusal stays valid even if the call would do something else by now."""
        return self.closed.done() and self.closed.result().state in REFUSED


class AskEvents(Struct, frozen=True):
    """Events about one kind of ask: every ask in our own view, one at a time in Crush's view.

    The store publishes the durable ones.
    """

    changed: str  # The event that shows an open ask to a new subscriber.
    request: str  # The event that requests the answer.
    notifies: bool = False  # Clients also get a notification of the waiting call.

    def opened(self, ask: Ask[R]) -> Iterator[TransientEvent]:
        if self.notifies:
            yield notification(ask.request.session_id, ask.request.tool_call_id)
        yield self._requested(ask)._replace(view="delta")

    def announced(self, ask: Ask[R]) -> TransientEvent:
        """Build the event for the ask that a Crush client shows."""
        return self._requested(ask)._replace(view="crush")

    def state_events(self, ask: Ask[R]) -> Iterator[TransientEvent]:
        """Return the events that show an open ask to a new subscriber."""
        # `R` is one of the two requests, which the checker cannot infer here.
        changed = encode(changed_ask(cast("AnyAsk", ask)))
        yield TransientEvent(self.changed, ask.request.session_id, changed, "created")
        yield from self.opened(ask)

    def _requested(self, ask: Ask[R]) -> TransientEvent:
        request = ask.request
        return TransientEvent(self.request, request.session_id, encode(request), "created")


PERMISSION_EVENTS = AskEvents("ask_changed", "permission_request", notifies=True)
QUESTION_EVENTS = AskEvents("question_changed", "question_batch_request")


def notification(session_id: str, tool_call_id: str, *, granted: bool = False) -> TransientEvent:
    """Build the event of a call that waits, or that was allowed without an ask."""
    payload = PermissionNotification(tool_call_id, granted=granted, session_id=session_id)
    return TransientEvent("permission_notification", session_id, encode(payload), "created")


class Asks(Struct, Generic[R], eq=False):
    """The open asks of one kind, oldest first. A Crush client is shown the first one only."""

    store: Store
    clock: Clock
    events: AskEvents
    publish: Callable[[TransientEvent], None]
    on_grant: Callable[[Grant], None] = field(default=lambda grant: None)
    _open: dict[AskId, _Waiting[R]] = field(default_factory=dict[AskId, _Waiting[R]])
    # Asks of an earlier server, until their call asks again.
    _leftover: dict[tuple[str, str], _Waiting[R]] = field(
        default_factory=dict[tuple[str, str], _Waiting[R]]
    )
    _opening: int = 0  # The number of asks that are being stored.
    _announced: AskId | None = None
    _is_stopped: bool = False

    # --- opening

    async def put(self, ask: Ask[R]) -> tuple[Ask[R], ClosedAsk]:
        """Open an ask and wait for its answer. Cancelling the wait withdraws the ask.

        A call that opened the same ask on an earlier server waits for that one. If the call would
        do something else by now, the earlier ask is withdrawn. Raises `LimitExceeded` and
        `StoreBusy`.
        """
        before = self._leftover.get((ask.message_id, ask.request.tool_call_id))
        if before is not None and before.closing is not None:
            with contextlib.suppress(AppError):  # An answer that is being stored takes precedence.
                await asyncio.shield(before.closing)
        if before is not None and (before.ask.digest == ask.digest or before.is_refused):
            self._leftover.pop(before.call, None)
            waiting = before
        else:
            waiting = await self._put_new(ask, before)
        try:
            return waiting.ask, await asyncio.shield(waiting.closed)
        except asyncio.CancelledError:
            self._withdraw(waiting)
            raise

    async def _put_new(self, ask: Ask[R], before: _Waiting[R] | None) -> _Waiting[R]:
        if before is None and len(self._open) + self._opening >= ASKS_MAX:
            raise LimitExceeded("open asks in this workspace", ASKS_MAX)
        waiting = _new(ask)
        self._opening += 1

        def opened(_: None) -> None:
            self._opening -= 1
            if before is not None:
                self._leftover.pop(before.call, None)
                self._leave(before, ClosedAsk("withdrawn"))
            if not waiting.is_unwanted:
                self._enter(waiting)

        def failed(_: Exception) -> None:
            self._opening -= 1

        unit = open_ask(ask, instead_of=None if before is None else before.id)
        written = self.store.write(unit, opened, failed)
        try:
            await asyncio.shield(written)
        except asyncio.CancelledError:
            # If the row is stored nevertheless, the end of the run closes it.
            self._withdraw(waiting)
            raise
        return waiting

    def _enter(self, waiting: _Waiting[R]) -> None:
        ask = waiting.ask
        self._open[waiting.id] = waiting
        if ask.deadline:
            self._expire_in(waiting, max(0.0, ask.deadline - self.clock.now_s()))
        for live in self.events.opened(ask):
            self.publish(live)
        self._announce()

    def _announce(self) -> None:
        """Announce the first ask only: a Crush client replaces one dialog with the next."""
        first = next(iter(self._open.values()), None)
        if first is not None and first.id != self._announced:
            self._announced = first.id
            self.publish(self.events.announced(first.ask))

    def _withdraw(self, waiting: _Waiting[R]) -> None:
        """Mark an ask that nobody waits for; it stays until the end of its run closes it."""
        waiting.is_unwanted = True

    def _leave(self, waiting: _Waiting[R], closed: ClosedAsk) -> None:
        """Remove an ask whose row is closed and whose closing was published."""
        if self._open.pop(waiting.id, None) is None:
            return
        if waiting.timer is not None:
            waiting.timer.cancel()
        if not waiting.closed.done():
            waiting.closed.set_result(closed)
        if not self._is_stopped:
            self._announce()

    # --- answering

    async def close(self, ask_id: str, closed: ClosedAsk) -> bool:
        """Answer an ask. Return False if it is not open: already answered, withdrawn, or unknown.

        Raises `WorkspaceClosing` during shutdown; the ask stays open for the next server.
        """
        if self._is_stopped:
            raise WorkspaceClosing
        while (waiting := self._find(ask_id)) is not None:
            if waiting.closing is None:
                return await asyncio.shield(self._close(waiting, closed))
            try:  # Another answer is being stored. It wins unless it cannot be stored.
                await asyncio.shield(waiting.closing)
            except AppError:
                continue
        return False

    def _close(self, waiting: _Waiting[R], closed: ClosedAsk) -> asyncio.Future[bool]:
        def written(was_open: bool) -> None:  # noqa: FBT001 - the result of the unit
            if closed.grant is not None and was_open:
                self.on_grant(closed.grant)
            self._leave(waiting, closed if was_open else ClosedAsk("withdrawn"))

        def failed(_: Exception) -> None:
            waiting.closing = None
            if closed.state == "expired":
                self._expire_in(waiting, EXPIRE_AGAIN_S)

        unit = close_ask(waiting.id, closed.state, by=closed.by, grant=closed.grant)
        closing = self.store.write(unit, written, failed)
        # Done means that the store refused it at once.
        waiting.closing = None if closing.done() else closing
        return closing

    def _expire_in(self, waiting: _Waiting[R], delay_s: float) -> None:
        waiting.timer = self.clock.call_later(delay_s, partial(self._expire, waiting))

    def _expire(self, waiting: _Waiting[R]) -> None:
        # Expire it even if its caller has just given up: the expiry is the reason.
        if waiting.closing is None and not self._is_stopped:
            self._close(waiting, ClosedAsk("expired"))

    # --- reading

    def _find(self, ask_id: str) -> _Waiting[R] | None:
        waiting = self._open.get(AskId(ask_id))
        return None if waiting is None or waiting.is_unwanted else waiting

    def find(self, ask_id: str) -> Ask[R] | None:
        waiting = self._find(ask_id)
        return None if waiting is None else waiting.ask

    def all(self) -> list[Ask[R]]:
        return [waiting.ask for waiting in self._open.values() if not waiting.is_unwanted]

    @property
    def announced(self) -> Ask[R] | None:
        return next(iter(self.all()), None)

    def has_of_run(self, run_id: str) -> bool:
        return any(ask.run_id == run_id for ask in self.all())

    def is_closing_of_run(self, run_id: str) -> bool:
        """Return True if an answer to an ask of this run is being stored."""
        closing = (one for one in self._open.values() if one.closing is not None)
        return any(one.ask.run_id == run_id for one in closing)

    def state_events(self) -> Iterator[TransientEvent]:
        """Return the events that show the open asks to a new subscriber."""
        for number, ask in enumerate(self.all()):
            yield from self.events.state_events(ask)
            if number == 0:
                yield self.events.announced(ask)

    # --- lifecycle of runs and of the server

    def restore(self, ask: Ask[R]) -> None:
        """Reopen an ask of the previous server, for a run that continues."""
        waiting = _new(ask)
        self._leftover[waiting.call] = waiting
        self._enter(waiting)

    def find_refusal(self, message_id: str, call_id: str) -> AskState | None:
        """Return the state in which an ask of an earlier server was refused, or None."""
        left = self._leftover.get((message_id, call_id))
        return left.closed.result().state if left is not None and left.is_refused else None

    def had_asked(self, message_id: str, call_id: str) -> bool:
        """Return True if the call asked on an earlier server and has not asked again."""
        return (message_id, call_id) in self._leftover

    async def withdraw_leftover(self, message_id: str, call_id: str) -> None:
        """Withdraw the ask that a decided call left open on an earlier server and did not reopen.

        Raises `StoreBusy`.
        """
        left = self._leftover.pop((message_id, call_id), None)
        if left is not None and not self._is_stopped:
            await self.close(left.id, ClosedAsk("withdrawn"))

    def forget_run(self, run_id: str) -> None:
        """Drop the asks of a run that has ended; their rows are closed."""
        self._leftover = {
            k: left for k, left in self._leftover.items() if left.ask.run_id != run_id
        }
        for waiting in list(self._open.values()):
            if waiting.ask.run_id == run_id:
                self._leave(waiting, ClosedAsk("withdrawn"))

    def stop(self) -> None:
        """Stop for shutdown. Open asks stay open for the next server."""
        self._is_stopped = True
        for waiting in list(self._open.values()):
            if waiting.timer is not None:
                waiting.timer.cancel()


def _new(ask: Ask[R]) -> _Waiting[R]:
    return _Waiting(ask, asyncio.get_running_loop().create_future())
