"""Fake executors: each does one thing that a run may do."""

import asyncio
from collections.abc import Sequence

from culm.fleet.executor import (
    CANCELLED,
    ApprovalUnavailable,
    CancelToken,
    EventSink,
    HostCallFailed,
    Outcome,
    RunHost,
    SteerInbox,
    completed,
)
from culm.fleet.protocol.frames import RunSpec
from culm.wire.codec import Json


class RepeatingExecutor:
    """Emits every word of its assignment."""

    async def run(
        self,
        spec: RunSpec,
        events: EventSink,
        steer: SteerInbox,
        cancel: CancelToken,
        host: RunHost,
    ) -> Outcome:
        words = spec.assignment.split()
        for word in words:
            await events.emit({"type": "token", "content": f"{word} "})
        await events.emit({"type": "complete"})
        return completed(f"echo: {' '.join(words)}")


class WaitingExecutor:
    """Emits its assignment and waits until it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    async def run(
        self,
        spec: RunSpec,
        events: EventSink,
        steer: SteerInbox,
        cancel: CancelToken,
        host: RunHost,
    ) -> Outcome:
        await events.emit({"type": "token", "content": spec.assignment})
        await cancel.wait()
        self.cancelled.set()
        return CANCELLED


class SteeredExecutor:
    """Ends with the first steer message."""

    async def run(
        self,
        spec: RunSpec,
        events: EventSink,
        steer: SteerInbox,
        cancel: CancelToken,
        host: RunHost,
    ) -> Outcome:
        return completed(f"steered: {(await steer.next()).text}")


class AskingExecutor:
    """Asks once, and ends with the answer."""

    def __init__(self, **body: Json) -> None:
        self.body = body
        self.answers: list[bool] = []

    async def run(
        self,
        spec: RunSpec,
        events: EventSink,
        steer: SteerInbox,
        cancel: CancelToken,
        host: RunHost,
    ) -> Outcome:
        try:
            self.answers.append(await host.ask(self.body))
        except ApprovalUnavailable as exc:
            return completed(f"not asked: {exc}")
        return completed(f"approved: {str(self.answers[-1]).lower()}")


class HostCallExecutor:
    """Makes a host call and ends with its result."""

    def __init__(self, **args: Json) -> None:
        self.args = args

    async def run(
        self,
        spec: RunSpec,
        events: EventSink,
        steer: SteerInbox,
        cancel: CancelToken,
        host: RunHost,
    ) -> Outcome:
        try:
            return completed(f"done: {await host.call(self.args, 'call-1')}")
        except HostCallFailed as exc:
            return completed(f"failed: {exc}")


class CancelIgnoringExecutor:
    """Waits forever and ignores its cancel token; `ended` is set when its task is cancelled."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()

    async def run(
        self,
        spec: RunSpec,
        events: EventSink,
        steer: SteerInbox,
        cancel: CancelToken,
        host: RunHost,
    ) -> Outcome:
        self.begun.set()
        await events.emit({"type": "token", "content": "go"})
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()
        raise AssertionError("nobody sets it")


class UnstoppableExecutor:
    """Ends when the test allows it, not when it is cancelled."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def run(
        self,
        spec: RunSpec,
        events: EventSink,
        steer: SteerInbox,
        cancel: CancelToken,
        host: RunHost,
    ) -> Outcome:
        await events.emit({"type": "token", "content": "go"})
        while not self.may_end.is_set():
            try:
                await self.may_end.wait()
            except asyncio.CancelledError:
                continue
        return completed("at last")


class CrashingExecutor:
    async def run(
        self,
        spec: RunSpec,
        events: EventSink,
        steer: SteerInbox,
        cancel: CancelToken,
        host: RunHost,
    ) -> Outcome:
        await events.emit({"type": "token", "content": "go"})
        if spec.assignment == "cancel":
            raise asyncio.CancelledError
        raise ZeroDivisionError(spec.assignment)


class EmittingExecutor:
    """Emits the given events; `emitted` counts them."""

    def __init__(self, events: Sequence[dict[str, Json]]) -> None:
        self.events = events
        self.emitted = 0
        self.all_emitted = asyncio.Event()
        self.sink: EventSink | None = None
        self.host: RunHost | None = None

    async def run(
        self,
        spec: RunSpec,
        events: EventSink,
        steer: SteerInbox,
        cancel: CancelToken,
        host: RunHost,
    ) -> Outcome:
        self.sink, self.host = events, host
        for event in self.events:
            await events.emit(event)
            self.emitted += 1
        self.all_emitted.set()
        return completed("told")


class ResultExecutor:
    """Ends with the given result."""

    def __init__(self, result: str) -> None:
        self.result = result

    async def run(
        self,
        spec: RunSpec,
        events: EventSink,
        steer: SteerInbox,
        cancel: CancelToken,
        host: RunHost,
    ) -> Outcome:
        return completed(self.result)


class LateSteerExecutor:
    """Asks first, and then takes its steer messages."""

    async def run(
        self,
        spec: RunSpec,
        events: EventSink,
        steer: SteerInbox,
        cancel: CancelToken,
        host: RunHost,
    ) -> Outcome:
        await host.ask({})
        return completed(" ".join(message.text for message in steer.take_nowait()))


class ManyAsksExecutor:
    """Makes concurrent asks and ends with the number of approvals."""

    def __init__(self, asks: int) -> None:
        self.asks = asks

    async def run(
        self,
        spec: RunSpec,
        events: EventSink,
        steer: SteerInbox,
        cancel: CancelToken,
        host: RunHost,
    ) -> Outcome:
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(host.ask({"n": n})) for n in range(self.asks)]
        return completed(str(sum(ask.result() for ask in asking)))
