"""Unknown workspaces, sessions and runs, and unusual ids."""

from urllib.parse import quote

import pytest

from culm.ids import SessionId
from culm.server.routes import ROUTES
from culm.store.letters import deleted_mailboxes
from culm.store.sessions import add_session
from tests.flow.conftest import FlowServer
from tests.flow.drive import UNKNOWN, send
from tests.flow.test_bad_bodies import message, open_raw_connection, opened


async def test_unknown_workspace_is_404_on_every_route_except_its_release(flow: FlowServer) -> None:
    async with open_raw_connection(flow) as connection:
        for route in ROUTES:
            if "{workspace_id}" not in route.path:
                continue
            path = route.path.replace("{workspace_id}", UNKNOWN).replace("{session_id}", "s")
            path = path.replace("{lsp}", "x").replace("{run_id}", UNKNOWN)
            path = path.replace("{grant_id}", UNKNOWN)
            target = f"{path}?client_id={UNKNOWN}&name=x"
            answer = await connection.ask(route.method, target, b"{}")
            if (route.method, route.path) == ("DELETE", "/v1/workspaces/{workspace_id}"):
                assert (answer.status, answer.body) == (200, b"")
            else:
                assert (answer.status, message(answer)) == (404, "workspace not found"), path


UNUSUAL_IDS = ["unknown", "a%2Fb", "m$$call", "a%20b", "a+b", "%00", "%zz", "%", "%ff", "%ED%A0%80",
           "%C3%A4", "x" * 10_000, ";", "a%3Fb"]  # fmt: skip
OF_SESSION: list[tuple[str, str, int, object]] = [
    ("GET", "/sessions/{}", 404, None),
    ("PUT", "/sessions/{}", 404, None),
    ("DELETE", "/sessions/{}", 404, None),
    ("GET", "/agent/sessions/{}", 404, None),
    ("GET", "/sessions/{}/history", 200, []),
    ("GET", "/sessions/{}/messages", 200, []),
    ("GET", "/sessions/{}/messages/user", 200, []),
    ("GET", "/sessions/{}/filetracker/files", 200, []),
    ("GET", "/agent/sessions/{}/prompts/list", 200, []),
    ("GET", "/agent/sessions/{}/prompts/queued", 200, 0),
    ("GET", "/agent/sessions/{}/queue", 200, []),
    ("POST", "/agent/sessions/{}/cancel", 200, None),
    ("POST", "/agent/sessions/{}/prompts/clear", 200, None),
]
OF_RUN = [("GET", ""), ("PUT", ""), ("POST", "/cancel"), ("POST", "/start"), ("POST", "/drop")]


@pytest.mark.parametrize("unusual_id", UNUSUAL_IDS, ids=lambda unusual_id: unusual_id[:20])
async def test_unknown_session_is_404_its_lists_are_empty_and_its_cancel_is_200(
    flow: FlowServer, unusual_id: str
) -> None:
    remote = await opened(flow)
    async with open_raw_connection(flow) as connection:
        for method, path, status, value in OF_SESSION:
            answer = await connection.ask(method, remote.path(path.format(unusual_id)), b"{}")
            assert answer.status == status, path
            if status == 404:
                assert message(answer).startswith("session not found: ")
            elif method == "GET":
                assert answer.json() == value
        body = {"session_id": "unknown", "path": "/x"}
        answer = await send(flow, "POST", remote.path("/filetracker/read"), body)
        assert (answer.status, message(answer)) == (404, "session not found: unknown")
        prompt = b'{"session_id": "unknown", "prompt": "p"}'
        answer = await connection.ask("POST", remote.path("/agent"), prompt)
        assert (answer.status, message(answer)) == (404, "session not found: unknown")


@pytest.mark.parametrize("unusual_id", UNUSUAL_IDS, ids=lambda unusual_id: unusual_id[:20])
async def test_unknown_run_is_404_on_every_run_route(flow: FlowServer, unusual_id: str) -> None:
    remote = await opened(flow)
    async with open_raw_connection(flow) as connection:
        for method, path in OF_RUN:
            answer = await connection.ask(
                method, remote.path(f"/runs/{unusual_id}{path}"), b'{"prompt": "p"}'
            )
            assert answer.status == 404, path
            assert message(answer).startswith("run not found: "), path


async def test_runs_are_listed_by_session_and_valid_state(flow: FlowServer) -> None:
    remote = await opened(flow)
    for query in ("", "?session=unknown", "?state=held", "?session=a%20b&state=ended&x=y"):
        answer = await send(flow, "GET", remote.path(f"/runs{query}"))
        assert (answer.status, answer.json()) == (200, []), query
    answer = await send(flow, "GET", remote.path("/runs?state=asleep"))
    assert (answer.status, "state" in message(answer)) == (400, True)


@pytest.mark.parametrize("unusual_id", ["m-1$$call/1", "a b", "ä%20%", "x" * 500, "a;b=c&d?e#f"])
async def test_session_with_an_unusual_id_is_found_by_its_percent_encoding(
    flow: FlowServer, unusual_id: str
) -> None:
    remote = await opened(flow)
    await flow.workspace(remote.id).store.write(
        add_session(SessionId(unusual_id), "s", sessions_max=9)
    )
    assert (await remote.session(SessionId(unusual_id))).id == unusual_id
    path = remote.path(f"/agent/sessions/{quote(unusual_id, safe='')}")
    assert (await send(flow, "GET", path)).status == 200
    await remote.delete_session(SessionId(unusual_id))
    assert await remote.sessions() == []
    # No mailbox can have such an address, so none is left to remove.
    assert await flow.workspace(remote.id).store.read(deleted_mailboxes) == []
