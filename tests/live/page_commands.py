"""Run the commands of a documentation page unchanged, with a time limit and a cleanup."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tests.live.harness import RESUME_S


async def stdout_of(
    *command: str, cwd: Path, env: Mapping[str, str], wait_s: float = RESUME_S
) -> str:
    """Return the stdout of a command that succeeds; else fail with all its output."""
    scripts = Path(sys.executable).parent  # `culm` is beside the interpreter of the tests.
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env={**env, "PATH": f"{scripts}{os.pathsep}{env.get('PATH', os.defpath)}"},
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(wait_s):
            out, err = await process.communicate()
    finally:
        with suppress(ProcessLookupError):  # A failed script may have left processes behind.
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    assert process.returncode == 0, (out + err).decode()
    return out.decode()


async def stdout_of_script(
    *scripts: str, cwd: Path, env: Mapping[str, str], wait_s: float = RESUME_S
) -> str:
    """Run scripts in order, in a shell that stops at the first failing command."""
    command = ("bash", "-euo", "pipefail", "-c", "\n".join(scripts))
    return await stdout_of(*command, cwd=cwd, env=env, wait_s=wait_s)
