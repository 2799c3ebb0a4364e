"""Send a prompt, and follow a run through everything but the permanent loss of the server.

The event stream shows the progress of a run. Its end is confirmed by a request, because a server
that died publishes nothing. A run belongs to the server: a client that leaves does not stop it.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypedDict, TypeVar, Unpack

from msgspec import Struct

from culm.client.follower import Follower, open_background_task
from culm.client.http import RequestRefused
from culm.client.mirror import Mirror
from culm.client.tree import open_tree
from culm.client.workspace import RemoteWorkspace
from culm.errors import Failed, RunNotFound, WorkspaceNotFound
from culm.ids import Ids, MessageId, RunId, SessionId
from culm.wire.asks import Approve
from culm.wire.config import SelectedModel
from culm.wire.messages import Message, full_text, is_finished
from culm.wire.runs import Attachment, CancelAnswer, Limits, Run

T = TypeVar("T")

RETRY_S = 0.05
POLL_S = 2.0  # A server that died publishes nothing, so the run is polled.
SERVER_GONE_S = 8.0  # A restart takes less, even on a busy machine.
TITLE_CHARS = 50
LAST_EVENTS_S = 2.0  # Stored events are already published, but may still be in transit.


class RunLost(Failed):
    """The state of a run cannot be read any more. The run was not canceled."""

    code = "run_lost"


async def retry_idempotent(workspace: RemoteWorkspace, request: Callable[[], Awaitable[T]]) -> T:
    """Retry an idempotent request while the server restarts.

    Raises the errors of `request`, but `OSError` only if the server does not come back.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + SERVER_GONE_S
    while True:
        try:
            return await request()
        except OSError:
            if loop.time() > end_s:
                raise
            await workspace.client.revive()
        except RequestRefused as exc:
            if exc.code != WorkspaceNotFound.code or loop.time() > end_s:
                raise
            with suppress(RequestRefused, OSError):
                await workspace.rejoin()
        await asyncio.sleep(RETRY_S)


async def follow_run(
    workspace: RemoteWorkspace,
    follower: Follower,
    run_id: RunId,
    show: Callable[[Mirror], bool],
) -> Run:
    """Show each new state until the run has ended or is held; raises `RunLost`, `RequestRefused`.

    `show` returns True when the run seems to be over, which a request then confirms.
    """
    loop = asyncio.get_running_loop()
    last_seen_s = loop.time()
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await follower.until(show)
        run = await _find_run(workspace, run_id)
        if run is not None and run.state in ("ended", "held"):
            return run
        if run is not None:
            last_seen_s = loop.time()
        elif loop.time() - last_seen_s > SERVER_GONE_S:
            raise RunLost(
                f"lost the server during run {run_id}; the run was not canceled",
                hint=f"run `culm attach {run_id}` to restart the server and see the result",
            )
        await asyncio.sleep(RETRY_S)


async def _find_run(workspace: RemoteWorkspace, run_id: RunId) -> Run | None:
    """The run; None if the server cannot be reached. Raises `RequestRefused` if it was removed."""
    try:
        async with asyncio.timeout(SERVER_GONE_S):
            return await workspace.run(run_id)
    except OSError:
        return None
    except RequestRefused as exc:
        if exc.code == RunNotFound.code:  # Removed with its session.
            raise
    # The server restarted. The stream rejoins the workspace, but maybe after a long backoff.
    with suppress(RequestRefused, OSError):
        await workspace.rejoin()
    return None


async def wait_for_last_message(
    workspace: RemoteWorkspace, follower: Follower, run: Run
) -> Message | None:
    """Wait until the mirror has all of a run that is over, and return its last answer."""
    message_id = MessageId(run.message_id)

    def is_complete(mirror: Mirror) -> bool:
        if run.id in mirror.runs and run.state != "held":
            return False  # Its end comes after the end of its sub-agents.
        found = mirror.messages.get(message_id)
        return not message_id or (found is not None and is_finished(found.parts))

    try:
        async with asyncio.timeout(LAST_EVENTS_S):
            await follower.until(is_complete)
    except TimeoutError:
        if not message_id:
            return None
        if (stored := await workspace.find_message(run.session_id, message_id)) is not None:
            follower.mirror.put_message(stored)
    return follower.mirror.messages.get(message_id)


class RunAnswer(Struct, frozen=True):
    """The last answer of a run, and the run itself."""

    text: str
    run: Run

    @property
    def is_complete(self) -> bool:
        """True if the agent completed its turn; otherwise see `run.outcome`."""
        return self.run.outcome == "end_turn"


class AskedRun:
    """A run started by this client. Created by `open_asked`."""

    def __init__(self, workspace: RemoteWorkspace, session_id: SessionId, run_id: RunId) -> None:
        self.id = run_id
        self.session_id = session_id
        self._workspace = workspace
        self._pieces: list[str] = []  # Text that `pieces` has not yielded yet.
        self._shown: dict[MessageId, str] = {}
        self._changed = asyncio.Event()
        self._answer: asyncio.Future[RunAnswer] = asyncio.get_running_loop().create_future()

    async def pieces(self) -> AsyncGenerator[str]:
        """Yield the text of all answers of the run as it arrives, until the run ends.

        A model that fails in the middle is asked again and repeats its text; `answer` returns the
        final one.
        """
        while True:
            self._changed.clear()
            pieces, self._pieces = self._pieces, []
            for piece in pieces:
                yield piece
            if self._answer.done() and not self._pieces:
                return
            await self._changed.wait()

    async def answer(self) -> RunAnswer:
        """Wait for the end of the run; raises `RunLost`, `RequestRefused`."""
        return await asyncio.shield(self._answer)

    async def cancel(self) -> CancelAnswer:
        """Cancel the run, and return the result of the request."""
        return await self._workspace.cancel_run(self.id)

    async def follow(self, follower: Follower) -> None:
        try:
            run = await follow_run(self._workspace, follower, self.id, self._show)
            last = await wait_for_last_message(self._workspace, follower, run)
            self._show(follower.mirror)
            text = full_text(last.parts) if last is not None else ""
            self._answer.set_result(RunAnswer(text, run))
        except Exception as exc:  # boundary: `answer` raises it
            self._answer.set_exception(exc)
            self._answer.exception()  # Marked as retrieved: the caller need not wait.
        finally:
            self._changed.set()

    def _show(self, mirror: Mirror) -> bool:
        for message in mirror.messages.values():
            if message.run_id == self.id and message.role == "assistant":
                before = self._shown.get(message.id)
                text = full_text(message.parts)
                if text == before or not text:
                    continue
                self._shown[message.id] = text
                new = text[len(before) :] if before and text.startswith(before) else text
                # Each further answer of a run starts a new line.
                self._pieces.append(new if before or len(self._shown) == 1 else f"\n{new}")
                self._changed.set()
        run = mirror.runs.get(self.id)
        return run is None or run.state == "held"


class AskOptions(TypedDict, total=False):
    """Options of a prompt, as for `RemoteWorkspace.prompt`."""

    model: SelectedModel | None
    attachments: Sequence[Attachment]
    limits: Limits | None
    # The answer to asks, which this client does not answer: `"allow"`, `"deny"`, or rules. Without
    # it people at other clients may answer; if there are none, calls that need permission are
    # refused.
    approve: Approve | None


@asynccontextmanager
async def open_asked(
    workspace: RemoteWorkspace,
    prompt: str,
    *,
    session_id: SessionId | None = None,
    **options: Unpack[AskOptions],
) -> AsyncGenerator[AskedRun]:
    """Send a prompt and follow its run while in the block; the default is a new session.

    Raises `RequestRefused`.
    """
    session_id = session_id or await start_session(workspace, prompt)
    run_id = Ids().run()
    async with open_tree(workspace, session_id, run_id) as (follower, _):
        await follower.connected()
        asked = AskedRun(workspace, session_id, run_id)
        # The server starts one run per run id, however often it is sent.
        await retry_idempotent(
            workspace, lambda: workspace.prompt(session_id, prompt, run_id=run_id, **options)
        )
        async with open_background_task(asked.follow(follower), f"follow {run_id}"):
            yield asked


async def ask(
    workspace: RemoteWorkspace,
    prompt: str,
    *,
    session_id: SessionId | None = None,
    **options: Unpack[AskOptions],
) -> RunAnswer:
    """Send a prompt as `open_asked` does and wait for the end of the run.

    Raises `RunLost`, `RequestRefused`.
    """
    async with open_asked(workspace, prompt, session_id=session_id, **options) as asked:
        return await asked.answer()


async def start_session(workspace: RemoteWorkspace, prompt: str) -> SessionId:
    """Create a session for a prompt. An unused one does no harm, so this is retried."""
    title = title_of(prompt)
    return (await retry_idempotent(workspace, lambda: workspace.create_session(title))).id


def title_of(prompt: str) -> str:
    """The title of a session until a model generates one."""
    line = " ".join(prompt[: 4 * TITLE_CHARS].split())
    return line if len(line) <= TITLE_CHARS else line[: TITLE_CHARS - 1] + "…"
