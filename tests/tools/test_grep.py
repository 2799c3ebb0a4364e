"""`grep` finds lines, ends whatever the pattern, and leaves no process behind."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from culm.clock import Clock, LoopClock
from culm.tools.base import Result
from culm.tools.grep import COMMAND, MATCHES_MAX
from culm.tools.registry import read_only_tools
from culm.tools.search import FILE_BYTES_MAX, LINE_CHARS_SHOWN, Query
from culm.tools.work import WALL_S, open_file_work
from tests.support import WAIT_S, FakeClock
from tests.tools.conftest import SECRET, Desk

BOMB = "(a+)+$"
VICTIM = "a" * 60 + "b\n"  # Against this, `BOMB` takes longer than the universe has existed.


def found(count: int, *lines: str, is_cut: bool = False) -> Result:
    metadata = f'{{"number_of_matches":{count},"truncated":{str(is_cut).lower()}}}'
    return Result("\n".join(lines), metadata=metadata)


def children() -> list[Path]:
    """The search processes of this process, dead ones that nobody reaped included."""
    return [folder for folder in Path("/proc").glob("[0-9]*") if _is_search(folder)]


def _is_search(process: Path) -> bool:
    try:
        parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
        command = (process / "cmdline").read_bytes()
    except OSError:
        return False  # It has just gone.
    return parent == str(os.getpid()) and (not command or b"culm.tools.search" in command)


async def busy_with(file: Path) -> None:
    """Wait until a search process has `file` open."""
    while not any(_has_open(process, file) for process in children()):
        await asyncio.sleep(0)


def _has_open(process: Path, file: Path) -> bool:
    try:
        return any(link.readlink() == file for link in (process / "fd").iterdir())
    except OSError:
        return False


async def test_lines_are_grouped_by_file_with_their_numbers(desk: Desk) -> None:
    desk.write("b.py", "x\ndef one():\r\n  def two():\n")
    desk.write("a/c.py", "def three():")
    desk.write("a/none.py", "nothing\n")
    assert await desk.call("grep", pattern=r"def \w+\(\):$") == found(
        3,
        "a/c.py:",
        "     1|def three():",
        "",
        "b.py:",
        "     2|def one():",
        "     3|  def two():",
    )


async def test_literal_text_path_and_include_narrow_the_search(desk: Desk) -> None:
    for name in ("a.ts", "b.tsx", "c.js", "d/e.ts", "d/f/g.ts"):
        desk.write(name, "a(b\naab\n")
    assert await desk.call(
        "grep", pattern="a(b", literal_text="true", include="*.{ts,tsx}", path="d"
    ) == found(2, "d/e.ts:", "     1|a(b", "", "d/f/g.ts:", "     1|a(b")
    assert await desk.call("grep", pattern="a(b", literal_text=True, include="f/**", path="d") == (
        found(1, "d/f/g.ts:", "     1|a(b")
    )
    assert await desk.call("grep", pattern="aa.", path="c.js") == found(1, "c.js:", "     2|aab")


async def test_nothing_found_is_said(desk: Desk) -> None:
    desk.write("a", "")
    desk.write("b", "x\n")
    assert await desk.call("grep", pattern="^$") == found(0, "No line matches.")


async def test_at_most_so_many_lines_are_shown(desk: Desk) -> None:
    desk.write("a", "x\n" * MATCHES_MAX)
    assert not (await desk.call("grep", pattern="x")).content.endswith(")")
    desk.write("b", "x\n")
    result = await desk.call("grep", pattern="x")
    assert result.content.endswith("\n(only the first 100 lines are shown; search more narrowly)")
    assert result.metadata == '{"number_of_matches":100,"truncated":true}'


async def test_of_a_huge_line_what_stands_around_the_match_is_shown(desk: Desk) -> None:
    desk.write("a.js", "." * 100_000 + "needle" + "." * 100_000)
    line = (await desk.call("grep", pattern="needle")).content.split("\n")[1]
    assert "…" in line[:10]
    assert ".needle." in line
    assert len(line) <= LINE_CHARS_SHOWN + 20


async def test_binaries_and_what_is_ignored_are_passed_over_and_large_files_counted(
    desk: Desk,
) -> None:
    desk.write(".gitignore", "*.log\n")
    for name in ("a.log", ".git/config", "node_modules/x.js", ".github/ci.yml"):
        desk.write(name, "needle")
    desk.write("binary", b"needle\0")
    desk.write("large", b"needle\n" + b"x" * FILE_BYTES_MAX)
    os.mkfifo(desk.path / "pipe")
    assert await desk.call("grep", pattern="needle") == found(
        1,
        ".github/ci.yml:",
        "     1|needle",
        "(files not searched, too large or not readable: 1)",
    )


async def test_links_are_not_followed(desk: Desk, outside: Path) -> None:
    (desk.path / "file").symlink_to(outside / "secret.txt")
    (desk.path / "directory").symlink_to(outside)
    assert await desk.call("grep", pattern=SECRET) == found(0, "No line matches.")
    result = await desk.call("grep", pattern=SECRET, path="directory")
    assert (result.is_error, "outside the workspace" in result.content) == (True, True)


async def test_strange_names_and_bytes_are_shown_in_utf8(desk: Desk) -> None:
    for name in ("new\nline", os.fsdecode(b"caf\xe9"), "👩‍💻"):
        desk.write(name, b"needle \xff \xf0\x9f\x8c\xb1")
    result = await desk.call("grep", pattern="needle")
    line = "     1|needle \ufffd 🌱"
    assert result == found(3, "caf\ufffd:", line, "", r"new\nline:", line, "", "👩‍💻:", line)
    result.content.encode()


@pytest.mark.parametrize("pattern", ["(", "a{2,1}", "(?P<a", "*", "\\", "(?<=a+)b", "(" * 500])
async def test_a_pattern_that_is_none_is_an_error_in_words(desk: Desk, pattern: str) -> None:
    result = await desk.call("grep", pattern=pattern)
    assert result.is_error
    assert result.content.startswith("This pattern cannot be used: ")


async def test_an_include_that_is_no_pattern_is_an_error_in_words(desk: Desk) -> None:
    result = await desk.call("grep", pattern="x", include="{a,b}" * 9)
    assert result.is_error
    assert result.content.startswith("This pattern cannot be used: its braces stand for more")


@asynccontextmanager
async def open_desk(folder: Path, clock: Clock, wall_s: float) -> AsyncGenerator[Desk]:
    async with open_file_work(clock, wall_s) as work:
        yield Desk(folder, read_only_tools(folder, work))


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_pattern_that_would_take_forever_ends_in_time_with_what_was_found(
    folder: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def search() -> Result:
        clock = FakeClock()
        async with (
            asyncio.timeout(WAIT_S),
            open_desk(folder, clock, WALL_S) as desk,
            asyncio.TaskGroup() as group,
        ):
            desk.write("a", "here: aaa\n")
            victim = desk.write("b", VICTIM)
            task = group.create_task(desk.call("grep", pattern=BOMB))
            await busy_with(victim)  # The loop turns meanwhile.
            clock.advance(WALL_S)
            return await task

    with asyncio.Runner(loop_factory=new_loop) as runner:
        result = runner.run(search())
    lines = ("a:", "     1|here: aaa", "(time was over; this is not all)")
    assert result == found(1, *lines, is_cut=True)
    assert children() == []


async def test_a_search_without_any_match_in_time_is_an_error(folder: Path) -> None:
    async with asyncio.timeout(WAIT_S), open_desk(folder, LoopClock(), 0.2) as desk:
        desk.write("b", VICTIM)
        result = await desk.call("grep", pattern=BOMB)
    assert result.is_error
    assert result.content.startswith("Nothing was found within 0.2 seconds, and not everything")


async def test_a_cancelled_search_leaves_no_process(folder: Path) -> None:
    async with asyncio.timeout(WAIT_S), open_desk(folder, FakeClock(), WALL_S) as desk:
        victim = desk.write("b", VICTIM)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(desk.call("grep", pattern=BOMB))
            await busy_with(victim)
            task.cancel()
        assert task.cancelled()
        assert children() == []


async def test_the_end_of_the_tools_leaves_no_process(folder: Path) -> None:
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        async with open_desk(folder, FakeClock(), WALL_S) as desk:
            victim = desk.write("b", VICTIM)
            task = group.create_task(desk.call("grep", pattern=BOMB))
            await busy_with(victim)
        assert children() == []
        assert (await task).is_error


async def test_a_search_process_that_is_killed_is_an_error_in_words(folder: Path) -> None:
    async with (
        asyncio.timeout(WAIT_S),
        open_desk(folder, FakeClock(), WALL_S) as desk,
        asyncio.TaskGroup() as group,
    ):
        victim = desk.write("b", VICTIM)
        task = group.create_task(desk.call("grep", pattern=BOMB))
        await busy_with(victim)
        os.kill(int(children()[0].name), signal.SIGKILL)
        assert await task == Result("The search broke down. Try a simpler pattern.", is_error=True)


def test_a_search_process_whose_server_is_gone_ends_by_itself(folder: Path) -> None:
    (folder / "b").write_text(VICTIM)
    descriptor = os.open(folder, os.O_RDONLY)
    query = Query(
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


async def test_searches_side_by_side_all_end(desk: Desk) -> None:
    desk.write("a", "needle\n")
    async with asyncio.timeout(4 * WAIT_S), asyncio.TaskGroup() as group:
        tasks = [group.create_task(desk.call("grep", pattern="needle")) for _ in range(6)]
    assert {task.result() for task in tasks} == {found(1, "a:", "     1|needle")}
    assert children() == []
