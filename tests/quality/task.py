"""A complete agent task: a small repository, all the tools and a scripted model.

The server, the tools, the shell and the clock are real. The replies of the model are given turn by
turn; a test can look at the results of one turn before it chooses the next.
"""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from culm.assemble import open_server
from culm.client.http import Client, open_client
from culm.client.workspace import RemoteWorkspace
from culm.clock import LoopClock
from culm.ids import Ids, SessionId
from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Reply, ReplyRule, ScriptedCall
from culm.wire.asks import PermissionGrant, PermissionRef, PermissionRequest, Resolved
from culm.wire.codec import Json
from culm.wire.messages import File, ToolResult
from culm.wire.runs import Prompt
from culm.wire.workspaces import Process
from tests.flow.probes import script
from tests.flow.reading import assert_answered, assert_paired, calls_of, results_of, sent_in
from tests.flow.runs import ReceivedEvents, open_received
from tests.support import WAIT_S, model_config, serve_options

T = TypeVar("T")
Tree = Mapping[str, bytes]

COMMIT = """\
git init -q
git add -A
git -c user.name=A -c user.email=a@example.org commit -qm All --allow-empty
"""


def use(name: str, **arguments: Json) -> ScriptedCall:
    return ScriptedCall(name=name, input=arguments)


def bash(command: str, **more: Json) -> ScriptedCall:
    return use("bash", command=command, **more)


class Task:
    """One session in one repository. Made by `open_task`."""

    def __init__(
        self,
        folder: Path,
        model: ModelServer,
        remote: RemoteWorkspace,
        session_id: SessionId,
        events: ReceivedEvents,
        other: Client,
    ) -> None:
        self.folder = folder
        self.model = model
        self.remote = remote
        self.session_id = session_id
        self.events = events
        self.other = other
        self._seen = 0  # The number of results returned so far.

    # --- runs

    async def start(self, *turns: ScriptedCall | Sequence[ScriptedCall], approve: Json) -> str:
        """Let the model make these calls, those of a turn in parallel; return the run id."""
        for turn in turns:
            calls = [turn] if isinstance(turn, ScriptedCall) else list(turn)
            self.model.add(Reply(text="Now this.", calls=calls))
        self.model.add(Reply(text="Done."))
        run_id = f"run-{len(self.events.completes())}"
        body = Prompt(self.session_id, "Go on.", run_id, interactive=True, approve=approve)
        await self.remote.client.request("POST", self.remote.path("/agent"), body)
        return run_id

    async def finish(self, run_id: str) -> list[ToolResult]:
        """Wait for the run's successful end; return the results of its calls in order."""
        complete = await self.events.complete(run_id)
        assert (complete.text, complete.error, complete.cancelled) == ("Done.", "", False)
        messages = await self.remote.messages(self.session_id)
        assert_answered(messages)
        assert_paired(sent_in(self.model.requests[-1]))
        by_id = {result.tool_call_id: result for result in results_of(messages)}
        assert len(by_id) == len(results_of(messages))
        results = [by_id[call.id] for call in calls_of(messages)][self._seen :]
        self._seen += len(results)
        return results

    async def run_calls(
        self, *turns: ScriptedCall | Sequence[ScriptedCall], approve: Json = "allow"
    ) -> list[str]:
        """Start and finish a run whose calls all succeed; return their texts."""
        results = await self.finish(await self.start(*turns, approve=approve))
        assert [result.content for result in results if result.is_error] == []
        return [result.content for result in results]

    async def run_failing_call(self, call: ScriptedCall) -> str:
        """Run a call that fails; return its error text."""
        (result,) = await self.finish(await self.start(call, approve="allow"))
        assert result.is_error, result.content
        return result.content

    # --- approvals

    async def wait_for_request(self, number: int = 1) -> PermissionRequest:
        """Wait for the first permission request, or for a later one."""
        await self.events.until(lambda _: len(self.requests()) >= number)
        return self.requests()[number - 1]

    def requests(self) -> list[PermissionRequest]:
        """Return all permission requests so far."""
        return self.events.all("permission_request", PermissionRequest)

    async def answer(self, ask_id: str, action: str) -> None:
        """Answer a permission request from a second client."""
        path = self.remote.path("/permissions/grant")
        grant = PermissionGrant(PermissionRef(ask_id), action)
        assert (await self.other.ask("POST", path, Resolved, grant)).resolved

    # --- effects

    def tree(self) -> dict[str, bytes]:
        """Return every file of the repository with its bytes."""
        return {
            path.relative_to(self.folder).as_posix(): path.read_bytes()
            for path in sorted(self.folder.rglob("*"))
            if path.is_file() and ".git" not in path.parts
        }

    async def versions(self) -> dict[str, list[str]]:
        """Return the recorded versions of each file, the oldest first."""
        found: dict[str, list[File]] = {}
        for file in await self.ask(f"/sessions/{self.session_id}/history", list[File]):
            found.setdefault(self._name(file.path), []).append(file)
        for files in found.values():
            assert [file.version for file in files] == list(range(len(files)))
        return {name: [file.content for file in files] for name, files in found.items()}

    async def known(self) -> list[str]:
        """Return the files that the session has read or written."""
        path = f"/sessions/{self.session_id}/filetracker/files"
        return sorted(self._name(path) for path in await self.ask(path, list[str]))

    async def processes(self) -> list[Process]:
        return await self.ask("/processes", list[Process])

    async def until_running(self, count: int) -> list[Process]:
        """Wait until `count` commands run."""
        async with asyncio.timeout(WAIT_S):
            while len(found := await self.processes()) != count:
                await asyncio.sleep(0.01)
        return found

    def _name(self, path: str) -> str:
        return path.removeprefix(f"{self.folder}/")

    async def ask(self, rest: str, kind: type[T]) -> T:
        return await self.remote.client.ask("GET", self.remote.path(rest), kind)


@asynccontextmanager
async def open_task(
    folder: Path, tree: Tree, rules: Sequence[ReplyRule] = (), **config: object
) -> AsyncGenerator[Task]:
    """Open a task in a repository with the files of `tree`; `config` is the user's."""
    project = folder / "project"
    await _make_repository(project, tree)
    with tempfile.TemporaryDirectory(prefix="culm-") as short:  # A socket's path must be short.
        url = f"unix://{short}/s"
        async with open_model_server(script(rules=rules)) as model:
            options = serve_options(folder, url, config={**model_config(model.url), **config})
            async with (
                open_server(options, LoopClock(), Ids(), lambda: None),
                open_client(url) as client,
                open_client(url) as other,
            ):
                remote = await client.open_workspace(project)
                session = await remote.create_session("task")
                async with open_received(remote) as events:
                    task = Task(project, model, remote, session.id, events, other)
                    yield task
                    assert await task.processes() == []


async def _make_repository(folder: Path, tree: Tree) -> None:
    folder.mkdir()
    for name, data in tree.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    made = await asyncio.create_subprocess_exec("sh", "-ec", COMMIT, cwd=folder)
    async with asyncio.timeout(WAIT_S):
        assert await made.wait() == 0
