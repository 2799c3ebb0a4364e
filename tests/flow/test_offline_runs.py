"""The model that is always there: on a fresh server it works with real tools, and costs nothing."""

from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from culm.testing.model_server import open_model_server
from culm.wire.agent import AgentInfo
from culm.wire.events import MessageDelta
from culm.wire.messages import full_text
from tests.flow.drive import until
from tests.flow.probes import Gate, Probe
from tests.flow.reading import assert_answered, calls_of, results_of
from tests.flow.runs import Stage
from tests.flow.written import open_written
from tests.support import NO_MODEL, contract

PROMPT = "list the files and read README.md"
README = "# Plums\n\nHow to grow them."


@asynccontextmanager
async def open_fresh(folder: Path, tools: Iterable[Probe] | None = None) -> AsyncGenerator[Stage]:
    """A server that nobody has configured, beside a small project."""
    project = folder / "project"
    (project / "src").mkdir(parents=True)
    (project / "README.md").write_text(f"{README}\n")
    (project / "src" / "tree.py").write_text("HEIGHT_M = 4\n")
    async with (
        open_model_server() as nobody,
        open_written(folder, nobody, None, tools=tools) as stage,
    ):
        yield stage
        assert nobody.requests == []


async def test_a_fresh_server_is_ready_and_says_who_answers(tmp_path: Path) -> None:
    async with open_fresh(tmp_path) as stage:
        info = await stage.ask("/agent", AgentInfo)
        assert (info.is_ready, info.model_cfg.provider, info.model_cfg.model) == (
            True,
            "offline",
            "offline",
        )
        assert stage.remote.info.notices == []


@contract("INV-82", "MODEL-4")
async def test_a_prompt_makes_real_calls_and_is_answered_from_their_results(tmp_path: Path) -> None:
    async with open_fresh(tmp_path) as stage:
        run_id = await stage.prompt(PROMPT)
        complete = await stage.heard.complete(run_id)
        messages = await stage.messages()
        assert [(call.name, call.input) for call in calls_of(messages)] == [
            ("ls", "{}"),
            ("view", '{"file_path":"README.md"}'),
        ]
        assert_answered(messages)
        # Both run at once, so either result may be the first.
        listed, read = sorted(results_of(messages), key=lambda result: result.tool_call_id)
        assert (listed.is_error, read.is_error) == (False, False)
        for name in ("README.md", "src/", "tree.py"):
            assert name in listed.content
            assert name in complete.text
        assert "How to grow them." in read.content
        assert README in complete.text
        introduction = full_text(messages[1].parts)
        assert "not an LLM" in introduction
        assert "culm models" in introduction
        run, session = await stage.run(run_id), await stage.session()
        assert (run.outcome, run.provider, run.model) == ("end_turn", "offline", "offline")
        assert (run.cost, run.estimated, session.cost) == (0.0, True, 0.0)
        assert session.title == "List the files and read README.md"


async def test_its_answer_is_streamed_as_that_of_any_model(tmp_path: Path) -> None:
    async with open_fresh(tmp_path) as stage:
        complete = await stage.heard.complete(await stage.prompt(PROMPT))
        deltas = stage.heard.all("message_delta", MessageDelta)
        streamed = "".join(d.text for d in deltas if d.message_id == complete.message_id)
        assert streamed
        assert complete.text.startswith(streamed)


async def test_the_same_prompt_gets_the_same_answer_and_the_introduction_comes_once(
    tmp_path: Path,
) -> None:
    async with open_fresh(tmp_path) as stage:
        texts = [(await stage.heard.complete(await stage.prompt(PROMPT))).text for _ in range(2)]
        assert texts[0] == texts[1]
        said = [text for role, text, _ in await stage.rows() if role == "assistant"]
        assert sum("not an LLM" in text for text in said) == 1


async def test_a_conversation_with_it_can_be_summarized_and_goes_on(tmp_path: Path) -> None:
    async with open_fresh(tmp_path) as stage:
        await stage.talk(PROMPT)
        assert (await stage.of_session("summarize")).status == 200
        session = await stage.session()
        (summary,) = [m for m in await stage.messages() if m.id == session.summary_message_id]
        assert PROMPT in full_text(summary.parts)
        assert "How to grow them." in full_text(summary.parts)
        complete = await stage.heard.complete(await stage.prompt("read src/tree.py"))
        assert "HEIGHT_M = 4" in complete.text
        assert (await stage.session()).cost == 0.0


@contract("INV-82")
async def test_a_cancel_in_the_middle_ends_it_and_answers_its_calls(tmp_path: Path) -> None:
    gate = Gate()
    async with open_fresh(tmp_path, [Probe("view", gate.pass_through)]) as stage:
        run_id = await stage.prompt("read README.md")
        await until(lambda: gate.inside == 1)
        await stage.cancel()
        assert (await stage.heard.complete(run_id)).cancelled
        assert (await stage.run(run_id)).outcome == "canceled"
        assert_answered(await stage.messages())
        gate.release()
        again = await stage.heard.complete(await stage.prompt("read README.md"))
        assert (again.error, again.cancelled) == ("", False)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("read missing.md", "missing.md"),
        ("read ../outside.md", "`view` was not allowed"),
        ("run touch made", "`bash` was not allowed"),
        ("search for HEIGHT", "tree.py"),
        ("count the files", "2"),
        ("compose a sonnet", "culm models"),
    ],
)
async def test_whatever_is_asked_there_is_an_answer_and_no_error(
    tmp_path: Path, prompt: str, words: str
) -> None:
    (tmp_path / "outside.md").write_text("a secret")
    async with open_fresh(tmp_path) as stage:
        complete = await stage.heard.complete(await stage.prompt(prompt, approve="deny"))
        said = " ".join(text for _, text, _ in await stage.rows())
        assert complete.error == ""
        assert words in said
        assert "a secret" not in said


async def test_it_changes_what_a_policy_allows_and_is_refused_the_rest(tmp_path: Path) -> None:
    rules = [
        {"decision": "allow", "tool": "edit", "path": "src/**"},
        {"decision": "allow", "tool": "bash", "command": "sort *"},
    ]
    prompt = "replace 4 by 5 in src/tree.py, run `sort -o sorted src/tree.py` and run `touch made`"
    async with open_fresh(tmp_path) as stage:
        complete = await stage.heard.complete(
            await stage.prompt(prompt, run_id="alone", approve=rules)
        )
        calls = [call.name for call in calls_of(await stage.messages())]
    assert (calls, complete.error) == (["view", "edit", "bash", "bash"], "")
    for words in ("Changed src/tree.py (+1 -1 lines).", "`bash` was not allowed: this needs a"):
        assert words in complete.text
    texts = [(tmp_path / "project" / name).read_text() for name in ("src/tree.py", "sorted")]
    assert texts == ["HEIGHT_M = 5\n"] * 2
    assert not (tmp_path / "project" / "made").exists()


async def test_who_switched_it_off_and_has_nobody_else_is_told_at_once(tmp_path: Path) -> None:
    async with open_model_server() as nobody, open_written(tmp_path, nobody, NO_MODEL) as stage:
        answer = await stage.post("Hi.")
        assert (answer.status, await stage.runs()) == (400, [])
        assert b"agent coordinator not initialized" in answer.body
