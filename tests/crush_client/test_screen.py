"""The TUI's reaction to each event: recorded lines in, the screen out."""

import json
import logging

import pytest

from tests.crush_client.events import parse_line
from tests.crush_client.golang import Slice, decode, record, records
from tests.crush_client.lines import EVENTS, SESSION, TURN, line
from tests.crush_client.screen import POLLS, Call, Event, Item, Reaction, Screen, changes_in
from tests.crush_client.strict import anomalies
from tests.crush_client.types import FILE
from tests.crush_client.types import SESSION as SESSION_TYPE


def event(text: str) -> Event:
    found = parse_line(text.encode())
    assert found is not None
    return found


def opened(session_id: str) -> Screen:
    """A screen with this session open."""
    screen = Screen()
    session = decode(f'{{"id": "{session_id}", "title": "New Session"}}'.encode(), SESSION_TYPE)
    screen.open_session(record(session.must()))
    return screen


def message(op: str, message_id: str, role: str, *parts: object, session: str = SESSION) -> Event:
    fields = {"id": message_id, "role": role, "session_id": session, "parts": list(parts)}
    return event(line("message", op, fields))


def text(value: str) -> object:
    return {"type": "text", "data": {"text": value}}


def call(call_id: str, name: str = "bash", **fields: object) -> object:
    return {"type": "tool_call", "data": {"id": call_id, "name": name, **fields}}


def result(call_id: str, content: str) -> object:
    return {"type": "tool_result", "data": {"tool_call_id": call_id, "content": content}}


# --- the line parser


@pytest.mark.parametrize(
    "raw",
    [
        b"\n",
        b"\r\n",
        b": keep-alive\n",
        b"event: message\n",
        b"id: 1\n",
        b"retry: 10\n",
        b"data:\n",
        b"data: not json\n",
        b'data: {"type": "message"} trailing\n',
        b'data: {"type": "resync", "payload": {}}\n',
        b'data: {"type": 7, "payload": {}}\n',
        b"data: []\n",
    ],
)
def test_line_that_is_not_an_event_is_skipped(raw: bytes) -> None:
    assert parse_line(raw) is None


def test_only_a_bare_newline_is_skipped_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        parse_line(b"\n")
        assert caplog.records == []
        parse_line(b": comment\n")
        assert len(caplog.records) == 1


def test_event_without_a_space_and_with_unknown_keys_is_parsed() -> None:
    raw = b'data:{"cursor":"a.1","type":"config_changed","payload":{"type":"updated","payload":'
    found = parse_line(raw + b'{"workspace_id":"w"}}}\r\n')
    assert found is not None
    assert (found.op, found.payload.text("workspace_id"), found.error) == ("updated", "w", None)


def test_payload_that_does_not_decode_is_delivered_partly_filled() -> None:
    found = message("updated", "M", "assistant", {"type": "video", "data": {"url": "x"}})
    assert found.error is not None
    assert (found.payload.text("id"), found.payload.records("parts")) == ("M", [])


def test_event_without_a_payload_is_delivered_empty() -> None:
    found = event('data: {"type": "session"}\n')
    assert found.error is not None
    assert (found.op, found.payload.text("id")) == ("", "")


# --- messages


def test_whole_turn_shows_the_prompt_the_answer_and_the_title() -> None:
    screen = opened("S")
    wanted = [screen.apply(event(text)) for text in TURN]
    assert screen.items == {
        "M1": Item("M1", "user", "hi", "stop"),
        "M2": Item("M2", "assistant", "Hello there.", "end_turn"),
    }
    assert (screen.title, screen.tokens) == ("Greeting", 904)
    assert wanted == [[], POLLS, POLLS, [], [], [], POLLS, []]


def test_message_of_another_session_is_not_shown_but_polled() -> None:
    screen = opened("another")
    assert screen.apply(message("created", "M", "user", text("hi"))) == POLLS
    assert screen.items == {}


def test_answer_without_a_created_event_does_not_show_its_text() -> None:
    screen = opened(SESSION)
    screen.apply(message("updated", "M", "assistant", text("unseen"), call("call_1")))
    assert screen.items == {}
    assert list(screen.calls) == ["call_1"]


def test_update_and_second_create_of_a_prompt_are_ignored() -> None:
    screen = opened(SESSION)
    screen.apply(message("created", "M", "user", text("first")))
    screen.apply(message("updated", "M", "user", text("second")))
    screen.apply(message("created", "M", "user", text("third")))
    assert screen.items["M"].text == "first"


def test_update_with_fewer_parts_replaces_the_message() -> None:
    screen = opened(SESSION)
    screen.apply(message("created", "M", "assistant"))
    screen.apply(message("updated", "M", "assistant", text("first try")))
    screen.apply(message("updated", "M", "assistant"))
    assert screen.items["M"].text == ""


def test_deleted_message_is_removed() -> None:
    screen = opened(SESSION)
    screen.apply(message("created", "M", "assistant", text("summary")))
    screen.apply(message("deleted", "M", "assistant"))
    assert screen.items == {}


def test_shell_command_of_another_client_is_not_shown() -> None:
    screen = opened(SESSION)
    shell = {"type": "shell_command", "data": {"command": "ls", "output": "", "exit_code": 0}}
    screen.apply(message("created", "M", "user", shell))
    assert screen.items == {}


def test_call_grows_finishes_and_gets_its_result() -> None:
    screen = opened(SESSION)
    screen.apply(message("created", "M", "assistant"))
    screen.apply(message("updated", "M", "assistant", call("call_1", input="")))
    assert screen.calls["call_1"] == Call("call_1", "bash")
    done = call("call_1", input='{"command":"ls"}', finished=True)
    screen.apply(message("updated", "M", "assistant", done))
    screen.apply(message("created", "T", "tool", result("call_1", "done")))
    assert screen.calls["call_1"] == Call(
        "call_1", "bash", '{"command":"ls"}', finished=True, state="done", result="done"
    )
    assert list(screen.items) == ["M"]


def test_sub_agent_messages_with_tool_calls_are_nested_under_its_call() -> None:
    screen = opened(SESSION)
    screen.apply(message("created", "M", "assistant", call("call_1", "agent")))
    child = "M$$call_1"
    screen.apply(message("created", "C1", "user", text("go"), session=child))
    screen.apply(message("created", "C2", "assistant", call("call_2"), session=child))
    screen.apply(message("updated", "C2", "assistant", call("call_2"), session=child))
    screen.apply(message("created", "C3", "tool", result("call_2", "x"), session=child))
    assert screen.calls["call_1"].nested == ["C2", "C3"]
    assert list(screen.items) == ["M"]


# --- sessions


def test_open_session_follows_updates_and_closes_when_deleted() -> None:
    screen = opened(SESSION)
    screen.apply(message("created", "M", "user", text("hi")))
    todo = {"content": "Run tests", "status": "pending", "active_form": "Running"}
    screen.apply(event(line("session", "updated", {"id": SESSION, "title": "T", "todos": [todo]})))
    assert (screen.title, screen.todos) == ("T", ["Run tests"])
    screen.apply(event(line("session", "updated", {"id": "other", "title": "other"})))
    assert screen.title == "T"
    screen.apply(event(line("session", "deleted", {"id": SESSION})))
    assert (screen.session_id, screen.items, screen.title) == ("", {}, "")


# --- dialogs


def test_permission_request_opens_a_dialog_with_the_tool_params() -> None:
    screen = opened(SESSION)
    screen.apply(message("created", "M", "assistant", call("call_1")))
    screen.apply(event(EVENTS["permission_notification"]))
    assert (screen.calls["call_1"].state, screen.permission) == ("awaiting", None)
    screen.apply(event(EVENTS["permission_request"]))
    assert screen.permission is not None
    assert screen.permission.record("params").text("command") == "rm -i x"


@pytest.mark.parametrize(
    ("answer", "state"), [({"granted": True}, "running"), ({"denied": True}, "awaiting")]
)
def test_answer_of_any_client_closes_the_dialog(answer: dict[str, bool], state: str) -> None:
    screen = opened("another")
    screen.calls["call_1"] = Call("call_1", "bash")
    screen.apply(event(EVENTS["permission_request"]))
    other = {"tool_call_id": "call_2", **answer}
    screen.apply(event(line("permission_notification", "created", other)))
    assert screen.permission is not None, "that was about another call"
    mine = {"tool_call_id": "call_1", **answer}
    screen.apply(event(line("permission_notification", "created", mine)))
    assert screen.permission is None
    assert screen.calls["call_1"].state == state


def test_second_permission_request_replaces_the_open_dialog() -> None:
    screen = opened(SESSION)
    screen.apply(event(EVENTS["permission_request"]))
    screen.apply(event(line("permission_request", "created", {"id": "P2", "tool_name": "ls"})))
    assert screen.permission is not None
    assert screen.permission.text("id") == "P2"


def test_questions_are_dismissed_by_any_notification() -> None:
    screen = opened("another")
    screen.apply(event(EVENTS["question_batch_request"]))
    assert screen.questions is not None
    assert [q.text("id") for q in screen.questions.records("questions")] == ["q1", "q2"]
    screen.apply(event(line("question_batch_notification", "created", {"batch_id": "other"})))
    assert screen.questions is None


def test_unknown_or_missing_dialog_fields_are_anomalies() -> None:
    params = {"url": "http://x", "format": "text", "headers": "X: y"}
    request: dict[str, object] = {"id": "P", "tool_name": "fetch", "params": params}
    assert anomalies(line("permission_request", "created", request).encode()) == ["param 'headers'"]
    request["params"] = {"url": "http://x"}
    assert anomalies(line("permission_request", "created", request).encode()) == [
        "no param 'format'"
    ]
    choice = {"id": "pg", "label": "PostgreSQL", "icon": "x"}
    question = {"id": "q1", "type": "single_choice", "question": "?", "choices": [choice]}
    batch = {"id": "B", "questions": [{**question, "rank": 1}]}
    assert anomalies(line("question_batch_request", "created", batch).encode()) == [
        "key 'rank'",
        "key 'icon'",
    ]


def test_lowest_version_of_a_file_is_compared_with_the_highest() -> None:
    files = [
        {"path": path, "version": version, "content": f"{path}{version}"}
        for path, version in (("/a", 1), ("/b", 0), ("/a", 10), ("/a", 2))
    ]
    history = decode(json.dumps(files).encode(), Slice(FILE)).must()
    assert changes_in(records(history)) == {"/a": ("/a1", "/a10"), "/b": ("/b0", "/b0")}


# --- calls caused by events


@pytest.mark.parametrize(
    ("name", "reactions"),
    [
        ("agent_finished", POLLS),
        ("error", POLLS),
        ("run_complete", []),
        ("config_changed", ["workspace"]),
        ("lsp_event", ["lsps"]),
        ("mcp_event", ["agent_update", "mcp_states", "pending_auth", "mcp_prompts"]),
        ("file", ["history"]),
        ("skills_event", []),
        ("update_available", []),
    ],
)
def test_event_leads_to_the_calls_of_crush(name: str, reactions: list[Reaction]) -> None:
    assert opened(SESSION).apply(event(EVENTS[name])) == reactions


def test_skills_and_updates_are_shown() -> None:
    screen = Screen()
    screen.apply(event(EVENTS["skills_event"]))
    screen.apply(event(EVENTS["update_available"]))
    assert (screen.skills, screen.update) == (["broken"], "0.81.0")
    screen.apply(event(line("skills_event", "updated", {"states": None})))
    assert screen.skills == []
