"""The accounts of a workspace's runs: each within that of the run it works for, ended or not."""

from weakref import WeakValueDictionary

import msgspec

from culm.ids import RunId
from culm.run.budget import Account
from culm.run.limits import RunSpending, effective
from culm.settings import Settings
from culm.store.stored_runs import StoredRun
from culm.wire.runs import Limits


class Accounts:
    """Keeps none by itself: an account is there as long as somebody works within it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._by_run: WeakValueDictionary[RunId, Account] = WeakValueDictionary()

    def limits(self, asked: Limits) -> Limits:
        """Steps are bounded by the server for each run alone, and all else for its whole tree."""
        return msgspec.structs.replace(effective(asked, self._settings), steps=asked.steps)

    def open(self, run_id: RunId, asked: Limits, above: Account | None) -> Account:
        account = self._by_run[run_id] = Account(self.limits(asked), above)
        return account

    def open_again(self, left: StoredRun) -> Account:
        """Of what an earlier server had accepted: the limits of those it works for still hold."""
        above: Account | None = None
        for bound in reversed(left.bounds):
            account = self._by_run.get(bound.run_id)
            if account is None:
                account = self.open(bound.run_id, bound.limits, above)
                account.spent = RunSpending(bound.steps, bound.tokens, bound.cost)
            above = account
        return self.open(left.run.id, left.limits, above)
