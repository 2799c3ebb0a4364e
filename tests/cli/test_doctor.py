"""`culm doctor`: what is wrong is told, what can be made anew is, and nothing else is touched."""

import asyncio
import json
import os
import socket
from pathlib import Path

import pytest

from culm import __version__
from culm.cli.doctor import examine_all, locked
from culm.cli.doctor_machine import programs
from culm.cli.mail_place import KnownProject
from culm.clock import LoopClock
from culm.errors import DataLocked
from culm.mail.maildir import MaildirPostOffice
from culm.store.agents import agents_below
from culm.store.sql import MIGRATIONS
from culm.workspace.roots import DataRoots, project_folder, project_key, remember_workspace
from tests.cli.conftest import Desk, Said
from tests.flow.agents_stage import open_agents
from tests.store.trees import TOP, open_tree
from tests.support import WAIT_S, contract


@pytest.fixture(autouse=True)
def own_machine(desk: Desk, tmp_path: Path) -> None:
    """Nothing of whoever runs the tests is looked at."""
    desk.set_env(CULM_HOST=f"unix://{tmp_path}/s", XDG_STATE_HOME=str(tmp_path / "state"))


@pytest.fixture
def folder(desk: Desk) -> Path:
    """Of a project with two agents, one of which has used something."""
    folder = project_folder(desk.data_dir, desk.project)
    folder.mkdir(parents=True)
    with open_tree(folder / "culm.db") as tree:
        tree.add("a")
        tree.add("b", "a")
        tree.use("b", 10, 0.5)
    return folder


def doctor(desk: Desk, *args: str) -> Said:
    """What it says, but for the machine."""
    said = desk.culm("doctor", *args)
    machine, project, rest = said.out.partition(f"{desk.project}\n")
    assert machine.startswith("this machine\n  culm ")
    assert "WRONG" not in machine
    return Said(said.status, project + rest, said.err)


def of_machine(desk: Desk, *args: str) -> dict[str, tuple[str, str, str]]:
    """Its findings there: the state, the words and the hint of each part."""
    found = json.loads(desk.culm("doctor", "--json", *args).out)
    return {
        one["part"]: (
            "note" if one["is_note"] else "ok" if one["is_ok"] else "wrong",
            one["text"],
            one["hint"],
        )
        for one in found
        if not one["project"]
    }


def said_of(desk: Desk, **parts: str) -> str:
    """What is printed of a sound project, but for these parts."""
    sound = {
        "database": f"ok     schema {len(MIGRATIONS)}",
        "agents": "ok     2 agents",
        "mailboxes": "ok     0, 0 letters wait, 0 are dead",
        "worktrees": "ok     0",
    }
    lines = [f"  {name:<9}  {words}" for name, words in {**sound, **parts}.items()]
    return "\n".join([str(desk.project), *lines, ""])


def test_a_sound_project_is_ok_in_each_part(desk: Desk, folder: Path) -> None:
    assert doctor(desk) == Said(0, said_of(desk))
    assert doctor(desk, "--rebuild") == Said(0, said_of(desk))
    found = json.loads(desk.culm("doctor", "--json").out)
    assert [(one["part"], one["is_ok"]) for one in found if one["project"]] == [
        ("database", True),
        ("agents", True),
        ("mailboxes", True),
        ("worktrees", True),
    ]


@contract("FLEET-64", "FLEET-65")
def test_rows_that_are_not_what_the_others_say_are_told_and_then_made_anew(
    desk: Desk, folder: Path
) -> None:
    with open_tree(folder / "culm.db") as tree:
        kept = tree.rows()
        tree.connection.execute("UPDATE agents SET cost = 9, path = '[]' WHERE id = 'a'")
        tree.connection.execute("UPDATE runs SET tree_tokens = 9")
        damaged = tree.rows()
    words = (
        "WRONG  4 rows have sums or paths that are not what the others say\n"
        "                  hint: stop the server, then: culm doctor --rebuild"
    )
    assert doctor(desk) == Said(1, said_of(desk, agents=words))
    with open_tree(folder / "culm.db") as tree:
        assert tree.rows() == damaged
    fixed = said_of(desk, agents="ok     2 agents; 4 rows were made anew")
    assert doctor(desk, "--rebuild") == Said(0, fixed)
    with open_tree(folder / "culm.db") as tree:
        assert tree.rows() == kept
    assert doctor(desk) == Said(0, said_of(desk))


@contract("FLEET-65")
@pytest.mark.parametrize(
    "damage", ["depth = 'x'", "depth = 1.5", "children = 'many'", "tokens = 1.5", "path = '{'"]
)
def test_derived_columns_that_hold_no_number_are_told_and_made_anew(
    desk: Desk, folder: Path, damage: str
) -> None:
    with open_tree(folder / "culm.db") as tree:
        kept = tree.rows()
        tree.connection.execute(f"UPDATE agents SET {damage}")
    told = desk.culm("doctor")
    assert (told.status, "WRONG  2 rows have sums or paths" in told.out) == (1, True)
    fixed = said_of(desk, agents="ok     2 agents; 2 rows were made anew")
    assert doctor(desk, "--rebuild") == Said(0, fixed)
    with open_tree(folder / "culm.db") as tree:
        assert tree.rows() == kept


def test_a_look_at_agents_whose_rows_are_damaged_says_who_can_help(
    desk: Desk, folder: Path
) -> None:
    with open_tree(folder / "culm.db") as tree:
        tree.connection.execute("UPDATE agents SET depth = 'x'")
    said = desk.culm("agents")
    assert (said.status, said.out, "hint: `culm doctor`" in said.err) == (1, "", True)


@contract("FLEET-P12")
def test_agents_that_are_their_own_ancestors_are_told_and_then_cut(
    desk: Desk, folder: Path
) -> None:
    with open_tree(folder / "culm.db") as tree:
        tree.connection.execute("UPDATE agents SET parent_id = 'b' WHERE id = 'a'")
    words = (
        "WRONG  2 are their own ancestors: a, b\n"
        "                  hint: stop the server, then: culm doctor --rebuild"
    )
    assert doctor(desk) == Said(1, said_of(desk, agents=words))
    words = "ok     2 agents; 2 rows were made anew; 1 agent works for nobody now: a"
    assert doctor(desk, "--rebuild") == Said(0, said_of(desk, agents=words))
    with open_tree(folder / "culm.db") as tree:
        a, b = agents_below("")(tree.connection)
        assert [(one.parent_id, one.parent_session_id, one.depth) for one in (a, b)] == [
            ("", "", 1),
            ("a", a.session_id, 2),
        ]
    assert doctor(desk) == Said(0, said_of(desk))


async def test_nothing_is_made_anew_beside_a_server_and_no_server_starts_beside_a_doctor(
    desk: Desk, folder: Path
) -> None:
    roots = DataRoots(LoopClock())
    async with roots.hold(desk.data_dir):
        refused = desk.culm("doctor", "--rebuild")
        assert (refused.status, refused.out) == (1, "")
        assert "is in use by a server\nhint: stop that server" in refused.err
        assert desk.culm("doctor").status == 0
    file = desk.data_dir / "culm.lock"
    before = file.stat().st_mtime_ns
    with locked(desk.data_dir), pytest.raises(DataLocked):
        async with roots.hold(desk.data_dir):
            pass
    # Else the next server would think that one had been alive until now.
    assert file.stat().st_mtime_ns == before


def test_letters_that_cannot_be_read_mailboxes_that_are_unsafe_and_leftovers_are_told(
    desk: Desk, folder: Path
) -> None:
    mailboxes = folder / "mailboxes"
    post = MaildirPostOffice(mailboxes, LoopClock())
    for address in ("a", "b", "cli-old", "cli-new"):
        post.make(address)
    (mailboxes / "a" / "new" / "x").touch()
    (mailboxes / "a" / "dead" / "x").touch()
    fine = said_of(desk, mailboxes="ok     4, 1 letter waits, 1 is dead")
    assert doctor(desk) == Said(0, fine)
    (mailboxes / "a" / "corrupt" / "x").touch()
    said = desk.culm("doctor").out
    assert "WRONG  4, 1 letter waits, 1 is dead, 1 cannot be read\n" in said
    assert f"hint: look into {mailboxes}/*/corrupt" in said
    os.utime(mailboxes / "cli-old", (0, 0))
    (mailboxes / "b").chmod(0o777)
    said = desk.culm("doctor").out
    assert "1 was left behind by `culm mail ask`, 1 cannot be used: mailbox b is not safe" in said


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_worktree_that_no_agent_has_is_told_and_left_alone(
    desk: Desk, folder: Path, *, is_whole: bool
) -> None:
    worktrees = folder / "worktrees"
    for name in ("a", "left"):
        (worktrees / name / "sub").mkdir(parents=True)
    if is_whole:
        (worktrees / "left" / ".git").touch()
    with open_tree(folder / "culm.db") as tree:
        # A workspace may be a folder of its repository.
        worktree = str(worktrees / "a" / "sub")
        tree.connection.execute("UPDATE agents SET worktree = ? WHERE id = 'a'", (worktree,))
    words = (
        "WRONG  1 belongs to no agent: left\n                  hint: look what is in it, then:"
        f" {'git worktree remove' if is_whole else 'rm -r'} {worktrees}/left"
    )
    assert doctor(desk, "--rebuild") == Said(1, said_of(desk, worktrees=words))
    assert (worktrees / "left" / "sub").is_dir()


def test_what_cannot_be_looked_at_is_told_and_the_rest_is_looked_at(
    desk: Desk, folder: Path
) -> None:
    (folder / "mailboxes").touch()
    said = desk.culm("doctor")
    assert said.status == 1
    assert "mailboxes  WRONG  mailbox mailboxes cannot be used: Not a directory\n" in said.out
    assert "  worktrees  ok     0\n" in said.out
    assert desk.culm("mail", "list").status == 1
    (desk.data_dir / "culm.lock").mkdir()
    assert "cannot use the data directory" in desk.culm("doctor", "--rebuild").err


@pytest.mark.parametrize("content", [b"x" * 8192, b"SQLite format 3\0" + b"\1" * 8176])
def test_a_file_that_is_no_database_is_told_and_left_alone(
    desk: Desk, folder: Path, content: bytes
) -> None:
    for suffix in ("", "-wal", "-shm"):
        (folder / f"culm.db{suffix}").unlink(missing_ok=True)
    (folder / "culm.db").write_bytes(content)
    for option in ("--json", "--rebuild"):
        said = desk.culm("doctor", option)
        assert (said.status, "cannot read" in said.out) == (1, True)
    assert (folder / "culm.db").read_bytes() == content


def test_the_database_of_another_version_is_told(desk: Desk, folder: Path) -> None:
    for version in (len(MIGRATIONS) - 1, len(MIGRATIONS) + 1):
        with open_tree(folder / "culm.db") as tree:
            tree.connection.execute(f"PRAGMA user_version = {version}")
        said = desk.culm("doctor", "--rebuild")
        words = f"WRONG  schema {version} is not the one that this culm has\n"
        assert (said.status, words in said.out) == (1, True)
        assert desk.culm("mail", "send", "--to", TOP, "hi").status == 1


@contract("FLEET-66")
def test_projects_are_told_apart_by_their_key_and_all_of_them_can_be_looked_at(
    desk: Desk, folder: Path, tmp_path: Path
) -> None:
    one, other = (tmp_path / name for name in ("a/b", "a-b"))
    assert project_key(one) != project_key(other)
    assert project_key(one) == project_key(Path(str(one)))
    never = of_machine(desk, "--all")["project"]
    assert never == ("note", "culm has never been used here", "`culm run` begins")
    for path in (desk.project, one, other):
        remember_workspace(desk.data_dir, path=path, root=desk.data_dir, workspace_id=path.name)
    own = project_folder(desk.data_dir, other)
    own.mkdir()
    with open_tree(own / "culm.db"):
        pass
    said = desk.culm("doctor", "--all").out
    assert [line for line in said.splitlines() if not line.startswith(" ")] == [
        "this machine",
        str(desk.project),
        str(other),
    ]


def test_each_project_that_was_looked_at_is_counted(desk: Desk, folder: Path) -> None:
    done: list[int] = []
    project = KnownProject(desk.project, desk.data_dir)
    examine_all([project, project], rebuilds=False, on_step=done.append)
    assert [n for n in done if n] == [1, 1]


# --- the machine


def test_where_culm_was_never_used_the_machine_is_looked_at_and_all_is_well(
    desk: Desk, tmp_path: Path
) -> None:
    assert desk.culm("doctor", "--dir", "/").status == 0
    found = of_machine(desk, "--dir", "/")
    state, words, _ = found.pop("project")
    assert (state, words) == ("note", "culm has never been used in /")
    for part in ("culm", "libraries", "data", "config", "state", "token", "socket"):
        assert found[part][0] == "ok", part
    assert found["culm"][1].startswith(f"{__version__}, Python 3.")
    assert "msgspec " in found["libraries"][1]
    assert found["data"][1] == f"{desk.data_dir}, which is not made yet"
    assert found["socket"][1] == f"{tmp_path}/s is not there: no server runs"


def test_programs_that_are_missing_are_noted_with_what_is_lost(tmp_path: Path) -> None:
    (tmp_path / "git").touch(0o755)
    git, rg = programs({"PATH": str(tmp_path)})
    assert (git.text, git.is_note) == (f"git: {tmp_path}/git", False)
    assert (rg.text, rg.is_ok, rg.is_note) == ("rg is not found", True, True)


def test_what_others_can_read_and_what_is_no_directory_is_wrong(desk: Desk) -> None:
    desk.data_dir.mkdir(parents=True)
    token = desk.data_dir / "token"
    token.touch(0o644)
    assert of_machine(desk)["token"] == (
        "wrong",
        f"{token} can be read by others",
        f"chmod 600 {token}",
    )
    token.chmod(0o600)
    assert of_machine(desk)["token"][:2] == ("ok", str(token))
    desk.user_file.parent.parent.touch()
    state, words, _ = of_machine(desk)["config"]
    assert (state, words) == ("wrong", f"{desk.user_file.parent.parent} is no directory")
    assert desk.culm("doctor").status == 1


def test_a_data_directory_that_is_a_file_is_told_and_no_traceback(desk: Desk) -> None:
    desk.data_dir.parent.mkdir()
    desk.data_dir.touch()
    found = of_machine(desk)
    assert found["data"][:2] == ("wrong", f"{desk.data_dir} is no directory")
    assert found["project"][:2] == ("wrong", f"{desk.data_dir} cannot be read: Not a directory")


def test_a_socket_that_nobody_answers_is_noted_and_a_file_in_its_place_is_wrong(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # A socket's path must be short to be bound.
    with socket.socket(socket.AF_UNIX) as left:
        left.bind("s")
    state, words, hint = of_machine(desk)["socket"]
    assert (state, words) == ("note", f"{tmp_path}/s is stale: nobody answers")
    assert hint.startswith("harmless: ")
    (tmp_path / "s").unlink()
    (tmp_path / "s").touch()
    assert of_machine(desk)["socket"][:2] == ("wrong", f"{tmp_path}/s is no socket")


async def test_a_server_that_runs_is_asked_what_it_is(tmp_path: Path, desk: Desk) -> None:
    async with open_agents(tmp_path / "server") as stage, asyncio.timeout(WAIT_S):
        said = await asyncio.to_thread(desk.culm, "doctor", "--host", stage.flow.url)
    assert said.status == 0
    words = f"culm {__version__}, pid {os.getpid()}, 1 workspace open"
    assert f"  server     ok     {words}\n" in said.out
    gone = await asyncio.to_thread(desk.culm, "doctor", "--host", "tcp://127.0.0.1:1")
    assert (gone.status, "  server     WRONG  it does not answer" in gone.out) == (1, True)
