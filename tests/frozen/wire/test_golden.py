"""The wire format equals its transcripts, and an unmodified Crush client can read all of it.

To change the wire on purpose, record the transcripts again: `python -m tests.frozen.wire.record`.
"""

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from culm.server.openapi import document
from culm.server.routes import ROUTES
from culm.wire.codec import encode
from culm.wire.events import CRUSH_PAYLOADS, OUR_PAYLOADS
from tests.crush_client import types as crush
from tests.crush_client.golang import decode
from tests.crush_client.strict import anomalies
from tests.frozen.wire.record import COMMAND, perform
from tests.frozen.wire.scenario import SECRET
from tests.frozen.wire.story import Story
from tests.frozen.wire.transcript import events_in, kept, parts_in, render, routes_in
from tests.wire.payloads import EXAMPLES

_W = "/v1/workspaces/{workspace_id}"
_A = f"{_W}/agent/sessions/{{session_id}}"
_R = f"{_W}/runs/{{run_id}}"
OURS = {
    f"GET {_W}/snapshot",
    "GET /v1/openapi.json",
    "GET /v1/docs",
    f"POST {_A}/compact",
    f"POST {_A}/steer",
    f"GET {_A}/queue",
    f"PUT {_A}/queue",
    f"GET {_W}/runs",
    f"GET {_R}",
    f"PUT {_R}",
    f"POST {_R}/cancel",
    f"POST {_R}/start",
    f"POST {_R}/drop",
    f"GET {_W}/permissions/asks",
    f"GET {_W}/permissions/grants",
    f"DELETE {_W}/permissions/grants/{{grant_id}}",
    f"GET {_W}/questions",
    f"GET {_W}/processes",
    f"GET {_W}/tools",
    f"GET {_W}/stats",
    f"GET {_W}/agents",
    f"POST {_W}/agents",
    f"GET {_W}/agents/{{agent_id}}",
    f"POST {_W}/agents/{{agent_id}}/message",
    f"POST {_W}/agents/{{agent_id}}/cancel",
    f"POST {_W}/agents/{{agent_id}}/budget",
    f"GET {_W}/mail",
    f"POST {_W}/mail",
    f"POST {_W}/mail/ring",
    f"GET {_W}/mail/letters/{{letter_id}}",
    f"POST {_W}/mail/letters/{{letter_id}}/reply",
    "POST /v1/mail/ring",
}
# Routes that this version always refuses; an implemented route leaves this list.
UNBUILT = {
    f"POST {_W}/config/refresh-oauth",
    f"POST {_W}/skills/read",
    f"GET {_W}/lsps/{{lsp}}/diagnostics",
    f"POST {_W}/mcp/auth",
    f"POST {_W}/mcp/read-resource",
    f"POST {_W}/mcp/get-prompt",
    f"POST {_W}/mcp/docker/enable",
    f"POST {_W}/mcp/docker/disable",
}


def nameless(method: str, path: str) -> str:
    """Return a route without the names in its path, which differ from those of Crush."""
    return f"{method} {re.sub(r'{[a-z_]+}', '{}', path)}"


CRUSH_ROUTES = {nameless(route.method, route.path): route for route in crush.ROUTE_ANSWERS.values()}


_PLAYED: dict[str, Story] = {}  # Shared by all tests, which do not change it.


@pytest.fixture(params=["unix", "tcp"])
async def story(tmp_path: Path, request: pytest.FixtureRequest) -> Story:
    kind = str(request.param)
    if kind not in _PLAYED:
        _PLAYED[kind] = await perform(tmp_path, kind)
    return _PLAYED[kind]


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    lines: list[str] = []
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name, "").splitlines(), new.get(name, "").splitlines()
        lines += difflib.unified_diff(before, after, f"kept/{name}", f"now/{name}", lineterm="")
    return "\n".join(lines)


def test_wire_transcripts_are_unchanged(story: Story) -> None:
    changed = differences(kept(), render(story.names, story.exchanges, story.streams))
    if changed:
        pytest.fail(f"{changed}\n\nto change it on purpose: {COMMAND}", pytrace=False)


def test_every_answer_of_a_crush_route_decodes_as_in_go(story: Story) -> None:
    for exchange in story.exchanges:
        route = CRUSH_ROUTES.get(nameless(exchange.method, exchange.path))
        if route is None:
            assert f"{exchange.method} {exchange.path}" in OURS
            continue
        status, body = exchange.answer.status, exchange.answer.body
        if status >= 300:
            decode(body, crush.ERROR).must()
            continue
        assert status == (202 if route.path.endswith("/agent") and body == b"" else 200)
        if route.answer is None:
            assert body == b"", exchange.target
        else:
            decode(body, route.answer).must()


def test_every_event_of_the_crush_view_decodes_in_crush(story: Story) -> None:
    (stream,) = [stream for stream in story.streams if stream.view == "crush"]
    lines = stream.raw.seen.splitlines()
    assert len(lines) > len(CRUSH_PAYLOADS)
    assert [(found, line) for line in lines if (found := anomalies(line))] == []


def test_every_route_is_in_the_transcripts_and_all_built_ones_succeed() -> None:
    found: dict[str, list[int]] = {}
    for name, text in kept().items():
        if name.startswith("routes/"):
            found |= routes_in(text)
    assert found.keys() == {f"{route.method} {route.path}" for route in ROUTES}
    assert [route for route, statuses in found.items() if not statuses] == []
    refused = {route for route, statuses in found.items() if min(statuses) >= 300}
    assert refused == UNBUILT


@pytest.mark.parametrize("name", kept())
def test_responses_and_events_contain_no_client_secret(name: str) -> None:
    shown = [line for line in kept()[name].splitlines() if not line.startswith("> ")]
    assert [line for line in shown if SECRET in line] == []


def test_routes_are_those_of_crush_and_the_listed_own_ones() -> None:
    ours = {nameless(*route.split(" ")) for route in OURS}
    assert {nameless(route.method, route.path) for route in ROUTES} == CRUSH_ROUTES.keys() | ours


def test_every_type_of_event_is_in_the_transcripts() -> None:
    assert CRUSH_PAYLOADS.keys() == crush.EVENT_PAYLOADS.keys()
    assert events_in(kept()["events/crush.txt"]) == CRUSH_PAYLOADS.keys()
    assert events_in(kept()["events/delta.txt"]) == CRUSH_PAYLOADS.keys() | OUR_PAYLOADS.keys()


@pytest.mark.parametrize("name", ["routes/sessions.txt", "events/crush.txt", "events/delta.txt"])
def test_every_type_of_part_is_in_the_transcripts(name: str) -> None:
    assert parts_in(kept()[name]) == crush.PARTS.keys()


def answer_examples() -> dict[str, bytes]:
    """Return the examples of non-empty answers in the document, by route."""
    found: dict[str, bytes] = {}
    for path, methods in document()["paths"].items():
        for method, operation in methods.items():
            answers = [a for status, a in operation["responses"].items() if status != "default"]
            for content in answers[0].get("content", {}).values():
                if "example" in content:
                    found[f"{method.upper()} {path}"] = json.dumps(content["example"]).encode()
    return {route: found[route] for route in sorted(found.keys() - OURS)}


@pytest.mark.parametrize("route", answer_examples())
def test_every_example_of_an_answer_decodes_as_in_go(route: str) -> None:
    kind = CRUSH_ROUTES[nameless(*route.split(" "))].answer
    assert kind is not None
    decode(answer_examples()[route], kind).must()


@pytest.mark.parametrize("kind", CRUSH_PAYLOADS)
def test_every_example_of_an_event_decodes_as_in_go(kind: str) -> None:
    decode(encode(EXAMPLES[CRUSH_PAYLOADS[kind]]), crush.EVENT_PAYLOADS[kind]).must()
