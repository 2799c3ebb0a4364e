"""Whether a call of a worker's run goes ahead: by the rules, by its mode, or by asking its host.

The way of a call and the rules are the same as in a run of the server (`permission/admission.py`,
`policy.py`), hooks included. What differs is who is asked: the host, once a call, within a deadline
that both sides keep. Nothing is granted for longer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import msgspec

from culm.clock import Clock
from culm.fleet.executor import ApprovalUnavailable, RunHost
from culm.fleet.protocol.frames import PermissionPolicy
from culm.fleet.provision import Capabilities
from culm.fleet.times import format_time
from culm.fleet.worker.executors.runtime_host import ask_people
from culm.fleet.worker.executors.runtime_settings import RuntimeSettings
from culm.permission.admission import (
    DENIED,
    NOBODY_ANSWERS,
    UNANSWERED,
    AdmissionSteps,
    RunHooks,
    admit,
    refused,
)
from culm.permission.policy import Allow, AskPerson, PolicyInput, Refuse, decide
from culm.tools.base import CallPlan, CallRequest, CallResult, QuestionPlan, ResolvedAction, Tool
from culm.tools.process.waiting import within
from culm.wire.codec import Json, encode
from culm.wire.rules import Rule

PARAMS_BYTES_MAX = 1 << 20  # Of what a dialog shows of a call.
ASK_S = 300.0  # As long as hosts of either kind let a person think.
# What `accept_edits` means: writing files, and only inside the workspace.
EDITS = Rule("allow", action="write", path="**")


def capabilities_of(given: Capabilities, policy: PermissionPolicy | None) -> Capabilities:
    """What holds for a run: what its host said with it goes over what the worker was made with.

    That it is read-only stays. The modes are not checked yet.
    """
    if policy is None:
        return given
    return msgspec.structs.replace(
        given,
        enforce_permissions=True,
        bypass=policy.bypass_permissions,
        auto_approve_permissions=policy.auto_approve_permissions,
        permission_requested_mode=policy.requested_mode,
        permission_effective_mode=policy.effective_mode,
    )


def policy_terms_of(
    can: Capabilities, given: RuntimeSettings, *, workspace: str, home: str
) -> tuple[PolicyInput, bool]:
    """What calls are judged by, and whether nothing but what is harmless goes ahead."""
    mode = can.mode
    terms = PolicyInput(
        workspace,
        home,
        also_from=given.rules_also_from,
        rules=(*given.rules, EDITS) if mode == "accept_edits" else given.rules,
        allowed_tools=given.allowed_tools,
        skip=not can.enforce_permissions or mode in ("auto", "bypass"),
        approve="deny" if mode == "dont_ask" or can.no_human_approver else given.approve,
    )
    return terms, can.is_read_only or mode == "plan"


@dataclass(frozen=True, slots=True)
class RuntimeGate:
    """That of one run."""

    host: RunHost
    clock: Clock
    terms: PolicyInput
    is_read_only: bool
    run_hooks: RunHooks
    ask_s: float = ASK_S
    on_allowed: Callable[[CallRequest, str], None] = lambda _call, _by: (
        None
    )  # Told what let it through.

    async def admit(self, tool: Tool | CallResult, call: CallRequest) -> CallPlan | CallResult:
        """The plan of a call that goes ahead, or the result it has instead."""
        if isinstance(tool, CallResult):
            return tool
        return await admit(tool, call, AdmissionSteps(self.run_hooks, self._check, self._inquire))

    async def _inquire(self, inquiry: QuestionPlan, call: CallRequest) -> CallResult:
        if not self.host.takes_calls:
            return CallResult(NOBODY_ANSWERS, is_error=True)
        return await ask_people(self.host, inquiry, call)

    async def _check(
        self, action: ResolvedAction, call: CallRequest, *, hooked: bool
    ) -> CallResult | None:
        if self.is_read_only and not action.is_free:
            return refused("this agent may only read in its workspace")
        match decide(action, replace(self.terms, hook="allow" if hooked else "none")):
            case Allow(by=by):
                self.on_allowed(call, by)
                return None
            case Refuse(reason=reason):
                return refused(reason)
            case AskPerson(why=why):
                return await self._ask(action, call, why)

    async def _ask(self, action: ResolvedAction, call: CallRequest, why: str) -> CallResult | None:
        now_s = self.clock.now_s()
        # A host keeps deadlines in whole seconds; so both sides mean the same moment.
        deadline_s = math.ceil(now_s + self.ask_s)
        asking = self.host.ask(body_of(action, call, why, deadline_s))
        # Who answers later finds nobody waiting: the wait, and with it the request, is withdrawn.
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
    """What a host is asked. The first five are what every host reads; the rest is for ours."""
    return {
        "tool_name": action.tool,
        "permission": action.name,
        "permission_type": action.name,
        "resource": _resource(action),
        "question": action.description,
        "deadline": format_time(deadline_s),
        "tool_call_id": call.id,
        "description": action.description,
        # Whole files may be in it. A host that cannot show them has the digest.
        "params": action.params if len(encode(action.params)) <= PARAMS_BYTES_MAX else None,
        "path": action.path,
        "digest": action.digest,
        "grains": list(action.coverage),
        "why": why,
    }


def _resource(action: ResolvedAction) -> str:
    """What it is about, in one text: the command, the address, or else the file."""
    if isinstance(action.params, dict):
        params = cast("dict[str, Json]", action.params)
        for name in ("command", "url"):
            if isinstance(text := params.get(name), str):
                return text
    return action.paths[0] if action.paths else action.path
