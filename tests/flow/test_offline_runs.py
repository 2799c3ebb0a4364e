"""The offline model: it works on a fresh server with real tools and costs nothing."""

from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from culm.testing.model_server import open_model_server
from culm.wire.events import MessageDelta
from culm.wire.messages import full_text
from culm.wire.runs import AgentInfo
from tests.flow.config_files import open_configured
from tests.flow.drive import until
from tests.flow.probes import Gate, Probe
from tests.flow.reading import assert_answered, calls_of, results_of
from tests.flow.runs import Harness
from tests.support import NO_MODEL, contract

PROMPT = "list the files and read README.md"
README = "# Plums\n\nHow to grow them."


@asynccontextmanager
async def open_fresh(folder: Path, tools: Iterable[Probe] | None = None) -> AsyncGenerator[Harness]:
    """A server without configuration, with a small project."""
    project = folder / "project"
    (project / "src").mkdir(parents=True)
    (project / "README.md").write_text(f"{README}\n")
    (project / "src" / "tree.py").write_text("HEIGHT_M = 4\n")
    async with (
        open_model_server() as unused,
        open_configured(folder, unused, None, tools=tools) as harness,
    ):
        yield harness
        assert unused.requests == []


async def test_fresh_server_is_ready_with_the_offline_model(tmp_path: Path) -> None:
    async with open_fresh(tmp_path) as harness:
        info = await harness.ask("/agent", AgentInfo)
        assert (info.is_ready, info.model_cfg.provider, info.model_cfg.model) == (
            True,
            "offline",
            "offline",
        )
        assert harness.remote.info.notices == []


@contract("INV-82", "MODEL-4")
async def test_offline_model_calls_real_tools_and_answers_from_their_results(
    tmp_path: Path,
) -> None:
    async with open_fresh(tmp_path) as harness:
        run_id = await harness.prompt(PROMPT)
        complete = await harness.received.complete(run_id)
        messages = await harness.messages()
        assert [(call.name, call.input) for call in calls_of(messages)] == [
            ("ls", "{}"),
            ("view", '{"file_path":"README.md"}'),
        ]
        assert_answered(messages)
        listed, read = results_of(messages)
        assert (listed.is_error, read.is_error) == (False, False)
        for name in ("README.md", "src/", "tree.py"):
            assert name in listed.content
            assert name in complete.text
        assert "How to grow them." in read.content
        assert README in complete.text
        introduction = full_text(messages[1].parts)
        assert "not an LLM" in introduction
        assert "culm models" in introduction
        run, session = await harness.run(run_id), await harness.session()
        assert (run.outcome, run.provider, run.model) == ("end_turn", "offline", "offline")
        assert (run.cost, run.estimated, session.cost) == (0.0, True, 0.0)
        assert session.title == "List the files and read README.md"


async def test_offline_answer_is_streamed(tmp_path: Path) -> None:
    async with open_fresh(tmp_path) as harness:
        complete = await harness.received.complete(await harness.prompt(PROMPT))
        deltas = harness.received.all("message_delta", MessageDelta)
        streamed = "".join(d.text for d in deltas if d.message_id == complete.message_id)
        assert streamed
        assert complete.text.startswith(streamed)


async def test_offline_answers_are_repeatable_and_the_introduction_appears_once(
    tmp_path: Path,
) -> None:
    async with open_fresh(tmp_path) as harness:
        texts = [
            (await harness.received.complete(await harness.prompt(PROMPT))).text for _ in range(2)
        ]
        assert texts[0] == texts[1]
        answers = [text for role, text, _ in await harness.rows() if role == "assistant"]
        assert sum("not an LLM" in text for text in answers) == 1


async def test_offline_conversation_can_be_summarized_and_continued(tmp_path: Path) -> None:
    async with open_fresh(tmp_path) as harness:
        await harness.talk(PROMPT)
        assert (await harness.of_session("summarize")).status == 200
        session = await harness.session()
        (summary,) = [m for m in await harness.messages() if m.id == session.summary_message_id]
        assert PROMPT in full_text(summary.parts)
        assert "How to grow them." in full_text(summary.parts)
        complete = await harness.received.complete(await harness.prompt("read src/tree.py"))
        assert "HEIGHT_M = 4" in complete.text
        assert (await harness.session()).cost == 0.0


@contract("INV-82")
async def test_cancel_ends_an_offline_run_and_answers_its_calls(tmp_path: Path) -> None:
    gate = Gate()
    async with open_fresh(tmp_path, [Probe("view", gate.pass_through)]) as harness:
        run_id = await harness.prompt("read README.md")
        await until(lambda: gate.inside == 1)
        await harness.cancel()
        assert (await harness.received.complete(run_id)).cancelled
        assert (await harness.run(run_id)).outcome == "canceled"
        assert_answered(await harness.messages())
        gate.release()
        again = await harness.received.complete(await harness.prompt("read README.md"))
        assert (again.error, again.cancelled) == ("", False)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("read missing.md", "missing.md"),
        ("read ../outside.md", "`view` was not allowed"),
        ("run touch made", "`bash` was not allowed"),
        ("search for HEIGHT", "tree.py"),
        ("count the files", "2"),
        ("compose a sonnet", "culm models"),
    ],
)
async def test_offline_model_answers_every_prompt_without_an_error(
    tmp_path: Path, prompt: str, expected: str
) -> None:
    (tmp_path / "outside.md").write_text("a secret")
    async with open_fresh(tmp_path) as harness:
        complete = await harness.received.complete(await harness.prompt(prompt, approve="deny"))
        texts = " ".join(text for _, text, _ in await harness.rows())
        assert complete.error == ""
        assert expected in texts
        assert "a secret" not in texts


async def test_offline_model_makes_only_the_changes_a_policy_allows(tmp_path: Path) -> None:
    rules = [
        {"decision": "allow", "tool": "edit", "path": "src/**"},
        {"decision": "allow", "tool": "bash", "command": "sort *"},
    ]
    prompt = "replace 4 by 5 in src/tree.py, run `sort -o sorted src/tree.py` and run `touch made`"
    async with open_fresh(tmp_path) as harness:
        complete = await harness.received.complete(
            await harness.prompt(prompt, run_id="alone", approve=rules)
        )
        calls = [call.name for call in calls_of(await harness.messages())]
    assert (calls, complete.error) == (["view", "edit", "bash", "bash"], "")
    for expected in ("Changed src/tree.py (+1 -1 lines).", "`bash` was not allowed: this needs a"):
        assert expected in complete.text
    texts = [(tmp_path / "project" / name).read_text() for name in ("src/tree.py", "sorted")]
    assert texts == ["HEIGHT_M = 5\n"] * 2
    assert not (tmp_path / "project" / "made").exists()


async def test_prompt_with_a_disabled_offline_model_and_no_other_is_400(tmp_path: Path) -> None:
    async with (
        open_model_server() as unused,
        open_configured(tmp_path, unused, NO_MODEL) as harness,
    ):
        answer = await harness.post("Hi.")
        assert (answer.status, await harness.runs()) == (400, [])
        assert b"agent coordinator not initialized" in answer.body
