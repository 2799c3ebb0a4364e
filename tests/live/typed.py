"""Commands that a page tells to type: run as they stand, bounded, and nothing of them is left."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tests.live.harness import RESUME_S


async def printed_by(
    *command: str, cwd: Path, env: Mapping[str, str], wait_s: float = RESUME_S
) -> str:
    """What it writes to stdout, if it succeeds; else it fails with all it said."""
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
        with suppress(ProcessLookupError):  # What a script that failed has left behind.
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    assert process.returncode == 0, (out + err).decode()
    return out.decode()


async def printed_by_script(
    *scripts: str, cwd: Path, env: Mapping[str, str], wait_s: float = RESUME_S
) -> str:
    """One after the other, in a shell that stops at the first command that fails."""
    command = ("bash", "-euo", "pipefail", "-c", "\n".join(scripts))
    return await printed_by(*command, cwd=cwd, env=env, wait_s=wait_s)
