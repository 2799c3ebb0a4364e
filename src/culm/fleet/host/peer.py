"""A worker at the other end of a link, for whoever only wants runs done by it.

One run after the other; which worker it is, and what else becomes of it, is the caller's business.
"""

from culm.clock import Clock
from culm.fleet.executor import Outcome
from culm.fleet.host.callbacks import DenyAll, HostCallbacks
from culm.fleet.host.run_control import RunControl
from culm.fleet.host.run_driver import drive
from culm.fleet.protocol.frames import RunSpec
from culm.fleet.transport.base import Link, LinkLost


class WorkerPeer:
    """Made by `culm.fleet.connect`."""

    def __init__(self, link: Link, clock: Clock) -> None:
        self._link = link
        self._clock = clock
        self._is_usable = True

    async def run(
        self,
        spec: RunSpec | str,
        callbacks: HostCallbacks | None = None,
        controls: RunControl | None = None,
    ) -> Outcome:
        """Have an assignment done and say how it ended; raises `LinkLost`, `Rejected`.

        `overseer` is told what happens, and asked; without one nothing is allowed. By `controls`
        the run is steered and cancelled.
        """
        if not self._is_usable:
            raise LinkLost("the last run has not told its end on this link")
        self._is_usable = False
        asked = RunSpec(spec) if isinstance(spec, str) else spec
        driven = await drive(
            self._link, asked, callbacks or DenyAll(), controls or RunControl(), self._clock
        )
        # Else what still comes of it could be taken for the next one's.
        self._is_usable = driven.is_from_worker
        return driven.outcome
