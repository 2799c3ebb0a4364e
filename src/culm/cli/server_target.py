"""Which workspace of which server a command is about."""

import os
from dataclasses import dataclass
from pathlib import Path

from culm.client.launch import Starter, Wanted


@dataclass(frozen=True, slots=True)
class Where:
    """A workspace of a server."""

    directory: Path  # Real.
    server: Wanted
    token_file: Path | None = None

    def starter(self) -> Starter:
        return Starter(self.server, os.environ)
