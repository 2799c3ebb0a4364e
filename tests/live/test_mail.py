"""Letters through real processes: without a server, with one, and across its end."""

import asyncio
import signal
from contextlib import AbstractAsyncContextManager, closing
from pathlib import Path

import pytest

from culm.ids import Ids, SessionId, workspace_id_of
from culm.store.files import prepare_file
from culm.store.sessions import add_session
from culm.store.writer import connect
from culm.wire.messages import Message
from culm.workspace.roots import project_folder, remember_workspace
from tests.live.harness import (
    RESUME_S,
    Ended,
    ProcessServer,
    make_directory,
    open_client_of,
    open_process,
    open_process_server,
    run_process,
)
from tests.store.trees import Tree

ENV = {"CULM_NO_DISCOVERY": "1"}


def command(folder: Path, *args: str) -> tuple[str, ...]:
    """`culm mail` in the project, with the server of `folder` if there is one."""
    name, *rest = args
    places = ("--dir", str(folder / "project"), "--data-dir", str(folder / "data"))
    host = ("--host", f"unix://{folder}/s") if name in ("send", "ask") else ()
    return ("-m", "culm", "mail", name, *places, *host, *rest)


async def mail(folder: Path, *args: str) -> Ended:
    return await run_process(folder, *command(folder, *args), env=ENV)


def serving(folder: Path) -> AbstractAsyncContextManager[ProcessServer]:
    return open_process_server(folder, "--host", f"unix://{folder}/s", env=ENV)


def make_session(folder: Path) -> SessionId:
    """Create a session in a project that a server has opened and closed."""
    path, root = make_directory(folder), folder / "data"
    database = project_folder(root, path) / "culm.db"
    prepare_file(database, Ids().epoch(), 0)
    session_id = Ids().session()
    with closing(connect(database)) as connection:
        Tree(connection).do(add_session(session_id, "talk", sessions_max=1))
    remember_workspace(root, path=path, root=root, workspace_id=workspace_id_of(path))
    return session_id


async def messages(server: ProcessServer, folder: Path, session_id: SessionId) -> list[Message]:
    async with open_client_of(server) as client:
        workspace = await client.open_workspace(folder / "project")
        return await workspace.messages(session_id)


async def test_letter_sent_without_a_server_is_read_once_despite_a_kill(
    folder: Path,
) -> None:
    session_id = make_session(folder)
    sent = await mail(folder, "send", "--to", session_id, "remember the milk")
    assert sent == Ended(
        0, sent.stdout, "(no server is running; the letter is read when one starts)"
    )
    letter_id = sent.stdout
    assert await mail(folder, "status", letter_id) == Ended(0, "delivered", "")
    async with serving(folder) as server:
        async with asyncio.timeout(RESUME_S):
            while (await mail(folder, "status", letter_id)).stdout != "admitted":
                pass
        await server.kill()
    async with serving(folder) as server:
        asked = await mail(folder, "ask", "--to", session_id, "are you there?")
        assert (asked.status, asked.stdout != "", asked.stderr) == (0, True, "")
        texts = [str(message.parts) for message in await messages(server, folder, session_id)]
    assert sum("remember the milk" in text for text in texts) == 1
    assert sum("are you there?" in text for text in texts) == 1
    listed = await mail(folder, "list", "--agent", session_id)
    states = [line.split()[1:5:3] for line in listed.stdout.splitlines()[1:]]
    assert states == [["reply", "delivered"], ["ask", "answered"], ["task", "admitted"]]


async def test_mail_ask_waits_for_a_server_and_gets_an_answer(folder: Path) -> None:
    session_id = make_session(folder)
    args = command(folder, "ask", "--to", session_id, "are you there?")
    async with open_process(folder, *args, env=ENV) as asking:
        waiting = "(no server is running; waiting for one)"
        await asking.until(lambda: asking.errors == [waiting], RESUME_S)
        async with serving(folder):
            ended = await asking.wait(RESUME_S)
    assert (ended.status, ended.stdout != "") == (0, True)
    assert [path.name for path in folder.glob("data/projects/*/mailboxes/*")] == [session_id]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_interrupted_mail_ask_leaves_no_mailbox(folder: Path, number: signal.Signals) -> None:
    session_id = make_session(folder)
    args = command(folder, "ask", "--to", session_id, "are you there?")
    async with open_process(folder, *args, env=ENV) as asking:
        await asking.until(lambda: bool(asking.errors), RESUME_S)
        assert len([*folder.glob("data/projects/*/mailboxes/cli-*")]) == 1
        ended = await asking.end(number)
    assert (ended.status, ended.stdout) == (4, "")
    assert [path.name for path in folder.glob("data/projects/*/mailboxes/*")] == [session_id]
