"""The blocking client of scripts and notebooks: real programs and their Ctrl-C."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType

import pytest

from culm.client.blocking import connect_blocking, open_portal
from culm.client.http import RequestRefused
from culm.errors import Failed
from culm.ids import SessionId
from culm.wire.messages import full_text
from tests.live.harness import (
    ProcessServer,
    make_directory,
    open_client_of,
    open_process,
    open_process_server,
)
from tests.support import WAIT_S

ENV = {"CULM_NO_DISCOVERY": "1"}
GONE = SessionId("gone")


@asynccontextmanager
async def open_offline_server(folder: Path) -> AsyncGenerator[ProcessServer]:
    """A server with the offline model, and a project with one file."""
    (make_directory(folder) / "README.md").write_text("# Plums\n")
    async with open_process_server(folder, "--host", f"unix://{folder}/s", env=ENV) as server:
        yield server


async def test_blocking_client_works_in_the_thread_of_a_running_loop(folder: Path) -> None:
    """The situation of a notebook, whose loop waits for the cell."""
    async with open_offline_server(folder) as server:
        with connect_blocking(folder / "project", server.url, env={}) as culm:
            answer = culm.ask("read README.md")
            assert (answer.is_complete, "# Plums" in answer.text) == (True, True)
            pieces = list(culm.stream("list the files", session_id=answer.run.session_id))
            second = culm.messages(answer.run.session_id)[4:]
            texts = [full_text(message.parts) for message in second if message.role == "assistant"]
            assert "".join(pieces) == "\n".join(text for text in texts if text)
            (session,) = culm.sessions()
            assert [run.session_id for run in culm.runs()] == [session.id] * 2
            assert (culm.asks(), culm.agents()) == ([], [])
            with pytest.raises(RequestRefused, match="session not found"):
                culm.ask("hello", session_id=GONE)
            with pytest.raises(RequestRefused, match="session not found"):
                list(culm.stream("hello", session_id=GONE))
        with pytest.raises(Failed, match="has ended"):
            culm.sessions()


async def test_ctrl_c_ends_the_wait_and_not_the_run(folder: Path) -> None:
    program = f"""
from culm import connect_blocking
with connect_blocking("project", "unix://{folder}/s") as culm:
    try:
        culm.ask("run `sleep 60`", approve="allow")
    except KeyboardInterrupt:
        (run,) = culm.runs()
        print(run.id, run.state)
        print(culm.cancel(run.id).result, flush=True)
"""
    async with (
        open_offline_server(folder) as server,
        open_client_of(server) as client,
        open_process(folder, "-c", program, env=ENV) as script,
    ):
        workspace = await client.open_workspace(folder / "project")
        async with asyncio.timeout(2 * WAIT_S):
            while not await workspace.processes():  # Until it runs.
                await asyncio.sleep(0.02)
        ended = await script.end(signal.SIGINT)
        (run,) = await workspace.runs()
        assert (ended.status, ended.stderr) == (0, "")
        assert ended.stdout.splitlines() == [f"{run.id} active", "canceled"]


async def test_ctrl_c_does_not_wait_for_a_silent_server(folder: Path) -> None:
    program = f"""
from culm import connect_blocking
print("connecting", flush=True)
with connect_blocking("project", "unix://{folder}/s"):
    pass
"""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(folder / "s"))
        silent.listen()
        async with open_process(folder, "-c", program, env=ENV) as script:
            await script.until_line("connecting", 2 * WAIT_S)
            loop = asyncio.get_running_loop()
            silent.settimeout(0)  # Required by the loop.
            probe, _ = await loop.sock_accept(silent)  # The check for a server ...
            request, _ = await loop.sock_accept(silent)  # ... and the request for its version.
            with probe, request:
                ended = await script.end(signal.SIGINT)
        assert ended.stderr.endswith("KeyboardInterrupt")


def test_interrupted_portal_exits_its_context_once_entered() -> None:
    """A notebook continues after a Ctrl-C: no workspace may stay open in the background."""
    may_enter, left = threading.Event(), threading.Event()

    @asynccontextmanager
    async def opening() -> AsyncGenerator[None]:
        os.kill(os.getpid(), signal.SIGUSR1)
        while not may_enter.is_set():
            await asyncio.sleep(0.01)
        try:
            yield
        finally:
            left.set()

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt), open_portal(opening()):
            pass
    finally:
        signal.signal(signal.SIGUSR1, before)
    may_enter.set()
    assert left.wait(WAIT_S)
