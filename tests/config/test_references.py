"""References: their values, no second expansion, and no value in an error message."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.config.references import (
    DEPTH_MAX,
    OUTPUT_BYTES_MAX,
    UnresolvedReference,
    Variables,
    names_in,
    resolve,
    run_command,
    why_unresolved,
)
from tests.support import WAIT_S

ENV = {"KEY": "secret", "URL": "http://h", "EMPTY": "", "_x1": "low"}
PATH = {"PATH": os.environ["PATH"]}


async def quote(command: str) -> str:
    """Stand in for a shell: return the command that would have run."""
    return f"<{command}>"


async def never(command: str) -> str:
    raise AssertionError(f"unexpected command: {command}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("plain", "plain"),
        ("$KEY", "secret"),
        ("${KEY}", "secret"),
        ("Bearer $KEY!", "Bearer secret!"),
        ("$URL/v1?k=${KEY}x", "http://h/v1?k=secretx"),
        ("$_x1", "low"),
        ("${NONE:-http://other}", "http://other"),
        ("${EMPTY:-given}", "given"),
        ("${NONE:-}", ""),
        ("${KEY:-unused}", "secret"),
        ("$$KEY", "$KEY"),
        ("$$$KEY", "$secret"),
        ("100$", "100$"),
        ("$1 $-x ${} ${1}", "$1 $-x ${} ${1}"),
        ("$(echo a)", "<echo a>"),
        ("x$(a)y$(b)z", "x<a>y<b>z"),
        ("$(a $KEY ${NONE})", "<a $KEY ${NONE}>"),
        ("$(f (x) $(g) (y))", "<f (x) $(g) (y)>"),
        ("$KEYé", "secreté"),
        ("$(a $(b $(c (d))))", "<a $(b $(c (d)))>"),
        ("$$(echo a)", "$(echo a)"),
    ],
)
async def test_references_in_a_text_are_expanded(text: str, expected: str) -> None:
    assert await resolve(text, Variables({}, ENV), quote) == expected
    assert why_unresolved(text, Variables({}, ENV)) == ""


@pytest.mark.parametrize("text", ["$NONE", "${NONE}", "a$EMPTY", "$KEY$NONE"])
async def test_an_unset_or_empty_variable_is_named_without_any_value(text: str) -> None:
    variables = Variables({}, ENV)
    name = "$EMPTY" if "EMPTY" in text else "$NONE"
    with pytest.raises(UnresolvedReference, match=r"is not set") as caught:
        await resolve(text, variables, never)
    assert str(caught.value) == why_unresolved(text, variables) == f"{name} is not set"


@pytest.mark.parametrize(
    ("variables_set", "text", "expected"),
    [
        ({"KEY": "mine"}, "$KEY", "mine"),
        ({"A": "$B-$KEY", "B": "${C:-c}"}, "$A", "c-secret"),
        ({"KEY": "more-$KEY"}, "$KEY", "more-secret"),  # The inner $KEY is that of the environment.
        ({"A": "$KEY", "KEY": "in-$KEY"}, "$A", "in-secret"),
        ({"A": "$$KEY"}, "$A", "$KEY"),
        ({"EMPTY": "full"}, "${EMPTY:-d}", "full"),
        ({"UNSET": ""}, "${UNSET:-d}", "d"),
    ],
)
async def test_configured_variables_override_the_environment(
    variables_set: dict[str, str], text: str, expected: str
) -> None:
    assert await resolve(text, Variables(variables_set, ENV), never) == expected


@pytest.mark.parametrize(
    ("variables_set", "reason"),
    [
        ({"A": "$B", "B": "$A"}, "$A refers to itself by way of $B, $A"),
        ({"A": "$B", "B": "$C", "C": "x$A"}, "$A refers to itself by way of $C, $B, $A"),
        ({"A": "$A"}, "$A is not set"),
        ({"A": "$B", "B": "$NONE"}, "$NONE is not set"),
        (
            {"A": "$(id)"},
            "$A is a command; commands are only allowed in keys, addresses and headers",
        ),
        (
            {"A": "$B", "B": "x$(id)"},
            "$B is a command; commands are only allowed in keys, addresses and headers",
        ),
        ({"A": "$(id"}, "a command does not end: `)` is missing"),
    ],
)
async def test_circular_references_and_commands_in_variables_are_refused_by_name(
    variables_set: dict[str, str], reason: str
) -> None:
    variables = Variables(variables_set, ENV)
    with pytest.raises(UnresolvedReference) as caught:
        await resolve("$A", variables, never)
    assert str(caught.value) == why_unresolved("$A", variables) == reason


async def test_a_chain_of_references_is_bounded() -> None:
    chain = {f"V{n}": f"$V{n + 1}" for n in range(DEPTH_MAX)}
    last = {f"V{DEPTH_MAX}": "end"}
    assert await resolve("$V0", Variables(chain, last), never) == "end"
    assert why_unresolved("$V0", Variables({**chain, f"V{DEPTH_MAX}": "$W"}, {"W": "end"}))
    forty = {f"A{n}": f"$A{n + 1}" * 2 for n in range(40)}  # Without the bound: 2**40 characters.
    assert why_unresolved("$A0", Variables(forty, {"A40": "x"}))


@given(st.text(st.sampled_from("$(){}:-$KEYab \n`;")) | st.text())
async def test_the_value_of_a_variable_is_never_expanded(value: str) -> None:
    if value:
        variables = Variables({}, {"HELD": value, "KEY": "secret"})
        for text in ("$HELD", "${HELD}", "${HELD:-d}"):
            assert await resolve(text, variables, never) == value
        assert await resolve("$(x)$HELD", variables, quote) == f"<x>{value}"


async def test_the_output_of_a_command_is_never_expanded() -> None:
    async def run(command: str) -> str:
        assert command == "x"
        return "$KEY $(rm -rf ~) $$"

    assert await resolve("$(x)", Variables({}, ENV), run) == "$KEY $(rm -rf ~) $$"


@given(st.text(st.sampled_from("$(){}:-AB_1 $")) | st.text())
async def test_resolve_and_why_unresolved_agree_on_any_text(text: str) -> None:
    variables = Variables({"A": "a"}, {"B": "b"})
    if reason := why_unresolved(text, variables):
        with pytest.raises(UnresolvedReference) as caught:
            await resolve(text, variables, quote)
        assert str(caught.value) == reason
    else:
        resolved = await resolve(text, variables, quote)
        assert "$" in text or resolved == text


def test_names_inside_commands_are_not_references() -> None:
    assert names_in("$A/${B}/${C:-$D}$$E$(f $G)100$") == {"A", "B", "C"}
    assert names_in("plain") == names_in("$A $(never closed") == set()


# --- commands


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("printf secret", "secret"),
        ("printf 'a b\\r\\n\\n'", "a b"),
        ("printf ' a\\nb \\n'", " a\nb "),
        ("printf '\\377'", "\ufffd"),
        ("echo $NAME", "in its environment"),
        ("pwd -P | grep -c .", "1"),
        ("cat", ""),  # Its stdin is empty.
        ("echo told >&2", ""),
        ("true", ""),
        ("", ""),
    ],
)
async def test_a_command_returns_its_output_without_trailing_line_ends(
    tmp_path: Path, command: str, output: str
) -> None:
    env = {**PATH, "NAME": "in its environment"}
    async with asyncio.timeout(WAIT_S):
        assert await run_command(command, env, tmp_path) == output


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("echo secret; echo secret >&2; exit 3", "a command failed with status 3"),
        ("echo secret; kill -9 $$", "a command failed with status -9"),
        ("no-such-secret-program", "a command failed with status 127"),
        ("echo 'secret", "a command failed with status 2"),
        ("yes secret", f"a command printed more than {OUTPUT_BYTES_MAX} bytes"),
    ],
)
async def test_a_failed_command_is_reported_without_its_text(
    tmp_path: Path, command: str, reason: str
) -> None:
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(UnresolvedReference) as caught:
            await run_command(command, PATH, tmp_path)
    assert str(caught.value) == reason


@pytest.mark.parametrize(
    ("command", "env", "folder"),
    [
        ("echo", {"SECRET": "\ud800"}, "."),
        ("echo", PATH, "nowhere"),
    ],
)
async def test_a_command_that_cannot_be_started_is_reported(
    tmp_path: Path, command: str, env: dict[str, str], folder: str
) -> None:
    with pytest.raises(UnresolvedReference, match="cannot be started") as caught:
        await run_command(command, env, tmp_path / folder)
    assert "SECRET" not in str(caught.value)


# A child in the background keeps the pipe open, so that its end is never read.
KEEP_PIPE_OPEN = "trap '' TERM HUP; sleep 1000 & echo $$ $! > pids; echo secret; mv pids done"


@pytest.mark.parametrize(
    "command",
    [
        f"{KEEP_PIPE_OPEN}; sleep 1000",
        f"{KEEP_PIPE_OPEN}; exec >&-; sleep 1000",
        f"{KEEP_PIPE_OPEN}; yes secret",
    ],
)
async def test_a_command_that_does_not_end_is_ended_with_its_children(
    tmp_path: Path, command: str
) -> None:
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(
            UnresolvedReference, match=r"took longer than 0\.5 s|printed more"
        ) as caught:
            await run_command(command, PATH, tmp_path, within_s=0.5)
    assert "secret" not in str(caught.value)
    await until_gone(tmp_path / "done")


async def test_canceling_the_wait_ends_the_command(tmp_path: Path) -> None:
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        command = f"{KEEP_PIPE_OPEN}; sleep 1000"
        running = tasks.create_task(run_command(command, PATH, tmp_path), name="command")
        while not (tmp_path / "done").exists():
            await asyncio.sleep(0.001)
        running.cancel()
    assert running.cancelled()
    await until_gone(tmp_path / "done")


async def test_a_command_canceled_during_its_start_leaves_no_descriptor(
    tmp_path: Path,
) -> None:
    before = set(Path("/dev/fd").iterdir())
    for steps in range(6):
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(run_command("exec sleep 60", PATH, tmp_path))
            for _ in range(steps):
                await asyncio.sleep(0)
            running.cancel()
        gc.collect()  # An unclosed file gives a warning, which is an error here.
    assert set(Path("/dev/fd").iterdir()) == before


REAPS = """
import asyncio, os, sys
from pathlib import Path
from culm.config.references import run_command
from culm.processes.linux import become_subreaper
become_subreaper()
command = "(sleep 1000 & echo $! > pid); echo key"
assert asyncio.run(run_command(command, os.environ, Path(sys.argv[1]))) == "key"
try:
    print(os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print("no child")
"""


def test_killed_orphans_of_a_command_are_reaped(tmp_path: Path) -> None:
    """A server adopts the orphans of its commands, as it is a subreaper."""
    run = subprocess.run(
        [sys.executable, "-c", REAPS, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    assert (run.stdout, run.stderr) == ("no child\n", "")


async def until_gone(pids: Path) -> None:
    """Wait until the processes are dead; bounded."""
    async with asyncio.timeout(WAIT_S):
        for pid in pids.read_text().split():
            while is_running(int(pid)):
                await asyncio.sleep(0.001)


def is_running(pid: int) -> bool:
    """Tell if the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_a_detached_child_that_keeps_the_output_open_does_not_block(
    tmp_path: Path,
) -> None:
    leave = "setsid sh -c 'echo $$ > pid; exec sleep 1000'"
    command = f"{leave} & until [ -s pid ]; do sleep 0.01; done; echo key"
    try:
        async with asyncio.timeout(WAIT_S):
            assert await run_command(command, PATH, tmp_path, within_s=2 * WAIT_S) == "key"
    finally:
        os.kill(await pid_in(tmp_path / "pid"), signal.SIGKILL)


async def pid_in(file: Path) -> int:
    """Wait for the pid that a process writes to `file`; bounded."""
    async with asyncio.timeout(WAIT_S):
        while not file.exists() or not (text := file.read_text()):
            await asyncio.sleep(0.001)
    return int(text)
