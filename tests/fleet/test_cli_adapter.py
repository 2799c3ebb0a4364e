"""Command-line agents as executors, with scripts that stand in for the programs."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from culm.clock import LoopClock
from culm.fleet.executor import CANCELLED, Outcome, RunEnded, completed, failed
from culm.fleet.provision import (
    AnyKind,
    BadProvision,
    Capabilities,
    ClaudeKind,
    CliKind,
    CodexKind,
    CulmExtension,
    Identity,
    Provision,
)
from culm.fleet.tail import KEPT_BYTES
from culm.fleet.worker.executors import cli_adapter
from culm.fleet.worker.executors.base import WorkerServices, open_executor
from culm.fleet.worker.executors.cli_adapter import env_of
from culm.fleet.worker.executors.cli_profiles import (
    NOTHING,
    AgentOutput,
    profile_of,
    read_claude,
    read_codex,
    read_json,
    read_text,
)
from culm.ids import Ids
from culm.processes.base import NoProcesses
from culm.processes.client import open_processes
from culm.wire.codec import Json
from tests.fleet.executor_host import RecordingHost
from tests.processes.process_harness import is_alive
from tests.support import WAIT_S, contract


@dataclass
class CliHarness:
    """Runs executors whose programs are shell scripts."""

    services: WorkerServices
    folder: Path

    def write_script(self, text: str) -> str:
        file = self.folder / "agent"
        file.write_text(f"#!/usr/bin/env bash\n{text}")
        file.chmod(0o700)
        return str(file)

    def provision(self, kind: AnyKind, **given: str) -> Provision:
        return Provision(
            version=2,
            identity=Identity("a1"),
            executor=kind,
            fabric_dir="/nowhere",
            workspace=str(self.folder),
            culm=CulmExtension(env=given),
        )

    async def run(self, kind: AnyKind, assignment: str = "", **given: str) -> tuple[str, Outcome]:
        host = RecordingHost()
        async with open_executor(self.provision(kind, **given), self.services) as executor:
            outcome = await host.run(executor, assignment)
        return host.text, outcome


@asynccontextmanager
async def open_harness(folder: Path) -> AsyncGenerator[CliHarness]:
    clock, ids = LoopClock(), Ids()
    async with open_processes(folder / "processes", clock, ids) as processes:
        yield CliHarness(WorkerServices(clock, ids, processes, folder / "storage"), folder)


async def test_command_gets_its_assignment_and_its_lines_become_events(tmp_path: Path) -> None:
    async with open_harness(tmp_path) as harness:
        script = harness.write_script('cat; echo; echo "$1 $2 in $PWD for $WHO"; printf "no end"')
        by_input = await harness.run(CliKind(script, ["-x"]), "do\nthis", WHO="me")
        expected = f"do\nthis\n-x  in {tmp_path} for me\nno end"
        assert by_input == (f"{expected}\n", completed(expected))
        by_argument = await harness.run(CliKind(script, ["-x"], input="argument"), "do this")
        expected = f"\n-x do this in {tmp_path} for \nno end"
        assert by_argument == (f"{expected}\n", completed(expected.strip("\n")))
        missing = await harness.run(CliKind("no-such-agent"))
        assert missing == ("", failed("`no-such-agent` was not found in PATH"))
        nul = await harness.run(CliKind(script, input="argument"), "a\0b")
        assert nul == ("", failed("an argument contains a NUL character"))


async def test_failing_command_ends_in_an_error_with_its_stderr_tail(
    tmp_path: Path,
) -> None:
    async with open_harness(tmp_path) as harness:
        name = harness.write_script(
            "echo said; printf 'x%.0s' {1..9000} >&2; echo ' bad' >&2; exit 3"
        )
        text, outcome = await harness.run(CliKind(name))
        tail = "x" * (KEPT_BYTES - len(" bad\n")) + " bad"
        assert (text, outcome) == (
            "said\n",
            failed(f"`{name}` ended with status 3: {tail}"),
        )
        name = harness.write_script("kill -9 $$")
        assert (await harness.run(CliKind(name)))[1] == failed(f"`{name}` died of signal 9")


async def test_long_lines_and_output_are_truncated(tmp_path: Path) -> None:
    async with open_harness(tmp_path) as harness:
        name = harness.write_script("head -c 3000000 /dev/zero | tr '\\0' y; echo; echo last")
        text, outcome = await harness.run(CliKind(name))
        line = "y" * cli_adapter.LINE_BYTES_MAX
        assert text == f"{line}\nlast\n"
        assert outcome.result is not None
        assert (len(outcome.result), outcome.result[-6:]) == ((1 << 20) - 1, "y\nlast")


async def test_background_process_of_a_command_ends_with_it(
    tmp_path: Path,
) -> None:
    async with open_harness(tmp_path) as harness:
        name = harness.write_script("sleep 600 & echo $!")
        text, outcome = await harness.run(CliKind(name))
        assert outcome == completed(text.strip())
        assert not is_alive(int(text))


@pytest.mark.parametrize("by_token", [True, False])
async def test_cancel_ends_the_command_and_its_descendants(
    tmp_path: Path, *, by_token: bool
) -> None:
    async with open_harness(tmp_path) as harness:
        await harness.run(CliKind("true"))  # Starts the supervisor.
        before = descriptors()
        name = harness.write_script("trap '' TERM; setsid sleep 600 & echo $! $$; wait; wait")
        host = RecordingHost()
        async with (
            asyncio.timeout(WAIT_S),
            open_executor(harness.provision(CliKind(name)), harness.services) as executor,
            asyncio.TaskGroup() as group,
        ):
            running = group.create_task(host.run(executor, ""))
            await host.got_event.wait()
            if by_token:
                host.cancelled.set()
            else:
                running.cancel()
            await asyncio.wait({running})
        assert running.cancelled() if not by_token else running.result() == CANCELLED
        assert [is_alive(int(pid)) for pid in host.text.split()] == [False, False]
        async with asyncio.timeout(WAIT_S):  # The supervisor closes its own a moment later.
            while descriptors() > before:
                await asyncio.sleep(0)


class LeavingHost(RecordingHost):
    """A host that leaves at the first event."""

    async def emit(self, event: Mapping[str, Json]) -> None:
        await super().emit(event)
        if self.got_event.is_set():
            raise RunEnded


async def test_command_is_ended_when_its_host_is_gone(tmp_path: Path) -> None:
    async with open_harness(tmp_path) as harness:
        name = harness.write_script("echo $$; sleep 600")
        host = LeavingHost()
        async with open_executor(harness.provision(CliKind(name)), harness.services) as executor:
            assert await host.run(executor, "") == CANCELLED
        assert not is_alive(int(host.text))


def descriptors() -> int:
    with os.scandir("/proc/self/fd") as entries:
        return len([*entries])


# --- profiles, with stand-ins for the programs

CLAUDE = [
    {"type": "system", "subtype": "init", "session_id": "s"},
    {
        "type": "assistant",
        "message": {
            "content": [
                {"type": "thinking", "thinking": "hm"},
                {"type": "text", "text": "Looking."},
                {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}},
            ]
        },
    },
    {
        "type": "user",
        "message": {
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"text": "a"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
            ]
        },
    },
    {
        "type": "result",
        "subtype": "success",
        "is_error": False,
        "result": "Done.",
        "usage": {"input_tokens": 5, "output_tokens": 2},
    },
]
CODEX = [
    {"type": "thread.started", "thread_id": "t"},
    {"type": "item.completed", "item": {"type": "reasoning", "text": "hm"}},
    {
        "type": "item.started",
        "item": {"id": "t1", "type": "command_execution", "command": "ls"},
    },
    {
        "type": "item.completed",
        "item": {
            "id": "t1",
            "type": "command_execution",
            "aggregated_output": "a",
            "exit_code": 0,
        },
    },
    {
        "type": "item.completed",
        "item": {
            "id": "t2",
            "type": "command_execution",
            "aggregated_output": "no",
            "exit_code": 1,
        },
    },
    {"type": "item.completed", "item": {"type": "agent_message", "text": "Done."}},
    {"type": "turn.completed", "usage": {"input_tokens": 5, "output_tokens": 2}},
]
USED = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
TOOLS: list[Mapping[str, Json]] = [
    {"type": "tool_complete", "tool_call_id": "t1", "result": {"success": True, "result": "a"}},
    {"type": "tool_error", "tool_call_id": "t2", "error": "no"},
]
CLAUDE_EVENTS: list[Mapping[str, Json]] = [
    {"type": "reasoning_token", "content": "hm"},
    {"type": "token", "content": "Looking.\n"},
    {
        "type": "tool_start",
        "tool_call_id": "t1",
        "tool_name": "Bash",
        "arguments": {"command": "ls"},
    },
    *TOOLS,
    {"type": "complete", "usage": USED},
]
CODEX_EVENTS: list[Mapping[str, Json]] = [
    {"type": "reasoning_token", "content": "hm"},
    {
        "type": "tool_start",
        "tool_call_id": "t1",
        "tool_name": "command_execution",
        "arguments": {"command": "ls"},
    },
    *TOOLS,
    {"type": "token", "content": "Done.\n"},
    {"type": "complete", "usage": USED},
]


async def test_known_agent_output_becomes_events_and_a_result(
    tmp_path: Path,
) -> None:
    async with open_harness(tmp_path) as harness:
        for kind, lines, events in (
            (ClaudeKind, CLAUDE, CLAUDE_EVENTS),
            (CodexKind, CODEX, CODEX_EVENTS),
        ):
            output = "\n".join(json.dumps(line) for line in lines)
            name = harness.write_script(f"cat > heard; echo noise\ncat <<'END'\n{output}\nEND\n")
            host = RecordingHost()
            async with open_executor(harness.provision(kind(name)), harness.services) as executor:
                assert await host.run(executor, "go") == completed("Done.")
            began, *events_after_start = host.events
            assert began["type"] == "execution_started"
            assert (events_after_start, (tmp_path / "heard").read_text()) == (events, "go")
        name = harness.write_script('echo "$@"; cat')
        crush = await harness.run(CliKind(name, ["-m", "x"], profile="crush"), "go")
        assert crush == ("run --quiet -m x\ngo\n", completed("run --quiet -m x\ngo"))


@pytest.mark.parametrize(
    ("kind", "read_only", "argv"),
    [
        (
            ClaudeKind(model="m", inherit_user_config=True),
            False,
            "claude -p --output-format stream-json --verbose --permission-mode default --model m",
        ),
        (
            CliKind("/c", ["-x"], profile="claude"),
            True,
            "/c -p --output-format stream-json --verbose --permission-mode plan"
            " --strict-mcp-config --setting-sources project -x",
        ),
        (CodexKind(), False, "codex exec --json -"),
        (
            CodexKind(sandbox="workspace-write", approval_policy="never", network_access=True),
            False,
            'codex exec --json --sandbox workspace-write -c approval_policy="never"'
            " -c sandbox_workspace_write.network_access=true -",
        ),
        (
            CodexKind(allow_danger_bypass=True, network_access=True),
            True,
            "codex exec --json --sandbox read-only -",
        ),
        (
            CodexKind(model="m", allow_danger_bypass=True, workspace_owned=True),
            False,
            "codex exec --json --model m --dangerously-bypass-approvals-and-sandbox"
            " --skip-git-repo-check -",
        ),
        (CliKind("/c", ["-x"], profile="codex"), False, "/c exec --json -x -"),
    ],
)
def test_agent_profile_builds_the_expected_argv(
    kind: CliKind | ClaudeKind | CodexKind, argv: str, *, read_only: bool
) -> None:
    assert " ".join(profile_of(kind, read_only=read_only).argv) == argv


@contract("FLEET-50")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (CliKind("c"), "read_only is refused"),
        (CliKind("c", profile="crush"), "read_only is refused"),
        (CliKind("c", profile="warp"), "profile is not one of"),
        (CliKind(""), "command is empty"),
        (CodexKind(mode="app_server"), "executor.mode is not supported for codex"),
        (CodexKind(auth_mode="bamboo"), "executor.auth_mode is not supported for codex"),
    ],
)
async def test_unsupported_executor_settings_are_refused_before_start(
    kind: AnyKind, message: str
) -> None:
    provision = Provision(
        version=2,
        identity=Identity("a"),
        executor=kind,
        fabric_dir="/nowhere",
        capabilities=Capabilities(guardian_read_only=True),
    )
    services = WorkerServices(LoopClock(), Ids(), NoProcesses(), Path("/nowhere"))
    with pytest.raises(BadProvision, match=message):
        async with open_executor(provision, services) as executor:
            raise AssertionError(executor)


def test_json_lines_map_to_allowed_events_only() -> None:
    assert read_json('{"type":"token","content":"a"}') == AgentOutput(
        [{"type": "token", "content": "a"}], text="a"
    )
    assert read_json("plain") == read_text("plain")
    assert read_json('{"type":"result","text":"r"}') == AgentOutput(result="r")
    assert read_json('{"type":"error","message":"m"}') == AgentOutput(error="m")
    for kind in ("message_admitted", "permission_posture_activated", "complete", "sub_agent_event"):
        assert read_json(json.dumps({"type": kind, "id": "x"})) == NOTHING
    assert read_claude(
        '{"type":"result","is_error":true,"subtype":"error_max_turns"}'
    ) == AgentOutput(error="error_max_turns")
    assert read_codex('{"type":"turn.failed","error":{"message":"m"}}') == AgentOutput(error="m")


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["", "text", "assistant"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "message", "content", "item", "usage", "error"]), inner
        )
    ),
)


@settings(max_examples=40)
@given(_json | st.fixed_dictionaries({"type": st.sampled_from(["assistant", "item.completed"])}))
def test_any_json_output_is_parsed_without_error(value: Json) -> None:
    for read in (read_json, read_claude, read_codex):
        assert isinstance(read(json.dumps(value)), AgentOutput)


def test_command_environment_has_only_basic_given_and_named_variables() -> None:
    own = {
        "PATH": "/bin",
        "LC_ALL": "C",
        "NAMED": "n",
        "OTHERS_API_KEY": "k",
        "CULM_TOKEN": "t",
    }
    env = env_of(own, {"PATH": "/usr/bin", "GIVEN": "g"}, ("NAMED",), "/w")
    assert {name: env[name] for name in env if name in own or name in ("GIVEN", "PWD")} == {
        "PATH": "/usr/bin",
        "LC_ALL": "C",
        "NAMED": "n",
        "GIVEN": "g",
        "PWD": "/w",
    }


async def test_reported_error_overrides_the_exit_status(tmp_path: Path) -> None:
    async with open_harness(tmp_path) as harness:
        name = harness.write_script("""echo '{"type":"error","message":"no credit"}'""")
        _, outcome = await harness.run(CliKind(name, output="json"))
        assert outcome == failed(f"`{name}` failed: no credit")
