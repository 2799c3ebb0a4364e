"""`todos`: the to-do list of a session, shown by every client."""

import asyncio
from typing import Annotated, Literal

from msgspec import Meta, Struct

from culm.errors import AppError
from culm.ids import SessionId
from culm.model.base import ToolSpec
from culm.store.sessions import set_todos
from culm.tools.arguments import InvalidArguments, make_spec, parse_arguments
from culm.tools.base import CallPlan, CallRequest, CallResult, ToolContext, free_plan
from culm.wire.codec import Json, clean, encode
from culm.wire.messages import Todo
from culm.wire.runs import CrashPolicy
from culm.wire.tools import ToolFacts

TODOS_MAX = 100  # They are sent with every change of the session.
TODO_CHARS_MAX = 500
DESCRIPTION = (
    "Keep the list of steps of a longer task, which the user sees. Each call replaces the whole "
    "list, so always send all of it. Have one step in_progress at a time, and mark it completed "
    "as soon as it is done."
)


class TodoArgument(Struct, frozen=True):
    content: Annotated[str, Meta(min_length=1, max_length=TODO_CHARS_MAX)]  # "Run the tests"
    status: Literal["pending", "in_progress", "completed"]
    active_form: Annotated[str, Meta(max_length=TODO_CHARS_MAX)] = ""  # "Running the tests"


class TodosArguments(Struct, frozen=True):
    todos: Annotated[
        list[TodoArgument],
        Meta(
            max_length=TODOS_MAX,
            description="All steps in order: content (the step), status (pending, in_progress or "
            "completed), active_form (the step in progress, like Running the tests).",
        ),
    ]


SPEC = make_spec("todos", DESCRIPTION, TodosArguments, ToolFacts())


class TodosTool(Struct, frozen=True):
    context: ToolContext
    spec: ToolSpec = SPEC
    parallel: bool = False
    crash: CrashPolicy = "again"

    async def prepare(self, call: CallRequest) -> CallPlan | CallResult:
        try:
            arguments = parse_arguments(call.arguments or {}, TodosArguments)
        except InvalidArguments as exc:
            return CallResult(f"{call.name}: {exc}", is_error=True)
        todos = [Todo(clean(t.content), t.status, clean(t.active_form)) for t in arguments.todos]
        return free_plan(call, lambda _: self._run(call, todos))

    async def _run(self, call: CallRequest, todos: list[Todo]) -> CallResult:
        try:
            unit = set_todos(SessionId(call.session_id), todos)
            before = await asyncio.shield(self.context.store.write(unit))
        except AppError as exc:
            return CallResult(f"The list could not be kept: {exc.message}", is_error=True)
        about = encode(todos_metadata(before, todos)).decode()
        return CallResult(_describe(todos), metadata=about)


def make_todos(context: ToolContext) -> TodosTool:
    return TodosTool(context)


def todos_metadata(before: list[Todo], todos: list[Todo]) -> dict[str, Json]:
    """Describe the step from one list to the next for clients."""
    was = {todo.content: todo.status for todo in before}
    about: dict[str, Json] = {"is_new": not before, "todos": todos}
    done = [t.content for t in todos if t.status == "completed"]
    just_done = [one for one in done if before and was.get(one) != "completed"]
    started = [
        todo.active_form or todo.content
        for todo in todos
        if todo.status == "in_progress" and was.get(todo.content) != "in_progress"
    ]
    if just_done:
        about["just_completed"] = just_done
    if started:
        about["just_started"] = started[0]
    return {**about, "completed": len(done), "total": len(todos)}


def _describe(todos: list[Todo]) -> str:
    if not todos:
        return "The list is empty now."
    statuses = [todo.status for todo in todos]
    going = statuses.count("in_progress")
    text = f"The list is kept: {statuses.count('completed')} of {len(todos)} completed."
    if going > 1:
        text += f" {going} steps are in progress; have one at a time."
    elif not going and "pending" in statuses:
        text += " Mark the next step as in_progress."
    return text
