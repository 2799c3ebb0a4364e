"""`culm run` with agents behind it: what they ask is answered here, and Ctrl-C ends all of them."""

import asyncio
import json
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.live.found import open_machine
from tests.live.harness import RESUME_S, Ended, make_directory, open_process
from tests.live.test_run_asks import CULM, PROMPT, open_seat
from tests.live.test_run_command import ENV, run

NESTED = 'have an agent have an agent run "touch one"'
WORKERS = "have one agent run `sleep 60` and another have an agent run `sleep 60`"


@asynccontextmanager
async def open_offline(folder: Path) -> AsyncGenerator[None]:
    """A machine with nothing set up, and no server yet."""
    (folder / "culm.json").write_text("{}")
    async with open_machine(folder):
        yield


async def look(folder: Path, *command: str) -> Ended:
    """Beside the run, from another process."""
    where = ("--dir", str(make_directory(folder)), "--host", f"unix://{folder}/s")
    async with open_process(folder, *CULM, *command, *where, env=ENV) as running:
        return await running.wait(RESUME_S)


async def test_what_an_agent_of_an_agent_asks_is_seen_everywhere_and_answered_here(
    folder: Path,
) -> None:
    async with open_offline(folder), open_seat(folder, NESTED) as seat:
        await seat.until(PROMPT.replace("this session", "this agent's session"))
        asked = await look(folder, "asks")
        assert "bash  Execute command: touch one (asked by have an agent run" in asked.stdout
        assert " > run touch one)" in asked.stdout
        seat.type("y")
        ended = await seat.ended()
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
    async with open_offline(folder), open_seat(folder, "--approve", "auto", WORKERS) as seat:
        await seat.until("→ bash sleep 60", 2)
        # The third of them only waits for one of the others.
        shown = json.loads((await look(folder, "ps", "--json")).stdout)
        workers = [one["pid"] for one in shown["processes"] if one["kind"] == "worker"]
        assert len(workers) == 3, shown
        seat.process.send_signal(signal.SIGINT)
        ended = await seat.ended()
        assert ended.status == 4, ended.stderr
        assert ended.stderr.count("] canceled") == 3, ended.stderr
        async with asyncio.timeout(RESUME_S):
            while any(Path(f"/proc/{pid}/exe").exists() for pid in workers):
                await asyncio.sleep(0.02)


async def test_a_program_is_told_what_agents_do_and_what_the_tree_has_used(folder: Path) -> None:
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
