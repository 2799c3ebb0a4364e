"""What may be told twice, to servers that die of it."""

import pytest

from culm.client.follow_run import retry_idempotent
from culm.client.http import RequestRefused, open_client
from culm.client.workspace import RemoteWorkspace
from culm.ids import SessionId, WorkspaceId
from culm.wire.config import Config
from culm.wire.workspaces import CreateWorkspace, Workspace
from tests.client.test_transport import OK, Peer, open_hostile

GONE = (
    b"HTTP/1.1 404 Not Found\r\nContent-Length: 47\r\n\r\n"
    b'{"message":"gone","code":"workspace_not_found"}'
)
TAKEN = b'HTTP/1.1 409 Conflict\r\nContent-Length: 34\r\n\r\n{"message":"no","code":"conflict"}'
INFO = Workspace(WorkspaceId("w"), "/", Config())


async def test_a_prompt_is_told_again_to_a_server_that_died_of_it_and_forgot_the_workspace() -> (
    None
):
    told: list[bytes] = []

    async def serve(peer: Peer) -> None:
        told.append(peer.asked.partition(b" HTTP")[0])
        match len(told):
            case 1:
                peer.reset()
            case 2:
                await peer.say(GONE)
            case 3:
                info = b'{"id":"other","path":"/","config":{}}'
                await peer.say(OK + b"Content-Length: %d\r\n\r\n" % len(info) + info)
            case _:
                await peer.say(OK + b"Content-Length: 0\r\n\r\n")

    async with open_hostile(serve) as url, open_client(url) as client:
        workspace = RemoteWorkspace(client, CreateWorkspace(), INFO)
        await retry_idempotent(
            workspace, lambda: workspace.prompt(SessionId("s"), "Hi.", run_id="r")
        )
    prompt = b"POST /v1/workspaces/%s/agent"
    assert told == [prompt % b"w", prompt % b"w", b"POST /v1/workspaces", prompt % b"other"]


async def test_what_a_server_refuses_is_told_once() -> None:
    told: list[bytes] = []

    async def serve(peer: Peer) -> None:
        told.append(peer.asked)
        await peer.say(TAKEN)

    async with open_hostile(serve) as url, open_client(url) as client:
        workspace = RemoteWorkspace(client, CreateWorkspace(), INFO)
        with pytest.raises(RequestRefused):
            await retry_idempotent(workspace, lambda: workspace.cancel_run("r"))
    assert len(told) == 1
