"""Send a prompt to an agent and receive the answer, in the few lines that most programs need.

A run belongs to the server. Leaving the block stops receiving, but does not stop the run.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from culm.client.follow_run import follow_run, retry_idempotent, wait_for_last_message
from culm.client.follower import Follower, open_background_task
from culm.client.mirror import Mirror
from culm.client.tree import open_tree
from culm.client.workspace import RemoteWorkspace
from culm.ids import Ids, MessageId, RunId, SessionId
from culm.wire.asks import Approve
from culm.wire.config import SelectedModel
from culm.wire.messages import full_text
from culm.wire.runs import Attachment, CancelAnswer, Limits, Run

TITLE_CHARS = 50


@dataclass(frozen=True, slots=True)
class RunAnswer:
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


@asynccontextmanager
async def open_asked(
    workspace: RemoteWorkspace,
    prompt: str,
    *,
    session_id: SessionId | None = None,
    model: SelectedModel | None = None,
    attachments: Sequence[Attachment] = (),
    limits: Limits | None = None,
    approve: Approve | None = None,
) -> AsyncGenerator[AskedRun]:
    """Send a prompt and follow its run while in the block; the default is a new session.

    This client does not answer asks: `approve` decides them (`"allow"`, `"deny"`, or rules).
    Without it people at other clients may answer; if there are none, calls that need permission
    are refused. Raises `RequestRefused`.
    """
    if session_id is None:
        # An unused session does no harm, so creating it is safe to retry.
        title = title_of(prompt)
        session_id = (await retry_idempotent(workspace, lambda: workspace.create_session(title))).id
    run_id = Ids().run()
    async with open_tree(workspace, session_id, run_id) as (follower, _):
        await follower.connected()
        asked = AskedRun(workspace, session_id, run_id)
        # The server starts one run per run id, however often it is sent.
        await retry_idempotent(
            workspace,
            lambda: workspace.prompt(
                session_id,
                prompt,
                run_id=run_id,
                model=model,
                attachments=attachments,
                limits=limits,
                approve=approve,
            ),
        )
        async with open_background_task(asked.follow(follower), f"follow {run_id}"):
            yield asked


async def ask(
    workspace: RemoteWorkspace,
    prompt: str,
    *,
    session_id: SessionId | None = None,
    model: SelectedModel | None = None,
    attachments: Sequence[Attachment] = (),
    limits: Limits | None = None,
    approve: Approve | None = None,
) -> RunAnswer:
    """Send a prompt as `open_asked` does and wait for the end of the run.

    Raises `RunLost`, `RequestRefused`.
    """
    opening = open_asked(
        workspace,
        prompt,
        session_id=session_id,
        model=model,
        attachments=attachments,
        limits=limits,
        approve=approve,
    )
    async with opening as asked:
        return await asked.answer()


def title_of(prompt: str) -> str:
    """The title of a session until a model generates one."""
    line = " ".join(prompt[: 4 * TITLE_CHARS].split())
    return line if len(line) <= TITLE_CHARS else line[: TITLE_CHARS - 1] + "…"
