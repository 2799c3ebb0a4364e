"""Who is let in: where a worker may listen, and the token that a parent shows in the upgrade."""

import hmac
import ipaddress
from collections.abc import Sequence

from culm.errors import InvalidRequest

_SCHEME = "Bearer "  # Exactly so: this wire's other side compares it letter by letter.


def check_door(host: str, *, has_token: bool, has_tls: bool) -> None:
    """Raises `InvalidRequest` for what would let strangers in, or have them read along."""
    if _is_loopback(host):
        return
    if not has_token:
        raise InvalidRequest(f"{host} needs a token: to serve without one is for loopback only")
    if not has_tls:
        hint = "give a certificate and its key"
        raise InvalidRequest(f"{host} needs TLS: others could read along", hint=hint)


def may_show_token(scheme: str, host: str) -> bool:
    """Whether nobody can read it on the way there."""
    return scheme == "wss" or _is_loopback(host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bearer(token: str) -> str:
    """The value of the `Authorization` header that shows `token`."""
    return _SCHEME + token


def may_enter(shown: Sequence[str], token: str | None) -> bool:
    """Whether the `Authorization` headers of a request let it in. Without a token all may."""
    if token is None:
        return True
    if len(shown) != 1 or not shown[0].startswith(_SCHEME):
        return False
    # Header bytes that are no UTF-8 arrive as surrogates, and match nothing.
    given = shown[0][len(_SCHEME) :].encode(errors="surrogateescape")
    expected = token.encode()
    return len(given) == len(expected) and hmac.compare_digest(given, expected)
