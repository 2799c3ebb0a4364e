"""A model's answer as it grows: which part of the message each piece belongs to."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from culm.clock import Clock
from culm.errors import ModelFailed
from culm.model.base import CallDelta, CallStarted, ReasoningDelta, TextDelta
from culm.run.draft import Draft
from culm.run.loop import Growth, parse_arguments
from culm.store.base import Unit
from culm.tools.base import CallRequest
from culm.wire.messages import (
    Growing,
    Message,
    Part,
    Reasoning,
    ReasoningPart,
    ToolCall,
    ToolCallPart,
)

SIGNATURE_CHARS_MAX = 8 << 20  # What a provider wants to see again; thoughts of four, twice.
CALLS_MAX = 64  # A model that makes more in one answer is looping.

Track = Callable[[asyncio.Future[None]], asyncio.Future[None]]


def calls_in(message: Message) -> list[CallRequest]:
    """The calls of a stored answer, each with its whole input."""
    return [
        CallRequest(
            part.data.id,
            part.data.name,
            part.data.input,
            parse_arguments(part.data.input),
            session_id=message.session_id,
            message_id=message.id,
        )
        for part in message.parts
        if isinstance(part, ToolCallPart)
    ]


class MessageWriter(Protocol):
    """Where an open message is written: `Messages`, or a worker that keeps nothing."""

    def append(self, draft: Draft, part: int, kind: Growing, text: str) -> None: ...

    def put(self, draft: Draft, part: int, value: Part) -> asyncio.Future[None]: ...

    def put_all(
        self, draft: Draft, parts: Mapping[int, Part], *, after: Unit | None = None
    ) -> asyncio.Future[None]: ...

    def clear(
        self, draft: Draft, *, model: str = "", provider: str = ""
    ) -> asyncio.Future[None]: ...


class OpenAnswer:
    """One open message. It has at most one part of text and one of reasoning, as clients expect."""

    def __init__(self, draft: Draft, messages: MessageWriter, clock: Clock, track: Track) -> None:
        self.draft = draft
        self._messages = messages
        self._clock = clock
        self._track = track  # Given every write, so that its owner can wait for them.
        self._text: int | None = None
        self._reasoning: int | None = None
        self._calls: dict[int, int] = {}  # The part of each call, by the model's key.

    def grow(self, event: Growth) -> None:
        if isinstance(event, TextDelta):
            text = event.text
            if self._text is None:
                text = text.removeprefix("\n")
                if not text:
                    return
                self.end_reasoning()
                self._text = len(self.draft.message.parts)
            self._messages.append(self.draft, self._text, "text", text)
        elif isinstance(event, CallDelta):
            self._messages.append(self.draft, self._calls[event.key], "input", event.text)
        elif isinstance(event, ReasoningDelta):
            self._grow_reasoning(event)
        else:
            self._begin_call(event)

    def _grow_reasoning(self, event: ReasoningDelta) -> None:
        if self._reasoning is None:
            self._reasoning = len(self.draft.message.parts)
            reasoning = Reasoning(started_at=int(self._clock.now_s()))
            self._put(self._reasoning, ReasoningPart(reasoning))
        self._messages.append(self.draft, self._reasoning, "reasoning", event.text)
        if event.signature:
            reasoning = self._reasoning_at(self._reasoning)
            reasoning.signature += event.signature
            if len(reasoning.signature) > SIGNATURE_CHARS_MAX:
                raise ModelFailed("Too long a signature", "The model signed more than it may.")

    def _reasoning_at(self, part: int) -> Reasoning:
        found = self.draft.fold().parts[part]
        assert isinstance(found, ReasoningPart), "a part keeps its kind"
        return found.data

    def end_reasoning(self) -> None:
        if self._reasoning is None:
            return
        reasoning = self._reasoning_at(self._reasoning)
        if not reasoning.finished_at:
            reasoning.finished_at = int(self._clock.now_s())
            self._put(self._reasoning, ReasoningPart(reasoning))

    def _begin_call(self, event: CallStarted) -> None:
        if len(self._calls) >= CALLS_MAX:
            raise ModelFailed(
                "Too many calls", f"The model made more than {CALLS_MAX} calls in one answer."
            )
        self.end_reasoning()
        parts = self.draft.message.parts
        taken = {part.data.id for part in parts if isinstance(part, ToolCallPart)}
        place = self._calls[event.key] = len(parts)
        # Some providers refuse a conversation in which two calls have one id.
        call_id = event.id or f"call_{place}_{self.draft.message.id[:8]}"
        while call_id in taken:  # Each call has a result of its own, so each has an id of its own.
            call_id += "~"
        self._put(place, ToolCallPart(ToolCall(call_id, event.name)))

    def _put(self, part: int, value: ReasoningPart | ToolCallPart) -> None:
        self._track(self._messages.put(self.draft, part, value))

    async def clear(self, *, model: str = "", provider: str = "") -> None:
        """Take all of it back; with a model, that one answers from here on."""
        self._text = self._reasoning = None
        self._calls = {}
        cleared = self._messages.clear(self.draft, model=model, provider=provider)
        await asyncio.shield(self._track(cleared))

    def calls(self) -> list[CallRequest]:
        """The calls as they came. One whose arguments are no JSON object is kept with `{}`."""
        parts = self.draft.fold().parts
        calls: list[CallRequest] = []
        for place in sorted(self._calls.values()):
            part = parts[place]
            assert isinstance(part, ToolCallPart), "a part keeps its kind"
            arguments = parse_arguments(part.data.input)
            text = part.data.input if arguments else "{}"
            message = self.draft.message
            calls.append(
                CallRequest(
                    part.data.id,
                    part.data.name,
                    text,
                    arguments,
                    session_id=message.session_id,
                    message_id=message.id,
                )
            )
        return calls

    def complete(self, calls: list[CallRequest], after: Unit | None = None) -> asyncio.Future[None]:
        """Store every call with its whole input; `after` happens together with that.

        The future is done when that is durable, and must not be cancelled.
        """
        parts: dict[int, Part] = {
            place: ToolCallPart(ToolCall(call.id, call.name, call.input, finished=True))
            for place, call in zip(sorted(self._calls.values()), calls, strict=True)
        }
        return self._track(self._messages.put_all(self.draft, parts, after=after))
