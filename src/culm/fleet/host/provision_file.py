"""The provision of a new worker, completed by its host and passed on in an anonymous file."""

import os
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Final

from msgspec.structs import replace

import culm
from culm.clock import format_time
from culm.fleet.host.base import LaunchFailed
from culm.fleet.provision import BadProvision, OwnerStamp, Provision, encode_provision
from culm.processes.linux import find_stat, read_boot_id

TOKEN_BYTES: Final = 32
# The path is appended last, so that nothing beside our package shadows a module of Python.
_BEFORE = "import sys; sys.path.append(sys.argv.pop()); "
ZYGOTE: Final = "from culm.fleet.worker.zygote import main; main()"
WORKER: Final = "from culm.fleet.worker.main import run_worker; sys.exit(run_worker())"


def python_argv(program: str, path: Path | None = None) -> list[str]:
    """Command line that runs a program with the packages of this process and our own."""
    root = path or Path(culm.__file__).parents[1]
    return [sys.executable, "-I", "-c", _BEFORE + program, str(root)]


def make_stamp(now_s: float) -> OwnerStamp:
    """Identify this process as an owner. Its instance id is constant while it lives."""
    pid = os.getpid()
    stat = find_stat(pid)
    if stat is None:
        return OwnerStamp(pid, f"{pid}", format_time(now_s))
    instance = f"{read_boot_id()}.{pid}.{stat.start_ticks}"
    return OwnerStamp(pid, instance, format_time(now_s), stat.start_ticks)


def stamped(provision: Provision, owner: OwnerStamp, control_fd: int | None) -> Provision:
    """Copy a provision with its owner, a shared secret token, and its control descriptor.

    Its paths are absolute, because a worker does not start in our directory.
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


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).absolute())


def open_document(provision: Provision) -> int:
    """Return a descriptor at the start of the document; raises `LaunchFailed`, OSError."""
    try:
        view = memoryview(encode_provision(provision))
    except BadProvision as exc:
        raise LaunchFailed(f"the provision cannot be sent: {exc}") from exc
    if hasattr(os, "memfd_create"):
        document = os.memfd_create("provision", os.MFD_CLOEXEC)
    else:
        # Unnamed from the start, and readable only for us.
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
