"""The examples of the README and of docs/api.md work as written."""

import os
import re
import shutil
import socket
import sys
from pathlib import Path

import pytest

from tests.live.harness import ROOT, open_process_server, run_process
from tests.live.page_commands import stdout_of, stdout_of_script

README = (Path(__file__).parents[2] / "README.md").read_text()
API = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
ADDRESS = "127.0.0.1:7777"


async def test_readme_python_example_asks_and_lists_its_session(folder: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    async with open_process_server(folder) as server:
        env = {**os.environ, "CULM_HOST": server.urls[0], "CULM_NO_DISCOVERY": "1"}
        output = await stdout_of(sys.executable, "-c", program, cwd=folder, env=env)
        assert "entries in this directory" in output
        assert output.splitlines()[-1].startswith("What is in this directory")


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page uses curl")
async def test_readme_http_example_survives_kill_9(folder: Path) -> None:
    before, after = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    script = f"set +e\n{before}\n{after}\nwait".replace(ADDRESS, address)
    env = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "CULM_NO_DISCOVERY": "1"}
    output = await stdout_of_script(script, cwd=folder, env=env)
    assert '"title":"hello"' in output  # As an event.
    assert '"run_id":"first"' in output or '"id":"first"' in output
    assert "entries in this directory" in output.rpartition('"outcome"')[2]  # After the restart.


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page uses curl")
async def test_api_page_examples_run(folder: Path) -> None:
    script = "\n".join(re.findall(r"```sh\n(.*?)```", API, re.DOTALL))
    assert script.count("culm ") > 8
    async with open_process_server(folder) as server:
        env = {**os.environ, "CULM_SOCKET": server.urls[0].removeprefix("unix://")}
        output = await stdout_of_script(f"exec 2>&1\n{script}", cwd=folder, env=env)
        assert output.count("Seen by every stream") == 1
        assert re.search(r'id: \w+\.\d+\ndata: .*"title":"Changed while nobody listened"', output)
        assert "Expected `str`, got `int` - at `$.title`" in output


async def test_first_run_example_prints_two_agents_and_the_readme_excerpt(
    folder: Path,
) -> None:
    ended = await run_process(folder, str(ROOT / "examples" / "first_run.py"))
    assert ended.status == 0
    assert ended.stdout.count("culm's offline model") == 1
    printed = ended.stderr.splitlines()
    assert printed[0].startswith("→ agent 2: read README.md and run `rm README.md`; replace ")
    assert printed[-1].startswith("tree: 3 agents, ")
    # The lines of each agent in their order; the agents run in parallel.
    happened = {
        name: [
            line.removeprefix(f"[{name}] ").split(":")[0]
            for line in printed
            if line.startswith(f"[{name}] ") and line[len(name) + 3] not in "| ←"
        ]
        for name in ("read README.md", "edit garden.py")
    }
    assert happened == {
        "read README.md": [
            *("started", "→ view README.md", "→ bash rm README.md", "✗ bash", "hint", "completed"),
        ],
        "edit garden.py": [
            *("started", "→ view garden.py", "→ edit garden.py", "allowed"),
            *("→ bash make test", "allowed", "completed"),
        ],
    }
    assert "[edit garden.py]   | OK" in printed
    assert ended.stdout.splitlines()[-2:] == [
        "-    return min(age_years, 8) * 5",
        "+    return min(age_years, 8) * 0.5",
    ]
    # The excerpt in the README; its lines may be cut with an ellipsis.
    (shown,) = re.findall(r"```console\n\$ make run\n(.*?)```", README, re.DOTALL)
    output = [*ended.stdout.splitlines(), *ended.stderr.splitlines()]
    for line in shown.splitlines():
        assert any(one.startswith(line.partition("…")[0]) for one in output), line


def test_readme_make_targets_exist() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    for target in set(re.findall(r"(?:`|\$ )make (\w+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
