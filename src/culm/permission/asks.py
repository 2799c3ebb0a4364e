"""What waits for a person: asks for permission, and questions; the first answer counts.

Owns the open asks of one workspace. Whether a call needs one is `policy.py`'s, how it is shown the
client's. Every ask is a row before anybody is shown it, and every answer a row before it counts;
between the two the event loop is the lock.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, NamedTuple

from culm.clock import Clock, Timer
from culm.errors import AppError, LimitExceeded, WorkspaceClosing
from culm.events.hub import TransientEvent
from culm.ids import AskId
from culm.permission.notifications import AskNotifier
from culm.store.asks import close_ask, open_ask
from culm.store.store import Store
from culm.wire.asks import Ask, AskState, Grant, QuestionResponse, R

ASKS_MAX = 64  # An agent that opens more is looping: refuse the next, do not queue it.
EXPIRE_AGAIN_S = 1.0  # How often a store that cannot write that nobody answered is tried again.

REFUSED: tuple[AskState, ...] = ("denied", "expired", "canceled")


class ClosedAsk(NamedTuple):
    """How an ask ended."""

    state: AskState
    by: str = ""
    grant: Grant | None = None  # What is allowed from now on ...
    responses: Sequence[QuestionResponse] = ()  # ... or what was answered.


@dataclass(eq=False, slots=True)
class _Waiting(Generic[R]):
    ask: Ask[R]
    closed: asyncio.Future[ClosedAsk]
    closing: asyncio.Future[bool] | None = None  # An answer on its way to the store.
    timer: Timer | None = None
    is_unwanted: bool = False  # Whoever asked has gone; its row is closed with its run's end.

    @property
    def id(self) -> AskId:
        return AskId(self.ask.request.id)

    @property
    def call(self) -> tuple[str, str]:
        return self.ask.message_id, self.ask.request.tool_call_id

    @property
    def is_refused(self) -> bool:
        """A no is a no, whatever the call would do by now."""
        return self.closed.done() and self.closed.result().state in REFUSED


@dataclass(eq=False, slots=True)
class Asks(Generic[R]):
    """The open asks of one kind, in the order they came. A Crush client is shown the first."""

    store: Store
    clock: Clock
    notifier: AskNotifier[R]
    publish: Callable[[TransientEvent], None]
    on_grant: Callable[[Grant], None] = field(default=lambda grant: None)
    _open: dict[AskId, _Waiting[R]] = field(default_factory=dict[AskId, _Waiting[R]])
    # What an earlier server had asked, until the call that wants to know asks again.
    _left: dict[tuple[str, str], _Waiting[R]] = field(
        default_factory=dict[tuple[str, str], _Waiting[R]]
    )
    _opening: int = 0  # Those on their way to the store.
    _announced: AskId | None = None
    _is_stopped: bool = False

    # --- asking

    async def put(self, ask: Ask[R]) -> tuple[Ask[R], ClosedAsk]:
        """Ask, and wait for the answer, to what was really asked. Cancelling withdraws it.

        A call that had asked the same of an earlier server waits on that ask; if by now it would
        do something else, the old one is withdrawn. Raises `LimitExceeded`, `StoreBusy`.
        """
        before = self._left.get((ask.message_id, ask.request.tool_call_id))
        if before is not None and before.closing is not None:
            with contextlib.suppress(AppError):  # An answer on its way comes first.
                await asyncio.shield(before.closing)
        if before is not None and (before.ask.digest == ask.digest or before.is_refused):
            self._left.pop(before.call, None)
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
                self._left.pop(before.call, None)
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
            self._withdraw(waiting)  # If it is written nevertheless, the run's end closes it.
            raise
        return waiting

    def _enter(self, waiting: _Waiting[R]) -> None:
        ask = waiting.ask
        self._open[waiting.id] = waiting
        if ask.deadline:
            self._expire_in(waiting, max(0.0, ask.deadline - self.clock.now_s()))
        for live in self.notifier.opened(ask):
            self.publish(live)
        self._announce()

    def _announce(self) -> None:
        """A Crush client replaces one dialog by the next, so it is shown one at a time."""
        first = next(iter(self._open.values()), None)
        if first is not None and first.id != self._announced:
            self._announced = first.id
            self.publish(self.notifier.announced(first.ask))

    def _withdraw(self, waiting: _Waiting[R]) -> None:
        """Nobody waits for it any more. It keeps its place until the end of its run closes it."""
        waiting.is_unwanted = True

    def _leave(self, waiting: _Waiting[R], closed: ClosedAsk) -> None:
        """Its row is closed, and that was told."""
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
        """Answer it. False if it is not open: answered, withdrawn, or never asked.

        Raises `WorkspaceClosing` when the server ends: it stays open for the next one.
        """
        if self._is_stopped:
            raise WorkspaceClosing
        while (waiting := self._find(ask_id)) is not None:
            if waiting.closing is None:
                return await asyncio.shield(self._close(waiting, closed))
            try:  # Another answer is on its way; it counts, unless it cannot be stored.
                await asyncio.shield(waiting.closing)
            except AppError:
                continue
        return False

    def _close(self, waiting: _Waiting[R], closed: ClosedAsk) -> asyncio.Future[bool]:
        def written(was_open: bool) -> None:  # noqa: FBT001 - what the unit returned
            if closed.grant is not None and was_open:
                self.on_grant(closed.grant)
            self._leave(waiting, closed if was_open else ClosedAsk("withdrawn"))

        def failed(_: Exception) -> None:
            waiting.closing = None
            if closed.state == "expired":
                self._expire_in(waiting, EXPIRE_AGAIN_S)

        unit = close_ask(waiting.id, closed.state, by=closed.by, grant=closed.grant)
        closing = self.store.write(unit, written, failed)
        waiting.closing = None if closing.done() else closing  # Done: it was refused at once.
        return closing

    def _expire_in(self, waiting: _Waiting[R], delay_s: float) -> None:
        waiting.timer = self.clock.call_later(delay_s, partial(self._expire, waiting))

    def _expire(self, waiting: _Waiting[R]) -> None:
        # Also if whoever asked has just given up: that its time is over is why.
        if waiting.closing is None and not self._is_stopped:
            self._close(waiting, ClosedAsk("expired"))

    # --- looking

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
        """Whether an answer to one of a run's is on its way to the store."""
        closing = (one for one in self._open.values() if one.closing is not None)
        return any(one.ask.run_id == run_id for one in closing)

    def shown(self) -> Iterator[TransientEvent]:
        """What is open, for whoever begins to listen."""
        for number, ask in enumerate(self.all()):
            yield from self.notifier.shown(ask)
            if number == 0:
                yield self.notifier.announced(ask)

    # --- the life of runs, and of the server

    def restore(self, ask: Ask[R]) -> None:
        """Take on what the last server had asked, for a run that goes on."""
        waiting = _new(ask)
        self._left[waiting.call] = waiting
        self._enter(waiting)

    def find_refusal(self, message_id: str, call_id: str) -> AskState | None:
        """How what a call had asked an earlier server was refused, if it was."""
        left = self._left.get((message_id, call_id))
        return left.closed.result().state if left is not None and left.is_refused else None

    def had_asked(self, message_id: str, call_id: str) -> bool:
        """Whether a call asked an earlier server, and has not asked again."""
        return (message_id, call_id) in self._left

    async def settle(self, message_id: str, call_id: str) -> None:
        """A call is decided; what it had asked of an earlier server and not again is withdrawn.

        Raises `StoreBusy`.
        """
        left = self._left.pop((message_id, call_id), None)
        if left is not None and not self._is_stopped:
            await self.close(left.id, ClosedAsk("withdrawn"))

    def forget_run(self, run_id: str) -> None:
        """It has ended, and its rows are closed."""
        self._left = {k: left for k, left in self._left.items() if left.ask.run_id != run_id}
        for waiting in list(self._open.values()):
            if waiting.ask.run_id == run_id:
                self._leave(waiting, ClosedAsk("withdrawn"))

    def stop(self) -> None:
        """The server ends; what is open stays so, for the next one."""
        self._is_stopped = True
        for waiting in list(self._open.values()):
            if waiting.timer is not None:
                waiting.timer.cancel()


def _new(ask: Ask[R]) -> _Waiting[R]:
    return _Waiting(ask, asyncio.get_running_loop().create_future())
