"""The arguments of a tool: how a model is told of them, and what it wrote, read once."""

from typing import Annotated, TypeVar, cast

import msgspec

from culm.model.base import ToolSpec
from culm.wire.codec import Json, clean, encode

A = TypeVar("A", bound=msgspec.Struct)

PATH_CHARS_MAX = 4096
PathText = Annotated[str, msgspec.Meta(max_length=PATH_CHARS_MAX)]
FilePath = Annotated[
    PathText,
    msgspec.Meta(min_length=1, description="The file; relative paths are in the workspace."),
]


class InvalidArguments(Exception):
    """Arguments that a tool cannot take. Says which, and what would be right."""


def parse_arguments(given: dict[str, Json], kind: type[A]) -> A:
    """Read what a model wrote; raises `BadArguments`.

    Models write numbers as text and null for what they leave out; both are taken as meant.
    """
    try:
        return msgspec.convert(_without_nulls(given), kind, strict=False)
    except msgspec.ValidationError as exc:
        problem, _, place = str(exc).partition(" - at `$.")
        place = place.rstrip("`")
        about = _properties(kind).get(place.split("[")[0].split(".")[0], {})
        right = f" - {place}: {about['description']}" if about else ""
        raise InvalidArguments(f"{clean(problem)}{right}") from exc
    except ValueError as exc:  # Text with half a surrogate pair has no UTF-8.
        raise InvalidArguments(f"an argument cannot be read: {clean(str(exc))}") from exc


def _without_nulls(value: Json) -> Json:
    if isinstance(value, dict):
        fields = cast("dict[str, Json]", value)
        return {k: _without_nulls(inner) for k, inner in fields.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in cast("list[Json]", value)]
    return value


def make_spec(name: str, description: str, kind: type[msgspec.Struct]) -> ToolSpec:
    """The tool as a model is told of it; its schema says what `kind` takes."""
    required = [field.name for field in msgspec.structs.fields(kind) if field.required]
    parameters: dict[str, Json] = {"type": "object", "properties": _properties(kind)}
    return ToolSpec(name, description, {**parameters, "required": required})


def _properties(kind: type[msgspec.Struct]) -> dict[str, dict[str, Json]]:
    _, components = msgspec.json.schema_components([kind])
    properties = _written_out(components[kind.__name__]["properties"], components)
    return cast("dict[str, dict[str, Json]]", properties)


def _written_out(schema: Json, components: dict[str, Json]) -> Json:
    """The schema with every reference replaced by what it means: not every model follows one."""
    if isinstance(schema, dict):
        named = cast("dict[str, Json]", schema)
        reference = named.get("$ref")
        if isinstance(reference, str):
            meant = dict(components[reference.rpartition("/")[2]])
            meant.pop("title", None)
            return _written_out(
                {**meant, **{k: v for k, v in named.items() if k != "$ref"}}, components
            )
        return {name: _written_out(value, components) for name, value in named.items()}
    if isinstance(schema, list):
        return [_written_out(value, components) for value in cast("list[Json]", schema)]
    return schema


def metadata(**fields: str | int | bool | None) -> str:
    """What clients show beside a result, as JSON; what is None is not known."""
    return encode({k: value for k, value in fields.items() if value is not None}).decode()
