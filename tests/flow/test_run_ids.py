"""A run id that a caller chose: the same prompt twice is one run."""

import asyncio
from pathlib import Path

import pytest

from culm.client.stream import ServerEvent
from culm.testing.script import Reply
from tests.flow.probes import script
from tests.flow.runs import Stage, open_runs
from tests.support import contract

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)


def is_started(told: ServerEvent) -> bool:
    return told.type == "run_changed" and told.op == "created"


async def started(stage: Stage) -> int:
    await stage.catch_up()
    return sum(is_started(told) for told in stage.heard.told)


@contract("INV-36")
async def test_a_run_id_given_again_with_the_same_content_starts_nothing_live_or_ended(
    tmp_path: Path, kind: str
) -> None:
    async with open_runs(tmp_path, kind, script(HELD)) as stage:
        await stage.prompt("Hi.", run_id="mine")
        await stage.heard.text("Hello")
        assert await stage.prompt("Hi.", run_id="mine") == "mine"
        assert await stage.queue() == []
        stage.model.release()
        await stage.heard.complete("mine")
        assert await stage.prompt("Hi.", run_id="mine") == "mine"
        assert await started(stage) == 1
        await stage.until_idle()
        assert (stage.heard.completed(), len(stage.seen())) == (["mine"], 1)
        assert len(await stage.messages()) == 2


@contract("INV-36")
async def test_a_run_id_given_by_many_at_once_starts_one_run(tmp_path: Path) -> None:
    async with open_runs(tmp_path) as stage:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(8):
                tasks.create_task(stage.prompt("Hi.", run_id="mine"))
        await stage.heard.complete("mine")
        assert await started(stage) == 1
        assert (stage.heard.completed(), len(stage.seen())) == (["mine"], 1)


@contract("INV-36")
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("what", ["prompt", "session", "attachments", "limits"])
async def test_a_run_id_given_again_with_other_content_is_409_and_starts_nothing(
    tmp_path: Path, what: str, *, ended: bool
) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as stage:
        other = await stage.remote.create_session("other")
        await stage.prompt("Hi.", run_id="mine")
        await stage.heard.text("Hello")
        if ended:
            stage.model.release()
            await stage.heard.complete("mine")
        note = {"file_name": "n.txt", "mime_type": "text/plain", "content": "aGVsbG8="}
        body: dict[str, object] = {
            "session_id": other.id if what == "session" else stage.session_id,
            "prompt": "Ho." if what == "prompt" else "Hi.",
            "attachments": [note] if what == "attachments" else [],
            "limits": {"steps": 5} if what == "limits" else {},
            "run_id": "mine",
        }
        answer = await stage.request("POST", "/agent", body)
        assert (answer.status, b"run_id_reused" in answer.body) == (409, True)
        assert await started(stage) == 1
        assert len(stage.seen()) == 1
