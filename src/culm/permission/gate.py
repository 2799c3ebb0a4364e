"""Who decides on the calls of a workspace's runs: the policy, what people allowed, and people.

Owns what they are asked and have allowed there. The way of a call is `admitting.py`.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import msgspec

from culm.clock import Clock
from culm.errors import LimitExceeded
from culm.events.hub import TransientEvent
from culm.ids import AskId, Ids, MessageId, RunId, SessionId
from culm.permission.admission import (
    DECLINED,
    DENIED,
    EXPIRED,
    NOBODY_ANSWERS,
    UNANSWERED,
    AdmissionSteps,
    RunHooks,
    admit,
    refused,
)
from culm.permission.asks import Asks, ClosedAsk
from culm.permission.grants import Grants
from culm.permission.notifications import PermissionNotifier, QuestionNotifier, notification
from culm.permission.policy import Allow, AskPerson, PolicyInput, Refuse, decide
from culm.store.asks import AnyAsk, publish_skip
from culm.store.store import Store
from culm.tools.base import CallPlan, CallRequest, CallResult, QuestionPlan, ResolvedAction, Tool
from culm.wire.asks import (
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
from culm.wire.codec import encode
from culm.wire.rules import Approve

HEADLESS_WAIT_S = 300  # A run that nobody started by hand waits so long for somebody.


@dataclass(frozen=True, slots=True)
class ApprovalPolicy:
    """What the caller of a run said: whether somebody is there, and what is answered for them."""

    headless: bool = False
    approve: Approve | None = None


class NoApprover(Exception):
    """Somebody would have to decide, and nobody did. Says why, in words for the model."""


@dataclass(frozen=True, slots=True)
class PendingApproval:
    """A call that a person is to allow."""

    call: CallRequest
    action: ResolvedAction
    digest: str
    why: str
    deadline: int  # In Unix seconds; 0 if it waits.
    path: Sequence[str] = ()  # Which agents lead to whoever asks.


class PermissionGate:
    """The clearance of one workspace, with all that people are asked and have allowed there."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        ids: Ids,
        *,
        tell: Callable[[TransientEvent], None],
        run_hooks: RunHooks,
        terms: Callable[[], PolicyInput],  # As the configuration has them now.
        is_watched: Callable[[], bool],  # Whether somebody could answer.
        skip: bool,
    ) -> None:
        self.permissions = Asks[PermissionRequest](store, clock, PermissionNotifier(), tell)
        self.questions = Asks[QuestionRequest](store, clock, QuestionNotifier(), tell)
        self.grants = Grants(store)
        self.permissions.on_grant = self.grants.add
        self._store = store
        self._clock = clock
        self._ids = ids
        self._tell = tell
        self._run_hooks = run_hooks
        self._terms = terms
        self._is_watched = is_watched
        self._skips = skip  # Nobody is asked in this workspace ...
        self._skipping: set[str] = set()  # ... or in these sessions.

    # --- a call

    async def admit(
        self, tool: Tool | CallResult, call: CallRequest, approval: ApprovalPolicy
    ) -> CallPlan | CallResult:
        """Whether a call goes ahead: its plan, or the result it has instead.

        One that cannot be made comes with its result, and had perhaps asked when it still could.
        """
        if (state := self.permissions.find_refusal(call.message_id, call.id)) is not None:
            admitted: CallPlan | CallResult = _refusal(state)
        elif isinstance(tool, CallResult):
            admitted = tool
        else:
            gate = AdmissionSteps(
                self._run_hooks,
                partial(self._check, approval=approval),
                partial(self._inquire, approval=approval),
            )
            admitted = await admit(tool, call, gate)
        for asks in (self.permissions, self.questions):
            await asks.settle(call.message_id, call.id)
        return admitted

    async def _check(
        self, action: ResolvedAction, call: CallRequest, *, hooked: bool, approval: ApprovalPolicy
    ) -> CallResult | None:
        terms = replace(
            self._terms(),
            skip=self.is_skipped(call.session_id),
            hook="allow" if hooked else "none",
            granted=self.grants.covering(action, call.session_id),
            approve=approval.approve,
        )
        match decide(action, terms):
            case Allow(by=by):
                self.notify_allowed(call, by)
                return None
            case Refuse(reason=reason):
                return refused(reason)
            case AskPerson(why=why):
                return await self._ask(action, call, approval, why)

    def notify_allowed(self, call: CallRequest, by: str) -> None:
        """Clients show what a hook, an earlier answer or the run's caller let through."""
        if by in ("grant", "approve"):
            self._tell(notification(call.session_id, call.id))
        if by in ("grant", "approve", "hook"):
            self._tell(notification(call.session_id, call.id, granted=True))

    async def _ask(
        self, action: ResolvedAction, call: CallRequest, approval: ApprovalPolicy, why: str
    ) -> CallResult | None:
        if self._is_alone(approval) and not self.permissions.had_asked(call.message_id, call.id):
            return refused(_alone(why))
        pending = PendingApproval(call, action, action.digest, why, self._deadline(approval))
        try:
            closed = await self._put(pending)
        except LimitExceeded as exc:
            return refused(exc.message)
        return None if closed.state == "allowed" else _refusal(closed.state)

    async def _put(self, pending: PendingApproval) -> ClosedAsk:
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
        """Whether an agent's call may go ahead, which its rules leave to people.

        What people have said of the sessions `above` holds for it, too. Raises `NobodyThere`.
        """
        call, action = pending.call, pending.action
        sessions = (*above, call.session_id)
        if any(self.is_skipped(session_id) for session_id in sessions):
            return True
        granted = {one for place in sessions for one in self.grants.covering(action, place)}
        if action.coverage and granted.issuperset(action.coverage):
            self.notify_allowed(call, "grant")
            return True
        if self._is_alone(approval):
            raise NoApprover(_alone(pending.why))
        try:
            closed = await self._put(pending)
        except LimitExceeded as exc:
            raise NoApprover(exc.message) from exc
        if closed.state == "expired":
            raise NoApprover(UNANSWERED)
        return closed.state == "allowed"

    async def _inquire(
        self, inquiry: QuestionPlan, call: CallRequest, approval: ApprovalPolicy
    ) -> CallResult:
        answered = await self.ask_people(inquiry, call, approval)
        return answered if isinstance(answered, CallResult) else inquiry.answer(*answered)

    async def ask_people(
        self,
        inquiry: QuestionPlan,
        call: CallRequest,
        approval: ApprovalPolicy,
        path: Sequence[str] = (),
    ) -> tuple[QuestionRequest, Sequence[QuestionResponse]] | CallResult:
        """What was asked and answered, or what the model reads because nobody did."""
        if self._is_alone(approval) and not self.questions.had_asked(call.message_id, call.id):
            return CallResult(NOBODY_ANSWERS, is_error=True)
        questions = [
            msgspec.structs.replace(question, id=self._ids.question())
            for question in inquiry.questions
        ]
        request = QuestionRequest(
            id=self._ids.ask(),
            session_id=call.session_id,
            tool_call_id=call.id,
            questions=questions,
            confirm_title=inquiry.confirm_title,
            confirm_description=inquiry.confirm_description,
        )
        action = ResolvedAction(
            call.name, "ask", resolved=msgspec.to_builtins(list(inquiry.questions))
        )
        ask = Ask(
            request,
            RunId(call.run_id),
            MessageId(call.message_id),
            digest=action.digest,
            deadline=self._deadline(approval),
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

    def _is_alone(self, approval: ApprovalPolicy) -> bool:
        """Whether there is nobody to ask: who was asked may come back."""
        return approval.headless and not self._is_watched()

    def _deadline(self, approval: ApprovalPolicy) -> int:
        return int(self._clock.now_s()) + HEADLESS_WAIT_S if approval.headless else 0

    # --- what people answer

    async def answer(self, body: PermissionGrant, by: str) -> bool:
        """Answer a permission request; False if somebody was faster, or nothing is asked.

        What is allowed is what the server asked for, whatever else the body says.
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
        """Answer a batch of questions; without its id, the one whose questions are answered."""
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
        shown = self.questions.announced
        if not batch_id and shown is not None:
            batch_id = shown.request.id
        return await self.questions.close(batch_id, ClosedAsk("canceled", by))

    def is_skipped(self, session_id: str = "") -> bool:
        return self._skips or session_id in self._skipping

    async def set_skip(self, session_id: str, by: str, *, on: bool) -> None:
        """Let calls go ahead unasked, in one session or everywhere; what is open stays open."""

        def announced(_: None) -> None:
            if not session_id:
                self._skips = on
            elif on:
                self._skipping.add(session_id)
            else:
                self._skipping.discard(session_id)

        changed = SkipChanged("session" if session_id else "workspace", session_id, on, by)
        await asyncio.shield(self._store.write(publish_skip(changed), announced))

    def shown(self) -> Sequence[TransientEvent]:
        """How things stand, for whoever begins to listen."""
        skips = [SkipChanged("workspace", "", self._skips)]
        skips += [SkipChanged("session", session_id, on=True) for session_id in self._skipping]
        told = [TransientEvent("skip_changed", skip.session_id, encode(skip)) for skip in skips]
        return [*told, *self.permissions.shown(), *self.questions.shown()]

    # --- the life of runs, sessions and the server

    def waits(self, run_id: str) -> bool:
        """Whether a run waits for a person."""
        return self.permissions.has_of_run(run_id) or self.questions.has_of_run(run_id)

    def is_being_answered(self, run_id: str) -> bool:
        """Whether a run that waits is about to go on."""
        kinds = (self.permissions, self.questions)
        return any(asks.is_closing_of_run(run_id) for asks in kinds)

    def restore(self, asks: Sequence[AnyAsk]) -> None:
        """Take on what the last server had asked, for runs that go on."""
        for ask in asks:
            if isinstance(ask.request, PermissionRequest):
                self.permissions.restore(cast("Ask[PermissionRequest]", ask))
            else:  # Each is what its request is, which the checker cannot follow.
                self.questions.restore(cast("Ask[QuestionRequest]", ask))

    def forget_run(self, run_id: str) -> None:
        self.permissions.forget_run(run_id)
        self.questions.forget_run(run_id)

    def forget_session(self, session_id: str) -> None:
        self.grants.forget_session(session_id)
        self._skipping.discard(session_id)

    def stop(self) -> None:
        self.permissions.stop()
        self.questions.stop()


def _refusal(state: AskState) -> CallResult:
    words = EXPIRED if state == "expired" else DENIED
    return CallResult(words, is_error=True, ends_turn="denied")


def _alone(why: str) -> str:
    reason = f" ({why.rstrip('.')})" if why else ""
    return f"this needs a person's permission{reason}, and nobody can be asked"
