"""Whether the process that a worker must not outlive is still there."""

import asyncio
import os
from typing import Final

from culm.fleet.provision import OwnerStamp
from culm.processes.linux import find_stat

POLL_S: Final = 0.5  # Where no handle of a process can be had.


async def owner_gone(owner: OwnerStamp) -> None:
    """Wait until it is; at once if it is gone already, and another one has its pid."""
    try:
        # Held before we look at it: from here on the pid is not another's unseen.
        handle = os.pidfd_open(owner.process_id)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # Not Linux, or an old one.
        await _poll(owner)
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(handle, ended.set)
    try:
        if is_there(owner):
            await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


async def _poll(owner: OwnerStamp) -> None:
    while is_there(owner):  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(POLL_S)


def is_there(owner: OwnerStamp) -> bool:
    """Without /proc only the pid counts."""
    stat = find_stat(owner.process_id)
    if stat is not None:
        start = owner.process_start_id
        # Text is somebody else's way to tell processes apart.
        return stat.is_alive and (not isinstance(start, int) or start == stat.start_ticks)
    if find_stat(os.getpid()) is not None:
        return False
    try:
        os.kill(owner.process_id, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # Another user's.
    return True
