"""A working tree of its own for an agent: made whole or not at all, never removed with work in it.

Owns the directory, the branch and git's entry for it. Git is run here as it is in a command that
nobody was asked about: it runs no program that the repository names, and where that cannot be
ruled out it is not run. What an agent does in its worktree, and who is told of it, is decided
elsewhere.
"""

import asyncio
import glob
import logging
import os
import shutil
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from msgspec.structs import replace

from culm.files import UnreadableFile, read_file
from culm.processes.base import ProcessOwner, ProcessStartFailed
from culm.tools.process.environment import PATH_BYTES_MAX, command_env, unasked_env, why_git_asks
from culm.tools.process.exchange import ExchangeAnswer, ExchangeRequest, exchange
from culm.tools.tool_context import ToolContext
from culm.wire.codec import clean, printable
from culm.worktrees.notes import WorktreeNote, find_note, remove_note, write_note

log = logging.getLogger(__name__)

GIT_S = 30.0  # For one command of git: a checkout of a large repository takes seconds.
UNDO_S = 3.0  # For one that takes something back: whoever cancelled waits for it.
OUTPUT_BYTES_MAX = 4 << 20  # Some 50,000 paths.
TREES_BYTES_MAX = 32 << 20  # Some 300,000 directories of a commit; it is read once and let go.
FILES_MAX = 200  # Shown by name; a model reads them.
WORDS_CHARS_MAX = 300
SHORT, LONGER = 8, 13  # Characters of an agent's id in its branch: a part or two of a UUID.
_OTHERWISE = "leave out `worktree`"


class WorktreeFailed(Exception):
    """There is no worktree, and nothing is left of the attempt. Says why, and what to do."""

    def __init__(self, why: str, instead: str = "") -> None:
        advice = f"{_OTHERWISE}, or {instead}" if instead else _OTHERWISE
        super().__init__(f"{printable(why)}: {advice}")


@dataclass(frozen=True, slots=True)
class Worktree:
    path: Path  # Without links in it.
    workspace: Path  # The directory in it that is what the workspace is in its repository.
    branch: str
    base: str  # The commit it started from.
    entry: Path  # Where git keeps its state, in the repository: `…/.git/worktrees/<name>`.


@dataclass(frozen=True, slots=True)
class WorktreeOutcome:
    """What became of a worktree whose agent has ended."""

    worktree: Worktree
    kept: bool
    files: Sequence[str] = ()  # Changed or new, seen from the top of the repository.
    files_more: int = 0  # Further ones, which are not named; of very many, not all are counted.
    commits: int = 0
    error: str = ""  # Why its changes are not known, or why it could not be removed.


def describe(settled: WorktreeOutcome) -> str:
    """For whoever started the agent, in one line."""
    where = f"{printable(str(settled.worktree.path))} on branch {settled.worktree.branch}"
    if not settled.kept:
        return "Nothing was changed in its worktree, which is removed."
    if settled.error:
        return f"Its worktree is kept in {where}: {settled.error}."
    files = len(settled.files) + settled.files_more
    return f"Its work is kept in {where}; commits: {settled.commits}, files changed: {files}."


class Worktrees:
    """Those of one workspace's agents."""

    def __init__(self, context: ToolContext) -> None:
        self._context = context
        # Git fails if it finds the entry of another worktree half written: one writes at a time.
        self._lock = asyncio.Lock()
        # One settles a worktree at a time, and the next finds what that one has left.
        self._settling: weakref.WeakValueDictionary[Path, asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )

    async def make(self, workspace: Path, folder: Path, agent_id: str) -> Worktree:
        """A worktree of the last commit at `folder`, which does not exist yet.

        Whatever happens meanwhile, a cancel included: it is made, or nothing of it is left.
        Raises `WorktreeFailed`.
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
        """Its agent has ended: remove it if nothing was changed in it, else say what was.

        What git ignores is no change. Never fails: a worktree that cannot be looked into, or not
        be removed, is kept. It may have been removed before, by us or by somebody else.
        """
        async with self._settling.setdefault(worktree.path, asyncio.Lock()):
            return await self._finish(worktree)

    async def _finish(self, worktree: Worktree) -> WorktreeOutcome:
        has_files, has_entry = await asyncio.to_thread(_what_is_there, worktree)
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
                    # Not by force: git looks again, and refuses if there is something after all.
                    await git.do("worktree", "remove", "--", str(worktree.path))
        except _GitFailed as exc:
            return WorktreeOutcome(worktree, kept=True, error=printable(str(exc)))
        await _remove_branch(git, worktree.branch, worktree.base)
        await asyncio.to_thread(remove_note, worktree.path)
        return WorktreeOutcome(worktree, kept=False)

    async def remove(self, worktree: Worktree) -> bool:
        """Its agent is forgotten. False if there may be work in it, which stays."""
        return not (await self.finish(worktree)).kept

    async def clear(self, folder: Path) -> None:
        """Nobody knows whose it is: remove what is left there, unless there may be work in it.

        Such is what a server leaves that was killed before it had written down who works there.
        """
        folder, note = await asyncio.to_thread(_noted, folder)
        if note is None:
            return
        if note.entry:
            places = Path(note.workspace), note.branch, note.base, Path(note.entry)
            await self.finish(Worktree(folder, *places))
        else:  # It was never handed over, so that nobody has worked there.
            git = _Git(self._context, folder.parent, (f"--git-dir={note.common}",))
            await _undo(git, folder, note)


def _noted(folder: Path) -> tuple[Path, WorktreeNote | None]:
    """A place without links on the way to it, and what is noted. Blocks as the disk does."""
    folder = Path(os.path.realpath(folder.parent)) / folder.name
    return folder, find_note(folder)


# --- making one


@dataclass(frozen=True, slots=True)
class _Repository:
    git: "_Git"
    common: Path  # What all its working trees share.
    inner: Path  # The workspace, seen from the top of its working tree.
    base: str


async def _find_repository(context: ToolContext, workspace: Path) -> _Repository:
    git = _Git(context, workspace)
    asked = await git.ask("rev-parse", "--git-common-dir", "--show-toplevel")
    if asked.exit.code != 0:
        raise _why_no_repository(workspace, _describe(asked))
    lines = os.fsdecode(asked.output).removesuffix("\n").split("\n")
    if len(lines) != 2:
        raise WorktreeFailed(f"{workspace} has a line break in its path")
    common, top, inner = await asyncio.to_thread(_places, workspace, *lines)
    head = await git.ask("rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    if head.exit.code != 0:
        raise WorktreeFailed(f"{top} has no commit to start from", "make one")
    # From here on git is told where the repository is, and does not look for one.
    told = _Git(context, top, (f"--git-dir={common}",))
    base = head.output.decode().strip()
    # What an agent puts into the empty directory of one is no change to git, and would be lost.
    if await _has_submodules(told, base):
        raise WorktreeFailed(f"{top} has submodules, which a worktree would lack")
    return _Repository(told, common, inner, base)


async def _has_submodules(git: "_Git", base: str) -> bool:
    """By what the commit itself says: it need not have a `.gitmodules`. Raises `_GitFailed`."""
    # Directories and submodules, without the files, of which there are many more.
    words = ("ls-tree", "-r", "-d", "-z", "--full-tree", base)
    listed = await git.ask(*words, bytes_max=TREES_BYTES_MAX)
    if listed.exit.code != 0 or listed.is_cut:
        why = "there are too many directories" if listed.is_cut else _describe(listed)
        raise _GitFailed(f"whether there are submodules is not known ({why})")
    return b"\x00160000 " in b"\0" + listed.output


def _why_no_repository(workspace: Path, words: str) -> WorktreeFailed:
    if "not a git repository" in words:
        return WorktreeFailed(f"{workspace} is not in a git repository", "start culm in one")
    if "bare repository" in words or "must be run in a work tree" in words:
        return WorktreeFailed(f"{workspace} is in a bare repository, or in git's own directory")
    return WorktreeFailed(f"{workspace} is in no repository that git takes ({words})")


def _places(workspace: Path, common: str, top: str) -> tuple[Path, Path, Path]:
    """What git said of a repository, if it can have a worktree of ours. Blocks as the disk does."""
    shared, tree = (Path(os.path.realpath(workspace / place)) for place in (common, top))
    if (tree / ".git").is_file() and (".git", "modules") in pairwise(shared.parts):
        raise WorktreeFailed(f"{tree} is a submodule")
    if why := why_git_asks([str(tree)]):
        raise WorktreeFailed(f"{tree} cannot be checked out safely, as {why}")
    here = Path(os.path.realpath(workspace))
    if not here.is_relative_to(tree):
        raise WorktreeFailed(f"the working tree of its repository is elsewhere, in {tree}")
    return shared, tree, here.relative_to(tree)


class _Making:
    """A worktree on its way, and what there is to take back."""

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
            words = ("--no-checkout", "--quiet", "--", str(self._folder), self._note.branch)
            await self._git.do("worktree", "add", *words)
        entry = await asyncio.to_thread(_pointed_at, self._folder / ".git")
        assert entry is not None, "git has made a worktree without an entry"
        # What takes long, several may do at a time.
        inside = self._git.within(entry, self._folder)
        await inside.do("reset", "--hard", "--quiet", "--no-recurse-submodules")
        workspace = await asyncio.to_thread(self._find_workspace)
        self._write_note(workspace=str(workspace), entry=str(entry))
        return Worktree(self._folder, workspace, self._note.branch, self._note.base, entry)

    def _make_folder(self) -> None:
        """Not in a thread: there, a cancel would leave it open whether it was made."""
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._folder.mkdir(mode=0o700)
        except OSError as exc:
            raise WorktreeFailed(f"{self._folder} cannot be made: {exc.strerror}") from exc
        self._has_folder = True
        self._folder = Path(os.path.realpath(self._folder))
        self._write_note()  # Not before: what was there already is not ours to take back.

    def _write_note(self, **known: str) -> None:
        """Not in a thread either, so that it is true whatever comes next."""
        self._note = replace(self._note, **known)
        try:
            write_note(self._folder, self._note)
        except OSError as exc:
            raise WorktreeFailed(f"{self._folder} cannot be noted: {exc.strerror}") from exc

    def _find_workspace(self) -> Path:
        """Blocks as the disk does."""
        inner = self._repository.inner
        workspace = self._folder / inner
        # The commit may have nothing there, or a link to somewhere else.
        if os.path.realpath(workspace) != str(workspace) or not workspace.is_dir():
            raise WorktreeFailed(f"there is no directory {inner} in the last commit", "commit it")
        return workspace

    async def _make_branch(self) -> None:
        base = self._repository.base
        for length in (SHORT, LONGER, len(self._agent_id)):
            name = f"culm/{self._agent_id[:length]}"
            if await self._is_taken(name):
                continue
            self._write_note(branch=name)  # First: cancelled, we do not hear whether it was made.
            # Only if there is none: all zeros stand for that.
            made = await self._git.ask("update-ref", _ref(name), base, "0" * len(base))
            if made.exit.code == 0:
                return
            self._write_note(branch="")
            if not await self._is_taken(name):  # Nobody was faster: something else is wrong.
                raise WorktreeFailed(f"the branch {name} cannot be made ({_describe(made)})")
        raise WorktreeFailed(f"the branch culm/{self._agent_id} exists already")

    async def _is_taken(self, name: str) -> bool:
        found = await self._git.ask("show-ref", "--verify", "--quiet", _ref(name))
        return found.exit.code == 0

    async def undo(self) -> None:
        if self._has_folder:
            await _undo(self._git, self._folder, self._note)


async def _undo(git: "_Git", folder: Path, note: WorktreeNote) -> None:
    """Take back one that was not made. What cannot be is logged: there is something worse to tell.

    It does not wait for the lock: whoever has it may be about to remove a large worktree.
    """
    common = Path(note.common)
    await asyncio.to_thread(_remove_files, folder, common)
    if note.branch:
        await asyncio.to_thread(_remove_lock, common / f"{_ref(note.branch)}.lock")
        await _remove_branch(git, note.branch, note.base)
    await asyncio.to_thread(remove_note, folder)


def _remove_files(folder: Path, common: Path) -> None:
    """The directory, and git's entry for it and for no other; git may have been killed."""
    for place in (folder, *_entries(folder, common)):
        try:
            shutil.rmtree(place)
        except FileNotFoundError:
            continue  # Git has cleaned up behind itself.
        except OSError as exc:
            log.warning("%s of a worktree that was not made is left: %s", place, exc)


def _remove_lock(lock: Path) -> None:
    """Git may have been ended the moment it had made it. Nobody else makes a branch of this id."""
    try:
        lock.unlink(missing_ok=True)
    except OSError as exc:
        log.warning("%s of a branch that was not made is left: %s", lock, exc)


def _entries(folder: Path, common: Path) -> list[Path]:
    """Entries that git has begun for a directory. It names them as that, and may add a number."""
    named = [
        entry
        for entry in (common / "worktrees").glob(f"{glob.escape(folder.name)}*")
        if not entry.name.removeprefix(folder.name).strip("0123456789")
    ]
    # One that points nowhere had not come so far. No other directory has the id of our agent.
    return [entry for entry in named if _pointed_at(entry / "gitdir") in (None, folder / ".git")]


def _pointed_at(file: Path) -> Path | None:
    """The place that a file of git's names: in full, or as seen from where the file is."""
    try:
        said = os.fsdecode(read_file(file, PATH_BYTES_MAX))
    except (OSError, UnreadableFile):
        return None
    place = said.removeprefix("gitdir: ").rstrip("\n")
    return Path(os.path.realpath(file.parent / place)) if place else None


async def _remove_branch(git: "_Git", branch: str, base: str) -> None:
    """If nothing was committed to it: git compares, and removes it, in one step."""
    try:
        await git.do("update-ref", "-d", _ref(branch), base, within_s=UNDO_S)
    except _GitFailed as exc:
        log.info("the branch %s is left, or was gone: %s", branch, exc)


def _ref(branch: str) -> str:
    return f"refs/heads/{branch}"


# --- when its agent has ended


def _what_is_there(worktree: Worktree) -> tuple[bool, bool]:
    return os.path.lexists(worktree.path), os.path.lexists(worktree.entry)


async def _find_changes(context: ToolContext, worktree: Worktree) -> tuple[list[str], int]:
    """The files that differ, and how many commits there are. Raises `_GitFailed`."""
    if why := await asyncio.to_thread(_why_unsafe, worktree):
        raise _GitFailed(f"what was changed in it is not known, as {why}")
    git = _Git(context, worktree.path).within(worktree.entry, worktree.path)
    # The agent may have left its branch, or have removed it.
    heads = ("HEAD", _ref(worktree.branch), f"^{worktree.base}")
    commits = int(await git.do("rev-list", "--count", "--ignore-missing", *heads, "--"))
    # `dirty`: no git is started in a submodule, whose configuration is another one.
    plain = ("-z", "--no-renames", "--ignore-submodules=dirty")
    status = await git.names("status", "--porcelain", "--untracked-files=all", *plain)
    files = {name[3:] for name in status}
    if commits:
        since = (worktree.base, "HEAD")
        files.update(await git.names("diff-tree", "-r", "--name-only", *plain, *since))
    return sorted(files), commits


def _why_unsafe(worktree: Worktree) -> str:
    """Why git might run a program that the agent has put there. Blocks as the disk does."""
    if _pointed_at(worktree.path / ".git") != worktree.entry:
        return f"{worktree.path}/.git was changed"
    return why_git_asks([str(worktree.path)])


# --- git


class _GitFailed(Exception):
    """Git did not do what it was told. Says why."""


@dataclass(frozen=True, slots=True)
class _Git:
    """Git, made harmless, in custody, and bounded in time and in what it says."""

    context: ToolContext
    cwd: Path
    told: Sequence[str] = ()  # Where the repository is.

    def within(self, entry: Path, path: Path) -> "_Git":
        """In a worktree, which need not say by itself where its repository is."""
        return _Git(self.context, path, (f"--git-dir={entry}", f"--work-tree={path}"))

    async def ask(
        self, *words: str, within_s: float = GIT_S, bytes_max: int = OUTPUT_BYTES_MAX
    ) -> ExchangeAnswer:
        """Raises `_GitFailed` if it cannot be run to its end."""
        argv, title = ("git", *self.told, *words), f"git {words[0]}"
        owner = ProcessOwner(self.context.workspace_id, "agent")
        cwd, env = str(self.cwd), self._env()
        telling = ExchangeRequest(argv, cwd, env, owner, title, b"", within_s, bytes_max)
        try:
            answer = await exchange(self.context.processes, self.context.clock, telling)
        except (ProcessStartFailed, OSError) as exc:
            raise _GitFailed(f"`{title}` cannot be run ({exc})") from exc
        if answer.is_late:
            raise _GitFailed(f"`{title}` took longer than {within_s:g} s")
        if answer.exit.code is None:
            raise _GitFailed(f"`{title}` was killed")
        return answer

    async def do(self, *words: str, within_s: float = GIT_S) -> str:
        """What it says, if it succeeds; raises `_GitFailed`."""
        return os.fsdecode(await self._do(words, within_s)).removesuffix("\n")

    async def names(self, *words: str) -> list[str]:
        """What it lists; of very many, the first. Raises `_GitFailed`."""
        *names, _ = (await self._do(words, GIT_S)).split(b"\0")
        return [clean(name.decode(errors="replace")) for name in names]

    async def _do(self, words: Sequence[str], within_s: float) -> bytes:
        answer = await self.ask(*words, within_s=within_s)
        if answer.exit.code != 0:
            raise _GitFailed(f"`git {words[0]}` failed ({_describe(answer)})")
        return answer.output

    def _env(self) -> dict[str, str]:
        env = unasked_env(command_env(self.context.env(), str(self.cwd)), self.context.inside.root)
        # The workspace may be a directory of a larger repository, which git shall find.
        env.pop("GIT_CEILING_DIRECTORIES", None)
        return {**env, "LC_ALL": "C"}  # We read some of its words.


def _describe(answer: ExchangeAnswer) -> str:
    """The first thing that git calls wrong."""
    lines = clean(answer.errors.decode(errors="replace")).splitlines()
    wrong = [line[7:] for line in lines if line.startswith(("fatal: ", "error: "))]
    said = next(iter(wrong or lines), f"it ended with status {answer.exit.code}")
    return printable(said.strip())[:WORDS_CHARS_MAX]
