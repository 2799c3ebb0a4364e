"""`grep` finds the same lines with either engine, ends whatever the pattern, leaves no process."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvloop

from culm.clock import Clock, LoopClock
from culm.ids import Ids
from culm.processes.client import open_processes
from culm.store.memory import MemoryFile
from culm.store.store import open_memory_store
from culm.tools.base import CallPlan, CallRequest, CallResult
from culm.tools.files.file_executor import WALL_S, open_file_executor
from culm.tools.files.paths import WorkspacePaths
from culm.tools.glob import GITIGNORE_BYTES_MAX
from culm.tools.grep import COMMAND, MATCHES_MAX, GrepTool, make_grep
from culm.tools.search.process import FILE_BYTES_MAX, LINE_CHARS_SHOWN, SearchQuery
from culm.tools.search.ripgrep import find_program
from culm.tools.tool_context import ToolContext
from culm.wire.codec import Json, encode
from tests.support import WAIT_S, FakeClock, carried_out
from tests.tools.conftest import SECRET

BOMB = "(a+)+$"
# Against this, `BOMB` takes Python longer than the universe has existed.
VICTIM = "a" * 60 + "b\n"
BOMB_FOR_US = "(?=a)" + BOMB  # Only our own search reads this one.
RIPGREP = shutil.which("rg", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
NOWHERE = "/nowhere"


@dataclass(frozen=True, slots=True)
class Searching:
    """A workspace in which processes search for real."""

    path: Path
    context: ToolContext
    tool: GrepTool

    def write(self, name: str, content: str | bytes = "") -> Path:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return file

    async def grep(self, pattern: str, **arguments: Json) -> CallResult:
        async with asyncio.timeout(WAIT_S):
            return await carried_out(self.tool, call_of(pattern, **arguments))

    async def pids(self) -> list[int]:
        return [process.pid for process in await self.context.processes.processes("w")]

    async def busy_with(self, file: Path) -> int:
        """Wait until a search process has `file` open; its pid."""
        while True:
            for pid in await self.pids():
                if _has_open(pid, file):
                    return pid
            await asyncio.sleep(0)


def call_of(pattern: str, **arguments: Json) -> CallRequest:
    given: dict[str, Json] = {"pattern": pattern, **arguments}
    return CallRequest("call-1", "grep", encode(given).decode(), given, "session-1", "run-1")


def _has_open(pid: int, file: Path) -> bool:
    try:
        return any(link.readlink() == file for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


@asynccontextmanager
async def open_searching(
    folder: Path, programs: str, clock: Clock | None = None, wall_s: float = WALL_S
) -> AsyncGenerator[Searching]:
    real, ids, file = LoopClock(), Ids(), MemoryFile()
    clock = clock or real
    async with (
        open_file_executor(clock, wall_s) as work,
        open_memory_store(file, real, ids) as store,
        open_processes(folder.parent / "data", real, ids) as processes,
    ):
        env = {"PATH": programs}
        outputs = folder.parent / "outputs"
        context = ToolContext(
            "w", WorkspacePaths(folder), work, processes, store, clock, ids, lambda: env, outputs
        )
        yield Searching(folder, context, make_grep(context))
        assert await processes.processes("w") == []
    file.close()


def ripgrep_folder() -> str:
    if RIPGREP is None:
        pytest.skip("ripgrep is not installed")
    return str(Path(RIPGREP).parent)


@pytest.fixture(params=["ripgrep", "our own"])
async def searching(request: pytest.FixtureRequest, folder: Path) -> AsyncGenerator[Searching]:
    programs = ripgrep_folder() if request.param == "ripgrep" else NOWHERE
    async with open_searching(folder, programs) as searching:
        yield searching


@pytest.fixture
async def ours(folder: Path) -> AsyncGenerator[Searching]:
    async with open_searching(folder, NOWHERE) as searching:
        yield searching


def found(count: int, *lines: str, is_cut: bool = False) -> CallResult:
    metadata = f'{{"number_of_matches":{count},"truncated":{str(is_cut).lower()}}}'
    return CallResult("\n".join(lines), metadata=metadata)


async def test_lines_are_grouped_by_file_with_their_numbers(searching: Searching) -> None:
    searching.write("b.py", "x\ndef one():\r\n  def two():\n")
    searching.write("a/c.py", "def three():")
    searching.write("a/none.py", "nothing\n")
    assert await searching.grep(r"def \w+\(\):$") == found(
        3,
        "a/c.py:",
        "     1|def three():",
        "",
        "b.py:",
        "     2|def one():",
        "     3|  def two():",
    )


async def test_literal_text_path_and_include_narrow_the_search(searching: Searching) -> None:
    for name in ("a.ts", "b.tsx", "c.js", "d/e.ts", "d/f/g.ts"):
        searching.write(name, "a(b\naab\n")
    assert await searching.grep(
        "a(b", literal_text="true", include="*.{ts,tsx}", path="d"
    ) == found(2, "d/e.ts:", "     1|a(b", "", "d/f/g.ts:", "     1|a(b")
    assert await searching.grep("a(b", literal_text=True, include="f/**", path="d") == (
        found(1, "d/f/g.ts:", "     1|a(b")
    )
    assert await searching.grep("aa.", path="c.js") == found(1, "c.js:", "     2|aab")


async def test_nothing_found_is_said(searching: Searching) -> None:
    searching.write("a", "")
    searching.write("b", "x\n")
    assert await searching.grep("^$") == found(0, "No line matches.")


async def test_at_most_so_many_lines_are_shown(searching: Searching) -> None:
    searching.write("a", "x\n" * MATCHES_MAX)
    assert not (await searching.grep("x")).content.endswith(")")
    for number in range(MATCHES_MAX):
        searching.write(f"b/{number:03}", "x\n")
    result = await searching.grep("x")
    assert result.content.endswith("\n(only the first 100 lines are shown; search more narrowly)")
    assert "b/" not in result.content
    assert result.metadata == '{"number_of_matches":100,"truncated":true}'


@pytest.mark.parametrize(("before", "after"), [(0, 9000), (9000, 9000), (9000, 0), (300, 250)])
async def test_of_a_huge_line_what_stands_around_the_match_is_shown(
    searching: Searching, before: int, after: int
) -> None:
    searching.write("a.js", "one\n" + "ü" * before + "needle" + "🌱" * after + "\r\n")
    line = (await searching.grep("needle")).content.split("\n")[1].removeprefix("     2|")
    begin = max(0, min(before - LINE_CHARS_SHOWN // 4, before + 6 + after - LINE_CHARS_SHOWN))
    whole = "ü" * before + "needle" + "🌱" * after
    cut = whole[begin : begin + LINE_CHARS_SHOWN]
    head, tail = "… " if begin else "", " …" if begin + LINE_CHARS_SHOWN < len(whole) else ""
    assert line == f"{head}{cut}{tail}"


async def test_binaries_pipes_and_what_is_ignored_are_passed_over(searching: Searching) -> None:
    searching.write(".gitignore", "*.log\n/build/\n!node_modules/\n{a,b}\n")
    for name in ("a.log", "build/x", ".git/config", "node_modules/x.js", "x/target/y"):
        searching.write(name, "needle")
    for name in (".github/ci.yml", "x/build/y", "a"):
        searching.write(name, "needle")
    searching.write("binary", b"needle\0")
    searching.write("late", b"needle\n" + b"x" * 200_000 + b"\0")
    os.mkfifo(searching.path / "pipe")
    assert await searching.grep("needle") == found(
        3, ".github/ci.yml:", "     1|needle", "", "a:", "     1|needle", "", "x/build/y:",
        "     1|needle",
    )  # fmt: skip
    # What is named is looked into, though it is ignored.
    assert (await searching.grep("needle", path="build")).content == "build/x:\n     1|needle"


async def test_a_large_file_is_counted_by_us_and_searched_by_ripgrep(searching: Searching) -> None:
    searching.write("large", b"needle\n" + b"x" * FILE_BYTES_MAX)
    note = "(files not searched, too large or not readable: 1)"
    is_ours = searching.context.env()["PATH"] == NOWHERE
    for path in ("", "large"):
        assert await searching.grep("needle", path=path) == (
            found(0, "No line matches.", note) if is_ours else found(1, "large:", "     1|needle")
        )


async def test_links_are_not_followed_and_what_is_outside_is_asked_about(
    searching: Searching, outside: Path
) -> None:
    (searching.path / "file").symlink_to(outside / "secret.txt")
    (searching.path / "directory").symlink_to(outside)
    assert await searching.grep(SECRET) == found(0, "No line matches.")
    plan = await searching.tool.prepare(call_of(SECRET, path="directory"))
    assert isinstance(plan, CallPlan)
    assert (plan.action.is_free, plan.action.paths) == (False, (str(outside),))
    lines = (f"{outside}/secret.txt:", f"     1|{SECRET}")
    assert await plan.run(lambda _: None) == found(1, *lines)


async def test_strange_names_and_bytes_are_shown_in_utf8(searching: Searching) -> None:
    for name in ("new\nline", os.fsdecode(b"caf\xe9"), "👩‍💻"):
        searching.write(name, b"needle \xff \xf0\x9f\x8c\xb1")
    result = await searching.grep("needle")
    line = "     1|needle \ufffd 🌱"
    assert result == found(3, "caf\ufffd:", line, "", r"new\nline:", line, "", "👩‍💻:", line)
    result.content.encode()


BAD = ["(", "a{2,1}", "(?P<a", "*", "\\", "(?<=a+)b", "(" * 500]


@pytest.mark.parametrize("engine", ["ripgrep", "our own"])
async def test_a_pattern_that_is_none_is_an_error_in_words(folder: Path, engine: str) -> None:
    programs = ripgrep_folder() if engine == "ripgrep" else NOWHERE
    async with open_searching(folder, programs) as searching:
        searching.write("a", "x")
        for pattern in BAD:
            result = await searching.grep(pattern)
            assert (pattern, result.is_error) == (pattern, True)
            assert result.content.startswith("This pattern cannot be used: ")
        result = await searching.grep("x", include="{a,b}" * 9)
    assert result.is_error
    assert result.content.startswith("This pattern cannot be used: its braces stand for more")


CORPUS: dict[str, bytes] = {
    ".gitignore": b"*.log\n!keep.log\n/out\ndoc/*.txt\n**/gen/\n\\#x\n[ab].tmp\n a \n{x,y}.md\n",
    "src/main.py": b"import os\r\nclass A:\r\n\tdef run(self):  # TODO(x)\r\n\t\treturn {}\r\n",
    "src/a.tmp": b"TODO", "src/c.tmp": b"TODO", "src/gen/x.py": b"TODO", "src/x.md": b"TODO",
    "src/keep.log": b"TODO a\nTODO b\n", "src/other.log": b"TODO",
    "out/x": b"TODO", "src/out/x": b"TODO", "doc/a.txt": b"TODO", "doc/b/a.txt": b"TODO",
    "a-b/x": b"TODO", "a.b/x": b"TODO", "a/x": b"TODO", "a b/x": b"TODO", "A/x": b"TODO",
    "#x": b"TODO", "é/日本.txt": "naïve 日本 TODO".encode(),
    "empty": b"", "blank": b"\n\n \n", "bom": b"\xef\xbb\xbfimport os\n",
    "long": b"x" * 3000 + b" TODO " + b"y" * 3000, "win": b"one \r\ntwo\t\r\n\r\nthree\r",
    "cache/.cache/x": b"TODO", "vendor/node_modules/x": b"TODO", ".hidden/.x": b"TODO",
}  # fmt: skip
QUESTIONS: list[dict[str, Json]] = [
    {"pattern": "TODO"},
    {"pattern": "(?i)todo$"},
    {"pattern": "TODO", "path": "src"},
    {"pattern": "TODO", "path": "src/gen"},
    {"pattern": "TODO", "include": "*.{py,txt}"},
    {"pattern": "TODO", "include": "src/*"},
    {"pattern": "TODO", "include": "[a-c].*"},
    {"pattern": "TODO(", "literal_text": True},
    {"pattern": "{}", "literal_text": True},
    {"pattern": r"^import \w+$"},
    {"pattern": "^$"},
    {"pattern": r"\s$"},
    {"pattern": r"[^\w]$"},
    {"pattern": r"return {}"},
    {"pattern": r"\bna\wve\b"},
    {"pattern": r"\w{2,3}\t?$"},
    {"pattern": r"(?<=class )A"},
    {"pattern": "x", "path": "long"},
]


async def test_both_engines_give_the_same_answers(folder: Path) -> None:
    programs = ripgrep_folder()
    answers: list[list[CallResult]] = []
    for one in (programs, NOWHERE):
        async with open_searching(folder, one) as searching:
            for name, content in CORPUS.items():
                searching.write(name, content)
            answers.append(
                [await carried_out(searching.tool, call_of(**question)) for question in QUESTIONS]
            )
    for question, theirs, own in zip(QUESTIONS, *answers, strict=True):
        assert (question, theirs) == (question, own)
    assert [one.metadata for one in answers[0]].count(found(0).metadata) == 0


def stub(folder: Path, script: str) -> str:
    """A PATH with a program that is called rg."""
    programs = folder.parent / "programs"
    programs.mkdir(exist_ok=True)
    file = programs / "rg"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(programs)


VERSION = 'case "$*" in *--version*) echo "ripgrep 14.1.0"; exit;; esac'


@pytest.mark.parametrize(
    "script",
    [
        "echo ripgrep 12.1.1",
        "exit 1",
        "rm $0; kill -9 $$",
        f"{VERSION}\necho 'regex parse error' >&2; exit 2",
        f"{VERSION}\nkill -9 $$",
        f"{VERSION}\nrm $0; exit 2",
        f'{VERSION}\ncase "$*" in *--text*) exit 3;; esac; printf "./a\\0"',
    ],
)
async def test_where_ripgrep_is_of_no_use_we_search_ourselves(folder: Path, script: str) -> None:
    async with open_searching(folder, stub(folder, script)) as searching:
        searching.write("a", "needle\n")
        for _ in range(2):
            assert await searching.grep("needle") == found(1, "a:", "     1|needle")


async def test_a_link_that_is_swapped_in_while_ripgrep_searches_shows_nothing(
    folder: Path, outside: Path
) -> None:
    ripgrep_folder()
    names = r"./file\0./folder/secret.txt\0./gone\0./good\0"
    script = f'case "$*" in *--files-with-matches*) printf "{names}"; exit;; esac'
    async with open_searching(folder, stub(folder, f'{script}\nexec {RIPGREP} "$@"')) as searching:
        (folder / "file").symlink_to(outside / "secret.txt")
        (folder / "folder").symlink_to(outside)
        searching.write("good", f"{SECRET}, or may they\n")
        note = "(files not searched, too large or not readable: 3)"
        lines = ("good:", f"     1|{SECRET}, or may they", note)
        assert await searching.grep(SECRET) == found(1, *lines)


async def test_what_ripgrep_named_before_time_was_over_is_shown(folder: Path) -> None:
    ripgrep_folder()
    told = folder.parent / "told"
    script = f'*--files-with-matches*) printf "./a\\0"; exec 9>{told}; exec sleep 1000;;'
    programs = stub(folder, f'case "$*" in {script} esac\nexec {RIPGREP} "$@"')
    clock = FakeClock()
    async with (
        asyncio.timeout(WAIT_S),
        open_searching(folder, programs, clock) as searching,
        asyncio.TaskGroup() as group,
    ):
        searching.write("a", "needle\n")
        task = group.create_task(searching.grep("needle"))
        await searching.busy_with(told)
        clock.advance(WALL_S)
        lines = ("a:", "     1|needle", "(time was over; this is not all)")
        assert await task == found(1, *lines, is_cut=True)


def test_only_a_program_that_no_project_brought_is_ripgrep(tmp_path: Path) -> None:
    work, good = tmp_path / "work", tmp_path / "good"
    for folder in (work / "bin", good, tmp_path / "links", tmp_path / "plain"):
        folder.mkdir(parents=True)
    for file in (work / "bin/rg", good / "rg"):
        file.touch(0o755)
    (tmp_path / "links/rg").symlink_to(work / "bin/rg")
    (tmp_path / "plain/rg").touch(0o644)
    folders = [work / "bin", "bin", "", tmp_path / "links", tmp_path / "plain", "\0", "/nowhere"]
    assert find_program(os.pathsep.join(map(str, folders)), work) is None
    program = find_program(os.pathsep.join(map(str, [*folders, good])), work)
    assert program is not None
    assert program.path == str(good / "rg")


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_pattern_that_would_take_forever_ends_in_time_with_what_was_found(
    folder: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def search() -> CallResult:
        clock = FakeClock()
        async with (
            asyncio.timeout(WAIT_S),
            open_searching(folder, NOWHERE, clock) as searching,
            asyncio.TaskGroup() as group,
        ):
            searching.write("a", "here: aaa\n")
            victim = searching.write("b", VICTIM)
            task = group.create_task(searching.grep(BOMB))
            await searching.busy_with(victim)  # The loop turns meanwhile.
            clock.advance(WALL_S)
            return await task

    with asyncio.Runner(loop_factory=new_loop) as runner:
        result = runner.run(search())
    lines = ("a:", "     1|here: aaa", "(time was over; this is not all)")
    assert result == found(1, *lines, is_cut=True)


async def test_ripgrep_is_not_impressed_by_such_a_pattern(folder: Path) -> None:
    async with open_searching(folder, ripgrep_folder()) as searching:
        searching.write("a", VICTIM * 1000)
        assert await searching.grep(BOMB) == found(0, "No line matches.")


async def test_a_search_without_any_match_in_time_is_an_error(folder: Path) -> None:
    async with open_searching(folder, NOWHERE, wall_s=0.2) as searching:
        searching.write("b", VICTIM)
        # More than a pipe holds.
        searching.write(".gitignore", "é" * GITIGNORE_BYTES_MAX)
        result = await searching.grep(BOMB_FOR_US)
    assert result.is_error
    assert result.content.startswith("Nothing was found within 0.2 seconds, and not everything")


async def test_a_search_process_that_is_killed_is_an_error_in_words(ours: Searching) -> None:
    victim = ours.write("b", VICTIM)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        task = group.create_task(ours.grep(BOMB))
        os.kill(await ours.busy_with(victim), signal.SIGKILL)
        assert await task == CallResult(
            "The search broke down. Try a simpler pattern.", is_error=True
        )


async def test_a_search_cancelled_at_any_moment_leaves_nothing(searching: Searching) -> None:
    searching.write("a", "needle\n")
    victim = searching.write("b", VICTIM)
    await searching.grep("needle")  # Once, so that all there is to open is open.
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - nothing may be opened
    for turns in (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, None):
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            pattern = "needle" if turns is not None else BOMB_FOR_US
            task = group.create_task(carried_out(searching.tool, call_of(pattern)))
            for _ in range(turns or 0):
                await asyncio.sleep(0)
            if turns is None:
                await searching.busy_with(victim)
            task.cancel()
        assert await searching.pids() == []
    async with asyncio.timeout(WAIT_S):  # Custody lets go of its own a moment later.
        while len(os.listdir("/proc/self/fd")) > before:  # noqa: PTH208
            await asyncio.sleep(0)


def test_a_search_process_whose_server_is_gone_ends_by_itself(folder: Path) -> None:
    (folder / "b").write_text(VICTIM)
    descriptor = os.open(folder, os.O_RDONLY)
    query = SearchQuery(
        descriptor,
        parts=(),
        is_directory=True,
        pattern=BOMB,
        literal=False,
        include="",
        gitignore="",
        matches_max=MATCHES_MAX,
        wall_s=-0.9,
    )
    try:
        done = subprocess.run(
            COMMAND,
            input=json.dumps(query._asdict()).encode(),
            pass_fds=(descriptor,),
            timeout=WAIT_S,
            check=False,
        )
    finally:
        os.close(descriptor)
    assert done.returncode == -signal.SIGALRM


async def test_searches_side_by_side_all_end(searching: Searching) -> None:
    searching.write("a", "needle\n")
    async with asyncio.timeout(4 * WAIT_S), asyncio.TaskGroup() as group:
        tasks = [group.create_task(searching.grep("needle")) for _ in range(6)]
    assert {task.result() for task in tasks} == {found(1, "a:", "     1|needle")}
