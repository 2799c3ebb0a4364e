"""The wire types decode the examples of the specification and refuse its counterexamples."""

import json
import re

import pytest

from tests.crush_client.events import parse_line
from tests.crush_client.golang import Map, Record, decode, mapping, record, to_json
from tests.crush_client.lines import EVENTS, TURN
from tests.crush_client.types import (
    CONFIG,
    EVENT_PAYLOADS,
    MCP_CLIENT_INFO,
    MESSAGE,
    PARTS,
    PERMISSION_REQUEST,
    ROUTE_ANSWERS,
    SESSION,
    WORKSPACE,
    Panic,
    Slice,
    check_config,
    is_configured,
    part_type,
)

SESSION_ID = "0b0c7a2e-7c8b-4d0e-9a6e-1b9f0d3c5a11"


def dumped(value: object) -> bytes:
    return json.dumps(value).encode()


def part(kind: str, data: object) -> dict[str, object]:
    return {"type": kind, "data": data}


def message(parts: object, **fields: object) -> dict[str, object]:
    return {"id": "M", "role": "assistant", "session_id": "S", "parts": parts, **fields}


# --- tables


def test_tables_have_70_routes_and_14_events() -> None:
    assert list(ROUTE_ANSWERS) == list(range(1, 71))
    assert len({(route.method, route.path) for route in ROUTE_ANSWERS.values()}) == 70
    assert len(EVENT_PAYLOADS) == 14
    for route in ROUTE_ANSWERS.values():
        assert re.fullmatch(r"(/v1)(/[a-z-]+|/\{(id|sid|lsp|client_id)\})+", route.path)


# --- messages


def test_every_part_type_is_decoded_into_its_own_struct() -> None:
    data = {
        "text": {"text": "a"},
        "reasoning": {"thinking": "b", "signature": "", "started_at": 1, "finished_at": 2},
        "image_url": {"url": "c"},
        "binary": {"Path": "shot.png", "MIMEType": "image/png", "Data": "iVBORw0KGgo="},
        "tool_call": {"id": "call_1", "name": "bash", "input": "{}", "finished": True},
        "tool_result": {"tool_call_id": "call_1", "content": "d", "metadata": "", "is_error": True},
        "finish": {"reason": "stop", "time": 0},
        "shell_command": {"command": "ls", "output": "", "exit_code": 1},
    }
    assert data.keys() == PARTS.keys()
    body = dumped(message([part(kind, fields) for kind, fields in data.items()]))
    found = record(decode(body, MESSAGE).must()).records("parts")
    assert [part_type(one) for one in found] == list(data)
    assert found[3].values["Data"] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("parts", [[], None])
def test_message_parts_may_be_empty_or_null(parts: object) -> None:
    assert record(decode(dumped(message(parts)), MESSAGE).must()).records("parts") == []


@pytest.mark.parametrize(
    "body",
    [
        {"id": "M", "role": "user", "session_id": "S"},
        message("text"),
        message([part("video", {})]),
        message([part("", {})]),
        message([{"type": "text"}]),
        message([part("text", "hi")]),
        message([part("finish", {"reason": "stop", "time": 1.5})]),
        message([part("binary", {"Data": "not base64"})]),
        message([], created_at=1.0),
        message([], id=7),
        None,
    ],
)
def test_invalid_message_fails_the_whole_list(body: object) -> None:
    assert decode(dumped([message([]), body]), Slice(MESSAGE)).error is not None


def test_unknown_part_type_drops_all_parts_but_keeps_the_fields() -> None:
    parts = [part("text", {"text": "hello"}), part("video", {})]
    found = decode(dumped(message(parts, model="m")), MESSAGE)
    assert found.error is not None
    got = record(found.value)
    assert (got.text("id"), got.text("model"), got.records("parts")) == ("M", "m", [])


def test_null_part_data_is_an_empty_part() -> None:
    (text,) = record(decode(dumped(message([part("text", None)])), MESSAGE).must()).records("parts")
    assert text.text("text") == ""


# --- configuration

TUI_ONLY: dict[str, object] = {"options": {"tui": {}}, "providers": {}}


def test_smallest_configuration_does_not_panic_and_is_not_configured() -> None:
    config = record(decode(dumped(TUI_ONLY), CONFIG).must())
    assert not is_configured(check_config(config))


@pytest.mark.parametrize(
    ("body", "culprit"),
    [
        ({}, "config is nil"),
        ({"config": None}, "config is nil"),
        ({"config": {"providers": {}}}, "config.options is nil"),
        ({"config": {"options": {}, "providers": {}}}, "config.options.tui is nil"),
        ({"config": {"options": {"tui": None}, "providers": {}}}, "config.options.tui is nil"),
        ({"config": {"options": {"tui": {}}}}, "config.providers is nil"),
        ({"config": {"options": {"tui": {}}, "providers": None}}, "config.providers is nil"),
    ],
)
def test_configuration_with_an_unchecked_nil_panics(body: object, culprit: str) -> None:
    workspace = record(decode(dumped(body), WORKSPACE).must())
    with pytest.raises(Panic, match=culprit):
        check_config(workspace.find_record("config"))


@pytest.mark.parametrize(
    ("providers", "configured"),
    [({}, False), ({"demo": {"disable": True}}, False), ({"demo": {}}, True)],
)
def test_client_with_an_enabled_provider_is_configured(
    providers: object, *, configured: bool
) -> None:
    body = dumped({**TUI_ONLY, "providers": providers})
    assert is_configured(record(decode(body, CONFIG).must())) == configured


# --- others


def test_unknown_mcp_state_fails_the_whole_map() -> None:
    info = {"name": "gh", "connected_at": "0001-01-01T00:00:00Z"}
    kind = Map(MCP_CLIENT_INFO)
    assert decode(dumped({"gh": {**info, "state": "needs auth"}}), kind).error is None
    for state in ("needs_auth", "Connected", "", 2):
        assert decode(dumped({"gh": {**info, "state": state}}), kind).error is not None


@pytest.mark.parametrize(
    ("tool", "params"),
    [
        ("bash", {"command": "ls", "run_in_background": False, "auto_background_after": 0}),
        ("edit", {"file_path": "/a", "old_content": "x"}),
        ("ls", {"path": "/", "ignore": None, "depth": 1}),
        ("mcp_gh_review", {"anything": [1, {"a": 2}]}),
        ("mcp_gh_review", None),
        ("bash", None),
    ],
)
def test_permission_params_match_the_tool_and_round_trip(
    tool: str, params: dict[str, object] | None
) -> None:
    body = {"id": "P", "tool_name": tool, "params": params}
    found = record(decode(dumped(body), PERMISSION_REQUEST).must())
    sent = to_json(found.values["params"])
    if params is None:
        assert sent is None
    else:
        assert {key: mapping(sent)[key] for key in params} == params


@pytest.mark.parametrize(
    ("tool", "params"),
    [
        ("bash", {"command": ["ls"]}),
        ("view", {"file_path": "/a", "offset": 1.5}),
        ("mcp_gh_review", "a string"),
        ("mcp_gh_review", []),
    ],
)
def test_invalid_params_leave_a_dialog_without_params(tool: str, params: object) -> None:
    body = {"id": "P", "tool_name": tool, "params": params, "path": "/p"}
    found = decode(dumped(body), PERMISSION_REQUEST)
    assert found.error is not None
    got = record(found.value)
    assert (got.text("id"), got.text("path"), got.values["params"]) == ("P", "/p", None)


def test_missing_params_are_valid() -> None:
    assert decode(b'{"id": "P", "tool_name": "bash"}', PERMISSION_REQUEST).error is None


@pytest.mark.parametrize(
    ("number", "body"),
    [
        (25, "2026-08-21T19:08:35Z"),
        (
            26,
            {"gopls": {"name": "gopls", "state": 2, "connected_at": "2026-08-21T19:08:35.1+02:00"}},
        ),
        (27, {"file:///a.go": [{"range": {"start": {"line": 3}}, "severity": 1, "code": "E1"}]}),
        (41, 3),
        (42, None),
        (52, {"token": None, "success": False}),
        (58, {"content": "IyBTa2lsbA==", "result": {"name": "a", "builtin": True}}),
        (60, [{"uri": "x://y", "blob": "aGk="}]),
        (61, [{"id": "gh:r", "prompt_id": "r", "client_id": "gh", "arguments": [{"id": "a"}]}]),
        (65, {}),
    ],
)
def test_responses_of_the_specification_decode(number: int, body: object) -> None:
    kind = ROUTE_ANSWERS[number].answer
    assert kind is not None
    assert decode(dumped(body), kind).error is None


@pytest.mark.parametrize(
    ("number", "body"),
    [
        (14, {"sessions": []}),
        (15, {"created_at": 1787338000.5}),
        (25, ""),
        (26, {"gopls": {"state": "ready", "connected_at": "0001-01-01T00:00:00Z"}}),
        (26, {"gopls": {"state": 2, "connected_at": ""}}),
        (27, {"/a.go": []}),
        (30, {"skip": "false"}),
        (41, "3"),
        (42, {}),
        (64, {}),
    ],
)
def test_responses_that_go_cannot_read_do_not_decode(number: int, body: object) -> None:
    kind = ROUTE_ANSWERS[number].answer
    assert kind is not None
    assert decode(dumped(body), kind).error is not None


def test_session_round_trips() -> None:
    body = {
        "id": SESSION_ID, "parent_session_id": "", "title": "Fix", "message_count": 4,
        "prompt_tokens": 5210, "completion_tokens": 311, "summary_message_id": "", "cost": 0.0213,
        "todos": [{"content": "Run", "status": "in_progress", "active_form": "Running"}],
        "created_at": 1787338000, "updated_at": 1787338042, "is_busy": True, "attached_clients": 1,
    }  # fmt: skip
    assert to_json(decode(dumped(body), SESSION).must()) == body


# --- examples of the specification


@pytest.mark.parametrize("line", [*EVENTS.values(), *TURN])
def test_every_event_of_the_specification_decodes(line: str) -> None:
    event = parse_line(line.encode())
    assert event is not None
    assert event.error is None


def test_examples_cover_every_event_type() -> None:
    found = [parse_line(line.encode()) for line in (*EVENTS.values(), *TURN)]
    assert {event.type for event in found if event} == EVENT_PAYLOADS.keys()


def test_records_compare_by_their_values() -> None:
    one, other = (decode(b'{"id": "a"}', SESSION).must() for _ in range(2))
    assert isinstance(one, Record)
    assert one == other
