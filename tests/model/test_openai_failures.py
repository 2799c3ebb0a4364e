"""Every way a provider can fail, and the failure shown to the user."""

import asyncio
import shutil
import socket
import ssl
import subprocess
import traceback
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from culm.errors import ModelFailed
from culm.model.base import AnswerDone, ProviderAccess, TextDelta
from tests.model.provider import (
    END,
    KEY,
    REQUEST,
    STOP,
    STREAM_HEAD,
    Reply,
    Then,
    answer_to,
    ask,
    chunk,
    delta,
    failure_of,
    head,
    open_model,
    open_provider,
    refusal,
    stream,
)
from tests.support import WAIT_S

ERROR_BODY = b'{"error": {"message": "the reason", "type": "t"}}'


@pytest.mark.parametrize(
    ("status", "title", "transient"),
    [
        ("400 Bad Request", "The provider refused", False),
        ("401 Unauthorized", "Authentication problem", False),
        ("402 Payment Required", "Out of credit", False),
        ("403 Forbidden", "Authentication problem", False),
        ("404 Not Found", "Model or address not found", False),
        ("408 Request Timeout", "The provider has a problem", True),
        ("409 Conflict", "The provider has a problem", True),
        ("413 Content Too Large", "The request is too large", False),
        ("422 Unprocessable", "The provider refused", False),
        ("425 Too Early", "The provider has a problem", True),
        ("429 Too Many Requests", "Too many requests", True),
        ("500 Internal Server Error", "The provider has a problem", True),
        ("502 Bad Gateway", "The provider has a problem", True),
        ("503 Service Unavailable", "The provider has a problem", True),
        ("529 Overloaded", "The provider has a problem", True),
    ],
)
async def test_each_status_has_its_failure_title(
    status: str, title: str, *, transient: bool
) -> None:
    failure = await failure_of(refusal(status, ERROR_BODY))
    assert failure.title == title
    assert failure.transient == transient
    assert f"({status[:3]}): the reason" in failure.message


async def test_a_refused_key_names_the_provider_to_check() -> None:
    failure = await failure_of(refusal("401 Unauthorized", ERROR_BODY))
    assert failure.hint == (
        "check the key of provider acme: `culm models` shows where it comes from"
    )


async def test_a_missing_model_is_named() -> None:
    assert "model-1" in (await failure_of(refusal("404 Not Found", ERROR_BODY))).message


async def test_a_spent_quota_is_a_permanent_failure() -> None:
    body = b'{"error": {"message": "pay", "type": "insufficient_quota", "code": "x"}}'
    assert not (await failure_of(refusal("429 Too Many Requests", body))).transient


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "words"}}', "words"),
        (b'{"error": "words"}', "words"),
        (b'{"message": "words"}', "words"),
        (b'{"detail": "words"}', "words"),
        (b'{"detail": [{"loc": ["body", 0], "msg": "words"}]}', "body.0: words"),
        (b'{"detail": [{"loc": ["a"], "msg": "b"}, "c"]}', "a: b; c"),
        (b'[{"error": {"message": "words"}}]', "words"),
        (b'{"error": {"message": ""}}', '{"message":""}'),
        (b'{"error": null}', '{"error":null}'),
        (b"  plain\n  words ", "plain words"),
        (b"<html><body>502</body></html>", "an HTML page"),
        (b'{"error": {"message": "wo', '{"error": {"message": "wo'),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"[" * 50_000, "[" * 2000 + "…"),
        (b"", "no details"),
        (b"0", "0"),
    ],
)
async def test_the_message_of_the_provider_is_shown(body: bytes, message: str) -> None:
    failure = await failure_of(refusal("400 Bad Request", body))
    assert failure.message == f"acme refused (400): {message}"


async def test_a_huge_error_body_is_read_in_part() -> None:
    pieces = [head("500 Oops", Content_Length=10_000_000), *[b"x" * 100_000] * 100]
    failure = await failure_of(Reply(pieces, "hold"))
    assert len(failure.message) < 2100
    assert failure.transient


async def test_an_incomplete_error_body_is_shown_after_a_timeout() -> None:
    reply = Reply([head("503 Busy", Content_Length=100) + b"half"], "hold")
    failure = await failure_of(reply, stall_s=1.0)
    assert failure.message == "acme failed (503): half"


@pytest.mark.parametrize(
    ("fields", "wait_s"),
    [
        ({"Retry_After": "7"}, 7.0),
        ({"retry_after": "0.5"}, 0.5),
        ({"retry_after_ms": "250", "Retry_After": "7"}, 0.25),
        (
            {
                "Retry_After": "Wed, 21 Oct 2015 07:28:30 GMT",
                "Date": "Wed, 21 Oct 2015 07:28:00 GMT",
            },
            30.0,
        ),
        (
            {
                "Retry_After": "Wed, 21 Oct 2015 07:28:00 GMT",
                "Date": "Wed, 21 Oct 2015 07:28:30 GMT",
            },
            0.0,
        ),
        ({"Retry_After": "Wed, 21 Oct 2015 07:28:30 GMT"}, None),
        (
            {
                "Retry_After": "Wed, 21 Oct 2015 07:28:30 -0000",
                "Date": "Wed, 21 Oct 2015 07:28:30 GMT",
            },
            None,
        ),
        ({"Retry_After": "soon"}, None),
        ({"Retry_After": "nan"}, None),
        ({"Retry_After": "inf"}, None),
        ({"Retry_After": "-1"}, None),
        ({}, None),
    ],
)
async def test_the_retry_delay_is_parsed(fields: dict[str, str], wait_s: float | None) -> None:
    failure = await failure_of(refusal("429 Too Many Requests", ERROR_BODY, **fields))
    assert failure.retry_after_s == wait_s


async def test_a_redirect_is_not_followed() -> None:
    async with open_provider(stream(STOP)) as other:
        failure = await failure_of(refusal("307 Moved", Location=other.url))
        assert failure.title == "The provider has moved"
        assert other.url in failure.message
        assert not failure.transient
        assert other.requests == []


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (
            "text/html",
            b"<html>welcome</html>",
            "acme sent text/html instead of a stream: an HTML page",
        ),
        ("application/json", b'{"choices": []}', "acme sent a document instead of a stream"),
        ("application/json", b'{"message": "words"}', "a document instead of a stream: words"),
        ("application/json", b"[]", "acme sent a document instead of a stream: []"),
        ("application/json", b'{"choi', 'a document instead of a stream: {"choi'),
        ("text/event-stream", b"<html>welcome</html>", "instead of a stream: an HTML page"),
        ("text/event-stream", b"\n\n<!DOCTYPE html>\n<p>", "a document instead of a stream"),
        (
            "text/plain",
            b'\xef\xbb\xbf{\n  "error": {"message": "words"}\n}\n',
            "acme broke off its answer: words",
        ),
        (
            "application/json",
            b'[{"error": {"code": 400, "message": "words", "status": "INVALID_ARGUMENT"}}]',
            "acme refused (400): words",
        ),
        (
            "application/json",
            b'{"object": "error", "message": "words", "code": 400}',
            "acme refused (400): words",
        ),
        (
            "application/json",
            b'{"error": {"message": "words"}}',
            "acme broke off its answer: words",
        ),
    ],
)
async def test_a_document_instead_of_a_stream_is_a_failure(
    kind: str, body: bytes, message: str
) -> None:
    failure = await failure_of(refusal("200 OK", body, Content_Type=kind))
    assert message in failure.message
    assert not failure.transient


async def test_a_204_is_a_permanent_failure() -> None:
    assert not (await failure_of(Reply([head("204 No Content")]))).transient


# --- the key


@pytest.mark.parametrize("place", ["error", "stream", "redirect", "junk", "document", "reason"])
async def test_a_key_echoed_by_the_provider_is_not_shown(place: str) -> None:
    echo = f"bad key {KEY} and token-87654321".encode()
    location = f"https://elsewhere.example/?key={KEY}&t=token-87654321"
    reply = {
        "error": refusal("401 Unauthorized", echo),
        "stream": stream(b'data: {"error": "' + echo + b'"}\n\n'),
        "redirect": refusal("302 Found", Location=location),
        "junk": stream(b"data: " + echo + b"\n\n"),
        "document": refusal("200 OK", echo, Content_Type="text/html"),
        "reason": Reply([b"HTTP/1.1 xyz " + echo + b"\r\n\r\n"], "close"),
    }[place]
    async with open_provider(reply) as provider:
        access = ProviderAccess(
            base_url=provider.url, api_key=KEY, headers={"X-T": "Token token-87654321"}
        )
        async with open_model("", access=access) as model:
            with pytest.raises(ModelFailed) as caught:
                await ask(model)
    assert provider.requests[0].headers["authorization"] == f"Bearer {KEY}"
    logged = "".join(traceback.format_exception(caught.value))
    shown = f"{caught.value.title} {caught.value.message} {caught.value.hint}"
    for secret in (KEY, "token-87654321"):
        assert secret not in shown
        assert secret not in logged


@pytest.mark.parametrize("place", ["the query", "the password", "an address that is none"])
async def test_a_key_in_the_address_is_not_shown(place: str) -> None:
    async with open_provider(refusal("401 Unauthorized", KEY.encode())) as provider:
        url = {
            "the query": f"{provider.url}/?key={KEY}",
            "the password": provider.url.replace("//", f"//user:{KEY}@"),
            "an address that is none": f"http://user:{KEY}@[::1/v1?key={KEY}",
        }[place]
        async with open_model("", access=ProviderAccess(base_url=url)) as model:
            with pytest.raises(ModelFailed) as caught:
                await ask(model)
    failure = caught.value
    logged = "".join(traceback.format_exception(failure))
    assert KEY not in f"{failure.title} {failure.message} {failure.hint} {logged}"
    if place == "the query":
        assert provider.requests[0].path == f"/v1/chat/completions?key={KEY}"


async def test_a_key_at_the_end_of_a_cut_message_is_not_shown_in_part() -> None:
    body = b"x" * 1990 + KEY.encode()
    assert "sk-" not in (await failure_of(refusal("400 Bad Request", body))).message


@pytest.mark.parametrize("key", ["a\nb", "a\0b", "a\r\nHost: evil"])
async def test_a_key_that_is_not_valid_in_a_header_is_a_failure(key: str) -> None:
    async with (
        open_provider() as provider,
        open_model("", access=ProviderAccess(base_url=provider.url, api_key=key)) as model,
    ):
        with pytest.raises(ModelFailed) as caught:
            await ask(model)
    assert not caught.value.transient
    assert "API key" in caught.value.hint


# --- failed and broken connections


async def failure_at(base_url: str) -> ModelFailed:
    async with asyncio.timeout(WAIT_S), open_model(base_url) as model:
        with pytest.raises(ModelFailed) as caught:
            await ask(model)
        return caught.value


async def test_a_refused_connection_is_a_transient_failure() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # Nothing listens, and no other process can.
        failure = await failure_at(f"http://127.0.0.1:{taken.getsockname()[1]}/v1")
    assert failure.title == "No connection"
    assert failure.transient


async def test_an_unknown_host_is_a_transient_failure() -> None:
    failure = await failure_at("http://nobody.invalid/v1")
    assert failure.title == "Provider not found"
    assert "nobody.invalid" in failure.message
    assert failure.transient


@pytest.mark.parametrize("url", ["", "nonsense", "ftp://host/v1", "http://", "http://[::1/v1"])
async def test_an_invalid_address_is_a_permanent_failure(url: str) -> None:
    failure = await failure_at(url)
    assert failure.title == "The provider's address is wrong"
    assert not failure.transient


@asynccontextmanager
async def open_server(context: ssl.SSLContext | None) -> AsyncGenerator[str]:
    """Open a server that greets each client and disconnects."""

    def on_connect(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello\r\n")
        writer.close()

    server = await asyncio.start_server(on_connect, "127.0.0.1", 0, ssl=context)
    try:
        yield f"https://localhost:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()


async def test_a_server_without_tls_is_a_failure() -> None:
    async with open_server(None) as url:
        failure = await failure_at(url)
    assert failure.title == "No secure connection"
    assert failure.transient


@pytest.fixture
def untrusted(tmp_path: Path) -> ssl.SSLContext:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subject = ["-subj", "/CN=localhost", "-days", "1"]
    make = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject]
    subprocess.run([*make, "-keyout", key, "-out", cert], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context


async def test_an_untrusted_certificate_is_a_failure(untrusted: ssl.SSLContext) -> None:
    async with open_server(untrusted) as url:
        failure = await failure_at(url)
    assert failure.title == "No secure connection"
    assert failure.transient


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200", b"SSH-2.0-OpenSSH_9.6\r\n\r\n"])
async def test_a_peer_that_does_not_speak_http_is_a_transient_failure(sent: bytes) -> None:
    assert (await failure_of(Reply([sent], "close"))).transient


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(stream(delta(content="a"), end=b"", then="close"), id="no last chunk"),
        pytest.param(stream(delta(content="a"), end=b"", then="reset"), id="reset"),
        pytest.param(
            Reply([head("200 OK", Content_Type="text/event-stream", Content_Length=999)], "close"),
            id="shorter than said",
        ),
        pytest.param(
            Reply([head("200 OK", Content_Type="text/event-stream") + delta(content="a")], "close"),
            id="closed",
        ),
        pytest.param(Reply([STREAM_HEAD + b"not a size\r\n"], "hold"), id="broken chunks"),
        pytest.param(Reply([STREAM_HEAD, b"not a size\r\n"], "hold"), id="broken chunks later"),
    ],
)
async def test_a_broken_stream_is_a_transient_failure(reply: Reply) -> None:
    assert (await failure_of(reply, stall_s=0.2)).transient


async def test_a_stream_broken_between_two_reads_is_a_failure() -> None:
    reply = Reply([STREAM_HEAD + chunk(delta(content="a")), b"not a size\r\n"], "hold")
    async with open_provider(reply) as provider, open_model(provider.url) as model:
        events = model.stream(REQUEST)
        assert await anext(events) == TextDelta("a")
        await provider.left.wait()
        with pytest.raises(ModelFailed) as caught:
            await anext(events)
        assert caught.value.transient


@pytest.mark.parametrize("then", ["hold", "close", "reset"])
async def test_a_complete_answer_does_not_wait_for_the_end_of_the_connection(then: Then) -> None:
    reply = Reply([STREAM_HEAD + chunk(delta("stop", content="a"))], then)
    async with open_provider(reply) as provider, open_model(provider.url, stall_s=1.0) as model:
        assert await ask(model) == [TextDelta("a"), AnswerDone("end_turn")]


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([], id="no head"),
        pytest.param([STREAM_HEAD], id="no body"),
        pytest.param([STREAM_HEAD + chunk(delta(content="a"))], id="no more"),
        pytest.param([STREAM_HEAD + chunk(b'data: {"choi')], id="half a line"),
    ],
)
async def test_a_provider_that_stops_answering_times_out(pieces: list[bytes]) -> None:
    failure = await failure_of(Reply(pieces, "hold"), stall_s=0.05)
    assert failure.title == "The provider stopped answering"
    assert "for 0.05 s" in failure.message
    assert failure.transient


async def test_a_line_of_ten_megabytes_is_refused_without_buffering_it() -> None:
    sent = delta(content="a") + b"data: " + b"x" * 10_000_000
    async with (
        open_provider(Reply([STREAM_HEAD + chunk(sent)], "hold")) as provider,
        open_model(provider.url) as model,
    ):
        events = model.stream(REQUEST)
        assert await anext(events) == TextDelta("a")
        with pytest.raises(ModelFailed, match="a line too long") as caught:
            await anext(events)
        assert not caught.value.transient
        await provider.left.wait()


async def test_a_line_just_under_a_megabyte_is_read() -> None:
    text = "x" * ((1 << 20) - 100)
    assert await answer_to(Reply([STREAM_HEAD + chunk(delta(content=text) + STOP) + END])) == [
        TextDelta(text),
        *(await answer_to(stream(STOP))),
    ]
