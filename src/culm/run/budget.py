"""Budgets of run trees: reserved before each model request, settled after it.

Owns one account per live run, each below the account of the run it works for. A request may be sent
if no account from here to the root is exhausted by past spending plus open reservations. So
parallel runs exceed a limit by at most one request each. The event loop is the lock.
"""

import asyncio
from collections.abc import Iterator
from weakref import WeakValueDictionary

import msgspec

from culm.errors import BudgetReached
from culm.ids import RunId
from culm.run.limits import RunSpending, UsageEstimate, effective, used_up
from culm.settings import Settings
from culm.store.runs import StoredRun
from culm.wire.runs import Limits, Used


class Account:
    """The budget of one run and of everything that works for it. Implements `loop.UsageMeter`."""

    def __init__(self, limits: Limits, above: "Account | None" = None) -> None:
        self.above = above
        self.spent = RunSpending()
        self._limits = limits
        self._reserved = RunSpending()  # Open reservations of this run and of all runs below it.
        self._open: dict[str, RunSpending] = {}  # Open reservations of this run.
        self._number = 0
        self._waiting: dict[asyncio.Future[None], None] = {}  # First come, first served.

    @property
    def limits(self) -> Limits:
        return self._limits

    def set_limits(self, limits: Limits) -> None:
        """Replace the limits for the next request, and wake waiting reservations."""
        self._limits = limits
        self._wake()

    async def reserve(self, estimate: UsageEstimate) -> str:
        """Reserve the estimate. Wait while open reservations leave no room: they may use less."""
        while (full := self._find_full()) is not None:
            if limit := used_up(full.spent, full.limits):
                owner = "The run" if full is self else "The run it works for"
                raise BudgetReached(f"{owner} has used its {limit}.")
            if not full.is_used_by_others(self):  # Waiting would not make room.
                raise BudgetReached("The remaining budget is too small for another request.")
            await full._changed()
        self._number += 1
        reservation = str(self._number)
        reserved = self._open[reservation] = RunSpending(1, *estimate)
        for account in self._up_to_root():
            account._reserved = account._reserved.and_(reserved)
        return reservation

    def settle(self, reservation: str, used: Used) -> None:
        """Replace a reservation with the actual usage. An unknown one was settled before."""
        self._close(reservation, RunSpending().plus(used))

    def forfeit(self, reservation: str) -> None:
        """Charge a failed request in full, as its usage is unknown, but not as a step."""
        reserved = self._open.get(reservation)
        if reserved is not None:
            self._close(reservation, reserved._replace(steps=0))

    def abandon(self) -> None:
        """End the run; its open reservations stay charged, as their usage is unknown."""
        for reservation, reserved in list(self._open.items()):
            self._close(reservation, reserved)

    @property
    def is_requesting(self) -> bool:
        """True if this run has sent a request, or will, whose usage is not known."""
        return bool(self._open)

    def _close(self, reservation: str, spent: RunSpending) -> None:
        reserved = self._open.pop(reservation, None)
        if reserved is None:
            return
        for account in self._up_to_root():
            account._reserved = account._reserved.without(reserved)
            account.spent = account.spent.and_(spent)
            account._wake()

    def reached_limit(self) -> str:
        """Name the first limit that is reached from here to the root; empty if none is."""
        limits = (used_up(account.spent, account.limits) for account in self._up_to_root())
        return next(filter(None, limits), "")

    def _find_full(self) -> "Account | None":
        for account in self._up_to_root():
            if used_up(account.spent.and_(account._reserved), account.limits):
                return account
        return None

    def _up_to_root(self) -> Iterator["Account"]:
        account: Account | None = self
        while account is not None:
            yield account
            account = account.above

    def is_used_by_others(self, run: "Account") -> bool:
        """Return True if another run has an open reservation here, which may end up smaller."""
        own = RunSpending()
        for reserved in run._open.values():
            own = own.and_(reserved)
        return self._reserved.steps > own.steps

    async def _changed(self) -> None:
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[change] = None
        try:
            await change
        finally:
            del self._waiting[change]

    def _wake(self) -> None:
        for change in self._waiting:
            if not change.done():
                change.set_result(None)


class Accounts:
    """The accounts of a workspace's runs, held weakly: one exists as long as something uses it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._by_run: WeakValueDictionary[RunId, Account] = WeakValueDictionary()

    def limits(self, asked: Limits) -> Limits:
        """Bound the limits: steps for each run, everything else for the whole tree."""
        return msgspec.structs.replace(effective(asked, self._settings), steps=asked.steps)

    def open(self, run_id: RunId, asked: Limits, above: Account | None) -> Account:
        account = self._by_run[run_id] = Account(self.limits(asked), above)
        return account

    def reopen(self, left: StoredRun) -> Account:
        """Reopen the account of a stored run. The limits of the runs above it still apply."""
        above: Account | None = None
        for bound in reversed(left.bounds):
            account = self._by_run.get(bound.run_id)
            if account is None:
                account = self.open(bound.run_id, bound.limits, above)
                account.spent = RunSpending(bound.steps, bound.tokens, bound.cost)
            above = account
        return self.open(left.run.id, left.limits, above)


class FreeMeter:
    """A meter without limits, for runs without an account. Implements `loop.UsageMeter`."""

    async def reserve(self, estimate: UsageEstimate) -> str:
        return ""

    def settle(self, reservation: str, used: Used) -> None:
        pass

    def forfeit(self, reservation: str) -> None:
        pass
