"""References: what they lead to, that nothing is read twice, and that no value is ever told."""

import asyncio
import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.config.references import (
    DEPTH_MAX,
    OUTPUT_BYTES_MAX,
    UnresolvedReference,
    Variables,
    failed,
    names_in,
    resolve,
    run_command,
    why_unresolved,
)
from tests.support import WAIT_S

ENV = {"KEY": "secret", "URL": "http://h", "EMPTY": "", "_x1": "low"}
PATH = {"PATH": os.environ["PATH"]}


async def quote(command: str) -> str:
    """Stands for a shell: shows what would have been run."""
    return f"<{command}>"


async def never(command: str) -> str:
    raise AssertionError(f"nobody wrote this command: {command}")


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
async def test_a_text_is_read_with_its_references_in_place(text: str, expected: str) -> None:
    assert await resolve(text, Variables({}, ENV), quote) == expected
    assert why_unresolved(text, Variables({}, ENV)) == ""


@pytest.mark.parametrize("text", ["$NONE", "${NONE}", "a$EMPTY", "$KEY$NONE"])
async def test_a_name_that_is_not_set_or_empty_is_named_and_no_value_is(text: str) -> None:
    variables = Variables({}, ENV)
    name = "$EMPTY" if "EMPTY" in text else "$NONE"
    with pytest.raises(UnresolvedReference, match=r"is not set") as caught:
        await resolve(text, variables, never)
    assert str(caught.value) == why_unresolved(text, variables) == f"{name} is not set"


@pytest.mark.parametrize(
    ("given_", "text", "expected"),
    [
        ({"KEY": "mine"}, "$KEY", "mine"),
        ({"A": "$B-$KEY", "B": "${C:-c}"}, "$A", "c-secret"),
        ({"KEY": "more-$KEY"}, "$KEY", "more-secret"),  # It means the outer one.
        ({"A": "$KEY", "KEY": "in-$KEY"}, "$A", "in-secret"),
        ({"A": "$$KEY"}, "$A", "$KEY"),
        ({"EMPTY": "full"}, "${EMPTY:-d}", "full"),
        ({"UNSET": ""}, "${UNSET:-d}", "d"),
    ],
)
async def test_what_the_configuration_sets_lies_over_the_environment(
    given_: dict[str, str], text: str, expected: str
) -> None:
    assert await resolve(text, Variables(given_, ENV), never) == expected


@pytest.mark.parametrize(
    ("given_", "why"),
    [
        ({"A": "$B", "B": "$A"}, "$A refers to itself by way of $B, $A"),
        ({"A": "$B", "B": "$C", "C": "x$A"}, "$A refers to itself by way of $C, $B, $A"),
        ({"A": "$A"}, "$A is not set"),
        ({"A": "$B", "B": "$NONE"}, "$NONE is not set"),
        ({"A": "$(id)"}, "$A is a command; only keys, addresses and headers may be"),
        ({"A": "$B", "B": "x$(id)"}, "$B is a command; only keys, addresses and headers may be"),
        ({"A": "$(id"}, "a command does not end: `)` is missing"),
    ],
)
async def test_names_that_lead_in_a_circle_or_to_a_command_are_told_by_name(
    given_: dict[str, str], why: str
) -> None:
    variables = Variables(given_, ENV)
    with pytest.raises(UnresolvedReference) as caught:
        await resolve("$A", variables, never)
    assert str(caught.value) == why_unresolved("$A", variables) == why


async def test_a_chain_of_names_has_a_bound() -> None:
    chain = {f"V{n}": f"$V{n + 1}" for n in range(DEPTH_MAX)}
    last = {f"V{DEPTH_MAX}": "end"}
    assert await resolve("$V0", Variables(chain, last), never) == "end"
    assert why_unresolved("$V0", Variables({**chain, f"V{DEPTH_MAX}": "$W"}, {"W": "end"}))
    forty = {f"A{n}": f"$A{n + 1}" * 2 for n in range(40)}  # 2**40 characters, if it had none.
    assert why_unresolved("$A0", Variables(forty, {"A40": "x"}))


@given(st.text(st.sampled_from("$(){}:-$KEYab \n`;")) | st.text())
async def test_what_a_variable_holds_is_never_read_or_run_again(held: str) -> None:
    if held:
        variables = Variables({}, {"HELD": held, "KEY": "secret"})
        for text in ("$HELD", "${HELD}", "${HELD:-d}"):
            assert await resolve(text, variables, never) == held
        assert await resolve("$(x)$HELD", variables, quote) == f"<x>{held}"


async def test_what_a_command_prints_is_never_read_or_run_again() -> None:
    async def run(command: str) -> str:
        assert command == "x"
        return "$KEY $(rm -rf ~) $$"

    assert await resolve("$(x)", Variables({}, ENV), run) == "$KEY $(rm -rf ~) $$"


@given(st.text(st.sampled_from("$(){}:-AB_1 $")) | st.text())
async def test_any_text_is_read_or_refused_and_both_ways_of_asking_agree(text: str) -> None:
    variables = Variables({"A": "a"}, {"B": "b"})
    if why := why_unresolved(text, variables):
        with pytest.raises(UnresolvedReference) as caught:
            await resolve(text, variables, quote)
        assert str(caught.value) == why
    else:
        resolved = await resolve(text, variables, quote)
        assert "$" in text or resolved == text


def test_the_names_in_a_text_are_those_outside_of_commands() -> None:
    assert names_in("$A/${B}/${C:-$D}$$E$(f $G)100$") == {"A", "B", "C"}
    assert names_in("plain") == names_in("$A $(never closed") == set()


def test_a_run_that_needs_the_value_is_told_where_it_stands() -> None:
    problem = failed("providers.p.api_key", UnresolvedReference("$KEY is not set"))
    assert (problem.title, problem.message, problem.hint) == (
        "A reference leads nowhere",
        "providers.p.api_key: $KEY is not set",
        "`culm config check` names every one",
    )


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
        ("cat", ""),  # Nobody types anything.
        ("echo told >&2", ""),
        ("true", ""),
        ("", ""),
    ],
)
async def test_a_command_says_what_it_prints_without_its_line_ends(
    tmp_path: Path, command: str, output: str
) -> None:
    env = {**PATH, "NAME": "in its environment"}
    async with asyncio.timeout(WAIT_S):
        assert await run_command(command, env, tmp_path) == output


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("echo secret; echo secret >&2; exit 3", "a command failed with status 3"),
        ("echo secret; kill -9 $$", "a command failed with status -9"),
        ("no-such-secret-program", "a command failed with status 127"),
        ("echo 'secret", "a command failed with status 2"),
        ("yes secret", f"a command printed more than {OUTPUT_BYTES_MAX} bytes"),
    ],
)
async def test_a_command_that_fails_is_told_without_its_words(
    tmp_path: Path, command: str, why: str
) -> None:
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(UnresolvedReference) as caught:
            await run_command(command, PATH, tmp_path)
    assert str(caught.value) == why


@pytest.mark.parametrize(
    ("command", "env", "folder"),
    [
        ("echo", {"SECRET": "\ud800"}, "."),
        ("echo", PATH, "nowhere"),
    ],
)
async def test_a_command_that_cannot_be_started_is_told_so(
    tmp_path: Path, command: str, env: dict[str, str], folder: str
) -> None:
    with pytest.raises(UnresolvedReference, match="cannot be started") as caught:
        await run_command(command, env, tmp_path / folder)
    assert "SECRET" not in str(caught.value)


# A child in the background holds the pipe, so that its end is never read.
HOLDING = "trap '' TERM HUP; sleep 1000 & echo $$ $! > pids; echo secret; mv pids done"


@pytest.mark.parametrize(
    "command",
    [f"{HOLDING}; sleep 1000", f"{HOLDING}; exec >&-; sleep 1000", f"{HOLDING}; yes secret"],
)
async def test_a_command_that_does_not_end_is_ended_with_all_it_started(
    tmp_path: Path, command: str
) -> None:
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(
            UnresolvedReference, match=r"took longer than 0\.5 s|printed more"
        ) as caught:
            await run_command(command, PATH, tmp_path, within_s=0.5)
    assert "secret" not in str(caught.value)
    await until_gone(tmp_path / "done")


async def test_whoever_stops_waiting_for_a_command_ends_it(tmp_path: Path) -> None:
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        command = f"{HOLDING}; sleep 1000"
        running = tasks.create_task(run_command(command, PATH, tmp_path), name="command")
        while not (tmp_path / "done").exists():
            await asyncio.sleep(0.001)
        running.cancel()
    assert running.cancelled()
    await until_gone(tmp_path / "done")


async def test_a_command_cancelled_at_any_moment_of_its_start_leaves_no_descriptor(
    tmp_path: Path,
) -> None:
    before = set(Path("/dev/fd").iterdir())
    for steps in range(6):
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(run_command("exec sleep 60", PATH, tmp_path))
            for _ in range(steps):
                await asyncio.sleep(0)
            running.cancel()
        gc.collect()  # A file that was let go unclosed is a warning, which is an error here.
    assert set(Path("/dev/fd").iterdir()) == before


async def until_gone(pids: Path) -> None:
    """Wait until the processes are dead that were told to end; bounded."""
    async with asyncio.timeout(WAIT_S):
        for pid in pids.read_text().split():
            while is_running(int(pid)):
                await asyncio.sleep(0.001)


def is_running(pid: int) -> bool:
    """Whether it is there and more than a body that somebody has yet to fetch."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_a_child_that_left_and_holds_the_output_does_not_keep_the_value_waiting(
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
    """The process that writes its number there; bounded."""
    async with asyncio.timeout(WAIT_S):
        while not file.exists() or not (text := file.read_text()):
            await asyncio.sleep(0.001)
    return int(text)
