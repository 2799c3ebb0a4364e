"""`culm asks`, `culm answer`, `culm ps`: a look at a server, and one answer to it."""

import asyncio
import json
from pathlib import Path

import pytest

from culm.cli.asks import age_text, find_ask, responses_of, rows_of
from culm.errors import InvalidRequest, NotFound
from culm.ids import MessageId, RunId
from culm.testing.model_server import open_model_server
from culm.wire.asks import Ask, PermissionRequest, Question, QuestionResponse
from culm.wire.codec import Json
from tests.cli.conftest import Desk, Said
from tests.flow.asking import Questioning, batch_in, grants, open_asking, request_in
from tests.flow.probes import Probe, calling, script
from tests.flow.reading import results_of
from tests.flow.written import open_written
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
        assert await say(desk, "asks", *where) == Said(0, f"{ask.id[:8]}  look  Do look\n", "")
        listed = json.loads((await say(desk, "asks", "--json", *where)).out)
        assert [one["request"]["id"] for one in listed] == [ask.id]
        wrong = await say(desk, "answer", *where, ask.id[:8], "perhaps")
        assert wrong.err == (
            "culm: perhaps is no answer to this\nhint: say allow, session, workspace, deny\n"
        )
        answered = await say(desk, "answer", *where, ask.id[:8], "session")
        assert answered == Said(0, "", "allowed: look: Do look\n")
        await stage.heard.complete(run_id)
        assert len(tool.calls) == 1
        assert [grant.scope for grant in await grants(stage)] == ["session"]
        again = await say(desk, "answer", *where, ask.id[:8], "deny")
        words = f"culm: no open ask has the id {ask.id[:8]}\nhint: `culm asks` lists them\n"
        assert again == Said(1, "", words)


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
            f"{short}  question  Which? (1. Postgres; 2. SQLite)\n{short}  question  Else?\n",
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
    assert await say(desk, "ps", *nobody) == Said(0, "", "nothing runs here\n")
    assert await say(desk, "asks", "--json", *nobody) == Said(0, "[]\n", "")
    told = await say(desk, "answer", *nobody, "a", "allow")
    assert told == Said(1, "", f"culm: nothing is asked in {desk.project}\n")
    gone = await say(desk, "ps", "--host", "tcp://127.0.0.1:1")
    assert (gone.status, gone.err.partition(": C")[0]) == (
        1,
        "culm: cannot reach the server at tcp://127.0.0.1:1",
    )


async def test_processes_are_listed_while_they_run(tmp_path: Path, desk: Desk) -> None:
    async with (
        open_model_server() as nobody,
        open_written(tmp_path, nobody, None, tools=None) as stage,
    ):
        where = ("--host", stage.flow.url)
        run_id = await stage.prompt("run echo up; sleep 60", approve="allow")
        async with asyncio.timeout(WAIT_S):
            while not (found := await stage.remote.processes()):
                await asyncio.sleep(0.01)
        (process,) = found
        pid, kind, age, *memory, command = (await say(desk, "ps", *where)).out.split(None, 5)
        assert (pid, kind, memory[1]) == (str(process.pid), "call", "MiB")
        assert (age, command) == ("0:00", "echo up; sleep 60\n")
        await stage.cancel()
        await stage.heard.complete(run_id)
        assert await say(desk, "ps", *where) == Said(0, "", "nothing runs here\n")


def test_an_ask_is_found_by_the_beginning_of_its_id_if_only_one_has_it() -> None:
    one, two = (
        Ask(PermissionRequest(ask_id), RunId("r"), MessageId("m")) for ask_id in ("ab1", "ab2")
    )
    assert find_ask([one, two], "ab2") is two
    with pytest.raises(InvalidRequest, match="2 open asks begin with ab"):
        find_ask([one, two], "ab")
    for ask_id in ("", "b"):
        with pytest.raises(NotFound):
            find_ask([one, two], ask_id)


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


def test_an_age_is_told_in_minutes_and_from_an_hour_on_in_hours() -> None:
    assert [age_text(age_s) for age_s in (0.9, 61, 3600, 90061)] == [
        "0:00",
        "1:01",
        "1:00:00",
        "25:01:01",
    ]
