"""The Crush TUI without its terminal: its calls, their order, and its screen.

Owns one attached client from start-up to quit: the traces of crush-wire §13.1–13.5. Polling is in
`polling.py`, sessions in `sessions.py`, the screen in `screen.py`, the stream in `events.py`.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager

from tests.crush_client.api import Api, CallError, StatusError
from tests.crush_client.calls import Calls, flag_of
from tests.crush_client.events import EventLoop, Sleep
from tests.crush_client.golang import record, records, texts, to_json
from tests.crush_client.polling import Polling
from tests.crush_client.screen import Reaction, Screen, changes_in
from tests.crush_client.sessions import Sessions, resolve_session
from tests.crush_client.startup import Project, Startup, create_workspace, new_id
from tests.crush_client.transport import Body, Transport, parse_host
from tests.crush_client.types import is_configured

QUIT_S = 5.0
TERM_WIDTH = 118
LOST = "lost connection to the crush server"
RESET = "the crush server reset this workspace"
NOT_READY = "agent is not ready"
_REFRESHES: dict[Reaction, int] = {
    "refresh-tools": 59,
    "refresh-prompts": 67,
    "refresh-resources": 68,
}


class Tui:
    """One attached client. Created by `open_tui`."""

    def __init__(self, api: Api, project: Project, startup: Startup, sleep: Sleep) -> None:
        self.api = api
        self.screen = Screen()
        self.calls = Calls(api, self.screen)
        self.polling = Polling(self.calls)
        self.sessions = Sessions(self.calls, self.polling)
        self.events = EventLoop(self, sleep)
        self.needs_init = False
        self._project = project
        self._startup = startup
        self._changed = asyncio.Event()
        self._wanted: dict[Reaction, None] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def sent(self) -> list[str]:
        return self.api.sent

    @property
    def is_running(self) -> bool:
        return bool(self._tasks)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a change of the screen makes `condition` true."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # --- attach (§13.1)

    async def start(self, session: str) -> None:
        """Do steps 1 to 5, which block the UI; raises the errors that end the program."""
        await self._startup.ensure()
        self.calls.adopt(await create_workspace(self.api, self._project, self._startup))
        await self.calls.init_agent()
        if session:
            self.screen.open_session(await resolve_session(self.api, session))
        self.screen.skip = await self.calls.flag(30, "skip")
        if await self.calls.flag(35, "is_ready"):
            self.screen.is_ready = await self.calls.flag(35, "is_ready")
        if is_configured(self.calls.config):
            self.needs_init = await self.calls.flag(54, "needs_init")

    def begin(self, tasks: asyncio.TaskGroup) -> None:
        """Do step 6: start the stream, its consumer, and the task for the resulting calls."""
        self._tasks = [
            tasks.create_task(self.events.run(), name="events"),
            tasks.create_task(self._consume(), name="consume"),
            tasks.create_task(self._react(), name="react"),
        ]

    async def fill_screen(self) -> None:
        """Do step 7: concurrent calls whose failures are only logged."""
        polling = self.polling
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._load_skills(), name="skills")
            tasks.create_task(self.sessions.load_prompts(), name="prompts")
            for call in (polling.lsps, polling.agent, polling.mcp):
                tasks.create_task(call(), name=call.__name__)
        if self.screen.session_id:
            await self.sessions.load(self.screen.session_id)

    async def continue_last(self) -> None:
        """Do step 8, `--continue`."""
        if found := records(await self.calls.attempt(14, [])):
            await self.sessions.load(found[0].text("id"))

    async def _load_skills(self) -> None:
        found = records(await self.calls.attempt(57, []))
        self.screen.skills = [skill.text("name") for skill in found]

    # --- prompts (§13.2) and cancelling (§13.4)

    async def send_prompt(self, text: str, mentions: Iterable[str] = ()) -> bool:
        """Send a prompt; returns False with a toast if it could not be sent."""
        try:
            info = await self.api.get(35)
        except CallError as exc:
            gone = isinstance(exc, StatusError) and exc.status == 404
            self.show(RESET if gone else LOST)
            return False
        if not info.flag("is_ready"):
            self.show(NOT_READY)
            return False
        if not self.screen.session_id and not await self.sessions.create():
            return False
        session_id = self.screen.session_id
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.sessions.load(session_id), name="load")
            tasks.create_task(self._mention(session_id, mentions), name="mentions")
            tasks.create_task(self.post_prompt(session_id, text), name="prompt")
        return True

    async def post_prompt(self, session_id: str, text: str) -> None:
        """Do step d alone; a failure is a toast."""
        try:
            await self.api.call(36, {"session_id": session_id, "prompt": text})
        except CallError as exc:
            self.show(f"failed to send message to agent: {exc}")
        await self.polling.after_change()

    async def _mention(self, session_id: str, mentions: Iterable[str]) -> None:
        for path in mentions:
            await self.calls.attempt(24, None, {"session_id": session_id, "path": path})
            await self.calls.attempt(28, None, {"path": path})

    async def escape(self) -> None:
        """Press Esc while prompts are queued."""
        await self.calls.attempt(43, sid=self.screen.session_id)

    async def cancel(self) -> None:
        """Press Esc twice."""
        await self.calls.attempt(40, sid=self.screen.session_id)
        await self.polling.after_change()

    async def summarize(self) -> bool:
        """Summarize the session and wait for it; a failure is False and a toast."""
        return await self.calls.call_or_toast(44, None, sid=self.screen.session_id)

    async def shell(self, command: str) -> tuple[str, int]:
        """Run `!command` and wait for it; a cancel closes the request and ends the command."""
        body = {"session_id": "", "command": command, "term_width": TERM_WIDTH}
        found = record(await self.api.call(45, body, sid=self.screen.session_id))
        return found.text("output"), found.integer("exit_code")

    # --- dialogs (§13.3, §10)

    async def answer_permission(self, action: str) -> bool:
        """Answer the open dialog; returns True if this answer was the first. Errors are ignored."""
        assert self.screen.permission is not None, "a dialog is open"
        body: dict[str, object] = {"permission": to_json(self.screen.permission), "action": action}
        self.screen.permission = None
        return flag_of(await self.calls.attempt(32, None, body), "resolved")

    async def answer_questions(self, responses: list[Mapping[str, object]]) -> bool:
        body: dict[str, object] = {"batch_request_id": "", "responses": responses}
        return flag_of(await self.calls.attempt(33, None, body), "resolved")

    async def cancel_questions(self) -> bool:
        return flag_of(await self.calls.attempt(34), "resolved")

    async def set_skip(self, *, skip: bool) -> None:
        await self.calls.attempt(31, None, {"skip": skip})

    # --- owner of the stream (§14.2)

    async def subscribe(self) -> Body:
        return await self.api.subscribe()

    async def unsubscribe(self, body: Body) -> None:
        await self.api.transport.drop(body)

    async def recreate(self) -> None:
        """Register again from the last response, not from the original request."""
        known = self.calls.workspace
        assert known is not None, "attached"
        again = Project(
            path=known.text("path"),
            yolo=known.flag("yolo"),
            debug=known.flag("debug"),
            data_dir=known.text("data_dir"),
            env=tuple(texts(known.values["env"])),
            channels=tuple(texts(known.values["channels"])),
        )
        body = again.body(self.api.client_id, self._startup.version)
        self.calls.adopt(record(await self.api.call(7, body)))
        await self.calls.init_agent()

    async def recovered(self) -> None:
        if session_id := self.screen.session_id:
            await self.calls.select(session_id)
            await self.sessions.load(session_id)
        self._changed.set()

    def show(self, text: str) -> None:
        self.screen.toasts.append(text)
        self._changed.set()

    async def _consume(self) -> None:
        while True:
            event = await self.events.channel.get()
            async with self.calls.ui:
                self._wanted |= dict.fromkeys(self.screen.apply(event))
            self._changed.set()

    async def _react(self) -> None:
        while True:
            await self.until(lambda: bool(self._wanted))
            reaction = next(iter(self._wanted))
            del self._wanted[reaction]
            await self._follow(reaction)
            self._changed.set()

    async def _follow(self, reaction: Reaction) -> None:
        calls = self.calls
        match reaction:
            case "poll":
                await self.polling.agent()
            case "queue":
                await self.polling.queue()
            case "history":
                history = await calls.attempt(19, [], sid=self.screen.session_id)
                self.screen.changes = changes_in(records(history))
            case "workspace":
                if found := await calls.attempt(9):
                    calls.adopt(record(found))
            case "lsps":
                await self.polling.lsps()
            case "mcp_states":
                await calls.attempt(63, {})
            case "pending_auth":
                await calls.attempt(64, [])
            case "mcp_prompts":
                await calls.attempt(61, [])
            case "agent_update":
                await calls.attempt(38)
            case _:
                await calls.attempt(_REFRESHES[reaction], None, {"name": self.screen.mcp_name})

    # --- quit (§13.5)

    async def quit(self) -> None:
        """Close the stream, then retire; an old server gets a release instead."""
        await self._stop()
        try:
            await self.api.call(5)
        except CallError as exc:
            self.calls.log.append(f"route 5: {exc}")
            if isinstance(exc, StatusError) and exc.status == 404:
                await self.calls.attempt(8, query={"client_id": self.api.client_id})
        await self.api.transport.aclose()

    async def vanish(self) -> None:
        """End as with `kill -9`: connections close without a request."""
        await self._stop()
        await self.api.transport.aclose()

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=QUIT_S)
        self._tasks = []


@asynccontextmanager
async def open_tui(
    project: Project,
    startup: Startup,
    *,
    sleep: Sleep = asyncio.sleep,
    client_id: str = "",
    session: str = "",
    continue_last: bool = False,
) -> AsyncGenerator[Tui]:
    """Attach a TUI; it quits when the block ends, unless it already has."""
    api = Api(Transport(parse_host(startup.host)), client_id or new_id())
    tui = Tui(api, project, startup, sleep)
    try:
        await tui.start(session)
        async with asyncio.TaskGroup() as tasks:
            tui.begin(tasks)
            try:
                await tui.fill_screen()
                if continue_last:
                    await tui.continue_last()
                yield tui
            finally:
                if tui.is_running:
                    await tui.quit()
    finally:
        await api.transport.aclose()
