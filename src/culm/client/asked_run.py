"""Ask an agent something and hear the answer: the few lines that most programs need.

A run belongs to the server. Whoever leaves the block stops listening, and stops nothing.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from culm.client.background_task import open_background_task
from culm.client.follow_run import catch_up, follow_run, retry_idempotent
from culm.client.follower import Follower
from culm.client.mirror import Mirror
from culm.client.tree import open_tree
from culm.client.workspace import RemoteWorkspace
from culm.ids import Ids, MessageId, RunId, SessionId
from culm.wire.agent import Attachment
from culm.wire.config import SelectedModel
from culm.wire.messages import full_text
from culm.wire.rules import Approve
from culm.wire.runs import CancelAnswer, Limits, Run

TITLE_CHARS = 50


@dataclass(frozen=True, slots=True)
class RunAnswer:
    """How a run ended, and what was answered last."""

    text: str
    run: Run

    @property
    def is_complete(self) -> bool:
        """Whether the agent came to its end; `run.outcome` says why not."""
        return self.run.outcome == "end_turn"


class AskedRun:
    """A run that was asked for. Made by `open_asked`."""

    def __init__(self, workspace: RemoteWorkspace, session_id: SessionId, run_id: RunId) -> None:
        self.id = run_id
        self.session_id = session_id
        self._workspace = workspace
        self._pieces: list[str] = []  # That nobody has taken yet.
        self._shown: dict[MessageId, str] = {}
        self._changed = asyncio.Event()
        self._answer: asyncio.Future[RunAnswer] = asyncio.get_running_loop().create_future()

    async def pieces(self) -> AsyncGenerator[str]:
        """The text as it comes, of all answers of the run, until its end.

        A model that fails midway is asked again, and says it again; `answer` has the last word.
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
        """Wait for the end; raises `RunLost`, `Refused`."""
        return await asyncio.shield(self._answer)

    async def cancel(self) -> CancelAnswer:
        """Stop it, and hear what came of that."""
        return await self._workspace.cancel_run(self.id)

    async def follow(self, follower: Follower) -> None:
        try:
            run = await follow_run(self._workspace, follower, self.id, self._show)
            last = await catch_up(self._workspace, follower, run)
            self._show(follower.mirror)
            text = full_text(last.parts) if last is not None else ""
            self._answer.set_result(RunAnswer(text, run))
        except Exception as exc:  # boundary: whoever waits for the answer is told
            self._answer.set_exception(exc)
            self._answer.exception()  # Who does not wait need not hear of it.
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
                # Each answer of a run begins a line.
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
    """Ask, and listen while in the block; without a `session_id` it is a new session.

    Nobody is asked for permission here: `approve` says what is allowed (`"allow"`, `"deny"`, or
    rules), and without it people at other clients may answer; else it is refused. Raises `Refused`.
    """
    if session_id is None:
        # One that is begun and not used harms nobody.
        title = title_of(prompt)
        session_id = (await retry_idempotent(workspace, lambda: workspace.create_session(title))).id
    run_id = Ids().run()
    async with open_tree(workspace, session_id, run_id) as (follower, _):
        await follower.connected()
        asked = AskedRun(workspace, session_id, run_id)
        # The same run id is the same run, however often it is told.
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
    """As `open_asked`, for whoever wants only the end; raises `RunLost`, `Refused`."""
    asking = open_asked(
        workspace,
        prompt,
        session_id=session_id,
        model=model,
        attachments=attachments,
        limits=limits,
        approve=approve,
    )
    async with asking as asked:
        return await asked.answer()


def title_of(prompt: str) -> str:
    """What a session is called until a model has named it."""
    words = " ".join(prompt[: 4 * TITLE_CHARS].split())
    return words if len(words) <= TITLE_CHARS else words[: TITLE_CHARS - 1] + "…"
