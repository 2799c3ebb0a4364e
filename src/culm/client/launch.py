"""Find the user's server, or start one.

Owns the start of a server where none answers. However many clients start one at the same time, one
results: only one can have the socket, the others' attempts end by themselves and their clients use
the winner's. Nobody here ends a server that works; it leaves by itself when nobody needs it.
"""

import asyncio
import re
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from culm import __version__
from culm.client.transport import parse_address
from culm.errors import InvalidRequest, NoServer
from culm.settings import DETACHED, default_data_dir, default_host

START_S = 10.0  # A cold interpreter on a busy machine takes two.
PROBE_S = 0.2  # As long as a server takes to tell a live socket from a stale one.
RIVAL_S = 0.5  # A server that was faster has the address a moment before it listens there.
RIVAL_AGAIN_S = 0.02
TAIL_LINES = 12  # What a failed start says last; the reason is among it.
LINE_BYTES_MAX = 1 << 20

_TOKEN = re.compile(rb"[!-~]*")  # As a header has it; an empty one is none.
_ADDRESS = re.compile(r"unix:///.+|tcp://\S+:\d+|https?://\S+")


class ServerStartFailed(NoServer):
    code = "start_failed"

    def __init__(self, url: str, reason: str, *, hint: str = "") -> None:
        super().__init__(f"cannot start a server on {url}: {reason}", hint=hint)


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """Which server, and how to start it if it is not there; raises `InvalidRequest`."""

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
        """A server on a socket is the user's own; one elsewhere is somebody's to start."""
        return self.url.startswith("unix://")

    def command(self) -> list[str]:
        """The paths are absolute: a server does not live where its first client was."""
        given = [sys.executable, "-m", "culm", "serve", "--host", self.url]
        if self.data_dir is not None:
            given += ["--data-dir", str(self.data_dir.absolute())]
        if self.config_file is not None:
            given += ["--config", str(self.config_file.absolute())]
        return given


def is_answered(url: str) -> bool:
    """Whether somebody accepts at a unix socket; one that is slow to accept is somebody."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(url.removeprefix("unix://"))
        except (TimeoutError, BlockingIOError, PermissionError):
            return True
        except OSError:  # No file, nobody behind it, or no place for a socket.
            return False
    return True


def begin_start(wanted: ServerRequest, env: Mapping[str, str]) -> "ServerLaunch | None":
    """Start a server if none answers and one can be started; it is not ready yet.

    Needs no event loop, so that a caller can import what it needs while the server starts.
    """
    if not wanted.can_start or is_answered(wanted.url):
        return None
    folder = Path(wanted.url.removeprefix("unix://")).parent
    if wanted.url != default_host(env) and not folder.is_dir():
        hint = "no server is started in a directory that is not there"
        raise ServerStartFailed(wanted.url, f"there is no directory {folder}", hint=hint)
    process = subprocess.Popen(
        wanted.command(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",  # It must not keep a directory busy that somebody wants to unmount.
        env={**_kept(env), DETACHED: "1"},
        start_new_session=True,  # A Ctrl-C is for its client.
    )
    return ServerLaunch(wanted.url, process)


# What a server needs to be itself. The rest is the client's own, who brings it along whenever it
# opens a workspace: a key of the shell that happened to be first is not for all the others.
_KEPT = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TZ|TMPDIR|XDG_\w+|CULM_\w+|PYTHON\w+|VIRTUAL_ENV"
    r"|SSL_CERT_\w+|(?:https?|all|no)_proxy",
    re.IGNORECASE,
)


def _kept(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if _KEPT.fullmatch(name)}


class ServerLaunch:
    """A server process that is starting. Made by `begin_start`."""

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._url = url

    async def ready(self) -> None:
        """Wait until a server answers, this one or a faster one; raises `StartFailed`."""
        try:
            await self._listening()
        finally:
            # It outlives its client, as it should: Python warns of a child that is not waited for.
            if self.process.poll() is None:
                self.process.returncode = 0

    async def _listening(self) -> None:
        said: deque[str] = deque(maxlen=TAIL_LINES)
        pipe = self.process.stdout
        assert pipe is not None, "asked for a pipe"
        try:
            async with asyncio.timeout(START_S), _open_reader(pipe) as reader:
                while line := (await reader.readline()).decode(errors="replace"):
                    if line.startswith("listening "):
                        return
                    said.append(line.rstrip())
        except TimeoutError:
            if is_answered(self._url):
                return
            reason = f"it was not ready after {START_S:g} s"
            hint = "look into culm.log in $XDG_STATE_HOME/culm, or ~/.local/state/culm"
            raise ServerStartFailed(self._url, reason, hint=hint) from None
        if not await self._has_rival():
            reason, hint = reason_of(said)
            raise ServerStartFailed(self._url, reason, hint=hint)

    async def _has_rival(self) -> bool:
        """Ours has said its last word; whether that was because another has the socket."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + RIVAL_S
        while not is_answered(self._url) or self.process.poll() is None:
            if loop.time() > end_s:
                return is_answered(self._url)
            await asyncio.sleep(RIVAL_AGAIN_S)
        return True


class ServerStarter:
    """Starts the user's server for one client, whenever there is none."""

    def __init__(self, wanted: ServerRequest, env: Mapping[str, str]) -> None:
        self.wanted = wanted
        self.env = env
        self._launch: ServerLaunch | None = None

    def begin(self) -> None:
        """Start one if none answers; it is not ready yet. Raises `StartFailed`."""
        if self._launch is None:
            self._launch = begin_start(self.wanted, self.env)

    async def ensure(self) -> None:
        """There is one now, if it can be started; raises `StartFailed`."""
        self.begin()
        launch, self._launch = self._launch, None
        if launch is not None:
            await launch.ready()

    async def revive(self) -> None:
        """As `ensure`, if the server died; one that was told to leave is not brought back."""
        if self.wanted.can_start and self._has_died():
            await self.ensure()

    def _has_died(self) -> bool:
        # Who leaves takes its socket away; who is killed cannot.
        return Path(self.wanted.url.removeprefix("unix://")).is_socket()


def find_token(wanted: ServerRequest, file: Path | None, env: Mapping[str, str]) -> str | None:
    """The token for a server over TCP; raises `InvalidRequest` if `file` is not readable, or none.

    Without a `file` it is in the data directory, unless the server asks for none.
    """
    if wanted.can_start:
        return None
    place = file or (wanted.data_dir or default_data_dir(env)) / "token"
    try:
        token = place.read_bytes().strip()
    except OSError as exc:
        if file is None:
            return None
        raise InvalidRequest(f"cannot read {file}: {exc.strerror}") from exc
    if not _TOKEN.fullmatch(token):  # It becomes a line of every request.
        raise InvalidRequest(f"what is in {place} is no token", hint="give another --token-file")
    return token.decode()


Age = Literal["ours", "older", "newer"]


def age_of(version: str) -> Age:
    """How another culm compares with this one; what is no version is older than any."""
    theirs, ours = _numbers(version), _numbers(__version__)
    return "ours" if theirs == ours else "older" if theirs < ours else "newer"


def is_understood(version: str) -> bool:
    """Whether that culm speaks as this one does."""
    return _numbers(version)[:1] == _numbers(__version__)[:1]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def reason_of(said: Iterable[str]) -> tuple[str, str]:
    """Why a server did not start, and what to do about it, from what it said last."""
    lines = [line for line in said if line]
    reasons = [line.removeprefix("culm: ") for line in lines if line.startswith("culm: ")]
    hints = [line.removeprefix("hint: ") for line in lines if line.startswith("hint: ")]
    if reasons:
        return reasons[-1], hints[-1] if hints else ""
    return "\n  ".join(["it said", *lines]) if lines else "it ended without a word", ""


@asynccontextmanager
async def _open_reader(pipe: IO[bytes]) -> AsyncGenerator[asyncio.StreamReader]:
    """Read a pipe without blocking; it is closed afterwards."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        yield reader
    finally:
        transport.close()
