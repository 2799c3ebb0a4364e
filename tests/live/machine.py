"""A machine for discovery tests: an environment, and `culm run` that starts its server."""

import asyncio
import os
import signal
import socket
import struct
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from culm.client.launch import is_listening
from culm.model.catalog import known_providers
from culm.model.local_servers import LOCAL_SERVERS
from tests.live.harness import RESUME_S, Ended, make_directory, open_process
from tests.support import WAIT_S

RUN = ("-m", "culm", "run")
_KNOWN = known_providers().values()
# Everything that the user who runs the tests may have set; an empty variable counts as unset.
BLANK: Mapping[str, str] = (
    {known.key_env: "" for known in _KNOWN}
    | {known.url_env: "" for known in _KNOWN}
    | {server.url_env: "" for server in LOCAL_SERVERS}
)


def env_of(found: Mapping[str, str]) -> dict[str, str]:
    """An environment with discovery on in which only these variables are set."""
    return {**BLANK, "CULM_NO_DISCOVERY": "", **found}


async def run_fresh(folder: Path, env: Mapping[str, str], *args: str) -> Ended:
    """`culm run` with no configuration, in a project with one file."""
    project = make_directory(folder)
    (project / "README.md").write_text("# Plums\n")
    places = ("--dir", str(project), "--host", f"unix://{folder}/s")
    data = ("--data-dir", str(folder / "data"))
    async with open_process(folder, *RUN, *places, *data, *args, env=env_of(env)) as running:
        assert running.process.stdin is not None, "asked for a pipe"
        running.process.stdin.close()
        return await running.wait(RESUME_S)


def server_pid(folder: Path) -> int:
    return pid_at(folder / "s")


def pid_at(path: Path) -> int:
    """Return the pid of the process that listens on a socket."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, _, _ = struct.unpack("3i", peer)
    return pid


@asynccontextmanager
async def open_machine(folder: Path) -> AsyncGenerator[None]:
    """End the server that was started inside the block, if any."""
    url = f"unix://{folder}/s"
    try:
        yield
    finally:
        if is_listening(url):
            os.kill(server_pid(folder), signal.SIGTERM)
        async with asyncio.timeout(WAIT_S):
            while is_listening(url):
                await asyncio.sleep(0.02)
