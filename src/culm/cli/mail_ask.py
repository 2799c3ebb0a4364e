"""`culm mail ask`: a question in an agent's mailbox, and the wait for the reply in one's own.

Owns the mailbox that the reply comes to, from before the question is delivered until the command
ends, however it ends.
"""

import asyncio
import os
from contextlib import suppress
from dataclasses import replace

import click
import msgspec

from culm.cli.exits import EXIT_CANCELED, EXIT_FAILED
from culm.cli.mail import MailOptions, deliver
from culm.cli.mail_place import check_recipient
from culm.cli.mail_ring import NOBODY, RingResult, ring
from culm.cli.render.renderers import TextRenderer
from culm.cli.terminal.signals import cancelling
from culm.cli.terminal.streams import CannotWrite, let_go
from culm.errors import AppError, Failed
from culm.ids import Ids, MessageId
from culm.mail.base import Mailbox
from culm.mail.letters import Letter, text_of
from culm.wire.agents import OUTSIDE
from culm.wire.codec import printable

LOOK_EVERY_S = 0.1
REPLIES_MAX = 16  # Taken at once; there is one question.


class ReplyTimeout(Failed):
    code = "no_answer"

    def __init__(self, letter_id: str, timeout_s: float, rung: RingResult) -> None:
        if rung.is_there:
            hint = f"`culm mail status {letter_id}` says how far it is; --timeout waits longer"
        else:
            hint = "start a server, such as with culm serve, and ask again"
        super().__init__(f"no answer to letter {letter_id} within {timeout_s:g} s", hint=hint)


class NoReply(Failed):
    code = "not_answered"


def ask_letter(sending: MailOptions, timeout_s: float, *, as_json: bool) -> int:
    """Ask, print the answer and return the exit status; raises `AppError`."""
    asker = MailAsker(sending, timeout_s)
    try:
        with asyncio.Runner() as runner, cancelling(runner.get_loop(), asker.cancel):
            question, reply = runner.run(asker.ask())
        sender = reply.from_.agent_id or reply.from_.session_id
        answer, failed = text_of(reply), reply.body.get("failed") is True
        if as_json:
            shown = {"letter_id": question.id, "reply_id": reply.id, "from": sender}
            click.echo(msgspec.json.encode({**shown, "answer": answer, "failed": failed}))
        elif failed:
            raise NoReply(printable(answer), hint=f"`culm mail status {question.id}` says more")
        else:
            TextRenderer().text(
                MessageId(reply.id), answer if answer.endswith("\n") else f"{answer}\n"
            )
    except asyncio.CancelledError:
        return EXIT_CANCELED
    except CannotWrite as exc:
        return let_go(exc)
    return EXIT_FAILED if failed else 0


class MailAsker:
    def __init__(self, sending: MailOptions, timeout_s: float) -> None:
        self._address = f"{OUTSIDE}{Ids().letter()}"  # The server does not read it.
        self._timeout_s = timeout_s
        # Nobody wants it read when nobody waits for the answer.
        self._sending = replace(sending, kind="ask", from_=self._address, expires_s=timeout_s)
        self._task: asyncio.Task[object] | None = None
        self._is_cancelled = False

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    async def ask(self) -> tuple[Letter, Letter]:
        """The question and its reply; raises `AppError`."""
        self._task = asyncio.current_task()
        if self._is_cancelled:  # Before the first step.
            raise asyncio.CancelledError
        to = check_recipient(self._sending.project, self._sending.to)
        self._sending = replace(self._sending, to=to)
        post = self._sending.project.post()
        try:
            mailbox = post.make(self._address)
            question = deliver(self._sending)
            return question, await self._answer(mailbox, question)
        finally:
            with suppress(AppError):  # What is left of it is seen by `culm doctor`.
                post.remove(self._address)

    async def _answer(self, mailbox: Mailbox, question: Letter) -> Letter:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._timeout_s
        sending = self._sending
        rung = await ring(sending.server, sending.project, sending.to, os.environ)
        words = "no server runs; waiting for one that answers" if rung is NOBODY else rung.text
        if words:
            click.echo(printable(f"({words})"), err=True)
        while (reply := _find_reply(mailbox, question)) is None:
            left_s = end_s - loop.time()
            if left_s <= 0:
                raise ReplyTimeout(question.id, self._timeout_s, rung)
            await asyncio.sleep(min(left_s, LOOK_EVERY_S))
        return reply


def _find_reply(mailbox: Mailbox, question: Letter) -> Letter | None:
    """What else is in the mailbox goes with it."""
    for claim in mailbox.claim(REPLIES_MAX):
        letter = claim.letter
        if letter.kind == "reply" and letter.correlation_id == question.id:
            mailbox.ack(claim)
            return letter
    return None
