"""`culm mail ask`: send a question to an agent and wait for the reply.

Owns the mailbox for the reply, from before the question is delivered until the command ends,
however it ends.
"""

import asyncio
import os
from contextlib import suppress
from dataclasses import replace

import click
import msgspec

from culm.cli.exits import EXIT_CANCELED, EXIT_FAILED
from culm.cli.mailboxes import NO_SERVER, MailOptions, RingResult, deliver, ring
from culm.cli.projects import check_recipient
from culm.cli.render.renderers import TextRenderer
from culm.cli.terminal.signals import cancelling
from culm.cli.terminal.streams import CannotWrite, close_output
from culm.errors import AppError, Failed
from culm.ids import Ids, MessageId
from culm.mail.base import Mailbox
from culm.mail.letters import Letter, text_of
from culm.wire.agents import EXTERNAL_PREFIX
from culm.wire.codec import printable

LOOK_EVERY_S = 0.1
REPLIES_MAX = 16  # Claimed at once; there is only one question.


class ReplyTimeout(Failed):
    """No reply arrived in time."""

    code = "no_answer"

    def __init__(self, letter_id: str, timeout_s: float, rung: RingResult) -> None:
        if rung.is_there:
            hint = f"`culm mail status {letter_id}` shows its state; --timeout waits longer"
        else:
            hint = "start a server with `culm serve` and ask again"
        super().__init__(f"no answer to letter {letter_id} within {timeout_s:g} s", hint=hint)


class NoReply(Failed):
    """The agent could not answer."""

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
            raise NoReply(printable(answer), hint=f"`culm mail status {question.id}` shows more")
        else:
            TextRenderer().text(
                MessageId(reply.id), answer if answer.endswith("\n") else f"{answer}\n"
            )
    except asyncio.CancelledError:
        return EXIT_CANCELED
    except CannotWrite as exc:
        return close_output(exc)
    return EXIT_FAILED if failed else 0


class MailAsker:
    """One question and its mailbox."""

    def __init__(self, sending: MailOptions, timeout_s: float) -> None:
        # The prefix keeps the server from reading this mailbox.
        self._address = f"{EXTERNAL_PREFIX}{Ids().letter()}"
        self._timeout_s = timeout_s
        # The question expires when nobody waits for the answer any more.
        self._sending = replace(sending, kind="ask", from_=self._address, expires_s=timeout_s)
        self._task: asyncio.Task[object] | None = None
        self._is_cancelled = False

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    async def ask(self) -> tuple[Letter, Letter]:
        """Return the question and its reply; raises `AppError`."""
        self._task = asyncio.current_task()
        if self._is_cancelled:  # Canceled before the task began.
            raise asyncio.CancelledError
        to = check_recipient(self._sending.project, self._sending.to)
        self._sending = replace(self._sending, to=to)
        post = self._sending.project.post()
        try:
            mailbox = post.make(self._address)
            question = deliver(self._sending)
            return question, await self._answer(mailbox, question)
        finally:
            with suppress(AppError):  # `culm doctor` reports a mailbox that is left behind.
                post.remove(self._address)

    async def _answer(self, mailbox: Mailbox, question: Letter) -> Letter:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._timeout_s
        sending = self._sending
        rung = await ring(sending.server, sending.project, sending.to, os.environ)
        note = "no server is running; waiting for one" if rung is NO_SERVER else rung.text
        if note:
            click.echo(printable(f"({note})"), err=True)
        while (reply := _find_reply(mailbox, question)) is None:
            left_s = end_s - loop.time()
            if left_s <= 0:
                raise ReplyTimeout(question.id, self._timeout_s, rung)
            await asyncio.sleep(min(left_s, LOOK_EVERY_S))
        return reply


def _find_reply(mailbox: Mailbox, question: Letter) -> Letter | None:
    """The reply, if it has arrived; other letters are removed with the mailbox."""
    for claim in mailbox.claim(REPLIES_MAX):
        letter = claim.letter
        if letter.kind == "reply" and letter.correlation_id == question.id:
            mailbox.ack(claim)
            return letter
    return None
