"""`culm asks`, `culm approve`, `culm deny`, `culm answer`: open asks and their answers."""

import asyncio
import json
from pathlib import Path

import pytest

from culm.cli.commands.asks import (
    PermissionAnswer,
    find_ask,
    permissions_of,
    responses_of,
    rows_of,
    too_late,
)
from culm.errors import InvalidRequest, NotFound
from culm.ids import MessageId, RunId
from culm.wire.asks import Ask, PermissionRequest, Question, QuestionResponse
from culm.wire.codec import Json
from tests.cli.conftest import CliHarness, CommandResult
from tests.flow.asking import QuestionProbe, batch_in, grants, open_asking, request_in
from tests.flow.probes import Probe, calling, script
from tests.flow.reading import results_of
from tests.support import WAIT_S


async def run_culm(cli: CliHarness, *args: str) -> CommandResult:
    """Run `culm` in another thread; the server runs in this one."""
    async with asyncio.timeout(WAIT_S):
        return await asyncio.to_thread(cli.culm, *args)


async def test_open_ask_is_listed_answered_once_and_then_gone(
    tmp_path: Path, cli: CliHarness
) -> None:
    tool = Probe("look", asks=True)
    async with open_asking(tmp_path, script(calling("look")), tool) as harness:
        where = ("--host", harness.flow.url)
        assert await run_culm(cli, "asks", *where) == CommandResult(
            0, "", "no open permission requests or questions\n"
        )
        run_id = await harness.prompt("Hi.")
        ask = await request_in(harness.received)
        short = ask.id[:8]
        assert await run_culm(cli, "asks", *where) == CommandResult(
            0, f"ask       kind  what\n{short}  look  Do look\n", ""
        )
        listed = json.loads((await run_culm(cli, "asks", "--json", *where)).out)
        assert [one["request"]["id"] for one in listed] == [ask.id]
        answered = await run_culm(cli, "approve", *where, short, "--for", "session")
        assert answered == CommandResult(0, "", "allowed: look: Do look\n")
        await harness.received.complete(run_id)
        assert len(tool.calls) == 1
        assert [grant.scope for grant in await grants(harness)] == ["session"]
        again = await run_culm(cli, "deny", *where, short)
        expected = f"culm: no open ask has the id {short}\nhint: no asks are open\n"
        assert again == CommandResult(2, "", expected)


async def test_answer_refuses_a_permission_and_deny_all_closes_every_ask(
    tmp_path: Path, cli: CliHarness
) -> None:
    tool = Probe("look", asks=True)
    async with open_asking(tmp_path, script(calling("look")), tool) as harness:
        where = ("--host", harness.flow.url)
        none = await run_culm(cli, "approve", "--all", *where)
        assert none == CommandResult(0, "", "no open permission requests\n")
        run_id = await harness.prompt("Hi.")
        short = (await request_in(harness.received)).id[:8]
        wrong = await run_culm(cli, "answer", *where, short, "allow")
        assert wrong == CommandResult(
            2,
            "",
            f"culm: {short} is a permission, not a question\n"
            f"hint: use culm approve {short} or culm deny {short}\n",
        )
        unknown = await run_culm(cli, "approve", *where, short, "zzz")
        assert unknown == CommandResult(
            2, "", f"culm: no open ask has the id zzz\nhint: open: {short} (look)\n"
        )
        denied = await run_culm(cli, "deny", "--all", *where)
        assert denied == CommandResult(0, "", "denied: look: Do look\n")
        await harness.received.complete(run_id)
        assert not tool.calls


@pytest.mark.parametrize("command", ["approve", "deny"])
@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((), "give ids that `culm asks` lists, or --all"),
        (("a", "--all"), "give ids, or --all, not both"),
    ],
)
def test_approve_and_deny_need_either_ids_or_all(
    cli: CliHarness, command: str, args: tuple[str, ...], expected: str
) -> None:
    result = cli.culm(command, *args)
    message, hint = result.err.splitlines()
    assert (result.status, result.out, message) == (2, "", f"culm: {expected}")
    assert hint.endswith(f"see `culm {command} --help`")


async def test_questions_are_listed_with_choices_and_answered_by_number_or_text(
    tmp_path: Path, cli: CliHarness
) -> None:
    choices = [{"label": "Postgres"}, {"label": "SQLite"}]
    batch: list[Json] = [
        {"question": "Which?", "description": "Pick.", "type": "single_choice", "choices": choices},
        {"question": "Else?", "description": "Say.", "type": "free_text"},
    ]
    async with open_asking(
        tmp_path, script(calling("question", questions=batch)), QuestionProbe()
    ) as harness:
        where = ("--host", harness.flow.url)
        run_id = await harness.prompt("Hi.")
        ask = await batch_in(harness.received)
        short = ask.id[:8]
        assert await run_culm(cli, "asks", *where) == CommandResult(
            0,
            "ask       kind      what\n"
            f"{short}  question  Which? (1. Postgres; 2. SQLite)\n{short}  question  Else?\n",
        )
        wrong = await run_culm(cli, "approve", *where, short)
        assert wrong == CommandResult(
            2,
            "",
            f"culm: {short} is a question, not a permission\nhint: use culm answer {short} TEXT\n",
        )
        listed = json.loads((await run_culm(cli, "asks", "--json", *where)).out)
        assert [len(one["request"]["questions"]) for one in listed] == [2]
        few = await run_culm(cli, "answer", *where, short, "2")
        assert (few.status, few.err.splitlines()[0]) == (2, "culm: 2 questions need 2 answers")
        answered = await run_culm(cli, "answer", *where, short, "2", "no, thanks")
        lines = "answered: question: Which? (1. Postgres; 2. SQLite)\nanswered: question: Else?\n"
        assert answered == CommandResult(0, "", lines)
        await harness.received.complete(run_id)
        (result,) = results_of(await harness.messages())
        assert ("SQLite" in result.content, "no, thanks" in result.content) == (True, True)


def test_arguments_are_joined_for_one_question_and_validated() -> None:
    free = Question("q", "free_text", "Which?")
    assert responses_of([free], ["use", "docs"]) == [QuestionResponse("q", fill_in_text="use docs")]
    sure = Question("q", "yes_no", "Sure?")
    assert responses_of([sure], ["yes"]) == [QuestionResponse("q", yes=True)]
    with pytest.raises(InvalidRequest, match=r"perhaps is not an answer to: Sure\?"):
        responses_of([sure], ["perhaps"])


async def test_without_a_server_no_asks_are_listed_and_answers_are_refused(
    tmp_path: Path, cli: CliHarness
) -> None:
    no_server = ("--host", f"unix://{tmp_path}/s")
    assert await run_culm(cli, "asks", "--json", *no_server) == CommandResult(0, "[]\n", "")
    for command in (("answer", "a", "yes"), ("approve", "a"), ("deny", "a")):
        result = await run_culm(cli, *command, *no_server)
        expected = f"culm: no open asks in {cli.project}"
        assert (result.status, result.err.splitlines()[0]) == (2, expected)
    gone = await run_culm(cli, "asks", "--host", "tcp://127.0.0.1:1")
    assert (gone.status, gone.err.partition(": C")[0]) == (
        6,
        "culm: cannot reach the server at tcp://127.0.0.1:1",
    )


def permission(ask_id: str, run_id: str = "r") -> Ask[PermissionRequest]:
    request = PermissionRequest(ask_id, tool_name="look")
    return Ask(request, RunId(run_id), MessageId("m"))


def test_ask_is_found_by_a_unique_id_prefix() -> None:
    one, two, three = map(permission, ("ab1", "ab2", "ab23"))
    assert find_ask([one, two], "ab2") is two
    assert find_ask([one, two, three], "ab2") is two
    assert permissions_of([one, two], ["ab1", "ab2", "ab1"]) == [one, two]
    with pytest.raises(InvalidRequest, match=r"'ab' is ambiguous \(2 matches\)") as many:
        find_ask([one, two], "ab")
    assert many.value.hint == "which one: ab1 (look), ab2 (look)"
    for ask_id in ("", "b"):
        with pytest.raises(NotFound):
            find_ask([one, two], ask_id)


def test_other_asks_of_a_denied_run_are_not_reported_as_too_late() -> None:
    given = [
        PermissionAnswer(permission("a"), is_first=True),
        PermissionAnswer(permission("b"), is_first=False),
    ]
    other = PermissionAnswer(permission("c", "another"), is_first=False)
    assert too_late([*given, other], "deny") == [other.ask]
    assert too_late([*given, other], "allow") == [given[1].ask, other.ask]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ([], "Do it"),
        (["session", "a1"], "Do it (asked by outer)"),
        (["session", "a1", "0123456789"], "Do it (asked by outer > 01234567)"),
        (["a1"], "Do it (asked by outer)"),  # A client started it outside a session.
    ],
)
def test_ask_is_listed_with_its_path_of_agents(path: list[str], expected: str) -> None:
    request = PermissionRequest("a", tool_name="look", description="Do it")
    ask = Ask(request, RunId("r"), MessageId("m"), agent_path=path)
    assert rows_of(ask, {"a1": "outer"}) == [("look", expected)]
