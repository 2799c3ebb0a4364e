"""Self-signed certificates."""

import asyncio
import shutil
from asyncio.subprocess import DEVNULL
from pathlib import Path

import pytest


async def make_certificate(folder: Path, name: str, within_s: float) -> tuple[Path, Path]:
    """A certificate for `name` (as in `IP:127.0.0.1`), and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    cert, key = folder / "cert.pem", folder / "key.pem"
    process = await asyncio.create_subprocess_exec(
        *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
        *("-nodes", "-days", "2", "-subj", "/CN=culm test", "-addext"),
        *(f"subjectAltName={name}", "-keyout", str(key), "-out", str(cert)),
        stdout=DEVNULL,
        stderr=DEVNULL,
    )
    async with asyncio.timeout(within_s):
        assert await process.wait() == 0
    return cert, key
