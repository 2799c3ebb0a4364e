"""Executors of simulated workers. An assignment is `<kind> <token> <size>`; some misbehave."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from culm.clock import format_time
from culm.fleet.executor import (
    CANCELLED,
    ApprovalUnavailable,
    CancelToken,
    EventSink,
    HostCallFailed,
    Outcome,
    RunEnded,
    RunHost,
    SteerInbox,
    SteerMessage,
    completed,
)
from culm.fleet.protocol.frames import RunSpec
from culm.wire.codec import Json
from tests.sim.fleet_world import Process, SimRun

ASK_S = 60.0  # The deadline of an ask.
ENOUGH = "enough"  # Ends a run that waits for steering.


@dataclass
class Execution:
    """One execution of an assignment."""

    run: SimRun
    size: int
    number: int
    events: EventSink
    steer: SteerInbox
    cancel: CancelToken
    host: RunHost
    emitted_count: int = 0
    is_over: bool = False  # It has returned.

    async def ask(self, body: Mapping[str, Json]) -> bool:
        """Ask for approval; no decision counts as a denial."""
        try:
            return await self.host.ask(body)
        except ApprovalUnavailable:
            return False

    async def emit_event(self, kind: str, **more: str) -> None:
        self.emitted_count += 1
        event = {
            "type": kind,
            "by": self.number,
            "n": self.emitted_count,
            "token": self.run.token,
            **more,
        }
        await self.events.emit(event)
        self.run.emitted.append((self.number, self.emitted_count, kind))

    async def admit(self, message: SteerMessage) -> None:
        self.run.admitted.append((self.number, message.id))
        await self.emit_event("message_admitted", id=message.id)


class SimExecutor:
    """Implements `Executor`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world = process.world
        self._dice = process.world.dice

    async def run(
        self,
        spec: RunSpec,
        events: EventSink,
        steer: SteerInbox,
        cancel: CancelToken,
        host: RunHost,
    ) -> Outcome:
        kind, token, size = spec.assignment.split()
        run = self._world.runs[token]
        is_alone = not self._process.is_working
        self._world.expect(is_alone, self._process.name, "serves two runs:", token)
        self._process.is_working = True
        number = self._world.number()
        self._world.note("begin", token, self._process.name, number)
        run.executions.append(number)
        run.began_s = run.began_s or self._world.loop.time()
        it = Execution(run, int(size), number, events, steer, cancel, host)
        act: Callable[[Execution], Coroutine[Any, Any, Outcome | None]]
        act = getattr(self, f"_{kind}")
        try:
            outcome = await act(it)
        finally:
            self._process.is_working = False
            it.is_over = True
            self._world.note("end", token, self._process.name, number)
        return outcome or completed(f"{kind}: {token}")

    # --- well-behaved executors

    async def _echo(self, it: Execution) -> Outcome | None:
        for _ in range(it.size):
            if it.cancel.is_set():
                return CANCELLED
            await it.emit_event(
                self._dice.choice(("token", "token", "tool_start", "runner_progress"))
            )
            await asyncio.sleep(self._dice.choice((0, 0, 0.01, 0.05)))
        return None

    async def _mute(self, it: Execution) -> Outcome | None:
        await asyncio.sleep(self._dice.choice((0, 1, 10)))
        return None

    async def _slow(self, it: Execution) -> Outcome | None:
        for _ in range(it.size):
            if it.cancel.is_set():
                return CANCELLED
            await it.emit_event("token")
            for message in it.steer.take_nowait():
                await it.admit(message)
            await asyncio.sleep(self._dice.choice((0.1, 5, 12)))
        return None

    async def _flood(self, it: Execution) -> Outcome | None:
        for n in range(it.size * self._dice.choice((3, 3, 3, 3, 3, 60))):
            await it.emit_event(("token", "runner_progress")[n % 2] if n % 10 else "tool_start")
        return None

    async def _ask(self, it: Execution) -> Outcome | None:
        await it.emit_event("tool_start")
        async with asyncio.TaskGroup() as asks:
            for n in range(1 + it.size % 3):
                asks.create_task(self._ask_one(it, f"{it.run.token}/{it.number}.{n}"))
        await it.emit_event("tool_end")
        return None

    async def _ask_one(self, it: Execution, name: str) -> None:
        deadline = format_time(self._world.clock.now_s() + ASK_S)
        approved = await it.ask(
            {"tool_name": "Bash", "permission": "x", "resource": name, "deadline": deadline}
        )
        self._world.note("answer", name, approved)
        it.run.received_answers.append((name, approved))

    async def _call(self, it: Execution) -> Outcome | None:
        for n in range(1 + it.size % 3):
            name = f"{it.run.token}/{it.number}.{n}"
            try:
                done = await it.host.call({"op": "list", "name": name}, name)
                self._world.expect(done == {"did": name}, name, "was answered with", done)
            except HostCallFailed:
                await it.emit_event("tool_error")
        return None

    async def _steer(self, it: Execution) -> Outcome | None:
        await it.emit_event("tool_start")
        while True:
            message = await it.steer.next()
            await it.admit(message)
            if message.text == ENOUGH:
                return None

    async def _cling(self, it: Execution) -> Outcome | None:
        """End well, but leave a task that keeps emitting."""
        await it.emit_event("tool_start")
        left_over = self._process.start(self._keep_emitting(it), "left over")
        self._process.left_over.append(left_over)
        await asyncio.sleep(self._dice.choice((0, 0, 0.001, 1)))
        return None

    async def _keep_emitting(self, it: Execution) -> None:
        ended_s = 0.0
        for n in range(12):
            now_s = self._world.loop.time()
            ended_s = ended_s or (now_s if it.is_over else 0.0)
            is_late = ended_s and now_s > ended_s + 1
            try:
                await it.emit_event(self._dice.choice(("token", "tool_start")))
                self._world.expect(not is_late, it.run.token, "emitted after its end")
            except RunEnded:
                pass
            name = f"{it.run.token}/{it.number}.late{n}"
            if self._dice.random() < 0.2 and await it.ask({"resource": name}):
                self._world.expect(not is_late, it.run.token, "was allowed after its end")
            await asyncio.sleep(self._dice.choice((0, 0, 0.01, 3)))

    # --- misbehaving executors

    async def _crash(self, it: Execution) -> Outcome | None:
        for _ in range(it.size % 3):
            await it.emit_event("tool_start")
        raise RuntimeError("boom")

    async def _die(self, it: Execution) -> Outcome | None:
        for _ in range(it.size % 3):
            await it.emit_event("tool_start")
            await asyncio.sleep(self._dice.choice((0, 0.1)))
        self._process.end()
        await asyncio.sleep(0)
        raise AssertionError("it is dead")

    async def _hang(self, it: Execution) -> Outcome | None:
        await it.cancel.wait()
        return CANCELLED

    async def _deaf(self, it: Execution) -> Outcome | None:
        """Ignore cancels, for a while or forever."""
        await it.emit_event("tool_start")
        ends_s = self._world.loop.time() + self._dice.choice((2, 5, 20, 1e6))
        while self._process.is_alive and (left_s := ends_s - self._world.loop.time()) > 0:
            try:
                await asyncio.sleep(left_s)
            except asyncio.CancelledError:
                if not self._process.is_alive:
                    raise
        return None
