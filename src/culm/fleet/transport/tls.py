"""TLS of links: a worker's certificate and key out of PEM files, and what a parent trusts.

Every fault of a file is told at once, by its name, and nothing falls back to plaintext.
"""

import binascii
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from culm.errors import InvalidRequest

PEM_BYTES_MAX = 1 << 20  # A chain has a few certificates of a few KiB.

# PKCS#8, PKCS#1 and SEC1, in this order. Others are passed over, and so is what is no block.
_KEYS = frozenset(("PRIVATE KEY", "RSA PRIVATE KEY", "EC PRIVATE KEY"))
_CERTIFICATE = "CERTIFICATE"
# What OpenSSL says of a key of another pair, and of one of another kind.
_MISMATCHES = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
_BEGIN = re.compile(r"^-----BEGIN ([A-Z0-9 ]+)-----[ \t\r]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ServerTls:
    """A certificate, with those that lead to a root after it, and its private key."""

    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class _Block:
    label: str
    der: bytes


def server_context(files: ServerTls) -> ssl.SSLContext:
    """Raises `InvalidRequest` naming the file that cannot be used, and why."""
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
                hint="the first private key and the first certificate count",
            ) from exc
        raise InvalidRequest(
            f"TLS files {files.cert} and {files.key} cannot be used: {_describe(exc)}"
        ) from exc
    return context


def client_context(ca: Path) -> ssl.SSLContext:
    """Trust exactly the certificates in `ca`; raises `InvalidRequest`."""
    certificates = _check_certificates(ca, "CA file")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # Checks the host's name, too.
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A certificate that is pinned need not be one that signs others.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=b"".join(certificates))
    return context


def _check_certificates(file: Path, what: str) -> list[bytes]:
    """Every certificate in a file, in order."""
    found = [b.der for b in _read_blocks(file, what) if b.label == _CERTIFICATE]
    if not found:
        raise InvalidRequest(f"{what} {file} holds no certificate")
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
            f"TLS key file {file} holds no private key", hint="PKCS#8, PKCS#1 or SEC1, in PEM"
        )
    # OpenSSL would pass over it to the next one.
    if not _is_sequence(keys[0].der):
        raise InvalidRequest(f"TLS key file {file}: the first private key is malformed")


def _is_sequence(der: bytes) -> bool:
    """Whether it is one whole DER sequence, as every key is."""
    if len(der) < 2 or der[0] != 0x30:
        return False
    if der[1] < 0x80:
        return len(der) == 2 + der[1]
    head = 2 + (der[1] & 0x7F)
    return len(der) == head + int.from_bytes(der[2:head])


def _read_blocks(file: Path, what: str) -> list[_Block]:
    """What stands in a PEM file, in order. One block that is not whole spoils the file."""
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
    raise InvalidRequest(
        f"TLS key file {file} is encrypted", hint="nobody is there to type its password"
    )


def _refuse_password() -> str:
    """OpenSSL would ask at the terminal."""
    raise ValueError("the key is encrypted")


def _describe(exc: Exception) -> str:
    reason = exc.reason if isinstance(exc, ssl.SSLError) else None
    return (reason or str(exc)).replace("_", " ").lower()
