"""Opens the kind of process supervision that the platform allows."""

import logging
import os
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from culm.clock import Clock
from culm.ids import Ids
from culm.processes.base import Processes
from culm.processes.direct import open_direct_processes
from culm.processes.linux import find_stat, is_subreaper

_log = logging.getLogger(__name__)


def missing_feature() -> str | None:
    """Name the platform feature that the supervisor lacks; None if all are present."""
    if not sys.platform.startswith("linux"):
        return "it is not Linux"
    if not hasattr(socket, "SOCK_SEQPACKET") or not hasattr(os, "memfd_create"):
        return "Python was built without SEQPACKET sockets or memfd"
    if not sys.executable:
        return "the Python interpreter cannot be found"
    try:
        is_subreaper()
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return "the kernel has no child subreaper or no pidfd"
    if find_stat(os.getpid()) is None:
        return "/proc is not mounted"
    return None


@asynccontextmanager
async def open_processes(data_dir: Path, clock: Clock, ids: Ids) -> AsyncGenerator[Processes]:
    """Open process supervision; at the end of the block, no process it started is left.

    Processes that an earlier server left behind in this data directory are ended first.
    """
    lack = missing_feature()
    if lack is not None:
        _log.warning("processes run without a supervisor and may escape: %s", lack)
        async with open_direct_processes(clock) as direct:
            yield direct
        return
    # Imported here because these modules use features that other platforms lack.
    from culm.processes.supervisor_client import open_supervised_processes

    async with open_supervised_processes(data_dir, clock, ids) as processes:
        yield processes
