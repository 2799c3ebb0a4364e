"""What a worker does from its provision to its end: listen, announce itself, serve, withdraw.

It ends when it has served, when nobody came for long, when it is told to stop, or when its owner
is gone, idle or in the middle of a run. The run is cancelled first, then the record is withdrawn,
then what was started and stored is removed.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from culm.clock import LoopClock
from culm.fleet.discovery.base import Discovery
from culm.fleet.discovery.files import FileDiscovery
from culm.fleet.provision import BadProvision, OwnerStamp, Provision
from culm.fleet.storage import storage_of
from culm.fleet.transport.tls import ServerTls
from culm.fleet.transport.websocket import listen_websocket
from culm.fleet.worker.control import WorkerControl, open_control
from culm.fleet.worker.executors.base import WorkerServices, make_private
from culm.fleet.worker.executors.registry import open_executor
from culm.fleet.worker.lazy_processes import open_lazy_processes
from culm.fleet.worker.limits import mode_of, serving_terms_of
from culm.fleet.worker.owner_watch import owner_gone
from culm.fleet.worker.registration import make_record, open_presence
from culm.fleet.worker.storage import remove_storage
from culm.fleet.worker_server.base import Mode
from culm.fleet.worker_server.modes import serve_on
from culm.ids import Ids
from culm.processes.base import Processes
from culm.processes.client import open_processes


@dataclass(frozen=True, slots=True)
class WorkerEndpoint:
    """How a worker is reached; a provision says nothing of it."""

    host: str = "127.0.0.1"
    port: int = 0
    tls: ServerTls | None = None
    labels: tuple[str, ...] = ()
    mode: Mode | None = None  # Else as the provision's limits have it.
    on_ready: Callable[[str], None] = lambda _: None  # Told the endpoint, once it can be found.
    on_leave: Callable[[], None] = lambda: None  # The end begins.


async def work(
    provision: Provision, stop: asyncio.Event, door: WorkerEndpoint | None = None
) -> None:
    """Serve until the end; raises `BadProvision`, `NobodyCame`, `AppError` and OSError."""
    try:
        await _work(provision, stop, door or WorkerEndpoint())
    except ExceptionGroup as exc:
        # What went wrong has passed the groups of what was open around it, each with its wrapper.
        raise _innermost(exc) from exc


def _innermost(group: ExceptionGroup[Exception]) -> Exception:
    first = group.exceptions[0]
    if isinstance(first, ExceptionGroup):
        return _innermost(cast("ExceptionGroup[Exception]", first))  # Whose are of its kind, too.
    return first


async def _work(provision: Provision, stop: asyncio.Event, door: WorkerEndpoint) -> None:
    clock = LoopClock()
    async with AsyncExitStack() as stack:
        control = await _enter_control(provision, stack)
        discovery = FileDiscovery(Path(provision.fabric_dir), clock)
        services = await stack.enter_async_context(_open_services(provision, control, discovery))
        executor = await stack.enter_async_context(open_executor(provision, services))
        token = provision.secrets.worker_auth_token or None
        listening = listen_websocket(door.host, door.port, token, door.tls)
        listener = await stack.enter_async_context(listening)
        if control is not None:
            control.ready(listener.endpoint)
            door.on_ready(listener.endpoint)
        make = partial(
            *(make_record, provision.identity, door.labels, listener.endpoint),
            *(provision.owner, clock.now_s()),
        )
        # Who waits for the record must find it; who has a control socket does not look.
        presence = open_presence(discovery, make, clock, at_once=control is None)
        await stack.enter_async_context(presence)
        if control is None:
            door.on_ready(listener.endpoint)
        terms = serving_terms_of(provision, clock, services.ids)
        serving = serve_on(listener, executor, door.mode or mode_of(provision), terms)
        gone = _until_owner_gone(control, provision.owner)
        await _until_first(serving, stop.wait(), gone, door.on_leave)


async def _enter_control(provision: Provision, stack: AsyncExitStack) -> WorkerControl | None:
    descriptor = provision.culm.control_fd
    if descriptor is None:
        return None
    try:
        return await stack.enter_async_context(open_control(descriptor))
    except OSError as exc:
        raise BadProvision(f"culm.control_fd is no control socket: {exc.strerror}") from exc


@asynccontextmanager
async def _open_services(
    provision: Provision, control: WorkerControl | None, discovery: Discovery
) -> AsyncGenerator[WorkerServices]:
    clock, ids = LoopClock(), Ids()
    storage = storage_of(provision)

    @asynccontextmanager
    async def open_own() -> AsyncGenerator[Processes]:
        await asyncio.to_thread(make_private, storage)
        async with open_processes(storage, clock, ids) as processes:
            yield processes

    # That of an owner opens nothing before it is needed.
    opening = (
        open_lazy_processes(open_own) if control is None else control.open_processes(clock, ids)
    )
    try:
        async with opening as processes:
            yield WorkerServices(clock, ids, processes, storage)
    finally:
        if storage.exists():
            await asyncio.to_thread(remove_storage, provision, discovery, clock.now_s())


async def _until_owner_gone(control: WorkerControl | None, owner: OwnerStamp | None) -> None:
    """Never returns if that cannot be known."""
    if control is not None:
        await control.gone()
    elif owner is not None:
        await owner_gone(owner)
    else:
        await asyncio.Event().wait()


async def _until_first(
    serving: Coroutine[None, None, None],
    stopped: Coroutine[None, None, object],
    owner_gone: Coroutine[None, None, None],
    on_leave: Callable[[], None],
) -> None:
    """Serve until it is over, or one of the others is."""
    async with asyncio.TaskGroup() as group:
        tasks = {
            group.create_task(serving, name="serve"),
            group.create_task(stopped, name="stop"),
            group.create_task(owner_gone, name="owner"),
        }
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        on_leave()
        for task in tasks:
            task.cancel()
