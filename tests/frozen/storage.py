"""The database as later versions find it: its schema, and the strings in its rows.

Both are read from outside: the schema from the file that a server created, the strings from the
OpenAPI document that it serves. No module of the product is named here.
"""

import json
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import cast

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

_W = "/v1/workspaces/{workspace_id}"
# Where the OpenAPI document lists what a column may hold: a route or an event, and a path in it.
_LISTED = {
    "agents.outcome": (f"GET {_W}/agents", "[].outcome"),
    "agents.state": (f"GET {_W}/agents", "[].state"),
    "agents.waiting_for": (f"GET {_W}/agents", "[].waiting_for"),
    "asks.request.questions.type": (f"GET {_W}/questions", "[].request.questions[].type"),
    "asks.state": (f"GET {_W}/permissions/asks", "[].state"),
    "cancelled_runs.settled": ("event cancel_changed", "runs[].settled"),
    "cancels.target": ("event cancel_changed", "target"),
    "chunks.kind": ("event message_delta", "kind"),
    "grants.scope": (f"GET {_W}/permissions/grants", "[].scope"),
    "letters.kind": (f"GET {_W}/mail", "[].kind"),
    "letters.state": (f"GET {_W}/mail", "[].state"),
    "messages.parts.type": (f"GET {_W}/sessions/{{session_id}}/messages", "[].parts[].type"),
    "messages.role": (f"GET {_W}/sessions/{{session_id}}/messages", "[].role"),
    "runs.kind": (f"GET {_W}/runs", "[].kind"),
    "runs.outcome": (f"GET {_W}/runs", "[].outcome"),
    "runs.state": (f"GET {_W}/runs", "[].state"),
    "sessions.todos.status": (f"GET {_W}/sessions/{{session_id}}", "todos[].status"),
}
# Closed sets that no route lists; a query returns those in a database.
_UNLISTED = {
    "agents.terms": "SELECT key FROM agents, json_each(terms)",
    "asks.kind": "SELECT kind FROM asks",
    "calls.crash": "SELECT crash FROM calls",
    "calls.state": "SELECT state FROM calls",
    "events.op": "SELECT op FROM events",
    "messages.finish.culm_reason": "SELECT json_extract(p.value, '$.data.culm_reason')"
    " FROM messages, json_each(parts) p WHERE json_extract(p.value, '$.data.culm_reason') <> ''",
    "messages.finish.reason": "SELECT json_extract(p.value, '$.data.reason')"
    " FROM messages, json_each(parts) p WHERE json_extract(p.value, '$.type') = 'finish'",
    "meta.key": "SELECT key FROM meta",
    "runs.limits": "SELECT key FROM runs, json_each(limits)",
}
_STORED = {
    "asks.request.questions.type": "SELECT json_extract(q.value, '$.type')"
    " FROM asks, json_each(request, '$.questions') q",
    "messages.parts.type": "SELECT json_extract(p.value, '$.type')"
    " FROM messages, json_each(parts) p WHERE p.type = 'object'"
    " UNION SELECT json_extract(body, '$.type') FROM parts",
    "sessions.todos.status": "SELECT json_extract(t.value, '$.status')"
    " FROM sessions, json_each(todos) t",
}


def read_schema(database: Path) -> dict[str, Json]:
    """Return every table, index and view, without comments; one line per column."""
    with closing(sqlite3.connect(database)) as connection:
        version: int = connection.execute("PRAGMA user_version").fetchone()[0]
        rows: list[tuple[str, str, str]] = connection.execute(
            "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL"
            " AND name NOT LIKE 'sqlite_%' ORDER BY type, name"
        ).fetchall()
    found: dict[str, Json] = {"version": version}
    for kind, name, sql in rows:
        plain = " ".join(re.sub(r"--[^\n]*", "", sql).split())
        group = found.setdefault({"index": "indexes"}.get(kind, f"{kind}s"), {})
        assert isinstance(group, dict)
        group[name] = list(_columns(plain)) if kind == "table" else plain
    return found


def _columns(sql: str) -> Iterator[str]:
    """Yield the parts of a `CREATE TABLE`: columns and constraints, then the rest."""
    inner, _, rest = sql.partition("(")[2].rpartition(")")
    depth, start, quoted = 0, 0, False
    for at, char in enumerate(inner):
        if char == "'":
            quoted = not quoted
        elif not quoted:
            depth += (char == "(") - (char == ")")
            if char == "," and depth == 0:
                yield inner[start:at].strip()
                start = at + 1
    yield inner[start:].strip()
    if rest.strip():
        yield rest.strip()


# --- strings


def listed_strings(openapi: Mapping[str, Json]) -> dict[str, Json]:
    """Return the values that the OpenAPI document lists for each column, sorted."""
    found: dict[str, Json] = {
        column: list[Json](sorted(_enum(openapi, where, path)))
        for column, (where, path) in _LISTED.items()
    }
    found["events.type"] = list[Json](sorted(_object(openapi["x-events"])))
    return dict(sorted(found.items()))


def stored_strings(database: Path) -> dict[str, list[str]]:
    """Return the values in the rows of a database, for listed and unlisted columns."""
    queries = {name: f"SELECT {name.split('.')[1]} FROM {name.split('.')[0]}" for name in _LISTED}
    queries |= {"events.type": "SELECT type FROM events"} | _STORED | _UNLISTED
    with closing(sqlite3.connect(database)) as connection:
        rows = {name: connection.execute(query).fetchall() for name, query in queries.items()}
    return {
        name: sorted({str(value) for (value,) in found if value is not None})
        for name, found in sorted(rows.items())
    }


def unlisted_names() -> set[str]:
    return set(_UNLISTED)


def _object(value: Json) -> dict[str, Json]:
    assert isinstance(value, dict), value
    return value


def _enum(openapi: Mapping[str, Json], where: str, path: str) -> set[str]:
    """Follow a path such as `[].state` through the schemas; a union may lead to several enums."""
    kind, _, name = where.partition(" ")
    if kind == "event":
        schemas = [_object(openapi["x-events"])[name]]
    else:
        answers = _object(_object(_object(openapi["paths"])[name])[kind.lower()])["responses"]
        answer = next(v for status, v in _object(answers).items() if status != "default")
        schemas = [_object(_object(_object(answer)["content"])["application/json"])["schema"]]
    for step in re.findall(r"\[\]|\w+", path):
        inner: list[Json] = []
        for schema in _flat(openapi, schemas):
            if step == "[]":
                inner += [schema["items"]] if "items" in schema else []
            else:
                properties = _object(schema.get("properties", {}))
                inner += [properties[step]] if step in properties else []
        schemas = inner
    values = [value for one in _flat(openapi, schemas) for value in _list(one.get("enum", []))]
    assert values, f"{where} lists no values at {path}"
    return {str(value) for value in values}


def _list(value: Json) -> list[Json]:
    assert isinstance(value, list), value
    return value


def _flat(openapi: Mapping[str, Json], schemas: list[Json]) -> Iterator[dict[str, Json]]:
    """Yield the schemas with references and unions resolved."""
    for each in schemas:
        schema = _object(each)
        if "$ref" in schema:
            name = str(schema["$ref"]).rpartition("/")[2]
            target = _object(_object(openapi["components"])["schemas"])[name]
            yield from _flat(openapi, [target])
        elif "anyOf" in schema or "oneOf" in schema:
            yield from _flat(openapi, _list(schema.get("anyOf") or schema["oneOf"]))
        else:
            yield schema


def parse_json(text: bytes | str) -> dict[str, Json]:
    return cast("dict[str, Json]", json.loads(text))  # Only objects are read here.
