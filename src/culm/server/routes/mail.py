"""Letters between agents, and from people to them."""

from culm.server.api import Route
from culm.wire.agents import LetterShown, ReplyToLetter, Ring, RingProject, SendLetter
from culm.wire.queries import MailQuery
from culm.workspace.registry import Registry
from culm.workspace.workspace import LiveWorkspace


async def list_letters(workspace: LiveWorkspace, query: MailQuery) -> list[LetterShown]:
    """List letters, or those to and from one agent, the latest first."""
    return await workspace.agents.outbox.list(query.agent)


async def send_letter(workspace: LiveWorkspace, body: SendLetter) -> LetterShown:
    """Write to an agent; one that sleeps is woken by it."""
    return await workspace.agents.send_letter(body)


async def get_letter(workspace: LiveWorkspace, letter_id: str) -> LetterShown:
    """Say what became of a letter."""
    return await workspace.agents.outbox.get(letter_id)


async def reply_to_letter(
    workspace: LiveWorkspace, letter_id: str, body: ReplyToLetter
) -> LetterShown:
    """Answer a letter; the first reply counts as its answer."""
    return await workspace.agents.reply_to_letter(letter_id, body)


async def ring(workspace: LiveWorkspace, body: Ring) -> None:
    """Look into a mailbox now, or into all: somebody has delivered without the server."""
    await workspace.agents.ring(body.agent)


async def ring_project(registry: Registry, body: RingProject) -> None:
    """As ring, for a project that may not be open; if it is known, it is opened."""
    await registry.ring(body.path, body.agent)


_M = "/v1/workspaces/{workspace_id}/mail"

ROUTES = [
    Route("GET", _M, list_letters),
    Route("POST", _M, send_letter, status=202),
    Route("POST", f"{_M}/ring", ring),
    Route("GET", f"{_M}/letters/{{letter_id}}", get_letter),
    Route("POST", f"{_M}/letters/{{letter_id}}/reply", reply_to_letter, status=202),
    Route("POST", "/v1/mail/ring", ring_project),
]
