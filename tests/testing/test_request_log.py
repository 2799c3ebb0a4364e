"""The request log of a provider is bounded."""

import asyncio

import pytest

from culm.errors import NotFound
from culm.testing import answering
from culm.testing.answering import RequestLog, SeenRequest


def record(log: RequestLog, raw: bytes) -> SeenRequest:
    return log.record("/v1/messages", {}, raw, 0.0)


def test_the_oldest_requests_beyond_the_bound_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answering, "REQUESTS_MAX", 2)
    log = RequestLog()
    for _ in range(5):
        record(log, b"{}")
    assert [one.n for one in log.requests] == [4, 5]
    assert log.count == 5
    assert log.get(5) is log.requests[1]
    for n in (0, 3, 6):
        with pytest.raises(NotFound, match=f"request not found: {n}"):
            log.get(n)


def test_the_oldest_bodies_beyond_the_bound_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "LOG_BYTES_MAX", 10)
    log = RequestLog()
    for raw in (b"[1]", b"[2]", b"[3]", b"[4]"):
        record(log, raw)
    assert [one.body for one in log.requests] == [None, [2], [3], [4]]
    record(log, b"[1,2,3,4,5,6,7]")  # Larger than the bound, but the newest body is always kept.
    assert [one.body for one in log.requests] == [None] * 4 + [[1, 2, 3, 4, 5, 6, 7]]


async def test_a_wait_ends_when_its_condition_is_notified() -> None:
    log = RequestLog()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(log.until_left(2))
        record(log, b"")
        second = record(log, b"")
        await asyncio.sleep(0)
        assert not waiting.done()
        second.left = True
        log.notify()
