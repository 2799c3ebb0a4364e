"""A worker for `fleet.py` that tells as many events as it is asked for.

Usage: fleet_sender.py     (a child: says on stdout where it listens; ends when stdin does)
"""

import asyncio
import sys

import uvloop
from msgspec import Raw, Struct

from culm.fleet import serve
from culm.fleet.executor import CancelToken, EventSink, Outcome, RunHost, SteerInbox, completed
from culm.fleet.protocol.batching import qos_of
from culm.fleet.protocol.frames import Batch, EventBatch, EventFrame, RunSpec, encode_frame
from culm.fleet.worker_server.base import ServeMany
from culm.wire.codec import decode, encode

EVENT_BYTES = 300  # As a frame of its own.


class Telling(Struct, frozen=True):
    """What an assignment asks for, as JSON."""

    events: int
    type: str
    content: str
    burst: int  # So many, and then a pause; 0 is all of them without one.
    pause_s: float


class Stream(Struct, frozen=True):
    """A kind of traffic."""

    name: str
    type: str  # By which a host knows whether an event may be dropped, or wait for others.
    epoch: int  # 0 is a host that does not number events.
    burst: int = 0
    pause_s: float = 0.0

    def spec(self, events: int) -> RunSpec:
        """The assignment to send so many."""
        around = len(_frame(self.type, "", self.epoch))
        content = "x" * (EVENT_BYTES - around)
        telling = Telling(events, self.type, content, self.burst, self.pause_s)
        return RunSpec(encode(telling).decode(), execution_epoch=self.epoch)


def _frame(kind: str, content: str, epoch: int) -> bytes:
    event = Raw(encode({"type": kind, "content": content}))
    if not epoch:
        return encode_frame(EventFrame(event))
    return encode_frame(EventBatch(Batch(1, 1, qos_of({"type": kind}), [event], None, None, epoch)))


class Sender:
    """Implements `Executor`."""

    async def run(
        self,
        spec: RunSpec,
        events: EventSink,
        steer: SteerInbox,
        cancel: CancelToken,
        host: RunHost,
    ) -> Outcome:
        telling = decode(spec.assignment.encode(), Telling)
        event = {"type": telling.type, "content": telling.content}
        for number in range(1, telling.events + 1):
            await events.emit(event)
            if telling.burst and number % telling.burst == 0:
                await asyncio.sleep(telling.pause_s)
        return completed(str(telling.events))


async def main() -> None:
    loop = asyncio.get_running_loop()
    stdin = loop.run_in_executor(None, sys.stdin.read)

    def announce(endpoint: str) -> None:
        print(endpoint, flush=True)

    async with asyncio.TaskGroup() as group:
        serving = group.create_task(serve(Sender(), mode=ServeMany(), on_ready=announce))
        await stdin
        serving.cancel()


if __name__ == "__main__":
    uvloop.run(main())
