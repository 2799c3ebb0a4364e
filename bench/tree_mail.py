"""Letters compared with a minimal durable file, for `tree.py`. All calls block on the disk."""

import os
import time
from pathlib import Path

from msgspec import Struct, field

from culm.clock import LoopClock
from culm.ids import LetterId
from culm.mail.base import Mailbox
from culm.mail.letters import Letter, Sender, body_of, encode_letter
from culm.mail.maildir import MaildirPostOffice

TEXT = "Please look at the second part as well, and say what you find. " * 4


class Letters(Struct):
    """Times of letters in µs, and of plain files."""

    ours: list[float] = field(default_factory=list[float])  # From delivery to acknowledgement.
    delivered: list[float] = field(default_factory=list[float])  # Of that, the delivery ...
    acked: list[float] = field(default_factory=list[float])  # ... and the acknowledgement.
    plain: list[float] = field(default_factory=list[float])
    lost: int = 0  # Letters that differ from what was delivered.


def measure(folder: Path, letters: int) -> Letters:
    """Alternate between both, so that they share the load of the disk."""
    mailbox = MaildirPostOffice(folder / "mailboxes", LoopClock()).make("agent")
    found = Letters()
    plain = folder / "plain"
    for part in ("tmp", "new"):
        (plain / part).mkdir(parents=True)
    for number in range(letters):
        letter = _letter(number)
        data = encode_letter(letter)
        _deliver_and_ack(mailbox, letter, found)
        start_ns = time.perf_counter_ns()
        write_durably(plain, letter.id, data)
        found.plain.append((time.perf_counter_ns() - start_ns) / 1e3)
        (plain / "new" / letter.id).unlink()
    return found


def _letter(number: int) -> Letter:
    return Letter(
        id=LetterId(f"55555555-5555-4555-8555-{number:012d}"),
        from_=Sender("66666666-6666-4666-8666-666666666666"),
        kind="task",
        body=body_of("task", TEXT),
        created_at="2026-01-01T00:00:00Z",
    )


def _deliver_and_ack(mailbox: Mailbox, letter: Letter, found: Letters) -> None:
    start_ns = time.perf_counter_ns()
    mailbox.deliver(letter)
    delivered_ns = time.perf_counter_ns()
    claims = mailbox.claim(1)
    claimed_ns = time.perf_counter_ns()
    is_right = [claim.letter for claim in claims] == [letter] and mailbox.ack(claims[0])
    end_ns = time.perf_counter_ns()
    found.ours.append((end_ns - start_ns) / 1e3)
    found.delivered.append((delivered_ns - start_ns) / 1e3)
    found.acked.append((end_ns - claimed_ns) / 1e3)
    found.lost += not is_right


def write_durably(folder: Path, name: str, data: bytes) -> None:
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
