"""Letters whose time is over while the runs that bring them wait."""

from collections.abc import Callable

from culm.ids import CancelId, LetterId, RunId
from culm.store.base import Tx
from culm.store.letters import close_letter
from culm.store.runs import add_cancel


def expire_run(run_id: RunId, cancel_id: CancelId) -> Callable[[Tx], bool]:
    """The letter that it brings is wanted no more; False if its turn had come before."""

    def unit(tx: Tx) -> bool:
        row = tx.run("get_run", run_id).fetchone()
        if row is None or row["state"] != "queued":
            return False
        close_letter(LetterId(run_id), expired=True)(tx)
        add_cancel(cancel_id, row["session_id"], "run", [run_id])(tx)
        return True

    return unit
