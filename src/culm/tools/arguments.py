"""The arguments of a tool: their schema for the model, and parsing of the values it wrote."""

from typing import Annotated, TypeVar, cast

import msgspec

from culm.model.base import ToolSpec
from culm.wire.codec import Json, clean, encode
from culm.wire.tools import ToolFacts

A = TypeVar("A", bound=msgspec.Struct)

PATH_CHARS_MAX = 4096
PathText = Annotated[str, msgspec.Meta(max_length=PATH_CHARS_MAX)]
FilePath = Annotated[
    PathText,
    msgspec.Meta(min_length=1, description="The file; relative paths are in the workspace."),
]


class InvalidArguments(Exception):
    """Arguments that a tool does not accept. Names the argument and the expected value."""


def parse_arguments(arguments: dict[str, Json], kind: type[A]) -> A:
    """Parse the arguments that a model wrote; raises `InvalidArguments`.

    Models write numbers as text and null for omitted arguments; both are accepted.
    """
    try:
        return msgspec.convert(_without_nulls(arguments), kind, strict=False)
    except msgspec.ValidationError as exc:
        problem, _, where = str(exc).partition(" - at `$.")
        where = where.rstrip("`")
        about = _properties(kind).get(where.split("[")[0].split(".")[0], {})
        right = f" - {where}: {about['description']}" if about else ""
        raise InvalidArguments(f"{clean(problem)}{right}") from exc
    except ValueError as exc:  # Text with an unpaired surrogate cannot be encoded.
        raise InvalidArguments(f"an argument cannot be read: {clean(str(exc))}") from exc


def _without_nulls(value: Json) -> Json:
    if isinstance(value, dict):
        fields = cast("dict[str, Json]", value)
        return {k: _without_nulls(inner) for k, inner in fields.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in cast("list[Json]", value)]
    return value


def make_spec(
    name: str, description: str, arguments: type[msgspec.Struct], facts: ToolFacts
) -> ToolSpec:
    """Make the description of a tool, with the schema of its `arguments`."""
    required = [field.name for field in msgspec.structs.fields(arguments) if field.required]
    parameters: dict[str, Json] = {"type": "object", "properties": _properties(arguments)}
    return ToolSpec(name, description, {**parameters, "required": required}, facts)


def _properties(kind: type[msgspec.Struct]) -> dict[str, dict[str, Json]]:
    _, components = msgspec.json.schema_components([kind])
    properties = _inline_references(components[kind.__name__]["properties"], components)
    return cast("dict[str, dict[str, Json]]", properties)


def _inline_references(schema: Json, components: dict[str, Json]) -> Json:
    """Replace every reference in a schema by its definition: not every model follows one."""
    if isinstance(schema, dict):
        named = cast("dict[str, Json]", schema)
        reference = named.get("$ref")
        if isinstance(reference, str):
            target = dict(components[reference.rpartition("/")[2]])
            target.pop("title", None)
            return _inline_references(
                {**target, **{k: v for k, v in named.items() if k != "$ref"}}, components
            )
        return {name: _inline_references(value, components) for name, value in named.items()}
    if isinstance(schema, list):
        return [_inline_references(value, components) for value in cast("list[Json]", schema)]
    return schema


def metadata(**fields: str | int | bool | None) -> str:
    """Encode the data that clients show beside a result as JSON; None values are omitted."""
    return encode({k: value for k, value in fields.items() if value is not None}).decode()
