"""`culm agent serve`: an agent in this process that many may call, until a signal ends it."""

import asyncio
import secrets
import shlex
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import click

from culm.cli.agents import discovery_dir_of, discovery_of
from culm.errors import Conflict, Failed, InvalidRequest
from culm.files import replace_file
from culm.fleet.discovery.base import is_running
from culm.fleet.discovery.files import FileDiscovery
from culm.fleet.names import STEM_CHARS_MAX, is_safe_stem
from culm.fleet.provision import (
    PROVISION_VERSION,
    AnyKind,
    BadProvision,
    Capabilities,
    Credential,
    CulmExtension,
    Identity,
    ModelName,
    Provision,
    Secrets,
    check_provision,
)
from culm.fleet.transport.auth import check_door
from culm.fleet.transport.tls import ServerTls
from culm.fleet.worker.lifecycle import WorkerEndpoint, work
from culm.fleet.worker.main import bound_the_end, handle_signals, run_loop, set_up_log
from culm.fleet.worker_server.base import ServeMany
from culm.ids import Ids
from culm.server.auth import TOKEN_BYTES, read_or_make_token
from culm.wire.codec import printable

ID_CHARS = 8  # Enough to tell agents of one role apart.


@dataclass(frozen=True, slots=True, repr=False)
class AgentServeOptions:
    """What `culm agent serve` was asked for."""

    role: str
    executor: AnyKind
    data_dir: Path
    workspace: Path
    agent_id: str = ""  # Made from the role if there is none.
    labels: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 0
    token_file: Path | None = None  # Else one beside the record, for as long as it serves.
    auth: bool = True
    tls: ServerTls | None = None
    model: ModelName | None = None
    credential: Credential | None = None
    env: Mapping[str, str] | None = None  # Of the program of a cli_adapter, beside the usual.


def serve_agent(serving: AgentServeOptions) -> None:
    """Serve until SIGINT or SIGTERM; raises `AppError`."""
    set_up_log("culm")
    check_door(serving.host, has_token=serving.auth, has_tls=serving.tls is not None)
    discovery = discovery_of(serving.data_dir)
    with suppress(OSError):  # What others left behind is in nobody's way.
        discovery.gc()
    agent_id = serving.agent_id or _new_id(serving.role)
    _check_id(discovery, agent_id)
    with _open_token(serving, discovery.token_file(agent_id)) as token:
        provision = _provision(serving, agent_id, token)

        def announce(endpoint: str) -> None:
            how = shlex.join(["culm", "agent", "call", *_options(serving), agent_id, "hello"])
            words = f"agent {agent_id} serves role {serving.role} at {endpoint}; call it: {how}"
            click.echo(printable(words), err=True)

        door = WorkerEndpoint(
            serving.host,
            serving.port,
            serving.tls,
            serving.labels,
            ServeMany(),
            on_ready=announce,
            on_leave=bound_the_end,
        )

        async def main(stop: asyncio.Event) -> None:
            handle_signals(stop)  # At once: there is a file to remove.
            await work(provision, stop, door)

        try:
            check_provision(provision)
            run_loop(main)
        except BadProvision as exc:
            raise InvalidRequest(str(exc)) from exc
        except OSError as exc:
            raise Failed(f"the agent cannot serve: {exc}") from exc


def _options(serving: AgentServeOptions) -> Iterator[str]:
    """What a caller must say that the record does not."""
    if serving.auth and serving.token_file is not None:
        yield from ("--token-file", str(serving.token_file.absolute()))
    if serving.tls is not None:
        yield from ("--ca", str(serving.tls.cert.absolute()))


def _new_id(role: str) -> str:
    number = Ids().run()[:ID_CHARS]
    made = f"{role}-{number}"
    return made if is_safe_stem(made) else f"agent-{number}"


def _check_id(discovery: FileDiscovery, agent_id: str) -> None:
    """Raises `InvalidRequest`, and `Conflict` if callers would find the one or the other."""
    if not is_safe_stem(agent_id):
        words = f"--id has letters, digits, _ - . and no .., at most {STEM_CHARS_MAX}"
        raise InvalidRequest(words)
    found = discovery.find(agent_id)
    if found is not None and is_running(found):
        words = f"agent {agent_id} serves already, as process {found.pid}"
        raise Conflict(words, hint="give another --id, or none")


@contextmanager
def _open_token(serving: AgentServeOptions, own_file: Path) -> Generator[str | None]:
    """The token callers must show; a file of our own goes when we go."""
    if not serving.auth:
        yield None
    elif serving.token_file is not None:
        yield read_or_make_token(serving.token_file)
    else:
        token = secrets.token_urlsafe(TOKEN_BYTES)
        try:
            replace_file(own_file, f"{token}\n".encode())
        except OSError as exc:
            raise Failed(f"cannot write {own_file}: {exc.strerror}") from exc
        try:
            yield token
        finally:
            own_file.unlink(missing_ok=True)


def _provision(serving: AgentServeOptions, agent_id: str, token: str | None) -> Provision:
    credentials = [] if serving.credential is None else [serving.credential]
    return Provision(
        version=PROVISION_VERSION,
        identity=Identity(agent_id, role=serving.role),
        executor=serving.executor,
        fabric_dir=str(discovery_dir_of(serving.data_dir)),
        workspace=str(serving.workspace),
        model=serving.model,
        secrets=Secrets(credentials, token),
        capabilities=Capabilities(enforce_permissions=True),  # Callers are asked.
        culm=CulmExtension(env=None if serving.env is None else {**serving.env}),
    )
