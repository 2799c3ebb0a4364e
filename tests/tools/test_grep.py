"""`grep` finds the same lines with both engines, always ends, and leaves no process."""

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
from culm.tools.base import CallPlan, CallRequest, CallResult, ToolContext
from culm.tools.files.file_executor import WALL_S, open_file_executor
from culm.tools.files.paths import WorkspacePaths
from culm.tools.files.safe_open import GITIGNORE_BYTES_MAX
from culm.tools.grep import COMMAND, MATCHES_MAX, GrepTool, make_grep
from culm.tools.search.process import FILE_BYTES_MAX, LINE_CHARS_SHOWN, SearchQuery
from culm.tools.search.ripgrep import find_program
from culm.wire.codec import Json, encode
from tests.support import WAIT_S, FakeClock, run_call
from tests.tools.conftest import SECRET

BOMB = "(a+)+$"
# Matching `BOMB` against this takes Python practically forever.
VICTIM = "a" * 60 + "b\n"
BOMB_FOR_US = "(?=a)" + BOMB  # Only the built-in search accepts this one.
RIPGREP = shutil.which("rg", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
NOWHERE = "/nowhere"


@dataclass(frozen=True, slots=True)
class GrepHarness:
    """A workspace with real search processes."""

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
            return await run_call(self.tool, call_of(pattern, **arguments))

    async def pids(self) -> list[int]:
        return [process.pid for process in await self.context.processes.processes("w")]

    async def busy_with(self, file: Path) -> int:
        """Wait until a search process has `file` open; return its pid."""
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
async def open_grep_harness(
    folder: Path, programs: str, clock: Clock | None = None, wall_s: float = WALL_S
) -> AsyncGenerator[GrepHarness]:
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
        yield GrepHarness(folder, context, make_grep(context))
        assert await processes.processes("w") == []
    file.close()


def ripgrep_folder() -> str:
    if RIPGREP is None:
        pytest.skip("ripgrep is not installed")
    return str(Path(RIPGREP).parent)


@pytest.fixture(params=["ripgrep", "our own"])
async def harness(request: pytest.FixtureRequest, folder: Path) -> AsyncGenerator[GrepHarness]:
    programs = ripgrep_folder() if request.param == "ripgrep" else NOWHERE
    async with open_grep_harness(folder, programs) as harness:
        yield harness


@pytest.fixture
async def builtin(folder: Path) -> AsyncGenerator[GrepHarness]:
    async with open_grep_harness(folder, NOWHERE) as harness:
        yield harness


def found(count: int, *lines: str, is_cut: bool = False) -> CallResult:
    metadata = f'{{"number_of_matches":{count},"truncated":{str(is_cut).lower()}}}'
    return CallResult("\n".join(lines), metadata=metadata)


async def test_lines_are_grouped_by_file_with_line_numbers(harness: GrepHarness) -> None:
    harness.write("b.py", "x\ndef one():\r\n  def two():\n")
    harness.write("a/c.py", "def three():")
    harness.write("a/none.py", "nothing\n")
    assert await harness.grep(r"def \w+\(\):$") == found(
        3,
        "a/c.py:",
        "     1|def three():",
        "",
        "b.py:",
        "     2|def one():",
        "     3|  def two():",
    )


async def test_literal_text_path_and_include_narrow_the_search(harness: GrepHarness) -> None:
    for name in ("a.ts", "b.tsx", "c.js", "d/e.ts", "d/f/g.ts"):
        harness.write(name, "a(b\naab\n")
    assert await harness.grep("a(b", literal_text="true", include="*.{ts,tsx}", path="d") == found(
        2, "d/e.ts:", "     1|a(b", "", "d/f/g.ts:", "     1|a(b"
    )
    assert await harness.grep("a(b", literal_text=True, include="f/**", path="d") == (
        found(1, "d/f/g.ts:", "     1|a(b")
    )
    assert await harness.grep("aa.", path="c.js") == found(1, "c.js:", "     2|aab")


async def test_no_match_is_reported(harness: GrepHarness) -> None:
    harness.write("a", "")
    harness.write("b", "x\n")
    assert await harness.grep("^$") == found(0, "No line matches.")


async def test_the_number_of_lines_is_limited(harness: GrepHarness) -> None:
    harness.write("a", "x\n" * MATCHES_MAX)
    assert not (await harness.grep("x")).content.endswith(")")
    for number in range(MATCHES_MAX):
        harness.write(f"b/{number:03}", "x\n")
    result = await harness.grep("x")
    assert result.content.endswith("\n(only the first 100 lines are shown; search more narrowly)")
    assert "b/" not in result.content
    assert result.metadata == '{"number_of_matches":100,"truncated":true}'


@pytest.mark.parametrize(("before", "after"), [(0, 9000), (9000, 9000), (9000, 0), (300, 250)])
async def test_a_huge_line_is_cut_around_the_match(
    harness: GrepHarness, before: int, after: int
) -> None:
    harness.write("a.js", "one\n" + "ü" * before + "needle" + "🌱" * after + "\r\n")
    line = (await harness.grep("needle")).content.split("\n")[1].removeprefix("     2|")
    begin = max(0, min(before - LINE_CHARS_SHOWN // 4, before + 6 + after - LINE_CHARS_SHOWN))
    whole = "ü" * before + "needle" + "🌱" * after
    cut = whole[begin : begin + LINE_CHARS_SHOWN]
    head, tail = "… " if begin else "", " …" if begin + LINE_CHARS_SHOWN < len(whole) else ""
    assert line == f"{head}{cut}{tail}"


async def test_binary_files_pipes_and_ignored_files_are_skipped(harness: GrepHarness) -> None:
    harness.write(".gitignore", "*.log\n/build/\n!node_modules/\n{a,b}\n")
    for name in ("a.log", "build/x", ".git/config", "node_modules/x.js", "x/target/y"):
        harness.write(name, "needle")
    for name in (".github/ci.yml", "x/build/y", "a"):
        harness.write(name, "needle")
    harness.write("binary", b"needle\0")
    harness.write("late", b"needle\n" + b"x" * 200_000 + b"\0")
    os.mkfifo(harness.path / "pipe")
    assert await harness.grep("needle") == found(
        3, ".github/ci.yml:", "     1|needle", "", "a:", "     1|needle", "", "x/build/y:",
        "     1|needle",
    )  # fmt: skip
    # An ignored directory is searched if it is named.
    assert (await harness.grep("needle", path="build")).content == "build/x:\n     1|needle"


async def test_a_large_file_is_skipped_by_the_builtin_and_searched_by_ripgrep(
    harness: GrepHarness,
) -> None:
    harness.write("large", b"needle\n" + b"x" * FILE_BYTES_MAX)
    note = "(files not searched, too large or not readable: 1)"
    is_ours = harness.context.env()["PATH"] == NOWHERE
    for path in ("", "large"):
        assert await harness.grep("needle", path=path) == (
            found(0, "No line matches.", note) if is_ours else found(1, "large:", "     1|needle")
        )


async def test_symlinks_are_not_followed_and_outside_paths_need_approval(
    harness: GrepHarness, outside: Path
) -> None:
    (harness.path / "file").symlink_to(outside / "secret.txt")
    (harness.path / "directory").symlink_to(outside)
    assert await harness.grep(SECRET) == found(0, "No line matches.")
    plan = await harness.tool.prepare(call_of(SECRET, path="directory"))
    assert isinstance(plan, CallPlan)
    assert (plan.action.is_free, plan.action.paths) == (False, (str(outside),))
    lines = (f"{outside}/secret.txt:", f"     1|{SECRET}")
    assert await plan.run(lambda _: None) == found(1, *lines)


async def test_unusual_names_and_bytes_are_shown_as_utf8(harness: GrepHarness) -> None:
    for name in ("new\nline", os.fsdecode(b"caf\xe9"), "👩‍💻"):
        harness.write(name, b"needle \xff \xf0\x9f\x8c\xb1")
    result = await harness.grep("needle")
    line = "     1|needle \ufffd 🌱"
    assert result == found(3, "caf\ufffd:", line, "", r"new\nline:", line, "", "👩‍💻:", line)
    result.content.encode()


BAD = ["(", "a{2,1}", "(?P<a", "*", "\\", "(?<=a+)b", "(" * 500]


@pytest.mark.parametrize("engine", ["ripgrep", "our own"])
async def test_an_invalid_pattern_is_refused_with_the_reason(folder: Path, engine: str) -> None:
    programs = ripgrep_folder() if engine == "ripgrep" else NOWHERE
    async with open_grep_harness(folder, programs) as harness:
        harness.write("a", "x")
        for pattern in BAD:
            result = await harness.grep(pattern)
            assert (pattern, result.is_error) == (pattern, True)
            assert result.content.startswith("This pattern cannot be used: ")
        result = await harness.grep("x", include="{a,b}" * 9)
    assert result.is_error
    assert result.content.startswith("This pattern cannot be used: its braces expand to more")


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
    "n/.gitignore": b".gitignore\n*.txt\n!/top.log\nin/*\n!in/b\n{x,y}\nout/\n", "n/a.txt": b"TODO",
    "n/top.log": b"TODO", "n/in/top.log": b"TODO", "n/in/a": b"TODO", "n/in/b": b"TODO",
    "n/m/.gitignore": b"!*.txt\n/in\n", "n/m/a.txt": b"TODO", "n/m/in": b"TODO", "n/x": b"TODO",
    "n/m/out/.gitignore": b"!*\n", "n/m/out/x": b"TODO", "n/z [!a]{b}/.gitignore": b"c\n/d/e\n",
    "n/z [!a]{b}/c": b"TODO", "n/z [!a]{b}/d/e": b"TODO", "n/z [!a]{b}/e": b"TODO", "c": b"TODO",
    "cache/.cache/x": b"TODO", "vendor/node_modules/x": b"TODO", ".hidden/.x": b"TODO",
}  # fmt: skip
QUESTIONS: list[dict[str, Json]] = [
    {"pattern": "TODO"},
    {"pattern": "(?i)todo$"},
    {"pattern": "TODO", "path": "src"},
    {"pattern": "TODO", "path": "src/gen"},
    {"pattern": "TODO", "path": "n/m"},
    {"pattern": "TODO", "path": "n/in"},
    {"pattern": "TODO", "path": "n/m/out"},
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
        async with open_grep_harness(folder, one) as harness:
            for name, content in CORPUS.items():
                harness.write(name, content)
            answers.append(
                [await run_call(harness.tool, call_of(**question)) for question in QUESTIONS]
            )
    for question, theirs, own in zip(QUESTIONS, *answers, strict=True):
        assert (question, theirs) == (question, own)
    assert [one.metadata for one in answers[0]].count(found(0).metadata) == 0


def stub(folder: Path, script: str) -> str:
    """Return a PATH with a program called rg."""
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
async def test_the_builtin_search_replaces_an_unusable_ripgrep(folder: Path, script: str) -> None:
    async with open_grep_harness(folder, stub(folder, script)) as harness:
        harness.write("a", "needle\n")
        for _ in range(2):
            assert await harness.grep("needle") == found(1, "a:", "     1|needle")


async def test_a_symlink_swapped_in_during_a_ripgrep_search_is_not_followed(
    folder: Path, outside: Path
) -> None:
    ripgrep_folder()
    names = r"./file\0./folder/secret.txt\0./gone\0./good\0"
    script = f'case "$*" in *--files-with-matches*) printf "{names}"; exit;; esac'
    async with open_grep_harness(folder, stub(folder, f'{script}\nexec {RIPGREP} "$@"')) as harness:
        (folder / "file").symlink_to(outside / "secret.txt")
        (folder / "folder").symlink_to(outside)
        harness.write("good", f"{SECRET}, or may they\n")
        note = "(files not searched, too large or not readable: 3)"
        lines = ("good:", f"     1|{SECRET}, or may they", note)
        assert await harness.grep(SECRET) == found(1, *lines)


async def test_files_named_by_ripgrep_before_the_deadline_are_shown(folder: Path) -> None:
    ripgrep_folder()
    marker = folder.parent / "told"
    script = f'*--files-with-matches*) printf "./a\\0"; exec 9>{marker}; exec sleep 1000;;'
    programs = stub(folder, f'case "$*" in {script} esac\nexec {RIPGREP} "$@"')
    clock = FakeClock()
    async with (
        asyncio.timeout(WAIT_S),
        open_grep_harness(folder, programs, clock) as harness,
        asyncio.TaskGroup() as group,
    ):
        harness.write("a", "needle\n")
        task = group.create_task(harness.grep("needle"))
        await harness.busy_with(marker)
        clock.advance(WALL_S)
        lines = ("a:", "     1|needle", "(out of time; the result is incomplete)")
        assert await task == found(1, *lines, is_cut=True)


def test_ripgrep_is_never_taken_from_the_workspace(tmp_path: Path) -> None:
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
def test_a_pathological_pattern_ends_in_time_with_partial_results(
    folder: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def search() -> CallResult:
        clock = FakeClock()
        async with (
            asyncio.timeout(WAIT_S),
            open_grep_harness(folder, NOWHERE, clock) as harness,
            asyncio.TaskGroup() as group,
        ):
            harness.write("a", "here: aaa\n")
            victim = harness.write("b", VICTIM)
            task = group.create_task(harness.grep(BOMB))
            await harness.busy_with(victim)  # The event loop runs meanwhile.
            clock.advance(WALL_S)
            return await task

    with asyncio.Runner(loop_factory=new_loop) as runner:
        result = runner.run(search())
    lines = ("a:", "     1|here: aaa", "(out of time; the result is incomplete)")
    assert result == found(1, *lines, is_cut=True)


async def test_ripgrep_handles_a_pathological_pattern(folder: Path) -> None:
    async with open_grep_harness(folder, ripgrep_folder()) as harness:
        harness.write("a", VICTIM * 1000)
        assert await harness.grep(BOMB) == found(0, "No line matches.")


async def test_a_timeout_without_any_match_is_an_error(folder: Path) -> None:
    async with open_grep_harness(folder, NOWHERE, wall_s=0.2) as harness:
        harness.write("a/b", VICTIM)
        # It is sent to the search process, and more than fits in a pipe.
        harness.write(".gitignore", "é" * GITIGNORE_BYTES_MAX)
        result = await harness.grep(BOMB_FOR_US, path="a")
    assert result.is_error
    assert result.content.startswith("Nothing was found within 0.2 seconds, and not everything")


async def test_a_killed_search_process_is_an_error(builtin: GrepHarness) -> None:
    victim = builtin.write("b", VICTIM)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        task = group.create_task(builtin.grep(BOMB))
        os.kill(await builtin.busy_with(victim), signal.SIGKILL)
        assert await task == CallResult("The search failed. Try a simpler pattern.", is_error=True)


async def test_a_search_canceled_at_any_moment_leaves_nothing_open(harness: GrepHarness) -> None:
    harness.write("a", "needle\n")
    victim = harness.write("b", VICTIM)
    await harness.grep("needle")  # Opens everything that stays open.
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - nothing may be opened
    for turns in (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, None):
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            pattern = "needle" if turns is not None else BOMB_FOR_US
            task = group.create_task(run_call(harness.tool, call_of(pattern)))
            for _ in range(turns or 0):
                await asyncio.sleep(0)
            if turns is None:
                await harness.busy_with(victim)
            task.cancel()
        assert await harness.pids() == []
    async with asyncio.timeout(WAIT_S):  # The supervisor closes its own a moment later.
        while len(os.listdir("/proc/self/fd")) > before:  # noqa: PTH208
            await asyncio.sleep(0)


def test_a_search_process_without_a_server_ends_by_itself(folder: Path) -> None:
    (folder / "b").write_text(VICTIM)
    descriptor = os.open(folder, os.O_RDONLY)
    query = SearchQuery(
        descriptor,
        parts=(),
        is_directory=True,
        pattern=BOMB,
        literal=False,
        include="",
        gitignores=[],
        nested_rules=True,
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


async def test_parallel_searches_all_end(harness: GrepHarness) -> None:
    harness.write("a", "needle\n")
    async with asyncio.timeout(4 * WAIT_S), asyncio.TaskGroup() as group:
        tasks = [group.create_task(harness.grep("needle")) for _ in range(6)]
    assert {task.result() for task in tasks} == {found(1, "a:", "     1|needle")}
