"""The approval prompt at a terminal: permissions and questions of a run on a real server."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from culm.cli.render.renderers import TextRenderer
from culm.cli.terminal.approval_prompt import ApprovalPrompt, parse_response, permission_lines
from culm.client.follower import Follower
from culm.client.tree import open_tree
from culm.ids import MessageId, RunId
from culm.wire.asks import (
    Ask,
    Choice,
    PermissionRequest,
    Question,
    QuestionResponse,
    QuestionType,
)
from tests.flow.asking import QuestionProbe, answer_batch, asks, batch_in, open_asking, request_in
from tests.flow.drive import until
from tests.flow.probes import Probe, calling, script
from tests.flow.reading import results_of
from tests.flow.runs import Harness
from tests.support import WAIT_S


class TypedLines:
    """Lines of input, one per prompt; after the last one, reading blocks forever."""

    def __init__(self, *lines: str) -> None:
        self.prompts: list[str] = []
        self._lines = deque(lines)

    async def read(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if not self._lines:
            await asyncio.Event().wait()
        return self._lines.popleft()


@asynccontextmanager
async def open_approval_prompt(
    harness: Harness, run_id: str, lines: TypedLines
) -> AsyncGenerator[Follower]:
    async with (
        asyncio.timeout(WAIT_S),
        open_tree(harness.remote, harness.session_id, RunId(run_id), interactive=True) as (
            follower,
            tree,
        ),
        asyncio.TaskGroup() as tasks,
    ):
        await follower.connected()
        prompt = ApprovalPrompt(harness.remote, follower, tree, TextRenderer(), lines)
        task = tasks.create_task(prompt.serve(), name="prompt")
        yield follower
        task.cancel()


@pytest.mark.parametrize(
    ("lines", "state", "prompts"),
    [
        (["y\n"], "allowed", 1),
        (["\n", "what?\n", " YES \n"], "allowed", 3),
        (["w\n"], "allowed", 1),
        (["n\n"], "denied", 1),
        ([""], "denied", 1),  # End of input.
    ],
)
async def test_typed_line_answers_the_permission_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[str], state: str, prompts: int
) -> None:
    tool, typed = Probe("look", asks=True), TypedLines(*lines)
    async with open_asking(tmp_path, script(calling("look", path="a")), tool) as harness:
        async with open_approval_prompt(harness, "ours", typed):
            await harness.prompt("Hi.", run_id="ours", interactive=True)
            await harness.received.complete("ours")
        assert list((await asks(harness, "all")).values()) == [state]
        assert (len(typed.prompts), len(tool.calls)) == (prompts, int(state == "allowed"))
    assert capsys.readouterr().err == (
        '  | {"path":"a"}\n  in /\n  [s] and [w] cover: look grain\n'
    )


def test_permission_prompt_shows_the_whole_command() -> None:
    command = "\n".join([*(f"echo {number}" for number in range(99)), "x" * 999, "rm \x1b[2J"])
    request = PermissionRequest("a", tool_name="bash", params={"command": command})
    lines = list(permission_lines(Ask(request, RunId("r"), MessageId("m"), why="It may.")))
    assert lines[:99] == [f"  | echo {number}" for number in range(99)]
    assert lines[99:] == ["  | " + "x" * 999, r"  | rm \x1b[2J", "  because: It may."]


async def test_permission_requests_of_other_runs_are_not_prompted(tmp_path: Path) -> None:
    tool, typed = Probe("look", asks=True), TypedLines("y\n")
    async with open_asking(tmp_path, script(calling("look")), tool) as harness:
        async with open_approval_prompt(harness, "ours", typed) as follower:
            await harness.prompt("Hi.", run_id="theirs", interactive=True)
            await request_in(harness.received)
            await follower.until(lambda mirror: bool(mirror.asks))
        assert (typed.prompts, list((await asks(harness)).values())) == ([], ["open"])


QUESTIONS = [
    {"question": "Sure?", "description": "Why.", "type": "yes_no"},
    {"question": "Name?", "description": "Why.", "type": "free_text"},
]


async def test_questions_are_prompted_one_by_one_and_sent_together(tmp_path: Path) -> None:
    typed = TypedLines("maybe\n", "y\n", "Plum\n")
    play = script(calling("question", questions=QUESTIONS))
    async with open_asking(tmp_path, play, QuestionProbe()) as harness:
        async with open_approval_prompt(harness, "ours", typed):
            await harness.prompt("Hi.", run_id="ours", interactive=True)
            await harness.received.complete("ours")
        (result,) = results_of(await harness.messages())
        assert (result.is_error, len(typed.prompts)) == (False, 3)
        assert "Plum" in result.content


async def test_questions_answered_by_another_client_close_the_prompt(tmp_path: Path) -> None:
    typed = TypedLines("y\n")
    play = script(calling("question", questions=QUESTIONS))
    async with open_asking(tmp_path, play, QuestionProbe()) as harness:
        async with open_approval_prompt(harness, "ours", typed):
            await harness.prompt("Hi.", run_id="ours", interactive=True)
            batch = await batch_in(harness.received)
            await until(lambda: len(typed.prompts) == 2)
            first = {"request_id": batch.questions[0].id, "yes": False}
            assert await answer_batch(harness, batch.id, first)
            await harness.received.complete("ours")
        (result,) = results_of(await harness.messages())
        assert not result.is_error


async def test_end_of_input_cancels_the_question(tmp_path: Path) -> None:
    play = script(calling("question", questions=QUESTIONS))
    async with open_asking(tmp_path, play, QuestionProbe()) as harness:
        async with open_approval_prompt(harness, "ours", TypedLines("")):
            await harness.prompt("Hi.", run_id="ours", interactive=True)
            await harness.received.complete("ours")
        (result,) = results_of(await harness.messages())
        assert (result.content, result.is_error) == ("User cancelled this question", True)


CHOICES = [Choice("a", "Apple"), Choice("b", "Plum")]


@pytest.mark.parametrize(
    ("kind", "typed", "response"),
    [
        ("yes_no", "no", QuestionResponse("q", yes=False)),
        ("yes_no", "perhaps", None),
        ("yes_no", "s", None),
        ("free_text", "any words", QuestionResponse("q", fill_in_text="any words")),
        ("free_text", "", QuestionResponse("q")),
        ("single_choice", "2", QuestionResponse("q", selected_ids=["b"])),
        ("single_choice", "1 2", None),
        ("single_choice", "3", QuestionResponse("q", fill_in_text="3")),
        ("multi_choice", "2, 1,2", QuestionResponse("q", selected_ids=["b", "a"])),
        ("multi_choice", "both", QuestionResponse("q", fill_in_text="both")),
        ("multi_choice", "²", QuestionResponse("q", fill_in_text="²")),
        ("multi_choice", "9" * 5000, QuestionResponse("q", fill_in_text="9" * 5000)),
    ],
)
def test_typed_text_is_parsed_by_question_type(
    kind: QuestionType, typed: str, response: QuestionResponse | None
) -> None:
    question = Question("q", kind, "Which?", choices=CHOICES)
    assert parse_response(question, typed) == response
