"""What every dialect says in plain text: files, commands, and what had to be left out."""

from collections.abc import Sequence

from culm.wire.messages import Binary, Part, ShellCommand, TextPart


def text_of(parts: Sequence[Part]) -> str:
    """What a message says in words, without reasoning and calls."""
    return "\n\n".join(p.data.text for p in parts if isinstance(p, TextPart) and p.data.text)


def file_text(file: Binary) -> str:
    return f'<file path="{file.path}">\n{file.data.decode(errors="replace")}\n</file>'


def command_text(ran: ShellCommand) -> str:
    """A command that the person ran, told as the person would tell it."""
    return (
        f"I ran this command:\n<command>\n{ran.command}\n</command>\n"
        f"<output>\n{ran.output}\n</output>\n<exit_code>{ran.exit_code}</exit_code>"
    )


def unseen_image(path: str = "") -> str:
    """A note in the place of an image, for a model that sees none."""
    name = f"The image {path}" if path else "An image"
    return f"[{name} was left out: this model sees no images.]"


def unread_file(file: Binary) -> str:
    """A note in the place of a file that no model can read."""
    return f"[The file {file.path} ({file.mime_type}) was left out: it is no text.]"
