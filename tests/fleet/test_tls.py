"""TLS of links: certificate and key files of a worker, and trust of the host."""

import asyncio
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from culm import fleet
from culm.errors import InvalidRequest
from culm.fleet.transport.base import ConnectFailed
from culm.fleet.transport.tls import ServerTls, client_context, server_context
from culm.fleet.transport.websocket import connect_websocket, listen_websocket
from culm.fleet.worker_server.connection import ServeOnce
from tests.fleet.fake_executors import RepeatingExecutor
from tests.fleet.link_harness import close_all
from tests.support import WAIT_S, contract

MAKE_S = 60.0  # RSA key generation takes random time, and the machine may be busy.


def openssl(*args: str) -> None:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("openssl is not installed")
    subprocess.run([program, *args], check=True, capture_output=True, timeout=MAKE_S)


@dataclass(frozen=True)
class Pems:
    """Texts of PEM files: two certificates, and their keys in every form."""

    cert: str
    pkcs8: str
    sec1: str
    sec1_params: str  # As openssl writes it: the curve's name comes first.
    encrypted: str
    other_cert: str
    other_pkcs8: str
    other_pkcs1: str
    third_pkcs8: str

    def fill(self, text: str) -> str:
        cut = {"cut_cert": self.cert[:-30] + "\n", "cut_pkcs8": self.pkcs8[:-30]}
        return text.format(**asdict(self), **cut)


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Pems:
    folder = tmp_path_factory.mktemp("pems")

    def path(name: str) -> str:
        return str(folder / name)

    def text(name: str) -> str:
        return (folder / name).read_text()

    openssl("ecparam", "-genkey", "-name", "prime256v1", "-out", path("ec"))
    openssl("ec", "-in", path("ec"), "-out", path("sec1"))
    openssl("pkcs8", "-topk8", "-nocrypt", "-in", path("ec"), "-out", path("pkcs8"))
    openssl("pkcs8", "-topk8", "-passout", "pass:x", "-in", path("ec"), "-out", path("locked"))
    openssl(
        "genpkey", "-algorithm", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", path("third")
    )
    openssl("genrsa", "-traditional", "-out", path("rsa"), "2048")
    openssl("pkcs8", "-topk8", "-nocrypt", "-in", path("rsa"), "-out", path("rsa8"))
    for key, name in (("ec", "cert"), ("rsa", "other")):
        openssl(
            *("req", "-x509", "-key", path(key), "-days", "2", "-subj", f"/CN={name}"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-out", path(name)),
        )
    return Pems(
        cert=text("cert"),
        pkcs8=text("pkcs8"),
        sec1=text("sec1"),
        sec1_params=text("ec"),
        encrypted=text("locked"),
        other_cert=text("other"),
        other_pkcs8=text("rsa8"),
        other_pkcs1=text("rsa"),
        third_pkcs8=text("third"),
    )


def written(folder: Path, cert: str | None, key: str | None) -> ServerTls:
    files = ServerTls(folder / "cert.pem", folder / "key.pem")
    for file, content in ((files.cert, cert), (files.key, key)):
        if content is not None:
            file.write_text(content)
    return files


@contract("FLEET-13")
async def test_run_over_tls_completes_with_a_wss_endpoint(tmp_path: Path, pems: Pems) -> None:
    files = written(tmp_path, pems.cert, pems.pkcs8)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        group.create_task(
            fleet.serve(
                RepeatingExecutor(),
                mode=ServeOnce(),
                token="secret",
                tls=(files.cert, files.key),
                on_ready=ready.set_result,
            )
        )
        endpoint = await ready
        assert endpoint.startswith("wss://127.0.0.1:")
        async with fleet.connect(endpoint, token="secret", ca=files.cert) as peer:
            assert await peer.run("tls hello") == fleet.completed("echo: tls hello")
            assert await peer.run("and again") == fleet.completed("echo: and again")


@contract("FLEET-13", "FLEET-14")
async def test_link_requires_a_trusted_certificate_for_the_host(tmp_path: Path, pems: Pems) -> None:
    files = written(tmp_path, pems.cert, pems.pkcs8)
    other = tmp_path / "other.pem"
    other.write_text(pems.other_cert)
    async with asyncio.timeout(WAIT_S), listen_websocket(tls=files, token="x") as listener:
        for endpoint, ca, reason in (
            (listener.endpoint, None, "its certificate is not trusted: "),
            (listener.endpoint, other, "its certificate is not trusted: "),
            (listener.endpoint.replace("127.0.0.1", "localhost"), files.cert, "not trusted: "),
            (listener.endpoint.replace("wss", "ws"), None, "if it did not expect ws://$"),
            (listener.endpoint, tmp_path / "none.pem", "none.pem cannot be read: No such file"),
        ):
            with pytest.raises(ConnectFailed, match=reason):
                await connect_websocket(endpoint, "x", ca)
        # A client that never begins its handshake blocks nobody.
        host, _, port = listener.endpoint.removeprefix("wss://").rpartition(":")
        _, silent = await asyncio.open_connection(host, int(port))
        both = tmp_path / "both.pem"
        both.write_text(pems.other_cert + pems.cert)
        link = await connect_websocket(listener.endpoint, "x", both)
        await close_all(link, await listener.accept())
        silent.transport.abort()


@contract("FLEET-16")
@pytest.mark.parametrize(
    ("cert", "key"),
    [
        ("{cert}", "{pkcs8}"),
        ("{cert}", "{sec1}"),
        ("{cert}", "{sec1_params}"),
        ("{other_cert}", "{other_pkcs1}"),
        ("{other_cert}", "{other_pkcs8}"),
        # A chain keeps its order: the first certificate is the worker's.
        ("{cert}{other_cert}", "{pkcs8}"),
        ("{other_cert}{cert}", "{other_pkcs8}"),
        # In the key's file certificates are passed over, and the first key counts.
        ("{cert}", "{other_cert}{pkcs8}{other_pkcs8}"),
        ("words\n{cert}words", "words\n\n{pkcs8}"),
    ],
)
@pytest.mark.parametrize("line_end", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_common_certificate_and_key_formats_are_accepted(
    tmp_path: Path, pems: Pems, cert: str, key: str, line_end: str
) -> None:
    texts = [pems.fill(text).replace("\n", line_end) for text in (cert, key)]
    server_context(written(tmp_path, *texts))


BEGIN, END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


@contract("FLEET-15", "FLEET-16")
@pytest.mark.parametrize(
    ("cert", "key", "problem"),
    [
        (None, "{pkcs8}", "TLS certificate file CERT cannot be read: No such file or directory"),
        ("{cert}", None, "TLS key file KEY cannot be read: No such file or directory"),
        (" \n", "{pkcs8}", "TLS certificate file CERT is empty"),
        ("{cert}", "", "TLS key file KEY is empty"),
        ("garbage", "{pkcs8}", "TLS certificate file CERT is not in PEM"),
        ("{cert}", "garbage", "TLS key file KEY is not in PEM"),
        ("{pkcs8}", "{pkcs8}", "TLS certificate file CERT contains no certificate"),
        ("{cert}", "{cert}", "TLS key file KEY contains no private key"),
        ("{cert}", "{encrypted}", "TLS key file KEY is encrypted"),
        ("{cut_cert}", "{pkcs8}", "TLS certificate file CERT: a block 'CERTIFICATE' has no end"),
        (
            "{cut_cert}{cert}",
            "{sec1}",
            "TLS certificate file CERT: a block 'CERTIFICATE' has no end",
        ),
        ("{cert}", "{cut_pkcs8}", "TLS key file KEY: a block 'PRIVATE KEY' has no end"),
        (
            f"{{cert}}{BEGIN}\n!!!!\n{END}\n",
            "{pkcs8}",
            "TLS certificate file CERT: a block 'CERTIFICATE' is not base64",
        ),
        (
            f"{BEGIN}\n{END}\n",
            "{pkcs8}",
            "TLS certificate file CERT: a block 'CERTIFICATE' is empty",
        ),
        (
            f"{{cert}}{BEGIN}\nAAAA\n{END}\n",
            "{pkcs8}",
            "TLS certificate file CERT: certificate 2 is malformed",
        ),
        (
            "{cert}",
            "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n{pkcs8}",
            "TLS key file KEY: the first private key is malformed",
        ),
        (
            "{cert}",
            "-----BEGIN PRIVATE KEY-----\nMAA=\n-----END PRIVATE KEY-----\n",
            "TLS files CERT and KEY cannot be used: ",
        ),
        (
            "{cert}",
            "{other_pkcs8}{pkcs8}",
            "TLS key file KEY does not belong to the certificate in CERT",
        ),
        (
            "{other_cert}{cert}",
            "{sec1}",
            "TLS key file KEY does not belong to the certificate in CERT",
        ),
        (
            "{cert}",
            "{third_pkcs8}",
            "TLS key file KEY does not belong to the certificate in CERT",
        ),
        ("x" * (2 << 20), "{pkcs8}", "TLS certificate file CERT has more than 1048576 bytes"),
    ],
    ids=lambda value: value[4:64] if isinstance(value, str) and value[:4] == "TLS " else "",
)
async def test_tls_file_error_names_the_file_and_nothing_listens(
    tmp_path: Path, pems: Pems, cert: str | None, key: str | None, problem: str
) -> None:
    files = written(tmp_path, cert and pems.fill(cert), key and pems.fill(key))
    with pytest.raises(InvalidRequest) as raised:
        async with listen_websocket(tls=files):
            pytest.fail("it listens")
    message = raised.value.message.replace(str(files.cert), "CERT").replace(str(files.key), "KEY")
    assert message.startswith(problem) if problem.endswith(": ") else message == problem


def test_folder_as_a_certificate_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="Is a directory"):
        client_context(tmp_path)
