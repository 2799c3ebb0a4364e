"""Open messages when their store fails: nothing is lost, doubled, or left running."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from culm.clock import Timer
from culm.errors import StoreBusy
from culm.ids import Ids, SessionId, workspace_id_of
from culm.settings import Settings
from culm.store.memory import MemoryFile
from culm.store.messages import messages_of_session
from culm.store.store import open_memory_store
from culm.wire.codec import decode, encode
from culm.wire.messages import Finish, FinishPart, Message, Text, TextPart, ToolCall, ToolCallPart
from culm.workspace.about import WorkspaceInfo
from culm.workspace.workspace import LiveWorkspace, open_workspace
from tests.support import NO_EQUIPMENT, WAIT_S, FakeClock, contract, fixed_origins

PATH = Path("/project")


class Bench:
    """A workspace on a memory file, with time in the test's hand."""

    def __init__(self, workspace: LiveWorkspace, file: MemoryFile, clock: FakeClock) -> None:
        self.workspace = workspace
        self.messages = workspace.messages
        self.file = file
        self.clock = clock
        self.session_id = SessionId("")

    async def stored(self) -> list[Message]:
        rows, _ = await self.messages.read(messages_of_session(self.session_id))
        return [decode(encode(row), Message) for row in rows]


@pytest.fixture
async def bench() -> AsyncGenerator[Bench]:
    file, clock, ids = MemoryFile(), FakeClock(), Ids()
    pump_clock = PumpClock(clock)
    about = WorkspaceInfo(workspace_id_of(PATH), PATH, str(PATH), PATH)
    async with (
        asyncio.timeout(WAIT_S),
        open_memory_store(file, pump_clock, ids) as store,
        open_workspace(
            about, store, fixed_origins(), NO_EQUIPMENT, pump_clock, ids, Settings()
        ) as workspace,
    ):
        bench = Bench(workspace, file, clock)
        bench.session_id = (await workspace.create_session("one")).id
        yield bench
        file.full = file.busy = False
    file.close()


class PumpClock:
    """Commits happen by themselves; everything slower waits for the test."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    def now_s(self) -> float:
        return self._clock.now_s()

    def call_later(self, delay_s: float, action: Callable[[], None]) -> Timer:
        if delay_s < 0.001:
            return asyncio.get_running_loop().call_soon(action)
        return self._clock.call_later(delay_s, action)


@contract("INV-61")
async def test_a_finish_refused_while_an_earlier_change_is_in_flight_is_not_forgotten(
    bench: Bench,
) -> None:
    draft, opened = bench.messages.open(bench.session_id)
    await opened
    put = bench.messages.put(draft, 0, ToolCallPart(ToolCall("c", "bash")))
    bench.file.busy = True
    refused = bench.messages.finish(draft, Finish("end_turn", 1))
    assert isinstance(refused.exception(), StoreBusy)
    bench.file.busy = False
    await put
    bench.clock.advance(2)
    await bench.messages.flush()
    (message,) = await bench.stored()
    assert isinstance(message.parts[-1], FinishPart)
    assert bench.messages.open_ids() == []


@contract("INV-64")
async def test_a_message_whose_deletion_failed_grows_on_and_loses_nothing(bench: Bench) -> None:
    draft, opened = bench.messages.open(bench.session_id)
    await opened
    bench.messages.append(draft, 0, "text", "before ")
    bench.file.full = True
    deletion = bench.messages.delete(draft.message.id)
    bench.messages.append(draft, 0, "text", "meanwhile ")
    with contextlib.suppress(StoreBusy):
        await deletion
    bench.file.full = False
    bench.messages.append(draft, 0, "text", "after")
    await bench.messages.finish(draft, Finish("end_turn", 1))
    (message,) = await bench.stored()
    assert message.parts[0] == TextPart(Text("before meanwhile after"))


async def test_after_stopping_on_a_full_disk_nothing_goes_on_trying(bench: Bench) -> None:
    draft, opened = bench.messages.open(bench.session_id)
    await opened
    bench.messages.append(draft, 0, "text", "x" * 5000)
    bench.file.full = True
    with pytest.raises(StoreBusy):
        await bench.messages.stop()
    armed = bench.clock.armed()
    bench.messages.append(draft, 0, "text", "more")
    bench.clock.advance(10)
    assert bench.clock.armed() <= armed
    assert bench.messages.open_ids() == []


async def test_a_full_disk_is_tried_once_a_second_however_much_arrives(bench: Bench) -> None:
    draft, opened = bench.messages.open(bench.session_id)
    await opened
    bench.file.full = True
    for _ in range(100):
        bench.messages.append(draft, 0, "text", "x" * 5000)
        bench.clock.advance(0.03)
        await asyncio.sleep(0)
    tries = draft.last_sent
    assert tries <= 6, "three seconds, one chunk, a try a second"
    bench.file.full = False
    bench.clock.advance(2)
    await bench.messages.flush()
    (message,) = await bench.stored()
    assert message.parts == [TextPart(Text("x" * 500_000))]
