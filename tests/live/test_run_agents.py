"""`culm run` with agents: their asks are answered at its terminal, and Ctrl-C ends them all."""

import asyncio
import json
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.live.harness import RESUME_S, Ended, make_directory, open_process
from tests.live.machine import open_machine
from tests.live.test_run_asks import CULM, PROMPT, open_terminal
from tests.live.test_run_command import ENV, run

NESTED = 'have an agent have an agent run "touch one"'
WORKERS = "have one agent run `sleep 60` and another have an agent run `sleep 60`"


@asynccontextmanager
async def open_offline(folder: Path) -> AsyncGenerator[None]:
    """A machine without configuration and without a server."""
    (folder / "culm.json").write_text("{}")
    async with open_machine(folder):
        yield


async def inspect(folder: Path, *command: str) -> Ended:
    """Run another command beside the run."""
    where = ("--dir", str(make_directory(folder)), "--host", f"unix://{folder}/s")
    async with open_process(folder, *CULM, *command, *where, env=ENV) as running:
        return await running.wait(RESUME_S)


async def test_ask_of_a_nested_agent_is_listed_and_answered_at_the_terminal(
    folder: Path,
) -> None:
    async with open_offline(folder), open_terminal(folder, NESTED) as terminal:
        await terminal.until(PROMPT.replace("this session", "this agent's session"))
        asked = await inspect(folder, "asks")
        assert "bash  Execute command: touch one (asked by have an agent run" in asked.stdout
        assert " > run touch one)" in asked.stdout
        terminal.type("y")
        ended = await terminal.ended()
    assert (ended.status, (make_directory(folder) / "one").exists()) == (0, True)
    lines = ended.stderr.splitlines()
    for line in (
        "[run touch one] ? bash (have an agent run… > run touch one): Execute command: touch one",
        '  asked by have an agent run "touch one" > run touch one',
        "[run touch one] allowed: bash: by you",
    ):
        assert lines.count(line) == 1, ended.stderr
    assert lines[-1].startswith("tree: 3 agents, "), ended.stderr
    assert "The sub-agent answered:" in ended.stdout
    assert "touch one" not in ended.stdout.partition("answered")[0]


async def test_ctrl_c_ends_every_agent_and_their_processes(folder: Path) -> None:
    async with (
        open_offline(folder),
        open_terminal(folder, "--approve", "auto", WORKERS) as terminal,
    ):
        await terminal.until("→ bash sleep 60", 2)
        # The third of them only waits for its own agent.
        shown = json.loads((await inspect(folder, "ps", "--json")).stdout)
        workers = [one["pid"] for one in shown["processes"] if one["kind"] == "worker"]
        assert len(workers) == 3, shown
        terminal.process.send_signal(signal.SIGINT)
        ended = await terminal.ended()
        assert ended.status == 4, ended.stderr
        assert ended.stderr.count("] canceled") == 3, ended.stderr
        async with asyncio.timeout(RESUME_S):
            while any(Path(f"/proc/{pid}/exe").exists() for pid in workers):
                await asyncio.sleep(0.02)


async def test_json_output_reports_agents_and_the_usage_of_the_tree(folder: Path) -> None:
    project = make_directory(folder)
    for name in ("a.txt", "b.txt"):
        (project / name).write_text(f"in {name}\n")
    async with open_offline(folder):
        ended = await run(folder, "--json", "have one agent read a.txt and another read b.txt")
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    started = [line for line in lines if line["type"] == "agent_started"]
    assert [line["name"] for line in started] == ["read a.txt", "read b.txt"]
    for line in started:
        own = [one for one in lines if one.get("agent_id") == line["agent_id"]]
        kinds = list(dict.fromkeys(one["type"].removeprefix("agent_") for one in own))
        assert kinds == ["started", "call", "result", "text", "ended"]
        assert {one["session_id"] for one in own} == {line["session_id"]}
    used = [line["tokens"] for line in lines if line["type"] == "agent_ended"]
    end = lines[-1]
    own_tokens = end["prompt_tokens"] + end["completion_tokens"]
    assert (end["agents"], end["tree_tokens"]) == (2, own_tokens + sum(used))
    assert all(f"in {name}" in end["text"] for name in ("a.txt", "b.txt"))
