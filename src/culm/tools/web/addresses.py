"""URLs and network addresses: parsing, and which addresses are private.

Owns the parsing of URLs and the list of private addresses. Pure: `http_fetch.py` looks up names and
connects.
"""

import ipaddress
import re
import socket
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from urllib.parse import urljoin

from msgspec import Struct
from yarl import URL

from culm.tools.files.safe_open import OpenRefused
from culm.wire.codec import printable

URL_CHARS_MAX = 4096
_SHOWN_CHARS_MAX = 200

_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*")
# Every resolver takes such a name as a number: 127.0.0.1, but also 2130706433 and 0x7f.1.
_NUMERIC = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")

_RESERVED = "a reserved network"
_KINDS_4 = tuple(
    (IPv4Network(network), kind)
    for network, kind in (
        ("127.0.0.0/8", "this machine"),
        ("0.0.0.0/8", "this machine"),
        ("10.0.0.0/8", "a private network"),
        ("172.16.0.0/12", "a private network"),
        ("192.168.0.0/16", "a private network"),
        ("100.64.0.0/10", "a provider's inner network"),
        ("169.254.169.254/32", "the metadata of a cloud machine"),
        ("168.63.129.16/32", "the inner service of a cloud"),
        ("169.254.0.0/16", "the local link"),
        ("224.0.0.0/4", "a multicast group"),
        # Listed here because versions of Python differ in `is_global`.
        ("192.0.0.0/24", _RESERVED),
        ("192.88.99.0/24", _RESERVED),
    )
)
_KINDS_6 = tuple(
    (IPv6Network(network), kind)
    for network, kind in (
        ("::1/128", "this machine"),
        ("::/128", "this machine"),
        ("fc00::/7", "a private network"),
        ("fec0::/10", "a private network"),
        ("64:ff9b:1::/48", "a private network"),
        ("fe80::/10", "the local link"),
        ("ff00::/8", "a multicast group"),
    )
)
_PUBLIC_6 = IPv6Network("2000::/3")  # All addresses ever assigned to the public network.
_NAT64 = IPv6Network("64:ff9b::/96")
_OLD_EMBEDDED = IPv6Network("::/96")


class UrlTarget(Struct, frozen=True):
    """A URL in one canonical spelling, which is shown, checked and requested."""

    url: str  # Without a fragment; a name is ASCII, an address canonical.
    scheme: str
    host: str  # Without brackets.
    port: int

    @property
    def host_port(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def origin(self) -> str:
        return f"{self.scheme}://{self.host_port}"


class CheckedTarget(Struct, frozen=True):
    """A site and its addresses, which are the only ones to connect to."""

    site: UrlTarget
    addresses: tuple[str, ...]
    private: tuple[str, ...]  # The addresses that need approval, sorted.

    @property
    def private_text(self) -> str:
        """The private addresses for people: `127.0.0.1 (this machine)`."""
        return ", ".join(f"{one} ({find_private_kind(one)})" for one in self.private)

    @property
    def shown(self) -> str:
        return f"{self.site.url} at {self.private_text}" if self.private else self.site.url

    @property
    def why(self) -> str:
        """The reason for asking; empty if all addresses are public."""
        if not self.private:
            return ""
        return f"{self.site.host} is not on the public network: {self.private_text}"

    def coverage(self, action: str) -> tuple[str, ...]:
        """The coverage of a lasting grant: an origin, or exact addresses if one is private."""
        if not self.private:
            return (f"{action}:{self.site.origin}",)
        return tuple(f"{action}:{self.site.host_port}@{address}" for address in self.private)

    @property
    def resolved(self) -> dict[str, str | list[str]]:
        """The input of the digest. Public addresses change all day, and are left out."""
        if not self.private:
            return {"url": self.site.url}
        return {"url": self.site.url, "private": list(self.private)}


def parse_site(text: str) -> UrlTarget:
    """Parse a URL to fetch; raises `OpenRefused` with a message for the model."""
    text = text.strip()
    if len(text) > URL_CHARS_MAX:
        raise OpenRefused(f"The URL has {len(text)} characters; the maximum is {URL_CHARS_MAX}.")
    # Programs parse these differently, so the checked URL might not be the requested one.
    if not text.isprintable() or "\\" in text or " " in text:
        raise OpenRefused(
            f"{_brief(text)} contains a blank or another character that is not allowed in a URL."
        )
    try:
        url = URL(text)
        host, port = url.raw_host, url.port
    except ValueError as exc:
        raise OpenRefused(f"{_brief(text)} is not a valid URL: {printable(str(exc))}.") from exc
    if url.scheme not in ("http", "https"):
        raise OpenRefused(f"{_brief(text)}: use an http:// or https:// URL.")
    if url.raw_user is not None or url.raw_password is not None:
        raise OpenRefused("The URL contains a user or a password, which is not allowed.")
    if not host or not port:
        raise OpenRefused(f"{_brief(text)} has no host and port.")
    host = _canonical_host(host)
    canonical = str(url.with_host(host).with_fragment(None))
    if url.raw_path_qs == "/" and not canonical.endswith("/"):
        canonical += "/"
    return UrlTarget(canonical, url.scheme, host, port)


def join_site(at: UrlTarget, location: str) -> UrlTarget:
    """Resolve the location of a redirect; raises `OpenRefused`."""
    try:
        return parse_site(urljoin(at.url, location.strip()))
    except (OpenRefused, ValueError) as exc:
        raise OpenRefused(f"{at.url} redirects to an invalid URL: {exc}") from exc


def classify_addresses(site: UrlTarget, addresses: tuple[str, ...]) -> CheckedTarget:
    """Find the private ones among the addresses of a site."""
    private = sorted({one for one in addresses if find_private_kind(one) is not None})
    return CheckedTarget(site, addresses, tuple(private))


def check_redirect(asked: CheckedTarget, at: UrlTarget, found: CheckedTarget) -> None:
    """Raise `OpenRefused` unless approval of `asked` covers the redirect from `at` to `found`."""
    site = found.site
    if at.scheme == "https" and site.scheme == "http":
        raise OpenRefused(
            f"{at.url} redirects to {site.url}, which is not encrypted; the redirect "
            "was not followed. Fetch that URL itself if it is wanted."
        )
    is_same_host = (site.host, site.port) == (asked.site.host, asked.site.port)
    if found.private and not (is_same_host and set(found.private) <= set(asked.private)):
        raise OpenRefused(
            f"{at.url} redirects to {site.url}, which is {found.private_text}; the "
            "redirect was not followed. Fetch that URL itself if it is wanted."
        )


def find_private_kind(address: str) -> str | None:
    """Return the kind of network of a private address; None if it is public."""
    parsed = ipaddress.ip_address(address)
    if isinstance(parsed, IPv4Address):
        return _kind_4(parsed)
    for network, kind in _KINDS_6:
        if parsed in network:
            return kind
    inner = _embedded(parsed)
    if inner:
        return next((kind for one in inner if (kind := _kind_4(one)) is not None), None)
    return None if parsed in _PUBLIC_6 and parsed.is_global else _RESERVED


def _kind_4(address: IPv4Address) -> str | None:
    for network, kind in _KINDS_4:
        if address in network:
            return kind
    return None if address.is_global else _RESERVED


def _embedded(address: IPv6Address) -> tuple[IPv4Address, ...]:
    """Return the IPv4 addresses embedded in an IPv6 address: packets to it end up there."""
    if address.ipv4_mapped is not None:
        return (address.ipv4_mapped,)
    if address.sixtofour is not None:
        return (address.sixtofour,)
    if address.teredo is not None:
        return address.teredo
    if address in _NAT64 or address in _OLD_EMBEDDED:
        return (IPv4Address(int(address) & 0xFFFFFFFF),)
    return ()


def _canonical_host(host: str) -> str:
    """Return one spelling of a host; raises `OpenRefused` if it is not valid."""
    if "%" in host:
        raise OpenRefused(f"{_brief(host)} contains a %, which is not allowed in a host.")
    if ":" in host:
        try:
            return str(IPv6Address(host))
        except ValueError as exc:
            raise OpenRefused(f"{_brief(host)} is not a valid address.") from exc
    host = host.removesuffix(".")
    if _NUMERIC.fullmatch(host):
        try:
            return socket.inet_ntoa(socket.inet_aton(host))
        except OSError as exc:
            raise OpenRefused(f"{_brief(host)} is not a valid address.") from exc
    if not _NAME.fullmatch(host):
        raise OpenRefused(f"{_brief(host)} is not a valid host name.")
    return host


def _brief(text: str) -> str:
    cut = text if len(text) <= _SHOWN_CHARS_MAX else text[:_SHOWN_CHARS_MAX] + "…"
    return printable(cut) or "An empty text"
