"""Search with ripgrep: finding the program, its arguments, and its output.

It runs three times. The first run lists the .gitignore files of the tree; their rules become one
file of rules, so that they mean the same as in our own search. The second run searches the tree
with all cores and lists the matching files in any order. The first files in our order are then
opened here, component by component and through no link, and the third run gets these descriptors
and finds the lines. So all text shown was read inside the workspace, even if a link was swapped
during the search; and no pattern makes the output exceed its bounds.
"""

import os
import re
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, starmap
from pathlib import Path
from typing import Literal

from msgspec import Struct

from culm.processes.base import ProcessOwner, ProcessStartFailed
from culm.tools.files.file_executor import FileExecutor, StopFlag
from culm.tools.files.paths import OpenPath
from culm.tools.files.safe_open import OpenRefused, open_file, pass_directory, read_gitignore
from culm.tools.process.child import (
    CallDeadline,
    ChildAnswer,
    ChildRequest,
    ProcessAccess,
    open_deadline,
    open_memory,
    run_child,
)
from culm.tools.search.patterns import (
    SKIPPED_DIRECTORIES,
    Glob,
    expand_braces,
    gitignore_lines,
    parse_glob,
)
from culm.tools.search.process import LINE_CHARS_SHOWN, SearchEnd, SearchMatch, around, is_included

VERSION_MIN = 13  # The first version with every option below.
# Larger files are data. ripgrep keeps a line in memory, and the whole file may be one line.
FILE_BYTES_MAX = 64 << 20
LINES_S = 3.0  # For the last run, which reads a hundred files.
GITIGNORES_MAX = 10_000  # Files; those beyond are not applied.
RULES_BYTES_MAX = 4 << 20  # Of all of them together, for ripgrep.
_CHUNK_BYTES = 1 << 20
_FIRST_DESCRIPTOR = 3
_AROUND_BYTES = 4 * LINE_CHARS_SHOWN + 16  # On either side of a match; UTF-8 takes up to four.
_PLAIN_GLOB = re.compile(r"[\w.*?-]+", re.ASCII)
_VERSION = re.compile(rb"ripgrep (\d+)\.")
_RECORD = re.compile(rb"/dev/fd/(\d+)\0(\d+):(\d+):(\d+):")
_SPECIAL = re.compile(r"[\\*?\[\]{}!# ]")
_UNREADABLE = re.compile(rb"(?:rg: )?\./")
# No configuration, no other program, no colors; bytes unchanged, lines counted as we do.
_COMMON = (
    "--no-config", "--color=never", "--no-follow", "--no-mmap", "--no-pre", "--no-search-zip",
    "--encoding=none", "--crlf", "--null", "--no-stats", "--no-ignore-messages",
)  # fmt: skip


class LineSearch(Struct, frozen=True):
    """One search for lines. Its start stays open until the search has ended."""

    start: OpenPath
    pattern: str
    literal: bool
    include: str
    gitignores: Sequence[str]  # Of the directories above `start`, from its root down.
    matches_max: int
    owner: ProcessOwner


class LineMatches(Struct, frozen=True):
    """The matches of a search."""

    matches: list[SearchMatch]
    end: SearchEnd | None  # None if the search is incomplete ...
    is_stopped: bool  # ... because of the deadline.


class OwnedDescriptors:
    """Descriptors with one owner: a descriptor added after the end is closed at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[int] = []
        self._is_over = False

    def __enter__(self) -> "OwnedDescriptors":
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_over = True
            for descriptor in self._open:
                os.close(descriptor)

    def add(self, descriptor: int) -> int:
        with self._lock:
            if not self._is_over:
                self._open.append(descriptor)
                return descriptor
        os.close(descriptor)
        raise OSError("the search has ended")


class RipgrepProgram(Struct, frozen=True):
    """An executable file, and a stamp that distinguishes it from another at the same path."""

    path: str
    stamp: tuple[int, int, int]


def find_program(path_variable: str, root: Path) -> RipgrepProgram | None:
    """Find the first `rg` of a PATH that is outside the project. Does blocking disk I/O."""
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
    """Searches with ripgrep; one per workspace, which remembers the usable programs."""

    def __init__(self, access: ProcessAccess, executor: FileExecutor) -> None:
        self._access = access
        self._executor = executor
        self._usable: dict[RipgrepProgram, bool] = {}  # Checked once for each file.

    async def search(
        self, program: RipgrepProgram, pattern: str, search: LineSearch, deadline: CallDeadline
    ) -> LineMatches | None:
        """Return the matches; None if ripgrep cannot search, and another engine should."""
        try:
            if not await self._is_usable(program, search, deadline):
                return None
            with OwnedDescriptors() as owned:
                return await self._search(program, pattern, search, owned, deadline)
        except ProcessStartFailed:
            return None

    async def _is_usable(
        self, program: RipgrepProgram, search: LineSearch, deadline: CallDeadline
    ) -> bool:
        if program not in self._usable:
            version_text = bytearray()

            def receive(data: bytes) -> bool:
                version_text.extend(data)
                return len(version_text) < _CHUNK_BYTES

            argv = (program.path, "--no-config", "--version")
            request = ChildRequest(argv, "/", search.owner, "rg --version", receive)
            answer = await run_child(self._access, request, deadline)
            if not answer.is_whole:
                return False
            version = _VERSION.match(version_text)
            self._usable = {program: version is not None and int(version[1]) >= VERSION_MIN}
        return self._usable[program]

    async def _search(
        self,
        program: RipgrepProgram,
        pattern: str,
        search: LineSearch,
        owned: OwnedDescriptors,
        deadline: CallDeadline,
    ) -> LineMatches | None:
        # Some of the files may not be text.
        names = FileNameCollector(
            search.include, len(search.start.parts), 4 * (search.matches_max + 1)
        )
        unreadable: int | None = 0
        if search.start.is_directory:
            unreadable = await self._name_files(program, pattern, names, search, deadline)
            if unreadable is None:
                return None
        kept = names.first() if search.start.is_directory else [search.start.parts]
        texts = await self._executor.run(lambda stop: _open_texts(kept, search, owned, stop))
        unreadable += texts.unreadable
        positions = MatchCollector()
        is_whole = True
        if texts.files:
            with open_deadline(self._access.clock, LINES_S) as soon:
                request = self._lines(program, pattern, texts, positions, search)
                answer = await run_child(self._access, request, soon)
            is_whole = answer.is_whole
            if is_whole and answer.exit.code not in (0, 1):
                return None
        matches = await self._executor.run(lambda _: _matches(texts, positions, search.matches_max))
        has_more = len(positions.found) > len(matches) or (
            names.count > len(kept) and len(matches) < search.matches_max
        )
        if deadline.is_over or not is_whole or texts.is_stopped:
            return LineMatches(matches, None, is_stopped=True)
        return LineMatches(matches, SearchEnd("", unreadable, has_more=has_more), is_stopped=False)

    async def _name_files(
        self,
        program: RipgrepProgram,
        pattern: str,
        names: "FileNameCollector",
        search: LineSearch,
        deadline: CallDeadline,
    ) -> int | None:
        """Find the matching files; return the number of unreadable ones, None if it failed."""
        rules = await self._read_rules(program, search, deadline)
        options = (
            "--files-with-matches",
            f"--max-filesize={FILE_BYTES_MAX}",
            *type_options(search.include),
            f"--regexp={pattern}",
        )
        answer = await self._list_files(program, options, rules, names, search, deadline)
        return _count_unreadable(answer)

    async def _read_rules(
        self, program: RipgrepProgram, search: LineSearch, deadline: CallDeadline
    ) -> bytes:
        """Return the rules of every .gitignore above and in the tree, the upper ones first."""
        names = FileNameCollector("", 0, GITIGNORES_MAX)
        if search.start.is_inside:
            # A glob also finds a .gitignore that hides itself.
            options = ("--files", "--glob=.gitignore")
            await self._list_files(program, options, ignore_file([]), names, search, deadline)
        above = [(search.start.parts[:depth], text) for depth, text in enumerate(search.gitignores)]
        files = sorted(names.first(), key=len)
        return await self._executor.run(
            lambda stop: ignore_file(chain(above, _read_gitignores(files, search, stop)))
        )

    async def _list_files(
        self,
        program: RipgrepProgram,
        options: Sequence[str],
        rules: bytes,
        names: "FileNameCollector",
        search: LineSearch,
        deadline: CallDeadline,
    ) -> ChildAnswer:
        """Run ripgrep over the tree, with no rules but these."""
        with open_memory(rules) as descriptor:
            argv = (
                program.path,
                *_COMMON,
                "--hidden",
                "--no-ignore",
                f"--ignore-file=/dev/fd/{_FIRST_DESCRIPTOR}",
                *options,
                "--",
                "/".join((".", *search.start.parts)),
            )
            request = ChildRequest(
                argv,
                search.start.root,
                search.owner,
                f"rg {search.pattern}",
                names.receive,
                descriptors=(descriptor,),
            )
            return await run_child(self._access, request, deadline)

    def _lines(
        self,
        program: RipgrepProgram,
        pattern: str,
        texts: "_Texts",
        positions: "MatchCollector",
        search: LineSearch,
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
            "--max-columns=1",  # The position of a line, not its text: that may be megabytes.
            f"--max-count={search.matches_max + 1}",
            f"--regexp={pattern}",
            "--",
            *(f"/dev/fd/{number}" for number in numbers),
        )
        descriptors = [file.descriptor for file in texts.files]
        title = f"rg {search.pattern}"
        return ChildRequest(
            argv, "/", search.owner, title, positions.receive, descriptors=descriptors
        )


def ignore_file(gitignores: Iterable[tuple[tuple[str, ...], str]]) -> bytes:
    """Return one file of rules that means the same at the root as each .gitignore in its directory.

    The directories that our own search skips come last, so no rule can show them again.
    """
    data = bytearray()
    for line in chain.from_iterable(starmap(_rebased, gitignores)):
        if len(data) >= RULES_BYTES_MAX:
            break  # The rest is not even read.
        data += line.encode(errors="surrogateescape") + b"\n"
    for name in sorted(SKIPPED_DIRECTORIES):
        data += f"{name}/\n".encode()
    return bytes(data)


def _rebased(directory: tuple[str, ...], text: str) -> Iterator[str]:
    prefix = "".join(f"/{_SPECIAL.sub(_escaped, name)}" for name in directory)
    if "\n" in prefix:
        return  # A line cannot name it.
    for line in gitignore_lines(text):
        # Braces are literal to git.
        body = re.sub(r"(?<!\\)([{}])", r"\\\1", line.body)
        if prefix and body.strip("/"):
            body = f"{prefix}{'/**/' if line.by_name else '/'}{body.lstrip('/')}"
        yield body if line.hides else f"!{body}"


def _escaped(found: re.Match[str]) -> str:
    return f"\\{found[0]}"


def type_options(include: str) -> list[str]:
    """Return options that skip files not in `include`; the names are matched again later."""
    globs = expand_braces(include) if include else []
    if not all(_PLAIN_GLOB.fullmatch(glob) for glob in globs) or not globs:
        return []
    return [*(f"--type-add=included:{glob}" for glob in globs), "--type=included"]


def _count_unreadable(answer: ChildAnswer) -> int | None:
    lines = answer.errors.splitlines()
    unreadable = sum(1 for line in lines if _UNREADABLE.match(line))
    is_fine = answer.exit.code in (0, 1) or (answer.exit.code == 2 and unreadable > 0)
    return unreadable if is_fine or not answer.is_whole else None


class FileNameCollector:
    """Collects names of files; keeps the first of them, in the order of our own walk."""

    def __init__(self, include: str, skip: int, kept_max: int) -> None:
        """`include` is a glob for names, or for paths without their first `skip` parts."""
        self.count = 0
        self._include: Glob | None = parse_glob(include, hidden=True) if include else None
        self._skip = skip
        self._kept_max = kept_max
        self._kept: list[str] = []
        self._rest = b""

    def receive(self, data: bytes) -> bool:
        *names, self._rest = (self._rest + data).split(b"\0")
        for name in names:
            path = os.fsdecode(name.removeprefix(b"./"))
            if self._include is None or is_included(self._include, path.split("/"), self._skip):
                self.count += 1
                # In the order of `walk`: by name within a directory, each one complete before the
                # next.
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


class _Text(Struct, frozen=True):
    path: str
    descriptor: int


class _Texts(Struct):
    files: list[_Text]
    unreadable: int = 0
    is_stopped: bool = False


def _open_texts(
    paths: Sequence[tuple[str, ...]], search: LineSearch, owned: OwnedDescriptors, stop: StopFlag
) -> _Texts:
    """Open the first text files: as many as could each contribute a line that is shown."""
    texts = _Texts([])
    for parts in paths:
        if len(texts.files) > search.matches_max:
            break
        if stop.is_set():
            texts.is_stopped = True
            break
        try:
            descriptor = owned.add(_open_below(search, parts))
            if _is_text(descriptor):
                texts.files.append(_Text("/".join(parts), descriptor))
        except (OSError, OpenRefused):
            texts.unreadable += 1  # Or it is gone, or too large.
    return texts


def _open_below(search: LineSearch, parts: tuple[str, ...]) -> int:
    """Open a file below the start of the search through no link."""
    if not search.start.is_directory:
        return os.dup(search.start.descriptor)
    with _open_directory_of(search, parts) as within:
        return open_file(parts[-1], within, parts[-1])[0]


@contextmanager
def _open_directory_of(search: LineSearch, parts: tuple[str, ...]) -> Generator[int]:
    within = os.dup(search.start.descriptor)
    try:
        for folder in parts[len(search.start.parts) : -1]:
            inner = pass_directory(folder, within)
            os.close(within)
            within = inner
        yield within
    finally:
        os.close(within)


def _read_gitignores(
    files: Sequence[tuple[str, ...]], search: LineSearch, stop: StopFlag
) -> Iterator[tuple[tuple[str, ...], str]]:
    for parts in files:
        if stop.is_set():
            return
        with suppress(OSError), _open_directory_of(search, parts) as within:
            yield parts[:-1], read_gitignore(within)


def _is_text(descriptor: int) -> bool:
    """Return True if it has no NUL byte; raises `OpenRefused` if it is too large to check."""
    offset = 0
    while data := os.pread(descriptor, _CHUNK_BYTES, offset):
        if b"\0" in data:
            return False
        offset += len(data)
        if offset > FILE_BYTES_MAX:
            raise OpenRefused("too large")
    return True


class MatchCollector:
    """Collects the positions of matches: descriptor, line, column and offset."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int, int, int]] = []
        self._rest = b""

    def receive(self, data: bytes) -> bool:
        *records, self._rest = (self._rest + data).split(b"\n")
        for record in records:
            if position := _RECORD.match(record):
                descriptor, line, column, offset = map(int, position.groups())
                self.found.append((descriptor - _FIRST_DESCRIPTOR, line, column, offset))
        return True


def _matches(texts: _Texts, positions: MatchCollector, matches_max: int) -> list[SearchMatch]:
    found: list[SearchMatch] = []
    for number, line, column, offset in sorted(positions.found)[:matches_max]:
        file = texts.files[number]
        found.append(SearchMatch(file.path, line, line_at(file.descriptor, offset, column)))
    return found


def line_at(descriptor: int, offset: int, column: int) -> str:
    """Return the line at `offset`; if it is long, the part around its `column`, from 1."""
    match = offset + column - 1
    begin = max(offset, match - _AROUND_BYTES)
    before = os.pread(descriptor, match - begin, begin)
    after = os.pread(descriptor, _AROUND_BYTES, match).partition(b"\n")[0].removesuffix(b"\r")
    text = before.decode(errors="replace")
    return around(text + after.decode(errors="replace"), len(text))


# --- regular expressions, translated from Python to ripgrep where both mean the same
#
# The pattern of a model is in the syntax of Python; ripgrep uses that of Rust. The common subset is
# translated piece by piece; for the rest (look-around, back-references, flags in the middle,
# errors) the result is None, and our own search takes the pattern as it is. So a pattern
# means the same on every machine, except for the letters of rare scripts.


_META = frozenset("\\.+*?()|[]{}^$#&-~")
_FLAGS = re.compile(r"\(\?([ims]+)\)")
_REPEAT = re.compile(r"(?:[*+?]|\{(\d*)(,?)(\d*)\})\??")
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})")
_CONTROLS = {"t": "\t", "f": "\f", "v": "\v", "a": "\a"}
_SETS = frozenset("dDwWsS")
_CODE_POINT_MAX = 0x10FFFF
# A return before the end of a line is not part of the line; our own search never sees it.
_BUT_RETURN = r"--[\r]]"


class _Unknown(Exception):
    """A construct that is not common to both, or an error."""


def for_ripgrep(pattern: str, *, literal: bool) -> str | None:
    """Translate a pattern to the syntax of Rust; None if that is not possible."""
    try:
        return "".join(map(_literal, pattern)) if literal else _Reader(pattern).read()
    except _Unknown:
        return None


def _literal(character: str) -> str:
    if character in "\n\r\0" or "\ud800" <= character <= "\udfff":
        raise _Unknown  # It is in no line, or cannot be passed as an argument.
    if character in _META:
        return f"\\{character}"
    return character if character.isprintable() else f"\\x{{{ord(character):x}}}"


class _Reader:
    """Translates a pattern from left to right, once."""

    def __init__(self, pattern: str) -> None:
        flags = _FLAGS.match(pattern)
        self._text = pattern
        self._at = flags.end() if flags else 0
        # The other flags have no effect within one line.
        self._written = ["(?i)"] if flags and "i" in flags[1] else []

    def read(self) -> str:
        depth = 0
        # A repetition may follow a piece that matches text and is not repeated yet.
        before: Literal["piece", "other"] = "other"
        while self._at < len(self._text):
            if self._repeat(may_repeat=before == "piece"):
                before = "other"
                continue
            character = self._next()
            before = "other" if character in "^$|(" else "piece"
            if character == "(":
                depth += 1
                self._written.append(self._group())
            elif character == ")":
                depth -= 1
                if depth < 0:
                    raise _Unknown
                self._written.append(")")
            elif character in "^$|":
                self._written.append(character)
            elif character == ".":
                self._written.append(r"[^\r\n]")
            elif character == "[":
                self._written.append(self._set())
            elif character == "\\" and self._text[self._at : self._at + 1] == "b":
                self._at += 1
                self._written.append(r"\b")
                before = "other"
            elif character == "\\":
                self._written.append(self._escape())
            else:
                self._written.append(_literal(character))
        if depth:
            raise _Unknown
        return "".join(self._written)

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise _Unknown
        self._at += 1
        return self._text[self._at - 1]

    def _repeat(self, *, may_repeat: bool) -> bool:
        found = _REPEAT.match(self._text, self._at)
        if found is None or found[0] in ("{}", "{}?"):
            return False
        if not may_repeat:
            raise _Unknown
        self._at = found.end()
        if not found[0].startswith("{"):
            self._written.append(found[0])
            return True
        low, comma, high = found[1] or "0", found[2], found[3]
        if comma and high and int(low) > int(high):
            raise _Unknown
        lazy = "?" if found[0].endswith("?") else ""
        self._written.append(f"{{{low}{comma}{high}}}{lazy}")
        return True

    def _group(self) -> str:
        if self._text.startswith("?:", self._at):
            self._at += 2
        elif self._text.startswith("?", self._at):
            raise _Unknown
        return "(?:"

    def _escape(self) -> str:
        character = self._next()
        if character in _SETS:
            return f"[\\{character}{_BUT_RETURN}"
        self._at -= 1
        return _literal(self._escaped())

    def _escaped(self) -> str:
        """Return the character that an escape stands for; its backslash is consumed."""
        code = _CODE.match(self._text, self._at)
        if code is not None:
            self._at = code.end()
            number = int(code[1] or code[2] or code[3], 16)
            if number > _CODE_POINT_MAX:
                raise _Unknown
            return chr(number)
        character = self._next()
        if character in _CONTROLS:
            return _CONTROLS[character]
        if character.isalnum():
            raise _Unknown
        return character

    def _set(self) -> str:
        negated = self._text.startswith("^", self._at)
        self._at += negated
        items: list[str] = []
        while not items or not self._text.startswith("]", self._at):
            items.append(self._item())
        self._at += 1
        return f"[[{'^' if negated else ''}{''.join(items)}]{_BUT_RETURN}"

    def _item(self) -> str:
        low = self._member()
        rest = self._text[self._at : self._at + 2]
        if not rest.startswith("-") or rest in ("-]", "-"):
            return low if len(low) > 1 else _literal(low)
        self._at += 1
        high = self._member()
        if len(low) > 1 or len(high) > 1 or low > high:
            raise _Unknown
        return f"{_literal(low)}-{_literal(high)}"

    def _member(self) -> str:
        """Read a member of a set: one character, or a backslash and the letter of a class."""
        character = self._next()
        if character != "\\":
            return character
        if self._text[self._at : self._at + 1] in _SETS:
            return f"\\{self._next()}"
        return self._escaped()
