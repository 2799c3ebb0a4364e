"""The seam towards workers: who starts one, and what a parent may do with it."""

from typing import Protocol

from culm.fleet.provision import Provision
from culm.fleet.transport.base import Link


class LaunchFailed(Exception):
    """There is no worker. Says why, with what it printed last if it was started."""


class NotReady(LaunchFailed):
    """It was started, and was killed or hung before it was ready: another one may do better."""


class Worker(Protocol):
    """Something that takes assignments: a process of ours, or one that runs elsewhere."""

    @property
    def id(self) -> str:
        """The id it was first provisioned with, which is also that of its record."""
        ...

    @property
    def endpoint(self) -> str: ...

    @property
    def pid(self) -> int | None:
        """None if it is not ours to end."""
        ...

    @property
    def is_alive(self) -> bool: ...

    async def connect(self) -> Link:
        """Raises `ConnectFailed`. Closing the link ends its run, not the worker."""
        ...

    async def kill(self) -> None:
        """End it and all it started, verify that, withdraw its record. A remote one stays up."""
        ...

    async def stderr_tail(self) -> str:
        """The end of what it printed on stderr, once it is silent or a moment has passed."""
        ...


class Launcher(Protocol):
    async def launch(self, provision: Provision) -> Worker:
        """Start one and wait until it is ready; raises `LaunchFailed`.

        To cancel this leaves nothing behind.
        """
        ...
