"""The examples of docs/mail.md work as written."""

import re
from pathlib import Path

from culm.mail.letters import parse_letter
from tests.live.harness import ROOT, environment
from tests.live.machine import open_machine
from tests.live.page_commands import stdout_of_script

PAGE = (ROOT / "docs" / "mail.md").read_text()
SCRIPTS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
DOCUMENTS = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)


async def lines_of(folder: Path, script: str) -> list[str]:
    """Return the lines that a script prints in a project of one file, with the offline model."""
    project = folder / "project"
    project.mkdir(exist_ok=True)
    (project / "plums.txt").touch()
    places = {"CULM_HOST": f"unix://{folder}/s", "CULM_NO_DISCOVERY": "1"}
    output = await stdout_of_script(script, cwd=project, env=environment(folder, places))
    return output.splitlines()


async def test_mail_page_examples_work_with_and_without_a_server(folder: Path) -> None:
    """Run the blocks of the page in order."""
    typed = "\necho ---\n".join(SCRIPTS)
    async with open_machine(folder):
        lines = await lines_of(
            folder, typed.replace("culm serve", f"culm serve --host unix://{folder}/s")
        )
    printed, between = lines[: lines.index("---")], lines.index("---")
    assert "offline model" in printed[0]
    states = [line.split()[1:5:3] for line in printed[-3:]]
    assert states == [["reply", "delivered"], ["ask", "answered"], ["task", "admitted"]]
    assert any("plums.txt" in line for line in printed)
    printed = lines[between + 1 :]
    assert [line for line in printed if line in ("delivered", "admitted")] == [
        "delivered",
        "admitted",
    ]
    assert any("plums.txt" in line for line in printed)
    assert printed[-1].split()[:2] == ["worktrees", "ok"]


def test_mail_page_letter_parses() -> None:
    (letter,) = DOCUMENTS
    assert parse_letter(letter.encode()).kind == "ask"
