"""Reads the records of a run: its messages, and the requests to the model."""

from collections.abc import Iterable

import msgspec
from msgspec import Struct

from culm.testing.answering import SeenRequest
from culm.wire.codec import Json, decode
from culm.wire.messages import (
    Finish,
    FinishPart,
    Message,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
)


class SentFunction(Struct):
    name: str
    arguments: str


class SentCall(Struct):
    id: str
    function: SentFunction


class Sent(Struct):
    """One message of a request, in the format of the provider."""

    role: str
    content: Json = None
    tool_calls: list[SentCall] = msgspec.field(default_factory=list[SentCall])
    tool_call_id: str = ""


class _Body(Struct):
    messages: list[Sent]


def sent_in(seen: SeenRequest) -> list[Sent]:
    return decode(seen.raw, _Body).messages


# --- messages


def finish_of(message: Message) -> Finish:
    found = [part.data for part in message.parts if isinstance(part, FinishPart)]
    assert len(found) <= 1, f"a message ends once: {found}"
    return found[0] if found else Finish("", 0)


def calls_of(messages: Iterable[Message]) -> list[ToolCall]:
    return [p.data for m in messages for p in m.parts if isinstance(p, ToolCallPart)]


def results_of(messages: Iterable[Message]) -> list[ToolResult]:
    """All results in the order of their calls: parallel calls may end in any order."""
    all_of_them = list(messages)
    position = {call.id: index for index, call in enumerate(calls_of(all_of_them))}
    results = [p.data for m in all_of_them for p in m.parts if isinstance(p, ToolResultPart)]
    return sorted(results, key=lambda result: position.get(result.tool_call_id, len(position)))


def assert_answered(messages: Iterable[Message]) -> None:
    """Every call has exactly one result, and every result a call."""
    all_of_them = list(messages)
    called = sorted(call.id for call in calls_of(all_of_them))
    assert called == sorted(result.tool_call_id for result in results_of(all_of_them))


def assert_paired(sent: Iterable[Sent]) -> None:
    """Every call in a request is followed by its one result, and every result has a call."""
    wanted: list[str] = []
    for message in sent:
        if message.role == "tool":
            assert message.tool_call_id in wanted, f"{message} has no call"
            wanted.remove(message.tool_call_id)
        else:
            assert not wanted, f"{wanted} have no result"
            wanted = [call.id for call in message.tool_calls]
            assert len(set(wanted)) == len(wanted)
    assert not wanted, f"{wanted} have no result"
