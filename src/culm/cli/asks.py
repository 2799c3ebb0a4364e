"""`culm asks`, `culm approve`, `culm deny`, `culm answer`: what agents wait for people for.

They join no workspace and start no server; where there is none, nothing is asked.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar, cast

import click
import msgspec

from culm.cli.exits import EXIT_FAILED
from culm.cli.names import SHORT_CHARS, short_ids
from culm.cli.render.call_lines import head_of
from culm.cli.render.call_notes import path_text
from culm.cli.render.text import table
from culm.cli.server import read_workspace
from culm.cli.server_target import ServerTarget
from culm.cli.terminal.approval_prompt import HOW, parse_response
from culm.cli.terminal.streams import output_width
from culm.client.workspace import RemoteWorkspace
from culm.errors import Failed, InvalidRequest, NotFound
from culm.wire.asks import Ask, PermissionRequest, Question, QuestionRequest, QuestionResponse
from culm.wire.codec import printable

Permission = Ask[PermissionRequest]
AnyAsk = Permission | Ask[QuestionRequest]
T = TypeVar("T")
Names = Mapping[str, str]  # Of agents, by their ids.
Action = Literal["allow", "allow_session", "allow_workspace", "deny"]

SHOWN_MAX = 5  # Of those that a hint names.


def show_asks(where: ServerTarget, *, as_json: bool) -> None:
    async def all_asks(workspace: RemoteWorkspace) -> tuple[list[AnyAsk], Names]:
        asks = await all_in(workspace)
        return asks, await _names_in(workspace, asks)

    found, names = read_workspace(where, all_asks, ([], {}))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
    elif found:
        short = short_ids([ask.request.id for ask in found])
        rows = [(short[ask.request.id], *row) for ask in found for row in rows_of(ask, names)]
        click.echo("\n".join(table(("ask", "kind", "what"), rows, output_width())))
    else:
        click.echo("nothing is asked here", err=True)


async def all_in(workspace: RemoteWorkspace) -> list[AnyAsk]:
    """What is open: permissions, then questions, the latest of each first."""
    return [*await workspace.asks(), *await workspace.questions()]


def rows_of(ask: AnyAsk, names: Names) -> list[tuple[str, str]]:
    """What kind it is and its words; of a batch of questions, each."""
    request, by = ask.request, _by(ask, names)
    if isinstance(request, PermissionRequest):
        return [(request.tool_name, head_of(request.description) + by)]
    return [("question", _question_text(question) + by) for question in request.questions]


def _question_text(question: Question) -> str:
    choices = "; ".join(f"{n}. {choice.label}" for n, choice in enumerate(question.choices, 1))
    return head_of(question.question) + (f" ({head_of(choices)})" if choices else "")


def _by(ask: AnyAsk, names: Names) -> str:
    """Which agents lead to it."""
    # The first of a path may be the one that people talk to, which has no name.
    path = [
        names.get(agent_id) or agent_id[:SHORT_CHARS]
        for place, agent_id in enumerate(ask.agent_path)
        if place or agent_id in names
    ]
    return f" (asked by {path_text(path)})" if path else ""


async def _names_in(workspace: RemoteWorkspace, asks: Sequence[AnyAsk]) -> dict[str, str]:
    """What the agents are called that ask."""
    if not any(ask.agent_path for ask in asks):
        return {}
    return {agent.agent_id: agent.name for agent in await workspace.agents()}


# --- permissions


class PermissionAnswer(NamedTuple):
    """An answer to a permission, and whether it was the first."""

    ask: Permission
    is_first: bool


def answer_permissions(where: ServerTarget, ask_ids: Sequence[str], action: Action) -> int:
    """Allow or deny these, or all that are open if none is named; returns the exit status.

    Nothing is answered if one of them cannot be; raises `NotFound`, `InvalidRequest`.
    """

    async def give(workspace: RemoteWorkspace) -> tuple[list[PermissionAnswer], Names]:
        if ask_ids:
            wanted = permissions_of(await all_in(workspace), ask_ids)
        else:
            wanted = await workspace.asks()
        names = await _names_in(workspace, wanted)
        return [PermissionAnswer(ask, await workspace.answer(ask, action)) for ask in wanted], names

    none: tuple[list[PermissionAnswer], Names] | None = None if ask_ids else ([], {})
    given, names = _found(where, read_workspace(where, give, none))
    if not given:
        click.echo("nothing is asked here", err=True)
    late = too_late(given, action)
    for ask, _ in given:
        state = "denied" if action == "deny" else "allowed"
        if ask in late:
            state = "not open any more"
        for kind, words in rows_of(ask, names):
            click.echo(f"{state}: {kind}: {words}", err=True)
    return EXIT_FAILED if late else 0


def too_late(given: Sequence[PermissionAnswer], action: Action) -> list[Permission]:
    """Those that somebody else has answered, or that were not needed any more."""
    # A denied run has ended, and has taken with it what else it asked for.
    ended = {ask.run_id for ask, is_first in given if is_first and action == "deny"}
    return [ask for ask, is_first in given if not is_first and ask.run_id not in ended]


def permissions_of(asks: Sequence[AnyAsk], ask_ids: Sequence[str]) -> list[Permission]:
    """Each that is named, once; raises `NotFound`, `InvalidRequest`, also of a question."""
    found: dict[str, Permission] = {}
    for ask_id in ask_ids:
        ask = find_ask(asks, ask_id)
        if isinstance(ask.request, QuestionRequest):
            hint = f"culm answer {ask_id} YOUR WORDS"
            raise InvalidRequest(f"{printable(ask_id)} is a question, no permission", hint=hint)
        found[ask.request.id] = cast("Permission", ask)  # Its request is none of a question.
    return [*found.values()]


# --- questions


def answer_questions(where: ServerTarget, ask_id: str, answers: Sequence[str]) -> None:
    """Raises `NotFound` if there is none; `InvalidRequest` if it is no question, or no answer."""

    async def give(workspace: RemoteWorkspace) -> list[str]:
        ask = find_ask(await all_in(workspace), ask_id)
        if isinstance(ask.request, PermissionRequest):
            words = f"{printable(ask_id)} is a permission, no question"
            raise InvalidRequest(words, hint=f"culm approve {ask_id}, or culm deny {ask_id}")
        responses = responses_of(ask.request.questions, answers)
        names = await _names_in(workspace, [ask])
        if not await workspace.answer_questions(ask.request.id, responses):
            raise Failed("it is not open any more: somebody was faster, or the run has ended")
        return [f"answered: {kind}: {words}" for kind, words in rows_of(ask, names)]

    for line in _found(where, read_workspace(where, give, None)):
        click.echo(line, err=True)


def responses_of(questions: Sequence[Question], answers: Sequence[str]) -> list[QuestionResponse]:
    """One answer for each question; to a single one all words are. Raises `InvalidRequest`."""
    given = [" ".join(answers)] if len(questions) == 1 else answers
    if len(given) != len(questions):
        hint = "quote each; an empty one skips its question"
        raise InvalidRequest(f"there are {len(questions)} questions to answer", hint=hint)
    responses: list[QuestionResponse] = []
    for question, said in zip(questions, given, strict=True):
        response = parse_response(question, said.strip())
        if response is None:
            hint = f"give {HOW[question.type].removesuffix(': ')}"
            raise InvalidRequest(f"{said} is no answer to: {question.question}", hint=hint)
        responses.append(response)
    return responses


def find_ask(asks: Sequence[AnyAsk], ask_id: str) -> AnyAsk:
    """The one whose id begins like this; raises `NotFound`, `InvalidRequest` with those there are.

    An id that is given whole is itself, whatever else begins with it.
    """
    found = [ask for ask in asks if ask_id and ask.request.id.startswith(ask_id)]
    found = [ask for ask in found if ask.request.id == ask_id] or found
    if not found:
        hint = f"open: {_shown(asks, asks)}" if asks else "nothing is open; `culm asks` lists it"
        raise NotFound(f"no open ask has the id {printable(ask_id)}", hint=hint)
    if len(found) > 1:
        words = f"{len(found)} open asks begin with {printable(ask_id)}"
        raise InvalidRequest(words, hint=f"which one: {_shown(found, asks)}")
    return found[0]


def _shown(some: Sequence[AnyAsk], asks: Sequence[AnyAsk]) -> str:
    short = short_ids([ask.request.id for ask in asks])
    words = [f"{short[ask.request.id]} ({rows_of(ask, {})[0][0]})" for ask in some[:SHOWN_MAX]]
    if len(some) > SHOWN_MAX:
        words.append(f"{len(some) - SHOWN_MAX} more")
    return printable(", ".join(words))


def _found(where: ServerTarget, found: T | None) -> T:
    if found is None:
        raise NotFound(f"nothing is asked in {printable(str(where.directory))}", hint=_ELSEWHERE)
    return found


_ELSEWHERE = "--dir names another directory; `culm ps --all` shows where something is going on"
