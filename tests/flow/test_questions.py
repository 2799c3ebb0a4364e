"""Questions over HTTP and events: batches of several sessions, each answered or declined once."""

import asyncio
from pathlib import Path

from culm.ids import SessionId
from culm.testing.script import Script
from culm.wire.asks import QuestionChanged, QuestionNotification, QuestionRequest
from tests.flow.asking import (
    Questioning,
    answer_batch,
    asking,
    batch_in,
    batches,
    cancel_batch,
    open_asking,
    questions,
    resolved,
    when,
)
from tests.flow.drive import UNKNOWN
from tests.flow.probes import calling, script
from tests.flow.reading import results_of
from tests.flow.runs import Heard, Stage, open_heard, open_runs
from tests.support import WAIT_S, contract


def closings(heard: Heard) -> list[str]:
    told = heard.all("question_batch_notification", QuestionNotification)
    return [closing.batch_id for closing in told]


async def contents(stage: Stage, session_id: str = "") -> list[str]:
    messages = await stage.remote.messages(SessionId(session_id or stage.session_id))
    return [result.content for result in results_of(messages)]


def said(batch: QuestionRequest, *texts: str) -> list[dict[str, str]]:
    return [
        {"request_id": question.id, "fill_in_text": text}
        for question, text in zip(batch.questions, texts, strict=False)
    ]


async def ask_in_sessions(stage: Stage, *words: str) -> tuple[list[str], list[QuestionRequest]]:
    """Let the agent ask something in one session for each word."""
    runs, asked = list[str](), list[QuestionRequest]()
    for number, word in enumerate(words, 1):
        session = await stage.remote.create_session(word)
        runs.append(await stage.prompt(f"I am {word}.", session.id))
        asked.append(await batch_in(stage.heard, number))
    return runs, asked


def asking_each(*words: str) -> Script:
    return script(rules=[when(word, asking(f"{word}?", "Why?")) for word in words])


@contract("EXC-7")
async def test_a_batch_is_shown_to_all_answered_once_and_read_by_the_model(
    tmp_path: Path, kind: str
) -> None:
    choices = [{"label": "PostgreSQL", "id": "pg"}, {"label": "SQLite"}]
    batch = [
        {"question": "Which?", "description": "Pick.", "type": "multi_choice", "choices": choices},
        {"question": "Sure?", "description": "Say.", "type": "yes_no", "id": "forged"},
        {"question": "Else?", "description": "Say.", "type": "free_text"},
    ]
    async with (
        open_runs(
            tmp_path, kind, script(calling("question", questions=batch)), tools=[Questioning()]
        ) as stage,
        open_heard(stage.remote, view="crush") as crush,
    ):
        run_id = await stage.prompt("Hi.")
        asked = await batch_in(stage.heard)
        assert await batch_in(crush) == asked
        assert (asked.session_id, asked.confirm_title) == (stage.session_id, "Ready to go?")
        assert [c.id for c in asked.questions[0].choices] == ["pg", "choice-2"]
        ids = [question.id for question in asked.questions]
        assert len({*ids, "", "forged", asked.id}) == 6  # All are made by the server.
        assert await questions(stage) == {asked.id: "open"}
        first, second, _ = ids
        answers = [
            {"request_id": first, "selected_ids": ["pg", "odd"], "notes": {"pg": "v16"}},
            {"request_id": second, "yes": False},
        ]
        assert await answer_batch(stage, "", *answers)
        assert not await answer_batch(stage, "", *answers)
        assert not await answer_batch(stage, asked.id, *answers)
        assert not await cancel_batch(stage, asked.id)
        assert not await cancel_batch(stage)
        assert (await stage.heard.complete(run_id)).text == "Fine."
        await crush.complete(run_id)
        assert await contents(stage) == [
            "Which?\n- PostgreSQL\nNote on PostgreSQL: v16\n\nSure?\nno\n\nElse?\n(skipped)"
        ]
        assert closings(stage.heard) == closings(crush) == [asked.id]
        changed = stage.heard.all("question_changed", QuestionChanged)
        assert [(c.batch_id, c.state) for c in changed] == [
            (asked.id, "open"), (asked.id, "answered"),
        ]  # fmt: skip
        assert await questions(stage, "all") == {asked.id: "answered"}


@contract("EXC-5", "EXC-7")
async def test_batches_of_several_sessions_wait_side_by_side_and_crush_is_shown_one_at_a_time(
    tmp_path: Path,
) -> None:
    words = ("Adam", "Berta", "Carl", "Dora")
    async with open_asking(tmp_path, asking_each(*words), Questioning()) as stage:
        runs, asked = await ask_in_sessions(stage, *words)
        adam, berta, carl, dora = asked
        ids = [batch.id for batch in asked]
        assert len({q.id for batch in asked for q in batch.questions}) == 8
        async with (
            open_heard(stage.remote, view="crush") as crush,
            open_heard(stage.remote) as late,
        ):
            assert await batch_in(crush) == adam
            assert await batch_in(late, 4) == dora
            assert (batches(crush), batches(late)) == (ids[:1], ids)
            # A Crush client names no batch: the ids of the questions say which is meant.
            assert await answer_batch(stage, "", *said(carl, "see"))
            assert (await crush.complete(runs[2])).error == ""
            assert batches(crush) == ids[:1]
            # Nor with a cancel, which is for the one that is shown; that ends the turn.
            assert await cancel_batch(stage)
            assert await batch_in(crush, 2) == berta
            assert (await crush.complete(runs[0])).error == ""
            await stage.remote.cancel(SessionId(berta.session_id))
            assert await batch_in(crush, 3) == dora
            assert (await crush.complete(runs[1])).cancelled
            assert await questions(stage) == {dora.id: "open"}
            assert await answer_batch(stage, dora.id, *said(dora, "one", "two"))
            await crush.complete(runs[3])
            assert closings(crush) == [carl.id, adam.id, berta.id, dora.id]
        assert await contents(stage, adam.session_id) == ["User cancelled this question"]
        assert await contents(stage, carl.session_id) == ["Carl?\nsee\n\nWhy?\n(skipped)"]
        assert await contents(stage, dora.session_id) == ["Dora?\none\n\nWhy?\ntwo"]
        assert await questions(stage, "all") == {
            dora.id: "answered", carl.id: "answered", berta.id: "withdrawn", adam.id: "canceled",
        }  # fmt: skip
        assert len(stage.seen()) == 4 + 2  # Only those that were answered went on.


@contract("EXC-7")
async def test_an_answer_that_fits_no_batch_resolves_none_and_a_cancel_of_another_none(
    tmp_path: Path,
) -> None:
    words = ("Adam", "Berta")
    async with open_asking(tmp_path, asking_each(*words), Questioning()) as stage:
        runs, (adam, berta) = await ask_in_sessions(stage, *words)
        both = {adam.id: "open", berta.id: "open"}
        mixed = [*said(adam, "x"), *said(berta, "y")]
        nothing = list[dict[str, str]]()
        for batch_id, responses in (
            ("", nothing),
            ("", [dict[str, str]()]),
            ("", [{"request_id": UNKNOWN, "fill_in_text": "x"}]),
            ("", mixed),
            (adam.id, mixed),
            (adam.id, said(berta, "x")),
            (adam.id, nothing),
            (UNKNOWN, said(adam, "x")),
        ):
            assert not await answer_batch(stage, batch_id, *responses), (batch_id, responses)
        assert not await cancel_batch(stage, UNKNOWN)
        assert not await resolved(stage, "/questions/answer", {})
        for body in ({"responses": 5}, {"responses": [5]}, {"responses": [{"yes": "perhaps"}]}):
            assert (await stage.request("POST", "/questions/answer", body)).status == 400
        assert await questions(stage) == both
        assert await cancel_batch(stage, berta.id)
        await stage.heard.complete(runs[1])
        assert await questions(stage) == {adam.id: "open"}
        assert closings(stage.heard) == [berta.id]


@contract("EXC-7")
async def test_of_many_answers_and_cancels_at_once_exactly_one_counts(tmp_path: Path) -> None:
    async with open_asking(tmp_path, script(asking("Who?")), Questioning()) as stage:
        run_id = await stage.prompt("Hi.")
        batch = await batch_in(stage.heard)
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    answer_batch(stage, "", *said(batch, f"text {n}"))
                    if n % 2
                    else cancel_batch(stage, batch.id),
                    name=str(n),
                )
                for n in range(20)
            ]
        [won] = [int(task.get_name()) for task in tasks if task.result()]
        await stage.heard.complete(run_id)
        expected = f"Who?\ntext {won}" if won % 2 else "User cancelled this question"
        assert await contents(stage) == [expected]
        assert closings(stage.heard) == [batch.id]
        assert await questions(stage, "all") == {batch.id: "answered" if won % 2 else "canceled"}
