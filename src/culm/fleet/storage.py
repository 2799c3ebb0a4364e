"""Where a worker puts what it needs, if nobody said where."""

from pathlib import Path

from culm.fleet.provision import Provision


def storage_beside(fabric_dir: Path, child_id: str) -> Path:
    """The place of a worker of its own: beside the fabric that it announces itself in."""
    return fabric_dir.absolute().parent / "workers" / child_id


def storage_of(provision: Provision) -> Path:
    if provision.storage_dir is not None:
        return Path(provision.storage_dir)
    return storage_beside(Path(provision.fabric_dir), provision.identity.child_id)
