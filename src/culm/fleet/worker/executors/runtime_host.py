"""What a run has its host do, by host calls: errands, budgets, and questions to people.

Owns nothing: the agents, the accounts and the people are all the host's. Only a host that takes
calls has any of it. What it does not do it says in words, and that is no reason for a run to fail.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from msgspec import Struct, field

from culm.errors import BudgetReached, ModelFailed
from culm.fleet.executor import HostCallFailed, RunHost
from culm.fleet.worker.executors.runtime_events import EventSender
from culm.permission.admission import DECLINED
from culm.run.limits import UsageEstimate
from culm.tools.agent_requests import AgentRequest, ReserveBudget, ReservedBudget
from culm.tools.base import CallRequest, CallResult, QuestionPlan, Watch
from culm.wire.asks import Question, QuestionRequest, QuestionResponse
from culm.wire.runs import Used

T = TypeVar("T")


class _Done(Struct):
    """The result of an errand."""

    content: str
    is_error: bool = False
    metadata: str = ""


class _Asked(Struct):
    """Without a request nobody answered, and `declined` says so."""

    request: QuestionRequest | None = None
    responses: list[QuestionResponse] = field(default_factory=list[QuestionResponse])
    declined: str = ""


class _Questions(Struct, frozen=True, tag_field="op", tag="question"):
    tool_call_id: str
    questions: Sequence[Question]
    confirm_title: str
    confirm_description: str


async def _call(host: RunHost, asked: Struct, kind: type[T], tool_call_id: str = "") -> T:
    """Raises `CallFailed`, `RunOver`."""
    reply = await host.call(msgspec.to_builtins(asked), tool_call_id)
    try:
        return msgspec.convert(reply, kind)
    except msgspec.ValidationError as exc:
        raise HostCallFailed("the host's answer cannot be read") from exc


@dataclass(frozen=True, slots=True)
class HostDelegation:
    """Implements `tools.office.Office`."""

    host: RunHost

    async def do(self, call: CallRequest, request: AgentRequest, watch: Watch) -> CallResult:
        try:
            done = await _call(self.host, request, _Done, call.id)
        except HostCallFailed as exc:
            return CallResult(f"{call.name}: {exc}", is_error=True)
        return CallResult(done.content, done.is_error, done.metadata)


@dataclass(frozen=True, slots=True)
class HostMeter:
    """Implements `loop.Meter`."""

    host: RunHost
    events: EventSender

    async def reserve(self, estimate: UsageEstimate) -> str:
        """Raises `BudgetReached` with the host's words, and `ModelFailed` if it has none."""
        try:
            reserved = await _call(
                self.host, ReserveBudget(estimate.tokens, estimate.cost), ReservedBudget
            )
        except HostCallFailed as exc:
            raise ModelFailed("Budget not known", f"nothing could be set aside: {exc}") from exc
        if not reserved.id:
            raise BudgetReached(reserved.refused or "There is nothing left to use.")
        return reserved.id

    def settle(self, reservation: str, used: Used) -> None:
        """Told before anything else of the answer that was paid for by it."""
        told = {"reservation": reservation, "used": used._asdict()}
        self.events.send_nowait({"type": "usage_reported", **told})

    def forfeit(self, reservation: str) -> None:
        self.events.send_nowait({"type": "reservation_forfeited", "reservation": reservation})


async def ask_people(host: RunHost, inquiry: QuestionPlan, call: CallRequest) -> CallResult:
    """Have the host ask; who declines to answer ends the turn, as in a run of the server."""
    asked = _Questions(
        call.id, inquiry.questions, inquiry.confirm_title, inquiry.confirm_description
    )
    try:
        answer = await _call(host, asked, _Asked, call.id)
    except HostCallFailed as exc:
        return CallResult(f"This cannot be asked: {exc}", is_error=True)
    if answer.request is None:
        return CallResult(answer.declined or DECLINED, is_error=True, ends_turn="end_turn")
    return inquiry.answer(answer.request, answer.responses)
