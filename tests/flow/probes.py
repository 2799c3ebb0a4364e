"""What a test of runs holds in its hand: scripts, a clock that waits, tools that remember."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field

from culm.model.base import ToolSpec
from culm.run.limits import JITTER
from culm.testing.script import Reply, Rule, Script, ScriptedCall
from culm.tools.base import CallPlan, CallRequest, CallResult, ResolvedAction, free_plan
from culm.wire.codec import Json
from culm.wire.runs import CrashPolicy
from tests.flow.drive import until
from tests.support import FakeClock, FakeTimer

TITLE = Rule(when="Write a title", reply=Reply(text="A title"))
SUMMARY = "Summarize this conversation"  # What the system says to a model that is to do so.


def script(*replies: Reply, rules: Iterable[Rule] = (), then: str = "Fine.") -> Script:
    """These answers in order, then the same one for ever; titles beside them."""
    return Script(list(replies), [TITLE, *rules], Reply(text=then))


def calling(*names: str, text: str = "", **inputs: Json) -> Reply:
    """An answer that calls these tools, each with the same input."""
    return Reply(text=text, calls=[ScriptedCall(name=name, input=inputs) for name in names])


# --- time


class Wound(FakeClock):
    """A clock that can wait for somebody to wait."""

    def __init__(self, now_s: float = 1_800_000_000.0) -> None:
        super().__init__(now_s)
        self._asked: list[tuple[float, FakeTimer]] = []

    def call_later(self, delay_s: float, action: Callable[[], None]) -> FakeTimer:
        timer = super().call_later(delay_s, action)
        self._asked.append((delay_s, timer))
        return timer

    def is_armed(self, delay_s: float) -> bool:
        """Whether somebody waits before asking a model again: so long, and by chance longer."""
        return any(self._retries(delay_s))

    def _retries(self, delay_s: float) -> Iterator[float]:
        longest_s = delay_s * (1 + JITTER)
        by_chance = (asked_s for asked_s in self._waiting() if not asked_s.is_integer())
        return (asked_s for asked_s in by_chance if delay_s < asked_s <= longest_s)

    def _waiting(self) -> Iterator[float]:
        """How long those who wait asked for."""
        now_s = self.now_s()
        for asked_s, timer in self._asked:
            if timer.at_s > now_s and not timer.cancelled:
                yield asked_s

    async def pass_pause(self, delay_s: float) -> None:
        """Wait until somebody has begun to wait for just so long, and let that time pass."""
        await until(lambda: delay_s in self._waiting())
        self.advance(delay_s)

    async def pass_retry(self, delay_s: float, *, less_s: float = 0.0) -> None:
        """As `pass_pause`, for the pause before a model is asked again."""
        await until(lambda: self.is_armed(delay_s))
        self.advance(next(self._retries(delay_s)) - less_s)


# --- tools


@dataclass(eq=False)
class Probe:
    """A tool that remembers its calls; what else it does is `effect`'s."""

    name: str
    effect: Callable[[CallRequest], Awaitable[CallResult]] | None = None
    parallel: bool = False
    crash: CrashPolicy = "ask"
    asks: bool = False  # Somebody has to allow it.
    calls: list[CallRequest] = field(default_factory=list[CallRequest])

    @property
    def spec(self) -> ToolSpec:
        return ToolSpec(self.name, f"Does {self.name}.", {"type": "object", "properties": {}})

    async def prepare(self, call: CallRequest) -> CallPlan:
        if not self.asks:
            return free_plan(call, lambda _: self.run(call))
        action = ResolvedAction(
            tool=self.name,
            name="execute",
            description=f"Do {self.name}",
            path="/",
            params=dict(call.arguments or {}),
            resolved=dict(call.arguments or {}),
            coverage=(f"{self.name} grain",),
        )
        return CallPlan(action, lambda _: self.run(call))

    async def run(self, call: CallRequest) -> CallResult:
        self.calls.append(call)
        if self.effect is None:
            return CallResult(f"{self.name} {len(self.calls)}")
        return await self.effect(call)


class Gate:
    """An effect that lasts until `release`; a cancel ends it like any tool."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0  # That were inside at once.
        self._open = asyncio.Event()

    def release(self) -> None:
        self._open.set()

    async def pass_through(self, call: CallRequest) -> CallResult:
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await self._open.wait()
            return CallResult(f"{call.name} passed")
        finally:
            self.inside -= 1

    async def clean_up_slowly(self, call: CallRequest) -> CallResult:
        """Last until cancelled, and then until released."""
        self.inside += 1
        try:
            await asyncio.Event().wait()
        finally:
            await self._open.wait()
            self.inside -= 1
        return CallResult("never")

    async def answer_a_cancel(self, call: CallRequest) -> CallResult:
        """As `pass_through`, but a cancel makes it say what it has so far."""
        try:
            return await self.pass_through(call)
        except asyncio.CancelledError:
            return CallResult("this much was done")

    async def be_deaf(self, call: CallRequest) -> CallResult:
        """As `pass_through`, and a cancel is not heard."""
        self.inside += 1
        while not self._open.is_set():
            try:
                await self._open.wait()
            except asyncio.CancelledError:
                continue
        return CallResult(f"{call.name} was deaf")
