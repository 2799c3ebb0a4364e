"""How many agents of one tree work at once. Whoever waits for others does not work meanwhile.

That is why nobody can wait for ever: an agent that waits for its children has given its slot up,
and when it goes on it takes one without waiting, so for a moment there may be more.
"""

import asyncio
from collections import deque


class AgentSlots:
    """Of one tree. First come, first served."""

    def __init__(self, slots_max: int) -> None:
        self._max = slots_max
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def is_full(self) -> bool:
        return self._taken >= self._max

    async def acquire(self) -> None:
        """Wait for one. To cancel this takes none."""
        if self._taken < self._max and not self._waiting:
            self._taken += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()  # It was given to us in the same moment.
            raise

    def reacquire(self) -> None:
        """Whoever waited for others goes on."""
        self._taken += 1

    def leave(self) -> None:
        self._taken -= 1
        while self._waiting and self._taken < self._max:
            turn = self._waiting.popleft()
            if not turn.done():
                self._taken += 1
                turn.set_result(None)
