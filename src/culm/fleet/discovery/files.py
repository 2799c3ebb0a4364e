"""Discovery through a private directory: one file `<agent_id>.json` per record.

Owns the directory's layout. Hidden files and other suffixes are not records: writers use them for
incomplete files, and `culm agent serve` for its token.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from culm.clock import Clock
from culm.files import UnreadableFile, check_name, is_safe_name, read_file, replace_file
from culm.fleet.discovery.base import LEASE_S, AgentRecord, is_live, is_over, select

SUFFIX: Final = ".json"
RECORD_BYTES_MAX: Final = 64 << 10
RECORDS_MAX: Final = 10_000  # Read in one pass; a larger directory has another problem.
# Left by a writer that died before the file was complete.
_BEGUN = re.compile(r"\..+\.(json|token)\.tmp\.\d+")
_decoder = msgspec.json.Decoder(AgentRecord)
_encoder = msgspec.json.Encoder()


class FileDiscovery:
    """Implements `Discovery`. Many processes share one directory without a lock."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock

    def publish(self, record: AgentRecord) -> None:
        data = _encoder.encode(record)
        pretty = msgspec.json.format(data, indent=2) + b"\n"
        # Not durable, because a worker does not outlive its machine.
        replace_file(self._file(record.agent_id), pretty, durable=False)

    def withdraw(self, agent_id: str) -> None:
        """Remove the record and temporary files that a killed writer left behind."""
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
        """Return a record regardless of its lease."""
        return _find_record(self._file(agent_id))

    def discover(self, *, role: str = "", label: str = "") -> list[AgentRecord]:
        return select(self.records(), self._clock.now_s(), role=role, label=label)

    def records(self) -> list[AgentRecord]:
        """Return all readable records by id, regardless of their leases."""
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
            # Another process may clean up at the same time, or the file is not ours to remove.
            with suppress(OSError):
                file.unlink()
            with suppress(OSError):
                self.token_file(file.stem).unlink()
        self._remove_begun(now_s)
        return len(dead)

    def token_file(self, agent_id: str) -> Path:
        """Path of the token that callers of a manually started agent need."""
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
    """Return None if the record is missing or unreadable."""
    try:
        record = _decoder.decode(read_file(file, RECORD_BYTES_MAX))
    except (OSError, UnreadableFile, msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return record if record.agent_id + SUFFIX == file.name else None
