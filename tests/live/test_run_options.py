"""The options of `culm run`: files, budgets, roles, output formats, exit status."""

import json
import os
from pathlib import Path
from typing import Any

import jsonschema_rs  # Comes with schemathesis.
import pytest

from culm.client.follower import open_mirror
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, ScriptedCall
from tests.live.harness import ROOT, make_directory, open_process
from tests.live.machine import open_machine
from tests.live.run_harness import HELD, open_agent, questions, script
from tests.live.test_run_command import (
    ENV,
    HELLO,
    RESUME_S,
    open_model_config,
    open_run,
    places,
    run,
)
from tests.support import contract

ASKS = Reply(text="I write.", calls=[ScriptedCall(name="bash", input={"command": "touch made"})])
HOSTILE = Reply(text="a\x1b]0;title\x07b\x1b[2J\rc")


def last_of(stdout: str) -> dict[str, Any]:
    return json.loads(stdout.splitlines()[-1])


@contract("CLI-1")
async def test_exit_status_matches_the_outcome_of_the_run(folder: Path) -> None:
    async with open_model_config(folder, ASKS, HELLO, ASKS, HELLO):
        refused = await run(folder, "--approve", "deny", "write it")  # The agent continues.
        assert (refused.status, refused.stdout) == (0, "I write.\nHello there.")
        spent = await run(folder, "--budget", "1step", "--approve", "auto", "write it")
        assert (spent.status, spent.stderr.count("Traceback")) == (5, 0)
        assert (await run(folder, "hello")).status == 0


@contract("CLI-1")
async def test_timeout_option_ends_the_run_with_status_5(folder: Path) -> None:
    async with (
        open_model_server(script(HELD)) as model,
        open_agent(folder, model),
        open_run(folder, "--timeout", "1s", "hello") as running,
    ):
        ended = await running.wait(RESUME_S)
        assert (ended.status, ended.stderr.count("Traceback")) == (5, 0)


@contract("CLI-1", "CLI-9")
@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("--attach", "nowhere.txt", "hi"), "cannot attach nowhere.txt: No such file"),
        (("--attach", ".", "hi"), "it is a directory"),
        (("--attach", "fifo", "hi"), "it is not a regular file"),
        (("--attach", "large.txt", "hi"), "it is larger than 10 MiB"),
        (("--attach", "data.bin", "hi"), "is not supported"),
        (("--budget", "much", "hi"), "much is not a budget"),
        (("--budget", "0", "hi"), "is not a positive limit"),
        (("--timeout", "soon", "hi"), "soon is not a time"),
        (("--approve", "allow", "hi"), "--approve auto"),
        (("--role", "worker", "--continue", "hi"), "cannot be used together"),
        (("--json", "--output", "json", "hi"), "cannot be used together"),
        (("--outputt", "json", "hi"), "--output"),
    ],
)
async def test_invalid_option_exits_2_with_the_reason_and_starts_no_server(
    folder: Path, args: tuple[str, ...], reason: str
) -> None:
    project = make_directory(folder)
    os.mkfifo(project / "fifo")
    (project / "large.txt").write_bytes(b"x" * (10 << 20) + b"y")
    (project / "data.bin").write_bytes(b"\xff\x00\xfe")
    at = [f"{project}/{arg}" if (project / arg).exists() and arg != "." else arg for arg in args]
    ended = await run(folder, *at)
    assert (ended.status, ended.stdout) == (2, "")
    assert reason in ended.stderr
    assert ended.stderr.startswith("culm: ")
    assert not (folder / "s").exists()


async def test_attached_file_is_sent_with_the_prompt(folder: Path) -> None:
    async with open_model_config(folder, HELLO) as model:
        file = make_directory(folder) / "plums.txt"
        file.write_text("Plums are blue.")
        ended = await run(folder, "--attach", str(file), "what is this")
        assert ended.status == 0
        message = questions(model)[-1].conversation[-1]
        assert "what is this" in message[1]
        assert "Plums are blue." in str(questions(model)[-1])


@contract("CLI-5")
async def test_output_option_prints_one_json_object_or_markdown(folder: Path) -> None:
    schema = json.loads((ROOT / "docs" / "run-lines.schema.json").read_text())
    async with open_model_config(folder, ASKS, HELLO, HELLO, ASKS, HELLO):
        one = await run(folder, "--output", "json", "--approve", "auto", "write it")
        assert (one.status, len(one.stdout.splitlines())) == (0, 1)
        jsonschema_rs.validate(schema, last_of(one.stdout))
        assert last_of(one.stdout)["text"] == "Hello there."
        page = await run(folder, "--output", "markdown", "say hello")
        assert page.stdout.startswith("# say hello\n")
        assert "Hello there." in page.stdout
        lines = await run(folder, "--json", "--approve", "auto", "again")
        for line in lines.stdout.splitlines():
            jsonschema_rs.validate(schema, json.loads(line))
        assert last_of(lines.stdout)["exit_status"] == 0


@contract("CLI-3", "CLIENT-4")
async def test_detached_run_continues_and_can_be_attached(folder: Path) -> None:
    async with (
        open_model_server(script(HELD)) as model,
        open_agent(folder, model) as (_, client),
    ):
        remote = await client.open_workspace(make_directory(folder))
        detached = await run(folder, "--detach", "hello")
        run_id = detached.stdout.strip()
        assert (detached.status, (await remote.run(run_id)).outcome) == (0, None)
        assert f"`culm attach {run_id}`" in detached.stderr
        async with open_mirror(remote) as follower:
            model.release()
            async with open_process(
                folder, "-m", "culm", "attach", *places(folder), run_id[:8], env=ENV
            ) as attached:
                ended = await attached.wait(RESUME_S)
            await follower.until(lambda mirror: not mirror.runs)
        assert (ended.status, ended.stderr.splitlines()[0]) == (0, "> hello")


async def test_role_option_runs_an_agent_and_an_unknown_role_is_refused(folder: Path) -> None:
    (folder / "culm.json").write_text("{}")
    async with open_machine(folder):
        ended = await run(folder, "--role", "explorer", "--json", "list the files")
        assert ended.status == 0, ended.stderr
        assert last_of(ended.stdout)["outcome"] == "end_turn"
        unknown = await run(folder, "--role", "poet", "rhyme")
        assert (unknown.status, unknown.stdout) == (2, "")
        assert "poet" in unknown.stderr


@contract("CLI-4")
async def test_model_output_is_raw_in_json_and_escaped_in_text(
    folder: Path,
) -> None:
    async with open_model_config(folder, HOSTILE):
        piped = await run(folder, "--json", "say it")
        assert last_of(piped.stdout)["text"] == HOSTILE.text
        session_id = last_of(piped.stdout)["session_id"]
        async with open_process(
            folder, "-m", "culm", "sessions", "show", session_id, *places(folder), env=ENV
        ) as shown:
            ended = await shown.wait(RESUME_S)
        assert (ended.status, "\x1b" in ended.stdout) == (0, False)


@contract("CLI-1")
async def test_unreachable_tcp_server_exits_6_with_a_hint(folder: Path) -> None:
    async with open_process(
        folder, "-m", "culm", "run", "--host", "tcp://127.0.0.1:1", "hi", env=ENV
    ) as running:
        assert running.process.stdin is not None, "asked for a pipe"
        running.process.stdin.close()
        ended = await running.wait(RESUME_S)
    assert (ended.status, ended.stdout) == (6, "")
    assert ended.stderr.splitlines() == [
        "culm: cannot reach the server at tcp://127.0.0.1:1: Connection refused",
        "hint: start one with `culm serve --host tcp://127.0.0.1:1`",
    ]
