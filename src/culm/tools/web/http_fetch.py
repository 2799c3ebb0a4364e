"""HTTP requests to exactly the addresses that were checked.

Owns name lookup, connections, redirects, decompression and bounds of the body. A name is looked up
once for each hop, and the connection uses the resulting addresses, so a DNS answer that changes
between the check and the use has no effect. TLS still verifies the certificate of the name. No
proxy of the environment is used, because it would look up the name itself, and no cookies are kept.
"""

import asyncio
import os
import socket
import ssl
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from typing import Annotated

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from msgspec import Meta, Struct
from yarl import URL

from culm import __version__
from culm.tools.files.safe_open import OpenRefused, shown
from culm.tools.web.addresses import (
    CheckedTarget,
    UrlTarget,
    check_redirect,
    classify_addresses,
    join_site,
)

TIMEOUT_S = 30  # The default of a call.
TIMEOUT_MAX_S = 120
UrlText = Annotated[
    str, Meta(min_length=1, description="A URL that begins with http:// or https://.")
]
TimeoutSeconds = Annotated[
    int,
    Meta(
        ge=0,
        le=TIMEOUT_MAX_S,
        description=f"Seconds for all of it, at most {TIMEOUT_MAX_S}. 0: {TIMEOUT_S}.",
    ),
]
LOOKUP_S = 10.0  # A resolver that answers later has been queried three times.
REDIRECTS_MAX = 5
ADDRESSES_MAX = 16  # Per name; more are not tried.
HEADER_BYTES_MAX = 16 << 10  # Per field. Cookies and policies of large sites have about 8 KiB.
PIECE_BYTES_MAX = 64 << 10
AGENT = f"culm/{__version__}"
_REDIRECTS = frozenset({301, 302, 303, 307, 308})

_Address = tuple[int, int, int, str, tuple[object, ...]]  # The type that `getaddrinfo` returns.
Resolve = Callable[[str, int], Awaitable[tuple[str, ...]]]  # Host and port to addresses.


async def resolve_by_system(host: str, port: int) -> tuple[str, ...]:
    """Look up the addresses of a name with the resolver of the system; raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # The interface of a link-local address is removed: the system then refuses it.
    return tuple(str(address[0]).partition("%")[0] for *_, address in found)


class Network(Struct, frozen=True):
    """Access to the network; tests replace it."""

    resolve: Resolve = resolve_by_system
    tls: ssl.SSLContext | bool = True


async def check(site: UrlTarget, network: Network) -> CheckedTarget:
    """Look up the addresses of a site; raises `OpenRefused`."""
    try:
        found = await network.resolve(site.host, site.port)
    except (OSError, UnicodeError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise OpenRefused(f"The host {site.host} was not found: {reason}.") from exc
    addresses = tuple(dict.fromkeys(found))[:ADDRESSES_MAX]
    if not addresses:
        raise OpenRefused(f"The host {site.host} has no address.")
    return classify_addresses(site, addresses)


class FetchedPage:
    """A response whose head has arrived. Made by `open_page`."""

    def __init__(self, site: UrlTarget, response: aiohttp.ClientResponse) -> None:
        self.site = site  # The end of the redirects.
        self.status = response.status
        self.reason = shown(response.reason or "")[:100]
        self.kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        self.charset = _charset(response)
        self.content_length = response.content_length
        self._response = response
        self._body = _body_of(site, response)

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Yield the decompressed body in pieces of bounded size; raises `OpenRefused`."""
        try:
            while raw := await self._response.content.readany():
                for piece in self._body.feed(raw):
                    yield piece
        except (aiohttp.ClientError, OSError) as exc:
            raise OpenRefused(
                f"{self.site.url} ended before the response was complete: {_describe(exc)}."
            ) from exc
        except (zlib.error, RuntimeError) as exc:  # aiohttp raises RuntimeError for broken chunks.
            raise OpenRefused(f"The response of {self.site.url} is broken.") from exc
        if not self._body.is_whole:
            raise OpenRefused(f"{self.site.url} ended before the response was complete.")


@asynccontextmanager
async def open_page(asked: CheckedTarget, network: Network) -> AsyncGenerator[FetchedPage]:
    """Request a page and follow redirects; raises `OpenRefused`.

    The caller limits its time. Leaving the block drops the connection.
    """
    at = asked
    for _ in range(REDIRECTS_MAX + 1):
        async with _open(at, network) as response:
            location = response.headers.get("Location")
            if response.status not in _REDIRECTS or location is None:
                yield FetchedPage(at.site, response)
                return
        found = await check(join_site(at.site, location), network)
        check_redirect(asked, at.site, found)
        at = found
    raise OpenRefused(f"{asked.site.url} redirects more than {REDIRECTS_MAX} times.")


@asynccontextmanager
async def _open(checked: CheckedTarget, network: Network) -> AsyncGenerator[aiohttp.ClientResponse]:
    connector = aiohttp.TCPConnector(
        resolver=_Pinned(checked),
        socket_factory=_only(checked),
        use_dns_cache=False,
        force_close=True,
        ssl=network.tls,
    )
    async with aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,  # Decompressed here, where the bytes are counted.
        headers={"User-Agent": AGENT, "Accept": "*/*", "Accept-Encoding": "gzip"},
        read_bufsize=PIECE_BYTES_MAX,
        max_line_size=HEADER_BYTES_MAX,
        max_field_size=HEADER_BYTES_MAX,
        trust_env=False,
    ) as session:
        try:
            response = await session.get(URL(checked.site.url, encoded=True), allow_redirects=False)
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            if isinstance(exc, TimeoutError):
                raise  # Raised by the time limit of the caller.
            raise OpenRefused(f"{checked.site.url} cannot be read: {_describe(exc)}.") from exc
        try:
            yield response
        finally:
            response.close()


class _Pinned(AbstractResolver):
    """A resolver that knows one host and its checked addresses."""

    def __init__(self, checked: CheckedTarget) -> None:
        self._checked = checked

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        assert host == self._checked.site.host, host
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in self._checked.addresses
        ]

    async def close(self) -> None:
        pass


def _only(checked: CheckedTarget) -> Callable[[_Address], socket.socket]:
    """Return a socket factory that accepts only the checked addresses, as the last check."""

    def make(address: _Address) -> socket.socket:
        family, kind, protocol, _, where = address
        if where[0] not in checked.addresses or where[1] != checked.site.port:
            raise OpenRefused(f"{checked.site.url} resolved to {where}, which was not checked.")
        return socket.socket(family, kind, protocol)

    return make


class _Plain:
    """An uncompressed body."""

    is_whole = True  # aiohttp checks the length.

    def feed(self, raw: bytes) -> Generator[bytes]:
        yield raw


class _Zipped:
    """A gzip body, decompressed in bounded pieces: a small response may contain a huge one."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(31)
        self._is_begun = False

    @property
    def is_whole(self) -> bool:
        return self._member.eof or not self._is_begun

    def feed(self, raw: bytes) -> Generator[bytes]:
        self._is_begun = True
        while raw:
            if self._member.eof:
                self._member = zlib.decompressobj(31)
            if piece := self._member.decompress(raw, PIECE_BYTES_MAX):
                yield piece
            raw = self._member.unconsumed_tail or self._member.unused_data


def _body_of(site: UrlTarget, response: aiohttp.ClientResponse) -> _Plain | _Zipped:
    coding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if coding in ("identity", ""):
        return _Plain()
    if coding in ("gzip", "x-gzip"):
        return _Zipped()
    raise OpenRefused(f"{site.url} is compressed as {shown(coding)[:50]}, which is not supported.")


def _charset(response: aiohttp.ClientResponse) -> str | None:
    try:
        return response.charset
    except (ValueError, RuntimeError):
        return None


def _describe(exc: Exception) -> str:
    """Describe a failure in a few words."""
    match exc:
        case aiohttp.ClientConnectorCertificateError():
            error = exc.certificate_error
            reason = getattr(error, "verify_message", "") or str(error)
            return f"its certificate is not accepted ({shown(reason)[:200].rstrip('.')})"
        case aiohttp.ClientConnectorError():
            number = exc.os_error.errno or 0  # The message of asyncio is for programmers.
            return f"no connection ({os.strerror(number) if number > 0 else exc.os_error})"
        case aiohttp.ClientResponseError():
            return f"the response is not valid HTTP ({shown(exc.message)[:200]})"
        case _:
            return shown(str(exc) or type(exc).__name__)[:200].rstrip(".")
