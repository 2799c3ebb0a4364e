"""Building blocks for tests of runs: scripts, a clock to wait on, tools that record calls."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field

from culm.model.base import ToolSpec
from culm.run.limits import JITTER
from culm.testing.script import Reply, ReplyRule, Script, ScriptedCall
from culm.tools.base import CallPlan, CallRequest, CallResult, ResolvedAction, free_plan
from culm.wire.codec import Json
from culm.wire.runs import CrashPolicy
from tests.flow.drive import until
from tests.support import FakeClock, FakeTimer

TITLE = ReplyRule(when="Write a title", reply=Reply(text="A title"))
SUMMARY = "Summarize this conversation"  # The system prompt of a summary starts with this.


def script(*replies: Reply, rules: Iterable[ReplyRule] = (), then: str = "Fine.") -> Script:
    """These replies in order, then `then` for every other request; titles separately."""
    return Script(list(replies), [TITLE, *rules], Reply(text=then))


def calling(*names: str, text: str = "", **inputs: Json) -> Reply:
    """A reply that calls these tools, each with the same input."""
    return Reply(text=text, calls=[ScriptedCall(name=name, input=inputs) for name in names])


# --- time


class WaitableClock(FakeClock):
    """A fake clock on which a test can wait for a timer to be set."""

    def __init__(self, now_s: float = 1_800_000_000.0) -> None:
        super().__init__(now_s)
        self._asked: list[tuple[float, FakeTimer]] = []

    def call_later(self, delay_s: float, action: Callable[[], None]) -> FakeTimer:
        timer = super().call_later(delay_s, action)
        self._asked.append((delay_s, timer))
        return timer

    def is_armed(self, delay_s: float) -> bool:
        """Return True if a model retry waits for `delay_s` plus jitter."""
        return any(self._retries(delay_s))

    def _retries(self, delay_s: float) -> Iterator[float]:
        longest_s = delay_s * (1 + JITTER)
        by_chance = (asked_s for asked_s in self._waiting() if not asked_s.is_integer())
        return (asked_s for asked_s in by_chance if delay_s < asked_s <= longest_s)

    def _waiting(self) -> Iterator[float]:
        """The delays of all pending timers."""
        now_s = self.monotonic_s()
        for asked_s, timer in self._asked:
            if timer.at_s > now_s and not timer.cancelled:
                yield asked_s

    async def pass_pause(self, delay_s: float) -> None:
        """Wait until a timer of exactly `delay_s` is set, then advance by that time."""
        await until(lambda: delay_s in self._waiting())
        self.advance(delay_s)

    async def pass_retry(self, delay_s: float, *, less_s: float = 0.0) -> None:
        """Like `pass_pause`, for the pause before a model retry."""
        await until(lambda: self.is_armed(delay_s))
        self.advance(next(self._retries(delay_s)) - less_s)


# --- tools


@dataclass(eq=False)
class Probe:
    """A tool that records its calls and then runs `effect`."""

    name: str
    effect: Callable[[CallRequest], Awaitable[CallResult]] | None = None
    parallel: bool = False
    crash: CrashPolicy = "ask"
    asks: bool = False  # Needs permission.
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
    """An effect that waits for `release`; a cancel ends it."""

    def __init__(self) -> None:
        self.inside = 0
        self.inside_max = 0  # The most calls inside at once.
        self._open = asyncio.Event()

    def release(self) -> None:
        self._open.set()

    async def pass_through(self, call: CallRequest) -> CallResult:
        self.inside += 1
        self.inside_max = max(self.inside_max, self.inside)
        try:
            await self._open.wait()
            return CallResult(f"{call.name} passed")
        finally:
            self.inside -= 1

    async def clean_up_slowly(self, call: CallRequest) -> CallResult:
        """Wait until cancelled, and then until released."""
        self.inside += 1
        try:
            await asyncio.Event().wait()
        finally:
            await self._open.wait()
            self.inside -= 1
        return CallResult("never")

    async def answer_when_cancelled(self, call: CallRequest) -> CallResult:
        """Like `pass_through`, but return a partial result when cancelled."""
        try:
            return await self.pass_through(call)
        except asyncio.CancelledError:
            return CallResult("this much was done")

    async def ignore_cancel(self, call: CallRequest) -> CallResult:
        """Like `pass_through`, but ignore cancels."""
        self.inside += 1
        while not self._open.is_set():
            try:
                await self._open.wait()
            except asyncio.CancelledError:
                continue
        return CallResult(f"{call.name} was deaf")
