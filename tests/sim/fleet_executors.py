"""What simulated workers do with an assignment: `<kind> <token> <size>`. Some of it is not nice."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

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
from culm.fleet.times import format_time
from culm.wire.codec import Json
from tests.sim.fleet_world import Process, SimRun

ASK_S = 60.0  # An answer that takes longer comes too late.
ENOUGH = "enough"  # Said to a run that waits for steering.


@dataclass
class Execution:
    """One time that an assignment was worked on."""

    run: SimRun
    size: int
    number: int
    events: EventSink
    steer: SteerInbox
    cancel: CancelToken
    host: RunHost
    told: int = 0
    is_over: bool = False  # It has returned.

    async def ask(self, body: Mapping[str, Json]) -> bool:
        """Whether it may; that nobody decided is a no, too."""
        try:
            return await self.host.ask(body)
        except ApprovalUnavailable:
            return False

    async def tell(self, kind: str, **more: str) -> None:
        self.told += 1
        event = {"type": kind, "by": self.number, "n": self.told, "token": self.run.token, **more}
        await self.events.emit(event)
        self.run.emitted.append((self.number, self.told, kind))

    async def admit(self, said: SteerMessage) -> None:
        self.run.admitted.append((self.number, said.id))
        await self.tell("message_admitted", id=said.id)


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

    # --- who does well

    async def _echo(self, it: Execution) -> Outcome | None:
        for _ in range(it.size):
            if it.cancel.is_set():
                return CANCELLED
            await it.tell(self._dice.choice(("token", "token", "tool_start", "runner_progress")))
            await asyncio.sleep(self._dice.choice((0, 0, 0.01, 0.05)))
        return None

    async def _mute(self, it: Execution) -> Outcome | None:
        await asyncio.sleep(self._dice.choice((0, 1, 10)))
        return None

    async def _slow(self, it: Execution) -> Outcome | None:
        for _ in range(it.size):
            if it.cancel.is_set():
                return CANCELLED
            await it.tell("token")
            for said in it.steer.take_nowait():
                await it.admit(said)
            await asyncio.sleep(self._dice.choice((0.1, 5, 12)))
        return None

    async def _flood(self, it: Execution) -> Outcome | None:
        for n in range(it.size * self._dice.choice((3, 3, 3, 3, 3, 60))):
            await it.tell(("token", "runner_progress")[n % 2] if n % 10 else "tool_start")
        return None

    async def _ask(self, it: Execution) -> Outcome | None:
        await it.tell("tool_start")
        async with asyncio.TaskGroup() as asks:
            for n in range(1 + it.size % 3):
                asks.create_task(self._ask_one(it, f"{it.run.token}/{it.number}.{n}"))
        await it.tell("tool_end")
        return None

    async def _ask_one(self, it: Execution, name: str) -> None:
        deadline = format_time(self._world.clock.now_s() + ASK_S)
        approved = await it.ask(
            {"tool_name": "Bash", "permission": "x", "resource": name, "deadline": deadline}
        )
        self._world.note("heard", name, approved)
        it.run.heard.append((name, approved))

    async def _call(self, it: Execution) -> Outcome | None:
        for n in range(1 + it.size % 3):
            name = f"{it.run.token}/{it.number}.{n}"
            try:
                done = await it.host.call({"op": "list", "name": name}, name)
                self._world.expect(done == {"did": name}, name, "was answered with", done)
            except HostCallFailed:
                await it.tell("tool_error")
        return None

    async def _steer(self, it: Execution) -> Outcome | None:
        await it.tell("tool_start")
        while True:
            said = await it.steer.next()
            await it.admit(said)
            if said.text == ENOUGH:
                return None

    async def _cling(self, it: Execution) -> Outcome | None:
        """It ends well; what it started does not, and goes on talking."""
        await it.tell("tool_start")
        left_over = self._process.start(self._go_on_talking(it), "left over")
        self._process.left_over.append(left_over)
        await asyncio.sleep(self._dice.choice((0, 0, 0.001, 1)))
        return None

    async def _go_on_talking(self, it: Execution) -> None:
        ended_s = 0.0
        for n in range(12):
            now_s = self._world.loop.time()
            ended_s = ended_s or (now_s if it.is_over else 0.0)
            is_late = ended_s and now_s > ended_s + 1
            try:
                await it.tell(self._dice.choice(("token", "tool_start")))
                self._world.expect(not is_late, it.run.token, "was heard after its end")
            except RunEnded:
                pass
            name = f"{it.run.token}/{it.number}.late{n}"
            if self._dice.random() < 0.2 and await it.ask({"resource": name}):
                self._world.expect(not is_late, it.run.token, "was allowed after its end")
            await asyncio.sleep(self._dice.choice((0, 0, 0.01, 3)))

    # --- who does not

    async def _crash(self, it: Execution) -> Outcome | None:
        for _ in range(it.size % 3):
            await it.tell("tool_start")
        raise RuntimeError("boom")

    async def _die(self, it: Execution) -> Outcome | None:
        for _ in range(it.size % 3):
            await it.tell("tool_start")
            await asyncio.sleep(self._dice.choice((0, 0.1)))
        self._process.end()
        await asyncio.sleep(0)
        raise AssertionError("it is dead")

    async def _hang(self, it: Execution) -> Outcome | None:
        await it.cancel.wait()
        return CANCELLED

    async def _deaf(self, it: Execution) -> Outcome | None:
        """Does not want to end, for a while or for ever."""
        await it.tell("tool_start")
        ends_s = self._world.loop.time() + self._dice.choice((2, 5, 20, 1e6))
        while self._process.is_alive and (left_s := ends_s - self._world.loop.time()) > 0:
            try:
                await asyncio.sleep(left_s)
            except asyncio.CancelledError:
                if not self._process.is_alive:
                    raise
        return None
