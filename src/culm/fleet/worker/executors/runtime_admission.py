"""Whether a call of a worker's run goes ahead: by the rules, by its mode, or by asking its host.

The rules are the same as in a run of the server (`permission/policy.py`). What differs is who is
asked: the host, once a call, within a deadline that both sides keep. Nothing is granted for longer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from culm.clock import Clock
from culm.fleet.executor import Host
from culm.fleet.protocol.frames import PermissionPolicy
from culm.fleet.provision import Capabilities
from culm.fleet.times import format_time
from culm.permission.clearance import DENIED, EXPIRED, NOBODY_ANSWERS, prepare
from culm.permission.policy import Allowed, Asked, Refused, Terms, decide
from culm.tools.base import Action, Call, Inquiry, Plan, Result, Tool
from culm.tools.waiting import within
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
    given: Capabilities, rules: Sequence[Rule], *, workspace: str, home: str
) -> tuple[Terms, bool]:
    """What calls are judged by, and whether nothing but what is harmless goes ahead."""
    mode = given.mode
    terms = Terms(
        workspace,
        home,
        rules=(*rules, EDITS) if mode == "accept_edits" else tuple(rules),
        skip=not given.enforce_permissions or mode in ("auto", "bypass"),
        approve="deny" if mode == "dont_ask" or given.no_human_approver else None,
    )
    return terms, given.is_read_only or mode == "plan"


@dataclass(frozen=True, slots=True)
class Admission:
    """That of one run."""

    host: Host
    clock: Clock
    terms: Terms
    is_read_only: bool

    async def admit(self, tool: Tool | Result, call: Call) -> Plan | Result:
        """The plan of a call that goes ahead, or the result it has instead."""
        if isinstance(tool, Result):
            return tool
        plan = await prepare(tool, call)
        if isinstance(plan, Inquiry):
            return Result(NOBODY_ANSWERS, is_error=True)
        if isinstance(plan, Result):
            return plan
        return await self._check(plan.action, call) or plan

    async def _check(self, action: Action, call: Call) -> Result | None:
        """None if it may go ahead."""
        if self.is_read_only and not action.is_free:
            return _refused("this agent may only read in its workspace")
        match decide(action, self.terms):
            case Allowed():
                return None
            case Refused(reason=reason):
                return _refused(reason)
            case Asked(why=why):
                return await self._ask(action, call, why)

    async def _ask(self, action: Action, call: Call, why: str) -> Result | None:
        deadline_s = self.clock.now_s() + ASK_S
        asking = self.host.ask(body_of(action, call, why, deadline_s))
        # Who answers later finds nobody waiting: the wait, and with it the request, is withdrawn.
        if await within(self.clock, ASK_S, asking):
            return None
        words = DENIED if self.clock.now_s() < deadline_s else EXPIRED
        return Result(words, is_error=True, ends_turn="denied")


def _refused(reason: str) -> Result:
    return Result(f"Not allowed: {reason}.", is_error=True)


def body_of(action: Action, call: Call, why: str, deadline_s: float) -> dict[str, Json]:
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
        "grains": list(action.grains),
        "why": why,
    }


def _resource(action: Action) -> str:
    """What it is about, in one text: the command, the address, or else the file."""
    if isinstance(action.params, dict):
        params = cast("dict[str, Json]", action.params)
        for name in ("command", "url"):
            if isinstance(text := params.get(name), str):
                return text
    return action.paths[0] if action.paths else action.path
