"""Events about asks: every ask in our own view, one at a time in Crush's view."""

from collections.abc import Iterator
from typing import Protocol

from culm.events.hub import TransientEvent
from culm.store.asks import changed_ask
from culm.wire.asks import (
    Ask,
    PermissionNotification,
    PermissionRequest,
    QuestionRequest,
    R,
)
from culm.wire.codec import encode


class AskNotifier(Protocol[R]):
    """Events of one kind of ask; the store publishes the durable ones."""

    def opened(self, ask: Ask[R]) -> Iterator[TransientEvent]: ...

    def announced(self, ask: Ask[R]) -> TransientEvent:
        """Build the event for the ask that a Crush client shows."""
        ...

    def state_events(self, ask: Ask[R]) -> Iterator[TransientEvent]:
        """Return the events that show an open ask to a new subscriber."""
        ...


class PermissionNotifier:
    def opened(self, ask: Ask[PermissionRequest]) -> Iterator[TransientEvent]:
        yield notification(ask.request.session_id, ask.request.tool_call_id)
        yield _request(ask)._replace(view="delta")

    def announced(self, ask: Ask[PermissionRequest]) -> TransientEvent:
        return _request(ask)._replace(view="crush")

    def state_events(self, ask: Ask[PermissionRequest]) -> Iterator[TransientEvent]:
        changed = encode(changed_ask(ask))
        yield TransientEvent("ask_changed", ask.request.session_id, changed, "created")
        yield from self.opened(ask)


class QuestionNotifier:
    def opened(self, ask: Ask[QuestionRequest]) -> Iterator[TransientEvent]:
        yield _batch(ask)._replace(view="delta")

    def announced(self, ask: Ask[QuestionRequest]) -> TransientEvent:
        return _batch(ask)._replace(view="crush")

    def state_events(self, ask: Ask[QuestionRequest]) -> Iterator[TransientEvent]:
        changed = encode(changed_ask(ask))
        yield TransientEvent("question_changed", ask.request.session_id, changed, "created")
        yield from self.opened(ask)


def notification(session_id: str, tool_call_id: str, *, granted: bool = False) -> TransientEvent:
    """Build the event of a call that waits, or that was allowed without an ask."""
    payload = PermissionNotification(tool_call_id, granted=granted, session_id=session_id)
    return TransientEvent("permission_notification", session_id, encode(payload), "created")


def _request(ask: Ask[PermissionRequest]) -> TransientEvent:
    return TransientEvent(
        "permission_request", ask.request.session_id, encode(ask.request), "created"
    )


def _batch(ask: Ask[QuestionRequest]) -> TransientEvent:
    return TransientEvent(
        "question_batch_request", ask.request.session_id, encode(ask.request), "created"
    )
