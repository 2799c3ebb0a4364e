"""A worker for `fleet.py` that sends as many events as requested.

Usage: fleet_sender.py     (a child: prints its endpoint on stdout; ends when stdin does)
"""

import asyncio
import sys

import uvloop
from msgspec import Raw, Struct

from culm.fleet import serve
from culm.fleet.executor import CancelToken, EventSink, Outcome, RunHost, SteerInbox, completed
from culm.fleet.protocol.batching import qos_of
from culm.fleet.protocol.frames import Batch, EventBatch, EventFrame, RunSpec, encode_frame
from culm.fleet.worker_server.connection import ServeMany
from culm.wire.codec import decode, encode

EVENT_BYTES = 300  # The size of a whole frame.


class SendRequest(Struct, frozen=True):
    """The content of an assignment, as JSON."""

    events: int
    type: str
    content: str
    burst: int  # Events before each pause; 0: no pause.
    pause_s: float


class Stream(Struct, frozen=True):
    """A kind of traffic."""

    name: str
    type: str  # Decides whether an event may be dropped or batched.
    epoch: int  # 0: the host does not number events.
    burst: int = 0
    pause_s: float = 0.0

    def spec(self, events: int) -> RunSpec:
        """Return an assignment to send so many events."""
        around = len(_frame(self.type, "", self.epoch))
        content = "x" * (EVENT_BYTES - around)
        request = SendRequest(events, self.type, content, self.burst, self.pause_s)
        return RunSpec(encode(request).decode(), execution_epoch=self.epoch)


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
        request = decode(spec.assignment.encode(), SendRequest)
        event = {"type": request.type, "content": request.content}
        for number in range(1, request.events + 1):
            await events.emit(event)
            if request.burst and number % request.burst == 0:
                await asyncio.sleep(request.pause_s)
        return completed(str(request.events))


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
