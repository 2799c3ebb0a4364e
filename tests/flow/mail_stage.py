"""Mailboxes of a stage's project, as a program outside sees them; and what the server says."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from culm.fleet.times import format_time
from culm.ids import LetterId, SessionId
from culm.mail.base import Mailbox
from culm.mail.letters import Letter, Sender, body_of
from culm.mail.maildir import MaildirPostOffice
from culm.wire.agents import LetterKind, LetterShown
from culm.wire.messages import full_text
from culm.workspace.roots import project_folder
from tests.flow.agents_stage import AgentStage
from tests.support import WAIT_S

OUTSIDE = "cli-program"


def project_of(stage: AgentStage) -> Path:
    return project_folder(stage.flow.folder / "data", stage.flow.directory())


def post_of(stage: AgentStage) -> MaildirPostOffice:
    return MaildirPostOffice(project_of(stage) / "mailboxes", stage.clock)


def letter(
    stage: AgentStage,
    letter_id: str,
    *,
    kind: LetterKind = "task",
    from_: str = "",
    expires_s: float = 0.0,
    answers: str | None = None,
) -> Letter:
    """Says `@` and its id, so that a model can be told what to answer."""
    now_s = stage.clock.now_s()
    return Letter(
        id=LetterId(letter_id),
        from_=Sender(session_id=from_ or "person", agent_id=from_ or None),
        kind=kind,
        body=body_of(kind, f"@{letter_id}"),
        created_at=format_time(now_s),
        expires_at=format_time(now_s + expires_s) if expires_s else None,
        correlation_id=answers,
    )


def deliver(stage: AgentStage, to: str, *letters: Letter) -> Mailbox:
    """As a program does that rings nobody."""
    box = post_of(stage).make(to)
    for one in letters:
        box.deliver(one)
    return box


async def ring(stage: AgentStage, to: str = "") -> None:
    answer = await stage.request("POST", "/mail/ring", {"agent": to})
    assert answer.status == 200, answer


async def letters_of(stage: AgentStage) -> dict[str, LetterShown]:
    return {one.letter_id: one for one in await stage.ask("/mail", list[LetterShown])}


async def until_state(stage: AgentStage, letter_id: str, *states: str) -> LetterShown:
    async with asyncio.timeout(WAIT_S):
        while True:
            found = (await letters_of(stage)).get(letter_id)
            if found is not None and found.state in states:
                return found
            await asyncio.sleep(0.002)


async def read_in(stage: AgentStage, session_id: str | None = None) -> list[str]:
    """The ids of the letters in a conversation, in order."""
    found = await stage.remote.messages(SessionId(session_id or stage.session_id))
    said = [full_text(message.parts) for message in found if message.role == "user"]
    return [text.split()[1] for text in said if text.startswith("[Letter ")]


def replies_in(box: Mailbox) -> Sequence[Letter]:
    """What came to a program outside; it is taken out."""
    claims = box.claim(100)
    for claim in claims:
        box.ack(claim)
    return [claim.letter for claim in claims]
