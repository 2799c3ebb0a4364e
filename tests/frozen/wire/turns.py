"""The runs of the story: a whole turn, a queue, cancels, summaries, a failure, a shutdown.

Every answer of the model stops where a step of the story needs it, so that concurrent events are
published in one order.
"""

from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from msgspec.structs import replace

from culm.events.hub import COALESCE_S
from culm.ids import SessionId
from culm.model.base import ToolSpec
from culm.run.limits import JITTER, RETRY_DELAYS_S
from culm.testing.script import Reply, ReplyRule, Script, ScriptedCall, ScriptedUsage
from culm.tools.base import (
    CallPlan,
    CallRequest,
    CallResult,
    QuestionPlan,
    ResolvedAction,
    Tool,
    Watch,
    free_plan,
)
from culm.tools.question import QuestionTool, make_question
from culm.wire.codec import Json
from culm.wire.runs import CrashPolicy
from tests.flow.drive import UNKNOWN, Answer, until
from tests.frozen.wire.story import TITLE, A, R, S, Story, W

USAGE = ScriptedUsage(input=900, output=12, cache_read=800)
NAMED = Reply(text="A flaky test", hold_after=0, usage=ScriptedUsage(input=50, output=4))
SCRIPT = Script(rules=[ReplyRule(TITLE.decode(), NAMED)])
# Jitter makes a delay longer, so time advances by its maximum.
RETRY_S, RETRY_S_MAX = RETRY_DELAYS_S[0], RETRY_DELAYS_S[0] * (1 + JITTER)
QUESTIONS: list[Json] = [
    {
        "type": "single_choice",
        "label": "DB",
        "question": "Which database?",
        "description": "Pick one.",
        "choices": [
            {"id": "pg", "label": "PostgreSQL"},
            {"label": "SQLite", "description": "embedded"},
        ],
    },
    {"type": "yes_no", "question": "Add migrations?", "description": "Creates a folder."},
    {"type": "free_text", "question": "Anything else?", "description": "Or nothing."},
]
SHOT = {"file_path": "shot.png", "file_name": "shot.png", "mime_type": "image/png"}


@dataclass(frozen=True)
class FixedTool:
    """A tool that always does the same with any arguments.

    Calls have no arguments where possible: the number of their pieces is random.
    """

    name: str
    result: CallResult
    to: str = ""  # A target that needs permission; empty: none.
    parallel: bool = False
    crash: CrashPolicy = "again"

    @property
    def spec(self) -> ToolSpec:
        return ToolSpec(self.name, "For the story.", {"type": "object"})

    async def prepare(self, call: CallRequest) -> CallPlan:
        if not self.to:
            return free_plan(call, self.run)
        action = ResolvedAction(
            tool=self.name,
            name="execute",
            description=f"Deploy to {self.to}",
            path="/srv",
            params={"to": self.to},
            resolved={"to": self.to},
            coverage=(f"deploy:{self.to}",),
            why="it leaves the workspace",
        )
        return CallPlan(action, self.run)

    async def run(self, watch: Watch) -> CallResult:
        if self.to:
            watch("50 %\n")
            watch("Ä 100 %\n")
        return self.result


@dataclass(frozen=True)
class FixedQuestions:
    """The real question tool, always with the same questions."""

    real: QuestionTool = field(default_factory=make_question)
    parallel: bool = False
    crash: CrashPolicy = "again"

    @property
    def spec(self) -> ToolSpec:
        return self.real.spec

    async def prepare(self, call: CallRequest) -> QuestionPlan | CallResult:
        return await self.real.prepare(replace(call, arguments={"questions": QUESTIONS}))


TOOLS: dict[str, Tool] = {
    tool.spec.name: tool
    for tool in (
        FixedTool("bash", CallResult("1 failed", is_error=True, metadata='{"output":"1 failed"}')),
        FixedTool("view", CallResult("package main\n")),
        FixedTool("stage", CallResult("Deployed."), to="staging", parallel=True),
        FixedTool("deploy", CallResult("Deployed."), to="production", parallel=True),
        FixedQuestions(),
    )
}


async def prompt(
    story: Story, session_id: str, text: str, run: int | None = None, **more: object
) -> Answer:
    """Post a prompt; `run` is the index of the run id that the client gives."""
    body: dict[str, object] = {"session_id": session_id, "prompt": text, **more}
    if run is not None:
        body["run_id"] = story.run_ids[run]
    return await story.ask("POST", f"{W}/agent", body)


async def take_a_turn(story: Story, session_id: SessionId) -> None:
    """Run a turn with a retry, reasoning, calls and their results, text, and a title."""
    model, clock = story.model, story.clock
    for reply in (
        Reply(deltas=["A first try"], cut_after=1),
        Reply(
            reasoning="Hmm.",
            calls=[ScriptedCall(name="bash", id="call_1", input="")],
            hold_after=1,
            usage=USAGE,
        ),
        Reply(
            deltas=["Let me look. 🙂"],
            calls=[ScriptedCall(name="view", id="call_2", input={"n": 1})],
            hold_after=2,
            usage=USAGE,
        ),
        Reply(deltas=["It fails", " in one place."], hold_after=1, usage=USAGE),
    ):
        model.add(reply)
    attachments = [{**SHOT, "content": "iVBORw0KGgo="}]
    text = "What fails here? “Ärger” 🙂 <b>&</b>"
    clock.delays.clear()  # Other timers may have the delay of a retry.
    await prompt(story, session_id, text, attachments=attachments, limits={"steps": 50})
    await story.question()
    await story.received(b"A first try")
    await until(lambda: any(RETRY_S <= delay_s <= RETRY_S_MAX for delay_s in clock.delays))
    await story.settle()
    clock.advance(RETRY_S_MAX)
    for marker in (b"Hmm.", b'"kind":"input"'):
        asked = await story.question()
        await story.received(marker)
        clock.advance(COALESCE_S)
        await story.settle()
        model.release(asked)
    asked = await story.question()
    await story.received(b"It fails")
    clock.advance(COALESCE_S)
    async with AsyncExitStack() as exits:
        raw = await story.attach(exits, 2, "delta", types="message_snapshot,message_delta")
        model.release(asked)
        await raw.until(b"in one place")
        await story.idle(session_id)
    await story.gone(2)
    model.release(await story.title())
    await story.received(b'"title":"A flaky test"')
    await story.tick()


async def use_the_queue(story: Story, session_id: SessionId) -> None:
    """Queue runs behind an active one; edit, fold and drop them."""
    model, runs = story.model, story.run_ids
    call = ScriptedCall(name="bash", id="call_3", input="")
    model.add(Reply(deltas=["Let me see."], calls=[call], hold_after=0, usage=USAGE))
    model.add(Reply(deltas=["Two files."], usage=USAGE))
    model.add(Reply(hold_after=0, deltas=["Never said"]))
    await prompt(story, session_id, "List the files.", 0)
    asked = await story.question()
    await prompt(story, session_id, "Then test.", 1)
    await prompt(story, session_id, "Then commit.", 2)
    await prompt(story, session_id, "Then test.", 1)
    await prompt(story, session_id, "Then rest.", 1)
    await prompt(story, session_id, " ")
    await prompt(story, UNKNOWN, "hi")
    await story.ask("GET", f"{W}/agent")
    await story.ask("GET", A, session_id=session_id)
    for path in ("prompts/queued", "prompts/list", "queue"):
        await story.ask("GET", f"{A}/{path}", session_id=session_id)
    edited = {"prompt": "Then run all tests."}
    for run_id in (runs[1], runs[0], UNKNOWN):
        await story.ask("PUT", R, edited, run_id=run_id)
    for order in ([runs[2], runs[1]], [runs[1]]):
        await story.ask("PUT", f"{A}/queue", {"run_ids": order}, session_id=session_id)
    for run_id in (runs[2], runs[0]):
        await story.ask("POST", f"{R}/drop", run_id=run_id)
    await story.ask("POST", f"{A}/steer", {"prompt": "Only in Go."}, session_id=session_id)
    for path in ("summarize", "compact"):
        await story.ask("POST", f"{A}/{path}", session_id=session_id)
    await story.ask("DELETE", S, session_id=session_id)
    await story.tick()
    model.release(asked)
    await story.question()
    await story.question()  # The next run has begun.
    await story.settle()
    await prompt(story, session_id, "And then?", 3)
    await story.ask("POST", f"{A}/prompts/clear", session_id=session_id)
    await story.ask("POST", f"{A}/cancel", session_id=session_id)
    await story.idle(session_id)
    await story.ask("POST", f"{A}/cancel", session_id=session_id)
    await story.ask("POST", f"{A}/steer", {"prompt": "Too late."}, session_id=session_id)
    await story.tick()


async def end_runs(story: Story, session_id: SessionId, empty_id: SessionId) -> None:
    """Cancel a run by its id, let one fail, and summarize."""
    model, runs = story.model, story.run_ids
    model.add(Reply(deltas=["I am at"], hold_after=1))
    await prompt(story, session_id, "Count to a million.", 4)
    await story.question()
    await story.received(b"I am at")
    await story.tick()
    for run_id in (runs[4], runs[4], UNKNOWN):
        await story.ask("POST", f"{R}/cancel", run_id=run_id)
    await story.tick()
    model.add(Reply(status=401))
    await prompt(story, session_id, "Try without a key.", 5)
    await story.question()
    await story.idle(session_id)
    await story.tick()
    model.add(Reply(deltas=["They look for a flaky test."], usage=USAGE))
    await story.ask("POST", f"{A}/summarize", session_id=session_id)
    await story.question()
    await story.tick()
    model.add(Reply(deltas=["They look in vain"], hold_after=1))
    await story.ask("POST", f"{A}/compact", session_id=session_id)
    await story.question()
    await story.received(b"in vain")
    await story.ask("POST", f"{A}/cancel", session_id=session_id)
    await story.idle(session_id)
    for path in ("summarize", "compact"):
        await story.ask("POST", f"{A}/{path}", session_id=empty_id)
    await story.tick()
    await story.ask("GET", f"{W}/runs")
    await story.ask("GET", f"{W}/runs", query={"session": session_id, "state": "active"})
    for run_id in (runs[0], UNKNOWN):
        await story.ask("GET", R, run_id=run_id)


async def leave_runs_behind(story: Story, session_id: SessionId) -> None:
    """Leave one active and two queued runs when the workspace closes."""
    story.model.add(Reply(deltas=["Cut off in the"], hold_after=1))
    await prompt(story, session_id, "Take your time.", 6)
    await story.question()
    await story.received(b"Cut off in the")
    await prompt(story, session_id, "And say it again.", 7)
    await prompt(story, session_id, "And again.", 8)
    await story.settle()


async def find_runs_again(story: Story, session_id: SessionId) -> None:
    """Find held runs: new runs pass them, and a client starts or drops them."""
    model, runs = story.model, story.run_ids
    await story.ask("GET", f"{W}/runs", query={"state": "held"})
    await story.ask("GET", f"{W}/snapshot")
    model.add(Reply(deltas=["I was first."], hold_after=0, usage=USAGE))
    model.add(Reply(deltas=["I was interrupted."], usage=USAGE))
    await prompt(story, session_id, "Is anybody there?", 9)
    asked = await story.question()
    for _ in range(2):
        await story.ask("POST", f"{R}/start", run_id=runs[7])
    for _ in range(2):
        await story.ask("POST", f"{R}/drop", run_id=runs[8])
    model.release(asked)
    await story.question()
    await story.idle(session_id)
    await story.tick()
