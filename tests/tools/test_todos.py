"""`todos` keeps the list with the session, and says what changed."""

import json

from culm.store.sessions import find_session
from culm.tools.base import CallPlan, CallResult
from culm.tools.todos import TODO_CHARS_MAX, TODOS_MAX, make_todos
from culm.wire.codec import Json
from culm.wire.sessions import Session, Todo
from tests.support import carried_out
from tests.tools.conftest import SESSION, Desk, call_of

FIRST: list[Json] = [
    {"content": "Write it", "status": "in_progress", "active_form": "Writing it"},
    {"content": "Test it", "status": "pending", "active_form": "Testing it"},
]
SECOND: list[Json] = [
    {"content": "Write it", "status": "completed", "active_form": "Writing it"},
    {"content": "Test it", "status": "in_progress", "active_form": "Testing it"},
]


async def put(desk: Desk, todos: list[Json]) -> CallResult:
    return await carried_out(make_todos(desk.context), call_of("todos", {"todos": todos}))


async def session_of(desk: Desk) -> Session:
    session = await desk.context.store.read(find_session(SESSION))
    assert session is not None
    return session


async def test_a_list_is_kept_told_and_compared_with_the_one_before(desk: Desk) -> None:
    told: list[tuple[str, str]] = []
    desk.context.store.tell = lambda events: told.extend((one.type, one.op) for one in events)
    first, second = await put(desk, FIRST), await put(desk, SECOND)
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
    assert (await session_of(desk)).todos == [
        Todo("Write it", "completed", "Writing it"),
        Todo("Test it", "in_progress", "Testing it"),
    ]
    assert told == [("session", "updated"), ("session", "updated")]


async def test_nobody_is_asked_and_nothing_is_kept_before_it_runs(desk: Desk) -> None:
    plan = await make_todos(desk.context).prepare(call_of("todos", {"todos": FIRST}))
    assert isinstance(plan, CallPlan)
    assert plan.action.is_free
    assert (await session_of(desk)).todos == []


async def test_what_to_do_better_is_advised_and_the_list_is_kept(desk: Desk) -> None:
    step: dict[str, Json] = {"content": "a", "status": "in_progress"}
    many = await put(desk, [step, step])
    assert many.content.endswith("2 steps are in progress; it is better to have one at a time.")
    none = await put(desk, [{"content": "a", "status": "pending"}])
    assert none.content.endswith("Mark the step you go on with as in_progress.")
    assert await put(desk, []) == CallResult(
        "The list is empty now.", metadata='{"is_new":false,"todos":[],"completed":0,"total":0}'
    )
    assert (await session_of(desk)).todos == []


async def test_a_list_that_is_wrong_or_too_long_is_refused_by_its_field(desk: Desk) -> None:
    step: dict[str, Json] = {"content": "a", "status": "pending"}
    for todos in (
        [step] * (TODOS_MAX + 1),
        [{**step, "content": "a" * (TODO_CHARS_MAX + 1)}],
        [{**step, "status": "done"}],
        [{**step, "content": ""}],
        ["a"],
    ):
        result = await put(desk, todos)
        assert result.is_error
        assert "All steps in order" in result.content
    assert (await session_of(desk)).todos == []


async def test_a_session_that_is_gone_is_an_error_in_words(desk: Desk) -> None:
    tool = make_todos(desk.context)
    call = call_of("todos", {"todos": FIRST})
    gone = type(call)("call-1", "todos", call.input, call.arguments, "session-9")
    result = await carried_out(tool, gone)
    assert result.is_error
    assert result.content.startswith("The list could not be kept: ")
