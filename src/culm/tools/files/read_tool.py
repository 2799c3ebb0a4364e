"""The common part of the tools that read files: work in a thread, and errors as results."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import msgspec

from culm.model.base import ToolSpec
from culm.tools.arguments import InvalidArguments, parse_arguments
from culm.tools.base import CallPlan, CallRequest, CallResult
from culm.tools.files.file_executor import FileExecutor, StopFlag
from culm.tools.files.paths import PathTarget
from culm.tools.files.read_access import FileAccess, ReadAccess, check_read, reading_action
from culm.tools.files.read_stamps import ReadResult, note_read
from culm.tools.files.safe_open import OpenRefused
from culm.tools.search.patterns import BadPattern
from culm.wire.runs import CrashPolicy

A = TypeVar("A", bound=msgspec.Struct)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReadTool(Generic[A]):
    """A tool that only reads: it may run concurrently, and again after a crash.

    Its path is resolved before approval; the same path is opened afterwards.
    """

    access: FileAccess
    spec: ToolSpec
    arguments: type[A]
    path_of: Callable[[A], str]
    # Runs in a thread; the stamp of a file that was read is stored.
    effect: Callable[[A, PathTarget, StopFlag], CallResult | ReadResult]
    action: Literal["read", "list"] = "read"
    verb: str = "Read"
    path_field: str = "path"
    parallel: bool = True
    crash: CrashPolicy = "again"

    async def prepare(self, call: CallRequest) -> CallPlan | CallResult:
        try:
            arguments = parse_arguments(call.arguments or {}, self.arguments)
        except InvalidArguments as exc:
            return CallResult(f"{call.name}: {exc}", is_error=True)
        found = await run_in_thread(
            self.access.executor, lambda stop: self._inspect(arguments, stop)
        )
        if isinstance(found, CallResult):
            return found
        action = reading_action(call, self.action, self.verb, found, arguments, self.path_field)
        return CallPlan(action, lambda _: self._run(call, arguments, found.target))

    def _inspect(self, arguments: A, stop: StopFlag) -> ReadAccess:
        return check_read(self.access, self.path_of(arguments), stop)

    async def _run(self, call: CallRequest, arguments: A, target: PathTarget) -> CallResult:
        outcome = await run_in_thread(
            self.access.executor, lambda stop: self.effect(arguments, target, stop)
        )
        if isinstance(outcome, CallResult):
            return outcome
        await note_read(self.access, call.session_id, outcome)
        return outcome.result


async def run_in_thread(executor: FileExecutor, job: Callable[[StopFlag], T]) -> T | CallResult:
    """Run `job` in a thread; a refusal becomes a result."""
    try:
        return await executor.run(job)
    except BadPattern as exc:
        return CallResult(f"This pattern cannot be used: {exc}.", is_error=True)
    except OpenRefused as exc:
        return CallResult(str(exc), is_error=True)
    except TimeoutError:
        return CallResult(
            f"The disk did not answer within {executor.wall_s:g} seconds.", is_error=True
        )
