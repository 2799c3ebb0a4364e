"""A file's bytes as text and back, so that what nobody touched stays as it was, byte for byte."""

import codecs
from dataclasses import dataclass

from culm.tools.files.kinds import UTF16_BOMS


@dataclass(frozen=True, slots=True)
class FileText:
    """Text, and how the file spells it."""

    text: str  # Without the mark in front; a byte that is no UTF-8 is half a surrogate pair.
    encoding: str = "utf-8"
    mark: bytes = b""

    @property
    def ends_lines_with(self) -> str:
        """What most lines end with."""
        both = self.text.count("\r\n")
        return "\r\n" if both * 2 > self.text.count("\n") else "\n"

    def spell(self, text: str) -> bytes:
        """Another text as this file would spell it."""
        # Only UTF-8 has bytes that came in as halves of surrogate pairs.
        errors = "surrogateescape" if self.encoding == "utf-8" else "strict"
        return self.mark + text.removeprefix("\ufeff").encode(self.encoding, errors)


def read_text(data: bytes) -> FileText:
    """Text in UTF-8 or, with its mark, UTF-16; raises `UnicodeDecodeError` for broken UTF-16."""
    wide = UTF16_BOMS.get(data[:2])
    if wide is not None:
        return FileText(data[2:].decode(wide), wide, data[:2])
    mark = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
    # Whatever is no UTF-8 goes back into the file as it came.
    return FileText(data[len(mark) :].decode("utf-8", "surrogateescape"), "utf-8", mark)


def is_sound(text: str) -> bool:
    """Whether every encoding can carry it; a model may write half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
