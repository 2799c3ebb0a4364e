"""Letters beside the least that is as durable, for `tree.py`. All of it blocks as the disk does."""

import os
import time
from pathlib import Path

from msgspec import Struct

from culm.clock import LoopClock
from culm.ids import LetterId
from culm.mail.base import Mailbox
from culm.mail.letters import Letter, Sender, body_of, encode_letter
from culm.mail.maildir import MaildirPostOffice

TEXT = "Please look at the second part as well, and say what you find. " * 4


class Letters(Struct):
    """One letter from its delivery to its end, in µs, and the same bytes put down plainly."""

    ours: list[float]
    plain: list[float]
    lost: int  # Letters that were not what was delivered.


def measure(folder: Path, letters: int) -> Letters:
    """Each in turn, to share what the disk is busy with."""
    mailbox = MaildirPostOffice(folder / "mailboxes", LoopClock()).make("agent")
    found = Letters([], [], 0)
    plain = folder / "plain"
    for part in ("tmp", "new"):
        (plain / part).mkdir(parents=True)
    for number in range(letters):
        letter = _letter(number)
        data = encode_letter(letter)
        start_ns = time.perf_counter_ns()
        is_right = _pass_on(mailbox, letter)
        between_ns = time.perf_counter_ns()
        put_down(plain, letter.id, data)
        end_ns = time.perf_counter_ns()
        (plain / "new" / letter.id).unlink()
        found.ours.append((between_ns - start_ns) / 1e3)
        found.plain.append((end_ns - between_ns) / 1e3)
        found.lost += not is_right
    return found


def _letter(number: int) -> Letter:
    return Letter(
        id=LetterId(f"55555555-5555-4555-8555-{number:012d}"),
        from_=Sender("66666666-6666-4666-8666-666666666666"),
        kind="task",
        body=body_of("task", TEXT),
        created_at="2026-01-01T00:00:00Z",
    )


def _pass_on(mailbox: Mailbox, letter: Letter) -> bool:
    mailbox.deliver(letter)
    claims = mailbox.claim(1)
    return [claim.letter for claim in claims] == [letter] and mailbox.ack(claims[0])


def put_down(folder: Path, name: str, data: bytes) -> None:
    """Write, fsync, rename, fsync of the directory."""
    temporary = folder / "tmp" / name
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(file, data)
        os.fsync(file)
    finally:
        os.close(file)
    temporary.rename(folder / "new" / name)
    directory = os.open(folder / "new", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
