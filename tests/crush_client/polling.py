"""Polling of a TUI and its intervals (crush-wire §13.6)."""

from tests.crush_client.calls import Calls
from tests.crush_client.golang import mapping, texts

ROUND_EVERY_S, QUEUE_EVERY_S, LSPS_EVERY_S = 0.5, 2.0, 5.0


class Polling:
    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._screen = calls.screen
        self._last_s: dict[str, float] = {}

    async def agent(self) -> None:
        """Poll once: the agent up to three times, then the skip flag."""
        calls, screen = self._calls, self._screen
        screen.is_ready = await calls.flag(35, "is_ready")
        screen.is_busy = screen.is_ready and await calls.flag(35, "is_busy")
        if screen.is_ready:
            await calls.attempt(35)  # For the model's name.
        screen.skip = await calls.flag(30, "skip")

    async def queue(self) -> None:
        await self._calls.attempt(35)
        if self._screen.session_id:
            found = await self._calls.attempt(42, [], sid=self._screen.session_id)
            self._screen.queue = texts(found)

    async def lsps(self) -> None:
        for name in mapping(await self._calls.attempt(26, {})):
            await self._calls.attempt(27, {}, lsp=name)

    async def mcp(self) -> None:
        await self._calls.attempt(63, {})
        await self._calls.attempt(64, [])

    async def after_change(self) -> None:
        """Poll after a prompt, a cancel or a load."""
        await self.agent()
        await self.queue()

    async def tick(self, now_s: float) -> None:
        """Poll what is due, after any message in the UI loop."""
        for call, every_s in (
            (self.agent, ROUND_EVERY_S),
            (self.queue, QUEUE_EVERY_S),
            (self.lsps, LSPS_EVERY_S),
        ):
            if now_s - self._last_s.get(call.__name__, -every_s) >= every_s:
                self._last_s[call.__name__] = now_s
                await call()
