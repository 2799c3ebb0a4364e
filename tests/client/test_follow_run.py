"""Idempotent requests are retried while the server restarts."""

import pytest

from culm.client.http import RequestRefused, open_client
from culm.client.run import retry_idempotent
from culm.client.workspace import RemoteWorkspace
from culm.ids import SessionId, WorkspaceId
from culm.wire.config import Config
from culm.wire.workspaces import CreateWorkspace, Workspace
from tests.client.test_transport import OK, Peer, open_server

GONE = (
    b"HTTP/1.1 404 Not Found\r\nContent-Length: 47\r\n\r\n"
    b'{"message":"gone","code":"workspace_not_found"}'
)
CONFLICT = b'HTTP/1.1 409 Conflict\r\nContent-Length: 34\r\n\r\n{"message":"no","code":"conflict"}'
INFO = Workspace(WorkspaceId("w"), "/", Config())


async def test_prompt_is_retried_after_a_crash_that_lost_the_workspace() -> None:
    requests: list[bytes] = []

    async def serve(peer: Peer) -> None:
        requests.append(peer.head.partition(b" HTTP")[0])
        match len(requests):
            case 1:
                peer.reset()
            case 2:
                await peer.send(GONE)
            case 3:
                info = b'{"id":"other","path":"/","config":{}}'
                await peer.send(OK + b"Content-Length: %d\r\n\r\n" % len(info) + info)
            case _:
                await peer.send(OK + b"Content-Length: 0\r\n\r\n")

    async with open_server(serve) as url, open_client(url) as client:
        workspace = RemoteWorkspace(client, CreateWorkspace(), INFO)
        await retry_idempotent(
            workspace, lambda: workspace.prompt(SessionId("s"), "Hi.", run_id="r")
        )
    prompt = b"POST /v1/workspaces/%s/agent"
    assert requests == [prompt % b"w", prompt % b"w", b"POST /v1/workspaces", prompt % b"other"]


async def test_refused_request_is_not_retried() -> None:
    requests: list[bytes] = []

    async def serve(peer: Peer) -> None:
        requests.append(peer.head)
        await peer.send(CONFLICT)

    async with open_server(serve) as url, open_client(url) as client:
        workspace = RemoteWorkspace(client, CreateWorkspace(), INFO)
        with pytest.raises(RequestRefused):
            await retry_idempotent(workspace, lambda: workspace.cancel_run("r"))
    assert len(requests) == 1
