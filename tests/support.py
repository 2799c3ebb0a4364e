"""Helpers of all tests: contract ids, a fake clock, a limit for every wait."""

import heapq
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from culm.clock import Clock, LoopClock
from culm.config.checking import Document
from culm.config.documents import DocumentFile
from culm.config.sources import FixedSources
from culm.fleet.host.caller import HostCallbacks, RunControl
from culm.fleet.host.run_driver import RunResult
from culm.fleet.protocol.frames import RunSpec
from culm.fleet.provision import Provision
from culm.ids import Ids
from culm.mail.memory import MemoryPostOffice
from culm.model.base import LanguageModel
from culm.model.choice import ChosenModel, MakeModel
from culm.model.local_servers import FoundProviders
from culm.processes.base import NoProcesses
from culm.run.project_context import ContextPaths, ProjectContext
from culm.services import ServerServices
from culm.settings import ServeOptions, Settings
from culm.tools.base import CallRequest, CallResult, QuestionPlan, Tool
from culm.tools.files.file_executor import WALL_S, FileExecutor
from culm.workspace.claims import WorkspaceFate
from culm.workspace.config import ConfigOrigins

# Scale of randomized tests: seeds, examples, kinds of sockets. `./check --broad` sets more,
# `./check --fast` less.
BREADTH = float(os.environ.get("CULM_BREADTH", "1"))

# The limit of every wait in a test, so that a hang fails with its place. It is not a promise of
# speed: half a second on an idle machine has become five on a busy one.
WAIT_S = 20.0


T = TypeVar("T")


def contract(*ids: str) -> pytest.MarkDecorator:
    """Tie a test to the ids in docs/contract/ that it verifies."""
    return pytest.mark.contract(*ids)


def _nothing() -> None:
    pass


@dataclass(order=True)
class FakeTimer:
    at_s: float
    number: int
    action: Callable[[], None] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        self.cancelled = True
        self.action = _nothing  # As loops do, which may keep the timer until it is due.


class FakeClock:
    """A clock that moves only when a test advances it."""

    def __init__(self, now_s: float = 1_800_000_000.0) -> None:
        self._now_s = now_s  # Monotonic.
        self._set_by_s = 0.0
        self._timers: list[FakeTimer] = []
        self._count = 0

    def now_s(self) -> float:
        return self._now_s + self._set_by_s

    def monotonic_s(self) -> float:
        return self._now_s

    def set_time(self, by_s: float) -> None:
        """Change the time of day, as a person or a time server does; no timer notices it."""
        self._set_by_s += by_s

    def call_later(self, delay_s: float, action: Callable[[], None]) -> FakeTimer:
        self._count += 1
        timer = FakeTimer(self._now_s + delay_s, self._count, action)
        heapq.heappush(self._timers, timer)
        return timer

    def advance(self, seconds: float) -> None:
        """Let time pass and fire all due timers in order."""
        end_s = self._now_s + seconds
        while self._timers and self._timers[0].at_s <= end_s:
            timer = heapq.heappop(self._timers)
            self._now_s = max(self._now_s, timer.at_s)
            if not timer.cancelled:
                timer.action()
        self._now_s = end_s

    def armed(self) -> int:
        return sum(not timer.cancelled for timer in self._timers)


def fixed_origins(config: Document | None = None) -> ConfigOrigins:
    """A fixed configuration with the content `config`."""
    documents = DocumentFile(Path("/nowhere")), DocumentFile(Path("/nowhere"))
    return ConfigOrigins(FixedSources(config or {}), documents, find_no_providers)


async def find_no_providers(env: Mapping[str, str]) -> FoundProviders:
    return FoundProviders({})


def serve_options(
    folder: Path,
    *hosts: str,
    settings: Settings | None = None,
    config: Mapping[str, object] | None = None,
) -> ServeOptions:
    """Options of a server with all files in `folder`; `config` becomes the user's file.

    It starts no process that no test has asked for.
    """
    file = folder / "culm.json"
    if config is not None:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(config))
    return ServeOptions(
        data_dir=folder / "data",
        hosts=hosts,
        settings=msgspec.structs.replace(settings or Settings(), prepare_workers_s=0.0),
        config_file=file,
    )


def model_config(url: str, **info: object) -> dict[str, object]:
    """A configuration with one model of one provider at `url`."""
    chosen = {"model": "demo-1", "provider": "demo"}
    about = {"id": "demo-1", "name": "Demo One", "context_window": 200_000, **info}
    provider = {"type": "openai-compat", "base_url": url, "api_key": "k", "models": [about]}
    return {"models": {"large": chosen, "small": chosen}, "providers": {"demo": provider}}


# A configuration in which even the embedded model is disabled.
NO_MODEL: Mapping[str, object] = {"providers": {"offline": {"disable": True}}}


def no_model(_: ChosenModel) -> LanguageModel:
    raise AssertionError("this test must not call a model")


async def no_project_context(path: Path, paths: ContextPaths, now_s: float) -> ProjectContext:
    return ProjectContext(str(path))


async def run_directly(job: Callable[[], T]) -> T:
    return job()


class NoFleet:
    """A fleet for tests without agents."""

    async def run(
        self, provision: Provision, spec: RunSpec, callbacks: HostCallbacks, controls: RunControl
    ) -> RunResult:
        raise AssertionError("this test must not start an agent")


def make_services(
    clock: Clock,
    ids: Ids,
    settings: Settings | None = None,
    make_model: MakeModel = no_model,
    *tools: Tool,
) -> ServerServices:
    """The services of a workspace without a directory and without agents."""
    by_name = {tool.spec.name: tool for tool in tools}
    post = MemoryPostOffice(clock)
    return ServerServices(
        settings=settings or Settings(),
        clock=clock,
        ids=ids,
        env={},
        processes=NoProcesses(),
        executor=FileExecutor(LoopClock(), WALL_S),
        run_blocking=run_directly,
        make_model=make_model,
        make_tools=lambda context, jobs: by_name,
        read_project_context=no_project_context,
        fleet=NoFleet(),
        discovery_dir=Path("/nowhere"),
        make_post=lambda folder: post,
    )


def ignore_fate(fate: WorkspaceFate) -> None:
    """For tests that close their workspace themselves."""


async def run_call(tool: Tool, call: CallRequest) -> CallResult:
    """Run a call that needs no permission and return its result."""
    plan = await tool.prepare(call)
    assert not isinstance(plan, QuestionPlan)
    return plan if isinstance(plan, CallResult) else await plan.run(lambda _: None)
