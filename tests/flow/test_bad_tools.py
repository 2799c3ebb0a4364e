"""Bad input to the real tools, through the whole server: refused or asked, killed, told."""

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
from tests.flow.probes import Wound, script
from tests.flow.reading import assert_answered, results_of
from tests.flow.runs import Stage, open_heard
from tests.support import model_config
from tests.tools.sites import endless, leads_to, open_site, says

NAP = "98765.4321"  # Nobody else sleeps so long: by this the processes of a test are found.


@asynccontextmanager
async def open_real(folder: Path, *replies: Reply) -> AsyncGenerator[Stage]:
    """A stage with the tools that culm brings."""
    clock = Wound()
    async with open_model_server(script(*replies)) as model:
        config = model_config(model.url)
        async with open_flow(folder, "unix", clock=clock, config=config) as flow:
            remote = await (await flow.client()).open_workspace(flow.directory())
            session = await remote.create_session("unnamed")
            async with open_heard(remote) as heard:
                yield Stage(flow, clock, model, remote, session.id, heard)


async def results(stage: Stage, approve: str = "ask") -> list[ToolResult]:
    """What all calls came to; the turn went on after them, to its end."""
    run_id = await stage.prompt("go", approve=approve)
    await stage.heard.complete(run_id)
    return await told(stage)


async def told(stage: Stage) -> list[ToolResult]:
    messages = await stage.messages()
    assert_answered(messages)
    assert (await stage.rows())[-1] == ("assistant", "Fine.", "end_turn")
    return results_of(messages)


def step(*calls: ScriptedCall) -> Reply:
    return Reply(calls=list(calls))


def bash(command: str, **more: Json) -> ScriptedCall:
    return call("bash", command=command, **more)


def napping() -> list[str]:
    """The processes of this test that still run."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = process.read_bytes().decode(errors="replace")
        except OSError:
            continue  # It has just ended.
        if NAP in text:
            found.append(f"{process.parent.name} {text}")
    return found


async def test_arguments_that_are_wrong_are_named_and_the_turn_goes_on(tmp_path: Path) -> None:
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
    async with open_real(tmp_path, step(*calls)) as stage:
        for (name, given, field), result in zip(
            wrong, await results(stage, approve="deny"), strict=True
        ):
            assert (result.name, result.is_error) == (name, True), result
            assert field.lower() in result.content.lower(), (given, result.content)
            assert len(result.content) < 2_000


async def test_floods_and_stubborn_children_are_bounded_killed_and_told(tmp_path: Path) -> None:
    flood = bash("head -c 100000000 /dev/zero | tr '\\0' x")
    daemon = bash(f"(setsid nohup sleep {NAP} >/dev/null 2>&1 &); echo away")
    stubborn = bash(
        "trap '' TERM\n"
        f"setsid sh -c \"trap '' TERM; sleep {NAP} & sleep {NAP}\" &\n"
        f"for i in $(seq 100); do sleep {NAP} & done\n"
        f": > started; sleep {NAP}",
        timeout=7,
    )
    async with open_real(tmp_path, step(flood, daemon, stubborn)) as stage:
        run_id = await stage.prompt("go", approve="allow")
        await until((stage.flow.directory() / "started").exists)
        assert len(napping()) > 100
        await stage.clock.pass_pause(7)
        await stage.heard.complete(run_id)
        flooded, away, killed = await told(stage)
        assert napping() == []
    assert len(flooded.content) < 31_000
    assert "100,000,000" in flooded.content or "outputs" in flooded.content
    assert away.content.startswith("away\n")
    assert "1 process" in away.content
    assert "did not end within 7 s and was killed" in killed.content
    assert killed.is_error


async def test_paths_that_lead_away_or_are_no_files_are_refused_or_asked(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("nobody may see this")
    async with open_real(
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
    ) as stage:  # fmt: skip
        ground = stage.flow.directory()
        (ground / "link").symlink_to(secret)
        (ground / "away").symlink_to(tmp_path)
        (ground / "loop").symlink_to("loop")
        os.mkfifo(ground / "fifo")
        (Path(os.fsdecode(bytes(ground) + b"/un\xff"))).write_text("x")
        for result in await results(stage, approve="deny"):
            assert result.is_error, result
            assert "nobody may" not in result.content
        assert not (tmp_path / "new").exists()


async def test_what_is_swapped_between_the_ask_and_the_answer_is_not_followed(
    tmp_path: Path,
) -> None:
    plain, secret = tmp_path / "plain", tmp_path / "secret"
    plain.write_text("harmless")
    secret.write_text("nobody may see this")
    async with open_real(
        tmp_path,
        step(call("view", file_path="link")),
        step(call("view", file_path="link")),
        step(call("write", file_path="sub/new", content="x")),
        step(bash("touch here", working_dir="sub")),
    ) as stage:
        ground = stage.flow.directory()
        link, sub = ground / "link", ground / "sub"
        link.symlink_to(plain)
        sub.mkdir()
        run_id = await stage.prompt("go")

        first = await request_in(stage.heard, 1)
        assert first.path == str(tmp_path)
        assert str(plain) in first.description
        link.unlink()
        link.symlink_to(secret)
        forged = {"tool_name": "bash", "path": "/", "params": {"file_path": str(secret)}}
        assert not await answer(stage, "ask-of-nobody", "allow")
        assert await answer(stage, first.id, "allow", **forged)
        assert not await answer(stage, first.id, "allow_session")

        second = await request_in(stage.heard, 2)
        assert str(secret) in second.description
        link.unlink()
        secret.rename(tmp_path / "deeper")
        secret.symlink_to(tmp_path / "deeper")
        assert await answer(stage, second.id, "allow")

        for number in (3, 4):
            ask = await request_in(stage.heard, number)
            sub.rename(ground / f"was{number}")
            sub.symlink_to(tmp_path)
            assert await answer(stage, ask.id, "allow")
            await stage.asked(number + 1)
            sub.unlink()
            (ground / f"was{number}").rename(sub)
        await stage.heard.complete(run_id)
        harmless, swapped, written, moved = await told(stage)
        assert "harmless" in harmless.content
        for result in (swapped, written, moved):
            assert result.is_error
            assert "nobody may" not in result.content
        assert not (tmp_path / "new").exists()
        assert not (tmp_path / "here").exists()
        assert list(sub.iterdir()) == []


async def test_an_edit_that_misses_says_how_to_mend_it_and_changes_nothing(tmp_path: Path) -> None:
    text = "def one():\n\treturn 1\n\ndef two():\n\treturn 1\n"
    tries = (("def three():", ""), ("\treturn 1", ""), ("def two():\n    return 1", ""))
    edits = [call("edit", file_path="a.py", old_string=old, new_string=new) for old, new in tries]
    async with open_real(tmp_path, step(call("view", file_path="a.py")), step(*edits)) as stage:
        file = stage.flow.directory() / "a.py"
        file.write_text(text)
        _, absent, twice, spaced = await results(stage)
        assert [one.is_error for one in (absent, twice, spaced)] == [True, True, True]
        assert "def two()" in absent.content or "def one()" in absent.content
        assert "2" in twice.content or "twice" in twice.content
        assert "whitespace" in spaced.content.lower() or "blank" in spaced.content.lower()
        assert file.read_text() == text


async def test_a_fetch_stays_where_it_was_allowed_to_go(tmp_path: Path) -> None:
    async with (
        open_site(says("secret")) as (inner, came),
        open_site(says("public"), leads_to(f"http://{inner}/0"), endless) as (outer, _),
    ):
        asked = [call("fetch", url=f"http://{outer}/{path}") for path in (0, 1, 2)]
        async with open_real(tmp_path, step(*asked), Reply(text="Fine."), step(asked[0])) as stage:
            right, led, flood = await results(stage, approve="allow")
            denied = (await results(stage, approve="deny"))[-1]
    assert right.content == "public"
    assert led.is_error
    assert inner.rpartition(":")[0] in led.content
    assert came == []
    assert len(flood.content) < 200_000
    assert denied.is_error


async def test_a_command_that_hides_what_it_does_is_not_run_unasked(tmp_path: Path) -> None:
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
    async with open_real(tmp_path, step(*map(bash, hidden))) as stage:
        ground = stage.flow.directory()
        (ground / "bin").mkdir()
        (ground / "bin" / "ls").write_text("#!/bin/sh\n: > ran\n")
        (ground / "bin" / "ls").chmod(0o755)
        (ground / "a").write_text("x\n")
        (ground / "names").write_text("/etc/passwd\n")
        for name in ("away", "away2"):
            (ground / name).mkdir()
        (ground / "away" / "a").symlink_to("/etc/passwd")
        (ground / "away2" / "a").write_text("x\n")
        for command, result in zip(hidden, await results(stage, approve="deny"), strict=True):
            assert result.is_error, (command, result.content)
            assert result.content.startswith("Not allowed: "), (command, result.content)
        assert not (ground / "ran").exists()
