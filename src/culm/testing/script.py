"""The script of a `ModelServer`: its replies, and the selection of a reply for a request.

Owns the format, which is the same in JSON and in Python, and the selection. `dialects.py`
encodes an answer for a provider's clients; `answering.py` sends it.
"""

import math
import re
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from culm.errors import InvalidRequest
from culm.wire.codec import Json, encode

TOKENS_MAX = 1_000_000  # An unstreamed answer of this size still fits in memory.
LINE_BYTES_MAX = 64 << 20
# Only the server can set the headers of message framing.
FRAMING_HEADERS = {"connection", "content-length", "transfer-encoding"}


class ScriptedUsage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens that the provider reports."""

    input: int = 0  # Without those read from or written to a cache.
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0


class ScriptedCall(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool call of the model."""

    name: str
    # An object, or text to send unchanged, which allows invalid JSON.
    input: dict[str, Json] | str = field(default_factory=dict[str, Json])
    id: str | None = None  # None: a unique one is generated.

    @property
    def arguments(self) -> str:
        return self.input if isinstance(self.input, str) else encode(self.input).decode()


class Reply(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One answer. A *delta* is one piece of reasoning, text or arguments."""

    text: str = ""  # Streamed in pieces, split at spaces.
    deltas: list[str] = field(default_factory=list[str])  # The text in exactly these pieces.
    tokens: int = 0  # The text consists of this many short pieces: "tok0 tok1 …".
    rate: float = 0.0  # Deltas per second; 0: as fast as the client reads.
    stamp: bool = False  # Every piece of the text carries `time.monotonic_ns()`: "@123456789 ".
    reasoning: str = ""  # Streamed like the text, before it.
    calls: list[ScriptedCall] = field(default_factory=list[ScriptedCall])  # After the text.
    interleave: bool = False  # The pieces of the calls' arguments take turns.
    usage: ScriptedUsage | UnsetType | None = UNSET  # Absent: a plausible count; None: not sent.
    finish: str = ""  # A stop reason of culm, or any other value to send; "": as `calls` require.
    # An answer without a stream, if the status is not 200 or there is a body.
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict[str, str])  # Of any answer.
    body: str = ""  # Sent unchanged; "": an error in the format of the provider.
    # Faults. A number beyond the last delta means: after all deltas, before the end.
    delay_s: float = 0.0  # Before the first byte.
    hold_after: int | None = None  # Wait until `release()`, or until the client leaves.
    stall_after: int | None = None  # Send nothing more until the client leaves.
    cut_after: int | None = None  # Close the connection in the middle.
    malformed_after: int | None = None  # Send one event that is not JSON, and continue.
    error_after: int | None = None  # Send the provider's error event, and end.
    unknown_event: bool = False  # After the first delta, send an event of an unknown type.
    long_line_bytes: int = 0  # Begin the text with a delta in a line of this many bytes.

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise ValueError(problem)

    @property
    def is_plain(self) -> bool:
        """True if the answer is a status and a body rather than a model's answer."""
        return self.status != 200 or bool(self.body)

    @property
    def finish_reason(self) -> str:
        return self.finish or ("tool_use" if self.calls else "end_turn")


class ReplyRule(Struct, frozen=True, forbid_unknown_fields=True):
    """An answer for requests that contain the text `when`."""

    when: str
    reply: Reply
    times: int | None = None  # How often the rule can be used; None: always.


class Script(Struct, frozen=True, forbid_unknown_fields=True):
    """First the rules; then the replies in order, one per request; then always `otherwise`."""

    replies: list[Reply] = field(default_factory=list[Reply])
    rules: list[ReplyRule] = field(default_factory=list[ReplyRule])
    otherwise: Reply | None = None


class Player:
    """Selects the reply for each request, in order of arrival."""

    def __init__(self, script: Script) -> None:
        self._replies = deque(script.replies)
        self._rules = script.rules
        self._used = [0] * len(script.rules)  # The number of uses of each rule.
        self._otherwise = script.otherwise

    def add(self, reply: Reply) -> None:
        """Append to the replies that are given in order."""
        self._replies.append(reply)

    def find_reply(self, text: Callable[[], str]) -> Reply | None:
        """The reply for a request with this text, or None if the script is exhausted."""
        if self._rules:  # Most scripts have none, and then the text is not needed.
            asked = text()
            for n, rule in enumerate(self._rules):
                if (rule.times is None or self._used[n] < rule.times) and _occurs(rule.when, asked):
                    self._used[n] += 1
                    return rule.reply
        return self._replies.popleft() if self._replies else self._otherwise


def parse_script(data: bytes) -> Script:
    """Parse a script from JSON; raises `InvalidRequest` with the position of the error."""
    try:
        return msgspec.json.decode(data, type=Script)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise InvalidRequest(
            f"invalid script: {exc}", hint="see docs/testing.md for the format"
        ) from exc


def read_script(path: Path) -> Script:
    """Read a script from a file; raises `InvalidRequest`."""
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise InvalidRequest(f"cannot read the script {path}: {exc.strerror}") from exc
    return parse_script(data)


def _occurs(when: str, request: str) -> bool:
    """True if `when` is in the JSON text, written as JSON or as plain text."""
    return when in request or encode(when)[1:-1].decode() in request


def _problems(reply: Reply) -> Iterator[str]:
    """Contradictions and invalid values in a reply."""
    if bool(reply.text) + bool(reply.deltas) + bool(reply.tokens) > 1:
        yield "`text`, `deltas` and `tokens` exclude each other: use one of them"
    if not 0 <= reply.tokens <= TOKENS_MAX:
        yield f"`tokens` must be from 0 to {TOKENS_MAX}"
    if not 0 <= reply.long_line_bytes <= LINE_BYTES_MAX:
        yield f"`long_line_bytes` must be from 0 to {LINE_BYTES_MAX}"
    if not 0 <= reply.rate < math.inf:
        yield "`rate` must be a number of deltas per second, or 0 for no limit"
    if not 0 <= reply.delay_s < math.inf:
        yield "`delay_s` must not be negative"
    if not 200 <= reply.status <= 599:
        yield "`status` must be from 200 to 599"
    for name in ("hold", "stall", "cut", "malformed", "error"):
        after: int | None = getattr(reply, f"{name}_after")
        if after is not None and after < 0:
            yield f"`{name}_after` must be a number of deltas"
    for name, value in reply.headers.items():
        if name.lower() in FRAMING_HEADERS:
            yield f"the header `{name}` is set by the server"
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            yield f"the header `{name}` cannot be sent"


_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e]*")
