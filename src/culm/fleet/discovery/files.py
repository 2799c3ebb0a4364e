"""The fabric as a private directory: one file `<agent_id>.json` a record, replaced whole.

Owns the directory's layout. Hidden files and other suffixes are nobody's record: writers put what
is not complete there, and `culm agent serve` its token.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from culm.clock import Clock
from culm.files import UnreadableFile, read_file, replace_file
from culm.fleet.discovery.base import LEASE_S, AgentRecord, is_live, is_over, is_wanted
from culm.fleet.names import check_name, is_safe_name

SUFFIX: Final = ".json"
RECORD_BYTES_MAX: Final = 64 << 10
RECORDS_MAX: Final = 10_000  # Looked at in one go; whoever has more has another problem.
_BEGUN = re.compile(r"\..+\.(json|token)\.tmp\.\d+")  # By a writer that died before it was whole.
_decoder = msgspec.json.Decoder(AgentRecord)
_encoder = msgspec.json.Encoder()


class FileDiscovery:
    """Implements `Fabric`. Many processes use one directory, and need no lock."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock

    def publish(self, record: AgentRecord) -> None:
        data = _encoder.encode(record)
        pretty = msgspec.json.format(data, indent=2) + b"\n"
        # No worker outlives its machine.
        replace_file(self._file(record.agent_id), pretty, durable=False)

    def withdraw(self, agent_id: str) -> None:
        """Also what was begun for it: whoever was killed while it wrote left that behind."""
        file = self._file(agent_id)
        for name in self._names():
            if name.removeprefix(f".{file.name}.tmp.").isdecimal():
                with suppress(FileNotFoundError):
                    (self._directory / name).unlink()
        with suppress(FileNotFoundError, NotADirectoryError):
            file.unlink()

    def resolve(self, agent_id: str) -> AgentRecord | None:
        found = self.find(agent_id)
        return found if found is not None and is_live(found, self._clock.now_s()) else None

    def find(self, agent_id: str) -> AgentRecord | None:
        """Whatever became of its lease."""
        return _find_record(self._file(agent_id))

    def discover(self, *, role: str = "", label: str = "") -> list[AgentRecord]:
        now_s = self._clock.now_s()
        live = [record for record in self.records() if is_live(record, now_s)]
        return [record for record in live if is_wanted(record, role, label)]

    def records(self) -> list[AgentRecord]:
        """All that can be read, by id, whatever became of their leases."""
        found = [_find_record(file) for file in self._files()]
        readable = [record for record in found if record is not None]
        return sorted(readable, key=lambda record: record.agent_id)

    def gc(self) -> int:
        now_s = self._clock.now_s()
        dead: list[Path] = []
        for file in self._files():
            record = _find_record(file)
            if record is None or is_over(record, now_s):
                dead.append(file)
        for file in dead:
            # Somebody else may clean up at the same time, or it is not ours to remove.
            with suppress(OSError):
                file.unlink()
            with suppress(OSError):
                self.token_file(file.stem).unlink()
        self._remove_begun(now_s)
        return len(dead)

    def token_file(self, agent_id: str) -> Path:
        """Where an agent that was started by hand keeps the token that its callers need."""
        return self._directory / f".{check_name(agent_id)}.token"

    def _file(self, agent_id: str) -> Path:
        return self._directory / f"{check_name(agent_id)}{SUFFIX}"

    def _files(self) -> Iterator[Path]:
        for name in self._names():
            if name.endswith(SUFFIX) and is_safe_name(name.removesuffix(SUFFIX)):
                yield self._directory / name

    def _names(self) -> list[str]:
        names: list[str] = []
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self._directory) as found:
            for entry in found:
                names.append(entry.name)
                if len(names) >= RECORDS_MAX:
                    break
        return names

    def _remove_begun(self, now_s: float) -> None:
        for name in self._names():
            file = self._directory / name
            with suppress(OSError):
                if _BEGUN.fullmatch(name) and file.stat().st_mtime < now_s - LEASE_S:
                    file.unlink()


def _find_record(file: Path) -> AgentRecord | None:
    """None if there is none, or none that can be read: whoever wrote it cannot be discovered."""
    try:
        record = _decoder.decode(read_file(file, RECORD_BYTES_MAX))
    except (OSError, UnreadableFile, msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return record if record.agent_id + SUFFIX == file.name else None
