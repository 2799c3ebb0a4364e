"""Worktrees of agents, with real git: created completely or not at all, removed only if clean."""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path

import pytest
from msgspec import Struct
from msgspec.structs import replace

from culm.processes.base import NoProcesses, Processes, ProcessHandle, ProcessRequest
from culm.tools.base import ToolContext
from culm.worktrees import (
    FILES_MAX,
    Worktree,
    WorktreeFailed,
    WorktreeOutcome,
    Worktrees,
    describe_outcome,
)
from tests.processes.process_harness import wait_readable
from tests.support import WAIT_S
from tests.tools.tool_contexts import open_context, open_descriptors

AGENT = "0a1b2c3d-0000-4000-8000-000000000001"
SAME_BEGIN = "0a1b2c3d-0000-4000-8000-000000000002"
BRANCH = "culm/0a1b2c3d"
OTHERWISE = "leave out `worktree`"
_IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")


def git(folder: Path, *args: str) -> str:
    argv = ("git", *_IDENTITY, *args)
    env = {"PATH": os.environ["PATH"], "HOME": "/nowhere"}
    done = subprocess.run(argv, cwd=folder, env=env, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--allow-empty", "--no-verify", "-m", "x")


class Site(Struct, frozen=True):
    """A repository with one commit, and the folder for its agents' worktrees."""

    context: ToolContext
    worktrees: Worktrees
    repo: Path
    folders: Path

    def copy(self, place: Path) -> "Site":
        """Copy the repository to another place."""
        shutil.copytree(self.repo, place / "repo", symlinks=True)
        return replace(self, repo=place / "repo", folders=place / "worktrees")

    def with_context(self, context: ToolContext) -> "Site":
        """The same site with another tool context."""
        return replace(self, context=context, worktrees=Worktrees(context))

    def folder(self, agent_id: str = AGENT) -> Path:
        return self.folders / agent_id

    async def make(self, inner: str = "", agent_id: str = AGENT) -> Worktree:
        async with asyncio.timeout(WAIT_S):
            folder = self.folder(agent_id)
            return await self.worktrees.make(self.repo / inner, folder, agent_id)

    async def refusal(self, workspace: Path) -> str:
        """The error message of a refused worktree."""
        with pytest.raises(WorktreeFailed) as failed:
            async with asyncio.timeout(WAIT_S):
                await self.worktrees.make(workspace, self.folder(), AGENT)
        return str(failed.value)

    async def finish(self, worktree: Worktree) -> WorktreeOutcome:
        async with asyncio.timeout(WAIT_S):
            return await self.worktrees.finish(worktree)

    def left(self) -> list[str]:
        """All traces of worktrees: branches and their locks, entries and folders."""
        branches = git(self.repo, "for-each-ref", "--format=%(refname:short)", "refs/heads/culm")
        entries = [str(entry) for entry in self.repo.glob(".git/worktrees/*")]
        folders = [str(folder) for folder in self.folders.glob("*")]
        locks = [str(lock) for lock in self.repo.glob(".git/refs/heads/culm/*.lock")]
        return [*branches.split(), *locks, *entries, *folders]


@pytest.fixture(scope="module")
def template_repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repo = tmp_path_factory.mktemp("pattern")
    (repo / "sub").mkdir()
    git(repo, "init")
    for name, text in (("a.txt", "one\n"), ("sub/b.txt", "two\n"), (".gitignore", "*.log\n")):
        (repo / name).write_text(text)
    commit(repo)
    return repo


@pytest.fixture
async def site(tmp_path: Path, template_repo: Path) -> AsyncGenerator[Site]:
    # Git variables of the environment would mislead git.
    misleading = {"GIT_DIR": "/nowhere", "GIT_WORK_TREE": "/", "GIT_INDEX_FILE": "/nowhere/index"}
    before = open_descriptors()
    async with open_context(tmp_path, misleading) as context:
        yield Site(context, Worktrees(context), template_repo, tmp_path).copy(tmp_path / "site")
    assert open_descriptors() == before


async def test_worktree_has_the_last_commit_and_is_removed_if_unchanged(
    site: Site,
) -> None:
    (site.repo / "a.txt").write_text("not committed\n")
    (site.repo / ".git" / "index.lock").touch()  # Another git at work does not matter.
    base = git(site.repo, "rev-parse", "HEAD")
    path, entry = site.folder(), site.repo / ".git" / "worktrees" / AGENT
    for inner in ("", "sub"):
        worktree = await site.make(inner)
        assert worktree == Worktree(path, path / inner, BRANCH, base, entry)
        assert path.stat().st_mode & 0o777 == 0o700
        assert (path / "a.txt").read_text() == "one\n"
        assert git(worktree.workspace, "rev-parse", "--abbrev-ref", "HEAD") == BRANCH
        (path / "test.log").write_text("ignored\n")
        outcome = await site.finish(worktree)
        assert outcome == WorktreeOutcome(worktree, kept=False)
        assert describe_outcome(outcome) == "Nothing was changed in its worktree, which is removed."
        assert site.left() == []
        assert await site.worktrees.remove(worktree)  # Once more, with the session.


# --- changes in a worktree


def change(path: Path) -> None:
    (path / "a.txt").write_text("changed\n")


def add(path: Path) -> None:
    (path / "new").mkdir()
    (path / "new" / "ü\n.txt").write_text("new\n")


def stage_and_take_back(path: Path) -> None:
    change(path)
    git(path, "add", "a.txt")
    (path / "a.txt").write_text("one\n")


def commit_and_more(path: Path) -> None:
    change(path)
    commit(path)
    add(path)


def commit_elsewhere(path: Path) -> None:
    git(path, "checkout", "--detach")
    git(path, "branch", "-D", BRANCH)
    change(path)
    commit(path)


def commit_and_go_back(path: Path) -> None:
    change(path)
    commit(path)
    git(path, "checkout", "--detach", "HEAD~1")


def add_many(path: Path) -> None:
    for number in range(FILES_MAX + 7):
        (path / f"{number:03}").touch()


MANY = [f"{number:03}" for number in range(FILES_MAX)]
# The change of an agent, and its report: files, number of further files, commits.
WORK: Mapping[Callable[[Path], None], tuple[list[str], int, int]] = {
    change: (["a.txt"], 0, 0),
    add: (["new/ü\n.txt"], 0, 0),
    add_many: (MANY, 7, 0),
    stage_and_take_back: (["a.txt"], 0, 0),
    commit_and_more: (["a.txt", "new/ü\n.txt"], 0, 1),
    commit_elsewhere: (["a.txt"], 0, 1),
    commit_and_go_back: ([], 0, 1),
}


async def test_worktree_with_changes_is_kept(site: Site, tmp_path: Path) -> None:
    # A display setting of the user does not hide changes.
    git(site.repo, "config", "status.showUntrackedFiles", "no")
    for work, (files, more, commits) in WORK.items():
        one = site.copy(tmp_path / work.__name__)
        worktree = await one.make("sub")
        work(worktree.path)
        outcome = await one.finish(worktree)
        assert outcome == WorktreeOutcome(worktree, True, files, more, commits), work  # noqa: FBT003
        assert describe_outcome(outcome) == (
            f"Its work is kept in {worktree.path} on branch {BRANCH}; "
            f"commits: {commits}, files changed: {len(files) + more}."
        )
        assert worktree.path.is_dir()


async def test_deleted_worktree_is_forgotten_but_its_commits_stay(
    site: Site,
) -> None:
    worktree = await site.make()
    commit(worktree.path)
    assert not await site.worktrees.remove(worktree)
    # An agent of that agent starts from what its parent has committed.
    child = await site.worktrees.make(worktree.workspace, site.folder(SAME_BEGIN), SAME_BEGIN)
    assert child.base == git(worktree.path, "rev-parse", "HEAD")
    assert child.entry.parent == worktree.entry.parent
    for one in (worktree, child):
        shutil.rmtree(one.path)
        assert await site.worktrees.remove(one)
    assert site.left() == [BRANCH]


# --- refusals


def outside(site: Site) -> Path:
    return site.context.paths.root


def unborn(site: Site) -> Path:
    git(site.repo, "init", "unborn")
    return site.repo / "unborn"


def bare(site: Site) -> Path:
    git(site.repo, "init", "--bare", "bare")
    return site.repo / "bare"


def own_directory(site: Site) -> Path:
    return site.repo / ".git"


def submodule(site: Site) -> Path:
    args = ("-c", "protocol.file.allow=always", "submodule", "add")
    git(site.repo, *args, str(site.repo), "inner")
    return site.repo / "inner"


def with_submodule(site: Site) -> Path:
    submodule(site)
    commit(site.repo)
    return site.repo


def with_repository_inside(site: Site) -> Path:
    """A repository inside that only the commit reveals."""
    git(site.repo, "init", "sub/inner")
    commit(site.repo / "sub" / "inner")
    commit(site.repo)
    shutil.rmtree(site.repo / "sub" / "inner")
    return site.repo


def with_filter(site: Site) -> Path:
    git(site.repo, "config", "filter.x.smudge", "touch ran")
    return site.repo


def not_committed(site: Site) -> Path:
    (site.repo / "other").mkdir()
    return site.repo / "other"


def committed_as_link(site: Site) -> Path:
    (site.repo / "other").symlink_to("/")
    commit(site.repo)
    (site.repo / "other").unlink()
    return not_committed(site)


def branch_in_the_way(site: Site) -> Path:
    git(site.repo, "branch", f"{BRANCH}/x")
    return site.repo


def branches_taken(site: Site) -> Path:
    for length in (8, 13, len(AGENT)):
        git(site.repo, "branch", f"culm/{AGENT[:length]}")
    return site.repo


def object_missing(site: Site) -> Path:
    name = git(site.repo, "rev-parse", "HEAD:sub/b.txt")
    (site.repo / ".git" / "objects" / name[:2] / name[2:]).unlink()
    return site.repo


def place_in_the_way(site: Site) -> Path:
    site.folders.write_text("no directory")
    return site.repo


_BARE = "{it} is in a bare repository, or in git's own directory: "
_NOT_THERE = f"there is no directory other in the last commit: {OTHERWISE}, or commit it"
# The beginning of each error.
REFUSALS: Mapping[Callable[[Site], Path], str] = {
    outside: f"{{it}} is not in a git repository: {OTHERWISE}, or start culm in one",
    unborn: f"{{it}} has no commit to start from: {OTHERWISE}, or make one",
    bare: f"{_BARE}{OTHERWISE}",
    own_directory: f"{_BARE}{OTHERWISE}",
    submodule: f"{{it}} is a submodule: {OTHERWISE}",
    with_submodule: f"{{it}} has submodules, which a worktree would lack: {OTHERWISE}",
    with_repository_inside: f"{{it}} has submodules, which a worktree would lack: {OTHERWISE}",
    with_filter: '{it} cannot be checked out safely, as {it}/.git/config sets "smudge", which',
    not_committed: _NOT_THERE,
    committed_as_link: _NOT_THERE,
    branch_in_the_way: f"the branch {BRANCH} cannot be made (update_ref failed for ref ",
    branches_taken: f"the branch culm/{AGENT} exists already: {OTHERWISE}",
    object_missing: "`git reset` failed (unable to read sha1 file of sub/b.txt (",
    place_in_the_way: f"{{folder}} cannot be made: File exists: {OTHERWISE}",
}


async def test_impossible_worktree_is_refused_with_a_reason_and_leaves_nothing(
    site: Site, tmp_path: Path
) -> None:
    for arrange, why in REFUSALS.items():
        one = site.copy(tmp_path / arrange.__name__)
        workspace = arrange(one)
        before = one.left()
        refusal = await one.refusal(workspace)
        assert refusal.startswith(why.format(it=workspace, folder=one.folder())), refusal
        assert OTHERWISE in refusal
        assert one.left() == before


async def test_no_worktree_without_git_or_over_an_existing_folder(site: Site) -> None:
    worktree = await site.make()
    change(worktree.path)
    assert (await site.refusal(site.repo)).startswith(f"{worktree.path} cannot be made: File ex")
    lacking = site.with_context(replace(site.context, env=lambda: {"PATH": "/nowhere"}))
    why = "`git rev-parse` cannot be run (`git` was not found in PATH)"
    assert await lacking.refusal(site.repo) == f"{why}: {OTHERWISE}"
    outcome = await lacking.finish(worktree)
    assert outcome.kept
    assert outcome.error == why.replace("rev-parse", "rev-list")
    assert (worktree.path / "a.txt").read_text() == "changed\n"


# --- hostile repositories, and hostile agents


async def test_programs_named_by_the_repository_are_not_run(site: Site, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {ran}\n")
    program.chmod(0o755)
    for hook in ("post-checkout", "post-index-change", "reference-transaction"):
        (site.repo / ".git" / "hooks" / hook).symlink_to(program)
    git(site.repo, "config", "core.fsmonitor", str(program))
    worktree = await site.make()
    assert await site.finish(worktree) == WorktreeOutcome(worktree, kept=False)
    assert not ran.exists()
    # With plain git the programs would have run.
    git(site.repo, "worktree", "add", str(site.folder()))
    assert ran.exists()


async def test_worktree_with_tampered_git_config_is_kept_without_inspection(
    site: Site, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    worktree = await site.make()
    own, fake = worktree.path / ".git", worktree.path / "fake"
    pointer = own.read_text()
    git(worktree.path, "init", "--bare", str(fake))
    (worktree.path / ".gitattributes").write_text("* filter=x\n")
    unknown = "what was changed in it is not known, as"
    changed = f"{unknown} {own} was changed"
    for repository, now, why in (
        (fake, f"gitdir: {fake}\n", changed),
        (site.repo, pointer, f'{unknown} {worktree.entry}/../../config sets "clean", which can'),
        (site.repo, "", changed),
    ):
        git(repository, "config", "filter.x.clean", f"touch {ran}; cat")
        own.write_text(now)
        outcome = await site.finish(worktree)
        assert outcome == WorktreeOutcome(worktree, kept=True, error=outcome.error)
        assert outcome.error.startswith(why)
        assert describe_outcome(outcome) == (
            f"Its worktree is kept in {worktree.path} on branch {BRANCH}: {outcome.error}."
        )
        assert not ran.exists()


# --- concurrency and cancellation


async def test_concurrent_agents_with_similar_ids_get_distinct_branches(
    site: Site,
) -> None:
    git(site.repo, "branch", BRANCH)
    others = [f"{number}0000000-0000" for number in range(4)]
    async with asyncio.TaskGroup() as group:
        ids = (AGENT, SAME_BEGIN, *others)
        made = [group.create_task(site.make(agent_id=agent_id)) for agent_id in ids]
    worktrees = [task.result() for task in made]
    branches = {worktree.branch for worktree in worktrees}
    assert branches - {f"culm/{AGENT}", f"culm/{SAME_BEGIN}"} == {
        f"{BRANCH}-0000",
        *(f"culm/{agent_id[:8]}" for agent_id in others),
    }
    async with asyncio.TaskGroup() as group:
        ends = [group.create_task(site.finish(worktree)) for worktree in worktrees]
    assert [task.result() for task in ends] == [
        WorktreeOutcome(one, kept=False) for one in worktrees
    ]
    assert site.left() == [BRANCH]


class CancellingProcesses(NoProcesses):
    """Cancels the task that starts the `at`th process, as soon as the process runs."""

    def __init__(self, processes: Processes, at: int) -> None:
        self._processes = processes
        self._at = at
        self.count = 0

    async def start(self, request: ProcessRequest) -> ProcessHandle:
        self.count += 1
        is_last = self.count == self._at
        handle = await self._processes.start(request)
        task = asyncio.current_task()
        if is_last and task is not None:
            task.cancel()
        return handle


async def test_cancel_at_any_git_command_leaves_nothing(
    site: Site,
) -> None:
    commands = 7
    for at in range(1, commands + 1):
        processes = CancellingProcesses(site.context.processes, at)
        async with asyncio.TaskGroup() as group:
            cancelling_site = site.with_context(replace(site.context, processes=processes))
            making = group.create_task(cancelling_site.make())
        assert making.cancelled()
        assert site.left() == [], at
    processes = CancellingProcesses(site.context.processes, 0)
    await site.with_context(replace(site.context, processes=processes)).make()
    assert processes.count == commands  # No further command to cancel at.


async def test_lock_left_by_an_ended_git_is_removed(site: Site) -> None:
    class LockingProcesses(CancellingProcesses):
        async def start(self, request: ProcessRequest) -> ProcessHandle:
            if "update-ref" in request.argv and "-d" not in request.argv:
                lock = site.repo / f".git/refs/heads/{BRANCH}.lock"
                lock.parent.mkdir(parents=True)
                lock.touch()
            return await super().start(request)

    processes = LockingProcesses(site.context.processes, at=5)
    async with asyncio.TaskGroup() as group:
        making = group.create_task(
            site.with_context(replace(site.context, processes=processes)).make()
        )
    assert making.cancelled()
    assert site.left() == []


@pytest.mark.parametrize("how", ["cancelled", "killed"])
async def test_unfinished_checkout_leaves_nothing(site: Site, tmp_path: Path, how: str) -> None:
    (site.repo / ".gitattributes").write_text("b.txt filter=slow\n")
    commit(site.repo)
    os.mkfifo(tmp_path / "begun")
    # A filter of the user's own configuration, which is trusted. It begins and does not end.
    command = f"echo >{tmp_path}/begun; exec sleep 100"
    git(tmp_path, "config", "--file", ".gitconfig", "filter.slow.smudge", command)
    begun = os.open(tmp_path / "begun", os.O_RDONLY | os.O_NONBLOCK)
    try:
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            making = group.create_task(site.make() if how == "cancelled" else _killed(site))
            await wait_readable(begun)
            assert len(site.left()) == 4
            (process,) = await site.context.processes.processes(site.context.workspace_id)
            if how == "killed":
                os.kill(process.pid, signal.SIGKILL)
            else:
                making.cancel()
    finally:
        os.close(begun)
    assert making.cancelled() == (how == "cancelled")
    assert site.left() == []
    assert await site.context.processes.processes(site.context.workspace_id) == []


async def _killed(site: Site) -> None:
    assert await site.refusal(site.repo) == f"`git reset` was killed: {OTHERWISE}"


# --- leftovers of a killed server


class SnapshotProcesses(NoProcesses):
    """Takes a snapshot of the folder before each process, and at the end."""

    def __init__(self, processes: Processes, what: Path, snapshots: Path) -> None:
        self._processes = processes
        self._what = what
        self._snapshots = snapshots
        self.count = 0

    async def start(self, request: ProcessRequest) -> ProcessHandle:
        self.take()
        return await self._processes.start(request)

    def take(self) -> None:
        self.count += 1
        shutil.copytree(self._what, self._snapshots / str(self.count), symlinks=True)

    def restore(self, number: int) -> None:
        shutil.rmtree(self._what)
        (self._snapshots / str(number)).rename(self._what)


async def test_leftovers_of_a_kill_at_any_moment_are_cleared(site: Site, tmp_path: Path) -> None:
    processes = SnapshotProcesses(site.context.processes, site.repo.parent, tmp_path / "images")
    await site.with_context(replace(site.context, processes=processes)).make()
    processes.take()
    left: list[list[str]] = []
    for number in range(1, processes.count + 1):
        processes.restore(number)
        left.append(site.left())
        if number == processes.count - 1:  # It was in the middle of checking out.
            (site.folder() / "a.txt").write_text("on")
            (site.repo / ".git" / "worktrees" / AGENT / "index.lock").touch()
        await site.worktrees.clear(site.folder())
        assert site.left() == [], number
    assert BRANCH in left[-1]
    assert len(left[-1]) == len(left[-2]) == 4
    await site.worktrees.clear(site.folder())  # Does nothing where there is nothing.


async def test_unowned_worktree_with_changes_is_not_cleared(site: Site, tmp_path: Path) -> None:
    for work in WORK:
        one = site.copy(tmp_path / work.__name__)
        worktree = await one.make("sub")
        work(worktree.path)
        before = one.left()
        await one.worktrees.clear(one.folder())
        assert one.left() == before, work
    # A folder without a note, or one that existed before, is not touched either.
    (site.folder() / "mine").mkdir(parents=True)
    await site.worktrees.clear(site.folder())
    assert "cannot be made: File exists" in await site.refusal(site.repo)
    await site.worktrees.clear(site.folder())
    assert (site.folder() / "mine").is_dir()


async def test_worktree_finished_concurrently_is_removed_and_all_report_it(site: Site) -> None:
    worktree = await site.make()
    async with asyncio.TaskGroup() as group:
        ends = [group.create_task(site.finish(worktree)) for _ in range(3)]
    assert [task.result() for task in ends] == [WorktreeOutcome(worktree, kept=False)] * 3
    assert site.left() == []
