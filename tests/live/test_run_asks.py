"""What `culm run` does with permissions: at a terminal, without one, and beside other clients."""

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
from tests.live.found import RUN
from tests.live.harness import RESUME_S, Ended, environment, make_directory
from tests.live.run_drive import open_agent, script
from tests.live.test_run_command import ENV, places, run

CULM = RUN[:2]
DONE = Reply(text="Done.")
PROMPT = "allow it? [y] once, [s] for this session, [w] for this workspace, [n]o: "


def calling(command: str) -> Reply:
    return Reply(calls=[ScriptedCall(name="bash", input={"command": command})])


def touching(name: str) -> Reply:
    return calling(f"touch {name}")


class Seat:
    """A terminal with `culm run` on it; stdout is a pipe."""

    def __init__(self, process: Process, terminal: int) -> None:
        self.process = process
        self.shown = ""
        self._terminal = terminal
        self._changed = asyncio.Event()

    def read(self) -> None:
        try:
            self.shown += os.read(self._terminal, 65536).decode().replace("\r\n", "\n")
        except OSError:  # The last one at the other end has gone.
            asyncio.get_running_loop().remove_reader(self._terminal)
        self._changed.set()

    async def until(self, words: str, count: int = 1) -> None:
        try:
            async with asyncio.timeout(RESUME_S):
                while self.shown.count(words) < count:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"{words!r} was not shown\n{self.shown}") from None

    def type(self, line: str) -> None:
        os.write(self._terminal, f"{line}\n".encode())

    async def ended(self) -> Ended:
        async with asyncio.timeout(RESUME_S):
            stdout, _ = await self.process.communicate()
        assert self.process.returncode is not None
        return Ended(self.process.returncode, stdout.decode(), self.shown)


@asynccontextmanager
async def open_seat(folder: Path, *args: str) -> AsyncGenerator[Seat]:
    master, slave = os.openpty()
    os.set_blocking(master, False)
    loop = asyncio.get_running_loop()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *RUN, *places(folder), *args),
            stdin=slave,
            stdout=PIPE,
            stderr=slave,
            env={**environment(folder, ENV), "TERM": "dumb"},  # Only what stays is looked at here.
        )
    finally:
        os.close(slave)
    seat = Seat(process, master)
    loop.add_reader(master, seat.read)
    try:
        yield seat
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        loop.remove_reader(master)
        os.close(master)


@asynccontextmanager
async def open_work(folder: Path, *replies: Reply) -> AsyncGenerator[RemoteWorkspace]:
    """A server with a scripted model, and another client of the same directory."""
    async with (
        open_model_server(script(*replies)) as model,
        open_agent(folder, model) as (_, client),
    ):
        yield await client.open_workspace(make_directory(folder))


def made(folder: Path) -> set[str]:
    return {path.name for path in make_directory(folder).iterdir()} & {"one", "two", "three"}


async def test_a_person_at_the_terminal_decides_for_once_for_the_session_or_against(
    folder: Path,
) -> None:
    async with open_work(folder, touching("one"), touching("two"), calling("mkdir three")):
        async with open_seat(folder, "go") as seat:
            await seat.until(PROMPT)
            assert "→ bash touch one\n? bash: Execute command: touch one\n" in seat.shown
            assert "  | touch one\n  in " in seat.shown
            assert made(folder) == set()
            seat.type("perhaps")
            await seat.until(PROMPT, 2)
            seat.type("s")
            await seat.until(PROMPT, 3)  # For the third: the second is covered.
            seat.type("n")
            ended = await seat.ended()
        assert (ended.status, ended.stdout, made(folder)) == (3, "", {"one", "two"})
        for words in (
            "allowed: bash: by you\n",
            "allowed: bash: by an earlier answer, or a hook\n",
            "denied: bash: by you\n",
            "culm: the run ended because a call was denied\n",
        ):
            assert ended.stderr.count(words) == 1, ended.stderr


async def test_another_clients_answer_closes_the_prompt_and_ctrl_c_cancels_the_run(
    folder: Path,
) -> None:
    async with open_work(folder, touching("one"), touching("two")) as remote:
        async with open_seat(folder, "go") as seat:
            await seat.until(PROMPT)
            (ask,) = await remote.asks()
            assert await remote.answer(ask, "allow")
            await seat.until(PROMPT, 2)
            assert "[n]o: \nallowed: bash: by another client\n" in seat.shown
            seat.process.send_signal(signal.SIGINT)
            ended = await seat.ended()
        assert (ended.status, made(folder)) == (4, {"one"})
        assert "culm: cancelled" in ended.stderr
        assert await remote.asks() == []


async def test_without_a_terminal_rules_allow_and_the_rest_is_refused_with_a_hint(
    folder: Path,
) -> None:
    async with open_work(folder, touching("one"), touching("two"), DONE):
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
