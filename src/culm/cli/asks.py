"""`culm asks`, `culm answer`, `culm ps`, `culm stop`: a look at what a server does for a directory.

They join no workspace and start no server; where there is none, nothing is asked and nothing runs.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import click
import msgspec

from culm.cli.call_lines import head_of
from culm.cli.call_notes import path_text
from culm.cli.desk import HOW, parse_response
from culm.cli.lines import columns
from culm.cli.place import Where
from culm.cli.server import look
from culm.client.workspace import RemoteWorkspace
from culm.errors import Failed, InvalidRequest, NotFound
from culm.wire.agents import Agent
from culm.wire.asks import Ask, PermissionRequest, Question, QuestionRequest, QuestionResponse
from culm.wire.processes import Process

AnyAsk = Ask[PermissionRequest] | Ask[QuestionRequest]
Names = Mapping[str, str]  # Of agents, by their ids.

ID_CHARS = 8  # Enough to tell apart what is open at once.
ACTIONS = {
    "allow": "allow",
    "session": "allow_session",
    "workspace": "allow_workspace",
    "deny": "deny",
}


def show_asks(where: Where, *, as_json: bool) -> None:
    async def all_asks(workspace: RemoteWorkspace) -> tuple[list[AnyAsk], Names]:
        asks = await _all_in(workspace)
        return asks, await _names_in(workspace, asks)

    found, names = look(where, all_asks, ([], {}))
    rows = [(ask.request.id[:ID_CHARS], *row) for ask in found for row in rows_of(ask, names)]
    _show(found, rows, "nothing is asked here", as_json=as_json)


async def _all_in(workspace: RemoteWorkspace) -> list[AnyAsk]:
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
        names.get(agent_id) or agent_id[:ID_CHARS]
        for place, agent_id in enumerate(ask.agent_path)
        if place or agent_id in names
    ]
    return f" (asked by {path_text(path)})" if path else ""


async def _names_in(workspace: RemoteWorkspace, asks: Sequence[AnyAsk]) -> dict[str, str]:
    """What the agents are called that ask."""
    if not any(ask.agent_path for ask in asks):
        return {}
    return {agent.agent_id: agent.name for agent in await workspace.agents()}


def show_processes(where: Where, *, as_json: bool) -> None:
    found = look(where, RemoteWorkspace.processes, [])
    rows = [
        (str(one.pid), one.kind, age_text(one.age_s), size_text(one.rss_bytes), _command_of(one))
        for one in found
    ]
    _show(found, rows, "nothing runs here", as_json=as_json)


def answer_ask(where: Where, ask_id: str, answers: Sequence[str]) -> None:
    """Raises `NotFound` if there is none; `InvalidRequest` if there are several, or it is none."""

    async def give(workspace: RemoteWorkspace) -> list[str]:
        ask = find_ask(await _all_in(workspace), ask_id)
        names = await _names_in(workspace, [ask])
        state, is_first = await _give(workspace, ask, answers)
        if not is_first:
            raise Failed("it is not open any more: somebody was faster, or the run has ended")
        return [f"{state}: {kind}: {words}" for kind, words in rows_of(ask, names)]

    answered = look(where, give, None)
    if answered is None:
        raise NotFound(f"nothing is asked in {where.directory}")
    for line in answered:
        click.echo(line, err=True)


async def _give(
    workspace: RemoteWorkspace, ask: AnyAsk, answers: Sequence[str]
) -> tuple[str, bool]:
    """What it is then, and whether this answer made it so; raises `InvalidRequest`."""
    if isinstance(ask.request, QuestionRequest):
        responses = responses_of(ask.request.questions, answers)
        return "answered", await workspace.answer_questions(ask.request.id, responses)
    words = " ".join(answers)
    action = ACTIONS.get(words)
    if action is None:
        raise InvalidRequest(f"{words} is no answer to this", hint=f"say {', '.join(ACTIONS)}")
    permission = cast("Ask[PermissionRequest]", ask)  # Its request is one.
    state = "denied" if action == "deny" else "allowed"
    return state, await workspace.answer(permission, action)


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
    """The one whose id begins like this; raises `NotFound`, `InvalidRequest`."""
    found = [ask for ask in asks if ask_id and ask.request.id.startswith(ask_id)]
    if not found:
        raise NotFound(f"no open ask has the id {ask_id}", hint="`culm asks` lists them")
    if len(found) > 1:
        raise InvalidRequest(f"{len(found)} open asks begin with {ask_id}", hint="give more of it")
    return found[0]


def stop_agent(where: Where, agent_id: str) -> None:
    """With all below it; raises `Failed` if there is none."""

    async def stop(workspace: RemoteWorkspace) -> Agent:
        return await workspace.cancel_agent(agent_id)

    agent = look(where, stop, None)
    if agent is None:
        raise NotFound(f"nobody is at work in {where.directory}")
    state = agent.outcome if agent.state == "ended" else f"{agent.state}, and told to stop"
    click.echo(f"{head_of(agent.name) or agent_id}: {state}", err=True)


def age_text(age_s: float) -> str:
    minutes, seconds = divmod(int(age_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def size_text(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.1f} MiB"


def _command_of(process: Process) -> str:
    stopping = " (stopping)" if process.stopping else ""
    return head_of(process.command) + stopping


def _show(
    found: Sequence[msgspec.Struct], rows: Sequence[Sequence[str]], none: str, *, as_json: bool
) -> None:
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
    elif rows:
        click.echo("\n".join(columns(rows)))
    else:
        click.echo(none, err=True)
