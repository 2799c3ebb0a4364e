"""`culm mail send`, `status`, `list`: letters without a server, straight from and into mailboxes.

Owns what a letter of a person or a program looks like. Waiting for an answer is `mail_ask.py`'s.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import click
import msgspec

from culm.cli.lines import columns
from culm.cli.mail_look import addresses_in, find_in, letters_in
from culm.cli.mail_place import Project, check_recipient
from culm.cli.mail_ring import ring
from culm.client.launch import Wanted
from culm.clock import LoopClock
from culm.errors import InvalidRequest, NotFound
from culm.fleet.mailbox.base import check_address
from culm.fleet.mailbox.letters import LETTER_BYTES_MAX, Letter, Sender, body_of
from culm.fleet.times import format_time
from culm.ids import Ids
from culm.store.letters import find_letter, list_letters
from culm.wire.agents import LETTERS_SHOWN, PERSON, LetterKind, LetterShown
from culm.wire.codec import printable


@dataclass(frozen=True, slots=True)
class Sending:
    """What `culm mail` was asked to deliver."""

    project: Project
    server: Wanted
    to: str
    text: str
    kind: LetterKind = "task"
    from_: str = ""  # The mailbox that an answer goes to.
    expires_s: float | None = None


def send_letter(sending: Sending) -> None:
    """Deliver, print its id, ring; raises `AppError` if nothing was delivered."""
    if sending.from_:
        check_address(sending.from_)
    sending = replace(sending, to=check_recipient(sending.project, sending.to))
    letter = deliver(sending)
    click.echo(letter.id)
    rung = asyncio.run(ring(sending.server, sending.project, sending.to, os.environ))
    if rung.words:
        click.echo(printable(f"({rung.words})"), err=True)


def deliver(sending: Sending) -> Letter:
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


def show_status(project: Project, letter_id: str, to: str, *, as_json: bool) -> None:
    """What became of a letter; raises `NotFound`, `UnsafeAddress`."""
    letter = _find(project, letter_id, to)
    if letter is None:
        raise NotFound(
            printable(f"no letter of this project has the id {letter_id}"),
            hint="`culm mail list` shows those there are",
        )
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(letter), indent=2))
    else:
        answer = f" by {letter.answer_id}" if letter.answer_id else ""
        click.echo(f"{letter.state}{answer}")


def _find(project: Project, letter_id: str, to: str) -> LetterShown | None:
    """As the server noted it; one that no server has seen lies in a mailbox."""
    addresses = [check_address(to)] if to else addresses_in(project.mailboxes)
    noted = project.read(find_letter(letter_id))
    if noted is not None and (not to or noted.to == to):
        return noted
    for address in addresses:
        if (found := find_in(project.mailboxes, address, letter_id)) is not None:
            return found
    return None


def show_letters(project: Project, agent: str, *, as_json: bool) -> None:
    """The latest first: those the server has noted, and those that it has not seen yet."""
    noted = project.read(list_letters(agent, LETTERS_SHOWN))
    known = {letter.letter_id for letter in noted}
    waiting = [
        letter
        for address in addresses_in(project.mailboxes)
        for letter in letters_in(project.mailboxes, address)
        if letter.letter_id not in known and agent in ("", letter.to, letter.from_)
    ]
    waiting.sort(key=lambda letter: letter.created_at, reverse=True)
    letters = [*waiting, *noted][:LETTERS_SHOWN]
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(letters), indent=2))
    elif letters:
        head = ("letter", "state", "kind", "from", "to", "answer")
        click.echo("\n".join(columns([head, *map(_row, letters)])))
    else:
        click.echo("there are no letters", err=True)


def _row(letter: LetterShown) -> Sequence[str]:
    answer = letter.answer_id or "-"
    return letter.letter_id, letter.state, letter.kind, letter.from_, letter.to, answer
