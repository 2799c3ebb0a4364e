"""ripgrep: which one, what it is told, and what is made of its answer.

It runs twice. First it searches the tree with all cores and names the files that match, in any
order. The first of them in ours are then opened here, component by component and through no link,
and it is given these descriptors for the lines. So what is shown was read inside, though somebody
swapped a link while the tree was searched; and no pattern makes it say more than fits.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from culm.processes.base import ProcessStartFailed
from culm.tools.files.file_executor import FileExecutor, StopFlag
from culm.tools.files.safe_open import OpenRefused, open_file, pass_directory
from culm.tools.process.child import (
    CallDeadline,
    ChildAnswer,
    ChildRequest,
    ProcessAccess,
    ask,
    open_deadline,
    open_memory,
)
from culm.tools.search.patterns import (
    PATTERN_CHARS_MAX,
    RULES_MAX,
    SKIPPED_DIRECTORIES,
    Glob,
    expand_braces,
    parse_glob,
)
from culm.tools.search.process import LINE_CHARS_SHOWN, SearchEnd, SearchMatch, around, is_included
from culm.tools.search.query import LineMatches, LineSearch, OwnedDescriptors

VERSION_MIN = 13  # The first that knows every option below.
# Text of that size is data. ripgrep keeps a line in memory, and all of this may be one.
FILE_BYTES_MAX = 64 << 20
LINES_S = 3.0  # For the second run, which reads a hundred files.
_CHUNK_BYTES = 1 << 20
_FIRST_DESCRIPTOR = 3
_AROUND_BYTES = 4 * LINE_CHARS_SHOWN + 16  # On either side of a match; UTF-8 takes four at most.
_PLAIN_GLOB = re.compile(r"[\w.*?-]+", re.ASCII)
_VERSION = re.compile(rb"ripgrep (\d+)\.")
_RECORD = re.compile(rb"/dev/fd/(\d+)\0(\d+):(\d+):(\d+):")
_UNREADABLE = re.compile(rb"(?:rg: )?\./")
# Nobody's settings, no other program, no colours; bytes as they are, lines as we count them.
_COMMON = (
    "--no-config", "--color=never", "--no-follow", "--no-mmap", "--no-pre", "--no-search-zip",
    "--encoding=none", "--crlf", "--null", "--no-stats", "--no-ignore-messages",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RipgrepProgram:
    """An executable file, and what tells it from another one at the same path."""

    path: str
    stamp: tuple[int, int, int]


def find_program(path_variable: str, root: Path) -> RipgrepProgram | None:
    """The first `rg` of a PATH that no project put there. Blocks as the disk does."""
    for folder in path_variable.split(os.pathsep):
        file = Path(folder, "rg")
        try:
            real = Path(os.path.realpath(file))
            status = real.stat()
        except (OSError, ValueError):
            continue
        is_ours = file.is_relative_to(root) or real.is_relative_to(root)
        if file.is_absolute() and not is_ours and real.is_file() and os.access(real, os.X_OK):
            return RipgrepProgram(str(real), (status.st_dev, status.st_ino, status.st_mtime_ns))
    return None


class Ripgrep:
    """Searches with ripgrep; one a workspace, which remembers which programs are fit."""

    def __init__(self, hands: ProcessAccess, work: FileExecutor) -> None:
        self._hands = hands
        self._work = work
        self._fit: dict[RipgrepProgram, bool] = {}  # Asked once; another file asks anew.

    async def search(
        self, program: RipgrepProgram, pattern: str, sought: LineSearch, deadline: CallDeadline
    ) -> LineMatches | None:
        """What it finds; None if it cannot, and another engine should."""
        try:
            if not await self._is_fit(program, sought, deadline):
                return None
            with OwnedDescriptors() as handles:
                return await self._search(program, pattern, sought, handles, deadline)
        except ProcessStartFailed:
            return None

    async def _is_fit(
        self, program: RipgrepProgram, sought: LineSearch, deadline: CallDeadline
    ) -> bool:
        if program not in self._fit:
            said = bytearray()

            def hear(data: bytes) -> bool:
                said.extend(data)
                return len(said) < _CHUNK_BYTES

            argv = (program.path, "--no-config", "--version")
            question = ChildRequest(argv, "/", sought.owner, "rg --version", hear)
            answered = await ask(self._hands, question, deadline)
            if not answered.is_whole:
                return False
            version = _VERSION.match(said)
            self._fit = {program: version is not None and int(version[1]) >= VERSION_MIN}
        return self._fit[program]

    async def _search(
        self,
        program: RipgrepProgram,
        pattern: str,
        sought: LineSearch,
        handles: OwnedDescriptors,
        deadline: CallDeadline,
    ) -> LineMatches | None:
        names = FileNameCollector(sought)
        unreadable: int | None = 0
        if sought.place.is_directory:
            unreadable = await self._name_files(program, pattern, names, sought, deadline)
            if unreadable is None:
                return None
        kept = names.first() if sought.place.is_directory else [sought.place.parts]
        texts = await self._work.run(lambda stop: _open_texts(kept, sought, handles, stop))
        unreadable += texts.unreadable
        spots = MatchCollector()
        is_whole = True
        if texts.files:
            with open_deadline(self._hands.clock, LINES_S) as soon:
                question = self._lines(program, pattern, texts, spots, sought)
                answered = await ask(self._hands, question, soon)
            is_whole = answered.is_whole
            if is_whole and answered.exit.code not in (0, 1):
                return None
        matches = await self._work.run(lambda _: _matches(texts, spots, sought.matches_max))
        has_more = len(spots.found) > len(matches) or (
            names.count > len(kept) and len(matches) < sought.matches_max
        )
        if deadline.is_over or not is_whole or texts.is_stopped:
            return LineMatches(matches, None, is_stopped=True)
        return LineMatches(matches, SearchEnd("", unreadable, has_more=has_more), is_stopped=False)

    async def _name_files(
        self,
        program: RipgrepProgram,
        pattern: str,
        names: "FileNameCollector",
        sought: LineSearch,
        deadline: CallDeadline,
    ) -> int | None:
        """Let it name the files; returns how many it could not read, None if it failed."""
        with open_memory(ignore_file(sought.gitignore)) as rules:
            start = "/".join((".", *sought.place.parts))
            argv = (
                program.path,
                *_COMMON,
                "--files-with-matches",
                "--hidden",
                "--no-ignore",
                f"--ignore-file=/dev/fd/{_FIRST_DESCRIPTOR}",
                f"--max-filesize={FILE_BYTES_MAX}",
                *type_options(sought.include),
                f"--regexp={pattern}",
                "--",
                start,
            )
            question = ChildRequest(
                argv,
                sought.place.root,
                sought.owner,
                f"rg {sought.pattern}",
                names.receive,
                descriptors=(rules,),
            )
            answered = await ask(self._hands, question, deadline)
        return _count_unreadable(answered)

    def _lines(
        self,
        program: RipgrepProgram,
        pattern: str,
        texts: "_Texts",
        spots: "MatchCollector",
        sought: LineSearch,
    ) -> ChildRequest:
        numbers = range(_FIRST_DESCRIPTOR, _FIRST_DESCRIPTOR + len(texts.files))
        argv = (
            program.path,
            *_COMMON,
            "--text",
            "--threads=1",
            "--with-filename",
            "--no-heading",
            "--line-number",
            "--column",
            "--byte-offset",
            "--max-columns=1",  # Where a line is, not what is in it: that may be megabytes.
            f"--max-count={sought.matches_max + 1}",
            f"--regexp={pattern}",
            "--",
            *(f"/dev/fd/{number}" for number in numbers),
        )
        descriptors = [file.descriptor for file in texts.files]
        title = f"rg {sought.pattern}"
        return ChildRequest(argv, "/", sought.owner, title, spots.receive, descriptors=descriptors)


def ignore_file(gitignore: str) -> bytes:
    """The rules of a .gitignore as our own search takes them, and what it never looks into."""
    lines = [line for line in gitignore.splitlines() if len(line) <= PATTERN_CHARS_MAX]
    # Braces are characters to git.
    kept = [re.sub(r"(?<!\\)([{}])", r"\\\1", line) for line in lines[:RULES_MAX]]
    skipped = [f"{name}/" for name in sorted(SKIPPED_DIRECTORIES)]
    return "\n".join([*kept, *skipped, ""]).encode(errors="replace")


def type_options(include: str) -> list[str]:
    """What spares ripgrep files that `include` leaves out; the names are matched again by us."""
    globs = expand_braces(include) if include else []
    if not all(_PLAIN_GLOB.fullmatch(glob) for glob in globs) or not globs:
        return []
    return [*(f"--type-add=included:{glob}" for glob in globs), "--type=included"]


def _count_unreadable(answered: ChildAnswer) -> int | None:
    lines = answered.errors.splitlines()
    unreadable = sum(1 for line in lines if _UNREADABLE.match(line))
    is_fine = answered.exit.code in (0, 1) or (answered.exit.code == 2 and unreadable > 0)
    return unreadable if is_fine or not answered.is_whole else None


class FileNameCollector:
    """Hears the names of files; keeps the first of them, in the order of our own walk."""

    def __init__(self, sought: LineSearch) -> None:
        self.count = 0
        self._include: Glob | None = (
            parse_glob(sought.include, hidden=True) if sought.include else None
        )
        self._skip = len(sought.place.parts)
        # Some of them may turn out to be no text.
        self._kept_max = 4 * (sought.matches_max + 1)
        self._kept: list[str] = []
        self._rest = b""

    def receive(self, data: bytes) -> bool:
        *names, self._rest = (self._rest + data).split(b"\0")
        for name in names:
            path = os.fsdecode(name.removeprefix(b"./"))
            if self._include is None or is_included(self._include, path.split("/"), self._skip):
                self.count += 1
                # As `walk` goes: by name within a directory, each one whole before the next.
                self._kept.append(path.replace("/", "\0"))
        if len(self._kept) > 2 * self._kept_max:
            self._cut()
        return True

    def first(self) -> list[tuple[str, ...]]:
        self._cut()
        return [tuple(path.split("\0")) for path in self._kept]

    def _cut(self) -> None:
        self._kept.sort()
        del self._kept[self._kept_max :]


@dataclass(frozen=True, slots=True)
class _Text:
    path: str
    descriptor: int


@dataclass(slots=True)
class _Texts:
    files: list[_Text]
    unreadable: int = 0
    is_stopped: bool = False


def _open_texts(
    paths: Sequence[tuple[str, ...]], sought: LineSearch, handles: OwnedDescriptors, stop: StopFlag
) -> _Texts:
    """The first files that are texts: as many as could each give a line that is shown."""
    texts = _Texts([])
    for parts in paths:
        if len(texts.files) > sought.matches_max:
            break
        if stop.is_set():
            texts.is_stopped = True
            break
        try:
            descriptor = handles.add(_open_below(sought, parts))
            if _is_text(descriptor):
                texts.files.append(_Text("/".join(parts), descriptor))
        except (OSError, OpenRefused):
            texts.unreadable += 1  # Or it is none any more, or too large.
    return texts


def _open_below(sought: LineSearch, parts: tuple[str, ...]) -> int:
    """Open a file below the place of the search, no component of which is a link."""
    if not sought.place.is_directory:
        return os.dup(sought.place.descriptor)
    *folders, name = parts[len(sought.place.parts) :]
    within = os.dup(sought.place.descriptor)
    try:
        for folder in folders:
            inner = pass_directory(folder, within)
            os.close(within)
            within = inner
        return open_file(name, within, name)[0]
    finally:
        os.close(within)


def _is_text(descriptor: int) -> bool:
    """Whether it has no NUL byte; raises `Refused` if it is too large to tell."""
    offset = 0
    while data := os.pread(descriptor, _CHUNK_BYTES, offset):
        if b"\0" in data:
            return False
        offset += len(data)
        if offset > FILE_BYTES_MAX:
            raise OpenRefused("too large")
    return True


class MatchCollector:
    """Hears where lines match: the number of a descriptor, a line, a column and an offset."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int, int, int]] = []
        self._rest = b""

    def receive(self, data: bytes) -> bool:
        *records, self._rest = (self._rest + data).split(b"\n")
        for record in records:
            if spot := _RECORD.match(record):
                descriptor, line, column, offset = map(int, spot.groups())
                self.found.append((descriptor - _FIRST_DESCRIPTOR, line, column, offset))
        return True


def _matches(texts: _Texts, spots: MatchCollector, matches_max: int) -> list[SearchMatch]:
    found: list[SearchMatch] = []
    for number, line, column, offset in sorted(spots.found)[:matches_max]:
        file = texts.files[number]
        found.append(SearchMatch(file.path, line, line_at(file.descriptor, offset, column)))
    return found


def line_at(descriptor: int, offset: int, column: int) -> str:
    """A line that begins at `offset`, or of a long one what stands around its `column`, from 1."""
    match = offset + column - 1
    begin = max(offset, match - _AROUND_BYTES)
    before = os.pread(descriptor, match - begin, begin)
    after = os.pread(descriptor, _AROUND_BYTES, match).partition(b"\n")[0].removesuffix(b"\r")
    text = before.decode(errors="replace")
    return around(text + after.decode(errors="replace"), len(text))
