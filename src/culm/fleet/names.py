"""Checks for names that become part of a path."""

import re
from typing import Final

# No leading dot, because its file would be hidden and never listed.
_SAFE: Final = re.compile(r"(?!\.)(?!.*\.\.)[A-Za-z0-9_.-]{1,256}")
STEM_CHARS_MAX: Final = 200  # A file name has at most 255 bytes, including all suffixes.


class UnsafeName(ValueError):
    """The name must not become part of a path."""

    def __init__(self) -> None:
        super().__init__("not a safe id: use letters, digits, _ - . and no ..")


def is_safe_name(text: str) -> bool:
    return _SAFE.fullmatch(text) is not None


def is_safe_stem(text: str) -> bool:
    """Return True if files may be named after it, such as a record and its temporary file."""
    return is_safe_name(text) and len(text) <= STEM_CHARS_MAX


def check_name(text: str) -> str:
    """Return the name itself; raises `UnsafeName`."""
    if not is_safe_name(text):
        raise UnsafeName
    return text
