"""One directory is one workspace: creation, data directories, and exit of the server."""

import asyncio
from pathlib import Path

import pytest

from culm.client.http import Client, RequestRefused
from culm.client.workspace import RemoteWorkspace
from culm.ids import Ids
from culm.settings import Settings
from culm.wire.workspaces import CreateWorkspace, Workspace
from tests.flow.conftest import FlowServer, open_flow
from tests.flow.drive import (
    UNKNOWN,
    closed,
    held_database,
    is_locked,
    open_events,
    send,
    status_of,
    until,
    until_creating,
    until_lingering,
)
from tests.support import WAIT_S, contract

NO_LINGER = Settings(linger_s=0)


def data(flow: FlowServer) -> Path:
    return flow.folder / "data"


async def used_once(flow: FlowServer, name: str) -> Path:
    """A directory with an existing database and a closed workspace."""
    client = await flow.client()
    remote = await client.open_workspace(flow.directory(name))
    await remote.release()
    await closed(flow, remote)
    await until(lambda: not is_locked(data(flow)) or bool(flow.server.registry.list()))
    return flow.directory(name)


@contract("INV-1")
@pytest.mark.parametrize(
    ("path", "client_id"),
    [("", UNKNOWN), ("/tmp", ""), ("/tmp", "me"), ("/tmp", "0" * 31), ("/t\0mp", UNKNOWN)],
)
async def test_create_without_path_or_client_uuid_is_400_and_registers_nothing(
    flow: FlowServer, path: str, client_id: str
) -> None:
    answer = await send(flow, "POST", "/v1/workspaces", {"path": path, "client_id": client_id})
    assert answer.status == 400
    assert (await send(flow, "GET", "/v1/workspaces")).body == b"[]\n"


@contract("INV-1")
@pytest.mark.parametrize("path", ["\\ud800", "a" * 5000])
async def test_create_with_an_impossible_path_is_not_an_internal_error(
    flow: FlowServer, path: str
) -> None:
    body = f'{{"path": "/tmp/{path}", "client_id": "{UNKNOWN}"}}'.encode()
    answer = await send(flow, "POST", "/v1/workspaces", body)
    assert b"internal" not in answer.body
    assert answer.status < 500


@contract("INV-2")
async def test_two_clients_of_one_path_share_a_workspace_that_either_keeps_open(
    flow: FlowServer,
) -> None:
    a, b = await flow.client(), await flow.client()
    here, there = await a.open_workspace(flow.directory()), await b.open_workspace(flow.directory())
    assert here.info == there.info
    await here.release()
    assert await status_of(b, there.path()) == 200
    await there.release()
    assert await status_of(b, there.path()) == 404


@contract("INV-3")
async def test_symlink_and_its_target_are_one_workspace(flow: FlowServer) -> None:
    client = await flow.client()
    target = flow.directory()
    link = flow.folder / "link"
    link.symlink_to(target)
    through_link = await client.open_workspace(link)
    assert (await client.open_workspace(target)).id == through_link.id
    assert (await client.open_workspace(link / ".." / "project")).id == through_link.id


@contract("INV-3")
async def test_nonexistent_path_is_accepted_in_its_absolute_form(
    flow: FlowServer,
) -> None:
    client = await flow.client()
    nowhere = await client.open_workspace(flow.folder / "nowhere")
    same = await client.create(
        CreateWorkspace(path=f"{flow.folder}/x/../nowhere/", client_id=client.id)
    )
    assert same.id == nowhere.id
    assert nowhere.info.path == str(flow.folder / "nowhere")


@contract("INV-4")
async def test_retiring_a_client_of_one_path_does_not_affect_another(flow: FlowServer) -> None:
    a, b = await flow.client(), await flow.client()
    left = await a.open_workspace(flow.directory("left"))
    right = await b.open_workspace(flow.directory("right"))
    assert left.id != right.id
    async with open_events(flow, right) as events:
        await a.retire()
        assert await status_of(b, left.path()) == 404
        session = await right.create_session("still here")
        await events.until(session.id.encode())


@contract("INV-5")
async def test_parallel_creates_of_one_path_share_a_workspace_with_both_claims(
    tmp_path: Path, kind: str
) -> None:
    async with open_flow(tmp_path, kind, settings=NO_LINGER) as flow:
        supervisor = await (await flow.client()).open_workspace(flow.directory("other"))
        path = await used_once(flow, "project")
        a, b = await flow.client(), await flow.client()
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
            with held_database(data(flow), path):
                opening = [tasks.create_task(c.open_workspace(path)) for c in (a, b)]
                await until_creating(flow, path, 2)
                assert not any(task.done() for task in opening)
        here, there = (task.result() for task in opening)
        assert here.id == there.id
        await supervisor.release()
        await here.release()
        assert await status_of(b, there.path()) == 200
        await there.release()
        async with asyncio.timeout(WAIT_S):
            await flow.left.wait()
        assert flow.leave_calls == 1
        assert not is_locked(data(flow))


@contract("INV-6")
async def test_repeated_create_by_one_client_is_one_claim(flow: FlowServer) -> None:
    client = await flow.client()
    remote = await client.open_workspace(flow.directory())
    await client.open_workspace(flow.directory())
    await remote.release()
    assert await status_of(client, remote.path()) == 404


@contract("INV-7")
async def test_options_of_later_creates_are_ignored(
    flow: FlowServer,
) -> None:
    a, b = await flow.client(), await flow.client()
    path = str(flow.directory())
    create = CreateWorkspace(
        path=path, client_id=a.id, debug=True, data_dir=str(flow.folder / "one")
    )
    first = await a.create(create)
    other = CreateWorkspace(
        path=path, client_id=b.id, yolo=True, data_dir=str(flow.folder / "two"), env=["X=1"]
    )
    assert await b.create(other) == first
    assert (first.yolo, first.debug) == (False, True)
    assert not (flow.folder / "two").exists()


@contract("INV-8")
async def test_create_with_other_channels_is_409_and_registers_nobody(
    flow: FlowServer,
) -> None:
    a, b = await flow.client(), await flow.client()
    path = str(flow.directory())
    first = await a.create(CreateWorkspace(path=path, client_id=a.id, channels=["x", "y"]))
    for channels in ([], ["x"], ["y", "x"]):
        with pytest.raises(RequestRefused, match="channels") as refused:
            await b.create(CreateWorkspace(path=path, client_id=b.id, channels=channels))
        assert refused.value.status == 409
    assert await a.workspaces() == [first]
    await a.request("DELETE", f"/v1/workspaces/{first.id}?client_id={a.id}")
    assert await a.workspaces() == []  # If b were registered, it would still be open.


@contract("INV-19")
async def test_retired_client_loses_every_claim_and_cannot_create(
    flow: FlowServer,
) -> None:
    a, b = await flow.client(), await flow.client()
    alone = await a.open_workspace(flow.directory("alone"))
    shared = await a.open_workspace(flow.directory("shared"))
    await b.open_workspace(flow.directory("shared"))
    await a.retire()
    await a.retire()
    assert await status_of(b, alone.path()) == 404
    assert await status_of(b, shared.path()) == 200
    for name in ("alone", "shared", "new"):
        with pytest.raises(RequestRefused, match="retired") as refused:
            await a.open_workspace(flow.directory(name))
        assert refused.value.status == 409
    assert [w.id for w in await b.workspaces()] == [shared.id]


@contract("INV-20")
async def test_create_of_a_client_that_retires_meanwhile_is_409_and_leaves_nothing(
    flow: FlowServer,
) -> None:
    path = await used_once(flow, "project")
    a = await flow.client()
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        with held_database(data(flow), path):
            creating = tasks.create_task(refusal(a, path))
            await until(lambda: is_locked(data(flow)))
            await a.retire()
    assert creating.result().status == 409
    assert await a.workspaces() == []
    await until(lambda: not is_locked(data(flow)))


async def refusal(client: Client, path: Path) -> RequestRefused:
    with pytest.raises(RequestRefused) as refused:
        await client.open_workspace(path)
    return refused.value


@contract("INV-20")
async def test_create_survives_the_retirement_of_another_waiting_client(
    flow: FlowServer,
) -> None:
    path = await used_once(flow, "project")
    a, b = await flow.client(), await flow.client()
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        with held_database(data(flow), path):
            refused = tasks.create_task(refusal(a, path))
            joining = tasks.create_task(b.open_workspace(path))
            await until_creating(flow, path, 2)
            await a.retire()
    assert refused.result().status == 409
    assert await status_of(b, joining.result().path()) == 200
    await joining.result().release()
    assert await b.workspaces() == []


@contract("INV-21")
async def test_release_of_an_unknown_or_released_workspace_is_200(
    flow: FlowServer,
) -> None:
    a, b = await flow.client(), await flow.client()
    remote = await a.open_workspace(flow.directory())
    await a.request("DELETE", f"/v1/workspaces/{UNKNOWN}?client_id={a.id}")
    await a.request("DELETE", remote.path(f"?client_id={b.id}"))
    assert await status_of(a, remote.path()) == 200
    await remote.release()
    await remote.release()
    assert await status_of(a, remote.path()) == 404


@contract("INV-24")
async def test_server_does_not_exit_during_a_create(tmp_path: Path, kind: str) -> None:
    async with open_flow(tmp_path, kind, settings=NO_LINGER) as flow:
        supervisor = await (await flow.client()).open_workspace(flow.directory("other"))
        path = await used_once(flow, "project")
        joining_client = await flow.client()
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
            with held_database(data(flow), path):
                joining = tasks.create_task(joining_client.open_workspace(path))
                await until_creating(flow, path, 1)
                await supervisor.release()
                await closed(flow, supervisor)
                await flow.run_ready()
                assert not flow.left.is_set()
                assert (await send(flow, "POST", "/v1/control", SHUTDOWN)).status == 409
        assert await status_of(joining_client, joining.result().path()) == 200
        assert not flow.left.is_set()
        await joining.result().release()
        async with asyncio.timeout(WAIT_S):
            await flow.left.wait()


SHUTDOWN = {"command": "shutdown_if_idle", "server": "culm"}


@contract("INV-24")
async def test_failed_create_on_an_idle_server_lets_it_exit(tmp_path: Path, kind: str) -> None:
    async with open_flow(tmp_path, kind, settings=NO_LINGER) as flow:
        (flow.folder / "file").write_text("not a directory")
        client = await flow.client()
        with pytest.raises(RequestRefused):
            await client.open_workspace(flow.directory(), data_dir=str(flow.folder / "file"))
        async with asyncio.timeout(WAIT_S):
            await flow.left.wait()
        assert flow.leave_calls == 1


@contract("INV-25")
async def test_create_during_the_linger_cancels_the_exit(flow: FlowServer) -> None:
    client = await flow.client()
    remote = await client.open_workspace(flow.directory())
    await remote.release()
    await closed(flow, remote)
    await until_lingering(flow)
    flow.clock.advance(59)
    again = await client.open_workspace(flow.directory())
    async with open_events(flow, again):
        flow.clock.advance(600)
        await flow.run_ready()
        assert not flow.left.is_set()
    await again.release()
    await closed(flow, again)
    await until_lingering(flow)
    flow.clock.advance(59.9)
    assert not flow.left.is_set()
    flow.clock.advance(0.1)
    await until(flow.left.is_set)
    assert flow.leave_calls == 1


@contract("INV-25")
async def test_refused_create_does_not_extend_the_linger(flow: FlowServer) -> None:
    client, gone = await flow.client(), await flow.client()
    await gone.retire()
    remote = await client.open_workspace(flow.directory())
    await remote.release()
    await closed(flow, remote)
    await until(lambda: not is_locked(data(flow)))
    flow.clock.advance(59)
    with pytest.raises(RequestRefused, match="retired"):
        await gone.open_workspace(flow.directory())
    flow.clock.advance(1)
    assert flow.left.is_set()


@contract("INV-26")
async def test_shutdown_is_refused_while_hosting_and_final_once_granted(flow: FlowServer) -> None:
    client = await flow.client()
    remote = await client.open_workspace(flow.directory())
    for command in ("shutdown", "shutdown_if_idle"):
        answer = await send(flow, "POST", "/v1/control", {"command": command, "server": "culm"})
        assert (answer.status, b"hosting live workspaces" in answer.body) == (409, True)
    await client.open_workspace(flow.directory("second"))  # Nothing was latched.
    assert not flow.left.is_set()
    await client.retire()
    await closed(flow, remote)
    other = await flow.client()
    await other.shut_down()
    with pytest.raises(RequestRefused, match="shutting down") as refused:
        await other.open_workspace(flow.directory())
    assert refused.value.status == 503
    await until(flow.left.is_set)
    await other.shut_down()


@contract("INV-26")
async def test_attached_client_of_an_exiting_server_gets_503_not_404(
    flow: FlowServer,
) -> None:
    client = await flow.client()
    remote = await client.open_workspace(flow.directory())
    assert (await send(flow, "GET", "/v1/workspaces/unknown")).status == 404
    await flow.server.registry.close()
    assert (await send(flow, "GET", f"/v1/workspaces/{remote.id}")).status == 503
    assert flow.leave_calls == 1


@contract("EXC-21")
async def test_environment_of_a_create_is_neither_returned_nor_stored(
    flow: FlowServer,
) -> None:
    client = await flow.client()
    secret = "s3cr3t-value-of-a-key"
    remote = await client.open_workspace(flow.directory(), env={"API_KEY": secret})
    session = await remote.create_session("s")
    paths = ["", "/config", "/snapshot?sessions=*", "/agent", f"/sessions/{session.id}"]
    answers = [await client.request("GET", remote.path(path)) for path in paths]
    created = await send(
        flow, "POST", "/v1/workspaces",
        {"path": str(flow.directory()), "client_id": client.id, "env": [f"API_KEY={secret}"]},
    )  # fmt: skip
    answers += [created.body, await client.request("GET", "/v1/workspaces")]
    assert not [answer for answer in answers if secret.encode() in answer or b'"env"' in answer]
    files = [file for file in flow.folder.rglob("*") if file.is_file()]
    assert not [file for file in files if secret.encode() in file.read_bytes()]


@contract("INV-7")
async def test_returned_data_dir_finds_the_same_sessions_when_sent_again(
    flow: FlowServer,
) -> None:
    client = await flow.client()
    own = await client.open_workspace(flow.directory(), data_dir=str(flow.folder / "own"))
    session = await own.create_session("kept")
    assert own.info.data_dir == own.info.config.options.data_directory == str(flow.folder / "own")
    await own.release()
    await closed(flow, own)
    again = await client.open_workspace(flow.directory(), data_dir=own.info.data_dir)
    assert again.info == own.info
    assert await again.sessions() == [session]


@contract("INV-7")
@pytest.mark.parametrize("spelling", ["link", "x/../real", "real/"])
async def test_returned_data_dir_is_the_resolved_path(flow: FlowServer, spelling: str) -> None:
    (flow.folder / "link").symlink_to(flow.directory("real"))
    flow.directory("x")
    client = await flow.client()
    data_dir = f"{flow.folder}/{spelling}"
    remote = await client.open_workspace(flow.directory(), data_dir=data_dir)
    assert remote.info.data_dir == str(flow.folder / "real")
    assert remote.info.config.options.data_directory == remote.info.data_dir


@contract("INV-7")
async def test_default_data_dir_is_returned_and_accepted_when_sent_again(
    flow: FlowServer,
) -> None:
    client = await flow.client()
    remote = await client.open_workspace(flow.directory())
    assert remote.info.data_dir == str(data(flow))
    answer = await create_again(client, remote)
    assert answer == remote.info
    assert sorted(file.name for file in data(flow).glob("projects/*/culm.db")) == ["culm.db"]


async def create_again(client: Client, remote: RemoteWorkspace) -> Workspace:
    await remote.release()
    info = remote.info
    create = CreateWorkspace(path=info.path, client_id=client.id, data_dir=info.data_dir)
    return await client.create(create)


@contract("INV-28")
async def test_data_directory_is_private_and_ignored_by_git(flow: FlowServer) -> None:
    client = await flow.client()
    await client.open_workspace(flow.directory(), data_dir=str(flow.folder / "own"))
    root = flow.folder / "own"
    assert root.stat().st_mode & 0o777 == 0o700
    assert (root / ".gitignore").read_text() == "*\n"
    assert {f.stat().st_mode & 0o077 for f in root.glob("projects/*/culm.db*")} == {0}


@contract("INV-3")
async def test_workspace_keeps_its_id_across_teardown_and_restart(
    tmp_path: Path, kind: str
) -> None:
    async with open_flow(tmp_path, kind) as flow:
        first = await (await flow.client()).open_workspace(flow.directory())
        session = await first.create_session("kept")
    async with open_flow(tmp_path, kind) as flow:
        again = await (await flow.client(Ids().client())).open_workspace(flow.directory())
        assert again.id == first.id
        assert [s.id for s in await again.sessions()] == [session.id]
