"""CPU cost of one more event in the real hub with free writes, for any number of streams."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from bench import frames
from culm.clock import LoopClock
from culm.config.documents import DocumentFile
from culm.config.sources import FixedSources
from culm.events.hub import Hub
from culm.events.views import Filter
from culm.ids import Ids, MessageId, SessionId, WorkspaceId
from culm.model.base import LanguageModel
from culm.model.choice import ChosenModel
from culm.model.local_servers import FoundProviders
from culm.processes.base import NoProcesses
from culm.run.project_context import ContextPaths, ProjectContext
from culm.settings import Settings
from culm.store.memory import MemoryFile
from culm.store.store import open_memory_store
from culm.tools.files.file_executor import WALL_S, FileExecutor
from culm.workspace.config import ConfigOrigins
from culm.workspace.roots import WorkspaceInfo
from culm.workspace.toolbox import ServerServices
from culm.workspace.workspace import open_workspace

EVENTS = 32  # More than one, to separate the cost of an event from that of a turn.
_SESSION = SessionId("01234567-0123-0123-0123-0123456789ab")


class NullTransport:
    def write(self, data: bytes) -> None: ...

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None: ...


def _document() -> DocumentFile:
    return DocumentFile(Path("/"))


async def _find_no_providers(env: Mapping[str, str]) -> FoundProviders:
    return FoundProviders({})


async def _no_project_context(path: Path, paths: ContextPaths, now_s: float) -> ProjectContext:
    return ProjectContext(str(path))


def _no_model(_: ChosenModel) -> LanguageModel:
    raise AssertionError("no model is called here")


async def event_us(streams: int, turns: int) -> float:
    """Return the CPU time in µs that an event adds to a turn with this many streams."""
    file, clock, ids = MemoryFile(), LoopClock(), Ids()
    about = WorkspaceInfo(WorkspaceId("bench"), Path("/"), "/", Path("/"))
    async with (
        open_memory_store(file, clock, ids) as store,
        open_workspace(
            about,
            store,
            ConfigOrigins(FixedSources({}), (_document(), _document()), _find_no_providers),
            ServerServices(
                _no_model,
                lambda context, jobs: {},
                _no_project_context,
                {},
                NoProcesses(),
                FileExecutor(clock, WALL_S),
            ),
            clock,
            ids,
            Settings(),
        ) as workspace,
    ):
        hub = workspace.hub
        for _ in range(streams):
            subscriber = hub.join(NullTransport(), "delta", Filter(sessions=frozenset({_SESSION})))
            hub.go_live(subscriber)
        extra: list[float] = []
        for _ in range(turns):
            one, many = _turn_s(hub, 1), _turn_s(hub, 1 + EVENTS)
            extra.append((many - one) / EVENTS * 1e6)
            await asyncio.sleep(0)  # Lets the hub's own callbacks, now without work, run.
    file.close()
    return median(extra)


def _turn_s(hub: Hub, events: int) -> float:
    text = frames.text(0, frames.MORE)
    start_s = time.thread_time()
    for n in range(events):
        hub.publish_delta(frames.delta(MessageId(f"{_SESSION[:-2]}{n:02d}"), _SESSION, 1000, text))
    hub.flush()
    return time.thread_time() - start_s
