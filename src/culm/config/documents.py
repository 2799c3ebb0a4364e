"""Configuration that clients set through the config routes: one document per user and workspace.

A document is a JSON object in a file of its own. People may edit the file too, so an edit keeps
their comments and the order of keys. Editing and showing a document are pure functions;
`DocumentFile` owns the file. `sources.py` reads the files that people write themselves.
"""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import cast

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from culm.config import jsonc
from culm.config.checking import Document
from culm.config.schema import ProjectFile
from culm.errors import ConfigDamaged, DataUnusable, InvalidRequest, Rejected, TooLarge
from culm.files import UnreadableFile, locked, read_file, replace_file
from culm.wire.codec import Json, clean, encode, fit, spelled_as
from culm.wire.config import Config, SelectedModel

log = logging.getLogger(__name__)

Edit = Callable[[Document], Document]  # Returns a new document and does not change its argument.

DOCUMENT_BYTES_MAX = 256 << 10
KEY_CHARS_MAX = 512
KEY_STEPS_MAX = 16
VALUE_DEPTH_MAX = 64
SHOWN_BYTES_MAX = 256 << 10  # Every workspace object contains the configuration.
RECENT_MAX = 5  # Recent models, which clients offer first.
CLOSE_S = 5.0
SCOPES = (0, 1)  # The user's document and the workspace's, as numbered on the wire.

_CHARACTER = re.compile(r"\\?.", re.DOTALL)  # A character of a key, with its backslash if escaped.


# --- edits


def set_key(key: str, value: Json) -> Edit:
    steps = _steps(key)
    _check_depth(value, VALUE_DEPTH_MAX)
    return lambda document: _with(document, steps, value, key)


def remove_key(key: str) -> Edit:
    """Remove a key; a missing key is not an error."""
    steps = _steps(key)
    return lambda document: _without(document, steps)


def select_model(model_type: str, model: SelectedModel) -> Edit:
    """Select a model and make it the first of the recent models of its type."""
    if model_type not in ("large", "small"):
        raise InvalidRequest("model_type must be large or small")
    chosen = cast("Document", msgspec.to_builtins(model))

    def edit(document: Document) -> Document:
        recent = fit(document, Config).recent_models.get(model_type, [])
        others = [m for m in recent if (m.provider, m.model) != (model.provider, model.model)]
        latest = [chosen, *msgspec.to_builtins(others)][:RECENT_MAX]
        document = _with(document, ["models", model_type], chosen, "models")
        return _with(document, ["recent_models", model_type], latest, "recent_models")

    return edit


def _check_depth(value: Json, depth: int) -> None:
    """Refuse a value that could be written but not read again."""
    if not depth:
        raise InvalidRequest(f"value may be nested at most {VALUE_DEPTH_MAX} deep")
    if isinstance(value, dict):
        value = list(cast("Document", value).values())
    if isinstance(value, list):
        for item in cast("list[Json]", value):
            _check_depth(item, depth - 1)


def step_of(name: str) -> str:
    """A name escaped for use as one step of a key."""
    return re.sub(r"([.\\])", r"\\\1", name)


def _steps(key: str) -> list[str]:
    """The names in a dotted path; a dot inside a name is written `\\.`."""
    if len(key) > KEY_CHARS_MAX:
        raise InvalidRequest(f"key may have at most {KEY_CHARS_MAX} characters")
    steps = [""]
    for character in _CHARACTER.findall(key):
        if character == ".":
            steps.append("")
        else:
            steps[-1] += character[-1]
    if not all(steps) or not 0 < len(steps) <= KEY_STEPS_MAX:
        raise InvalidRequest(f"key is not a dotted path of 1 to {KEY_STEPS_MAX} names: {key!r}")
    return spelled_as(steps, Config)


def _with(document: Document, steps: list[str], value: Json, key: str) -> Document:
    name, *rest = steps
    if not rest:
        return {**document, name: value}
    inner = document.get(name, {})
    if not isinstance(inner, dict):
        raise InvalidRequest(f"key {key!r} cannot be set: {name!r} is not an object")
    return {**document, name: _with(cast("Document", inner), rest, value, key)}


def _without(document: Document, steps: list[str]) -> Document:
    name, *rest = steps
    if name not in document:
        return document
    if not rest:
        return {key: value for key, value in document.items() if key != name}
    inner = document[name]
    if not isinstance(inner, dict):
        return document
    return {**document, name: _without(cast("Document", inner), rest)}


def rewritten(text: str, before: Document, after: Document, path: tuple[str, ...] = ()) -> str:
    """The text of `before`, changed only where `after` differs; raises `jsonc.Unwritable`."""
    for name in before.keys() - after.keys():
        text = jsonc.remove_value(text, (*path, name))
    for name, value in after.items():
        known = before.get(name)
        if isinstance(known, dict) and isinstance(value, dict):
            inner = cast("Document", known), cast("Document", value)
            text = rewritten(text, *inner, (*path, name))
        elif name not in before or known != value:
            text = jsonc.set_value(text, (*path, name), value)
    return text


# --- the configuration as sent to clients


def shown_config(document: Document, *, data_directory: str, debug: bool) -> Config:
    """A document as sent to clients; raises `InvalidRequest` if clients could not read it."""
    config = fit(document, Config)
    config.options = replace(
        config.options,
        data_directory=clean(data_directory),
        debug=debug,
        # Our clients send no metrics and do not use a model catalog of their own.
        disable_metrics=True,
        disable_provider_auto_update=True,
        disable_default_providers=True,
    )
    for selected in chain(config.models.values(), *config.recent_models.values()):
        selected.provider_options = UNSET  # It can contain anything, including a token.
    for provider in config.providers.values():
        provider.base_url = _without_secrets(provider.base_url)
    if len(encode(config)) > SHOWN_BYTES_MAX:
        raise TooLarge(f"the part shown to clients may have at most {SHOWN_BYTES_MAX} bytes")
    return config


def _without_secrets(url: str) -> str:
    """A URL without user info and query, which may contain a password or a key."""
    head, _, tail = url.partition("://")
    if not tail:
        return url.partition("?")[0]
    host, slash, path = tail.partition("?")[0].partition("/")
    return f"{head}://{host.rpartition('@')[2]}{slash}{path}"


# --- files


class DocumentFile:
    """One document and its file, which is replaced atomically and has mode 0600, as it holds keys.

    One thread reads and writes the file, so changes are serialized, and a change completes even if
    the client that asked for it disconnects. Created by `open_document`.
    """

    def __init__(self, file: Path) -> None:
        self.value: Document = {}  # As last read or written.
        self._file = file
        self._thread = ThreadPoolExecutor(1, f"culm-{file.name}")
        self._listeners: dict[Callable[[], None], None] = {}

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every change."""
        self._listeners[listener] = None

    def unlisten(self, listener: Callable[[], None]) -> None:
        self._listeners.pop(listener, None)

    def change(self, edit: Edit, check: Callable[[Document], object]) -> asyncio.Future[Document]:
        """Write the result of `edit` unless `check` raises for it, then notify the listeners.

        Both run in the document's thread, so they must have no side effects.
        """
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._thread, self._apply, edit, check)
        future.add_done_callback(self._notify)
        return future

    def _notify(self, future: "asyncio.Future[Document]") -> None:
        if not future.cancelled() and future.exception() is None:
            for listener in tuple(self._listeners):
                listener()

    def load(self) -> None:
        """Read the file; blocks. An unreadable file counts as empty and is left unchanged."""
        try:
            self.value = self._read()[1]
        except ConfigDamaged as exc:
            log.error("ignoring a document: %s", exc.message)

    def _apply(self, edit: Edit, check: Callable[[Document], object]) -> Document:
        try:
            with locked(self._file):
                # Read again: a person, or another server of the user, may have changed the file.
                text, before = self._read()
                value = edit(before)
                fit(value, ProjectFile)  # As `_read` does: what is written must be readable.
                check(value)
                data = rewritten(text, before, value).encode()
                if len(data) > DOCUMENT_BYTES_MAX:
                    raise TooLarge(f"the configuration may have at most {DOCUMENT_BYTES_MAX} bytes")
                replace_file(self._file.resolve(), data)
        except jsonc.Unwritable as exc:
            raise InvalidRequest(f"value cannot be stored: {exc}") from exc
        except OSError as exc:
            raise DataUnusable(str(self._file.parent), exc.strerror or str(exc)) from exc
        self.value = value
        return value

    def _read(self) -> tuple[str, Document]:
        """The text and its document; raises `ConfigDamaged` if it is not valid."""
        try:
            text = read_file(self._file, DOCUMENT_BYTES_MAX).decode()
        except FileNotFoundError:
            return "", {}
        except (UnreadableFile, UnicodeDecodeError) as exc:
            raise ConfigDamaged(str(self._file), str(exc)) from exc
        try:
            value = jsonc.parse(text)
            fit(value, ProjectFile)
        except (jsonc.InvalidJson, Rejected) as exc:
            raise ConfigDamaged(str(self._file), str(exc)) from exc
        if not isinstance(value, dict):
            raise ConfigDamaged(str(self._file), "it is not a JSON object")
        return text, cast("Document", value)

    async def close(self) -> None:
        """Finish pending changes, then stop the thread."""
        async with asyncio.timeout(CLOSE_S):
            await asyncio.to_thread(self._thread.shutdown)


@asynccontextmanager
async def open_document(file: Path) -> AsyncGenerator[DocumentFile]:
    document = DocumentFile(file)
    await asyncio.to_thread(document.load)
    try:
        yield document
    finally:
        await document.close()
