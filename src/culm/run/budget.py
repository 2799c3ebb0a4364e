"""What a tree of runs may use up: set aside before each question to a model, settled after it.

Owns one account per live run, each within that of the run it works for. A question is asked if no
account on the way up is used up by what was spent and what others have set aside; so runs that work
side by side go beyond a limit by at most one question each. The event loop is the lock.
"""

import asyncio
from collections.abc import Iterator

from culm.errors import BudgetReached
from culm.run.limits import RunSpending, UsageEstimate, used_up
from culm.wire.runs import Limits, Used


class Account:
    """Of one run and everything that works for it. Implements `loop.Meter`."""

    def __init__(self, limits: Limits, above: "Account | None" = None) -> None:
        self.above = above
        self.spent = RunSpending()
        self._limits = limits
        self._aside = RunSpending()  # For questions that are not answered yet, of all below, too.
        self._open: dict[str, RunSpending] = {}  # Those of this run.
        self._number = 0
        self._waiting: dict[asyncio.Future[None], None] = {}  # First come, first served.

    @property
    def limits(self) -> Limits:
        return self._limits

    def set_limits(self, limits: Limits) -> None:
        """They hold for the next question; one that waits is looked at again."""
        self._limits = limits
        self._wake()

    async def reserve(self, estimate: UsageEstimate) -> str:
        """Wait while what is set aside above leaves no room, since less of it may be used."""
        while (full := self._find_full()) is not None:
            if limit := used_up(full.spent, full.limits):
                whose = "The run" if full is self else "The run it works for"
                raise BudgetReached(f"{whose} has used its {limit}.")
            if not full.is_used_by_others(self):  # Then no wait would make room.
                raise BudgetReached("What is left is less than a question may use.")
            await full._changed()
        self._number += 1
        reservation = str(self._number)
        aside = self._open[reservation] = RunSpending(1, *estimate)
        for account in self._way_up():
            account._aside = account._aside.and_(aside)
        return reservation

    def settle(self, reservation: str, used: Used) -> None:
        """What was set aside is used so far; what is not known here was settled before."""
        self._close(reservation, RunSpending().plus(used))

    def forfeit(self, reservation: str) -> None:
        """It failed. What it used is not known and stays charged, but it was no step."""
        aside = self._open.get(reservation)
        if aside is not None:
            self._close(reservation, aside._replace(steps=0))

    def abandon(self) -> None:
        """The run is over: what its last question used is not known, so it stays charged."""
        for reservation, aside in list(self._open.items()):
            self._close(reservation, aside)

    def _close(self, reservation: str, spent: RunSpending) -> None:
        aside = self._open.pop(reservation, None)
        if aside is None:
            return
        for account in self._way_up():
            account._aside = account._aside.without(aside)
            account.spent = account.spent.and_(spent)
            account._wake()

    def is_used_up(self) -> str:
        """Which limit on the way up is reached; empty if none is."""
        limits = (used_up(account.spent, account.limits) for account in self._way_up())
        return next(filter(None, limits), "")

    def _find_full(self) -> "Account | None":
        for account in self._way_up():
            if used_up(account.spent.and_(account._aside), account.limits):
                return account
        return None

    def _way_up(self) -> Iterator["Account"]:
        account: Account | None = self
        while account is not None:
            yield account
            account = account.above

    def is_used_by_others(self, run: "Account") -> bool:
        """Whether somebody else has set something aside here, of which less may be used."""
        own = RunSpending()
        for aside in run._open.values():
            own = own.and_(aside)
        return self._aside.steps > own.steps

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


class FreeMeter:
    """Of a run that nobody keeps account of: every question is granted. Implements `loop.Meter`."""

    async def reserve(self, estimate: UsageEstimate) -> str:
        return ""

    def settle(self, reservation: str, used: Used) -> None:
        pass

    def forfeit(self, reservation: str) -> None:
        pass
