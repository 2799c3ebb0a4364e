"""Unusable models: the run ends with the reason and a hint."""

import asyncio
import gzip
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, Script
from tests.flow.config_files import ConfigDict, chosen, config_of, open_configured, provider
from tests.flow.reading import finish_of
from tests.flow.runs import Harness
from tests.flow.test_fallbacks import PAUSES, unreachable_url
from tests.support import contract

URL = "http://127.0.0.1:1/v1"


async def assert_failed(harness: Harness, run_id: str, title: str, reason: str, hint: str) -> None:
    """The run ends with this error, and the session stays usable."""
    complete = await harness.received.complete(run_id)
    run = await harness.run(run_id)
    assert (run.outcome, run.title) == ("error", title)
    details, mark, advice = run.details.partition("\nhint: ")
    assert reason in details
    assert mark
    assert hint in advice
    assert complete.error == f"{title}: {run.details}"
    finish = finish_of((await harness.messages())[-1])
    assert (finish.reason, finish.message, finish.details) == ("error", title, run.details)
    assert not (await harness.session()).is_busy


def only(one: ConfigDict, model_id: str = "demo-1", **more: object) -> ConfigDict:
    return {"models": {"large": chosen("demo", model_id)}, "providers": {"demo": one}, **more}


UNUSABLE: Mapping[str, tuple[ConfigDict, str]] = {
    "nobody has set it up": (
        {"models": {"large": chosen("openai", "gpt-5.4")}},
        "OPENAI_API_KEY",
    ),
    "nobody knows it": (
        {"models": {"large": chosen("nobody")}},
        "provider 'nobody' is not configured",
    ),
    "it is switched off": (only(provider(URL, disable=True)), "provider 'demo' is disabled"),
    "no model is named": (only(provider(URL), ""), "no model of provider 'demo' is selected"),
    "its type is unknown": (
        only(provider(URL, type="opnai")),
        "unknown provider type 'opnai'; known types: openai,",
    ),
    "it has no address": (only(provider("")), "provider 'demo' has no base_url"),
    "it has no key": (
        {
            "models": {"large": chosen("openai")},
            "providers": {"openai": {"base_url": URL}},
        },
        "provider 'openai' has no key: set OPENAI_API_KEY, or write providers.openai.api_key",
    ),
    "its key is in no variable": (
        only(provider(URL, "$NOT_SET_ANYWHERE")),
        "providers.demo.api_key: $NOT_SET_ANYWHERE is not set",
    ),
    "its address is in no variable": (
        only(provider("http://${NOT_SET_ANYWHERE}/v1")),
        "providers.demo.base_url: $NOT_SET_ANYWHERE is not set",
    ),
    "its key leads to itself": (
        only(provider(URL, "$ONE"), env={"ONE": "$TWO", "TWO": "$ONE"}),
        "providers.demo.api_key: $ONE refers to itself by way of $TWO",
    ),
}


@contract("INV-39", "MODEL-2")
@pytest.mark.parametrize(("config", "reason"), UNUSABLE.values(), ids=list(UNUSABLE))
async def test_unusable_model_ends_the_run_with_the_reason_and_a_hint(
    tmp_path: Path, config: ConfigDict, reason: str
) -> None:
    async with open_model_server() as unused, open_configured(tmp_path, unused, config) as harness:
        run_id = await harness.prompt("Hi.")
        await assert_failed(harness, run_id, "Model not available", reason, "culm models")


async def test_failed_key_command_ends_the_run_with_its_config_path(
    tmp_path: Path,
) -> None:
    config = only(provider(URL, "$(exit 3)"))
    async with open_model_server() as unused, open_configured(tmp_path, unused, config) as harness:
        run_id, reason = await harness.prompt("Hi."), "providers.demo.api_key: a command failed"
        await assert_failed(harness, run_id, "Unresolved reference", reason, "culm config show")


@contract("MODEL-2")
@pytest.mark.parametrize(
    ("reply", "title", "reason", "hint"),
    [
        (Reply(status=401), "Authentication problem", "demo refused the key", "`culm models`"),
        (Reply(status=402), "Out of credit", "no credit left", "`culm models`"),
        (Reply(status=404), "Model or address not found", "demo-1", "`culm models demo`"),
        (
            Reply(status=404, body='{"error": {"code": "model_not_found", "message": "no"}}'),
            "Model not found",
            "demo does not offer the model demo-1",
            "`culm models demo`",
        ),
        (Reply(body="<html>Hello</html>"), "Unreadable answer", "HTML", "base_url"),
        (
            Reply(body='{"error": {"message": "Incorrect API key", "code": 401}}'),
            "Authentication problem",
            "Incorrect API key",
            "`culm models`",
        ),
        (
            Reply(status=301, headers={"Location": "http://a.test/v2"}),
            "The provider has moved",
            "http://a.test/v2",
            "set the base_url of provider demo",
        ),
    ],
    ids=["key", "credit", "not found", "model", "HTML", "200 with an error", "moved"],
)  # fmt: skip
async def test_provider_error_ends_the_run_with_the_reason_and_a_hint(
    tmp_path: Path, reply: Reply, title: str, reason: str, hint: str
) -> None:
    async with open_model_server(Script(otherwise=reply)) as model:
        config = config_of({"demo": provider(model.url)})
        async with open_configured(tmp_path, model, config) as harness:
            await assert_failed(harness, await harness.prompt("Hi."), title, reason, hint)


@pytest.mark.parametrize("url", ["nonsense", "ftp://127.0.0.1/v1", "http://[::1/v1", "http://:0"])
async def test_invalid_base_url_ends_the_run_with_a_hint(tmp_path: Path, url: str) -> None:
    config = only(provider(url))
    async with open_model_server() as unused, open_configured(tmp_path, unused, config) as harness:
        await assert_failed(
            harness,
            await harness.prompt("Hi."),
            "The provider's address is wrong",
            "the base_url of provider demo is not a usable URL",
            "https://",
        )


async def test_unreachable_base_url_ends_the_run_with_a_hint(
    tmp_path: Path,
) -> None:
    with unreachable_url() as url:
        config = config_of({"demo": provider(url)})
        async with (
            open_model_server() as unused,
            open_configured(tmp_path, unused, config) as harness,
        ):
            run_id = await harness.prompt("Hi.")
            for pause_s in PAUSES:
                await harness.clock.pass_retry(pause_s)
            await assert_failed(
                harness, run_id, "No connection", "cannot be reached", "base_url of provider demo"
            )


# --- transfer encodings


def events(*, line_end: str = "\n", last: str = "\n\n") -> bytes:
    """A hello answer in the format of the provider."""
    pieces: list[ConfigDict] = [{"delta": {"content": "Hel"}}, {"delta": {"content": "lo."}}]
    pieces.append({"delta": {}, "finish_reason": "stop"})
    lines = [f"data: {json.dumps({'choices': [piece]})}" for piece in pieces]
    text = "\n\n".join([*lines, "data: [DONE]"]) + last
    return text.replace("\n", line_end).encode()


ENCODINGS: Mapping[str, tuple[bytes, str, int]] = {
    "plain": (events(), "", 1 << 16),
    "chunks of one byte": (events(), "", 1),
    "CRLF": (events(line_end="\r\n"), "", 7),
    "no final newline": (events(last=""), "", 1 << 16),
    "gzip": (gzip.compress(events()), "Content-Encoding: gzip\r\n", 10),
}


@asynccontextmanager
async def open_fixed_answer(body: bytes, headers: str, chunk: int) -> AsyncGenerator[str]:
    """The URL of a provider that sends this answer to every request."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{headers}"
            "Connection: close\r\n\r\n".encode()
        )
        for at in range(0, len(body), chunk):
            writer.write(body[at : at + chunk])
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()
        await server.wait_closed()


@contract("MODEL-2")
@pytest.mark.parametrize(("body", "headers", "chunk"), ENCODINGS.values(), ids=list(ENCODINGS))
async def test_model_answer_is_read_in_every_transfer_encoding(
    tmp_path: Path, body: bytes, headers: str, chunk: int
) -> None:
    async with open_model_server() as unused, open_fixed_answer(body, headers, chunk) as url:
        config = config_of({"demo": provider(url)})
        async with open_configured(tmp_path, unused, config) as harness:
            complete = await harness.received.complete(await harness.prompt("Hi."))
            assert (complete.text, complete.error) == ("Hello.", "")
