"""A model with scripted answers, for simulations: without a network and without its own clock.

Pauses use the event loop, so under a virtual clock they take no time.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from copy import deepcopy

from culm.errors import ModelFailed
from culm.model.base import ModelEvent, ModelRequest

Step = ModelEvent | float | BaseException  # An event, a pause in seconds, or an exception to raise.
Answer = Sequence[Step]
Script = Sequence[Answer] | Callable[[ModelRequest], Answer]


class ScriptedModel:
    """Gives its answers in order, one per request, or calls `script` for each.

    An answer without `AnswerDone` at its end is a stream that was cut.
    """

    def __init__(self, script: Script) -> None:
        self.requests: list[ModelRequest] = []  # Copies, as they were when they arrived.
        self._script = script

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        """Play the next answer; raises `ModelFailed` if no answer is left."""
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
