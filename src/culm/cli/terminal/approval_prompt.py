"""The approval prompt: shows the asks and questions of a run and its agents, and reads answers.

The first answer counts, from here or from another client, so a prompt closes by itself when
another client has answered.
"""

import asyncio
import os
import sys
import termios
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from culm.cli.render.call_lines import MARGIN, diff_lines, path_text
from culm.cli.render.renderers import RunRenderer, TextRenderer
from culm.cli.render.text import head_of
from culm.client.follower import Follower
from culm.client.http import RequestRefused
from culm.client.mirror import Mirror
from culm.client.tree import SessionTree, id_of
from culm.client.workspace import RemoteWorkspace
from culm.ids import AskId
from culm.wire.asks import (
    Ask,
    AskChanged,
    PermissionRequest,
    Question,
    QuestionChanged,
    QuestionResponse,
)
from culm.wire.codec import Json, encode, printable

LINE_BYTES_MAX = 4096  # The limit of a terminal in line mode.
RETRY_S = 1.0  # A server that restarts answers soon.
COVERAGE_SHOWN_MAX = 5
# Parameters that add nothing to a command: other lines show them, or the model explains itself.
_BESIDE_COMMAND = frozenset(
    {"description", "working_dir", "run_in_background", "auto_background_after", "shell_id"}
)

ANSWERS = {
    **dict.fromkeys(("y", "yes"), "allow"),
    **dict.fromkeys(("s", "session"), "allow_session"),
    **dict.fromkeys(("w", "workspace"), "allow_workspace"),
    **dict.fromkeys(("n", "no"), "deny"),
}


class LineInput(Protocol):
    """A source of lines typed by a person."""

    async def read(self, prompt: str) -> str:
        """Return a line including its end, or nothing at the end of input."""
        ...


class TerminalInput:
    """Standard input of a terminal, with the prompt below the printed output."""

    def __init__(self, renderer: TextRenderer) -> None:
        self._renderer = renderer

    async def read(self, prompt: str) -> str:
        # Input typed before the question was shown cannot be an answer to it.
        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
        self._renderer.prompt(prompt)
        try:
            line = (await _read_when_ready(sys.stdin.fileno())).decode(errors="replace")
            if line:
                self._renderer.typed()
            return line
        finally:
            self._renderer.close_prompt()


async def _read_when_ready(descriptor: int) -> bytes:
    """Wait until the descriptor is readable, then read it without blocking."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[bytes] = loop.create_future()

    def read() -> None:
        loop.remove_reader(descriptor)
        data = b""
        with suppress(OSError):  # The terminal is gone, which counts as the end of input.
            data = os.read(descriptor, LINE_BYTES_MAX)
        if not found.done():
            found.set_result(data)

    loop.add_reader(descriptor, read)
    try:
        return await found
    finally:
        loop.remove_reader(descriptor)


class ApprovalPrompt:
    """Reads answers for the asks and questions of one run and its agents, one after the other."""

    def __init__(
        self,
        workspace: RemoteWorkspace,
        follower: Follower,
        tree: SessionTree,
        renderer: RunRenderer,
        lines: LineInput,
    ) -> None:
        self._workspace = workspace
        self._follower = follower
        self._tree = tree
        self._renderer = renderer
        self._lines = lines
        self._seen: set[AskId] = set()

    async def serve(self) -> None:
        """Prompt until the task is canceled."""
        while True:
            await self._follower.until(lambda _: bool(self._open()))
            for ask in self._open():
                ask_id = id_of(ask)
                try:
                    await self._ask(ask)
                    self._seen.add(ask_id)
                except (RequestRefused, OSError) as exc:
                    self._renderer.note(f"(cannot answer: {exc}; trying again)")
                    await asyncio.sleep(RETRY_S)

    def _open(self) -> list[AskChanged | QuestionChanged]:
        asked = self._tree.all_asks()
        return [ask for ask in asked if ask.state == "open" and id_of(ask) not in self._seen]

    async def _ask(self, asked: AskChanged | QuestionChanged) -> None:
        if isinstance(asked, QuestionChanged):
            await self._answer_questions(asked)
            return
        for ask in await self._workspace.asks():
            if ask.request.id == asked.ask_id:
                await self._permit(ask, asked)

    async def _permit(self, ask: Ask[PermissionRequest], asked: AskChanged) -> None:
        asked_by = list(self._path_lines(ask.agent_path))
        for line in (*asked_by, *permission_lines(ask)):
            self._renderer.note(line)
        # An agent has a session of its own: the run above it asks again for the same.
        owner = "this agent's" if asked_by else "this"
        wider = f", [s] for {owner} session, [w] for this workspace" if ask.grains else ""
        action = None
        while action is None:
            line = await self._line(asked, f"allow it? [y] once{wider}, [n]o: ")
            if line is None:
                return
            # A closed terminal is not a consent.
            action = ANSWERS.get(line.strip().lower()) if line else "deny"
        await self._workspace.answer(ask, action)  # An event reports the result to all clients.

    async def _answer_questions(self, asked: QuestionChanged) -> None:
        for ask in await self._workspace.questions():
            if ask.request.id != asked.batch_id:
                continue
            for line in self._path_lines(ask.agent_path):
                self._renderer.note(line)
            responses: list[QuestionResponse] = []
            for question in ask.request.questions:
                response = await self._answer_one(asked, question)
                if response is None:
                    return
                responses.append(response)
            await self._workspace.answer_questions(asked.batch_id, responses)

    async def _answer_one(
        self, asked: QuestionChanged, question: Question
    ) -> QuestionResponse | None:
        """Return None if another client has answered, or the terminal was closed."""
        for line in question_lines(question):
            self._renderer.note(line)
        while True:
            line = await self._line(asked, QUESTION_PROMPTS[question.type])
            if line is None:
                return None
            if not line:
                await self._workspace.cancel_questions(asked.batch_id)
                return None
            response = parse_response(question, line.strip())
            if response is not None:
                return response

    async def _line(self, asked: AskChanged | QuestionChanged, prompt: str) -> str | None:
        """Read a line; None if the ask is closed first."""

        def is_closed(_: Mirror) -> bool:
            return self._tree.is_closed(asked)

        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._lines.read(prompt), name="read a line")
            closing = tasks.create_task(self._follower.until(is_closed), name="closed elsewhere")
            await asyncio.wait({reading, closing}, return_when=asyncio.FIRST_COMPLETED)
            is_typed = reading.done()
            reading.cancel()
            closing.cancel()
        return reading.result() if is_typed else None

    def _path_lines(self, path: Sequence[str]) -> Iterator[str]:
        if names := self._tree.agent_names(path):
            yield f"  asked by {path_text(names)}"


# --- the lines of a prompt


def permission_lines(ask: Ask[PermissionRequest]) -> Iterator[str]:
    """The exact call, the reason for the ask, and the coverage of a wider consent."""
    request = ask.request
    yield from params_lines(request.params)
    yield from location_lines(request.path, ask.why)
    if ask.grains:
        more = len(ask.grains) - COVERAGE_SHOWN_MAX
        shown = [*ask.grains[:COVERAGE_SHOWN_MAX], *([f"{more} more"] if more > 0 else [])]
        yield f"  [s] and [w] cover: {', '.join(map(head_of, shown))}"


def params_lines(params: Json) -> Iterator[str]:
    """The input of a tool: all of it, unless it is just a command or the change of a file."""
    match params:
        case {"old_content": str(before), "new_content": str(after), **rest} if rest.keys() <= {
            "file_path"
        }:
            yield from map(_with_margin, diff_lines(before, after))
        case {"command": str(command), **rest} if rest.keys() <= _BESIDE_COMMAND:
            yield from whole_lines(command)
        case _:
            yield _with_margin(encode(params or {}).decode())


def location_lines(path: str, why: str) -> Iterator[str]:
    if path:
        yield f"  in {printable(path)}"
    if why:
        yield f"  because: {printable(why)}"


def whole_lines(text: str) -> Iterator[str]:
    """All lines of a text: a person who agrees must have seen everything."""
    return map(_with_margin, text.split("\n"))


def _with_margin(line: str) -> str:
    return f"{MARGIN}{printable(line)}"


QUESTION_PROMPTS = {
    "yes_no": "[y]es or [n]o, empty to skip: ",
    "single_choice": "a number, or your own words, empty to skip: ",
    "multi_choice": "numbers, or your own words, empty to skip: ",
    "free_text": "your answer, empty to skip: ",
}


def question_lines(question: Question) -> Iterator[str]:
    yield f"? {question.question}"
    if question.description:
        yield f"  {head_of(question.description)}"
    for number, choice in enumerate(question.choices, 1):
        about = f" - {choice.description}" if choice.description else ""
        yield f"  {number}. {choice.label}{about}"


def parse_response(question: Question, text: str) -> QuestionResponse | None:
    """The response for a typed text; None if it is not valid. An empty text skips the question."""
    response = QuestionResponse(question.id)
    if not text:
        return response
    match question.type:
        case "yes_no":
            action = ANSWERS.get(text.lower())
            response.yes = {"allow": True, "deny": False}.get(action or "")
            return None if response.yes is None else response
        case "free_text":
            response.fill_in_text = text
        case _:
            numbers = _numbers(text, len(question.choices))
            if question.type == "single_choice" and len(numbers) > 1:
                return None
            response.selected_ids = [question.choices[number - 1].id for number in numbers]
            response.fill_in_text = "" if numbers else text
    return response


def _numbers(text: str, number_max: int) -> Sequence[int]:
    """The chosen numbers; empty if the text has anything else, or a number out of range."""
    parts = text.replace(",", " ").split()
    if not all(part.isascii() and part.isdecimal() for part in parts):
        return ()
    numbers = list(dict.fromkeys(int(part[:9]) for part in parts))
    return numbers if all(1 <= number <= number_max for number in numbers) else ()
