"""Permission and question dialogs at two Crush clients, with the real tools."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from culm.testing.script import Reply, ScriptedCall
from culm.wire.codec import Json
from tests.crush_client.agents import (
    Agent,
    assert_no_errors,
    conversation,
    events_of,
    finishes,
    open_agent,
    open_attached,
    until_turn_ended,
)
from tests.crush_client.client import Tui
from tests.crush_client.golang import mapping, to_json
from tests.crush_client.servers import Pauses

DENIED = "User denied permission"


def calling(name: str, call_id: str, **arguments: Json) -> Reply:
    return Reply(calls=[ScriptedCall(name=name, id=call_id, input=arguments)])


def writing(n: int) -> Reply:
    return calling("write", f"call_{n}", file_path=f"x{n}", content="x")


async def dialog(tui: Tui, call_id: str) -> dict[str, object]:
    """Wait for the dialog of a call; returns the decoded request."""

    def is_open() -> bool:
        shown = tui.screen.permission
        return shown is not None and shown.text("tool_call_id") == call_id

    await tui.until(is_open)
    return mapping(to_json(tui.screen.permission))


async def until_closed(*tuis: Tui) -> None:
    for tui in tuis:
        await tui.until(lambda tui=tui: tui.screen.permission is None)


async def result_of_call(tui: Tui, call_id: str) -> str:
    """Wait for the result of a call."""
    await tui.until(lambda: call_id in tui.screen.calls)
    await tui.until(lambda: tui.screen.calls[call_id].state == "done")
    return tui.screen.calls[call_id].result


def dialogs(tui: Tui) -> list[str]:
    """The permission events in order."""
    found: list[str] = []
    for event in events_of(tui):
        call_id = event.payload.values.get("tool_call_id")
        if event.type == "permission_request":
            found.append(f"asks {call_id}")
        elif event.type == "permission_notification":
            answer = [word for word in ("granted", "denied") if event.payload.flag(word)]
            found.append(f"{''.join(answer) or 'waits'} {call_id}")
    return found


@asynccontextmanager
async def open_pair(agent: Agent) -> AsyncGenerator[tuple[Tui, Tui]]:
    """Open two TUIs on one session."""
    async with open_attached(agent) as first:
        await first.sessions.create()
        async with open_attached(agent, session=first.screen.session_id) as second:
            yield first, second


# --- permissions


async def test_each_tool_opens_its_own_dialog_and_a_denial_ends_the_turn(
    tmp_path: Path,
) -> None:
    project, outside = tmp_path / "project", tmp_path / "outside"
    for folder in (project, outside):
        folder.mkdir()
        (folder / "a.txt").write_text("one\n")
    file = str(project / "a.txt")
    write = {"file_path": file, "old_content": "one\n", "new_content": "two\n"}
    edit: Json = {"old_string": "one", "new_string": "two"}
    url = "http://127.0.0.1:9/x"
    command: dict[str, Json] = {"command": "rm a.txt", "description": "Remove it"}
    bash = {"working_dir": "", "run_in_background": False, "auto_background_after": 0}
    view = {"file_path": str(outside / "a.txt"), "offset": 0, "limit": 0}
    listed: Json = {"path": str(outside), "ignore": [], "depth": 2}
    new = {"file_path": str(project / "new.txt"), "new_content": "new\n"}
    download = {"url": url, "file_path": str(project / "x"), "timeout": 5}
    cases: list[tuple[str, dict[str, Json], str, Path, object]] = [
        ("bash", command, "execute", project, command | bash),
        ("edit", {"file_path": "a.txt", **edit}, "write", project, write),
        ("multiedit", {"file_path": "a.txt", "edits": [edit]}, "write", project, write),
        ("write", {"file_path": "a.txt", "content": "two\n"}, "write", project, write),
        ("write", {"file_path": "new.txt", "content": "new\n"}, "write", project, new),
        ("view", {"file_path": "../outside/a.txt"}, "read", outside, view),
        ("ls", {"path": str(outside)}, "list", outside, listed),
        ("fetch", {"url": url}, "fetch", project, {"url": url, "format": "markdown"}),
        ("download", {"url": url, "file_path": "x", "timeout": 5}, "download", project, download),
    ]
    replies = [calling(name, f"call_{n}", **given) for n, (name, given, *_) in enumerate(cases)]
    read = calling("view", "read", file_path="a.txt")  # It needs no permission.
    async with (
        open_agent(tmp_path, "unix", read, *replies, has_real_tools=True) as agent,
        open_attached(agent) as tui,
    ):
        await tui.sessions.create()
        for n, (name, _, action, path, params) in enumerate(cases):
            await tui.api.call(36, {"session_id": tui.screen.session_id, "prompt": "go"})
            shown = await dialog(tui, f"call_{n}")
            assert shown.pop("id")
            assert name in ("bash", "fetch", "download") or str(path) in str(shown["description"])
            del shown["description"]
            assert shown == {
                "session_id": tui.screen.session_id,
                "tool_call_id": f"call_{n}",
                "tool_name": name,
                "action": action,
                "params": params,
                "path": str(path),
            }
            assert await tui.answer_permission("deny")
            assert await result_of_call(tui, f"call_{n}") == DENIED
            await tui.until(lambda: conversation(tui)[-1] == ("assistant", "", "end_turn"))
        assert [p.name for p in project.iterdir()] == ["a.txt"]
        assert (project / "a.txt").read_text() == "one\n"
        assert_no_errors(tui)


async def test_first_allow_closes_all_dialogs_and_changes_reach_every_client(
    tmp_path: Path, kind: str
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    path, other = str(project / "a.txt"), str(project / "b.txt")
    (project / "a.txt").write_text("one\n")
    todos: Json = [
        {"content": "Look", "status": "completed", "active_form": ""},
        {"content": "Write", "status": "in_progress", "active_form": "Writing"},
    ]
    replies = (
        calling("view", "call_1", file_path="a.txt"),
        calling("edit", "call_2", file_path="a.txt", old_string="one", new_string="two"),
        calling("todos", "call_3", todos=todos),
        Reply(text="Done."),
    )
    async with (
        open_agent(tmp_path, kind, *replies, has_real_tools=True) as agent,
        open_pair(agent) as (first, second),
    ):
        assert await first.send_prompt("change it")
        for tui in (first, second):
            await dialog(tui, "call_2")
        assert await second.answer_permission("allow")
        await until_closed(first)
        for tui in (first, second):
            await until_turn_ended(tui)
            await tui.until(lambda tui=tui: tui.screen.todos == ["Look", "Write"])
            await tui.until(lambda tui=tui: tui.screen.changes == {path: ("one\n", "two\n")})
            assert dialogs(tui) == ["waits call_2", "asks call_2", "granted call_2"]
            assert {call.state for call in tui.screen.calls.values()} == {"done"}
        assert (project / "a.txt").read_text() == "two\n"
        assert await first.sessions.load(first.screen.session_id)
        assert (first.screen.files, first.screen.todos) == ([path], ["Look", "Write"])
        assert first.screen.changes == {path: ("one\n", "two\n")}
        query = {"session_id": first.screen.session_id}
        was_read = [
            await first.api.call(25, query={**query, "path": name}) for name in (path, other)
        ]
        assert [str(when)[:4] for when in was_read] == ["2027", "0001"]
        assert_no_errors(first, second)


async def test_session_grant_covers_its_session_and_no_other(
    tmp_path: Path,
) -> None:
    replies = [writing(n) for n in (1, 2, 3)]
    replies.insert(2, Reply(text="Done."))
    async with (
        open_agent(tmp_path, "unix", *replies, has_real_tools=True) as agent,
        open_attached(agent) as first,
        open_attached(agent) as second,
    ):
        assert await first.send_prompt("write")
        await dialog(second, "call_1")  # Shown for any session.
        await dialog(first, "call_1")
        async with asyncio.TaskGroup() as tasks:  # Both answer at once; one is first.
            answers = [
                tasks.create_task(tui.answer_permission("allow_session")) for tui in (first, second)
            ]
        assert sorted(answer.result() for answer in answers) == [False, True]
        await until_turn_ended(first)
        assert dialogs(first) == [
            "waits call_1",
            "asks call_1",
            "granted call_1",
            "waits call_2",
            "granted call_2",
        ]
        assert await second.send_prompt("write")
        await dialog(second, "call_3")
        await dialog(first, "call_3")
        assert await second.answer_permission("deny")
        await until_closed(first)
        await until_turn_ended(second)
        found = sorted(path.name for path in (tmp_path / "project").iterdir())
        assert found == ["x1", "x2"]
        assert_no_errors(first, second)


async def test_asks_of_two_sessions_are_shown_in_turn_and_to_late_clients(
    tmp_path: Path, kind: str
) -> None:
    replies = writing(1), writing(2), Reply(text="One.")
    pauses = Pauses()
    async with (
        open_agent(tmp_path, kind, *replies, has_real_tools=True) as agent,
        open_attached(agent) as first,
        open_attached(agent, sleep=pauses) as second,
    ):
        assert await first.send_prompt("write")
        await dialog(first, "call_1")
        assert await second.send_prompt("write")
        await second.until(lambda: "waits call_2" in dialogs(second))
        async with open_attached(agent) as late:
            await dialog(late, "call_1")
            assert dialogs(late).count("asks call_1") == 1
            assert "asks call_2" not in dialogs(late)
            assert await late.answer_permission("allow")
            for tui in (first, late):
                await dialog(tui, "call_2")
                seen = dialogs(tui)
                assert seen.index("granted call_1") < seen.index("asks call_2")
            assert_no_errors(late)
        pauses.hold()
        await second.api.transport.aclose()  # Disconnected, then reconnected.
        await second.events.until(lambda: second.events.degraded)
        second.screen.permission = None
        pauses.release()
        await dialog(second, "call_2")
        await first.until(
            lambda: finishes(first)[-1:] == ["end_turn"]
        )  # Otherwise it is still busy.
        await second.cancel()
        await until_turn_ended(second, finish="canceled")
        await until_closed(first, second)
        await until_turn_ended(first)
        assert dialogs(first)[-2:] == ["asks call_2", "denied call_2"]
        assert [path.name for path in (tmp_path / "project").iterdir()] == ["x1"]
        assert_no_errors(first)


async def test_skip_keeps_an_open_dialog_and_prevents_further_ones(
    tmp_path: Path,
) -> None:
    replies = [writing(n) for n in (1, 2)]
    async with (
        open_agent(tmp_path, "unix", *replies, Reply(text="Done."), has_real_tools=True) as agent,
        open_pair(agent) as (first, second),
    ):
        assert await first.send_prompt("write")
        await dialog(first, "call_1")
        await dialog(second, "call_1")
        await second.set_skip(skip=True)
        await first.polling.agent()
        assert first.screen.skip
        assert first.screen.permission is not None
        assert await first.answer_permission("allow")
        await until_turn_ended(first)
        assert dialogs(first) == ["waits call_1", "asks call_1", "granted call_1"]
        found = sorted(path.name for path in (tmp_path / "project").iterdir())
        assert found == ["x1", "x2"]
        assert_no_errors(first, second)


# --- questions


async def test_questions_are_answered_once_and_can_be_canceled(tmp_path: Path, kind: str) -> None:
    choices: Json = [{"id": "pg", "label": "PostgreSQL"}, {"id": "lite", "label": "SQLite"}]
    which = {"type": "single_choice", "question": "Which database?", "description": "One."}
    more = {"type": "yes_no", "question": "Migrations?", "description": "A folder.", "label": "M"}
    replies = (
        calling("question", "call_1", questions=[{**which, "choices": choices}, more]),
        calling("question", "call_2", questions=[more]),
        Reply(text="Never asked."),
    )
    async with (
        open_agent(tmp_path, kind, *replies, has_real_tools=True) as agent,
        open_pair(agent) as (first, second),
    ):
        assert await first.send_prompt("ask me")
        for tui in (first, second):
            await tui.until(lambda tui=tui: tui.screen.questions is not None)
        form = first.screen.questions
        assert form is not None
        one, two = form.records("questions")
        assert to_json(form) == {
            "id": form.text("id"),
            "session_id": first.screen.session_id,
            "tool_call_id": "call_1",
            "questions": [
                {"id": one.text("id"), **which, "choices": choices},
                {"id": two.text("id"), **more},
            ],
            "confirm_title": "Ready to go?",
            "confirm_description": "Review your answers above and confirm.",
        }
        responses = [
            {"request_id": one.text("id"), "selected_ids": ["pg"], "notes": {"pg": "v16"}},
            {"request_id": two.text("id")},
        ]
        async with asyncio.TaskGroup() as tasks:  # Both answer at once; one is first.
            answers = [
                tasks.create_task(tui.answer_questions([*responses])) for tui in (first, second)
            ]
        assert sorted(answer.result() for answer in answers) == [False, True]
        assert await result_of_call(first, "call_1") == (
            "Which database?\n- PostgreSQL\nNote on PostgreSQL: v16\n\nMigrations?\n(skipped)"
        )
        await second.until(
            lambda: second.screen.questions is not None and _call(second) == "call_2"
        )
        assert await second.cancel_questions()
        await first.until(lambda: first.screen.questions is None)
        assert not await first.cancel_questions()
        assert await result_of_call(first, "call_2") == "User cancelled this question"
        await until_turn_ended(first)
        assert_no_errors(first, second)


def _call(tui: Tui) -> str:
    assert tui.screen.questions is not None
    return tui.screen.questions.text("tool_call_id")
