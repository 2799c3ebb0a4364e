"""`culm run` as a user or a script sees it: real processes, a scripted model, signals."""

import asyncio
import json
import re
import signal
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Reply, ScriptedCall
from culm.wire.codec import decode
from culm.wire.runs import CancelChanged
from tests.live.harness import (
    RESUME_S,
    Ended,
    ProcessServer,
    make_directory,
    open_process,
)
from tests.live.machine import RUN, open_machine, server_pid
from tests.live.run_harness import (
    HELD,
    HELD_PREFIX,
    HELD_WHOLE,
    asked,
    open_agent,
    open_watch,
    questions,
    script,
    until_abandoned,
    until_asked,
    write_config,
)
from tests.support import contract

ENV = {"CULM_NO_DISCOVERY": "1"}
HELLO = Reply(text="Hello there.")
LOOK = Reply(text="Let me look.", calls=[ScriptedCall(name="no_tool", input={"path": "README.md"})])


def places(folder: Path) -> list[str]:
    """Options that keep everything `culm run` uses inside `folder`."""
    return [
        *("--dir", str(make_directory(folder)), "--host", f"unix://{folder}/s"),
        *("--config", str(folder / "culm.json"), "--data-dir", str(folder / "data")),
    ]


@asynccontextmanager
async def open_run(folder: Path, *args: str, stdin: bytes = b"") -> AsyncGenerator[ProcessServer]:
    """`culm run` in the project, with the server of `folder` and this stdin."""
    async with open_process(folder, *RUN, *places(folder), *args, env=ENV) as running:
        assert running.process.stdin is not None, "asked for a pipe"
        running.process.stdin.write(stdin)
        running.process.stdin.close()
        yield running


async def run(folder: Path, *args: str, stdin: bytes = b"") -> Ended:
    async with open_run(folder, *args, stdin=stdin) as running:
        return await running.wait(RESUME_S)


@asynccontextmanager
async def open_model_config(folder: Path, *replies: Reply) -> AsyncGenerator[ModelServer]:
    """A configured model without a server; one that is started inside is ended."""
    async with open_model_server(script(*replies)) as model:
        write_config(folder, model)
        async with open_machine(folder):
            yield model


def starts(folder: Path) -> int:
    """Return the number of server starts."""
    return (folder / "state" / "culm" / "culm.log").read_text().count(", data in ")


class ModelField(Struct):
    """The model name in a request to a provider."""

    model: str


# --- finding a server, and getting an answer


async def test_first_prompt_starts_a_server_and_the_next_one_uses_it(folder: Path) -> None:
    async with open_model_config(folder, LOOK, HELLO, Reply(text="Again.\n")) as model:
        first = await run(folder, "look", "around", stdin=b"and below\n")
        assert (first.status, first.stdout) == (0, "Let me look.\nHello there.")
        call, result = first.stderr.splitlines()
        assert call == '→ no_tool {"path":"README.md"}'
        assert result.startswith("✗ no_tool: There is no tool 'no_tool'.")
        pid = server_pid(folder)
        unknown = await run(folder, "--session", "nope", "and", "now?")
        assert unknown.status == 2
        assert unknown.stderr.splitlines()[-2:] == [
            "culm: no session is named nope",
            "hint: `culm sessions` lists them",
        ]
        second = await run(folder, "--continue", "and", "now?")
        assert second == Ended(0, "Again.", "")
        assert (server_pid(folder), starts(folder)) == (pid, 1)
        conversation = questions(model)[-1].conversation
        assert (conversation[0], conversation[-1]) == (
            ("user", "look around\n\nand below"),
            ("user", "and now?"),
        )


async def test_five_runs_at_once_over_a_stale_socket_start_one_server(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(folder / "s"))
    async with open_model_config(folder, *[HELLO] * 5):
        async with asyncio.TaskGroup() as tasks:
            runs = [tasks.create_task(run(folder, "hello")) for _ in range(5)]
        assert [task.result() for task in runs] == [Ended(0, "Hello there.", "")] * 5
        assert starts(folder) == 1


async def test_server_start_failure_is_reported_with_its_reason(folder: Path) -> None:
    (folder / "culm.json").write_text("{broken")
    ended = await run(folder, "hello")
    assert (ended.status, ended.stdout) == (6, "")
    reason, hint = ended.stderr.splitlines()
    assert reason.startswith(f"culm: cannot start a server on unix://{folder}/s: ")
    assert f"{folder}/culm.json" in reason
    assert hint.startswith("hint: ")


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ([], "no prompt given"),
        (["--session", "s", "--continue", "go"], "cannot be used together"),
        (["--model", "nobody/nothing", "go"], "no provider has a model nobody/nothing"),
        (["--role", "nobody", "go"], "there is no role 'nobody'"),
        (["--deny", "fetch:a.b", "go"], "fetch has no command and no path to match"),
    ],
)
async def test_wrong_usage_exits_2_and_sends_no_model_request(
    folder: Path, args: list[str], reason: str
) -> None:
    async with open_model_config(folder) as model:
        ended = await run(folder, *args)
        assert (ended.status, ended.stdout) == (2, "")
        assert reason in ended.stderr
        assert model.requests == []


async def test_model_option_applies_to_one_run_only(folder: Path) -> None:
    async with open_model_config(folder, HELLO, HELLO) as model:
        file = folder / "culm.json"
        config: dict[str, Any] = json.loads(file.read_text())
        other = {"type": "openai-compat", "base_url": model.url, "models": [{"id": "maker/big"}]}
        config["providers"]["other"] = other
        file.write_text(json.dumps(config))
        assert (await run(folder, "--model", "maker/big", "hello")).status == 0
        assert (await run(folder, "hello")).status == 0
        names = [decode(seen.raw, ModelField).model for seen in asked(model)]
        assert names == ["maker/big", "demo-1"]


async def test_json_output_is_one_object_per_line_and_ends_with_a_summary(folder: Path) -> None:
    async with open_model_config(folder, LOOK, HELLO):
        ended = await run(folder, "--json", "look")
        assert (ended.status, ended.stderr) == (0, "")
        lines: list[dict[str, Any]] = [json.loads(line) for line in ended.stdout.splitlines()]
        texts = "".join(line["text"] for line in lines if line["type"] == "text")
        assert texts == "Let me look.Hello there."
        call, result = [line for line in lines if line["type"] in ("call", "result")]
        assert (call["name"], call["input"]) == ("no_tool", '{"path":"README.md"}')
        assert (result["id"], result["is_error"]) == (call["id"], True)
        end = lines[-1]
        assert (end["type"], end["outcome"], end["text"]) == ("end", "end_turn", "Hello there.")
        assert (end["error"], end["steps"], end["model"]) == ("", 2, "demo-1")


# --- exit status


async def test_model_refusal_exits_1_with_the_reason(folder: Path) -> None:
    async with open_model_config(folder, Reply(status=401)):
        ended = await run(folder, "hello")
        assert (ended.status, ended.stdout) == (1, "")
        reason, hint = ended.stderr.splitlines()
        assert reason.startswith("culm: ")
        assert "401" in reason
        assert hint.startswith("hint: ")


@contract("CLI-3", "INV-42")
async def test_ctrl_c_cancels_the_run_once_and_waits_for_its_end(folder: Path) -> None:
    async with (
        open_model_server(script(HELD)) as model,
        open_agent(folder, model) as (_, client),
    ):
        remote = await client.open_workspace(make_directory(folder))
        async with open_watch(remote) as watch, open_run(folder, "hello") as running:
            await until_asked(model, 1)
            await watch.until(lambda: "message_delta" in [event.type for event in watch.events])
            ended = await running.end(signal.SIGINT, RESUME_S)
            assert (ended.status, ended.stdout) == (4, HELD_PREFIX)
            assert ended.stderr.splitlines()[:2] == [
                "(canceling; interrupt again to exit at once)",
                "culm: canceled",
            ]
            (complete,) = watch.completes()
            assert complete.cancelled
            cancels = [t.read(CancelChanged) for t in watch.events if t.type == "cancel_changed"]
            assert [cancel.state for cancel in cancels] == ["requested", "settled"]
        await until_abandoned(model, asked(model)[0])


async def test_run_canceled_by_another_client_exits_4(folder: Path) -> None:
    async with (
        open_model_server(script(HELD)) as model,
        open_agent(folder, model) as (_, client),
    ):
        remote = await client.open_workspace(make_directory(folder))
        async with open_run(folder, "--json", "hello") as running:
            await until_asked(model, 1)
            (live,) = (await remote.snapshot()).runs
            assert (await remote.cancel_run(live.id)).result == "canceled"
            ended = await running.wait(RESUME_S)
        end = json.loads(ended.stdout.splitlines()[-1])
        assert (ended.status, end["outcome"], end["run_id"]) == (4, "canceled", live.id)


# Reads a little of the output of `culm run`, closes the pipe, and prints how it ended.
READER = """
import subprocess, sys
pipe = subprocess.PIPE
command = [sys.executable, *sys.argv[1:]]
running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
running.stdout.read(3)
running.stdout.close()
print("closed", flush=True)
print(running.stderr.read().decode().strip())
print(running.wait())
"""


@contract("CLI-2", "INV-31")
async def test_run_continues_after_its_stdout_is_closed(folder: Path) -> None:
    async with (
        open_model_server(script(HELD)) as model,
        open_agent(folder, model) as (_, client),
    ):
        remote = await client.open_workspace(make_directory(folder))
        command = [*RUN, *places(folder), "hello"]
        async with (
            open_watch(remote) as watch,
            open_process(folder, "-c", READER, *command, env=ENV) as reader,
        ):
            await reader.until_line("closed", RESUME_S)
            model.release()
            ended = await reader.wait(RESUME_S)
            assert ended.stdout.splitlines() == [
                "closed",
                "culm: the output was closed; the run continues",
                "141",
            ]
            await watch.until(lambda: bool(watch.completes()))
            (complete,) = watch.completes()
            assert (complete.text, complete.cancelled) == (HELD_WHOLE, False)


async def test_killed_server_is_restarted_and_the_run_is_interrupted(
    folder: Path,
) -> None:
    async with (
        open_model_server(script(HELD)) as model,
        open_machine(folder),
        open_agent(folder, model) as (server, _),
        open_run(folder, "hello") as running,
    ):
        await until_asked(model, 1)
        await server.kill()
        ended = await running.wait(RESUME_S)
    assert (ended.status, ended.stderr.count("Traceback")) == (1, 0)
    assert "culm: Interrupted" in ended.stderr


@contract("CLI-10")
async def test_lost_server_is_reported_with_the_attach_command(folder: Path) -> None:
    async with (
        open_model_server(script(HELD)) as model,
        open_machine(folder),
        open_agent(folder, model) as (server, _),
        open_run(folder, "hello") as running,
    ):
        await until_asked(model, 1)
        await server.kill()
        (folder / "s").unlink()  # A server that shuts down removes its socket.
        ended = await running.wait(RESUME_S)
        assert (ended.status, ended.stderr.count("Traceback")) == (1, 0)
        match = re.search(r"during run (\S+); the run was not canceled", ended.stderr)
        assert match is not None, ended.stderr
        async with open_process(
            folder, "-m", "culm", "attach", *places(folder), match[1], env=ENV
        ) as attached:
            back = await attached.wait(RESUME_S)
        assert (back.status, f"`culm attach {match[1]}`" in ended.stderr) == (1, True)
        assert "culm: Interrupted" in back.stderr
