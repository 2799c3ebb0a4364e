"""A tool of another package: rules, call lines and approval prompts know it by its facts."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, ScriptedCall
from tests.live.harness import make_directory
from tests.live.run_harness import open_agent, script
from tests.live.test_run_asks import DONE, open_terminal
from tests.live.test_run_command import run
from tests.tools.test_entry_points import install

PACKAGE = """\
from dataclasses import dataclass

from culm.model.base import ToolSpec
from culm.tools.base import CallPlan, CallResult, ResolvedAction, ToolContext
from culm.wire.tools import ToolFacts

SCHEMA = {"type": "object", "properties": {"depth": {"type": "integer"}, "bed": {"type": "string"}}}

FACTS = ToolFacts(kind="edit", path_arguments=("bed",))


@dataclass(frozen=True)
class Plant:
    context: ToolContext
    spec: ToolSpec = ToolSpec("plant", "Plants.", SCHEMA, FACTS)
    parallel: bool = False
    crash: str = "ask"

    async def prepare(self, call):
        path = str(self.context.paths.root / call.arguments["bed"])

        async def run(watch):
            with open(path, "a") as file:
                file.write("seed\\n")
            return CallResult("planted")

        action = ResolvedAction(
            "plant", "plant", "Plant it", params=dict(call.arguments), paths=(path,)
        )
        return CallPlan(action, run)
"""
# Serves with the package installed in the given directory.
SERVE_WITH = (
    "import sys; sys.path.append({folder!r}); sys.argv[1:1] = ['serve']; "
    "from culm.cli.main import main; main()"
)


def planting(bed: str) -> Reply:
    return Reply(calls=[ScriptedCall(name="plant", input={"depth": 3, "bed": bed})])


@asynccontextmanager
async def open_garden(folder: Path, *replies: Reply) -> AsyncGenerator[Path]:
    """A server with the tool `plant`; yields its project, which has a directory `beds`."""
    packages = folder / "packages"
    packages.mkdir()
    install(packages, "garden", PACKAGE, "[culm.tools]\nplant = garden:Plant\n")
    program = ("-c", SERVE_WITH.format(folder=str(packages)))
    project = make_directory(folder)
    (project / "beds").mkdir()
    async with (
        open_model_server(script(*replies)) as model,
        open_agent(folder, model, program=program),
    ):
        yield project


async def test_rules_for_the_paths_of_a_package_tool_hold(folder: Path) -> None:
    beds = ("beds/a", "beds/secret", "b")
    rules = ("--approve", "plant:beds/**", "--deny", "plant:beds/secret")
    async with open_garden(folder, *map(planting, beds), DONE) as project:
        ended = await run(folder, *rules, "go")
        planted = [bed for bed in beds if (project / bed).exists()]
    assert (ended.status, planted) == (0, ["beds/a"]), ended.stderr
    lines = ended.stderr.splitlines()
    assert lines[:3] == ["→ plant beds/a", "allowed: plant: by --approve", "← plant: 7 chars"]
    denied = "Not allowed: the caller of this run denies it: deny tool plant, path beds/secret."
    assert lines[3:5] == ["→ plant beds/secret", f"✗ plant: {denied}"]
    assert (lines[5], lines[-1]) == ("→ plant b", "hint: --approve auto, or --approve plant:b")


async def test_approval_prompt_shows_the_arguments_of_a_package_tool(folder: Path) -> None:
    async with (
        open_garden(folder, planting("beds/a"), DONE) as project,
        open_terminal(folder, "go") as terminal,
    ):
        await terminal.until("[n]o: ")
        assert (
            '→ plant beds/a\n? plant: Plant it\n  | {"depth":3,"bed":"beds/a"}\n' in terminal.shown
        )
        terminal.type("y")
        assert (await terminal.ended()).status == 0
        assert (project / "beds" / "a").read_text() == "seed\n"


async def test_pattern_for_a_tool_without_command_and_path_is_wrong_usage(folder: Path) -> None:
    async with open_garden(folder):
        for tool in ("fetch", "no_such_tool"):
            ended = await run(folder, "--deny", f"{tool}:example.com", "go")
            assert (ended.status, ended.stdout) == (2, "")
            assert ended.stderr.splitlines() == [
                f"culm: {tool} has no command and no path to match",
                f"hint: use just {tool}",
            ]
