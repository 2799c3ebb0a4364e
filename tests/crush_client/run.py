"""`crush run`: one prompt without a terminal, followed to its `run_complete` (crush-wire §13.8).

Owns the whole life of that process, including the retire at its end. It never reconnects.
"""

import asyncio
from collections.abc import Awaitable
from contextlib import aclosing
from dataclasses import dataclass

from tests.crush_client.api import Api, CallError
from tests.crush_client.events import Sleep, parse_line, read_lines
from tests.crush_client.golang import Record, mapping, record, records, to_json
from tests.crush_client.screen import Event
from tests.crush_client.sessions import create_session, resolve_session
from tests.crush_client.startup import Project, Startup, create_workspace, new_id
from tests.crush_client.transport import Body, Transport, TransportError, parse_host
from tests.crush_client.types import check_config, is_configured

READY_EVERY_S, READY_TRIES = 0.2, 150  # 30 s in all.
NO_PROVIDERS = "no providers configured"
TITLE = "non-interactive"


class RunHung(Exception):
    """The stream failed other than by EOF: the real client waits forever."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """The output and the error of the process; an empty `error` means status 0."""

    output: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The command-line options besides the prompt."""

    session: str = ""
    continue_last: bool = False
    model: tuple[str, str] | None = None  # Provider and model.
    small_model: tuple[str, str] | None = None

    @property
    def sets_models(self) -> bool:
        return self.model is not None or self.small_model is not None


def on_run_event(event: Event, run_id: str, session_id: str) -> RunResult | None:
    """The result if the event ends the run with this id; otherwise None."""
    payload = event.payload
    if event.type == "run_complete" and payload.text("run_id") == run_id:
        if payload.text("error") and not payload.flag("cancelled"):
            return RunResult(error=f"agent run failed: {payload.text('error')}")
        return RunResult(payload.text("text") if payload.text("message_id") else "")
    if event.type == "agent_event" and payload.text("error"):
        given = payload.text("run_id")
        if given == run_id or (not given and payload.text("session_id") == session_id):
            return RunResult(error=f"agent error: {payload.text('error')}")
    return None


async def crush_run(
    prompt: str,
    project: Project,
    startup: Startup,
    *,
    options: RunOptions | None = None,
    sleep: Sleep = asyncio.sleep,
    client_id: str = "",
    sent: list[str] | None = None,
) -> RunResult:
    """Run the whole command; raises `RunHung` where the real one never ends.

    `sent` receives the requests, in the format of `Api.sent`.
    """
    api = Api(Transport(parse_host(startup.host)), client_id or new_id())
    try:
        await startup.ensure()
        workspace = await create_workspace(api, project, startup)
        try:
            return await _run(api, workspace, prompt, options or RunOptions(), sleep)
        except CallError as exc:
            return RunResult(error=str(exc))
        finally:
            await retire(api)
    finally:
        await api.transport.aclose()
        if sent is not None:
            sent += api.sent


async def _run(
    api: Api, workspace: Record, prompt: str, options: RunOptions, sleep: Sleep
) -> RunResult:
    if not is_configured(check_config(workspace.find_record("config"))):
        return RunResult(error=NO_PROVIDERS)
    await api.call(37, {"interactive": False})
    session_id = (await resolve_session(api, options.session)).text("id") if options.session else ""
    if options.sets_models:
        await _set_models(api, options)
    await wait_ready(api, sleep)
    await _tolerate(api.call(38))
    session = await _session(api, session_id, options)
    return await prompt_and_watch(api, session.text("id"), prompt)


async def _set_models(api: Api, options: RunOptions) -> None:
    await api.call(11)
    small = options.small_model
    for kind, wanted in (("large", options.model), ("small", small)):
        if wanted is not None:
            await _select_model(api, kind, {"model": wanted[1], "provider": wanted[0]})
    if options.model is not None and small is None:
        found = await api.get(46, query={"provider_id": options.model[0]})
        await _select_model(api, "small", mapping(to_json(found)))
    await api.call(38)


async def _select_model(api: Api, kind: str, model: object) -> None:
    await api.call(49, {"scope": 1, "model_type": kind, "model": model})


async def wait_ready(api: Api, sleep: Sleep) -> None:
    """Poll until the agent is ready; raises `CallError` after 30 s."""
    for _ in range(READY_TRIES):
        info = await _tolerate(api.call(35))
        if info is not None and record(info).flag("is_ready"):
            return
        await sleep(READY_EVERY_S)
    raise CallError("timed out waiting for the agent")


async def _session(api: Api, session_id: str, options: RunOptions) -> Record:
    if session_id:
        session = await api.get(16, sid=session_id)
        if session.text("parent_session_id"):
            raise CallError("cannot continue a child session")
    elif options.continue_last and (found := records(await api.call(14))):
        session = found[0]
    else:
        return await create_session(api, TITLE)
    if not options.sets_models:
        await api.call(20, sid=session.text("id"))
    return session


async def prompt_and_watch(api: Api, session_id: str, prompt: str) -> RunResult:
    """Do steps 10 to 12; raises `CallError`, `RunHung`."""
    run_id = new_id()
    body = await api.subscribe()
    try:
        await api.call(36, {"session_id": session_id, "run_id": run_id, "prompt": prompt})
        return await watch(body, run_id, session_id)
    finally:
        await api.transport.drop(body)


async def watch(body: Body, run_id: str, session_id: str) -> RunResult:
    try:
        async with aclosing(read_lines(body)) as lines:
            async for line in lines:
                event = parse_line(line)
                if event and (ended := on_run_event(event, run_id, session_id)):
                    return ended
    except TransportError as exc:
        raise RunHung(str(exc)) from exc
    return RunResult()  # EOF: status 0 without output.


async def retire(api: Api) -> None:
    """Do step 13: retire, or release on any error, not only on 404."""
    try:
        await api.call(5)
    except CallError:
        await _tolerate(api.call(8, query={"client_id": api.client_id}))


async def _tolerate(call: Awaitable[object]) -> object:
    try:
        return await call
    except CallError:
        return None
