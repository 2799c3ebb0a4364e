"""Remote workers: only a link is opened, and no process is started or ended."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

from culm.fleet.host.base import LaunchFailed
from culm.fleet.provision import Provision, RemotePlacement
from culm.fleet.transport.base import ConnectFailed, Link
from culm.fleet.transport.websocket import connect_websocket


class RemoteWorker:
    """Implements `Worker`."""

    def __init__(
        self, child_id: str, endpoint: str, dial: Callable[[], Awaitable[Link]], link: Link
    ) -> None:
        self.id = child_id
        self.endpoint = endpoint
        self._dial = dial
        self._link: Link | None = link  # The link that proved our authorization, until it is used.

    @property
    def pid(self) -> int | None:
        return None

    @property
    def is_alive(self) -> bool:
        return True  # As far as is known here.

    async def connect(self) -> Link:
        link, self._link = self._link, None
        return await self._dial() if link is None else link

    async def kill(self) -> None:
        """Close our link; the process is not ours to end."""
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def stderr_tail(self) -> str:
        return ""


class ConnectLauncher:
    """Implements `Launcher` for a provision with an endpoint.

    The token is the provision's `worker_auth_token`; the rest of the provision is not sent. For an
    endpoint in `pins`, exactly the certificates in that file are trusted.
    """

    def __init__(self, pins: Mapping[str, Path] | None = None) -> None:
        self._pins = pins or {}

    async def launch(self, provision: Provision) -> RemoteWorker:
        """Raises `LaunchFailed` unless a link can be opened with that token."""
        placement = provision.placement
        if not isinstance(placement, RemotePlacement):
            raise LaunchFailed("the placement is not remote, so there is no endpoint")
        endpoint = placement.endpoint
        token = provision.secrets.worker_auth_token
        dial = partial(connect_websocket, endpoint, token, self._pins.get(endpoint))
        try:
            link = await dial()
        except ConnectFailed as exc:
            raise LaunchFailed(f"the remote worker cannot be reached: {exc}") from exc
        return RemoteWorker(provision.identity.child_id, endpoint, dial, link)
