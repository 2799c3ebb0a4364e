"""The OpenAPI document and its page are valid and complete, and the server conforms to them."""

import asyncio
import json
import re
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Protocol, cast

import jsonschema_rs
import pytest
import requests
import schemathesis
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

from culm.assemble import Server, open_server
from culm.ids import Ids
from culm.server.api import HeadersOnly, Route
from culm.server.openapi import document
from culm.server.routes import ROUTES
from culm.settings import Settings
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, ReplyRule, Script
from culm.wire.codec import Json
from culm.wire.runs import RUN_HEADER
from tests.fleet.host_harness import open_fake_launcher
from tests.support import BREADTH, WAIT_S, FakeClock, model_config, serve_options

NEVER_ENDING = "Take all the time there is."
SCRIPT = Script(rules=[ReplyRule(NEVER_ENDING, Reply(hold_after=0))], otherwise=Reply(text="Done."))
# For each operation, both of valid and of invalid requests.
EXAMPLES_MAX = max(1, int(5 * BREADTH))
_W = "/v1/workspaces/{workspace_id}"
STREAM = f"GET {_W}/events"
NOT_BUILT = {
    f"POST {_W}/agent/sessions/{{session_id}}/shell",
    f"POST {_W}/mcp/docker/enable",
    f"POST {_W}/mcp/docker/disable",
}
BY_LABEL = {f"{route.method} {route.path}": route for route in ROUTES}


# --- protocols for schemathesis, whose own types are incomplete


class Response(Protocol):
    status_code: int
    content: bytes
    text: str

    def json(self) -> Json: ...


class GeneratedCase(Protocol):
    """One generated request."""

    body: Json
    query: dict[str, object]
    path_parameters: dict[str, object]

    def call(self, *, base_url: str, session: requests.Session, timeout: float) -> Response: ...
    def as_transport_kwargs(self, *, base_url: str) -> dict[str, Json]: ...
    def validate_response(self, response: Response, *, checks: list[object]) -> None: ...


class Operation(Protocol):
    label: str

    def as_strategy(
        self, *, generation_mode: GenerationMode
    ) -> st.SearchStrategy[GeneratedCase]: ...


class OperationResult(Protocol):
    def ok(self) -> Operation: ...


class Schema(Protocol):
    def validate(self) -> None: ...
    def get_all_operations(self) -> Iterable[OperationResult]: ...


def load(described: dict[str, Json]) -> Schema:
    # A copy, since a generated case may be an example itself and `sanitize` changes cases.
    # The protocols above contain only the documented part of the library.
    return cast("Schema", schemathesis.openapi.from_dict(deepcopy(described)))


# By name, since the signatures of these functions have no types.
CHECKS: list[object] = [
    vars(checks)[f"{name}_conformance"]
    for name in ("status_code", "content_type", "response_schema", "response_headers")
]
OPERATIONS = {o.label: o for o in (found.ok() for found in load(document()).get_all_operations())}


# Error codes that must not appear for existing objects.
NOT_FOUND = ("workspace_not_found", "run_not_found", "agent_not_found", "letter_not_found")


def operation_of(label: str) -> dict[str, Json]:
    route = BY_LABEL[label]
    return document()["paths"][route.path][route.method.lower()]


# --- a server in its own thread, on a real socket


@dataclass
class RunningServer:
    """A server with one open workspace, and a client for it."""

    url: str
    http: requests.Session
    folder: Path
    model_url: str
    workspace_id: str = ""
    session_id: str = ""
    busy_id: str = ""  # A session whose run never ends, so that others are queued.
    visitor: str = ""  # A client that may leave; another one keeps the workspace.
    ids: Ids = field(default_factory=lambda: Ids(seed=2))

    def ask(self, method: str, path: str, body: object = None) -> requests.Response:
        data = None if body is None else json.dumps(body)
        return self.http.request(method, f"{self.url}{path}", data=data, timeout=WAIT_S)

    def new_session(self) -> str:
        made = self.ask("POST", f"/v1/workspaces/{self.workspace_id}/sessions", {"title": "x"})
        return str(made.json()["id"])

    def new_run(self) -> str:
        """Start a run that stays queued."""
        self._name_model()
        path = f"/v1/workspaces/{self.workspace_id}/agent"
        if not self.busy_id:
            self.busy_id = self.new_session()
            self.ask("POST", path, {"session_id": self.busy_id, "prompt": NEVER_ENDING})
        # A prompt with its own run id does not join the active turn.
        body = {"session_id": self.busy_id, "prompt": "x", "run_id": self.ids.run()}
        made = self.ask("POST", path, body)
        assert made.status_code == 202, made.text
        return made.headers[RUN_HEADER]

    def new_agent(self) -> str:
        self._name_model()
        path = f"/v1/workspaces/{self.workspace_id}/agents"
        made = self.ask("POST", path, {"prompt": "x"})
        assert made.status_code == 202, made.text
        return str(made.json()["agent_id"])

    def new_letter(self) -> str:
        path = f"/v1/workspaces/{self.workspace_id}/mail"
        made = self.ask("POST", path, {"to": self.new_agent(), "text": "x"})
        assert made.status_code == 202, made.text
        return str(made.json()["letter_id"])

    def new_ids(self, names: Iterable[str]) -> dict[str, str]:
        """Create the objects that each request needs anew; return the ids for `names`."""
        make = {
            "run_id": self.new_run,
            "agent_id": self.new_agent,
            "letter_id": self.new_letter,
        }
        return {name: make[name]() for name in names if name in make}

    def _name_model(self) -> None:
        """Configure the model again, since a test may have changed the configuration."""
        path = f"/v1/workspaces/{self.workspace_id}/config"
        config = model_config(self.model_url)
        for key in ("models", "providers"):
            body = {"scope": 1, "key": key, "value": config[key]}
            assert self.ask("POST", f"{path}/set", body).status_code == 200

    def path_of(self, route: Route) -> str:
        """Return the path of a route with the ids of existing objects."""
        ids = {"workspace_id": self.workspace_id, "session_id": self.session_id}
        ids |= self.new_ids(re.findall(r"{(\w+)}", route.path))
        return route.path.format(**ids, client_id=self.visitor, lsp="gopls")


@contextmanager
def open_threaded_server(folder: Path) -> Generator[tuple[Server, str]]:
    """Open a server on its own event loop; yield it with the URL of a model server.

    Its clock never advances, so no claim expires.
    """
    started, servers = threading.Event(), list[tuple[Server, str]]()
    ends: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        end = asyncio.Event()
        ends.append((asyncio.get_running_loop(), end))
        options = serve_options(folder, "tcp://127.0.0.1:0", settings=Settings(queue_max=1000))
        async with (
            open_model_server(SCRIPT) as model,
            open_fake_launcher() as launcher,
            open_server(options, FakeClock(), Ids(), lambda: None, launcher=launcher) as server,
        ):
            servers.append((server, model.url))
            started.set()
            await end.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())

    with ThreadPoolExecutor(1, "server") as pool:
        served = pool.submit(run)
        assert started.wait(WAIT_S), "the server did not start"
        try:
            yield servers[0]
        finally:
            for loop, end in ends:
                loop.call_soon_threadsafe(end.set)
            served.result(WAIT_S)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("openapi").resolve()
    (folder / "project").mkdir()
    ids = Ids(seed=1)
    with open_threaded_server(folder) as (server, model_url), requests.Session() as http:
        http.headers["Authorization"] = f"Bearer {server.token}"
        url = str(server.addresses[0]).replace("tcp:", "http:")
        found = RunningServer(url, http, folder, model_url)
        for client in (ids.client(), ids.client()):
            body = {"path": str(folder / "project"), "client_id": client}
            found.workspace_id = found.ask("POST", "/v1/workspaces", body).json()["id"]
            found.visitor = client
        found.session_id = found.new_session()
        found.new_run()
        yield found
        assert found.ask("GET", f"/v1/workspaces/{found.workspace_id}").status_code == 200


# --- the document


def test_the_document_is_valid_openapi_and_the_validator_finds_errors() -> None:
    assert document()["openapi"] == "3.1.0"
    load(document()).validate()
    with pytest.raises(jsonschema_rs.ValidationError):
        load({**document(), "info": {}}).validate()


def test_the_document_contains_exactly_the_routes() -> None:
    assert OPERATIONS.keys() == BY_LABEL.keys()


def test_every_operation_has_a_unique_id() -> None:
    ids = [operation_of(label)["operationId"] for label in BY_LABEL]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("label", BY_LABEL)
def test_an_operation_has_the_types_of_its_handler(label: str) -> None:
    operation, hints = operation_of(label), BY_LABEL[label].hints()
    names = {(p["name"], p["in"]) for p in operation["parameters"]}
    in_path = {(name, "path") for name in re.findall(r"{(\w+)}", BY_LABEL[label].path)}
    query = getattr(hints.get("query"), "__struct_fields__", ())
    assert names == in_path | {(name, "query") for name in query}
    assert ("requestBody" in operation) == ("body" in hints)
    if "body" in hints:
        (content,) = operation["requestBody"]["content"].values()
        assert content["schema"]["$ref"].rpartition("/")[2] in str(hints["body"])
        assert "example" in content
    answer = operation["responses"][str(BY_LABEL[label].status)]
    assert ("content" in answer) == (hints["return"] not in (type(None), HeadersOnly))
    in_head = {RUN_HEADER} if hints["return"] is HeadersOnly else set[str]()
    assert answer.get("headers", {}).keys() == in_head
    assert operation["summary"]


def examples(value: Json, where: str = "") -> Iterator[tuple[str, Json, Json]]:
    """Yield each example in the document with its place and schema."""
    if isinstance(value, dict):
        if "example" in value and "schema" in value:
            yield where, value["schema"], value["example"]
        for key, item in cast("dict[str, Json]", value).items():  # Read from JSON.
            yield from examples(item, f"{where} {key}")


def test_every_example_matches_its_schema() -> None:
    found = list(examples(document()["paths"]))
    assert len(found) > len(BY_LABEL)
    for where, schema, example in found:
        whole = {**schema, "components": document()["components"]}
        validator = jsonschema_rs.Draft202012Validator(whole, validate_formats=True)
        errors = [str(error) for error in validator.iter_errors(example)]
        assert errors == [], where


def requests_with_examples() -> list[str]:
    return [label for label in BY_LABEL if "requestBody" in operation_of(label)]


@pytest.mark.parametrize("label", requests_with_examples())
def test_every_request_example_is_accepted(running: RunningServer, label: str) -> None:
    (content,) = operation_of(label)["requestBody"]["content"].values()
    path = running.path_of(BY_LABEL[label])
    needs_client = any(p["name"] == "client_id" for p in operation_of(label)["parameters"])
    query = f"?client_id={running.visitor}" if needs_client else ""
    example = content["example"]
    if "worktree" in example:
        example = {**example, "worktree": False}  # The workspace is not a repository.
    answer = running.ask(BY_LABEL[label].method, path + query, example)
    if answer.status_code >= 300:
        # The request was valid; the session may be missing or a workspace open.
        assert answer.json()["code"] != "invalid_request", answer.text
        assert answer.status_code != 500


# --- generated requests


def sanitize(label: str, case: GeneratedCase, running: RunningServer, *, real: bool) -> None:
    """Keep all paths inside the test's folder; use existing ids if `real`."""
    body = cast("dict[str, object]", case.body) if isinstance(case.body, dict) else {}
    if label == "POST /v1/workspaces":
        for name, text in body.items():  # Names ignore case.
            if name.casefold() in ("path", "data_dir") and isinstance(text, str) and text:
                body[name] = f"{running.folder}/{name}{text.replace('/', '_')[:100]}"
    if not real:
        return
    ids = {"workspace_id": running.workspace_id, "session_id": running.session_id}
    if label == f"DELETE {_W}/sessions/{{session_id}}":
        ids["session_id"] = running.new_session()
    ids |= running.new_ids(case.path_parameters)
    _replace(case.path_parameters, ids)
    ids["client_id"] = running.visitor
    _replace(case.query, ids)
    _replace(body, ids)


def _replace(given: dict[str, object], ids: Mapping[str, str]) -> None:
    given.update({name: value for name, value in ids.items() if name in given})


def check(label: str, case: GeneratedCase, response: Response, *, real: bool) -> None:
    status = response.status_code
    assert status < 500 or (status == 501 and label in NOT_BUILT), response.text
    case.validate_response(response, checks=CHECKS)
    if status < 300:
        documented = operation_of(label)["responses"]
        assert str(status) in documented, "a success is documented by its number"
        assert "content" in documented[str(status)] or response.content == b""
    elif real and "workspace_id" in case.path_parameters:
        assert response.json()["code"] not in NOT_FOUND


bounded = settings(
    max_examples=EXAMPLES_MAX,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


def fuzz(label: str, mode: GenerationMode, running: RunningServer) -> None:
    @bounded
    @given(OPERATIONS[label].as_strategy(generation_mode=mode), st.booleans())
    def call(case: GeneratedCase, real: bool) -> None:  # noqa: FBT001 - drawn by position
        sanitize(label, case, running, real=real)
        response = case.call(base_url=running.url, session=running.http, timeout=WAIT_S)
        check(label, case, response, real=real)

    call()


@pytest.mark.parametrize("label", sorted(OPERATIONS.keys() - {STREAM}))
def test_a_valid_request_is_answered_as_documented(running: RunningServer, label: str) -> None:
    fuzz(label, GenerationMode.POSITIVE, running)


def can_be_invalid(label: str) -> bool:
    """Tell if a request can be invalid; any text is valid in a path."""
    operation = operation_of(label)
    return "requestBody" in operation or any(p["in"] == "query" for p in operation["parameters"])


@pytest.mark.parametrize("label", [*filter(can_be_invalid, sorted(OPERATIONS.keys() - {STREAM}))])
def test_an_invalid_request_is_answered_as_documented(running: RunningServer, label: str) -> None:
    fuzz(label, GenerationMode.NEGATIVE, running)


@pytest.mark.parametrize("mode", GenerationMode)
def test_an_event_stream_starts_or_is_refused_as_documented(
    running: RunningServer, mode: GenerationMode
) -> None:
    seen: set[int] = set()

    @settings(bounded, max_examples=15)  # Enough to get each answer.
    @given(OPERATIONS[STREAM].as_strategy(generation_mode=mode), st.booleans())
    def call(case: GeneratedCase, real: bool) -> None:  # noqa: FBT001 - drawn by position
        sanitize(STREAM, case, running, real=real)
        wanted = case.as_transport_kwargs(base_url=running.url)
        with running.http.request(**wanted, timeout=WAIT_S, stream=True) as response:
            seen.add(response.status_code)
            if response.status_code == 200:  # Its body never ends.
                assert response.headers["Content-Type"] == "text/event-stream"
            else:
                assert response.status_code in (400, 404)
                assert response.json().keys() == {"message", "code", "hint"}

    call()
    assert 200 in seen or mode is GenerationMode.NEGATIVE


# --- the page


class Page(HTMLParser):
    """Records the unclosed tags, links and loaded resources of a page."""

    VOID = frozenset({"meta", "br", "hr", "img", "input", "link"})
    LOADING = frozenset({"script", "link", "img", "iframe", "object", "embed", "video", "audio"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if tag not in self.VOID:
            self.open.append(tag)
        if tag in self.LOADING or "src" in found or "srcset" in found:
            self.loads.append(tag)
        self.links += [found["href"]] if "href" in found else []
        self.ids += [found["id"]] if "id" in found else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes something else at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_shows_every_route_is_well_formed_and_loads_nothing(
    running: RunningServer,
) -> None:
    answer = running.ask("GET", "/v1/docs")
    assert answer.headers["Content-Type"].startswith("text/html")
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
    page = Page()
    page.feed(answer.text)
    page.close()
    assert page.open == []
    assert page.loads == []
    assert re.findall(r"@import|url\(", answer.text) == []
    assert [link for link in page.links if link != "openapi.json" and link[0] != "#"] == []
    assert {link[1:] for link in page.links if link[0] == "#"} <= set(page.ids)
    assert len(set(page.ids)) == len(page.ids)
    shown = "".join(page.text)
    for route in ROUTES:
        assert f"{route.method}{route.path}" in shown
