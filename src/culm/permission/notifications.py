"""What clients are told of asks: every one in our own view, one at a time in Crush's."""

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
    """How one kind of ask is told. That it was opened and closed, the store tells for good."""

    def opened(self, ask: Ask[R]) -> Iterator[TransientEvent]: ...

    def announced(self, ask: Ask[R]) -> TransientEvent:
        """It is the one that a Crush client shows."""
        ...

    def shown(self, ask: Ask[R]) -> Iterator[TransientEvent]:
        """How it stands, for whoever begins to listen."""
        ...


class PermissionNotifier:
    def opened(self, ask: Ask[PermissionRequest]) -> Iterator[TransientEvent]:
        yield notification(ask.request.session_id, ask.request.tool_call_id)
        yield _request(ask)._replace(view="delta")

    def announced(self, ask: Ask[PermissionRequest]) -> TransientEvent:
        return _request(ask)._replace(view="crush")

    def shown(self, ask: Ask[PermissionRequest]) -> Iterator[TransientEvent]:
        changed = encode(changed_ask(ask))
        yield TransientEvent("ask_changed", ask.request.session_id, changed, "created")
        yield from self.opened(ask)


class QuestionNotifier:
    def opened(self, ask: Ask[QuestionRequest]) -> Iterator[TransientEvent]:
        yield _batch(ask)._replace(view="delta")

    def announced(self, ask: Ask[QuestionRequest]) -> TransientEvent:
        return _batch(ask)._replace(view="crush")

    def shown(self, ask: Ask[QuestionRequest]) -> Iterator[TransientEvent]:
        changed = encode(changed_ask(ask))
        yield TransientEvent("question_changed", ask.request.session_id, changed, "created")
        yield from self.opened(ask)


def notification(session_id: str, tool_call_id: str, *, granted: bool = False) -> TransientEvent:
    """A call waits, or was let through without being asked about."""
    told = PermissionNotification(tool_call_id, granted=granted, session_id=session_id)
    return TransientEvent("permission_notification", session_id, encode(told), "created")


def _request(ask: Ask[PermissionRequest]) -> TransientEvent:
    return TransientEvent(
        "permission_request", ask.request.session_id, encode(ask.request), "created"
    )


def _batch(ask: Ask[QuestionRequest]) -> TransientEvent:
    return TransientEvent(
        "question_batch_request", ask.request.session_id, encode(ask.request), "created"
    )
