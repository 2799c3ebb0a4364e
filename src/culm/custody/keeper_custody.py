"""Custody with a keeper: the server's side of it.

Owns the keeper, the processes it holds, and what to do when it dies. Made by `open_custody`.
"""

import asyncio
import itertools
import logging
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from culm.clock import Clock
from culm.custody.base import Exit, Held, Order, Process, StartFailed
from culm.custody.inherit import end_inherited
from culm.custody.keeping import Keeping
from culm.custody.kept import Kept
from culm.custody.leftovers import end_leftovers, is_of, make_set
from culm.custody.linux import Stat, become_subreaper, is_subreaper, read_table
from culm.custody.orders import describe_failure, parse_order, title_of
from culm.custody.packets import encode_command, parse_left, receive
from culm.custody.tree import descendants_of
from culm.ids import Ids

_log = logging.getLogger(__name__)

PROCESSES_MAX = 256  # Each is a warden of 3 MB beside the command; a flood is refused.
STARTS_MAX = 16  # At once; so their packets always fit into the keeper's socket.
START_BOUND_S = 10.0  # For the exec, which may have to wait for a slow disk.
LOSS_BOUND_S = 3.0  # For the keeper's word on a warden that died; else the keeper is stuck.
CLOSE_BOUND_S = 5.0  # For the keeper to end; it holds nothing then.


class KeeperCustody:
    """Implements `Custody`."""

    def __init__(self, data_dir: Path, clock: Clock, ids: Ids) -> None:
        self._data_dir = data_dir
        self._clock = clock
        self._ids = ids
        self._numbers = itertools.count(1)
        self._held: dict[int, Kept] = {}
        self._keeper: Keeping | None = None
        self._is_closing = False
        self._dead: asyncio.Queue[Keeping] = asyncio.Queue(1)
        self._idle = asyncio.Event()  # Not while the remains of a keeper are ended.
        self._idle.set()
        self._starts = asyncio.Semaphore(STARTS_MAX)
        self._loop = asyncio.get_running_loop()

    async def start(self, order: Order) -> Held:
        async with self._starts:
            kept = await self._start(order)
            if kept.is_untouched:
                # The keeper died with the order unread: the next one gets it.
                kept = await self._start(order)
        if kept.failure is not None:
            step, number = kept.failure
            raise StartFailed(await asyncio.to_thread(describe_failure, order, step, number))
        if not kept.pid:
            raise StartFailed(
                f"`{order.argv[0]}` was lost while it was started; nothing of it is left"
            )
        return kept

    async def _start(self, order: Order) -> Kept:
        """What became of it, one way or the other."""
        kept = await self._begin(order)
        try:
            async with asyncio.timeout(START_BOUND_S):
                await kept.started.wait()
        except TimeoutError:
            await kept.kill(0)
            raise StartFailed(f"`{order.argv[0]}` did not start in time") from None
        except asyncio.CancelledError:
            await kept.kill(0)  # Bounded; whoever cancelled waits until nothing is left.
            raise
        return kept

    async def processes(self, workspace_id: str) -> list[Process]:
        held = [kept for kept in self._held.values() if _is_of(kept, workspace_id)]
        if not held:
            return []
        found = await asyncio.to_thread(_find_members, held)
        for kept, members in found:
            if kept.is_gone and kept.exit is not None and not members:
                self._held.pop(kept.number, None)  # What was left of it has ended since.
        return [
            self._show(kept, members)
            for kept, members in found
            if kept.is_shown and (members or not kept.is_stopping)
        ]

    async def end_all(self, workspace_id: str) -> list[int]:
        held = [kept for kept in self._held.values() if _is_of(kept, workspace_id)]
        return await self._end(held)

    def warm_nowait(self) -> None:
        """Have a keeper ready: the first start then does not wait for one."""
        if self._keeper is None and self._idle.is_set() and not self._is_closing:
            with suppress(OSError):  # The first start tries again, and says why not.
                self._get_keeper()

    async def close(self) -> None:
        """End everything, verify it, and end the keeper. Bounded."""
        self._is_closing = True
        try:
            left = await self._end(list(self._held.values()))
            await self._idle.wait()
            if (keeper := self._keeper) is not None:
                await self._close_keeper(keeper, left)
        finally:
            # If that was cut short: without these, keeper and wardens end all by themselves.
            if self._keeper is not None:
                self._loop.remove_reader(self._keeper.control)
                self._keeper.control.close()
            for kept in list(self._held.values()):
                kept.close()

    async def watch(self) -> None:
        """Deal with every keeper that dies, one after the other."""
        while True:
            keeper = await self._dead.get()
            try:
                await self._inherit(keeper)
            except Exception:  # boundary: the server lives on, and the next start gets a keeper
                _log.exception("what a dead keeper held could not be dealt with")
            finally:
                self._idle.set()

    async def _begin(self, order: Order) -> Kept:
        """Send the order; from here on the process is held."""
        for _ in range(2):
            await self._idle.wait()
            try:
                return self._send(order)
            except (BrokenPipeError, ConnectionResetError):
                # The keeper died just now, and has read nothing of it: another one gets it.
                if self._keeper is not None:
                    self._drop(self._keeper)
            except OSError as exc:
                words = f"`{order.argv[0]}` could not be started: {exc.strerror}"
                raise StartFailed(words) from exc
        raise StartFailed(f"`{order.argv[0]}` could not be started: its keeper died")

    def _send(self, order: Order) -> Kept:
        if self._is_closing:
            raise StartFailed("the server is stopping")
        if len(self._held) >= PROCESSES_MAX:
            raise StartFailed(f"{PROCESSES_MAX} processes are running already")
        keeper = self._get_keeper()
        number = next(self._numbers)
        body = encode_command(parse_order(order, keeper.set.token(number)))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                keeper.start(number, theirs.fileno(), body, order.descriptors)
            except OSError:
                ours.close()
                raise
        kept = Kept(number, order, ours, keeper.set.mark)
        kept.started_s = order.started_s or self._clock.now_s()
        kept.on_gone = self._on_gone
        kept.on_deaf = self._on_deaf
        self._held[number] = kept
        return kept

    def _get_keeper(self) -> Keeping:
        if self._keeper is None:
            process_set = make_set(self._data_dir, self._ids.chance())
            try:
                self._keeper = Keeping(process_set)
            except OSError:
                process_set.close(keep=False)
                raise
            self._loop.add_reader(self._keeper.control, self._read, self._keeper)
        return self._keeper

    def _read(self, keeper: Keeping) -> None:
        packets, is_over = receive(keeper.control)
        for words in packets:
            match words:
                case ["lost", number, swept, left]:
                    self._on_lost(int(number), int(swept), tuple(parse_left(left)))
                case _:
                    raise AssertionError(f"no word of a keeper: {words}")
        if is_over:
            self._drop(keeper)

    def _drop(self, keeper: Keeping) -> None:
        """It is dead, or as good as dead: what it held is ended before the next one starts."""
        if self._keeper is keeper:
            self._keeper = None
            self._loop.remove_reader(keeper.control)
            self._idle.clear()
            self._dead.put_nowait(keeper)

    def _on_gone(self, kept: Kept) -> None:
        if kept.exit is None:
            # Its warden was killed. The keeper says so when it has ended what that held.
            self._loop.call_later(LOSS_BOUND_S, self._on_silence, kept, self._keeper)
        elif not kept.exit.lost or not kept.exit.left:
            self._held.pop(kept.number, None)

    def _on_silence(self, kept: Kept, keeper: Keeping | None) -> None:
        if kept.exit is None and keeper is not None and keeper is self._keeper:
            _log.error("the keeper does not answer; it is replaced")
            self._drop(keeper)

    def _on_deaf(self, kept: Kept) -> None:
        """A warden does not end what it holds: the keeper shall."""
        if self._keeper is not None:
            self._keeper.end(kept.number)
            self._loop.call_later(LOSS_BOUND_S, self._on_silence, kept, self._keeper)

    def _on_lost(self, number: int, swept: int, left: tuple[int, ...]) -> None:
        kept = self._held.get(number)
        if kept is not None:
            kept.end(Exit(None, swept=swept, left=left, lost=True))
            kept.close()
            if not left:
                self._held.pop(number, None)

    async def _inherit(self, keeper: Keeping) -> None:
        _log.error("the keeper died; what it held is ended. %s", keeper.last_words())
        keeper.kill()
        wardens = frozenset(kept.warden for kept in self._held.values() if kept.warden)
        for kept in self._held.values():
            kept.is_stopping = True
        ended, left = await asyncio.to_thread(_end_remains, keeper, wardens)
        if ended:
            _log.warning("ended %d processes that no warden had ended", ended)
        for kept in list(self._held.values()):
            kept.end(Exit(None, left=tuple(left), lost=True))
            kept.close()
            if not left:
                self._held.pop(kept.number, None)
        keeper.control.close()
        keeper.set.close(keep=bool(left))

    async def _close_keeper(self, keeper: Keeping, left: list[int]) -> None:
        self._keeper = None
        self._loop.remove_reader(keeper.control)
        keeper.control.close()  # It ends by this.
        for kept in list(self._held.values()):
            kept.close()
        if not await asyncio.to_thread(keeper.collect, CLOSE_BOUND_S):
            keeper.kill()
            _, left = await asyncio.to_thread(_end_remains, keeper, frozenset[int]())
        if left:
            _log.error("processes could not be ended: %s", left)
        keeper.set.close(keep=bool(left))

    async def _end(self, held: list[Kept]) -> list[int]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(kept.kill(), name=f"end {kept.pid}") for kept in held]
        return sorted({pid for task in tasks for pid in task.result().left})

    def _show(self, kept: Kept, members: list[Stat]) -> Process:
        return Process(
            kept.pid,
            title_of(kept.order),
            kept.order.owner,
            max(0.0, self._clock.now_s() - kept.started_s),
            sum(stat.rss_bytes for stat in members),
            tuple(stat.pid for stat in members),
            kept.is_stopping,
        )


def _is_of(kept: Kept, workspace_id: str) -> bool:
    return kept.order.owner.workspace_id == workspace_id


def _find_members(held: list[Kept]) -> list[tuple[Kept, list[Stat]]]:
    """What lives of each: below its warden or, without one, by name and mark."""
    table = read_table()
    found: list[tuple[Kept, list[Stat]]] = []
    for kept in held:
        if kept.exit is None or not kept.is_gone:
            members = descendants_of(kept.warden, table) if kept.warden else []
        else:
            left = [table[pid] for pid in kept.exit.left if pid in table]
            members = [stat for stat in left if is_of(kept.mark, stat.pid)]
        found.append((kept, [stat for stat in members if stat.is_alive]))
    return found


def _end_remains(keeper: Keeping, wardens: frozenset[int]) -> tuple[int, list[int]]:
    keeper.collect(CLOSE_BOUND_S)
    return end_inherited(keeper.set.mark, wardens)


@asynccontextmanager
async def open_keeper_custody(
    data_dir: Path, clock: Clock, ids: Ids
) -> AsyncGenerator[KeeperCustody]:
    """At the end of the block nothing it started is left. First ends what a crash had left."""
    await asyncio.to_thread(end_leftovers, data_dir)
    was_subreaper = is_subreaper()
    become_subreaper()
    custody = KeeperCustody(data_dir, clock, ids)
    try:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(custody.watch(), name="custody")
            try:
                yield custody
            finally:
                await custody.close()
                watch.cancel()
    finally:
        if not was_subreaper:
            become_subreaper(on=False)
