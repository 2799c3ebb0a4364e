"""The examples of docs/agents.md work as written."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from culm.cli.main import culm
from culm.config.schema import AgentRole
from culm.settings import Settings
from culm.subagents.delegation import ANSWER_CHARS_MAX, LIST_MAX
from culm.subagents.start_policy import BUILT_IN_ROLES
from culm.tools.agent_tools import ASSIGNMENTS_MAX
from culm.wire.agents import PROMPT_CHARS_MAX
from tests.live.harness import RESUME_S, ROOT, environment, make_directory, open_process_server
from tests.live.machine import env_of
from tests.live.page_commands import stdout_of_script

PAGE = (ROOT / "docs" / "agents.md").read_text()
IN_A_MINUTE, SCRIPTED, *BY_HAND = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
UUID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
LISTED = re.compile(r"^( *)[0-9a-f]{8}(?=  )", re.MULTILINE)  # Ids as tables show them.
OFFLINE = {"CULM_NO_DISCOVERY": "1"}

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="the page uses curl")


async def output_of(folder: Path, env: Mapping[str, str], *scripts: str) -> str:
    """Return what the scripts print in a new project with its own server."""
    data = folder / "data" / "culm"  # The default location.
    options = ("--data-dir", str(data), "--create-grace", "600")
    async with open_process_server(folder, *options, env=dict(env)) as server:
        places = {"CULM_HOST": server.url, "CULM_SOCKET": server.url.removeprefix("unix://")}
        return await stdout_of_script(
            *scripts,
            cwd=make_directory(folder),
            env=environment(folder, {**env, **places, "XDG_DATA_HOME": str(folder / "data")}),
            wait_s=2 * RESUME_S,
        )


@needs_curl
async def test_agents_page_shell_examples_print_the_expected_output(
    folder: Path,
) -> None:
    output = UUID.sub("ID", await output_of(folder, OFFLINE, IN_A_MINUTE, *BY_HAND))
    output = LISTED.sub(r"\1ID", output)
    a_minute, _, by_hand = output.partition("  ID  worker   completed  $0.0000  read b.txt\n")
    assert "The 2 sub-agents answered:" in a_minute
    assert re.findall(r"tomatoes|beans|ID +worker +completed", a_minute) == [
        *("tomatoes", "beans", "ID  worker   completed"),
    ]
    read, _, rest = by_hand.partition("id: ")
    assert re.findall(r"tomatoes|beans", read) == ["tomatoes", "beans"]
    events, _, rest = rest.partition("canceled\n")
    assert re.findall(r'"type":"(agent_\w+)"', events) == [
        *("agent_started", "agent_ended", "agent_ended"),
    ]
    allowed, _, rest = rest.partition("Limit reached: ")
    assert allowed.splitlines() == [
        *("canceled", "agents", "ask", "['ID', 'ID']", '{"resolved":true}', "new.txt"),
    ]
    assert rest.splitlines()[1:4] == ["{'steps': 5}", '{"run_id":"ID"}', "completed"]
    assert re.fullmatch(r'\{"resolved":true\}\n## culm/\w+\n\?\? c.txt\n', rest.split("ed\n", 1)[1])


async def test_agents_page_scripted_example_prints_the_shown_text(folder: Path) -> None:
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    output = await output_of(folder, env_of({}), SCRIPTED)

    def plain(text: str) -> str:
        """Replace ids and prices, which vary."""
        return re.sub(r"\$\d+\.\d+", "$", UUID.sub("ID", text))

    assert plain(output) == plain(shown)


def test_agents_page_roles_are_a_valid_configuration(folder: Path) -> None:
    (document,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    file = folder / "culm.json"
    file.write_text(document)
    checked = CliRunner().invoke(culm, ["config", "check", str(file)])
    assert (checked.exit_code, checked.stdout) == (0, "ok: 1 file\n")
    keys = re.findall(r"^\| `(\w+)` \|", PAGE.partition("| key | |")[2], re.MULTILINE)
    assert tuple(keys[: len(AgentRole.__struct_fields__)]) == AgentRole.__struct_fields__
    for name in BUILT_IN_ROLES:
        assert f"\n| `{name}` |" in PAGE


def test_agents_page_lists_every_tool_and_limit() -> None:
    tools = PAGE.partition("## The tools")[2].partition("## Roles")[0]
    assert re.findall(r"^\| `(\w+)` \|", tools, re.MULTILINE) == [
        *("agent", "agent_wait", "agent_send", "agent_stop", "agent_list", "mail"),
    ]
    settings = Settings()
    for line in (
        f"| `agents_depth_max` | {settings.agents_depth_max} |",
        f"| `agents_children_max` | {settings.agents_children_max} |",
        f"| `agents_at_once` | {settings.agents_at_once} |",
        f"| {settings.run_wall_s / 3600:g} h, –, – |",
        f"| assignments in a call | {ASSIGNMENTS_MAX} |",
        f"| an assignment, a message | {PROMPT_CHARS_MAX >> 10} Ki characters |",
        f"| one agent's answer in a result | {ANSWER_CHARS_MAX:,} characters |",
        f"| agents shown by `agent_list` | {LIST_MAX} |",
    ):
        assert line in PAGE
