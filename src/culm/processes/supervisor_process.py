"""The server's end of one supervisor process: start it, send it packets, reap it."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import culm
from culm.processes.channel import SupervisorChannel
from culm.processes.packets import send_with
from culm.processes.process_set import ProcessSet

# The path is appended last, so that nothing beside our package shadows a module of Python.
_PROGRAM = (
    "import sys; sys.path.append(sys.argv.pop()); "
    "from culm.processes.supervisor import main; main()"
)


class SupervisorProcess:
    """A supervisor and our channel to it."""

    def __init__(self, process_set: ProcessSet) -> None:
        """Raises OSError if the process cannot be started."""
        self.process_set = process_set
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        log = os.open(process_set.folder / "keeper.log", flags, 0o600)
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        passed = (theirs.fileno(), process_set.lock)
        arguments = [*passed, os.getpid(), process_set.process_tag, process_set.folder]
        root = Path(culm.__file__).parents[1]
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, *map(str, arguments), str(root)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=passed,
                cwd="/",
            )
        except OSError:
            control.close()
            raise
        finally:
            theirs.close()
            os.close(log)
        self.channel = SupervisorChannel(control, process_set.process_tag)

    @property
    def pid(self) -> int:
        return self._process.pid

    def start_sidecar(self, body: bytes, descriptors: Sequence[int]) -> None:
        """Start a sidecar. Raises OSError if the supervisor is gone or its queue is full."""
        self.channel.pass_on("hold", [], body, descriptors)

    def connect(self, base: int, channel: int) -> None:
        """Register a client. Raises OSError if the supervisor is gone or its queue is full."""
        send_with(self.channel.control, f"connect {base}".encode(), [channel])

    def kill(self) -> None:
        self._process.kill()

    def collect(self, bound_s: float) -> bool:
        """Wait for its end, at most `bound_s`. Blocks."""
        try:
            self._process.wait(bound_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stderr_tail(self) -> str:
        """Return the end of its error output, if any."""
        try:
            data = (self.process_set.folder / "keeper.log").read_bytes()
        except OSError:
            return ""
        return data[-2000:].decode("utf-8", "replace").strip()
