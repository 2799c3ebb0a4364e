"""The user's own `!command`: run as typed, in color, and ended with its request."""

import asyncio
from pathlib import Path

from culm.tools.process.running import SHOWN_BYTES_MAX, run_user_command
from tests.support import WAIT_S
from tests.tools.command_harness import open_command_harness


async def test_a_user_command_returns_its_colored_output_and_exit_code(
    tmp_path: Path,
) -> None:
    async with open_command_harness(tmp_path) as harness:
        harness.env["CULM_TOKEN"] = "secret"

        async def run(command: str, cwd: Path = harness.path) -> tuple[str, int]:
            async with asyncio.timeout(WAIT_S):
                return await run_user_command(harness.context, command, str(cwd), 97)

        env = "echo $COLUMNS $FORCE_COLOR $CLICOLOR_FORCE $COLORTERM ${CULM_TOKEN-none}; pwd"
        assert await run(env) == (f"97 1 1 truecolor none\n{harness.path}\n", 0)
        assert await run("printf '\\33[31mred\\33[0m\\33[2J\\n'; echo err >&2; exit 3") == (
            "\x1b[31mred\x1b[0m\nerr\n",
            3,
        )
        assert await run("kill -TERM $$") == ("", 143)
        assert await run("a\0b") == ("The command contains a NUL character.\n", 126)
        text, code = await run("true", harness.path / "gone")
        assert (text.startswith("The command could not be started: "), code) == (True, 126)
        text, code = await run("head -c 2000000 /dev/zero | tr '\\0' x")
        assert "bytes are left out here …]" in text
        assert SHOWN_BYTES_MAX < len(text) < SHOWN_BYTES_MAX + 100


async def test_a_user_command_ends_when_its_request_is_canceled(tmp_path: Path) -> None:
    async with open_command_harness(tmp_path) as harness, asyncio.timeout(WAIT_S):
        async with asyncio.TaskGroup() as tasks:
            command = "setsid sleep 60 & echo $! > pid.new; mv pid.new pid; wait"
            run = run_user_command(harness.context, command, str(harness.path), 0)
            task = tasks.create_task(run)
            while not (harness.path / "pid").exists():
                await asyncio.sleep(0.005)
            task.cancel()
        pid = int((harness.path / "pid").read_text())
        assert not Path(f"/proc/{pid}/cwd").exists()
