"""`culm asks`, `culm approve`, `culm deny`, `culm answer`: what is open, and one answer to it."""

import asyncio
import json
from pathlib import Path

import pytest

from culm.cli.asks import (
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
from tests.cli.conftest import Desk, Said
from tests.flow.asking import Questioning, batch_in, grants, open_asking, request_in
from tests.flow.probes import Probe, calling, script
from tests.flow.reading import results_of
from tests.support import WAIT_S


async def say(desk: Desk, *args: str) -> Said:
    """Beside the server, which has this thread."""
    async with asyncio.timeout(WAIT_S):
        return await asyncio.to_thread(desk.culm, *args)


async def test_what_is_open_is_listed_answered_once_and_then_gone(
    tmp_path: Path, desk: Desk
) -> None:
    tool = Probe("look", asks=True)
    async with open_asking(tmp_path, script(calling("look")), tool) as stage:
        where = ("--host", stage.flow.url)
        assert await say(desk, "asks", *where) == Said(0, "", "nothing is asked here\n")
        run_id = await stage.prompt("Hi.")
        ask = await request_in(stage.heard)
        short = ask.id[:8]
        assert await say(desk, "asks", *where) == Said(
            0, f"ask       kind  what\n{short}  look  Do look\n", ""
        )
        listed = json.loads((await say(desk, "asks", "--json", *where)).out)
        assert [one["request"]["id"] for one in listed] == [ask.id]
        answered = await say(desk, "approve", *where, short, "--for", "session")
        assert answered == Said(0, "", "allowed: look: Do look\n")
        await stage.heard.complete(run_id)
        assert len(tool.calls) == 1
        assert [grant.scope for grant in await grants(stage)] == ["session"]
        again = await say(desk, "deny", *where, short)
        words = (
            f"culm: no open ask has the id {short}\nhint: nothing is open; `culm asks` lists it\n"
        )
        assert again == Said(2, "", words)


async def test_a_permission_is_not_answered_in_words_and_all_are_settled_at_once(
    tmp_path: Path, desk: Desk
) -> None:
    tool = Probe("look", asks=True)
    async with open_asking(tmp_path, script(calling("look")), tool) as stage:
        where = ("--host", stage.flow.url)
        none = await say(desk, "approve", "--all", *where)
        assert none == Said(0, "", "nothing is asked here\n")
        run_id = await stage.prompt("Hi.")
        short = (await request_in(stage.heard)).id[:8]
        wrong = await say(desk, "answer", *where, short, "allow")
        assert wrong == Said(
            2,
            "",
            f"culm: {short} is a permission, no question\n"
            f"hint: culm approve {short}, or culm deny {short}\n",
        )
        unknown = await say(desk, "approve", *where, short, "zzz")
        assert unknown == Said(
            2, "", f"culm: no open ask has the id zzz\nhint: open: {short} (look)\n"
        )
        denied = await say(desk, "deny", "--all", *where)
        assert denied == Said(0, "", "denied: look: Do look\n")
        await stage.heard.complete(run_id)
        assert not tool.calls


@pytest.mark.parametrize("command", ["approve", "deny"])
@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "say which: ids that `culm asks` lists, or --all"),
        (("a", "--all"), "give ids, or --all, not both"),
    ],
)
def test_which_asks_are_meant_must_be_said(
    desk: Desk, command: str, args: tuple[str, ...], words: str
) -> None:
    said = desk.culm(command, *args)
    told, hint = said.err.splitlines()
    assert (said.status, said.out, told) == (2, "", f"culm: {words}")
    assert hint.endswith(f"culm {command} --help` explains it, with an example")


async def test_questions_are_listed_with_their_choices_and_answered_in_words_or_numbers(
    tmp_path: Path, desk: Desk
) -> None:
    choices = [{"label": "Postgres"}, {"label": "SQLite"}]
    batch: list[Json] = [
        {"question": "Which?", "description": "Pick.", "type": "single_choice", "choices": choices},
        {"question": "Else?", "description": "Say.", "type": "free_text"},
    ]
    async with open_asking(
        tmp_path, script(calling("question", questions=batch)), Questioning()
    ) as stage:
        where = ("--host", stage.flow.url)
        run_id = await stage.prompt("Hi.")
        ask = await batch_in(stage.heard)
        short = ask.id[:8]
        assert await say(desk, "asks", *where) == Said(
            0,
            "ask       kind      what\n"
            f"{short}  question  Which? (1. Postgres; 2. SQLite)\n{short}  question  Else?\n",
        )
        wrong = await say(desk, "approve", *where, short)
        assert wrong == Said(
            2,
            "",
            f"culm: {short} is a question, no permission\nhint: culm answer {short} YOUR WORDS\n",
        )
        listed = json.loads((await say(desk, "asks", "--json", *where)).out)
        assert [len(one["request"]["questions"]) for one in listed] == [2]
        few = await say(desk, "answer", *where, short, "2")
        assert (few.status, few.err.splitlines()[0]) == (2, "culm: there are 2 questions to answer")
        answered = await say(desk, "answer", *where, short, "2", "no, thanks")
        lines = "answered: question: Which? (1. Postgres; 2. SQLite)\nanswered: question: Else?\n"
        assert answered == Said(0, "", lines)
        await stage.heard.complete(run_id)
        (result,) = results_of(await stage.messages())
        assert ("SQLite" in result.content, "no, thanks" in result.content) == (True, True)


def test_to_a_single_question_all_words_are_one_answer_and_nonsense_is_refused() -> None:
    free = Question("q", "free_text", "Which?")
    assert responses_of([free], ["use", "docs"]) == [QuestionResponse("q", fill_in_text="use docs")]
    sure = Question("q", "yes_no", "Sure?")
    assert responses_of([sure], ["yes"]) == [QuestionResponse("q", yes=True)]
    with pytest.raises(InvalidRequest, match=r"perhaps is no answer to: Sure\?"):
        responses_of([sure], ["perhaps"])


async def test_where_no_server_runs_or_none_knows_the_directory_there_is_nothing(
    tmp_path: Path, desk: Desk
) -> None:
    nobody = ("--host", f"unix://{tmp_path}/s")
    assert await say(desk, "asks", "--json", *nobody) == Said(0, "[]\n", "")
    for command in (("answer", "a", "yes"), ("approve", "a"), ("deny", "a")):
        told = await say(desk, *command, *nobody)
        words = f"culm: nothing is asked in {desk.project}"
        assert (told.status, told.err.splitlines()[0]) == (2, words)
    gone = await say(desk, "asks", "--host", "tcp://127.0.0.1:1")
    assert (gone.status, gone.err.partition(": C")[0]) == (
        6,
        "culm: cannot reach the server at tcp://127.0.0.1:1",
    )


def permission(ask_id: str, run_id: str = "r") -> Ask[PermissionRequest]:
    request = PermissionRequest(ask_id, tool_name="look")
    return Ask(request, RunId(run_id), MessageId("m"))


def test_an_ask_is_found_by_the_beginning_of_its_id_if_only_one_has_it() -> None:
    one, two, three = map(permission, ("ab1", "ab2", "ab23"))
    assert find_ask([one, two], "ab2") is two
    assert find_ask([one, two, three], "ab2") is two
    assert permissions_of([one, two], ["ab1", "ab2", "ab1"]) == [one, two]
    with pytest.raises(InvalidRequest, match="2 open asks begin with ab") as many:
        find_ask([one, two], "ab")
    assert many.value.hint == "which one: ab1 (look), ab2 (look)"
    for ask_id in ("", "b"):
        with pytest.raises(NotFound):
            find_ask([one, two], ask_id)


def test_what_a_denied_run_asked_for_as_well_was_not_answered_too_late() -> None:
    given = [
        PermissionAnswer(permission("a"), is_first=True),
        PermissionAnswer(permission("b"), is_first=False),
    ]
    other = PermissionAnswer(permission("c", "another"), is_first=False)
    assert too_late([*given, other], "deny") == [other.ask]
    assert too_late([*given, other], "allow") == [given[1].ask, other.ask]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ([], "Do it"),
        (["session", "a1"], "Do it (asked by outer)"),
        (["session", "a1", "0123456789"], "Do it (asked by outer > 01234567)"),
        (["a1"], "Do it (asked by outer)"),  # A client has started it, outside a conversation.
    ],
)
def test_an_ask_is_told_with_the_agents_that_lead_to_it(path: list[str], words: str) -> None:
    request = PermissionRequest("a", tool_name="look", description="Do it")
    ask = Ask(request, RunId("r"), MessageId("m"), agent_path=path)
    assert rows_of(ask, {"a1": "outer"}) == [("look", words)]
