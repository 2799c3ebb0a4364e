"""Run ids chosen by the caller: the same prompt twice is one run."""

import asyncio
from pathlib import Path

import pytest

from culm.client.stream import ServerEvent
from culm.testing.script import Reply
from tests.flow.probes import script
from tests.flow.runs import Harness, open_runs
from tests.support import contract

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)


def is_started(event: ServerEvent) -> bool:
    return event.type == "run_changed" and event.op == "created"


async def started(harness: Harness) -> int:
    await harness.catch_up()
    return sum(is_started(event) for event in harness.received.events)


@contract("INV-36")
async def test_same_run_id_and_content_starts_no_second_run(tmp_path: Path, kind: str) -> None:
    async with open_runs(tmp_path, kind, script(HELD)) as harness:
        await harness.prompt("Hi.", run_id="mine")
        await harness.received.text("Hello")
        assert await harness.prompt("Hi.", run_id="mine") == "mine"
        assert await harness.queue() == []
        harness.model.release()
        await harness.received.complete("mine")
        assert await harness.prompt("Hi.", run_id="mine") == "mine"
        assert await started(harness) == 1
        await harness.until_idle()
        assert (harness.received.completed(), len(harness.seen())) == (["mine"], 1)
        assert len(await harness.messages()) == 2


@contract("INV-36")
async def test_simultaneous_prompts_with_one_run_id_start_one_run(tmp_path: Path) -> None:
    async with open_runs(tmp_path) as harness:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(8):
                tasks.create_task(harness.prompt("Hi.", run_id="mine"))
        await harness.received.complete("mine")
        assert await started(harness) == 1
        assert (harness.received.completed(), len(harness.seen())) == (["mine"], 1)


@contract("INV-36")
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("what", ["prompt", "session", "attachments", "limits"])
async def test_same_run_id_with_other_content_is_409_and_starts_nothing(
    tmp_path: Path, what: str, *, ended: bool
) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as harness:
        other = await harness.remote.create_session("other")
        await harness.prompt("Hi.", run_id="mine")
        await harness.received.text("Hello")
        if ended:
            harness.model.release()
            await harness.received.complete("mine")
        note = {"file_name": "n.txt", "mime_type": "text/plain", "content": "aGVsbG8="}
        body: dict[str, object] = {
            "session_id": other.id if what == "session" else harness.session_id,
            "prompt": "Ho." if what == "prompt" else "Hi.",
            "attachments": [note] if what == "attachments" else [],
            "limits": {"steps": 5} if what == "limits" else {},
            "run_id": "mine",
        }
        answer = await harness.request("POST", "/agent", body)
        assert (answer.status, b"run_id_reused" in answer.body) == (409, True)
        assert await started(harness) == 1
        assert len(harness.seen()) == 1
