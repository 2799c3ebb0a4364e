"""Sessions and their messages."""

from aiohttp import web

from culm.ids import SessionId
from culm.server.problems import answer, done, parse_request
from culm.server.routes.base import workspace_of
from culm.store.messages import messages_of_session, user_messages, user_messages_of_session
from culm.wire.requests import SaveSession


async def list_sessions(request: web.Request) -> web.Response:
    return answer(await workspace_of(request).list_sessions())


async def create_session(request: web.Request) -> web.Response:
    body = await parse_request(request, SaveSession)
    return answer(await workspace_of(request).create_session(body.title))


async def get_session(request: web.Request) -> web.Response:
    return answer(await workspace_of(request).get_session(_session_id(request)))


async def rename_session(request: web.Request) -> web.Response:
    """Only the title is a client's to set; everything else it sends back is what it was told."""
    body = await parse_request(request, SaveSession)
    return answer(await workspace_of(request).rename_session(_session_id(request), body.title))


async def delete_session(request: web.Request) -> web.Response:
    await workspace_of(request).delete_session(_session_id(request))
    return done()


async def list_messages(request: web.Request) -> web.Response:
    query = messages_of_session(_session_id(request))
    messages, _ = await workspace_of(request).messages.read(query)
    return answer(messages)


async def list_prompts_of_session(request: web.Request) -> web.Response:
    query = user_messages_of_session(_session_id(request))
    messages, _ = await workspace_of(request).messages.read(query)
    return answer(messages)


async def list_prompts(request: web.Request) -> web.Response:
    messages, _ = await workspace_of(request).messages.read(user_messages)
    return answer(messages)


async def list_nothing(request: web.Request) -> web.Response:
    """File history and tracker: empty until tools touch files."""
    workspace_of(request)
    return answer([])


def _session_id(request: web.Request) -> SessionId:
    return SessionId(request.match_info["sid"])


_W = "/v1/workspaces/{id}"

ROUTES = [
    web.get(f"{_W}/sessions", list_sessions),
    web.post(f"{_W}/sessions", create_session),
    web.get(f"{_W}/sessions/{{sid}}", get_session),
    web.put(f"{_W}/sessions/{{sid}}", rename_session),
    web.delete(f"{_W}/sessions/{{sid}}", delete_session),
    web.get(f"{_W}/sessions/{{sid}}/messages", list_messages),
    web.get(f"{_W}/sessions/{{sid}}/messages/user", list_prompts_of_session),
    web.get(f"{_W}/messages/user", list_prompts),
    web.get(f"{_W}/sessions/{{sid}}/history", list_nothing),
    web.get(f"{_W}/sessions/{{sid}}/filetracker/files", list_nothing),
]
