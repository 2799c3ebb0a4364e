"""Tell the server that a letter is there. One that is not there finds it when it starts."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from culm.cli.mail_place import KnownProject
from culm.client.launch import ServerRequest, find_token, is_answered

RING_S = 5.0  # The letter is safe; whoever rings does not wait for a server that is stuck.


@dataclass(frozen=True, slots=True)
class RingResult:
    is_there: bool  # Whether a server is, whatever it says.
    text: str = ""  # What the sender should know.


NOBODY = RingResult(is_there=False, text="no server runs; it is read when one does")


async def ring(
    server: ServerRequest, project: KnownProject, agent: str, env: Mapping[str, str]
) -> RingResult:
    """Ring once; whatever comes of it is no error."""
    if server.can_start and not is_answered(server.url):
        return NOBODY
    from culm.client.http import RequestRefused, open_client

    token = find_token(server, None, env)
    try:
        async with asyncio.timeout(RING_S), open_client(server.url, token=token) as client:
            await client.ring(str(project.path), agent)
    except RequestRefused as exc:
        return RingResult(is_there=True, text=f"the server at {server.url} says: {exc.message}")
    except OSError as exc:  # A time-out is one.
        reason = str(exc) or "it does not answer"
        return RingResult(is_there=True, text=f"cannot ring the server at {server.url}: {reason}")
    return RingResult(is_there=True)
