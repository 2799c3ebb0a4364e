"""Restrictions for the configuration file of a project that the user does not trust yet.

A repository's author also wrote its configuration. Until the user runs `culm trust` for exactly
this content, the file may select among the user's own models and set display options. It may not
set a provider, an address, a header, a command, a tool or a permission. Pure, except for
`TrustedFiles`.
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

# Request parameters of a selected model. `provider_options` is not one: it can contain anything.
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
    """The allowed part of an untrusted document, which may select models of `providers`."""
    allowed: Document = {}
    if "$schema" in document:
        allowed["$schema"] = document["$schema"]
    models = _selections(document.get("models"), providers)
    if models:
        allowed["models"] = models
    fallbacks: Document = {}
    for role, choices in _items(document.get("fallbacks")):
        kept = [_selection(one, providers) for one in cast("list[Json]", choices or [])]
        if any(kept):  # An empty list would silently remove the user's own fallbacks.
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
    if chosen.get("provider") not in providers or _has_reference(chosen):
        return None
    return chosen


def _options(value: Json) -> Iterator[tuple[str, Json]]:
    for name, inner in _items(value):
        if name == "context_paths" and isinstance(inner, list):
            if paths := [path for path in cast("list[Json]", inner) if is_inside(path)]:
                yield name, paths
        elif name in _DISPLAY and not _has_reference(inner):
            yield name, inner


def is_inside(path: Json) -> bool:
    """Return True if a path, as written, stays below the directory of its file."""
    if not isinstance(path, str) or not path or "$" in path or path.startswith("~"):
        return False
    pure = PurePosixPath(path)
    return not pure.is_absolute() and ".." not in pure.parts


def _has_reference(value: Json) -> bool:
    return any("$" in text for _, text in strings_in(value))


def missing(
    whole: Document, part: Document, path: jsonc.Path = ()
) -> Iterator[tuple[jsonc.Path, Json]]:
    """The values of `whole` that `part` lacks or has changed, each at its highest path."""
    for name, value in whole.items():
        left = part.get(name)
        if isinstance(value, dict) and isinstance(left, dict):
            yield from missing(cast("Document", value), cast("Document", left), (*path, name))
        elif name not in part or value != left:
            yield (*path, name), value


# --- trusted contents


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class TrustedFiles:
    """The digest of the trusted content of each file. Methods block on disk access."""

    def __init__(self, data_dir: Path) -> None:
        self.file = data_dir / "trust.json"

    def known(self) -> dict[str, str]:
        """The digest of each trusted content by file. If unreadable, nothing is trusted."""
        try:
            return decode(read_file(self.file, TRUST_BYTES_MAX), dict[str, str])
        except (FileNotFoundError, UnreadableFile, msgspec.MsgspecError, UnicodeDecodeError):
            return {}

    def is_trusted(self, file: Path, content: bytes) -> bool:
        return self.known().get(_name(file)) == digest_of(content)

    def add(self, contents: Mapping[Path, bytes]) -> None:
        """Trust these contents; raises OSError."""
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
    """A path as JSON text; bytes that are not UTF-8 are escaped."""
    return str(file).encode(errors="backslashreplace").decode()
