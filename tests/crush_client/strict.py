"""Anomalies in events that decode, but that a Crush client would mishandle or never read.

Pure: a line of the stream in, descriptions out. Decode errors are reported by `events.parse_line`.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tests.crush_client.events import parse_line
from tests.crush_client.golang import Record, Struct, record
from tests.crush_client.types import (
    EVENT_PAYLOADS,
    PARTS,
    PERMISSION_PARAMS,
    QUESTION_CHOICE,
    QUESTION_ITEM,
    part_type,
)

FINISH_REASONS: Mapping[str, frozenset[str]] = {
    "user": frozenset({"stop"}),
    "tool": frozenset({"stop"}),
    "system": frozenset({"stop"}),
    "assistant": frozenset(
        {"end_turn", "max_tokens", "tool_use", "canceled", "error", "content_filter", "unknown"}
    ),
}
AGENT_EVENTS = frozenset(
    {"agent_finished", "error", "re_authenticate", "aws_sso_auth", "aws_sso_auth_result"}
)
ONCE = ("text", "reasoning", "finish")  # Only the first of each is read.
OURS = frozenset({"cursor", "rev", "culm_reason"})  # Our extensions, which a client ignores.
OURS_IN: Mapping[str, frozenset[str]] = {
    "message": frozenset({"run_id"}),
    "permission_notification": frozenset({"session_id"}),
}


def anomalies(line: bytes) -> list[str]:
    """Describe the anomalies of one line; an empty line is a heartbeat and has none."""
    if not line.strip():
        return []
    event = parse_line(line)
    if event is None:
        return ["the client skips it"]
    if event.error is not None:
        return [str(event.error)]
    found: list[str] = []
    if event.op not in ("created", "updated", "deleted"):
        found.append(f"operation {event.op!r}")
    if event.type == "agent_event" and event.payload.text("type") not in AGENT_EVENTS:
        found.append(f"agent_event {event.payload.text('type')!r}")
    if event.type == "message" and event.op != "deleted":
        found += _in_message(event.payload)
    raw = json.loads(line.removeprefix(b"data:"))
    if event.type == "permission_request":
        found += _in_dialog(raw["payload"]["payload"])
    if event.type == "question_batch_request":
        found += _in_form(raw["payload"]["payload"])
    ours = OURS | OURS_IN.get(event.type, frozenset())
    return [*found, *(f"key {key!r}" for key in _unread(event.type, raw) if key not in ours)]


def _in_message(message: Record) -> Iterator[str]:
    role, parts = message.text("role"), message.records("parts")
    if role not in FINISH_REASONS:
        yield f"role {role!r}"
        return
    kinds = Counter(part_type(part) for part in parts)
    yield from (f"{kinds[kind]} parts of type {kind}" for kind in ONCE if kinds[kind] > 1)
    if role == "tool" and kinds["tool_result"] != 1:
        yield f"{kinds['tool_result']} results in one message"
    for part in parts:
        match part_type(part):
            case "finish" if part.text("reason") not in FINISH_REASONS[role]:
                yield f"finish reason {part.text('reason')!r} of role {role}"
            case "tool_call" if part.flag("finished") and not _is_json(part.text("input")):
                yield f"a finished call with input {part.text('input')!r}"
            case _:
                pass


def _in_dialog(request: Mapping[str, Any]) -> Iterator[str]:
    """Find params that are missing or that the dialog of the tool does not show."""
    kind, params = PERMISSION_PARAMS.get(request["tool_name"]), request.get("params")
    if kind is None or params is None:
        return
    yield from (f"param {name!r}" for name in params.keys() - _names(kind))
    wanted = {name for name in kind.fields if not name.endswith("?")}
    yield from (f"no param {name!r}" for name in wanted - params.keys())


def _in_form(request: Mapping[str, Any]) -> Iterator[str]:
    for question in request["questions"]:
        yield from (f"key {key!r}" for key in question.keys() - _names(QUESTION_ITEM))
        for choice in question.get("choices") or ():
            yield from (f"key {key!r}" for key in choice.keys() - _names(QUESTION_CHOICE))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _unread(kind: str, outer: Mapping[str, Any]) -> Iterator[str]:
    """Yield keys that match no field of the client."""
    payload = outer["payload"]["payload"]
    yield from outer.keys() - {"type", "payload"}
    yield from outer["payload"].keys() - {"type", "payload"}
    yield from payload.keys() - _names(record(EVENT_PAYLOADS[kind].zero()).kind)
    if kind == "message":
        for part in payload["parts"]:
            yield from part.keys() - {"type", "data"}
            yield from part["data"].keys() - _names(PARTS[part["type"]])


def _names(kind: Struct) -> set[str]:
    return {name.rstrip("?") for name in kind.fields}
