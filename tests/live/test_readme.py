"""What the README tells a newcomer to do works as it stands there."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.live.harness import ROOT, open_process_server, run_process
from tests.live.typed import printed_by, printed_by_script

README = (Path(__file__).parents[2] / "README.md").read_text()
API = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
ADDRESS = "127.0.0.1:7777"


async def test_the_python_session_of_the_readme_asks_and_knows_the_session(folder: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    async with open_process_server(folder) as server:
        env = {**os.environ, "CULM_HOST": server.urls[0], "CULM_NO_DISCOVERY": "1"}
        output = await printed_by(sys.executable, "-c", program, cwd=folder, env=env)
        assert "entries in this directory" in output
        assert output.splitlines()[-1].startswith("What is in this directory")


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page uses curl")
async def test_the_examples_of_the_interface_page_run_as_they_stand(folder: Path) -> None:
    script = "\n".join(re.findall(r"```sh\n(.*?)```", API, re.DOTALL))
    assert script.count("culm ") > 8
    async with open_process_server(folder) as server:
        socket = server.urls[0].removeprefix("unix://")
        env = {**os.environ, "CULM_SOCKET": socket}
        output = await printed_by_script(f"exec 2>&1\n{script}", cwd=folder, env=env)
        assert output.count("Seen by every stream") == 1
        assert re.search(r'id: \w+\.\d+\ndata: .*"title":"Changed while nobody listened"', output)
        assert "Expected `str`, got `int` - at `$.title`" in output


async def test_the_demonstration_has_two_agents_look_change_run_and_be_refused_and_leaves_nothing(
    folder: Path,
) -> None:
    ended = await run_process(folder, str(ROOT / "examples" / "first_run.py"))
    assert ended.status == 0
    assert ended.stdout.count("culm's offline model") == 1
    told = ended.stderr.splitlines()
    assert told[0].startswith("→ agent 2: read README.md and run `rm README.md`; replace ")
    assert told[-1].startswith("tree: 3 agents, ")
    # What happened to each of them, in its order; they work side by side.
    happened = {
        name: [
            line.removeprefix(f"[{name}] ").split(":")[0]
            for line in told
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
    assert "[edit garden.py]   | OK" in told
    assert ended.stdout.splitlines()[-2:] == [
        "-    return min(age_years, 8) * 5",
        "+    return min(age_years, 8) * 0.5",
    ]
    # What the README shows of it, each line up to where that cuts it short.
    (shown,) = re.findall(r"```console\n\$ make run\n(.*?)```", README, re.DOTALL)
    said = [*ended.stdout.splitlines(), *ended.stderr.splitlines()]
    for line in shown.splitlines():
        assert any(one.startswith(line.partition("…")[0]) for one in said), line


def test_the_commands_of_the_readme_exist() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    for target in set(re.findall(r"(?:`|\$ )make (\w+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
