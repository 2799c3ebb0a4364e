"""`culm` itself: its commands are imported on use, and listed without being imported."""

import subprocess
import sys

import click
import pytest
from click.shell_completion import ShellComplete

from culm.cli.groups import LazyCommand
from culm.cli.main import COMMANDS, culm
from tests.cli.conftest import CliHarness

WIDE = 1000  # Characters: wide enough that no first sentence is cut.


@pytest.mark.parametrize("lazy", COMMANDS, ids=lambda one: one.name)
def test_short_help_in_the_table_matches_the_command(lazy: LazyCommand) -> None:
    command = lazy.load()
    assert command.name == lazy.name
    assert lazy.get_short_help_str(WIDE) == command.get_short_help_str(WIDE)
    assert lazy.help == command.get_short_help_str(WIDE)
    assert not command.hidden


def modules_after(code: str) -> set[str]:
    program = (
        f"import sys, culm.cli.main as m\ntry:\n {code}\nfinally:\n print()\n print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "code",
    [
        "m.culm(['--help'])",
        "m.culm.shell_complete(m.click.Context(m.culm), 's')",
        "m.culm.get_command(m.click.Context(m.culm), 'nope')",
    ],
)
def test_listing_commands_imports_only_click(code: str) -> None:
    modules = modules_after(code)
    assert not modules & {"aiohttp", "uvloop", "msgspec", "asyncio", "sqlite3", "culm.server"}
    assert not {name for name in modules if name.startswith("culm.cli.commands.")}


def test_command_imports_only_its_own_module() -> None:
    modules = modules_after("m.culm(['logs', '--help'])")
    loaded = {name for name in modules if name.startswith("culm.cli.commands.")}
    assert loaded == {"culm.cli.commands.logs"}


def test_completion_offers_commands_with_their_short_help() -> None:
    completer = ShellComplete(culm, {}, "culm", "_CULM_COMPLETE")
    found = {one.value: one.help for one in completer.get_completions([], "st")}
    eager = {name: loaded(name).get_short_help_str() for name in ("stats", "steer", "stop")}
    assert found == eager


def loaded(name: str) -> click.Command:
    command = culm.get_command(click.Context(culm), name)
    assert command is not None
    return command


def test_unknown_command_suggests_the_nearest_one(cli: CliHarness) -> None:
    result = cli.culm("sesions")
    assert (result.status, result.out) == (2, "")
    assert "unknown command 'sesions'; did you mean sessions?" in result.err
