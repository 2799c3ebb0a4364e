"""Interfaces of workers and of the launchers that start them."""

from typing import Protocol

from culm.fleet.provision import Provision
from culm.fleet.transport.base import Link


class LaunchFailed(Exception):
    """No worker was started. The message gives the reason, with its last output if any."""


class NotReady(LaunchFailed):
    """The worker was killed or hung before it was ready; another one may succeed."""


class Worker(Protocol):
    """A receiver of assignments: a local process of ours, or a remote one."""

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
        """End and verify it with all it started, and withdraw its record. A remote one stays up."""
        ...

    async def stderr_tail(self) -> str:
        """The end of its stderr, once that is closed or a short time has passed."""
        ...


class Launcher(Protocol):
    async def launch(self, provision: Provision) -> Worker:
        """Start a worker and wait until it is ready; raises `LaunchFailed`.

        Canceling it leaves nothing behind.
        """
        ...
