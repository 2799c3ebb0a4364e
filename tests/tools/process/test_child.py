"""All output that a child process wrote before its deadline is received."""

import asyncio
import time
from pathlib import Path

import pytest

from culm.processes.base import ProcessOwner
from culm.tools.process.child import CallDeadline, ChildRequest, run_child
from tests.support import WAIT_S
from tests.tools.tool_contexts import WORKSPACE, open_context

SCRIPT = "until [ -e go ]; do sleep 0.01; done; printf word; : > said; exec sleep 1000"


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_output_written_before_the_deadline_is_received(tmp_path: Path, turns: int) -> None:
    """The pipe reader, the deadline and the waiter may run in any order."""
    received = bytearray()

    def receive(data: bytes) -> bool:
        received.extend(data)
        return True

    async with (
        asyncio.timeout(WAIT_S),
        open_context(tmp_path) as context,
        asyncio.TaskGroup() as group,
    ):
        owner = ProcessOwner(WORKSPACE, "call", "session-1", "run-1", "call-1")
        argv = ("/bin/sh", "-c", SCRIPT)
        request = ChildRequest(argv, str(context.paths.root), owner, "a word", receive)
        deadline = CallDeadline()
        answer = group.create_task(run_child(context, request, deadline))
        while not await context.processes.processes(WORKSPACE):
            await asyncio.sleep(0)
        (context.paths.root / "go").touch()
        for _ in range(5000):  # The loop must not run: the output waits in the pipe.
            if (context.paths.root / "said").exists():
                break
            time.sleep(0.001)  # noqa: ASYNC251
        for _ in range(turns):
            await asyncio.sleep(0)
        deadline.end()
        answered = await answer
    assert not answered.is_whole
    assert received == b"word"
