"""The interface of tools: the call, its plan and its result.

A call has two steps. `prepare` looks and resolves and changes nothing; its plan describes the
effect exactly. `permission/` decides in between whether the plan may run. Then `run` carries out
the plan that was shown.
"""

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from msgspec import Struct

from culm.clock import Clock
from culm.ids import Ids
from culm.model.base import ToolSpec
from culm.processes.base import Processes
from culm.store.store import Store
from culm.tools.files.file_executor import FileExecutor
from culm.tools.files.paths import WorkspacePaths
from culm.wire.asks import Question, QuestionRequest, QuestionResponse
from culm.wire.codec import Json, encode
from culm.wire.runs import CrashPolicy

Watch = Callable[[str], None]  # Receives the output of a call while it runs.


class CallRequest(Struct, frozen=True):
    """One complete tool call of a model, and the run it belongs to."""

    id: str  # Unique in its message.
    name: str
    input: str  # JSON text.
    arguments: dict[str, Json] | None  # None if the model did not write a JSON object.
    session_id: str = ""
    run_id: str = ""
    message_id: str = ""


class CallResult(Struct, frozen=True):
    """The result that the model reads; an error is a value, too."""

    content: str
    is_error: bool = False
    metadata: str = ""  # JSON, for clients.
    ends_turn: Literal["end_turn", "denied"] | None = None
    data: str = ""  # An image, in base64 ...
    mime_type: str = ""  # ... of this type.


class ResolvedAction(Struct, frozen=True):
    """The resolved effect of a call: it is judged, shown to people and bound by its digest."""

    tool: str
    name: str  # execute, write, read, list, fetch, download, …
    description: str = ""  # One line for a person.
    path: str = ""  # The directory it affects, absolute and real.
    params: Json = None  # Shown in the dialog of a client; the shapes are those of Crush.
    # The input of the digest: argv, real paths, working directory, contents. Two calls with equal
    # values have the same effect.
    resolved: Json = None
    # It only reads inside the workspace: no approval is needed.
    is_free: bool = False
    paths: tuple[str, ...] = ()  # Every real path it affects, for rules.
    # The simple commands in it that need approval, words joined by blanks: a rule that allows must
    # cover all of them. None if the text does not determine the commands that will run.
    commands: tuple[str, ...] | None = ()
    seen: tuple[str, ...] = ()  # Every command that is known to be in it, for rules that deny.
    # The scope of a lasting grant: it covers another action if it covers all of its entries.
    coverage: tuple[str, ...] = ()
    why: str = ""  # The reason for asking, if it is not obvious.

    @property
    def digest(self) -> str:
        return hashlib.sha256(encode((self.tool, self.name, self.resolved))).hexdigest()


class CallPlan(Struct, frozen=True):
    """A call that can run once it is allowed."""

    action: ResolvedAction
    # Carries out the action. Cancelling it must end it, and everything it started, within seconds.
    run: Callable[[Watch], Awaitable[CallResult]]


class QuestionPlan(Struct, frozen=True):
    """A call that only asks a person questions."""

    questions: Sequence[Question]  # Their ids are assigned when they are asked.
    # Builds the result from the questions and the answers.
    answer: Callable[[QuestionRequest, Sequence[QuestionResponse]], CallResult]
    confirm_title: str = ""
    confirm_description: str = ""


class Tool(Protocol):
    @property
    def spec(self) -> ToolSpec: ...

    @property
    def parallel(self) -> bool:
        """True if it may run concurrently with other calls of the same step."""
        ...

    @property
    def crash(self) -> CrashPolicy: ...

    async def prepare(self, call: CallRequest) -> CallPlan | QuestionPlan | CallResult:
        """Return the plan of a call without carrying it out; a result if it cannot be done."""
        ...


class ToolContext(Struct, frozen=True):
    """Services shared by the tools of one workspace."""

    workspace_id: str
    paths: WorkspacePaths
    executor: FileExecutor
    processes: Processes
    store: Store
    clock: Clock
    ids: Ids
    env: Callable[[], Mapping[str, str]]  # The current environment for processes.
    outputs: Path  # Holds output that is too long for a model; readable without approval.


def free_plan(call: CallRequest, run: Callable[[Watch], Awaitable[CallResult]]) -> CallPlan:
    """Make the plan of a call that needs no approval."""
    action = ResolvedAction(call.name, "use", resolved=dict(call.arguments or {}), is_free=True)
    return CallPlan(action, run)
