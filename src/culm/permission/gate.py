"""The permission gate: the path of a call from the model's arguments to a plan that may run.

`admit` applies the steps in order: hooks, which may rewrite or refuse the call; the tool, which
resolves the effect of the call; the policy; and a person, if the policy requires one. The outcome
is a plan that may run unchanged, or a result that the model reads instead. In the server the steps
are those of `RunAdmission`, in a worker of its `RuntimeGate`, which forwards asks to the host.

`PermissionGate` owns the open asks, the grants and the skip mode of one workspace.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from culm.clock import Clock
from culm.errors import LimitExceeded
from culm.events.hub import TransientEvent
from culm.ids import AskId, Ids, MessageId, RunId, SessionId
from culm.permission.asks import (
    PERMISSION_EVENTS,
    QUESTION_EVENTS,
    Asks,
    ClosedAsk,
    notification,
)
from culm.permission.grants import Grants
from culm.permission.hooks import HookVerdict
from culm.permission.policy import Allow, AskPerson, PolicyInput, Refuse, decide
from culm.store.asks import AnyAsk, publish_skip
from culm.store.store import Store
from culm.tools.base import (
    CallPlan,
    CallRequest,
    CallResult,
    QuestionPlan,
    ResolvedAction,
    Tool,
    Watch,
)
from culm.wire.asks import (
    Approve,
    Ask,
    AskState,
    Grant,
    PermissionGrant,
    PermissionRequest,
    QuestionAnswer,
    QuestionRequest,
    QuestionResponse,
    SkipChanged,
)
from culm.wire.codec import Json, decode, encode

log = logging.getLogger(__name__)

HEADLESS_WAIT_S = 300  # The time limit for answering an ask of a headless run.

DENIED = "User denied permission"
DECLINED = "User cancelled this question"
EXPIRED = "Nobody answered the permission request in time"
UNANSWERED = "nobody answered in time"  # The same for an agent, which continues.
NOBODY_ANSWERS = "Nobody is there to answer. Decide yourself, and say so."

RunHooks = Callable[[CallRequest], Awaitable[HookVerdict | None]]


class ApprovalPolicy(Struct, frozen=True):
    """The approval settings of a run's caller: whether a person is present, and preset answers."""

    headless: bool = False
    approve: Approve | None = None


class NoApprover(Exception):
    """A decision by a person is needed, and nobody made it. The message is for the model."""


class PendingApproval(Struct, frozen=True):
    """A call that waits for a person's approval."""

    call: CallRequest
    action: ResolvedAction
    digest: str
    why: str
    deadline: int  # Unix seconds; 0 means that it waits without a limit.
    path: Sequence[str] = ()  # The chain of agents from the root to the one that asks.


class AdmissionSteps(Protocol):
    """The steps that a call passes, in this order, around the tool's own `prepare`."""

    async def run_hooks(self, call: CallRequest) -> HookVerdict | None: ...

    async def check(
        self, action: ResolvedAction, call: CallRequest, *, hooked: bool
    ) -> CallResult | None:
        """Return None if the call may run; `hooked` if a hook has allowed exactly this call."""
        ...

    async def ask_questions(self, plan: QuestionPlan, call: CallRequest) -> CallResult:
        """Ask a person instead of running anything."""
        ...


class PermissionGate:
    """Admission of the calls of one workspace, with its open asks and grants."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        ids: Ids,
        *,
        publish: Callable[[TransientEvent], None],
        run_hooks: RunHooks,
        policy_input: Callable[[], PolicyInput],  # Reads the current configuration.
        is_watched: Callable[[], bool],  # True if a client is connected that could answer.
        skip: bool,
    ) -> None:
        self.grants = Grants(store)
        self.permissions = Asks[PermissionRequest](
            store, clock, PERMISSION_EVENTS, publish, self.grants.add
        )
        self.questions = Asks[QuestionRequest](store, clock, QUESTION_EVENTS, publish)
        self._store = store
        self._clock = clock
        self._ids = ids
        self._publish = publish
        self.run_hooks = run_hooks
        self.policy_input = policy_input
        self._is_watched = is_watched
        self._skip_all = skip  # Skip mode for the whole workspace.
        self._skip_sessions: set[str] = set()  # Sessions in skip mode.

    # --- asking a person

    def notify_allowed(self, call: CallRequest, by: str) -> None:
        """Notify clients of a call that a hook, a grant or the run's caller allowed."""
        if by in ("grant", "approve"):
            self._publish(notification(call.session_id, call.id))
        if by in ("grant", "approve", "hook"):
            self._publish(notification(call.session_id, call.id, granted=True))

    async def put(self, pending: PendingApproval) -> ClosedAsk:
        """Open the ask of a call and wait for its answer; raises `LimitExceeded`."""
        call, action = pending.call, pending.action
        request = PermissionRequest(
            id=self._ids.ask(),
            session_id=call.session_id,
            tool_call_id=call.id,
            tool_name=action.tool,
            description=action.description,
            action=action.name,
            params=action.params,
            path=action.path,
        )
        ask = Ask(
            request,
            RunId(call.run_id),
            MessageId(call.message_id),
            digest=pending.digest,
            grains=list(action.coverage),
            why=pending.why,
            deadline=pending.deadline,
            created_at=int(self._clock.now_s()),
            agent_path=list(pending.path),
        )
        _, closed = await self.permissions.put(ask)
        return closed

    async def allow_agent(
        self, pending: PendingApproval, approval: ApprovalPolicy, above: Sequence[str]
    ) -> bool:
        """Decide on an agent's call that the agent's own rules leave to a person.

        Grants and skip mode of the sessions `above` apply to it, too. Raises `NoApprover`.
        """
        call, action = pending.call, pending.action
        sessions = (*above, call.session_id)
        if any(self.is_skipped(session_id) for session_id in sessions):
            return True
        granted = {item for one in sessions for item in self.grants.covering(action, one)}
        if action.coverage and granted.issuperset(action.coverage):
            self.notify_allowed(call, "grant")
            return True
        if self.is_unattended(approval):
            raise NoApprover(_unattended_text(pending.why))
        try:
            closed = await self.put(pending)
        except LimitExceeded as exc:
            raise NoApprover(exc.message) from exc
        if closed.state == "expired":
            raise NoApprover(UNANSWERED)
        return closed.state == "allowed"

    async def ask_people(
        self,
        plan: QuestionPlan,
        call: CallRequest,
        approval: ApprovalPolicy,
        path: Sequence[str] = (),
    ) -> tuple[QuestionRequest, Sequence[QuestionResponse]] | CallResult:
        """Return the request with its answers, or the result for the model if nobody answered."""
        if self.is_unattended(approval) and not self.questions.had_asked(call.message_id, call.id):
            return CallResult(NOBODY_ANSWERS, is_error=True)
        questions = [
            msgspec.structs.replace(question, id=self._ids.question())
            for question in plan.questions
        ]
        request = QuestionRequest(
            id=self._ids.ask(),
            session_id=call.session_id,
            tool_call_id=call.id,
            questions=questions,
            confirm_title=plan.confirm_title,
            confirm_description=plan.confirm_description,
        )
        action = ResolvedAction(
            call.name, "ask", resolved=msgspec.to_builtins(list(plan.questions))
        )
        ask = Ask(
            request,
            RunId(call.run_id),
            MessageId(call.message_id),
            digest=action.digest,
            deadline=self.deadline(approval),
            created_at=int(self._clock.now_s()),
            agent_path=list(path),
        )
        try:
            asked, closed = await self.questions.put(ask)
        except LimitExceeded as exc:
            return CallResult(f"This cannot be asked: {exc.message}.", is_error=True)
        if closed.state != "answered":
            return CallResult(DECLINED, is_error=True, ends_turn="end_turn")
        return asked.request, closed.responses

    def is_unattended(self, approval: ApprovalPolicy) -> bool:
        """Return True if nobody can be asked. An ask that is already open may still be answered."""
        return approval.headless and not self._is_watched()

    def deadline(self, approval: ApprovalPolicy) -> int:
        return int(self._clock.now_s()) + HEADLESS_WAIT_S if approval.headless else 0

    # --- answers

    async def answer(self, body: PermissionGrant, by: str) -> bool:
        """Answer a permission request. Return False if it is not open.

        A grant covers the stored ask, regardless of the other fields of the body.
        """
        ask = self.permissions.find(body.permission.id)
        if ask is None or (body.digest and body.digest != ask.digest):
            return False
        if body.action == "deny":
            return await self.permissions.close(ask.request.id, ClosedAsk("denied", by))
        grant = None
        if body.action != "allow" and ask.grains:
            grant = Grant(
                id=self._ids.grant(),
                scope="workspace" if body.action == "allow_workspace" else "session",
                session_id=SessionId(ask.request.session_id),
                tool_name=ask.request.tool_name,
                action=ask.request.action,
                grains=ask.grains,
                ask_id=AskId(ask.request.id),
                by=by,
            )
        return await self.permissions.close(ask.request.id, ClosedAsk("allowed", by, grant))

    async def answer_questions(self, body: QuestionAnswer, by: str) -> bool:
        """Answer a batch of questions, identified by its id or else by the questions."""
        asked = {response.request_id for response in body.responses}
        for ask in self.questions.all():
            known = {question.id for question in ask.request.questions}
            named = body.batch_request_id in ("", ask.request.id)
            if named and asked and asked <= known:
                closed = ClosedAsk("answered", by, responses=tuple(body.responses))
                return await self.questions.close(ask.request.id, closed)
        return False

    async def cancel_questions(self, batch_id: str, by: str) -> bool:
        """Decline to answer a batch; without its id, the one that a Crush client shows."""
        first = self.questions.announced
        if not batch_id and first is not None:
            batch_id = first.request.id
        return await self.questions.close(batch_id, ClosedAsk("canceled", by))

    def is_skipped(self, session_id: str = "") -> bool:
        return self._skip_all or session_id in self._skip_sessions

    async def set_skip(self, session_id: str, by: str, *, on: bool) -> None:
        """Switch skip mode, for one session or the whole workspace. Open asks stay open."""

        def announced(_: None) -> None:
            if not session_id:
                self._skip_all = on
            elif on:
                self._skip_sessions.add(session_id)
            else:
                self._skip_sessions.discard(session_id)

        changed = SkipChanged("session" if session_id else "workspace", session_id, on, by)
        await asyncio.shield(self._store.write(publish_skip(changed), announced))

    def state_events(self) -> Sequence[TransientEvent]:
        """Return the events that show the current state to a new subscriber."""
        skips = [SkipChanged("workspace", "", self._skip_all)]
        skips += [SkipChanged("session", session_id, on=True) for session_id in self._skip_sessions]
        events = [TransientEvent("skip_changed", skip.session_id, encode(skip)) for skip in skips]
        return [*events, *self.permissions.state_events(), *self.questions.state_events()]

    # --- lifecycle of runs, sessions and the server

    def waits(self, run_id: str) -> bool:
        """Return True if a run waits for a person."""
        return self.permissions.has_of_run(run_id) or self.questions.has_of_run(run_id)

    def is_being_answered(self, run_id: str) -> bool:
        """Return True if an answer that lets a waiting run continue is being stored."""
        kinds = (self.permissions, self.questions)
        return any(asks.is_closing_of_run(run_id) for asks in kinds)

    def restore(self, asks: Sequence[AnyAsk]) -> None:
        """Reopen the asks of the previous server, for runs that continue."""
        for ask in asks:
            if isinstance(ask.request, PermissionRequest):
                self.permissions.restore(cast("Ask[PermissionRequest]", ask))
            # The request type determines the type of the ask, which the checker cannot infer.
            else:
                self.questions.restore(cast("Ask[QuestionRequest]", ask))

    def forget_run(self, run_id: str) -> None:
        self.permissions.forget_run(run_id)
        self.questions.forget_run(run_id)

    def forget_session(self, session_id: str) -> None:
        self.grants.forget_session(session_id)
        self._skip_sessions.discard(session_id)

    def stop(self) -> None:
        self.permissions.stop()
        self.questions.stop()


class RunAdmission(Struct, frozen=True):
    """The admission of the calls of one run. Implements `AdmissionSteps`."""

    gate: PermissionGate
    approval: ApprovalPolicy

    async def admit(self, tool: Tool | CallResult, call: CallRequest) -> CallPlan | CallResult:
        """Return the plan of a call that may run, or the result that replaces it.

        `tool` is a result if the call can no longer be made. The call may have opened an ask on an
        earlier server, when it could still be made.
        """
        gate = self.gate
        if (state := gate.permissions.find_refusal(call.message_id, call.id)) is not None:
            admitted: CallPlan | CallResult = _refusal(state)
        elif isinstance(tool, CallResult):
            admitted = tool
        else:
            admitted = await admit(tool, call, self)
        for asks in (gate.permissions, gate.questions):
            await asks.withdraw_leftover(call.message_id, call.id)
        return admitted

    async def run_hooks(self, call: CallRequest) -> HookVerdict | None:
        return await self.gate.run_hooks(call)

    async def check(
        self, action: ResolvedAction, call: CallRequest, *, hooked: bool
    ) -> CallResult | None:
        gate = self.gate
        policy_input = replace(
            gate.policy_input(),
            skip=gate.is_skipped(call.session_id),
            hook="allow" if hooked else "none",
            granted=gate.grants.covering(action, call.session_id),
            approve=self.approval.approve,
        )
        match decide(action, policy_input):
            case Allow(by=by):
                gate.notify_allowed(call, by)
                return None
            case Refuse(reason=reason):
                return refused(reason)
            case AskPerson(why=why):
                return await self._ask(action, call, why)

    async def _ask(self, action: ResolvedAction, call: CallRequest, why: str) -> CallResult | None:
        gate, approval = self.gate, self.approval
        had_asked = gate.permissions.had_asked(call.message_id, call.id)
        if gate.is_unattended(approval) and not had_asked:
            return refused(_unattended_text(why))
        pending = PendingApproval(call, action, action.digest, why, gate.deadline(approval))
        try:
            closed = await gate.put(pending)
        except LimitExceeded as exc:
            return refused(exc.message)
        return None if closed.state == "allowed" else _refusal(closed.state)

    async def ask_questions(self, plan: QuestionPlan, call: CallRequest) -> CallResult:
        answered = await self.gate.ask_people(plan, call, self.approval)
        return answered if isinstance(answered, CallResult) else plan.answer(*answered)


def _refusal(state: AskState) -> CallResult:
    return CallResult(refusal_text(state), is_error=True, ends_turn="denied")


def refusal_text(state: AskState) -> str:
    """Return the result for the model of a call whose permission was refused."""
    return EXPIRED if state == "expired" else DENIED


def _unattended_text(why: str) -> str:
    reason = f" ({why.rstrip('.')})" if why else ""
    return f"this needs a person's permission{reason}, and nobody can be asked"


# --- the steps


async def admit(tool: Tool, call: CallRequest, steps: AdmissionSteps) -> CallPlan | CallResult:
    """Return the plan of a call that may run, or the result that replaces it."""
    verdict = await steps.run_hooks(call)
    if verdict is not None:
        if verdict.halt or verdict.decision == "deny":
            return _stopped_by(verdict)
        if verdict.updated_input is not None:
            text = encode(verdict.updated_input).decode()
            call = replace(call, input=text, arguments=verdict.updated_input)
    plan = await prepare(tool, call)
    if isinstance(plan, QuestionPlan):
        plan = await steps.ask_questions(plan, call)
    elif isinstance(plan, CallPlan):
        hooked = verdict is not None and verdict.decision == "allow"
        plan = await steps.check(plan.action, call, hooked=hooked) or plan
    return plan if verdict is None else _with_hook(plan, verdict)


async def prepare(tool: Tool, call: CallRequest) -> CallPlan | QuestionPlan | CallResult:
    """Resolve the effect of a call. An exception in the tool becomes the call's result."""
    try:
        return await tool.prepare(call)
    except Exception as exc:  # boundary: the model reads the errors of a tool
        log.exception("%s cannot be prepared", call.name)
        return CallResult(f"{type(exc).__name__}: {exc}", is_error=True)


def refused(reason: str) -> CallResult:
    """Build the result of a call that is refused without asking anybody."""
    return CallResult(f"Not allowed: {reason}.", is_error=True)


def _stopped_by(verdict: HookVerdict) -> CallResult:
    reason = verdict.reason or "a hook refused it"
    result = CallResult(reason, is_error=True, ends_turn="end_turn" if verdict.halt else None)
    return _marked(result, verdict)


def _with_hook(plan: CallPlan | CallResult, verdict: HookVerdict) -> CallPlan | CallResult:
    """Add the output of the hooks to the result."""
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
