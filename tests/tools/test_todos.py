"""`todos` stores the list in the session and reports the changes."""

import json

from culm.store.sessions import find_session
from culm.tools.base import CallPlan, CallResult
from culm.tools.todos import TODO_CHARS_MAX, TODOS_MAX, make_todos
from culm.wire.codec import Json
from culm.wire.messages import Session, Todo
from tests.support import run_call
from tests.tools.conftest import SESSION, ToolHarness, call_of

FIRST: list[Json] = [
    {"content": "Write it", "status": "in_progress", "active_form": "Writing it"},
    {"content": "Test it", "status": "pending", "active_form": "Testing it"},
]
SECOND: list[Json] = [
    {"content": "Write it", "status": "completed", "active_form": "Writing it"},
    {"content": "Test it", "status": "in_progress", "active_form": "Testing it"},
]


async def put(harness: ToolHarness, todos: list[Json]) -> CallResult:
    return await run_call(make_todos(harness.context), call_of("todos", {"todos": todos}))


async def session_of(harness: ToolHarness) -> Session:
    session = await harness.context.store.read(find_session(SESSION))
    assert session is not None
    return session


async def test_a_list_is_stored_published_and_compared_with_the_last_one(
    harness: ToolHarness,
) -> None:
    published: list[tuple[str, str]] = []
    harness.context.store.publish = lambda events: published.extend(
        (one.type, one.op) for one in events
    )
    first, second = await put(harness, FIRST), await put(harness, SECOND)
    assert (first.content, second.content) == (
        "The list is kept: 0 of 2 completed.",
        "The list is kept: 1 of 2 completed.",
    )
    assert json.loads(first.metadata) == {
        "is_new": True,
        "todos": FIRST,
        "just_started": "Writing it",
        "completed": 0,
        "total": 2,
    }
    assert json.loads(second.metadata) == {
        "is_new": False,
        "todos": SECOND,
        "just_completed": ["Write it"],
        "just_started": "Testing it",
        "completed": 1,
        "total": 2,
    }
    assert (await session_of(harness)).todos == [
        Todo("Write it", "completed", "Writing it"),
        Todo("Test it", "in_progress", "Testing it"),
    ]
    assert published == [("session", "updated"), ("session", "updated")]


async def test_a_call_needs_no_approval_and_stores_nothing_before_it_runs(
    harness: ToolHarness,
) -> None:
    plan = await make_todos(harness.context).prepare(call_of("todos", {"todos": FIRST}))
    assert isinstance(plan, CallPlan)
    assert plan.action.is_free
    assert (await session_of(harness)).todos == []


async def test_a_list_is_stored_with_advice(harness: ToolHarness) -> None:
    step: dict[str, Json] = {"content": "a", "status": "in_progress"}
    many = await put(harness, [step, step])
    assert many.content.endswith("2 steps are in progress; have one at a time.")
    none = await put(harness, [{"content": "a", "status": "pending"}])
    assert none.content.endswith("Mark the next step as in_progress.")
    assert await put(harness, []) == CallResult(
        "The list is empty now.", metadata='{"is_new":false,"todos":[],"completed":0,"total":0}'
    )
    assert (await session_of(harness)).todos == []


async def test_an_invalid_or_too_long_list_is_refused(harness: ToolHarness) -> None:
    step: dict[str, Json] = {"content": "a", "status": "pending"}
    for todos in (
        [step] * (TODOS_MAX + 1),
        [{**step, "content": "a" * (TODO_CHARS_MAX + 1)}],
        [{**step, "status": "done"}],
        [{**step, "content": ""}],
        ["a"],
    ):
        result = await put(harness, todos)
        assert result.is_error
        assert "All steps in order" in result.content
    assert (await session_of(harness)).todos == []


async def test_a_missing_session_is_an_error(harness: ToolHarness) -> None:
    tool = make_todos(harness.context)
    call = call_of("todos", {"todos": FIRST})
    gone = type(call)("call-1", "todos", call.input, call.arguments, "session-9")
    result = await run_call(tool, gone)
    assert result.is_error
    assert result.content.startswith("The list could not be kept: ")
