"""The folder where a worker puts what it needs: made on first use, gone with it.

A worker that was killed leaves its folder behind; the next one that had one of its own removes it,
once it is old and nobody of that name is there.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from culm.fleet.discovery.base import Discovery
from culm.fleet.names import is_safe_name
from culm.fleet.provision import Provision
from culm.fleet.storage import storage_of

KEPT_S: Final = 7 * 86_400.0
FOLDERS_MAX: Final = 10_000  # Looked at in one go.


def remove_storage(provision: Provision, discovery: Discovery, now_s: float) -> None:
    """A folder that was given stays, and so do those around it. Blocks as the disk does."""
    if provision.storage_dir is not None:
        return
    own = storage_of(provision)
    shutil.rmtree(own, ignore_errors=True)
    for folder in _old_folders(own.parent, now_s - KEPT_S):
        if discovery.resolve(folder.name) is None:
            shutil.rmtree(folder, ignore_errors=True)


def _old_folders(parent: Path, before_s: float) -> Iterator[Path]:
    with suppress(OSError), os.scandir(parent) as entries:
        for _, entry in zip(range(FOLDERS_MAX), entries, strict=False):
            is_folder = is_safe_name(entry.name) and entry.is_dir(follow_symlinks=False)
            if is_folder and entry.stat(follow_symlinks=False).st_mtime < before_s:
                yield Path(entry.path)
