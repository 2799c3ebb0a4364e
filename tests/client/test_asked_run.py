"""`ask` and `open_asked`: the text of a run, its answer, and leaving before its end."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from culm.client.follower import open_background_task, open_mirror
from culm.client.http import RequestRefused, open_client
from culm.client.run import ask, open_asked
from culm.client.workspace import RemoteWorkspace
from culm.ids import SessionId
from culm.testing.script import Reply, ScriptedCall
from culm.wire.workspaces import CreateWorkspace
from tests.flow.probes import script
from tests.flow.runs import open_runs
from tests.support import WAIT_S, contract

LOOK = Reply(text="Let me look.", calls=[ScriptedCall(name="no_tool", input={})])
HELD = Reply(deltas=["It ", "has ", "begun ", "and ", "ended."], hold_after=3)
UNKNOWN_SESSION = SessionId("gone")


async def test_pieces_are_the_answers_of_the_run_on_separate_lines(
    tmp_path: Path,
) -> None:
    async with (
        open_runs(tmp_path, play=script(LOOK, Reply(text="Nothing to see."))) as harness,
        asyncio.timeout(WAIT_S),
        open_asked(harness.remote, "look around") as asked,
    ):
        pieces = [piece async for piece in asked.pieces()]
        answer = await asked.answer()
    assert "".join(pieces) == "Let me look.\nNothing to see."
    assert (answer.text, answer.is_complete) == ("Nothing to see.", True)
    assert (answer.run.id, answer.run.session_id) == (asked.id, asked.session_id)


async def test_pieces_read_late_are_complete(tmp_path: Path) -> None:
    async with (
        open_runs(tmp_path, play=script(Reply(tokens=200))) as harness,
        asyncio.timeout(WAIT_S),
        open_asked(harness.remote, "count") as asked,
    ):
        answer = await asked.answer()
        assert "".join([piece async for piece in asked.pieces()]) == answer.text
        assert answer.text.endswith("tok199 ") or answer.text.endswith("tok199")


@contract("CLIENT-4")
async def test_leaving_the_block_does_not_stop_the_run(tmp_path: Path) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as harness, asyncio.timeout(WAIT_S):
        async with open_asked(harness.remote, "begin", session_id=harness.session_id) as asked:
            async for piece in asked.pieces():
                assert piece.startswith("It")
                break
        assert (await harness.run(asked.id)).state == "active"
        harness.model.release()
        await harness.received.complete(asked.id)
        assert (await harness.run(asked.id)).outcome == "end_turn"


async def test_canceled_run_returns_its_partial_text(tmp_path: Path) -> None:
    async with (
        open_runs(tmp_path, play=script(HELD)) as harness,
        asyncio.timeout(WAIT_S),
        open_asked(harness.remote, "begin") as asked,
    ):
        await harness.received.text("begun ")
        assert (await asked.cancel()).result == "canceled"
        answer = await asked.answer()
        assert (answer.text, answer.run.outcome) == ("It has begun ", "canceled")
        assert not answer.is_complete


# --- errors are raised as they are, not as an exception group


async def test_refused_prompt_raises_request_refused(tmp_path: Path) -> None:
    async with open_runs(tmp_path) as harness, asyncio.timeout(WAIT_S):
        with pytest.raises(RequestRefused, match="session not found") as refused:
            await ask(harness.remote, "hello", session_id=UNKNOWN_SESSION)
        assert refused.value.status == 404


async def test_exception_in_the_block_is_raised_unchanged(tmp_path: Path) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as harness, asyncio.timeout(WAIT_S):
        oops = ValueError("oops")
        with pytest.raises(ValueError, match="oops") as raised:
            async with open_asked(harness.remote, "begin"):
                raise oops
        assert (raised.value, oops.__context__) == (oops, None)


async def test_refused_client_raises_while_following(tmp_path: Path) -> None:
    async with (
        open_runs(tmp_path, "tcp") as harness,
        open_client(harness.flow.url, token="another") as stranger,
        asyncio.timeout(WAIT_S),
    ):
        workspace = RemoteWorkspace(stranger, CreateWorkspace(), harness.remote.info)
        with pytest.raises(RequestRefused) as refused:
            async with open_mirror(workspace) as follower:
                await follower.until(lambda _: False)
        assert refused.value.status == 401


async def test_failed_background_task_ends_the_block_unless_the_block_failed() -> None:
    async def fail() -> None:
        raise OSError("beside")

    begun = asyncio.Event()

    async def fail_when_left() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            raise OSError("left")

    async def fail_before() -> None:
        async with open_background_task(fail_when_left(), "fail"):
            await begun.wait()
            raise ValueError("block")

    with pytest.raises(OSError, match="beside"):
        async with open_background_task(fail(), "fail"):
            await asyncio.Event().wait()
    with pytest.raises(ValueError, match="block"):
        await fail_before()


# --- names


@pytest.mark.parametrize(
    "first", ["import culm.client.connection", "from culm import connect_blocking", "pass"]
)
def test_connect_is_the_function_for_any_import_order(first: str) -> None:
    program = (
        f"{first}\nimport culm\nfrom culm.client import *\nfrom culm.client import connect as one\n"
        "print(connect is one is culm.connect, connect.__name__, connect_blocking.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout == "True connect connect_blocking\n"
