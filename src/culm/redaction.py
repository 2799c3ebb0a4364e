"""Secrets are kept out of logs: in text, and in the representation of values."""

import re

from msgspec import Struct

# Credentials in headers, URLs and assignments.
_SECRETS = re.compile(
    r"(?i)(bearer\s+|\bsk-|(?:api[_-]?key|token|secret|password)[\"']?\s*[=:]\s*[\"']?)[^\s\"',;&]+"
)


def redact(text: str) -> str:
    return _SECRETS.sub(r"\1[redacted]", text)


class RedactedStruct(Struct, frozen=True):
    """A struct whose values may be secret, so its representation has only its name."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(…)"
