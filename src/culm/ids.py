"""Typed ids and their generator, which is the only source of randomness."""

import hashlib
import os
import random
import re
import uuid
from pathlib import Path
from typing import NewType

WorkspaceId = NewType("WorkspaceId", str)
ClientId = NewType("ClientId", str)
SessionId = NewType("SessionId", str)
MessageId = NewType("MessageId", str)
FileId = NewType("FileId", str)
RunId = NewType("RunId", str)
CancelId = NewType("CancelId", str)
AskId = NewType("AskId", str)
GrantId = NewType("GrantId", str)
AgentId = NewType("AgentId", str)
LetterId = NewType("LetterId", str)
Epoch = NewType("Epoch", str)

# One id per path forever, so that a client finds its workspace again after a restart.
_WORKSPACE_NAMESPACE = uuid.UUID("6f1c2b0e-5d0a-5c39-9a55-0c6d2f7b4e11")


_DASHED = "-".join(f"[0-9a-fA-F]{{{n}}}" for n in (8, 4, 4, 4, 12))
_UUID = re.compile(rf"(?:urn:uuid:)?{_DASHED}|{{{_DASHED}}}|[0-9a-fA-F]{{32}}")


class Ids:
    """Generates ids. A seed makes simulations reproducible."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.SystemRandom() if seed is None else random.Random(seed)

    def _uuid(self) -> str:
        return str(uuid.UUID(int=self._random.getrandbits(128), version=4))

    def client(self) -> ClientId:
        return ClientId(self._uuid())

    def session(self) -> SessionId:
        return SessionId(self._uuid())

    def message(self) -> MessageId:
        return MessageId(self._uuid())

    def file(self) -> FileId:
        return FileId(self._uuid())

    def run(self) -> RunId:
        return RunId(self._uuid())

    def cancel(self) -> CancelId:
        return CancelId(self._uuid())

    def ask(self) -> AskId:
        return AskId(self._uuid())

    def question(self) -> str:
        return self._uuid()

    def grant(self) -> GrantId:
        return GrantId(self._uuid())

    def agent(self) -> AgentId:
        return AgentId(self._uuid())

    def letter(self) -> LetterId:
        return LetterId(self._uuid())

    def chance(self) -> float:
        """A random number, at least 0 and below 1."""
        return self._random.random()

    def epoch(self) -> Epoch:
        return Epoch(f"{self._random.getrandbits(48):012x}")


def workspace_id_of(path: Path) -> WorkspaceId:
    # Like `uuid.uuid5`, but over bytes, because a path need not be valid text.
    digest = hashlib.sha1(_WORKSPACE_NAMESPACE.bytes + os.fsencode(path), usedforsecurity=False)
    return WorkspaceId(str(uuid.UUID(bytes=digest.digest()[:16], version=5)))


def find_client_id(text: str) -> ClientId | None:
    """The id in its canonical form, or None if the text is not a UUID in one of four forms."""
    return ClientId(str(uuid.UUID(text))) if _UUID.fullmatch(text) else None
