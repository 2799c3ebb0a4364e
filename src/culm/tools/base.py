"""The seam towards tools: what one is called with, what it plans, what it answers.

A call goes through two steps. `prepare` looks and resolves, and changes nothing: it says what would
happen. Whether that may happen is decided in between, by `permission/`. Then the plan is carried
out, and what it does is what was shown.
"""

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from culm.model.base import ToolSpec
from culm.wire.asks import Question, QuestionRequest, QuestionResponse
from culm.wire.codec import Json, encode
from culm.wire.runs import CrashPolicy

Watch = Callable[[str], None]  # Told what a call puts out while it goes on.


@dataclass(frozen=True, slots=True)
class CallRequest:
    """One complete call of a model, and for whom it is made."""

    id: str  # Unique in its message.
    name: str
    input: str  # JSON text.
    arguments: dict[str, Json] | None  # None if the model did not write a JSON object.
    session_id: str = ""
    run_id: str = ""
    message_id: str = ""


@dataclass(frozen=True, slots=True)
class CallResult:
    """What the model reads; an error is a value, too."""

    content: str
    is_error: bool = False
    metadata: str = ""  # JSON, for clients.
    ends_turn: Literal["end_turn", "denied"] | None = None
    data: str = ""  # An image, in base64 ...
    mime_type: str = ""  # ... of this type.


@dataclass(frozen=True, slots=True)
class ResolvedAction:
    """What a call will do, resolved: this is judged, shown to people and bound by its digest."""

    tool: str
    name: str  # execute, write, read, list, fetch, download, …
    description: str = ""  # One line for a person.
    path: str = ""  # The directory it is about, absolute and real.
    params: Json = None  # What a client's dialog shows; crush-wire has the shape of each tool.
    # What the digest is over: argv, real paths, working directory, contents. Two calls with the
    # same do the same.
    resolved: Json = None
    # It reads inside the workspace and nothing else: nobody need be asked.
    is_free: bool = False
    paths: tuple[str, ...] = ()  # Every real path it is about, for rules.
    # The simple commands in it that need consent, words joined by blanks: a rule that allows must
    # cover them all. None if what will run cannot be told from the text.
    commands: tuple[str, ...] | None = ()
    seen: tuple[str, ...] = ()  # Every command that is known to be in it, for rules that deny.
    # What a grant for more than once covers: another action is covered if all its grains are.
    coverage: tuple[str, ...] = ()
    why: str = ""  # Why it is asked for, where that is not plain.

    @property
    def digest(self) -> str:
        return hashlib.sha256(encode((self.tool, self.name, self.resolved))).hexdigest()


@dataclass(frozen=True, slots=True)
class CallPlan:
    """A call that can go ahead, once it may."""

    action: ResolvedAction
    # Does it. Cancelling it must end it, and everything it started, within seconds.
    run: Callable[[Watch], Awaitable[CallResult]] = field(compare=False)


@dataclass(frozen=True, slots=True)
class QuestionPlan:
    """A call that is nothing but questions to a person."""

    questions: Sequence[Question]  # Their ids are made when they are asked.
    # What the model reads, from what was asked and what was answered.
    answer: Callable[[QuestionRequest, Sequence[QuestionResponse]], CallResult] = field(
        compare=False
    )
    confirm_title: str = ""
    confirm_description: str = ""


class Tool(Protocol):
    @property
    def spec(self) -> ToolSpec: ...

    @property
    def parallel(self) -> bool:
        """Whether it may run beside other calls of the same step."""
        ...

    @property
    def crash(self) -> CrashPolicy: ...

    async def prepare(self, call: CallRequest) -> CallPlan | QuestionPlan | CallResult:
        """Say what the call would do, without doing it; a result if it cannot be done."""
        ...


def free_plan(call: CallRequest, run: Callable[[Watch], Awaitable[CallResult]]) -> CallPlan:
    """Of a call that nobody need be asked about."""
    action = ResolvedAction(call.name, "use", resolved=dict(call.arguments or {}), is_free=True)
    return CallPlan(action, run)
