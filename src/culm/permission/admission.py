"""The way of every call from what a model wrote to what may be done.

Hooks first, which may rewrite or refuse it; then the tool resolves what it would do; then the
policy decides; then, if it must be, a person. What comes out is a plan that may be carried out as
it stands, or the result that the model reads instead. Who decides, and who is asked, differs: in
the server it is a workspace's `Clearance`, in a worker it is its host in the end.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

from culm.permission.hooks import HookVerdict
from culm.tools.base import (
    CallPlan,
    CallRequest,
    CallResult,
    QuestionPlan,
    ResolvedAction,
    Tool,
    Watch,
)
from culm.wire.codec import Json, decode, encode

log = logging.getLogger(__name__)

DENIED = "User denied permission"
DECLINED = "User cancelled this question"
EXPIRED = "Nobody answered the permission request in time"
UNANSWERED = "nobody answered in time"  # The same, of an agent: it goes on.
NOBODY_ANSWERS = "Nobody is there to answer. Decide yourself, and say so."

RunHooks = Callable[[CallRequest], Awaitable[HookVerdict | None]]


class AdmissionCheck(Protocol):
    async def __call__(
        self, action: ResolvedAction, call: CallRequest, *, hooked: bool
    ) -> CallResult | None:
        """None if it may go ahead; `hooked` if a hook has allowed exactly this call."""
        ...


@dataclass(frozen=True, slots=True)
class AdmissionSteps:
    """Who has a say on the way of a call, in this order."""

    run_hooks: RunHooks
    check: AdmissionCheck
    inquire: Callable[
        [QuestionPlan, CallRequest], Awaitable[CallResult]
    ]  # Asks a person, instead of doing.


async def admit(tool: Tool, call: CallRequest, gate: AdmissionSteps) -> CallPlan | CallResult:
    """The plan of a call that goes ahead, or the result it has instead."""
    verdict = await gate.run_hooks(call)
    if verdict is not None:
        if verdict.halt or verdict.decision == "deny":
            return _stopped_by(verdict)
        if verdict.updated_input is not None:
            text = encode(verdict.updated_input).decode()
            call = replace(call, input=text, arguments=verdict.updated_input)
    plan = await prepare(tool, call)
    if isinstance(plan, QuestionPlan):
        plan = await gate.inquire(plan, call)
    elif isinstance(plan, CallPlan):
        hooked = verdict is not None and verdict.decision == "allow"
        plan = await gate.check(plan.action, call, hooked=hooked) or plan
    return plan if verdict is None else _with_hook(plan, verdict)


async def prepare(tool: Tool, call: CallRequest) -> CallPlan | QuestionPlan | CallResult:
    """What a call would do. What a tool raises is its result."""
    try:
        return await tool.prepare(call)
    except Exception as exc:  # boundary: what a tool raises is for the model to read
        log.exception("%s cannot be prepared", call.name)
        return CallResult(f"{type(exc).__name__}: {exc}", is_error=True)


def refused(reason: str) -> CallResult:
    """What a model reads of a call that goes no further, and nobody was asked about."""
    return CallResult(f"Not allowed: {reason}.", is_error=True)


# --- hooks


def _stopped_by(verdict: HookVerdict) -> CallResult:
    reason = verdict.reason or "a hook refused it"
    result = CallResult(reason, is_error=True, ends_turn="end_turn" if verdict.halt else None)
    return _marked(result, verdict)


def _with_hook(plan: CallPlan | CallResult, verdict: HookVerdict) -> CallPlan | CallResult:
    """Let what the hooks say be read with the result."""
    if isinstance(plan, CallResult):
        return _marked(plan, verdict)
    run = plan.run

    async def hooked(watch: Watch) -> CallResult:
        return _marked(await run(watch), verdict)

    return replace(plan, run=hooked)


def _marked(result: CallResult, verdict: HookVerdict) -> CallResult:
    content = f"{result.content}\n{verdict.context}" if verdict.context else result.content
    known = decode(result.metadata or "{}", dict[str, Json])
    metadata = encode({**known, "hook": verdict.metadata}).decode()
    return replace(result, content=content, metadata=metadata)
