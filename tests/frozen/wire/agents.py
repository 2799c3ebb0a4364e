"""The agents of the story: started by a client or an agent, steered, stopped, written to.

Their workers are scripted in this process: each begins, and ends with its next frame. Everything
else is real: their sessions, runs, budgets and mail.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from culm.fleet.protocol.frames import (
    ApprovalReply,
    ApprovalRequest,
    Cancel,
    ChildFrame,
    EventFrame,
    ParentFrame,
    RunSpec,
    SteerFrame,
    SubAgentReply,
    SubAgentRequest,
    TerminalFrame,
    encode_frame,
    parse_parent_frame,
)
from culm.fleet.provision import Provision
from culm.fleet.transport.base import Link
from culm.ids import MessageId, SessionId
from culm.testing.script import Reply, ScriptedCall
from culm.wire.agents import Agent, LetterShown
from culm.wire.codec import Json, decode, encode
from culm.wire.messages import Finish, FinishPart, Part, Text, TextPart
from culm.wire.messages import Message as Answer
from tests.fleet.host_harness import FakeLauncher, FakeWorker, raw
from tests.flow.drive import UNKNOWN
from tests.frozen.wire.asking import answer_ask, shown_ask
from tests.frozen.wire.story import S, Story, W
from tests.frozen.wire.turns import USAGE, prompt

AGENTS, MAIL = f"{W}/agents", f"{W}/mail"
AGENT = f"{AGENTS}/{{agent_id}}"
LETTER = f"{MAIL}/letters/{{letter_id}}"
ASK: dict[str, Json] = {
    "tool_call_id": "call_13",
    "tool_name": "bash",
    "permission": "execute",
    "question": "Run make deploy",
    "path": "/srv",
    "params": {
        "description": "Deploy it",
        "command": "make deploy",
        "working_dir": "/srv",
        "run_in_background": False,
        "auto_background_after": 60,
    },
    "grains": ["bash:make deploy"],
    "why": "no rule allows it",
}
USED: dict[str, Json] = {"prompt_tokens": 40, "completion_tokens": 5, "cost": 0.25}


# --- workers


class ScriptedLauncher(FakeLauncher):
    """Implements `Launcher` with workers that are `ScriptedRun`s."""

    async def launch(self, provision: Provision) -> FakeWorker:
        self.scripts = [_work]
        return await super().launch(provision)


async def _work(worker: FakeWorker, link: Link) -> None:
    run = ScriptedRun()
    while (data := await link.receive()) is not None:
        for frame in run.on_frame(parse_parent_frame(data)):
            await link.send(encode_frame(frame))


@dataclass(slots=True)
class ScriptedRun:
    """One run of a worker. It ends at once for a letter; else it waits for another frame."""

    assignment: str = ""
    reservation: Json = ""

    def on_frame(self, frame: ParentFrame) -> Sequence[ChildFrame]:
        match frame:
            case RunSpec(assignment=assignment):
                self.assignment = assignment
                wanted: dict[str, Json] = {"op": "reserve", "tokens": 100, "cost": 0.5}
                begun = (_event("execution_started"), _event("token", content=_begun(assignment)))
                # The run of a letter has only its answer, no other events.
                shown = () if self.is_letter else begun
                return (*shown, SubAgentRequest("1", "", raw(wanted)))
            case SubAgentReply(result=answer):
                self.reservation = answer["result"]["id"]
                if "Deploy" in self.assignment:
                    return (ApprovalRequest("2", raw(ASK)),)
                return self._end() if self.is_letter else ()
            case SteerFrame(id=run_id):
                admitted = _event("message_admitted", id=run_id)
                return (
                    self._pay(),
                    _answer("one", _begun(self.assignment)),
                    admitted,
                    _answer("two"),
                    *_DONE,
                )
            case ApprovalReply():
                return self._end()
            case Cancel():
                return (TerminalFrame("cancelled"),)
            case _:
                return ()

    @property
    def is_letter(self) -> bool:
        return self.assignment.startswith("[Letter")

    def _pay(self) -> ChildFrame:
        return _event("usage_reported", reservation=self.reservation, used=USED)

    def _end(self) -> Sequence[ChildFrame]:
        return (self._pay(), *_DONE)


def _begun(assignment: str) -> str:
    """Return the first text of an agent, which shows that it has begun."""
    return f"I begin: {assignment}"


def _event(kind: str, **more: Json) -> EventFrame:
    return EventFrame(raw({"type": kind, **more}))


def _answer(name: str, text: str = "") -> EventFrame:
    """Return an answer that begins, or that is complete if there is a text."""
    parts: list[Part] = [TextPart(Text(text)), FinishPart(Finish("end_turn", 0))] if text else []
    message = Answer(MessageId(name), "assistant", SessionId(""), parts)
    return _event("session_message_written", message=msgspec.to_builtins(message))


_DONE = (TerminalFrame("completed", "Done."),)


# --- steps


async def start_agents(story: Story) -> None:
    """Start agents by a client: one is steered, and one is stopped."""
    for wrong in ({"prompt": " "}, {"prompt": "Look.", "role": "wizard"}):
        await story.ask("POST", AGENTS, wrong)
    named = {"name": "Counter", "role": "explorer", "limits": {"steps": 9, "cost": 1.5}}
    counter = await _start(story, "Count the files.", **named)
    await story.ask("GET", AGENTS)
    for agent_id in (counter.agent_id, UNKNOWN):
        await story.ask("GET", AGENT, agent_id=agent_id)
    await story.ask("GET", f"{W}/processes")
    await story.ask("GET", f"{W}/snapshot")
    for budget in ({"steps": 20}, {"steps": -1}):
        await story.ask("POST", f"{AGENT}/budget", budget, agent_id=counter.agent_id)
    for text in (" ", "Only those in Go."):
        await story.ask("POST", f"{AGENT}/message", {"text": text}, agent_id=counter.agent_id)
    await story.idle(counter.session_id)
    await story.tick()
    waiter = await _start(story, "Wait for me.")
    for agent_id in (waiter.agent_id, waiter.agent_id, UNKNOWN):
        await story.ask("POST", f"{AGENT}/cancel", agent_id=agent_id)
    await story.tick()
    await story.ask("DELETE", S, session_id=waiter.session_id)
    await story.tick()


async def _start(story: Story, assignment: str, **more: object) -> Agent:
    """Start an agent and wait until its start is published."""
    started = await story.ask("POST", AGENTS, {"prompt": assignment, **more})
    await story.received(_begun(assignment).encode())
    await story.tick()
    return decode(started.body, Agent)


async def hand_work_on(story: Story, session_id: SessionId) -> None:
    """Let an agent delegate: its sub-agent works, and asks through its parent."""
    assignment: dict[str, Json] = {"prompt": "Deploy it.", "name": "Deployer", "role": "worker"}
    arguments: dict[str, Json] = {"assignments": [assignment]}
    call = ScriptedCall(name="agent", id="call_12", input=arguments)
    story.model.add(Reply(calls=[call], usage=USAGE))
    story.model.add(Reply(deltas=["It is deployed."], usage=USAGE))
    await prompt(story, session_id, "Have it deployed.")
    await story.question()
    request = await shown_ask(story, "call_13", "bash")
    await story.tick()
    await story.ask("GET", f"{W}/permissions/asks")
    await story.ask("GET", AGENTS, query={"below": session_id})
    await answer_ask(story, request.id, "allow")
    await story.question()
    await story.idle(session_id)
    await story.tick()
    await story.ask("GET", AGENTS, query={"below": session_id})


async def write_letters(story: Story, session_id: SessionId) -> None:
    """Send letters: one is answered by the agent that it wakes, another by a person."""
    agents = decode((await story.ask("GET", AGENTS)).body, list[Agent])
    counter = agents[0]
    letter: dict[str, Json] = {"to": counter.agent_id, "from": session_id}
    for wrong in ({**letter, "to": UNKNOWN}, {**letter, "to": "../x"}):
        await story.ask("POST", MAIL, wrong)
    letters: list[LetterShown] = []
    for kind, text in (("ask", "How many?"), ("task", "Count again.")):
        story.model.add(Reply(deltas=["Good to know."], usage=USAGE))
        sent = await story.ask("POST", MAIL, {**letter, "kind": kind, "text": text})
        letters.append(decode(sent.body, LetterShown))
        if kind == "task":
            await story.received(_admitted(letters[-1]))
            await story.idle(counter.session_id)
            reply = {"text": "Three.", "from": counter.agent_id}
            letter_id = letters[-1].letter_id
            await story.ask("POST", f"{LETTER}/reply", reply, letter_id=letter_id)
        await story.question()
        await story.idle(session_id)
        await story.tick()
    await story.ask("POST", f"{LETTER}/reply", {"text": "Three."}, letter_id=UNKNOWN)
    for letter_id in (letters[0].letter_id, UNKNOWN):
        await story.ask("GET", LETTER, letter_id=letter_id)
    await story.ask("GET", MAIL)
    await story.ask("GET", MAIL, query={"agent": UNKNOWN})
    await story.ask("POST", f"{MAIL}/ring", {"agent": counter.agent_id})
    for path in (story.folder, "/nowhere"):
        await story.ask("POST", "/v1/mail/ring", {"path": path})
    await story.tick()


def _admitted(letter: LetterShown) -> bytes:
    """Return the event that shows that an agent has read a letter."""
    read = msgspec.structs.replace(letter, state="admitted")
    return encode(read).partition(b',"correlation_id"')[0]
