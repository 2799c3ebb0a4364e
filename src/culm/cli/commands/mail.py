"""`culm mail`: send letters to agents, and list them, with or without a server.

A question has a mailbox of its own for the reply, from before it is delivered until the command
ends, however it ends. `projects.py` delivers.
"""

import asyncio
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

import click
import msgspec
from msgspec.structs import replace

from culm.cli.groups import CommandGroup
from culm.cli.names import NEAREST_MAX, short_ids
from culm.cli.options import host_option, json_option, project_options
from culm.cli.projects import (
    ASK_S_MAX,
    NO_SERVER,
    KnownProject,
    MailOptions,
    RingResult,
    UnreadLetter,
    addresses_in,
    check_recipient,
    data_dir_of,
    deliver,
    find_in,
    get_project,
    letters_in,
    ring,
)
from culm.cli.prompt_options import read_text
from culm.cli.render.renderers import TextRenderer
from culm.cli.render.text import age_text, head_of, table
from culm.cli.terminal.process import (
    EXIT_CANCELED,
    EXIT_FAILED,
    CannotWrite,
    cancelling,
    close_output,
    output_width,
    print_json,
    require_output,
)
from culm.client.launch import ServerRequest
from culm.clock import LoopClock
from culm.errors import AppError, Failed, InvalidRequest, NotFound
from culm.ids import Ids, MessageId
from culm.mail.base import Mailbox, check_address
from culm.mail.letters import LETTER_BYTES_MAX, Letter, text_of
from culm.settings import default_host
from culm.store.base import Connection
from culm.store.letters import find_letter, list_letters
from culm.store.runs import find_run
from culm.wire.agents import (
    EXPIRES_S_MAX,
    EXTERNAL_PREFIX,
    LETTERS_SHOWN,
    PERSON,
    LetterKind,
    LetterShown,
)
from culm.wire.codec import printable

ASK_S = 600  # A turn with a few calls takes minutes.
LOOK_EVERY_S = 0.1
REPLIES_MAX = 16  # Claimed at once; there is only one question.
LIST_HEAD = ("letter", "kind", "from", "to", "state", "age", "text")
_TO_HELP = "Agent or session: its id, the beginning of it, or its title. See `culm agents`."
_server_option = host_option("Server to notify, as for `culm run`; no server is started.")


def _project(directory: Path, data_dir: Path | None) -> KnownProject:
    return get_project(directory, data_dir_of(data_dir, os.environ))


def _server(host: str | None, data_dir: Path | None) -> ServerRequest:
    return ServerRequest(host or default_host(os.environ), data_dir)


@click.group(cls=CommandGroup)
def mail() -> None:
    """Send letters to agents, with or without a running server.

    A letter wakes an idle agent. Without a running server it waits for one.

    \b
    Example:
      culm agents
      culm mail send --to 68263f22 look at the last commit
      culm mail ask --to 68263f22 what did you find?
    """


@mail.command()
@click.argument("words", nargs=-1, required=True, metavar="TEXT...")
@click.option("--to", required=True, metavar="NAME", help=_TO_HELP)
@click.option(
    "--kind",
    type=click.Choice(["task", "handoff"]),
    default="task",
    show_default=True,
    help="A task to do, or a handoff of work done so far.",
)
@click.option("--from", "from_", default="", metavar="ID", help="Id of the sending agent.")
@click.option(
    "--expires",
    "expires_s",
    type=click.FloatRange(0, EXPIRES_S_MAX, min_open=True),
    metavar="SECONDS",
    help="Time until an unread letter expires.",
)
@_server_option
@project_options
def send(
    words: tuple[str, ...],
    to: str,
    kind: str,
    from_: str,
    expires_s: float | None,
    host: str | None,
    directory: Path,
    data_dir: Path | None,
) -> None:
    """Deliver a letter to an agent and print the letter's id.

    TEXT is the content of the letter; - reads it from stdin. When the command ends, the letter is
    safely on disk, with or without a server.

    \b
    Example:
      culm mail send --to 68263f22 look at the last commit
      git log -1 -p | culm mail send --to 68263f22 --kind handoff -
    """
    letter_kind = cast("LetterKind", kind)  # The option allows a subset.
    project, server = _project(directory, data_dir), _server(host, data_dir)
    expires_s = None if expires_s is None else _finite(expires_s, "--expires")
    text = read_text(words, LETTER_BYTES_MAX)
    send_letter(MailOptions(project, server, to, text, letter_kind, from_, expires_s))


@mail.command()
@click.argument("words", nargs=-1, required=True, metavar="QUESTION...")
@click.option("--to", required=True, metavar="NAME", help=_TO_HELP)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, ASK_S_MAX, min_open=True),
    default=ASK_S,
    show_default=True,
    metavar="SECONDS",
    help="Time to wait for the answer.",
)
@json_option
@_server_option
@project_options
def ask(
    words: tuple[str, ...],
    to: str,
    timeout_s: float,
    as_json: bool,
    host: str | None,
    directory: Path,
    data_dir: Path | None,
) -> None:
    """Ask an agent a question, wait for the answer and print it.

    QUESTION may be - to read it from stdin. Without a running server the question waits for one.
    Ctrl-C ends the wait. A question that is not read before the timeout expires.

    \b
    Exit status:
      0  answered
      1  not answered; see stderr
      2  usage error
      4  canceled

    \b
    Example:
      culm mail ask --to 68263f22 which tests did you run?
    """
    require_output()
    project, server = _project(directory, data_dir), _server(host, data_dir)
    sending = MailOptions(project, server, to, read_text(words, LETTER_BYTES_MAX))
    sys.exit(ask_letter(sending, _finite(timeout_s, "--timeout"), as_json=as_json))


@mail.command()
@click.argument("letter_id", metavar="LETTER")
@click.option("--to", default="", metavar="ID", help="Search only this mailbox.")
@json_option
@project_options
def status(letter_id: str, to: str, as_json: bool, directory: Path, data_dir: Path | None) -> None:
    """Show the state of a letter.

    LETTER is its id or the beginning of it. The state is delivered (it is in the mailbox), admitted
    (the agent has read it), answered (by another letter), expired, or dead (it will not be read).

    \b
    Example:
      culm mail status 0d3a1c52
    """
    project = _project(directory, data_dir)
    letter = _find(project, letter_id, to) or _find_begun(project, letter_id, to)
    if as_json:
        print_json(letter)
    else:
        answer = f" by {letter.answer_id}" if letter.answer_id else ""
        click.echo(f"{letter.state}{answer}")


@mail.command("list")
@click.option("--agent", default="", metavar="NAME", help="Only letters from or to this agent.")
@json_option
@project_options
def list_(agent: str, as_json: bool, directory: Path, data_dir: Path | None) -> None:
    """List the letters of a project, the latest first.

    Each line has the id, kind, sender, recipient, state and age, and the beginning of the text.

    \b
    Example:
      culm mail list --agent 68263f22
    """
    project = _project(directory, data_dir)
    has_mailbox = agent != PERSON and not agent.startswith(EXTERNAL_PREFIX)
    if agent and has_mailbox:
        agent = check_recipient(project, agent)
    letters = _letters_of(project, agent)
    if as_json:
        print_json([one.shown for one in letters])
    elif letters:
        now_s = LoopClock().now_s()
        short = short_ids([one.shown.letter_id for one in letters])
        names = short_ids([name for one in letters for name in (one.shown.from_, one.shown.to)])
        rows = [_row(one, short, names, now_s) for one in letters]
        click.echo("\n".join(table(LIST_HEAD, rows, output_width())))
    else:
        click.echo("no letters", err=True)


def _finite(number: float, option: str) -> float:
    if not math.isfinite(number):
        raise click.UsageError(f"{option} must be a finite number of seconds")
    return number


def send_letter(sending: MailOptions) -> None:
    """Deliver it, print its id and notify the server; raises `AppError` if it was not delivered."""
    if sending.from_:
        check_address(sending.from_)
    sending = replace(sending, to=check_recipient(sending.project, sending.to))
    letter = deliver(sending)
    click.echo(letter.id)
    rung = asyncio.run(ring(sending.server, sending.project, sending.to, os.environ))
    if rung.text:
        click.echo(printable(f"({rung.text})"), err=True)


def _find(project: KnownProject, letter_id: str, to: str) -> LetterShown | None:
    """The letter as the server recorded it, or as it lies in a mailbox if no server has seen it."""
    addresses = [check_address(to)] if to else addresses_in(project.mailboxes)
    noted = project.read(find_letter(letter_id))
    if noted is not None and (not to or noted.to == to):
        return noted
    for address in addresses:
        if (found := find_in(project.mailboxes, address, letter_id)) is not None:
            return found
    return None


def _find_begun(project: KnownProject, beginning: str, to: str) -> LetterShown:
    """The one listed letter whose id has this prefix; raises `NotFound`, `InvalidRequest`."""
    listed = [one.shown for one in _letters_of(project, "") if to in ("", one.shown.to)]
    found = [one for one in listed if beginning and one.letter_id.startswith(beginning)]
    if len(found) == 1:
        return found[0]
    if found:
        message = f"{printable(beginning)!r} is ambiguous ({len(found)} matches)"
        ids = ", ".join(one.letter_id for one in found[:NEAREST_MAX])
        raise InvalidRequest(message, hint=printable(f"which one: {ids}"))
    raise NotFound(
        f"no letter of this project has the id {printable(beginning)}",
        hint="`culm mail list` shows all letters",
    )


def _letters_of(project: KnownProject, agent: str) -> list[UnreadLetter]:
    """Letters that the server has not seen yet, and then those that it recorded."""
    lying = [
        one
        for address in addresses_in(project.mailboxes)
        for one in letters_in(project.mailboxes, address)
    ]
    texts = {one.shown.letter_id: one.text for one in lying}

    def noted(connection: Connection) -> list[UnreadLetter]:
        return [
            UnreadLetter(letter, texts.get(letter.letter_id) or _text_read(connection, letter))
            for letter in list_letters(agent, LETTERS_SHOWN)(connection)
        ]

    known = project.read(noted)
    ids = {one.shown.letter_id for one in known}
    new = [
        one
        for one in lying
        if one.shown.letter_id not in ids and agent in ("", one.shown.to, one.shown.from_)
    ]
    new.sort(key=lambda one: one.shown.created_at, reverse=True)
    return [*new, *known][:LETTERS_SHOWN]


def _text_read(connection: Connection, letter: LetterShown) -> str:
    """The text of a letter that was read: the prompt of its run, without the sender."""
    run = find_run(letter.run_id)(connection) if letter.run_id else None
    return "" if run is None else run.prompt.partition("]")[2].strip()


def _row(
    one: UnreadLetter, short: Mapping[str, str], names: Mapping[str, str], now_s: float
) -> Sequence[str]:
    letter = one.shown
    from_, to = (PERSON if name == PERSON else names[name] for name in (letter.from_, letter.to))
    age = age_text(now_s - letter.created_at)
    text = head_of(one.text) or "-"
    return short[letter.letter_id], letter.kind, from_, to, letter.state, age, text


# --- asking


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
