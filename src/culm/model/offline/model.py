"""`offline`, the embedded model: rules instead of an LLM, so that culm works with nothing set up.

It parses the last prompt, calls real tools and answers from their results. The same request gets
the same answer. It is stateless: each step replays the results since the prompt and makes the
calls that are still missing.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from typing import cast

from msgspec import Struct

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
    agent_name,
    describe_abilities,
    describe_result,
    summary_of,
    title_of,
)
from culm.model.offline.intents import Intent, IntentKind, parse_intents
from culm.wire.codec import Json, encode
from culm.wire.messages import Message, ToolCallPart, ToolResult, ToolResultPart, full_text

# How the system prompts of titles and summaries begin; a test checks that they still do.
TITLE_SYSTEM_START = "Write a title"
SUMMARY_SYSTEM_START = "Summarize this conversation"
# Part of a sub-agent's system prompt. The agent above it has already introduced itself.
SUBAGENT_SYSTEM_PART = "You work on a part of a larger task, for another agent."

_PIECES = re.compile(r"\s*(?:\S+\s*){1,3}|\s+")  # About the size of an LLM's deltas.


class OfflineModel:
    """Made like every adapter, but without a connection and free of charge."""

    def __init__(self, setup: ModelSetup | None = None) -> None:
        del setup

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        """Answer by the rules. Never fails, and yields to other tasks between two pieces."""
        answer = answer_to(request)
        for piece in _PIECES.findall(answer.text):
            yield TextDelta(piece)
            await asyncio.sleep(0)
        for key, call in enumerate(answer.calls):
            # Unique in the session: some providers refuse a history with the same id twice.
            yield CallStarted(key, f"offline_{len(request.messages)}_{key}", call.tool)
            yield CallDelta(key, encode(call.arguments).decode())
        # Without a token count culm estimates one, and an estimate costs nothing.
        yield AnswerDone("tool_use" if answer.calls else "end_turn")


class OfflineCall(Struct, frozen=True):
    tool: str
    arguments: Mapping[str, Json]


class OfflineAnswer(Struct, frozen=True):
    text: str
    calls: tuple[OfflineCall, ...] = ()


def answer_to(request: ModelRequest) -> OfflineAnswer:
    """The text and the calls of this step of a turn."""
    messages = request.messages
    if not request.tools and request.system.startswith(TITLE_SYSTEM_START):
        return OfflineAnswer(title_of(messages))
    if not request.tools and request.system.startswith(SUMMARY_SYSTEM_START):
        return OfflineAnswer(summary_of(messages))
    is_first = not any(message.role == "assistant" for message in messages)
    introduction = "" if SUBAGENT_SYSTEM_PART in request.system or not is_first else INTRODUCTION
    prompt = next((n for n in reversed(range(len(messages))) if messages[n].role == "user"), None)
    intents = () if prompt is None else parse_intents(full_text(messages[prompt].parts))
    offered = {spec.name: spec for spec in request.tools}
    if prompt is None or not intents:
        return OfflineAnswer(introduction + describe_abilities(offered))
    calls, results = _replay(intents, _steps_in(messages[prompt + 1 :]), offered)
    if calls:
        fitting = tuple(_fitting(call, offered[call.tool]) for call in calls)
        return OfflineAnswer(introduction.strip(), fitting)
    texts = (_describe(*one, offered) for one in zip(intents, results, strict=True))
    return OfflineAnswer(introduction + "\n\n".join(texts))


# --- a turn: calls that only look are made at once, all others one after the other


def _replay(
    intents: Sequence[Intent], steps: Sequence[list[ToolResult]], offered: Collection[str]
) -> tuple[list[OfflineCall], list[list[ToolResult]]]:
    """Assign the results of past steps; returns the calls to make now and each intent's results."""
    results: list[list[ToolResult]] = [[] for _ in intents]
    left = [list(step) for step in steps]
    for group in _groups(intents):
        open_ = set(group)
        while calls := {n: c for n in sorted(open_) if (c := _next_call(intents[n], results[n]))}:
            open_ = {n for n, call in calls.items() if call.tool in offered}
            if not open_:
                break
            if not left:
                return [calls[n] for n in sorted(open_)], results
            step = left.pop(0)
            for n in sorted(open_):
                # The calls of a step were made in the order of the intents.
                result = next((r for r in step if r.name == calls[n].tool), None)
                if result is None:
                    open_.discard(n)  # Never answered, and not repeated.
                else:
                    step.remove(result)
                    results[n].append(result)
    return [], results


def _groups(intents: Sequence[Intent]) -> Iterator[list[int]]:
    """The indexes of intents that may be worked on at once."""
    group: list[int] = []
    for n, intent in enumerate(intents):
        if intent.kind in ("run", "replace", "write"):
            yield group
            yield [n]
            group = []
        else:
            group.append(n)
    yield group


def _steps_in(messages: Sequence[Message]) -> list[list[ToolResult]]:
    """The results of each step with calls, in the order of the calls."""
    steps: list[list[ToolResult]] = []
    for message in messages:
        if message.role == "assistant":
            if any(isinstance(part, ToolCallPart) for part in message.parts):
                steps.append([])
        elif steps:
            steps[-1] += [part.data for part in message.parts if isinstance(part, ToolResultPart)]
    return steps


def _describe(intent: Intent, results: Sequence[ToolResult], offered: Collection[str]) -> str:
    call = _next_call(intent, results)
    if call is None:
        return describe_result(intent, results[-1])
    if call.tool in offered:
        return f"`{call.tool}` returned no result."
    return f"That needs the tool `{call.tool}`, which is not available."


# --- calls

# The tool of each kind of intent, and the field for each of its arguments.
_CALLS: Mapping[IntentKind, tuple[str, Mapping[str, str]]] = {
    "list": ("ls", {"path": "path"}),
    "read": ("view", {"file_path": "path", "limit": "lines"}),
    "find": ("glob", {"pattern": "pattern", "path": "path"}),
    "count_files": ("glob", {"pattern": "pattern", "path": "path"}),
    "search": ("grep", {"pattern": "pattern", "path": "path"}),
    "count_matches": ("grep", {"pattern": "pattern", "path": "path"}),
    "run": ("bash", {"command": "command"}),
    "replace": ("view", {"file_path": "path"}),  # A file must be read before it is changed.
    "write": ("write", {"file_path": "path"}),
    "fetch": ("fetch", {"url": "url"}),
    "delegate": ("agent", {}),
}


def _next_call(intent: Intent, results: Sequence[ToolResult]) -> OfflineCall | None:
    """The call that an intent needs after these results; None if it is done."""
    match intent.kind, results:
        case "replace", [seen] if not seen.is_error:
            change: dict[str, Json] = {"old_string": intent.old, "new_string": intent.new}
            return OfflineCall("edit", {"file_path": intent.path, **change, "replace_all": True})
        case "write", [refused] if refused.is_error and "view it" in refused.content:
            return OfflineCall("view", {"file_path": intent.path})
        case (_, []) | ("write", [_, ToolResult(is_error=False)]):
            return _first_call(intent)
        case _:
            return None


def _first_call(intent: Intent) -> OfflineCall:
    tool, fields = _CALLS[intent.kind]
    arguments: dict[str, Json] = {
        name: value for name, field in fields.items() if (value := getattr(intent, field))
    }
    match intent.kind:
        case "search" | "count_matches":
            arguments["literal_text"] = True
        case "run":
            arguments["description"] = f"Run {intent.command[:60]}"
        case "write":
            arguments["content"] = intent.content
        case "fetch":
            arguments["format"] = "markdown"
        case "delegate":
            first, *others = [_assignment(prompt) for prompt in intent.prompts]
            arguments = {"assignments": [first, *others]} if others else first
        case _:
            pass
    return OfflineCall(tool, arguments)


def _assignment(prompt: str) -> dict[str, Json]:
    """The arguments for one agent, named after the first thing that it will do."""
    name = "".join(agent_name(intent) for intent in parse_intents(prompt)[:1])
    return {"prompt": prompt, "name": name} if name else {"prompt": prompt}


def _fitting(call: OfflineCall, spec: ToolSpec) -> OfflineCall:
    """The call with only those arguments that the tool has."""
    known = cast("dict[str, Json]", spec.parameters.get("properties", call.arguments))
    return OfflineCall(call.tool, {k: v for k, v in call.arguments.items() if k in known})
