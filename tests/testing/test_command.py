"""The scripted provider as a separate program."""

import asyncio
import os
import re
import shutil
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import cast

import aiohttp
import pytest

from tests.testing.provider_client import OPENAI, PROMPT, events_in, text_of

pytestmark = pytest.mark.live
START_S = 20.0  # A cold interpreter on a busy machine.
PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()


@asynccontextmanager
async def open_program(*arguments: str) -> AsyncGenerator[Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "culm.testing.model_server", *arguments),
        stdout=PIPE,
        stderr=PIPE,
    )
    try:
        async with asyncio.timeout(START_S):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def url_of(process: Process) -> str:
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    found = re.fullmatch(r"listening (http://127\.0\.0\.1:\d+/v1)\n", line)
    assert found, line
    return found[1]


async def ask(session: aiohttp.ClientSession, url: str) -> str:
    body = {"model": "m", "stream": True, "messages": PROMPT}
    async with session.post(url + OPENAI, json=body) as response:
        return text_of(events_in(await response.read()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_program_serves_its_script_until_a_signal(
    tmp_path: Path, number: signal.Signals
) -> None:
    file = tmp_path / "script.json"
    file.write_text('{"replies": [{"text": "Four."}, {"text": "never", "stall_after": 0}]}')
    async with open_program("--script", str(file)) as process, aiohttp.ClientSession() as session:
        url = await url_of(process)
        assert await ask(session, url) == "Four."
        async with session.get(url.removesuffix("v1") + "culm/requests") as response:
            (seen,) = await response.json()
            assert (seen["n"], seen["body"]["messages"], seen["left"]) == (1, PROMPT, False)
        body = {"stream": True, "messages": PROMPT}
        async with session.post(url + OPENAI, json=body):  # An open answer does not delay the exit.
            os.kill(process.pid, number)
            assert await process.communicate() == (b"", b"")
    assert process.returncode == 0


async def test_without_a_script_the_program_answers_with_a_greeting() -> None:
    async with open_program() as process, aiohttp.ClientSession() as session:
        url = await url_of(process)
        first, second = await ask(session, url), await ask(session, url)
    assert first == second
    assert first.startswith("Hello!")


async def test_an_unusable_script_ends_the_program_with_a_reason(tmp_path: Path) -> None:
    file = tmp_path / "script.json"
    file.write_text('{"replies": [{"txt": "Four."}]}')
    async with open_program("--script", str(file)) as process:
        output, errors = await process.communicate()
    assert (process.returncode, output) == (1, b"")
    assert b"unknown field `txt` - at `$.replies[0]`\nhint: see docs/testing.md" in errors


async def test_the_help_shows_an_example() -> None:
    async with open_program("--help") as process:
        output, _ = await process.communicate()
    assert process.returncode == 0
    assert b"Example:\n    echo" in output


async def test_the_python_example_in_the_documentation_works() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    exec(program, names)
    (example,) = (value for name, value in names.items() if name.startswith("test_"))
    await cast("Callable[[], Awaitable[None]]", example)()  # Runs the code of the page.


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page uses curl")
async def test_the_shell_example_in_the_documentation_works(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    script = "\n".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)).replace("8099", str(port))
    process = await asyncio.create_subprocess_exec(
        *("bash", "-euo", "pipefail", "-c", script + "wait\n"),
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        stdout=PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(START_S):
            output = (await process.communicate())[0].decode()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # Ends what the script has left running.
        await process.wait()
    assert process.returncode == 0, output
    assert f"listening http://127.0.0.1:{port}/v1\n" in output
    assert '"content":"Four."' in output
    assert '"text":"That was all."' in output
    assert output.count('"left":false') == 2
