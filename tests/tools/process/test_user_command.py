"""The user's own `!command`: as typed, in colour, and ended with whoever typed it."""

import asyncio
from pathlib import Path

from culm.tools.process.user_command import SHOWN_BYTES_MAX, run_user_command
from tests.support import WAIT_S
from tests.tools.bench import open_bench


async def test_a_typed_command_answers_with_its_output_in_colour_and_its_code(
    tmp_path: Path,
) -> None:
    async with open_bench(tmp_path) as bench:
        bench.env["CULM_TOKEN"] = "secret"

        async def run(command: str, cwd: Path = bench.path) -> tuple[str, int]:
            async with asyncio.timeout(WAIT_S):
                return await run_user_command(bench.context, command, str(cwd), 97)

        env = "echo $COLUMNS $FORCE_COLOR $CLICOLOR_FORCE $COLORTERM ${CULM_TOKEN-none}; pwd"
        assert await run(env) == (f"97 1 1 truecolor none\n{bench.path}\n", 0)
        assert await run("printf '\\33[31mred\\33[0m\\33[2J\\n'; echo err >&2; exit 3") == (
            "\x1b[31mred\x1b[0m\nerr\n",
            3,
        )
        assert await run("kill -TERM $$") == ("", 143)
        assert await run("a\0b") == ("A command has no NUL character in it.\n", 126)
        text, code = await run("true", bench.path / "gone")
        assert (text.startswith("The command could not be started: "), code) == (True, 126)
        text, code = await run("head -c 2000000 /dev/zero | tr '\\0' x")
        assert "bytes are left out here …]" in text
        assert SHOWN_BYTES_MAX < len(text) < SHOWN_BYTES_MAX + 100


async def test_a_typed_command_ends_with_the_request_it_came_by(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench, asyncio.timeout(WAIT_S):
        async with asyncio.TaskGroup() as tasks:
            command = "setsid sleep 60 & echo $! > pid.new; mv pid.new pid; wait"
            run = run_user_command(bench.context, command, str(bench.path), 0)
            task = tasks.create_task(run)
            while not (bench.path / "pid").exists():
                await asyncio.sleep(0.005)
            task.cancel()
        pid = int((bench.path / "pid").read_text())
        assert not Path(f"/proc/{pid}/cwd").exists()
