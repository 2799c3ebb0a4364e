"""Logging to stderr and to a rotated file in the state directory, without secrets."""

import json
import logging
import logging.handlers
import re
from pathlib import Path

from culm.redaction import redact

FILE_BYTES_MAX = 5 << 20
FILES_KEPT = 3

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        # A path may contain a newline, which must not start a new log line.
        record.message = _CONTROL.sub(lambda found: repr(found[0])[1:-1], record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact(record.getMessage()),
        }
        if record.exc_info:
            line["traceback"] = redact(self.formatException(record.exc_info))
        return json.dumps(line)


def set_up_logs(state_dir: Path, *, level: str, as_json: bool) -> None:
    """Install the log handlers; raises OSError if the state directory cannot be written."""
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = logging.handlers.RotatingFileHandler(
        state_dir / "culm.log", maxBytes=FILE_BYTES_MAX, backupCount=FILES_KEPT, delay=True
    )
    formatter = _Json() if as_json else _Text()
    for handler in (logging.StreamHandler(), file):
        handler.setFormatter(formatter)
        logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(level.upper())
