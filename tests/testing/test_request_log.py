"""What a provider remembers of its requests is bounded."""

import asyncio

import pytest

from culm.errors import NotFound
from culm.testing import request_log as seen
from culm.testing.request_log import RequestLog, SeenRequest


def record(history: RequestLog, raw: bytes) -> SeenRequest:
    return history.record("/v1/messages", {}, raw, 0.0)


def test_beyond_its_bound_the_oldest_requests_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seen, "REQUESTS_MAX", 2)
    history = RequestLog()
    for _ in range(5):
        record(history, b"{}")
    assert [one.n for one in history.requests] == [4, 5]
    assert history.count == 5
    assert history.get(5) is history.requests[1]
    for n in (0, 3, 6):
        with pytest.raises(NotFound, match=f"no request {n}"):
            history.get(n)


def test_beyond_their_bound_the_oldest_bodies_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen, "BODY_BYTES_MAX", 10)
    history = RequestLog()
    for raw in (b"[1]", b"[2]", b"[3]", b"[4]"):
        record(history, raw)
    assert [one.body for one in history.requests] == [None, [2], [3], [4]]
    record(history, b"[1,2,3,4,5,6,7]")  # Too large alone, and yet the newest is kept.
    assert [one.body for one in history.requests] == [None] * 4 + [[1, 2, 3, 4, 5, 6, 7]]


async def test_a_wait_ends_when_what_it_waits_for_is_told() -> None:
    history = RequestLog()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(history.until_left(2))
        record(history, b"")
        second = record(history, b"")
        await asyncio.sleep(0)
        assert not waiting.done()
        second.left = True
        history.notify()
