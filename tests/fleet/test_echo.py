"""The echo executor."""

import asyncio

import pytest

from culm.clock import LoopClock
from culm.fleet.executor import CANCELLED, completed
from culm.fleet.worker.executors.echo import EchoExecutor, parse_assignment
from tests.fleet.executor_host import RecordingHost
from tests.support import WAIT_S, FakeClock, contract


@contract("FLEET-45")
async def test_each_word_is_an_event_and_all_words_are_the_result() -> None:
    host = RecordingHost()
    assert await host.run(EchoExecutor(LoopClock()), " alpha\n beta ") == completed(
        "echo: alpha beta"
    )
    assert host.events == [
        {"type": "token", "content": "alpha "},
        {"type": "token", "content": "beta "},
        {"type": "complete"},
    ]


@contract("FLEET-45")
async def test_run_canceled_before_it_begins_emits_nothing() -> None:
    host = RecordingHost()
    host.cancelled.set()
    assert await host.run(EchoExecutor(LoopClock()), "alpha") == CANCELLED
    assert await host.run(EchoExecutor(FakeClock()), "__sleep_ms:9 alpha") == CANCELLED
    assert host.events == []


async def test_delay_is_awaited_and_can_be_canceled() -> None:
    clock = FakeClock()
    for is_cancelled, expected in ((False, completed("echo: alpha")), (True, CANCELLED)):
        host = RecordingHost()
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            running = group.create_task(host.run(EchoExecutor(clock), "__sleep_ms:700000 alpha"))
            while not clock.armed():
                await asyncio.sleep(0)
            if is_cancelled:
                host.cancelled.set()
            else:
                clock.advance(700)
        assert (running.result(), clock.armed()) == (expected, 0)


@pytest.mark.parametrize(
    ("assignment", "words", "delay_s"),
    [
        ("", [], 0.0),
        ("a __sleep_ms:300 b", ["a", "b"], 0.3),
        ("__sleep_ms:1 __sleep_ms:2", ["__sleep_ms:2"], 0.001),
        ("__sleep_ms:soon x__sleep_ms:3", ["__sleep_ms:soon", "x__sleep_ms:3"], 0.0),
        ("__sleep_ms:99999999999", ["__sleep_ms:99999999999"], 0.0),
    ],
)
def test_first_delay_word_is_not_echoed(assignment: str, words: list[str], delay_s: float) -> None:
    assert parse_assignment(assignment) == (words, delay_s)
