"""The shape of an interface: routes, fields, types and defaults, without prose and type names.

Read from the generated documents in `docs/`, which other tests compare with the code. Renaming a
class changes those documents and not the shape.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from tests.frozen.storage import Json, parse_json

DOCS = Path(__file__).parents[2] / "docs"
_PROSE = ("description", "title", "examples", "default", "type")


def api_text() -> str:
    """Return every route with its input and answers, and every event."""
    document = parse_json((DOCS / "openapi.json").read_text())
    reader = _Reader(document)
    sections: list[str] = []
    for path, methods in _object(document["paths"]).items():
        for method, operation in _object(methods).items():
            lines = sorted(reader.operation(_object(operation)))
            sections.append("\n".join([f"=== {method.upper()} {path}", *lines]))
    for name, schema in _object(document["x-events"]).items():
        lines = sorted(reader.fields("", schema))
        sections.append("\n".join([f"=== event {name}", *lines]))
    return "\n\n".join(sections) + "\n"


def run_lines_text() -> str:
    """Return the fields of every line of `--json`."""
    document = parse_json((DOCS / "run-lines.schema.json").read_text())
    return "\n".join(sorted(_Reader(document).fields("", document))) + "\n"


class _Reader:
    """Resolves the references of one document."""

    def __init__(self, document: dict[str, Json]) -> None:
        self._document = document

    def operation(self, operation: dict[str, Json]) -> Iterator[str]:
        for each in _list(operation.get("parameters", [])):
            parameter = _object(each)
            mark = "" if parameter.get("required") else "?"
            yield from self.fields(
                f"{parameter['in']} {parameter['name']}{mark}", parameter["schema"]
            )
        body = _object(operation.get("requestBody", {}))
        for kind, content in _object(body.get("content", {})).items():
            yield from self.fields(f"takes {_kind(kind)}", _object(content)["schema"])
        for status, answer in _object(operation["responses"]).items():
            yield f"answers {status}"
            for kind, content in _object(_object(answer).get("content", {})).items():
                path = f"answers {status} {_kind(kind)}"
                yield from self.fields(path, _object(content)["schema"])

    def fields(self, path: str, schema: Json, above: frozenset[str] = frozenset()) -> Iterator[str]:
        """Yield one line for each value that is not an object or a list of them."""
        found = _object(schema)
        if "$ref" in found:
            reference = str(found["$ref"])
            if reference in above:
                yield f"{path}: as above"
            else:
                yield from self.fields(path, self._resolve(reference), above | {reference})
            return
        default = f" = {_short(found['default'])}" if "default" in found else ""
        choices = found.get("anyOf") or found.get("oneOf")
        if choices:
            for choice in _list(choices):
                yield from self.fields(f"{path}{self._tag(choice)}", choice, above)
            if default:
                yield f"{path}:{default}"
        elif "properties" in found:
            required = _list(found.get("required", []))
            for name, inner in _object(found["properties"]).items():
                yield from self.fields(
                    f"{path}.{name}{'' if name in required else '?'}", inner, above
                )
            if default:
                yield f"{path}:{default}"
        elif "items" in found:
            yield from self.fields(f"{path}[]", found["items"], above)
            if default:
                yield f"{path}:{default}"
        elif isinstance(found.get("additionalProperties"), dict):
            yield from self.fields(f"{path}{{}}", found["additionalProperties"], above)
        else:
            rest = {key: value for key, value in found.items() if key not in _PROSE}
            more = f" {_short(rest)}" if rest else ""
            yield f"{path}: {found.get('type', 'any')}{more}{default}"

    def _tag(self, choice: Json) -> str:
        """Return the tag of an object in a union, if there is one."""
        found = _object(choice)
        if "$ref" in found:
            found = _object(self._resolve(str(found["$ref"])))
        kind = _object(_object(found.get("properties", {})).get("type", {}))
        tags = _list(kind.get("enum", [])) or ([kind["const"]] if "const" in kind else [])
        return f"<{tags[0]}>" if len(tags) == 1 else ""

    def _resolve(self, reference: str) -> Json:
        value: Json = self._document
        for step in reference.removeprefix("#/").split("/"):
            value = _object(value)[step.replace("~1", "/").replace("~0", "~")]
        return value


def _kind(content_type: str) -> str:
    return "" if content_type == "application/json" else f"{content_type} "


def _short(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _object(value: Json) -> dict[str, Json]:
    assert isinstance(value, dict), value
    return value


def _list(value: Json) -> list[Json]:
    assert isinstance(value, list), value
    return value
