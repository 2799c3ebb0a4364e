"""Sessions as a TUI handles them: load, create, pick, rename, delete (crush-wire §13.2, 13.5)."""

import asyncio

from tests.crush_client.api import Api, CallError
from tests.crush_client.calls import Calls
from tests.crush_client.golang import Record, mapping, record, records, to_json
from tests.crush_client.polling import Polling
from tests.crush_client.screen import changes_in, file_paths
from tests.crush_client.types import SESSION, part_type

NESTING_TOOLS = ("agent", "agentic_fetch")


async def resolve_session(api: Api, name: str) -> Record:
    """Find a session by id, or by an id prefix in the list; raises `CallError`."""
    try:
        return await api.get(16, sid=name)
    except CallError:
        found = records(await api.call(14))
    matches = [session for session in found if session.text("id").startswith(name)]
    if len(matches) != 1:
        raise CallError(f"session not found: {name}")
    return matches[0]


async def create_session(api: Api, title: str) -> Record:
    empty = record(SESSION.zero())
    empty.values["title"] = title
    return record(await api.call(15, mapping(to_json(empty))))


class Sessions:
    def __init__(self, calls: Calls, polling: Polling) -> None:
        self.prompts: list[str] = []  # For the Up arrow, newest first.
        self._calls = calls
        self._polling = polling
        self._screen = calls.screen

    async def create(self, title: str = "New Session") -> bool:
        """Open a new session; a failure is a toast."""
        try:
            self._screen.open_session(await create_session(self._calls.api, title))
        except CallError as exc:
            self._screen.toasts.append(str(exc))
            return False
        return True

    async def load(self, session_id: str) -> bool:
        """Load a session; returns False if it was abandoned, which shows no error."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._calls.select(session_id), name="select")
            loading = tasks.create_task(self._load(session_id), name="load")
        if not loading.result():
            return False
        await self._polling.after_change()
        for path in self._screen.files:
            await self._calls.attempt(28, None, {"path": path})
        await self._load_messages(session_id)
        await self.load_prompts(session_id)
        return True

    async def load_prompts(self, session_id: str = "") -> None:
        attempt = self._calls.attempt
        found = await (attempt(21, [], sid=session_id) if session_id else attempt(22, []))
        self.prompts = [_text_of(message) for message in records(found)]

    async def _load(self, session_id: str) -> bool:
        api = self._calls.api
        try:
            session = await api.get(16, sid=session_id)
            history = records(await api.call(19, sid=session_id))
        except CallError as exc:
            self._calls.log.append(f"load: {exc}")
            return False
        read = await self._calls.attempt(23, [], sid=session_id)
        self._screen.open_session(session)
        self._screen.files = file_paths(history, read)
        self._screen.changes = changes_in(history)
        return True

    async def _load_messages(self, session_id: str) -> None:
        async with self._calls.ui:
            try:
                messages = records(await self._calls.api.call(20, sid=session_id))
            except CallError as exc:
                self._screen.toasts.append(str(exc))
                return
            self._screen.show_messages(messages)
        for message in messages:
            for part in message.records("parts"):
                if part_type(part) == "tool_call" and part.text("name") in NESTING_TOOLS:
                    child = f"{message.text('id')}$${part.text('id')}"
                    await self._calls.attempt(20, [], sid=child)
        await self._restore_model(messages)

    async def _restore_model(self, messages: list[Record]) -> None:
        """Select the model of the last answer again, if it differs and exists (§11.1)."""
        answers = [m for m in messages if m.text("role") == "assistant"]
        answers = [m for m in answers if not m.flag("is_summary_message")]
        if not answers:
            return
        config = self._calls.config
        wanted = {"model": answers[-1].text("model"), "provider": answers[-1].text("provider")}
        large = config.mapping("models").get("large")
        current = record(large).values if large is not None else {}
        provider = config.mapping("providers").get(wanted["provider"])
        if provider is None or all(current.get(key) == value for key, value in wanted.items()):
            return
        if any(m.text("id") == wanted["model"] for m in record(provider).records("models")):
            body = {"scope": 0, "model_type": "large", "model": wanted}
            await self._calls.attempt(49, None, body)
            await self._calls.attempt(38)

    async def begin_new(self) -> None:
        """Press ctrl+n: return to the landing screen."""
        await self._calls.attempt(29)
        await self.load_prompts()
        await self._calls.select("")
        self._screen.close_session()

    async def pick(self) -> list[Record]:
        """The sessions in the session picker; a failure is a toast."""
        try:
            return records(await self._calls.api.call(14))
        except CallError as exc:
            self._screen.toasts.append(str(exc))
            return []

    async def rename(self, session: Record, title: str) -> bool:
        """Send the whole session back with another title."""
        session_id = session.text("id")
        body = {**mapping(to_json(session)), "title": title}
        return not await self._is_busy(session_id) and await self._calls.call_or_toast(
            17, body, sid=session_id
        )

    async def delete(self, session_id: str) -> bool:
        return not await self._is_busy(session_id) and await self._calls.call_or_toast(
            18, None, sid=session_id
        )

    async def _is_busy(self, session_id: str) -> bool:
        await self._calls.attempt(35)
        return await self._calls.flag(39, "is_busy", sid=session_id)


def _text_of(message: Record) -> str:
    parts = [part for part in message.records("parts") if part_type(part) == "text"]
    return parts[0].text("text") if parts else ""
