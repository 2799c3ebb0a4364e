"""The client: typed requests, one resumable event stream, a state that keeps itself up to date.

What most programs need is named here; docs/client.md shows it. Each name is imported when it is
first used, as the commands start faster without those they do not need.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from culm.client.ask import AskedRun, RunAnswer, ask, open_asked
    from culm.client.blocking import BlockingWorkspace, connect_blocking
    from culm.client.connect import connect
    from culm.client.follow_run import RunLost
    from culm.client.follower import Follower, open_mirror, open_present
    from culm.client.http import Client, RequestRefused, open_client
    from culm.client.mirror import Mirror
    from culm.client.stream import EventStream, ServerEvent
    from culm.client.tree import SessionTree, open_tree
    from culm.client.workspace import RemoteWorkspace

__all__ = [
    "RunAnswer",
    "AskedRun",
    "BlockingWorkspace",
    "Client",
    "Follower",
    "Mirror",
    "RequestRefused",
    "RemoteWorkspace",
    "RunLost",
    "EventStream",
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

_WHERE = {
    "asking": ("Answer", "Asked", "ask", "open_asked"),
    "blocking": ("Blocking", "connect_blocking"),
    "connecting": ("connect",),
    "follower": ("Follower", "open_mirror", "open_present"),
    "http": ("Client", "Refused", "open_client"),
    "mirror": ("Mirror",),
    "stream": ("Stream", "Told"),
    "tree": ("Tree", "open_tree"),
    "watch": ("RunLost",),
    "workspace": ("RemoteWorkspace",),
}


def __getattr__(name: str) -> object:
    for module, names in _WHERE.items():
        if name in names:
            found = getattr(import_module(f"culm.client.{module}"), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
