"""The OpenAPI document as one HTML page: no scripts, nothing loaded from another host."""

import json
from html import escape

from culm.wire.codec import Json

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


def render(document: dict[str, Json]) -> str:
    info = document["info"]
    by_tag: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            piece = _operation(method, path, operation)
            by_tag.setdefault(operation["tags"][0], []).append(piece)
    links = "".join(f'<a href="#{tag}">{tag}</a>' for tag in by_tag)
    sections = "".join(f'<h2 id="{t}">{t}</h2>{"".join(pieces)}' for t, pieces in by_tag.items())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>culm {escape(info['version'])}</title><style>{_STYLE}</style></head><body>"
        f"<h1>culm {escape(info['version'])}</h1><p>{escape(info['description'])}</p>"
        f'<nav>{links}<a href="#schemas">types</a><a href="openapi.json">openapi.json</a></nav>'
        f'{sections}<h2 id="schemas">Types</h2>{_schemas(document["components"]["schemas"])}'
        "</body></html>\n"
    )


def _operation(method: str, path: str, operation: dict[str, Json]) -> str:
    pieces = [_parameters(operation["parameters"])]
    if "requestBody" in operation:
        pieces.append(f"<h4>Body</h4>{_content(operation['requestBody'])}")
    for status, answer in operation["responses"].items():
        pieces.append(f"<h4>{escape(status)} {escape(answer['description'])}</h4>")
        pieces.append(_content(answer))
    return (
        f'<details><summary><code><span class="method">{method.upper()}</span>{escape(path)}</code>'
        f' <span class="note">{escape(operation["summary"])}</span></summary>'
        f"{''.join(pieces)}</details>"
    )


def _parameters(parameters: list[dict[str, Json]]) -> str:
    rows = [
        f"<tr><td><code>{escape(p['name'])}</code></td><td>{p['in']}</td>"
        f"<td>{'required' if p['required'] else ''}</td><td>{escape(p.get('description', ''))}</td>"
        "</tr>"
        for p in parameters
    ]
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _content(holder: dict[str, Json]) -> str:
    pieces: list[str] = []
    for media, content in holder.get("content", {}).items():
        pieces.append(f"<p><code>{escape(media)}</code> {_type(content['schema'])}</p>")
        if "example" in content:
            pieces.append(f"<pre>{escape(json.dumps(content['example'], indent=2))}</pre>")
    return "".join(pieces)


def _type(schema: dict[str, Json]) -> str:
    """A short description of a schema, with links to the types that it refers to."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#type-{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"])
    if schema.get("items"):
        return f"list of {_type(schema['items'])}"
    if schema.get("additionalProperties"):
        return f"map of {_type(schema['additionalProperties'])}"
    return escape(schema.get("type", "anything"))


def _schemas(schemas: dict[str, dict[str, Json]]) -> str:
    pieces: list[str] = []
    for name, schema in sorted(schemas.items()):
        rows = [
            f"<tr><td><code>{escape(field)}</code></td><td>{_type(kind)}</td></tr>"
            for field, kind in schema.get("properties", {}).items()
        ]
        description = escape(schema.get("description", ""))
        pieces.append(
            f'<h3 id="type-{escape(name)}">{escape(name)}</h3><p class="note">{description}</p>'
            f"<table>{''.join(rows)}</table>"
        )
    return "".join(pieces)
