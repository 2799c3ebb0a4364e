"""An answer on its way: pace, back-pressure, and the troubles that need a connection.

Owns when bytes go out. Which bytes, and in which order, is `steps.py`.
"""

import asyncio
import time
from collections.abc import Iterator

from aiohttp import web

from culm.testing.steps import FaultStep, RawStep, Step

# Flat out, so many deltas share a write, and then the other answers have their turn. A write costs
# as much as making ten deltas; but a provider sends them one by one, so there are not many in it.
BATCH = 8
# uvloop's timers count whole milliseconds; what is due sooner than half of one is due now. Its
# clock stands still during a turn of the loop, so the schedule is kept by another.
EARLY_S = 0.0005


class AnswerSender:
    """One streamed answer. `complete` once nothing of it is missing, as the script has it."""

    def __init__(
        self, response: web.StreamResponse, transport: asyncio.Transport, released: asyncio.Event
    ) -> None:
        self.complete = False
        self._response = response
        self._transport = transport
        self._released = released
        self._batch: list[bytes] = []

    async def send(self, steps: Iterator[Step], rate: float) -> None:
        """Send it all; raises `ConnectionError` when the client has left."""
        sent = 0
        begun_ns = time.monotonic_ns()
        for step in steps:
            if isinstance(step, bytes):
                self._batch.append(step)
                sent += 1
                # By the schedule, not by the last delta: a late one does not delay the others.
                wait_s = sent / rate - (time.monotonic_ns() - begun_ns) / 1e9 if rate else 0.0
                if wait_s > EARLY_S:
                    await self._flush()
                    await asyncio.sleep(wait_s)
                elif len(self._batch) >= BATCH:
                    await self._flush()
                    await asyncio.sleep(0)
            elif isinstance(step, RawStep):
                self._batch.append(step.data)
            elif step is FaultStep.END:
                break
            elif step is FaultStep.CUT:
                await self._flush()
                self.complete = True
                # Not aborted: what was sent before still arrives.
                self._transport.close()
                return
            else:
                stopped_ns = time.monotonic_ns()
                await self._stop(step)
                begun_ns += time.monotonic_ns() - stopped_ns
        # A client that has read the end may be gone before we are told that it has.
        self.complete = True
        await self._response.write_eof(b"".join(self._batch))

    async def _stop(self, stop: FaultStep) -> None:
        await self._flush()
        if stop is FaultStep.HOLD:
            await self._released.wait()
        else:
            await asyncio.Event().wait()

    async def _flush(self) -> None:
        await self._response.write(b"".join(self._batch))
        self._batch.clear()
