"""The examples of docs/fleet.md work as written."""

import os
import re
import sys
from pathlib import Path

import msgspec
import pytest

from culm.fleet.protocol.frames import parse_child_frame, parse_parent_frame
from culm.fleet.provision import AnyKind, parse_provision
from tests.live.harness import ROOT
from tests.live.page_commands import stdout_of, stdout_of_script

PAGE = (ROOT / "docs" / "fleet.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
SCRIPTS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
DOCUMENTS = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)


def env_of(folder: Path) -> dict[str, str]:
    return {**os.environ, "XDG_DATA_HOME": str(folder), "TMPDIR": str(folder)}


@pytest.mark.parametrize(("program", "printed"), PROGRAMS)
async def test_fleet_page_program_prints_the_shown_output(
    folder: Path, program: str, printed: str
) -> None:
    command = (sys.executable, "-c", program)
    assert await stdout_of(*command, cwd=folder, env=env_of(folder)) == printed


async def test_served_agent_is_listed_and_called(folder: Path) -> None:
    output = await stdout_of_script(SCRIPTS[0], cwd=folder, env=env_of(folder))
    assert "parrot" in output
    assert "hello from the fleet" in output


async def test_worker_started_by_hand_runs_an_assignment(folder: Path) -> None:
    output = await stdout_of_script(SCRIPTS[1], cwd=folder, env=env_of(folder))
    assert "one two" in output


def test_fleet_page_frames_and_documents_parse() -> None:
    from_parent, from_worker, provision, executor = DOCUMENTS
    for line in from_parent.splitlines():
        parse_parent_frame(line)
    for line in from_worker.splitlines():
        parse_child_frame(line)
    parse_provision(provision.encode())
    msgspec.json.decode(executor, type=AnyKind)
