"""Session titles: a small model reads the first prompt and names the conversation."""

import asyncio
import logging
from collections.abc import Iterable

from culm.clock import within
from culm.errors import AppError, ModelFailed
from culm.ids import SessionId
from culm.model.base import ModelRequest, ReasoningDelta, TextDelta
from culm.model.choice import ChosenModel, ModelConfig, Models
from culm.run.context import TITLE_SYSTEM, UNTITLED, title_of, user_message
from culm.run.limits import price_of, used_of
from culm.run.live_run import RunRequest
from culm.run.loop import Growth, ReceivedAnswer
from culm.run.turn import TurnContext
from culm.store.sessions import set_title
from culm.wire.config import SelectedModel
from culm.wire.messages import Session

log = logging.getLogger(__name__)

TITLE_S = 60.0  # Nobody waits for a title, so it may take long, but not forever.
TITLE_TOKENS = 40
ANSWER_CHARS_MAX = 20_000  # Includes the reasoning of models that write it into the answer.
PROMPT_CHARS = 4000  # Enough of a prompt to find a title.


class Titles:
    """The title requests in progress, one per session. Created with the runs of a workspace."""

    def __init__(self, context: TurnContext) -> None:
        self._context = context
        self._tasks: dict[SessionId, asyncio.Task[None]] = {}
        self._is_stopped = False

    def begin(self, asked: RunRequest, session: Session) -> None:
        """Start beside the turn, and independently of it: a cancelled prompt still gets a title."""
        if not asked.prompt.strip() or session.id in self._tasks or self._is_stopped:
            return
        task = self._context.tasks.create_task(
            give_title(self._context, session, asked), name=f"title {session.id}"
        )
        self._tasks[session.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(session.id))

    def forget(self, session_id: SessionId) -> None:
        """Stop the request of a deleted session."""
        if task := self._tasks.get(session_id):
            task.cancel()

    def stop(self) -> None:
        self._is_stopped = True
        for task in self._tasks.values():
            task.cancel()


async def give_title(context: TurnContext, session: Session, asked: RunRequest) -> None:
    """Ask the small model, then the large one, and store the title; never fails a run.

    If the run's caller chose a model, no other model may read the prompt.
    """
    try:
        title, cost = await _find_title(context, session.id, asked)
        unit = set_title(session.id, title, instead_of=session.title, cost=cost)
        await context.store.write(unit)
    except AppError as exc:
        log.info("a title was not stored: %s", exc.message)
    except Exception:  # boundary: everything works without a title
        log.exception("no title for session %s", session.id)


async def _find_title(
    context: TurnContext, session_id: SessionId, asked: RunRequest
) -> tuple[str, float]:
    for chosen in _candidates(context.models.current, asked.model):
        try:
            asking = _ask(context.models, chosen, session_id, asked.prompt)
            if (found := await within(context.clock, TITLE_S, asking)) is not None:
                return found
            log.info("no title from %s within %g s", chosen.settings.model, TITLE_S)
        except AppError as exc:
            log.info("no title from %s: %s", chosen.settings.model, exc.message)
    return UNTITLED, 0.0


def _candidates(models: ModelConfig, wanted: SelectedModel | None) -> Iterable[ChosenModel]:
    """Return the chosen model, or else the small and the large one, if they can be used."""
    named = [wanted] if wanted is not None else [models.choose("small"), models.choose("large")]
    for provider, model in dict.fromkeys((n.provider, n.model) for n in named if n is not None):
        if not models.why_not(provider, model):
            yield models.get(provider, model)


async def _ask(
    models: Models, chosen: ChosenModel, session_id: SessionId, prompt: str
) -> tuple[str, float]:
    model = await models.open(chosen)
    pieces: list[str] = []
    size = 0

    def grow(event: Growth) -> None:
        nonlocal size
        if isinstance(event, TextDelta):
            pieces.append(event.text)
        if isinstance(event, TextDelta | ReasoningDelta):
            size += len(event.text)
        if size > ANSWER_CHARS_MAX:
            raise ModelFailed("No title", "the answer is too long")

    tokens = chosen.info.default_max_tokens if chosen.info.can_reason else TITLE_TOKENS
    request = ModelRequest(
        TITLE_SYSTEM,
        [user_message(session_id, prompt[:PROMPT_CHARS])],
        settings=chosen.settings,
        max_tokens=tokens or None,
    )
    done = await ReceivedAnswer(grow).receive(model.stream(request))
    price = price_of(chosen.info, flat_rate=chosen.flat_rate)
    return title_of("".join(pieces), prompt), used_of(done.usage, price, request, size).cost
