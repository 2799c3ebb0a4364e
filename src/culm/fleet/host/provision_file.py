"""The document that a new worker is given: a copy of the provision, with what only its spawner
knows, in a file that is nowhere on a disk.
"""

import os
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Final

from msgspec.structs import replace

import culm
from culm.fleet.host.base import LaunchFailed
from culm.fleet.provision import BadProvision, OwnerStamp, Provision, encode_provision
from culm.fleet.times import format_time
from culm.processes.linux import find_stat, read_boot_id

TOKEN_BYTES: Final = 32
# The path comes last: nothing beside our package stands in for a module of Python.
_BEFORE = "import sys; sys.path.append(sys.argv.pop()); "
ZYGOTE: Final = "from culm.fleet.worker.zygote import main; main()"
WORKER: Final = "from culm.fleet.worker.main import run_worker; sys.exit(run_worker())"


def python_argv(program: str, path: Path | None = None) -> list[str]:
    """Run a program with the packages of this process: of its environment, and our own."""
    root = path or Path(culm.__file__).parents[1]
    return [sys.executable, "-I", "-c", _BEFORE + program, str(root)]


def make_stamp(now_s: float) -> OwnerStamp:
    """Of this process. Its instance id is one and the same as long as it lives."""
    pid = os.getpid()
    stat = find_stat(pid)
    if stat is None:
        return OwnerStamp(pid, f"{pid}", format_time(now_s))
    instance = f"{read_boot_id()}.{pid}.{stat.start_ticks}"
    return OwnerStamp(pid, instance, format_time(now_s), stat.start_ticks)


def stamped(provision: Provision, owner: OwnerStamp, control_fd: int | None) -> Provision:
    """A copy with its owner, a token that only the two of us know, and where its control is.

    Its places are absolute: a worker does not start where we are.
    """
    given = provision.secrets
    token = given.worker_auth_token or secrets.token_urlsafe(TOKEN_BYTES)
    return replace(
        provision,
        fabric_dir=str(Path(provision.fabric_dir).absolute()),
        workspace=_absolute(provision.workspace),
        storage_dir=_absolute(provision.storage_dir),
        owner=owner,
        secrets=replace(given, worker_auth_token=token),
        culm=replace(provision.culm, control_fd=control_fd),
    )


def _absolute(place: str | None) -> str | None:
    return None if place is None else str(Path(place).absolute())


def open_document(provision: Provision) -> int:
    """A descriptor at the beginning of the document; raises `LaunchFailed`, OSError."""
    try:
        view = memoryview(encode_provision(provision))
    except BadProvision as exc:
        raise LaunchFailed(f"the provision cannot be sent: {exc}") from exc
    if hasattr(os, "memfd_create"):
        document = os.memfd_create("provision", os.MFD_CLOEXEC)
    else:
        # Without a name from the beginning, and readable for us only.
        with tempfile.TemporaryFile() as file:
            document = os.dup(file.fileno())
    try:
        while view:
            view = view[os.write(document, view) :]
        os.lseek(document, 0, os.SEEK_SET)
    except OSError:
        os.close(document)
        raise
    return document
