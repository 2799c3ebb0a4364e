"""The permission gate of a worker's run: rules, permission mode, approval requests to the host.

The steps and the rules are the same as in a run of the server (`permission/gate.py`, `policy.py`),
hooks included. The difference is that the host is asked, once per call, within a deadline that both
sides keep. No grant outlives its call.
"""

import math
from collections.abc import Callable
from typing import cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from culm.clock import Clock, format_time, within
from culm.fleet.executor import ApprovalUnavailable, RunHost
from culm.fleet.protocol.frames import PermissionPolicy
from culm.fleet.provision import Capabilities
from culm.fleet.worker.executors.runtime_host import ask_people
from culm.fleet.worker.executors.runtime_settings import RuntimeSettings
from culm.permission.gate import (
    DENIED,
    NOBODY_ANSWERS,
    UNANSWERED,
    RunHooks,
    admit,
    refused,
)
from culm.permission.hooks import HookVerdict
from culm.permission.policy import Allow, AskPerson, PolicyInput, Refuse, decide
from culm.tools.base import CallPlan, CallRequest, CallResult, QuestionPlan, ResolvedAction, Tool
from culm.wire.asks import Rule
from culm.wire.codec import Json, encode

PARAMS_BYTES_MAX = 1 << 20  # The parameters of a call that a dialog shows.
ASK_S = 300.0  # The time that hosts of both kinds give a person to answer.
# The rule behind `accept_edits`: writing files, and only inside the workspace.
EDITS = Rule("allow", action="write", path="**")


def capabilities_of(own: Capabilities, policy: PermissionPolicy | None) -> Capabilities:
    """Apply the policy of a run to the worker's own capabilities.

    A read-only worker stays read-only. The modes are not checked here.
    """
    if policy is None:
        return own
    return msgspec.structs.replace(
        own,
        enforce_permissions=True,
        bypass=policy.bypass_permissions,
        auto_approve_permissions=policy.auto_approve_permissions,
        permission_requested_mode=policy.requested_mode,
        permission_effective_mode=policy.effective_mode,
    )


def policy_input_of(
    can: Capabilities, settings: RuntimeSettings, *, workspace: str, home: str
) -> tuple[PolicyInput, bool]:
    """Return the input of the policy, and True if only harmless calls are allowed."""
    mode = can.mode
    policy_input = PolicyInput(
        workspace,
        home,
        also_from=settings.rules_also_from,
        rules=(*settings.rules, EDITS) if mode == "accept_edits" else settings.rules,
        allowed_tools=settings.allowed_tools,
        skip=not can.enforce_permissions or mode in ("auto", "bypass"),
        approve="deny" if mode == "dont_ask" or can.no_human_approver else settings.approve,
    )
    return policy_input, can.is_read_only or mode == "plan"


class RuntimeGate(Struct, frozen=True):
    """The gate of one run. Implements `AdmissionSteps`."""

    host: RunHost
    clock: Clock
    policy_input: PolicyInput
    is_read_only: bool
    hooks: RunHooks
    ask_s: float = ASK_S
    # Called with the reason why a call was allowed.
    on_allowed: Callable[[CallRequest, str], None] = lambda _call, _by: None

    async def admit(self, tool: Tool | CallResult, call: CallRequest) -> CallPlan | CallResult:
        """Return the plan of an allowed call, or the result of a refused one."""
        if isinstance(tool, CallResult):
            return tool
        return await admit(tool, call, self)

    async def run_hooks(self, call: CallRequest) -> HookVerdict | None:
        return await self.hooks(call)

    async def ask_questions(self, plan: QuestionPlan, call: CallRequest) -> CallResult:
        if not self.host.takes_calls:
            return CallResult(NOBODY_ANSWERS, is_error=True)
        return await ask_people(self.host, plan, call)

    async def check(
        self, action: ResolvedAction, call: CallRequest, *, hooked: bool
    ) -> CallResult | None:
        if self.is_read_only and not action.is_free:
            return refused("this agent may only read in its workspace")
        match decide(action, replace(self.policy_input, hook="allow" if hooked else "none")):
            case Allow(by=by):
                self.on_allowed(call, by)
                return None
            case Refuse(reason=reason):
                return refused(reason)
            case AskPerson(why=why):
                return await self._ask(action, call, why)

    async def _ask(self, action: ResolvedAction, call: CallRequest, why: str) -> CallResult | None:
        now_s = self.clock.now_s()
        # Hosts keep deadlines in whole seconds; rounding here makes both sides agree.
        deadline_s = math.ceil(now_s + self.ask_s)
        asking = self.host.ask(body_of(action, call, why, deadline_s))
        # A late answer has no effect: the end of the wait withdraws the request.
        try:
            is_allowed = await within(self.clock, deadline_s - now_s, asking)
        except ApprovalUnavailable as exc:
            return refused(str(exc))
        if is_allowed:
            return None
        if self.clock.now_s() >= deadline_s:
            return refused(UNANSWERED)
        return CallResult(DENIED, is_error=True, ends_turn="denied")


def body_of(
    action: ResolvedAction, call: CallRequest, why: str, deadline_s: float
) -> dict[str, Json]:
    """Build an approval request. All hosts read the first five fields; only culm reads the rest."""
    return {
        "tool_name": action.tool,
        "permission": action.name,
        "permission_type": action.name,
        "resource": _resource(action),
        "question": action.description,
        "deadline": format_time(deadline_s),
        "tool_call_id": call.id,
        "description": action.description,
        # May contain whole files. A host that cannot show them has the digest.
        "params": action.params if len(encode(action.params)) <= PARAMS_BYTES_MAX else None,
        "path": action.path,
        "digest": action.digest,
        "grains": list(action.coverage),
        "why": why,
    }


def _resource(action: ResolvedAction) -> str:
    """Summarize the subject in one text: the command, the URL, or else the file."""
    if isinstance(action.params, dict):
        params = cast("dict[str, Json]", action.params)
        for name in ("command", "url"):
            if isinstance(text := params.get(name), str):
                return text
    return action.paths[0] if action.paths else action.path
