"""Authentication of requests: the server's own user on a unix socket, a bearer token on TCP.

Requests that a browser sends on behalf of another site are refused.
"""

import hmac
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct
from multidict import CIMultiDictProxy

from culm.errors import Denied, InvalidRequest, Unauthenticated

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
TOKEN_BYTES = 32
TOKEN_CHARS_MAX = 4096


class RequestAuth(Struct, frozen=True):
    """Checks of one request. The peer of a unix socket is identified by its uid."""

    token: str | None  # None if authentication is turned off.
    hosts: frozenset[str]  # The accepted values of the Host header, in lower case.

    def check_tcp(self, headers: CIMultiDictProxy[str]) -> None:
        # A page of another site can reach a loopback port: under its own name (DNS rebinding), or
        # under ours with its own Origin. Both are refused before the token is checked.
        host = headers.get("Host", "")
        if host.lower() not in self.hosts:
            raise Denied(f"Host {host!r} is not allowed", hint="see --allow-host")
        for origin in headers.getall("Origin", ()):
            scheme, _, name = origin.lower().partition("://")
            if scheme not in ("http", "https") or name not in self.hosts:
                raise Denied("requests from other origins are refused")
        if headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            # A request for an image, for example, has no Origin header.
            raise Denied("requests from other sites are refused")
        if self.token is not None:
            scheme, _, token = headers.get("Authorization", "").partition(" ")
            # Header bytes that are not UTF-8 arrive as surrogates and never match.
            matches = hmac.compare_digest(
                token.strip().encode(errors="surrogateescape"), self.token.encode()
            )
            if scheme.lower() != "bearer" or not matches:
                raise Unauthenticated("a bearer token is required", hint="see --token-file")

    def check_unix(self, peer_uid: int | None) -> None:
        if peer_uid not in (os.getuid(), 0):
            raise Denied("this socket belongs to another user")


def allowed_hosts(tcp: Iterable[tuple[str, int]], extra: Iterable[str]) -> frozenset[str]:
    """The accepted values of the Host header: the listening addresses, and names from options."""
    names: set[str] = set()
    for host, port in tcp:
        shown = f"[{host}]" if ":" in host else host
        for name in (shown, *LOOPBACK_NAMES, *extra):
            names.add(f"{name}:{port}".lower())
            if port in (80, 443):
                names.add(name.lower())
    # A reverse proxy has a port of its own, so names from options are also accepted without a port.
    return frozenset(names | {name.lower() for name in extra})


def read_or_make_token(file: Path) -> str:
    """The token in `file` (mode 0600), created on first use; raises `InvalidRequest`, OSError."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return _make_token(file)
    with os.fdopen(descriptor, errors="replace") as source:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise InvalidRequest(f"token file {file} is not a regular file")
        if mode & 0o077:
            raise InvalidRequest(
                f"token file {file} can be read by others", hint=f"chmod 600 {file}"
            )
        token = source.read(TOKEN_CHARS_MAX).strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidRequest(
            f"token file {file} does not contain a token on one line",
            hint="remove the file to have a new one created",
        )
    return token


def _make_token(file: Path) -> str:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    token = secrets.token_urlsafe(TOKEN_BYTES)
    temporary = file.with_name(f".{file.name}.tmp.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(token + "\n")
    try:
        os.link(temporary, file)  # Atomic, and never replaces the file of another server.
    except FileExistsError:
        return read_or_make_token(file)
    finally:
        temporary.unlink()
    return token
