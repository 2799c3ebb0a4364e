"""What a file is, told by how it begins: text, an image that can be shown, or something else."""

import codecs
import os

from culm.tools.files.paths import OpenPath
from culm.tools.files.safe_open import OpenRefused

HEAD_BYTES = 8192  # As many as git looks at: text has no NUL byte in these.
UTF16_BOMS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
_IMAGES = (
    (b"\x89PNG\r\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)
_KINDS = (
    (b"%PDF-", "a PDF document"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "gzip data"),
    (b"\x7fELF", "a program"),
    (b"SQLite format 3\0", "an SQLite database"),
)
_OTHER_IMAGES = (b"BM", b"II*\0", b"MM\0*")


def read_head(place: OpenPath) -> bytes:
    """The first bytes of an open file; raises `Refused`, OSError."""
    head = os.pread(place.descriptor, HEAD_BYTES, 0)
    if head and not place.status.st_size and not os.fstat(place.descriptor).st_size:
        # It is empty, and yet something comes out: so it is in procfs, wherever that is mounted.
        raise OpenRefused(
            f"{place.shown} is made up by the kernel and is no file; use bash to read it."
        )
    return head


def image_type(head: bytes) -> str | None:
    """The media type of an image that models can be shown."""
    if b"\0" not in head:  # A text may begin with the same letters.
        return None
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for magic, kind in _IMAGES if head.startswith(magic)), None)


def check_text(head: bytes, place: OpenPath) -> None:
    """Raise `Refused` for what is no text."""
    if head[:2] in UTF16_BOMS:
        return
    kind = next((word for magic, word in _KINDS if head.startswith(magic)), None)
    if kind is None and b"\0" in head:
        is_image = image_type(head) is not None or head.startswith(_OTHER_IMAGES)
        kind = "an image" if is_image else "binary data"
    if kind is not None:
        raise OpenRefused(f"{place.shown} is {kind} ({size_text(place.status.st_size)}), not text.")


def size_text(size: int) -> str:
    if size < 1024:
        return f"{size} bytes"
    return f"{size / 1024:.1f} KiB" if size < 1 << 20 else f"{size / (1 << 20):.1f} MiB"
