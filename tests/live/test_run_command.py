"""`culm run` as a person or a script meets it: real processes, a scripted model, signals."""

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
from tests.live.found import RUN, open_machine, server_pid
from tests.live.harness import (
    RESUME_S,
    Ended,
    ProcessServer,
    make_directory,
    open_process,
)
from tests.live.run_drive import (
    HELD,
    HELD_SAID,
    HELD_WHOLE,
    asked,
    open_agent,
    open_watch,
    questions,
    script,
    until_asked,
    until_let_go,
    write_config,
)
from tests.support import contract

ENV = {"CULM_NO_DISCOVERY": "1"}
HELLO = Reply(text="Hello there.")
LOOK = Reply(text="Let me look.", calls=[ScriptedCall(name="no_tool", input={"path": "README.md"})])


def places(folder: Path) -> list[str]:
    """Everything that `culm run` uses, inside `folder`."""
    return [
        *("--dir", str(make_directory(folder)), "--host", f"unix://{folder}/s"),
        *("--config", str(folder / "culm.json"), "--data-dir", str(folder / "data")),
    ]


@asynccontextmanager
async def open_run(folder: Path, *args: str, stdin: bytes = b"") -> AsyncGenerator[ProcessServer]:
    """`culm run` in the project, with the server of `folder`; nothing or a text is piped in."""
    async with open_process(folder, *RUN, *places(folder), *args, env=ENV) as running:
        assert running.process.stdin is not None, "asked for a pipe"
        running.process.stdin.write(stdin)
        running.process.stdin.close()
        yield running


async def run(folder: Path, *args: str, stdin: bytes = b"") -> Ended:
    async with open_run(folder, *args, stdin=stdin) as running:
        return await running.wait(RESUME_S)


@asynccontextmanager
async def open_home(folder: Path, *replies: Reply) -> AsyncGenerator[ModelServer]:
    """A configured model, and no server yet; one that was started inside is ended."""
    async with open_model_server(script(*replies)) as model:
        write_config(folder, model)
        async with open_machine(folder):
            yield model


def starts(folder: Path) -> int:
    """How many servers have come up."""
    return (folder / "state" / "culm" / "culm.log").read_text().count(", data in ")


class Named(Struct):
    """Of a question to a provider: which model it is for."""

    model: str


# --- finding a server, and an answer


async def test_the_first_prompt_starts_a_server_and_the_next_one_uses_it(folder: Path) -> None:
    async with open_home(folder, LOOK, HELLO, Reply(text="Again.\n")) as model:
        first = await run(folder, "look", "around", stdin=b"and below\n")
        assert (first.status, first.stdout) == (0, "Let me look.\nHello there.")
        call, result = first.stderr.splitlines()
        assert call == '→ no_tool {"path":"README.md"}'
        assert result.startswith("✗ no_tool: There is no tool 'no_tool'.")
        pid = server_pid(folder)
        unknown = await run(folder, "--session", "nope", "and", "now?")
        assert unknown.status == 2
        assert unknown.stderr.splitlines()[-2:] == [
            "culm: no session is called nope",
            "hint: `culm sessions` lists them",
        ]
        second = await run(folder, "--continue", "and", "now?")
        assert second == Ended(0, "Again.", "")
        assert (server_pid(folder), starts(folder)) == (pid, 1)
        said = questions(model)[-1].said
        assert (said[0], said[-1]) == (
            ("user", "look around\n\nand below"),
            ("user", "and now?"),
        )


async def test_five_at_once_over_a_stale_socket_start_one_server(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(folder / "s"))
    async with open_home(folder, *[HELLO] * 5):
        async with asyncio.TaskGroup() as tasks:
            runs = [tasks.create_task(run(folder, "hello")) for _ in range(5)]
        assert [task.result() for task in runs] == [Ended(0, "Hello there.", "")] * 5
        assert starts(folder) == 1


async def test_a_server_that_cannot_start_says_why(folder: Path) -> None:
    (folder / "culm.json").write_text("{broken")
    ended = await run(folder, "hello")
    assert (ended.status, ended.stdout) == (6, "")
    reason, hint = ended.stderr.splitlines()
    assert reason.startswith(f"culm: cannot start a server on unix://{folder}/s: ")
    assert f"{folder}/culm.json" in reason
    assert hint.startswith("hint: ")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "there is no prompt"),
        (["--session", "s", "--continue", "go"], "exclude each other"),
        (["--model", "nobody/nothing", "go"], "no provider has a model nobody/nothing"),
        (["--role", "nobody", "go"], "there is no role 'nobody'"),
        (["--deny", "fetch:a.b", "go"], "fetch has no command and no path to match"),
    ],
)
async def test_wrong_usage_is_told_and_nothing_is_asked(
    folder: Path, args: list[str], words: str
) -> None:
    async with open_home(folder) as model:
        ended = await run(folder, *args)
        assert (ended.status, ended.stdout) == (2, "")
        assert words in ended.stderr
        assert model.requests == []


async def test_a_model_that_is_named_is_asked_by_this_run_alone(folder: Path) -> None:
    async with open_home(folder, HELLO, HELLO) as model:
        file = folder / "culm.json"
        config: dict[str, Any] = json.loads(file.read_text())
        other = {"type": "openai-compat", "base_url": model.url, "models": [{"id": "maker/big"}]}
        config["providers"]["other"] = other
        file.write_text(json.dumps(config))
        assert (await run(folder, "--model", "maker/big", "hello")).status == 0
        assert (await run(folder, "hello")).status == 0
        names = [decode(seen.raw, Named).model for seen in asked(model)]
        assert names == ["maker/big", "demo-1"]


async def test_json_is_one_object_a_line_and_its_end_says_all(folder: Path) -> None:
    async with open_home(folder, LOOK, HELLO):
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


# --- how it ends


async def test_a_model_that_refuses_makes_it_fail_with_the_reason(folder: Path) -> None:
    async with open_home(folder, Reply(status=401)):
        ended = await run(folder, "hello")
        assert (ended.status, ended.stdout) == (1, "")
        words, hint = ended.stderr.splitlines()
        assert words.startswith("culm: ")
        assert "401" in words
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
            await watch.until(lambda: "message_delta" in [told.type for told in watch.told])
            ended = await running.end(signal.SIGINT, RESUME_S)
            assert (ended.status, ended.stdout) == (4, HELD_SAID)
            assert ended.stderr.splitlines()[:2] == [
                "(cancelling; once more to leave at once)",
                "culm: cancelled",
            ]
            (complete,) = watch.completes()
            assert complete.cancelled
            cancels = [t.read(CancelChanged) for t in watch.told if t.type == "cancel_changed"]
            assert [cancel.state for cancel in cancels] == ["requested", "settled"]
        await until_let_go(model, asked(model)[0])


async def test_a_run_that_another_client_cancels_ends_with_status_4(folder: Path) -> None:
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


# Reads a little of what `culm run` says, closes the pipe, and tells how that ended.
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
async def test_a_run_goes_on_when_nobody_reads_its_answer_any_more(folder: Path) -> None:
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
            await reader.until_said("closed", RESUME_S)
            model.release()
            ended = await reader.wait(RESUME_S)
            assert ended.stdout.splitlines() == [
                "closed",
                "culm: nobody reads the answer any more; the run goes on",
                "141",
            ]
            await watch.until(lambda: bool(watch.completes()))
            (complete,) = watch.completes()
            assert (complete.text, complete.cancelled) == (HELD_WHOLE, False)


async def test_a_server_that_is_killed_is_started_again_and_says_what_became_of_the_run(
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
async def test_a_server_that_is_gone_for_good_is_told_with_how_to_come_back(folder: Path) -> None:
    async with (
        open_model_server(script(HELD)) as model,
        open_machine(folder),
        open_agent(folder, model) as (server, _),
        open_run(folder, "hello") as running,
    ):
        await until_asked(model, 1)
        await server.kill()
        (folder / "s").unlink()  # As one that was told to leave has it.
        ended = await running.wait(RESUME_S)
        assert (ended.status, ended.stderr.count("Traceback")) == (1, 0)
        said = re.search(r"the middle of run (\S+), which was not cancelled", ended.stderr)
        assert said is not None, ended.stderr
        async with open_process(
            folder, "-m", "culm", "attach", *places(folder), said[1], env=ENV
        ) as attached:
            back = await attached.wait(RESUME_S)
        assert (back.status, f"`culm attach {said[1]}`" in ended.stderr) == (1, True)
        assert "culm: Interrupted" in back.stderr
