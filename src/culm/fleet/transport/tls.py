"""TLS and access control of links: certificates, trusted roots, and the token in the upgrade.

Every fault of a file is reported at once, with the name of the file, and nothing falls back to
plaintext.
"""

import binascii
import hmac
import ipaddress
import re
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from msgspec import Struct

from culm.errors import InvalidRequest

PEM_BYTES_MAX = 1 << 20  # A chain has a few certificates of a few KiB.

# PKCS#8, PKCS#1 and SEC1, in this order. Other blocks and other text are skipped.
_KEYS = frozenset(("PRIVATE KEY", "RSA PRIVATE KEY", "EC PRIVATE KEY"))
_CERTIFICATE = "CERTIFICATE"
# The OpenSSL reasons for a key of another pair and for a key of another type.
_MISMATCHES = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
_SCHEME = "Bearer "  # Exactly this spelling: the peers of this protocol compare it as it is.
_BEGIN = re.compile(r"^-----BEGIN ([A-Z0-9 ]+)-----[ \t\r]*$", re.MULTILINE)


class ServerTls(Struct, frozen=True):
    """A certificate, followed by its chain, and its private key."""

    cert: Path
    key: Path


class _Block(Struct, frozen=True):
    label: str
    der: bytes


def server_context(files: ServerTls) -> ssl.SSLContext:
    """Raises `InvalidRequest` with the file that cannot be used and the reason."""
    _check_certificates(files.cert, "TLS certificate file")
    _check_key(files.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(files.cert, files.key, password=_refuse_password)
    except (ssl.SSLError, OSError, ValueError) as exc:
        if isinstance(exc, ssl.SSLError) and exc.reason in _MISMATCHES:
            raise InvalidRequest(
                f"TLS key file {files.key} does not belong to the certificate in {files.cert}",
                hint="the first private key must match the first certificate",
            ) from exc
        raise InvalidRequest(
            f"TLS files {files.cert} and {files.key} cannot be used: {_describe(exc)}"
        ) from exc
    return context


def client_context(ca: Path) -> ssl.SSLContext:
    """Trust exactly the certificates in `ca`; raises `InvalidRequest`."""
    certificates = _check_certificates(ca, "CA file")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # Checks the host name, too.
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A pinned certificate need not be a CA certificate.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=b"".join(certificates))
    return context


def _check_certificates(file: Path, what: str) -> list[bytes]:
    """Return every certificate in a file, in order."""
    found = [b.der for b in _read_blocks(file, what) if b.label == _CERTIFICATE]
    if not found:
        raise InvalidRequest(f"{what} {file} contains no certificate")
    for number, der in enumerate(found, 1):
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=der)
        except (ssl.SSLError, ValueError) as exc:
            raise InvalidRequest(f"{what} {file}: certificate {number} is malformed") from exc
    return found


def _check_key(file: Path) -> None:
    blocks = _read_blocks(file, "TLS key file")
    keys = [block for block in blocks if block.label in _KEYS]
    if not keys:
        if any(block.label == "ENCRYPTED PRIVATE KEY" for block in blocks):
            _refuse_encrypted(file)
        raise InvalidRequest(
            f"TLS key file {file} contains no private key",
            hint="use PKCS#8, PKCS#1 or SEC1 in PEM",
        )
    # OpenSSL would skip it and use the next one.
    if not _is_sequence(keys[0].der):
        raise InvalidRequest(f"TLS key file {file}: the first private key is malformed")


def _is_sequence(der: bytes) -> bool:
    """Return True for exactly one complete DER sequence, which every key is."""
    if len(der) < 2 or der[0] != 0x30:
        return False
    if der[1] < 0x80:
        return len(der) == 2 + der[1]
    head = 2 + (der[1] & 0x7F)
    return len(der) == head + int.from_bytes(der[2:head])


def _read_blocks(file: Path, what: str) -> list[_Block]:
    """Return the blocks of a PEM file in order. An incomplete block invalidates the file."""
    try:
        with file.open("rb") as source:
            data = source.read(PEM_BYTES_MAX + 1)
    except OSError as exc:
        raise InvalidRequest(f"{what} {file} cannot be read: {exc.strerror}") from exc
    if len(data) > PEM_BYTES_MAX:
        raise InvalidRequest(f"{what} {file} has more than {PEM_BYTES_MAX} bytes")
    text = data.decode("latin-1")
    if not text.strip():
        raise InvalidRequest(f"{what} {file} is empty")
    blocks: list[_Block] = []
    at = 0
    while begin := _BEGIN.search(text, at):
        label = begin[1]
        ending = f"-----END {label}-----"
        end = text.find(ending, begin.end())
        following = _BEGIN.search(text, begin.end())
        if end < 0 or (following is not None and following.start() < end):
            raise InvalidRequest(f"{what} {file}: a block {label!r} has no end")
        blocks.append(_Block(label, _decode_block(text[begin.end() : end], label, file, what)))
        at = end + len(ending)
    if not blocks:
        raise InvalidRequest(f"{what} {file} is not in PEM")
    return blocks


def _decode_block(body: str, label: str, file: Path, what: str) -> bytes:
    if "Proc-Type:" in body and "ENCRYPTED" in body and label in _KEYS:
        _refuse_encrypted(file)
    try:
        der = binascii.a2b_base64("".join(body.split()), strict_mode=True)
    except (binascii.Error, ValueError) as exc:
        raise InvalidRequest(f"{what} {file}: a block {label!r} is not base64") from exc
    if not der:
        raise InvalidRequest(f"{what} {file}: a block {label!r} is empty")
    return der


def _refuse_encrypted(file: Path) -> NoReturn:
    raise InvalidRequest(f"TLS key file {file} is encrypted", hint="use a key without a password")


def _refuse_password() -> str:
    """Raise, because OpenSSL would ask at the terminal."""
    raise ValueError("the key is encrypted")


def _describe(exc: Exception) -> str:
    reason = exc.reason if isinstance(exc, ssl.SSLError) else None
    return (reason or str(exc)).replace("_", " ").lower()


# --- access


def check_listen_address(host: str, *, has_token: bool, has_tls: bool) -> None:
    """Raises `InvalidRequest` unless the address is loopback or has both a token and TLS."""
    if _is_loopback(host):
        return
    if not has_token:
        raise InvalidRequest(f"{host} needs a token: only loopback may be served without one")
    if not has_tls:
        hint = "pass a certificate and its key"
        raise InvalidRequest(f"{host} needs TLS: others could read the traffic", hint=hint)


def may_send_token(scheme: str, host: str) -> bool:
    """Return True if the token cannot be read on its way there."""
    return scheme == "wss" or _is_loopback(host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bearer(token: str) -> str:
    """Return the value of the `Authorization` header for `token`."""
    return _SCHEME + token


def is_authorized(headers: Sequence[str], token: str | None) -> bool:
    """Return True if the `Authorization` headers match the token, or if no token is required."""
    if token is None:
        return True
    if len(headers) != 1 or not headers[0].startswith(_SCHEME):
        return False
    # Header bytes that are not UTF-8 arrive as surrogates and match nothing.
    given = headers[0][len(_SCHEME) :].encode(errors="surrogateescape")
    expected = token.encode()
    return len(given) == len(expected) and hmac.compare_digest(given, expected)
