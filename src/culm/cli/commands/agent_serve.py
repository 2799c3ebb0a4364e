"""`culm agent serve`: an agent in this process that many callers share, until a signal.

The model is chosen as a server would choose it. The agent gets the one credential that the model
needs, read at the start, and no configuration.
"""

import asyncio
import secrets
import shlex
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NoReturn, cast

import click

from culm.cli.commands.agent import discovery_dir_of, discovery_of
from culm.cli.config_report import ConfigLocation, read_location
from culm.config.references import UnresolvedReference
from culm.errors import Conflict, Failed, InvalidRequest, ModelFailed
from culm.files import STEM_CHARS_MAX, is_safe_stem, replace_file
from culm.fleet.discovery.base import is_running
from culm.fleet.discovery.files import FileDiscovery
from culm.fleet.provision import (
    PROVISION_VERSION,
    AnyKind,
    BadProvision,
    Capabilities,
    CliKind,
    Credential,
    CulmExtension,
    EchoKind,
    Identity,
    ModelName,
    Provision,
    RuntimeKind,
    Secrets,
    check_provision,
)
from culm.fleet.transport.tls import ServerTls, check_listen_address
from culm.fleet.worker.lifecycle import WorkerEndpoint, work
from culm.fleet.worker.main import handle_signals, limit_shutdown, run_loop, set_up_log
from culm.fleet.worker_server.connection import ServeMany
from culm.ids import Ids
from culm.model.choice import ChosenModel, ModelConfig, resolved
from culm.model.local_servers import OFFLINE
from culm.redaction import RedactedStruct
from culm.server.auth import TOKEN_BYTES, read_or_make_token
from culm.wire.codec import printable

ID_CHARS = 8  # Enough to distinguish agents of one role.


class AgentServeOptions(RedactedStruct, frozen=True):
    """Options of `culm agent serve`."""

    role: str
    executor: AnyKind
    data_dir: Path
    workspace: Path
    agent_id: str = ""  # Default: made from the role.
    labels: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 0
    token_file: Path | None = None  # Default: a temporary one beside the record.
    auth: bool = True
    tls: ServerTls | None = None
    model: ModelName | None = None
    credential: Credential | None = None
    env: Mapping[str, str] | None = None  # Further variables for the program of a cli_adapter.


def serve_agent(serving: AgentServeOptions) -> None:
    """Serve until SIGINT or SIGTERM; raises `AppError`."""
    set_up_log("culm")
    check_listen_address(serving.host, has_token=serving.auth, has_tls=serving.tls is not None)
    discovery = discovery_of(serving.data_dir)
    with suppress(OSError):  # Stale records do no harm.
        discovery.gc()
    agent_id = serving.agent_id or _new_id(serving.role)
    _check_id(discovery, agent_id)
    with _open_token(serving, discovery.token_file(agent_id)) as token:
        provision = _provision(serving, agent_id, token)

        def announce(endpoint: str) -> None:
            how = shlex.join(["culm", "agent", "call", *_options(serving), agent_id, "hello"])
            text = f"agent {agent_id} serves role {serving.role} at {endpoint}; call it: {how}"
            click.echo(printable(text), err=True)

        door = WorkerEndpoint(
            serving.host,
            serving.port,
            serving.tls,
            serving.labels,
            ServeMany(),
            on_ready=announce,
            on_leave=limit_shutdown,
        )

        async def main(stop: asyncio.Event) -> None:
            handle_signals(stop)  # First, because the token file must be removed.
            await work(provision, stop, door)

        try:
            check_provision(provision)
            run_loop(main)
        except BadProvision as exc:
            raise InvalidRequest(str(exc)) from exc
        except OSError as exc:
            raise Failed(f"the agent cannot serve: {exc}") from exc


def _options(serving: AgentServeOptions) -> Iterator[str]:
    """Options that a caller needs because the discovery record does not have the values."""
    if serving.auth and serving.token_file is not None:
        yield from ("--token-file", str(serving.token_file.absolute()))
    if serving.tls is not None:
        yield from ("--ca", str(serving.tls.cert.absolute()))


def _new_id(role: str) -> str:
    number = Ids().run()[:ID_CHARS]
    made = f"{role}-{number}"
    return made if is_safe_stem(made) else f"agent-{number}"


def _check_id(discovery: FileDiscovery, agent_id: str) -> None:
    """Raises `InvalidRequest`, or `Conflict` if another agent with this id is running."""
    if not is_safe_stem(agent_id):
        text = (
            f"--id may have letters, digits, _ - . but not .., at most {STEM_CHARS_MAX} characters"
        )
        raise InvalidRequest(text)
    found = discovery.find(agent_id)
    if found is not None and is_running(found):
        text = f"agent {agent_id} is already running as process {found.pid}"
        raise Conflict(text, hint="choose another --id")


@contextmanager
def _open_token(serving: AgentServeOptions, own_file: Path) -> Generator[str | None]:
    """The token that callers must present; a file of our own is removed at the end."""
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
        capabilities=Capabilities(enforce_permissions=True),  # Ask the caller.
        culm=CulmExtension(env=None if serving.env is None else {**serving.env}),
    )


async def _run_no_command(_: str) -> NoReturn:
    raise UnresolvedReference("a command that prints a key is not run for an agent")


async def find_model(
    location: ConfigLocation, name: str
) -> tuple[ModelName | None, Credential | None]:
    """Resolve PROVIDER/MODEL, else the configured model; raises `InvalidRequest`.

    Without either the agent uses the embedded model, which needs no credential.
    """
    report = await read_location(location)
    models = ModelConfig(report.whole, location.env)
    if name:
        provider_id, _, model_id = name.partition("/")
    else:
        selected = models.choose("large")
        if selected is None:
            return None, None
        provider_id, model_id = selected.provider, selected.model
    try:
        chosen = models.get(provider_id, model_id)
        chosen = await resolved(chosen, models.variables, _run_no_command)
    except ModelFailed as exc:
        hint = "`culm models` shows the usable models"
        raise InvalidRequest(f"{provider_id}/{model_id}: {exc.message}", hint=hint) from exc
    return ModelName(provider_id, model_id), _credential(chosen)


def _credential(chosen: ChosenModel) -> Credential | None:
    access = chosen.access
    if chosen.provider_id == OFFLINE:
        return None
    if access.headers:
        raise InvalidRequest(
            f"providers.{chosen.provider_id} has extra_headers, which are not supported here"
        )
    return Credential(chosen.provider_id, access.api_key, access.base_url, access.type)


def env_of(own: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    """The selected variables; raises `click.UsageError` for one that is not set."""
    missing = [name for name in names if name not in own]
    if missing:
        raise click.UsageError(f"--env {missing[0]}: the variable is not set")
    return {name: own[name] for name in names}


def executor_of(executor: str, command: str, profile: str, input_: str, output: str) -> AnyKind:
    """The executor for the options; raises `click.UsageError`."""
    if executor != "cli_adapter":
        if command or profile:
            raise click.UsageError("--command and --profile are for --executor cli_adapter")
        return EchoKind() if executor == "echo" else RuntimeKind()
    try:
        argv = shlex.split(command)
    except ValueError as exc:
        raise click.UsageError(f"cannot parse --command: {exc}") from exc
    if not argv:
        raise click.UsageError("--executor cli_adapter needs a --command")
    # The options allow only these values.
    input_kind = cast("Literal['stdin', 'argument']", input_)
    output_kind = cast("Literal['lines', 'json']", output)
    return CliKind(argv[0], argv[1:], profile, input_kind, output_kind)
