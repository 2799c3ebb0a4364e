"""`grep`: lines of files by a regular expression, found by ripgrep or by our own search.

Owns the choice between the two and the text of the result. Both run as processes that end when the
call is cancelled or times out. `search/ripgrep.py` runs ripgrep; `search/process.py` is our own
process, and explains why it is one.
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

import culm
from culm.model.base import ToolSpec
from culm.processes.base import ProcessOwner, ProcessStartFailed
from culm.tools.arguments import InvalidArguments, PathText, make_spec, metadata, parse_arguments
from culm.tools.base import CallPlan, CallRequest, CallResult, ToolContext
from culm.tools.files.paths import OpenPath, PathTarget
from culm.tools.files.read_tool import check_read, reading_action, run_in_thread
from culm.tools.files.safe_open import OpenRefused
from culm.tools.glob import gitignores_above, notes
from culm.tools.process.child import (
    CallDeadline,
    ChildRequest,
    ProcessAccess,
    open_deadline,
    run_child,
)
from culm.tools.search.patterns import PATTERN_CHARS_MAX, parse_glob
from culm.tools.search.process import (
    FILE_BYTES_MAX,
    LINE_CHARS_SHOWN,
    SearchEnd,
    SearchMatch,
    SearchQuery,
)
from culm.tools.search.ripgrep import (
    LineMatches,
    LineSearch,
    OwnedDescriptors,
    Ripgrep,
    RipgrepProgram,
    find_program,
    for_ripgrep,
)
from culm.tools.view import size_text
from culm.wire.codec import clean
from culm.wire.runs import CrashPolicy
from culm.wire.tools import ToolFacts

MATCHES_MAX = 100
_MESSAGE_BYTES_MAX = 12 * (LINE_CHARS_SHOWN + 4096 + 100)  # One line of JSON, fully escaped.
# Isolated and without site-packages: it starts in a third of the time, and no file or variable of a
# project can change its behavior.
COMMAND = (
    sys.executable, "-I", "-S", "-X", "utf8", "-W", "ignore", "-c",
    "import sys; sys.path.append(sys.argv[1]); from culm.tools.search.process import main; main()",
    str(Path(culm.__file__).parent.parent),
)  # fmt: skip
DESCRIPTION = (
    "Search text files, line by line, for a regular expression (Python's syntax; (?i) in front "
    "ignores case) or for a literal text. Returns the lines by file. "
    f"At most {MATCHES_MAX} lines; files in .gitignore are left out, and so are binary and very "
    f"large files (where ripgrep is not installed, over {size_text(FILE_BYTES_MAX)}). Outside the "
    "workspace a person is asked first."
)


class GrepArguments(Struct, frozen=True):
    pattern: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=PATTERN_CHARS_MAX,
            description="The expression that a line must match.",
        ),
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


SPEC = make_spec(
    "grep",
    DESCRIPTION,
    GrepArguments,
    ToolFacts(
        kind="read", path_arguments=("path",), shown_arguments=("pattern", "path", "include")
    ),
)


def make_grep(context: ToolContext) -> "GrepTool":
    return GrepTool(context, SPEC, Ripgrep(context, context.executor))


class GrepTool(Struct, frozen=True):
    """A tool that only reads: it may run concurrently, and again after a crash."""

    context: ToolContext
    spec: ToolSpec
    ripgrep: Ripgrep
    parallel: bool = True
    crash: CrashPolicy = "again"

    async def prepare(self, call: CallRequest) -> CallPlan | CallResult:
        try:
            arguments = parse_arguments(call.arguments or {}, GrepArguments)
        except InvalidArguments as exc:
            return CallResult(f"{call.name}: {exc}", is_error=True)
        found = await run_in_thread(
            self.context.executor, lambda stop: check_read(self.context, arguments.path, stop)
        )
        if isinstance(found, CallResult):
            return found
        action = reading_action(call, "read", "Search", found, arguments, "path")
        return CallPlan(action, lambda _: self._run(call, arguments, found.target))

    async def _run(
        self, call: CallRequest, arguments: GrepArguments, target: PathTarget
    ) -> CallResult:
        executor = self.context.executor
        owner = ProcessOwner(
            self.context.workspace_id, "call", call.session_id, call.run_id, call.id
        )
        async with executor.searches:
            with (
                OwnedDescriptors() as owned,
                open_deadline(self.context.clock, executor.wall_s) as deadline,
            ):
                ready = await run_in_thread(
                    executor, lambda _: self._prepare_search(arguments, target, owner, owned)
                )
                if isinstance(ready, CallResult):
                    return ready
                search, program = ready
                try:
                    found = await self._search(search, program, deadline)
                    return _result(found, search.start, executor.wall_s)
                except OpenRefused as exc:
                    return CallResult(str(exc), is_error=True)
                except TimeoutError:
                    text = f"The disk did not answer within {executor.wall_s:g} seconds."
                    return CallResult(text, is_error=True)

    def _prepare_search(
        self,
        arguments: GrepArguments,
        target: PathTarget,
        owner: ProcessOwner,
        owned: OwnedDescriptors,
    ) -> tuple[LineSearch, RipgrepProgram | None]:
        paths = self.context.paths
        if arguments.include:
            parse_glob(arguments.include, hidden=True)  # Refused here, with a message.
        with paths.open_real(target.path) as opened:
            start = replace(opened, descriptor=owned.add(os.dup(opened.descriptor)))
        search = LineSearch(
            start,
            arguments.pattern,
            arguments.literal_text,
            arguments.include,
            gitignores_above(paths, start),
            MATCHES_MAX,
            owner,
        )
        return search, find_program(self.context.env().get("PATH", ""), paths.root)

    async def _search(
        self, search: LineSearch, program: RipgrepProgram | None, deadline: CallDeadline
    ) -> LineMatches:
        pattern = for_ripgrep(search.pattern, literal=search.literal)
        if program is not None and pattern is not None:
            found = await self.ripgrep.search(program, pattern, search, deadline)
            if found is not None:
                return found
        return await _search_ourselves(self.context, search, deadline, self.context.executor.wall_s)


async def _search_ourselves(
    access: ProcessAccess, search: LineSearch, deadline: CallDeadline, wall_s: float
) -> LineMatches:
    query = SearchQuery(
        descriptor=3,
        parts=search.start.parts,
        is_directory=search.start.is_directory,
        pattern=search.pattern,
        literal=search.literal,
        include=search.include,
        gitignores=search.gitignores,
        nested_rules=search.start.is_inside,
        matches_max=search.matches_max,
        wall_s=wall_s,
    )
    reader = _MessageReader()
    request = ChildRequest(
        COMMAND,
        "/",
        search.owner,
        f"grep {search.pattern}",
        reader.receive,
        stdin=json.dumps(query._asdict()).encode(),
        descriptors=(search.start.descriptor,),
    )
    try:
        await run_child(access, request, deadline)
    except ProcessStartFailed as exc:
        raise OpenRefused(f"The search could not be started: {exc}.") from exc
    return LineMatches(reader.matches, reader.end, is_stopped=deadline.is_over)


class _MessageReader:
    """Receives the messages of our search process: matches, and finally its end."""

    def __init__(self) -> None:
        self.matches: list[SearchMatch] = []
        self.end: SearchEnd | None = None
        self._rest = b""

    def receive(self, data: bytes) -> bool:
        *messages, self._rest = (self._rest + data).split(b"\n")
        for message in messages:
            fields = json.loads(message)
            if "path" in fields:
                self.matches.append(SearchMatch(**fields))
            else:
                self.end = SearchEnd(**fields)
        return len(self._rest) <= _MESSAGE_BYTES_MAX


def _result(found: LineMatches, opened: OpenPath, wall_s: float) -> CallResult:
    if found.end is None and not found.is_stopped:
        raise OpenRefused("The search failed. Try a simpler pattern.")
    if found.end is not None and found.end.problem:
        problem = clean(found.end.problem)
        raise OpenRefused(
            f"This pattern cannot be used: {problem}. Set literal_text for plain text."
        )
    if found.end is None and not found.matches:
        text = f"Nothing was found within {wall_s:g} seconds, and not everything was searched."
        raise OpenRefused(f"{text} Use a simpler pattern, or narrow it with path or include.")
    lines = _lines(found.matches, opened) or ["No line matches."]
    end = found.end or SearchEnd()
    if end.has_more:
        lines.append(f"(only the first {MATCHES_MAX} lines are shown; search more narrowly)")
    if end.skipped:
        lines.append(f"(files not searched, too large or not readable: {end.skipped})")
    lines += notes(end.unread, is_cut=end.is_cut, is_stopped=found.end is None)
    is_cut = end.has_more or end.is_cut or found.end is None
    about = metadata(number_of_matches=len(found.matches), truncated=is_cut)
    return CallResult("\n".join(lines), metadata=about)


def _lines(matches: list[SearchMatch], opened: OpenPath) -> list[str]:
    lines: list[str] = []
    file = None
    for match in matches:
        if match.path != file:
            lines += [""] if lines else []
            file = match.path
            lines.append(f"{opened.shown_below(file.split('/'))}:")
        lines.append(f"{match.line:>6}|{clean(match.text)}")
    return lines
