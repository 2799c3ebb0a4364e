"""The calls of one step: which there are, which have begun, and what each was answered."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from culm.tools.base import CallRequest, CallResult
from culm.wire.messages import Message, ToolCall, ToolResult, ToolResultPart


@dataclass(slots=True)
class StepCalls:
    known: list[CallRequest] = field(default_factory=list[CallRequest])
    started: set[str] = field(default_factory=set[str])
    results: dict[str, ToolResult] = field(default_factory=dict[str, ToolResult])
    answered: dict[str, Message] = field(default_factory=dict[str, Message])  # Stored.
    before: dict[str, CallResult] = field(
        default_factory=dict[str, CallResult]
    )  # By an earlier server.

    def take_over(self, messages: Iterable[Message]) -> None:
        """Know the results that an earlier server has stored."""
        for message in messages:
            for part in message.parts:
                if isinstance(part, ToolResultPart):
                    result = part.data
                    self.results[result.tool_call_id] = result
                    self.answered[result.tool_call_id] = message
                    self.before[result.tool_call_id] = CallResult(result.content, result.is_error)

    def answer(self, call: CallRequest, result: CallResult) -> ToolResult:
        """What is stored of a result."""
        told = self.results[call.id] = ToolResult(
            tool_call_id=call.id,
            name=call.name,
            content=result.content,
            data=result.data,
            mime_type=result.mime_type,
            metadata=result.metadata,
            is_error=result.is_error,
        )
        return told

    def result_of(self, call: ToolCall, otherwise: str) -> ToolResult:
        """Its result; one that says something else if it has none."""
        known = self.results.get(call.id)
        return known or ToolResult(call.id, call.name, otherwise, is_error=True)

    def stored_results(self) -> Sequence[Message]:
        """In the order of the calls."""
        return [self.answered[call.id] for call in self.known if call.id in self.answered]

    def has_begun(self) -> bool:
        """Whether one has started that has no result yet: it may have had its effect."""
        return bool(self.started - self.answered.keys())
