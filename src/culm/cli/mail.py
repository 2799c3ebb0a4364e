"""`culm mail send`, `status`, `list`: letters without a server, straight from and into mailboxes.

Owns what a letter of a person or a program looks like. Waiting for an answer is `mail_ask.py`'s.
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import click
import msgspec

from culm.cli.mail_look import UnreadLetter, addresses_in, find_in, letters_in
from culm.cli.mail_place import KnownProject, check_recipient
from culm.cli.mail_ring import ring
from culm.cli.names import NEAREST_MAX, short_ids
from culm.cli.render.call_lines import head_of
from culm.cli.render.text import age_text, table
from culm.cli.terminal.streams import output_width
from culm.client.launch import ServerRequest
from culm.clock import LoopClock
from culm.errors import InvalidRequest, NotFound
from culm.fleet.times import format_time
from culm.ids import Ids
from culm.mail.base import check_address
from culm.mail.letters import LETTER_BYTES_MAX, Letter, Sender, body_of
from culm.store.base import Connection
from culm.store.letters import find_letter, list_letters
from culm.store.runs import find_run
from culm.wire.agents import LETTERS_SHOWN, OUTSIDE, PERSON, LetterKind, LetterShown
from culm.wire.codec import printable

LIST_HEAD = ("letter", "kind", "from", "to", "state", "age", "text")


@dataclass(frozen=True, slots=True)
class MailOptions:
    """What `culm mail` was asked to deliver."""

    project: KnownProject
    server: ServerRequest
    to: str
    text: str
    kind: LetterKind = "task"
    from_: str = ""  # The mailbox that an answer goes to.
    expires_s: float | None = None


def send_letter(sending: MailOptions) -> None:
    """Deliver, print its id, ring; raises `AppError` if nothing was delivered."""
    if sending.from_:
        check_address(sending.from_)
    sending = replace(sending, to=check_recipient(sending.project, sending.to))
    letter = deliver(sending)
    click.echo(letter.id)
    rung = asyncio.run(ring(sending.server, sending.project, sending.to, os.environ))
    if rung.text:
        click.echo(printable(f"({rung.text})"), err=True)


def deliver(sending: MailOptions) -> Letter:
    """To whom was checked. When this returns it survives a crash; raises `AppError`."""
    now_s = LoopClock().now_s()
    expires_s = sending.expires_s
    letter = Letter(
        id=Ids().letter(),
        from_=Sender(session_id=sending.from_ or PERSON, agent_id=sending.from_ or None),
        kind=sending.kind,
        body=body_of(sending.kind, sending.text),
        created_at=format_time(now_s),
        expires_at=None if expires_s is None else format_time(now_s + expires_s),
    )
    sending.project.post().make(sending.to).deliver(letter)
    return letter


def text_given(words: Sequence[str]) -> str:
    """What the letter says; `-` is what stands on stdin. Raises `InvalidRequest`."""
    if list(words) != ["-"]:
        text = " ".join(words)
    elif sys.stdin is None:
        raise InvalidRequest("there is no stdin to read the text from")
    else:
        # One byte too many is refused as any letter that is too large.
        text = sys.stdin.buffer.read(LETTER_BYTES_MAX + 1).decode(errors="replace")
    if not text.strip():
        raise InvalidRequest("there is nothing to say", hint="give a text, or - to read stdin")
    return text


def show_status(project: KnownProject, letter_id: str, to: str, *, as_json: bool) -> None:
    """What became of a letter; raises `NotFound`, `InvalidRequest`, `UnsafeAddress`."""
    letter = _find(project, letter_id, to) or _find_begun(project, letter_id, to)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(letter), indent=2))
    else:
        answer = f" by {letter.answer_id}" if letter.answer_id else ""
        click.echo(f"{letter.state}{answer}")


def _find(project: KnownProject, letter_id: str, to: str) -> LetterShown | None:
    """As the server noted it; one that no server has seen lies in a mailbox."""
    addresses = [check_address(to)] if to else addresses_in(project.mailboxes)
    noted = project.read(find_letter(letter_id))
    if noted is not None and (not to or noted.to == to):
        return noted
    for address in addresses:
        if (found := find_in(project.mailboxes, address, letter_id)) is not None:
            return found
    return None


def _find_begun(project: KnownProject, beginning: str, to: str) -> LetterShown:
    """The one of those that are listed whose id begins so."""
    listed = [one.shown for one in _letters_of(project, "") if to in ("", one.shown.to)]
    found = [one for one in listed if beginning and one.letter_id.startswith(beginning)]
    if len(found) == 1:
        return found[0]
    if found:
        words = f"{len(found)} letters begin with {printable(beginning)}"
        ids = ", ".join(one.letter_id for one in found[:NEAREST_MAX])
        raise InvalidRequest(words, hint=printable(f"which one: {ids}"))
    raise NotFound(
        f"no letter of this project has the id {printable(beginning)}",
        hint="`culm mail list` shows those there are",
    )


def show_letters(project: KnownProject, agent: str, *, as_json: bool) -> None:
    """The latest first, all or those of one agent; raises `NotFound`, `InvalidRequest`."""
    if agent and agent != PERSON and not agent.startswith(OUTSIDE):  # Who has no mailbox here.
        agent = check_recipient(project, agent)
    letters = _letters_of(project, agent)
    if as_json:
        shown = [one.shown for one in letters]
        click.echo(msgspec.json.format(msgspec.json.encode(shown), indent=2))
    elif letters:
        now_s = LoopClock().now_s()
        short = short_ids([one.shown.letter_id for one in letters])
        who = short_ids([name for one in letters for name in (one.shown.from_, one.shown.to)])
        rows = [_row(one, short, who, now_s) for one in letters]
        click.echo("\n".join(table(LIST_HEAD, rows, output_width())))
    else:
        click.echo("there are no letters", err=True)


def _letters_of(project: KnownProject, agent: str) -> list[UnreadLetter]:
    """Those the server has noted, and before them those that it has not seen yet."""
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
    """As the prompt of the run that brought it begins, without who wrote it."""
    run = find_run(letter.run_id)(connection) if letter.run_id else None
    return "" if run is None else run.prompt.partition("]")[2].strip()


def _row(
    one: UnreadLetter, short: Mapping[str, str], who: Mapping[str, str], now_s: float
) -> Sequence[str]:
    letter = one.shown
    from_, to = (PERSON if name == PERSON else who[name] for name in (letter.from_, letter.to))
    age = age_text(now_s - letter.created_at)
    text = head_of(one.text) or "-"
    return short[letter.letter_id], letter.kind, from_, to, letter.state, age, text
