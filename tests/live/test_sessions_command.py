"""`culm sessions`, `culm logs` and `culm completion` as a user or a script sees them."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

from tests.live.harness import RESUME_S, environment, make_directory, open_process
from tests.live.machine import open_machine, run_fresh
from tests.live.page_commands import stdout_of, stdout_of_script

CULM = ("-m", "culm")
LINE = "2026-01-02 03:04:05,678 INFO    culm: "


def places(folder: Path) -> tuple[str, ...]:
    return (
        *("--dir", str(make_directory(folder)), "--host", f"unix://{folder}/s"),
        *("--data-dir", str(folder / "data")),
    )


async def run_at_a_terminal(folder: Path, answer: bytes, *args: str) -> tuple[int, str]:
    """Return the status and the stdout of a command that is answered at a terminal."""
    person, terminal = os.openpty()
    try:
        os.write(person, answer)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *CULM, *args),
            stdin=terminal,
            stdout=PIPE,
            stderr=terminal,
            env=environment(folder),
            start_new_session=True,
        )
        async with asyncio.timeout(RESUME_S):
            out, _ = await process.communicate()
    finally:
        os.close(person)
        os.close(terminal)
    assert process.returncode is not None, "it has ended"
    return process.returncode, out.decode()


async def test_session_is_deleted_only_after_confirmation(folder: Path) -> None:
    async with open_machine(folder):
        assert (await run_fresh(folder, {}, "hello")).status == 0
        env, where = environment(folder), places(folder)
        listed = await stdout_of("culm", "sessions", *where, "--json", cwd=folder, env=env)
        (one,) = json.loads(listed)
        delete = ("sessions", "delete", *where, one["id"][:8])
        assert await run_at_a_terminal(folder, b"n\n", *delete) == (1, "")
        status, output = await run_at_a_terminal(folder, b"y\n", *delete)
        assert (status, output.partition("  ")[0]) == (0, f"deleted {one['id'][:8]}")
        assert await stdout_of("culm", "sessions", *where, cwd=folder, env=env) == ""


async def test_logs_follow_survives_a_rotation_until_interrupted(folder: Path) -> None:
    file = folder / "state" / "culm" / "culm.log"
    file.parent.mkdir(parents=True)
    file.write_text(f"{LINE}one\n")
    async with open_process(folder, *CULM, "logs", "-f") as running:
        await running.until_line(f"{LINE}one", RESUME_S)
        file.rename(file.with_name("culm.log.1"))
        file.write_text(f"{LINE}two\n")
        await running.until_line(f"{LINE}two")
        ended = await running.end(signal.SIGINT)
        assert (ended.status, ended.stderr.strip()) == (130, "")


async def test_logs_follow_ends_quietly_when_its_pipe_closes(folder: Path) -> None:
    file = folder / "state" / "culm" / "culm.log"
    file.parent.mkdir(parents=True)
    file.write_text(f"{LINE}one\n{LINE}two\n")
    script = "set +e; culm logs -f 2>&1 | head -n 1; echo ${PIPESTATUS[0]}"
    output = await stdout_of_script(script, cwd=folder, env=environment(folder))
    assert output == f"{LINE}one\n141\n"


async def test_bash_completion_script_completes_commands(folder: Path) -> None:
    script = (
        'eval "$(culm completion bash)"',
        "COMP_WORDS=(culm sess) COMP_CWORD=1",
        "_culm_completion culm; printf '%s\\n' \"${COMPREPLY[@]}\"",
    )
    output = await stdout_of_script(*script, cwd=folder, env=environment(folder))
    assert output == "sessions\n"
