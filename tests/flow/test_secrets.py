"""Keys are never visible, wherever they are configured and whatever the provider returns."""

import json
import logging
import re
import socket
import traceback
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
from msgspec import Struct

from culm.model.base import ToolSpec
from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Reply
from culm.wire.codec import Json, decode
from tests.flow.config_files import ConfigDict, config_of, open_configured, provider, write
from tests.flow.drive import open_events, send
from tests.flow.probes import Probe, script
from tests.flow.runs import Harness
from tests.support import contract

KEY = "Zk9wQ2-h4RdT0gue55_7xLm"  # Not in a format that a key filter would recognize.
PAUSES = (5.0, 10.0, 20.0)


@dataclass(frozen=True)
class KeyLocation:
    """A location of a key, and the provider configuration that uses it."""

    provider: Callable[[str, Path], ConfigDict]  # From its URL and the folder of the test.
    server_env: Mapping[str, str] = field(default_factory=dict[str, str])
    create_env: Mapping[str, str] = field(default_factory=dict[str, str])
    is_set_by_client: bool = False
    is_header: bool = True  # It is sent as a header.


def _with(key: str, **more: object) -> Callable[[str, Path], ConfigDict]:
    return lambda url, _: provider(url, key, **more)


def _printed(url: str, folder: Path) -> ConfigDict:
    write(folder / "vault", f"{KEY}\n")
    return provider(url, f"$(cat {folder}/vault; echo {folder} >&2)")


KEY_LOCATIONS = {
    "the user's file": KeyLocation(_with(KEY)),
    "the server's environment": KeyLocation(_with("$MY_KEY"), server_env={"MY_KEY": KEY}),
    "a create's environment": KeyLocation(_with("${MY_KEY}"), create_env={"MY_KEY": KEY}),
    "a client's word": KeyLocation(_with(""), is_set_by_client=True),
    "a header": KeyLocation(_with("", extra_headers={"Authorization": f"Token {KEY}"})),
    "a command's output": KeyLocation(_printed),
    "the address": KeyLocation(lambda url, _: provider(f"{url}?key={KEY}", "k"), is_header=False),
    "a key for Anthropic": KeyLocation(_with(KEY, type="anthropic")),
    "a password": KeyLocation(
        lambda url, _: provider(url.replace("://", f"://me:{KEY}@"), ""), is_header=False
    ),
}

ECHOES = {
    "401": Reply(status=401, body=json.dumps({"error": {"message": f"bad key {KEY}"}})),
    "HTML": Reply(body=f"<html><title>No</title><p>{KEY}</p></html>"),
    "redirect": Reply(status=302, headers={"Location": f"http://127.0.0.1:1/?token={KEY}"}),
    "200 with an error": Reply(body=json.dumps({"error": {"message": f"{KEY} is unknown"}})),
    "header": Reply(status=400, headers={"X-Key": KEY}, body=f"{KEY} {quote(KEY)}"),
    "its own words": Reply(status=403, body=f"key={quote_plus(KEY)}; {KEY[:8]}"),
}


class FaultyProbe(Probe):
    """A tool that raises an unexpected error."""

    @property
    def spec(self) -> ToolSpec:
        if self.parallel:
            raise RuntimeError("a bug")
        return super().spec


@asynccontextmanager
async def open_with_key(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    location: KeyLocation,
    model: ModelServer,
    tool: FaultyProbe,
) -> AsyncGenerator[Harness]:
    for name, value in location.server_env.items():
        monkeypatch.setenv(name, value)
    config = config_of({"demo": location.provider(model.url, folder)})
    async with open_configured(
        folder, model, config, tools=[tool], env=location.create_env
    ) as harness:
        if location.is_set_by_client:
            body = {"scope": 0, "provider_id": "demo", "kind": "string", "api_key": KEY}
            assert (await harness.request("POST", "/config/provider-key", body)).status == 200
        yield harness


# --- everything that is visible


class Routes(Struct):
    paths: dict[str, dict[str, Json]]


async def answers(harness: Harness, run_id: str) -> AsyncGenerator[tuple[str, str]]:
    """The answers of all GET routes."""
    routes = decode((await send(harness.flow, "GET", "/v1/openapi.json")).body, Routes).paths
    known = {"workspace_id": harness.remote.id, "session_id": harness.session_id, "run_id": run_id}
    for path, methods in routes.items():
        if "get" not in methods or path.endswith("/events"):
            continue
        target = re.sub(r"{(\w+)}", lambda found: known.get(found[1], "x"), path)
        answer = await send(harness.flow, "GET", target)
        yield target, f"{answer.headers} {answer.body.decode()}"


def files(folder: Path) -> Iterator[tuple[str, str]]:
    """All files on the disk, except the configuration that a client stored."""
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.name != "config.json":
            yield str(file), file.read_bytes().decode("latin-1")


def reports(records: list[logging.LogRecord]) -> Iterator[tuple[str, str]]:
    """Every log line, and the traceback of a crash with its local variables."""
    for record in records:
        yield "log", f"{record.getMessage()} {record.args!r}"
        if record.exc_info and (exc := record.exc_info[1]) is not None:
            whole = traceback.TracebackException.from_exception(exc, capture_locals=True)
            yield "crash", "".join(whole.format())


def assert_hidden(where: str, text: str) -> None:
    at = text.find(KEY)
    assert at < 0, f"{where}: …{text[max(0, at - 200) : at + 60]}…"


@contract("EXC-21", "CFG-4")
@pytest.mark.parametrize("name", KEY_LOCATIONS)
async def test_key_is_in_no_response_event_log_file_or_crash_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level(logging.DEBUG)
    location, tool = KEY_LOCATIONS[name], FaultyProbe("probe")
    async with (
        open_model_server(script(*ECHOES.values())) as model,
        open_with_key(tmp_path, monkeypatch, location, model, tool) as harness,
        open_events(harness.flow, harness.remote, view="crush") as theirs,
        open_events(harness.flow, harness.remote) as ours,
    ):
        ended = [await harness.received.complete(await harness.prompt(why)) for why in ECHOES]
        assert all(complete.error for complete in ended), "each of them failed"
        fine = await harness.received.complete(await harness.prompt("Hi."))
        assert fine.text == "Fine."
        for seen in harness.seen() if location.is_header else ():
            assert KEY in str(dict(seen.headers))
        tool.parallel = True  # From here on it raises.
        crashed = await harness.received.complete(await harness.prompt("Break."))
        assert crashed.error == "Internal error: See the server's log."

        last = crashed.run_id.encode()
        for stream in (theirs, ours):
            assert_hidden("an event", (await stream.until(last)).decode())
        async for where, text in answers(harness, ended[0].run_id):
            assert_hidden(where, text)
        for where, text in files(tmp_path / "data"):
            assert_hidden(where, text)
    for where, text in (*reports(caplog.records), *files(tmp_path / "data")):
        assert_hidden(where, text)


async def test_unreachable_provider_is_named_without_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # Bound and not listening, so connections are refused.
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1?key={KEY}"
        config = config_of({"demo": provider(url, KEY)})
        async with (
            open_model_server() as model,
            open_configured(tmp_path, model, config) as harness,
        ):
            run_id = await harness.prompt("Hi.")
            for pause_s in PAUSES:
                await harness.clock.pass_retry(pause_s)
            complete = await harness.received.complete(run_id)
            assert complete.error.startswith("No connection: 127.0.0.1:")
            assert_hidden("the error", complete.error)
            assert_hidden("the run", str(await harness.run(run_id)))
    for where, text in (*reports(caplog.records), *files(tmp_path / "data")):
        assert_hidden(where, text)


@pytest.mark.parametrize(
    "key", [f"{KEY}\nX", f"{KEY}\0", f"{KEY}…", f"\ud800{KEY}"], ids=["lines", "NUL", "…", "half"]
)
async def test_key_that_cannot_be_sent_is_not_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    caplog.set_level(logging.DEBUG)
    async with open_model_server(script()) as model:
        config = config_of({"demo": provider(model.url, key)})
        async with open_configured(tmp_path, model, config) as harness:
            complete = await harness.received.complete(await harness.prompt("Hi."))
            assert complete.error or complete.text
            assert_hidden("the error", complete.error)
    for where, text in (*reports(caplog.records), *files(tmp_path / "data")):
        assert_hidden(where, text)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("provider-key", {"provider_id": "demo", "kind": "strange", "api_key": KEY}),
        ("provider-key", {"provider_id": "", "kind": "string", "api_key": KEY}),
        ("provider-key", {"provider_id": "demo", "kind": "string", "api_key": [KEY]}),
        ("provider-key", {"provider_id": "demo", "kind": "oauth", "api_key": KEY}),
        ("set", {"key": "providers", "value": KEY}),
        ("set", {"key": "providers.demo", "value": {"api_key": {"is": KEY}}}),
        ("set", {"key": "providers.demo.models", "value": [KEY]}),
        ("set", {"key": "", "value": KEY}),
        ("set", {"scope": 7, "key": "providers.demo.api_key", "value": KEY}),
    ],
)
async def test_refused_config_change_does_not_return_the_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, route: str, body: ConfigDict
) -> None:
    caplog.set_level(logging.DEBUG)
    async with open_model_server() as model, open_configured(tmp_path, model, {}) as harness:
        answer = await harness.request("POST", f"/config/{route}", body)
        assert answer.status == 400
        assert_hidden("the answer", answer.body.decode())
    for where, text in reports(caplog.records):
        assert_hidden(where, text)


@pytest.mark.parametrize("login", [f"me:{KEY}", f"me:p@{KEY}", f"{KEY}:", f"me:{KEY}@"])
async def test_base_url_is_shown_without_credentials(tmp_path: Path, login: str) -> None:
    config = config_of({"demo": provider(f"http://{login}@127.0.0.1:1/v1")})
    async with open_model_server() as model, open_configured(tmp_path, model, config) as harness:
        shown = harness.remote.info.config.providers["demo"].base_url
        assert shown == "http://127.0.0.1:1/v1"


@contract("CFG-4")
@pytest.mark.parametrize(
    "broken",
    [
        f'{{"providers": {{"demo": {{"api_key": "{KEY}',
        f'{{"providers": {{"demo": {{"api_key": {KEY}}}}}}}',
        f'{{"providers": {{"demo": {{"api_key": ["{KEY}"]}}}}}}',
        f'{{"providers": {{"demo": {{"api_kye": "{KEY}"}}}}}}',
        f'{{"providers": {{"demo": {{"extra_headers": {{"X": 1}}, "type": 2}}}}}} "{KEY}"',
        f'{{"providers": "{KEY}", "options": "{KEY}", "env": ["{KEY}"]}}',
    ],
    ids=["cut off", "no string", "a list", "misspelled", "behind the end", "everywhere"],
)
async def test_config_error_is_reported_without_the_key_beside_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    caplog.set_level(logging.DEBUG)
    (tmp_path / "project").mkdir()
    write(tmp_path / "project" / "culm.json", broken)
    async with open_model_server() as model, open_configured(tmp_path, model, {}) as harness:
        assert harness.remote.info.notices
        assert_hidden("the workspace", str(harness.remote.info))
    for where, text in reports(caplog.records):
        assert_hidden(where, text)
