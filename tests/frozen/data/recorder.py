"""Record a data directory: one server brings a project into every state that it can store.

Run it only to record the directory of a new version beside the old ones; a recorded directory
never changes. Everything is real except the model, the clock and the processes of workers.
"""

import asyncio
import json
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from culm import __version__
from culm.assemble import open_server
from culm.ids import Ids, SessionId
from culm.settings import Settings
from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Reply, ReplyRule, Script, ScriptedCall
from culm.wire import messages as parts
from culm.wire.agents import Agent, LetterShown
from culm.wire.codec import Json, decode
from tests.flow.agents_harness import PRICES, AgentHarness, HybridClock, open_launcher, priced
from tests.flow.asking import answer, answer_batch, batch_in, cancel_batch, request_in
from tests.flow.conftest import FlowServer
from tests.flow.drive import until
from tests.flow.mail_harness import deliver, letter, post_of, until_state
from tests.flow.runs import open_received
from tests.frozen.comparing import as_text
from tests.frozen.data.directories import (
    EXPECTED,
    HERE,
    OUTSIDE,
    count_recorded,
    expected_of,
    read_mail,
    read_recorded,
    recorded,
    restore,
)
from tests.frozen.data.tree import write_tree
from tests.frozen.storage import Json as Answer
from tests.support import WAIT_S, model_config, serve_options

LONG = "All work and no play makes a long answer. " * 250  # Too long to be stored in its row.
PICTURE = {"file_path": "shot.png", "file_name": "shot.png", "mime_type": "image/png"}
QUESTIONS: list[Json] = [
    {
        "type": "single_choice",
        "label": "DB",
        "question": "Which database?",
        "description": "Pick one.",
        "choices": [{"id": "pg", "label": "PostgreSQL"}, {"id": "lite", "label": "SQLite"}],
    },
    {
        "type": "multi_choice",
        "question": "Which targets?",
        "description": "Pick some.",
        "choices": [{"id": "arm", "label": "Arm"}, {"id": "x86", "label": "x86"}],
    },
    {"type": "yes_no", "question": "Add migrations?", "description": "Creates a folder."},
    {"type": "free_text", "question": "Anything else?", "description": "Or nothing."},
]
TITLES = ReplyRule(when="Write a title", reply=Reply(text="A recorded title", usage=None))


def call(tool: str, text: str = "", /, call_id: str | None = None, **inputs: Json) -> Reply:
    return priced(Reply(text=text, calls=[ScriptedCall(name=tool, id=call_id, input=inputs)]))


def answer_text(text: str, **more: Json) -> Reply:
    return priced(Reply(text=text, **more))


def agent_rules() -> list[ReplyRule]:
    """The answers to agents; the rules of a parent also match the prompts of its children."""
    return [
        ReplyRule(
            "Lead the survey", call("agent", prompt="Survey the docs", name="Middle"), times=1
        ),
        ReplyRule("Lead the survey", answer_text("The survey is complete.")),
        ReplyRule("Survey the docs", call("agent", prompt="Count pages", name="Leaf"), times=1),
        ReplyRule("Survey the docs", answer_text("The docs are surveyed.")),
        ReplyRule("Count pages", answer_text("Twelve pages.")),
        ReplyRule("Watch the log", priced(Reply(text="Watching.", hold_after=0))),
        ReplyRule("Use no key", Reply(status=401)),
        ReplyRule("Spend little", call("ls", path=".")),
        ReplyRule("Fetch the page", call("fetch", url="http://127.0.0.1:9/agent", format="text")),
        ReplyRule("Work until the end", priced(Reply(deltas=["I have begun"], hold_after=1))),
        ReplyRule("How many pages?", answer_text("Twelve.")),
        ReplyRule("@held-letter", answer_text("Read.")),
    ]


class Recording:
    """One project on one server. Each step leaves other kinds of rows."""

    def __init__(self, harness: AgentHarness) -> None:
        self.harness = harness
        self.asked = 0  # Permission requests so far.
        self.batches = 0

    # --- requests

    async def session(self, title: str) -> SessionId:
        return (await self.harness.remote.create_session(title)).id

    async def post(self, path: str, body: dict[str, Json], status: int = 200) -> bytes:
        found = await self.harness.request("POST", path, body)
        assert found.status == status, found
        return found.body

    def plan(self, *replies: Reply) -> None:
        for reply in replies:
            self.harness.model.add(reply)

    async def run(self, session: str, prompt: str, *replies: Reply, **more: object) -> str:
        """Prompt and wait until the run has ended."""
        self.plan(*replies)
        run_id = await self.harness.prompt(prompt, session, **more)
        await self.harness.received.complete(run_id)
        self.harness.clock.advance(1)
        return run_id

    async def permission(self) -> str:
        self.asked += 1
        return (await request_in(self.harness.received, self.asked)).id

    async def allow(self, action: str) -> None:
        assert await answer(self.harness, await self.permission(), action)

    # --- steps

    async def configure(self) -> None:
        for scope, key, value in (
            (0, "options.context_paths", ["AGENTS.md"]),
            (0, "options.tui", {"diff_mode": "split"}),
            (1, "options.debug_lsp", True),
        ):
            await self.post("/config/set", {"scope": scope, "key": key, "value": value})
        key = {"scope": 0, "provider_id": "demo", "kind": "string", "api_key": "sk-recorded"}
        await self.post("/config/provider-key", key)

    async def work(self) -> SessionId:
        """One long turn with every kind of part, files, a plan of steps and a grant."""
        harness, session = self.harness, await self.session("New Session")
        steps: list[Json] = [
            {"content": "Look", "status": "completed"},
            {"content": "Write", "status": "in_progress", "active_form": "Writing"},
            {"content": "Test", "status": "pending"},
        ]
        self.plan(
            priced(
                Reply(
                    reasoning="A file is missing.",
                    text="I write it.",
                    calls=[
                        ScriptedCall(
                            name="write",
                            id="call_write",
                            input={"file_path": "main.go", "content": "package main\n"},
                        )
                    ],
                )
            ),
            call(
                "edit",
                call_id="call_edit",
                file_path="main.go",
                old_string="main\n",
                new_string="main\n\nfunc main() {}\n",
            ),
            call("view", call_id="call_view", file_path="main.go"),
            call("bash", call_id="call_bash", command="echo recorded"),
            call("todos", call_id="call_todos", todos=steps),
            answer_text(LONG),
        )
        attachments = [{**PICTURE, "content": "iVBORw0KGgo="}]
        run_id = await harness.prompt(
            "Write the program. “Ärger” 🙂 <b>&</b>", session, attachments=attachments,
            limits={"steps": 50, "cost": 2.5, "tokens": 100_000, "wall_s": 900},
        )  # fmt: skip
        await self.allow("allow_session")
        await self.allow("allow")
        await harness.received.complete(run_id)
        shell: dict[str, Json] = {"command": "echo by hand; exit 3", "term_width": 80}
        await self.post(f"/agent/sessions/{session}/shell", shell)
        link = parts.ImageUrlPart(parts.ImageUrl("https://example.com/shot.png", "low"))
        workspace = harness.flow.workspace(harness.remote.id)
        _, written = workspace.messages.add(session, "user", [link])
        await written
        system = parts.TextPart(parts.Text("Be brief."))
        _, written = workspace.messages.add(session, "system", [system])
        await written
        await self.run(session, "Go on.", answer_text("There is nothing left."))
        self.plan(answer_text("They wrote a program."))
        await self.post(f"/agent/sessions/{session}/summarize", {})
        await harness.until_idle()
        await harness.received.event_with("session", "A recorded title")
        return session

    async def forget(self) -> None:
        """A session that is deleted again."""
        session = await self.session("Forgotten")
        await self.run(session, "Say something.", answer_text("Something."))
        found = await self.harness.request("DELETE", f"/sessions/{session}")
        assert found.status == 200, found

    async def ends(self) -> None:
        """Runs of every outcome but `interrupted`."""
        session = await self.session("Ends")
        await self.run(session, "Be long.", answer_text("Cut", finish="max_tokens"))
        await self.run(session, "Filter.", answer_text("Cut", finish="content_filter"))
        await self.run(session, "Fail.", Reply(status=401))
        await self.run(
            session, "Spend.", call("ls", path="."), answer_text("Never said."), limits={"steps": 1}
        )
        self.harness.model.play(Script([], [TITLES, *agent_rules()]))
        await self.run(session, "Repeat.", *[call("ls", path=".") for _ in range(12)])
        self.harness.model.play(Script([], [TITLES, *agent_rules()]))
        self.plan(priced(Reply(deltas=["I am at"], hold_after=1)))
        run_id = await self.harness.prompt("Count to a million.", session)
        await self.harness.received.text("I am at")
        assert (await self.harness.cancel_run(run_id)).result == "canceled"
        assert (await self.harness.cancel_run(run_id)).result == "already_ended"
        await self.harness.received.complete(run_id)

    async def asks(self) -> None:
        """Permission asks that were allowed, denied, withdrawn and expired; questions, too."""
        harness, session = self.harness, await self.session("Asks")
        fetch = call("fetch", url="http://127.0.0.1:9/page", format="text")
        for action, then in (("allow", [answer_text("It is not there.")]), ("deny", [])):
            self.plan(fetch, *then)
            run_id = await harness.prompt(f"Fetch it ({action}).", session)
            await self.allow(action)
            await harness.received.complete(run_id)
        self.plan(call("bash", command="touch built"), answer_text("Built."))
        run_id = await harness.prompt("Build it.", session)
        await self.allow("allow_workspace")
        await harness.received.complete(run_id)
        self.plan(fetch)
        run_id = await harness.prompt("Fetch it, then stop.", session)
        await self.permission()
        await harness.cancel_run(run_id)
        await harness.received.complete(run_id)
        self.plan(fetch)
        await harness.remote.select_session(session)
        run_id = await harness.prompt("Fetch it in time.", session, run_id=Ids(seed=9).run())
        await self.permission()
        harness.clock.advance(301)
        await harness.received.complete(run_id)
        for how in ("answer", "cancel"):
            self.plan(call("question", questions=QUESTIONS), answer_text("Understood."))
            run_id = await harness.prompt(f"Ask me ({how}).", session)
            self.batches += 1
            batch = await batch_in(harness.received, self.batches)
            which, targets, yes, _ = (question.id for question in batch.questions)
            responses: list[dict[str, object]] = [
                {"request_id": which, "selected_ids": ["pg"], "notes": {"pg": "v16"}},
                {"request_id": targets, "selected_ids": ["arm", "x86"]},
                {"request_id": yes, "yes": True},
            ]
            if how == "answer":
                assert await answer_batch(harness, batch.id, *responses)
            else:
                assert await cancel_batch(harness, batch.id)
            await harness.received.complete(run_id)
        harness.model.play(Script([], [TITLES, *agent_rules()]))

    async def queue(self) -> None:
        """A folded run, one canceled in the queue, and a canceled session."""
        harness, session, ids = self.harness, await self.session("Queue"), Ids(seed=3)
        self.plan(priced(Reply(calls=[ScriptedCall(name="ls", input={})], hold_after=0)))
        self.plan(
            answer_text("Both are done."), priced(Reply(deltas=["Never", " said"], hold_after=1))
        )
        before = len(harness.seen())
        host = await harness.prompt("List the files.", session)
        first = await harness.until_asked(before + 1)
        await harness.prompt("And count them.", session)
        given = await harness.prompt("Wait for your turn.", session, run_id=ids.run())
        await harness.prompt("Dropped from the queue.", session, run_id=ids.run())
        harness.release(first)
        await harness.received.complete(host)
        await harness.received.text("Never")
        await self.post(f"/agent/sessions/{session}/prompts/clear", {})
        await self.post(f"/agent/sessions/{session}/cancel", {})
        await harness.received.complete(given)
        harness.model.play(Script([], [TITLES, *agent_rules()]))

    async def agents(self) -> None:
        """A tree of three levels, and one agent for each outcome."""
        harness = self.harness
        lead = await harness.start_agent(
            "Lead the survey", name="Lead", limits={"steps": 9, "cost": 1.5}
        )
        await self.agent_ended(lead)
        for prompt, more in (
            ("Use no key", {"role": "explorer"}),
            ("Spend little", {"limits": {"steps": 1}, "read_only": True}),
        ):
            await self.agent_ended(await harness.start_agent(prompt, name=prompt, **more))
        watcher = await harness.start_agent("Watch the log", name="Watcher")
        await harness.until_asked_by("Watch the log")
        await harness.done(watcher.agent_id, "cancel")
        await self.agent_ended(watcher)
        session = await self.session("Delegation")
        await self.run(
            session, "Have the pages counted.", call("agent", prompt="Count pages", name="Helper")
        )
        await harness.done(lead.agent_id, "budget", steps=20)

    async def agent_ended(self, agent: Agent) -> None:
        await self.harness.until_agent(agent.name, lambda one: one.state == "ended")
        await self.harness.until_idle()

    async def letters(self) -> None:
        """Letters in every state, and a mailbox that only a program outside reads."""
        harness = self.harness
        session = await self.session("Letters")
        await self.run(session, "Wait for letters.", answer_text("I wait."))
        (lead, *_) = [one for one in await harness.agents() if one.name == "Lead"]
        asked: dict[str, Json] = {"to": lead.agent_id, "from": session}
        for kind, text, state in (
            ("ask", "How many pages?", "answered"),
            ("handoff", "Lead the survey of the tests.", "admitted"),
            ("task", "Lead the survey once more.", "admitted"),
        ):
            self.plan(answer_text("Good to know."))
            sent = decode(await self.post("/mail", {**asked, "kind": kind, "text": text}, 202),
                          LetterShown)  # fmt: skip
            await until_state(harness, sent.letter_id, state)
            await harness.until_idle()
            harness.clock.advance(1)
        harness.model.play(Script([], [TITLES, *agent_rules()]))
        outside = post_of(harness).make(OUTSIDE)
        self.plan(priced(Reply(text="Late.", hold_after=0)))
        before = len(harness.seen())
        run_id = await harness.prompt("Work for a while.", session)
        first = await harness.until_asked(before + 1)
        late = letter(harness, "late", kind="ask", from_=OUTSIDE, expires_s=5)
        dropped = letter(harness, "dropped", kind="task", from_=OUTSIDE)
        mailbox = deliver(harness, session, late, dropped)
        await self.post("/mail/ring", {"agent": session})
        await until_state(harness, "dropped", "delivered")
        harness.clock.advance(6)
        await until_state(harness, "late", "expired")
        await harness.cancel_run("dropped")
        await until_state(harness, "dropped", "dead")
        harness.release(first)
        await harness.received.complete(run_id)
        await until(lambda: mailbox.pending_count() == 0)
        deliver(harness, OUTSIDE, letter(harness, "buried", kind="task", from_=session))
        _, claim = outside.claim(2)  # The first one is the receipt of the late letter.
        outside.bury(claim)
        deliver(harness, OUTSIDE, letter(harness, "unread", kind="handoff", from_=session))

    # --- shutdown and crash

    async def close(self) -> None:
        """Leave an active run, queued ones and a letter for the next server."""
        session = await self.session("Closed")
        self.plan(priced(Reply(deltas=["Cut off in the"], hold_after=1)))
        await self.harness.prompt("Take your time.", session, run_id=Ids(seed=4).run())
        await self.harness.received.text("Cut off")
        await self.harness.prompt("And answer_text it again.", session, run_id=Ids(seed=5).run())
        await self.harness.prompt("And again.", session, run_id=Ids(seed=6).run())
        deliver(self.harness, session, letter(self.harness, "held-letter", from_=OUTSIDE))
        await self.post("/mail/ring", {"agent": session})
        await until_state(self.harness, "held-letter", "delivered")

    async def crash(self) -> None:
        """Leave active, waiting and queued runs, an agent and open asks at the time of the copy."""
        harness = self.harness
        await until_state(harness, "held-letter", "admitted")
        await harness.until_idle()
        for prompt, reply in (
            ("Wait for permission.", call("fetch", url="http://127.0.0.1:9/", format="text")),
            ("Wait for answers.", call("question", questions=QUESTIONS)),
        ):
            self.plan(reply)
            await harness.prompt(prompt, await self.session(prompt))
            await (self.permission() if "perm" in prompt else batch_in(harness.received, 1))
        session = await self.session("Crashed")
        self.plan(
            priced(
                Reply(
                    reasoning="Two calls.",
                    calls=[
                        ScriptedCall(name="bash", id="call_begun", input={"command": "sleep 600"}),
                        ScriptedCall(name="view", id="call_known", input={"file_path": "main.go"}),
                    ],
                )
            )
        )
        await harness.prompt("Run it.", session, approve="allow")
        await until(lambda: self.rows("SELECT 1 FROM calls WHERE state = 'started'") > 0)
        await harness.prompt("Joins nobody.", session, run_id=Ids(seed=8).run())
        text = await self.session("Open text")
        self.plan(priced(Reply(reasoning="Thinking", deltas=["An open", " text"], hold_after=4)))
        await harness.prompt("Speak.", text)
        await harness.received.text("An open")
        await harness.start_agent("Work until the end", name="Interrupted")
        await harness.received.text("I have begun")
        await harness.start_agent("Fetch the page", name="Asking")
        await self.permission()
        await harness.until_agent("Asking", lambda one: one.waiting_for == "ask")
        harness.clock.advance(1)
        await until(lambda: self.rows("SELECT 1 FROM chunks") > 1)

    def rows(self, query: str) -> int:
        (database,) = (self.harness.flow.folder / "data").rglob("culm.db")
        with sqlite3.connect(database) as connection:
            return len(connection.execute(query).fetchall())


@asynccontextmanager
async def open_recording(
    folder: Path, model: ModelServer, clock: HybridClock, seed: int
) -> AsyncGenerator[Recording]:
    config = model_config(model.url, context_window=200_000, **PRICES)
    with tempfile.TemporaryDirectory(prefix="culm-") as short:
        options = serve_options(
            folder, f"unix://{short}/s", "tcp://127.0.0.1:0", settings=Settings(), config=config
        )
        async with (
            open_launcher(clock, folder / "workers") as launcher,
            open_server(options, clock, Ids(seed), lambda: None, None, launcher) as server,
        ):
            flow = FlowServer(server, clock, folder)
            try:
                remote = await (await flow.client(Ids(seed=seed).client())).open_workspace(
                    flow.directory()
                )
                async with open_received(remote) as received:
                    session = SessionId("")
                    yield Recording(
                        AgentHarness(flow, clock, model, remote, session, received, launcher)
                    )
            finally:
                async with asyncio.timeout(WAIT_S):
                    await flow.aclose()


async def perform(folder: Path) -> float:
    """Leave `<folder>/image` as a killed server leaves its data; return the time of the end."""
    clock = HybridClock()
    (folder / "project").mkdir(parents=True)
    (folder / "project" / "AGENTS.md").write_text("Be brief.\n")
    (folder / "project" / "culm.json").write_text('{"permissions": {"allowed_tools": ["view"]}}\n')
    async with open_model_server(Script([], [TITLES, *agent_rules()])) as model:
        async with open_recording(folder, model, clock, 1) as recording:
            await trust(folder)
            await recording.configure()
            await recording.work()
            await recording.forget()
            await recording.ends()
            await recording.asks()
            await recording.queue()
            await recording.agents()
            await recording.letters()
            await recording.close()
        clock.advance(10)
        clock = HybridClock(clock.now_s())
        model.play(Script([], [TITLES, *agent_rules()]))
        async with open_recording(folder, model, clock, 2) as recording:
            await recording.crash()
            shutil.copytree(folder / "data", folder / "image")
            return clock.now_s()


async def trust(folder: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "culm", "trust", "--yes", "--data-dir", str(folder / "data")),
        *("--config", str(folder / "culm.json"), str(folder / "project")),
        stdout=asyncio.subprocess.DEVNULL,
    )
    assert await process.wait() == 0


async def record(folder: Path) -> None:
    """Record the directory of this version; refuse to change an existing one."""
    target = HERE / __version__
    if target.exists():
        raise SystemExit(f"{target} is recorded; a recorded directory never changes")
    at_s = await perform(folder / "made")
    config = json.loads((folder / "made" / "culm.json").read_text())
    url = config["providers"]["demo"]["base_url"]
    write_tree(folder / "made", folder / "made" / "image", url, target)
    try:
        answers = await expected_answers(__version__, folder, at_s)
    except BaseException:
        shutil.rmtree(target)
        raise
    (target / EXPECTED).write_text(as_text(answers))


async def record_expected(folder: Path) -> None:
    for version in recorded():
        (folder / version).mkdir()
        at_s = expected_of(version)["recorded_at"]
        assert isinstance(at_s, int | float)
        answers = await expected_answers(version, folder / version, at_s)
        (HERE / version / EXPECTED).write_text(as_text(answers))


async def expected_answers(version: str, folder: Path, at_s: float) -> dict[str, Answer]:
    for name in ("one", "two"):
        (folder / name).mkdir()
        restore(version, folder / name, at_s)
    mail = read_mail(folder / "two")
    events = await count_recorded(version, folder / "two", at_s)
    answers = await read_recorded(version, folder / "one", at_s)
    return {"recorded_at": at_s, "mail": mail, "events": events, "answers": answers}
