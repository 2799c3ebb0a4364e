"""`culm asks`, `culm approve`, `culm deny`, `culm answer`: asks that wait for a person.

They join no workspace and start no server; without a server nothing is asked.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, cast

import click

from culm.cli.names import SHORT_CHARS, short_ids
from culm.cli.options import ServerTarget, at_server, json_option
from culm.cli.render.call_lines import path_text
from culm.cli.render.text import head_of, table
from culm.cli.server import read_workspace, use_workspace
from culm.cli.terminal.approval_prompt import QUESTION_PROMPTS, parse_response
from culm.cli.terminal.process import EXIT_FAILED, output_width, print_json
from culm.client.workspace import AnyAsk, RemoteWorkspace
from culm.errors import Failed, InvalidRequest, NotFound
from culm.wire.asks import Ask, PermissionRequest, Question, QuestionRequest, QuestionResponse
from culm.wire.codec import printable

Permission = Ask[PermissionRequest]
Names = Mapping[str, str]  # Of agents, by id.
Action = Literal["allow", "allow_session", "allow_workspace", "deny"]
SHOWN_MAX = 5  # Asks in a hint.
_FOR: dict[str, Action] = {
    "once": "allow",
    "session": "allow_session",
    "workspace": "allow_workspace",
}
_ids_argument = click.argument("ask_ids", nargs=-1, metavar="ID...")
_all_option = click.option(
    "--all", "is_all", is_flag=True, help="All open requests of this directory."
)


@click.command()
@json_option
@at_server
def asks(as_json: bool, where: ServerTarget) -> None:
    """List open permission requests and questions.

    Permission requests come before questions, the latest of each first. A question is shown with
    its choices, and a request of a sub-agent with the agents that lead to it.

    \b
    Example:
      culm asks
      culm approve 68263f22
      culm answer 5b1f03aa 2
    """

    async def all_asks(workspace: RemoteWorkspace) -> tuple[list[AnyAsk], Names]:
        asks = await workspace.open_asks()
        return asks, await _names_in(workspace, asks)

    found, names = read_workspace(where, all_asks, ([], {}))
    if as_json:
        print_json(found)
    elif found:
        short = short_ids([ask.request.id for ask in found])
        rows = [(short[ask.request.id], *row) for ask in found for row in rows_of(ask, names)]
        click.echo("\n".join(table(("ask", "kind", "what"), rows, output_width())))
    else:
        click.echo("no open permission requests or questions", err=True)


@click.command()
@_ids_argument
@click.option(
    "--for",
    "scope",
    type=click.Choice(list(_FOR)),
    default="once",
    show_default=True,
    help="Approve only this call, or also similar calls in the session or workspace.",
)
@_all_option
@at_server
def approve(ask_ids: tuple[str, ...], scope: str, is_all: bool, where: ServerTarget) -> None:
    """Approve permission requests listed by `culm asks`.

    ID is an id or the beginning of one. If several clients answer, the first answer counts. The
    exit status is 1 if a request was no longer open.

    \b
    Example:
      culm approve 68263f22
      culm approve 68263f22 --for session
      culm approve --all
    """
    _check_which(ask_ids, is_all=is_all)
    sys.exit(answer_permissions(where, ask_ids, _FOR[scope]))


@click.command()
@_ids_argument
@_all_option
@at_server
def deny(ask_ids: tuple[str, ...], is_all: bool, where: ServerTarget) -> None:
    """Deny permission requests listed by `culm asks`.

    A denial ends the run that asked. ID is an id or the beginning of one. If several clients
    answer, the first answer counts.

    \b
    Example:
      culm deny 68263f22
      culm deny --all
    """
    _check_which(ask_ids, is_all=is_all)
    sys.exit(answer_permissions(where, ask_ids, "deny"))


@click.command()
@click.argument("ask_id", metavar="ID")
@click.argument("answers", nargs=-1, required=True, metavar="ANSWER...")
@at_server
def answer(ask_id: str, answers: tuple[str, ...], where: ServerTarget) -> None:
    """Answer a question listed by `culm asks`.

    ID is an id or the beginning of one. ANSWER is yes or no, the numbers of choices, or free text.
    If an id has several questions, give one quoted ANSWER for each. If several clients answer, the
    first answer counts. Use `culm approve` and `culm deny` for permission requests.

    \b
    Example:
      culm answer 5b1f03aa 2
      culm answer 5b1f03aa use the one in docs
    """
    answer_questions(where, ask_id, answers)


def _check_which(ask_ids: tuple[str, ...], *, is_all: bool) -> None:
    context = click.get_current_context()
    if is_all and ask_ids:
        raise click.UsageError("give ids, or --all, not both", context)
    if not is_all and not ask_ids:
        raise click.UsageError("give ids that `culm asks` lists, or --all", context)


def rows_of(ask: AnyAsk, names: Names) -> list[tuple[str, str]]:
    """The kind and the text of an ask; one row for each question of a batch."""
    request, by = ask.request, _by(ask, names)
    if isinstance(request, PermissionRequest):
        return [(request.tool_name, head_of(request.description) + by)]
    return [("question", _question_text(question) + by) for question in request.questions]


def _question_text(question: Question) -> str:
    choices = "; ".join(f"{n}. {choice.label}" for n, choice in enumerate(question.choices, 1))
    return head_of(question.question) + (f" ({head_of(choices)})" if choices else "")


def _by(ask: AnyAsk, names: Names) -> str:
    """The path of agents that leads to the ask."""
    # The first agent of a path may be that of a session, which has no name.
    path = [
        names.get(agent_id) or agent_id[:SHORT_CHARS]
        for index, agent_id in enumerate(ask.agent_path)
        if index or agent_id in names
    ]
    return f" (asked by {path_text(path)})" if path else ""


async def _names_in(workspace: RemoteWorkspace, asks: Sequence[AnyAsk]) -> dict[str, str]:
    """The names of the agents that ask."""
    if not any(ask.agent_path for ask in asks):
        return {}
    return {agent.agent_id: agent.name for agent in await workspace.agents()}


# --- permissions


class PermissionAnswer(NamedTuple):
    """A permission that was answered, and whether this answer was the first."""

    ask: Permission
    is_first: bool


def answer_permissions(where: ServerTarget, ask_ids: Sequence[str], action: Action) -> int:
    """Allow or deny these, or all open ones if none is named; returns the exit status.

    Nothing is answered if one of them cannot be; raises `NotFound`, `InvalidRequest`.
    """

    async def give(workspace: RemoteWorkspace) -> tuple[list[PermissionAnswer], Names]:
        if ask_ids:
            wanted = permissions_of(await workspace.open_asks(), ask_ids)
        else:
            wanted = await workspace.asks()
        names = await _names_in(workspace, wanted)
        return [PermissionAnswer(ask, await workspace.answer(ask, action)) for ask in wanted], names

    if ask_ids:
        answered, names = use_workspace(where, give, "open asks")
    else:
        answered, names = read_workspace(where, give, ([], {}))
    if not answered:
        click.echo("no open permission requests", err=True)
    late = too_late(answered, action)
    for ask, _ in answered:
        state = "denied" if action == "deny" else "allowed"
        if ask in late:
            state = "no longer open"
        for kind, text in rows_of(ask, names):
            click.echo(f"{state}: {kind}: {text}", err=True)
    return EXIT_FAILED if late else 0


def too_late(answered: Sequence[PermissionAnswer], action: Action) -> list[Permission]:
    """Permissions that another client answered first, or that are no longer needed."""
    # A denied run has ended, and its other asks with it.
    ended = {ask.run_id for ask, is_first in answered if is_first and action == "deny"}
    return [ask for ask, is_first in answered if not is_first and ask.run_id not in ended]


def permissions_of(asks: Sequence[AnyAsk], ask_ids: Sequence[str]) -> list[Permission]:
    """Each named permission, once; raises `NotFound`, `InvalidRequest`, also for a question."""
    found: dict[str, Permission] = {}
    for ask_id in ask_ids:
        ask = find_ask(asks, ask_id)
        if isinstance(ask.request, QuestionRequest):
            hint = f"use culm answer {ask_id} TEXT"
            raise InvalidRequest(f"{printable(ask_id)} is a question, not a permission", hint=hint)
        found[ask.request.id] = cast(
            "Permission", ask
        )  # Its request is not a question, as checked above.
    return [*found.values()]


# --- questions


def answer_questions(where: ServerTarget, ask_id: str, answers: Sequence[str]) -> None:
    """Answer a batch of questions.

    Raises `NotFound` if there is none, `InvalidRequest` if it is not a question or the answers do
    not fit.
    """

    async def give(workspace: RemoteWorkspace) -> list[str]:
        ask = find_ask(await workspace.open_asks(), ask_id)
        if isinstance(ask.request, PermissionRequest):
            text = f"{printable(ask_id)} is a permission, not a question"
            raise InvalidRequest(text, hint=f"use culm approve {ask_id} or culm deny {ask_id}")
        responses = responses_of(ask.request.questions, answers)
        names = await _names_in(workspace, [ask])
        if not await workspace.answer_questions(ask.request.id, responses):
            raise Failed("it is no longer open: another client answered it, or the run has ended")
        return [f"answered: {kind}: {text}" for kind, text in rows_of(ask, names)]

    for line in use_workspace(where, give, "open asks"):
        click.echo(line, err=True)


def responses_of(questions: Sequence[Question], answers: Sequence[str]) -> list[QuestionResponse]:
    """One answer per question; a single question takes all of the text. Raises `InvalidRequest`."""
    answered = [" ".join(answers)] if len(questions) == 1 else answers
    if len(answered) != len(questions):
        hint = "quote each answer; an empty one skips its question"
        raise InvalidRequest(f"{len(questions)} questions need {len(questions)} answers", hint=hint)
    responses: list[QuestionResponse] = []
    for question, answer_text in zip(questions, answered, strict=True):
        response = parse_response(question, answer_text.strip())
        if response is None:
            hint = f"give {QUESTION_PROMPTS[question.type].removesuffix(': ')}"
            raise InvalidRequest(
                f"{answer_text} is not an answer to: {question.question}", hint=hint
            )
        responses.append(response)
    return responses


def find_ask(asks: Sequence[AnyAsk], ask_id: str) -> AnyAsk:
    """The ask whose id has this prefix; raises `NotFound`, `InvalidRequest` with the candidates.

    An id that is given in full means that ask, even if others begin with it.
    """
    found = [ask for ask in asks if ask_id and ask.request.id.startswith(ask_id)]
    found = [ask for ask in found if ask.request.id == ask_id] or found
    if not found:
        hint = f"open: {_shown(asks, asks)}" if asks else "no asks are open"
        raise NotFound(f"no open ask has the id {printable(ask_id)}", hint=hint)
    if len(found) > 1:
        text = f"{printable(ask_id)!r} is ambiguous ({len(found)} matches)"
        raise InvalidRequest(text, hint=f"which one: {_shown(found, asks)}")
    return found[0]


def _shown(some: Sequence[AnyAsk], asks: Sequence[AnyAsk]) -> str:
    short = short_ids([ask.request.id for ask in asks])
    shown = [f"{short[ask.request.id]} ({rows_of(ask, {})[0][0]})" for ask in some[:SHOWN_MAX]]
    if len(some) > SHOWN_MAX:
        shown.append(f"{len(some) - SHOWN_MAX} more")
    return printable(", ".join(shown))
