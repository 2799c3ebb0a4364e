"""What a project's file may set before its reader has said that it is to be trusted.

Whoever wrote a repository wrote its configuration, too. Until `culm trust` was given for exactly
this content it may choose among what the user has, and show things; it may not name a provider,
an address, a header, a command, a tool or a permission. Pure, but for `Trusted`.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple, cast

import msgspec

from culm.config import jsonc
from culm.config.checking import Document, key_of
from culm.files import UnreadableFile, locked, read_file, replace_file
from culm.wire.codec import Json, decode, encode, strings_in

TRUST_BYTES_MAX = 1 << 20

# How a selected model is asked. `provider_options` is not here: it can hold anything.
_SELECTION = frozenset(
    {
        "model",
        "provider",
        "reasoning_effort",
        "think",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "frequency_penalty",
        "presence_penalty",
    }
)
_DISPLAY = frozenset({"tui", "notifications", "progress"})


class RestrictedDocument(NamedTuple):
    document: Document
    ignored: tuple[str, ...]  # The keys that need trust.


def restrict(document: Document, providers: Collection[str]) -> RestrictedDocument:
    """What is left of an untrusted document that may choose among `providers`."""
    allowed: Document = {}
    if "$schema" in document:
        allowed["$schema"] = document["$schema"]
    models = _selections(document.get("models"), providers)
    if models:
        allowed["models"] = models
    fallbacks: Document = {}
    for role, choices in _items(document.get("fallbacks")):
        kept = [_selection(one, providers) for one in cast("list[Json]", choices or [])]
        if any(kept):  # Else it would take away the user's own, and say nothing.
            fallbacks[role] = [one for one in kept if one is not None]
    if fallbacks:
        allowed["fallbacks"] = fallbacks
    options = dict(_options(document.get("options")))
    if options:
        allowed["options"] = options
    return RestrictedDocument(
        allowed, tuple(key_of(path) for path, _ in missing(document, allowed))
    )


def _items(value: Json) -> Iterator[tuple[str, Json]]:
    yield from cast("Document", value).items() if isinstance(value, dict) else ()


def _selections(value: Json, providers: Collection[str]) -> Document:
    kept = {role: _selection(chosen, providers) for role, chosen in _items(value)}
    return {role: chosen for role, chosen in kept.items() if chosen is not None}


def _selection(value: Json, providers: Collection[str]) -> Document | None:
    chosen = {name: inner for name, inner in _items(value) if name in _SELECTION}
    if chosen.get("provider") not in providers or _refers(chosen):
        return None
    return chosen


def _options(value: Json) -> Iterator[tuple[str, Json]]:
    for name, inner in _items(value):
        if name == "context_paths" and isinstance(inner, list):
            if paths := [path for path in cast("list[Json]", inner) if is_inside(path)]:
                yield name, paths
        elif name in _DISPLAY and not _refers(inner):
            yield name, inner


def is_inside(path: Json) -> bool:
    """Whether a path stays, as it is written, below the directory it is read from."""
    if not isinstance(path, str) or not path or "$" in path or path.startswith("~"):
        return False
    pure = PurePosixPath(path)
    return not pure.is_absolute() and ".." not in pure.parts


def _refers(value: Json) -> bool:
    return any("$" in text for _, text in strings_in(value))


def missing(
    whole: Document, part: Document, path: jsonc.Path = ()
) -> Iterator[tuple[jsonc.Path, Json]]:
    """What `part` lacks of `whole` or has otherwise, as shallow as it can be named."""
    for name, value in whole.items():
        left = part.get(name)
        if isinstance(value, dict) and isinstance(left, dict):
            yield from missing(cast("Document", value), cast("Document", left), (*path, name))
        elif name not in part or value != left:
            yield (*path, name), value


# --- what has been trusted


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class TrustedFiles:
    """The contents that the user has said to trust, by the file each was in. Blocks as disks do."""

    def __init__(self, data_dir: Path) -> None:
        self.file = data_dir / "trust.json"

    def known(self) -> dict[str, str]:
        """The digest of every content, by its file. What cannot be read trusts nothing."""
        try:
            return decode(read_file(self.file, TRUST_BYTES_MAX), dict[str, str])
        except (FileNotFoundError, UnreadableFile, msgspec.MsgspecError, UnicodeDecodeError):
            return {}

    def is_trusted(self, file: Path, content: bytes) -> bool:
        return self.known().get(_name(file)) == digest_of(content)

    def add(self, contents: Mapping[Path, bytes]) -> None:
        """Raises OSError."""
        with locked(self.file):
            known = self.known()
            known |= {_name(file): digest_of(content) for file, content in contents.items()}
            replace_file(self.file, encode(known))

    def remove(self, files: Collection[Path]) -> None:
        with locked(self.file):
            gone = {_name(file) for file in files}
            known = {file: digest for file, digest in self.known().items() if file not in gone}
            replace_file(self.file, encode(known))


def _name(file: Path) -> str:
    """A path as JSON can hold it; not every path is text."""
    return str(file).encode(errors="backslashreplace").decode()
