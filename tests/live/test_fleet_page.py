"""What docs/fleet.md tells to type works as it stands there."""

import os
import re
import sys
from pathlib import Path

import msgspec
import pytest

from culm.fleet.protocol.frames import parse_child_frame, parse_parent_frame
from culm.fleet.provision import AnyKind, parse_provision
from tests.live.harness import ROOT
from tests.live.typed import printed_by, printed_by_script

PAGE = (ROOT / "docs" / "fleet.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
SCRIPTS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
DOCUMENTS = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)


def env_of(folder: Path) -> dict[str, str]:
    return {**os.environ, "XDG_DATA_HOME": str(folder), "TMPDIR": str(folder)}


@pytest.mark.parametrize(("program", "printed"), PROGRAMS)
async def test_a_program_prints_what_the_page_says(
    folder: Path, program: str, printed: str
) -> None:
    command = (sys.executable, "-c", program)
    assert await printed_by(*command, cwd=folder, env=env_of(folder)) == printed


async def test_an_agent_that_serves_is_listed_and_called(folder: Path) -> None:
    said = await printed_by_script(SCRIPTS[0], cwd=folder, env=env_of(folder))
    assert "parrot" in said
    assert "hello from the fleet" in said


async def test_a_worker_by_hand_takes_an_assignment(folder: Path) -> None:
    said = await printed_by_script(SCRIPTS[1], cwd=folder, env=env_of(folder))
    assert "one two" in said


def test_the_frames_and_documents_of_the_page_can_be_read() -> None:
    from_parent, from_worker, provision, executor = DOCUMENTS
    for line in from_parent.splitlines():
        parse_parent_frame(line)
    for line in from_worker.splitlines():
        parse_child_frame(line)
    parse_provision(provision.encode())
    msgspec.json.decode(executor, type=AnyKind)
