"""A model that says what it was told to say, for simulations: no network and no clock of its own.

Pauses are the event loop's, so under a virtual clock they take no time.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from copy import deepcopy

from culm.errors import ModelFailed
from culm.model.base import ModelEvent, ModelRequest

Step = ModelEvent | float | BaseException  # An event, a pause in seconds, or what to raise.
Answer = Sequence[Step]
Script = Sequence[Answer] | Callable[[ModelRequest], Answer]


class ScriptedModel:
    """Gives its answers in order, one a request, or asks `script` for each.

    An answer without `Done` at its end is a stream that was cut: it just stops.
    """

    def __init__(self, script: Script) -> None:
        self.requests: list[ModelRequest] = []  # As they were when they were made.
        self._script = script

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        """Play the next answer; raises `ModelFailed` if there is none left."""
        answer = self._next(request)
        for step in answer:
            if isinstance(step, BaseException):
                raise step
            if isinstance(step, float | int):
                await asyncio.sleep(step)
            else:
                yield step

    def _next(self, request: ModelRequest) -> Answer:
        number = len(self.requests)
        self.requests.append(deepcopy(request))
        if callable(self._script):
            return self._script(request)
        if number >= len(self._script):
            raise ModelFailed(
                "The script has ended",
                f"this is request {number + 1}, but the script has {len(self._script)} answers",
            )
        return self._script[number]
