"""Ended runs leave memory at once, without the collector of reference cycles."""

import gc
import weakref
from collections.abc import Generator
from pathlib import Path

import pytest

from culm.run.live_run import LiveRun
from culm.testing.script import Reply
from tests.flow.agents_harness import calls, held, open_agents, start, talk
from tests.flow.drive import until
from tests.flow.probes import Gate, Probe, calling, script
from tests.flow.runs import Harness, open_runs

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)


@pytest.fixture(autouse=True)
def no_collector() -> Generator[None]:
    """Switch the collector off: an object in a cycle stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def watch(harness: Harness, run_id: str) -> weakref.ref[LiveRun]:
    return weakref.ref(harness.live(run_id))


async def test_ended_run_leaves_memory(tmp_path: Path) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as harness:
        run_id = await harness.prompt("Hi.")
        await harness.received.text("Hello")
        run = watch(harness, run_id)
        harness.model.release()
        await harness.received.complete(run_id)
        await until(lambda: run() is None)


@pytest.mark.parametrize("status", [200, 401])
async def test_run_with_calls_leaves_memory(tmp_path: Path, status: int) -> None:
    gate = Gate()
    tool = Probe("tool", gate.pass_through)
    play = script(calling("tool"), Reply(text="Done.", status=status))
    async with open_runs(tmp_path, play=play, tools=[tool]) as harness:
        run_id = await harness.prompt("Hi.")
        await until(lambda: gate.inside == 1)
        run = watch(harness, run_id)
        gate.release()
        await harness.received.complete(run_id)
        await until(lambda: run() is None)


async def test_canceled_run_leaves_memory(tmp_path: Path) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as harness:
        run_id = await harness.prompt("Hi.")
        await harness.received.text("Hello")
        run = watch(harness, run_id)
        await harness.cancel()
        await harness.received.complete(run_id)
        await until(lambda: run() is None)


async def test_runs_of_agents_leave_memory(tmp_path: Path) -> None:
    talks = (
        talk("@lead", start("@ann: go"), then="Over."),
        talk("@ann", calls("agent_list"), held("Ann is done.")),
    )
    async with open_agents(tmp_path, *talks) as harness:
        run_id = await harness.prompt("@lead: go")
        seen = await harness.until_asked_by("@ann", 2)
        live = harness.flow.workspace(harness.remote.id).runs.live()
        runs = [weakref.ref(run) for run in live]
        del live
        assert len(runs) == 2
        harness.release(seen)
        await harness.received.complete(run_id)
        await until(lambda: [run() for run in runs] == [None, None])
