"""Summaries: what a model reads instead of a conversation that has become too long."""

from collections.abc import Sequence
from typing import Protocol

from culm.model.base import ModelRequest
from culm.run.context import SUMMARY_SYSTEM, summary_prompt, user_message
from culm.run.loop import ActiveModel, GrowingAnswer, ModelChain, Pause, UsageMeter, ask
from culm.wire.messages import Message
from culm.wire.runs import Used
from culm.wire.sessions import Session


class SummaryJournal(GrowingAnswer, Protocol):
    @property
    def session(self) -> Session: ...

    async def begin_summary(self) -> Sequence[Message]: ...

    async def end_summary(self, used: Used, prompt: str) -> None: ...


async def summarize(
    models: ModelChain, journal: SummaryJournal, pause: Pause, meter: UsageMeter, prompt: str = ""
) -> None:
    """Write a summary of what the model has read; with a prompt, it goes on from there with it."""
    session = journal.session
    history = await journal.begin_summary()
    question = user_message(session.id, summary_prompt(session.todos))

    def request_of(active: ActiveModel) -> ModelRequest:
        return ModelRequest(SUMMARY_SYSTEM, [*history, question], (), active.settings)

    _, used = await ask(models, request_of, journal, pause, meter)
    await journal.end_summary(used, prompt)
