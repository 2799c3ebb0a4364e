"""Asking in a few lines: what a program hears of a run, and what it stops when it leaves."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from culm.client.asked_run import ask, open_asked
from culm.client.background_task import open_background_task
from culm.client.follower import open_mirror
from culm.client.http import RequestRefused, open_client
from culm.client.workspace import RemoteWorkspace
from culm.ids import SessionId
from culm.testing.script import Reply, ScriptedCall
from culm.wire.workspaces import CreateWorkspace
from tests.flow.probes import script
from tests.flow.runs import open_runs
from tests.support import WAIT_S, contract

LOOK = Reply(text="Let me look.", calls=[ScriptedCall(name="no_tool", input={})])
HELD = Reply(deltas=["It ", "has ", "begun ", "and ", "ended."], hold_after=3)
GONE = SessionId("gone")


async def test_the_pieces_are_the_answers_of_the_run_each_on_a_line_of_its_own(
    tmp_path: Path,
) -> None:
    async with (
        open_runs(tmp_path, play=script(LOOK, Reply(text="Nothing to see."))) as stage,
        asyncio.timeout(WAIT_S),
        open_asked(stage.remote, "look around") as asked,
    ):
        pieces = [piece async for piece in asked.pieces()]
        answer = await asked.answer()
    assert "".join(pieces) == "Let me look.\nNothing to see."
    assert (answer.text, answer.is_complete) == ("Nothing to see.", True)
    assert (answer.run.id, answer.run.session_id) == (asked.id, asked.session_id)


async def test_pieces_that_are_read_late_are_all_there(tmp_path: Path) -> None:
    async with (
        open_runs(tmp_path, play=script(Reply(tokens=200))) as stage,
        asyncio.timeout(WAIT_S),
        open_asked(stage.remote, "count") as asked,
    ):
        answer = await asked.answer()
        assert "".join([piece async for piece in asked.pieces()]) == answer.text
        assert answer.text.endswith("tok199 ") or answer.text.endswith("tok199")


@contract("CLIENT-4")
async def test_who_leaves_the_block_stops_listening_and_not_the_run(tmp_path: Path) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as stage, asyncio.timeout(WAIT_S):
        async with open_asked(stage.remote, "begin", session_id=stage.session_id) as asked:
            async for piece in asked.pieces():
                assert piece.startswith("It")
                break
        assert (await stage.run(asked.id)).state == "active"
        stage.model.release()
        await stage.heard.complete(asked.id)
        assert (await stage.run(asked.id)).outcome == "end_turn"


async def test_a_run_that_is_cancelled_is_answered_with_what_it_has_said(tmp_path: Path) -> None:
    async with (
        open_runs(tmp_path, play=script(HELD)) as stage,
        asyncio.timeout(WAIT_S),
        open_asked(stage.remote, "begin") as asked,
    ):
        await stage.heard.text("begun ")
        assert (await asked.cancel()).result == "canceled"
        answer = await asked.answer()
        assert (answer.text, answer.run.outcome) == ("It has begun ", "canceled")
        assert not answer.is_complete


# --- what goes wrong is told as it is, and not as a group of errors


async def test_a_prompt_that_is_refused_is_raised_as_refused(tmp_path: Path) -> None:
    async with open_runs(tmp_path) as stage, asyncio.timeout(WAIT_S):
        with pytest.raises(RequestRefused, match="session not found") as refused:
            await ask(stage.remote, "hello", session_id=GONE)
        assert refused.value.status == 404


async def test_what_a_program_raises_in_a_block_leaves_it_as_it_is(tmp_path: Path) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as stage, asyncio.timeout(WAIT_S):
        oops = ValueError("oops")
        with pytest.raises(ValueError, match="oops") as raised:
            async with open_asked(stage.remote, "begin"):
                raise oops
        assert (raised.value, oops.__context__) == (oops, None)


async def test_a_client_that_is_refused_is_told_so_where_it_follows(tmp_path: Path) -> None:
    async with (
        open_runs(tmp_path, "tcp") as stage,
        open_client(stage.flow.url, token="another") as stranger,
        asyncio.timeout(WAIT_S),
    ):
        place = RemoteWorkspace(stranger, CreateWorkspace(), stage.remote.info)
        with pytest.raises(RequestRefused) as refused:
            async with open_mirror(place) as follower:
                await follower.until(lambda _: False)
        assert refused.value.status == 401


async def test_what_fails_beside_a_block_ends_it_and_the_block_has_the_first_word() -> None:
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
def test_connect_is_the_function_whatever_was_imported_before(first: str) -> None:
    program = (
        f"{first}\nimport culm\nfrom culm.client import *\nfrom culm.client import connect as one\n"
        "print(connect is one is culm.connect, connect.__name__, connect_blocking.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout == "True connect connect_blocking\n"
