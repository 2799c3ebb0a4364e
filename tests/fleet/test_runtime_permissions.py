"""Permissions of a worker's run: rules, modes, and asks to its host."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from culm.clock import LoopClock
from culm.fleet.executor import CANCELLED, completed, failed
from culm.fleet.provision import Capabilities
from culm.fleet.worker.executors.runtime_gate import (
    PARAMS_BYTES_MAX,
    RuntimeGate,
    body_of,
    policy_input_of,
)
from culm.fleet.worker.executors.runtime_settings import RuntimeSettings
from culm.model.base import ToolSpec
from culm.testing.script import Reply
from culm.tools.base import CallPlan, CallRequest, CallResult, ResolvedAction, Watch
from culm.wire.asks import Rule
from culm.wire.codec import Json
from culm.wire.runs import CrashPolicy
from tests.fleet.runtime_harness import (
    ASKS,
    NEVER,
    Event,
    FakeCancelToken,
    FakeHost,
    calling,
    extension_of,
    open_runtime_harness,
)
from tests.support import contract

TOUCH = calling("bash", command="touch made")
POLICY: dict[str, Json] = {
    "revision": 4,
    "bypass_permissions": False,
    "session_id": "s",
    "policy": {},
}
ASKED, ALLOWED, REFUSED = "asked", "allowed", "refused"


# --- modes


def on_file(path: str) -> ResolvedAction:
    return ResolvedAction("edit", "write", paths=(path,), params={"file_path": path})


COMMAND = ResolvedAction("bash", "execute", params={"command": "touch x"}, commands=("touch x",))
INSIDE, OUTSIDE, LOOK = on_file("/srv/x"), on_file("/x"), ResolvedAction("ls", "list", is_free=True)
DENY = Rule("deny", tool="bash")
ALLOW = Rule("allow", command="touch *")


def named(effective: str, requested: str = "default") -> Capabilities:
    """Capabilities of a host that knows modes."""
    return Capabilities(
        enforce_permissions=True,
        permission_requested_mode=requested,
        permission_effective_mode=effective,
        bypass=effective == "bypass",
        auto_approve_permissions=effective == "auto",
    )


SPEC = ToolSpec("doing", "", {})


@dataclass(frozen=True, slots=True)
class FixedActionTool:
    """A tool with a fixed action."""

    action: ResolvedAction
    spec: ToolSpec = SPEC
    parallel: bool = False
    crash: CrashPolicy = "again"

    async def prepare(self, call: CallRequest) -> CallPlan | CallResult:
        return CallPlan(self.action, self._run)

    async def _run(self, watch: Watch) -> CallResult:
        raise AssertionError("it is only decided upon")


async def no_hooks(call: CallRequest) -> None:
    return None


@contract("FLEET-50")
@pytest.mark.parametrize(
    ("capabilities", "given", "action", "decision"),
    [
        (ASKS, [], COMMAND, ASKED),
        (ASKS, [], INSIDE, ASKED),
        (ASKS, [], LOOK, ALLOWED),
        (ASKS, [ALLOW], COMMAND, ALLOWED),
        (ASKS, [DENY], COMMAND, REFUSED),
        (NEVER, [], COMMAND, ALLOWED),
        (NEVER, [DENY], COMMAND, REFUSED),
        (Capabilities(enforce_permissions=True, bypass=True), [], OUTSIDE, ALLOWED),
        (Capabilities(enforce_permissions=True, bypass=True), [DENY], COMMAND, REFUSED),
        (
            Capabilities(enforce_permissions=True, auto_approve_permissions=True),
            [],
            COMMAND,
            ALLOWED,
        ),
        (Capabilities(read_only=True), [ALLOW], COMMAND, REFUSED),
        (Capabilities(guardian_read_only=True, bypass=True), [], INSIDE, REFUSED),
        (Capabilities(guardian_read_only=True), [], LOOK, ALLOWED),
        (Capabilities(enforce_permissions=True, no_human_approver=True), [], COMMAND, REFUSED),
        (named("plan", "bypass"), [ALLOW], COMMAND, REFUSED),
        (named("plan"), [], LOOK, ALLOWED),
        (named("accept_edits"), [], INSIDE, ALLOWED),
        (named("accept_edits"), [], OUTSIDE, ASKED),
        (named("accept_edits"), [], COMMAND, ASKED),
        (named("dont_ask"), [], COMMAND, REFUSED),
        (named("dont_ask"), [ALLOW], COMMAND, ALLOWED),
        (named("bypass", "bypass"), [], COMMAND, ALLOWED),
        (named("auto", "auto"), [], COMMAND, ALLOWED),
        # The approval policy of the caller applies here, too.
        (ASKS, RuntimeSettings(approve="allow"), COMMAND, ALLOWED),
        (ASKS, RuntimeSettings(approve="deny"), COMMAND, REFUSED),
        (ASKS, RuntimeSettings(approve=(ALLOW,)), COMMAND, ALLOWED),
        (ASKS, RuntimeSettings(approve="allow", rules=(DENY,)), COMMAND, REFUSED),
        (named("dont_ask"), RuntimeSettings(approve="allow"), COMMAND, REFUSED),
        (ASKS, RuntimeSettings(allowed_tools=("bash:execute",)), COMMAND, ALLOWED),
    ],
)
async def test_rules_and_mode_decide_whether_a_call_is_allowed(
    capabilities: Capabilities,
    given: list[Rule] | RuntimeSettings,
    action: ResolvedAction,
    decision: str,
) -> None:
    settings = given if isinstance(given, RuntimeSettings) else RuntimeSettings(rules=tuple(given))
    policy_input, is_read_only = policy_input_of(
        capabilities, settings, workspace="/srv", home="/home"
    )
    host, call = FakeHost(answer=True), CallRequest("a", "doing", "{}", {})
    gate = RuntimeGate(host, LoopClock(), policy_input, is_read_only, no_hooks)
    admitted = await gate.admit(FixedActionTool(action), call)
    found = ALLOWED if isinstance(admitted, CallPlan) else REFUSED
    assert (ASKED if host.asked else found) == decision
    if isinstance(admitted, CallResult):
        assert admitted.content.startswith("Not allowed: ")
        assert (admitted.is_error, admitted.ends_turn) == (True, None)


@pytest.mark.parametrize(
    ("policy", "effective", "decision"),
    [
        ({}, "default", ASKED),
        ({"bypass_permissions": True}, "bypass", ALLOWED),
        ({"auto_approve_permissions": True}, "auto", ALLOWED),
        ({"requested_mode": "default", "effective_mode": "plan"}, "plan", REFUSED),
    ],
)
async def test_run_policy_overrides_the_workers_and_is_announced_first(
    tmp_path: Path, policy: dict[str, Json], effective: str, decision: str
) -> None:
    async with open_runtime_harness(tmp_path, [TOUCH, Reply(text="One."), TOUCH]) as harness:
        assert await harness.run(permission_policy={**POLICY, **policy}) == completed("One.")
        assert harness.sink.events[0] == {
            "type": "permission_posture_activated",
            "session_id": "s",
            "policy_revision": 4,
            "requested_mode": "default" if decision != ALLOWED else effective,
            "effective_mode": effective,
            "executor_mapping": f"bamboo_runtime:{effective}",
        }
        refused = bool(harness.sink.of("tool_error"))
        assert (bool(harness.host.asked), refused) == (decision == ASKED, decision == REFUSED)
        # The next run has no policy of its own: the worker's applies, which asks nobody.
        harness.host.asked.clear()
        assert await harness.run() == completed("Done.")
        assert (harness.sink.events[0]["type"], harness.host.asked) == ("execution_started", [])
        assert (harness.folder / "made").exists()


# --- asking


@contract("FLEET-P8")
async def test_ask_contains_fields_every_host_reads_and_a_deadline(tmp_path: Path) -> None:
    async with open_runtime_harness(tmp_path, [TOUCH], capabilities=ASKS) as harness:
        assert await harness.run() == completed("Done.")
        (body,) = harness.host.asked
        folder = str(harness.folder)
        known = {name: body[name] for name in body if name not in ("digest", "grains", "why")}
        assert known == {
            "tool_name": "bash",
            "permission": "execute",
            "permission_type": "execute",
            "resource": "touch made",
            "question": "Execute command: touch made",
            "deadline": "2027-01-15T08:05:00.000Z",
            "tool_call_id": "call-bash",
            "description": "Execute command: touch made",
            "params": {
                "description": "",
                "command": "touch made",
                "working_dir": "",
                "run_in_background": False,
                "auto_background_after": 0,
            },
            "path": folder,
        }
        assert len(body["digest"]) == 64
        assert body["grains"]
        assert harness.sink.types().index("tool_start") < harness.sink.types().index(
            "tool_complete"
        )


def test_params_too_large_to_show_are_omitted_from_an_ask() -> None:
    action = ResolvedAction("write", "write", params={"new_content": "x" * PARAMS_BYTES_MAX})
    assert body_of(action, CallRequest("c1", "write", "{}", {}), "", 0.0)["params"] is None


async def test_denied_call_is_not_run_and_ends_the_turn(tmp_path: Path) -> None:
    reply = calling("bash", text="I make it.", command="touch made")
    async with open_runtime_harness(tmp_path, [reply], capabilities=ASKS) as harness:
        harness.host.answer = False
        assert await harness.run() == failed("denied: bash: User denied permission")
        (refused,) = harness.sink.of("tool_error")
        assert refused["error"] == "User denied permission"
        assert not (harness.folder / "made").exists()
        last = harness.sink.of("session_message_written")[-1]["message"]
        assert last["parts"][-1]["data"]["culm_reason"] == "denied"
        assert harness.sink.events[-1]["message"] == "denied: bash: User denied permission"


@contract("FLEET-P8")
async def test_ask_unanswered_by_the_deadline_is_refused_and_the_run_continues(
    tmp_path: Path,
) -> None:
    culm = extension_of(tmp_path, ask_s=19.3)
    async with open_runtime_harness(tmp_path, [TOUCH], capabilities=ASKS, culm=culm) as harness:
        harness.host.answer = None
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(harness.run())
            await harness.host.is_asked.wait()
            assert harness.host.asked[0]["deadline"] == "2027-01-15T08:00:20.000Z"
            harness.clock.manual.advance(20)
        assert run.result() == completed("Done.")
        (refused,) = harness.sink.of("tool_error")
        assert refused["error"] == "Not allowed: nobody answered in time."
        assert not (harness.folder / "made").exists()


@dataclass(eq=False)
class DenyOnCancelHost(FakeHost):
    """A host that denies an open ask when the run is cancelled."""

    cancel: FakeCancelToken = field(default_factory=FakeCancelToken)

    async def ask(self, body: Event) -> bool:
        self.is_asked.set()
        await self.cancel.wait()
        return False


async def test_run_canceled_during_an_ask_is_canceled_not_denied(
    tmp_path: Path,
) -> None:
    async with open_runtime_harness(tmp_path, [TOUCH], capabilities=ASKS) as harness:
        harness.host = DenyOnCancelHost(cancel=harness.cancel)
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(harness.run())
            await harness.host.is_asked.wait()
            harness.cancel.set()
        assert run.result() == CANCELLED
        assert harness.sink.of("tool_start", "tool_error") == []
        written = [event["message"] for event in harness.sink.of("session_message_written")]
        (result,) = (m["parts"][0]["data"] for m in written if m["role"] == "tool")
        assert result["content"] == "Error: user cancelled assistant tool calling"
        assert not (harness.folder / "made").exists()
