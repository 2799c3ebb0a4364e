"""Helpers for tests of asks: received requests, answers, and tools that ask."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from culm.client.stream import ServerEvent
from culm.settings import Settings
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, ReplyRule, Script, ScriptedCall
from culm.tools.base import CallPlan, CallRequest, CallResult, QuestionPlan
from culm.tools.question import make_question
from culm.wire.asks import (
    Ask,
    Grant,
    PermissionNotification,
    PermissionRequest,
    QuestionRequest,
    Resolved,
)
from culm.wire.codec import Json, decode
from tests.flow.probes import Probe, WaitableClock, calling
from tests.flow.runs import Harness, ReceivedEvents, open_harness
from tests.support import model_config

# --- received requests


async def request_in(received: ReceivedEvents, number: int = 1) -> PermissionRequest:
    """Wait for the n-th permission request that a client receives."""
    return (await _shown(received, number, "permission_request")).read(PermissionRequest)


async def batch_in(received: ReceivedEvents, number: int = 1) -> QuestionRequest:
    return (await _shown(received, number, "question_batch_request")).read(QuestionRequest)


async def _shown(received: ReceivedEvents, number: int, type_: str) -> ServerEvent:
    def is_it(event: ServerEvent) -> bool:
        return [e for e in received.events if e.type == type_][number - 1 : number] == [event]

    return await received.until(is_it)


def requests(received: ReceivedEvents) -> list[str]:
    return [request.id for request in received.all("permission_request", PermissionRequest)]


def batches(received: ReceivedEvents) -> list[str]:
    return [batch.id for batch in received.all("question_batch_request", QuestionRequest)]


def notified(received: ReceivedEvents) -> list[PermissionNotification]:
    return received.all("permission_notification", PermissionNotification)


def waits(request: PermissionRequest) -> PermissionNotification:
    return PermissionNotification(request.tool_call_id, session_id=request.session_id)


def granted(request: PermissionRequest) -> PermissionNotification:
    return msgspec.structs.replace(waits(request), granted=True)


def denied(request: PermissionRequest) -> PermissionNotification:
    return msgspec.structs.replace(waits(request), denied=True)


# --- answers


async def answer(harness: Harness, ask_id: str, action: str, **more: object) -> bool:
    """Answer a request; `more` is sent beside the id."""
    body = {"permission": {"id": ask_id, **more}, "action": action}
    return await resolved(harness, "/permissions/grant", body)


async def resolved(harness: Harness, path: str, body: Mapping[str, object]) -> bool:
    found = await harness.request("POST", path, body)
    assert found.status == 200, found
    return decode(found.body, Resolved).resolved


async def answer_batch(harness: Harness, batch_id: str, *responses: Mapping[str, object]) -> bool:
    body = {"batch_request_id": batch_id, "responses": responses}
    return await resolved(harness, "/questions/answer", body)


async def cancel_batch(harness: Harness, batch_id: str = "") -> bool:
    return await resolved(harness, "/questions/cancel", {"batch_request_id": batch_id})


# --- queries


async def asks(harness: Harness, state: str = "open") -> dict[str, str]:
    """State of each ask by id, latest first."""
    found = await harness.ask(f"/permissions/asks?state={state}", list[Ask[PermissionRequest]])
    return {ask.request.id: ask.state for ask in found}


async def questions(harness: Harness, state: str = "open") -> dict[str, str]:
    found = await harness.ask(f"/questions?state={state}", list[Ask[QuestionRequest]])
    return {ask.request.id: ask.state for ask in found}


async def grants(harness: Harness) -> list[Grant]:
    return await harness.ask("/permissions/grants", list[Grant])


# --- tools and models


@dataclass(eq=False)
class ChangingProbe(Probe):
    """A tool whose action depends on outside state."""

    asks: bool = True
    world: Json = 1

    async def prepare(self, call: CallRequest) -> CallPlan:
        plan = await super().prepare(call)
        shown: Json = {"world": self.world}
        return replace(plan, action=replace(plan.action, params=shown, resolved=self.world))


@dataclass(eq=False)
class QuestionProbe(Probe):
    """The real question tool, as a probe."""

    name: str = "question"

    async def prepare(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, call: CallRequest
    ) -> QuestionPlan | CallResult:
        return await make_question().prepare(call)


def asking(*texts: str) -> Reply:
    """A reply that asks the person all these questions with one call."""
    batch = [{"question": text, "description": "Why.", "type": "free_text"} for text in texts]
    return calling("question", questions=batch)


def when(text: str, reply: Reply) -> ReplyRule:
    """Reply once to a conversation that contains this text."""
    return ReplyRule(when=text, reply=reply, times=1)


def call(name: str, **inputs: Json) -> ScriptedCall:
    return ScriptedCall(name=name, input=inputs)


@asynccontextmanager
async def open_asking(
    folder: Path,
    play: Script,
    *tools: Probe,
    settings: Settings | None = None,
    clock: WaitableClock | None = None,
    config: Mapping[str, object] | None = None,
) -> AsyncGenerator[Harness]:
    """A harness with tools that ask; `config` is merged with the configuration of the model."""
    async with (
        open_model_server(play) as model,
        open_harness(
            folder, "unix", model, tools=tools, settings=settings, clock=clock,
            config=model_config(model.url) | dict(config or {}),
        ) as harness,
    ):  # fmt: skip
        yield harness
