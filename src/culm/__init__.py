"""culm: one long-lived agent server that many clients share."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from culm.client.blocking import connect_blocking
    from culm.client.connection import connect

__all__ = ["__version__", "connect", "connect_blocking"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # The client is imported at its first use.
    if name in ("connect", "connect_blocking"):
        from culm import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
