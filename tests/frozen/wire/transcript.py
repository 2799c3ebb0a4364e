"""The text form of the wire: readable, with stable names for values that differ in every run.

Owns the format of the files beside it. The exchanges are in `scenario.py`.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from culm.server.routes import BY_NOUN
from culm.wire.runs import RUN_HEADER
from tests.flow.drive import Answer, RawStream

HERE = Path(__file__).parent
LINE_MAX = 90
# Documents about the wire, which have their own tests.
UNSHOWN = ("/v1/openapi.json", "/v1/docs")
_HEADERS = ("cache-control", "connection", "culm-cursor", "transfer-encoding", "content-length")
_UUID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
_NUMBERED = {
    "cursor": re.compile(r"\b[0-9a-f]{12}\.[0-9]+\b"),
    "time": re.compile(r"\b1[78][0-9]{8}\b"),
    "instant": re.compile(r"\b202[0-9]-[0-9T:-]+(?:\.[0-9]+)?(?:Z|[+-][0-9:]+)"),
}
# Events that introduce an id, with its kind and its field.
_NAMED = {
    "session": ("session", "id"),
    "message": ("message", "id"),
    "file": ("file", "id"),
    "run_changed": ("run", "run_id"),
    "cancel_changed": ("cancel", "cancel_id"),
    "ask_changed": ("ask", "ask_id"),
    "question_changed": ("batch", "batch_id"),
    "grant_changed": ("grant", "id"),
    "agent_started": ("agent", "agent_id"),
    "letter_changed": ("letter", "letter_id"),
}
_BUILD = {
    "version": re.compile(r'(?<="version": ")[^"]+|(?<="build_id": "culm-)[^"]+'),
    "python": re.compile(r'(?<="go_version": "python)[^"]+'),
    "platform": re.compile(r'(?<="platform": ")[^"]+'),
}


@dataclass(frozen=True, slots=True)
class Exchange:
    method: str
    path: str  # Of the route, with its placeholders.
    target: str
    body: bytes
    answer: Answer


@dataclass(slots=True)
class Stream:
    """One event stream with all of its data."""

    view: str
    target: str
    raw: RawStream
    ended: bool = False  # By the server.


class Names:
    """Names for values that differ from run to run, numbered in order of appearance."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places  # Paths and addresses, each with its name.
        self._names: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    def know(self, value: str, kind: str) -> None:
        """Set the kind of an id; others are named `id`."""
        self._name(value, kind)

    def learn(self, stream: Stream) -> None:
        """Set the kinds of all ids in a stream, in their order."""
        for event in stream.raw.events():
            if event.type in _NAMED:
                kind, key = _NAMED[event.type]
                value = event.read(dict[str, object])[key]
                if isinstance(value, str) and _UUID.fullmatch(value):
                    self.know(value, kind)

    def hide(self, text: str) -> str:
        for place, word in self._places.items():
            text = text.replace(place, word)
        text = _UUID.sub(lambda m: self._name(m[0], "id"), text)
        for kind, pattern in _NUMBERED.items():
            text = pattern.sub(lambda m, k=kind: self._name(m[0], k), text)
        for kind, pattern in _BUILD.items():
            text = pattern.sub(f"<{kind}>", text)
        return text

    def _name(self, value: str, kind: str) -> str:
        if value not in self._names:
            self._counts[kind] += 1
            self._names[value] = f"<{kind} {self._counts[kind]}>"
        return self._names[value]


def render(
    names: Names, exchanges: Iterable[Exchange], streams: Iterable[Stream]
) -> dict[str, str]:
    """Return the text of every file, by path."""
    called: dict[tuple[str, str], list[str]] = {}
    for exchange in exchanges:
        text = _exchange(names, exchange)
        called.setdefault((exchange.method, exchange.path), []).append(text)
    files: dict[str, str] = {}
    for noun, routes in BY_NOUN.items():
        pieces: list[str] = []
        for route in routes:
            found = called.get((route.method, route.path), [])
            pieces += [f"=== {route.method} {route.path}\n", *found]
        files[f"routes/{noun}.txt"] = "\n".join(pieces)
    for view in ("crush", "delta"):
        found = [_stream(names, stream) for stream in streams if stream.view == view]
        files[f"events/{view}.txt"] = "\n".join(found)
    return files


def _exchange(names: Names, exchange: Exchange) -> str:
    answer = exchange.answer
    kind = answer.headers.get("content-type", "")
    shown = b"" if exchange.path in UNSHOWN else answer.body
    target = names.hide(exchange.target)
    there = [f"{exchange.method} {target}", *_lines(names, exchange.body)]
    run_id = answer.headers.get(RUN_HEADER.lower())
    named = [] if run_id is None else [f"{RUN_HEADER}: {names.hide(run_id)}"]
    back = [f"{answer.status} {kind}".rstrip(), *named, *_lines(names, shown)]
    return "".join([*(f"> {line}\n" for line in there), *(f"< {line}\n" for line in back)])


def _stream(names: Names, stream: Stream) -> str:
    raw = stream.raw
    found = [f"{name}: {raw.headers[name]}" for name in _HEADERS if name in raw.headers]
    head = [f"{raw.status} {raw.headers['content-type']}", *map(names.hide, found)]
    pieces = [f"=== GET {names.hide(stream.target)}\n", *(f"< {line}\n" for line in head), "\n"]
    for line in raw.seen.decode().splitlines():
        name, colon, value = line.partition(": ")
        # Data is one line on the wire; here it is wrapped.
        shown = _lines(names, value.encode()) if name == "data" else [names.hide(value)]
        pieces.append(f"{name}{colon}" + "\n".join(shown) + "\n")
    return "".join([*pieces, "(the server ends the stream)\n" if stream.ended else ""])


def _lines(names: Names, data: bytes) -> list[str]:
    if not data:
        return []
    try:
        value: object = json.loads(data)
    except ValueError:
        return names.hide(data.decode()).splitlines()
    return _pretty(names, "", value)


def _pretty(names: Names, head: str, value: object) -> list[str]:
    """Format JSON with short values on one line; `head` is the key before it, if any."""
    if isinstance(value, dict):
        fields = cast("dict[str, object]", value)  # Parsed from JSON.
        inner = [_pretty(names, f"{json.dumps(key)}: ", item) for key, item in fields.items()]
        opened, closed = "{}"
    elif isinstance(value, list):
        inner = [_pretty(names, "", item) for item in cast("list[object]", value)]
        opened, closed = "[]"
    else:
        return [names.hide(head + json.dumps(value, ensure_ascii=False))]
    if all(len(lines) == 1 for lines in inner):
        line = f"{head}{opened}{', '.join(lines[0] for lines in inner)}{closed}"
        if len(line) <= LINE_MAX:
            return [line]
    broken = [
        f"{line}{'' if n < len(lines) else ','}"
        for lines in inner
        for n, line in enumerate(lines, start=1)
    ]
    broken[-1] = broken[-1].removesuffix(",")
    return [f"{head}{opened}", *(f"  {line}" for line in broken), closed]


# --- content of the files


def kept() -> dict[str, str]:
    """Return the recorded files, by path."""
    found = sorted(HERE.rglob("*.txt"))
    return {path.relative_to(HERE).as_posix(): path.read_text() for path in found}


def routes_in(text: str) -> dict[str, list[int]]:
    """Return each called route with the statuses of its answers."""
    found: dict[str, list[int]] = {}
    for section in text.split("=== ")[1:]:
        statuses = re.findall(r"^< ([0-9]{3})\b", section, re.MULTILINE)
        found[section.partition("\n")[0]] = [int(status) for status in statuses]
    return found


def events_in(text: str) -> set[str]:
    return set(re.findall(r'^data: \{\s*"type": "(\w+)"', text, re.MULTILINE))


def parts_in(text: str) -> set[str]:
    return set(re.findall(r'"type": "(\w+)",[\s<]+"data": \{', text))
