"""What clients are told of asks: every one in our own view, one at a time in Crush's."""

from collections.abc import Iterator
from typing import Protocol

from culm.events.hub import Live
from culm.store.asks import changed_ask
from culm.wire.asks import (
    Ask,
    PermissionNotification,
    PermissionRequest,
    QuestionRequest,
    R,
)
from culm.wire.codec import encode


class Voice(Protocol[R]):
    """How one kind of ask is told. That it was opened and closed, the store tells for good."""

    def opened(self, ask: Ask[R]) -> Iterator[Live]: ...

    def announced(self, ask: Ask[R]) -> Live:
        """It is the one that a Crush client shows."""
        ...

    def shown(self, ask: Ask[R]) -> Iterator[Live]:
        """How it stands, for whoever begins to listen."""
        ...


class PermissionVoice:
    def opened(self, ask: Ask[PermissionRequest]) -> Iterator[Live]:
        yield notification(ask.request.session_id, ask.request.tool_call_id)
        yield _request(ask)._replace(view="delta")

    def announced(self, ask: Ask[PermissionRequest]) -> Live:
        return _request(ask)._replace(view="crush")

    def shown(self, ask: Ask[PermissionRequest]) -> Iterator[Live]:
        changed = encode(changed_ask(ask))
        yield Live("ask_changed", ask.request.session_id, changed, "created")
        yield from self.opened(ask)


class QuestionVoice:
    def opened(self, ask: Ask[QuestionRequest]) -> Iterator[Live]:
        yield _batch(ask)._replace(view="delta")

    def announced(self, ask: Ask[QuestionRequest]) -> Live:
        return _batch(ask)._replace(view="crush")

    def shown(self, ask: Ask[QuestionRequest]) -> Iterator[Live]:
        changed = encode(changed_ask(ask))
        yield Live("question_changed", ask.request.session_id, changed, "created")
        yield from self.opened(ask)


def notification(session_id: str, tool_call_id: str, *, granted: bool = False) -> Live:
    """A call waits, or was let through without being asked about."""
    told = PermissionNotification(tool_call_id, granted=granted, session_id=session_id)
    return Live("permission_notification", session_id, encode(told), "created")


def _request(ask: Ask[PermissionRequest]) -> Live:
    return Live("permission_request", ask.request.session_id, encode(ask.request), "created")


def _batch(ask: Ask[QuestionRequest]) -> Live:
    return Live("question_batch_request", ask.request.session_id, encode(ask.request), "created")
