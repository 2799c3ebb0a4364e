"""Permissions in `culm run`: at a terminal, without one, and with other clients."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from culm.client.workspace import RemoteWorkspace
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, ScriptedCall
from tests.live.harness import RESUME_S, Ended, environment, make_directory
from tests.live.machine import RUN
from tests.live.run_harness import open_agent, script
from tests.live.test_run_command import ENV, places, run

CULM = RUN[:2]
DONE = Reply(text="Done.")
PROMPT = "allow it? [y] once, [s] for this session, [w] for this workspace, [n]o: "


def calling(command: str) -> Reply:
    return Reply(calls=[ScriptedCall(name="bash", input={"command": command})])


def touching(name: str) -> Reply:
    return calling(f"touch {name}")


class Terminal:
    """A terminal in which `culm run` runs; its stdout is a pipe."""

    def __init__(self, process: Process, fd: int) -> None:
        self.process = process
        self._fd = fd
        self._received = bytearray()
        self._changed = asyncio.Event()

    @property
    def shown(self) -> str:
        # Decoded as a whole: a read may end between the two bytes of a line end.
        return self._received.decode(errors="replace").replace("\r\n", "\n")

    def read(self) -> None:
        try:
            self._received += os.read(self._fd, 65536)
        except OSError:  # The other end is closed.
            asyncio.get_running_loop().remove_reader(self._fd)
        self._changed.set()

    async def until(self, text: str, count: int = 1) -> None:
        try:
            async with asyncio.timeout(RESUME_S):
                while self.shown.count(text) < count:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"{text!r} was not shown\n{self.shown}") from None

    def type(self, line: str) -> None:
        os.write(self._fd, f"{line}\n".encode())

    async def ended(self) -> Ended:
        async with asyncio.timeout(RESUME_S):
            stdout, _ = await self.process.communicate()
        assert self.process.returncode is not None
        return Ended(self.process.returncode, stdout.decode(), self.shown)


@asynccontextmanager
async def open_terminal(folder: Path, *args: str) -> AsyncGenerator[Terminal]:
    master, slave = os.openpty()
    os.set_blocking(master, False)
    loop = asyncio.get_running_loop()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *RUN, *places(folder), *args),
            stdin=slave,
            stdout=PIPE,
            stderr=slave,
            env={**environment(folder, ENV), "TERM": "dumb"},  # No status area.
        )
    finally:
        os.close(slave)
    terminal = Terminal(process, master)
    loop.add_reader(master, terminal.read)
    try:
        yield terminal
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        loop.remove_reader(master)
        os.close(master)


@asynccontextmanager
async def open_scripted(folder: Path, *replies: Reply) -> AsyncGenerator[RemoteWorkspace]:
    """A server with a scripted model; yields the workspace of another client."""
    async with (
        open_model_server(script(*replies)) as model,
        open_agent(folder, model) as (_, client),
    ):
        yield await client.open_workspace(make_directory(folder))


def made(folder: Path) -> set[str]:
    return {path.name for path in make_directory(folder).iterdir()} & {"one", "two", "three"}


async def test_terminal_prompt_allows_for_the_session_and_denies(
    folder: Path,
) -> None:
    async with open_scripted(folder, touching("one"), touching("two"), calling("mkdir three")):
        async with open_terminal(folder, "go") as terminal:
            await terminal.until(PROMPT)
            assert "→ bash touch one\n? bash: Execute command: touch one\n" in terminal.shown
            assert "  | touch one\n  in " in terminal.shown
            assert made(folder) == set()
            terminal.type("perhaps")
            await terminal.until(PROMPT, 2)
            terminal.type("s")
            await terminal.until(PROMPT, 3)  # For the third call: the second is covered.
            terminal.type("n")
            ended = await terminal.ended()
        assert (ended.status, ended.stdout, made(folder)) == (3, "", {"one", "two"})
        for text in (
            "allowed: bash: by you\n",
            "allowed: bash: by an earlier answer, or a hook\n",
            "denied: bash: by you\n",
            "culm: the run ended because a call was denied\n",
        ):
            assert ended.stderr.count(text) == 1, ended.stderr


async def test_answer_of_another_client_closes_the_prompt_and_ctrl_c_cancels(
    folder: Path,
) -> None:
    async with open_scripted(folder, touching("one"), touching("two")) as remote:
        async with open_terminal(folder, "go") as terminal:
            await terminal.until(PROMPT)
            (ask,) = await remote.asks()
            assert await remote.answer(ask, "allow")
            await terminal.until(PROMPT, 2)
            assert "[n]o: \nallowed: bash: by another client\n" in terminal.shown
            terminal.process.send_signal(signal.SIGINT)
            ended = await terminal.ended()
        assert (ended.status, made(folder)) == (4, {"one"})
        assert "culm: canceled" in ended.stderr
        assert await remote.asks() == []


async def test_without_a_terminal_unmatched_calls_are_refused_with_a_hint(
    folder: Path,
) -> None:
    async with open_scripted(folder, touching("one"), touching("two"), DONE):
        ended = await run(folder, "--approve", "bash:touch one", "go")
    assert (ended.status, ended.stdout, made(folder)) == (0, "Done.", {"one"})
    lines = ended.stderr.splitlines()
    assert lines[:4] == [
        "→ bash touch one",
        "allowed: bash: by --approve",
        "← bash: (no output)",
        "→ bash touch two",
    ]
    assert lines[4].startswith("✗ bash: Not allowed: this needs a person's permission")
    assert lines[5:] == ["hint: --approve auto, or --approve 'bash:touch two'"]
