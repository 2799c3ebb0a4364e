"""The OpenAPI document, generated from the types and docstrings of the routes, and its HTML page.

The page has no scripts and loads nothing from another host.
"""

import json
from functools import cache
from html import escape
from http import HTTPStatus
from inspect import cleandoc
from typing import Any, cast, get_args, get_origin

import msgspec
from aiohttp.web_response import Response

from culm import __version__
from culm.server.api import HeadersOnly, Route, is_response
from culm.server.routes import BY_NOUN
from culm.wire.agents import Agent, RawAgent
from culm.wire.codec import Json
from culm.wire.events import PAYLOADS
from culm.wire.examples import EXAMPLES
from culm.wire.messages import Message, RawMessage
from culm.wire.runs import RUN_HEADER
from culm.wire.workspaces import Problem, Snapshot

Schemas = dict[Any, dict[str, Json]]  # By type; each refers to the components of the document.

_REF = "#/components/schemas/{name}"
_ABOUT = """\
One agent server that many clients share. This is the interface of the Crush client, which may
attach unmodified, with additions that it ignores. Absent and null fields of a body are zero values,
field names match regardless of case, and unknown fields are ignored. See docs/api.md for the
rest."""

_PATH_DESCRIPTIONS = {
    "workspace_id": "The id of the workspace.",
    "session_id": "The id of the session.",
    "client_id": "The UUID that the client generated for itself.",
    "run_id": "The id of the run.",
    "grant_id": "The id of the grant.",
    "agent_id": "The id of the agent or of its session.",
    "letter_id": "The id of the letter.",
    "lsp": "The name of the language server.",
}
_PATH_SCHEMAS: dict[str, dict[str, Json]] = {"client_id": {"type": "string", "format": "uuid"}}
# Types that the server forwards as stored JSON, with the types that describe their content.
_DESCRIBED_AS: dict[Any, Any] = {
    list[RawMessage]: list[Message],
    Snapshot[RawMessage]: Snapshot[Message],
    list[RawAgent]: list[Agent],
}


@cache
def document() -> dict[str, Json]:
    hints = {route: route.hints() for routes in BY_NOUN.values() for route in routes}
    kinds = [
        _documented_type(h[name])
        for h in hints.values()
        for name in ("body", "return")
        if name in h
    ]
    kinds += [Problem, *PAYLOADS.values()]
    kinds = [kind for kind in dict.fromkeys(kinds) if kind is not None and _has_schema(kind)]
    made, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    schemas: Schemas = dict(zip(kinds, made, strict=True))
    for schema in components.values():
        if "description" in schema:  # The indentation of docstrings differs between Pythons.
            schema["description"] = cleandoc(schema["description"])
    paths: dict[str, dict[str, Json]] = {}
    for noun, routes in BY_NOUN.items():
        for route in routes:
            operation = _operation(route, hints[route], schemas)
            paths.setdefault(route.path, {})[route.method.lower()] = {"tags": [noun], **operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "culm", "version": __version__, "description": _ABOUT},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],  # A unix socket, or --no-auth, needs no token.
        "x-events": {name: schemas[kind] for name, kind in PAYLOADS.items()},
    }


def _operation(route: Route, hints: dict[str, Any], schemas: Schemas) -> dict[str, Json]:
    operation: dict[str, Json] = {
        "operationId": _operation_id(route),
        "summary": " ".join((route.handler.__doc__ or "").split()),
        "parameters": [*_path_parameters(route), *_query_parameters(hints.get("query"))],
        "responses": {
            str(route.status): _answer(route, _documented_type(hints["return"]), schemas),
            "default": {"description": "Error.", "content": _content(Problem, schemas)},
        },
    }
    if (body := _documented_type(hints.get("body"))) is not None:
        required = body is hints["body"]
        operation["requestBody"] = {"content": _content(body, schemas), "required": required}
    return operation


def _operation_id(route: Route) -> str:
    """The name of the handler. If it serves several paths, the last step is appended."""
    name = cast("str", getattr(route.handler, "__name__"))  # noqa: B009 - a plain function's
    sharing = [r for routes in BY_NOUN.values() for r in routes if r.handler is route.handler]
    return name if len(sharing) == 1 else f"{name}_{route.path.rpartition('/')[2]}"


def _documented_type(kind: Any) -> Any:  # noqa: ANN401 - a type as `get_type_hints` hands it out
    """The type to document: without None, and for stored JSON the type that describes it."""
    others = [arg for arg in get_args(kind) if arg is not type(None)]
    if type(None) in get_args(kind) and len(others) == 1:
        return others[0]
    return _DESCRIBED_AS.get(kind, kind) if kind is not type(None) else None


def _has_schema(kind: Any) -> bool:  # noqa: ANN401
    return kind is not HeadersOnly and not is_response(kind)


def _answer(route: Route, kind: Any, schemas: Schemas) -> dict[str, Json]:  # noqa: ANN401
    phrase = HTTPStatus(route.status).phrase
    if kind is HeadersOnly:
        header = {"description": "The run that was accepted.", "schema": {"type": "string"}}
        description = f"{phrase}, with the run's id in a header."
        return {"description": description, "headers": {RUN_HEADER: header}}
    if kind is None:
        return {"description": f"{phrase}, with an empty body."}
    if is_response(kind):
        media = "text/html" if kind is Response else "text/event-stream"
        return {"description": "Text.", "content": {media: {"schema": {"type": "string"}}}}
    return {"description": phrase, "content": _content(kind, schemas)}


def _content(kind: Any, schemas: Schemas) -> dict[str, Json]:  # noqa: ANN401
    media: dict[str, Json] = {"schema": schemas[kind]}
    example = _example(kind)
    if example is not None:
        media["example"] = msgspec.to_builtins(example)
    return {"application/json": media}


def _example(kind: Any) -> Json:  # noqa: ANN401
    if kind in EXAMPLES:
        return EXAMPLES[kind]
    origin, args = get_origin(kind), get_args(kind)
    if origin is list and (item := _example(args[0])) is not None:
        return [item]
    if origin is dict and (value := _example(args[1])) is not None:
        return {"name": value}
    return None


def _path_parameters(route: Route) -> list[dict[str, Json]]:
    names = [step.strip("{}") for step in route.path.split("/") if step.startswith("{")]
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": _PATH_DESCRIPTIONS[name],
            "schema": _PATH_SCHEMAS.get(name, {"type": "string", "minLength": 1}),
        }
        for name in names
    ]


def _query_parameters(kind: type | None) -> list[dict[str, Json]]:
    if kind is None:
        return []
    _, schemas = msgspec.json.schema_components([kind], ref_template=_REF)
    fields: dict[str, dict[str, Json]] = schemas[kind.__name__]["properties"]
    parameters: list[dict[str, Json]] = []
    for name, schema in fields.items():
        description = schema.pop("description", "")
        if required := "minLength" in schema:
            del schema["default"]
        parameter = {"name": name, "in": "query", "required": required, "schema": schema}
        parameters.append({**parameter, "description": description} if description else parameter)
    return parameters


# --- the page

CONTENT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)

_STYLE = """
:root { color-scheme: light dark; --soft: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 62rem; padding: 1rem; }
h2 { border-bottom: 1px solid var(--soft); margin-top: 2.5rem; text-transform: capitalize; }
details { border-bottom: 1px solid var(--soft); padding: .35rem 0; }
summary { cursor: pointer; }
code, pre { font: 13px/1.4 ui-monospace, monospace; }
pre { background: var(--soft); border-radius: 4px; overflow: auto; padding: .6rem; }
.method { display: inline-block; font-weight: bold; min-width: 4.5rem; }
.note { opacity: .75; }
nav a { margin-right: .8rem; }
table { border-collapse: collapse; } td { padding: .1rem .8rem .1rem 0; vertical-align: top; }
"""


def render_page(document: dict[str, Json]) -> str:
    info = document["info"]
    by_tag: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            piece = _operation_html(method, path, operation)
            by_tag.setdefault(operation["tags"][0], []).append(piece)
    links = "".join(f'<a href="#{tag}">{tag}</a>' for tag in by_tag)
    sections = "".join(f'<h2 id="{t}">{t}</h2>{"".join(pieces)}' for t, pieces in by_tag.items())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>culm {escape(info['version'])}</title><style>{_STYLE}</style></head><body>"
        f"<h1>culm {escape(info['version'])}</h1><p>{escape(info['description'])}</p>"
        f'<nav>{links}<a href="#schemas">types</a><a href="openapi.json">openapi.json</a></nav>'
        f'{sections}<h2 id="schemas">Types</h2>{_schemas_html(document["components"]["schemas"])}'
        "</body></html>\n"
    )


def _operation_html(method: str, path: str, operation: dict[str, Json]) -> str:
    pieces = [_parameters_html(operation["parameters"])]
    if "requestBody" in operation:
        pieces.append(f"<h4>Body</h4>{_content_html(operation['requestBody'])}")
    for status, answer in operation["responses"].items():
        pieces.append(f"<h4>{escape(status)} {escape(answer['description'])}</h4>")
        pieces.append(_content_html(answer))
    return (
        f'<details><summary><code><span class="method">{method.upper()}</span>{escape(path)}</code>'
        f' <span class="note">{escape(operation["summary"])}</span></summary>'
        f"{''.join(pieces)}</details>"
    )


def _parameters_html(parameters: list[dict[str, Json]]) -> str:
    rows = [
        f"<tr><td><code>{escape(p['name'])}</code></td><td>{p['in']}</td>"
        f"<td>{'required' if p['required'] else ''}</td><td>{escape(p.get('description', ''))}</td>"
        "</tr>"
        for p in parameters
    ]
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _content_html(holder: dict[str, Json]) -> str:
    pieces: list[str] = []
    for media, content in holder.get("content", {}).items():
        pieces.append(f"<p><code>{escape(media)}</code> {_type_html(content['schema'])}</p>")
        if "example" in content:
            pieces.append(f"<pre>{escape(json.dumps(content['example'], indent=2))}</pre>")
    return "".join(pieces)


def _type_html(schema: dict[str, Json]) -> str:
    """A short description of a schema, with links to the types that it refers to."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#type-{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type_html(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"])
    if schema.get("items"):
        return f"list of {_type_html(schema['items'])}"
    if schema.get("additionalProperties"):
        return f"map of {_type_html(schema['additionalProperties'])}"
    return escape(schema.get("type", "anything"))


def _schemas_html(schemas: dict[str, dict[str, Json]]) -> str:
    pieces: list[str] = []
    for name, schema in sorted(schemas.items()):
        rows = [
            f"<tr><td><code>{escape(field)}</code></td><td>{_type_html(kind)}</td></tr>"
            for field, kind in schema.get("properties", {}).items()
        ]
        description = escape(schema.get("description", ""))
        pieces.append(
            f'<h3 id="type-{escape(name)}">{escape(name)}</h3><p class="note">{description}</p>'
            f"<table>{''.join(rows)}</table>"
        )
    return "".join(pieces)
