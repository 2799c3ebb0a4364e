"""The client's calls, one per route: requests, success statuses and error texts.

Owns crush-wire §14.1. The order of the calls is in `client.py` and `run.py`.
"""

from collections.abc import Mapping
from urllib.parse import quote, urlencode

from tests.crush_client.golang import Decoded, Record, decode, encode, record
from tests.crush_client.transport import Answer, Body, Request, Transport, TransportError
from tests.crush_client.types import ERROR, ROUTE_ANSWERS

# These read {"message"} of an error and show it; all others show the number alone.
MESSAGE_ROUTES = frozenset({5, 7, 9, 10, 12, 35, 36, 66})
EMPTY_BODY_ROUTES = frozenset({20, 21, 22})  # No bytes at all mean no messages.
PATH_SAFE = "/$&+,:;=@~"  # Characters that url.URL does not escape in a path.
STREAM_HEADERS = {
    "Accept": "text/event-stream",
    "Cache-Control": "no-cache",
    "Connection": "keep-alive",
}


class CallError(Exception):
    """A call that failed, with the text the client would show."""


class StatusError(CallError):
    def __init__(self, status: int, message: str = "") -> None:
        super().__init__(f"status code {status}: {message}" if message else f"status code {status}")
        self.status = status
        self.message = message


class NoAnswer(CallError):
    """The transport failed, or the response could not be decoded."""


class Api:
    """One client's view of one server."""

    def __init__(self, transport: Transport, client_id: str) -> None:
        self.transport = transport
        self.client_id = client_id
        self.workspace_id = ""

    @property
    def sent(self) -> list[str]:
        """Every request so far, with `W` for the workspace and `C` for the client."""
        where = f"/v1/workspaces/{self.workspace_id}"
        log = self.transport.log
        return [line.replace(where, "W").replace(self.client_id, "C") for line in log]

    async def call(
        self,
        number: int,
        body: Mapping[str, object] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        **ids: str,
    ) -> object:
        """Call a route; returns its decoded answer, None for an empty one. Raises `CallError`."""
        request = self._request(number, body, query or {}, ids)
        try:
            answer = await self.transport.exchange(request)
        except TransportError as exc:
            raise NoAnswer(str(exc)) from exc
        if answer.status != 200 and not (number == 36 and answer.status == 202):
            raise _refusal(number, answer)
        return _decoded(number, answer)

    async def get(
        self, number: int, *, query: Mapping[str, str] | None = None, **ids: str
    ) -> Record:
        """Call a route whose response is a struct; see `call`."""
        return record(await self.call(number, None, query=query, **ids))

    async def subscribe(self) -> Body:
        """Open the event stream; returns when its head is there. Raises `CallError`."""
        query = {"client_id": self.client_id}
        request = self._request(12, None, query, {}, STREAM_HEADERS)
        try:
            body = await self.transport.open(request)
            if body.status == 200:
                return body
            try:
                answer = Answer(body.status, body.headers, await body.read_all())
            finally:
                await self.transport.drop(body)
        except TransportError as exc:
            raise NoAnswer(str(exc)) from exc
        raise _refusal(12, answer)

    async def select(self, session_id: str) -> None:
        query = {"client_id": self.client_id}
        await self.call(10, {"session_id": session_id}, query=query)

    def _request(
        self,
        number: int,
        body: Mapping[str, object] | None,
        query: Mapping[str, str],
        ids: Mapping[str, str],
        headers: Mapping[str, str] | None = None,
    ) -> Request:
        method, template, _ = ROUTE_ANSWERS[number]
        path = template.format(**{"id": self.workspace_id, "client_id": self.client_id, **ids})
        target = quote(path, safe=PATH_SAFE)
        if query:
            target += f"?{urlencode(sorted(query.items()))}"
        if body is None:
            return Request(method, target, None, headers or {})
        # Go sets a Content-Type if the client does not, as for /v1/control only.
        kind = "text/plain" if number == 4 else "application/json"
        return Request(method, target, encode(body), {**(headers or {}), "Content-Type": kind})


def _refusal(number: int, answer: Answer) -> StatusError:
    if number not in MESSAGE_ROUTES:
        return StatusError(answer.status)
    found = decode(answer.body, ERROR)
    return StatusError(answer.status, "" if found.error else record(found.value).text("message"))


def _decoded(number: int, answer: Answer) -> object:
    kind = ROUTE_ANSWERS[number].answer
    if kind is None:
        return None
    if not answer.body and number in EMPTY_BODY_ROUTES:
        return []
    found = decode(answer.body, kind)
    if found.error is not None:
        raise NoAnswer(f"failed to decode: {found.error.text}") from found.error
    return found.value


async def probe(transport: Transport, number: int) -> Decoded:
    """Send a GET whose status is ignored (§2.6); raises `CallError`."""
    method, path, kind = ROUTE_ANSWERS[number]
    assert kind is not None, "it is decoded"
    try:
        answer = await transport.exchange(Request(method, path))
    except TransportError as exc:
        raise NoAnswer(str(exc)) from exc
    found = decode(answer.body, kind)
    if found.error is not None:
        raise NoAnswer(str(found.error)) from found.error
    return found
