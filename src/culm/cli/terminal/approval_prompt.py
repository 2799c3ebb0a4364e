"""The person at the terminal: is shown what a run and its agents ask, and answers it.

Owns the conversation and what is typed. Whoever answers first counts, here or elsewhere, so a
prompt that another client has answered closes by itself.
"""

import asyncio
import os
import sys
import termios
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from culm.cli.render.call_lines import MARGIN, diff_lines, head_of
from culm.cli.render.call_notes import path_text
from culm.cli.render.renderers import RunRenderer, TextRenderer
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

LINE_BYTES_MAX = 4096  # No terminal has longer lines while they can still be edited.
AGAIN_S = 1.0  # A server that restarts answers in a moment.
COVERAGE_SHOWN_MAX = 5
_WITH_COMMAND = ("bash", "job_kill")
_WITH_CHANGE = ("edit", "multiedit", "write")

ANSWERS = {
    **dict.fromkeys(("y", "yes"), "allow"),
    **dict.fromkeys(("s", "session"), "allow_session"),
    **dict.fromkeys(("w", "workspace"), "allow_workspace"),
    **dict.fromkeys(("n", "no"), "deny"),
}


class LineInput(Protocol):
    """Where a person types."""

    async def read(self, prompt: str) -> str:
        """A line with its end; nothing if there will be no more."""
        ...


class TerminalInput:
    """Standard input, which is a terminal, below what is shown on it."""

    def __init__(self, face: TextRenderer) -> None:
        self._face = face

    async def read(self, prompt: str) -> str:
        # What was typed before the question was there is no answer to it.
        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
        self._face.prompt(prompt)
        try:
            said = (await _readable(sys.stdin.fileno())).decode(errors="replace")
            if said:
                self._face.typed()
            return said
        finally:
            self._face.close_prompt()


async def _readable(descriptor: int) -> bytes:
    """What can be read, as soon as there is something."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[bytes] = loop.create_future()

    def read() -> None:
        loop.remove_reader(descriptor)
        data = b""
        with suppress(OSError):  # The terminal is gone: nobody will answer.
            data = os.read(descriptor, LINE_BYTES_MAX)
        if not found.done():
            found.set_result(data)

    loop.add_reader(descriptor, read)
    try:
        return await found
    finally:
        loop.remove_reader(descriptor)


class ApprovalPrompt:
    """Answers what one run and its agents ask, one thing after the other."""

    def __init__(
        self,
        workspace: RemoteWorkspace,
        follower: Follower,
        tree: SessionTree,
        face: RunRenderer,
        lines: LineInput,
    ) -> None:
        self._workspace = workspace
        self._follower = follower
        self._tree = tree
        self._face = face
        self._lines = lines
        self._seen: set[AskId] = set()

    async def serve(self) -> None:
        """Answer for as long as the caller lets it."""
        while True:
            await self._follower.until(lambda _: bool(self._open()))
            for ask in self._open():
                ask_id = id_of(ask)
                try:
                    await self._ask(ask)
                    self._seen.add(ask_id)
                except (RequestRefused, OSError) as exc:
                    self._face.note(f"(cannot answer: {exc}; trying again)")
                    await asyncio.sleep(AGAIN_S)

    def _open(self) -> list[AskChanged | QuestionChanged]:
        asked = self._tree.asked()
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
        for line in (*asked_by, *lines_of(ask)):
            self._face.note(line)
        # That of an agent is its own: what the run above it does is asked about again.
        whose = "this agent's" if asked_by else "this"
        wider = f", [s] for {whose} session, [w] for this workspace" if ask.grains else ""
        action = None
        while action is None:
            said = await self._line(asked, f"allow it? [y] once{wider}, [n]o: ")
            if said is None:
                return
            # Who closes the terminal has not agreed.
            action = ANSWERS.get(said.strip().lower()) if said else "deny"
        await self._workspace.answer(ask, action)  # What came of it is told to everybody.

    async def _answer_questions(self, asked: QuestionChanged) -> None:
        for ask in await self._workspace.questions():
            if ask.request.id != asked.batch_id:
                continue
            for line in self._path_lines(ask.agent_path):
                self._face.note(line)
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
        """None if somebody else has answered, or nobody here will."""
        for line in question_lines(question):
            self._face.note(line)
        while True:
            said = await self._line(asked, HOW[question.type])
            if said is None:
                return None
            if not said:
                await self._workspace.cancel_questions(asked.batch_id)
                return None
            response = parse_response(question, said.strip())
            if response is not None:
                return response

    async def _line(self, asked: AskChanged | QuestionChanged, prompt: str) -> str | None:
        """What is typed; None if the ask is closed before."""

        def is_closed(_: Mirror) -> bool:
            return self._tree.is_closed(asked)

        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._lines.read(prompt), name="read a line")
            closing = tasks.create_task(self._follower.until(is_closed), name="closed elsewhere")
            await asyncio.wait({reading, closing}, return_when=asyncio.FIRST_COMPLETED)
            is_said = reading.done()
            reading.cancel()
            closing.cancel()
        return reading.result() if is_said else None

    def _path_lines(self, path: Sequence[str]) -> Iterator[str]:
        if names := self._tree.titles(path):
            yield f"  asked by {path_text(names)}"


# --- what a person reads


def lines_of(ask: Ask[PermissionRequest]) -> Iterator[str]:
    """What would be done, exactly; why it is asked; and what a wider consent means."""
    request = ask.request
    yield from params_lines(request.tool_name, request.params)
    yield from location_lines(request.path, ask.why)
    if ask.grains:
        more = len(ask.grains) - COVERAGE_SHOWN_MAX
        shown = [*ask.grains[:COVERAGE_SHOWN_MAX], *([f"{more} more"] if more > 0 else [])]
        yield f"  [s] and [w] cover: {', '.join(map(head_of, shown))}"


def params_lines(tool_name: str, params: Json) -> Iterator[str]:
    """What a tool is given. Only of our own tools is it known which part says it all."""
    match params:
        case {"old_content": str(before), "new_content": str(after)} if tool_name in _WITH_CHANGE:
            yield from map(_whole, diff_lines(before, after))
        case {"command": str(command)} if tool_name in _WITH_COMMAND:
            yield from whole_lines(command)
        case _:
            yield _whole(encode(params or {}).decode())


def location_lines(path: str, why: str) -> Iterator[str]:
    if path:
        yield f"  in {printable(path)}"
    if why:
        yield f"  because: {printable(why)}"


def whole_lines(text: str) -> Iterator[str]:
    """Nothing of it is left out: whoever agrees has seen all of it."""
    return map(_whole, text.split("\n"))


def _whole(line: str) -> str:
    return f"{MARGIN}{printable(line)}"


HOW = {
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


def parse_response(question: Question, said: str) -> QuestionResponse | None:
    """What was typed as an answer; None if it is none. Nothing skips the question."""
    response = QuestionResponse(question.id)
    if not said:
        return response
    match question.type:
        case "yes_no":
            action = ANSWERS.get(said.lower())
            response.yes = {"allow": True, "deny": False}.get(action or "")
            return None if response.yes is None else response
        case "free_text":
            response.fill_in_text = said
        case _:
            numbers = _numbers(said, len(question.choices))
            if question.type == "single_choice" and len(numbers) > 1:
                return None
            response.selected_ids = [question.choices[number - 1].id for number in numbers]
            response.fill_in_text = "" if numbers else said
    return response


def _numbers(said: str, most: int) -> Sequence[int]:
    """The choices that were named; none if it is something else."""
    words = said.replace(",", " ").split()
    if not all(word.isascii() and word.isdecimal() for word in words):
        return ()
    numbers = list(dict.fromkeys(int(word[:9]) for word in words))
    return numbers if all(1 <= number <= most for number in numbers) else ()
