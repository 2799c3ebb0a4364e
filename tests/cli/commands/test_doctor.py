"""`culm doctor`: problems are reported, derived rows are rebuilt, nothing else is changed."""

import asyncio
import json
import os
import socket
from pathlib import Path

import pytest

from culm import __version__
from culm.cli.commands.doctor import examine_all, locked, programs
from culm.cli.projects import KnownProject
from culm.clock import LoopClock
from culm.errors import DataLocked
from culm.mail.maildir import MaildirPostOffice
from culm.store.agents import agents_below
from culm.store.sql import MIGRATIONS, READABLE_FROM
from culm.workspace.roots import DataRoots, project_folder, project_key, remember_workspace
from tests.cli.conftest import CliHarness, CommandResult
from tests.flow.agents_harness import open_agents
from tests.store.trees import TOP, open_tree
from tests.support import WAIT_S, contract


@pytest.fixture(autouse=True)
def isolated_machine(cli: CliHarness, tmp_path: Path) -> None:
    """Hide the configuration of the person who runs the tests."""
    cli.set_env(CULM_HOST=f"unix://{tmp_path}/s", XDG_STATE_HOME=str(tmp_path / "state"))


@pytest.fixture
def folder(cli: CliHarness) -> Path:
    """The data of a project with two agents, one of which has used tokens."""
    folder = project_folder(cli.data_dir, cli.project)
    folder.mkdir(parents=True)
    with open_tree(folder / "culm.db") as tree:
        tree.add("a")
        tree.add("b", "a")
        tree.use("b", 10, 0.5)
    return folder


def doctor(cli: CliHarness, *args: str) -> CommandResult:
    """Run `culm doctor`, without the section of the machine."""
    result = cli.culm("doctor", *args)
    machine, project, rest = result.out.partition(f"{cli.project}\n")
    assert machine.startswith("this machine\n  culm ")
    assert "WRONG" not in machine
    return CommandResult(result.status, project + rest, result.err)


def machine_findings(cli: CliHarness, *args: str) -> dict[str, tuple[str, str, str]]:
    """The machine's findings: the state, the text and the hint of each part."""
    found = json.loads(cli.culm("doctor", "--json", *args).out)
    return {
        one["part"]: (
            "note" if one["is_note"] else "ok" if one["is_ok"] else "wrong",
            one["text"],
            one["hint"],
        )
        for one in found
        if not one["project"]
    }


def report_of(cli: CliHarness, **parts: str) -> str:
    """The report on a sound project, with these parts replaced."""
    sound = {
        "database": f"ok     schema {len(MIGRATIONS)}",
        "agents": "ok     2 agents",
        "mailboxes": "ok     0, 0 letters wait, 0 are dead",
        "worktrees": "ok     0",
    }
    lines = [f"  {name:<9}  {text}" for name, text in {**sound, **parts}.items()]
    return "\n".join([str(cli.project), *lines, ""])


def test_sound_project_is_ok_in_each_part(cli: CliHarness, folder: Path) -> None:
    assert doctor(cli) == CommandResult(0, report_of(cli))
    assert doctor(cli, "--rebuild") == CommandResult(0, report_of(cli))
    found = json.loads(cli.culm("doctor", "--json").out)
    assert [(one["part"], one["is_ok"]) for one in found if one["project"]] == [
        ("database", True),
        ("agents", True),
        ("mailboxes", True),
        ("worktrees", True),
    ]


@contract("FLEET-64", "FLEET-65")
def test_inconsistent_derived_rows_are_reported_and_rebuilt(cli: CliHarness, folder: Path) -> None:
    with open_tree(folder / "culm.db") as tree:
        kept = tree.rows()
        tree.connection.execute("UPDATE agents SET cost = 9, path = '[]' WHERE id = 'a'")
        tree.connection.execute("UPDATE runs SET tree_tokens = 9")
        damaged = tree.rows()
    text = (
        "WRONG  4 rows have sums or paths that do not match the other rows\n"
        "                  hint: stop the server, then run: culm doctor --rebuild"
    )
    assert doctor(cli) == CommandResult(1, report_of(cli, agents=text))
    with open_tree(folder / "culm.db") as tree:
        assert tree.rows() == damaged
    fixed = report_of(cli, agents="ok     2 agents; 4 rows were rebuilt")
    assert doctor(cli, "--rebuild") == CommandResult(0, fixed)
    with open_tree(folder / "culm.db") as tree:
        assert tree.rows() == kept
    assert doctor(cli) == CommandResult(0, report_of(cli))


@contract("FLEET-65")
@pytest.mark.parametrize(
    "damage", ["depth = 'x'", "depth = 1.5", "children = 'many'", "tokens = 1.5", "path = '{'"]
)
def test_malformed_derived_columns_are_reported_and_rebuilt(
    cli: CliHarness, folder: Path, damage: str
) -> None:
    with open_tree(folder / "culm.db") as tree:
        kept = tree.rows()
        tree.connection.execute(f"UPDATE agents SET {damage}")
    found = cli.culm("doctor")
    assert (found.status, "WRONG  2 rows have sums or paths" in found.out) == (1, True)
    fixed = report_of(cli, agents="ok     2 agents; 2 rows were rebuilt")
    assert doctor(cli, "--rebuild") == CommandResult(0, fixed)
    with open_tree(folder / "culm.db") as tree:
        assert tree.rows() == kept


def test_agents_with_damaged_rows_suggests_culm_doctor(cli: CliHarness, folder: Path) -> None:
    with open_tree(folder / "culm.db") as tree:
        tree.connection.execute("UPDATE agents SET depth = 'x'")
    result = cli.culm("agents")
    assert (result.status, result.out, "hint: run `culm doctor`" in result.err) == (1, "", True)


@contract("FLEET-P12")
def test_cycles_of_agents_are_reported_and_cut(cli: CliHarness, folder: Path) -> None:
    with open_tree(folder / "culm.db") as tree:
        tree.connection.execute("UPDATE agents SET parent_id = 'b' WHERE id = 'a'")
    text = (
        "WRONG  2 are their own ancestors: a, b\n"
        "                  hint: stop the server, then run: culm doctor --rebuild"
    )
    assert doctor(cli) == CommandResult(1, report_of(cli, agents=text))
    text = "ok     2 agents; 2 rows were rebuilt; 1 agent has no parent any more: a"
    assert doctor(cli, "--rebuild") == CommandResult(0, report_of(cli, agents=text))
    with open_tree(folder / "culm.db") as tree:
        a, b = agents_below("")(tree.connection)
        assert [(one.parent_id, one.parent_session_id, one.depth) for one in (a, b)] == [
            ("", "", 1),
            ("a", a.session_id, 2),
        ]
    assert doctor(cli) == CommandResult(0, report_of(cli))


async def test_rebuild_and_a_server_exclude_each_other(cli: CliHarness, folder: Path) -> None:
    roots = DataRoots(LoopClock())
    async with roots.hold(cli.data_dir):
        refused = cli.culm("doctor", "--rebuild")
        assert (refused.status, refused.out) == (1, "")
        assert "is in use by a server\nhint: stop that server" in refused.err
        assert cli.culm("doctor").status == 0
    file = cli.data_dir / "culm.lock"
    before = file.stat().st_mtime_ns
    with locked(cli.data_dir), pytest.raises(DataLocked):
        async with roots.hold(cli.data_dir):
            pass
    # Otherwise the next server would assume that one was alive until now.
    assert file.stat().st_mtime_ns == before


def test_unreadable_letters_unsafe_and_leftover_mailboxes_are_reported(
    cli: CliHarness, folder: Path
) -> None:
    mailboxes = folder / "mailboxes"
    post = MaildirPostOffice(mailboxes, LoopClock())
    for address in ("a", "b", "cli-old", "cli-new"):
        post.make(address)
    (mailboxes / "a" / "new" / "x").touch()
    (mailboxes / "a" / "dead" / "x").touch()
    fine = report_of(cli, mailboxes="ok     4, 1 letter waits, 1 is dead")
    assert doctor(cli) == CommandResult(0, fine)
    (mailboxes / "a" / "corrupt" / "x").touch()
    result = cli.culm("doctor").out
    assert "WRONG  4, 1 letter waits, 1 is dead, 1 cannot be read\n" in result
    assert f"hint: inspect and remove the files in {mailboxes}/*/corrupt" in result
    os.utime(mailboxes / "cli-old", (0, 0))
    (mailboxes / "b").chmod(0o777)
    result = cli.culm("doctor").out
    assert "1 was left behind by `culm mail ask`, 1 cannot be used: mailbox b is not safe" in result


@pytest.mark.parametrize("is_whole", [True, False])
def test_worktree_without_an_agent_is_reported_and_kept(
    cli: CliHarness, folder: Path, *, is_whole: bool
) -> None:
    worktrees = folder / "worktrees"
    for name in ("a", "left"):
        (worktrees / name / "sub").mkdir(parents=True)
    if is_whole:
        (worktrees / "left" / ".git").touch()
    with open_tree(folder / "culm.db") as tree:
        # A workspace may be a folder inside its repository.
        worktree = str(worktrees / "a" / "sub")
        tree.connection.execute("UPDATE agents SET worktree = ? WHERE id = 'a'", (worktree,))
    text = (
        "WRONG  1 belongs to no agent: left\n                  hint: check its content, then:"
        f" {'git worktree remove' if is_whole else 'rm -r'} {worktrees}/left"
    )
    assert doctor(cli, "--rebuild") == CommandResult(1, report_of(cli, worktrees=text))
    assert (worktrees / "left" / "sub").is_dir()


def test_unreadable_part_is_reported_and_the_rest_is_checked(cli: CliHarness, folder: Path) -> None:
    (folder / "mailboxes").touch()
    result = cli.culm("doctor")
    assert result.status == 1
    assert "mailboxes  WRONG  mailbox mailboxes cannot be used: Not a directory\n" in result.out
    assert "  worktrees  ok     0\n" in result.out
    assert cli.culm("mail", "list").status == 1
    (cli.data_dir / "culm.lock").mkdir()
    assert "cannot use the data directory" in cli.culm("doctor", "--rebuild").err


@pytest.mark.parametrize("content", [b"x" * 8192, b"SQLite format 3\0" + b"\1" * 8176])
def test_invalid_database_is_reported_and_kept(
    cli: CliHarness, folder: Path, content: bytes
) -> None:
    for suffix in ("", "-wal", "-shm"):
        (folder / f"culm.db{suffix}").unlink(missing_ok=True)
    (folder / "culm.db").write_bytes(content)
    for option in ("--json", "--rebuild"):
        result = cli.culm("doctor", option)
        assert (result.status, "cannot read" in result.out) == (1, True)
    assert (folder / "culm.db").read_bytes() == content


def test_database_of_another_version_is_reported(cli: CliHarness, folder: Path) -> None:
    for version in (READABLE_FROM - 1, len(MIGRATIONS) + 1):
        with open_tree(folder / "culm.db") as tree:
            tree.connection.execute(f"PRAGMA user_version = {version}")
        result = cli.culm("doctor", "--rebuild")
        text = f"WRONG  schema {version} is not the schema of this culm\n"
        assert (result.status, text in result.out) == (1, True)
        assert cli.culm("mail", "send", "--to", TOP, "hi").status == 1


@contract("FLEET-66")
def test_projects_have_distinct_keys_and_all_can_be_checked(
    cli: CliHarness, folder: Path, tmp_path: Path
) -> None:
    one, other = (tmp_path / name for name in ("a/b", "a-b"))
    assert project_key(one) != project_key(other)
    assert project_key(one) == project_key(Path(str(one)))
    never = machine_findings(cli, "--all")["project"]
    assert never == ("note", "culm has never been used here", "start with `culm run`")
    for path in (cli.project, one, other):
        remember_workspace(cli.data_dir, path=path, root=cli.data_dir, workspace_id=path.name)
    own = project_folder(cli.data_dir, other)
    own.mkdir()
    with open_tree(own / "culm.db"):
        pass
    result = cli.culm("doctor", "--all").out
    assert [line for line in result.splitlines() if not line.startswith(" ")] == [
        "this machine",
        str(cli.project),
        str(other),
    ]


def test_each_checked_project_is_counted(cli: CliHarness, folder: Path) -> None:
    done: list[int] = []
    project = KnownProject(cli.project, cli.data_dir)
    examine_all([project, project], rebuilds=False, on_step=done.append)
    assert [n for n in done if n] == [1, 1]


# --- the machine


def test_machine_is_checked_where_culm_was_never_used(cli: CliHarness, tmp_path: Path) -> None:
    assert cli.culm("doctor", "--dir", "/").status == 0
    found = machine_findings(cli, "--dir", "/")
    state, text, _ = found.pop("project")
    assert (state, text) == ("note", "culm has never been used in /")
    for part in ("culm", "libraries", "data", "config", "state", "token", "socket"):
        assert found[part][0] == "ok", part
    assert found["culm"][1].startswith(f"{__version__}, Python 3.")
    assert "msgspec " in found["libraries"][1]
    assert found["data"][1] == f"{cli.data_dir}, not created yet"
    assert found["socket"][1] == f"{tmp_path}/s does not exist: no server is running"


def test_missing_programs_are_noted(tmp_path: Path) -> None:
    (tmp_path / "git").touch(0o755)
    git, rg = programs({"PATH": str(tmp_path)})
    assert (git.text, git.is_note) == (f"git: {tmp_path}/git", False)
    assert (rg.text, rg.is_ok, rg.is_note) == ("rg not found", True, True)


def test_readable_token_and_config_that_is_not_a_directory_are_wrong(cli: CliHarness) -> None:
    cli.data_dir.mkdir(parents=True)
    token = cli.data_dir / "token"
    token.touch(0o644)
    assert machine_findings(cli)["token"] == (
        "wrong",
        f"{token} can be read by others",
        f"chmod 600 {token}",
    )
    token.chmod(0o600)
    assert machine_findings(cli)["token"][:2] == ("ok", str(token))
    cli.user_file.parent.parent.touch()
    state, text, _ = machine_findings(cli)["config"]
    assert (state, text) == ("wrong", f"{cli.user_file.parent.parent} is not a directory")
    assert cli.culm("doctor").status == 1


def test_data_directory_that_is_a_file_is_reported(cli: CliHarness) -> None:
    cli.data_dir.parent.mkdir()
    cli.data_dir.touch()
    found = machine_findings(cli)
    assert found["data"][:2] == ("wrong", f"{cli.data_dir} is not a directory")
    assert found["project"][:2] == ("wrong", f"{cli.data_dir} cannot be read: Not a directory")


def test_stale_socket_is_noted_and_a_file_in_its_place_is_wrong(
    cli: CliHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # A socket path must be short to bind.
    with socket.socket(socket.AF_UNIX) as left:
        left.bind("s")
    state, text, hint = machine_findings(cli)["socket"]
    assert (state, text) == ("note", f"{tmp_path}/s is stale: no server answers")
    assert hint.startswith("harmless: ")
    (tmp_path / "s").unlink()
    (tmp_path / "s").touch()
    assert machine_findings(cli)["socket"][:2] == ("wrong", f"{tmp_path}/s is not a socket")


async def test_running_server_is_reported_with_version_and_pid(
    tmp_path: Path, cli: CliHarness
) -> None:
    async with open_agents(tmp_path / "server") as harness, asyncio.timeout(WAIT_S):
        result = await asyncio.to_thread(cli.culm, "doctor", "--host", harness.flow.url)
    assert result.status == 0
    text = f"culm {__version__}, pid {os.getpid()}, 1 workspace open"
    assert f"  server     ok     {text}\n" in result.out
    gone = await asyncio.to_thread(cli.culm, "doctor", "--host", "tcp://127.0.0.1:1")
    assert (gone.status, "  server     WRONG  it does not answer" in gone.out) == (1, True)
