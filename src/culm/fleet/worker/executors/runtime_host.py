"""Host calls of a run: agent requests, budget reservations, and questions to people.

Owns nothing: agents, accounts and people belong to the host. Only a host that takes calls supports
any of this. A refused call has a reason as its result and does not fail the run.
"""

from collections.abc import Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct, field

from culm.errors import BudgetReached, ModelFailed
from culm.fleet.executor import HostCallFailed, RunHost
from culm.fleet.worker.executors.runtime_events import EventSender
from culm.permission.gate import DECLINED
from culm.run.limits import UsageEstimate
from culm.tools.agent_tools import AgentRequest, ReserveBudget, ReservedBudget
from culm.tools.base import CallRequest, CallResult, QuestionPlan, Watch
from culm.wire.asks import Question, QuestionRequest, QuestionResponse
from culm.wire.runs import Used

T = TypeVar("T")


class _RequestResult(Struct):
    """The result of an agent request."""

    content: str
    is_error: bool = False
    metadata: str = ""


class _Answers(Struct):
    """The answers to questions; without a request there are none, and `declined` has the text."""

    request: QuestionRequest | None = None
    responses: list[QuestionResponse] = field(default_factory=list[QuestionResponse])
    declined: str = ""


class _Questions(Struct, frozen=True, tag_field="op", tag="question"):
    tool_call_id: str
    questions: Sequence[Question]
    confirm_title: str
    confirm_description: str


async def _call(host: RunHost, request: Struct, kind: type[T], tool_call_id: str = "") -> T:
    """Make a host call; raises `HostCallFailed`, `RunEnded`."""
    reply = await host.call(msgspec.to_builtins(request), tool_call_id)
    try:
        return msgspec.convert(reply, kind)
    except msgspec.ValidationError as exc:
        raise HostCallFailed("the host's answer cannot be read") from exc


class HostDelegation(Struct, frozen=True):
    """Implements `Delegation`."""

    host: RunHost

    async def do(self, call: CallRequest, request: AgentRequest, watch: Watch) -> CallResult:
        try:
            done = await _call(self.host, request, _RequestResult, call.id)
        except HostCallFailed as exc:
            return CallResult(f"{call.name}: {exc}", is_error=True)
        return CallResult(done.content, done.is_error, done.metadata)


class HostMeter(Struct, frozen=True):
    """Implements `UsageMeter`."""

    host: RunHost
    events: EventSender

    async def reserve(self, estimate: UsageEstimate) -> str:
        """Reserve an estimate; raises `BudgetReached` if refused, `ModelFailed` if it fails."""
        try:
            reserved = await _call(
                self.host, ReserveBudget(estimate.tokens, estimate.cost), ReservedBudget
            )
        except HostCallFailed as exc:
            raise ModelFailed("Budget not known", f"no budget could be reserved: {exc}") from exc
        if not reserved.id:
            raise BudgetReached(reserved.refused or "The budget is used up.")
        return reserved.id

    def settle(self, reservation: str, used: Used) -> None:
        """Report the usage, before any other event of the answer that it paid for."""
        report = {"reservation": reservation, "used": used._asdict()}
        self.events.send_nowait({"type": "usage_reported", **report})

    def forfeit(self, reservation: str) -> None:
        self.events.send_nowait({"type": "reservation_forfeited", "reservation": reservation})


async def ask_people(host: RunHost, inquiry: QuestionPlan, call: CallRequest) -> CallResult:
    """Ask people through the host; a declined question ends the turn, as in a run of the server."""
    request = _Questions(
        call.id, inquiry.questions, inquiry.confirm_title, inquiry.confirm_description
    )
    try:
        answer = await _call(host, request, _Answers, call.id)
    except HostCallFailed as exc:
        return CallResult(f"This cannot be asked: {exc}", is_error=True)
    if answer.request is None:
        return CallResult(answer.declined or DECLINED, is_error=True, ends_turn="end_turn")
    return inquiry.answer(answer.request, answer.responses)
