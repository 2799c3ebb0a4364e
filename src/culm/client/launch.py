"""Find the user's server, or start one.

Owns the start of a server where none is running. If several clients start one at the same time,
only one gets the socket; the others exit by themselves, and all clients use the first. A client
never stops a working server, which exits by itself when it is no longer needed.
"""

import asyncio
import re
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Literal

from msgspec import Struct

from culm import __version__
from culm.client.transport import parse_address
from culm.errors import InvalidRequest, NoServer
from culm.settings import DETACHED, default_data_dir, default_host

START_S = 10.0  # A cold interpreter on a busy machine takes two seconds.
PROBE_S = 0.2  # The server uses the same time to detect a stale socket.
RIVAL_S = 0.5  # A faster server binds the address a moment before it listens.
RIVAL_AGAIN_S = 0.02
TAIL_LINES = 12  # The last output of a failed start contains the reason.
LINE_BYTES_MAX = 1 << 20

_TOKEN = re.compile(rb"[!-~]*")  # Characters allowed in a header; an empty token means none.
_ADDRESS = re.compile(r"unix:///.+|tcp://\S+:\d+|https?://\S+")


class ServerStartFailed(NoServer):
    code = "start_failed"

    def __init__(self, url: str, reason: str, *, hint: str = "") -> None:
        super().__init__(f"cannot start a server on {url}: {reason}", hint=hint)


class ServerRequest(Struct, frozen=True):
    """The address of a server and the options to start it; raises `InvalidRequest`."""

    url: str
    data_dir: Path | None = None
    config_file: Path | None = None

    def __post_init__(self) -> None:
        try:
            if not _ADDRESS.fullmatch(self.url):
                raise ValueError(self.url)
            parse_address(self.url)
        except ValueError:
            hint = "use unix:///absolute/path, tcp://host:port or https://host:port"
            raise InvalidRequest(f"{self.url!r} is not an address", hint=hint) from None

    @property
    def can_start(self) -> bool:
        """True for a unix socket, which belongs to the user; other servers are never started."""
        return self.url.startswith("unix://")

    def command(self) -> list[str]:
        """The command line, with absolute paths: the server runs in another directory."""
        command = [sys.executable, "-m", "culm", "serve", "--host", self.url]
        if self.data_dir is not None:
            command += ["--data-dir", str(self.data_dir.absolute())]
        if self.config_file is not None:
            command += ["--config", str(self.config_file.absolute())]
        return command


def is_listening(url: str) -> bool:
    """Return True if a server accepts at a unix socket, even slowly."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(url.removeprefix("unix://"))
        except (TimeoutError, BlockingIOError, PermissionError):
            return True
        except OSError:  # No file, no listener, or an invalid path.
            return False
    return True


def begin_start(wanted: ServerRequest, env: Mapping[str, str]) -> "ServerLaunch | None":
    """Start a server if none is running and one can be started, without waiting for it.

    Needs no event loop, so that a caller can import other modules while the server starts.
    """
    if not wanted.can_start or is_listening(wanted.url):
        return None
    folder = Path(wanted.url.removeprefix("unix://")).parent
    if wanted.url != default_host(env) and not folder.is_dir():
        hint = "create the directory, or choose another socket with --host"
        raise ServerStartFailed(wanted.url, f"there is no directory {folder}", hint=hint)
    process = subprocess.Popen(
        wanted.command(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",  # It must not block the unmounting of a file system.
        env={**_server_env(env), DETACHED: "1"},
        start_new_session=True,  # Ctrl-C must reach only the client.
    )
    return ServerLaunch(wanted.url, process)


# The variables that a server needs for itself. A client sends its whole environment when it opens a
# workspace: the keys of the shell that happened to start the server are not for all clients.
_SERVER_ENV = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TZ|TMPDIR|XDG_\w+|CULM_\w+|PYTHON\w+|VIRTUAL_ENV"
    r"|SSL_CERT_\w+|(?:https?|all|no)_proxy",
    re.IGNORECASE,
)


def _server_env(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if _SERVER_ENV.fullmatch(name)}


class ServerLaunch:
    """A server process that is starting. Created by `begin_start`."""

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._url = url

    async def ready(self) -> None:
        """Wait until this server or a faster one is listening; raises `ServerStartFailed`."""
        try:
            await self._wait_until_listening()
        finally:
            # It outlives its client; without this Python warns about a child that was not awaited.
            if self.process.poll() is None:
                self.process.returncode = 0

    async def _wait_until_listening(self) -> None:
        output: deque[str] = deque(maxlen=TAIL_LINES)
        pipe = self.process.stdout
        assert pipe is not None, "the process was started with a pipe"
        try:
            async with asyncio.timeout(START_S), _open_reader(pipe) as reader:
                while line := (await reader.readline()).decode(errors="replace"):
                    if line.startswith("listening "):
                        return
                    output.append(line.rstrip())
        except TimeoutError:
            if is_listening(self._url):
                return
            reason = f"it was not ready after {START_S:g} s"
            hint = "see culm.log in $XDG_STATE_HOME/culm or ~/.local/state/culm"
            raise ServerStartFailed(self._url, reason, hint=hint) from None
        if not await self._has_rival():
            reason, hint = reason_of(output)
            raise ServerStartFailed(self._url, reason, hint=hint)

    async def _has_rival(self) -> bool:
        """Return True if this process ended because another server has the socket."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + RIVAL_S
        while not is_listening(self._url) or self.process.poll() is None:
            if loop.time() > end_s:
                return is_listening(self._url)
            await asyncio.sleep(RIVAL_AGAIN_S)
        return True


class ServerStarter:
    """Starts the user's server for one client whenever none is running."""

    def __init__(self, wanted: ServerRequest, env: Mapping[str, str]) -> None:
        self.wanted = wanted
        self.env = env
        self._launch: ServerLaunch | None = None

    def begin(self) -> None:
        """Start a server if none is running, without waiting; raises `ServerStartFailed`."""
        if self._launch is None:
            self._launch = begin_start(self.wanted, self.env)

    async def ensure(self) -> None:
        """Make sure that a server is running, if one can be started; raises `ServerStartFailed`."""
        self.begin()
        launch, self._launch = self._launch, None
        if launch is not None:
            await launch.ready()

    async def revive(self) -> None:
        """Restart a server that died; one that was asked to exit is not restarted."""
        if self.wanted.can_start and self._has_died():
            await self.ensure()

    def _has_died(self) -> bool:
        # A server removes its socket when it exits, but not when it is killed.
        return Path(self.wanted.url.removeprefix("unix://")).is_socket()


def find_token(wanted: ServerRequest, file: Path | None, env: Mapping[str, str]) -> str | None:
    """The token for a server over TCP; raises `InvalidRequest` if the file is not usable.

    The default file is in the data directory; it is missing if the server needs no token.
    """
    if wanted.can_start:
        return None
    path = file or (wanted.data_dir or default_data_dir(env)) / "token"
    try:
        token = path.read_bytes().strip()
    except OSError as exc:
        if file is None:
            return None
        raise InvalidRequest(f"cannot read {file}: {exc.strerror}") from exc
    if not _TOKEN.fullmatch(token):  # It becomes a header of every request.
        raise InvalidRequest(f"{path} does not contain a token", hint="choose another --token-file")
    return token.decode()


Age = Literal["ours", "older", "newer"]


def compare_version(version: str) -> Age:
    """Compare the version of another culm with this one; an invalid version counts as older."""
    theirs, ours = _numbers(version), _numbers(__version__)
    return "ours" if theirs == ours else "older" if theirs < ours else "newer"


def is_compatible(version: str) -> bool:
    """Return True if both have the same major version."""
    return _numbers(version)[:1] == _numbers(__version__)[:1]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def reason_of(output: Iterable[str]) -> tuple[str, str]:
    """The reason and the hint in the last output of a server that did not start."""
    lines = [line for line in output if line]
    reasons = [line.removeprefix("culm: ") for line in lines if line.startswith("culm: ")]
    hints = [line.removeprefix("hint: ") for line in lines if line.startswith("hint: ")]
    if reasons:
        return reasons[-1], hints[-1] if hints else ""
    return "\n  ".join(["it printed", *lines]) if lines else "it ended without any output", ""


@asynccontextmanager
async def _open_reader(pipe: IO[bytes]) -> AsyncGenerator[asyncio.StreamReader]:
    """Yield a reader of a pipe; the pipe is closed afterwards."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        yield reader
    finally:
        transport.close()
