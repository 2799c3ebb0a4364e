"""What the README tells a newcomer to do works as it stands there."""

import asyncio
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.live.harness import open_process_server

README = (Path(__file__).parents[2] / "README.md").read_text()
API = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
ADDRESS = "127.0.0.1:7777"
TIMEOUT_S = 20.0


async def test_the_python_session_of_the_readme_shows_the_session_it_made(folder: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert ADDRESS in program
    host = ("--host", "tcp://127.0.0.1:0", "--no-auth")
    async with open_process_server(folder, *host) as server:
        address = server.urls[0].removeprefix("tcp://")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program.replace(ADDRESS, address)),
            cwd=folder,
            stdout=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(TIMEOUT_S):
            output, _ = await process.communicate()
        assert process.returncode == 0
        assert "title='from Python'" in output.decode()


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page uses curl")
async def test_the_examples_of_the_interface_page_run_as_they_stand(folder: Path) -> None:
    script = "\n".join(re.findall(r"```sh\n(.*?)```", API, re.DOTALL))
    assert script.count("culm ") > 8
    async with open_process_server(folder) as server:
        process = await asyncio.create_subprocess_exec(
            *("bash", "-euo", "pipefail", "-c", script),
            cwd=folder,
            env={**os.environ, "CULM_SOCKET": server.urls[0].removeprefix("unix://")},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(TIMEOUT_S):
            output = (await process.communicate())[0].decode()
        assert process.returncode == 0, output
        assert output.count("Seen by every stream") == 1
        assert re.search(r'id: \w+\.\d+\ndata: .*"title":"Changed while nobody listened"', output)
        assert "Expected `str`, got `int` - at `$.title`" in output


def test_the_commands_of_the_readme_exist() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    for target in set(re.findall(r"(?:`|\$ )make (\w+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
