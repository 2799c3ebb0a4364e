"""Data directories: their lock, their names, and the list of workspaces."""

import asyncio
import shutil
from pathlib import Path

import pytest

from culm.errors import DataLocked
from culm.workspace.roots import (
    DataRoots,
    KnownWorkspace,
    project_key,
    read_workspaces,
    remember_workspace,
)
from tests.support import FakeClock, contract


def test_project_key_is_readable_and_distinct() -> None:
    # FNV-1a 64 of "a" is af63dc4c8601ec8c by its published test vectors.
    assert project_key(Path("a")) == "a-8601ec8c"
    assert project_key(Path("/a b")) != project_key(Path("/a-b"))
    assert len(project_key(Path("/" + "x" * 500)).encode()) < 255


@contract("INV-28")
async def test_lock_of_a_removed_directory_is_retaken_or_refused(tmp_path: Path) -> None:
    root = tmp_path / "data"
    ours, theirs = DataRoots(FakeClock()), DataRoots(FakeClock())
    async with ours.hold(root):
        await asyncio.to_thread(shutil.rmtree, root)
        async with ours.hold(root):
            with pytest.raises(DataLocked):
                async with theirs.hold(root):
                    pass
    async with theirs.hold(root):
        pass


def test_workspace_list_survives_damage_and_repetition(tmp_path: Path) -> None:
    (tmp_path / "workspaces.json").write_text('{"not": "a list"}')
    assert read_workspaces(tmp_path) == []
    for root in ("one", "two", "two"):
        remember_workspace(tmp_path, path=Path("/p"), root=Path(root), workspace_id="id")
    assert read_workspaces(tmp_path) == [KnownWorkspace("/p", "two", "id")]
