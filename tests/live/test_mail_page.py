"""What docs/mail.md tells to type works as it stands there."""

import re
from pathlib import Path

from culm.mail.letters import parse_letter
from tests.live.found import open_machine
from tests.live.harness import ROOT, environment
from tests.live.typed import printed_by_script

PAGE = (ROOT / "docs" / "mail.md").read_text()
SCRIPTS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
DOCUMENTS = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)


async def lines_of(folder: Path, script: str) -> list[str]:
    """What it prints, in a project of one file, with a server on the offline model if any."""
    project = folder / "project"
    project.mkdir(exist_ok=True)
    (project / "plums.txt").touch()
    places = {"CULM_HOST": f"unix://{folder}/s", "CULM_NO_DISCOVERY": "1"}
    said = await printed_by_script(script, cwd=project, env=environment(folder, places))
    return said.splitlines()


async def test_letters_are_sent_read_and_answered_with_and_without_a_server(folder: Path) -> None:
    """One block after the other, as somebody types them."""
    typed = "\necho ---\n".join(SCRIPTS)
    async with open_machine(folder):
        lines = await lines_of(
            folder, typed.replace("culm serve", f"culm serve --host unix://{folder}/s")
        )
    said, between = lines[: lines.index("---")], lines.index("---")
    assert "offline model" in said[0]
    states = [line.split()[1:5:3] for line in said[-3:]]
    assert states == [["reply", "delivered"], ["ask", "answered"], ["task", "admitted"]]
    assert any("plums.txt" in line for line in said)
    said = lines[between + 1 :]
    assert [line for line in said if line in ("delivered", "admitted")] == ["delivered", "admitted"]
    assert any("plums.txt" in line for line in said)
    assert said[-1].split()[:2] == ["worktrees", "ok"]


def test_the_letter_of_the_page_can_be_read() -> None:
    (letter,) = DOCUMENTS
    assert parse_letter(letter.encode()).kind == "ask"
