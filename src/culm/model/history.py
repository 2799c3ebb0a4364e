"""Parts of a history as the dialects send them, as far as these agree. Pure."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from culm.wire.codec import Json
from culm.wire.messages import (
    Binary,
    BinaryPart,
    ImageUrl,
    ImageUrlPart,
    Part,
    ShellCommand,
    ShellCommandPart,
    TextPart,
)

NO_RESULT = "[This call has no result.]"
NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")

Block = dict[str, Json]


def tool_name(name: str, chars_max: int) -> str:
    """A valid name: an invalid one that a model made up would make every later request fail."""
    return NOT_IN_NAMES.sub("_", name)[:chars_max] or "unknown"


def user_blocks(
    parts: Iterable[Part],
    encode_image: Callable[[Binary], Block],
    encode_link: Callable[[ImageUrl], Block],
    *,
    sees_images: bool,
) -> Iterator[Block]:
    """The content of a user's message. The dialects only differ in the encoding of images."""
    for part in parts:
        match part:
            case TextPart(data=data) if data.text:
                yield text_block(data.text)
            case ShellCommandPart(data=command):
                yield text_block(_command_text(command))
            case BinaryPart(data=file) if file.mime_type.startswith("text/"):
                yield text_block(_file_text(file))
            case BinaryPart(data=file) if file.mime_type.startswith("image/"):
                yield encode_image(file) if sees_images else text_block(unseen_image(file.path))
            case BinaryPart(data=file):
                note = f"The file {file.path} ({file.mime_type}) was left out: it is not text."
                yield text_block(f"[{note}]")
            case ImageUrlPart(data=image):
                yield encode_link(image) if sees_images else text_block(unseen_image())
            case _:
                pass


def text_block(text: str) -> Block:
    return {"type": "text", "text": text}


def text_of(parts: Sequence[Part]) -> str:
    """The text of a message, without reasoning and calls."""
    return "\n\n".join(p.data.text for p in parts if isinstance(p, TextPart) and p.data.text)


def _file_text(file: Binary) -> str:
    return f'<file path="{file.path}">\n{file.data.decode(errors="replace")}\n</file>'


def _command_text(ran: ShellCommand) -> str:
    """A command that the user ran, described in the first person."""
    return (
        f"I ran this command:\n<command>\n{ran.command}\n</command>\n"
        f"<output>\n{ran.output}\n</output>\n<exit_code>{ran.exit_code}</exit_code>"
    )


def unseen_image(path: str = "") -> str:
    """A note that replaces an image, for a model without image input."""
    name = f"The image {path}" if path else "An image"
    return f"[{name} was left out: this model sees no images.]"
