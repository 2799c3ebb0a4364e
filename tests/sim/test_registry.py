"""Workspaces, claims and timers under many seeds: opened once, closed once, in time."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from culm.errors import (
    ClientRetired,
    Conflict,
    DataUnusable,
    ServerInUse,
    ShuttingDown,
    WorkspaceNotFound,
)
from culm.ids import ClientId, Ids
from culm.settings import Settings
from culm.store.memory import MemoryFile
from culm.store.store import open_memory_store
from culm.wire.workspaces import CreateWorkspace
from culm.workspace import claims
from culm.workspace.registry import Registry, open_registry
from culm.workspace.roots import WorkspaceInfo
from culm.workspace.workspace import LiveWorkspace, open_workspace
from tests.sim.loop import SEEDS_MAX, SimClock, SimLoop, simulate
from tests.support import contract, fixed_origins, make_services

PATHS = ("/simulated/a", "/simulated/b")
STEPS = 60
SETTINGS = Settings(create_grace_s=3.0, detach_grace_s=1.0, linger_s=2.0)


@dataclass
class Opener:
    """Opens workspaces on memory files and checks that each file has one owner at a time."""

    loop: SimLoop
    files: dict[Path, MemoryFile] = field(default_factory=dict[Path, MemoryFile])
    open_now: set[Path] = field(default_factory=set[Path])
    opened: int = 0
    closed: int = 0

    @asynccontextmanager
    async def __call__(
        self,
        about: WorkspaceInfo,
        env: Mapping[str, str],
        on_fate: Callable[[claims.WorkspaceFate], None],
    ) -> AsyncGenerator[LiveWorkspace]:
        assert about.path not in self.open_now, "one path was open twice"
        self.open_now.add(about.path)
        self.opened += 1
        clock = SimClock(self.loop)
        ids = Ids(self.opened)
        try:
            await asyncio.sleep(self.loop.random.random() * 0.5)
            if self.loop.random.random() < 0.1:
                raise OSError("no space left on device")
            if about.path not in self.files:
                self.files[about.path] = MemoryFile()
            async with (
                open_memory_store(self.files[about.path], clock, ids) as store,
                open_workspace(
                    about, store, fixed_origins(), make_services(clock, ids, SETTINGS), on_fate
                ) as workspace,
            ):
                yield workspace
            await asyncio.sleep(self.loop.random.random() * 0.5)
        finally:
            self.open_now.discard(about.path)
            self.closed += 1


class Visitor:
    """A client with random operations that checks its claims."""

    def __init__(self, registry: Registry, loop: SimLoop, client_id: ClientId) -> None:
        self.registry = registry
        self.loop = loop
        self.id = client_id
        self.streams: list[tuple[LiveWorkspace, int]] = []
        self.void: set[tuple[LiveWorkspace, int]] = set()  # Streams opened before it retired.
        self.runs: dict[LiveWorkspace, int] = {}

    async def run(self) -> None:
        for _ in range(STEPS):
            await asyncio.sleep(self.loop.random.choice([0, 0.01, 0.3, 1.5]))
            await self._step()
            self._check()
        for stream in self.streams:
            stream[0].lifetime.close_stream(self.id, stream[1])
        for workspace in self.runs:
            workspace.lifetime.apply(claims.RunsChanged(0))

    async def _step(self) -> None:
        roll = self.loop.random.random()
        if roll < 0.35:
            await self._create()
        elif roll < 0.6:
            self._open_stream()
        elif roll < 0.8 and self.streams:
            workspace, birth = self.streams.pop(self.loop.random.randrange(len(self.streams)))
            workspace.lifetime.close_stream(self.id, birth)
        elif roll < 0.88:
            for workspace in self.registry.list():
                self.registry.release(workspace.about.id, self.id)
        elif roll < 0.92:
            self._change_runs()
        elif roll < 0.94:
            self.registry.retire(self.id)
            self.void.update(self.streams)
        elif roll < 0.96:
            with contextlib.suppress(ServerInUse):
                self.registry.request_leave()

    async def _create(self) -> None:
        path = self.loop.random.choice(PATHS)
        try:
            workspace = await self.registry.create(CreateWorkspace(path=path), self.id)
        except (ClientRetired, ShuttingDown, Conflict, DataUnusable):
            return
        assert str(workspace.about.path) == path

    def _open_stream(self) -> None:
        """INV-14: opening succeeds on a live workspace, or the workspace is not found."""
        for workspace in self.registry.list():
            try:
                birth = workspace.lifetime.open_stream(self.id)
            except WorkspaceNotFound:
                assert workspace.lifetime.closing
                continue
            assert self.registry.get(workspace.about.id) is workspace
            self.streams.append((workspace, birth))

    def _change_runs(self) -> None:
        for workspace in self.registry.list():
            live = self.loop.random.choice([0, 1])
            self.runs[workspace] = live
            workspace.lifetime.apply(claims.RunsChanged(live))

    def _check(self) -> None:
        """INV-10: a stream that still counts keeps its workspace."""
        for workspace, birth in self.streams:
            if (workspace, birth) not in self.void:
                assert not workspace.lifetime.closing, "closed under an open stream"
                claim = workspace.lifetime.claims.by_client[self.id]
                assert (claim.claim_id, claim.hold) == (birth, None)
                assert claim.streams > 0


async def one_world(loop: SimLoop) -> None:
    opener = Opener(loop)
    try:
        await live_through(loop, opener)
    finally:
        for file in opener.files.values():
            file.close()


async def live_through(loop: SimLoop, opener: Opener) -> None:
    ids = Ids(loop.random.randrange(1 << 30))
    left: list[float] = []
    async with open_registry(
        opener, Path("/data"), SETTINGS, SimClock(loop), lambda: left.append(loop.time())
    ) as registry:
        visitors = [Visitor(registry, loop, ids.client()) for _ in range(4)]
        async with asyncio.TaskGroup() as tasks:
            for visitor in visitors:
                tasks.create_task(visitor.run())
        assert len(left) <= 1
        # All clients are gone: after graces, linger and teardown the server leaves once.
        await asyncio.sleep(30)
        assert len(left) == 1, "the server stays although nobody needs it"
        assert not opener.open_now
        assert not registry.list()
        with pytest.raises(ShuttingDown):
            await registry.create(CreateWorkspace(path=PATHS[0]), ids.client())
    assert opener.opened == opener.closed
    assert len(left) == 1


@contract("INV-5", "INV-9", "INV-10", "INV-13", "INV-14", "INV-20", "INV-23", "INV-24", "INV-25")
@pytest.mark.parametrize("seed", range(SEEDS_MAX))
def test_workspace_lives_exactly_as_long_as_it_is_needed(seed: int) -> None:
    simulate(seed, one_world)


# --- ablation


def fails_somewhere() -> bool:
    for seed in range(60):
        try:
            simulate(seed, one_world)
        except (AssertionError, BaseExceptionGroup):
            return True
    return False


def test_simulation_detects_an_old_timer_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    original = claims.on_claim

    def careless(
        known: claims.Claims, what: claims.Input, graces: claims.Graces
    ) -> claims.ClaimStep:
        if isinstance(what, claims.HoldExpired):
            what = claims.Retired(what.client_id)
        return original(known, what, graces)

    monkeypatch.setattr(claims, "on_claim", careless)
    monkeypatch.setattr(claims.WorkspaceLifetime, "_arm", _arm_without_cancel)
    assert fails_somewhere()


def _arm_without_cancel(self: claims.WorkspaceLifetime, arm: claims.ArmTimer) -> None:
    clock = self._clock  # pyright: ignore[reportPrivateUsage]
    clock.call_later(arm.delay_s, lambda: self.apply(arm.then))
