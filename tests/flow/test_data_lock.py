"""One lock per data directory, and databases of a newer schema."""

import asyncio
import shutil
import sqlite3
from pathlib import Path

import pytest

from culm.client.http import RequestRefused
from culm.workspace.roots import project_folder
from tests.flow.conftest import FlowServer, open_flow
from tests.flow.drive import closed, is_locked, second_process, until
from tests.support import contract


@contract("INV-28", "EXC-24")
async def test_data_directory_locked_by_another_process_is_409_with_its_pid(
    flow: FlowServer,
) -> None:
    root = flow.folder / "own"
    client = await flow.client()
    async with second_process(root) as (pid, output):
        assert output == "held"
        with pytest.raises(RequestRefused, match=rf"{root}.*pid {pid}\b") as refused:
            await client.open_workspace(flow.directory(), data_dir=str(root))
        assert (refused.value.status, refused.value.code) == (409, "data_locked")
        assert refused.value.hint
        assert await client.workspaces() == []
    await client.open_workspace(flow.directory(), data_dir=str(root))


@contract("INV-28")
async def test_second_process_cannot_lock_a_data_directory_in_use(
    flow: FlowServer,
) -> None:
    root = flow.folder / "own"
    client = await flow.client()
    await client.open_workspace(flow.directory(), data_dir=str(root))
    async with second_process(root) as (_, output):
        assert output.startswith(f"data directory {root} is in use by another process (pid ")


@contract("INV-28")
async def test_data_directory_is_unlocked_after_its_last_workspace_closes(
    flow: FlowServer,
) -> None:
    client = await flow.client()
    root = str(flow.folder / "own")
    one = await client.open_workspace(flow.directory("one"), data_dir=root)
    two = await client.open_workspace(flow.directory("two"), data_dir=root)
    await one.release()
    await closed(flow, one)
    await flow.run_ready()
    assert is_locked(flow.folder / "own")
    await two.release()
    await until(lambda: not is_locked(flow.folder / "own"))
    async with second_process(flow.folder / "own") as (_, output):
        assert output == "held"
    assert (flow.folder / "own" / "culm.lock").exists()


@contract("INV-28")
@pytest.mark.parametrize("value", ["1", "true"])
async def test_culm_no_lock_bypasses_the_lock_of_another_process(
    tmp_path: Path, kind: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CULM_NO_LOCK", value)
    async with second_process(tmp_path / "data") as (_, output):
        assert output == "held"
        async with open_flow(tmp_path, kind) as flow:
            remote = await (await flow.client()).open_workspace(flow.directory())
            await remote.create_session("written all the same")


@contract("EXC-24")
async def test_database_with_a_newer_schema_is_refused_and_unchanged(
    flow: FlowServer,
) -> None:
    client = await flow.client()
    remote = await client.open_workspace(flow.directory())
    await remote.create_session("of today")
    await remote.release()
    await until(lambda: not is_locked(flow.folder / "data"))
    file = project_folder(flow.folder / "data", flow.directory()) / "culm.db"
    set_schema(file, 999)
    before = file.read_bytes()
    with pytest.raises(
        RequestRefused, match=r"newer culm \(schema 999, this version supports \d+\)"
    ) as refused:
        await client.open_workspace(flow.directory())
    assert (refused.value.status, refused.value.code) == (500, "schema_too_new")
    assert str(file) in refused.value.message
    assert file.read_bytes() == before
    assert await client.workspaces() == []
    await until(lambda: not is_locked(flow.folder / "data"))


def set_schema(file: Path, version: int) -> None:
    connection = sqlite3.connect(file)
    try:
        connection.execute(f"PRAGMA user_version = {version}")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        connection.close()


@contract("INV-28")
async def test_workspace_with_its_own_data_dir_does_not_need_the_servers(
    flow: FlowServer,
) -> None:
    client = await flow.client()
    async with second_process(flow.folder / "data") as (_, output):
        assert output == "held"
        root = str(flow.folder / "own")
        remote = await client.open_workspace(flow.directory(), data_dir=root)
        assert await remote.sessions() == []


@contract("INV-28")
async def test_fresh_server_opens_a_workspace_with_its_own_data_dir(flow: FlowServer) -> None:
    client = await flow.client()
    remote = await client.open_workspace(flow.directory(), data_dir=str(flow.folder / "own"))
    assert await remote.sessions() == []


async def test_writes_fail_after_the_data_directory_was_removed(
    flow: FlowServer,
) -> None:
    remote = await (await flow.client()).open_workspace(flow.directory())
    await remote.create_session("kept while it was there")
    await asyncio.to_thread(shutil.rmtree, flow.folder / "data")
    with pytest.raises(RequestRefused) as refused:
        await remote.create_session("written nowhere")
    assert (refused.value.status, refused.value.code) == (503, "store_damaged")
    assert flow.workspace(remote.id).store.health.state == "failing"
