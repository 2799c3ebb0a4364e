"""Who may talk to us: our own user by unix socket, a token over TCP, and no web page but ours."""

import hmac
import os
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from multidict import CIMultiDictProxy

from culm.errors import Denied, InvalidRequest, Unauthenticated

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
TOKEN_BYTES = 32
TOKEN_CHARS_MAX = 4096


@dataclass(frozen=True, slots=True)
class RequestAuth:
    """What a request over TCP must show; a unix socket's peer is known by its uid."""

    token: str | None  # None: no authentication was asked for.
    hosts: frozenset[str]  # Lower-case, as they may stand in a Host header.

    def check_tcp(self, headers: CIMultiDictProxy[str]) -> None:
        # A page of another site can reach a loopback port: by its own name (rebinding), or by
        # ours with its own Origin. Both are refused before the token is looked at.
        host = headers.get("Host", "")
        if host.lower() not in self.hosts:
            raise Denied(f"Host {host!r} is not one of ours", hint="see --allow-host")
        for origin in headers.getall("Origin", ()):
            scheme, _, name = origin.lower().partition("://")
            if scheme not in ("http", "https") or name not in self.hosts:
                raise Denied("requests from other origins are refused")
        if headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            raise Denied("requests from other sites are refused")  # An image has no Origin.
        if self.token is not None:
            scheme, _, given = headers.get("Authorization", "").partition(" ")
            # Header bytes that are no UTF-8 arrive as surrogates, and match nothing.
            matches = hmac.compare_digest(
                given.strip().encode(errors="surrogateescape"), self.token.encode()
            )
            if scheme.lower() != "bearer" or not matches:
                raise Unauthenticated("a bearer token is required", hint="see --token-file")

    def check_unix(self, peer_uid: int | None) -> None:
        if peer_uid not in (os.getuid(), 0):
            raise Denied("this socket belongs to another user")


def allowed_hosts(tcp: Iterable[tuple[str, int]], extra: Iterable[str]) -> frozenset[str]:
    """Names under which we can be asked for: those we listen on, and those added by hand."""
    names: set[str] = set()
    for host, port in tcp:
        shown = f"[{host}]" if ":" in host else host
        for name in (shown, *LOOPBACK_NAMES, *extra):
            names.add(f"{name}:{port}".lower())
            if port in (80, 443):
                names.add(name.lower())
    # A proxy in front speaks for its own port, so a name added by hand also stands alone.
    return frozenset(names | {name.lower() for name in extra})


def read_or_make_token(file: Path) -> str:
    """The token in `file` (mode 0600), made on first use; raises `InvalidRequest`, OSError."""
    try:
        # Not blocking: a pipe would keep us waiting for somebody to write into it.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return _make_token(file)
    with os.fdopen(descriptor, errors="replace") as source:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise InvalidRequest(f"token file {file} is no file")
        if mode & 0o077:
            raise InvalidRequest(
                f"token file {file} can be read by others", hint=f"chmod 600 {file}"
            )
        token = source.read(TOKEN_CHARS_MAX).strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidRequest(
            f"token file {file} holds no token", hint="one line; remove the file to make it anew"
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
        os.link(temporary, file)  # Whole or not at all, and never over another server's.
    except FileExistsError:
        return read_or_make_token(file)
    finally:
        temporary.unlink()
    return token
