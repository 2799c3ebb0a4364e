"""Files of a session: versions, read times, and deletion with the session."""

from datetime import UTC, datetime

import pytest

from culm.client.http import RequestRefused
from culm.client.workspace import RemoteWorkspace
from culm.ids import Ids, SessionId
from culm.store.sessions import add_file
from culm.wire.codec import decode
from culm.wire.messages import File, ReadFile
from tests.flow.conftest import FlowServer
from tests.flow.drive import UNKNOWN, open_events
from tests.support import contract


async def opened(flow: FlowServer) -> tuple[RemoteWorkspace, SessionId]:
    remote = await (await flow.client()).open_workspace(flow.directory())
    return remote, (await remote.create_session("one")).id


async def write(flow: FlowServer, remote: RemoteWorkspace, sid: SessionId, path: str) -> File:
    unit = add_file(Ids().file(), sid, path, f"in {sid}")
    return await flow.workspace(remote.id).store.write(unit)


async def read(remote: RemoteWorkspace, sid: str, path: str) -> None:
    await remote.client.request("POST", remote.path("/filetracker/read"), ReadFile(sid, path))


async def test_file_versions_increase_across_sessions_and_are_published(
    flow: FlowServer,
) -> None:
    remote, one = await opened(flow)
    two = (await remote.create_session("two")).id
    async with open_events(flow, remote, view="crush") as stream:
        first, second = [await write(flow, remote, sid, "/p/a") for sid in (one, two)]
        other = await write(flow, remote, one, "/p/b")
        third = await write(flow, remote, one, "/p/a")
        await stream.until(third.id.encode())
        published = [decode(t.payload, File) for t in stream.events() if t.type == "file"]
    assert published == [first, second, other, third]
    assert [file.version for file in published] == [0, 1, 0, 2]
    path = remote.path(f"/sessions/{one}/history")
    assert await remote.client.ask("GET", path, list[File]) == [first, other, third]


async def test_file_event_is_replayed_from_its_table(flow: FlowServer) -> None:
    remote, sid = await opened(flow)
    cursor = (await remote.snapshot()).cursor
    file = await write(flow, remote, sid, "/p/a")
    async with open_events(flow, remote, cursor=cursor) as stream:
        await stream.until(file.id.encode())
        (published,) = [decode(t.payload, File) for t in stream.events() if t.type == "file"]
    assert published == file


async def test_read_files_of_a_session_are_listed_latest_first_with_times(flow: FlowServer) -> None:
    remote, sid = await opened(flow)
    for path in ("/p/a", "/p/b", "/p/a"):
        await read(remote, sid, path)
    files = remote.path(f"/sessions/{sid}/filetracker/files")
    assert await remote.client.ask("GET", files, list[str]) == ["/p/a", "/p/b"]
    when = remote.path(f"/filetracker/lastread?session_id={sid}&path=/p/b")
    now = datetime.fromtimestamp(flow.clock.now_s(), UTC)
    assert await remote.client.ask("GET", when, datetime) == now
    never = remote.path(f"/filetracker/lastread?session_id={sid}&path=/p/c")
    assert await remote.client.request("GET", never) == b'"0001-01-01T00:00:00Z"\n'


async def test_files_are_deleted_with_their_session(flow: FlowServer) -> None:
    remote, sid = await opened(flow)
    await write(flow, remote, sid, "/p/a")
    await read(remote, sid, "/p/a")
    await remote.delete_session(sid)
    for path in ("history", "filetracker/files"):
        found = await remote.client.request("GET", remote.path(f"/sessions/{sid}/{path}"))
        assert found == b"[]\n"


@contract("EXC-24")
@pytest.mark.parametrize(
    ("sid", "path", "status"),
    [(UNKNOWN, "/p/a", 404), ("", "/p/a", 404), (None, "", 400), (None, "p/a", 400),
     (None, "/" + "x" * 4096, 400)],
)  # fmt: skip
async def test_read_mark_without_a_session_or_absolute_path_is_refused(
    flow: FlowServer, sid: str | None, path: str, status: int
) -> None:
    remote, known = await opened(flow)
    with pytest.raises(RequestRefused) as refused:
        await read(remote, known if sid is None else sid, path)
    assert refused.value.status == status
    assert await remote.client.request(
        "GET", remote.path(f"/sessions/{known}/filetracker/files")
    ) == b"[]\n"  # fmt: skip
