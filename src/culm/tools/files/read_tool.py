"""What the tools that read files have in common: work in a thread, errors in words."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import msgspec

from culm.model.base import ToolSpec
from culm.tools.arguments import BadArguments, parse_arguments
from culm.tools.base import Call, Plan, Result
from culm.tools.files.file_executor import FileWork, Stop
from culm.tools.files.paths import Target
from culm.tools.files.read_access import Ground, Look, look, reading_action
from culm.tools.files.read_stamps import Read, note_read
from culm.tools.files.safe_open import Refused
from culm.tools.search.patterns import BadPattern
from culm.wire.runs import CrashPolicy

A = TypeVar("A", bound=msgspec.Struct)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReadTool(Generic[A]):
    """A tool that only reads: it runs beside others, and a crash lets it be repeated.

    Its path is resolved before anybody is asked; what is opened then is what it led to.
    """

    ground: Ground
    spec: ToolSpec
    arguments: type[A]
    path_of: Callable[[A], str]
    # Runs in a thread; a file that was read comes with its stamp, to be noted.
    effect: Callable[[A, Target, Stop], Result | Read]
    action: Literal["read", "list"] = "read"
    verb: str = "Read"
    path_field: str = "path"
    parallel: bool = True
    crash: CrashPolicy = "again"

    async def prepare(self, call: Call) -> Plan | Result:
        try:
            arguments = parse_arguments(call.arguments or {}, self.arguments)
        except BadArguments as exc:
            return Result(f"{call.name}: {exc}", is_error=True)
        found = await in_words(self.ground.work, lambda stop: self._look(arguments, stop))
        if isinstance(found, Result):
            return found
        action = reading_action(call, self.action, self.verb, found, arguments, self.path_field)
        return Plan(action, lambda _: self._run(call, arguments, found.target))

    def _look(self, arguments: A, stop: Stop) -> Look:
        return look(self.ground, self.path_of(arguments), stop)

    async def _run(self, call: Call, arguments: A, target: Target) -> Result:
        outcome = await in_words(
            self.ground.work, lambda stop: self.effect(arguments, target, stop)
        )
        if isinstance(outcome, Result):
            return outcome
        await note_read(self.ground, call.session_id, outcome)
        return outcome.result


async def in_words(work: FileWork, job: Callable[[Stop], T]) -> T | Result:
    """Do `job` in a thread; what it refuses is a result, too."""
    try:
        return await work.run(job)
    except BadPattern as exc:
        return Result(f"This pattern cannot be used: {exc}.", is_error=True)
    except Refused as exc:
        return Result(str(exc), is_error=True)
    except TimeoutError:
        return Result(f"The disk did not answer within {work.wall_s:g} seconds.", is_error=True)
