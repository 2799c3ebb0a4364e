"""The client: typed requests, a resumable event stream, and a mirror of a workspace's state.

Exports the names that most programs need; see docs/client.md. Each name is imported on first use,
so that a command does not load modules that it does not need.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from culm.client.blocking import BlockingWorkspace, connect_blocking
    from culm.client.connection import connect
    from culm.client.follower import Follower, open_mirror, open_present
    from culm.client.http import Client, RequestRefused, open_client
    from culm.client.mirror import Mirror
    from culm.client.run import AskedRun, RunAnswer, RunLost, ask, open_asked
    from culm.client.stream import EventStream, ServerEvent
    from culm.client.tree import SessionTree, open_tree
    from culm.client.workspace import RemoteWorkspace

__all__ = [
    "AskedRun",
    "BlockingWorkspace",
    "Client",
    "EventStream",
    "Follower",
    "Mirror",
    "RemoteWorkspace",
    "RequestRefused",
    "RunAnswer",
    "RunLost",
    "ServerEvent",
    "SessionTree",
    "ask",
    "connect",
    "connect_blocking",
    "open_asked",
    "open_client",
    "open_mirror",
    "open_present",
    "open_tree",
]

_MODULES = {
    "blocking": ("BlockingWorkspace", "connect_blocking"),
    "connection": ("connect",),
    "follower": ("Follower", "open_mirror", "open_present"),
    "http": ("Client", "RequestRefused", "open_client"),
    "mirror": ("Mirror",),
    "run": ("AskedRun", "RunAnswer", "RunLost", "ask", "open_asked"),
    "stream": ("EventStream", "ServerEvent"),
    "tree": ("SessionTree", "open_tree"),
    "workspace": ("RemoteWorkspace",),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            found = getattr(import_module(f"culm.client.{module}"), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
