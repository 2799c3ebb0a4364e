"""The public API of `culm.fleet`: a custom executor, served and given runs."""

import asyncio

import pytest

from culm import fleet
from culm.fleet.transport.base import LinkLost
from tests.support import WAIT_S


class AskingExecutor:
    """Asks for approval first, and returns the text of a steer message."""

    async def run(
        self,
        spec: fleet.RunSpec,
        events: fleet.EventSink,
        steer: fleet.SteerInbox,
        cancel: fleet.CancelToken,
        host: fleet.RunHost,
    ) -> fleet.Outcome:
        if spec.assignment == "vanish":
            await cancel.wait()
        if not await host.ask({"tool_name": "delete", "resource": spec.assignment}):
            return fleet.failed("not allowed")
        await events.emit({"type": "token", "content": "allowed "})
        return fleet.completed((await steer.next()).text)


class ApprovingCallbacks(fleet.DenyAll):
    def __init__(self, controls: fleet.RunControl) -> None:
        self._controls = controls
        self.asked: list[str] = []

    async def on_ask(self, ask: fleet.WorkerAsk) -> bool:
        self.asked.append(ask.resource)
        self._controls.steer("gently")
        return True


def test_all_exported_names_exist() -> None:
    assert [name for name in fleet.__all__ if not hasattr(fleet, name)] == []
    assert not hasattr(fleet, "Nothing")


async def test_custom_executor_asks_is_steered_and_completes() -> None:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    controls = fleet.RunControl()
    callbacks = ApprovingCallbacks(controls)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        group.create_task(fleet.serve(AskingExecutor(), token="t", on_ready=ready.set_result))
        async with fleet.connect(await ready, token="t") as peer:
            assert await peer.run("old.txt", callbacks, controls) == fleet.completed("gently")
            assert await peer.run("new.txt") == fleet.failed("not allowed")
    assert callbacks.asked == ["old.txt"]


async def test_link_whose_run_did_not_end_accepts_no_more_runs() -> None:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        worker = group.create_task(fleet.serve(AskingExecutor(), on_ready=ready.set_result))
        async with fleet.connect(await ready) as peer:
            lost = group.create_task(peer.run("vanish"))
            await asyncio.sleep(0)
            worker.cancel()
            assert (await lost).status == "error"
            with pytest.raises(LinkLost):
                await peer.run("again")
