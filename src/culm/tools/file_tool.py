"""What the file tools have in common: arguments read once, work in a thread, errors in words."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar, cast

import msgspec

from culm.model.base import ToolSpec
from culm.tools.base import Call, Result
from culm.tools.opening import Refused
from culm.tools.patterns import BadPattern
from culm.tools.work import FileWork, Stop
from culm.wire.codec import Json, clean, encode
from culm.wire.runs import CrashPolicy

A = TypeVar("A", bound=msgspec.Struct)

PATH_CHARS_MAX = 4096
PathText = Annotated[str, msgspec.Meta(max_length=PATH_CHARS_MAX)]


class BadArguments(Exception):
    """Arguments that a tool cannot take. Says which, and what would be right."""


@dataclass(frozen=True, slots=True)
class FileTool(Generic[A]):
    """A tool that only reads: it runs beside others, and a crash lets it be repeated."""

    spec: ToolSpec
    arguments: type[A]
    work: FileWork
    effect: Callable[[A, Stop], Result]  # Runs in a thread.
    is_search: bool = False
    parallel: bool = True
    crash: CrashPolicy = "again"

    async def run(self, call: Call) -> Result:
        try:
            arguments = parse_arguments(call.arguments or {}, self.arguments)
            if not self.is_search:
                return await self._run(arguments)
            async with self.work.searches:
                return await self._run(arguments)
        except BadArguments as exc:
            return Result(f"{call.name}: {exc}", is_error=True)
        except BadPattern as exc:
            return Result(f"This pattern cannot be used: {exc}.", is_error=True)
        except Refused as exc:
            return Result(str(exc), is_error=True)
        except TimeoutError:
            text = f"The disk did not answer within {self.work.wall_s:g} seconds."
            return Result(text, is_error=True)

    async def _run(self, arguments: A) -> Result:
        return await self.work.run(lambda stop: self.effect(arguments, stop))


def parse_arguments(given: dict[str, Json], kind: type[A]) -> A:
    """Read what a model wrote; raises `BadArguments`.

    Models write numbers as text and null for what they leave out; both are taken as meant.
    """
    there = {name: value for name, value in given.items() if value is not None}
    try:
        return msgspec.convert(there, kind, strict=False)
    except msgspec.ValidationError as exc:
        problem, _, place = str(exc).partition(" - at `$.")
        field = place.rstrip("`").split("[")[0].split(".")[0]
        about = _properties(kind).get(field, {})
        right = f" - {field}: {about['description']}" if about else ""
        raise BadArguments(f"{clean(problem)}{right}") from exc
    except ValueError as exc:  # Text with half a surrogate pair has no UTF-8.
        raise BadArguments(f"an argument cannot be read: {clean(str(exc))}") from exc


def make_spec(name: str, description: str, kind: type[msgspec.Struct]) -> ToolSpec:
    """The tool as a model is told of it; its schema says what `kind` takes."""
    required = [field.name for field in msgspec.structs.fields(kind) if field.required]
    parameters: dict[str, Json] = {"type": "object", "properties": _properties(kind)}
    return ToolSpec(name, description, {**parameters, "required": required})


def _properties(kind: type[msgspec.Struct]) -> dict[str, dict[str, Json]]:
    _, components = msgspec.json.schema_components([kind])
    return cast("dict[str, dict[str, Json]]", components[kind.__name__]["properties"])


def metadata(**fields: str | int | bool | None) -> str:
    """What clients show beside a result, as JSON; what is None is not known."""
    return encode({k: value for k, value in fields.items() if value is not None}).decode()
