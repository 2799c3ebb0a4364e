"""Event-stream lines from the specification (crush-wire §7, 9.2, 10, 13.2)."""

import json

SESSION = "0b0c7a2e-7c8b-4d0e-9a6e-1b9f0d3c5a11"


def line(kind: str, op: str, payload: object) -> str:
    """One event as a server sends it."""
    event = {"type": kind, "payload": {"type": op, "payload": payload}}
    return f"data: {json.dumps(event, separators=(',', ':'))}\n"


EVENTS: dict[str, str] = {
    "agent_finished": line(
        "agent_event",
        "created",
        {
            "type": "agent_finished",
            "message": {
                "parts": [],
                "id": "",
                "role": "",
                "session_id": "",
                "model": "",
                "provider": "",
                "created_at": 0,
                "updated_at": 0,
            },
            "session_id": SESSION,
            "session_title": "List files",
        },
    ),
    "error": line(
        "agent_event",
        "created",
        {
            "type": "error",
            "error": "model provider not configured",
            "run_id": "3b1c1a52-1111-4222-8333-444455556666",
            "session_id": SESSION,
        },
    ),
    "run_complete": line(
        "run_complete",
        "updated",
        {
            "session_id": SESSION,
            "run_id": "3b1c1a52-1111-4222-8333-444455556666",
            "message_id": "c0ffee00-0000-4000-8000-000000000001",
            "text": "There are 3 files.",
        },
    ),
    "lsp_event": line(
        "lsp_event",
        "updated",
        {"type": "diagnostics_changed", "name": "gopls", "state": 2, "diagnostic_count": 3},
    ),
    "mcp_event": line(
        "mcp_event",
        "updated",
        {"type": "state_changed", "name": "gh", "state": "connected", "tool_count": 12},
    ),
    "config_changed": line(
        "config_changed", "updated", {"workspace_id": "9a4d2d0c-6b0e-4d0f-8a56-0f7c3f0f7b11"}
    ),
    "skills_event": line(
        "skills_event",
        "updated",
        {
            "states": [
                {
                    "name": "broken",
                    "path": "/home/dev/proj/.skills/broken/SKILL.md",
                    "state": 1,
                    "error": "bad frontmatter",
                }
            ]
        },
    ),
    "update_available": line(
        "update_available",
        "updated",
        {"current_version": "0.80.0", "latest_version": "0.81.0", "is_development": False},
    ),
    "file": line(
        "file",
        "created",
        {
            "id": "f1e0a3de-3f60-4bd4-9c27-0d5f6c1b7a10",
            "session_id": SESSION,
            "path": "/home/dev/proj/main.go",
            "content": "package main\n",
            "version": 1,
            "created_at": 1787338030,
            "updated_at": 1787338030,
        },
    ),
    "permission_notification": line(
        "permission_notification",
        "created",
        {"tool_call_id": "call_1", "granted": False, "denied": False},
    ),
    "permission_request": line(
        "permission_request",
        "created",
        {
            "id": "7d9f7f0e-5a49-4c0e-8d33-0a7a3f2b1c99",
            "session_id": SESSION,
            "tool_call_id": "call_1",
            "tool_name": "bash",
            "description": "Execute command: rm -i x",
            "action": "execute",
            "params": {
                "description": "List",
                "command": "rm -i x",
                "working_dir": "",
                "run_in_background": False,
                "auto_background_after": 0,
            },
            "path": "/home/dev/proj",
        },
    ),
    "question_batch_request": line(
        "question_batch_request",
        "created",
        {
            "id": "6f1a6f5e-4f0c-4b43-a8a5-fb8f6b2f0a01",
            "session_id": SESSION,
            "tool_call_id": "call_9",
            "questions": [
                {
                    "id": "q1",
                    "type": "single_choice",
                    "label": "DB",
                    "question": "Which database?",
                    "description": "Pick one.",
                    "choices": [
                        {"id": "pg", "label": "PostgreSQL"},
                        {"id": "sqlite", "label": "SQLite", "description": "embedded"},
                    ],
                },
                {
                    "id": "q2",
                    "type": "yes_no",
                    "question": "Add migrations?",
                    "description": "Creates a folder.",
                },
            ],
            "confirm_title": "Ready to go?",
            "confirm_description": "Review your answers above and confirm.",
        },
    ),
    "question_batch_notification": line(
        "question_batch_notification",
        "created",
        {"batch_id": "6f1a6f5e-4f0c-4b43-a8a5-fb8f6b2f0a01"},
    ),
}

# A whole turn of one step.
TURN: list[str] = [
    line(
        "session",
        "created",
        {
            "id": "S",
            "parent_session_id": "",
            "title": "New Session",
            "message_count": 0,
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "summary_message_id": "",
            "cost": 0,
            "created_at": 1787338000,
            "updated_at": 1787338000,
            "is_busy": False,
            "attached_clients": 0,
        },
    ),
    line(
        "message",
        "created",
        {
            "parts": [
                {"type": "text", "data": {"text": "hi"}},
                {"type": "finish", "data": {"reason": "stop", "time": 0}},
            ],
            "id": "M1",
            "role": "user",
            "session_id": "S",
            "model": "",
            "provider": "",
            "created_at": 1787338001,
            "updated_at": 1787338001,
        },
    ),
    line(
        "message",
        "created",
        {
            "parts": [],
            "id": "M2",
            "role": "assistant",
            "session_id": "S",
            "model": "demo-1",
            "provider": "demo",
            "created_at": 1787338001,
            "updated_at": 1787338001,
        },
    ),
    line(
        "message",
        "updated",
        {
            "parts": [{"type": "text", "data": {"text": "Hello"}}],
            "id": "M2",
            "role": "assistant",
            "session_id": "S",
            "model": "demo-1",
            "provider": "demo",
            "created_at": 1787338001,
            "updated_at": 1787338001,
        },
    ),
    line(
        "session",
        "updated",
        {
            "id": "S",
            "parent_session_id": "",
            "title": "Greeting",
            "message_count": 2,
            "prompt_tokens": 900,
            "completion_tokens": 4,
            "summary_message_id": "",
            "cost": 0.001,
            "created_at": 1787338000,
            "updated_at": 1787338003,
            "is_busy": False,
            "attached_clients": 0,
        },
    ),
    line(
        "message",
        "updated",
        {
            "parts": [
                {"type": "text", "data": {"text": "Hello there."}},
                {"type": "finish", "data": {"reason": "end_turn", "time": 1787338003}},
            ],
            "id": "M2",
            "role": "assistant",
            "session_id": "S",
            "model": "demo-1",
            "provider": "demo",
            "created_at": 1787338001,
            "updated_at": 1787338001,
        },
    ),
    line(
        "agent_event",
        "created",
        {"type": "agent_finished", "session_id": "S", "session_title": "Greeting"},
    ),
    line(
        "run_complete", "updated", {"session_id": "S", "message_id": "M2", "text": "Hello there."}
    ),
]
