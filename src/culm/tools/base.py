"""The seam towards tools: what one is called with, what it answers, and what a crash may mean."""

from dataclasses import dataclass
from typing import Literal, Protocol

from culm.model.base import ToolSpec
from culm.wire.codec import Json
from culm.wire.runs import CrashPolicy


@dataclass(frozen=True, slots=True)
class Call:
    """One complete call of a model."""

    id: str  # Unique in its message.
    name: str
    input: str  # JSON text.
    arguments: dict[str, Json] | None  # None if the model did not write a JSON object.


@dataclass(frozen=True, slots=True)
class Result:
    """What the model reads; an error is a value, too."""

    content: str
    is_error: bool = False
    metadata: str = ""  # JSON, for clients.
    ends_turn: Literal["end_turn", "denied"] | None = None


class Tool(Protocol):
    @property
    def spec(self) -> ToolSpec: ...

    @property
    def parallel(self) -> bool:
        """Whether it may run beside other calls of the same step."""
        ...

    @property
    def crash(self) -> CrashPolicy: ...

    async def run(self, call: Call) -> Result:
        """Do it. Cancelling it must end it, and everything it started, within seconds."""
        ...
