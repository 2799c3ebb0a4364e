"""`grep`: lines of files by a regular expression, found by ripgrep or, without it, by ourselves.

Owns which of them searches, and what the result says. Both are processes in custody: they end when
the call is cancelled or out of time. What ripgrep is told is `ripgrep.py`; what our own process
does, and why it is one, is `search.py`.
"""

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

import culm
from culm.model.base import ToolSpec
from culm.processes.base import ProcessOwner, ProcessStartFailed
from culm.tools.arguments import InvalidArguments, PathText, make_spec, metadata, parse_arguments
from culm.tools.base import CallPlan, CallRequest, CallResult
from culm.tools.files.paths import KERNEL_FOLDERS, OpenPath, PathTarget
from culm.tools.files.read_access import check_read, reading_action
from culm.tools.files.read_tool import run_in_thread
from culm.tools.files.safe_open import OpenRefused
from culm.tools.glob import notes, read_gitignore
from culm.tools.process.child import CallDeadline, ChildRequest, ProcessAccess, ask, open_deadline
from culm.tools.search.dialect import for_ripgrep
from culm.tools.search.patterns import PATTERN_CHARS_MAX, parse_glob
from culm.tools.search.process import (
    FILE_BYTES_MAX,
    LINE_CHARS_SHOWN,
    SearchEnd,
    SearchMatch,
    SearchQuery,
)
from culm.tools.search.query import LineMatches, LineSearch, OwnedDescriptors
from culm.tools.search.ripgrep import Ripgrep, RipgrepProgram, find_program
from culm.tools.tool_context import ToolContext
from culm.tools.view import size_text
from culm.wire.codec import clean
from culm.wire.runs import CrashPolicy

MATCHES_MAX = 100
_WORD_BYTES_MAX = 12 * (LINE_CHARS_SHOWN + 4096 + 100)  # One line of JSON, all of it escaped.
# Isolated and without site-packages: it starts in a third of the time, and no project's file or
# variable can change what it does.
COMMAND = (
    sys.executable, "-I", "-S", "-X", "utf8", "-W", "ignore", "-c",
    "import sys; sys.path.append(sys.argv[1]); from culm.tools.search.process import main; main()",
    str(Path(culm.__file__).parent.parent),
)  # fmt: skip
DESCRIPTION = (
    "Search text files, line by line, for a regular expression (Python's syntax; (?i) in front "
    "ignores case) or for a literal text. Answers with the lines by file. "
    f"At most {MATCHES_MAX} lines; what .gitignore names is left out, and so are binary and very "
    f"large files (where ripgrep is not installed, over {size_text(FILE_BYTES_MAX)}). Outside the "
    "workspace a person is asked first."
)


class GrepArguments(Struct, frozen=True):
    pattern: Annotated[
        str,
        Meta(min_length=1, max_length=PATTERN_CHARS_MAX, description="What a line shall contain."),
    ]
    path: Annotated[
        PathText,
        Meta(description="A directory or a file; relative to the workspace, the default."),
    ] = ""
    include: Annotated[
        PathText, Meta(description="Search only files that match this glob, like *.{ts,tsx}.")
    ] = ""
    literal_text: Annotated[
        bool, Meta(description="Whether the pattern is plain text. Default: false.")
    ] = False


SPEC = make_spec("grep", DESCRIPTION, GrepArguments)


def make_grep(context: ToolContext) -> "GrepTool":
    return GrepTool(context, SPEC, Ripgrep(context, context.work))


@dataclass(frozen=True, slots=True)
class GrepTool:
    """It runs beside others, and a crash lets it be repeated."""

    context: ToolContext
    spec: ToolSpec
    ripgrep: Ripgrep
    parallel: bool = True
    crash: CrashPolicy = "again"

    async def prepare(self, call: CallRequest) -> CallPlan | CallResult:
        try:
            given = parse_arguments(call.arguments or {}, GrepArguments)
        except InvalidArguments as exc:
            return CallResult(f"{call.name}: {exc}", is_error=True)
        found = await run_in_thread(
            self.context.work, lambda stop: check_read(self.context, given.path, stop)
        )
        if isinstance(found, CallResult):
            return found
        action = reading_action(call, "read", "Search", found, given, "path")
        return CallPlan(action, lambda _: self._run(call, given, found.target))

    async def _run(self, call: CallRequest, given: GrepArguments, target: PathTarget) -> CallResult:
        work = self.context.work
        owner = ProcessOwner(
            self.context.workspace_id, "call", call.session_id, call.run_id, call.id
        )
        async with work.searches:
            with (
                OwnedDescriptors() as handles,
                open_deadline(self.context.clock, work.wall_s) as deadline,
            ):
                ready = await run_in_thread(
                    work, lambda _: self._make_ready(given, target, owner, handles)
                )
                if isinstance(ready, CallResult):
                    return ready
                sought, program = ready
                try:
                    found = await self._search(sought, program, deadline)
                    return _result(found, sought.place, work.wall_s)
                except OpenRefused as exc:
                    return CallResult(str(exc), is_error=True)
                except TimeoutError:
                    text = f"The disk did not answer within {work.wall_s:g} seconds."
                    return CallResult(text, is_error=True)

    def _make_ready(
        self,
        given: GrepArguments,
        target: PathTarget,
        owner: ProcessOwner,
        handles: OwnedDescriptors,
    ) -> tuple[LineSearch, RipgrepProgram | None]:
        inside = self.context.inside
        if given.include:
            parse_glob(given.include, hidden=True)  # Refused here, in words.
        with inside.open_real(target.path) as opened:
            place = replace(opened, descriptor=handles.add(os.dup(opened.descriptor)))
        outside = "".join(f"{folder}/\n" for folder in KERNEL_FOLDERS)
        sought = LineSearch(
            place,
            given.pattern,
            given.literal_text,
            given.include,
            read_gitignore(inside) if place.is_inside else outside,
            MATCHES_MAX,
            owner,
        )
        return sought, find_program(self.context.env().get("PATH", ""), inside.root)

    async def _search(
        self, sought: LineSearch, program: RipgrepProgram | None, deadline: CallDeadline
    ) -> LineMatches:
        pattern = for_ripgrep(sought.pattern, literal=sought.literal)
        if program is not None and pattern is not None:
            found = await self.ripgrep.search(program, pattern, sought, deadline)
            if found is not None:
                return found
        return await _search_ourselves(self.context, sought, deadline, self.context.work.wall_s)


async def _search_ourselves(
    hands: ProcessAccess, sought: LineSearch, deadline: CallDeadline, wall_s: float
) -> LineMatches:
    query = SearchQuery(
        descriptor=3,
        parts=sought.place.parts,
        is_directory=sought.place.is_directory,
        pattern=sought.pattern,
        literal=sought.literal,
        include=sought.include,
        gitignore=sought.gitignore,
        matches_max=sought.matches_max,
        wall_s=wall_s,
    )
    words = _Words()
    question = ChildRequest(
        COMMAND,
        "/",
        sought.owner,
        f"grep {sought.pattern}",
        words.receive,
        given=json.dumps(query._asdict()).encode(),
        descriptors=(sought.place.descriptor,),
    )
    try:
        await ask(hands, question, deadline)
    except ProcessStartFailed as exc:
        raise OpenRefused(f"The search could not be started: {exc}.") from exc
    return LineMatches(words.matches, words.end, is_stopped=deadline.is_over)


class _Words:
    """Hears what our search process says: matches, and at last its end."""

    def __init__(self) -> None:
        self.matches: list[SearchMatch] = []
        self.end: SearchEnd | None = None
        self._rest = b""

    def receive(self, data: bytes) -> bool:
        *words, self._rest = (self._rest + data).split(b"\n")
        for word in words:
            said = json.loads(word)
            if "path" in said:
                self.matches.append(SearchMatch(**said))
            else:
                self.end = SearchEnd(**said)
        return len(self._rest) <= _WORD_BYTES_MAX


def _result(found: LineMatches, place: OpenPath, wall_s: float) -> CallResult:
    if found.end is None and not found.is_stopped:
        raise OpenRefused("The search broke down. Try a simpler pattern.")
    if found.end is not None and found.end.problem:
        problem = clean(found.end.problem)
        raise OpenRefused(
            f"This pattern cannot be used: {problem}. Set literal_text for plain text."
        )
    if found.end is None and not found.matches:
        text = f"Nothing was found within {wall_s:g} seconds, and not everything was searched."
        raise OpenRefused(
            f"{text} Use a simpler pattern, or say with path or include where to look."
        )
    lines = _lines(found.matches, place) or ["No line matches."]
    end = found.end or SearchEnd()
    if end.has_more:
        lines.append(f"(only the first {MATCHES_MAX} lines are shown; search more narrowly)")
    if end.skipped:
        lines.append(f"(files not searched, too large or not readable: {end.skipped})")
    lines += notes(end.unread, is_cut=end.is_cut, is_stopped=found.end is None)
    is_cut = end.has_more or end.is_cut or found.end is None
    about = metadata(number_of_matches=len(found.matches), truncated=is_cut)
    return CallResult("\n".join(lines), metadata=about)


def _lines(matches: list[SearchMatch], place: OpenPath) -> list[str]:
    lines: list[str] = []
    file = None
    for match in matches:
        if match.path != file:
            lines += [""] if lines else []
            file = match.path
            lines.append(f"{place.shown_below(file.split('/'))}:")
        lines.append(f"{match.line:>6}|{clean(match.text)}")
    return lines
