"""Which workspace of which server a command is about."""

import os
from dataclasses import dataclass
from pathlib import Path

from culm.client.launch import ServerRequest, ServerStarter


@dataclass(frozen=True, slots=True)
class ServerTarget:
    """A workspace of a server."""

    directory: Path  # Real.
    server: ServerRequest
    token_file: Path | None = None

    def starter(self) -> ServerStarter:
        return ServerStarter(self.server, os.environ)
