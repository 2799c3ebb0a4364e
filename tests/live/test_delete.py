"""After the deletion of a session no file of the data directory contains its text."""

import asyncio
import mmap
from pathlib import Path

from culm.client.workspace import RemoteWorkspace
from culm.ids import SessionId
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, ReplyRule, Script, ScriptedCall
from culm.wire.agents import SendLetter
from culm.wire.runs import Attachment, RunComplete
from tests.live.agents_harness import AgentsHarness, open_agents_harness
from tests.live.run_harness import TITLES, open_watch
from tests.support import contract

SECRET = "quokka"  # In all text of the deleted session ...
KEPT = "wombat"  # ... and in that of another one.
LONG = " ".join([SECRET] * 10_000)
ERASED_S = 15.0  # The tail is emptied within seconds; the rest follows at once.


def _call(tool: str, **arguments: object) -> Reply:
    return Reply(text=f"{SECRET}!", calls=[ScriptedCall(name=tool, input=arguments)])


def _script() -> Script:
    command = f"yes {SECRET} | head -n 20000"
    replies = [
        _call("agent", prompt=f"{SECRET}-child: say it", name=f"{SECRET}-child"),
        _call("bash", command=command, description=f"print {SECRET}"),
        _call("write", file_path="notes", content=f"{SECRET} in a file"),
        _call("todos", todos=[{"content": SECRET, "status": "pending", "active_form": SECRET}]),
        Reply(reasoning=SECRET, text=LONG),
        Reply(text=f"{SECRET} read a letter"),
        Reply(status=400, body=f'{{"error": {{"message": "{SECRET} is not allowed"}}}}'),
        Reply(text=f"{SECRET} " * 5, hold_after=2),
        Reply(text=f"{SECRET} again"),
        Reply(text=f"{KEPT} answers"),
    ]
    rules = [
        ReplyRule(TITLES, Reply(text=f"About {SECRET}"), times=1),
        ReplyRule(TITLES, Reply(text=f"About {KEPT}")),
        ReplyRule(f"{SECRET}-child", Reply(text=f"{SECRET} of a child"), times=1),
    ]
    return Script(replies, rules)


def files_with(folder: Path, word: str) -> list[str]:
    """The files below a folder that contain a word."""
    found: list[str] = []
    for path in folder.rglob("*"):
        try:
            if not path.is_file() or not path.stat().st_size:
                continue
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
                if data.find(word.encode()) >= 0:
                    found.append(str(path.relative_to(folder)))
        except (FileNotFoundError, ValueError):
            pass  # It was removed or emptied in the meantime.
    return sorted(found)


async def until_erased(folder: Path) -> None:
    try:
        async with asyncio.timeout(ERASED_S):
            while files_with(folder, SECRET):
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(files_with(folder, SECRET)) from None


async def _allow_all(remote: RemoteWorkspace) -> None:
    while True:
        for ask in await remote.asks(state="open"):
            await remote.answer(ask, "allow_session")
        await asyncio.sleep(0.02)


async def _talk(harness: AgentsHarness) -> None:
    """Fill the session with every kind of text that the server keeps."""
    remote, session_id, watch = harness.remote, harness.session_id, harness.watch
    attachment = Attachment("/a.txt", "a.txt", "text/plain", f"{SECRET} attached".encode())
    await remote.rename_session(session_id, SECRET)
    async with asyncio.TaskGroup() as tasks:
        answering = tasks.create_task(_allow_all(remote))
        prompt = f"{SECRET}, please"
        await remote.prompt(
            session_id, prompt, run_id="r1", interactive=True, attachments=[attachment]
        )
        await watch.until_complete("r1")
        answering.cancel()
    letter = await remote.send_letter(SendLetter(to=session_id, text=f"{SECRET} by mail"))
    await watch.until_complete(letter.letter_id)
    await remote.prompt(session_id, f"{SECRET} fails", run_id="r2")
    await watch.until_complete("r2")
    await remote.prompt(session_id, f"{SECRET} is held", run_id="r3")
    await watch.until(lambda: any(event.type == "message_delta" for event in watch.events[-5:]))
    await remote.prompt(session_id, f"{SECRET} waits", run_id="r4")
    await remote.cancel_run("r3")
    await watch.until_complete("r3", "r4")


@contract("EXC-27")
async def test_no_text_of_a_deleted_session_is_left(folder: Path) -> None:
    async with (
        open_model_server(_script()) as model,
        open_agents_harness(folder, model) as harness,
    ):
        remote, data = harness.remote, folder / "data"
        other = (await remote.create_session("other")).id
        cursor = harness.watch.stream.cursor
        await _talk(harness)
        await remote.prompt(other, f"{KEPT}, please", run_id="kept")
        await harness.watch.until_complete("kept")
        (agent,) = await remote.agents()
        before = {complete.run_id: complete for complete in harness.watch.completes()}
        assert before["r1"].error == ""
        assert SECRET in before["r2"].error
        found = files_with(data, SECRET)
        assert any("outputs" in file for file in found), found
        size = max(file.stat().st_size for file in data.rglob("*.db*"))

        await remote.delete_session(harness.session_id)
        await until_erased(data)

        assert files_with(data, KEPT) != []
        assert max(file.stat().st_size for file in data.rglob("*.db*")) < size
        await _check_replay(remote, cursor, before, {harness.session_id, agent.session_id})
        assert SECRET not in harness.server.output()


async def _check_replay(
    remote: RemoteWorkspace,
    cursor: str,
    before: dict[str, RunComplete],
    deleted: set[SessionId],
) -> None:
    """Read the log again: every run has its end, and what was deleted has no text."""
    async with open_watch(remote, cursor) as watch:
        await watch.until_complete(*before)
        for event in watch.events:
            assert SECRET.encode() not in bytes(event.payload), event
        for complete in watch.completes():
            was = before[complete.run_id]
            assert bool(complete.error) == bool(was.error)
            assert complete.cancelled == was.cancelled
            assert complete.text == ("" if complete.session_id in deleted else was.text)
        kinds = {event.type for event in watch.events}
        assert {"run_changed", "cancel_changed", "ask_changed", "session"} <= kinds
