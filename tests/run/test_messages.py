"""Open messages when their store fails: nothing is lost, doubled, or left running."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from culm.clock import Timer
from culm.errors import StoreBusy
from culm.ids import Ids, SessionId, workspace_id_of
from culm.run import messages
from culm.run.draft import Draft
from culm.store import text_tail
from culm.store.memory import MemoryFile
from culm.store.messages import messages_of_session
from culm.store.store import open_memory_store
from culm.store.text_tail import decode_records, shown_outputs
from culm.wire.codec import decode, encode
from culm.wire.messages import (
    Finish,
    FinishPart,
    Message,
    Text,
    TextPart,
    ToolCall,
    ToolCallPart,
    full_text,
)
from culm.workspace.roots import WorkspaceInfo
from culm.workspace.workspace import LiveWorkspace, open_workspace
from tests.support import (
    WAIT_S,
    FakeClock,
    contract,
    fixed_origins,
    ignore_fate,
    make_services,
)

PATH = Path("/project")


class MessagesHarness:
    """A workspace on a memory file with a fake clock."""

    def __init__(self, workspace: LiveWorkspace, file: MemoryFile, clock: FakeClock) -> None:
        self.workspace = workspace
        self.messages = workspace.messages
        self.file = file
        self.clock = clock
        self.session_id = SessionId("")

    async def open(self, session_id: SessionId | None = None) -> Draft:
        """Open a message, in the first session unless another is named."""
        draft, opened = self.messages.open(session_id or self.session_id)
        await opened
        return draft

    async def stored(self) -> list[Message]:
        rows, _ = await self.messages.read(messages_of_session(self.session_id))
        return [decode(encode(row), Message) for row in rows]


@pytest.fixture
async def harness() -> AsyncGenerator[MessagesHarness]:
    file, clock, ids = MemoryFile(), FakeClock(), Ids()
    pump_clock = PumpClock(clock)
    about = WorkspaceInfo(workspace_id_of(PATH), PATH, str(PATH), PATH)
    async with (
        asyncio.timeout(WAIT_S),
        open_memory_store(file, pump_clock, ids) as store,
        open_workspace(
            about, store, fixed_origins(), make_services(pump_clock, ids), ignore_fate
        ) as workspace,
    ):
        harness = MessagesHarness(workspace, file, clock)
        harness.session_id = (await workspace.sessions.create("one")).id
        yield harness
        file.full = file.busy = False
    file.close()


class PumpClock:
    """Commits happen by themselves; everything slower waits for the test."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    def now_s(self) -> float:
        return self._clock.now_s()

    def monotonic_s(self) -> float:
        return self._clock.monotonic_s()

    def call_later(self, delay_s: float, action: Callable[[], None]) -> Timer:
        if delay_s < 0.001:
            return asyncio.get_running_loop().call_soon(action)
        return self._clock.call_later(delay_s, action)


@contract("INV-61")
async def test_finish_refused_during_an_earlier_write_is_retried(
    harness: MessagesHarness,
) -> None:
    draft = await harness.open()
    put = harness.messages.put(draft, 0, ToolCallPart(ToolCall("c", "bash")))
    harness.file.busy = True
    refused = harness.messages.finish(draft, Finish("end_turn", 1))
    assert isinstance(refused.exception(), StoreBusy)
    harness.file.busy = False
    await put
    harness.clock.advance(2)
    await harness.messages.flush()
    (message,) = await harness.stored()
    assert isinstance(message.parts[-1], FinishPart)
    assert harness.messages.open_ids() == []


@contract("INV-64")
async def test_message_whose_deletion_failed_loses_nothing(harness: MessagesHarness) -> None:
    draft = await harness.open()
    harness.messages.append(draft, 0, "text", "before ")
    harness.file.full = True
    deletion = harness.messages.delete(draft.message.id)
    harness.messages.append(draft, 0, "text", "meanwhile ")
    with contextlib.suppress(StoreBusy):
        await deletion
    harness.file.full = False
    harness.messages.append(draft, 0, "text", "after")
    await harness.messages.finish(draft, Finish("end_turn", 1))
    (message,) = await harness.stored()
    assert message.parts[0] == TextPart(Text("before meanwhile after"))


async def test_nothing_retries_after_stop_on_a_full_disk(harness: MessagesHarness) -> None:
    draft = await harness.open()
    harness.messages.append(draft, 0, "text", "x" * 5000)
    harness.file.full = True
    with pytest.raises(StoreBusy):
        await harness.messages.stop()
    armed = harness.clock.armed()
    harness.messages.append(draft, 0, "text", "more")
    harness.clock.advance(10)
    assert harness.clock.armed() <= armed
    assert harness.messages.open_ids() == []


async def test_full_disk_is_retried_once_a_second(harness: MessagesHarness) -> None:
    draft = await harness.open()
    harness.file.full = True
    for _ in range(100):
        harness.messages.append(draft, 0, "text", "x" * 5000)
        harness.clock.advance(0.03)
        await asyncio.sleep(0)
    tries = draft.last_sent
    assert tries <= 6, "three seconds, one chunk, a try a second"
    harness.file.full = False
    harness.clock.advance(2)
    await harness.messages.flush()
    (message,) = await harness.stored()
    assert message.parts == [TextPart(Text("x" * 500_000))]


@contract("EXC-26")
async def test_text_that_cannot_be_recorded_is_sent_later(harness: MessagesHarness) -> None:
    draft = await harness.open()
    harness.messages.append(draft, 0, "text", "seen ")
    harness.workspace.hub.flush()
    for file in harness.file.tail_files:
        file.full = True
    harness.messages.append(draft, 0, "text", "not yet seen ")
    assert await text_shown(harness) == "seen "
    harness.workspace.hub.flush()
    harness.messages.append(draft, 0, "text", "nor this")
    assert await text_shown(harness) == "seen "
    assert harness.workspace.store.health.state == "failing"
    for file in harness.file.tail_files:
        file.full = False
    harness.clock.advance(2)
    await harness.messages.flush()
    assert await text_shown(harness) == "seen not yet seen nor this"
    assert harness.workspace.store.health.state == "ok"


@contract("EXC-26")
async def test_output_that_cannot_be_recorded_is_sent_with_the_next_piece(
    harness: MessagesHarness,
) -> None:
    draft = await harness.open()
    sent = [harness.messages.record_output(draft, "c", "seen ")]
    for file in harness.file.tail_files:
        file.full = True
    assert harness.messages.record_output(draft, "c", "not yet ") is None
    assert harness.messages.record_output(draft, "c", "seen ") is None
    assert harness.workspace.store.health.state == "failing"
    for file in harness.file.tail_files:
        file.full = False
    sent.append(harness.messages.record_output(draft, "c", "now"))
    pieces = [(one.offset, one.text) for one in sent if one is not None]
    assert pieces == [(0, "seen "), (5, "not yet seen now")]
    assert outputs_on_disk(harness) == {"c": "seen not yet seen now"}


@contract("EXC-26")
async def test_output_of_a_long_call_is_kept_while_the_tail_is_emptied(
    harness: MessagesHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_tail, "FILE_BYTES", 4000)
    call = await harness.open()
    other = await harness.open()
    armed = harness.clock.armed()
    harness.messages.record_output(call, "c", "begins, ")
    written = 0
    for _ in range(200):
        harness.messages.append(other, 0, "text", "x" * 500)
        harness.workspace.hub.flush()
        written += 500
        await tick(harness)
        assert sum(len(file.data) for file in harness.file.tail_files) < 12_000, written
        assert outputs_on_disk(harness) == {"c": "begins, "}
    harness.messages.record_output(call, "c", "goes on")
    assert outputs_on_disk(harness) == {"c": "begins, goes on"}
    await harness.messages.flush()
    for _ in range(5):
        await tick(harness)
    harness.clock.advance(messages.CHUNK_S)
    assert harness.clock.armed() <= armed, "a silent call costs nothing"
    harness.messages.forget_output(call, "c")
    for _ in range(5):
        await tick(harness)
    assert not any(file.data for file in harness.file.tail_files)


@contract("EXC-27")
async def test_deleted_text_leaves_the_tail_during_a_long_call(harness: MessagesHarness) -> None:
    call = await harness.open()
    gone = await harness.open()
    harness.messages.record_output(call, "c", "still running")
    harness.messages.append(gone, 0, "text", "secret")
    harness.workspace.hub.flush()
    await harness.messages.finish(gone, Finish("end_turn", 1))
    for _ in range(5):
        await tick(harness)
    assert any(b"secret" in file.data for file in harness.file.tail_files)
    armed = harness.clock.armed()
    await harness.messages.delete(gone.message.id)
    for _ in range(5):
        await tick(harness)
    assert not any(b"secret" in file.data for file in harness.file.tail_files)
    assert outputs_on_disk(harness) == {"c": "still running"}
    assert harness.clock.armed() <= armed, "a silent call costs nothing"


@contract("EXC-27")
async def test_deleted_session_leaves_the_tail_while_another_answer_grows(
    harness: MessagesHarness,
) -> None:
    kept = await harness.open()
    doomed = (await harness.workspace.sessions.create("doomed")).id
    gone = await harness.open(doomed)
    harness.messages.append(gone, 0, "text", "secret")
    harness.messages.append(kept, 0, "text", "kept")
    harness.workspace.hub.flush()
    await harness.messages.finish(gone, Finish("end_turn", 1))
    await harness.workspace.sessions.delete(doomed)
    for n in range(8):
        harness.messages.append(kept, 0, "text", str(n))
        harness.workspace.hub.flush()
        await tick(harness)
        await harness.messages.flush()
    assert not any(b"secret" in file.data for file in harness.file.tail_files)
    assert await text_shown(harness) == "kept01234567"


async def test_many_long_outputs_do_not_fill_the_file_that_they_are_carried_to(
    harness: MessagesHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_tail, "FILE_BYTES", 20_000)
    monkeypatch.setattr(messages, "CARRIED_CHARS_MAX", 2_500)
    draft = await harness.open()
    for n in range(50):
        harness.messages.record_output(draft, f"c{n}", "…" * 999 + str(n % 10))
    for _ in range(10):
        await tick(harness)
    assert harness.workspace.store.tail.number == 1
    assert sum(len(file.data) for file in harness.file.tail_files) < 20_000
    found = outputs_on_disk(harness)
    assert found == {f"c{n}": "…" * 49 + str(n % 10) for n in range(50)}


async def test_output_of_a_call_that_did_not_end_outlives_the_workspace(
    harness: MessagesHarness,
) -> None:
    draft = await harness.open()
    harness.messages.append(draft, 0, "text", "stored")
    harness.messages.record_output(draft, "c", "kept")
    await harness.messages.stop()
    assert outputs_on_disk(harness) == {"c": "kept"}


async def tick(harness: MessagesHarness) -> None:
    """Let the timer of the tail fire, and wait for its work."""
    harness.clock.advance(messages.MAINTAIN_S)
    await asyncio.sleep(0)
    while harness.workspace.store.tail.is_working:
        await asyncio.sleep(0.001)


def outputs_on_disk(harness: MessagesHarness) -> dict[str, str]:
    epoch = harness.workspace.store.epoch
    records = [r for file in harness.file.tail_files for r in decode_records(file.read(), epoch)]
    return {call_id: shown.text for (_, call_id), shown in shown_outputs(records).items()}


async def text_shown(harness: MessagesHarness) -> str:
    (message,) = await harness.stored()
    return full_text(message.parts)
