"""What tests of asks share: what a client is shown, what it answers, and tools that ask."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from culm.client.stream import ServerEvent
from culm.settings import Settings
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, Rule, Script, ScriptedCall
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
from tests.flow.probes import Probe, Wound, calling
from tests.flow.runs import Heard, Stage, open_stage
from tests.support import model_config

# --- being shown


async def request_in(heard: Heard, number: int = 1) -> PermissionRequest:
    """The permission request a client is shown as its first, or as a later one."""
    return (await _shown(heard, number, "permission_request")).read(PermissionRequest)


async def batch_in(heard: Heard, number: int = 1) -> QuestionRequest:
    return (await _shown(heard, number, "question_batch_request")).read(QuestionRequest)


async def _shown(heard: Heard, number: int, type_: str) -> ServerEvent:
    def is_it(told: ServerEvent) -> bool:
        return [one for one in heard.told if one.type == type_][number - 1 : number] == [told]

    return await heard.until(is_it)


def requests(heard: Heard) -> list[str]:
    return [request.id for request in heard.all("permission_request", PermissionRequest)]


def batches(heard: Heard) -> list[str]:
    return [batch.id for batch in heard.all("question_batch_request", QuestionRequest)]


def notified(heard: Heard) -> list[PermissionNotification]:
    return heard.all("permission_notification", PermissionNotification)


def waits(request: PermissionRequest) -> PermissionNotification:
    return PermissionNotification(request.tool_call_id, session_id=request.session_id)


def granted(request: PermissionRequest) -> PermissionNotification:
    return msgspec.structs.replace(waits(request), granted=True)


def denied(request: PermissionRequest) -> PermissionNotification:
    return msgspec.structs.replace(waits(request), denied=True)


# --- answering


async def answer(stage: Stage, ask_id: str, action: str, **more: object) -> bool:
    """Answer a request; `more` is said beside the id."""
    body = {"permission": {"id": ask_id, **more}, "action": action}
    return await resolved(stage, "/permissions/grant", body)


async def resolved(stage: Stage, path: str, body: Mapping[str, object]) -> bool:
    found = await stage.request("POST", path, body)
    assert found.status == 200, found
    return decode(found.body, Resolved).resolved


async def answer_batch(stage: Stage, batch_id: str, *responses: Mapping[str, object]) -> bool:
    body = {"batch_request_id": batch_id, "responses": responses}
    return await resolved(stage, "/questions/answer", body)


async def cancel_batch(stage: Stage, batch_id: str = "") -> bool:
    return await resolved(stage, "/questions/cancel", {"batch_request_id": batch_id})


# --- looking


async def asks(stage: Stage, state: str = "open") -> dict[str, str]:
    """What was asked, the latest first: id and state."""
    found = await stage.ask(f"/permissions/asks?state={state}", list[Ask[PermissionRequest]])
    return {ask.request.id: ask.state for ask in found}


async def questions(stage: Stage, state: str = "open") -> dict[str, str]:
    found = await stage.ask(f"/questions?state={state}", list[Ask[QuestionRequest]])
    return {ask.request.id: ask.state for ask in found}


async def grants(stage: Stage) -> list[Grant]:
    return await stage.ask("/permissions/grants", list[Grant])


# --- tools and models


@dataclass(eq=False)
class Shifting(Probe):
    """What it would do depends on something outside."""

    asks: bool = True
    world: Json = 1

    async def prepare(self, call: CallRequest) -> CallPlan:
        plan = await super().prepare(call)
        shown: Json = {"world": self.world}
        return replace(plan, action=replace(plan.action, params=shown, resolved=self.world))


@dataclass(eq=False)
class Questioning(Probe):
    """The real one, among probes."""

    name: str = "question"

    async def prepare(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, call: CallRequest
    ) -> QuestionPlan | CallResult:
        return await make_question().prepare(call)


def asking(*words: str) -> Reply:
    """An answer that asks the person all of these with one call."""
    batch = [{"question": word, "description": "Why.", "type": "free_text"} for word in words]
    return calling("question", questions=batch)


def when(word: str, reply: Reply) -> Rule:
    """What a model answers once to a conversation in which the word occurs."""
    return Rule(when=word, reply=reply, times=1)


def call(name: str, **inputs: Json) -> ScriptedCall:
    return ScriptedCall(name=name, input=inputs)


@asynccontextmanager
async def open_asking(
    folder: Path,
    play: Script,
    *tools: Probe,
    settings: Settings | None = None,
    clock: Wound | None = None,
    config: Mapping[str, object] | None = None,
) -> AsyncGenerator[Stage]:
    """A stage with tools that ask; `config` beside what the model needs."""
    async with (
        open_model_server(play) as model,
        open_stage(
            folder, "unix", model, tools=tools, settings=settings, clock=clock,
            config=model_config(model.url) | dict(config or {}),
        ) as stage,
    ):  # fmt: skip
        yield stage
