"""Permissions and questions of the story, with every kind of answer."""

from contextlib import AsyncExitStack

from culm.ids import SessionId
from culm.testing.script import Reply, ScriptedCall
from culm.wire.asks import Grant, PermissionRequest, QuestionRequest
from culm.wire.codec import decode
from tests.flow.drive import UNKNOWN
from tests.frozen.wire.story import Story, W
from tests.frozen.wire.turns import USAGE, prompt

ASKS = (
    "ask_changed,question_changed,skip_changed,permission_request,permission_notification,"
    "question_batch_request"
)


def calling(call_id: str, name: str) -> Reply:
    return Reply(calls=[ScriptedCall(name=name, id=call_id, input="")], usage=USAGE)


async def ask_for_permission(story: Story, session_id: SessionId) -> None:
    """Allow for the session, use that grant, and deny after it is revoked."""
    model, grants = story.model, f"{W}/permissions/grants"
    for call_id in ("call_4", "call_5"):
        model.add(calling(call_id, "stage"))
    model.add(Reply(deltas=["Deployed twice."], usage=USAGE))
    await prompt(story, session_id, "Deploy to staging, twice.")
    await story.question()
    request = await shown_ask(story, "call_4")
    await story.tick()
    await story.ask("GET", f"{W}/permissions/asks")
    await story.ask("GET", f"{W}/runs", query={"state": "waiting"})
    async with AsyncExitStack() as exits:
        raw = await story.attach(exits, 2, "delta", types=ASKS)
        await raw.until(b"permission_request")
    await story.gone(2)
    await answer_ask(story, UNKNOWN, "allow")
    await answer_ask(story, request.id, "maybe")
    for client in (1, 0):  # The second is too late.
        await answer_ask(story, request.id, "allow_session", story.clients[client])
    for _ in range(2):
        await story.question()
    await story.idle(session_id)
    await story.tick()
    found = await story.ask("GET", grants)
    (grant,) = decode(found.body, list[Grant])
    for _ in range(2):
        await story.ask("DELETE", f"{grants}/{{grant_id}}", grant_id=grant.id)
    await story.ask("GET", grants)
    await story.tick()
    model.add(calling("call_6", "stage"))
    await prompt(story, session_id, "And once more.", 10)
    await story.question()
    again = await shown_ask(story, "call_6")
    await answer_ask(story, again.id, "deny")
    await story.idle(session_id)
    await story.tick()
    await story.ask("GET", f"{W}/permissions/asks", query={"state": "all", "session": session_id})


async def ask_questions(story: Story, session_id: SessionId) -> None:
    """Answer some questions, and decline others."""
    model = story.model
    model.add(calling("call_7", "question"))
    model.add(Reply(deltas=["PostgreSQL it is."], usage=USAGE))
    await prompt(story, session_id, "Ask me what you must know.")
    await story.question()
    batch = await _batch(story, "call_7")
    await story.tick()
    await story.ask("GET", f"{W}/questions")
    which, migrations, _ = (question.id for question in batch.questions)
    responses = [
        {"request_id": which, "selected_ids": ["pg"], "notes": {"pg": "v16 please"}},
        {"request_id": migrations, "yes": True},
    ]
    for answers in ([{"request_id": UNKNOWN, "yes": True}], responses, responses):
        body = {"batch_request_id": "", "responses": answers}
        await story.ask("POST", f"{W}/questions/answer", body)
    await story.question()
    await story.idle(session_id)
    await story.tick()
    model.add(calling("call_8", "question"))
    await prompt(story, session_id, "And now?")
    await story.question()
    await _batch(story, "call_8")
    await story.tick()
    for _ in range(2):
        await story.ask("POST", f"{W}/questions/cancel")
    await story.idle(session_id)
    await story.tick()
    await story.ask("GET", f"{W}/questions", query={"state": "all"})


async def stop_asking(story: Story, session_id: SessionId) -> None:
    """Answer two asks that are open at once; then skip permissions."""
    model, skip = story.model, f"{W}/permissions/skip"
    calls = (("call_9", "stage"), ("call_10", "deploy"))
    both = [ScriptedCall(name=name, id=call_id, input="") for call_id, name in calls]
    model.add(Reply(calls=both, usage=USAGE))
    await prompt(story, session_id, "Deploy to both.", 11, interactive=True)
    await story.question()
    first = await shown_ask(story, "call_9")
    second = await shown_ask(story, "call_10", "deploy")
    await story.tick()
    await answer_ask(story, first.id, "allow_workspace")
    await story.received(b'"tool_call_id":"call_9","name":"stage","content"')
    await story.settle()
    await answer_ask(story, second.id, "deny")
    await story.idle(session_id)
    await story.tick()
    await story.ask("GET", skip)
    on = {"skip": True, "session_id": session_id}
    await story.ask("POST", skip, on, {"client_id": story.clients[0]})
    await story.ask("POST", skip, {**on, "session_id": UNKNOWN})
    await story.ask("GET", skip, query={"session_id": session_id})
    await story.tick()
    model.add(calling("call_11", "deploy"))
    model.add(Reply(deltas=["Nobody was asked."], usage=USAGE))
    await prompt(story, session_id, "Deploy to production.")
    for _ in range(2):
        await story.question()
    await story.idle(session_id)
    await story.tick()
    for on_now in ({**on, "skip": False}, {"skip": True}):
        await story.ask("POST", skip, on_now)
    await story.ask("GET", skip)
    await story.tick()


async def answer_ask(story: Story, ask_id: str, action: str, client_id: str = "") -> None:
    """Answer like a Crush client, which sends the request back without its client id."""
    body = {"permission": {"id": ask_id, "tool_name": "bash", "params": None}, "action": action}
    query = {"client_id": client_id} if client_id else None
    await story.ask("POST", f"{W}/permissions/grant", body, query)


async def shown_ask(story: Story, call_id: str, name: str = "stage") -> PermissionRequest:
    """Wait until our own client has the permission request of a call."""
    await story.received(f'"tool_call_id":"{call_id}","tool_name":"{name}","description"'.encode())
    events = [one for one in story.streams[0].raw.events() if one.type == "permission_request"]
    asked = [one.read(PermissionRequest) for one in events]
    return next(request for request in asked if request.tool_call_id == call_id)


async def _batch(story: Story, call_id: str) -> QuestionRequest:
    await story.received(f'"tool_call_id":"{call_id}","questions"'.encode())
    events = [one for one in story.streams[0].raw.events() if one.type == "question_batch_request"]
    return events[-1].read(QuestionRequest)
