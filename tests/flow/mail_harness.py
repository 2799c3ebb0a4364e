"""Mailboxes of the project of a harness, as seen by an outside program and by the server."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from culm.clock import format_time
from culm.ids import LetterId, SessionId
from culm.mail.base import Mailbox
from culm.mail.letters import Letter, Sender, body_of
from culm.mail.maildir import MaildirPostOffice
from culm.wire.agents import LetterKind, LetterShown
from culm.wire.messages import full_text
from culm.workspace.roots import project_folder
from tests.flow.agents_harness import AgentHarness
from tests.support import WAIT_S

OUTSIDE = "cli-program"


def project_of(harness: AgentHarness) -> Path:
    return project_folder(harness.flow.folder / "data", harness.flow.directory())


def post_of(harness: AgentHarness) -> MaildirPostOffice:
    return MaildirPostOffice(project_of(harness) / "mailboxes", harness.clock)


def letter(
    harness: AgentHarness,
    letter_id: str,
    *,
    kind: LetterKind = "task",
    from_: str = "",
    expires_s: float = 0.0,
    answers: str | None = None,
) -> Letter:
    """A letter with `@` and its id as text, so that a scripted model can match it."""
    now_s = harness.clock.now_s()
    return Letter(
        id=LetterId(letter_id),
        from_=Sender(session_id=from_ or "person", agent_id=from_ or None),
        kind=kind,
        body=body_of(kind, f"@{letter_id}"),
        created_at=format_time(now_s),
        expires_at=format_time(now_s + expires_s) if expires_s else None,
        correlation_id=answers,
    )


def deliver(harness: AgentHarness, to: str, *letters: Letter) -> Mailbox:
    """Deliver letters as an outside program that rings nobody."""
    box = post_of(harness).make(to)
    for one in letters:
        box.deliver(one)
    return box


async def ring(harness: AgentHarness, to: str = "") -> None:
    answer = await harness.request("POST", "/mail/ring", {"agent": to})
    assert answer.status == 200, answer


async def letters_of(harness: AgentHarness) -> dict[str, LetterShown]:
    return {one.letter_id: one for one in await harness.ask("/mail", list[LetterShown])}


async def until_state(harness: AgentHarness, letter_id: str, *states: str) -> LetterShown:
    async with asyncio.timeout(WAIT_S):
        while True:
            found = (await letters_of(harness)).get(letter_id)
            if found is not None and found.state in states:
                return found
            await asyncio.sleep(0.002)


async def read_in(harness: AgentHarness, session_id: str | None = None) -> list[str]:
    """The ids of the letters in a conversation, in order."""
    found = await harness.remote.messages(SessionId(session_id or harness.session_id))
    texts = [full_text(message.parts) for message in found if message.role == "user"]
    return [text.split()[1] for text in texts if text.startswith("[Letter ")]


def replies_in(box: Mailbox) -> Sequence[Letter]:
    """Letters delivered to an outside program; removes them from the mailbox."""
    claims = box.claim(100)
    for claim in claims:
        box.ack(claim)
    return [claim.letter for claim in claims]
