"""What a worker's run may do: by rules, by the mode it runs in, and by asking its host."""

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
    policy_terms_of,
)
from culm.fleet.worker.executors.runtime_settings import RuntimeSettings
from culm.model.base import ToolSpec
from culm.testing.script import Reply
from culm.tools.base import CallPlan, CallRequest, CallResult, ResolvedAction, Watch
from culm.wire.codec import Json
from culm.wire.rules import Rule
from culm.wire.runs import CrashPolicy
from tests.fleet.runtime_stage import (
    ASKS,
    NEVER,
    Above,
    Brake,
    Event,
    calling,
    extension_of,
    open_stage,
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
    """As a host says it that knows modes."""
    return Capabilities(
        enforce_permissions=True,
        permission_requested_mode=requested,
        permission_effective_mode=effective,
        bypass=effective == "bypass",
        auto_approve_permissions=effective == "auto",
    )


SPEC = ToolSpec("doing", "", {})


@dataclass(frozen=True, slots=True)
class Doing:
    """A tool that would do this."""

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
    ("capabilities", "given", "action", "fate"),
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
        # What the caller of the whole run said holds here, too.
        (ASKS, RuntimeSettings(approve="allow"), COMMAND, ALLOWED),
        (ASKS, RuntimeSettings(approve="deny"), COMMAND, REFUSED),
        (ASKS, RuntimeSettings(approve=(ALLOW,)), COMMAND, ALLOWED),
        (ASKS, RuntimeSettings(approve="allow", rules=(DENY,)), COMMAND, REFUSED),
        (named("dont_ask"), RuntimeSettings(approve="allow"), COMMAND, REFUSED),
        (ASKS, RuntimeSettings(allowed_tools=("bash:execute",)), COMMAND, ALLOWED),
    ],
)
async def test_rules_and_the_mode_say_whether_a_call_is_allowed_asked_about_or_refused(
    capabilities: Capabilities,
    given: list[Rule] | RuntimeSettings,
    action: ResolvedAction,
    fate: str,
) -> None:
    said = given if isinstance(given, RuntimeSettings) else RuntimeSettings(rules=tuple(given))
    terms, is_read_only = policy_terms_of(capabilities, said, workspace="/srv", home="/home")
    above, call = Above(answer=True), CallRequest("a", "doing", "{}", {})
    admission = RuntimeGate(above, LoopClock(), terms, is_read_only, no_hooks)
    admitted = await admission.admit(Doing(action), call)
    found = ALLOWED if isinstance(admitted, CallPlan) else REFUSED
    assert (ASKED if above.asked else found) == fate
    if isinstance(admitted, CallResult):
        assert admitted.content.startswith("Not allowed: ")
        assert (admitted.is_error, admitted.ends_turn) == (True, None)


@pytest.mark.parametrize(
    ("policy", "effective", "fate"),
    [
        ({}, "default", ASKED),
        ({"bypass_permissions": True}, "bypass", ALLOWED),
        ({"auto_approve_permissions": True}, "auto", ALLOWED),
        ({"requested_mode": "default", "effective_mode": "plan"}, "plan", REFUSED),
    ],
)
async def test_the_policy_of_a_run_goes_over_the_workers_and_its_posture_is_told_first(
    tmp_path: Path, policy: dict[str, Json], effective: str, fate: str
) -> None:
    async with open_stage(tmp_path, [TOUCH, Reply(text="One."), TOUCH]) as stage:
        assert await stage.run(permission_policy={**POLICY, **policy}) == completed("One.")
        assert stage.ear.events[0] == {
            "type": "permission_posture_activated",
            "session_id": "s",
            "policy_revision": 4,
            "requested_mode": "default" if fate != ALLOWED else effective,
            "effective_mode": effective,
            "executor_mapping": f"bamboo_runtime:{effective}",
        }
        refused = bool(stage.ear.of("tool_error"))
        assert (bool(stage.above.asked), refused) == (fate == ASKED, fate == REFUSED)
        # The next run has no policy of its own: the worker's holds again, which asks nobody.
        stage.above.asked.clear()
        assert await stage.run() == completed("Done.")
        assert (stage.ear.events[0]["type"], stage.above.asked) == ("execution_started", [])
        assert (stage.folder / "made").exists()


# --- asking


@contract("FLEET-P8")
async def test_a_host_is_asked_with_what_every_host_reads_and_a_deadline(tmp_path: Path) -> None:
    async with open_stage(tmp_path, [TOUCH], capabilities=ASKS) as stage:
        assert await stage.run() == completed("Done.")
        (body,) = stage.above.asked
        folder = str(stage.folder)
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
        assert stage.ear.types().index("tool_start") < stage.ear.types().index("tool_complete")


def test_what_no_dialog_can_show_is_left_out_of_an_ask() -> None:
    action = ResolvedAction("write", "write", params={"new_content": "x" * PARAMS_BYTES_MAX})
    assert body_of(action, CallRequest("c1", "write", "{}", {}), "", 0.0)["params"] is None


async def test_what_a_host_denies_is_not_done_and_ends_the_turn(tmp_path: Path) -> None:
    reply = calling("bash", text="I make it.", command="touch made")
    async with open_stage(tmp_path, [reply], capabilities=ASKS) as stage:
        stage.above.answer = False
        assert await stage.run() == failed("denied: bash: User denied permission")
        (refused,) = stage.ear.of("tool_error")
        assert refused["error"] == "User denied permission"
        assert not (stage.folder / "made").exists()
        last = stage.ear.of("session_message_written")[-1]["message"]
        assert last["parts"][-1]["data"]["culm_reason"] == "denied"
        assert stage.ear.events[-1]["message"] == "denied: bash: User denied permission"


@contract("FLEET-P8")
async def test_a_host_that_does_not_answer_by_the_deadline_has_not_allowed_it_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    culm = extension_of(tmp_path, ask_s=19.3)
    async with open_stage(tmp_path, [TOUCH], capabilities=ASKS, culm=culm) as stage:
        stage.above.answer = None
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(stage.run())
            await stage.above.is_asked.wait()
            assert stage.above.asked[0]["deadline"] == "2027-01-15T08:00:20.000Z"
            stage.clock.hand.advance(20)
        assert run.result() == completed("Done.")
        (refused,) = stage.ear.of("tool_error")
        assert refused["error"] == "Not allowed: nobody answered in time."
        assert not (stage.folder / "made").exists()


@dataclass(eq=False)
class Leaving(Above):
    """A host as it is towards a run that is cancelled: what it was asked is denied at once."""

    cancel: Brake = field(default_factory=Brake)

    async def ask(self, body: Event) -> bool:
        self.is_asked.set()
        await self.cancel.wait()
        return False


async def test_a_run_that_is_cancelled_while_it_asks_is_cancelled_and_not_denied(
    tmp_path: Path,
) -> None:
    async with open_stage(tmp_path, [TOUCH], capabilities=ASKS) as stage:
        stage.above = Leaving(cancel=stage.cancel)
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(stage.run())
            await stage.above.is_asked.wait()
            stage.cancel.set()
        assert run.result() == CANCELLED
        assert stage.ear.of("tool_start", "tool_error") == []
        written = [event["message"] for event in stage.ear.of("session_message_written")]
        (result,) = (m["parts"][0]["data"] for m in written if m["role"] == "tool")
        assert result["content"] == "Error: user cancelled assistant tool calling"
        assert not (stage.folder / "made").exists()
