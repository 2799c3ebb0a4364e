"""Workspaces that cannot be opened: the client reads the cause."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from culm.clock import LoopClock
from culm.errors import DataUnusable
from culm.ids import Ids
from culm.settings import Settings
from culm.store.memory import MemoryFile
from culm.store.store import open_memory_store
from culm.wire.workspaces import CreateWorkspace
from culm.workspace.claims import WorkspaceFate
from culm.workspace.registry import open_registry
from culm.workspace.roots import WorkspaceInfo
from culm.workspace.workspace import LiveWorkspace, open_workspace
from tests.support import WAIT_S, fixed_origins, make_services


async def test_disk_that_is_full_during_recovery_is_named(tmp_path: Path) -> None:
    clock, ids = LoopClock(), Ids()

    @asynccontextmanager
    async def open_on_a_full_disk(
        about: WorkspaceInfo,
        env: Mapping[str, str],
        on_fate: Callable[[WorkspaceFate], None],
    ) -> AsyncGenerator[LiveWorkspace]:
        async with open_memory_store(file, clock, ids) as store:
            file.full = True
            services = make_services(clock, ids)
            async with open_workspace(
                about, store, fixed_origins(), services, on_fate, env=env
            ) as workspace:
                yield workspace

    with closing(MemoryFile()) as file:
        async with (
            asyncio.timeout(WAIT_S),
            open_registry(
                open_on_a_full_disk, tmp_path, Settings(), clock, lambda: None
            ) as registry,
        ):
            with pytest.raises(DataUnusable, match="database or disk is full"):
                await registry.create(CreateWorkspace(path=str(tmp_path)), ids.client())
