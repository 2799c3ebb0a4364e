"""What a command prints as its answer: on stdout, whole, in whatever letters that one knows."""

import sys

import msgspec

from culm.cli.terminal.streams import write


def put(text: str) -> None:
    """Raises `CannotWrite`."""
    try:
        write(sys.stdout, text)
    except UnicodeEncodeError:
        write(sys.stdout, text.encode("ascii", "backslashreplace").decode())


def put_json(value: object) -> None:
    """Raises `CannotWrite`."""
    put(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")
