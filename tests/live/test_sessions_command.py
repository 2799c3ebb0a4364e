"""`culm sessions`, `culm logs` and `culm completion` as a person or a script meets them."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

from tests.live.found import open_machine, run_fresh
from tests.live.harness import RESUME_S, environment, make_directory, open_process
from tests.live.typed import printed_by, printed_by_script

CULM = ("-m", "culm")
LINE = "2026-01-02 03:04:05,678 INFO    culm: "


def places(folder: Path) -> tuple[str, ...]:
    return (
        *("--dir", str(make_directory(folder)), "--host", f"unix://{folder}/s"),
        *("--data-dir", str(folder / "data")),
    )


async def typed_at_a_terminal(folder: Path, answer: bytes, *args: str) -> tuple[int, str]:
    """The status and what stdout got of a command that a person answers."""
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


async def test_a_session_is_removed_when_a_person_says_yes_and_only_then(folder: Path) -> None:
    async with open_machine(folder):
        assert (await run_fresh(folder, {}, "hello")).status == 0
        env, where = environment(folder), places(folder)
        listed = await printed_by("culm", "sessions", *where, "--json", cwd=folder, env=env)
        (one,) = json.loads(listed)
        delete = ("sessions", "delete", *where, one["id"][:8])
        assert await typed_at_a_terminal(folder, b"n\n", *delete) == (1, "")
        status, said = await typed_at_a_terminal(folder, b"y\n", *delete)
        assert (status, said.partition("  ")[0]) == (0, f"removed {one['id'][:8]}")
        assert await printed_by("culm", "sessions", *where, cwd=folder, env=env) == ""


async def test_a_log_is_followed_over_a_rotation_until_somebody_interrupts(folder: Path) -> None:
    file = folder / "state" / "culm" / "culm.log"
    file.parent.mkdir(parents=True)
    file.write_text(f"{LINE}one\n")
    async with open_process(folder, *CULM, "logs", "-f") as running:
        await running.until_said(f"{LINE}one", RESUME_S)
        file.rename(file.with_name("culm.log.1"))
        file.write_text(f"{LINE}two\n")
        await running.until_said(f"{LINE}two")
        ended = await running.end(signal.SIGINT)
        assert (ended.status, ended.stderr.strip()) == (130, "")


async def test_following_ends_quietly_when_nobody_reads_any_more(folder: Path) -> None:
    file = folder / "state" / "culm" / "culm.log"
    file.parent.mkdir(parents=True)
    file.write_text(f"{LINE}one\n{LINE}two\n")
    script = "set +e; culm logs -f 2>&1 | head -n 1; echo ${PIPESTATUS[0]}"
    said = await printed_by_script(script, cwd=folder, env=environment(folder))
    assert said == f"{LINE}one\n141\n"


async def test_a_shell_completes_what_its_script_says(folder: Path) -> None:
    script = (
        'eval "$(culm completion bash)"',
        "COMP_WORDS=(culm sess) COMP_CWORD=1",
        "_culm_completion culm; printf '%s\\n' \"${COMPREPLY[@]}\"",
    )
    said = await printed_by_script(*script, cwd=folder, env=environment(folder))
    assert said == "sessions\n"
