"""Questions over HTTP and events: batches of several sessions, each answered or cancelled once."""

import asyncio
from pathlib import Path

from culm.ids import SessionId
from culm.testing.script import Script
from culm.wire.asks import QuestionChanged, QuestionNotification, QuestionRequest
from tests.flow.asking import (
    QuestionProbe,
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
from tests.flow.runs import Harness, ReceivedEvents, open_received, open_runs
from tests.support import WAIT_S, contract


def closed_batches(received: ReceivedEvents) -> list[str]:
    closed = received.all("question_batch_notification", QuestionNotification)
    return [closing.batch_id for closing in closed]


async def contents(harness: Harness, session_id: str = "") -> list[str]:
    messages = await harness.remote.messages(SessionId(session_id or harness.session_id))
    return [result.content for result in results_of(messages)]


def responses_to(batch: QuestionRequest, *texts: str) -> list[dict[str, str]]:
    return [
        {"request_id": question.id, "fill_in_text": text}
        for question, text in zip(batch.questions, texts, strict=False)
    ]


async def ask_in_sessions(harness: Harness, *names: str) -> tuple[list[str], list[QuestionRequest]]:
    """Let the agent ask a question in one session per name."""
    runs, asked = list[str](), list[QuestionRequest]()
    for number, name in enumerate(names, 1):
        session = await harness.remote.create_session(name)
        runs.append(await harness.prompt(f"I am {name}.", session.id))
        asked.append(await batch_in(harness.received, number))
    return runs, asked


def asking_each(*names: str) -> Script:
    return script(rules=[when(name, asking(f"{name}?", "Why?")) for name in names])


@contract("EXC-7")
async def test_question_batch_reaches_every_client_and_is_answered_once(
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
            tmp_path, kind, script(calling("question", questions=batch)), tools=[QuestionProbe()]
        ) as harness,
        open_received(harness.remote, view="crush") as crush,
    ):
        run_id = await harness.prompt("Hi.")
        asked = await batch_in(harness.received)
        assert await batch_in(crush) == asked
        assert (asked.session_id, asked.confirm_title) == (harness.session_id, "Ready to go?")
        assert [c.id for c in asked.questions[0].choices] == ["pg", "choice-2"]
        ids = [question.id for question in asked.questions]
        assert len({*ids, "", "forged", asked.id}) == 6  # All ids come from the server.
        assert await questions(harness) == {asked.id: "open"}
        first, second, _ = ids
        answers = [
            {"request_id": first, "selected_ids": ["pg", "odd"], "notes": {"pg": "v16"}},
            {"request_id": second, "yes": False},
        ]
        assert await answer_batch(harness, "", *answers)
        assert not await answer_batch(harness, "", *answers)
        assert not await answer_batch(harness, asked.id, *answers)
        assert not await cancel_batch(harness, asked.id)
        assert not await cancel_batch(harness)
        assert (await harness.received.complete(run_id)).text == "Fine."
        await crush.complete(run_id)
        assert await contents(harness) == [
            "Which?\n- PostgreSQL\nNote on PostgreSQL: v16\n\nSure?\nno\n\nElse?\n(skipped)"
        ]
        assert closed_batches(harness.received) == closed_batches(crush) == [asked.id]
        changed = harness.received.all("question_changed", QuestionChanged)
        assert [(c.batch_id, c.state) for c in changed] == [
            (asked.id, "open"), (asked.id, "answered"),
        ]  # fmt: skip
        assert await questions(harness, "all") == {asked.id: "answered"}


@contract("EXC-5", "EXC-7")
async def test_batches_of_sessions_are_open_together_and_crush_shows_one_at_a_time(
    tmp_path: Path,
) -> None:
    names = ("Adam", "Berta", "Carl", "Dora")
    async with open_asking(tmp_path, asking_each(*names), QuestionProbe()) as harness:
        runs, asked = await ask_in_sessions(harness, *names)
        adam, berta, carl, dora = asked
        ids = [batch.id for batch in asked]
        assert len({q.id for batch in asked for q in batch.questions}) == 8
        async with (
            open_received(harness.remote, view="crush") as crush,
            open_received(harness.remote) as late,
        ):
            assert await batch_in(crush) == adam
            assert await batch_in(late, 4) == dora
            assert (batches(crush), batches(late)) == (ids[:1], ids)
            # A Crush client does not name the batch; the question ids identify it.
            assert await answer_batch(harness, "", *responses_to(carl, "see"))
            assert (await crush.complete(runs[2])).error == ""
            assert batches(crush) == ids[:1]
            # A cancel without a batch id applies to the shown batch; it ends the turn.
            assert await cancel_batch(harness)
            assert await batch_in(crush, 2) == berta
            assert (await crush.complete(runs[0])).error == ""
            await harness.remote.cancel(SessionId(berta.session_id))
            assert await batch_in(crush, 3) == dora
            assert (await crush.complete(runs[1])).cancelled
            assert await questions(harness) == {dora.id: "open"}
            assert await answer_batch(harness, dora.id, *responses_to(dora, "one", "two"))
            await crush.complete(runs[3])
            assert closed_batches(crush) == [carl.id, adam.id, berta.id, dora.id]
        assert await contents(harness, adam.session_id) == ["User cancelled this question"]
        assert await contents(harness, carl.session_id) == ["Carl?\nsee\n\nWhy?\n(skipped)"]
        assert await contents(harness, dora.session_id) == ["Dora?\none\n\nWhy?\ntwo"]
        assert await questions(harness, "all") == {
            dora.id: "answered", carl.id: "answered", berta.id: "withdrawn", adam.id: "canceled",
        }  # fmt: skip
        assert len(harness.seen()) == 4 + 2  # Only the answered runs continued.


@contract("EXC-7")
async def test_answer_or_cancel_that_matches_no_batch_resolves_none(
    tmp_path: Path,
) -> None:
    names = ("Adam", "Berta")
    async with open_asking(tmp_path, asking_each(*names), QuestionProbe()) as harness:
        runs, (adam, berta) = await ask_in_sessions(harness, *names)
        both = {adam.id: "open", berta.id: "open"}
        mixed = [*responses_to(adam, "x"), *responses_to(berta, "y")]
        nothing = list[dict[str, str]]()
        for batch_id, responses in (
            ("", nothing),
            ("", [dict[str, str]()]),
            ("", [{"request_id": UNKNOWN, "fill_in_text": "x"}]),
            ("", mixed),
            (adam.id, mixed),
            (adam.id, responses_to(berta, "x")),
            (adam.id, nothing),
            (UNKNOWN, responses_to(adam, "x")),
        ):
            assert not await answer_batch(harness, batch_id, *responses), (batch_id, responses)
        assert not await cancel_batch(harness, UNKNOWN)
        assert not await resolved(harness, "/questions/answer", {})
        for body in ({"responses": 5}, {"responses": [5]}, {"responses": [{"yes": "perhaps"}]}):
            assert (await harness.request("POST", "/questions/answer", body)).status == 400
        assert await questions(harness) == both
        assert await cancel_batch(harness, berta.id)
        await harness.received.complete(runs[1])
        assert await questions(harness) == {adam.id: "open"}
        assert closed_batches(harness.received) == [berta.id]


@contract("EXC-7")
async def test_of_many_simultaneous_answers_and_cancels_exactly_one_wins(tmp_path: Path) -> None:
    async with open_asking(tmp_path, script(asking("Who?")), QuestionProbe()) as harness:
        run_id = await harness.prompt("Hi.")
        batch = await batch_in(harness.received)
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    answer_batch(harness, "", *responses_to(batch, f"text {n}"))
                    if n % 2
                    else cancel_batch(harness, batch.id),
                    name=str(n),
                )
                for n in range(20)
            ]
        [won] = [int(task.get_name()) for task in tasks if task.result()]
        await harness.received.complete(run_id)
        expected = f"Who?\ntext {won}" if won % 2 else "User cancelled this question"
        assert await contents(harness) == [expected]
        assert closed_batches(harness.received) == [batch.id]
        assert await questions(harness, "all") == {batch.id: "answered" if won % 2 else "canceled"}
