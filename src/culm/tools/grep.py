"""`grep`: lines of files by a regular expression, matched in a process of its own.

Owns that process: it has its own session, is killed when the call is cancelled or out of time, and
is always reaped. What it does, and why it is a process, is `search.py`. The thread that started it
reads and reaps it; no event loop is involved, so it makes no difference which one there is.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

import culm
from culm.tools.base import Result
from culm.tools.file_tool import FileTool, PathText, make_spec, metadata
from culm.tools.glob import notes, read_gitignore
from culm.tools.inside import Inside
from culm.tools.opening import Refused, shown
from culm.tools.patterns import PATTERN_CHARS_MAX, parse_glob
from culm.tools.search import FILE_BYTES_MAX, LINE_CHARS_SHOWN, End, Match, Query
from culm.tools.view import size_text
from culm.tools.work import FileWork, Stop
from culm.wire.codec import clean

MATCHES_MAX = 100
_WORD_BYTES_MAX = 12 * (LINE_CHARS_SHOWN + 4096 + 100)  # One line of JSON, all of it escaped.
# Isolated and without site-packages: it starts in a third of the time, and no project's file or
# variable can change what it does.
COMMAND = (
    sys.executable, "-I", "-S", "-X", "utf8", "-W", "ignore", "-c",
    "import sys; sys.path.append(sys.argv[1]); from culm.tools.search import main; main()",
    str(Path(culm.__file__).parent.parent),
)  # fmt: skip
_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # Some interpreters cannot start without.
DESCRIPTION = (
    "Search the text files of the workspace, line by line, for a regular expression (Python's "
    "syntax; (?i) in front ignores case) or for a literal text. Answers with the lines by file. "
    f"At most {MATCHES_MAX} lines; files over {size_text(FILE_BYTES_MAX)} are left out."
)


class GrepArguments(Struct, frozen=True):
    pattern: Annotated[
        str,
        Meta(min_length=1, max_length=PATTERN_CHARS_MAX, description="What a line shall contain."),
    ]
    path: Annotated[
        PathText,
        Meta(description="A directory or a file, in the workspace. Default: all of it."),
    ] = ""
    include: Annotated[
        PathText, Meta(description="Search only files that match this glob, like *.{ts,tsx}.")
    ] = ""
    literal_text: Annotated[
        bool, Meta(description="Whether the pattern is plain text. Default: false.")
    ] = False


@dataclass(slots=True)
class _Found:
    """What a search process said before it ended."""

    matches: list[Match]
    end: End | None
    is_stopped: bool


def make_grep(inside: Inside, work: FileWork) -> FileTool[GrepArguments]:
    spec = make_spec("grep", DESCRIPTION, GrepArguments)

    def effect(given: GrepArguments, stop: Stop) -> Result:
        return _grep(inside, given, stop, work.wall_s)

    return FileTool(spec, GrepArguments, work, effect, is_search=True)


def _grep(inside: Inside, given: GrepArguments, stop: Stop, wall_s: float) -> Result:
    if given.include:
        parse_glob(given.include, hidden=True)  # Refused here, in words.
    gitignore = read_gitignore(inside)
    with inside.open(given.path) as place:
        query = Query(
            place.descriptor,
            place.parts,
            place.is_directory,
            given.pattern,
            given.literal_text,
            given.include,
            gitignore,
            MATCHES_MAX,
            wall_s,
        )
        found = _search(query, stop)
    if found.end is None and not found.is_stopped:
        raise Refused("The search broke down. Try a simpler pattern.")
    if found.end is not None and found.end.problem:
        problem = clean(found.end.problem)
        raise Refused(f"This pattern cannot be used: {problem}. Set literal_text for plain text.")
    if found.end is None and not found.matches:
        text = f"Nothing was found within {wall_s:g} seconds, and not everything was searched."
        raise Refused(f"{text} Use a simpler pattern, or say with path or include where to look.")
    return _result(found)


def _search(query: Query, stop: Stop) -> _Found:
    """Run the process to its end; it does not outlive this."""
    with _start(query) as process:  # Reaped at the end of the block, ...
        try:
            with stop.calling(process.kill):  # ... so what is killed before is no stranger.
                found = _listen(process, query)
        finally:
            process.kill()
    found.is_stopped = stop.is_set()
    return found


def _start(query: Query) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={name: os.environ[name] for name in _VARIABLES if name in os.environ},
            pass_fds=(query.descriptor,),
            start_new_session=True,
        )
    except OSError as exc:
        raise Refused(f"The search could not be started: {exc.strerror or exc}.") from exc


def _listen(process: subprocess.Popen[bytes], query: Query) -> _Found:
    assert process.stdin is not None
    assert process.stdout is not None
    found = _Found([], None, is_stopped=False)
    try:
        with process.stdin as pipe:
            pipe.write(json.dumps(query._asdict()).encode())
    except BrokenPipeError:
        return found  # It was killed, or could not start.
    while found.end is None and (word := process.stdout.readline(_WORD_BYTES_MAX)):
        if not word.endswith(b"\n"):
            break  # Killed in the middle of a word.
        said = json.loads(word)
        if "path" in said:
            found.matches.append(Match(**said))
        else:
            found.end = End(**said)
    return found


def _result(found: _Found) -> Result:
    lines: list[str] = []
    file = None
    for match in found.matches:
        if match.path != file:
            lines += [""] if lines else []
            file = match.path
            lines.append(f"{shown(file)}:")
        lines.append(f"{match.line:>6}|{clean(match.text)}")
    if not lines:
        lines.append("No line matches.")
    end = found.end or End()
    if end.has_more:
        lines.append(f"(only the first {MATCHES_MAX} lines are shown; search more narrowly)")
    if end.skipped:
        lines.append(f"(files not searched, too large or not readable: {end.skipped})")
    lines += notes(end.unread, is_cut=end.is_cut, is_stopped=found.end is None)
    is_cut = end.has_more or end.is_cut or found.end is None
    about = metadata(number_of_matches=len(found.matches), truncated=is_cut)
    return Result("\n".join(lines), metadata=about)
