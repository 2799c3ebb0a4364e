"""The test bed of `tools.py`: a workspace with its tools, a tree of files, and ripgrep."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from culm.clock import LoopClock
from culm.ids import Ids, SessionId
from culm.processes.client import open_processes
from culm.store.sessions import add_session
from culm.store.store import open_store
from culm.tools.base import CallPlan, CallRequest, CallResult, Tool, ToolContext
from culm.tools.files.file_executor import open_file_executor
from culm.tools.files.paths import WorkspacePaths
from culm.tools.process.jobs import open_jobs
from culm.tools.registry import make_tools
from culm.wire.codec import Json, encode

RIPGREP = "ripgrep==14.1.0"  # Only the program, as a wheel.
INSTALL_TIMEOUT_S = 300.0
SESSION = SessionId("session-1")
FOLDER_FILES = 50  # In each directory of the tree; as many directories in each parent.
RARE_EVERY = 1000  # One of so many files has the searched line.
RARE, FREQUENT = "needle_", "import os"


@dataclass(frozen=True, slots=True)
class Bed:
    tools: dict[str, Tool]
    path: Path
    env: dict[str, str]

    async def call(self, tool: str, **arguments: Json) -> CallResult:
        """Run a tool without a permission check."""
        call = CallRequest("call-1", tool, encode(arguments).decode(), arguments, SESSION, "run-1")
        plan = await self.tools[tool].prepare(call)
        assert isinstance(plan, CallPlan), plan
        return await plan.run(lambda _: None)


def install_ripgrep(folder: Path) -> Path:
    """Return the path of `rg`; install it with pip if it is missing."""
    program = folder / "bin" / "rg"
    if not program.exists():
        options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:")
        command = (sys.executable, "-m", "pip", "install", *options, f"--target={folder}", RIPGREP)
        subprocess.run(command, check=True, timeout=INSTALL_TIMEOUT_S)
    return program


def make_tree(folder: Path, files: int) -> None:
    """Make the source files of a large project: about 2 kB each, 50 in a directory."""
    block = [
        f"    value_{n} = compute(other_{n}, 'text {n * 7}')  # as before\n" for n in range(35)
    ]
    body = f"{FREQUENT}\n\n\ndef run(self):\n{''.join(block)}"
    for n in range(files):
        upper, lower = divmod(n // FOLDER_FILES, FOLDER_FILES)
        inner = folder / f"package_{upper:02}" / f"module_{lower:02}"
        if n % FOLDER_FILES == 0:
            inner.mkdir(parents=True)
        rare = f"{RARE}{n}\n" if n % RARE_EVERY == 0 else ""
        (inner / f"file_{n % FOLDER_FILES:02}.py").write_text(f"# file {n}\n{body}{rare}")


@asynccontextmanager
async def open_bed(folder: Path, programs: Sequence[Path]) -> AsyncGenerator[Bed]:
    """All tools of a workspace, with a real store and supervisor; `programs` come first in PATH."""
    clock, ids = LoopClock(), Ids()
    workspace = folder / "work"
    workspace.mkdir(exist_ok=True)
    path = os.pathsep.join([*map(str, programs), "/usr/local/bin", "/usr/bin", "/bin"])
    env = {"PATH": path, "HOME": str(folder)}
    async with (
        open_store(folder / f"culm-{len(programs)}.db", clock, ids) as store,
        open_file_executor(clock, wall_s=60.0) as work,
        open_processes(folder / f"data-{len(programs)}", clock, ids) as processes,
        open_jobs() as jobs,
    ):
        await store.write(add_session(SESSION, "one", sessions_max=1))
        context = ToolContext(
            workspace_id="w1",
            paths=WorkspacePaths(workspace),
            executor=work,
            processes=processes,
            store=store,
            clock=clock,
            ids=ids,
            env=lambda: env,
            outputs=folder / "outputs",
        )
        yield Bed(make_tools(context, jobs), workspace, env)


async def run_plain(bed: Bed, *argv: str | Path) -> bytes:
    """Run a command in the plainest way: start, read to the end, reap."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=bed.path,
        env=bed.env,
    )
    out, _ = await process.communicate()
    return out


def replace_plainly(file: Path, old: str, new: str) -> None:
    """The minimal edit: read, replace, write a new file, fsync, rename."""
    text = file.read_text().replace(old, new, 1)
    beside = file.with_name(f".{file.name}.new")
    with beside.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    beside.replace(file)
