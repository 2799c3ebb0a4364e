"""A model's answer while it grows: assigns each piece to a part of the message."""

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

SIGNATURE_CHARS_MAX = 8 << 20  # Providers expect it back; allows twice the 4 MiB of reasoning.
CALLS_MAX = 64  # A model that makes more in one answer is looping.

Track = Callable[[asyncio.Future[None]], asyncio.Future[None]]


def calls_in(message: Message) -> list[CallRequest]:
    """Return the calls of a stored answer, each with its whole input."""
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
    """The storage of an open message: `Messages`, or a worker, which stores nothing."""

    def append(self, draft: Draft, part: int, kind: Growing, text: str) -> None: ...

    def put(self, draft: Draft, part: int, value: Part) -> asyncio.Future[None]: ...

    def put_all(
        self, draft: Draft, parts: Mapping[int, Part], *, after: Unit | None = None
    ) -> asyncio.Future[None]: ...

    def clear(
        self, draft: Draft, *, model: str = "", provider: str = ""
    ) -> asyncio.Future[None]: ...


class OpenAnswer:
    """One open message. Clients expect at most one text part and one reasoning part."""

    def __init__(self, draft: Draft, messages: MessageWriter, clock: Clock, track: Track) -> None:
        self.draft = draft
        self._messages = messages
        self._clock = clock
        self._track = track  # Receives every write, so that the owner can wait for it.
        self._text: int | None = None
        self._reasoning: int | None = None
        self._calls: dict[int, int] = {}  # Part numbers by the model's key of the call.

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
                raise ModelFailed(
                    "Signature too long", "The model sent a signature over the limit."
                )

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
        index = self._calls[event.key] = len(parts)
        # Some providers reject a conversation in which two calls share an id.
        call_id = event.id or f"call_{index}_{self.draft.message.id[:8]}"
        while call_id in taken:  # Every call has its own result, so it needs its own id.
            call_id += "~"
        self._put(index, ToolCallPart(ToolCall(call_id, event.name)))

    def _put(self, part: int, value: ReasoningPart | ToolCallPart) -> None:
        self._track(self._messages.put(self.draft, part, value))

    async def clear(self, *, model: str = "", provider: str = "") -> None:
        """Discard the whole answer. With `model`, that model answers from now on."""
        self._text = self._reasoning = None
        self._calls = {}
        cleared = self._messages.clear(self.draft, model=model, provider=provider)
        await asyncio.shield(self._track(cleared))

    def calls(self) -> list[CallRequest]:
        """Return the calls in order; arguments that are not a JSON object become `{}`."""
        parts = self.draft.fold().parts
        calls: list[CallRequest] = []
        for index in sorted(self._calls.values()):
            part = parts[index]
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
        """Store every call with its whole input, and `after` in the same transaction.

        The future completes when both are durable, and must not be cancelled.
        """
        parts: dict[int, Part] = {
            index: ToolCallPart(ToolCall(call.id, call.name, call.input, finished=True))
            for index, call in zip(sorted(self._calls.values()), calls, strict=True)
        }
        return self._track(self._messages.put_all(self.draft, parts, after=after))
