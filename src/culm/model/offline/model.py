"""`offline`, the embedded model: rules instead of an LLM, so that culm works with nothing set up.

It reads the last prompt for a few intents, calls real tools and answers from their results. The
same request gets the same answer. It has no state, so all it knows of a turn is in the messages:
it goes through the steps since the prompt again, and does what is left of them.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never, cast

from culm.model.base import (
    AnswerDone,
    CallDelta,
    CallStarted,
    ModelEvent,
    ModelRequest,
    ModelSetup,
    TextDelta,
    ToolSpec,
)
from culm.model.offline.answers import (
    INTRODUCTION,
    abilities,
    describe_result,
    first_path,
    is_unread,
    missing,
    name_of,
    unanswered,
)
from culm.model.offline.intents import (
    CountFilesIntent,
    CountLinesIntent,
    CountMatchesIntent,
    DelegateIntent,
    DownloadIntent,
    FetchIntent,
    FindIntent,
    Intent,
    ListIntent,
    ReadFirstIntent,
    ReadIntent,
    ReplaceIntent,
    RunIntent,
    SearchIntent,
    WriteIntent,
    parse_intents,
)
from culm.model.offline.texts import summary_of, title_of
from culm.wire.codec import Json, encode
from culm.wire.messages import Message, ToolCallPart, ToolResult, ToolResultPart, full_text

# How the system prompts begin that ask for something else than a turn; a test holds them to it.
TITLE_WORDS = "Write a title"
SUMMARY_WORDS = "Summarize this conversation"
# What a system prompt says to one that works for another agent, which has introduced itself.
FOR_AGENT_WORDS = "You work on a part of a larger task, for another agent."

_PIECES = re.compile(r"\s*(?:\S+\s*){1,3}|\s+")  # About as much as an LLM says at a time.


class OfflineModel:
    """Made like every adapter, but there is nothing to reach and nothing to pay."""

    def __init__(self, setup: ModelSetup | None = None) -> None:
        del setup

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        """Answer by the rules. Never fails, and others go on between two pieces."""
        answer = answer_to(request)
        for piece in _PIECES.findall(answer.text):
            yield TextDelta(piece)
            await asyncio.sleep(0)
        for key, use in enumerate(answer.uses):
            # Unique in the session: some providers refuse a history with the same id twice.
            yield CallStarted(key, f"offline_{len(request.messages)}_{key}", use.tool)
            yield CallDelta(key, encode(use.arguments).decode())
        # Nobody counted tokens: culm then estimates them, and an estimate costs nothing.
        yield AnswerDone("tool_use" if answer.uses else "end_turn")


@dataclass(frozen=True, slots=True)
class OfflineCall:
    """A call to make."""

    tool: str
    arguments: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class OfflineAnswer:
    text: str
    uses: tuple[OfflineCall, ...] = ()


def answer_to(request: ModelRequest) -> OfflineAnswer:
    """What to say and what to call, in this step of a turn."""
    messages = request.messages
    if not request.tools and request.system.startswith(TITLE_WORDS):
        return OfflineAnswer(title_of(messages))
    if not request.tools and request.system.startswith(SUMMARY_WORDS):
        return OfflineAnswer(summary_of(messages))
    answered = any(message.role == "assistant" for message in messages)
    introduction = "" if answered or FOR_AGENT_WORDS in request.system else INTRODUCTION
    place = next((n for n in reversed(range(len(messages))) if messages[n].role == "user"), None)
    prompt = None if place is None else messages[place]
    intents = parse_intents(full_text(prompt.parts)) if prompt else ()
    offered = {spec.name: spec for spec in request.tools}
    if place is None or not intents:
        return OfflineAnswer(introduction + abilities(offered, prompt))
    turn = _replay(intents, _steps_in(messages[place + 1 :]), offered)
    if turn.uses:
        uses = tuple(_fitting(use, offered[use.tool]) for use in turn.uses)
        return OfflineAnswer(introduction.strip(), uses)
    told = (_tell(*one, offered) for one in zip(intents, turn.results, strict=True))
    return OfflineAnswer(introduction + "\n\n".join(told))


# --- a turn: looking around at once, everything else one after the other


@dataclass(frozen=True, slots=True)
class OfflineTurn:
    """Where a turn stands: the calls to make now, and what came of each intent so far."""

    uses: tuple[OfflineCall, ...]
    results: Sequence[Sequence[ToolResult]]


def _replay(
    intents: Sequence[Intent], steps: Sequence[list[ToolResult]], offered: Collection[str]
) -> OfflineTurn:
    """Go through the steps that were made, to where no step answers what comes next."""
    results: list[list[ToolResult]] = [[] for _ in intents]
    left = [list(step) for step in steps]
    for group in _groups(intents):
        going = set(group)
        while uses := {n: use for n in sorted(going) if (use := _use_of(intents[n], results[n]))}:
            going = {n for n, use in uses.items() if use.tool in offered}
            if not going:
                break
            if not left:
                return OfflineTurn(tuple(uses[n] for n in sorted(going)), results)
            step = left.pop(0)
            for n in sorted(going):
                result = _take(step, uses[n])
                if result is None:  # It was never answered.
                    going.discard(n)
                else:
                    results[n].append(result)
    return OfflineTurn((), results)


def _groups(intents: Sequence[Intent]) -> Iterator[list[int]]:
    """The places of intents that may be worked on at once: what only looks."""
    group: list[int] = []
    for n, intent in enumerate(intents):
        if isinstance(intent, RunIntent | ReplaceIntent | WriteIntent | DownloadIntent):
            yield group
            yield [n]
            group = []
        else:
            group.append(n)
    yield group


def _steps_in(messages: Sequence[Message]) -> list[list[ToolResult]]:
    """The results of each step that called something, in the order of the calls."""
    steps: list[list[ToolResult]] = []
    for message in messages:
        if message.role == "assistant":
            if any(isinstance(part, ToolCallPart) for part in message.parts):
                steps.append([])
        elif steps:
            steps[-1] += [part.data for part in message.parts if isinstance(part, ToolResultPart)]
    return steps


def _take(results: list[ToolResult], use: OfflineCall) -> ToolResult | None:
    """The next result of that tool. Calls were made in the order of the intents."""
    for n, result in enumerate(results):
        if result.name == use.tool:
            return results.pop(n)
    return None


def _tell(intent: Intent, results: Sequence[ToolResult], offered: Collection[str]) -> str:
    use = _use_of(intent, results)
    if use is not None:
        return unanswered(use.tool) if use.tool in offered else missing(use.tool)
    if isinstance(intent, ReadFirstIntent) and len(results) > 1:
        intent = ReadIntent(first_path(results[0]))
    return describe_result(intent, results[-1])


# --- calls


def _use_of(intent: Intent, results: Sequence[ToolResult]) -> OfflineCall | None:
    """The call that an intent needs next, after these results; None if it is done."""
    match intent, results:
        case ReadFirstIntent(), [found]:
            path = first_path(found)
            return OfflineCall("view", {"file_path": path}) if path else None
        case ReplaceIntent(path=path, old=old, new=new), [seen] if not seen.is_error:
            wish: dict[str, Json] = {"file_path": path, "old_string": old, "new_string": new}
            return OfflineCall("edit", {**wish, "replace_all": True})
        case WriteIntent(path=path), [refused] if is_unread(refused):
            return OfflineCall("view", {"file_path": path})
        case WriteIntent(), [_, seen] if not seen.is_error:
            return _first_use(intent)
        case _, []:
            return _first_use(intent)
        case _:
            return None


def _first_use(intent: Intent) -> OfflineCall:
    match intent:
        case ListIntent(path=path):
            return _use("ls", path=path)
        case ReadIntent(path=path, lines=lines):
            return _use("view", file_path=path, limit=lines)
        case CountLinesIntent(path=path):
            return _use("view", file_path=path)
        case FindIntent(pattern=pattern, path=path) | CountFilesIntent(pattern=pattern, path=path):
            return _use("glob", pattern=pattern, path=path)
        case ReadFirstIntent(pattern=pattern, path=path):
            return _use("glob", pattern=pattern, path=path)
        case SearchIntent():
            return _grep(intent)
        case CountMatchesIntent(search=search):
            return _grep(search)
        case RunIntent(command=command):
            return OfflineCall("bash", {"command": command, "description": f"Run {command[:60]}"})
        case ReplaceIntent(path=path):
            return OfflineCall("view", {"file_path": path})  # Nobody may change what was not read.
        case FetchIntent(url=url):
            return OfflineCall("fetch", {"url": url, "format": "markdown"})
        case DownloadIntent(url=url, path=path):
            return OfflineCall("download", {"url": url, "file_path": path})
        case WriteIntent(path=path, content=content):
            return OfflineCall("write", {"file_path": path, "content": content})
        case DelegateIntent(prompts=(prompt,)):
            return OfflineCall("agent", _assignment(prompt))
        case DelegateIntent(prompts=prompts):
            return OfflineCall(
                "agent", {"assignments": [_assignment(prompt) for prompt in prompts]}
            )
        case _:
            assert_never(intent)


def _assignment(prompt: str) -> dict[str, Json]:
    """What an agent is told, and what it is called: the first thing it will do."""
    first = next(iter(parse_intents(prompt)), None)
    name = "" if first is None else name_of(first)
    return {"prompt": prompt, "name": name} if name else {"prompt": prompt}


def _grep(search: SearchIntent) -> OfflineCall:
    return _use(
        "grep",
        pattern=search.pattern,
        path=search.path,
        include=search.include,
        literal_text=search.literal,
    )


def _use(tool: str, **arguments: Json) -> OfflineCall:
    """A call without the arguments that say nothing."""
    return OfflineCall(tool, {name: value for name, value in arguments.items() if value})


def _fitting(use: OfflineCall, spec: ToolSpec) -> OfflineCall:
    """The call with those arguments only that the tool knows."""
    known = spec.parameters.get("properties")
    if not isinstance(known, dict):
        return use
    names = cast("dict[str, Json]", known)
    return OfflineCall(
        use.tool, {name: value for name, value in use.arguments.items() if name in names}
    )
