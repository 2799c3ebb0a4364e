"""`culm agent`: standalone agents, found and called from a shell."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from culm.cli.commands.agent import get_agent
from culm.cli.commands.agent_call import (
    AgentCallOptions,
    JsonCallRenderer,
    TextCallRenderer,
    ask_lines,
    call,
)
from culm.cli.commands.agent_serve import find_model
from culm.cli.config_report import location_of
from culm.cli.render.renderers import TextRenderer
from culm.clock import Clock, LoopClock
from culm.errors import Failed, InvalidRequest, NotFound
from culm.fleet.discovery.base import AgentRecord, OwnerProcess, ProcessPlace, renewed
from culm.fleet.discovery.files import FileDiscovery
from culm.fleet.discovery.memory import MemoryDiscovery
from culm.fleet.executor import (
    CANCELLED,
    CancelToken,
    EventSink,
    Outcome,
    RunHost,
    SteerInbox,
    completed,
    failed,
)
from culm.fleet.host.caller import RunControl, parse_ask
from culm.fleet.protocol.frames import RunSpec
from culm.fleet.provision import Credential, Identity, ModelName
from culm.fleet.transport.websocket import listen_websocket
from culm.fleet.worker import lifecycle
from culm.fleet.worker_server.connection import ServeMany, serve_on
from culm.fleet.worker_server.run import ServingSettings
from culm.ids import Ids
from culm.tools.bash import SPEC
from culm.wire.codec import Json
from tests.cli.conftest import CliHarness, CommandResult
from tests.support import WAIT_S, FakeClock

TOKEN = "agent-token"
ASKED = {"tool_name": "bash", "permission": "execute", "resource": "git push", "question": "May I?"}


def make_record(agent_id: str, role: str, clock: Clock, endpoint: str = "ws://e") -> AgentRecord:
    record = AgentRecord(
        agent_id=agent_id,
        role=role,
        labels=["fast"],
        endpoint=endpoint,
        pid=7,
        started_at="",
        lease_expires_at="",
    )
    return renewed(record, clock.now_s())


# --- which agent


def test_agent_is_found_by_id_or_role_else_known_agents_are_listed() -> None:
    clock = FakeClock()
    discovery = MemoryDiscovery(clock)
    with pytest.raises(NotFound) as alone:
        get_agent(discovery, "writer")
    assert (alone.value.message, alone.value.hint) == (
        "no agent has the id or role writer",
        "start one: culm agent serve --role writer",
    )
    for number in range(7):
        discovery.publish(make_record(f"w{number}", "writer", clock))
    discovery.publish(make_record("writer", "reader", clock))
    names = ("w3", "reader", "writer")
    assert [get_agent(discovery, name).agent_id for name in names] == ["w3", "writer", "writer"]
    discovery.withdraw("writer")
    assert get_agent(discovery, "writer").agent_id == "w0"
    for name in ("nobody", "../w3", ""):
        with pytest.raises(NotFound) as lost:
            get_agent(discovery, name)
        assert lost.value.hint.startswith("running: w0 (writer), w1 (writer)")
        assert lost.value.hint.endswith(", 2 more")


def test_agents_are_listed_as_an_escaped_table_or_as_json(cli: CliHarness) -> None:
    assert cli.culm("agent", "list") == CommandResult(0, "", "no agent is running\n")
    clock = LoopClock()
    discovery = FileDiscovery(cli.data_dir / "fabric", clock)
    discovery.publish(make_record("a1", "\x1b[2J", clock))
    discovery.publish(make_record("b2", "reader", clock))
    # A worker owned by a server does not answer other callers.
    owned = ProcessPlace(start_ticks=1, world="another", owner=OwnerProcess(1, 1))
    discovery.publish(msgspec.structs.replace(make_record("c3", "reader", clock), culm=owned))
    assert cli.culm("agent", "list").out.splitlines() == [
        "agent  role     pid  labels  endpoint",
        r"a1     \x1b[2J  7    fast    ws://e",
        "b2     reader   7    fast    ws://e",
    ]
    found = json.loads(cli.culm("agent", "list", "--json", "--role", "reader").out)
    assert [one["agent_id"] for one in found] == ["b2"]
    none = cli.culm("agent", "list", "--label", "slow")
    assert none == CommandResult(0, "", "no matching agent is running\n")


@pytest.mark.parametrize(
    ("args", "status", "expected"),
    [
        ("serve --role x --host 0.0.0.0", 2, "needs TLS: others could read the traffic"),
        ("serve --role x --host 0.0.0.0 --no-auth", 2, "only loopback"),
        ("serve --role x --tls-cert c", 2, "must be given together"),
        ("serve --role x --executor cli_adapter", 2, "needs a --command"),
        ("serve --role x --executor cli_adapter --command '", 2, "cannot parse --command"),
        (
            "serve --role x --executor cli_adapter --command a --env NO_KEY",
            2,
            "the variable is not set",
        ),
        ("serve --role x --executor echo --command a", 2, "are for --executor"),
        ("serve --role x --executor echo --id ../x", 2, "--id may have letters"),
        (f"serve --role x --executor echo --id {'x' * 201}", 2, "at most 200"),
        ("serve --role x --model none/m", 2, "hint: `culm models` shows"),
        ("serve --role x --executor echo --tls-cert c --tls-key k", 2, "TLS certificate file c"),
        ("call nobody hi", 2, "hint: start one: culm agent serve --role nobody"),
        ("call ws://127.0.0.1:1 hi", 1, "cannot reach ws://127.0.0.1:1: no connection: "),
        ("call ws://h:99999 hi", 1, "reach ws://h:99999: not a ws:// or wss:// address\n"),
        ("call ws://127.0.0.1:1 hi --token-file no", 2, "token file no does not exist"),
        ("call nobody", 2, "Missing argument"),
    ],
)
def test_invalid_agent_command_fails_with_a_message(
    cli: CliHarness, args: str, status: int, expected: str
) -> None:
    result = cli.culm("agent", *args.split())
    assert (result.status, result.out) == (status, "")
    assert expected in result.err
    assert "Traceback" not in result.err
    assert not list(cli.data_dir.glob("fabric/.*"))


@pytest.mark.parametrize("lease_s", [0.0, -3600.0], ids=["serving", "asleep"])
def test_id_that_is_already_served_is_refused(cli: CliHarness, lease_s: float) -> None:
    clock = LoopClock()
    discovery = FileDiscovery(cli.data_dir / "fabric", clock)
    served = lifecycle.make_record(Identity("a1"), [], "ws://e", None, clock.now_s() + lease_s)
    discovery.publish(served)
    discovery.token_file("a1").write_text("its own")
    result = cli.culm("agent", "serve", "--role", "x", "--executor", "echo", "--id", "a1")
    message = f"culm: agent a1 is already running as process {served.pid}\n"
    assert result == CommandResult(1, "", f"{message}hint: choose another --id\n")
    assert (discovery.find("a1"), discovery.token_file("a1").read_text()) == (served, "its own")


async def test_served_agent_gets_the_configured_model_and_only_its_key(
    cli: CliHarness,
) -> None:
    location = location_of(cli.project, None, None, {"DEMO_KEY": "k-1", "CULM_NO_DISCOVERY": "1"})
    offline = ModelName("offline", "offline")
    assert await find_model(location, "") == (offline, None)
    demo = {"type": "openai-compat", "base_url": "http://d/v1", "api_key": "$DEMO_KEY"}
    providers = {
        "demo": demo,
        "dear": demo | {"extra_headers": {"X-Team": "t"}},
        "printed": demo | {"api_key": "$(cat key)"},
    }
    user_file = cli.write_user({"providers": providers})
    location = replace(location, config_file=user_file)
    credential = Credential("demo", "k-1", "http://d/v1", "openai-compat")
    assert await find_model(location, "demo/m/1") == (ModelName("demo", "m/1"), credential)
    for name, expected in (
        ("dear/m", "has extra_headers"),
        ("printed/m", "a command that prints a key is not run"),
        ("nobody/m", "is not configured"),
        ("demo", "no model"),
    ):
        with pytest.raises(InvalidRequest, match=expected):
            await find_model(location, name)


# --- calling one, in this process

Behavior = Callable[[EventSink, RunHost, CancelToken], Awaitable[Outcome]]


class FunctionExecutor:
    """An executor that runs a function of the test."""

    def __init__(self, behavior: Behavior) -> None:
        self._behavior = behavior

    async def run(
        self,
        spec: RunSpec,
        events: EventSink,
        steer: SteerInbox,
        cancel: CancelToken,
        host: RunHost,
    ) -> Outcome:
        return await self._behavior(events, host, cancel)


class TypedLines:
    """Lines of input; after the last one, reading blocks forever."""

    def __init__(self, *lines: str) -> None:
        self._lines = [*lines]

    async def read(self, prompt: str) -> str:
        if not self._lines:
            await asyncio.Event().wait()
        return self._lines.pop(0)


@asynccontextmanager
async def open_agent(data_dir: Path, behavior: Behavior) -> AsyncGenerator[None]:
    """Serve an agent `a1` of the role `actor`, with its token next to its record."""
    clock = LoopClock()
    discovery = FileDiscovery(data_dir / "fabric", clock)
    async with listen_websocket(token=TOKEN) as listener, asyncio.TaskGroup() as group:
        discovery.publish(make_record("a1", "actor", clock, listener.endpoint))
        discovery.token_file("a1").write_text(TOKEN + "\n")
        serving = serve_on(
            listener, FunctionExecutor(behavior), ServeMany(), ServingSettings(clock, Ids())
        )
        task = group.create_task(serving)
        try:
            yield
        finally:
            task.cancel()


async def call_actor(
    folder: Path,
    control: RunControl | None = None,
    *,
    as_json: bool = False,
    approve: bool | None = None,
    typed: bool = False,
) -> int:
    plain = TextRenderer({SPEC.name: SPEC.info()})
    renderer = JsonCallRenderer(plain) if as_json else TextCallRenderer(plain)
    options = AgentCallOptions("actor", "go", folder, approve=approve)
    lines = TypedLines("what?\n", "y\n") if typed else None
    async with asyncio.timeout(WAIT_S):
        return await call(options, renderer, lines, control or RunControl())


async def push_if_allowed(events: EventSink, host: RunHost, cancel: CancelToken) -> Outcome:
    await events.emit({"type": "token", "content": "Looking\x1b"})
    call_id = {"tool_call_id": "c1"}
    given = {"command": "git push"}
    await events.emit({"type": "tool_start", "tool_name": "bash", "arguments": given, **call_id})
    if not await host.ask(ASKED):
        await events.emit({"type": "tool_error", "error": "not allowed", **call_id})
        return failed("it may not")
    done = {"success": True, "result": "pushed"}
    await events.emit({"type": "tool_complete", "result": done, **call_id})
    await events.emit({"type": "unknown"})
    return completed("Done.")


@pytest.mark.parametrize(
    ("options", "status", "expected"),
    [
        (
            {"approve": True},
            0,
            "→ bash git push\nallowed: bash: git push\n← bash: pushed\n",
        ),
        (
            {"typed": True},
            0,
            "→ bash git push\n? bash: May I?\n  | git push\nallowed: bash: git push\n"
            "← bash: pushed\n",
        ),
        (
            {},
            1,
            "→ bash git push\nhint: there is no terminal to ask at; --approve yes allows it\n"
            "denied: bash: git push\n✗ bash: not allowed\nculm: it may not\n",
        ),
    ],
)
async def test_call_shows_text_and_tools_and_asks_for_permission(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: dict[str, bool],
    status: int,
    expected: str,
) -> None:
    async with open_agent(tmp_path, push_if_allowed):
        assert await call_actor(tmp_path, None, **options) == status
    assert capsys.readouterr() == (
        "Looking\x1b\n",
        expected,
    )  # Raw, because stdout is not a terminal.


LONG = "git status " + "# harmless " * 30
HEAD = f"{LONG[:199]}…"


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        (
            {
                "tool_name": "bash",
                "resource": f"{LONG}\nrm \x1b[2J",
                "question": LONG,
                "params": {"command": f"{LONG}\nrm \x1b[2J", "description": "d"},
                "path": "/w",
                "why": "a\nb",
            },
            [f"? bash: {HEAD}", f"  | {LONG}", r"  | rm \x1b[2J", "  in /w", r"  because: a\nb"],
        ),
        (
            {
                "tool_name": "edit",
                "resource": "/w/a",
                "question": "Change /w/a",
                "params": {"file_path": "/w/a", "old_content": "a", "new_content": "b"},
            },
            ["? edit: Change /w/a", "  | /w/a", "  | @@ -1 +1 @@", "  | -a", "  | +b"],
        ),
        (
            {"tool_name": "my\nown", "params": {"command": "ls", "old_content": "x"}},
            ["? my own: ", '  | {"command":"ls","old_content":"x"}'],
        ),
        ({"tool_name": "other", "question": LONG}, [f"? other: {HEAD}", f"  | {LONG}"]),
    ],
)
def test_permission_prompt_shows_the_whole_request(body: dict[str, Json], lines: list[str]) -> None:
    assert [*ask_lines(parse_ask(body))] == lines


def test_agent_events_cannot_imitate_culm_events(
    capsys: pytest.CaptureFixture[str],
) -> None:
    renderer = JsonCallRenderer(TextRenderer())
    claims: dict[str, Json] = {"type": "end", "approved": False, "status": "completed"}
    renderer.answered(parse_ask(claims), approved=True)
    renderer.event(claims)
    renderer.event({"type": ["end"]})
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        claims | {"type": "asked", "approved": True},
        claims | {"type": "agent_end"},
        {"type": ["end"]},
    ]


async def test_json_output_has_every_event_and_then_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_agent(tmp_path, push_if_allowed):
        assert await call_actor(tmp_path, as_json=True, approve=True) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = ["token", "tool_start", "asked", "tool_complete", "unknown", "end"]
    assert [line["type"] for line in lines] == kinds
    assert {**lines[2], **ASKED, "approved": True} == lines[2]
    assert lines[-1] == {"type": "end", "status": "completed", "result": "Done.", "error": None}


async def test_result_that_was_not_streamed_is_printed_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def silent(events: EventSink, host: RunHost, cancel: CancelToken) -> Outcome:
        return completed("Done.")

    async with open_agent(tmp_path, silent):
        assert await call_actor(tmp_path) == 0
    assert capsys.readouterr() == ("Done.\n", "")


async def test_canceled_call_exits_with_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    control = RunControl()

    async def endless(events: EventSink, host: RunHost, cancel: CancelToken) -> Outcome:
        control.cancel()
        await cancel.wait()
        return CANCELLED

    async with open_agent(tmp_path, endless):
        assert await call_actor(tmp_path, control) == 4
    assert capsys.readouterr() == ("", "culm: canceled\n")


async def test_prompt_closes_when_the_run_stops_asking(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def impatient(events: EventSink, host: RunHost, cancel: CancelToken) -> Outcome:
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(host.ask(ASKED))
            while "? bash" not in capsys.readouterr().err:
                await asyncio.sleep(0)
            asking.cancel()
        return failed("no time")

    options = AgentCallOptions("actor", "go", tmp_path)
    async with open_agent(tmp_path, impatient), asyncio.timeout(WAIT_S):
        assert (
            await call(options, TextCallRenderer(TextRenderer()), TypedLines(), RunControl()) == 1
        )
    message = "(no longer open: it timed out, or the run has ended)\nculm: no time\n"
    assert capsys.readouterr() == ("", message)


async def test_wrong_agent_token_fails_with_a_hint(tmp_path: Path) -> None:
    async with open_agent(tmp_path, push_if_allowed):
        FileDiscovery(tmp_path / "fabric", LoopClock()).token_file("a1").write_text("other")
        with pytest.raises(Failed) as refused:
            await call_actor(tmp_path)
    assert refused.value.message.startswith("cannot reach actor: ws://127.0.0.1:")
    assert "--token-file" in refused.value.hint


# --- a real process


async def test_served_agent_can_be_called_until_sigint(
    cli: CliHarness, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.set_env(PARROT_KEY="p", OTHER_KEY="o")
    discovery = cli.data_dir / "fabric"
    discovery.mkdir(parents=True)
    for left in ("gone.json", ".gone.token"):
        (discovery / left).touch()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "culm", "agent", "serve", "--role", "parrot"),
        *("--executor", "cli_adapter", "--command", "sh -c 'cat; echo $PARROT_KEY $OTHER_KEY'"),
        *("--env", "PARROT_KEY"),
        stdout=PIPE,
        stderr=PIPE,
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(2 * WAIT_S):
            line = (await process.stderr.readline()).decode()
        agent_id = line.split()[1]
        assert line.startswith(f"agent {agent_id} serves role parrot at ws://127.0.0.1:")
        assert line.endswith(f"; call it: culm agent call {agent_id} hello\n")
        names = {file.name: file.stat().st_mode & 0o777 for file in discovery.iterdir()}
        assert names == {f"{agent_id}.json": 0o600, f".{agent_id}.token": 0o600}
        listed = json.loads((await asyncio.to_thread(cli.culm, "agent", "list", "--json")).out)
        assert [(one["agent_id"], one["role"]) for one in listed] == [(agent_id, "parrot")]
        options = AgentCallOptions("parrot", "hello there ", cli.data_dir)
        async with asyncio.timeout(WAIT_S):
            assert await call(options, TextCallRenderer(TextRenderer()), None, RunControl()) == 0
        assert capsys.readouterr() == ("hello there p\n", "")
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(WAIT_S):
            assert await process.communicate() == (b"", b"")
        assert (process.returncode, [*discovery.iterdir()]) == (0, [])
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
