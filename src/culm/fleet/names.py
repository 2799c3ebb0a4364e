"""Names that become part of a path: which of them are safe."""

import re
from typing import Final

# No leading dot: its file would be a hidden one, which nobody lists.
_SAFE: Final = re.compile(r"(?!\.)(?!.*\.\.)[A-Za-z0-9_.-]{1,256}")
STEM_CHARS_MAX: Final = 200  # No file has a longer name than 255, with all that is added to it.


class UnsafeName(ValueError):
    """It may not touch a path."""

    def __init__(self) -> None:
        super().__init__("it is no safe id: letters, digits, _ - . and no ..")


def is_safe_name(text: str) -> bool:
    return _SAFE.fullmatch(text) is not None


def is_safe_stem(text: str) -> bool:
    """Whether files may be named after it, such as a record and what was begun of it."""
    return is_safe_name(text) and len(text) <= STEM_CHARS_MAX


def check_name(text: str) -> str:
    """The name itself; raises `UnsafeName`."""
    if not is_safe_name(text):
        raise UnsafeName
    return text
