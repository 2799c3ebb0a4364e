"""TLS with a certificate made for the test."""

import ssl
from pathlib import Path

import aiohttp
import pytest

from tests.certificates import make_certificate
from tests.live.harness import START_S, make_directory, open_process_server, run_process, run_serve
from tests.support import contract

# As in a user's program: the certificate is trusted by the environment, not by an option.
CLIENT = """
import asyncio, sys
from culm.client.http import open_client
from culm.client.follower import open_mirror

async def main(url, token, path):
    async with open_client(url, token=token) as client:
        remote = await client.open_workspace(path)
        async with open_mirror(remote) as follower, asyncio.timeout(5):
            await follower.connected()
            session = await remote.create_session("over TLS")
            await follower.until(lambda mirror: session.id in mirror.sessions)
            print("mirrored", follower.mirror.sessions[session.id].title)

asyncio.run(main(*sys.argv[1:]))
"""


@contract("EXC-21")
async def test_with_a_certificate_https_is_served_and_plain_http_is_refused(
    folder: Path,
) -> None:
    cert, key = await make_certificate(folder, "IP:127.0.0.1", START_S)
    tls = ("--tls-cert", str(cert), "--tls-key", str(key))
    async with open_process_server(folder, "--host", "tcp://127.0.0.1:0", *tls) as server:
        address = server.url.partition("://")[2]
        context = ssl.create_default_context(cafile=cert)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"https://{address}/v1/health", ssl=context) as response:
                assert response.status == 401
            headers = {"Authorization": f"Bearer {server.token}"}
            async with session.get(
                f"https://{address}/v1/health", ssl=context, headers=headers
            ) as response:
                assert response.status == 200
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"http://{address}/v1/health", headers=headers)
        project = str(make_directory(folder))
        client = await run_process(
            folder,
            *("-c", CLIENT, f"https://{address}", server.token, project),
            env={"SSL_CERT_FILE": str(cert)},
        )
        assert (client.status, client.stdout) == (0, "mirrored over TLS"), client.stderr


async def test_certificate_without_its_key_is_refused(folder: Path) -> None:
    cert, key = await make_certificate(folder, "IP:127.0.0.1", START_S)
    for args in (("--tls-cert", str(cert)), ("--tls-key", str(key))):
        ended = await run_serve(folder, "--host", "tcp://127.0.0.1:0", *args)
        assert ended.status == 2
        assert "--tls-cert and --tls-key go together" in ended.stderr


async def test_unreadable_certificate_is_refused_with_the_reason(folder: Path) -> None:
    cert, key = await make_certificate(folder, "IP:127.0.0.1", START_S)
    cert.write_text("not a certificate")
    tls = ("--tls-cert", str(cert), "--tls-key", str(key))
    ended = await run_serve(folder, "--host", "tcp://127.0.0.1:0", *tls)
    assert (ended.status, ended.stdout) == (2, "")
    assert f"cannot use --tls-cert {cert}" in ended.stderr
    assert "Traceback" not in ended.stderr
