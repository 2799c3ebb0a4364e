"""Git worktrees for agents: created completely or not at all, never removed with work in them.

Owns the directory, the branch and git's entry for it. Git runs here with the restrictions of a
command without approval: it runs no program that the repository names, and if that cannot be ruled
out, git is not run. Other modules decide how agents use their worktrees and report the outcome.
"""

import asyncio
import glob
import logging
import os
import shutil
import weakref
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from msgspec import MsgspecError, Struct
from msgspec.structs import replace

from culm.files import UnreadableFile, read_file, replace_file
from culm.processes.base import ProcessOwner, ProcessStartFailed
from culm.tools.base import ToolContext
from culm.tools.process.child import ExchangeAnswer, ExchangeRequest, exchange
from culm.tools.process.environment import PATH_BYTES_MAX, command_env, unasked_env, why_git_asks
from culm.wire.codec import clean, decode, encode, printable

log = logging.getLogger(__name__)

GIT_S = 30.0  # Per git command: a checkout of a large repository takes seconds.
UNDO_S = 3.0  # Per git command that undoes something, because a cancel waits for it.
OUTPUT_BYTES_MAX = 4 << 20  # About 50,000 paths.
TREES_BYTES_MAX = 32 << 20  # About 300,000 directories of a commit, held only while parsed.
FILES_MAX = 200  # Files listed by name, for a model to read.
GIT_ERROR_CHARS_MAX = 300
SHORT, LONGER = 8, 13  # Characters of an agent's id in its branch: one or two groups of a UUID.
_ADVICE = "leave out `worktree`"
SUFFIX = ".json"
NOTE_BYTES_MAX = 64 << 10  # A few paths.


class WorktreeFailed(Exception):
    """The worktree was not created, and nothing is left of the attempt. Gives reason and advice."""

    def __init__(self, why: str, instead: str = "") -> None:
        advice = f"{_ADVICE}, or {instead}" if instead else _ADVICE
        super().__init__(f"{printable(why)}: {advice}")


class Worktree(Struct, frozen=True):
    path: Path  # Contains no symbolic links.
    workspace: Path  # The directory in it that corresponds to the workspace in the repository.
    branch: str
    base: str  # The commit it started from.
    entry: Path  # Git's state for it, in the repository: `…/.git/worktrees/<name>`.


class WorktreeOutcome(Struct, frozen=True):
    """The state of a worktree after its agent has ended."""

    worktree: Worktree
    kept: bool
    files: Sequence[str] = ()  # Changed or new, relative to the top of the repository.
    files_more: int = 0  # The number of files not listed; a lower bound if there are very many.
    commits: int = 0
    error: str = ""  # Why its changes are not known, or why it could not be removed.


class WorktreeNote(Struct, frozen=True):
    """A file beside a worktree, for recovery after a server was killed.

    It exists from the start of the worktree's creation until its removal. It distinguishes a
    worktree that was left incomplete, or whose agent was not stored yet, from one that an agent has
    worked in.
    """

    common: str  # The git directory that all working trees of the repository share.
    base: str
    branch: str = ""  # Set before the branch is created.
    workspace: str = ""  # This and `entry` are set once the worktree is complete.
    entry: str = ""


def describe_outcome(outcome: WorktreeOutcome) -> str:
    """Describe the outcome in one line, for the agent that started this one."""
    where = f"{printable(str(outcome.worktree.path))} on branch {outcome.worktree.branch}"
    if not outcome.kept:
        return "Nothing was changed in its worktree, which is removed."
    if outcome.error:
        return f"Its worktree is kept in {where}: {outcome.error}."
    files = len(outcome.files) + outcome.files_more
    return f"Its work is kept in {where}; commits: {outcome.commits}, files changed: {files}."


class Worktrees:
    """The worktrees of one workspace's agents."""

    def __init__(self, context: ToolContext) -> None:
        self._context = context
        # Git fails on a half-written entry of another worktree, so only one is written at a time.
        self._lock = asyncio.Lock()
        # One task finishes a worktree at a time; the next one sees the result.
        self._finishing: weakref.WeakValueDictionary[Path, asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )

    async def make(self, workspace: Path, folder: Path, agent_id: str) -> Worktree:
        """Create a worktree of the last commit at `folder`, which must not exist yet.

        On failure or cancel nothing of it is left. Raises `WorktreeFailed`.
        """
        try:
            repository = await _find_repository(self._context, workspace)
            making = _Making(repository, folder, agent_id, self._lock)
            is_made = False
            try:
                worktree = await making.make()
                is_made = True
            finally:
                if not is_made:
                    await making.undo()
        except _GitFailed as exc:
            raise WorktreeFailed(str(exc)) from exc
        return worktree

    async def finish(self, worktree: Worktree) -> WorktreeOutcome:
        """Remove the worktree of an ended agent if it is unchanged, else describe its changes.

        Ignored files do not count as changes. Never fails: a worktree that cannot be inspected or
        removed is kept. It may already have been removed, by us or by anyone else.
        """
        async with self._finishing.setdefault(worktree.path, asyncio.Lock()):
            return await self._finish(worktree)

    async def _finish(self, worktree: Worktree) -> WorktreeOutcome:
        has_files, has_entry = await asyncio.to_thread(_existing_parts, worktree)
        common = worktree.entry.parent.parent
        git = _Git(self._context, worktree.path.parent, (f"--git-dir={common}",))
        try:
            files, commits = await _find_changes(self._context, worktree) if has_files else ([], 0)
            if files or commits:
                named, more = files[:FILES_MAX], max(len(files) - FILES_MAX, 0)
                return WorktreeOutcome(
                    worktree, kept=True, files=named, files_more=more, commits=commits
                )
            if has_files or has_entry:
                async with self._lock:
                    # Without --force: git checks again, and refuses if there are changes after all.
                    await git.do("worktree", "remove", "--", str(worktree.path))
        except _GitFailed as exc:
            return WorktreeOutcome(worktree, kept=True, error=printable(str(exc)))
        await _remove_branch(git, worktree.branch, worktree.base)
        await asyncio.to_thread(remove_note, worktree.path)
        return WorktreeOutcome(worktree, kept=False)

    async def remove(self, worktree: Worktree) -> bool:
        """Remove the worktree of an agent that was not stored. False if work may be in it."""
        return not (await self.finish(worktree)).kept

    async def clear(self, folder: Path) -> None:
        """Remove the remains of a worktree without an agent, unless work may be in it.

        A server that was killed before it stored the agent leaves such a worktree.
        """
        folder, note = await asyncio.to_thread(_find_noted, folder)
        if note is None:
            return
        if note.entry:
            details = Path(note.workspace), note.branch, note.base, Path(note.entry)
            await self.finish(Worktree(folder, *details))
        else:  # It was never completed, so no agent has worked in it.
            git = _Git(self._context, folder.parent, (f"--git-dir={note.common}",))
            await _undo(git, folder, note)


def _find_noted(folder: Path) -> tuple[Path, WorktreeNote | None]:
    """Resolve the links in the path and find the note. Blocks on disk I/O."""
    folder = Path(os.path.realpath(folder.parent)) / folder.name
    return folder, find_note(folder)


# --- notes


def noted_in(folders: Path) -> list[str]:
    """List the names of all worktrees there, incomplete ones included. Blocks on disk I/O."""
    try:
        return [note.stem for note in folders.glob(f"*{SUFFIX}")]
    except OSError as exc:
        log.warning("cannot list the worktrees in %s: %s", folders, exc)
        return []


def write_note(folder: Path, note: WorktreeNote) -> None:
    """Write or replace the note of a worktree; raises `OSError`."""
    # After a crash of the machine the state of the other files is unknown anyway, so the worktree
    # is left for people to clean up.
    replace_file(_file_of(folder), encode(note), durable=False)


def find_note(folder: Path) -> WorktreeNote | None:
    try:
        return decode(read_file(_file_of(folder), NOTE_BYTES_MAX), WorktreeNote)
    except FileNotFoundError:
        return None
    except (UnreadableFile, MsgspecError) as exc:
        log.warning("worktree %s is kept because its note cannot be read: %s", folder, exc)
        return None


def remove_note(folder: Path) -> None:
    try:
        _file_of(folder).unlink(missing_ok=True)
    except OSError as exc:
        log.warning("cannot remove the note of worktree %s: %s", folder, exc)


def _file_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{SUFFIX}")


# --- creation


class _Repository(Struct, frozen=True):
    git: "_Git"
    common: Path  # The git directory that all its working trees share.
    inner: Path  # The workspace, relative to the top of its working tree.
    base: str


async def _find_repository(context: ToolContext, workspace: Path) -> _Repository:
    git = _Git(context, workspace)
    answer = await git.ask("rev-parse", "--git-common-dir", "--show-toplevel")
    if answer.exit.code != 0:
        raise _why_no_repository(workspace, _describe_error(answer))
    lines = os.fsdecode(answer.output).removesuffix("\n").split("\n")
    if len(lines) != 2:
        raise WorktreeFailed(f"{workspace} has a line break in its path")
    common, top, inner = await asyncio.to_thread(_check_repository, workspace, *lines)
    head = await git.ask("rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    if head.exit.code != 0:
        raise WorktreeFailed(f"{top} has no commit to start from", "make one")
    # From here on git gets the path of the repository and does not search for one.
    located = _Git(context, top, (f"--git-dir={common}",))
    base = head.output.decode().strip()
    # Git does not see files in the empty directory of a submodule as changes: they would be lost.
    if await _has_submodules(located, base):
        raise WorktreeFailed(f"{top} has submodules, which a worktree would lack")
    return _Repository(located, common, inner, base)


async def _has_submodules(git: "_Git", base: str) -> bool:
    """Search the commit itself, which need not have a `.gitmodules`. Raises `_GitFailed`."""
    # Directories and submodules only: there are many more files.
    args = ("ls-tree", "-r", "-d", "-z", "--full-tree", base)
    listed = await git.ask(*args, bytes_max=TREES_BYTES_MAX)
    if listed.exit.code != 0 or listed.is_cut:
        why = "there are too many directories" if listed.is_cut else _describe_error(listed)
        raise _GitFailed(f"cannot check for submodules ({why})")
    return b"\x00160000 " in b"\0" + listed.output


def _why_no_repository(workspace: Path, error: str) -> WorktreeFailed:
    if "not a git repository" in error:
        return WorktreeFailed(f"{workspace} is not in a git repository", "start culm in one")
    if "bare repository" in error or "must be run in a work tree" in error:
        return WorktreeFailed(f"{workspace} is in a bare repository, or in git's own directory")
    return WorktreeFailed(f"{workspace} is not in a repository that git accepts ({error})")


def _check_repository(workspace: Path, common: str, top: str) -> tuple[Path, Path, Path]:
    """Resolve the paths that git printed; raises `WorktreeFailed` if a worktree would be unsafe.

    Blocks on disk I/O.
    """
    shared, tree = (Path(os.path.realpath(workspace / path)) for path in (common, top))
    if (tree / ".git").is_file() and (".git", "modules") in pairwise(shared.parts):
        raise WorktreeFailed(f"{tree} is a submodule")
    if why := why_git_asks([str(tree)]):
        raise WorktreeFailed(f"{tree} cannot be checked out safely, as {why}")
    here = Path(os.path.realpath(workspace))
    if not here.is_relative_to(tree):
        raise WorktreeFailed(f"the working tree of its repository is elsewhere, in {tree}")
    return shared, tree, here.relative_to(tree)


class _Making:
    """A worktree being created, with the state needed to undo it."""

    def __init__(
        self, repository: _Repository, folder: Path, agent_id: str, lock: asyncio.Lock
    ) -> None:
        self._repository = repository
        self._git = repository.git
        self._folder = folder
        self._agent_id = agent_id
        self._lock = lock
        self._has_folder = False
        self._note = WorktreeNote(str(repository.common), repository.base)

    async def make(self) -> Worktree:
        self._make_folder()
        await self._make_branch()
        async with self._lock:
            args = ("--no-checkout", "--quiet", "--", str(self._folder), self._note.branch)
            await self._git.do("worktree", "add", *args)
        entry = await asyncio.to_thread(_pointed_at, self._folder / ".git")
        assert entry is not None, "git has made a worktree without an entry"
        # The checkout takes long, so it runs outside the lock.
        inside = self._git.within(entry, self._folder)
        await inside.do("reset", "--hard", "--quiet", "--no-recurse-submodules")
        workspace = await asyncio.to_thread(self._find_workspace)
        self._write_note(workspace=str(workspace), entry=str(entry))
        return Worktree(self._folder, workspace, self._note.branch, self._note.base, entry)

    def _make_folder(self) -> None:
        """Create the directory. Not in a thread: after a cancel its existence would be unknown."""
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._folder.mkdir(mode=0o700)
        except OSError as exc:
            raise WorktreeFailed(f"{self._folder} cannot be made: {exc.strerror}") from exc
        self._has_folder = True
        self._folder = Path(os.path.realpath(self._folder))
        self._write_note()  # Not earlier: a directory that existed before is not ours to remove.

    def _write_note(self, **known: str) -> None:
        """Update the note. Not in a thread either, so that a cancel cannot leave it outdated."""
        self._note = replace(self._note, **known)
        try:
            write_note(self._folder, self._note)
        except OSError as exc:
            why = f"the note of {self._folder} cannot be written: {exc.strerror}"
            raise WorktreeFailed(why) from exc

    def _find_workspace(self) -> Path:
        """Find the workspace directory in the worktree. Blocks on disk I/O."""
        inner = self._repository.inner
        workspace = self._folder / inner
        # In the commit it may be missing, or a link to another directory.
        if os.path.realpath(workspace) != str(workspace) or not workspace.is_dir():
            raise WorktreeFailed(f"there is no directory {inner} in the last commit", "commit it")
        return workspace

    async def _make_branch(self) -> None:
        base = self._repository.base
        for length in (SHORT, LONGER, len(self._agent_id)):
            name = f"culm/{self._agent_id[:length]}"
            if await self._is_taken(name):
                continue
            # First: after a cancel we do not learn whether the branch was created.
            self._write_note(branch=name)
            # All zeros: only if the branch does not exist.
            made = await self._git.ask("update-ref", _ref(name), base, "0" * len(base))
            if made.exit.code == 0:
                return
            self._write_note(branch="")
            if not await self._is_taken(name):  # Not a race with another process.
                raise WorktreeFailed(f"the branch {name} cannot be made ({_describe_error(made)})")
        raise WorktreeFailed(f"the branch culm/{self._agent_id} exists already")

    async def _is_taken(self, name: str) -> bool:
        found = await self._git.ask("show-ref", "--verify", "--quiet", _ref(name))
        return found.exit.code == 0

    async def undo(self) -> None:
        if self._has_folder:
            await _undo(self._git, self._folder, self._note)


async def _undo(git: "_Git", folder: Path, note: WorktreeNote) -> None:
    """Undo an incomplete creation. Failures are only logged: a worse error is being reported.

    Does not wait for the lock: its holder may be removing a large worktree.
    """
    common = Path(note.common)
    await asyncio.to_thread(_remove_files, folder, common)
    if note.branch:
        await asyncio.to_thread(_remove_lock, common / f"{_ref(note.branch)}.lock")
        await _remove_branch(git, note.branch, note.base)
    await asyncio.to_thread(remove_note, folder)


def _remove_files(folder: Path, common: Path) -> None:
    """Remove the directory and git's entry for it, and no other; git may have been killed."""
    for path in (folder, *_entries(folder, common)):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            continue  # Git has cleaned up itself.
        except OSError as exc:
            log.warning("cannot remove %s of an incomplete worktree: %s", path, exc)


def _remove_lock(lock: Path) -> None:
    """Remove the lock file of a killed git. No other process creates a branch with this id."""
    try:
        lock.unlink(missing_ok=True)
    except OSError as exc:
        log.warning("cannot remove %s of an incomplete branch: %s", lock, exc)


def _entries(folder: Path, common: Path) -> list[Path]:
    """List git's entries for a directory, named like it or like it with a number appended."""
    named = [
        entry
        for entry in (common / "worktrees").glob(f"{glob.escape(folder.name)}*")
        if not entry.name.removeprefix(folder.name).strip("0123456789")
    ]
    # An entry without a target was not finished; it is ours, as no other directory has this id.
    return [entry for entry in named if _pointed_at(entry / "gitdir") in (None, folder / ".git")]


def _pointed_at(file: Path) -> Path | None:
    """Read the path in one of git's files, absolute or relative to the directory of that file."""
    try:
        text = os.fsdecode(read_file(file, PATH_BYTES_MAX))
    except (OSError, UnreadableFile):
        return None
    path = text.removeprefix("gitdir: ").rstrip("\n")
    return Path(os.path.realpath(file.parent / path)) if path else None


async def _remove_branch(git: "_Git", branch: str, base: str) -> None:
    """Remove the branch if nothing was committed to it; git compares and removes atomically."""
    try:
        await git.do("update-ref", "-d", _ref(branch), base, within_s=UNDO_S)
    except _GitFailed as exc:
        log.info("branch %s was not removed, or did not exist: %s", branch, exc)


def _ref(branch: str) -> str:
    return f"refs/heads/{branch}"


# --- after the agent has ended


def _existing_parts(worktree: Worktree) -> tuple[bool, bool]:
    return os.path.lexists(worktree.path), os.path.lexists(worktree.entry)


async def _find_changes(context: ToolContext, worktree: Worktree) -> tuple[list[str], int]:
    """Return the changed files and the number of commits. Raises `_GitFailed`."""
    if why := await asyncio.to_thread(_why_unsafe, worktree):
        raise _GitFailed(f"what was changed in it is not known, as {why}")
    git = _Git(context, worktree.path).within(worktree.entry, worktree.path)
    # The agent may have switched to another branch, or removed its own.
    heads = ("HEAD", _ref(worktree.branch), f"^{worktree.base}")
    commits = int(await git.do("rev-list", "--count", "--ignore-missing", *heads, "--"))
    # `dirty`: git must not run in a submodule, which has a configuration of its own.
    plain = ("-z", "--no-renames", "--ignore-submodules=dirty")
    status = await git.names("status", "--porcelain", "--untracked-files=all", *plain)
    files = {name[3:] for name in status}
    if commits:
        since = (worktree.base, "HEAD")
        files.update(await git.names("diff-tree", "-r", "--name-only", *plain, *since))
    return sorted(files), commits


def _why_unsafe(worktree: Worktree) -> str:
    """Return why git might run a program that the agent installed, or "". Blocks on disk I/O."""
    if _pointed_at(worktree.path / ".git") != worktree.entry:
        return f"{worktree.path}/.git was changed"
    return why_git_asks([str(worktree.path)])


# --- git


class _GitFailed(Exception):
    """A git command failed; the message gives the reason."""


class _Git(Struct, frozen=True):
    """Git with restrictions, as a supervised process with limits on time and output."""

    context: ToolContext
    cwd: Path
    location: Sequence[str] = ()  # The options that name the repository.

    def within(self, entry: Path, path: Path) -> "_Git":
        """Return git for a worktree, without relying on the worktree's own `.git` file."""
        return _Git(self.context, path, (f"--git-dir={entry}", f"--work-tree={path}"))

    async def ask(
        self, *args: str, within_s: float = GIT_S, bytes_max: int = OUTPUT_BYTES_MAX
    ) -> ExchangeAnswer:
        """Run a command to its end, whatever its exit code; raises `_GitFailed`."""
        argv, title = ("git", *self.location, *args), f"git {args[0]}"
        owner = ProcessOwner(self.context.workspace_id, "agent")
        cwd, env = str(self.cwd), self._env()
        request = ExchangeRequest(argv, cwd, env, owner, title, b"", within_s, bytes_max)
        try:
            answer = await exchange(self.context.processes, self.context.clock, request)
        except (ProcessStartFailed, OSError) as exc:
            raise _GitFailed(f"`{title}` cannot be run ({exc})") from exc
        if answer.is_late:
            raise _GitFailed(f"`{title}` took longer than {within_s:g} s")
        if answer.exit.code is None:
            raise _GitFailed(f"`{title}` was killed")
        return answer

    async def do(self, *args: str, within_s: float = GIT_S) -> str:
        """Run a command that must succeed and return its output; raises `_GitFailed`."""
        return os.fsdecode(await self._do(args, within_s)).removesuffix("\n")

    async def names(self, *args: str) -> list[str]:
        """Run a command with NUL-separated output; a long list is cut. Raises `_GitFailed`."""
        *names, _ = (await self._do(args, GIT_S)).split(b"\0")
        return [clean(name.decode(errors="replace")) for name in names]

    async def _do(self, args: Sequence[str], within_s: float) -> bytes:
        answer = await self.ask(*args, within_s=within_s)
        if answer.exit.code != 0:
            raise _GitFailed(f"`git {args[0]}` failed ({_describe_error(answer)})")
        return answer.output

    def _env(self) -> dict[str, str]:
        env = unasked_env(command_env(self.context.env(), str(self.cwd)), self.context.paths.root)
        # The workspace may be a directory of a larger repository, which git must find.
        env.pop("GIT_CEILING_DIRECTORIES", None)
        return {**env, "LC_ALL": "C"}  # Some error messages are parsed.


def _describe_error(answer: ExchangeAnswer) -> str:
    """Return the first error that git printed."""
    lines = clean(answer.errors.decode(errors="replace")).splitlines()
    errors = [line[7:] for line in lines if line.startswith(("fatal: ", "error: "))]
    first = next(iter(errors or lines), f"it ended with status {answer.exit.code}")
    return printable(first.strip())[:GIT_ERROR_CHARS_MAX]
