"""Bad input to the real tools, through the whole server."""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, ScriptedCall
from culm.wire.codec import Json
from culm.wire.messages import ToolResult
from tests.flow.asking import answer, call, request_in
from tests.flow.conftest import open_flow
from tests.flow.drive import until
from tests.flow.probes import WaitableClock, script
from tests.flow.reading import assert_answered, results_of
from tests.flow.runs import Harness, open_received
from tests.support import model_config
from tests.tools.sites import endless, open_site, redirect_to, respond_with

SLEEP_S = "98765.4321"  # A unique duration, by which the processes of a test are found.


@asynccontextmanager
async def open_with_real_tools(folder: Path, *replies: Reply) -> AsyncGenerator[Harness]:
    """A harness with the real tools."""
    clock = WaitableClock()
    async with open_model_server(script(*replies)) as model:
        config = model_config(model.url)
        async with open_flow(folder, "unix", clock=clock, config=config) as flow:
            remote = await (await flow.client()).open_workspace(flow.directory())
            session = await remote.create_session("unnamed")
            async with open_received(remote) as received:
                yield Harness(flow, clock, model, remote, session.id, received)


async def results(harness: Harness, approve: str = "ask") -> list[ToolResult]:
    """Results of all calls; the turn continued after them to its end."""
    run_id = await harness.prompt("go", approve=approve)
    await harness.received.complete(run_id)
    return await finished_results(harness)


async def finished_results(harness: Harness) -> list[ToolResult]:
    messages = await harness.messages()
    assert_answered(messages)
    assert (await harness.rows())[-1] == ("assistant", "Fine.", "end_turn")
    return results_of(messages)


def step(*calls: ScriptedCall) -> Reply:
    return Reply(calls=list(calls))


def bash(command: str, **more: Json) -> ScriptedCall:
    return call("bash", command=command, **more)


def sleeping_processes() -> list[str]:
    """The processes of this test that are still running."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = process.read_bytes().decode(errors="replace")
        except OSError:
            continue  # It has just ended.
        if SLEEP_S in text:
            found.append(f"{process.parent.name} {text}")
    return found


async def test_invalid_arguments_are_named_and_the_turn_continues(tmp_path: Path) -> None:
    wrong: list[tuple[str, dict[str, Json] | str, str]] = [
        ("bash", "no json", "JSON"),
        ("bash", '["a list"]', "JSON"),
        ("bash", {}, "command"),
        ("bash", {"command": 5}, "command"),
        ("bash", {"command": "ls", "timeout": -1}, "timeout"),
        ("bash", {"command": "ls", "run_in_background": "yes"}, "run_in_background"),
        ("view", {"file_path": ""}, "file_path"),
        ("view", {"file_path": "a", "offset": 1.5}, "offset"),
        ("edit", {"file_path": "a", "old_string": "b"}, "new_string"),
        ("multiedit", {"file_path": "a", "edits": []}, "edits"),
        ("grep", {"pattern": ["a"]}, "pattern"),
        ("fetch", {"url": "file:///etc/passwd"}, "url"),
        ("nothing", {}, "nothing"),
    ]
    calls = [ScriptedCall(name=name, input=given) for name, given, _ in wrong]
    async with open_with_real_tools(tmp_path, step(*calls)) as harness:
        for (name, given, field), result in zip(
            wrong, await results(harness, approve="deny"), strict=True
        ):
            assert (result.name, result.is_error) == (name, True), result
            assert field.lower() in result.content.lower(), (given, result.content)
            assert len(result.content) < 2_000


async def test_large_output_is_truncated_and_stubborn_processes_are_killed(tmp_path: Path) -> None:
    flood = bash("head -c 100000000 /dev/zero | tr '\\0' x")
    daemon = bash(f"(setsid nohup sleep {SLEEP_S} >/dev/null 2>&1 &); echo away")
    stubborn = bash(
        "trap '' TERM\n"
        f"setsid sh -c \"trap '' TERM; sleep {SLEEP_S} & sleep {SLEEP_S}\" &\n"
        f"for i in $(seq 100); do sleep {SLEEP_S} & done\n"
        f": > started; sleep {SLEEP_S}",
        timeout=7,
    )
    async with open_with_real_tools(tmp_path, step(flood, daemon, stubborn)) as harness:
        run_id = await harness.prompt("go", approve="allow")
        await until((harness.flow.directory() / "started").exists)
        await until(lambda: len(sleeping_processes()) > 100)  # Some may be about to `exec`.
        await harness.clock.pass_pause(7)
        await harness.received.complete(run_id)
        flooded, away, killed = await finished_results(harness)
        assert sleeping_processes() == []
    assert len(flooded.content) < 31_000
    assert "100,000,000" in flooded.content or "outputs" in flooded.content
    assert away.content.startswith("away\n")
    assert "1 process" in away.content
    assert "did not end within 7 s and was killed" in killed.content
    assert killed.is_error


async def test_paths_outside_the_project_or_special_files_are_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("nobody may see this")
    async with open_with_real_tools(
        tmp_path,
        step(
            *(
                call("view", file_path=path)
                for path in (
                    "../secret", "link", "loop", "fifo", "/dev/zero", "/proc/self/environ",
                    "x" * 5000, "a/" * 2400, "link/../../secret", "~/../../etc/shadow-", "un\ufffd",
                )
            ),
            call("write", file_path="../new", content="x"),
            call("write", file_path="fifo", content="x"),
            call("write", file_path="/dev/full", content="x"),
            call("ls", path="away"),
            call("grep", pattern="nobody", path="away"),
            bash("cat link; cat fifo < /dev/null", timeout=5),
        ),
    ) as harness:  # fmt: skip
        project = harness.flow.directory()
        (project / "link").symlink_to(secret)
        (project / "away").symlink_to(tmp_path)
        (project / "loop").symlink_to("loop")
        os.mkfifo(project / "fifo")
        (Path(os.fsdecode(bytes(project) + b"/un\xff"))).write_text("x")
        for result in await results(harness, approve="deny"):
            assert result.is_error, result
            assert "nobody may" not in result.content
        assert not (tmp_path / "new").exists()


async def test_path_swapped_between_ask_and_answer_is_not_followed(
    tmp_path: Path,
) -> None:
    plain, secret = tmp_path / "plain", tmp_path / "secret"
    plain.write_text("harmless")
    secret.write_text("nobody may see this")
    async with open_with_real_tools(
        tmp_path,
        step(call("view", file_path="link")),
        step(call("view", file_path="link")),
        step(call("write", file_path="sub/new", content="x")),
        step(bash("touch here", working_dir="sub")),
    ) as harness:
        project = harness.flow.directory()
        link, sub = project / "link", project / "sub"
        link.symlink_to(plain)
        sub.mkdir()
        run_id = await harness.prompt("go")

        first = await request_in(harness.received, 1)
        assert first.path == str(tmp_path)
        assert str(plain) in first.description
        link.unlink()
        link.symlink_to(secret)
        forged = {"tool_name": "bash", "path": "/", "params": {"file_path": str(secret)}}
        assert not await answer(harness, "ask-of-nobody", "allow")
        assert await answer(harness, first.id, "allow", **forged)
        assert not await answer(harness, first.id, "allow_session")

        second = await request_in(harness.received, 2)
        assert str(secret) in second.description
        link.unlink()
        secret.rename(tmp_path / "deeper")
        secret.symlink_to(tmp_path / "deeper")
        assert await answer(harness, second.id, "allow")

        for number in (3, 4):
            ask = await request_in(harness.received, number)
            sub.rename(project / f"was{number}")
            sub.symlink_to(tmp_path)
            assert await answer(harness, ask.id, "allow")
            await harness.until_asked(number + 1)
            sub.unlink()
            (project / f"was{number}").rename(sub)
        await harness.received.complete(run_id)
        harmless, swapped, written, moved = await finished_results(harness)
        assert "harmless" in harmless.content
        for result in (swapped, written, moved):
            assert result.is_error
            assert "nobody may" not in result.content
        assert not (tmp_path / "new").exists()
        assert not (tmp_path / "here").exists()
        assert list(sub.iterdir()) == []


async def test_failed_edit_explains_the_mismatch_and_changes_nothing(tmp_path: Path) -> None:
    text = "def one():\n\treturn 1\n\ndef two():\n\treturn 1\n"
    tries = (("def three():", ""), ("\treturn 1", ""), ("def two():\n    return 1", ""))
    edits = [call("edit", file_path="a.py", old_string=old, new_string=new) for old, new in tries]
    async with open_with_real_tools(
        tmp_path, step(call("view", file_path="a.py")), step(*edits)
    ) as harness:
        file = harness.flow.directory() / "a.py"
        file.write_text(text)
        _, absent, twice, spaced = await results(harness)
        assert [one.is_error for one in (absent, twice, spaced)] == [True, True, True]
        assert "def two()" in absent.content or "def one()" in absent.content
        assert "2" in twice.content or "twice" in twice.content
        assert "whitespace" in spaced.content.lower() or "blank" in spaced.content.lower()
        assert file.read_text() == text


async def test_fetch_does_not_leave_the_allowed_host(tmp_path: Path) -> None:
    async with (
        open_site(respond_with("secret")) as (inner, came),
        open_site(respond_with("public"), redirect_to(f"http://{inner}/0"), endless) as (outer, _),
    ):
        asked = [call("fetch", url=f"http://{outer}/{path}") for path in (0, 1, 2)]
        async with open_with_real_tools(
            tmp_path, step(*asked), Reply(text="Fine."), step(asked[0])
        ) as harness:
            right, redirected, flood = await results(harness, approve="allow")
            denied = (await results(harness, approve="deny"))[-1]
    assert right.content == "public"
    assert redirected.is_error
    assert inner.rpartition(":")[0] in redirected.content
    assert came == []
    assert len(flood.content) < 200_000
    assert denied.is_error


async def test_command_with_hidden_effects_is_not_run_without_an_ask(tmp_path: Path) -> None:
    hidden = (
        "for PATH in ./bin; do ls; done",
        "env -i git status",
        "env -u GIT_CONFIG_COUNT git status",
        "sed 's/[]/x]/g;s/w ran/y/' a",
        "diff away away2",
        "strings @names",
        "git status --ignore-submodules=none",
        "PATH=./bin ls",
        "./bin/ls",
        "ls > ran",
        "ls\u00a0; touch ran",
        "ls $(touch ran)",
        "echo x | tee ran",
        "find . -fprint ran",
        "sort -o ran a",
        "git -c core.fsmonitor=./bin/ls status",
        "cat ~/.bashrc",
    )
    async with open_with_real_tools(tmp_path, step(*map(bash, hidden))) as harness:
        project = harness.flow.directory()
        (project / "bin").mkdir()
        (project / "bin" / "ls").write_text("#!/bin/sh\n: > ran\n")
        (project / "bin" / "ls").chmod(0o755)
        (project / "a").write_text("x\n")
        (project / "names").write_text("/etc/passwd\n")
        for name in ("away", "away2"):
            (project / name).mkdir()
        (project / "away" / "a").symlink_to("/etc/passwd")
        (project / "away2" / "a").write_text("x\n")
        for command, result in zip(hidden, await results(harness, approve="deny"), strict=True):
            assert result.is_error, (command, result.content)
            assert result.content.startswith("Not allowed: "), (command, result.content)
        assert not (project / "ran").exists()
