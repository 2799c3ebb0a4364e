"""A process that answers one question is heard to its last word, though time is over."""

import asyncio
import time
from pathlib import Path

import pytest

from culm.processes.base import ProcessOwner
from culm.tools.process.child import CallDeadline, ChildRequest, ask
from tests.support import WAIT_S
from tests.tools.kits import WORKSPACE, open_context

SCRIPT = "until [ -e go ]; do sleep 0.01; done; printf word; : > said; exec sleep 1000"


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_what_was_said_before_time_was_over_is_heard(tmp_path: Path, turns: int) -> None:
    """Whatever comes first: the pipe's reader, the deadline or who waits for both."""
    heard = bytearray()

    def hear(data: bytes) -> bool:
        heard.extend(data)
        return True

    async with (
        asyncio.timeout(WAIT_S),
        open_context(tmp_path) as context,
        asyncio.TaskGroup() as group,
    ):
        owner = ProcessOwner(WORKSPACE, "call", "session-1", "run-1", "call-1")
        argv = ("/bin/sh", "-c", SCRIPT)
        question = ChildRequest(argv, str(context.inside.root), owner, "a word", hear)
        deadline = CallDeadline()
        answer = group.create_task(ask(context, question, deadline))
        while not await context.processes.processes(WORKSPACE):
            await asyncio.sleep(0)
        (context.inside.root / "go").touch()
        for _ in range(5000):  # The loop must not turn: the word waits in the pipe.
            if (context.inside.root / "said").exists():
                break
            time.sleep(0.001)  # noqa: ASYNC251
        for _ in range(turns):
            await asyncio.sleep(0)
        deadline.end()
        answered = await answer
    assert not answered.is_whole
    assert heard == b"word"
